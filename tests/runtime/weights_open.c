/* Opening a checkpoint: what is refused, in which words.  A model of nine tensors in two files is written with one thing
 * wrong at a time. */
#include <sys/stat.h>

#include "weights_helper.h"
#include "weights_tables.h"

enum { ARENA_KIB = 27 };

/* ---------------------------------------------------------------- a checkpoint as data */

typedef struct {
    const char *name, *dtype, *shape, *listed; /* listed: the index's file, NULL the right one, "" none */
    int file, bytes, shift;                    /* shift: of the offsets */
    int like;                                  /* 1 + the tensor with the same data; 0: its own */
} entry;

typedef struct {
    entry e[16];
    int count, single;
    const char *header[2];   /* instead of the right one */
    const char *index_extra; /* text in weight_map */
    const char *index;       /* instead of all of it */
    long long header_length; /* instead of file 1's, if not 0 */
    int keep, tail;          /* bytes of file 1 (0: all), bytes after it */
    int absent;              /* file 1 is not written */
} spec;

static const char *const files[2] = {"a.safetensors", "b.safetensors"};

static spec good(void) {
    return (spec){.count = 8,
                  .e = {{"embed.weight", "BF16", "[16,8]", NULL, 0, 256, 0, 0},
                        {"layers.0.norm.weight", "BF16", "[8]", NULL, 0, 16, 0, 0},
                        {"layers.1.norm.weight", "BF16", "[8]", NULL, 1, 16, 0, 0},
                        {"layers.1.experts.0.gate.weight", "BF16", "[8,8]", NULL, 1, 128, 0, 0},
                        {"layers.1.experts.0.up.weight", "BF16", "[8,8]", NULL, 1, 128, 0, 0},
                        {"layers.1.experts.1.gate.weight", "BF16", "[8,8]", NULL, 1, 128, 0, 0},
                        {"layers.1.experts.1.up.weight", "BF16", "[8,8]", NULL, 1, 128, 0, 0},
                        {"norm.weight", "BF16", "[8]", NULL, 1, 16, 0, 0}}};
}

/* Byte i of a tensor's data. */
static unsigned char data_byte(int tensor, int i) { return (unsigned char)(tensor * 37 + i * 5 + i / 256); }

static void write_shard(const spec *s, int file) {
    nmk_buf head = {0}, body = {0}, all = {0};
    nmk_buf_puts(&head, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = 0; i < s->count; i++) {
        const entry *e = &s->e[i];
        if (!s->single && e->file != file) continue;
        long long begin = (long long)body.length + e->shift, end = begin + e->bytes;
        nmk_buf_printf(&head, ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%lld,%lld]}", e->name, e->dtype,
                       e->shape, begin, end);
        for (int b = 0; b < e->bytes; b++)
            nmk_buf_add(&body, &(unsigned char){data_byte(e->like ? e->like - 1 : i, b)}, 1);
    }
    nmk_buf_puts(&head, "}");
    if (s->header[file]) head.length = 0, nmk_buf_puts(&head, s->header[file]);
    long long n = file == 1 && s->header_length ? s->header_length : (long long)head.length;
    for (int i = 0; i < 8; i++) nmk_buf_add(&all, &(unsigned char){(unsigned char)(n >> 8 * i)}, 1);
    nmk_buf_add(&all, head.data, head.length);
    nmk_buf_add(&all, body.data, body.length);
    if (file == 1 && s->tail) nmk_buf_add(&all, files, (size_t)s->tail);
    if (file == 1 && s->keep) all.length = (size_t)s->keep;
    write_file(s->single ? "model.safetensors" : files[file], all.data, all.length);
    nmk_buf_free(&head), nmk_buf_free(&body), nmk_buf_free(&all);
}

static void write_checkpoint(const spec *s) {
    clear_dir();
    write_shard(s, 0);
    if (s->single) return;
    if (!s->absent) write_shard(s, 1);
    nmk_buf index = {0};
    nmk_buf_printf(&index, "{\"metadata\":{\"total_size\":816},\n\"weight_map\":{%s",
                   s->index_extra ? s->index_extra : "");
    const char *comma = s->index_extra ? "," : "";
    for (int i = 0; i < s->count; i++) {
        const char *file = s->e[i].listed ? s->e[i].listed : files[s->e[i].file];
        if (*file) nmk_buf_printf(&index, "%s\"%s\":\"%s\"", comma, s->e[i].name, file), comma = ",";
    }
    nmk_buf_puts(&index, "}}");
    if (s->index) index.length = 0, nmk_buf_puts(&index, s->index);
    write_file("model.safetensors.index.json", index.data, index.length);
    nmk_buf_free(&index);
}

static void refuse(const char *name, const spec *s, const char *expected) {
    nmk_err e = {""};
    nmk_checkpoint *c = NULL;
    write_checkpoint(s);
    int rc = nmk_checkpoint_open(&c, test_dir, &tables, &e);
    check_refused(name, rc, &e, expected);
    nmk_checkpoint_close(c);
}

/* ---------------------------------------------------------------- what must work */

static void accept(const char *name, const spec *s) {
    nmk_err e = {""};
    nmk_checkpoint *c = NULL;
    unsigned char *arena = xcalloc(ARENA_KIB, 1024), *expected = xcalloc(ARENA_KIB, 1024);
    static const int at[8] = {0, 8 * 1024, 9 * 1024, 11 * 1024, 11 * 1024 + 128, 19 * 1024, 19 * 1024 + 128, 10 * 1024};
    write_checkpoint(s);
    int rc = nmk_checkpoint_open(&c, test_dir, &tables, &e);
    if (rc == 0) rc = nmk_checkpoint_load_host(c, arena, NULL, NULL, &e);
    for (int i = 0; i < 8; i++)
        for (int b = 0; b < s->e[i].bytes; b++) expected[at[i] + b] = data_byte(i, b);
    check(rc == 0 && memcmp(arena, expected, ARENA_KIB * 1024) == 0, name, "%s", rc ? e.text : "the arena differs");
    nmk_checkpoint_close(c);
    free(arena), free(expected);
}

/* Bytes changed at random, files cut at random: any answer will do, but there must be one. */
static void garble(void) {
    unsigned x = 12345;
    char *data[3];
    size_t bytes[3];
    static const char *const names[3] = {"a.safetensors", "b.safetensors", "model.safetensors.index.json"};
    spec s = good();
    write_checkpoint(&s);
    for (int i = 0; i < 3; i++) {
        char *path = xasprintf("%s/%s", test_dir, names[i]);
        if (nmk_file_read(&data[i], &bytes[i], path, 1 << 20, NULL)) exit(2);
        free(path);
    }
    int refused = 0, rounds = 3000;
    void *arena = xcalloc(ARENA_KIB, 1024);
    for (int round = 0; round < rounds; round++) {
        int i = round % 3;
        char *copy = xmalloc(bytes[i]);
        memcpy(copy, data[i], bytes[i]);
        size_t keep = bytes[i];
        for (int n = round % 4; n >= 0; n--) {
            x = x * 1664525u + 1013904223u;
            size_t at = (x >> 8) % (i == 2 ? bytes[i] : bytes[i] - 200);
            if ((x & 7) == 0)
                keep = at;
            else
                copy[at] = (x & 1) ? (char)(x >> 16) : "0123456789-{}[],:\"e"[(x >> 9) % 19];
        }
        write_file(names[i], copy, keep);
        nmk_checkpoint *c = NULL;
        nmk_err e = {""};
        if (nmk_checkpoint_open(&c, test_dir, &tables, &e) || nmk_checkpoint_load_host(c, arena, NULL, NULL, &e))
            refused += e.text[0] != 0;
        else
            refused++;
        nmk_checkpoint_close(c);
        free(copy);
        write_file(names[i], data[i], bytes[i]);
    }
    check(refused == rounds, "3000 garbled checkpoints are refused or read, each refusal with a message", "%d of %d",
          refused, rounds);
    for (int i = 0; i < 3; i++) free(data[i]);
    free(arena);
}

int main(void) {
    spec s;
    nmk_err e = {""};
    nmk_checkpoint *c = NULL;
    make_dir();

    s = good();
    accept("two shards", &s);
    s.single = 1;
    accept("one file", &s);
    s = good();
    s.e[s.count++] = (entry){"layers.0.rotary_emb.inv_freq", "F32", "[4]", NULL, 0, 16, 0, 0};
    accept("a rotary buffer is ignored", &s);
    s = good();
    s.e[s.count++] = (entry){"head.weight", "BF16", "[16,8]", NULL, 1, 256, 0, 1};
    accept("a twin that is the same", &s);
    s.e[8].like = 0;
    refuse("a twin that differs", &s,
           "DIR/b.safetensors: tensor head.weight differs from embed.weight, which this model has in its place");
    s.e[8].like = 1, s.e[8].shape = "[8,16]";
    refuse("a twin of another shape", &s,
           "DIR/b.safetensors: tensor head.weight: expected shape [16, 8], found [8, 16]");

    clear_dir();
    check_refused("empty directory", nmk_checkpoint_open(&c, test_dir, &tables, &e), &e,
                  "DIR: neither model.safetensors nor model.safetensors.index.json is there");
    s = good(), s.absent = 1;
    refuse("missing shard", &s, "DIR/b.safetensors: No such file or directory");
    clear_dir();
    char *pipe = xasprintf("%s/model.safetensors", test_dir);
    if (mkfifo(pipe, 0600)) return perror(pipe), 2;
    free(pipe);
    check_refused("a pipe that nobody writes", nmk_checkpoint_open(&c, test_dir, &tables, &e), &e,
                  "DIR/model.safetensors: not a regular file");
    s = good(), s.keep = 5;
    refuse("file of a few bytes", &s, "DIR/b.safetensors: truncated: 5 bytes are too few for a safetensors header");
    s = good(), s.keep = 100;
    refuse("cut in the header", &s,
           "DIR/b.safetensors: the header claims 525 bytes, the file has 100: truncated, or not a safetensors file");
    s = good(), s.keep = 1000;
    refuse("cut in the data", &s, "DIR/b.safetensors: truncated: its tensors need 1077 bytes, the file has 1000");
    s = good(), s.header_length = 1LL << 62;
    refuse(
        "huge header length", &s,
        "DIR/b.safetensors: the header claims 4611686018427387904 bytes, the file has 1077: truncated, or not a safetensors file");
    s = good(), s.header_length = -1;
    refuse(
        "negative header length", &s,
        "DIR/b.safetensors: the header claims 18446744073709551615 bytes, the file has 1077: truncated, or not a safetensors file");
    s = good(), s.header_length = 300;
    refuse("short header length", &s, "DIR/b.safetensors: header: line 1, column 282: a string that does not end");
    s = good(), s.header[1] = "{\"a\":1,}";
    refuse("header with a trailing comma", &s,
           "DIR/b.safetensors: header: line 1, column 8: expected a key in double quotes");
    s = good(), s.header[1] = "[]";
    refuse("header that is a list", &s, "DIR/b.safetensors: header: not a JSON object");
    s = good(), s.e[7].name = "layers.1.norm.weight", s.e[7].listed = "";
    refuse("a tensor twice in a file", &s,
           "DIR/b.safetensors: header: line 1, column 458: the key \"layers.1.norm.weight\" is there twice");
    s = good(), s.header[1] = "{\"x\":{\"dtype\":\"BF16\",\"shape\":[8]}}";
    refuse("an entry without offsets", &s,
           "DIR/b.safetensors: tensor x: expected exactly dtype, shape and data_offsets");
    s = good(), s.e[7].shape = "[-8]";
    refuse("negative size", &s, "DIR/b.safetensors: tensor norm.weight: the shape holds something that is not a size");
    s = good(), s.e[7].shape = "[8,1,1,1,1,1,1,1,1]";
    refuse("nine dimensions", &s, "DIR/b.safetensors: tensor norm.weight: 9 dimensions, at most 8 are accepted");
    s = good(), s.e[7].shape = "[4294967296,4294967296,8]";
    refuse("sizes that overflow", &s,
           "DIR/b.safetensors: tensor norm.weight: BF16 [4294967296, 4294967296, 8] takes up 16 bytes");
    s = good(), s.e[7].shape = "[9]";
    refuse("size and offsets disagree", &s, "DIR/b.safetensors: tensor norm.weight: BF16 [9] takes up 16 bytes");
    s = good(), s.e[4].shift = -100;
    refuse("overlapping tensors", &s,
           "DIR/b.safetensors: tensor layers.1.experts.0.up.weight overlaps tensor layers.1.experts.0.gate.weight\n"
           "DIR/b.safetensors: the 100 bytes before tensor layers.1.experts.1.gate.weight belong to no tensor");
    s = good(), s.e[7].shift = 1000;
    refuse("offsets past the end", &s,
           "DIR/b.safetensors: the 1000 bytes before tensor norm.weight belong to no tensor\n"
           "DIR/b.safetensors: truncated: its tensors need 2079 bytes, the file has 1079");
    s = good(), s.tail = 12;
    refuse("bytes after the data", &s, "DIR/b.safetensors: 12 bytes after the last tensor belong to no tensor");

    s = good(), s.e[0].shape = "[8,16]";
    refuse("wrong shape", &s, "DIR/a.safetensors: tensor embed.weight: expected shape [16, 8], found [8, 16]");
    s = good(), s.e[1].shape = "[1,8]";
    refuse("a matrix for a vector", &s,
           "DIR/a.safetensors: tensor layers.0.norm.weight: expected shape [8], found [1, 8]");
    s = good(), s.e[0].dtype = "F16";
    refuse("wrong dtype", &s, "DIR/a.safetensors: tensor embed.weight: expected dtype BF16, found F16");
    s = good(), s.e[0].dtype = "F8_E8M0";
    refuse("unknown dtype", &s, "DIR/a.safetensors: tensor embed.weight: expected dtype BF16, found F8_E8M0");
    s = good(), s.e[s.count++] = (entry){"lm_head.weight", "BF16", "[16,8]", NULL, 0, 256, 0, 0};
    refuse("extra tensor", &s, "DIR/a.safetensors: tensor lm_head.weight does not belong to this model");
    s = good(), s.count = 7;
    refuse("missing tensor", &s, "DIR/model.safetensors.index.json: tensor norm.weight [8] is missing");
    s = good(), s.count = 7, s.single = 1;
    refuse("missing tensor in one file", &s, "DIR/model.safetensors: tensor norm.weight [8] is missing");
    s = good(), s.e[0].shape = "[8,16]", s.e[1].dtype = "F16", s.count = 7;
    refuse("several mistakes at once", &s,
           "DIR/a.safetensors: tensor embed.weight: expected shape [16, 8], found [8, 16]\n"
           "DIR/model.safetensors.index.json: tensor norm.weight [8] is missing\n"
           "DIR/a.safetensors: tensor layers.0.norm.weight: expected dtype BF16, found F16");
    s = (spec){.count = 1, .single = 1, .e = {{"x", "BF16", "[8]", NULL, 0, 16, 0, 0}}};
    refuse("another model's checkpoint", &s,
           "DIR/model.safetensors: tensor embed.weight [16, 8] is missing\n"
           "DIR/model.safetensors: tensor norm.weight [8] is missing\n"
           "DIR/model.safetensors: tensor layers.0.norm.weight [8] is missing\n"
           "DIR/model.safetensors: tensor layers.1.norm.weight [8] is missing\n"
           "DIR/model.safetensors: tensor layers.1.experts.0.gate.weight [8, 8] is missing\n"
           "DIR/model.safetensors: tensor layers.1.experts.1.gate.weight [8, 8] is missing\n"
           "DIR/model.safetensors: tensor layers.1.experts.0.up.weight [8, 8] is missing\n"
           "DIR/model.safetensors: tensor layers.1.experts.1.up.weight [8, 8] is missing\n"
           "DIR/model.safetensors: tensor x does not belong to this model");

    s = good(), s.e[7].listed = "a.safetensors";
    refuse(
        "index names the wrong shard", &s,
        "DIR/model.safetensors.index.json: tensor norm.weight is listed in DIR/a.safetensors, but it is in DIR/b.safetensors");
    s = good(), s.index_extra = "\"ghost\":\"a.safetensors\"";
    refuse("index lists what no shard has", &s,
           "DIR/model.safetensors.index.json: tensor ghost is listed in DIR/a.safetensors, which lacks it");
    s = good(), s.e[7].listed = "";
    refuse("index does not list a tensor", &s,
           "DIR/b.safetensors: tensor norm.weight is not listed in DIR/model.safetensors.index.json");
    s = good(), s.e[s.count] = s.e[0], s.e[s.count].file = 1, s.e[s.count++].listed = "";
    refuse("a tensor in two shards", &s, "DIR/b.safetensors: tensor embed.weight is also in DIR/a.safetensors");
    s = good(), s.e[7].listed = "../b.safetensors";
    refuse(
        "index leaves the directory", &s,
        "DIR/model.safetensors.index.json: tensor norm.weight: expected the name of a .safetensors file, found \"../b.safetensors\"");
    s = good(), s.index = "{\"weight_map\":";
    refuse("index cut short", &s,
           "DIR/model.safetensors.index.json: line 1, column 15: the text ends where a value was expected");
    s = good(), s.index = "{}";
    refuse("index without a map", &s, "DIR/model.safetensors.index.json: weight_map is missing or empty");

    garble();
    clear_dir();
    rmdir(test_dir);
    return failures != 0;
}
