/* Citations: what is taken out and what stays, however the text was cut. */
#include "cite.h"

#include <time.h>

#include "server/helper.h"

/* Cut into pieces of `step` bytes; 0: random ones. */
static void sieved(const char *text, size_t bytes, size_t step, nmk_buf *out) {
    nmk_cite c = {0};
    nmk_buf_puts(out, "");
    for (size_t at = 0, n; at < bytes; at += n) {
        n = step ? step : 1 + chance(9);
        if (n > bytes - at) n = bytes - at;
        nmk_cite_add(&c, text + at, n, out);
    }
    nmk_cite_end(&c, out);
    nmk_cite_free(&c);
}

static void becomes(const char *name, const char *text, const char *wanted) {
    bool good = true;
    nmk_buf out = {0};
    for (size_t step = 0; step <= strlen(text) && good; step++) {
        out.length = 0;
        sieved(text, strlen(text), step, &out);
        good = !strcmp(out.data, wanted);
    }
    check(good, name, "got\n  %s\nwanted\n  %s", out.data, wanted);
    nmk_buf_free(&out);
}

static void held_back(void) {
    nmk_cite c = {0};
    nmk_buf out = {0};
    nmk_cite_add(&c, "a < b <c", 8, &out);
    same("only what may be a tag is held back", &out, "a < b ");
    nmk_cite_add(&c, "ount> <co>x", 11, &out);
    same("it goes on when it is none", &out, "<count> ");
    nmk_cite_add(&c, "y</co: 0:[", 10, &out);
    check(!out.length, "what is cited waits for its end", "it does not");
    nmk_cite_add(&c, "1]>z", 4, &out);
    same("and comes with it", &out, "xyz");
    nmk_cite_free(&c);
}

static void far(void) {
    nmk_buf text = {0}, out = {0};
    nmk_buf_puts(&text, "<co>");
    for (int i = 0; i < NMK_CITE_BYTES - 4; i++) nmk_buf_puts(&text, "x");
    nmk_buf_puts(&text, "</co: 0:[0]>");
    for (size_t step = 1; step < 40; step += 13) sieved(text.data, text.length, step, &out);
    check(out.length == 3 * (NMK_CITE_BYTES - 4) && out.data[0] == 'x', "the longest citation", "%zu bytes",
          out.length);
    nmk_buf_free(&text), nmk_buf_free(&out);
    nmk_buf_puts(&text, "<co>");
    for (int i = 0; i < NMK_CITE_BYTES; i++) nmk_buf_puts(&text, "x");
    nmk_buf_puts(&text, "</co: 0:[0]>");
    for (size_t step = 0; step < 5000; step += 1700) sieved(text.data, text.length, step, &out);
    check(out.length == 3 * (NMK_CITE_BYTES + 4) && !strncmp(out.data, "<co>x", 5), "a longer one begins with a text",
          "%zu bytes", out.length);
    nmk_buf_free(&text), nmk_buf_free(&out);
}

static void anything(void) {
    static const char *const parts[] = {"<co>", "</co: 0:[1,2]>", "</co: ",  "<", "</", "0:[1]", ">", "a",
                                        "<co",  "</co>",          "\xc3\xa9"};
    bool good = true;
    for (int round = 0; round < 20000 && good; round++) {
        nmk_buf text = {0}, one = {0}, cut = {0};
        nmk_buf_puts(&text, "");
        for (unsigned n = chance(14); n; n--) nmk_buf_puts(&text, parts[chance(sizeof parts / sizeof *parts)]);
        sieved(text.data, text.length, text.length + 1, &one);
        sieved(text.data, text.length, 0, &cut);
        good =
            one.length == cut.length && !memcmp(one.data, cut.data, one.length) && !strstr(one.data, "</co: 0:[1,2]>");
        if (!good) printf("# %s\n# %s\n# %s\n", text.data, one.data, cut.data);
        nmk_buf_free(&text), nmk_buf_free(&one), nmk_buf_free(&cut);
    }
    check(good, "any text, however cut", "it differs, or an end is left");

    static const char *const many[] = {"<co>", "</co: ", "<", "</co: 0:[1]>", "<co>x</co: 0:[1]>"};
    clock_t start = clock();
    size_t left = 0;
    for (size_t i = 0; i < sizeof many / sizeof *many; i++) {
        nmk_buf text = {0}, out = {0};
        while (text.length < 1 << 20) nmk_buf_puts(&text, many[i]);
        sieved(text.data, text.length, text.length, &out);
        sieved(text.data, text.length, 3, &out);
        left += out.length;
        nmk_buf_free(&text), nmk_buf_free(&out);
    }
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    check(left > 6 << 20 && seconds < time_limit(5), "ten megabytes of tags take linear time", "%g s", seconds);
}

int main(void) {
    becomes("a citation", "It is <co>42</co: 0:[1]>.", "It is 42.");
    becomes("of several documents", "<co>a b</co: 0:[1,2],1:[0]> <co>c</co: 2:[]>", "a b c");
    becomes("of nothing", "<co></co: 0:[0]>", "");
    becomes("of the older form's end", "<co>x</co: 2,1>", "x");
    becomes("no citation", "a <b> </b> <co", "a <b> </b> <co");
    becomes("a tag of XML", "<co>Acme</co><co>B</co>", "<co>Acme</co><co>B</co>");
    becomes("two beginnings", "<co>a <co>b</co: 0:[0]>", "<co>a b");
    becomes("two ends", "<co>a</co: 0:[0]></co: 0:[0]>b", "ab");
    becomes("an end alone", "a</co: 0:[0]>b", "ab");
    becomes("an end that is none", "<co>a</co: 0:{0}>b", "<co>a</co: 0:{0}>b");
    becomes("an end that never comes", "<co>a</co: 0:[0", "<co>a</co: 0:[0");
    becomes("a beginning that never ends", "a<co>b", "a<co>b");
    becomes("characters of several bytes", "\xc3\xa9<co>\xf0\x9f\x98\x80</co: 0:[0]>", "\xc3\xa9\xf0\x9f\x98\x80");
    becomes("a tag within a tag", "<<co>a</co: <co>b</co: 0:[1]>", "<<co>a</co: b");
    held_back();
    far();
    anything();
    return failures != 0;
}
