/* Fuzzers: what reads input of others, fed with mutations of good and of hostile inputs, under ASan and UBSan.
 *
 * A target is one reader: seeds to begin with, words of its language, and a function that takes one input and holds
 * what it got against what must be true.  The core (fuzz.c) makes the inputs and keeps those that reach new code; it
 * runs them in a process of its own, so that a crash, a leak, memory beyond bounds or a second of work leaves the
 * input behind: build/fuzz/found/TARGET-..., which `build/fuzz/fuzz TARGET FILE` runs again. */
#ifndef NMK_TESTS_FUZZ_H
#define NMK_TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name;
    void (*seeds)(void);                         /* calls fuzz_seed and fuzz_words; once, before anything else */
    void (*open)(void);                          /* NULL: nothing; in the process that runs inputs */
    void (*run)(const char *data, size_t bytes); /* data[bytes] is 0, and what lies behind it is poisoned */
    size_t max_bytes;                            /* of an input that is made; 0: 8 KiB.  Seeds may be longer */
    int limit_ms;                                /* of processor time for one input; 0: 1 s */
} fuzz_target;

/* Each in a file of its name, or with others of its kind. */
#define FUZZ_TARGETS \
    X(checkpoint)    \
    X(config)        \
    X(connection)    \
    X(gbnf)          \
    X(http)          \
    X(init)          \
    X(json)          \
    X(ops)           \
    X(parse)         \
    X(regex)         \
    X(request)       \
    X(schema)        \
    X(serve)         \
    X(spec)          \
    X(template)      \
    X(text)          \
    X(tokenizer)     \
    X(variant)
#define X(name) extern const fuzz_target fuzz_##name;
FUZZ_TARGETS
#undef X

/* ---- for seeds ---- */

void fuzz_seed(const void *data, size_t bytes);
void fuzz_seed_text(const char *text);
void fuzz_seed_files(const char *pattern); /* as the shell has it; at least one */
void fuzz_word(const char *text);
void fuzz_words_of(const char *pattern); /* short texts in quotes in these sources */

/* ---- for runs ---- */

/* Something that must be true is not: as good as a crash. */
void fuzz_wrong(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* Something new was reached that no instrumented code shows: what a program said, say. */
void fuzz_feature(const char *text);

/* A number below n that depends on nothing but the input. */
uint32_t fuzz_below(uint32_t n);

/* A folder of this process alone. */
const char *fuzz_folder(void);
void fuzz_write(const char *name, const void *data, size_t bytes); /* a file there; name may hold one slash */

/* Inputs of several files: each begins behind a line "%%%% NAME".  Of the first `count` names those that are there are
 * written into the folder, the others removed; what comes before the first such line is the first name's. */
void fuzz_write_parts(const char *data, size_t bytes, const char *const *names, int count);

#endif
