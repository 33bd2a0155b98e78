/* The machine of runtime/refvm.h around this model's op references.
 *
 * Always holds: a task runs once, after its waits are met and after every earlier task of its walk; counters only grow.
 * Work that is claimed is really claimed, a unit at a time between the moves of other walks, and the machine sees to it
 * that every unit of a step is claimed, and once.
 * Not modelled: the ring, the job buffers, and that `load` runs ahead; those are SM-local and belong to the GPU. */
#include "refvm.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A model may lack the ops that need some of what follows. */
#pragma GCC diagnostic ignored "-Wunused-function"

enum { WORDS = NMK_DESC_WORDS, PAGE = NMK_PAGE_TOKENS, HEAD_DIM = NMK_HEAD_DIM };
/* Query heads of a kv head, by twos; floats of a partial of attention, without maxima and sums. */
enum { GROUP = NMK_HEADS / NMK_KV_HEADS, PAIRS = (GROUP + 1) / 2, SLOT_FLOATS = 2 * PAIRS * HEAD_DIM };

/* The router's answer as one SM knows it.  Two of them take turns, as on the GPU; `instance` is the one held. */
struct vm_route {
    int instance, active;
    int expert[NMK_EXPERT_SLOTS];                  /* ascending */
    float weight[NMK_EXPERT_SLOTS][NMK_COLUMNS];   /* 0: the column did not choose this expert */
    int row[NMK_EXPERT_SLOTS][NMK_COLUMNS];        /* of h, of an active expert and a column that chose it */
};

/* Running softmax of the GROUP query heads of one kv head, base 2. */
struct softmax {
    float scale[GROUP]; /* of the scores */
    float m[GROUP], l[GROUP], o[GROUP][HEAD_DIM];
};

/* Where a column's distribution is cut; templates/prelude.cuh says how. */
struct cut {
    float best;
    uint32_t prefix, limit;
    uint64_t target;
};

/* What an SM keeps to itself between tasks. */
struct vm_sm {
    int id;
    struct cut cut;
    struct vm_route route[2];
    float acc[16][NMK_COLUMNS];
#if NMK_X_KEPT
    float x[16][NMK_COLUMNS]; /* the SM's own rows of the residual */
#endif
#if NMK_COLUMNS <= 8
    uint16_t xn[NMK_COLUMNS][NMK_HIDDEN];
    float factor[NMK_COLUMNS]; /* of every product by it */
#endif
    int claimed, held; /* units that the present task has claimed; the one it has not computed yet, or -1 */
    struct softmax softmax; /* attention's, of the chunk it is at */
    char err[160];
};

/* ---- numbers ---- */

static inline float bf16_value(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Round to nearest even; NaN stays NaN. */
static inline uint16_t bf16_round(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if (f != f) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

typedef uint16_t u16x8 __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

/* Compiled twice, and chosen between when the program is loaded; not for TSan, which is not ready for calls by then. */
#ifdef __SANITIZE_THREAD__
#define CLONED
#else
#define CLONED __attribute__((target_clones("avx2", "default")))
#endif

/* Products and sums in f32, in one order whatever the machine: 32 running sums, so that a compiler can use any vector
 * width (and no fused multiply-add, which would change the bits). */
CLONED static float dot(const uint16_t *a, const uint16_t *b, int n)
{
    f32x8 sum[4] = {{0}, {0}, {0}, {0}};
    int i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; j++) {
            const u32x8 x = __builtin_convertvector(*(const u16x8 *)(a + i + 8 * j), u32x8) << 16;
            const u32x8 y = __builtin_convertvector(*(const u16x8 *)(b + i + 8 * j), u32x8) << 16;
            sum[j] += (f32x8)x * (f32x8)y;
        }
    const f32x8 all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = ((all[0] + all[4]) + (all[2] + all[6])) + ((all[1] + all[5]) + (all[3] + all[7]));
    for (; i < n; i++) total += bf16_value(a[i]) * bf16_value(b[i]);
    return total;
}

/* o[i] = o[i] * scale + sum over n rows of p[j] * row[j][i], for one head's output. */
CLONED static void accumulate(float *o, float scale, const float *p, const uint16_t *const *row, int n)
{
    for (int i = 0; i < HEAD_DIM; i += 8) {
        f32x8 sum = {0};
        for (int j = 0; j < n; j++) {
            const u32x8 v = __builtin_convertvector(*(const u16x8 *)(row[j] + i), u32x8) << 16;
            sum += (f32x8)v * p[j];
        }
        for (int k = 0; k < 8; k++) o[i + k] = o[i + k] * scale + sum[k];
    }
}

static inline float silu(float x)
{
    return x / (1.0f + expf(-x));
}

//@slot shared
/* The inner logarithm must be the accurate one: near u = 1 a fast one's absolute error is larger than the result. */
static float noise(nmk_noise k, int32_t id)
{
    return -logf(-logf(nmk_noise_uniform(k, id)));
}

float nmk_gumbel(uint32_t seed_lo, uint32_t seed_hi, int32_t pos, int32_t id)
{
    return noise(nmk_noise_key(seed_lo, seed_hi, pos), id);
}

/* ---- what the references reach ---- */

static inline int active(const struct nmk_vm *vm, int n)
{
    return vm->control->column[n].pos >= 0;
}

/* The schedule whose lists these are. */
static inline const nmk_variant *variant_of(const struct nmk_vm *vm)
{
    return vm->variant ? vm->variant : &nmk_built_in;
}

/* Of a buffer whose words tell that they are there, the step's copy. */
static inline void *buffer(const struct nmk_vm *vm, int32_t offset128)
{
    const nmk_variant *v = variant_of(vm);
    const size_t at = (size_t)offset128 * 128;
    return vm->arena + at + (at >= v->exchange_at && vm->epoch & 1 ? v->exchange_bytes : 0);
}

/* Row `row` of matrix `m` of an array of [rows][columns] matrices.  Each begins where its packed form begins, and that
 * is padded to 256 columns. */
static inline const uint16_t *weight_row(const struct nmk_vm *vm, int32_t kib, int m, int rows, int columns, int row)
{
    const size_t packed = (size_t)rows * (size_t)((columns + 255) / 256 * 256) * 2;
    return (const uint16_t *)(vm->weights + (size_t)kib * 1024 + (size_t)m * packed) + (size_t)row * (size_t)columns;
}

/* Page that holds `pos` of column c: [K|V][64][head_dim] of one layer and kv head. */
static inline uint16_t *kv_page(const struct nmk_vm *vm, const struct nmk_column *c, int pos, int sliding, int layers,
                                int layer, int kv_heads, int kv_head)
{
    const int32_t *table = sliding ? vm->table_sliding : vm->table_full;
    const size_t page = (size_t)table[c->slot * vm->table_stride + pos / PAGE];
    const size_t at = (page * (size_t)layers + (size_t)layer) * (size_t)kv_heads + (size_t)kv_head;
    return (uint16_t *)(sliding ? vm->kv_sliding : vm->kv_full) + at * (2 * PAGE * HEAD_DIM);
}

/* Waits until the host has given a column's mask for this step; false: it does not come. */
static int mask_given(const struct nmk_vm *vm, int n)
{
    for (int i = 0; i < 100000; i++) {
        if ((int)(__atomic_load_n(&vm->masks_until[n], __ATOMIC_ACQUIRE) - (uint32_t)vm->epoch) >= 0) return 1;
        if (i < 1000) sched_yield();
        else usleep(100);
    }
    return 0;
}

/* The pages a column sees, and how they are cut.  Depends on the column alone, never on its neighbours, so a row's bits
 * are the same in any batch. */
struct chunks {
    int lo;    /* first visible position */
    int first; /* its page */
    int pages; /* at least 1 */
    int count; /* of chunks, see chunk_page */
};

static struct chunks chunks_of(const struct nmk_vm *vm, const struct nmk_column *c, int sliding, int window)
{
    const nmk_variant *v = variant_of(vm);
    struct chunks s = {0};
    if (sliding && c->pos + 1 > window) s.lo = c->pos + 1 - window;
    s.first = s.lo / PAGE;
    s.pages = (c->base > s.lo ? (c->base - 1) / PAGE : s.first) - s.first + 1;
    const int all = s.pages + v->own_pages;
    const int few = (all + v->pages_per_chunk - 1) / v->pages_per_chunk;
    const int many = all / v->pages_per_long_chunk;
    s.count = few < v->chunks_min ? few : v->chunks_min;
    if (s.count < many) s.count = many;
    if (s.count > v->chunks_max) s.count = v->chunks_max;
    return s;
}

/* Page at which chunk i begins: the one before it ends there. */
static int chunk_page(const struct nmk_vm *vm, const struct chunks *s, int i)
{
    const int page = (s->pages + variant_of(vm)->own_pages) * i / s->count;
    return s->first + (page < s->pages ? page : s->pages);
}

/* Where a dim of a head is in a partial: in the order in which the device's warps hold it, see ops/attention.cu. */
static inline int part_float(int head, int dim)
{
    const int g = dim % 8, quad = ((dim / 16 * 4 + g / 2) * PAIRS + head / 2) * 2 + g % 2;
    return quad * 4 + dim % 16 / 8 * 2 + head % 2;
}

/* 1 / rms of a head, from the sums of squares of its row tiles. */
static float head_scale(const float *squares, float eps)
{
    float sum = 0;
    for (int i = 0; i < HEAD_DIM / 16; i++) sum += squares[i];
    return 1 / sqrtf(sum / HEAD_DIM + eps);
}

/* Most tokens that are taken in at once: of a turn of attention. */
enum { TURN_PAGES = 4, TURN_TOKENS = TURN_PAGES * PAGE + NMK_COLUMNS };

/* Takes in n tokens: their K and V rows.  As on the device, the exponentials are relative to a maximum, of these tokens
 * or (so_far) of all up to them, and go into the product rounded to bf16, but into the sum as they are. */
static void attend(struct softmax *s, const uint16_t *q, const uint16_t *const *k, const uint16_t *const *v, int n,
                   int so_far)
{
    if (n == 0) return;
    for (int h = 0; h < GROUP; h++) {
        float p[TURN_TOKENS], top = -1e30f, sum = 0;
        for (int j = 0; j < n; j++) {
            p[j] = dot(q + h * HEAD_DIM, k[j], HEAD_DIM) * s->scale[h];
            if (p[j] > top || p[j] != p[j]) top = p[j];
        }
        const float m = s->m[h] > top ? s->m[h] : top, old = exp2f(s->m[h] - m);
        if (so_far) top = m;
        const float fresh = exp2f(top - m);
        for (int j = 0; j < n; j++) {
            p[j] = exp2f(p[j] - top);
            sum += p[j];
            p[j] = bf16_value(bf16_round(p[j])) * fresh;
        }
        s->l[h] = s->l[h] * old + sum * fresh;
        s->m[h] = m;
        accumulate(s->o[h], old, p, v, n);
    }
}

/* One column's best candidate so far; ties go to the lower id. */
struct candidate {
    float value;
    int32_t id;
};

static inline void better(struct candidate *best, float value, int32_t id)
{
    if (value > best->value || (value == best->value && id < best->id)) best->value = value, best->id = id;
}

static void no_tops(struct candidate top[NMK_TOPS])
{
    for (int i = 0; i < NMK_TOPS; i++) top[i] = (struct candidate){-INFINITY, INT32_MAX};
}

/* Keeps the best NMK_TOPS, best first. */
static void offer(struct candidate top[NMK_TOPS], float value, int32_t id)
{
    struct candidate new = {-INFINITY, INT32_MAX};
    better(&new, value, id); /* NaN stays out */
    for (int i = 0; i < NMK_TOPS; i++) {
        struct candidate old = top[i];
        better(&top[i], new.value, new.id);
        if (top[i].id != old.id) new = old;
    }
}

/* What an SM does of the cutting: tokens first .. first + count of one of the columns that are cut, which take turns.
 */
struct share {
    int column, first, count;
};

static int share(const struct nmk_vm *vm, int sm, int vocab, struct share *mine)
{
    int column[NMK_COLUMNS], columns = 0;
    for (int n = 0; n < NMK_COLUMNS; n++)
        if (vm->filters >> n & 1) column[columns++] = n;
    if (columns == 0) return 0;
    const int turn = sm % columns, part = sm / columns, parts = (NMK_SMS - turn + columns - 1) / columns;
    mine->column = column[turn], mine->first = vocab / 16 * part / parts * 16;
    mine->count = vocab / 16 * (part + 1) / parts * 16 - mine->first;
    return 1;
}

/* A column's cut before its first digit.  cand: the best score of each SM, for the device's two storers. */
static void begin_cut(struct cut *cut, const struct nmk_column *c, const float *cand, int n)
{
    cut->best = -INFINITY;
    for (int i = 0; i < NMK_SMS * 2; i++)
        if (cand[i * NMK_COLUMNS + n] > cut->best) cut->best = cand[i * NMK_COLUMNS + n];
    cut->prefix = 0, cut->target = (uint64_t)c->top_k;
    cut->limit = c->min_p > 0 ? nmk_score_key(0, logf(c->min_p)) : NMK_KEY_MOST;
}

/* One digit more: the bin at which the target is reached; part of all that the bins hold, or 0: the target is known. */
static void narrow(struct cut *cut, const uint64_t bins[256], float part)
{
    uint64_t total = 0, before = 0;
    uint32_t bin = 0;
    for (int i = 0; i < 256; i++) total += bins[i];
    if (part > 0) cut->target = (uint64_t)((double)part * (double)total);
    if (cut->target > total) cut->target = total;
    if (cut->target < 1) cut->target = 1;
    while (bin < 255 && before + bins[bin] < cut->target) before += bins[bin++];
    cut->prefix = cut->prefix << 8 | bin, cut->target -= before;
}

static void end_cut(struct cut *cut)
{
    if (cut->prefix < cut->limit) cut->limit = cut->prefix;
    cut->prefix = 0;
}

static int fail(struct vm_sm *sm, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int fail(struct vm_sm *sm, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(sm->err, sizeof sm->err, format, args);
    va_end(args);
    return -1;
}

/* The routing instance that the task at d names, or NULL with sm->err when the SM holds another. */
static const struct vm_route *route_of(struct vm_sm *sm, const int32_t *d)
{
    const struct vm_route *r = &sm->route[d[7] & 1];
    if (r->instance == d[7]) return r;
    fail(sm, "reads routing %d while the SM holds %d", d[7], r->instance);
    return NULL;
}

/* ---- claimed work ---- */

enum { MORE = 1 }; /* of a reference: not the end of the task, its walk comes back */

/* What became of the units of a node that claims in this step. */
struct claims {
    _Atomic(const int32_t *) task; /* one of its tasks, or NULL: none has run */
    atomic_int units;
    atomic_short owner[NMK_CLAIM_UNITS]; /* 1 + the SM that has claimed it, or 0 */
};

static struct claims *claims_of(const struct nmk_vm *vm, int ticket);

static inline _Atomic uint32_t *ticket_at(const struct nmk_vm *vm, int ticket, int epoch)
{
    return (_Atomic uint32_t *)(vm->tickets + ((size_t)ticket * 2 + (epoch & 1)) * NMK_COUNTER_WORDS);
}

/* For a task that claims, of a node with so many units.  *unit: the one to compute now, or -1.  Returns what the op's
 * reference returns: MORE, 0 when nothing is left for the task, or -1.  A unit is claimed in one move of the walk and
 * computed in its next, so that others may find nothing left to claim while it is not computed yet. */
static int claim(struct nmk_vm *vm, struct vm_sm *sm, const int32_t *d, int ticket, int how, int rank, int units,
                 int *unit)
{
    *unit = sm->held, sm->held = -1;
    if (*unit >= 0) return MORE;
    const int rounds = nmk_claim_rounds(how, units, rank);
    int next = rank + sm->claimed * NMK_SMS;
    if (sm->claimed >= rounds) next = how == NMK_CLAIM_STATIC ? units : rounds * NMK_SMS;
    if (next < units && sm->claimed >= rounds) next += (int)atomic_fetch_add(ticket_at(vm, ticket, vm->epoch), 1);
    struct claims *c = claims_of(vm, ticket);
    const int32_t *other = atomic_exchange(&c->task, d);
    atomic_store(&c->units, units);
    if (other && (other[0] != d[0] || other[1] != d[1])) return fail(sm, "another node claims by ticket %d", ticket);
    if (next >= units) return sm->claimed = 0;
    sm->claimed++, sm->held = next;
    if (next < 0 || next >= NMK_CLAIM_UNITS) return fail(sm, "unit %d: a step has %d", next, NMK_CLAIM_UNITS);
    return atomic_exchange(&c->owner[next], (short)(sm->id + 1)) ? fail(sm, "unit %d is claimed twice", next) : MORE;
}
/* A row of weights times a column's normalised x: the SM's own, or, of more columns than an MMA takes, all SMs'. */
#if NMK_COLUMNS <= 8
#define TIMES_X(weights, n) (dot(weights, sm->xn[n], P.hidden) * sm->factor[n])
#else
#define TIMES_X(weights, n) dot(weights, (const uint16_t *)buffer(vm, t.xn) + (n) * P.hidden, P.hidden)
#endif

//@slot prefill

/* ---- ops ---- */

struct op {
    int arrivals; /* of one task at its counter */
    int help;     /* 1: belongs to the helper's walk */
    int optional; /* 1: only runs where a column wants it */
};

static const struct op op_table[] = {
    {0, 0, 0}, /* the end */
    //@slot table
};

enum { OPS = (int)(sizeof op_table / sizeof *op_table) };

//@slot ops

static int execute(struct nmk_vm *vm, struct vm_sm *sm, const int32_t *d)
{
    switch (d[0]) {
    //@slot dispatch
    }
    return fail(sm, "no such op");
}

/* ---- the machine ---- */

enum { RAN, BLOCKED, DONE, BROKEN };

struct walk {
    int sm, help;
    int next;   /* task index */
    int parked; /* next walk parked at the same counter, or -1 */
    int slow;   /* only moves when no other can; see step_seeded */
};

/* The walks parked at one counter, and the fewest arrivals that one of them waits for. */
struct lot {
    int first, arrivals;
};

enum { WALKS = 2 * NMK_SMS };

struct nmk_vm_state {
    struct vm_sm sm[NMK_SMS];
    int awake; /* optional tasks run in this step */
    struct walk walk[WALKS];
    struct claims claims[NMK_TICKETS];
    /* one thread only: walks that can move, slow ones apart, and those that wait for their SM; see move_seeded */
    int ready[2][WALKS], ready_count[2], shut[WALKS], shut_count, left;
    uint64_t random;
    /* the rest: workers only */
    int workers;
    atomic_char taken[WALKS]; /* by a worker, or done */
    atomic_int done;          /* walks at their end */
    atomic_uint version;      /* counts signals */
    atomic_int stop;          /* 1: give up */
    atomic_uint idle_at[NMK_VM_THREADS]; /* version + 1 at which a worker found nothing to do; see work() */
    int broken;                          /* walk that stopped on an error, or -1 */
    struct lot lot[];                    /* of each counter; one thread only */
};

static struct claims *claims_of(const struct nmk_vm *vm, int ticket)
{
    return &vm->state->claims[ticket];
}

static inline _Atomic uint32_t *counter(const struct nmk_vm *vm, int c)
{
    return (_Atomic uint32_t *)(vm->counters + (size_t)c * NMK_COUNTER_WORDS);
}

static inline const int32_t *task_at(const struct nmk_vm *vm, int sm, int index)
{
    return vm->lists + ((size_t)sm * (size_t)variant_of(vm)->max_tasks + (size_t)index) * WORDS;
}

/* Whether counter c has `arrivals` of every step so far, this one included. */
static inline int reached(const struct nmk_vm *vm, int c, int arrivals)
{
    const uint32_t target = (uint32_t)vm->epoch * (uint32_t)arrivals;
    return (int32_t)(atomic_load_explicit(counter(vm, c), memory_order_acquire) - target) >= 0;
}

static inline int wait_arrivals(const int32_t *d, int c)
{
    return d[2] == c ? d[3] : d[5];
}

/* Index (0 or 1) of the first wait of d that is not met, or -1. */
static int unmet(const struct nmk_vm *vm, const int32_t *d)
{
    for (int i = 0; i < 2; i++)
        if (d[2 + 2 * i] >= 0 && !reached(vm, d[2 + 2 * i], d[3 + 2 * i])) return i;
    return -1;
}

static int sane(const struct nmk_vm *vm, const int32_t *d)
{
    const int counters = variant_of(vm)->counters;
    if (d[0] < 0 || d[0] >= OPS) return 0;
    return d[2] < counters && d[4] < counters && d[6] < counters;
}

/* An optional task in a step that does not want it: neither waits nor does anything. */
static inline int sleeps(const struct nmk_vm *vm, const int32_t *d)
{
    return op_table[d[0]].optional && !vm->state->awake;
}

/* The time at one of the points of walk w's task, the first time that it is there.  As on the GPU: begun (also by those
 * who have nothing to do in it), done waiting, stored, helped. */
static inline void stamp(const struct nmk_vm *vm, const struct walk *w, int what)
{
    if (!vm->trace) return;
    uint64_t *at = &vm->trace[(size_t)w->sm * (size_t)variant_of(vm)->max_tasks + (size_t)w->next][what];
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    if (!*at) *at = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Moves walk w one task on.  RAN: *signalled is the counter that went up, or -1.  BLOCKED: *signalled is the counter
 * that the walk waits for.  BROKEN: the SM has the message. */
static int advance(struct nmk_vm *vm, struct walk *w, int *signalled)
{
    struct vm_sm *sm = &vm->state->sm[w->sm];
    *signalled = -1;
    for (;; w->next++) {
        if (w->next >= variant_of(vm)->max_tasks) {
            fail(sm, "list has no end");
            return BROKEN;
        }
        const int32_t *d = task_at(vm, w->sm, w->next);
        if (!w->help) stamp(vm, w, 0);
        if (d[0] == 0) {
            if (vm->ended) atomic_fetch_add((_Atomic uint8_t *)&vm->ended[w->sm], 1);
            return DONE;
        }
        if (!sane(vm, d)) {
            fail(sm, "opcode or counter out of range");
            return BROKEN;
        }
        if (op_table[d[0]].help != w->help) continue;
        const int asleep = sleeps(vm, d), wait = asleep ? -1 : unmet(vm, d);
        if (wait >= 0) {
            *signalled = d[2 + 2 * wait];
            return BLOCKED;
        }
        if (!w->help && !asleep && (d[2] >= 0 || d[4] >= 0)) stamp(vm, w, 1);
        const int got = asleep ? 0 : execute(vm, sm, d);
        if (got < 0) return BROKEN;
        if (got == MORE) return RAN;
        stamp(vm, w, w->help ? 3 : 2);
        if (d[6] >= 0) {
            *signalled = d[6];
            atomic_fetch_add_explicit(counter(vm, d[6]), (uint32_t)op_table[d[0]].arrivals, memory_order_release);
        }
        w->next++;
        return RAN;
    }
}

static int append(char *err, size_t len, int at, const char *format, ...) __attribute__((format(printf, 4, 5)));

static int append(char *err, size_t len, int at, const char *format, ...)
{
    va_list args;
    if (at < 0 || (size_t)at >= len) return at;
    va_start(args, format);
    at += vsnprintf(err + at, len - (size_t)at, format, args);
    va_end(args);
    return at;
}

static int name_task(const struct nmk_vm *vm, char *err, size_t len, int at, const int32_t *d)
{
    const nmk_variant *v = variant_of(vm);
    const int32_t node = d[NMK_WORD_NODE];
    return append(err, len, at, "%s", d[0] && node >= 0 && node < v->node_count ? v->nodes[node].name : "?");
}

static int report_broken(const struct nmk_vm *vm, int broken, char *err, size_t len)
{
    const struct walk *w = &vm->state->walk[broken];
    int at = append(err, len, 0, "SM %d, task %d, ", w->sm, w->next);
    if (w->next < variant_of(vm)->max_tasks)
        at = append(err, len, name_task(vm, err, len, at, task_at(vm, w->sm, w->next)), ": ");
    append(err, len, at, "%s", vm->state->sm[w->sm].err);
    return -1;
}

/* The task that walk w waits at, and in *wait which of its waits; NULL when it does not wait. */
static const int32_t *waiting_task(const struct nmk_vm *vm, const struct walk *w, int *wait)
{
    const int32_t *d = w->next < variant_of(vm)->max_tasks ? task_at(vm, w->sm, w->next) : NULL;
    if (!d || d[0] == 0 || !sane(vm, d) || op_table[d[0]].help != w->help || sleeps(vm, d)) return NULL;
    *wait = unmet(vm, d);
    return *wait < 0 ? NULL : d;
}

/* One line: who waits for what, tasks that differ in nothing but the SM named once. */
static int report_deadlock(const struct nmk_vm *vm, char *err, size_t len)
{
    char told[WALKS] = {0};
    const char *const *names = variant_of(vm)->counter_names;
    int at = append(err, len, 0, "deadlock"), lines = 0;
    for (int i = 0; i < WALKS; i++) {
        const struct walk *w = &vm->state->walk[i];
        int wait, other_wait, sms = 1;
        const int32_t *d = told[i] ? NULL : waiting_task(vm, w, &wait), *other;
        if (!d) continue;
        for (int j = i + 1; j < WALKS; j++)
            if ((other = waiting_task(vm, &vm->state->walk[j], &other_wait)) && other[0] == d[0] && other[1] == d[1] &&
                other_wait == wait && !memcmp(other + 2, d + 2, 4 * sizeof *d))
                told[j] = 1, sms++;
        const int c = d[2 + 2 * wait];
        at = append(err, len, at, lines++ ? "; " : ": ");
        at = name_task(vm, err, len, at, d);
        at = append(err, len, at, " on SM %d", w->sm);
        if (sms > 1) at = append(err, len, at, " and %d more", sms - 1);
        at = append(err, len, at, " waits for %s (counter %d: %u of %u)", names[c], c,
                    (unsigned)atomic_load(counter(vm, c)), (unsigned)vm->epoch * (unsigned)d[3 + 2 * wait]);
    }
    return -1;
}

/* Who is left without an owner when all walks are done: a ticket that did not begin at 0, for one. */
static int report_unclaimed(const struct nmk_vm *vm, char *err, size_t len)
{
    for (int i = 0; i < NMK_TICKETS; i++) {
        struct claims *c = claims_of(vm, i);
        const int32_t *d = atomic_load(&c->task);
        int unit = 0, units = d ? atomic_load(&c->units) : 0;
        while (unit < units && atomic_load(&c->owner[unit])) unit++;
        if (unit == units) continue;
        append(err, len, name_task(vm, err, len, 0, d), ": unit %d of %d was claimed by nobody", unit, units);
        return -1;
    }
    return 0;
}

static uint64_t draw(uint64_t *s)
{
    uint64_t z = *s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline void wake(struct nmk_vm_state *s, int who)
{
    const int slow = s->walk[who].slow;
    s->ready[slow][s->ready_count[slow]++] = who;
}

/* Whether the SM is done with the launch that this one follows. */
static int is_open(const struct nmk_vm *vm, int sm)
{
    return !vm->before || atomic_load((_Atomic uint8_t *)&vm->before[sm]) == WALKS / NMK_SMS;
}

/* Walks whose SM has become open. */
static void wake_open(struct nmk_vm *vm)
{
    struct nmk_vm_state *s = vm->state;
    for (int i = s->shut_count; i-- > 0;)
        if (is_open(vm, s->walk[s->shut[i]].sm)) {
            wake(s, s->shut[i]);
            s->shut[i] = s->shut[--s->shut_count];
        }
}

static void begin_seeded(struct nmk_vm *vm)
{
    struct nmk_vm_state *s = vm->state;
    s->ready_count[0] = s->ready_count[1] = s->shut_count = 0, s->left = WALKS, s->random = vm->seed;
    const int slow = (int)(draw(&s->random) % 4 * 3); /* 0, 3, 6 or 9 */
    for (int i = 0; i < slow; i++) s->walk[draw(&s->random) % WALKS].slow = 1;
    for (int i = 0; i < variant_of(vm)->counters; i++) s->lot[i] = (struct lot){-1, INT32_MAX};
    for (int i = 0; i < WALKS; i++)
        if (is_open(vm, s->walk[i].sm)) wake(s, i);
        else s->shut[s->shut_count++] = i;
}

/* One thread.  A drawn walk runs a drawn number of tasks (1 to 128, so that some run far ahead) or up to a wait that is
 * not met; there it parks at the counter until someone signals it.  A few drawn walks are slow: they move one task at a
 * time, and only when no other can.  Without them a missing wait for somebody far behind would go unseen: with everyone
 * equally fast nobody is ever far behind.  Slow ones would never get anything of a queue, so some of those who hold a
 * unit become slow.
 *
 * Returns after at most so many draws: NMK_VM_MORE where it is not over; NMK_VM_SHUT if nobody can move before another
 * SM is open. */
static int move_seeded(struct nmk_vm *vm, int draws, char *err, size_t err_len)
{
    struct nmk_vm_state *s = vm->state;
    wake_open(vm);
    while (s->ready_count[0] + s->ready_count[1] > 0) {
        if (draws-- == 0) return NMK_VM_MORE;
        const uint64_t r = draw(&s->random);
        const int pool = s->ready_count[0] == 0, at = (int)((r >> 32) % (unsigned)s->ready_count[pool]);
        const int who = s->ready[pool][at];
        struct walk *w = &s->walk[who];
        int burst = pool ? 1 : 1 << (r & 7), got = RAN;
        while (got == RAN && burst-- > 0) {
            int c;
            got = advance(vm, w, &c);
            if (got == BROKEN) return report_broken(vm, who, err, err_len);
            if (c < 0) continue;
            struct lot *lot = &s->lot[c];
            if (got == BLOCKED) {
                const int arrivals = wait_arrivals(task_at(vm, w->sm, w->next), c);
                w->parked = lot->first, lot->first = who;
                if (arrivals < lot->arrivals) lot->arrivals = arrivals;
            } else if (lot->first >= 0 && reached(vm, c, lot->arrivals)) {
                for (int i = lot->first; i >= 0; i = s->walk[i].parked) wake(s, i);
                *lot = (struct lot){-1, INT32_MAX};
            }
        }
        if (got == RAN && !pool && !w->help && s->sm[w->sm].held >= 0) w->slow = draw(&s->random) % 8 == 0;
        if (got == RAN && w->slow == pool) continue;
        /* the last one may be a walk that was just woken */
        s->ready[pool][at] = s->ready[pool][--s->ready_count[pool]];
        if (got == RAN) wake(s, who);
        if (got == DONE) s->left--;
    }
    if (s->shut_count) return NMK_VM_SHUT;
    return s->left ? report_deadlock(vm, err, err_len) : 0;
}

struct worker {
    struct nmk_vm *vm;
    int id;
};

/* Moves walk i on as far as it goes, unless another worker has it.  1: it moved; 0: it did not; -1: it broke. */
static int push(struct nmk_vm *vm, int i)
{
    struct nmk_vm_state *s = vm->state;
    int moved = 0, got = DONE, c;
    if (atomic_load_explicit(&s->taken[i], memory_order_relaxed) || atomic_exchange(&s->taken[i], 1)) return 0;
    while ((got = advance(vm, &s->walk[i], &c)) == RAN) {
        moved = 1;
        if (c >= 0) atomic_fetch_add(&s->version, 1);
    }
    if (got == BROKEN && !atomic_exchange(&s->stop, 1)) s->broken = i;
    if (got == DONE) atomic_fetch_add(&s->done, 1); /* and stays taken */
    if (got == BLOCKED) atomic_store(&s->taken[i], 0);
    return got == BROKEN ? -1 : moved;
}

/* A worker prefers the SMs id, id + workers, ..., but takes any walk rather than wait: a worker that the system has put
 * aside holds up its one walk only.  A worker that finds nothing to do publishes the count of signals that it had
 * seen before it looked.  When all have looked in vain at the present count nobody is left to signal: a deadlock.  (A
 * walk that was skipped because it was taken is looked at by the worker that has it.) */
static void *work(void *arg)
{
    const struct worker *me = arg;
    struct nmk_vm *vm = me->vm;
    struct nmk_vm_state *s = vm->state;

    while (!atomic_load(&s->stop) && atomic_load(&s->done) < WALKS) {
        const unsigned version = atomic_load(&s->version);
        int moved = 0;
        for (int pass = 0; pass < 2 && !moved; pass++)
            for (int i = 0; i < WALKS; i++) {
                if ((s->walk[i].sm % s->workers == me->id) == pass) continue;
                const int got = push(vm, i);
                if (got < 0) return NULL;
                moved |= got;
                if (pass && moved) break;
            }
        if (moved) continue;
        atomic_store(&s->idle_at[me->id], version + 1);
        while (atomic_load(&s->version) == version && atomic_load(&s->done) < WALKS && !atomic_load(&s->stop)) {
            int idle = 0;
            for (int i = 0; i < s->workers; i++) idle += atomic_load(&s->idle_at[i]) == version + 1;
            if (idle == s->workers && atomic_load(&s->version) == version && atomic_load(&s->done) < WALKS)
                atomic_store(&s->stop, 1);
            sched_yield();
        }
    }
    return NULL;
}

static int step_threaded(struct nmk_vm *vm, char *err, size_t err_len)
{
    struct nmk_vm_state *s = vm->state;
    struct worker worker[NMK_VM_THREADS];
    pthread_t thread[NMK_VM_THREADS];
    int made = 1;

    s->broken = -1;
    s->workers = vm->threads < NMK_VM_THREADS ? vm->threads : NMK_VM_THREADS;
    atomic_store(&s->version, 0), atomic_store(&s->stop, 0), atomic_store(&s->done, 0);
    for (int i = 0; i < WALKS; i++) atomic_store(&s->taken[i], 0);
    for (int i = 0; i < s->workers; i++) {
        worker[i] = (struct worker){vm, i};
        atomic_store(&s->idle_at[i], 0);
    }
    for (; made < s->workers; made++)
        if (pthread_create(&thread[made], NULL, work, &worker[made])) break;
    const int all = made == s->workers;
    if (!all) atomic_store(&s->stop, 1);
    if (all) work(&worker[0]);
    for (int i = 1; i < made; i++) pthread_join(thread[i], NULL);
    if (!all) return append(err, err_len, 0, "cannot start a worker thread"), -1;
    if (s->broken >= 0) return report_broken(vm, s->broken, err, err_len);
    return atomic_load(&s->stop) ? report_deadlock(vm, err, err_len) : 0;
}

int nmk_vm_begin(struct nmk_vm *vm, char *err, size_t err_len)
{
    const size_t lots = (size_t)variant_of(vm)->counters * sizeof(struct lot);
    if (!vm->state && !(vm->state = calloc(1, sizeof *vm->state + lots)))
        return append(err, err_len, 0, "out of memory for the reference machine"), -1;
    struct nmk_vm_state *s = vm->state;
    for (int i = 0; i < NMK_SMS; i++) {
        struct vm_sm *sm = &s->sm[i];
        sm->id = i, sm->err[0] = 0, sm->claimed = 0, sm->held = -1;
        sm->route[0].instance = sm->route[1].instance = -1;
        memset(sm->acc, 0, sizeof sm->acc);
        s->walk[i] = (struct walk){.sm = i, .help = 0, .parked = -1};
        s->walk[NMK_SMS + i] = (struct walk){.sm = i, .help = 1, .parked = -1};
        if (vm->ended) vm->ended[i] = 0;
    }
    memset(s->claims, 0, sizeof s->claims);
    /* as the step before leaves it: NaN, whatever is read before it is written */
    const nmk_variant *v = variant_of(vm);
    memset(vm->arena + v->exchange_at + (vm->epoch & 1 ? v->exchange_bytes : 0), 0xff, v->exchange_bytes);
    s->awake = 0, vm->filters = 0;
    for (int n = 0; n < NMK_COLUMNS && !vm->chunk; n++) {
        vm->out[n] = -1;
        if (!active(vm, n)) continue;
        s->awake |= vm->control->column[n].flags & (NMK_COLUMN_FILTERS | NMK_COLUMN_LOGPROBS);
        if (vm->control->column[n].flags & NMK_COLUMN_FILTERS) vm->filters |= (uint64_t)1 << n;
    }
    begin_seeded(vm);
    return 0;
}

int nmk_vm_move(struct nmk_vm *vm, int draws, char *err, size_t err_len)
{
    const int got = move_seeded(vm, draws, err, err_len);
    return got ? got : report_unclaimed(vm, err, err_len);
}

int nmk_vm_step(struct nmk_vm *vm, char *err, size_t err_len)
{
    if (nmk_vm_begin(vm, err, err_len)) return -1;
    if (vm->threads <= 1) return nmk_vm_move(vm, INT32_MAX, err, err_len);
    return step_threaded(vm, err, err_len) ? -1 : report_unclaimed(vm, err, err_len);
}

void nmk_vm_close(struct nmk_vm *vm)
{
    free(vm->state);
    vm->state = NULL;
}
