/* Strict JSON (RFC 8259) from files that nobody here wrote.
 *
 * json-c builds the tree and gives the accessors; a scan before it refuses what json-c lets pass even in strict mode:
 * a key given twice (json-c keeps the last), control characters and broken UTF-8 in strings, half surrogate pairs, NUL
 * in a key (json-c cuts the key there), integers beyond 64 bits (json-c clamps them), numbers that overflow to
 * infinity, anything after the value.  So a tree that comes from here says exactly what the text says. */
#ifndef NMK_JSON_H
#define NMK_JSON_H

#include <json-c/json_object.h>
#include <json-c/linkhash.h> /* json_object_object_foreach */
#include <stddef.h>

#include "util.h"

#define NMK_JSON_DEPTH 64

/* The tree (release with json_object_put), or NULL with "line L, column C: what is wrong".  The value `null` is refused
 * as a whole text, since json-c has no object for it.  Needs text[bytes] == 0. */
struct json_object *nmk_json_parse(const char *text, size_t bytes, nmk_err *e);

/* The same for a file; messages begin with its path. */
struct json_object *nmk_json_read(const char *path, size_t max_bytes, nmk_err *e);

/* Member `key` of an object, NULL if obj is none, lacks it or has null there. */
struct json_object *nmk_json_get(struct json_object *obj, const char *key);

#endif
