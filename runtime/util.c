#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

int nmk_fail(nmk_err *e, const char *fmt, ...) {
    if (e) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(e->text, sizeof e->text, fmt, args);
        va_end(args);
    }
    return -1;
}

int nmk_fail_in(nmk_err *e, const char *fmt, ...) {
    if (e) {
        nmk_err inner = *e;
        va_list args;
        va_start(args, fmt);
        vsnprintf(e->text, sizeof e->text, fmt, args);
        va_end(args);
        size_t n = strlen(e->text), room = sizeof e->text - n - 1;
        strncat(strncat(e->text, ": ", room), inner.text, room > 2 ? room - 2 : 0);
    }
    return -1;
}

static void *checked(void *p, size_t bytes) {
    if (!p && bytes) {
        fprintf(stderr, "nmk: out of memory (%zu bytes)\n", bytes);
        abort();
    }
    return p;
}

void *xmalloc(size_t bytes) { return checked(malloc(bytes), bytes); }

void *xcalloc(size_t count, size_t bytes) { return checked(calloc(count, bytes), count && bytes); }

void *xrealloc(void *p, size_t bytes) { return checked(realloc(p, bytes), bytes); }

char *xstrdup(const char *s) {
    size_t bytes = strlen(s) + 1;
    return memcpy(xmalloc(bytes), s, bytes);
}

char *xasprintf(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    size_t bytes = n < 0 ? 1 : (size_t)n + 1;
    char *s = xmalloc(bytes);
    s[0] = 0;
    va_start(args, fmt);
    vsnprintf(s, bytes, fmt, args);
    va_end(args);
    return s;
}

void nmk_buf_reserve(nmk_buf *b, size_t more) {
    size_t need = b->length + more + 1;
    if (need <= b->capacity) return;
    size_t capacity = b->capacity ? b->capacity : 64;
    while (capacity < need) capacity *= 2;
    b->data = xrealloc(b->data, capacity);
    b->capacity = capacity;
}

void nmk_buf_add(nmk_buf *b, const void *data, size_t bytes) {
    nmk_buf_reserve(b, bytes);
    if (bytes) memcpy(b->data + b->length, data, bytes);
    b->length += bytes;
    b->data[b->length] = 0;
}

void nmk_buf_puts(nmk_buf *b, const char *s) { nmk_buf_add(b, s, strlen(s)); }

void nmk_buf_printf(nmk_buf *b, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n <= 0) return;
    nmk_buf_reserve(b, (size_t)n);
    va_start(args, fmt);
    vsnprintf(b->data + b->length, (size_t)n + 1, fmt, args);
    va_end(args);
    b->length += (size_t)n;
}

void nmk_buf_free(nmk_buf *b) {
    free(b->data);
    *b = (nmk_buf){0};
}

int nmk_hex_digit(int c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

int nmk_file_read(char **data, size_t *bytes, const char *path, size_t max_bytes, nmk_err *e) {
    int rc = -1;
    char *text = NULL;
    size_t length = 0;
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* not to wait for the other end of a pipe */
    if (fd < 0) {
        nmk_fail(e, "%s: %s", path, strerror(errno));
        goto out;
    }
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        nmk_fail(e, "%s: not a regular file", path);
        goto out;
    }
    if ((uint64_t)st.st_size > max_bytes) {
        nmk_fail(e, "%s: %lld bytes, at most %zu are accepted", path, (long long)st.st_size, max_bytes);
        goto out;
    }
    text = xmalloc((size_t)st.st_size + 1);
    while (length < (size_t)st.st_size) {
        ssize_t n = read(fd, text + length, (size_t)st.st_size - length);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            nmk_fail(e, "%s: %s", path, strerror(errno));
            goto out;
        }
        if (n == 0) break; /* it shrank meanwhile: what is there is the file */
        length += (size_t)n;
    }
    text[length] = 0;
    *data = text, *bytes = length, text = NULL, rc = 0;
out:
    free(text);
    if (fd >= 0) close(fd);
    return rc;
}

uint64_t nmk_resident_bytes(uint64_t *most) {
    char line[128];
    unsigned long long now_kib = 0, most_kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f)) {
        sscanf(line, "VmHWM: %llu", &most_kib);
        sscanf(line, "VmRSS: %llu", &now_kib);
    }
    if (f) fclose(f);
    if (most) *most = (uint64_t)most_kib * 1024;
    return (uint64_t)now_kib * 1024;
}

uint64_t nmk_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
