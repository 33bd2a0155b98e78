/* nmk-chat: a chat in the terminal with any server that speaks OpenAI's /v1/chat/completions.
 *
 * One file on libcurl and json-c, made to be read and taken apart.  An answer is printed as it is streamed; reasoning
 * is dimmed (and left out where stdout is no terminal), tool calls are named.  Ctrl-C stops an answer and keeps what
 * came.
 *
 * Exit 0: answered.  1: it failed.  2: wrong flags.  130: stopped by Ctrl-C. */
#define _GNU_SOURCE
#include <curl/curl.h>
#include <errno.h>
#include <json-c/json.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_LINE = 16 << 20, MOST_ERROR = 64 << 10, CONNECT_S = 10 };

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

/* ---- text that grows ---- */

typedef struct {
    char *data;
    size_t length, capacity;
} text;

static void add(text *t, const char *bytes, size_t n) {
    if (t->length + n + 1 > t->capacity) {
        t->capacity = 2 * (t->length + n + 1);
        t->data = realloc(t->data, t->capacity);
        if (!t->data) perror("nmk-chat"), exit(1);
    }
    memcpy(t->data + t->length, bytes, n);
    t->length += n;
    t->data[t->length] = 0;
}

static void add_string(text *t, const char *s) { add(t, s, strlen(s)); }

/* ---- the terminal ---- */

typedef enum { ANSWER, REASONING, NOTE } tone;

static struct { bool terminal, mid_line, dim; } out;

/* What a model writes must not steer the terminal: of the control characters only these two pass. */
static bool shown(const char *p, size_t left) {
    unsigned char c = (unsigned char)*p, next = left > 1 ? (unsigned char)p[1] : 0;
    if (c == 0xc2 && next >= 0x80 && next < 0xa0) return false; /* C1, as UTF-8 */
    return c == '\n' || c == '\t' || (c >= ' ' && c != 0x7f);
}

static void set_dim(bool dim) {
    if (!out.terminal || out.dim == dim) return;
    fputs(dim ? "\033[2m" : "\033[0m", stdout);
    out.dim = dim;
}

static void end_line(void) {
    if (out.mid_line) putchar('\n');
    out.mid_line = false;
}

static void show(tone how, const char *s) {
    size_t n = strlen(s);
    if (!n || (how == REASONING && !out.terminal)) return;
    if (out.dim && how == ANSWER) end_line();
    set_dim(how != ANSWER);
    for (size_t i = 0; i < n; i++) {
        if (!out.terminal || shown(s + i, n - i)) {
            putchar(s[i]);
            out.mid_line = s[i] != '\n';
        } else if ((unsigned char)s[i] == 0xc2) {
            i++;
        }
    }
    fflush(stdout);
}

static void show_end(void) {
    set_dim(false);
    end_line();
    fflush(stdout);
}

/* ---- one answer, as it comes ---- */

typedef struct {
    CURL *curl;
    text line;  /* of the stream, not complete */
    text whole; /* of an answer that is no stream: an error, or a server that does not stream */
    text content, error;
    bool streams, typed, finished, cut;
    int calls; /* whose names were shown */
} answer;

static struct json_object *member(struct json_object *o, const char *key) {
    struct json_object *v = NULL;
    if (json_object_is_type(o, json_type_object)) json_object_object_get_ex(o, key, &v);
    return v;
}

static const char *string(struct json_object *o, const char *key) {
    struct json_object *v = member(o, key);
    return json_object_is_type(v, json_type_string) ? json_object_get_string(v) : "";
}

/* {"error": {"message"}}, {"error": "..."}, {"message"} and {"detail"} are all in use. */
static const char *error_text(struct json_object *o) {
    struct json_object *error = member(o, "error");
    if (json_object_is_type(error, json_type_string)) return json_object_get_string(error);
    const char *keys[] = {"message", "detail"};
    for (int i = 0; i < 2; i++)
        if (*string(error ? error : o, keys[i])) return string(error ? error : o, keys[i]);
    return error ? "the server reported an error without a message" : "";
}

static void take_calls(answer *a, struct json_object *calls) {
    if (!json_object_is_type(calls, json_type_array)) return;
    for (size_t i = 0; i < json_object_array_length(calls); i++) {
        struct json_object *function = member(json_object_array_get_idx(calls, i), "function");
        const char *name = string(function, "name");
        if (*name) {
            if (out.mid_line || a->calls) show(NOTE, "\n");
            show(NOTE, "calls "), show(NOTE, name), show(NOTE, " ");
            a->calls++;
        }
        show(NOTE, string(function, "arguments"));
    }
}

/* A delta of a stream, or a whole message: the same fields. */
static void take_message(answer *a, struct json_object *m) {
    const char *reasoning = string(m, "reasoning_content"), *content = string(m, "content");
    show(REASONING, *reasoning ? reasoning : string(m, "reasoning"));
    show(ANSWER, content);
    add_string(&a->content, content);
    take_calls(a, member(m, "tool_calls"));
}

static void take_object(answer *a, struct json_object *o) {
    struct json_object *choices = member(o, "choices"), *first = NULL;
    if (member(o, "error")) {
        if (!a->error.length) add_string(&a->error, error_text(o));
        return;
    }
    if (json_object_is_type(choices, json_type_array)) first = json_object_array_get_idx(choices, 0);
    take_message(a, member(first, "delta") ? member(first, "delta") : member(first, "message"));
    const char *finish = string(first, "finish_reason");
    if (*finish) a->finished = true, a->cut = !strcmp(finish, "length");
}

/* A line of the stream without its end.  Comments, event names and ids are of no use here. */
static void take_line(answer *a, const char *line) {
    if (strncmp(line, "data:", 5)) return;
    line += line[5] == ' ' ? 6 : 5;
    if (!strcmp(line, "[DONE]")) {
        a->finished = true;
        return;
    }
    struct json_object *o = json_tokener_parse(line);
    if (o)
        take_object(a, o);
    else if (*line && !a->error.length)
        add_string(&a->error, "the server sent an event that is not JSON");
    json_object_put(o);
}

static size_t on_bytes(char *bytes, size_t one, size_t n, void *user) {
    answer *a = user;
    (void)one;
    if (!a->typed) {
        char *type = NULL;
        long status = 0;
        curl_easy_getinfo(a->curl, CURLINFO_CONTENT_TYPE, &type);
        curl_easy_getinfo(a->curl, CURLINFO_RESPONSE_CODE, &status);
        a->streams = status == 200 && type && !strncasecmp(type, "text/event-stream", 17);
        a->typed = true;
    }
    if (!a->streams) {
        if (a->whole.length < MOST_LINE) add(&a->whole, bytes, n);
        return n;
    }
    for (size_t i = 0, start = 0; i <= n; i++) {
        if (i < n && bytes[i] != '\n') continue;
        add(&a->line, bytes + start, i - start);
        if (a->line.length > MOST_LINE) return 0;
        if (i == n) break;
        if (a->line.length && a->line.data[a->line.length - 1] == '\r') a->line.data[--a->line.length] = 0;
        take_line(a, a->line.data);
        a->line.length = 0;
        start = i + 1;
    }
    return n;
}

static int on_progress(void *user, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d) {
    (void)user, (void)a, (void)b, (void)c, (void)d;
    return interrupted; /* other than 0: give up */
}

/* ---- the server ---- */

typedef struct {
    const char *url, *key, *model, *system, *temperature, *max_tokens;
    char *found_model; /* owned */
} settings;

/* Why an exchange failed, if that is not known yet; NULL: it did not, or Ctrl-C ended it. */
static char *failure(const answer *a, const char *url, CURLcode code, long status, const char *why,
                     struct json_object *whole) {
    char *reason = NULL;
    int printed = 0;
    if (!*why) why = curl_easy_strerror(code);
    if (a->error.length || code == CURLE_ABORTED_BY_CALLBACK) return NULL;
    if (status && status != 200) {
        const char *said = error_text(whole);
        if (!*said) said = a->whole.length ? a->whole.data : "no reason given";
        printed = asprintf(&reason, "%s: status %ld: %.2000s", url, status, said);
    } else if (code && a->typed) {
        printed = asprintf(&reason, "the connection to %s broke: %s", url, why);
    } else if (code) {
        printed = asprintf(&reason, "cannot reach %s: %s", url, why);
    } else if (a->streams && !a->finished) {
        printed = asprintf(&reason, "%s: the stream ended before the answer did", url);
    } else if (!a->streams && !whole) {
        printed =
            asprintf(&reason, "%s: neither JSON nor a stream of events: is this an OpenAI-compatible server?", url);
    }
    if (printed < 0) abort();
    return reason;
}

/* GET, or POST of `body`.  0, or -1 with a->error. */
static int talk(const settings *s, const char *path, const char *body, answer *a) {
    int rc = -1;
    char *url = NULL, *bearer = NULL, why[CURL_ERROR_SIZE] = "";
    struct curl_slist *fields = NULL;
    size_t n = strlen(s->url);
    while (n && s->url[n - 1] == '/') n--;
    a->curl = curl_easy_init();
    if (!a->curl || asprintf(&url, "%.*s%s", (int)n, s->url, path) < 0) abort();
    if (body) fields = curl_slist_append(fields, "Content-Type: application/json");
    if (s->key) {
        if (asprintf(&bearer, "Authorization: Bearer %s", s->key) < 0) abort();
        fields = curl_slist_append(fields, bearer);
    }
    curl_easy_setopt(a->curl, CURLOPT_URL, url);
    curl_easy_setopt(a->curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(a->curl, CURLOPT_HTTPHEADER, fields);
    if (body) curl_easy_setopt(a->curl, CURLOPT_POSTFIELDS, body);
    curl_easy_setopt(a->curl, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(a->curl, CURLOPT_WRITEDATA, a);
    curl_easy_setopt(a->curl, CURLOPT_XFERINFOFUNCTION, on_progress);
    curl_easy_setopt(a->curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(a->curl, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S);
    curl_easy_setopt(a->curl, CURLOPT_ERRORBUFFER, why);
    curl_easy_setopt(a->curl, CURLOPT_USERAGENT, "nmk-chat");
    CURLcode code = curl_easy_perform(a->curl);
    long status = 0;
    curl_easy_getinfo(a->curl, CURLINFO_RESPONSE_CODE, &status);
    struct json_object *whole = a->whole.length && !a->streams ? json_tokener_parse(a->whole.data) : NULL;
    char *reason = failure(a, url, code, status, why, whole);
    if (reason) {
        add_string(&a->error, reason);
    } else if (!a->error.length && code != CURLE_ABORTED_BY_CALLBACK) {
        if (!a->streams && body) take_object(a, whole);
        rc = a->error.length ? -1 : 0;
    }
    free(reason);
    json_object_put(whole);
    curl_slist_free_all(fields);
    curl_easy_cleanup(a->curl);
    free(url), free(bearer);
    return rc;
}

static void answer_free(answer *a) {
    free(a->line.data), free(a->whole.data), free(a->content.data), free(a->error.data);
    *a = (answer){0};
}

/* The first model that the server names. */
static int find_model(settings *s) {
    answer a = {0};
    int rc = talk(s, "/models", NULL, &a);
    struct json_object *list = rc ? NULL : json_tokener_parse(a.whole.data ? a.whole.data : "");
    struct json_object *data = member(list, "data");
    const char *id = json_object_is_type(data, json_type_array) ? string(json_object_array_get_idx(data, 0), "id") : "";
    if (rc)
        fprintf(stderr, "nmk-chat: %s\n", a.error.length ? a.error.data : "stopped");
    else if (!*id)
        fprintf(stderr, "nmk-chat: %s/models names no model: give --model\n", s->url);
    else
        s->model = s->found_model = strdup(id);
    json_object_put(list);
    answer_free(&a);
    return s->model ? 0 : 1;
}

/* ---- a chat ---- */

static void say(struct json_object *messages, const char *role, const char *content) {
    struct json_object *m = json_object_new_object();
    json_object_object_add(m, "role", json_object_new_string(role));
    json_object_object_add(m, "content", json_object_new_string(content));
    json_object_array_add(messages, m);
}

static struct json_object *new_chat(const settings *s) {
    struct json_object *messages = json_object_new_array();
    if (s->system) say(messages, "system", s->system);
    return messages;
}

/* Asks, prints the answer, and keeps both in `messages`.  The exit status. */
static int ask(const settings *s, struct json_object *messages, const char *prompt) {
    answer a = {0};
    struct json_object *body = json_object_new_object();
    say(messages, "user", prompt);
    json_object_object_add(body, "model", json_object_new_string(s->model));
    json_object_object_add(body, "stream", json_object_new_boolean(1));
    if (s->temperature) json_object_object_add(body, "temperature", json_tokener_parse(s->temperature));
    if (s->max_tokens) json_object_object_add(body, "max_tokens", json_tokener_parse(s->max_tokens));
    json_object_object_add(body, "messages", json_object_get(messages));
    interrupted = 0;
    int rc = talk(s, "/chat/completions", json_object_to_json_string_ext(body, JSON_C_TO_STRING_PLAIN), &a);
    if (!rc && a.cut) show(NOTE, " [cut at the token limit]");
    show_end();
    bool stopped = rc && interrupted && !a.error.length;
    if (stopped)
        fprintf(stderr, "[stopped]\n");
    else if (rc)
        fprintf(stderr, "nmk-chat: %s\n", a.error.data);
    /* a question that failed before an answer began is taken back */
    if (!rc || a.content.length)
        say(messages, "assistant", a.content.data ? a.content.data : "");
    else
        json_object_array_del_idx(messages, json_object_array_length(messages) - 1, 1);
    json_object_put(body);
    answer_free(&a);
    return stopped ? 130 : rc ? 1 : 0;
}

static void interactive(const settings *s) {
    char *line = NULL;
    size_t size = 0;
    struct json_object *messages = new_chat(s);
    if (out.terminal)
        printf("%s at %s.  /new forgets the chat, Ctrl-C stops an answer, Ctrl-D ends.\n", s->model, s->url);
    for (;;) {
        if (out.terminal) fputs("> ", stdout), fflush(stdout);
        errno = 0;
        ssize_t n = getline(&line, &size, stdin);
        if (n < 0) break;
        while (n && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = 0;
        if (!strcmp(line, "/new"))
            json_object_put(messages), messages = new_chat(s);
        else if (n)
            ask(s, messages, line);
    }
    if (out.terminal) putchar('\n');
    json_object_put(messages);
    free(line);
}

/* ---- flags ---- */

static void usage(FILE *f) {
    fputs("usage: nmk-chat [flags] [PROMPT...]     (without a prompt: a chat)\n"
          "  --url URL          the server's API ($OPENAI_BASE_URL, else http://127.0.0.1:8000/v1)\n"
          "  --api-key KEY      what it wants to see ($OPENAI_API_KEY, else none)\n"
          "  --model NAME       which of its models (the first it names)\n"
          "  --system TEXT      how the chat begins (nothing)\n"
          "  --temperature T    of the answers (the server's default)\n"
          "  --max-tokens N     of an answer (the server's default)\n"
          "  --help             print this\n",
          f);
}

static bool is_number(const char *value) {
    char *end;
    double v = strtod(value, &end);
    return *value >= '0' && *value <= '9' && !*end && v >= 0 && v < 1e9;
}

/* 0, or 2 with a message.  *first: where the prompt begins. */
static int read_flags(settings *s, int argc, char **argv, int *first, bool *help) {
    struct {
        const char *name, **value;
    } table[] = {{"--url", &s->url},
                 {"--api-key", &s->key},
                 {"--model", &s->model},
                 {"--system", &s->system},
                 {"--temperature", &s->temperature},
                 {"--max-tokens", &s->max_tokens}};
    int i = 1;
    for (; i < argc && !strncmp(argv[i], "--", 2); i++) {
        size_t n = strcspn(argv[i], "="), f = 0;
        if (!strcmp(argv[i], "--")) {
            i++;
            break;
        }
        if (!strcmp(argv[i], "--help")) return *help = true, 0;
        while (f < sizeof table / sizeof *table && (strlen(table[f].name) != n || strncmp(argv[i], table[f].name, n)))
            f++;
        if (f == sizeof table / sizeof *table)
            return fprintf(stderr, "nmk-chat: unknown flag %s; --help lists them\n", argv[i]), 2;
        *table[f].value = argv[i][n] ? argv[i] + n + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (!*table[f].value) return fprintf(stderr, "nmk-chat: %s needs a value\n", table[f].name), 2;
    }
    *first = i;
    if (s->temperature && !is_number(s->temperature))
        return fprintf(stderr, "nmk-chat: --temperature %s: expected a number from 0\n", s->temperature), 2;
    if (s->max_tokens && (!is_number(s->max_tokens) || strpbrk(s->max_tokens, ".eExX") || atol(s->max_tokens) < 1))
        return fprintf(stderr, "nmk-chat: --max-tokens %s: expected a whole number from 1\n", s->max_tokens), 2;
    return 0;
}

static const char *environment(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

int main(int argc, char **argv) {
    settings s = {.url = environment("OPENAI_BASE_URL"), .key = environment("OPENAI_API_KEY")};
    int first = 1;
    bool help = false;
    if (read_flags(&s, argc, argv, &first, &help)) return 2;
    if (help) return usage(stdout), 0;
    if (!s.url) s.url = "http://127.0.0.1:8000/v1";
    out.terminal = isatty(STDOUT_FILENO);
    curl_global_init(CURL_GLOBAL_DEFAULT);
    struct sigaction action = {.sa_handler = on_interrupt}; /* no SA_RESTART: at the prompt it ends the chat */
    sigaction(SIGINT, &action, NULL);
    int rc = s.model ? 0 : find_model(&s);
    if (!rc && first < argc) {
        text prompt = {0};
        for (int i = first; i < argc; i++) add_string(&prompt, argv[i]), add_string(&prompt, i + 1 < argc ? " " : "");
        struct json_object *messages = new_chat(&s);
        rc = ask(&s, messages, prompt.data);
        json_object_put(messages);
        free(prompt.data);
    } else if (!rc) {
        interactive(&s);
    }
    free(s.found_model);
    curl_global_cleanup();
    return rc;
}
