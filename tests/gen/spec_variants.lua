-- Specs that differ from the toy's and are right: every stage takes them, the proof included.
local t = dofile("tests/gen/helper_spec.lua")
local toy = t.read("specs/nmc-toy.yaml")

local function variant(name, changes, schedule)
  local text = toy
  for old, new in pairs(changes) do
    local from, to = text:find(old, 1, true)
    assert(from, old)
    text = text:sub(1, from - 1) .. new .. text:sub(to + 1)
  end
  local path = t.write(t.folder .. "/x.yaml", text .. (schedule and "schedule:\n" .. schedule or ""))
  local status, out, err = t.run("build/nmkgen check " .. path)
  t.case(name, status == 0 and err == "" and out:find("proven\n$") ~= nil, status .. out .. err)
end

local ORDER = "  order: [%s]\n"
variant("attention first", {}, ORDER:format(
  "norm, qkv, attention, combine, o_proj, router, route, up, down, residual"))
variant("experts first", {}, ORDER:format(
  "norm, router, route, up, down, qkv, attention, combine, o_proj, residual"))
variant("attention after the route", {}, ORDER:format(
  "norm, qkv, router, attention, route, combine, up, o_proj, down, residual"))
variant("down before o_proj", {}, ORDER:format(
  "norm, router, qkv, route, attention, up, combine, down, o_proj, residual"))
variant("shallow ring", {}, "  ring_stages: 4\n  in_flight: 1\n")
variant("in flight by batch", {}, "  in_flight: [1, 2, 3, 4, 5, 6, 7, 8]\n")
for _, columns in ipairs({ 1, 3, 7, 16, 24, 64 }) do
  variant(columns .. " columns", {}, ("  columns: %d\n"):format(columns))
end
variant("buffers of their own", {}, "  reuse_buffers: false\n")
variant("another split", {}, "  split: {chunks_min: 1, chunks_max: 1, pages_per_chunk: 1, pages_per_long_chunk: 1}\n")
variant("another target", { ["h200"] = "h100" })
variant("all layers full", { ["full_attention_every: 4"] = "full_attention_every: 1" })
variant("no dense layer", { ["dense_layers: 1"] = "dense_layers: 0" })
variant("two dense layers", { ["dense_layers: 1"] = "dense_layers: 2" })
variant("one expert a token", { ["experts_per_token: 4"] = "experts_per_token: 1" })
variant("odd widths", { ["expert_ff: 96"] = "expert_ff: 160", ["dense_ff: 512"] = "dense_ff: 224" })
variant("wide", { ["hidden: 256"] = "hidden: 2048", ["heads: 8"] = "heads: 32", ["kv_heads: 1"] = "kv_heads: 4",
  ["experts: 16"] = "experts: 128", ["experts_per_token: 4"] = "experts_per_token: 8" })
variant("padded tiles", { ["hidden: 256"] = "hidden: 576", ["vocab: 4096"] = "vocab: 1003",
  ["experts: 16"] = "experts: 10" })
variant("two passes", { ["hidden: 256"] = "hidden: 4096" })
variant("four passes", { ["hidden: 256"] = "hidden: 8192" })
variant("defaults", { ["  dense_layers: 1\n"] = "", ["  full_attention_every: 4     # layers 0 and 4\n"] = "",
  ["  logit_scale: 1.0\n"] = "", ["  norm_eps: 1e-6\n"] = "", ["  head_dim: 128\n"] = "" })

-- Wider steps have fences, whatever the spec asks for: programs have generations of 16 and more columns too.
for columns, words in pairs({ [8] = "whose words tell that they are there", [16] = "layers share buffers" }) do
  local status, out, err = t.run(("build/nmkgen plan specs/llama-3.2-1b.yaml --set columns=%d"):format(columns))
  t.case(columns .. " columns of a validated model", status == 0 and out:find(words, 1, true) ~= nil, status .. err)
end

t.done()
