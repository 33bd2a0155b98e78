/* nmk-bench serve: load and latency of any server that speaks OpenAI's API, in the terms that vLLM's benchmark uses.
 *
 * A request's time to first token (TTFT) is from when it is sent to its first text; the time per output token (TPOT) is
 * of the rest, mean of an answer; the inter-token latency (ITL) is between chunks, of all answers; E2E is to the last
 * text.  Goodput counts the requests that keep every limit given. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "flags.h"
#include "json.h"
#include "load.h"
#include "values.h"

enum { MOST_REQUESTS = 1 << 20, MOST_OPEN = 60000, MOST_TOKENS = 1 << 20, MOST_LINE = 16 << 20 };

typedef struct {
    int low, high;
} range;

typedef struct {
    const char *url, *key, *model, *dataset, *save;
    bool chat, text, ignore_eos, quiet, help;
    int64_t requests, concurrency, prefix, vocab, seed, timeout_s;
    range prompt, output;
    double rate, temperature; /* rate 0: all at once */
    double limit[3];          /* of goodput, ms; 0: none */
} settings;

static const char *const limit_names[] = {"ttft", "tpot", "e2el"};

static const nmk_flag table[] = {
    {"--url", "URL", "the API's address (http://127.0.0.1:8000/v1)"},
    {"--api-key", "KEY", "sent as Authorization: Bearer ($OPENAI_API_KEY)"},
    {"--model", "NAME", "what requests call the model (the first that the server lists)"},
    {"--endpoint", "completions|chat", "which of the two is asked (completions)"},
    {"--requests", "N", "how many (100)"},
    {"--rate", "R", "of them a second, at random (Poisson) times; inf: as fast as they may (inf)"},
    {"--concurrency", "N", "most at a time (as many as there are)"},
    {"--prompt-tokens", "N|LOW-HIGH", "of each prompt, drawn evenly (512)"},
    {"--output-tokens", "N|LOW-HIGH", "of each answer at most (128)"},
    {"--prefix-tokens", "N", "of each prompt that all have in common (0)"},
    {"--text", NULL, "prompts are words, not token ids, for servers that take no ids; chats always are"},
    {"--vocab", "N", "token ids are drawn from 100 to N (4000)"},
    {"--dataset", "FILE", "prompts from a file, {\"prompt\": TEXT, \"output_tokens\": N} a line (made up)"},
    {"--ignore-eos", NULL, "answers are as long as they may be, where the server knows ignore_eos"},
    {"--temperature", "T", "(0)"},
    {"--goodput", "LIST", "limits in ms, such as ttft:500,tpot:30,e2el:9000 (none)"},
    {"--timeout", "SECONDS", "for a request (600)"},
    {"--seed", "N", "of prompts, lengths and times (1)"},
    {"--save", "FILE", "the figures as JSON, under vLLM's names"},
    {"--quiet", NULL, "no progress on a terminal"},
    {"--help", NULL, "print this"},
};
static const nmk_flags flags = {.program = "nmk-bench", .flag = table, .count = sizeof table / sizeof *table};

static void usage(FILE *f) {
    fprintf(f, "usage: nmk-bench serve [flags]     (load on a server of OpenAI's API, and its latencies)\n");
    nmk_flags_print(&flags, f, 30);
    fprintf(f, "\nExit status: 0 all requests were answered, 1 some were not, 2 wrong use.\n");
}

/* ---- flags ---- */

static int whole(const char *name, const char *text, int64_t low, int64_t high, int64_t *value) {
    char expected[64];
    if (nmk_flag_int(text, low, high, NULL, value)) return 0;
    snprintf(expected, sizeof expected, "%lld to %lld", (long long)low, (long long)high);
    return nmk_flag_bad(&flags, name, text, expected);
}

static int tokens(const char *name, const char *text, range *r) {
    int64_t low, high;
    const char *end;
    if (!nmk_flag_int(text, 1, MOST_TOKENS, &end, &low) || (*end && *end != '-'))
        return nmk_flag_bad(&flags, name, text, "a number of tokens, or LOW-HIGH");
    high = low;
    if (*end && !nmk_flag_int(end + 1, low, MOST_TOKENS, NULL, &high))
        return nmk_flag_bad(&flags, name, text, "LOW-HIGH with HIGH not below LOW");
    *r = (range){(int)low, (int)high};
    return 0;
}

static bool number(const char *text, const char **end, double least, double *value) {
    char *stop;
    errno = 0;
    *value = strtod(text, &stop);
    if (end) *end = stop;
    return stop != text && !errno && isfinite(*value) && *value >= least && (end || !*stop);
}

static int limits(const char *text, double limit[3]) {
    for (const char *at = text;;) {
        int i = 0;
        size_t n = strcspn(at, ":");
        while (i < 3 && (strlen(limit_names[i]) != n || memcmp(limit_names[i], at, n) != 0)) i++;
        if (i == 3 || !at[n] || !number(at + n + 1, &at, 0, &limit[i]) || (*at && *at != ',') || limit[i] <= 0)
            return nmk_flag_bad(&flags, "--goodput", text,
                                "ttft, tpot or e2el with a colon and milliseconds, commas between");
        if (!*at++) return 0;
    }
}

static int set_flag(void *user, const char *name, const char *value) {
    settings *s = user;
    if (!strcmp(name, "--url")) return s->url = value, 0;
    if (!strcmp(name, "--api-key")) return s->key = value, 0;
    if (!strcmp(name, "--model")) return s->model = value, 0;
    if (!strcmp(name, "--dataset")) return s->dataset = value, 0;
    if (!strcmp(name, "--save")) return s->save = value, 0;
    if (!strcmp(name, "--text")) return s->text = true, 0;
    if (!strcmp(name, "--ignore-eos")) return s->ignore_eos = true, 0;
    if (!strcmp(name, "--quiet")) return s->quiet = true, 0;
    if (!strcmp(name, "--help")) return s->help = true, 0;
    if (!strcmp(name, "--endpoint")) {
        s->chat = !strcmp(value, "chat");
        return s->chat || !strcmp(value, "completions") ? 0 : nmk_flag_bad(&flags, name, value, "completions or chat");
    }
    if (!strcmp(name, "--requests")) return whole(name, value, 1, MOST_REQUESTS, &s->requests);
    if (!strcmp(name, "--concurrency")) return whole(name, value, 1, MOST_OPEN, &s->concurrency);
    if (!strcmp(name, "--prefix-tokens")) return whole(name, value, 0, MOST_TOKENS, &s->prefix);
    if (!strcmp(name, "--vocab")) return whole(name, value, 101, 1 << 24, &s->vocab);
    if (!strcmp(name, "--seed")) return whole(name, value, 0, INT64_MAX, &s->seed);
    if (!strcmp(name, "--timeout")) return whole(name, value, 1, 1 << 20, &s->timeout_s);
    if (!strcmp(name, "--prompt-tokens")) return tokens(name, value, &s->prompt);
    if (!strcmp(name, "--output-tokens")) return tokens(name, value, &s->output);
    if (!strcmp(name, "--goodput")) return limits(value, s->limit);
    if (!strcmp(name, "--temperature"))
        return number(value, NULL, 0, &s->temperature) ? 0 : nmk_flag_bad(&flags, name, value, "0 or more");
    if (!strcmp(name, "--rate")) {
        if (!strcmp(value, "inf")) return s->rate = 0, 0;
        return number(value, NULL, 1e-6, &s->rate) ? 0 : nmk_flag_bad(&flags, name, value, "a number above 0, or inf");
    }
    return 2;
}

/* ---- requests ---- */

static uint64_t draws;

static uint64_t draw(void) {
    uint64_t z = draws += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int draw_from(range r) { return r.low + (int)(draw() % (uint64_t)(r.high - r.low + 1)); }

/* Common words, each a token with the blank before it in most vocabularies. */
static const char *const words[] = {"time", "people", "way",   "water", "word", "day",   "part",  "sound", "place",
                                    "year", "back",   "thing", "name",  "line", "right", "old",   "great", "small",
                                    "set",  "end",    "home",  "read",  "hand", "port",  "large", "land",  "even",
                                    "high", "such",   "turn",  "act",   "men",  "light", "kind",  "house", "sun",
                                    "tree", "city",   "play",  "room",  "food", "book",  "car",   "music", "river"};

/* A prompt of n tokens; the first ones are those that all prompts have. */
static void add_prompt(const settings *s, nmk_buf *b, int n) {
    const uint64_t own = draws;
    const bool text = s->chat || s->text;
    draws = (uint64_t)s->seed * 0x2545f4914f6cdd1du + 77;
    nmk_buf_puts(b, text ? "\"" : "[");
    for (int i = 0; i < n; i++) {
        if (i == s->prefix) draws = own;
        if (text)
            nmk_buf_printf(b, "%s%s", i ? " " : "", words[draw() % (sizeof words / sizeof *words)]);
        else
            nmk_buf_printf(b, "%s%d", i ? "," : "", 100 + (int)(draw() % (uint64_t)(s->vocab - 100)));
    }
    if (n <= s->prefix) draws = own + 0x9e3779b97f4a7c15u;
    nmk_buf_puts(b, text ? "\"" : "]");
}

static void add_string(nmk_buf *b, const char *text) {
    struct json_object *o = json_object_new_string(text);
    nmk_buf_puts(b, json_object_to_json_string_ext(o, JSON_C_TO_STRING_NOSLASHESCAPE));
    json_object_put(o);
}

/* prompt: JSON; the result is the caller's. */
static char *body_of(const settings *s, const char *prompt, int output) {
    nmk_buf b = {0};
    nmk_buf_puts(&b, "{\"model\":");
    add_string(&b, s->model);
    if (s->chat)
        nmk_buf_printf(&b, ",\"messages\":[{\"role\":\"user\",\"content\":%s}]", prompt);
    else
        nmk_buf_printf(&b, ",\"prompt\":%s", prompt);
    nmk_buf_printf(
        &b, ",\"max_tokens\":%d,\"temperature\":%g,\"stream\":true,\"stream_options\":{\"include_usage\":true}%s}",
        output, s->temperature, s->ignore_eos ? ",\"ignore_eos\":true" : "");
    return b.data;
}

static void make_request(const settings *s, nmk_load_request *r) {
    nmk_buf prompt = {0};
    int n = draw_from(s->prompt), output = draw_from(s->output);
    add_prompt(s, &prompt, n);
    *r = (nmk_load_request){.body = body_of(s, prompt.data, output), .asked = n};
    nmk_buf_free(&prompt);
}

/* Requests go through the file's lines, from the first again when they are more. */
static int read_dataset(const settings *s, nmk_load *l, nmk_err *e) {
    FILE *f = fopen(s->dataset, "r");
    char *line = NULL;
    size_t room = 0;
    int n = 0, at = 0, rc = 0;
    if (!f) return nmk_fail(e, "%s: %s", s->dataset, strerror(errno));
    for (ssize_t bytes; !rc && n < l->count && (bytes = getline(&line, &room, f)) > 0;) {
        nmk_err why;
        at++;
        if (strspn(line, " \t\r\n") == (size_t)bytes) continue;
        struct json_object *o = bytes < MOST_LINE ? nmk_json_parse(line, (size_t)bytes, &why) : NULL;
        struct json_object *prompt = nmk_json_get(o, "prompt"), *output = nmk_json_get(o, "output_tokens");
        int most = output ? json_object_get_int(output) : draw_from(s->output);
        if (!o)
            rc = nmk_fail(e, "%s:%d: %.300s", s->dataset, at, bytes < MOST_LINE ? why.text : "too long");
        else if (!json_object_is_type(prompt, json_type_string) || most < 1)
            rc = nmk_fail(e, "%s:%d: expected {\"prompt\": TEXT, \"output_tokens\": N}, N from 1 or left out",
                          s->dataset, at);
        else
            l->request[n++].body =
                body_of(s, json_object_to_json_string_ext(prompt, JSON_C_TO_STRING_NOSLASHESCAPE), most);
        json_object_put(o);
    }
    if (!rc && !n) rc = nmk_fail(e, "%s: no prompts", s->dataset);
    for (int i = n; !rc && i < l->count; i++) l->request[i].body = xstrdup(l->request[i - n].body);
    free(line), fclose(f);
    return rc;
}

static int make_requests(const settings *s, nmk_load *l, nmk_err *e) {
    double at = 0;
    l->request = xcalloc((size_t)l->count, sizeof *l->request);
    if (s->dataset && read_dataset(s, l, e)) return -1;
    for (int i = 0; i < l->count; i++) {
        if (!s->dataset) make_request(s, &l->request[i]);
        l->request[i].at_s = at;
        if (s->rate > 0) at += -log(1 - (double)(draw() >> 11) * 0x1p-53) / s->rate;
    }
    return 0;
}

/* ---- figures ---- */

typedef struct {
    double *ms;
    size_t count;
} list;

typedef struct {
    double mean, p50, p90, p99;
} figures;

static figures figures_of(list *l) {
    double sum = 0;
    if (l->count) qsort(l->ms, l->count, sizeof *l->ms, by_value);
    for (size_t i = 0; i < l->count; i++) sum += l->ms[i];
    return (figures){l->count ? sum / (double)l->count : 0, percentile(l->ms, l->count, 0.5),
                     percentile(l->ms, l->count, 0.9), percentile(l->ms, l->count, 0.99)};
}

enum { TTFT, TPOT, ITL, E2E, KINDS };
static const struct {
    const char *title, *name;
} kinds[KINDS] = {{"time to first token", "ttft"},
                  {"time per output token", "tpot"},
                  {"inter-token latency", "itl"},
                  {"end to end", "e2el"}};

typedef struct {
    int completed, failed, good;
    double seconds, input, output;
    figures of[KINDS];
} result;

static double ms_between(uint64_t from, uint64_t to) { return 1e-6 * (double)(to - from); }

static result measure(const settings *s, nmk_load *l) {
    result m = {.seconds = l->seconds};
    list of[KINDS] = {{0}};
    for (int k = 0; k < KINDS; k++)
        if (k != ITL) of[k].ms = xcalloc((size_t)l->count, sizeof *of[k].ms);
    of[ITL] = (list){l->gap_ms, l->gap_count};
    for (int i = 0; i < l->count; i++) {
        const nmk_load_request *r = &l->request[i];
        if (r->why[0]) {
            m.failed++;
            continue;
        }
        int output = r->output_tokens >= 0 ? r->output_tokens : r->chunks;
        double value[3] = {ms_between(r->sent_ns, r->first_ns), 0, ms_between(r->sent_ns, r->last_ns)};
        bool good = true;
        m.completed++;
        m.input += r->prompt_tokens >= 0 ? r->prompt_tokens : r->asked, m.output += output;
        of[TTFT].ms[of[TTFT].count++] = value[0], of[E2E].ms[of[E2E].count++] = value[2];
        if (output > 1) of[TPOT].ms[of[TPOT].count++] = value[1] = ms_between(r->first_ns, r->last_ns) / (output - 1);
        for (int k = 0; k < 3; k++) good &= s->limit[k] <= 0 || value[k] <= s->limit[k];
        m.good += good;
    }
    for (int k = 0; k < KINDS; k++) m.of[k] = figures_of(&of[k]);
    for (int k = 0; k < KINDS; k++)
        if (k != ITL) free(of[k].ms);
    return m;
}

static bool has_limits(const settings *s) { return s->limit[0] > 0 || s->limit[1] > 0 || s->limit[2] > 0; }

static void print(const settings *s, const nmk_load *l, const result *m) {
    printf("%-28s %d of %d, most at a time %d\n", "requests answered", m->completed, l->count, l->peak);
    printf("%-28s %.2f s\n", "duration", m->seconds);
    printf("%-28s %.0f in, %.0f out\n", "tokens", m->input, m->output);
    printf("%-28s %.3f a second\n", "requests", m->completed / m->seconds);
    printf("%-28s %.1f a second, %.1f with those of prompts\n", "output tokens", m->output / m->seconds,
           (m->input + m->output) / m->seconds);
    if (has_limits(s)) printf("%-28s %.3f a second, %d requests\n", "goodput", m->good / m->seconds, m->good);
    printf("\n%-28s %10s %10s %10s %10s\n", "ms", "mean", "p50", "p90", "p99");
    for (int k = 0; k < KINDS; k++)
        printf("%-28s %10.2f %10.2f %10.2f %10.2f\n", kinds[k].title, m->of[k].mean, m->of[k].p50, m->of[k].p90,
               m->of[k].p99);
    /* each reason once */
    for (int i = 0, told = 0; i < l->count && told < 5; i++) {
        int same = 0;
        bool first = l->request[i].why[0];
        for (int j = 0; j < i && first; j++) first = strcmp(l->request[i].why, l->request[j].why) != 0;
        if (!first) continue;
        for (int j = i; j < l->count; j++) same += !strcmp(l->request[i].why, l->request[j].why);
        fprintf(stderr, "nmk-bench: %d failed: %s\n", same, l->request[i].why);
        told++;
    }
}

static int save(const settings *s, const nmk_load *l, const result *m, nmk_err *e) {
    FILE *f = fopen(s->save, "w");
    if (!f) return nmk_fail(e, "%s: %s", s->save, strerror(errno));
    nmk_buf model = {0};
    add_string(&model, s->model);
    fprintf(f, "{\"model_id\":%s,\"num_prompts\":%d,\"request_rate\":", model.data, l->count);
    if (s->rate > 0)
        fprintf(f, "%g", s->rate);
    else
        fprintf(f, "\"inf\"");
    fprintf(f, ",\"max_concurrency\":%d,\"peak_concurrency\":%d,\"duration\":%.6f,\"completed\":%d,\"failed\":%d,",
            l->most_open, l->peak, m->seconds, m->completed, m->failed);
    fprintf(f, "\"total_input_tokens\":%.0f,\"total_output_tokens\":%.0f,\"request_throughput\":%.6f,", m->input,
            m->output, m->completed / m->seconds);
    fprintf(f, "\"output_throughput\":%.6f,\"total_token_throughput\":%.6f", m->output / m->seconds,
            (m->input + m->output) / m->seconds);
    if (has_limits(s)) fprintf(f, ",\"request_goodput\":%.6f", m->good / m->seconds);
    for (int k = 0; k < KINDS; k++) {
        const char *name = kinds[k].name;
        fprintf(f, ",\"mean_%s_ms\":%.6f,\"median_%s_ms\":%.6f,\"p90_%s_ms\":%.6f,\"p99_%s_ms\":%.6f", name,
                m->of[k].mean, name, m->of[k].p50, name, m->of[k].p90, name, m->of[k].p99);
    }
    fprintf(f, "}\n");
    nmk_buf_free(&model);
    return fclose(f) ? nmk_fail(e, "%s: %s", s->save, strerror(errno)) : 0;
}

/* ---- running ---- */

/* The first model that the server lists; the caller's. */
static int ask_model(const nmk_sse_target *t, char **model, nmk_err *e) {
    nmk_buf text;
    if (nmk_sse_fetch(t, "/models", NULL, &text, e)) return -1;
    struct json_object *o = nmk_json_parse(text.data, text.length, e), *data = nmk_json_get(o, "data");
    struct json_object *first = json_object_is_type(data, json_type_array) ? json_object_array_get_idx(data, 0) : NULL;
    struct json_object *id = nmk_json_get(first, "id");
    int rc = 0;
    if (json_object_is_type(id, json_type_string))
        *model = xstrdup(json_object_get_string(id));
    else
        rc = nmk_fail(e, "%s%s/models lists no model: give --model NAME", t->host, t->prefix);
    json_object_put(o), nmk_buf_free(&text);
    return rc;
}

static int run(settings *s, bool *all, nmk_err *e) {
    nmk_sse_target target;
    nmk_load l = {.target = &target, .path = s->chat ? "/chat/completions" : "/completions"};
    nmk_load_request first = {0};
    char *model = NULL;
    int rc = -1;
    l.count = (int)s->requests, l.timeout_s = (int)s->timeout_s, l.progress = !s->quiet && isatty(STDERR_FILENO);
    l.most_open = s->concurrency && s->concurrency < s->requests ? (int)s->concurrency : (int)s->requests;
    if (l.most_open > MOST_OPEN) l.most_open = MOST_OPEN;
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
    if (nmk_sse_resolve(&target, s->url, s->key, e)) return nmk_fail_in(e, "--url");
    if (!s->model && ask_model(&target, &model, e)) goto out;
    if (!s->model) s->model = model;
    draws = (uint64_t)s->seed ^ 0x5851f42d4c957f2du;
    make_request(s, &first);
    if (make_requests(s, &l, e) || nmk_load_try(&l, &first, e)) goto out;
    nmk_load_run(&l);
    result m = measure(s, &l);
    print(s, &l, &m);
    if (s->save && save(s, &l, &m, e)) goto out;
    *all = !m.failed;
    rc = 0;
out:
    for (int i = 0; l.request && i < l.count; i++) free(l.request[i].body);
    free(l.request), free(l.gap_ms), free(first.body), free(model);
    return rc;
}

int main(int argc, char **argv) {
    settings s = {.url = "http://127.0.0.1:8000/v1",
                  .key = getenv("OPENAI_API_KEY"),
                  .requests = 100,
                  .vocab = 4000,
                  .seed = 1,
                  .timeout_s = 600,
                  .prompt = {512, 512},
                  .output = {128, 128}};
    nmk_err e = {0};
    bool all = false;
    if (argc > 1 && !strcmp(argv[1], "--help")) return usage(stdout), 0;
    if (argc < 2 || strcmp(argv[1], "serve") != 0)
        return fprintf(stderr, "nmk-bench: expected nmk-bench serve [flags]; --help shows them\n"), 2;
    if (nmk_flags_read(&flags, argc - 1, argv + 1, set_flag, &s)) return 2;
    if (s.help) return usage(stdout), 0;
    if (s.key && !*s.key) s.key = NULL;
    signal(SIGPIPE, SIG_IGN);
    if (run(&s, &all, &e)) return fprintf(stderr, "nmk-bench: %s\n", e.text), 1;
    return !all;
}
