#include "regex.h"

#include <stdlib.h>
#include <string.h>

enum { NESTING = 100 };

typedef struct {
    const char *text;
    size_t bytes, at;
    int depth;
    bool anywhere;
    nmk_err *e;
} reader;

static nmk_expr *fail(reader *r, const char *what) {
    nmk_fail(r->e, "at character %zu: %s", r->at + 1, what);
    return NULL;
}

static bool more(const reader *r) { return r->at < r->bytes; }
static bool is_at(const reader *r, char c) { return more(r) && r->text[r->at] == c; }
static bool skip(reader *r, const char *s) {
    size_t n = strlen(s);
    if (r->bytes - r->at < n || memcmp(r->text + r->at, s, n) != 0) return false;
    r->at += n;
    return true;
}

/* The next character; the text is valid UTF-8. */
static uint32_t next_char(reader *r) {
    uint32_t c = nmk_utf8_at(r->text + r->at);
    r->at += (size_t)nmk_utf8_scan(r->text + r->at, r->bytes - r->at);
    return c;
}

/* ---------------------------------------------------------------- classes */

static void add_spaces(nmk_set *s, bool all) {
    static const uint32_t wide[][2] = {{0x1c, 0x1f},     {0x85, 0x85},     {0xa0, 0xa0},     {0x1680, 0x1680},
                                       {0x180e, 0x180e}, {0x2000, 0x200b}, {0x2028, 0x2029}, {0x202f, 0x202f},
                                       {0x205f, 0x2060}, {0x3000, 0x3000}, {0xfeff, 0xfeff}};
    nmk_set_add(s, '\t', '\r'), nmk_set_add(s, ' ', ' ');
    for (size_t i = 0; all && i < sizeof wide / sizeof *wide; i++) nmk_set_add(s, wide[i][0], wide[i][1]);
}

static void add_words(nmk_set *s) {
    nmk_set_add(s, '0', '9'), nmk_set_add(s, 'A', 'Z'), nmk_set_add(s, '_', '_'), nmk_set_add(s, 'a', 'z');
}

/* \d, \w, \s and their opposites.  `outer`: in a class that is inverted, so all that any dialect means by it. */
static bool add_named(nmk_set *s, char name, bool outer) {
    nmk_set own = {0};
    switch (name) {
    case 'd':
    case 'D': nmk_set_add(&own, '0', '9'); break;
    case 'w':
    case 'W': add_words(&own); break;
    case 's':
    case 'S': add_spaces(&own, name == 'S' || outer); break;
    default: return false;
    }
    bool opposite = name < 'a';
    if (!opposite && outer && name != 's') nmk_set_add(&own, 0x80, 0x10ffff); /* other digits and letters */
    if (opposite) {
        if (outer && name == 'S') nmk_set_free(&own), add_spaces(&own, false);
        nmk_set_invert(&own);
        if (!outer && name != 'S') nmk_set_keep(&own, 0, 0x7f);
    }
    nmk_set_add_all(s, &own);
    nmk_set_free(&own);
    return true;
}

/* So many hexadecimal digits, or -1. */
static int64_t hex(reader *r, int count) {
    int64_t value = 0;
    for (int i = 0; i < count; i++, r->at++) {
        int d = more(r) ? nmk_hex_digit(r->text[r->at]) : -1;
        if (d < 0) return -1;
        value = value * 16 + d;
    }
    return value;
}

/* After a backslash: one character, or -1 with a message. */
static int64_t escape(reader *r) {
    static const char in[] = "tnrfv", out[] = "\t\n\r\f\v";
    if (!more(r)) return fail(r, "a backslash at the end"), -1;
    char c = r->text[r->at];
    const char *found = c ? strchr(in, c) : NULL;
    int64_t value = -1;
    if (found) return r->at++, out[found - in];
    if (c == 'x' || c == 'u') {
        r->at++;
        if (c == 'u' && skip(r, "{")) {
            int n = 0;
            value = 0;
            for (int d; more(r) && n < 6 && (d = nmk_hex_digit(r->text[r->at])) >= 0; n++, r->at++)
                value = value * 16 + d;
            if (!n || !skip(r, "}")) value = -1;
        } else {
            value = hex(r, c == 'x' ? 2 : 4);
        }
        if (value < 0) return fail(r, "expected hexadecimal digits"), -1;
        if (value >= 0xd800 && value < 0xdc00 && skip(r, "\\u")) {
            int64_t low = hex(r, 4);
            if (low < 0xdc00 || low > 0xdfff) return fail(r, "half of a surrogate pair"), -1;
            value = 0x10000 + ((value - 0xd800) << 10) + (low - 0xdc00);
        }
        if (value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) return fail(r, "no such character"), -1;
        return value;
    }
    if (c == '0' &&
        !(r->at + 1 < r->bytes && nmk_hex_digit(r->text[r->at + 1]) >= 0 && nmk_hex_digit(r->text[r->at + 1]) < 10))
        return r->at++, 0;
    if (c >= '0' && c <= '9') return fail(r, "references back are not supported"), -1;
    if (c == 'b' || c == 'B') return fail(r, "word boundaries are not supported"), -1;
    if (c == 'p' || c == 'P') return fail(r, "\\p is not supported"), -1;
    if (c == 'k') return fail(r, "references back are not supported"), -1;
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return fail(r, "an unknown escape"), -1;
    return next_char(r);
}

/* One end of a range in a class; *named: it was \d or the like, which is in the set already. */
static int64_t class_char(reader *r, nmk_set *s, bool outer, bool *named) {
    *named = false;
    if (!skip(r, "\\")) return next_char(r);
    if (more(r) && add_named(s, r->text[r->at], outer)) return r->at++, *named = true, 0;
    if (skip(r, "b")) return '\b';
    return escape(r);
}

static nmk_expr *read_class(reader *r) {
    nmk_expr *x = nmk_expr_new(NMK_EXPR_SET);
    bool inverted = skip(r, "^"), first = true, named;
    for (; more(r) && (first || !is_at(r, ']')); first = false) {
        if (first && is_at(r, ']')) {
            fail(r, "an empty class");
            goto bad;
        }
        int64_t low = class_char(r, &x->set, inverted, &named), high = low;
        if (low < 0) goto bad;
        bool range = is_at(r, '-') && r->at + 1 < r->bytes && r->text[r->at + 1] != ']';
        if (range && !named) {
            r->at++;
            high = class_char(r, &x->set, inverted, &named);
            if (high < 0) goto bad;
            if (named || high < low) {
                fail(r, "a range that is none");
                goto bad;
            }
        } else if (named) {
            continue;
        }
        nmk_set_add(&x->set, (uint32_t)low, (uint32_t)high);
    }
    if (!skip(r, "]")) {
        fail(r, "a class without its ]");
        goto bad;
    }
    if (inverted) nmk_set_invert(&x->set);
    nmk_set_normalize(&x->set);
    if (!x->set.count) {
        fail(r, "a class without characters");
        goto bad;
    }
    return x;
bad:
    nmk_expr_free(x);
    return NULL;
}

/* ---------------------------------------------------------------- expressions */

static nmk_expr *read_either(reader *r, bool top);

static nmk_expr *any_text(void) {
    nmk_expr *any = nmk_expr_new(NMK_EXPR_SET);
    nmk_set_add(&any->set, 0, 0x10ffff);
    return nmk_expr_repeat(any, 0, -1);
}

static nmk_expr *read_group(reader *r) {
    if (skip(r, "?")) {
        if (is_at(r, '=') || is_at(r, '!')) return fail(r, "lookahead is not supported");
        if (skip(r, "<") || skip(r, "P<")) {
            if (is_at(r, '=') || is_at(r, '!')) return fail(r, "lookbehind is not supported");
            while (more(r) && !is_at(r, '>')) r->at++;
            if (!skip(r, ">")) return fail(r, "a group's name without its >");
        } else if (!skip(r, ":")) {
            return fail(r, "flags of groups are not supported");
        }
    }
    if (++r->depth > NESTING) return fail(r, "groups are nested too deeply");
    nmk_expr *x = read_either(r, false);
    r->depth--;
    if (x && !skip(r, ")")) {
        nmk_expr_free(x);
        return fail(r, "a group without its )");
    }
    return x;
}

static nmk_expr *read_atom(reader *r) {
    if (skip(r, "(")) return read_group(r);
    if (skip(r, "[")) return read_class(r);
    if (is_at(r, '*') || is_at(r, '+') || is_at(r, '?')) return fail(r, "nothing to repeat");
    if (is_at(r, '^') || is_at(r, '$')) return fail(r, "^ and $ are supported at the ends of the expression only");
    nmk_expr *x = nmk_expr_new(NMK_EXPR_SET);
    if (skip(r, ".")) {
        nmk_set_add(&x->set, '\n', '\n'), nmk_set_add(&x->set, '\r', '\r'), nmk_set_add(&x->set, 0x2028, 0x2029);
        nmk_set_invert(&x->set);
        return x;
    }
    int64_t c;
    if (skip(r, "\\")) {
        if (more(r) && add_named(&x->set, r->text[r->at], false)) {
            r->at++;
            nmk_set_normalize(&x->set);
            return x;
        }
        c = escape(r);
    } else {
        c = next_char(r);
    }
    if (c < 0) {
        nmk_expr_free(x);
        return NULL;
    }
    nmk_set_add(&x->set, (uint32_t)c, (uint32_t)c);
    return x;
}

/* A brace that begins no count is one, and so is that of {,2}, of which dialects think differently. */
static bool is_repeat(const reader *r, size_t *at, nmk_repeat *x) {
    return nmk_expr_read_repeat(r->text, r->bytes, at, false, x) && x->low >= 0;
}

/* The atom, repeated if that is what follows it.  Once: how deep an expression is must not depend on its length. */
static nmk_expr *read_repeat(reader *r, nmk_expr *atom) {
    nmk_repeat x, y;
    size_t at = r->at;
    const char *why = NULL;
    if (!is_repeat(r, &at, &x)) return atom;
    r->at = at;
    if (x.low > NMK_GRAMMAR_REPEATS || x.high > NMK_GRAMMAR_REPEATS)
        why = "too many repeats";
    else if (x.high >= 0 && x.high < x.low)
        why = "fewer repeats at most than at least";
    else if (!skip(r, "?") && is_at(r, '+'))
        why = "possessive repeats are not supported";
    else if (at = r->at, is_repeat(r, &at, &y))
        why = "nothing to repeat";
    if (!why) return nmk_expr_repeat(atom, (int)x.low, (int)x.high);
    nmk_expr_free(atom);
    return fail(r, why);
}

/* top: the ends are those of the whole expression. */
static nmk_expr *read_sequence(reader *r, bool top) {
    nmk_expr *x = nmk_expr_new(NMK_EXPR_SEQUENCE);
    bool begins = top && skip(r, "^"), ends = false;
    if (top && r->anywhere && !begins) nmk_expr_add(x, any_text());
    while (more(r) && !is_at(r, '|') && !is_at(r, ')')) {
        if (top && is_at(r, '$') && (r->at + 1 == r->bytes || r->text[r->at + 1] == '|')) {
            r->at++, ends = true;
            break;
        }
        nmk_expr *atom = read_atom(r);
        if (atom) atom = read_repeat(r, atom);
        if (!atom) {
            nmk_expr_free(x);
            return NULL;
        }
        nmk_expr_add(x, atom);
    }
    if (top && r->anywhere && !ends) nmk_expr_add(x, any_text());
    return x;
}

static nmk_expr *read_either(reader *r, bool top) {
    nmk_expr *x = nmk_expr_new(NMK_EXPR_EITHER);
    do {
        nmk_expr *part = read_sequence(r, top);
        if (!part) {
            nmk_expr_free(x);
            return NULL;
        }
        nmk_expr_add(x, part);
    } while (skip(r, "|"));
    return x;
}

nmk_expr *nmk_regex_parse(const char *text, size_t bytes, bool anywhere, nmk_err *e) {
    reader r = {.text = text, .bytes = bytes, .anywhere = anywhere, .e = e};
    if (bytes > NMK_REGEX_BYTES) return fail(&r, "the expression is too long");
    if (!nmk_utf8_valid(text, bytes)) return fail(&r, "not valid UTF-8");
    nmk_expr *x = read_either(&r, true);
    if (x && more(&r)) {
        nmk_expr_free(x);
        return fail(&r, "a ) without its (");
    }
    return x;
}
