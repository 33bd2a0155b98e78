/* Chat templates: the model's own Jinja, compiled once to Lua and run in a sandbox.
 *
 * The environment is transformers': trim_blocks, lstrip_blocks, loop controls, its tojson, raise_exception,
 * strftime_now, generation blocks.  A template comes from the model's directory and is not trusted: it sees only the
 * values it is given, has no files, clock or code loading, and runs under limits of memory, work, time and output.
 *
 * A loaded template may be shared by threads; renders of one template take turns. */
#ifndef NMK_TEMPLATE_H
#define NMK_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "util.h"

struct json_object;
typedef struct nmk_template nmk_template;

/* For each render, and for compiling.  0 means the default. */
typedef struct {
    size_t memory_bytes;   /* all that Lua holds: the messages, the template, what it computes */
    size_t output_bytes;   /* the text */
    uint64_t instructions; /* of Lua's virtual machine */
    uint64_t time_ns;
} nmk_template_limits;

typedef struct {
    struct json_object *messages; /* an array */
    struct json_object *tools;    /* an array; NULL: none */
    bool add_generation_prompt;
    struct json_object *kwargs; /* an object or NULL: chat_template_kwargs, reasoning_effort, documents and the like.
                                 * They win over what is above and below, but may not hold messages or tools. */
    const char *bos_token, *eos_token; /* NULL: not defined for the template */
    int64_t now_s;                     /* what strftime_now sees, seconds since 1970; 0: the clock */
} nmk_template_input;

/* Compiles a template's text; `name` begins its messages ("NAME: line L: what is wrong") and `limits` may be NULL.
 * 0 and *result, which the caller frees; or -1. */
int nmk_template_compile(const char *text, size_t bytes, const char *name, const nmk_template_limits *limits,
                         nmk_template **result, nmk_err *e);

/* The same for `path`: a template file, or a checkpoint's folder.  In a folder: chat_template.jinja with the files of
 * additional_chat_templates/, else chat_template of tokenizer_config.json, a text or a list of named ones. */
int nmk_template_load(const char *path, const nmk_template_limits *limits, nmk_template **result, nmk_err *e);
void nmk_template_free(nmk_template *t); /* NULL is fine */

/* The source, of all templates if there are several. */
const char *nmk_template_source(const nmk_template *t);

/* Adds the prompt to `out`.  With tools, a template named tool_use is taken if there is one.  0; or -1 with `out` as it
 * was and "chat template: line L: what is wrong", in which raise_exception's text stands as the template gave it. */
int nmk_template_render(nmk_template *t, const nmk_template_input *input, nmk_buf *out, nmk_err *e);

#endif
