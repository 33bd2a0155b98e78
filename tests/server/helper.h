/* For tests of the server's parts: results, text against text, random numbers, the toy's tokenizer. */
#ifndef NMK_TEST_SERVER_HELPER_H
#define NMK_TEST_SERVER_HELPER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "tokenizer.h"

__attribute__((noreturn, unused)) static void die(const char *why) {
    printf("not ok - set-up: %s\n", why);
    exit(1);
}

/* The buffer holds exactly this text; empties it. */
__attribute__((unused)) static void same(const char *name, nmk_buf *got, const char *wanted) {
    const char *text = got->data ? got->data : "";
    check(got->length == strlen(wanted) && !memcmp(text, wanted, got->length), name, "got\n  %s\nwanted\n  %s", text,
          wanted);
    nmk_buf_free(got);
}

/* Numbers that are the same on every run. */
__attribute__((unused)) static unsigned chance(unsigned below) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (unsigned)(state >> 33) % below;
}

__attribute__((unused)) static nmk_tokenizer *toy(void) {
    nmk_err e;
    nmk_tokenizer *t = NULL;
    if (nmk_tokenizer_load("examples/nmc-toy", &t, &e)) die(e.text);
    return t;
}

#endif
