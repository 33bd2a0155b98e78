/* nmk-serve under load: many clients that stream, wait, leave, dawdle and talk nonsense, and every answer compared with
 * the answer that the same request gets alone.
 *
 * load [--clients N] [--seconds N] [--seed N] [--server build/MODEL/nmk-serve] [flags of the server]
 *
 * Without flags: the toy on the CPU, some seconds, as a test.  All other flags go to the server; with --random-weights
 * and no --checkpoint there is no tokenizer, and the load is of token ids.  One thread, one epoll loop; what a client
 * does next is drawn from the seed, when it comes to it depends on the machine. */
#define _GNU_SOURCE /* memmem, strcasestr */
#include "load_mix.h"

#include <dirent.h>
#include <sys/epoll.h>

enum {
    MOST_CLIENTS = 900, /* the server takes 1000 connections */
    AHEAD = 4,          /* requests a client has under way on its connection */
    VOCAB = 500,        /* of prompts of token ids; any model has more */
    MOST_REQUESTS = 96, /* different ones */
    FEW_REQUESTS = 24,  /* in a short run: alone they take longest */
    HANG_MS = 20000,
    LEAK_SECONDS = 60, /* a shorter run says nothing about the server's memory */
    LEAK_KIB = 8192,
    LAST_STREAMS = 8 /* that run when the server is told to end */
};

/* ---------------------------------------------------------------- figures */

/* Milliseconds, 2 % a bin, from a microsecond to a quarter of an hour and more. */
enum { BINS = 1100 };
typedef struct {
    uint64_t bin[BINS], count;
    double most;
} figures;

static void figures_add(figures *f, uint64_t ns) {
    double ms = (double)ns * 1e-6, at = 0.001;
    int i = 0;
    for (; at < ms && i < BINS - 1; i++) at *= 1.02;
    f->bin[i]++, f->count++;
    if (ms > f->most) f->most = ms;
}

static double figures_at(const figures *f, double part) {
    uint64_t seen = 0;
    double at = 0.001;
    for (int i = 0; i < BINS; i++, at *= 1.02)
        if ((seen += f->bin[i]) > (uint64_t)(part * (double)f->count)) return at < f->most ? at : f->most;
    return f->most;
}

/* ---------------------------------------------------------------- clients */

typedef enum {
    STAYS,
    CUT_BODY,  /* before the request is whole */
    CUT_TIME,  /* some time after it was sent */
    CUT_BYTES, /* after so many bytes of the answer */
    CUT_DONE,  /* right after [DONE], which is a whole answer */
    CUT_HALF   /* shutdown(SHUT_WR), and then it reads what still comes */
} cut_kind;

typedef struct {
    enum { GOOD, LONG, SMALL } kind;
    int index;
    bool stream, usage;
} expectation;

typedef struct {
    int fd; /* -1: none */
    uint32_t events;
    nmk_buf out, in;
    size_t sent, pause_at; /* pause_at: bytes to send before a rest of some ms */
    expectation expect[AHEAD];
    int expected, got;
    load_answer answer;
    load_account account;
    cut_kind cut;
    bool slow, reset, waits; /* reset: it leaves with a RST; waits: nothing to do before act_ns */
    size_t cut_bytes, received;
    uint64_t act_ns, asked_ns, spoke_ns;
} client;

static struct {
    const char *server;
    int clients, seconds;
    bool ids;
    int context;
    server s;
    int epoll, busy;
    bool stopping;
    load_request table[MOST_REQUESTS];
    int requests;
    char *longs[2];
    uint64_t progress_ns; /* of the newest text or whole answer; comments and errors are none */
    /* results */
    uint64_t done, small, cut, whole_choices, cut_choices, wrong, chunks;
    char first_wrong[4000];
    figures first, between;
} l;

static client all[MOST_CLIENTS];

static bool chance(unsigned percent) { return random_below(100) < percent; }

__attribute__((format(printf, 1, 2))) static void wrong_answer(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    if (!l.wrong++) vsnprintf(l.first_wrong, sizeof l.first_wrong, fmt, args);
    va_end(args);
}

static const char *path_of(const expectation *x) {
    if (x->kind == SMALL) return load_smalls[x->index].path;
    bool chat = x->kind == GOOD ? l.table[x->index].chat : x->index;
    return chat ? "/v1/chat/completions" : "/v1/completions";
}

static bool is_chat(const expectation *x) { return x->kind == GOOD ? l.table[x->index].chat : x->index; }

static void add_request(nmk_buf *out, const expectation *x, int minor) {
    if (x->kind == SMALL) {
        load_small_text(out, &load_smalls[x->index], minor, l.context);
        return;
    }
    char *body = xasprintf("%s%s%s}", x->kind == GOOD ? l.table[x->index].fields : l.longs[x->index],
                           x->stream ? ",\"stream\":true" : "",
                           x->stream && x->usage ? ",\"stream_options\":{\"include_usage\":true}" : "");
    nmk_buf_printf(out,
                   "POST %s HTTP/1.%d\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                   path_of(x), minor, strlen(body), body);
    free(body);
}

static void hang_up(client *c) {
    if (c->fd < 0) return;
    struct linger at_once = {.l_onoff = 1};
    if (c->reset) setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(c->fd); /* takes it out of the epoll too */
    c->fd = -1;
}

static bool connect_to(client *c, bool small_buffer) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)l.s.port)};
    int one = 1, bytes = 4096;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (small_buffer) setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event ev = {.events = c->events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    if (connect(c->fd, (struct sockaddr *)&a, sizeof a) && errno != EINPROGRESS) return false;
    return !epoll_ctl(l.epoll, EPOLL_CTL_ADD, c->fd, &ev);
}

static void begin_answer(client *c) {
    load_answer_reset(&c->answer);
    load_account_free(&c->account);
    c->spoke_ns = 0;
}

/* ---------------------------------------------------------------- what a client does next */

static expectation draw_good(void) {
    expectation x = {.kind = GOOD};
    x.index = (int)random_below((size_t)l.requests);
    x.stream = chance(65), x.usage = chance(50);
    return x;
}

static expectation draw_small(void) { return (expectation){.kind = SMALL, .index = (int)random_below(LOAD_SMALLS)}; }

static void draw_cut(client *c) {
    expectation *x = &c->expect[0];
    c->cut = (cut_kind)(1 + random_below(5));
    c->reset = chance(30);
    if (c->cut != CUT_DONE && chance(50)) x->kind = LONG, x->index = l.ids ? 0 : (int)random_below(2);
    if (c->cut == CUT_DONE) x->stream = true;
    if (c->cut == CUT_BYTES) x->stream = true, c->cut_bytes = 1 + random_below(12000);
}

static void start(client *c) {
    c->expected = c->got = 0, c->cut = STAYS;
    c->slow = c->reset = c->waits = false;
    c->out.length = c->sent = c->pause_at = c->received = 0, c->in.length = 0, c->act_ns = 0;
    int what = (int)random_below(100), minor = 1;
    bool pipelined = false;
    if (what < 18) {
        c->expect[c->expected++] = draw_small();
    } else {
        pipelined = chance(12);
        for (int n = pipelined ? 2 + (int)random_below(AHEAD - 1) : 1; n; n--)
            c->expect[c->expected++] = pipelined && chance(20) ? draw_small() : draw_good();
        c->slow = what < 25;
        if (c->expected == 1 && what >= 80) draw_cut(c);
    }
    /* After what closes the connection nothing is answered. */
    for (int i = 0; i < c->expected; i++)
        if (c->expect[i].kind == SMALL && load_smalls[c->expect[i].index].closes) c->expected = i + 1;
    if (c->expected == 1 && chance(10)) minor = 0;
    for (int i = 0; i < c->expected; i++) add_request(&c->out, &c->expect[i], minor);
    if (c->cut == CUT_BODY) c->out.length = 1 + random_below(c->out.length - 1);
    if (chance(25)) c->pause_at = random_below(c->out.length);
    if (c->fd >= 0 && (c->slow || chance(30))) hang_up(c);
    begin_answer(c);
    l.busy++;
    c->asked_ns = nmk_now_ns();
    if (c->fd < 0 && !connect_to(c, c->slow)) {
        printf("not ok - connect: %s\n", strerror(errno));
        exit(1);
    }
}

/* The connection stays for the next request, if it may. */
static void rest(client *c, bool keep) {
    if (!keep) hang_up(c);
    l.busy--;
    c->expected = c->got = 0, c->out.length = c->sent = 0;
    c->act_ns = nmk_now_ns() + random_below(20) * 1000000;
    c->waits = true;
}

static void leave(client *c) {
    l.cut++;
    for (int i = c->got; i < c->expected; i++) l.cut_choices += c->expect[i].kind != SMALL ? LOAD_CHOICES : 0;
    rest(c, false);
}

/* ---------------------------------------------------------------- an answer */

static void compare(client *c) {
    const expectation *x = &c->expect[c->got];
    load_request *r = &l.table[x->index];
    load_account *a = &c->account;
    nmk_buf text = load_account_text(a);
    const char *body = c->answer.body.data ? c->answer.body.data : "";
    if (c->answer.status != 200)
        wrong_answer("%s}: status %d, %s", r->fields, c->answer.status, body);
    else if (c->answer.stream != x->stream)
        wrong_answer("%s}: %s", r->fields, x->stream ? "no stream" : "a stream");
    else if (x->stream && !a->done)
        wrong_answer("%s}: no [DONE]", r->fields);
    else if (a->wrong[0])
        wrong_answer("%s}: %s", r->fields, a->wrong);
    else if (strcmp(text.data, r->text) != 0)
        wrong_answer("%s}: got\n%s\nalone it was\n%s", r->fields, text.data, r->text);
    else if ((!x->stream || x->usage) && strcmp(a->usage, r->usage) != 0)
        wrong_answer("%s}: usage '%s', alone '%s'", r->fields, a->usage, r->usage);
    else if (x->stream && !x->usage && a->usage[0])
        wrong_answer("%s}: usage that was not asked for", r->fields);
    l.done++, l.progress_ns = nmk_now_ns();
    l.whole_choices += (uint64_t)a->choices;
    nmk_buf_free(&text);
}

static void answered(client *c) {
    const expectation *x = &c->expect[c->got];
    if (x->kind == SMALL) {
        const load_small *s = &load_smalls[x->index];
        if (c->answer.status != s->status)
            wrong_answer("%s: status %d instead of %d: %s", s->name, c->answer.status, s->status,
                         c->answer.body.data ? c->answer.body.data : "");
        else if (s->closes && !c->answer.closes)
            wrong_answer("%s: the connection stays open", s->name);
        l.small++;
    } else if (x->kind == LONG) {
        /* on a GPU 3000 tokens are said before the client leaves */
        if (c->answer.status != 200) wrong_answer("an answer of 3000 tokens: status %d", c->answer.status);
    } else {
        if (!c->answer.stream && c->answer.status == 200) load_account_whole(&c->account, &c->answer.body, is_chat(x));
        compare(c);
    }
    c->got++;
}

/* Takes the events that are there, and their times. */
static void take_events(client *c) {
    const expectation *x = &c->expect[c->got];
    nmk_buf *b = &c->answer.body;
    size_t at = 0, used;
    uint64_t now = nmk_now_ns();
    while (load_account_event(&c->account, b->data + at, b->length - at, &used, x->kind != SMALL && is_chat(x))) {
        at += used;
        if (!c->account.spoke) continue;
        l.chunks++, l.progress_ns = now;
        if (c->slow || x->kind == SMALL || (x->kind == GOOD && !l.table[x->index].timed)) continue;
        if (!c->spoke_ns && !c->got) figures_add(&l.first, now - c->asked_ns);
        if (c->spoke_ns) figures_add(&l.between, now - c->spoke_ns);
        c->spoke_ns = now;
    }
    memmove(b->data, b->data + at, b->length - at + 1);
    b->length -= at;
}

static void closed(client *c) {
    const expectation *x = &c->expect[c->got];
    if (c->expected == c->got) { /* an idle connection */
        hang_up(c);
    } else if (c->cut != STAYS && c->cut != CUT_DONE) {
        leave(c);
    } else {
        if (c->answer.state == LOAD_TO_END && c->answer.status) answered(c);
        if (c->got < c->expected)
            wrong_answer("%s: closed before the end of answer %d of %d; %d bytes came",
                         x->kind == SMALL ? load_smalls[x->index].name : l.table[x->index].fields, c->got + 1,
                         c->expected, (int)c->received);
        rest(c, false);
    }
}

static void take(client *c) {
    size_t at = 0;
    while (c->got < c->expected && at < c->in.length) {
        size_t used;
        int rc = load_answer_feed(&c->answer, c->in.data + at, c->in.length - at, &used);
        at += used;
        if (rc < 0) {
            wrong_answer("no HTTP: %.300s", c->in.data + at);
            rest(c, false);
            return;
        }
        if (c->answer.stream && c->answer.body.length) take_events(c);
        if (c->cut == CUT_DONE && c->account.done) {
            answered(c);
            rest(c, false);
            return;
        }
        if (!rc) break;
        bool closes = c->answer.closes;
        answered(c);
        begin_answer(c);
        if (closes && c->got < c->expected) wrong_answer("a connection closes with requests under way");
        if (closes || c->got == c->expected) {
            if (at < c->in.length) wrong_answer("more than was asked for: %.300s", c->in.data + at);
            rest(c, !closes && c->cut == STAYS && !c->slow);
            return;
        }
    }
    if (c->in.length) memmove(c->in.data, c->in.data + at, c->in.length - at);
    c->in.length -= at;
}

static void readable(client *c) {
    static char data[65536];
    ssize_t n = recv(c->fd, data, c->slow ? 600 : sizeof data, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        closed(c);
        return;
    }
    c->received += (size_t)n;
    nmk_buf_add(&c->in, data, (size_t)n);
    if (c->cut == CUT_BYTES && c->received >= c->cut_bytes) {
        leave(c);
        return;
    }
    if (c->expected == c->got) {
        wrong_answer("nothing was asked, and there came: %s", c->in.data);
        hang_up(c);
        return;
    }
    take(c);
    if (c->slow && c->fd >= 0 && c->expected) c->act_ns = nmk_now_ns() + random_below(40) * 1000000, c->waits = true;
}

static void writable(client *c) {
    size_t end = c->sent < c->pause_at ? c->pause_at : c->out.length;
    while (c->sent < end) {
        ssize_t n = send(c->fd, c->out.data + c->sent, end - c->sent, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == ENOTCONN)) return;
        if (n < 0) { /* it was refused already; what the server said is still to be read */
            c->sent = c->out.length;
            return;
        }
        c->sent += (size_t)n;
    }
    if (c->sent < c->out.length) {
        c->act_ns = nmk_now_ns() + random_below(30) * 1000000, c->waits = true;
        return;
    }
    if (c->cut == CUT_BODY)
        leave(c);
    else if (c->cut == CUT_HALF || c->cut == CUT_TIME)
        c->act_ns = nmk_now_ns() + random_below(c->expect[0].kind == LONG ? 1500 : 400) * 1000000;
}

/* act_ns has come. */
static void act(client *c) {
    c->act_ns = 0;
    if (c->waits) {
        c->waits = false;
        if (!c->expected && !l.stopping) start(c);
    } else if (c->cut == CUT_TIME) {
        leave(c);
    } else if (c->cut == CUT_HALF) {
        shutdown(c->fd, SHUT_WR);
    }
}

static void watch(client *c) {
    uint32_t events = 0;
    if (c->fd < 0) return;
    if (!(c->slow && c->waits)) events |= EPOLLIN;
    if (c->sent < c->out.length && !c->waits) events |= EPOLLOUT;
    if (events == c->events) return;
    struct epoll_event ev = {.events = c->events = events, .data.ptr = c};
    epoll_ctl(l.epoll, EPOLL_CTL_MOD, c->fd, &ev);
}

/* One turn of the loop. */
static void turn(void) {
    struct epoll_event ev[256];
    uint64_t now = nmk_now_ns(), until = now + 100000000;
    for (int i = 0; i < l.clients; i++)
        if (all[i].act_ns && all[i].act_ns < until) until = all[i].act_ns;
    int ms = until > now ? (int)((until - now) / 1000000) + 1 : 0, n = epoll_wait(l.epoll, ev, 256, ms);
    for (int i = 0; i < n; i++) {
        client *c = ev[i].data.ptr;
        if (c->fd >= 0 && (ev[i].events & EPOLLOUT) && c->sent < c->out.length) writable(c);
        if (c->fd >= 0 && (ev[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) readable(c);
    }
    now = nmk_now_ns();
    for (int i = 0; i < l.clients; i++) {
        if (all[i].act_ns && all[i].act_ns <= now) act(&all[i]);
        watch(&all[i]);
    }
}

/* ---------------------------------------------------------------- the server's side */

static long rss_kib(void) {
    char path[64], line[256];
    long kib = -1;
    snprintf(path, sizeof path, "/proc/%d/status", l.s.pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) sscanf(line, "VmRSS: %ld", &kib);
    if (f) fclose(f);
    return kib;
}

static int open_files(void) {
    char path[64];
    int n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", l.s.pid);
    DIR *d = opendir(path);
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n - 2;
}

/* The same as metric(), of one of several with a further label. */
static double labelled(const char *text, const char *name, const char *label) {
    size_t n = strlen(name);
    for (const char *p = text; p && *p; p = strchr(p, '\n'), p += p != NULL) {
        const char *end = strchr(p, '\n'), *brace = strchr(p, '}');
        if (strncmp(p, name, n) != 0 || p[n] != '{' || !brace || (end && brace > end)) continue;
        if (!label || memmem(p, (size_t)(brace - p), label, strlen(label))) return atof(brace + 1);
    }
    return -1;
}

/* before: answers that the server counted when the load began. */
static void check_metrics(double before) {
    reply r = get(l.s.port, "/metrics");
    const char *ended = "vllm:request_success_total";
    double stop = labelled(r.body, ended, "\"stop\""), length = labelled(r.body, ended, "\"length\"");
    double left = labelled(r.body, ended, "\"abort\""), error = labelled(r.body, ended, "\"error\"");
    double choices = labelled(r.body, "vllm:request_prompt_tokens_count", NULL);
    double answers = labelled(r.body, "vllm:request_generation_tokens_count", NULL);
    double tokens = labelled(r.body, "vllm:request_generation_tokens_sum", NULL);
    double sampled = labelled(r.body, "vllm:generation_tokens_total", NULL);
    check(stop >= 0 && stop + length + left + error == choices, "/metrics: every sequence ended once",
          "%g began; stop %g, length %g, abort %g, error %g", choices, stop, length, left, error);
    check(error == 0 && labelled(r.body, "nmk:requests_failed_total", NULL) == 0, "/metrics: no request failed", "%g",
          error);
    before = answers - before;
    check(answers == stop + length && before >= (double)l.whole_choices &&
              before <= (double)(l.whole_choices + l.cut_choices),
          "/metrics: as many answers as the clients got, and some of those that left", "%g; the clients got %llu",
          before, (unsigned long long)l.whole_choices);
    check(tokens > 0 && sampled >= tokens, "/metrics: no answer has tokens that were not generated", "%g of %g", tokens,
          sampled);
    reply_free(&r);
}

/* ---------------------------------------------------------------- the parts of a run */

/* Every request alone, whole and as a stream: the two have to agree. */
static void alone(void) {
    int differ = 0, tokens = 0;
    char why[3000] = "", *name;
    for (int i = 0; i < l.requests; i++) {
        load_request *r = &l.table[i];
        if (r->follows >= 0) {
            load_next_turn(r, &l.table[r->follows], l.ids);
            load_fields(r, i, l.ids);
        }
        for (int stream = 0; stream < 2 && (!stream || r->text); stream++) {
            expectation x = {.kind = GOOD, .index = i, .stream = stream, .usage = true};
            nmk_buf out = {0};
            load_account a = {0};
            add_request(&out, &x, 0);
            int fd = dial(l.s.port);
            put(fd, out.data, out.length);
            reply answer = reply_read(fd);
            if (answer.status != 200) {
                snprintf(why, sizeof why, "%s}: status %d: %s", r->fields, answer.status, answer.body), differ++;
            } else {
                nmk_buf body = {.data = (char *)(uintptr_t)answer.body, .length = strlen(answer.body)};
                size_t used = 0;
                for (size_t at = 0; stream && load_account_event(&a, body.data + at, body.length - at, &used, r->chat);)
                    at += used;
                if (!stream) load_account_whole(&a, &body, r->chat);
                nmk_buf text = load_account_text(&a);
                if (a.wrong[0] || (stream && !a.done))
                    snprintf(why, sizeof why, "%s}: %s", r->fields, a.wrong), differ++;
                else if (stream && (strcmp(text.data, r->text) != 0 || strcmp(a.usage, r->usage) != 0))
                    snprintf(why, sizeof why, "%s}: whole\n%s%s\nas a stream\n%s%s", r->fields, r->text, r->usage,
                             text.data, a.usage),
                        differ++;
                else if (!stream)
                    r->text = xstrdup(text.data), r->usage = xstrdup(a.usage), r->content = a.choice[0].content,
                    a.choice[0].content = (nmk_buf){0},
                    tokens += atoi(strstr(a.usage, "completion ") + strlen("completion "));
                nmk_buf_free(&text);
            }
            reply_free(&answer), load_account_free(&a), nmk_buf_free(&out);
        }
    }
    name = xasprintf("%d requests alone, %d tokens: the stream says what the whole answer says", l.requests, tokens);
    check(!differ, name, "%d differ, the last: %s", differ, why);
    free(name);
    if (differ) exit(1);
    for (int i = 0; i < LOAD_SMALLS; i++) {
        nmk_buf out = {0};
        load_small_text(&out, &load_smalls[i], 0, l.context);
        int fd = dial(l.s.port);
        put(fd, out.data, out.length);
        reply answer = reply_read(fd);
        if (answer.status != load_smalls[i].status)
            check(false, load_smalls[i].name, "alone: status %d: %s", answer.status, answer.body);
        reply_free(&answer), nmk_buf_free(&out);
    }
}

static void dump_waiting(void) {
    int shown_clients = 0;
    for (int i = 0; i < l.clients && shown_clients < 10; i++)
        if (all[i].got < all[i].expected) {
            const client *c = &all[i];
            printf(
                "# client %d: request %d of %d (kind %d, %d), cut %d, sent %zu of %zu, received %zu, fd %d, waits %d\n",
                i, c->got + 1, c->expected, c->expect[c->got].kind, c->expect[c->got].index, c->cut, c->sent,
                c->out.length, c->received, c->fd, c->waits);
            shown_clients++;
        }
}

static bool hangs(void) {
    if (!l.busy || nmk_now_ns() - l.progress_ns < time_limit_ns(HANG_MS)) return false;
    dump_waiting();
    return true;
}

static void under_load(int files) {
    uint64_t start_ns = nmk_now_ns(), length = (uint64_t)l.seconds * 1000000000u, at;
    long rss[11] = {0}; /* at every tenth */
    int tenth = 0;
    double answers_before = metric(l.s.port, "vllm:request_generation_tokens_count");
    double tokens_before = metric(l.s.port, "vllm:generation_tokens_total");
    bool hung = false;
    l.epoll = epoll_create1(EPOLL_CLOEXEC);
    l.progress_ns = start_ns;
    for (int i = 0; i < l.clients; i++)
        all[i].fd = -1, all[i].waits = true, all[i].act_ns = start_ns + random_below(500) * 1000000;
    while ((at = nmk_now_ns() - start_ns) < length && !hung) {
        turn();
        hung = hangs();
        if (at * 10 / length > (uint64_t)tenth) {
            rss[++tenth] = rss_kib();
            if (l.seconds >= LEAK_SECONDS)
                printf("# %3d %%: %llu answers, %llu left, %llu small or bad, %llu wrong, RSS %.1f MB\n", tenth * 10,
                       (unsigned long long)l.done, (unsigned long long)l.cut, (unsigned long long)l.small,
                       (unsigned long long)l.wrong, (double)rss[tenth] / 1024),
                    fflush(stdout);
        }
    }
    rss[10] = rss_kib();
    double took = (double)(nmk_now_ns() - start_ns) * 1e-9;
    double tokens = metric(l.s.port, "vllm:generation_tokens_total") - tokens_before;
    l.stopping = true;
    while (l.busy && !hung) turn(), hung = hangs();
    for (int i = 0; i < l.clients; i++) hang_up(&all[i]);

    check(!hung, "no hang", "%d clients wait, and nothing came for %d s", l.busy, time_limit(HANG_MS) / 1000);
    char *name = xasprintf("%d clients, %.0f s: %llu answers as if alone, %llu small or bad ones, %llu left", l.clients,
                           took, (unsigned long long)l.done, (unsigned long long)l.small, (unsigned long long)l.cut);
    check(!l.wrong && l.done > 0, name, "%llu are wrong, the first: %s", (unsigned long long)l.wrong, l.first_wrong);
    free(name);
    if (hung) {
        server_end(&l.s, SIGKILL, 1000);
        exit(1);
    }
    printf("# %.0f tokens/s generated, %.0f chunks/s with text read\n", tokens / took, (double)l.chunks / took);
    printf(
        "# first token (queue included), ms: p50 %.1f, p99 %.1f, most %.1f; between tokens: p50 %.2f, p99 %.2f, most %.1f\n",
        figures_at(&l.first, 0.5), figures_at(&l.first, 0.99), l.first.most, figures_at(&l.between, 0.5),
        figures_at(&l.between, 0.99), l.between.most);
    printf("# RSS at 10, 50, 100 %%: %.1f, %.1f, %.1f MB\n", (double)rss[1] / 1024, (double)rss[5] / 1024,
           (double)rss[10] / 1024);
    check(metric_becomes(l.s.port, "vllm:num_requests_running", 0, 10000) &&
              metric_becomes(l.s.port, "vllm:num_requests_waiting", 0, 2000),
          "nothing runs or waits when all have gone", "running %g, waiting %g",
          metric(l.s.port, "vllm:num_requests_running"), metric(l.s.port, "vllm:num_requests_waiting"));
    int left = 0;
    for (int i = 0; i < time_limit(300) && (left = open_files()) > files; i++) usleep(20000);
    check(left <= files, "no descriptor is left open", "%d before, %d after", files, left);
    if (l.seconds >= LEAK_SECONDS)
        check(rss[10] - rss[5] < LEAK_KIB || (double)(rss[10] - rss[5]) < 0.03 * (double)rss[5],
              "no memory is lost in the last half", "%.1f MB, then %.1f MB", (double)rss[5] / 1024,
              (double)rss[10] / 1024);
    check_metrics(answers_before);
}

/* Streams that run when the server is told to end are finished as if alone. */
static void drain(void) {
    int fds[LAST_STREAMS], bad = 0;
    expectation x[LAST_STREAMS];
    nmk_buf got[LAST_STREAMS] = {0};
    for (int i = 0; i < LAST_STREAMS; i++) {
        nmk_buf out = {0};
        x[i] = draw_good(), x[i].stream = x[i].usage = true;
        add_request(&out, &x[i], 0);
        fds[i] = dial(l.s.port);
        put(fds[i], out.data, out.length);
        nmk_buf_free(&out);
        nmk_buf_puts(&got[i], "");
    }
    for (int i = 0; i < LAST_STREAMS; i++) get_until(fds[i], &got[i], "\r\n\r\n", 20000);
    kill(l.s.pid, SIGTERM);
    for (int i = 0; i < LAST_STREAMS; i++) {
        get_all(fds[i], &got[i], 60000);
        close(fds[i]);
        load_account a = {0};
        const load_request *r = &l.table[x[i].index];
        size_t used = 0, at = load_until(got[i].data, got[i].length, "\r\n\r\n");
        while (load_account_event(&a, got[i].data + at, got[i].length - at, &used, r->chat)) at += used;
        nmk_buf text = load_account_text(&a);
        bad += a.wrong[0] || !a.done || strcmp(text.data, r->text) != 0 || strcmp(a.usage, r->usage) != 0;
        load_account_free(&a), nmk_buf_free(&text), nmk_buf_free(&got[i]);
    }
    check(!bad, "streams that run at SIGTERM are finished as if alone", "%d of %d are not", bad, LAST_STREAMS);
    int rc = server_end(&l.s, 0, 20000);
    check(rc == 0, "then the server ends with status 0", "%d", rc);
}

static int number(const char *text, int low, int high) {
    char *end;
    long v = strtol(text, &end, 10);
    if (end == text || *end || v < low || v > high) {
        fprintf(stderr, "load: %s: expected %d to %d\n", text, low, high);
        exit(2);
    }
    return (int)v;
}

int main(int argc, char **argv) {
    const char *args[64] = {"build/nmc-toy/nmk-serve", "--port", "0"};
    int n = 3;
    bool checkpoint = false, random = false;
    nmk_err e;
    signal(SIGPIPE, SIG_IGN);
    l.clients = 40, l.seconds = 6;
    for (int i = 1; i < argc; i++) {
        bool value = i + 1 < argc;
        if (value && !strcmp(argv[i], "--clients"))
            l.clients = number(argv[++i], 1, MOST_CLIENTS);
        else if (value && !strcmp(argv[i], "--seconds"))
            l.seconds = number(argv[++i], 1, 1 << 20);
        else if (value && !strcmp(argv[i], "--seed"))
            random_state ^= (uint64_t)number(argv[++i], 0, 1 << 30) << 20;
        else if (value && !strcmp(argv[i], "--server"))
            args[0] = argv[++i];
        else if (n < 62)
            checkpoint |= !strcmp(argv[i], "--checkpoint"), random |= !strcmp(argv[i], "--random-weights"),
                args[n++] = argv[i];
    }
    if (n == 3) args[n++] = "--device", args[n++] = "cpu", args[n++] = "--checkpoint", args[n++] = "examples/nmc-toy";
    l.ids = random && !checkpoint;
    l.s = server_run(args, 300);
    int files = open_files();
    reply r = get(l.s.port, "/v1/models");
    struct json_object *models = nmk_json_parse(r.body, strlen(r.body), &e);
    l.context = int_at(models, "data.0.max_model_len");
    json_object_put(models), reply_free(&r);
    l.requests = l.seconds < LEAK_SECONDS ? FEW_REQUESTS : MOST_REQUESTS;
    load_table(l.table, l.requests, l.ids, VOCAB);
    l.longs[0] = load_long(l.ids, false), l.longs[1] = load_long(l.ids, true);
    alone();
    under_load(files);
    drain();
    return failures != 0;
}
