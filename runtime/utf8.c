#include "utf8.h"

#include <string.h>

int nmk_utf8_scan(const char *p, size_t n) {
    const unsigned char *s = (const unsigned char *)p;
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xc2 || s[0] > 0xf4) return -1;
    size_t length = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    /* The second byte's range excludes overlong forms, surrogates and what lies above U+10FFFF. */
    unsigned low = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
    unsigned high = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
    for (size_t i = 1; i < length; i++) {
        if (i == n) return 0;
        if (s[i] < low || s[i] > high) return -(int)i;
        low = 0x80, high = 0xbf;
    }
    return (int)length;
}

bool nmk_utf8_valid(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes;) {
        if ((unsigned char)text[i] < 0x80) {
            i++;
            continue;
        }
        int length = nmk_utf8_scan(text + i, bytes - i);
        if (length <= 0) return false;
        i += (size_t)length;
    }
    return true;
}

uint32_t nmk_utf8_at(const char *p) {
    const unsigned char *s = (const unsigned char *)p;
    if (s[0] < 0x80) return s[0];
    if (s[0] < 0xe0) return (s[0] & 31u) << 6 | (s[1] & 63u);
    if (s[0] < 0xf0) return (s[0] & 15u) << 12 | (s[1] & 63u) << 6 | (s[2] & 63u);
    return (s[0] & 7u) << 18 | (s[1] & 63u) << 12 | (s[2] & 63u) << 6 | (s[3] & 63u);
}

const char *nmk_utf8_before(const char *p) {
    do p--;
    while (((unsigned char)*p & 0xc0) == 0x80);
    return p;
}

static void replacement(nmk_buf *out) { nmk_buf_add(out, "\xef\xbf\xbd", 3); }

void nmk_utf8_add(nmk_utf8 *u, const char *data, size_t bytes, nmk_buf *out) {
    nmk_buf_reserve(out, bytes);
    for (size_t i = 0; i < bytes;) {
        if (!u->count) {
            size_t end = i;
            while (end < bytes && (unsigned char)data[end] < 0x80) end++;
            nmk_buf_add(out, data + i, end - i);
            i = end;
            if (i == bytes) return;
        }
        u->held[u->count++] = data[i++];
        while (u->count) {
            int length = nmk_utf8_scan(u->held, u->count);
            if (!length) break;
            unsigned used = (unsigned)(length > 0 ? length : -length);
            if (length > 0)
                nmk_buf_add(out, u->held, used);
            else
                replacement(out);
            u->count -= used;
            memmove(u->held, u->held + used, u->count);
        }
    }
}

void nmk_utf8_end(nmk_utf8 *u, nmk_buf *out) {
    if (u->count) replacement(out);
    u->count = 0;
}
