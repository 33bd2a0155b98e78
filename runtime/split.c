#include "split.h"
#include "utf8.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { MAX_STEPS = 16, MAX_PATTERN = 1 << 16 };

/* One match of a step.  start == end is possible. */
typedef struct {
    size_t start, end;
} span;

typedef enum { STEP_PATTERN, STEP_THREES, STEP_DIGITS, STEP_SPACE } step_kind;

typedef struct {
    step_kind kind;
    nmk_split_behaviour behaviour;
    bool invert;
    pcre2_code *code; /* STEP_PATTERN only */
    bool jit;
} step;

struct nmk_splitter {
    step steps[MAX_STEPS];
    size_t count;
};

/* ------------------------------------------------------------------------------------------------- characters */

bool nmk_is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

static bool is_decimal(uint32_t c) {
    return c < 0x80 ? c >= '0' && c <= '9' : utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_ND;
}

/* Alphabetic, mark, decimal digit or connector: what both engines of the tokenizers library agree on. */
static bool is_letterlike(uint32_t c) {
    if (c < 0x80) return c == '_' || (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z');
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: /* the symbols that count as alphabetic: circled and squared letters */
        return (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) || (c >= 0x1f150 && c <= 0x1f169) ||
               (c >= 0x1f170 && c <= 0x1f189);
    }
}

bool nmk_is_word(uint32_t c) { return is_letterlike(c) || c == 0x200c || c == 0x200d; }

/* \w of a pattern.  Oniguruma counts the superscripts and fractions of Latin-1 too, but no others. */
static bool is_pattern_word(uint32_t c) {
    return is_letterlike(c) || c == 0xb2 || c == 0xb3 || c == 0xb9 || (c >= 0xbc && c <= 0xbe);
}

/* ---------------------------------------------------------------------------------------------------- patterns */

/* Digits in groups of three from the right, where the number ends a word.  As a pattern it looks ahead to the end of
 * the number from each group, which is quadratic, so this one is done by hand. */
static const char threes[] = "\\d{1,3}(?=(?:\\d{3})*\\b)";

/* is_pattern_word as the inside of a class. */
static const char word_class[] = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";

/* Writes one escape of an Oniguruma pattern, p[0] == '\\', in PCRE2's terms.  Returns its length in p, or 0. */
static size_t translate_escape(const char *p, bool in_class, nmk_buf *out, nmk_err *e) {
    switch (p[1]) {
    case 'd': nmk_buf_puts(out, "\\p{Nd}"); return 2;
    case 'D': nmk_buf_puts(out, "\\P{Nd}"); return 2;
    case 's': nmk_buf_puts(out, "\\p{White_Space}"); return 2;
    case 'S': nmk_buf_puts(out, "\\P{White_Space}"); return 2;
    case 'w': nmk_buf_printf(out, in_class ? "%s" : "[%s]", word_class); return 2;
    case 'W':
        if (in_class) break;
        nmk_buf_printf(out, "[^%s]", word_class);
        return 2;
    case 'b':
    case 'B':
        if (in_class) break;
        nmk_buf_printf(out,
                       p[1] == 'b' ? "(?:(?<=[%1$s])(?![%1$s])|(?<![%1$s])(?=[%1$s]))"
                                   : "(?:(?<=[%1$s])(?=[%1$s])|(?<![%1$s])(?![%1$s]))",
                       word_class);
        return 2;
    case 'p':
    case 'P': {
        size_t end = strcspn(p, "}"), from = p[2] == '{' && p[3] == '^' ? 4 : 3;
        if (p[2] != '{' || !p[end] || end <= from) break;
        /* A name longer than a general category is a script; PCRE2 alone would take the script's extensions too. */
        nmk_buf_printf(out, "\\%c{%s%s%.*s}", p[1], from == 4 ? "^" : "", end - from > 2 ? "sc:" : "",
                       (int)(end - from), p + from);
        return end + 1;
    }
    case 'x':
        if (p[2] == '{' && strspn(p + 3, "0123456789abcdefABCDEF") > 0) {
            size_t digits = strspn(p + 3, "0123456789abcdefABCDEF");
            if (p[3 + digits] != '}') break;
            nmk_buf_add(out, p, digits + 4);
            return digits + 4;
        }
        if (p[2] < '0' || p[2] > '7' || strspn(p + 3, "0123456789abcdefABCDEF") == 0) break;
        nmk_buf_add(out, p, 4);
        return 4;
    case 'u':
        if (strspn(p + 2, "0123456789abcdefABCDEF") < 4) break;
        nmk_buf_printf(out, "\\x{%.4s}", p + 2);
        return 6;
    case 'v': nmk_buf_puts(out, "\\x0b"); return 2;
    case 'n':
    case 'r':
    case 't':
    case 'f':
    case 'a':
    case 'e': nmk_buf_add(out, p, 2); return 2;
    case 'A':
    case 'z':
        if (in_class) break;
        nmk_buf_add(out, p, 2);
        return 2;
    default:
        if (p[1] < ' ' || p[1] > '~' || is_letterlike((unsigned char)p[1])) break;
        nmk_buf_add(out, p, 2);
        return 2;
    }
    nmk_fail(e, "the escape \"%.2s\" is not supported%s", p, in_class ? " in a class" : "");
    return 0;
}

static bool starts(const char *p, const char *with) { return !strncmp(p, with, strlen(with)); }

/* The group that opens at p, or the quantifier: whether both engines read it alike. */
static bool same_group(const char *p, bool first) {
    static const char *const known[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:"};
    if (starts(p, "(*")) return false;
    if (!starts(p, "(?")) return true;
    if (starts(p, "(?i)")) return first; /* further on, they differ in which alternatives it holds for */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (starts(p, known[i])) return true;
    return false;
}

static bool same_repeat(const char *p) {
    size_t low = strspn(p + 1, "0123456789"), high = 0;
    bool comma = p[1 + low] == ',';
    if (comma) high = strspn(p + 2 + low, "0123456789");
    const char *end = p + 1 + low + (comma ? 1 + high : 0);
    return low && *end == '}' && end[1] != '+' && (comma || end[1] != '?');
}

static int translate(const char *pattern, nmk_buf *out, nmk_err *e) {
    bool in_class = false;
    for (const char *p = pattern; *p;) {
        if (*p == '\\') {
            size_t length = translate_escape(p, in_class, out, e);
            if (!length) return -1;
            p += length;
            continue;
        }
        if (in_class) {
            if (*p == '[' || starts(p, "&&"))
                return nmk_fail(e, "a class inside a class is not supported, at \"%.16s\"", p);
            in_class = *p != ']';
        } else if (*p == '[') {
            in_class = true;
            size_t head = p[1] == '^' ? 2 : 1;
            if (p[head] == ']') return nmk_fail(e, "a class that begins with ] is not supported");
            nmk_buf_add(out, p, head);
            p += head;
            continue;
        } else if (*p == '(' && !same_group(p, p == pattern)) {
            return nmk_fail(e, "this kind of group is not supported, at \"%.16s\"", p);
        } else if (*p == '{' && !same_repeat(p)) {
            return nmk_fail(e, "this kind of repetition is not supported, at \"%.16s\"", p);
        }
        nmk_buf_add(out, p++, 1);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------- steps */

nmk_splitter *nmk_splitter_new(void) { return xcalloc(1, sizeof(nmk_splitter)); }

void nmk_splitter_free(nmk_splitter *s) {
    if (!s) return;
    for (size_t i = 0; i < s->count; i++) pcre2_code_free(s->steps[i].code);
    free(s);
}

static int add_step(nmk_splitter *s, step added, nmk_err *e) {
    if (s->count == MAX_STEPS) {
        pcre2_code_free(added.code);
        return nmk_fail(e, "more than %d steps", MAX_STEPS);
    }
    s->steps[s->count++] = added;
    return 0;
}

int nmk_split_add_pattern(nmk_splitter *s, const char *pattern, bool literal, nmk_split_behaviour behaviour,
                          bool invert, nmk_err *e) {
    int rc = -1;
    nmk_buf text = {0};
    step added = {.kind = STEP_PATTERN, .behaviour = behaviour, .invert = invert};
    if (!*pattern) {
        nmk_fail(e, "the pattern is empty");
        goto out;
    }
    if (strlen(pattern) > MAX_PATTERN) {
        nmk_fail(e, "the pattern has more than %d bytes", MAX_PATTERN);
        goto out;
    }
    if (!literal && !strcmp(pattern, threes)) {
        added.kind = STEP_THREES;
        rc = add_step(s, added, e);
        goto out;
    }
    if (literal)
        nmk_buf_puts(&text, pattern);
    else if (translate(pattern, &text, e))
        goto out;
    int problem;
    PCRE2_SIZE at;
    uint32_t options = literal ? PCRE2_UTF | PCRE2_LITERAL : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE;
    added.code = pcre2_compile((PCRE2_SPTR)text.data, text.length, options, &problem, &at, NULL);
    if (!added.code) {
        char why[128] = "";
        pcre2_get_error_message(problem, (PCRE2_UCHAR *)why, sizeof why);
        nmk_fail(e, "the pattern is wrong: %s", why);
        goto out;
    }
    added.jit = !pcre2_jit_compile(added.code, PCRE2_JIT_COMPLETE); /* without it only speed is lost */
    rc = add_step(s, added, e);
out:
    nmk_buf_free(&text);
    return rc;
}

int nmk_split_add_digits(nmk_splitter *s, bool individual, nmk_err *e) {
    return add_step(s, (step){.kind = STEP_DIGITS, .behaviour = individual ? NMK_SPLIT_ISOLATED : NMK_SPLIT_CONTIGUOUS},
                    e);
}

int nmk_split_add_space(nmk_splitter *s, nmk_err *e) { return add_step(s, (step){.kind = STEP_SPACE}, e); }

/* ----------------------------------------------------------------------------------------------------- running */

/* One run of a splitter.  `scratch` of a step that adds a space holds the piece the later steps work on. */
typedef struct {
    const nmk_splitter *splitter;
    nmk_piece_fn *piece;
    void *context;
    nmk_err *e;
    pcre2_match_data *match; /* for the whole match only: no groups are asked for */
    pcre2_match_context *limits;
    pcre2_jit_stack *stack; /* made when a match needs more than the 32 KiB it has anyway */
    nmk_buf scratch[MAX_STEPS];
} run;

enum { JIT_STACK_BYTES = 64 << 20, HEAP_KIB = 256 << 10 };

/* Finds the first match at or after `from`: 1, 0 when there is none, -1 on failure. */
static int find_pattern(run *r, const step *s, const char *text, size_t bytes, size_t from, span *found) {
    for (;;) {
        int rc = s->jit ? pcre2_jit_match(s->code, (PCRE2_SPTR)text, bytes, from, 0, r->match, r->limits)
                        : pcre2_match(s->code, (PCRE2_SPTR)text, bytes, from, PCRE2_NO_UTF_CHECK, r->match, r->limits);
        if (rc >= 0) {
            const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(r->match);
            *found = (span){ends[0], ends[1]};
            return 1;
        }
        if (rc == PCRE2_ERROR_NOMATCH) return 0;
        if (rc != PCRE2_ERROR_JIT_STACKLIMIT || r->stack) {
            char why[128] = "";
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
            return nmk_fail(r->e, "the tokenizer's pattern cannot cut this text (%zu bytes): %s", bytes, why);
        }
        r->stack = pcre2_jit_stack_create(64 << 10, JIT_STACK_BYTES, NULL);
        if (!r->stack) return nmk_fail(r->e, "no memory for the stack of the tokenizer's pattern");
        pcre2_jit_stack_assign(r->limits, NULL, r->stack);
    }
}

static size_t char_bytes(const char *text, size_t at) {
    unsigned char c = (unsigned char)text[at];
    return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

/* A group of digits of `threes`.  *number is the run of digits that the last call was in, kept between calls. */
static int find_three(const char *text, size_t bytes, size_t from, span *number, span *found) {
    for (size_t at = from; at < bytes;) {
        if (at >= number->end) {
            while (at < bytes && !is_decimal(nmk_utf8_at(text + at))) at += char_bytes(text, at);
            size_t end = at, count = 0;
            while (end < bytes && is_decimal(nmk_utf8_at(text + end))) end += char_bytes(text, end), count++;
            bool ends_word = end == bytes || !is_pattern_word(nmk_utf8_at(text + end));
            *number = (span){at, end};
            if (!count) return 0;
            if (!ends_word) {
                at = end;
                continue;
            }
            size_t first = count % 3 ? count % 3 : 3, to = at;
            while (first--) to += char_bytes(text, to);
            *found = (span){at, to};
            return 1;
        }
        size_t to = at; /* inside a number that ends a word, on the boundary of a group */
        for (int i = 0; i < 3; i++) to += char_bytes(text, to);
        *found = (span){at, to};
        return 1;
    }
    return 0;
}

static int find_digit(const char *text, size_t bytes, size_t from, span *found) {
    for (size_t at = from; at < bytes; at += char_bytes(text, at)) {
        utf8proc_category_t kind = utf8proc_category((utf8proc_int32_t)nmk_utf8_at(text + at));
        if (kind == UTF8PROC_CATEGORY_ND || kind == UTF8PROC_CATEGORY_NL || kind == UTF8PROC_CATEGORY_NO) {
            *found = (span){at, at + char_bytes(text, at)};
            return 1;
        }
    }
    return 0;
}

static int run_from(run *r, size_t step_index, const char *text, size_t bytes);

/* Joins spans to pieces as the behaviour says and hands them to the next step. */
typedef struct {
    run *r;
    size_t next;
    const char *text;
    nmk_split_behaviour behaviour;
    span held;
    bool has_held, was_match;
} joiner;

static int give(joiner *j, span s) {
    return s.start == s.end ? 0 : run_from(j->r, j->next, j->text + s.start, s.end - s.start);
}

static int flush(joiner *j) {
    if (!j->has_held) return 0;
    j->has_held = false;
    return give(j, j->held);
}

static int join(joiner *j, span s, bool is_match) {
    bool joins = false;
    switch (j->behaviour) {
    case NMK_SPLIT_ISOLATED: return give(j, s);
    case NMK_SPLIT_REMOVED: return is_match ? 0 : give(j, s);
    case NMK_SPLIT_MERGED_WITH_PREVIOUS: joins = is_match && !j->was_match; break;
    case NMK_SPLIT_MERGED_WITH_NEXT: joins = !is_match && j->was_match; break;
    case NMK_SPLIT_CONTIGUOUS: joins = is_match == j->was_match; break;
    }
    j->was_match = is_match;
    if (joins && j->has_held) {
        j->held.end = s.end;
        return 0;
    }
    if (flush(j)) return -1;
    j->held = s, j->has_held = true;
    return 0;
}

static int run_split(run *r, size_t index, const char *text, size_t bytes) {
    const step *s = &r->splitter->steps[index];
    joiner j = {.r = r, .next = index + 1, .text = text, .behaviour = s->behaviour};
    size_t done = 0, from = 0, last_end = SIZE_MAX;
    span number = {0, 0}, found;
    while (from <= bytes) {
        int rc = s->kind == STEP_PATTERN  ? find_pattern(r, s, text, bytes, from, &found)
                 : s->kind == STEP_THREES ? find_three(text, bytes, from, &number, &found)
                                          : find_digit(text, bytes, from, &found);
        if (rc < 0) return -1;
        if (!rc) break;
        if (found.start == found.end && found.end == last_end) { /* an empty match right behind a match is none */
            from += from < bytes ? char_bytes(text, from) : 1;
            continue;
        }
        from = last_end = found.end;
        if (done < found.start && join(&j, (span){done, found.start}, s->invert)) return -1;
        if (join(&j, found, !s->invert)) return -1;
        done = found.end;
    }
    if (done < bytes && join(&j, (span){done, bytes}, s->invert)) return -1;
    return flush(&j);
}

static int run_from(run *r, size_t step_index, const char *text, size_t bytes) {
    if (step_index == r->splitter->count) return r->piece(r->context, text, bytes, r->e);
    if (r->splitter->steps[step_index].kind != STEP_SPACE) return run_split(r, step_index, text, bytes);
    if (text[0] == ' ') return run_from(r, step_index + 1, text, bytes);
    nmk_buf *b = &r->scratch[step_index];
    b->length = 0;
    nmk_buf_add(b, " ", 1);
    nmk_buf_add(b, text, bytes);
    return run_from(r, step_index + 1, b->data, b->length);
}

int nmk_split_run(const nmk_splitter *s, const char *text, size_t bytes, nmk_piece_fn *piece, void *context,
                  nmk_err *e) {
    int rc = -1;
    run r = {.splitter = s, .piece = piece, .context = context, .e = e};
    if (!bytes) return 0;
    r.match = pcre2_match_data_create(1, NULL);
    r.limits = pcre2_match_context_create(NULL);
    if (!r.match || !r.limits) {
        nmk_fail(e, "no memory to cut a text into pieces");
        goto out;
    }
    pcre2_set_heap_limit(r.limits, HEAP_KIB);
    rc = run_from(&r, 0, text, bytes);
out:
    for (size_t i = 0; i < s->count; i++) nmk_buf_free(&r.scratch[i]);
    pcre2_jit_stack_free(r.stack);
    pcre2_match_context_free(r.limits);
    pcre2_match_data_free(r.match);
    return rc;
}
