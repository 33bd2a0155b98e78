-- The kernel's text: what is pasted, what is generated around it.
package.path = "tests/gen/?.lua;" .. package.path
local t = require("helper_emit")
local megakernel = require("emit.megakernel")
local ops = require("ops")

local TEMPLATES = {
  ["templates/random.h"] = "", ["templates/sampling.h"] = "", ["templates/packed.h"] = "",
  ["templates/pack.cu"] = "pack\n", ["templates/mixed.cuh"] = "go on\n",
  ["templates/prelude.cuh"] = "prelude\n",
  ["templates/megakernel.cu"] = [[
//@slot ops
load:
//@slot dispatch load
compute:
//@slot dispatch compute
store:
    //@slot dispatch store
help:
//@slot dispatch help
]],
}

-- Without what the generator asserts at the end, which a case of its own checks.
local function emitted(ctx)
  local text = megakernel.text(ctx)
  return text:sub(text:find('#line 1 "templates/prelude.cuh"', 1, true), text:find("static_assert(WARPS", 1, true) - 1)
end

-- Without the generated file's own line numbers, which the next case checks.
local function plain(text)
  return (text:gsub('#line %d+ "megakernel.cu"\n', ""))
end

local ctx = t.context(TEMPLATES)
t.case("ops and dispatch", plain(emitted(ctx)), [[
#line 1 "templates/prelude.cuh"
prelude
namespace op_add {
struct P {
    static constexpr int width = 64;
    static constexpr float scale = 0.5f;
};
struct Task { int tile; int tiles; int a; int y; };
static __device__ __forceinline__ Task task(const int *d) { return Task{d[8], d[9], d[10], d[11]}; }
#line 12 "templates/ops/add.cu"
struct Before { int warm; };
DEVICE Before before(Consumer &c, const Task &t) { return {t.tile}; }
DEVICE void compute(Consumer &c, const Task &t, const Before &b) {}
#line 16 "templates/ops/add.cu"
DEVICE void store(Storer &c, const Task &t) { c.buffer<float>(t.y)[t.tile] = P::scale; }
} // namespace op_add

namespace op_finish {
struct P {
};
struct Task { int y; };
static __device__ __forceinline__ Task task(const int *d) { return Task{d[8]}; }
#line 9 "templates/ops/finish.cu"
DEVICE void help(Helper &c, const Task &t) {}
} // namespace op_finish

#line 2 "templates/megakernel.cu"
load:
goto load_done;
load_done:;
#line 4 "templates/megakernel.cu"
compute:
if (is(op, NMK_OP_ADD)) goto compute_add;
continue;
compute_add: {
    const op_add::Task t = op_add::task(d);
    const op_add::Before b = op_add::before(c, t);
    c.wait_task(d);
    op_add::compute(c, t, b);
    goto compute_done;
}
compute_done:;
#line 6 "templates/megakernel.cu"
store:
    if (is(op, NMK_OP_ADD)) goto store_add;
    continue;
    store_add: {
        const op_add::Task t = op_add::task(d);
        op_add::store(c, t);
        goto store_done;
    }
    store_done:;
#line 8 "templates/megakernel.cu"
help:
if (is(op, NMK_OP_FINISH)) goto help_finish;
continue;
help_finish: {
    const op_finish::Task t = op_finish::task(d);
    c.wait_task(d);
    op_finish::help(c, t);
    continue;
}
help_done:;
#line 1 "templates/pack.cu"
pack
]])

do
  local number, wrong = 0, 0
  for row in megakernel.text(ctx):gmatch("(.-)\n") do
    number = number + 1
    local says = row:match('^#line (%d+) "megakernel.cu"$')
    if says and tonumber(says) ~= number + 1 then
      wrong = wrong + 1
    end
  end
  t.case("the file's own line numbers are right", wrong, 0)
end

t.case("the hash goes into its line", megakernel.with_hash("/* */\n#define NMK_HASH\nx\n", "0x1ull"),
  "/* */\n#define NMK_HASH 0x1ull\nx\n")

-- A registry of the named op files of this project, as in a graph that uses just those. chain: settled as in a model
-- whose layers are one.
local function slot_of(slot, names, chain)
  local registry = { list = {}, by_name = {} }
  local nodes = {}
  for i, name in ipairs(names) do
    local file = assert(io.open(("templates/ops/%s.cu"):format(name)))
    local why, op = t.messages(name, file:read("a"))
    file:close()
    assert(why == "", why)
    op.opcode, op.sections = i, {}
    registry.list[i], registry.by_name[name] = op, op
    nodes[i] = { op = name }
  end
  if chain then t.settle(registry, "fenced", true) end
  for _, op in ipairs(registry.list) do
    for _, r in ipairs(ops.ROLES) do
      if op.roles[r] and not op.supplied[r] then
        op.sections[r] = { text = "", line = 1 }
      end
    end
  end
  local templates = {}
  for path, text in pairs(TEMPLATES) do
    templates[path] = text
  end
  templates["templates/megakernel.cu"] = ("//@slot %s\n"):format(slot)
  templates["templates/pack.cu"] = ""
  local one = t.context(templates)
  one.graph.nodes, one.registry = nodes, registry
  return (plain(emitted(one)):gsub("^.-prelude\n", ""))
end

t.case("ops of one pipeline share a case", slot_of("dispatch load", { "lm_head", "qkv", "router" }), [[
if (is_any(op, 1u << NMK_OP_LM_HEAD | 1u << NMK_OP_QKV | 1u << NMK_OP_ROUTER)) goto load_lm_head;
goto load_done;
load_lm_head: {
    const op_lm_head::Task t = op_lm_head::task(d);
    gemm_x_load(c, t);
    goto load_done;
}
load_done:;
]])
t.case("compute leaves gemm_x and the wait to the loop", slot_of("dispatch compute", { "expert_up", "qkv" }), [[
if (is(op, NMK_OP_EXPERT_UP)) goto compute_expert_up;
if (is(op, NMK_OP_QKV)) goto compute_qkv;
continue;
compute_expert_up: {
    const op_expert_up::Task t = op_expert_up::task(d);
    tiles = op_expert_up::compute(c, t), claimed = true;
    goto compute_done;
}
compute_qkv: {
    const op_qkv::Task t = op_qkv::task(d);
    tiles = t.tiles;
    goto compute_done;
}
compute_done:;
]])
t.case("in a chain the consumers merge and tell of it", slot_of("dispatch compute", { "combine", "o_proj" }, true), [[
if (is(op, NMK_OP_COMBINE)) goto compute_combine;
if (is(op, NMK_OP_O_PROJ)) goto compute_o_proj;
continue;
compute_combine: {
    const op_combine::Task t = op_combine::task(d);
    op_combine::compute(c, t);
    c.signal_together(d);
    goto compute_done;
}
compute_o_proj: {
    const op_o_proj::Task t = op_o_proj::task(d);
    row = op_o_proj::compute(c, t), width = op_o_proj::WIDTH;
    goto compute_done;
}
compute_done:;
]])
t.case("then the helper has no part in it", slot_of("dispatch help", { "combine" }, true), [[
continue;
help_done:;
]])
t.case("what one line of the loop does for many ops", slot_of("sets", { "combine", "o_proj", "qkv" }), [[
constexpr u32 WAITS_COMPUTE =
    0u | 1u << NMK_OP_O_PROJ | 1u << NMK_OP_QKV;
constexpr u32 HANDS =
    0u;
constexpr u32 EASED =
    0u | 1u << NMK_OP_QKV;
constexpr u32 RAGGED = 0u | RAGGED_BIT<op_o_proj::WIDTH>;
]])
t.case("a helper that signals nothing", slot_of("dispatch help", { "combine", "sample" }), [[
if (is(op, NMK_OP_COMBINE)) goto help_combine;
if (is(op, NMK_OP_SAMPLE)) goto help_sample;
continue;
help_combine: {
    const op_combine::Task t = op_combine::task(d);
    c.wait_task(d);
    op_combine::help(c, t);
    goto help_done;
}
help_sample: {
    const op_sample::Task t = op_sample::task(d);
    c.wait_task(d);
    op_sample::help(c, t);
    continue;
}
help_done:;
]])

t.case("an optional op asleep goes on to its signal", slot_of("dispatch help", { "clear_cuts", "draw" }), [[
if (is(op, NMK_OP_CLEAR_CUTS)) goto help_clear_cuts;
if (is(op, NMK_OP_DRAW)) goto help_draw;
continue;
help_clear_cuts: {
    const op_clear_cuts::Task t = op_clear_cuts::task(d);
    c.wait_task(d);
    op_clear_cuts::help(c, t);
    goto help_done;
}
help_draw: {
    const op_draw::Task t = op_draw::task(d);
    if (__builtin_expect(!c.awake(), 1)) goto help_done;
    c.wait_task(d);
    op_draw::help(c, t);
    goto help_done;
}
help_done:;
]])

do
  local text = t.ADD:gsub("//@reference", "//@device store sm90\nDEVICE void store(Storer &c, const Task &t);\n%0")
  local why, op = t.messages("add", text)
  assert(why == "", why)
  op.opcode = 1
  local one = t.context(TEMPLATES)
  one.registry.list[1], one.registry.by_name.add = op, op
  local function store_of(arch)
    one.model.target.arch = arch
    return emitted(one):match("(#line %d+ [^\n]*\nDEVICE void store[^\n]*)")
  end
  t.case("a target's variant takes the section's place", store_of("sm_90a"),
    '#line 18 "templates/ops/add.cu"\nDEVICE void store(Storer &c, const Task &t);')
  t.case("other targets take the section", store_of("sm_100a"):match("^[^\n]*"), '#line 16 "templates/ops/add.cu"')
end

do
  local text = megakernel.text(ctx)
  local asserts = text:find("static_assert(WARPS", 1, true)
  local part_end = text:find("#ifdef NMK_MIXED", asserts, true)
  t.case("the kernel has what the generator counted with", text:sub(asserts, part_end - 1), [[
static_assert(WARPS_COMPUTE == 8 && WARPS_ALL * 32 == NMK_THREADS, "the warps of a block");
static_assert(SHARED_BYTES - SHARED_JOBS <= NMK_SHARED_REST_BYTES, "shared memory beside the ring");
]])
  -- As a part of a kernel that is two it leaves no name behind.
  local defined, undefined = {}, {}
  for name in text:gmatch("#define (%S+)") do defined[#defined + 1] = name end
  for name in text:sub(part_end):gmatch("#undef (%S+)") do undefined[#undefined + 1] = name end
  table.sort(defined)
  t.case("a part's names end with it", table.concat(undefined, " "), table.concat(defined, " "))
  t.case("a part's namespace", text:match("#ifdef NMK_MIXED\n.-go on\n.-\nnamespace (%S+) {\n#endif"), "of_step")
  t.case("ends there", text:sub(part_end):match("^#ifdef NMK_MIXED\n} // namespace (%S+)\n#undef"), "of_step")
  -- Numbers that a template spells out must be those of emit/abi.lua.
  local function refused(name, path, from, to, want)
    local file = assert(io.open(path, "rb"))
    local whole = file:read("a")
    file:close()
    local at, after = whole:find(from, 1, true)
    local changed = { [path] = whole:sub(1, at - 1) .. to .. whole:sub(after + 1) }
    local ok, why = pcall(megakernel.text, t.context(setmetatable(changed, { __index = TEMPLATES })))
    t.case(name, ok and "accepted" or why, want)
  end
  refused("other registers", "templates/megakernel.cu", "setmaxnreg.inc.sync.aligned.u32 200;",
    "setmaxnreg.inc.sync.aligned.u32 208;", "templates/megakernel.cu: setmaxnreg.inc 208: emit/abi.lua has 200")
  refused("another word of a hang", "templates/prelude.cuh", "role << 20 | blockIdx.x << 12 | task",
    "role << 24 | blockIdx.x << 16 | task",
    "templates/prelude.cuh: a hang's word has the SM at bit 16, the role at 24: emit/abi.lua differs")
end

t.done()
