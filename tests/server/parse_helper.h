/* For tests of parse.h: what was told, as one text. */
#ifndef NMK_TESTS_PARSE_HELPER_H
#define NMK_TESTS_PARSE_HELPER_H

#include "parse.h"

#include <sys/stat.h>
#include <unistd.h>

#include "server/helper.h"

static nmk_tokenizer *tokenizer;
static nmk_markers markers;

/* What was told, in letters: R(reasoning) A(answer) C0(name) 0(arguments) E0+ or E0- (not complete). */
typedef struct {
    nmk_buf text;
    nmk_said_kind last;
    int call, events;
    bool empty; /* something was told that said nothing */
    char id[64][NMK_ID_BYTES];
    int ids;
} told;

static void close_text(told *t) {
    if (t->last == NMK_SAID_REASONING || t->last == NMK_SAID_ANSWER || t->last == NMK_SAID_ARGUMENTS)
        nmk_buf_puts(&t->text, ")");
    t->last = NMK_SAID_CALL_END;
}

static void listen(void *user, const nmk_said *s) {
    told *t = user;
    bool text = s->kind == NMK_SAID_REASONING || s->kind == NMK_SAID_ANSWER || s->kind == NMK_SAID_ARGUMENTS;
    t->events++;
    if (text && (!s->bytes || !nmk_utf8_valid(s->text, s->bytes))) t->empty = true;
    if (!text || s->kind != t->last || (s->kind == NMK_SAID_ARGUMENTS && s->call != t->call)) {
        close_text(t);
        if (s->kind == NMK_SAID_REASONING) nmk_buf_puts(&t->text, "R(");
        if (s->kind == NMK_SAID_ANSWER) nmk_buf_puts(&t->text, "A(");
        if (s->kind == NMK_SAID_ARGUMENTS) nmk_buf_printf(&t->text, "%d(", s->call);
        if (s->kind == NMK_SAID_CALL) nmk_buf_printf(&t->text, "C%d(%s)", s->call, s->name);
        if (s->kind == NMK_SAID_CALL_END) nmk_buf_printf(&t->text, "E%d%s", s->call, s->complete ? "+" : "-");
    }
    if (s->kind == NMK_SAID_CALL && t->ids < 64) snprintf(t->id[t->ids++], NMK_ID_BYTES, "%s", s->id);
    t->last = s->kind, t->call = s->call;
    if (text) nmk_buf_add(&t->text, s->text, s->bytes);
}

static void tokens_of(const char *text, size_t bytes, nmk_ids *out) {
    nmk_err e;
    if (nmk_tokenizer_encode(tokenizer, text, bytes, NMK_PARSE_SPECIAL, out, &e)) die(e.text);
}

/* The toy's tokenizer under other names of its markers, NULL at the end of both. */
__attribute__((unused)) static nmk_tokenizer *renamed(const char *const names[][2]) {
    nmk_err e;
    nmk_tokenizer *t = NULL;
    char *text;
    size_t bytes;
    if (nmk_file_read(&text, &bytes, "examples/nmc-toy/tokenizer.json", 64 << 20, &e)) die(e.text);
    for (int i = 0; names[i][0]; i++) {
        nmk_buf to = {0};
        const char *at = text, *found;
        char *from = xasprintf("\"%s\"", names[i][0]);
        while ((found = strstr(at, from))) {
            nmk_buf_add(&to, at, (size_t)(found - at));
            nmk_buf_printf(&to, "\"%s\"", names[i][1]);
            at = found + strlen(from);
        }
        if (at == text) die(from);
        nmk_buf_puts(&to, at);
        free(from), free(text);
        text = to.data;
    }
    char *dir = xasprintf("build/tests/tokenizer.%d", (int)getpid()), *path = xasprintf("%s/tokenizer.json", dir);
    mkdir("build/tests", 0777), mkdir(dir, 0777);
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f)) die(path);
    free(text);
    if (nmk_tokenizer_load(dir, &t, &e)) die(e.text);
    unlink(path), rmdir(dir);
    free(path), free(dir);
    return t;
}

#endif
