/* What both machines compute alike when they sample; pasted after random.h and the constants of abi.h. */

/* ---- noise ----
 *
 * Gumbel noise of (seed, position, token): what a row draws depends on nothing else in the batch.  -3 < gumbel < 17. */

/* The finaliser of MurmurHash3. */
NMK_SHARED unsigned int nmk_fmix32(unsigned int h) {
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    return h ^ h >> 16;
}

/* Of a column in one step. */
typedef struct {
    unsigned int a, b;
} nmk_noise;

NMK_SHARED nmk_noise nmk_noise_key(unsigned int seed_lo, unsigned int seed_hi, int pos) {
    nmk_noise k;
    k.a = nmk_fmix32(seed_lo ^ nmk_fmix32((unsigned int)pos * 0x9e3779b1u + 0x7f4a7c15u));
    k.b = nmk_fmix32(seed_hi + nmk_fmix32(k.a ^ 0x85ebca6bu));
    return k;
}

/* Uniform in (0, 1), exact; the noise is -log(-log(u)).  23 bits: with 24 the largest rounds to 1. */
NMK_SHARED float nmk_noise_uniform(nmk_noise k, int token) {
    return ((float)(nmk_fmix32(((unsigned int)token ^ k.a) * 0x9e3779b1u + k.b) >> 9) + 0.5f) * 1.1920928955078125e-7f;
}

/* ---- scores ---- */

/* How far a score is below the best one, as 24 bits in the same order: 19 bits of the difference's fraction and 5 of
 * its exponent.  Up to 2^-19 is 0; 2^13, and NaN, are the most. */
enum { NMK_KEY_MOST = 0xffffff };
NMK_SHARED unsigned int nmk_score_key(float best, float score) {
    const unsigned int least = 108u << 23; /* 2^-19 */
    union {
        float f;
        unsigned int u;
    } below;
    below.f = best - score;
    if (below.u <= least) return 0;
    below.u = (below.u - least) >> 4;
    return below.u < NMK_KEY_MOST ? below.u : NMK_KEY_MOST;
}

/* exp(score - best) is added up as an integer of NMK_MASS_BITS binary places: such a sum does not depend on the order.
 */
enum { NMK_MASS_BITS = 34 };

/* What bias and penalties make of a logit.  seen: nmk_adjust's. */
NMK_SHARED float nmk_adjusted(float logit, float bias, unsigned int seen, float presence, float frequency,
                              float repetition) {
    const unsigned int times = seen & (NMK_SEEN_PROMPT - 1u);
    logit += bias;
    if (seen) logit = logit > 0.f ? logit / repetition : logit * repetition;
    return times ? logit - frequency * (float)times - presence : logit;
}
