/* Stop strings: text goes in as it is generated and comes out up to the first stop string.
 *
 * What may still become a stop string is held back, so no part of one is ever seen.  The stop string that is complete
 * first counts; of several that end together, the longest.  What comes out does not depend on how the text was cut.
 * Each addition is whole characters, and so is what comes out.  Time is linear in the text for each string. */
#ifndef NMK_STOP_H
#define NMK_STOP_H

#include <stdbool.h>

#include "util.h"

typedef struct {
    const char *data;
    size_t bytes;
} nmk_text;

typedef struct nmk_stop nmk_stop;

/* The strings are copied; none is empty.  keep: a stop string that is met comes out with the text. */
nmk_stop *nmk_stop_new(const nmk_text *strings, int count, bool keep);
void nmk_stop_free(nmk_stop *s); /* NULL is fine */

/* Adds to `out` what is certain.  True: a stop string is met, the answer ends here, what follows it is dropped, and
 * calls after this one are ignored.  Without may_stop (fewer than min_tokens so far) a stop string that becomes
 * complete is text. */
bool nmk_stop_add(nmk_stop *s, const char *text, size_t bytes, bool may_stop, nmk_buf *out);

/* The text ended by itself: what was held back belongs to it.  Another one may begin. */
void nmk_stop_end(nmk_stop *s, nmk_buf *out);

/* Which string was met, or -1. */
int nmk_stop_met(const nmk_stop *s);

#endif
