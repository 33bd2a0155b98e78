/* Opening an engine: what it may take of the machine's memory, what it says about itself and about its progress. */
#include "nmk.h"

#include <math.h>

#include "check.h"
#include "fake_gpu.h"
#include "generation.h"
#include "progress.h"

/* ---- memory ---- */

static int open_with(double share, const char *device, nmk_stats *stats, nmk_err *e) {
    nmk_engine *g = NULL;
    nmk_options o = {.random_weights = true, .device = device, .max_len = 4096, .memory_share = share};
    int rc = nmk_engine_open(&g, &o, e);
    if (rc == 0) nmk_engine_stats(g, stats);
    nmk_engine_close(g);
    return rc;
}

static void test_share(void) {
    nmk_err e = {0};
    nmk_stats s = {0};
    const double total = 0x1p30;
    check_message(open_with(1.5, "cuda:0", &s, &e), &e, "a memory share of 1.5: expected above 0 to 1",
                  "more than all");
    check_message(open_with(NAN, "cuda:0", &s, &e), &e, "expected above 0 to 1", "no number");
    check_message(open_with(0.02, "cuda:0", &s, &e), &e, "the weights of nmc-toy take 0.022 GiB, buffers ",
                  "a share that the weights alone exceed");
    check(strstr(e.text, "only 0.020 of 1.000 GiB may be used"), "with what may be used", "%s", e.text);
    check(open_with(0, "cuda:0", &s, &e) == 0, "the default share", "%s", e.text);
    uint64_t all_rows = s.kv_bytes;
    double fixed = (double)(s.weight_bytes + s.other_bytes);
    check_message(open_with((fixed + 1e5) / total, "cuda:0", &s, &e), &e, "MiB for keys and values are too little",
                  "a share without room for keys and values");
    check_message(open_with(1e-6, "cpu", &s, &e), &e, "may be used", "a share of the host's memory");

    /* what is left decides, not what all rows would like */
    double allowed = fixed + 12e6;
    check(open_with(allowed / total, "cuda:0", &s, &e) == 0, "a small share", "%s", e.text);
    double taken = (double)(s.weight_bytes + s.kv_bytes + s.other_bytes);
    check(taken <= allowed && taken > allowed - 2e6 && s.kv_bytes < all_rows, "is kept to, and used",
          "%.0f bytes of %.0f", taken, allowed);
    fake.free_bytes = 8 << 20;
    check(open_with(0, "cuda:0", &s, &e) == 0 && s.kv_bytes <= fake.free_bytes / 50 * 49, "never more than is free",
          "%llu bytes: %s", (unsigned long long)s.kv_bytes, e.text);
    fake.free_bytes = 256 << 20;
}

/* ---- what it says ---- */

static void test_facts(void) {
    nmk_err e = {0};
    nmk_stats s = {0};
    if (!check(open_with(0, "cuda:0", &s, &e) == 0, "opens", "%s", e.text)) return;
    check(s.sms == 132 && fabs(s.nominal_bytes_per_s - 2 * 3201e6 * 768) < 1, "the GPU's memory rate, nominal",
          "%d SMs, %g", s.sms, s.nominal_bytes_per_s);
    check(s.layers == NMK_LAYERS && s.experts == NMK_EXPERTS && s.experts_per_token == NMK_EXPERTS_PER_TOKEN,
          "the model", "%d layers, %d experts", s.layers, s.experts);
    check(s.kv_pages[0] > 0 && s.kv_pages[1] > 0 &&
              s.kv_bytes == (uint64_t)s.kv_pages[0] * NMK_KV_PAGE_BYTES_FULL +
                                (uint64_t)s.kv_pages[1] * NMK_KV_PAGE_BYTES_SLIDING,
          "pages make up the pools", "%d and %d pages", s.kv_pages[0], s.kv_pages[1]);
    const uint64_t arenas = NMK_ARENA_BYTES + (nmk_prefill ? nmk_prefill->built_in->arena_bytes : 0);
    check(s.other_bytes > arenas && s.other_bytes < arenas + (8u << 20), "the other buffers", "%llu, arenas %llu",
          (unsigned long long)s.other_bytes, (unsigned long long)arenas);
    if (nmk_prefill)
        check(s.prefill_bytes > nmk_prefill->built_in->arena_bytes &&
                  s.prefill_bytes < nmk_prefill->built_in->arena_bytes + (8u << 20),
              "what chunks of prompts need", "%llu", (unsigned long long)s.prefill_bytes);
    check(s.memory_bytes == fake.total_bytes && s.free_bytes == fake.free_bytes, "memory", "%llu",
          (unsigned long long)s.memory_bytes);
    fake.memory_khz = 0;
    check(open_with(0, "cuda:0", &s, &e) == 0 && s.nominal_bytes_per_s == 0, "a driver that does not say", "%g",
          s.nominal_bytes_per_s);
    fake.memory_khz = 3201000;
}

/* The line "all" of plan.txt, whose figures have two decimals of MB. */
static void test_step_bytes(void) {
    char line[256];
    double mb[4] = {0};
    FILE *f = fopen("build/" NMK_MODEL "/plan.txt", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "all %lf MB %lf MB %lf MB %lf MB", &mb[0], &mb[1], &mb[2], &mb[3]) == 4) break;
    if (f) fclose(f);
    for (int i = 0, rows = 1; i < 4; i++, rows *= 2) {
        double got = (double)nmk_step_bytes(rows, NMK_MAX_CONTEXT) / 1e6;
        check(fabs(got - mb[i]) < 0.006, "bytes of a step are plan.txt's", "%d rows: %.3f MB, %.2f in plan.txt", rows,
              got, mb[i]);
    }
    uint64_t one = nmk_step_bytes(1, 1) - nmk_step_bytes(1, 0);
    check(one == (uint64_t)NMK_LAYERS * NMK_KV_HEADS * NMK_HEAD_DIM * 4, "a token more, a token of every layer", "%llu",
          (unsigned long long)one);
    uint64_t far = nmk_step_bytes(1, NMK_WINDOW + 1) - nmk_step_bytes(1, NMK_WINDOW);
    check(far == (uint64_t)NMK_FULL_LAYERS * NMK_KV_HEADS * NMK_HEAD_DIM * 4, "beyond the window, of the full layers",
          "%llu", (unsigned long long)far);
}

/* ---- progress ---- */

static nmk_buf lines;

static void on_line(void *user, const char *line) {
    (void)user;
    nmk_buf_printf(&lines, "%s\n", line);
}

static void test_progress(void) {
    char text[128];
    nmk_bar_text(text, sizeof text, 0, 1 << 30, 0);
    check(!strcmp(text, "0 %, 0.0 of 1.0 GiB"), "nothing yet", "%s", text);
    nmk_bar_text(text, sizeof text, 25000000000, 100000000000, 10);
    check(!strcmp(text, "25 %, 23.3 of 93.1 GiB, 2.50 GB/s, 0:30 left"), "a quarter", "%s", text);
    nmk_bar_text(text, sizeof text, 1000000, 100000000000, 1);
    check(strstr(text, "0.00 GB/s, 1666:39 left"), "a slow one", "%s", text);
    nmk_bar_text(text, sizeof text, 1 << 30, 1 << 30, 0.5);
    check(!strcmp(text, "100 %, 1.0 of 1.0 GiB, 2.15 GB/s, 0.5 s"), "all", "%s", text);

    /* lines: what is done in a moment says nothing; a second or two later it does */
    nmk_bar bar = {.say = on_line};
    nmk_bar_show(&bar, NMK_PHASE_COMPILE, 0, 1);
    nmk_bar_show(&bar, NMK_PHASE_COMPILE, 1, 1);
    nmk_bar_show(&bar, NMK_PHASE_LOAD, 0, 1);
    nmk_bar_show(&bar, NMK_PHASE_LOAD, 1, 1);
    for (uint64_t done = 0; done <= 100; done++) nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, done, 100);
    nmk_bar_end(&bar);
    check(lines.data && !strcmp(lines.data, "kernel: compiling with NVRTC ...\nkernel: compiled in 0.0 s\n"),
          "lines of a quick start", "%s", lines.data ? lines.data : "none");
    lines.length = 0;
    bar = (nmk_bar){.say = on_line};
    nmk_bar_show(&bar, NMK_PHASE_CACHED, 1, 1);
    nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, 0, 100);
    bar.start_ns -= 2000000000, bar.shown_ns -= 2000000000;
    nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, 9, 100);
    nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, 10, 100);
    nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, 50, 100);
    bar.shown_ns -= 5000000000;
    nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, 51, 100);
    check(lines.data && !strncmp(lines.data, "kernel: compiled before, from the cache\nweights: 10 %, ", 54) &&
              strstr(lines.data, "\nweights: 51 %, ") && !strstr(lines.data, "weights: 9 %") &&
              !strstr(lines.data, "weights: 50 %"),
          "lines every 10 % and every 5 s", "%s", lines.data ? lines.data : "none");
    nmk_buf_free(&lines);

    char *drawn = NULL;
    size_t bytes = 0;
    bar = (nmk_bar){.terminal = open_memstream(&drawn, &bytes)};
    nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, 0, 100);
    bar.shown_ns -= 1000000000;
    nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, 50, 100);
    check(drawn && strstr(drawn, "\rweights [===============               ] 50 %") && drawn[bytes - 1] != '\n',
          "a bar, half full", "%s", drawn);
    nmk_bar_end(&bar);
    check(drawn[bytes - 1] == '\n', "that stopped: its line is ended", "%s", drawn);
    nmk_bar_show(&bar, NMK_PHASE_WEIGHTS, 100, 100);
    check(strstr(drawn, "[==============================] 100 %") && drawn[bytes - 1] == '\n', "a full bar", "%s",
          drawn);
    fclose(bar.terminal), free(drawn);
}

int main(void) {
    nmk_err e = {0};
    test_progress();
    test_step_bytes();
    if (!check(fake_install(&e) == 0, "a fake GPU", "%s", e.text)) return 1;
    test_share();
    test_facts();
    return failures != 0;
}
