/* Grammars in GBNF, the notation of llama.cpp:
 *
 *     root   ::= "yes" | "no" tail{0,3}      # a comment
 *     tail   ::= [^"\n] | (", " root)+
 *
 * Literals and classes know \n, \t, \r, \\, \", \], \xHH and \uHHHH; `.` is any character. */
#ifndef NMK_GBNF_H
#define NMK_GBNF_H

#include "grammar.h"

enum { NMK_GBNF_BYTES = 1 << 20 };

/* Adds the grammar's rules to g and sets *root.  -1 with the line at fault. */
int nmk_gbnf_read(nmk_grammar *g, const char *text, size_t bytes, int *root, nmk_err *e);

#endif
