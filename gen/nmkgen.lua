-- The command `nmkgen` and the stages of a generation, one call each: start reading here.
--
-- Every stage reads what the ones before left in the model or the graph.  Mistakes of the user collect in one diag, and
-- the run ends after the stage that found any; nothing is written before every stage and every emitter has succeeded.
local check = require("check")
local diags = require("diag")
local files = require("emit.files")
local graph = require("graph")
local host = require("host")
local insert = require("insert")
local memory = require("memory")
local new_op = require("new_op")
local ops = require("ops")
local plan = require("plan")
local schedule = require("schedule")
local spec = require("spec")
local sync = require("sync")

local M = {}

M.VERSION = "0.1.0"

local DONE, MISTAKES, USAGE, FAULT = 0, 1, 2, 3
local MAX_SHOWN = 50

local HELP = [[
nmkgen MODEL.yaml [-o DIR]   generate a model's kernel, encoder and CPU machine into DIR (build/MODEL)
nmkgen check MODEL.yaml      the same proofs, nothing written
nmkgen plan MODEL.yaml       waves, tasks, counters, bytes and the bound, as text
nmkgen ops                   the opcodes with their descriptor fields
nmkgen keys                  the keys of a model spec
nmkgen new-op NAME           a new opcode to begin with: templates/ops/NAME.cu, with tests that pass

  -o, --output DIR           where to write
  -t, --target NAME          another target than the spec's: a file of specs/targets
  --like KIND                of a new op: elementwise (default), a function of one number, or task, all by hand
  --try OP                   insert the op as its table says, for its tests, where the model lacks it
  -h, --help                 this text
  --version                  the version

Exit status: 0 done, 1 mistakes in the input (nothing was written), 2 wrong use, 3 a fault of nmkgen.
]]

-- ---------------------------------------------------------------- stages

--- Reads and proves: everything up to the point where output could be made.  Returns the graph and the proof's figures.
local function prove(path, opts, diag)
  local model = spec.load(path, diag, { root = host.root, target = opts.target })
  diag:stop()
  local registry = ops.load(host.root, diag)
  diag:stop()
  if opts.try then insert.try(model, registry, opts.try, diag) end
  diag:stop()
  local g = graph.build(model, registry, diag)
  diag:stop()
  memory.assign(g)
  schedule.run(g, diag)
  diag:stop()
  sync.run(g, diag)
  diag:stop()
  local stats = check.run(g, diag)
  diag:stop()
  return g, stats
end

--- The emitted files, { name, text }, all of them complete.
local function emit(path, opts, diag)
  local g, stats = prove(path, opts, diag)
  local list = files.all(g)
  list[#list + 1] = { name = "plan.txt", text = plan.text(g, stats) }
  return g, stats, list
end

local function summary(g, stats)
  return ("%s: %d layers, %d nodes, %d tasks on %d SMs, proven"):format(g.model.name, g.model.shape.layers, #g.nodes,
    stats.tasks, g.sms)
end

-- ---------------------------------------------------------------- commands

local COMMANDS = {}

function COMMANDS.generate(path, opts, diag)
  local g, stats, list = emit(path, opts, diag)
  local folder, out = opts.output or "build/" .. g.model.name, {}
  for i, file in ipairs(list) do out[i] = { path = folder .. "/" .. file.name, text = file.text } end
  local ok, why = host.write(out)
  if not ok then
    diag:error(nil, "cannot write %s", why)
    diag:stop()
  end
  print(("%s; %d files in %s"):format(summary(g, stats), #list, folder))
end

function COMMANDS.check(path, opts, diag)
  print(summary(prove(path, opts, diag)))
end

function COMMANDS.plan(path, opts, diag)
  io.write(plan.text(prove(path, opts, diag)))
end

function COMMANDS.ops(_, _, diag)
  local registry = ops.load(host.root, diag)
  diag:stop()
  io.write(ops.table(registry))
end

function COMMANDS.keys(_, _, diag)
  local text = spec.help(host.root, diag)
  diag:stop()
  io.write(text)
end

COMMANDS["new-op"] = function(name, opts, diag)
  local registry = ops.load(host.root, diag)
  diag:stop()
  local path, called, text = new_op.scaffold(name, opts, registry, diag)
  diag:stop()
  local ok, why = host.write({ { path = path, text = text } })
  if not ok then
    diag:error(nil, "cannot write %s", why)
    diag:stop()
  end
  print(("%s: an op that passes its tests; make test-op OP=%s runs them"):format(called, name))
end

-- For tests that need module yaml or host: runs a Lua file with the rest of the command line.
function COMMANDS.lua(path, opts)
  rawset(_G, "arg", opts.rest)
  return assert(loadfile(path))(table.unpack(opts.rest))
end

-- ---------------------------------------------------------------- the command line

-- Commands that take a spec; the others take nothing, or what TAKES says.
local NAMES = { "check", "plan", "ops", "keys", "new-op" }
local TAKES_SPEC = { generate = true, check = true, plan = true }
local TAKES = { ["new-op"] = "a NAME" }
local WRITES = { generate = true, ["new-op"] = true }
-- Flag -> option that takes its argument, or true.
local FLAGS = {
  ["-o"] = "output", ["--output"] = "output", ["-t"] = "target", ["--target"] = "target",
  ["--like"] = "like", ["--try"] = "try",
  ["-h"] = true, ["--help"] = true, ["--version"] = true,
}
local LONG_FLAGS = { "--output", "--target", "--like", "--try", "--help", "--version" }

local function wrong_use(fmt, ...)
  error({ usage = fmt:format(...) }, 0)
end

local function is_known(list, name)
  for _, known in ipairs(list) do
    if known == name then return true end
  end
  return false
end

local function looks_like_path(word)
  return word:find("[/.]") ~= nil
end

--- Options and words of the command line.
local function parse(args)
  local opts, words, i = {}, {}, 1
  while i <= #args do
    local word = args[i]
    local flag, value = word, nil
    if word:find("^%-%-[%w-]+=") then flag, value = word:match("^(%-%-[%w-]+)=(.*)$") end
    local option = FLAGS[flag]
    if word == "--lua" and #words == 0 then
      opts.rest = table.move(args, i + 2, #args, 1, {})
      opts.rest[0] = args[i + 1]
      if not args[i + 1] then wrong_use("--lua needs a file") end
      return opts, words
    elseif word:sub(1, 1) ~= "-" or word == "-" then
      words[#words + 1] = word
    elseif not option then
      wrong_use("unknown flag '%s'%s", flag, diags.hint(flag, LONG_FLAGS))
    elseif option == true then
      if value then wrong_use("%s takes no argument", flag) end
      opts[flag:match("^%-+(%w+)")] = true
    else
      if not value then
        i = i + 1
        value = args[i]
      end
      if not value or value == "" then wrong_use("%s needs an argument", flag) end
      if opts[option] then wrong_use("%s is given twice", flag) end
      opts[option] = value
    end
    i = i + 1
  end
  return opts, words
end

local function command_of(words)
  local first = words[1]
  if not first then wrong_use("no model given") end
  if is_known(NAMES, first) then return first, table.move(words, 2, #words, 1, {}) end
  if not looks_like_path(first) and (words[2] or not host.read(first)) then
    wrong_use("unknown command '%s'%s", first, diags.hint(first, NAMES))
  end
  return "generate", words
end

local function dispatch(args, diag)
  local opts, words = parse(args)
  if opts.rest then return COMMANDS.lua(opts.rest[0], opts) end
  if opts.h or opts.help then
    io.write(HELP)
    return
  end
  if opts.version then
    print("nmkgen " .. M.VERSION)
    return
  end
  local command, rest = command_of(words)
  local takes = (TAKES_SPEC[command] or TAKES[command]) and 1 or 0
  if #rest > takes then wrong_use("'%s' is one word too many", rest[takes + 1]) end
  if #rest < takes then wrong_use("%s needs %s", command, TAKES[command] or "a MODEL.yaml") end
  if opts.output and not WRITES[command] then wrong_use("%s writes no files: -o has no meaning", command) end
  if opts.target and not TAKES_SPEC[command] then wrong_use("%s has no target: -t has no meaning", command) end
  if opts.try and not TAKES_SPEC[command] then wrong_use("%s has no model: --try has no meaning", command) end
  if opts.like and command ~= "new-op" then wrong_use("%s makes no op: --like has no meaning", command) end
  COMMANDS[command](rest[1], opts, diag)
end

local function is_usage(e) return type(e) == "table" and e.usage ~= nil end

-- Errors of nmkgen itself keep their traceback.
local function on_error(e)
  if diags.is(e) or is_usage(e) then return e end
  return debug.traceback(type(e) == "string" and e or tostring(e), 2)
end

--- Runs one command line; returns the exit status.
function M.main(args)
  local diag = diags.new()
  local ok, e = xpcall(dispatch, on_error, args, diag)
  if ok then return math.type(e) == "integer" and e or DONE end
  if is_usage(e) then
    io.stderr:write("nmkgen: ", e.usage, "; nmkgen --help shows the use\n")
    return USAGE
  end
  if not diags.is(e) then
    io.stderr:write("nmkgen: internal error: ", e, "\n")
    return FAULT
  end
  local lines = diag:lines()
  for i = 1, math.min(#lines, MAX_SHOWN) do io.stderr:write(lines[i], "\n") end
  if #lines > MAX_SHOWN then io.stderr:write(("... and %d more\n"):format(#lines - MAX_SHOWN)) end
  return MISTAKES
end

return M
