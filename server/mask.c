#include "mask.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    MOST_PLACES = 4000,        /* of a state */
    MOST_STATES = 1 << 14,     /* kept; then all are forgotten and found again */
    MOST_ALL_PLACES = 1 << 21, /* of all states; the same */
    MOST_STACKS = 1 << 20,
    MOST_MASKS = 64,    /* kept of a grammar */
    PLAIN_LENGTHS = 32, /* up to which plain tokens are known by their length */
    WORK_MS = 200,      /* of a core, for one mask: far more than any takes that is not made to */
    UNKNOWN = -2,
    DEAD = -1
};

/* ---------------------------------------------------------------- the vocabulary as trees */

/* A prefix, in the order of a walk: a child follows its parent, `past` is what follows its last descendant. */
typedef struct {
    int32_t past, token, tokens; /* token: place in `id` of the first with this text; tokens: how many */
    uint16_t depth;
    uint16_t most; /* characters of the longest token in here */
    uint8_t byte;
} node;

typedef struct {
    node *node;
    int count;
    int32_t *id;
    int depth; /* bytes of the longest token */
} tree;

struct nmk_token_tree {
    tree plain, other;
    int vocab, words;
    uint32_t *up_to[PLAIN_LENGTHS + 1]; /* plain tokens of so many characters or fewer */
    const char **text;                  /* copies, by id; NULL: none */
    uint16_t *bytes;
    char *pool;
    int32_t *end;
    int ends;
};

typedef struct {
    const char *text;
    int32_t id;
    uint16_t bytes, chars; /* chars: 0 where the text is not plain */
} entry;

static int by_text(const void *a, const void *b) {
    const entry *x = a, *y = b;
    int c = memcmp(x->text, y->text, x->bytes < y->bytes ? x->bytes : y->bytes);
    if (c) return c;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Characters, if all of them stand for themselves in a JSON string; 0: not so. */
static int plain_chars(const char *text, size_t bytes) {
    int chars = 0;
    for (size_t i = 0; i < bytes; chars++) {
        int n = nmk_utf8_scan(text + i, bytes - i);
        if (n <= 0 || (uint8_t)text[i] < 0x20 || text[i] == '"' || text[i] == '\\') return 0;
        i += (size_t)n;
    }
    return chars;
}

static void build(tree *t, const entry *list, int count) {
    int room = 1024, open[UINT16_MAX + 1], depth = 0;
    t->node = xmalloc(sizeof *t->node * (size_t)room);
    t->id = xmalloc(sizeof *t->id * (size_t)(count + 1));
    for (int i = 0; i < count; i++) {
        const entry *e = &list[i];
        int common = 0;
        t->id[i] = e->id;
        while (i && common < depth && common < e->bytes && list[i - 1].text[common] == e->text[common]) common++;
        if (common > depth) common = depth;
        while (depth > common) t->node[open[--depth]].past = t->count;
        for (; depth < e->bytes; depth++) {
            if (t->count == room) t->node = xrealloc(t->node, sizeof *t->node * (size_t)(room *= 2));
            t->node[t->count] = (node){.token = i, .depth = (uint16_t)depth, .byte = (uint8_t)e->text[depth]};
            open[depth] = t->count++;
        }
        t->node[open[depth - 1]].tokens++;
        for (int k = 0; k < depth; k++)
            if (t->node[open[k]].most < e->chars) t->node[open[k]].most = e->chars;
        if (depth > t->depth) t->depth = depth;
    }
    while (depth > 0) t->node[open[--depth]].past = t->count;
}

static void set_bit(uint32_t *mask, int32_t id) { mask[id / 32] |= (uint32_t)1 << id % 32; }

nmk_token_tree *nmk_token_tree_new(nmk_token_text_fn text, const void *user, int vocab, const int32_t *ends,
                                   int end_count) {
    nmk_token_tree *t = xcalloc(1, sizeof *t);
    entry *plain = xmalloc(sizeof *plain * (size_t)(vocab + 1)), *other = xmalloc(sizeof *other * (size_t)(vocab + 1));
    int plain_count = 0, other_count = 0;
    size_t pool = 0, at = 0;
    t->vocab = vocab, t->words = (vocab + 31) / 32;
    t->text = xcalloc((size_t)vocab + 1, sizeof *t->text);
    t->bytes = xcalloc((size_t)vocab + 1, sizeof *t->bytes);
    t->end = xmalloc(sizeof *ends * (size_t)(end_count + 1));
    for (int i = 0; i < end_count; i++)
        if (ends[i] >= 0 && ends[i] < vocab) t->end[t->ends++] = ends[i];
    for (int id = 0; id < vocab; id++) {
        size_t bytes = 0;
        const char *s = text(user, id, &bytes);
        if (!s || !bytes || bytes > UINT16_MAX) continue;
        t->text[id] = s, t->bytes[id] = (uint16_t)bytes, pool += bytes;
    }
    t->pool = xmalloc(pool + 1);
    for (int id = 0; id < vocab; id++) {
        if (!t->text[id]) continue;
        memcpy(t->pool + at, t->text[id], t->bytes[id]);
        t->text[id] = t->pool + at, at += t->bytes[id];
        int chars = plain_chars(t->text[id], t->bytes[id]);
        entry e = {t->text[id], id, t->bytes[id], (uint16_t)chars};
        if (chars)
            plain[plain_count++] = e;
        else
            other[other_count++] = e;
    }
    for (int n = 0; n <= PLAIN_LENGTHS; n++) {
        t->up_to[n] = xcalloc((size_t)t->words, sizeof **t->up_to);
        for (int i = 0; i < plain_count; i++)
            if (plain[i].chars <= n) set_bit(t->up_to[n], plain[i].id);
    }
    qsort(plain, (size_t)plain_count, sizeof *plain, by_text);
    qsort(other, (size_t)other_count, sizeof *other, by_text);
    build(&t->plain, plain, plain_count);
    build(&t->other, other, other_count);
    free(plain), free(other);
    return t;
}

static const char *text_of(const void *user, int32_t id, size_t *bytes) {
    const nmk_tokenizer *t = user;
    const char *s = nmk_tokenizer_token(t, id, bytes);
    if (!s || nmk_tokenizer_is_special(t, id)) return NULL;
    char *copy = xmalloc(*bytes + 1);
    memcpy(copy, s, *bytes), copy[*bytes] = 0;
    bool added = strlen(copy) == *bytes && nmk_tokenizer_find(t, copy) == id;
    free(copy);
    return added ? NULL : s;
}

nmk_token_tree *nmk_token_tree_of(const nmk_tokenizer *t, int vocab, const int32_t *ends, int end_count) {
    return nmk_token_tree_new(text_of, t, vocab, ends, end_count);
}

void nmk_token_tree_free(nmk_token_tree *t) {
    if (!t) return;
    for (int n = 0; n <= PLAIN_LENGTHS; n++) free(t->up_to[n]);
    free(t->plain.node), free(t->plain.id), free(t->other.node), free(t->other.id);
    free((void *)t->text), free(t->bytes), free(t->pool), free(t->end);
    free(t);
}

int nmk_token_tree_words(const nmk_token_tree *t) { return t->words; }

/* ---------------------------------------------------------------- states */

/* Where a text may have led: a state of the grammar and the calls it is in. */
typedef struct {
    int32_t state, stack;
} place;

/* A call: where it goes on, and the calls it is in.  Each is there once. */
typedef struct {
    int32_t to, parent, depth;
} frame;

typedef struct {
    int32_t first, count; /* places */
    bool complete;        /* the text may end here */
    int32_t *next;        /* state by class of bytes; NULL: none is known */
    int32_t plain;        /* the one state that every plain character leads to; DEAD: there is none such */
    int mask;             /* index of the kept one, or -1 */
} state;

typedef struct {
    int32_t *slot;
    int room, count; /* room: a power of two */
} table;

struct nmk_masks {
    nmk_grammar *g;
    const nmk_token_tree *t;
    pthread_mutex_t lock;
    int refs; /* by lock */
    uint8_t class[256];
    uint8_t byte_of[256]; /* one of the class */
    int classes;
    /* what was learnt, by lock */
    uint64_t life, stack_life; /* count how often states and stacks were forgotten */
    state *state;
    int states, state_room;
    place *place;
    int places, place_room;
    frame *stack;
    int stacks, stack_room;
    table state_table, stack_table;
    struct {
        int32_t of; /* state, or -1 */
        uint64_t used;
        uint32_t *bits;
    } mask[MOST_MASKS];
    uint64_t uses;
    /* while a state is made */
    place *found, *todo;
    int found_count, found_room, todo_count, todo_room;
    bool complete;
    table seen;
    place *seen_place;
    int seen_room;
    uint64_t work, deadline_ns; /* states made so far; time of this thread */
    bool gave_up;
    int32_t *path; /* states along a token */
};

struct nmk_walker {
    nmk_masks *m;
    int32_t at; /* state, as of `life`; UNKNOWN: at the start */
    uint64_t life, stack_life;
    place *place; /* of the state, to find it again */
    int places, place_room;
    bool complete, ended;
    int32_t *token; /* so far, for when the stacks were forgotten too */
    int tokens, token_room;
};

/* Whatever else runs on the machine. */
static uint64_t thread_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint32_t hash_pair(int32_t a, int32_t b) {
    uint64_t h = ((uint64_t)(uint32_t)a << 32 | (uint32_t)b) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32) ^ (uint32_t)h;
}

static void table_clear(table *t) {
    if (t->slot) memset(t->slot, -1, sizeof *t->slot * (size_t)t->room);
    t->count = 0;
}

/* Doubles what is half full; `hash_of` knows the entries. */
static void table_grow(table *t, uint32_t (*hash_of)(const nmk_masks *, int32_t), const nmk_masks *m) {
    if (t->room && 2 * t->count < t->room) return;
    table old = *t;
    t->room = old.room ? 2 * old.room : 256;
    t->slot = xmalloc(sizeof *t->slot * (size_t)t->room);
    memset(t->slot, -1, sizeof *t->slot * (size_t)t->room);
    for (int i = 0; i < old.room; i++) {
        if (old.slot[i] < 0) continue;
        uint32_t h = hash_of(m, old.slot[i]);
        while (t->slot[h & (uint32_t)(t->room - 1)] >= 0) h++;
        t->slot[h & (uint32_t)(t->room - 1)] = old.slot[i];
    }
    free(old.slot);
}

static uint32_t stack_hash(const nmk_masks *m, int32_t s) { return hash_pair(m->stack[s].to, m->stack[s].parent); }
static uint32_t seen_hash(const nmk_masks *m, int32_t s) {
    return hash_pair(m->seen_place[s].state, m->seen_place[s].stack);
}
static uint32_t places_hash(const place *p, int count, bool complete) {
    uint32_t h = complete;
    for (int i = 0; i < count; i++) h = hash_pair((int32_t)(h + (uint32_t)p[i].state), p[i].stack);
    return h;
}
static uint32_t state_hash(const nmk_masks *m, int32_t s) {
    const state *x = &m->state[s];
    return places_hash(m->place + x->first, x->count, x->complete);
}

/* Stack 0 is empty. */
static int32_t stack_of(nmk_masks *m, int32_t to, int32_t parent) {
    table_grow(&m->stack_table, stack_hash, m);
    uint32_t h = hash_pair(to, parent), wrap = (uint32_t)(m->stack_table.room - 1);
    for (int32_t s; (s = m->stack_table.slot[h & wrap]) >= 0; h++)
        if (m->stack[s].to == to && m->stack[s].parent == parent) return s;
    if (m->stacks == MOST_STACKS) {
        m->gave_up = true;
        return parent;
    }
    if (m->stacks == m->stack_room) m->stack = xrealloc(m->stack, sizeof *m->stack * (size_t)(m->stack_room *= 2));
    m->stack[m->stacks] = (frame){to, parent, m->stack[parent].depth + 1};
    m->stack_table.slot[h & wrap] = m->stacks, m->stack_table.count++;
    return m->stacks++;
}

/* A place to follow; each once. */
static void reach(nmk_masks *m, int32_t at, int32_t stack) {
    if (m->g->need[at] < 0 || m->g->need[at] + m->stack[stack].depth > NMK_GRAMMAR_DEPTH) return;
    table_grow(&m->seen, seen_hash, m);
    uint32_t h = hash_pair(at, stack), wrap = (uint32_t)(m->seen.room - 1);
    for (int32_t s; (s = m->seen.slot[h & wrap]) >= 0; h++)
        if (m->seen_place[s].state == at && m->seen_place[s].stack == stack) return;
    if (m->seen.count == 8 * MOST_PLACES) {
        m->gave_up = true;
        return;
    }
    if (m->seen.count == m->seen_room)
        m->seen_place = xrealloc(m->seen_place, sizeof *m->seen_place * (size_t)(m->seen_room *= 2));
    m->seen_place[m->seen.count] = (place){at, stack};
    m->seen.slot[h & wrap] = m->seen.count++;
    if (m->todo_count == m->todo_room) m->todo = xrealloc(m->todo, sizeof *m->todo * (size_t)(m->todo_room *= 2));
    m->todo[m->todo_count++] = (place){at, stack};
}

/* Follows jumps, calls and ends from what was reached, up to the places that take something. */
static void follow(nmk_masks *m) {
    const nmk_grammar *g = m->g;
    while (m->todo_count && !m->gave_up) {
        place p = m->todo[--m->todo_count];
        bool takes = false;
        if (g->rule_of_end[p.state] >= 0) {
            if (!p.stack) m->complete = true;
            if (p.stack) reach(m, m->stack[p.stack].to, m->stack[p.stack].parent);
        }
        for (int k = g->first[p.state]; k >= 0; k = g->edge[k].next) {
            const nmk_edge *x = &g->edge[k];
            if (x->kind == NMK_EDGE_JUMP) {
                reach(m, x->to, p.stack);
            } else if (x->kind == NMK_EDGE_CALL) {
                if (g->need[x->to] < 0 || g->need[x->to] + m->stack[p.stack].depth > NMK_GRAMMAR_DEPTH) continue;
                reach(m, g->start[x->what], g->tail[x->to] ? p.stack : stack_of(m, x->to, p.stack));
            } else {
                takes = true;
            }
        }
        if (!takes) continue;
        if (m->found_count == MOST_PLACES) m->gave_up = true;
        if (m->found_count == m->found_room)
            m->found = xrealloc(m->found, sizeof *m->found * (size_t)(m->found_room *= 2));
        m->found[m->found_count++] = p;
    }
    m->todo_count = 0;
}

static void begin_state(nmk_masks *m) {
    if (m->seen.count) table_clear(&m->seen);
    m->found_count = m->todo_count = 0, m->complete = false;
}

static int by_place(const void *a, const void *b) {
    const place *x = a, *y = b;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    return (x->stack > y->stack) - (x->stack < y->stack);
}

/* The state of the places in `found`, which are in order. */
static int32_t find_state(nmk_masks *m) {
    table_grow(&m->state_table, state_hash, m);
    uint32_t h = places_hash(m->found, m->found_count, m->complete), wrap = (uint32_t)(m->state_table.room - 1);
    size_t bytes = sizeof *m->found * (size_t)m->found_count;
    for (int32_t s; (s = m->state_table.slot[h & wrap]) >= 0; h++) {
        const state *x = &m->state[s];
        if (x->count == m->found_count && x->complete == m->complete && !memcmp(m->place + x->first, m->found, bytes))
            return s;
    }
    if (m->states == 2 * MOST_STATES || m->places > 2 * MOST_ALL_PLACES) {
        m->gave_up = true;
        return DEAD;
    }
    if (m->states == m->state_room) m->state = xrealloc(m->state, sizeof *m->state * (size_t)(m->state_room *= 2));
    while (m->places + m->found_count > m->place_room)
        m->place = xrealloc(m->place, sizeof *m->place * (size_t)(m->place_room *= 2));
    memcpy(m->place + m->places, m->found, bytes);
    m->state[m->states] = (state){m->places, m->found_count, m->complete, NULL, UNKNOWN, -1};
    m->places += m->found_count;
    m->state_table.slot[h & wrap] = m->states, m->state_table.count++;
    return m->states++;
}

/* The state of what was reached; DEAD: there is none. */
static int32_t end_state(nmk_masks *m) {
    follow(m);
    if (m->gave_up || (!m->found_count && !m->complete)) return DEAD;
    qsort(m->found, (size_t)m->found_count, sizeof *m->found, by_place);
    return find_state(m);
}

static int32_t start_state(nmk_masks *m) {
    begin_state(m);
    reach(m, m->g->start[m->g->root], 0);
    return end_state(m);
}

static int32_t make_step(nmk_masks *m, int32_t from, int class) {
    const nmk_grammar *g = m->g;
    int byte = m->byte_of[class];
    if (!m->state[from].next) {
        m->state[from].next = xmalloc(sizeof(int32_t) * (size_t)m->classes);
        for (int c = 0; c < m->classes; c++) m->state[from].next[c] = UNKNOWN;
    }
    if (++m->work % 64 == 0 && thread_ns() > m->deadline_ns) m->gave_up = true;
    begin_state(m);
    for (int i = 0; i < m->state[from].count && !m->gave_up; i++) {
        place p = m->place[m->state[from].first + i];
        for (int k = g->first[p.state]; k >= 0; k = g->edge[k].next) {
            const nmk_edge *x = &g->edge[k];
            if (x->kind == NMK_EDGE_BYTES && x->low <= byte && byte <= x->high) reach(m, x->to, p.stack);
        }
    }
    int32_t to = end_state(m);
    if (!m->gave_up) m->state[from].next[class] = to;
    return to;
}

static int32_t step(nmk_masks *m, int32_t from, uint8_t byte) {
    int class = m->class[byte];
    const int32_t *next = m->state[from].next;
    int32_t to = next ? next[class] : UNKNOWN;
    return to == UNKNOWN ? make_step(m, from, class) : to;
}

static int32_t token_step(nmk_masks *m, int32_t from, int32_t token) {
    const nmk_grammar *g = m->g;
    begin_state(m);
    for (int i = 0; i < m->state[from].count; i++) {
        place p = m->place[m->state[from].first + i];
        for (int k = g->first[p.state]; k >= 0; k = g->edge[k].next)
            if (g->edge[k].kind == NMK_EDGE_TOKEN && g->edge[k].what == token) reach(m, g->edge[k].to, p.stack);
    }
    return end_state(m);
}

/* Bytes that no edge tells apart are one class. */
static void find_classes(nmk_masks *m) {
    bool begins[257] = {true};
    for (int k = 0; k < m->g->edges; k++) {
        const nmk_edge *x = &m->g->edge[k];
        if (x->kind == NMK_EDGE_BYTES) begins[x->low] = begins[x->high + 1] = true;
    }
    for (int b = 0; b < 256; b++) {
        if (begins[b]) m->byte_of[m->classes++] = (uint8_t)b;
        m->class[b] = (uint8_t)(m->classes - 1);
    }
}

nmk_masks *nmk_masks_new(nmk_grammar *g, const nmk_token_tree *t) {
    nmk_masks *m = xcalloc(1, sizeof *m);
    m->g = g, m->t = t, m->refs = 1;
    pthread_mutex_init(&m->lock, NULL);
    find_classes(m);
    m->state = xmalloc(sizeof *m->state * (size_t)(m->state_room = 64));
    m->place = xmalloc(sizeof *m->place * (size_t)(m->place_room = 256));
    m->stack = xmalloc(sizeof *m->stack * (size_t)(m->stack_room = 64));
    m->found = xmalloc(sizeof *m->found * (size_t)(m->found_room = 64));
    m->todo = xmalloc(sizeof *m->todo * (size_t)(m->todo_room = 64));
    m->seen_place = xmalloc(sizeof *m->seen_place * (size_t)(m->seen_room = 64));
    int depth = t->plain.depth > t->other.depth ? t->plain.depth : t->other.depth;
    m->path = xmalloc(sizeof *m->path * (size_t)(depth + 2));
    m->stack[0] = (frame){-1, -1, 0}, m->stacks = 1;
    for (int i = 0; i < MOST_MASKS; i++) m->mask[i].of = -1;
    return m;
}

nmk_masks *nmk_masks_ref(nmk_masks *m) {
    pthread_mutex_lock(&m->lock);
    m->refs++;
    pthread_mutex_unlock(&m->lock);
    return m;
}

void nmk_masks_unref(nmk_masks *m) {
    if (!m) return;
    pthread_mutex_lock(&m->lock);
    int left = --m->refs;
    pthread_mutex_unlock(&m->lock);
    if (left) return;
    for (int i = 0; i < m->states; i++) free(m->state[i].next);
    for (int i = 0; i < MOST_MASKS; i++) free(m->mask[i].bits);
    free(m->state), free(m->place), free(m->stack), free(m->found), free(m->todo), free(m->seen_place);
    free(m->state_table.slot), free(m->stack_table.slot), free(m->seen.slot), free(m->path);
    nmk_grammar_free(m->g);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

static bool is_full(const nmk_masks *m) { return m->states > MOST_STATES || m->places > MOST_ALL_PLACES; }

static void forget(nmk_masks *m) {
    for (int i = 0; i < m->states; i++) free(m->state[i].next);
    for (int i = 0; i < MOST_MASKS; i++) m->mask[i].of = -1, m->mask[i].used = 0;
    m->states = m->places = 0;
    table_clear(&m->state_table);
    m->life++;
    if (m->stacks < MOST_STACKS / 2) return;
    m->stacks = 1, m->stack_life++;
    table_clear(&m->stack_table);
}

/* ---------------------------------------------------------------- masks */

/* The state that every byte of a range leads to; DEAD: not one. */
static int32_t all_lead(nmk_masks *m, int32_t from, int low, int high) {
    int32_t to = UNKNOWN;
    for (int b = low; b <= high; b++) {
        if (b > low && m->class[b] == m->class[b - 1]) continue;
        int32_t next = step(m, from, (uint8_t)b);
        if (next < 0 || (to != UNKNOWN && next != to)) return DEAD;
        to = next;
    }
    return to;
}

/* The characters that begin with a byte of a range, then one of another, then `more` that are any. */
static int32_t all_chars(nmk_masks *m, int32_t from, int low, int high, int low2, int high2, int more) {
    int32_t to = UNKNOWN;
    for (int b = low; b <= high; b++) {
        if (b > low && m->class[b] == m->class[b - 1]) continue;
        int32_t next = step(m, from, (uint8_t)b);
        if (next >= 0) next = all_lead(m, next, low2, high2);
        for (int i = 0; i < more && next >= 0; i++) next = all_lead(m, next, 0x80, 0xbf);
        if (next < 0 || (to != UNKNOWN && next != to)) return DEAD;
        to = next;
    }
    return to;
}

static int32_t find_plain(nmk_masks *m, int32_t from) {
    static const int ascii[][2] = {{' ', '!'}, {'#', '['}, {']', 0x7f}};
    static const int chars[][5] = {{0xc2, 0xdf, 0x80, 0xbf, 0}, {0xe0, 0xe0, 0xa0, 0xbf, 1},
                                   {0xe1, 0xec, 0x80, 0xbf, 1}, {0xed, 0xed, 0x80, 0x9f, 1},
                                   {0xee, 0xef, 0x80, 0xbf, 1}, {0xf0, 0xf0, 0x90, 0xbf, 2},
                                   {0xf1, 0xf3, 0x80, 0xbf, 2}, {0xf4, 0xf4, 0x80, 0x8f, 2}};
    int32_t to = UNKNOWN, next;
    for (int i = 0; i < 3; i++) {
        next = all_lead(m, from, ascii[i][0], ascii[i][1]);
        if (next < 0 || (i && next != to)) return DEAD;
        to = next;
    }
    for (int i = 0; i < 8; i++) {
        const int *c = chars[i];
        if (all_chars(m, from, c[0], c[1], c[2], c[3], c[4]) != to) return DEAD;
    }
    return to;
}

/* How many plain characters a state takes, whatever they are; *all: any number. */
static int plain_length(nmk_masks *m, int32_t s, bool *all) {
    *all = false;
    for (int n = 0; n < PLAIN_LENGTHS; n++) {
        if (m->state[s].plain == UNKNOWN) {
            int32_t to = find_plain(m, s);
            if (m->gave_up) return 0;
            m->state[s].plain = to;
        }
        int32_t to = m->state[s].plain;
        if (to == DEAD) return n;
        if (to == s) return *all = true, 0;
        s = to;
    }
    return PLAIN_LENGTHS;
}

/* Adds the tokens of a tree that the state takes, but for those of `known` characters or fewer. */
static void walk(nmk_masks *m, const tree *t, int32_t s, int known, uint32_t *mask) {
    m->path[0] = s;
    for (int i = 0; i < t->count && !m->gave_up;) {
        const node *x = &t->node[i];
        if (known && x->most <= known) {
            i = x->past;
            continue;
        }
        int32_t to = step(m, m->path[x->depth], x->byte);
        if (to == DEAD) {
            i = x->past;
            continue;
        }
        m->path[x->depth + 1] = to;
        for (int k = 0; k < x->tokens; k++) set_bit(mask, t->id[x->token + k]);
        i++;
    }
}

static void find_mask(nmk_masks *m, int32_t s, uint32_t *mask) {
    const nmk_token_tree *t = m->t;
    const nmk_grammar *g = m->g;
    bool all;
    int known = plain_length(m, s, &all);
    memcpy(mask, t->up_to[known], sizeof *mask * (size_t)t->words);
    if (all) {
        /* the longest ones too */
        for (int i = 0; i < t->words; i++) mask[i] = t->up_to[PLAIN_LENGTHS][i];
        walk(m, &t->plain, s, PLAIN_LENGTHS, mask);
    } else {
        walk(m, &t->plain, s, known, mask);
    }
    walk(m, &t->other, s, 0, mask);
    for (int i = 0; i < m->state[s].count; i++)
        for (int k = g->first[m->place[m->state[s].first + i].state]; k >= 0; k = g->edge[k].next)
            if (g->edge[k].kind == NMK_EDGE_TOKEN) set_bit(mask, g->edge[k].what);
    if (m->state[s].complete)
        for (int i = 0; i < t->ends; i++) set_bit(mask, t->end[i]);
}

/* The place of the one used longest ago. */
static int oldest_mask(const nmk_masks *m) {
    int found = 0;
    for (int i = 1; i < MOST_MASKS; i++)
        if (m->mask[i].used < m->mask[found].used) found = i;
    return found;
}

static const uint32_t *kept_mask(nmk_masks *m, int32_t s) {
    int i = m->state[s].mask;
    if (i < 0 || m->mask[i].of != s) {
        i = oldest_mask(m);
        m->mask[i].of = -1;
        if (!m->mask[i].bits) m->mask[i].bits = xmalloc(sizeof(uint32_t) * (size_t)m->t->words);
        find_mask(m, s, m->mask[i].bits);
        if (m->gave_up) return NULL;
        m->mask[i].of = s, m->state[s].mask = i;
    }
    m->mask[i].used = ++m->uses;
    return m->mask[i].bits;
}

/* ---------------------------------------------------------------- walkers */

static const char too_much[] = "the grammar has too many ways to go on from here";

static bool is_end(const nmk_token_tree *t, int32_t token) {
    for (int i = 0; i < t->ends; i++)
        if (t->end[i] == token) return true;
    return false;
}

static int32_t take(nmk_masks *m, int32_t from, int32_t token) {
    const nmk_token_tree *t = m->t;
    if (token < 0 || token >= t->vocab) return DEAD;
    if (!t->text[token]) return token_step(m, from, token);
    for (int i = 0; i < t->bytes[token] && from != DEAD; i++) from = step(m, from, (uint8_t)t->text[token][i]);
    return from;
}

/* The walker is at a state. */
static void settle(nmk_walker *w, int32_t at) {
    const nmk_masks *m = w->m;
    const state *s = &m->state[at];
    w->at = at, w->life = m->life, w->stack_life = m->stack_life;
    if (s->count > w->place_room)
        w->place = xrealloc(w->place, sizeof *w->place * (size_t)(w->place_room = 2 * s->count));
    if (s->count) memcpy(w->place, m->place + s->first, sizeof *w->place * (size_t)s->count);
    w->places = s->count, w->complete = s->complete;
}

/* The walker's state among those that there are now. */
static void find_again(nmk_walker *w) {
    nmk_masks *m = w->m;
    begin_state(m);
    while (m->found_room < w->places) m->found = xrealloc(m->found, sizeof *m->found * (size_t)(m->found_room *= 2));
    if (w->places) memcpy(m->found, w->place, sizeof *w->place * (size_t)w->places);
    m->found_count = w->places, m->complete = w->complete;
    settle(w, find_state(m));
}

/* From the start, over all tokens that came; false: too much work. */
static bool walk_again(nmk_walker *w) {
    nmk_masks *m = w->m;
    int32_t at = start_state(m);
    for (int i = 0; at >= 0 && i <= w->tokens; i++) {
        settle(w, at);
        if (is_full(m) && m->stacks >= MOST_STACKS / 2) {
            m->gave_up = true; /* what it stands on would go too */
            return false;
        }
        if (is_full(m)) forget(m), find_again(w);
        if (i < w->tokens) at = take(m, w->at, w->token[i]);
    }
    return at >= 0;
}

/* The walker's state is there, by lock. */
static bool enter(nmk_walker *w, nmk_err *e) {
    nmk_masks *m = w->m;
    m->gave_up = false;
    m->deadline_ns = thread_ns() + (uint64_t)WORK_MS * 1000000;
    if (is_full(m) || m->stacks > MOST_STACKS / 2) forget(m);
    if (w->at == UNKNOWN || w->stack_life != m->stack_life) {
        if (!walk_again(w)) {
            w->at = UNKNOWN;
            nmk_fail(e, "%s", m->gave_up ? too_much : "nothing is in the grammar");
            return false;
        }
    } else if (w->life != m->life) {
        find_again(w);
    }
    return true;
}

nmk_walker *nmk_walker_new(nmk_masks *m) {
    nmk_walker *w = xcalloc(1, sizeof *w);
    w->m = nmk_masks_ref(m), w->at = UNKNOWN;
    return w;
}

void nmk_walker_free(nmk_walker *w) {
    if (!w) return;
    nmk_masks_unref(w->m);
    free(w->token), free(w->place);
    free(w);
}

bool nmk_walker_mask(nmk_walker *w, uint32_t *mask, nmk_err *e) {
    nmk_masks *m = w->m;
    bool done = false;
    if (w->ended) {
        nmk_fail(e, "the text has ended");
        return false;
    }
    pthread_mutex_lock(&m->lock);
    if (enter(w, e)) {
        const uint32_t *bits = kept_mask(m, w->at);
        uint32_t any = 0;
        for (int i = 0; bits && i < m->t->words; i++) any |= mask[i] = bits[i];
        done = any != 0;
        if (!done) nmk_fail(e, "%s", m->gave_up ? too_much : "no token of the vocabulary continues the text");
    }
    pthread_mutex_unlock(&m->lock);
    return done;
}

bool nmk_walker_take(nmk_walker *w, int32_t token, nmk_err *e) {
    nmk_masks *m = w->m;
    bool taken = false;
    pthread_mutex_lock(&m->lock);
    if (enter(w, e)) {
        int32_t to = w->ended ? DEAD : take(m, w->at, token);
        if (to >= 0) {
            if (w->tokens == w->token_room)
                w->token = xrealloc(w->token, sizeof token * (size_t)(w->token_room = w->tokens ? 2 * w->tokens : 64));
            w->token[w->tokens++] = token;
            settle(w, to);
            taken = true;
        } else if (!m->gave_up && !w->ended && m->state[w->at].complete && is_end(m->t, token)) {
            w->ended = taken = true;
        } else {
            nmk_fail(e, "%s", m->gave_up ? too_much : "the token is none that the grammar allows");
        }
    }
    pthread_mutex_unlock(&m->lock);
    return taken;
}

bool nmk_walker_ended(const nmk_walker *w) { return w->ended; }
