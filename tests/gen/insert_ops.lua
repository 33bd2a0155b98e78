-- `insert:` of a spec: where the op goes, who reads what afterwards, what is said of mistakes.  The ops are the
-- scaffolds of `nmkgen new-op`, in a copy of the tree.
local t = dofile("tests/gen/helper_spec.lua")

local root = t.folder .. "/root"
assert(os.execute(("mkdir -p %s && cp -r gen templates specs %s/"):format(root, root)))
local nmkgen = ("NMK_ROOT=%s build/nmkgen "):format(root)
assert(t.run(nmkgen .. "new-op scale_it && " .. nmkgen .. "new-op row_max --like task") == 0)

-- One that changes its value itself, and asks for an integer.
t.write(root .. "/templates/ops/in_place.cu", [[
/*@op
  name   = "in_place", summary = "in += step",
  tile   = "cyclic",
  task   = { {"first", "i32"}, {"step", "i32"}, {"end", "i32"}, {"by", "i32"} },
  reads  = { {"in", "bf16", role = "help", lo = "first", hi = "end", step = "step"} },
  writes = { {"in", "bf16", role = "help", lo = "first", hi = "end", step = "step"} },
  cost   = "0",
@*/
//@device help
DEVICE void help(Helper &, const Task &) {}

//@reference
(void)t;
]])

local toy = t.read("specs/nmc-toy.yaml")
local lines = select(2, toy:gsub("\n", ""))

-- The toy with insertions; its plan, or the messages with lines counted from `insert:` on.
local function plan(insertions)
  local path = t.write(t.folder .. "/x.yaml", toy .. "insert:\n" .. insertions)
  local status, out, err = t.run(nmkgen .. "plan " .. path)
  return status == 0 and out, (err:gsub("[^\n]-x%.yaml:(%d+)", function(line) return tostring(line - lines) end))
end

-- The names in the part of the plan under a heading, and the waits of one of them.
local function waves(text, heading)
  local names, waits = {}, {}
  local inside = false
  for line in text:gmatch("([^\n]*)\n") do
    if inside and line == "" then break end
    if inside then
      local name = line:match("^(%S+)")
      names[#names + 1] = name
      waits[name] = line:match("/ %d+%s+[%d-]+%s+(.*)$")
    end
    inside = inside or line:find(heading) ~= nil
  end
  return table.concat(names, " "), waits
end

local MOE, DENSE, AFTER = "^3 layers, shown: 1", "^1 layers, shown: 0", "^after the layers"

do
  local text, why = plan("  - { op: scale_it, value: logits, with: { scale: 2 } }\n")
  t.case("an op behind the router's logits", text, why)
  local names, waits = waves(text or "", MOE)
  t.same("stands behind their writer", names, "norm router scale_it qkv route attention combine expert_up o_proj "
    .. "expert_down residual")
  t.same("waits for it", waits.scale_it, "layer1.router (2)")
  t.case("and the reader for the op", (waits.route or ""):find("layer1.scale_it", 1, true), waits.route)
  t.case("not where the layer has no such value", not waves(text or "", DENSE):find("scale_it"), "in the dense layer")
  t.case("one buffer more", text:find("\nlogits.scale_it at ", 1, true), "none")
end

do -- logits that are sums of integers, and those that an op can be inserted at
  local spec = t.read("tests/models/tiny-qwen3-moe.yaml")
  local function layer(insertions)
    local _, text, why = t.run(nmkgen .. "plan " .. t.write(t.folder .. "/moe.yaml", spec .. insertions))
    return waves(text, "shown: 0"), text, why
  end
  local names, text, why = layer("")
  t.same("SMs add up logits", names, "norm qkv clear_logits attention combine o_proj router_sum residual route "
    .. "mlp_norm expert_up expert_down mlp_residual")
  t.case("what their reader makes of them", text:find("\nlogits +f32 "), why)
  names, text, why = layer("insert:\n  - { op: scale_it, value: logits, with: { scale: 2 } }\n")
  t.same("there are logits to insert at", names, "norm qkv attention combine o_proj residual mlp_norm router scale_it "
    .. "route expert_up expert_down mlp_residual")
  t.case("in a buffer of their own", text:find("\nlogits.scale_it at ", 1, true), why)
end

do
  local text, why = plan("  - { op: scale_it, value: logits, layers: [2], with: { scale: 2 } }\n"
    .. "  - { op: row_max, value: logits, layers: [2], with: { floor: 1 } }\n")
  t.case("two ops in turn", text, why)
  t.case("in one layer alone", not waves(text or "", MOE):find("scale_it"), "in layer 1")
  t.case("each with a buffer", text and text:find("\nlogits.scale_it.row_max at ", 1, true), "none")
end

do
  local text, why = plan("  - { op: scale_it, value: x, layers: [0], with: { scale: 2 } }\n")
  t.case("an op before the first reader", text, why)
  local names, waits = waves(text or "", DENSE)
  t.same("begins the layer", names:match("^%S+ %S+ %S+"), "scale_it round_x norm")
  t.same("waits for the layer before", waits.scale_it, "embed (32)")
  -- norms read the copy of the new x, and the addition takes the new x too: nobody but the op reads what embed left
  t.case("for all readers", (waits.norm or ""):find("layer0.round_x", 1, true), waits.norm)
  t.case("in both their buffers", text and text:find("\nx0.scale_it +at ") and text:find("\nxb0.scale_it +at "), "none")
  text, why = plan("  - { op: scale_it, value: x, layers: [0], with: { scale: 2 } }\n"
    .. "  - { op: row_max, value: x, layers: [0], with: { floor: 1 } }\n")
  names = waves(text or "", DENSE)
  t.same("two of them, one copy", names:match("^%S+ %S+ %S+ %S+"), "scale_it row_max round_x norm")
  t.case("of what both have made", text and text:find("\nxb0.scale_it.row_max +at ")
    and not text:find("\nxb0.scale_it +at "), why)
end

do
  local text = plan("  - { op: scale_it, value: x, layers: outside, with: { scale: 2 } }\n")
  t.same("outside the layers", (waves(text or "", AFTER):match("^%S+ %S+ %S+")), "scale_it round_x norm")
  t.case("is not in them", text and not waves(text, MOE):find("scale_it"), "in layer 1")
  text = plan("  - { op: scale_it, value: x, with: { scale: 2 } }\n")
  local everywhere = text and true
  for _, heading in ipairs({ MOE, DENSE, AFTER }) do
    everywhere = everywhere and waves(text, heading):find("^scale_it round_x norm")
  end
  t.case("everywhere, where nothing is said", everywhere, "not")
  text = plan("  - { op: in_place, value: qkv, with: { by: 3 } }\n")
  local names, waits = waves(text or "", MOE)
  t.case("an op that changes its value", names:find("qkv in_place") and not text:find("qkv.in_place", 1, true), names)
  t.case("and its reader waits for it", (waits.attention or ""):find("layer1.in_place", 1, true), waits.attention)
end

do
  local text, why = plan("  - { op: scale_it, value: final_logits, with: { scale: 0.5 } }\n"
    .. "  - { op: scale_it, value: final_logits, with: { scale: 0.25 } }\n")
  local one = "inserted at final_logits: scale_it\n"
  t.case("at a point", text and text:find("\n" .. one .. one, 1, true), why)
  local status = t.run(nmkgen .. t.folder .. "/x.yaml -o " .. t.folder .. "/point")
  local kernel = status == 0 and t.read(t.folder .. "/point/megakernel.cu") or ""
  t.case("one after the other, each with its own numbers", kernel:find("x = at_final_logits_1::apply(x);\n"
    .. "    x = at_final_logits_2::apply(x);", 1, true) and kernel:find("scale = 0.25f;", 1, true), kernel:sub(1, 80))
  t.case("no task for it", not kernel:find("NMK_OP_SCALE_IT", 1, true), "an opcode")
end

-- Each mistake by itself.
local function mistake(name, insertions, want)
  local text, why = plan(insertions)
  t.same(name, text and "no message\n" or why, want .. "\n")
end
local NEEDS = "which the family does not give: with: { scale: NUMBER }"
mistake("unknown op", "  - op: scale\n    value: logits\n",
  "2:9: insert: there is no op 'scale', did you mean 'scale_it'?")
mistake("an op that reads no such thing", "  - op: norm\n    value: x\n",
  "2:9: insert: op 'norm' reads no buffer 'in', so it cannot be inserted")
mistake("unknown value", "  - op: scale_it\n    value: logit\n    with: { scale: 1 }\n",
  "3:12: insert: unknown value 'logit', did you mean 'logits'?; nmkgen plan lists them")
mistake("x in bf16 by itself", "  - op: scale_it\n    value: xb\n    with: { scale: 1 }\n",
  "3:12: insert: unknown value 'xb', did you mean 'x'?; nmkgen plan lists them")
mistake("what stays on the SM", "  - op: scale_it\n    value: acc\n    with: { scale: 1 }\n",
  "3:12: insert: value 'acc' stays on its SM, as op 'dense_down' leaves it: nothing can be inserted")
mistake("what nobody reads there", "  - op: scale_it\n    value: logits\n    layers: outside\n    with: { scale: 1 }\n",
  "3:12: insert: nobody reads 'logits' outside the layers")
mistake("a layer without it", "  - op: scale_it\n    value: logits\n    layers: [1, 0]\n    with: { scale: 1 }\n",
  "4:17: insert: layers: nobody reads 'logits' in layer 0")
mistake("no such layer", "  - op: scale_it\n    value: logits\n    layers: [1, 5]\n    with: { scale: 1 }\n",
  "4:17: insert: layers: there is no layer 5: the model has 0 to 4")
mistake("missing parameter", "  - op: scale_it\n    value: logits\n",
  "2:5: op 'scale_it' needs the parameter 'scale', " .. NEEDS)
mistake("unknown parameter", "  - op: scale_it\n    value: logits\n    with: { scale: 1, sacle: 2 }\n",
  "4:30: with: op 'scale_it' has no parameter 'sacle', did you mean 'scale'?")
mistake("not an integer", "  - op: in_place\n    value: qkv\n    with: { by: 1.5 }\n",
  "4:17: with: by: expected an integer, got 1.5")
mistake("another type", "  - op: row_max\n    value: qkv\n    with: { floor: 1 }\n",
  "3:12: insert: value 'qkv': it is bf16, and op 'row_max' has 'in' as f32")
mistake("not a number at all", "  - op: scale_it\n    value: cuts\n    with: { scale: 1 }\n",
  "3:12: insert: value 'cuts': it is u64, and op 'scale_it' has 'in' as f32 or bf16")
mistake("another form", "  - op: scale_it\n    value: attn\n    with: { scale: 1 }\n",
  "3:12: insert: value 'attn': the family lays it out otherwise than in one row for each column, "
  .. "which op 'scale_it' takes")
mistake("two numbers for one parameter", "  - op: scale_it\n    value: logits\n    with: { scale: 1 }\n"
  .. "  - op: scale_it\n    value: qkv\n    with: { scale: 2 }\n",
  "7:20: with: scale is 2.0 here and 1.0 before: a parameter is the same in all nodes of op 'scale_it'; "
  .. "a task field can differ")
mistake("a task at a point", "  - op: row_max\n    value: final_logits\n    with: { floor: 1 }\n",
  "2:9: insert: 'final_logits' is in registers of lm_head: only an op with //@device inline can be inserted there")
mistake("layers at a point", "  - op: scale_it\n    value: final_logits\n    layers: all\n    with: { scale: 1 }\n",
  "4:13: insert: 'final_logits' is in the code of lm_head, which all its nodes share: leave out layers")
mistake("not a list", "  op: scale_it\n", "2:3: insert: expected a list of maps, got a map")
mistake("an unknown key", "  - { op: scale_it, values: logits }\n",
  "2:21: insert[1].values: unknown key, did you mean 'value'?")
mistake("layers that are none", "  - { op: scale_it, value: x, layers: some }\n",
  "2:39: insert[1].layers: expected all, outside, or a list of layers, got 'some'")
mistake("no layers", "  - { op: scale_it, value: x, layers: [] }\n",
  "2:39: insert[1].layers: expected all, outside, or a list of layers, got an empty list")
mistake("no number", "  - { op: scale_it, value: x, with: { scale: much } }\n",
  "2:46: insert[1].with.scale: expected a number, got 'much'")

local status, _, err = t.run(nmkgen .. "check specs/nmc-toy.yaml --try scal_it")
t.same("--try of an unknown op", status .. err, "1nmkgen: --try: there is no op 'scal_it', did you mean 'scale_it'?\n")

t.done()
