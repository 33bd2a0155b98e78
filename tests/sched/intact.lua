-- What the generator makes is proved: both models, all wave orders, with and without reuse of buffers,
-- few SMs and many.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local ORDERS = {
  { "attention, up, o_proj, down", "norm router qkv route attention combine up o_proj down residual" },
  { "attention, up, down, o_proj", "norm router qkv route attention combine up down o_proj residual" },
  { "up, attention, o_proj, down", "norm router qkv route up attention combine o_proj down residual" },
  { "up, attention, down, o_proj", "norm router qkv route up attention combine down o_proj residual" },
}

local function prove(name, model, over)
  local g = helper.build(model, over)
  return helper.proved(("%s: %s"):format(model, name), g, helper.words(g)), g
end

for _, order in ipairs(ORDERS) do
  local waves = {}
  for wave in order[2]:gmatch("%S+") do waves[#waves + 1] = wave end
  prove(order[1], "north-mini-code", { schedule = { order = waves } })
  for _, reuse in ipairs({ true, false }) do
    prove(("%s, %s"):format(order[1], reuse and "buffers reused" or "a buffer for each layer"), "nmc-toy",
      { schedule = { order = waves, reuse_buffers = reuse } })
  end
end
prove("a buffer for each layer", "north-mini-code", { schedule = { reuse_buffers = false } })

for _, sms in ipairs({ 78, 114, 144 }) do prove(sms .. " SMs", "nmc-toy", { sms = sms }) end
-- Few SMs have so many chunks of attention each that a ring of 12 stages does not fit beside them.
for _, sms in ipairs({ 16, 17 }) do prove(sms .. " SMs", "nmc-toy", { sms = sms, schedule = { ring_stages = 11 } }) end
for columns = 1, 7, 2 do prove(columns .. " columns", "nmc-toy", { schedule = { columns = columns } }) end
prove("three columns", "north-mini-code", { schedule = { columns = 3 } })
prove("two dense layers", "nmc-toy", { shape = { dense_layers = 2 } })
prove("SMs without any row tile in a layer", "nmc-toy", { shape = { dense_layers = 2, dense_ff = 64 } })
prove("no dense layer", "nmc-toy", { shape = { dense_layers = 0 } })

-- Two runs give the same words.
local function text(words, sms)
  local all = {}
  for sm = 0, sms - 1 do all[#all + 1] = table.concat(words[sm], ",") end
  return table.concat(all, ";")
end
local a, b = helper.build("nmc-toy"), helper.build("nmc-toy")
helper.ok("the same words twice", text(helper.words(a), a.sms) == text(helper.words(b), b.sms), "they differ")

-- Full size, in the time that issue 2 allows; CPU time, because machines that run tests are shared.
local g = helper.build("north-mini-code")
local words = helper.words(g)
local before = os.clock()
local _, stats = require("check").prove(g, words)
helper.ok("a proof of full size takes less than 5 s", os.clock() - before < 5, os.clock() - before)
helper.ok("every SM of every layer is in it", stats.tasks > 49 * 132 * 8, stats.tasks)
helper.done()
