/* Citations of Cohere's models out of a text: "<co>so it is</co: 0:[1,2]>" becomes "so it is".
 *
 * Only what is whole goes.  "<co>" is text unless its end follows, within NMK_CITE_BYTES and without another "<co>"
 * between: code may hold such a tag, and then it is nobody's to take.  An end that nothing began goes too, as no text
 * looks like one; an end is "</co: ", digits with colons, commas, brackets and blanks between, ">".
 *
 * What may still become a citation is held back, so what comes out does not depend on how the text was cut.  Time is
 * linear in the text. */
#ifndef NMK_CITE_H
#define NMK_CITE_H

#include <stdbool.h>

#include "util.h"

enum { NMK_CITE_BYTES = 1024 }; /* more than a table's row */

/* Zeroed is ready. */
typedef struct {
    nmk_buf held;   /* from a "<co>" on, or what may become one or an end */
    bool open;      /* from a "<co>" on */
    size_t scanned; /* of `held`: no end begins before */
} nmk_cite;

/* Adds to `out` what is certain. */
void nmk_cite_add(nmk_cite *c, const char *text, size_t bytes, nmk_buf *out);
void nmk_cite_end(nmk_cite *c, nmk_buf *out); /* what is held back is text; c is ready again */
void nmk_cite_free(nmk_cite *c);

#endif
