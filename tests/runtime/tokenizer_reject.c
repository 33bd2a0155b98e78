/* A tokenizer.json that is broken or asks for what is not supported: one message that names the field. */
#include "runtime/tokenizer_helper.h"

#include <json-c/json_pointer.h>

/* The toy's file with the value at a place replaced, or removed where `value` is NULL. */
static const struct {
    const char *place, *value, *message;
} cases[] = {
    {"/model", NULL, "the file.model is missing (expected object)"},
    {"/model", "[]", "the file.model is array (expected object)"},
    {"/model/type", "\"Unigram\"", "model.type \"Unigram\" is not supported (expected BPE)"},
    {"/model/type", "3", "model.type is int (expected string)"},
    {"/model/dropout", "0.1", "model.dropout is not supported"},
    {"/model/continuing_subword_prefix", "\"##\"", "model.continuing_subword_prefix is not supported"},
    {"/model/end_of_word_suffix", "\"</w>\"", "model.end_of_word_suffix is not supported"},
    {"/model/byte_fallback", "true", "model.byte_fallback is not supported"},
    {"/model/byte_fallback", "1", "model.byte_fallback is int (expected boolean)"},
    {"/model/ignore_merges", "\"no\"", "model.ignore_merges is string (expected boolean)"},
    {"/model/vocab", NULL, "model.vocab is missing (expected object)"},
    {"/model/vocab", "{}", "model.merges[0] names \"\u0120\", which is not in model.vocab"},
    {"/model/vocab/a", "-1", "model.vocab[\"a\"] is the id -1 (expected 0 to 4194303)"},
    {"/model/vocab/a", "4194304", "model.vocab[\"a\"] is the id 4194304"},
    {"/model/vocab/a", "9223372036854775807", "model.vocab[\"a\"] is the id 9223372036854775807"},
    {"/model/vocab/a", "1.5", "model.vocab[\"a\"] is double (expected an id)"},
    {"/model/vocab/a", "null", "model.vocab[\"a\"] is null (expected an id)"},
    {"/model/vocab/a", "17", "another token has the id 17 too"},
    {"/model/vocab/\u0100", NULL, "model.vocab has no token for the byte 0x00"},
    {"/model/vocab/\u0120\u0120", NULL,
     "model.merges[0] makes \"\u0120\" and \"\u0120\" one token, which is not in model.vocab"},
    {"/model/merges", "{}", "model.merges is object (expected array)"},
    {"/model/merges/5", "7", "model.merges[5] is int (expected two strings)"},
    {"/model/merges/5", "[\"a\"]", "model.merges[5] is array (expected two strings)"},
    {"/model/merges/5", "[\"a\", null]", "model.merges[5][1] is null (expected string)"},
    {"/model/merges/5", "[\"a\", \"no such\"]", "model.merges[5] names \"no such\", which is not in model.vocab"},
    {"/model/merges/5", "\"ab\"", "model.merges[5] is \"ab\" (expected two tokens and a space between them)"},
    {"/model/merges/5", "\"a b c\"", "model.merges[5] is \"a b c\" (expected two tokens"},
    {"/model/merges/5", "\"q\\u0007zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz q\"", "zzz...\""},
    {"/added_tokens", "7", "added_tokens is int (expected array)"},
    {"/added_tokens/2", "7", "added_tokens[2] is int (expected object)"},
    {"/added_tokens/2/id", "\"2\"", "added_tokens[2].id is string (expected int)"},
    {"/added_tokens/2/id", "5000000", "added_tokens[2] is the id 5000000"},
    {"/added_tokens/2/id", "3", "added_tokens[2].id is 3, but model.vocab has \"<EOS_TOKEN>\" as 2"},
    {"/added_tokens/2/content", "\"brand new\"", "added_tokens[2].id is 2, which another token has"},
    {"/added_tokens/2/content", "\"\"", "added_tokens[2].content has 0 bytes"},
    {"/added_tokens/2/content", "\"a\\u0000b\"", "added_tokens[2].content holds a NUL character"},
    {"/added_tokens/2/special", NULL, "added_tokens[2].special is missing (expected boolean)"},
    {"/added_tokens/2/lstrip", "0", "added_tokens[2].lstrip is int (expected boolean)"},
    {"/added_tokens/2",
     "{\"id\": 181, \"content\": \"\u00e9\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
     "\"normalized\": false, \"special\": false}",
     "added_tokens[2].content \"\u00e9\" is how model.vocab spells the token 181"},
    {"/normalizer", "{\"type\": \"Lowercase\"}",
     "normalizer.type \"Lowercase\" is not supported (expected NFC, or Sequence)"},
    {"/normalizer", "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFKC\"}]}",
     "normalizer.normalizers[0].type \"NFKC\""},
    {"/normalizer", "{\"type\": \"Sequence\"}", "normalizer.normalizers is missing (expected array)"},
    {"/normalizer", "\"NFC\"", "normalizer is string (expected object)"},
    {"/pre_tokenizer", NULL, "pre_tokenizer does not end in ByteLevel"},
    {"/pre_tokenizer", "{\"type\": \"Metaspace\"}", "pre_tokenizer does not end in ByteLevel"},
    {"/pre_tokenizer/pretokenizers/2", NULL, "pre_tokenizer does not end in ByteLevel"},
    {"/pre_tokenizer/pretokenizers/0/type", "\"Whitespace\"",
     "pre_tokenizer.pretokenizers[0].type \"Whitespace\" is not supported"},
    {"/pre_tokenizer/pretokenizers/0/type", NULL, "pre_tokenizer.pretokenizers[0].type is missing"},
    {"/pre_tokenizer/pretokenizers/0", "{\"type\": \"ByteLevel\"}",
     "pre_tokenizer.pretokenizers[0].add_prefix_space is missing"},
    {"/pre_tokenizer/pretokenizers/0", "{\"type\": \"Digits\"}",
     "pre_tokenizer.pretokenizers[0].individual_digits is missing"},
    {"/pre_tokenizer/pretokenizers/0/behavior", "\"Kept\"",
     "pre_tokenizer.pretokenizers[0].behavior \"Kept\" is not supported"},
    {"/pre_tokenizer/pretokenizers/0/invert", "null",
     "pre_tokenizer.pretokenizers[0].invert is null (expected boolean)"},
    {"/pre_tokenizer/pretokenizers/0/pattern", "\"a\"",
     "pre_tokenizer.pretokenizers[0].pattern is string (expected object)"},
    {"/pre_tokenizer/pretokenizers/0/pattern", "{}", "pre_tokenizer.pretokenizers[0].pattern.String is missing"},
#define REGEX "/pre_tokenizer/pretokenizers/0/pattern/Regex"
    {REGEX, "\"\"", "pattern.Regex: the pattern is empty"},
    {REGEX, "\"a(\"", "pattern.Regex: the pattern is wrong: missing closing parenthesis"},
    {REGEX, "\"a**+?[\"", "pattern.Regex: the pattern is wrong"},
    {REGEX, "\"[z-a]\"", "pattern.Regex: the pattern is wrong"},
    {REGEX, "\"\\\\p{Nonsense}\"", "pattern.Regex: the pattern is wrong: unknown property"},
    {REGEX, "\"\\\\p\"", "pattern.Regex: the escape \"\\p\" is not supported"},
    {REGEX, "\"a\\\\\"", "pattern.Regex: the escape \"\\\" is not supported"},
    {REGEX, "\"(a)\\\\1\"", "pattern.Regex: the escape \"\\1\" is not supported"},
    {REGEX, "\"[a\\\\W]\"", "pattern.Regex: the escape \"\\W\" is not supported in a class"},
    {REGEX, "\"[a[bc]]\"", "pattern.Regex: a class inside a class is not supported"},
    {REGEX, "\"[a-z&&[b]]\"", "pattern.Regex: a class inside a class is not supported"},
    {REGEX, "\"[]a]\"", "pattern.Regex: a class that begins with ] is not supported"},
    {REGEX, "\"(?<name>a)\"", "pattern.Regex: this kind of group is not supported, at \"(?<name>a)\""},
    {REGEX, "\"(*ACCEPT)\"", "pattern.Regex: this kind of group is not supported"},
    {REGEX, "\"a(?i)b|c\"", "pattern.Regex: this kind of group is not supported, at \"(?i)b|c\""},
    {REGEX, "\"(?m)a\"", "pattern.Regex: this kind of group is not supported"},
    {REGEX, "\"a{2,3}+\"", "pattern.Regex: this kind of repetition is not supported"},
    {REGEX, "\"a{,3}\"", "pattern.Regex: this kind of repetition is not supported"},
    {"/post_processor", "{\"type\": \"BertProcessing\"}",
     "post_processor.type \"BertProcessing\" is not supported (expected TemplateProcessing,"},
    {"/post_processor/single", "\"$A\"", "post_processor.single is string (expected array)"},
    {"/post_processor/single", "[]", "post_processor.single leaves out the text"},
    {"/post_processor/single/1", "{\"Sequence\": {\"id\": \"B\"}}",
     "post_processor.single[1]: expected the sequence A once"},
    {"/post_processor/single/1", "{}", "post_processor.single[1]: expected SpecialToken or Sequence"},
    {"/post_processor/single/0/SpecialToken/id", "\"<s>\"", "post_processor.special_tokens.<s> is missing"},
    {"/post_processor/special_tokens/<BOS_TOKEN>/ids/0", "4096", "\"<BOS_TOKEN>\" has the id 4096, which no token has"},
    {"/post_processor/special_tokens/<BOS_TOKEN>/ids/0", "[]",
     "post_processor.special_tokens is array (expected an id)"},
    {"/decoder", NULL, "decoder is missing (expected ByteLevel)"},
    {"/decoder", "{\"type\": \"WordPiece\"}",
     "decoder.type \"WordPiece\" is not supported (expected ByteLevel, or Sequence)"},
    {"/truncation", "{\"max_length\": 8}", "truncation is not supported"},
    {"/padding", "{}", "padding is not supported"},
    {"", "[1]", "is array (expected object)"},
};

static void replace(json_object **root, const char *place, const char *value) {
    if (value) {
        if (json_pointer_set(root, place, strcmp(value, "null") ? json_tokener_parse(value) : NULL)) die(place);
        return;
    }
    char *parent = xstrdup(place), *name = strrchr(parent, '/');
    json_object *from;
    *name++ = 0;
    if (json_pointer_get(*root, parent, &from)) die(place);
    if (json_object_is_type(from, json_type_array))
        json_object_array_del_idx(from, (size_t)atoi(name), 1);
    else
        json_object_object_del(from, name);
    free(parent);
}

static void refusals(const char *toy) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_object *root = json_tokener_parse(toy);
        nmk_tokenizer *t = NULL;
        nmk_err e = {""};
        char *name = xasprintf("%.70s = %.40s", cases[i].place, cases[i].value ? cases[i].value : "(none)");
        replace(&root, cases[i].place, cases[i].value);
        if (!load_tree(root, &t, &e))
            check(false, name, "is accepted");
        else if (t || strchr(e.text, '\n') || strncmp(e.text, "/tmp/", 5))
            check(false, name, "not one line with the path: %s", e.text);
        else
            check(strstr(e.text, cases[i].message), name, "says \"%s\", not \"%s\"", e.text, cases[i].message);
        nmk_tokenizer_free(t);
        json_object_put(root);
        free(name);
    }
}

/* Cut anywhere, the file is refused. */
static void cut_files(const char *toy, size_t bytes) {
    int accepted = 0;
    for (size_t n = 0; n < bytes; n += n < 64 ? 1 : 1 + bytes / 97) {
        nmk_tokenizer *t = NULL;
        nmk_err e = {""};
        accepted += !load_text(toy, n, &t, &e) || !*e.text || strchr(e.text, '\n');
        nmk_tokenizer_free(t);
    }
    check(!accepted, "a file cut short", "%d lengths are accepted or give no message", accepted);
}

/* With some bytes changed it is refused or works. */
static void changed_files(const char *toy, size_t bytes) {
    static const char text[] = "<BOS_TOKEN>def f(x):\n  return x * 1234567 # \u00e9";
    uint32_t seed = 1;
    int silent = 0, loaded = 0;
    char *copy = xmalloc(bytes);
    for (int i = 0; i < 150; i++) {
        memcpy(copy, toy, bytes);
        for (int k = 0; k <= i % 3; k++) {
            seed = seed * 1664525 + 1013904223;
            size_t at = (uint64_t)seed * (i % 2 ? bytes : 6000) >> 32; /* the first bytes hold all but the vocabulary */
            seed = seed * 1664525 + 1013904223;
            copy[at] = "\"{}[],:0-1.eaz\\ \x80\xff"[(uint64_t)seed * 18 >> 32];
        }
        nmk_tokenizer *t = NULL;
        nmk_err e = {""};
        if (load_text(copy, bytes, &t, &e))
            silent += !*e.text || strchr(e.text, '\n');
        else {
            nmk_ids ids = {0};
            nmk_tokenizer_encode(t, text, sizeof text - 1, NMK_PARSE_SPECIAL | NMK_ADD_BOS, &ids, &e);
            nmk_ids_free(&ids);
            loaded++;
        }
        nmk_tokenizer_free(t);
    }
    free(copy);
    check(!silent && loaded, "a file with changed bytes", "%d failed without one line, %d worked", silent, loaded);
}

static void missing_files(void) {
    nmk_tokenizer *t = NULL;
    nmk_err e = {""};
    check(nmk_tokenizer_load("/no/such", &t, &e) && strstr(e.text, "/no/such: No such file"), "no file", "says \"%s\"",
          e.text);
    check(nmk_tokenizer_load("tests", &t, &e) && strstr(e.text, "tests/tokenizer.json: No such file"),
          "a folder without the file", "says \"%s\"", e.text);
    check(load_text("", 0, &t, &e), "an empty file", "is accepted");
}

/* A pattern that would take exponential time here ends with a message, and the ids are as before. */
static void costly_pattern(const char *toy) {
    json_object *root = json_tokener_parse(toy);
    nmk_tokenizer *t = NULL;
    nmk_err e = {""};
    nmk_ids ids = {0};
    char text[64];
    memset(text, 'a', sizeof text);
    replace(&root, REGEX, "\"(?:a|a|aa)+[^a]\"");
    if (load_tree(root, &t, &e)) die(e.text);
    nmk_ids_add(&ids, 7);
    uint64_t start = nmk_now_ns();
    int rc = nmk_tokenizer_encode(t, text, sizeof text, 0, &ids, &e);
    check(rc && ids.count == 1 && strstr(e.text, "pattern cannot cut this text (64 bytes)") &&
              nmk_now_ns() - start < time_limit_ns(20000),
          "a pattern without end", "rc %d, \"%s\"", rc, e.text);
    nmk_ids_free(&ids);
    nmk_tokenizer_free(t);
    json_object_put(root);
}

int main(void) {
    char *toy;
    size_t bytes;
    nmk_err e;
    if (nmk_file_read(&toy, &bytes, TOY "/tokenizer.json", 1 << 20, &e)) die(e.text);
    refusals(toy);
    cut_files(toy, bytes);
    changed_files(toy, bytes);
    missing_files();
    costly_pattern(toy);
    free(toy);
    return failures != 0;
}
