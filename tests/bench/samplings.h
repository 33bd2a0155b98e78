/* Ways to draw a token that are measured, all at temperature 1 but the first: as the engine takes them, and as a request
 * states them. */
#ifndef NMK_BENCH_SAMPLINGS_H
#define NMK_BENCH_SAMPLINGS_H

#include "nmk.h"

static const struct {
    const char *name;
    nmk_sampler sampler;
    const char *fields; /* of /v1/completions */
} samplings[] = {
    {"greedy", {.temperature = 0}, "\"temperature\":0"},
    {"temperature", {.temperature = 1}, "\"temperature\":1"},
    {"top_p", {.temperature = 1, .top_p = 0.95f}, "\"temperature\":1,\"top_p\":0.95"},
    {"top_k", {.temperature = 1, .top_k = 50}, "\"temperature\":1,\"top_k\":50"},
    {"min_p", {.temperature = 1, .min_p = 0.05f}, "\"temperature\":1,\"min_p\":0.05"},
    {"all",
     {.temperature = 1, .top_k = 1000, .top_p = 0.95f, .min_p = 0.001f},
     "\"temperature\":1,\"top_k\":1000,\"top_p\":0.95,\"min_p\":0.001"},
    {"penalties",
     {.temperature = 1, .presence_penalty = 0.5f, .repetition_penalty = 1.1f},
     "\"temperature\":1,\"presence_penalty\":0.5,\"repetition_penalty\":1.1"},
    {"logprobs", {.temperature = 1, .logprobs = 21}, "\"temperature\":1,\"logprobs\":20"},
};
enum { SAMPLINGS = sizeof samplings / sizeof *samplings };

#endif
