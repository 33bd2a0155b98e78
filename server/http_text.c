/* What goes into answers as text, and the key that comes in as text. */
#include "http_impl.h"

#include "http.h"
#include "utf8.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

const char *nmk_http_reason(int status) {
    static const struct {
        int status;
        const char *reason;
    } reasons[] = {
        {100, "Continue"},
        {200, "OK"},
        {201, "Created"},
        {202, "Accepted"},
        {204, "No Content"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {409, "Conflict"},
        {411, "Length Required"},
        {413, "Content Too Large"},
        {414, "URI Too Long"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {422, "Unprocessable Content"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {499, "Client Closed Request"},
        {500, "Internal Server Error"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
    };
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (reasons[i].status == status) return reasons[i].reason;
    return "Status";
}

const char *nmk_http_date_field(nmk_http_date *d) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (d->second != now.tv_sec) {
        static const char days[] = "SunMonTueWedThuFriSat", months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
        struct tm t;
        gmtime_r(&now.tv_sec, &t);
        /* Not strftime: the names must not follow the locale. */
        snprintf(d->text, sizeof d->text, "Date: %.3s, %02d %.3s %d %02d:%02d:%02d GMT\r\n", days + 3 * t.tm_wday,
                 t.tm_mday, months + 3 * t.tm_mon, t.tm_year + 1900, t.tm_hour, t.tm_min, t.tm_sec);
        d->second = now.tv_sec;
    }
    return d->text;
}

/* A JSON string; what is no UTF-8 becomes U+FFFD, since the message may quote the request. */
static void quote(nmk_buf *b, const char *s) {
    if (!s) {
        nmk_buf_puts(b, "null");
        return;
    }
    nmk_buf_puts(b, "\"");
    for (size_t left = strlen(s), n; left; s += n, left -= n) {
        unsigned char c = (unsigned char)*s;
        int scan = nmk_utf8_scan(s, left);
        n = scan > 0 ? (size_t)scan : scan < 0 ? (size_t)-scan : left;
        if (scan <= 0)
            nmk_buf_puts(b, "\xef\xbf\xbd");
        else if (c == '"' || c == '\\')
            nmk_buf_printf(b, "\\%c", c);
        else if (c == '\n')
            nmk_buf_puts(b, "\\n");
        else if (c < 0x20 || c == 0x7f)
            nmk_buf_printf(b, "\\u%04x", c);
        else
            nmk_buf_add(b, s, n);
    }
    nmk_buf_puts(b, "\"");
}

static const char *usual_type(int status) {
    switch (status) {
    case 429: return "rate_limit_error";
    case 503: return "service_unavailable_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

void nmk_http_error_json(nmk_buf *b, int status, const char *type, const char *param, const char *code,
                         const char *message) {
    nmk_buf_puts(b, "{\"error\":{\"message\":");
    quote(b, message);
    nmk_buf_puts(b, ",\"type\":");
    quote(b, type ? type : usual_type(status));
    nmk_buf_puts(b, ",\"param\":");
    quote(b, param);
    nmk_buf_puts(b, ",\"code\":");
    quote(b, code);
    nmk_buf_puts(b, "}}");
}

/* Looks at every byte of the given text, whatever the first ones were. */
static bool same(const char *given, size_t n, const char *key) {
    size_t m = strlen(key);
    volatile unsigned char differ = n != m;
    for (size_t i = 0; i < n; i++) differ |= (unsigned char)given[i] ^ (unsigned char)(m ? key[i % m] : 0);
    return !differ;
}

int nmk_http_key(const char *authorization, const char *key, const char *const *keys, unsigned count) {
    if (authorization && !strncasecmp(authorization, "bearer ", 7))
        key = authorization + 7 + strspn(authorization + 7, " ");
    if (!key) return -1;
    size_t n = strlen(key);
    int found = -1;
    for (unsigned i = 0; i < count; i++)
        if (same(key, n, keys[i])) found = (int)i; /* all are compared */
    return n ? found : -1;
}
