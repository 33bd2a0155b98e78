/* README's tables for those who come from vLLM or llama.cpp: every flag, endpoint and field is tried, and has to do what
 * the row's first word says. */
#define _GNU_SOURCE /* memmem */
#include "serve_helper.h"

#define PROGRAM "build/nmc-toy/nmk-serve"

enum { MOST_CELLS = 4 };

typedef struct {
    char *cell[MOST_CELLS];
    int count;
} row;

static char *readme;
static int rows_tried;

/* Calls f with every row of the table with that head. */
static void each_row(const char *head, void (*f)(const row *r, void *user), void *user) {
    const char *at = strstr(readme, head);
    int rows = 0;
    if (at) at = strchr(at, '\n') + 1;
    while (at && *at == '|') {
        const char *end = strchr(at, '\n');
        row r = {0};
        for (const char *from = at + 1; from < end && r.count < MOST_CELLS;) {
            const char *to = memchr(from, '|', (size_t)(end - from));
            if (!to) break;
            while (from < to && *from == ' ') from++;
            r.cell[r.count++] = xasprintf("%.*s", (int)(to - from), from);
            from = to + 1;
        }
        if (at[1] != '-') f(&r, user), rows++;
        for (int i = 0; i < r.count; i++) free(r.cell[i]);
        at = end + 1;
    }
    check(rows > 0, head, "README has no such table");
    rows_tried += rows;
}

/* What is between backticks in a cell, one after the other; NULL at the end.  The caller frees. */
static char *next_quoted(const char **at) {
    const char *from = strchr(*at, '`'), *to = from ? strchr(from + 1, '`') : NULL;
    if (!to) return NULL;
    *at = to + 1;
    return xasprintf("%.*s", (int)(to - from - 1), from + 1);
}

static bool begins(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

/* ---------------------------------------------------------------- flags */

/* Its messages, and its status; it has no checkpoint to start with. */
static nmk_buf start_with(const char *flag, int *status) {
    nmk_buf text = {0};
    char part[1024];
    size_t n;
    char *command = xasprintf("set -f; timeout 20 " PROGRAM " %s --checkpoint build/none 2>&1", flag);
    FILE *f = popen(command, "r");
    nmk_buf_puts(&text, "");
    while (f && (n = fread(part, 1, sizeof part, f))) nmk_buf_add(&text, part, n);
    *status = f ? WEXITSTATUS(pclose(f)) : -1;
    free(command);
    return text;
}

static void try_flags(const row *r, void *user) {
    const char *at = r->cell[0], *here = r->cell[1];
    char *flag;
    (void)user;
    while ((flag = next_quoted(&at))) {
        int status;
        nmk_buf said = start_with(flag, &status);
        char *name = xasprintf("%.*s is not a flag here: ", (int)strcspn(flag, " "), flag), *instead;
        bool good = false;
        if (begins(here, "taken")) good = status == 1 && strstr(said.data, "build/none");
        if (begins(here, "refused")) good = status == 2 && strstr(said.data, name);
        for (const char *rest = here; good && (instead = next_quoted(&rest)); free(instead))
            good = strstr(said.data, instead);
        check(good, flag, "%s: status %d, %s", here, status, said.data);
        nmk_buf_free(&said), free(name), free(flag);
    }
}

/* ---------------------------------------------------------------- endpoints */

static int status_of(int port, const char *endpoint) {
    char method[16] = "", path[100] = "";
    sscanf(endpoint, "%15s %99s", method, path);
    reply r = reply_read(request_open(port, method, path, "", *method == 'P' ? "{}" : ""));
    int status = r.status;
    reply_free(&r);
    return status;
}

static void try_endpoints(const row *r, void *user) {
    int port = *(const int *)user;
    const char *at = r->cell[0], *here = r->cell[1];
    char *endpoint, *instead;
    while ((endpoint = next_quoted(&at))) {
        int status = status_of(port, endpoint);
        bool good = begins(here, "taken") ? status != 404 && status != 405 && status : false;
        if (begins(here, "not there")) good = status == 404;
        check(good, endpoint, "%s: status %d", here, status);
        free(endpoint);
    }
    for (at = here; (instead = next_quoted(&at)); free(instead))
        if (strchr(instead, ' ')) check(status_of(port, instead) != 404, instead, "it is named in place of others");
}

/* ---------------------------------------------------------------- fields */

/* A request of that endpoint which answers the same every time; with a member more, or that one in place of its own. */
static reply ask(int port, const char *path, const char *member) {
    const char *base = !strcmp(path, "/v1/completions") ? "\"prompt\":\"def is_prime\",\"max_tokens\":6"
                       : !strcmp(path, "/v1/responses") ? "\"input\":\"What is 17 + 25?\",\"max_output_tokens\":6"
                                                        : "\"messages\":[{\"role\":\"user\",\"content\":\"What is 17 + "
                                                          "25?\"}],\"max_tokens\":6";
    char *body = xasprintf("{\"temperature\":0,%s%s%s}", base, *member ? "," : "", member);
    reply r = post(port, path, body);
    free(body);
    return r;
}

static const char *answer(const reply *r) { return json_object_to_json_string(at(r->json, "choices.0")); }

static void try_fields(const row *r, void *user) {
    int port = *(const int *)user;
    const char *at_cell = r->cell[0], *where = r->cell[1], *here = r->cell[2];
    char *path = next_quoted(&where), *member;
    if (!path) path = xstrdup("/v1/chat/completions");
    while ((member = next_quoted(&at_cell))) {
        reply with = ask(port, path, member);
        char *name = xasprintf("%.*s", (int)strcspn(member + 1, "\""), member + 1);
        bool good = false;
        if (begins(here, "taken")) good = with.status == 200;
        if (begins(here, "ignored")) {
            reply without = ask(port, path, "");
            good = with.status == 200 && !strcmp(answer(&with), answer(&without));
            reply_free(&without);
        }
        if (begins(here, "refused")) /* an error of /v1/messages has no parameter */
            good = with.status == 400 && (begins(text_at(with.json, "error.param"), name) ||
                                          strstr(text_at(with.json, "error.message"), name));
        check(good, member, "%s, %s: %s", path, here, with.body);
        reply_free(&with), free(name), free(member);
    }
    free(path);
}

int main(void) {
    nmk_err e;
    size_t bytes;
    if (nmk_file_read(&readme, &bytes, "README.md", 1 << 22, &e)) return puts(e.text), 1;
    each_row("| flag there |", try_flags, NULL);
    server s = server_start((const char *const[]){"--checkpoint", "examples/nmc-toy", NULL});
    each_row("| endpoint there |", try_endpoints, &s.port);
    each_row("| field there |", try_fields, &s.port);
    check(rows_tried > 25, "all rows", "%d were tried", rows_tried);
    check(server_end(&s, SIGTERM, 5000) == 0, "and it ends well", "it does not");
    free(readme);
    return failures != 0;
}
