/* Pre-tokenisation: cuts text into the pieces that merges stay inside of.
 *
 * A chain of steps; each cuts what the step before it gave.  The patterns come from tokenizer.json and are written for
 * Oniguruma in its Ruby syntax with Unicode; they are translated to PCRE2 so that \s, \d, \w and \b keep their meaning,
 * and what the two engines read differently is refused. */
#ifndef NMK_SPLIT_H
#define NMK_SPLIT_H

#include "util.h"

#include <stdbool.h>

typedef struct nmk_splitter nmk_splitter;

/* What becomes of a match: a piece of its own, nothing, the end of the piece before it, the beginning of the piece
 * after it, or one piece with the matches next to it. */
typedef enum {
    NMK_SPLIT_ISOLATED,
    NMK_SPLIT_REMOVED,
    NMK_SPLIT_MERGED_WITH_PREVIOUS,
    NMK_SPLIT_MERGED_WITH_NEXT,
    NMK_SPLIT_CONTIGUOUS
} nmk_split_behaviour;

nmk_splitter *nmk_splitter_new(void);
void nmk_splitter_free(nmk_splitter *s); /* NULL is fine */

/* Each adds a step at the end.  0, or -1 when the pattern is not supported or there are too many steps. */
int nmk_split_add_pattern(nmk_splitter *s, const char *pattern, bool literal, nmk_split_behaviour behaviour,
                          bool invert, nmk_err *e);
int nmk_split_add_digits(nmk_splitter *s, bool individual, nmk_err *e);
int nmk_split_add_space(nmk_splitter *s, nmk_err *e); /* puts a space before each piece that does not begin with one */

/* Calls `piece` for each piece in order.  The text must be valid UTF-8; a piece is never empty and stays valid
 * during the call only.  0, or -1: `piece` failed, or a match took too much work.  Several threads may run one
 * splitter at a time. */
typedef int nmk_piece_fn(void *context, const char *text, size_t bytes, nmk_err *e);
int nmk_split_run(const nmk_splitter *s, const char *text, size_t bytes, nmk_piece_fn *piece, void *context,
                  nmk_err *e);

/* What counts as white space and as part of a word around an added token. */
bool nmk_is_space(uint32_t c);
bool nmk_is_word(uint32_t c);

#endif
