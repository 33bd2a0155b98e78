-- `plan --svg`: drawings of real layers are well-formed, small, and show what the layer does; wrong flags are refused.
local t = dofile("tests/gen/helper_spec.lua")

-- What is wrong with a text as XML, as far as these drawings use it; nil: nothing.
local function fault(text)
  local open, at = {}, 1
  while at <= #text do
    local from = text:find("<", at, true)
    local words = text:sub(at, (from or #text + 1) - 1)
    if words:gsub("&%a+;", ""):find("[&>]") then return "a character that is not escaped: " .. words end
    if not from then break end
    local close, name, rest, empty, to = text:match("^<(/?)(%a+)([^<>]-)(/?)>()", from)
    if not close then return "no tag: " .. text:sub(from, from + 40) end
    if rest:gsub(' [%a:-]+="[^"<&]*"', "") ~= "" then return ("attributes of %s: %s"):format(name, rest) end
    if close == "/" then
      if table.remove(open) ~= name then return "closes what is not open: " .. name end
    elseif empty == "" then
      if #open == 0 and from > 1 then return "two roots" end
      open[#open + 1] = name
    end
    at = to
  end
  if #open > 0 then return "not closed: " .. open[#open] end
end

assert(fault("<a><b></a>") and fault("<a>&</a>") and fault("<a b=c/>") and fault("<a/><a>") and not fault('<a b="c"/>'))

-- The kinds of nodes of a layer, as plan.txt calls them.
local function draw(model, flags, wanted)
  local status, out, err = t.run(("build/nmkgen plan specs/%s.yaml --svg %s"):format(model, flags))
  local name = flags == "" and model or ("%s %s"):format(model, flags)
  t.case(name .. ": is drawn", status == 0 and err == "", err)
  t.case(name .. ": well-formed", out:find("^<svg ") and not fault(out), fault(out) or out:sub(1, 80))
  t.case(name .. ": at most 200 kB", #out < 200000, tostring(#out))
  for _, kind in ipairs(wanted) do
    t.case(("%s: shows %s"):format(name, kind), out:find(("<title>%s: %%d+ tasks"):format(kind)), "it does not")
  end
  return out
end

local first = draw("nmc-toy", "", { "norm", "qkv", "attention", "expert_up", "expert_down", "o_proj", "residual" })
t.same("the same twice", draw("nmc-toy", "", {}), first)
t.case("another layer is another drawing", draw("nmc-toy", "--layer 0 --batch 8", { "dense_up" }) ~= first, "the same")
draw("north-mini-code", "--batch 8 --context 32768", { "attention", "expert_up" })
draw("llama-3.2-1b", "--layer=3", { "dense_up", "dense_down" })

-- The layer's time is of the step that --estimate tells.
local layer, step = first:match("layer %d+ of %d+: ([%d.]+) us of a step of ([%d.]+) ms")
local _, estimate = t.run("build/nmkgen plan specs/nmc-toy.yaml --estimate")
t.same("the step is that of --estimate", step, estimate:match("\n +1 +([%d.]+)"))
t.case("the layer is a part of it", tonumber(layer) > 0 and tonumber(layer) < tonumber(step) * 1e3, layer)

local file = t.folder .. "/layer.svg"
t.run(("build/nmkgen plan specs/nmc-toy.yaml --svg -o %s"):format(file))
t.same("-o names the file", t.exists(file) and t.read(file), first)

local function refused(flags, status, message)
  local got, out, err = t.run("build/nmkgen plan specs/nmc-toy.yaml " .. flags)
  t.case(flags .. " is refused", got == status and out == "" and err:find(message, 1, true), err)
end
refused("--svg --layer 9999", 2, "--layer 9999: expected 0 to ")
refused("--svg --batch 9", 2, "--batch 9: expected 1 to 8")
refused("--svg --context 1e3", 2, "--context 1e3: expected 1 to ")
refused("--layer 1", 2, "--layer is a flag of plan --svg")
refused("--batch 1", 2, "--batch is a flag of tune, plan --svg")
refused("--svg --estimate", 2, "expected one of them")
refused("-o x.svg", 2, "plan writes no files")
refused("--svg -t h100", 1, "target h100 records no timing")
t.done()
