-- The model spec: specs/MODEL.yaml, its target and its family, checked and turned into plain values.
--
-- Owns: which keys there are, their types, ranges and defaults, and what must hold between them.  Every key is a row of
-- a table below (rows.lua tells of rows); the keys of `shape:` are rows of the family's own table.
--
-- A key of `schedule:` comes from the first of these that has it: --set on the command line, the spec itself, the part
-- for this target in the tuning file beside the spec (specs/MODEL.tuning.yaml, which `nmkgen tune` writes), default.
local abi = require("emit.abi")
local diags = require("diag")
local families = require("family")
local host = require("host")
local placement = require("placement")
local rows = require("rows")

local M = {}

-- Ends the names of tuning files, which are no models.
M.TUNING = ".tuning.yaml"

-- ---------------------------------------------------------------- what may be written

-- tries: values that `nmkgen tune` tries, where the type does not say it.
local SPLIT = {
  { "chunks_min", "int", min = 1, max = abi.MAX_PARTS, default = 16, tries = { 8, 12, 16, 24, 32 },
    doc = "chunks of a long row up to which chunks stay short" },
  { "chunks_max", "int", min = 1, max = abi.MAX_PARTS, default = 32, doc = "most chunks of one row" },
  { "pages_per_chunk", "int", min = 1, max = 1024, default = 4, tries = { 2, 3, 4, 6, 8 },
    doc = "pages of a chunk while there are few" },
  { "pages_per_long_chunk", "int", min = 1, max = 1024, default = 8, tries = { 4, 8, 16 },
    doc = "pages of a chunk beyond chunks_min" },
  { "own_pages", "int", min = 0, max = 64, default = 0,
    doc = "pages that a step's own tokens count as, which the last chunk has beside so many pages less" },
}

local PLACEMENT = {
  { "rule", "word", choices = placement.RULES, default = placement.DEFAULT.rule,
    doc = "which SMs take the work that does not divide evenly" },
  { "seed", "int", min = 0, max = 2147483647, default = placement.DEFAULT.seed, doc = "of the rule random" },
}

-- An op finds its key as the parameter claim_KEY.
local CLAIM = {
  { "up", "word", choices = { "static", "tail", "queue" }, default = "tail",
    doc = "chunks of the experts' gate and up rows: all dealt, all but the last rounds dealt, or all claimed" },
  { "attention", "word", choices = { "static", "full", "queue" }, default = "static",
    doc = "chunks of attention: all dealt, those of full layers claimed, or all claimed" },
}

local SCHEDULE = {
  { "columns", "int", min = 1, max = 64, default = 8,
    doc = "most rows that a step decodes, or positions of a prompt that it takes" },
  { "ring_stages", "int", min = abi.LEAST_RING_STAGES, max = abi.MOST_RING_STAGES, default = abi.MOST_RING_STAGES,
    tries = { 8, 10, 11, 12 },
    doc = "depth of the weight ring, 16 KiB a stage; less by default where a wide residual leaves no room" },
  { "in_flight", "ints", min = 1, max = abi.MOST_RING_STAGES, default = { 3, 3, 3, 3, 4, 4, 4, 4 },
    doc = "most stages in flight for 1, 2, ... live columns; the last for all that follow" },
  { "l2_stages", "int", min = 0, max = 64, default = 0,
    doc = "stages that the L2 takes while the ring is full, where no fences wait for them: of exchange validated" },
  { "order", "order", doc = "waves of a layer, as they are dealt" },
  { "placement", "map", keys = PLACEMENT, default = {}, doc = "how tasks are given to SMs" },
  { "split", "map", keys = SPLIT, default = {}, doc = "how attention cuts a row's pages into chunks" },
  { "claim", "map", keys = CLAIM, default = {}, doc = "what is dealt to SMs by number, and what is claimed by ticket" },
  { "reuse_buffers", "bool", default = true, doc = "layers share activation buffers; false keeps all" },
  { "exchange", "word", choices = { "fenced", "validated" }, default = "fenced",
    doc = "how SMs know that others' data is there: by counters, as always where a step has more than 8 columns, or " ..
      "by its words, in buffers of each layer" },
}

local PREFILL = {
  { "tokens", "int", min = 0, max = 65536, default = 8192,
    doc = "most tokens of prompts that one launch takes, a multiple of 256; 0: prompts go through the step" },
}

local INSERT = {
  { "op", "word", doc = "an op of templates/ops with a buffer `in`, or with //@device inline" },
  { "value", "word", doc = "what it reads and replaces for all that read it later: a buffer, or a point of an op" },
  { "layers", "layers", optional = true, doc = "where; default everywhere" },
  { "with", "values", optional = true, doc = "parameters of the op that the family does not give" },
}

local SPEC = {
  { "model", "word", doc = "name of the model and of its build folder" },
  { "family", "word", doc = "a file of specs/families" },
  { "target", "word", doc = "a file of specs/targets" },
  { "shape", "shape", doc = "sizes of the model" },
  { "schedule", "map", keys = SCHEDULE, default = {}, doc = "how a step is laid out" },
  { "prefill", "map", keys = PREFILL, default = {}, doc = "launches that take prompts alone" },
  { "insert", "maps", keys = INSERT, optional = true, doc = "ops between values; `nmkgen plan` lists the values" },
}

-- What gen/estimate.lua knows of a machine.  The lists go together: at in_flight_kib[i] per SM the others' values.
local TIMING = {
  { "in_flight_kib", "numbers", min = 0, max = 1024, default = {}, doc = "KiB in flight an SM, ascending" },
  { "read_share", "numbers", min = 0, max = 1.01, default = {}, doc = "of read_bytes_per_s reached with that" },
  { "gather_ns", "numbers", min = 1, max = 1e6, default = {},
    doc = "until all SMs have read what each wrote, 32 bytes an SM" },
  { "gather8_ns", "numbers", min = 1, max = 1e6, default = {}, doc = "the same, 256 bytes an SM" },
  { "consume_rate", "number", min = 1, max = 100, default = 2, doc = "of the consumers, in stream rates" },
  { "task_ns", "number", min = 0, max = 1e5, default = 0, doc = "of an SM for a task, without its bytes" },
  { "launch_ns", "number", min = 0, max = 1e6, default = 0, doc = "from one step to the first task of the next" },
}

local TARGET = {
  { "name", "word", doc = "name of the target, as the file's" },
  { "arch", "word", doc = "architecture to compile for" },
  { "sms", "int", min = 1, max = 512, doc = "streaming multiprocessors: blocks of the kernel" },
  { "smem_bytes_per_block", "int", min = 65536, max = 1048576, doc = "dynamic shared memory that one block may have" },
  { "regs", "int", min = 65536, max = 1048576, doc = "32-bit registers of an SM" },
  { "read_bytes_per_s", "number", min = 1e11, max = 1e14, doc = "rate at which device memory can be read" },
  { "timing", "map", keys = TIMING, default = {}, doc = "measurements that estimates are made from" },
}

-- What the templates ask of a model, for every family that has the key: { key, test, expectation, uses = keys whose
-- values the message adds }.  A test may meet missing values and then fails; such a rule is skipped.
local LIMITS = {
  { "shape.head_dim", function(m) return m.shape.head_dim == 64 or m.shape.head_dim == 128 end,
    "64 or 128, for which pages and tiles are laid out" },
  { "shape.heads", function(m) return m.shape.heads % m.shape.kv_heads == 0 end,
    "a multiple of kv_heads: each kv head has as many query heads", uses = { "shape.kv_heads" } },
  { "shape.heads", function(m) return m.shape.heads <= 16 * m.shape.kv_heads end,
    "at most 16 * kv_heads: the query heads of a kv head are the columns of two tiles", uses = { "shape.kv_heads" } },
  { "shape.hidden", function(m) return m.shape.hidden % 16 == 0 end, "a multiple of 16, the rows of a tile" },
  { "shape.hidden", function(m) return m.shape.hidden <= 8192 end, "at most 8192, which shared memory holds" },
  { "shape.vocab", function(m) return m.shape.vocab >= abi.TOPS end,
    ("at least %d: as many alternatives have log-probabilities"):format(abi.TOPS) },
  { "shape.experts", function(m) return m.shape.experts <= 128 end, "at most 128: top-k takes 4 experts a lane" },
  { "shape.experts_per_token", function(m) return m.shape.experts_per_token <= 8 end,
    "at most 8: a step has at most 64 active experts" },
  { "shape.expert_ff", function(m) return m.shape.expert_ff % 16 == 0 end, "a multiple of 16: h is read in 8s" },
  { "shape.dense_ff", function(m) return m.shape.dense_ff % 16 == 0 end, "a multiple of 16: h is read in 8s" },
  { "schedule.columns", function(m) return m.schedule.columns <= 8 or m.schedule.columns % 8 == 0 end,
    "at most 8, or a multiple of 8: whole tiles of an MMA" },
  { "prefill.tokens", function(m) return m.prefill.tokens % 256 == 0 end,
    "a multiple of 256, the tokens of a tile" },
  { "schedule.in_flight", function(m)
      for _, n in ipairs(m.schedule.in_flight) do
        if n > m.schedule.ring_stages then return false end
      end
      return true
    end, "at most ring_stages", uses = { "schedule.ring_stages" } },
  { "schedule.split.chunks_max", function(m) return m.schedule.split.chunks_min <= m.schedule.split.chunks_max end,
    "at least chunks_min", uses = { "schedule.split.chunks_min" } },
  { "schedule.split.pages_per_long_chunk",
    function(m) return m.schedule.split.pages_per_chunk <= m.schedule.split.pages_per_long_chunk end,
    "at least pages_per_chunk", uses = { "schedule.split.pages_per_chunk" } },
  { "schedule.split.own_pages",
    function(m) return m.schedule.split.own_pages == 0 or m.schedule.claim.attention == "static" end,
    "0 where chunks of attention are claimed: those have a page each", uses = { "schedule.claim.attention" } },
}

-- ---------------------------------------------------------------- rules between keys

local function lookup(m, path)
  local value = m
  for key in path:gmatch("[^.]+") do
    value = type(value) == "table" and value[key] or nil
    if value == nil then return nil end
  end
  return value
end

-- A rule is skipped where a value that it needs is missing or was wrong; that has its own message.  Returns why the
-- test could not run, nil where it could.
local function check_rule(m, reader, path, test, expectation, uses)
  local value, with = lookup(m, path), {}
  if value == nil then return end
  for i, use in ipairs(uses or {}) do
    local other = lookup(m, use)
    if other == nil then return end
    with[i] = ("%s is %s"):format(use, rows.text(other))
  end
  local ok, result = pcall(test)
  if not ok then return result end
  if result then return end
  reader:error(reader.pos[path], path, "must be %s; it is %s%s", expectation, rows.text(value),
    #with > 0 and ", where " .. table.concat(with, ", ") or "")
end

-- complete: there are no holes, so a test that cannot run is a mistake of the family.
local function check_rules(m, reader, family, complete, diag)
  for _, rule in ipairs(LIMITS) do
    check_rule(m, reader, rule[1], function() return rule[2](m) end, rule[3], rule.uses)
  end
  for _, rule in ipairs(family.rules) do
    local uses = {}
    for i, use in ipairs(rule.uses or {}) do uses[i] = "shape." .. use end
    local why = check_rule(m, reader, "shape." .. rule[1], function() return rule[2](m.shape) end, rule[3], uses)
    if why and complete then
      local pos, message = families.lua_error(family.at("rules").file, why)
      diag:error(pos, "rules: %s: %s", rule[1], message)
    end
  end
end

-- ---------------------------------------------------------------- the model

--- Names in a folder of specs/, or in specs/ itself by "", sorted: what comes before the suffix.
function M.names_in(root, folder, suffix)
  local names = {}
  for _, file in ipairs(host.list(root .. "/specs/" .. folder) or {}) do
    if file:sub(-#suffix) == suffix then names[#names + 1] = file:sub(1, -#suffix - 1) end
  end
  return names
end

-- A file of specs/FOLDER by its name: its path, and what messages and emitted files call it wherever nmkgen runs.  nil,
-- after a message, where there is none.
local function shipped(root, folder, suffix, name, pos, what, diag)
  local names = M.names_in(root, folder, suffix)
  for _, known in ipairs(names) do
    if known == name then
      local called = ("specs/%s/%s%s"):format(folder, name, suffix)
      return root .. "/" .. called, called
    end
  end
  diag:error(pos, "%s '%s'%s", what, name, diags.hint(name, names))
end

-- ---------------------------------------------------------------- where a schedule's keys come from

--- The path of the tuning file that belongs to the spec at `path`.
function M.tuning_path(path)
  return (path:gsub("%.ya?ml$", "") .. M.TUNING)
end

-- The tuning file's part for the target, a map node; nil where there is none.  All parts are checked, also those for
-- other GPUs.
local function tuned(path, root, target, waves, diag)
  path = M.tuning_path(path)
  if not host.read(path) then return nil end
  local tree = rows.load(path, path, diag)
  if not tree then return nil end
  local reader = rows.reader(diag)
  reader.waves = waves
  if tree.kind ~= "map" then
    reader:error(tree, "", "expected a map from targets to keys of `schedule:`")
    return nil
  end
  local names, part = M.names_in(root, "targets", ".yaml"), nil
  for _, item in ipairs(tree.items) do
    local name = item.key and item.key.value
    local known = false
    for _, other in ipairs(names) do known = known or other == name end
    if name and not known then
      diag:error(item.key, "unknown target '%s'%s", name, diags.hint(name, names))
    elseif name and item.value then
      local columns = rows.get(item.value, "columns")
      if columns then
        diag:error(columns, "%s.columns: how many columns a step has is for the spec to say, not for tuning", name)
      elseif name == target then
        part = item.value     -- its values are checked with the spec's
        if part.kind ~= "map" then
          reader:error(part, name, "expected a map of keys of `schedule:`")
          part = nil
        end
      else
        reader:map(item.value, name, SCHEDULE)
      end
    end
  end
  return part, path
end

-- What --set says, { key = path below schedule, text = YAML }, as a map node.
local function set_tree(sets, diag)
  local tree
  for _, set in ipairs(sets or {}) do
    local value, mistakes = require("yaml").parse(set.text, "--set " .. set.key)
    for _, mistake in ipairs(mistakes) do diag:error({ file = mistake.file }, "%s", mistake.message) end
    if value and #mistakes == 0 then
      local keys = {}
      for key in set.key:gmatch("[^.]+") do table.insert(keys, 1, key) end
      for i, key in ipairs(keys) do
        local map = { kind = "map", items = {}, file = value.file, line = value.line, col = value.col }
        value = rows.with(map, key, value)
        if i == #keys then tree = rows.overlay(value, tree) end
      end
    end
  end
  return tree
end

-- Where each key of the schedule comes from, in order: { key, value, from = text }.
local function origins(list, prefix, reader, values, names)
  local out = {}
  for _, row in ipairs(list) do
    local at, value = rows.path(prefix, row[1]), values and values[row[1]]
    if row.keys then
      for _, o in ipairs(origins(row.keys, at, reader, value, names)) do out[#out + 1] = o end
    elseif value ~= nil then
      local node = reader.given[at] and reader.pos[at]
      local from = "default"
      if node then
        from = names[node.file] and ("%s:%d"):format(names[node.file], node.line) or node.file
      end
      out[#out + 1] = { key = at:gsub("^schedule%.", ""), value = value, from = from }
    end
  end
  return out
end

local function load_target(path, called, name, diag)
  local reader = rows.reader(diag)
  local tree = rows.load(path, called, diag)
  local target = tree and reader:map(tree, "", TARGET)
  local timing = target and target.timing
  for _, key in ipairs({ "read_share", "gather_ns", "gather8_ns" }) do
    if timing and timing.in_flight_kib and timing[key] and #timing[key] ~= #timing.in_flight_kib then
      reader:error(reader.pos["timing." .. key], "timing." .. key, "has %d values, in_flight_kib %d", #timing[key],
        #timing.in_flight_kib)
    end
  end
  if target and target.name and target.name ~= name then
    reader:error(reader.pos.name, "name", "'%s' differs from the file's name", target.name)
  end
  return target
end

-- The spec's own name for emitted files: from the root where it lies below, else without its folder.
local function source_name(root, path)
  local real, base = host.realpath(path), host.realpath(root)
  if real and base and real:sub(1, #base + 1) == base .. "/" then return real:sub(#base + 2) end
  return path:match("[^/]*$")
end

local function with_shape(family)
  local list = {}
  for i, row in ipairs(SPEC) do
    list[i] = row[2] == "shape" and { row[1], "shape", keys = family and family.shape, doc = row.doc } or row
  end
  return list
end

-- The ring is what shared memory leaves for it.
local function fit_ring(m, reader)
  local ok, most = pcall(abi.most_ring_stages, m)       -- what the family gets wrong has its own message
  if not ok then return end
  local least, path, stages = abi.LEAST_RING_STAGES, "schedule.ring_stages", m.schedule.ring_stages
  if most < least then
    reader:error(reader.pos["shape.hidden"], "shape.hidden", "leaves shared memory for %d ring stages, at least %d " ..
      "are needed; it is %s, where target.smem_bytes_per_block is %d", most, least, tostring(m.shape.hidden),
      m.target.smem_bytes_per_block)
  elseif not reader.given[path] then
    m.schedule.ring_stages = math.min(stages, most)
  elseif stages > most then
    reader:error(reader.pos[path], path, "must be at most %d, what shared memory leaves beside x and the tables; " ..
      "it is %d, where shape.hidden is %s, target.smem_bytes_per_block is %d", most, stages, tostring(m.shape.hidden),
      m.target.smem_bytes_per_block)
  end
end

--- Reads the spec at `path`.  opts.root: where specs/ is (default: nmkgen's); opts.target: in place of the spec's;
--- opts.sets: keys of the schedule in place of the spec's, { key, text }; opts.untuned: the tuning file does not count;
--- opts.text: in place of the file's.
--- Requires: nothing.  Leaves: the model { name, family, target, shape, schedule, origins, family_module, source,
--- sources, config = what a checkpoint's config.json must say }; mistakes in diag, and then the model is nil or has
--- holes.
function M.load(path, diag, opts)
  opts = opts or {}
  local root = opts.root or host.root
  local tree = rows.load(path, path, diag, opts.text)
  if not tree then return nil end
  local reader = rows.reader(diag)
  local sources = { source_name(root, path) }

  -- The family first: it says what `shape:` and `order:` may hold.
  local family
  local family_name, family_node = rows.peek(tree, "family")
  if family_name then
    local file, called = shipped(root, "families", ".lua", family_name, family_node, "family: unknown family", diag)
    family = file and families.load(file, called, diag)
    sources[#sources + 1] = called
  end
  reader.waves = family and family.waves

  local target_of_spec, files = rows.peek(tree, "target"), { [path] = sources[1] }
  local part, tuning
  if not opts.untuned then
    part, tuning = tuned(path, root, opts.target or target_of_spec, reader.waves, diag)
  end
  local schedule = tree.kind == "map" and rows.overlay(set_tree(opts.sets, diag),
    rows.overlay(rows.get(tree, "schedule"), part))
  if schedule then tree = rows.with(tree, "schedule", schedule) end
  local spec = reader:map(tree, "", with_shape(family))
  if not spec then return nil end

  local target
  local target_name = opts.target or spec.target
  if target_name then
    local pos, what = reader.pos.target, "target: unknown target"
    if opts.target then pos, what = nil, "--target: unknown target" end
    local file, called = shipped(root, "targets", ".yaml", target_name, pos, what, diag)
    target = file and load_target(file, called, target_name, diag)
    sources[#sources + 1] = called
  end
  if part then
    files[tuning] = source_name(root, tuning)
    sources[#sources + 1] = files[tuning]
  end

  local model = {
    name = spec.model, family = spec.family, target = target, shape = spec.shape, schedule = spec.schedule,
    family_module = family, source = sources[1], sources = sources, insert = spec.insert, prefill = spec.prefill,
    launch = "step",
  }
  local in_flight = model.schedule and model.schedule.in_flight
  for i = in_flight and #in_flight + 1 or 1, in_flight and model.schedule.columns or 0 do
    in_flight[i] = in_flight[i - 1]             -- the last of eight stands for all that follow
  end
  local keys = model.schedule
  if keys and (keys.columns or 0) > 8 then keys.exchange = "fenced" end
  if keys and keys.exchange == "fenced" then keys.l2_stages = 0 end
  if not family then return model end
  local complete = diag:count() == 0
  check_rules(model, reader, family, complete, diag)
  if complete and diag:count() == 0 then fit_ring(model, reader) end
  model.origins = origins(SCHEDULE, "schedule", reader, spec.schedule, files)
  if complete and diag:count() == 0 then families.check(model, family, diag) end
  if complete and diag:count() == 0 then model.config = families.config(model) end
  return model
end

local function leaves(list, prefix, out)
  for _, row in ipairs(list) do
    local at = rows.path(prefix, row[1])
    if row.keys then leaves(row.keys, at, out) else out[#out + 1] = { key = at, row = row } end
  end
  return out
end

--- Every key of a schedule with its row, in order: { key = path below schedule, row }.
function M.schedule_keys() return leaves(SCHEDULE, "", {}) end

-- The rows of a map as text, a map's own rows in its place.
local function describe(out, prefix, list)
  for _, row in ipairs(list) do
    local path = rows.path(prefix, row[1])
    if row.keys then
      describe(out, path, row.keys)
    elseif row[2] ~= "shape" then
      local default = row.optional and "; optional" or ""
      if row.default ~= nil then default = "; default " .. rows.text(row.default) end
      out[#out + 1] = ("%s: %s\n    %s%s\n"):format(path, row.doc, rows.expected(row), default)
    end
  end
end

--- All families of specs/families, by name.
function M.families(root, diag)
  local list = {}
  for _, name in ipairs(M.names_in(root, "families", ".lua")) do
    local called = "specs/families/" .. name .. ".lua"
    list[#list + 1] = families.load(root .. "/" .. called, called, diag)
  end
  return list
end

--- The keys of a spec with what they take and mean, as text; those of `shape:` for every family.
function M.help(root, diag)
  local out = {}
  describe(out, "", SPEC)
  for _, family in ipairs(M.families(root, diag)) do
    out[#out + 1] = ("\nIn the family %s, %s:\n\n"):format(family.name, family.summary)
    describe(out, "shape", family.shape)
  end
  return table.concat(out)
end

return M
