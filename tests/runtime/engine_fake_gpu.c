/* The engine on a GPU made up of host memory: order of uploads and steps, prompts, stops, hangs, refusals. */
#include "engine.h"

#include "check.h"
#include "fake_gpu.h"
#include "hang.h"

/* ---- the tests ---- */

static int32_t prompt[NMK_ROWS][600];
static int32_t answer[NMK_ROWS][700];
static int answers[NMK_ROWS], cancel_row = -1, cancel_after;

static int on_token(void *user, int row, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    (void)user;
    answer[row][answers[row]++] = token;
    return row == cancel_row && answers[row] == cancel_after;
}

static nmk_request request_of(int row, int prompt_tokens, int max_tokens) {
    for (int i = 0; i < prompt_tokens; i++) prompt[row][i] = 1000 + row * 100 + i % 50;
    answers[row] = 0;
    return (nmk_request){.prompt = prompt[row], .prompt_tokens = prompt_tokens, .max_tokens = max_tokens};
}

static bool counts_up(int row, int n) {
    bool good = answers[row] == n;
    for (int i = 1; i < answers[row]; i++) good &= answer[row][i] == answer[row][i - 1] + 1;
    return good;
}

static void test_refusals(void) {
    nmk_err e = {0};
    nmk_engine *g = NULL;
    nmk_options o = {.random_weights = true, .device = "cuda:0"};
    fake.major = 8;
    check_message(nmk_engine_open(&g, &o, &e), &e, "cuda:0 (Paper GPU) has compute capability 8.0", "an older GPU");
    fake.major = 10;
    check_message(nmk_engine_open(&g, &o, &e), &e, "generated for target sm_90a, 9.0", "a newer GPU");
    fake.major = 9, fake.sms = 114;
    check_message(nmk_engine_open(&g, &o, &e), &e, "has 114 SMs", "a GPU with fewer SMs");
    fake.sms = 132, fake.smem_bytes = 101376;
    check_message(nmk_engine_open(&g, &o, &e), &e, "101376 bytes of shared memory", "a GPU with less shared memory");
    fake.smem_bytes = 232448;
    o.device = "cuda:3";
    check_message(nmk_engine_open(&g, &o, &e), &e, "no GPU cuda:3: this machine has 1", "a GPU that is not there");
    o.device = "cuda:0", fake.device_count = 0;
    check_message(nmk_engine_open(&g, &o, &e), &e, "sees no GPU", "a driver without a GPU");
    fake.device_count = 1, fake.load_result = 222;
    check_message(nmk_engine_open(&g, &o, &e), &e,
                  "driver too old: it supports CUDA 12.4, the kernel was compiled by NVRTC 13.0",
                  "a driver older than the compiler");
    fake.load_result = 0;
    o.device = "gpu";
    check_message(nmk_engine_open(&g, &o, &e), &e, "device gpu: expected auto, cpu or cuda:N", "a device of no kind");
    o.device = "cuda:0x";
    check_message(nmk_engine_open(&g, &o, &e), &e, "device cuda:0x", "a device number with a tail");
    o.device = "cuda:4294967296";
    check_message(nmk_engine_open(&g, &o, &e), &e, "device cuda:4294967296: expected", "a device number beyond an int");
    check(g == NULL, "no engine after a refusal", "there is one");
}

static void test_generate(nmk_engine *g) {
    nmk_err e = {0};
    nmk_request rq[3] = {request_of(0, 1, 40), request_of(1, 30, 7), request_of(2, 500, 100)};
    seen_count = 0, most_queued_steps = 0;
    int rc = nmk_engine_generate(g, rq, 3, 0, on_token, NULL, &e);
    check(rc == 0 && rq[0].tokens == 40 && rq[1].tokens == 7 && rq[2].tokens == 100 && counts_up(0, 40) &&
              counts_up(1, 7) && counts_up(2, 100),
          "a ragged batch of three", "rc %d, %d %d %d tokens: %s", rc, rq[0].tokens, rq[1].tokens, rq[2].tokens,
          e.text);
    check(rq[0].finish == NMK_FINISH_LENGTH && rq[2].finish == NMK_FINISH_LENGTH, "that ends by length", "%d %d",
          rq[0].finish, rq[2].finish);
    check(most_queued_steps > 4 && most_queued_steps <= 8, "steps queue back to back, eight at most", "%d at once",
          most_queued_steps);
    /* what the steps saw of row 1 (29 tokens fed, then decoded from position 29) and row 2 */
    bool good = true;
    int fed[NMK_ROWS] = {0};
    for (int i = 0; i < seen_count; i++) {
        const nmk_column *c = &seen[i];
        if (c->flags & 1) continue;
        good &= c->pos == fed[c->slot]++ && c->token == prompt[c->slot][c->pos] && c->base == c->pos / 8 * 8 &&
                c->group == 0;
    }
    check(good && fed[0] == 0 && fed[1] == 29 && fed[2] == 499, "prompts are fed in order, 8 positions a step",
          "%d %d %d fed", fed[0], fed[1], fed[2]);
    check(g->kv.free_count[0] == g->kv.pages[0], "rows are given back", "%d of %d pages", g->kv.free_count[0],
          g->kv.pages[0]);

    g->stop_ids[0] = 1007, g->stop_count = 1;
    rq[0] = request_of(0, 3, 50), prompt[0][2] = 1000;
    rc = nmk_engine_generate(g, rq, 1, 0, on_token, NULL, &e);
    check(rc == 0 && rq[0].tokens == 7 && rq[0].finish == NMK_FINISH_STOP && answer[0][6] == 1007,
          "a stop id ends a row", "rc %d, %d tokens, finish %d: %s", rc, rq[0].tokens, rq[0].finish, e.text);
    rq[0] = request_of(0, 3, 50), prompt[0][2] = 1000;
    rc = nmk_engine_generate(g, rq, 1, NMK_IGNORE_STOP, on_token, NULL, &e);
    check(rc == 0 && rq[0].tokens == 50, "unless it is ignored", "rc %d, %d tokens", rc, rq[0].tokens);
    g->stop_count = 0;

    rq[0] = request_of(0, 3, 60), rq[1] = request_of(1, 3, 60);
    cancel_row = 0, cancel_after = 11;
    rc = nmk_engine_generate(g, rq, 2, 0, on_token, NULL, &e);
    cancel_row = -1;
    check(rc == 0 && rq[0].finish == NMK_FINISH_CANCEL && rq[0].tokens == 11 && rq[1].tokens == 60 && answers[0] == 11,
          "the callback ends a row", "rc %d, finish %d, %d and %d tokens", rc, rq[0].finish, rq[0].tokens,
          rq[1].tokens);

    rq[0] = request_of(0, 600, 4000);
    rc = nmk_engine_generate(g, rq, 1, 0, NULL, NULL, &e);
    check(rc == 0 && rq[0].tokens == 640 - 600 && rq[0].finish == NMK_FINISH_LENGTH,
          "an answer is cut where the row is full", "rc %d, %d tokens: %s", rc, rq[0].tokens, e.text);
}

static void test_bad_requests(nmk_engine *g) {
    nmk_err e = {0};
    nmk_request rq[9] = {request_of(0, 3, 5)};
    check_message(nmk_engine_generate(g, rq, 9, 0, NULL, NULL, &e), &e, "9 prompts at once", "too many prompts");
    rq[0].prompt_tokens = 0;
    check_message(nmk_engine_generate(g, rq, 1, 0, NULL, NULL, &e), &e, "prompt 1 is empty", "an empty prompt");
    rq[0].prompt_tokens = 640;
    check_message(nmk_engine_generate(g, rq, 1, 0, NULL, NULL, &e), &e,
                  "prompt 1 has 640 tokens: the context holds 640", "a prompt longer than the context");
    rq[0] = request_of(0, 3, 5), prompt[0][1] = NMK_VOCAB;
    check_message(nmk_engine_generate(g, rq, 1, 0, NULL, NULL, &e), &e, "is not in 0 to",
                  "a token outside the vocabulary");
    rq[0] = request_of(0, 3, 0);
    check_message(nmk_engine_generate(g, rq, 1, 0, NULL, NULL, &e), &e, "max_tokens is 0", "no tokens wanted");
    rq[0] = request_of(0, 3, 5), rq[0].sampler.temperature = -1;
    check_message(nmk_engine_generate(g, rq, 1, 0, NULL, NULL, &e), &e, "temperature -1", "a negative temperature");
}

/* Bytes of both pools that are `byte`. */
static uint64_t pool_bytes(const nmk_engine *g, uint8_t byte) {
    const uint64_t pool[2] = {g->params.kv_full, g->params.kv_sliding};
    uint64_t count = 0;
    for (int k = 0; k < 2; k++)
        for (uint64_t i = 0; i < nmk_kv_pool_bytes(&g->kv, k); i++)
            count += ((const uint8_t *)(uintptr_t)pool[k])[i] == byte;
    return count;
}

static void test_hang(nmk_engine *g) {
    nmk_err e = {0};
    nmk_request rq[1] = {request_of(0, 3, 50)};
    const uint64_t row_bytes = nmk_kv_page_bytes(&g->kv.shape, 0) * (uint64_t)nmk_kv_row_pages(&g->kv.shape, 0, 53) +
                               nmk_kv_page_bytes(&g->kv.shape, 1) * (uint64_t)nmk_kv_row_pages(&g->kv.shape, 1, 53);
    for (int k = 0; k < 2; k++) /* as if steps had written there */
        memset((void *)(uintptr_t)(k ? g->params.kv_sliding : g->params.kv_full), 0xff, nmk_kv_pool_bytes(&g->kv, k));
    fake.hang_at = steps_run + 5;
    int rc = nmk_engine_generate(g, rq, 1, 0, on_token, NULL, &e);
    check_message(rc, &e, "the kernel hung: SM 17, role compute, task 3 (layer0.combine) waited for counter 2 (",
                  "a hang fails the request and names the task");
    check(strstr(e.text, ") to reach 264, it was at") && strstr(e.text, "; 3 waits in all") &&
              rq[0].finish == NMK_FINISH_NONE,
          "and the counter", "%s", e.text);
    g->machine->calls->wait_all(g->machine, &e); /* what is queued */
    const uint64_t wiped = pool_bytes(g, 0), kept = pool_bytes(g, 0xff);
    check(wiped == row_bytes && kept == nmk_kv_pool_bytes(&g->kv, 0) + nmk_kv_pool_bytes(&g->kv, 1) - wiped,
          "and its row's pages are wiped, no others", "%llu bytes, the row had %llu", (unsigned long long)wiped,
          (unsigned long long)row_bytes);
    fake.hang_at = 0;
    rq[0] = request_of(0, 20, 30);
    rc = nmk_engine_generate(g, rq, 1, 0, on_token, NULL, &e);
    check(rc == 0 && rq[0].tokens == 30 && counts_up(0, 30), "the engine goes on after it", "rc %d, %d tokens: %s", rc,
          rq[0].tokens, e.text);
    rq[0] = request_of(0, 300, 30);
    fake.hang_at = steps_run + 20;
    rc = nmk_engine_generate(g, rq, 1, 0, on_token, NULL, &e);
    check_message(rc, &e, "the kernel hung", "a hang while a prompt is fed");
    fake.hang_at = 0;
    rq[0] = request_of(0, 300, 30);
    check(nmk_engine_generate(g, rq, 1, 0, on_token, NULL, &e) == 0, "and after that too", "%s", e.text);
    rq[0] = request_of(0, 3, 30);
    fake.hang_at = steps_run + 31, fake.silent = true;
    rc = nmk_engine_generate(g, rq, 1, 0, on_token, NULL, &e);
    check_message(rc, &e, "the kernel hung: SM 17, role help, task 0",
                  "a hang in the last step, of which only a word tells");
    check(rq[0].tokens == 29, "gives no token", "%d", rq[0].tokens);
    fake.hang_at = 0, fake.silent = false;
}

/* Which of several records tells: of the earliest step that of the earliest counter. */
static void test_hang_root(void) {
    static nmk_hang h[NMK_HANGS];
    int count = -1;
    check(!nmk_hang_root(h, &count) && count == 0, "no records, no root", "%d", count);
    const uint32_t epochs[] = {5, 511, 512, 0x7fffffff};
    for (int i = 0; i < 4; i++) {
        const uint32_t epoch = epochs[i];
        h[0] = (nmk_hang){.word = hang_word(epoch + 1, 0, 0, 4000), .counter = 1, .expected = 132};
        h[3] = (nmk_hang){.word = hang_word(epoch, 0, 0, 9), .counter = 8, .expected = 132};
        h[5] = (nmk_hang){.word = hang_word(0, 0, 0, 9), .counter = 2, .got = epoch + 1};
        h[6] = (nmk_hang){.word = hang_word(0, 0, 0, 9), .counter = 6, .got = epoch};
        h[7] = (nmk_hang){.word = hang_word(epoch, 0, 0, 17), .counter = 5, .expected = 132};
        h[NMK_HANGS - 1] = (nmk_hang){.word = hang_word(0, 0, 0, 0), .counter = NMK_HANG_HOST, .got = epoch + 2};
        const volatile nmk_hang *root = nmk_hang_root(h, &count);
        check(root == &h[7] && count == 6, "the earliest counter of the earliest step", "epoch %u: record %td of %d",
              epoch, root - h, count);
    }
}

static void test_hang_text(void) {
    char text[600];
    static int32_t lists[NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS];
    nmk_hang h = {.word = ~0u, .counter = 99999, .expected = 5};
    nmk_hang_text(&h, &nmk_built_in, lists, text, sizeof text);
    check(strstr(text, "SM 255, role help, task 4095 waited for counter 99999 (unknown) to reach 5, it was at 0"),
          "a record of nonsense is safe to read", "%s", text);
    int32_t *d = lists + (NMK_MAX_TASKS + 2) * NMK_DESC_WORDS;
    int lm_head = 0, cut = -1; /* cut: its fourth node */
    while (nmk_nodes[lm_head].opcode != NMK_OP_LM_HEAD) lm_head++;
    for (int n = 0; n < 4; n++) do
            cut++;
        while (nmk_nodes[cut].opcode != NMK_OP_CUT);
    d[NMK_WORD_OPCODE] = NMK_OP_LM_HEAD, d[NMK_WORD_NODE] = lm_head;
    h = (nmk_hang){.word = hang_word(0, 1, 1, 2)};
    nmk_hang_text(&h, &nmk_built_in, lists, text, sizeof text);
    check(strstr(text, "SM 1, role compute, task 2 (lm_head) waited for another SM"), "a word alone", "%s", text);
    d[NMK_WORD_OPCODE] = NMK_OP_CUT, d[NMK_WORD_NODE] = cut;
    nmk_hang_text(&h, &nmk_built_in, lists, text, sizeof text);
    check(strstr(text, "task 2 (cut4) waited"), "the fourth node of an op", "%s", text);
}

static void test_steps(nmk_engine *g) {
    nmk_err e = {0};
    nmk_column column[NMK_COLUMNS];
    for (int c = 0; c < NMK_COLUMNS; c++) column[c] = nmk_column_idle();
    column[2] = (nmk_column){.token = 5, .pos = 3, .base = 3, .group = 2, .flags = 1, .remaining = 100};
    int32_t out[NMK_COLUMNS], many[20][NMK_COLUMNS];
    double ms[20];
    int rc = nmk_engine_take_row(g, 0, 200, &e) || nmk_engine_step(g, column, out, &e);
    check(rc == 0 && out[2] == 6 && out[1] == -1 && in_flight_seen == nmk_in_flight[0], "a single step",
          "rc %d, %d: %s", rc, out[2], e.text);
    early_launches = 0;
    rc = nmk_engine_run(g, 20, 8, ms, many[0], &e);
    check(rc == 0 && many[0][2] == 7 && many[19][2] == 26 && ms[10] > 0 && in_flight_seen == nmk_in_flight[7],
          "steps that go on by themselves", "rc %d, %d %d: %s", rc, many[0][2], many[19][2], e.text);
    bool timed = true;
    for (int i = 0; i < 20; i++) timed &= ms[i] > 1.499 && ms[i] < 1.501;
    check(early_launches == 20 && timed, "each begins while the one before ends, and has its time", "%d do, %g ms",
          early_launches, ms[0]);
    rc = nmk_engine_step(g, column, out, &e);
    const double after_ms = g->machine->calls->step_ms(g->machine, g->steps - 1);
    check(rc == 0 && early_launches == 20 && after_ms > 1.499 && after_ms < 1.501, "but not behind a queued write",
          "%d do, %g ms: %s", early_launches, after_ms, e.text);
    nmk_engine_set_ring(g, 8, 2);
    rc = nmk_engine_step(g, NULL, out, &e);
    check(rc == 0 && in_flight_seen == 2 && g->params.ring_stages == 8, "the ring's knobs", "%d", in_flight_seen);
    nmk_engine_set_ring(g, 4, 12);
    rc = nmk_engine_step(g, column, out, &e);
    check(rc == 0 && in_flight_seen == 4, "no more in flight than the ring holds", "%d", in_flight_seen);
    nmk_engine_set_ring(g, 0, 0);
    float value[4] = {1, 2, 3, 4}, back[4] = {0};
    const char *name = nmk_buffers[0].name;
    rc = nmk_engine_poison(g, 0xff, &e) || nmk_engine_write(g, name, value, 16, sizeof value, &e) ||
         nmk_engine_read(g, name, back, 12, sizeof back, &e);
    check(rc == 0 && back[0] != back[0] && back[1] == 1 && back[3] == 3, "buffers by name, and poison", "%g %g: %s",
          (double)back[0], (double)back[1], e.text);
    check_message(nmk_engine_read(g, "nothing", back, 0, 4, &e), &e, "no buffer nothing", "a buffer that there is not");
    check_message(nmk_engine_read(g, name, back, (uint64_t)nmk_buffers[0].bytes, 4, &e), &e, "bytes: no 4 at",
                  "a read past a buffer");
    nmk_engine_drop_row(g, 0, &e);
}

int main(void) {
    nmk_err e = {0};
    nmk_engine *g;
    if (fake_install(&e)) return puts(e.text), 2;
    test_hang_root();
    test_hang_text();
    test_refusals();
    nmk_options o = {
        .random_weights = true, .device = "cuda:0", .max_len = 640, .kv_bytes = 64 << 20, .no_prefill = true};
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "opens", "%s", e.text)) return 1;
    check(pool_bytes(g, 0) == nmk_kv_pool_bytes(&g->kv, 0) + nmk_kv_pool_bytes(&g->kv, 1), "pools start zeroed",
          "they do not");
    test_generate(g);
    test_bad_requests(g);
    test_hang(g);
    test_steps(g);
    nmk_request rq[1] = {request_of(0, 3, 50)};
    fake.fail = true;
    check_message(nmk_engine_generate(g, rq, 1, 0, on_token, NULL, &e), &e, "the engine is lost",
                  "a failed GPU is said to be lost");
    fake.fail = false;
    check_message(nmk_engine_generate(g, rq, 1, 0, on_token, NULL, &e), &e, "the engine is lost", "and stays it");
    nmk_engine_close(g);
    nmk_engine_close(NULL);
    free(self);
    return failures != 0;
}
