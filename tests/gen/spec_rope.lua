-- Rotary frequencies of the families, plain and scaled, against values computed elsewhere by transformers' formulas;
-- and what config.json must then say.
if not package.preload.yaml then
  local ok = os.execute("build/nmkgen --lua tests/gen/spec_rope.lua")
  os.exit(ok and 0 or 1)
end
local t = dofile("tests/gen/helper_spec.lua")
local diags, families = require("diag"), require("family")

local diag = diags.new()
local llama = assert(families.load("specs/families/llama.lua", "specs/families/llama.lua", diag))

local function shape(changes)
  local s = {}
  for _, row in ipairs(llama.shape) do s[row[1]] = row.default end
  s.layers, s.head_dim, s.rope_theta = 1, 128, 1e6
  for key, value in pairs(changes) do s[key] = value end
  return s
end

-- A scale and frequencies by pair, from 0 on.
local function case(name, changes, scale, want)
  local list = llama.rope({ shape = shape(changes) })
  local wrong = {}
  for pair, frequency in pairs(want) do
    if math.abs(list[pair + 1] / frequency - 1) > 1e-8 then
      wrong[#wrong + 1] = ("pair %d turns by %.9g, not %.9g"):format(pair, list[pair + 1], frequency)
    end
  end
  if #list ~= 64 then wrong[#wrong + 1] = #list .. " pairs" end
  if math.abs(list.scale - scale) > 1e-12 then wrong[#wrong + 1] = ("scale %.15g"):format(list.scale) end
  t.case(name, #wrong == 0, table.concat(wrong, "; "))
end

local LLAMA3 = { rope_theta = 5e5, rope_type = "llama3", rope_factor = 8.0, rope_original_context = 8192 }
local YARN = { rope_type = "yarn", rope_factor = 4.0, rope_original_context = 32768 }

case("plain", {}, 1, { [0] = 1, [32] = 1e-3, [63] = 1.24093776e-06 })
case("linear", { rope_type = "linear", rope_factor = 2.5 }, 1, { [0] = 0.4, [32] = 4e-4 })
case("Llama 3.1 8B", LLAMA3, 1, { [0] = 1, [1] = 0.814617234, [28] = 0.00321144599, [29] = 0.00216657076,
  [32] = 0.000524846161, [35] = 9.55621235e-05, [36] = 7.78465527e-05, [63] = 3.06892599e-07 })
case("Qwen3 with YaRN", YARN, 1.138629436111989, { [0] = 1, [20] = 0.0133352143, [24] = 0.00537532149,
  [30] = 0.00106436098, [39] = 6.49039432e-05, [40] = 4.44569853e-05, [63] = 3.1023444e-07 })
YARN.rope_attention_factor = 0.75
case("YaRN with a factor of its own", YARN, 0.75, { [0] = 1 })

-- What config.json must say, as text: path or other paths = value, ! where it has to be there.
local function facts(name, changes, want)
  local lines = {}
  for _, fact in ipairs(llama.config({ shape = shape(changes) })) do
    local rest = fact.path:match("^rope_parameters%.(.*)$")
    if rest then
      lines[#lines + 1] = ("%s%s=%s"):format(rest, fact.required and "!" or "", tostring(fact.value))
      if not fact.or_path:find("rope_scaling." .. rest, 1, true) then lines[#lines + 1] = "in one place only" end
    end
  end
  t.same("config.json, " .. name, table.concat(lines, " "), want)
end

facts("plain", {}, "rope_type=default")
facts("linear", { rope_type = "linear", rope_factor = 2.5 }, "rope_type!=linear factor!=2.5")
facts("llama3", LLAMA3, "rope_type!=llama3 factor!=8.0 low_freq_factor!=1.0 high_freq_factor!=4.0 "
  .. "original_max_position_embeddings!=8192")
facts("YaRN", YARN, "rope_type!=yarn factor!=4.0 original_max_position_embeddings!=32768 beta_fast=32.0 beta_slow=1.0 "
  .. "attention_factor!=0.75 truncate=true")

t.done()
