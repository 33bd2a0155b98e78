-- plan.txt: what a step does and what it costs, for people. Nothing reads it back.
local memory = require("memory")
local ops = require("ops")
local region = require("region")
local rows = require("rows")
local writer = require("emit.writer")
local M = {}

local CONTEXT = 8192            -- tokens of each row in the figures
M.CONTEXT = CONTEXT

local KIB, MIB = memory.KIB, 1024 * memory.KIB

local function bytes_text(bytes)
  if bytes >= 1e9 then return ("%.3f GB"):format(bytes / 1e9) end
  if bytes >= 1e6 then return ("%.2f MB"):format(bytes / 1e6) end
  return ("%.1f kB"):format(bytes / 1e3)
end

-- The batches shown: powers of two and the most that a step takes.
local function batches(columns)
  local list, b = {}, 1
  while b < columns do
    list[#list + 1] = b
    b = 2 * b
  end
  list[#list + 1] = columns
  return list
end

--- Distinct experts that b tokens reach in one layer if routing is uniform.
function M.distinct_experts(experts, per_token, b)
  if experts == 0 then return 0 end
  return experts * (1 - (1 - per_token / experts) ^ b)
end

-- Work of a task in the unit of its op: tiles, units or one.
local function work_of(node, fields)
  local tile = node.spec.tile
  if tile == "spread" then return fields.tiles end
  if tile == "cyclic" then return region.count(fields.first, fields["end"], fields.step) end
  return 1
end

-- Tasks of a node: how many, and least, mean and most work of one SM.
local function load_of(g, node)
  local least, most, total, busy = math.maxinteger, 0, 0, 0
  for _, task in ipairs(node.tasks) do
    local work = work_of(node, task.fields)
    least, most, total, busy = math.min(least, work), math.max(most, work), total + work, busy + 1
  end
  if busy < g.sms then least = 0 end
  return least, total / g.sms, most
end

-- Bytes that one node streams: fixed, or per distinct expert.
local function node_bytes(g, node)
  local fixed, per_expert = 0, 0
  for field, from in pairs(node.weights or {}) do
    local array = g.array[from.array]
    if array.experts > 0 then
      per_expert = per_expert + array.expert_kib * KIB
    elseif field == "weight_kib" and node.spec.roles.load then
      fixed = fixed + array.expert_kib * KIB
    end
  end
  return fixed, per_expert
end

--- Bytes of weights that a step with b live columns streams, each once, if routing is uniform.
function M.weight_bytes(g, values, b)
  local fixed, per_expert = 0, 0
  for _, node in ipairs(g.nodes) do
    local f, e = node_bytes(g, node)
    fixed, per_expert = fixed + f, per_expert + e
  end
  if per_expert == 0 then return fixed end
  return fixed + per_expert * M.distinct_experts(values.experts, values.experts_per_token, b)
end

local function waits_text(node)
  local names, seen = {}, {}
  for _, task in ipairs(node.tasks) do
    for _, wait in ipairs(task.waits) do
      if not seen[wait.node] then
        seen[wait.node] = true
        names[#names + 1] = ("%s (%d)"):format(wait.node.name, wait.arrivals)
      end
    end
  end
  return #names > 0 and table.concat(names, ", ") or "-"
end

-- Layers of one kind have the same ops with the same constant fields, apart from places and layer numbers.
local function layer_kinds(g)
  local kinds, by_key = {}, {}
  local family, shape = g.model.family_module, g.model.shape
  for layer = 0, shape.layers - 1 do
    local kind = family.layer(layer, shape)
    local key = ("%s MLP, %s attention, %s"):format(kind.mlp, kind.attention, kind.rope and "RoPE" or "no RoPE")
    if not by_key[key] then
      by_key[key] = { name = key, first = layer, layers = {} }
      kinds[#kinds + 1] = by_key[key]
    end
    local layers = by_key[key].layers
    layers[#layers + 1] = layer
  end
  return kinds
end

-- 1, 2, 3, 5 as "1-3, 5".
local function ranges(list)
  local parts, i = {}, 1
  while i <= #list do
    local j = i
    while list[j + 1] == list[j] + 1 do j = j + 1 end
    parts[#parts + 1] = i == j and tostring(list[i]) or ("%d-%d"):format(list[i], list[j])
    i = j + 1
  end
  return table.concat(parts, ", ")
end

local function node_line(w, g, node)
  local least, mean, most = load_of(g, node)
  local work = ("%d / %.1f / %d"):format(least, mean, most)
  local name = node.name:gsub("^layer%d+%.", ""):gsub("^prefill_", "")
  w:line("%-12s %-8s %5d   %-20s %-9s %s", name, node.spec.tile, #node.tasks, work,
    node.counter and ("%d"):format(node.counter) or "-", waits_text(node))
end

local function waves(w, g)
  w:line("")
  w:line("Waves: tasks; tiles, units or tasks of one SM (least / mean / most); counter; waits for (arrivals)")
  local function head(title)
    w:line("")
    w:line("%s", title)
  end
  head("before the layers")
  local layer = -1
  local by_layer, back = {}, {}
  for _, node in ipairs(g.nodes) do
    if node.layer >= 0 then
      layer = node.layer
      by_layer[layer] = by_layer[layer] or {}
      table.insert(by_layer[layer], node)
    elseif layer < 0 then
      node_line(w, g, node)
    else
      back[#back + 1] = node
    end
  end
  for _, kind in ipairs(layer_kinds(g)) do
    head(("%d layers, shown: %d; %s: %s"):format(#kind.layers, kind.first, kind.name, ranges(kind.layers)))
    for _, node in ipairs(by_layer[kind.first]) do node_line(w, g, node) end
  end
  head("after the layers")
  for _, node in ipairs(back) do node_line(w, g, node) end
end

-- Bytes of the KV cache that one row reads: its context, or the window of a sliding layer, in every layer.
local function kv_bytes(model)
  local family, shape = model.family_module, model.shape
  local values, total = family.values(model), 0
  for layer = 0, shape.layers - 1 do
    local sliding = family.layer(layer, shape).attention == "sliding"
    local tokens = math.min(CONTEXT, values.max_context, sliding and values.window or math.maxinteger)
    total = total + tokens * values.kv_heads * values.head_dim * 2 * 2
  end
  return total
end

--- Bytes that a step with b rows of CONTEXT tokens reads, every byte once, if routing is uniform.
function M.step_bytes(g, values, b)
  return kv_bytes(g.model) * b + M.weight_bytes(g, values, b)
end

local function traffic(w, g)
  local model = g.model
  local values, rate = model.family_module.values(model), model.target.read_bytes_per_s
  local order, fixed, per_expert = {}, {}, {}
  for _, node in ipairs(g.nodes) do
    local f, e = node_bytes(g, node)
    if f + e > 0 then
      if not fixed[node.op] then
        order[#order + 1] = node.op
        fixed[node.op], per_expert[node.op] = 0, 0
      end
      fixed[node.op], per_expert[node.op] = fixed[node.op] + f, per_expert[node.op] + e
    end
  end
  w:line("")
  w:line("Bytes read in a step, uniform routing, %d tokens in each row, every byte once",
    math.min(CONTEXT, values.max_context))
  w:line("")
  local function row(name, text_of)
    local cells = {}
    for i, b in ipairs(batches(g.columns)) do cells[i] = ("%12s"):format(text_of(b)) end
    w:line("%-18s%s", name, table.concat(cells))
  end
  local function experts(b) return M.distinct_experts(values.experts, values.experts_per_token, b) end
  local function op_bytes(op, b) return fixed[op] + per_expert[op] * experts(b) end
  local function total(b) return M.step_bytes(g, values, b) end
  row("batch", function(b) return ("%d"):format(b) end)
  if values.experts > 0 then row("distinct experts", function(b) return ("%.1f"):format(experts(b)) end) end
  for _, op in ipairs(order) do row(op, function(b) return bytes_text(op_bytes(op, b)) end) end
  row("kv", function(b) return bytes_text(kv_bytes(model) * b) end)
  row("all", function(b) return bytes_text(total(b)) end)
  row("bound, ms", function(b) return ("%.3f"):format(total(b) / rate * 1e3) end)
  row("bound, tokens/s", function(b) return ("%.0f"):format(b / (total(b) / rate)) end)
  w:line("")
  w:line("at %.2f TB/s, the read rate of target %s", rate / 1e12, model.target.name)
end

-- Multiplications and additions of a token's products, and of its attention on average over a prompt of CONTEXT tokens.
local function work(w, g)
  local model, products, attention = g.model, 0, 0
  local v, shape, family = model.family_module.values(model), model.shape, model.family_module
  for _, node in ipairs(g.nodes) do
    local from = node.weights.weight_kib
    local array = from and node.spec.roles.load and g.array[from.array]
    local rows_of = array and array.rows - (node.fields.first_row or 0) or 0
    if array then products = products + 2 * rows_of * array.cols * (array.experts > 0 and v.experts_per_token or 1) end
  end
  for layer = 0, shape.layers - 2 do
    local n = math.min(CONTEXT, v.max_context)
    local window = family.layer(layer, shape).attention == "sliding" and math.min(v.window, n) or n
    local seen = (window * (window + 1) / 2 + (n - window) * window) / n
    attention = attention + 4 * seen * v.q_width
  end
  w:line("")
  w:line("A token: %.2f GFLOP of products, %.2f of attention (mean over a prompt of %d tokens)", products / 1e9,
    attention / 1e9, math.min(CONTEXT, v.max_context))
end

local function places(w, g)
  w:line("")
  w:line("Activation arena: %s (%d bytes), offsets in units of %d bytes", bytes_text(g.arena_bytes), g.arena_bytes,
    memory.UNIT)
  w:line("")
  for _, buffer in ipairs(g.buffers) do
    w:line("%-14s at %8d  %10d bytes  %7d units", buffer.name, buffer.offset128, buffer.bytes, buffer.extent)
  end
  w:line("")
  w:line("Weight arena: %s (%d KiB)", bytes_text(g.weights_kib * KIB), g.weights_kib)
  w:line("")
  for _, a in ipairs(g.arrays) do
    local experts = a.experts > 0 and (" x %d experts"):format(a.experts) or ""
    w:line("%-12s at KiB %10d  %d layers%s, %d x %d, %s, %.1f MiB a layer", a.name, a.kib, a.layers, experts, a.rows,
      a.cols, a.layout, a.layer_kib * KIB / MIB)
  end
end

-- What `insert:` of a spec may name, and what is inserted.
local function values(w, g)
  w:line("")
  w:line("Values behind which a spec can insert an op: type, elements of a column's row; who writes, who reads")
  w:line("")
  for _, value in ipairs(g.values) do
    if value.point then
      w:line("%-14s %-5s %8s   in registers of %s", value.name, value.type, "", value.point)
    else
      w:line("%-14s %-5s %8s   %s; %s", value.name, value.type, value.width and ("%d"):format(value.width) or "-",
        #value.writes > 0 and table.concat(value.writes, ", ") or "-", table.concat(value.reads, ", "))
    end
  end
  for _, name in ipairs(writer.sorted(g.points)) do
    for _, one in ipairs(g.points[name]) do w:line("inserted at %s: %s", name, one.op.name) end
  end
end

local function lists(w, g, stats)
  local least, most, total = math.maxinteger, 0, 0
  for sm = 0, g.sms - 1 do
    local n = #g.lists[sm]
    least, most, total = math.min(least, n), math.max(most, n), total + n
  end
  local cost_least, cost_most, cost_total = math.huge, 0, 0
  for sm = 0, g.sms - 1 do
    local cost = g.cost[sm]
    cost_least, cost_most, cost_total = math.min(cost_least, cost), math.max(cost_most, cost), cost_total + cost
  end
  w:line("")
  w:line("Lists: %d tasks, %d to %d on an SM; %s of words", total, least, most, bytes_text(total * ops.WORDS * 4))
  w:line("Bytes of an SM that are dealt beforehand (all but experts and KV): %s to %s, mean %s", bytes_text(cost_least),
    bytes_text(cost_most), bytes_text(cost_total / g.sms))
  w:line("Counters: %d, one for each node that is waited for", g.counters)
  w:line("Proof: %d waits, %d pairs of accesses in order, %d threads, %d distinct clocks", stats.waits, stats.pairs,
    stats.threads, stats.bases)
  w:line("A block: at most %d bytes of shared memory, %d registers", stats.shared_bytes, stats.registers)
end

-- What the schedule's keys are and where they come from.
local function schedule(w, model)
  if not model.origins then return end
  w:line("")
  w:line("Schedule")
  for _, o in ipairs(model.origins) do
    local head = ("%-26s %-24s "):format(o.key, rows.text(o.value))
    w:line("%s%s", #head + #o.from > 120 and head:sub(1, 100) .. "... " or head, o.from)
  end
end

-- The plan of the launches that take prompts.
local function prefill(g, stats)
  local model = g.model
  local w = writer.new("plan.txt")
  w:line("DO NOT EDIT: generated by nmkgen from %s", model.source)
  w:line("")
  w:line("%s on %s, prefill: %d layers, %d SMs, chunks of up to %d tokens of %d rows, which see up to %d", model.name,
    model.target.name, model.shape.layers, g.sms, model.prefill.tokens, model.family_module.values(model).spans,
    model.family_module.values(model).key_tokens)
  lists(w, g, stats)
  work(w, g)
  waves(w, g)
  places(w, g)
  return w:text()
end

--- Requires: a proved graph and what check returned. Returns the text of plan.txt.
function M.text(g, stats)
  local model = g.model
  if model.launch == "prefill" then return prefill(g, stats) end
  local w = writer.new("plan.txt")
  w:line("DO NOT EDIT: generated by nmkgen from %s", model.source)
  w:line("")
  w:line("%s on %s: %d layers, %d SMs, %d column%s, ring of %d stages, %s", model.name, model.target.name,
    model.shape.layers, g.sms, g.columns, g.columns == 1 and "" or "s", model.schedule.ring_stages,
    model.schedule.exchange == "validated" and "every layer has its own buffers, whose words tell that they are there"
    or model.schedule.reuse_buffers and "layers share buffers" or "every layer has its own buffers")
  schedule(w, model)
  lists(w, g, stats)
  traffic(w, g)
  waves(w, g)
  places(w, g)
  values(w, g)
  return w:text()
end

return M
