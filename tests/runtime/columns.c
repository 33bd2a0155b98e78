/* A batch as large as the model's steps take, on the CPU machine with the trained toy: what a row says alone it says in
 * any company, wherever its column is.  tests/runtime/columns.sh runs it for other numbers of rows (argument) too. */
#include <stdlib.h>

#include "nmk.h"

#include "check.h"

enum { TOKENS = 10, MOST_PROMPT = 40 };

typedef struct {
    int32_t token[NMK_ROWS][TOKENS];
    int count[NMK_ROWS];
} answers;

static int on_token(void *user, int row, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    answers *a = user;
    if (a->count[row] < TOKENS) a->token[row][a->count[row]++] = token;
    return 0;
}

static unsigned next(unsigned *state) { return *state = *state * 1664525u + 1013904223u; }

int main(int argc, char **argv) {
    static int32_t ids[NMK_ROWS][MOST_PROMPT];
    static answers forward, backward, alone;
    nmk_request rq[NMK_ROWS] = {0}, turned[NMK_ROWS];
    nmk_err e = {0};
    nmk_engine *g;
    unsigned state = 7;
    const int rows = argc > 1 ? atoi(argv[1]) : nmk_rows;
    const nmk_options o = {.checkpoint = "examples/nmc-toy", .device = "cpu", .max_len = 64, .max_batch = rows};
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "opens", "%s", e.text)) return 1;
    for (int r = 0; r < rows; r++) {
        const int count = 1 + (int)(next(&state) >> 16) % MOST_PROMPT;
        for (int i = 0; i < count; i++) ids[r][i] = 5 + (int32_t)(next(&state) >> 16) % 4000;
        rq[r] = (nmk_request){.prompt = ids[r], .prompt_tokens = count, .max_tokens = TOKENS};
        if (r % 3) rq[r].sampler = (nmk_sampler){.temperature = 1, .seed = next(&state), .top_p = r % 2 ? 0.9f : 0};
    }
    for (int r = 0; r < rows; r++) turned[r] = rq[rows - 1 - r];
    int rc = nmk_engine_generate(g, rq, rows, NMK_IGNORE_STOP, on_token, &forward, &e) ||
             nmk_engine_generate(g, turned, rows, NMK_IGNORE_STOP, on_token, &backward, &e);
    int same = 0, compared = 0, equal = 0;
    for (int r = 0; r < rows; r++)
        same += !memcmp(forward.token[r], backward.token[rows - 1 - r], sizeof forward.token[r]);
    char name[80];
    snprintf(name, sizeof name, "%d rows, and in the other order", rows);
    check(rc == 0 && same == rows, name, "%d are the same: %s", same, e.text);
    for (int r = 0; rc == 0 && r < rows; r += 7, compared++) {
        alone.count[0] = 0;
        rc = nmk_engine_generate(g, &rq[r], 1, NMK_IGNORE_STOP, on_token, &alone, &e);
        equal += !memcmp(alone.token[0], forward.token[r], sizeof alone.token[0]);
    }
    check(rc == 0 && compared && equal == compared, "each alone", "%d of %d are the same: %s", equal, compared, e.text);
    nmk_engine_close(g);
    return failures != 0;
}
