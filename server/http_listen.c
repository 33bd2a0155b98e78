/* From --host and --port to a socket that listens, or a sentence that says why not. */
#include "http_impl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

void nmk_http_address_text(const struct sockaddr_storage *a, char *text, size_t size) {
    char host[INET6_ADDRSTRLEN] = "?";
    if (a->ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)a;
        inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
        snprintf(text, size, "[%s]:%u", host, ntohs(v6->sin6_port));
    } else {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)a;
        inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
        snprintf(text, size, "%s:%u", host, ntohs(v4->sin_port));
    }
}

static int parse_host(const char *host, int port, struct sockaddr_storage *a, socklen_t *size, nmk_err *e) {
    struct sockaddr_in *v4 = (struct sockaddr_in *)a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)a;
    char bare[INET6_ADDRSTRLEN];
    size_t n = strlen(host);
    memset(a, 0, sizeof *a);
    if (port < 0 || port > 65535) return nmk_fail(e, "port %d: must be 0 to 65535", port);
    if (!strcmp(host, "localhost")) host = "127.0.0.1", n = strlen(host);
    if (n > 2 && host[0] == '[' && host[n - 1] == ']') host++, n -= 2;
    snprintf(bare, sizeof bare, "%.*s", (int)n, host);
    if (n < sizeof bare && inet_pton(AF_INET, bare, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET, v4->sin_port = htons((uint16_t)port), *size = sizeof *v4;
        return 0;
    }
    if (n < sizeof bare && inet_pton(AF_INET6, bare, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6, v6->sin6_port = htons((uint16_t)port), *size = sizeof *v6;
        return 0;
    }
    return nmk_fail(e, "host \"%.100s\": give an IPv4 or IPv6 address, or localhost", host);
}

static int fail_at(nmk_err *e, const char *what, const char *text) {
    switch (errno) {
    case EADDRINUSE:
        return nmk_fail(e, "listen on %s: the port is in use; another server is running, or choose another port", text);
    case EACCES: return nmk_fail(e, "listen on %s: not permitted; ports below 1024 need privileges", text);
    case EADDRNOTAVAIL: return nmk_fail(e, "listen on %s: this machine has no such address", text);
    case EAFNOSUPPORT: return nmk_fail(e, "listen on %s: this machine has no IPv6", text);
    default: return nmk_fail(e, "listen on %s: %s: %s", text, what, strerror(errno));
    }
}

static int read_address(int fd, char *address, size_t size, int *bound) {
    struct sockaddr_storage a;
    socklen_t a_size = sizeof a;
    if (getsockname(fd, (struct sockaddr *)&a, &a_size)) return -1;
    nmk_http_address_text(&a, address, size);
    *bound =
        ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port : ((struct sockaddr_in *)&a)->sin_port);
    return 0;
}

int nmk_http_adopt(int fd, char *address, size_t size, int *bound, nmk_err *e) {
    int listens = 0, flags = fcntl(fd, F_GETFL);
    socklen_t n = sizeof listens;
    if (flags < 0 || getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n) || !listens ||
        read_address(fd, address, size, bound))
        return nmk_fail(e, "descriptor %d is no socket that listens", fd);
    if (fcntl(fd, F_SETFL, flags | O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC))
        return nmk_fail(e, "descriptor %d: fcntl: %s", fd, strerror(errno));
    return fd;
}

int nmk_http_listen(const char *host, int port, int backlog, char *address, size_t size, int *bound, nmk_err *e) {
    struct sockaddr_storage a;
    socklen_t a_size = sizeof a;
    char text[80];
    if (parse_host(host, port, &a, &a_size, e)) return -1;
    nmk_http_address_text(&a, text, sizeof text);
    int rc = -1, one = 1, zero = 0;
    int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        fail_at(e, "socket", text);
        goto out;
    }
    /* So that a restart does not wait for the old connections to be forgotten. */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (a.ss_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    if (bind(fd, (struct sockaddr *)&a, a_size)) {
        fail_at(e, "bind", text);
        goto out;
    }
    if (listen(fd, backlog)) {
        fail_at(e, "listen", text);
        goto out;
    }
    if (read_address(fd, address, size, bound)) {
        fail_at(e, "getsockname", text);
        goto out;
    }
    rc = fd, fd = -1;
out:
    if (fd >= 0) close(fd);
    return rc;
}
