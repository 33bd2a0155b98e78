/* runtime/json.c: what it takes, json-c writes and it takes again, the same. */
#include "fuzz.h"

#include <string.h>

#include "json.h"

static void seeds(void) {
    fuzz_seed_text("{\"a\": [1, -2.5e3, true, false, null, \"\\u00e9\\ud83d\\ude00\\n\", {\"b\": {}}], \"\": []}");
    fuzz_seed_text("[9223372036854775807, -9223372036854775808, 0, -0, -0.0, 1e-320, 1.7976931348623157e308]");
    fuzz_seed_text("[[[[[[[[[[[[{\"a\":[{\"a\":[{\"a\":[]}]}]}]]]]]]]]]]]]");
    fuzz_seed_text("\"a string alone \xc3\xa9\"");
    fuzz_seed_text("{\"k\":1,\"k2\":2,\"\\u006b\":3}");
    fuzz_seed_files("tests/gen/configs/*/config.json");
    fuzz_seed_files("examples/nmc-toy/{config,generation_config,tokenizer_config}.json");
    for (const char *const *w =
             (const char *const[]){"\\u0000", "\\ud800", "\\udfff", "\\u", "\\\"", "\xef\xbb\xbf", "null", "true",
                                   "NaN", "Infinity", "1e", "{\"a\":", "[[[[", "/*", NULL};
         *w; w++)
        fuzz_word(*w);
}

static void run(const char *data, size_t bytes) {
    nmk_err e = {""};
    struct json_object *tree = nmk_json_parse(data, bytes, &e);
    if (!tree) {
        if (strncmp(e.text, "line ", 5) && strcmp(e.text, "null is not accepted here"))
            fuzz_wrong("the message has no place: %s", e.text);
        return;
    }
    size_t length;
    const char *text = json_object_to_json_string_length(tree, JSON_C_TO_STRING_PLAIN, &length);
    struct json_object *again = nmk_json_parse(text, length, &e);
    if (!again) fuzz_wrong("%s, of %s", e.text, text);
    if (!json_object_equal(tree, again)) fuzz_wrong("another tree from %s", text);
    json_object_put(again), json_object_put(tree);
}

const fuzz_target fuzz_json = {"json", seeds, NULL, run, 64 << 10, 0};
