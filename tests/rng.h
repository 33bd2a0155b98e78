/* Random numbers for tests: the same in every run. */
#ifndef NMK_TESTS_RNG_H
#define NMK_TESTS_RNG_H

#include <stdint.h>

static uint64_t rng_state = 1;

/* splitmix64 */
__attribute__((unused)) static uint32_t rng(void) {
    uint64_t z = rng_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 16 ^ z >> 33);
}

#endif
