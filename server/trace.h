/* --trace: a file of what the server did when, in the trace-event format that Perfetto and Chrome read.
 *
 * Requests are there once they have ended, with their phases; steps one by one.  No prompt, answer or key is.  The file
 * is whole at any time: what is added goes before its last line.  When it has grown to its limit it becomes FILE.1, in
 * place of an older one, and a new one begins.  A thread of its own writes, so a slow disk holds up nobody; what it
 * cannot keep up with is lost, and counted in the file. */
#ifndef NMK_SERVER_TRACE_H
#define NMK_SERVER_TRACE_H

#include <stdint.h>

#include "batch.h"
#include "util.h"

typedef struct nmk_trace nmk_trace;

/* A file that is there becomes FILE.1.  name: of the process that the trace shows. */
int nmk_trace_open(nmk_trace **trace, const char *path, uint64_t most_bytes, const char *name, nmk_err *e);
void nmk_trace_close(nmk_trace *trace); /* writes what is left, after the jobs; NULL is fine */

/* One answer.  A time of 0: it did not come so far. */
typedef struct {
    uint64_t id;
    int index; /* of the answer, among the request's */
    const char *endpoint, *end;
    int prompt_tokens, cached_tokens, tokens;
    uint64_t arrived_ns, queued_ns, started_ns, first_ns, last_ns, ended_ns;
} nmk_trace_request;

/* From any thread; nothing for a trace that is NULL. */
void nmk_trace_add_request(nmk_trace *trace, const nmk_trace_request *r);
void nmk_trace_add_step(nmk_trace *trace, const nmk_batch_step *s);

/* Runs job(arg) on the trace's thread, in order. */
void nmk_trace_run(nmk_trace *trace, void (*job)(void *arg), void *arg);

/* Returns when all that was added is in the file, and the jobs have run. */
void nmk_trace_flush(nmk_trace *trace);

/* FILE.tasks.json gets the text, whole or not at all. */
int nmk_trace_write_tasks(const nmk_trace *trace, const nmk_buf *text, nmk_err *e);
const char *nmk_trace_tasks_path(const nmk_trace *trace);

#endif
