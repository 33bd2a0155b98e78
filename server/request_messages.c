/* What /v1/messages asks for, in chat completions' words.
 *
 * Of a user's blocks the results of tools become messages of their own, before the text that came with them; the
 * assistant's blocks become one message with reasoning, content and calls. */
#include "request_impl.h"

static struct json_object *text(const char *s) { return json_object_new_string(s); }

static struct json_object *new_message(struct json_object *messages, const char *role) {
    struct json_object *m = json_object_new_object();
    json_object_object_add(m, "role", text(role));
    json_object_array_add(messages, m);
    return m;
}

static void set_text(struct json_object *m, const char *member, const nmk_buf *b) {
    json_object_object_add(m, member, json_object_new_string_len(b->data ? b->data : "", (int)b->length));
}

/* A block's member that has to be a string; NULL with the error. */
static struct json_object *string_of(place *p, size_t i, struct json_object *block, const char *name) {
    struct json_object *v = nmk_json_get(block, name);
    char rest[64];
    if (is(v, json_type_string)) return v;
    snprintf(rest, sizeof rest, ".content[%zu].%s", i, name);
    v ? wrong_type(p->j, path(p, rest), "a string", v) : missing(p->j, path(p, rest));
    return NULL;
}

static int add_text(place *p, size_t i, struct json_object *block, const char *name, nmk_buf *to) {
    struct json_object *v = string_of(p, i, block, name);
    if (v) nmk_buf_add(to, text_of(v).data, text_of(v).bytes);
    return v ? 0 : -1;
}

static int add_call(place *p, size_t i, struct json_object *block, struct json_object *calls) {
    struct json_object *id = string_of(p, i, block, "id"), *name = id ? string_of(p, i, block, "name") : NULL;
    struct json_object *input = nmk_json_get(block, "input");
    char rest[64];
    if (!name) return -1;
    snprintf(rest, sizeof rest, ".content[%zu].input", i);
    if (input && !is(input, json_type_object)) return wrong_type(p->j, path(p, rest), "an object", input);
    snprintf(rest, sizeof rest, ".content[%zu].name", i);
    if (!json_object_get_string_len(name)) return invalid(p->j, path(p, rest), "it is empty");
    struct json_object *call = json_object_new_object(), *function = json_object_new_object();
    json_object_array_add(calls, call);
    json_object_object_add(call, "id", json_object_get(id));
    json_object_object_add(call, "type", text("function"));
    json_object_object_add(call, "function", function);
    json_object_object_add(function, "name", json_object_get(name));
    json_object_object_add(function, "arguments", input ? json_object_get(input) : json_object_new_object());
    return 0;
}

/* A result's content is a text, blocks of text, or nothing. */
static int add_result(place *p, size_t i, struct json_object *block, struct json_object *messages) {
    struct json_object *id = string_of(p, i, block, "tool_use_id");
    char list[128];
    if (!id) return -1;
    snprintf(list, sizeof list, "%s[%zu].content", p->list, p->index);
    place result = {.j = p->j, .list = list, .message = block, .index = i};
    if (nmk_request_flatten(&result)) return -1;
    struct json_object *m = new_message(messages, "tool");
    json_object_object_add(m, "tool_call_id", json_object_get(id));
    json_object_object_add(m, "content", json_object_get(nmk_json_get(block, "content")));
    return 0;
}

static int add_blocks(place *p, const char *role, struct json_object *blocks, struct json_object *messages) {
    bool assistant = !strcmp(role, "assistant");
    int rc = -1;
    nmk_buf said = {0}, thought = {0};
    struct json_object *calls = nmk_request_keep(p->j, json_object_new_array());
    for (size_t i = 0; i < length(blocks); i++) {
        struct json_object *block = at(blocks, i);
        char rest[64];
        snprintf(rest, sizeof rest, ".content[%zu]", i);
        if (!is(block, json_type_object)) {
            wrong_type(p->j, path(p, rest), "an object", block);
            goto out;
        }
        struct json_object *kind = string_of(p, i, block, "type");
        const char *type = kind ? json_object_get_string(kind) : NULL;
        if (!type) goto out;
        if (!strcmp(type, "text")) {
            if (add_text(p, i, block, "text", &said)) goto out;
        } else if (assistant && !strcmp(type, "thinking")) {
            if (add_text(p, i, block, "thinking", &thought)) goto out;
        } else if (assistant && !strcmp(type, "redacted_thinking")) {
        } else if (assistant && !strcmp(type, "tool_use")) {
            if (add_call(p, i, block, calls)) goto out;
        } else if (!assistant && !strcmp(type, "tool_result")) {
            if (add_result(p, i, block, messages)) goto out;
        } else {
            snprintf(rest, sizeof rest, ".content[%zu].type", i);
            nmk_api_fail(p->j->e, 400, path(p, rest), "unsupported_value",
                         "Blocks of type '%.40s' are not supported in a message of the %s.", type, role);
            goto out;
        }
    }
    if (assistant || said.length || !length(blocks)) {
        struct json_object *m = new_message(messages, role);
        if (thought.length) set_text(m, "reasoning_content", &thought);
        set_text(m, "content", &said);
        if (length(calls)) json_object_object_add(m, "tool_calls", json_object_get(calls));
    }
    rc = 0;
out:
    nmk_buf_free(&said), nmk_buf_free(&thought);
    return rc;
}

int nmk_messages_messages(job *j, const char *name, struct json_object *v) {
    /* two that one client uses for what it tells the model beside its user */
    static const char *const roles[][2] = {
        {"user", "user"}, {"assistant", "assistant"}, {"system", "system"}, {"ctx", "user"}, {"msg", "user"}};
    if (!is(v, json_type_array)) return wrong_type(j, name, "an array", v);
    if (!length(v)) return invalid(j, name, "expected at least one message");
    struct json_object *messages = nmk_request_keep(j, json_object_new_array());
    for (size_t i = 0; i < length(v); i++) {
        place p = {.j = j, .list = name, .message = at(v, i), .index = i};
        if (!is(p.message, json_type_object)) return wrong_type(j, path(&p, ""), "an object", p.message);
        struct json_object *said = nmk_json_get(p.message, "role"), *content = nmk_json_get(p.message, "content");
        const char *role = NULL;
        if (!said) return missing(j, path(&p, ".role"));
        if (!is(said, json_type_string)) return wrong_type(j, path(&p, ".role"), "a string", said);
        for (size_t k = 0; k < sizeof roles / sizeof *roles; k++)
            if (!strcmp(json_object_get_string(said), roles[k][0])) role = roles[k][1];
        if (!role)
            return nmk_api_fail(j->e, 400, path(&p, ".role"), "invalid_value",
                                "Invalid value for '%s': '%.40s' is not one of user, assistant.", p.where,
                                json_object_get_string(said));
        if (!content) return missing(j, path(&p, ".content"));
        if (is(content, json_type_string))
            json_object_object_add(new_message(messages, role), "content", json_object_get(content));
        else if (!is(content, json_type_array))
            return wrong_type(j, path(&p, ".content"), "a string or an array of blocks", content);
        else if (add_blocks(&p, role, content, messages))
            return -1;
    }
    j->r->messages = messages;
    return 0;
}

/* Goes before the messages, in nmk_messages_check: fields are taken in the table's order. */
int nmk_messages_system(job *j, const char *name, struct json_object *v) {
    struct json_object *frame = nmk_request_keep(j, json_object_new_object());
    if (!is(v, json_type_string) && !is(v, json_type_array))
        return wrong_type(j, name, "a string or an array of blocks", v);
    json_object_object_add(frame, "content", json_object_get(v));
    for (size_t i = 0; is(v, json_type_array) && i < length(v); i++) {
        const char *type = c_string(nmk_json_get(at(v, i), "type"));
        char where[64];
        snprintf(where, sizeof where, "system[%zu].type", i);
        if (!type || strcmp(type, "text") != 0) return invalid(j, where, "only blocks of text are supported");
        snprintf(where, sizeof where, "system[%zu].text", i);
        if (!is(nmk_json_get(at(v, i), "text"), json_type_string)) return missing(j, where);
    }
    place p = {.j = j, .list = name, .message = frame};
    if (nmk_request_flatten(&p)) return -1;
    j->system = nmk_json_get(frame, "content");
    return 0;
}

int nmk_messages_check(job *j) {
    nmk_api_request *q = j->r;
    if (!q->messages) return missing(j, "messages");
    if (q->body == NMK_BODY_MESSAGE && !nmk_json_get(q->root, "max_tokens")) return missing(j, "max_tokens");
    if (j->system && json_object_get_string_len(j->system)) {
        struct json_object *all = nmk_request_keep(j, json_object_new_array());
        json_object_object_add(new_message(all, "system"), "content", json_object_get(j->system));
        for (size_t i = 0; i < length(q->messages); i++)
            json_object_array_add(all, json_object_get(at(q->messages, i)));
        q->messages = all;
    }
    struct json_object *last = at(q->messages, length(q->messages) - 1);
    bool own = !strcmp(json_object_get_string(nmk_json_get(last, "role")), "assistant");
    if (own && nmk_json_get(last, "tool_calls")) return invalid(j, "messages", "the last calls have no results");
    q->continue_final = own && json_object_get_string_len(nmk_json_get(last, "content"));
    /* who wants to see the model think says so */
    if (!nmk_json_get(q->root, "thinking") && !q->reasoning_effort && q->thinking_tokens < 0)
        q->thinking = NMK_THINKING_OFF;
    q->include_usage = true;
    return 0;
}

/* ---------------------------------------------------------------- other fields */

int nmk_messages_tools(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_array)) return wrong_type(j, name, "an array", v);
    struct json_object *tools = nmk_request_keep(j, json_object_new_array());
    for (size_t i = 0; i < length(v); i++) {
        place p = {.j = j, .list = name, .message = at(v, i), .index = i};
        if (!is(p.message, json_type_object)) return wrong_type(j, path(&p, ""), "an object", p.message);
        struct json_object *kind = nmk_json_get(p.message, "type"), *schema = nmk_json_get(p.message, "input_schema");
        if (kind && (!c_string(kind) || strcmp(c_string(kind), "custom") != 0))
            return invalid(j, path(&p, ".type"), "only 'custom' tools are supported");
        const char *called = c_string(nmk_json_get(p.message, "name"));
        if (!called || !*called) return invalid(j, path(&p, ".name"), "expected the tool's name as a string");
        if (!schema) return missing(j, path(&p, ".input_schema"));
        if (!is(schema, json_type_object)) return wrong_type(j, path(&p, ".input_schema"), "an object", schema);
        struct json_object *tool = json_object_new_object(), *function = json_object_new_object();
        struct json_object *description = nmk_json_get(p.message, "description");
        struct json_object *strict = nmk_json_get(p.message, "strict");
        json_object_array_add(tools, tool);
        json_object_object_add(tool, "type", text("function"));
        json_object_object_add(tool, "function", function);
        json_object_object_add(function, "name", text(called));
        if (description) json_object_object_add(function, "description", json_object_get(description));
        json_object_object_add(function, "parameters", json_object_get(schema));
        if (strict) json_object_object_add(function, "strict", json_object_get(strict));
    }
    return nmk_request_take(j, "tools", tools);
}

int nmk_messages_tool_choice(job *j, const char *name, struct json_object *v) {
    static const char *const words[][2] = {{"auto", "auto"}, {"none", "none"}, {"any", "required"}};
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    const char *type = c_string(nmk_json_get(v, "type"));
    struct json_object *alone = nmk_json_get(v, "disable_parallel_tool_use"), *choice = NULL;
    if (!type) return missing(j, "tool_choice.type");
    if (alone && !is(alone, json_type_boolean))
        return wrong_type(j, "tool_choice.disable_parallel_tool_use", "a boolean", alone);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(type, words[i][0])) choice = text(words[i][1]);
    if (!strcmp(type, "tool")) {
        const char *called = c_string(nmk_json_get(v, "name"));
        if (!called) return missing(j, "tool_choice.name");
        struct json_object *function = json_object_new_object();
        choice = json_object_new_object();
        json_object_object_add(choice, "type", text("function"));
        json_object_object_add(choice, "function", function);
        json_object_object_add(function, "name", text(called));
    }
    if (!choice) return invalid(j, "tool_choice.type", "expected auto, any, tool or none");
    if (nmk_request_take(j, name, nmk_request_keep(j, choice))) return -1;
    if (alone && json_object_get_boolean(alone))
        return nmk_request_take(j, "parallel_tool_calls", nmk_request_keep(j, json_object_new_boolean(0)));
    return 0;
}

/* {"type": "json_schema", "schema"} */
int nmk_messages_output_format(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    const char *type = c_string(nmk_json_get(v, "type"));
    if (!type || strcmp(type, "json_schema") != 0) return invalid(j, name, "expected type 'json_schema'");
    struct json_object *framed = nmk_request_keep(j, json_object_new_object()), *schema = json_object_new_object();
    json_object_object_add(framed, "type", text(type));
    json_object_object_add(framed, type, schema);
    json_object_object_add(schema, "name", text("output"));
    json_object_object_add(schema, "schema", json_object_get(nmk_json_get(v, "schema")));
    json_object_object_add(schema, "strict", json_object_new_boolean(1));
    return nmk_request_take(j, "response_format", framed);
}

int nmk_messages_output_config(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    struct json_object *effort = nmk_json_get(v, "effort"), *format = nmk_json_get(v, "format");
    if (effort && nmk_request_effort(j, "output_config.effort", effort)) return -1;
    return format ? nmk_messages_output_format(j, "output_config.format", format) : 0;
}
