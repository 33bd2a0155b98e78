-- `nmkgen init`: a model spec from a checkpoint's own files.
--
-- config.lua reads config.json, checkpoint.lua what the tensors are.  Here both are compared with the family, the spec
-- is proved as `nmkgen check` does it, and what a reader should know stands in its head as comments.
local checkpoint = require("checkpoint")
local configs = require("config")
local diags = require("diag")
local families = require("family")
local host = require("host")
local json = require("json")
local plan = require("plan")
local spec = require("spec")

local M = {}

local GIB = 1 << 30
local WIDTH = 118
local TARGET = "h200"           -- of a new spec
local EMBED = "model.embed_tokens.weight"
local SHOWN = 3                 -- of a list of tensors
local FREE = { vocab = true, max_context = true, rope_original_context = true } -- sizes that no schedule is made for

local Init = {}
Init.__index = Init

function Init:note(fmt, ...)
  self.notes[#self.notes + 1] = select("#", ...) > 0 and fmt:format(...) or fmt
end

-- A note that is also a warning.
function Init:warn(...)
  self:note(...)
  self.warnings[#self.warnings + 1] = self.notes[#self.notes]
end

-- ---------------------------------------------------------------- tensors

local function shape_text(shape) return "[" .. table.concat(shape, ", ") .. "]" end

-- The first few of a list, and how many there are.
local function few(list)
  local text = table.concat(list, ", ", 1, math.min(SHOWN, #list))
  return #list > SHOWN and ("%s and %d more"):format(text, #list - SHOWN) or text
end

-- The names that the family's tensors have, with their shapes.
local function expected_tensors(family, model)
  local list = {}
  for _, t in ipairs(family.tensors(model)) do
    local shape = t.dims == 1 and { t.cols } or { t.rows, t.cols }
    for layer = t.layer0, t.layer0 + t.layers - 1 do
      for expert = 0, math.max(t.experts, 1) - 1 do
        local name = t.name:find("%%d") and t.name:format(layer, expert) or t.name
        list[#list + 1] = { name = name, shape = shape, twin = t.twin }
      end
    end
  end
  return list
end

function Init:check_tensors(model)
  local tensors = self.tensors
  local ok, expected = pcall(expected_tensors, self.family, model)
  if not tensors or not ok then return end
  local missing, known, other, shapes, dtypes = {}, {}, {}, {}, {}
  for _, want in ipairs(expected) do
    local found = tensors.by[want.name]
    known[want.name] = true
    if not found then
      if not want.twin then missing[#missing + 1] = want.name end
    elseif found.shape then
      if not configs.same(found.shape, want.shape) then
        shapes[#shapes + 1] = ("%s %s, not %s"):format(want.name, shape_text(found.shape), shape_text(want.shape))
      end
      if want.twin then self:note("%s is among the tensors too, a copy of another", want.name) end
      if found.dtype ~= "BF16" then dtypes[#dtypes + 1] = ("%s is %s"):format(want.name, found.dtype) end
    end
  end
  for _, tensor in ipairs(tensors.list) do
    local name = tensor.name
    if not known[name] and not name:find("rotary_emb%.inv_freq$") then other[#other + 1] = name end
  end
  local function report(list, what)
    if #list > 0 then self.diag:error({ file = self.dir }, "%s: %s", what, few(list)) end
  end
  report(missing, "lacks tensors of the family " .. self.family.name)
  report(other, "has tensors that the family " .. self.family.name .. " does not have")
  report(shapes, "tensors have other shapes than config.json says")
  report(dtypes, "weights must be bfloat16 (BF16)")
end

-- The embedding has as many rows as there are tokens; a config.json that says otherwise is wrong.
function Init:check_vocab(shape)
  local embed = self.tensors and self.tensors.by[EMBED]
  local real = embed and embed.shape and embed.shape[1]
  if not real or not shape.vocab or real == shape.vocab then return end
  self:warn("vocab_size is %d in config.json, but %s has %d rows, which is taken: correct config.json, which "
    .. "the programs compare too", shape.vocab, EMBED, real)
  shape.vocab = real
end

-- ---------------------------------------------------------------- what else the folder tells

function Init:note_generation()
  local path = self.dir .. "/generation_config.json"
  local generation = json.load(path, self.diag, true)
  local by, parts = generation and generation.by or {}, {}
  local function get(key)
    local node = by[key]
    return node and node.kind ~= "null" and node or nil
  end
  local eos, from = get("eos_token_id"), "generation_config.json"
  if not eos then eos, from = self.config:at("eos_token_id"), "config.json" end
  self:note(eos and "End of sequence, by %s: %s" or "Neither file names an end of sequence: generation ends by length",
    from, eos and json.text(eos))
  for _, key in ipairs({ "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty" }) do
    if get(key) then parts[#parts + 1] = ("%s %s"):format(key, json.text(get(key))) end
  end
  if #parts > 0 then
    self:note("Defaults of a request, by generation_config.json: %s", table.concat(parts, ", "))
  else
    self:note("Defaults of a request: none, %s", generation and "generation_config.json is silent"
      or "there is no generation_config.json")
  end
end

function Init:note_tokenizer()
  local there = checkpoint.tokenizer_files(self.dir)
  if not there["tokenizer.json"] then
    local other = there["tokenizer.model"] and ", and tokenizer.model is not read" or ""
    self:warn("tokenizer.json is missing%s: prompts can only be token ids", other)
    return
  end
  local config = there["tokenizer_config.json"] and json.load(self.dir .. "/tokenizer_config.json", self.diag)
  local template = config and config.by.chat_template
  if there["chat_template.jinja"] then
    self:note("Tokenizer: tokenizer.json; chat template: chat_template.jinja")
  elseif template and template.kind ~= "null" then
    self:note("Tokenizer: tokenizer.json; chat template: in tokenizer_config.json")
  else
    self:note("Tokenizer: tokenizer.json; there is no chat template: /v1/chat/completions needs --chat-template")
  end
end

local function bytes_text(bytes)
  if bytes >= GIB then return ("%.1f GiB"):format(bytes / GIB) end
  if bytes >= 1 << 20 then return ("%.1f MiB"):format(bytes / (1 << 20)) end
  return ("%.1f KiB"):format(bytes / 1024)
end

-- Weights, KV cache, and the bound that memory sets.
function Init:note_sizes(g)
  local model = g.model
  local values, full = self.family.values(model), 0
  for i = 0, model.shape.layers - 1 do
    if self.family.layer(i, model.shape).attention ~= "sliding" then full = full + 1 end
  end
  local layer_bytes = 4 * values.kv_heads * values.head_dim         -- keys and values of a token, two bytes each
  local parts = {}
  if full > 0 then parts[1] = bytes_text(full * layer_bytes) .. " a token" end
  if full < model.shape.layers then
    parts[#parts + 1] = ("%s a sequence for the windows"):format(bytes_text((model.shape.layers - full) * layer_bytes
      * values.window))
  end
  self:note("Weights take %s, keys and values %s", bytes_text(g.weights_kib * 1024), table.concat(parts, " and "))
  self:note("Bound by the memory of %s: %.0f tokens/s for one sequence of %d tokens", model.target.name,
    model.target.read_bytes_per_s / plan.step_bytes(g, values, 1), math.min(plan.CONTEXT, values.max_context))
end

function Init:note_tensors()
  local tensors = self.tensors
  if not tensors then
    self:warn("No safetensors in the folder: names and shapes of tensors could not be compared")
  else
    self:note("%d tensors, %s, by %s", #tensors.list, tensors.shapes and "names, shapes and types compared"
      or "only names compared", tensors.from)
  end
  if not self.config.dtype and not (tensors and tensors.shapes) then
    self:note("config.json names no dtype; weights must be bfloat16")
  end
end

-- ---------------------------------------------------------------- the spec

-- The spec without its head comment; a key that config.json lacks and that has its default is left out.  Leaves in
-- self.lines where each line comes from.
function Init:body(shape, target)
  local out = { "model: " .. self.name, "family: " .. self.family.name, "target: " .. target, "", "shape:" }
  local entries, width = {}, 0
  for _, row in ipairs(self.family.shape) do
    local value, from = shape[row[1]], self.config.from[row[1]]
    local text = type(value) == "number" and json.number(value) or tostring(value)
    if value ~= nil and from.absent and value == row.default then
      self.left_out[#self.left_out + 1] = ("%s (%s)"):format(row[1], text)
    elseif value ~= nil then
      entries[#entries + 1] = { text = ("  %s: %s"):format(row[1], text), from = from }
      width = math.max(width, #entries[#entries].text)
      self.lines[#out + #entries] = from
    end
  end
  for _, entry in ipairs(entries) do
    out[#out + 1] = ("%-" .. width .. "s   # %s"):format(entry.text, entry.from.comment)
  end
  return table.concat(out, "\n") .. "\n"
end

-- Whether what a schedule is made for is the same.
local function is_laid_out_alike(a, b, shape)
  if a.family ~= b.family or a.target.name ~= b.target.name then return false end
  for _, row in ipairs(shape) do
    local key = row[1]
    if row[2] == "int" and not FREE[key] and a.shape[key] ~= b.shape[key] then return false end
  end
  return true
end

-- The schedule of a shipped spec of these sizes, as it stands there: a finetune is laid out as its model is.  Or "".
function Init:schedule_of(model)
  for _, name in ipairs(spec.names_in(host.root, "", ".yaml")) do
    local path, found = ("%s/specs/%s.yaml"):format(host.root, name), diags.new()
    local schedule = ("\n" .. (host.read(path) or "")):match("\n(schedule:.-\n)%f[%w\0]")
    local other = schedule and spec.load(path, found, { root = host.root, untuned = true })
    if other and found:count() == 0 and is_laid_out_alike(other, model, self.family.shape) then
      self:note("The schedule is that of specs/%s.yaml, whose sizes these are", name)
      return "\n" .. schedule
    end
  end
  return ""
end

-- Mistakes in the spec that would be written, as mistakes of what they come from.
function Init:blame(found)
  local draft = self.draft
  for _, e in ipairs(found.list) do
    local from = e.file == draft and self.lines[e.line]
    local message = e.message:gsub("^shape%.[%w_]+: ", "")
    if from then
      self.config:error(from.node, "%s: %s", from.where, message)
    elseif e.file == draft then
      self.config:error(nil, "%s", e.message)
    else
      self.diag:error(e, "%s", e.message)
    end
  end
end

-- A comment of `# ` lines; an entry that is too long goes on, indented.  Whatever a file says stays inside it: some
-- characters beyond ASCII end a line of YAML.
local function comment(out, text)
  local line = "#"
  for word in text:gsub("[^\32-\126]", "?"):gmatch("%S+") do
    if #line + 1 + #word > WIDTH and #line > 3 then
      out[#out + 1] = line
      line = "#  "
    end
    line = line .. " " .. word
  end
  out[#out + 1] = line
end

function Init:head(output)
  local out, file = {}, output or ("specs/%s.yaml"):format(self.name)
  local architecture = self.config:at("architectures")
  local named = architecture and architecture.items and architecture.items[1]
  comment(out, ("%s: by `nmkgen init` from a checkpoint of %s; `nmkgen keys` tells what the keys mean."):format(
    self.name, named and named.value or self.config:at("model_type").value))
  comment(out, ("Next: nmkgen check %s; in specs/, make build/%s/nmk-serve builds the server."):format(file, self.name))
  out[#out + 1] = "#"
  for _, note in ipairs(self.notes) do comment(out, note .. ".") end
  if #self.left_out > 0 then
    comment(out, ("Not in config.json, and left out below: %s."):format(table.concat(self.left_out, ", ")))
  end
  if #self.config.silent > 0 then
    comment(out, ("Silent in config.json, and taken as: %s."):format(table.concat(self.config.silent, ", ")))
  end
  if #self.config.ignored > 0 then
    comment(out, ("In config.json, unknown to nmkgen and ignored: %s."):format(table.concat(self.config.ignored, ", ")))
  end
  return table.concat(out, "\n") .. "\n"
end

--- The spec of the checkpoint in `dir`, as text.  opts.name: the model's; opts.target; opts.output: the file that the
--- text is for.  prove(path, opts, diag) is what `nmkgen check` does.  Mistakes are in diag, which then stops.  Returns
--- warnings too, a list.
function M.run(dir, opts, diag, prove)
  dir = dir:gsub("(.)/+$", "%1")
  local config = configs.load(dir, diag)
  diag:stop()
  local list = spec.families(host.root, diag)
  diag:stop()
  local family = config:find_family(list)
  diag:stop()
  local self = setmetatable({
    dir = dir, diag = diag, config = config, family = family, tensors = checkpoint.tensors(dir, diag), notes = {},
    warnings = {}, lines = {}, left_out = {}, name = opts.name or checkpoint.model_name(dir) or "model",
  }, Init)
  self.draft = self.name .. ".yaml"
  config:check_common()
  local shape, complete = config:shape(self.tensors)
  self:check_vocab(shape)
  local body = self:body(shape, opts.target or TARGET)
  local options = { root = host.root, target = opts.target, text = body }
  local found = diags.new()
  local model = spec.load(self.draft, found, options)
  if complete then
    self:blame(found)
    local ok, facts = pcall(families.config, model)
    if ok then config:check(facts) end
    if diag:count() == 0 then self:check_tensors(model) end
  end
  diag:stop()

  body = body .. self:schedule_of(model)
  options.text, found = body, diags.new()
  local ok, g = pcall(prove, self.draft, options, found)
  if not ok then
    if not diags.is(g) then error(g, 0) end
    self:blame(found)
    diag:stop()
  end
  self:note_sizes(g)
  self:note_tensors()
  self:note_tokenizer()
  self:note_generation()
  diag:stop()
  return self:head(opts.output) .. body, self.warnings
end

return M
