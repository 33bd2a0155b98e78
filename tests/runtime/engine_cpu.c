/* The public interface on the CPU machine with the trained toy: transformers' greedy text, alone and in a ragged batch.
 * Argument: rows that the engine is opened for. */
#include <stdlib.h>

#include "nmk.h"

#include "check.h"
#include "json.h"

enum { GREEDY = 64, MOST_PROMPT = 1024 };

typedef struct {
    int32_t token[NMK_ROWS][256];
    int count[NMK_ROWS];
} answers;

static int on_token(void *user, int row, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    answers *a = user;
    if (a->count[row] < 256) a->token[row][a->count[row]++] = token;
    return 0;
}

static int ints(struct json_object *list, int32_t *out, int most) {
    int n = (int)json_object_array_length(list);
    if (n > most) n = most;
    for (int i = 0; i < n; i++) out[i] = json_object_get_int(json_object_array_get_idx(list, (size_t)i));
    return n;
}

static bool same(const answers *a, int row, const answers *b, int other) {
    return a->count[row] == b->count[other] &&
           !memcmp(a->token[row], b->token[other], sizeof(int32_t) * (size_t)a->count[row]);
}

static void test_goldens(nmk_engine *g, int rows, struct json_object *prompts) {
    static int32_t ids[NMK_ROWS][MOST_PROMPT], want[NMK_ROWS][GREEDY];
    nmk_request rq[NMK_ROWS] = {0};
    nmk_err e = {0};
    int count = (int)json_object_array_length(prompts);
    if (count > rows) count = rows;
    for (int r = 0; r < count; r++) {
        struct json_object *p = json_object_array_get_idx(prompts, (size_t)r);
        int n = ints(nmk_json_get(p, "ids"), ids[r], MOST_PROMPT);
        ints(nmk_json_get(p, "greedy64"), want[r], GREEDY);
        rq[r] = (nmk_request){.prompt = ids[r], .prompt_tokens = n, .max_tokens = GREEDY};
    }
    answers batch = {0}, alone = {0};
    int rc = nmk_engine_generate(g, rq, count, NMK_IGNORE_STOP, on_token, &batch, &e);
    check(rc == 0, "a ragged batch", "%s", e.text);
    for (int r = 0; r < count; r++) {
        int n = 0;
        while (n < GREEDY && batch.token[r][n] == want[r][n]) n++;
        char name[80];
        snprintf(name, sizeof name, "row %d (%d prompt tokens): the greedy text of transformers", r + 1,
                 rq[r].prompt_tokens);
        check(batch.count[r] == GREEDY && n == GREEDY, name, "%d of %d tokens are equal", n, GREEDY);
    }
    rc = nmk_engine_generate(g, &rq[count / 2], 1, NMK_IGNORE_STOP, on_token, &alone, &e);
    check(rc == 0 && same(&alone, 0, &batch, count / 2), "a row alone is the row in the batch", "%s", e.text);

    /* sampled: a row's seed decides, not its company */
    for (int r = 0; r < count; r++)
        rq[r].sampler.temperature = 1, rq[r].sampler.seed = 0x100000001u * (unsigned)(r + 1);
    memset(&batch, 0, sizeof batch), memset(&alone, 0, sizeof alone);
    rc = nmk_engine_generate(g, rq, count, NMK_IGNORE_STOP, on_token, &batch, &e) ||
         nmk_engine_generate(g, &rq[0], 1, NMK_IGNORE_STOP, on_token, &alone, &e);
    check(rc == 0 && same(&alone, 0, &batch, 0), "a sampled row too", "%s", e.text);
    memset(&batch, 0, sizeof batch);
    rq[0].sampler.seed++;
    rc = nmk_engine_generate(g, &rq[0], 1, NMK_IGNORE_STOP, on_token, &batch, &e);
    check(rc == 0 && !same(&alone, 0, &batch, 0), "another seed, another text", "%s", e.text);

    /* dividing logits by it gives infinities, which are all alike */
    rq[0].sampler.temperature = 1e-40f;
    memset(&alone, 0, sizeof alone);
    rc = nmk_engine_generate(g, &rq[0], 1, NMK_IGNORE_STOP, on_token, &alone, &e);
    check(rc == 0 && !memcmp(alone.token[0], want[0], sizeof want[0]), "a temperature next to 0 is greedy", "%s",
          e.text);

    rq[0].sampler.temperature = 0, rq[0].max_tokens = 200;
    memset(&alone, 0, sizeof alone);
    rc = nmk_engine_generate(g, &rq[0], 1, 0, on_token, &alone, &e);
    int32_t last = alone.count[0] ? alone.token[0][alone.count[0] - 1] : -1;
    check(rc == 0 && rq[0].finish == NMK_FINISH_STOP && rq[0].tokens == alone.count[0] && (last == 4 || last == 2),
          "an answer ends at a stop id", "finish %d after %d tokens, the last %d: %s", rq[0].finish, rq[0].tokens, last,
          e.text);
}

int main(int argc, char **argv) {
    nmk_err e = {0};
    nmk_engine *g;
    struct json_object *golden = nmk_json_read("tests/golden/nmc-toy.json", 16 << 20, &e);
    if (!golden) return puts(e.text), 2;
    nmk_options o = {.checkpoint = "examples/nmc-toy", .device = "cpu", .max_len = 1024};
    o.max_batch = argc > 1 ? atoi(argv[1]) : 0;
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "opens", "%s", e.text)) return 1;
    nmk_stats s;
    nmk_engine_stats(g, &s);
    test_goldens(g, s.rows, nmk_json_get(golden, "prompts"));
    nmk_engine_stats(g, &s);
    check(!s.on_gpu && s.stop_count == 2 && s.stop_ids[0] == 4 && s.stop_ids[1] == 2 && s.vocab == 4096 &&
              s.tokens > 0 && s.decode_seconds > 0,
          "figures", "%d stop ids, %d tokens", s.stop_count, s.tokens);
    nmk_engine_close(g);
    json_object_put(golden);
    return failures != 0;
}
