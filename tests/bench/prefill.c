/* Prefill speed: tokens/s of whole prompts, in chunks of one size after the other, the time of each op in the last of
 * them, and the rate of the products alone, in bf16 on random numbers, measured in the same run.
 *
 * bench-prefill [--checkpoint DIR | --random-weights SEED] [--prompt 1024,8192,32768] [--chunk 8192,1024,256] [--runs N]
 *
 * A prompt's chunks are queued back to back; its time is from the first one's queueing to the last one's end, so it has
 * what the host does in between. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "engine.h"
#include "util.h"
#include "values.h"

enum { MOST_CASES = 16, MOST_RUNS = 64, STAMPS = NMK_TRACE_STAMPS, ROUNDS = 40000, THREADS = 256, OPERAND = 32768 };

/* Behind the text of the prefill kernel, with whose primitives it multiplies: two warpgroups, each 64 rows in registers
 * times 256 tokens in shared memory, over and over. */
static const char products_source[] =
    "\nextern \"C\" __global__ void __launch_bounds__(256, 1) products(float *out, int rounds) {\n"
    "    extern __shared__ __align__(1024) u8 memory[];\n"
    "    u32 state = blockIdx.x * 256 + threadIdx.x + 1;\n"
    "    auto pair = [&]() { /* of numbers up to 2, of either sign */\n"
    "        state ^= state << 13, state ^= state >> 17, state ^= state << 5;\n"
    "        return state & 0x80ff80ffu | 0x3f003f00u;\n"
    "    };\n"
    "    for (int i = threadIdx.x; i < 8192; i += 256) ((u32 *)memory)[i] = pair();\n"
    "    fence_async_shared();\n"
    "    __syncthreads();\n"
    "    float d[128] = {}, sum = 0;\n"
    "    uint4 a[4];\n"
    "    for (int i = 0; i < 4; i++) a[i] = make_uint4(pair(), pair(), pair(), pair());\n"
    "    const u64 b = wgmma_operand(shared_address(memory), 128, 1024);\n"
    "    for (int i = 0; i < rounds; i++) {\n"
    "        wgmma_fence();\n"
    "#pragma unroll\n"
    "        for (int j = 0; j < 4; j++) wgmma(d, a[j], wgmma_ahead(b, j * 256), 1);\n"
    "        wgmma_commit();\n"
    "        wgmma_wait<1>();\n"
    "    }\n"
    "    wgmma_wait<0>(d);\n"
    "    for (int i = 0; i < 128; i++) sum += d[i];\n"
    "    out[blockIdx.x * 256 + threadIdx.x] = sum;\n"
    "}\n";
static const double PRODUCTS_FLOP = 2.0 * 4 * (2.0 * 64 * 256 * 16) * ROUNDS * NMK_SMS;

/* FLOP/s of products alone. */
static int product_rate(int runs, double *rate, nmk_err *e) {
    const char *text = nmk_prefill->kernel;
    const size_t bytes = (size_t)(nmk_prefill->kernel_end - text);
    char *source = xmalloc(bytes + sizeof products_source);
    int rc = -1;
    CUmodule module = NULL;
    CUfunction f;
    CUevent start = NULL, stop = NULL;
    CUdeviceptr out = 0;
    nmk_jit_result kernel = {0};
    double run[MOST_RUNS];
    memcpy(source, text, bytes), memcpy(source + bytes, products_source, sizeof products_source);
    const nmk_jit_request rq = {.name = "products.cu",
                                .source = source,
                                .source_bytes = bytes + sizeof products_source - 1,
                                .arch = nmk_target_arch};
    int rounds = ROUNDS;
    void *arguments[] = {&out, &rounds};
    if (nmk_jit_compile(&kernel, &rq, e)) goto out;
    CU(e, cuMemAlloc(&out, sizeof(float) * NMK_SMS * THREADS));
    CU(e, cuModuleLoadData(&module, kernel.cubin));
    CU(e, cuModuleGetFunction(&f, module, "products"));
    CU(e, cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, OPERAND));
    CU(e, cuEventCreate(&start, CU_EVENT_DEFAULT));
    CU(e, cuEventCreate(&stop, CU_EVENT_DEFAULT));
    for (int i = 0; i < runs; i++) {
        float ms;
        CU(e, cuEventRecord(start, NULL));
        CU(e, cuLaunchKernel(f, NMK_SMS, 1, 1, THREADS, 1, 1, OPERAND, NULL, arguments, NULL));
        CU(e, cuEventRecord(stop, NULL));
        CU(e, cuEventSynchronize(stop));
        CU(e, cuEventElapsedTime(&ms, start, stop));
        run[i] = PRODUCTS_FLOP / ((double)ms * 1e-3);
    }
    *rate = median_of(run, runs), rc = 0;
out:
    if (start) nmk_cuda.cuEventDestroy(start);
    if (stop) nmk_cuda.cuEventDestroy(stop);
    if (module) nmk_cuda.cuModuleUnload(module);
    if (out) nmk_cuda.cuMemFree(out);
    nmk_jit_result_free(&kernel);
    free(source);
    return rc;
}

/* What a token's matrices take, without its attention: those of all layers, of the experts a token's own. */
static double token_flop(void) {
    double flop = 0;
    for (int i = 0; i < nmk_array_count; i++) {
        const nmk_array *a = &nmk_arrays[i];
        if (!strcmp(a->name, "embed") || !strcmp(a->name, "head") || a->rows == 1) continue;
        flop += 2.0 * a->rows * a->cols * a->layers * (a->experts ? NMK_EXPERTS_PER_TOKEN : 1);
    }
    return flop;
}

/* And its attention, of a prompt: two products for each key that a token sees. */
static double attention_flop(int prompt) {
    double full = 0, window = 0;
    for (int pos = 0; pos < prompt; pos++) full += pos + 1, window += pos < NMK_WINDOW ? pos + 1 : NMK_WINDOW;
    return 4.0 * NMK_HEADS * NMK_HEAD_DIM * (full * NMK_FULL_LAYERS + window * NMK_SLIDING_LAYERS);
}

static int take(nmk_engine *g, int prompt, int chunk, nmk_err *e) {
    return nmk_kv_take(&g->kv, 0, prompt, chunk, e) || nmk_engine_send_row(g, 0, e) ? -1 : 0;
}

/* Tokens from .. end - 1 of the prompt, so many a launch; returns when the last one is over. */
static int feed(nmk_engine *g, const int32_t *token, int from, int end, int chunk, nmk_err *e) {
    uint64_t number = 0, first = g->steps;
    const uint64_t ahead = (uint64_t)g->steps_ahead;
    for (int pos = from; pos < end; pos += chunk) {
        const nmk_span span = {.count = end - pos < chunk ? end - pos : chunk, .pos = pos};
        if (nmk_engine_queue_chunk(g, &span, 1, token + pos, &number, e)) return -1;
        if (number + 1 >= first + ahead && nmk_engine_wait_step(g, number + 1 - ahead, NULL, e)) return -1;
    }
    return nmk_engine_wait_step(g, number, NULL, e);
}

/* The last chunk again, by ops: mean over SMs of the time from a task's begin to the next one's. */
static int by_op(nmk_engine *g, const int32_t *token, int prompt, int chunk, nmk_err *e) {
    const nmk_variant *v = nmk_prefill->built_in;
    const size_t words = (size_t)NMK_SMS * (size_t)v->max_tasks * STAMPS, bytes = words * sizeof(uint64_t);
    const int from = (prompt - 1) / chunk * chunk;
    uint64_t *trace = xmalloc(bytes);
    double *total = xcalloc((size_t)v->node_count, sizeof *total),
           *waited = xcalloc((size_t)v->node_count, sizeof *waited);
    double all = 0;
    int rc = -1;
    if (!g->prefill.params.trace &&
        g->machine->calls->alloc(g->machine, &g->prefill.params.trace, bytes, "the trace", e))
        goto out;
    if (g->machine->calls->fill(g->machine, g->prefill.params.trace, 0, bytes, e)) goto out;
    const uint64_t start_ns = nmk_now_ns();
    if (feed(g, token, from, prompt, chunk, e)) goto out;
    const double ms = 1e-6 * (double)(nmk_now_ns() - start_ns);
    if (g->machine->calls->read(g->machine, trace, g->prefill.params.trace, bytes, e)) goto out;
    for (int sm = 0; sm < NMK_SMS; sm++)
        for (int t = 0; t + 1 < v->max_tasks; t++) {
            const size_t at = (size_t)sm * (size_t)v->max_tasks + (size_t)t;
            const int32_t *d = g->prefill.lists + at * NMK_DESC_WORDS;
            const uint64_t *s = trace + at * STAMPS;
            if (d[0] == 0) break;
            const double task = (double)(s[STAMPS] - s[0]);
            total[d[NMK_WORD_NODE]] += task, all += task;
            if (s[1] > s[0]) waited[d[NMK_WORD_NODE]] += (double)(s[1] - s[0]);
        }
    printf(
        "\nthe last %d of %d tokens: %.2f ms while traced\n\n| op | nodes | us each | ms | share | waits |\n|--|--|--|--|--|--|\n",
        prompt - from, prompt, ms);
    for (int n = 0; n < v->node_count; n++) {
        double op = 0, waits = 0;
        int nodes = 0;
        for (int i = 0; i < v->node_count; i++) {
            if (v->nodes[i].opcode != v->nodes[n].opcode) continue;
            if (i < n) break;
            op += total[i], waits += waited[i], nodes++;
        }
        if (!nodes) continue;
        const char *name = strchr(v->nodes[n].name, '.');
        printf("| %s | %d | %.1f | %.2f | %.1f %% | %.0f %% |\n", name ? name + 1 : v->nodes[n].name, nodes,
               op / all * ms * 1e3 / nodes, op / all * ms, op / all * 100, op > 0 ? waits / op * 100 : 0);
    }
    rc = 0;
out:
    free(trace), free(total), free(waited);
    return rc;
}

static int list(int *to, const char *text) {
    int n = 0;
    for (const char *p = text; *p && n < MOST_CASES; p += strcspn(p, ","), p += *p == ',') to[n++] = atoi(p);
    return n;
}

int main(int argc, char **argv) {
    nmk_options o = {.random_weights = true, .weights_seed = 1, .device = "cuda:0"};
    int prompts[MOST_CASES], chunks[MOST_CASES], runs = 9, most = 0;
    int prompt_count = list(prompts, "1024,8192,32768"), chunk_count = list(chunks, "8192,1024,256");
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--checkpoint"))
            o.checkpoint = argv[i + 1], o.random_weights = false;
        else if (!strcmp(argv[i], "--random-weights"))
            o.weights_seed = strtoull(argv[i + 1], NULL, 10);
        else if (!strcmp(argv[i], "--prompt"))
            prompt_count = list(prompts, argv[i + 1]);
        else if (!strcmp(argv[i], "--chunk"))
            chunk_count = list(chunks, argv[i + 1]);
        else if (!strcmp(argv[i], "--runs"))
            runs = atoi(argv[i + 1]);
        else
            return fprintf(stderr, "bench-prefill: unknown flag %s\n", argv[i]), 2;
    }
    if (runs < 1 || runs > MOST_RUNS) return fprintf(stderr, "bench-prefill: --runs: 1 to %d\n", MOST_RUNS), 2;
    for (int i = 0; i < prompt_count; i++) most = prompts[i] > most ? prompts[i] : most;
    for (int i = 0; i < prompt_count; i++)
        if (prompts[i] < 1) return fprintf(stderr, "bench-prefill: --prompt: at least 1\n"), 2;
    nmk_err e = {0};
    nmk_engine *g = NULL;
    int32_t *token = NULL;
    double rate = 0;
    o.max_len = most + 1;
    if (nmk_engine_open(&g, &o, &e)) goto out;
    if (!nmk_engine_chunk_tokens(g)) {
        nmk_fail(&e, "there are no launches that take prompts");
        goto out;
    }
    for (int i = 0; i < chunk_count; i++)
        if (chunks[i] < 1 || chunks[i] > nmk_engine_chunk_tokens(g)) {
            nmk_fail(&e, "--chunk %d: 1 to %d", chunks[i], nmk_engine_chunk_tokens(g));
            goto out;
        }
    token = xmalloc(sizeof *token * (size_t)most);
    uint64_t s = 88172645463325252u;
    for (int i = 0; i < most; i++) s ^= s << 13, s ^= s >> 7, s ^= s << 17, token[i] = (int32_t)(s % NMK_VOCAB);
    if (product_rate(9, &rate, &e)) goto out;
    printf("bf16 products alone: %.0f TFLOP/s\n\n", rate * 1e-12);
    printf(
        "| prompt | chunks of | tokens/s | ms, median | least | most | TFLOP/s | of products alone |\n|--|--|--|--|--|--|--|--|\n");
    for (int i = 0; i < prompt_count; i++)
        for (int j = 0; j < chunk_count; j++) {
            double run[MOST_RUNS];
            if (j > 0 && chunks[j] >= prompts[i]) continue;
            if (take(g, prompts[i], chunks[j], &e) || feed(g, token, 0, prompts[i], chunks[j], &e)) goto out;
            for (int r = 0; r < runs; r++) {
                const uint64_t start_ns = nmk_now_ns();
                if (feed(g, token, 0, prompts[i], chunks[j], &e)) goto out;
                run[r] = 1e-6 * (double)(nmk_now_ns() - start_ns);
            }
            const double ms = median_of(run, runs);
            const double flop = token_flop() * prompts[i] + attention_flop(prompts[i]);
            printf("| %d | %d | %.0f | %.2f | %.2f | %.2f | %.0f | %.0f %% |\n", prompts[i], chunks[j],
                   prompts[i] / ms * 1e3, ms, run[0], run[runs - 1], flop / ms * 1e-9, flop / ms * 1e3 / rate * 100);
            fflush(stdout);
            if (nmk_engine_drop_row(g, 0, &e)) goto out;
        }
    for (int i = 0; i < prompt_count; i++)
        for (int j = 0; j < chunk_count; j++) {
            if (j > 0 && chunks[j] >= prompts[i]) continue;
            if (take(g, prompts[i], chunks[j], &e) || feed(g, token, 0, prompts[i], chunks[j], &e) ||
                by_op(g, token, prompts[i], chunks[j], &e) || nmk_engine_drop_row(g, 0, &e))
                goto out;
        }
out:
    if (e.text[0]) fprintf(stderr, "bench-prefill: %s\n", e.text);
    free(token);
    nmk_engine_close(g);
    return e.text[0] != 0;
}
