#include "schema.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "regex.h"

enum {
    MOST_SCHEMAS = 20000, /* looked at, those that merging makes included */
    MOST_COPIED = 500000, /* properties, from one merged schema to the next */
    MOST_NESTED = 200,
    MOST_PROPERTIES = 1000,
    MOST_VALUES = 20000, /* of an enum */
    INDENT = 20,         /* blanks at the beginning of a line, at most */
    DIGITS = 15          /* that a double has for certain */
};

typedef struct {
    struct json_object *schema;
    int rule;
} known;

typedef struct {
    int low, high, rule;
} counted;

typedef struct {
    nmk_grammar *g;
    struct json_object *root;
    nmk_err *e;
    nmk_buf path;
    int nested, schemas, copied;
    known *known;
    int known_count, known_room;
    struct json_object **made; /* to be released */
    int made_count, made_room;
    counted *counted; /* strings of so many characters */
    int counted_count, counted_room;
    int ws, any, object, string, chars, number, integer; /* rules that many need; -1: not there yet */
} reader;

/* ---------------------------------------------------------------- refusals */

static int fail(reader *r, const char *keyword, const char *what) {
    return nmk_fail(r->e, "%s%s%s: %s", r->path.data, keyword ? "." : "", keyword ? keyword : "", what);
}

static int unsupported(reader *r, const char *keyword) {
    return fail(r, keyword, "this keyword is not supported here");
}

/* Goes into a part of the schema; the length to return to. */
static size_t enter(reader *r, const char *part, const char *name) {
    size_t length = r->path.length;
    nmk_buf_printf(&r->path, ".%s", part);
    if (name) nmk_buf_printf(&r->path, ".%.60s", name);
    return length;
}

static size_t enter_index(reader *r, const char *part, size_t i) {
    size_t length = r->path.length;
    nmk_buf_printf(&r->path, ".%s[%zu]", part, i);
    return length;
}

static void leave(reader *r, size_t length) { r->path.data[r->path.length = length] = 0; }

/* ---------------------------------------------------------------- JSON */

static bool is(struct json_object *v, enum json_type type) { return v && json_object_is_type(v, type); }

/* Also of null, which json-c has no object for. */
static bool has(struct json_object *o, const char *key) { return json_object_object_get_ex(o, key, NULL); }

static struct json_object *get(struct json_object *o, const char *key) {
    struct json_object *v = NULL;
    return json_object_object_get_ex(o, key, &v) ? v : NULL;
}

static size_t length(struct json_object *array) { return json_object_array_length(array); }
static struct json_object *at(struct json_object *array, size_t i) { return json_object_array_get_idx(array, i); }

static struct json_object *keep(reader *r, struct json_object *made) {
    if (r->made_count == r->made_room)
        r->made = xrealloc(r->made, sizeof *r->made * (size_t)(r->made_room = r->made_room ? 2 * r->made_room : 16));
    return r->made[r->made_count++] = made;
}

static const char *text_of(struct json_object *v) {
    return json_object_to_json_string_ext(v, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE);
}

static bool equal(struct json_object *a, struct json_object *b) {
    bool numbers =
        (is(a, json_type_int) || is(a, json_type_double)) && (is(b, json_type_int) || is(b, json_type_double));
    if (numbers) return json_object_get_double(a) == json_object_get_double(b);
    return a == b || (a && b && json_object_equal(a, b));
}

static bool listed(struct json_object *array, struct json_object *v) {
    for (size_t i = 0; i < length(array); i++)
        if (equal(at(array, i), v)) return true;
    return false;
}

/* A count that a keyword says: -1 if it does not, -2 after a refusal. */
static int64_t count_of(reader *r, struct json_object *schema, const char *keyword) {
    struct json_object *v = get(schema, keyword);
    if (!has(schema, keyword)) return -1;
    double d = is(v, json_type_int) || is(v, json_type_double) ? json_object_get_double(v) : -1;
    if (d < 0 || d != floor(d)) return fail(r, keyword, "expected a whole number, 0 or more"), -2;
    return d > 1e15 ? (int64_t)1e15 : (int64_t)d;
}

/* ---------------------------------------------------------------- pieces of JSON */

/* A literal up to a state that is there already. */
static void literal_to(reader *r, int from, const char *text, size_t bytes, int to) {
    int first = nmk_grammar_state(r->g);
    nmk_grammar_jump(r->g, from, first);
    nmk_grammar_jump(r->g, nmk_grammar_literal(r->g, first, text, bytes), to);
}

static void byte_to(reader *r, int from, char c, int to) { nmk_grammar_bytes(r->g, from, c, c, to); }

static int byte(reader *r, int from, char c) {
    int to = nmk_grammar_state(r->g);
    byte_to(r, from, c, to);
    return to;
}

static int call(reader *r, int from, int rule) {
    int to = nmk_grammar_state(r->g);
    nmk_grammar_call(r->g, from, rule, to);
    return to;
}

/* Nothing, a blank, or an end of line and what indents the next. */
static int ws(reader *r) {
    if (r->ws >= 0) return r->ws;
    nmk_grammar *g = r->g;
    int rule = r->ws = nmk_grammar_rule(g), s = nmk_grammar_state(g);
    nmk_grammar_jump(g, g->start[rule], g->end[rule]);
    byte_to(r, g->start[rule], ' ', g->end[rule]);
    byte_to(r, g->start[rule], '\n', s);
    for (int i = 0; i < INDENT; i++) {
        int next = nmk_grammar_state(g);
        nmk_grammar_jump(g, s, g->end[rule]);
        byte_to(r, s, ' ', next), byte_to(r, s, '\t', next);
        s = next;
    }
    nmk_grammar_jump(g, s, g->end[rule]);
    return rule;
}

static int spaced(reader *r, int from) { return call(r, from, ws(r)); }

/* One character of a string, in any spelling but \u0000. */
static void string_char(reader *r, int from, int to) {
    nmk_grammar *g = r->g;
    nmk_set plain = {0};
    nmk_set_add(&plain, 0x20, '!'), nmk_set_add(&plain, '#', '['), nmk_set_add(&plain, ']', 0x10ffff);
    nmk_grammar_set(g, from, &plain, false, to);
    nmk_set_free(&plain);
    int escape = byte(r, from, '\\'), u = byte(r, escape, 'u'), hex[4];
    for (const char *c = "\"\\/bfnrt"; *c; c++) byte_to(r, escape, *c, to);
    hex[0] = to;
    for (int i = 1; i < 4; i++) {
        hex[i] = nmk_grammar_state(g);
        nmk_grammar_bytes(g, hex[i], '0', '9', hex[i - 1]);
        nmk_grammar_bytes(g, hex[i], 'a', 'f', hex[i - 1]), nmk_grammar_bytes(g, hex[i], 'A', 'F', hex[i - 1]);
    }
    /* the first digit: not 0, not d; of 0 and d what is no NUL and no half of a pair */
    nmk_grammar_bytes(g, u, '1', '9', hex[3]);
    nmk_grammar_bytes(g, u, 'a', 'c', hex[3]), nmk_grammar_bytes(g, u, 'A', 'C', hex[3]);
    nmk_grammar_bytes(g, u, 'e', 'f', hex[3]), nmk_grammar_bytes(g, u, 'E', 'F', hex[3]);
    int zero = u;
    for (int i = 3; i > 0; i--) {
        zero = byte(r, zero, '0');
        nmk_grammar_bytes(g, zero, '1', '9', hex[i - 1]);
        nmk_grammar_bytes(g, zero, 'a', 'f', hex[i - 1]), nmk_grammar_bytes(g, zero, 'A', 'F', hex[i - 1]);
    }
    int d = nmk_grammar_state(g), high = nmk_grammar_state(g);
    byte_to(r, u, 'd', d), byte_to(r, u, 'D', d);
    nmk_grammar_bytes(g, d, '0', '7', hex[2]);
    nmk_grammar_bytes(g, d, '8', '9', high), nmk_grammar_bytes(g, d, 'a', 'b', high);
    nmk_grammar_bytes(g, d, 'A', 'B', high);
    int pair = nmk_grammar_state(g), digit = nmk_grammar_state(g);
    for (int i = 0; i < 2; i++) {
        int from_digit = i ? digit : high, to_digit = i ? pair : digit;
        nmk_grammar_bytes(g, from_digit, '0', '9', to_digit);
        nmk_grammar_bytes(g, from_digit, 'a', 'f', to_digit), nmk_grammar_bytes(g, from_digit, 'A', 'F', to_digit);
    }
    int low = byte(r, byte(r, pair, '\\'), 'u'), after = nmk_grammar_state(g);
    byte_to(r, low, 'd', after), byte_to(r, low, 'D', after);
    nmk_grammar_bytes(g, after, 'c', 'f', hex[2]), nmk_grammar_bytes(g, after, 'C', 'F', hex[2]);
}

static int string(reader *r) {
    if (r->string >= 0) return r->string;
    int rule = r->string = nmk_grammar_rule(r->g), s = byte(r, r->g->start[rule], '"');
    string_char(r, s, s);
    byte_to(r, s, '"', r->g->end[rule]);
    return rule;
}

/* A string of low to high characters (-1: any number), or -1. */
static int counted_string(reader *r, int64_t low, int64_t high) {
    nmk_grammar *g = r->g;
    if (low <= 0 && high < 0) return string(r);
    if (high >= 0 && high < low) return fail(r, "maxLength", "less than minLength");
    if (low > NMK_GRAMMAR_REPEATS) return fail(r, "minLength", "too large");
    if (high > NMK_GRAMMAR_REPEATS) return fail(r, "maxLength", "too large: leave it out, or ask for at most 50000");
    if (low < 0) low = 0;
    for (int i = 0; i < r->counted_count; i++)
        if (r->counted[i].low == low && r->counted[i].high == high) return r->counted[i].rule;
    if (r->chars < 0) {
        r->chars = nmk_grammar_rule(g);
        string_char(r, g->start[r->chars], g->end[r->chars]);
    }
    int rule = nmk_grammar_rule(g), s = byte(r, g->start[rule], '"');
    for (int i = 0; i < (high < 0 ? low : high) && !g->full; i++) {
        if (i >= low) byte_to(r, s, '"', g->end[rule]);
        s = call(r, s, r->chars);
    }
    if (high < 0) nmk_grammar_call(g, s, r->chars, s);
    byte_to(r, s, '"', g->end[rule]);
    if (r->counted_count == r->counted_room) {
        r->counted_room = r->counted_room ? 2 * r->counted_room : 16;
        r->counted = xrealloc(r->counted, sizeof *r->counted * (size_t)r->counted_room);
    }
    r->counted[r->counted_count++] = (counted){(int)low, (int)high, rule};
    return rule;
}

/* Up to `most` digits, at least `least`. */
static void digits(reader *r, int from, int least, int most, int to) {
    for (int i = 0; i < most; i++) {
        int next = nmk_grammar_state(r->g);
        if (i >= least) nmk_grammar_jump(r->g, from, to);
        nmk_grammar_bytes(r->g, from, '0', '9', next);
        from = next;
    }
    nmk_grammar_jump(r->g, from, to);
}

static int whole(reader *r, int from) {
    nmk_grammar *g = r->g;
    int first = nmk_grammar_state(g), rest = nmk_grammar_state(g), to = nmk_grammar_state(g);
    nmk_grammar_jump(g, from, first), byte_to(r, from, '-', first);
    byte_to(r, first, '0', to);
    nmk_grammar_bytes(g, first, '1', '9', rest);
    digits(r, rest, 0, DIGITS - 1, to);
    return to;
}

static int integer(reader *r) {
    if (r->integer >= 0) return r->integer;
    int rule = r->integer = nmk_grammar_rule(r->g);
    nmk_grammar_jump(r->g, whole(r, r->g->start[rule]), r->g->end[rule]);
    return rule;
}

static int number(reader *r) {
    if (r->number >= 0) return r->number;
    nmk_grammar *g = r->g;
    int rule = r->number = nmk_grammar_rule(g), s = whole(r, g->start[rule]), part = nmk_grammar_state(g);
    nmk_grammar_jump(g, s, part);
    digits(r, byte(r, s, '.'), 1, DIGITS, part);
    nmk_grammar_jump(g, part, g->end[rule]);
    int power = nmk_grammar_state(g), sign = nmk_grammar_state(g);
    byte_to(r, part, 'e', power), byte_to(r, part, 'E', power);
    nmk_grammar_jump(g, power, sign), byte_to(r, power, '-', sign), byte_to(r, power, '+', sign);
    digits(r, sign, 1, 2, g->end[rule]);
    return rule;
}

static int any(reader *r);

/* "{", members of any kind, "}". */
static int any_object(reader *r) {
    if (r->object >= 0) return r->object;
    nmk_grammar *g = r->g;
    int rule = r->object = nmk_grammar_rule(g), name = nmk_grammar_state(g);
    int s = spaced(r, byte(r, g->start[rule], '{'));
    byte_to(r, s, '}', g->end[rule]);
    nmk_grammar_jump(g, s, name);
    s = spaced(r, byte(r, call(r, name, string(r)), ':'));
    s = call(r, s, any(r));
    nmk_grammar_jump(g, spaced(r, byte(r, s, ',')), name);
    byte_to(r, spaced(r, s), '}', g->end[rule]);
    return rule;
}

static int any(reader *r) {
    if (r->any >= 0) return r->any;
    static const char *const words[] = {"true", "false", "null"};
    nmk_grammar *g = r->g;
    int rule = r->any = nmk_grammar_rule(g), start = g->start[rule], end = g->end[rule], item = nmk_grammar_state(g);
    for (int i = 0; i < 3; i++) literal_to(r, start, words[i], strlen(words[i]), end);
    nmk_grammar_call(g, start, string(r), end), nmk_grammar_call(g, start, number(r), end);
    nmk_grammar_call(g, start, any_object(r), end);
    int s = spaced(r, byte(r, start, '['));
    byte_to(r, s, ']', end);
    nmk_grammar_jump(g, s, item);
    s = call(r, item, rule);
    nmk_grammar_jump(g, spaced(r, byte(r, s, ',')), item);
    byte_to(r, spaced(r, s), ']', end);
    return rule;
}

/* ---------------------------------------------------------------- numbers with bounds */

/* A decimal number that is not negative: its digits, without zeros before or behind. */
typedef struct {
    char whole[32], part[32]; /* whole is "0" at least */
    bool negative, inclusive, infinite;
} bound;

static bool is_zero(const bound *b) { return !b->infinite && !strcmp(b->whole, "0") && !*b->part; }

static int bound_of(reader *r, const char *keyword, struct json_object *v, bound *b) {
    char all[400];
    if (!is(v, json_type_int) && !is(v, json_type_double)) return fail(r, keyword, "expected a number");
    double d = json_object_get_double(v);
    *b = (bound){.negative = d < 0, .inclusive = true};
    if (!isfinite(d)) return fail(r, keyword, "expected a finite number");
    if (is(v, json_type_int)) {
        int64_t i = json_object_get_int64(v);
        snprintf(all, sizeof all, "%llu", (unsigned long long)(i < 0 ? -(uint64_t)i : (uint64_t)i));
    } else {
        for (int places = 0; places < 25; places++) { /* the fewest that are the number */
            snprintf(all, sizeof all, "%.*f", places, fabs(d));
            if (strtod(all, NULL) == fabs(d)) break;
        }
    }
    char *dot = strchr(all, '.'), *end = all + strlen(all);
    if (dot) {
        *dot = 0;
        while (end > dot + 1 && end[-1] == '0') *--end = 0;
        snprintf(b->part, sizeof b->part, "%s", dot + 1);
    }
    if (strlen(all) > 30) strcpy(all, "1000000000000000000000000000000"); /* beyond all that is written here */
    snprintf(b->whole, sizeof b->whole, "%s", all);
    return 0;
}

static char digit_of(const char *s, int i) { return i < (int)strlen(s) ? s[i] : '0'; }

/* What is left of a bound from digit i of its part on: nothing but zeros. */
static bool rest_zero(const bound *b, int i) { return i >= (int)strlen(b->part); }

/* A number so far: digits [0, i) of a whole of `size` digits, or of a part; it is the bounds' so far or not. */
typedef struct {
    reader *r;
    const bound *low, *high;
    int size;  /* of the whole */
    int after; /* digits behind the point, at most; 0: whole numbers */
    int end;
    int state[2][64][2][2]; /* in the part?, i, at low?, at high?; -1: not there yet */
} ranges;

static int range_state(ranges *x, bool part, int i, bool low, bool high) {
    int *known_state = &x->state[part][i][low][high];
    nmk_grammar *g = x->r->g;
    if (*known_state >= 0) return *known_state;
    int s = *known_state = nmk_grammar_state(g);
    bool whole_done = part || i == x->size;
    int done = part ? i : 0; /* of the part */
    if (whole_done && !(part && !i)) {
        bool enough = !low || (rest_zero(x->low, done) && x->low->inclusive);
        bool few = !high || !rest_zero(x->high, done) || x->high->inclusive;
        if (enough && few) nmk_grammar_jump(g, s, x->end);
    }
    if (whole_done && !part) {
        if (x->after) byte_to(x->r, s, '.', range_state(x, true, 0, low, high));
        return s;
    }
    if (part && i == x->after) return s;
    const char *low_digits = part ? x->low->part : x->low->whole, *high_digits = part ? x->high->part : x->high->whole;
    for (char c = '0'; c <= '9'; c++) {
        char least = low ? digit_of(low_digits, i) : '0', most = high ? digit_of(high_digits, i) : '9';
        if (c < least || c > most || (!part && !i && c == '0' && x->size > 1)) continue;
        byte_to(x->r, s, c, range_state(x, part, i + 1, low && c == least, high && c == most));
    }
    return s;
}

/* Numbers without a sign between the bounds. */
static void range(reader *r, int from, const bound *low, const bound *high, bool integers, int to) {
    int most = !integers ? DIGITS - 1 : high->infinite ? DIGITS : DIGITS + 1; /* 2^53 has one more */
    for (int size = 1; size <= most; size++) {
        int low_size = (int)strlen(low->whole), high_size = high->infinite ? 99 : (int)strlen(high->whole);
        if (size < low_size || size > high_size) continue;
        int after = integers ? 0 : DIGITS - size < 1 ? 1 : DIGITS - size;
        ranges *x = xmalloc(sizeof *x);
        *x = (ranges){.r = r, .low = low, .high = high, .size = size, .after = after, .end = to};
        memset(x->state, -1, sizeof x->state);
        nmk_grammar_jump(r->g, from, range_state(x, false, 0, size == low_size, size == high_size));
        free(x);
    }
}

/* The tighter of two lower bounds; of two upper ones if `upper`. */
static bool tighter(struct json_object *a, bool a_open, struct json_object *b, bool b_open, bool upper) {
    double x = json_object_get_double(a), y = json_object_get_double(b);
    if (x != y) return upper ? x < y : x > y;
    return a_open && !b_open;
}

/* The bound that minimum and exclusiveMinimum give together; false: none. */
static int read_bound(reader *r, struct json_object *schema, bool upper, bound *b, bool *found) {
    const char *closed = upper ? "maximum" : "minimum", *open = upper ? "exclusiveMaximum" : "exclusiveMinimum";
    struct json_object *c = get(schema, closed), *o = get(schema, open);
    bool exclusive = is(o, json_type_boolean) && json_object_get_boolean(o); /* as the oldest drafts have it */
    if (is(o, json_type_boolean)) o = NULL;
    *found = c || o;
    if (has(schema, closed) && bound_of(r, closed, c, b)) return -1;
    if (c) b->inclusive = !exclusive;
    if (!o) return has(schema, open) && !get(schema, open) ? fail(r, open, "expected a number") : 0;
    bound other;
    if (bound_of(r, open, o, &other)) return -1;
    other.inclusive = false;
    if (!c || tighter(o, true, c, exclusive, upper)) *b = other;
    return 0;
}

static int numeric(reader *r, struct json_object *schema, bool integers) {
    nmk_grammar *g = r->g;
    bound low, high;
    bool has_low, has_high;
    struct json_object *multiple = get(schema, "multipleOf");
    if (has(schema, "multipleOf") && !(is(multiple, json_type_int) && json_object_get_int64(multiple) == 1 && integers))
        return unsupported(r, "multipleOf");
    if (read_bound(r, schema, false, &low, &has_low) || read_bound(r, schema, true, &high, &has_high)) return -1;
    if (!has_low && !has_high) return integers ? integer(r) : number(r);
    int rule = nmk_grammar_rule(g), start = g->start[rule], end = g->end[rule];
    const bound zero = {.whole = "0", .inclusive = true}, infinite = {.infinite = true};
    /* 0 and more */
    if (!has_high || !high.negative || is_zero(&high))
        range(r, start, !has_low || low.negative ? &zero : &low, has_high ? &high : &infinite, integers, end);
    /* less than 0: the bounds change sides */
    if (!has_low || low.negative) {
        bound least = has_high && high.negative ? high : (bound){.whole = "0"}, most = has_low ? low : infinite;
        range(r, byte(r, start, '-'), &least, &most, integers, end);
    }
    return rule;
}

/* ---------------------------------------------------------------- strings */

#define HEX   "[0-9a-fA-F]"
#define LABEL "[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
#define HOST  LABEL "(?:\\." LABEL "){0,5}"
#define YEAR  "[1-9]\\d{3}"
#define DATE                                                                                          \
    "(?:" YEAR "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|" \
    "02-(?:0[1-9]|1\\d|2[0-8]))|(?:[1-9]\\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
#define TIME  "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,6})?(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)"
#define OCTET "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define PATH  "(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*"
#define URI   "(?:https?|ftp)://" HOST "(?::[1-9]\\d{0,3})?" PATH "(?:\\?[A-Za-z0-9._~&=+,-]*)?(?:#[A-Za-z0-9._~-]*)?"

static const struct {
    const char *name, *pattern;
} formats[] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "T" TIME},
    {"duration", "P(?:\\d{1,4}[WDMY]|\\d{1,4}DT\\d{1,2}H(?:\\d{1,2}M)?|T\\d{1,4}[HMS])"},
    {"email", "[A-Za-z0-9_+-]{1,32}(?:\\.[A-Za-z0-9_+-]{1,16}){0,3}@" LABEL "(?:\\." LABEL "){1,4}"},
    {"hostname", HOST},
    {"ipv4", OCTET "(?:\\." OCTET "){3}"},
    {"ipv6", "(?:" HEX "{1,4}:){7}" HEX "{1,4}|(?:" HEX "{1,4}:){1,6}:" HEX "{1,4}|::(?:" HEX "{1,4}:){0,5}" HEX
             "{1,4}|(?:" HEX "{1,4}:){1,7}:|::"},
    {"uuid", HEX "{8}-" HEX "{4}-" HEX "{4}-" HEX "{4}-" HEX "{12}"},
    {"uri", URI},
    {"uri-reference", URI "|/[A-Za-z0-9._~-]*" PATH},
    {"json-pointer", "(?:/[^~/\\x00-\\x1f]*)*"},
    {"byte", "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"},
};

/* A string that an expression describes, if its length is within what else is asked for; or -1. */
static int pattern_string(reader *r, const char *keyword, nmk_expr *x, int64_t low, int64_t high) {
    nmk_grammar *g = r->g;
    int64_t fewest, most;
    nmk_expr_length(x, &fewest, &most);
    if (low > 0 && fewest < low)
        return fail(r, "minLength", "not supported beside a pattern or format that may be shorter");
    if (high >= 0 && (most < 0 || most > high))
        return fail(r, "maxLength", "not supported beside a pattern or format that may be longer");
    int rule = nmk_grammar_rule(g), last = nmk_grammar_state(g);
    nmk_grammar_expr(g, byte(r, g->start[rule], '"'), x, true, last);
    byte_to(r, last, '"', g->end[rule]);
    return g->full ? fail(r, keyword, "too large") : rule;
}

static int string_value(reader *r, struct json_object *schema) {
    struct json_object *pattern = get(schema, "pattern"), *format = get(schema, "format");
    int64_t low = count_of(r, schema, "minLength"), high = count_of(r, schema, "maxLength");
    if (low == -2 || high == -2) return -1;
    if (has(schema, "pattern") && !is(pattern, json_type_string)) return fail(r, "pattern", "expected a string");
    if (has(schema, "format") && !is(format, json_type_string)) return fail(r, "format", "expected a string");
    if (pattern && format) return fail(r, "pattern", "not supported beside 'format'");
    if (!pattern && !format) return counted_string(r, low, high);
    nmk_err why = {""};
    nmk_expr *x = NULL;
    const char *name = format ? json_object_get_string(format) : "";
    if (pattern)
        x = nmk_regex_parse(json_object_get_string(pattern), (size_t)json_object_get_string_len(pattern), true, &why);
    for (size_t i = 0; format && i < sizeof formats / sizeof *formats; i++)
        if (!strcmp(name, formats[i].name))
            x = nmk_regex_parse(formats[i].pattern, strlen(formats[i].pattern), false, &why);
    if (!x) {
        if (pattern) return fail(r, "pattern", why.text);
        return nmk_fail(r->e, "%s.format: '%.60s' is not supported", r->path.data, name);
    }
    int rule = pattern_string(r, pattern ? "pattern" : "format", x, low, high);
    nmk_expr_free(x);
    return rule;
}

/* ---------------------------------------------------------------- arrays and objects */

static int value(reader *r, struct json_object *schema);

static int array_value(reader *r, struct json_object *schema) {
    nmk_grammar *g = r->g;
    struct json_object *items = get(schema, "items"), *prefix = get(schema, "prefixItems"), *unique;
    const char *first_name = "prefixItems", *rest_name = "items";
    int64_t low = count_of(r, schema, "minItems"), high = count_of(r, schema, "maxItems");
    if (low == -2 || high == -2) return -1;
    if (is(items, json_type_array)) { /* as older drafts have it */
        if (prefix) return fail(r, "items", "expected a schema beside 'prefixItems'");
        prefix = items, first_name = "items";
        items = get(schema, "additionalItems"), rest_name = "additionalItems";
    } else if (has(schema, "additionalItems")) {
        return unsupported(r, "additionalItems");
    }
    if (has(schema, "prefixItems") && !is(get(schema, "prefixItems"), json_type_array))
        return fail(r, "prefixItems", "expected an array");
    unique = get(schema, "uniqueItems");
    if (is(unique, json_type_boolean) && json_object_get_boolean(unique) && !(high >= 0 && high <= 1))
        return unsupported(r, "uniqueItems");
    int64_t first = prefix ? (int64_t)length(prefix) : 0;
    bool more = !prefix || has(schema, rest_name);
    if (is(items, json_type_boolean) && !json_object_get_boolean(items)) more = false;
    if (!more && (high < 0 || high > first)) high = first;
    if (low < 0) low = 0;
    if (high >= 0 && high < low) return fail(r, "maxItems", "fewer than minItems or than there are items");
    if (low > NMK_GRAMMAR_REPEATS) return fail(r, "minItems", "too large");
    if (high > NMK_GRAMMAR_REPEATS) return fail(r, "maxItems", "too large: leave it out, or ask for at most 50000");

    int rest = -1;
    if (more && has(schema, rest_name)) {
        size_t back = enter(r, rest_name, NULL);
        if ((rest = value(r, items)) < 0) return -1;
        leave(r, back);
    } else if (more) {
        rest = any(r);
    }
    int rule = nmk_grammar_rule(g), end = g->end[rule], s = spaced(r, byte(r, g->start[rule], '['));
    int counted_items = (int)(high >= 0 ? high : first > low ? first : low);
    if (!low) byte_to(r, s, ']', end);
    if (high < 0 && !counted_items) { /* the loop below goes on from an item */
        s = call(r, s, rest);
        counted_items = 1;
    } else {
        for (int i = 0; i < counted_items && !g->full; i++) {
            int item = rest;
            if (i < first) {
                size_t back = enter_index(r, first_name, (size_t)i);
                if ((item = value(r, at(prefix, (size_t)i))) < 0) return -1;
                leave(r, back);
            }
            if (i) s = spaced(r, byte(r, s, ','));
            s = call(r, s, item);
            if (i + 1 >= low && i + 1 < counted_items) byte_to(r, spaced(r, s), ']', end);
        }
    }
    if (high < 0) {
        int loop = nmk_grammar_state(g);
        nmk_grammar_jump(g, s, loop);
        nmk_grammar_call(g, spaced(r, byte(r, loop, ',')), rest, loop);
        s = loop;
    }
    if (counted_items) byte_to(r, spaced(r, s), ']', end);
    return rule;
}

/* A name that is none of those known and has no escapes, so that it is no spelling of one of them. */
static void other_name(reader *r, int from, struct json_object *properties, int to) {
    nmk_grammar *g = r->g;
    int free_text = nmk_grammar_state(g), names = nmk_grammar_state(g), count = 0, room = 64;
    nmk_set plain = {0};
    nmk_set_add(&plain, 0x20, '!'), nmk_set_add(&plain, '#', '['), nmk_set_add(&plain, ']', 0x10ffff);
    nmk_grammar_set(g, free_text, &plain, false, free_text);
    byte_to(r, free_text, '"', to);
    byte_to(r, from, '"', names);
    /* The names as a tree of characters: what leaves it is free, what ends within it is a name unless it is known. */
    struct node {
        int state, child, sibling; /* 0: none */
        uint32_t c;
        bool known;
    } *node = xcalloc((size_t)room, sizeof *node);
    node[count++].state = names;
    if (properties) {
        json_object_object_foreach(properties, name, unused) {
            int here = 0;
            (void)unused;
            for (const char *c = name; *c; c += nmk_utf8_scan(c, strlen(c))) {
                int next = node[here].child;
                uint32_t code = nmk_utf8_at(c);
                while (next && node[next].c != code) next = node[next].sibling;
                if (!next) {
                    if (count == room) node = xrealloc(node, sizeof *node * (size_t)(room *= 2));
                    node[next = count++] = (struct node){nmk_grammar_state(g), 0, node[here].child, code, false};
                    node[here].child = next;
                }
                here = next;
            }
            node[here].known = true;
        }
    }
    for (int i = 0; i < count; i++) {
        nmk_set others = {0};
        nmk_set_add(&others, 0, 0x1f), nmk_set_add(&others, '"', '"'), nmk_set_add(&others, '\\', '\\');
        for (int k = node[i].child; k; k = node[k].sibling) {
            uint32_t c = node[k].c, range[1][2] = {{c, c}};
            nmk_set one = {range, 1, 1};
            nmk_set_add(&others, c, c);
            /* what would be escaped is never written by this rule */
            if (c >= 0x20 && c != '"' && c != '\\') nmk_grammar_set(g, node[i].state, &one, false, node[k].state);
        }
        nmk_set_invert(&others);
        nmk_grammar_set(g, node[i].state, &others, false, free_text);
        if (!node[i].known) byte_to(r, node[i].state, '"', to);
        nmk_set_free(&others);
    }
    nmk_set_free(&plain);
    free(node);
}

static int object_value(reader *r, struct json_object *schema) {
    nmk_grammar *g = r->g;
    struct json_object *properties = get(schema, "properties"), *required = get(schema, "required");
    struct json_object *extra = get(schema, "additionalProperties");
    int64_t low = count_of(r, schema, "minProperties"), high = count_of(r, schema, "maxProperties");
    if (low == -2 || high == -2) return -1;
    if (has(schema, "properties") && !is(properties, json_type_object))
        return fail(r, "properties", "expected an object");
    if (has(schema, "required") && !is(required, json_type_array)) return fail(r, "required", "expected an array");
    int names = properties ? json_object_object_length(properties) : 0, needed = 0;
    if (names > MOST_PROPERTIES) return fail(r, "properties", "too many: at most 1000");
    for (size_t i = 0; required && i < length(required); i++) {
        struct json_object *name = at(required, i);
        if (!is(name, json_type_string)) return fail(r, "required", "expected names");
        if (!properties || !has(properties, json_object_get_string(name)))
            return nmk_fail(r->e, "%s.required: '%.60s' is not among the properties", r->path.data,
                            json_object_get_string(name));
    }
    bool said = has(schema, "additionalProperties");
    bool open = said ? !(is(extra, json_type_boolean) && !json_object_get_boolean(extra)) : !properties;
    if (properties) {
        json_object_object_foreach(properties, name, unused) {
            struct json_object *wanted = json_object_new_string(name);
            (void)unused;
            needed += required && listed(required, wanted);
            json_object_put(wanted);
        }
    }
    if (low > needed) return fail(r, "minProperties", "not supported beyond the number of required properties");
    if (high >= 0 && (open || high < names))
        return fail(r, "maxProperties", "not supported below the number of properties that are allowed");
    if (open && !names && (!said || is(extra, json_type_boolean))) return any_object(r);

    int rule = nmk_grammar_rule(g), end = g->end[rule];
    /* Before each property: nothing is there yet, or something is and a comma comes first. */
    int none = spaced(r, byte(r, g->start[rule], '{')), some = nmk_grammar_state(g);
    if (properties) {
        json_object_object_foreach(properties, name, property) {
            struct json_object *wanted = json_object_new_string(name);
            bool must = required && listed(required, wanted);
            int key = nmk_grammar_state(g), next_none = nmk_grammar_state(g), next_some = nmk_grammar_state(g);
            nmk_grammar_jump(g, none, key);
            nmk_grammar_jump(g, spaced(r, byte(r, some, ',')), key);
            const char *text = text_of(wanted);
            int s = spaced(r, byte(r, nmk_grammar_literal(g, key, text, strlen(text)), ':'));
            json_object_put(wanted);
            size_t back = enter(r, "properties", name);
            int inner = value(r, property);
            if (inner < 0) return -1;
            leave(r, back);
            nmk_grammar_call(g, s, inner, next_some);
            if (!must) nmk_grammar_jump(g, none, next_none), nmk_grammar_jump(g, some, next_some);
            none = next_none, some = next_some;
        }
    }
    if (open) {
        int inner = any(r), key = nmk_grammar_state(g), colon = nmk_grammar_state(g), loop = nmk_grammar_state(g);
        if (is(extra, json_type_object)) {
            size_t back = enter(r, "additionalProperties", NULL);
            if ((inner = value(r, extra)) < 0) return -1;
            leave(r, back);
        }
        nmk_grammar_jump(g, some, loop);
        nmk_grammar_jump(g, none, key);
        nmk_grammar_jump(g, spaced(r, byte(r, loop, ',')), key);
        other_name(r, key, properties, colon);
        nmk_grammar_call(g, spaced(r, byte(r, colon, ':')), inner, loop);
        some = loop;
    }
    byte_to(r, none, '}', end);
    byte_to(r, spaced(r, some), '}', end);
    return rule;
}

/* ---------------------------------------------------------------- types and keywords */

enum { OBJECT = 1, ARRAY = 2, STRING = 4, NUMBER = 8, INTEGER = 16, BOOLEAN = 32, NIL = 64, ALL = 127 };

static const struct {
    const char *name;
    int bit;
} types[] = {{"object", OBJECT},   {"array", ARRAY},     {"string", STRING}, {"number", NUMBER},
             {"integer", INTEGER}, {"boolean", BOOLEAN}, {"null", NIL}};

enum { ANNOTATION = -1, COMBINES = -2, NEVER = -3, IF_FALSE = -4, IF_EMPTY = -5, IF_BOOLEAN = -6 };

/* What a keyword is of: types, or one of the above. */
static const struct {
    const char *name;
    int of;
} keywords[] = {
    {"type", COMBINES},
    {"enum", COMBINES},
    {"const", COMBINES},
    {"anyOf", COMBINES},
    {"oneOf", COMBINES},
    {"allOf", COMBINES},
    {"$ref", COMBINES},
    {"properties", OBJECT},
    {"required", OBJECT},
    {"additionalProperties", OBJECT},
    {"minProperties", OBJECT},
    {"maxProperties", OBJECT},
    {"items", ARRAY},
    {"prefixItems", ARRAY},
    {"additionalItems", ARRAY},
    {"minItems", ARRAY},
    {"maxItems", ARRAY},
    {"uniqueItems", ARRAY},
    {"minLength", STRING},
    {"maxLength", STRING},
    {"pattern", STRING},
    {"format", STRING},
    {"minimum", NUMBER | INTEGER},
    {"maximum", NUMBER | INTEGER},
    {"exclusiveMinimum", NUMBER | INTEGER},
    {"exclusiveMaximum", NUMBER | INTEGER},
    {"multipleOf", NUMBER | INTEGER},
    {"title", ANNOTATION},
    {"description", ANNOTATION},
    {"default", ANNOTATION},
    {"examples", ANNOTATION},
    {"example", ANNOTATION},
    {"deprecated", ANNOTATION},
    {"readOnly", ANNOTATION},
    {"writeOnly", ANNOTATION},
    {"$schema", ANNOTATION},
    {"$id", ANNOTATION},
    {"$comment", ANNOTATION},
    {"$defs", ANNOTATION},
    {"definitions", ANNOTATION},
    {"$anchor", ANNOTATION},
    {"discriminator", ANNOTATION},
    {"nullable", ANNOTATION},
    {"contentEncoding", ANNOTATION},
    {"contentMediaType", ANNOTATION},
    {"patternProperties", IF_EMPTY},
    {"dependentRequired", IF_EMPTY},
    {"dependentSchemas", IF_EMPTY},
    {"unevaluatedProperties", IF_BOOLEAN},
    {"unevaluatedItems", IF_BOOLEAN},
};

static int keyword_of(const char *name) {
    for (size_t i = 0; i < sizeof keywords / sizeof *keywords; i++)
        if (!strcmp(name, keywords[i].name)) return keywords[i].of;
    return strncmp(name, "x-", 2) ? NEVER : ANNOTATION;
}

static int check_keywords(reader *r, struct json_object *schema) {
    json_object_object_foreach(schema, name, v) {
        int of = keyword_of(name);
        if (of == IF_EMPTY && is(v, json_type_object) && !json_object_object_length(v)) continue;
        if (of == IF_BOOLEAN && is(v, json_type_boolean)) continue;
        if (of == NEVER || of == IF_EMPTY || of == IF_BOOLEAN) {
            char shown[64];
            snprintf(shown, sizeof shown, "%s", name);
            return unsupported(r, shown);
        }
    }
    return 0;
}

/* The types that a schema says or means, 0 after a refusal. */
static int types_of(reader *r, struct json_object *schema) {
    struct json_object *type = get(schema, "type");
    int bits = 0;
    if (!has(schema, "type")) {
        json_object_object_foreach(schema, name, unused) {
            int of = keyword_of(name);
            (void)unused;
            if (of > 0) bits |= of;
        }
        return bits ? bits : ALL;
    }
    size_t count = is(type, json_type_array) ? length(type) : 1;
    for (size_t i = 0; i < count; i++) {
        struct json_object *one = is(type, json_type_array) ? at(type, i) : type;
        int bit = 0;
        for (size_t k = 0; is(one, json_type_string) && k < sizeof types / sizeof *types; k++)
            if (!strcmp(json_object_get_string(one), types[k].name)) bit = types[k].bit;
        if (!bit) return fail(r, "type", "expected names of JSON's types"), 0;
        bits |= bit;
    }
    if (!bits) fail(r, "type", "expected at least one type");
    return bits;
}

static int type_of_value(struct json_object *v) {
    switch (json_object_get_type(v)) {
    case json_type_null: return NIL;
    case json_type_boolean: return BOOLEAN;
    case json_type_int: return INTEGER | NUMBER;
    case json_type_double:
        return json_object_get_double(v) == floor(json_object_get_double(v)) ? INTEGER | NUMBER : NUMBER;
    case json_type_object: return OBJECT;
    case json_type_array: return ARRAY;
    default: return STRING;
    }
}

/* Values as they stand; what else the schema asks for can be the type alone. */
static int listed_values(reader *r, struct json_object *schema) {
    nmk_grammar *g = r->g;
    bool constant = has(schema, "const");
    const char *keyword = constant ? "const" : "enum";
    struct json_object *list = get(schema, "enum"), *only = get(schema, "const");
    if (has(schema, "enum") && (!is(list, json_type_array) || !length(list)))
        return fail(r, "enum", "expected values in an array");
    if (list && length(list) > MOST_VALUES) return fail(r, "enum", "too many values");
    int allowed = has(schema, "type") ? types_of(r, schema) : ALL;
    if (!allowed) return -1;
    json_object_object_foreach(schema, name, unused) {
        (void)unused;
        if (keyword_of(name) <= 0 && keyword_of(name) != COMBINES) continue;
        if (!strcmp(name, "type") || !strcmp(name, "enum") || !strcmp(name, "const")) continue;
        char what[128];
        snprintf(what, sizeof what, "not supported beside '%.60s'", name);
        return fail(r, keyword, what);
    }
    int rule = nmk_grammar_rule(g), first = nmk_grammar_state(g), count = 0;
    nmk_grammar_jump(g, g->start[rule], first);
    for (size_t i = 0; i < (constant ? 1 : length(list)); i++) {
        struct json_object *v = constant ? only : at(list, i);
        if (!(type_of_value(v) & allowed) || (constant && list && !listed(list, v))) continue;
        const char *text = v ? text_of(v) : "null";
        nmk_grammar_jump(g, nmk_grammar_literal(g, first, text, strlen(text)), g->end[rule]);
        count++;
    }
    return count ? rule : fail(r, keyword, "no value of the list has the type");
}

/* ---------------------------------------------------------------- schemas in terms of others */

/* The schema that "#/a/b" names. */
static struct json_object *resolve(reader *r, struct json_object *ref) {
    struct json_object *found = r->root;
    const char *text = is(ref, json_type_string) ? json_object_get_string(ref) : "";
    if (*text != '#' || (text[1] && text[1] != '/'))
        return fail(r, "$ref", "expected \"#/...\", a place in this schema"), NULL;
    for (const char *p = text + 1; *p == '/';) {
        char key[256];
        size_t n = 0;
        for (p++; *p && *p != '/' && n < sizeof key - 1; p++) {
            unsigned code;
            int used = 0;
            if (*p == '~' && (p[1] == '0' || p[1] == '1'))
                key[n++] = *++p == '0' ? '~' : '/';
            else if (*p == '%' && sscanf(p + 1, "%2x%n", &code, &used) == 1 && used == 2)
                key[n++] = (char)code, p += 2;
            else
                key[n++] = *p;
        }
        key[n] = 0;
        char *end;
        unsigned long index = strtoul(key, &end, 10);
        if (is(found, json_type_object) && has(found, key))
            found = get(found, key);
        else if (is(found, json_type_array) && n && !*end && index < length(found))
            found = at(found, index);
        else
            found = NULL;
    }
    if (!is(found, json_type_object) && !is(found, json_type_boolean)) {
        nmk_fail(r->e, "%s.$ref: there is no schema at '%.100s'", r->path.data, text);
        return NULL;
    }
    return found;
}

/* A copy without some keywords and without annotations; its members are the same objects. */
static struct json_object *without(reader *r, struct json_object *schema, const char *keyword) {
    struct json_object *rest = keep(r, json_object_new_object());
    json_object_object_foreach(schema, name, v) {
        if (!strcmp(name, keyword) || keyword_of(name) == ANNOTATION) continue;
        json_object_object_add(rest, name, json_object_get(v));
    }
    return rest;
}

static int conflict(reader *r, const char *keyword) {
    char what[128];
    snprintf(what, sizeof what, "two of the schemas that apply together have '%.60s'", keyword);
    return fail(r, NULL, what);
}

static bool restricts(struct json_object *schema) {
    struct json_object *extra = get(schema, "additionalProperties");
    return has(schema, "additionalProperties") && !(is(extra, json_type_boolean) && json_object_get_boolean(extra));
}

/* {"allOf": [a, b]} */
static struct json_object *both(struct json_object *a, struct json_object *b) {
    struct json_object *o = json_object_new_object(), *list = json_object_new_array();
    json_object_array_add(list, json_object_get(a)), json_object_array_add(list, json_object_get(b));
    json_object_object_add(o, "allOf", list);
    return o;
}

static struct json_object *union_of(struct json_object *a, struct json_object *b) {
    struct json_object *all = json_object_new_array();
    for (int i = 0; i < 2; i++)
        for (size_t k = 0; k < length(i ? b : a); k++)
            if (!listed(all, at(i ? b : a, k))) json_object_array_add(all, json_object_get(at(i ? b : a, k)));
    return all;
}

static struct json_object *common(struct json_object *a, struct json_object *b) {
    struct json_object *all = json_object_new_array();
    for (size_t k = 0; k < length(a); k++)
        if (listed(b, at(a, k))) json_object_array_add(all, json_object_get(at(a, k)));
    return all;
}

static struct json_object *names_of(int bits) {
    struct json_object *list = json_object_new_array();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (bits & types[i].bit) json_object_array_add(list, json_object_new_string(types[i].name));
    return list;
}

/* What a keyword of two schemas that apply together says; NULL: that cannot be said. */
static struct json_object *merged_value(reader *r, const char *name, struct json_object *a, struct json_object *b) {
    bool numbers =
        (is(a, json_type_int) || is(a, json_type_double)) && (is(b, json_type_int) || is(b, json_type_double));
    bool least = !strncmp(name, "min", 3) || !strcmp(name, "exclusiveMinimum");
    bool most = !strncmp(name, "max", 3) || !strcmp(name, "exclusiveMaximum");
    if (equal(a, b)) return json_object_get(a);
    if (numbers && (least || most))
        return json_object_get((json_object_get_double(a) > json_object_get_double(b)) == least ? a : b);
    if (!strcmp(name, "required") && is(a, json_type_array) && is(b, json_type_array)) return union_of(a, b);
    if (!strcmp(name, "enum") && is(a, json_type_array) && is(b, json_type_array)) return common(a, b);
    if (!strcmp(name, "items") && !is(a, json_type_array) && !is(b, json_type_array)) return both(a, b);
    if (!strcmp(name, "type")) {
        struct json_object *one = json_object_new_object(), *two = json_object_new_object(), *list = NULL;
        json_object_object_add(one, "type", json_object_get(a)),
            json_object_object_add(two, "type", json_object_get(b));
        int x = types_of(r, one), y = types_of(r, two);
        if (x & NUMBER) x |= INTEGER;
        if (y & NUMBER) y |= INTEGER;
        if (x & y) list = names_of(x & y & NUMBER ? (x & y) & ~INTEGER : x & y);
        json_object_put(one), json_object_put(two);
        return list;
    }
    return NULL;
}

/* Adds b's keywords to a's. */
static int merge_into(reader *r, struct json_object *a, struct json_object *b) {
    if ((restricts(a) && has(b, "properties")) || (restricts(b) && has(a, "properties"))) {
        struct json_object *one = get(a, "properties"), *two = get(b, "properties");
        /* fine if both name the same */
        bool same = is(one, json_type_object) && is(two, json_type_object) &&
                    json_object_object_length(one) == json_object_object_length(two);
        if (same) {
            json_object_object_foreach(one, name, unused) {
                (void)unused;
                same &= has(two, name);
            }
        }
        if (!same) return conflict(r, "additionalProperties");
    }
    json_object_object_foreach(b, name, v) {
        if (keyword_of(name) == ANNOTATION) continue;
        struct json_object *mine = get(a, name), *now = NULL;
        if (!has(a, name)) {
            json_object_object_add(a, name, json_object_get(v));
            continue;
        }
        if (!strcmp(name, "properties") && is(mine, json_type_object) && is(v, json_type_object)) {
            r->copied += json_object_object_length(mine);
            if (r->copied > MOST_COPIED) return fail(r, name, "too many to be put together");
            now = json_object_new_object();
            json_object_object_foreach(mine, key, property) {
                struct json_object *other = get(v, key);
                json_object_object_add(now, key, other && property ? both(property, other) : json_object_get(property));
            }
            json_object_object_foreach(v, key2, property2) {
                if (!has(now, key2)) json_object_object_add(now, key2, json_object_get(property2));
            }
        } else if (!strcmp(name, "anyOf") || !strcmp(name, "oneOf")) {
            return conflict(r, name);
        } else {
            now = merged_value(r, name, mine, v);
            if (!now && !equal(mine, v)) return conflict(r, name);
        }
        json_object_object_add(a, name, now);
    }
    return 0;
}

/* A schema without $ref and allOf at its top that says the same; NULL: refused.  Owned by the reader. */
static struct json_object *flat(reader *r, struct json_object *schema, int depth) {
    if (depth > 50 || ++r->schemas > MOST_SCHEMAS)
        return fail(r, NULL, "the schema refers to itself, or is too large"), NULL;
    if (is(schema, json_type_boolean)) {
        if (!json_object_get_boolean(schema)) return fail(r, NULL, "the schema false allows nothing"), NULL;
        return keep(r, json_object_new_object());
    }
    if (!is(schema, json_type_object)) return fail(r, NULL, "expected a schema"), NULL;
    if (check_keywords(r, schema)) return NULL;
    struct json_object *all = get(schema, "allOf"), *merged, *part;
    if (!has(schema, "$ref") && !has(schema, "allOf")) return schema;
    if (has(schema, "$ref")) {
        if (!(part = resolve(r, get(schema, "$ref"))) || !(part = flat(r, part, depth + 1))) return NULL;
        merged = without(r, part, "");
        struct json_object *rest = without(r, schema, "$ref");
        if (has(rest, "allOf") && !(rest = flat(r, rest, depth + 1))) return NULL;
        return merge_into(r, merged, rest) ? NULL : merged;
    }
    if (!is(all, json_type_array) || !length(all)) return fail(r, "allOf", "expected schemas in an array"), NULL;
    merged = without(r, schema, "allOf");
    for (size_t i = 0; i < length(all); i++) {
        size_t back = enter_index(r, "allOf", i);
        if (!(part = flat(r, at(all, i), depth + 1)) || merge_into(r, merged, part)) return NULL;
        leave(r, back);
    }
    return merged;
}

/* Whether no document of a is one that b allows, as far as that is easily seen. */
static bool apart(reader *r, struct json_object *a, struct json_object *b, int depth) {
    nmk_err *kept = r->e, ignored = {""};
    struct json_object *one = get(a, "properties"), *two = get(b, "properties"), *needed = get(b, "required");
    bool result = false;
    r->e = &ignored;
    if (depth > 4 || !is(a, json_type_object) || !is(b, json_type_object)) goto out;
    struct json_object *first = get(a, "enum"), *second = get(b, "enum");
    if (has(a, "const")) {
        first = keep(r, json_object_new_array());
        json_object_array_add(first, json_object_get(get(a, "const")));
    }
    if (has(b, "const")) {
        second = keep(r, json_object_new_array());
        json_object_array_add(second, json_object_get(get(b, "const")));
    }
    if (is(first, json_type_array) && is(second, json_type_array)) {
        result = true;
        for (size_t i = 0; i < length(first); i++) result &= !listed(second, at(first, i));
        if (result) goto out;
    }
    int x = types_of(r, a), y = has(b, "type") ? types_of(r, b) : ALL;
    if (is(first, json_type_array) && !has(a, "type")) {
        x = 0;
        for (size_t i = 0; i < length(first); i++) x |= type_of_value(at(first, i));
    }
    if (x & (INTEGER | NUMBER)) x |= INTEGER | NUMBER; /* 1.0 is an integer */
    if (y & NUMBER) y |= INTEGER;
    if (x && y && !(x & y)) {
        result = true;
        goto out;
    }
    if (x != OBJECT) goto out;
    bool open =
        has(a, "additionalProperties") ? !restricts(a) || is(get(a, "additionalProperties"), json_type_object) : !one;
    for (size_t i = 0; is(needed, json_type_array) && i < length(needed) && !result; i++) {
        const char *name = json_object_get_string(at(needed, i));
        if (!open && !(one && has(one, name))) result = true; /* a never has what b must have */
    }
    struct json_object *mine = get(a, "required");
    for (size_t i = 0; is(mine, json_type_array) && i < length(mine) && !result; i++) {
        const char *name = json_object_get_string(at(mine, i));
        bool theirs = two && has(two, name);
        struct json_object *extra = get(b, "additionalProperties");
        if (!theirs && is(extra, json_type_boolean) && !json_object_get_boolean(extra)) result = true;
        if (!theirs || !one || !has(one, name)) continue;
        struct json_object *p = flat(r, get(one, name), 1), *q = flat(r, get(two, name), 1);
        if (p && q && apart(r, p, q, depth + 1)) result = true;
    }
out:
    r->e = kept;
    return result;
}

/* One of several, each together with what stands beside them. */
static int alternatives(reader *r, struct json_object *schema, const char *keyword) {
    nmk_grammar *g = r->g;
    struct json_object *list = get(schema, keyword), *beside = without(r, schema, keyword);
    if (!is(list, json_type_array) || !length(list)) return fail(r, keyword, "expected schemas in an array");
    bool exclusive = !strcmp(keyword, "oneOf");
    int rule = nmk_grammar_rule(g);
    struct json_object **part = xcalloc(length(list), sizeof *part);
    for (size_t i = 0; i < length(list) && rule >= 0; i++) {
        size_t back = enter_index(r, keyword, i);
        struct json_object *one = at(list, i);
        int inner = -1;
        if (json_object_object_length(beside)) {
            struct json_object *pair = keep(r, both(beside, one));
            one = flat(r, pair, 0);
        }
        if (one) part[i] = flat(r, one, 0);
        if (part[i]) inner = value(r, one);
        if (inner < 0) {
            rule = -1;
            break;
        }
        leave(r, back);
        nmk_grammar_call(g, g->start[rule], inner, g->end[rule]);
    }
    for (size_t i = 0; exclusive && rule >= 0 && i < length(list); i++)
        for (size_t k = 0; rule >= 0 && k < length(list); k++)
            if (i != k && !apart(r, part[i], part[k], 0))
                rule = fail(r, "oneOf", "two of its schemas may allow the same document: use anyOf");
    free(part);
    return rule;
}

static int typed(reader *r, struct json_object *schema) {
    nmk_grammar *g = r->g;
    int bits = types_of(r, schema), rule = nmk_grammar_rule(g);
    bool bare = true;
    if (!bits) return -1;
    json_object_object_foreach(schema, name, unused) {
        (void)unused;
        if (keyword_of(name) > 0) bare = false;
    }
    if (bits == ALL && bare) return any(r);
    if (bits & NUMBER) bits &= ~INTEGER;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        int inner = -1, bit = types[i].bit, start = g->start[rule], end = g->end[rule];
        if (!(bits & bit)) continue;
        struct json_object *format = get(schema, "format");
        /* of numbers it says how they are stored */
        if (bit == STRING) inner = string_value(r, schema);
        if (bit == ARRAY) inner = array_value(r, schema);
        if (bit == OBJECT) inner = object_value(r, schema);
        if (bit & (NUMBER | INTEGER)) {
            const char *how = is(format, json_type_string) ? json_object_get_string(format) : "";
            bool stored = !*how || !strcmp(how, "int32") || !strcmp(how, "int64") || !strcmp(how, "float") ||
                          !strcmp(how, "double");
            if (!stored && !(bits & STRING)) return fail(r, "format", "not supported for numbers");
            inner = numeric(r, schema, bit == INTEGER);
        }
        if (bit == BOOLEAN) literal_to(r, start, "true", 4, end), literal_to(r, start, "false", 5, end);
        if (bit == NIL) literal_to(r, start, "null", 4, end);
        if (bit & (BOOLEAN | NIL)) continue;
        if (inner < 0) return -1;
        nmk_grammar_call(g, start, inner, end);
    }
    return rule;
}

static int rule_of(reader *r, struct json_object *schema) {
    struct json_object *one = flat(r, schema, 0);
    if (!one) return -1;
    if (has(one, "enum") || has(one, "const")) return listed_values(r, one);
    if (has(one, "anyOf") && has(one, "oneOf")) return conflict(r, "anyOf and oneOf");
    if (has(one, "anyOf")) return alternatives(r, one, "anyOf");
    if (has(one, "oneOf")) return alternatives(r, one, "oneOf");
    return typed(r, one);
}

/* The rule of a schema: one that is met again, also within itself, is the same. */
static int value(reader *r, struct json_object *schema) {
    nmk_grammar *g = r->g;
    if (r->g->full) return fail(r, NULL, "the schema is too large");
    if (is(schema, json_type_boolean) && json_object_get_boolean(schema)) return any(r);
    /* a reference alone is what it refers to */
    for (int i = 0; i < 50 && is(schema, json_type_object) && has(schema, "$ref"); i++) {
        if (json_object_object_length(without(r, schema, "$ref"))) break;
        if (check_keywords(r, schema) || !(schema = resolve(r, get(schema, "$ref")))) return -1;
    }
    for (int i = 0; i < r->known_count; i++)
        if (r->known[i].schema == schema) return r->known[i].rule;
    if (++r->schemas > MOST_SCHEMAS || ++r->nested > MOST_NESTED) return fail(r, NULL, "the schema is too large");
    if (r->known_count == r->known_room)
        r->known =
            xrealloc(r->known, sizeof *r->known * (size_t)(r->known_room = r->known_room ? 2 * r->known_room : 64));
    int rule = nmk_grammar_rule(g);
    r->known[r->known_count++] = (known){schema, rule};
    int inner = rule_of(r, schema);
    r->nested--;
    if (inner < 0) return -1;
    nmk_grammar_call(g, g->start[rule], inner, g->end[rule]);
    return rule;
}

int nmk_schema_read(nmk_grammar *g, struct json_object *schema, int *rule, nmk_err *e) {
    reader r = {.g = g,
                .root = schema,
                .e = e,
                .ws = -1,
                .any = -1,
                .object = -1,
                .string = -1,
                .chars = -1,
                .number = -1,
                .integer = -1};
    nmk_buf_puts(&r.path, "schema");
    *rule = schema ? value(&r, schema) : any_object(&r);
    for (int i = 0; i < r.made_count; i++) json_object_put(r.made[i]);
    free(r.made), free(r.known), free(r.counted);
    nmk_buf_free(&r.path);
    return *rule < 0 ? -1 : 0;
}
