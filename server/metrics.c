#include "metrics.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    int count;
    double bound[NMK_METRIC_BUCKETS];
} scale;

/* vLLM's, so that its dashboards' quantiles mean the same. */
static const scale scales[] = {
    [NMK_METRIC_LATENCY] = {21, {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                 30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680}},
    [NMK_METRIC_TOKEN_TIME] = {18,
                               {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1,
                                2.5, 5, 10}},
    [NMK_METRIC_TOKENS] = {17,
                           {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000}},
    [NMK_METRIC_N] = {5, {1, 2, 5, 10, 20}},
};

void nmk_metric_add(nmk_histogram *h, nmk_metric_scale kind, double value) {
    const scale *s = &scales[kind];
    int i = 0;
    while (i < s->count && value > s->bound[i]) i++;
    h->count[i < s->count ? i : NMK_METRIC_BUCKETS]++;
    h->sum += value;
}

/* A label's value: backslash, quote and newline are escaped. */
static void label(const char *text, nmk_buf *out) {
    for (; *text; text++) {
        if (*text == '\\' || *text == '"') nmk_buf_puts(out, "\\");
        nmk_buf_add(out, *text == '\n' ? " " : text, 1);
    }
}

static void begin(const char *name, const char *kind, const char *help, nmk_buf *out) {
    nmk_buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind);
}

/* NAME{engine="0",model_name="...",EXTRA} VALUE */
static void sample(const char *name, const char *model, const char *extra, double value, nmk_buf *out) {
    nmk_buf_printf(out, "%s{engine=\"0\",model_name=\"", name);
    label(model, out);
    nmk_buf_printf(out, "\"%s} %.17g\n", extra, value);
}

static void single(const char *name, const char *kind, const char *help, const char *model, double value,
                   nmk_buf *out) {
    begin(name, kind, help, out);
    sample(name, model, "", value, out);
}

static void histogram(const char *name, const char *help, const nmk_histogram *h, nmk_metric_scale kind,
                      const char *model, nmk_buf *out) {
    const scale *s = &scales[kind];
    char part[96], extra[48];
    uint64_t total = 0;
    begin(name, "histogram", help, out);
    snprintf(part, sizeof part, "%s_bucket", name);
    for (int i = 0; i < s->count; i++) {
        total += h->count[i];
        snprintf(extra, sizeof extra, ",le=\"%g\"", s->bound[i]);
        sample(part, model, extra, (double)total, out);
    }
    total += h->count[NMK_METRIC_BUCKETS];
    sample(part, model, ",le=\"+Inf\"", (double)total, out);
    snprintf(part, sizeof part, "%s_count", name);
    sample(part, model, "", (double)total, out);
    snprintf(part, sizeof part, "%s_sum", name);
    sample(part, model, "", h->sum, out);
}

void nmk_metrics_write(const nmk_metrics *m, const nmk_batch_stats *batch, int waiting, const char *model,
                       nmk_buf *out) {
    static const char *const reasons[NMK_END_KINDS] = {"stop", "length", "abort", "error"};
    single("vllm:num_requests_running", "gauge", "Sequences that are being generated.", model, batch->running, out);
    single("vllm:num_requests_waiting", "gauge", "Sequences that wait for a row.", model, batch->waiting + waiting,
           out);
    /* The first name is of today, the second that of older dashboards. */
    single("vllm:kv_cache_usage_perc", "gauge", "Part of the pages that running sequences hold, 0 to 1.", model,
           batch->kv_used, out);
    single("vllm:gpu_cache_usage_perc", "gauge", "The same.", model, batch->kv_used, out);
    single("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked for in the cache.", model,
           (double)batch->cache_queries, out);
    single("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.", model,
           (double)batch->cache_hits, out);
    single("vllm:num_preemptions_total", "counter", "Sequences that gave their row away and went on later.", model,
           (double)batch->preemptions, out);
    single("vllm:prompt_tokens_total", "counter", "Prompt tokens processed.", model, (double)batch->prompt_tokens, out);
    single("vllm:generation_tokens_total", "counter", "Tokens generated.", model, (double)batch->tokens, out);
    begin("vllm:request_success_total", "counter", "Sequences that ended, by reason.", out);
    for (int i = 0; i < NMK_END_KINDS; i++) {
        char extra[48];
        snprintf(extra, sizeof extra, ",finished_reason=\"%s\"", reasons[i]);
        sample("vllm:request_success_total", model, extra, (double)m->ended[i], out);
    }
    histogram("vllm:time_to_first_token_seconds", "From the request's first byte to its first token.", &m->first_token,
              NMK_METRIC_LATENCY, model, out);
    histogram("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", &m->between_tokens,
              NMK_METRIC_TOKEN_TIME, model, out);
    histogram("vllm:time_per_output_token_seconds", "The same, by its older name.", &m->between_tokens,
              NMK_METRIC_TOKEN_TIME, model, out);
    histogram("vllm:e2e_request_latency_seconds", "From the request's first byte to its last token.", &m->whole,
              NMK_METRIC_LATENCY, model, out);
    histogram("vllm:request_time_per_output_token_seconds", "Mean time of an answer's tokens after the first.",
              &m->token_mean, NMK_METRIC_TOKEN_TIME, model, out);
    histogram("vllm:request_queue_time_seconds", "Waiting for a row.", &m->queue, NMK_METRIC_LATENCY, model, out);
    histogram("vllm:request_prefill_time_seconds", "From getting a row to the first token.", &m->prefill,
              NMK_METRIC_LATENCY, model, out);
    histogram("vllm:request_decode_time_seconds", "From the first token to the last.", &m->decode, NMK_METRIC_LATENCY,
              model, out);
    histogram("vllm:request_inference_time_seconds", "From getting a row to the last token.", &m->inference,
              NMK_METRIC_LATENCY, model, out);
    histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", &m->prompt_tokens, NMK_METRIC_TOKENS, model, out);
    histogram("vllm:request_generation_tokens", "Tokens of an answer.", &m->tokens, NMK_METRIC_TOKENS, model, out);
    histogram("vllm:request_params_max_tokens", "max_tokens as asked for, or what fits.", &m->max_tokens,
              NMK_METRIC_TOKENS, model, out);
    histogram("vllm:request_max_num_generation_tokens", "Tokens that an answer may have.", &m->most_tokens,
              NMK_METRIC_TOKENS, model, out);
    histogram("vllm:request_params_n", "Answers asked for.", &m->n, NMK_METRIC_N, model, out);
    single("nmk:steps_total", "counter", "Steps of the megakernel.", model, (double)batch->steps, out);
    single("nmk:prefill_chunks_total", "counter", "Launches that took chunks of prompts.", model, (double)batch->chunks,
           out);
    single("nmk:prefill_chunk_tokens_total", "counter", "Tokens of prompts that they took.", model,
           (double)batch->chunk_tokens, out);
    single("nmk:prefill_chunk_seconds_total", "counter", "Time that they took, by the machine's clock.", model,
           1e-3 * batch->chunk_ms, out);
    begin("nmk:shared_seconds_total", "counter", "Time while some decode and others' prompts are fed, by launch.", out);
    sample("nmk:shared_seconds_total", model, ",launch=\"chunk\"", 1e-3 * batch->chunk_beside_ms, out);
    sample("nmk:shared_seconds_total", model, ",launch=\"step\"", 1e-3 * batch->step_beside_ms, out);
    single("nmk:requests_failed_total", "counter", "Sequences that the engine failed.", model, (double)batch->failed,
           out);
    single("nmk:engine_lost", "gauge", "1 when the engine cannot go on.", model, batch->lost, out);
}
