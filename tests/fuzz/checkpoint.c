/* What lies in a checkpoint's folder, and in a variant's.  checkpoint: safetensors and their index, loaded if they are
 * taken.  config: config.json and generation_config.json.  variant: the file `lists` and its kernel. */
#define _GNU_SOURCE /* memmem */
#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "generation.h"
#include "json.h"
#include "runtime/weights_tables.h"
#include "utf8.h"
#include "variant.h"

/* ---------------------------------------------------------------- safetensors */

enum { ARENA_BYTES = 27 * 1024 };

/* An input is several parts (fuzz_write_parts).  Of a file whose part begins with '{', the header alone is given: its
 * length and as many bytes of data as the header's largest end says come from here, so that mutations get past both. */
static const char *const names[] = {"model.safetensors", "model.safetensors.index.json", "a.safetensors",
                                    "b.safetensors"};

static size_t largest_end(const char *header, size_t bytes) {
    size_t most = 0;
    const char *at = header;
    while ((at = memmem(at, (size_t)(header + bytes - at), "data_offsets", 12))) {
        unsigned long begin, end;
        at += 12;
        if (sscanf(at, "\" : [ %lu , %lu", &begin, &end) == 2 && end > most && end <= 1 << 16) most = end;
    }
    return most;
}

static void complete(const char *name) {
    nmk_err e;
    char *path = xasprintf("%s/%s", fuzz_folder(), name), *text;
    size_t bytes;
    if (!nmk_file_read(&text, &bytes, path, 1 << 20, &e)) {
        if (bytes && text[0] == '{') {
            nmk_buf b = {0};
            const uint64_t length = bytes;
            size_t data = largest_end(text, bytes);
            nmk_buf_add(&b, &length, 8), nmk_buf_add(&b, text, bytes);
            for (size_t i = 0; i < data; i++) nmk_buf_add(&b, &"\x3f\x80"[i & 1], 1);
            fuzz_write(name, b.data, b.length);
            nmk_buf_free(&b);
        }
        free(text);
    }
    free(path);
}

static void load(const char *data, size_t bytes) {
    nmk_err e = {""};
    nmk_checkpoint *c = NULL;
    fuzz_write_parts(data, bytes, names, 4);
    complete(names[0]), complete(names[2]), complete(names[3]);
    if (nmk_checkpoint_open(&c, fuzz_folder(), &tables, &e)) {
        if (!strstr(e.text, fuzz_folder())) fuzz_wrong("the message names no file: %s", e.text);
        if (!nmk_utf8_valid(e.text, strlen(e.text))) fuzz_wrong("a message that is not UTF-8");
        fuzz_feature(strstr(e.text, ".safetensors") ? strstr(e.text, ".safetensors") : e.text);
        return;
    }
    char *arena = xcalloc(1, ARENA_BYTES);
    if (nmk_checkpoint_load_host(c, arena, NULL, NULL, &e)) fuzz_wrong("taken, and not loaded: %s", e.text);
    fuzz_feature("loaded");
    free(arena);
    nmk_checkpoint_close(c);
}

static void put_tensor(nmk_buf *b, const char *name, const char *shape, size_t elements, size_t *at) {
    nmk_buf_printf(b, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                   b->data[b->length - 1] == '{' ? "" : ",", name, shape, *at, *at + 2 * elements);
    *at += 2 * elements;
}

static void put_first(nmk_buf *b, size_t *at) {
    nmk_buf_puts(b, "{\"__metadata__\":{\"format\":\"pt\"}");
    put_tensor(b, "embed.weight", "[16,8]", 128, at);
    put_tensor(b, "norm.weight", "[8]", 8, at);
}

static void put_second(nmk_buf *b, size_t *at) {
    put_tensor(b, "layers.0.norm.weight", "[8]", 8, at);
    put_tensor(b, "layers.1.norm.weight", "[8]", 8, at);
    for (int i = 0; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof name, "layers.1.experts.%d.%s.weight", i / 2, i % 2 ? "up" : "gate");
        put_tensor(b, name, "[8,8]", 64, at);
    }
}

static void seeds(void) {
    nmk_buf b = {0}, raw = {0};
    size_t at = 0;
    put_first(&b, &at), put_second(&b, &at);
    put_tensor(&b, "head.weight", "[16,8]", 128, &at);
    nmk_buf_puts(&b, "}");
    fuzz_seed(b.data, b.length);
    const uint64_t length = b.length;
    nmk_buf_add(&raw, &length, 8), nmk_buf_add(&raw, b.data, b.length);
    for (size_t i = 0; i < at; i++) nmk_buf_add(&raw, "\x3f", 1);
    fuzz_seed(raw.data, raw.length);

    b.length = at = 0;
    nmk_buf_puts(&b, "%%%% a.safetensors\n");
    put_first(&b, &at);
    nmk_buf_puts(&b, "}\n%%%% b.safetensors\n{");
    at = 0;
    put_second(&b, &at);
    nmk_buf_puts(
        &b,
        "}\n%%%% model.safetensors.index.json\n{\"metadata\":{\"total_size\":832},\"weight_map\":{\"embed.weight\":\"a.safetensors\","
        "\"norm.weight\":\"a.safetensors\"");
    static const char *const second[] = {"0.norm",         "1.norm",           "1.experts.0.gate",
                                         "1.experts.0.up", "1.experts.1.gate", "1.experts.1.up"};
    for (int i = 0; i < 6; i++) nmk_buf_printf(&b, ",\"layers.%s.weight\":\"b.safetensors\"", second[i]);
    nmk_buf_puts(&b, "}}");
    fuzz_seed(b.data, b.length);
    nmk_buf_free(&b), nmk_buf_free(&raw);
    fuzz_words_of("runtime/weights.c");
    for (const char *const *w =
             (const char *const[]){"BF16", "F16", "F32", "F8_E4M3", "[]", "[16,8]", "[0,0]", "data_offsets", "\"../a\"",
                                   "a.safetensors", "layers.2.norm.weight", "layers.00.norm.weight", "-", NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_checkpoint = {"checkpoint", seeds, NULL, load, 8 << 10, 0};

/* ---------------------------------------------------------------- config.json */

static const char *const configs[] = {"config.json", "generation_config.json"};

static void read_configs(const char *data, size_t bytes) {
    nmk_err e = {""};
    nmk_generation_config g;
    fuzz_write_parts(data, bytes, configs, 2);
    if (nmk_config_check(fuzz_folder(), nmk_configs, nmk_config_count, &e)) {
        if (!strstr(e.text, "config.json")) fuzz_wrong("the message names no file: %s", e.text);
        if (!nmk_utf8_valid(e.text, strlen(e.text))) fuzz_wrong("a message that is not UTF-8");
        fuzz_feature(strstr(e.text, "config.json"));
    }
    e.text[0] = 0;
    if (nmk_generation_config_read(fuzz_folder(), &g, &e)) {
        if (!strstr(e.text, "config.json")) fuzz_wrong("the message names no file: %s", e.text);
        fuzz_feature(strstr(e.text, "config.json"));
        return;
    }
    if (g.eos_count < 0 || g.eos_count > NMK_STOP_IDS || g.bos < -1 || !(g.temperature >= 0) ||
        !(g.top_p >= 0 && g.top_p <= 1) || g.top_k < 0)
        fuzz_wrong("taken, and out of range");
    for (int i = 0; i < g.eos_count; i++)
        if (g.eos[i] < 0) fuzz_wrong("eos %d", g.eos[i]);
}

static void config_seeds(void) {
    static const char *const folders[] = {"examples/nmc-toy", "tests/models/tiny-llama"};
    for (int i = 0; i < 2; i++) {
        nmk_buf b = {0};
        for (int k = 0; k < 2; k++) {
            char *path = xasprintf("%s/%s", folders[i], configs[k]), *text;
            nmk_err e;
            size_t bytes;
            if (nmk_file_read(&text, &bytes, path, 1 << 20, &e)) fuzz_wrong("%s", e.text);
            nmk_buf_printf(&b, "%%%%%%%% %s\n%s", configs[k], text);
            free(text), free(path);
        }
        fuzz_seed(b.data, b.length);
        nmk_buf_free(&b);
    }
    fuzz_words_of("runtime/config.c");
    for (const char *const *w =
             (const char *const[]){"null", "true", "[]", "{}", "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "-1",
                                   "1e300", "\"1\"", "4294967296", "0.5", NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_config = {"config", config_seeds, NULL, read_configs, 8 << 10, 0};

/* ---------------------------------------------------------------- variants */

static uint64_t fnv(const char *data, size_t bytes, uint64_t h) {
    while (bytes--) h = (h ^ (unsigned char)*data++) * 0x100000001b3u;
    return h;
}

/* The lists with hashes that are right, so that mutations get past them. */
static void read_variant(const char *data, size_t bytes) {
    static const char kernel[] = "#define NMK_HASH 0x1234\n";
    const uint64_t basis = 0xcbf29ce484222325u;
    nmk_err e = {""};
    nmk_variant *v = NULL;
    const nmk_generation *g = NULL;
    nmk_buf b = {0};
    nmk_buf_puts(&b, "");
    for (const char *at = data, *end = data + bytes; at < end;) {
        const char *line = memchr(at, '\n', (size_t)(end - at)), *past = line ? line + 1 : end;
        if (!strncmp(at, "abi *\n", 6))
            nmk_buf_printf(&b, "abi %016llx\n", (unsigned long long)*nmk_generations[0]->abi_hash);
        else if (!strncmp(at, "kernel *\n", 9))
            nmk_buf_printf(&b, "kernel %016llx\n", (unsigned long long)fnv(kernel, sizeof kernel - 1, basis));
        else if (!strncmp(at, "head *\n", 7))
            nmk_buf_printf(&b, "head %016llx\n", (unsigned long long)fnv(b.data, b.length, basis));
        else if (!strncmp(at, "words *\n", 8)) { /* no task at all, whose hash is that of as many zeros */
            nmk_buf_puts(&b, "words\n");
            for (int i = 0; i < NMK_SMS * 4; i++) nmk_buf_add(&b, "", 1);
        } else if (!strncmp(at, "words_hash *\n", 13)) {
            uint64_t h = basis;
            for (int i = 0; i < NMK_SMS; i++) h *= 0x100000001b3u;
            nmk_buf_printf(&b, "words_hash %016llx\n", (unsigned long long)h);
        } else {
            nmk_buf_add(&b, at, (size_t)(past - at));
        }
        at = past;
    }
    fuzz_write("lists", b.data, b.length), fuzz_write("megakernel.cu", kernel, sizeof kernel - 1);
    nmk_buf_free(&b);
    if (nmk_variant_open(&v, &g, fuzz_folder(), &e)) {
        if (!strstr(e.text, fuzz_folder())) fuzz_wrong("the message names no file: %s", e.text);
        fuzz_feature(e.text + strcspn(e.text, ":"));
        return;
    }
    fuzz_feature("opened");
    int32_t *lists = nmk_variant_lists(v, g, &e);
    free(lists);
    nmk_variant_free(v);
}

static void variant_seeds(void) {
    nmk_buf b = {0};
    nmk_buf_printf(
        &b,
        "nmk-lists 3\nmodel %s\ntarget h200\nabi *\nhash 1234\nkernel *\nwords_hash *\nmax_tasks 4\ncounters 2\nring_stages 4\n"
        "arena_bytes 65536\nexchange_at 4096\nexchange_bytes 1024\npart_slots 3\nsplit 1 2 3 4\nown_pages 0\nin_flight",
        nmk_model_name);
    for (int i = 0; i < nmk_generations[0]->columns; i++) nmk_buf_puts(&b, " 2");
    nmk_buf_puts(&b,
                 "\nbuffers 1\nbuffer x 0 8 1024\nnodes 1\nnode embed 0 -1\ncounter a\ncounter b\nhead *\nwords *\n");
    fuzz_seed(b.data, b.length);
    nmk_buf_free(&b);
    fuzz_words_of("runtime/variant.c");
}

const fuzz_target fuzz_variant = {"variant", variant_seeds, NULL, read_variant, 4 << 10, 0};
