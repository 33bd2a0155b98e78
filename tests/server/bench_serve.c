/* nmk-bench serve: its figures against a server made here that answers at known times, in pieces that fall anywhere;
 * what goes wrong; and the toy. */
#define _GNU_SOURCE
#include "helper.h"
#include "serve_helper.h"

#include <math.h>
#include <pthread.h>

enum { FIRST_MS = 60, GAP_MS = 25, TOKENS = 6 };

static char folder[] = "/tmp/nmk-bench-XXXXXX";
static char *saved;

/* ---------------------------------------------------------------- a server */

typedef enum { CHUNKED, PLAIN, NO_USAGE, BREAKS, FAILS_LATE, NO_STREAM, REFUSES } manner;
static const char *const manners[] = {"chunked", "plain", "no-usage", "breaks", "fails-late", "no-stream", "refuses"};

static int listener, mock_port;
static pthread_mutex_t mock_lock = PTHREAD_MUTEX_INITIALIZER;
static int mock_open, mock_peak, mock_requests;
static nmk_buf mock_last; /* the newest request */

static void sleep_ms(int ms) { usleep((useconds_t)ms * 1000); }

/* A piece of the body, in chunks of 1, 2, 3... bytes if they are chunked. */
static void send_piece(int fd, bool chunked, const char *text) {
    size_t left = strlen(text);
    if (!chunked) put(fd, text, left);
    for (size_t n = 1; chunked && left; n++) {
        char head[16];
        size_t bytes = n < left ? n : left;
        snprintf(head, sizeof head, "%zx%s\r\n", bytes, n % 2 ? "" : ";x=y");
        puts_to(fd, head), put(fd, text, bytes), puts_to(fd, "\r\n");
        text += bytes, left -= bytes;
    }
}

static void answer(int fd, manner m) {
    const bool chunked = m != PLAIN;
    if (m == REFUSES) {
        puts_to(
            fd,
            "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 34\r\n\r\n{\"error\":{\"message\":\"try later\"}}  ");
        return;
    }
    if (m == NO_STREAM) {
        puts_to(fd, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}");
        return;
    }
    puts_to(fd, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n");
    puts_to(fd, chunked ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n");
    send_piece(fd, chunked, ": a comment\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n");
    sleep_ms(FIRST_MS);
    for (int i = 0; i < TOKENS; i++) {
        if (i) sleep_ms(GAP_MS);
        if (m == BREAKS && i == 3) return;
        if (m == FAILS_LATE && i == 3) {
            send_piece(fd, chunked, "data: {\"error\":{\"message\":\"the engine failed\"}}\n\n");
            break;
        }
        /* two events in one piece, one of them in two data lines and with CR */
        send_piece(fd, chunked,
                   i % 2 ? "data: {\"choices\":\r\ndata: [{\"text\":\"x\"}]}\r\n\r\n"
                         : "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n: more\n\n");
    }
    if (m != NO_USAGE)
        send_piece(fd, chunked, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":11,\"completion_tokens\":6}}\n\n");
    send_piece(fd, chunked, "data: [DONE]\n\n");
    if (chunked) puts_to(fd, "0\r\nX-Trailer: y\r\n\r\n");
}

static void *serve_one(void *argument) {
    int fd = (int)(intptr_t)argument;
    nmk_buf in = {0};
    size_t need = SIZE_MAX;
    while (in.length < need && get_some(fd, &in, time_limit(5000)) > 0) {
        const char *end = strstr(in.data, "\r\n\r\n"), *length = strcasestr(in.data, "content-length:");
        if (end) need = (size_t)(end + 4 - in.data) + (length && length < end ? strtoul(length + 15, NULL, 10) : 0);
    }
    if (in.length && strstr(in.data, "/models ")) {
        puts_to(fd,
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{\"data\":[{\"id\":\"mock \\\"one\\\"\"}]}");
    } else if (in.length) {
        manner m = CHUNKED;
        for (size_t i = 0; i < sizeof manners / sizeof *manners; i++) {
            char path[40];
            snprintf(path, sizeof path, "POST /%s/v1/", manners[i]);
            if (!strncmp(in.data, path, strlen(path))) m = (manner)i;
        }
        pthread_mutex_lock(&mock_lock);
        mock_requests++;
        if (++mock_open > mock_peak) mock_peak = mock_open;
        mock_last.length = 0;
        nmk_buf_add(&mock_last, in.data, in.length);
        pthread_mutex_unlock(&mock_lock);
        answer(fd, m);
        pthread_mutex_lock(&mock_lock);
        mock_open--;
        pthread_mutex_unlock(&mock_lock);
    }
    close(fd);
    nmk_buf_free(&in);
    return NULL;
}

/* What came so far, as last_request leaves it. */
static struct {
    int requests, peak;
    nmk_buf text;
} seen;

/* The newest request's text, until the next call. */
static const char *last_request(void) {
    pthread_mutex_lock(&mock_lock);
    seen.requests = mock_requests, seen.peak = mock_peak;
    seen.text.length = 0;
    nmk_buf_puts(&seen.text, mock_last.data);
    pthread_mutex_unlock(&mock_lock);
    return seen.text.data;
}

static void *serve_all(void *unused) {
    (void)unused;
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0;) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve_one, (void *)(intptr_t)fd)) exit(2);
        pthread_detach(thread);
    }
    return NULL;
}

static void mock_start(void) {
    struct sockaddr_in a = {.sin_family = AF_INET};
    socklen_t bytes = sizeof a;
    pthread_t thread;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&a, bytes) || listen(listener, 100) ||
        getsockname(listener, (struct sockaddr *)&a, &bytes) || pthread_create(&thread, NULL, serve_all, NULL))
        exit(2);
    mock_port = ntohs(a.sin_port);
}

/* ---------------------------------------------------------------- the program */

typedef struct {
    int status;
    nmk_buf said;             /* both its outputs */
    struct json_object *json; /* what it saved; NULL: nothing */
} run;

static run bench(int port, const char *prefix, const char *rest) {
    run r = {0};
    nmk_err e;
    unlink(saved);
    char *command =
        xasprintf("build/nmk-bench serve --url http://localhost:%d%s/v1 --save %s %s 2>&1", port, prefix, saved, rest);
    FILE *f = popen(command, "r");
    char part[4096];
    nmk_buf_puts(&r.said, "");
    for (size_t n; f && (n = fread(part, 1, sizeof part, f));) nmk_buf_add(&r.said, part, n);
    int status = f ? pclose(f) : -1;
    r.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
    if (access(saved, F_OK) == 0) r.json = nmk_json_read(saved, 1 << 20, &e);
    free(command);
    return r;
}

static void run_free(run *r) {
    nmk_buf_free(&r->said);
    json_object_put(r->json);
}

static double figure(const run *r, const char *name) {
    struct json_object *v = nmk_json_get(r->json, name);
    return v ? json_object_get_double(v) : -1;
}

/* Never early.  The machine may be busy, so it is the median that may not be late either. */
static bool near(double ms, double wanted) { return ms >= wanted - 2 && ms < wanted + time_limit(100); }

static void test_times(const char *how) {
    char *prefix = xasprintf("/%s", how), *name = xasprintf("%s: answered", how);
    run r = bench(mock_port, prefix, "--requests 5 --concurrency 2 --api-key sesame");
    check(r.status == 0 && figure(&r, "completed") == 5 && figure(&r, "failed") == 0, name, "%d: %s", r.status,
          r.said.data);
    check(near(figure(&r, "median_ttft_ms"), FIRST_MS) && near(figure(&r, "median_itl_ms"), GAP_MS) &&
              near(figure(&r, "median_tpot_ms"), GAP_MS) && near(figure(&r, "median_e2el_ms"), FIRST_MS + 5 * GAP_MS),
          "its times", "%s", r.said.data);
    bool usage = strcmp(how, "no-usage") != 0;
    check(figure(&r, "total_output_tokens") == 5 * TOKENS && figure(&r, "total_input_tokens") == 5 * (usage ? 11 : 512),
          "its tokens", "%.0f, %.0f", figure(&r, "total_output_tokens"), figure(&r, "total_input_tokens"));
    check(fabs(figure(&r, "output_throughput") * figure(&r, "duration") - 5 * TOKENS) < 0.01 &&
              figure(&r, "median_ttft_ms") <= figure(&r, "p90_ttft_ms") &&
              figure(&r, "p90_ttft_ms") <= figure(&r, "p99_ttft_ms"),
          "its sums", "%s", r.said.data);
    run_free(&r), free(prefix), free(name);
}

static void test_requests(void) {
    pthread_mutex_lock(&mock_lock);
    mock_peak = mock_requests = 0;
    pthread_mutex_unlock(&mock_lock);
    run r = bench(mock_port, "",
                  "--requests 8 --concurrency 3 --prompt-tokens 7 --output-tokens 9 --ignore-eos "
                  "--api-key sesame");
    const char *q = last_request();
    check(r.status == 0 && seen.requests == 9 && seen.peak == 3 && figure(&r, "peak_concurrency") == 3,
          "as many at a time as asked for, one before them all", "%d requests, %d at a time", seen.requests, seen.peak);
    check(strstr(q, "POST /v1/completions HTTP/1.1\r\n") && strstr(q, "Authorization: Bearer sesame\r\n") &&
              strstr(q, "{\"model\":\"mock \\\"one\\\"\",\"prompt\":[") && strstr(q, "\"max_tokens\":9,") &&
              strstr(q, "\"stream\":true") && strstr(q, "\"ignore_eos\":true}"),
          "a request's fields", "%s", q);
    int numbers = 1;
    for (const char *at = strstr(q, "\"prompt\":["); at && *at && *at != ']'; at++) numbers += *at == ',';
    check(numbers == 7, "a prompt of as many ids", "%d", numbers);
    run_free(&r);

    r = bench(mock_port, "", "--requests 1 --endpoint chat --prompt-tokens 4 --model m");
    q = last_request();
    const char *words = strstr(q, "\"messages\":[{\"role\":\"user\",\"content\":\"");
    int blanks = 0;
    for (const char *at = words ? words + 40 : ""; *at && *at != '"'; at++) blanks += *at == ' ';
    check(r.status == 0 && strstr(q, "POST /v1/chat/completions ") && strstr(q, "\"model\":\"m\"") && blanks == 3 &&
              !strstr(q, "ignore_eos") && !strstr(q, "Authorization"),
          "a chat of as many words", "%s", q);
    run_free(&r);

    r = bench(mock_port, "", "--requests 12 --rate 20 --seed 5");
    double seconds = figure(&r, "duration");
    check(r.status == 0 && seconds > 0.3 && seconds < time_limit(2500) * 1e-3, "requests come at their rate",
          "12 at 20 a second in %.2f s", seconds);
    run_free(&r);
    r = bench(mock_port, "", "--requests 6 --goodput ttft:5000,e2el:60");
    check(r.status == 0 && figure(&r, "request_goodput") == 0, "none keeps a limit that none can", "%s", r.said.data);
    run_free(&r);
    r = bench(mock_port, "", "--requests 6 --goodput ttft:5000,tpot:5000");
    check(fabs(figure(&r, "request_goodput") - figure(&r, "request_throughput")) < 1e-9, "all keep one that all can",
          "%s", r.said.data);
    run_free(&r);

    char *file = xasprintf("%s/prompts", folder), *flags = xasprintf("--requests 3 --concurrency 1 --dataset %s", file);
    FILE *f = fopen(file, "w");
    fputs("{\"prompt\": \"one \\\"1\\\"\", \"output_tokens\": 3}\n\n{\"prompt\": \"two\"}\n", f), fclose(f);
    r = bench(mock_port, "", flags);
    q = last_request();
    check(r.status == 0 && strstr(q, "\"prompt\":\"one \\\"1\\\"\"") && strstr(q, "\"max_tokens\":3"),
          "prompts of a file, from its beginning again", "%s", q);
    run_free(&r);
    f = fopen(file, "w"), fputs("{\"prompt\": \"one\"}\n{\"prompt\": 3}\n", f), fclose(f);
    r = bench(mock_port, "", flags);
    check(r.status == 1 && strstr(r.said.data, "/prompts:2: expected") && !r.json, "a wrong line is named", "%s",
          r.said.data);
    run_free(&r), free(file), free(flags);
}

static void test_failures(void) {
    static const struct {
        const char *manner, *why;
    } cases[] = {{"breaks", "the answer broke off"},
                 {"fails-late", "the engine failed"},
                 {"no-stream", "the answer is no event stream"},
                 {"refuses", "status 429: try later"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *prefix = xasprintf("/%s", cases[i].manner);
        run r = bench(mock_port, prefix, "--requests 2");
        check(r.status == 1 && strstr(r.said.data, cases[i].why) && !r.json, cases[i].manner, "%d: %s", r.status,
              r.said.data);
        run_free(&r), free(prefix);
    }
    run r = bench(1, "", "--requests 2");
    check(r.status == 1 && strstr(r.said.data, "Connection refused"), "nobody there", "%s", r.said.data);
    run_free(&r);
    r = bench(mock_port, "", "--requests 2 --output-tokens 9-3");
    check(r.status == 2 && strstr(r.said.data, "--output-tokens 9-3: expected"), "a wrong flag", "%s", r.said.data);
    run_free(&r);
}

static void test_toy(void) {
    const char *flags[] = {"--checkpoint", "examples/nmc-toy", "--api-key", "sesame-open", NULL};
    server s = server_start(flags);
    run r = bench(s.port, "",
                  "--api-key sesame-open --requests 6 --concurrency 4 --prompt-tokens 10-30 "
                  "--prefix-tokens 8 --output-tokens 12 --ignore-eos");
    check(r.status == 0 && figure(&r, "completed") == 6 && figure(&r, "total_output_tokens") == 72, "the toy answers",
          "%d: %s", r.status, r.said.data);
    check(figure(&r, "total_input_tokens") >= 60 && figure(&r, "total_input_tokens") <= 180,
          "prompts are as long as asked", "%.0f", figure(&r, "total_input_tokens"));
    run_free(&r);
    r = bench(s.port, "", "--api-key wrong --requests 2");
    check(r.status == 1 && strstr(r.said.data, "status 401"), "a wrong key", "%s", r.said.data);
    run_free(&r);
    server_end(&s, SIGTERM, 5000);
}

int main(void) {
    if (!mkdtemp(folder)) return 2;
    saved = xasprintf("%s/figures.json", folder);
    unsetenv("OPENAI_API_KEY");
    signal(SIGPIPE, SIG_IGN);
    mock_start();
    test_times("chunked"), test_times("plain"), test_times("no-usage");
    test_requests(), test_failures(), test_toy();
    char *command = xasprintf("rm -r %s", folder);
    int rc = system(command);
    free(command), free(saved);
    return rc || failures;
}
