/* What a request may be answered with, as a grammar over the model's whole output: reasoning, answer, calls.
 *
 * A chat's output begins in the block that its prompt has opened.  Reasoning is free; then comes what was asked for,
 * between the markers that parse.h knows, or, where tools may be called as they like but some are strict, either an
 * answer or calls.  Calls are written as parse.h reads them.  A model without markers only answers.
 *
 * Compiled grammars are kept, with what was learnt of them, for requests that ask for the same. */
#ifndef NMK_CONSTRAINT_H
#define NMK_CONSTRAINT_H

#include "mask.h"
#include "parse.h"
#include "request.h"

typedef struct nmk_constraints nmk_constraints;

/* ends: the tokens that end an answer.  markers NULL: the model has none.  Keeps the tokenizer. */
nmk_constraints *nmk_constraints_new(const nmk_tokenizer *t, const nmk_markers *markers, int vocab, const int32_t *ends,
                                     int end_count);
void nmk_constraints_free(nmk_constraints *c); /* NULL is fine */

/* *masks: NULL if any answer will do, else counted for the caller.  block: the one that the prompt leaves open.  Takes
 * milliseconds, the first time longer; for one thread.  -1: the field at fault and what about it. */
int nmk_constraints_find(nmk_constraints *c, const nmk_api_request *q, nmk_block block, nmk_masks **masks,
                         nmk_api_error *e);

#endif
