#include "log.h"

#include <math.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "utf8.h"

static struct {
    nmk_log_level least;
    bool json;
    int fd;
} settings = {NMK_LOG_INFO, false, STDERR_FILENO};

static const char *const names[] = {"debug", "info", "warning", "error"};

void nmk_log_setup(nmk_log_level least, bool json, int fd) {
    settings.least = least, settings.json = json, settings.fd = fd;
}

bool nmk_log_level_read(const char *text, nmk_log_level *level) {
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (!strcmp(text, names[i])) return *level = (nmk_log_level)i, true;
    return false;
}

/* ---- bytes of the line ---- */

enum { END_BYTES = 4 }; /* room for "}\n" and a 0 */

/* All of it or nothing. */
static bool add(nmk_log_line *l, const char *bytes, size_t n) {
    if (n > sizeof l->text - END_BYTES - l->length) return false;
    memcpy(l->text + l->length, bytes, n);
    l->length += n;
    return true;
}

static bool puts_to(nmk_log_line *l, const char *s) { return add(l, s, strlen(s)); }

static char *digits(char *to, int value, int count) {
    for (int i = count; i-- > 0; value /= 10) to[i] = (char)('0' + value % 10);
    return to + count;
}

/* "2026-11-29T21:10:43.123Z" and a 0.  By hand: a signal handler may not call the C library's. */
static void stamp(char text[25]) {
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t days = now.tv_sec / 86400, s = now.tv_sec % 86400;
    /* days since 1 March of year 0, in eras of 400 years: the leap day is the last of its year */
    int64_t z = days + 719468, era = z / 146097, of_era = z % 146097;
    int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t of_year = of_era - (365 * year + year / 4 - year / 100), month = (5 * of_year + 2) / 153;
    int64_t day = of_year - (153 * month + 2) / 5 + 1;
    month += month < 10 ? 3 : -9;
    year += era * 400 + (month <= 2);
    char *p = digits(text, (int)year, 4);
    *p++ = '-', p = digits(p, (int)month, 2);
    *p++ = '-', p = digits(p, (int)day, 2);
    *p++ = 'T', p = digits(p, (int)(s / 3600), 2);
    *p++ = ':', p = digits(p, (int)(s / 60 % 60), 2);
    *p++ = ':', p = digits(p, (int)(s % 60), 2);
    *p++ = '.', p = digits(p, (int)(now.tv_nsec / 1000000), 3);
    *p++ = 'Z', *p = 0;
}

/* ---- lines ---- */

void nmk_log_begin(nmk_log_line *l, nmk_log_level level, const char *message) {
    l->on = level >= settings.least, l->length = 0;
    if (!l->on) return;
    char time[25];
    stamp(time);
    puts_to(l, settings.json ? "{\"time\":\"" : "");
    puts_to(l, time);
    puts_to(l, settings.json ? "\",\"level\":\"" : " ");
    puts_to(l, names[level]);
    puts_to(l, settings.json ? "\",\"message\":\"" : " ");
    puts_to(l, message);
    puts_to(l, settings.json ? "\"" : "");
}

/* Quoted and escaped as JSON; what is not UTF-8 becomes U+FFFD. */
static bool add_quoted(nmk_log_line *l, const char *text) {
    bool fits = add(l, "\"", 1);
    for (size_t n = strlen(text); n && fits;) {
        char code[8];
        int bytes = nmk_utf8_scan(text, n);
        if (bytes == 1 && ((unsigned char)*text < 0x20 || *text == '"' || *text == '\\' || *text == 0x7f)) {
            snprintf(code, sizeof code, "\\u%04x", (unsigned char)*text);
            fits = *text == '"' || *text == '\\' ? add(l, (char[]){'\\', *text}, 2) : puts_to(l, code);
        } else {
            fits = bytes > 0 ? add(l, text, (size_t)bytes) : puts_to(l, "\xef\xbf\xbd");
        }
        size_t step = bytes > 0 ? (size_t)bytes : bytes < 0 ? (size_t)-bytes : n;
        text += step, n -= step;
    }
    return add(l, "\"", 1) && fits;
}

static bool plain(const char *text) {
    if (!*text) return false;
    for (; *text; text++)
        if (*text < '!' || *text > '~' || *text == '"' || *text == '=' || *text == '\\') return false;
    return true;
}

/* A field that does not fit leaves no trace of itself. */
static size_t add_key(nmk_log_line *l, const char *key) {
    size_t before = l->length;
    bool fits = settings.json ? puts_to(l, ",\"") && puts_to(l, key) && puts_to(l, "\":")
                              : puts_to(l, " ") && puts_to(l, key) && puts_to(l, "=");
    if (!fits) l->length = before;
    return fits ? before : SIZE_MAX;
}

void nmk_log_text(nmk_log_line *l, const char *key, const char *value) {
    if (!l->on || !value) return;
    size_t before = add_key(l, key);
    if (before == SIZE_MAX) return;
    bool fits = !settings.json && plain(value) ? puts_to(l, value) : add_quoted(l, value);
    if (!fits) l->length = before;
}

static void add_value(nmk_log_line *l, const char *key, const char *value) {
    if (!l->on) return;
    size_t before = add_key(l, key);
    if (before != SIZE_MAX && !puts_to(l, value)) l->length = before;
}

void nmk_log_int(nmk_log_line *l, const char *key, int64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    add_value(l, key, text);
}

void nmk_log_number(nmk_log_line *l, const char *key, double value) {
    char text[64];
    snprintf(text, sizeof text, "%.3f", value);
    add_value(l, key, isfinite(value) && fabs(value) < 1e15 ? text : settings.json ? "null" : "none");
}

static atomic_int lost; /* lines since the last one that was written */

static void put(const char *bytes, size_t n) {
    for (ssize_t did; n && (did = write(settings.fd, bytes, n)) > 0; n -= (size_t)did) bytes += did;
}

/* END_BYTES are kept for this. */
static void close_and_put(nmk_log_line *l) {
    if (settings.json) l->text[l->length++] = '}';
    l->text[l->length++] = '\n';
    put(l->text, l->length);
}

/* Whoever reads the log may stop, and the threads that write it serve everybody: a pipe or terminal without room gets
 * no line, and the next one that fits says how many it lost.  Room is a page, which is more than both lines. */
void nmk_log_end(nmk_log_line *l) {
    struct pollfd room = {.fd = settings.fd, .events = POLLOUT};
    if (!l->on) return;
    if (poll(&room, 1, 0) != 1) {
        atomic_fetch_add(&lost, 1);
        return;
    }
    int count = atomic_exchange(&lost, 0);
    if (count) {
        nmk_log_line more;
        char text[16];
        int width = 1;
        for (int n = count; n >= 10; n /= 10) width++;
        *digits(text, count, width) = 0; /* a signal handler may be here: no snprintf */
        nmk_log_begin(&more, settings.least > NMK_LOG_WARNING ? settings.least : NMK_LOG_WARNING,
                      "log lines were lost, as nobody read them");
        if (more.on) {
            add_value(&more, "lines", text);
            close_and_put(&more);
        }
    }
    close_and_put(l);
}

void nmk_log(nmk_log_level level, const char *message) {
    nmk_log_line line;
    nmk_log_begin(&line, level, message);
    nmk_log_end(&line);
}
