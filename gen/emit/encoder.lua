-- encoder.c: the task lists as compact tables, and the tables by which the runtime finds weights, buffers and names.
--
-- A run is what consecutive positions of all lists hold of one node. Runs are taken so that appending their tasks, run
-- after run, gives every SM its list in order, whatever the order is. Columns (values that differ between the tasks of
-- a run) are stored relative to their first entry, so all layers share them.
local abi = require("emit.abi")
local ops = require("ops")
local plan = require("plan")
local writer = require("emit.writer")
local zeros = require("zeros")

local M = {}

local WORDS = ops.WORDS

--- The lists cut into runs: { node =, sms = { of each task }, at = { first index of its words, less one } }.
local function cut_runs(g, sms)
  local at, runs = {}, {}
  for sm = 0, sms - 1 do
    at[sm] = 1
  end
  local lists = g.lists
  while true do
    local node
    for sm = 0, sms - 1 do
      local task = lists[sm][at[sm]]
      if task and (not node or task.node.id < node.id) then
        node = task.node
      end
    end
    if not node then
      return runs
    end
    local run = { node = node, sms = {}, at = {} }
    for sm = 0, sms - 1 do
      local list = lists[sm]
      local i = at[sm]
      while list[i] and list[i].node == node do
        run.sms[#run.sms + 1], run.at[#run.at + 1] = sm, (i - 1) * WORDS
        i = i + 1
      end
      at[sm] = i
    end
    runs[#runs + 1] = run
  end
end

--- All columns in one array; equal ones once.
local Columns = {}
Columns.__index = Columns

-- True where the values are there from index `start`, as C counts, onwards.
function Columns:holds(start, values)
  local all = self.values
  for i = 1, #values do
    if all[start + i] ~= values[i] then
      return false
    end
  end
  return true
end

--- Index of the column's first value, as C counts.
function Columns:add(values)
  -- A number for the whole column, so that few have to be compared.
  local key = #values
  for i = 1, #values do
    key = key * 31 + values[i]
  end
  local same = self.start[key]
  if not same then
    same = {}
    self.start[key] = same
  end
  for _, start in ipairs(same) do
    if self.length[start] == #values and self:holds(start, values) then
      return start
    end
  end
  local start = #self.values
  same[#same + 1], self.length[start] = start, #values
  table.move(values, 1, #values, start + 1, self.values)
  return start
end

--- Values of word w (from 0) over a run's tasks: the first, and the column where they differ or nil. lists[i], at[i]:
--- where the words of task i are.
local function word_of(lists, at, w, columns)
  w = w + 1
  local base, n = lists[1][at[1] + w], #lists
  for i = 2, n do
    if lists[i][at[i] + w] ~= base then
      local values = zeros(n)
      for k = i, n do
        values[k] = lists[k][at[k] + w] - base
      end
      return base, columns:add(values)
    end
  end
  return base
end

local function emit_runs(w, ctx)
  local columns = setmetatable({ values = {}, start = {}, length = {} }, Columns)
  local sets, rows = {}, {}
  for _, run in ipairs(cut_runs(ctx.graph, ctx.model.target.sms)) do
    local op = ctx.registry.by_name[run.node.op]
    local header, first = {}, #sets
    local lists, at = {}, run.at
    for i, sm in ipairs(run.sms) do
      lists[i] = ctx.words[sm]
    end
    for i = 0, ops.FIRST_WORD - 1 do
      local base, column = word_of(lists, at, i, columns)
      header[i + 1] = i == 0 and "NMK_OP_" .. op.name:upper() or tostring(base)
      if column then
        sets[#sets + 1] = ("{NMK_WORD_%s, %d, %d},"):format(ops.HEADER[i + 1]:upper(), base, column)
      end
    end
    for _, field in ipairs(op.fields) do
      local base, column = word_of(lists, at, field.word, columns)
      if base ~= 0 or column then
        sets[#sets + 1] = ("{NMK_WORD_%s_%s, %d, %d},"):format(op.name:upper(), field.name:upper(), base, column or -1)
      end
    end
    rows[#rows + 1] = ("{{%s}, %d, %d, %d, %d}, /* %s */"):format(table.concat(header, ", "), #run.sms,
      columns:add(run.sms), first, #sets - first, run.node.name)
  end
  w:open("static const int32_t columns[] = {")
  w:wrap(columns.values)
  w:close("};")
  w:line("")
  w:open("static const struct set sets[] = {")
  for _, row in ipairs(#sets > 0 and sets or { "{0, 0, 0}," }) do
    w:line(row)
  end
  w:close("};")
  w:line("")
  w:open("static const struct run runs[] = {")
  for _, row in ipairs(rows) do
    w:line(row)
  end
  w:close("};")
  w:line("")
  w:line("#define WORDS_HASH 0x%016xu", ctx.words_hash)
end

--- A table of structs with its count.
local function emit_table(w, struct, name, rows)
  w:open("const %s %ss[] = {", struct, name)
  for _, row in ipairs(rows) do
    w:line("%s", "{" .. row .. "},")
  end
  if #rows == 0 then
    w:line("{0},")
  end
  w:close("};")
  w:line("const int %s_count = %d;", name, #rows)
  w:line("")
end

local function emit_strings(w, declaration, list)
  w:open("const char *const %s = {", declaration)
  local quoted = {}
  for i, text in ipairs(list) do
    quoted[i] = writer.string(text)
  end
  w:wrap(quoted)
  w:close("};")
  w:line("")
end

local function emit_weights(w, ctx)
  local numbers, index, arrays, tensors = abi.layouts(ctx), {}, {}, {}
  for i, a in ipairs(ctx.graph.arrays) do
    local layout = assert(numbers[a.layout], a.layout)
    index[a.name] = i - 1
    arrays[i] = ("%s, %d, %d, %d, %d, %d, %d, %d, %d, %d"):format(writer.string(a.name), layout, a.layer0, a.layers,
      a.experts, a.rows, a.cols, a.kib, a.layer_kib, a.expert_kib)
  end
  for i, t in ipairs(ctx.graph.tensors) do
    tensors[i] = ("%s, %d, %d, %d, %d, %d, %d, %d, %d, %d"):format(writer.string(t.name), t.dims, t.layer0,
      t.layers, t.experts, t.rows, t.cols, assert(index[t.array], t.array), t.row0, t.twin and 1 or 0)
  end
  emit_table(w, "nmk_array", "nmk_array", arrays)
  emit_table(w, "nmk_tensor", "nmk_tensor", tensors)
end

local function emit_buffers(w, ctx)
  local rows = {}
  for i, b in ipairs(ctx.graph.buffers) do
    rows[i] = ("%s, %d, %d, %d"):format(writer.string(b.name), b.offset128, b.extent, b.bytes)
  end
  emit_table(w, "nmk_buffer", "nmk_buffer", rows)
end

--- A value as JSON text.
local function json(value)
  if type(value) == "table" then
    local parts = {}
    for i, item in ipairs(value) do
      parts[i] = json(item)
    end
    return "[" .. table.concat(parts, ",") .. "]"
  elseif type(value) == "string" then
    return '"' .. value:gsub('[%c"\\]', function(c)
      return ("\\u%04x"):format(c:byte())
    end) .. '"'
  elseif math.type(value) == "float" then
    for digits = 15, 17 do
      local text = ("%." .. digits .. "g"):format(value)
      if tonumber(text) == value then
        return text
      end
    end
  end
  return tostring(value)
end

local function emit_config(w, ctx)
  local rows = {}
  for i, c in ipairs(ctx.model.config) do
    rows[i] = ("%s, %s, %s, %d"):format(writer.string(c.path), c.or_path and writer.string(c.or_path) or "NULL",
      writer.string(json(c.value)), c.required and 1 or 0)
  end
  emit_table(w, "nmk_config", "nmk_config", rows)
end

local function emit_names(w, ctx)
  local opcodes, nodes, fields, counters = { "end" }, {}, {}, abi.counter_names(ctx.graph)
  for i, node in ipairs(ctx.graph.nodes) do
    nodes[i] = ("%s, NMK_OP_%s, %d"):format(writer.string(node.name), node.op:upper(), node.layer)
  end
  for _, op in ipairs(ctx.registry.list) do
    opcodes[#opcodes + 1] = op.name
  end
  for _, op in ipairs(abi.used_ops(ctx.graph, ctx.registry)) do
    for _, field in ipairs(op.fields) do
      local name = op.name:upper()
      fields[#fields + 1] = ("NMK_OP_%s, NMK_WORD_%s_%s, %s"):format(name, name, field.name:upper(),
        writer.string(field.name))
    end
  end
  emit_table(w, "nmk_node", "nmk_node", nodes)
  emit_table(w, "nmk_field", "nmk_field", fields)
  emit_strings(w, "nmk_opcode_names[NMK_OPCODES]", opcodes)
  emit_strings(w, ("nmk_role_names[%d]"):format(#ops.ROLES), ops.ROLES)
  emit_strings(w, "nmk_counter_names[]", #counters > 0 and counters or { "?" })
end

local function emit_step_bytes(w, ctx)
  local values, bytes = ctx.model.family_module.values(ctx.model), {}
  for b = 1, ctx.model.schedule.columns do
    bytes[b] = ("%d"):format(math.floor(plan.weight_bytes(ctx.graph, values, b)))
  end
  w:open("const int64_t nmk_step_weight_bytes[NMK_COLUMNS] = {")
  w:wrap(bytes)
  w:close("};")
end

--- A number as C, rounded to a float.
local function float(value)
  return writer.float((string.unpack("<f", string.pack("<f", value))))
end

local function emit_rope(w, ctx)
  local rope, words = ctx.model.family_module.rope(ctx.model), {}
  for i, frequency in ipairs(rope) do words[i] = float(frequency) end
  w:open("const float nmk_rope_frequencies[NMK_HEAD_DIM / 2] = {")
  w:wrap(words)
  w:close("};")
  w:line("const float nmk_rope_scale = %s;", float(rope.scale))
end

local function emit_facts(w, ctx)
  w:line("const uint64_t nmk_abi_hash = 0x%016xull;", abi.fixed_hash(ctx))
  w:line("const uint64_t nmk_hash = %s;", ctx.hash)
  w:line("const uint64_t nmk_weights_hash = 0x%016xull;", abi.weights_hash(ctx))
  w:line("const char *const nmk_model_name = %s;", writer.string(ctx.model.name))
  w:line("const char *const nmk_target_arch = %s;", writer.string(ctx.model.target.arch))
  local in_flight = {}
  for i = 1, ctx.model.schedule.columns do
    in_flight[i] = tostring(ctx.model.schedule.in_flight[i])
  end
  w:line("const int nmk_in_flight[NMK_COLUMNS] = {%s};", table.concat(in_flight, ", "))
  emit_step_bytes(w, ctx)
  emit_rope(w, ctx)
  w:line("")
end

--- encoder.c. ctx as in emit/files.lua.
function M.text(ctx)
  local w = writer.new("encoder.c")
  w:line(writer.banner(ctx.sources))
  local path = "templates/encoder.c"
  w:template(assert(ctx.read(path), path), path, {
    tables = function(out)
      emit_runs(out, ctx)
    end,
  })
  w:line("")
  emit_facts(w, ctx)
  emit_weights(w, ctx)
  emit_buffers(w, ctx)
  emit_config(w, ctx)
  emit_names(w, ctx)
  return w:text()
end

return M
