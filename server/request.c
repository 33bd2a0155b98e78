#include "request_impl.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_CHOICES = 128 }; /* prompts times n */

/* ---------------------------------------------------------------- token ids */

static bool token_id(const job *j, struct json_object *v, int32_t *id) {
    int64_t value;
    if (!whole(v, &value) || value < 0 || value >= j->limits->vocab) return false;
    *id = (int32_t)value;
    return true;
}

static int bad_token(job *j, const char *param, struct json_object *v) {
    int64_t value;
    if (!whole(v, &value)) return wrong_type(j, param, "a token id", v);
    return nmk_api_fail(j->e, 400, param, "invalid_value",
                        "Invalid value for '%s': token id %lld is not between 0 and %d.", param, (long long)value,
                        j->limits->vocab - 1);
}

static int ids_of(job *j, const char *param, struct json_object *array, nmk_ids *ids) {
    for (size_t i = 0; i < length(array); i++) {
        int32_t id;
        if (!token_id(j, at(array, i), &id)) {
            char where[96];
            snprintf(where, sizeof where, "%s[%zu]", param, i);
            return bad_token(j, where, at(array, i));
        }
        nmk_ids_add(ids, id);
    }
    return 0;
}

/* ---------------------------------------------------------------- fields with a shape of their own */

static int take_stop(job *j, const char *name, struct json_object *v) {
    enum { MOST = 64, LONGEST = 4096 };
    nmk_sampling *s = &j->r->sampling;
    bool list = is(v, json_type_array);
    if (!list && !is(v, json_type_string)) return wrong_type(j, name, "a string or an array of strings", v);
    size_t count = list ? length(v) : 1;
    if (count > MOST) return invalid(j, name, "too many stop strings");
    s->stop = xcalloc(count, sizeof *s->stop);
    for (size_t i = 0; i < count; i++) {
        struct json_object *one = list ? at(v, i) : v;
        if (!is(one, json_type_string)) return wrong_type(j, name, "a string or an array of strings", one);
        nmk_text t = text_of(one);
        if (!t.bytes) return invalid(j, name, "a stop string must not be empty");
        if (t.bytes > LONGEST) return invalid(j, name, "a stop string is too long");
        s->stop[s->stop_count++] = t;
    }
    return 0;
}

static int take_stop_ids(job *j, const char *name, struct json_object *v) {
    enum { MOST = 1024 };
    if (!is(v, json_type_array)) return wrong_type(j, name, "an array of token ids", v);
    if (length(v) > MOST) return invalid(j, name, "too many token ids");
    nmk_ids ids = {0};
    int rc = ids_of(j, name, v, &ids);
    j->r->sampling.stop_id = ids.id;
    j->r->sampling.stop_id_count = (int)ids.count;
    return rc;
}

static int take_seed(job *j, const char *name, struct json_object *v) {
    nmk_sampling *s = &j->r->sampling;
    if (!whole(v, &s->seed)) return wrong_type(j, name, "an integer", v);
    s->seeded = s->seed != -1; /* which vLLM and llama.cpp take for none */
    return 0;
}

static int by_token(const void *a, const void *b) {
    int32_t x = ((const nmk_bias *)a)->token, y = ((const nmk_bias *)b)->token;
    return (x > y) - (x < y);
}

static int take_logit_bias(job *j, const char *name, struct json_object *v) {
    enum { MOST = 1024 };
    nmk_sampling *s = &j->r->sampling;
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object from token ids to numbers", v);
    if (json_object_object_length(v) > MOST)
        return nmk_api_fail(j->e, 400, name, "invalid_value", "Invalid value for '%s': %d tokens, at most %d.", name,
                            json_object_object_length(v), MOST);
    s->bias = xcalloc((size_t)json_object_object_length(v), sizeof *s->bias);
    json_object_object_foreach(v, key, value) {
        char *end;
        errno = 0;
        long token = strtol(key, &end, 10);
        bool digits = key[0] >= '0' && key[0] <= '9' && !*end && !errno;
        if (!digits || token >= j->limits->vocab)
            return nmk_api_fail(j->e, 400, name, "invalid_value",
                                "Invalid value for '%s': \"%.40s\" is not a token id between 0 and %d.", name, key,
                                j->limits->vocab - 1);
        if (!is(value, json_type_int) && !is(value, json_type_double)) return wrong_type(j, name, "numbers", value);
        double bias = json_object_get_double(value);
        if (!(bias >= -100 && bias <= 100)) return invalid(j, name, "a bias lies between -100 and 100");
        s->bias[s->bias_count++] = (nmk_bias){(int32_t)token, (float)bias};
    }
    qsort(s->bias, (size_t)s->bias_count, sizeof *s->bias, by_token);
    for (int i = 1; i < s->bias_count; i++)
        if (s->bias[i].token == s->bias[i - 1].token) return invalid(j, name, "a token is there twice");
    return 0;
}

static int take_stream_options(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    struct json_object *usage = nmk_json_get(v, "include_usage");
    if (usage && !is(usage, json_type_boolean))
        return wrong_type(j, "stream_options.include_usage", "a boolean", usage);
    j->has_options = true;
    j->r->include_usage = usage && json_object_get_boolean(usage);
    return 0;
}

/* At /v1/completions, where none at all is some if the prompt comes back. */
static int take_max_tokens(job *j, const char *name, struct json_object *v) {
    int64_t tokens;
    if (!whole(v, &tokens)) return wrong_type(j, name, "an integer", v);
    if (tokens < 0 || tokens > INT_MAX) return invalid(j, name, "expected at least 1, or 0 with 'echo'");
    j->r->sampling.max_tokens = tokens ? (int)tokens : 1;
    j->r->echo_alone = !tokens;
    return 0;
}

/* For the template, as one of its variables. */
static int take_documents(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_array)) return wrong_type(j, name, "an array", v);
    j->documents = v;
    return 0;
}

static int take_kwargs(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    j->r->chat_template_kwargs = v;
    return 0;
}

int nmk_request_effort(job *j, const char *name, struct json_object *v) {
    static const char *const known[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
    const char *s = c_string(v);
    if (!s) return wrong_type(j, name, "a string", v);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(s, known[i])) return j->r->reasoning_effort = s, 0;
    return invalid(j, name, "expected one of none, minimal, low, medium, high, xhigh, max");
}

/* As Anthropic has it: {"type": "enabled", "budget_tokens": N}. */
static int take_thinking(job *j, const char *name, struct json_object *v) {
    nmk_api_request *r = j->r;
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    struct json_object *budget = nmk_json_get(v, "budget_tokens");
    const char *type = c_string(nmk_json_get(v, "type"));
    int64_t tokens = -1;
    if (!type) return missing(j, "thinking.type");
    if (strcmp(type, "enabled") != 0 && strcmp(type, "disabled") != 0 && strcmp(type, "adaptive") != 0)
        return invalid(j, "thinking.type", "expected enabled, disabled or adaptive");
    if (budget && !whole(budget, &tokens)) return wrong_type(j, "thinking.budget_tokens", "an integer", budget);
    if (budget && (tokens < 1 || tokens > INT_MAX))
        return invalid(j, "thinking.budget_tokens", "expected at least 1 token");
    r->thinking = *type == 'd' ? NMK_THINKING_OFF : NMK_THINKING_ON;
    if (*type == 'e' && budget) r->thinking_tokens = (int)tokens;
    return 0;
}

/* As /v1/responses has it: {"effort": "low"}, with "max_tokens" as OpenRouter has it. */
static int take_reasoning(job *j, const char *name, struct json_object *v) {
    int64_t tokens;
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    struct json_object *effort = nmk_json_get(v, "effort"), *summary = nmk_json_get(v, "summary");
    struct json_object *most = nmk_json_get(v, "max_tokens");
    if (effort && nmk_request_effort(j, "reasoning.effort", effort)) return -1;
    if (summary && !c_string(summary)) return wrong_type(j, "reasoning.summary", "a string", summary);
    if (!most) return 0;
    if (!whole(most, &tokens)) return wrong_type(j, "reasoning.max_tokens", "an integer", most);
    if (tokens < 1 || tokens > INT_MAX) return invalid(j, "reasoning.max_tokens", "expected at least 1 token");
    j->r->thinking_tokens = (int)tokens;
    return 0;
}

struct json_object *nmk_request_keep(job *j, struct json_object *made) {
    if (!j->r->made) j->r->made = json_object_new_array();
    json_object_array_add(j->r->made, made);
    return made;
}

/* A constraint, which would be broken if it were ignored; an empty one constrains nothing. */
static int refuse(job *j, const char *name, struct json_object *v) {
    if (is(v, json_type_string) && !json_object_get_string_len(v)) return 0;
    if (is(v, json_type_array) && !length(v)) return 0;
    return unsupported(j, name, "this server does not have it");
}

static int refuse_true(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_boolean)) return wrong_type(j, name, "a boolean", v);
    return json_object_get_boolean(v) ? unsupported(j, name, "this server does not have it") : 0;
}

/* What other servers have, but for the value that changes nothing, and what does it here. */
static int refuse_other(job *j, const char *name, struct json_object *v) {
    static const struct {
        const char *name;
        double neutral;
        const char *why;
    } others[] = {{"repeat_penalty", 1, "it is called 'repetition_penalty' here, and of all tokens"},
                  {"n_predict", -1, "it is called 'max_tokens' here"},
                  {"n_probs", 0, "it is called 'logprobs' here"},
                  {"typical_p", 1, "this server does not have it; 'top_p' and 'min_p' are there"},
                  {"tfs_z", 1, "this server does not have it; 'top_p' and 'min_p' are there"},
                  {"top_n_sigma", -1, "this server does not have it; 'top_p' and 'min_p' are there"},
                  {"mirostat", 0, "this server does not have it; 'top_p' and 'min_p' are there"},
                  {"xtc_probability", 0, "this server does not have it"},
                  {"dynatemp_range", 0, "this server does not have it; 'temperature' is there"},
                  {"dry_multiplier", 0, "this server does not have it; 'frequency_penalty' is there"},
                  {"length_penalty", 1, "this server has no beams"}};
    size_t i = 0;
    while (strcmp(others[i].name, name) != 0) i++;
    bool number = is(v, json_type_int) || is(v, json_type_double);
    return number && json_object_get_double(v) == others[i].neutral ? 0 : unsupported(j, name, others[i].why);
}

/* The old form of tools. */
static int refuse_functions(job *j, const char *name, struct json_object *v) {
    return is(v, json_type_array) && !length(v) ? 0 : unsupported(j, name, "use 'tools'");
}

static int refuse_reasoning_format(job *j, const char *name, struct json_object *v) {
    const char *s = c_string(v);
    if (s && (!strcmp(s, "auto") || !strncmp(s, "deepseek", 8))) return 0;
    return unsupported(j, name, "reasoning is always told apart from the answer");
}

static int refuse_text(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_string)) return wrong_type(j, name, "a string", v);
    return json_object_get_string_len(v) ? unsupported(j, name, "this server does not have it") : 0;
}

/* 0 and an empty list are nothing. */
static int refuse_some(job *j, const char *name, struct json_object *v) {
    int64_t number;
    if (is(v, json_type_array) && !length(v)) return 0;
    if (whole(v, &number) && !number) return 0;
    return unsupported(j, name, "this server does not have it here");
}

static int refuse_any(job *j, const char *name, struct json_object *v) {
    (void)v;
    return unsupported(j, name, "this server does not have it");
}

/* ---------------------------------------------------------------- tools */

static int take_tools(job *j, const char *name, struct json_object *v) {
    enum { MOST = 1024 };
    int rc = -1;
    struct json_object *names = json_object_new_object();
    if (!is(v, json_type_array)) {
        wrong_type(j, name, "an array", v);
        goto out;
    }
    if (length(v) > MOST) {
        invalid(j, name, "too many tools");
        goto out;
    }
    for (size_t i = 0; i < length(v); i++) {
        struct json_object *tool = at(v, i), *function, *member;
        char where[64];
        snprintf(where, sizeof where, "tools[%zu]", i);
        if (!is(tool, json_type_object)) {
            wrong_type(j, where, "an object", tool);
            goto out;
        }
        const char *type = c_string(nmk_json_get(tool, "type"));
        if (!type || strcmp(type, "function") != 0) {
            snprintf(where, sizeof where, "tools[%zu].type", i);
            invalid(j, where, "only 'function' tools are supported");
            goto out;
        }
        snprintf(where, sizeof where, "tools[%zu].function", i);
        function = nmk_json_get(tool, "function");
        if (!function) {
            missing(j, where);
            goto out;
        }
        if (!is(function, json_type_object)) {
            wrong_type(j, where, "an object", function);
            goto out;
        }
        snprintf(where, sizeof where, "tools[%zu].function.name", i);
        const char *tool_name = c_string(nmk_json_get(function, "name"));
        if (!tool_name || !*tool_name) {
            invalid(j, where, "expected the function's name as a string");
            goto out;
        }
        if (json_object_object_get_ex(names, tool_name, NULL)) {
            invalid(j, where, "two tools have the same name");
            goto out;
        }
        json_object_object_add(names, tool_name, NULL);
        snprintf(where, sizeof where, "tools[%zu].function.description", i);
        member = nmk_json_get(function, "description");
        if (member && !is(member, json_type_string)) {
            wrong_type(j, where, "a string", member);
            goto out;
        }
        snprintf(where, sizeof where, "tools[%zu].function.parameters", i);
        member = nmk_json_get(function, "parameters");
        if (member && !is(member, json_type_object)) {
            wrong_type(j, where, "an object", member);
            goto out;
        }
    }
    if (length(v)) j->r->tools = v;
    rc = 0;
out:
    json_object_put(names);
    return rc;
}

/* ---------------------------------------------------------------- messages */

int nmk_request_flatten(place *p) {
    struct json_object *content = nmk_json_get(p->message, "content");
    if (is(content, json_type_string)) return 0;
    if (content && !is(content, json_type_array))
        return wrong_type(p->j, path(p, ".content"), "a string or an array of parts", content);
    int rc = -1;
    nmk_buf all = {0};
    for (size_t i = 0; content && i < length(content); i++) {
        struct json_object *part = at(content, i), *said;
        char rest[64];
        snprintf(rest, sizeof rest, ".content[%zu]", i);
        if (is(part, json_type_string)) {
            nmk_buf_add(&all, text_of(part).data, text_of(part).bytes);
            continue;
        }
        if (!is(part, json_type_object)) {
            wrong_type(p->j, path(p, rest), "an object", part);
            goto out;
        }
        const char *type = c_string(nmk_json_get(part, "type"));
        bool refusal = type && !strcmp(type, "refusal");
        snprintf(rest, sizeof rest, ".content[%zu].type", i);
        if (!type) {
            missing(p->j, path(p, rest));
            goto out;
        }
        if (!refusal && strcmp(type, "text") != 0 && strcmp(type, "input_text") != 0 &&
            strcmp(type, "output_text") != 0) {
            nmk_api_fail(p->j->e, 400, path(p, rest), "unsupported_value",
                         "Content of type '%.40s' is not supported: this model reads text only.", type);
            goto out;
        }
        snprintf(rest, sizeof rest, ".content[%zu].%s", i, refusal ? "refusal" : "text");
        said = nmk_json_get(part, refusal ? "refusal" : "text");
        if (!is(said, json_type_string)) {
            said ? wrong_type(p->j, path(p, rest), "a string", said) : missing(p->j, path(p, rest));
            goto out;
        }
        nmk_buf_add(&all, text_of(said).data, text_of(said).bytes);
    }
    json_object_object_add(p->message, "content",
                           json_object_new_string_len(all.data ? all.data : "", (int)all.length));
    rc = 0;
out:
    nmk_buf_free(&all);
    return rc;
}

/* Templates write arguments as JSON: an object becomes one; what is none (a call that was cut) stays a string. */
int nmk_request_arguments(job *j, struct json_object *function, const char *where) {
    struct json_object *v = nmk_json_get(function, "arguments"), *object = NULL;
    if (is(v, json_type_object)) return 0;
    if (v && !is(v, json_type_string)) return wrong_type(j, where, "a string", v);
    nmk_text t = v ? text_of(v) : (nmk_text){"", 0};
    if (t.bytes == strspn(t.data, " \t\r\n"))
        object = json_object_new_object();
    else
        object = nmk_json_parse(t.data, t.bytes, NULL);
    if (is(object, json_type_object))
        json_object_object_add(function, "arguments", object);
    else
        json_object_put(object);
    return 0;
}

static int take_calls(place *p) {
    struct json_object *calls = NULL;
    if (!json_object_object_get_ex(p->message, "tool_calls", &calls)) return 0;
    if (calls && !is(calls, json_type_array)) return wrong_type(p->j, path(p, ".tool_calls"), "an array", calls);
    if (!calls || !length(calls)) {
        json_object_object_del(p->message, "tool_calls");
        return 0;
    }
    for (size_t i = 0; i < length(calls); i++) {
        struct json_object *call = at(calls, i), *function, *v;
        char rest[80];
        snprintf(rest, sizeof rest, ".tool_calls[%zu]", i);
        if (!is(call, json_type_object)) return wrong_type(p->j, path(p, rest), "an object", call);
        snprintf(rest, sizeof rest, ".tool_calls[%zu].type", i);
        v = nmk_json_get(call, "type");
        if (v && (!c_string(v) || strcmp(c_string(v), "function") != 0))
            return invalid(p->j, path(p, rest), "only 'function' calls are supported");
        snprintf(rest, sizeof rest, ".tool_calls[%zu].id", i);
        v = nmk_json_get(call, "id");
        if (v && !is(v, json_type_string)) return wrong_type(p->j, path(p, rest), "a string", v);
        snprintf(rest, sizeof rest, ".tool_calls[%zu].function", i);
        function = nmk_json_get(call, "function");
        if (!function) return missing(p->j, path(p, rest));
        if (!is(function, json_type_object)) return wrong_type(p->j, path(p, rest), "an object", function);
        snprintf(rest, sizeof rest, ".tool_calls[%zu].function.name", i);
        const char *name = c_string(nmk_json_get(function, "name"));
        if (!name || !*name) return invalid(p->j, path(p, rest), "expected the function's name as a string");
        snprintf(rest, sizeof rest, ".tool_calls[%zu].function.arguments", i);
        if (nmk_request_arguments(p->j, function, path(p, rest))) return -1;
    }
    return 0;
}

static int take_messages(job *j, const char *name, struct json_object *v) {
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    static const char *const texts[] = {"reasoning_content", "reasoning", "name", "tool_call_id"};
    if (!is(v, json_type_array)) return wrong_type(j, name, "an array", v);
    if (!length(v)) return invalid(j, name, "expected at least one message");
    for (size_t i = 0; i < length(v); i++) {
        place p = {.j = j, .list = name, .message = at(v, i), .index = i};
        if (!is(p.message, json_type_object)) return wrong_type(j, path(&p, ""), "an object", p.message);
        struct json_object *said = nmk_json_get(p.message, "role");
        const char *role = c_string(said);
        bool known = false;
        if (!said) return missing(j, path(&p, ".role"));
        if (!role) return wrong_type(j, path(&p, ".role"), "a string", said);
        for (size_t k = 0; k < sizeof roles / sizeof *roles; k++) known |= !strcmp(role, roles[k]);
        if (!known)
            return nmk_api_fail(
                j->e, 400, path(&p, ".role"), "invalid_value",
                "Invalid value for '%s': '%.40s' is not one of system, developer, user, assistant, tool.", p.where,
                role);
        for (size_t k = 0; k < sizeof texts / sizeof *texts; k++) {
            char rest[32];
            snprintf(rest, sizeof rest, ".%s", texts[k]);
            struct json_object *text = nmk_json_get(p.message, texts[k]);
            if (text && !is(text, json_type_string)) return wrong_type(j, path(&p, rest), "a string", text);
        }
        if (nmk_request_flatten(&p) || take_calls(&p)) return -1;
    }
    j->r->messages = v;
    return 0;
}

/* ---------------------------------------------------------------- prompts */

static int add_prompt(job *j, const char *name, struct json_object *v) {
    nmk_prompt *p = &j->r->prompt[j->r->prompt_count++];
    if (is(v, json_type_string)) return p->text = text_of(v), 0;
    if (!is(v, json_type_array)) return wrong_type(j, name, "a string or an array of token ids", v);
    if (!length(v)) return invalid(j, name, "a prompt of no tokens");
    return ids_of(j, name, v, &p->ids);
}

/* A string, token ids, or a list of these. */
static int take_prompt(job *j, const char *name, struct json_object *v) {
    bool array = is(v, json_type_array);
    if (!array && !is(v, json_type_string)) return wrong_type(j, name, "a string or an array", v);
    if (array && !length(v)) return invalid(j, name, "expected at least one prompt");
    bool one = !array || is(at(v, 0), json_type_int) || is(at(v, 0), json_type_double);
    size_t count = one ? 1 : length(v);
    if (count > (size_t)j->limits->max_choices) return invalid(j, name, "too many prompts");
    if (count > 1 && j->r->body == NMK_BODY_TOKENIZE) return wrong_type(j, name, "a string", v);
    j->r->prompt = xcalloc(count, sizeof *j->r->prompt);
    for (size_t i = 0; i < count; i++) {
        char where[64];
        snprintf(where, sizeof where, "%s[%zu]", name, i);
        if (add_prompt(j, one ? name : where, one ? v : at(v, i))) return -1;
    }
    return 0;
}

static int take_tokens(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_array)) return wrong_type(j, name, "an array of token ids", v);
    return ids_of(j, name, v, &j->r->tokens);
}

/* ---------------------------------------------------------------- the table */

enum {
    CHAT = 1 << NMK_BODY_CHAT,
    TEXT = 1 << NMK_BODY_COMPLETION,
    RESP = 1 << NMK_BODY_RESPONSE,
    MSG = 1 << NMK_BODY_MESSAGE,
    COUNT = 1 << NMK_BODY_COUNT,
    TOK = 1 << NMK_BODY_TOKENIZE,
    DETOK = 1 << NMK_BODY_DETOKENIZE,
    GEN = CHAT | TEXT | RESP | MSG,
    TEMPLATE = CHAT | RESP | MSG | COUNT | TOK,
    ALL = GEN | COUNT | TOK | DETOK
};

typedef enum { BOOL, INT, NUMBER, STRING, SHAPE } type;

/* Where a value goes: within the request, its sampling, or the job. */
typedef enum { REQUEST, SAMPLING, JOB } home;

typedef struct {
    const char *name;
    unsigned bodies; /* the endpoints that have it */
    type type;
    double low, high; /* the least and the most allowed; of INT and NUMBER */
    double fallback;  /* the default of BOOL, INT and NUMBER */
    home home;
    size_t offset;
    int (*take)(job *, const char *, struct json_object *);
} field;

#define R(member) REQUEST, offsetof(nmk_api_request, member), NULL
#define S(member) SAMPLING, offsetof(nmk_sampling, member), NULL
#define J(member) JOB, offsetof(job, member), NULL

/* A repetition penalty of 0 would divide by it. */
#define TINY 1e-3

/* clang-format off */
static const field fields[] = {
    /* name                   endpoints type     low      high  default  goes to */
    {"model",                 ALL,      STRING,    0,        0,   0, R(model)},
    {"messages",              CHAT|TOK, SHAPE,     .take = take_messages},
    {"messages",             MSG|COUNT, SHAPE,     .take = nmk_messages_messages},
    {"system",               MSG|COUNT, SHAPE,     .take = nmk_messages_system},
    {"input",                 RESP,     SHAPE,     .take = nmk_responses_input},
    {"instructions",          RESP,     STRING,    0,        0,   0, R(instructions)},
    {"previous_response_id",  RESP,     STRING,    0,        0,   0, R(previous)},
    {"store",                 RESP,     BOOL,      0,        1,   1, R(store)},
    {"prompt",                TEXT|TOK, SHAPE,     .take = take_prompt},
    {"tokens",                DETOK,    SHAPE,     .take = take_tokens},

    {"temperature",           GEN,      NUMBER,    0,        2,   1, S(temperature)},
    {"top_p",                 GEN,      NUMBER,    0,        1,   1, S(top_p)},
    {"top_k",                 GEN,      INT,      -1,  INT_MAX,   0, S(top_k)},
    {"min_p",                 GEN,      NUMBER,    0,        1,   0, S(min_p)},
    {"presence_penalty",      GEN,      NUMBER,   -2,        2,   0, S(presence_penalty)},
    {"frequency_penalty",     GEN,      NUMBER,   -2,        2,   0, S(frequency_penalty)},
    {"repetition_penalty",    GEN,      NUMBER, TINY,      100,   1, S(repetition_penalty)},
    {"logit_bias",            GEN,      SHAPE,     .take = take_logit_bias},
    {"n",                CHAT|TEXT,     INT, 1, MOST_CHOICES,     1, S(n)},
    {"seed",                  GEN,      SHAPE,     .take = take_seed},
    {"best_of",               TEXT,     INT, 1, MOST_CHOICES,     0, J(best_of)},

    {"logprobs",              CHAT,     BOOL,      0,        1,   0, J(chat_logprobs)},
    {"top_logprobs",     CHAT|RESP,     INT,       0,  INT_MAX,  -1, J(top_logprobs)},
    {"logprobs",              TEXT,     INT,       0,  INT_MAX,  -1, J(text_logprobs)},
    {"return_tokens_as_token_ids", CHAT|TEXT, BOOL,      0,        1,   0, S(tokens_as_ids)},
    {"prompt_logprobs",   CHAT|TEXT,    INT,       0,  INT_MAX,  -1, S(prompt_logprobs)},
    {"prompt_logprobs",   RESP|MSG,     SHAPE,     .take = refuse_any},

    {"stop",        CHAT|TEXT|RESP,     SHAPE,     .take = take_stop},
    {"stop_sequences",        MSG,      SHAPE,     .take = take_stop},
    {"stop_token_ids",        GEN,      SHAPE,     .take = take_stop_ids},
    {"include_stop_str_in_output", GEN, BOOL,      0,        1,   0, S(keep_stop)},
    {"ignore_eos",            GEN,      BOOL,      0,        1,   0, S(ignore_eos)},
    {"min_tokens",            GEN,      INT,       0,  INT_MAX,   0, S(min_tokens)},
    {"max_tokens",            TEXT,     SHAPE,     .take = take_max_tokens},
    {"max_tokens",         CHAT|MSG,    INT,       1,  INT_MAX,   0, S(max_tokens)},
    {"max_completion_tokens", CHAT,     INT,       1,  INT_MAX,   0, J(max_completion_tokens)},
    {"max_output_tokens",     RESP,     INT,       1,  INT_MAX,   0, S(max_tokens)},

    {"stream",                GEN,      BOOL,      0,        1,   0, R(stream)},
    {"stream_options",        GEN,      SHAPE,     .take = take_stream_options},
    {"echo",                  TEXT,     BOOL,      0,        1,   0, R(echo)},
    {"skip_special_tokens",   GEN,      BOOL,      0,        1,   1, R(skip_special_tokens)},
    {"add_special_tokens",    TEXT|TOK, BOOL,      0,        1,   1, R(add_special_tokens)},
    {"return_token_strs",     TOK,      BOOL,      0,        1,   0, R(token_strings)},
    {"cache_salt",            GEN,      STRING,    0,        0,   0, R(cache_salt)},

    {"tools",                 CHAT|TOK, SHAPE,     .take = take_tools},
    {"tools",                 RESP,     SHAPE,     .take = nmk_responses_tools},
    {"tools",                MSG|COUNT, SHAPE,     .take = nmk_messages_tools},
    {"tool_choice",           CHAT,     SHAPE,     .take = nmk_take_tool_choice},
    {"tool_choice",           RESP,     SHAPE,     .take = nmk_responses_tool_choice},
    {"tool_choice",          MSG|COUNT, SHAPE,     .take = nmk_messages_tool_choice},
    {"parallel_tool_calls",  CHAT|RESP|MSG, BOOL,      0,        1,   1, R(parallel_tool_calls)},
    {"reasoning_effort",      TEMPLATE, SHAPE,     .take = nmk_request_effort},
    {"reasoning",            CHAT|RESP, SHAPE,     .take = take_reasoning},
    {"thinking",             TEMPLATE,  SHAPE,     .take = take_thinking},
    {"thinking_token_budget", CHAT|RESP|MSG, INT,  0,  INT_MAX,  -1, R(thinking_tokens)},
    {"include_reasoning",  CHAT|RESP|MSG, BOOL,      0,        1,   1, R(include_reasoning)},
    {"chat_template_kwargs",  TEMPLATE, SHAPE,     .take = take_kwargs},
    {"documents",             TEMPLATE, SHAPE,     .take = take_documents},
    {"continue_final_message",CHAT|TOK, BOOL,      0,        1,   0, R(continue_final)},
    {"add_generation_prompt", TEMPLATE, BOOL,      0,        1,   1, R(add_generation_prompt)},

    {"text",                  RESP,     SHAPE,     .take = nmk_responses_text},
    {"include",               RESP,     SHAPE,     .take = nmk_responses_include},
    {"truncation",            RESP,     SHAPE,     .take = nmk_responses_truncation},
    {"output_config",        MSG|COUNT, SHAPE,     .take = nmk_messages_output_config},
    {"output_format",         MSG,      SHAPE,     .take = nmk_messages_output_format},
    {"background",            RESP,     SHAPE,     .take = refuse_true},
    {"conversation",          RESP,     SHAPE,     .take = refuse_any},
    {"container",             MSG,      SHAPE,     .take = refuse_any},
    {"mcp_servers",          MSG|COUNT, SHAPE,     .take = refuse_some},
    {"response_format",   CHAT|TEXT,      SHAPE,     .take = nmk_take_response_format},
    {"structured_outputs",    GEN,      SHAPE,     .take = nmk_take_structured},
    {"guided_json",           GEN,      SHAPE,     .take = nmk_take_schema},
    {"guided_regex",          GEN,      SHAPE,     .take = nmk_take_regex},
    {"guided_choice",         GEN,      SHAPE,     .take = nmk_take_choice},
    {"guided_grammar",        GEN,      SHAPE,     .take = nmk_take_grammar},
    {"grammar",               GEN,      SHAPE,     .take = nmk_take_grammar},
    {"regex",                 GEN,      SHAPE,     .take = nmk_take_regex},
    {"json_schema",           GEN,      SHAPE,     .take = nmk_take_schema},
    {"bad_words",             GEN,      SHAPE,     .take = refuse},
    {"allowed_token_ids",     GEN,      SHAPE,     .take = refuse},
    {"truncate_prompt_tokens",GEN|TOK,  SHAPE,     .take = refuse_any},
    {"prompt",                RESP,     SHAPE,     .take = refuse_any},
    {"suffix",                TEXT,     SHAPE,     .take = refuse_text},
    {"chat_template",         TEMPLATE, SHAPE,     .take = refuse_text},
    {"use_beam_search",       GEN,      SHAPE,     .take = refuse_true},
    {"length_penalty",        GEN,      SHAPE,     .take = refuse_other},
    {"repeat_penalty",        GEN,      SHAPE,     .take = refuse_other},
    {"n_predict",             GEN,      SHAPE,     .take = refuse_other},
    {"n_probs",               GEN,      SHAPE,     .take = refuse_other},
    {"typical_p",             GEN,      SHAPE,     .take = refuse_other},
    {"tfs_z",                 GEN,      SHAPE,     .take = refuse_other},
    {"top_n_sigma",           GEN,      SHAPE,     .take = refuse_other},
    {"mirostat",              GEN,      SHAPE,     .take = refuse_other},
    {"xtc_probability",       GEN,      SHAPE,     .take = refuse_other},
    {"dynatemp_range",        GEN,      SHAPE,     .take = refuse_other},
    {"dry_multiplier",        GEN,      SHAPE,     .take = refuse_other},
    {"samplers",              GEN,      SHAPE,     .take = refuse_any},
    {"logits_processors",     GEN,      SHAPE,     .take = refuse_some},
    {"functions",             CHAT,     SHAPE,     .take = refuse_functions},
    {"reasoning_format",      CHAT,     SHAPE,     .take = refuse_reasoning_format},
};
/* clang-format on */

#define FIELDS (sizeof fields / sizeof *fields)

/* What generation_config.json calls the same things. */
static const char *const configured[][2] = {
    {"temperature", "temperature"},
    {"top_p", "top_p"},
    {"top_k", "top_k"},
    {"min_p", "min_p"},
    {"repetition_penalty", "repetition_penalty"},
    {"max_new_tokens", "max_tokens"},
};

static void *place_of(job *j, const field *f) {
    char *base = f->home == REQUEST ? (char *)j->r : f->home == SAMPLING ? (char *)&j->r->sampling : (char *)j;
    return base + f->offset;
}

static void set_number(void *p, type t, double value) {
    if (t == BOOL) *(bool *)p = value != 0;
    if (t == INT) *(int *)p = (int)value;
    if (t == NUMBER) *(double *)p = value;
}

static int out_of_range(job *j, const field *f, double value) {
    char low[32], high[32];
    snprintf(low, sizeof low, "at least %g", f->low);
    snprintf(high, sizeof high, " and at most %g", f->high);
    return nmk_api_fail(j->e, 400, f->name, "invalid_value", "Invalid value for '%s': expected %s%s, but got %.9g.",
                        f->name, low, f->high == INT_MAX ? "" : high, value);
}

static int take(job *j, const field *f, struct json_object *v) {
    int64_t integer;
    switch (f->type) {
    case SHAPE: return f->take(j, f->name, v);
    case BOOL:
        if (!is(v, json_type_boolean)) return wrong_type(j, f->name, "a boolean", v);
        *(bool *)place_of(j, f) = json_object_get_boolean(v);
        return 0;
    case INT:
        if (!whole(v, &integer)) return wrong_type(j, f->name, "an integer", v);
        if ((double)integer < f->low || (double)integer > f->high) return out_of_range(j, f, (double)integer);
        *(int *)place_of(j, f) = (int)integer;
        return 0;
    case NUMBER:
        if (!is(v, json_type_int) && !is(v, json_type_double)) return wrong_type(j, f->name, "a number", v);
        double number = json_object_get_double(v);
        if (!(number >= f->low && number <= f->high)) return out_of_range(j, f, number);
        *(double *)place_of(j, f) = number;
        return 0;
    case STRING:
        if (!c_string(v)) return wrong_type(j, f->name, "a string without NUL", v);
        *(const char **)place_of(j, f) = c_string(v);
        return 0;
    }
    return -1;
}

int nmk_request_take(job *j, const char *name, struct json_object *v) {
    for (size_t i = 0; i < FIELDS; i++)
        if (fields[i].bodies & CHAT && !strcmp(fields[i].name, name)) return take(j, &fields[i], v);
    return -1;
}

/* ---------------------------------------------------------------- limits and defaults */

void nmk_request_limits_init(nmk_request_limits *l, int vocab) {
    *l = (nmk_request_limits){.vocab = vocab, .max_logprobs = NMK_TOP_LOGPROBS, .max_choices = MOST_CHOICES};
    for (size_t i = 0; i < FIELDS; i++)
        if (fields[i].home == SAMPLING && fields[i].type != SHAPE)
            set_number((char *)&l->defaults + fields[i].offset, fields[i].type, fields[i].fallback);
}

int nmk_request_defaults(nmk_request_limits *l, struct json_object *generation_config, nmk_err *e) {
    nmk_api_request r = {.sampling = l->defaults};
    nmk_api_error error;
    job j = {.r = &r, .limits = l, .e = &error};
    for (size_t k = 0; k < sizeof configured / sizeof *configured; k++) {
        struct json_object *v = nmk_json_get(generation_config, configured[k][0]);
        for (size_t i = 0; v && i < FIELDS; i++)
            if (fields[i].bodies & CHAT && !strcmp(fields[i].name, configured[k][1]) && take(&j, &fields[i], v))
                return nmk_fail(e, "%s: %s", configured[k][0], error.message);
    }
    struct json_object *sample = nmk_json_get(generation_config, "do_sample");
    if (is(sample, json_type_boolean) && !json_object_get_boolean(sample)) r.sampling.temperature = 0;
    if (r.sampling.top_k < 0) r.sampling.top_k = 0;
    l->defaults = r.sampling;
    return 0;
}

/* ---------------------------------------------------------------- a request */

static int check_logprobs(job *j) {
    bool response = j->r->body == NMK_BODY_RESPONSE, chat = response || j->r->body == NMK_BODY_CHAT;
    const char *name = chat ? "top_logprobs" : "logprobs";
    if (j->top_logprobs > 0 && !j->chat_logprobs && !response) /* whose `include` says it */
        return invalid(j, "top_logprobs", "'logprobs' must be true when 'top_logprobs' is given");
    int wanted = !chat ? j->text_logprobs : !j->chat_logprobs ? -1 : j->top_logprobs < 0 ? 0 : j->top_logprobs;
    if (wanted > j->limits->max_logprobs)
        return nmk_api_fail(j->e, 400, name, "invalid_value",
                            "Invalid value for '%s': expected at most %d, but got %d.", name, j->limits->max_logprobs,
                            wanted);
    j->r->sampling.logprobs = wanted;
    if (j->r->sampling.prompt_logprobs > j->limits->max_logprobs)
        return nmk_api_fail(j->e, 400, "prompt_logprobs", "invalid_value",
                            "Invalid value for 'prompt_logprobs': expected at most %d, but got %d.",
                            j->limits->max_logprobs, j->r->sampling.prompt_logprobs);
    if (j->r->sampling.prompt_logprobs >= 0 && j->r->stream)
        return invalid(j, "prompt_logprobs", "not available when 'stream' is true");
    return 0;
}

/* A variable of the template; one that the request gives itself stays. */
static void pass(nmk_api_request *r, const char *variable, struct json_object *value) {
    static const char name[] = "chat_template_kwargs";
    if (!r->chat_template_kwargs) {
        r->chat_template_kwargs = json_object_new_object();
        json_object_object_add(r->root, name, r->chat_template_kwargs);
    }
    if (json_object_object_get_ex(r->chat_template_kwargs, variable, NULL))
        json_object_put(value);
    else
        json_object_object_add(r->chat_template_kwargs, variable, value);
}

/* Templates know one or the other: an effort, or a switch. */
static void pass_thinking(nmk_api_request *r) {
    if (r->thinking == NMK_THINKING_OFF) r->reasoning_effort = "none";
    if (r->reasoning_effort) pass(r, "reasoning_effort", json_object_new_string(r->reasoning_effort));
    if (r->reasoning_effort && !strcmp(r->reasoning_effort, "none")) r->thinking = NMK_THINKING_OFF;
    if (r->thinking != NMK_THINKING_AS_IS)
        pass(r, "enable_thinking", json_object_new_boolean(r->thinking == NMK_THINKING_ON));
}

/* As vLLM reads it: next to nothing is greedy, and what would make infinities of logits is raised. */
static double calm(double temperature) {
    static const double greedy_below = 1e-5, least = 0.01;
    if (temperature < greedy_below) return 0;
    return temperature < least ? least : temperature;
}

/* An answer that goes on with the last message, which has to have a text then. */
static int check_continued(job *j) {
    nmk_api_request *r = j->r;
    struct json_object *generation = nmk_json_get(r->root, "add_generation_prompt");
    if (!r->continue_final) return 0;
    if (!r->messages) return missing(j, "messages");
    if (generation && json_object_get_boolean(generation))
        return invalid(j, "continue_final_message", "not together with 'add_generation_prompt'");
    struct json_object *last = at(r->messages, length(r->messages) - 1);
    const char *role = json_object_get_string(nmk_json_get(last, "role"));
    if (strcmp(role, "assistant") != 0 || nmk_json_get(last, "tool_calls") ||
        !json_object_get_string_len(nmk_json_get(last, "content")))
        return invalid(j, "continue_final_message", "the last message has to be the assistant's, with a text alone");
    r->add_generation_prompt = false;
    return 0;
}

/* What no field can say for itself. */
static int check(job *j) {
    nmk_api_request *r = j->r;
    nmk_sampling *s = &r->sampling;
    bool generates = (1u << r->body) & GEN;
    if (r->body == NMK_BODY_RESPONSE && nmk_responses_check(j)) return -1;
    if (((1u << r->body) & (MSG | COUNT)) && nmk_messages_check(j)) return -1;
    if (r->body == NMK_BODY_CHAT && !r->messages) return missing(j, "messages");
    if (check_continued(j)) return -1;
    if (r->body == NMK_BODY_COMPLETION && !r->prompt_count) return missing(j, "prompt");
    if (r->body == NMK_BODY_TOKENIZE && !r->prompt_count == !r->messages)
        return r->messages ? invalid(j, "prompt", "give 'prompt' or 'messages', not both") : missing(j, "prompt");
    if (r->body == NMK_BODY_DETOKENIZE && !nmk_json_get(r->root, "tokens")) return missing(j, "tokens");
    if (!generates) return 0;

    if (check_logprobs(j) || nmk_check_form(j)) return -1;
    if (r->echo_alone && !r->echo) return invalid(j, "max_tokens", "0 only when 'echo' is true");
    if (j->has_options && !r->stream) return invalid(j, "stream_options", "only allowed when 'stream' is true");
    if (j->best_of && j->best_of != s->n) return unsupported(j, "best_of", "only as much as 'n'");
    int prompts = r->prompt_count ? r->prompt_count : 1;
    if (s->n > j->limits->max_choices / prompts)
        return nmk_api_fail(j->e, 400, "n", "invalid_value",
                            "Invalid value for 'n': at most %d answers to one request, prompts times n.",
                            j->limits->max_choices);
    if (j->max_completion_tokens) s->max_tokens = j->max_completion_tokens;
    if (s->max_tokens && s->min_tokens > s->max_tokens) return invalid(j, "min_tokens", "more than max_tokens");
    if (s->top_k < 0) s->top_k = 0;
    s->temperature = calm(s->temperature);
    return 0;
}

int nmk_request_parse(nmk_api_request *r, nmk_body body, const char *text, size_t bytes, const nmk_request_limits *l,
                      nmk_api_error *e) {
    enum { COMPLETION_TOKENS = 16 }; /* what OpenAI and vLLM generate when /v1/completions says nothing */
    int rc = -1;
    nmk_err why;
    *r = (nmk_api_request){.body = body, .sampling = l->defaults};
    job j = {.r = r, .limits = l, .e = e};
    r->sampling.logprobs = -1;
    if (body == NMK_BODY_COMPLETION && !r->sampling.max_tokens) r->sampling.max_tokens = COMPLETION_TOKENS;
    for (size_t i = 0; i < FIELDS; i++)
        if (fields[i].home != SAMPLING && fields[i].type <= NUMBER)
            set_number(place_of(&j, &fields[i]), fields[i].type, fields[i].fallback);

    r->root = nmk_json_parse(text, bytes, &why);
    if (!r->root) {
        nmk_api_fail(e, 400, NULL, "invalid_json", "The request's body is not valid JSON: %s", why.text);
        goto out;
    }
    if (!is(r->root, json_type_object)) {
        nmk_api_fail(e, 400, NULL, "invalid_json", "The request's body is %s, not an object.", kind_of(r->root));
        goto out;
    }
    for (size_t i = 0; i < FIELDS; i++) {
        if (!(fields[i].bodies & (1u << body))) continue;
        struct json_object *v = nmk_json_get(r->root, fields[i].name);
        if (v && take(&j, &fields[i], v)) goto out;
    }
    if (check(&j)) goto out;
    pass_thinking(r);
    if (j.documents) pass(r, "documents", json_object_get(j.documents));
    /* A chat template writes BOS itself. */
    if (r->messages && !nmk_json_get(r->root, "add_special_tokens")) r->add_special_tokens = false;
    rc = 0;
out:
    if (rc) nmk_request_free(r);
    return rc;
}

void nmk_request_free(nmk_api_request *r) {
    for (int i = 0; i < r->prompt_count; i++) nmk_ids_free(&r->prompt[i].ids);
    free(r->prompt);
    nmk_ids_free(&r->tokens);
    free(r->sampling.bias);
    free(r->sampling.stop);
    free(r->sampling.stop_id);
    json_object_put(r->made);
    json_object_put(r->form_made);
    json_object_put(r->root);
    *r = (nmk_api_request){0};
}

int nmk_request_fit(const nmk_api_request *r, size_t prompt_tokens, int context, nmk_api_error *e) {
    const char *what = r->body == NMK_BODY_RESPONSE ? "input" : r->messages ? "messages" : "prompt";
    if (!prompt_tokens)
        return nmk_api_fail(e, 400, what, "invalid_value", "Invalid value for '%s': it has no tokens.", what);
    if (prompt_tokens >= (size_t)context && r->body == NMK_BODY_MESSAGE) /* in the words that its clients look for */
        return nmk_api_fail(e, 400, NULL, "context_length_exceeded", "prompt is too long: %zu tokens > %d maximum",
                            prompt_tokens, context - 1);
    if (prompt_tokens >= (size_t)context)
        return nmk_api_fail(
            e, 400, what, "context_length_exceeded",
            "This model's maximum context length is %d tokens. However, your %s resulted in %zu tokens, "
            "which leaves no room for an answer. Please reduce the length of the %s.",
            context, what, prompt_tokens, what);
    int left = context - (int)prompt_tokens, asked = r->sampling.max_tokens;
    return asked && asked < left ? asked : left;
}

int nmk_request_no_model(const nmk_api_request *r, nmk_api_error *e) {
    return nmk_api_fail(e, 404, "model", "model_not_found", "The model '%.200s' does not exist.",
                        r->model ? r->model : "");
}
