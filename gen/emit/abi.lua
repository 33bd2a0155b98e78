-- What the kernel, the runtime and the CPU machine agree on: constants, opcodes, descriptor fields, structs. One table,
-- written as abi.h (C, host) and pasted into megakernel.cu (which includes no header, so the types are spelled out).
local memory = require("memory")
local ops = require("ops")
local writer = require("emit.writer")

local M = {}

M.STAGE_BYTES = 16384
M.LEAST_RING_STAGES, M.MOST_RING_STAGES = 4, 12
M.PAGE_TOKENS = 64
M.OUT_RING = 1024
M.STOP_IDS = 16
-- Partials of one head that the registers of ops/combine.cu hold: 9 a lane, 4 groups of lanes.
M.MAX_PARTS = 36
-- Most alternatives to a token whose log-probabilities a step gives.
M.TOPS = 20
-- Bits of nmk_column.flags.
M.FLAGS = {
  { "SAMPLES", 1 },             -- a token is drawn here
  { "FILTERS", 2 },             -- from a part of the distribution: any of top_k, top_p, min_p
  { "CUTS_K", 4 },              -- top_k
  { "CUTS_P", 8 },              -- top_p
  { "ADJUSTS", 16 },            -- logits are changed by nmk_adjust and the penalties first
  { "LOGPROBS", 32 },
  { "MASKED", 64 },             -- tokens outside of a mask do not come; the host gives one for each step
}
-- compute begins, compute has waited, store is done, help is done
M.TRACE_STAMPS = 4
-- A block: its warps by the registers that each of their threads has, in a step and in a prefill launch, whose sums of
-- 256 tokens take 128.
M.WARPS = { { what = "inc", count = 8, registers = 200, prefill = 224 },
            { what = "dec", count = 4, registers = 104, prefill = 56 } }
M.LANES = 32
local WARPS_COMPUTE = M.WARPS[1].count
-- Shared memory beside the ring, with a ring of 12 stages: job buffers, descriptors, tables. And a place for each of an
-- SM's chunks of attention, of both kinds.
local SHARED_BYTES, SEGMENT_BYTES = 34816, 2 * 32
-- Columns of the normalised x, of all that one MMA takes, that the registers of a warp's lanes hold.
local X_COLUMNS = 2048
-- The widest rows of h that steps of more columns than an MMA takes gather in shared memory.
local GATHERED_COLUMNS = 2048
-- What more columns than an MMA takes need in the tables.
local WIDE_COLUMN_BYTES = 208
-- nmk_hang.word: the task's bits, then the SM's, then the role's; up to the highest one the step's.
M.TASK_BITS = 12
M.SM_BITS = 8
local ROLE_BITS = 2
M.STEP_AT = M.TASK_BITS + M.SM_BITS + ROLE_BITS

-- { type, name, comment } or { type, name, comment, count }, count = a number, COLUMNS, or one of the family's values.
-- A type is one of TYPES or a struct above. launch: only launches of that kind have the struct.
local COLUMNS = "schedule.columns"
local STRUCTS = {
  {
    name = "nmk_column", device = true, bytes = 64,
    comment = "One (sequence, position) that a step computes.",
    { "i32", "token", "what stands at pos" },
    { "i32", "pos", "-1: inactive" },
    { "i32", "base", "first position of the sequence that this step computes; pages hold what is before it" },
    { "i32", "group", "first column of the same sequence in this step" },
    { "i32", "slot", "row of the page tables" },
    { "i32", "flags", "NMK_COLUMN_..." },
    { "i32", "remaining", "tokens still allowed" },
    { "f32", "temperature", "0: greedy" },
    { "u32", "seed_lo", "" },
    { "u32", "seed_hi", "" },
    { "i32", "top_k", "" },
    { "f32", "top_p", "" },
    { "f32", "min_p", "0: off" },
    { "f32", "presence", "penalties; of the last, 1 is off" },
    { "f32", "frequency", "" },
    { "f32", "repetition", "" },
  },
  {
    name = "nmk_control", device = true,
    comment = "State that steps hand to each other, in device memory.",
    { "nmk_column", "column", "", COLUMNS },
    { "i32", "stop_ids", "", M.STOP_IDS },
    { "i32", "stop_count", "" },
    { "i32", "pad", "", 15 },
  },
  {
    name = "nmk_adjust", device = true, bytes = 8,
    comment = "What a slot's sequence does to one token's logit.",
    { "f32", "bias", "" },
    { "u32", "seen", "times generated; NMK_SEEN_PROMPT: it is in the prompt too" },
  },
  {
    name = "nmk_tops", device = true,
    comment = "Log-probabilities of one column's step, by the model alone.",
    { "f32", "chosen", "of the token given" },
    { "i32", "pad", "" },
    { "i32", "id", "the most likely tokens, best first", M.TOPS },
    { "f32", "logprob", "", M.TOPS },
  },
  {
    name = "nmk_span", device = true, bytes = 16,
    comment = "Consecutive tokens of one sequence, of those that a prefill launch takes.",
    { "i32", "first", "token of the chunk" },
    { "i32", "count", "" },
    { "i32", "pos", "of the first one; pages hold what is before it" },
    { "i32", "slot", "row of the page tables" },
  },
  {
    name = "nmk_chunk", device = true, launch = "prefill",
    comment = "What one launch takes of prompts: spans one after the other, without gaps. In place of nmk_control.",
    { "i32", "tokens", "" },
    { "i32", "spans", "" },
    { "i32", "pad", "", 2 },
    { "nmk_span", "span", "", "spans" },
    { "i32", "token", "", "prefill_tokens" },
  },
  {
    name = "nmk_hang", device = true, bytes = 16,
    comment = "A wait that did not end. word: 0, or 1 << 31 | step, role, SM and task: NMK_HANG_...",
    { "u32", "word", "" },
    { "i32", "counter", "" },
    { "u32", "expected", "0: of words or the host, and no step in word" },
    { "u32", "got", "what the counter was at; the epoch where expected is 0" },
  },
  {
    name = "nmk_params", device = true, bytes = 200,
    comment = "The kernel's argument. Addresses are the device's.",
    { "u64", "weights", "" },
    { "u64", "arena", "activation buffers" },
    { "u64", "kv_full", "pages of the full layers" },
    { "u64", "kv_sliding", "pages of the sliding layers" },
    { "u64", "lists", "i32 [NMK_SMS][NMK_MAX_TASKS][NMK_DESC_WORDS]" },
    { "u64", "control", "struct nmk_control; of a prefill launch struct nmk_chunk" },
    { "u64", "table_full", "i32 [slot][table_stride]: page ids" },
    { "u64", "table_sliding", "" },
    { "u64", "counters", "u32, one per 128 bytes" },
    { "u64", "tickets", "u32 [NMK_TICKETS][2], one per 128 bytes" },
    { "u64", "rope", "float [position][head_dim / 2][2]: cos, sin" },
    { "u64", "out", "i32 [NMK_OUT_RING][NMK_COLUMNS] in mapped host memory: token or -1" },
    { "u64", "tops", "struct nmk_tops [NMK_OUT_RING][NMK_COLUMNS] in mapped host memory" },
    { "u64", "times", "u64 [NMK_OUT_RING][2] in mapped host memory: ns, when a step began and when it had its tokens" },
    { "u64", "adjust", "struct nmk_adjust [slot][vocab]" },
    { "u64", "masks", "u32 [NMK_COLUMNS][NMK_MASK_WORDS] in mapped host memory: bit t % 32 of word t / 32 of token t" },
    { "u64", "masks_until", "u32 [NMK_SMS][NMK_MASK_FLAGS] by columns in mapped host memory: the epoch up to which the "
      .. "host has given masks" },
    { "u64", "masks_taken", "u32 [NMK_COLUMNS][NMK_MASK_WORDS]: masks of this step" },
    { "u64", "hang", "struct nmk_hang [NMK_SMS][NMK_ROLES] in mapped host memory: a role's first wait for a counter" },
    { "u64", "abort", "u32: the word of a wait that was given up" },
    { "u64", "trace", "0, or u64 [NMK_SMS][NMK_MAX_TASKS][NMK_TRACE_STAMPS]: SM clock at points of each task" },
    { "i32", "epoch", "1, 2, ...: steps since the counters were zeroed" },
    { "i32", "in_flight", "stages per SM that may be in flight" },
    { "i32", "ring_stages", "at most NMK_RING_STAGES" },
    { "i32", "table_stride", "" },
    { "i32", "out_row", "" },
    { "i32", "zero", "always 0, which the compiler does not know" },
    { "u32", "patience_ms", "after which a wait for another SM is given up" },
    { "i32", "pad", "" },
  },
  {
    name = "nmk_array",
    comment = "A packed weight array: (layer, expert) is at kib + (layer - layer0) * layer_kib + expert * expert_kib.",
    { "str", "name", "" },
    { "i32", "layout", "enum nmk_layout" },
    { "i32", "layer0", "" },
    { "i32", "layers", "" },
    { "i32", "experts", "0: no expert dimension" },
    { "i32", "rows", "" },
    { "i32", "cols", "" },
    { "i32", "kib", "" },
    { "i32", "layer_kib", "" },
    { "i32", "expert_kib", "" },
  },
  {
    name = "nmk_tensor",
    comment = "A checkpoint tensor; one per layer (and expert) where the name has %d. Rows (of a vector: elements) go "
      .. "to row0 of its array.",
    { "str", "name", "" },
    { "i32", "dims", "1: a vector" },
    { "i32", "layer0", "" },
    { "i32", "layers", "" },
    { "i32", "experts", "0: no expert dimension" },
    { "i32", "rows", "" },
    { "i32", "cols", "" },
    { "i32", "array", "index in nmk_arrays" },
    { "i32", "row0", "" },
    { "i32", "twin", "1: another tensor fills these rows; this one may be there too, and is then the same" },
  },
  {
    name = "nmk_buffer",
    comment = "An activation buffer in the arena.",
    { "str", "name", "" },
    { "i32", "offset128", "in units of 128 bytes" },
    { "i32", "extent", "size of the index space of its regions" },
    { "i64", "bytes", "" },
  },
  {
    name = "nmk_config",
    comment = "What a checkpoint's config.json must say. value is JSON text; null there counts as absent.",
    { "str", "path", "" },
    { "str", "or_path", "where the same fact may stand instead, | between places; NULL: nowhere" },
    { "str", "value", "" },
    { "i32", "required", "absence is a mistake" },
  },
  {
    name = "nmk_node",
    comment = "A node of the step, by the number that its tasks carry.",
    { "str", "name", "" },
    { "i32", "opcode", "" },
    { "i32", "layer", "-1 before the first and after the last layer" },
  },
  {
    name = "nmk_field",
    comment = "A field of an opcode's descriptor.",
    { "i32", "opcode", "" },
    { "i32", "word", "" },
    { "str", "name", "" },
  },
}

-- A word that is not there yet, of data that tells whether it is (schedule.exchange): the least integer, so that one
-- minimum finds it among many; a zero, so that a step that is lost goes on with numbers.
local ABSENT = 0x80000000

-- Constants that the schedule alone decides: a program takes them from runtime/variant.h, not from abi.h, so that it
-- can run another schedule's lists.  Of all others `nmk_abi_hash` says that two generations have the same.
local SCHEDULED = {
  MAX_TASKS = true, RING_STAGES = true, SHARED_REST_BYTES = true, COUNTERS = true, ARENA_BYTES = true,
  EXCHANGE_AT = true, EXCHANGE_BYTES = true, L2_STAGES = true,
  CHUNKS_MAX = true, CHUNKS_MIN = true, PAGES_PER_CHUNK = true, PAGES_PER_LONG_CHUNK = true, OWN_PAGES = true,
  MAX_SEGMENTS = true, PART_SLOTS = true,
}

local HOST = {
  i32 = "int32_t", u32 = "uint32_t", u64 = "uint64_t", i64 = "int64_t", f32 = "float", str = "const char *",
}
local DEVICE = { i32 = "int", u32 = "unsigned int", u64 = "unsigned long long", f32 = "float" }
local SIZES = { i32 = 4, u32 = 4, u64 = 8, f32 = 4 }

local function round_up(n, unit)
  return (n + unit - 1) // unit * unit
end

--- Opcodes that the graph uses, in opcode order.
function M.used_ops(g, registry)
  local used = {}
  for _, node in ipairs(g.nodes) do
    used[node.op] = true
  end
  local list = {}
  for _, op in ipairs(registry.list) do
    if used[op.name] then
      list[#list + 1] = op
    end
  end
  return list
end

--- Who signals each counter, by its number from 0 less one: the node's name.
function M.counter_names(g)
  local names = {}
  for id = 1, g.counters do names[id] = "?" end
  for _, node in ipairs(g.nodes) do
    if node.counter then names[node.counter + 1] = node.name end
  end
  return names
end

local function max_tasks(model, g)
  local most = 0
  for sm = 0, model.target.sms - 1 do
    most = math.max(most, #g.lists[sm])
  end
  return round_up(most + 1, 8)
end

local function claims_attention(model)
  return model.schedule.claim.attention ~= "static"
end

--- The most chunks of attention that one SM has in a step, of one kind. A launch that takes prompts has none.
local function max_segments(model)
  if model.launch == "prefill" then return 1 end
  local most = model.schedule.columns * model.family_module.values(model).kv_heads * model.schedule.split.chunks_max
  local segments = round_up(most, model.target.sms) // model.target.sms
  -- Where they are claimed, a stage has a place for one in the two lists of an SM.
  return claims_attention(model) and math.max(segments, (model.schedule.ring_stages + 1) // 2) or segments
end

--- Shared memory for the normalised x of 8 columns; 0 where the registers hold it, and in a launch that takes prompts,
--- whose ring brings x. With more columns a place for rows that are gathered.
local function x_bytes(model)
  if model.launch == "prefill" then return 0 end
  local packed = memory.packed_cols(model.family_module.values(model).hidden or 0)
  local values = model.family_module.values(model)
  if ops.is_wide(model.schedule.columns) then
    -- as ops/expert_down.cu gathers rows of h: two loads of each warp
    local width = (values.experts or 0) > 0 and memory.packed_cols(values.expert_ff) or 0
    return width <= GATHERED_COLUMNS and WARPS_COMPUTE * 2 * width // 256 * 9 * 64 or 0
  end
  if packed <= X_COLUMNS then return 0 end
  return ops.TILE_COLUMNS * packed * 2
end

-- Whether the norm leaves a column's factor to the products: where registers hold x, nothing but the sum of its squares
-- makes the factor, and no other op gives x. A mixture gains nothing by it: there other waits hide the norm.
local function leaves_factor(model, g, registry)
  for _, op in ipairs(M.used_ops(g, registry)) do
    for _, write in ipairs(op.writes) do
      if write.name == "xn" and op.name ~= "norm" then return false end
    end
  end
  local norm, experts = g.params.norm, model.family_module.values(model).experts or 0
  local held = not ops.is_wide(model.schedule.columns) and x_bytes(model) == 0
  return held and norm and norm.norm_mean == 0 and experts == 0
end

--- Shared memory that a block needs beside the ring, at most. The kernel asserts it.
function M.shared_rest_bytes(model)
  local columns = model.schedule.columns
  local wide = ops.is_wide(columns) and columns * WIDE_COLUMN_BYTES or 0
  return SHARED_BYTES + max_segments(model) * SEGMENT_BYTES + x_bytes(model) + wide
end

--- Stages for which a block of the target has room.
function M.most_ring_stages(model)
  return (model.target.smem_bytes_per_block - M.shared_rest_bytes(model)) // M.STAGE_BYTES
end

local function threads()
  local warps = 0
  for _, part in ipairs(M.WARPS) do
    warps = warps + part.count
  end
  return warps * M.LANES
end

--- Every constant, ordered: { NAME, value }. An integer or a float.
local function all_constants(model, g, registry)
  local values = model.family_module.values(model)
  local split = model.schedule.split
  local list, seen = {}, {}
  local function add(name, value)
    assert(seen[name] == nil or seen[name] == value, name)
    if seen[name] == nil then
      seen[name] = value
      list[#list + 1] = { name, value }
    end
  end
  add("COLUMNS", model.schedule.columns)
  -- of one sequence that a step may compute
  add("POSITIONS", math.min(model.schedule.columns, ops.TILE_COLUMNS))
  add("SMS", model.target.sms)
  add("DESC_WORDS", ops.WORDS)
  add("MAX_TASKS", max_tasks(model, g))
  add("RING_STAGES", model.schedule.ring_stages)
  add("L2_STAGES", model.schedule.l2_stages)
  add("STAGE_BYTES", M.STAGE_BYTES)
  add("SMEM_BYTES", model.target.smem_bytes_per_block)
  add("SHARED_REST_BYTES", M.shared_rest_bytes(model))
  add("X_BYTES", x_bytes(model))
  add("X_KEPT", g.kept and 1 or 0)
  add("X_UNSCALED", leaves_factor(model, g, registry) and 1 or 0)
  add("X_EPS", g.params.norm and g.params.norm.eps or 0)
  add("THREADS", threads())
  add("ROLES", #ops.ROLES)
  add("COUNTERS", g.counters)
  add("NODES", #g.nodes)
  add("TICKETS", g.tickets)
  add("CLAIM_UNITS", g.claim_units)
  add("SEGMENTS_CLAIMED", claims_attention(model) and 1 or 0)
  for i, how in ipairs(ops.CLAIMS) do
    add("CLAIM_" .. how:upper(), i - 1)
  end
  add("ARENA_BYTES", g.arena_bytes)
  add("ABSENT", ABSENT)
  add("EXCHANGE_AT", g.exchange_at)
  add("EXCHANGE_BYTES", g.exchange_bytes)
  add("WEIGHTS_KIB", g.weights_kib)
  add("PAGE_TOKENS", M.PAGE_TOKENS)
  local kv_head = 2 * M.PAGE_TOKENS * values.head_dim * 2
  add("KV_HEAD_BYTES", kv_head)
  add("KV_PAGE_BYTES_FULL", values.full_layers * values.kv_heads * kv_head)
  add("KV_PAGE_BYTES_SLIDING", values.sliding_layers * values.kv_heads * kv_head)
  for _, name in ipairs(writer.sorted(split)) do
    add(name:upper(), split[name])
  end
  add("MAX_SEGMENTS", max_segments(model))
  add("OUT_RING", M.OUT_RING)
  add("TRACE_STAMPS", M.TRACE_STAMPS)
  add("STOP_IDS", M.STOP_IDS)
  add("MAX_PARTS", M.MAX_PARTS)
  add("TOPS", M.TOPS)
  add("MASK_WORDS", (values.vocab_rows + 127) // 128 * 4) -- a mask is read by 128 tokens
  for _, flag in ipairs(M.FLAGS) do
    add("COLUMN_" .. flag[1], flag[2])
  end
  -- Every SM polls its own copy: reads of one line of the host's memory are done one after the other.
  add("MASK_FLAGS", 64)
  -- Of a token that a mask leaves out: so low that it is never drawn beside another, and a number, so that sums of
  -- exponentials over nothing but such tokens are numbers too.
  add("MASKED_LOGIT", -1e30)
  add("SEEN_PROMPT", 0x40000000)
  add("HANG_HOST", -1) -- in place of a counter: the host gave no mask
  add("HANG_TASK_MASK", (1 << M.TASK_BITS) - 1)
  add("HANG_SM_SHIFT", M.TASK_BITS)
  add("HANG_SM_MASK", (1 << M.SM_BITS) - 1)
  add("HANG_ROLE_SHIFT", M.TASK_BITS + M.SM_BITS)
  add("HANG_ROLE_MASK", (1 << ROLE_BITS) - 1)
  add("HANG_STEP_SHIFT", M.STEP_AT)
  add("HANG_STEP_MASK", (1 << 31 - M.STEP_AT) - 1)
  for _, name in ipairs(writer.sorted(values)) do
    add(name:upper(), values[name])
  end
  for _, name in ipairs(writer.sorted(model.shape)) do
    if type(model.shape[name]) == "number" then
      add(name:upper(), model.shape[name])
    end
  end
  add("OPCODES", #registry.list + 1)
  return list
end

local function literal(value)
  if math.type(value) == "float" then
    return writer.float(value)
  elseif value > 0x7fffffff then
    return ("%dll"):format(value)
  end
  return ("%d"):format(value)
end

--- The value of one constant of abi.h.
function M.constant(ctx, name)
  for _, constant in ipairs(all_constants(ctx.model, ctx.graph, ctx.registry)) do
    if constant[1] == name then return constant[2] end
  end
end

local function emit_constants(w, constants)
  for _, constant in ipairs(constants) do
    w:line("#define NMK_%s %s", constant[1], literal(constant[2]))
  end
end

local function emit_enum(w, name, prefix, entries)
  w:open("enum %s {", name)
  for _, entry in ipairs(entries) do
    w:line("%s%s = %d,", prefix, entry[1]:upper(), entry[2])
  end
  w:close("};")
end

local function emit_opcodes(w, used)
  local opcodes = { { "end", 0 } }
  for _, op in ipairs(used) do
    opcodes[#opcodes + 1] = { op.name, op.opcode }
  end
  emit_enum(w, "nmk_opcode", "NMK_OP_", opcodes)
  local words = {}
  for i, name in ipairs(ops.HEADER) do
    words[i] = { name, i - 1 }
  end
  w:line("/* Words of a descriptor: the header, then each opcode's own fields. */")
  emit_enum(w, "nmk_word", "NMK_WORD_", words)
  for _, op in ipairs(used) do
    local fields = {}
    for i, field in ipairs(op.fields) do
      fields[i] = { field.name, field.word }
    end
    if #fields > 0 then
      emit_enum(w, ("nmk_%s_word"):format(op.name), ("NMK_WORD_%s_"):format(op.name:upper()), fields)
    end
  end
end

local function size_of(kind)
  if SIZES[kind] then
    return SIZES[kind], SIZES[kind]
  end
  for _, struct in ipairs(STRUCTS) do
    if struct.name == kind then
      return struct.bytes, 4
    end
  end
end

-- The structs that the model's launches have.
local function structs_of(model)
  local list = {}
  for _, struct in ipairs(STRUCTS) do
    if not struct.launch or struct.launch == model.launch then list[#list + 1] = struct end
  end
  return list
end

local function count_of(field, model)
  if field[4] == COLUMNS then return model.schedule.columns end
  return type(field[4]) == "string" and model.family_module.values(model)[field[4]] or field[4]
end

--- Offsets of a device struct's fields, and its size, by C's rules.
local function layout(struct, model)
  local offset, align, offsets = 0, 1, {}
  for i, field in ipairs(struct) do
    local bytes, unit = size_of(field[1])
    offset = round_up(offset, unit)
    offsets[i] = offset
    offset = offset + bytes * (count_of(field, model) or 1)
    align = math.max(align, unit)
  end
  offset = round_up(offset, align)
  assert(offset == (struct.bytes or offset), struct.name)
  return offsets, offset
end

local function declaration(types, field, model)
  local kind = types[field[1]] or field[1]
  local space = kind:sub(-1) == "*" and "" or " "
  local count = count_of(field, model)
  return kind .. space .. field[2] .. (count and ("[%d]"):format(count) or "") .. ";"
end

local function emit_struct(w, struct, types, model)
  w:line("/* %s */", struct.comment)
  w:open("typedef struct %s {", struct.name)
  for _, field in ipairs(struct) do
    w:line(declaration(types, field, model) .. (field[3] ~= "" and (" /* %s */"):format(field[3]) or ""))
  end
  w:close("} %s;", struct.name)
end

local function emit_asserts(w, struct, model)
  local offsets, bytes = layout(struct, model)
  w:line('_Static_assert(sizeof(%s) == %d, "%s: size");', struct.name, bytes, struct.name)
  for i, field in ipairs(struct) do
    w:line('_Static_assert(offsetof(%s, %s) == %d, "%s.%s: offset");', struct.name, field[2], offsets[i], struct.name,
      field[2])
  end
end

--- Layout numbers as templates/packed.h defines them.
function M.layouts(ctx)
  local text = assert(ctx.read("templates/packed.h"), "templates/packed.h")
  local numbers = {}
  for name, number in text:gmatch("#define NMK_PACKED_(%u[%u%d_]*)%s+(%d+)") do
    numbers[#numbers + 1] = { name:lower(), tonumber(number) }
    numbers[name:lower()] = tonumber(number)
  end
  return numbers
end

local function emit_tables(w, ctx)
  emit_enum(w, "nmk_layout", "NMK_LAYOUT_", M.layouts(ctx))
  for _, struct in ipairs(STRUCTS) do
    if not struct.device then
      emit_struct(w, struct, HOST)
    end
  end
end

local function emit_declarations(w)
  w:raw([[
/* Fills the lists of all SMs; every list ends with opcode 0. counts[sm] is the number of tasks before it. Returns 0, or
 * -1 where the words are not those that nmkgen proved. */
int nmk_encode(int32_t *lists, int32_t counts[NMK_SMS]);

extern const uint64_t nmk_abi_hash; /* of all that no schedule changes: constants, descriptors, structs, weights */
extern const uint64_t nmk_hash; /* the same as NMK_HASH in megakernel.cu */
extern const uint64_t nmk_weights_hash; /* of where weights are and how they are packed */
extern const char *const nmk_model_name;
extern const char *const nmk_target_arch;
extern const int nmk_in_flight[NMK_COLUMNS]; /* stages in flight per SM, by live columns - 1 */
/* Weights that a step streams, by live columns - 1, each byte once, if all experts are chosen alike. */
extern const int64_t nmk_step_weight_bytes[NMK_COLUMNS];
/* The angle by which a pair of dimensions turns from one position to the next; factor of cosine and sine. */
extern const float nmk_rope_frequencies[NMK_HEAD_DIM / 2];
extern const float nmk_rope_scale;
extern const nmk_array nmk_arrays[];
extern const int nmk_array_count;
extern const nmk_tensor nmk_tensors[];
extern const int nmk_tensor_count;
extern const nmk_buffer nmk_buffers[];
extern const int nmk_buffer_count;
extern const nmk_config nmk_configs[];
extern const int nmk_config_count;
extern const nmk_node nmk_nodes[];
extern const int nmk_node_count; /* NMK_NODES */
extern const nmk_field nmk_fields[];
extern const int nmk_field_count;
extern const char *const nmk_opcode_names[NMK_OPCODES];
extern const char *const nmk_role_names[NMK_ROLES];
extern const char *const nmk_counter_names[]; /* the node that signals it, NMK_COUNTERS names */
]])
end

--- What both machines share, in the host's or the device's types.
local function emit_shared(w, ctx, types)
  emit_constants(w, all_constants(ctx.model, ctx.graph, ctx.registry))
  w:line("")
  emit_opcodes(w, M.used_ops(ctx.graph, ctx.registry))
  w:line("")
  for _, struct in ipairs(structs_of(ctx.model)) do
    if struct.device then
      emit_struct(w, struct, types, ctx.model)
    end
  end
end

local function emit_arrays(w, ctx)
  for _, a in ipairs(ctx.graph.arrays) do
    w:line("%s %s %d %d %d %d %d %d", a.name, a.layout, a.layer0, a.layers, a.experts, a.rows, a.cols, a.kib)
  end
end

--- Hash of what programs take from abi.h and encoder.c whatever the schedule is.
function M.fixed_hash(ctx)
  local w = writer.new("fixed")
  w:line("%s %s %s", ctx.model.name, ctx.model.target.name, ctx.model.target.arch)
  for _, constant in ipairs(all_constants(ctx.model, ctx.graph, ctx.registry)) do
    if not SCHEDULED[constant[1]] then w:line("%s %s", constant[1], literal(constant[2])) end
  end
  emit_opcodes(w, ctx.registry.list)
  for _, struct in ipairs(structs_of(ctx.model)) do
    if struct.device then emit_asserts(w, struct, ctx.model) end
  end
  emit_arrays(w, ctx)
  return writer.fnv(w:text())
end

--- Hash of what a program's generations have to agree on, so that one loaded checkpoint serves them all.
function M.weights_hash(ctx)
  local w = writer.new("weights")
  emit_arrays(w, ctx)
  return writer.fnv(w:text())
end

--- abi.h. ctx as in emit/files.lua, without hash.
function M.header(ctx)
  local w = writer.new("abi.h")
  w:line(writer.banner(ctx.sources))
  w:line("#ifndef NMK_ABI_H")
  w:line("#define NMK_ABI_H")
  w:line("")
  w:line("#include <stddef.h>")
  w:line("#include <stdint.h>")
  w:line("")
  emit_shared(w, ctx, HOST)
  w:line("")
  for _, struct in ipairs(structs_of(ctx.model)) do
    if struct.device then
      emit_asserts(w, struct, ctx.model)
    end
  end
  w:line("")
  emit_tables(w, ctx)
  w:line("")
  emit_declarations(w)
  w:line("")
  w:line("#endif")
  return w:text()
end

--- The same for the device, into an open writer.
function M.device(w, ctx)
  emit_shared(w, ctx, DEVICE)
  for _, struct in ipairs(structs_of(ctx.model)) do
    if struct.device then
      local _, bytes = layout(struct, ctx.model)
      w:line('static_assert(sizeof(%s) == %d, "%s: size");', struct.name, bytes, struct.name)
    end
  end
end

return M
