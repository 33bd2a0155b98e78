#include "grammar.h"

#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- building */

/* Room for one more element. */
#define GROW(array, count, room)                                           \
    do {                                                                   \
        if ((count) == (room)) {                                           \
            (room) = (room) ? 2 * (room) : 64;                             \
            (array) = xrealloc((array), sizeof *(array) * (size_t)(room)); \
        }                                                                  \
    } while (0)

nmk_grammar *nmk_grammar_new(void) {
    nmk_grammar *g = xcalloc(1, sizeof *g);
    nmk_grammar_state(g); /* 0 takes what is beyond the limits */
    return g;
}

void nmk_grammar_free(nmk_grammar *g) {
    if (!g) return;
    free(g->edge), free(g->first), free(g->start), free(g->end);
    free(g->rule_of_end), free(g->need), free(g->tail);
    free(g);
}

int nmk_grammar_state(nmk_grammar *g) {
    if (g->states == NMK_GRAMMAR_STATES) {
        g->full = true;
        return 0;
    }
    GROW(g->first, g->states, g->state_room);
    g->first[g->states] = -1;
    return g->states++;
}

int nmk_grammar_rule(nmk_grammar *g) {
    if (g->rules == g->rule_room) {
        g->rule_room = g->rule_room ? 2 * g->rule_room : 64;
        g->start = xrealloc(g->start, sizeof *g->start * (size_t)g->rule_room);
        g->end = xrealloc(g->end, sizeof *g->end * (size_t)g->rule_room);
    }
    g->start[g->rules] = nmk_grammar_state(g);
    g->end[g->rules] = nmk_grammar_state(g);
    return g->rules++;
}

static void add_edge(nmk_grammar *g, int from, nmk_edge edge) {
    if (g->edges == NMK_GRAMMAR_EDGES) g->full = true;
    if (g->full) return;
    GROW(g->edge, g->edges, g->edge_room);
    edge.next = g->first[from];
    g->edge[g->edges] = edge;
    g->first[from] = g->edges++;
}

void nmk_grammar_bytes(nmk_grammar *g, int from, int low, int high, int to) {
    add_edge(g, from, (nmk_edge){.kind = NMK_EDGE_BYTES, .low = (uint8_t)low, .high = (uint8_t)high, .to = to});
}

void nmk_grammar_token(nmk_grammar *g, int from, int32_t token, int to) {
    add_edge(g, from, (nmk_edge){.kind = NMK_EDGE_TOKEN, .what = token, .to = to});
}

void nmk_grammar_jump(nmk_grammar *g, int from, int to) {
    add_edge(g, from, (nmk_edge){.kind = NMK_EDGE_JUMP, .to = to});
}

void nmk_grammar_call(nmk_grammar *g, int from, int rule, int to) {
    add_edge(g, from, (nmk_edge){.kind = NMK_EDGE_CALL, .what = rule, .to = to});
}

int nmk_grammar_literal(nmk_grammar *g, int from, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes && !g->full; i++) {
        int byte = (uint8_t)text[i], to = -1;
        for (int k = g->first[from]; k >= 0; k = g->edge[k].next)
            if (g->edge[k].kind == NMK_EDGE_BYTES && g->edge[k].low == byte && g->edge[k].high == byte)
                to = g->edge[k].to;
        if (to < 0) nmk_grammar_bytes(g, from, byte, byte, to = nmk_grammar_state(g));
        from = to;
    }
    return from;
}

/* ---------------------------------------------------------------- what follows from the edges */

/* States by what leads to them: reached[at[s]..at[s + 1]). */
typedef struct {
    int32_t *at, *state;
} reverse;

static reverse reverse_of(const nmk_grammar *g, bool callers) {
    int count = callers ? g->rules : g->states;
    reverse r = {xcalloc((size_t)count + 1, sizeof *r.at), xcalloc((size_t)g->edges + 1, sizeof *r.state)};
    for (int pass = 0; pass < 2; pass++) {
        for (int s = 0; s < g->states; s++)
            for (int k = g->first[s]; k >= 0; k = g->edge[k].next) {
                const nmk_edge *x = &g->edge[k];
                if (callers && x->kind != NMK_EDGE_CALL) continue;
                int to = callers ? x->what : x->to;
                if (pass)
                    r.state[--r.at[to]] = s;
                else
                    r.at[to]++;
            }
        for (int i = 0; !pass && i < count; i++) r.at[i + 1] += r.at[i];
    }
    return r;
}

static void reverse_free(reverse *r) { free(r->at), free(r->state); }

/* The least need of a state, by those of the states that it leads to. */
static int need_of(const nmk_grammar *g, int s) {
    int least = g->rule_of_end[s] >= 0 ? 0 : -1;
    for (int k = g->first[s]; k >= 0; k = g->edge[k].next) {
        const nmk_edge *x = &g->edge[k];
        int need = g->need[x->to];
        if (x->kind == NMK_EDGE_CALL && need >= 0) {
            int inner = g->need[g->start[x->what]];
            need = inner < 0 ? -1 : inner + 1 > need ? inner + 1 : need;
        }
        if (need >= 0 && (least < 0 || need < least)) least = need;
    }
    return least;
}

static void find_needs(nmk_grammar *g) {
    reverse before = reverse_of(g, false), callers = reverse_of(g, true);
    int32_t *rule_of_start = xcalloc((size_t)g->states, sizeof *rule_of_start);
    int32_t *queue = xcalloc((size_t)g->states, sizeof *queue);
    bool *queued = xcalloc((size_t)g->states, sizeof *queued);
    int head = 0, count = 0;
    memset(g->need, -1, sizeof *g->need * (size_t)g->states);
    memset(rule_of_start, -1, sizeof *rule_of_start * (size_t)g->states);
    for (int r = 0; r < g->rules; r++) {
        rule_of_start[g->start[r]] = r;
        if (queued[g->end[r]]) continue;
        queue[count++] = g->end[r], queued[g->end[r]] = true;
    }
    while (count) {
        int s = queue[head], need = need_of(g, s), r = rule_of_start[s];
        head = (head + 1) % g->states, count--, queued[s] = false;
        if (need == g->need[s]) continue;
        g->need[s] = need;
        int from[2] = {before.at[s], r < 0 ? 0 : callers.at[r]};
        int past[2] = {before.at[s + 1], r < 0 ? 0 : callers.at[r + 1]};
        for (int i = 0; i < 2; i++)
            for (int k = from[i]; k < past[i]; k++) {
                int t = (i ? callers.state : before.state)[k];
                if (queued[t]) continue;
                queue[(head + count++) % g->states] = t, queued[t] = true;
            }
    }
    reverse_free(&before), reverse_free(&callers);
    free(rule_of_start), free(queue), free(queued);
}

/* A chain of single jumps to the end of a rule. */
static void find_tails(nmk_grammar *g) {
    for (int s = 0; s < g->states; s++) {
        int at = s, steps = 0;
        while (g->rule_of_end[at] < 0 && g->first[at] >= 0 && steps++ < 16) {
            const nmk_edge *x = &g->edge[g->first[at]];
            if (x->kind != NMK_EDGE_JUMP || x->next >= 0) break;
            at = x->to;
        }
        g->tail[s] = g->rule_of_end[at] >= 0 && g->first[at] < 0;
    }
}

/* Which states lead to the end of their rule without taking anything. */
static bool *find_empty(const nmk_grammar *g) {
    bool *empty = xcalloc((size_t)g->states, sizeof *empty), again = true;
    for (int r = 0; r < g->rules; r++) empty[g->end[r]] = true;
    while (again) {
        again = false;
        for (int s = g->states - 1; s >= 0; s--)
            for (int k = g->first[s]; k >= 0 && !empty[s]; k = g->edge[k].next) {
                const nmk_edge *x = &g->edge[k];
                if (x->kind == NMK_EDGE_JUMP ? empty[x->to]
                                             : x->kind == NMK_EDGE_CALL && empty[x->to] && empty[g->start[x->what]])
                    empty[s] = again = true;
            }
    }
    return empty;
}

/* Whether a rule can be called within itself before anything is taken.  An explicit stack: the walk is as long as the
 * grammar is. */
static bool recurses_left(const nmk_grammar *g) {
    enum { NEW, OPEN, DONE };
    bool *empty = find_empty(g), found = false;
    uint8_t *mark = xcalloc((size_t)g->states, sizeof *mark);
    struct {
        int32_t state, edge;
        bool returned; /* from the call of `edge`, which may be empty */
    } *stack = xcalloc((size_t)g->states + 1, sizeof *stack);
    /* The start of a rule stays open until all that it can begin with was seen, so whoever meets an open state by a
     * call or a jump has found a circle; circles of jumps alone do not matter, but they have states between them. */
    for (int r = 0; r < g->rules && !found; r++) {
        int depth = 0;
        if (mark[g->start[r]] != NEW) continue;
        stack[depth].state = g->start[r], stack[depth].edge = g->first[g->start[r]], stack[depth].returned = false;
        mark[g->start[r]] = OPEN;
        while (depth >= 0 && !found) {
            int k = stack[depth].edge, to = -1;
            if (k < 0) {
                mark[stack[depth--].state] = DONE;
                continue;
            }
            const nmk_edge *x = &g->edge[k];
            bool call = x->kind == NMK_EDGE_CALL;
            if (call && !stack[depth].returned) {
                stack[depth].returned = true;
                to = g->start[x->what];
                if (mark[to] == OPEN) found = true;
            } else {
                stack[depth].edge = x->next, stack[depth].returned = false;
                if (x->kind == NMK_EDGE_JUMP || (call && empty[g->start[x->what]])) to = x->to;
            }
            if (to < 0 || mark[to] != NEW) continue;
            depth++;
            stack[depth].state = to, stack[depth].edge = g->first[to], stack[depth].returned = false;
            mark[to] = OPEN;
        }
    }
    free(empty), free(mark), free(stack);
    return found;
}

int nmk_grammar_finish(nmk_grammar *g, int root, nmk_err *e) {
    if (g->full) return nmk_fail(e, "it is too large: more than %d states", NMK_GRAMMAR_STATES);
    g->root = root;
    g->rule_of_end = xcalloc((size_t)g->states, sizeof *g->rule_of_end);
    g->need = xcalloc((size_t)g->states, sizeof *g->need);
    g->tail = xcalloc((size_t)g->states, sizeof *g->tail);
    memset(g->rule_of_end, -1, sizeof *g->rule_of_end * (size_t)g->states);
    for (int r = 0; r < g->rules; r++) g->rule_of_end[g->end[r]] = r;
    find_needs(g);
    find_tails(g);
    if (recurses_left(g)) return nmk_fail(e, "it refers to itself before anything else (left recursion)");
    int need = g->need[g->start[root]];
    if (need < 0) return nmk_fail(e, "nothing satisfies it");
    if (need > NMK_GRAMMAR_DEPTH) return nmk_fail(e, "it is nested too deeply: more than %d levels", NMK_GRAMMAR_DEPTH);
    return 0;
}

/* ---------------------------------------------------------------- sets */

enum { LAST = 0x10ffff, SURROGATES = 0xd800, PAST_SURROGATES = 0xe000 };

void nmk_set_add(nmk_set *s, uint32_t low, uint32_t high) {
    if (s->count == s->room) /* most have one range, and a literal has one of them for each character */
        s->range = xrealloc(s->range, sizeof *s->range * (size_t)(s->room = s->room ? 4 * s->room : 1));
    s->range[s->count][0] = low, s->range[s->count++][1] = high < LAST ? high : LAST;
}

void nmk_set_add_all(nmk_set *s, const nmk_set *other) {
    for (int i = 0; i < other->count; i++) nmk_set_add(s, other->range[i][0], other->range[i][1]);
}

static int by_low(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

void nmk_set_normalize(nmk_set *s) {
    int n = 0;
    if (s->count) qsort(s->range, (size_t)s->count, sizeof *s->range, by_low);
    for (int i = 0; i < s->count; i++) {
        uint32_t low = s->range[i][0], high = s->range[i][1];
        if (n && low <= s->range[n - 1][1] + 1) {
            if (high > s->range[n - 1][1]) s->range[n - 1][1] = high;
            continue;
        }
        s->range[n][0] = low, s->range[n++][1] = high;
    }
    s->count = n;
}

void nmk_set_invert(nmk_set *s) {
    nmk_set out = {0};
    uint32_t from = 0;
    nmk_set_normalize(s);
    for (int i = 0; i < s->count; i++) {
        if (s->range[i][0] > from) nmk_set_add(&out, from, s->range[i][0] - 1);
        from = s->range[i][1] + 1;
    }
    if (from <= LAST) nmk_set_add(&out, from, LAST);
    nmk_set_free(s);
    *s = out;
}

void nmk_set_keep(nmk_set *s, uint32_t low, uint32_t high) {
    int n = 0;
    nmk_set_normalize(s);
    for (int i = 0; i < s->count; i++) {
        uint32_t a = s->range[i][0] > low ? s->range[i][0] : low, b = s->range[i][1] < high ? s->range[i][1] : high;
        if (a <= b) s->range[n][0] = a, s->range[n++][1] = b;
    }
    s->count = n;
}

void nmk_set_free(nmk_set *s) {
    free(s->range);
    *s = (nmk_set){0};
}

/* ---------------------------------------------------------------- characters as bytes */

/* States that take the 1, 2 or 3 continuation bytes which may be any, before `to`. */
typedef struct {
    int state[4];
} rest;

static int rest_of(nmk_grammar *g, rest *r, int bytes) {
    if (r->state[bytes] < 0) {
        int next = rest_of(g, r, bytes - 1);
        nmk_grammar_bytes(g, r->state[bytes] = nmk_grammar_state(g), 0x80, 0xbf, next);
    }
    return r->state[bytes];
}

static int encode(uint32_t c, uint8_t *out) {
    if (c < 0x80) return out[0] = (uint8_t)c, 1;
    int n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = (uint8_t)(0x80 | (c & 0x3f));
    out[0] = (uint8_t)(lead[n] | c);
    return n;
}

/* The sequences low..high of n bytes each, of which those from `at` on are left. */
static void sequences(nmk_grammar *g, int from, const uint8_t *low, const uint8_t *high, int at, int n, rest *r) {
    bool low_free = true, high_free = true; /* what follows may be as low, as high as can be */
    for (int i = at + 1; i < n; i++) low_free &= low[i] == 0x80, high_free &= high[i] == 0xbf;
    uint8_t least[4], most[4];
    memset(least, 0x80, sizeof least), memset(most, 0xbf, sizeof most);
    int first = low[at], last = high[at];
    if (at == n - 1) {
        nmk_grammar_bytes(g, from, first, last, r->state[0]);
        return;
    }
    if (first == last && !(low_free && high_free)) {
        int next = nmk_grammar_state(g);
        nmk_grammar_bytes(g, from, first, first, next);
        sequences(g, next, low, high, at + 1, n, r);
        return;
    }
    if (!low_free) {
        int next = nmk_grammar_state(g);
        nmk_grammar_bytes(g, from, first, first, next);
        sequences(g, next, low, most, at + 1, n, r);
        first++;
    }
    if (!high_free) {
        int next = nmk_grammar_state(g);
        nmk_grammar_bytes(g, from, last, last, next);
        sequences(g, next, least, high, at + 1, n, r);
        last--;
    }
    if (first <= last) nmk_grammar_bytes(g, from, first, last, rest_of(g, r, n - at - 1));
}

static void utf8_range(nmk_grammar *g, int from, uint32_t low, uint32_t high, rest *r) {
    static const uint32_t past[] = {0x80, 0x800, SURROGATES, 0x10000, LAST + 1};
    for (int i = 0; i < 5; i++) {
        uint32_t a = low, b = high;
        if (i && a < past[i - 1]) a = past[i - 1];
        if (i == 3 && a < PAST_SURROGATES) a = PAST_SURROGATES;
        if (b >= past[i]) b = past[i] - 1;
        if (a > b) continue;
        uint8_t from_bytes[4], to_bytes[4];
        encode(a, from_bytes);
        int n = encode(b, to_bytes);
        sequences(g, from, from_bytes, to_bytes, 0, n, r);
    }
}

/* A character that must be escaped in a JSON string. */
static void escaped(nmk_grammar *g, int from, uint32_t c, int to) {
    static const char in[] = "\"\\\b\t\n\f\r", out[] = "\"\\btnfr";
    const char *found = c ? strchr(in, (int)c) : NULL;
    int s = nmk_grammar_literal(g, from, "\\", 1);
    if (found) {
        nmk_grammar_bytes(g, s, out[found - in], out[found - in], to);
        return;
    }
    s = nmk_grammar_literal(g, s, c < 16 ? "u000" : "u001", 4);
    int low = "0123456789abcdef"[c & 15];
    nmk_grammar_bytes(g, s, low, low, to);
    if (low >= 'a') nmk_grammar_bytes(g, s, low - 'a' + 'A', low - 'a' + 'A', to);
}

void nmk_grammar_set(nmk_grammar *g, int from, const nmk_set *s, bool in_string, int to) {
    rest r = {{to, -1, -1, -1}};
    for (int i = 0; i < s->count; i++) {
        uint32_t low = s->range[i][0], high = s->range[i][1];
        if (!in_string) {
            utf8_range(g, from, low, high, &r);
            continue;
        }
        for (uint32_t c = low ? low : 1; c <= high && c < 0x20; c++) escaped(g, from, c, to);
        static const uint8_t special[] = {0x1f, '"', '\\'};
        for (int k = 0; k < 3; k++) {
            uint32_t a = special[k] + 1u, b = k < 2 ? special[k + 1] - 1u : LAST;
            if (k && low <= special[k] && special[k] <= high) escaped(g, from, special[k], to);
            if (a < low) a = low;
            if (b > high) b = high;
            if (a <= b) utf8_range(g, from, a, b, &r);
        }
    }
}

/* ---------------------------------------------------------------- expressions */

nmk_expr *nmk_expr_new(nmk_expr_kind kind) {
    nmk_expr *x = xcalloc(1, sizeof *x);
    x->kind = kind;
    return x;
}

void nmk_expr_add(nmk_expr *x, nmk_expr *part) {
    if (x->parts == x->room) {
        x->room = x->room ? 2 * x->room : 4;
        x->part = xrealloc(x->part, sizeof *x->part * (size_t)x->room);
    }
    x->part[x->parts++] = part;
}

void nmk_expr_free(nmk_expr *x) {
    if (!x) return;
    for (int i = 0; i < x->parts; i++) nmk_expr_free(x->part[i]);
    free(x->part);
    nmk_set_free(&x->set);
    free(x);
}

nmk_expr *nmk_expr_repeat(nmk_expr *part, int low, int high) {
    nmk_expr *x = nmk_expr_new(NMK_EXPR_REPEAT);
    x->low = low, x->high = high;
    nmk_expr_add(x, part);
    return x;
}

/* Digits of a count; -1: none. */
static int64_t read_count(const char *text, size_t bytes, size_t *at, bool blanks) {
    int64_t n = -1;
    while (blanks && *at < bytes && (text[*at] == ' ' || text[*at] == '\t')) ++*at;
    for (; *at < bytes && text[*at] >= '0' && text[*at] <= '9'; ++*at) {
        n = (n < 0 ? 0 : n) * 10 + (text[*at] - '0');
        if (n > NMK_GRAMMAR_REPEATS) n = NMK_GRAMMAR_REPEATS + 1;
    }
    while (blanks && *at < bytes && (text[*at] == ' ' || text[*at] == '\t')) ++*at;
    return n;
}

bool nmk_expr_read_repeat(const char *text, size_t bytes, size_t *at, bool blanks, nmk_repeat *x) {
    size_t k = *at;
    switch (k < bytes ? text[k++] : 0) {
    case '*': *x = (nmk_repeat){0, -1}; break;
    case '+': *x = (nmk_repeat){1, -1}; break;
    case '?': *x = (nmk_repeat){0, 1}; break;
    case '{':
        x->low = x->high = read_count(text, bytes, &k, blanks);
        if (k < bytes && text[k] == ',') k++, x->high = read_count(text, bytes, &k, blanks);
        if ((x->low < 0 && x->high < 0) || k == bytes || text[k++] != '}') return false;
        break;
    default: return false;
    }
    *at = k;
    return true;
}

void nmk_expr_length(const nmk_expr *x, int64_t *fewest, int64_t *most) {
    int64_t low, high;
    *fewest = *most = 0;
    switch (x->kind) {
    case NMK_EXPR_SET: *fewest = *most = 1; break;
    case NMK_EXPR_SEQUENCE:
        for (int i = 0; i < x->parts; i++) {
            nmk_expr_length(x->part[i], &low, &high);
            *fewest += low;
            *most = *most < 0 || high < 0 ? -1 : *most + high;
        }
        break;
    case NMK_EXPR_EITHER:
        for (int i = 0; i < x->parts; i++) {
            nmk_expr_length(x->part[i], &low, &high);
            if (!i || low < *fewest) *fewest = low;
            if (*most >= 0 && (high < 0 || high > *most)) *most = high;
        }
        break;
    case NMK_EXPR_REPEAT:
        nmk_expr_length(x->part[0], &low, &high);
        *fewest = low * x->low;
        *most = !high ? 0 : high < 0 || x->high < 0 ? -1 : high * x->high;
        break;
    case NMK_EXPR_RULE: *most = -1; break;
    }
    const int64_t large = (int64_t)1 << 40; /* no more than that is told apart */
    if (*fewest > large) *fewest = large;
    if (*most > large) *most = large;
}

/* About how many states it takes; no more than MOST_WEIGHT is told apart. */
enum { MOST_WEIGHT = 1000 };

static int weight(const nmk_expr *x) {
    int sum = 1;
    for (int i = 0; i < x->parts && sum < MOST_WEIGHT; i++)
        sum += weight(x->part[i]) * (x->kind == NMK_EXPR_REPEAT ? 4 : 1);
    if (x->kind == NMK_EXPR_SET) sum += x->set.count;
    return sum < MOST_WEIGHT ? sum : MOST_WEIGHT;
}

static void repeat(nmk_grammar *g, int from, const nmk_expr *x, bool in_string, int to) {
    const nmk_expr *part = x->part[0];
    int copies = x->high < 0 ? x->low + 1 : x->high, rule = -1;
    if (copies > 3 && weight(part) * copies > 40) { /* written once, called often */
        rule = nmk_grammar_rule(g);
        nmk_grammar_expr(g, g->start[rule], part, in_string, g->end[rule]);
    }
    for (int i = 0; i < copies && !g->full; i++) {
        bool loop = x->high < 0 && i == x->low;
        int next = nmk_grammar_state(g);
        if (i >= x->low) nmk_grammar_jump(g, from, to);
        if (rule >= 0)
            nmk_grammar_call(g, from, rule, loop ? from : next);
        else
            nmk_grammar_expr(g, from, part, in_string, loop ? from : next);
        if (loop) return;
        from = next;
    }
    nmk_grammar_jump(g, from, to);
}

void nmk_grammar_expr(nmk_grammar *g, int from, const nmk_expr *x, bool in_string, int to) {
    switch (x->kind) {
    case NMK_EXPR_SET: nmk_grammar_set(g, from, &x->set, in_string, to); break;
    case NMK_EXPR_SEQUENCE:
        for (int i = 0; i + 1 < x->parts; i++) {
            int next = nmk_grammar_state(g);
            nmk_grammar_expr(g, from, x->part[i], in_string, next);
            from = next;
        }
        if (x->parts)
            nmk_grammar_expr(g, from, x->part[x->parts - 1], in_string, to);
        else
            nmk_grammar_jump(g, from, to);
        break;
    case NMK_EXPR_EITHER:
        for (int i = 0; i < x->parts; i++) {
            int first = nmk_grammar_state(g); /* of its own: a loop in one alternative is none of the others */
            nmk_grammar_jump(g, from, first);
            nmk_grammar_expr(g, first, x->part[i], in_string, to);
        }
        break;
    case NMK_EXPR_REPEAT: {
        int first = nmk_grammar_state(g);
        nmk_grammar_jump(g, from, first);
        repeat(g, first, x, in_string, to);
        break;
    }
    case NMK_EXPR_RULE: nmk_grammar_call(g, from, x->rule, to); break;
    }
}
