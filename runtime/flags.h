/* Command-line flags by a table: what nmk-run and nmk-serve have in common.
 *
 * A flag is written --name VALUE or --name=VALUE.  Every mistake is one line on stderr that begins with the program's
 * name and names the flag; functions that can find one return 0, or 2, the exit status for it. */
#ifndef NMK_FLAGS_H
#define NMK_FLAGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
    const char *name, *value, *text; /* value: what to write for it in the help; NULL: the flag takes none */
} nmk_flag;

typedef struct {
    const char *program;
    const nmk_flag *flag;
    int count;
    const nmk_flag *refused; /* flags of programs alike that mean nothing here; text: what to do instead */
    int refused_count;
} nmk_flags;

/* One line a flag, its text from column `width` + 3. */
void nmk_flags_print(const nmk_flags *flags, FILE *f, int width);

/* Gives every flag of the command line to set(); value is NULL for a flag that takes none.  Ends at the first
 * mistake. */
int nmk_flags_read(const nmk_flags *flags, int argc, char **argv,
                   int (*set)(void *user, const char *name, const char *value), void *user);

/* Says that a value is not what was expected; returns 2. */
int nmk_flag_bad(const nmk_flags *flags, const char *name, const char *value, const char *expected);

/* A whole number from low to high.  end: where it stops in the text; NULL: the text must end there. */
bool nmk_flag_int(const char *text, int64_t low, int64_t high, const char **end, int64_t *value);

#endif
