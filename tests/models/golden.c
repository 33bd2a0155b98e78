/* A tiny random model against transformers in fp32 (tests/models/make_models.py): logits, the most likely token at every
 * position, greedy texts alone and in a batch.  The whole runtime takes part: checkpoint, config.json, RoPE, pages.
 *
 * Argument: the device, cpu by default; without a GPU cuda:0 skips. */
#include <math.h>

#include "check.h"
#include "engine.h"
#include "json.h"

#define FOLDER "tests/models/" NMK_MODEL

enum { MAX_LEN = 192, PROMPTS = 5, GREEDY = 16 };

/* Activations are bf16 here, and what norms read of the residual.  So what one prompt's logits are off by is chance: of
 * tiny-llama's at 8,463 positions of random prompts half are off by 0.010, one in a hundred by more than 0.026, one in a
 * thousand by more than 0.040, whether x is rounded before or after the norm's factor.  The bound is of the root of the
 * mean square, and of one prompt twice that.  A different choice of experts at a near tie is a step, not a rounding (a
 * ten-thousandth more or less in what is added moves tiny-mixtral's from 0.025 to 0.046), and the norms of the heads are
 * made such that attention is sharp: both may be further off. */
static const double MOST_ERROR = NMK_EXPERTS ? 0.06 : NMK_QK_NORM ? 0.04 : 0.02;
/* Two logits that are closer are a tie. */
static const double TIE = NMK_EXPERTS ? 0.3 : 0.12;

typedef struct {
    int count;
    int32_t ids[MAX_LEN], greedy[GREEDY], top1[MAX_LEN];
    double logits[NMK_VOCAB], margin[MAX_LEN], greedy_margin[GREEDY];
} prompt;

static prompt prompts[PROMPTS];

/* ---- golden values ---- */

static void stop(const char *why) { printf("not ok - " FOLDER "/golden.json: %s\n", why), exit(1); }

static struct json_object *list_of(struct json_object *o, const char *key, int least, int most) {
    struct json_object *list = nmk_json_get(o, key);
    int n = json_object_is_type(list, json_type_array) ? (int)json_object_array_length(list) : -1;
    if (n < least || n > most) stop(key);
    return list;
}

static int ints(struct json_object *o, const char *key, int32_t *to, int least, int most) {
    struct json_object *list = list_of(o, key, least, most);
    int n = (int)json_object_array_length(list);
    for (int i = 0; i < n; i++) to[i] = json_object_get_int(json_object_array_get_idx(list, (size_t)i));
    return n;
}

static void numbers(struct json_object *o, const char *key, double *to, int n) {
    struct json_object *list = list_of(o, key, n, n);
    for (int i = 0; i < n; i++) to[i] = json_object_get_double(json_object_array_get_idx(list, (size_t)i));
}

static void read_prompts(void) {
    nmk_err e;
    struct json_object *golden = nmk_json_read(FOLDER "/golden.json", 16 << 20, &e);
    if (!golden) stop(e.text);
    struct json_object *list = list_of(golden, "prompts", PROMPTS, PROMPTS);
    for (int i = 0; i < PROMPTS; i++) {
        struct json_object *o = json_object_array_get_idx(list, (size_t)i);
        prompt *p = &prompts[i];
        p->count = ints(o, "ids", p->ids, 1, MAX_LEN - GREEDY);
        ints(o, "top1", p->top1, p->count, p->count);
        ints(o, "greedy", p->greedy, GREEDY, GREEDY);
        numbers(o, "margin", p->margin, p->count);
        numbers(o, "greedy_margin", p->greedy_margin, GREEDY);
        numbers(o, "logits", p->logits, NMK_VOCAB);
    }
    json_object_put(golden);
}

/* ---- forced: all logits of a prompt ---- */

/* |x - golden| / |golden|, of the deviations from the mean: what all logits share changes no probability. */
static double relative_error(const float *x, const double *golden) {
    double wrong = 0, all = 0, mean[2] = {0};
    for (int i = 0; i < NMK_VOCAB; i++) mean[0] += (double)x[i] / NMK_VOCAB, mean[1] += golden[i] / NMK_VOCAB;
    for (int i = 0; i < NMK_VOCAB; i++) {
        double a = (double)x[i] - mean[0], b = golden[i] - mean[1];
        wrong += (a - b) * (a - b), all += b * b;
    }
    return sqrt(wrong / all);
}

typedef struct {
    int positions, clear, clear_wrong, same; /* clear: of a margin that is no tie */
    double error;                            /* of the logits after the last token */
} forced;

/* Feeds a prompt to row 0, `at_once` positions a step, and looks at what each of them predicts. */
static int force(nmk_engine *g, const prompt *p, int at_once, forced *f, nmk_err *e) {
    int rc = -1;
    float logits[NMK_VOCAB];
    *f = (forced){.error = NAN};
    if (nmk_engine_take_row(g, 0, p->count, e)) return -1;
    for (int base = 0; base < p->count; base += at_once) {
        nmk_column column[NMK_COLUMNS];
        int32_t out[NMK_COLUMNS];
        for (int c = 0; c < NMK_COLUMNS; c++) {
            column[c] = nmk_column_idle();
            if (c >= at_once || base + c >= p->count) continue;
            column[c] = (nmk_column){.token = p->ids[base + c],
                                     .pos = base + c,
                                     .base = base,
                                     .flags = NMK_COLUMN_SAMPLES | NMK_COLUMN_LOGPROBS,
                                     .remaining = 1};
        }
        if (nmk_engine_poison(g, 0xff, e) || nmk_engine_step(g, column, out, e)) goto out;
        for (int c = 0; c < at_once && base + c < p->count; c++) {
            const int good = out[c] == p->top1[base + c], clear = p->margin[base + c] > TIE;
            f->positions++, f->same += good, f->clear += clear, f->clear_wrong += clear && !good;
        }
        const int last = p->count - 1 - base;
        if (last >= at_once) continue;
        if (nmk_engine_read(g, "raw_logits", logits, sizeof(float) * NMK_VOCAB_ROWS * (uint64_t)last, sizeof logits, e))
            goto out;
        f->error = relative_error(logits, p->logits);
    }
    rc = 0;
out:
    if (nmk_engine_drop_row(g, 0, rc ? NULL : e)) rc = -1;
    return rc;
}

/* Returns the error's square. */
static double test_forced(nmk_engine *g, const prompt *p, int at_once) {
    forced f = {0};
    nmk_err e = {""};
    char name[96];
    int rc = force(g, p, at_once, &f, &e);
    snprintf(name, sizeof name, "%s: logits after %d tokens, %d a step", NMK_MODEL, p->count, at_once);
    check(!rc && f.error < 2 * MOST_ERROR, name, "relative error %.4f; %s", f.error, e.text);
    printf("# relative error %.4f\n", f.error);
    snprintf(name, sizeof name, "%s: predictions at %d positions, %d a step", NMK_MODEL, p->count, at_once);
    check(!rc && f.positions == p->count && f.clear_wrong * 50 <= f.clear && f.clear > 0, name,
          "%d of %d are the same; %d of %d wrong where it is no tie; %s", f.same, f.positions, f.clear_wrong, f.clear,
          e.text);
    printf("# %d of %d predictions are the same, of %d without a tie %d are not\n", f.same, f.positions, f.clear,
           f.clear_wrong);
    return f.error * f.error;
}

static void test_all_forced(nmk_engine *g) {
    double squares = 0;
    for (int i = 0; i < PROMPTS; i++) squares += test_forced(g, &prompts[i], NMK_COLUMNS) / PROMPTS;
    check(sqrt(squares) < MOST_ERROR, NMK_MODEL ": logits of all prompts", "root mean square error %.4f",
          sqrt(squares));
    printf("# root mean square error %.4f\n", sqrt(squares));
    test_forced(g, &prompts[1], 1), test_forced(g, &prompts[3], 3);
}

/* ---- texts ---- */

typedef struct {
    int32_t token[NMK_ROWS][GREEDY];
    int count[NMK_ROWS];
} texts;

static int on_token(void *user, int row, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    texts *t = user;
    if (t->count[row] < GREEDY) t->token[row][t->count[row]++] = token;
    return 0;
}

/* The same up to a tie. */
static void check_text(const char *name, const prompt *p, const int32_t *got, int count, const char *why) {
    int n = 0;
    while (n < count && got[n] == p->greedy[n]) n++;
    check(count == GREEDY && (n == GREEDY || p->greedy_margin[n] < TIE), name,
          "token %d of %d differs, where the margin is %.3f; %s", n, count, n < GREEDY ? p->greedy_margin[n] : 0, why);
}

static void test_texts(nmk_engine *g) {
    texts batch = {0}, alone = {0};
    nmk_request rq[NMK_ROWS] = {0};
    nmk_err e = {""};
    char name[96];
    for (int r = 0; r < NMK_ROWS; r++) {
        const prompt *p = &prompts[r % PROMPTS];
        rq[r] = (nmk_request){.prompt = p->ids, .prompt_tokens = p->count, .max_tokens = GREEDY};
    }
    const int rows = nmk_rows;
    int rc = nmk_engine_generate(g, rq, rows, NMK_IGNORE_STOP, on_token, &batch, &e);
    for (int r = 0; r < rows; r++) {
        snprintf(name, sizeof name, "%s: greedy text after %d tokens, row %d of %d", NMK_MODEL, rq[r].prompt_tokens,
                 r + 1, rows);
        check_text(name, &prompts[r % PROMPTS], batch.token[r], rc ? 0 : batch.count[r], e.text);
    }
    for (int r = 0; r < PROMPTS && r < rows; r++) {
        alone.count[0] = 0;
        rc = nmk_engine_generate(g, &rq[r], 1, NMK_IGNORE_STOP, on_token, &alone, &e);
        snprintf(name, sizeof name, "%s: the same alone as in the batch, %d tokens", NMK_MODEL, rq[r].prompt_tokens);
        check(!rc && alone.count[0] == batch.count[r] &&
                  !memcmp(alone.token[0], batch.token[r], sizeof(int32_t) * (size_t)batch.count[r]),
              name, "%s", rc ? e.text : "other tokens");
    }
}

int main(int argc, char **argv) {
    const char *device = argc > 1 ? argv[1] : "cpu";
    nmk_err e = {""};
    nmk_engine *g = NULL;
    nmk_options o = {.checkpoint = FOLDER, .device = device, .max_len = MAX_LEN, .kv_bytes = 64 << 20};
    read_prompts();
    if (nmk_engine_open(&g, &o, &e)) {
        const int none = strstr(e.text, "libcuda") || strstr(e.text, "no CUDA") || strstr(e.text, "no GPU");
        printf("%s - %s against transformers: %s\n", none ? "skip" : "not ok", NMK_MODEL, e.text);
        return !none;
    }
    test_all_forced(g);
    test_texts(g);
    nmk_engine_close(g);
    return failures != 0;
}
