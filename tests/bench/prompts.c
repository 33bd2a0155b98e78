/* What prompts cost, as clients of nmk-serve see it: alone, beside sequences that decode, and in a mixed trace.
 *
 * bench-prompts [--checkpoint DIR | --random-weights SEED] [--first 1024,8192,32768] [--beside 8192] [--rows 4]
 *               [--trace RATE] [--requests 60] [--prompts 200-8000] [--answers 50-1000] [--seed 1]
 *               [--device cuda:0] [--server build/MODEL/nmk-serve] [--server-flags "..."]
 *
 * first: a prompt of each length, alone, a few times; the time from its request to its first token, of which reading
 * the prompt's JSON is a part.  beside: `rows` sequences decode, and a prompt comes; their rate before, and until its
 * first token; the longest time between two tokens.  trace: requests at random (Poisson) times, prompts and answers
 * drawn evenly from their ranges, the same for the same seed.  Each may be left out by 0.  No two prompts begin alike.
 *
 * To compare two ways to serve, run it twice: --server-flags "--prefill-budget-ms 45". */
#define _GNU_SOURCE /* memmem */
#include "server/serve_helper.h"

#include <math.h>

#include "flags.h"
#include "load.h"
#include "values.h"

enum { MOST_CASES = 16, MOST_ROWS = 64, MOST_FLAGS = 16, MOST_REQUESTS = 100000, START_SECONDS = 600 };
enum { REPEATS = 3, ANSWER = 8, ONCE_TOKENS = 100000 /* longer prompts are not repeated */ };
enum { BEFORE_MS = 1500, AFTER_MS = 500, PROMPT_OF_ROW = 512, MOST_TOKENS = 3500 };

typedef struct {
    const char *checkpoint, *seed, *device, *server;
    char *server_flags;
    int first[MOST_CASES], firsts, beside, rows, requests, low[2], high[2]; /* of prompts, of answers */
    double rate;
    int64_t draw_seed;
} settings;

/* ---------------------------------------------------------------- requests */

static uint64_t draws;

static uint64_t draw(void) {
    uint64_t z = draws += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int draw_from(int low, int high) { return low + (int)(draw() % (uint64_t)(high - low + 1)); }

static char *body_of(int prompt, int answer) {
    enum { VOCAB = 4000 };
    nmk_buf b = {0};
    nmk_buf_printf(&b,
                   "{\"stream\":true,\"stream_options\":{\"include_usage\":true},\"ignore_eos\":true,\"temperature\":0,"
                   "\"max_tokens\":%d,\"prompt\":[",
                   answer);
    for (int i = 0; i < prompt; i++) nmk_buf_printf(&b, "%s%d", i ? "," : "", 100 + (int)(draw() % (VOCAB - 100)));
    nmk_buf_puts(&b, "]}");
    return b.data;
}

static int failed(const char *what, const char *why) {
    fprintf(stderr, "bench-prompts: %s: %s\n", what, why);
    return -1;
}

/* What the server counted since the call before. */
typedef struct {
    double chunks, tokens, seconds, chunk_s, step_s;
} counts;

static double shared_in(const reply *r, const char *launch) {
    char *wanted = xasprintf("launch=\"%s\"} ", launch);
    const char *at = strstr(r->body, "\nnmk:shared_seconds_total{");
    if (at) at = strstr(at, wanted);
    const double v = at ? atof(at + strlen(wanted)) : 0;
    free(wanted);
    return v;
}

static counts counts_of(int port) {
    reply r = get(port, "/metrics");
    counts c = {.chunks = metric_in(&r, "nmk:prefill_chunks_total"),
                .tokens = metric_in(&r, "nmk:prefill_chunk_tokens_total"),
                .seconds = metric_in(&r, "nmk:prefill_chunk_seconds_total"),
                .chunk_s = shared_in(&r, "chunk"),
                .step_s = shared_in(&r, "step")};
    reply_free(&r);
    return c;
}

static void print_counts(int port, const counts *before) {
    const counts now = counts_of(port);
    const double chunks = now.chunks - before->chunks,
                 shared = now.step_s - before->step_s + now.chunk_s - before->chunk_s;
    printf("\n%.0f chunks", chunks);
    if (chunks > 0)
        printf(" of %.0f tokens and %.1f ms", (now.tokens - before->tokens) / chunks,
               1e3 * (now.seconds - before->seconds) / chunks);
    if (shared > 0)
        printf("; %.2f s of decoding beside prompts, in which steps had %.1f %% of the time", shared,
               100 * (now.step_s - before->step_s) / shared);
    printf("\n");
}

/* ---------------------------------------------------------------- alone */

static int run_first(const nmk_sse_target *t, const settings *o) {
    nmk_err e;
    printf("\n| prompt | s to the first token | tokens/s |\n|--|--|--|\n");
    for (int i = 0; i < o->firsts; i++) {
        const int repeats = o->first[i] < ONCE_TOKENS ? REPEATS : 1;
        double s[REPEATS];
        for (int k = 0; k < repeats; k++) {
            nmk_load one = {.target = t, .path = "/v1/completions", .timeout_s = 600};
            nmk_load_request r = {.body = body_of(o->first[i], ANSWER)};
            const int rc = nmk_load_try(&one, &r, &e);
            free(r.body);
            if (rc) return failed("a prompt alone", e.text);
            if (r.output_tokens != ANSWER) return failed("a prompt alone", "its answer is too short");
            s[k] = 1e-9 * (double)(r.first_ns - r.sent_ns);
        }
        qsort(s, (size_t)repeats, sizeof *s, by_value);
        printf("| %d | %.4f (%.4f-%.4f) | %.0f |\n", o->first[i], s[repeats / 2], s[0], s[repeats - 1],
               o->first[i] / s[repeats / 2]);
        fflush(stdout);
    }
    return 0;
}

/* ---------------------------------------------------------------- beside others */

typedef struct {
    nmk_sse sse;
    int tokens;
    uint64_t *at;
} row;

static int on_event(void *user, const char *data, size_t bytes, uint64_t now) {
    row *r = user;
    if (memmem(data, bytes, "\"text\":\"", 8) && !memmem(data, bytes, "\"text\":\"\"", 9) && r->tokens < MOST_TOKENS)
        r->at[r->tokens++] = now;
    return 0;
}

static int open_row(const nmk_sse_target *t, row *r, int prompt, int answer) {
    nmk_err e;
    char *body = body_of(prompt, answer);
    r->at = xcalloc(MOST_TOKENS, sizeof *r->at);
    const int rc = nmk_sse_open(&r->sse, t, "/v1/completions", body, on_event, r, &e);
    free(body);
    return rc ? failed("a sequence", e.text) : 0;
}

/* Reads for that long, or until r has a token. */
static int read_rows(row *all, int count, int ms, const row *r) {
    const uint64_t end = nmk_now_ns() + (uint64_t)ms * 1000000;
    while (nmk_now_ns() < end && !(r && r->tokens)) {
        struct pollfd p[MOST_ROWS + 1];
        nmk_err e = {"it ended"};
        for (int i = 0; i < count; i++) p[i] = (struct pollfd){all[i].sse.fd, nmk_sse_wants(&all[i].sse), 0};
        poll(p, (nfds_t)count, 10);
        for (int i = 0; i < count; i++)
            if (p[i].revents && nmk_sse_step(&all[i].sse, &e)) return failed("a sequence", e.text);
    }
    return r && !r->tokens ? failed("a prompt beside others", "no token came") : 0;
}

/* Tokens a second of a row, and the longest time between two of them, from one time to another. */
static double rate_of(const row *all, int count, uint64_t from, uint64_t to, double *longest_ms) {
    int tokens = 0;
    *longest_ms = 0;
    for (int i = 0; i < count; i++)
        for (int k = 1; k < all[i].tokens; k++) {
            const double ms = 1e-6 * (double)(all[i].at[k] - all[i].at[k - 1]);
            if (all[i].at[k] <= from || all[i].at[k - 1] > to) continue;
            tokens += all[i].at[k] <= to;
            if (ms > *longest_ms) *longest_ms = ms;
        }
    return tokens / (1e-9 * (double)(to - from)) / count;
}

static int run_beside(const nmk_sse_target *t, const settings *o, int port) {
    int rc = 0;
    printf("\n| rows | prompt | tokens/s of a row before | until its first token | of it | longest gap before, ms | "
           "until then | s to its first token |\n|--|--|--|--|--|--|--|--|\n");
    const counts before = counts_of(port);
    for (int k = 0; k < REPEATS && !rc; k++) {
        row r[MOST_ROWS + 1] = {0};
        for (int i = 0; i <= o->rows; i++) r[i].sse.fd = -1;
        for (int i = 0; i < o->rows && !rc; i++) rc = open_row(t, &r[i], PROMPT_OF_ROW, MOST_TOKENS);
        for (int i = 0; i < o->rows && !rc; i++) rc = read_rows(r, o->rows, 60000, &r[i]);
        if (!rc) rc = read_rows(r, o->rows, BEFORE_MS, NULL);
        const uint64_t start = nmk_now_ns();
        if (!rc) rc = open_row(t, &r[o->rows], o->beside, 200);
        if (!rc) rc = read_rows(r, o->rows + 1, 600000, &r[o->rows]);
        if (!rc) rc = read_rows(r, o->rows + 1, AFTER_MS, NULL);
        if (!rc) {
            double gap[2];
            const uint64_t first = r[o->rows].at[0];
            const double free_rate = rate_of(r, o->rows, start - (uint64_t)BEFORE_MS * 1000000, start, &gap[0]);
            const double rate = rate_of(r, o->rows, start, first, &gap[1]);
            printf("| %d | %d | %.1f | %.1f | %.1f %% | %.1f | %.1f | %.3f |\n", o->rows, o->beside, free_rate, rate,
                   100 * rate / free_rate, gap[0], gap[1], 1e-9 * (double)(first - start));
            fflush(stdout);
        }
        for (int i = 0; i <= o->rows; i++) nmk_sse_close(&r[i].sse), free(r[i].at);
        for (int i = 0; i < 500 && metric(port, "vllm:num_requests_running") > 0; i++) usleep(10000);
    }
    if (!rc) print_counts(port, &before);
    return rc;
}

/* ---------------------------------------------------------------- a trace */

static int run_trace(const nmk_sse_target *t, const settings *o, int port) {
    nmk_load l = {.target = t, .path = "/v1/completions", .most_open = o->requests, .timeout_s = 600};
    double at = 0, input = 0, output = 0, *first = xcalloc((size_t)o->requests, sizeof *first);
    int done = 0;
    draws = (uint64_t)o->draw_seed * 0x5851f42d4c957f2du;
    l.count = o->requests, l.request = xcalloc((size_t)l.count, sizeof *l.request);
    for (int i = 0; i < l.count; i++) {
        const int prompt = draw_from(o->low[0], o->high[0]), answer = draw_from(o->low[1], o->high[1]);
        l.request[i] = (nmk_load_request){.body = body_of(prompt, answer), .at_s = at, .asked = prompt};
        at += -log(1 - (double)(draw() >> 11) * 0x1p-53) / o->rate;
    }
    const counts before = counts_of(port);
    nmk_load_run(&l);
    const char *why = NULL;
    for (int i = 0; i < l.count; i++) {
        const nmk_load_request *r = &l.request[i];
        if (r->why[0]) why = r->why;
        if (r->why[0]) continue;
        first[done++] = 1e-6 * (double)(r->first_ns - r->sent_ns);
        input += r->prompt_tokens, output += r->output_tokens;
    }
    if (why) failed("a request of the trace", why);
    qsort(first, (size_t)done, sizeof *first, by_value);
    if (l.gap_count) qsort(l.gap_ms, l.gap_count, sizeof *l.gap_ms, by_value);
    printf(
        "\n| requests/s | answered | most at a time | s | tokens in, out | out/s | in and out/s | ms to first token p50, p99 | "
        "between tokens p50, p99, most |\n|--|--|--|--|--|--|--|--|--|\n");
    printf("| %g | %d of %d | %d | %.1f | %.0f, %.0f | %.1f | %.1f | %.0f, %.0f | %.2f, %.2f, %.1f |\n", o->rate, done,
           l.count, l.peak, l.seconds, input, output, output / l.seconds, (input + output) / l.seconds,
           percentile(first, (size_t)done, 0.5), percentile(first, (size_t)done, 0.99),
           percentile(l.gap_ms, l.gap_count, 0.5), percentile(l.gap_ms, l.gap_count, 0.99),
           percentile(l.gap_ms, l.gap_count, 1));
    print_counts(port, &before);
    for (int i = 0; i < l.count; i++) free(l.request[i].body);
    free(l.request), free(l.gap_ms), free(first);
    return done == o->requests ? 0 : -1;
}

/* ---------------------------------------------------------------- flags */

static const nmk_flag table[] = {
    {"--checkpoint", "DIR", "its weights"},
    {"--random-weights", "SEED", "in place of a checkpoint's (1)"},
    {"--first", "LIST", "prompts alone, of so many tokens; 0: none (1024,8192,32768)"},
    {"--beside", "N", "tokens of a prompt beside rows that decode; 0: none (8192)"},
    {"--rows", "N", "that decode meanwhile (4)"},
    {"--trace", "RATE", "requests a second of a trace; 0: none (0.8)"},
    {"--requests", "N", "of the trace (60)"},
    {"--prompts", "LOW-HIGH", "their tokens (200-8000)"},
    {"--answers", "LOW-HIGH", "theirs (50-1000)"},
    {"--seed", "N", "of the trace (1)"},
    {"--device", "NAME", "(cuda:0)"},
    {"--server", "PATH", "the program (nmk-serve beside this one)"},
    {"--server-flags", "TEXT", "more flags for it, with blanks between"},
};
static const nmk_flags flags = {.program = "bench-prompts", .flag = table, .count = sizeof table / sizeof *table};

static int range(const char *name, const char *text, int *low, int *high) {
    int64_t v[2];
    const char *end;
    if (!nmk_flag_int(text, 1, 1 << 20, &end, &v[0]) || *end != '-' ||
        !nmk_flag_int(end + 1, v[0], 1 << 20, NULL, &v[1]))
        return nmk_flag_bad(&flags, name, text, "LOW-HIGH, tokens");
    *low = (int)v[0], *high = (int)v[1];
    return 0;
}

static int whole(const char *name, const char *text, int least, int most, int *value) {
    int64_t v;
    char expected[48];
    snprintf(expected, sizeof expected, "%d to %d", least, most);
    if (!nmk_flag_int(text, least, most, NULL, &v)) return nmk_flag_bad(&flags, name, text, expected);
    *value = (int)v;
    return 0;
}

static int set_flag(void *user, const char *name, const char *value) {
    settings *o = user;
    if (!strcmp(name, "--checkpoint")) o->checkpoint = value;
    if (!strcmp(name, "--random-weights")) o->seed = value, o->checkpoint = NULL;
    if (!strcmp(name, "--device")) o->device = value;
    if (!strcmp(name, "--server")) o->server = value;
    if (!strcmp(name, "--server-flags")) o->server_flags = xstrdup(value);
    if (!strcmp(name, "--beside")) return whole(name, value, 0, 1 << 20, &o->beside);
    if (!strcmp(name, "--rows")) return whole(name, value, 1, MOST_ROWS, &o->rows);
    if (!strcmp(name, "--requests")) return whole(name, value, 1, MOST_REQUESTS, &o->requests);
    if (!strcmp(name, "--prompts")) return range(name, value, &o->low[0], &o->high[0]);
    if (!strcmp(name, "--answers")) return range(name, value, &o->low[1], &o->high[1]);
    if (!strcmp(name, "--seed"))
        return nmk_flag_int(value, 0, INT64_MAX, NULL, &o->draw_seed) ? 0
                                                                      : nmk_flag_bad(&flags, name, value, "a number");
    if (!strcmp(name, "--trace")) {
        char *end;
        o->rate = strtod(value, &end);
        if (end == value || *end || !(o->rate >= 0) || !isfinite(o->rate))
            return nmk_flag_bad(&flags, name, value, "requests a second");
    }
    if (!strcmp(name, "--first")) {
        int64_t v;
        const char *end = value;
        for (o->firsts = 0; o->firsts < MOST_CASES; value = end + 1) {
            if (!nmk_flag_int(value, 0, 1 << 20, &end, &v) || (*end && *end != ','))
                return nmk_flag_bad(&flags, name, value, "whole numbers with commas between");
            if (v) o->first[o->firsts++] = (int)v;
            if (!*end) return 0;
        }
        return nmk_flag_bad(&flags, name, value, "fewer numbers");
    }
    return 0;
}

static int longest(const settings *o) {
    int tokens = o->beside + 256, n = PROMPT_OF_ROW + MOST_TOKENS;
    if (o->beside && n > tokens) tokens = n;
    for (int i = 0; i < o->firsts; i++)
        if (o->first[i] + ANSWER > tokens) tokens = o->first[i] + ANSWER;
    n = o->high[0] + o->high[1];
    return o->rate > 0 && n > tokens ? n : tokens;
}

int main(int argc, char **argv) {
    settings o = {.seed = "1",
                  .device = "cuda:0",
                  .server = "build/" NMK_MODEL "/nmk-serve",
                  .first = {1024, 8192, 32768},
                  .firsts = 3,
                  .beside = 8192,
                  .rows = 4,
                  .rate = 0.8,
                  .requests = 60,
                  .low = {200, 50},
                  .high = {8000, 1000},
                  .draw_seed = 1};
    if (nmk_flags_read(&flags, argc, argv, set_flag, &o)) return 2;
    signal(SIGPIPE, SIG_IGN);
    char max_len[16];
    const char *args[10 + MOST_FLAGS] = {o.server,
                                         "--port",
                                         "0",
                                         "--device",
                                         o.device,
                                         "--max-model-len",
                                         max_len,
                                         o.checkpoint ? "--checkpoint" : "--random-weights",
                                         o.checkpoint ? o.checkpoint : o.seed};
    snprintf(max_len, sizeof max_len, "%d", longest(&o));
    int n = 9;
    for (char *word = o.server_flags ? strtok(o.server_flags, " ") : NULL; word; word = strtok(NULL, " ")) {
        if (n == 9 + MOST_FLAGS) return fprintf(stderr, "bench-prompts: too many --server-flags\n"), 2;
        args[n++] = word;
    }
    server s = server_run(args, START_SECONDS);
    nmk_sse_target target;
    nmk_err e;
    nmk_buf log = {0};
    char url[64];
    snprintf(url, sizeof url, "http://127.0.0.1:%d", s.port);
    server_log(&s, &log);
    printf("%s\n", log.data);
    int rc = nmk_sse_resolve(&target, url, NULL, &e);
    if (!rc && o.firsts) rc = run_first(&target, &o);
    if (!rc && o.beside) rc = run_beside(&target, &o, s.port);
    if (!rc && o.rate > 0) rc = run_trace(&target, &o, s.port);
    if (rc) server_log(&s, &log), fprintf(stderr, "%s\n", log.data);
    if (server_end(&s, SIGTERM, 20000)) rc = failed("the server", "it did not end well");
    nmk_buf_free(&log), free(o.server_flags);
    return rc ? 1 : 0;
}
