/* A kernel wait that did not end, in words. */
#ifndef NMK_HANG_H
#define NMK_HANG_H

#include "abi.h"
#include "variant.h"

enum { NMK_HANGS = NMK_SMS * NMK_ROLES }; /* records: one a role of a block */

/* The record of the wait that held up the others: everyone behind it gives up too, and steps behind that one, so of all
 * records of the earliest step it is the one for the earliest counter (counters are numbered in wave order).  *count:
 * the records there are; NULL if that is 0. */
const volatile nmk_hang *nmk_hang_root(const volatile nmk_hang hangs[NMK_HANGS], int *count);

/* Writes one sentence: where, in which task, for what.  `lists` are the variant's, encoded; the record's task is an
 * index into its SM's.  Any record is safe to read, whatever its numbers.  expected 0: only the word is known. */
void nmk_hang_text(const volatile nmk_hang *hang, const nmk_variant *variant, const int32_t *lists, char *text,
                   size_t size);

#endif
