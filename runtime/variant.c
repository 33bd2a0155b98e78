#include "variant.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "generation.h"
#include "nmk.h"
#include "util.h"

enum { VERSION = 3, MOST_BYTES = 256 << 20, NAME_BYTES = 64, MOST = 1 << 20 };

uint64_t nmk_kernel_hash(const char *text) {
    static const char mark[] = "#define NMK_HASH ";
    const char *at = strstr(text, mark);
    return at ? strtoull(at + sizeof mark - 1, NULL, 0) : 0;
}

/* ---- the file `lists` ---- */

typedef struct {
    const char *path, *at, *end; /* at: the next line */
    int line;                    /* its number */
    nmk_err *e;
} reader;

/* The rest of the next line behind `key` and a blank; NULL, with a message, where that is not what stands there. */
static char *next(reader *r, const char *key, char *value, size_t size) {
    const char *stop = r->at < r->end ? memchr(r->at, '\n', (size_t)(r->end - r->at)) : NULL;
    const size_t n = strlen(key), length = stop ? (size_t)(stop - r->at) : 0;
    if (!stop || length < n || memcmp(r->at, key, n) || (length > n && r->at[n] != ' ') || length - n > size) {
        nmk_fail(r->e, "%s:%d: expected \"%s ...\", got \"%.*s\"", r->path, r->line, key,
                 (int)(length < NAME_BYTES ? length : NAME_BYTES), r->at);
        return NULL;
    }
    const size_t rest = length > n ? length - n - 1 : 0;
    memcpy(value, stop - rest, rest), value[rest] = 0;
    r->at = stop + 1, r->line++;
    return value;
}

/* `count` numbers from `least` on. */
static int numbers(reader *r, const char *key, int count, int64_t least, int64_t most, int64_t *to) {
    char text[256], *end = text;
    if (!next(r, key, text, sizeof text)) return -1;
    for (int i = 0; i < count; i++) {
        const char *from = end;
        to[i] = strtoll(from, &end, 10);
        if (end == from || to[i] < least || to[i] > most || (*end && *end != ' ') || (!*end && i + 1 < count) ||
            (*end && i + 1 == count))
            return nmk_fail(r->e, "%s:%d: %s: expected %d number%s from %" PRId64 " to %" PRId64 ", got \"%s\"",
                            r->path, r->line - 1, key, count, count == 1 ? "" : "s", least, most, text);
    }
    return 0;
}

static int number(reader *r, const char *key, int64_t least, int64_t most, int *to) {
    int64_t v;
    if (numbers(r, key, 1, least, most, &v)) return -1;
    *to = (int)v;
    return 0;
}

static int hash(reader *r, const char *key, uint64_t *to) {
    char text[64], *end;
    if (!next(r, key, text, sizeof text)) return -1;
    *to = strtoull(text, &end, 16);
    if (end == text || *end)
        return nmk_fail(r->e, "%s:%d: %s: expected a hash, got \"%s\"", r->path, r->line - 1, key, text);
    return 0;
}

static int same_word(reader *r, const char *key, const char *want) {
    char text[256];
    if (!next(r, key, text, sizeof text)) return -1;
    if (strcmp(text, want))
        return nmk_fail(r->e, "%s:%d: is for %s %s, this program for %s", r->path, r->line - 1, key, text, want);
    return 0;
}

static uint64_t fnv(const void *data, size_t bytes) {
    uint64_t h = 0xcbf29ce484222325u;
    for (const uint8_t *p = data; bytes--; p++) h = (h ^ *p) * 0x100000001b3u;
    return h;
}

static int read_buffers(reader *r, nmk_variant *v) {
    if (number(r, "buffers", 0, MOST, &v->buffer_count)) return -1;
    nmk_buffer *list = xcalloc((size_t)v->buffer_count + 1, sizeof *list);
    v->buffers = list;
    for (int i = 0; i < v->buffer_count; i++) {
        char text[256], name[NAME_BYTES];
        nmk_buffer *b = &list[i];
        if (!next(r, "buffer", text, sizeof text)) return -1;
        if (sscanf(text, "%63s %" SCNd32 " %" SCNd32 " %" SCNd64, name, &b->offset128, &b->extent, &b->bytes) != 4 ||
            b->offset128 < 0 || b->bytes < 0 || (uint64_t)b->bytes > v->arena_bytes ||
            (uint64_t)b->offset128 * 128 > v->arena_bytes - (uint64_t)b->bytes)
            return nmk_fail(r->e, "%s:%d: buffer: expected a name and a place inside the arena, got \"%s\"", r->path,
                            r->line - 1, text);
        b->name = xstrdup(name);
    }
    return 0;
}

static int read_nodes(reader *r, nmk_variant *v) {
    if (number(r, "nodes", 0, MOST, &v->node_count)) return -1;
    nmk_node *list = xcalloc((size_t)v->node_count + 1, sizeof *list);
    v->nodes = list;
    for (int i = 0; i < v->node_count; i++) {
        char text[256], name[NAME_BYTES];
        if (!next(r, "node", text, sizeof text)) return -1;
        if (sscanf(text, "%63s %" SCNd32 " %" SCNd32, name, &list[i].opcode, &list[i].layer) != 3)
            return nmk_fail(r->e, "%s:%d: node: expected a name, an opcode and a layer, got \"%s\"", r->path,
                            r->line - 1, text);
        list[i].name = xstrdup(name);
    }
    return 0;
}

static int read_counters(reader *r, nmk_variant *v) {
    const char **names = xcalloc((size_t)v->counters + 1, sizeof *names);
    v->counter_names = names;
    for (int i = 0; i < v->counters; i++) {
        char text[256];
        if (!next(r, "counter", text, sizeof text)) return -1;
        names[i] = xstrdup(text);
    }
    return 0;
}

static int read_words(reader *r, nmk_variant *v, uint64_t want) {
    const int32_t *from = NULL;
    int32_t *copy = NULL, counts[NMK_SMS];
    const size_t bytes = (size_t)(r->end - r->at);
    int rc = -1;
    uint64_t h = 0xcbf29ce484222325u;
    size_t tasks = 0;
    if (bytes >= sizeof counts) memcpy(counts, r->at, sizeof counts);
    for (int sm = 0; bytes >= sizeof counts && sm < NMK_SMS; sm++) {
        if (counts[sm] < 0 || counts[sm] >= v->max_tasks) {
            nmk_fail(r->e, "%s: SM %d has %d tasks, expected fewer than %d", r->path, sm, counts[sm], v->max_tasks);
            goto out;
        }
        tasks += (size_t)counts[sm];
    }
    if (bytes != sizeof counts + tasks * NMK_DESC_WORDS * sizeof(int32_t)) {
        nmk_fail(r->e, "%s: %zu bytes of words, expected %zu: is the file whole?", r->path, bytes,
                 sizeof counts + tasks * NMK_DESC_WORDS * sizeof(int32_t));
        goto out;
    }
    copy = xmalloc(bytes); /* the file's bytes need not be aligned */
    memcpy(copy, r->at, bytes);
    v->lists = xcalloc((size_t)NMK_SMS * (size_t)v->max_tasks * NMK_DESC_WORDS, sizeof *v->lists);
    from = copy + NMK_SMS;
    for (int sm = 0; sm < NMK_SMS; sm++) {
        const size_t n = (size_t)counts[sm] * NMK_DESC_WORDS;
        h = (h ^ (uint32_t)counts[sm]) * 0x100000001b3u;
        for (size_t i = 0; i < n; i++) h = (h ^ (uint32_t)from[i]) * 0x100000001b3u;
        memcpy(v->lists + (size_t)sm * (size_t)v->max_tasks * NMK_DESC_WORDS, from, n * sizeof *from);
        from += n;
    }
    if (h != want)
        nmk_fail(r->e, "%s: the words are not those that nmkgen proved: %016" PRIx64 ", expected %016" PRIx64, r->path,
                 h, want);
    else
        rc = 0;
out:
    free(copy);
    return rc;
}

static const nmk_generation *generation_of(uint64_t abi) {
    for (int i = 0; i < nmk_generation_count; i++)
        if (*nmk_generations[i]->abi_hash == abi) return nmk_generations[i];
    return NULL;
}

static int read_lists(reader *r, nmk_variant *v, const nmk_generation **generation, uint64_t *kernel) {
    char text[64];
    uint64_t abi, words, head, begin;
    int64_t arena, exchange_at, exchange, split[4], in_flight[NMK_ROWS];
    const char *start = r->at;
    if (!next(r, "nmk-lists", text, sizeof text)) return -1;
    if (strtol(text, NULL, 10) != VERSION)
        return nmk_fail(r->e, "%s: version %s, this program reads %d", r->path, text, VERSION);
    if (same_word(r, "model", nmk_model_name)) return -1;
    if (!next(r, "target", text, sizeof text) || hash(r, "abi", &abi)) return -1;
    if (!(*generation = generation_of(abi)))
        return nmk_fail(r->e,
                        "%s:%d: %s of another shape, target, version or number of columns than this program's: build "
                        "again",
                        r->path, r->line - 1, nmk_model_name);
    const int columns = (*generation)->columns;
    if (hash(r, "hash", &v->hash) || hash(r, "kernel", kernel) || hash(r, "words_hash", &words) ||
        number(r, "max_tasks", 1, NMK_HANG_TASK_MASK + 1, &v->max_tasks) ||
        number(r, "counters", 0, MOST, &v->counters) || number(r, "ring_stages", 1, 64, &v->ring_stages) ||
        numbers(r, "arena_bytes", 1, 1, INT64_MAX, &arena) || numbers(r, "exchange_at", 1, 0, arena, &exchange_at) ||
        numbers(r, "exchange_bytes", 1, 0, (arena - exchange_at) / 2, &exchange) ||
        number(r, "part_slots", 0, MOST, &v->part_slots) || numbers(r, "split", 4, 1, MOST, split) ||
        number(r, "own_pages", 0, MOST, &v->own_pages) ||
        numbers(r, "in_flight", columns, 1, v->ring_stages, in_flight))
        return -1;
    v->arena_bytes = (uint64_t)arena;
    v->exchange_at = (uint64_t)exchange_at, v->exchange_bytes = (uint64_t)exchange;
    v->chunks_min = (int)split[0], v->chunks_max = (int)split[1];
    v->pages_per_chunk = (int)split[2], v->pages_per_long_chunk = (int)split[3];
    int *stages = xcalloc((size_t)columns, sizeof *stages);
    for (int i = 0; i < columns; i++) stages[i] = (int)in_flight[i];
    v->in_flight = stages;
    if (read_buffers(r, v) || read_nodes(r, v) || read_counters(r, v)) return -1;
    begin = fnv(start, (size_t)(r->at - start));
    if (hash(r, "head", &head)) return -1;
    if (head != begin) return nmk_fail(r->e, "%s: lines were changed after nmkgen wrote them", r->path);
    if (!next(r, "words", text, sizeof text)) return -1;
    return read_words(r, v, words);
}

int nmk_variant_open(nmk_variant **variant, const nmk_generation **generation, const char *folder, nmk_err *e) {
    int rc = -1;
    char *lists_path = xasprintf("%s/lists", folder), *kernel_path = xasprintf("%s/megakernel.cu", folder),
         *data = NULL;
    size_t bytes = 0;
    uint64_t kernel;
    nmk_variant *v = xcalloc(1, sizeof *v);
    if (nmk_file_read(&data, &bytes, lists_path, MOST_BYTES, e)) goto out;
    reader r = {.path = lists_path, .at = data, .end = data + bytes, .line = 1, .e = e};
    if (read_lists(&r, v, generation, &kernel)) goto out;
    if (nmk_file_read(&v->kernel, &bytes, kernel_path, MOST_BYTES, e)) goto out;
    if (fnv(v->kernel, bytes) != kernel || nmk_kernel_hash(v->kernel) != v->hash) {
        nmk_fail(e, "%s: is not the kernel that nmkgen wrote together with %s", kernel_path, lists_path);
        goto out;
    }
    *variant = v, v = NULL, rc = 0;
out:
    free(data), free(lists_path), free(kernel_path);
    nmk_variant_free(v);
    return rc;
}

void nmk_variant_free(nmk_variant *v) {
    if (!v) return;
    for (int i = 0; v->buffers && i < v->buffer_count; i++) free((void *)(uintptr_t)v->buffers[i].name);
    for (int i = 0; v->counter_names && i < v->counters; i++) free((void *)(uintptr_t)v->counter_names[i]);
    for (int i = 0; v->nodes && i < v->node_count; i++) free((void *)(uintptr_t)v->nodes[i].name);
    free((void *)(uintptr_t)v->nodes), free((void *)(uintptr_t)v->buffers), free((void *)(uintptr_t)v->counter_names);
    free((void *)(uintptr_t)v->in_flight), free(v->kernel), free(v->lists);
    free(v);
}

int32_t *nmk_variant_lists(const nmk_variant *v, const nmk_generation *generation, nmk_err *e) {
    const size_t words = (size_t)NMK_SMS * (size_t)v->max_tasks * NMK_DESC_WORDS;
    int32_t *lists = xcalloc(words, sizeof *lists), counts[NMK_SMS];
    if (v->lists)
        memcpy(lists, v->lists, words * sizeof *lists);
    else if (generation->encode(lists, counts)) {
        nmk_fail(e, "the task lists are not those that nmkgen proved: build again");
        free(lists);
        return NULL;
    }
    return lists;
}
