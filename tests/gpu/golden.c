/* The trained toy on the GPU against transformers in fp32 and against the CPU machine: hidden states, teacher-forced
 * predictions, greedy texts, sampling.  Skips itself without a GPU, and for models without goldens.
 *
 * Argument: the device (cuda:0); `cpu` tries the test itself, with shorter texts and fewer draws. */
#include "gpu/helper.h"

#include "bf16.h"
#include "json.h"
#include "refvm.h"
#include "util.h"

#define NAME   "goldens of transformers (" NMK_MODEL ")"
#define GOLDEN "tests/golden/nmc-toy.json"

enum { MAX_LEN = 1024, PROMPTS = 4, TOP = 20, GREEDY = 64, LONG = 200, WINDOW = 512 };

/* Two logits that are closer are a tie: what bf16 activations change. */
static const double TIE = 0.05;

typedef struct {
    const char *name;
    int count;
    int32_t ids[MAX_LEN], greedy[GREEDY];
    struct json_object *golden;
} prompt;

static prompt prompts[PROMPTS];
static nmk_engine *device, *cpu;
static uint16_t *embedding, *norm_weights; /* [vocab][hidden], [hidden] */

/* ---- golden values ---- */

static struct json_object *member(struct json_object *o, const char *key) {
    struct json_object *value = nmk_json_get(o, key);
    if (!value) fprintf(stderr, GOLDEN ": no %s\n", key), exit(2);
    return value;
}

static struct json_object *item(struct json_object *list, int i) { return json_object_array_get_idx(list, (size_t)i); }

static double number(struct json_object *list, int i) { return json_object_get_double(item(list, i)); }

static int ints(struct json_object *list, int32_t *to, int most) {
    const int n = (int)json_object_array_length(list);
    if (n > most) fprintf(stderr, GOLDEN ": list of %d, expected at most %d\n", n, most), exit(2);
    for (int i = 0; i < n; i++) to[i] = json_object_get_int(item(list, i));
    return n;
}

/* |x - golden| / |golden| */
static double relative_error(const double *x, struct json_object *golden) {
    double wrong = 0, all = 0;
    for (int i = 0; i < NMK_HIDDEN; i++) {
        const double g = number(golden, i);
        wrong += (x[i] - g) * (x[i] - g), all += g * g;
    }
    return sqrt(wrong / all);
}

/* ---- the end of the model, in double ---- */

/* To the nearest bf16, ties to even. */
static double rounded(double v) {
    union {
        float f;
        uint32_t u;
    } x = {(float)v};
    return (double)bf16((uint16_t)((x.u + 0x7fff + (x.u >> 16 & 1)) >> 16));
}

static int read_weights(nmk_err *e) {
    embedding = xmalloc(sizeof *embedding * NMK_VOCAB * NMK_HIDDEN);
    norm_weights = xmalloc(sizeof *norm_weights * NMK_HIDDEN);
    int found = 0;
    for (int i = 0; i < nmk_array_count; i++) {
        const nmk_array *a = &nmk_arrays[i];
        const bool is_embedding = !strcmp(a->name, "embed"), is_norm = !strcmp(a->name, "norm");
        if (!is_embedding && !is_norm) continue;
        if (cpu->machine->calls->read(cpu->machine, is_norm ? norm_weights : embedding,
                                      cpu->params.weights + nmk_array_at(a, is_norm ? NMK_LAYERS : 0, 0),
                                      2 * (uint64_t)NMK_HIDDEN * (is_norm ? 1 : NMK_VOCAB), e))
            return -1;
        found++;
    }
    return found == 2 ? 0 : nmk_fail(e, "no arrays embed and norm");
}

static void final_norm(const float *x, double *y) {
    double squares = 0;
    for (int i = 0; i < NMK_HIDDEN; i++) squares += (double)x[i] * (double)x[i];
    const double scale = 1 / sqrt(squares / NMK_HIDDEN + (double)NMK_EPS);
    for (int i = 0; i < NMK_HIDDEN; i++) y[i] = (double)x[i] * scale * (double)bf16(norm_weights[i]);
}

static double logit(const double *hidden, int id) {
    double sum = 0;
    for (int i = 0; i < NMK_HIDDEN; i++)
        sum += hidden[i] * (double)bf16(embedding[(size_t)id * NMK_HIDDEN + (size_t)i]);
    return sum * (double)NMK_LOGIT_SCALE;
}

/* Every column's residual after `layers` layers, of the last step, as norms read it. */
static int read_residual(nmk_engine *g, int layers, float x[NMK_COLUMNS][NMK_HIDDEN], nmk_err *e) {
    uint16_t xb[NMK_COLUMNS][NMK_HIDDEN];
    if (nmk_engine_read(g, layers % 2 ? "xb1" : "xb0", xb, 0, sizeof xb, e)) return -1;
    for (int n = 0; n < NMK_COLUMNS; n++)
        for (int i = 0; i < NMK_HIDDEN; i++) x[n][i] = bf16(xb[n][i]);
    return 0;
}

/* ---- texts ---- */

typedef struct {
    int prompt;
    uint64_t seed;
} row;

typedef struct {
    int32_t token[NMK_ROWS][LONG];
    int count[NMK_ROWS];
} texts;

static int on_token(void *user, int r, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    texts *t = user;
    if (t->count[r] < LONG) t->token[r][t->count[r]++] = token;
    return 0;
}

/* The rows as one batch, each `tokens` long. */
static int answer(nmk_engine *g, const row *rows, int count, int tokens, float temperature, texts *t, nmk_err *e) {
    nmk_request rq[NMK_ROWS];
    memset(t, 0, sizeof *t);
    for (int r = 0; r < count; r++) {
        const prompt *p = &prompts[rows[r].prompt];
        rq[r] = (nmk_request){.prompt = p->ids,
                              .prompt_tokens = p->count,
                              .max_tokens = tokens,
                              .sampler = {.temperature = temperature, .seed = rows[r].seed}};
    }
    return nmk_engine_generate(g, rq, count, NMK_IGNORE_STOP, on_token, t, e);
}

/* By how much logit a is above logit b after prompt p and `extra` tokens, recomputed from what g computes there; the
 * final norm's result is rounded as for the LM head. */
static double gap(nmk_engine *g, const prompt *p, const int32_t *more, int extra, int a, int b) {
    nmk_err e = {0};
    int32_t ids[MAX_LEN];
    float x[NMK_COLUMNS][NMK_HIDDEN];
    double hidden[NMK_HIDDEN];
    memcpy(ids, p->ids, sizeof *ids * (size_t)p->count);
    memcpy(ids + p->count, more, sizeof *ids * (size_t)extra);
    nmk_request rq = {.prompt = ids, .prompt_tokens = p->count + extra, .max_tokens = 1};
    if (nmk_engine_generate(g, &rq, 1, NMK_IGNORE_STOP, NULL, NULL, &e) || read_residual(g, NMK_LAYERS, x, &e)) {
        printf("# %s\n", e.text);
        return INFINITY;
    }
    final_norm(x[0], hidden);
    for (int i = 0; i < NMK_HIDDEN; i++) hidden[i] = rounded(hidden[i]);
    return logit(hidden, a) - logit(hidden, b);
}

/* One case: the device's text is the other, or leaves it at a tie.  margins: transformers', or NULL for the CPU. */
static void compare_text(const char *what, const prompt *p, const int32_t *got, const int32_t *want, int tokens,
                         struct json_object *margins) {
    int same = 0;
    while (same < tokens && got[same] == want[same]) same++;
    if (same == tokens) {
        check(true, "%s, prompt %s: %d tokens equal", what, p->name, tokens);
        return;
    }
    const double here = gap(device, p, want, same, got[same], want[same]);
    const double there = gap(cpu, p, want, same, got[same], want[same]);
    const double margin = margins ? number(margins, same) : 0;
    char golden[48] = "";
    if (margins) snprintf(golden, sizeof golden, ", %.4f for transformers", margin);
    check(fabs(here) < TIE && fabs(there) < TIE && margin < TIE,
          "%s, prompt %s: token %d of %d is %d in place of %d; the logits are apart %+.4f on the device, %+.4f on the "
          "CPU machine%s; below %.2f is a tie",
          what, p->name, same + 1, tokens, got[same], want[same], here, there, golden, TIE);
}

/* The text against the CPU machine has `tokens` tokens, at least GREEDY. */
static void test_greedy(int tokens) {
    static texts batch, other, alone[PROMPTS];
    row rows[PROMPTS];
    nmk_err e = {0};
    int rc = 0;
    for (int r = 0; r < PROMPTS; r++) rows[r] = (row){.prompt = r};
    if (answer(device, rows, PROMPTS, tokens, 0, &batch, &e) || answer(cpu, rows, PROMPTS, tokens, 0, &other, &e))
        rc = -1;
    for (int r = 0; r < PROMPTS && !rc; r++) rc = answer(device, &rows[r], 1, GREEDY, 0, &alone[r], &e);
    if (rc) {
        check(false, "greedy texts: %s", e.text);
        return;
    }
    int differ = 0;
    for (int r = 0; r < PROMPTS; r++) {
        struct json_object *margins = member(prompts[r].golden, "greedy64_margin");
        compare_text("greedy in a batch against transformers", &prompts[r], batch.token[r], prompts[r].greedy, GREEDY,
                     margins);
        compare_text("greedy alone against transformers", &prompts[r], alone[r].token[0], prompts[r].greedy, GREEDY,
                     margins);
        differ += memcmp(batch.token[r], alone[r].token[0], sizeof(int32_t) * GREEDY) != 0;
    }
    check(!differ, "greedy, %d tokens: %d of %d prompts have another text alone than in a batch", GREEDY, differ,
          PROMPTS);
    for (int r = 0; r < PROMPTS; r++)
        compare_text("greedy against the CPU machine", &prompts[r], batch.token[r], other.token[r], tokens, NULL);
}

/* ---- steps ---- */

/* Columns for positions base.. of ids[0..n) in row 0; all sample. */
static void set_columns(nmk_column column[NMK_COLUMNS], const int32_t *ids, int base, int n) {
    for (int c = 0; c < NMK_COLUMNS; c++) {
        column[c] = nmk_column_idle();
        if (base + c >= n) continue;
        column[c] = column_at(0, 0, base + c);
        column[c].token = ids[base + c], column[c].base = base;
    }
}

/* ids[0..n) into row 0; leaves the columns of the last step. */
static int feed(const int32_t *ids, int n, nmk_column column[NMK_COLUMNS], nmk_err *e) {
    for (int base = 0; base < n; base += NMK_COLUMNS) {
        set_columns(column, ids, base, n);
        if (nmk_engine_step(device, column, NULL, e)) return -1;
    }
    return 0;
}

/* ---- residuals ---- */

/* One step that ends after `layer`: the lists are cut there. */
static int cut_step(const nmk_column *column, int layer, nmk_err *e) {
    const uint64_t bytes = sizeof(int32_t) * NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS;
    nmk_machine *m = device->machine;
    int32_t *cut = xmalloc(bytes);
    uint64_t step;
    memcpy(cut, device->lists, bytes);
    for (int s = 0; s < NMK_SMS; s++)
        for (int i = 0; i < NMK_MAX_TASKS; i++) {
            int32_t *d = cut + ((size_t)s * NMK_MAX_TASKS + (size_t)i) * NMK_DESC_WORDS;
            const bool front = d[NMK_WORD_OPCODE] == NMK_OP_EMBED || d[NMK_WORD_OPCODE] == NMK_OP_CLEAR_CUTS;
            const int of = d[NMK_WORD_OPCODE] ? nmk_nodes[d[NMK_WORD_NODE]].layer : -1;
            if (front || (of >= 0 && of <= layer)) continue;
            d[NMK_WORD_OPCODE] = 0;
            break;
        }
    int rc = nmk_engine_restart(device, e) || m->calls->write(m, device->params.lists, cut, bytes, e) ||
             nmk_engine_set_columns(device, column, e) || nmk_engine_poison(device, 0xff, e) ||
             nmk_engine_queue_step(device, NMK_COLUMNS, &step, e);
    if (!rc) {
        /* the step that would write tokens is cut off: not a hang */
        for (int c = 0; c < NMK_COLUMNS; c++) m->out[step % NMK_OUT_RING * NMK_COLUMNS + (uint64_t)c] = -1;
        rc = nmk_engine_wait_step(device, step, NULL, e);
    }
    nmk_err second = {0};
    if (m->calls->write(m, device->params.lists, device->lists, bytes, &second) || nmk_engine_restart(device, &second))
        rc = -1;
    if (rc && !e->text[0]) *e = second;
    free(cut);
    return rc ? -1 : 0;
}

/* The last step of the prompt again, cut after each layer. */
static void test_layers(const prompt *p) {
    nmk_err e = {0};
    nmk_column column[NMK_COLUMNS];
    const int last = (p->count - 1) % NMK_COLUMNS;
    double worst = INFINITY;
    char seen[32 * NMK_LAYERS] = "";
    if (nmk_engine_take_row(device, 0, p->count, &e) || feed(p->ids, p->count, column, &e)) goto out;
    worst = 0;
    for (int layer = 0; layer < NMK_LAYERS; layer++) {
        float x[NMK_COLUMNS][NMK_HIDDEN];
        double residual[NMK_HIDDEN];
        if (cut_step(column, layer, &e) || read_residual(device, layer + 1, x, &e)) goto out;
        for (int i = 0; i < NMK_HIDDEN; i++) residual[i] = (double)x[last][i];
        const double error = relative_error(residual, item(member(p->golden, "last_residual_after_layer"), layer));
        if (!(error <= worst)) worst = error;
        snprintf(seen + strlen(seen), sizeof seen - strlen(seen), " %.1e", error);
    }
out:
    check(!e.text[0] && worst < 1e-2, "residual after each layer, prompt %s: relative errors%s %s", p->name, seen,
          e.text);
    nmk_engine_drop_row(device, 0, &e);
}

static void test_hidden(void) {
    static texts t;
    nmk_err e = {0};
    row rows[PROMPTS];
    float x[NMK_COLUMNS][NMK_HIDDEN];
    for (int r = 0; r < PROMPTS; r++) rows[r] = (row){.prompt = r};
    if (answer(device, rows, PROMPTS, 1, 0, &t, &e) || read_residual(device, NMK_LAYERS, x, &e)) {
        check(false, "final hidden states: %s", e.text);
        return;
    }
    for (int r = 0; r < PROMPTS; r++) {
        double hidden[NMK_HIDDEN];
        final_norm(x[r], hidden);
        const double error = relative_error(hidden, member(prompts[r].golden, "last_final_hidden"));
        check(error < 1e-2, "final hidden state, prompt %s, %d tokens: relative error %.2e", prompts[r].name,
              prompts[r].count, error);
    }
}

/* ---- teacher-forced predictions ---- */

typedef struct {
    int all, same;         /* positions; those with transformers' prediction */
    int clear, clear_same; /* likewise, of positions with a margin above 0.1 */
    int apart;             /* predictions that differ between the device and the CPU machine */
    double norms;          /* largest relative difference of a final hidden state's norm */
} forced;

/* One step: positions base.. of the window. */
static int force(forced *f, struct json_object *window, const int32_t *ids, int base, int n, nmk_err *e) {
    nmk_column column[NMK_COLUMNS];
    int32_t got[NMK_COLUMNS], other[NMK_COLUMNS];
    float x[NMK_COLUMNS][NMK_HIDDEN];
    set_columns(column, ids, base, n);
    if (nmk_engine_poison(device, 0xff, e) || nmk_engine_step(device, column, got, e) ||
        nmk_engine_step(cpu, column, other, e) || read_residual(device, NMK_LAYERS, x, e))
        return -1;
    for (int c = 0; c < NMK_COLUMNS && base + c < n; c++) {
        const int want = json_object_get_int(item(member(window, "top1"), base + c)), good = got[c] == want;
        const double margin = number(member(window, "margin"), base + c);
        double hidden[NMK_HIDDEN], squares = 0;
        f->all++, f->same += good, f->apart += got[c] != other[c];
        if (margin > 0.1) {
            f->clear++, f->clear_same += good;
            if (!good)
                printf("#   position %d: %d in place of %d, margin %.3f; %d on the CPU machine\n", base + c, got[c],
                       want, margin, other[c]);
        }
        final_norm(x[c], hidden);
        for (int i = 0; i < NMK_HIDDEN; i++) squares += hidden[i] * hidden[i];
        const double error = fabs(sqrt(squares) / number(member(window, "final_hidden_norm"), base + c) - 1);
        if (!(error <= f->norms)) f->norms = error;
    }
    return 0;
}

static void test_forced(struct json_object *windows) {
    nmk_err e = {0};
    forced f = {0};
    for (int w = 0; w < (int)json_object_array_length(windows) && !e.text[0]; w++) {
        int32_t ids[WINDOW];
        const int n = ints(member(item(windows, w), "ids"), ids, WINDOW);
        if (nmk_engine_take_row(device, 0, n, &e)) break;
        if (!nmk_engine_take_row(cpu, 0, n, &e))
            for (int base = 0; base < n; base += NMK_COLUMNS)
                if (force(&f, item(windows, w), ids, base, n, &e)) break;
        nmk_err ignored;
        nmk_engine_drop_row(device, 0, &ignored), nmk_engine_drop_row(cpu, 0, &ignored);
    }
    check(!e.text[0] && f.all >= 2000 && f.same >= 0.99 * f.all,
          "teacher-forced top-1: %d of %d, %.2f %%; %d differ from the CPU machine; norms of the hidden states within "
          "%.1e %s",
          f.same, f.all, 100.0 * f.same / f.all, f.apart, f.norms, e.text);
    check(!e.text[0] && f.clear >= 2000 && f.clear_same >= 0.999 * f.clear,
          "teacher-forced top-1 at margins above 0.1: %d of %d, %.2f %%", f.clear_same, f.clear,
          100.0 * f.clear_same / f.clear);
}

/* ---- sampling ---- */

/* Same seed, same text, whatever else is in the batch. */
static void test_seeds(int tokens) {
    static texts batch, alone;
    nmk_err e = {0};
    row rows[NMK_ROWS] = {0};
    int differ = 0, repeated = 0;
    for (int r = 0; r < nmk_rows; r++)
        rows[r] = (row){.prompt = r < PROMPTS ? r : r % 2, .seed = 0x9e3779b97f4a7c15u * (uint64_t)(r + 1)};
    if (answer(device, rows, nmk_rows, tokens, 1, &batch, &e)) goto out;
    for (int r = 0; r < nmk_rows; r++) {
        const size_t bytes = sizeof(int32_t) * (size_t)tokens;
        if (answer(device, &rows[r], 1, tokens, 1, &alone, &e)) goto out;
        differ += batch.count[r] != tokens || memcmp(alone.token[0], batch.token[r], bytes) != 0;
        if (r >= PROMPTS) repeated += !memcmp(batch.token[r], batch.token[r % 2], bytes);
    }
out:
    check(!e.text[0] && !differ && repeated < nmk_rows - PROMPTS,
          "sampled, %d tokens: %d of %d rows have another text alone than in a batch, %d have that of another seed %s",
          tokens, differ, nmk_rows, repeated, e.text);
}

/* What eight columns in the same state draw with different seeds, against softmax(logits / temperature) at the last
 * position of the prompt: transformers' top logits, the rest of the sum from its hidden state. */
static void test_draws(const prompt *p, int draws, float temperature) {
    enum { OTHERS = TOP };
    nmk_err e = {0};
    nmk_column column[NMK_COLUMNS];
    double hidden[NMK_HIDDEN], sum = 0, chance[TOP + 1] = {0}, wrong = 0, worst = 0, square = 0;
    double *logits = xmalloc(sizeof *logits * NMK_VOCAB);
    int id[TOP], seen[TOP + 1] = {0}, done = 0, predicted = 0, bins = 0;
    struct json_object *lists = member(member(p->golden, "last16"), "top20");
    struct json_object *top = item(lists, (int)json_object_array_length(lists) - 1);
    for (int i = 0; i < NMK_HIDDEN; i++) hidden[i] = number(member(p->golden, "last_final_hidden"), i);
    for (int i = 0; i < NMK_VOCAB; i++) logits[i] = logit(hidden, i);
    for (int i = 0; i < TOP; i++) {
        id[i] = json_object_get_int(item(item(top, i), 0));
        const double golden = number(item(top, i), 1);
        wrong = fmax(wrong, fabs(logits[id[i]] - golden));
        logits[id[i]] = golden;
    }
    for (int i = 0; i < NMK_VOCAB; i++) sum += exp((logits[i] - logits[id[0]]) / (double)temperature);
    chance[OTHERS] = 1;
    for (int i = 0; i < TOP; i++) {
        chance[i] = exp((logits[id[i]] - logits[id[0]]) / (double)temperature) / sum;
        chance[OTHERS] -= chance[i];
    }

    if (nmk_engine_take_row(device, 0, p->count, &e) || feed(p->ids, p->count, column, &e)) goto out;
    for (; done < draws; done += NMK_COLUMNS) {
        int32_t token[NMK_COLUMNS];
        for (int c = 0; c < NMK_COLUMNS; c++) {
            column[c] = column_at(c, 0, p->count - 1);
            column[c].token = p->ids[p->count - 1], column[c].temperature = temperature;
            column[c].seed_lo = rng(), column[c].seed_hi = rng();
        }
        if (nmk_engine_step(device, column, token, &e)) goto out;
        for (int c = 0; c < NMK_COLUMNS; c++) {
            int i = 0, best = 0;
            double most = -INFINITY;
            while (i < TOP && id[i] != token[c]) i++;
            seen[i]++;
            for (int v = 0; v < NMK_VOCAB; v++) {
                double value = logits[v] / (double)temperature;
                if (value + 20 < most) continue; /* more than noise can make good */
                value += (double)nmk_gumbel(column[c].seed_lo, column[c].seed_hi, p->count - 1, v);
                if (value > most) most = value, best = v;
            }
            predicted += best == token[c];
        }
    }
    for (int i = 0; i <= TOP; i++) {
        const double expected = chance[i] * done, sigma = sqrt(expected * (1 - chance[i]));
        if (expected < 5) continue;
        bins++, worst = fmax(worst, fabs(seen[i] - expected) / sigma);
        square += (seen[i] - expected) * (seen[i] - expected) / expected;
        if (i < 4) printf("#   id %d: %d draws, %.1f expected, sigma %.1f\n", id[i], seen[i], expected, sigma);
    }
out:
    check(!e.text[0] && wrong < 1e-2 && bins >= 2 && worst < 5,
          "%d draws at temperature %g, prompt %s: largest deviation %.2f sigma of %d ids, chi square %.1f %s", done,
          (double)temperature, p->name, worst, bins, square, e.text);
    check(
        !e.text[0] && predicted >= 0.95 * done,
        "%d draws at temperature %g, prompt %s: %.2f %% are what the reference's noise gives with transformers' logits",
        done, (double)temperature, p->name, 100.0 * predicted / done);
    nmk_engine_drop_row(device, 0, &e);
    free(logits);
}

/* ---- all ---- */

static nmk_engine *open_on(const char *name) {
    nmk_err e = {0};
    nmk_engine *g = NULL;
    if (!strcmp(name, "cuda:0")) return open_gpu(NAME, MAX_LEN, 0);
    nmk_options o = test_options(name, MAX_LEN, 0);
    o.cpu_threads = 0;
    if (nmk_engine_open(&g, &o, &e)) leave(NAME, e.text, false);
    return g;
}

int main(int argc, char **argv) {
    nmk_err e = {0};
    const char *name = argc > 1 ? argv[1] : "cuda:0";
    if (strcmp(NMK_MODEL, "nmc-toy")) leave(NAME, "only nmc-toy has goldens", true);
    device = open_on(name), cpu = open_on("cpu");
    struct json_object *golden = nmk_json_read(GOLDEN, 16 << 20, &e);
    if (!golden || read_weights(&e)) leave(NAME, e.text, false);
    for (int i = 0; i < PROMPTS; i++) {
        prompt *p = &prompts[i];
        p->golden = item(member(golden, "prompts"), i);
        p->name = json_object_get_string(member(p->golden, "name"));
        p->count = ints(member(p->golden, "ids"), p->ids, MAX_LEN - LONG);
        if (ints(member(p->golden, "greedy64"), p->greedy, GREEDY) != GREEDY) leave(NAME, "greedy64 is short", false);
    }
    const bool on_gpu = device->machine->on_gpu;
    test_hidden();
    test_forced(member(golden, "teacher_forced"));
    test_greedy(on_gpu ? LONG : 80);
    test_seeds(on_gpu ? GREEDY : 16);
    test_draws(&prompts[0], on_gpu ? 4096 : 400, 1);
    test_draws(&prompts[1], on_gpu ? 4096 : 400, 2.5f);
    for (int i = 0; i < PROMPTS; i++) test_layers(&prompts[i]);
    nmk_engine_close(device), nmk_engine_close(cpu);
    json_object_put(golden);
    free(embedding), free(norm_weights);
    return failures != 0;
}
