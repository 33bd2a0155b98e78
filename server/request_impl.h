/* Between the files of server/request*.c: a body that is being read, and how values are looked at and refused.
 *
 * Every API's fields stand in request.c's table.  The APIs beside chat completions are views: what their fields say is
 * put in chat completions' words, and taken as these are. */
#ifndef NMK_REQUEST_IMPL_H
#define NMK_REQUEST_IMPL_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "request.h"

typedef struct {
    nmk_api_request *r;
    const nmk_request_limits *limits;
    nmk_api_error *e;
    bool chat_logprobs, has_options;
    int top_logprobs, text_logprobs, max_completion_tokens, best_of;
    struct json_object *system; /* of messages: a text */
    struct json_object *documents;
} job;

/* One message or item of a list. */
typedef struct {
    job *j;
    const char *list; /* what the list is called */
    struct json_object *message;
    size_t index;
    char where[112];
} place;

/* "messages[3]" and what follows. */
static inline const char *path(place *p, const char *rest) {
    snprintf(p->where, sizeof p->where, "%s[%zu]%s", p->list, p->index, rest);
    return p->where;
}

/* ---------------------------------------------------------------- refusals */

static inline const char *kind_of(struct json_object *v) {
    switch (json_object_get_type(v)) {
    case json_type_null: return "null";
    case json_type_boolean: return "a boolean";
    case json_type_double: return "a number";
    case json_type_int: return "an integer";
    case json_type_object: return "an object";
    case json_type_array: return "an array";
    default: return "a string";
    }
}

static inline int wrong_type(job *j, const char *param, const char *wanted, struct json_object *v) {
    return nmk_api_fail(j->e, 400, param, "invalid_type", "Invalid type for '%s': expected %s, but got %s instead.",
                        param, wanted, kind_of(v));
}

static inline int unsupported(job *j, const char *param, const char *why) {
    return nmk_api_fail(j->e, 400, param, "unsupported_parameter", "Unsupported parameter: '%s': %s.", param, why);
}

static inline int missing(job *j, const char *param) {
    return nmk_api_fail(j->e, 400, param, "missing_required_parameter", "Missing required parameter: '%s'.", param);
}

static inline int invalid(job *j, const char *param, const char *why) {
    return nmk_api_fail(j->e, 400, param, "invalid_value", "Invalid value for '%s': %s.", param, why);
}

/* ---------------------------------------------------------------- values */

static inline bool is(struct json_object *v, enum json_type type) { return v && json_object_is_type(v, type); }

/* A whole number, also if written 1.0 as some clients do. */
static inline bool whole(struct json_object *v, int64_t *value) {
    if (is(v, json_type_int)) {
        *value = json_object_get_int64(v);
        return true;
    }
    if (!is(v, json_type_double)) return false;
    double d = json_object_get_double(v);
    if (d != floor(d) || fabs(d) > 9007199254740992.0) return false;
    *value = (int64_t)d;
    return true;
}

/* A string as C knows it; NULL if it is none or holds a NUL. */
static inline const char *c_string(struct json_object *v) {
    if (!is(v, json_type_string)) return NULL;
    const char *s = json_object_get_string(v);
    return strlen(s) == (size_t)json_object_get_string_len(v) ? s : NULL;
}

static inline nmk_text text_of(struct json_object *v) {
    return (nmk_text){json_object_get_string(v), (size_t)json_object_get_string_len(v)};
}

static inline size_t length(struct json_object *array) { return json_object_array_length(array); }
static inline struct json_object *at(struct json_object *array, size_t i) {
    return json_object_array_get_idx(array, i);
}

/* ---------------------------------------------------------------- chat completions' fields */

/* Takes a value as if it were that field of a chat completion. */
int nmk_request_take(job *j, const char *field, struct json_object *v);

/* Makes of the message's content one string. */
int nmk_request_flatten(place *p);

/* The arguments of `function` (of a call, at `where`) become an object if they say one. */
int nmk_request_arguments(job *j, struct json_object *function, const char *where);

/* reasoning_effort, for the template. */
int nmk_request_effort(job *j, const char *name, struct json_object *v);

/* The request owns it from now on. */
struct json_object *nmk_request_keep(job *j, struct json_object *made);

/* What the table of request.c calls; name: the field's. */
int nmk_responses_input(job *j, const char *name, struct json_object *v);
int nmk_responses_tools(job *j, const char *name, struct json_object *v);
int nmk_responses_tool_choice(job *j, const char *name, struct json_object *v);
int nmk_responses_text(job *j, const char *name, struct json_object *v);
int nmk_responses_include(job *j, const char *name, struct json_object *v);
int nmk_responses_truncation(job *j, const char *name, struct json_object *v);
int nmk_responses_check(job *j); /* puts instructions and what came before in front of the messages */

int nmk_messages_messages(job *j, const char *name, struct json_object *v);
int nmk_messages_system(job *j, const char *name, struct json_object *v);
int nmk_messages_tools(job *j, const char *name, struct json_object *v);
int nmk_messages_tool_choice(job *j, const char *name, struct json_object *v);
int nmk_messages_output_config(job *j, const char *name, struct json_object *v);
int nmk_messages_output_format(job *j, const char *name, struct json_object *v);
int nmk_messages_check(job *j);
/* ---------------------------------------------------------------- request_form.c */

int nmk_take_response_format(job *j, const char *name, struct json_object *v);
int nmk_take_structured(job *j, const char *name, struct json_object *v);
int nmk_take_schema(job *j, const char *name, struct json_object *v);
int nmk_take_regex(job *j, const char *name, struct json_object *v);
int nmk_take_choice(job *j, const char *name, struct json_object *v);
int nmk_take_grammar(job *j, const char *name, struct json_object *v);
int nmk_take_tool_choice(job *j, const char *name, struct json_object *v);
int nmk_check_form(job *j);

#endif
