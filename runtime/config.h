/* What a checkpoint says about itself: config.json must agree with the model this program was generated for,
 * generation_config.json gives the defaults of a request. */
#ifndef NMK_CONFIG_H
#define NMK_CONFIG_H

#include <stdint.h>

#include "abi.h"
#include "util.h"

/* Compares `dir`/config.json with what the generator wrote down (nmk_configs in abi.h): numbers as numbers, lists
 * element by element, null as absent.  0, or -1 with a line for every contradiction. */
int nmk_config_check(const char *dir, const nmk_config *facts, int count, nmk_err *e);

typedef struct {
    int32_t eos[NMK_STOP_IDS];
    int eos_count;
    int32_t bos; /* -1: none */
    int do_sample;
    double temperature, top_p;
    int64_t top_k; /* 0: off */
} nmk_generation_config;

/* Reads `dir`/generation_config.json (absent: nothing is said); eos and bos that it lacks come from config.json.
 * Defaults: no eos, bos -1, do_sample 0, temperature 1, top_p 1, top_k 0.  0, or -1 with the reason. */
int nmk_generation_config_read(const char *dir, nmk_generation_config *g, nmk_err *e);

#endif
