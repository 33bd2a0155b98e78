/* What holds for every text: decoding gives it back, merges are the plainest rule's, long texts take bounded time. */
#include "runtime/tokenizer_helper.h"

#include <time.h>

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint32_t below(uint32_t n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)((state >> 32) * n >> 32);
}

static void add_char(nmk_buf *b, uint32_t c) {
    char s[5] = {0};
    if (c < 0x80)
        s[0] = (char)c;
    else if (c < 0x800)
        s[0] = (char)(0xc0 | c >> 6), s[1] = (char)(0x80 | (c & 63));
    else if (c < 0x10000)
        s[0] = (char)(0xe0 | c >> 12), s[1] = (char)(0x80 | (c >> 6 & 63)), s[2] = (char)(0x80 | (c & 63));
    else
        s[0] = (char)(0xf0 | c >> 18), s[1] = (char)(0x80 | (c >> 12 & 63)), s[2] = (char)(0x80 | (c >> 6 & 63)),
        s[3] = (char)(0x80 | (c & 63));
    nmk_buf_add(b, s, c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4);
}

static void random_text(nmk_buf *b) {
    static const char *const words[] = {"def ", "return", "the",   "    ",   "\n",     " ",       "1234567",
                                        "12",   "'ll",    "x_1",   "<PAD>",  "<|",     "_TOKEN",  "...)",
                                        "\r\n", "\t",     "HTTPS", "\u00e9", "\u4f60", "e\u0301", "\U0001f642"};
    b->length = 0;
    for (uint32_t n = below(below(8) ? 30 : 400); n; n--) {
        uint32_t kind = below(8), c;
        if (kind < 4)
            nmk_buf_puts(b, words[below(sizeof words / sizeof *words)]);
        else {
            do c = below(kind == 4 ? 0x80 : kind == 5 ? 0x800 : kind == 6 ? 0x10000 : 0x110000);
            while (c >= 0xd800 && c < 0xe000);
            add_char(b, c);
        }
    }
}

static void round_trips(const nmk_tokenizer *t) {
    nmk_buf b = {0};
    int bad = 0, bad_stream = 0, specials = 0;
    for (int i = 0; i < 20000; i++) {
        random_text(&b);
        nmk_ids ids = encode(t, b.data, b.length, i % 2 ? NMK_PARSE_SPECIAL : 0);
        if (!decodes_to(t, &ids, b.data, b.length)) bad++;
        if (!streams_to(t, &ids, b.data, b.length)) bad_stream++;
        for (size_t k = 0; k < ids.count && !(i % 2); k++) specials += nmk_tokenizer_is_special(t, ids.id[k]);
        nmk_ids_free(&ids);
    }
    nmk_buf_free(&b);
    check(!bad, "20,000 random texts decode to themselves", "%d do not", bad);
    check(!bad_stream, "and token by token, in whole characters", "%d do not", bad_stream);
    check(!specials, "no special token unless asked for", "%d came", specials);
}

/* Bytes that are no UTF-8 count as U+FFFD; random ids decode to valid UTF-8. */
static void bad_bytes(const nmk_tokenizer *t) {
    int bad = 0, invalid = 0, differ = 0;
    for (int i = 0; i < 20000; i++) {
        char bytes[24];
        size_t count = below(sizeof bytes);
        for (size_t k = 0; k < count; k++) bytes[k] = (char)(below(2) ? below(256) : 0x80 + below(0x78));
        nmk_utf8 u = {0};
        nmk_buf repaired = {0}, text = {0};
        nmk_buf_reserve(&repaired, 1);
        nmk_utf8_add(&u, bytes, count, &repaired);
        nmk_utf8_end(&u, &repaired);
        nmk_ids ids = encode(t, bytes, count, 0);
        if (!nmk_utf8_valid(repaired.data, repaired.length) || !decodes_to(t, &ids, repaired.data, repaired.length))
            bad++;
        for (size_t k = 0; k < ids.count; k++) ids.id[k] = (int32_t)below(5000) - 100; /* some have no token */
        nmk_tokenizer_decode(t, ids.id, ids.count, false, &text);
        if (!nmk_utf8_valid(text.data, text.length)) invalid++;
        if (!streams_to(t, &ids, text.data, text.length)) differ++;
        nmk_ids_free(&ids);
        nmk_buf_free(&repaired);
        nmk_buf_free(&text);
    }
    check(!bad, "invalid UTF-8 is encoded as U+FFFD", "%d texts are not", bad);
    check(!invalid, "any ids decode to valid UTF-8", "%d do not", invalid);
    check(!differ, "and the same token by token", "%d do not", differ);

    static const struct {
        const char *bytes, *repaired;
    } cases[] = {{"a\xff"
                  "b",
                  "a\ufffd"
                  "b"},
                 {"\xe4\xbd", "\ufffd"},
                 {"\xe4\xbd"
                  "a",
                  "\ufffd"
                  "a"},
                 {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
                 {"\xc0\xaf", "\ufffd\ufffd"},
                 {"\xf0\x9f\x99\x82\x80", "\U0001f642\ufffd"},
                 {"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"},
                 {"\xf0\x9f\x99", "\ufffd"}};
    bad = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nmk_ids ids = encode(t, cases[i].bytes, strlen(cases[i].bytes), 0);
        if (!decodes_to(t, &ids, cases[i].repaired, strlen(cases[i].repaired))) bad++;
        nmk_ids_free(&ids);
    }
    check(!bad, "one U+FFFD for each longest part of a character", "%d cases differ", bad);
}

/* Long runs of one kind, where a pattern or the merges could take quadratic time. */
static void long_texts(const nmk_tokenizer *t) {
    static const struct {
        const char *name, *unit;
    } runs[] = {{"a", "a"},
                {"A", "A"},
                {"1", "1"},
                {"space", " "},
                {"newline", "\n"},
                {"tab", "\t"},
                {"_", "_"},
                {".", "."},
                {"/", "/"},
                {"e acute", "\u00e9"},
                {"han", "\u4f60"},
                {"accent", "\u0301"},
                {"arabic digit", "\u0663"},
                {"aB", "aB"},
                {"1a", "1a"},
                {"space a", " a"},
                {"CR LF", "\r\n"},
                {"ab space", "ab "},
                {"12 space", "12 "},
                {"<", "<"},
                {"half a special token", "<|START_TEXT|"},
                {"special token", "<|START_TEXT|>"},
                {"quote space", "' "},
                {"'s", "'s"},
                {"two spaces x", "  x"},
                {"1 superscript 2", "1\u00b2"}};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        nmk_buf b = {0};
        char name[64];
        while (b.length < 1 << 20) nmk_buf_puts(&b, runs[i].unit);
        snprintf(name, sizeof name, "1 MiB of %s", runs[i].name);
        uint64_t start = nmk_now_ns();
        nmk_ids ids = encode(t, b.data, b.length, NMK_PARSE_SPECIAL);
        double seconds = (double)(nmk_now_ns() - start) * 1e-9;
        if (!decodes_to(t, &ids, b.data, b.length))
            check(false, name, "does not decode to itself");
        else
            check(seconds < time_limit(10), name, "took %.1f s", seconds);
        nmk_ids_free(&ids);
        nmk_buf_free(&b);
    }
}

/* The rule itself, by looking at all pairs for each merge: the plainest form, on the file's own strings. */
static size_t plain_merges(json_object *ranks, char **part, size_t count) {
    for (;;) {
        size_t best = 0;
        int64_t best_rank = INT64_MAX;
        for (size_t i = 0; i + 1 < count; i++) {
            json_object *rank;
            char *pair = xasprintf("%s %s", part[i], part[i + 1]);
            if (json_object_object_get_ex(ranks, pair, &rank) && json_object_get_int64(rank) < best_rank)
                best = i, best_rank = json_object_get_int64(rank);
            free(pair);
        }
        if (best_rank == INT64_MAX) return count;
        char *both = xasprintf("%s%s", part[best], part[best + 1]);
        free(part[best]);
        free(part[best + 1]);
        part[best] = both;
        memmove(part + best + 1, part + best + 2, (count - best - 2) * sizeof *part);
        count--;
    }
}

static void same_as_plain_rule(const nmk_tokenizer *t, json_object *model) {
    static const char *const roots[] = {"in", "ter", "nation", "al", "iz",     "ation", "er", "s",
                                        "th", "e",   "aa",     "a",  "return", "ing",   "q"};
    json_object *ranks = json_object_new_object(), *merges = get(model, "merges");
    char *part[128];
    int bad = 0, lengths[2] = {0, 0};
    for (size_t i = 0; i < json_object_array_length(merges); i++) {
        json_object *pair = json_object_array_get_idx(merges, i);
        char both[128];
        snprintf(both, sizeof both, "%s %s", json_object_get_string(json_object_array_get_idx(pair, 0)),
                 json_object_get_string(json_object_array_get_idx(pair, 1)));
        json_object_object_add(ranks, both, json_object_new_int64((int64_t)i));
    }
    for (int round = 0; round < 400; round++) {
        char word[128] = "";
        for (size_t most = 1 + below(100); strlen(word) < most;)
            strcat(word, roots[below(sizeof roots / sizeof *roots)]);
        size_t count = strlen(word);
        for (size_t i = 0; i < count; i++) part[i] = xasprintf("%c", word[i]);
        lengths[count > 40]++;
        count = plain_merges(ranks, part, count);
        nmk_ids ids = encode(t, word, strlen(word), 0);
        bool same = ids.count == count;
        for (size_t i = 0; same && i < count; i++)
            same = json_object_get_int(get(get(model, "vocab"), part[i])) == ids.id[i];
        bad += !same;
        nmk_ids_free(&ids);
        for (size_t i = 0; i < count; i++) free(part[i]);
    }
    json_object_put(ranks);
    check(!bad && lengths[0] > 50 && lengths[1] > 50, "merges of 400 words as the plain rule gives them", "%d differ",
          bad);
}

static void look_ups(const nmk_tokenizer *t) {
    size_t length;
    nmk_buf b = {0};
    const int32_t ids[] = {1, 303, 91, 9, 363, -5, 1 << 30};
    nmk_tokenizer_decode(t, ids, 7, true, &b);
    check(b.length == 5 && !memcmp(b.data, "hello", 5), "special tokens are left out when asked", "\"%s\"", b.data);
    nmk_buf_free(&b);
    check(nmk_tokenizer_size(t) == 4096, "size", "%d", nmk_tokenizer_size(t));
    check(nmk_tokenizer_find(t, "<|END_OF_TURN_TOKEN|>") == 4 && nmk_tokenizer_find(t, "<BOS") == -1,
          "special token by text", "wrong id");
    const char *bytes = nmk_tokenizer_token(t, 9, &length);
    check(bytes && length == 16 && !memcmp(bytes, "<|END_THINKING|>", 16), "bytes of a special token", "other bytes");
    check(!nmk_tokenizer_token(t, 4096, &length) && !nmk_tokenizer_token(t, -1, &length), "no bytes without a token",
          "some");
    nmk_tokenizer_free(NULL);
}

/* Not a test of speed; the figure is for who reads the log. */
static void speed(const nmk_tokenizer *t) {
    char *text;
    size_t bytes;
    nmk_err e;
    if (nmk_file_read(&text, &bytes, "examples/nmc-toy/make_toy.py", 1 << 20, &e)) {
        printf("skip - speed: %s\n", e.text);
        return;
    }
    clock_t start = clock();
    uint64_t done = 0, tokens = 0;
    while (clock() - start < CLOCKS_PER_SEC / 4) {
        nmk_ids ids = encode(t, text, bytes, 0);
        tokens += ids.count, done += bytes;
        nmk_ids_free(&ids);
    }
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    printf("# Python source: %.1f MB/s, %.2f million tokens/s\n", (double)done / seconds * 1e-6,
           (double)tokens / seconds * 1e-6);
    free(text);
}

int main(void) {
    nmk_tokenizer *t = load(TOY);
    json_object *file = read_json(TOY "/tokenizer.json");
    look_ups(t);
    same_as_plain_rule(t, get(file, "model"));
    round_trips(t);
    bad_bytes(t);
    long_texts(t);
    speed(t);
    json_object_put(file);
    nmk_tokenizer_free(t);
    return failures != 0;
}
