/* UTF-8: the one place that knows which byte sequences are valid. */
#ifndef NMK_UTF8_H
#define NMK_UTF8_H

#include "util.h"

#include <stdbool.h>

/* Looks at the first character of p[0..n), n > 0.
 *   > 0  a valid character of that many bytes
 *   < 0  no character begins like this: that many bytes (negated) stand for one U+FFFD
 *   = 0  the beginning of a character whose rest is missing */
int nmk_utf8_scan(const char *p, size_t n);

bool nmk_utf8_valid(const char *text, size_t bytes);

/* The code point of the valid character at p. */
uint32_t nmk_utf8_at(const char *p);

/* The start of the valid character that ends before p. */
const char *nmk_utf8_before(const char *p);

/* Makes valid UTF-8 of bytes that come in pieces.  Zeroed is ready; holds back what may still become a character.
 * An invalid sequence becomes one U+FFFD for its longest part that could have begun a character. */
typedef struct {
    char held[4];
    unsigned count;
} nmk_utf8;

void nmk_utf8_add(nmk_utf8 *u, const char *data, size_t bytes, nmk_buf *out);
void nmk_utf8_end(nmk_utf8 *u, nmk_buf *out); /* what is held back becomes U+FFFD; u is ready again */

#endif
