/* Kept pages: rows that share prefixes find each other's pages, and never a page with other content.
 *
 * Every page here is an array of signatures: a token's signature stands for all tokens up to it and for how each was
 * computed, as real keys and values do.  A row that computes a token looks at the signatures that attention would
 * read. */
#include "kv.h"

#include <unistd.h>

#include "check.h"
#include "runtime/kv_sound.h"

enum { SIZE = 4, WINDOW = 10, ROWS = 5, LONGEST = 64, STRIDE = LONGEST / SIZE, CHUNK = 2, PAGES = 400 };

static const nmk_kv_shape both = {.full_layers = 2,
                                  .sliding_layers = 3,
                                  .kv_heads = 1,
                                  .head_dim = 128,
                                  .window = WINDOW,
                                  .columns = CHUNK,
                                  .page_tokens = SIZE};

typedef struct {
    int32_t token[LONGEST];
    uint8_t fed[STRIDE];
    int prompt, end, at, made; /* positions below prompt - 1 are fed */
    bool live;
} sequence;

static uint64_t mark[2][PAGES][SIZE]; /* of each pool's pages */
static sequence row[ROWS];
static uint32_t seed;

static int draw(int below) {
    seed = seed * 1664525u + 1013904223u;
    return (int)((uint64_t)(seed >> 4) * (uint64_t)below >> 28);
}

static uint64_t mix(uint64_t before, int32_t token, bool fed) {
    uint64_t x = (before + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u + (uint64_t)(uint32_t)token * 2 + fed;
    return (x ^ x >> 29) * 0x94d049bb133111ebu;
}

static bool fed_at(const sequence *s, int pos) { return pos % SIZE < s->fed[pos / SIZE]; }

static uint64_t *mark_at(const nmk_kv *kv, int kind, int r, int pos) {
    return &mark[kind][kv->table[kind][r * kv->stride + pos / SIZE]][pos % SIZE];
}

/* All that a step at `at` reads is of this sequence. */
static bool reads_right(const nmk_kv *kv, int r) {
    const sequence *s = &row[r];
    uint64_t sum = kv->row[r].salt;
    bool good = true;
    for (int pos = 0; pos < s->at; pos++) {
        sum = mix(sum, s->token[pos], fed_at(s, pos));
        good &= *mark_at(kv, 0, r, pos) == sum;
        if (kv->pages[1] && pos > s->at - WINDOW) good &= *mark_at(kv, 1, r, pos) == sum;
    }
    return good;
}

static void write_token(const nmk_kv *kv, int r) {
    sequence *s = &row[r];
    uint64_t sum = kv->row[r].salt;
    for (int pos = 0; pos <= s->at; pos++) sum = mix(sum, s->token[pos], fed_at(s, pos));
    for (int k = 0; k < 2; k++)
        if (kv->pages[k]) *mark_at(kv, k, r, s->at) = sum;
    s->at++;
}

static void note(const nmk_kv *kv, int r) {
    sequence *s = &row[r];
    for (; s->made < kv->row[r].held; s->made++) {
        int left = s->prompt - 1 - s->made * SIZE;
        s->fed[s->made] = (uint8_t)(s->made < kv->row[r].known ? nmk_kv_fed(kv, r, s->made)
                                    : left < 0                 ? 0
                                    : left > SIZE              ? SIZE
                                                               : left);
    }
}

/* Few different beginnings, so that rows have much in common; `exact`: no decoded tokens of others. */
static int start_row(nmk_kv *kv, int r, bool exact) {
    sequence *s = &row[r];
    memset(s, 0, sizeof *s);
    memset(s->fed, exact ? SIZE : NMK_KV_ANY, sizeof s->fed);
    for (int i = 0; i < LONGEST; i++) s->token[i] = i % (4 * SIZE) ? i : draw(2);
    s->end = 1 + draw(LONGEST), s->prompt = 1 + draw(s->end), s->live = true;
    nmk_kv_begin(kv, r, draw(8) == 0);
    s->at = nmk_kv_find(kv, r, s->token, s->prompt - 1, s->fed);
    note(kv, r);
    return s->at;
}

static void stop_row(nmk_kv *kv, int r) {
    nmk_kv_drop(kv, r);
    row[r].live = false;
}

/* Rows come, go on token by token, end, and lose their pages when there are none. */
static void storm(const nmk_kv_shape *shape, uint64_t budget, const char *name) {
    nmk_err e = {0};
    nmk_kv kv;
    const char *why = NULL;
    int steps = 0, wrong = 0, refused = 0, hits = 0, decoded = 0, forgets = 0;
    if (!check(nmk_kv_init(&kv, shape, ROWS, LONGEST, budget, &e) == 0, name, "%s", e.text)) return;
    memset(row, 0, sizeof row);
    for (int i = 0; i < 100000 && !why && !wrong; i++) {
        int r = draw(ROWS);
        sequence *s = &row[r];
        if (!s->live) {
            bool exact = draw(2);
            int hit = start_row(&kv, r, exact);
            hits += hit > 0;
            for (int p = 0; p < kv.row[r].known; p++) {
                decoded += s->fed[p] < SIZE;
                wrong += exact && s->fed[p] < SIZE;
            }
            if (draw(400) == 0) nmk_kv_forget(&kv), forgets++;
        } else if (s->at == s->end || draw(60) == 0) {
            stop_row(&kv, r);
        } else {
            if (s->at == kv.row[r].known * SIZE && s->at < s->prompt)
                s->at = nmk_kv_find(&kv, r, s->token, s->prompt - 1, s->fed), note(&kv, r);
            nmk_kv_pass(&kv, r, s->at);
            if (nmk_kv_grow(&kv, r, s->at + 1)) {
                stop_row(&kv, r), refused++;
            } else {
                note(&kv, r);
                wrong += !reads_right(&kv, r);
                write_token(&kv, r), steps++;
                nmk_kv_keep(&kv, r, s->token, s->at, s->fed);
            }
        }
        why = kv_sound(&kv);
    }
    check(!why && !wrong && hits > 500 && decoded && forgets, name,
          "%s; %d wrong reads in %d steps, %d hits, %d decoded pages", why ? why : "sound", wrong, steps, hits,
          decoded);
    printf("# %d steps, %d rows with hits, %d refused growth; %d and %d pages\n", steps, hits, refused, kv.pages[0],
           kv.pages[1]);
    for (int r = 0; r < ROWS; r++) nmk_kv_drop(&kv, r);
    check(kv_is_given_back(&kv), "every page is free or kept in the end", "%s", kv_sound(&kv) ? kv_sound(&kv) : "held");
    nmk_kv_forget(&kv);
    check(kv.free_count[0] == kv.pages[0] && kv.free_count[1] == kv.pages[1], "and free when all is forgotten",
          "%d and %d", kv.free_count[0], kv.free_count[1]);
    nmk_kv_free(&kv);
}

/* Computes tokens at .. end of a row, as if fed. */
static void compute(nmk_kv *kv, int r, const int32_t *token, int at, int end, const uint8_t *fed) {
    for (; at < end; at++) {
        nmk_kv_pass(kv, r, at);
        if (nmk_kv_grow(kv, r, at + 1)) {
            check(false, "grows", "at %d", at);
            return;
        }
        nmk_kv_keep(kv, r, token, at + 1, fed);
    }
}

static void test_window(void) {
    nmk_err e = {0};
    nmk_kv kv;
    int32_t token[LONGEST];
    uint8_t fed[STRIDE], any[STRIDE];
    memset(fed, SIZE, sizeof fed), memset(any, NMK_KV_ANY, sizeof any);
    for (int i = 0; i < LONGEST; i++) token[i] = i;
    /* 16 full pages a row and 20 sliding ones, of which a row holds 4 */
    uint64_t bytes = 2 * 16 * nmk_kv_page_bytes(&both, 0) + 20 * nmk_kv_page_bytes(&both, 1);
    check(nmk_kv_init(&kv, &both, 2, LONGEST, bytes, &e) == 0 && kv.pages[0] == 32 && kv.pages[1] == 20, "opens",
          "%d and %d pages: %s", kv.pages[0], kv.pages[1], e.text);
    nmk_kv_begin(&kv, 0, 0);
    compute(&kv, 0, token, 0, LONGEST, fed);
    check(kv.row[0].held == 16 && kv.row[0].held - kv.row[0].first <= 4 && kv.idle_count[1] == kv.row[0].first,
          "a row holds the sliding pages of its window, the others stay", "%d of %d", kv.row[0].held - kv.row[0].first,
          kv.row[0].held);
    nmk_kv_begin(&kv, 1, 0);
    check(nmk_kv_find(&kv, 1, token, LONGEST - 1, any) == LONGEST - SIZE && kv.page[0][kv.table[0][0]].refs == 2 &&
              kv.row[1].first == (LONGEST - SIZE + 1 - WINDOW) / SIZE,
          "a hit holds all full pages, and sliding ones of the window", "first %d", kv.row[1].first);
    nmk_kv_drop(&kv, 1);
    /* another sequence needs sliding pages: those that were passed first go first */
    int32_t other[LONGEST];
    for (int i = 0; i < LONGEST; i++) other[i] = 1000 + i;
    nmk_kv_begin(&kv, 1, 0);
    compute(&kv, 1, other, 0, 8 * SIZE, fed);
    nmk_kv_drop(&kv, 1);
    int gone = 0;
    for (int p = 0; p < 16; p++) gone += kv.content[kv.table[0][p]].sliding == -1;
    nmk_kv_begin(&kv, 1, 0);
    int middle = nmk_kv_find(&kv, 1, token, 3 * SIZE, any);
    check(gone >= 3 && middle == 0, "without the sliding pages of a window there is no hit there",
          "%d are gone, %d tokens found", gone, middle);
    int end = nmk_kv_find(&kv, 1, token, LONGEST, any);
    check(end == LONGEST && !kv_sound(&kv), "but behind it there is", "%d tokens: %s", end, kv_sound(&kv));
    nmk_kv_drop(&kv, 1);
    nmk_kv_begin(&kv, 1, 7);
    check(nmk_kv_find(&kv, 1, token, LONGEST, any) == 0, "another salt finds nothing", "something");
    nmk_kv_drop(&kv, 0), nmk_kv_drop(&kv, 1);
    check(kv_is_given_back(&kv), "all is given back", "%s", kv_sound(&kv) ? kv_sound(&kv) : "held");

    /* eviction takes a chain from its end */
    nmk_kv_begin(&kv, 0, 0);
    for (int i = 0; i < LONGEST; i++) other[i] = 2000 + i;
    compute(&kv, 0, other, 0, LONGEST, fed);
    nmk_kv_begin(&kv, 1, 0);
    for (int i = 0; i < LONGEST; i++) other[i] = 3000 + i;
    compute(&kv, 1, other, 0, 10 * SIZE, fed);
    int left = 0;
    for (int p = 0; p < kv.pages[0]; p++)
        left += kv.page[0][p].kept && kv.content[p].parent == -1 && kv.tokens[p * SIZE] == 0;
    check(left == 1 && !kv_sound(&kv), "the first page of a sequence goes last", "%d left: %s", left, kv_sound(&kv));
    nmk_kv_free(&kv);
}

/* Two rows compute the same: they come to share the pages, and give what the other lacks. */
static void test_twins(void) {
    nmk_err e = {0};
    nmk_kv kv;
    int32_t token[LONGEST];
    uint8_t fed[STRIDE];
    memset(fed, SIZE, sizeof fed);
    for (int i = 0; i < LONGEST; i++) token[i] = i;
    check(nmk_kv_init(&kv, &both, 2, LONGEST, 1 << 30, &e) == 0, "opens", "%s", e.text);
    nmk_kv_begin(&kv, 0, 0), nmk_kv_begin(&kv, 1, 0);
    for (int at = 0; at < LONGEST; at += SIZE)
        for (int r = 0; r < 2; r++) compute(&kv, r, token, at, at + SIZE, fed);
    bool same = true;
    for (int p = 0; p < STRIDE; p++) same &= kv.table[0][p] == kv.table[0][kv.stride + p];
    check(same && !kv_sound(&kv) && kv.row[1].changed == 0 && kv.row[1].changed_end == STRIDE &&
              kv.free_count[0] == kv.pages[0] - STRIDE,
          "rows with the same tokens come to share pages", "%s", kv_sound(&kv) ? kv_sound(&kv) : "pages differ");
    nmk_kv_drop(&kv, 0), nmk_kv_drop(&kv, 1);
    /* the same tokens decoded are another page; a fed one is preferred */
    uint8_t half[STRIDE] = {SIZE, 1};
    nmk_kv_begin(&kv, 0, 0);
    compute(&kv, 0, token, 0, 4 * SIZE, half);
    check(kv.row[0].known == 4 && nmk_kv_fed(&kv, 0, 1) == 1 && nmk_kv_fed(&kv, 0, 0) == SIZE && !kv_sound(&kv),
          "decoded tokens make another page", "%d", nmk_kv_fed(&kv, 0, 1));
    nmk_kv_begin(&kv, 1, 0);
    uint8_t any[STRIDE];
    memset(any, NMK_KV_ANY, sizeof any);
    int found = nmk_kv_find(&kv, 1, token, LONGEST, any);
    check(found == LONGEST && nmk_kv_fed(&kv, 1, 1) == SIZE, "where both are there the fed one is taken", "%d tokens",
          found);
    nmk_kv_drop(&kv, 1), nmk_kv_begin(&kv, 1, 0);
    memcpy(any, half, sizeof half);
    found = nmk_kv_find(&kv, 1, token, LONGEST, any);
    check(found == 4 * SIZE && nmk_kv_fed(&kv, 1, 1) == 1, "and who needs the decoded one finds that", "%d tokens",
          found);
    nmk_kv_free(&kv);
}

int main(int argc, char **argv) {
    seed = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 0) : (uint32_t)nmk_now_ns() ^ (uint32_t)getpid();
    printf("# seed %u\n", seed);
    nmk_kv_shape full = both, sliding = both;
    full.sliding_layers = 0, sliding.full_layers = 0;
    test_window();
    test_twins();
    storm(&both, 1 << 30, "rows with ample pages");
    storm(&both, 24 * nmk_kv_page_bytes(&both, 0) + 18 * nmk_kv_page_bytes(&both, 1), "rows with few pages");
    storm(&full, 24 * nmk_kv_page_bytes(&full, 0), "a model without sliding layers");
    storm(&sliding, 18 * nmk_kv_page_bytes(&sliding, 1), "a model without full layers");
    return failures != 0;
}
