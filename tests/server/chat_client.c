/* The example client, build/nmk-chat: with nmk-serve and the toy, with answers as other servers shape them, with servers
 * that refuse, talk nonsense, or die. */
#define _GNU_SOURCE
#include "helper.h"
#include "serve_helper.h"

#include <poll.h>
#include <pthread.h>

/* ---------------------------------------------------------------- a server of canned answers */

typedef struct {
    int listener, port, count;
    const char *const *answers;
    int pause_ms;  /* before the connection is closed, unless the client does that */
    nmk_buf asked; /* all that came */
    pthread_t thread;
} canned;

static void *serve_canned(void *arg) {
    canned *c = arg;
    for (int i = 0; i < c->count; i++) {
        int fd = accept(c->listener, NULL, NULL);
        size_t start = c->asked.length, body = 0;
        char part[4096];
        ssize_t n;
        if (fd < 0) return NULL;
        while ((n = read(fd, part, sizeof part)) > 0) {
            nmk_buf_add(&c->asked, part, (size_t)n);
            const char *end = strstr(c->asked.data + start, "\r\n\r\n");
            const char *length = strcasestr(c->asked.data + start, "content-length:");
            if (!end) continue;
            body = length && length < end ? (size_t)atoi(length + 15) : 0;
            if (c->asked.length >= (size_t)(end + 4 - c->asked.data) + body) break;
        }
        put(fd, c->answers[i], strlen(c->answers[i]));
        if (c->pause_ms) poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, c->pause_ms);
        close(fd);
    }
    return NULL;
}

static void canned_start(canned *c, const char *const *answers, int count, int pause_ms) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    *c =
        (canned){.listener = socket(AF_INET, SOCK_STREAM, 0), .count = count, .answers = answers, .pause_ms = pause_ms};
    if (bind(c->listener, (struct sockaddr *)&a, size) || listen(c->listener, 8)) abort();
    getsockname(c->listener, (struct sockaddr *)&a, &size);
    c->port = ntohs(a.sin_port);
    pthread_create(&c->thread, NULL, serve_canned, c);
}

/* All that came is in `asked` then, the caller's to free. */
static void canned_end(canned *c) {
    shutdown(c->listener, SHUT_RDWR);
    pthread_join(c->thread, NULL);
    close(c->listener);
    nmk_buf_puts(&c->asked, "");
}

/* ---------------------------------------------------------------- the client */

typedef struct {
    int rc; /* 1000 + the signal that ended it */
    nmk_buf out, err;
} said;

static void said_free(said *s) { nmk_buf_free(&s->out), nmk_buf_free(&s->err); }

typedef struct {
    const char *input;     /* of stdin */
    bool terminal;         /* stdout is one */
    bool interrupt;        /* SIGINT then */
    void (*after)(void *); /* called when the first bytes of an answer are there */
    void *user;
} manner;

static void collect(int fd, nmk_buf *to) {
    char part[4096];
    ssize_t n = read(fd, part, sizeof part);
    if (n > 0) nmk_buf_add(to, part, (size_t)n);
}

/* flags: NULL-terminated, behind --url. */
static said chat(int port, const char *const *flags, manner how) {
    said s = {0};
    char url[64];
    const char *args[32] = {"build/nmk-chat", "--url", url};
    int n = 3, in[2], out[2], err[2], status;
    snprintf(url, sizeof url, "http://127.0.0.1:%d/v1", port);
    while (*flags) args[n++] = *flags++;
    if (pipe(in) || pipe(err) || (how.terminal ? openpty(&out[0], &out[1], NULL, NULL, NULL) : pipe(out))) abort();
    pid_t pid = fork();
    if (!pid) {
        dup2(in[0], 0), dup2(out[1], 1), dup2(err[1], 2);
        close(in[0]), close(in[1]), close(out[0]), close(out[1]), close(err[0]), close(err[1]);
        unsetenv("OPENAI_API_KEY"), unsetenv("OPENAI_BASE_URL");
        execv(args[0], (char *const *)args);
        _exit(127);
    }
    close(in[0]), close(out[1]), close(err[1]);
    if (how.input && write(in[1], how.input, strlen(how.input)) < 0) abort();
    close(in[1]);
    nmk_buf_puts(&s.out, ""), nmk_buf_puts(&s.err, "");
    uint64_t start = nmk_now_ns();
    bool ended = false;
    while (nmk_now_ns() - start < time_limit_ns(20000)) {
        struct pollfd fds[2] = {{.fd = out[0], .events = POLLIN}, {.fd = err[0], .events = POLLIN}};
        poll(fds, 2, 20);
        if (fds[0].revents) collect(out[0], &s.out);
        if (fds[1].revents) collect(err[0], &s.err);
        if (how.after && s.out.length) how.after(how.user), how.after = NULL;
        if (how.interrupt && s.out.length) kill(pid, SIGINT), how.interrupt = false;
        if (ended && !(fds[0].revents & POLLIN) && !(fds[1].revents & POLLIN)) break;
        if (!ended && waitpid(pid, &status, WNOHANG) == pid) ended = true;
    }
    if (!ended) kill(pid, SIGKILL), waitpid(pid, &status, 0);
    s.rc = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    close(out[0]), close(err[0]);
    return s;
}

/* One canned answer to one question of the model "m". */
static said ask_canned(const char *answer, manner how, nmk_buf *asked) {
    static const char *const flags[] = {"--model", "m", "a question", NULL};
    canned c;
    canned_start(&c, &answer, 1, how.interrupt ? time_limit(2000) : 0);
    said s = chat(c.port, flags, how);
    canned_end(&c);
    if (asked) nmk_buf_add(asked, c.asked.data, c.asked.length);
    nmk_buf_free(&c.asked);
    return s;
}

#define STREAM       "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"
#define JSON(status) "HTTP/1.1 " status "\r\nContent-Type: application/json\r\n\r\n"
#define DELTA(d)     "data: {\"choices\":[{\"index\":0,\"delta\":" d "}]}\n\n"
#define FINISH(f)    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"" f "\"}]}\n\n"
#define DONE         "data: [DONE]\n\n"

static const struct {
    const char *name, *answer;
    int rc;
    const char *out, *err; /* err: a part of it; "" nothing at all */
} shapes[] = {
    {"a stream",
     STREAM DELTA("{\"role\":\"assistant\",\"content\":\"\"}") DELTA("{\"content\":\"Hi \"}")
         DELTA("{\"content\":\"there\"}") FINISH("stop") DONE,
     0, "Hi there\n", ""},
    {"comments, CRLF, event names, a usage chunk, no space after the colon",
     STREAM ": ping\r\n\r\nevent: x\r\ndata:{\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\r\n\r\n" FINISH(
         "stop") "data: {\"choices\":[],\"usage\":{}}\n\n" DONE,
     0, "a\n", ""},
    {"no [DONE], but a finish reason", STREAM DELTA("{\"content\":\"a\"}") FINISH("stop"), 0, "a\n", ""},
    {"[DONE], but no finish reason", STREAM DELTA("{\"content\":\"a\"}") DONE, 0, "a\n", ""},
    {"content null", STREAM DELTA("{\"content\":null}") DELTA("{\"content\":\"a\"}") FINISH("stop") DONE, 0, "a\n", ""},
    {"a cut answer", STREAM DELTA("{\"content\":\"a\"}") FINISH("length") DONE, 0, "a [cut at the token limit]\n", ""},
    {"reasoning is left out of a pipe",
     STREAM DELTA("{\"reasoning_content\":\"hm\"}") DELTA("{\"content\":\"a\"}") FINISH("stop") DONE, 0, "a\n", ""},
    {"tool calls by name",
     STREAM DELTA(
         "{\"tool_calls\":[{\"index\":0,\"id\":\"x\",\"type\":\"function\",\"function\":{\"name\":\"get\","
         "\"arguments\":\"\"}}]}") DELTA("{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{}\"}}]}")
         DELTA("{\"tool_calls\":[{\"index\":1,\"id\":\"y\",\"function\":{\"name\":\"put\",\"arguments\":\"[1]\"}}]}")
             FINISH("tool_calls") DONE,
     0, "calls get {}\ncalls put [1]\n", ""},
    {"a whole answer in place of a stream",
     JSON("200 OK") "{\"choices\":[{\"message\":{\"content\":\"whole\"},\"finish_reason\":\"stop\"}]}", 0, "whole\n",
     ""},
    {"a refusal", JSON("400 Bad Request") "{\"error\":{\"message\":\"no such thing\",\"type\":\"x\"}}", 1, "",
     "/v1/chat/completions: status 400: no such thing\n"},
    {"a flat refusal", JSON("422 Bad") "{\"detail\":\"flat\"}", 1, "", "status 422: flat\n"},
    {"a refusal that is no JSON", "HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\n\r\n<html>oops</html>", 1, "",
     "status 502: <html>oops</html>\n"},
    {"a refusal without a body", "HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", 1, "",
     "status 401: no reason given\n"},
    {"an error in the stream",
     STREAM DELTA("{\"content\":\"a\"}") "data: {\"error\":{\"message\":\"engine died\"}}\n\n", 1, "a\n",
     "nmk-chat: engine died\n"},
    {"an error that is a string", STREAM "data: {\"error\":\"worse\"}\n\n", 1, "", "nmk-chat: worse\n"},
    {"a stream that ends too early", STREAM DELTA("{\"content\":\"a\"}"), 1, "a\n",
     "the stream ended before the answer did\n"},
    {"a connection that breaks",
     "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n" DELTA("{\"content\":\"a\"}"),
     1, "a\n", "broke: "},
    {"an event that is no JSON", STREAM "data: {\"choi\n\n" DONE, 1, "", "an event that is not JSON\n"},
    {"a server of another kind", "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>", 1, "",
     "is this an OpenAI-compatible server?\n"},
    {"no answer at all", "", 1, "", "cannot reach http://127.0.0.1:"},
};

static void test_shapes(void) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        said s = ask_canned(shapes[i].answer, (manner){0}, NULL);
        bool err = *shapes[i].err ? strstr(s.err.data, shapes[i].err) != NULL : !s.err.length;
        check(s.rc == shapes[i].rc && !strcmp(s.out.data, shapes[i].out) && err, shapes[i].name,
              "exit %d, \"%s\", \"%s\"", s.rc, s.out.data, s.err.data);
        said_free(&s);
    }
}

static void test_terminal(void) {
    said s = ask_canned(STREAM DELTA("{\"reasoning\":\"hm\"}")
                            DELTA("{\"content\":\"a\\u001b[31mb\\u009bc\\u0007\\u00e4\"}") FINISH("stop") DONE,
                        (manner){.terminal = true}, NULL);
    check(s.rc == 0 && !strcmp(s.out.data, "\033[2mhm\r\n\033[0ma[31mbc\xc3\xa4\r\n"),
          "reasoning is dimmed, and no answer steers the terminal", "exit %d, \"%s\"", s.rc, s.out.data);
    said_free(&s);
}

static void test_interrupt(void) {
    said s = ask_canned(STREAM DELTA("{\"content\":\"begun\"}"), (manner){.interrupt = true}, NULL);
    check(s.rc == 130 && !strcmp(s.out.data, "begun\n") && !strcmp(s.err.data, "[stopped]\n"), "Ctrl-C stops an answer",
          "exit %d, \"%s\", \"%s\"", s.rc, s.out.data, s.err.data);
    said_free(&s);
}

/* What goes out: the key, the model that was found, the chat so far. */
static void test_requests(void) {
    static const char *const answers[] = {
        JSON("200 OK") "{\"data\":[{\"id\":\"first\"},{\"id\":\"second\"}]}",
        STREAM DELTA("{\"content\":\"one\"}") FINISH("stop") DONE,
        JSON("500 Oops") "{}",
        STREAM DELTA("{\"content\":\"three\"}") FINISH("stop") DONE,
    };
    static const char *const flags[] = {
        "--api-key=secret", "--system", "be \"brief\"", "--temperature", "0.5", "--max-tokens", "7", NULL};
    canned c;
    canned_start(&c, answers, 4, 0);
    said s = chat(c.port, flags, (manner){.input = "q1\nq2\n\nq3\n"});
    canned_end(&c);
    check(s.rc == 0 && !strcmp(s.out.data, "one\nthree\n") && strstr(s.err.data, "status 500: "),
          "a chat goes on after a failure", "exit %d, \"%s\", \"%s\"", s.rc, s.out.data, s.err.data);
    check(strstr(c.asked.data, "GET /v1/models HTTP/1.1\r\n") && count_of(&c.asked, "Bearer secret\r\n") == 4,
          "the key goes with every request", "%s", c.asked.data);
    check(strstr(c.asked.data,
                 "{\"model\":\"first\",\"stream\":true,\"temperature\":0.5,\"max_tokens\":7,\"messages\":[{\"role\":"
                 "\"system\",\"content\":\"be \\\"brief\\\"\"},{\"role\":\"user\",\"content\":\"q1\"},{\"role\":"
                 "\"assistant\",\"content\":\"one\"},{\"role\":\"user\",\"content\":\"q3\"}]}"),
          "the chat so far, without what failed", "%s", c.asked.data);
    said_free(&s), nmk_buf_free(&c.asked);
}

static void test_flags(void) {
    static const struct {
        const char *name, *flags[4], *err;
    } bad[] = {
        {"an unknown flag", {"--modle", "x"}, "unknown flag --modle"},
        {"a flag without its value", {"--model"}, "--model needs a value"},
        {"a temperature that is none", {"--temperature", "warm"}, "--temperature warm: expected a number from 0"},
        {"tokens that are none", {"--max-tokens", "1.5"}, "--max-tokens 1.5: expected a whole number from 1"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        said s = chat(9, bad[i].flags, (manner){0});
        check(s.rc == 2 && strstr(s.err.data, bad[i].err), bad[i].name, "exit %d, \"%s\"", s.rc, s.err.data);
        said_free(&s);
    }
    said s = chat(9, (const char *const[]){"--help", NULL}, (manner){0});
    check(s.rc == 0 && strstr(s.out.data, "usage: nmk-chat") && !s.err.length, "help of nmk-chat", "exit %d", s.rc);
    said_free(&s);
    s = chat(9, (const char *const[]){"--url=ftp://127.0.0.1/v1", "hi", NULL}, (manner){0});
    check(s.rc == 1 && strstr(s.err.data, "cannot reach ftp://"), "an address of another kind", "exit %d, %s", s.rc,
          s.err.data);
    said_free(&s);
}

/* ---------------------------------------------------------------- nmk-serve */

static void kill_server(void *user) {
    const server *s = user;
    kill(s->pid, SIGKILL);
}

static void test_serve(void) {
    const char *flags[] = {"--checkpoint", "examples/nmc-toy", "--api-key", "sesame", NULL};
    server serving = server_start(flags);
    said s = chat(serving.port,
                  (const char *const[]){"--api-key", "sesame", "--temperature", "0", "What", "is", "17 + 25?", NULL},
                  (manner){0});
    check(s.rc == 0 && !strcmp(s.out.data, "42\n") && !s.err.length, "the toy answers", "exit %d, \"%s\", \"%s\"", s.rc,
          s.out.data, s.err.data);
    said_free(&s);
    s = chat(serving.port, (const char *const[]){"--api-key", "sesame", "--temperature", "0", NULL},
             (manner){.input = "What is 7 times 8?\n/new\nWhat is 17 + 25?\n"});
    check(s.rc == 0 && !strcmp(s.out.data, "56\n42\n"), "two questions by stdin", "exit %d, \"%s\", \"%s\"", s.rc,
          s.out.data, s.err.data);
    said_free(&s);
    s = chat(serving.port, (const char *const[]){"hi", NULL}, (manner){0});
    check(s.rc == 1 && strstr(s.err.data, "/v1/models: status 401: "), "without the key", "exit %d, \"%s\"", s.rc,
          s.err.data);
    said_free(&s);
    s = chat(serving.port, (const char *const[]){"--api-key=sesame", "--model", "other", "hi", NULL}, (manner){0});
    check(s.rc == 1 && strstr(s.err.data, "status 404: The model 'other' does not exist."), "a model that is not there",
          "exit %d, \"%s\"", s.rc, s.err.data);
    said_free(&s);
    if (has_terminals("a server that dies in the middle")) { /* which the reasoning reaches at once */
        s = chat(serving.port,
                 (const char *const[]){"--api-key=sesame", "--temperature=0",
                                       "Write a Python function that checks if a number is prime.", NULL},
                 (manner){.after = kill_server, .user = &serving, .terminal = true});
        check(s.rc == 1 && (strstr(s.err.data, "broke: ") || strstr(s.err.data, "ended before the answer did")),
              "a server that dies in the middle", "exit %d, \"%s\", \"%s\"", s.rc, s.out.data, s.err.data);
        said_free(&s);
    } else {
        kill_server(&serving);
    }
    waitpid(serving.pid, NULL, 0);
    s = chat(serving.port, (const char *const[]){"hi", NULL}, (manner){0});
    check(s.rc == 1 && strstr(s.err.data, "cannot reach http://"), "no server", "exit %d, \"%s\"", s.rc, s.err.data);
    said_free(&s);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    test_flags();
    test_shapes();
    if (has_terminals("the client on a terminal")) test_terminal();
    test_interrupt();
    test_requests();
    test_serve();
    return failures != 0;
}
