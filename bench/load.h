/* Sends requests at their times and writes down what came back when: one thread, one poll loop. */
#ifndef NMK_BENCH_LOAD_H
#define NMK_BENCH_LOAD_H

#include "sse.h"

typedef struct {
    char *body;
    double at_s; /* when it is to be sent, from the beginning */
    int asked;   /* tokens of prompt that it is meant to have */
    /* results */
    bool done;
    char why[400];                            /* it failed; "": it did not */
    uint64_t sent_ns, first_ns, last_ns;      /* of its first and last text; 0: none came */
    int chunks, prompt_tokens, output_tokens; /* tokens as the server counts them; -1: it does not say */
} nmk_load_request;

typedef struct {
    const nmk_sse_target *target;
    const char *path;
    int most_open; /* requests at a time */
    int timeout_s; /* of a request */
    bool progress; /* on stderr */
    int count;
    nmk_load_request *request;
    /* results */
    double *gap_ms; /* between chunks of all answers */
    size_t gap_count, gap_capacity;
    int peak;       /* most open at a time */
    double seconds; /* from the first request to the last end */
} nmk_load;

void nmk_load_run(nmk_load *load);

/* One request before all others: what fails it, such as a wrong key, would fail them. */
int nmk_load_try(const nmk_load *load, nmk_load_request *request, nmk_err *e);

#endif
