#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "log.h"
#include "reply.h"

enum { MOST_WAITING_BYTES = 16 << 20, FLUSH_BYTES = 64 << 10, FLUSH_MS = 250 };

static const char tail[] = "\n]}\n";

typedef struct job job;
struct job {
    job *next;
    void (*run)(void *arg);
    void *arg;
};

struct nmk_trace {
    char *path, *older, *tasks;
    nmk_buf head; /* of every file */
    uint64_t most_bytes;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t wake;
    nmk_buf events; /* not written yet, each with ",\n" before it */
    uint64_t lost;
    job *jobs, **jobs_tail;
    bool closing;
    /* of the thread */
    int fd;
    uint64_t at; /* where the tail begins */
    bool broken;
};

static double us(uint64_t ns) { return 1e-3 * (double)ns; }

/* ---- the file ---- */

static int write_at(int fd, const char *data, size_t bytes, uint64_t at) {
    while (bytes) {
        ssize_t did = pwrite(fd, data, bytes, (off_t)at);
        if (did < 0 && errno == EINTR) continue;
        if (did <= 0) return -1;
        data += did, bytes -= (size_t)did, at += (uint64_t)did;
    }
    return 0;
}

static int begin_file(nmk_trace *t, nmk_err *e) {
    struct stat s;
    if (lstat(t->path, &s) == 0) {
        if (!S_ISREG(s.st_mode)) return nmk_fail(e, "%s: not a regular file", t->path);
        if (rename(t->path, t->older))
            return nmk_fail(e, "%s: cannot become %s: %s", t->path, t->older, strerror(errno));
    }
    t->fd = open(t->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (t->fd < 0) return nmk_fail(e, "%s: %s", t->path, strerror(errno));
    t->at = t->head.length;
    if (write_at(t->fd, t->head.data, t->head.length, 0) || write_at(t->fd, tail, sizeof tail - 1, t->at))
        return nmk_fail(e, "%s: %s", t->path, strerror(errno));
    return 0;
}

/* The tail first: whoever reads meanwhile, or after a crash, finds the old whole or the new one. */
static int add_to_file(nmk_trace *t, nmk_buf *events, nmk_err *e) {
    if (t->at + events->length + sizeof tail > t->most_bytes && t->at > t->head.length) {
        close(t->fd);
        t->fd = -1;
        if (begin_file(t, e)) return -1;
    }
    nmk_buf_puts(events, tail);
    if (write_at(t->fd, events->data, events->length, t->at)) return nmk_fail(e, "%s: %s", t->path, strerror(errno));
    t->at += events->length - (sizeof tail - 1);
    return 0;
}

static void write_events(nmk_trace *t, nmk_buf *events) {
    nmk_err e = {0};
    nmk_log_line line;
    if (t->broken || !events->length || add_to_file(t, events, &e) == 0) return;
    t->broken = true;
    nmk_log_begin(&line, NMK_LOG_WARNING, "trace ended");
    nmk_log_text(&line, "reason", e.text);
    nmk_log_end(&line);
}

/* ---- the thread ---- */

static void add_lost(nmk_buf *events, uint64_t lost) {
    nmk_buf_printf(events,
                   ",\n{\"ph\":\"i\",\"s\":\"g\",\"pid\":1,\"tid\":1,\"ts\":%.3f,\"name\":\"events were lost\","
                   "\"args\":{\"count\":%llu}}",
                   us(nmk_now_ns()), (unsigned long long)lost);
}

static void *write_all(void *argument) {
    nmk_trace *t = argument;
    bool closing = false;
    while (!closing) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += FLUSH_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L, until.tv_nsec %= 1000000000L;
        pthread_mutex_lock(&t->lock);
        for (int late = 0; !late && !t->closing && !t->jobs && t->events.length < FLUSH_BYTES;)
            late = pthread_cond_timedwait(&t->wake, &t->lock, &until);
        job *j = t->jobs;
        if (j && !(t->jobs = j->next)) t->jobs_tail = &t->jobs;
        closing = t->closing && !j;
        nmk_buf events = t->events;
        uint64_t lost = t->lost;
        t->events = (nmk_buf){0}, t->lost = 0;
        pthread_mutex_unlock(&t->lock);
        if (lost) add_lost(&events, lost);
        write_events(t, &events);
        nmk_buf_free(&events);
        if (j) j->run(j->arg);
        free(j);
    }
    return NULL;
}

int nmk_trace_open(nmk_trace **trace, const char *path, uint64_t most_bytes, const char *name, nmk_err *e) {
    nmk_trace *t = xcalloc(1, sizeof *t);
    t->path = xstrdup(path), t->older = xasprintf("%s.1", path), t->tasks = xasprintf("%s.tasks.json", path);
    t->most_bytes = most_bytes, t->fd = -1, t->jobs_tail = &t->jobs;
    nmk_buf_puts(&t->head, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
                           "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":");
    nmk_reply_string(name, strlen(name), &t->head);
    nmk_buf_puts(&t->head, "}},\n{\"ph\":\"M\",\"pid\":1,\"tid\":1,\"name\":\"thread_name\","
                           "\"args\":{\"name\":\"steps\"}}");
    int rc = begin_file(t, e);
    if (!rc) {
        pthread_mutex_init(&t->lock, NULL);
        pthread_cond_init(&t->wake, NULL);
        if (pthread_create(&t->thread, NULL, write_all, t)) abort(); /* a process that may have no second thread */
        *trace = t;
        return 0;
    }
    if (t->fd >= 0) close(t->fd);
    nmk_buf_free(&t->head);
    free(t->path), free(t->older), free(t->tasks), free(t);
    return rc;
}

void nmk_trace_close(nmk_trace *t) {
    if (!t) return;
    pthread_mutex_lock(&t->lock);
    t->closing = true;
    pthread_cond_signal(&t->wake);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
    if (t->fd >= 0) close(t->fd);
    pthread_cond_destroy(&t->wake), pthread_mutex_destroy(&t->lock);
    nmk_buf_free(&t->head), nmk_buf_free(&t->events);
    free(t->path), free(t->older), free(t->tasks), free(t);
}

void nmk_trace_run(nmk_trace *t, void (*run)(void *), void *arg) {
    job *j = xcalloc(1, sizeof *j);
    *j = (job){.run = run, .arg = arg};
    pthread_mutex_lock(&t->lock);
    *t->jobs_tail = j, t->jobs_tail = &j->next;
    pthread_cond_signal(&t->wake);
    pthread_mutex_unlock(&t->lock);
}

static void post(void *semaphore) { sem_post(semaphore); }

void nmk_trace_flush(nmk_trace *t) {
    sem_t done;
    if (!t) return;
    sem_init(&done, 0, 0);
    nmk_trace_run(t, post, &done); /* events are written before a job is run */
    while (sem_wait(&done)) {}
    sem_destroy(&done);
}

/* ---- events ---- */

/* Takes the events over. */
static void add_events(nmk_trace *t, nmk_buf *events, int count) {
    pthread_mutex_lock(&t->lock);
    if (t->events.length + events->length > MOST_WAITING_BYTES)
        t->lost += (uint64_t)count;
    else
        nmk_buf_add(&t->events, events->data, events->length);
    if (t->events.length >= FLUSH_BYTES) pthread_cond_signal(&t->wake);
    pthread_mutex_unlock(&t->lock);
    nmk_buf_free(events);
}

/* Begin or end of a phase, or of the answer. */
static void add_mark(nmk_buf *b, const nmk_trace_request *r, char what, const char *name, uint64_t ns) {
    nmk_buf_printf(
        b, ",\n{\"ph\":\"%c\",\"cat\":\"request\",\"pid\":1,\"tid\":2,\"id\":\"%llu.%d\",\"ts\":%.3f,\"name\":\"%s\"",
        what, (unsigned long long)r->id, r->index, us(ns), name);
}

static void add_phase(nmk_buf *b, const nmk_trace_request *r, const char *name, uint64_t from, uint64_t to) {
    if (!from) return;
    if (!to) to = r->ended_ns;
    add_mark(b, r, 'b', name, from), nmk_buf_puts(b, "}");
    add_mark(b, r, 'e', name, to), nmk_buf_puts(b, "}");
}

void nmk_trace_add_request(nmk_trace *t, const nmk_trace_request *r) {
    nmk_buf b = {0};
    char name[64];
    if (!t) return;
    snprintf(name, sizeof name, r->index ? "request %llu, answer %d" : "request %llu", (unsigned long long)r->id,
             r->index + 1);
    add_mark(&b, r, 'b', name, r->arrived_ns);
    nmk_buf_printf(&b,
                   ",\"args\":{\"endpoint\":\"%s\",\"end\":\"%s\",\"prompt_tokens\":%d,\"cached_tokens\":%d,"
                   "\"tokens\":%d}}",
                   r->endpoint, r->end, r->prompt_tokens, r->cached_tokens, r->tokens);
    add_phase(&b, r, "read", r->arrived_ns, r->queued_ns);
    add_phase(&b, r, "queued", r->queued_ns, r->started_ns);
    add_phase(&b, r, "prefill", r->started_ns, r->first_ns);
    add_phase(&b, r, "decode", r->first_ns, r->last_ns);
    add_mark(&b, r, 'e', name, r->ended_ns), nmk_buf_puts(&b, "}");
    add_events(t, &b, 2);
}

void nmk_trace_add_step(nmk_trace *t, const nmk_batch_step *s) {
    nmk_buf b = {0};
    if (!t) return;
    nmk_buf_printf(&b,
                   ",\n{\"ph\":\"X\",\"cat\":\"step\",\"pid\":1,\"tid\":1,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"%s\","
                   "\"args\":{\"step\":%llu,\"decoded\":%d,\"fed\":%d,\"tokens\":%d,\"machine_ms\":%.4f}}",
                   us(s->began_ns), us(s->ended_ns - s->began_ns),
                   !s->fed       ? "decode"
                   : !s->decoded ? "prefill"
                                 : "decode and prefill",
                   (unsigned long long)s->number, s->decoded, s->fed, s->tokens, s->machine_ms);
    nmk_buf_printf(
        &b,
        ",\n{\"ph\":\"C\",\"pid\":1,\"ts\":%.3f,\"name\":\"sequences\",\"args\":{\"running\":%d,\"waiting\":%d}}"
        ",\n{\"ph\":\"C\",\"pid\":1,\"ts\":%.3f,\"name\":\"KV use, %%\",\"args\":{\"used\":%.2f}}",
        us(s->ended_ns), s->running, s->waiting, us(s->ended_ns), 100 * s->kv_used);
    add_events(t, &b, 1);
}

/* ---- tasks ---- */

const char *nmk_trace_tasks_path(const nmk_trace *t) { return t->tasks; }

int nmk_trace_write_tasks(const nmk_trace *t, const nmk_buf *text, nmk_err *e) {
    char *part = xasprintf("%s.part", t->tasks);
    int rc = 0, fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0 || write_at(fd, text->data, text->length, 0) || rename(part, t->tasks))
        rc = nmk_fail(e, "%s: %s", t->tasks, strerror(errno));
    if (fd >= 0) close(fd);
    if (rc) unlink(part);
    free(part);
    return rc;
}
