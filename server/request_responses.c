/* What /v1/responses asks for, in chat completions' words.
 *
 * Items become messages: reasoning, text and calls of one turn are one message of the assistant, each output of a
 * function is a message of its own.  Items of earlier responses come before the request's own, instructions first. */
#include "request_impl.h"

typedef struct {
    place at;
    struct json_object *messages, *turn; /* turn: the assistant's message that may grow; NULL: none */
} reader;

static struct json_object *text(const char *s) { return json_object_new_string(s); }

static struct json_object *new_message(reader *r, const char *role) {
    struct json_object *m = json_object_new_object();
    json_object_object_add(m, "role", text(role));
    json_object_array_add(r->messages, m);
    return m;
}

/* The assistant's message that takes `member`: the one that is open, if it has none and nothing that comes after it. */
static struct json_object *turn_for(reader *r, const char *member) {
    bool calls = nmk_json_get(r->turn, "tool_calls"),
         said = json_object_get_string_len(nmk_json_get(r->turn, "content"));
    bool fits = r->turn && (!strcmp(member, "tool_calls") || (!calls && !said));
    if (fits && !strcmp(member, "reasoning_content")) fits = !nmk_json_get(r->turn, member);
    if (!fits) {
        r->turn = new_message(r, "assistant");
        json_object_object_add(r->turn, "content", text(""));
    }
    return r->turn;
}

/* A member that has to be a string; NULL with the error. */
static struct json_object *string_of(reader *r, const char *name) {
    struct json_object *v = nmk_json_get(r->at.message, name);
    char rest[40];
    if (is(v, json_type_string)) return v;
    snprintf(rest, sizeof rest, ".%s", name);
    v ? wrong_type(r->at.j, path(&r->at, rest), "a string", v) : missing(r->at.j, path(&r->at, rest));
    return NULL;
}

static int take_message(reader *r) {
    static const char *const roles[] = {"user", "system", "developer", "assistant"};
    struct json_object *role = string_of(r, "role");
    const char *known = NULL;
    if (!role) return -1;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (!strcmp(json_object_get_string(role), roles[i])) known = roles[i];
    if (!known)
        return nmk_api_fail(r->at.j->e, 400, path(&r->at, ".role"), "invalid_value",
                            "Invalid value for '%s': '%.40s' is not one of user, system, developer, assistant.",
                            r->at.where, json_object_get_string(role));
    if (!nmk_json_get(r->at.message, "content")) return missing(r->at.j, path(&r->at, ".content"));
    if (nmk_request_flatten(&r->at)) return -1;
    struct json_object *content = json_object_get(nmk_json_get(r->at.message, "content"));
    bool assistant = !strcmp(known, "assistant");
    struct json_object *m = assistant ? turn_for(r, "content") : new_message(r, known);
    if (!assistant) r->turn = NULL;
    json_object_object_add(m, "content", content);
    return 0;
}

/* The texts of a list of parts, each with an empty line before it. */
static int add_parts(reader *r, const char *name, nmk_buf *all) {
    struct json_object *list = nmk_json_get(r->at.message, name);
    char rest[80];
    if (!list) return 0;
    snprintf(rest, sizeof rest, ".%s", name);
    if (!is(list, json_type_array)) return wrong_type(r->at.j, path(&r->at, rest), "an array", list);
    for (size_t i = 0; i < length(list); i++) {
        struct json_object *said = nmk_json_get(at(list, i), "text");
        snprintf(rest, sizeof rest, ".%s[%zu].text", name, i);
        if (!is(said, json_type_string))
            return said ? wrong_type(r->at.j, path(&r->at, rest), "a string", said)
                        : missing(r->at.j, path(&r->at, rest));
        if (all->length) nmk_buf_puts(all, "\n\n");
        nmk_buf_add(all, text_of(said).data, text_of(said).bytes);
    }
    return 0;
}

/* The reasoning itself, else its summary. */
static int take_reasoning(reader *r) {
    nmk_buf all = {0};
    int rc = add_parts(r, "content", &all);
    if (!rc && !all.length) rc = add_parts(r, "summary", &all);
    if (!rc && all.length)
        json_object_object_add(turn_for(r, "reasoning_content"), "reasoning_content",
                               json_object_new_string_len(all.data, (int)all.length));
    nmk_buf_free(&all);
    return rc;
}

static int take_call(reader *r) {
    struct json_object *id = string_of(r, "call_id"), *name = id ? string_of(r, "name") : NULL;
    struct json_object *arguments = name ? string_of(r, "arguments") : NULL;
    if (!arguments) return -1;
    if (!json_object_get_string_len(name)) return invalid(r->at.j, path(&r->at, ".name"), "it is empty");
    struct json_object *m = turn_for(r, "tool_calls"), *calls = nmk_json_get(m, "tool_calls");
    struct json_object *call = json_object_new_object(), *function = json_object_new_object();
    if (!calls) json_object_object_add(m, "tool_calls", calls = json_object_new_array());
    json_object_array_add(calls, call);
    json_object_object_add(call, "id", json_object_get(id));
    json_object_object_add(call, "type", text("function"));
    json_object_object_add(call, "function", function);
    json_object_object_add(function, "name", json_object_get(name));
    json_object_object_add(function, "arguments", json_object_get(arguments));
    return nmk_request_arguments(r->at.j, function, path(&r->at, ".arguments"));
}

static int take_output(reader *r) {
    struct json_object *id = string_of(r, "call_id"), *output = nmk_json_get(r->at.message, "output");
    if (!id) return -1;
    if (!output) return missing(r->at.j, path(&r->at, ".output"));
    if (!is(output, json_type_string) && !is(output, json_type_array))
        return wrong_type(r->at.j, path(&r->at, ".output"), "a string or an array of parts", output);
    json_object_object_add(r->at.message, "content", json_object_get(output));
    if (nmk_request_flatten(&r->at)) return -1;
    struct json_object *m = new_message(r, "tool");
    json_object_object_add(m, "tool_call_id", json_object_get(id));
    json_object_object_add(m, "content", json_object_get(nmk_json_get(r->at.message, "content")));
    r->turn = NULL;
    return 0;
}

static int take_item(reader *r);

static int take_reference(reader *r) {
    const nmk_request_limits *l = r->at.j->limits;
    struct json_object *id = string_of(r, "id");
    if (!id) return -1;
    struct json_object *item = l->kept ? nmk_kept_item(l->kept, l->key, json_object_get_string(id)) : NULL;
    if (!item)
        return nmk_api_fail(r->at.j->e, 404, path(&r->at, ".id"), "not_found",
                            "Item with id '%.100s' not found: it was not kept, or is not any more.",
                            json_object_get_string(id));
    nmk_request_keep(r->at.j, item);
    r->at.message = item;
    return take_item(r);
}

static int take_item(reader *r) {
    static const struct {
        const char *type;
        int (*take)(reader *);
    } kinds[] = {{"message", take_message},
                 {"function_call", take_call},
                 {"function_call_output", take_output},
                 {"reasoning", take_reasoning},
                 {"item_reference", take_reference}};
    if (!is(r->at.message, json_type_object)) return wrong_type(r->at.j, path(&r->at, ""), "an object", r->at.message);
    struct json_object *said = nmk_json_get(r->at.message, "type");
    const char *type = said ? c_string(said) : "message";
    if (!type) return wrong_type(r->at.j, path(&r->at, ".type"), "a string", said);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(type, kinds[i].type)) return kinds[i].take(r);
    return nmk_api_fail(r->at.j->e, 400, path(&r->at, ".type"), "unsupported_value",
                        "Items of type '%.40s' are not supported by this server.", type);
}

static int add_items(reader *r, struct json_object *list) {
    for (size_t i = 0; i < length(list); i++) {
        r->at.message = at(list, i), r->at.index = i;
        if (take_item(r)) return -1;
    }
    return 0;
}

/* A text is one message of the user. */
int nmk_responses_input(job *j, const char *name, struct json_object *v) {
    if (is(v, json_type_array)) return j->r->input = v, 0;
    if (!is(v, json_type_string)) return wrong_type(j, name, "a string or an array of items", v);
    struct json_object *item = json_object_new_object();
    j->r->input = nmk_request_keep(j, json_object_new_array());
    json_object_array_add(j->r->input, item);
    json_object_object_add(item, "role", text("user"));
    json_object_object_add(item, "content", json_object_get(v));
    return 0;
}

int nmk_responses_check(job *j) {
    nmk_api_request *q = j->r;
    if (!q->input) return missing(j, "input");
    struct json_object *earlier = nmk_request_keep(j, json_object_new_array());
    reader r = {.at = {.j = j, .list = "input"}, .messages = nmk_request_keep(j, json_object_new_array())};
    if (q->instructions) json_object_object_add(new_message(&r, "system"), "content", text(q->instructions));
    if (q->previous && (!j->limits->kept || nmk_kept_items(j->limits->kept, j->limits->key, q->previous, earlier)))
        return nmk_api_fail(j->e, 400, "previous_response_id", "previous_response_not_found",
                            "Previous response with id '%.100s' not found: it was not kept, or is not any more.",
                            q->previous);
    if (add_items(&r, earlier)) return -1;
    /* what is kept of it is as it came */
    struct json_object *copy = NULL;
    json_object_deep_copy(q->input, &copy, NULL);
    if (add_items(&r, nmk_request_keep(j, copy))) return -1;
    if (!length(r.messages)) return invalid(j, "input", "expected at least one item");
    q->messages = r.messages;
    q->include_usage = true;
    return 0;
}

/* ---------------------------------------------------------------- other fields */

/* {"type": "function", "name", ...} is a function without a frame around it. */
int nmk_responses_tools(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_array)) return wrong_type(j, name, "an array", v);
    struct json_object *tools = nmk_request_keep(j, json_object_new_array());
    for (size_t i = 0; i < length(v); i++) {
        place p = {.j = j, .list = name, .message = at(v, i), .index = i};
        if (!is(p.message, json_type_object)) return wrong_type(j, path(&p, ""), "an object", p.message);
        const char *type = c_string(nmk_json_get(p.message, "type"));
        if (!type || strcmp(type, "function") != 0)
            return invalid(j, path(&p, ".type"), "only 'function' tools are supported");
        const char *called = c_string(nmk_json_get(p.message, "name"));
        if (!called || !*called) return invalid(j, path(&p, ".name"), "expected the function's name as a string");
        struct json_object *tool = json_object_new_object(), *function = json_object_new_object();
        json_object_array_add(tools, tool);
        json_object_object_add(tool, "type", text("function"));
        json_object_object_add(tool, "function", function);
        json_object_object_foreach(p.message, key, value) {
            if (strcmp(key, "type") != 0 && value) json_object_object_add(function, key, json_object_get(value));
        }
    }
    return nmk_request_take(j, "tools", tools);
}

int nmk_responses_tool_choice(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_object)) return nmk_request_take(j, name, v);
    const char *type = c_string(nmk_json_get(v, "type"));
    if (!type || strcmp(type, "function") != 0)
        return invalid(j, "tool_choice.type", "only 'function' tools are supported");
    struct json_object *choice = nmk_request_keep(j, json_object_new_object()), *function = json_object_new_object();
    json_object_object_add(choice, "type", text("function"));
    json_object_object_add(choice, "function", function);
    json_object_object_add(function, "name", json_object_get(nmk_json_get(v, "name")));
    return nmk_request_take(j, name, choice);
}

/* {"format": {"type": "json_schema", "name", "schema", "strict"}} */
int nmk_responses_text(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    struct json_object *format = nmk_json_get(v, "format");
    if (!format) return 0;
    if (!is(format, json_type_object)) return wrong_type(j, "text.format", "an object", format);
    const char *type = c_string(nmk_json_get(format, "type"));
    if (!type || strcmp(type, "json_schema") != 0) return nmk_request_take(j, "response_format", format);
    struct json_object *framed = nmk_request_keep(j, json_object_new_object());
    json_object_object_add(framed, "type", text(type));
    json_object_object_add(framed, type, json_object_get(format));
    return nmk_request_take(j, "response_format", framed);
}

/* What more is to be said: log-probabilities; of what nobody here does there is nothing, and reasoning is never
 * encrypted. */
int nmk_responses_include(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_array)) return wrong_type(j, name, "an array of strings", v);
    for (size_t i = 0; i < length(v); i++) {
        const char *what = c_string(at(v, i));
        if (!what) return wrong_type(j, name, "an array of strings", at(v, i));
        if (!strcmp(what, "message.output_text.logprobs")) j->chat_logprobs = true;
    }
    return 0;
}

/* auto: what is too long is refused all the same, by its length. */
int nmk_responses_truncation(job *j, const char *name, struct json_object *v) {
    const char *s = c_string(v);
    if (!s) return wrong_type(j, name, "a string", v);
    return strcmp(s, "auto") != 0 && strcmp(s, "disabled") != 0 ? invalid(j, name, "expected auto or disabled") : 0;
}
