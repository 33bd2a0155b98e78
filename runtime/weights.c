#include "weights.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "json.h"

#include "../templates/random.h"

#include "../templates/packed.h" /* needs random.h */

_Static_assert(NMK_LAYOUT_ROWS == NMK_PACKED_ROWS && NMK_LAYOUT_PAIRS == NMK_PACKED_PAIRS &&
                   NMK_LAYOUT_GATE_UP == NMK_PACKED_GATE_UP && NMK_LAYOUT_VECTOR == NMK_PACKED_VECTOR &&
                   NMK_LAYOUT_HALVES64 == NMK_PACKED_HALVES64 && NMK_LAYOUT_HALVES128 == NMK_PACKED_HALVES128,
               "layouts are numbered alike in the tables and in the kernels");

enum {
    HEADER_BYTES_MAX = 100000000, /* the format's own limit */
    INDEX_BYTES_MAX = 100000000,
    DIMS_MAX = 8,
    MISTAKES_MAX = 10,
    TEXT_MAX = 900,         /* leaves room for the count in nmk_err */
    READ_BYTES = 8 << 20,   /* one read of one thread */
    BATCH_BYTES = 64 << 20, /* one staging buffer */
    BATCH_ALIGN = 256,
    SLOTS = 3, /* staging buffers: one is read into, one is copied, one waits for the pack kernels */
    THREADS_MAX = 8,
    BLOCK = 256
};

typedef struct {
    char *path;
    int fd, ok;
    uint64_t bytes, data; /* of the file; where its tensors begin */
} shard;

/* A tensor as a file's header describes it. */
typedef struct {
    char *name;
    int shard, dims, used;
    char dtype[12];
    uint64_t shape[DIMS_MAX], begin, end; /* bytes of the data section */
} found;

/* What the index says. */
typedef struct {
    char *name;
    int shard;
} listed;

/* A tensor and its place: rows first..first+rows-1 of a matrix of `array`, each of `cols` elements, or the elements
 * from `first` on of a vector, which is one row.  arena_at is that of the matrix or the whole vector. */
typedef struct {
    const nmk_array *array;
    uint64_t file_at, arena_at;
    int shard, first, rows, cols;
    int pad; /* rows or elements behind it that no tensor has: zero */
} place;

struct nmk_checkpoint {
    shard *shards;
    int shard_count;
    found *found;
    size_t found_count, found_capacity;
    listed *listed;
    size_t listed_count;
    place *places; /* in the order of the files */
    size_t place_count;
    uint64_t bytes;
};

/* ---------------------------------------------------------------- mistakes */

typedef struct {
    nmk_buf text;
    int count, shown;
} mistakes;

__attribute__((format(printf, 2, 3))) static void mistake(mistakes *m, const char *fmt, ...) {
    char line[TEXT_MAX];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    m->count++;
    if (m->shown == MISTAKES_MAX || (m->shown && m->text.length + strlen(line) > TEXT_MAX)) return;
    m->shown++;
    nmk_buf_printf(&m->text, "%s%s", m->text.length ? "\n" : "", line);
}

static int report(mistakes *m, nmk_err *e) {
    if (m->count == 0) return 0;
    if (m->count > m->shown) nmk_buf_printf(&m->text, "\nand %d more", m->count - m->shown);
    return nmk_fail(e, "%s", m->text.data);
}

/* "[768, 2048]" */
static const char *show_shape(char *to, size_t size, const uint64_t *shape, int dims) {
    size_t n = (size_t)snprintf(to, size, "[");
    for (int i = 0; i < dims && n < size; i++)
        n += (size_t)snprintf(to + n, size - n, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    if (n < size) snprintf(to + n, size - n, "]");
    return to;
}

/* ---------------------------------------------------------------- one file */

static int read_at(int fd, const char *path, void *to, size_t bytes, uint64_t at, nmk_err *e) {
    char *p = to;
    while (bytes) {
        ssize_t n = pread(fd, p, bytes, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return nmk_fail(e, "%s: %s", path, strerror(errno));
        if (n == 0) return nmk_fail(e, "%s: became shorter while it was read", path);
        p += n, at += (uint64_t)n, bytes -= (size_t)n;
    }
    return 0;
}

/* Bytes of an element; 0 for a type that we do not know, whose tensors' sizes are then not checked. */
static int dtype_bytes(const char *dtype) {
    static const struct {
        const char *name;
        int bytes;
    } types[] = {{"BF16", 2},    {"F16", 2},     {"F32", 4}, {"F64", 8}, {"I64", 8},
                 {"I32", 4},     {"I16", 2},     {"I8", 1},  {"U8", 1},  {"BOOL", 1},
                 {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"U16", 2}, {"U32", 4}, {"U64", 8}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, dtype) == 0) return types[i].bytes;
    return 0;
}

static int natural_number(struct json_object *v, uint64_t *to) {
    if (!json_object_is_type(v, json_type_int) || json_object_get_int64(v) < 0) return -1;
    *to = (uint64_t)json_object_get_int64(v);
    return 0;
}

/* One entry of a header.  0, or -1 with the mistake noted. */
static int read_entry(found *f, const shard *s, const char *name, struct json_object *entry, mistakes *m) {
    struct json_object *dtype = nmk_json_get(entry, "dtype"), *shape = nmk_json_get(entry, "shape"),
                       *offsets = nmk_json_get(entry, "data_offsets");
    if (!json_object_is_type(dtype, json_type_string) || !json_object_is_type(shape, json_type_array) ||
        !json_object_is_type(offsets, json_type_array) || json_object_object_length(entry) != 3) {
        mistake(m, "%s: tensor %s: expected exactly dtype, shape and data_offsets", s->path, name);
        return -1;
    }
    snprintf(f->dtype, sizeof f->dtype, "%s", json_object_get_string(dtype));
    size_t dims = json_object_array_length(shape);
    if (dims > DIMS_MAX) {
        mistake(m, "%s: tensor %s: %zu dimensions, at most %d are accepted", s->path, name, dims, DIMS_MAX);
        return -1;
    }
    uint64_t count = 1;
    int overflow = 0;
    for (size_t i = 0; i < dims; i++) {
        if (natural_number(json_object_array_get_idx(shape, i), &f->shape[i])) {
            mistake(m, "%s: tensor %s: the shape holds something that is not a size", s->path, name);
            return -1;
        }
        overflow |= __builtin_mul_overflow(count, f->shape[i], &count);
    }
    f->dims = (int)dims;
    if (json_object_array_length(offsets) != 2 || natural_number(json_object_array_get_idx(offsets, 0), &f->begin) ||
        natural_number(json_object_array_get_idx(offsets, 1), &f->end) || f->begin > f->end) {
        mistake(m, "%s: tensor %s: data_offsets are not a begin and an end", s->path, name);
        return -1;
    }
    int bytes = dtype_bytes(f->dtype);
    if (bytes && (overflow || count > UINT64_MAX / 8 || count * (uint64_t)bytes != f->end - f->begin)) {
        char text[128];
        mistake(m, "%s: tensor %s: %s %s takes up %llu bytes", s->path, name, f->dtype,
                show_shape(text, sizeof text, f->shape, f->dims), (unsigned long long)(f->end - f->begin));
        return -1;
    }
    return 0;
}

static int by_begin(const void *a, const void *b) {
    const found *x = *(found *const *)a, *y = *(found *const *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* The tensors of a file cover its data section without overlap or hole. */
static int check_cover(const shard *s, found *list, size_t count, mistakes *m) {
    int before = m->count;
    uint64_t at = 0, size = s->bytes - s->data;
    const found *last = NULL;
    found **sorted = xmalloc((count + 1) * sizeof(found *));
    for (size_t i = 0; i < count; i++) sorted[i] = &list[i];
    qsort(sorted, count, sizeof *sorted, by_begin);
    for (size_t i = 0; i < count; i++) {
        const found *f = sorted[i];
        if (f->begin < at && f->end > f->begin)
            mistake(m, "%s: tensor %s overlaps tensor %s", s->path, f->name, last->name);
        else if (f->begin > at)
            mistake(m, "%s: the %llu bytes before tensor %s belong to no tensor", s->path,
                    (unsigned long long)(f->begin - at), f->name);
        if (f->end > at) at = f->end, last = f;
    }
    if (at > size)
        mistake(m, "%s: truncated: its tensors need %llu bytes, the file has %llu", s->path,
                (unsigned long long)(s->data + at), (unsigned long long)s->bytes);
    else if (at < size)
        mistake(m, "%s: %llu bytes after the last tensor belong to no tensor", s->path,
                (unsigned long long)(size - at));
    free(sorted);
    return m->count > before ? -1 : 0;
}

/* Opens a shard and adds its tensors.  Leaves s->ok set only if the file is sound. */
static void open_shard(nmk_checkpoint *c, int index, mistakes *m) {
    shard *s = &c->shards[index];
    nmk_err err;
    struct stat st;
    unsigned char length[8];
    uint64_t header = 0;
    char *text = NULL;
    struct json_object *root = NULL;
    size_t first = c->found_count;
    int sound = 1;

    s->fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* not to wait for the other end of a pipe */
    if (s->fd < 0 || fstat(s->fd, &st)) {
        mistake(m, "%s: %s", s->path, strerror(errno));
        goto out;
    }
    if (!S_ISREG(st.st_mode)) {
        mistake(m, "%s: not a regular file", s->path);
        goto out;
    }
    s->bytes = (uint64_t)st.st_size;
    if (s->bytes < sizeof length) {
        mistake(m, "%s: truncated: %llu bytes are too few for a safetensors header", s->path,
                (unsigned long long)s->bytes);
        goto out;
    }
    if (read_at(s->fd, s->path, length, sizeof length, 0, &err)) {
        mistake(m, "%s", err.text);
        goto out;
    }
    for (int i = 7; i >= 0; i--) header = header << 8 | length[i];
    if (header > HEADER_BYTES_MAX || header > s->bytes - sizeof length) {
        mistake(m, "%s: the header claims %llu bytes, the file has %llu: truncated, or not a safetensors file", s->path,
                (unsigned long long)header, (unsigned long long)s->bytes);
        goto out;
    }
    s->data = sizeof length + header;
    text = xmalloc(header + 1);
    text[header] = 0;
    if (read_at(s->fd, s->path, text, header, sizeof length, &err)) {
        mistake(m, "%s", err.text);
        goto out;
    }
    root = nmk_json_parse(text, header, &err);
    if (!root) {
        mistake(m, "%s: header: %s", s->path, err.text);
        goto out;
    }
    if (!json_object_is_type(root, json_type_object)) {
        mistake(m, "%s: header: not a JSON object", s->path);
        goto out;
    }
    json_object_object_foreach(root, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue;
        found f = {.shard = index};
        if (read_entry(&f, s, name, entry, m)) {
            sound = 0;
            continue;
        }
        if (c->found_count == c->found_capacity) {
            c->found_capacity = c->found_capacity ? 2 * c->found_capacity : 256;
            c->found = xrealloc(c->found, c->found_capacity * sizeof *c->found);
        }
        f.name = xstrdup(name);
        c->found[c->found_count++] = f;
    }
    /* With an entry left out, the rest cannot cover the file: one mistake is enough. */
    if (sound && check_cover(s, c->found + first, c->found_count - first, m)) sound = 0;
    s->ok = sound;
out:
    json_object_put(root);
    free(text);
}

/* ---------------------------------------------------------------- the set of files */

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static int found_by_name(const void *a, const void *b) {
    return strcmp(((const found *)a)->name, ((const found *)b)->name);
}
static int listed_by_name(const void *a, const void *b) {
    return strcmp(((const listed *)a)->name, ((const listed *)b)->name);
}

static found *find(const nmk_checkpoint *c, const char *name) {
    found key = {.name = (char *)(uintptr_t)name};
    return c->found_count ? bsearch(&key, c->found, c->found_count, sizeof key, found_by_name) : NULL;
}

static const listed *find_listed(const nmk_checkpoint *c, const char *name) {
    listed key = {.name = (char *)(uintptr_t)name};
    return c->listed_count ? bsearch(&key, c->listed, c->listed_count, sizeof key, listed_by_name) : NULL;
}

/* A name in the checkpoint's own directory. */
static int plain_file_name(const char *s) {
    size_t n = strlen(s);
    return n > 12 && strcmp(s + n - 12, ".safetensors") == 0 && !strchr(s, '/') && s[0] != '.';
}

/* Shards and what the index says of them. */
static int read_index(nmk_checkpoint *c, const char *dir, const char *path, nmk_err *e) {
    int rc = -1;
    char **files = NULL;
    size_t n = 0, unique = 0;
    struct json_object *root = nmk_json_read(path, INDEX_BYTES_MAX, e), *map = nmk_json_get(root, "weight_map");
    if (!root) goto out;
    if (!json_object_is_type(map, json_type_object) || json_object_object_length(map) == 0) {
        nmk_fail(e, "%s: weight_map is missing or empty", path);
        goto out;
    }
    c->listed = xcalloc((size_t)json_object_object_length(map), sizeof *c->listed);
    files = xcalloc((size_t)json_object_object_length(map), sizeof *files);
    json_object_object_foreach(map, name, file) {
        const char *text = json_object_is_type(file, json_type_string) ? json_object_get_string(file) : "";
        if (!plain_file_name(text)) {
            nmk_fail(e, "%s: tensor %s: expected the name of a .safetensors file, found \"%.80s\"", path, name, text);
            goto out;
        }
        c->listed[c->listed_count++].name = xstrdup(name);
        files[n++] = (char *)(uintptr_t)text;
    }
    qsort(files, n, sizeof *files, by_text);
    for (size_t i = 0; i < n; i++)
        if (unique == 0 || strcmp(files[i], files[unique - 1]) != 0) files[unique++] = files[i];
    c->shards = xcalloc(unique, sizeof *c->shards);
    for (; (size_t)c->shard_count < unique; c->shard_count++)
        c->shards[c->shard_count] = (shard){.path = xasprintf("%s/%s", dir, files[c->shard_count]), .fd = -1};
    size_t i = 0;
    json_object_object_foreach(map, name2, file2) {
        (void)name2;
        const char *text = json_object_get_string(file2);
        c->listed[i++].shard = (int)((char **)bsearch(&text, files, unique, sizeof *files, by_text) - files);
    }
    qsort(c->listed, c->listed_count, sizeof *c->listed, listed_by_name);
    rc = 0;
out:
    json_object_put(root);
    free(files);
    return rc;
}

/* Requires: all shards opened.  Leaves: found sorted by name, each name once; the index compared with the shards. */
static void check_index(nmk_checkpoint *c, const char *index_path, mistakes *m) {
    size_t kept = 0;
    if (c->found_count) qsort(c->found, c->found_count, sizeof *c->found, found_by_name);
    for (size_t i = 0; i < c->found_count; i++) {
        found *f = &c->found[i];
        if (kept && strcmp(f->name, c->found[kept - 1].name) == 0) {
            mistake(m, "%s: tensor %s is also in %s", c->shards[f->shard].path, f->name,
                    c->shards[c->found[kept - 1].shard].path);
            free(f->name);
            continue;
        }
        c->found[kept++] = *f;
    }
    c->found_count = kept;
    if (!c->listed) return;
    for (size_t i = 0; i < c->listed_count; i++) {
        const listed *l = &c->listed[i];
        const found *f = find(c, l->name);
        if (f && f->shard != l->shard)
            mistake(m, "%s: tensor %s is listed in %s, but it is in %s", index_path, l->name, c->shards[l->shard].path,
                    c->shards[f->shard].path);
        else if (!f && c->shards[l->shard].ok)
            mistake(m, "%s: tensor %s is listed in %s, which lacks it", index_path, l->name, c->shards[l->shard].path);
    }
    for (size_t i = 0; i < c->found_count; i++) {
        if (!find_listed(c, c->found[i].name))
            mistake(m, "%s: tensor %s is not listed in %s", c->shards[c->found[i].shard].path, c->found[i].name,
                    index_path);
    }
}

/* ---------------------------------------------------------------- files against the tables */

/* The name with its first %d replaced by the layer and its second by the expert. */
static void tensor_name(char *to, size_t size, const char *pattern, int layer, int expert) {
    size_t n = 0;
    int number = layer;
    for (const char *p = pattern; *p && n + 12 < size; p++) {
        if (p[0] == '%' && p[1] == 'd') {
            n += (size_t)snprintf(to + n, size - n, "%d", number);
            number = expert, p++;
        } else {
            to[n++] = *p;
        }
    }
    to[n] = 0;
}

/* Buffers that some exporters write and no model needs. */
static int ignored(const char *name) {
    static const char suffix[] = "rotary_emb.inv_freq";
    size_t n = strlen(name);
    return n >= sizeof suffix - 1 && strcmp(name + n - (sizeof suffix - 1), suffix) == 0;
}

static int is_vector(const nmk_array *a) { return a->layout == NMK_LAYOUT_VECTOR; }

/* Rows (of a vector: elements) of its array from a tensor's end to the next tensor or to the end of the array, where
 * that is near enough to be what rounding up gave. */
static int pad_after(const nmk_weight_tables *tables, const nmk_tensor *t) {
    const nmk_array *a = &tables->arrays[t->array];
    int end = t->row0 + (is_vector(a) ? t->cols : t->rows);
    for (int i = 0; i < tables->tensor_count; i++)
        if (tables->tensors[i].array == t->array && tables->tensors[i].row0 >= end) return 0;
    return (is_vector(a) ? a->cols : a->rows) - end;
}

/* The tensor that fills what a twin repeats. */
static const nmk_tensor *original_of(const nmk_weight_tables *tables, const nmk_tensor *twin) {
    for (int i = 0; i < tables->tensor_count; i++) {
        const nmk_tensor *t = &tables->tensors[i];
        if (t != twin && !t->twin && t->array == twin->array && t->row0 == twin->row0) return t;
    }
    return NULL;
}

/* Two tensors of the same type and shape, by their bytes. */
static void check_twin(const nmk_checkpoint *c, const found *twin, const found *other, mistakes *m) {
    enum { BYTES = 1 << 20 };
    const shard *s = &c->shards[twin->shard], *o = &c->shards[other->shard];
    char *text = xmalloc(2 * BYTES);
    nmk_err err;
    for (uint64_t at = 0, n; at < twin->end - twin->begin; at += n) {
        n = twin->end - twin->begin - at < BYTES ? twin->end - twin->begin - at : BYTES;
        if (read_at(s->fd, s->path, text, n, s->data + twin->begin + at, &err) ||
            read_at(o->fd, o->path, text + BYTES, n, o->data + other->begin + at, &err)) {
            mistake(m, "%s", err.text);
            break;
        }
        if (memcmp(text, text + BYTES, n) == 0) continue;
        mistake(m, "%s: tensor %s differs from %s, which this model has in its place", s->path, twin->name,
                other->name);
        break;
    }
    free(text);
}

static void check_tensor(nmk_checkpoint *c, const nmk_weight_tables *tables, const nmk_tensor *t, int layer, int expert,
                         const char *where, int all_sound, mistakes *m) {
    const nmk_array *a = &tables->arrays[t->array];
    char name[256], expected_text[128], found_text[128];
    uint64_t expected[2] = {(uint64_t)t->rows, (uint64_t)t->cols};
    const uint64_t *shape = t->dims == 1 ? expected + 1 : expected;
    tensor_name(name, sizeof name, t->name, layer, expert);
    show_shape(expected_text, sizeof expected_text, shape, t->dims);
    found *f = find(c, name);
    if (!f && t->twin) return;
    if (!f) {
        /* Where the index lists it or a file is broken, that mistake is already noted. */
        if (all_sound && !find_listed(c, name)) mistake(m, "%s: tensor %s %s is missing", where, name, expected_text);
        return;
    }
    f->used = 1;
    const char *path = c->shards[f->shard].path;
    if (strcmp(f->dtype, "BF16") != 0)
        mistake(m, "%s: tensor %s: expected dtype BF16, found %s", path, name, f->dtype);
    else if (f->dims != t->dims || memcmp(f->shape, shape, (size_t)t->dims * sizeof *shape) != 0)
        mistake(m, "%s: tensor %s: expected shape %s, found %s", path, name, expected_text,
                show_shape(found_text, sizeof found_text, f->shape, f->dims));
    else if (t->twin) {
        const nmk_tensor *original = original_of(tables, t);
        assert(original);
        tensor_name(name, sizeof name, original->name, layer, expert);
        const found *other = find(c, name);
        /* One that is missing or of another size has its own message. */
        if (other && other->end - other->begin == f->end - f->begin && c->shards[f->shard].ok &&
            c->shards[other->shard].ok)
            check_twin(c, f, other, m);
    } else {
        c->places[c->place_count++] = (place){.array = a,
                                              .file_at = c->shards[f->shard].data + f->begin,
                                              .arena_at = nmk_array_at(a, layer, expert),
                                              .shard = f->shard,
                                              .first = t->row0,
                                              .rows = t->rows,
                                              .cols = t->cols,
                                              .pad = pad_after(tables, t)};
        c->bytes += f->end - f->begin;
    }
}

static int by_file(const void *a, const void *b) {
    const place *x = a, *y = b;
    if (x->shard != y->shard) return x->shard - y->shard;
    return (x->file_at > y->file_at) - (x->file_at < y->file_at);
}

static void check_tables(nmk_checkpoint *c, const nmk_weight_tables *t, const char *where, mistakes *m) {
    size_t total = 0;
    int all_sound = 1;
    for (int i = 0; i < c->shard_count; i++) all_sound &= c->shards[i].ok;
    for (int i = 0; i < t->tensor_count; i++)
        total += (size_t)t->tensors[i].layers * (size_t)(t->tensors[i].experts ? t->tensors[i].experts : 1);
    c->places = xcalloc(total + 1, sizeof *c->places);
    for (int i = 0; i < t->tensor_count; i++) {
        const nmk_tensor *n = &t->tensors[i];
        for (int layer = n->layer0; layer < n->layer0 + n->layers; layer++)
            for (int expert = 0; expert < (n->experts ? n->experts : 1); expert++)
                check_tensor(c, t, n, layer, expert, where, all_sound, m);
    }
    for (size_t i = 0; i < c->found_count; i++) {
        const found *f = &c->found[i];
        if (!f->used && !ignored(f->name))
            mistake(m, "%s: tensor %s does not belong to this model", c->shards[f->shard].path, f->name);
    }
    qsort(c->places, c->place_count, sizeof *c->places, by_file);
}

int nmk_checkpoint_open(nmk_checkpoint **checkpoint, const char *dir, const nmk_weight_tables *tables, nmk_err *e) {
    int rc = -1;
    mistakes m = {0};
    nmk_checkpoint *c = xcalloc(1, sizeof *c);
    char *single = xasprintf("%s/model.safetensors", dir), *index = xasprintf("%s/model.safetensors.index.json", dir);
    const char *where = index;
    if (access(single, F_OK) == 0) {
        where = single;
        c->shards = xcalloc(1, sizeof *c->shards);
        c->shards[c->shard_count++] = (shard){.path = xstrdup(single), .fd = -1};
    } else if (access(index, F_OK) == 0) {
        if (read_index(c, dir, index, e)) goto out;
    } else {
        nmk_fail(e, "%s: neither model.safetensors nor model.safetensors.index.json is there", dir);
        goto out;
    }
    for (int i = 0; i < c->shard_count; i++) open_shard(c, i, &m);
    check_index(c, index, &m);
    check_tables(c, tables, where, &m);
    if (report(&m, e)) goto out;
    *checkpoint = c, c = NULL, rc = 0;
out:
    nmk_checkpoint_close(c);
    nmk_buf_free(&m.text);
    free(single), free(index);
    return rc;
}

void nmk_checkpoint_close(nmk_checkpoint *c) {
    if (!c) return;
    for (int i = 0; i < c->shard_count; i++) {
        if (c->shards[i].fd >= 0) close(c->shards[i].fd);
        free(c->shards[i].path);
    }
    for (size_t i = 0; i < c->found_count; i++) free(c->found[i].name);
    for (size_t i = 0; i < c->listed_count; i++) free(c->listed[i].name);
    free(c->shards), free(c->found), free(c->listed), free(c->places), free(c);
}

uint64_t nmk_checkpoint_bytes(const nmk_checkpoint *c) { return c->bytes; }

/* ---------------------------------------------------------------- threads */

/* Calls job(user, 0..count-1) from several threads, the caller's among them. */
typedef struct {
    void (*job)(void *user, int index);
    void *user;
    int count;
    atomic_int next;
} crowd;

static void *crowd_work(void *arg) {
    crowd *w = arg;
    for (int i; (i = atomic_fetch_add(&w->next, 1)) < w->count;) w->job(w->user, i);
    return NULL;
}

static void in_parallel(void (*job)(void *user, int index), void *user, int count) {
    crowd w = {.job = job, .user = user, .count = count};
    pthread_t threads[THREADS_MAX];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int n = 0, want = (int)(cores < 1 ? 1 : cores > THREADS_MAX ? THREADS_MAX : cores);
    if (want > count) want = count;
    while (n < want - 1 && pthread_create(&threads[n], NULL, crowd_work, &w) == 0) n++;
    crowd_work(&w);
    while (n) pthread_join(threads[--n], NULL);
}

/* ---------------------------------------------------------------- reading */

/* Whole rows of one place, to be read to `to`. */
typedef struct {
    const place *from;
    int first, rows; /* rows of the place */
    char *to;
} piece;

typedef struct {
    const piece *piece;
    size_t at, bytes;
} piece_read;

typedef struct {
    const nmk_checkpoint *c;
    piece_read *reads;
    int count, capacity;
    pthread_mutex_t lock;
    int failed;
    nmk_err err; /* of the first that failed */
} reading;

static size_t row_bytes(const place *p) { return (size_t)p->cols * 2; }

static void read_piece(void *user, int index) {
    reading *r = user;
    const piece_read *d = &r->reads[index];
    const place *p = d->piece->from;
    const shard *s = &r->c->shards[p->shard];
    nmk_err err;
    uint64_t at = p->file_at + (uint64_t)d->piece->first * row_bytes(p) + d->at;
    if (read_at(s->fd, s->path, d->piece->to + d->at, d->bytes, at, &err) == 0) return;
    pthread_mutex_lock(&r->lock);
    if (!r->failed) r->failed = 1, r->err = err;
    pthread_mutex_unlock(&r->lock);
}

static int read_pieces(const nmk_checkpoint *c, const piece *pieces, size_t count, nmk_err *e) {
    reading r = {.c = c, .lock = PTHREAD_MUTEX_INITIALIZER};
    for (size_t i = 0; i < count; i++) {
        size_t bytes = (size_t)pieces[i].rows * row_bytes(pieces[i].from);
        for (size_t at = 0; at < bytes; at += READ_BYTES) {
            if (r.count == r.capacity) {
                r.capacity = r.capacity ? 2 * r.capacity : 64;
                r.reads = xrealloc(r.reads, (size_t)r.capacity * sizeof *r.reads);
            }
            r.reads[r.count++] = (piece_read){&pieces[i], at, bytes - at < READ_BYTES ? bytes - at : READ_BYTES};
        }
    }
    in_parallel(read_piece, &r, r.count);
    free(r.reads);
    return r.failed ? nmk_fail(e, "%s", r.err.text) : 0;
}

/* Walks the places in file order, a batch at a time. */
typedef struct {
    const nmk_checkpoint *c;
    size_t place;
    int row; /* of that place */
    piece *pieces;
    size_t count, capacity, bytes; /* of the batch */
} walk;

/* The next pieces that fit BATCH_BYTES, one after the other at BATCH_ALIGN; cut between row tiles.  Their `to` counts
 * from `buffer`.  0 at the end. */
static int next_batch(walk *w, char *buffer) {
    w->count = 0, w->bytes = 0;
    while (w->place < w->c->place_count) {
        const place *p = &w->c->places[w->place];
        int rows = p->rows - w->row, unit = is_vector(p->array) ? p->rows : nmk_packed_unit(p->array->layout);
        assert(row_bytes(p) * (size_t)unit <= BATCH_BYTES);
        assert(is_vector(p->array) || p->cols % 8 == 0); /* 16-byte loads of nmk_pack */
        size_t room = (BATCH_BYTES - w->bytes) / row_bytes(p);
        if ((size_t)rows > room) rows = (int)room / unit * unit;
        if (rows == 0) break;
        if (w->count == w->capacity) {
            w->capacity = w->capacity ? 2 * w->capacity : 64;
            w->pieces = xrealloc(w->pieces, w->capacity * sizeof *w->pieces);
        }
        w->pieces[w->count++] = (piece){p, w->row, rows, buffer + w->bytes};
        w->bytes += ((size_t)rows * row_bytes(p) + BATCH_ALIGN - 1) / BATCH_ALIGN * BATCH_ALIGN;
        w->row += rows;
        if (w->row == p->rows) w->place++, w->row = 0;
        if (w->bytes >= BATCH_BYTES) break;
    }
    return w->count > 0;
}

static uint64_t batch_payload(const walk *w) {
    uint64_t n = 0;
    for (size_t i = 0; i < w->count; i++) n += (uint64_t)w->pieces[i].rows * row_bytes(w->pieces[i].from);
    return n;
}

/* Bytes of the arena's matrix, or of a vector, before a piece. */
static uint64_t host_offset(const place *p, int row) {
    return is_vector(p->array) ? (uint64_t)p->first * 2 : (uint64_t)(p->first + row) * row_bytes(p);
}

int nmk_checkpoint_load_host(const nmk_checkpoint *c, void *arena, nmk_progress *progress, void *user, nmk_err *e) {
    int rc = -1;
    uint64_t done = 0;
    walk w = {.c = c};
    if (progress) progress(user, 0, c->bytes);
    while (next_batch(&w, arena)) {
        for (size_t i = 0; i < w.count; i++) {
            piece *p = &w.pieces[i];
            p->to = (char *)arena + p->from->arena_at + host_offset(p->from, p->first);
            if (p->first + p->rows == p->from->rows)
                memset(p->to + (size_t)p->rows * row_bytes(p->from), 0,
                       (size_t)p->from->pad * (is_vector(p->from->array) ? 2 : row_bytes(p->from)));
        }
        if (read_pieces(c, w.pieces, w.count, e)) goto out;
        done += batch_payload(&w);
        if (progress) progress(user, done, c->bytes);
    }
    rc = 0;
out:
    free(w.pieces);
    return rc;
}

/* ---------------------------------------------------------------- the device */

static unsigned blocks_for(uint64_t threads) {
    uint64_t blocks = (threads + BLOCK - 1) / BLOCK;
    return (unsigned)(blocks < 1 ? 1 : blocks > 1u << 20 ? 1u << 20 : blocks);
}

static int launch_pack(CUfunction pack, CUstream stream, CUdeviceptr arena, const piece *p, CUdeviceptr src,
                       nmk_err *e) {
    int rc = -1;
    const nmk_array *a = p->from->array;
    CUdeviceptr dst = arena + p->from->arena_at;
    int rows = a->rows, cols = a->cols, first = p->from->first + p->first, layout = a->layout;
    int count = is_vector(a) ? p->from->cols : p->rows, tile_rows = layout == NMK_LAYOUT_GATE_UP ? 8 : 16;
    void *args[] = {&dst, &src, &rows, &cols, &first, &count, &layout};
    uint64_t threads = is_vector(a) ? (uint64_t)count
                                    : (uint64_t)((count + tile_rows - 1) / tile_rows) * (unsigned)nmk_packed_cols(cols);
    CU(e, cuLaunchKernel(pack, blocks_for(threads), 1, 1, BLOCK, 1, 1, 0, stream, args, NULL));
    rc = 0;
out:
    return rc;
}

int nmk_checkpoint_load_device(const nmk_checkpoint *c, CUmodule module, CUdeviceptr arena, nmk_progress *progress,
                               void *user, nmk_err *e) {
    int rc = -1;
    uint64_t done = 0;
    walk w = {.c = c};
    CUfunction pack;
    CUstream stream = NULL;
    CUevent copied[SLOTS] = {NULL};
    void *host[SLOTS] = {NULL};
    CUdeviceptr staging[SLOTS] = {0};

    CU(e, cuModuleGetFunction(&pack, module, "nmk_pack"));
    CU(e, cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < SLOTS; i++) {
        CU(e, cuEventCreate(&copied[i], CU_EVENT_DISABLE_TIMING));
        CU(e, cuMemHostAlloc(&host[i], BATCH_BYTES, 0));
        CU(e, cuMemAlloc(&staging[i], BATCH_BYTES));
    }
    if (progress) progress(user, 0, c->bytes);
    for (int slot = 0; next_batch(&w, host[slot]); slot = (slot + 1) % SLOTS) {
        /* An event that was never recorded counts as done. */
        CU(e, cuEventSynchronize(copied[slot]));
        if (read_pieces(c, w.pieces, w.count, e)) goto out;
        CU(e, cuMemcpyHtoDAsync(staging[slot], host[slot], w.bytes, stream));
        CU(e, cuEventRecord(copied[slot], stream));
        for (size_t i = 0; i < w.count; i++) {
            CUdeviceptr src = staging[slot] + (CUdeviceptr)(w.pieces[i].to - (char *)host[slot]);
            if (launch_pack(pack, stream, arena, &w.pieces[i], src, e)) goto out;
        }
        done += batch_payload(&w);
        if (progress) progress(user, done, c->bytes);
    }
    CU(e, cuStreamSynchronize(stream));
    rc = 0;
out:
    if (stream) nmk_cuda.cuStreamSynchronize(stream); /* nothing may still use the buffers */
    for (int i = 0; i < SLOTS; i++) {
        if (staging[i]) nmk_cuda.cuMemFree(staging[i]);
        if (host[i]) nmk_cuda.cuMemFreeHost(host[i]);
        if (copied[i]) nmk_cuda.cuEventDestroy(copied[i]);
    }
    if (stream) nmk_cuda.cuStreamDestroy(stream);
    free(w.pieces);
    return rc;
}

/* ---------------------------------------------------------------- random weights */

static unsigned random_key(const char *name, uint64_t seed) {
    unsigned h = 0x811c9dc5u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x01000193u;
    return nmk_mix(nmk_mix(h ^ (unsigned)seed) + (unsigned)(seed >> 32));
}

/* Uniform values from the 2^24 steps of nmk_random_bf16 around 0 have the variance (2^23 * step)^2 / 3. */
static float random_step(double deviation) { return (float)(deviation * sqrt(3.0) / 8388608.0); }

nmk_random_spec nmk_random_spec_of(const nmk_array *a, uint64_t seed) {
    nmk_random_spec r = {.key = random_key(a->name, seed)};
    if (is_vector(a) && strstr(a->name, "bias")) {
        r.step = random_step(0.5);
    } else if (is_vector(a)) {
        r.step = (float)(0.1 / 8388608.0);
        r.offset = 83886080; /* 1 / step */
    } else {
        /* Branches that add to the residual are smaller, so that no layer drowns those before it. */
        int residual = strcmp(a->name, "o") == 0 || strstr(a->name, "down");
        r.step = random_step((residual ? 0.5 : 1.0) / sqrt(a->cols));
    }
    return r;
}

static int elements_per_layer(const nmk_array *a) { return a->experts ? a->experts : 1; }

typedef struct {
    const nmk_array *array;
    nmk_random_spec spec;
    char *arena;
} random_host;

enum { RANDOM_ROWS = 1024 }; /* rows of one job */

static int random_slices(const nmk_array *a) { return (a->rows + RANDOM_ROWS - 1) / RANDOM_ROWS; }

static void random_job(void *user, int index) {
    const random_host *r = user;
    const nmk_array *a = r->array;
    int slice = index % random_slices(a), n = index / random_slices(a), per_layer = elements_per_layer(a);
    int layer = a->layer0 + n / per_layer, expert = n % per_layer;
    unsigned short *to = (unsigned short *)(void *)(r->arena + nmk_array_at(a, layer, expert));
    for (int row = slice * RANDOM_ROWS; row < a->rows && row < (slice + 1) * RANDOM_ROWS; row++) {
        unsigned key = nmk_random_row(r->spec.key, (unsigned)(layer * per_layer + expert), (unsigned)row);
        for (int k = 0; k < a->cols; k++)
            to[(size_t)row * (size_t)a->cols + (size_t)k] =
                nmk_random_bf16(key, (unsigned)k, r->spec.offset, r->spec.step);
    }
}

void nmk_random_load_host(const nmk_weight_tables *tables, void *arena, uint64_t seed) {
    for (int i = 0; i < tables->array_count; i++) {
        const nmk_array *a = &tables->arrays[i];
        random_host r = {a, nmk_random_spec_of(a, seed), arena};
        in_parallel(random_job, &r, a->layers * elements_per_layer(a) * random_slices(a));
    }
}

int nmk_random_load_device(const nmk_weight_tables *tables, CUmodule module, CUdeviceptr arena, uint64_t seed,
                           nmk_err *e) {
    int rc = -1;
    CUfunction fill;
    CUstream stream = NULL;
    CU(e, cuModuleGetFunction(&fill, module, "nmk_random_fill"));
    CU(e, cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < tables->array_count; i++) {
        const nmk_array *a = &tables->arrays[i];
        nmk_random_spec r = nmk_random_spec_of(a, seed);
        int elements = elements_per_layer(a), rows = a->rows, cols = a->cols, layout = a->layout;
        uint64_t bytes = (uint64_t)nmk_packed_bytes(rows, cols, layout) * (uint64_t)elements;
        for (int layer = a->layer0; layer < a->layer0 + a->layers; layer++) {
            CUdeviceptr dst = arena + nmk_array_at(a, layer, 0);
            int element0 = layer * elements;
            void *args[] = {&dst, &elements, &element0, &rows, &cols, &layout, &r.key, &r.offset, &r.step};
            uint64_t threads = layout == NMK_LAYOUT_VECTOR ? bytes / 2 : bytes / 32;
            CU(e, cuLaunchKernel(fill, blocks_for(threads), 1, 1, BLOCK, 1, 1, 0, stream, args, NULL));
        }
    }
    CU(e, cuStreamSynchronize(stream));
    rc = 0;
out:
    if (stream) nmk_cuda.cuStreamDestroy(stream);
    return rc;
}

int nmk_random_fill_kv(CUmodule module, CUdeviceptr pool, uint64_t bytes, uint64_t seed, nmk_err *e) {
    int rc = -1;
    CUfunction fill;
    CUstream stream = NULL;
    long long n = (long long)(bytes / 2);
    unsigned key = random_key("kv", seed);
    float step = random_step(0.5);
    void *args[] = {&pool, &n, &key, &step};
    CU(e, cuModuleGetFunction(&fill, module, "nmk_fill_kv"));
    CU(e, cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CU(e, cuLaunchKernel(fill, blocks_for(bytes / 16), 1, 1, BLOCK, 1, 1, 0, stream, args, NULL));
    CU(e, cuStreamSynchronize(stream));
    rc = 0;
out:
    if (stream) nmk_cuda.cuStreamDestroy(stream);
    return rc;
}
