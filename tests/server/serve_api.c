/* server/api.c over a batch that the test plays: what the engine rarely does, and any text from the model. */
#define _GNU_SOURCE /* memmem */
#include "played_batch.h"

#define CHAT  "/v1/chat/completions"
#define TEXT  "/v1/completions"
#define ASK   "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define TOOLS "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}]"
#define CALL                                                                                                   \
    "I call.<|END_THINKING|><|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": " \
    "{\"a\": [1, 2.50]}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>"

static void test_calls(void) {
    int id = submits + 1, fd = begin(CHAT, "{" TOOLS "," ASK "}", id);
    say(id, CALL);
    end(id, NMK_BATCH_STOP, NULL);
    reply r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "tool_calls") &&
              !strcmp(text_at(r.json, "choices.0.message.tool_calls.0.function.arguments"), "{\"a\": [1, 2.50]}") &&
              !strncmp(text_at(r.json, "choices.0.message.tool_calls.0.id"), "call_", 5) &&
              !strcmp(text_at(r.json, "choices.0.message.reasoning_content"), "I call."),
          "a tool call", "%s", r.body);
    reply_free(&r);

    fd = begin(CHAT, "{\"stream\":true," TOOLS "," ASK "}", ++id);
    say(id, CALL);
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    told t = told_read(&r, true);
    check(!t.wrong[0] && t.calls == 1 && !strcmp(t.arguments.data, "{\"a\": [1, 2.50]}") &&
              !strcmp(t.reasoning.data, "I call.") && !strcmp(t.ended, "tool_calls"),
          "a streamed tool call", "%s: %s", t.wrong, r.body);
    told_free(&t), reply_free(&r);

    /* Two at once, with an answer before them; a stop string acts on the answer alone, and what it held comes before the
     * calls. */
    fd = begin(CHAT, "{\"stream\":true,\"stop\":[\"b c\",\"call\"]," TOOLS "," ASK "}", ++id);
    say(id,
        "I call.<|END_THINKING|><|START_TEXT|>a b<|END_TEXT|><|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": "
        "{\"x\": \"b c\"}}, {\"tool_name\": \"f\", \"parameters\": {}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>");
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    t = told_read(&r, true);
    const char *held = strstr(r.body, "\"content\":\"b\""), *first = strstr(r.body, "tool_calls");
    check(!t.wrong[0] && t.calls == 2 && !strcmp(t.arguments.data, "{\"x\": \"b c\"} {}") &&
              !strcmp(t.text.data, "a b") && !strcmp(t.reasoning.data, "I call.") && !strcmp(t.ended, "tool_calls") &&
              held && held < first,
          "two calls behind an answer, and stop strings that are not in it", "%s: %s", t.wrong, r.body);
    told_free(&t), reply_free(&r);

    fd = begin(CHAT, "{\"stream\":true,\"parallel_tool_calls\":false," TOOLS "," ASK "}", ++id);
    say(id, "<|END_THINKING|><|START_ACTION|>[{\"tool_name\": \"f\"}, {\"tool_name\": \"g\"}]<|END_ACTION|>");
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    t = told_read(&r, true);
    check(!t.wrong[0] && t.calls == 1 && !strcmp(t.arguments.data, "{}"), "parallel_tool_calls false", "%s: %s",
          t.wrong, r.body);
    told_free(&t), reply_free(&r);

    fd = begin(CHAT, "{\"stream\":true," TOOLS "," ASK "}", ++id);
    say(id, "<|END_THINKING|><|START_ACTION|>[{\"parameters\": {\"a\": 1}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>");
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    t = told_read(&r, true);
    check(!t.wrong[0] && !t.calls && !strcmp(t.ended, "stop"), "no call, no tool_calls", "%s: %s", t.wrong, r.body);
    told_free(&t), reply_free(&r);

    fd = begin(CHAT, "{\"stream\":true," TOOLS "," ASK "}", ++id);
    say(id, "<|END_THINKING|><|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"a\": \"xy");
    end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    t = told_read(&r, true);
    check(!t.wrong[0] && t.calls == 1 && !strcmp(t.arguments.data, "{\"a\": \"xy") && !strcmp(t.ended, "length"),
          "a streamed call that is cut", "%s: %s", t.wrong, r.body);
    told_free(&t), reply_free(&r);

    fd = begin(CHAT, "{\"tool_choice\":\"none\"," TOOLS "," ASK "}", ++id);
    say(id, CALL);
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "stop") && !at(r.json, "choices.0.message.tool_calls"),
          "tool_choice none", "%s", r.body);
    reply_free(&r);

    fd = begin(CHAT, "{" TOOLS "," ASK "}", ++id);
    say(id, "I<|END_THINKING|><|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"a\": ");
    end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "length"), "a call that is cut", "%s", r.body);
    reply_free(&r);
}

static void test_stops(void) {
    /* A stop id that does not end the answer is text like any other. */
    nmk_ids ids = {0};
    nmk_err e;
    nmk_tokenizer_encode(tokenizer, " input", 6, 0, &ids, &e);
    char *body = xasprintf("{\"prompt\":\"x\",\"min_tokens\":3,\"max_tokens\":9,\"stop_token_ids\":[%d]}", ids.id[0]);
    int id = submits + 1, fd = begin(TEXT, body, id);
    const nmk_batch_request *rq = &submitted[id - 1];
    check(rq->min_tokens == 3 && rq->max_tokens == 9 && rq->stop_count == 3, "what the batch is asked for",
          "%d stop ids", rq->stop_count);
    token(id, ids.id[0]);
    say(id, " of");
    token(id, ids.id[0]);
    end(id, NMK_BATCH_STOP, NULL);
    reply r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.text"), " input of"), "a stop id before min_tokens", "%s", r.body);
    reply_free(&r);
    fd = begin(TEXT, body, ++id);
    token(id, ids.id[0]);
    end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.text"), " input"), "a stop id that max_tokens cut", "%s", r.body);
    reply_free(&r), free(body), nmk_ids_free(&ids);

    /* The row is cancelled; what it still says is not heard. */
    int before = cancels;
    fd = begin(TEXT, "{\"stream\":true,\"prompt\":\"x\",\"stop\":\"b c\"}", ++id);
    say(id, "a b c d e");
    r = reply_read(fd);
    told t = told_read(&r, false);
    check(!t.wrong[0] && !strcmp(t.text.data, "a ") && !strcmp(t.ended, "stop") && cancels == before + 1,
          "a stop string ends the row", "%s: %s, %d cancelled", t.wrong, shown(t.text.data), cancels - before);
    say(id, " f");
    end(id, NMK_BATCH_CANCEL, NULL);
    told_free(&t), reply_free(&r);
}

/* Answers of one stream are told apart by their index: each has its role, its text, one finish. */
static void test_answers(void) {
    int id = submits + 1, fd = begin(CHAT, "{\"stream\":true,\"n\":2," ASK "}", id + 1);
    const char *said[] = {"I<|END_THINKING|><|START_TEXT|>one", "You<|END_THINKING|><|START_TEXT|>two"};
    nmk_ids ids[2] = {ids_of(said[0]), ids_of(said[1])};
    for (size_t i = 0; i < ids[0].count || i < ids[1].count; i++)
        for (int k = 0; k < 2; k++)
            if (i < ids[k].count) token(id + k, ids[k].id[i]);
    end(id + 1, NMK_BATCH_STOP, NULL);
    end(id, NMK_BATCH_LENGTH, NULL);
    reply r = reply_read(fd);
    nmk_buf text[2] = {0};
    int roles[2] = {0}, ends[2] = {0}, odd = 0;
    for (const char *p = strstr(r.body, "data: {"); p; p = strstr(p + 1, "data: {")) {
        nmk_err e;
        char *data = xasprintf("%.*s", (int)(strstr(p, "\n\n") - p - 6), p + 6);
        struct json_object *v = nmk_json_parse(data, strlen(data), &e);
        int i = int_at(v, "choices.0.index");
        if (i < 0 || i > 1 || ends[i]) {
            odd++;
        } else {
            nmk_buf_puts(&text[i], text_at(v, "choices.0.delta.content"));
            roles[i] += *text_at(v, "choices.0.delta.role") != 0;
            ends[i] += *text_at(v, "choices.0.finish_reason") != 0;
        }
        json_object_put(v), free(data);
    }
    check(!odd && !strcmp(text[0].data, "one") && !strcmp(text[1].data, "two") && roles[0] == 1 && roles[1] == 1 &&
              ends[0] == 1 && ends[1] == 1 && strstr(r.body, "data: [DONE]\n\n"),
          "two answers in one stream", "%s", r.body);
    for (int k = 0; k < 2; k++) nmk_ids_free(&ids[k]), nmk_buf_free(&text[k]);
    reply_free(&r);
}

/* ---------------------------------------------------------------- sampling, logprobs, usage */

static void test_sampler(void) {
    int id = submits + 1, fd = begin(TEXT,
                                     "{\"prompt\":\"x\",\"temperature\":0.5,\"top_p\":0.25,\"top_k\":7,\"min_p\":0.125,"
                                     "\"presence_penalty\":-1,\"frequency_penalty\":1.5,\"repetition_penalty\":1.25,"
                                     "\"seed\":9,\"logit_bias\":{\"20\":-100,\"5\":2.5},\"logprobs\":3,\"n\":2}",
                                     id + 1);
    const nmk_sampler *s = &submitted[id - 1].sampler, *t = &submitted[id].sampler;
    check(s->temperature == 0.5f && s->top_p == 0.25f && s->top_k == 7 && s->min_p == 0.125f &&
              s->presence_penalty == -1 && s->frequency_penalty == 1.5f && s->repetition_penalty == 1.25f &&
              s->logprobs == 4,
          "the sampler is the request's", "it differs");
    check(s->bias_count == 2 && s->bias[0].token == 5 && s->bias[0].bias == 2.5f && s->bias[1].token == 20 &&
              s->bias[1].bias == -100,
          "so is the bias", "it differs");
    check(submitted[id - 1].exact && submitted[id].exact, "a seed's text is exact", "it need not be");
    check(s->seed == 9 && t->seed == 10 && t->top_k == 7, "each answer has a seed of its own", "%d %d", (int)s->seed,
          (int)t->seed);
    close(fd);
    fd = begin(CHAT, "{\"top_p\":1e-60,\"logprobs\":true," ASK "}", id += 2);
    s = &submitted[id - 1].sampler;
    check(s->top_k == 1 && s->temperature == 1 && s->logprobs == 1 && !s->bias_count,
          "top_p of nothing is the most likely token", "top_k %d", s->top_k);
    close(fd);
    fd = begin(CHAT, "{" ASK "}", ++id);
    s = &submitted[id - 1].sampler;
    check(s->top_k == 0 && s->top_p == 1 && s->min_p == 0 && s->logprobs == 0 && s->presence_penalty == 0 &&
              s->frequency_penalty == 0 && s->repetition_penalty == 1 && !submitted[id - 1].exact,
          "a request that asks for nothing", "it gets something");
    close(fd);
    for (int i = id - 3; i <= id; i++) end(i, NMK_BATCH_CANCEL, NULL);
}

static void test_logprobs(void) {
    static const char said[] = "I think.<|END_THINKING|><|START_TEXT|>It is \xf0\x9f\x98\x80 here.<|END_TEXT|>"
                               "<|END_OF_TURN_TOKEN|>";
    nmk_ids ids = ids_of(said);
    nmk_buf text = {0};
    int id = submits + 1, fd = begin(CHAT, "{\"logprobs\":true,\"top_logprobs\":2," ASK "}", id);
    say_likely(id, &ids, 0, ids.count);
    end(id, NMK_BATCH_STOP, NULL);
    reply r = reply_read(fd);
    bool good = likely_are(at(r.json, "choices.0.logprobs.content"), &text, 0, 2);
    check(good && !strcmp(text.data, said) && !at(r.json, "choices.0.logprobs.refusal") &&
              int_at(r.json, "usage.completion_tokens") ==
                  (int)json_object_array_length(at(r.json, "choices.0.logprobs.content")),
          "a chat's logprobs are those of all tokens, with their exact bytes", "%s", r.body);
    reply_free(&r);

    text.length = 0;
    fd = begin(CHAT, "{\"logprobs\":true,\"include_reasoning\":false," ASK "}", ++id);
    say_likely(id, &ids, 0, ids.count);
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    size_t hidden = ids.count - json_object_array_length(at(r.json, "choices.0.logprobs.content"));
    good = likely_are(at(r.json, "choices.0.logprobs.content"), &text, (int)hidden, 0);
    check(good && hidden && !strcmp(text.data, strstr(said, "<|END_THINKING|>")),
          "not those of reasoning that is hidden", "%s", r.body);
    reply_free(&r);

    fd = begin(CHAT, "{" ASK "}", ++id);
    say_likely(id, &ids, 0, ids.count);
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    check(r.status == 200 && !at(r.json, "choices.0.logprobs"), "none unless asked for", "%s", r.body);
    reply_free(&r), nmk_ids_free(&ids);

    /* A completion: offsets count characters; what has no text of its own stands where it came. */
    ids = ids_of("\xc3\xa9\xf0\x9f\x98\x80z<|END_OF_TURN_TOKEN|>");
    fd = begin(TEXT, "{\"prompt\":\"x\",\"logprobs\":0,\"return_tokens_as_token_ids\":true}", ++id);
    say_likely(id, &ids, 0, ids.count);
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    struct json_object *offsets = at(r.json, "choices.0.logprobs.text_offset"),
                       *top = at(r.json, "choices.0.logprobs.top_logprobs");
    size_t n = ids.count;
    char first[32];
    snprintf(first, sizeof first, "token_id:%d", ids.id[0]);
    check(json_object_array_length(offsets) == n && json_object_array_length(top) == n &&
              json_object_get_int(json_object_array_get_idx(offsets, 0)) == 0 &&
              json_object_get_int(json_object_array_get_idx(offsets, n - 2)) == 2 &&
              json_object_get_int(json_object_array_get_idx(offsets, n - 1)) == 3 &&
              !strcmp(text_at(r.json, "choices.0.logprobs.tokens.0"), first),
          "a completion's offsets, and ids for tokens", "%s", r.body);
    reply_free(&r), nmk_ids_free(&ids), nmk_buf_free(&text);
}

/* Streams of random text with random stop strings: over all chunks every token's log-probability comes once and in order,
 * each with the chunk that ends its text. */
static void test_streamed_logprobs(void) {
    static const char *const parts[] = {"is", " the", "\xf0\x9f\x98\x80", "\xc3\xa9", "a", "b c", " ",
                                        "\n", "def",  "\xe4\xb8\xad"};
    enum { PARTS = sizeof parts / sizeof *parts, ROUNDS = 120 };
    char wrong_with[400] = "";
    int cut = 0, held = 0;
    for (int round = 0; round < ROUNDS && !wrong_with[0]; round++) {
        nmk_buf text = {0}, told_text = {0}, told_tokens = {0};
        nmk_buf_puts(&told_text, ""), nmk_buf_puts(&told_tokens, "");
        for (size_t i = 1 + random_below(30); i; i--) nmk_buf_puts(&text, parts[random_below(PARTS)]);
        nmk_ids ids = ids_of(text.data);
        char *body =
            xasprintf("{\"stream\":true,\"prompt\":\"x\",\"logprobs\":1,\"stop\":[\"%s%s\",\"the\xf0\x9f\x98\x80\"]}",
                      parts[random_below(7)], parts[random_below(7)]);
        int id = submits + 1, fd = begin(TEXT, body, id), next = 0;
        say_likely(id, &ids, 0, ids.count);
        end(id, NMK_BATCH_LENGTH, NULL);
        reply r = reply_read(fd);
        bool finished = false, stopped = false;
        for (const char *p = strstr(r.body, "data: {"); p; p = strstr(p + 1, "data: {")) {
            nmk_err e;
            const char *stop = strstr(p, "\n\n");
            char *data = xasprintf("%.*s", (int)(stop - p - 6), p + 6);
            struct json_object *v = nmk_json_parse(data, strlen(data), &e), *l = at(v, "choices.0.logprobs");
            struct json_object *tokens = at(l, "tokens");
            nmk_buf_puts(&told_text, text_at(v, "choices.0.text"));
            finished = *text_at(v, "choices.0.finish_reason");
            stopped |= !strcmp(text_at(v, "choices.0.finish_reason"), "stop");
            for (size_t i = 0; tokens && i < json_object_array_length(tokens); i++, next++) {
                size_t bytes;
                const char *raw = nmk_tokenizer_token(tokenizer, ids.id[next], &bytes);
                nmk_buf_add(&told_tokens, raw, bytes);
                double value = json_object_get_double(json_object_array_get_idx(at(l, "token_logprobs"), i));
                if (value != -(double)next / 16) snprintf(wrong_with, sizeof wrong_with, "order: %.200s", data);
            }
            if (l && !finished &&
                (told_tokens.length > told_text.length || memcmp(told_tokens.data, told_text.data, told_tokens.length)))
                snprintf(wrong_with, sizeof wrong_with, "ahead of the text: %.200s", data);
            size_t more = 0;
            if (next < (int)ids.count) nmk_tokenizer_token(tokenizer, ids.id[next], &more);
            if (!finished && told_text.length >= told_tokens.length + more && more)
                snprintf(wrong_with, sizeof wrong_with, "behind the text: %.200s", data);
            held += !l;
            json_object_put(v), free(data);
        }
        cut += stopped;
        if (!stopped && (next != (int)ids.count || strcmp(told_tokens.data, told_text.data)))
            snprintf(wrong_with, sizeof wrong_with, "%d of %zu tokens", next, ids.count);
        if (stopped && told_tokens.length <= told_text.length)
            snprintf(wrong_with, sizeof wrong_with, "the stop string's tokens are missing");
        if (!finished) snprintf(wrong_with, sizeof wrong_with, "no finish");
        reply_free(&r), free(body), nmk_ids_free(&ids);
        nmk_buf_free(&text), nmk_buf_free(&told_text), nmk_buf_free(&told_tokens);
    }
    check(!wrong_with[0], "streamed logprobs come once, in order, with their text", "%s", wrong_with);
    check(cut > 5 && cut < ROUNDS - 5, "some were cut by a stop string", "%d of %d", cut, (int)ROUNDS);
}

/* A streamed chat: the logprobs of all chunks, put together, name every token of what was said, in order. */
static void chat_likely(const char *name, const char *more, const char *said, const char *content, const char *ended) {
    nmk_ids ids = ids_of(said);
    nmk_buf all = {0};
    char *body = xasprintf("{\"stream\":true,\"logprobs\":true%s," TOOLS "," ASK "}", more);
    int id = submits + 1, fd = begin(CHAT, body, id), next = 0;
    bool good = true;
    nmk_buf_puts(&all, "");
    say_likely(id, &ids, 0, ids.count);
    end(id, NMK_BATCH_STOP, NULL);
    reply r = reply_read(fd);
    for (const char *p = strstr(r.body, "data: {"); p; p = strstr(p + 1, "data: {")) {
        nmk_err e;
        char *data = xasprintf("%.*s", (int)(strstr(p, "\n\n") - p - 6), p + 6);
        struct json_object *v = nmk_json_parse(data, strlen(data), &e), *l = at(v, "choices.0.logprobs.content");
        if (l) good &= likely_are(l, &all, next, 0), next += (int)json_object_array_length(l);
        json_object_put(v), free(data);
    }
    told t = told_read(&r, true);
    check(good && !t.wrong[0] && !strcmp(all.data, said) && !strcmp(t.text.data, content) && !strcmp(t.ended, ended),
          name, "%s: %s: %s", t.wrong, shown(all.data), shown(r.body));
    told_free(&t), reply_free(&r), nmk_ids_free(&ids), nmk_buf_free(&all), free(body);
}

static void test_chat_logprobs(void) {
    chat_likely("a streamed call's logprobs", "",
                "I<|END_THINKING|><|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"a\": 1}}]<|END_ACTION|>"
                "<|END_OF_TURN_TOKEN|>",
                "", "tool_calls");
    chat_likely("characters in parts, in reasoning and answer", "",
                "\xf0\x9f\x98\x80 \xf0\x9f\x98\x80\n<|END_THINKING|><|START_TEXT|>\xf0\x9f\x98\x80.<|END_TEXT|>"
                "<|END_OF_TURN_TOKEN|>",
                "\xf0\x9f\x98\x80.", "stop");
    chat_likely("citations", "",
                "<co>So</co: 0:[1]> it is<|END_THINKING|><|START_TEXT|>It is <co>42</co: 0:[1,2]>, <co><|END_TEXT|>"
                "<|END_OF_TURN_TOKEN|>",
                "It is 42, <co>", "stop");
    chat_likely("text held by a stop string, then a call", ",\"stop\":\"a b c\"",
                "<|END_THINKING|><|START_TEXT|>x a b<|END_TEXT|><|START_ACTION|>[{\"tool_name\": \"f\"}]<|END_ACTION|>",
                "x a b", "tool_calls");
    chat_likely("nothing but markers", "", "<|END_THINKING|><|END_OF_TURN_TOKEN|>", "", "stop");
}

/* Tells the likelihood of a prompt's tokens: -1, -2, ... in the order of the prompt, each its alternatives' second. */
static void tell_prompt(int id) {
    const nmk_batch_request *rq = &submitted[id - 1];
    for (int i = 1; i < rq->prompt_tokens; i++) {
        nmk_logprobs l = {.chosen = -(float)i, .count = rq->prompt_logprobs - 1};
        for (int k = 0; k < l.count; k++)
            l.id[k] = k == 1 ? rq->prompt[i] : 300 + k, l.logprob[k] = l.chosen + 1 - (float)k;
        rq->on_prompt(rq->user, i, &l);
    }
}

/* Of one answer to one prompt, which is said to be that likely. */
static reply likely_reply(const char *path, const char *body, const char *said) {
    int id = submits + 1, fd = begin(path, body, id);
    nmk_ids ids = ids_of(said);
    tell_prompt(id);
    say_likely(id, &ids, 0, ids.count);
    end(id, NMK_BATCH_LENGTH, NULL);
    nmk_ids_free(&ids);
    return reply_read(fd);
}

static void test_prompt_logprobs(void) {
    reply r = likely_reply(TEXT, "{\"echo\":true,\"logprobs\":2,\"max_tokens\":2,\"prompt\":\"caf\u00e9 is\"}", " a");
    struct json_object *l = at(r.json, "choices.0.logprobs"), *tokens = at(l, "tokens"), *offset = at(l, "text_offset");
    const char *text = text_at(r.json, "choices.0.text");
    size_t n = tokens ? json_object_array_length(tokens) : 0, good = 0, from = 0;
    for (size_t i = 0, character = 0; i < n; i++) { /* each token's text is where its offset says */
        const char *token = json_object_get_string(json_object_array_get_idx(tokens, i));
        while (character < (size_t)json_object_get_int(json_object_array_get_idx(offset, i)))
            from += 1 + (((unsigned char)text[from + 1] & 0xc0) == 0x80), character++;
        bool part = !strncmp(token, "bytes:", 6); /* of a character */
        good += part || (!i ? !strcmp(token, "<BOS_TOKEN>") && !from : !strncmp(text + from, token, strlen(token)));
    }
    check(!strcmp(text, "caf\xc3\xa9 is a") && n > 4 && good == n &&
              json_object_array_length(at(l, "token_logprobs")) == n && !at(l, "token_logprobs.0") &&
              !at(l, "top_logprobs.0") && json_object_get_double(at(l, "token_logprobs.2")) == -2 &&
              json_object_object_length(at(l, "top_logprobs.2")) == 2,
          "echo and logprobs: a prompt's tokens, the first without any", "%zu of %zu in place: %s", good, n, r.body);
    reply_free(&r);

    r = likely_reply(TEXT, "{\"echo\":true,\"logprobs\":1,\"max_tokens\":0,\"prompt\":[7,300,301]}", "a");
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "length") &&
              json_object_array_length(at(r.json, "choices.0.logprobs.tokens")) == 3 &&
              json_object_get_double(at(r.json, "choices.0.logprobs.token_logprobs.2")) == -2 &&
              int_at(r.json, "usage.completion_tokens") == 0 && int_at(r.json, "usage.prompt_tokens") == 3,
          "a prompt alone", "%s", r.body);
    reply_free(&r);

    r = likely_reply(TEXT, "{\"echo\":true,\"logprobs\":0,\"max_tokens\":2,\"stream\":true,\"prompt\":\"it is\"}",
                     " a b");
    const char *first = strstr(r.body, "\"text\":\"it is\""),
               *likely = first ? strstr(first, "\"token_logprobs\":[null,-1") : NULL;
    told t = told_read(&r, false);
    check(!t.wrong[0] && !strcmp(t.text.data, "it is a b") && likely && likely < strstr(first, "\n\n"),
          "a streamed prompt comes with its likelihood", "%s: %s", t.wrong, r.body);
    told_free(&t), reply_free(&r);

    r = likely_reply(TEXT, "{\"prompt_logprobs\":2,\"max_tokens\":1,\"prompt\":[7,310,301]}", "a");
    const char *list = json_object_to_json_string_ext(at(r.json, "choices.0.prompt_logprobs"), JSON_C_TO_STRING_PLAIN);
    check(strstr(list, "[null,{\"310\":{\"logprob\":-1,\"rank\":2,\"decoded_token\":\"") == list &&
              strstr(list, "\"300\":{\"logprob\":0,\"rank\":1,") &&
              strstr(list, "{\"301\":{\"logprob\":-2,\"rank\":2,") &&
              !strncmp(text_at(r.json, "choices.0.text"), "a", 1) && !at(r.json, "choices.0.logprobs"),
          "prompt_logprobs of a completion", "%s", list);
    reply_free(&r);
    r = likely_reply(CHAT, "{\"prompt_logprobs\":0," ASK "}", "a");
    check(json_object_is_type(at(r.json, "prompt_logprobs"), json_type_array) &&
              (int)json_object_array_length(at(r.json, "prompt_logprobs")) == int_at(r.json, "usage.prompt_tokens") &&
              json_object_object_length(at(r.json, "prompt_logprobs.1")) == 1,
          "prompt_logprobs of a chat", "%s", r.body);
    reply_free(&r);

    static const char *const refusals[][2] = {
        {"{\"prompt_logprobs\":1,\"stream\":true,\"prompt\":\"a\"}", "prompt_logprobs"},
        {"{\"prompt_logprobs\":21,\"prompt\":\"a\"}", "prompt_logprobs"},
        {"{\"prompt_logprobs\":-1,\"prompt\":\"a\"}", "prompt_logprobs"},
        {"{\"max_tokens\":0,\"prompt\":\"a\"}", "max_tokens"},
        {"{\"max_tokens\":-1,\"echo\":true,\"prompt\":\"a\"}", "max_tokens"},
        {"{\"max_tokens\":\"1\",\"prompt\":\"a\"}", "max_tokens"}};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        r = post(port, TEXT, refusals[i][0]);
        check(r.status == 400 && !strcmp(text_at(r.json, "error.param"), refusals[i][1]), refusals[i][0], "%d %s",
              r.status, r.body);
        reply_free(&r);
    }
}

static void test_usage(void) {
    int id = submits + 1, fd = begin(TEXT, "{\"prompt\":[[7,8,9],[7,8,9,10]],\"n\":2,\"max_tokens\":1}", id + 3);
    const int cached[] = {2, 3, 1, 2}; /* the further answers of a prompt find more, but the prompt was sent once */
    for (int i = 0; i < 4; i++) {
        start(id + i, cached[i]);
        token(id + i, 20);
        end(id + i, NMK_BATCH_LENGTH, NULL);
    }
    reply r = reply_read(fd);
    check(int_at(r.json, "usage.prompt_tokens") == 7 && int_at(r.json, "usage.completion_tokens") == 4 &&
              int_at(r.json, "usage.prompt_tokens_details.cached_tokens") == 3,
          "cached tokens", "%s", r.body);
    reply_free(&r);
    id += 4;
    fd = begin(CHAT, "{\"stream\":true,\"stream_options\":{\"include_usage\":true}," ASK "}", id);
    start(id, 5);
    say(id, "I");
    end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    check(strstr(r.body, "\"choices\":[],\"usage\":{") && strstr(r.body, "{\"cached_tokens\":5}"),
          "cached tokens of a stream", "%s", r.body);
    reply_free(&r);
    r = get(port, "/metrics");
    check(metric_in(&r, "vllm:request_queue_time_seconds_count") == 5 &&
              metric_in(&r, "vllm:request_prefill_time_seconds_count") == 5 &&
              metric_in(&r, "vllm:request_inference_time_seconds_count") == 5,
          "times of those that started", "%s", r.body);
    reply_free(&r);
}

/* ---------------------------------------------------------------- keys */

static void *other_loop(void *h) {
    nmk_err e;
    if (nmk_http_run(h, &e) < 0) printf("not ok - nmk_http_run: %s\n", e.text);
    return NULL;
}

/* What a server with keys tells the batch about whose a request is.  It gives the batch one sequence at a time. */
static void test_keys(nmk_api_options o) {
    static const char *const keys[] = {"one", "two"};
    static const char *const fields[] = {"Authorization: Bearer one\r\n", "Authorization: Bearer two\r\n"};
    nmk_http_options ho = {
        .routes = nmk_api_routes, .route_count = nmk_api_route_count, .api_keys = keys, .api_key_count = 2};
    nmk_http *h;
    nmk_err e;
    pthread_t thread;
    nmk_api *api = nmk_api_new();
    if (nmk_http_open(&h, &ho, &nmk_api_callbacks, api, &e)) exit(1);
    nmk_api_start(api, h, &o);
    pthread_create(&thread, NULL, other_loop, h);
    const struct {
        int key;
        const char *salt;
    } asked[] = {{0, ""},
                 {0, ""},
                 {1, ""},
                 {0, ",\"cache_salt\":\"s\""},
                 {1, ",\"cache_salt\":\"s\""},
                 {0, ",\"cache_salt\":\"s\""}};
    uint64_t salt[6], client[6];
    for (int i = 0; i < 6; i++) {
        char *body = xasprintf("{\"prompt\":\"x\"%s}", asked[i].salt);
        int id = submits + 1, fd = request_open(nmk_http_port(h), "POST", TEXT, fields[asked[i].key], body);
        wait_submits(id);
        salt[i] = submitted[id - 1].salt, client[i] = submitted[id - 1].client;
        end(id, NMK_BATCH_LENGTH, NULL);
        reply r = reply_read(fd);
        if (r.status != 200) check(false, "a request with a key", "%s", r.raw.data);
        reply_free(&r), free(body);
    }
    check(client[0] == client[1] && client[0] == client[3] && client[2] == client[4] && client[0] != client[2],
          "clients are keys", "they are not");
    check(salt[0] == salt[1] && salt[3] == salt[5] && salt[0] != salt[2] && salt[0] != salt[3] && salt[2] != salt[4] &&
              salt[3] != salt[4] && salt[0] != salt[4],
          "salts are of a key and the request's own", "they are not");

    /* Four of the first key wait, then one of the second: it is the second one's turn before the first one's last. */
    reply refused = reply_read(request_open(nmk_http_port(h), "POST", CHAT, fields[0], "{" ASK "}"));
    check(refused.status == 400 && !strcmp(text_at(refused.json, "error.code"), "chat_template_error") &&
              strstr(text_at(refused.json, "error.message"), "no user here"),
          "what a template refuses", "%s", refused.raw.data);
    reply_free(&refused);

    int id = submits + 1, fd[5];
    for (int i = 0; i < 5; i++) {
        fd[i] = request_open(nmk_http_port(h), "POST", TEXT, fields[i == 4], "{\"prompt\":\"x\"}");
        if (!i) wait_submits(id);
    }
    pause_ms(100); /* all have been read */
    int turn = -1;
    for (int i = 0; i < 5; i++, id++) {
        wait_submits(id);
        if (submitted[id - 1].client == client[2]) turn = i;
        end(id, NMK_BATCH_LENGTH, NULL);
    }
    check(turn == 1, "keys take turns", "the second key's came after %d of the first", turn);
    for (int i = 0; i < 5; i++) {
        reply r = reply_read(fd[i]);
        reply_free(&r);
    }

    /* One runs, one waits here, and the engine is lost. */
    for (int i = 0; i < 2; i++) {
        fd[i] = request_open(nmk_http_port(h), "POST", TEXT, fields[0], "{\"prompt\":\"x\"}");
        if (!i) wait_submits(id);
    }
    pause_ms(100);
    lost = true;
    end(id, NMK_BATCH_FAILED, "the engine is lost");
    for (int i = 0; i < 2; i++) {
        reply r = reply_read(fd[i]);
        check(r.status == (i ? 503 : 500) &&
                  !strcmp(text_at(r.json, "error.code"), i ? "engine_restarting" : "engine_failed"),
              i ? "who waits learns that the engine is lost" : "and who ran", "%s", r.raw.data);
        reply_free(&r);
    }
    lost = false;
    nmk_http_drain(h, 0);
    pthread_join(thread, NULL);
    nmk_api_stop(api);
    nmk_http_close(h);
    nmk_api_close(api);
}

static void test_failures(void) {
    int id = submits + 1, fd = begin(CHAT, "{" ASK "}", id);
    say(id, "I");
    end(id, NMK_BATCH_FAILED, "task 7 waited");
    reply r = reply_read(fd);
    check(r.status == 500 && strstr(text_at(r.json, "error.message"), "task 7 waited"), "a failure", "%s", r.body);
    reply_free(&r);

    /* One of two fails: the other is cancelled, the client is told once. */
    int before = cancels;
    fd = begin(CHAT, "{\"n\":2,\"stream\":true," ASK "}", id += 2);
    say(id - 1, "I<|END_THINKING|>");
    end(id, NMK_BATCH_FAILED, "task 7 waited");
    r = reply_read(fd);
    const char *error = strstr(r.body, "data: {\"error\":{");
    check(r.status == 200 && error && strstr(error, "data: [DONE]") && !strstr(r.body, "\"finish_reason\":\""),
          "a failure within a stream", "%s", r.body);
    end(id - 1, NMK_BATCH_CANCEL, NULL);
    check(cancels > before, "the other answer is cancelled", "it is not");
    reply_free(&r);

    /* Rows that are preempted wait too: room for those is left. */
    waiting = NMK_BATCH_WAITING - NMK_ROWS - 2;
    before = submits;
    r = post(port, CHAT, "{\"n\":3,\"stream\":true," ASK "}");
    check(r.status == 503 && strstr(r.raw.data, "Retry-After: ") && submits == before &&
              !strcmp(text_at(r.json, "error.code"), "overloaded"),
          "a full queue takes no part of a request", "%d submitted: %s", submits - before, r.raw.data);
    reply_free(&r);
    fd = begin(TEXT, "{\"n\":2,\"prompt\":[7]}", before + 2);
    for (int i = 0; i < 2; i++) end(++id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    check(r.status == 200, "what just fits is taken", "%s", r.raw.data);
    reply_free(&r);
    waiting = 0;
    fd = begin(CHAT, "{" ASK "}", ++id);
    int streamed = begin(CHAT, "{\"stream\":true," ASK "}", ++id);
    lost = true;
    end(id - 1, NMK_BATCH_LOST, "task 7 waited"), end(id, NMK_BATCH_LOST, "task 7 waited");
    r = reply_read(fd);
    check(r.status == 503 && strstr(r.raw.data, "Retry-After: 1\r\n") &&
              !strcmp(text_at(r.json, "error.code"), "engine_restarting"),
          "the engine is lost while a request waits", "%s", r.raw.data);
    reply_free(&r);
    r = reply_read(streamed);
    error = strstr(r.body, "data: {\"error\":{");
    check(r.status == 200 && error && strstr(error, "engine_restarting") && strstr(error, "data: [DONE]"),
          "and while a stream does", "%s", r.body);
    reply_free(&r);
    r = get(port, "/health");
    check(r.status == 503, "health of a lost engine", "%d", r.status);
    reply_free(&r);
    r = post(port, CHAT, "{" ASK "}");
    check(r.status == 503 && strstr(r.raw.data, "Retry-After: 1\r\n") &&
              !strcmp(text_at(r.json, "error.code"), "engine_restarting"),
          "a lost engine", "%s", r.raw.data);
    reply_free(&r);
    lost = false;
    r = get(port, "/metrics");
    check(strstr(r.body, "finished_reason=\"error\"} 5") != NULL, "failures are counted", "%s", r.body);
    reply_free(&r);
}

static void test_stall(void) {
    usleep(100000);
    reply r = get(port, "/health");
    check(r.status == 200, "health of an idle engine", "%d", r.status);
    reply_free(&r);
    int id = submits + 1, fd = begin(CHAT, "{" ASK "}", id);
    usleep(100000);
    r = get(port, "/health");
    check(r.status == 503, "health without steps", "%d", r.status);
    reply_free(&r);
    end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    reply_free(&r);
    r = get(port, "/health");
    check(r.status == 200, "health afterwards", "%d", r.status);
    reply_free(&r);
}

/* Closing with requests under way leaves nothing behind (the sanitizers' leak check). */
static void test_close(void) {
    int id = submits + 1, fd = begin(CHAT, "{\"stream\":true," ASK "}", id);
    say(id, "I");
    nmk_http_drain(http, 0);
    pthread_join(played_thread, NULL);
    nmk_api_stop(played_api);
    say(id, " and");
    end(id, NMK_BATCH_CANCEL, NULL);
    nmk_http_close(http);
    nmk_api_close(played_api);
    close(fd);
    check(true, "closed while a stream ran", "it was not");
}

/* A template with an opinion. */
#define TEMPLATE "build/tests/serve_api.jinja"

static void write_template(void) {
    FILE *f = fopen(TEMPLATE, "w");
    if (!f || fputs("{{ raise_exception('no ' + messages[0].role + ' here') }}", f) < 0 || fclose(f)) exit(1);
}

int main(void) {
    nmk_api_options o = {.stall_ms = 50};
    write_template();
    play(&o, NULL, 0);
    nmk_template *chat_template = o.chat_template;
    test_calls();
    test_stops();
    test_answers();
    test_sampler();
    test_logprobs();
    test_streamed_logprobs();
    test_chat_logprobs();
    test_prompt_logprobs();
    test_usage();
    nmk_err e;
    o.max_rows = 1;
    if (nmk_template_load(TEMPLATE, NULL, &o.chat_template, &e)) exit(1);
    test_keys(o);
    nmk_template_free(o.chat_template);
    test_failures();
    test_stall();
    test_close();
    nmk_template_free(chat_template);
    nmk_tokenizer_free(tokenizer);
    return failures != 0;
}
