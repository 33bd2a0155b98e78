/* The //@test sections of the model's ops on the GPU: lists that hold one node alone, without waits, over the same
 * inputs as on the CPU machine.  What the kernel leaves is compared with what the section expects and with what the
 * reference leaves.  Skips itself without a GPU. */
#include "refvm.c"

#include "ops/helper_cases.h"

#include "gpu/helper.h"
#include "op_tests.h"

#define NAME "ops on the GPU (" NMK_MODEL ")"

/* The node's tasks; they wait for nobody and tell nobody. */
static void only_node(int32_t *to, const int32_t *lists, const int32_t *first) {
    memset(to, 0, (size_t)NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS * sizeof *to);
    for (int s = 0; s < NMK_SMS; s++) {
        int32_t *d = to + (size_t)s * NMK_MAX_TASKS * NMK_DESC_WORDS;
        const int32_t *from = lists + (size_t)s * NMK_MAX_TASKS * NMK_DESC_WORDS;
        for (; from[0]; from += NMK_DESC_WORDS) {
            if (!same_node(first, from)) continue;
            memcpy(d, from, NMK_DESC_WORDS * sizeof *d);
            d[2] = d[4] = d[6] = -1;
            d += NMK_DESC_WORDS;
        }
    }
}

static int run_on_gpu(nmk_engine *g, const struct op_test *test, uint8_t *arena, int32_t *lists, nmk_err *e) {
    const size_t bytes = (size_t)NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS * sizeof *lists;
    const struct nmk_machine_calls *calls = g->machine->calls;
    uint64_t number;
    only_node(lists, g->lists, test->task);
    if (calls->write(g->machine, g->params.lists, lists, bytes, e)) return -1;
    if (calls->write(g->machine, g->params.arena, test->vm.arena, NMK_ARENA_BYTES, e)) return -1;
    if (nmk_engine_set_columns(g, test->control.column, e)) return -1;
    if (nmk_engine_queue_step(g, NMK_COLUMNS, &number, e)) return -1;
    /* not nmk_engine_wait_step: nobody samples */
    if (calls->wait_step(g->machine, number, NULL, 0, e)) return -1;
    return nmk_engine_read_arena(g, arena, e);
}

/* Elements of which the test says something, and that differ between the two arenas by more than the tolerance. */
static size_t differing(const struct op_test *test, double tolerance, const uint8_t *a, const uint8_t *b) {
    size_t wrong = 0;
    for (int k = 0; k < test->outputs; k++) {
        const struct op_output *o = &test->output[k];
        for (size_t i = 0; i < (size_t)o->buffer->bytes / (o->is_bf16 ? 2 : 4); i++) {
            const double x = element(o, a, i), y = element(o, b, i);
            wrong += !isnan(o->want[i]) && x != y && !(fabs(x - y) <= tolerance * fmax(1, fabs(y)));
        }
    }
    return wrong;
}

int main(void) {
    static struct op_test test;
    nmk_err e = {0};
    if (!op_cases[0].run) leave(NAME, "none has tests", true);
    nmk_engine *gpu = open_gpu(NAME, 256, 1u << 26);
    struct nmk_vm vm = {.lists = gpu->lists, .arena = xmalloc(NMK_ARENA_BYTES)};
    uint8_t *arena = xmalloc(NMK_ARENA_BYTES);
    int32_t *lists = xmalloc((size_t)NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS * sizeof *lists);
    vm.weights = xcalloc(NMK_WEIGHTS_KIB, 1024);
    for (const struct op_case *c = op_cases; c->run; c++)
        for (int pass = 0; pass < PASSES; pass++) {
            begin_case(&test, c, pass, &vm);
            if (test.on_sm) {
                printf("skip - op %s: %s: sets what an SM keeps to itself\n", c->op, c->name);
            } else if (test.why[0] || run_on_gpu(gpu, &test, arena, lists, &e) || run_on_cpu(&test)) {
                check(false, "op %s: %s: %s%s", c->op, c->name, test.why, e.text);
            } else {
                const size_t wrong = differing(&test, c->tolerance, arena, vm.arena);
                const int good = compare_case(&test, c->tolerance, arena);
                check(good && !wrong, "op %s: %s, %s: %zu elements differ from the reference%s%s", c->op, c->name,
                      pass ? "some columns live" : "all columns live", wrong, good ? "" : "; ", test.why);
            }
            end_case(&test);
        }
    free(lists), free(arena), free(vm.arena), free((void *)(uintptr_t)vm.weights);
    nmk_engine_close(gpu);
    return failures != 0;
}
