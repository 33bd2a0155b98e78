/* Launches that take prompts on the GPU, against the CPU machine: every buffer of them, of every layer where the model
 * keeps them apart, and the keys and values in the pages; then bit for bit however a prompt is cut into chunks, and again
 * and again.  The reference chooses experts by the GPU's router logits, which are compared too.  Skips itself without a
 * GPU, and where the model has no such launches.  Argument: repetitions (50). */
#include <ctype.h>

#include "bf16.h"
#include "gpu/helper.h"
#include "gpu/helper_pages.h"

#define NAME "prefill on the GPU (" NMK_MODEL ")"

enum {
    MOST_LEN = NMK_MAX_CONTEXT < 8192 ? NMK_MAX_CONTEXT : 8192,
    KINDS = 2,
    SPANS = 5,    /* of a case */
    POISON = 0x45 /* a number: what only pads the rows of an operand is multiplied by zeros */
};
static const double LIMIT = 1e-2;

static nmk_engine *gpu, *cpu;
static uint8_t *gpu_arena, *cpu_arena;
static uint64_t arena_bytes;

/* ---- buffers ---- */

enum form { F32, BF16, I32 };

static const struct {
    const char *base; /* the name without the layer, or x's number */
    enum form form;
} FORMS[] = {
    {"x", F32},         {"places", I32},  {"xn", BF16},      {"xn_rows", BF16}, {"q", BF16},
    {"keys", BF16},     {"values", BF16}, {"attn", BF16},    {"o", BF16},       {"logits", F32},
    {"choice", I32},    {"weight", F32},  {"counts", I32},   {"first", I32},    {"pair", I32},
    {"xn_pairs", BF16}, {"h", BF16},      {"dense_h", BF16}, {"mlp", BF16},
};

static int form_of(const char *name) {
    for (size_t k = 0; k < sizeof FORMS / sizeof *FORMS; k++) {
        const size_t n = strlen(FORMS[k].base);
        if (strncmp(name, FORMS[k].base, n)) continue;
        const char *rest = name + n + (name[n] == '_');
        while (isdigit((unsigned char)*rest)) rest++;
        if (!*rest) return (int)FORMS[k].form;
    }
    return -1;
}

/* Whether every layer has buffers of its own.  Else there are the last one's router logits alone, and the reference
 * chooses other experts at near ties. */
static bool apart(void) {
    for (int b = 0; b < *gpu->prefill.generation->buffer_count; b++)
        if (!strcmp(gpu->prefill.generation->buffers[b].name, "logits")) return false;
    return true;
}

/* Where the reference has written: all else is poison on both machines. */
static int written(const uint8_t *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != POISON) return 1;
    return 0;
}

/* The largest relative error of a buffer, or 1 where whole numbers differ. */
static double compare_arenas(bool verbose) {
    double most = 0;
    for (int b = 0; b < *gpu->prefill.generation->buffer_count; b++) {
        const nmk_buffer *buffer = &gpu->prefill.generation->buffers[b];
        const int form = form_of(buffer->name);
        const size_t bytes = form == BF16 ? 2 : 4, at = (size_t)buffer->offset128 * 128;
        distance d = {0};
        size_t compared = 0;
        if (form < 0) continue;
        for (size_t i = 0; i < (size_t)buffer->bytes / bytes; i++) {
            const uint8_t *g = gpu_arena + at + i * bytes, *c = cpu_arena + at + i * bytes;
            if (!written(c, bytes)) continue;
            compared++;
            if (form == BF16)
                add(&d, bf16(*(const uint16_t *)(const void *)g), bf16(*(const uint16_t *)(const void *)c));
            else if (form == F32)
                add(&d, *(const float *)(const void *)g, *(const float *)(const void *)c);
            else if (memcmp(g, c, 4))
                d.difference++, d.norm = 1;
        }
        const double off = form == I32 ? d.difference > 0 : relative(&d);
        if (compared && (verbose || !(off < LIMIT)))
            printf("#   %-12s %9zu compared, relative %.2e, worst %.2e\n", buffer->name, compared, off, d.worst);
        if (!(off <= most)) most = off;
    }
    return most;
}

/* ---- pages ---- */

/* K and V of the positions from .. end - 1 of a row, of the kind of layers: [layer][kv head][K, V][position][dim]. */
static uint16_t *pages_of(nmk_engine *g, int row, int sliding, int from, int end, size_t *count, nmk_err *e) {
    const int layers = sliding ? NMK_SLIDING_LAYERS : NMK_FULL_LAYERS, tokens = end - from;
    const size_t page_bytes = nmk_kv_page_bytes(&g->kv.shape, sliding), half = NMK_PAGE_TOKENS * NMK_HEAD_DIM;
    const uint64_t pool = sliding ? g->params.kv_sliding : g->params.kv_full;
    const uint64_t table = (sliding ? g->params.table_sliding : g->params.table_full) +
                           (uint64_t)row * (uint64_t)g->params.table_stride * sizeof(int32_t);
    *count = (size_t)layers * NMK_KV_HEADS * 2 * (size_t)tokens * NMK_HEAD_DIM;
    uint16_t *all = xmalloc(*count * 2 + 1), *page = xmalloc(page_bytes + 1);
    for (int p = from / NMK_PAGE_TOKENS; layers && p * NMK_PAGE_TOKENS < end; p++) {
        int32_t id;
        if (g->machine->calls->read(g->machine, &id, table + (uint64_t)p * sizeof id, sizeof id, e) ||
            g->machine->calls->read(g->machine, page, pool + (uint64_t)id * page_bytes, page_bytes, e))
            break;
        for (int h = 0; h < layers * NMK_KV_HEADS * 2; h++)
            for (int t = 0; t < NMK_PAGE_TOKENS; t++) {
                const int pos = p * NMK_PAGE_TOKENS + t;
                if (pos < from || pos >= end) continue;
                for (int d = 0; d < NMK_HEAD_DIM; d++)
                    all[((size_t)h * (size_t)tokens + (size_t)(pos - from)) * NMK_HEAD_DIM + (size_t)d] =
                        page[(size_t)h * half + (size_t)(g == gpu ? streamed(h & 1, t, d) : t * NMK_HEAD_DIM + d)];
            }
    }
    free(page);
    return all;
}

static double compare_pages(int row, int from, int end, nmk_err *e) {
    double most = 0;
    for (int sliding = 0; sliding < KINDS; sliding++) {
        size_t n;
        distance d = {0};
        uint16_t *g = pages_of(gpu, row, sliding, from, end, &n, e), *c = pages_of(cpu, row, sliding, from, end, &n, e);
        for (size_t i = 0; i < n; i++) add(&d, bf16(g[i]), bf16(c[i]));
        if (!(relative(&d) <= most)) most = relative(&d);
        free(g), free(c);
    }
    return most;
}

/* ---- launches ---- */

static int32_t token_of(int row, int pos) {
    return (int32_t)(((uint32_t)(row * 7919 + pos + 1) * 2654435761u >> 8) % NMK_VOCAB);
}

static int take(nmk_engine *g, int row, int tokens, nmk_err *e) {
    return nmk_kv_take(&g->kv, row, tokens, nmk_engine_chunk_tokens(g), e) || nmk_engine_send_row(g, row, e);
}

static int launch(nmk_engine *g, const nmk_span *span, int spans, nmk_err *e) {
    int32_t *token = xmalloc(sizeof *token * (size_t)nmk_engine_chunk_tokens(g));
    uint64_t number;
    for (int i = 0; i < spans; i++)
        for (int n = 0; n < span[i].count; n++) token[span[i].first + n] = token_of(span[i].slot, span[i].pos + n);
    const struct nmk_machine_calls *calls = g->machine->calls;
    int rc = calls->fill(g->machine, g->prefill.params.arena, POISON, arena_bytes, e) ||
                     nmk_engine_queue_chunk(g, span, spans, token, &number, e) ||
                     nmk_engine_wait_step(g, number, NULL, e) ||
                     calls->read(g->machine, g == gpu ? gpu_arena : cpu_arena, g->prefill.params.arena, arena_bytes, e)
                 ? -1
                 : 0;
    free(token);
    return rc;
}

/* ---- cases ---- */

typedef struct {
    const char *name;
    int spans;
    struct {
        int pos, count;
    } span[SPANS];
} chunk_case;

static void run_case(const chunk_case *c, bool verbose) {
    nmk_err e = {0};
    nmk_span span[SPANS];
    int tokens = 0, rows = 0;
    double buffers = NAN, pages = 0;
    for (int i = 0; i < c->spans; i++) {
        span[i] = (nmk_span){.first = tokens, .count = c->span[i].count, .pos = c->span[i].pos, .slot = i};
        tokens += span[i].count;
        if (span[i].pos + span[i].count > MOST_LEN) return;
    }
    if (tokens > nmk_engine_chunk_tokens(gpu)) return;
    for (; rows < c->spans; rows++) {
        const int end = span[rows].pos + span[rows].count;
        if (take(gpu, rows, end, &e) || take(cpu, rows, end, &e)) goto out;
    }
    if (copy_pool(gpu, cpu, 0, &e) || copy_pool(gpu, cpu, 1, &e) || launch(gpu, span, c->spans, &e)) goto out;
    if (NMK_EXPERTS) nmk_cpu_machine_force_chunks(cpu->machine, gpu_arena);
    if (launch(cpu, span, c->spans, &e)) goto out;
    buffers = compare_arenas(verbose);
    for (int i = 0; i < c->spans; i++) {
        const double off = compare_pages(i, span[i].pos, span[i].pos + span[i].count, &e);
        if (!(off <= pages)) pages = off;
    }
out:
    nmk_cpu_machine_force_chunks(cpu->machine, NULL);
    for (int r = 0; r < rows; r++) nmk_engine_drop_row(gpu, r, &e), nmk_engine_drop_row(cpu, r, &e);
    check(!e.text[0] && buffers < LIMIT && pages < LIMIT,
          NAME ", %s: largest relative error of buffers %.2e, of pages "
               "%.2e %s",
          c->name, buffers, pages, e.text);
}

/* Whether the row's pages hold the same bits as row 0's. */
static bool same_pages(int row, int end, nmk_err *e) {
    bool same = true;
    for (int sliding = 0; sliding < KINDS; sliding++) {
        size_t n;
        const int from = sliding && end > NMK_WINDOW ? end - NMK_WINDOW : 0;
        uint16_t *a = pages_of(gpu, 0, sliding, from, end, &n, e), *b = pages_of(gpu, row, sliding, from, end, &n, e);
        same &= !memcmp(a, b, n * 2);
        free(a), free(b);
    }
    return same;
}

/* Row 0 in chunks that are full, row 1 in those of `at_once`, beside a third one whose tokens change what experts do. */
static void run_cuts(int tokens, int at_once) {
    nmk_err e = {0};
    bool same = false;
    const int full = nmk_engine_chunk_tokens(gpu);
    int rows = 0;
    for (; rows < 3; rows++)
        if (take(gpu, rows, tokens, &e)) goto out;
    for (int pos = 0; pos < tokens; pos += full) {
        const nmk_span span = {.count = tokens - pos < full ? tokens - pos : full, .pos = pos, .slot = 0};
        if (launch(gpu, &span, 1, &e)) goto out;
    }
    for (int pos = 0; pos < tokens; pos += at_once) {
        const int count = tokens - pos < at_once ? tokens - pos : at_once;
        nmk_span span[] = {{.count = 3, .pos = pos / 2, .slot = 2},
                           {.first = 3, .count = count, .pos = pos, .slot = 1}};
        int32_t token[MOST_LEN];
        uint64_t number;
        for (int n = 0; n < 3; n++) token[n] = token_of(2, pos / 2 + n);
        for (int n = 0; n < count; n++) token[3 + n] = token_of(0, pos + n);
        if (nmk_engine_queue_chunk(gpu, span, 2, token, &number, &e) || nmk_engine_wait_step(gpu, number, NULL, &e))
            goto out;
    }
    same = same_pages(1, tokens, &e);
out:
    for (int r = 0; r < rows; r++) nmk_engine_drop_row(gpu, r, &e);
    check(!e.text[0] && same, NAME ", %d tokens in chunks of %d: %s %s", tokens, at_once,
          same ? "the same bits" : "other bits than whole", e.text);
}

static void run_again(int times) {
    nmk_err e = {0};
    const int tokens = nmk_engine_chunk_tokens(gpu) < MOST_LEN ? nmk_engine_chunk_tokens(gpu) : MOST_LEN;
    const nmk_span span = {.count = tokens};
    int done = 0, other = 0;
    uint8_t *first = xmalloc(arena_bytes);
    if (take(gpu, 0, tokens, &e)) goto out;
    for (; done < times; done++) {
        if (launch(gpu, &span, 1, &e)) break;
        if (!done) memcpy(first, gpu_arena, arena_bytes);
        /* what the reference does not write, such as rows behind the last, may hold anything */
        for (int b = 0; done && b < *gpu->prefill.generation->buffer_count; b++) {
            const nmk_buffer *buffer = &gpu->prefill.generation->buffers[b];
            const size_t at = (size_t)buffer->offset128 * 128;
            if (form_of(buffer->name) != F32) continue;
            other += memcmp(first + at, gpu_arena + at, (size_t)buffer->bytes) != 0;
        }
    }
    nmk_engine_drop_row(gpu, 0, &e);
out:
    free(first);
    check(!e.text[0] && done == times && !other, NAME ", %d tokens %d times: %d buffers with other bits %s", tokens,
          done, other, e.text);
}

int main(int argc, char **argv) {
    nmk_err e = {0};
    gpu = open_gpu(NAME, MOST_LEN, 1u << 29);
    if (!nmk_engine_chunk_tokens(gpu)) leave(NAME, "the model has no launches that take prompts", true);
    nmk_options o = test_options("cpu", MOST_LEN, 1u << 29);
    if (nmk_engine_open(&cpu, &o, &e) || nmk_engine_random_kv(gpu, 3, &e)) leave(NAME, e.text, false);
    arena_bytes = gpu->prefill.generation->built_in->arena_bytes;
    gpu_arena = xmalloc(arena_bytes), cpu_arena = xmalloc(arena_bytes);
    const int full = nmk_engine_chunk_tokens(gpu), window = NMK_WINDOW < MOST_LEN / 2 ? NMK_WINDOW : MOST_LEN / 2;
    const chunk_case cases[] = {
        {"one token", 1, {{0, 1}}},
        {"seven tokens", 1, {{0, 7}}},
        {"200 tokens", 1, {{0, 200}}},
        {"a whole chunk", 1, {{0, full < MOST_LEN ? full : MOST_LEN}}},
        {"the middle of a page", 1, {{100, 65}}},
        {"behind 1000 tokens", 1, {{1000, 129}}},
        {"before the window's end", 1, {{window - 40, 90}}},
        {"far behind the window", 1, {{window + 333, 150}}},
        {"at the end", 1, {{MOST_LEN - 65, 65}}},
        {"five rows", 5, {{0, 5}, {64, 64}, {0, 33}, {127, 1}, {window - 1, 100}}},
    };
    for (size_t i = 0; apart() && i < sizeof cases / sizeof *cases; i++) run_case(&cases[i], i == 2 || i == 9);
    run_cuts(full < 700 ? full : 700, 1), run_cuts(full < 700 ? full : 700, 7), run_cuts(full < 700 ? full : 700, 64);
    run_cuts(full + 77 < MOST_LEN ? full + 77 : MOST_LEN, 200);
    run_again(argc > 1 ? atoi(argv[1]) : 50);
    nmk_engine_close(gpu), nmk_engine_close(cpu);
    free(gpu_arena), free(cpu_arena);
    return failures != 0;
}
