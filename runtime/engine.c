/* The engine: a model on a machine, its rows, and the step loop.
 *
 * Always: a step's columns are on the machine before it, either queued by the host or left by the step before; the host
 * reads tokens of steps that ended while later ones run.  A row's numbers never depend on the other rows: a prompt is
 * cut into steps by its own positions alone, one prompt a step. */
#include "engine.h"

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config.h"
#include "cuda.h"
#include "hang.h"

/* That of one generation: engine->columns it is. */
#undef NMK_COLUMNS
#undef NMK_POSITIONS
#undef NMK_TICKETS

enum {
    MAX_LEN_DEFAULT = 256 << 10,
    STEPS_AHEAD_DEFAULT = 8,
    FLAGS = NMK_SMS * NMK_MASK_FLAGS, /* of the masks of one step */
    LINE_BYTES = 128                  /* a counter, a ticket and the abort flag have a cache line each */
};

static const double GPU_SHARE = 0.9; /* as vLLM takes */

_Static_assert(NMK_TOPS == NMK_TOP_LOGPROBS, "a step gives the alternatives that a request may ask for");
_Static_assert(sizeof((nmk_stats *)0)->stop_ids / sizeof(int) == NMK_STOP_IDS, "stop ids fit the statistics");

/* What is colder is greedy: its noise is below the rounding of the logits, and logits divided by it may overflow. */
static const float coldest = 1e-6f;

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* ---- opening ---- */

/* megakernel.cu and encoder.c come from one run of nmkgen: both carry its hash.  And all of a program's generations
 * find the same weights at the same places. */
static int check_hash(const nmk_generation *n, nmk_err *e) {
    const uint64_t hash = nmk_kernel_hash(n->kernel);
    if (hash != *n->hash)
        return nmk_fail(e, "megakernel.cu (%016llx) and encoder.c (%016llx) are not of one generation: build again",
                        (unsigned long long)hash, (unsigned long long)*n->hash);
    if (*n->weights_hash != *nmk_generations[0]->weights_hash)
        return nmk_fail(e, "the weights of %d columns and of %d are not packed alike: build again", n->columns,
                        nmk_generations[0]->columns);
    return 0;
}

/* The generation that the options ask for, and its schedule. */
static int choose_generation(nmk_engine *g, const nmk_options *o, nmk_err *e) {
    char all[128];
    if (o->max_batch < 0) return nmk_fail(e, "max_batch %d, expected 0 or more", o->max_batch);
    if (o->variant) {
        if (o->kernel) return nmk_fail(e, "a kernel and a variant, which brings its own: expected one of them");
        if (nmk_variant_open(&g->opened, &g->generation, o->variant, e)) return -1;
        g->variant = g->opened;
        if (o->max_batch > g->generation->columns)
            return nmk_fail(e, "%d sequences at once: the steps of the variant in %s hold %d", o->max_batch, o->variant,
                            g->generation->columns);
    } else {
        g->generation = nmk_generation_for(o->max_batch);
        nmk_generation_list(all, sizeof all);
        if (!g->generation)
            return nmk_fail(e, "%d sequences at once (--max-batch): this program was built with steps for %s",
                            o->max_batch, all);
        g->variant = g->generation->built_in;
    }
    g->columns = g->generation->columns;
    g->rows = o->max_batch ? o->max_batch : g->columns;
    assert(g->columns <= NMK_ROWS);
    return check_hash(g->generation, e);
}

typedef struct {
    float *table;
    int first, end;
} rope_part;

static void *fill_rope(void *argument) {
    const rope_part *part = argument;
    enum { HALF = NMK_HEAD_DIM / 2 };
    for (int pos = part->first; pos < part->end; pos++)
        for (int j = 0; j < HALF; j++) {
            float angle = (float)pos * nmk_rope_frequencies[j];
            float *pair = part->table + ((size_t)pos * HALF + (size_t)j) * 2;
            pair[0] = cosf(angle) * nmk_rope_scale, pair[1] = sinf(angle) * nmk_rope_scale;
        }
    return NULL;
}

/* [max_len][head_dim/2] pairs cos, sin; f32 throughout, as transformers computes it. */
static float *rope_table(int max_len) {
    enum { THREADS = 8 };
    float *table = xmalloc((size_t)max_len * NMK_HEAD_DIM * sizeof *table);
    rope_part part[THREADS];
    pthread_t thread[THREADS];
    bool started[THREADS];
    for (int i = 0; i < THREADS; i++) {
        part[i] =
            (rope_part){table, (int)((int64_t)max_len * i / THREADS), (int)((int64_t)max_len * (i + 1) / THREADS)};
        started[i] = pthread_create(&thread[i], NULL, fill_rope, &part[i]) == 0;
        if (!started[i]) fill_rope(&part[i]);
    }
    for (int i = 0; i < THREADS; i++)
        if (started[i]) pthread_join(thread[i], NULL);
    return table;
}

/* The number after "cuda:" (0 after "cuda"), or -1. */
static int gpu_index(const char *device) {
    if (!strcmp(device, "cuda")) return 0;
    if (strncmp(device, "cuda:", 5) || device[5] < '0' || device[5] > '9') return -1;
    char *end;
    long index = strtol(device + 5, &end, 10);
    return *end || index > INT_MAX ? -1 : (int)index;
}

static int open_machine(nmk_engine *g, const nmk_options *o, nmk_err *e) {
    const char *device = o->device && *o->device ? o->device : "auto";
    int index = 0;
    if (!strcmp(device, "cpu")) return nmk_cpu_machine_open(&g->machine, g->generation, g->variant, o, e);
    if (!strcmp(device, "auto")) {
        int count = 0;
        if (nmk_cuda_load(e) || nmk_cuda.cuDeviceGetCount(&count) || count == 0) {
            if (e) e->text[0] = 0;
            return nmk_cpu_machine_open(&g->machine, g->generation, g->variant, o, e);
        }
    } else if ((index = gpu_index(device)) < 0) {
        return nmk_fail(e, "device %s: expected auto, cpu or cuda:N", device);
    }
    return nmk_gpu_machine_open(&g->machine, index, g->generation, g->variant, o, e);
}

static int upload(nmk_machine *m, uint64_t *address, const void *data, uint64_t bytes, const char *what, nmk_err *e) {
    if (m->calls->alloc(m, address, bytes, what, e)) return -1;
    return m->calls->write(m, *address, data, bytes, e);
}

/* All that may be taken on the machine. */
static uint64_t allowed_bytes(const nmk_machine *m, const nmk_options *o) {
    double share = o->memory_share > 0 ? o->memory_share : m->on_gpu ? GPU_SHARE : 1;
    return (uint64_t)(share * (double)m->memory_bytes);
}

/* A little of what is free stays so: page tables come after this, and drivers round up. */
static uint64_t kv_budget(nmk_machine *m, const nmk_options *o) {
    uint64_t allowed = allowed_bytes(m, o), free_bytes = m->calls->free_bytes(m);
    if (!m->on_gpu && !(o->memory_share > 0)) return free_bytes / 2;
    return min_u64(allowed > m->taken_bytes ? allowed - m->taken_bytes : 0, free_bytes / 50 * 49);
}

static int open_kv(nmk_engine *g, const nmk_options *o, nmk_err *e) {
    nmk_machine *m = g->machine;
    nmk_kv_shape shape = {.full_layers = NMK_FULL_LAYERS,
                          .sliding_layers = NMK_SLIDING_LAYERS,
                          .kv_heads = NMK_KV_HEADS,
                          .head_dim = NMK_HEAD_DIM,
                          .window = NMK_WINDOW,
                          .columns = g->columns,
                          .page_tokens = NMK_PAGE_TOKENS};
    assert(nmk_kv_page_bytes(&shape, 0) == NMK_KV_PAGE_BYTES_FULL);
    assert(nmk_kv_page_bytes(&shape, 1) == NMK_KV_PAGE_BYTES_SLIDING);
    uint64_t budget = kv_budget(m, o);
    if (o->kv_bytes) budget = min_u64(budget, o->kv_bytes);
    if (nmk_kv_init(&g->kv, &shape, g->rows, g->max_len, budget, e)) return nmk_fail_in(e, "%s", m->name);
    g->stats.kv_bytes = nmk_kv_pool_bytes(&g->kv, 0) + nmk_kv_pool_bytes(&g->kv, 1);
    uint64_t table_bytes = sizeof(int32_t) * (uint64_t)g->rows * (uint64_t)g->kv.stride;
    uint64_t *pool[2] = {&g->params.kv_full, &g->params.kv_sliding};
    uint64_t *table[2] = {&g->params.table_full, &g->params.table_sliding};
    for (int k = 0; k < 2; k++) {
        uint64_t bytes = nmk_kv_pool_bytes(&g->kv, k);
        if (m->calls->alloc(m, pool[k], bytes ? bytes : 1, "keys and values", e)) return -1;
        if (m->calls->alloc(m, table[k], table_bytes, "page tables", e)) return -1;
    }
    g->params.table_stride = g->kv.stride;
    return 0;
}

static int open_lists(nmk_engine *g, nmk_err *e) {
    const size_t words = (size_t)NMK_SMS * (size_t)g->variant->max_tasks * NMK_DESC_WORDS;
    if (!(g->lists = nmk_variant_lists(g->variant, g->generation, e))) return -1;
    return upload(g->machine, &g->params.lists, g->lists, words * sizeof *g->lists, "task lists", e);
}

static uint64_t counters_bytes(const nmk_variant *v) { return (uint64_t)v->counters * LINE_BYTES; }
static uint64_t tickets_bytes(const nmk_generation *n) { return (uint64_t)n->tickets * 2 * LINE_BYTES; }

/* What every kind of launch has for itself. */
static int open_launch(nmk_machine *m, nmk_params *p, const nmk_generation *n, const nmk_variant *v, nmk_err *e) {
    if (m->calls->alloc(m, &p->arena, v->arena_bytes, "activations", e)) return -1;
    if (m->calls->alloc(m, &p->counters, counters_bytes(v), "counters", e)) return -1;
    return m->calls->alloc(m, &p->tickets, tickets_bytes(n), "tickets", e);
}

static int open_prefill(nmk_engine *g, const nmk_options *o, nmk_err *e) {
    nmk_machine *m = g->machine;
    nmk_params *p = &g->prefill.params;
    const nmk_generation *n = o->no_prefill ? NULL : nmk_prefill;
    if (!n) return 0;
    const uint64_t before = m->taken_bytes;
    const size_t words = (size_t)NMK_SMS * (size_t)n->built_in->max_tasks * NMK_DESC_WORDS;
    if (check_hash(n, e) || m->calls->load_chunks(m, n, o, e)) return -1;
    if (!(g->prefill.lists = nmk_variant_lists(n->built_in, n, e))) return -1;
    if (upload(m, &p->lists, g->prefill.lists, words * sizeof *g->prefill.lists, "task lists", e)) return -1;
    if (open_launch(m, p, n, n->built_in, e)) return -1;
    if (m->calls->alloc(m, &p->control, n->control_bytes, "a chunk of prompts", e)) return -1;
    p->hang = m->hang_address + sizeof *m->hang * NMK_HANGS;
    g->mixed = o->prefill_mode == NMK_PREFILL_MIXED;
    if (g->mixed && m->calls->load_mixed(m, g->variant, o, e)) return -1;
    g->prefill.block = xcalloc(1, n->control_bytes);
    g->prefill.generation = n;
    g->stats.prefill_bytes = m->taken_bytes - before;
    return 0;
}

/* No word of the buffers whose words tell that they are there is there. */
static int clear_exchange(nmk_engine *g, nmk_err *e) {
    enum { AT_ONCE = 1 << 18 };
    const uint64_t from = g->params.arena + g->variant->exchange_at, bytes = 2 * g->variant->exchange_bytes;
    if (bytes == 0) return 0;
    uint32_t *absent = xmalloc(AT_ONCE * sizeof *absent);
    int rc = 0;
    for (int i = 0; i < AT_ONCE; i++) absent[i] = NMK_ABSENT;
    for (uint64_t at = 0; at < bytes && rc == 0; at += AT_ONCE * sizeof *absent) {
        const uint64_t left = bytes - at, part = left < AT_ONCE * sizeof *absent ? left : AT_ONCE * sizeof *absent;
        rc = g->machine->calls->write(g->machine, from + at, absent, part, e);
    }
    free(absent);
    return rc;
}

static int open_state(nmk_engine *g, nmk_err *e) {
    nmk_machine *m = g->machine;
    nmk_params *p = &g->params;
    if (open_launch(m, p, g->generation, g->variant, e) || clear_exchange(g, e)) return -1;
    if (m->calls->alloc(m, &p->control, g->generation->control_bytes, "control block", e)) return -1;
    if (m->calls->alloc(m, &p->adjust, sizeof(nmk_adjust) * NMK_VOCAB * (uint64_t)g->rows, "adjustments of logits", e))
        return -1;
    if (m->calls->alloc(m, &p->masks_taken, sizeof(uint32_t) * NMK_MASK_WORDS * (uint64_t)g->columns, "masks", e))
        return -1;
    if (m->calls->alloc(m, &p->abort, LINE_BYTES, "abort flag", e)) return -1;
    float *rope = rope_table(g->max_len);
    int rc = upload(m, &p->rope, rope, (uint64_t)g->max_len * NMK_HEAD_DIM * sizeof *rope, "rope table", e);
    free(rope);
    if (rc) return -1;
    p->out = m->out_address, p->times = m->times_address, p->tops = m->tops_address, p->hang = m->hang_address;
    return nmk_engine_set_control(g, NULL, 0, e);
}

static int open_weights(nmk_engine *g, const nmk_checkpoint *checkpoint, const nmk_options *o, nmk_err *e) {
    nmk_machine *m = g->machine;
    uint64_t bytes = (uint64_t)NMK_WEIGHTS_KIB * 1024, start_ns = nmk_now_ns();
    uint64_t allowed = allowed_bytes(m, o);
    if (bytes > allowed || m->taken_bytes > allowed - bytes)
        return nmk_fail(e, "%s: the weights of %s take %.3f GiB, buffers %.3f GiB: only %.3f of %.3f GiB may be used",
                        m->name, nmk_model_name, (double)bytes / 0x1p30, (double)m->taken_bytes / 0x1p30,
                        (double)allowed / 0x1p30, (double)m->memory_bytes / 0x1p30);
    if (m->calls->alloc(m, &g->params.weights, bytes, "weights", e)) return -1;
    if (m->calls->load_weights(m, checkpoint, g->params.weights, o, e)) return -1;
    g->stats.weight_bytes = bytes;
    g->stats.weights_seconds = 1e-9 * (double)(nmk_now_ns() - start_ns);
    return 0;
}

/* Tokens of the longest sequence: memory may hold fewer pages of the full layers than max_len takes. */
static int longest_row(const nmk_engine *g) {
    int64_t held = (int64_t)g->kv.pages[0] * NMK_PAGE_TOKENS;
    return held < g->max_len ? (int)held : g->max_len;
}

/* What was opened, for people. */
static void fill_plan(nmk_engine *g) {
    nmk_machine *m = g->machine;
    nmk_stats *s = &g->stats;
    s->layers = NMK_LAYERS, s->experts = NMK_EXPERTS, s->experts_per_token = NMK_EXPERTS_PER_TOKEN;
    s->kv_pages[0] = g->kv.pages[0], s->kv_pages[1] = g->kv.pages[1], s->kv_page_tokens = NMK_PAGE_TOKENS;
    s->other_bytes = m->taken_bytes - s->weight_bytes - s->kv_bytes;
    s->memory_bytes = m->memory_bytes, s->free_bytes = m->calls->free_bytes(m);
    s->sms = m->sms, s->nominal_bytes_per_s = m->nominal_bytes_per_s;
    s->nvrtc_major = nmk_nvrtc.major, s->nvrtc_minor = nmk_nvrtc.minor;
}

void nmk_machine_progress(void *options, uint64_t done, uint64_t total) {
    const nmk_options *o = options;
    if (o->progress) o->progress(o->progress_user, NMK_PHASE_WEIGHTS, done, total);
}

/* How long one SM waits for another before the step counts as hung.  Tools that slow a GPU down need more. */
static uint32_t patience_ms(void) {
    const char *text = getenv("NMK_PATIENCE_MS");
    long long n = text ? strtoll(text, NULL, 10) : 0;
    return n > 0 && n < UINT32_MAX ? (uint32_t)n : 2000;
}

int nmk_engine_open(nmk_engine **engine, const nmk_options *o, nmk_err *e) {
    int rc = -1;
    uint64_t start_ns = nmk_now_ns();
    nmk_checkpoint *checkpoint = NULL;
    nmk_engine *g = xcalloc(1, sizeof *g);
    pthread_mutex_init(&g->mask_lock, NULL);
    if (choose_generation(g, o, e)) goto out;
    if (!o->checkpoint && !o->random_weights) {
        nmk_fail(e, "no weights: give a checkpoint folder or ask for random weights");
        goto out;
    }
    if (!(o->memory_share >= 0 && o->memory_share <= 1)) {
        nmk_fail(e, "a memory share of %g: expected above 0 to 1", o->memory_share);
        goto out;
    }
    g->vocab = NMK_VOCAB;
    g->max_len = o->max_len ? o->max_len : NMK_MAX_CONTEXT < MAX_LEN_DEFAULT ? NMK_MAX_CONTEXT : MAX_LEN_DEFAULT;
    if (g->max_len < 1 || g->max_len > NMK_MAX_CONTEXT) {
        nmk_fail(e, "a context of %d tokens: %s allows 1 to %d", g->max_len, nmk_model_name, NMK_MAX_CONTEXT);
        goto out;
    }
    if (o->checkpoint) {
        nmk_generation_config defaults;
        nmk_weight_tables tables = nmk_model_tables();
        if (nmk_config_check(o->checkpoint, nmk_configs, nmk_config_count, e)) goto out;
        if (nmk_generation_config_read(o->checkpoint, &defaults, e)) goto out;
        g->stop_count = defaults.eos_count;
        for (int i = 0; i < defaults.eos_count; i++) g->stop_ids[i] = defaults.eos[i];
        if (!o->random_weights && nmk_checkpoint_open(&checkpoint, o->checkpoint, &tables, e)) goto out;
    }
    if (open_machine(g, o, e)) goto out;
    g->steps_ahead = o->steps_ahead > 0 ? o->steps_ahead : STEPS_AHEAD_DEFAULT;
    if (g->steps_ahead > g->machine->most_ahead) g->steps_ahead = g->machine->most_ahead;
    nmk_engine_set_ring(g, o->ring_stages, o->in_flight);
    g->params.patience_ms = patience_ms();
    if (open_lists(g, e) || open_state(g, e) || open_prefill(g, o, e) || open_weights(g, checkpoint, o, e) ||
        open_kv(g, o, e))
        goto out;
    if (g->machine->calls->wait_all(g->machine, e)) goto out;

    g->stats.model = nmk_model_name, g->stats.device = g->machine->name, g->stats.on_gpu = g->machine->on_gpu;
    g->stats.columns = g->columns, g->stats.rows = g->rows;
    g->stats.prefill_tokens = nmk_engine_chunk_tokens(g);
    g->stats.max_len = longest_row(g), g->stats.vocab = g->vocab, g->stats.stop_count = g->stop_count;
    memcpy(g->stats.stop_ids, g->stop_ids, sizeof g->stop_ids);
    const nmk_jit_result *kernel = &g->machine->kernel[NMK_STEPS];
    g->stats.kernel_seconds = g->machine->kernel_seconds, g->stats.kernel_cached = kernel->cached;
    g->stats.registers = kernel->registers, g->stats.code_bytes = kernel->text_bytes;
    g->stats.spill_bytes = kernel->spill_store_bytes + kernel->spill_load_bytes;
    fill_plan(g);
    g->stats.open_seconds = 1e-9 * (double)(nmk_now_ns() - start_ns);
    *engine = g, g = NULL, rc = 0;
out:
    nmk_checkpoint_close(checkpoint);
    nmk_engine_close(g);
    return rc;
}

void nmk_engine_close(nmk_engine *g) {
    if (!g) return;
    nmk_machine *m = g->machine;
    if (m) {
        nmk_err ignored;
        const nmk_params *p = &g->params, *q = &g->prefill.params;
        uint64_t owned[] = {p->weights, p->arena,   p->kv_full,    p->kv_sliding,    p->lists,
                            p->control, p->rope,    p->table_full, p->table_sliding, p->counters,
                            p->tickets, p->abort,   p->adjust,     p->masks_taken,   q->arena,
                            q->lists,   q->control, q->counters,   q->tickets};
        if (m->calls->enter(m, &ignored) == 0 && m->calls->wait_all(m, &ignored) == 0)
            for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) m->calls->release(m, owned[i]);
        m->calls->close(m);
    }
    nmk_kv_free(&g->kv);
    free(g->lists), free(g->prefill.lists), free(g->prefill.block);
    nmk_variant_free(g->opened);
    pthread_mutex_destroy(&g->mask_lock);
    free(g);
}

void nmk_engine_stats(const nmk_engine *g, nmk_stats *stats) { *stats = g->stats; }

/* ---- rows and columns ---- */

/* Queued, so that steps in flight go on. */
int nmk_engine_send_row(nmk_engine *g, int row, nmk_err *e) {
    nmk_kv_row *r = &g->kv.row[row];
    uint64_t address[2] = {g->params.table_full, g->params.table_sliding};
    uint64_t first = (uint64_t)row * (uint64_t)g->kv.stride + (uint64_t)r->changed;
    uint64_t bytes = sizeof(int32_t) * (uint64_t)(r->changed_end - r->changed);
    for (int k = 0; k < 2; k++) {
        const uint8_t *from = (const uint8_t *)(g->kv.table[k] + first);
        for (uint64_t at = 0; at < bytes; at += NMK_QUEUED_BYTES)
            if (g->machine->calls->queue_write(g->machine, address[k] + sizeof(int32_t) * first + at, from + at,
                                               min_u64(bytes - at, NMK_QUEUED_BYTES), e))
                return -1;
    }
    r->changed = r->changed_end = 0;
    return 0;
}

static int take_row(nmk_engine *g, int row, int tokens, int launch, nmk_err *e) {
    if (nmk_kv_take(&g->kv, row, tokens, launch, e)) return -1;
    if (nmk_engine_send_row(g, row, e)) {
        nmk_kv_drop(&g->kv, row);
        return -1;
    }
    return 0;
}

int nmk_engine_take_row(nmk_engine *g, int row, int tokens, nmk_err *e) { return take_row(g, row, tokens, 0, e); }

int nmk_engine_drop_row(nmk_engine *g, int row, nmk_err *e) {
    nmk_kv_drop(&g->kv, row);
    g->kv.row[row].changed_end = g->kv.stride;
    return nmk_engine_send_row(g, row, e);
}

/* Pages next to each other are one piece of memory. */
int nmk_engine_wipe_row(nmk_engine *g, int row, nmk_err *e) {
    const nmk_kv *kv = &g->kv;
    uint64_t pool[2] = {g->params.kv_full, g->params.kv_sliding};
    for (int k = 0; k < 2; k++) {
        const int32_t *page = kv->table[k] + (size_t)row * (size_t)kv->stride;
        uint64_t bytes = nmk_kv_page_bytes(&kv->shape, k);
        int first, end = nmk_kv_entries(kv, row, k, &first);
        for (int p = first, n; p < end; p += n) {
            n = 1;
            if (kv->page[k][page[p]].refs > 1) continue;
            while (p + n < end && page[p + n] == page[p] + n && kv->page[k][page[p + n]].refs == 1) n++;
            if (g->machine->calls->fill(g->machine, pool[k] + bytes * (uint64_t)page[p], 0, bytes * (uint64_t)n, e))
                return -1;
        }
    }
    return 0;
}

/* ---- sampling ---- */

int nmk_sampler_check(const nmk_sampler *s, int vocab, nmk_err *e) {
    const struct {
        const char *name;
        float value, least, most;
    } number[] = {
        {"temperature", s->temperature, 0, FLT_MAX},
        {"top_p", s->top_p, 0, 1},
        {"min_p", s->min_p, 0, 1},
        {"presence_penalty", s->presence_penalty, -FLT_MAX, FLT_MAX},
        {"frequency_penalty", s->frequency_penalty, -FLT_MAX, FLT_MAX},
        {"repetition_penalty", s->repetition_penalty, 0, FLT_MAX},
    };
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        if (!(number[i].value >= number[i].least && number[i].value <= number[i].most))
            return nmk_fail(e, "%s %g, expected %s", number[i].name, (double)number[i].value,
                            number[i].most == 1    ? "0 to 1"
                            : number[i].least == 0 ? "0 or more"
                                                   : "a finite number");
    if (s->top_k < 0) return nmk_fail(e, "top_k %d, expected 0 or more", s->top_k);
    if (s->logprobs < 0 || s->logprobs > NMK_TOP_LOGPROBS + 1)
        return nmk_fail(e, "logprobs %d, expected 0 to %d", s->logprobs, NMK_TOP_LOGPROBS + 1);
    for (int i = 0; i < s->bias_count; i++) {
        if (s->bias[i].token < 0 || s->bias[i].token >= vocab)
            return nmk_fail(e, "logit_bias: token %d is not in 0 to %d", s->bias[i].token, vocab - 1);
        if (isnan(s->bias[i].bias))
            return nmk_fail(e, "logit_bias: the bias of token %d is no number", s->bias[i].token);
    }
    return 0;
}

static bool adjusts(const nmk_sampler *s) {
    return s->bias_count > 0 || s->presence_penalty != 0 || s->frequency_penalty != 0 ||
           (s->repetition_penalty != 0 && s->repetition_penalty != 1);
}

static int sampler_flags(const nmk_sampler *s) {
    int flags = NMK_COLUMN_SAMPLES | (adjusts(s) ? NMK_COLUMN_ADJUSTS : 0) | (s->logprobs ? NMK_COLUMN_LOGPROBS : 0) |
                (s->masked ? NMK_COLUMN_MASKED : 0);
    if (s->temperature < coldest) return flags;
    if (s->top_k > 0 && s->top_k < NMK_VOCAB) flags |= NMK_COLUMN_FILTERS | NMK_COLUMN_CUTS_K;
    if (s->top_p > 0 && s->top_p < 1) flags |= NMK_COLUMN_FILTERS | NMK_COLUMN_CUTS_P;
    return s->min_p > 0 ? flags | NMK_COLUMN_FILTERS : flags;
}

int nmk_engine_set_adjust(nmk_engine *g, int row, const nmk_sampler *s, const int32_t *prompt, int prompt_tokens,
                          const int32_t *generated, int generated_tokens, nmk_err *e) {
    if (!adjusts(s)) return 0;
    nmk_adjust *table = xcalloc(NMK_VOCAB, sizeof *table);
    for (int i = 0; i < s->bias_count; i++) table[s->bias[i].token].bias = s->bias[i].bias;
    for (int i = 0; i < prompt_tokens; i++) table[prompt[i]].seen |= NMK_SEEN_PROMPT;
    for (int i = 0; i < generated_tokens; i++) table[generated[i]].seen++;
    uint64_t bytes = sizeof *table * NMK_VOCAB;
    int rc = g->machine->calls->queue_write(g->machine, g->params.adjust + (uint64_t)row * bytes, table, bytes, e);
    free(table);
    return rc;
}

int nmk_engine_set_drawn(nmk_engine *g, int row, int32_t before, int32_t token, nmk_err *e) {
    static const nmk_adjust none;
    const nmk_bias bias = {token, 1e9f}; /* beyond any logit */
    if (before < 0) {
        const nmk_sampler sampler = {.bias = &bias, .bias_count = 1};
        return nmk_engine_set_adjust(g, row, &sampler, NULL, 0, NULL, 0, e);
    }
    const nmk_adjust drawn = {.bias = bias.bias};
    const uint64_t table = g->params.adjust + (uint64_t)row * sizeof drawn * NMK_VOCAB;
    nmk_machine *m = g->machine;
    return m->calls->queue_write(m, table + sizeof none * (uint64_t)before, &none, sizeof none, e) ||
                   m->calls->queue_write(m, table + sizeof drawn * (uint64_t)token, &drawn, sizeof drawn, e)
               ? -1
               : 0;
}

const nmk_logprobs *nmk_engine_logprobs(const nmk_engine *g, uint64_t number, int column, const nmk_sampler *s,
                                        nmk_logprobs *l) {
    if (!s->logprobs) return NULL;
    const nmk_tops *from = &g->machine->tops[number % NMK_OUT_RING * (uint64_t)g->columns + (uint64_t)column];
    *l = (nmk_logprobs){.chosen = from->chosen, .count = s->logprobs - 1};
    memcpy(l->id, from->id, sizeof l->id);
    memcpy(l->logprob, from->logprob, sizeof l->logprob);
    /* tokens that a mask leaves out are no alternatives */
    while (l->count && !(l->logprob[l->count - 1] > NMK_MASKED_LOGIT / 2)) l->count--;
    return l;
}

nmk_column nmk_column_idle(void) { return (nmk_column){.pos = -1}; }

nmk_column nmk_column_decode(const nmk_sampler *sampler, int c, int slot, int32_t token, int pos, int remaining) {
    return (nmk_column){.token = token,
                        .pos = pos,
                        .base = pos,
                        .group = c,
                        .slot = slot,
                        .flags = sampler_flags(sampler),
                        .remaining = remaining,
                        .temperature = sampler->temperature < coldest ? 0 : sampler->temperature,
                        .seed_lo = (uint32_t)sampler->seed,
                        .seed_hi = (uint32_t)(sampler->seed >> 32),
                        .top_k = sampler->top_k,
                        .top_p = sampler->top_p,
                        .min_p = sampler->min_p,
                        .presence = sampler->presence_penalty,
                        .frequency = sampler->frequency_penalty,
                        .repetition = sampler->repetition_penalty != 0 ? sampler->repetition_penalty : 1};
}

/* What the host knows of a column: it may have ended in a step whose token nobody has read yet. */
static void note_column(nmk_engine *g, int c, const nmk_column *column) {
    g->on[c].slot = column->pos >= 0 ? column->slot : -1;
    g->on[c].remaining = column->flags & NMK_COLUMN_SAMPLES ? column->remaining : INT_MAX;
    g->on[c].since = g->steps;
}

int nmk_engine_set_some_columns(nmk_engine *g, int first, int count, const nmk_column *column, nmk_err *e) {
    assert(first >= 0 && first + count <= g->columns);
    for (int i = 0; i < count; i++) note_column(g, first + i, column + i);
    return g->machine->calls->queue_write(g->machine, g->params.control + sizeof *column * (uint64_t)first, column,
                                          sizeof *column * (uint64_t)count, e);
}

int nmk_engine_set_columns(nmk_engine *g, const nmk_column *column, nmk_err *e) {
    return nmk_engine_set_some_columns(g, 0, g->columns, column, e);
}

/* nmk_control with as many columns as this generation has. */
int nmk_engine_set_control(nmk_engine *g, const int32_t *stop_ids, int stop_count, nmk_err *e) {
    const size_t columns_bytes = sizeof(nmk_column) * (size_t)g->columns;
    uint8_t *control = xcalloc(1, g->generation->control_bytes);
    nmk_column *column = (nmk_column *)(void *)control;
    assert(stop_count <= NMK_STOP_IDS);
    g->control_stops = stop_count;
    if (stop_count) memcpy(g->control_stop, stop_ids, sizeof *stop_ids * (size_t)stop_count);
    for (int c = 0; c < g->columns; c++) column[c] = nmk_column_idle(), note_column(g, c, &column[c]);
    if (stop_count) memcpy(control + columns_bytes, stop_ids, sizeof *stop_ids * (size_t)stop_count);
    const int32_t count = stop_count;
    memcpy(control + columns_bytes + sizeof(int32_t) * NMK_STOP_IDS, &count, sizeof count);
    int rc = g->machine->calls->queue_write(g->machine, g->params.control, control, g->generation->control_bytes, e);
    free(control);
    return rc;
}

int nmk_engine_get_columns(nmk_engine *g, nmk_column *column, nmk_err *e) {
    return g->machine->calls->read(g->machine, column, g->params.control, sizeof *column * (uint64_t)g->columns, e);
}

/* ---- steps ---- */

static int restart_launch(nmk_machine *m, nmk_params *p, const nmk_generation *n, const nmk_variant *v, nmk_err *e) {
    p->epoch = 0;
    if (m->calls->fill(m, p->counters, 0, counters_bytes(v), e)) return -1;
    return m->calls->fill(m, p->tickets, 0, tickets_bytes(n), e);
}

/* The pages of live rows are worth nothing then, so their owners have to begin anew. */
int nmk_engine_restart(nmk_engine *g, nmk_err *e) {
    nmk_machine *m = g->machine;
    const nmk_generation *n = g->prefill.generation;
    if (m->calls->wait_all(m, e) || restart_launch(m, &g->params, g->generation, g->variant, e) ||
        (n && restart_launch(m, &g->prefill.params, n, n->built_in, e)) || clear_exchange(g, e) ||
        m->calls->fill(m, g->params.abort, 0, LINE_BYTES, e) || m->calls->wait_all(m, e))
        return -1;
    memset((void *)(uintptr_t)m->hang, 0, sizeof *m->hang * NMK_LAUNCHES * NMK_HANGS);
    pthread_mutex_lock(&g->mask_lock);
    memset(m->masks_until, 0, sizeof *m->masks_until * NMK_MASK_RING * FLAGS);
    g->first_step = g->steps, g->step_epoch = 0;
    pthread_mutex_unlock(&g->mask_lock);
    return 0;
}

/* Their number is the engine's and the machine's. */
static void count_launch(nmk_engine *g, int launch, uint64_t *number) {
    pthread_mutex_lock(&g->mask_lock);
    g->step_epoch += launch == NMK_STEPS;
    g->epoch_of[g->steps % NMK_OUT_RING] = g->step_epoch;
    *number = g->steps++;
    pthread_mutex_unlock(&g->mask_lock);
}

static int not_queued(nmk_engine *g, nmk_err *e) {
    nmk_err second = {0};
    if (nmk_engine_restart(g, &second)) nmk_fail_in(e, "the engine is lost");
    return -1;
}

/* The parameters of the step that is launch `number`. */
static const nmk_params *next_step(nmk_engine *g, int live, uint64_t number) {
    nmk_params *p = &g->params;
    assert(live >= 0 && live <= g->columns);
    p->epoch++;
    p->out_row = (int32_t)(number % NMK_OUT_RING);
    const uint64_t slot = (uint32_t)p->epoch % NMK_MASK_RING;
    p->masks = g->machine->masks_address + slot * (uint64_t)g->columns * NMK_MASK_WORDS * sizeof *g->machine->masks;
    p->masks_until = g->machine->masks_until_address + slot * FLAGS * sizeof *g->machine->masks_until;
    p->in_flight = g->in_flight ? g->in_flight : g->variant->in_flight[live > 0 ? live - 1 : 0];
    /* The producer waits for what has landed by its place in the ring, so no more than the ring can be on its way. */
    if (p->in_flight > p->ring_stages) p->in_flight = p->ring_stages;
    for (int c = 0; c < g->columns; c++) {
        g->machine->out[p->out_row * g->columns + c] = NMK_NOT_WRITTEN;
        if (g->on[c].remaining != INT_MAX && --g->on[c].remaining <= 0) g->on[c].slot = -1;
    }
    return p;
}

int nmk_engine_queue_step(nmk_engine *g, int live, uint64_t *number, nmk_err *e) {
    if (g->machine->calls->queue_step(g->machine, NMK_STEPS, next_step(g, live, g->steps), e)) return not_queued(g, e);
    count_launch(g, NMK_STEPS, number);
    return 0;
}

/* ---- chunks ---- */

/* Keys are gathered in tiles (templates/prefill.c), at most all of a sequence. */
enum { KEY_TILE = 128 };

int nmk_engine_chunk_tokens(const nmk_engine *g) {
    return g->prefill.generation ? g->prefill.generation->prefill_tokens : 0;
}

int64_t nmk_engine_span_keys(int pos, int count) { return ((int64_t)pos + count + KEY_TILE - 1) / KEY_TILE * KEY_TILE; }

int nmk_engine_span_room(const nmk_engine *g, int pos, int64_t keys) {
    int64_t room = (g->prefill.generation->key_tokens - keys) / KEY_TILE * KEY_TILE - pos;
    return room < 0 ? 0 : room < nmk_engine_chunk_tokens(g) ? (int)room : nmk_engine_chunk_tokens(g);
}

/* The chunk block is written in pieces that a queued write takes. */
static int send_chunk(nmk_engine *g, uint64_t bytes, nmk_err *e) {
    for (uint64_t at = 0; at < bytes; at += NMK_QUEUED_BYTES)
        if (g->machine->calls->queue_write(g->machine, g->prefill.params.control + at, g->prefill.block + at,
                                           min_u64(bytes - at, NMK_QUEUED_BYTES), e))
            return -1;
    return 0;
}

/* A step and the one after it may want masks in the same column that are known at once, for sequences that change
 * places; so there is a ring of them, longer than two steps.  What is given only grows: a place that is used again is
 * not set back. */
void nmk_engine_give_mask(nmk_engine *g, int column, uint64_t number, const uint32_t *mask) {
    nmk_machine *m = g->machine;
    const size_t words = (NMK_VOCAB + 31) / 32;
    pthread_mutex_lock(&g->mask_lock);
    if (number >= g->first_step) { /* else it was given up */
        /* of the steps alone, as chunks count as steps: the next launch is one if it wants a mask */
        const uint32_t epoch = number < g->steps ? g->epoch_of[number % NMK_OUT_RING] : g->step_epoch + 1;
        const size_t slot = epoch % NMK_MASK_RING;
        uint32_t *to = m->masks + (slot * (size_t)g->columns + (size_t)column) * NMK_MASK_WORDS;
        uint32_t *until = m->masks_until + slot * FLAGS + column;
        if (mask) memcpy(to, mask, words * sizeof *mask);
        for (int sm = 0; sm < NMK_SMS; sm++, until += NMK_MASK_FLAGS)
            if ((int32_t)(epoch - *until) > 0) __atomic_store_n(until, epoch, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&g->mask_lock);
}

/* Queues what the spans' tokens are; *p: the parameters of the chunk that is launch `number`. */
static int next_chunk(nmk_engine *g, const nmk_span *span, int spans, const int32_t *tokens, uint64_t number,
                      nmk_params *p, nmk_err *e) {
    const nmk_generation *n = g->prefill.generation;
    int32_t *head = (int32_t *)(void *)g->prefill.block;

    int64_t keys = 0;
    int count = 0;
    assert(n && spans > 0 && spans <= n->spans);
    for (int i = 0; i < spans; i++) {
        assert(span[i].first == count && span[i].count > 0 && span[i].pos >= 0);
        count += span[i].count, keys += nmk_engine_span_keys(span[i].pos, span[i].count);
    }
    assert(count <= n->prefill_tokens && keys <= n->key_tokens);
    head[0] = count, head[1] = spans;
    memcpy(g->prefill.block + n->chunk_spans_at, span, sizeof *span * (size_t)spans);
    memcpy(g->prefill.block + n->chunk_tokens_at, tokens, sizeof *tokens * (size_t)count);
    if (send_chunk(g, n->chunk_tokens_at + sizeof *tokens * (size_t)count, e)) return -1;

    const nmk_params *own = &g->prefill.params;
    *p = g->params;
    p->arena = own->arena, p->lists = own->lists, p->control = own->control, p->counters = own->counters;
    p->tickets = own->tickets, p->hang = own->hang, p->trace = own->trace;
    p->epoch = ++g->prefill.params.epoch;
    p->ring_stages = p->in_flight = n->built_in->ring_stages;
    p->out_row = (int32_t)(number % NMK_OUT_RING);
    for (int c = 0; c < g->columns; c++) g->machine->out[p->out_row * g->columns + c] = -1;
    return 0;
}

int nmk_engine_queue_chunk(nmk_engine *g, const nmk_span *span, int spans, const int32_t *tokens, uint64_t *number,
                           nmk_err *e) {
    nmk_params p;
    if (next_chunk(g, span, spans, tokens, g->steps, &p, e)) return -1;
    if (g->machine->calls->queue_step(g->machine, NMK_CHUNKS, &p, e)) return not_queued(g, e);
    count_launch(g, NMK_CHUNKS, number);
    return 0;
}

/* In one launch the chunk comes after all that the step does with pages (gen/check/mixed.lua), as it would in a launch
 * of its own.  But what is queued for the chunk, tables and tokens, is there before the step: so no row may be in both.
 */
static int check_apart(const nmk_engine *g, const nmk_span *span, int spans, nmk_err *e) {
    for (int i = 0; i < spans; i++)
        for (int c = 0; c < g->columns; c++)
            if (g->on[c].slot == span[i].slot)
                return nmk_fail(e, "row %d is in a step and in the chunk of the same launch", span[i].slot);
    return 0;
}

int nmk_engine_queue_both(nmk_engine *g, int live, const nmk_span *span, int spans, const int32_t *tokens,
                          uint64_t *step, uint64_t *chunk, nmk_err *e) {
    nmk_params p;
    if (!g->mixed)
        return nmk_engine_queue_step(g, live, step, e) ? -1 : nmk_engine_queue_chunk(g, span, spans, tokens, chunk, e);
    if (check_apart(g, span, spans, e) || next_chunk(g, span, spans, tokens, g->steps + 1, &p, e)) return -1;
    if (g->machine->calls->queue_mixed(g->machine, next_step(g, live, g->steps), &p, e)) return not_queued(g, e);
    count_launch(g, NMK_STEPS, step), count_launch(g, NMK_CHUNKS, chunk);
    return 0;
}

/* Whether one of the launch's records is of who gave up first. */
static bool gave_up_first(const volatile nmk_hang hangs[NMK_HANGS], uint32_t word) {
    for (int i = 0; word && i < NMK_HANGS; i++)
        if (hangs[i].word == word) return true;
    return false;
}

/* A launch that gave up leaves records of waits for counters, or else only the word in `abort`, which is that of who
 * gave up first.  Launches behind it give up at their first long wait and leave records too. */
static int describe_hang(nmk_engine *g, nmk_err *e) {
    nmk_machine *m = g->machine;
    nmk_err second = {0};
    nmk_hang hang = {0};
    int count, chunk_count = 0;
    char text[600] = "the kernel gave up a step and did not say where";
    if (m->calls->wait_all(m, e)) return -1;
    if (m->calls->read(m, &hang.word, g->params.abort, sizeof hang.word, &second)) hang.word = 0;
    const volatile nmk_hang *root = nmk_hang_root(m->hang, &count), *chunk = NULL;
    const nmk_variant *v = g->variant;
    const int32_t *lists = g->lists;
    const char *part = "step";
    if (g->prefill.generation) chunk = nmk_hang_root(m->hang + NMK_HANGS, &chunk_count);
    if (chunk && (!root || (gave_up_first(m->hang + NMK_HANGS, hang.word) && !gave_up_first(m->hang, hang.word)))) {
        root = chunk, count = chunk_count;
        v = g->prefill.generation->built_in, lists = g->prefill.lists, part = "chunk";
    }
    if (!root && hang.word) root = &hang;
    if (root) nmk_hang_text(root, v, lists, text, sizeof text);
    if (root && g->mixed) snprintf(text + strlen(text), sizeof text - strlen(text), "; in the %s of its launch", part);
    if (count > 1) snprintf(text + strlen(text), sizeof text - strlen(text), "; %d waits in all", count);
    if (nmk_engine_restart(g, &second)) return nmk_fail(e, "%s; the engine is lost: %.300s", text, second.text);
    return nmk_fail(e, "%s", text);
}

/* Columns that ended by their tokens, if they have not begun anew since. */
static void note_ends(nmk_engine *g, uint64_t number, const int32_t *token) {
    for (int c = 0; c < g->columns; c++) {
        bool ends = false;
        for (int i = 0; i < g->control_stops; i++) ends |= token[c] == g->control_stop[i];
        if (ends && g->on[c].since <= number) g->on[c].slot = -1;
    }
}

int nmk_engine_wait_step(nmk_engine *g, uint64_t number, const int32_t **out, nmk_err *e) {
    nmk_machine *m = g->machine;
    assert(number < g->steps && g->steps - number <= NMK_OUT_RING);
    const int32_t *row = m->out + number % NMK_OUT_RING * (uint64_t)g->columns;
    if (m->calls->wait_step(m, number, row, g->columns, e)) return -1;
    bool whole = true;
    for (int c = 0; c < g->columns; c++) whole &= row[c] >= -1;
    if (!whole) return describe_hang(g, e);
    note_ends(g, number, row);
    if (out) *out = row;
    return 0;
}

int nmk_engine_step(nmk_engine *g, const nmk_column *column, int32_t *out, nmk_err *e) {
    uint64_t number;
    const int32_t *row;
    int live = 0;
    for (int c = 0; column && c < g->columns; c++) live += column[c].pos >= 0;
    if (g->machine->calls->enter(g->machine, e)) return -1;
    if (column && nmk_engine_set_columns(g, column, e)) return -1;
    if (nmk_engine_queue_step(g, live, &number, e) || nmk_engine_wait_step(g, number, &row, e)) return -1;
    if (out) memcpy(out, row, sizeof *out * (size_t)g->columns);
    return 0;
}

int nmk_engine_run(nmk_engine *g, int count, int live, double *ms, int32_t *out, nmk_err *e) {
    uint64_t first = g->steps, number;
    if (g->machine->calls->enter(g->machine, e)) return -1;
    for (int queued = 0, done = 0; done < count; done++) {
        while (queued < count && queued - done < g->steps_ahead) {
            if (nmk_engine_queue_step(g, live, &number, e)) return -1;
            queued++;
        }
        const int32_t *row;
        if (nmk_engine_wait_step(g, first + (uint64_t)done, &row, e)) return -1;
        if (ms) ms[done] = g->machine->calls->step_ms(g->machine, first + (uint64_t)done);
        if (out) memcpy(out + done * g->columns, row, sizeof *out * (size_t)g->columns);
    }
    return 0;
}

/* ---- generating ---- */

static int check_requests(const nmk_engine *g, const nmk_request *rq, int count, nmk_err *e) {
    if (count < 1 || count > g->rows) return nmk_fail(e, "%d prompts at once: 1 to %d are possible", count, g->rows);
    for (int r = 0; r < count; r++) {
        if (rq[r].prompt_tokens < 1) return nmk_fail(e, "prompt %d is empty", r + 1);
        if (rq[r].prompt_tokens >= g->max_len)
            return nmk_fail(e, "prompt %d has %d tokens: the context holds %d, answer included", r + 1,
                            rq[r].prompt_tokens, g->max_len);
        if (rq[r].max_tokens < 1)
            return nmk_fail(e, "prompt %d: max_tokens is %d, at least 1 is needed", r + 1, rq[r].max_tokens);
        if (nmk_sampler_check(&rq[r].sampler, g->vocab, e)) return nmk_fail_in(e, "prompt %d", r + 1);
        if (rq[r].sampler.masked) return nmk_fail(e, "prompt %d: nobody gives masks here", r + 1);
        for (int i = 0; i < rq[r].prompt_tokens; i++)
            if (rq[r].prompt[i] < 0 || rq[r].prompt[i] >= g->vocab)
                return nmk_fail(e, "prompt %d: token %d is not in 0 to %d", r + 1, rq[r].prompt[i], g->vocab - 1);
    }
    return 0;
}

/* The same in chunks, which take as many prompts as have room in them; at most `most` tokens of each. */
static int feed_chunks(nmk_engine *g, const nmk_request *rq, int count, int most, uint64_t first, nmk_err *e) {
    int rc = -1, *at = xcalloc((size_t)count, sizeof *at), r = 0;
    const int room = nmk_engine_chunk_tokens(g);
    int32_t *token = xmalloc(sizeof *token * (size_t)room);
    while (r < count) {
        nmk_span span[NMK_ROWS];
        int spans = 0, tokens = 0;
        int64_t keys = 0;
        uint64_t number;
        for (int i = r; i < count && spans < g->prefill.generation->spans && tokens < room; i++) {
            int n = rq[i].prompt_tokens - 1 - at[i], keys_room = nmk_engine_span_room(g, at[i], keys);
            if (n > room - tokens) n = room - tokens;
            if (n > most) n = most;
            if (n > keys_room) n = keys_room;
            if (n <= 0) continue;
            span[spans++] = (nmk_span){.first = tokens, .count = n, .pos = at[i], .slot = i};
            memcpy(token + tokens, rq[i].prompt + at[i], sizeof *token * (size_t)n);
            keys += nmk_engine_span_keys(at[i], n);
            at[i] += n, tokens += n;
        }
        if (spans) {
            if (nmk_engine_queue_chunk(g, span, spans, token, &number, e)) goto out;
            g->stats.prompt_steps++;
            uint64_t ahead = (uint64_t)g->steps_ahead;
            if (number + 1 >= first + ahead && nmk_engine_wait_step(g, number + 1 - ahead, NULL, e)) goto out;
        }
        while (r < count && at[r] == rq[r].prompt_tokens - 1) r++;
    }
    rc = 0;
out:
    free(at), free(token);
    return rc;
}

/* All but the last token of a prompt, `positions` a step, cut at multiples of that.  Waits for no step before
 * `first`: those of an earlier call may have been given up. */
static int feed_prompt(nmk_engine *g, int row, const nmk_request *rq, uint64_t first, nmk_err *e) {
    const int end = rq->prompt_tokens - 1, positions = g->generation->positions;
    for (int base = 0; base < end; base += positions) {
        nmk_column column[NMK_ROWS];
        int live = 0;
        for (int c = 0; c < g->columns; c++) {
            column[c] = nmk_column_idle();
            if (c >= positions || base + c >= end) continue;
            column[c].token = rq->prompt[base + c], column[c].pos = base + c, column[c].base = base;
            column[c].slot = row, column[c].remaining = 1, live++;
        }
        uint64_t number;
        if (nmk_engine_set_columns(g, column, e) || nmk_engine_queue_step(g, live, &number, e)) return -1;
        g->stats.prompt_steps++;
        uint64_t ahead = (uint64_t)g->steps_ahead;
        if (number + 1 >= first + ahead && nmk_engine_wait_step(g, number + 1 - ahead, NULL, e)) return -1;
    }
    return 0;
}

static bool is_stop(const nmk_engine *g, int32_t token) {
    for (int i = 0; i < g->stop_count; i++)
        if (g->stop_ids[i] == token) return true;
    return false;
}

typedef struct {
    nmk_engine *engine;
    nmk_request *rq;
    int count, live;
    int limit[NMK_ROWS]; /* tokens a row may generate */
    bool stops;
    nmk_token_fn on_token;
    void *user;
} batch;

static int longest(const batch *b) {
    int most = 0;
    for (int r = 0; r < b->count; r++)
        if (b->rq[r].finish == NMK_FINISH_NONE && b->limit[r] > most) most = b->limit[r];
    return most;
}

/* One step's tokens to the requests that still run. */
static int deliver(batch *b, uint64_t step, const int32_t *out, nmk_err *e) {
    nmk_engine *g = b->engine;
    for (int r = 0; r < b->count; r++) {
        nmk_request *rq = &b->rq[r];
        if (rq->finish != NMK_FINISH_NONE) continue;
        int32_t token = out[r];
        if (token < 0 || token >= g->vocab)
            return nmk_fail(e, "prompt %d: the step gave %d in place of a token", r + 1, token);
        rq->tokens++, g->stats.tokens++;
        if (b->stops && is_stop(g, token))
            rq->finish = NMK_FINISH_STOP;
        else if (rq->tokens == b->limit[r])
            rq->finish = NMK_FINISH_LENGTH;
        nmk_logprobs logprobs;
        if (b->on_token && b->on_token(b->user, r, token, nmk_engine_logprobs(g, step, r, &rq->sampler, &logprobs)) &&
            rq->finish == NMK_FINISH_NONE) {
            int32_t ended = -1; /* the machine stops the column too, a few steps later */
            uint64_t pos = g->params.control + sizeof(nmk_column) * (uint64_t)r + offsetof(nmk_column, pos);
            rq->finish = NMK_FINISH_CANCEL;
            g->on[r].slot = -1;
            if (g->machine->calls->queue_write(g->machine, pos, &ended, sizeof ended, e)) return -1;
        }
        if (rq->finish != NMK_FINISH_NONE) b->live--;
    }
    return 0;
}

static int decode(batch *b, nmk_err *e) {
    nmk_engine *g = b->engine;
    nmk_column column[NMK_ROWS];
    for (int r = 0; r < g->columns; r++) {
        column[r] = nmk_column_idle();
        if (r >= b->count) continue;
        const nmk_request *rq = &b->rq[r];
        int last = rq->prompt_tokens - 1;
        column[r] = nmk_column_decode(&rq->sampler, r, r, rq->prompt[last], last, b->limit[r]);
        if (nmk_engine_set_adjust(g, r, &rq->sampler, rq->prompt, rq->prompt_tokens, NULL, 0, e)) return -1;
    }
    if (nmk_engine_set_columns(g, column, e)) return -1;
    uint64_t first = g->steps, number;
    int queued = 0;
    for (int done = 0; b->live > 0; done++) {
        int most = longest(b);
        while (queued < most && queued - done < g->steps_ahead) {
            if (nmk_engine_queue_step(g, b->live, &number, e)) return -1;
            queued++;
        }
        const int32_t *out;
        const uint64_t step = first + (uint64_t)done;
        if (nmk_engine_wait_step(g, step, &out, e) || deliver(b, step, out, e)) return -1;
        g->stats.decode_steps++;
    }
    /* Steps queued past the end find no live column; they must be over before rows are given back. */
    return queued ? nmk_engine_wait_step(g, first + (uint64_t)queued - 1, NULL, e) : 0;
}

int nmk_engine_generate(nmk_engine *g, nmk_request *rq, int count, unsigned flags, nmk_token_fn on_token, void *user,
                        nmk_err *e) {
    int rc = -1, taken = 0, longest_prompt = 0;
    nmk_err second = {0};
    batch b = {.engine = g, .rq = rq, .count = count, .live = count, .on_token = on_token, .user = user};
    b.stops = !(flags & NMK_IGNORE_STOP);
    if (g->machine->calls->enter(g->machine, e)) return -1;
    if (check_requests(g, rq, count, e)) return -1;
    nmk_stats *s = &g->stats;
    s->prompt_tokens = s->prompt_steps = s->tokens = s->decode_steps = 0;
    s->prompt_seconds = s->decode_seconds = 0;
    for (int r = 0; r < count; r++) rq[r].tokens = 0, rq[r].finish = NMK_FINISH_NONE;
    for (int r = 0; r < count; r++) {
        int room = g->max_len - rq[r].prompt_tokens;
        b.limit[r] = rq[r].max_tokens < room ? rq[r].max_tokens : room;
        s->prompt_tokens += rq[r].prompt_tokens;
        if (rq[r].prompt_tokens - 1 > longest_prompt) longest_prompt = rq[r].prompt_tokens - 1;
    }
    /* The more tokens of a row a chunk has, the more pages its sliding layers take. */
    int most = nmk_engine_chunk_tokens(g) < longest_prompt ? nmk_engine_chunk_tokens(g) : longest_prompt;
    while (taken < count) {
        if (take_row(g, taken, rq[taken].prompt_tokens + b.limit[taken], most, e) == 0) {
            taken++;
            continue;
        }
        if (most <= g->columns) goto out;
        if (e) e->text[0] = 0;
        for (most /= 2; taken > 0;) nmk_kv_drop(&g->kv, --taken);
    }
    if (nmk_engine_set_control(g, g->stop_ids, b.stops ? g->stop_count : 0, e)) goto out;

    uint64_t start_ns = nmk_now_ns(), first = g->steps;
    if (nmk_engine_chunk_tokens(g)) {
        if (feed_chunks(g, rq, count, most > g->columns ? most : g->columns, first, e)) goto out;
    } else {
        for (int r = 0; r < count; r++)
            if (feed_prompt(g, r, &rq[r], first, e)) goto out;
    }
    if (g->steps - first > (uint64_t)g->steps_ahead) first = g->steps - (uint64_t)g->steps_ahead;
    for (; first < g->steps; first++)
        if (nmk_engine_wait_step(g, first, NULL, e)) goto out;
    uint64_t fed_ns = nmk_now_ns();
    s->prompt_seconds = 1e-9 * (double)(fed_ns - start_ns);
    if (decode(&b, e)) goto out;
    s->decode_seconds = 1e-9 * (double)(nmk_now_ns() - fed_ns);
    rc = 0;
out:
    if (rc && g->machine->calls->wait_all(g->machine, &second) == 0)
        for (int r = 0; r < taken; r++)
            if (nmk_engine_wipe_row(g, r, &second)) break;
    for (int r = 0; r < taken; r++) nmk_kv_drop(&g->kv, r);
    return rc;
}

/* ---- memory and knobs ---- */

static const nmk_buffer *find_buffer(const nmk_buffer *list, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, name)) return &list[i];
    return NULL;
}

const nmk_buffer *nmk_engine_buffer(const nmk_engine *g, const char *name) {
    return g->opened ? find_buffer(g->opened->buffers, g->opened->buffer_count, name)
                     : find_buffer(g->generation->buffers, *g->generation->buffer_count, name);
}

static int buffer_part(const nmk_engine *g, const char *name, uint64_t offset, uint64_t bytes, uint64_t *address,
                       nmk_err *e) {
    const nmk_buffer *b = nmk_engine_buffer(g, name);
    if (!b) return nmk_fail(e, "no buffer %s in %s", name, nmk_model_name);
    if (offset > (uint64_t)b->bytes || bytes > (uint64_t)b->bytes - offset)
        return nmk_fail(e, "buffer %s has %lld bytes: no %llu at %llu", name, (long long)b->bytes,
                        (unsigned long long)bytes, (unsigned long long)offset);
    *address = g->params.arena + (uint64_t)b->offset128 * 128 + offset;
    if ((uint64_t)b->offset128 * 128 >= g->variant->exchange_at && g->params.epoch & 1)
        *address += g->variant->exchange_bytes; /* the last step's copy */
    return 0;
}

int nmk_engine_read(nmk_engine *g, const char *buffer, void *dst, uint64_t offset, uint64_t bytes, nmk_err *e) {
    uint64_t address;
    if (buffer_part(g, buffer, offset, bytes, &address, e)) return -1;
    return g->machine->calls->read(g->machine, dst, address, bytes, e);
}

int nmk_engine_write(nmk_engine *g, const char *buffer, const void *src, uint64_t offset, uint64_t bytes, nmk_err *e) {
    uint64_t address;
    if (buffer_part(g, buffer, offset, bytes, &address, e)) return -1;
    return g->machine->calls->write(g->machine, address, src, bytes, e);
}

int nmk_engine_read_arena(nmk_engine *g, void *dst, nmk_err *e) {
    const nmk_variant *v = g->variant;
    if (g->machine->calls->read(g->machine, dst, g->params.arena, v->arena_bytes, e)) return -1;
    uint8_t *first = (uint8_t *)dst + v->exchange_at;
    if (g->params.epoch & 1) memcpy(first, first + v->exchange_bytes, v->exchange_bytes);
    memset(first + v->exchange_bytes, 0xff, v->exchange_bytes);
    return 0;
}

int nmk_engine_poison(nmk_engine *g, int byte, nmk_err *e) {
    return g->machine->calls->fill(g->machine, g->params.arena, byte, g->variant->exchange_at, e);
}

int nmk_engine_random_kv(nmk_engine *g, uint64_t seed, nmk_err *e) {
    nmk_machine *m = g->machine;
    uint64_t full = nmk_kv_pool_bytes(&g->kv, 0), sliding = nmk_kv_pool_bytes(&g->kv, 1);
    if (full && m->calls->random_kv(m, g->params.kv_full, full, seed, e)) return -1;
    return sliding ? m->calls->random_kv(m, g->params.kv_sliding, sliding, seed + 1, e) : 0;
}

void nmk_engine_set_ring(nmk_engine *g, int ring_stages, int in_flight) {
    const int most = g->variant->ring_stages;
    g->params.ring_stages = ring_stages > 0 && ring_stages < most ? ring_stages : most;
    g->in_flight = in_flight > 0 ? in_flight : 0;
}

void nmk_engine_force_experts(nmk_engine *g, const void *arena) { nmk_cpu_machine_force(g->machine, arena); }
