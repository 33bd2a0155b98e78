/* Chat templates that want too much: each is refused with one message, and the template and the process go on. */
#include "template.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "json.h"
#include "server/helper.h"

static nmk_template_limits small = {.memory_bytes = 32 << 20, .output_bytes = 4 << 20, .instructions = 20000000};

static struct json_object *parsed(const char *text) {
    nmk_err e;
    struct json_object *tree = nmk_json_parse(text, strlen(text), &e);
    if (!tree) die(e.text);
    return tree;
}

/* Compiles and renders; the message, or the text, or "" where compiling alone was asked for. */
static int run(const char *source, size_t bytes, const char *messages, nmk_buf *out, nmk_err *e) {
    nmk_template *t = NULL;
    struct json_object *tree = parsed(messages);
    nmk_template_input in = {.messages = tree};
    e->text[0] = 0;
    int rc = nmk_template_compile(source, bytes, "chat template", &small, &t, e);
    if (!rc) {
        rc = nmk_template_render(t, &in, out, e);
        /* Whatever happened, the next render is as good as any. */
        nmk_buf again = {0};
        nmk_err e2 = {""};
        int rc2 = nmk_template_render(t, &in, &again, &e2);
        if (rc != rc2 || (rc && strcmp(e->text, e2.text) && !strstr(e->text, "longer than")))
            nmk_fail(e, "the second render differs: %.300s", e2.text);
        nmk_buf_free(&again);
    }
    nmk_template_free(t);
    json_object_put(tree);
    return rc;
}

static void refuse_with(const char *name, const char *source, size_t bytes, const char *messages,
                        const char *expected) {
    nmk_buf out = {0};
    nmk_err e;
    uint64_t start = nmk_now_ns();
    int rc = run(source, bytes, messages, &out, &e);
    double seconds = (double)(nmk_now_ns() - start) / 1e9;
    bool good = rc == -1 && !strncmp(e.text, expected, strlen(expected)) && !out.length && seconds < time_limit(60);
    check(good, name, "expected %s, found %.200s after %.1f s", expected, rc ? e.text : "(accepted)", seconds);
    nmk_buf_free(&out);
}
#define REFUSE(name, source, expected) refuse_with(name, source, strlen(source), "[]", "chat template: " expected)

static char *repeated(const char *before, const char *piece, int count, const char *after) {
    nmk_buf b = {0};
    nmk_buf_puts(&b, before);
    for (int i = 0; i < count; i++) nmk_buf_puts(&b, piece);
    nmk_buf_puts(&b, after);
    return b.data;
}

static void refuse_repeated(const char *name, const char *before, const char *piece, int count, const char *after,
                            const char *expected) {
    char *source = repeated(before, piece, count, after);
    refuse_with(name, source, strlen(source), "[]", expected);
    free(source);
}

static void limits(void) {
    REFUSE("endless loop", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
           "line 1: runs for too long");
    REFUSE("endless work in a filter",
           "{% set s = 'a' * 4000000 %}\n{% for a in range(99999) %}{% set n = s|length %}{% endfor %}",
           "line 2: runs for too long");
    REFUSE("endless work in comparing",
           "{% set s = 'a' * 4000000 %}\n{% set t = s ~ 'b' %}{% set s = s ~ 'c' %}"
           "{% for a in range(99999) %}{% set n = s == t %}{% set n = s < t %}{% endfor %}",
           "line 2: ");
    REFUSE("endless recursion", "\n{% macro m() %}\n{{ m() }}{% endmacro %}{{ m() }}",
           "line 3: macro 'm': nested too deeply");
    REFUSE("two macros", "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
           "line 1: macro 'a': nested too deeply");
    REFUSE("text times", "\n{{ ('x' * 1000000000)|length }}", "line 2: a result beyond the limit of memory");
    REFUSE("text times, overflow", "{{ 'xxxx' * 4611686018427387904 }}", "line 1: ");
    REFUSE("text times text",
           "{% set ns = namespace(s='abcdefgh') %}{% for i in range(60) %}\n{% set ns.s = ns.s + ns.s %}"
           "{% endfor %}",
           "takes more than 32 MB of memory");
    REFUSE("list times", "{{ [1, 2] * 100000000 }}", "line 1: a result beyond the limit of memory");
    REFUSE("padding", "{{ 'a'.ljust(1000000000) }}", "line 1: a result beyond the limit of memory");
    REFUSE("padding by format", "{{ '%999999999d' % 1 }}", "line 1: a width or precision that is too large");
    REFUSE("padding by format()", "{{ '{:999999999}'.format(1) }}", "line 1: Invalid format specifier");
    REFUSE("precision", "{{ '%.99999f' % 1 }}", "line 1: a width or precision that is too large");
    REFUSE("indent", "{{ 'a\nb'|indent(2000000000) }}", "line 2: a result beyond the limit of memory");
    REFUSE("tojson indent", "{{ [1]|tojson(indent=2000000000) }}", "line 1: a result beyond the limit of memory");
    REFUSE("replace", "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}", "line 1: ");
    REFUSE("join", "{% set s = 'a' * 1000000 %}{{ s|join(s) }}", "");
    REFUSE("power", "{{ 2 ** 2 ** 40 }}", "line 1: an integer that does not fit 64 bits");
    REFUSE("sum", "{{ 9223372036854775807 + 1 }}", "line 1: an integer that does not fit 64 bits");
    REFUSE("product", "{{ 9223372036854775807 * 2 }}", "line 1: an integer that does not fit 64 bits");
    REFUSE("large literal", "\n{{ 9223372036854775808 }}",
           "line 2: the integer 9223372036854775808 does not fit 64 bits");
    REFUSE("range", "{{ range(0, 9223372036854775807) }}", "line 1: Range too big");
    REFUSE("batch", "{{ [1]|batch(999999999, 'x')|list }}", "line 1: batch: rows that are too long");
    REFUSE("round", "{{ 1.5|round(999999999) }}", "line 1: round: a precision that is too large");
    REFUSE("output", "{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "makes a text of more than 4 MB");
    REFUSE("many small pieces", "{% for i in range(99999) %}{% for j in range(9999) %}ab{% endfor %}{% endfor %}", "");
    REFUSE("list of itself", "{% set l = [] %}{{ l.append(l) }}\n{{ l|tojson }}",
           "line 2: lists within lists: nested too deeply");
    REFUSE("list of itself, printed", "{% set l = [] %}{% set _ = l.append(l) %}{{ l }}",
           "line 1: lists within lists: nested too deeply");
    REFUSE("list of itself, compared",
           "{% set l = [] %}{% set m = [] %}{% set _ = l.append(m) %}{% set _ = m.append(l) %}{{ l == m }}",
           "line 1: lists within lists: nested too deeply");
    REFUSE("deep list",
           "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
           "");
    REFUSE("search", "{% set s = 'a' * 3000000 %}{% for i in range(9999) %}{{ (s ~ 'b') in (s ~ s) }}{% endfor %}", "");
    REFUSE("search from the end", "{% set s = 'a' * 1000000 %}{{ (s ~ s).rfind(s) }}", "line 1: runs for too long");
    REFUSE("strip", "{% set s = 'b' * 1000000 %}{{ s.strip('a' * 1000000 ~ 'b') }}", "line 1: runs for too long");
    REFUSE("time format", "{{ strftime_now('%c' * 1000) }}", "line 1: strftime_now: not a possible format");
    REFUSE("too many arguments", "{{ range(*range(99999)) }}", "line 1: too many arguments");
}

static void deadline(void) {
    const int brief_ms = time_limit(20);
    const nmk_template_limits brief = {.time_ns = (uint64_t)brief_ms * 1000000};
    const char *source = "{% for a in range(99999) %}\n{% for b in range(99999) %}{% endfor %}{% endfor %}";
    nmk_template *t = NULL;
    nmk_err e = {""};
    nmk_buf out = {0};
    struct json_object *list = parsed("[]");
    nmk_template_input in = {.messages = list};
    /* On a slow machine loading alone may take that long. */
    for (int tries = 0; tries < 20 && !t; tries++) nmk_template_compile(source, strlen(source), "x", &brief, &t, &e);
    if (!t) die(e.text);
    uint64_t start = nmk_now_ns();
    int rc = nmk_template_render(t, &in, &out, &e);
    char said[64];
    snprintf(said, sizeof said, ": takes longer than %d ms", brief_ms);
    check(rc && strstr(e.text, said) && nmk_now_ns() - start < time_limit_ns(2000), "a deadline", "%s", e.text);
    nmk_template_free(t);
    json_object_put(list);
    nmk_buf_free(&out);
}

static void depth(void) {
    refuse_repeated("brackets", "\n{{ ", "(", 5000, "", "chat template: line 2: nested too deeply");
    refuse_repeated("lists", "{{ ", "[", 5000, "", "chat template: line 1: nested too deeply");
    refuse_repeated("not", "{{ ", "not ", 5000, "1 }}", "chat template: line 1: nested too deeply");
    refuse_repeated("minus", "{{ ", "- ", 5000, "1 }}", "chat template: line 1: nested too deeply");
    refuse_repeated("else", "{{ ", "1 if 0 else ", 5000, "1 }}", "chat template: line 1: nested too deeply");
    refuse_repeated("filters", "{{ 1", "|abs", 5000, " }}", "chat template: line 1: nested too deeply");
    refuse_repeated("attributes", "{{ a", ".b", 5000, " }}", "chat template: line 1: nested too deeply");
    refuse_repeated("products", "{{ 1", " * 1", 5000, " }}", "chat template: line 1: nested too deeply");
    refuse_repeated("if", "", "{% if 1 %}", 5000, "", "chat template: line 1: nested too deeply");
    refuse_repeated("for", "", "{% for a in b %}", 30, "", "chat template: line 1: ");
    char *open = repeated("", "{% for a in b %}", 30, ""), *source = repeated(open, "{% endfor %}", 30, "");
    refuse_with("closed for", source, strlen(source), "[]", "chat template: line 1: nested too deeply");
    free(open), free(source);
    refuse_repeated("arguments", "\n{{ f(1", ",1", 1000, ") }}", "chat template: line 2: too large for one expression");
}

static void escapes(void) {
    REFUSE("class", "{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__' of 'str' object is unsafe.");
    REFUSE("globals", "{{ raise_exception.__globals__.os }}",
           "line 1: access to attribute '__globals__' of 'function' object is unsafe.");
    REFUSE("metatable", "{{ [].__index.x }}", "line 1: 'list object' has no attribute '__index'");
    REFUSE("fields of our own", "{{ [1].kind.x }}", "line 1: 'list object' has no attribute 'kind'");
    REFUSE("fields of a dict", "{{ {}.keys.x }}{{ {}.map.x }}", "line 1: 'dict object' has no attribute 'map'");
    REFUSE("fields of a macro", "{% macro m() %}{% endmacro %}{{ m.fn.x }}",
           "line 1: 'function object' has no attribute 'fn'");
    REFUSE("Lua's string library", "{{ 'a'.rep(100) }}", "line 1: 'str object' has no attribute 'rep'");
    REFUSE("Lua's globals", "{{ string.rep('a', 5) }}", "line 1: 'string' is undefined");
    REFUSE("Lua's environment", "{{ _ENV.x }}", "line 1: '_ENV' is undefined");
    REFUSE("Lua's _G", "{{ _G.x }}", "line 1: '_G' is undefined");
    REFUSE("our locals", "{{ J.x }}", "line 1: 'J' is undefined");
    REFUSE("our library", "{{ filters.x }}", "line 1: 'filters' is undefined");
    REFUSE("os", "{{ os.execute('true') }}", "line 1: 'os' is undefined");
    REFUSE("load", "{{ load('x')() }}", "line 1: 'load' is undefined");
    REFUSE("self", "{{ self._TemplateReference__context }}", "line 1: 'self' is undefined");
    REFUSE("format", "{{ '{0.__class__.__init__}'.format(1) }}", "line 1: access to attribute '__class__'");
    REFUSE("namespace with a dunder", "{% set ns = namespace() %}{{ ns.__init__.x }}", "line 1: access to attribute");
    /* Text that would be code if it were pasted. */
    nmk_buf out = {0};
    nmk_err e;
    const char *source = "{% set x = '\"] = 1 os.exit() --' %}{{ x }}\n]] .. os.exit() .. [[ \\ \"{{ '\\\\' }}";
    int rc = run(source, strlen(source), "[]", &out, &e);
    check(!rc && !strcmp(out.data, "\"] = 1 os.exit() --\n]] .. os.exit() .. [[ \\ \"\\"), "text stays text", "%s",
          rc ? e.text : out.data);
    nmk_buf_free(&out);
}

static void input(void) {
    refuse_with("broken UTF-8", "a\xff", 2, "[]", "chat template: not valid UTF-8");
    refuse_with("half a character", "{{ '\\ud83d' }}", 14, "[]", "chat template: line 1: \\ud83d is not a character");
    nmk_buf out = {0};
    nmk_err e;
    int rc = run("a\0b{{ 'c\0d' }}", 14, "[]", &out, &e);
    check(!rc && out.length == 6 && !memcmp(out.data, "a\0bc\0d", 6), "NUL in a template", "%s", e.text);
    nmk_buf_free(&out);
    rc = run("{{ messages[0].a }}{{ messages[0].a|length }}", 45, "[{\"a\":\"x\\u0000y\"}]", &out, &e);
    check(!rc && out.length == 4 && !memcmp(out.data, "x\0y3", 4), "NUL in a message", "%s", e.text);
    nmk_buf_free(&out);
    rc = run("", 0, "[]", &out, &e);
    check(!rc && out.length == 0, "an empty template", "%s", e.text);
    nmk_buf_free(&out);

    /* A megabyte of message goes through. */
    nmk_buf big = {0};
    nmk_buf_puts(&big, "[{\"role\":\"user\",\"content\":\"");
    for (int i = 0; i < 1 << 17; i++) nmk_buf_puts(&big, "h\xc3\xa9ll\xc3\xb6 ");
    nmk_buf_puts(&big, "\"}]");
    const char *source = "{% for m in messages %}{{ m.content|trim }}{{ m.content|length }}{{ m|tojson }}{% endfor %}";
    rc = run(source, strlen(source), big.data, &out, &e);
    check(!rc && out.length > 2 << 20, "a large message", "%s", e.text);
    nmk_buf_free(&big);
    nmk_buf_free(&out);

    nmk_template *t = NULL;
    if (nmk_template_compile("{{ a }}", 7, "chat template", NULL, &t, &e)) die(e.text);
    struct json_object *list = parsed("[]"), *object = parsed("{\"messages\":[1]}");
    nmk_template_input in = {.messages = object};
    check(nmk_template_render(t, &in, &out, &e) && !strcmp(e.text, "messages: expected an array"),
          "messages of a wrong type", "%s", e.text);
    in = (nmk_template_input){.messages = list, .tools = object};
    check(nmk_template_render(t, &in, &out, &e) && !strcmp(e.text, "tools: expected an array"), "tools of a wrong type",
          "%s", e.text);
    in = (nmk_template_input){.messages = list, .kwargs = object};
    check(nmk_template_render(t, &in, &out, &e) == -1, "kwargs that replace the messages", "accepted");
    nmk_buf_free(&out);
    json_object_put(list);
    json_object_put(object);
    nmk_template_free(t);
}

/* ---------------------------------------------------------------- files */

static void write_file(const char *dir, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f)) die(path);
}

/* What a checkpoint with these files says without and with tools, or why it is refused. */
static void folder(const char *name, const char *jinja, const char *config, const char *tool_use,
                   const char *expected) {
    char dir[] = "/tmp/nmk-template-XXXXXX", path[512];
    nmk_template *t = NULL;
    nmk_err e = {""};
    nmk_buf out = {0};
    if (!mkdtemp(dir)) die("mkdtemp");
    if (jinja) write_file(dir, "chat_template.jinja", jinja);
    if (config) write_file(dir, "tokenizer_config.json", config);
    snprintf(path, sizeof path, "%s/additional_chat_templates", dir);
    if (tool_use) {
        if (mkdir(path, 0700)) die(path);
        write_file(path, "tool_use.jinja", tool_use);
    }
    struct json_object *list = parsed("[]");
    nmk_template_input in = {.messages = list}, with_tools = {.messages = list, .tools = list};
    if (nmk_template_load(dir, NULL, &t, &e) || nmk_template_render(t, &in, &out, &e) ||
        nmk_template_render(t, &with_tools, &out, &e)) {
        const char *text = !strncmp(e.text, dir, strlen(dir)) ? e.text + strlen(dir) : e.text;
        out.length = 0;
        nmk_buf_puts(&out, text);
    }
    check(!strcmp(out.data, expected), name, "expected %s, found %s", expected, out.data);
    nmk_template_free(t);
    nmk_buf_free(&out);
    json_object_put(list);
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    if (system(command)) die(command);
}

static void files(void) {
    folder("the file comes first", "file ", "{\"chat_template\":\"config\"}", NULL, "file file ");
    folder("the config's text", NULL, "{\"chat_template\":\"config \"}", NULL, "config config ");
    folder("the config's list", NULL,
           "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"tools\"},{\"name\":\"rag\",\"template\":\"{{\"},"
           "{\"name\":\"default\",\"template\":\"plain \"}]}",
           NULL, "plain tools");
    folder("an additional file", "file ", NULL, "tools", "file tools");
    folder("nothing", NULL, NULL, NULL, ": no chat template: neither chat_template.jinja nor tokenizer_config.json");
    folder("a config without", NULL, "{\"chat_template\":null}", NULL, "/tokenizer_config.json: no chat_template");
    folder("a list without default", NULL, "{\"chat_template\":[]}", NULL,
           "/tokenizer_config.json: chat_template has none named default");
    folder("two of a name", NULL,
           "{\"chat_template\":[{\"name\":\"default\",\"template\":\"a\"},{\"name\":\"default\",\"template\":\"b\"}]}",
           NULL, "/tokenizer_config.json: chat_template \"default\": the same template twice");
    folder("an entry of a wrong type", NULL, "{\"chat_template\":[{\"name\":\"default\",\"template\":5}]}", NULL,
           "/tokenizer_config.json: chat_template[0]: expected a name and a template");
    folder("a file's mistake", "a\n\n{% endfor %}", NULL, NULL,
           "/chat_template.jinja: line 3: Encountered unknown tag 'endfor'.");
    folder("a config's mistake", NULL, "{\"chat_template\":\"a\\n{{ 1 + }}\"}", NULL,
           "/tokenizer_config.json: chat_template: line 2: unexpected 'end of print statement'");
    nmk_template *t = NULL;
    nmk_err e = {""};
    check(nmk_template_load("/nonexistent", NULL, &t, &e) == -1 && strstr(e.text, "/nonexistent"), "no such folder",
          "%s", e.text);
}

int main(void) {
    small.time_ns = time_limit_ns(30000);
    limits();
    deadline();
    depth();
    escapes();
    input();
    files();
    return failures ? 1 : 0;
}
