/* Small consumers of a ring in shared memory, for tests/sass/run.sh: what early_release.lua must refuse and accept.
 * All wait for a slot, load four 16-byte words a lane, free the slot and use the words in MMAs. */

typedef unsigned u32;
#define DEVICE static __device__ __forceinline__

enum { STAGES = 4, STAGE_BYTES = 2048 };

extern __shared__ __align__(16) char ring[];

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void wait(u32 bar, u32 phase)
{
    u32 done;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar), "r"(phase) : "memory");
    while (!done);
}

DEVICE void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }

DEVICE uint4 load(u32 at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

DEVICE void mma(float *d, uint4 a, u32 b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b), "r"(b));
}

/* MIXED: which of the four words the address of the arrive depends on, as a mask. */
template <int MIXED> DEVICE void consume(float *out, int stages, u32 zero)
{
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    u32 lane = threadIdx.x & 31, slot = 0, phase = 0;
    float d[4] = {};
    for (int s = 0; s < stages; s++) {
        wait(shared_address(&full[slot]), phase);
        u32 at = shared_address(ring) + slot * STAGE_BYTES + lane * 16;
        uint4 v[4];
        u32 seen = 0;
        for (int i = 0; i < 4; i++) {
            v[i] = load(at + i * 512);
            if (MIXED >> i & 1) seen |= v[i].x;
        }
        __syncwarp();
        if (lane == 0) arrive(shared_address(&empty[slot]) + (seen & zero));
        for (int i = 0; i < 4; i++) mma(d, v[i], lane);
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = d[i];
}

extern "C" __global__ void untied(float *out, int stages, u32 zero) { consume<0>(out, stages, zero); }
extern "C" __global__ void half_tied(float *out, int stages, u32 zero) { consume<3>(out, stages, zero); }
extern "C" __global__ void tied(float *out, int stages, u32 zero) { consume<15>(out, stages, zero); }

/* Loads the next stage before it frees the one in hand: loads are under way at the arrive, but none of its slot. */
extern "C" __global__ void ahead(float *out, int stages, u32 zero)
{
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    u32 lane = threadIdx.x & 31, slot = 0, phase = 0;
    float d[4] = {};
    wait(shared_address(&full[0]), 0);
    uint4 v = load(shared_address(ring) + lane * 16);
    for (int s = 1; s < stages; s++) {
        u32 old = slot;
        if (++slot == STAGES) slot = 0, phase ^= 1;
        wait(shared_address(&full[slot]), phase);
        uint4 w = load(shared_address(ring) + slot * STAGE_BYTES + lane * 16);
        __syncwarp();
        if (lane == 0) arrive(shared_address(&empty[old]) + ((v.x | v.y | v.z | v.w) & zero));
        mma(d, v, lane);
        v = w;
    }
    mma(d, v, lane);
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = d[i];
}

/* Tied, but with more in registers than 32 of them hold. */
extern "C" __global__ void __launch_bounds__(1024, 2) spilled(float *out, int stages, u32 zero)
{
    float kept[64];
    for (int i = 0; i < 64; i++) kept[i] = out[threadIdx.x + i * 1024];
    consume<15>(out, stages, zero);
    for (int i = 0; i < 64; i++) out[threadIdx.x + i * 1024] += kept[i];
}
