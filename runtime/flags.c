#include "flags.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

void nmk_flags_print(const nmk_flags *flags, FILE *f, int width) {
    for (int i = 0; i < flags->count; i++) {
        const nmk_flag *flag = &flags->flag[i];
        char left[64];
        snprintf(left, sizeof left, "%s %s", flag->name, flag->value ? flag->value : "");
        fprintf(f, "  %-*s %s\n", width, left, flag->text);
    }
}

/* Insertions, deletions and exchanges that make one short word of another: for "the nearest is ...". */
static int distance(const char *a, const char *b) {
    enum { MOST = 40 };
    int row[MOST + 1], n = (int)strlen(b);
    if (n > MOST) return INT_MAX;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 0; a[i]; i++) {
        int corner = row[0];
        row[0] = i + 1;
        for (int j = 0; j < n; j++) {
            int change = corner + (a[i] != b[j]), drop = row[j + 1] + 1, add = row[j] + 1;
            corner = row[j + 1];
            row[j + 1] = change < drop ? change : drop;
            if (add < row[j + 1]) row[j + 1] = add;
        }
    }
    return row[n];
}

static int unknown_flag(const nmk_flags *flags, const char *name) {
    int best = 0, least = INT_MAX;
    for (int i = 0; i < flags->count; i++) {
        int d = distance(name, flags->flag[i].name);
        if (d < least) least = d, best = i;
    }
    if (*name != '-')
        return fprintf(stderr, "%s: %s: a flag was expected; --help lists them\n", flags->program, name), 2;
    return fprintf(stderr, "%s: unknown flag %s; the nearest is %s\n", flags->program, name, flags->flag[best].name), 2;
}

int nmk_flags_read(const nmk_flags *flags, int argc, char **argv,
                   int (*set)(void *user, const char *name, const char *value), void *user) {
    for (int i = 1; i < argc; i++) {
        char name[64];
        const char *equal = strchr(argv[i], '=');
        size_t length = equal ? (size_t)(equal - argv[i]) : strlen(argv[i]);
        snprintf(name, sizeof name, "%.*s", length < sizeof name ? (int)length : (int)sizeof name - 1, argv[i]);
        int f = 0;
        while (f < flags->count && strcmp(name, flags->flag[f].name)) f++;
        for (int r = 0; r < flags->refused_count; r++)
            if (!strcmp(name, flags->refused[r].name))
                return fprintf(stderr, "%s: %s is not a flag here: %s\n", flags->program, name, flags->refused[r].text),
                       2;
        if (f == flags->count) return unknown_flag(flags, name);
        const nmk_flag *flag = &flags->flag[f];
        const char *value = equal ? equal + 1 : NULL;
        if (!flag->value && value) return fprintf(stderr, "%s: %s takes no value\n", flags->program, name), 2;
        if (flag->value && !value && ++i == argc)
            return fprintf(stderr, "%s: %s needs a value: %s\n", flags->program, name, flag->value), 2;
        if (set(user, name, flag->value && !value ? argv[i] : value)) return 2;
    }
    return 0;
}

int nmk_flag_bad(const nmk_flags *flags, const char *name, const char *value, const char *expected) {
    return fprintf(stderr, "%s: %s %s: expected %s\n", flags->program, name, value, expected), 2;
}

bool nmk_flag_int(const char *text, int64_t low, int64_t high, const char **end, int64_t *value) {
    char *stop;
    errno = 0;
    long long v = strtoll(text, &stop, 10);
    if (errno || stop == text || isspace((unsigned char)*text) || v < low || v > high) return false;
    if (!end && *stop) return false;
    if (end) *end = stop;
    *value = v;
    return true;
}
