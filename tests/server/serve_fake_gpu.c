/* nmk-serve on a GPU made up of host memory: the start as one with a GPU reads it, as text, as JSON and on a terminal, and
 * what it says when the weights do not fit. */
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

/* In the program: the GPU begins or ceases to fail. */
static void on_user(int number) { fake.fail = number == SIGUSR1; }

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
        alarm(20);
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

static bool has_line(const server *s, const char *part) {
    nmk_buf text = {0};
    bool found = false;
    for (int i = 0; i < 200 && !found; i++) {
        server_log(s, &text);
        found = strstr(text.data, part) != NULL;
        if (!found) usleep(20000);
    }
    nmk_buf_free(&text);
    return found;
}

/* The program with random weights, as soon as it listens. */
static server serve_on_gpu(const char *const *more) {
    const char *args[16] = {"nmk-serve", "--random-weights", "1", "--device", "cuda:0", "--port", "0"};
    char path[] = "/tmp/nmk-serve-XXXXXX";
    server s = {.log = mkstemp(path)};
    nmk_err e = {0};
    int n = 7;
    while (*more) args[n++] = *more++;
    unlink(path);
    s.pid = fork();
    if (!s.pid) {
        dup2(s.log, 2);
        signal(SIGUSR1, on_user), signal(SIGUSR2, on_user);
        alarm(60);
        if (fake_install(&e)) _exit(126);
        exit(serve_main(n, (char **)(uintptr_t)args));
    }
    nmk_buf text = {0};
    has_line(&s, "http://127.0.0.1:");
    server_log(&s, &text);
    const char *url = strstr(text.data, "http://127.0.0.1:");
    s.port = url ? atoi(url + strlen("http://127.0.0.1:")) : 0;
    nmk_buf_free(&text);
    return s;
}

/* Where memory holds no sequence of max_len, a request that leaves its length open still has a place. */
static void test_little_memory(void) {
    server s = serve_on_gpu((const char *const[]){"--gpu-memory-utilization", "0.03", "--max-model-len", "4096", NULL});
    check(has_line(&s, "  note      --max-model-len 4096: the memory for keys and values holds no more than "),
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
}

/* On a terminal others write meanwhile, so the second opening draws no bar. */
static void test_reopen_terminal(void) {
    int ends[2], status = 0;
    char part[4096];
    nmk_buf said = {0};
    nmk_err e = {0};
    if (openpty(&ends[0], &ends[1], NULL, NULL, NULL)) abort();
    pid_t pid = fork();
    if (!pid) {
        settings s = {.options = {.random_weights = true, .device = "cuda:0"}, .log_level = NMK_LOG_INFO};
        nmk_engine *engine = NULL;
        dup2(ends[1], 2), close(ends[0]), close(ends[1]);
        alarm(20);
        if (fake_install(&e) || reopen(&s, &engine, &e)) _exit(126);
        nmk_engine_close(engine);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0;) nmk_buf_add(&said, part, (size_t)got);
    close(ends[0]);
    waitpid(pid, &status, 0);
    check(status == 0 && strstr(said.data, "info loading what=\"kernel: ") && !strstr(said.data, "\033[K"),
          "on a terminal the log says how it is opened again", "status %d: %s", status, said.data);
    nmk_buf_free(&said);
}

/* A GPU that fails: what runs fails, and the next request has another engine. */
static void test_reopen(void) {
    static const char body[] = "{\"temperature\":0,\"max_tokens\":4,\"prompt\":[5,6,7]}";
    server s = serve_on_gpu((const char *const[]){NULL});
    nmk_buf text = {0};
    reply good = post(s.port, "/v1/completions", body);
    check(good.status == 200, "a GPU serves", "%d %s", good.status, good.body);
    reply_free(&good);
    kill(s.pid, SIGUSR1), usleep(100000);
    reply bad = post(s.port, "/v1/completions", body);
    check(bad.status == 500, "a GPU that fails", "%d %s", bad.status, bad.body);
    reply_free(&bad);
    kill(s.pid, SIGUSR2);
    check(has_line(&s, " error engine failed reason=") && has_line(&s, " error engine lost: opening it again\n") &&
              has_line(&s, " warning engine opened again\n"),
          "says so, and opens it again", "see %d", s.port);
    good = post(s.port, "/v1/completions", body);
    check(good.status == 200, "serves again", "%d %s", good.status, good.body);
    reply_free(&good);
    int rc = server_end(&s, SIGTERM, 10000);
    server_log(&s, &text);
    check(rc == 0, "ends", "exit %d: %s", rc, text.data);
    nmk_buf_free(&text);
}

int main(void) {
    test_reopen();
    test_reopen_terminal();
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
         "nmk-serve: cuda:0 (Paper GPU): the weights of nmc-toy take 0.022 GiB, buffers 0.005 GiB: only 0.020 of 1.000 "
         "GiB may be used\n",
         "why");
    nmk_buf_free(&said);
    return failures != 0;
}
