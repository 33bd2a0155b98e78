#include "config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "json.h"

#define CONFIG_BYTES_MAX (16u << 20)

static struct json_object *at_path(struct json_object *root, const char *path, size_t length) {
    const char *end = path + length;
    while (root && path) {
        const char *dot = memchr(path, '.', (size_t)(end - path));
        char key[128];
        size_t n = (size_t)((dot ? dot : end) - path);
        if (n >= sizeof key) return NULL;
        memcpy(key, path, n), key[n] = 0;
        root = nmk_json_get(root, key);
        path = dot ? dot + 1 : NULL;
    }
    return root;
}

/* A fact where it stands; `where` names that place, which is the first one if it stands nowhere. */
static struct json_object *find_fact(struct json_object *root, const nmk_config *f, char *where, size_t size) {
    struct json_object *found = at_path(root, f->path, strlen(f->path));
    snprintf(where, size, "%s", f->path);
    for (const char *path = f->or_path; path && !found; path = strchr(path, '|')) {
        path += *path == '|';
        size_t n = strcspn(path, "|");
        if ((found = at_path(root, path, n))) snprintf(where, size, "%.*s", (int)n, path);
    }
    return found;
}

static int is_number(struct json_object *v) {
    return json_object_is_type(v, json_type_int) || json_object_is_type(v, json_type_double);
}

/* Doubles may have been written from floats: 1e-6 of either is the same number. */
static int same(struct json_object *a, struct json_object *b) {
    if (json_object_is_type(a, json_type_int) && json_object_is_type(b, json_type_int))
        return json_object_get_int64(a) == json_object_get_int64(b);
    if (is_number(a) && is_number(b)) {
        double x = json_object_get_double(a), y = json_object_get_double(b);
        return fabs(x - y) <= 1e-6 * fmax(fabs(x), fabs(y));
    }
    if (json_object_get_type(a) != json_object_get_type(b)) return 0;
    if (!json_object_is_type(a, json_type_array)) return json_object_equal(a, b);
    if (json_object_array_length(a) != json_object_array_length(b)) return 0;
    for (size_t i = 0; i < json_object_array_length(a); i++)
        if (!same(json_object_array_get_idx(a, i), json_object_array_get_idx(b, i))) return 0;
    return 1;
}

static const char *show(struct json_object *v) {
    return v ? json_object_to_json_string_ext(v, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE) : "null";
}

static void contradiction(nmk_buf *out, const char *file, const char *path, struct json_object *found,
                          struct json_object *expected) {
    if (json_object_is_type(found, json_type_array) && json_object_is_type(expected, json_type_array)) {
        size_t n = json_object_array_length(found), m = json_object_array_length(expected), i = 0;
        if (n != m) {
            nmk_buf_printf(out, "%s: %s has %zu elements, this program was generated for %zu\n", file, path, n, m);
            return;
        }
        while (i < n && same(json_object_array_get_idx(found, i), json_object_array_get_idx(expected, i))) i++;
        nmk_buf_printf(out, "%s: %s[%zu] is %.80s, this program was generated for %.80s\n", file, path, i,
                       show(json_object_array_get_idx(found, i)), show(json_object_array_get_idx(expected, i)));
        return;
    }
    nmk_buf_printf(out, "%s: %s is %.80s, this program was generated for %.80s\n", file, path, show(found),
                   show(expected));
}

int nmk_config_check(const char *dir, const nmk_config *facts, int count, nmk_err *e) {
    int rc = -1;
    nmk_buf mistakes = {0};
    char *path = xasprintf("%s/config.json", dir);
    struct json_object *config = nmk_json_read(path, CONFIG_BYTES_MAX, e);
    if (!config) goto out;
    if (!json_object_is_type(config, json_type_object)) {
        nmk_fail(e, "%s: not a JSON object", path);
        goto out;
    }
    for (int i = 0; i < count; i++) {
        const nmk_config *f = &facts[i];
        char where[128];
        struct json_object *found = find_fact(config, f, where, sizeof where);
        if (!found && !f->required) continue;
        struct json_object *expected = nmk_json_parse(f->value, strlen(f->value), e);
        if (!expected) {
            nmk_fail_in(e, "the fact about %s", f->path);
            goto out;
        }
        if (!found) {
            nmk_buf_printf(&mistakes, "%s: %s is missing, this program was generated for %.80s\n", path, f->path,
                           show(expected));
        } else if (!same(found, expected)) {
            contradiction(&mistakes, path, where, found, expected);
        }
        json_object_put(expected);
    }
    if (mistakes.length) {
        mistakes.data[mistakes.length - 1] = 0;
        nmk_fail(e, "%s", mistakes.data);
        goto out;
    }
    rc = 0;
out:
    json_object_put(config);
    nmk_buf_free(&mistakes);
    free(path);
    return rc;
}

static int token_id(struct json_object *v, const char *path, const char *key, int32_t *id, nmk_err *e) {
    if (!json_object_is_type(v, json_type_int) || json_object_get_int64(v) < 0 || json_object_get_int64(v) > INT32_MAX)
        return nmk_fail(e, "%s: %s: %.80s is not a token id", path, key, show(v));
    *id = (int32_t)json_object_get_int64(v);
    return 0;
}

/* The ids that `root` gives, where none are known yet. */
static int read_ids(struct json_object *root, const char *path, nmk_generation_config *g, nmk_err *e) {
    struct json_object *eos = nmk_json_get(root, "eos_token_id"), *bos = nmk_json_get(root, "bos_token_id");
    if (bos && g->bos < 0 && token_id(bos, path, "bos_token_id", &g->bos, e)) return -1;
    if (!eos || g->eos_count) return 0;
    if (!json_object_is_type(eos, json_type_array))
        return token_id(eos, path, "eos_token_id", &g->eos[g->eos_count++], e);
    if (json_object_array_length(eos) > NMK_STOP_IDS)
        return nmk_fail(e, "%s: eos_token_id has %zu ids, at most %d are supported", path,
                        json_object_array_length(eos), NMK_STOP_IDS);
    for (size_t i = 0; i < json_object_array_length(eos); i++)
        if (token_id(json_object_array_get_idx(eos, i), path, "eos_token_id", &g->eos[g->eos_count++], e)) return -1;
    return 0;
}

static int read_number(struct json_object *root, const char *path, const char *key, double low, double high, double *to,
                       nmk_err *e) {
    struct json_object *v = nmk_json_get(root, key);
    if (!v) return 0;
    double x = is_number(v) ? json_object_get_double(v) : NAN;
    if (!(x >= low && x <= high))
        return nmk_fail(e, "%s: %s is %.80s, expected a number from %g to %g", path, key, show(v), low, high);
    *to = x;
    return 0;
}

int nmk_generation_config_read(const char *dir, nmk_generation_config *g, nmk_err *e) {
    int rc = -1;
    double top_k = 0;
    char *path = xasprintf("%s/generation_config.json", dir), *config_path = xasprintf("%s/config.json", dir);
    struct json_object *root = NULL, *config = NULL;
    *g = (nmk_generation_config){.bos = -1, .temperature = 1, .top_p = 1};
    if (access(path, F_OK) == 0) {
        root = nmk_json_read(path, CONFIG_BYTES_MAX, e);
        if (!root) goto out;
        if (!json_object_is_type(root, json_type_object)) {
            nmk_fail(e, "%s: not a JSON object", path);
            goto out;
        }
        if (read_ids(root, path, g, e)) goto out;
        if (read_number(root, path, "temperature", 0, 100, &g->temperature, e)) goto out;
        if (read_number(root, path, "top_p", 0, 1, &g->top_p, e)) goto out;
        if (read_number(root, path, "top_k", 0, INT32_MAX, &top_k, e)) goto out;
        g->top_k = (int64_t)top_k;
        struct json_object *sample = nmk_json_get(root, "do_sample");
        if (sample && !json_object_is_type(sample, json_type_boolean)) {
            nmk_fail(e, "%s: do_sample is %.80s, expected true or false", path, show(sample));
            goto out;
        }
        g->do_sample = sample && json_object_get_boolean(sample);
    }
    if (access(config_path, F_OK) == 0) {
        config = nmk_json_read(config_path, CONFIG_BYTES_MAX, e);
        if (!config || read_ids(config, config_path, g, e)) goto out;
    }
    rc = 0;
out:
    json_object_put(root), json_object_put(config);
    free(path), free(config_path);
    return rc;
}
