/* What answers of a given form cost: masks on the host, and the speed of decoding with them beside without.
 *
 * bench-constrained [--checkpoint DIR | --random-weights SEED] [--device cuda:0] [--batch 1,8] [--steps 300] [--masks-only]
 *
 * The vocabulary is made up, as large as the model's: bytes, words, digits, runs of blanks, punctuation, characters of
 * several bytes and parts of them, in about the shares that real ones have.  Every sequence has a schema of its own that
 * nobody has asked for before, so all masks are found while it decodes. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"
#include "engine.h"
#include "mask.h"
#include "rng.h"
#include "schema.h"
#include "values.h"

enum { WORDS = (NMK_VOCAB + 31) / 32, END = 0, MOST_ROWS = 64, MOST_STEPS = 4096, WARM_UP = 20, PROMPT = 16 };

static void die(const char *what) {
    fprintf(stderr, "bench-constrained: %s\n", what);
    exit(1);
}

/* ---------------------------------------------------------------- a vocabulary */

static char *words[NMK_VOCAB];

static void add(int *count, const char *head, const char *body, const char *tail) {
    if (*count < NMK_VOCAB) words[(*count)++] = xasprintf("%s%s%s", head, body, tail);
}

static void make_vocabulary(void) {
    static const char *const syllables[] = {"a",   "in", "er", "tion", "re", "con", "st",  "le",
                                            "ing", "de", "an", "or",   "lo", "ma",  "per", "ti",
                                            "un",  "ex", "ly", "ment", "co", "pro", "se",  "ta"};
    static const char *const marks[] = {"\"",   "\",", "\":", "\": ", "{\"", "\"}",  "\"]",  "},",
                                        "],",   "[",   "(",   ")",    "()",  ");\n", "\n\n", "\\n",
                                        "\\\"", "://", "->",  "==",   "\t",  "</",   "/>",   "..."};
    enum { SYLLABLES = sizeof syllables / sizeof *syllables, MARKS = sizeof marks / sizeof *marks };
    int n = 1; /* token END has no text */
    char text[128];
    for (int b = 1; b < 256; b++) snprintf(text, sizeof text, "%c", b), add(&n, "", text, "");
    for (int i = 2; i < 90; i++)
        snprintf(text, sizeof text, "%*s", i, ""), add(&n, "", text, ""), add(&n, "\n", text, "");
    for (int i = 0; i < 1000; i++) snprintf(text, sizeof text, "%d", i), add(&n, "", text, "");
    for (int i = 0; i < MARKS; i++)
        for (int k = 0; k < MARKS; k++) add(&n, marks[i], marks[k], "");
    for (int i = 0; i < 20000; i++) { /* characters of three bytes, alone, in pairs, and cut off */
        snprintf(text, sizeof text, "%c%c%c", 0xe4 + i / 4096 % 5, 0x80 + i / 64 % 64, 0x80 + i % 64);
        add(&n, "", text, i % 3 == 1 ? "\xe7\x9a\x84" : i % 3 == 2 ? "\xe7\x9a" : "");
    }
    while (n < NMK_VOCAB) {
        text[0] = 0;
        for (int k = (int)(rng() % 4) + 1; k > 0; k--) strcat(text, syllables[rng() % SYLLABLES]);
        uint32_t kind = rng() % 16;
        snprintf(text + strlen(text), 16, "%x", rng() % 4096);
        if (kind < 2)
            add(&n, marks[rng() % MARKS], text, "");
        else
            add(&n, kind < 9 ? " " : "", text, kind == 15 ? marks[rng() % MARKS] : "");
    }
}

static const char *text_of(const void *user, int32_t id, size_t *bytes) {
    (void)user;
    if (!words[id]) return NULL;
    *bytes = strlen(words[id]);
    return words[id];
}

/* ---------------------------------------------------------------- schemas */

static const struct {
    const char *name, *text;
} schemas[] = {
    {"record",
     "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"age\":{\"type\":\"integer\",\"minimum\":0,"
     "\"maximum\":130},\"city\":{\"type\":\"string\",\"maxLength\":40},\"tags\":{\"type\":\"array\",\"items\":{"
     "\"enum\":[\"red\",\"green\",\"blue\"]},\"maxItems\":5},\"score\":{\"type\":\"number\"}},\"required\":[\"name\","
     "\"age\",\"city\",\"tags\",\"score\"],\"additionalProperties\":false}"},
    {"bounded strings",
     "{\"type\":\"array\",\"items\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":200},\"minItems\":3}"},
    {"any object", "{\"type\":\"object\"}"},
    {"patterns",
     "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"string\",\"format\":\"uuid\"},\"at\":{\"type\":\"string\","
     "\"format\":\"date-time\"},\"mail\":{\"type\":\"string\",\"format\":\"email\"},\"path\":{\"type\":\"string\","
     "\"pattern\":\"^(/[a-z0-9_.-]+)+$\"}},\"required\":[\"id\",\"at\",\"mail\",\"path\"],\"additionalProperties\":"
     "false}"},
    {"alternatives",
     "{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":\"text\"},\"text\":{\"type\":\"string\"}},"
     "\"required\":[\"kind\",\"text\"]},{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":\"call\"},\"name\":{"
     "\"type\":\"string\",\"pattern\":\"^[a-z_]+$\"},\"arguments\":{\"type\":\"object\"}},\"required\":[\"kind\","
     "\"name\",\"arguments\"]}]}"},
};
enum { SCHEMAS = sizeof schemas / sizeof *schemas };

/* A grammar of nobody else: documents of many items, so that none ends early if `endless`. */
static nmk_masks *new_masks(const nmk_token_tree *t, int schema, bool endless) {
    nmk_err e = {""};
    char *text =
        xasprintf(endless ? "{\"type\":\"array\",\"items\":%s,\"minItems\":9999}" : "%s", schemas[schema].text);
    struct json_object *o = nmk_json_parse(text, strlen(text), &e);
    nmk_grammar *g = nmk_grammar_new();
    int root = -1;
    if (!o || nmk_schema_read(g, o, &root, &e) || nmk_grammar_finish(g, root, &e)) die(e.text);
    json_object_put(o);
    free(text);
    return nmk_masks_new(g, t);
}

/* ---------------------------------------------------------------- masks alone */

/* A token of the mask; ends of strings and numbers more often than chance would have it. */
static int choose(const uint32_t *mask) {
    int chosen = -1, closer = -1, seen = 0, closers = 0;
    for (int w = 0; w < WORDS; w++)
        for (uint32_t left = mask[w]; left; left &= left - 1) {
            int id = w * 32 + __builtin_ctz(left);
            if (id == END) continue;
            if (rng() % (uint32_t)++seen == 0) chosen = id;
            if (strchr("\"},]:", words[id][0]) && rng() % (uint32_t)++closers == 0) closer = id;
        }
    return closer >= 0 && rng() % 6 == 0 ? closer : chosen >= 0 ? chosen : END;
}

static void walk(nmk_masks *m, int steps, double *us) {
    static uint32_t mask[WORDS];
    nmk_err e = {""};
    nmk_walker *w = nmk_walker_new(m);
    for (int i = 0; i < steps; i++) {
        uint64_t start_ns = nmk_now_ns();
        if (!nmk_walker_mask(w, mask, &e)) die(e.text);
        us[i] = 1e-3 * (double)(nmk_now_ns() - start_ns);
        int token = choose(mask);
        start_ns = nmk_now_ns();
        if (!nmk_walker_take(w, token, &e)) die(e.text);
        us[i] += 1e-3 * (double)(nmk_now_ns() - start_ns);
    }
    nmk_walker_free(w);
    qsort(us, (size_t)steps, sizeof *us, by_value);
}

static double mean(const double *v, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += v[i];
    return sum / count;
}

static void bench_masks(const nmk_token_tree *t, int steps) {
    double *us = xcalloc((size_t)steps, sizeof *us), *again = xcalloc((size_t)steps, sizeof *again);
    printf(
        "Masks, %d tokens in the vocabulary, %d steps; us a step of one sequence: the first that has the schema, and "
        "another\n\n| schema | compiled, ms | mean | median | 99 %% | most | mean of another |\n|---|---|---|---|---|---|---|\n",
        NMK_VOCAB, steps);
    for (int i = 0; i < SCHEMAS; i++) {
        uint64_t start_ns = nmk_now_ns();
        nmk_masks *m = new_masks(t, i, true);
        double ms = 1e-6 * (double)(nmk_now_ns() - start_ns);
        walk(m, steps, us), walk(m, steps, again);
        printf("| %s | %.2f | %.0f | %.0f | %.0f | %.0f | %.0f |\n", schemas[i].name, ms, mean(us, steps),
               us[steps / 2], us[steps * 99 / 100], us[steps - 1], mean(again, steps));
        nmk_masks_unref(m);
    }
    printf("\n");
    free(us), free(again);
}

/* ---------------------------------------------------------------- decoding */

typedef struct {
    nmk_batch_request rq;
    nmk_walker *walker;
    nmk_masks *masks;
    uint64_t at[MOST_STEPS], id;
    int count;
} row;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
static int running;

static void on_token(void *user, int32_t token, const nmk_logprobs *logprobs) {
    row *r = user;
    (void)token, (void)logprobs;
    if (r->count < MOST_STEPS) r->at[r->count++] = nmk_now_ns();
}

static void on_end(void *user, nmk_batch_end end, const char *message) {
    (void)user;
    if (end != NMK_BATCH_LENGTH) die(message ? message : "a sequence ended early");
    pthread_mutex_lock(&lock);
    running--;
    pthread_cond_signal(&news);
    pthread_mutex_unlock(&lock);
}

static bool guide_mask(void *of, uint32_t *mask, nmk_err *e) { return nmk_walker_mask(of, mask, e); }
static bool guide_take(void *of, int32_t token, nmk_err *e) { return nmk_walker_take(of, token, e); }

/* One that takes no time. */
static bool any_mask(void *of, uint32_t *mask, nmk_err *e) {
    (void)of, (void)e;
    memset(mask, 0xff, sizeof *mask * WORDS);
    return true;
}
static bool any_take(void *of, int32_t token, nmk_err *e) {
    (void)of, (void)token, (void)e;
    return true;
}

enum { ANYTHING = -1 }; /* in place of a number of rows with a schema: all of them may say anything */

/* Milliseconds a step, while all rows decode; the median and the longest step go to *median and *most. */
static double decode(nmk_batch *b, const nmk_token_tree *t, int rows, int steps, int guided, double *median,
                     double *most) {
    static row all[MOST_ROWS];
    static int32_t prompt[MOST_ROWS][PROMPT];
    static int next;
    nmk_err e = {""};
    uint64_t first = 0, last = UINT64_MAX;
    memset(all, 0, sizeof all);
    running = rows;
    for (int i = 0; i < rows; i++) {
        row *r = &all[i];
        for (int k = 0; k < PROMPT; k++) prompt[i][k] = (int32_t)(rng() % NMK_VOCAB);
        if (i < guided) r->masks = new_masks(t, next++ % SCHEMAS, true), r->walker = nmk_walker_new(r->masks);
        r->rq = (nmk_batch_request){.prompt = prompt[i],
                                    .prompt_tokens = PROMPT,
                                    .max_tokens = steps + WARM_UP,
                                    .sampler = {.temperature = 1, .seed = rng()},
                                    .user = r,
                                    .salt = rng(),
                                    .on_token = on_token,
                                    .on_end = on_end,
                                    .guide = {r->walker, guide_mask, guide_take}};
        if (guided == ANYTHING) r->rq.guide = (nmk_batch_guide){r, any_mask, any_take};
    }
    for (int i = 0; i < rows; i++)
        if (nmk_batch_submit(b, &all[i].rq, &all[i].id, &e)) die(e.text);
    pthread_mutex_lock(&lock);
    while (running) pthread_cond_wait(&news, &lock);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < rows; i++) {
        if (all[i].at[WARM_UP] > first) first = all[i].at[WARM_UP];
        if (all[i].at[all[i].count - 1] < last) last = all[i].at[all[i].count - 1];
    }
    int count = 0;
    double gap[MOST_STEPS];
    for (int k = 1; k < all[0].count; k++)
        if (all[0].at[k - 1] >= first && all[0].at[k] <= last)
            gap[count++] = 1e-6 * (double)(all[0].at[k] - all[0].at[k - 1]);
    for (int i = 0; i < rows; i++) nmk_walker_free(all[i].walker), nmk_masks_unref(all[i].masks);
    if (!count) die("too few steps");
    double ms = mean(gap, count);
    qsort(gap, (size_t)count, sizeof *gap, by_value);
    *median = gap[count / 2], *most = gap[count - 1];
    return ms;
}

static void bench_decode(nmk_engine *g, const nmk_token_tree *t, const int *batch, int batches, int steps) {
    nmk_err e = {""};
    nmk_batch *b = NULL;
    nmk_stats s;
    nmk_engine_stats(g, &s);
    printf(
        "Decoding on %s, %d steps, prompts of %d tokens, temperature 1; ms a step\n\n| rows | of these with a schema | mean | "
        "median | longest | cost |\n|---|---|---|---|---|---|\n",
        s.device, steps, PROMPT);
    if (nmk_batch_open(&b, g, 0, &e)) die(e.text);
    for (int i = 0; i < batches; i++) {
        double median, most, free_ms = 0;
        const int guided[] = {0, 0, batch[i], ANYTHING, batch[i] / 2, 1};
        for (int k = 0; k < (batch[i] > 2 ? 6 : 4); k++) {
            double ms = decode(b, t, batch[i], steps, guided[k], &median, &most);
            if (k < 2) free_ms = k ? (ms + free_ms) / 2 : ms;
            char of[16];
            snprintf(of, sizeof of, guided[k] == ANYTHING ? "any text" : "%d", guided[k]);
            printf("| %d | %s | %.3f | %.3f | %.2f | %+.1f %% |\n", batch[i], of, ms, median, most,
                   100 * (ms / free_ms - 1));
            fflush(stdout);
        }
    }
    nmk_batch_close(b);
}

/* Where the time goes: the GPU alone, one row, masks given before their steps. */
static void bench_step(nmk_engine *g, int steps) {
    enum { AHEAD = 3 };
    static uint32_t mask[WORDS];
    nmk_err e = {""};
    nmk_column column[NMK_COLUMNS];
    memset(mask, 0xff, sizeof mask);
    printf("One row, masks given ahead: ");
    for (int masked = 0; masked < 2; masked++) {
        nmk_sampler s = {.temperature = 1, .masked = masked};
        uint64_t number, start_ns = 0, first = g->steps;
        for (int c = 0; c < NMK_COLUMNS; c++) column[c] = nmk_column_idle();
        if (nmk_engine_take_row(g, 0, steps + 64, &e)) die(e.text);
        column[0] = nmk_column_decode(&s, 0, 0, 5, 1, steps + 32);
        if (nmk_engine_set_columns(g, column, &e)) die(e.text);
        for (int i = 0; i < steps + WARM_UP; i++) {
            if (i >= AHEAD && nmk_engine_wait_step(g, first + (uint64_t)(i - AHEAD), NULL, &e)) die(e.text);
            if (i == WARM_UP) start_ns = nmk_now_ns();
            if (masked) nmk_engine_give_mask(g, 0, g->steps, mask);
            if (nmk_engine_queue_step(g, 1, &number, &e)) die(e.text);
        }
        printf("%s%.3f ms", masked ? ", with masks " : "without ", 1e-6 * (double)(nmk_now_ns() - start_ns) / steps);
        if (nmk_engine_wait_step(g, number, NULL, &e) || nmk_engine_drop_row(g, 0, &e)) die(e.text);
    }
    printf("\n\n");
}

int main(int argc, char **argv) {
    const char *checkpoint = NULL, *seed = NULL, *device = "auto", *batches = "1,8", *steps_text = "300";
    bool masks_only = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--masks-only")) {
            masks_only = true;
            continue;
        }
        const char **to = !strcmp(argv[i], "--checkpoint")       ? &checkpoint
                          : !strcmp(argv[i], "--random-weights") ? &seed
                          : !strcmp(argv[i], "--device")         ? &device
                          : !strcmp(argv[i], "--batch")          ? &batches
                          : !strcmp(argv[i], "--steps")          ? &steps_text
                                                                 : NULL;
        if (!to || !value)
            die("expected --checkpoint DIR or --random-weights SEED, --device, --batch, --steps, --masks-only");
        *to = value, i++;
    }
    int batch[8], count = 0, steps = atoi(steps_text);
    for (const char *p = batches; *p && count < 8;) {
        batch[count++] = atoi(p);
        p += strcspn(p, ",");
        p += *p == ',';
    }
    if (steps < 10 || steps > MOST_STEPS - WARM_UP) die("--steps: expected 10 to 4000");
    for (int i = 0; i < count; i++)
        if (batch[i] < 1 || batch[i] > nmk_rows || batch[i] > MOST_ROWS) die("--batch: more rows than the program has");
    const int32_t end = END;
    make_vocabulary();
    uint64_t start_ns = nmk_now_ns();
    nmk_token_tree *t = nmk_token_tree_new(text_of, NULL, NMK_VOCAB, &end, 1);
    printf("The vocabulary as a tree: %.0f ms\n\n", 1e-6 * (double)(nmk_now_ns() - start_ns));
    bench_masks(t, steps);
    if (!masks_only) {
        nmk_err e = {""};
        nmk_engine *g = NULL;
        nmk_options o = {.checkpoint = checkpoint,
                         .random_weights = seed != NULL,
                         .weights_seed = seed ? strtoull(seed, NULL, 10) : 0,
                         .device = device,
                         .max_len = 4096,
                         .kv_bytes = (uint64_t)8 << 30};
        if (nmk_engine_open(&g, &o, &e)) die(e.text);
        bench_step(g, steps);
        bench_decode(g, t, batch, count, steps);
    }
    nmk_token_tree_free(t);
    return 0;
}
