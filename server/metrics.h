/* Counters and histograms as Prometheus reads them, under the names that dashboards made for vLLM look for.  Only what
 * is known here is written: no name with a made-up value.  For one thread. */
#ifndef NMK_SERVER_METRICS_H
#define NMK_SERVER_METRICS_H

#include "batch.h"
#include "util.h"

enum { NMK_METRIC_BUCKETS = 24 };

typedef struct {
    uint64_t count[NMK_METRIC_BUCKETS + 1]; /* the last: above all bounds */
    double sum;
} nmk_histogram;

typedef enum { NMK_END_STOP, NMK_END_LENGTH, NMK_END_ABORT, NMK_END_ERROR, NMK_END_KINDS } nmk_end_kind;

typedef struct {
    nmk_histogram first_token, between_tokens, token_mean, whole, queue, prefill, decode, inference; /* seconds */
    nmk_histogram prompt_tokens, tokens, max_tokens, most_tokens, n; /* most: what max_tokens comes down to */
    uint64_t ended[NMK_END_KINDS];
} nmk_metrics;

typedef enum { NMK_METRIC_LATENCY, NMK_METRIC_TOKEN_TIME, NMK_METRIC_TOKENS, NMK_METRIC_N } nmk_metric_scale;

void nmk_metric_add(nmk_histogram *h, nmk_metric_scale scale, double value);

/* waiting: requests that the batch has not been given yet. */
void nmk_metrics_write(const nmk_metrics *m, const nmk_batch_stats *batch, int waiting, const char *model,
                       nmk_buf *out);

#endif
