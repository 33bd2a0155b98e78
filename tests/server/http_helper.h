/* For the tests of server/http*.c: one line of result a case, and a client that sends exactly the bytes it is told. */
#ifndef NMK_TESTS_HTTP_HELPER_H
#define NMK_TESTS_HTTP_HELPER_H

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"

/* Text in a failure: control characters shown. */
__attribute__((unused)) static const char *shown(const char *s) {
    static char text[4][3000];
    static int next;
    char *t = text[next = (next + 1) % 4];
    size_t n = 0;
    for (; *s && n < sizeof text[0] - 8; s++) {
        if (*s == '\r')
            n += (size_t)sprintf(t + n, "\\r");
        else if (*s == '\n')
            n += (size_t)sprintf(t + n, "\\n");
        else if ((unsigned char)*s < 0x20)
            n += (size_t)sprintf(t + n, "\\x%02x", (unsigned char)*s);
        else
            t[n++] = *s;
    }
    t[n] = 0;
    return t;
}

/* xorshift: the same cases in every run of a seed. */
static uint64_t random_state = 0x9e3779b97f4a7c15;
__attribute__((unused)) static uint64_t random_next(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}
__attribute__((unused)) static size_t random_below(size_t n) { return n ? (size_t)(random_next() % n) : 0; }

/* What mutations start from. */
static const char *const seeds[] = {
    "GET /v1/models HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n",
    "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n{\"model\":\"toy\"}\r\n",
    "POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nT: 1\r\n\r\n",
    "POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    "OPTIONS /echo HTTP/1.1\r\nHost: a\r\nOrigin: http://x\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    "HEAD /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "GET http://a/v1/models?x=%20 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "GET /stream HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
    "\r\nGET /v1/models HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
};
enum { SEEDS = sizeof seeds / sizeof *seeds };

/* A seed, or two of them, with a few bytes changed, cut, doubled or made up. */
__attribute__((unused)) static void mutate(nmk_buf *b) {
    static const char *const words[] = {"\r\n",
                                        "\r",
                                        "\n",
                                        ":",
                                        " ",
                                        "\t",
                                        "\0",
                                        "\xff",
                                        "%00",
                                        "Content-Length: 5\r\n",
                                        "0\r\n",
                                        "-1",
                                        "chunked",
                                        "HTTP/1.",
                                        "Transfer-Encoding: chunked\r\n",
                                        "99999999999999999999",
                                        "ffffffffffffffff",
                                        "Host: b\r\n"};
    b->length = 0;
    for (size_t n = 1 + random_below(2); n; n--) nmk_buf_puts(b, seeds[random_below(SEEDS)]);
    for (size_t n = random_below(6); n && b->length; n--) {
        size_t at = random_below(b->length), len = random_below(b->length - at < 20 ? b->length - at : 20);
        nmk_buf rest = {0};
        switch (random_below(5)) {
        case 0: b->data[at] = (char)random_next(); break;
        case 1: memmove(b->data + at, b->data + at + len, b->length - at - len), b->length -= len; break;
        case 2: b->length = at; break;
        default: {
            nmk_buf_add(&rest, b->data + at, b->length - at);
            b->length = at;
            const char *word = words[random_below(sizeof words / sizeof *words)];
            if (random_below(2))
                nmk_buf_add(b, word, *word ? strlen(word) : 1);
            else
                nmk_buf_add(b, rest.data, len);
            nmk_buf_add(b, rest.data, rest.length);
        }
        }
        nmk_buf_free(&rest);
    }
    nmk_buf_add(b, "", 0);
}

/* ---------------------------------------------------------------- a client */

__attribute__((unused)) static int dial_with(int port, int receive_buffer) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (receive_buffer) setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd, (struct sockaddr *)&a, sizeof a)) {
        printf("not ok - connect: %s\n", strerror(errno));
        exit(1);
    }
    return fd;
}
__attribute__((unused)) static int dial(int port) { return dial_with(port, 0); }

__attribute__((unused)) static bool put(int fd, const char *data, size_t n) {
    while (n) {
        ssize_t did = send(fd, data, n, MSG_NOSIGNAL);
        if (did <= 0) return false;
        data += did, n -= (size_t)did;
    }
    return true;
}
__attribute__((unused)) static bool puts_to(int fd, const char *s) { return put(fd, s, strlen(s)); }

/* Adds what comes within ms; 1 something, 0 nothing in that time, -1 the end. */
__attribute__((unused)) static int get_some(int fd, nmk_buf *b, int ms) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    char data[16384];
    if (poll(&p, 1, ms) <= 0) return 0;
    ssize_t n = recv(fd, data, sizeof data, 0);
    if (n <= 0) return -1;
    nmk_buf_add(b, data, (size_t)n);
    return 1;
}

/* Reads until the text is there; false: the end or time_limit(ms) came first. */
__attribute__((unused)) static bool get_until(int fd, nmk_buf *b, const char *text, int ms) {
    uint64_t end = nmk_now_ns() + time_limit_ns(ms);
    while (!b->data || !strstr(b->data, text)) {
        uint64_t now = nmk_now_ns();
        if (now >= end || get_some(fd, b, (int)((end - now) / 1000000) + 1) < 0) return false;
    }
    return true;
}

/* Reads to the end of the connection; false: it did not come within time_limit(ms). */
__attribute__((unused)) static bool get_all(int fd, nmk_buf *b, int ms) {
    uint64_t end = nmk_now_ns() + time_limit_ns(ms);
    for (uint64_t now; (now = nmk_now_ns()) < end;)
        if (get_some(fd, b, (int)((end - now) / 1000000) + 1) < 0) return true;
    return false;
}

__attribute__((unused)) static int count_of(const nmk_buf *b, const char *text) {
    int n = 0;
    const char *at = b->data,
               *end = b->data + b->length; /* not strstr: under the sanitizer it measures the rest each time */
    for (; at && (at = memmem(at, (size_t)(end - at), text, strlen(text))); at += strlen(text)) n++;
    return n;
}

#endif
