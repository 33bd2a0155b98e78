/* Prompts that go through prefill launches, on the CPU machine, against the same prompts through steps: keys and values
 * are the same up to rounding, and bit for bit the same however a prompt is cut into chunks, whoever shares them, and
 * in whatever order the SMs come to their tasks.  What a step then says is compared with transformers where
 * tests/models has that. */
#include <math.h>

#include "check.h"
#include "engine.h"
#include "json.h"

/* The toy has its checkpoint elsewhere, and no logits to compare with. */
#ifndef CHECKPOINT
#define CHECKPOINT "tests/models/" NMK_MODEL
#define TINY       1
#endif

enum {
    MAX_LEN = NMK_MAX_CONTEXT < 400 ? NMK_MAX_CONTEXT : 400,
    ROWS = 4,
    LAYERS = NMK_FULL_LAYERS + NMK_SLIDING_LAYERS
};
enum { DECODED, CUT, OTHER, SPARE }; /* rows */

/* Activations are rounded to bf16 in other places, and a near tie of experts is a step. */
static const double MOST_ERROR = NMK_EXPERTS || NMK_QK_NORM ? 0.04 : 0.02;

enum { ROW_PAGES = (MAX_LEN + NMK_PAGE_TOKENS - 1) / NMK_PAGE_TOKENS };

static nmk_engine *engine;
static struct nmk_vm vm; /* of the launches; weights, pages and tables are the engine's */
static int32_t *chunk;   /* struct nmk_chunk, which the abi.h of steps does not have */
static int32_t prompt[MAX_LEN];
static int tokens;

/* Some consecutive tokens of a row; pages hold what is before pos. */
typedef struct {
    const int32_t *token;
    int count, pos, row;
} span;

/* Pages of this test's own, with which the engine's steps go on too: none is given back when a window has passed. */
static int32_t table[ROWS * ROW_PAGES];
static uint16_t *pool[2];

static void stop(const char *what, const nmk_err *e) { printf("not ok - %s: %s\n", what, e->text), exit(1); }

/* K or V of a position: [head_dim] in the order of the machine's pages. */
static const uint16_t *kv(int row, int layer, int head, int is_v, int pos) {
    const int sliding = layer >= NMK_FULL_LAYERS, layers = sliding ? NMK_SLIDING_LAYERS : NMK_FULL_LAYERS;
    const size_t page = (size_t)table[row * ROW_PAGES + pos / NMK_PAGE_TOKENS];
    const size_t at =
        (page * (size_t)layers + (size_t)(sliding ? layer - NMK_FULL_LAYERS : layer)) * NMK_KV_HEADS + (size_t)head;
    return pool[sliding] + (at * 2 + (size_t)is_v) * NMK_PAGE_TOKENS * NMK_HEAD_DIM +
           pos % NMK_PAGE_TOKENS * NMK_HEAD_DIM;
}

static float value(uint16_t b) {
    const uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* The first layer and position where two rows differ, as text; NULL: nowhere up to position `end`. */
static const char *difference(int a, int b, int end) {
    static char text[96];
    for (int layer = 0; layer < LAYERS; layer++)
        for (int pos = 0; pos < end; pos++)
            for (int i = 0; i < 2 * NMK_KV_HEADS; i++)
                if (memcmp(kv(a, layer, i / 2, i % 2, pos), kv(b, layer, i / 2, i % 2, pos), NMK_HEAD_DIM * 2)) {
                    snprintf(text, sizeof text, "%s of kv layer %d differ at position %d", i % 2 ? "values" : "keys",
                             layer, pos);
                    return text;
                }
    return NULL;
}

/* |a - b| / |b| of the worst layer's keys or values. */
static double distance(int a, int b, int end) {
    double worst = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int is_v = 0; is_v < 2; is_v++) {
            double wrong = 0, all = 0;
            for (int pos = 0; pos < end; pos++)
                for (int i = 0; i < NMK_KV_HEADS * NMK_HEAD_DIM; i++) {
                    const int head = i / NMK_HEAD_DIM, dim = i % NMK_HEAD_DIM;
                    const double x = value(kv(a, layer, head, is_v, pos)[dim]);
                    const double y = value(kv(b, layer, head, is_v, pos)[dim]);
                    wrong += (x - y) * (x - y), all += y * y;
                }
            if (!(sqrt(wrong / all) <= worst)) worst = sqrt(wrong / all);
        }
    return worst;
}

/* A row begins: what its pages held before is far off. */
static void take(int row) {
    const size_t bytes[2] = {NMK_KV_PAGE_BYTES_FULL, NMK_KV_PAGE_BYTES_SLIDING};
    for (int i = row * ROW_PAGES; i < (row + 1) * ROW_PAGES; i++)
        for (int kind = 0; kind < 2; kind++)
            memset((uint8_t *)pool[kind] + (size_t)table[i] * bytes[kind], 0x45, bytes[kind]);
}

/* Positions from .. end - 1 of a row through steps of so many positions. */
static void step_through(int row, int from, int end, int at_once) {
    nmk_err e;
    for (int base = from; base < end; base += at_once) {
        nmk_column column[NMK_COLUMNS];
        for (int c = 0; c < NMK_COLUMNS; c++) {
            column[c] = nmk_column_idle();
            if (c < at_once && base + c < end)
                column[c] =
                    (nmk_column){.token = prompt[base + c], .pos = base + c, .base = base, .slot = row, .remaining = 1};
        }
        if (nmk_engine_step(engine, column, NULL, &e)) stop("step", &e);
    }
}

/* One launch, on buffers of NaN.  seed: the order of the SMs' tasks, by one thread; 0: two threads in any order.
 * Returns NULL, or the machine's message. */
static const char *launch(const span *part, int parts, uint64_t seed) {
    static char why[1024];
    nmk_span *of = (nmk_span *)(void *)((char *)chunk + nmk_prefill->chunk_spans_at);
    int32_t *token = (int32_t *)(void *)((char *)chunk + nmk_prefill->chunk_tokens_at), first = 0;
    memset(chunk, 0xff, nmk_prefill->control_bytes);
    for (int i = 0; i < parts; i++) {
        if (first + part[i].count > nmk_prefill->prefill_tokens) return "the test's chunk is too long";
        of[i] = (nmk_span){.first = first, .count = part[i].count, .pos = part[i].pos, .slot = part[i].row};
        memcpy(token + first, part[i].token, sizeof *token * (size_t)part[i].count);
        first += part[i].count;
    }
    chunk[0] = first, chunk[1] = parts;
    memset(vm.arena, 0xff, nmk_prefill->built_in->arena_bytes);
    vm.epoch++, vm.seed = seed, vm.threads = seed ? 1 : 2;
    return nmk_prefill->vm_step(&vm, why, sizeof why) ? why : NULL;
}

/* The same through launches of at most so many tokens.  Returns NULL, or the machine's message. */
static const char *launch_through(int row, int from, int end, int at_once, uint64_t seed) {
    const char *why = NULL;
    if (at_once > nmk_prefill->prefill_tokens) at_once = nmk_prefill->prefill_tokens;
    for (int pos = from; pos < end && !why; pos += at_once) {
        const span part = {prompt + pos, end - pos < at_once ? end - pos : at_once, pos, row};
        why = launch(&part, 1, seed ? seed + (uint64_t)pos : 0);
    }
    return why;
}

static void test_against_steps(void) {
    const char *why = launch_through(CUT, 0, tokens, MAX_LEN, 0);
    const double off = why ? NAN : distance(CUT, DECODED, tokens);
    check(!why && off < MOST_ERROR, NMK_MODEL ": keys and values as steps have them", "relative error %.4f; %s", off,
          why ? why : "");
    printf("# %d tokens, relative error %.4f\n", tokens, off);
}

static void test_cuts(void) {
    const int sizes[] = {1, 7, 64, 100};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        /* single tokens take long */
        const int end = tokens < 40 * sizes[i] ? tokens : 40 * sizes[i];
        char name[96];
        take(SPARE);
        const char *why = launch_through(SPARE, 0, end, sizes[i], 0);
        if (!why) why = difference(CUT, SPARE, end);
        snprintf(name, sizeof name, "%s: in chunks of %d the same bits", NMK_MODEL, sizes[i]);
        check(!why, name, "%s", why);
    }
}

static void test_orders(void) {
    const int end = tokens < 200 ? tokens : 200;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        char name[96];
        take(SPARE);
        const char *why = launch_through(SPARE, 0, end, 90, seed << 20);
        if (!why) why = difference(CUT, SPARE, end);
        snprintf(name, sizeof name, "%s: the same bits in order %d of the tasks", NMK_MODEL, (int)seed);
        check(!why, name, "%s", why);
    }
}

/* Three rows in one launch: the rest of one, the middle of another that a step goes on with, and a single token. */
static void test_shared(void) {
    const int a = tokens * 3 / 4, b = tokens / 3;
    const char *why;
    take(OTHER), take(SPARE);
    why = launch_through(OTHER, 0, a, MAX_LEN, 0);
    if (!why) why = launch_through(SPARE, 0, b, MAX_LEN, 0);
    const span parts[] = {
        {prompt + a, tokens - a, a, OTHER},
        {prompt + b, tokens - 2 - b, b, SPARE},
        {prompt, 1, 0, CUT},
    };
    if (!why) why = launch(parts, 3, 0);
    if (!why) why = difference(CUT, OTHER, tokens);
    if (!why) why = difference(CUT, SPARE, tokens - 2);
    check(!why, NMK_MODEL ": three rows in one launch, the same bits", "%s", why);
}

/* Steps and launches by turns. */
static void test_turns(void) {
    const int a = tokens / 3, b = tokens - 1;
    take(SPARE);
    step_through(SPARE, 0, a, NMK_COLUMNS);
    const char *why = launch_through(SPARE, a, b, 50, 0);
    if (!why) step_through(SPARE, b, tokens, 1);
    const double off = why ? NAN : distance(SPARE, DECODED, tokens);
    check(!why && off < MOST_ERROR, NMK_MODEL ": a launch goes on where a step ended, and a step after it",
          "relative error %.4f; %s", off, why ? why : "");
}

#if TINY
/* The logits of the last token, by a step on pages that launches filled, against transformers' (tests/models/golden.c). */
static void test_golden(const double *golden) {
    float logits[NMK_VOCAB];
    double wrong = 0, all = 0, mean[2] = {0};
    nmk_err e;
    take(SPARE);
    const char *why = launch_through(SPARE, 0, tokens - 1, MAX_LEN, 0);
    if (!why) {
        nmk_column column[NMK_COLUMNS];
        for (int c = 0; c < NMK_COLUMNS; c++) column[c] = nmk_column_idle();
        column[0] = (nmk_column){.token = prompt[tokens - 1],
                                 .pos = tokens - 1,
                                 .base = tokens - 1,
                                 .slot = SPARE,
                                 .flags = NMK_COLUMN_SAMPLES | NMK_COLUMN_LOGPROBS,
                                 .remaining = 1};
        int32_t out[NMK_COLUMNS];
        if (nmk_engine_step(engine, column, out, &e) ||
            nmk_engine_read(engine, "raw_logits", logits, 0, sizeof logits, &e))
            stop("step", &e);
        for (int i = 0; i < NMK_VOCAB; i++) mean[0] += (double)logits[i] / NMK_VOCAB, mean[1] += golden[i] / NMK_VOCAB;
        for (int i = 0; i < NMK_VOCAB; i++) {
            const double x = (double)logits[i] - mean[0], y = golden[i] - mean[1];
            wrong += (x - y) * (x - y), all += y * y;
        }
    }
    char name[96];
    const double off = sqrt(wrong / all);
    snprintf(name, sizeof name, "%s: logits after %d tokens as transformers has them", NMK_MODEL, tokens);
    check(!why && off < MOST_ERROR, name, "relative error %.4f; %s", off, why ? why : "");
    printf("# relative error %.4f\n", off);
}

static void test_prompts(void) {
    nmk_err e;
    static double golden[NMK_VOCAB];
    struct json_object *file = nmk_json_read(CHECKPOINT "/golden.json", 16 << 20, &e);
    if (!file) stop("golden", &e);
    struct json_object *list = nmk_json_get(file, "prompts");
    for (size_t i = 0; i < json_object_array_length(list); i++) {
        struct json_object *of = json_object_array_get_idx(list, i), *ids = nmk_json_get(of, "ids");
        struct json_object *numbers = nmk_json_get(of, "logits");
        tokens = (int)json_object_array_length(ids);
        for (int n = 0; n < tokens; n++) prompt[n] = json_object_get_int(json_object_array_get_idx(ids, (size_t)n));
        for (int n = 0; n < NMK_VOCAB; n++)
            golden[n] = json_object_get_double(json_object_array_get_idx(numbers, (size_t)n));
        test_golden(golden);
    }
    json_object_put(file);
}
#endif

static void *zeroed(size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p) abort();
    return p;
}

static void open_launches(const nmk_params *p) {
    nmk_err e;
    vm = (struct nmk_vm){
        .variant = nmk_prefill->built_in,
        .lists = nmk_variant_lists(nmk_prefill->built_in, nmk_prefill, &e),
        .weights = (const void *)(uintptr_t)p->weights,
        .arena = zeroed(nmk_prefill->built_in->arena_bytes),
        .kv_full = (void *)pool[0],
        .kv_sliding = (void *)pool[1],
        .chunk = zeroed(nmk_prefill->control_bytes),
        .table_full = table,
        .table_sliding = table,
        .table_stride = ROW_PAGES,
        .rope = (const void *)(uintptr_t)p->rope,
        .counters = zeroed((size_t)nmk_prefill->built_in->counters * NMK_COUNTER_WORDS * sizeof(uint32_t)),
        .tickets = zeroed((size_t)nmk_prefill->tickets * 2 * NMK_COUNTER_WORDS * sizeof(uint32_t)),
    };
    if (!vm.lists) stop("lists", &e);
    chunk = (int32_t *)(uintptr_t)vm.chunk;
}

int main(void) {
    nmk_err e = {""};
    nmk_options o = {.checkpoint = CHECKPOINT, .device = "cpu", .max_len = MAX_LEN, .kv_bytes = 256 << 20};
    if (nmk_engine_open(&engine, &o, &e)) stop("open", &e);
    nmk_params *p = &engine->params, own = *p;
    for (int i = 0; i < ROWS * ROW_PAGES; i++) table[i] = ROWS * ROW_PAGES - 1 - i;
    pool[0] = calloc(ROWS * ROW_PAGES + 1, NMK_KV_PAGE_BYTES_FULL);
    pool[1] = calloc(ROWS * ROW_PAGES + 1, NMK_KV_PAGE_BYTES_SLIDING + 1);
    p->kv_full = (uint64_t)(uintptr_t)pool[0], p->kv_sliding = (uint64_t)(uintptr_t)pool[1];
    p->table_full = p->table_sliding = (uint64_t)(uintptr_t)table, p->table_stride = ROW_PAGES;
    open_launches(p);
    tokens = MAX_LEN - 3;
    uint64_t random = 7;
    for (int i = 0; i < tokens; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        prompt[i] = (int32_t)((random >> 33) % NMK_VOCAB);
    }
    take(DECODED), take(CUT);
    step_through(DECODED, 0, tokens, NMK_COLUMNS);
    test_against_steps();
    test_cuts();
    test_orders();
    test_shared();
    test_turns();
#if TINY
    test_prompts();
#endif
    nmk_prefill->vm_close(&vm);
    *p = own;
    nmk_engine_close(engine);
    return failures != 0;
}
