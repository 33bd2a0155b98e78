/* server/trace.c: the file is whole JSON at any time, holds what was added, and is bounded. */
#include "trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "json.h"

static char folder[] = "/tmp/nmk-trace-XXXXXX";

static char *in_folder(const char *name) { return xasprintf("%s/%s", folder, name); }

/* How many events of that name a file has; -1: it is no whole trace. */
static int events(const char *path, const char *name) {
    nmk_err e;
    struct json_object *root = nmk_json_read(path, 64 << 20, &e), *list = nmk_json_get(root, "traceEvents");
    int n = -1;
    if (json_object_is_type(list, json_type_array)) {
        n = 0;
        for (size_t i = 0; i < json_object_array_length(list); i++) {
            struct json_object *v = nmk_json_get(json_object_array_get_idx(list, i), "name");
            n += v && !strcmp(json_object_get_string(v), name);
        }
    }
    json_object_put(root);
    return n;
}

static nmk_batch_step step_of(uint64_t number) {
    return (nmk_batch_step){.number = number,
                            .began_ns = 1000 * number + 1,
                            .ended_ns = 1000 * number + 901,
                            .machine_ms = 0.0009,
                            .decoded = 3,
                            .fed = number % 2 ? 4 : 0,
                            .tokens = 3,
                            .running = 4,
                            .waiting = 1,
                            .kv_used = 0.25};
}

static void grows(void) {
    nmk_trace *t = NULL;
    nmk_err e = {0};
    char *path = in_folder("a.json");
    check(nmk_trace_open(&t, path, 1 << 20, "a \"name\"", &e) == 0, "opens", "%s", e.text);
    check(events(path, "process_name") == 1, "an empty trace is whole", "it is not");
    for (uint64_t i = 0; i < 10; i++) {
        nmk_batch_step s = step_of(i);
        nmk_trace_add_step(t, &s);
        nmk_trace_flush(t);
        if (events(path, "decode") + events(path, "decode and prefill") == (int)i + 1) continue;
        check(false, "whole after each step", "after step %d", (int)i);
    }
    nmk_trace_request r = {.id = 7,
                           .endpoint = "/v1/completions",
                           .end = "stop",
                           .arrived_ns = 10,
                           .queued_ns = 20,
                           .started_ns = 30,
                           .first_ns = 40,
                           .last_ns = 50,
                           .ended_ns = 60};
    nmk_trace_add_request(t, &r);
    r.id = 8, r.index = 1, r.started_ns = r.first_ns = r.last_ns = 0, r.end = "abort";
    nmk_trace_add_request(t, &r);
    nmk_trace_close(t);
    check(events(path, "request 7") == 2, "a request begins and ends", "%d", events(path, "request 7"));
    check(events(path, "prefill") == 2 && events(path, "queued") == 4, "with its phases", "%d and %d",
          events(path, "prefill"), events(path, "queued"));
    check(events(path, "request 8, answer 2") == 2, "one that never ran has waited", "it is not there");

    check(nmk_trace_open(&t, path, 1 << 20, "b", &e) == 0, "opens again", "%s", e.text);
    nmk_trace_close(t);
    char *older = in_folder("a.json.1");
    check(events(older, "request 7") == 2 && events(path, "request 7") == 0, "the file that was there is kept", "no");
    nmk_trace_add_step(NULL, &(nmk_batch_step){0}), nmk_trace_add_request(NULL, &r), nmk_trace_close(NULL);
    free(path), free(older);
}

static void is_bounded(void) {
    enum { STEPS = 2000, MOST = 64 << 10 };
    nmk_trace *t = NULL;
    nmk_err e = {0};
    struct stat s[2];
    char *path = in_folder("b.json"), *older = in_folder("b.json.1");
    check(nmk_trace_open(&t, path, MOST, "b", &e) == 0, "opens", "%s", e.text);
    for (uint64_t i = 0; i < STEPS; i++) {
        nmk_batch_step step = step_of(i);
        nmk_trace_add_step(t, &step);
        if (i % 16 == 0) nmk_trace_flush(t);
    }
    nmk_trace_close(t);
    check(!stat(path, &s[0]) && !stat(older, &s[1]) && s[0].st_size <= MOST && s[1].st_size <= MOST &&
              s[1].st_size > MOST / 2,
          "two files of at most the limit", "%ld and %ld bytes", (long)s[0].st_size, (long)s[1].st_size);
    check(events(path, "sequences") > 0 && events(older, "sequences") > 0, "both are whole", "they are not");
    free(path), free(older);
}

static void refuses(void) {
    nmk_trace *t = NULL;
    nmk_err e = {0};
    char *path = in_folder("none/a.json"), *pipe = in_folder("pipe");
    check(nmk_trace_open(&t, path, 1 << 20, "a", &e) && strstr(e.text, path), "a folder that is not there", "%s",
          e.text);
    check(!mkfifo(pipe, 0600) && nmk_trace_open(&t, pipe, 1 << 20, "a", &e) && strstr(e.text, "not a regular file"),
          "a pipe", "%s", e.text);
    check(access(pipe, F_OK) == 0 && !t, "which stays", "it is gone");
    free(path), free(pipe);
}

static void writes_tasks(void) {
    nmk_trace *t = NULL;
    nmk_err e = {0};
    nmk_buf text = {0};
    char *path = in_folder("c.json"), *tasks = in_folder("c.json.tasks.json");
    nmk_buf_puts(&text, "{\"traceEvents\":[{\"name\":\"x\"}]}");
    check(nmk_trace_open(&t, path, 1 << 20, "c", &e) == 0, "opens", "%s", e.text);
    check(nmk_trace_write_tasks(t, &text, &e) == 0 && events(tasks, "x") == 1, "tasks are written beside it", "%s",
          e.text);
    check(!strcmp(nmk_trace_tasks_path(t), tasks), "under the name it says", "%s", nmk_trace_tasks_path(t));
    nmk_trace_close(t);
    nmk_buf_free(&text);
    free(path), free(tasks);
}

int main(void) {
    if (!mkdtemp(folder)) return 2;
    grows(), is_bounded(), refuses(), writes_tasks();
    char *command = xasprintf("rm -r %s", folder);
    int rc = system(command);
    free(command);
    return rc || failures;
}
