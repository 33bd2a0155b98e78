/* Decode speed as clients of nmk-serve see it, beside the engine's own in the same command.
 *
 * bench-serve [--checkpoint DIR | --random-weights SEED] [--batch 1,8] [--context 8192] [--steps 300] [--sampling greedy]
 *             [--device cuda:0] [--server build/MODEL/nmk-serve]
 *
 * Every case: `batch` streams of /v1/completions, prompts of token ids, ignore_eos.  Measured from when all of them
 * have begun, and WARM_UP tokens later, to when the first ends.  Prompts that begin earlier are as much shorter as they
 * grow until the last one is fed, so that all are `context` long by then, if the server feeds beside rows that decode
 * as fast as alone; the column says how long they were.  Feeding is not counted; it takes `context` positions at
 * what the server feeds a step.  Then bench-decode, with the same weights, batch, context and steps. */
#define _GNU_SOURCE /* memmem */
#include "server/serve_helper.h"

#include "flags.h"
#include "samplings.h"
#include "sse.h"
#include "values.h"

enum { WARM_UP = 24, MOST_CASES = 16, MOST_ROWS = 64, MOST_STEPS = 4096, VOCAB = 500, START_SECONDS = 600 };

typedef struct {
    const char *checkpoint, *seed, *device, *server;
    const char *batches, *contexts; /* as given */
    int batch[MOST_CASES], context[MOST_CASES], batch_count, context_count;
    int steps, max_len, sampling;
} settings;

typedef struct {
    int batch, context;
    int shortest, longest; /* when measuring began */
    double tokens_s, ms, low, high, most, first_s;
    int steps;
    double engine_tokens_s; /* 0: not measured */
} result;

typedef struct {
    nmk_sse sse;
    int prompt, limit, tokens;
    bool ids; /* its text is token ids */
    uint64_t *at;
} row;

static uint32_t word_of(uint32_t row_number, uint32_t i) {
    uint32_t x = row_number * 2654435761u + i * 2246822519u + 1;
    x ^= x >> 15, x *= 2146121005u, x ^= x >> 13;
    return x;
}

/* ---------------------------------------------------------------- streams */

/* Without a tokenizer an answer's text is its token ids, with a space behind each; with one a chunk is a token. */
static int tokens_of(const char *event, size_t bytes, bool ids) {
    static const char key[] = "\"text\":\"";
    const char *at = memmem(event, bytes, key, sizeof key - 1), *end;
    int n = 0;
    if (!at) return 0;
    at += sizeof key - 1;
    if (!(end = memchr(at, '"', bytes - (size_t)(at - event)))) return 0;
    if (!ids) return end > at;
    for (; at < end; at++) n += *at == ' ';
    return n;
}

static int on_event(void *user, const char *data, size_t bytes, uint64_t now) {
    row *r = user;
    for (int n = tokens_of(data, bytes, r->ids); n && r->tokens < r->limit; n--) r->at[r->tokens++] = now;
    return 0;
}

static int open_row(const nmk_sse_target *t, const settings *o, row *r, int number) {
    nmk_buf body = {0};
    nmk_err e;
    nmk_buf_printf(&body, "{\"stream\":true,\"ignore_eos\":true,%s,\"seed\":7,\"max_tokens\":%d,\"prompt\":[",
                   samplings[o->sampling].fields, r->limit);
    for (int i = 0; i < r->prompt; i++)
        nmk_buf_printf(&body, "%s%u", i ? "," : "", word_of((uint32_t)number, (uint32_t)i) % VOCAB);
    nmk_buf_puts(&body, "]}");
    r->ids = !o->checkpoint;
    r->at = xcalloc((size_t)r->limit, sizeof *r->at);
    int rc = nmk_sse_open(&r->sse, t, "/v1/completions", body.data, on_event, r, &e);
    nmk_buf_free(&body);
    return rc ? fprintf(stderr, "bench-serve: %s\n", e.text), -1 : 0;
}

static void free_row(row *r) {
    nmk_sse_close(&r->sse);
    free(r->at);
}

/* Reads all rows to their ends. */
static int read_rows(row *r, int count) {
    struct pollfd p[MOST_ROWS];
    bool ended[MOST_ROWS] = {0};
    for (int open = count; open;) {
        for (int i = 0; i < MOST_ROWS; i++) p[i].fd = -1;
        for (int i = 0; i < count; i++)
            if (!ended[i]) p[i] = (struct pollfd){.fd = r[i].sse.fd, .events = nmk_sse_wants(&r[i].sse)};
        if (poll(p, MOST_ROWS, 120000) <= 0) return fprintf(stderr, "bench-serve: nothing came for 120 s\n"), -1;
        for (int i = 0; i < count; i++) {
            nmk_err e = {"its status or its text"};
            int got = p[i].revents ? nmk_sse_step(&r[i].sse, &e) : 0;
            if (!got) continue;
            ended[i] = true, open--;
            if (got < 0 || r[i].tokens < 2)
                return fprintf(stderr, "bench-serve: a stream gave %d tokens: %s: %.500s\n", r[i].tokens, e.text,
                               r[i].sse.text.data),
                       -1;
        }
    }
    return 0;
}

/* ---------------------------------------------------------------- a case */

/* Positions of a prompt that the server feeds in a step. */
static double feed_rate(const server *s, const nmk_sse_target *t, const settings *o, int positions) {
    row r = {.prompt = positions, .limit = 2, .sse.fd = -1};
    double before = metric(s->port, "nmk:steps_total");
    int rc = open_row(t, o, &r, -1) || read_rows(&r, 1) ? -1 : 0;
    free_row(&r);
    double steps = metric(s->port, "nmk:steps_total") - before - 2;
    return rc || steps < 1 ? -1 : positions / steps;
}

static void measure(result *m, const row *r, int count) {
    uint64_t begin = 0, end = UINT64_MAX;
    double *gap = NULL;
    int gaps = 0, total = 0, room = 0;
    for (int i = 0; i < count; i++)
        if (r[i].at[0] > begin) begin = r[i].at[0];
    uint64_t began = begin;
    m->shortest = 1 << 30, m->longest = 0, m->steps = 1 << 30;
    for (int i = 0; i < count; i++) {
        int first = 0;
        while (first < r[i].tokens - 1 && r[i].at[first] < began) first++;
        first = first + WARM_UP < r[i].tokens ? first + WARM_UP : r[i].tokens - 1;
        if (r[i].at[first] > begin) begin = r[i].at[first];
        if (r[i].at[r[i].tokens - 1] < end) end = r[i].at[r[i].tokens - 1];
        room += r[i].tokens;
    }
    gap = xcalloc((size_t)room + 1, sizeof *gap);
    for (int i = 0; i < count; i++) {
        int seen = 0, length = r[i].prompt;
        for (int t = 0; t < r[i].tokens; t++) {
            if (r[i].at[t] <= begin) length++;
            if (r[i].at[t] <= begin || r[i].at[t] > end) continue;
            seen++;
            if (t) gap[gaps++] = (double)(r[i].at[t] - r[i].at[t - 1]) * 1e-6;
        }
        total += seen;
        if (seen < m->steps) m->steps = seen;
        if (length < m->shortest) m->shortest = length;
        if (length > m->longest) m->longest = length;
    }
    qsort(gap, (size_t)gaps, sizeof *gap, by_value);
    if (gaps && end > begin) {
        m->tokens_s = total / ((double)(end - begin) * 1e-9);
        m->ms = gap[gaps / 2], m->low = gap[gaps / 20], m->high = gap[gaps - 1 - gaps / 20], m->most = gap[gaps - 1];
    }
    free(gap);
}

/* number: of the case; no two have prompts in common, so that none finds its own in a cache. */
static int run_case(const nmk_sse_target *t, const settings *o, double rate, int number, result *m) {
    row r[MOST_ROWS] = {0};
    double grown = 0; /* tokens that a row gives until the last one begins */
    for (int i = m->batch - 1; i >= 0; i--) {
        r[i].prompt = m->context - (int)grown;
        if (r[i].prompt < 1) r[i].prompt = 1;
        r[i].limit = m->context - r[i].prompt + (int)grown / 4 + WARM_UP * 2 + o->steps;
        if (r[i].prompt + r[i].limit > o->max_len) r[i].limit = o->max_len - r[i].prompt;
        grown += r[i].prompt / rate;
    }
    uint64_t start = nmk_now_ns(), begun = 0;
    int rc = 0;
    for (int i = 0; i < m->batch; i++) rc |= open_row(t, o, &r[i], number * MOST_ROWS + i);
    if (!rc) rc = read_rows(r, m->batch);
    if (!rc) measure(m, r, m->batch);
    for (int i = 0; i < m->batch; i++) {
        if (!rc && r[i].at[0] > begun) begun = r[i].at[0];
        free_row(&r[i]);
    }
    m->first_s = (double)(begun - start) * 1e-9;
    return rc;
}

/* ---------------------------------------------------------------- the engine's own figures */

/* Runs bench-decode, shows what it says and takes its rows. */
static void run_decode(const settings *o, result *m, int count) {
    char line[1000], *program = xstrdup(o->server), *slash = strrchr(program, '/');
    if (slash) *slash = 0;
    char *command =
        xasprintf("%s/bench-decode %s %s --batch %s --context %s --steps %d --sampling %s", slash ? program : ".",
                  o->checkpoint ? "--checkpoint" : "--random-weights", o->checkpoint ? o->checkpoint : o->seed,
                  o->batches, o->contexts, o->steps, samplings[o->sampling].name);
    printf("\n%s\n", command);
    fflush(stdout);
    FILE *f = popen(command, "r");
    while (f && fgets(line, sizeof line, f)) {
        int batch, context;
        double speed;
        fputs(line, stdout);
        if (sscanf(line, "| %d | %d | %*[a-z_] | %*f (%*f-%*f) | %lf", &batch, &context, &speed) != 3) continue;
        for (int i = 0; i < count; i++)
            if (m[i].batch == batch && m[i].context == context) m[i].engine_tokens_s = speed;
    }
    if (f) pclose(f);
    free(command), free(program);
}

static void print(const result *m) {
    char engine[32] = "-", part[32] = "-";
    if (m->engine_tokens_s > 0) {
        snprintf(engine, sizeof engine, "%.1f", m->engine_tokens_s);
        snprintf(part, sizeof part, "%.1f %%", 100 * m->tokens_s / m->engine_tokens_s);
    }
    printf("| %d | %d to %d | %d | %.1f | %.3f (%.3f-%.3f, %.1f) | %s | %s | %.1f |\n", m->batch, m->shortest,
           m->longest, m->steps, m->tokens_s, m->ms, m->low, m->high, m->most, engine, part, m->first_s);
}

/* ---------------------------------------------------------------- flags */

static const nmk_flag table[] = {
    {"--checkpoint", "DIR", "its weights"},
    {"--random-weights", "SEED", "in place of a checkpoint's (1)"},
    {"--batch", "LIST", "streams at once (1,8)"},
    {"--context", "LIST", "tokens each has when measuring begins (8192)"},
    {"--steps", "N", "tokens of each stream that are measured (300)"},
    {"--sampling", "NAME", "one of bench-decode's (greedy)"},
    {"--device", "NAME", "cpu: without the engine's own figures (cuda:0)"},
    {"--server", "PATH", "the program (nmk-serve beside this one)"},
};
static const nmk_flags flags = {.program = "bench-serve", .flag = table, .count = sizeof table / sizeof *table};

static int numbers(const char *name, const char *text, int most, int list[MOST_CASES], int *count) {
    const char *end = text;
    for (*count = 0; *count < MOST_CASES; text = end + 1) {
        int64_t v;
        if (!nmk_flag_int(text, 1, most, &end, &v) || (*end && *end != ','))
            return nmk_flag_bad(&flags, name, text, "whole numbers with commas between");
        list[(*count)++] = (int)v;
        if (!*end) return 0;
    }
    return nmk_flag_bad(&flags, name, text, "fewer numbers");
}

static int set_flag(void *user, const char *name, const char *value) {
    settings *o = user;
    int64_t v;
    if (!strcmp(name, "--checkpoint")) o->checkpoint = value;
    if (!strcmp(name, "--random-weights")) o->seed = value, o->checkpoint = NULL;
    if (!strcmp(name, "--device")) o->device = value;
    if (!strcmp(name, "--server")) o->server = value;
    if (!strcmp(name, "--sampling")) {
        for (o->sampling = SAMPLINGS - 1; o->sampling >= 0 && strcmp(samplings[o->sampling].name, value) != 0;)
            o->sampling--;
        if (o->sampling < 0) return nmk_flag_bad(&flags, name, value, "a way to sample that bench-decode knows");
    }
    if (!strcmp(name, "--batch")) return o->batches = value, numbers(name, value, MOST_ROWS, o->batch, &o->batch_count);
    if (!strcmp(name, "--context"))
        return o->contexts = value, numbers(name, value, 1 << 20, o->context, &o->context_count);
    if (!strcmp(name, "--steps")) {
        if (!nmk_flag_int(value, 2, MOST_STEPS, NULL, &v)) return nmk_flag_bad(&flags, name, value, "2 to 4096");
        o->steps = (int)v;
    }
    return 0;
}

int main(int argc, char **argv) {
    settings o = {.seed = "1", .device = "cuda:0", .server = "build/" NMK_MODEL "/nmk-serve", .steps = 300};
    result m[MOST_CASES * MOST_CASES] = {0};
    int count = 0, longest = 0, rc = 0;
    char max_len[16];
    set_flag(&o, "--batch", "1,8"), set_flag(&o, "--context", "8192");
    if (nmk_flags_read(&flags, argc, argv, set_flag, &o)) return 2;
    signal(SIGPIPE, SIG_IGN);
    for (int c = 0; c < o.context_count; c++) {
        if (o.context[c] > longest) longest = o.context[c];
        for (int b = 0; b < o.batch_count; b++) m[count++] = (result){.batch = o.batch[b], .context = o.context[c]};
    }
    o.max_len = longest + longest / 4 + 2 * WARM_UP + o.steps + 8;
    snprintf(max_len, sizeof max_len, "%d", o.max_len);
    const char *args[] = {o.server,
                          "--port",
                          "0",
                          "--device",
                          o.device,
                          "--max-model-len",
                          max_len,
                          o.checkpoint ? "--checkpoint" : "--random-weights",
                          o.checkpoint ? o.checkpoint : o.seed,
                          NULL};
    server s = server_run(args, START_SECONDS);
    nmk_sse_target target;
    nmk_err e;
    char url[64];
    snprintf(url, sizeof url, "http://127.0.0.1:%d", s.port);
    if (nmk_sse_resolve(&target, url, NULL, &e)) return fprintf(stderr, "bench-serve: %s\n", e.text), 1;
    double rate = feed_rate(&s, &target, &o, longest < 256 ? longest : 256);
    if (rate <= 0) rc = -1;
    for (int i = 0; i < count && !rc; i++) rc = run_case(&target, &o, rate, i, &m[i]);
    if (server_end(&s, SIGTERM, 20000)) rc = -1;
    if (rc) return fprintf(stderr, "bench-serve: no figures\n"), 1;
    if (!strncmp(o.device, "cuda", 4)) run_decode(&o, m, count);
    printf("\n%s, %d steps a case after %d; the server feeds a prompt %.1f positions a step; %s\n\n", o.server, o.steps,
           WARM_UP, rate, samplings[o.sampling].name);
    printf(
        "| batch | context | steps | API tokens/s | ms between tokens median (p5-p95, most) | bench-decode tokens/s | API of it "
        "| s to all first tokens |\n|--|--|--|--|--|--|--|--|\n");
    for (int i = 0; i < count; i++) print(&m[i]);
    return 0;
}
