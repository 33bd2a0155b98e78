/* Regular expressions, as JSON schemas' `pattern` and requests' `regex` have them, read into expressions.
 *
 * What ECMA 262 and Python's re have in common: literals, escapes, classes, groups, alternatives, counted repeats, and
 * ^ and $ at the ends.  Where the two differ, only what both take is meant: \d and \w are ASCII, and so are their
 * opposites.  Lazy repeats are repeats.  Lookaround, references back, \b and \p have no place in an automaton of this
 * kind and are refused by name. */
#ifndef NMK_REGEX_H
#define NMK_REGEX_H

#include "grammar.h"
#include "utf8.h"

enum { NMK_REGEX_BYTES = 16384 };

/* anywhere: a text counts if some part of it matches, as in JSON schemas; else the whole text has to.  NULL: the
 * message says what is wrong and where. */
nmk_expr *nmk_regex_parse(const char *text, size_t bytes, bool anywhere, nmk_err *e);

#endif
