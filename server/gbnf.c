#include "gbnf.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "utf8.h"

enum { NESTING = 100, RULES = 10000, SLOTS = 2 * RULES };

typedef struct {
    const char *name;
    size_t bytes;
    int rule, line; /* line: where it was first met */
    bool defined;
} named;

typedef struct {
    nmk_grammar *g;
    const char *text;
    size_t bytes, at;
    int line, depth, characters;
    named *rule;
    int rules, room;
    int *by_name; /* by hash, open: places in `rule`, -1: free */
    nmk_err *e;
} reader;

static nmk_expr *fail(reader *r, const char *what) {
    nmk_fail(r->e, "line %d: %s", r->line, what);
    return NULL;
}

static bool more(const reader *r) { return r->at < r->bytes; }
static char here(const reader *r) { return more(r) ? r->text[r->at] : 0; }
static bool skip(reader *r, char c) { return more(r) && r->text[r->at] == c ? r->at++, true : false; }

/* Blanks and comments; ends of lines too where a rule cannot end. */
static void blanks(reader *r, bool lines) {
    while (more(r)) {
        char c = r->text[r->at];
        if (c == '#')
            while (more(r) && r->text[r->at] != '\n') r->at++;
        else if (c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r')))
            r->line += c == '\n', r->at++;
        else
            break;
    }
}

static bool is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

static size_t name_length(const reader *r) {
    size_t n = 0;
    while (r->at + n < r->bytes && is_name(r->text[r->at + n])) n++;
    return n;
}

/* The rule of that name, met here for the first time or not. */
static named *find_rule(reader *r, const char *name, size_t bytes) {
    uint64_t slot = XXH3_64bits(name, bytes) % SLOTS;
    for (int i; (i = r->by_name[slot]) >= 0; slot = (slot + 1) % SLOTS)
        if (r->rule[i].bytes == bytes && !memcmp(r->rule[i].name, name, bytes)) return &r->rule[i];
    if (r->rules == RULES) return fail(r, "too many rules"), NULL;
    r->by_name[slot] = r->rules;
    if (r->rules == r->room)
        r->rule = xrealloc(r->rule, sizeof *r->rule * (size_t)(r->room = r->room ? 2 * r->room : 16));
    r->rule[r->rules] = (named){name, bytes, nmk_grammar_rule(r->g), r->line, false};
    return &r->rule[r->rules++];
}

/* A character of a literal or class, or -1 with a message. */
static int64_t one_char(reader *r) {
    if (!skip(r, '\\')) {
        if (!more(r) || here(r) == '\n') return fail(r, "a literal or class without its end"), -1;
        uint32_t c = nmk_utf8_at(r->text + r->at);
        r->at += (size_t)nmk_utf8_scan(r->text + r->at, r->bytes - r->at);
        return c;
    }
    char c = here(r);
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    r->at += more(r);
    if (digits) {
        int64_t value = 0;
        for (int d; digits && more(r) && (d = nmk_hex_digit(here(r))) >= 0; digits--, r->at++) value = value * 16 + d;
        if (digits || value > 0x10ffff || (value >= 0xd800 && value < 0xe000))
            return fail(r, "expected a character's number in hexadecimal digits"), -1;
        return value;
    }
    switch (c) {
    case 'n': return '\n';
    case 't': return '\t';
    case 'r': return '\r';
    case '\\':
    case '"':
    case '[':
    case ']':
    case '-':
    case '^':
    case '/': return c;
    default: return fail(r, "an unknown escape"), -1;
    }
}

static nmk_expr *read_literal(reader *r) {
    nmk_expr *x = nmk_expr_new(NMK_EXPR_SEQUENCE);
    while (!skip(r, '"')) {
        int64_t c = one_char(r);
        if (c < 0) {
            nmk_expr_free(x);
            return NULL;
        }
        /* An expression is a hundred times as large as its text: stop before it is too large for a grammar. */
        if (++r->characters > NMK_GRAMMAR_STATES) {
            nmk_expr_free(x);
            return fail(r, "too many characters in literals");
        }
        nmk_expr *part = nmk_expr_new(NMK_EXPR_SET);
        nmk_set_add(&part->set, (uint32_t)c, (uint32_t)c);
        nmk_expr_add(x, part);
    }
    return x;
}

static nmk_expr *read_class(reader *r) {
    nmk_expr *x = nmk_expr_new(NMK_EXPR_SET);
    bool inverted = skip(r, '^');
    while (!skip(r, ']')) {
        int64_t low = one_char(r), high = low;
        if (low >= 0 && here(r) == '-' && r->at + 1 < r->bytes && r->text[r->at + 1] != ']') {
            r->at++;
            high = one_char(r);
        }
        if (low < 0 || high < 0) goto bad;
        if (high < low) {
            fail(r, "a range that is none");
            goto bad;
        }
        nmk_set_add(&x->set, (uint32_t)low, (uint32_t)high);
    }
    if (inverted) nmk_set_invert(&x->set);
    nmk_set_normalize(&x->set);
    if (x->set.count) return x;
    fail(r, "a class without characters");
bad:
    nmk_expr_free(x);
    return NULL;
}

static nmk_expr *read_either(reader *r);

static nmk_expr *read_atom(reader *r) {
    if (skip(r, '"')) return read_literal(r);
    if (skip(r, '[')) return read_class(r);
    if (skip(r, '.')) {
        nmk_expr *x = nmk_expr_new(NMK_EXPR_SET);
        nmk_set_add(&x->set, 0, 0x10ffff);
        return x;
    }
    if (skip(r, '(')) {
        if (++r->depth > NESTING) return fail(r, "groups are nested too deeply");
        nmk_expr *x = read_either(r);
        r->depth--;
        blanks(r, true);
        if (!x || skip(r, ')')) return x;
        nmk_expr_free(x);
        return fail(r, "a group without its )");
    }
    size_t bytes = name_length(r);
    if (!bytes) return fail(r, "expected a literal, a class, a group or the name of a rule");
    named *rule = find_rule(r, r->text + r->at, bytes);
    if (!rule) return NULL;
    nmk_expr *x = nmk_expr_new(NMK_EXPR_RULE);
    x->rule = rule->rule, r->at += bytes;
    return x;
}

/* The atom, repeated if that is what follows it; once, as in regex.c. */
static nmk_expr *read_repeat(reader *r, nmk_expr *atom) {
    nmk_repeat x = {-1, -1}, y;
    const char *why = "expected repeats such as {2}, {2,} or {2,5}";
    if (!nmk_expr_read_repeat(r->text, r->bytes, &r->at, true, &x)) {
        if (here(r) != '{') return atom;
    } else if (x.low <= NMK_GRAMMAR_REPEATS && x.high <= NMK_GRAMMAR_REPEATS && (x.high < 0 || x.high >= x.low)) {
        size_t at = r->at;
        if (!nmk_expr_read_repeat(r->text, r->bytes, &at, true, &y))
            return nmk_expr_repeat(atom, x.low < 0 ? 0 : (int)x.low, (int)x.high);
        why = "a repeat of a repeat";
    }
    nmk_expr_free(atom);
    return fail(r, why);
}

/* Whether the next line begins another rule; blanks before it are skipped if not. */
static bool rule_ends(reader *r) {
    if (r->depth) return blanks(r, true), !more(r);
    blanks(r, false);
    if (more(r) && here(r) != '\n' && here(r) != '\r') return false;
    reader ahead = *r;
    blanks(&ahead, true);
    size_t bytes = name_length(&ahead);
    size_t start = ahead.at;
    ahead.at += bytes;
    blanks(&ahead, false);
    bool defines = bytes && ahead.bytes - ahead.at >= 3 && !memcmp(ahead.text + ahead.at, "::=", 3);
    if (defines || start == ahead.bytes) return true;
    r->at = start, r->line = ahead.line;
    return false;
}

static nmk_expr *read_sequence(reader *r) {
    nmk_expr *x = nmk_expr_new(NMK_EXPR_SEQUENCE);
    while (!rule_ends(r) && here(r) != '|' && here(r) != ')') {
        nmk_expr *atom = read_atom(r);
        if (atom) atom = read_repeat(r, atom);
        if (!atom) {
            nmk_expr_free(x);
            return NULL;
        }
        nmk_expr_add(x, atom);
    }
    return x;
}

static nmk_expr *read_either(reader *r) {
    nmk_expr *x = nmk_expr_new(NMK_EXPR_EITHER);
    do {
        nmk_expr *part = read_sequence(r);
        if (!part) {
            nmk_expr_free(x);
            return NULL;
        }
        nmk_expr_add(x, part);
    } while (skip(r, '|'));
    return x;
}

static int read_rule(reader *r) {
    size_t bytes = name_length(r);
    const char *name = r->text + r->at;
    if (!bytes) return fail(r, "expected the name of a rule"), -1;
    r->at += bytes;
    blanks(r, false);
    if (r->bytes - r->at < 3 || memcmp(r->text + r->at, "::=", 3) != 0) return fail(r, "expected ::="), -1;
    r->at += 3;
    named *rule = find_rule(r, name, bytes);
    if (!rule) return -1;
    if (rule->defined) return fail(r, "the rule is there twice"), -1;
    rule->defined = true;
    int number = rule->rule;
    nmk_expr *x = read_either(r);
    if (!x) return -1;
    if (here(r) == ')') {
        nmk_expr_free(x);
        return fail(r, "a ) without its ("), -1;
    }
    nmk_grammar_expr(r->g, r->g->start[number], x, false, r->g->end[number]);
    nmk_expr_free(x);
    return 0;
}

int nmk_gbnf_read(nmk_grammar *g, const char *text, size_t bytes, int *root, nmk_err *e) {
    int rc = -1;
    reader r = {.g = g, .text = text, .bytes = bytes, .line = 1, .e = e};
    if (bytes > NMK_GBNF_BYTES) {
        nmk_fail(e, "the grammar is too long");
        goto out;
    }
    if (!nmk_utf8_valid(text, bytes)) {
        nmk_fail(e, "the grammar is not valid UTF-8");
        goto out;
    }
    r.by_name = xmalloc(sizeof *r.by_name * SLOTS);
    memset(r.by_name, -1, sizeof *r.by_name * SLOTS);
    for (blanks(&r, true); more(&r); blanks(&r, true))
        if (read_rule(&r)) goto out;
    *root = -1;
    for (int i = 0; i < r.rules; i++) {
        if (!r.rule[i].defined) {
            nmk_fail(e, "line %d: there is no rule %.*s", r.rule[i].line,
                     (int)(r.rule[i].bytes < 100 ? r.rule[i].bytes : 100), r.rule[i].name);
            goto out;
        }
        if (r.rule[i].bytes == 4 && !memcmp(r.rule[i].name, "root", 4)) *root = r.rule[i].rule;
    }
    if (*root < 0)
        nmk_fail(e, "there is no rule root");
    else
        rc = 0;
out:
    free(r.rule), free(r.by_name);
    return rc;
}
