-- The command `nmkgen` and the stages of a generation, one call each: start reading here.
--
-- Every stage reads what the ones before left in the model or the graph.  Mistakes of the user collect in one diag, and
-- the run ends after the stage that found any; nothing is written before every stage and every emitter has succeeded.
local check = require("check")
local mixed = require("check.mixed")
local diags = require("diag")
local draw = require("draw")
local estimate = require("estimate")
local files = require("emit.files")
local graph = require("graph")
local handing = require("handing")
local host = require("host")
local init = require("init")
local insert = require("insert")
local memory = require("memory")
local new_op = require("new_op")
local ops = require("ops")
local plan = require("plan")
local prefill = require("prefill")
local schedule = require("schedule")
local spec = require("spec")
local sync = require("sync")
local tune = require("tune")

local M = {}

M.VERSION = "0.1.0"

local DONE, MISTAKES, USAGE, FAULT = 0, 1, 2, 3
local MAX_SHOWN = 50

local HELP = [[
nmkgen MODEL.yaml [-o DIR]   generate a model's kernel, encoder and CPU machine into DIR (build/MODEL)
nmkgen variant MODEL.yaml -o DIR   kernel and lists alone, for programs built before: nmk-run --variant DIR
nmkgen tune MODEL.yaml       searches the schedule by measuring steps, writes MODEL.tuning.yaml beside the spec
nmkgen check MODEL.yaml      the same proofs, nothing written
nmkgen plan MODEL.yaml       waves, tasks, counters, bytes and the bound, as text
nmkgen ops                   the opcodes with their descriptor fields
nmkgen keys                  the keys of a model spec
nmkgen new-op NAME           a new opcode to begin with: templates/ops/NAME.cu, with tests that pass
nmkgen init CHECKPOINT_DIR   a spec for a checkpoint of a known family, from its config.json and tensors

  -o, --output DIR           where to write; of init the spec's file (standard output)
  --name NAME                init: the model's name (the folder's)
  --force                    init: -o may name a file that exists
  -t, --target NAME          another target than the spec's: a file of specs/targets
  --set KEY=VALUE            a key of the schedule, such as split.chunks_max=16; may be repeated
  --untuned                  as if there were no MODEL.tuning.yaml
  --launch KIND              generate: step (default), or prefill: the launches that take prompts alone
  --like KIND                of a new op: elementwise (default), a function of one number, or task, all by hand
  --try OP                   insert the op as its table says, for its tests, where the model lacks it
  --estimate                 plan: how long a step takes, by the target's timing
  --svg                      plan: a drawing of a layer's tasks by the same timing, -o names its file (standard output)
  --layer N                  which layer (the one in the middle); --batch N rows (1), --context N tokens of each (8192)

tune:
  --bench COMMAND            runs steps (build/MODEL/bench-decode); gets --variant DIR --batch B --context N --steps N
  --budget SECONDS           time for measurements (600)
  --batch 1,8                rows of the steps that count (1 and the most)
  --context N                tokens of each row (8192)
  --seed N                   of the random placements that are tried (1)
  --estimate-only            no measurements, only what the model of the machine expects
  --write-estimate           write the file also where nothing was measured
  -h, --help                 this text
  --version                  the version

Exit status: 0 done, 1 mistakes in the input (nothing was written), 2 wrong use, 3 a fault of nmkgen.
]]

-- ---------------------------------------------------------------- stages

local function load(path, opts, diag)
  local model = spec.load(path, diag,
    { root = host.root, target = opts.target, sets = opts.sets, untuned = opts.untuned, text = opts.text })
  diag:stop()
  return model
end

--- The graph of one launch of the model with its lists and waits, nothing proved yet.
local function build_launch(model, registry, diag)
  local g = graph.build(model, registry, diag)
  diag:stop()
  memory.assign(g)
  schedule.run(g, diag)
  diag:stop()
  sync.run(g, diag)
  diag:stop()
  handing.run(g)
  return g
end

--- That of a step.
local function build(path, opts, diag)
  local model = load(path, opts, diag)
  local registry = ops.load(host.root, diag, model.schedule.columns)
  diag:stop()
  if opts.try then insert.try(model, registry, opts.try, diag) end
  diag:stop()
  return build_launch(model, registry, diag)
end

--- Reads and proves: everything up to the point where output could be made.  Returns the graph, the proof's figures and
--- the proof.
local function prove(path, opts, diag)
  local g = build(path, opts, diag)
  local stats, proof = check.run(g, diag)
  diag:stop()
  return g, stats, proof
end

--- The same of the launches that take prompts, for the model of a step's graph; nil, why where it has none.  With the
--- proof of the step also of a launch that is both.
local function prove_prefill(of_step, diag, proof)
  local model, why = prefill.of(of_step.model)
  if not model then return nil, why end
  prefill.check(model, diag)
  diag:stop()
  local g = build_launch(model, of_step.registry, diag)
  local stats = check.run(g, diag)
  diag:stop()
  if proof then
    local texts, more = mixed.prove(proof, g)
    for _, text in ipairs(texts) do diag:error({ file = of_step.model.source }, "%s", text) end
    diag:stop()
    stats.shared, stats.shared_accesses = more.shared, more.accesses
  end
  return g, stats
end

--- The emitted files of the launches that opts.launch names (steps), { name, text }, all of them complete.
local function emit(path, opts, diag)
  local g, stats, proof = prove(path, opts, diag)
  if opts.launch == "prefill" then
    local of_prefill, more = prove_prefill(g, diag, proof)
    if not of_prefill then
      diag:error({ file = g.model.source }, "there are no launches that take prompts alone: %s", more)
      diag:stop()
    end
    g, stats = of_prefill, more
  end
  local list = files.all(g)
  list[#list + 1] = { name = "plan.txt", text = plan.text(g, stats) }
  return g, stats, list
end

local function summary(g, stats)
  return ("%s: %d layers, %d nodes, %d tasks on %d SMs, proven"):format(g.model.name, g.model.shape.layers, #g.nodes,
    stats.tasks, g.sms)
end

-- What there is to say of prefill beside that.
local function prefill_summary(g, stats)
  if not g then return "; no prefill: " .. stats end
  return ("; prefill of up to %d tokens: %d nodes, alone and behind a step, proven"):format(
    g.model.prefill.tokens, #g.nodes)
end

-- ---------------------------------------------------------------- commands

local COMMANDS = {}

local function wrong_use(fmt, ...)
  error({ usage = fmt:format(...) }, 0)
end

-- All of the files { path, text }, or none and a mistake.
local function write_files(list, diag)
  local ok, why = host.write(list)
  if ok then return end
  diag:error(nil, "cannot write %s", why)
  diag:stop()
end

local function write(folder, list, diag)
  local out = {}
  for i, file in ipairs(list) do out[i] = { path = folder .. "/" .. file.name, text = file.text } end
  write_files(out, diag)
end

function COMMANDS.generate(path, opts, diag)
  local g, stats, list = emit(path, opts, diag)
  local folder = opts.output or "build/" .. g.model.name
  write(folder, list, diag)
  print(("%s; %d files in %s"):format(summary(g, stats), #list, folder))
end

-- What --set and the tuning file change, in a folder that a program of the model can run.
function COMMANDS.variant(path, opts, diag)
  local g, stats = prove(path, opts, diag)
  write(opts.output, files.variant(g), diag)
  print(("%s; a variant in %s"):format(summary(g, stats), opts.output))
end

function COMMANDS.check(path, opts, diag)
  local g, stats, proof = prove(path, opts, diag)
  print(summary(g, stats) .. prefill_summary(prove_prefill(g, diag, proof)))
end

local function need_timing(g, diag)
  if estimate.possible(g.model.target) then return end
  diag:error(nil, "target %s records no timing (`timing:` in its file): no estimate", g.model.target.name)
  diag:stop()
end

-- The whole number that a flag gives, else the default.
local function number_of(flag, text, least, most, default)
  if not text then return default end
  local n = text:find("^%d+$") and math.tointeger(tonumber(text))
  if not n or n < least or n > most then wrong_use("--%s %s: expected %d to %d", flag, text, least, most) end
  return n
end

local function svg(g, opts)
  local shape = g.model.shape
  return draw.svg(g, {
    layer = number_of("layer", opts.layer, 0, shape.layers - 1, shape.layers // 2),
    batch = number_of("batch", opts.batch, 1, g.columns, 1),
    context = number_of("context", opts.context, 1, shape.max_context, math.min(plan.CONTEXT, shape.max_context)),
  })
end

function COMMANDS.plan(path, opts, diag)
  local g, stats = prove(path, opts, diag)
  if opts.svg then
    need_timing(g, diag)
    local text = svg(g, opts)
    if not opts.output then
      io.write(text)
    else
      write_files({ { path = opts.output, text = text } }, diag)
    end
    return
  end
  io.write(plan.text(g, stats))
  local of_prefill, more = prove_prefill(g, diag)
  io.write("\n", of_prefill and plan.text(of_prefill, more) or ("No prefill launches: %s\n"):format(more))
  if not opts.estimate then return end
  need_timing(g, diag)
  io.write("\n", estimate.text(g))
end

function COMMANDS.tune(path, opts, diag)
  tune.run(path, opts, diag, {
    load = load, build = build,
    variant = function(spec_path, variant_opts, folder, own_diag)
      local g = prove(spec_path, variant_opts, own_diag)
      write(folder, files.variant(g), own_diag)
      return g
    end,
  })
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
  write_files({ { path = path, text = text } }, diag)
  print(("%s: an op that passes its tests; make test-op OP=%s runs them"):format(called, name))
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
  write_files({ { path = file, text = text } }, diag)
  print(("wrote %s; next: nmkgen check %s"):format(file, file))
end

-- For tests that need module yaml or host: runs a Lua file with the rest of the command line.
function COMMANDS.lua(path, opts)
  rawset(_G, "arg", opts.rest)
  return assert(loadfile(path))(table.unpack(opts.rest))
end

-- ---------------------------------------------------------------- the command line

-- Commands, those that take a spec, and what those take that take something.
local NAMES = { "variant", "tune", "check", "plan", "ops", "keys", "new-op", "init" }
local TAKES_SPEC = { generate = true, variant = true, tune = true, check = true, plan = true }
local TAKES = { ["new-op"] = "NAME", init = "CHECKPOINT_DIR" }
for command in pairs(TAKES_SPEC) do TAKES[command] = "MODEL.yaml" end
local WRITES = { generate = true, variant = true, tune = true, ["new-op"] = true, init = true }
-- Flag -> option that takes its argument, or true.
local FLAGS = {
  ["-o"] = "output", ["--output"] = "output", ["-t"] = "target", ["--target"] = "target", ["--set"] = "set",
  ["--bench"] = "bench", ["--budget"] = "budget", ["--batch"] = "batch", ["--context"] = "context",
  ["--seed"] = "seed", ["--like"] = "like", ["--try"] = "try", ["--name"] = "name", ["--launch"] = "launch",
  ["--estimate-only"] = true, ["--write-estimate"] = true, ["--estimate"] = true, ["--svg"] = true,
  ["--layer"] = "layer",
  ["--untuned"] = true, ["--force"] = true, ["-h"] = true, ["--help"] = true, ["--version"] = true,
}
local LONG_FLAGS = {}
for flag in pairs(FLAGS) do
  if flag:find("^%-%-") then LONG_FLAGS[#LONG_FLAGS + 1] = flag end
end
table.sort(LONG_FLAGS)
-- Options that one command alone has, or one of its flags.
local OWN = {
  bench = "tune", budget = "tune", seed = "tune", ["estimate-only"] = "tune", ["write-estimate"] = "tune",
  estimate = "plan", svg = "plan", layer = "plan --svg", batch = "tune, plan --svg", context = "tune, plan --svg",
  like = "new-op", launch = "generate", name = "init", force = "init",
}

local function is_known(list, name)
  for _, known in ipairs(list) do
    if known == name then return true end
  end
  return false
end

-- Whether a command, with the flag that the owner names, is among "tune, plan --svg".
local function owned(owners, command, opts)
  for owner, flag in owners:gmatch("([%w-]+) ?%-?%-?([%w-]*)") do
    if owner == command and (flag == "" or opts[flag]) then return true end
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
      opts[flag:match("^%-+([%w-]+)")] = true
    else
      if not value then
        i = i + 1
        value = args[i]
      end
      if not value or value == "" then wrong_use("%s needs an argument", flag) end
      if option == "set" then
        local key, text = value:match("^([%w_.]+)=(.+)$")
        if not key then wrong_use("--set %s: expected KEY=VALUE", value) end
        opts.sets = opts.sets or {}
        table.insert(opts.sets, { key = key, text = text })
      elseif opts[option] then wrong_use("%s is given twice", flag)
      else
        opts[option] = value
      end
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
  if opts.output and not WRITES[command] and not opts.svg then
    wrong_use("%s writes no files: -o has no meaning", command)
  end
  for _, flag in ipairs(LONG_FLAGS) do
    local owners = OWN[flag:sub(3)]
    if owners and opts[flag:sub(3)] and not owned(owners, command, opts) then
      wrong_use("%s is a flag of %s", flag, owners)
    end
  end
  if opts.svg and opts.estimate then wrong_use("--svg draws and --estimate writes: expected one of them") end
  if command == "tune" and (opts.sets or opts.untuned) then
    wrong_use("tune begins with the spec as it is: --set and --untuned have no meaning")
  end
  if command == "variant" and not opts.output then wrong_use("variant needs -o DIR") end
  if (opts.sets or opts.untuned) and not TAKES_SPEC[command] then
    wrong_use("%s has no schedule: --set and --untuned have no meaning", command)
  end
  if opts.target and not TAKES_SPEC[command] and command ~= "init" then
    wrong_use("%s has no target: -t has no meaning", command)
  end
  if opts.try and not TAKES_SPEC[command] then wrong_use("%s has no model: --try has no meaning", command) end
  if opts.launch and not is_known(ops.LAUNCHES, opts.launch) then
    wrong_use("--launch takes %s, not '%s'", table.concat(ops.LAUNCHES, " or "), opts.launch)
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
