/* nmk-serve on a GPU made up of host memory: the start as one with a GPU reads it, as text, as JSON and on a terminal;
 * what it says when the weights do not fit; and how it starts again when the GPU is lost. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include "check.h"
#include "runtime/fake_gpu.h"
#include "serve_helper.h"

/* The program itself, with another beginning. */
int serve_main(int argc, char **argv);
#define main serve_main
#include "../../server/main.c"
#undef main

/* In the program: the GPU fails. */
static void on_user(int number) { fake.fail = number == SIGUSR2; }

/* All that it writes to stderr until it listens or ends; the exit status. */
static int start(const char *const *more, bool terminal, nmk_buf *said) {
    const char *args[24] = {"nmk-serve", "--checkpoint", "examples/nmc-toy", "--device", "cuda:0", "--port", "0"};
    int n = 7, ends[2], status = 0;
    char part[4096];
    bool asked = false;
    nmk_err e = {0};
    while (*more) args[n++] = *more++;
    if (terminal ? openpty(&ends[0], &ends[1], NULL, NULL, NULL) : pipe(ends)) abort();
    pid_t pid = fork();
    if (!pid) {
        dup2(ends[1], 2), close(ends[0]), close(ends[1]);
        alarm((unsigned)time_limit(20));
        if (fake_install(&e)) _exit(126);
        exit(serve_main(n, (char **)(uintptr_t)args));
    }
    close(ends[1]);
    said->length = 0, nmk_buf_puts(said, "");
    for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0;) {
        nmk_buf_add(said, part, (size_t)got);
        const char *at = strstr(said->data, "http://127.0.0.1:");
        if (at && strchr(at, '\n') && !asked) kill(pid, SIGTERM), asked = true;
    }
    close(ends[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void says(const nmk_buf *said, const char *part, const char *name) {
    check(strstr(said->data, part), name, "no \"%s\" in %s", part, said->data);
}

/* ---------------------------------------------------------------- a GPU that is lost */

enum { LOAD_MS = 500 };

static int32_t slow_model(const nmk_params *p, const nmk_column *column) {
    (void)p;
    usleep(200);
    return (column->token + 1) % NMK_VOCAB;
}

/* This file as the program, so that what executes itself comes here again.  FAKE_FAIL: the GPU's steps never end well;
 * FAKE_GONE: a second start finds none. */
static int program(int argc, char **argv) {
    nmk_err e = {0};
    signal(SIGUSR2, on_user);
    alarm((unsigned)time_limit(60));
    if (open("/dev/null", O_RDONLY) < 0 || fake_install(&e)) return 126; /* a file as a driver might leave it open */
    fake.fail = getenv("FAKE_FAIL") != NULL;
    fake_model = slow_model;
    if (getenv("NMK_RESTARTS")) {
        if (getenv("FAKE_GONE")) fake.device_count = 0;
        usleep(LOAD_MS * 1000); /* weights take their time */
    }
    return serve_main(argc, argv);
}

static const char *const arguments[] = {
    "build/tests/nmc-toy/server/serve_fake_gpu", "--random-weights", "1", "--port", "0", NULL};

static const char short_body[] = "{\"temperature\":0,\"max_tokens\":4,\"prompt\":[5,6,7]}";

static int count_in_log(const server *s, const char *part) {
    nmk_buf text = {0};
    server_log(s, &text);
    int n = count_of(&text, part);
    nmk_buf_free(&text);
    return n;
}

static bool log_becomes(const server *s, const char *part, int count) {
    for (int i = 0; i < time_limit(500) && count_in_log(s, part) < count; i++) usleep(10000);
    return count_in_log(s, part) == count;
}

static int open_files(const server *s) {
    char path[64];
    int n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)s->pid);
    DIR *d = opendir(path);
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* Of a server that is left alone: connections are gone. */
static int quiet_files(const server *s) {
    int n = open_files(s), last = -1;
    for (int i = 0; i < 50 && n != last; i++) last = n, pause_ms(50), n = open_files(s);
    return n;
}

static void check_answer(const server *s, const char *expected, const char *name) {
    reply r = post(s->port, "/v1/completions", short_body);
    check(r.status == 200 && (!*expected || !strcmp(text_at(r.json, "choices.0.text"), expected)), name, "%d %s",
          r.status, r.body);
    reply_free(&r);
}

static void check_fails(const server *s, const char *name) {
    reply r = post(s->port, "/v1/completions", short_body);
    check(r.status == 500 && !strcmp(text_at(r.json, "error.code"), "engine_failed"), name, "%d %s", r.status, r.body);
    reply_free(&r);
}

/* Eight run and two wait when the GPU fails. */
static void lose_ten(const server *s) {
    static const char run[] = "{\"stream\":true,\"temperature\":0,\"max_tokens\":2000,\"prompt\":[5,6,7]}";
    static const char wait[] = "{\"temperature\":0,\"max_tokens\":3,\"prompt\":[9]}";
    int fd[10], failed = 0, sent_back = 0;
    for (int i = 0; i < 8; i++) fd[i] = request_open(s->port, "POST", "/v1/completions", "", run);
    bool loaded = metric_becomes(s->port, "vllm:num_requests_running", 8, 5000);
    for (int i = 8; i < 10; i++) fd[i] = request_open(s->port, "POST", "/v1/completions", "", wait);
    loaded &= metric_becomes(s->port, "vllm:num_requests_waiting", 2, 5000);
    kill(s->pid, SIGUSR2);
    for (int i = 0; i < 10; i++) {
        reply r = reply_read(fd[i]);
        failed += r.status == 200 && strstr(r.body, "\"engine_failed\"") && strstr(r.body, "data: [DONE]");
        sent_back += r.status == 503 && strstr(r.raw.data, "\r\nRetry-After: 1\r\n") &&
                     !strcmp(text_at(r.json, "error.code"), "engine_restarting");
        reply_free(&r);
    }
    check(loaded && failed == 8, "a GPU is lost: what runs fails", "%d of 8", failed);
    check(sent_back == 2, "what waits is told to come again", "%d of 2", sent_back);
}

static void test_restart(void) {
    server s = server_run(arguments, 20);
    char path[64], comm[32] = "", text[300];
    nmk_buf log = {0};
    reply first = post(s.port, "/v1/completions", short_body);
    snprintf(text, sizeof text, "%s", text_at(first.json, "choices.0.text"));
    check(first.status == 200, "a GPU serves", "%d %s", first.status, first.body);
    reply_free(&first);
    int files = quiet_files(&s);
    lose_ten(&s);
    check(log_becomes(&s, " warning starting again restarts=1\n", 1), "it starts again", "it does not");
    bool loading = count_in_log(&s, " info listening ") == 1;
    check_answer(&s, text, "who connects while it loads is answered, with the same text");
    check(loading && count_in_log(&s, " info listening ") == 2, "it did load meanwhile", "it did not");
    reply r = get(s.port, "/health");
    check(r.status == 200, "it is healthy", "%d %s", r.status, r.body);
    reply_free(&r);
    snprintf(path, sizeof path, "/proc/%d/comm", (int)s.pid);
    int fd = open(path, O_RDONLY);
    if (fd < 0 || read(fd, comm, sizeof comm - 1) < 0) comm[0] = 0;
    close(fd);
    check(!strcmp(comm, "nmk-serve\n"), "it has its name", "%s", comm);
    int files_then = quiet_files(&s);
    kill(s.pid, SIGUSR2), pause_ms(50);
    check_fails(&s, "it is lost again");
    check(log_becomes(&s, " warning starting again restarts=1\n", 2), "steps between two losses", "it counts on");
    check_answer(&s, text, "and serves again");
    int files_now = quiet_files(&s);
    check(files_now == files_then && files_now <= files, "no file stays open", "%d, %d, %d", files, files_then,
          files_now);
    server_log(&s, &log);
    snprintf(path, sizeof path, " url=http://127.0.0.1:%d/v1\n", s.port);
    check(count_of(&log, path) == 3, "always at the same port", "%s", log.data);
    check(count_of(&log, " error engine lost reason=") == 2, "the log says so", "%s", log.data);
    int rc = server_end(&s, SIGTERM, 10000);
    check(rc == 0, "ends", "exit %d", rc);
    close(s.log);
    nmk_buf_free(&log);
}

/* Somebody who is slow keeps it from starting again, for a while, in which it is told to end. */
static void test_signal(void) {
    server s = server_run(arguments, 20);
    int half = dial(s.port);
    puts_to(half, "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab");
    kill(s.pid, SIGUSR2), pause_ms(50);
    check_fails(&s, "lost while a request is half read");
    bool lost = log_becomes(&s, " error engine lost reason=", 1);
    uint64_t start_ns = nmk_now_ns();
    int rc = server_end(&s, SIGTERM, 10000);
    double seconds = 1e-9 * (double)(nmk_now_ns() - start_ns);
    check(lost && rc == 0 && count_in_log(&s, "starting again") == 0, "a signal after that ends it", "exit %d", rc);
    check(seconds < time_limit(4), "soon", "%.1f s", seconds);
    close(half), close(s.log);
}

static void test_guard(void) {
    setenv("FAKE_FAIL", "1", 1);
    server s = server_run(arguments, 20);
    /* who asks again at once has the next one */
    for (int i = 0; i < 4; i++) check_fails(&s, i ? "fails again" : "a GPU that fails every step");
    int rc = server_end(&s, 0, 10000);
    nmk_buf log = {0};
    server_log(&s, &log);
    check(rc == 1 && count_of(&log, " warning starting again restarts=") == 3 &&
              strstr(log.data, "nmk-serve: started again 3 times without a step: the engine is lost\n"),
          "is given up after three restarts", "exit %d: %s", rc, log.data);
    close(s.log);
    unsetenv("FAKE_FAIL");

    setenv("FAKE_GONE", "1", 1);
    s = server_run(arguments, 20);
    kill(s.pid, SIGUSR2), pause_ms(50);
    check_fails(&s, "a GPU that is lost");
    rc = server_end(&s, 0, 20000);
    server_log(&s, &log);
    check(rc == 1 && count_of(&log, " error engine not opened reason=") == 3 &&
              strstr(log.data, "nmk-serve: started again 3 times without a step: ") && strstr(log.data, "sees no GPU"),
          "and gone is not replaced by the CPU", "exit %d: %s", rc, log.data);
    close(s.log);
    unsetenv("FAKE_GONE");

    setenv("NMK_LISTEN_FD", "1", 1);
    rc = start((const char *const[]){NULL}, false, &log);
    check(rc == 1 && strstr(log.data, "nmk-serve: descriptor 1 is no socket that listens\n"), "a socket that is none",
          "exit %d: %s", rc, log.data);
    unsetenv("NMK_LISTEN_FD");
    nmk_buf_free(&log);
}

/* Where memory holds no sequence of max_len, a request that leaves its length open still has a place. */
static void test_little_memory(void) {
    const char *more[10];
    memcpy(more, arguments, sizeof arguments);
    more[5] = "--gpu-memory-utilization", more[6] = "0.048", more[7] = "--max-model-len", more[8] = "4096",
    more[9] = NULL;
    server s = server_run(more, 20);
    check(count_in_log(&s, "  note      --max-model-len 4096: the memory for keys and values holds no more than ") == 1,
          "less context than asked for is said", "it is not");
    reply r = get(s.port, "/v1/models");
    int most = int_at(r.json, "data.0.max_model_len");
    check(most >= 64 && most < 4096 && most % 64 == 0, "the context is what the pages hold", "%s", r.body);
    reply_free(&r);
    char *body = xasprintf("{\"temperature\":0,\"max_tokens\":%d,\"prompt\":[5,6,7]}", INT_MAX);
    r = post(s.port, "/v1/completions", body);
    check(r.status == 200 && int_at(r.json, "usage.total_tokens") == most, "an answer that fills it", "%d %s", r.status,
          r.body);
    reply_free(&r), free(body);
    int rc = server_end(&s, SIGTERM, 10000);
    check(rc == 0, "ends with little memory", "exit %d", rc);
    close(s.log);
}

int main(int argc, char **argv) {
    if (argc > 1) return program(argc, argv);
    test_restart();
    test_signal();
    test_guard();
    test_little_memory();
    nmk_buf said = {0};
    int rc = start((const char *const[]){NULL}, false, &said);
    check(rc == 0, "starts and ends", "exit %d: %s", rc, said.data);
    says(&said, "  machine   cuda:0 (Paper GPU), 132 SMs, 1.0 GiB of memory, 4.92 TB/s nominal\n", "the GPU");
    says(&said, "  kernel    sm_90a, compiled by NVRTC 13.0 in ", "the kernel");
    says(&said, ": 168 registers, 0 bytes spilled, ", "what it takes");
    says(&said, " info loading what=\"kernel: compiling with NVRTC ...\"\n", "progress as lines");
    says(&said, "  step      reads 16.88 MB with 1 sequence, 57.15 MB with 8, of 4096 tokens each:\n",
         "a step's bytes");
    /* 4.916736e12 / 16875520, 8 * 4.916736e12 / 57152288 */
    says(&said, "            at most 291353 and 688229 tokens/s at the nominal rate\n", "the bound");

    rc = start((const char *const[]){"--log-format", "json", "--max-num-seqs", "1", NULL}, false, &said);
    check(rc == 0, "starts with a log of JSON", "exit %d: %s", rc, said.data);
    says(&said, "\"sms\":132,\"kernel\":\"compiled\"", "the kernel, as JSON");
    says(&said, "\"nominal_gb_per_s\":4916.736,\"bound_tokens_per_s_one\":291353.", "the bound, as JSON");
    says(&said, "\"sequences\":1,\"step_tokens\":4096,\"step_bytes_one\":16875520,\"step_bytes_full\":16875520",
         "one sequence is all");

    if (has_terminals("starts on a terminal")) {
        rc = start((const char *const[]){NULL}, true, &said);
        check(rc == 0, "starts on a terminal", "exit %d: %s", rc, said.data);
        says(&said, "\rkernel: compiling with NVRTC ...\033[K\rkernel: compiled in ", "one line for the kernel");
        says(&said, "\rweights [==============================] 100 %, 0.0 of 0.0 GiB, ", "a bar for the weights");
    }

    rc = start((const char *const[]){"--gpu-memory-utilization", "0.02", NULL}, false, &said);
    check(rc == 1, "does not start with too small a share", "exit %d: %s", rc, said.data);
    says(&said,
         "nmk-serve: cuda:0 (Paper GPU): the weights of nmc-toy take 0.022 GiB, buffers 0.025 GiB: only 0.020 of 1.000 "
         "GiB may be used\n",
         "why");
    nmk_buf_free(&said);
    return failures != 0;
}
