-- Rotary frequencies, plain and scaled for contexts longer than those of the training: the keys of a shape, what
-- config.json says of them, and the formulas, which are those of transformers (src/transformers/modeling_rope_utils.py;
-- YaRN: arXiv 2309.00071; llama3: the Llama 3.1 release).
local rope = {}

local function row(key, kind, more)
  local name = more.config
  more[1], more[2] = key, kind
  more.config, more.or_config = "rope_parameters." .. name, "rope_scaling." .. name
  more.config_check = false       -- rope.config says what must hold for the type at hand
  return more
end

-- transformers 4 has these keys in rope_scaling, 5 in rope_parameters.
rope.rows = {
  row("rope_type", "word", { choices = { "default", "linear", "llama3", "yarn" }, default = "default",
    config = "rope_type", config_default = "default", doc = "how RoPE is scaled" }),
  row("rope_factor", "number", { min = 1, max = 1e6, default = 1.0, config = "factor", config_default = 1.0,
    doc = "how much longer contexts are than in training; of linear, llama3, yarn" }),
  row("rope_original_context", "int", { min = 0, max = 4194304, default = 0, config_default = 0,
    config = "original_max_position_embeddings", doc = "longest sequence of the training; of llama3, yarn" }),
  row("rope_low_freq_factor", "number", { min = 0, max = 1e6, default = 1.0, config = "low_freq_factor",
    config_default = 1.0, doc = "turns in the original context below which a pair is scaled; of llama3" }),
  row("rope_high_freq_factor", "number", { min = 0, max = 1e6, default = 4.0, config = "high_freq_factor",
    config_default = 4.0, doc = "turns in the original context above which a pair is not scaled; of llama3" }),
  row("rope_beta_fast", "number", { min = 0, max = 1e6, default = 32.0, config = "beta_fast", config_default = 32.0,
    doc = "turns in the original context above which a pair is not scaled; of yarn" }),
  row("rope_beta_slow", "number", { min = 0, max = 1e6, default = 1.0, config = "beta_slow", config_default = 1.0,
    doc = "turns in the original context below which a pair is scaled; of yarn" }),
  row("rope_attention_factor", "number", { min = 0, max = 1e6, default = 0.0, config = "attention_factor",
    config_default = 0.0, doc = "factor of cosine and sine, 0: 0.1 ln(rope_factor) + 1; of yarn" }),
}

--- What must hold between those keys.
rope.RULES = {
  { "rope_original_context", function(s)
      return s.rope_original_context > 0 or s.rope_type == "default" or s.rope_type == "linear"
    end, "given for this rope_type", uses = { "rope_type" } },
  { "rope_high_freq_factor", function(s)
      return s.rope_type ~= "llama3" or s.rope_high_freq_factor > s.rope_low_freq_factor
    end, "above rope_low_freq_factor", uses = { "rope_low_freq_factor" } },
}

local SCALED = {}

function SCALED.linear(s, plain)
  for j, f in ipairs(plain) do plain[j] = f / s.rope_factor end
  return 1.0
end

-- Pairs that turn rarely within the original context are slowed down, those that turn often stay, and what is between
-- goes over smoothly.
function SCALED.llama3(s, plain)
  local low, high = s.rope_low_freq_factor, s.rope_high_freq_factor
  for j, f in ipairs(plain) do
    local turns = s.rope_original_context * f / (2 * math.pi)
    if turns < low then
      plain[j] = f / s.rope_factor
    elseif turns <= high then
      local smooth = (turns - low) / (high - low)
      plain[j] = (1 - smooth) * f / s.rope_factor + smooth * f
    end
  end
  return 1.0
end

-- The same by a ramp over the pairs, between those that turn beta_fast and beta_slow times; and sharper attention.
function SCALED.yarn(s, plain)
  local function pair_that_turns(times)
    return s.head_dim * math.log(s.rope_original_context / (times * 2 * math.pi)) / (2 * math.log(s.rope_theta))
  end
  local low = math.max(math.floor(pair_that_turns(s.rope_beta_fast)), 0)
  local high = math.min(math.ceil(pair_that_turns(s.rope_beta_slow)), s.head_dim - 1)
  local width = high == low and 0.001 or high - low
  for j, f in ipairs(plain) do
    local slowed = math.min(math.max((j - 1 - low) / width, 0), 1)
    plain[j] = f / s.rope_factor * slowed + f * (1 - slowed)
  end
  if s.rope_attention_factor > 0 then return s.rope_attention_factor end
  return s.rope_factor > 1 and 0.1 * math.log(s.rope_factor) + 1 or 1.0
end

--- The angle from one position to the next of each pair of dimensions; scale: factor of cosine and sine.
function rope.frequencies(s)
  local list = {}
  for j = 1, s.head_dim // 2 do list[j] = 1.0 / s.rope_theta ^ (2.0 * (j - 1) / s.head_dim) end
  local scaled = SCALED[s.rope_type or "default"]
  list.scale = scaled and scaled(s, list) or 1.0
  return list
end

-- What a type needs of config.json: { name there, key of shape, required }.
local STATED = {
  default = {},
  linear = { { "factor", "rope_factor", true } },
  llama3 = { { "factor", "rope_factor", true }, { "low_freq_factor", "rope_low_freq_factor", true },
             { "high_freq_factor", "rope_high_freq_factor", true },
             { "original_max_position_embeddings", "rope_original_context", true } },
  yarn = { { "factor", "rope_factor", true }, { "original_max_position_embeddings", "rope_original_context", true },
           { "beta_fast", "rope_beta_fast" }, { "beta_slow", "rope_beta_slow" } },
}

--- What config.json must say of RoPE's scaling, of a family with or without its keys: { path, value, or_path =,
--- required = }.
function rope.config(s)
  local kind = s.rope_type or "default"
  local list = {
    { "rope_parameters.rope_type", kind, or_path = "rope_scaling.rope_type|rope_scaling.type",
      required = kind ~= "default" },
  }
  for _, fact in ipairs(STATED[kind]) do
    list[#list + 1] = { "rope_parameters." .. fact[1], s[fact[2]], or_path = "rope_scaling." .. fact[1],
                        required = fact[3] }
  end
  if kind == "yarn" then
    list[#list + 1] = { "rope_parameters.attention_factor", rope.frequencies(s).scale,
                        or_path = "rope_scaling.attention_factor", required = s.rope_attention_factor > 0 }
    list[#list + 1] = { "rope_parameters.truncate", true, or_path = "rope_scaling.truncate" }
  end
  list[#list + 1] = { "partial_rotary_factor", 1.0, or_path = "rope_parameters.partial_rotary_factor" }
  return list
end

return rope
