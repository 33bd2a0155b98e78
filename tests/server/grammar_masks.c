/* Masks against brute force, on small vocabularies; what the notations mean and refuse; and, for other tests, random
 * walks:
 *
 *     grammar_masks walk SEED <SCHEMAS     for each line, "schema TAB document", a document of random tokens
 *     grammar_masks bench VOCAB            what masks cost in a vocabulary of that size */
#include <time.h>

#include "check.h"
#include "gbnf.h"
#include "mask.h"
#include "regex.h"
#include "rng.h"
#include "schema.h"

enum { TOY_VOCAB = 4096, END = 1 };

/* ---------------------------------------------------------------- grammars from text */

typedef enum { SCHEMA, REGEX, GBNF } notation;

static int read_into(nmk_grammar *g, notation how, const char *text, nmk_err *e) {
    int root = -1;
    if (how == GBNF) return nmk_gbnf_read(g, text, strlen(text), &root, e) ? -1 : root;
    if (how == SCHEMA) {
        struct json_object *schema = nmk_json_parse(text, strlen(text), e);
        if (schema && nmk_schema_read(g, schema, &root, e)) root = -1;
        json_object_put(schema);
        return root;
    }
    nmk_expr *x = nmk_regex_parse(text, strlen(text), false, e);
    if (!x) return -1;
    root = nmk_grammar_rule(g);
    nmk_grammar_expr(g, g->start[root], x, false, g->end[root]);
    nmk_expr_free(x);
    return root;
}

static nmk_masks *masks_of(notation how, const char *text, const nmk_token_tree *t, nmk_err *e) {
    nmk_grammar *g = nmk_grammar_new();
    int root = read_into(g, how, text, e);
    if (root >= 0 && !nmk_grammar_finish(g, root, e)) return nmk_masks_new(g, t);
    nmk_grammar_free(g);
    return NULL;
}

static bool bit(const uint32_t *mask, int id) { return mask[id / 32] >> id % 32 & 1; }

/* ---------------------------------------------------------------- small vocabularies */

typedef struct {
    const char *const *text;
    int count;
} list;

static const char *of_list(const void *user, int32_t id, size_t *bytes) {
    const list *l = user;
    if (id >= l->count || !l->text[id]) return NULL;
    *bytes = strlen(l->text[id]);
    return l->text[id];
}

/* Whether a text can be completed by the words of `l`, `steps` more at most; by trying all of them. */
static bool completes(nmk_masks *m, const list *l, const int32_t *token, int tokens, int steps) {
    nmk_walker *w = nmk_walker_new(m);
    nmk_err e;
    bool alive = true, found = false;
    for (int i = 0; i < tokens && alive; i++) alive = nmk_walker_take(w, token[i], &e);
    if (alive) found = nmk_walker_take(w, END, &e);
    nmk_walker_free(w);
    if (!alive || found || !steps) return found;
    int32_t next[32];
    memcpy(next, token, sizeof *token * (size_t)tokens);
    for (int id = 2; id < l->count && !found; id++) {
        next[tokens] = id;
        found = completes(m, l, next, tokens + 1, steps - 1);
    }
    return found;
}

/* At every text of up to `depth` tokens: the mask has a token if and only if some continuation exists. */
static int compare(nmk_masks *m, const list *l, int32_t *token, int tokens, int depth, int steps, int *wrong) {
    uint32_t mask[4] = {0};
    nmk_err e;
    int compared = 0;
    nmk_walker *w = nmk_walker_new(m);
    for (int i = 0; i < tokens; i++) nmk_walker_take(w, token[i], &e);
    bool some = nmk_walker_mask(w, mask, &e);
    bool ends = nmk_walker_take(w, END, &e);
    nmk_walker_free(w);
    if (some && bit(mask, END) != ends) ++*wrong;
    for (int id = 2; id < l->count; id++) {
        token[tokens] = id;
        bool allowed = some && bit(mask, id), can = completes(m, l, token, tokens + 1, steps);
        compared++;
        if (allowed != can) {
            printf("  after");
            for (int i = 0; i < tokens; i++) printf(" %s", l->text[token[i]]);
            printf(": %s %d, brute force %d\n", l->text[id], allowed, can);
            ++*wrong;
        }
        if (allowed && depth) compared += compare(m, l, token, tokens + 1, depth - 1, steps, wrong);
    }
    return compared;
}

/* The vocabularies have all bytes that the grammars need, so that there are no dead ends. */
static void against_brute_force(notation how, const char *text, const char *const *words, int count, int depth,
                                int steps) {
    const list l = {words, count};
    const int32_t end = END;
    nmk_err e = {""};
    nmk_token_tree *t = nmk_token_tree_new(of_list, &l, count, &end, 1);
    nmk_masks *m = masks_of(how, text, t, &e);
    int32_t token[32];
    int wrong = 0, compared = m ? compare(m, &l, token, 0, depth, steps, &wrong) : 0;
    char name[128];
    snprintf(name, sizeof name, "masks against brute force: %.80s", text);
    for (char *c = name; *c; c++)
        if (*c == '\n') *c = ' ';
    check(m && compared > 0 && !wrong, name, "%s; %d of %d differ", e.text, wrong, compared);
    nmk_masks_unref(m);
    nmk_token_tree_free(t);
}

static void test_brute_force(void) {
    static const char *const letters[] = {NULL,  NULL, "a",  "b",    "c",    "ab",   "bc",
                                          "abc", "aa", "ca", "\xc3", "\xa9", "a\xc3"};
    static const char *const json[] = {
        NULL, NULL, "\"", "a",   "b",   "{",   "}",   "[",   "]",  ":",  ",",  " ", "1",
        "0",  "-",  "\\", "\"a", "\":", "a\"", "{\"", "\"}", "1]", ",1", "]}", "n", "\n"};
    enum { LETTERS = sizeof letters / sizeof *letters, JSON = sizeof json / sizeof *json };
    against_brute_force(REGEX, "(ab|abc)(c|a){1,2}", letters, LETTERS, 4, 4);
    against_brute_force(REGEX, "a*b?c{2,3}", letters, LETTERS, 3, 5);
    against_brute_force(REGEX, "[a-b\xc3\xa9]{2}c", letters, LETTERS, 4, 4);
    against_brute_force(REGEX, "(a|ab)(bc|c)?", letters, LETTERS, 4, 3);
    against_brute_force(GBNF, "root ::= \"a\" root \"b\" | \"c\"", letters, LETTERS, 1, 6);
    against_brute_force(GBNF, "root ::= x{2}\nx ::= [ab] | \"c\" y?\ny ::= \"a\"", letters, LETTERS, 3, 4);
    against_brute_force(SCHEMA,
                        "{\"type\":\"object\",\"properties\":{\"a\":{\"const\":1}},\"additionalProperties\":false}",
                        json, JSON, 3, 7);
    against_brute_force(SCHEMA, "{\"type\":\"integer\",\"minimum\":-11,\"maximum\":10}", json, JSON, 3, 2);
    against_brute_force(SCHEMA, "{\"enum\":[\"a\",\"ab\",[1],-1]}", json, JSON, 4, 4);
    against_brute_force(SCHEMA, "{\"type\":\"string\",\"minLength\":1,\"maxLength\":2}", json, JSON, 3, 4);
    against_brute_force(SCHEMA, "{\"type\":\"string\",\"pattern\":\"^a?b$\"}", json, JSON, 3, 4);
    against_brute_force(SCHEMA, "{\"type\":\"array\",\"items\":{\"const\":1},\"minItems\":1,\"maxItems\":2}", json,
                        JSON, 3, 5);
}

/* ---------------------------------------------------------------- what is in a grammar */

/* Byte by byte. */
static bool contains(notation how, const char *text, const char *word, nmk_err *e) {
    static char bytes[256][2];
    static const char *each[256];
    for (int b = 2; b < 256; b++) bytes[b][0] = (char)b, each[b] = bytes[b];
    const list l = {each, 256};
    const int32_t end = END;
    nmk_token_tree *t = nmk_token_tree_new(of_list, &l, 256, &end, 1);
    nmk_masks *m = masks_of(how, text, t, e);
    nmk_walker *w = m ? nmk_walker_new(m) : NULL;
    bool good = w != NULL;
    for (const char *c = word; *c && good; c++) good = nmk_walker_take(w, (uint8_t)*c, e);
    good = good && nmk_walker_take(w, END, e);
    nmk_walker_free(w);
    nmk_masks_unref(m);
    nmk_token_tree_free(t);
    return good;
}

static void test_words(void) {
    static const struct {
        notation how;
        const char *text, *word;
        bool in;
    } cases[] = {
        {REGEX, "\\d{2,3}", "12", true},
        {REGEX, "\\d{2,3}", "1234", false},
        {REGEX, "^(yes|no)$", "no", true},
        {REGEX, "a{,2}", "a{,2}", true},
        {REGEX, "[\\]\\-a^]+", "]-a^", true},
        {REGEX, "[^a-c]", "d", true},
        {REGEX, "[^a-c]", "b", false},
        {REGEX, "x.z", "x\xe6\x97\xa5z", true},
        {REGEX, "x.z", "x\nz", false},
        {REGEX, "\\u00e9\\x41\\u{1F600}",
         "\xc3\xa9"
         "A\xf0\x9f\x98\x80",
         true},
        {REGEX, "(?:a|b)*?c+", "abacc", true},
        {REGEX, "(?<year>\\d{4})-\\d\\d", "2026-11", true},
        {GBNF, "root ::= \"a\" # comment\n  | \"b\" c\nc ::= [0-9]{2,}", "b123", true},
        {GBNF, "root ::= (\"a\" |\n \"b\")+ \"\\n\"", "abba\n", true},
        {GBNF, "root ::= [^\"\\n]*", "no quote", true},
        {GBNF, "root ::= expr\nexpr ::= term (\"+\" term)*\nterm ::= [0-9] | \"(\" expr \")\"", "1+(2+(3))", true},
        {GBNF, "root ::= expr\nexpr ::= term (\"+\" term)*\nterm ::= [0-9] | \"(\" expr \")\"", "1+(2", false},
        {SCHEMA, "{\"type\":\"object\"}", "{\"x\": [1.5e3, null, {\"y\":\n  true}]}", true},
        {SCHEMA, "{\"type\":\"object\"}", "[]", false},
        {SCHEMA, "{}", "\"\\u00e9\\ud83d\\ude00\\n\"", true},
        {SCHEMA, "{}", "\"\\ud83d\"", false},
        {SCHEMA, "{\"type\":\"string\",\"maxLength\":1}", "\"\\ud83d\\ude00\"", true},
        {SCHEMA, "{\"type\":\"string\",\"maxLength\":1}", "\"ab\"", false},
        {SCHEMA, "{\"type\":\"integer\",\"minimum\":10,\"maximum\":2000}", "9", false},
        {SCHEMA, "{\"type\":\"integer\",\"minimum\":10,\"maximum\":2000}", "2000", true},
        {SCHEMA, "{\"type\":\"integer\",\"minimum\":10,\"maximum\":2000}", "2001", false},
        {SCHEMA, "{\"type\":\"integer\",\"exclusiveMinimum\":-3}", "-2", true},
        {SCHEMA, "{\"type\":\"integer\",\"exclusiveMinimum\":-3}", "-3", false},
        {SCHEMA, "{\"type\":\"number\",\"minimum\":-0.5,\"exclusiveMaximum\":0.25}", "-0.5", true},
        {SCHEMA, "{\"type\":\"number\",\"minimum\":-0.5,\"exclusiveMaximum\":0.25}", "0.25", false},
        {SCHEMA, "{\"type\":\"number\",\"minimum\":-0.5,\"exclusiveMaximum\":0.25}", "0.2499", true},
        {SCHEMA, "{\"type\":\"string\",\"pattern\":\"b\"}", "\"abc\"", true},
        {SCHEMA, "{\"type\":\"string\",\"pattern\":\"^\\\"$\"}", "\"\\\"\"", true},
        {SCHEMA, "{\"type\":\"string\",\"format\":\"date\"}", "\"2024-02-29\"", true},
        {SCHEMA, "{\"type\":\"string\",\"format\":\"date\"}", "\"2023-02-29\"", false},
        {SCHEMA, "{\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{}},\"required\":[\"b\"]}", "{\"b\":1}", true},
        {SCHEMA, "{\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{}},\"required\":[\"b\"]}", "{\"a\":1}", false},
        {SCHEMA, "{\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{}},\"required\":[\"b\"]}", "{\"b\":1,\"a\":1}",
         false},
        {SCHEMA, "{\"properties\":{\"a\":{\"const\":1}},\"additionalProperties\":{\"const\":2}}", "{\"a\":1,\"ab\":2}",
         true},
        {SCHEMA, "{\"properties\":{\"a\":{\"const\":1}},\"additionalProperties\":{\"const\":2}}", "{\"a\":2}", false},
        {SCHEMA, "{\"properties\":{\"a\":{\"const\":1}},\"additionalProperties\":{\"const\":2}}", "{\"\\u0061\":2}",
         false},
        {SCHEMA,
         "{\"$defs\":{\"n\":{\"properties\":{\"n\":{\"anyOf\":[{\"$ref\":\"#/$defs/n\"},{\"type\":\"null\"}]}}}},"
         "\"$ref\":\"#/$defs/n\"}",
         "{\"n\":{\"n\":null}}", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nmk_err e = {""};
        char name[160];
        bool in = contains(cases[i].how, cases[i].text, cases[i].word, &e);
        snprintf(name, sizeof name, "%.90s %s %.40s", cases[i].text, cases[i].in ? "has" : "lacks", cases[i].word);
        for (char *c = name; *c; c++)
            if (*c == '\n') *c = ' ';
        check(in == cases[i].in, name, "%s", e.text);
    }
}

static void test_refusals(void) {
    static const struct {
        notation how;
        const char *text, *words;
    } cases[] = {
        {REGEX, "(a", "at character 3: a group without its )"},
        {REGEX, "a)", "at character 2: a ) without its ("},
        {REGEX, "*a", "nothing to repeat"},
        {REGEX, "a**", "at character 3: nothing to repeat"},
        {REGEX, "a?{2}", "nothing to repeat"},
        {REGEX, "a(?=b)", "lookahead is not supported"},
        {REGEX, "(?<!a)b", "lookbehind is not supported"},
        {REGEX, "(a)\\1", "references back are not supported"},
        {REGEX, "\\bword", "word boundaries are not supported"},
        {REGEX, "[z-a]", "a range that is none"},
        {REGEX, "a{3,2}", "fewer repeats"},
        {REGEX, "a{99999}", "too many repeats"},
        {REGEX, "a{50000}b{50000}c{50000}d{50000}e{50000}f{50000}g{50000}", "too large"},
        {GBNF, "root ::= \"a", "line 1: a literal or class without its end"},
        {GBNF, "root ::= a", "line 1: there is no rule a"},
        {GBNF, "start ::= \"a\"", "there is no rule root"},
        {GBNF, "root ::= root \"a\" | \"b\"", "left recursion"},
        {GBNF, "root ::= x root \"a\" | \"b\"\nx ::= \"c\"?", "left recursion"},
        {GBNF, "root ::= \"a\" root", "nothing satisfies it"},
        {GBNF, "root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule is there twice"},
        {GBNF, "root ::= \"a\"{2}{3}", "line 1: a repeat of a repeat"},
        {GBNF, "root ::= \"a\"{2", "line 1: expected repeats such as"},
        {SCHEMA, "{\"type\":\"objekt\"}", "schema.type: expected names of JSON's types"},
        {SCHEMA, "{\"properties\":{\"a\":{\"not\":{}}}}", "schema.properties.a.not: this keyword is not supported"},
        {SCHEMA, "{\"if\":{},\"then\":{}}", "schema.if: this keyword is not supported"},
        {SCHEMA, "{\"type\":\"array\",\"uniqueItems\":true}", "schema.uniqueItems: this keyword is not supported"},
        {SCHEMA, "{\"type\":\"array\",\"items\":{\"patternProperties\":{\"a\":{}}}}",
         "schema.items.patternProperties: this keyword is not supported"},
        {SCHEMA, "{\"type\":\"integer\",\"multipleOf\":5}", "schema.multipleOf"},
        {SCHEMA, "{\"type\":\"string\",\"format\":\"color\"}", "schema.format: 'color' is not supported"},
        {SCHEMA, "{\"type\":\"string\",\"pattern\":\"a(?!b)\"}", "schema.pattern: at character 4: lookahead"},
        {SCHEMA, "{\"$ref\":\"#/$defs/x\"}", "schema.$ref: there is no schema at '#/$defs/x'"},
        {SCHEMA, "{\"$ref\":\"#\"}", "refers to itself"},
        {SCHEMA, "{\"$ref\":\"other.json\"}", "schema.$ref: expected \"#/...\""},
        {SCHEMA, "{\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}", "nothing satisfies it"},
        {SCHEMA, "{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", "nothing satisfies it"},
        {SCHEMA, "{\"required\":[\"a\"],\"properties\":{}}", "schema.required: 'a' is not among the properties"},
        {SCHEMA, "{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"string\",\"maxLength\":3}]}", "use anyOf"},
        {SCHEMA, "{\"tipe\":\"string\"}", "schema.tipe: this keyword is not supported"},
        {SCHEMA, "{\"enum\":[]}", "schema.enum: expected values"},
        {SCHEMA, "{\"anyOf\":[{\"$ref\":\"#\"}]}", "left recursion"},
        {SCHEMA, "{\"type\":\"string\",\"maxLength\":9999999}", "schema.maxLength: too large"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nmk_err e = {""};
        char name[160];
        bool in = contains(cases[i].how, cases[i].text, "", &e);
        snprintf(name, sizeof name, "refused: %.100s", cases[i].text);
        for (char *c = name; *c; c++)
            if (*c == '\n') *c = ' ';
        check(!in && strstr(e.text, cases[i].words), name, "\"%s\"", e.text);
    }
}

/* ---------------------------------------------------------------- hostile sizes */

/* `piece`, with its number where it has %d, so often; then `end`. */
static char *many(const char *begin, const char *piece, int count, const char *end) {
    nmk_buf b = {0};
    nmk_buf_puts(&b, begin);
    for (int i = 0; i < count; i++) {
        const char *at = strstr(piece, "%d"), *next = at ? strstr(at + 2, "%d") : NULL;
        if (!at) {
            nmk_buf_puts(&b, piece);
            continue;
        }
        nmk_buf_printf(&b, "%.*s%d", (int)(at - piece), piece, i);
        if (next) nmk_buf_printf(&b, "%.*s%d", (int)(next - at - 2), at + 2, i + 1);
        nmk_buf_puts(&b, (next ? next : at) + 2);
    }
    nmk_buf_puts(&b, end);
    return b.data;
}

/* As long as a request may make them: refused or not, it takes neither the stack nor the time of others. */
static void test_sizes(void) {
    static const struct {
        const char *name;
        notation how;
        const char *begin, *piece;
        int count;
        const char *end;
    } cases[] = {
        {"a million repeats of a repeat", GBNF, "root ::= \"a\"", "*", 1000000, ""},
        {"repeats of repeats", REGEX, "a", "*", 16000, ""},
        {"lazy repeats of repeats", REGEX, "a", "*?", 8000, ""},
        {"a literal of a million characters", GBNF, "root ::= \"", "a", 1000000, "\""},
        {"as many alternatives", GBNF, "root ::= \"a\"", "|", 1000000, ""},
        {"as many optional characters", GBNF, "root ::= \"a\"", ".?", 300000, ""},
        {"as many empty groups", GBNF, "root ::= \"a\"", "()", 400000, ""},
        {"optional characters", REGEX, "", "a?", 8000, ""},
        {"optional alternatives", REGEX, "", "(a|)", 4000, ""},
        {"a chain of rules", GBNF, "root ::= x0\n", "x%d ::= x%d?\n", 9000, "x9000 ::= \"a\"\n"},
        {"a chain of rules, the other way", GBNF, "x0 ::= \"a\"\n", "y%d ::= x%d?\n", 1, "root ::= x0\nx1 ::= \"b\"\n"},
        {"many rules of one", GBNF, "root ::= x0\n", "x%d ::= root? \"a\" | x%d\n", 9000, "x9000 ::= \"a\"\n"},
        {"many references", GBNF, "root ::= \"a\"\n", "x%d ::= root\n", 9000, "x9000 ::= x1 x2 x3 x4 x5\n"},
        {"many schemas to be put together", SCHEMA, "{\"allOf\":[{}", ",{\"properties\":{\"k%d\":{}}}", 10000, "]}"},
        {"repeats within repeats", REGEX, "((((((((((((((((((((a", "{2})", 20, ""},
        {"repeats of many within repeats of many", REGEX, "((((a{1,50000}){1,50000}){1,50000}){1,50000})", "", 1, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nmk_err e = {""};
        char *text = many(cases[i].begin, cases[i].piece, cases[i].count, cases[i].end);
        clock_t start = clock();
        bool in = contains(cases[i].how, text, "a", &e);
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        check(seconds < time_limit(2) && (in || *e.text), cases[i].name, "%d after %.1f s: %s", in, seconds, e.text);
        free(text);
    }
}

/* ---------------------------------------------------------------- special tokens, ends, what was forgotten */

static void test_tokens(void) {
    static const char *const words[] = {NULL, NULL, NULL, "a", "b"};
    const list l = {words, 5};
    const int32_t end = END;
    uint32_t mask[1];
    nmk_err e = {""};
    nmk_token_tree *t = nmk_token_tree_new(of_list, &l, 5, &end, 1);
    nmk_grammar *g = nmk_grammar_new();
    int root = nmk_grammar_rule(g), s = nmk_grammar_state(g);
    nmk_grammar_bytes(g, g->start[root], 0, 255, g->start[root]);
    nmk_grammar_token(g, g->start[root], 2, s);
    nmk_grammar_bytes(g, s, 'b', 'b', g->end[root]);
    check(!nmk_grammar_finish(g, root, &e), "free text up to a special token", "%s", e.text);
    nmk_masks *m = nmk_masks_new(g, t);
    nmk_walker *w = nmk_walker_new(m);
    bool first = nmk_walker_mask(w, mask, &e) && mask[0] == (1 << 2 | 1 << 3 | 1 << 4);
    bool taken = nmk_walker_take(w, 3, &e) && nmk_walker_take(w, 2, &e);
    bool second = nmk_walker_mask(w, mask, &e) && mask[0] == 1 << 4;
    bool refused = !nmk_walker_take(w, 3, &e);
    taken = taken && nmk_walker_take(w, 4, &e);
    bool third = nmk_walker_mask(w, mask, &e) && mask[0] == 1 << END && !nmk_walker_ended(w);
    taken = taken && nmk_walker_take(w, END, &e) && nmk_walker_ended(w);
    bool over = !nmk_walker_mask(w, mask, &e) && !nmk_walker_take(w, 3, &e);
    check(first && second && third && taken && refused && over, "special tokens by id, the end when it is complete",
          "%d %d %d %d %d %d", first, second, third, taken, refused, over);
    nmk_walker_free(w);
    nmk_masks_unref(m);
    nmk_token_tree_free(t);

    /* a vocabulary that lacks a byte: a dead end is an error, not free text */
    static const char *const few[] = {NULL, NULL, "a"};
    const list short_list = {few, 3};
    t = nmk_token_tree_new(of_list, &short_list, 3, &end, 1);
    m = masks_of(REGEX, "ab", t, &e);
    w = nmk_walker_new(m);
    bool alive = nmk_walker_mask(w, mask, &e) && nmk_walker_take(w, 2, &e);
    check(alive && !nmk_walker_mask(w, mask, &e) && strstr(e.text, "no token"), "a dead end is told", "%s", e.text);
    nmk_walker_free(w);
    nmk_masks_unref(m);
    nmk_token_tree_free(t);
}

/* Two walkers of one grammar, one of which makes it forget what the other stands on. */
static void test_forgetting(void) {
    static char bytes[256][2];
    static const char *each[256];
    for (int b = 2; b < 256; b++) bytes[b][0] = (char)b, each[b] = bytes[b];
    const list l = {each, 256};
    const int32_t end = END;
    nmk_err e = {""};
    uint32_t mask[8], again[8];
    nmk_token_tree *t = nmk_token_tree_new(of_list, &l, 256, &end, 1);
    nmk_masks *m = masks_of(SCHEMA, "{\"type\":\"string\",\"maxLength\":45000}", t, &e);
    nmk_walker *still = nmk_walker_new(m), *far = nmk_walker_new(m);
    bool good = nmk_walker_take(still, '"', &e) && nmk_walker_take(still, 'x', &e) && nmk_walker_mask(still, mask, &e);
    good = good && nmk_walker_take(far, '"', &e);
    for (int i = 0; i < 45000 && good; i++) good = nmk_walker_take(far, 'y', &e);
    good = good && !nmk_walker_take(far, 'y', &e) && nmk_walker_mask(still, again, &e) &&
           !memcmp(mask, again, sizeof mask);
    check(good && nmk_walker_take(far, '"', &e) && nmk_walker_take(far, END, &e),
          "states that were forgotten are found again", "%s", e.text);
    nmk_walker_free(still), nmk_walker_free(far);
    nmk_masks_unref(m);
    nmk_token_tree_free(t);
}

/* ---------------------------------------------------------------- random walks */

/* Of the tokens allowed one at random; the more often one that ends something, the longer the text is. */
static int choose(const nmk_tokenizer *t, const uint32_t *mask, int length) {
    int chosen = -1, closer = -1, seen = 0, closers = 0;
    for (int id = 0; id < TOY_VOCAB; id++) {
        if (!bit(mask, id)) continue;
        size_t bytes = 0;
        const char *s = nmk_tokenizer_token(t, id, &bytes);
        bool closes = nmk_tokenizer_is_special(t, id) || (bytes == 1 && strchr("\"]}1", *s));
        if (rng() % (uint32_t)++seen == 0) chosen = id;
        if (closes && rng() % (uint32_t)++closers == 0) closer = id;
    }
    bool tired = rng() % 100 < (uint32_t)(length < 40 ? 25 : length < 150 ? 60 : 97);
    return closer >= 0 && tired ? closer : chosen;
}

/* Prints the document; false: no end was found. */
static bool walk(const nmk_tokenizer *tokenizer, nmk_masks *m, const char *schema, int *wrong) {
    enum { MOST = 1500 };
    uint32_t mask[TOY_VOCAB / 32];
    nmk_buf text = {0};
    nmk_err e = {""};
    nmk_walker *w = nmk_walker_new(m);
    for (int i = 0; i < MOST && !nmk_walker_ended(w); i++) {
        if (!nmk_walker_mask(w, mask, &e)) break;
        int id = choose(tokenizer, mask, i);
        size_t bytes = 0;
        const char *s = nmk_tokenizer_token(tokenizer, id, &bytes);
        if (!nmk_walker_take(w, id, &e)) break;
        if (!nmk_walker_ended(w)) nmk_buf_add(&text, s, bytes);
    }
    bool ended = nmk_walker_ended(w);
    if (*e.text) fprintf(stderr, "%s: after %s: %s\n", schema, text.data ? text.data : "", e.text), ++*wrong;
    if (ended) {
        struct json_object *s = json_object_new_string_len(text.data, (int)text.length);
        printf("%s\t%s\n", schema, json_object_to_json_string_ext(s, JSON_C_TO_STRING_PLAIN));
        json_object_put(s);
    }
    nmk_walker_free(w);
    nmk_buf_free(&text);
    return ended;
}

static int walks(uint64_t seed) {
    nmk_err e = {""};
    nmk_tokenizer *tokenizer = NULL;
    rng_state = seed;
    char *line = NULL;
    size_t room = 0;
    int done = 0, refused = 0, unfinished = 0, wrong = 0;
    if (nmk_tokenizer_load("examples/nmc-toy", &tokenizer, &e)) return fprintf(stderr, "%s\n", e.text), 1;
    const int32_t end = nmk_tokenizer_find(tokenizer, "<|END_OF_TURN_TOKEN|>");
    nmk_token_tree *t = nmk_token_tree_of(tokenizer, TOY_VOCAB, &end, 1);
    for (ssize_t n; (n = getline(&line, &room, stdin)) > 0;) {
        line[n - 1] = 0;
        nmk_masks *m = masks_of(SCHEMA, line, t, &e);
        if (!m) {
            refused++;
            fprintf(stderr, "refused: %s: %s\n", line, e.text);
            continue;
        }
        e.text[0] = 0;
        if (walk(tokenizer, m, line, &wrong))
            done++;
        else
            unfinished++;
        nmk_masks_unref(m);
    }
    fprintf(stderr, "%d documents, %d refused, %d unfinished, %d wrong\n", done, refused, unfinished, wrong);
    free(line);
    nmk_token_tree_free(t);
    nmk_tokenizer_free(tokenizer);
    return wrong > 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "walk")) return walks(strtoull(argv[2], NULL, 10));
    test_brute_force();
    test_words();
    test_refusals();
    test_sizes();
    test_tokens();
    test_forgetting();
    return failures > 0;
}
