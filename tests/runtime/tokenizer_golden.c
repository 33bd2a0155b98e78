/* The tokenizer against the tokenizers library: the toy's golden texts, and variants of its tokenizer.json. */
#include "runtime/tokenizer_helper.h"

#define GOLDEN   "tests/golden/nmc-toy.json"
#define VARIANTS "tests/runtime/data/tokenizer_variants.json"

static const char *text_of(json_object *o, const char *key, size_t *bytes) {
    json_object *value = get(o, key);
    *bytes = (size_t)json_object_get_string_len(value);
    return json_object_get_string(value);
}

/* Whether a text gives the ids in o[key]. */
static bool gives(const nmk_tokenizer *t, const char *text, size_t bytes, unsigned flags, json_object *o,
                  const char *key) {
    nmk_ids ids = encode(t, text, bytes, flags | NMK_PARSE_SPECIAL);
    bool same = same_ids(&ids, get(o, key));
    nmk_ids_free(&ids);
    return same;
}

static void golden_texts(const nmk_tokenizer *t, json_object *cases) {
    for (size_t i = 0; i < json_object_array_length(cases); i++) {
        json_object *one = json_object_array_get_idx(cases, i);
        char name[48];
        size_t bytes;
        const char *text = text_of(one, "text", &bytes);
        nmk_ids ids = encode(t, text, bytes, NMK_PARSE_SPECIAL);
        snprintf(name, sizeof name, "golden text %zu", i);
        if (!same_ids(&ids, get(one, "ids")))
            check(false, name, "other ids for \"%s\"", text);
        else if (!gives(t, text, bytes, NMK_ADD_BOS, one, "ids_with_bos"))
            check(false, name, "other ids with BOS");
        else if (!decodes_to(t, &ids, text, bytes))
            check(false, name, "does not decode to itself");
        else
            check(streams_to(t, &ids, text, bytes), name, "token by token it does not decode to itself");
        nmk_ids_free(&ids);
    }
}

/* Chats and answers of the golden runs. */
static void golden_prompts(const nmk_tokenizer *t, json_object *prompts) {
    for (size_t i = 0; i < json_object_array_length(prompts); i++) {
        json_object *one = json_object_array_get_idx(prompts, i), *answer = get(one, "greedy64");
        char name[64];
        size_t bytes;
        const char *text = text_of(one, "text", &bytes);
        snprintf(name, sizeof name, "golden prompt %s", json_object_get_string(get(one, "name")));
        check(gives(t, text, bytes, 0, one, "ids"), name, "other ids");
        nmk_ids ids = {0};
        for (size_t k = 0; k < json_object_array_length(answer); k++)
            nmk_ids_add(&ids, json_object_get_int(json_object_array_get_idx(answer, k)));
        text = text_of(one, "greedy64_text", &bytes);
        snprintf(name, sizeof name, "golden answer %s", json_object_get_string(get(one, "name")));
        check(decodes_to(t, &ids, text, bytes) && streams_to(t, &ids, text, bytes), name, "other text");
        nmk_ids_free(&ids);
    }
}

static void golden_chats(const nmk_tokenizer *t, json_object *chats) {
    bool good = true;
    for (size_t i = 0; i < json_object_array_length(chats); i++) {
        size_t bytes;
        const char *text = text_of(json_object_array_get_idx(chats, i), "text", &bytes);
        nmk_ids ids = encode(t, text, bytes, NMK_PARSE_SPECIAL);
        if (!decodes_to(t, &ids, text, bytes) || ids.id[0] != 1) good = false;
        nmk_ids_free(&ids);
    }
    check(good, "rendered chats decode to themselves", "one does not");
}

/* A variant: the toy's file with some members replaced. */
static void variant(const char *toy, json_object *v) {
    const char *name = json_object_get_string(get(v, "name"));
    json_object *root = json_tokener_parse(toy), *cases = get(v, "cases");
    nmk_tokenizer *t = NULL;
    nmk_err e;
    json_object_object_foreach(get(v, "change"), key, value) {
        if (strcmp(key, "model")) {
            json_object_object_add(root, key, json_object_get(value));
            continue;
        }
        json_object_object_foreach(value, inner, setting) {
            json_object_object_add(get(root, "model"), inner, json_object_get(setting));
        }
    }
    if (load_tree(root, &t, &e)) {
        check(false, name, "%s", e.text);
        json_object_put(root);
        return;
    }
    size_t wrong = 0;
    const char *example = "";
    for (size_t i = 0; i < json_object_array_length(cases); i++) {
        json_object *one = json_object_array_get_idx(cases, i);
        size_t bytes;
        const char *text = text_of(one, "text", &bytes);
        if (gives(t, text, bytes, 0, one, "ids") && gives(t, text, bytes, NMK_ADD_BOS, one, "ids_with_bos")) continue;
        if (!wrong++) example = text;
    }
    check(!wrong, name, "%zu of %zu texts have other ids, such as \"%s\"", wrong, json_object_array_length(cases),
          example);
    nmk_tokenizer_free(t);
    json_object_put(root);
}

/* Merges written as "a b" mean the same as ["a", "b"]. */
static void string_merges(const nmk_tokenizer *t, const char *toy) {
    json_object *root = json_tokener_parse(toy), *merges = get(get(root, "model"), "merges");
    for (size_t i = 0; i < json_object_array_length(merges); i++) {
        json_object *pair = json_object_array_get_idx(merges, i);
        char both[128];
        snprintf(both, sizeof both, "%s %s", json_object_get_string(json_object_array_get_idx(pair, 0)),
                 json_object_get_string(json_object_array_get_idx(pair, 1)));
        json_object_array_put_idx(merges, i, json_object_new_string(both));
    }
    static const char text[] = "def count_words(path):\n    return 1234567 + len(path)\n";
    nmk_tokenizer *other = NULL;
    nmk_err e;
    if (load_tree(root, &other, &e))
        check(false, "merges as strings", "%s", e.text);
    else {
        nmk_ids a = encode(t, text, sizeof text - 1, 0), b = encode(other, text, sizeof text - 1, 0);
        check(a.count == b.count && !memcmp(a.id, b.id, a.count * sizeof *a.id), "merges as strings", "other ids");
        nmk_ids_free(&a);
        nmk_ids_free(&b);
    }
    nmk_tokenizer_free(other);
    json_object_put(root);
}

int main(int argc, char **argv) {
    json_object *golden = read_json(GOLDEN), *file = read_json(argc > 1 ? argv[1] : VARIANTS);
    json_object *toy = read_json(TOY "/tokenizer.json"), *variants = get(file, "variants");
    char *toy_text = xstrdup(json_object_to_json_string(toy));
    nmk_tokenizer *t = load(TOY);
    golden_texts(t, get(golden, "tokenizer"));
    golden_prompts(t, get(golden, "prompts"));
    golden_chats(t, get(golden, "chat_template"));
    string_merges(t, toy_text);
    for (size_t i = 0; i < json_object_array_length(variants); i++)
        variant(toy_text, json_object_array_get_idx(variants, i));
    nmk_tokenizer_free(t);
    free(toy_text);
    json_object_put(toy);
    json_object_put(file);
    json_object_put(golden);
    return failures != 0;
}
