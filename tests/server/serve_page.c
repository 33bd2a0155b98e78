/* The page at /: what it is made of, by HTTP; and what it does, in a headless Chromium where there is one (`make
 * test-page` installs it): a chat with reasoning and calls, a key, the figures, dark and light, no host but the server.
 *
 * The browser is driven by its DevTools protocol over two pipes: JSON with a NUL behind it. */
#define _GNU_SOURCE
#include "helper.h"
#include "serve_helper.h"

#include <ftw.h>

static const char tools[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"description\":\"The weather of a city\","
    "\"parameters\":{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"}},\"required\":[\"city\"]}}}]";

/* ---------------------------------------------------------------- by HTTP */

static void test_file(void) {
    const char *flags[] = {"--checkpoint", "examples/nmc-toy", "--api-key", "sesame-open", NULL};
    char *file = NULL;
    size_t bytes = 0;
    nmk_err e = {0};
    server s = server_start(flags);
    reply r = get(s.port, "/");
    check(nmk_file_read(&file, &bytes, "server/page.html", 1 << 20, &e) == 0, "server/page.html", "%s", e.text);
    check(r.status == 200 && strstr(r.raw.data, "text/html; charset=utf-8") && !strcmp(r.body, file),
          "the page needs no key", "status %d", r.status);
    check(strstr(r.raw.data, "Content-Security-Policy: default-src 'none'") && strstr(r.raw.data, "connect-src 'self'"),
          "and may talk to this server alone", "%.400s", r.raw.data);
    check(!strstr(file, "http:") && !strstr(file, "https:") && !strstr(file, "src=") && !strstr(file, "@import") &&
              !strstr(file, "innerHTML") && !strstr(file, "\"//"),
          "names no other host and no other file, and makes no HTML of text", "it does");
    reply_free(&r);
    r = post(s.port, "/", "");
    check(r.status == 405, "it is only read", "status %d", r.status);
    reply_free(&r);
    server_end(&s, SIGTERM, 5000);
    free(file);
}

/* ---------------------------------------------------------------- a browser */

typedef struct {
    pid_t pid;
    int in, out, id; /* in: what it reads */
    char session[80], folder[40];
    nmk_buf text; /* read and not looked at */
    nmk_buf hosts, faults;
} browser;

static const char *find_browser(void) {
    static const char *const known[] = {"/usr/bin/chromium-headless-shell", "/usr/bin/chromium",
                                        "/usr/bin/google-chrome"};
    const char *named = getenv("NMK_CHROMIUM");
    for (size_t i = 0; i < sizeof known / sizeof *known && !named; i++)
        if (access(known[i], X_OK) == 0) named = known[i];
    return named;
}

static browser browser_start(const char *program) {
    browser b = {.folder = "/tmp/nmk-page-XXXXXX"};
    int in[2], out[2];
    if (!mkdtemp(b.folder) || pipe(in) || pipe(out)) exit(2);
    char *data = xasprintf("--user-data-dir=%s", b.folder);
    b.pid = fork();
    if (!b.pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        /* above 4 first, so that neither end is overwritten by the other */
        int from = fcntl(in[0], F_DUPFD, 10), to = fcntl(out[1], F_DUPFD, 10), null = open("/dev/null", O_RDWR);
        dup2(from, 3), dup2(to, 4), dup2(null, 1), dup2(null, 2);
        for (int fd = 5; fd < 64; fd++) close(fd);
        execl(program, program, "--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage",
              "--no-first-run", "--disable-background-networking", "--disable-component-update",
              "--window-size=1200,800", data, geteuid() == 0 ? "--no-sandbox" : "--no-default-browser-check",
              "about:blank", (char *)NULL);
        _exit(127);
    }
    close(in[0]), close(out[1]);
    b.in = in[1], b.out = out[0];
    free(data);
    return b;
}

static int unlink_one(const char *path, const struct stat *s, int type, struct FTW *f) {
    (void)s, (void)type, (void)f;
    return remove(path);
}

static void browser_end(browser *b) {
    kill(b->pid, SIGKILL);
    waitpid(b->pid, NULL, 0);
    close(b->in), close(b->out);
    for (int i = 0; i < 20 && nftw(b->folder, unlink_one, 16, FTW_DEPTH | FTW_PHYS); i++) usleep(50000);
    nmk_buf_free(&b->text), nmk_buf_free(&b->hosts), nmk_buf_free(&b->faults);
}

/* What the page asked for, and what went wrong in it. */
static void note_event(browser *b, struct json_object *message) {
    const char *method = text_at(message, "method");
    const char *url = text_at(message, "params.request.url");
    if (!strcmp(method, "Network.requestWillBeSent") && strncmp(url, "data:", 5) != 0)
        nmk_buf_printf(&b->hosts, "%s\n", url);
    if (!strcmp(method, "Runtime.exceptionThrown"))
        nmk_buf_printf(&b->faults, "%s; ", text_at(message, "params.exceptionDetails.exception.description"));
    if (!strcmp(method, "Log.entryAdded") && !strcmp(text_at(message, "params.entry.level"), "error") &&
        strcmp(text_at(message, "params.entry.source"), "network") != 0)
        nmk_buf_printf(&b->faults, "%s; ", text_at(message, "params.entry.text"));
}

/* The next message, or NULL after 30 s. */
static struct json_object *next_message(browser *b) {
    nmk_err e;
    for (;;) {
        char part[65536], *end = b->text.length ? memchr(b->text.data, 0, b->text.length) : NULL;
        if (end) {
            size_t n = (size_t)(end - b->text.data);
            struct json_object *o = nmk_json_parse(b->text.data, n, &e);
            memmove(b->text.data, end + 1, b->text.length - n - 1);
            b->text.length -= n + 1;
            return o;
        }
        struct pollfd p = {.fd = b->out, .events = POLLIN};
        ssize_t n = poll(&p, 1, 30000) == 1 ? read(b->out, part, sizeof part) : 0;
        if (n <= 0) return NULL;
        nmk_buf_add(&b->text, part, (size_t)n);
    }
}

/* Calls a method; its result is the caller's.  params: JSON. */
static struct json_object *call(browser *b, const char *method, const char *params) {
    char *text = xasprintf("{\"id\":%d,\"method\":\"%s\"%s%s%s,\"params\":%s}", ++b->id, method,
                           *b->session ? ",\"sessionId\":\"" : "", b->session, *b->session ? "\"" : "", params);
    ssize_t did = write(b->in, text, strlen(text) + 1);
    free(text);
    for (struct json_object *m; did > 0 && (m = next_message(b));) {
        if (int_at(m, "id") == b->id) return m;
        note_event(b, m);
        json_object_put(m);
    }
    printf("not ok - the browser answers %s: it does not\n", method);
    exit(1);
}

static void call_only(browser *b, const char *method, const char *params) { json_object_put(call(b, method, params)); }

/* The value of an expression, as text; the caller frees. */
static char *value(browser *b, const char *expression) {
    struct json_object *o = json_object_new_object();
    char *with = xasprintf("String(%s)", expression);
    json_object_object_add(o, "expression", json_object_new_string(with));
    json_object_object_add(o, "userGesture", json_object_new_boolean(true));
    struct json_object *m = call(b, "Runtime.evaluate", json_object_to_json_string(o));
    char *text = xstrdup(text_at(m, "result.result.value"));
    if (at(m, "result.exceptionDetails")) nmk_buf_printf(&b->faults, "%s; ", json_object_to_json_string(m));
    json_object_put(o), json_object_put(m), free(with);
    return text;
}

static bool is(browser *b, const char *expression) {
    char *text = value(b, expression);
    bool yes = !strcmp(text, "true");
    free(text);
    return yes;
}

static bool becomes(browser *b, const char *expression, int ms) {
    for (int i = 0; i < ms / 50; i++) {
        if (is(b, expression)) return true;
        usleep(50000);
    }
    return is(b, expression);
}

static void expect(browser *b, const char *expression, const char *name) {
    bool good = becomes(b, expression, 20000);
    char *log = good ? NULL : value(b, "document.body?.innerText.slice(0, 500)");
    check(good, name, "%s is not so; the page says: %s", expression, log);
    free(log);
}

/* Types into a field as a person does, so that the page hears of it. */
static void set(browser *b, const char *id, const char *text) {
    struct json_object *s = json_object_new_string(text);
    char *expression = xasprintf("(() => { const e = document.getElementById('%s'); e.value = %s;"
                                 " e.dispatchEvent(new Event('change')); })()",
                                 id, json_object_to_json_string(s));
    free(value(b, expression));
    json_object_put(s), free(expression);
}

static void ask(browser *b, const char *text) {
    set(b, "message", text);
    free(value(b, "document.getElementById('ask').requestSubmit()"));
}

#define LAST  "[...document.querySelectorAll('article.assistant')].pop()"
#define ENDED "!document.getElementById('send').disabled && " LAST " && " LAST ".querySelector('.note')"

static void test_chat(browser *b) {
    expect(b, "document.getElementById('name').textContent.includes('API key')", "without the key it says so");
    set(b, "key", "sesame-open");
    expect(b, "document.getElementById('model').value === 'nmc-toy'", "with it the model is listed");
    set(b, "temperature", "0");
    ask(b, "What is 7 times 8?");
    expect(b, ENDED " && " LAST ".querySelector('.content').innerText.includes('56')", "a question is answered");
    expect(b,
           LAST ".querySelector('details') && !" LAST ".querySelector('details').open && " LAST
                ".querySelector('details .text').textContent.length > 0",
           "the reasoning is there, folded");
    expect(b, "/\\d+ \\+ \\d+ tokens, [\\d.]+ tokens\\/s, first after \\d+ ms/.test(" LAST ".innerText)",
           "with its figures");
    ask(b, "Write a Python function that adds two numbers.");
    expect(b,
           ENDED " && document.querySelectorAll('article.assistant').length === 2 && " LAST
                 ".innerText.includes('def ')",
           "the chat goes on");
    expect(b, "messages.length === 4 && messages[1].role === 'assistant' && !messages[1].content.includes('<')",
           "with the answers so far");
    ask(b, "<img src=x onerror=alert(1)><b>bold</b>");
    expect(b, ENDED " && document.querySelectorAll('article.assistant').length === 3", "markup is sent as text");
    check(is(b, "document.querySelectorAll('#log img, #log b').length === 0"), "and shown as text", "it is not");
}

static void test_calls(browser *b) {
    free(value(b, "document.getElementById('clear').click()"));
    check(is(b, "messages.length === 0 && document.getElementById('log').children.length === 0"), "a chat is cleared",
          "it is not");
    set(b, "tools", tools);
    ask(b, "What is the weather in Paris?");
    expect(b, ENDED " && " LAST ".querySelector('.call').textContent.startsWith('calls get_weather({')",
           "a call is shown");
    free(value(b, LAST ".querySelector('textarea').value = '{\"weather\": \"sunny\"}'"));
    free(value(b, LAST ".querySelector('button').click()"));
    expect(b, ENDED " && document.querySelectorAll('article.assistant').length === 2 && messages.length === 4",
           "its result is sent, and answered");
    check(is(b, "messages[2].role === 'tool' && messages[2].tool_call_id === messages[1].tool_calls[0].id"),
          "as the result of that call", "it is not");
    set(b, "tools", "[{");
    ask(b, "Hello");
    expect(b, ENDED " && " LAST ".querySelector('.error').textContent.startsWith('Tools: ')",
           "tools that are no JSON are refused");
    set(b, "tools", "");
}

static void test_stop(browser *b, const server *s) {
    free(value(b, "document.getElementById('clear').click()"));
    set(b, "temperature", "2"), set(b, "most", "3000");
    ask(b, "Write all that you know.");
    expect(b, "running && " LAST ".innerText.length > 30 || !running", "an answer is streamed");
    expect(b, "+document.getElementById('rate').textContent > 0 || !running", "tokens are counted while they come");
    free(value(b, "document.getElementById('stop').click()"));
    expect(b, ENDED " && !running", "it is stopped");
    check(metric_becomes(s->port, "vllm:num_requests_running", 0, 5000), "and the server stops", "it goes on");
    set(b, "temperature", ""), set(b, "most", "");
}

static void test_figures(browser *b) {
    expect(b,
           "document.getElementById('running').textContent === '0' && "
           "/^[\\d.]+ %$/.test(document.getElementById('kv').textContent)",
           "sequences and KV use are shown");
    expect(b, "document.getElementById('curve').getAttribute('points').split(' ').length === 60",
           "and a minute's rate");
}

/* Contrast as WCAG has it, of texts on what is behind them; the least of the page. */
static const char contrast[] =
    "(() => { const rgb = c => c.match(/[\\d.]+/g).map(Number);"
    " const light = c => { const [r, g, b] = rgb(c).map(v => v / 255)"
    "  .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };"
    " const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;"
    "  if (rgb(c).length < 4 || rgb(c)[3] > 0) return c; } return 'rgb(255,255,255)'; };"
    " let least = 99; for (const e of document.querySelectorAll('h1,h2,label,p,dt,dd,button,summary,.text,.note,input')) {"
    "  if (e.disabled || !e.getClientRects().length) continue;"
    "  const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);"
    "  least = Math.min(least, (a + .05) / (b + .05)); } return least.toFixed(2); })()";

static void test_looks(browser *b) {
    char *ground[2];
    for (int dark = 0; dark < 2; dark++) {
        char *params =
            xasprintf("{\"features\":[{\"name\":\"prefers-color-scheme\",\"value\":\"%s\"}]}", dark ? "dark" : "light");
        call_only(b, "Emulation.setEmulatedMedia", params);
        ground[dark] = value(b, "getComputedStyle(document.body).backgroundColor");
        char *least = value(b, contrast);
        check(atof(least) >= 4.5, dark ? "dark: texts are legible" : "light: texts are legible", "contrast %s", least);
        free(params), free(least);
    }
    check(!strcmp(ground[0], "rgb(255, 255, 255)") && !strcmp(ground[1], "rgb(20, 22, 26)"), "dark and light",
          "%s and %s", ground[0], ground[1]);
    free(ground[0]), free(ground[1]);
    check(is(b,
             "[...document.querySelectorAll('input, textarea, select')].every(e => e.labels.length) && "
             "[...document.querySelectorAll('button')].every(e => e.textContent) && !!document.documentElement.lang"),
          "every field has its label", "one has none");
    check(is(b, "document.getElementById('log').getAttribute('aria-live') === 'polite'"), "answers are read out",
          "they are not");
    call_only(b, "Emulation.setDeviceMetricsOverride",
              "{\"width\":360,\"height\":640,\"deviceScaleFactor\":1,\"mobile\":true}");
    check(is(b, "document.documentElement.scrollWidth <= 360"), "it fits a small screen", "it is wider");
}

static void test_page(const char *program) {
    /* a short context: what is asked is not all in the toy's world, and its answers may not end by themselves */
    const char *flags[] = {
        "--checkpoint", "examples/nmc-toy", "--api-key", "sesame-open", "--max-model-len", "512", NULL};
    server s = server_start(flags);
    browser b = browser_start(program);
    nmk_buf_puts(&b.hosts, ""), nmk_buf_puts(&b.faults, "");
    struct json_object *m = call(&b, "Target.createTarget", "{\"url\":\"about:blank\"}");
    char *params = xasprintf("{\"targetId\":\"%s\",\"flatten\":true}", text_at(m, "result.targetId"));
    json_object_put(m);
    m = call(&b, "Target.attachToTarget", params);
    snprintf(b.session, sizeof b.session, "%s", text_at(m, "result.sessionId"));
    json_object_put(m), free(params);
    call_only(&b, "Network.enable", "{}"), call_only(&b, "Runtime.enable", "{}"), call_only(&b, "Log.enable", "{}");
    params = xasprintf("{\"url\":\"http://127.0.0.1:%d/\"}", s.port);
    call_only(&b, "Page.navigate", params);
    free(params);
    expect(&b, "document.readyState === 'complete' && document.title === 'nmk-serve'", "the page loads");
    test_chat(&b), test_calls(&b), test_stop(&b, &s), test_figures(&b), test_looks(&b);
    check(!b.faults.length, "no error in the page", "%s", b.faults.data);
    char *own = xasprintf("http://127.0.0.1:%d/", s.port);
    int others = 0, requests = 0;
    for (char *line = strtok(b.hosts.data, "\n"); line; line = strtok(NULL, "\n"))
        requests++, others += strncmp(line, own, strlen(own)) != 0;
    check(requests > 10 && !others, "no host but the server is asked", "%d of %d", others, requests);
    free(own);
    browser_end(&b);
    server_end(&s, SIGTERM, 5000);
}

int main(void) {
    const char *program = find_browser();
    signal(SIGPIPE, SIG_IGN);
    test_file();
    if (program)
        test_page(program);
    else
        printf("skip - the page in a browser: no Chromium here (make test-page)\n");
    return failures != 0;
}
