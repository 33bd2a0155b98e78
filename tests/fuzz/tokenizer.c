/* runtime/tokenizer*.c, split.c, vocab.c.  tokenizer: a tokenizer.json, and if it is taken, a text.  text: a text, with
 * pre-tokenizers that models have. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "tokenizer.h"

/* ---------------------------------------------------------------- small files */

/* The alphabet of bytes, as tokenizer.json writes it. */
static void put_byte(nmk_buf *b, int byte) {
    int code = byte, next = 0x100;
    if (byte <= ' ' || (byte >= 127 && byte <= 160) || byte == 173) {
        for (int i = 0; i < byte; i++) next += i <= ' ' || (i >= 127 && i <= 160) || i == 173;
        code = next;
    }
    if (code == '"' || code == '\\') nmk_buf_puts(b, "\\");
    if (code < 0x80)
        nmk_buf_printf(b, "%c", code);
    else
        nmk_buf_printf(b, "%c%c", 0xc0 | code >> 6, 0x80 | (code & 63));
}

/* A tokenizer of all bytes and a few merges. */
static void make(nmk_buf *b, const char *members, const char *model, bool pairs) {
    static const char *const merges[][2] = {{"a", "b"}, {"ab", "c"}, {"t", "h"},  {"th", "e"},
                                            {"1", "2"}, {"a", "a"},  {"aa", "aa"}};
    enum { MERGES = sizeof merges / sizeof *merges };
    nmk_buf_printf(
        b,
        "{\"version\": \"1.0\", \"added_tokens\": [{\"id\": 300, \"content\": \"<s>\", \"special\": true, \"lstrip\": "
        "false, \"rstrip\": false, \"normalized\": false, \"single_word\": false}, {\"id\": 301, \"content\": \"tool\", "
        "\"special\": false, \"lstrip\": true, \"rstrip\": true, \"normalized\": true, \"single_word\": true}],\n%s, "
        "\"model\": {\"type\": \"BPE\", %s\"vocab\": {",
        members, model);
    for (int i = 0; i < 256; i++) {
        nmk_buf_puts(b, i ? ",\"" : "\"");
        put_byte(b, i);
        nmk_buf_printf(b, "\":%d", i);
    }
    for (int i = 0; i < MERGES; i++) nmk_buf_printf(b, ",\"%s%s\":%d", merges[i][0], merges[i][1], 256 + i);
    nmk_buf_puts(b, "}, \"merges\": [");
    for (int i = 0; i < MERGES; i++)
        nmk_buf_printf(b, pairs ? "%s[\"%s\",\"%s\"]" : "%s\"%s %s\"", i ? "," : "", merges[i][0], merges[i][1]);
    nmk_buf_puts(b, "]}}\n");
}

#define BYTES \
    "\"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": true, \"use_regex\": true}"
#define LEVEL(space, regex) \
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": " space ", \"trim_offsets\": true, \"use_regex\": " regex "}"
#define SPLIT(pattern, behavior, invert)                                                         \
    "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"" pattern "\"}, \"behavior\": \"" behavior \
    "\", \"invert\": " invert "}"
#define LLAMA                                                                                                                      \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|" \
    "\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define COHERE "\\\\d+(?=(?:\\\\d{3})*\\\\b)"

static const char *const shapes[][2] = {
    {"\"normalizer\": null, \"pre_tokenizer\": " LEVEL("false", "true") ", \"post_processor\": null, " BYTES, ""},
    {"\"normalizer\": {\"type\": \"NFC\"}, \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [" SPLIT(
         LLAMA, "Isolated",
         "false") ", " LEVEL("false", "false") "]}, \"post_processor\": {\"type\": \"TemplateProcessing\", "
                                               "\"single\": [{\"SpecialToken\": {\"id\": \"<s>\", \"type_id\": 0}}, "
                                               "{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}], \"pair\": [], "
                                               "\"special_tokens\": {\"<s>\": {\"id\": \"<s>\", \"ids\": [300], "
                                               "\"tokens\": [\"<s>\"]}}}, " BYTES,
     "\"dropout\": null, \"unk_token\": null, \"fuse_unk\": false, \"byte_fallback\": false, \"ignore_merges\": true, "},
    {"\"normalizer\": {\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}]}, \"pre_tokenizer\": {\"type\": \"Sequence\", "
     "\"pretokenizers\": [{\"type\": \"Digits\", \"individual_digits\": true}, " SPLIT(
         "\\\\s+", "MergedWithNext",
         "true") ", " LEVEL("true", "true") "]}, \"post_processor\": " LEVEL("true", "true") ", " BYTES,
     "\"continuing_subword_prefix\": \"\", "},
    {"\"normalizer\": null, \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [" SPLIT(
         COHERE, "Removed", "false") ", " SPLIT("x*", "Contiguous", "false") ", " LEVEL("false",
                                                                                        "false") "]}, "
                                                                                                 "\"post_processor\": "
                                                                                                 "null, " BYTES,
     ""},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void seeds(void) {
    static const char text[] = "%%%% text\n the abc aaaa 123456 <s>tool\xc3\xa9 \xe6\x97\xa5\r\n\n  x";
    for (int i = 0; i < SHAPES; i++) {
        nmk_buf b = {0};
        make(&b, shapes[i][0], shapes[i][1], i % 2);
        nmk_buf_puts(&b, text);
        fuzz_seed(b.data, b.length);
        nmk_buf_free(&b);
    }
    fuzz_words_of("runtime/{tokenizer_load,split}.c");
    for (const char *const *w = (const char *const[]){"(?i:",
                                                      "(?=",
                                                      "(?<!",
                                                      "\\\\p{L}",
                                                      "\\\\p{Han}+",
                                                      "\\\\b",
                                                      "(a*)*",
                                                      "((a+)+)+$",
                                                      "[^\\\\s]",
                                                      "\\\\G",
                                                      "(?R)",
                                                      "\\\\1",
                                                      "{1,99999}",
                                                      "4194303",
                                                      "4194304",
                                                      "%%%% text\n",
                                                      "null",
                                                      "true",
                                                      "\"MergedWithPrevious\"",
                                                      "\"MergedWithNext\"",
                                                      "\"Removed\"",
                                                      "\"Contiguous\"",
                                                      "\"Isolated\"",
                                                      "\xcc\x81",
                                                      NULL};
         *w; w++)
        fuzz_word(*w);
}

/* What must hold of any text and any tokenizer.  exact: the text comes back. */
static void both_ways(const nmk_tokenizer *t, const char *text, size_t bytes, bool exact) {
    nmk_err e = {""};
    for (unsigned flags = 0; flags < 4; flags += 3) {
        nmk_ids ids = {0};
        nmk_buf whole = {0}, pieces = {0};
        nmk_detokenizer d = {0};
        if (nmk_tokenizer_encode(t, text, bytes, flags, &ids, &e)) {
            if (!*e.text || ids.count) fuzz_wrong("refused: <%s>, with %zu ids", e.text, ids.count);
            fuzz_feature(e.text);
            nmk_ids_free(&ids);
            continue;
        }
        for (size_t i = 0; i < ids.count; i++) {
            size_t n;
            if (ids.id[i] < 0 || ids.id[i] >= nmk_tokenizer_size(t)) fuzz_wrong("id %d", ids.id[i]);
            if (!nmk_tokenizer_token(t, ids.id[i], &n)) fuzz_wrong("id %d has no token", ids.id[i]);
        }
        nmk_buf_puts(&whole, ""), nmk_buf_puts(&pieces, "");
        nmk_tokenizer_decode(t, ids.id, ids.count, false, &whole);
        for (size_t i = 0; i < ids.count; i++) nmk_detokenizer_add(&d, t, ids.id[i], &pieces);
        nmk_utf8_end(&d.text, &pieces);
        if (!nmk_utf8_valid(whole.data, whole.length)) fuzz_wrong("decoded to what is not UTF-8");
        if (whole.length != pieces.length || memcmp(whole.data, pieces.data, whole.length))
            fuzz_wrong("decoded otherwise token by token");
        if (exact && !flags && (whole.length != bytes || memcmp(whole.data, text, bytes)))
            fuzz_wrong("decoded to another text");
        nmk_buf_free(&whole), nmk_buf_free(&pieces), nmk_ids_free(&ids);
    }
}

static nmk_tokenizer *load(const char *name, nmk_err *e) {
    nmk_tokenizer *t = NULL;
    char *path = xasprintf("%s/%s", fuzz_folder(), name);
    if (nmk_tokenizer_load(path, &t, e)) t = NULL;
    free(path);
    return t;
}

static void run(const char *data, size_t bytes) {
    static const char mark[] = "%%%% text\n";
    const char *text = strstr(data, mark), *end = data + bytes;
    nmk_err e = {""};
    fuzz_write("tokenizer.json", data, text ? (size_t)(text - data) : bytes);
    nmk_tokenizer *t = load("tokenizer.json", &e);
    if (t) {
        if (text) text += sizeof mark - 1;
        both_ways(t, text ? text : "", text ? (size_t)(end - text) : 0, false);
        nmk_tokenizer_free(t);
        return;
    }
    const char *what = strstr(e.text, "tokenizer.json: ");
    if (!what) fuzz_wrong("the message does not name the file: %s", e.text);
    fuzz_feature(what);
}

const fuzz_target fuzz_tokenizer = {"tokenizer", seeds, NULL, run, 16 << 10, 0};

/* ---------------------------------------------------------------- texts */

static nmk_tokenizer *loaded[SHAPES + 1];

static void open_all(void) {
    nmk_err e;
    for (int i = 0; i <= SHAPES; i++) {
        nmk_buf b = {0};
        if (i < SHAPES) {
            make(&b, shapes[i][0], shapes[i][1], i % 2);
            fuzz_write("tokenizer.json", b.data, b.length);
            loaded[i] = load("tokenizer.json", &e);
        } else if (nmk_tokenizer_load("examples/nmc-toy", &loaded[i], &e)) {
            loaded[i] = NULL;
        }
        if (!loaded[i]) fuzz_wrong("%s", e.text);
        nmk_buf_free(&b);
    }
}

static void text_seeds(void) {
    fuzz_seed_text("The answer's 1234567, isn't it?\r\n\n  indented\tcode(x, y);  \n");
    fuzz_seed_text(
        "\xc3\xa9t\xc3\xa9 e\xcc\x81 \xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e \xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9 \xd9\xa3\xd9\xa4\xe0\xa5\xab");
    fuzz_seed_text("<s>tool<|START_OF_TURN_TOKEN|> tool <|END_OF_TURN_TOKEN|>tools");
    fuzz_seed_text("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabcabcabcabcthethe");
    fuzz_seed_files("examples/nmc-toy/functions.txt");
    for (const char *const *w =
             (const char *const[]){"<s>", "tool", "'ll", "'S", "\xcc\x81", "\xe1\x84\x80\xe1\x85\xa1", "\xc2\xa0",
                                   "\xe2\x80\xa8", "\xf4\x8f\xbf\xbf", "\xff", "\xc3", "000", "aaaaaaaa", "        ",
                                   "\n\n\n", "...", "<|START_THINKING|>", NULL};
         *w; w++)
        fuzz_word(*w);
}

static void run_text(const char *data, size_t bytes) {
    bool valid = nmk_utf8_valid(data, bytes);
    for (int i = 0; i <= SHAPES; i++) both_ways(loaded[i], data, bytes, valid && i == SHAPES);
}

const fuzz_target fuzz_text = {"text", text_seeds, open_all, run_text, 64 << 10, 2000};
