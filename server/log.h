/* The log: one line an event on stderr, as text or as a JSON object.
 *
 *   2026-11-29T21:10:43.123Z info request finished id=12 status=200 ttft_ms=41.2
 *   {"time":"2026-11-29T21:10:43.123Z","level":"info","message":"request finished","id":12,"status":200,"ttft_ms":41.2}
 *
 * An event has a fixed message and fields; what differs goes into fields.  No field ever holds a prompt, an answer or a
 * key.  A line is one write, so lines of several threads do not mix.  A field that does not fit is left out.  A line
 * that the pipe or terminal has no room for is lost, and counted in a later one. */
#ifndef NMK_SERVER_LOG_H
#define NMK_SERVER_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { NMK_LOG_DEBUG, NMK_LOG_INFO, NMK_LOG_WARNING, NMK_LOG_ERROR } nmk_log_level;

/* Before other threads start; by default text from info on.  fd: where lines go. */
void nmk_log_setup(nmk_log_level least, bool json, int fd);

/* "debug" and so on; false: no level. */
bool nmk_log_level_read(const char *text, nmk_log_level *level);

typedef struct {
    bool on; /* the level is logged */
    size_t length;
    char text[1900];
} nmk_log_line;

/* nmk_log_begin, fields, nmk_log_end.  message: printable ASCII without quotes or backslashes. */
void nmk_log_begin(nmk_log_line *line, nmk_log_level level, const char *message);
void nmk_log_text(nmk_log_line *line, const char *key, const char *value); /* any bytes; NULL: the field is left out */
void nmk_log_int(nmk_log_line *line, const char *key, int64_t value);
void nmk_log_number(nmk_log_line *line, const char *key, double value); /* three decimals */
void nmk_log_end(nmk_log_line *line);

/* An event without fields.  May be called in a signal handler. */
void nmk_log(nmk_log_level level, const char *message);

#endif
