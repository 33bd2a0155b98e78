/* nmk-serve: an OpenAI-compatible server for the model this program was built for.
 *
 * Everything for people goes to stderr.  Exit 0: drained after a signal.  1: it failed.  2: wrong flags. */
#include <assert.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "abi.h"
#include "api.h"
#include "json.h"
#include "flags.h"
#include "nmk.h"

enum { MOST_KEYS = 64, MOST_NAMES = 16, CONFIG_BYTES_MAX = 16 << 20 };

/* ---- flags ---- */

typedef struct {
    nmk_options options;
    const char *host;
    int64_t port, max_len, max_rows;
    const char *key[MOST_KEYS], *name[MOST_NAMES];
    int keys, names;
    bool help, version;
} settings;

static const nmk_flag table[] = {
    {"--checkpoint", "DIR", "folder with config.json, tokenizer.json and safetensors"},
    {"--host", "ADDRESS", "where to listen (127.0.0.1); 0.0.0.0 or :: for everybody"},
    {"--port", "N", "0 takes a free one (8000)"},
    {"--api-key", "KEY", "clients must send it as Authorization: Bearer; repeatable"},
    {"--served-model-name", "NAME", "what requests call the model; repeatable (the model's own name)"},
    {"--max-model-len", "N", "tokens of prompt and answer; 32k and 32K are understood"},
    {"--max-num-seqs", "N", "sequences decoded together, at most as many as generated"},
    {"--device", "NAME", "auto, cpu or cuda:N (auto)"},
    {"--random-weights", "SEED", "in place of the checkpoint's weights"},
    {"--help", NULL, "print this"},
    {"--version", NULL, "print which model this program serves"},
};

static const nmk_flags flags = {"nmk-serve", table, sizeof table / sizeof *table};

static void usage(FILE *f) {
    fprintf(f, "usage: nmk-serve --checkpoint DIR [flags]     (model %s, up to %d sequences at once)\n", nmk_model_name,
            nmk_rows);
    nmk_flags_print(&flags, f, 28);
    fprintf(
        f, "\n"
           "Not yet: top_p, top_k, min_p, penalties, logit_bias and logprobs.  A request that asks for one is refused\n"
           "with status 400; a default of generation_config.json is left out.  temperature and seed work.\n"
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

static int set_flag(void *user, const char *name, const char *value) {
    settings *s = user;
    int64_t seed;
    if (!strcmp(name, "--checkpoint")) return s->options.checkpoint = value, 0;
    if (!strcmp(name, "--device")) return s->options.device = value, 0;
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
    if (!strcmp(name, "--max-num-seqs"))
        return nmk_flag_int(value, 1, INT_MAX, NULL, &s->max_rows)
                   ? 0
                   : nmk_flag_bad(&flags, name, value, "a whole number from 1");
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

/* The device cannot cut distributions yet: a default that asks for it is left out, and that is said. */
static void leave_out(nmk_sampling *s) {
    nmk_buf said = {0};
    if (s->top_p != 1) nmk_buf_printf(&said, ", top_p %g", s->top_p);
    if (s->top_k) nmk_buf_printf(&said, ", top_k %d", s->top_k);
    if (s->min_p != 0) nmk_buf_printf(&said, ", min_p %g", s->min_p);
    if (s->repetition_penalty != 1) nmk_buf_printf(&said, ", repetition_penalty %g", s->repetition_penalty);
    if (said.length)
        fprintf(stderr, "nmk-serve: generation_config.json asks for %s: not possible yet, left out\n", said.data + 2);
    nmk_buf_free(&said);
    s->top_p = 1, s->top_k = 0, s->min_p = 0, s->repetition_penalty = 1;
}

static int read_texts(texts *t, const nmk_options *o, nmk_err *e) {
    int rc = -1;
    const char *dir = o->checkpoint;
    struct json_object *config = NULL, *generation = NULL;
    nmk_request_limits_init(&t->limits, NMK_VOCAB);
    if (!dir) return 0;
    if (!o->random_weights || exists(dir, "tokenizer.json"))
        if (nmk_tokenizer_load(dir, &t->tokenizer, e)) goto out;
    if (read_object(dir, "tokenizer_config.json", &config, e)) goto out;
    if (read_object(dir, "generation_config.json", &generation, e)) goto out;
    if (generation && nmk_request_defaults(&t->limits, generation, e)) {
        nmk_fail_in(e, "%s/generation_config.json", dir);
        goto out;
    }
    leave_out(&t->limits.defaults);
    t->bos = token_text(config, "bos_token"), t->eos = token_text(config, "eos_token");
    if (exists(dir, "chat_template.jinja") || nmk_json_get(config, "chat_template"))
        if (nmk_template_load(dir, NULL, &t->chat_template, e)) goto out;
    rc = 0;
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

static void on_signal(int number) {
    static volatile sig_atomic_t times;
    static const char first[] = "nmk-serve: finishing what runs; once more ends it\n", again[] = "nmk-serve: ending\n";
    ssize_t ignored = times ? write(STDERR_FILENO, again, sizeof again - 1) //
                            : write(STDERR_FILENO, first, sizeof first - 1);
    (void)ignored, (void)number;
    nmk_http_drain(serving, times ? 0 : -1);
    times = 1;
}

static void catch_signals(nmk_http *http) {
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    serving = http;
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGINT, &a, NULL);
}

static void on_progress(void *user, uint64_t done, uint64_t total) {
    static int last = -1;
    int percent = total ? (int)(done * 100 / total) : 100;
    (void)user;
    if (percent == last) return;
    last = percent;
    fprintf(stderr, "\rweights: %3d%% of %.1f GiB%s", percent, (double)total / 0x1p30, done == total ? "\n" : "");
}

/* Another engine in place of one that is lost, with the same options. */
static int open_again(void *user, nmk_engine **engine, nmk_err *e) {
    const nmk_options *options = user;
    fprintf(stderr, "nmk-serve: the engine is lost, opening it anew\n");
    if (nmk_engine_open(engine, options, e)) return fprintf(stderr, "nmk-serve: %s\n", e->text), -1;
    fprintf(stderr, "nmk-serve: the engine is there again\n");
    return 0;
}

static void banner(const settings *s, const nmk_stats *t, const texts *x, const nmk_http *http) {
    int64_t rows = s->max_rows && s->max_rows < nmk_rows ? s->max_rows : nmk_rows;
    fprintf(stderr, "nmk-serve: %s on %s, opened in %.1f s\n", t->model, t->device, t->open_seconds);
    fprintf(stderr, "  weights   %.1f MiB, %s\n", (double)t->weight_bytes / 0x1p20,
            s->options.random_weights ? "random" : s->options.checkpoint);
    if (t->on_gpu)
        fprintf(stderr, "  kernel    %s in %.1f s, %d registers\n", t->kernel_cached ? "from the cache" : "compiled",
                t->kernel_seconds, t->registers);
    fprintf(stderr, "  room      %d sequences of %d tokens, keys and values %.1f MiB\n", (int)rows, t->max_len,
            (double)t->kv_bytes / 0x1p20);
    if (s->max_rows > nmk_rows)
        fprintf(stderr, "  note      --max-num-seqs %lld: this program decodes %d at once, the others wait\n",
                (long long)s->max_rows, nmk_rows);
    if (!x->tokenizer)
        fprintf(stderr, "  note      no tokenizer: prompts and answers of /v1/completions are token ids\n");
    else if (!x->chat_template)
        fprintf(stderr, "  note      no chat template: /v1/completions only\n");
    fprintf(stderr, "  keys      %s\n", s->keys ? "needed" : "none");
    fprintf(stderr, "  address   http://%s/v1\n", nmk_http_address(http));
}

static int serve(settings *s, nmk_err *e) {
    int rc = -1;
    texts x = {0};
    nmk_engine *engine = NULL;
    nmk_batch *batch = NULL;
    nmk_http *http = NULL;
    nmk_api *api = nmk_api_new();
    nmk_stats stats = {0};
    int32_t stop_ids[sizeof stats.stop_ids / sizeof *stats.stop_ids];
    static const char *const origins[] = {"*"};
    char version[128];
    nmk_http_options http_options = {.host = s->host,
                                     .port = (int)s->port,
                                     .api_keys = s->key,
                                     .api_key_count = (unsigned)s->keys,
                                     .cors_origins = origins,
                                     .cors_origin_count = 1,
                                     .routes = nmk_api_routes,
                                     .route_count = nmk_api_route_count};
    if (read_texts(&x, &s->options, e)) goto out;
    /* Before the weights, so that a port that is taken is known at once; who connects by then waits. */
    if (nmk_http_open(&http, &http_options, &nmk_api_callbacks, api, e)) goto out;
    s->options.max_len = (int)s->max_len;
    if (isatty(STDERR_FILENO)) s->options.progress = on_progress;
    if (nmk_engine_open(&engine, &s->options, e)) goto out;
    nmk_engine_stats(engine, &stats);
    if (stats.on_gpu && (!s->options.device || strncmp(s->options.device, "cuda", 4)))
        s->options.device = "cuda:0"; /* that one again if it is lost, not the CPU */
    if (nmk_batch_open(&batch, engine, 0, e)) goto out;
    engine = NULL;
    nmk_batch_set_reopen(batch, open_again, &s->options);

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
                         .max_rows = s->max_rows && s->max_rows < nmk_rows ? (int)s->max_rows : 0,
                         .limits = x.limits,
                         .version = version};
    nmk_api_start(api, http, &o);
    catch_signals(http);
    banner(s, &stats, &x, http);
    int cut = nmk_http_run(http, e);
    if (cut > 0) fprintf(stderr, "nmk-serve: %d request%s cut\n", cut, cut == 1 ? " was" : "s were");
    rc = cut < 0 ? -1 : 0;
    nmk_api_stop(api);
out:
    nmk_batch_close(batch);
    nmk_engine_close(engine);
    signal(SIGTERM, SIG_IGN), signal(SIGINT, SIG_IGN);
    nmk_http_close(http);
    nmk_api_close(api);
    free_texts(&x);
    return rc;
}

int main(int argc, char **argv) {
    settings s = {.port = 8000};
    nmk_err e = {0};
    int rc = read_flags(&s, argc, argv);
    if (rc) return rc;
    if (s.help) return usage(stdout), 0;
    if (s.version) {
        printf("nmk-serve for %s, target %s, generation %016llx\n", nmk_model_name, nmk_target_arch,
               (unsigned long long)nmk_hash);
        return 0;
    }
    signal(SIGPIPE, SIG_IGN); /* stderr may be a pipe that nobody reads any more */
    if (serve(&s, &e)) return fprintf(stderr, "nmk-serve: %s\n", e.text), 1;
    return 0;
}
