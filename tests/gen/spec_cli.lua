-- The command line: what is wrong use, what is a mistake, and that failure leaves nothing behind.
local t = dofile("tests/gen/helper_spec.lua")
local TOY = "specs/nmc-toy.yaml"
local status, out, err, left, _

-- Wrong use: exit status 2, one line that ends alike, nothing on standard output.
local function usage(name, arguments, want)
  local code, printed, why = t.run("build/nmkgen " .. arguments)
  t.same(name, ("%d %s%s"):format(code, printed, why), "2 nmkgen: " .. want .. "; nmkgen --help shows the use\n")
end
usage("no arguments", "", "no model given")
usage("unknown command", "chek " .. TOY, "unknown command 'chek', did you mean 'check'?")
usage("unknown word", "zzzzzzzz",
  "unknown command 'zzzzzzzz', known are: variant, tune, check, plan, ops, keys, new-op, init")
usage("unknown flag", TOY .. " --ouput x", "unknown flag '--ouput', did you mean '--output'?")
usage("unknown short flag", TOY .. " -x",
  "unknown flag '-x', known are: --batch, --bench, --budget, --context, --estimate, --estimate-only, --force, --help, "
  .. "--launch, --layer, --like, --name, --output, --seed, --set, --svg, --target, --try, --untuned, --version, "
  .. "--write-estimate")
usage("flag without argument", TOY .. " -o", "-o needs an argument")
usage("flag with empty argument", TOY .. " --output=", "--output needs an argument")
usage("flag with too much", TOY .. " --version=2", "--version takes no argument")
usage("flag twice", TOY .. " -o a --output=b", "--output is given twice")
usage("two models", TOY .. " " .. TOY, ("'%s' is one word too many"):format(TOY))
usage("command without model", "plan", "plan needs a MODEL.yaml")
usage("init without a folder", "init", "init needs a CHECKPOINT_DIR")
usage("check with --name", "check --name x " .. TOY, "--name is a flag of init")
usage("a model with --force", "--force " .. TOY, "--force is a flag of init")
usage("--name that is no word", "init examples/nmc-toy --name 'a b'",
  "--name takes a word of a-z, A-Z, 0-9 and . _ -, not 'a b'")
usage("check with -o", "check " .. TOY .. " -o x", "check writes no files: -o has no meaning")
usage("ops with a model", "ops " .. TOY, ("'%s' is one word too many"):format(TOY))
usage("ops with --try", "ops --try residual", "ops has no model: --try has no meaning")
usage("check with --like", "check --like task " .. TOY, "--like is a flag of new-op")
usage("new-op without a name", "new-op", "new-op needs a NAME")
usage("new-op with -t", "new-op -t h100 halve", "new-op has no target: -t has no meaning")
usage("ops with -t", "ops -t h100", "ops has no target: -t has no meaning")

status, out, err = t.run("build/nmkgen --help")
t.case("--help", status == 0 and err == "" and out:find("^nmkgen MODEL.yaml") ~= nil, out .. err)
status, out, err = t.run("build/nmkgen --version")
t.case("--version", status == 0 and err == "" and out:find("^nmkgen %d+%.%d+%.%d+\n$") ~= nil, out .. err)
status, out, err = t.run("build/nmkgen keys")
t.case("keys", status == 0 and err == "" and out:find("\nshape.layers: transformer layers\n", 1, true) ~= nil,
  out .. err)
status, out, err = t.run("build/nmkgen ops")
t.case("ops", status == 0 and err == "" and out:find("1 attention: ", 1, true) ~= nil, out .. err)

status, out, err = t.run("build/nmkgen check -t h20 " .. TOY)
t.same("unknown target by flag", status .. out .. err,
  "1nmkgen: --target: unknown target 'h20', did you mean 'h200'?\n")
status, _, err = t.run("build/nmkgen check -t h100 " .. TOY)
t.same("another target by flag", status .. err, "0")
status, out, err = t.run("build/nmkgen check " .. TOY)
local line = "^nmc%-toy: 5 layers, %d+ nodes, %d+ tasks on 132 SMs, proven; "
  .. "prefill of up to %d+ tokens: %d+ nodes, alone and behind a step, proven\n$"
t.case("check", status == 0 and err == "" and out:find(line) ~= nil, status .. out .. err)
status, out, err = t.run("build/nmkgen plan " .. TOY)
t.case("plan", status == 0 and err == "" and out ~= "", status .. err)

_, _, err = t.run("NMK_ROOT=/nowhere build/nmkgen --version")
t.same("no root", err, "nmkgen: there is no /nowhere/gen/nmkgen.lua; NMK_ROOT names the folder that holds gen/\n")

status = t.run("build/nmkgen --help >/dev/full")
t.case("a full disk on standard output is noticed", status == 1, "status " .. status)

-- What cannot be written.
local function refuses(name, folder, want)
  local code, printed, why = t.run(("build/nmkgen %s -o %s"):format(TOY, folder))
  t.same(name, code .. printed .. why, "1nmkgen: cannot write " .. want .. "\n")
end
local file = t.write(t.folder .. "/file", "")
refuses("output below a file", file .. "/x", file .. "/x/megakernel.cu: Not a directory")
local folder = t.folder .. "/half"
t.run(("mkdir -p %s/abi.h/x; echo old >%s/megakernel.cu"):format(folder, folder))
refuses("output in the place of a folder", folder, folder .. "/abi.h: Is a directory")
_, left = t.run(("ls %s"):format(folder))
t.case("no temporary file is left", left:find("tmp") == nil, left)

t.done()
