/* The order in which simulated SMs run must not matter, a row's neighbours must not matter, and a wait that is taken
 * away must be noticed: with optional tasks asleep, and with columns that wake them. */
#include "refvm.h"

#include <stdarg.h>

#define ROW_TOKENS 256
#include "runtime/refvm_toy.h"

enum { SEEDS = 32, STEPS = 3, KINDS = 5, LEAD = 5000 };

static int32_t ids[ROW_TOKENS];
static int awake; /* columns filter, are adjusted, tell log-probabilities */

static uint64_t hash(uint64_t h, const void *data, size_t n) {
    for (size_t i = 0; i < n / 8; i++) {
        uint64_t word;
        memcpy(&word, (const uint8_t *)data + 8 * i, 8);
        h = (h ^ word) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    }
    return h;
}

static void restart(struct toy *t) {
    memset(t->vm.kv_full, 0, t->full_bytes), memset(t->vm.kv_sliding, 0, t->sliding_bytes);
    memset(t->vm.counters, 0, sizeof(uint32_t) * NMK_COUNTERS * NMK_COUNTER_WORDS), t->vm.epoch = 0;
    memset(t->vm.tickets, 0, TICKETS_BYTES);
    memset(t->tops, 0, sizeof t->tops), memset(t->vm.adjust, 0, ADJUST_BYTES);
    for (int i = 0; i < NMK_COLUMNS * NMK_VOCAB; i += 5) t->vm.adjust[i] = (nmk_adjust){(float)(i % 7) - 3, i % 3};
    for (int n = 0; n < NMK_COLUMNS; n += KINDS) t->vm.adjust[n * NMK_VOCAB + 9].bias = LEAD;
}

/* What wakes optional tasks, in the ways that requests may ask for it. */
static void ask(nmk_column *c, int n) {
    static const struct {
        int32_t flags, top_k;
        float top_p, min_p, temperature;
    } all[KINDS] = {
        /* so hot, and one token so far ahead, that many tokens share all digits of a cut but the last */
        {NMK_COLUMN_FILTERS | NMK_COLUMN_CUTS_K | NMK_COLUMN_CUTS_P | NMK_COLUMN_LOGPROBS | NMK_COLUMN_ADJUSTS, 2000,
         0.8f, 0, LEAD / 5},
        {NMK_COLUMN_FILTERS | NMK_COLUMN_CUTS_P, 0, 0.5f, 0, 0.5f},
        {NMK_COLUMN_FILTERS | NMK_COLUMN_CUTS_K | NMK_COLUMN_ADJUSTS, 3, 0, 0.01f, 1},
        {NMK_COLUMN_LOGPROBS | NMK_COLUMN_ADJUSTS, 0, 0, 0, 0},
        {NMK_COLUMN_FILTERS, 0, 0, 0.1f, 0.75f},
    };
    const int i = n % KINDS;
    c->flags |= all[i].flags, c->top_k = all[i].top_k, c->top_p = all[i].top_p, c->min_p = all[i].min_p;
    c->presence = 0.5f, c->frequency = 0.25f, c->repetition = 1.25f;
    c->temperature = all[i].temperature;
}

/* Eight sequences of different lengths, one of them off, one hot; as they stand before their next token. */
static void ragged(struct toy *t, int only) {
    static const int length[] = {1, 40, 63, 64, 130, 0, 200, 17};
    _Static_assert(NMK_COLUMNS <= sizeof length / sizeof *length, "a length for each column");
    for (int n = 0; n < NMK_COLUMNS; n++) {
        const int live = length[n] > 0 && (only < 0 || only == n);
        t->control.column[n] = (nmk_column){.token = ids[n],
                                            .pos = live ? length[n] - 1 : -1,
                                            .base = length[n] - 1,
                                            .group = n,
                                            .slot = n,
                                            .flags = NMK_COLUMN_SAMPLES,
                                            .remaining = 100,
                                            .temperature = n == 4 ? 0.8f : 0,
                                            .seed_lo = 7};
        if (awake) ask(&t->control.column[n], n);
    }
}

/* A few steps of the ragged batch; their hash (all buffers, pages, tokens) or 0 with the machine's message. */
static uint64_t run(struct toy *t, int threads, uint64_t seed, char *err, size_t err_len) {
    uint64_t h = 0xcbf29ce484222325u;
    t->vm.threads = threads, t->vm.seed = seed;
    for (int i = 0; i < STEPS; i++) {
        if (step(t, err, err_len)) return 0;
        h = hash(h, t->vm.arena, (size_t)NMK_ARENA_BYTES);
        h = hash(h, t->out, sizeof t->out), h = hash(h, &t->control, sizeof t->control);
        h = hash(h, t->tops, sizeof t->tops);
    }
    h = hash(hash(h, t->vm.kv_full, t->full_bytes), t->vm.kv_sliding, t->sliding_bytes);
    h = hash(h, t->vm.adjust, ADJUST_BYTES);
    return h ? h : 1;
}

/* run() from the same start every time. */
static uint64_t fresh_run(struct toy *t, int threads, uint64_t seed, char *err, size_t err_len) {
    restart(t);
    for (int n = 0; n < NMK_COLUMNS; n++) { /* something in the pages, the same for everyone */
        uint16_t *kv = (uint16_t *)t->vm.kv_full, *sliding = (uint16_t *)t->vm.kv_sliding;
        for (size_t i = 0; i < t->full_bytes / 2; i += 61) kv[i] = (uint16_t)(0x3c00 + i % 512);
        for (size_t i = 0; i < t->sliding_bytes / 2; i += 67) sliding[i] = (uint16_t)(0xbc00 + i % 512);
    }
    ragged(t, -1);
    return run(t, threads, seed, err, err_len);
}

static const char *world(void) { return awake ? "awake" : "asleep"; }

static void test_orders(struct toy *t, uint64_t *want) {
    char err[1024];
    int same = 0;
    *want = fresh_run(t, 1, 1, err, sizeof err);
    if (!*want) die("%s", err);
    for (int seed = 2; seed < 2 + SEEDS; seed++) same += fresh_run(t, 1, (uint64_t)seed, err, sizeof err) == *want;
    result(same == SEEDS, "orders of one thread", "%s, %d of %d seeds give the same bits", world(), same, SEEDS);
    for (int threads = 2; threads <= 4; threads++) {
        const uint64_t got = fresh_run(t, threads, 0, err, sizeof err);
        result(got == *want, "threads", "%s, %d threads%s%s", world(), threads, got ? "" : ": ", got ? "" : err);
    }
}

enum { FIRST = 1, SECOND = 2 };

/* Takes waits of every task of a node away: the first, the second or both.  Seeds must notice by other bits or an
 * error, three are enough; or, where the wait is for another world, none may. */
static void test_lost_wait(struct toy *t, int node, int which, int matters, uint64_t want) {
    static const char *const what[] = {"", "first ", "second ", ""};
    int32_t *lists = zeroed(t->list_bytes);
    char err[1024], name[96];
    int waits = 0, noticed = 0, seed = 0;
    memcpy(lists, t->lists, t->list_bytes);
    for (int i = 0; i < NMK_SMS * NMK_MAX_TASKS; i++) {
        int32_t *d = lists + (size_t)i * NMK_DESC_WORDS;
        if (d[NMK_WORD_OPCODE] == 0 || d[NMK_WORD_NODE] != node) continue;
        waits += d[which == SECOND ? 4 : 2] >= 0;
        if (which == FIRST)
            d[2] = d[4], d[3] = d[5];
        else if (which & FIRST)
            d[2] = -1;
        d[4] = -1;
    }
    t->vm.lists = lists;
    for (; waits && seed < (matters ? SEEDS : SEEDS / 4) && noticed < 3; seed++)
        noticed += fresh_run(t, 1, (uint64_t)seed, err, sizeof err) != want;
    t->vm.lists = t->lists;
    snprintf(name, sizeof name, "lost %swaits of %s, %s", what[which], nmk_nodes[node].name, world());
    if (waits) result((noticed > 0) == matters, name, "%d of %d seeds notice (%d tasks)", noticed, seed, waits);
    free(lists);
}

/* A wait for more than will ever arrive. */
static void test_deadlock(struct toy *t, int threads) {
    int32_t *lists = zeroed(t->list_bytes);
    char err[1024] = "";
    int s = 0, i = 0;
    memcpy(lists, t->lists, t->list_bytes);
    for (; i < NMK_MAX_TASKS; i++) {
        int32_t *d = lists + ((size_t)s * NMK_MAX_TASKS + (size_t)i) * NMK_DESC_WORDS;
        if (nmk_nodes[d[NMK_WORD_NODE]].layer != 2 || d[2] < 0) continue;
        d[3]++;
        break;
    }
    t->vm.lists = lists;
    const uint64_t got = fresh_run(t, threads, 1, err, sizeof err);
    t->vm.lists = t->lists;
    result(!got && strstr(err, "deadlock") && strstr(err, "layer2.") && strstr(err, "waits for"), "deadlock",
           "%d thread%s: %s", threads, threads == 1 ? "" : "s", got ? "not noticed" : err);
    free(lists);
}

static void test_neighbours(struct toy *t) {
    char err[1024];
    float together[NMK_COLUMNS][NMK_HIDDEN];
    int32_t tokens[NMK_COLUMNS];
    nmk_tops tops[NMK_COLUMNS];
    int live = 0, same = 0;
    if (!fresh_run(t, 1, 1, err, sizeof err)) die("%s", err);
    restart(t), ragged(t, -1), t->vm.threads = 2;
    must_step(t);
    memcpy(together, residual(t, NMK_LAYERS), sizeof together), memcpy(tokens, t->out, sizeof tokens);
    memcpy(tops, t->tops, sizeof tops);
    for (int n = 0; n < NMK_COLUMNS; n++) {
        restart(t), ragged(t, n);
        if (t->control.column[n].pos < 0) continue;
        must_step(t);
        live++;
        same += tokens[n] == t->out[n] && !memcmp(&tops[n], &t->tops[n], sizeof tops[n]) &&
                !memcmp(together[n], residual(t, NMK_LAYERS) + n * NMK_HIDDEN, sizeof together[n]);
    }
    result(same == live, "neighbours", "%s, %d of %d rows have the same bits alone and in the batch", world(), same,
           live);
}

/* --bits: nothing but the orders and what they give, for tests that compare schedules. */
int main(int argc, char **argv) {
    const int bits = argc > 1 && !strcmp(argv[1], "--bits");
    struct toy *t = toy_open();
    uint64_t want;
    for (int i = 0; i < ROW_TOKENS; i++) ids[i] = 20 + i * 37 % 4000;
    for (awake = 0; awake < 2; awake++) {
        test_orders(t, &want);
        if (bits) printf("bits, %s: %016llx\n", world(), (unsigned long long)want);
        if (bits) continue;
        int sample = 0;
        for (int node = 0; node < nmk_node_count; node++) {
            const int opcode = nmk_nodes[node].opcode, layer = nmk_nodes[node].layer;
            const int sleeps = opcode == NMK_OP_CUT || opcode == NMK_OP_DRAW;
            if (opcode == NMK_OP_SAMPLE) sample = node;
            if (awake ? layer < 0 : layer <= 2) test_lost_wait(t, node, FIRST | SECOND, awake || !sleeps, want);
        }
        /* sample's first wait is for draw, which signals at once asleep, its second for the lm_head, which draw has
         * waited for awake */
        test_lost_wait(t, sample, FIRST, awake, want);
        test_lost_wait(t, sample, SECOND, !awake, want);
        test_neighbours(t);
    }
    awake = 0;
    if (!bits) test_deadlock(t, 1), test_deadlock(t, 3);
    nmk_vm_close(&t->vm);
    return failures != 0;
}
