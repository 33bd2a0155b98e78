/* Text to token ids and back: byte-level BPE as Hugging Face's tokenizer.json describes it.
 *
 * Supported, with the same ids as the tokenizers library: model BPE (merges as strings or pairs, ignore_merges); added
 * tokens; the normalizer NFC; the pre-tokenizers Split, Digits and ByteLevel; the post-processors TemplateProcessing
 * and ByteLevel; the decoder ByteLevel; Sequence of these.  All else in the file that would change ids is refused by
 * name when loading.
 *
 * Every byte has a token, so without a normalizer decoding gives back exactly the text that was encoded.
 * A loaded tokenizer does not change: threads may share it. */
#ifndef NMK_TOKENIZER_H
#define NMK_TOKENIZER_H

#include "utf8.h"

typedef struct nmk_tokenizer nmk_tokenizer;

/* Token ids that grow.  Zeroed is empty. */
typedef struct {
    int32_t *id;
    size_t count, capacity;
} nmk_ids;

void nmk_ids_add(nmk_ids *ids, int32_t id);
void nmk_ids_free(nmk_ids *ids); /* leaves it empty */

enum {
    NMK_ADD_BOS = 1,       /* what the post-processor puts around a text; in this family BOS before it */
    NMK_PARSE_SPECIAL = 2, /* the text of a special token is that token; without it, it is ordinary text */
};

/* Reads tokenizer.json: `path` is the file or the folder it lies in.  0 and *result, which the caller frees; or -1 and
 * a message that names the file and the field. */
int nmk_tokenizer_load(const char *path, nmk_tokenizer **result, nmk_err *e);
void nmk_tokenizer_free(nmk_tokenizer *t); /* NULL is fine */

/* Adds the ids of a text.  What is not valid UTF-8 counts as U+FFFD.  0, or -1 with `ids` as it was: the text is larger
 * than NMK_MAX_TEXT_BYTES, or a pattern of the file takes too much work on it. */
enum { NMK_MAX_TEXT_BYTES = 64 << 20 };
int nmk_tokenizer_encode(const nmk_tokenizer *t, const char *text, size_t bytes, unsigned flags, nmk_ids *ids,
                         nmk_err *e);

/* Adds the text of ids: always valid UTF-8, U+FFFD where the tokens' bytes are not.  Ids without a token (padding of
 * the vocabulary) have no text. */
void nmk_tokenizer_decode(const nmk_tokenizer *t, const int32_t *ids, size_t count, bool skip_special, nmk_buf *text);

/* The same one token at a time.  Zeroed is ready.  A character whose bytes are spread over tokens comes out with the
 * last of them, so each addition to `text` is valid UTF-8; nmk_utf8_end(&d->text, text) ends it. */
typedef struct {
    nmk_utf8 text;
    bool skip_special;
} nmk_detokenizer;

void nmk_detokenizer_add(nmk_detokenizer *d, const nmk_tokenizer *t, int32_t id, nmk_buf *text);

/* The bytes of one token, not terminated; NULL when the id has none. */
const char *nmk_tokenizer_token(const nmk_tokenizer *t, int32_t id, size_t *bytes);
bool nmk_tokenizer_is_special(const nmk_tokenizer *t, int32_t id);

/* The id of an added token (special or not) by its text, or -1. */
int32_t nmk_tokenizer_find(const nmk_tokenizer *t, const char *text);

/* One past the largest id. */
int32_t nmk_tokenizer_size(const nmk_tokenizer *t);

#endif
