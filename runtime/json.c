#include "json.h"

#include <errno.h>
#include <json-c/json_tokener.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

typedef struct {
    const char *begin, *at, *end;
    uint64_t *keys; /* hashes of the keys of every object that is open */
    size_t key_count, key_capacity;
    nmk_err *e;
} scan;

static int value(scan *s, int depth);

static int bad(scan *s, const char *at, const char *what) {
    int line = 1;
    const char *start = s->begin;
    for (const char *p = s->begin; p < at; p++)
        if (*p == '\n') line++, start = p + 1;
    return nmk_fail(s->e, "line %d, column %d: %s", line, (int)(at - start) + 1, what);
}

static void space(scan *s) {
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\t' || *s->at == '\n' || *s->at == '\r')) s->at++;
}

static int peek(const scan *s) { return s->at < s->end ? (unsigned char)*s->at : -1; }

static int hex4(scan *s) {
    int v = 0;
    for (int i = 0; i < 4; i++, s->at++) {
        int d = nmk_hex_digit(peek(s));
        if (d < 0) return -1;
        v = v << 4 | d;
    }
    return v;
}

static uint64_t hash_byte(uint64_t h, unsigned c) { return (h ^ c) * 0x100000001b3u; }

static uint64_t hash_code(uint64_t h, unsigned c) {
    if (c < 0x80) return hash_byte(h, c);
    if (c < 0x800) return hash_byte(hash_byte(h, 0xc0 | c >> 6), 0x80 | (c & 63));
    h = c < 0x10000 ? hash_byte(h, 0xe0 | c >> 12) : hash_byte(hash_byte(h, 0xf0 | c >> 18), 0x80 | (c >> 12 & 63));
    return hash_byte(hash_byte(h, 0x80 | (c >> 6 & 63)), 0x80 | (c & 63));
}

/* The string at s->at; its decoded bytes are hashed, however they were escaped. */
static int string(scan *s, int is_key, uint64_t *hash) {
    uint64_t h = 0xcbf29ce484222325u;
    const char *open = s->at++;
    for (;;) {
        const char *here = s->at;
        int c = peek(s);
        if (c < 0) return bad(s, open, "a string that does not end");
        if (c == '"') break;
        if (c < 0x20) return bad(s, here, "a control character in a string");
        if (c != '\\') {
            int n = nmk_utf8_scan(here, (size_t)(s->end - here));
            if (n <= 0) return bad(s, here, "not valid UTF-8");
            for (int i = 0; i < n; i++) h = hash_byte(h, (unsigned char)here[i]);
            s->at += n;
            continue;
        }
        s->at++;
        c = peek(s);
        s->at++;
        const char *plain = "\"\\/bfnrt", *found = c > 0 ? strchr(plain, c) : NULL;
        if (found) {
            h = hash_byte(h, (unsigned char)"\"\\/\b\f\n\r\t"[found - plain]);
            continue;
        }
        if (c != 'u') return bad(s, here, "an unknown escape");
        int code = hex4(s);
        if (code < 0) return bad(s, here, "\\u wants four hexadecimal digits");
        if (code >= 0xd800 && code < 0xe000) {
            int low = -1;
            if (code < 0xdc00 && s->end - s->at >= 6 && s->at[0] == '\\' && s->at[1] == 'u') s->at += 2, low = hex4(s);
            if (low < 0xdc00 || low >= 0xe000) return bad(s, here, "half of a surrogate pair");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        if (code == 0 && is_key) return bad(s, here, "NUL in a key");
        h = hash_code(h, (unsigned)code);
    }
    s->at++;
    if (hash) *hash = h;
    return 0;
}

static int digits(scan *s) {
    const char *start = s->at;
    while (s->at < s->end && *s->at >= '0' && *s->at <= '9') s->at++;
    return s->at > start ? 0 : -1;
}

static int number(scan *s) {
    const char *start = s->at;
    int whole = 1;
    if (peek(s) == '-') s->at++;
    if (peek(s) == '0')
        s->at++;
    else if (digits(s))
        return bad(s, start, "expected a value");
    if (peek(s) == '.') {
        whole = 0, s->at++;
        if (digits(s)) return bad(s, start, "a number without digits after its point");
    }
    if (peek(s) == 'e' || peek(s) == 'E') {
        whole = 0, s->at++;
        if (peek(s) == '+' || peek(s) == '-') s->at++;
        if (digits(s)) return bad(s, start, "a number without digits in its exponent");
    }
    /* The text is NUL-terminated and what follows is no digit, so the conversions end where the scan did. */
    errno = 0;
    if (whole) (void)strtoll(start, NULL, 10);
    if (whole && errno == ERANGE) return bad(s, start, "an integer that does not fit 64 bits");
    if (!whole && !isfinite(strtod(start, NULL))) return bad(s, start, "a number too large for a double");
    return 0;
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int object(scan *s, int depth) {
    const char *open = s->at++;
    size_t first = s->key_count;
    space(s);
    if (peek(s) == '}') return s->at++, 0;
    for (;;) {
        space(s);
        if (peek(s) != '"') return bad(s, s->at, "expected a key in double quotes");
        uint64_t hash;
        if (string(s, 1, &hash)) return -1;
        if (s->key_count == s->key_capacity) {
            s->key_capacity = s->key_capacity ? 2 * s->key_capacity : 256;
            s->keys = xrealloc(s->keys, s->key_capacity * sizeof *s->keys);
        }
        s->keys[s->key_count++] = hash;
        space(s);
        if (peek(s) != ':') return bad(s, s->at, "expected ':'");
        s->at++;
        if (value(s, depth)) return -1;
        space(s);
        if (peek(s) == '}') break;
        if (peek(s) != ',') return bad(s, s->at, "expected ',' or '}'");
        s->at++;
    }
    s->at++;
    qsort(s->keys + first, s->key_count - first, sizeof *s->keys, compare);
    for (size_t i = first + 1; i < s->key_count; i++) {
        if (s->keys[i] != s->keys[i - 1]) continue;
        /* Scan the object again for the second key with this hash: `at` of the message. */
        uint64_t twice = s->keys[i];
        int seen = 0;
        const char *at = open + 1;
        for (int level = 0; at < s->end && seen < 2;) {
            if (*at == '"') {
                scan again = {s->begin, at, s->end, NULL, 0, 0, NULL};
                uint64_t hash;
                if (string(&again, 1, &hash)) break;
                const char *after = again.at;
                space(&again);
                if (level == 0 && peek(&again) == ':' && hash == twice && ++seen == 2) {
                    char what[200];
                    snprintf(what, sizeof what, "the key %.*s is there twice",
                             (int)(after - at > 150 ? 150 : after - at), at);
                    return bad(s, at, what);
                }
                at = after;
                continue;
            }
            level += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
            at++;
        }
        return bad(s, open, "an object with a key that is there twice");
    }
    s->key_count = first;
    return 0;
}

static int array(scan *s, int depth) {
    s->at++;
    space(s);
    if (peek(s) == ']') return s->at++, 0;
    for (;;) {
        if (value(s, depth)) return -1;
        space(s);
        if (peek(s) == ']') break;
        if (peek(s) != ',') return bad(s, s->at, "expected ',' or ']'");
        s->at++;
    }
    s->at++;
    return 0;
}

static int word(scan *s, const char *w) {
    size_t n = strlen(w);
    if ((size_t)(s->end - s->at) < n || memcmp(s->at, w, n) != 0) return bad(s, s->at, "expected a value");
    s->at += n;
    return 0;
}

static int value(scan *s, int depth) {
    space(s);
    switch (peek(s)) {
    case '{':
    case '[':
        if (depth == NMK_JSON_DEPTH) return bad(s, s->at, "nested too deeply");
        return *s->at == '{' ? object(s, depth + 1) : array(s, depth + 1);
    case '"': return string(s, 0, NULL);
    case 't': return word(s, "true");
    case 'f': return word(s, "false");
    case 'n': return word(s, "null");
    case -1: return bad(s, s->at, "the text ends where a value was expected");
    default: return number(s);
    }
}

struct json_object *nmk_json_parse(const char *text, size_t bytes, nmk_err *e) {
    struct json_object *tree = NULL;
    struct json_tokener *tokener = NULL;
    scan s = {text, text, text + bytes, NULL, 0, 0, e};
    if (bytes > INT_MAX - 1) {
        nmk_fail(e, "too long for JSON (%zu bytes)", bytes);
        goto out;
    }
    if (value(&s, 0)) goto out;
    space(&s);
    if (s.at != s.end) {
        bad(&s, s.at, "something after the end of the value");
        goto out;
    }
    tokener = json_tokener_new_ex(NMK_JSON_DEPTH + 2);
    if (!tokener) {
        nmk_fail(e, "no memory for a JSON parser");
        goto out;
    }
    json_tokener_set_flags(tokener, JSON_TOKENER_STRICT | JSON_TOKENER_VALIDATE_UTF8);
    tree = json_tokener_parse_ex(tokener, text, (int)bytes + 1); /* with its NUL: a number may end the text */
    if (!tree)
        nmk_fail(e, "%s",
                 json_tokener_get_error(tokener) == json_tokener_success
                     ? "null is not accepted here"
                     : json_tokener_error_desc(json_tokener_get_error(tokener)));
out:
    if (tokener) json_tokener_free(tokener);
    free(s.keys);
    return tree;
}

struct json_object *nmk_json_read(const char *path, size_t max_bytes, nmk_err *e) {
    char *text = NULL;
    size_t bytes;
    if (nmk_file_read(&text, &bytes, path, max_bytes, e)) return NULL;
    struct json_object *tree = nmk_json_parse(text, bytes, e);
    if (!tree) nmk_fail_in(e, "%s", path);
    free(text);
    return tree;
}

struct json_object *nmk_json_get(struct json_object *obj, const char *key) {
    struct json_object *member = NULL;
    if (!json_object_is_type(obj, json_type_object)) return NULL;
    return json_object_object_get_ex(obj, key, &member) ? member : NULL;
}
