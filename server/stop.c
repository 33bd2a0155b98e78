#include "stop.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* One string with its Knuth-Morris-Pratt table: shorter[n] is the longest proper prefix of the string that ends its
 * first n bytes. */
typedef struct {
    char *data;
    size_t bytes, *shorter;
    size_t at; /* that many bytes at the end of the text begin the string */
} pattern;

struct nmk_stop {
    pattern *pattern;
    int count, met;
    bool keep;
    nmk_buf held; /* the end of the text; no longer than the longest `at` between calls */
};

static void prepare(pattern *p, const nmk_text *s) {
    assert(s->bytes);
    p->data = memcpy(xmalloc(s->bytes), s->data, s->bytes);
    p->bytes = s->bytes;
    p->shorter = xcalloc(s->bytes + 1, sizeof *p->shorter);
    for (size_t n = 1, k = 0; n < p->bytes; n++) {
        while (k && p->data[n] != p->data[k]) k = p->shorter[k];
        k += p->data[n] == p->data[k];
        p->shorter[n + 1] = k;
    }
}

nmk_stop *nmk_stop_new(const nmk_text *strings, int count, bool keep) {
    nmk_stop *s = xcalloc(1, sizeof *s);
    *s = (nmk_stop){.pattern = xcalloc((size_t)count, sizeof *s->pattern), .count = count, .met = -1, .keep = keep};
    for (int i = 0; i < count; i++) prepare(&s->pattern[i], &strings[i]);
    return s;
}

void nmk_stop_free(nmk_stop *s) {
    if (!s) return;
    for (int i = 0; i < s->count; i++) {
        free(s->pattern[i].data);
        free(s->pattern[i].shorter);
    }
    free(s->pattern);
    nmk_buf_free(&s->held);
    free(s);
}

/* True when the string is complete with this byte. */
static bool step(pattern *p, char c) {
    if (p->at == p->bytes) p->at = p->shorter[p->at];
    while (p->at && p->data[p->at] != c) p->at = p->shorter[p->at];
    p->at += p->data[p->at] == c;
    return p->at == p->bytes;
}

bool nmk_stop_add(nmk_stop *s, const char *text, size_t bytes, bool may_stop, nmk_buf *out) {
    if (s->met >= 0) return true;
    nmk_buf_add(&s->held, text, bytes);
    size_t used = s->held.length - bytes;
    for (size_t i = 0; i < bytes && s->met < 0; i++) {
        used++;
        for (int k = 0; k < s->count; k++) {
            pattern *p = &s->pattern[k];
            if (!step(p, text[i]) || !may_stop) continue;
            if (s->met < 0 || p->bytes > s->pattern[s->met].bytes) s->met = k;
        }
    }
    size_t back = 0;
    if (s->met >= 0) {
        back = s->keep ? 0 : s->pattern[s->met].bytes;
    } else {
        /* A whole string that was let pass cannot be met any more; a shorter one in its end can. */
        for (int k = 0; k < s->count; k++) {
            pattern *p = &s->pattern[k];
            size_t open = p->at == p->bytes ? p->shorter[p->at] : p->at;
            if (open > back) back = open;
        }
    }
    nmk_buf_add(out, s->held.data, used - back);
    if (s->met >= 0) {
        s->held.length = 0;
        return true;
    }
    memmove(s->held.data, s->held.data + (used - back), back);
    s->held.length = back;
    return false;
}

void nmk_stop_end(nmk_stop *s, nmk_buf *out) {
    if (s->met >= 0) return;
    nmk_buf_add(out, s->held.data, s->held.length);
    s->held.length = 0;
    for (int k = 0; k < s->count; k++) s->pattern[k].at = 0;
}

int nmk_stop_met(const nmk_stop *s) { return s->met; }
