/* Decode speed: tokens/s, ms a step, bytes a step, and the fraction of the bound that the memory allows, with that
 * memory's read bandwidth measured in the same run.
 *
 * bench-decode [--checkpoint DIR | --random-weights SEED] [--batch 1,8] [--context 8192] [--steps N] [--sampling greedy,top_p,...]
 *              [--max-batch N] [--ring N] [--in-flight N] [--kernel FILE.cu] [--variant DIR]
 *
 * Steps have the columns for --max-batch rows, or for the largest batch of the list.
 *
 * Every case: fresh random tokens, random keys and values, `steps` steps queued back to back after a warm-up, positions
 * moving on as in generation.  Bytes are the algorithm's: every weight of a step once (the experts that were active,
 * counted on the device), keys and values of the visible tokens once.
 *
 * A step's time is from the end of the one before to its own, by the GPU's clock; the mean by the host's clock is of all
 * steps, from queueing the first to having seen the last one's tokens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "engine.h"
#include "samplings.h"
#include "util.h"
#include "values.h"

enum { WARM_UP = 24, MOST_STEPS = 4096, MOST_CASES = 16, BANDWIDTH_RUNS = 9 };

static const char bandwidth_source[] =
    "extern \"C\" __global__ void __launch_bounds__(32, 1) read_all(const unsigned char *from, unsigned long long bytes) {\n"
    "    extern __shared__ __align__(128) unsigned char ring[];\n"
    "    __shared__ unsigned long long full[8];\n"
    "    if (threadIdx.x) return;\n"
    "    unsigned bar = (unsigned)__cvta_generic_to_shared(full), to = (unsigned)__cvta_generic_to_shared(ring);\n"
    "    for (int i = 0; i < 8; i++) asm volatile(\"mbarrier.init.shared::cta.b64 [%0], 1;\" ::\"r\"(bar + 8 * i) : \"memory\");\n"
    "    asm volatile(\"fence.mbarrier_init.release.cluster;\" ::: \"memory\");\n"
    "    unsigned long long policy, chunks = bytes / 16384, mine = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;\n"
    "    asm volatile(\"createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\" : \"=l\"(policy));\n"
    "    for (unsigned long long i = 0; i < mine + 8; i++) {\n"
    "        unsigned s = i % 8, done = 0;\n"
    "        if (i >= 8) while (!done) asm volatile(\"{\\n.reg .pred p;\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\\n\"\n"
    "            \"selp.b32 %0, 1, 0, p;\\n}\" : \"=r\"(done) : \"r\"(bar + 8 * s), \"r\"((unsigned)(i / 8 + 1) & 1) : \"memory\");\n"
    "        if (i >= mine) continue;\n"
    "        asm volatile(\"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16384;\" ::\"r\"(bar + 8 * s) : \"memory\");\n"
    "        asm volatile(\"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], 16384, [%2], %3;\"\n"
    "            ::\"r\"(to + s * 16384), \"l\"(from + (blockIdx.x + i * gridDim.x) * 16384), \"r\"(bar + 8 * s), \"l\"(policy) : \"memory\");\n"
    "    }\n"
    "}\n";

/* Median; the 5th and 95th of 100 go to low and high. */
static double median(double *v, int count, double *low, double *high) {
    const double m = median_of(v, count);
    *low = v[count / 20], *high = v[count - 1 - count / 20];
    return m;
}

/* Bytes/s that streaming reads of the weights reach: the ceiling of this GPU, now. */
static int read_bandwidth(const nmk_engine *g, double *bytes_per_s, nmk_err *e) {
    int rc = -1;
    CUmodule module = NULL;
    CUfunction f;
    CUevent start = NULL, stop = NULL;
    nmk_jit_result kernel = {0};
    double run[BANDWIDTH_RUNS], low, high;
    const nmk_jit_request rq = {.name = "read_all.cu",
                                .source = bandwidth_source,
                                .source_bytes = sizeof bandwidth_source - 1,
                                .arch = nmk_target_arch};
    unsigned long long bytes = (unsigned long long)NMK_WEIGHTS_KIB * 1024;
    if (bytes > 16ull << 30) bytes = 16ull << 30;
    bytes = bytes / 16384 * 16384;
    CUdeviceptr from = g->params.weights;
    void *arguments[] = {&from, &bytes};
    if (nmk_jit_compile(&kernel, &rq, e)) return -1;
    CU(e, cuModuleLoadData(&module, kernel.cubin));
    CU(e, cuModuleGetFunction(&f, module, "read_all"));
    CU(e, cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8 * 16384));
    CU(e, cuEventCreate(&start, CU_EVENT_DEFAULT));
    CU(e, cuEventCreate(&stop, CU_EVENT_DEFAULT));
    for (int i = 0; i < BANDWIDTH_RUNS; i++) {
        float ms;
        CU(e, cuEventRecord(start, NULL));
        CU(e, cuLaunchKernel(f, NMK_SMS, 1, 1, 32, 1, 1, 8 * 16384, NULL, arguments, NULL));
        CU(e, cuEventRecord(stop, NULL));
        CU(e, cuEventSynchronize(stop));
        CU(e, cuEventElapsedTime(&ms, start, stop));
        run[i] = (double)bytes / ((double)ms * 1e-3);
    }
    *bytes_per_s = median(run, BANDWIDTH_RUNS, &low, &high);
    rc = 0;
out:
    if (start) nmk_cuda.cuEventDestroy(start);
    if (stop) nmk_cuda.cuEventDestroy(stop);
    if (module) nmk_cuda.cuModuleUnload(module);
    nmk_jit_result_free(&kernel);
    return rc;
}

/* Bytes of one matrix of an array, without padding. */
static double matrix_bytes(const nmk_array *a) { return 2.0 * a->rows * a->cols; }

/* Weights that every step reads, and one expert's over all its arrays.  Of an embedding that is not the head too, a step
 * reads a few rows. */
static void weight_bytes(double *always, double *expert) {
    bool untied = false;
    *always = *expert = 0;
    for (int i = 0; i < nmk_array_count; i++) untied |= !strcmp(nmk_arrays[i].name, "head");
    for (int i = 0; i < nmk_array_count; i++) {
        const nmk_array *a = &nmk_arrays[i];
        if (untied && !strcmp(a->name, "embed")) continue;
        if (a->experts)
            *expert += matrix_bytes(a);
        else
            *always += matrix_bytes(a) * a->layers;
    }
}

/* Active experts so far, summed over layers and steps: the route op counts them beside its tickets. */
static int active_experts(nmk_engine *g, double *sum, nmk_err *e) {
    const int tickets = g->generation->tickets;
    uint32_t *words = xcalloc((size_t)tickets * 2 * 32, sizeof *words);
    int rc = g->machine->calls->read(g->machine, words, g->params.tickets, sizeof *words * 64 * (size_t)tickets, e);
    *sum = 0;
    for (int l = 0; l < tickets; l++) *sum += words[l * 64 + 1];
    free(words);
    return rc;
}

static uint32_t random_word(void) {
    static uint64_t s = 88172645463325252u;
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    return (uint32_t)(s >> 32);
}

static int run_case(nmk_engine *g, int batch, int context, int steps, int sampling, double bandwidth, nmk_err *e) {
    static double ms[MOST_STEPS];
    nmk_column column[NMK_ROWS];
    double before, after, always, expert, low, high;
    int rc = -1;
    for (int n = 0; n < g->columns; n++) column[n] = nmk_column_idle();
    for (int r = 0; r < batch; r++) {
        if (nmk_engine_take_row(g, r, context + WARM_UP + steps + 1, e)) goto out;
        nmk_sampler sampler = samplings[sampling].sampler;
        const int32_t token = (int32_t)(random_word() % NMK_VOCAB);
        sampler.seed = 1ull << 32 | random_word();
        if (nmk_engine_set_adjust(g, r, &sampler, &token, 1, NULL, 0, e)) goto out;
        column[r] = nmk_column_decode(&sampler, r, r, token, context, 1 << 30);
    }
    if (nmk_engine_set_columns(g, column, e) || nmk_engine_run(g, WARM_UP, batch, NULL, NULL, e) ||
        active_experts(g, &before, e))
        goto out;
    const uint64_t start_ns = nmk_now_ns();
    if (nmk_engine_run(g, steps, batch, ms, NULL, e)) goto out;
    const double mean_ms = 1e-6 * (double)(nmk_now_ns() - start_ns) / steps;
    if (active_experts(g, &after, e)) goto out;
    weight_bytes(&always, &expert);
    const double token = 2.0 * NMK_KV_HEADS * NMK_HEAD_DIM * 2;
    const double middle = context + WARM_UP + steps / 2;
    const double seen = NMK_FULL_LAYERS * middle + NMK_SLIDING_LAYERS * (middle < NMK_WINDOW ? middle : NMK_WINDOW);
    const int moe_layers = NMK_LAYERS - NMK_DENSE_LAYERS;
    const double active = (after - before) / steps;
    const double bytes = always + expert * active + batch * seen * token;
    const double t = median(ms, steps, &low, &high);
    printf("| %d | %d | %s | %.3f (%.3f-%.3f) | %.1f | %.1f | %.2f | %.0f | %.3f | %.1f %% | %.3f |\n", batch, context,
           samplings[sampling].name, t, low, high, batch * 1e3 / t, moe_layers ? active / moe_layers : 0, bytes * 1e-9,
           bytes / (t * 1e-3) * 1e-9, bytes / bandwidth * 1e3, 100 * bytes / bandwidth * 1e3 / t, mean_ms);
    fflush(stdout);
    rc = 0;
out:
    for (int r = 0; r < batch; r++) nmk_engine_drop_row(g, r, &(nmk_err){0});
    return rc;
}

static int numbers(const char *text, int *list) {
    int n = 0;
    for (char *end; *text && n < MOST_CASES; text = *end ? end + 1 : end) list[n++] = (int)strtol(text, &end, 10);
    return n;
}

/* Names, comma after comma; -1: one is unknown. */
static int sampling_list(const char *text, int *list) {
    int n = 0;
    while (*text && n < MOST_CASES) {
        size_t length = strcspn(text, ",");
        list[n] = -1;
        for (int i = 0; i < SAMPLINGS; i++)
            if (strlen(samplings[i].name) == length && !strncmp(samplings[i].name, text, length)) list[n] = i;
        if (list[n++] < 0) return -1;
        text += length + (text[length] == ',');
    }
    return n;
}

int main(int argc, char **argv) {
    nmk_options o = {.random_weights = true, .weights_seed = 1, .steps_ahead = 32};
    int batch[MOST_CASES] = {1, 2, 4, 8}, context[MOST_CASES] = {8192}, batches = 4, contexts = 1, steps = 200,
        longest = 0, largest = 0, sampling[MOST_CASES] = {0}, kinds = 1;
    nmk_err e = {0};
    nmk_engine *g = NULL;
    double bandwidth = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *v = argv[i + 1];
        if (!strcmp(argv[i], "--checkpoint"))
            o.checkpoint = v, o.random_weights = false;
        else if (!strcmp(argv[i], "--random-weights"))
            o.weights_seed = strtoull(v, NULL, 10);
        else if (!strcmp(argv[i], "--batch"))
            batches = numbers(v, batch);
        else if (!strcmp(argv[i], "--max-batch"))
            o.max_batch = atoi(v);
        else if (!strcmp(argv[i], "--context"))
            contexts = numbers(v, context);
        else if (!strcmp(argv[i], "--steps"))
            steps = atoi(v);
        else if (!strcmp(argv[i], "--sampling"))
            kinds = sampling_list(v, sampling);
        else if (!strcmp(argv[i], "--ring"))
            o.ring_stages = atoi(v);
        else if (!strcmp(argv[i], "--kernel"))
            o.kernel = v;
        else if (!strcmp(argv[i], "--variant"))
            o.variant = v;
        else if (!strcmp(argv[i], "--in-flight"))
            o.in_flight = atoi(v);
        else
            return fprintf(stderr, "bench-decode: unknown flag %s\n", argv[i]), 2;
    }
    if (kinds < 1) {
        fprintf(stderr, "bench-decode: --sampling: a list of");
        for (int i = 0; i < SAMPLINGS; i++) fprintf(stderr, " %s", samplings[i].name);
        return fprintf(stderr, "\n"), 2;
    }
    if (steps < 1 || steps > MOST_STEPS) return fprintf(stderr, "bench-decode: --steps: 1 to %d\n", MOST_STEPS), 2;
    for (int i = 0; i < contexts; i++)
        if (context[i] > longest) longest = context[i];
    for (int i = 0; i < batches; i++)
        if (batch[i] > largest) largest = batch[i];
    if (!o.max_batch && !o.variant && largest > nmk_rows) o.max_batch = largest;
    o.max_len = longest + WARM_UP + steps + 2;
    o.device = "cuda:0";
    if (nmk_engine_open(&g, &o, &e) || nmk_engine_random_kv(g, 1, &e) || read_bandwidth(g, &bandwidth, &e))
        return fprintf(stderr, "bench-decode: %s\n", e.text), 1;
    nmk_stats s;
    nmk_engine_stats(g, &s);
    if (largest > s.rows) return fprintf(stderr, "bench-decode: --batch %d: steps have %d rows\n", largest, s.rows), 2;
    printf("%s on %s: kernel %.3f s (%s), weights %.1f s, %d registers, %d bytes of spills, %zu bytes of code\n",
           s.model, s.device, s.kernel_seconds, s.kernel_cached ? "cached" : "compiled", s.weights_seconds, s.registers,
           s.spill_bytes, s.code_bytes);
    printf("read bandwidth of this GPU in this run: %.0f GB/s; steps of %d columns, %d a case after %d\n\n",
           bandwidth * 1e-9, s.columns, steps, WARM_UP);
    printf(
        "| batch | context | sampling | ms/step median (p5-p95) | tokens/s | experts/layer | GB/step | GB/s | bound ms | of the bound | mean by the host's clock |\n|--|--|--|--|--|--|--|--|--|--|--|\n");
    int rc = 0;
    for (int c = 0; c < contexts && !rc; c++)
        for (int b = 0; b < batches && !rc; b++)
            for (int k = 0; k < kinds && !rc; k++)
                rc = run_case(g, batch[b], context[c], steps, sampling[k], bandwidth, &e);
    if (rc) fprintf(stderr, "bench-decode: %s\n", e.text);
    nmk_engine_close(g);
    return rc != 0;
}
