/* The vocabulary of a byte-level BPE: the bytes of each id, the ids by bytes, and the merges by rank. */
#ifndef NMK_VOCAB_H
#define NMK_VOCAB_H

#include "tokenizer.h"

typedef struct nmk_vocab nmk_vocab;

/* NMK_TOKEN_PIECE: merges may make it.  The others are found in the text before; NMK_TOKEN_SPECIAL ones only when
 * asked for.  NMK_TOKEN_OTHER is in the file's vocabulary, but text never leads to it. */
typedef enum { NMK_TOKEN_NONE, NMK_TOKEN_PIECE, NMK_TOKEN_OTHER, NMK_TOKEN_ADDED, NMK_TOKEN_SPECIAL } nmk_token_kind;

/* Room for ids below `size` and for that many merges. */
nmk_vocab *nmk_vocab_new(int32_t size, size_t merges);
void nmk_vocab_free(nmk_vocab *v); /* NULL is fine */
int32_t nmk_vocab_size(const nmk_vocab *v);

/* Sets an id's token; of one that has a token already, only the kind. */
void nmk_vocab_set(nmk_vocab *v, int32_t id, const char *bytes, size_t length, nmk_token_kind kind);
nmk_token_kind nmk_vocab_kind(const nmk_vocab *v, int32_t id); /* any id */
const char *nmk_vocab_bytes(const nmk_vocab *v, int32_t id, size_t *length);

/* The id whose token is exactly this and was first set as NMK_TOKEN_PIECE, or -1. */
int32_t nmk_vocab_find(const nmk_vocab *v, const char *bytes, size_t length);

/* The next merge in order of rank.  A pair that is there already gets the new rank. */
void nmk_vocab_merge(nmk_vocab *v, int32_t left, int32_t right, int32_t result);

/* After the last merge: the vocabulary does not change any more.  A byte that no UTF-8 text has needs no token; the
 * first other byte without one is returned, or -1 when all have one. */
int nmk_vocab_finish(nmk_vocab *v, bool ignore_merges);

/* Adds the ids of one piece: merges the pair of lowest rank, the leftmost first, until none is left. */
void nmk_vocab_encode(const nmk_vocab *v, const char *piece, size_t bytes, nmk_ids *ids);

#endif
