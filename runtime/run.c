/* nmk-run: completes prompts with the model this program was built for.
 *
 * Text on stdout, everything else on stderr.  Exit 0: done.  1: it failed.  2: wrong flags. */
#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "abi.h"
#include "flags.h"
#include "nmk.h"
#include "progress.h"
#include "tokenizer.h"
#include "util.h"

enum { MAX_PROMPT_BYTES = 64 << 20 };

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

/* ---- flags ---- */

typedef struct {
    char kind; /* t text, i ids, f file */
    const char *value;
} prompt_arg;

typedef struct {
    nmk_options options;
    prompt_arg prompt[NMK_ROWS];
    int prompts;
    int64_t max_batch, max_tokens, max_len, threads, ring_stages, in_flight;
    nmk_sampler sampler;
    bool ids, ignore_eos, stats, help, version;
} settings;

static const nmk_flag table[] = {
    {"--checkpoint", "DIR", "folder with config.json, tokenizer.json and safetensors"},
    {"--prompt", "TEXT", "repeatable: several prompts are one batch"},
    {"--prompt-ids", "1,2,3", "a prompt as token ids"},
    {"--prompt-file", "FILE", "a prompt from a file"},
    {"--max-tokens", "N", "tokens to generate for each prompt (128)"},
    {"--temperature", "T", "0 takes the likeliest token (0)"},
    {"--top-k", "K", "only the K likeliest tokens; 0: all (0)"},
    {"--top-p", "P", "only the likeliest tokens that have this share of the probability together (1)"},
    {"--min-p", "P", "only tokens that have this share of the likeliest one's probability (0)"},
    {"--repetition-penalty", "R", "logits of tokens that were there are divided or multiplied by it (1)"},
    {"--seed", "S", "of the sampling (0)"},
    {"--device", "NAME", "auto, cpu or cuda:N (auto)"},
    {"--random-weights", "SEED", "in place of the checkpoint's weights"},
    {"--max-batch", "N", "prompts that the steps have room for (as generated, or what the prompts need)"},
    {"--max-len", "N", "room for prompt and answer (what the prompts need)"},
    {"--threads", "N", "of the CPU machine (one per core)"},
    {"--ring-stages", "N", "depth of the GPU's weight ring (as generated)"},
    {"--in-flight", "N", "ring stages on their way at once (as generated)"},
    {"--kernel", "FILE", "CUDA file to compile instead of the kernel built in"},
    {"--variant", "DIR", "schedule that nmkgen variant wrote, instead of the one built in"},
    {"--allow-spills", NULL, "run a kernel that spills registers"},
    {"--ids", NULL, "print token ids in place of text"},
    {"--ignore-eos", NULL, "go on after the end-of-text token"},
    {"--stats", NULL, "print more figures"},
    {"--help", NULL, "print this"},
    {"--version", NULL, "print which model this program runs"},
};

static const nmk_flags flags = {.program = "nmk-run", .flag = table, .count = sizeof table / sizeof *table};

static void usage(FILE *f) {
    fprintf(f, "usage: nmk-run --checkpoint DIR --prompt TEXT [flags]     (model %s, up to %d prompts)\n",
            nmk_model_name, nmk_most_rows());
    nmk_flags_print(&flags, f, 24);
}

static bool read_seed(const char *text, uint64_t *value) {
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 0);
    if (errno || end == text || *end || !isdigit((unsigned char)*text)) return false;
    *value = v;
    return true;
}

/* From 0 to `most`. */
static bool read_number(const char *text, double most, float *value) {
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || isspace((unsigned char)*text) || !(v >= 0) || v > most) return false;
    *value = (float)v;
    return true;
}

static int set_sampler(nmk_sampler *s, const char *name, const char *value) {
    int64_t k;
    if (!strcmp(name, "--top-k")) {
        if (!nmk_flag_int(value, 0, INT_MAX, NULL, &k))
            return nmk_flag_bad(&flags, name, value, "a whole number from 0");
        return s->top_k = (int)k, 0;
    }
    if (!strcmp(name, "--temperature") || !strcmp(name, "--repetition-penalty")) {
        float *to = name[2] == 't' ? &s->temperature : &s->repetition_penalty;
        return read_number(value, 1e6, to) ? 0 : nmk_flag_bad(&flags, name, value, "a number from 0");
    }
    return read_number(value, 1, name[2] == 't' ? &s->top_p : &s->min_p)
               ? 0
               : nmk_flag_bad(&flags, name, value, "a number from 0 to 1");
}

static int set_flag(void *user, const char *name, const char *value) {
    settings *s = user;
    static const char count[] = "a whole number from 1";
    if (!strcmp(name, "--checkpoint")) return s->options.checkpoint = value, 0;
    if (!strcmp(name, "--device")) return s->options.device = value, 0;
    if (!strcmp(name, "--kernel")) return s->options.kernel = value, 0;
    if (!strcmp(name, "--variant")) return s->options.variant = value, 0;
    if (!strncmp(name, "--prompt", 8)) {
        const int most = nmk_most_rows();
        if (s->prompts == most)
            return fprintf(stderr, "nmk-run: %s: at most %d prompt%s\n", name, most, most == 1 ? "" : "s"), 2;
        s->prompt[s->prompts++] = (prompt_arg){name[8] ? name[9] : 't', value};
        return 0;
    }
    if (!strcmp(name, "--max-tokens"))
        return nmk_flag_int(value, 1, INT_MAX, NULL, &s->max_tokens) ? 0 : nmk_flag_bad(&flags, name, value, count);
    if (!strcmp(name, "--max-batch"))
        return nmk_flag_int(value, 1, INT_MAX, NULL, &s->max_batch) ? 0 : nmk_flag_bad(&flags, name, value, count);
    if (!strcmp(name, "--max-len"))
        return nmk_flag_int(value, 1, INT_MAX, NULL, &s->max_len) ? 0 : nmk_flag_bad(&flags, name, value, count);
    if (!strcmp(name, "--threads"))
        return nmk_flag_int(value, 1, 256, NULL, &s->threads) ? 0 : nmk_flag_bad(&flags, name, value, "1 to 256");
    if (!strcmp(name, "--ring-stages") || !strcmp(name, "--in-flight")) {
        int64_t *n = name[2] == 'r' ? &s->ring_stages : &s->in_flight;
        char expected[40];
        snprintf(expected, sizeof expected, "1 to %d", NMK_RING_STAGES);
        return nmk_flag_int(value, 1, NMK_RING_STAGES, NULL, n) ? 0 : nmk_flag_bad(&flags, name, value, expected);
    }
    static const char *const sampling[] = {"--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty"};
    for (size_t i = 0; i < sizeof sampling / sizeof *sampling; i++)
        if (!strcmp(name, sampling[i])) return set_sampler(&s->sampler, name, value);
    if (!strcmp(name, "--seed"))
        return read_seed(value, &s->sampler.seed) ? 0 : nmk_flag_bad(&flags, name, value, "a whole number from 0");
    if (!strcmp(name, "--random-weights")) {
        s->options.random_weights = true;
        return read_seed(value, &s->options.weights_seed) ? 0
                                                          : nmk_flag_bad(&flags, name, value, "a whole number from 0");
    }
    bool *switches[] = {&s->options.allow_spills, &s->ids, &s->ignore_eos, &s->stats, &s->help, &s->version};
    static const char *const names[] = {"--allow-spills", "--ids", "--ignore-eos", "--stats", "--help", "--version"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i])) return *switches[i] = true, 0;
    assert(!"a flag of the table that nothing reads");
    return 2;
}

/* 0, or 2 with a message. */
static int read_flags(settings *s, int argc, char **argv) {
    if (nmk_flags_read(&flags, argc, argv, set_flag, s)) return 2;
    if (s->help || s->version) return 0;
    if (!s->options.checkpoint && !s->options.random_weights)
        return fprintf(stderr, "nmk-run: --checkpoint DIR is needed (or --random-weights SEED)\n"), 2;
    if (s->max_batch && s->max_batch < s->prompts)
        return fprintf(stderr, "nmk-run: --max-batch %d: there are %d prompts\n", (int)s->max_batch, s->prompts), 2;
    if (!s->prompts) return fprintf(stderr, "nmk-run: --prompt TEXT is needed (or --prompt-ids, --prompt-file)\n"), 2;
    return 0;
}

/* ---- prompts ---- */

static int read_ids(const char *text, nmk_ids *ids, nmk_err *e) {
    for (const char *p = text; *p;) {
        char *end;
        errno = 0;
        long v = strtol(p, &end, 10);
        if (errno || end == p || v < 0 || v > INT_MAX || (*end && *end != ',' && *end != ' '))
            return nmk_fail(e, "--prompt-ids %.200s: expected token ids with commas between them", text);
        nmk_ids_add(ids, (int32_t)v);
        p = end + strspn(end, ", ");
    }
    return 0;
}

/* As a text of its own, so with BOS; a text that writes BOS itself keeps its one. */
static int encode(const nmk_tokenizer *t, const char *text, size_t bytes, nmk_ids *ids, nmk_err *e) {
    nmk_ids plain = {0};
    if (nmk_tokenizer_encode(t, text, bytes, NMK_PARSE_SPECIAL, &plain, e)) return -1;
    int rc = nmk_tokenizer_encode(t, text, bytes, NMK_PARSE_SPECIAL | NMK_ADD_BOS, ids, e);
    if (rc == 0 && plain.count && ids->count > 1 && ids->id[0] == plain.id[0] && ids->id[1] == plain.id[0]) {
        nmk_ids swap = *ids;
        *ids = plain, plain = swap;
    }
    nmk_ids_free(&plain);
    return rc;
}

static int read_prompt(const prompt_arg *p, const nmk_tokenizer *t, nmk_ids *ids, nmk_err *e) {
    char *text = NULL;
    size_t bytes = 0;
    if (p->kind == 'i') return read_ids(p->value, ids, e);
    if (!t)
        return nmk_fail(e,
                        "a prompt of text needs the checkpoint's tokenizer.json: give --checkpoint, or --prompt-ids");
    if (p->kind == 't') return encode(t, p->value, strlen(p->value), ids, e);
    if (nmk_file_read(&text, &bytes, p->value, MAX_PROMPT_BYTES, e)) return -1;
    int rc = encode(t, text, bytes, ids, e);
    free(text);
    return rc;
}

/* ---- output ---- */

typedef struct {
    const settings *s;
    const nmk_tokenizer *tokenizer;
    const nmk_stats *stats;
    nmk_detokenizer detokenizer[NMK_ROWS];
    nmk_buf text[NMK_ROWS];
    bool stream;
} output;

static void flush_text(output *o, int index) {
    nmk_buf *b = &o->text[index];
    fwrite(b->data, 1, b->length, stdout);
    fflush(stdout);
    b->length = 0;
}

static bool is_stop(const nmk_stats *s, int32_t token) {
    for (int i = 0; i < s->stop_count; i++)
        if (s->stop_ids[i] == token) return true;
    return false;
}

static int on_token(void *user, int index, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    output *o = user;
    nmk_buf *b = &o->text[index];
    if (!o->tokenizer || o->s->ids)
        nmk_buf_printf(b, "%d ", token);
    else if (!is_stop(o->stats, token))
        nmk_detokenizer_add(&o->detokenizer[index], o->tokenizer, token, b);
    if (o->stream && b->length) flush_text(o, index);
    return interrupted;
}

static void finish_output(output *o, int count) {
    for (int i = 0; i < count; i++) {
        nmk_buf *b = &o->text[i];
        nmk_utf8_end(&o->detokenizer[i].text, b);
        if (o->stream) {
            nmk_buf_puts(b, "\n");
        } else {
            printf("[%d] ", i + 1);
            nmk_buf_puts(b, "\n");
        }
        flush_text(o, i);
        nmk_buf_free(b);
    }
}

static void on_line(void *user, const char *line) {
    (void)user;
    fprintf(stderr, "nmk-run: %s\n", line);
}

static double rate(int count, double seconds) { return seconds > 0 ? count / seconds : 0; }

static void print_stats(const settings *s, const nmk_stats *t, int count) {
    fprintf(stderr, "%d tokens in %.3f s: %.1f tokens/s on %s (%d prompt tokens in %.3f s)\n", t->tokens,
            t->decode_seconds, rate(t->tokens, t->decode_seconds), t->device, t->prompt_tokens, t->prompt_seconds);
    if (!s->stats) return;
    fprintf(stderr,
            "model %s, %d rows, %d decode steps of %.3f ms, %d prompt steps\n"
            "weights %.1f MiB in %.2f s, keys and values %.1f MiB, room for %d tokens a row, opened in %.2f s\n",
            t->model, count, t->decode_steps, t->decode_steps ? 1e3 * t->decode_seconds / t->decode_steps : 0,
            t->prompt_steps, (double)t->weight_bytes / 0x1p20, t->weights_seconds, (double)t->kv_bytes / 0x1p20,
            t->max_len, t->open_seconds);
    if (t->on_gpu)
        fprintf(stderr, "kernel %s in %.3f s: %d registers, %d bytes spilled, %zu bytes of code\n",
                t->kernel_cached ? "from the cache" : "compiled", t->kernel_seconds, t->registers, t->spill_bytes,
                t->code_bytes);
}

/* ---- */

static int run(settings *s, nmk_err *e) {
    int rc = -1, longest = 0;
    nmk_tokenizer *tokenizer = NULL;
    nmk_engine *engine = NULL;
    nmk_stats stats = {0};
    nmk_ids ids[NMK_ROWS] = {0};
    nmk_request request[NMK_ROWS] = {0};
    if (s->options.checkpoint) {
        /* with random weights and ids there may be no tokenizer at all */
        bool needed = !s->options.random_weights;
        for (int i = 0; i < s->prompts; i++) needed |= s->prompt[i].kind != 'i';
        if (nmk_tokenizer_load(s->options.checkpoint, &tokenizer, e) && needed) goto out;
    }
    for (int i = 0; i < s->prompts; i++) {
        if (read_prompt(&s->prompt[i], tokenizer, &ids[i], e)) goto out;
        if (ids[i].count > INT_MAX / 2) {
            nmk_fail(e, "prompt %d has %zu tokens", i + 1, ids[i].count);
            goto out;
        }
        request[i] = (nmk_request){.prompt = ids[i].id,
                                   .prompt_tokens = (int)ids[i].count,
                                   .max_tokens = (int)s->max_tokens,
                                   .sampler = s->sampler};
        if (request[i].prompt_tokens > longest) longest = request[i].prompt_tokens;
    }
    int64_t most = s->max_len && s->max_len < NMK_MAX_CONTEXT ? s->max_len : NMK_MAX_CONTEXT;
    for (int i = 0; i < s->prompts; i++)
        if (request[i].prompt_tokens >= most) { /* the engine says it too, after loading */
            nmk_fail(e, "prompt %d has %d tokens: the context holds %d, answer included", i + 1,
                     request[i].prompt_tokens, (int)most);
            goto out;
        }
    int64_t room = s->max_len ? s->max_len : longest + s->max_tokens;
    if (!s->max_len && room > NMK_MAX_CONTEXT) room = NMK_MAX_CONTEXT;
    s->options.max_len = (int)room;
    s->options.max_batch = s->max_batch ? (int)s->max_batch : s->prompts > nmk_rows ? s->prompts : 0;
    s->options.cpu_threads = (int)s->threads;
    s->options.ring_stages = (int)s->ring_stages, s->options.in_flight = (int)s->in_flight;
    nmk_bar bar = {.terminal = isatty(STDERR_FILENO) ? stderr : NULL, .say = on_line};
    s->options.progress = nmk_bar_show, s->options.progress_user = &bar;
    int opened = nmk_engine_open(&engine, &s->options, e);
    nmk_bar_end(&bar);
    if (opened) goto out;
    nmk_engine_stats(engine, &stats);
    output o = {.s = s, .tokenizer = tokenizer, .stats = &stats, .stream = s->prompts == 1};
    signal(SIGINT, on_interrupt);
    unsigned mode = s->ignore_eos ? NMK_IGNORE_STOP : 0;
    rc = nmk_engine_generate(engine, request, s->prompts, mode, on_token, &o, e);
    nmk_engine_stats(engine, &stats);
    if (rc == 0 || stats.tokens) finish_output(&o, s->prompts);
    if (rc == 0) print_stats(s, &stats, s->prompts);
out:
    nmk_engine_close(engine);
    nmk_tokenizer_free(tokenizer);
    for (int i = 0; i < NMK_ROWS; i++) nmk_ids_free(&ids[i]);
    return rc;
}

int main(int argc, char **argv) {
    settings s = {.max_tokens = 128};
    nmk_err e = {0};
    int rc = read_flags(&s, argc, argv);
    if (rc) return rc;
    if (s.help) return usage(stdout), 0;
    if (s.version) {
        printf("nmk-run for %s, target %s, generation %016llx\n", nmk_model_name, nmk_target_arch,
               (unsigned long long)nmk_hash);
        return 0;
    }
    if (run(&s, &e)) return fprintf(stderr, "nmk-run: %s\n", e.text), 1;
    return 0;
}
