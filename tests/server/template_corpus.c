/* Chat templates against what jinja2 made of them (data/templates/make.py), and the toy's goldens. */
#include "template.h"

#include <stdlib.h>

#include "json.h"
#include "server/helper.h"

#define DATA     "tests/server/data/templates"
#define EXPECTED DATA "/expected.json"
#define TOY      "examples/nmc-toy"

static struct json_object *must_read(const char *path) {
    nmk_err e;
    struct json_object *tree = nmk_json_read(path, 64 << 20, &e);
    if (!tree) printf("not ok - set-up: %s\n", e.text), exit(1);
    return tree;
}

static const char *text_of(struct json_object *tree, const char *key) {
    struct json_object *value = nmk_json_get(tree, key);
    return value ? json_object_get_string(value) : NULL;
}

/* Where two texts part, with a little of each. */
static void compare(const char *name, const nmk_buf *got, struct json_object *expected) {
    const char *want = json_object_get_string(expected), *have = got->data ? got->data : "";
    size_t n = (size_t)json_object_get_string_len(expected), i = 0;
    while (i < n && i < got->length && want[i] == have[i]) i++;
    size_t from = i > 30 ? i - 30 : 0;
    check(n == got->length && i == n, name, "byte %zu: expected ...%.60s, found ...%.60s", i, want + from,
          from <= got->length ? have + from : "");
}

static void render_case(struct json_object *one) {
    const char *name = text_of(one, "name"), *source = text_of(one, "template");
    struct json_object *error = nmk_json_get(one, "error"), *text = nmk_json_get(one, "text");
    nmk_template_input in = {
        .messages = nmk_json_get(one, "messages"),
        .tools = nmk_json_get(one, "tools"),
        .kwargs = nmk_json_get(one, "kwargs"),
        .add_generation_prompt = json_object_get_boolean(nmk_json_get(one, "add_generation_prompt")),
        .bos_token = "<s>",
        .eos_token = "</s>",
        .now_s = 1700000000,
    };
    nmk_err e = {""};
    nmk_buf out = {0};
    nmk_template *t = NULL;
    /* A template's text, or the name of its file. */
    size_t bytes = strlen(source);
    char *file = NULL;
    if (bytes > 6 && !strcmp(source + bytes - 6, ".jinja")) {
        char path[256];
        snprintf(path, sizeof path, DATA "/%s", source);
        if (nmk_file_read(&file, &bytes, path, 1 << 20, &e)) die(e.text);
    }
    int rc = nmk_template_compile(file ? file : source, bytes, "chat template", NULL, &t, &e);
    free(file);
    if (!rc) rc = nmk_template_render(t, &in, &out, &e);
    if (!error && rc) {
        check(false, name, "%s", e.text);
    } else if (!error) {
        compare(name, &out, text);
    } else {
        /* The line always; the words where they are the template's own or Jinja's. */
        char begin[64];
        snprintf(begin, sizeof begin, "chat template: line %d: ", json_object_get_int(nmk_json_get(one, "line")));
        const char *words = text_of(one, "words");
        bool good = rc && !strncmp(e.text, begin, strlen(begin)) && (!words || !strcmp(e.text + strlen(begin), words));
        check(good && !out.length, name, "expected %s%s, found %s", begin,
              words ? words : json_object_get_string(error), rc ? e.text : out.data);
    }
    nmk_template_free(t);
    nmk_buf_free(&out);
}

static void goldens(void) {
    struct json_object *tree = must_read("tests/golden/nmc-toy.json"), *list = nmk_json_get(tree, "chat_template");
    nmk_template *t = NULL;
    nmk_err e = {""};
    if (nmk_template_load(TOY, NULL, &t, &e)) {
        check(false, "the toy's template", "%s", e.text);
    } else {
        for (size_t i = 0; i < json_object_array_length(list); i++) {
            struct json_object *one = json_object_array_get_idx(list, i), *flags = nmk_json_get(one, "flags");
            nmk_template_input in = {.messages = nmk_json_get(one, "messages"),
                                     .tools = nmk_json_get(one, "tools"),
                                     .kwargs = flags,
                                     .bos_token = "<BOS_TOKEN>",
                                     .eos_token = "<|END_OF_TURN_TOKEN|>"};
            nmk_buf out = {0};
            char name[40];
            snprintf(name, sizeof name, "toy golden %zu", i);
            if (nmk_template_render(t, &in, &out, &e))
                check(false, name, "%s", e.text);
            else
                compare(name, &out, nmk_json_get(one, "text"));
            nmk_buf_free(&out);
        }
        check(json_object_array_length(list) >= 10, "there are goldens", "%zu", json_object_array_length(list));
    }
    nmk_template_free(t);
    json_object_put(tree);
}

int main(int argc, char **argv) {
    setenv("TZ", "UTC", 1);
    goldens();
    struct json_object *cases = must_read(argc > 1 ? argv[1] : EXPECTED);
    for (size_t i = 0; i < json_object_array_length(cases); i++) render_case(json_object_array_get_idx(cases, i));
    json_object_put(cases);
    return failures ? 1 : 0;
}
