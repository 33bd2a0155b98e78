-- The command `nmkgen` and the stages of a generation, one call each: start reading here.
--
-- Every stage reads what the ones before left in the model or the graph.  Mistakes of the user collect in one diag, and
-- the run ends after the stage that found any; nothing is written before every stage and every emitter has succeeded.
local check = require("check")
local diags = require("diag")
local files = require("emit.files")
local graph = require("graph")
local host = require("host")
local init = require("init")
local memory = require("memory")
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
nmkgen init CHECKPOINT_DIR   a spec for a checkpoint of a known family, from its config.json and tensors

  -o, --output DIR           where to write; of init the spec's file (standard output)
  --name NAME                init: the model's name (the folder's)
  --force                    init: -o may name a file that exists
  -t, --target NAME          another target than the spec's: a file of specs/targets
  -h, --help                 this text
  --version                  the version

Exit status: 0 done, 1 mistakes in the input (nothing was written), 2 wrong use, 3 a fault of nmkgen.
]]

-- ---------------------------------------------------------------- stages

--- Reads and proves: everything up to the point where output could be made.  Returns the graph and the proof's figures.
local function prove(path, opts, diag)
  local model = spec.load(path, diag, { root = host.root, target = opts.target, text = opts.text })
  diag:stop()
  local registry = ops.load(host.root, diag)
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

function COMMANDS.init(dir, opts, diag)
  local file = opts.output
  if file and not opts.force and host.realpath(file) then
    diag:error({ file = file }, "exists; --force writes over it")
    diag:stop()
  end
  local text, warnings = init.run(dir, opts, diag, prove)
  for _, warning in ipairs(warnings) do io.stderr:write("nmkgen: ", dir, ": ", warning, "\n") end
  if not file then
    io.write(text)
    return
  end
  local ok, why = host.write({ { path = file, text = text } })
  if not ok then
    diag:error(nil, "cannot write %s", why)
    diag:stop()
  end
  print(("wrote %s; next: nmkgen check %s"):format(file, file))
end

-- For tests that need module yaml or host: runs a Lua file with the rest of the command line.
function COMMANDS.lua(path, opts)
  rawset(_G, "arg", opts.rest)
  return assert(loadfile(path))(table.unpack(opts.rest))
end

-- ---------------------------------------------------------------- the command line

-- Commands, and what those take that take something.
local NAMES = { "check", "plan", "ops", "keys", "init" }
local TAKES = {
  generate = "MODEL.yaml", check = "MODEL.yaml", plan = "MODEL.yaml", init = "CHECKPOINT_DIR",
}
local WRITES = { generate = true, init = true }
-- Flag -> option that takes its argument, or true.
local FLAGS = {
  ["-o"] = "output", ["--output"] = "output", ["-t"] = "target", ["--target"] = "target",
  ["--name"] = "name", ["--force"] = true, ["-h"] = true, ["--help"] = true, ["--version"] = true,
}
local LONG_FLAGS = { "--output", "--target", "--name", "--force", "--help", "--version" }

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
  local takes = TAKES[command] and 1 or 0
  if #rest > takes then wrong_use("'%s' is one word too many", rest[takes + 1]) end
  if #rest < takes then wrong_use("%s needs a %s", command, TAKES[command]) end
  if opts.output and not WRITES[command] then wrong_use("%s writes no files: -o has no meaning", command) end
  if opts.target and takes == 0 then wrong_use("%s has no target: -t has no meaning", command) end
  for _, flag in ipairs({ "name", "force" }) do
    if opts[flag] and command ~= "init" then wrong_use("--%s is a flag of init", flag) end
  end
  if opts.name and not opts.name:find("^%w[%w._-]*$") then
    wrong_use("--name takes a word of a-z, A-Z, 0-9 and . _ -, not '%s'", opts.name)
  end
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
