/* Products of a warpgroup (Hopper's wgmma), bf16 with sums in f32: D (+)= A * B, 64 rows, N columns, 16 of k.
 *
 * Lane l of warp w has rows 16w + l/4 and that + 8 of D: d[4j .. 4j+3] are columns 8j + l%4*2 and the next one, of the
 * first row and then of the second.  A comes from registers, as an MMA of 16 x 16 takes it, or like B from shared
 * memory: core matrices of 8 rows of A, or columns of B, times 16 bytes along k, 128 bytes each, without a swizzle.
 *
 * Always: a fence stands between what the code did to registers and the first product that takes them; commit ends a
 * group; what a group reads and writes, registers and shared memory, is the group's until a wait for it. */
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* An operand in shared memory.  leading, stride: bytes from one core matrix to the next along k, and across it. */
DEVICE u64 wgmma_operand(u32 address, u32 leading, u32 stride)
{
    return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32;
}

/* The same, so many bytes further on: one addition, where making it anew between products costs them time. */
DEVICE u64 wgmma_ahead(u64 operand, u32 bytes)
{
    return (operand & 0xffffffff00000000u) | (u32)((u32)operand + (bytes >> 4));
}

/* The instruction names all of its registers: 4, 16, ... of D, and the numbers of the first 32, 64, ... operands. */
#define NMK_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NMK_D16(d, i) NMK_D4(d, i), NMK_D4(d, i + 4), NMK_D4(d, i + 8), NMK_D4(d, i + 12)
#define NMK_D32(d) NMK_D16(d, 0), NMK_D16(d, 16)
#define NMK_D64(d) NMK_D32(d), NMK_D16(d, 32), NMK_D16(d, 48)
#define NMK_D96(d) NMK_D64(d), NMK_D16(d, 64), NMK_D16(d, 80)
#define NMK_D128(d) NMK_D96(d), NMK_D16(d, 96), NMK_D16(d, 112)
#define NMK_N32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31"
#define NMK_N64 NMK_N32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59" \
    ",%60,%61,%62,%63"
#define NMK_N96 NMK_N64 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91" \
    ",%92,%93,%94,%95"
#define NMK_N128 NMK_N96 \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118" \
    ",%119,%120,%121,%122,%123,%124,%125,%126,%127"

/* For N columns, R registers of D; o0 .. o5: numbers of the operands behind those.  more = 0: D starts anew. */
#define NMK_WGMMA(N, R, o0, o1, o2, o3, o4, o5)                                                                      \
    DEVICE void wgmma(float(&d)[R], const uint4 &a, u64 b, int more)                                                 \
    {                                                                                                                \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o5 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NMK_N##R "}, "                     \
                     "{" o0 "," o1 "," o2 "," o3 "}, " o4 ", p, 1, 1, 0;\n}"                                         \
                     : NMK_D##R(d)                                                                                   \
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(more));                                   \
    }                                                                                                                \
    DEVICE void wgmma(float(&d)[R], u64 a, u64 b, int more)                                                          \
    {                                                                                                                \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NMK_N##R "}, "                     \
                     o0 ", " o1 ", p, 1, 1, 0, 0;\n}"                                                                \
                     : NMK_D##R(d)                                                                                   \
                     : "l"(a), "l"(b), "r"(more));                                                                   \
    }                                                                                                                \
    /* Until no more than MOST groups are under way; d is one that is not. */                                        \
    template <int MOST> DEVICE void wgmma_wait(float(&d)[R])                                                         \
    {                                                                                                                \
        asm volatile("wgmma.wait_group.sync.aligned " o0 ";" : NMK_D##R(d) : "n"(MOST) : "memory");                  \
    }
NMK_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
NMK_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
NMK_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
NMK_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")
