-- Which models have launches that take prompts, what is said of those that have none, and of mistakes in a family's.
package.path = "tests/gen/?.lua;" .. package.path
local t = require("helper_spec")

local root = "build/tests/gen_prefill/root"
t.run("rm -rf " .. root)
t.run(('mkdir -p %s && cp -r specs %s && ln -s "$PWD/gen" "$PWD/templates" %s'):format(root, root, root))
local TOY, FAMILY = t.read("specs/nmc-toy.yaml"), "specs/families/cohere2_moe.lua"

-- nmkgen with a spec of this text, or with a family of another.
local function nmkgen(arguments, text, family)
  t.write(root .. "/specs/nmc-toy.yaml", text or TOY)
  t.write(root .. "/" .. FAMILY, family or t.read(FAMILY))
  local status, out, err = t.run(("NMK_ROOT=%s build/nmkgen %s %s/specs/nmc-toy.yaml"):format(root, arguments, root))
  return ("%d %s%s"):format(status, out, err)
end

local function says(name, got, want)
  t.case(name, got:find(want, 1, true) ~= nil, ("'%s' is not in '%s'"):format(want, got))
end

local function with(old, new)
  local from, to = TOY:find(old, 1, true)
  return TOY:sub(1, from - 1) .. new .. TOY:sub(to + 1)
end

says("a chunk as the spec has it", nmkgen("check"),
  "prefill of up to 1024 tokens: 43 nodes, alone and behind a step, proven")
says("the default", nmkgen("check", with("prefill:\n  tokens: 1024", "")), "prefill of up to 8192 tokens")
says("none", nmkgen("check", with("tokens: 1024", "tokens: 0")), "proven; no prefill: prefill.tokens is 0")
says("tiles that are not whole", nmkgen("check", with("tokens: 1024", "tokens: 1000")),
  "specs/nmc-toy.yaml:26:11: prefill.tokens: must be a multiple of 256, the tokens of a tile; it is 1000")
says("too many", nmkgen("check", with("tokens: 1024", "tokens: 65792")),
  "specs/nmc-toy.yaml:26:11: prefill.tokens: expected an integer from 0 to 65536, got '65792'")
says("plan tells of both", nmkgen("plan"),
  "nmc-toy on h200, prefill: 5 layers, 132 SMs, chunks of up to 1024 tokens of 64 rows, which see up to 9216")
says("plan without", nmkgen("plan", with("tokens: 1024", "tokens: 0")), "No prefill launches: prefill.tokens is 0")
says("files of launches that are not there", nmkgen("--launch prefill -o " .. root .. "/none",
  with("tokens: 1024", "tokens: 0")), "1 specs/nmc-toy.yaml: there are no launches that take prompts alone: "
  .. "prefill.tokens is 0")
says("another launch", nmkgen("--launch prefil"), "2 nmkgen: --launch takes step or prefill, not 'prefil'")
says("a flag of generating", nmkgen("check --launch prefill"), "2 nmkgen: --launch is a flag of generate")

-- What is inserted in a layer prefill would lack; behind the layers it has nothing to do.
local INSERT = "\ninsert:\n  - op: logit_softcap\n    value: %s\n    with: { cap: 30.0 }\n"
local op = [[
/*@op
  name     = "logit_softcap",
  summary  = "y = cap * tanh(x / cap)",
  pipeline = "elementwise",
  params   = { {"cap", "f32"} },
@*/
//@device inline
DEVICE float apply(float x) { return x; }

//@reference
return x;
]]
t.run(("rm %s/templates && cp -r templates %s"):format(root, root))
t.write(root .. "/templates/ops/logit_softcap.cu", op)
says("an op in the layers", nmkgen("check", TOY .. INSERT:format("logits")),
  "; no prefill: op 'logit_softcap' is inserted at logits, which prefill has not")
says("an op behind them", nmkgen("check", TOY .. INSERT:format("final_logits")), "prefill of up to 1024 tokens")

-- A family's own prefill.
local function family(lines)
  return (t.read(FAMILY):gsub("return decoder.complete", lines .. "\n%0"))
end
says("a family that has none", nmkgen("check", nil, family("M.prefill = false")), "part 'prefill' must be a table")
says("a part that is missing", nmkgen("check", nil, family("M.prefill = { waves = {} }")),
  "prefill: part 'values' must be a function, not a nil")
says("a part that nobody knows", nmkgen("check", nil, family("M.prefill = { wave = {} }")),
  "prefill: unknown part 'wave', did you mean 'waves'?")
says("an op that nobody knows", nmkgen("check", nil, (t.read(FAMILY):gsub("return (decoder.complete%(.*)$",
  "local M2 = %1\nfunction M2.prefill.front() return { { op = 'prefill_embde' } } end\nreturn M2\n"))),
  "node prefill_embde: there is no op 'prefill_embde'")
t.done()
