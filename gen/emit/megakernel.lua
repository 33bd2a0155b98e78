-- megakernel.cu: the constants, the prelude, every used op in its own namespace, and the kernel with its dispatch.
--
-- Op sections are pasted as they are. What differs between models reaches them as P::name (params) and t.name (fields).
local abi = require("emit.abi")
local ops = require("ops")
local writer = require("emit.writer")

local M = {}

--- `struct P`: an op's parameters.
local function emit_params(w, op, params)
  w:open("struct P {")
  for _, param in ipairs(op.params) do
    local value = params[param.name]
    if param.type == "f32" then
      w:line("static constexpr float %s = %s;", param.name, writer.float(value))
    else
      w:line("static constexpr int %s = %d;", param.name, value)
    end
  end
  w:close("};")
end

--- `struct Task` and the function that reads it from a descriptor.
local function emit_task(w, op)
  local names, values = {}, {}
  for _, field in ipairs(op.fields) do
    local float = field.type == "f32"
    names[#names + 1] = ("%s %s;"):format(float and "float" or "int", field.name)
    values[#values + 1] = (float and "__int_as_float(d[%d])" or "d[%d]"):format(field.word)
  end
  w:line("struct Task { %s };", table.concat(names, " "))
  w:line("static __device__ __forceinline__ Task task(const int *d) { return Task{%s}; }", table.concat(values, ", "))
end

--- What `//@device ROLE VARIANT` calls a target: sm90 for the architecture sm_90a.
local function variant_of(target)
  return (target.arch:gsub("^sm_(%d+)%a?$", "sm%1"))
end

local function section_of(op, role, variant)
  local variants = op.variants[role]
  return variants and variants[variant] or op.sections[role]
end

local function emit_section(w, section)
  w:source(section.line, section.file)
  w:raw(section.text)
end

--- at_NAME(x): what is inserted at a point, one after the other. Without any the value itself: no code.
local function emit_point(w, point, inserted)
  w:open("DEVICE float at_%s(float x) {", point.name)
  for i in ipairs(inserted) do
    w:line("x = at_%s_%d::apply(x);", point.name, i)
  end
  w:line("return x;")
  w:close()
end

local function emit_op(w, op, params, points, variant)
  for _, point in ipairs(op.points) do
    for i, one in ipairs(points[point.name] or {}) do
      w:line("namespace at_%s_%d {", point.name, i)
      emit_params(w, one.op, one.params)
      emit_section(w, one.op.inline.device)
      w:here()
      w:line("} // namespace at_%s_%d", point.name, i)
    end
  end
  w:line("namespace op_%s {", op.name)
  emit_params(w, op, params)
  emit_task(w, op)
  for _, point in ipairs(op.points) do
    emit_point(w, point, points[point.name] or {})
  end
  if op.inline then
    emit_section(w, op.inline.device)
  end
  for _, role in ipairs(ops.ROLES) do
    local section = section_of(op, role, variant)
    if section then
      emit_section(w, section)
    end
  end
  w:here()
  w:line("} // namespace op_%s", op.name)
  w:line("")
end

-- Fields that the code of a pipeline reads. Ops whose descriptors agree on their words share one case.
local PIPELINE_FIELDS = { gemm_x = { load = { "tile", "tiles", "weight_kib" }, compute = { "tiles" } } }

--- The used ops by the code that plays `role` for them: lists of ops, each list one case, the most frequent first.
--- wide: the normalised x is in a buffer.
local function groups(used, role, instances, wide)
  local list, by_key = {}, {}
  for _, op in ipairs(used) do
    local pipeline = op.supplied[role]
    if op.roles[role] and op.sections[role] then
      list[#list + 1] = { op, section = op.sections[role] }
    elseif pipeline then
      local key = { pipeline, op.wait }
      for _, name in ipairs(PIPELINE_FIELDS[pipeline][role]) do
        key[#key + 1] = ("%s=%d"):format(name, op.word[name])
      end
      if wide and role == "compute" then key[#key + 1] = ("xn=%d"):format(op.word.xn) end
      key = table.concat(key, " ")
      if not by_key[key] then
        by_key[key] = { pipeline = pipeline }
        list[#list + 1] = by_key[key]
      end
      table.insert(by_key[key], op)
    end
  end
  for _, group in ipairs(list) do
    group.instances = 0
    for _, op in ipairs(group) do group.instances = group.instances + instances[op.name] end
  end
  table.sort(list, function(a, b)
    if a.instances ~= b.instances then
      return a.instances > b.instances
    end
    return a[1].opcode < b[1].opcode
  end)
  return list
end

-- Whether a role has something to do before it waits, of which the op's section is the `struct Before`.
local function begins_early(op, section, params)
  return section and section.text:find("struct%s+Before") and (not op.early or params[op.name][op.early] == 1)
end

--- The body of one case. Waiting and signalling are the dispatch's: an op knows of neither (the skeleton signals after
--- all cases). In the compute role the pipelines run after the cases too, one copy for all their ops: a gemm_x case
--- only says how many tiles (an op with run-time claims: that more may follow), a row_tile case where its operand is.
--- wide: of a gemm_x case too, and how many tiles one expert has.
local function emit_case(w, group, role, wide, params)
  local op = group[1]
  local before = begins_early(op, group.section, params)
  local call = ("op_%s::%s(c, t%s);"):format(op.name, role, before and ", b" or "")
  if role == "compute" and op.pipeline == "gemm_x" then
    call = group.pipeline and "tiles = t.tiles;" or ("tiles = op_%s::compute(c, t), claimed = %s;"):format(op.name,
      op.claim and "true" or "false")
    if wide then
      call = call .. " xn = c.buffer<bf16>(t.xn);"
      if op.claim then call = call .. (" chunks = op_%s::CHUNKS, instance = d[7];"):format(op.name) end
    end
  elseif role == "compute" and op.pipeline == "row_tile" then
    call = ("row = op_%s::compute(c, t), width = op_%s::WIDTH;"):format(op.name, op.name)
  elseif group.pipeline then
    call = ("%s_%s(c, t);"):format(group.pipeline, role)
  end
  w:open("%s_%s: {", role, op.name)
  w:line("const op_%s::Task t = op_%s::task(d);", op.name, op.name)
  if before then
    w:line("const op_%s::Before b = op_%s::before(c, t);", op.name, op.name)
  end
  if op.optional then
    w:line("if (__builtin_expect(!c.awake(), 1)) goto %s_done;", role)
  end
  if op.wait == role and (role ~= "compute" or before) then
    w:line("c.wait_task(d);")
  end
  w:line(call)
  if role == "compute" and op.signal == role then w:line("c.signal_together(d);") end
  w:line(ops.SIGNALS.step[role] and op.signal ~= role and "continue;" or ("goto %s_done;"):format(role))
  w:close()
end

--- The dispatch of a role: all comparisons first, close together, then the bodies. A switch would become an indirect
--- jump through constant memory, an if-else chain a walk over all the bodies; both miss the instruction cache.
local function emit_dispatch(w, used, role, instances, wide, params)
  local list = groups(used, role, instances, wide)
  for _, group in ipairs(list) do
    local codes = {}
    for i, member in ipairs(group) do codes[i] = "NMK_OP_" .. member.name:upper() end
    local test = ("is(op, %s)"):format(codes[1])
    if #codes > 1 then test = ("is_any(op, 1u << %s)"):format(table.concat(codes, " | 1u << ")) end
    w:line("if (%s) goto %s_%s;", test, role, group[1].name)
  end
  w:line(role == "load" and "goto load_done;" or "continue;")
  for _, group in ipairs(list) do
    emit_case(w, group, role, wide, params)
  end
  w:line("%s_done:;", role)
end

--- Whether the op leaves its sums to the skeleton of a prefill launch.
local function is_product(op)
  return op.sections.load and op.sections.load.text:find("Product%s+product%(") ~= nil
end

--- Whether what becomes of them too.
local function has_output(op)
  return op.sections.compute.text:find("Output%s+output%(") ~= nil
end

--- The same of a prefill launch, where ops have load and compute alone. The role that waits does so before all else,
--- but load: it may have weights to fetch first. An op with a product() leaves it to the skeleton, one copy for all of
--- them, which comes back for what is the op's own: about(), and store() unless there is an output().
local function emit_chunk_dispatch(w, used, role)
  for _, op in ipairs(used) do
    local product = is_product(op)
    if product or op.sections[role] then
      w:open("if (is(op, NMK_OP_%s)) {", op.name:upper())
      w:line("const op_%s::Task t = op_%s::task(d);", op.name, op.name)
      if op.wait == role and role ~= "load" then w:line("c.wait_task(d);") end
      w:line(product and ("product = op_%s::product(c, t);"):format(op.name) or
        ("op_%s::%s(c, t);"):format(op.name, role))
      if product and role == "compute" and has_output(op) then w:line("output = op_%s::output(c, t);", op.name) end
      if not product then w:line("goto %s_done;", role) end
      w:close()
    end
  end
end

local function emit_products(w, used, what, arguments)
  for _, op in ipairs(used) do
    if is_product(op) and (what == "about" or not has_output(op)) then
      w:line("if (is(op, NMK_OP_%s)) return op_%s::%s(c, op_%s::task(d), %s);", op.name:upper(), op.name, what, op.name,
        arguments)
    end
  end
end

--- A set of opcodes as the bits of a word.
local function emit_set(w, name, used, holds)
  local bits = { "0u" }
  for _, op in ipairs(used) do
    if holds(op) then
      assert(op.opcode < 32, "a set of opcodes has 32 bits")
      bits[#bits + 1] = ("1u << NMK_OP_%s"):format(op.name:upper())
    end
  end
  bits[#bits] = bits[#bits] .. ";"
  w:open("constexpr u32 %s =", name)
  w:wrap(bits, " | ")
  w.depth = w.depth - 1
end

--- WAITS_COMPUTE: the compute part waits before anything else; one wait in front of the chain serves them all.
--- HANDS: ops of the pipeline row_tile that hand on what they have summed up (handing.lua).
--- EASED: the task's weights stream with one stage less in flight. RAGGED: widths of row_tile ops, see the prelude.
local function emit_sets(w, used, params)
  emit_set(w, "WAITS_COMPUTE", used, function(op)
    return op.wait == "compute" and not begins_early(op, op.sections.compute, params)
  end)
  emit_set(w, "HANDS", used, function(op)
    return op.pipeline == "row_tile" and (params[op.name] or {}).hands == 1
  end)
  emit_set(w, "EASED", used, function(op)
    return op.eased
  end)
  local widths = { "0u" }
  for _, op in ipairs(used) do
    if op.pipeline == "row_tile" then widths[#widths + 1] = ("RAGGED_BIT<op_%s::WIDTH>"):format(op.name) end
  end
  w:line("constexpr u32 RAGGED = %s;", table.concat(widths, " | "))
end

local function slots(ctx, used)
  local list = {
    relaxed = function(w)
      emit_set(w, "RELAXED", used, function(op)
        return op.relaxed
      end)
      emit_set(w, "HINTED", used, function(op)
        return op.hinted
      end)
    end,
    ops = function(w)
      for _, op in ipairs(used) do
        emit_op(w, op, ctx.graph.params[op.name], ctx.graph.points, variant_of(ctx.model.target))
      end
    end,
    sets = function(w)
      emit_sets(w, used, ctx.graph.params)
    end,
  }
  list["products about"] = function(w) emit_products(w, used, "about", "n") end
  list["products store"] = function(w) emit_products(w, used, "store", "u, n, part, about") end
  local instances = {}
  for _, node in ipairs(ctx.graph.nodes) do
    instances[node.op] = (instances[node.op] or 0) + 1
  end
  for _, role in ipairs(ops.ROLES) do
    list["dispatch " .. role] = function(w)
      if ctx.model.launch == "prefill" then return emit_chunk_dispatch(w, used, role) end
      emit_dispatch(w, used, role, instances, ops.is_wide(ctx.model.schedule.columns), ctx.graph.params)
    end
  end
  return list
end

-- The files pasted, in order, by launch.
local TEMPLATES = {
  step = { "templates/random.h", "templates/sampling.h", "templates/fixed.h", "templates/claim.h",
    "templates/prelude.cuh", "templates/megakernel.cu", "templates/packed.h", "templates/pack.cu" },
  prefill = { "templates/random.h", "templates/sampling.h", "templates/claim.h", "templates/packed.h",
    "templates/prelude.cuh", "templates/wgmma.cuh", "templates/attention.cuh", "templates/prefill.cuh",
    "templates/prefill.cu" },
}

--- Numbers that a template spells out in its assembler or its shifts, against the table in abi.lua.
local function check_literals(text, path, launch)
  for _, part in ipairs(abi.WARPS) do
    local registers = text:match(("setmaxnreg%%.%s%%.sync%%.aligned%%.u32 (%%d+);"):format(part.what))
    local right = launch == "prefill" and part.prefill or part.registers
    if registers and tonumber(registers) ~= right then
      error(("%s: setmaxnreg.%s %s: emit/abi.lua has %d"):format(path, part.what, registers, right), 0)
    end
  end
  local role, sm = text:match("role << (%d+) | blockIdx%.x << (%d+) | task")
  if role and (tonumber(sm) ~= abi.TASK_BITS or tonumber(role) ~= abi.TASK_BITS + abi.SM_BITS) then
    error(("%s: a hang's word has the SM at bit %s, the role at %s: emit/abi.lua differs"):format(path, sm, role), 0)
  end
end

--- What the generator counted with is what the kernel has.
local function emit_block_asserts(w)
  w:line('static_assert(WARPS_COMPUTE == %d && WARPS_ALL * 32 == NMK_THREADS, "the warps of a block");',
    abi.WARPS[1].count)
  w:line('static_assert(SHARED_BYTES - SHARED_JOBS <= NMK_SHARED_REST_BYTES, "shared memory beside the ring");')
end

-- What a kernel is called where it is a part of one that is a step and behind it a chunk (templates/mixed.cu): the text
-- of both, one after the other, with NMK_MIXED defined.
local PARTS, GO_ON, MIXED = { step = "of_step", prefill = "of_chunk" }, "templates/mixed.cuh", "templates/mixed.cu"

--- The end of a part: the next one defines the same names.
local function end_part(w, launch)
  local defined = {}
  for name in w:text():gmatch("\n%s*#define ([%a_][%w_]*)") do defined[name] = true end
  w:line("#ifdef NMK_MIXED")
  w:line("} // namespace %s", PARTS[launch])
  for _, name in ipairs(writer.sorted(defined)) do w:line("#undef %s", name) end
  w:line("#endif")
end

local HASH_LINE = "#define NMK_HASH"

--- The kernel's text with the hash of everything that went in.
function M.with_hash(text, hash)
  local _, to = text:find(HASH_LINE, 1, true)
  return text:sub(1, to) .. " " .. hash .. text:sub(to + 1)
end

--- megakernel.cu without its hash. ctx as in emit/files.lua, without hash.
function M.text(ctx)
  local used = abi.used_ops(ctx.graph, ctx.registry)
  local w = writer.new("megakernel.cu")
  w:line(writer.banner(ctx.sources))
  w:line(HASH_LINE)
  w:line("")
  w:line("#ifdef NMK_MIXED")
  if ctx.model.launch == "step" then w:template(assert(ctx.read(GO_ON), GO_ON), GO_ON, {}) end
  w:line("namespace %s {", PARTS[ctx.model.launch])
  w:line("#endif")
  abi.device(w, ctx)
  w:line("")
  local fill = slots(ctx, used)
  for _, path in ipairs(TEMPLATES[ctx.model.launch]) do
    local text = assert(ctx.read(path), path)
    check_literals(text, path, ctx.model.launch)
    w:template(text, path, fill)
  end
  emit_block_asserts(w)
  end_part(w, ctx.model.launch)
  if ctx.model.launch == "prefill" then
    w:line("#ifdef NMK_MIXED")
    w:template(assert(ctx.read(MIXED), MIXED), MIXED, {})
    w:line("#endif")
  end
  return w:text()
end

return M
