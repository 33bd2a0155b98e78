/* The toy checkpoint by the emitted tables: every file's bytes are in the CPU machine's arena, where the tables say. */
#include "weights.h"

#include "json.h"
#include "weights_helper.h"

#define DIR_TOY "examples/nmc-toy"

/* Rows of tensor `name` as the file itself tells, without weights.c. */
static const char *raw_tensor(const char *name, size_t *bytes) {
    static char *text[2];
    static uint64_t header[2];
    static struct json_object *root[2];
    nmk_err e;
    for (int i = 0; i < 2; i++) {
        char path[128];
        snprintf(path, sizeof path, DIR_TOY "/model-0000%d-of-00002.safetensors", i + 1);
        if (!text[i]) {
            size_t length;
            if (nmk_file_read(&text[i], &length, path, 1 << 30, &e)) return NULL;
            memcpy(&header[i], text[i], 8);
            char *json = strndup(text[i] + 8, header[i]);
            root[i] = nmk_json_parse(json, header[i], &e);
            free(json);
        }
        struct json_object *t = nmk_json_get(root[i], name);
        if (!t) continue;
        struct json_object *at = nmk_json_get(t, "data_offsets");
        int64_t begin = json_object_get_int64(json_object_array_get_idx(at, 0));
        *bytes = (size_t)(json_object_get_int64(json_object_array_get_idx(at, 1)) - begin);
        return text[i] + 8 + header[i] + begin;
    }
    return NULL;
}

static const nmk_array *array(const char *name) {
    for (int i = 0; i < nmk_array_count; i++)
        if (strcmp(nmk_arrays[i].name, name) == 0) return &nmk_arrays[i];
    fprintf(stderr, "no array %s\n", name);
    exit(2);
}

static void expect(const char *arena, const char *tensor, const char *name, int layer, int expert, int row0) {
    size_t bytes = 0;
    const nmk_array *a = array(name);
    const char *raw = raw_tensor(tensor, &bytes);
    const char *at = arena + nmk_array_at(a, layer, expert) + (size_t)row0 * (size_t)a->cols * 2;
    check(raw && memcmp(raw, at, bytes) == 0, tensor, "not at its place in %s", name);
}

static uint64_t last_done, calls;
static void progress(void *user, uint64_t done, uint64_t total) {
    calls++, last_done = done == total ? done : *(uint64_t *)user;
}

int main(void) {
    nmk_err e = {""};
    nmk_checkpoint *c = NULL;
    nmk_weight_tables tables = nmk_model_tables();
    if (nmk_checkpoint_open(&c, DIR_TOY, &tables, &e)) {
        check(0, "open the toy", "%s", e.text);
        return 1;
    }
    check(nmk_checkpoint_bytes(c) == 18254848, "bytes of the toy", "%llu", (unsigned long long)nmk_checkpoint_bytes(c));
    char *arena = xcalloc(NMK_WEIGHTS_KIB, 1024);
    uint64_t none = 0, before = nmk_now_ns();
    int rc = nmk_checkpoint_load_host(c, arena, progress, &none, &e);
    check(rc == 0, "load the toy", "%s", e.text);
    printf("# %.1f ms\n", (double)(nmk_now_ns() - before) / 1e6);
    check(calls > 0 && last_done == nmk_checkpoint_bytes(c), "progress ends at all bytes", "%llu",
          (unsigned long long)last_done);
    int kv = (array("qkv")->rows - 1024) / 2;
    expect(arena, "model.embed_tokens.weight", "embed", 0, 0, 0);
    expect(arena, "model.norm.weight", "norm", 5, 0, 0);
    expect(arena, "model.layers.0.input_layernorm.weight", "norm", 0, 0, 0);
    expect(arena, "model.layers.4.input_layernorm.weight", "norm", 4, 0, 0);
    expect(arena, "model.layers.3.self_attn.q_proj.weight", "qkv", 3, 0, 0);
    expect(arena, "model.layers.3.self_attn.k_proj.weight", "qkv", 3, 0, 1024);
    expect(arena, "model.layers.3.self_attn.v_proj.weight", "qkv", 3, 0, 1024 + kv);
    expect(arena, "model.layers.4.self_attn.o_proj.weight", "o", 4, 0, 0);
    expect(arena, "model.layers.0.mlp.gate_proj.weight", "dense_up", 0, 0, 0);
    expect(arena, "model.layers.0.mlp.up_proj.weight", "dense_up", 0, 0, array("dense_up")->rows / 2);
    expect(arena, "model.layers.0.mlp.down_proj.weight", "dense_down", 0, 0, 0);
    expect(arena, "model.layers.2.mlp.gate.weight", "router", 2, 0, 0);
    expect(arena, "model.layers.4.mlp.experts.15.gate_proj.weight", "up", 4, 15, 0);
    expect(arena, "model.layers.1.mlp.experts.7.up_proj.weight", "up", 1, 7, array("up")->rows / 2);
    expect(arena, "model.layers.1.mlp.experts.7.down_proj.weight", "down", 1, 7, 0);

    memset(arena, 0, (size_t)NMK_WEIGHTS_KIB * 1024);
    before = nmk_now_ns();
    nmk_random_load_host(&tables, arena, 1);
    printf("# random weights %.1f ms\n", (double)(nmk_now_ns() - before) / 1e6);
    check(arena[nmk_array_at(array("norm"), 5, 0) + 1] == 0x3f, "random weights reach the last vector",
          "no number near 1");
    nmk_checkpoint_close(c);
    free(arena);
    return failures != 0;
}
