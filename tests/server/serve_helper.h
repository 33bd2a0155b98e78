/* For the tests of nmk-serve: starts the real program with the toy on the CPU, and talks to it as a client does. */
#ifndef NMK_TESTS_SERVE_HELPER_H
#define NMK_TESTS_SERVE_HELPER_H

#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "http_helper.h"
#include "json.h"

typedef struct {
    pid_t pid;
    int port, log; /* log: the file of its stderr */
} server;

/* Whether there are terminals for a test to make; some containers have no /dev/pts. */
__attribute__((unused)) static bool has_terminals(const char *name) {
    int ends[2];
    if (openpty(&ends[0], &ends[1], NULL, NULL, NULL)) {
        printf("skip - %s: no terminals here\n", name);
        fflush(stdout); /* not once more by a child */
        return false;
    }
    close(ends[0]), close(ends[1]);
    return true;
}

__attribute__((unused)) static void server_log(const server *s, nmk_buf *text) {
    char part[4096];
    ssize_t n;
    off_t at = 0;
    text->length = 0;
    nmk_buf_puts(text, "");
    while ((n = pread(s->log, part, sizeof part, at)) > 0) nmk_buf_add(text, part, (size_t)n), at += n;
}

/* Starts it with the arguments, the program's path first, and waits until it listens. */
__attribute__((unused)) static server server_run(const char *const *args, int seconds) {
    char path[] = "/tmp/nmk-serve-XXXXXX";
    server s = {.log = mkstemp(path)};
    nmk_buf text = {0};
    unlink(path);
    s.pid = fork();
    if (!s.pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that gives up leaves nothing behind */
        dup2(s.log, 2);
        execv(args[0], (char *const *)(uintptr_t)args);
        _exit(127);
    }
    for (int i = 0; i < time_limit(seconds * 100) && !s.port; i++) {
        usleep(10000);
        server_log(&s, &text);
        const char *at = strstr(text.data, "http://127.0.0.1:");
        if (at && strchr(at, '\n')) s.port = atoi(at + strlen("http://127.0.0.1:"));
        if (waitpid(s.pid, NULL, WNOHANG)) break;
    }
    if (!s.port) {
        printf("not ok - nmk-serve does not start: %s\n", text.data);
        exit(1);
    }
    nmk_buf_free(&text);
    return s;
}

/* NULL-terminated flags besides --device cpu --port 0. */
__attribute__((unused)) static server server_start(const char *const *flags) {
    const char *args[32] = {"build/nmc-toy/nmk-serve", "--device", "cpu", "--port", "0"};
    int n = 5;
    while (*flags) args[n++] = *flags++;
    return server_run(args, 20);
}

/* Its exit status after the signal (0: none is sent), or -1 when it does not end in time. */
__attribute__((unused)) static int server_end(const server *s, int number, int ms) {
    int status;
    if (number) kill(s->pid, number);
    for (int i = 0; i < time_limit(ms) / 5; i++) {
        if (waitpid(s->pid, &status, WNOHANG) == s->pid) return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
        usleep(5000);
    }
    kill(s->pid, SIGKILL);
    waitpid(s->pid, &status, 0);
    return -1;
}

/* ---------------------------------------------------------------- one request */

/* HTTP/1.0: the answer's body ends with the connection, streams are not in chunks.  field: a header line or "". */
__attribute__((unused)) static int request_open(int port, const char *method, const char *path, const char *field,
                                                const char *body) {
    int fd = dial(port);
    nmk_buf text = {0};
    nmk_buf_printf(&text, "%s %s HTTP/1.0\r\nContent-Length: %zu\r\n%s\r\n", method, path, strlen(body), field);
    nmk_buf_puts(&text, body);
    put(fd, text.data, text.length);
    nmk_buf_free(&text);
    return fd;
}

typedef struct {
    int status;
    nmk_buf raw;
    const char *body;
    struct json_object *json; /* NULL: none */
} reply;

__attribute__((unused)) static void reply_free(reply *r) {
    nmk_buf_free(&r->raw);
    json_object_put(r->json);
    *r = (reply){0};
}

__attribute__((unused)) static reply reply_read(int fd) {
    reply r = {0};
    nmk_err e;
    nmk_buf_puts(&r.raw, "");
    get_all(fd, &r.raw, 20000);
    close(fd);
    if (!r.raw.length) return r.body = "", r;
    sscanf(r.raw.data, "HTTP/%*s %d", &r.status);
    r.body = strstr(r.raw.data, "\r\n\r\n");
    r.body = r.body ? r.body + 4 : "";
    if (*r.body == '{') r.json = nmk_json_parse(r.body, strlen(r.body), &e);
    return r;
}

__attribute__((unused)) static reply get(int port, const char *path) {
    return reply_read(request_open(port, "GET", path, "", ""));
}
__attribute__((unused)) static reply post(int port, const char *path, const char *body) {
    return reply_read(request_open(port, "POST", path, "", body));
}

/* What is at "choices.0.message.content"; NULL if there is nothing. */
__attribute__((unused)) static struct json_object *at(struct json_object *v, const char *path) {
    char part[64];
    while (v && *path) {
        size_t n = strcspn(path, ".");
        snprintf(part, sizeof part, "%.*s", (int)n, path);
        path += n + (path[n] == '.');
        if (json_object_is_type(v, json_type_array))
            v = json_object_array_get_idx(v, (size_t)atoi(part));
        else
            v = nmk_json_get(v, part);
    }
    return v;
}
__attribute__((unused)) static const char *text_at(struct json_object *v, const char *path) {
    struct json_object *s = at(v, path);
    return json_object_is_type(s, json_type_string) ? json_object_get_string(s) : "";
}
__attribute__((unused)) static int int_at(struct json_object *v, const char *path) {
    struct json_object *s = at(v, path);
    return s ? json_object_get_int(s) : -1;
}

/* ---------------------------------------------------------------- streams */

/* A stream put together, and what was wrong with its shape ("": nothing). */
typedef struct {
    nmk_buf text, reasoning, arguments; /* arguments: of all calls, with a blank between */
    char ended[32], wrong[200], head[200];
    int chunks, calls, usage_tokens; /* usage_tokens: -1: no usage chunk */
    bool done;
} told;

__attribute__((unused)) static void told_free(told *t) {
    nmk_buf_free(&t->text), nmk_buf_free(&t->reasoning), nmk_buf_free(&t->arguments);
    *t = (told){0};
}

__attribute__((unused)) static void wrong(told *t, const char *what, const char *event) {
    if (!t->wrong[0]) snprintf(t->wrong, sizeof t->wrong, "%s: %.120s", what, event);
}

/* What every chunk has, the same in all of them. */
__attribute__((unused)) static bool told_head(struct json_object *o, bool chat, char head[200]) {
    char is[200];
    snprintf(is, sizeof is, "%s %s %d", text_at(o, "object"), text_at(o, "model"), int_at(o, "created"));
    if (!head[0]) snprintf(head, 200, "%s", is);
    return !strcmp(is, head) && *text_at(o, "model") && int_at(o, "created") > 0 &&
           !strcmp(text_at(o, "object"), chat ? "chat.completion.chunk" : "text_completion");
}

/* A call's first delta has index, id, type and name, the others only text of its arguments. */
__attribute__((unused)) static void told_call(told *t, struct json_object *v, const char *data) {
    struct json_object *calls = at(v, "choices.0.delta.tool_calls"), *call = at(calls, "0");
    if (!calls) return;
    struct json_object *arguments = at(call, "function.arguments");
    bool named = at(call, "id") || at(call, "type") || at(call, "function.name");
    if (json_object_array_length(calls) != 1 || !json_object_is_type(arguments, json_type_string))
        wrong(t, "a call's shape", data);
    else if (named && (int_at(call, "index") != t->calls || strncmp(text_at(call, "id"), "call_", 5) ||
                       strcmp(text_at(call, "type"), "function") || !*text_at(call, "function.name") ||
                       *text_at(call, "function.arguments")))
        wrong(t, "a call's first delta", data);
    else if (!named && (int_at(call, "index") != t->calls - 1 || !*text_at(call, "function.arguments")))
        wrong(t, "a call's later delta", data);
    if (named && t->calls++) nmk_buf_puts(&t->arguments, " ");
    nmk_buf_puts(&t->arguments, text_at(call, "function.arguments"));
}

__attribute__((unused)) static void told_event(told *t, const char *data, const char *id, bool chat) {
    nmk_err e;
    struct json_object *v = nmk_json_parse(data, strlen(data), &e), *choices = nmk_json_get(v, "choices");
    if (t->done) wrong(t, "after [DONE]", data);
    if (!v || !json_object_is_type(choices, json_type_array)) {
        wrong(t, "no choices", data);
    } else if (strcmp(text_at(v, "id"), id)) {
        wrong(t, "another id", data);
    } else if (!told_head(v, chat, t->head)) {
        wrong(t, "its head", data);
    } else if (!json_object_array_length(choices)) {
        if (!t->ended[0] || t->usage_tokens >= 0) wrong(t, "usage at the wrong place", data);
        t->usage_tokens = int_at(v, "usage.completion_tokens");
    } else {
        const char *text = text_at(v, chat ? "choices.0.delta.content" : "choices.0.text");
        const char *reasoning = text_at(v, "choices.0.delta.reasoning_content");
        const char *ended = text_at(v, "choices.0.finish_reason");
        bool role = *text_at(v, "choices.0.delta.role"), call = at(v, "choices.0.delta.tool_calls");
        if (t->ended[0]) wrong(t, "after the finish", data);
        if (chat && role != !t->chunks) wrong(t, "role", data);
        if (role && strcmp(text_at(v, "choices.0.delta.role"), "assistant")) wrong(t, "another role", data);
        if (!role && !*text && !*reasoning && !*ended && !call) wrong(t, "says nothing", data);
        if (json_object_array_length(choices) != 1 || int_at(v, "choices.0.index") != 0) wrong(t, "its choice", data);
        if (nmk_json_get(v, "usage")) wrong(t, "usage beside a choice", data);
        if (strcmp(reasoning, text_at(v, "choices.0.delta.reasoning"))) wrong(t, "reasoning by its other name", data);
        if (*ended && strcmp(ended, "stop") && strcmp(ended, "length") && strcmp(ended, "tool_calls"))
            wrong(t, "a finish nobody knows", data);
        told_call(t, v, data);
        nmk_buf_puts(&t->text, text), nmk_buf_puts(&t->reasoning, reasoning);
        snprintf(t->ended, sizeof t->ended, "%s", ended);
        t->chunks++;
    }
    json_object_put(v);
}

/* Takes the events of a stream's answer apart. */
__attribute__((unused)) static told told_read(const reply *r, bool chat) {
    told t = {.usage_tokens = -1};
    char id[64] = "";
    nmk_buf_puts(&t.text, ""), nmk_buf_puts(&t.reasoning, ""), nmk_buf_puts(&t.arguments, "");
    if (!strstr(r->raw.data, "text/event-stream")) wrong(&t, "no event stream", r->raw.data);
    for (const char *p = r->body; *p;) {
        const char *end = strstr(p, "\n\n");
        if (!end) {
            wrong(&t, "half an event", p);
            break;
        }
        char *data = xasprintf("%.*s", (int)(end - p), p);
        if (data[0] == ':') {
        } else if (strncmp(data, "data: ", 6)) {
            wrong(&t, "no data", data);
        } else if (!strcmp(data + 6, "[DONE]")) {
            t.done = true;
        } else {
            if (!id[0]) sscanf(data, "data: {\"id\":\"%60[^\"]", id);
            told_event(&t, data + 6, id, chat);
        }
        free(data);
        p = end + 2;
    }
    if (!t.done) wrong(&t, "no [DONE]", "");
    return t;
}

/* The value of a metric without further labels, or -1. */
__attribute__((unused)) static double metric_in(const reply *r, const char *name) {
    char *line = xasprintf("\n%s{", name);
    const char *found = strstr(r->body, line), *value = found ? strchr(found, '}') : NULL;
    double v = value ? atof(value + 1) : -1;
    free(line);
    return v;
}
__attribute__((unused)) static double metric(int port, const char *name) {
    reply r = get(port, "/metrics");
    double v = metric_in(&r, name);
    reply_free(&r);
    return v;
}

__attribute__((unused)) static bool metric_becomes(int port, const char *name, double wanted, int ms) {
    for (int i = 0; i < time_limit(ms) / 20; i++) {
        if (metric(port, name) == wanted) return true;
        usleep(20000);
    }
    return metric(port, name) == wanted;
}

#endif
