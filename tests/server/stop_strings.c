/* Stop strings against a plain search in the whole text, however the text is cut. */
#include "stop.h"

#include "server/helper.h"

#define MOST 6

/* Feeds the text in pieces of at most `piece` bytes (0: random ones), whole characters each. */
static bool feed(const char *text, const nmk_text *strings, int count, bool keep, size_t piece, nmk_buf *out,
                 int *met) {
    nmk_stop *s = nmk_stop_new(strings, count, keep);
    bool stopped = false;
    size_t bytes = strlen(text);
    for (size_t i = 0; i < bytes && !stopped;) {
        size_t n = piece ? piece : 1 + chance(7);
        if (n > bytes - i) n = bytes - i;
        while (i + n < bytes && ((unsigned char)text[i + n] & 0xc0) == 0x80) n++;
        stopped = nmk_stop_add(s, text + i, n, true, out);
        i += n;
    }
    if (!stopped) nmk_stop_end(s, out);
    *met = nmk_stop_met(s);
    nmk_stop_free(s);
    return stopped;
}

static void literal(const char *name, const char *text, const char *const *list, bool keep, const char *wanted,
                    int met) {
    nmk_text strings[MOST];
    int count = 0;
    for (; list[count]; count++) strings[count] = (nmk_text){list[count], strlen(list[count])};
    for (size_t piece = 0; piece <= strlen(text); piece++) {
        nmk_buf out = {0};
        int got = -2;
        feed(text, strings, count, keep, piece, &out, &got);
        bool good = out.length == strlen(wanted) && !memcmp(out.data ? out.data : "", wanted, out.length) && got == met;
        if (!good || piece == strlen(text))
            check(good, name, "pieces of %zu: got \"%s\" (string %d), wanted \"%s\" (%d)", piece,
                  out.data ? out.data : "", got, wanted, met);
        nmk_buf_free(&out);
        if (!good) return;
    }
}

#define STRINGS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* What a plain search says: the first complete string, the longest of those that end there. */
static int plain(const char *text, const nmk_text *strings, int count, size_t *end) {
    for (size_t e = 1; e <= strlen(text); e++) {
        int best = -1;
        for (int k = 0; k < count; k++)
            if (strings[k].bytes <= e && !memcmp(text + e - strings[k].bytes, strings[k].data, strings[k].bytes) &&
                (best < 0 || strings[k].bytes > strings[best].bytes))
                best = k;
        if (best >= 0) return *end = e, best;
    }
    return -1;
}

static void random_texts(void) {
    bool good = true, leaked = false;
    int stopped = 0;
    for (int round = 0; round < 20000 && good; round++) {
        static const char *const letters[] = {"a", "b", "\xc3\xa9", "\xf0\x9f\x98\x80"};
        char text[256] = "", words[MOST][64];
        nmk_text strings[MOST];
        int count = 1 + (int)chance(MOST), met = -2;
        unsigned kinds = 2 + chance(3);
        for (unsigned i = chance(50); i; i--) strcat(text, letters[chance(kinds)]);
        for (int k = 0; k < count; k++) {
            words[k][0] = 0;
            for (unsigned i = 1 + chance(7); i; i--) strcat(words[k], letters[chance(kinds)]);
            strings[k] = (nmk_text){words[k], strlen(words[k])};
        }
        nmk_buf out = {0};
        bool keep = chance(4) == 0;
        feed(text, strings, count, keep, 0, &out, &met);
        size_t end = strlen(text), wanted;
        int best = plain(text, strings, count, &end);
        wanted = best < 0 || keep ? end : end - strings[best].bytes;
        good = out.length == wanted && !memcmp(out.data ? out.data : "", text, wanted) && (best < 0) == (met < 0);
        if (best >= 0 && met >= 0) good = good && strings[best].bytes == strings[met].bytes;
        stopped += met >= 0;
        if (!nmk_utf8_valid(out.data ? out.data : "", out.length)) leaked = true;
        nmk_buf_free(&out);
    }
    check(good && stopped > 1000, "random texts give what a plain search gives", "%d stopped", stopped);
    check(!leaked, "no half characters come out", "one did");
}

static void held_back(void) {
    nmk_text strings[] = {{"</answer>", 9}};
    nmk_stop *s = nmk_stop_new(strings, 1, false);
    nmk_buf out = {0};
    nmk_stop_add(s, "x </ans", 7, true, &out);
    same("what may become a stop string is held back", &out, "x ");
    nmk_stop_add(s, "wers", 4, true, &out);
    same("it comes out once it cannot", &out, "</answers");
    nmk_stop_add(s, " </", 3, true, &out);
    nmk_buf_free(&out);
    nmk_stop_end(s, &out);
    same("it comes out at the end", &out, "</");
    nmk_stop_free(s);

    s = nmk_stop_new(strings, 1, false);
    bool stopped = nmk_stop_add(s, "a</answer>b", 11, false, &out);
    check(!stopped, "before min_tokens a stop string is text", "it stopped");
    same("and all of it comes out", &out, "a</answer>b");
    stopped = nmk_stop_add(s, "</answ", 6, false, &out) || !nmk_stop_add(s, "er>c", 4, true, &out);
    check(!stopped, "one that is complete after min_tokens stops", "it did not");
    same("what it held is gone", &out, "");
    stopped = nmk_stop_add(s, "more", 4, true, &out);
    check(stopped && !out.length, "nothing follows a stop", "something did");
    nmk_stop_end(s, &out);
    same("not even at the end", &out, "");
    nmk_stop_free(s);

    s = nmk_stop_new(strings, 1, false);
    nmk_stop_add(s, "a</answ", 7, true, &out);
    nmk_stop_end(s, &out);
    same("a text that ends", &out, "a</answ");
    stopped = nmk_stop_add(s, "er>b</answer>", 13, true, &out);
    check(stopped, "another one has the strings again", "it has not");
    same("but none that began before it", &out, "er>b");
    nmk_stop_free(s);

    s = nmk_stop_new(NULL, 0, false);
    nmk_stop_add(s, "all", 3, true, &out);
    same("without strings all comes out at once", &out, "all");
    nmk_stop_free(s);
}

/* A text that begins the string again at every byte. */
static void long_text(void) {
    enum { BYTES = 8 << 20 };
    char *text = xmalloc(BYTES), *word = xmalloc(4096);
    memset(text, 'a', BYTES);
    memset(word, 'a', 4096);
    word[4095] = 'b';
    nmk_text strings[] = {{word, 4096}};
    nmk_stop *s = nmk_stop_new(strings, 1, false);
    nmk_buf out = {0};
    uint64_t start = nmk_now_ns();
    for (size_t i = 0; i < BYTES; i += 1024) nmk_stop_add(s, text + i, 1024, true, &out);
    double seconds = (double)(nmk_now_ns() - start) * 1e-9;
    check(out.length == BYTES - 4095 && seconds < time_limit(5), "the worst text takes linear time", "%g s", seconds);
    nmk_buf_free(&out);
    nmk_stop_free(s);
    free(text);
    free(word);
}

int main(void) {
    literal("one string", "hello END world", STRINGS("END"), false, "hello ", 0);
    literal("kept in the text", "hello END world", STRINGS("END"), true, "hello END", 0);
    literal("not there", "hello EN", STRINGS("END"), false, "hello EN", -1);
    literal("at the very beginning", "END", STRINGS("END"), false, "", 0);
    literal("a beginning that restarts", "aabaaab!", STRINGS("aaab"), false, "aab", 0);
    literal("the first complete one counts", "abcd", STRINGS("abcd", "bc"), false, "a", 1);
    literal("of two that end together the longest", "xabc", STRINGS("c", "abc"), false, "x", 1);
    literal("characters of several bytes", "caf\xc3\xa9 \xf0\x9f\x98\x80!", STRINGS("\xf0\x9f\x98\x80"), false,
            "caf\xc3\xa9 ", 0);
    literal("newlines", "one\n\ntwo", STRINGS("\n\n"), false, "one", 0);
    held_back();
    random_texts();
    long_text();
    return failures != 0;
}
