/* server/template.c with jinja.lua: any template, on one conversation.  A refusal names a line; nothing takes longer than
 * it may. */
#include "fuzz.h"

#include <string.h>

#include "json.h"
#include "template.h"
#include "utf8.h"

static const nmk_template_limits limits = {
    .memory_bytes = 16 << 20, .output_bytes = 1 << 20, .instructions = 3000000, .time_ns = 60000000000};

static struct json_object *messages, *tools, *kwargs;

static struct json_object *parsed(const char *text) {
    nmk_err e;
    struct json_object *tree = nmk_json_parse(text, strlen(text), &e);
    if (!tree) fuzz_wrong("%s", e.text);
    return tree;
}

static void open_input(void) {
    messages = parsed(
        "[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"Add 1 and 2 \\u00e9.\"},"
        "{\"role\":\"assistant\",\"content\":\"\",\"reasoning_content\":\"Hm\",\"tool_calls\":[{\"id\":\"c1\",\"type\":\"function\","
        "\"function\":{\"name\":\"add\",\"arguments\":{\"a\":1,\"b\":[2.5,null,true]}}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"c1\",\"content\":\"3\"},{\"role\":\"user\",\"content\":\"So?\"}]");
    tools = parsed(
        "[{\"type\":\"function\",\"function\":{\"name\":\"add\",\"description\":\"Adds.\",\"parameters\":{\"type\":\"object\","
        "\"properties\":{\"a\":{\"type\":\"integer\"}}}}}]");
    kwargs = parsed("{\"enable_thinking\":true,\"documents\":[{\"title\":\"t\",\"text\":\"x\"}],\"n\":-3,\"x\":1e300}");
}

static void seeds(void) {
    fuzz_seed_files("tests/server/data/templates/*.jinja");
    fuzz_seed_files("examples/nmc-toy/chat_template.jinja");
    static const char *const texts[] = {
        "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
        "{%- set ns = namespace(a=[], n=0) -%}{% for i in range(10) if i % 2 %}{% set ns.n = ns.n + i ** 2 %}{{ loop.index0 }}"
        "{% else %}none{% endfor %}{{ ns.n // 3 }}",
        "{% macro f(a, b=2, *args, **kw) %}{{ a ~ b }}{% if a > 0 %}{{ f(a - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
        "{{ tools | tojson(indent=2) }}{{ messages | map(attribute='role') | unique | join(', ') }}{{ messages|selectattr('role', "
        "'equalto', 'user')|list|length }}",
        "{% if tools is defined and tools is not none and 'x' not in kwargs %}{{ raise_exception('no ' ~ n) }}{% endif %}",
        "{{ 'a-b_c'.split('-')[::-1] }}{{ \"%05.2f|%-9s|%x\" % (x, 'y', 255) }}{{ '{:>9}'.format(n) }}{{ 'ab' * 3 }}{{ [1, 2] + [3] }}",
        "{% set x = {'a': 1, 'b': [1, (2, 3)]} %}{{ x.items() | list }}{% for k, v in x | dictsort %}{{ k }}{% endfor %}{{ x|string }}",
        "{% generation %}{{ strftime_now('%Y-%m-%d') }}{% endgeneration %}{# a comment #}{% raw %}{{ }}{% endraw %}",
        "{% filter upper %}a{% endfilter %}{% call f() %}b{% endcall %}{{ 1 if true else 2 }}{{ not false or 1 and 0 }}{{ 3 is odd }}",
        "{{ messages[-1].content[1:3] }}{{ 'abc' | replace('b', 'xx', 1) | capitalize | indent(4, true) | wordcount }}{{ 7.5 | round(1) }}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) fuzz_seed_text(texts[i]);
    fuzz_words_of("server/jinja{,_lib}.lua");
    for (const char *const *w = (const char *const[]){"{{ ",
                                                      " }}",
                                                      "{% ",
                                                      " %}",
                                                      "{%- ",
                                                      " -%}",
                                                      "{#",
                                                      "#}",
                                                      "| ",
                                                      "(",
                                                      ")",
                                                      "[",
                                                      "]",
                                                      "{",
                                                      "}",
                                                      "9999999999",
                                                      "'a' * 1000000",
                                                      "range(99999)",
                                                      "messages",
                                                      "loop.",
                                                      "|list|",
                                                      "|sort",
                                                      "|groupby('role')",
                                                      "|batch(2)",
                                                      "|string|",
                                                      "{% for i in range(9) %}",
                                                      "{% endfor %}",
                                                      "{% if x %}",
                                                      "{% endif %}",
                                                      "{% set x = ",
                                                      "__class__",
                                                      "%s",
                                                      "% ",
                                                      "**",
                                                      "//",
                                                      "~",
                                                      ".append(",
                                                      ".pop(",
                                                      ".update(",
                                                      "|tojson",
                                                      "|map('upper')",
                                                      "namespace(",
                                                      "is ",
                                                      " in ",
                                                      NULL};
         *w; w++)
        fuzz_word(*w);
}

static void run(const char *data, size_t bytes) {
    nmk_template *t = NULL;
    nmk_err e = {""};
    nmk_template_input in = {.messages = messages,
                             .tools = tools,
                             .kwargs = kwargs,
                             .add_generation_prompt = true,
                             .bos_token = "<s>",
                             .now_s = 1700000000};
    if (nmk_template_compile(data, bytes, "chat template", &limits, &t, &e)) {
        if (strncmp(e.text, "chat template: ", 15)) fuzz_wrong("the message has no name: %s", e.text);
        fuzz_feature(e.text + strcspn(e.text + 14, ":"));
        return;
    }
    nmk_buf out = {0};
    if (nmk_template_render(t, &in, &out, &e)) {
        if (strncmp(e.text, "chat template: ", 15)) fuzz_wrong("the message has no name: %s", e.text);
        if (out.length) fuzz_wrong("refused, with %zu bytes of text", out.length);
        if (strstr(e.text, "attempt to") || strstr(e.text, "bad argument") || strstr(e.text, ".lua:") ||
            strstr(e.text, "[string"))
            fuzz_wrong("a message of Lua's: %s", e.text);
        fuzz_feature(e.text + strcspn(e.text + 14, ":"));
    } else if (!nmk_utf8_valid(out.data ? out.data : "", out.length) && nmk_utf8_valid(data, bytes)) {
        fuzz_wrong("a prompt that is not UTF-8");
    }
    nmk_buf_free(&out);
    nmk_template_free(t);
}

const fuzz_target fuzz_template = {"template", seeds, open_input, run, 8 << 10, 1500};
