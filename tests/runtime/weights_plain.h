/* The packed layout once more, byte by byte as its description says: what templates/packed.h is judged by. */
#ifndef NMK_TESTS_WEIGHTS_PLAIN_H
#define NMK_TESTS_WEIGHTS_PLAIN_H

#include <string.h>

#include "abi.h"

typedef unsigned short u16;

/* dst: the packed form of a natural matrix. */
static void plain_pack(u16 *dst, const u16 *src, int rows, int cols, int layout) {
    int kp = (cols + 255) / 256 * 256, granules = kp / 256, tiles = 2 * granules;
    int ts = tiles % 4 == 0 ? 4 : tiles % 3 == 0 ? 3 : tiles % 2 == 0 ? 2 : 1, stages = tiles / ts;
    for (int c = 0; c < rows / 16; c++)
        for (int s = 0; s < stages; s++)
            for (int w = 0; w < 8; w++)
                for (int i = 0; i < ts; i++)
                    for (int lane = 0; lane < 32; lane++) {
                        int ii = s * ts + i, g = lane >> 2, t = lane & 3;
                        int k0 =
                            ts % 2 == 0 ? s * ts * 128 + w * ts * 16 + (i >> 1) * 32 : w * tiles * 16 + (ii >> 1) * 32;
                        int k = k0 + 8 * t + 4 * (ii & 1);
                        int a = 16 * c + g, b = 16 * c + g + 8;
                        if (layout == NMK_LAYOUT_PAIRS) a = 16 * c + 2 * g, b = a + 1;
                        if (layout == NMK_LAYOUT_GATE_UP) a = 8 * c + g, b = rows / 2 + 8 * c + g;
                        if (layout == NMK_LAYOUT_HALVES64 || layout == NMK_LAYOUT_HALVES128) {
                            int head = layout == NMK_LAYOUT_HALVES64 ? 64 : 128, tiles_of = head / 16;
                            a = c / tiles_of * head + c % tiles_of * 8 + g, b = a + head / 2;
                        }
                        int row[8] = {a, a, b, b, a, a, b, b},
                            col[8] = {k, k + 1, k, k + 1, k + 2, k + 3, k + 2, k + 3};
                        for (int j = 0; j < 8; j++) {
                            u16 v = col[j] < cols ? src[(size_t)row[j] * (size_t)cols + (size_t)col[j]] : 0;
                            *dst++ = v;
                        }
                    }
}

/* All that one matrix (or vector) of an array takes up on the GPU, given its natural form. */
static void plain_element(u16 *dst, const nmk_array *a, const u16 *natural) {
    memset(dst, 0, (size_t)a->expert_kib * 1024);
    if (a->layout == NMK_LAYOUT_VECTOR)
        memcpy(dst, natural, (size_t)a->cols * 2);
    else
        plain_pack(dst, natural, a->rows, a->cols, a->layout);
}

#endif
