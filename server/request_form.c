/* The fields that say what an answer has to be: the one form that each of them means, whichever server's words these
 * are.  What a schema, expression or grammar says is looked at when it is made a constraint of. */
#include "request_impl.h"

#include <stdio.h>
#include <stdlib.h>

/* Asked for twice is a mistake: which of them counts? */
static int set_form(job *j, const char *param, nmk_form form, struct json_object *value) {
    nmk_api_request *r = j->r;
    if (r->form)
        return nmk_api_fail(j->e, 400, param, "invalid_value",
                            "Invalid value for '%s': '%s' says already what the "
                            "answer has to be.",
                            param, r->form_param);
    r->form = form, r->form_value = value, r->form_param = param;
    return 0;
}

/* A schema, or the text of one. */
static int take_schema(job *j, const char *param, struct json_object *v) {
    if (is(v, json_type_string)) {
        nmk_err why;
        nmk_text t = text_of(v);
        struct json_object *schema = nmk_json_parse(t.data, t.bytes, &why);
        if (!schema)
            return nmk_api_fail(j->e, 400, param, "invalid_value", "Invalid value for '%s': %s", param, why.text);
        json_object_put(j->r->form_made);
        v = j->r->form_made = schema;
    }
    if (!is(v, json_type_object) && !is(v, json_type_boolean)) return wrong_type(j, param, "a JSON schema", v);
    return set_form(j, param, NMK_FORM_SCHEMA, v);
}

static int take_text(job *j, const char *param, nmk_form form, struct json_object *v) {
    if (!is(v, json_type_string)) return wrong_type(j, param, "a string", v);
    return json_object_get_string_len(v) ? set_form(j, param, form, v) : 0;
}

static int take_choice(job *j, const char *param, struct json_object *v) {
    if (!is(v, json_type_array)) return wrong_type(j, param, "an array of strings", v);
    for (size_t i = 0; i < length(v); i++) {
        if (!is(at(v, i), json_type_string)) return wrong_type(j, param, "an array of strings", at(v, i));
        if (!text_of(at(v, i)).bytes) return invalid(j, param, "a choice must not be empty");
    }
    return length(v) ? set_form(j, param, NMK_FORM_CHOICE, v) : 0;
}

int nmk_take_response_format(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    const char *type = c_string(nmk_json_get(v, "type"));
    struct json_object *named = nmk_json_get(v, "json_schema"), *schema = nmk_json_get(v, "schema");
    if (!type) return missing(j, "response_format.type");
    if (!strcmp(type, "text")) return 0;
    if (!strcmp(type, "json_object")) {
        if (schema) return take_schema(j, "response_format.schema", schema);
        return set_form(j, "response_format", NMK_FORM_OBJECT, NULL);
    }
    if (strcmp(type, "json_schema") != 0)
        return nmk_api_fail(j->e, 400, "response_format.type", "unsupported_value",
                            "response_format of type '%.40s' is not supported by this server; expected 'text', "
                            "'json_object' or 'json_schema'.",
                            type);
    if (!named && schema) return take_schema(j, "response_format.schema", schema);
    if (!named) return missing(j, "response_format.json_schema");
    if (!is(named, json_type_object)) return wrong_type(j, "response_format.json_schema", "an object", named);
    schema = nmk_json_get(named, "schema");
    if (!schema) return missing(j, "response_format.json_schema.schema");
    return take_schema(j, "response_format.json_schema.schema", schema);
}

int nmk_take_structured(job *j, const char *name, struct json_object *v) {
    if (!is(v, json_type_object)) return wrong_type(j, name, "an object", v);
    int rc = 0;
    json_object_object_foreach(v, key, value) {
        bool is_true = is(value, json_type_boolean) && json_object_get_boolean(value);
        if (rc) break;
        if (!value || *key == '_' || !strcmp(key, "disable_fallback") || !strcmp(key, "disable_additional_properties"))
            continue; /* nothing falls back here, and properties that a schema does not name are none */
        if (!strcmp(key, "json"))
            rc = take_schema(j, "structured_outputs.json", value);
        else if (!strcmp(key, "regex"))
            rc = take_text(j, "structured_outputs.regex", NMK_FORM_REGEX, value);
        else if (!strcmp(key, "grammar"))
            rc = take_text(j, "structured_outputs.grammar", NMK_FORM_GRAMMAR, value);
        else if (!strcmp(key, "choice"))
            rc = take_choice(j, "structured_outputs.choice", value);
        else if (!strcmp(key, "json_object"))
            rc = is_true ? set_form(j, "structured_outputs.json_object", NMK_FORM_OBJECT, NULL) : 0;
        else if (is_true || !is(value, json_type_boolean))
            rc = nmk_api_fail(j->e, 400, name, "unsupported_value",
                              "'%.60s' of structured_outputs is not supported by this server; expected json, regex, "
                              "choice, grammar or json_object.",
                              key);
    }
    return rc;
}

int nmk_take_schema(job *j, const char *name, struct json_object *v) { return take_schema(j, name, v); }

int nmk_take_regex(job *j, const char *name, struct json_object *v) { return take_text(j, name, NMK_FORM_REGEX, v); }

int nmk_take_choice(job *j, const char *name, struct json_object *v) { return take_choice(j, name, v); }

int nmk_take_grammar(job *j, const char *name, struct json_object *v) {
    return take_text(j, name, NMK_FORM_GRAMMAR, v);
}

int nmk_take_tool_choice(job *j, const char *name, struct json_object *v) {
    nmk_api_request *r = j->r;
    const char *s = c_string(v);
    if (s && !strcmp(s, "auto")) return 0;
    if (s && !strcmp(s, "none")) return r->tool_choice_none = true, 0;
    if (s && !strcmp(s, "required")) return r->tool_choice_required = true, 0;
    if (s) return invalid(j, name, "expected 'auto', 'none', 'required' or a function");
    if (!is(v, json_type_object)) return wrong_type(j, name, "a string or an object", v);
    const char *type = c_string(nmk_json_get(v, "type"));
    if (!type || strcmp(type, "function") != 0) return invalid(j, "tool_choice.type", "only 'function' is supported");
    struct json_object *function = nmk_json_get(v, "function");
    const char *tool = c_string(nmk_json_get(function ? function : v, "name"));
    if (!tool || !*tool) return missing(j, "tool_choice.function.name");
    r->tool_choice_required = true, r->tool_choice_name = tool;
    return 0;
}

/* What these fields say together. */
int nmk_check_form(job *j) {
    nmk_api_request *r = j->r;
    const nmk_sampling *s = &r->sampling;
    bool found = !r->tool_choice_name, strict = false;
    for (size_t i = 0; r->tools && i < length(r->tools); i++) {
        struct json_object *function = nmk_json_get(at(r->tools, i), "function"),
                           *is_strict = nmk_json_get(function, "strict");
        if (is_strict && !is(is_strict, json_type_boolean)) {
            char where[64];
            snprintf(where, sizeof where, "tools[%zu].function.strict", i);
            return wrong_type(j, where, "a boolean", is_strict);
        }
        found |= r->tool_choice_name && !strcmp(c_string(nmk_json_get(function, "name")), r->tool_choice_name);
        strict |= is_strict && json_object_get_boolean(is_strict);
    }
    if (r->tool_choice_required && !r->tools) return invalid(j, "tool_choice", "only allowed when 'tools' are given");
    if (!found)
        return nmk_api_fail(j->e, 400, "tool_choice", "invalid_value",
                            "Invalid value for 'tool_choice': there is no tool '%.60s'.", r->tool_choice_name);
    if (r->tool_choice_required && r->form)
        return invalid(j, "tool_choice", "the answer cannot be a call and have a form of its own");
    if (!r->form && !r->tool_choice_required && !(strict && !r->tool_choice_none)) return 0;
    if (s->ignore_eos)
        return invalid(j, "ignore_eos", "not together with an answer of a given form, which has its end");
    if (s->min_tokens)
        return invalid(j, "min_tokens", "not together with an answer of a given form, which has its end");
    return 0;
}
