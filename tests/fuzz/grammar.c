/* server/{regex,gbnf,schema,grammar,mask}.c: what is accepted is walked.  No walk along masks ends in a dead end; what a
 * walk says is a text that PCRE2 matches, or JSON. */
#define _GNU_SOURCE /* memmem */
#include "fuzz.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <json-c/json_tokener.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "gbnf.h"
#include "mask.h"
#include "regex.h"
#include "schema.h"

/* WALKS_MS: of three walks of STEPS masks, each of which has a limit of its own (server/mask.c). */
enum { VOCAB = 320, END = 0, STEPS = 200, WALKS_MS = 30000 };

/* All bytes, then some tokens of several. */
static const char *const longer[] = {"{\"",
                                     "\":",
                                     "\",",
                                     "\", \"",
                                     "\"}",
                                     "}}",
                                     "]}",
                                     "ab",
                                     "abc",
                                     "the",
                                     "  ",
                                     "\n  ",
                                     "12",
                                     "000",
                                     "true",
                                     "null",
                                     "\xc3\xa9",
                                     "\xe6\x97\xa5\xe6\x9c\xac",
                                     "\xf0\x9f\x98\x80",
                                     "\\u00",
                                     "\\n",
                                     "-1",
                                     ".5",
                                     "\xa9\"",
                                     "a\xc3"};
static nmk_token_tree *tree;

static const char *text_of(const void *user, int32_t id, size_t *bytes) {
    static char all[256];
    (void)user;
    if (id == END) return NULL;
    if (id < 257) return all[id - 1] = (char)(id - 1), *bytes = 1, &all[id - 1];
    if (id - 257 >= (int)(sizeof longer / sizeof *longer)) return NULL;
    *bytes = strlen(longer[id - 257]);
    return longer[id - 257];
}

static void open_tree(void) {
    const int32_t end = END;
    tree = nmk_token_tree_new(text_of, NULL, VOCAB, &end, 1);
}

/* A random text of the grammar, by tokens that the masks have; false: it did not end. */
static bool walk(nmk_masks *m, nmk_buf *text) {
    uint32_t mask[VOCAB / 32];
    nmk_err e = {""};
    nmk_walker *w = nmk_walker_new(m);
    bool ended = false;
    for (int i = 0; i < STEPS && !ended; i++) {
        int chosen = -1;
        uint32_t count = 0;
        if (!nmk_walker_mask(w, mask, &e)) {
            if (!strstr(e.text, "too many ways")) fuzz_wrong("a dead end after \"%s\": %s", text->data, e.text);
            break;
        }
        for (int id = 0; id < VOCAB; id++) {
            if (!(mask[id / 32] >> id % 32 & 1)) continue;
            if (!fuzz_below(++count)) chosen = id;
        }
        if (chosen < 0) fuzz_wrong("a mask without tokens after \"%s\"", text->data);
        if ((mask[END / 32] & 1u << END % 32) && (i > 20 || !fuzz_below(3))) chosen = END;
        if (!nmk_walker_take(w, chosen, &e)) fuzz_wrong("the mask has token %d, take says: %s", chosen, e.text);
        ended = nmk_walker_ended(w);
        if (ended != (chosen == END)) fuzz_wrong("ended by token %d", chosen);
        size_t bytes = 0;
        const char *said = ended ? NULL : text_of(NULL, chosen, &bytes);
        if (said) nmk_buf_add(text, said, bytes);
    }
    nmk_walker_free(w);
    return ended;
}

static void walk_all(nmk_grammar *g, int root, void (*look)(const void *with, const nmk_buf *text), const void *with) {
    nmk_err e = {""};
    if (nmk_grammar_finish(g, root, &e)) {
        if (!*e.text) fuzz_wrong("refused without a message");
        fuzz_feature(e.text);
        nmk_grammar_free(g);
        return;
    }
    nmk_masks *m = nmk_masks_new(g, tree);
    for (int i = 0; i < 3; i++) {
        nmk_buf text = {0};
        nmk_buf_puts(&text, "");
        if (walk(m, &text) && look) look(with, &text);
        nmk_buf_free(&text);
    }
    nmk_masks_unref(m);
}

/* ---------------------------------------------------------------- regular expressions */

static void matches(const void *with, const nmk_buf *text) {
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    pcre2_match_context *limits = pcre2_match_context_create(NULL);
    pcre2_set_match_limit(limits, 100000), pcre2_set_heap_limit(limits, 10000);
    int rc = pcre2_match(with, (PCRE2_SPTR)text->data, text->length, 0, 0, match, limits);
    if (rc == PCRE2_ERROR_NOMATCH) fuzz_wrong("PCRE2 does not match \"%s\"", text->data);
    pcre2_match_data_free(match), pcre2_match_context_free(limits);
}

static void run_regex(const char *data, size_t bytes) {
    nmk_err e = {""};
    bool anywhere = bytes && data[0] == '~'; /* as JSON schemas have it */
    if (anywhere) data++, bytes--;
    nmk_expr *x = nmk_regex_parse(data, bytes, anywhere, &e);
    if (!x) {
        if (!*e.text) fuzz_wrong("refused without a message");
        fuzz_feature(e.text + strcspn(e.text, ":"));
        return;
    }
    int64_t fewest, most;
    nmk_expr_length(x, &fewest, &most);
    if (fewest < 0 || most < -1 || (most >= 0 && most < fewest))
        fuzz_wrong("lengths from %lld to %lld", (long long)fewest, (long long)most);
    nmk_grammar *g = nmk_grammar_new();
    int root = nmk_grammar_rule(g), error;
    nmk_grammar_expr(g, g->start[root], x, fuzz_below(4) == 0 && anywhere, g->end[root]);
    nmk_expr_free(x);
    /* What PCRE2 alone knows: classes by name, and a group's name has to be one. */
    PCRE2_SIZE at;
    pcre2_compile_context *dialect = pcre2_compile_context_create(NULL);
    pcre2_set_compile_extra_options(dialect, PCRE2_EXTRA_ALT_BSUX);
    bool other = memmem(data, bytes, "[:", 2) || memmem(data, bytes, "[.", 2) || memmem(data, bytes, "[=", 2);
    nmk_buf whole = {0};
    nmk_buf_puts(&whole, anywhere ? "" : "^(?:");
    nmk_buf_add(&whole, data, bytes);
    nmk_buf_puts(&whole, anywhere ? "" : ")$");
    pcre2_code *code = other || anywhere ? NULL
                                         : pcre2_compile((PCRE2_SPTR)whole.data, whole.length,
                                                         PCRE2_UTF | PCRE2_DOLLAR_ENDONLY | PCRE2_MATCH_UNSET_BACKREF,
                                                         &error, &at, dialect);
    walk_all(g, root, code ? matches : NULL, code);
    pcre2_code_free(code), pcre2_compile_context_free(dialect);
    nmk_buf_free(&whole);
}

static void regex_seeds(void) {
    static const char *const texts[] = {"(ab|abc)(c|a){1,2}",
                                        "a*b?c{2,3}",
                                        "[a-b\xc3\xa9]{2}c",
                                        "^(yes|no)$",
                                        "[\\]\\-a^]+",
                                        "x.z",
                                        "\\u00e9\\x41\\u{1F600}",
                                        "(?:a|b)*?c+",
                                        "(?<year>\\d{4})-\\d\\d",
                                        "~^[A-Z]{2}\\d+$",
                                        "~\\S+@\\w+\\.\\w{2,}",
                                        "[^a-c\\d\\s]{0,9}",
                                        "^a|b$|",
                                        "(((((a?)?)?)?)*)+",
                                        "([a-z]{1,50}){1,50}",
                                        "(a|b|c|d){20,30}(x|y)*",
                                        "[\xf0\x9f\x98\x80-\xf0\x9f\x99\x8f]+",
                                        "(?P<n>[\\w.+-]{1,64})@(?:[a-z]+\\.)+[a-z]{2,}",
                                        "\\D\\W\\S[\\D][^\\D\\W]",
                                        "\\ud83d\\ude00|\\t\\n\\0"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) fuzz_seed_text(texts[i]);
    for (const char *const *w = (const char *const[]){"(?:", "(?<a>", "{0,}", "{0,0}", "{1000}",      "{1,4096}",
                                                      "\\d", "\\W",   "\\S",  "[^",    "\\u{10ffff}", "\\uD800\\uDC00",
                                                      ".*",  "|",     "^",    "$",     "()",          "a{9}{9}{9}",
                                                      "*?",  NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_regex = {"regex", regex_seeds, open_tree, run_regex, 2000, WALKS_MS};

/* ---------------------------------------------------------------- GBNF */

static void run_gbnf(const char *data, size_t bytes) {
    nmk_err e = {""};
    nmk_grammar *g = nmk_grammar_new();
    int root = -1;
    if (nmk_gbnf_read(g, data, bytes, &root, &e)) {
        if (!*e.text) fuzz_wrong("refused without a message");
        fuzz_feature(e.text + strcspn(e.text, ":"));
        nmk_grammar_free(g);
        return;
    }
    walk_all(g, root, NULL, NULL);
}

static void gbnf_seeds(void) {
    fuzz_seed_text("root ::= \"a\" root \"b\" | \"c\"");
    fuzz_seed_text("root ::= x{2}\nx ::= [ab] | \"c\" y?\ny ::= \"a\"\n");
    fuzz_seed_text("root ::= expr # comment\nexpr ::= term (\"+\" term)*\nterm ::= [0-9]{1,3} | \"(\" expr \")\"\n");
    fuzz_seed_text(
        "root   ::= object\nvalue  ::= object | array | string | (\"true\" | \"false\" | \"null\") ws\n"
        "object ::=\n  \"{\" ws (\n    string \":\" ws value\n    (\",\" ws string \":\" ws value)*\n  )? \"}\" ws\n"
        "array  ::= \"[\" ws ( value (\",\" ws value)* )? \"]\" ws\n"
        "string ::= \"\\\"\" ( [^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4}) )* \"\\\"\" ws\n"
        "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n");
    fuzz_seed_text("root ::= [^\"\\n\xc3\xa9]* . a-b\na-b ::= \"\\u00e9\\U0001F600\" | \"\"\n");
    for (const char *const *w =
             (const char *const[]){"::=", "\n", "root", "root ::= ", "x ::= ", "{1,4096}", "{0,}", "(", ")", "|", "*",
                                   "+", "?", "[^", "\\x", ".", "\"\"", "# ", NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_gbnf = {"gbnf", gbnf_seeds, open_tree, run_gbnf, 4000, WALKS_MS};

/* ---------------------------------------------------------------- JSON schemas */

/* How often the object that begins a document has this name. */
static int times_named(const char *text, const char *name) {
    int times = 0, level = 0;
    for (const char *at = text; *at; at++) {
        level += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
        if (*at != '"') continue;
        const char *begin = at++;
        while (*at && *at != '"') at += *at == '\\' && at[1] ? 2 : 1;
        if (!*at) break;
        if (level != 1 || at[1 + strspn(at + 1, " \n\t\r")] != ':') continue;
        char *quoted = strndup(begin, (size_t)(at + 1 - begin));
        struct json_object *said = json_tokener_parse(quoted);
        times += said && !strcmp(json_object_get_string(said), name);
        json_object_put(said), free(quoted);
    }
    return times;
}

/* Where any name will do a document may say one twice, which json-c reads and nmk_json_parse refuses: but none that the
 * schema names. */
static void is_json(const void *schema, const nmk_buf *text) {
    nmk_err e = {""};
    struct json_object *value = nmk_json_parse(text->data, text->length, &e), *properties;
    if (!value && strstr(e.text, "is there twice")) {
        if (json_object_is_type(schema, json_type_object) &&
            json_object_object_get_ex(schema, "properties", &properties)) {
            json_object_object_foreach(properties, name, of) {
                (void)of;
                if (times_named(text->data, name) > 1) fuzz_wrong("%s is there twice: %s", name, text->data);
            }
        }
        struct json_tokener *parser = json_tokener_new_ex(STEPS + 1); /* deeper than a walk gets */
        json_tokener_set_flags(parser, JSON_TOKENER_STRICT);
        value = json_tokener_parse_ex(parser, text->data, (int)text->length + 1);
        json_tokener_free(parser);
    } else if (!value && (strstr(e.text, "null is not") || strstr(e.text, "nested too deeply"))) {
        return;
    }
    if (!value) fuzz_wrong("not JSON: %s: %s", text->data, e.text);
    json_object_put(value);
}

static void run_schema(const char *data, size_t bytes) {
    nmk_err e = {""};
    struct json_object *schema = nmk_json_parse(data, bytes, &e);
    if (!schema) return;
    nmk_grammar *g = nmk_grammar_new();
    int root = -1;
    if (!json_object_is_type(schema, json_type_object) && !json_object_is_type(schema, json_type_boolean)) {
        nmk_grammar_free(g); /* who reads a request looks at that */
    } else if (nmk_schema_read(g, schema, &root, &e)) {
        if (!*e.text) fuzz_wrong("refused without a message");
        const char *what = strstr(e.text, ": ");
        fuzz_feature(what ? what : e.text);
        nmk_grammar_free(g);
    } else {
        walk_all(g, root, is_json, schema);
    }
    json_object_put(schema);
}

static void schema_seeds(void) {
    static const char *const texts[] = {
        "{\"type\":\"object\",\"properties\":{\"a\":{\"const\":1},\"b\":{\"type\":[\"string\",\"null\"],\"maxLength\":5}},"
        "\"required\":[\"a\"],\"additionalProperties\":false}",
        "{\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"number\"},\"next\":{\"anyOf\":[{\"$ref\":\"#/$defs/n\"},"
        "{\"type\":\"null\"}]}}}},\"$ref\":\"#/$defs/n\"}",
        "{\"type\":\"integer\",\"minimum\":-11,\"exclusiveMaximum\":1000,\"multipleOf\":5}",
        "{\"type\":\"number\",\"exclusiveMinimum\":-0.5,\"maximum\":12.25}",
        "{\"enum\":[\"a\",\"ab\",[1,{\"x\":null}],-1,1.5e3]}",
        "{\"type\":\"string\",\"pattern\":\"^a?[b-d]{2,}$\",\"minLength\":1,\"maxLength\":9}",
        "{\"type\":\"string\",\"format\":\"date-time\"}",
        "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"boolean\"}],\"items\":{\"type\":\"string\"},\"minItems\":1,\"maxItems\":4}",
        "{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"integer\"}],\"description\":\"x\",\"default\":1}",
        "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":true}},{\"required\":[\"a\"],\"properties\":{\"b\":{}}}]}",
        "{\"type\":\"object\",\"patternProperties\":{\"^x-\":{\"type\":\"string\"}},\"additionalProperties\":{\"type\":\"integer\"},"
        "\"minProperties\":1,\"maxProperties\":3,\"propertyNames\":{\"pattern\":\"^[a-z]+$\"}}",
        "{\"properties\":{\"\":{\"type\":\"null\"},\"ab\":{}},\"required\":[\"\"],\"additionalProperties\":true}",
        "{\"type\":\"object\"}",
        "{}",
        "true"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) fuzz_seed_text(texts[i]);
    fuzz_words_of("server/schema.c");
    for (const char *const *w =
             (const char *const[]){"{\"$ref\":\"#\"}", "\"#/$defs/n\"", "\"#/properties/a\"", "{\"type\":\"object\"}",
                                   "true", "false", "null", "1e15", "-0.0", "\"minimum\":", "{\"anyOf\":[", NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_schema = {"schema", schema_seeds, open_tree, run_schema, 4000, WALKS_MS};
