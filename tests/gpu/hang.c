/* A step that can never end: the kernel gives up, the report names who waited for what, and the engine goes on.
 *
 * One task's threshold is raised out of reach in the lists on the GPU; patience is lowered so that the test takes no
 * seconds.  Skips itself without a GPU. */
#include "gpu/helper.h"

#define NAME "hangs (" NMK_MODEL ")"

static nmk_engine *gpu;

static int write_lists(const int32_t *lists, nmk_err *e) {
    return gpu->machine->calls->write(gpu->machine, gpu->params.lists, lists,
                                      sizeof(int32_t) * NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS, e);
}

/* A step of more columns than an MMA has the op's wide twin in its place. */
static bool is_op(int32_t opcode, const char *name) {
    const char *is = nmk_opcode_names[opcode];
    return opcode && (!strcmp(is, name) || (!strncmp(is, "wide_", 5) && !strcmp(is + 5, name)));
}

/* A task of the layer's first node with this op, on SM `sm` or the first behind it that has one; NULL: none has.
 * In a small model few SMs have a part in a node, and a layer may have an op twice. */
static int32_t *find(int32_t *lists, int sm, const char *op, int layer) {
    int32_t *found = NULL;
    for (int i = 0; i < NMK_SMS; i++) {
        int32_t *list = lists + (size_t)((sm + i) % NMK_SMS) * NMK_MAX_TASKS * NMK_DESC_WORDS;
        for (int t = 0; t < NMK_MAX_TASKS; t++) {
            int32_t *d = list + (size_t)t * NMK_DESC_WORDS;
            if (!is_op(d[NMK_WORD_OPCODE], op) || nmk_nodes[d[NMK_WORD_NODE]].layer != layer) continue;
            if (!found || d[NMK_WORD_NODE] < found[NMK_WORD_NODE]) found = d;
        }
    }
    return found;
}

/* Rows begin with pages as others left them, and a lost step leaves its own: what tokens depend on starts as zeros. */
static int wipe_rows(nmk_err *e) {
    for (int r = 0; r < NMK_COLUMNS; r++)
        if (nmk_engine_wipe_row(gpu, r, e)) return -1;
    return 0;
}

/* steps: queued, the later ones while the first one hangs. */
static void hang_case(const char *name, int sm, const char *op, int layer, const char *part, int steps) {
    const size_t words = (size_t)NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS;
    int32_t *broken = xmalloc(words * sizeof *broken), before[NMK_COLUMNS], after[NMK_COLUMNS];
    nmk_column column[NMK_COLUMNS];
    nmk_err e = {0}, hang = {0};
    memcpy(broken, gpu->lists, words * sizeof *broken);
    for (int n = 0; n < NMK_COLUMNS; n++) column[n] = nmk_column_idle();
    for (int r = 0; r < NMK_COLUMNS; r++) {
        if (nmk_engine_take_row(gpu, r, 200, &e)) goto out;
        column[r] = column_at(r, r, 100 + r);
    }
    if (wipe_rows(&e) || nmk_engine_step(gpu, column, before, &e)) goto out;
    int32_t *d = find(broken, sm, op, layer);
    if (!check(d && d[NMK_WORD_WAIT_A] >= 0, "%s: the task waits", name)) goto out;
    d[NMK_WORD_ARRIVALS_A] *= 2; /* a hint comes before all arrivals are in */
    const uint32_t patience_ms = gpu->params.patience_ms;
    gpu->params.patience_ms = 50;
    const uint64_t start_ns = nmk_now_ns();
    if (write_lists(broken, &e)) goto out;
    int rc = nmk_engine_set_columns(gpu, column, &e);
    if (rc == 0) rc = nmk_engine_run(gpu, steps, NMK_COLUMNS, NULL, NULL, &hang);
    check(rc == -1 && strstr(hang.text, part), "%s: reported in %.2f s: %s", name,
          1e-9 * (double)(nmk_now_ns() - start_ns), hang.text);
    gpu->params.patience_ms = patience_ms;
    if (write_lists(gpu->lists, &e) || wipe_rows(&e) || nmk_engine_step(gpu, column, after, &e)) goto out;
    check(!memcmp(before, after, sizeof after), "%s: the engine goes on with the same tokens", name);
out:
    if (e.text[0]) check(false, "%s: %s", name, e.text);
    for (int r = 0; r < NMK_COLUMNS; r++) nmk_engine_drop_row(gpu, r, &e);
    free(broken);
}

int main(void) {
    gpu = open_gpu(NAME, 512, 1u << 30);
    hang_case("a consumer", 5, "o_proj", 1, "layer1.combine", 1);
    hang_case("who merges", 7, "combine", 1, "layer1.attention", 1);
    hang_case("the first wait", 3, "norm", 0, "embed", 1);
    hang_case("the last wait", 1, "sample", -1, "draw", 1);
    hang_case("the first of six", 11, "attention", 1, "layer1.qkv", 6);
    hang_case("the end of the first of six", 1, "sample", -1, "draw", 6);
    nmk_engine_close(gpu);
    return failures != 0;
}
