/* JSON schemas as grammars: documents that the schema allows, in its order of properties, with little whitespace.
 *
 * All documents of the grammar satisfy the schema; the grammar need not have all that do.  Where the schema leaves
 * something open, it has what is usually meant:
 *   - a schema that names properties and says nothing of others allows no others; one that names none allows any
 *   - a schema without a type has the types that its keywords are of
 *   - properties come in the schema's order, those that it does not name last; no name comes twice by another spelling
 *   - numbers have at most 15 digits, and an exponent only where there are no bounds
 *
 * A keyword that cannot be obeyed is refused by name and place, never ignored; so is one that nobody knows, unless it
 * begins with "x-". */
#ifndef NMK_SCHEMA_H
#define NMK_SCHEMA_H

#include "grammar.h"
#include "json.h"

/* Adds what the schema (an object or a boolean) allows and sets *rule to it; NULL: any JSON object.  -1: the message
 * begins with the place. */
int nmk_schema_read(nmk_grammar *g, struct json_object *schema, int *rule, nmk_err *e);

#endif
