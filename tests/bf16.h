/* bf16 as float. */
#ifndef NMK_TESTS_BF16_H
#define NMK_TESTS_BF16_H

#include <stdint.h>

static inline float bf16(uint16_t v) {
    union {
        uint32_t u;
        float f;
    } x = {(uint32_t)v << 16};
    return x.f;
}

#endif
