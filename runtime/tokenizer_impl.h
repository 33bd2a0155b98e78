/* What a loaded tokenizer is made of: tokenizer_load.c fills it, tokenizer.c uses it. */
#ifndef NMK_TOKENIZER_IMPL_H
#define NMK_TOKENIZER_IMPL_H

#include "split.h"
#include "tokenizer.h"
#include "vocab.h"

/* An added token: found in the text by its bytes, before anything else. */
typedef struct {
    int32_t id;
    bool special, left_strip, right_strip, single_word;
} nmk_added;

/* A set of byte strings in a tree: a node's children are a list, the root's are an array. */
typedef struct {
    int32_t child, sibling; /* 0: none */
    int32_t added;          /* index into nmk_tokenizer.added, or -1 */
    char byte;
} nmk_trie_node;

typedef struct {
    nmk_trie_node *node; /* [0] is not used */
    int32_t count, capacity;
    int32_t root[256];
} nmk_trie;

void nmk_trie_add(nmk_trie *t, const char *bytes, size_t length, int32_t added);

struct nmk_tokenizer {
    nmk_vocab *vocab;
    nmk_added *added;
    size_t added_count;
    nmk_trie raw, normalized; /* added tokens found before and after normalization */
    bool nfc;
    nmk_splitter *splitter;
    nmk_ids before, after; /* what NMK_ADD_BOS puts around a text */
};

/* Normalization form C, added to `out`. */
int nmk_nfc(const char *text, size_t bytes, nmk_buf *out, nmk_err *e);

#endif
