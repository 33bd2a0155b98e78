/* What every file of the runtime uses: errors as text, memory that does not fail, one growable buffer, one clock. */
#ifndef NMK_UTIL_H
#define NMK_UTIL_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"

/* Writes the message (cut to fit; e may be NULL) and returns -1. */
int nmk_fail(nmk_err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Puts "prefix: " before a message that is there, and returns -1. */
int nmk_fail_in(nmk_err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Abort when there is no memory: nothing here could go on without.  Sizes that input decides are checked before. */
void *xmalloc(size_t bytes);
void *xcalloc(size_t count, size_t bytes);
void *xrealloc(void *p, size_t bytes);
char *xstrdup(const char *s);
char *xasprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Bytes that grow.  Zeroed is empty; data[length] is always 0 once something was added. */
typedef struct {
    char *data;
    size_t length, capacity;
} nmk_buf;

void nmk_buf_reserve(nmk_buf *b, size_t more);
void nmk_buf_add(nmk_buf *b, const void *data, size_t bytes);
void nmk_buf_puts(nmk_buf *b, const char *s);
void nmk_buf_printf(nmk_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void nmk_buf_free(nmk_buf *b); /* leaves it empty */

/* The value of a hexadecimal digit, -1: c is none. */
int nmk_hex_digit(int c);

/* The whole file, NUL-terminated; the caller frees.  0, or -1 with the path and the reason. */
int nmk_file_read(char **data, size_t *bytes, const char *path, size_t max_bytes, nmk_err *e);

/* Memory of this process that is in RAM now, and the most that ever was; 0: the system does not say. */
uint64_t nmk_resident_bytes(uint64_t *most);

/* Nanoseconds of a clock that never goes back. */
uint64_t nmk_now_ns(void);

#endif
