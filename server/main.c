/* nmk-serve: an OpenAI-compatible server for the model this program was built for.
 *
 * Everything for people goes to stderr.  Exit 0: drained after a signal.  1: it failed.  2: wrong flags.
 *
 * A GPU that failed does nothing more for this process: after a CUDA error of a kernel neither a reset nor a new
 * context helps.  So the program executes itself, with the same arguments and the socket that listens; whoever connects
 * meanwhile waits there.  The environment carries the socket's number and how often that happened without a step
 * between. */
#include <assert.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "abi.h"
#include "api.h"
#include "json.h"
#include "flags.h"
#include "log.h"
#include "nmk.h"
#include "progress.h"
#include "trace.h"

enum { MOST_KEYS = 64, MOST_NAMES = 16, CONFIG_BYTES_MAX = 16 << 20 };
enum { MOST_RESTARTS = 3, LEAVE_MS = 2000 }; /* without a step between; for answers to slow readers */

static const char listen_variable[] = "NMK_LISTEN_FD", restarts_variable[] = "NMK_RESTARTS";

/* ---- flags ---- */

typedef struct {
    nmk_options options;
    const char *host, *chat_template, *trace;
    int64_t budget_ms, share, port, max_len, max_rows, trace_mib, kept_mb;
    const char *key[MOST_KEYS], *name[MOST_NAMES];
    int keys, names;
    nmk_log_level log_level;
    nmk_bar bar; /* lives as long as the options that point to it */
    bool log_json, quiet, no_cache, no_defaults, help, version;
    char **argv;
    int listen_fd, restarts; /* from the program that executed this one; 0: none */
} settings;

static const nmk_flag table[] = {
    {"--checkpoint", "DIR", "folder with config.json, tokenizer.json and safetensors"},
    {"--host", "ADDRESS", "where to listen; 0.0.0.0 or :: for everybody (127.0.0.1)"},
    {"--port", "N", "0 takes a free one (8000)"},
    {"--api-key", "KEY", "clients must send it as Authorization: Bearer; repeatable (none)"},
    {"--served-model-name", "NAME", "what requests call the model; repeatable (the model's own name)"},
    {"--max-model-len", "N", "tokens of prompt and answer, such as 32k (the model's, at most 256K)"},
    {"--max-batch", "N", "sequences decoded together: the kernel has room for them (as generated)"},
    {"--max-num-seqs", "N", "the same, as vLLM calls it (as generated)"},
    {"--device", "NAME", "auto, cpu or cuda:N (auto)"},
    {"--kernel", "FILE", "CUDA file to compile instead of the kernel built in, for trying changes (none)"},
    {"--variant", "DIR", "schedule that nmkgen variant wrote, instead of the one built in (none)"},
    {"--allow-spills", NULL, "a kernel that spills registers runs, slower than it might (it is refused)"},
    {"--prefill-budget-ms", "N", "how long sequences that decode wait for a piece of another's prompt, about (25)"},
    {"--prefill-mode", "alternate|mixed",
     "steps and pieces of prompts in launches of their own, or in one (alternate)"},
    {"--decode-share", "PERCENT", "of the time that sequences which decode keep beside others' prompts (70)"},
    {"--gpu-memory-utilization", "F", "share of the GPU's memory for weights, keys, values and buffers (0.9)"},
    {"--generation-config", "auto|vllm", "defaults of requests: generation_config.json, or neutral ones (auto)"},
    {"--chat-template", "FILE", "a Jinja file in place of the checkpoint's template (the checkpoint's)"},
    {"--enable-prefix-caching", NULL, "prompts that begin alike are computed once (they are)"},
    {"--no-enable-prefix-caching", NULL, "every prompt is computed whole (only what differs is)"},
    {"--response-store-mb", "N", "memory for responses that /v1/responses keeps; 0: none is kept (64)"},
    {"--log-level", "LEVEL", "debug, info, warning or error (info)"},
    {"--log-format", "text|json", "of the log on stderr, a line an event (text)"},
    {"--disable-log-requests", NULL, "no line for requests that end well (they are logged)"},
    {"--trace", "FILE", "a trace of requests and steps; SIGUSR1 or POST /debug/trace: of tasks (none)"},
    {"--trace-size", "MIB", "of FILE, which then becomes FILE.1 (64)"},
    {"--random-weights", "SEED", "in place of the checkpoint's weights (the checkpoint's)"},
    {"--help", NULL, "print this"},
    {"--version", NULL, "print which model this program serves"},
};

/* Of vLLM and llama.cpp, from command lines that people bring along. */
static const nmk_flag refused[] = {
    {"--model", NULL, "--checkpoint DIR names the checkpoint; this program serves the one model it was built for"},
    {"-m", NULL, "--checkpoint DIR names the checkpoint; this program serves the one model it was built for"},
    {"-hf", NULL, "--checkpoint DIR names the checkpoint; this program serves the one model it was built for"},
    {"--hf-repo", NULL, "--checkpoint DIR names the checkpoint; this program serves the one model it was built for"},
    {"--alias", NULL, "--served-model-name NAME is what requests call the model"},
    {"-a", NULL, "--served-model-name NAME is what requests call the model"},
    {"--ctx-size", NULL, "--max-model-len N is the most tokens of a sequence"},
    {"-c", NULL, "--max-model-len N is the most tokens of a sequence"},
    {"--parallel", NULL, "--max-batch N is how many sequences are decoded together"},
    {"-np", NULL, "--max-batch N is how many sequences are decoded together"},
    {"--main-gpu", NULL, "--device cuda:N chooses the GPU"},
    {"-mg", NULL, "--device cuda:N chooses the GPU"},
    {"--chat-template-file", NULL, "--chat-template FILE is it here"},
    {"--api-key-file", NULL, "--api-key KEY is repeatable; a file of keys is not read"},
    {"--tensor-parallel-size", NULL, "a model runs on one GPU; leave it out"},
    {"-tp", NULL, "a model runs on one GPU; leave it out"},
    {"--pipeline-parallel-size", NULL, "a model runs on one GPU; leave it out"},
    {"-pp", NULL, "a model runs on one GPU; leave it out"},
    {"--split-mode", NULL, "a model runs on one GPU; leave it out"},
    {"-sm", NULL, "a model runs on one GPU; leave it out"},
    {"--tensor-split", NULL, "a model runs on one GPU; leave it out"},
    {"-ts", NULL, "a model runs on one GPU; leave it out"},
    {"--distributed-executor-backend", NULL, "a model runs on one GPU; leave it out"},
    {"--enable-expert-parallel", NULL, "a model runs on one GPU; leave it out"},
    {"--data-parallel-size", NULL, "start a server for each GPU, with --device cuda:N"},
    {"-dp", NULL, "start a server for each GPU, with --device cuda:N"},
    {"--swap-space", NULL, "nothing is swapped: what finds no room waits; leave it out"},
    {"--cpu-offload-gb", NULL, "weights are on the GPU or do not fit; leave it out"},
    {"--n-gpu-layers", NULL, "weights are on the GPU or do not fit; leave it out"},
    {"-ngl", NULL, "weights are on the GPU or do not fit; leave it out"},
    {"--dtype", NULL, "weights are bfloat16, as generated; leave it out"},
    {"--quantization", NULL, "weights are bfloat16, as generated; leave it out"},
    {"-q", NULL, "weights are bfloat16, as generated; leave it out"},
    {"--kv-cache-dtype", NULL, "keys and values are bfloat16, as generated; leave it out"},
    {"--cache-type-k", NULL, "keys and values are bfloat16, as generated; leave it out"},
    {"-ctk", NULL, "keys and values are bfloat16, as generated; leave it out"},
    {"--cache-type-v", NULL, "keys and values are bfloat16, as generated; leave it out"},
    {"-ctv", NULL, "keys and values are bfloat16, as generated; leave it out"},
    {"--block-size", NULL, "a page of keys and values holds 64 tokens, as generated; leave it out"},
    {"--max-num-batched-tokens", NULL, "--prefill-budget-ms says how long a piece of a prompt may take; leave it out"},
    {"--batch-size", NULL, "--prefill-budget-ms says how long a piece of a prompt may take; leave it out"},
    {"-b", NULL, "--prefill-budget-ms says how long a piece of a prompt may take; leave it out"},
    {"--ubatch-size", NULL, "--prefill-budget-ms says how long a piece of a prompt may take; leave it out"},
    {"-ub", NULL, "--prefill-budget-ms says how long a piece of a prompt may take; leave it out"},
    {"--enable-chunked-prefill", NULL, "prompts always share steps with answers; leave it out"},
    {"--cont-batching", NULL, "prompts always share steps with answers; leave it out"},
    {"-cb", NULL, "prompts always share steps with answers; leave it out"},
    {"--enforce-eager", NULL, "a step is one kernel: there is nothing to capture; leave it out"},
    {"--compilation-config", NULL, "a step is one kernel: there is nothing to capture; leave it out"},
    {"-O", NULL, "a step is one kernel: there is nothing to capture; leave it out"},
    {"--cuda-graph-sizes", NULL, "a step is one kernel: there is nothing to capture; leave it out"},
    {"--flash-attn", NULL, "attention is part of the kernel; leave it out"},
    {"-fa", NULL, "attention is part of the kernel; leave it out"},
    {"--trust-remote-code", NULL, "no code of a checkpoint is ever run, apart from its template; leave it out"},
    {"--tokenizer", NULL, "the tokenizer is the checkpoint's tokenizer.json; leave it out"},
    {"--tokenizer-mode", NULL, "the tokenizer is the checkpoint's tokenizer.json; leave it out"},
    {"--load-format", NULL, "weights are read from safetensors; leave it out"},
    {"--mlock", NULL, "weights are read from safetensors; leave it out"},
    {"--no-mmap", NULL, "weights are read from safetensors; leave it out"},
    {"--revision", NULL, "nothing is downloaded: --checkpoint DIR is a folder"},
    {"--download-dir", NULL, "nothing is downloaded: --checkpoint DIR is a folder"},
    {"--hf-token", NULL, "nothing is downloaded: --checkpoint DIR is a folder"},
    {"--tool-call-parser", NULL, "tool calls are read as the model's template says; leave it out"},
    {"--enable-auto-tool-choice", NULL, "tool calls are read as the model's template says; leave it out"},
    {"--jinja", NULL, "tool calls are read as the model's template says; leave it out"},
    {"--reasoning-parser", NULL, "reasoning is read as the model's template says; leave it out"},
    {"--enable-reasoning", NULL, "reasoning is read as the model's template says; leave it out"},
    {"--reasoning-format", NULL, "reasoning is read as the model's template says; leave it out"},
    {"--reasoning-budget", NULL, "a request says it, as thinking_token_budget; leave it out"},
    {"--enable-prompt-tokens-details", NULL, "usage always tells cached tokens; leave it out"},
    {"--max-logprobs", NULL, "a request has up to 20; leave it out"},
    {"--disable-log-stats", NULL, "figures are at /metrics and not logged; leave it out"},
    {"--metrics", NULL, "figures are at /metrics and not logged; leave it out"},
    {"--uvicorn-log-level", NULL, "--log-level LEVEL is it here"},
    {"--verbose", NULL, "--log-level LEVEL is it here"},
    {"-v", NULL, "--log-level LEVEL is it here"},
    {"--seed", NULL, "a request's own \"seed\" makes its answer repeatable; leave it out"},
    {"-s", NULL, "a request's own \"seed\" makes its answer repeatable; leave it out"},
    {"--temp", NULL, "a request says it; --generation-config chooses the defaults"},
    {"--top-k", NULL, "a request says it; --generation-config chooses the defaults"},
    {"--top-p", NULL, "a request says it; --generation-config chooses the defaults"},
    {"--min-p", NULL, "a request says it; --generation-config chooses the defaults"},
    {"--override-generation-config", NULL, "a request says it; --generation-config chooses the defaults"},
    {"--predict", NULL, "a request says it, as max_tokens; leave it out"},
    {"--n-predict", NULL, "a request says it, as max_tokens; leave it out"},
    {"-n", NULL, "a request says it, as max_tokens; leave it out"},
    {"--threads", NULL, "the GPU computes, and one thread serves; leave it out"},
    {"-t", NULL, "the GPU computes, and one thread serves; leave it out"},
    {"--threads-http", NULL, "the GPU computes, and one thread serves; leave it out"},
    {"--api-server-count", NULL, "the GPU computes, and one thread serves; leave it out"},
    {"--rope-scaling", NULL, "the shape of a model is generated from its spec; leave it out"},
    {"--rope-theta", NULL, "the shape of a model is generated from its spec; leave it out"},
    {"--hf-overrides", NULL, "the shape of a model is generated from its spec; leave it out"},
    {"--enable-lora", NULL, "adapters are not there: merge them into the checkpoint"},
    {"--lora-modules", NULL, "adapters are not there: merge them into the checkpoint"},
    {"--lora", NULL, "adapters are not there: merge them into the checkpoint"},
    {"--speculative-config", NULL, "there is no speculation; leave it out"},
    {"--model-draft", NULL, "there is no speculation; leave it out"},
    {"-md", NULL, "there is no speculation; leave it out"},
    {"--embedding", NULL, "this program generates text; leave it out"},
    {"--embeddings", NULL, "this program generates text; leave it out"},
    {"--task", NULL, "this program generates text; leave it out"},
    {"--runner", NULL, "this program generates text; leave it out"},
    {"--ssl-keyfile", NULL, "TLS is for a proxy before it; leave it out"},
    {"--ssl-certfile", NULL, "TLS is for a proxy before it; leave it out"},
    {"--ssl-key-file", NULL, "TLS is for a proxy before it; leave it out"},
    {"--ssl-cert-file", NULL, "TLS is for a proxy before it; leave it out"},
    {"--allowed-origins", NULL, "pages of other hosts are not allowed; leave it out"},
    {"--slots", NULL, "slots are not told or saved; leave it out"},
    {"--props", NULL, "slots are not told or saved; leave it out"},
    {"--slot-save-path", NULL, "slots are not told or saved; leave it out"},
    {"--context-shift", NULL, "a sequence that is full ends; leave it out"},
    {"--timeout", NULL, "times are fixed: a comment keeps a silent stream alive; leave it out"},
    {"-to", NULL, "times are fixed: a comment keeps a silent stream alive; leave it out"},
    {"--sse-ping-interval", NULL, "times are fixed: a comment keeps a silent stream alive; leave it out"},
};

static const nmk_flags flags = {.program = "nmk-serve",
                                .flag = table,
                                .count = sizeof table / sizeof *table,
                                .refused = refused,
                                .refused_count = sizeof refused / sizeof *refused};

static void usage(FILE *f) {
    fprintf(f, "usage: nmk-serve --checkpoint DIR [flags]     (model %s, up to %d sequences at once)\n", nmk_model_name,
            nmk_most_rows());
    nmk_flags_print(&flags, f, 36);
    fprintf(f,
            "\n"
            "With --device cpu the share is of the host's memory; by default the weights may take all of it, keys and\n"
            "values half of what is free.\n"
            "\n"
            "SIGTERM or SIGINT: no new connections, requests that run are finished; a second one ends them.\n");
}

/* As vLLM reads lengths: k is 1000, K is 1024. */
static bool read_length(const char *text, int64_t *value) {
    static const char units[] = "kKmM";
    static const int64_t times[] = {1000, 1024, 1000000, 1 << 20};
    const char *end, *unit;
    if (!nmk_flag_int(text, 1, INT_MAX, &end, value)) return false;
    if (!*end) return true;
    unit = strchr(units, *end);
    if (!unit || end[1]) return false;
    *value *= times[unit - units];
    return *value <= INT_MAX;
}

static int add_to(const char **list, int *count, int most, const char *name, const char *value) {
    if (!*value) return nmk_flag_bad(&flags, name, "''", "a text that is not empty");
    if (*count == most) return fprintf(stderr, "nmk-serve: %s: at most %d\n", name, most), 2;
    list[(*count)++] = value;
    return 0;
}

static bool read_share(const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    return end != text && !*end && !isspace((unsigned char)*text) && *value > 0 && *value <= 1;
}

static int one_of(const char *name, const char *value, const char *no, const char *yes, bool *is_yes) {
    char expected[64];
    *is_yes = !strcmp(value, yes);
    if (*is_yes || !strcmp(value, no)) return 0;
    snprintf(expected, sizeof expected, "%s or %s", no, yes);
    return nmk_flag_bad(&flags, name, value, expected);
}

static int set_flag(void *user, const char *name, const char *value) {
    settings *s = user;
    int64_t seed;
    if (!strcmp(name, "--checkpoint")) return s->options.checkpoint = value, 0;
    if (!strcmp(name, "--device")) return s->options.device = value, 0;
    if (!strcmp(name, "--kernel")) return s->options.kernel = value, 0;
    if (!strcmp(name, "--variant")) return s->options.variant = value, 0;
    if (!strcmp(name, "--allow-spills")) return s->options.allow_spills = true, 0;
    if (!strcmp(name, "--trace")) return s->trace = value, 0;
    if (!strcmp(name, "--trace-size"))
        return nmk_flag_int(value, 1, 1 << 20, NULL, &s->trace_mib) ? 0
                                                                    : nmk_flag_bad(&flags, name, value, "1 to 1048576");
    if (!strcmp(name, "--host")) return s->host = value, 0;
    if (!strcmp(name, "--help")) return s->help = true, 0;
    if (!strcmp(name, "--version")) return s->version = true, 0;
    if (!strcmp(name, "--api-key")) return add_to(s->key, &s->keys, MOST_KEYS, name, value);
    if (!strcmp(name, "--served-model-name")) return add_to(s->name, &s->names, MOST_NAMES, name, value);
    if (!strcmp(name, "--port"))
        return nmk_flag_int(value, 0, 65535, NULL, &s->port) ? 0 : nmk_flag_bad(&flags, name, value, "0 to 65535");
    if (!strcmp(name, "--max-model-len"))
        return read_length(value, &s->max_len)
                   ? 0
                   : nmk_flag_bad(&flags, name, value, "a number of tokens, such as 8192 or 8K");
    if (!strcmp(name, "--max-batch") || !strcmp(name, "--max-num-seqs"))
        return nmk_flag_int(value, 1, INT_MAX, NULL, &s->max_rows)
                   ? 0
                   : nmk_flag_bad(&flags, name, value, "a whole number from 1");
    if (!strcmp(name, "--response-store-mb"))
        return nmk_flag_int(value, 0, 1 << 20, NULL, &s->kept_mb) ? 0
                                                                  : nmk_flag_bad(&flags, name, value, "0 to 1048576");
    if (!strcmp(name, "--prefill-budget-ms"))
        return nmk_flag_int(value, 1, 1000000, NULL, &s->budget_ms)
                   ? 0
                   : nmk_flag_bad(&flags, name, value, "milliseconds from 1");
    if (!strcmp(name, "--prefill-mode")) {
        bool mixed;
        if (one_of(name, value, "alternate", "mixed", &mixed)) return 2;
        return s->options.prefill_mode = mixed ? NMK_PREFILL_MIXED : NMK_PREFILL_ALTERNATE, 0;
    }
    if (!strcmp(name, "--decode-share"))
        return nmk_flag_int(value, 0, 99, NULL, &s->share) ? 0 : nmk_flag_bad(&flags, name, value, "0 to 99");
    if (!strcmp(name, "--gpu-memory-utilization"))
        return read_share(value, &s->options.memory_share)
                   ? 0
                   : nmk_flag_bad(&flags, name, value, "a number above 0, at most 1");
    if (!strcmp(name, "--chat-template")) return s->chat_template = value, 0;
    if (!strcmp(name, "--generation-config")) return one_of(name, value, "auto", "vllm", &s->no_defaults);
    if (!strcmp(name, "--log-format")) return one_of(name, value, "text", "json", &s->log_json);
    if (!strcmp(name, "--enable-prefix-caching")) return s->no_cache = false, 0;
    if (!strcmp(name, "--no-enable-prefix-caching")) return s->no_cache = true, 0;
    if (!strcmp(name, "--disable-log-requests")) return s->quiet = true, 0;
    if (!strcmp(name, "--log-level"))
        return nmk_log_level_read(value, &s->log_level)
                   ? 0
                   : nmk_flag_bad(&flags, name, value, "debug, info, warning or error");
    if (!strcmp(name, "--random-weights")) {
        if (!nmk_flag_int(value, 0, INT64_MAX, NULL, &seed))
            return nmk_flag_bad(&flags, name, value, "a whole number from 0");
        s->options.random_weights = true, s->options.weights_seed = (uint64_t)seed;
        return 0;
    }
    assert(!"a flag of the table that nothing reads");
    return 2;
}

/* 0, or 2 with a message. */
static int read_flags(settings *s, int argc, char **argv) {
    if (nmk_flags_read(&flags, argc, argv, set_flag, s)) return 2;
    if (s->help || s->version) return 0;
    if (!s->options.checkpoint && !s->options.random_weights)
        return fprintf(stderr, "nmk-serve: --checkpoint DIR is needed (or --random-weights SEED)\n"), 2;
    return 0;
}

/* ---- what the checkpoint says ---- */

typedef struct {
    nmk_tokenizer *tokenizer;
    nmk_template *chat_template;
    const char *template_from;
    char *bos, *eos;
    nmk_request_limits limits;
} texts;

static bool exists(const char *dir, const char *file) {
    char *path = xasprintf("%s/%s", dir, file);
    bool found = access(path, F_OK) == 0;
    free(path);
    return found;
}

/* A JSON object of the folder; *root NULL if there is no such file. */
static int read_object(const char *dir, const char *file, struct json_object **root, nmk_err *e) {
    *root = NULL;
    if (!exists(dir, file)) return 0;
    char *path = xasprintf("%s/%s", dir, file);
    *root = nmk_json_read(path, CONFIG_BYTES_MAX, e);
    int rc = !*root ? -1 : json_object_is_type(*root, json_type_object) ? 0 : nmk_fail(e, "%s: not an object", path);
    free(path);
    return rc;
}

/* A special token of tokenizer_config.json: a text, or an object with its content. */
static char *token_text(struct json_object *config, const char *key) {
    struct json_object *v = nmk_json_get(config, key);
    if (json_object_is_type(v, json_type_object)) v = nmk_json_get(v, "content");
    return json_object_is_type(v, json_type_string) ? xstrdup(json_object_get_string(v)) : NULL;
}

static int read_template(texts *t, const settings *s, struct json_object *config, nmk_err *e) {
    const char *dir = s->options.checkpoint;
    if (s->chat_template) {
        if (nmk_template_load(s->chat_template, NULL, &t->chat_template, e)) return nmk_fail_in(e, "--chat-template");
        t->template_from = s->chat_template;
    } else if (exists(dir, "chat_template.jinja") || nmk_json_get(config, "chat_template")) {
        if (nmk_template_load(dir, NULL, &t->chat_template, e)) return -1;
        t->template_from = exists(dir, "chat_template.jinja") ? "chat_template.jinja" : "tokenizer_config.json";
    }
    return 0;
}

static int read_texts(texts *t, const settings *s, nmk_err *e) {
    int rc = -1;
    const nmk_options *o = &s->options;
    const char *dir = o->checkpoint;
    struct json_object *config = NULL, *generation = NULL;
    nmk_request_limits_init(&t->limits, NMK_VOCAB);
    if (!dir) return s->chat_template ? nmk_fail(e, "--chat-template needs --checkpoint DIR, for its tokenizer") : 0;
    if (!o->random_weights || exists(dir, "tokenizer.json"))
        if (nmk_tokenizer_load(dir, &t->tokenizer, e)) goto out;
    if (read_object(dir, "tokenizer_config.json", &config, e)) goto out;
    if (!s->no_defaults && read_object(dir, "generation_config.json", &generation, e)) goto out;
    if (generation && nmk_request_defaults(&t->limits, generation, e)) {
        nmk_fail_in(e, "%s/generation_config.json", dir);
        goto out;
    }
    t->bos = token_text(config, "bos_token"), t->eos = token_text(config, "eos_token");
    rc = read_template(t, s, config, e);
out:
    json_object_put(config), json_object_put(generation);
    return rc;
}

static void free_texts(texts *t) {
    nmk_template_free(t->chat_template);
    nmk_tokenizer_free(t->tokenizer);
    free(t->bos), free(t->eos);
}

/* ---- running ---- */

static nmk_http *serving;
static volatile sig_atomic_t ending, leaving; /* a signal came; the engine is lost */

static void on_signal(int number) {
    int saved = errno; /* of what was interrupted */
    (void)number;
    nmk_log(NMK_LOG_INFO, ending ? "ending: requests that run are cut" : "draining: finishing what runs");
    nmk_http_drain(serving, ending ? 0 : leaving ? LEAVE_MS : -1);
    ending = 1, errno = saved;
}

static nmk_api *traced;

static void on_trace(int number) {
    int saved = errno;
    (void)number;
    nmk_api_trace_tasks(traced);
    errno = saved;
}

/* trace: SIGUSR1 means something. */
static void catch_signals(nmk_http *http, nmk_api *api, bool trace) {
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    serving = http, traced = api;
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGINT, &a, NULL);
    a.sa_handler = on_trace;
    if (trace) sigaction(SIGUSR1, &a, NULL);
}

static void on_step(void *trace, const nmk_batch_step *step) { nmk_trace_add_step(trace, step); }

static void on_line(void *user, const char *text) {
    nmk_log_line line;
    (void)user;
    nmk_log_begin(&line, NMK_LOG_INFO, "loading");
    nmk_log_text(&line, "what", text);
    nmk_log_end(&line);
}

static int open_engine(nmk_engine **engine, settings *s, nmk_err *e) {
    bool terminal = isatty(STDERR_FILENO) && !s->log_json && s->log_level <= NMK_LOG_INFO;
    s->bar = (nmk_bar){.terminal = terminal ? stderr : NULL, .say = on_line};
    s->options.max_len = (int)s->max_len, s->options.max_batch = (int)s->max_rows;
    s->options.progress = nmk_bar_show, s->options.progress_user = &s->bar;
    int rc = nmk_engine_open(engine, &s->options, e);
    nmk_bar_end(&s->bar);
    malloc_trim(0); /* tables that only loading needed */
    return rc;
}

/* ---- starting again ---- */

/* Takes a number out of the environment; 0: there is none. */
static int inherited(const char *name) {
    int64_t number = 0;
    const char *text = getenv(name);
    if (text && !nmk_flag_int(text, 1, INT_MAX, NULL, &number)) number = 0;
    unsetenv(name);
    return (int)number;
}

static void on_lost(void *http, const char *why) {
    nmk_log_line line;
    nmk_log_begin(&line, NMK_LOG_ERROR, "engine lost");
    nmk_log_text(&line, "reason", why);
    nmk_log_end(&line);
    leaving = 1;
    nmk_http_leave(http, LEAVE_MS);
}

/* Also what others opened, such as the driver. */
static void close_on_exec_but(int kept) {
    DIR *d = opendir("/proc/self/fd");
    for (const struct dirent *entry; d && (entry = readdir(d));) {
        int fd = atoi(entry->d_name);
        if (fd > STDERR_FILENO) fcntl(fd, F_SETFD, fd == kept ? 0 : FD_CLOEXEC);
    }
    if (d) closedir(d);
}

/* Returns only if it fails.  Nothing is closed or joined first: a thread that waits for a silent GPU never ends, and
 * all threads end here. */
static int start_again(const settings *s, int listener, bool stepped, const char *why, nmk_err *e) {
    char number[2][16];
    int restarts = stepped ? 1 : s->restarts + 1;
    nmk_log_line line;
    if (restarts > MOST_RESTARTS) return nmk_fail(e, "started again %d times without a step: %.900s", s->restarts, why);
    nmk_log_begin(&line, NMK_LOG_WARNING, "starting again");
    nmk_log_int(&line, "restarts", restarts);
    nmk_log_end(&line);
    if (restarts > 1) sleep(1); /* it may pass */
    snprintf(number[0], sizeof number[0], "%d", listener);
    snprintf(number[1], sizeof number[1], "%d", restarts);
    close_on_exec_but(listener);
    if (setenv(listen_variable, number[0], 1) || setenv(restarts_variable, number[1], 1) ||
        execv("/proc/self/exe", s->argv))
        nmk_fail(e, "cannot start again: /proc/self/exe: %s", strerror(errno));
    return -1;
}

/* ---- what was found, and what it will cost ---- */

/* Context of each row in the figures of a step; plan.txt has the same. */
enum { FIGURE_TOKENS = 8192 };

typedef struct {
    int rows, context;
    double one_bytes, full_bytes;       /* a step's, with one row and with all */
    double one_tokens_s, full_tokens_s; /* bounds by the memory's nominal rate; 0: not known */
    uint64_t resident_bytes, most_resident_bytes;
} figures;

static figures figures_of(const nmk_stats *t) {
    figures f = {.rows = t->rows, .context = t->max_len < FIGURE_TOKENS ? t->max_len : FIGURE_TOKENS};
    f.one_bytes = (double)nmk_step_bytes(1, f.context);
    f.full_bytes = (double)nmk_step_bytes(f.rows, f.context);
    f.one_tokens_s = t->nominal_bytes_per_s / f.one_bytes;
    f.full_tokens_s = f.rows * t->nominal_bytes_per_s / f.full_bytes;
    f.resident_bytes = nmk_resident_bytes(&f.most_resident_bytes);
    return f;
}

/* Defaults that are not neutral, as "temperature 0.6, top_p 0.95". */
static void defaults_text(const nmk_sampling *s, nmk_buf *b) {
    if (s->temperature != 1) nmk_buf_printf(b, ", temperature %g", s->temperature);
    if (s->top_p != 1) nmk_buf_printf(b, ", top_p %g", s->top_p);
    if (s->top_k) nmk_buf_printf(b, ", top_k %d", s->top_k);
    if (s->min_p != 0) nmk_buf_printf(b, ", min_p %g", s->min_p);
    if (s->repetition_penalty != 1) nmk_buf_printf(b, ", repetition_penalty %g", s->repetition_penalty);
    if (s->max_tokens) nmk_buf_printf(b, ", max_tokens %d", s->max_tokens);
    if (!b->length) nmk_buf_puts(b, ", none");
}

static void print_kernel(const nmk_stats *t, FILE *f) {
    fprintf(f, "  kernel    %s, ", nmk_target_arch);
    if (t->kernel_cached)
        fprintf(f, "from the cache in %.1f s", t->kernel_seconds);
    else
        fprintf(f, "compiled by NVRTC %d.%d in %.1f s", t->nvrtc_major, t->nvrtc_minor, t->kernel_seconds);
    fprintf(f, ": %d registers, %d bytes spilled, %zu bytes of code\n", t->registers, t->spill_bytes, t->code_bytes);
}

static void print_banner(const settings *s, const nmk_stats *t, const texts *x, FILE *f) {
    figures n = figures_of(t);
    nmk_buf defaults = {0};
    defaults_text(&x->limits.defaults, &defaults);
    fprintf(f, "nmk-serve: %s, %d layers, %d experts, %d for a token; opened in %.1f s\n", t->model, t->layers,
            t->experts, t->experts_per_token, t->open_seconds);
    fprintf(f, "  machine   %s, ", t->device);
    if (t->on_gpu) fprintf(f, "%d SMs, ", t->sms);
    fprintf(f, "%.1f GiB of memory", (double)t->memory_bytes / 0x1p30);
    if (t->nominal_bytes_per_s > 0) fprintf(f, ", %.2f TB/s nominal", t->nominal_bytes_per_s / 1e12);
    fprintf(f, "\n");
    if (t->on_gpu) print_kernel(t, f);
    if (x->tokenizer)
        fprintf(f, "  text      tokenizer.json, %s, defaults: %s\n",
                x->template_from ? x->template_from : "no chat template: /v1/completions only", defaults.data + 2);
    else
        fprintf(f, "  text      no tokenizer: prompts and answers of /v1/completions are token ids\n");
    fprintf(f, "  weights   %.1f MiB in %.1f s, %s\n", (double)t->weight_bytes / 0x1p20, t->weights_seconds,
            s->options.random_weights ? "random" : s->options.checkpoint);
    fprintf(f, "  memory    weights %.1f + keys and values %.1f + ", (double)t->weight_bytes / 0x1p20,
            (double)t->kv_bytes / 0x1p20);
    if (t->prefill_bytes) fprintf(f, "chunks of prompts %.1f + ", (double)t->prefill_bytes / 0x1p20);
    fprintf(f, "activations and tables %.1f MiB; %.1f GiB free\n", (double)(t->other_bytes - t->prefill_bytes) / 0x1p20,
            (double)t->free_bytes / 0x1p30);
    fprintf(f, "  room      %d sequences of up to %d tokens; %d + %d pages of %d tokens (full + sliding layers)\n",
            n.rows, t->max_len, t->kv_pages[0], t->kv_pages[1], t->kv_page_tokens);
    if (t->prefill_tokens)
        fprintf(
            f,
            "  prompts   up to %d tokens in a launch of their own; about %lld ms beside sequences that decode, which "
            "keep %lld %% of the time\n",
            t->prefill_tokens, (long long)s->budget_ms, (long long)s->share);
    fprintf(f, "  step      reads %.2f MB with 1 sequence, %.2f MB with %d, of %d tokens each", n.one_bytes / 1e6,
            n.full_bytes / 1e6, n.rows, n.context);
    if (n.one_tokens_s > 0)
        fprintf(f, ":\n            at most %.0f and %.0f tokens/s at the nominal rate", n.one_tokens_s,
                n.full_tokens_s);
    fprintf(f, "\n  host      %.0f MiB resident, %.0f MiB at most so far\n", (double)n.resident_bytes / 0x1p20,
            (double)n.most_resident_bytes / 0x1p20);

    if (s->max_len > t->max_len)
        fprintf(f, "  note      --max-model-len %lld: the memory for keys and values holds no more than %d tokens\n",
                (long long)s->max_len, t->max_len);
    fprintf(f, "  keys      %s\n", s->keys ? "needed" : "none");
    nmk_buf_free(&defaults);
}

static void log_banner(const settings *s, const nmk_stats *t, const texts *x) {
    figures n = figures_of(t);
    nmk_buf defaults = {0};
    nmk_log_line l;
    defaults_text(&x->limits.defaults, &defaults);
    nmk_log_begin(&l, NMK_LOG_INFO, "opened");
    nmk_log_text(&l, "model", t->model);
    nmk_log_int(&l, "layers", t->layers);
    nmk_log_int(&l, "experts", t->experts);
    nmk_log_int(&l, "experts_per_token", t->experts_per_token);
    nmk_log_text(&l, "device", t->device);
    if (t->on_gpu) {
        nmk_log_int(&l, "sms", t->sms);
        nmk_log_text(&l, "kernel", t->kernel_cached ? "cached" : "compiled");
        nmk_log_number(&l, "kernel_s", t->kernel_seconds);
        nmk_log_int(&l, "registers", t->registers);
        nmk_log_int(&l, "spill_bytes", t->spill_bytes);
        nmk_log_number(&l, "nominal_gb_per_s", t->nominal_bytes_per_s / 1e9);
        nmk_log_number(&l, "bound_tokens_per_s_one", n.one_tokens_s);
        nmk_log_number(&l, "bound_tokens_per_s_full", n.full_tokens_s);
    }
    nmk_log_text(&l, "checkpoint", s->options.random_weights ? NULL : s->options.checkpoint);
    nmk_log_text(&l, "tokenizer", x->tokenizer ? "tokenizer.json" : "none");
    nmk_log_text(&l, "chat_template", x->template_from ? x->template_from : "none");
    nmk_log_text(&l, "defaults", defaults.data + 2);
    nmk_log_int(&l, "memory_bytes", (int64_t)t->memory_bytes);
    nmk_log_int(&l, "free_bytes", (int64_t)t->free_bytes);
    nmk_log_int(&l, "weight_bytes", (int64_t)t->weight_bytes);
    nmk_log_int(&l, "kv_bytes", (int64_t)t->kv_bytes);
    nmk_log_int(&l, "other_bytes", (int64_t)t->other_bytes);
    nmk_log_int(&l, "prefill_bytes", (int64_t)t->prefill_bytes);
    nmk_log_int(&l, "kv_pages_full", t->kv_pages[0]);
    nmk_log_int(&l, "kv_pages_sliding", t->kv_pages[1]);
    nmk_log_int(&l, "max_model_len", t->max_len);
    nmk_log_int(&l, "sequences", n.rows);
    nmk_log_int(&l, "step_tokens", n.context);
    nmk_log_int(&l, "step_bytes_one", (int64_t)n.one_bytes);
    nmk_log_int(&l, "step_bytes_full", (int64_t)n.full_bytes);
    nmk_log_int(&l, "prefill_tokens", t->prefill_tokens);
    nmk_log_int(&l, "resident_bytes", (int64_t)n.resident_bytes);
    nmk_log_int(&l, "most_resident_bytes", (int64_t)n.most_resident_bytes);
    nmk_log_number(&l, "weights_s", t->weights_seconds);
    nmk_log_number(&l, "open_s", t->open_seconds);
    nmk_log_end(&l);
    nmk_buf_free(&defaults);
}

static void log_text(nmk_log_level level, const char *message, const char *key, const char *value) {
    nmk_log_line line;
    nmk_log_begin(&line, level, message);
    nmk_log_text(&line, key, value);
    nmk_log_end(&line);
}

static void say_ready(const settings *s, const nmk_stats *t, const texts *x, const nmk_http *http) {
    if (s->log_level <= NMK_LOG_INFO && !s->log_json) print_banner(s, t, x, stderr);
    if (s->log_json) log_banner(s, t, x);
    char *url = xasprintf("http://%s/v1", nmk_http_address(http));
    log_text(NMK_LOG_INFO, "listening", "url", url);
    free(url);
}

static void log_cut(int cut) {
    nmk_log_line line;
    nmk_log_begin(&line, cut ? NMK_LOG_WARNING : NMK_LOG_INFO, "drained");
    nmk_log_int(&line, "cut", cut);
    nmk_log_end(&line);
}

static int serve(settings *s, nmk_err *e) {
    int rc = -1;
    texts x = {0};
    nmk_engine *engine = NULL;
    nmk_batch *batch = NULL;
    nmk_http *http = NULL;
    nmk_trace *trace = NULL;
    nmk_api *api = nmk_api_new();
    nmk_stats stats = {0};
    int32_t stop_ids[sizeof stats.stop_ids / sizeof *stats.stop_ids];
    static const char *const origins[] = {"*"};
    char version[128];
    nmk_http_options http_options = {.host = s->host,
                                     .port = (int)s->port,
                                     .listen_fd = s->listen_fd,
                                     .api_keys = s->key,
                                     .api_key_count = (unsigned)s->keys,
                                     .cors_origins = origins,
                                     .cors_origin_count = 1,
                                     .routes = nmk_api_routes,
                                     .route_count = nmk_api_route_count};
    nmk_batch_stats done;
    log_text(NMK_LOG_INFO, "starting", "model", nmk_model_name);
    if (s->restarts && (!s->options.device || strncmp(s->options.device, "cuda", 4)))
        s->options.device = "cuda:0"; /* that one was lost; not the CPU in its place */
    if (read_texts(&x, s, e)) goto out;
    if (s->trace && nmk_trace_open(&trace, s->trace, (uint64_t)s->trace_mib << 20, nmk_model_name, e)) {
        nmk_fail_in(e, "--trace");
        goto out;
    }
    /* Before the weights, so that a port that is taken is known at once; who connects by then waits. */
    if (nmk_http_open(&http, &http_options, &nmk_api_callbacks, api, e)) goto out;
    if (open_engine(&engine, s, e)) {
        nmk_err why = *e;
        if (s->restarts) {
            log_text(NMK_LOG_ERROR, "engine not opened", "reason", why.text);
            start_again(s, nmk_http_take_listener(http), false, why.text, e);
        }
        goto out;
    }
    nmk_engine_stats(engine, &stats);
    if (nmk_batch_open(&batch, engine, 0, e)) goto out;
    nmk_batch_set_budget(batch, (double)s->budget_ms);
    nmk_batch_set_share(batch, (double)s->share);
    engine = NULL;
    if (trace) nmk_batch_set_on_step(batch, on_step, trace);

    if (!s->names) s->name[s->names++] = stats.model;
    for (int i = 0; i < stats.stop_count; i++) stop_ids[i] = stats.stop_ids[i];
    snprintf(version, sizeof version, "nmk-serve %s %s %016llx", nmk_model_name, nmk_target_arch,
             (unsigned long long)nmk_hash);
    nmk_api_options o = {.batch = batch,
                         .tokenizer = x.tokenizer,
                         .chat_template = x.chat_template,
                         .bos_token = x.bos,
                         .eos_token = x.eos,
                         .names = s->name,
                         .name_count = s->names,
                         .stop_ids = stop_ids,
                         .stop_count = stats.stop_count,
                         .max_len = stats.max_len,
                         .max_rows = (int)s->max_rows,
                         .limits = x.limits,
                         .kept_bytes = (size_t)s->kept_mb << 20,
                         .version = version,
                         .trace = trace,
                         .no_cache = s->no_cache,
                         .quiet = s->quiet};
    nmk_api_start(api, http, &o);
    catch_signals(http, api, trace);
    nmk_batch_set_on_lost(batch, on_lost, http);
    say_ready(s, &stats, &x, http);
    int cut = nmk_http_run(http, e);
    if (cut >= 0) log_cut(cut);
    rc = cut < 0 ? -1 : 0;
    nmk_batch_read_stats(batch, &done);
    if (rc == 0 && done.lost) {
        signal(SIGTERM, SIG_DFL), signal(SIGINT, SIG_DFL); /* one that comes now ends it at once: nobody is left */
        nmk_trace_flush(trace);
        if (!ending) rc = start_again(s, nmk_http_take_listener(http), done.steps > 0, "the engine is lost", e);
    }
    nmk_api_stop(api);
out:
    signal(SIGUSR1, SIG_IGN);
    nmk_batch_stop(batch);
    nmk_trace_close(trace); /* its jobs look at the engine and at the HTTP side */
    nmk_batch_close(batch);
    nmk_engine_close(engine);
    signal(SIGTERM, SIG_IGN), signal(SIGINT, SIG_IGN);
    nmk_http_close(http);
    nmk_api_close(api);
    free_texts(&x);
    return rc;
}

int main(int argc, char **argv) {
    /* who comes or goes waits for the steps that are queued; a GPU is busy with one of them while tokens are read */
    settings s = {.port = 8000,
                  .budget_ms = NMK_BATCH_BUDGET_MS,
                  .share = NMK_BATCH_SHARE,
                  .trace_mib = 64,
                  .kept_mb = 64,
                  .log_level = NMK_LOG_INFO,
                  .argv = argv,
                  .listen_fd = inherited(listen_variable),
                  .restarts = inherited(restarts_variable),
                  .options.steps_ahead = 3};
    nmk_err e = {0};
    int rc = read_flags(&s, argc, argv);
    if (rc) return rc;
    if (s.help) return usage(stdout), 0;
    if (s.version) {
        printf("nmk-serve for %s, target %s, generation %016llx\n", nmk_model_name, nmk_target_arch,
               (unsigned long long)nmk_hash);
        return 0;
    }
    if (s.restarts) prctl(PR_SET_NAME, flags.program); /* not "exe" */
    signal(SIGPIPE, SIG_IGN);                          /* stderr may be a pipe that nobody reads any more */
    signal(SIGUSR1, SIG_IGN);                          /* without a trace, and until it has begun */
    nmk_log_setup(s.log_level, s.log_json, STDERR_FILENO);
    if (serve(&s, &e) == 0) return 0;
    if (s.log_json)
        log_text(NMK_LOG_ERROR, "failed", "reason", e.text);
    else
        fprintf(stderr, "nmk-serve: %s\n", e.text);
    return 1;
}
