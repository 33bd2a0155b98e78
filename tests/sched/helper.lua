-- Serves the tests of the stages in the middle: models by hand, so that no test here depends on YAML, and the stages
-- run one after the other.
package.path = "gen/?.lua;tests/sched/?.lua;" .. package.path

dofile("tests/helper_host.lua")

local M = {}

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("a")
  file:close()
  return text
end

-- The numbers below `section:` of a spec: enough YAML for our own files.
local function numbers(text, section)
  local values = {}
  local inside = section == nil
  for line in text:gmatch("[^\n]+") do
    local key, value = line:match("^%s*([%w_]+):%s*([%d.e+-]*)")
    if line:find("^%S") and section then inside = line:find("^" .. section .. ":") ~= nil end
    if inside and key and tonumber(value) then values[key] = math.tointeger(tonumber(value)) or tonumber(value) end
  end
  return values
end

--- A model as spec.load leaves it. over: { shape = {}, schedule = {}, sms = n, family = what it makes of the family,
--- launch = "prefill": as its prefill generation sees it }.
function M.model(name, over)
  over = over or {}
  local spec = read(("specs/%s.yaml"):format(name))
  local model = {
    name = name, launch = "step", prefill = { tokens = 1024 },
    source = ("specs/%s.yaml"):format(name), shape = numbers(spec, "shape"),
    target = numbers(read(("specs/targets/%s.yaml"):format(spec:match("target:%s*(%S+)")))),
    schedule = {
      columns = 8, reuse_buffers = true, ring_stages = 12, split = { chunks_max = 32, own_pages = 0 },
      claim = { up = "tail", attention = "static" },
    },
  }
  local called, diag = ("specs/families/%s.lua"):format(spec:match("family:%s*(%S+)")), require("diag").new()
  local family = assert(require("family").load(called, called, diag), table.concat(diag:lines(), "\n"))
  if over.family then family = over.family(family) end
  model.family_module, model.schedule.order = family, require("rows").names(family.waves)
  for key, value in pairs(over.shape or {}) do model.shape[key] = value end
  for key, value in pairs(over.schedule or {}) do model.schedule[key] = value end
  model.target.sms = over.sms or model.target.sms
  for _, item in ipairs(family.shape) do
    if model.shape[item[1]] == nil then model.shape[item[1]] = item.default end
  end
  if over.launch then model = assert(require("prefill").of(model)) end
  return model
end

local registry
function M.registry()
  if not registry then
    local diag = require("diag").new()
    registry = require("ops").load(".", diag)
    assert(diag:count() == 0, table.concat(diag:lines(), "\n"))
  end
  return registry
end

--- The stages up to sync. Returns the graph.
function M.build(name, over)
  local diag = require("diag").new()
  local g = require("graph").build(M.model(name, over), M.registry(), diag)
  diag:stop()
  require("memory").assign(g)
  require("schedule").run(g, diag)
  diag:stop()
  require("sync").run(g, diag)
  if diag:count() > 0 then error(table.concat(diag:lines(), "\n"), 0) end
  return g
end

--- A graph of ops given as op-file texts (sections may be empty), for what no real op does. layers: list of lists of
--- nodes { op, ... }; buffers as a family gives them; schedule: keys that differ. The stages run up to sync; returns
--- the graph, or nil and the messages.
function M.custom(texts, layers, buffers, sms, schedule)
  local diag = require("diag").new()
  local ops = { list = {}, by_name = {} }
  table.sort(texts)
  for _, text in ipairs(texts) do
    local name = text:match('name = "([%w_]+)"')
    local op = require("ops").parse(("templates/ops/%s.cu"):format(name), (text:gsub("(//@[^\n]*)", "%1\n;")), diag)
    ops.list[#ops.list + 1] = op
    op.opcode, ops.by_name[name] = #ops.list, op
  end
  assert(diag:count() == 0, table.concat(diag:lines(), "\n"))
  local order = {}
  for i = 1, #layers[1] do order[i] = "wave" .. i end
  local function none() return {} end
  local family = {
    name = "custom", buffers = function() return buffers end, values = function() return { kv_heads = 0 } end,
    front = none, back = none, arrays = none, tensors = none,
    block = function(layer)
      local block = {}
      for i, node in ipairs(layers[layer + 1]) do block["wave" .. i] = node end
      return block
    end,
  }
  local model = M.model("nmc-toy", { sms = sms, shape = { layers = #layers }, schedule = schedule })
  model.family_module, model.schedule.order = family, order
  local g = require("graph").build(model, ops, diag)
  require("memory").assign(g)
  require("schedule").run(g, diag)
  require("sync").run(g, diag)
  if diag:count() > 0 then return nil, diag:lines() end
  return g
end

--- The encoded lists, as encode.words gives them.
function M.words(g)
  return require("encode").words(g, g.registry)
end

local WORDS, AT = require("ops").WORDS, require("ops").AT

-- A list that is broken on purpose: a copy of the intact words, of which tasks can be changed.
local Broken = {}
Broken.__index = Broken

function M.broken(g, words)
  local copy = {}
  for sm, list in pairs(words) do copy[sm] = list end
  return setmetatable({ g = g, words = copy, mine = {} }, Broken)
end

function Broken:list(sm)
  if not self.mine[sm] then
    self.words[sm] = table.move(self.words[sm], 1, #self.words[sm], 1, {})
    self.mine[sm] = true
  end
  return self.words[sm]
end

--- Number (from 0) of the node's first task on the SM.
function Broken:find(sm, name)
  local list, id = self.words[sm], nil
  for _, node in ipairs(self.g.nodes) do
    if node.name == name then id = node.id end
  end
  for base = 0, #list - WORDS, WORDS do
    if list[base + AT.node] + 1 == id then return base // WORDS end
  end
  error(("no %s on SM %d"):format(name, sm))
end

local function index(self, sm, task, word)
  local list = self.words[sm]
  local op = self.g.registry.list[list[task * WORDS + AT.opcode]]
  return task * WORDS + (AT[word] or op.word[word] and op.word[word] + 1 or error("no word " .. word))
end

function Broken:get(sm, task, word) return self.words[sm][index(self, sm, task, word)] end

function Broken:set(sm, task, word, value)
  local list = self:list(sm)
  list[index(self, sm, task, word)] = value
  return self
end

--- Lets go of the waits of a task.
function Broken:lose(sm, task)
  for _, wait in ipairs({ "a", "b" }) do
    self:set(sm, task, "wait_" .. wait, -1):set(sm, task, "arrivals_" .. wait, 0)
  end
  return self
end

function Broken:swap(sm, a, b)
  local list = self:list(sm)
  for w = 1, WORDS do
    list[a * WORDS + w], list[b * WORDS + w] = list[b * WORDS + w], list[a * WORDS + w]
  end
  return self
end

function Broken:repeat_task(sm, task)
  local list = self:list(sm)
  table.move(list, task * WORDS + 1, #list, (task + 1) * WORDS + 1)
  return self
end

function Broken:remove(sm, task)
  local list = self:list(sm)
  local n = #list
  table.move(list, (task + 1) * WORDS + 1, n, task * WORDS + 1)
  for i = n - WORDS + 1, n do list[i] = nil end
  return self
end

function Broken:tasks(sm) return #self.words[sm] // WORDS end

function Broken:prove() return require("check").prove(self.g, self.words) end

-- Cases. Each prints its line at once; M.done() ends the script.
local failed = false

function M.ok(name, good, why)
  if good then
    print("ok - " .. name)
  else
    failed = true
    print(("not ok - %s: %s"):format(name, tostring(why):gsub("\n", " | ")))
  end
end

--- "layer3.qkv on SM 17 (task 34)", as messages call a task.
function Broken:name(sm, name) return ("%s on SM %d (task %d)"):format(name, sm, self:find(sm, name)) end

local function like(message, text)
  return message:find("^" .. text:gsub("[^%w%s*]", "%%%0"):gsub("%*", ".-") .. "$") ~= nil
end

--- The lists must be refused with each of the messages; * in one stands for anything.
function M.refused(name, broken, expected)
  local messages = broken:prove()
  for _, text in ipairs(type(expected) == "table" and expected or { expected }) do
    local found = false
    for _, message in ipairs(messages) do found = found or like(message, text) end
    if not found then
      return M.ok(name, false, ("no message '%s', but: %s"):format(text, #messages == 0 and "all proved" or
        table.concat(messages, "; ")))
    end
  end
  M.ok(name, true)
end

function M.proved(name, g, words)
  local messages, stats = require("check").prove(g, words)
  M.ok(name, #messages == 0, table.concat(messages, "; "))
  return stats
end

function M.done() os.exit(not failed) end

return M
