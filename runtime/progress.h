/* Shows what opening an engine is busy with: on a terminal as a bar, elsewhere as lines, rare enough for a log. */
#ifndef NMK_PROGRESS_H
#define NMK_PROGRESS_H

#include <stdio.h>

#include "nmk.h"

/* Zeroed, with one of the two: terminal, or say, which gets a line without its end. */
typedef struct {
    FILE *terminal;
    void (*say)(void *user, const char *line);
    void *user;
    /* its own */
    uint64_t start_ns, shown_ns;
    int shown_percent;
    bool open; /* the terminal's last line is not ended */
} nmk_bar;

/* An nmk_options.progress; bar is the nmk_bar.  A line for every 10 % that took a second, and after 5 s without one:
 * what is loaded in a moment says nothing. */
void nmk_bar_show(void *bar, nmk_phase phase, uint64_t done, uint64_t total);

/* After opening, and before anything else is printed.  It may have stopped half-way. */
void nmk_bar_end(nmk_bar *bar);

/* "45 %, 25.6 of 57.0 GiB, 3.21 GB/s, 0:09 left", the last two once there is something to go by. */
void nmk_bar_text(char *text, size_t size, uint64_t done, uint64_t total, double seconds);

#endif
