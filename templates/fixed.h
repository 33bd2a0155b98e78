/* Numbers that are added up as integers, so that in any order the sum has the same bits; pasted after random.h. */

/* A part of a logit before the norm's factor, in units of 2^-28.  More than 2^26 is cut off: 256 parts have room. */
enum { NMK_FIXED_BITS = 28 };
NMK_SHARED unsigned long long nmk_fixed(float v) {
    const float most = 1 << 26;
    v = v >= -most ? v < most ? v : most : -most; /* NaN is -most */
    return (unsigned long long)(long long)(v * (float)(1 << NMK_FIXED_BITS));
}

/* A part of the sum of squares, of any magnitude up to 2^46: whole units of 2^-8 (part 0), and the rest in units of
 * 2^-48 (part 1). */
NMK_SHARED unsigned long long nmk_fixed_square(float v, int part) {
    const float most = (float)(1ll << 46);
    v = v >= 0 ? v < most ? v : most : 0;
    const long long whole = (long long)(v * 256.f);
    return (unsigned long long)(part ? (long long)((v - (float)whole / 256.f) * (float)(1ll << 48)) : whole);
}

NMK_SHARED float nmk_squares(unsigned long long whole, unsigned long long rest) {
    return (float)whole / 256.f + (float)rest / (float)(1ll << 48);
}
