/* What a text may be, as an automaton with a stack: the one form that JSON schemas, regular expressions, grammars and
 * lists of choices are brought into, and that mask.h follows token by token.
 *
 * A grammar is a set of rules.  A rule is a start, an end, and states between them; an edge takes a byte of a range or
 * one special token, or jumps, or calls a rule and goes on when that has ended.  A text is in the grammar if a walk
 * from the root's start to its end takes all of it.
 *
 * Building never fails: what grows beyond the limits is dropped and nmk_grammar_finish says so.  After that nothing
 * changes, and threads may share it. */
#ifndef NMK_GRAMMAR_H
#define NMK_GRAMMAR_H

#include <stdbool.h>
#include <stdint.h>

#include "util.h"

enum {
    NMK_GRAMMAR_STATES = 300000,
    NMK_GRAMMAR_EDGES = 2000000,
    NMK_GRAMMAR_DEPTH = 100,    /* calls within calls */
    NMK_GRAMMAR_REPEATS = 50000 /* of one thing, where they are counted */
};

typedef enum { NMK_EDGE_BYTES, NMK_EDGE_TOKEN, NMK_EDGE_JUMP, NMK_EDGE_CALL } nmk_edge_kind;

typedef struct {
    uint8_t kind, low, high; /* of bytes */
    int32_t what;            /* token or rule */
    int32_t to, next;        /* next: of the same state; -1: none */
} nmk_edge;

typedef struct {
    nmk_edge *edge;
    int edges, edge_room;
    int32_t *first; /* edge of each state; -1: none */
    int states, state_room;
    int32_t *start, *end; /* of each rule */
    int rules, rule_room;
    bool full; /* a limit was met */
    /* after nmk_grammar_finish */
    int root;
    int32_t *rule_of_end; /* of each state: the rule that ends there, or -1 */
    int32_t *need;        /* of each state: calls within calls on the way to the end of its rule; -1: it has none */
    bool *tail;           /* of each state: there is nothing to do but end the rule */
} nmk_grammar;

nmk_grammar *nmk_grammar_new(void);
void nmk_grammar_free(nmk_grammar *g); /* NULL is fine */

int nmk_grammar_rule(nmk_grammar *g); /* a new one, with its start and end */
int nmk_grammar_state(nmk_grammar *g);
void nmk_grammar_bytes(nmk_grammar *g, int from, int low, int high, int to);
void nmk_grammar_token(nmk_grammar *g, int from, int32_t token, int to);
void nmk_grammar_jump(nmk_grammar *g, int from, int to);
void nmk_grammar_call(nmk_grammar *g, int from, int rule, int to);

/* The state behind a literal; literals from one state share what they begin with.  Nothing else may take a single byte
 * from there. */
int nmk_grammar_literal(nmk_grammar *g, int from, const char *text, size_t bytes);

/* The root is the rule whose texts count.  -1: too large, a rule that calls itself before anything else, or no text at
 * all is in the grammar. */
int nmk_grammar_finish(nmk_grammar *g, int root, nmk_err *e);

/* ---- expressions: what regular expressions and rules of grammars are read into ---- */

/* Code points, as ranges in ascending order. */
typedef struct {
    uint32_t (*range)[2];
    int count, room;
} nmk_set;

void nmk_set_add(nmk_set *s, uint32_t low, uint32_t high); /* any order, until it is used */
void nmk_set_add_all(nmk_set *s, const nmk_set *other);
void nmk_set_normalize(nmk_set *s);
void nmk_set_invert(nmk_set *s);                            /* within all code points */
void nmk_set_keep(nmk_set *s, uint32_t low, uint32_t high); /* what is outside goes */
void nmk_set_free(nmk_set *s);

typedef enum { NMK_EXPR_SET, NMK_EXPR_SEQUENCE, NMK_EXPR_EITHER, NMK_EXPR_REPEAT, NMK_EXPR_RULE } nmk_expr_kind;

typedef struct nmk_expr nmk_expr;
struct nmk_expr {
    nmk_expr_kind kind;
    nmk_set set;
    nmk_expr **part; /* of a sequence, alternatives; part[0] is repeated */
    int parts, room;
    int low, high; /* repeats; high -1: any number */
    int rule;
};

nmk_expr *nmk_expr_new(nmk_expr_kind kind);
void nmk_expr_add(nmk_expr *x, nmk_expr *part);               /* takes the part */
void nmk_expr_free(nmk_expr *x);                              /* NULL is fine */
nmk_expr *nmk_expr_repeat(nmk_expr *part, int low, int high); /* takes the part */

/* How often what stands before text[*at] may come, where *, +, ?, {2}, {2,}, {2,5} or {,5} says so: *at goes behind it,
 * and one beyond NMK_GRAMMAR_REPEATS is as good as any other.  blanks: there may be some in the braces. */
typedef struct {
    int64_t low, high; /* -1: is not given; any number */
} nmk_repeat;
bool nmk_expr_read_repeat(const char *text, size_t bytes, size_t *at, bool blanks,
                          nmk_repeat *x); /* false: it does not */

/* Characters of a text that the expression describes: the fewest, the most (-1: any number).  Without rules in it. */
void nmk_expr_length(const nmk_expr *x, int64_t *fewest, int64_t *most);

/* From `from` to `to` by texts of the expression.  in_string: as they stand between the quotes of a JSON string, with
 * the escapes that are needed and no others. */
void nmk_grammar_expr(nmk_grammar *g, int from, const nmk_expr *x, bool in_string, int to);

/* One character of the set. */
void nmk_grammar_set(nmk_grammar *g, int from, const nmk_set *s, bool in_string, int to);

#endif
