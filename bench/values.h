/* What benchmarks make of measured values. */
#ifndef NMK_BENCH_VALUES_H
#define NMK_BENCH_VALUES_H

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

/* For qsort of doubles, ascending. */
__attribute__((unused)) static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of ascending values, between the two nearest, as numpy has it; part: 0 to 1.  0: there are none. */
__attribute__((unused)) static double percentile(const double *v, size_t count, double part) {
    if (!count) return 0;
    const double at = part * (double)(count - 1), low = floor(at);
    const size_t i = (size_t)low, next = i + 1 < count ? i + 1 : i;
    return v[i] + (v[next] - v[i]) * (at - low);
}

/* The upper one of an even count; sorts. */
__attribute__((unused)) static double median_of(double *v, int count) {
    qsort(v, (size_t)count, sizeof *v, by_value);
    return v[count / 2];
}

#endif
