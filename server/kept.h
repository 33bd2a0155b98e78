/* Responses that were asked to be kept: in memory, up to a number of bytes, the longest unused go first.  They end with
 * the process.
 *
 * A response knows the one that it followed, so a conversation is kept once, and using its end keeps all of it.  What
 * one key was given no other key finds.  Everything is kept as text: trees belong to one thread each.
 *
 * From any thread. */
#ifndef NMK_KEPT_H
#define NMK_KEPT_H

#include <stdbool.h>

#include "json.h"

typedef struct nmk_kept nmk_kept;

nmk_kept *nmk_kept_new(size_t most_bytes);
void nmk_kept_free(nmk_kept *k); /* NULL is fine */

/* input: its own items, a JSON list; body: the response, with its output.  previous may be NULL.  One that is larger
 * than all that may be kept is not. */
void nmk_kept_add(nmk_kept *k, int key, const char *id, const char *previous, const nmk_buf *input,
                  const nmk_buf *body);

/* Adds to `list` the items of the response and of all that it follows, in their order.  -1: one of them is not there.
 */
int nmk_kept_items(nmk_kept *k, int key, const char *id, struct json_object *list);

/* An item of a response's output, the caller's; NULL: there is none. */
struct json_object *nmk_kept_item(nmk_kept *k, int key, const char *id);

/* The response's body; false: it is not there. */
bool nmk_kept_body(nmk_kept *k, int key, const char *id, nmk_buf *body);
bool nmk_kept_remove(nmk_kept *k, int key, const char *id);

#endif
