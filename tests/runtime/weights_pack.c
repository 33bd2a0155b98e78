/* The packed form: the text of templates/pack.cu, compiled as C and run by threads that take turns, against the layout
 * written down a second time, byte by byte; and random weights of the CPU machine against those of the GPU. */
#include "weights.h"

#include <math.h>

#include "bf16.h"
#include "weights_helper.h"
#include "weights_kernels.h"
#include "weights_plain.h"

/* ---------------------------------------------------------------- the layout */

static const char *const layout_names[] = {"rows", "pairs", "gate_up", "vector", "halves64", "halves128"};

static void test_layout(int layout, int rows, int cols) {
    size_t natural = (size_t)rows * (size_t)cols, packed = (size_t)nmk_packed_bytes(rows, cols, layout) / 2;
    u16 *src = xcalloc(natural, 2), *part = xcalloc(natural, 2), *got = xcalloc(packed + 1, 2),
        *expected = xcalloc(packed + 1, 2);
    unsigned x = 99;
    for (size_t i = 0; i < natural; i++) x = x * 1664525u + 1013904223u, src[i] = (u16)(x >> 16);
    memset(got, 0xee, packed * 2);
    plain_pack(expected, src, rows, cols, layout);
    /* In parts, as tensors and staging buffers cut it, last part first. */
    int half = layout == NMK_LAYOUT_GATE_UP ? rows / 2 : rows, unit = nmk_packed_unit(layout);
    for (int end = rows; end > 0;) {
        int low = end > half ? half : 0, first = end - 3 * unit < low ? low : end - 3 * unit;
        size_t n = (size_t)(end - first) * (size_t)cols;
        memcpy(part, src + (size_t)first * (size_t)cols, n * 2);
        GRID(3, 64, nmk_pack(got, part, rows, cols, first, end - first, layout));
        end = first;
    }
    size_t at = 0;
    while (at < packed && got[at] == expected[at]) at++;
    char name[96];
    snprintf(name, sizeof name, "pack %s [%d][%d], %d tiles per stage", layout_names[layout], rows, cols,
             nmk_packed_stage_tiles(nmk_packed_cols(cols)));
    check(at == packed, name, "element %zu: expected %04x, found %04x", at, expected[at], got[at]);
    free(src), free(part), free(got), free(expected);
}

/* Every natural element lies in exactly one place, and the rest is zero. */
static void test_bijection(int layout, int rows, int cols) {
    size_t natural = (size_t)rows * (size_t)cols, packed = (size_t)nmk_packed_bytes(rows, cols, layout) / 2;
    u16 *src = xcalloc(natural, 2), *got = xcalloc(packed, 2);
    unsigned char *seen = xcalloc(natural + 1, 1);
    for (size_t i = 0; i < natural; i++) src[i] = (u16)(i + 1);
    if (layout == NMK_LAYOUT_GATE_UP) {
        GRID(1, 256, nmk_pack(got, src, rows, cols, 0, rows / 2, layout));
        GRID(1, 256, nmk_pack(got, src + natural / 2, rows, cols, rows / 2, rows / 2, layout));
    } else {
        GRID(1, 256, nmk_pack(got, src, rows, cols, 0, rows, layout));
    }
    size_t once = 0, zeros = 0;
    for (size_t i = 0; i < packed; i++) {
        if (got[i] == 0)
            zeros++;
        else
            once += !seen[got[i]], seen[got[i]] = 1;
    }
    char name[96];
    snprintf(name, sizeof name, "unpack %s [%d][%d]", layout_names[layout], rows, cols);
    check(once == natural && zeros == packed - natural, name, "%zu of %zu elements, %zu zeros", once, natural, zeros);
    free(src), free(got), free(seen);
}

static void test_vector(int cols) {
    size_t n = (size_t)nmk_packed_bytes(1, cols, NMK_LAYOUT_VECTOR) / 2, wrong = 0;
    u16 *src = xcalloc((size_t)cols, 2), *got = xcalloc(n, 2);
    memset(got, 0xee, n * 2);
    for (int i = 0; i < cols; i++) src[i] = (u16)(i * 3 + 1);
    int part = cols / 3;
    GRID(2, 32, nmk_pack(got, src + part, 1, cols, part, cols - part, NMK_LAYOUT_VECTOR));
    GRID(2, 32, nmk_pack(got, src, 1, cols, 0, part, NMK_LAYOUT_VECTOR));
    for (size_t i = 0; i < n; i++) wrong += got[i] != (i < (size_t)cols ? (u16)(i * 3 + 1) : 0);
    check(wrong == 0 && n % 512 == 0, "pack a vector of two parts", "%zu wrong of %zu", wrong, n);
    free(src), free(got);
}

/* Rows that the last tile lacks are zero. */
static void test_short(int layout, int rows, int cols) {
    int all = (rows + 15) / 16 * 16;
    size_t packed = (size_t)nmk_packed_bytes(all, cols, layout) / 2, at = 0;
    /* One more, for the message that nobody needs. */
    u16 *src = xcalloc((size_t)all * (size_t)cols, 2), *got = xcalloc(packed + 1, 2),
        *expected = xcalloc(packed + 1, 2);
    for (int i = 0; i < rows * cols; i++) src[i] = (u16)(i * 7 + 1);
    memset(got, 0xee, packed * 2);
    plain_pack(expected, src, all, cols, layout);
    u16 *only = xmalloc((size_t)rows * (size_t)cols * 2);
    memcpy(only, src, (size_t)rows * (size_t)cols * 2);
    GRID(1, 96, nmk_pack(got, only + 16 * cols, all, cols, 16, rows - 16, layout));
    GRID(1, 96, nmk_pack(got, only, all, cols, 0, 16, layout));
    while (at < packed && got[at] == expected[at]) at++;
    char name[96];
    snprintf(name, sizeof name, "pack %s [%d][%d] into %d rows", layout_names[layout], rows, cols, all);
    check(at == packed, name, "element %zu: expected %04x, found %04x", at, expected[at], got[at]);
    free(src), free(got), free(expected), free(only);
}

/* ---------------------------------------------------------------- random weights */

static void test_random(const nmk_array *a) {
    size_t bytes = (size_t)a->layers * (size_t)a->layer_kib * 1024;
    char *natural = xcalloc(bytes, 1), *filled = xcalloc(bytes, 1), *packed = xcalloc(bytes, 1);
    nmk_array at0 = *a;
    at0.kib = 0;
    nmk_weight_tables tables = {&at0, 1, NULL, 0};
    nmk_random_spec r = nmk_random_spec_of(&at0, 7);
    int elements = a->experts ? a->experts : 1;
    double sum = 0, squares = 0, n = 0;
    nmk_random_load_host(&tables, natural, 7);
    for (int layer = a->layer0; layer < a->layer0 + a->layers; layer++) {
        u16 *to = (u16 *)(void *)(filled + nmk_array_at(&at0, layer, 0));
        GRID(2, 256,
             nmk_random_fill(to, elements, layer * elements, a->rows, a->cols, a->layout, r.key, r.offset, r.step));
        for (int x = 0; x < elements; x++) {
            size_t at = nmk_array_at(&at0, layer, x);
            const u16 *m = (u16 *)(void *)(natural + at);
            plain_element((u16 *)(void *)(packed + at), a, m);
            for (int i = 0; i < a->rows * a->cols; i++) {
                double v = bf16(m[i]);
                sum += v, squares += v * v, n++;
            }
        }
    }
    char name[96];
    snprintf(name, sizeof name, "random %s: the same numbers on both machines", a->name);
    check(memcmp(filled, packed, bytes) == 0, name, "they differ");
    double mean = sum / n, deviation = sqrt(squares / n - mean * mean), scale = sqrt(a->cols) * deviation;
    snprintf(name, sizeof name, "random %s: mean and deviation", a->name);
    if (a->layout == NMK_LAYOUT_VECTOR)
        check(fabs(mean - 1) < 0.02 && fabs(deviation - 0.0577) < 0.01, name, "%g %g", mean, deviation);
    else
        check(fabs(mean) < 0.05 * deviation && fabs(scale - (strstr(a->name, "down") ? 0.5 : 1)) < 0.02, name, "%g %g",
              mean, scale);
    free(natural), free(filled), free(packed);
}

int main(void) {
    static const int shapes[][2] = {{32, 256}, {64, 512},  {32, 768},      {48, 2048}, {32, 1536},
                                    {96, 96},  {32, 1280}, {32, 2560 - 8}, {64, 304},  {32, 8}};
    for (int layout = NMK_LAYOUT_ROWS; layout <= NMK_LAYOUT_GATE_UP; layout++) {
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) test_layout(layout, shapes[i][0], shapes[i][1]);
        test_bijection(layout, 32, 96), test_bijection(layout, 16, 768), test_bijection(layout, 32, 1024);
    }
    test_short(NMK_LAYOUT_ROWS, 33, 256), test_short(NMK_LAYOUT_ROWS, 47, 96);
    /* heads of 64 and of 128 rows */
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        test_layout(NMK_LAYOUT_HALVES64, shapes[i][0] * 4, shapes[i][1]);
        test_layout(NMK_LAYOUT_HALVES128, shapes[i][0] * 8, shapes[i][1]);
    }
    test_bijection(NMK_LAYOUT_HALVES64, 128, 96), test_bijection(NMK_LAYOUT_HALVES128, 128, 256);
    test_vector(100), test_vector(512), test_vector(2048);
    static const nmk_array arrays[] = {
        {"qkv", NMK_LAYOUT_PAIRS, 0, 2, 0, 64, 512, 9, 64, 64},
        {"qkv_64", NMK_LAYOUT_HALVES64, 0, 2, 0, 192, 256, 9, 96, 96},
        {"qkv_128", NMK_LAYOUT_HALVES128, 0, 1, 0, 256, 512, 9, 256, 256},
        {"up", NMK_LAYOUT_GATE_UP, 1, 2, 3, 96, 256, 9, 144, 48},
        {"down", NMK_LAYOUT_ROWS, 1, 1, 3, 64, 96, 9, 96, 32},
        {"down_odd", NMK_LAYOUT_ROWS, 0, 2, 0, 32, 776, 9, 64, 64},
        {"norm", NMK_LAYOUT_VECTOR, 0, 3, 0, 1, 700, 9, 2, 2},
        {"embed", NMK_LAYOUT_ROWS, 0, 1, 0, 2080, 256, 9, 1040, 1040},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) test_random(&arrays[i]);
    u16 kv[1024];
    float most = 0;
    GRID(1, 32, nmk_fill_kv(kv, 1024, 5, (float)(0.5 * sqrt(3.0) / 8388608.0)));
    for (int i = 0; i < 1024; i++) most = fmaxf(most, fabsf(bf16(kv[i])));
    check(most > 0.8 && most < 0.88, "random KV values are small", "%g", most);
    return failures != 0;
}
