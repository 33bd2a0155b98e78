#include "kept.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry entry;
struct entry {
    entry *next; /* the one used before */
    int key;
    char *id, *previous;
    nmk_buf input, body;
};

struct nmk_kept {
    pthread_mutex_t lock;
    entry *first; /* the one used last */
    size_t bytes, most_bytes;
};

static size_t bytes_of(const entry *e) { return sizeof *e + e->input.length + e->body.length; }

static void free_entry(entry *e) {
    free(e->id), free(e->previous);
    nmk_buf_free(&e->input), nmk_buf_free(&e->body);
    free(e);
}

nmk_kept *nmk_kept_new(size_t most_bytes) {
    nmk_kept *k = xcalloc(1, sizeof *k);
    k->most_bytes = most_bytes;
    pthread_mutex_init(&k->lock, NULL);
    return k;
}

void nmk_kept_free(nmk_kept *k) {
    if (!k) return;
    for (entry *e = k->first, *next; e; e = next) next = e->next, free_entry(e);
    pthread_mutex_destroy(&k->lock);
    free(k);
}

static entry **find(nmk_kept *k, int key, const char *id) {
    entry **at = &k->first;
    while (*at && ((*at)->key != key || strcmp((*at)->id, id) != 0)) at = &(*at)->next;
    return at;
}

/* Takes it out of the list. */
static entry *take(nmk_kept *k, entry **at) {
    entry *e = *at;
    *at = e->next;
    k->bytes -= bytes_of(e);
    return e;
}

static void put_first(nmk_kept *k, entry *e) {
    e->next = k->first, k->first = e;
    k->bytes += bytes_of(e);
}

static void copy(nmk_buf *to, const nmk_buf *from) { nmk_buf_add(to, from->data, from->length); }

void nmk_kept_add(nmk_kept *k, int key, const char *id, const char *previous, const nmk_buf *input,
                  const nmk_buf *body) {
    entry *e = xcalloc(1, sizeof *e);
    *e = (entry){.key = key, .id = xstrdup(id), .previous = previous ? xstrdup(previous) : NULL};
    copy(&e->input, input), copy(&e->body, body);
    pthread_mutex_lock(&k->lock);
    put_first(k, e);
    while (k->bytes > k->most_bytes) {
        entry **last = &k->first;
        while ((*last)->next) last = &(*last)->next;
        free_entry(take(k, last));
    }
    pthread_mutex_unlock(&k->lock);
}

static void add_all(struct json_object *list, struct json_object *items) {
    for (size_t i = 0; items && i < json_object_array_length(items); i++)
        json_object_array_add(list, json_object_get(json_object_array_get_idx(items, i)));
}

static struct json_object *tree_of(const nmk_buf *b) {
    return b->length ? nmk_json_parse(b->data, b->length, NULL) : NULL;
}

/* The earlier ones are put in front after the later ones, so what others follow is never the first to go. */
int nmk_kept_items(nmk_kept *k, int key, const char *id, struct json_object *list) {
    int rc = 0;
    size_t count = 0;
    entry **chain = NULL;
    pthread_mutex_lock(&k->lock);
    for (const char *at = id; at && !rc;) {
        entry **found = find(k, key, at);
        if (!*found) {
            rc = -1;
            break;
        }
        entry *e = take(k, found);
        put_first(k, e);
        chain = xrealloc(chain, (count + 1) * sizeof *chain);
        chain[count++] = e;
        at = e->previous;
    }
    for (size_t i = count; !rc && i-- > 0;) {
        struct json_object *input = tree_of(&chain[i]->input), *body = tree_of(&chain[i]->body);
        add_all(list, input), add_all(list, nmk_json_get(body, "output"));
        json_object_put(input), json_object_put(body);
    }
    pthread_mutex_unlock(&k->lock);
    free(chain);
    return rc;
}

struct json_object *nmk_kept_item(nmk_kept *k, int key, const char *id) {
    struct json_object *item = NULL;
    pthread_mutex_lock(&k->lock);
    for (entry *e = k->first; e && !item; e = e->next) {
        if (e->key != key || !strstr(e->body.data, id)) continue;
        struct json_object *body = tree_of(&e->body), *output = nmk_json_get(body, "output");
        for (size_t i = 0; output && i < json_object_array_length(output) && !item; i++) {
            struct json_object *one = json_object_array_get_idx(output, i), *name = nmk_json_get(one, "id");
            if (name && !strcmp(json_object_get_string(name), id)) item = json_object_get(one);
        }
        json_object_put(body);
    }
    pthread_mutex_unlock(&k->lock);
    return item;
}

bool nmk_kept_body(nmk_kept *k, int key, const char *id, nmk_buf *body) {
    pthread_mutex_lock(&k->lock);
    const entry *e = *find(k, key, id);
    if (e) copy(body, &e->body);
    pthread_mutex_unlock(&k->lock);
    return e;
}

bool nmk_kept_remove(nmk_kept *k, int key, const char *id) {
    pthread_mutex_lock(&k->lock);
    entry **at = find(k, key, id), *e = *at ? take(k, at) : NULL;
    pthread_mutex_unlock(&k->lock);
    if (e) free_entry(e);
    return e;
}
