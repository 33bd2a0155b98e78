#include "progress.h"

#include <string.h>

#include "util.h"

enum { BAR_CHARS = 30, LINE_PERCENT = 10 };

static const uint64_t SECOND_NS = 1000000000, REDRAW_NS = 100000000;

void nmk_bar_text(char *text, size_t size, uint64_t done, uint64_t total, double seconds) {
    int percent = total ? (int)((double)done / (double)total * 100) : 100;
    int n = snprintf(text, size, "%d %%, %.1f of %.1f GiB", percent, (double)done / 0x1p30, (double)total / 0x1p30);
    if (!done || seconds <= 0 || n < 0 || (size_t)n >= size) return;
    double rate = (double)done / seconds;
    int left = (int)((double)(total - done) / rate + 0.5);
    if (done == total)
        snprintf(text + n, size - (size_t)n, ", %.2f GB/s, %.1f s", rate / 1e9, seconds);
    else
        snprintf(text + n, size - (size_t)n, ", %.2f GB/s, %d:%02d left", rate / 1e9, left / 60, left % 60);
}

static void draw(nmk_bar *b, uint64_t done, uint64_t total, const char *text) {
    char cells[BAR_CHARS + 1];
    int full = total ? (int)((double)done / (double)total * BAR_CHARS) : BAR_CHARS;
    memset(cells, ' ', BAR_CHARS);
    memset(cells, '=', (size_t)full);
    cells[BAR_CHARS] = 0;
    /* to the line's end: the text may have become shorter */
    fprintf(b->terminal, "\rweights [%s] %s\033[K%s", cells, text, done == total ? "\n" : "");
    fflush(b->terminal);
    b->open = done != total;
}

static void show_weights(nmk_bar *b, uint64_t done, uint64_t total) {
    char text[128];
    uint64_t now = nmk_now_ns();
    int percent = total ? (int)((double)done / (double)total * 100) : 100;
    if (b->terminal ? done != total && now - b->shown_ns < REDRAW_NS
                    : (percent - b->shown_percent < LINE_PERCENT || now - b->shown_ns < SECOND_NS) &&
                          now - b->shown_ns < 5 * SECOND_NS)
        return;
    nmk_bar_text(text, sizeof text, done, total, 1e-9 * (double)(now - b->start_ns));
    if (b->terminal) {
        draw(b, done, total, text);
    } else {
        char line[160];
        snprintf(line, sizeof line, "weights: %s", text);
        b->say(b->user, line);
    }
    b->shown_ns = now, b->shown_percent = percent;
}

/* On a terminal a line that ends in "..." stays open, and the next one replaces it. */
static void say(nmk_bar *b, const char *line) {
    if (!b->terminal) {
        b->say(b->user, line);
        return;
    }
    size_t n = strlen(line);
    b->open = n > 3 && !strcmp(line + n - 3, "...");
    fprintf(b->terminal, "\r%s\033[K%s", line, b->open ? "" : "\n");
    fflush(b->terminal);
}

void nmk_bar_end(nmk_bar *b) {
    if (b->open) fputs("\n", b->terminal), fflush(b->terminal);
    b->open = false;
}

void nmk_bar_show(void *bar, nmk_phase phase, uint64_t done, uint64_t total) {
    nmk_bar *b = bar;
    char line[64];
    switch (phase) {
    case NMK_PHASE_COMPILE:
        if (!done) b->start_ns = nmk_now_ns();
        snprintf(line, sizeof line, "kernel: compiled in %.1f s", 1e-9 * (double)(nmk_now_ns() - b->start_ns));
        say(b, done ? line : "kernel: compiling with NVRTC ...");
        break;
    case NMK_PHASE_CACHED: say(b, "kernel: compiled before, from the cache"); break;
    case NMK_PHASE_LOAD: /* a blink */
        if (!b->terminal) break;
        fputs(done ? "\r\033[K" : "\rkernel: loading ...\033[K", b->terminal), fflush(b->terminal);
        b->open = !done;
        break;
    case NMK_PHASE_WEIGHTS:
        if (!b->shown_ns || !done) b->start_ns = b->shown_ns = nmk_now_ns(), b->shown_percent = 0;
        if (done) show_weights(b, done, total);
        break;
    }
}
