/* nmk-serve whose model's tokens are scripted, for tests of clients: all else, from HTTP and template to scheduler,
 * cache and parsers, is the real program, on a GPU made up of host memory.
 *
 * NMK_SCRIPT names a file of rules, a JSON list: {"has": [TEXT...], "lacks": [TEXT...], "say": TEXT}.  The first rule
 * whose texts the prompt has and lacks says the answer, in the model's own markup from behind <|START_THINKING|> on;
 * the end of the turn is added.  A prompt that no rule knows gets an answer that says so.
 *
 * The made-up machine keeps which token is at each position of each page, so it knows a row's whole text also where
 * its beginning came from the cache. */
#define _GNU_SOURCE
#include "runtime/fake_gpu.h"

#include "json.h"
#include "tokenizer.h"

int serve_main(int argc, char **argv);
#define main serve_main
#include "../../server/main.c"
#undef main

enum { MOST_PAGES = 1 << 16, PAGE = NMK_PAGE_TOKENS };

static nmk_tokenizer *words;
static struct json_object *script;
static int32_t in_page[MOST_PAGES][PAGE];
static int32_t chatbot, thinking, end_of_turn;

static bool holds(struct json_object *list, const char *text, bool wanted) {
    for (size_t i = 0; json_object_is_type(list, json_type_array) && i < json_object_array_length(list); i++)
        if ((strstr(text, json_object_get_string(json_object_array_get_idx(list, i))) != NULL) != wanted) return false;
    return true;
}

static const char *answer_to(const char *prompt) {
    for (size_t i = 0; i < json_object_array_length(script); i++) {
        struct json_object *rule = json_object_array_get_idx(script, i);
        if (holds(nmk_json_get(rule, "has"), prompt, true) && holds(nmk_json_get(rule, "lacks"), prompt, false))
            return json_object_get_string(nmk_json_get(rule, "say"));
    }
    return "<|END_THINKING|><|START_TEXT|>No rule of the script knows this.<|END_TEXT|>";
}

/* What comes after the tokens, of which the last begins or goes on with the model's turn. */
static int32_t next_token(const int32_t *id, int count) {
    int turn = count - 1;
    nmk_buf prompt = {0};
    nmk_ids said = {0};
    nmk_err e;
    while (turn >= 0 && id[turn] != chatbot) turn--;
    if (turn < 0) return end_of_turn;
    nmk_tokenizer_decode(words, id, (size_t)turn, false, &prompt);
    const char *say = answer_to(prompt.data ? prompt.data : "");
    if (nmk_tokenizer_encode(words, say, strlen(say), NMK_PARSE_SPECIAL, &said, &e)) abort();
    /* the prompt has opened the thinking block, and closed it again where the request wants none */
    int given = count - 1 - turn - (turn + 1 < count && id[turn + 1] == thinking);
    int32_t token = (size_t)given < said.count ? said.id[given] : end_of_turn;
    nmk_buf_free(&prompt), nmk_ids_free(&said);
    return token;
}

static int32_t scripted(const nmk_params *p, const nmk_column *c) {
    const int32_t *pages = (const int32_t *)(uintptr_t)p->table_full + (size_t)c->slot * (size_t)p->table_stride;
    int32_t page = pages[c->pos / PAGE];
    assert(page >= 0 && page < MOST_PAGES);
    in_page[page][c->pos % PAGE] = c->token;
    if (!(c->flags & NMK_COLUMN_SAMPLES)) return 0;
    int32_t *id = xmalloc(sizeof *id * (size_t)(c->pos + 1));
    for (int i = 0; i <= c->pos; i++) id[i] = in_page[pages[i / PAGE]][i % PAGE];
    int32_t token = next_token(id, c->pos + 1);
    free(id);
    return token;
}

int main(int argc, char **argv) {
    const char *path = getenv("NMK_SCRIPT"), *checkpoint = NULL;
    nmk_err e = {0};
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], "--checkpoint")) checkpoint = argv[i + 1];
    if (!path || !checkpoint) return fprintf(stderr, "scripted: NMK_SCRIPT and --checkpoint DIR are needed\n"), 2;
    script = nmk_json_read(path, 16 << 20, &e);
    if (!script || nmk_tokenizer_load(checkpoint, &words, &e)) return fprintf(stderr, "scripted: %s\n", e.text), 1;
    chatbot = nmk_tokenizer_find(words, "<|CHATBOT_TOKEN|>");
    thinking = nmk_tokenizer_find(words, "<|START_THINKING|>");
    end_of_turn = nmk_tokenizer_find(words, "<|END_OF_TURN_TOKEN|>");
    fake.total_bytes = (size_t)4 << 30, fake.free_bytes = (size_t)2 << 30;
    if (fake_install(&e)) return fprintf(stderr, "scripted: %s\n", e.text), 1;
    fake_model = scripted;
    return serve_main(argc, argv);
}
