/* What loading costs of the host's memory: an engine is opened on a GPU made up of host memory, with a checkpoint of the
 * model's full size whose file is a hole.  Built for North Mini Code too (load_memory.sh).
 *
 *   load_memory write DIR    leaves that checkpoint in DIR (tests/gpu/rss.sh loads it on a real GPU) */
#include "nmk.h"

#include <fcntl.h>
#include <json-c/json_tokener.h>
#include <json-c/json_util.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "check.h"
#include "fake_gpu.h"
#include "generation.h"
#include "json.h"

enum { PINNED_BYTES = 3 * (64 << 20), MIB = 1 << 20 };

/* ---- a checkpoint without contents ---- */

static uint64_t data_at = UINT64_MAX, bytes_read;

/* Weights are read from here: pages of the buffer become resident, as they do when a disk fills them, and the 57 GiB of
 * zeros are not copied. */
ssize_t pread(int fd, void *to, size_t bytes, off_t at) {
    if ((uint64_t)at < data_at) return syscall(SYS_pread64, fd, to, bytes, at);
    for (size_t i = 0; i < bytes; i += 4096) ((char *)to)[i] = 0;
    __atomic_fetch_add(&bytes_read, bytes, __ATOMIC_RELAXED);
    return (ssize_t)bytes;
}

static void put(struct json_object *object, const char *path, const char *value) {
    const char *dot = strchr(path, '.');
    if (!dot) {
        json_object_object_add(object, path, json_tokener_parse(value));
        return;
    }
    char *key = xasprintf("%.*s", (int)(dot - path), path);
    struct json_object *inner = nmk_json_get(object, key);
    if (!inner) json_object_object_add(object, key, inner = json_object_new_object());
    put(inner, dot + 1, value);
    free(key);
}

static void write_config(const char *dir) {
    struct json_object *config = json_object_new_object();
    for (int i = 0; i < nmk_config_count; i++)
        if (nmk_configs[i].required) put(config, nmk_configs[i].path, nmk_configs[i].value);
    char *path = xasprintf("%s/config.json", dir);
    json_object_to_file(path, config);
    json_object_put(config), free(path);
}

static uint64_t add_tensor(nmk_buf *header, const nmk_tensor *t, int layer, int expert, uint64_t at) {
    uint64_t end = at + (uint64_t)(t->dims == 1 ? 1 : t->rows) * (uint64_t)t->cols * 2;
    nmk_buf_printf(header, "%s\"", header->length > 1 ? "," : "");
    for (const char *p = t->name; *p; p++) {
        if (p[0] == '%' && p[1] == 'd')
            nmk_buf_printf(header, "%d", layer), layer = expert, p++;
        else
            nmk_buf_add(header, p, 1);
    }
    nmk_buf_puts(header, "\":{\"dtype\":\"BF16\",\"shape\":[");
    if (t->dims == 2) nmk_buf_printf(header, "%d,", t->rows);
    nmk_buf_printf(header, "%d],\"data_offsets\":[%llu,%llu]}", t->cols, (unsigned long long)at,
                   (unsigned long long)end);
    return end;
}

/* The size of the tensors, or 0. */
static uint64_t write_weights(const char *dir) {
    nmk_buf header = {0};
    uint64_t bytes = 0;
    nmk_buf_puts(&header, "{");
    for (int i = 0; i < nmk_tensor_count; i++) {
        if (nmk_tensors[i].twin) continue;
        const nmk_tensor *t = &nmk_tensors[i];
        for (int layer = t->layer0; layer < t->layer0 + t->layers; layer++)
            for (int expert = 0; expert < (t->experts ? t->experts : 1); expert++)
                bytes = add_tensor(&header, t, layer, expert, bytes);
    }
    nmk_buf_puts(&header, "}");
    uint64_t length = header.length;
    char *path = xasprintf("%s/model.safetensors", dir);
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0666);
    bool good = fd >= 0 && write(fd, &length, sizeof length) == sizeof length &&
                write(fd, header.data, header.length) == (ssize_t)header.length &&
                ftruncate(fd, (off_t)(sizeof length + length + bytes)) == 0;
    if (fd >= 0) close(fd);
    free(path), nmk_buf_free(&header);
    data_at = sizeof length + length;
    return good ? bytes : 0;
}

/* ---- loading ---- */

static int phases[4];
static uint64_t last_done, last_total;
static uint64_t most_open;

static void on_progress(void *user, nmk_phase phase, uint64_t done, uint64_t total) {
    (void)user;
    phases[phase]++;
    if (phase != NMK_PHASE_WEIGHTS) return;
    last_done = done, last_total = total;
    nmk_resident_bytes(&most_open);
}

static void test_load(const char *dir, uint64_t bytes) {
    nmk_err e = {0};
    nmk_engine *g = NULL;
    nmk_stats stats = {0};
    nmk_options o = {.checkpoint = dir, .device = "cuda:0", .progress = on_progress};
    fake.total_bytes = 150ull << 30, fake.free_bytes = 149ull << 30;
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "opens " NMK_MODEL, "%s", e.text)) return;
    nmk_engine_stats(g, &stats);
    uint64_t most, now = nmk_resident_bytes(&most);
    check(bytes_read == bytes && last_done == bytes && last_total == bytes, "all of it is read, once",
          "%llu bytes of %llu, told %llu", (unsigned long long)bytes_read, (unsigned long long)bytes,
          (unsigned long long)last_done);
    /* the step's kernel, and the one that takes prompts */
    const int told = nmk_prefill ? 4 : 2;
    check(phases[NMK_PHASE_COMPILE] == told && phases[NMK_PHASE_LOAD] == told && phases[NMK_PHASE_WEIGHTS] > 1,
          "every phase is told", "%d, %d, %d", phases[NMK_PHASE_COMPILE], phases[NMK_PHASE_LOAD],
          phases[NMK_PHASE_WEIGHTS]);
    printf("# %.1f GiB of weights: %llu MiB at most, %llu MiB after\n", (double)stats.weight_bytes / 0x1p30,
           (unsigned long long)(most / MIB), (unsigned long long)(now / MIB));
#ifdef __SANITIZE_THREAD__
    printf("skip - host memory: most of it is TSan's own\n");
#else
    check(most_open > (bytes < PINNED_BYTES ? bytes : PINNED_BYTES) && most < PINNED_BYTES + (uint64_t)300 * MIB,
          "host memory while loading: the pinned buffers and less than 300 MiB", "%llu MiB at most",
          (unsigned long long)(most / MIB));
    check(now < (uint64_t)200 * MIB, "host memory after loading: less than 200 MiB", "%llu MiB",
          (unsigned long long)(now / MIB));
#endif
    nmk_engine_close(g);
}

int main(int argc, char **argv) {
    nmk_err e = {0};
    char dir[] = "build/tests/load_memory.XXXXXX";
    if (argc == 3 && !strcmp(argv[1], "write")) {
        mkdir(argv[2], 0777);
        write_config(argv[2]);
        return write_weights(argv[2]) ? 0 : 1;
    }
    if (!mkdtemp(dir) || fake_install(&e)) return check(false, "a fake GPU", "%s", e.text), 1;
    write_config(dir);
    uint64_t bytes = write_weights(dir);
    check(bytes > 0, "a checkpoint that is a hole", "no space for it in %s", dir);
    if (bytes) test_load(dir, bytes);
    static const char *const files[] = {"config.json", "model.safetensors"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *path = xasprintf("%s/%s", dir, files[i]);
        unlink(path), free(path);
    }
    rmdir(dir);
    return failures != 0;
}
