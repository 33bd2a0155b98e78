/* nmk: runs one generated model.  The only header that programs on top of the runtime include.
 *
 * An engine holds a model's weights on one machine (a GPU or this CPU), the pages of keys and values of the sequences
 * that it decodes together, and the step loop.  One thread at a time may use an engine.  Strings and arrays passed in
 * stay the caller's and are not kept, unless said otherwise.  Functions return 0, or -1 with a message in *e. */
#ifndef NMK_H
#define NMK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

enum { NMK_ROWS = 64 };    /* sequences an engine decodes together, at most */
extern const int nmk_rows; /* those that this program's does, unless it is opened for another number, */
int nmk_most_rows(void);   /* at most this one */

typedef struct nmk_engine nmk_engine;

/* What opening an engine is busy with. */
typedef enum {
    NMK_PHASE_COMPILE, /* NVRTC compiles the kernel */
    NMK_PHASE_CACHED,  /* it did so at an earlier start */
    NMK_PHASE_LOAD,    /* the kernel, onto the GPU */
    NMK_PHASE_WEIGHTS
} nmk_phase;

/* How rows that decode and prompts that are fed share a machine. */
typedef enum {
    NMK_PREFILL_ALTERNATE, /* steps and chunks take turns */
    NMK_PREFILL_MIXED      /* a step and a chunk go in one launch, each SM from one to the other */
} nmk_prefill_mode;

/* Zeroed is: automatic device, everything else as generated. */
typedef struct {
    const char *checkpoint; /* folder with config.json and safetensors; may be NULL with random_weights */
    const char *device;     /* "auto" or NULL: cuda:0 if there is a driver and a GPU, else cpu; "cpu"; "cuda:N" */
    bool random_weights;    /* instead of the checkpoint's */
    uint64_t weights_seed;
    int max_batch;     /* sequences decoded together: steps have the columns for them; 0: nmk_rows */
    int max_len;       /* tokens a sequence may have, prompt included; 0: what the model allows, at most 256 Ki */
    uint64_t kv_bytes; /* most memory for keys and values; 0: what max_batch sequences need, within memory_share */
    int cpu_threads;   /* of the CPU machine; 0: one per core, at most 16 */
    int ring_stages;   /* depth of the weight ring, at most as generated; 0: as generated */
    int in_flight;     /* ring stages on their way at once; 0: as generated for the number of rows */
    int steps_ahead;   /* steps queued before the host has read their tokens; 0: 8 */
    bool no_prefill;   /* prompts go through steps, as in models that have no launches for them */
    nmk_prefill_mode prefill_mode;
    bool allow_spills;   /* run a kernel that spills registers */
    const char *kernel;  /* CUDA file to compile instead of the kernel built in, for trying changes; NULL: built in */
    const char *variant; /* folder of `nmkgen variant`: a schedule in place of the one built in; NULL: built in */
    /* Above 0 to 1, of the machine's memory: what weights, keys, values and buffers may take together.  0: 0.9 of a
     * GPU's; on the CPU the weights may take all, keys and values half of what is free. */
    double memory_share;
    /* While opening, on its thread; may be NULL.  done of total bytes of NMK_PHASE_WEIGHTS; 0 or 1 of 1 elsewhere. */
    void (*progress)(void *user, nmk_phase phase, uint64_t done, uint64_t total);
    void *progress_user;
} nmk_options;

/* Loads everything; seconds to minutes.  *engine is the caller's, to be closed; untouched on failure. */
int nmk_engine_open(nmk_engine **engine, const nmk_options *options, nmk_err *e);
void nmk_engine_close(nmk_engine *engine); /* NULL is fine */

typedef enum {
    NMK_FINISH_NONE,   /* not finished: the call failed before */
    NMK_FINISH_STOP,   /* a stop id, which is the last token given */
    NMK_FINISH_LENGTH, /* max_tokens, or the sequence is full */
    NMK_FINISH_CANCEL  /* the callback asked for it */
} nmk_finish;

typedef struct {
    int32_t token;
    float bias;
} nmk_bias;

enum { NMK_TOP_LOGPROBS = 20 }; /* most alternatives to a token */

/* How tokens are drawn.  Applied in vLLM's order: mask, bias, penalties, temperature, min_p, top_k, top_p; each of the
 * last three keeps the most likely tokens, top_p by the mass of those that the other two left.  Tokens whose distances
 * from the best one, in logits, differ by less than one part in 2^19 stay or go together.  Zeroed: greedy, everything
 * off. */
typedef struct {
    float temperature;                         /* 0: greedy; top_k, top_p and min_p then change nothing */
    uint64_t seed;                             /* same seed, same text, whatever else is in the batch */
    int top_k;                                 /* 0: all */
    float top_p;                               /* 0 or 1: all */
    float min_p;                               /* least probability, in units of the most likely token's; 0: all */
    float presence_penalty, frequency_penalty; /* of tokens generated; 0: off */
    float repetition_penalty;                  /* of tokens in the prompt or generated; 0 or 1: off */
    const nmk_bias *bias;                      /* added to logits; each token once */
    int bias_count;
    bool masked;  /* only tokens of a mask, which comes for each step: for servers, see engine.h */
    int logprobs; /* 0: none; n: of the token given and of the n - 1 most likely ones, n at most NMK_TOP_LOGPROBS + 1 */
} nmk_sampler;

/* Whether a sampler is one: ranges, and tokens below vocab. */
int nmk_sampler_check(const nmk_sampler *sampler, int vocab, nmk_err *e);

/* Log-probabilities by the model alone: before bias, penalties and temperature, of the tokens of the mask. */
typedef struct {
    float chosen; /* of the token given */
    int count;    /* alternatives, the most likely first */
    int32_t id[NMK_TOP_LOGPROBS];
    float logprob[NMK_TOP_LOGPROBS];
} nmk_logprobs;

typedef struct {
    const int32_t *prompt; /* token ids */
    int prompt_tokens;     /* at least 1 */
    int max_tokens;        /* at least 1; cut so that prompt and answer fit max_len */
    nmk_sampler sampler;
    /* results */
    int tokens; /* generated */
    nmk_finish finish;
} nmk_request;

/* A generated token of request `index`, in order; called on the generating thread.  logprobs is good during the call;
 * NULL: not asked for.  Nonzero ends that request. */
typedef int (*nmk_token_fn)(void *user, int index, int32_t token, const nmk_logprobs *logprobs);

enum { NMK_IGNORE_STOP = 1 }; /* go on after stop ids */

/* Feeds all prompts and decodes them together as one ragged batch, to the end of all; count is at most stats.rows.
 * After a failure the engine is usable again unless the message says that it is lost. */
int nmk_engine_generate(nmk_engine *engine, nmk_request *requests, int count, unsigned flags, nmk_token_fn on_token,
                        void *user, nmk_err *e);

typedef struct {
    const char *model, *device; /* the engine's; device: "cuda:0 (NVIDIA H200)" or "cpu (2 threads)" */
    bool on_gpu;
    int rows, columns;  /* sequences decoded together; of a step */
    int prefill_tokens; /* of prompts that one launch takes; 0: they go through steps */
    int max_len;        /* tokens of a sequence: the option's, or as many as the memory for keys and values holds */
    int vocab;
    int stop_ids[16], stop_count;
    int layers, experts, experts_per_token;
    uint64_t weight_bytes, kv_bytes, other_bytes; /* other: activations, tables, task lists, control */
    uint64_t prefill_bytes;                       /* of these, what launches that take prompts need */
    uint64_t memory_bytes, free_bytes;            /* of the machine: in all, left after opening */
    int kv_pages[2], kv_page_tokens;              /* full, sliding layers */
    int sms;                                      /* of the GPU */
    double nominal_bytes_per_s; /* of the GPU's memory, by clock and width; 0: the driver does not say */
    int nvrtc_major, nvrtc_minor;
    double open_seconds, weights_seconds,
        kernel_seconds; /* kernel: compiling or reading it from the cache, and loading */
    bool kernel_cached;
    int registers, spill_bytes;
    size_t code_bytes;
    /* of the last nmk_engine_generate */
    int prompt_tokens, prompt_steps, tokens, decode_steps;
    double prompt_seconds, decode_seconds;
} nmk_stats;

void nmk_engine_stats(const nmk_engine *engine, nmk_stats *stats);

/* Bytes that a step streams which decodes `rows` rows of `context` tokens, each byte once, if routing is uniform: what
 * bounds its speed.  1 <= rows <= nmk_most_rows(). */
uint64_t nmk_step_bytes(int rows, int context);

#endif
