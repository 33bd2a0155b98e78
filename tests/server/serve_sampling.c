/* What a request asks of sampling, seen by its client: nmk-serve with the toy on the CPU machine. */
#define _GNU_SOURCE /* memmem */
#include <math.h>

#include "serve_helper.h"

#define TEXT "/v1/completions"
#define ASK  "\"prompt\":\"def is_prime\",\"return_tokens_as_token_ids\":true,\"ignore_eos\":true"

enum { MOST = 128, ALTERNATIVES = 20 };

/* One answer's tokens with their log-probabilities, and the most likely ones in their order. */
typedef struct {
    int count, token[MOST];
    double logprob[MOST];
    int tops[MOST], top[MOST][ALTERNATIVES];
    double top_logprob[MOST][ALTERNATIVES];
} answer;

static int id_of(const char *token) {
    int id = -1;
    sscanf(token, "token_id:%d", &id);
    return id;
}

/* Of choices[index] of a completion; its object of alternatives begins with the chosen one. */
static answer read_answer(struct json_object *root, int index) {
    char path[64];
    answer a = {0};
    snprintf(path, sizeof path, "choices.%d.logprobs", index);
    struct json_object *l = at(root, path), *tokens = at(l, "tokens");
    if (!json_object_is_type(tokens, json_type_array)) return a;
    for (size_t i = 0; i < json_object_array_length(tokens) && i < MOST; i++, a.count++) {
        a.token[i] = id_of(json_object_get_string(json_object_array_get_idx(tokens, i)));
        a.logprob[i] = json_object_get_double(json_object_array_get_idx(at(l, "token_logprobs"), i));
        struct json_object *top = json_object_array_get_idx(at(l, "top_logprobs"), i);
        bool alternatives = top && json_object_object_length(top) > 1;
        if (!alternatives) continue;
        json_object_object_foreach(top, key, value) {
            if (a.tops[i] == ALTERNATIVES) break;
            a.top[i][a.tops[i]] = id_of(key);
            a.top_logprob[i][a.tops[i]++] = json_object_get_double(value);
        }
        /* the chosen one to its place */
        for (int k = 1; k < a.tops[i] && a.top_logprob[i][k] > a.top_logprob[i][k - 1]; k++) {
            int id = a.top[i][k];
            double p = a.top_logprob[i][k];
            a.top[i][k] = a.top[i][k - 1], a.top_logprob[i][k] = a.top_logprob[i][k - 1];
            a.top[i][k - 1] = id, a.top_logprob[i][k - 1] = p;
        }
    }
    return a;
}

/* The first answer to ASK and more. */
static answer ask(int port, const char *more) {
    char *body = xasprintf("{" ASK ",%s}", more);
    reply r = post(port, TEXT, body);
    answer a = read_answer(r.json, 0);
    if (!a.count) check(false, "an answer with logprobs", "%s: %s", more, r.body);
    reply_free(&r), free(body);
    return a;
}

static bool alike(const answer *a, const answer *b) {
    return a->count && a->count == b->count && !memcmp(a->token, b->token, (size_t)a->count * sizeof *a->token);
}

static void test_greedy(int port) {
    static const char *const ways[][2] = {
        {"top_k 1", "\"temperature\":1.5,\"top_k\":1"},
        {"top_p 0", "\"temperature\":1.5,\"top_p\":0"},
        {"next to no top_p", "\"temperature\":1.5,\"top_p\":1e-9"},
        {"min_p 1", "\"temperature\":1.5,\"min_p\":1"},
        {"next to no temperature", "\"temperature\":1e-6"},
        {"a low temperature", "\"temperature\":0.01,\"seed\":4"},
        {"what greedy does not see", "\"temperature\":0,\"top_k\":3,\"top_p\":0.2,\"min_p\":0.4"},
    };
    answer greedy = ask(port, "\"temperature\":0,\"max_tokens\":24,\"logprobs\":1");
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        char *more = xasprintf("%s,\"max_tokens\":24,\"logprobs\":0", ways[i][1]);
        answer a = ask(port, more);
        check(alike(&a, &greedy), ways[i][0], "not the greedy text");
        free(more);
    }
    answer hot = ask(port, "\"temperature\":2,\"seed\":1,\"max_tokens\":24,\"logprobs\":0");
    check(!alike(&hot, &greedy), "a high temperature", "the greedy text");
}

static void test_logprobs(int port) {
    answer a = ask(port, "\"temperature\":0,\"max_tokens\":40,\"logprobs\":20");
    bool best = a.count == 40, sums = true, order = true;
    for (int i = 0; i < a.count; i++) {
        double sum = 0;
        best &= a.tops[i] == 20 && a.token[i] == a.top[i][0] && a.logprob[i] == a.top_logprob[i][0];
        for (int k = 0; k < a.tops[i]; k++) {
            sum += exp(a.top_logprob[i][k]);
            order &= !k || a.top_logprob[i][k] <= a.top_logprob[i][k - 1];
        }
        sums &= sum > 0.02 && sum < 1.0001;
    }
    check(best, "greedy takes the most likely token", "it does not");
    check(order, "alternatives in their order", "they are not");
    check(sums, "probabilities of 20 tokens are part of 1", "they are not");

    /* They are the model's own, whatever else is asked for. */
    char *more =
        xasprintf("\"temperature\":0,\"max_tokens\":1,\"logprobs\":20,\"logit_bias\":{\"%d\":50}", a.top[0][5]);
    answer b = ask(port, more);
    bool same = b.count == 1 && b.token[0] == a.top[0][5] && fabs(b.logprob[0] - a.top_logprob[0][5]) < 1e-5;
    for (int k = 0; k < b.tops[0]; k++) same &= fabs(b.top_logprob[0][k] - a.top_logprob[0][k]) < 1e-5;
    check(same, "a bias does not show in them", "%d at %g, without %d at %g", b.token[0], b.logprob[0], a.top[0][5],
          a.top_logprob[0][5]);
    free(more);

    /* The same in a stream, in a chat, in a streamed chat: nothing lost, nothing twice. */
    static const char body[] = "\"temperature\":0.7,\"seed\":5,\"logprobs\":true,\"top_logprobs\":3,\"max_tokens\":60,"
                               "\"messages\":[{\"role\":\"user\",\"content\":\"What is 17 + 25?\"}]}";
    char *text = xasprintf("{%s", body), *streamed = xasprintf("{\"stream\":true,%s", body);
    reply whole = post(port, "/v1/chat/completions", text), stream = post(port, "/v1/chat/completions", streamed);
    struct json_object *content = at(whole.json, "choices.0.logprobs.content");
    size_t n = 0, differ = 0;
    for (const char *p = strstr(stream.body, "data: {"); p; p = strstr(p + 1, "data: {")) {
        nmk_err e;
        char *data = xasprintf("%.*s", (int)(strstr(p, "\n\n") - p - 6), p + 6);
        struct json_object *v = nmk_json_parse(data, strlen(data), &e), *part = at(v, "choices.0.logprobs.content");
        for (size_t i = 0; part && i < json_object_array_length(part); i++, n++) {
            struct json_object *one = json_object_array_get_idx(content, n);
            differ += !one || !json_object_equal(json_object_array_get_idx(part, i), one);
        }
        json_object_put(v), free(data);
    }
    check(n && (int)n == int_at(whole.json, "usage.completion_tokens") && !differ,
          "streamed and whole, a chat has the same logprobs, one a token", "%zu, %zu differ, usage %d", n, differ,
          int_at(whole.json, "usage.completion_tokens"));
    reply_free(&whole), reply_free(&stream), free(text), free(streamed);
}

static void test_cuts(int port) {
    /* At temperature 1 the log-probabilities say what each cut had to keep. */
    answer a = ask(port, "\"temperature\":1,\"seed\":2,\"top_k\":3,\"max_tokens\":100,\"logprobs\":20");
    int outside = 0, not_first = 0;
    for (int i = 0; i < a.count; i++) {
        int place = 0;
        while (place < a.tops[i] && a.top[i][place] != a.token[i]) place++;
        outside += place >= 3, not_first += place > 0;
    }
    check(a.count == 100 && !outside, "top_k 3", "%d tokens are not of the first 3", outside);
    check(not_first > 3, "and it samples", "%d of 100 are not the most likely", not_first);

    a = ask(port, "\"temperature\":1,\"seed\":3,\"top_p\":0.6,\"max_tokens\":100,\"logprobs\":20");
    outside = not_first = 0;
    for (int i = 0; i < a.count; i++) {
        double before = 0;
        int place = 0;
        for (; place < a.tops[i] && a.top[i][place] != a.token[i]; place++) before += exp(a.top_logprob[i][place]);
        outside += before > 0.6001, not_first += place > 0;
    }
    check(!outside && not_first > 3, "top_p 0.6", "%d outside, %d not the first", outside, not_first);

    a = ask(port, "\"temperature\":1,\"seed\":4,\"min_p\":0.2,\"max_tokens\":100,\"logprobs\":1");
    outside = not_first = 0;
    for (int i = 0; i < a.count; i++) {
        double best = a.tops[i] ? a.top_logprob[i][0] : a.logprob[i];
        outside += a.logprob[i] < best + log(0.2) - 1e-3, not_first += a.logprob[i] < best;
    }
    check(!outside && not_first > 3, "min_p 0.2", "%d outside, %d not the first", outside, not_first);
}

static void test_bias(int port) {
    answer greedy = ask(port, "\"temperature\":0,\"max_tokens\":1,\"logprobs\":5");
    int other = greedy.top[0][4];
    char *more = xasprintf("\"temperature\":1,\"max_tokens\":12,\"logprobs\":0,\"logit_bias\":{\"%d\":100}", other);
    answer a = ask(port, more);
    bool all = a.count == 12;
    for (int i = 0; i < a.count; i++) all &= a.token[i] == other;
    check(all, "a bias of 100 forces its token", "it does not");
    free(more);
    more =
        xasprintf("\"temperature\":0,\"max_tokens\":60,\"logprobs\":0,\"logit_bias\":{\"%d\":-100}", greedy.token[0]);
    a = ask(port, more);
    bool banned = a.count == 60;
    for (int i = 0; i < a.count; i++) banned &= a.token[i] != greedy.token[0];
    check(banned && a.token[0] == greedy.top[0][1], "one of -100 bans it, the next best comes", "%d", a.token[0]);
    free(more);

    /* Forced and punished for it: in the end another one comes. */
    more = xasprintf(
        "\"temperature\":0,\"max_tokens\":100,\"logprobs\":0,\"logit_bias\":{\"%d\":100},\"frequency_penalty\":2",
        other);
    a = ask(port, more);
    int led = 0, times = 0;
    while (led < a.count && a.token[led] == other) led++;
    for (int i = 0; i < a.count; i++) times += a.token[i] == other;
    check(led > 8 && times < 100, "frequency_penalty grows with each token", "%d at first, %d of 100", led, times);
    free(more);
    more = xasprintf(
        "\"temperature\":0,\"max_tokens\":100,\"logprobs\":0,\"logit_bias\":{\"%d\":100},\"presence_penalty\":2",
        other);
    a = ask(port, more);
    times = 0;
    for (int i = 0; i < a.count; i++) times += a.token[i] == other;
    check(times == 100, "presence_penalty does not", "%d of 100", times);
    free(more);
}

/* How many of its tokens an answer had before. */
static int repeats(const answer *a) {
    int n = 0;
    for (int i = 0; i < a->count; i++) {
        int k = 0;
        while (k < i && a->token[k] != a->token[i]) k++;
        n += k < i;
    }
    return n;
}

static void test_penalties(int port) {
    answer plain = ask(port, "\"temperature\":0,\"max_tokens\":80,\"logprobs\":0");
    answer presence = ask(port, "\"temperature\":0,\"max_tokens\":80,\"logprobs\":0,\"presence_penalty\":2");
    answer frequency = ask(port, "\"temperature\":0,\"max_tokens\":80,\"logprobs\":0,\"frequency_penalty\":2");
    answer repetition = ask(port, "\"temperature\":0,\"max_tokens\":80,\"logprobs\":0,\"repetition_penalty\":1.5");
    answer most = ask(port, "\"temperature\":0,\"max_tokens\":30,\"logprobs\":0,\"repetition_penalty\":100");
    check(repeats(&presence) < repeats(&plain), "presence_penalty 2", "%d repeats, without %d", repeats(&presence),
          repeats(&plain));
    check(repeats(&frequency) < repeats(&plain), "frequency_penalty 2", "%d repeats, without %d", repeats(&frequency),
          repeats(&plain));
    check(repeats(&repetition) < repeats(&plain), "repetition_penalty 1.5", "%d repeats, without %d",
          repeats(&repetition), repeats(&plain));
    check(most.count == 30 && !repeats(&most), "repetition_penalty 100 lets nothing come twice", "%d do",
          repeats(&most));
    answer more = ask(port, "\"temperature\":0,\"max_tokens\":80,\"logprobs\":0,\"frequency_penalty\":-2");
    check(repeats(&more) > repeats(&plain), "a negative one invites", "%d repeats, without %d", repeats(&more),
          repeats(&plain));
}

static void test_seeds(int port) {
#define HOW "\"temperature\":1,\"top_p\":0.95,\"top_k\":50,\"frequency_penalty\":0.2,\"max_tokens\":40,\"logprobs\":2"
    answer a = ask(port, HOW ",\"seed\":11"), b = ask(port, HOW ",\"seed\":11"), c = ask(port, HOW ",\"seed\":12");
    bool same = alike(&a, &b);
    for (int i = 0; i < a.count; i++) same &= a.logprob[i] == b.logprob[i];
    check(same, "one seed, one text, the same logprobs", "they differ");
    check(!alike(&a, &c), "another seed, another text", "the same");
    answer d = ask(port, HOW), f = ask(port, HOW), g = ask(port, HOW ",\"seed\":-1");
    check(!alike(&d, &f) && !alike(&f, &g), "no seed", "the same text twice");

    /* In company, and as one of several answers. */
    reply r = post(port, TEXT, "{" ASK "," HOW ",\"seed\":11,\"n\":3}");
    answer n[3];
    for (int i = 0; i < 3; i++) n[i] = read_answer(r.json, i);
    check(alike(&n[0], &a) && alike(&n[1], &c) && !alike(&n[2], &n[1]), "n answers have the seeds that follow",
          "they differ");
    reply_free(&r);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    server s = server_start((const char *const[]){"--checkpoint", "examples/nmc-toy", NULL});
    test_greedy(s.port);
    test_logprobs(s.port);
    test_cuts(s.port);
    test_bias(s.port);
    test_penalties(s.port);
    test_seeds(s.port);
    int rc = server_end(&s, SIGTERM, 5000);
    check(rc == 0, "ends well", "%d", rc);
    return failures != 0;
}
