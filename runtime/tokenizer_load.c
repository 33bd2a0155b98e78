/* Reads tokenizer.json.  Whatever in it could change ids and is not done here is refused by name. */
#include "json.h"
#include "tokenizer_impl.h"

#include <json-c/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_FILE_BYTES = 256 << 20, MAX_ID = 1 << 22, MAX_ADDED = 1 << 16, MAX_ADDED_BYTES = 4096 };

/* Text of the file in a message: cut, and without control characters. */
typedef struct {
    char text[56];
} shown;

static shown show(const char *s) {
    shown r;
    size_t n = 0;
    for (; s[n] && n < sizeof r.text - 4; n++) r.text[n] = (unsigned char)s[n] < ' ' || s[n] == 127 ? '?' : s[n];
    while (s[n] && n && ((unsigned char)s[n] & 0xc0) == 0x80) n--; /* not inside a character */
    strcpy(r.text + n, s[n] ? "..." : "");
    return r;
}

static const char *type_name(const json_object *o) { return o ? json_type_to_name(json_object_get_type(o)) : "null"; }

/* A member of the wanted type.  NULL with a message when it is missing or of another type. */
static json_object *member(json_object *o, const char *where, const char *key, json_type type, nmk_err *e) {
    json_object *value = NULL;
    if (!json_object_object_get_ex(o, key, &value))
        nmk_fail(e, "%s.%s is missing (expected %s)", where, key, json_type_to_name(type));
    else if (!json_object_is_type(value, type))
        nmk_fail(e, "%s.%s is %s (expected %s)", where, key, type_name(value), json_type_to_name(type));
    else
        return value;
    return NULL;
}

/* A string without NUL, or NULL. */
static const char *text_of(json_object *o, const char *where, const char *key, nmk_err *e) {
    json_object *value = member(o, where, key, json_type_string, e);
    if (!value) return NULL;
    const char *text = json_object_get_string(value);
    if (strlen(text) == (size_t)json_object_get_string_len(value)) return text;
    nmk_fail(e, "%s.%s holds a NUL character", where, key);
    return NULL;
}

static int flag_of(json_object *o, const char *where, const char *key, bool *flag, nmk_err *e) {
    json_object *value = member(o, where, key, json_type_boolean, e);
    if (!value) return -1;
    *flag = json_object_get_boolean(value);
    return 0;
}

/* The same for one that may be missing; *flag is then as before. */
static int flag_if_there(json_object *o, const char *where, const char *key, bool *flag, nmk_err *e) {
    return json_object_object_get_ex(o, key, NULL) ? flag_of(o, where, key, flag, e) : 0;
}

static int id_in(json_object *value, const char *where, int32_t *id, nmk_err *e) {
    if (!json_object_is_type(value, json_type_int))
        return nmk_fail(e, "%s is %s (expected an id)", where, type_name(value));
    int64_t n = json_object_get_int64(value);
    if (n < 0 || n >= MAX_ID)
        return nmk_fail(e, "%s is the id %lld (expected 0 to %d)", where, (long long)n, MAX_ID - 1);
    *id = (int32_t)n;
    return 0;
}

/* ------------------------------------------------------------------------------------------- the byte alphabet */

/* tokenizer.json writes each byte of a token as a printable character: bytes that print stand for themselves, the
 * others are numbered from U+0100 on. */
static bool prints(int byte) { return (byte > ' ' && byte < 127) || (byte > 160 && byte != 173); }

enum { ALPHABET_END = 0x144 };

static void make_alphabet(int16_t *byte_of) {
    int next = 0x100;
    for (int c = 0; c < ALPHABET_END; c++) byte_of[c] = -1;
    for (int b = 0; b < 256; b++) byte_of[prints(b) ? b : next++] = (int16_t)b;
}

/* The bytes that a string of the alphabet stands for; false when it is none. */
static bool to_bytes(const int16_t *byte_of, const char *s, nmk_buf *out) {
    out->length = 0;
    for (; *s; s += nmk_utf8_scan(s, 4)) {
        uint32_t c = nmk_utf8_at(s);
        if (c >= ALPHABET_END || byte_of[c] < 0) return false;
        char byte = (char)byte_of[c];
        nmk_buf_add(out, &byte, 1);
    }
    return out->length > 0;
}

/* ------------------------------------------------------------------------------------------------------- model */

/* Model settings that change ids and are not done here, with the value that does nothing. */
static int check_model(json_object *model, nmk_err *e) {
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    json_object *value;
    const char *type = text_of(model, "model", "type", e);
    if (!type) return -1;
    if (strcmp(type, "BPE")) return nmk_fail(e, "model.type \"%s\" is not supported (expected BPE)", show(type).text);
    if ((value = nmk_json_get(model, "dropout")) && json_object_get_double(value) != 0.0)
        return nmk_fail(e, "model.dropout is not supported");
    for (size_t i = 0; i < 2; i++)
        if ((value = nmk_json_get(model, affixes[i])) && json_object_get_string_len(value))
            return nmk_fail(e, "model.%s is not supported", affixes[i]);
    bool byte_fallback = false;
    if (flag_if_there(model, "model", "byte_fallback", &byte_fallback, e)) return -1;
    return byte_fallback ? nmk_fail(e, "model.byte_fallback is not supported") : 0;
}

/* Largest id plus one, over the vocabulary and the added tokens. */
static int count_ids(json_object *vocab, json_object *added, int32_t *size, nmk_err *e) {
    *size = 0;
    json_object_object_foreach(vocab, key, value) {
        int32_t id;
        char where[96];
        snprintf(where, sizeof where, "model.vocab[\"%s\"]", show(key).text);
        if (id_in(value, where, &id, e)) return -1;
        if (id >= *size) *size = id + 1;
    }
    for (size_t i = 0; added && i < json_object_array_length(added); i++) {
        int32_t id;
        char where[64];
        snprintf(where, sizeof where, "added_tokens[%zu]", i);
        json_object *entry = json_object_array_get_idx(added, i);
        if (!json_object_is_type(entry, json_type_object))
            return nmk_fail(e, "%s is %s (expected object)", where, type_name(entry));
        json_object *given = member(entry, where, "id", json_type_int, e);
        if (!given || id_in(given, where, &id, e)) return -1;
        if (id >= *size) *size = id + 1;
    }
    return *size ? 0 : nmk_fail(e, "model.vocab is empty");
}

static int read_vocab(nmk_tokenizer *t, json_object *vocab, const int16_t *byte_of, nmk_err *e) {
    int rc = -1;
    nmk_buf bytes = {0};
    json_object_object_foreach(vocab, key, value) {
        int32_t id = (int32_t)json_object_get_int64(value);
        if (nmk_vocab_kind(t->vocab, id) != NMK_TOKEN_NONE) {
            nmk_fail(e, "model.vocab[\"%s\"]: another token has the id %d too", show(key).text, id);
            goto out;
        }
        if (to_bytes(byte_of, key, &bytes))
            nmk_vocab_set(t->vocab, id, bytes.data, bytes.length, NMK_TOKEN_PIECE);
        else
            nmk_vocab_set(t->vocab, id, key, strlen(key), NMK_TOKEN_OTHER);
    }
    rc = 0;
out:
    nmk_buf_free(&bytes);
    return rc;
}

/* The two parts of merges[i], from ["a", "b"] or "a b".  `copy` holds them in the second case. */
static int merge_parts(json_object *entry, size_t i, const char *part[2], nmk_buf *copy, nmk_err *e) {
    if (json_object_is_type(entry, json_type_array) && json_object_array_length(entry) == 2) {
        for (size_t k = 0; k < 2; k++) {
            json_object *value = json_object_array_get_idx(entry, k);
            if (!json_object_is_type(value, json_type_string))
                return nmk_fail(e, "model.merges[%zu][%zu] is %s (expected string)", i, k, type_name(value));
            part[k] = json_object_get_string(value);
        }
        return 0;
    }
    if (!json_object_is_type(entry, json_type_string))
        return nmk_fail(e, "model.merges[%zu] is %s (expected two strings)", i, type_name(entry));
    copy->length = 0;
    nmk_buf_puts(copy, json_object_get_string(entry));
    char *space = strchr(copy->data, ' ');
    if (!space || strchr(space + 1, ' '))
        return nmk_fail(e, "model.merges[%zu] is \"%s\" (expected two tokens and a space between them)", i,
                        show(copy->data).text);
    *space = 0;
    part[0] = copy->data, part[1] = space + 1;
    return 0;
}

static int read_merges(nmk_tokenizer *t, json_object *merges, const int16_t *byte_of, nmk_err *e) {
    int rc = -1;
    nmk_buf bytes = {0}, both = {0}, copy = {0};
    for (size_t i = 0; i < json_object_array_length(merges); i++) {
        const char *part[2];
        int32_t id[2];
        if (merge_parts(json_object_array_get_idx(merges, i), i, part, &copy, e)) goto out;
        both.length = 0;
        for (int k = 0; k < 2; k++) {
            id[k] = to_bytes(byte_of, part[k], &bytes) ? nmk_vocab_find(t->vocab, bytes.data, bytes.length) : -1;
            if (id[k] < 0) {
                nmk_fail(e, "model.merges[%zu] names \"%s\", which is not in model.vocab", i, show(part[k]).text);
                goto out;
            }
            nmk_buf_add(&both, bytes.data, bytes.length);
        }
        int32_t result = nmk_vocab_find(t->vocab, both.data, both.length);
        if (result < 0) {
            nmk_fail(e, "model.merges[%zu] makes \"%s\" and \"%s\" one token, which is not in model.vocab", i,
                     show(part[0]).text, show(part[1]).text);
            goto out;
        }
        nmk_vocab_merge(t->vocab, id[0], id[1], result);
    }
    rc = 0;
out:
    nmk_buf_free(&bytes);
    nmk_buf_free(&both);
    nmk_buf_free(&copy);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ added tokens */

static int read_added_token(nmk_tokenizer *t, json_object *o, size_t i, json_object *vocab, nmk_err *e) {
    char where[64];
    snprintf(where, sizeof where, "added_tokens[%zu]", i);
    bool normalized;
    nmk_added a = {.id = (int32_t)json_object_get_int64(nmk_json_get(o, "id"))};
    const char *content = text_of(o, where, "content", e);
    if (!content || flag_of(o, where, "special", &a.special, e) || flag_of(o, where, "lstrip", &a.left_strip, e) ||
        flag_of(o, where, "rstrip", &a.right_strip, e) || flag_of(o, where, "single_word", &a.single_word, e) ||
        flag_of(o, where, "normalized", &normalized, e))
        return -1;
    size_t length = strlen(content);
    if (!length || length > MAX_ADDED_BYTES)
        return nmk_fail(e, "%s.content has %zu bytes (expected 1 to %d)", where, length, MAX_ADDED_BYTES);

    /* A token of the vocabulary may be an added one too, under the same id; no other id may be used twice. */
    json_object *listed = NULL;
    bool in_vocab = json_object_object_get_ex(vocab, content, &listed);
    if (in_vocab && json_object_get_int64(listed) != a.id)
        return nmk_fail(e, "%s.id is %d, but model.vocab has \"%s\" as %lld", where, a.id, show(content).text,
                        (long long)json_object_get_int64(listed));
    if (!in_vocab && nmk_vocab_kind(t->vocab, a.id) != NMK_TOKEN_NONE)
        return nmk_fail(e, "%s.id is %d, which another token has", where, a.id);
    size_t listed_length;
    const char *bytes = nmk_vocab_bytes(t->vocab, a.id, &listed_length);
    if (bytes && (listed_length != length || memcmp(bytes, content, length)))
        return nmk_fail(e, "%s.content \"%s\" is how model.vocab spells the token %d, which has other bytes", where,
                        show(content).text, a.id);
    nmk_vocab_set(t->vocab, a.id, content, length, a.special ? NMK_TOKEN_SPECIAL : NMK_TOKEN_ADDED);

    int32_t index = (int32_t)t->added_count;
    t->added[t->added_count++] = a;
    if (!normalized) {
        nmk_trie_add(&t->raw, content, length, index);
        return 0;
    }
    nmk_buf b = {0};
    int rc = 0;
    if (t->nfc)
        rc = nmk_nfc(content, length, &b, e);
    else
        nmk_buf_add(&b, content, length);
    if (!rc) nmk_trie_add(&t->normalized, b.data, b.length, index);
    nmk_buf_free(&b);
    return rc;
}

static int read_added_tokens(nmk_tokenizer *t, json_object *added, json_object *vocab, nmk_err *e) {
    size_t count = added ? json_object_array_length(added) : 0;
    if (count > MAX_ADDED) return nmk_fail(e, "added_tokens has %zu entries (expected at most %d)", count, MAX_ADDED);
    t->added = xcalloc(count, sizeof *t->added);
    for (size_t i = 0; i < count; i++)
        if (read_added_token(t, json_object_array_get_idx(added, i), i, vocab, e)) return -1;
    return 0;
}

/* ------------------------------------------------------------------------- normalizer, pre-tokenizer and others */

/* What a component of these four fields does: reads one object of a known type. */
typedef int read_fn(nmk_tokenizer *t, json_object *o, const char *where, nmk_err *e);

typedef struct {
    const char *type;
    read_fn *read; /* NULL: nothing to do */
} component;

/* Reads a component, or each member of a Sequence, whose list is called `members`. */
static int read_component(nmk_tokenizer *t, json_object *o, const char *where, const char *members,
                          const component *known, nmk_err *e) {
    if (!json_object_is_type(o, json_type_object))
        return nmk_fail(e, "%s is %s (expected object)", where, type_name(o));
    const char *type = text_of(o, where, "type", e);
    if (!type) return -1;
    if (!strcmp(type, "Sequence")) {
        json_object *list = member(o, where, members, json_type_array, e);
        if (!list) return -1;
        for (size_t i = 0; i < json_object_array_length(list); i++) {
            char inner[128];
            snprintf(inner, sizeof inner, "%.60s.%s[%zu]", where, members, i);
            if (read_component(t, json_object_array_get_idx(list, i), inner, members, known, e)) return -1;
        }
        return 0;
    }
    for (const component *c = known; c->type; c++)
        if (!strcmp(type, c->type)) return c->read ? c->read(t, o, where, e) : 0;
    nmk_buf names = {0};
    for (const component *c = known; c->type; c++) nmk_buf_printf(&names, "%s, ", c->type);
    nmk_fail(e, "%s.type \"%s\" is not supported (expected %sor Sequence)", where, show(type).text, names.data);
    nmk_buf_free(&names);
    return -1;
}

static int read_nfc(nmk_tokenizer *t, json_object *o, const char *where, nmk_err *e) {
    (void)o, (void)where, (void)e;
    t->nfc = true;
    return 0;
}

static const component normalizers[] = {{"NFC", read_nfc}, {0}};

static int read_split(nmk_tokenizer *t, json_object *o, const char *where, nmk_err *e) {
    static const char *const behaviours[] = {[NMK_SPLIT_ISOLATED] = "Isolated",
                                             [NMK_SPLIT_REMOVED] = "Removed",
                                             [NMK_SPLIT_MERGED_WITH_PREVIOUS] = "MergedWithPrevious",
                                             [NMK_SPLIT_MERGED_WITH_NEXT] = "MergedWithNext",
                                             [NMK_SPLIT_CONTIGUOUS] = "Contiguous"};
    enum { BEHAVIOURS = sizeof behaviours / sizeof *behaviours };
    json_object *pattern = member(o, where, "pattern", json_type_object, e);
    const char *behaviour = pattern ? text_of(o, where, "behavior", e) : NULL;
    bool invert;
    if (!behaviour || flag_of(o, where, "invert", &invert, e)) return -1;
    size_t b = 0;
    while (b < BEHAVIOURS && strcmp(behaviour, behaviours[b])) b++;
    if (b == BEHAVIOURS)
        return nmk_fail(e,
                        "%s.behavior \"%s\" is not supported (expected Isolated, Removed, MergedWithPrevious, "
                        "MergedWithNext or Contiguous)",
                        where, show(behaviour).text);
    char inner[160];
    bool literal = !json_object_object_get_ex(pattern, "Regex", NULL);
    snprintf(inner, sizeof inner, "%s.pattern", where);
    const char *text = text_of(pattern, inner, literal ? "String" : "Regex", e);
    if (!text) return -1;
    if (nmk_split_add_pattern(t->splitter, text, literal, (nmk_split_behaviour)b, invert, e))
        return nmk_fail_in(e, "%s.%s", inner, literal ? "String" : "Regex");
    return 0;
}

static int read_digits(nmk_tokenizer *t, json_object *o, const char *where, nmk_err *e) {
    bool individual;
    if (flag_of(o, where, "individual_digits", &individual, e)) return -1;
    return nmk_split_add_digits(t->splitter, individual, e) ? nmk_fail_in(e, "%s", where) : 0;
}

/* The pattern of GPT-2, which ByteLevel has built in. */
static const char byte_level_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static int read_byte_level(nmk_tokenizer *t, json_object *o, const char *where, nmk_err *e) {
    bool space, pattern = true;
    if (flag_of(o, where, "add_prefix_space", &space, e) || flag_if_there(o, where, "use_regex", &pattern, e))
        return -1;
    if (space && nmk_split_add_space(t->splitter, e)) return nmk_fail_in(e, "%s", where);
    if (pattern && nmk_split_add_pattern(t->splitter, byte_level_pattern, false, NMK_SPLIT_ISOLATED, false, e))
        return nmk_fail_in(e, "%s", where);
    return 0;
}

static const component pre_tokenizers[] = {
    {"Split", read_split}, {"Digits", read_digits}, {"ByteLevel", read_byte_level}, {0}};

/* The ids that one "SpecialToken" of a template stands for. */
static int template_ids(nmk_tokenizer *t, json_object *o, json_object *piece, const char *where, nmk_ids *to,
                        nmk_err *e) {
    char inner[160];
    snprintf(inner, sizeof inner, "%s.special_tokens", where);
    const char *name = text_of(piece, where, "id", e);
    json_object *table = name ? member(o, where, "special_tokens", json_type_object, e) : NULL;
    json_object *entry = table ? member(table, inner, name, json_type_object, e) : NULL;
    json_object *ids = entry ? member(entry, inner, "ids", json_type_array, e) : NULL;
    if (!ids) return -1;
    for (size_t i = 0; i < json_object_array_length(ids); i++) {
        int32_t id;
        if (id_in(json_object_array_get_idx(ids, i), inner, &id, e)) return -1;
        if (nmk_vocab_kind(t->vocab, id) == NMK_TOKEN_NONE)
            return nmk_fail(e, "%s: \"%s\" has the id %d, which no token has", inner, show(name).text, id);
        nmk_ids_add(to, id);
    }
    return 0;
}

static int read_template(nmk_tokenizer *t, json_object *o, const char *where, nmk_err *e) {
    json_object *single = member(o, where, "single", json_type_array, e);
    bool text_seen = false;
    if (!single) return -1;
    if (t->before.count || t->after.count) return nmk_fail(e, "%s: a second template is not supported", where);
    for (size_t i = 0; i < json_object_array_length(single); i++) {
        char inner[160];
        snprintf(inner, sizeof inner, "%s.single[%zu]", where, i);
        json_object *piece = json_object_array_get_idx(single, i), *special, *text;
        if (json_object_is_type(piece, json_type_object) && (special = nmk_json_get(piece, "SpecialToken"))) {
            if (template_ids(t, o, special, where, text_seen ? &t->after : &t->before, e)) return -1;
        } else if (json_object_is_type(piece, json_type_object) && (text = nmk_json_get(piece, "Sequence"))) {
            const char *name = text_of(text, inner, "id", e);
            if (!name) return -1;
            if (text_seen || strcmp(name, "A")) return nmk_fail(e, "%s: expected the sequence A once", inner);
            text_seen = true;
        } else
            return nmk_fail(e, "%s: expected SpecialToken or Sequence", inner);
    }
    return text_seen ? 0 : nmk_fail(e, "%s.single leaves out the text", where);
}

static const component post_processors[] = {{"TemplateProcessing", read_template}, {"ByteLevel", NULL}, {0}};
static const component decoders[] = {{"ByteLevel", NULL}, {0}};

/* Whether a component, or the last member of a Sequence, has this type. */
static bool ends_in(json_object *o, const char *members, const char *type) {
    json_object *list, *name;
    while ((list = nmk_json_get(o, members)) && json_object_is_type(list, json_type_array) &&
           json_object_array_length(list))
        o = json_object_array_get_idx(list, json_object_array_length(list) - 1);
    return (name = nmk_json_get(o, "type")) && !strcmp(json_object_get_string(name), type);
}

/* -------------------------------------------------------------------------------------------------------- file */

static int read_all(nmk_tokenizer *t, json_object *root, nmk_err *e) {
    int16_t byte_of[ALPHABET_END];
    int32_t size;
    bool ignore_merges = false;
    json_object *o;
    make_alphabet(byte_of);
    if (!json_object_is_type(root, json_type_object)) return nmk_fail(e, "is %s (expected object)", type_name(root));
    if (nmk_json_get(root, "truncation")) return nmk_fail(e, "truncation is not supported");
    if (nmk_json_get(root, "padding")) return nmk_fail(e, "padding is not supported");
    json_object *model = member(root, "the file", "model", json_type_object, e);
    if (!model || check_model(model, e)) return -1;
    json_object *vocab = member(model, "model", "vocab", json_type_object, e);
    json_object *merges = vocab ? member(model, "model", "merges", json_type_array, e) : NULL;
    json_object *added = nmk_json_get(root, "added_tokens");
    if (!merges || flag_if_there(model, "model", "ignore_merges", &ignore_merges, e)) return -1;
    if (added && !json_object_is_type(added, json_type_array))
        return nmk_fail(e, "added_tokens is %s (expected array)", type_name(added));

    if ((o = nmk_json_get(root, "normalizer")) && read_component(t, o, "normalizer", "normalizers", normalizers, e))
        return -1;
    if (count_ids(vocab, added, &size, e)) return -1;
    t->vocab = nmk_vocab_new(size, json_object_array_length(merges));
    if (read_vocab(t, vocab, byte_of, e) || read_merges(t, merges, byte_of, e)) return -1;
    int missing = nmk_vocab_finish(t->vocab, ignore_merges);
    if (missing >= 0) return nmk_fail(e, "model.vocab has no token for the byte 0x%02x", (unsigned)missing);
    if (read_added_tokens(t, added, vocab, e)) return -1;

    if (!(o = nmk_json_get(root, "pre_tokenizer")) || !ends_in(o, "pretokenizers", "ByteLevel"))
        return nmk_fail(e, "pre_tokenizer does not end in ByteLevel: only byte-level models are supported");
    if (read_component(t, o, "pre_tokenizer", "pretokenizers", pre_tokenizers, e)) return -1;
    if ((o = nmk_json_get(root, "post_processor")) &&
        read_component(t, o, "post_processor", "processors", post_processors, e))
        return -1;
    if (!(o = nmk_json_get(root, "decoder"))) return nmk_fail(e, "decoder is missing (expected ByteLevel)");
    return read_component(t, o, "decoder", "decoders", decoders, e);
}

int nmk_tokenizer_load(const char *path, nmk_tokenizer **result, nmk_err *e) {
    int rc = -1;
    struct stat st;
    bool folder = !stat(path, &st) && S_ISDIR(st.st_mode);
    char *file = folder ? xasprintf("%s/tokenizer.json", path) : xstrdup(path);
    nmk_tokenizer *t = xcalloc(1, sizeof *t);
    t->splitter = nmk_splitter_new();
    json_object *root = nmk_json_read(file, MAX_FILE_BYTES, e);
    if (!root) goto out;
    if (read_all(t, root, e)) {
        nmk_fail_in(e, "%s", file);
        goto out;
    }
    *result = t, t = NULL, rc = 0;
out:
    json_object_put(root);
    nmk_tokenizer_free(t);
    free(file);
    return rc;
}
