/* The toy on the reference machine against transformers in fp32: residuals, router logits, hidden states, greedy text,
 * teacher-forced predictions, loss. */
#include "refvm.h"

#include <stdarg.h>

#include "runtime/refvm_toy.h"

enum { WINDOW = 512 };

/* Lists that end after `layer`: the step stops there. */
static void cut_lists(struct toy *t, int32_t *cut, int layer) {
    memcpy(cut, t->lists, t->list_bytes);
    for (int s = 0; s < NMK_SMS; s++) {
        int inside = 0; /* what comes before the first layer stays */
        for (int i = 0; i < NMK_MAX_TASKS; i++) {
            int32_t *d = cut + ((size_t)s * NMK_MAX_TASKS + (size_t)i) * NMK_DESC_WORDS;
            const int of = d[NMK_WORD_OPCODE] ? nmk_nodes[d[NMK_WORD_NODE]].layer : -1;
            inside |= of >= 0;
            if (inside ? of >= 0 && of <= layer : d[NMK_WORD_OPCODE]) continue;
            d[NMK_WORD_OPCODE] = 0;
            break;
        }
    }
}

/* The last step of a prompt again, cut after each layer. */
static void compare_layers(struct toy *t, json_object *prompt, const nmk_control *control, int column) {
    struct toy one = *t;
    int32_t *cut = zeroed(t->list_bytes);
    double worst = 0, worst_logits = 0;
    char seen[256] = "";
    one.control = *control, one.vm.control = &one.control, one.vm.out = one.out, one.vm.lists = cut;
    one.vm.state = NULL;
    for (int layer = 0; layer < NMK_LAYERS; layer++) {
        char key[16];
        json_object *logits;
        cut_lists(t, cut, layer);
        memset(one.vm.counters, 0, sizeof(uint32_t) * NMK_COUNTERS * NMK_COUNTER_WORDS), one.vm.epoch = 0;
        memset(one.vm.tickets, 0, TICKETS_BYTES);
        must_step(&one);
        const double e =
            relative_error(residual(&one, layer + 1) + column * NMK_HIDDEN,
                           json_object_array_get_idx(member(prompt, "last_residual_after_layer"), (size_t)layer));
        if (!(e <= worst)) worst = e;
        snprintf(seen + strlen(seen), sizeof seen - strlen(seen), " %.1e", e);
        snprintf(key, sizeof key, "%d", layer);
        if (!json_object_object_get_ex(member(prompt, "last_router_logits_by_layer"), key, &logits)) continue;
        const double r = relative_error((float *)arena_at(&one, "logits") + column * NMK_EXPERTS, logits);
        if (!(r <= worst_logits)) worst_logits = r;
    }
    result(worst < 1e-2, "residual after each layer", "relative errors%s", seen);
    result(worst_logits < 2e-2, "router logits", "largest relative error %.1e", worst_logits);
    nmk_vm_close(&one.vm);
    free(cut);
    memset(t->vm.counters, 0, sizeof(uint32_t) * NMK_COUNTERS * NMK_COUNTER_WORDS), t->vm.epoch = 0;
    memset(t->vm.tickets, 0, TICKETS_BYTES);
}

static void compare_greedy(struct toy *t, json_object *prompt, int last, int tokens) {
    int32_t want[64];
    const int n = ints(member(prompt, "greedy64"), want, 64);
    nmk_column *c = &t->control.column[last];
    int same = 0;
    for (int other = 0; other < NMK_COLUMNS; other++)
        if (other != last) t->control.column[other].pos = -1;
    /* the last prompt token once more, now to sample; its keys and values are written again */
    c->pos = tokens - 1, c->base = tokens - 1, c->group = last, c->flags = 1;
    const double begin = seconds();
    for (; same < n; same++) {
        must_step(t);
        if (t->out[last] != want[same]) break;
    }
    const double took = seconds() - begin;
    if (same == n) {
        result(1, "greedy text", "%d tokens the same, %.0f tokens/s with %d threads", n, n / took, t->vm.threads);
        return;
    }
    /* from here on the texts differ; rightly so where transformers' own margin is within rounding */
    const double margin =
        json_object_get_double(json_object_array_get_idx(member(prompt, "greedy64_margin"), (size_t)same));
    result(margin < 0.05, "greedy text", "token %d of %d differs, margin %.3f", same, n, margin);
}

static void compare_prompt(struct toy *t, json_object *prompt) {
    int32_t ids[ROW_TOKENS];
    float hidden[NMK_HIDDEN];
    const int n = ints(member(prompt, "ids"), ids, ROW_TOKENS), last = (n - 1) % NMK_COLUMNS;
    const double begin = seconds();
    printf("prompt %s, %d tokens\n", json_object_get_string(member(prompt, "name")), n);
    feed(t, 0, ids, n);
    printf("  fed at %.0f tokens/s\n", n / (seconds() - begin));
    final_norm(t, residual(t, NMK_LAYERS) + last * NMK_HIDDEN, hidden);
    const double e = relative_error(hidden, member(prompt, "last_final_hidden"));
    result(e < 1e-2, "final hidden state", "relative error %.1e", e);
    const nmk_control control = t->control;
    compare_layers(t, prompt, &control, last);
    compare_greedy(t, prompt, last, n);
}

/* Loss of `next` after the hidden state, nats. */
static double loss(struct toy *t, const float *hidden, int next) {
    static float logits[NMK_VOCAB];
    const uint16_t *e = array_at(t->vm.weights, "embed", 0);
    float top = -INFINITY;
    double sum = 0;
    for (int v = 0; v < NMK_VOCAB; v++, e += NMK_HIDDEN) {
        float a[8] = {0};
        for (int i = 0; i < NMK_HIDDEN; i += 8)
            for (int j = 0; j < 8; j++) a[j] += hidden[i + j] * bf16(e[i + j]);
        logits[v] = (float)NMK_LOGIT_SCALE * (((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])));
        if (logits[v] > top) top = logits[v];
    }
    for (int v = 0; v < NMK_VOCAB; v++) sum += exp(logits[v] - top);
    return log(sum) + top - logits[next];
}

static void compare_forced(struct toy *t, json_object *windows) {
    int all = 0, same = 0, clear = 0, clear_same = 0;
    double nats = 0, want_nats = 0, norms = 0;
    for (size_t w = 0; w < json_object_array_length(windows); w++) {
        json_object *window = json_object_array_get_idx(windows, w), *margins = member(window, "margin");
        json_object *norm = member(window, "final_hidden_norm");
        int32_t ids[WINDOW], top1[WINDOW];
        const int n = ints(member(window, "ids"), ids, WINDOW);
        ints(member(window, "top1"), top1, WINDOW);
        want_nats += json_object_get_double(member(window, "nats"));
        for (int at = 0; at < n; at += NMK_COLUMNS) {
            const int columns = n - at < NMK_COLUMNS ? n - at : NMK_COLUMNS;
            set_columns(t, 0, ids + at, at, columns);
            for (int c = 0; c < columns; c++) t->control.column[c].flags = 1;
            must_step(t);
            for (int c = 0; c < columns; c++) {
                const int pos = at + c, good = t->out[c] == top1[pos];
                float hidden[NMK_HIDDEN];
                double square = 0;
                all++, same += good;
                if (json_object_get_double(json_object_array_get_idx(margins, (size_t)pos)) > 0.1)
                    clear++, clear_same += good;
                final_norm(t, residual(t, NMK_LAYERS) + c * NMK_HIDDEN, hidden);
                for (int i = 0; i < NMK_HIDDEN; i++) square += (double)hidden[i] * hidden[i];
                const double g = json_object_get_double(json_object_array_get_idx(norm, (size_t)pos));
                norms = fmax(norms, fabs(sqrt(square) - g) / g);
                if (pos + 1 < n) nats += loss(t, hidden, ids[pos + 1]);
            }
        }
    }
    result(all >= 2000 && same >= 0.99 * all, "teacher-forced top-1",
           "%d of %d (%.2f %%); of margins over 0.1: %d of %d", same, all, 100.0 * same / all, clear_same, clear);
    const int counted = all - (int)json_object_array_length(windows);
    result(fabs(nats - want_nats) / counted < 2e-3, "teacher-forced loss", "%.5f nats a token, transformers %.5f",
           nats / counted, want_nats / counted);
    result(norms < 1e-2, "norms of all final hidden states", "largest relative difference %.1e", norms);
}

int main(void) {
    struct toy *t = toy_open();
    json_object *golden = json_object_from_file(GOLDEN), *prompts;
    if (!golden) die("cannot read " GOLDEN);
    prompts = member(golden, "prompts");
    for (size_t i = 0; i < json_object_array_length(prompts); i++)
        compare_prompt(t, json_object_array_get_idx(prompts, i));
    compare_forced(t, member(golden, "teacher_forced"));
    nmk_vm_close(&t->vm);
    return failures != 0;
}
