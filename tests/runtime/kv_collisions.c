/* The tests of kept pages once more, where all pages have the same hash: it never decides. */
#include <xxhash.h>

#define XXH3_64bits_withSeed(data, bytes, seed) ((void)(data), (seed)&0)

#include "kv.c"

#include "runtime/kv_cache.c"
