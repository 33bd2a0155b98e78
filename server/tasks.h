/* The tasks of every SM in a few steps, with the times at which the kernel stamped them: begun, done waiting, stored,
 * helped.  The kernel stamps steps whose parameters name a place for it, so no other step pays for it.
 *
 * What the batch's thread does is short, apart from one copy when the last step has ended; making text of it is for
 * another thread.  The engine has to be there until then. */
#ifndef NMK_SERVER_TASKS_H
#define NMK_SERVER_TASKS_H

#include <stdbool.h>

#include "nmk.h"
#include "util.h"

enum { NMK_TASKS_STEPS = 8 }; /* most at a time: a step of a large model is several megabytes of text */

typedef struct nmk_tasks nmk_tasks;

/* Memory on the machine for up to `steps` steps. */
int nmk_tasks_open(nmk_tasks **tasks, nmk_engine *engine, int steps, nmk_err *e);
void nmk_tasks_free(nmk_tasks *tasks); /* NULL is fine */

/* Around nmk_engine_queue_step: before it, and after it if it succeeded. */
void nmk_tasks_queue(nmk_tasks *tasks);
void nmk_tasks_queued(nmk_tasks *tasks, uint64_t number);
/* A step was waited for.  Any step; those that are not traced do not count. */
void nmk_tasks_ended(nmk_tasks *tasks, uint64_t number);

/* All of them have ended; or all that were queued, and at least one. */
bool nmk_tasks_full(const nmk_tasks *tasks);
bool nmk_tasks_some(const nmk_tasks *tasks);

/* Copies what the machine wrote, and gives its memory back. */
int nmk_tasks_read(nmk_tasks *tasks, nmk_err *e);

/* As trace events.  After nmk_tasks_read. */
void nmk_tasks_text(const nmk_tasks *tasks, nmk_buf *text);

#endif
