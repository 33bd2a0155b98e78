/* One line of result a case, as tests/run counts them. */
#ifndef NMK_TESTS_CHECK_H
#define NMK_TESTS_CHECK_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util.h"

static int failures;

/* How long something may take, or is waited for, in whatever unit: so long on a machine that does nothing else, and
 * NMK_SLOW times as long under sanitizers and beside other work. */
__attribute__((unused)) static int time_limit(int time) {
    const char *slow = getenv("NMK_SLOW");
    return slow && atoi(slow) > 1 ? time * atoi(slow) : time;
}

/* The same of milliseconds, as the clock has it. */
__attribute__((unused)) static uint64_t time_limit_ns(int ms) { return (uint64_t)time_limit(ms) * 1000000; }

/* Where nothing can be waited for: long enough for what is to have happened by then. */
__attribute__((unused)) static void pause_ms(int ms) { usleep((useconds_t)time_limit(ms) * 1000); }

/* `why` is for the case that it is not good, and what it shows is read after the condition was: often that waits for
 * what changes it. */
#define check(condition, ...)            \
    ({                                   \
        const bool good_ = (condition);  \
        report_case(good_, __VA_ARGS__); \
    })
__attribute__((format(printf, 3, 4), unused)) static bool report_case(bool good, const char *name, const char *why,
                                                                      ...) {
    va_list args;
    va_start(args, why);
    printf("%s - %s", good ? "ok" : "not ok", name);
    if (!good) printf(": "), vprintf(why, args), failures++;
    printf("\n");
    fflush(stdout);
    va_end(args);
    return good;
}

/* A call failed, and for the reason expected. */
__attribute__((unused)) static void check_message(int rc, const nmk_err *e, const char *part, const char *name) {
    check(rc == -1 && strstr(e->text, part), name, "rc %d, message \"%s\", expected \"%s\" in it", rc, e->text, part);
}

#endif
