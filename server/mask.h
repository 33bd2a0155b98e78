/* Which tokens may come next: a grammar, followed over a vocabulary.
 *
 * A state of the walk is the set of places in the grammar that the text so far may have led to, each with the calls it
 * is in.  States are made when they are met and kept: what a byte leads to is looked up from the second time on, and so
 * is a state's mask.  So a grammar learns, for all requests that have it.
 *
 * A mask is the set of tokens behind which the text can still be completed: no walk along masks ends in a dead end as
 * long as every byte that the grammar needs is a token.  Tokens are walked as a tree.  Most tokens of a vocabulary are
 * plain characters, and a string takes nearly all of them: so how many plain characters a state takes, whatever they
 * are, is found first, tokens of no more than these are added at once, and only the others are walked.
 *
 * Added tokens (special or not) are no text here: only an edge with their id takes them.
 *
 * A walker belongs to one sequence.  Walkers of one nmk_masks may be used from different threads. */
#ifndef NMK_MASK_H
#define NMK_MASK_H

#include "grammar.h"
#include "tokenizer.h"

typedef struct nmk_token_tree nmk_token_tree; /* a vocabulary; does not change */

/* The texts of ids below `vocab`; text(user, id, &bytes) is NULL where an id is no text.  ends: tokens that end a
 * complete text. */
typedef const char *(*nmk_token_text_fn)(const void *user, int32_t id, size_t *bytes);
nmk_token_tree *nmk_token_tree_new(nmk_token_text_fn text, const void *user, int vocab, const int32_t *ends,
                                   int end_count);
nmk_token_tree *nmk_token_tree_of(const nmk_tokenizer *t, int vocab, const int32_t *ends, int end_count);
void nmk_token_tree_free(nmk_token_tree *t); /* NULL is fine */

/* Words of a mask: bit id % 32 of word id / 32. */
int nmk_token_tree_words(const nmk_token_tree *t);

/* A grammar with all that was learnt of it.  Counted: new gives one count. */
typedef struct nmk_masks nmk_masks;
nmk_masks *nmk_masks_new(nmk_grammar *g, const nmk_token_tree *t); /* takes the grammar, keeps t */
nmk_masks *nmk_masks_ref(nmk_masks *m);
void nmk_masks_unref(nmk_masks *m); /* NULL is fine */

typedef struct nmk_walker nmk_walker;
nmk_walker *nmk_walker_new(nmk_masks *m);
void nmk_walker_free(nmk_walker *w); /* NULL is fine */

/* The tokens that may come now; false: the text is complete and has ended, or there is none, or finding out takes too
 * much work; *e says which. */
bool nmk_walker_mask(nmk_walker *w, uint32_t *mask, nmk_err *e);

/* The token that came; false: it was not allowed. */
bool nmk_walker_take(nmk_walker *w, int32_t token, nmk_err *e);

bool nmk_walker_ended(const nmk_walker *w); /* by one of the tokens that end a text */

#endif
