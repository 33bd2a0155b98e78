#include "tokenizer.h"
#include "tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

void nmk_ids_add(nmk_ids *ids, int32_t id) {
    if (ids->count == ids->capacity) {
        ids->capacity = ids->capacity ? 2 * ids->capacity : 64;
        ids->id = xrealloc(ids->id, ids->capacity * sizeof *ids->id);
    }
    ids->id[ids->count++] = id;
}

void nmk_ids_free(nmk_ids *ids) {
    free(ids->id);
    *ids = (nmk_ids){0};
}

void nmk_tokenizer_free(nmk_tokenizer *t) {
    if (!t) return;
    nmk_vocab_free(t->vocab);
    nmk_splitter_free(t->splitter);
    free(t->added);
    free(t->raw.node);
    free(t->normalized.node);
    nmk_ids_free(&t->before);
    nmk_ids_free(&t->after);
    free(t);
}

/* ------------------------------------------------------------------------------------------------ added tokens */

void nmk_trie_add(nmk_trie *t, const char *bytes, size_t length, int32_t added) {
    if (t->count + (int64_t)length + 1 > t->capacity) {
        t->capacity = 2 * t->capacity + (int32_t)length + 16;
        t->node = xrealloc(t->node, (size_t)t->capacity * sizeof *t->node);
        if (!t->count) t->node[t->count++] = (nmk_trie_node){.added = -1};
    }
    int32_t *link = &t->root[(unsigned char)bytes[0]];
    for (size_t i = 0;; i++) {
        while (*link && t->node[*link].byte != bytes[i]) link = &t->node[*link].sibling;
        if (!*link) {
            *link = t->count;
            t->node[t->count++] = (nmk_trie_node){.added = -1, .byte = bytes[i]};
        }
        if (i + 1 == length) break;
        link = &t->node[*link].child;
    }
    t->node[*link].added = added;
}

/* The longest string of the set that the text begins with: its index in `added` and its length, or -1. */
static int32_t longest(const nmk_trie *t, const char *text, size_t bytes, size_t *length) {
    int32_t best = -1, at = t->root[(unsigned char)text[0]];
    for (size_t i = 0; at;) {
        if (t->node[at].added >= 0) best = t->node[at].added, *length = i + 1;
        if (++i == bytes) break;
        at = t->node[at].child;
        while (at && t->node[at].byte != text[i]) at = t->node[at].sibling;
    }
    return best;
}

/* ------------------------------------------------------------------------------------------------------ encode */

typedef struct {
    const nmk_tokenizer *t;
    bool parse_special;
    nmk_ids *ids;
    nmk_err *e;
} encoding;

typedef int rest_fn(encoding *x, const char *text, size_t bytes);

/* Emits the added tokens of the text and gives what lies between them to `rest`. */
static int split_added(encoding *x, const nmk_trie *trie, const char *text, size_t bytes, rest_fn *rest) {
    size_t done = 0;
    for (size_t at = 0; at < bytes;) {
        size_t length = 0;
        int32_t index = trie->root[(unsigned char)text[at]] ? longest(trie, text + at, bytes - at, &length) : -1;
        if (index < 0) {
            at++;
            continue;
        }
        const nmk_added *a = &x->t->added[index];
        size_t start = at, stop = at + length;
        at = stop;
        if (a->special && !x->parse_special) continue;
        if (a->single_word && ((start && nmk_is_word(nmk_utf8_at(nmk_utf8_before(text + start)))) ||
                               (stop < bytes && nmk_is_word(nmk_utf8_at(text + stop)))))
            continue;
        if (a->left_strip)
            while (start > done && nmk_is_space(nmk_utf8_at(nmk_utf8_before(text + start))))
                start = (size_t)(nmk_utf8_before(text + start) - text);
        if (a->right_strip)
            while (stop < bytes && nmk_is_space(nmk_utf8_at(text + stop)))
                stop += (size_t)nmk_utf8_scan(text + stop, 4);
        if (start > done && rest(x, text + done, start - done)) return -1;
        nmk_ids_add(x->ids, a->id);
        if (stop > done) done = stop;
    }
    return done < bytes ? rest(x, text + done, bytes - done) : 0;
}

static int encode_piece(void *context, const char *text, size_t bytes, nmk_err *e) {
    (void)e;
    encoding *x = context;
    nmk_vocab_encode(x->t->vocab, text, bytes, x->ids);
    return 0;
}

static int encode_plain(encoding *x, const char *text, size_t bytes) {
    return nmk_split_run(x->t->splitter, text, bytes, encode_piece, x, x->e);
}

int nmk_nfc(const char *text, size_t bytes, nmk_buf *out, nmk_err *e) {
    utf8proc_uint8_t *made = NULL;
    utf8proc_ssize_t length = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)bytes, &made,
                                           UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (length < 0) return nmk_fail(e, "cannot normalize a text of %zu bytes: %s", bytes, utf8proc_errmsg(length));
    nmk_buf_add(out, made, (size_t)length);
    free(made);
    return 0;
}

/* Below U+0300, whose first byte is 0xcc, every text is in form C. */
static bool may_change(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)text[i] >= 0xcc) return true;
    return false;
}

static int encode_unnormalized(encoding *x, const char *text, size_t bytes) {
    if (!x->t->nfc || !may_change(text, bytes)) return split_added(x, &x->t->normalized, text, bytes, encode_plain);
    nmk_buf b = {0};
    int rc = nmk_nfc(text, bytes, &b, x->e);
    if (!rc) rc = split_added(x, &x->t->normalized, b.data, b.length, encode_plain);
    nmk_buf_free(&b);
    return rc;
}

static void add_all(nmk_ids *ids, const nmk_ids *from) {
    for (size_t i = 0; i < from->count; i++) nmk_ids_add(ids, from->id[i]);
}

int nmk_tokenizer_encode(const nmk_tokenizer *t, const char *text, size_t bytes, unsigned flags, nmk_ids *ids,
                         nmk_err *e) {
    int rc = -1;
    size_t before = ids->count;
    nmk_buf repaired = {0};
    encoding x = {.t = t, .parse_special = flags & NMK_PARSE_SPECIAL, .ids = ids, .e = e};
    if (bytes > NMK_MAX_TEXT_BYTES) {
        nmk_fail(e, "a text of %zu bytes: at most %d can be encoded", bytes, NMK_MAX_TEXT_BYTES);
        goto out;
    }
    if (!nmk_utf8_valid(text, bytes)) {
        nmk_utf8 u = {0};
        nmk_utf8_add(&u, text, bytes, &repaired);
        nmk_utf8_end(&u, &repaired);
        text = repaired.data, bytes = repaired.length;
    }
    if (flags & NMK_ADD_BOS) add_all(ids, &t->before);
    if (split_added(&x, &t->raw, text, bytes, encode_unnormalized)) {
        ids->count = before;
        goto out;
    }
    if (flags & NMK_ADD_BOS) add_all(ids, &t->after);
    rc = 0;
out:
    nmk_buf_free(&repaired);
    return rc;
}

/* ------------------------------------------------------------------------------------------------------ decode */

void nmk_detokenizer_add(nmk_detokenizer *d, const nmk_tokenizer *t, int32_t id, nmk_buf *text) {
    if (d->skip_special && nmk_tokenizer_is_special(t, id)) return;
    size_t length;
    const char *bytes = nmk_tokenizer_token(t, id, &length);
    if (bytes) nmk_utf8_add(&d->text, bytes, length, text);
}

void nmk_tokenizer_decode(const nmk_tokenizer *t, const int32_t *ids, size_t count, bool skip_special, nmk_buf *text) {
    nmk_detokenizer d = {.skip_special = skip_special};
    for (size_t i = 0; i < count; i++) nmk_detokenizer_add(&d, t, ids[i], text);
    nmk_utf8_end(&d.text, text);
}

/* ----------------------------------------------------------------------------------------------------- look-ups */

const char *nmk_tokenizer_token(const nmk_tokenizer *t, int32_t id, size_t *bytes) {
    return nmk_vocab_bytes(t->vocab, id, bytes);
}

bool nmk_tokenizer_is_special(const nmk_tokenizer *t, int32_t id) {
    return nmk_vocab_kind(t->vocab, id) == NMK_TOKEN_SPECIAL;
}

int32_t nmk_tokenizer_find(const nmk_tokenizer *t, const char *text) {
    size_t wanted = strlen(text), length;
    for (size_t i = 0; i < t->added_count; i++) {
        const char *bytes = nmk_vocab_bytes(t->vocab, t->added[i].id, &length);
        if (length == wanted && !memcmp(bytes, text, wanted)) return t->added[i].id;
    }
    return -1;
}

int32_t nmk_tokenizer_size(const nmk_tokenizer *t) { return nmk_vocab_size(t->vocab); }
