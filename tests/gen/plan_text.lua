-- plan.txt of North Mini Code: the figures against ones worked out by hand.
package.path = "gen/?.lua;tests/sched/?.lua;" .. package.path
local helper = require("helper")
local plan = require("plan")

local g = helper.build("north-mini-code")
local _, stats = require("check").prove(g, helper.words(g))
g.model.target.name = "h200"
local text = plan.text(g, stats)

local function line(pattern)
  helper.ok((pattern:gsub("%%", ""):gsub(" %+", " ")), text:find("\n" .. pattern .. "\n"), text:sub(1, 3000))
end

-- 49 * 5120 * 2048 * 2 bytes and so on; 8 of 128 experts a token; 13 full layers of 8192 tokens, 36 of 4096, 2 KiB
-- each.
line("distinct experts +8%.0 +15%.5 +29%.1 +51%.6")
line("qkv +1%.028 GB +1%.028 GB +1%.028 GB +1%.028 GB")
line("o_proj +822%.08 MB.*")
line("router +25%.17 MB.*")
line("expert_up +2%.416 GB +4%.681 GB +8%.795 GB +15%.589 GB")
line("expert_down +1%.208 GB +2%.340 GB +4%.397 GB +7%.794 GB")
line("lm_head +1%.074 GB.*")
line("kv +520%.09 MB +1%.040 GB +2%.080 GB +4%.161 GB")
line("all +7%.130 GB +11%.048 GB +18%.259 GB +30%.530 GB")
local values = g.model.family_module.values(g.model)
local weights = plan.weight_bytes(g, values, 8)
helper.ok("weights alone, as the runtime gets them", math.abs(weights - (30.530e9 - 4.161e9)) < 2e6, weights)
line("Counters: 302, one for each node that is waited for")
line("36 layers, shown: 1; moe MLP, sliding attention, RoPE: 1%-3, 5%-7, 9%-11, [%d, -]*")
line("12 layers, shown: 4; moe MLP, full attention, no RoPE: 4, 8, 12, [%d, ]*")
line("attention +every +132 +1 / 1%.0 / 1 +8 +layer1%.qkv %(264%)")
line("part +at +1184 +4259840 bytes +1024 units")

helper.ok("the same text twice", plan.text(g, stats) == text, "it differs")
helper.ok("no line is too long", not text:find(("[^\n]"):rep(141)), "there is one")
helper.ok("distinct experts of nobody", plan.distinct_experts(128, 8, 0) == 0, plan.distinct_experts(128, 8, 0))
helper.done()
