/* Between the files of server/http*.c. */
#ifndef NMK_HTTP_IMPL_H
#define NMK_HTTP_IMPL_H

#include <stdbool.h>
#include <sys/socket.h>

#include "util.h"

/* A listening, non-blocking socket; its address as text goes into address, its port into *port. */
int nmk_http_listen(const char *host, int port, int backlog, char *address, size_t size, int *bound, nmk_err *e);

/* The same of a socket that listens already.  Returns fd or -1, closes nothing. */
int nmk_http_adopt(int fd, char *address, size_t size, int *bound, nmk_err *e);

/* "127.0.0.1:80", "[::1]:80". */
void nmk_http_address_text(const struct sockaddr_storage *a, char *text, size_t size);

const char *nmk_http_reason(int status);

/* "Date: ...\r\n" of now; made anew once a second. */
typedef struct {
    int64_t second;
    char text[48];
} nmk_http_date;
const char *nmk_http_date_field(nmk_http_date *d);

/* Which of the keys the value of an Authorization field carries, or else that of X-API-Key (either may be NULL), or -1.
 * How long that takes does not tell which bytes
 * were right. */
int nmk_http_key(const char *authorization, const char *key, const char *const *keys, unsigned count);

#endif
