/* For the tests of loading: files in a directory of their own. */
#ifndef NMK_TESTS_WEIGHTS_HELPER_H
#define NMK_TESTS_WEIGHTS_HELPER_H

#include <dirent.h>
#include <unistd.h>

#include "check.h"

static char test_dir[] = "/tmp/nmk-test-XXXXXX";

__attribute__((unused)) static void make_dir(void) {
    if (!mkdtemp(test_dir)) perror(test_dir), exit(2);
}

__attribute__((unused)) static void clear_dir(void) {
    DIR *d = opendir(test_dir);
    for (struct dirent *f; d && (f = readdir(d));) {
        char *path = xasprintf("%s/%s", test_dir, f->d_name);
        unlink(path);
        free(path);
    }
    if (d) closedir(d);
}

__attribute__((unused)) static void write_file(const char *name, const void *data, size_t bytes) {
    char *path = xasprintf("%s/%s", test_dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, bytes, f) != bytes || fclose(f)) perror(path), exit(2);
    free(path);
}

/* The message with every mention of the directory written as DIR. */
__attribute__((unused)) static const char *in_dir(const char *text) {
    static char out[2048];
    size_t n = 0, skip = strlen(test_dir);
    for (const char *p = text; *p && n + 4 < sizeof out;) {
        if (strncmp(p, test_dir, skip) == 0) {
            memcpy(out + n, "DIR", 3);
            n += 3, p += skip;
        } else {
            out[n++] = *p++;
        }
    }
    out[n] = 0;
    return out;
}

/* Expects a failure with exactly this message. */
__attribute__((unused)) static void check_refused(const char *name, int rc, const nmk_err *e, const char *expected) {
    const char *got = rc ? in_dir(e->text) : "(accepted)";
    check(rc == -1 && strcmp(got, expected) == 0, name, "expected\n%s\n  found\n%s", expected, got);
}

#endif
