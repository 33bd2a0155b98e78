/* The request parser: what it must take, what it must refuse, and that the cuts between the bytes do not matter. */
#define _GNU_SOURCE /* memmem */
#include "http_parse.h"

#include "http_helper.h"

static const nmk_http_limits limits = {2000, 1000};

/* What came of some bytes, as text: one line for each request, then how it ended. */
static void outcome(const char *data, size_t n, size_t (*step)(void), nmk_buf *out) {
    nmk_http_parser p;
    int rc = NMK_HTTP_MORE;
    size_t left = 0;
    nmk_http_parser_init(&p, limits);
    out->length = 0;
    nmk_buf_puts(out, "");
    while (n || rc == NMK_HTTP_HEAD) {
        size_t used;
        if (!left) left = step();
        if (left > n) left = n;
        /* A copy of its own size, so that the sanitizer sees a byte read too many. */
        char *piece = xmalloc(left + 1);
        char *exact = piece + 1;
        memcpy(exact, data, left);
        rc = nmk_http_parse(&p, exact, left, &used);
        free(piece);
        if (used > left) {
            nmk_buf_puts(out, "used more than there was\n");
            break;
        }
        data += used, n -= used, left -= used;
        if (rc == NMK_HTTP_BAD) break;
        if (rc == NMK_HTTP_MORE && left) {
            nmk_buf_puts(out, "wants more but left some\n");
            break;
        }
        if (rc == NMK_HTTP_HEAD) {
            nmk_buf_printf(out, "%s %s?%s%s%s", llhttp_method_name(p.method), p.text.data + p.path,
                           p.text.data + p.query, p.keep_alive ? "" : " close", p.expects_continue ? " expect" : "");
            for (unsigned i = 0; i < p.field_count; i++)
                nmk_buf_printf(out, " [%s=%s]", p.text.data + p.fields[i].name, p.text.data + p.fields[i].value);
        }
        if (rc == NMK_HTTP_DONE) {
            nmk_buf_puts(out, " {");
            nmk_buf_add(out, p.body.data, p.body.length);
            nmk_buf_puts(out, "}\n");
            nmk_http_parser_next(&p);
        }
    }
    if (rc == NMK_HTTP_BAD) nmk_buf_printf(out, "%d %s", p.status, p.why);
    nmk_http_parser_free(&p);
}

static size_t all(void) { return SIZE_MAX; }
static size_t one(void) { return 1; }
static size_t some(void) { return 1 + random_below(random_below(3) ? 6 : 60); }

static void expect_n(const char *name, const char *request, size_t n, const char *expected) {
    nmk_buf whole = {0}, bytes = {0};
    outcome(request, n, all, &whole);
    outcome(request, n, one, &bytes);
    bool good = !strncmp(whole.data, expected, strlen(expected)) && !strcmp(whole.data, bytes.data);
    check(good, name, "expected \"%s\", got \"%s\", byte by byte \"%s\"", shown(expected), shown(whole.data),
          shown(bytes.data));
    nmk_buf_free(&whole);
    nmk_buf_free(&bytes);
}
static void expect(const char *name, const char *request, const char *expected) {
    expect_n(name, request, strlen(request), expected);
}

static void taken(void) {
    expect("GET", "GET /a HTTP/1.1\r\nHost: h\r\n\r\n", "GET /a? [host=h] {}\n");
    expect("names in lower case, values trimmed", "GET / HTTP/1.1\r\nHOST:h\r\nX-Y: \t a b \t\r\nZ:\r\n\r\n",
           "GET /? [host=h] [x-y=a b] [z=] {}\n");
    expect("path decoded, query not", "GET /a%20b%2Fc?d=%20 HTTP/1.1\r\nHost: h\r\n\r\n",
           "GET /a b/c?d=%20 [host=h] {}\n");
    expect("target with scheme and host", "GET http://h:1/a?b HTTP/1.1\r\nHost: h\r\n\r\n", "GET /a?b [host=h] {}\n");
    expect("target with host only", "GET http://h HTTP/1.1\r\nHost: h\r\n\r\n", "GET /? [host=h] {}\n");
    expect("OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", "OPTIONS *? [host=h] {}\n");
    expect("body by length", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
           "POST /? [host=h] [content-length=3] {abc}\n");
    expect("body in chunks",
           "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: Chunked\r\n\r\n"
           "3\r\nabc\r\nA;x=\"y\"\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n",
           "POST /? [host=h] [transfer-encoding=Chunked] {abc0123456789}\n");
    expect("length 0", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
           "POST /? [host=h] [content-length=0] {}\n");
    expect("pipelined",
           "POST /1 HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nxGET /2 HTTP/1.1\r\nHost: h\r\n\r\n\r\n"
           "GET /3 HTTP/1.1\r\nHost: h\r\n\r\n",
           "POST /1? [host=h] [content-length=1] {x}\nGET /2? [host=h] {}\nGET /3? [host=h] {}\n");
    expect("Connection: close", "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
           "GET /? close [host=h] [connection=close] {}\n");
    expect("HTTP/1.0 closes", "GET / HTTP/1.0\r\n\r\n", "GET /? close {}\n");
    expect("HTTP/1.0 kept alive", "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
           "GET /? [connection=keep-alive] {}\n");
    expect("an upgrade is not taken up",
           "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n",
           "GET /? [host=h] [connection=Upgrade] [upgrade=h2c] {}\nGET /? [host=h] {}\n");
    expect("100-continue", "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-Continue\r\nContent-Length: 1\r\n\r\nx",
           "POST /? expect [host=h] [expect=100-Continue] [content-length=1] {x}\n");
    expect("100-continue without a body", "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n\r\n",
           "POST /? [host=h] [expect=100-continue] {}\n");
    expect("incomplete", "GET / HTTP/1.1\r\nHost: h\r\n", "");
}

static void refused(void) {
#define H "POST / HTTP/1.1\r\nHost: h\r\n"
    expect("Content-Length with chunks", H "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 ");
    expect("chunks with Content-Length", H "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", "400 ");
    expect("two lengths", H "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", "400 ");
    expect("the same length twice", H "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", "400 ");
    expect("a list of lengths", H "Content-Length: 3, 3\r\n\r\nabc", "400 ");
    expect("length +3", H "Content-Length: +3\r\n\r\nabc", "400 ");
    expect("length -3", H "Content-Length: -3\r\n\r\nabc", "400 ");
    expect("length 0x3", H "Content-Length: 0x3\r\n\r\nabc", "400 ");
    expect("length 3 a", H "Content-Length: 3 a\r\n\r\nabc", "400 ");
    expect("length without a number", H "Content-Length:\r\n\r\nabc", "400 ");
    expect("length past 64 bits", H "Content-Length: 18446744073709551617\r\n\r\nabc", "400 ");
    expect("length of 64 bits", H "Content-Length: 18446744073709551615\r\n\r\nabc", "413 ");
    expect("space before the colon", H "Content-Length : 3\r\n\r\nabc", "400 ");
    expect("another coding", H "Transfer-Encoding: gzip\r\n\r\nabc", "400 a Transfer-Encoding other");
    expect("coding before chunked", H "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "400 ");
    expect("chunked is not last", H "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", "400 ");
    expect("chunked twice", H "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 ");
    expect("xchunked", H "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", "400 a Transfer-Encoding other");
    expect("chunks in HTTP/1.0", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400 ");
    expect("chunk size is no number", H "Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
           "POST /? [host=h] [transfer-encoding=chunked]400 a chunk size");
    expect("chunk size past 64 bits", H "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
           "POST /? [host=h] [transfer-encoding=chunked]400 a chunk size");
    expect("folded field", H "X: a\r\n b\r\n\r\n", "400 ");
    expect("folded coding", H "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", "400 ");
    expect("space before the first field", "GET / HTTP/1.1\r\n Host: h\r\n\r\n", "400 ");
    expect("lines that end in LF", "GET / HTTP/1.1\nHost: h\n\n", "400 ");
    expect("a lone CR", H "X: a\rContent-Length: 3\r\n\r\nabc", "400 ");
    expect("a lone CR as the value", H "X:\rContent-Length: 3\r\n\r\nabc", "400 ");
    expect_n("a NUL", H "X: a\0b\r\n\r\n", sizeof H + 9, "400 ");
    expect("a field without a colon", H "X\r\n\r\n", "400 ");
    expect("a field without a name", H ": x\r\n\r\n", "400 ");
    expect("no Host", "GET / HTTP/1.1\r\n\r\n", "400 ");
    expect("two Hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "400 ");
    expect("two keys", H "Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", "400 ");
    expect("HTTP/0.9", "GET /\r\n\r\n", "400 only HTTP/1.1");
    expect("HTTP/2.0", "GET / HTTP/2.0\r\nHost: h\r\n\r\n", "400 ");
    expect("HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400 ");
    expect("no method", "BLAH / HTTP/1.1\r\nHost: h\r\n\r\n", "400 ");
    expect("TLS", "\x16\x03\x01\x02", "400 this port speaks plain HTTP");
    expect("another Expect", H "Expect: tea\r\nContent-Length: 1\r\n\r\nx", "417 ");
    expect("CONNECT", "CONNECT a:1 HTTP/1.1\r\nHost: h\r\n\r\n", "400 ");
    expect("no path", "GET a HTTP/1.1\r\nHost: h\r\n\r\n", "400 ");
    expect("%00 in the path", "GET /%00 HTTP/1.1\r\nHost: h\r\n\r\n", "400 ");
    expect("a broken escape in the path", "GET /%2 HTTP/1.1\r\nHost: h\r\n\r\n", "400 ");
    expect("a fragment", "GET /a#b HTTP/1.1\r\nHost: h\r\n\r\n", "400 ");
    expect("empty lines without end",
           "\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n"
           "\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n",
           "400 ");
}

static void limited(void) {
    nmk_buf b = {0};
    nmk_buf_puts(&b, "GET /");
    for (int i = 0; i < 3000; i++) nmk_buf_puts(&b, "a");
    nmk_buf_puts(&b, " HTTP/1.1\r\nHost: h\r\n\r\n");
    expect("a long target", b.data, "414 ");
    b.length = 0;
    nmk_buf_puts(&b, H "X: ");
    for (int i = 0; i < 3000; i++) nmk_buf_puts(&b, "a");
    nmk_buf_puts(&b, "\r\n\r\n");
    expect("a long field", b.data, "431 ");
    b.length = 0;
    nmk_buf_puts(&b, H);
    for (int i = 0; i < 200; i++) nmk_buf_puts(&b, "a:b\r\n");
    nmk_buf_puts(&b, "\r\n");
    expect("many fields", b.data, "431 ");
    expect("a long body by length", H "Content-Length: 1001\r\n\r\n", "413 ");
    b.length = 0;
    nmk_buf_puts(&b, H "Transfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < 251; i++) nmk_buf_puts(&b, "4\r\nabcd\r\n");
    expect("a long body in chunks", b.data, "POST /?");
    check(strstr(b.data, "abcd") != NULL, "its text is there", "-");
    nmk_buf out = {0};
    outcome(b.data, b.length, all, &out);
    check(strstr(out.data, "413 ") != NULL, "a long body in chunks gets 413", "%s", shown(out.data));
    b.length = 0;
    nmk_buf_puts(&b, H "Transfer-Encoding: chunked\r\n\r\n1;");
    for (int i = 0; i < 5000; i++) nmk_buf_puts(&b, "e");
    outcome(b.data, b.length, all, &out);
    check(strstr(out.data, "413 ") != NULL, "a long chunk extension gets 413", "%s", shown(out.data));
    b.length = 0;
    nmk_buf_puts(&b, H "Transfer-Encoding: chunked\r\n\r\n0\r\n");
    for (int i = 0; i < 500; i++) nmk_buf_puts(&b, "Trailer: x\r\n");
    outcome(b.data, b.length, all, &out);
    check(strstr(out.data, "413 ") != NULL, "trailers without end get 413", "%s", shown(out.data));
    b.length = 0;
    nmk_buf_puts(&b, H "Transfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < 1000; i++) nmk_buf_puts(&b, "1\r\na\r\n");
    nmk_buf_puts(&b, "0\r\n\r\n");
    outcome(b.data, b.length, all, &out);
    check(!strstr(out.data, "413 ") && strstr(out.data, "a}"), "chunks of one byte are legal", "%s", shown(out.data));
    nmk_buf_free(&out);
    nmk_buf_free(&b);
}

static void fuzz(void) {
    nmk_buf request = {0}, whole = {0}, pieces = {0};
    const char *cases = getenv("NMK_FUZZ");
    long n = cases ? atol(cases) : 20000, complete = 0, bad = 0;
    int before = failures;
    for (long i = 0; i < n; i++) {
        uint64_t state = random_state;
        mutate(&request);
        outcome(request.data, request.length, all, &whole);
        outcome(request.data, request.length, random_below(4) ? some : one, &pieces);
        complete += strstr(whole.data, "}\n") != NULL;
        bad += strstr(whole.data, "\n") == NULL && whole.length;
        /* With several mistakes in one request, which is named may depend on the cuts; that it is refused may not. */
        size_t same = (size_t)(strrchr(whole.data, '\n') ? strrchr(whole.data, '\n') - whole.data + 1 : 0);
        bool good = !strncmp(whole.data, pieces.data, same) && !whole.data[same] == !pieces.data[same];
        if (!good) {
            check(false, "fuzz", "state %llx: \"%s\" gave \"%s\" and in pieces \"%s\"", (unsigned long long)state,
                  shown(request.data), shown(whole.data), shown(pieces.data));
            break;
        }
    }
    check(failures == before && complete > n / 20 && bad > n / 20,
          "mutated requests: the same result however they are cut", "%ld of %ld complete, %ld refused", complete, n,
          bad);
    nmk_buf_free(&request);
    nmk_buf_free(&whole);
    nmk_buf_free(&pieces);
}

int main(void) {
    taken();
    refused();
    limited();
    fuzz();
    return failures != 0;
}
