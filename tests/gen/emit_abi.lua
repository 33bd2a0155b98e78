-- abi.h and the same text for the device.
package.path = "tests/gen/?.lua;" .. package.path
local t = require("helper_emit")
local abi = require("emit.abi")
local writer = require("emit.writer")

local ctx = t.context()
local header = abi.header(ctx)

local function between(text, from, to)
  local a = assert(text:find(from, 1, true), from)
  local _, b = assert(text:find(to, a, true))
  return text:sub(a, b) .. "\n"
end

t.case("constants", between(header, "#define NMK_COLUMNS", "NMK_OPCODES 3"), [[
#define NMK_COLUMNS 8
#define NMK_POSITIONS 8
#define NMK_SMS 2
#define NMK_DESC_WORDS 32
#define NMK_MAX_TASKS 8
#define NMK_RING_STAGES 4
#define NMK_L2_STAGES 0
#define NMK_STAGE_BYTES 16384
#define NMK_SMEM_BYTES 1024
#define NMK_SHARED_REST_BYTES 43008
#define NMK_X_BYTES 0
#define NMK_X_KEPT 0
#define NMK_X_UNSCALED 0
#define NMK_X_EPS 0
#define NMK_THREADS 384
#define NMK_ROLES 4
#define NMK_COUNTERS 2
#define NMK_NODES 3
#define NMK_TICKETS 1
#define NMK_CLAIM_UNITS 1
#define NMK_SEGMENTS_CLAIMED 0
#define NMK_CLAIM_STATIC 0
#define NMK_CLAIM_TAIL 1
#define NMK_CLAIM_QUEUE 2
#define NMK_CLAIM_FULL 3
#define NMK_ARENA_BYTES 1024
#define NMK_ABSENT 2147483648ll
#define NMK_EXCHANGE_AT 1024
#define NMK_EXCHANGE_BYTES 0
#define NMK_WEIGHTS_KIB 56
#define NMK_PAGE_TOKENS 64
#define NMK_KV_HEAD_BYTES 32768
#define NMK_KV_PAGE_BYTES_FULL 32768
#define NMK_KV_PAGE_BYTES_SLIDING 0
#define NMK_CHUNKS_MAX 32
#define NMK_MAX_SEGMENTS 128
#define NMK_OUT_RING 1024
#define NMK_TRACE_STAMPS 4
#define NMK_STOP_IDS 16
#define NMK_MAX_PARTS 36
#define NMK_TOPS 20
#define NMK_MASK_WORDS 4
#define NMK_COLUMN_SAMPLES 1
#define NMK_COLUMN_FILTERS 2
#define NMK_COLUMN_CUTS_K 4
#define NMK_COLUMN_CUTS_P 8
#define NMK_COLUMN_ADJUSTS 16
#define NMK_COLUMN_LOGPROBS 32
#define NMK_COLUMN_MASKED 64
#define NMK_MASK_FLAGS 64
#define NMK_MASKED_LOGIT -1e+30f
#define NMK_SEEN_PROMPT 1073741824
#define NMK_HANG_HOST -1
#define NMK_HANG_TASK_MASK 4095
#define NMK_HANG_SM_SHIFT 12
#define NMK_HANG_SM_MASK 255
#define NMK_HANG_ROLE_SHIFT 20
#define NMK_HANG_ROLE_MASK 3
#define NMK_HANG_STEP_SHIFT 22
#define NMK_HANG_STEP_MASK 511
#define NMK_FULL_LAYERS 1
#define NMK_HEAD_DIM 128
#define NMK_KV_HEADS 1
#define NMK_LAYERS 1
#define NMK_SCALE 0.5f
#define NMK_SLIDING_LAYERS 0
#define NMK_VOCAB_ROWS 64
#define NMK_WIDTH 64
#define NMK_OPCODES 3
]])

t.case("opcodes and words", between(header, "enum nmk_opcode", "NMK_WORD_FINISH_Y = 8,\n};"), [[
enum nmk_opcode {
    NMK_OP_END = 0,
    NMK_OP_ADD = 1,
    NMK_OP_FINISH = 2,
};
/* Words of a descriptor: the header, then each opcode's own fields. */
enum nmk_word {
    NMK_WORD_OPCODE = 0,
    NMK_WORD_NODE = 1,
    NMK_WORD_WAIT_A = 2,
    NMK_WORD_ARRIVALS_A = 3,
    NMK_WORD_WAIT_B = 4,
    NMK_WORD_ARRIVALS_B = 5,
    NMK_WORD_SIGNAL = 6,
    NMK_WORD_LOCAL = 7,
};
enum nmk_add_word {
    NMK_WORD_ADD_TILE = 8,
    NMK_WORD_ADD_TILES = 9,
    NMK_WORD_ADD_A = 10,
    NMK_WORD_ADD_Y = 11,
};
enum nmk_finish_word {
    NMK_WORD_FINISH_Y = 8,
};
]])

t.case("layout numbers are those of packed.h", between(header, "enum nmk_layout", "};"), [[
enum nmk_layout {
    NMK_LAYOUT_ROWS = 0,
    NMK_LAYOUT_PAIRS = 1,
    NMK_LAYOUT_GATE_UP = 2,
    NMK_LAYOUT_VECTOR = 3,
    NMK_LAYOUT_HALVES64 = 4,
    NMK_LAYOUT_HALVES128 = 5,
};
]])

do
  local w = writer.new("megakernel.cu")
  abi.device(w, ctx)
  t.case("device types are spelled out", between(w:text(), "typedef struct nmk_hang", "} nmk_hang;"), [[
typedef struct nmk_hang {
    unsigned int word;
    int counter;
    unsigned int expected; /* 0: of words or the host, and no step in word */
    unsigned int got; /* what the counter was at; the epoch where expected is 0 */
} nmk_hang;
]])
  t.case("no fixed-width types on the device", tostring(w:text():find("int%d+_t")), "nil")
end

t.case("only ops in use have fields", tostring((function()
  local g = t.graph()
  g.nodes = { g.nodes[1] }
  local less = t.context()
  less.graph = g
  return abi.header(less):find("FINISH")
end)()), "nil")

-- What C says of a header: nothing where it compiles with all its assertions.
local function compiled(name, text)
  local folder = t.folder("emit_abi/" .. name)
  t.write(folder .. "/abi.h", text)
  t.write(folder .. "/twice.c", '#include "abi.h"\n#include "abi.h"\nint main(void) { return 0; }\n')
  return (t.run(("cd %s && gcc -std=c11 -Wall -Wextra -Werror -o twice twice.c"):format(folder)))
end
t.case("it compiles, and C agrees on every offset", compiled("eight", header), "")

do
  local three = t.context()
  three.model.schedule.columns = 3
  local text = abi.header(three)
  t.case("as many columns as the schedule has", ("%s, %s, %d bytes, %d segments"):format(
    text:match("NMK_COLUMNS %d+"), text:match("nmk_column column%[%d%]"), text:match("sizeof%(nmk_control%) == (%d+)"),
    text:match("NMK_MAX_SEGMENTS (%d+)")), "NMK_COLUMNS 3, nmk_column column[3], 320 bytes, 48 segments")
  t.case("and C agrees", compiled("three", text), "")
end

do
  local function constants(columns, hidden, norm_mean, experts)
    local rms = t.context()
    local values = rms.model.family_module.values()
    values.hidden, values.experts = hidden, experts
    rms.model.family_module = { values = function() return values end }
    rms.model.schedule.columns = columns
    rms.graph.params.norm = { hidden = hidden, eps = 0.25, norm_mean = norm_mean }
    local text = abi.header(rms)
    return text:match("NMK_X_UNSCALED (%S+)") .. " " .. text:match("NMK_X_EPS (%S+)")
  end
  t.case("an RMSNorm whose rows registers hold leaves its factor to the products", constants(8, 2048, 0), "1 0.25f")
  t.case("LayerNorm does not", constants(8, 2048, 1), "0 0.25f")
  t.case("nor longer rows", constants(8, 2304, 0), "0 0.25f")
  t.case("nor a mixture", constants(8, 2048, 0, 8), "0 0.25f")
  t.case("nor with more columns than an MMA takes", constants(16, 2048, 0), "0 0.25f")
end

t.done()
