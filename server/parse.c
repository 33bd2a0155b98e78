#include "parse.h"

#include <stdlib.h>
#include <string.h>

#include "cite.h"

/* ---------------------------------------------------------------- calls */

/* Where in a call's JSON the next byte is. */
typedef enum { TOP, BEFORE_KEY, KEY, BEFORE_COLON, BEFORE_VALUE, STRING, NESTED, SCALAR } place;

/* What the value at hand is for. */
typedef enum { SKIP, NAME, ARGUMENTS } purpose;

typedef struct {
    place at;
    purpose purpose;
    bool quoted, escape; /* within a string of a NESTED value; after a backslash */
    long depth;          /* of a NESTED value; brackets are counted, not matched */
    nmk_buf key, value;  /* value: what is looked at only when whole */
    nmk_buf name, arguments;
    char id[NMK_ID_BYTES];
    int index;
    bool named, muted;                     /* muted: the call is not told */
    bool arguments_begun, arguments_ended; /* in the JSON */
} call;

struct nmk_parser {
    const nmk_tokenizer *tokenizer;
    nmk_markers markers;
    nmk_parser_options options;
    nmk_said_fn fn;
    void *user;

    nmk_block block;
    const struct tag *tag[4]; /* markers that are text */
    int tags;
    nmk_buf tagged, work; /* what may become one; all that is looked at */
    nmk_buf maybe;        /* what may become a call without a marker */
    bool acted;           /* there was JSON in this action */
    bool cites;           /* citations are taken out */
    nmk_utf8 utf8;
    nmk_cite cite;
    nmk_buf text, uncited; /* of the token at hand; without citations */
    nmk_buf
        held; /* blanks that are text if text follows; in an action, special tokens that are text if the turn goes on */
    nmk_buf out;
    bool answered, thought; /* there was text: of the answer, of this reasoning block */

    call call;
    int calls, reasoning_tokens;
};

static void tell(nmk_parser *p, nmk_said said) {
    if (said.kind <= NMK_SAID_ANSWER && !said.bytes) return;
    p->fn(p->user, &said);
}

static bool blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

static bool is_string(const nmk_buf *b, const char *s) {
    return b->length == strlen(s) && !memcmp(b->data, s, b->length);
}

/* The string that a JSON text is, or NULL; the caller releases *tree. */
static const char *json_string(const nmk_buf *text, struct json_object **tree, size_t *bytes) {
    *tree = nmk_json_parse(text->data, text->length, NULL);
    if (!json_object_is_type(*tree, json_type_string)) return NULL;
    *bytes = (size_t)json_object_get_string_len(*tree);
    return json_object_get_string(*tree);
}

static void call_begin(nmk_parser *p) {
    call *c = &p->call;
    c->at = BEFORE_KEY;
    c->named = c->muted = c->arguments_begun = c->arguments_ended = false;
    c->name.length = c->arguments.length = 0;
}

/* What has come of the arguments, once it is known whose they are. */
static void tell_arguments(nmk_parser *p) {
    call *c = &p->call;
    if (!c->named || !c->arguments.length) return;
    if (!c->muted) tell(p, (nmk_said){NMK_SAID_ARGUMENTS, c->arguments.data, c->arguments.length, .call = c->index});
    c->arguments.length = 0;
}

static void call_end(nmk_parser *p, bool whole) {
    call *c = &p->call;
    c->at = TOP;
    if (!c->named) return;
    if (whole && !c->arguments_begun) nmk_buf_puts(&c->arguments, "{}");
    tell_arguments(p);
    bool complete = c->arguments_begun ? c->arguments_ended : whole;
    if (!c->muted) tell(p, (nmk_said){NMK_SAID_CALL_END, .call = c->index, .complete = complete});
}

static void take_name(nmk_parser *p) {
    call *c = &p->call;
    struct json_object *tree;
    size_t bytes = 0;
    const char *name = json_string(&c->value, &tree, &bytes);
    if (name && bytes && strlen(name) == bytes) {
        c->named = true;
        nmk_buf_add(&c->name, name, bytes);
        c->muted = p->options.no_calls || (p->options.max_calls && p->calls >= p->options.max_calls);
        if (!c->muted) {
            c->index = p->calls++;
            nmk_reply_id(c->id, "call_");
            tell(p, (nmk_said){NMK_SAID_CALL, .call = c->index, .id = c->id, .name = c->name.data});
        }
    }
    json_object_put(tree);
}

/* Arguments that are no object. */
static void take_odd_arguments(call *c) {
    struct json_object *tree = NULL, *inner = NULL;
    size_t bytes = 0;
    const char *text = json_string(&c->value, &tree, &bytes);
    if (text) inner = nmk_json_parse(text, bytes, NULL);
    if (json_object_is_type(inner, json_type_object))
        nmk_buf_add(&c->arguments, text, bytes);
    else if (is_string(&c->value, "null"))
        nmk_buf_puts(&c->arguments, "{}");
    else
        nmk_buf_add(&c->arguments, c->value.data, c->value.length);
    json_object_put(inner);
    json_object_put(tree);
}

static void value_begin(call *c) {
    bool name = is_string(&c->key, "tool_name") || is_string(&c->key, "name");
    bool arguments = is_string(&c->key, "parameters") || is_string(&c->key, "arguments");
    c->purpose = name && !c->named ? NAME : arguments && !c->arguments_begun ? ARGUMENTS : SKIP;
    if (c->purpose == ARGUMENTS) c->arguments_begun = true;
    c->value.length = 0;
    c->quoted = c->escape = false;
    c->depth = 0;
}

static void value_end(nmk_parser *p) {
    call *c = &p->call;
    if (c->purpose == NAME) take_name(p);
    if (c->purpose == ARGUMENTS) {
        if (c->at != NESTED) take_odd_arguments(c);
        c->arguments_ended = true;
    }
    c->at = BEFORE_KEY;
}

/* One byte of a value that is of use. */
static void keep(call *c, bool in_string, char byte) {
    nmk_buf *to = c->purpose == SKIP ? NULL : c->at == NESTED && c->purpose == ARGUMENTS ? &c->arguments : &c->value;
    if (!to) return;
    if (!in_string || (unsigned char)byte >= 0x20) {
        nmk_buf_add(to, &byte, 1);
        return;
    }
    if (!c->escape) nmk_buf_puts(to, "\\");
    switch (byte) {
    case '\n': nmk_buf_puts(to, "n"); break;
    case '\r': nmk_buf_puts(to, "r"); break;
    case '\t': nmk_buf_puts(to, "t"); break;
    default: nmk_buf_printf(to, "u%04x", (unsigned)byte);
    }
}

/* After a byte of a string: true at its end. */
static bool string_step(call *c, char byte) {
    if (c->escape)
        c->escape = false;
    else if (byte == '\\')
        c->escape = true;
    else
        return byte == '"';
    return false;
}

static bool within_string(const call *c) { return c->at == KEY || c->at == STRING || (c->at == NESTED && c->quoted); }

static void key_begin(call *c) {
    c->at = KEY;
    c->key.length = 0;
    c->escape = false;
}

static void scan_byte(nmk_parser *p, char byte) {
    enum { LONGEST_KEY = 64 }; /* longer than any that is known */
    call *c = &p->call;
    switch (c->at) {
    case TOP:
        if (byte == '{') call_begin(p);
        break;
    case BEFORE_KEY:
        if (byte == '"') key_begin(c);
        if (byte == '}' || byte == ']' || byte == '{') call_end(p, true);
        if (byte == '{') call_begin(p); /* the call before lacked its brace */
        break;
    case KEY:
        if (string_step(c, byte))
            c->at = BEFORE_COLON;
        else if (c->key.length < LONGEST_KEY)
            nmk_buf_add(&c->key, &byte, 1);
        break;
    case BEFORE_COLON:
        if (byte == ':') c->at = BEFORE_VALUE;
        if (byte == '"') key_begin(c);
        if (byte == '}') call_end(p, true);
        break;
    case BEFORE_VALUE:
        if (blank(byte)) break;
        if (byte == ',') {
            c->at = BEFORE_KEY;
        } else if (byte == '}') {
            call_end(p, true);
        } else {
            value_begin(c);
            c->at = byte == '"' ? STRING : byte == '{' || byte == '[' ? NESTED : SCALAR;
            c->depth = c->at == NESTED;
            keep(c, false, byte);
        }
        break;
    case STRING:
        keep(c, true, byte);
        if (string_step(c, byte)) value_end(p);
        break;
    case NESTED:
        keep(c, c->quoted, byte);
        if (c->quoted) {
            c->quoted = !string_step(c, byte);
        } else if (byte == '"') {
            c->quoted = true;
        } else {
            c->depth += (byte == '{' || byte == '[') - (byte == '}' || byte == ']');
            if (!c->depth) value_end(p);
        }
        break;
    case SCALAR:
        if (byte == ',' || byte == '}' || byte == ']') {
            value_end(p);
            scan_byte(p, byte);
        } else if (!blank(byte)) {
            keep(c, false, byte);
        }
        break;
    }
}

static void scan(nmk_parser *p, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) scan_byte(p, text[i]);
    tell_arguments(p);
}

/* The action is over, a call perhaps not: it is whole if its arguments are. */
static void scan_end(nmk_parser *p) {
    if (p->call.at != TOP) call_end(p, false);
}

/* ---------------------------------------------------------------- text */

/* The next word of a text: 1, and the text goes on behind it; 0: what is there of it is right; -1: it is another. */
static int word(const char **at, const char *end, const char *wanted) {
    while (*at < end && blank(**at)) (*at)++;
    size_t there = (size_t)(end - *at), n = strlen(wanted), m = there < n ? there : n;
    if (memcmp(*at, wanted, m) != 0) return -1;
    *at += m;
    return m == n;
}

/* Words one after the other. */
static int words(const char **at, const char *end, const char *const *wanted, int count) {
    int rc = 1;
    for (int i = 0; i < count && rc > 0; i++) rc = word(at, end, wanted[i]);
    return rc;
}

/* Whether what begins with a brace is a call: 1, 0 (not clear yet), -1. */
static int is_call(const nmk_parser *p) {
    static const char *const named[] = {"\"name\"", ":", "\""};
    static const char *const typed[] = {"\"type\"", ":", "\"function\"", ","};
    const char *at = p->maybe.data, *end = at + p->maybe.length;
    if (word(&at, end, "{") <= 0) return -1;
    const char *first = at;
    int rc = words(&at, end, typed, 4);
    if (rc == 0) return 0;
    if (rc < 0) at = first;
    if ((rc = words(&at, end, named, 3)) <= 0) return rc;
    const char *quote = memchr(at, '"', (size_t)(end - at));
    size_t n = quote ? (size_t)(quote - at) : (size_t)(end - at);
    bool may = false;
    for (size_t i = 0; i < json_object_array_length(p->options.tools); i++) {
        struct json_object *tool = json_object_array_get_idx(p->options.tools, i);
        const char *name = json_object_get_string(nmk_json_get(nmk_json_get(tool, "function"), "name"));
        if (strncmp(name, at, n) != 0) continue;
        if (quote && !name[n]) return 1;
        may |= !quote;
    }
    return may ? 0 : -1;
}

/* Tells what is held and then the text, as one. */
static void tell_text(nmk_parser *p, nmk_said_kind kind, const char *text, size_t bytes) {
    if (!p->held.length) {
        tell(p, (nmk_said){.kind = kind, .text = text, .bytes = bytes});
        return;
    }
    p->out.length = 0;
    nmk_buf_add(&p->out, p->held.data, p->held.length);
    nmk_buf_add(&p->out, text, bytes);
    p->held.length = 0;
    tell(p, (nmk_said){.kind = kind, .text = p->out.data, .bytes = p->out.length});
}

/* What looked like a call is none. */
static void answer_maybe(nmk_parser *p) {
    if (!p->maybe.length) return;
    p->block = NMK_BLOCK_ANSWER;
    p->answered = true;
    tell_text(p, NMK_SAID_ANSWER, p->maybe.data, p->maybe.length);
    p->maybe.length = 0;
}

static void add_maybe(nmk_parser *p, const char *text, size_t bytes) {
    nmk_buf_add(&p->maybe, text, bytes);
    int is = is_call(p);
    if (is < 0) answer_maybe(p);
    if (is <= 0) return;
    p->block = NMK_BLOCK_ACTION;
    p->acted = true;
    scan(p, p->maybe.data, p->maybe.length);
    p->maybe.length = 0;
}

static void say(nmk_parser *p, const char *text, size_t bytes) {
    size_t first = 0, end = bytes;
    if (!bytes) return;
    switch (p->block) {
    case NMK_BLOCK_REASONING:
        while (end && blank(text[end - 1])) end--;
        if (!p->thought)
            while (first < end && blank(text[first])) first++;
        if (end > first) {
            p->thought = true;
            tell_text(p, NMK_SAID_REASONING, text + first, end - first);
        }
        if (p->thought) nmk_buf_add(&p->held, text + end, bytes - end);
        break;
    case NMK_BLOCK_NONE:
        if (p->maybe.length) {
            add_maybe(p, text, bytes);
            break;
        }
        while (first < bytes && blank(text[first])) first++;
        if (first == bytes) {
            if (p->answered) nmk_buf_add(&p->held, text, bytes);
            break;
        }
        if (p->markers.format == NMK_FORMAT_LLAMA3 && p->options.tools && !p->answered && text[first] == '{') {
            add_maybe(p, text + first, bytes - first);
            break;
        }
        if (p->answered) first = 0;
        p->block = NMK_BLOCK_ANSWER;
        p->answered = true;
        tell_text(p, NMK_SAID_ANSWER, text + first, bytes - first);
        break;
    case NMK_BLOCK_ANSWER:
        p->answered = true;
        tell_text(p, NMK_SAID_ANSWER, text, bytes);
        break;
    case NMK_BLOCK_ACTION:
        while (!p->acted && first < bytes && blank(text[first])) first++;
        if (first == bytes) break;
        if (!p->acted && p->markers.format == NMK_FORMAT_LLAMA3 && text[first] != '{' && text[first] != '[') {
            p->block = NMK_BLOCK_ANSWER; /* code, of tools that are Llama's own */
            p->answered = true;
            tell_text(p, NMK_SAID_ANSWER, text + first, bytes - first);
            break;
        }
        p->acted = true;
        scan(p, text + first, bytes - first);
        break;
    }
}

/* Text of a block, and all that is held of it if the block ends. */
static void take(nmk_parser *p, bool end) {
    if (!p->cites || p->block == NMK_BLOCK_ACTION) {
        say(p, p->text.data, p->text.length);
        return;
    }
    p->uncited.length = 0;
    nmk_cite_add(&p->cite, p->text.data, p->text.length, &p->uncited);
    if (end) nmk_cite_end(&p->cite, &p->uncited);
    say(p, p->uncited.data, p->uncited.length);
}

/* Says the text at hand as the end of its block, and begins another. */
static void switch_to(nmk_parser *p, nmk_block block) {
    take(p, true);
    answer_maybe(p);
    p->held.length = 0;
    if (p->block == NMK_BLOCK_ACTION) scan_end(p);
    p->block = block;
    p->thought = p->acted = false;
}

/* Ends the block that is open and begins another. */
static void enter(nmk_parser *p, nmk_block block) {
    p->text.length = 0;
    nmk_buf_add(&p->text, p->tagged.data, p->tagged.length); /* it became no marker */
    p->tagged.length = 0;
    nmk_utf8_end(&p->utf8, &p->text); /* a character whose rest never came */
    switch_to(p, block);
}

/* ---------------------------------------------------------------- markers in the text */

static const struct tag {
    const char *text;
    nmk_block block;
    bool opens;
} tags[] = {{"<think>", NMK_BLOCK_REASONING, true},
            {"</think>", NMK_BLOCK_REASONING, false},
            {"<tool_call>", NMK_BLOCK_ACTION, true},
            {"</tool_call>", NMK_BLOCK_ACTION, false}};

static void take_part(nmk_parser *p, const char *text, size_t bytes) {
    p->text.length = 0;
    nmk_buf_add(&p->text, text, bytes);
    take(p, false);
    p->text.length = 0;
}

/* The marker that a text begins with; *part: it may be the beginning of one. */
static const struct tag *tag_at(const nmk_parser *p, const char *text, size_t bytes, bool *part) {
    *part = false;
    for (int i = 0; i < p->tags; i++) {
        size_t n = strlen(p->tag[i]->text);
        if (memcmp(text, p->tag[i]->text, n < bytes ? n : bytes) != 0) continue;
        if (n <= bytes) return p->tag[i];
        *part = true;
    }
    return NULL;
}

/* The text at hand, with markers in it; in a string of a call they are text. */
static void take_tagged(nmk_parser *p) {
    p->work.length = 0;
    nmk_buf_add(&p->work, p->tagged.data, p->tagged.length);
    nmk_buf_add(&p->work, p->text.data, p->text.length);
    p->tagged.length = 0;
    const char *text = p->work.data;
    size_t from = 0, n = p->work.length;
    for (size_t i = 0; i < n; i++) {
        bool part;
        const struct tag *t = text[i] == '<' ? tag_at(p, text + i, n - i, &part) : NULL;
        if (!t && (text[i] != '<' || !part)) continue;
        take_part(p, text + from, i - from);
        from = i;
        if (!t) {
            nmk_buf_add(&p->tagged, text + i, n - i);
            return;
        }
        if (p->block == NMK_BLOCK_ACTION && within_string(&p->call)) continue;
        if (t->opens ? p->block != t->block : p->block == t->block) switch_to(p, t->opens ? t->block : NMK_BLOCK_NONE);
        from = i + strlen(t->text), i = from - 1;
    }
    take_part(p, text + from, n - from);
}

/* ---------------------------------------------------------------- tokens */

/* The first of a list of tokens that is there. */
static int32_t find_one(const nmk_tokenizer *t, const char *const *names) {
    int32_t id = -1;
    for (; *names && id < 0; names++) id = nmk_tokenizer_find(t, *names);
    return id;
}

static bool find_cohere(nmk_markers *m, const nmk_tokenizer *t) {
    *m = (nmk_markers){
        .format = NMK_FORMAT_COHERE,
        .start_thinking = nmk_tokenizer_find(t, "<|START_THINKING|>"),
        .end_thinking = nmk_tokenizer_find(t, "<|END_THINKING|>"),
        .start_text = nmk_tokenizer_find(t, "<|START_TEXT|>"),
        .end_text = nmk_tokenizer_find(t, "<|END_TEXT|>"),
        .start_response = nmk_tokenizer_find(t, "<|START_RESPONSE|>"),
        .end_response = nmk_tokenizer_find(t, "<|END_RESPONSE|>"),
        .start_action = nmk_tokenizer_find(t, "<|START_ACTION|>"),
        .end_action = nmk_tokenizer_find(t, "<|END_ACTION|>"),
        .start_of_turn = nmk_tokenizer_find(t, "<|START_OF_TURN_TOKEN|>"),
        .end_of_turn = nmk_tokenizer_find(t, "<|END_OF_TURN_TOKEN|>"),
    };
    return (m->start_text >= 0 || m->start_response >= 0 || m->start_thinking >= 0) && m->end_of_turn >= 0;
}

bool nmk_markers_find(nmk_markers *m, const nmk_tokenizer *t, const char *chat_template) {
    static const char *const ends[] = {"<|im_end|>", "<|eot_id|>", NULL};
    static const char *const starts[] = {"<|im_start|>", "<|start_header_id|>", NULL};
    const char *text = chat_template ? chat_template : "";
    if (find_cohere(m, t)) return true;
    m->format = NMK_FORMAT_PLAIN;
    m->start_of_turn = find_one(t, starts), m->end_of_turn = find_one(t, ends);
    m->start_thinking = nmk_tokenizer_find(t, tags[0].text), m->end_thinking = nmk_tokenizer_find(t, tags[1].text);
    if (m->start_thinking < 0 || m->end_thinking < 0) {
        m->start_thinking = m->end_thinking = -1;
        m->thinks_in_text = strstr(text, tags[1].text);
    }
    if (strstr(text, tags[2].text)) {
        m->format = NMK_FORMAT_HERMES;
        m->start_action = nmk_tokenizer_find(t, tags[2].text), m->end_action = nmk_tokenizer_find(t, tags[3].text);
        if (m->start_action < 0 || m->end_action < 0) {
            m->start_action = m->end_action = -1;
            m->calls_in_text = true;
        }
    } else if (strstr(text, "<|python_tag|>") || strstr(text, "\"parameters\": dictionary")) {
        m->format = NMK_FORMAT_LLAMA3;
        m->start_action = nmk_tokenizer_find(t, "<|python_tag|>");
    }
    return m->format != NMK_FORMAT_PLAIN || m->start_thinking >= 0 || m->thinks_in_text;
}

void nmk_markers_end_thinking(const nmk_markers *m, const nmk_tokenizer *t, nmk_ids *ids) {
    static const char end[] = "\n</think>\n\n"; /* as those who write it themselves do */
    if (m->end_thinking < 0) return;
    if (m->format == NMK_FORMAT_COHERE)
        nmk_ids_add(ids, m->end_thinking);
    else
        nmk_tokenizer_encode(t, end, sizeof end - 1, NMK_PARSE_SPECIAL, ids, NULL);
}

/* Whether a token is a marker that decides which block is open, and which that is. */
static bool opens(const nmk_markers *m, int32_t token, nmk_block *block) {
    if (token < 0) return false;
    if (token == m->start_thinking)
        *block = NMK_BLOCK_REASONING;
    else if (token == m->start_text || token == m->start_response)
        *block = NMK_BLOCK_ANSWER;
    else if (token == m->start_action)
        *block = NMK_BLOCK_ACTION;
    else
        return false;
    return true;
}

/* The block that a token closes; NMK_BLOCK_NONE for the end of a turn, which closes any. */
static bool closes(const nmk_markers *m, int32_t token, nmk_block *block) {
    if (token < 0) return false;
    if (token == m->end_thinking)
        *block = NMK_BLOCK_REASONING;
    else if (token == m->end_text || token == m->end_response)
        *block = NMK_BLOCK_ANSWER;
    else if (token == m->end_action)
        *block = NMK_BLOCK_ACTION;
    else if (token == m->end_of_turn || token == m->start_of_turn)
        *block = NMK_BLOCK_NONE;
    else
        return false;
    return true;
}

nmk_block nmk_markers_open(const nmk_markers *m, const nmk_tokenizer *t, const int32_t *prompt, size_t tokens) {
    enum { TAIL = 64 }; /* tokens in which a template opens or closes reasoning in text */
    nmk_block block = NMK_BLOCK_NONE, closed;
    size_t i = tokens;
    while (i > 0 && !opens(m, prompt[i - 1], &block) && !closes(m, prompt[i - 1], &closed)) i--;
    if (!m->thinks_in_text) return block;
    nmk_buf text = {0};
    if (tokens - i > TAIL) i = tokens - TAIL;
    nmk_tokenizer_decode(t, prompt + i, tokens - i, false, &text);
    for (const char *at = text.data; at && (at = strchr(at, '<')); at++) {
        if (!strncmp(at, tags[0].text, strlen(tags[0].text))) block = NMK_BLOCK_REASONING;
        if (!strncmp(at, tags[1].text, strlen(tags[1].text))) block = NMK_BLOCK_NONE;
    }
    nmk_buf_free(&text);
    return block;
}

bool nmk_markers_thinking(const nmk_markers *m, const nmk_tokenizer *t, const int32_t *prompt, size_t prompt_tokens) {
    return nmk_markers_open(m, t, prompt, prompt_tokens) == NMK_BLOCK_REASONING;
}

nmk_parser *nmk_parser_new(const nmk_tokenizer *t, const nmk_markers *markers, const int32_t *prompt,
                           size_t prompt_tokens, nmk_parser_options options, nmk_said_fn fn, void *user) {
    nmk_parser *p = xcalloc(1, sizeof *p);
    *p = (nmk_parser){.tokenizer = t, .options = options, .fn = fn, .user = user, .block = NMK_BLOCK_ANSWER};
    if (!markers) {
        memset(&p->markers, -1, sizeof p->markers);
        p->markers.format = NMK_FORMAT_PLAIN;
        p->markers.thinks_in_text = p->markers.calls_in_text = false;
        return p;
    }
    p->markers = *markers;
    p->cites = markers->format == NMK_FORMAT_COHERE && !options.show_special && !options.verbatim;
    p->block = nmk_markers_open(markers, t, prompt, prompt_tokens);
    for (int i = 0; i < 4; i++)
        if (i < 2 ? markers->thinks_in_text : markers->calls_in_text) p->tag[p->tags++] = &tags[i];
    return p;
}

void nmk_parser_free(nmk_parser *p) {
    if (!p) return;
    nmk_buf *const buffers[] = {&p->text,  &p->uncited,  &p->held,       &p->out,       &p->tagged,        &p->work,
                                &p->maybe, &p->call.key, &p->call.value, &p->call.name, &p->call.arguments};
    nmk_cite_free(&p->cite);
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) nmk_buf_free(buffers[i]);
    free(p);
}

/* The tags of citations are taken out as text, also where the tokenizer has them as special tokens. */
static bool of_citation(const nmk_parser *p, const char *raw, size_t bytes) {
    return p->cites && raw && bytes >= 3 && (!memcmp(raw, "<co", 3) || (bytes >= 4 && !memcmp(raw, "</co", 4)));
}

nmk_block nmk_parser_add(nmk_parser *p, int32_t token) {
    nmk_block opened = NMK_BLOCK_NONE, closed = NMK_BLOCK_NONE, was = p->block;
    size_t bytes = 0;
    const char *raw = nmk_tokenizer_token(p->tokenizer, token, &bytes);
    bool open = opens(&p->markers, token, &opened), close = !open && closes(&p->markers, token, &closed);
    /* Not every tokenizer.json calls its markers special. */
    bool special = open || close || (nmk_tokenizer_is_special(p->tokenizer, token) && !of_citation(p, raw, bytes));

    if (special && was == NMK_BLOCK_ACTION && within_string(&p->call) && token != p->markers.end_of_turn) {
        p->text.length = 0;
        nmk_buf_add(&p->text, p->tagged.data, p->tagged.length);
        p->tagged.length = 0;
        nmk_utf8_end(&p->utf8, &p->text);
        scan(p, p->text.data, p->text.length);
        if (raw) nmk_buf_add(&p->held, raw, bytes);
        return was;
    }
    if (open && opened != was) enter(p, opened);
    if (close && (closed == was || closed == NMK_BLOCK_NONE)) enter(p, NMK_BLOCK_NONE);
    if (open || close || (special && !p->options.show_special)) return NMK_BLOCK_NONE;

    p->reasoning_tokens += was == NMK_BLOCK_REASONING;
    if (!raw) return was;
    if (was == NMK_BLOCK_ACTION && p->held.length) {
        scan(p, p->held.data, p->held.length);
        p->held.length = 0;
    }
    p->text.length = 0;
    nmk_utf8_add(&p->utf8, raw, bytes, &p->text);
    p->tags ? take_tagged(p) : take(p, false);
    return p->block;
}

void nmk_parser_end(nmk_parser *p) { enter(p, NMK_BLOCK_NONE); }

nmk_ended nmk_parser_ended(const nmk_parser *p, bool cut) {
    return cut ? NMK_ENDED_LENGTH : p->calls ? NMK_ENDED_TOOL_CALLS : NMK_ENDED_STOP;
}

int nmk_parser_reasoning_tokens(const nmk_parser *p) { return p->reasoning_tokens; }
