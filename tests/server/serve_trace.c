/* nmk-serve --trace with the toy: requests and steps in the file, tasks of every SM on demand, by a signal and by the
 * endpoint; nothing of it without the flag. */
#define _GNU_SOURCE
#include "helper.h"
#include "serve_helper.h"

static const char key_line[] = "Authorization: Bearer sesame-open\r\n";
static const char long_answer[] =
    "{\"prompt\":\"def add(a, b):\",\"max_tokens\":2000,\"ignore_eos\":true,\"temperature\":0,\"n\":2}";

static char folder[] = "/tmp/nmk-serve-trace-XXXXXX";

static struct json_object *list_of(struct json_object *root) {
    struct json_object *list = nmk_json_get(root, "traceEvents");
    return json_object_is_type(list, json_type_array) ? list : NULL;
}

static const char *word(struct json_object *o, const char *key) {
    struct json_object *v = nmk_json_get(o, key);
    return v ? json_object_get_string(v) : "";
}

/* Events with that phase whose name begins so. */
static int count(struct json_object *root, const char *phase, const char *name) {
    struct json_object *list = list_of(root);
    int n = 0;
    for (size_t i = 0; list && i < json_object_array_length(list); i++) {
        struct json_object *o = json_object_array_get_idx(list, i);
        n += !strcmp(word(o, "ph"), phase) && !strncmp(word(o, "name"), name, strlen(name));
    }
    return n;
}

static struct json_object *read_file(const char *path) {
    nmk_err e;
    return nmk_json_read(path, 256 << 20, &e);
}

/* The traces of steps that a program of this model makes: all SMs, tasks in order, each within its step. */
static void check_tasks(struct json_object *root, int steps, const char *name) {
    enum { MOST_SMS = 1024 };
    struct json_object *list = list_of(root);
    bool seen[MOST_SMS] = {0}, ordered = true;
    double ends[3 * MOST_SMS + 1] = {0}, first = 1e30, last = 0, from = 1e30, to = 0;
    int sms = 0, others = 0;
    for (size_t i = 0; list && i < json_object_array_length(list); i++) {
        struct json_object *o = json_object_array_get_idx(list, i);
        double at = json_object_get_double(nmk_json_get(o, "ts"));
        double length = json_object_get_double(nmk_json_get(o, "dur"));
        int track = json_object_get_int(nmk_json_get(o, "tid")), sm = (track - 1) / 3;
        if (strcmp(word(o, "ph"), "X") != 0) continue;
        if (json_object_get_int(nmk_json_get(o, "pid")) == 1) {
            if (at < first) first = at;
            if (at + length > last) last = at + length;
            continue;
        }
        if (sm < 0 || sm >= MOST_SMS) continue;
        if (!seen[sm]) seen[sm] = true, sms++;
        if (at < from) from = at;
        if (at + length > to) to = at + length;
        others += track % 3 != 1;
        if (!strcmp(word(o, "name"), "wait")) continue; /* lies in the task before it */
        ordered &= at >= ends[track] - 0.02 && length > 0;
        ends[track] = at + length;
    }
    check(count(root, "X", "step") == steps, name, "%d steps, expected %d", count(root, "X", "step"), steps);
    check(sms == 132, "every SM is there", "%d", sms);
    check(ordered, "an SM's tasks follow each other", "they do not");
    check(from >= first - 100 && to <= last + 100, "they lie in their steps", "%.0f to %.0f, steps %.0f to %.0f", from,
          to, first, last);
    check(others > 0, "storers and helpers too", "none");
    check(count(root, "X", "qkv") > 0 && count(root, "X", "expert_up") > 0 && count(root, "X", "wait") > 0,
          "tasks by their names, and waits", "they lack");
}

static void test_on(void) {
    char *path = xasprintf("%s/trace.json", folder), *tasks = xasprintf("%s/trace.json.tasks.json", folder);
    const char *flags[] = {"--checkpoint", "examples/nmc-toy", "--trace", path, "--api-key", "sesame-open", NULL};
    server s = server_start(flags);
    reply r = post(s.port, "/debug/trace", "");
    check(r.status == 401, "the endpoint needs the key", "status %d", r.status);
    reply_free(&r);
    r = reply_read(request_open(s.port, "POST", "/debug/trace", key_line, ""));
    check(r.status == 409 && strstr(r.body, "no sequence runs"), "nothing runs: 409", "%d %s", r.status, r.body);
    reply_free(&r);
    static const char *const bad[] = {"steps=0", "steps=9", "steps=x", "steps=2&x=1", "n=1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *where = xasprintf("/debug/trace?%s", bad[i]);
        r = reply_read(request_open(s.port, "POST", where, key_line, ""));
        check(r.status == 400 && strstr(r.body, "1 to 8"), bad[i], "%d %s", r.status, r.body);
        reply_free(&r), free(where);
    }

    /* a signal waits for the next request */
    kill(s.pid, SIGUSR1);
    usleep(100000);
    int running = request_open(s.port, "POST", "/v1/completions", key_line, long_answer);
    struct json_object *root = NULL;
    for (int i = 0; i < time_limit(1000) && !(root = read_file(tasks)); i++) usleep(20000);
    check_tasks(root, 2, "SIGUSR1 writes the tasks of two steps");
    json_object_put(root);
    r = reply_read(request_open(s.port, "POST", "/debug/trace?steps=3", key_line, ""));
    check(r.status == 200, "the endpoint answers while something runs", "%d %.300s", r.status, r.body);
    check_tasks(r.json, 3, "with as many steps as asked for");
    reply_free(&r);
    close(running);
    check(metric_becomes(s.port, "vllm:num_requests_running", 0, 5000), "its request may leave", "it does not");

    /* a client that gives up, and a trace that nobody waits for any more */
    running = request_open(s.port, "POST", "/v1/completions", key_line, long_answer);
    for (int i = 0; i < time_limit(500) && metric(s.port, "vllm:num_requests_running") < 1; i++) usleep(2000);
    int gone = request_open(s.port, "POST", "/debug/trace", key_line, "");
    usleep(1000);
    close(gone), close(running);
    check(metric_becomes(s.port, "vllm:num_requests_running", 0, 5000), "a client that leaves frees its rows", "not");
    r = reply_read(request_open(s.port, "POST", "/v1/completions", key_line, "{\"prompt\":\"a\",\"max_tokens\":3}"));
    check(r.status == 200, "and others are served", "%d", r.status);
    reply_free(&r);

    check(server_end(&s, SIGTERM, 10000) == 0, "it drains", "it does not end");
    root = read_file(path);
    check(list_of(root), "the file is a whole trace", "it is not");
    check(count(root, "b", "request") == 5 && count(root, "e", "request") == 5, "five answers", "%d begin, %d end",
          count(root, "b", "request"), count(root, "e", "request"));
    check(count(root, "b", "prefill") >= 3 && count(root, "e", "decode") >= 3 && count(root, "b", "queued") == 5,
          "their phases", "%d, %d, %d", count(root, "b", "prefill"), count(root, "e", "decode"),
          count(root, "b", "queued"));
    check(count(root, "X", "decode") >= 5 && count(root, "C", "sequences") >= 5, "steps", "%d",
          count(root, "X", "decode"));
    const char *text = json_object_to_json_string(root);
    check(!strstr(text, "add(") && !strstr(text, "sesame"), "no prompt, no key", "there is one");
    json_object_put(root);
    free(path), free(tasks);
}

static void test_off(void) {
    const char *flags[] = {"--checkpoint", "examples/nmc-toy", NULL};
    server s = server_start(flags);
    reply r = post(s.port, "/debug/trace", "");
    check(r.status == 404 && strstr(r.body, "--trace FILE"), "off: 404, and how to have it", "%d %s", r.status, r.body);
    reply_free(&r);
    kill(s.pid, SIGUSR1);
    r = post(s.port, "/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":3}");
    check(r.status == 200, "off: SIGUSR1 does nothing", "%d", r.status);
    reply_free(&r);
    check(server_end(&s, SIGTERM, 10000) == 0, "off: it drains", "it does not end");
}

int main(void) {
    if (!mkdtemp(folder)) return 2;
    test_on(), test_off();
    char *command = xasprintf("rm -r %s", folder);
    int rc = system(command);
    free(command);
    return rc || failures;
}
