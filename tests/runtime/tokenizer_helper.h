/* For tests of the tokenizer: the toy's tokenizer.json as a tree to change, ids to and from JSON. */
#ifndef NMK_TEST_TOKENIZER_HELPER_H
#define NMK_TEST_TOKENIZER_HELPER_H

#include <json-c/json.h>
#include <unistd.h>

#include "check.h"
#include "json.h"
#include "tokenizer.h"

#define TOY "examples/nmc-toy"

__attribute__((noreturn, unused)) static void die(const char *why) {
    printf("not ok - set-up: %s\n", why);
    exit(1);
}

__attribute__((unused)) static json_object *read_json(const char *path) {
    nmk_err e;
    json_object *o = nmk_json_read(path, 64 << 20, &e);
    if (!o) die(e.text);
    return o;
}

__attribute__((unused)) static json_object *get(json_object *o, const char *key) {
    json_object *value = NULL;
    if (!json_object_object_get_ex(o, key, &value)) die(key);
    return value;
}

__attribute__((unused)) static nmk_tokenizer *load(const char *path) {
    nmk_err e;
    nmk_tokenizer *t = NULL;
    if (nmk_tokenizer_load(path, &t, &e)) die(e.text);
    return t;
}

/* Loads a tokenizer.json given as text, by way of a file that is gone afterwards. */
__attribute__((unused)) static int load_text(const char *text, size_t bytes, nmk_tokenizer **t, nmk_err *e) {
    char path[] = "/tmp/nmk-tokenizer-XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0 || write(fd, text, bytes) != (ssize_t)bytes) die("cannot write a file in /tmp");
    close(fd);
    int rc = nmk_tokenizer_load(path, t, e);
    unlink(path);
    return rc;
}

__attribute__((unused)) static int load_tree(json_object *root, nmk_tokenizer **t, nmk_err *e) {
    size_t bytes;
    const char *text = json_object_to_json_string_length(root, JSON_C_TO_STRING_PLAIN, &bytes);
    return load_text(text, bytes, t, e);
}

__attribute__((unused)) static bool same_ids(const nmk_ids *ids, json_object *wanted) {
    if (ids->count != json_object_array_length(wanted)) return false;
    for (size_t i = 0; i < ids->count; i++)
        if (ids->id[i] != json_object_get_int(json_object_array_get_idx(wanted, i))) return false;
    return true;
}

/* Encodes a text with nothing left to fail. */
__attribute__((unused)) static nmk_ids encode(const nmk_tokenizer *t, const char *text, size_t bytes, unsigned flags) {
    nmk_ids ids = {0};
    nmk_err e;
    if (nmk_tokenizer_encode(t, text, bytes, flags, &ids, &e)) die(e.text);
    return ids;
}

__attribute__((unused)) static bool decodes_to(const nmk_tokenizer *t, const nmk_ids *ids, const char *text,
                                               size_t bytes) {
    nmk_buf b = {0};
    nmk_tokenizer_decode(t, ids->id, ids->count, false, &b);
    bool same = b.length == bytes && (!bytes || !memcmp(b.data, text, bytes));
    nmk_buf_free(&b);
    return same;
}

/* The same token by token, each addition valid UTF-8 by itself. */
__attribute__((unused)) static bool streams_to(const nmk_tokenizer *t, const nmk_ids *ids, const char *text,
                                               size_t bytes) {
    nmk_detokenizer d = {0};
    nmk_buf b = {0};
    bool good = true;
    for (size_t i = 0; i < ids->count; i++) {
        size_t before = b.length;
        nmk_detokenizer_add(&d, t, ids->id[i], &b);
        if (b.length > before && !nmk_utf8_valid(b.data + before, b.length - before)) good = false;
    }
    nmk_utf8_end(&d.text, &b);
    good = good && b.length == bytes && (!bytes || !memcmp(b.data, text, bytes));
    nmk_buf_free(&b);
    return good;
}

#endif
