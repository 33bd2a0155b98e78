#include "cite.h"

#include <string.h>

static const char opener[] = "<co>", closer[] = "</co: ";
enum { OPENER = sizeof opener - 1, CLOSER = sizeof closer - 1, LONGEST_END = 128 };

typedef enum { OTHER, PART, WHOLE } match;

/* Whether p[0..n) begins with a word, or is the beginning of one. */
static match begins(const char *p, size_t n, const char *word, size_t bytes) {
    if (memcmp(p, word, n < bytes ? n : bytes) != 0) return OTHER;
    return n < bytes ? PART : WHOLE;
}

/* The end of a citation; *length: all of it. */
static match ends(const char *p, size_t n, size_t *length) {
    match m = begins(p, n, closer, CLOSER);
    if (m != WHOLE) return m;
    for (size_t i = CLOSER; i < n && i < LONGEST_END; i++) {
        *length = i + 1;
        if (p[i] == '>') return WHOLE;
        if (!p[i] || !strchr("0123456789:[], ", p[i])) return OTHER;
    }
    return n < LONGEST_END ? PART : OTHER;
}

static void sieve(nmk_cite *c, nmk_buf *out) {
    const char *p = c->held.data;
    const size_t n = c->held.length;
    size_t from = 0; /* what is before has gone out */
    for (;;) {
        const char *tag = c->scanned < n ? memchr(p + c->scanned, '<', n - c->scanned) : NULL;
        size_t at = tag ? (size_t)(tag - p) : n, length = 0;
        c->scanned = at;
        if (c->open && at - from > NMK_CITE_BYTES) c->open = false;
        if (!tag) break;
        match begin = begins(tag, n - at, opener, OPENER), end = ends(tag, n - at, &length);
        if (begin == PART || end == PART) break;
        if (begin == OTHER && end == OTHER) {
            c->scanned++;
            continue;
        }
        size_t skipped = end == WHOLE && c->open ? OPENER : 0;
        nmk_buf_add(out, p + from + skipped, at - from - skipped);
        c->open = begin == WHOLE;
        from = at + (end == WHOLE ? length : 0);
        c->scanned = at + (end == WHOLE ? length : OPENER);
    }
    if (!c->open) {
        nmk_buf_add(out, p + from, c->scanned - from);
        from = c->scanned;
    }
    memmove(c->held.data, p + from, n - from);
    c->held.length -= from, c->scanned -= from;
}

void nmk_cite_add(nmk_cite *c, const char *text, size_t bytes, nmk_buf *out) {
    if (!bytes) return;
    nmk_buf_add(&c->held, text, bytes);
    sieve(c, out);
}

void nmk_cite_end(nmk_cite *c, nmk_buf *out) {
    if (c->held.length) nmk_buf_add(out, c->held.data, c->held.length);
    c->held.length = c->scanned = 0;
    c->open = false;
}

void nmk_cite_free(nmk_cite *c) {
    nmk_buf_free(&c->held);
    *c = (nmk_cite){0};
}
