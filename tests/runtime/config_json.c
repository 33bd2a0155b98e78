/* JSON that json-c alone would let pass. */
#include "json.h"

#include "weights_helper.h"

static void refuse(const char *name, const char *text, size_t bytes, const char *expected) {
    nmk_err e = {""};
    struct json_object *tree = nmk_json_parse(text, bytes, &e);
    check(!tree && strcmp(e.text, expected) == 0, name, "expected %s, found %s", expected,
          tree ? "(accepted)" : e.text);
    json_object_put(tree);
}
#define REFUSE(name, text, expected) refuse(name, text, sizeof text - 1, expected)

static void accept(const char *text, const char *expected) {
    nmk_err e = {""};
    struct json_object *tree = nmk_json_parse(text, strlen(text), &e);
    const char *got =
        tree ? json_object_to_json_string_ext(tree, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE) : e.text;
    char name[80];
    snprintf(name, sizeof name, "accept %.60s", text);
    check(tree && strcmp(got, expected) == 0, name, "expected %s, found %s", expected, got);
    json_object_put(tree);
}

int main(void) {
    accept(" {\"a\" : [1, -2, 3.5, 1e3, true, false, null, \"\"]} ", "{\"a\":[1,-2,3.5,1e3,true,false,null,\"\"]}");
    accept("7", "7");
    accept("\"\\u00e9\\ud83d\\ude00 \xc3\xa9\"", "\"\xc3\xa9\xf0\x9f\x98\x80 \xc3\xa9\"");
    accept("{\"a\":{\"b\":1},\"b\":{\"a\":1}}", "{\"a\":{\"b\":1},\"b\":{\"a\":1}}");
    accept("[9223372036854775807,-9223372036854775808]", "[9223372036854775807,-9223372036854775808]");

    REFUSE("nothing", "", "line 1, column 1: the text ends where a value was expected");
    REFUSE("null alone", "null", "null is not accepted here");
    REFUSE("a key twice", "{\"a\":1,\"b\":{\"a\":2},\"a\":3}", "line 1, column 20: the key \"a\" is there twice");
    REFUSE("a key twice, escaped", "{\"a\":1,\n\"\\u0061\":3}", "line 2, column 1: the key \"\\u0061\" is there twice");
    REFUSE("text after the value", "{} x", "line 1, column 4: something after the end of the value");
    REFUSE("NUL after the value", "{}\0", "line 1, column 3: something after the end of the value");
    REFUSE("trailing comma", "[1,]", "line 1, column 4: expected a value");
    REFUSE("single quotes", "{'a':1}", "line 1, column 2: expected a key in double quotes");
    REFUSE("comment", "[1/*x*/]", "line 1, column 3: expected ',' or ']'");
    REFUSE("NaN", "[NaN]", "line 1, column 2: expected a value");
    REFUSE("Infinity", "[-Infinity]", "line 1, column 2: expected a value");
    REFUSE("leading zero", "[01]", "line 1, column 3: expected ',' or ']'");
    REFUSE("leading plus", "[+1]", "line 1, column 2: expected a value");
    REFUSE("point without digits", "[1.]", "line 1, column 2: a number without digits after its point");
    REFUSE("empty exponent", "[1e]", "line 1, column 2: a number without digits in its exponent");
    REFUSE("large integer", "[9223372036854775808]", "line 1, column 2: an integer that does not fit 64 bits");
    REFUSE("large double", "[1e999]", "line 1, column 2: a number too large for a double");
    REFUSE("newline in a string", "\"a\nb\"", "line 1, column 3: a control character in a string");
    REFUSE("string that does not end", "[\"abc", "line 1, column 2: a string that does not end");
    REFUSE("unknown escape", "\"\\x41\"", "line 1, column 2: an unknown escape");
    REFUSE("short escape", "\"\\u00g1\"", "line 1, column 2: \\u wants four hexadecimal digits");
    REFUSE("half a pair", "\"\\ud83d\"", "line 1, column 2: half of a surrogate pair");
    REFUSE("NUL in a key", "{\"a\\u0000\":1}", "line 1, column 4: NUL in a key");
    REFUSE("broken UTF-8", "\"\xc3(\"", "line 1, column 2: not valid UTF-8");
    REFUSE("overlong UTF-8", "\"\xc0\xaf\"", "line 1, column 2: not valid UTF-8");
    REFUSE("surrogate in UTF-8", "\"\xed\xa0\x80\"", "line 1, column 2: not valid UTF-8");

    nmk_buf deep = {0};
    for (int i = 0; i < 100000; i++) nmk_buf_puts(&deep, "[");
    refuse("100000 brackets", deep.data, deep.length, "line 1, column 65: nested too deeply");
    deep.length = 0;
    for (int i = 0; i < NMK_JSON_DEPTH; i++) nmk_buf_puts(&deep, "[");
    for (int i = 0; i < NMK_JSON_DEPTH; i++) nmk_buf_puts(&deep, "]");
    nmk_err e = {""};
    struct json_object *tree = nmk_json_parse(deep.data, deep.length, &e);
    check(tree != NULL, "as deep as allowed", "%s", e.text);
    json_object_put(tree);
    nmk_buf_free(&deep);
    return failures != 0;
}
