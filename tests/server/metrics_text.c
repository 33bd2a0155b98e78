/* /metrics, read as Prometheus reads it: every sample has its type before it, histograms add up. */
#include "metrics.h"

#include "server/helper.h"

enum { MOST = 400 };

typedef struct {
    char name[96], labels[160];
    double value;
} sample;

static sample samples[MOST];
static char types[MOST][2][96]; /* name, kind */
static int sample_count, type_count;

static const char *kind_of(const char *name) {
    for (int i = 0; i < type_count; i++)
        if (!strcmp(types[i][0], name)) return types[i][1];
    return "";
}

/* Whether the text is what a scraper takes. */
static bool read_text(char *text) {
    bool good = true;
    sample_count = type_count = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        sample *s = &samples[sample_count];
        int end = 0;
        if (!strncmp(line, "# HELP ", 7)) continue;
        if (sscanf(line, "# TYPE %95s %95s", types[type_count][0], types[type_count][1]) == 2) {
            good &= !*kind_of("") && type_count + 1 < MOST;
            for (int i = 0; i < type_count; i++) good &= strcmp(types[i][0], types[type_count][0]) != 0;
            type_count++;
            continue;
        }
        if (sscanf(line, "%95[a-zA-Z0-9_:]{%159[^}]} %lf%n", s->name, s->labels, &s->value, &end) != 3 || line[end]) {
            printf("# %s\n", line);
            return false;
        }
        char base[96];
        snprintf(base, sizeof base, "%s", s->name);
        if (!*kind_of(base)) *strrchr(base, '_') = 0; /* of a histogram: _bucket, _sum, _count */
        good &= *kind_of(base) && !strncmp(s->labels, "engine=\"0\",model_name=\"a\\\"b", 24) && s->value >= 0;
        if (!strcmp(kind_of(base), "counter")) good &= strstr(base, "_total") != NULL;
        if (++sample_count == MOST) return false;
    }
    return good;
}

static double value_of(const char *name, const char *label) {
    for (int i = 0; i < sample_count; i++)
        if (!strcmp(samples[i].name, name) && strstr(samples[i].labels, label)) return samples[i].value;
    return -1;
}

/* Buckets do not fall, and the last one is the count. */
static bool adds_up(const char *name) {
    char part[112];
    double before = 0, last = -1;
    snprintf(part, sizeof part, "%s_bucket", name);
    for (int i = 0; i < sample_count; i++) {
        if (strcmp(samples[i].name, part)) continue;
        if (samples[i].value < before) return false;
        before = last = samples[i].value;
    }
    snprintf(part, sizeof part, "%s_count", name);
    return last >= 0 && last == value_of(part, "");
}

int main(void) {
    nmk_metrics m = {0};
    nmk_batch_stats s = {.running = 3,
                         .waiting = 2,
                         .prompt_tokens = 100,
                         .tokens = 50,
                         .cache_queries = 90,
                         .cache_hits = 64,
                         .preemptions = 5,
                         .chunks = 11,
                         .chunk_tokens = 4000,
                         .chunk_ms = 1500,
                         .chunk_beside_ms = 500,
                         .step_beside_ms = 2000,
                         .kv_used = 0.25};
    nmk_buf text = {0};
    m.ended[NMK_END_LENGTH] = 7;
    nmk_histogram *const times[] = {&m.first_token, &m.whole, &m.queue, &m.prefill, &m.decode, &m.inference};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++)
        for (int k = 0; k < 30; k++) nmk_metric_add(times[i], NMK_METRIC_LATENCY, 0.1 * (1 << k % 20));
    nmk_metric_add(&m.between_tokens, NMK_METRIC_TOKEN_TIME, 0.002);
    nmk_metric_add(&m.between_tokens, NMK_METRIC_TOKEN_TIME, 100);
    nmk_metric_add(&m.prompt_tokens, NMK_METRIC_TOKENS, 1);
    nmk_metrics_write(&m, &s, 4, "a\"b", &text);
    check(read_text(text.data), "every line is a sample of a known type", "one is not");

    static const struct {
        const char *name;
        double value;
    } wanted[] = {
        {"vllm:num_requests_running", 3},         {"vllm:num_requests_waiting", 6}, /* here and there */
        {"vllm:prompt_tokens_total", 100},        {"vllm:generation_tokens_total", 50},
        {"vllm:kv_cache_usage_perc", 0.25},       {"vllm:gpu_cache_usage_perc", 0.25},
        {"vllm:prefix_cache_queries_total", 90},  {"vllm:prefix_cache_hits_total", 64},
        {"vllm:num_preemptions_total", 5},        {"nmk:engine_lost", 0},
        {"nmk:prefill_chunks_total", 11},         {"nmk:prefill_chunk_tokens_total", 4000},
        {"nmk:prefill_chunk_seconds_total", 1.5},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        check(value_of(wanted[i].name, "") == wanted[i].value, wanted[i].name, "%g", value_of(wanted[i].name, ""));
    check(value_of("nmk:shared_seconds_total", "launch=\"chunk\"") == 0.5 &&
              value_of("nmk:shared_seconds_total", "launch=\"step\"") == 2,
          "time that prompts and answers share", "other numbers");
    check(value_of("vllm:request_success_total", "finished_reason=\"length\"") == 7, "ends by reason",
          "another number");
    static const char *const histograms[] = {
        "vllm:time_to_first_token_seconds",       "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",     "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",       "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",      "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",    "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",         "vllm:request_params_max_tokens",
        "vllm:request_max_num_generation_tokens", "vllm:request_params_n",
    };
    for (size_t i = 0; i < sizeof histograms / sizeof *histograms; i++)
        check(!strcmp(kind_of(histograms[i]), "histogram") && adds_up(histograms[i]), histograms[i],
              "it does not add up");
    check(value_of("vllm:time_to_first_token_seconds_count", "") == 30 &&
              value_of("vllm:inter_token_latency_seconds_bucket", "le=\"0.0025\"") == 1 &&
              value_of("vllm:inter_token_latency_seconds_bucket", "le=\"10\"") == 1 &&
              value_of("vllm:inter_token_latency_seconds_bucket", "le=\"+Inf\"") == 2 &&
              value_of("vllm:request_prompt_tokens_bucket", "le=\"1\"") == 1,
          "what falls into which bucket", "it fell elsewhere");
    nmk_buf_free(&text);
    return failures != 0;
}
