/* What a step draws against a plain reference, token by token: the same logits, bias and penalties, temperature, then
 * min_p, top_k and top_p by sorting in double, and the same noise.  Where two candidates or a border are closer than the
 * rounding of f32 the two may differ, so a few in a thousand are allowed.  Used on the CPU machine and on a GPU; the
 * caller says where results go. */
#ifndef NMK_TESTS_SAMPLING_H
#define NMK_TESTS_SAMPLING_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "refvm.h"
#include "rng.h"
#include "util.h"

enum { SAMPLING_PROMPT = 9 };

typedef struct {
    const char *name;
    nmk_sampler s;
    int draws; /* of the GPU; the CPU machine does fewer */
    int mask;  /* one of so many tokens may come; 0: all, without a mask */
} sampling_case;

/* Column 0 is looked at closely, and so are those that have its mask; the others have none of its tokens. */
static bool sampling_allows(const sampling_case *k, int column, int token) {
    const uint32_t turn = (uint32_t)token * 2654435761u % 65536 % (uint32_t)(k->mask ? k->mask : 1);
    return !k->mask || turn == (column % 3 == 1);
}

/* For the step that comes next. */
static void sampling_give_masks(nmk_engine *g, const sampling_case *k) {
    for (int c = 0; c < NMK_COLUMNS; c++) {
        uint32_t *mask = xcalloc((NMK_VOCAB + 31) / 32, sizeof *mask);
        for (int i = 0; i < NMK_VOCAB; i++)
            if (sampling_allows(k, c, i)) mask[i / 32] |= (uint32_t)1 << i % 32;
        nmk_engine_give_mask(g, c, g->steps, mask);
        free(mask);
    }
}

typedef struct {
    double score;
    int id;
} scored;

static int by_score(const void *a, const void *b) {
    const scored *x = a, *y = b;
    return x->score != y->score ? (x->score < y->score ? 1 : -1) : x->id - y->id;
}

/* Scores of all tokens, sorted, and how many of them are kept. */
static int reference_kept(const float *raw, const nmk_sampler *s, const int32_t *prompt, int prompt_tokens,
                          const int32_t *generated, int generated_tokens, scored *list) {
    double *logit = xmalloc(sizeof *logit * NMK_VOCAB), best = -INFINITY, sum = 0, part = 0;
    int *times = xcalloc(NMK_VOCAB, sizeof *times), kept = NMK_VOCAB;
    char *seen = xcalloc(NMK_VOCAB, 1);
    for (int i = 0; i < NMK_VOCAB; i++) logit[i] = (double)raw[i];
    for (int i = 0; i < s->bias_count; i++) logit[s->bias[i].token] += (double)s->bias[i].bias;
    for (int i = 0; i < prompt_tokens; i++) seen[prompt[i]] = 1;
    for (int i = 0; i < generated_tokens; i++) seen[generated[i]] = 1, times[generated[i]]++;
    for (int i = 0; i < NMK_VOCAB; i++) {
        const double r = s->repetition_penalty != 0 ? (double)s->repetition_penalty : 1;
        if (seen[i]) logit[i] = logit[i] > 0 ? logit[i] / r : logit[i] * r;
        logit[i] -= (double)s->frequency_penalty * times[i] + (double)s->presence_penalty * (times[i] > 0);
        list[i] = (scored){s->temperature > 0 ? logit[i] / (double)s->temperature : logit[i], i};
        best = fmax(best, list[i].score);
    }
    qsort(list, NMK_VOCAB, sizeof *list, by_score);
    if (s->temperature > 0) {
        if (s->min_p > 0)
            for (kept = 1; kept < NMK_VOCAB && list[kept].score - best >= log((double)s->min_p);) kept++;
        if (s->top_k > 0 && kept > s->top_k) kept = s->top_k;
        for (int i = 0; i < kept; i++) sum += exp(list[i].score - best);
        if (s->top_p > 0 && s->top_p < 1) {
            int n = 0;
            while (n < kept && part < (double)s->top_p * sum) part += exp(list[n++].score - best);
            kept = n;
        }
    } else {
        kept = 1;
    }
    free(logit), free(times), free(seen);
    return kept;
}

/* The prompt's positions but the last, so that one more step gives logits. */
static int sampling_feed(nmk_engine *g, int row, const int32_t *prompt, nmk_err *e) {
    nmk_column column[NMK_COLUMNS];
    for (int at = 0; at < SAMPLING_PROMPT - 1; at += NMK_COLUMNS) {
        for (int c = 0; c < NMK_COLUMNS; c++) {
            column[c] = nmk_column_idle();
            if (at + c < SAMPLING_PROMPT - 1)
                column[c] =
                    (nmk_column){.token = prompt[at + c], .pos = at + c, .base = at, .slot = row, .remaining = 1};
        }
        if (nmk_engine_step(g, column, NULL, e)) return -1;
    }
    return 0;
}

/* One case: `draws` draws, in columns that are all in the same state. */
static void sampling_run(nmk_engine *g, const sampling_case *k, int draws, const int32_t *prompt,
                         void (*say)(bool good, const char *text)) {
    enum { GENERATED = 3 };
    nmk_err e = {0};
    nmk_sampler s = k->s;
    s.masked = k->mask > 0;
    int alternatives = 0, unmasked = 0, looked_at = 0;
    for (int i = 0; i < NMK_VOCAB && alternatives < NMK_TOP_LOGPROBS; i++) alternatives += sampling_allows(k, 0, i);
    float *raw = xmalloc(sizeof *raw * NMK_VOCAB);
    scored *list = xmalloc(sizeof *list * NMK_VOCAB);
    int32_t generated[GENERATED] = {prompt[1], 7, 7}, token[NMK_COLUMNS];
    int wrong = 0, outside = 0, bad_logprobs = 0, done = 0, kept = 0, *seen = xcalloc(NMK_VOCAB, sizeof *seen);
    double worst = 0;
    char text[400];
    for (; done < draws; done += NMK_COLUMNS) {
        nmk_column column[NMK_COLUMNS];
        for (int c = 0; c < NMK_COLUMNS; c++) {
            s.seed = (uint64_t)rng() << 32 | rng();
            s.logprobs = c == 0 ? NMK_TOP_LOGPROBS + 1 : 0;
            column[c] = nmk_column_decode(&s, c, c, prompt[SAMPLING_PROMPT - 1], SAMPLING_PROMPT - 1, 2);
            if (nmk_engine_set_adjust(g, c, &s, prompt, SAMPLING_PROMPT, generated, GENERATED, &e)) goto out;
        }
        uint64_t number = g->steps;
        if (k->mask) sampling_give_masks(g, k);
        if (nmk_engine_step(g, column, token, &e)) goto out;
        if (nmk_engine_read(g, "raw_logits", raw, 0, sizeof *raw * NMK_VOCAB, &e)) goto out;
        for (int i = 0; i < NMK_VOCAB; i++) unmasked += (raw[i] == NMK_MASKED_LOGIT) == sampling_allows(k, 0, i);
        if (done == 0) {
            s.logprobs = 0;
            kept = reference_kept(raw, &s, prompt, SAMPLING_PROMPT, generated, GENERATED, list);
        }
        for (int c = 0; c < NMK_COLUMNS; c++) {
            unmasked += !sampling_allows(k, c, token[c]);
            if (k->mask && c % 3 == 1) continue;
            looked_at++;
            double best = -INFINITY;
            int id = -1, rank = 0;
            for (int i = 0; i < kept; i++) {
                double v = list[i].score;
                if (v + 20 < best) break; /* more than noise can make good */
                if (s.temperature > 0)
                    v += (double)nmk_gumbel(column[c].seed_lo, column[c].seed_hi, SAMPLING_PROMPT - 1, list[i].id);
                if (v > best) best = v, id = list[i].id;
            }
            while (rank < NMK_VOCAB && list[rank].id != token[c]) rank++;
            wrong += id != token[c];
            outside += rank >= kept && (rank == NMK_VOCAB || list[kept - 1].score - list[rank].score > 1e-4);
            if (rank < NMK_VOCAB) seen[rank]++;
        }
        nmk_logprobs l;
        nmk_sampler asked = {.logprobs = NMK_TOP_LOGPROBS + 1};
        nmk_engine_logprobs(g, number, 0, &asked, &l);
        double most = -INFINITY, sum = 0;
        for (int i = 0; i < NMK_VOCAB; i++) most = fmax(most, (double)raw[i]);
        for (int i = 0; i < NMK_VOCAB; i++) sum += exp((double)raw[i] - most);
        double error = fabs((double)raw[token[0]] - most - log(sum) - (double)l.chosen);
        for (int i = 0; i < l.count; i++) {
            error = fmax(error, fabs((double)raw[l.id[i]] - most - log(sum) - (double)l.logprob[i]));
            int above = 0;
            for (int v = 0; v < NMK_VOCAB; v++)
                above += raw[v] > raw[l.id[i]] || (raw[v] == raw[l.id[i]] && v < l.id[i]);
            bad_logprobs += above != i;
        }
        worst = fmax(worst, error), bad_logprobs += l.count != alternatives;
    }
out:;
    /* how often each of the likeliest kept tokens came, against its probability among those kept */
    double sum = 0, sigma = 0;
    for (int i = 0; i < kept; i++) sum += exp(list[i].score - list[0].score);
    for (int i = 0; i < kept && i < 50 && s.temperature > 0; i++) {
        const double p = exp(list[i].score - list[0].score) / sum, expected = p * looked_at;
        if (expected >= 5) sigma = fmax(sigma, fabs(seen[i] - expected) / sqrt(expected * (1 - p) + 1e-9));
    }
    snprintf(text, sizeof text,
             "%s: %d draws from %d tokens, %d not the reference's, %d of tokens that it cuts, largest deviation %.2f "
             "sigma, log-probabilities off by %.1e, %d not in order, %d logits that the mask missed %.100s",
             k->name, done, kept, wrong, outside, sigma, worst, bad_logprobs, unmasked, e.text);
    say(!e.text[0] && done >= draws && wrong * 200 <= done && outside * 500 <= done && sigma < 5 && worst < 1e-3 &&
            !bad_logprobs && !unmasked,
        text);
    free(raw), free(list), free(seen);
}

/* only: cases with this in their names; NULL: all. */
static void sampling_all(nmk_engine *g, int most_draws, const char *only, void (*say)(bool good, const char *text)) {
    static const nmk_bias bias[] = {{5, 4.5f}, {17, -100}, {23, 100}, {40, -0.25f}};
    static const sampling_case cases[] = {
        {"greedy", {.temperature = 0}, 64, 0},
        {"temperature", {.temperature = 0.8f}, 2048, 0},
        {"top_k 1", {.temperature = 1.5f, .top_k = 1}, 256, 0},
        {"top_k 5", {.temperature = 1, .top_k = 5}, 2048, 0},
        {"top_k 300, flat", {.temperature = 20, .top_k = 300}, 2048, 0},
        {"top_p 0.95", {.temperature = 1, .top_p = 0.95f}, 4096, 0},
        {"top_p 0.5", {.temperature = 1.3f, .top_p = 0.5f}, 2048, 0},
        {"top_p 0.9, flat", {.temperature = 50, .top_p = 0.9f}, 2048, 0},
        {"top_p next to 0", {.temperature = 1, .top_p = 1e-6f}, 256, 0},
        {"min_p 0.1", {.temperature = 1.2f, .min_p = 0.1f}, 2048, 0},
        {"min_p 1", {.temperature = 1, .min_p = 1}, 256, 0},
        {"all three", {.temperature = 2, .top_k = 40, .top_p = 0.8f, .min_p = 0.02f}, 4096, 0},
        {"top_k of the whole vocabulary", {.temperature = 1, .top_k = NMK_VOCAB, .top_p = 0.9f}, 1024, 0},
        {"bias, greedy", {.bias = bias, .bias_count = 2}, 64, 0},
        {"bias that decides", {.temperature = 1, .bias = bias, .bias_count = 4}, 256, 0},
        {"presence", {.temperature = 1, .presence_penalty = 1.5f}, 1024, 0},
        {"frequency, negative", {.temperature = 1, .frequency_penalty = -1.25f, .top_p = 0.9f}, 1024, 0},
        {"repetition", {.temperature = 0.9f, .repetition_penalty = 1.4f, .min_p = 0.05f}, 1024, 0},
        {"everything",
         {.temperature = 1.7f,
          .top_k = 100,
          .top_p = 0.9f,
          .min_p = 0.001f,
          .presence_penalty = 0.5f,
          .frequency_penalty = 0.3f,
          .repetition_penalty = 1.2f,
          .bias = bias,
          .bias_count = 2},
         4096,
         0},
        {"mask, greedy", {.temperature = 0}, 64, 3},
        {"mask", {.temperature = 0.8f}, 2048, 3},
        {"mask of few, hot", {.temperature = 20}, 1024, 500},
        {"mask of few, top_k 40", {.temperature = 1, .top_k = 40}, 1024, 500},
        {"mask, top_p 0.9", {.temperature = 1, .top_p = 0.9f}, 2048, 7},
        {"mask, min_p 0.05", {.temperature = 1.3f, .min_p = 0.05f}, 1024, 7},
        {"mask, bias and penalties",
         {.temperature = 1.2f, .top_p = 0.95f, .repetition_penalty = 1.3f, .bias = bias, .bias_count = 4},
         1024,
         2},
    };
    nmk_err e = {0};
    int32_t prompt[SAMPLING_PROMPT];
    for (int i = 0; i < SAMPLING_PROMPT; i++) prompt[i] = (int32_t)(rng() % NMK_VOCAB);
    for (int r = 0; r < NMK_COLUMNS; r++)
        if (nmk_engine_take_row(g, r, SAMPLING_PROMPT + 4, &e) || sampling_feed(g, r, prompt, &e)) goto out;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!only || strstr(cases[i].name, only))
            sampling_run(g, &cases[i], cases[i].draws < most_draws ? cases[i].draws : most_draws, prompt, say);
out:
    if (e.text[0]) say(false, e.text);
}

#endif
