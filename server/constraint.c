#include "constraint.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gbnf.h"
#include "regex.h"
#include "schema.h"

enum { KEPT = 16 }; /* grammars */

struct nmk_constraints {
    const nmk_tokenizer *tokenizer;
    nmk_markers markers;
    bool has_markers;
    int vocab, end_count;
    int32_t *end;
    nmk_token_tree *tree; /* NULL: nobody has asked yet */
    struct {
        char *key; /* NULL: free */
        nmk_masks *masks;
        uint64_t used;
    } kept[KEPT];
    uint64_t uses;
};

nmk_constraints *nmk_constraints_new(const nmk_tokenizer *t, const nmk_markers *markers, int vocab, const int32_t *ends,
                                     int end_count) {
    nmk_constraints *c = xcalloc(1, sizeof *c);
    c->tokenizer = t, c->vocab = vocab;
    c->has_markers = markers != NULL;
    if (markers) c->markers = *markers;
    c->end = xmalloc(sizeof *ends * (size_t)(end_count + 1));
    memcpy(c->end, ends, sizeof *ends * (size_t)end_count);
    c->end_count = end_count;
    return c;
}

void nmk_constraints_free(nmk_constraints *c) {
    if (!c) return;
    for (int i = 0; i < KEPT; i++) free(c->kept[i].key), nmk_masks_unref(c->kept[i].masks);
    nmk_token_tree_free(c->tree);
    free(c->end);
    free(c);
}

/* ---------------------------------------------------------------- the grammar of an output */

typedef struct {
    const nmk_constraints *c;
    const nmk_api_request *q;
    nmk_grammar *g;
    nmk_api_error *e;
    int ws;
} writer;

static int refuse(writer *w, const char *param, const char *why) {
    return nmk_api_fail(w->e, 400, param, "invalid_value", "Invalid value for '%s': %s", param, why);
}

static int literal(writer *w, int from, const char *text) {
    int first = nmk_grammar_state(w->g);
    nmk_grammar_jump(w->g, from, first);
    return nmk_grammar_literal(w->g, first, text, strlen(text));
}

static int call(writer *w, int from, int rule) {
    int to = nmk_grammar_state(w->g);
    nmk_grammar_call(w->g, from, rule, to);
    return to;
}

/* Of a JSON text: nothing, a blank, or the end of a line and what indents the next. */
static int spaced(writer *w, int from) {
    nmk_grammar *g = w->g;
    if (w->ws < 0) {
        static const char blank[] = "(?: |\\n[ \\t]{0,20})?";
        nmk_expr *x = nmk_regex_parse(blank, strlen(blank), false, NULL);
        w->ws = nmk_grammar_rule(g);
        nmk_grammar_expr(g, g->start[w->ws], x, false, g->end[w->ws]);
        nmk_expr_free(x);
    }
    return call(w, from, w->ws);
}

/* A special token, if the tokenizer has it; else the state is the same. */
static int marked(writer *w, int from, int32_t token) {
    if (token < 0) return from;
    int to = nmk_grammar_state(w->g);
    nmk_grammar_token(w->g, from, token, to);
    return to;
}

/* Any text without NUL. */
static int free_text(writer *w, int from) {
    int s = nmk_grammar_state(w->g);
    nmk_grammar_jump(w->g, from, s);
    nmk_grammar_bytes(w->g, s, 1, 255, s);
    return s;
}

/* The rule of an answer's text, or -1. */
static int answer_rule(writer *w) {
    const nmk_api_request *q = w->q;
    nmk_grammar *g = w->g;
    nmk_err why = {""};
    nmk_text text = {"", 0};
    nmk_expr *x;
    int rule = -1, first;
    if (json_object_is_type(q->form_value, json_type_string))
        text = (nmk_text){json_object_get_string(q->form_value), (size_t)json_object_get_string_len(q->form_value)};
    switch (q->form) {
    case NMK_FORM_FREE: break;
    case NMK_FORM_OBJECT:
    case NMK_FORM_SCHEMA:
        if (nmk_schema_read(g, q->form_value, &rule, &why)) return refuse(w, q->form_param, why.text);
        break;
    case NMK_FORM_REGEX:
        if (!(x = nmk_regex_parse(text.data, text.bytes, false, &why))) return refuse(w, q->form_param, why.text);
        rule = nmk_grammar_rule(g);
        nmk_grammar_expr(g, g->start[rule], x, false, g->end[rule]);
        nmk_expr_free(x);
        break;
    case NMK_FORM_CHOICE:
        rule = nmk_grammar_rule(g);
        nmk_grammar_jump(g, g->start[rule], first = nmk_grammar_state(g));
        for (size_t i = 0; i < json_object_array_length(q->form_value); i++) {
            struct json_object *v = json_object_array_get_idx(q->form_value, i);
            int end = nmk_grammar_literal(g, first, json_object_get_string(v), (size_t)json_object_get_string_len(v));
            nmk_grammar_jump(g, end, g->end[rule]);
        }
        break;
    case NMK_FORM_GRAMMAR:
        if (nmk_gbnf_read(g, text.data, text.bytes, &rule, &why)) return refuse(w, q->form_param, why.text);
        break;
    }
    return rule;
}

static bool is_strict(struct json_object *function) {
    struct json_object *v = nmk_json_get(function, "strict");
    return v && json_object_get_boolean(v);
}

/* The names of the tools, each with its arguments, that stand behind `key`.  -1: a tool's parameters
 * are at fault. */
static int each_tool(writer *w, int from, const char *key, int to) {
    const nmk_api_request *q = w->q;
    int any = -1;
    for (size_t i = 0; i < json_object_array_length(q->tools); i++) {
        struct json_object *function = nmk_json_get(json_object_array_get_idx(q->tools, i), "function");
        struct json_object *name = nmk_json_get(function, "name"), *parameters = nmk_json_get(function, "parameters");
        const char *text =
            json_object_to_json_string_ext(name, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE);
        int rule = -1;
        nmk_err why = {""};
        if (q->tool_choice_name && strcmp(json_object_get_string(name), q->tool_choice_name) != 0) continue;
        /* who must call gets arguments as described; so does who asked for it */
        if ((q->tool_choice_required || is_strict(function)) && parameters) {
            if (nmk_schema_read(w->g, parameters, &rule, &why)) {
                char where[64];
                snprintf(where, sizeof where, "tools[%zu].function.parameters", i);
                return refuse(w, where, why.text);
            }
        } else {
            if (any < 0 && nmk_schema_read(w->g, NULL, &any, &why)) return refuse(w, "tools", why.text);
            rule = any;
        }
        int s = spaced(w, literal(w, literal(w, from, text), ","));
        nmk_grammar_call(w->g, spaced(w, literal(w, s, key)), rule, to);
    }
    return 0;
}

/* Any text up to a literal, which is the first there; the state behind it.  Where the text may end without it: at
 * `without` (-1: nowhere). */
static int up_to(writer *w, int from, const char *literal, int without) {
    nmk_grammar *g = w->g;
    enum { LONGEST = 16 };
    int n = (int)strlen(literal), state[LONGEST] = {0};
    int back[LONGEST] = {
        0}; /* of its first k bytes, but not all of them: how many at their end are a beginning of it */
    assert(n < LONGEST);
    for (int k = 0; k <= n; k++) state[k] = nmk_grammar_state(g);
    for (int k = 1; k < n; k++) {
        int b = back[k];
        while (b && literal[k] != literal[b]) b = back[b];
        back[k + 1] = b + (literal[k] == literal[b]);
    }
    nmk_grammar_jump(g, from, state[0]);
    for (int k = 0; k < n; k++) {
        int next[257], low = 1;
        for (int byte = 1; byte < 256; byte++) {
            int b = k;
            while (b && (uint8_t)literal[b] != byte) b = back[b];
            next[byte] = b + ((uint8_t)literal[b] == byte);
        }
        next[256] = -1;
        for (int byte = 2; byte <= 256; byte++) {
            if (next[byte] == next[low]) continue;
            nmk_grammar_bytes(g, state[k], low, byte - 1, state[next[low]]);
            low = byte;
        }
        if (without >= 0) nmk_grammar_jump(g, state[k], without);
    }
    return state[n];
}

static bool thinks(const nmk_markers *m) {
    return m->thinks_in_text || (m->end_thinking >= 0 && (m->start_thinking >= 0 || m->format == NMK_FORMAT_COHERE));
}

/* Behind reasoning that is open. */
static int end_thinking(writer *w, int from) {
    const nmk_markers *m = &w->c->markers;
    nmk_grammar *g = w->g;
    int s = m->thinks_in_text ? up_to(w, from, "</think>", -1) : marked(w, free_text(w, from), m->end_thinking);
    if (m->format == NMK_FORMAT_COHERE) return s;
    int end = nmk_grammar_state(g); /* and a line or two */
    for (int i = 0; i < 3; i++) {
        int next = nmk_grammar_state(g);
        nmk_grammar_jump(g, s, end), nmk_grammar_bytes(g, s, '\n', '\n', next);
        s = next;
    }
    nmk_grammar_jump(g, s, end);
    return end;
}

/* Behind reasoning that there may be. */
static int may_think(writer *w, int from) {
    const nmk_markers *m = &w->c->markers;
    int s = nmk_grammar_state(w->g),
        open = m->thinks_in_text ? literal(w, from, "<think>") : marked(w, from, m->start_thinking);
    nmk_grammar_jump(w->g, from, s);
    nmk_grammar_jump(w->g, end_thinking(w, open), s);
    return s;
}

/* The rule of a call, or -1. */
static int one_call(writer *w) {
    nmk_grammar *g = w->g;
    const nmk_format format = w->c->markers.format;
    int rule = nmk_grammar_rule(g), s = spaced(w, literal(w, g->start[rule], "{")), end = nmk_grammar_state(g);
    if (format == NMK_FORMAT_COHERE) {
        s = spaced(w, literal(w, s, "\"tool_call_id\":"));
        s = literal(w, s, "\"");
        int number = nmk_grammar_state(g), id = nmk_grammar_state(g);
        nmk_grammar_bytes(g, s, '0', '9', number);
        nmk_grammar_bytes(g, number, '0', '9', id);
        nmk_grammar_jump(g, number, id);
        s = spaced(w, literal(w, id, "\","));
    }
    s = spaced(w, literal(w, s, format == NMK_FORMAT_COHERE ? "\"tool_name\":" : "\"name\":"));
    if (each_tool(w, s, format == NMK_FORMAT_HERMES ? "\"arguments\":" : "\"parameters\":", end)) return -1;
    nmk_grammar_jump(g, literal(w, spaced(w, end), "}"), g->end[rule]);
    return rule;
}

/* All calls of an answer, with the markers around them; `opened`: the first marker has been said.  -1: a tool is at
 * fault. */
static int calls(writer *w, int from, bool opened, int to) {
    const nmk_markers *m = &w->c->markers;
    nmk_grammar *g = w->g;
    int one = one_call(w), list = nmk_grammar_state(g), s = from;
    bool more = w->q->parallel_tool_calls, in_text = m->calls_in_text;
    if (one < 0) return -1;
    switch (m->format) {
    case NMK_FORMAT_PLAIN: return -1;
    case NMK_FORMAT_COHERE:
        s = spaced(w, literal(w, opened ? s : marked(w, s, m->start_action), "["));
        nmk_grammar_call(g, s, one, list);
        if (more) nmk_grammar_call(g, spaced(w, literal(w, list, ",")), one, list);
        nmk_grammar_jump(g, marked(w, literal(w, spaced(w, list), "]"), m->end_action), to);
        break;
    case NMK_FORMAT_HERMES: {
        int first = nmk_grammar_state(g);
        if (!opened) s = in_text ? literal(w, s, "<tool_call>") : marked(w, s, m->start_action);
        nmk_grammar_jump(g, s, first);
        s = spaced(w, call(w, spaced(w, first), one));
        nmk_grammar_jump(g, in_text ? literal(w, s, "</tool_call>") : marked(w, s, m->end_action), list);
        s = spaced(w, list);
        if (more) nmk_grammar_jump(g, in_text ? literal(w, s, "<tool_call>") : marked(w, s, m->start_action), first);
        nmk_grammar_jump(g, list, to);
        break;
    }
    case NMK_FORMAT_LLAMA3:
        if (!opened && m->start_action >= 0) {
            int tagged = nmk_grammar_state(g);
            nmk_grammar_jump(g, s, tagged);
            nmk_grammar_token(g, s, m->start_action, tagged);
            s = tagged;
        }
        nmk_grammar_call(g, s, one, list);
        if (more) nmk_grammar_call(g, spaced(w, literal(w, list, ";")), one, list);
        nmk_grammar_jump(g, list, to);
        break;
    }
    return 0;
}

/* An answer in no form of its own, and calls behind it or in its place. */
static int free_or_calls(writer *w, int from, int to) {
    const nmk_markers *m = &w->c->markers;
    nmk_grammar *g = w->g;
    int s;
    switch (m->format) {
    case NMK_FORMAT_HERMES:
        if (m->calls_in_text) return calls(w, up_to(w, from, "<tool_call>", to), true, to);
        nmk_grammar_jump(g, s = free_text(w, from), to);
        return calls(w, s, false, to);
    case NMK_FORMAT_LLAMA3: /* what begins like JSON is a call */
        s = nmk_grammar_state(g);
        nmk_grammar_bytes(g, from, '!', 'Z', s), nmk_grammar_bytes(g, from, '\\', 'z', s);
        nmk_grammar_bytes(g, from, '|', 255, s);
        nmk_grammar_jump(g, free_text(w, s), to);
        return calls(w, from, false, to);
    default: return 0;
    }
}

/* What a chat may say from where its prompt ends. */
static int chat(writer *w, nmk_block block, int from, int to) {
    const nmk_api_request *q = w->q;
    const nmk_markers *m = &w->c->markers;
    nmk_grammar *g = w->g;
    bool tools = q->tools && !q->tool_choice_none, must_call = q->tool_choice_required;
    bool cohere = m->format == NMK_FORMAT_COHERE, answering = block == NMK_BLOCK_ANSWER;
    bool can_call =
        m->format != NMK_FORMAT_PLAIN && !answering && !(cohere && (m->start_action < 0 || m->end_action < 0));
    int s = from, rule = -1;
    if (q->form && (rule = answer_rule(w)) < 0) return -1;
    if (!q->form && !can_call)
        return refuse(w, must_call ? "tool_choice" : "tools", "how this model writes calls is not known");
    if (block == NMK_BLOCK_REASONING) {
        if (!thinks(m))
            return refuse(w, q->form_param ? q->form_param : "tool_choice", "this model's reasoning has no end");
        s = end_thinking(w, s);
    } else if (!answering && thinks(m)) {
        s = may_think(w, s);
    }
    if (must_call || (rule >= 0 && tools && can_call)) {
        if (calls(w, s, false, to)) return -1;
        if (must_call) return 0;
    }
    if (!cohere) {
        if (rule < 0) return free_or_calls(w, s, to);
        nmk_grammar_call(g, s, rule, to);
        return 0;
    }
    int start_text = m->start_text >= 0 ? m->start_text : m->start_response;
    int end_text = m->start_text >= 0 ? m->end_text : m->end_response;
    int inside = answering ? s : marked(w, s, start_text);
    int said = rule >= 0 ? call(w, inside, rule) : free_text(w, inside), after = marked(w, said, end_text);
    nmk_grammar_jump(g, said, to), nmk_grammar_jump(g, after, to);
    if (rule >= 0) return 0;
    if (after == said) return calls(w, s, false, to);
    int before = nmk_grammar_state(g); /* of calls, with an answer before them or without */
    nmk_grammar_jump(g, s, before), nmk_grammar_jump(g, after, before);
    return calls(w, before, false, to);
}

static nmk_masks *compile(nmk_constraints *c, const nmk_api_request *q, nmk_block block, nmk_api_error *e) {
    nmk_masks *masks = NULL;
    nmk_err why = {""};
    nmk_grammar *g = nmk_grammar_new();
    writer w = {c, q, g, e, -1};
    int root = nmk_grammar_rule(g), rc = 0;
    bool marked_chat = q->messages && c->has_markers;
    const char *param = q->form_param ? q->form_param : q->tool_choice_required ? "tool_choice" : "tools";
    if (marked_chat) {
        rc = chat(&w, block, g->start[root], g->end[root]);
    } else if (q->form) {
        int rule = answer_rule(&w);
        rc = rule < 0 ? -1 : 0;
        if (!rc) nmk_grammar_call(g, g->start[root], rule, g->end[root]);
    } else {
        rc = refuse(&w, param, "how this model writes calls is not known");
    }
    if (!rc && nmk_grammar_finish(g, root, &why)) rc = refuse(&w, param, why.text);
    if (rc) {
        nmk_grammar_free(g);
        return NULL;
    }
    if (!c->tree) c->tree = nmk_token_tree_of(c->tokenizer, c->vocab, c->end, c->end_count);
    masks = nmk_masks_new(g, c->tree);
    return masks;
}

/* ---------------------------------------------------------------- what is kept */

/* All that a request's grammar depends on. */
static char *key_of(const nmk_api_request *q, nmk_block block) {
    const char *form = q->form_value ? json_object_to_json_string_ext(q->form_value, JSON_C_TO_STRING_PLAIN) : "";
    bool tools = q->tools && !q->tool_choice_none && q->messages;
    char *head = xasprintf("%d %d %d %d %d %zu %s %s ", q->messages != NULL, block, q->form, q->tool_choice_required,
                           q->parallel_tool_calls, strlen(form), form, q->tool_choice_name ? q->tool_choice_name : "");
    char *key = xasprintf("%s%s", head, tools ? json_object_to_json_string_ext(q->tools, JSON_C_TO_STRING_PLAIN) : "");
    free(head);
    return key;
}

static bool constrains(const nmk_api_request *q) {
    bool strict = false;
    if (q->messages && q->tools && !q->tool_choice_none)
        for (size_t i = 0; i < json_object_array_length(q->tools); i++)
            strict |= is_strict(nmk_json_get(json_object_array_get_idx(q->tools, i), "function"));
    return q->form || q->tool_choice_required || strict;
}

int nmk_constraints_find(nmk_constraints *c, const nmk_api_request *q, nmk_block block, nmk_masks **masks,
                         nmk_api_error *e) {
    *masks = NULL;
    if (!constrains(q)) return 0;
    int place = 0;
    char *key = key_of(q, block);
    for (int i = 0; i < KEPT; i++) {
        if (c->kept[i].key && !strcmp(c->kept[i].key, key)) {
            c->kept[i].used = ++c->uses;
            *masks = nmk_masks_ref(c->kept[i].masks);
            free(key);
            return 0;
        }
        if (c->kept[i].used < c->kept[place].used) place = i;
    }
    nmk_masks *made = compile(c, q, block, e);
    if (!made) {
        free(key);
        return -1;
    }
    free(c->kept[place].key), nmk_masks_unref(c->kept[place].masks);
    c->kept[place].key = key, c->kept[place].masks = made, c->kept[place].used = ++c->uses;
    *masks = nmk_masks_ref(made);
    return 0;
}
