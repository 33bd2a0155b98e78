-- `nmkgen tune`: the keys of a schedule, searched by measuring steps.
--
-- Coordinate descent from the schedule as it is: a move changes one key.  Moves are tried in the order of what
-- gen/estimate.lua expects of them.  A candidate is measured in rounds beside the schedule it would replace, one run
-- each, in turn, so that what drifts (the clock, the temperature, another GPU's neighbours) meets both alike; a round
-- gives one ratio of times, the mean over the batches measured.  The first rounds weed out; who is still there after
-- all of them, and whose median ratio beats 1 by more than the rounds differ, takes the place.  The search ends when no
-- move is left or the time is up; then the winner is compared with the beginning once more.
--
-- All that was measured is in a journal, and the search does the same things for the same journal: after an interrupt
-- it goes on where it was.  The winner goes into the tuning file beside the spec (spec.lua says what that does).
local diags = require("diag")
local encode = require("encode")
local estimate = require("estimate")
local host = require("host")
local placement = require("placement")
local rows = require("rows")
local spec = require("spec")

local M = {}

local ROUNDS = 5                -- of a candidate that stays in
local STEPS = 120               -- measured by one run
local SEEDS = 4                 -- tried of the placement rule random
local LEAST = 0.002             -- a gain below this is none, however steady
local HOPELESS = 1.02           -- a first round worse than this is the last one
local UNLIKELY = 1.08           -- an estimate worse than this is not measured
local WORSE = 1.005             -- measured worse than this once, a move is not tried again from elsewhere

-- ---------------------------------------------------------------- configurations
-- A configuration is { [key] = value } of the keys that may be tuned.

local function key_text(keys, config)
  local parts = {}
  for i, k in ipairs(keys) do parts[i] = k.key .. "=" .. rows.text(config[k.key]) end
  return table.concat(parts, " ")
end

local function same(a, b) return rows.text(a) == rows.text(b) end

local function with(config, key, value)
  local copy = {}
  for k, v in pairs(config) do copy[k] = v end
  copy[key] = value
  -- a seed means something to the rule random alone
  if copy["placement.rule"] ~= "random" and copy["placement.seed"] then copy["placement.seed"] = 0 end
  return copy
end

-- Orders in which two neighbours have changed places, every wave still behind what it reads.
local function orders(order, waves)
  local list, after = {}, {}
  for _, wave in ipairs(waves) do
    after[wave[1]] = {}
    for _, before in ipairs(wave.after) do after[wave[1]][before] = true end
  end
  for i = 1, #order - 1 do
    if not after[order[i + 1]][order[i]] then
      local swapped = table.move(order, 1, #order, 1, {})
      swapped[i], swapped[i + 1] = order[i + 1], order[i]
      list[#list + 1] = swapped
    end
  end
  return list
end

-- Keys that an estimate takes from the schedule alone: the lists of the graph are the same, or nearly.
local function in_lists(key) return key ~= "in_flight" and key ~= "ring_stages" and not key:find("^split%.") end

-- All configurations one change away, { config, what = text }, in a fixed order.
local function moves(search, config)
  local list = {}
  local function add(key, value, what)
    list[#list + 1] = {
      config = with(config, key, value), what = what or ("%s %s"):format(key, rows.text(value)), lists = in_lists(key),
    }
  end
  for _, k in ipairs(search.keys) do
    local row, value = k.row, config[k.key]
    if row[2] == "ints" then
      for _, b in ipairs(search.batches) do
        for _, by in ipairs({ -1, 1 }) do
          local n = value[b] + by
          if n >= row.min and n <= row.max then
            local changed = table.move(value, 1, #value, 1, {})
            changed[b] = n
            add(k.key, changed, ("%s %d for %d row%s"):format(k.key, n, b, b == 1 and "" or "s"))
          end
        end
      end
    elseif row[2] == "order" then
      for _, order in ipairs(orders(value, search.waves)) do add(k.key, order, "order " .. table.concat(order, " ")) end
    elseif row.choices then
      for _, other in ipairs(row.choices) do
        if other ~= value and other ~= "random" then add(k.key, other) end
      end
    elseif row[2] == "bool" then
      add(k.key, not value)
    else
      for _, try in ipairs(row.tries or {}) do
        if try ~= value then add(k.key, try) end
      end
    end
  end
  if config["placement.rule"] and config["placement.seed"] then
    local below = placement.random(search.seed)
    for _ = 1, SEEDS do
      local random = with(config, "placement.rule", "random")
      random["placement.seed"] = below(1000000)
      list[#list + 1] = {
        config = random, what = ("placement random, seed %d"):format(random["placement.seed"]), lists = true,
      }
    end
  end
  return list
end
M.moves = moves

-- ---------------------------------------------------------------- the journal

local function journal(search, line)
  local file, why = io.open(search.journal, "a")
  if not file then error({ journal = why }, 0) end
  file:write(line, "\n")
  file:close()
end

-- Times by batch under a key, which has no " = ".
local function record(search, key, ms)
  local texts = {}
  for i, t in ipairs(ms) do texts[i] = ("%.5f"):format(t) end
  journal(search, ("%s = %s"):format(key, table.concat(texts, " ")))
end

local function read_journal(search)
  search.known = {}
  local text = host.read(search.journal)
  if not text or not text:find(search.title, 1, true) then
    local ok, why = host.write({ { path = search.journal, text = search.title .. "\n" } })
    if not ok then error({ journal = why }, 0) end
    return 0
  end
  local n = 0
  for line in text:gmatch("[^\n]+") do
    local key, kind, value = line:match("^(.-) ([=!]) (.*)$")
    if kind == "=" then
      local ms = {}
      for t in value:gmatch("%S+") do ms[#ms + 1] = tonumber(t) end
      local config = key:match("^estimate (.*)$")
      if config then search.estimates[config] = ms else search.known[key], n = ms, n + 1 end
    elseif kind == "!" then
      search.known[key], n = value, n + 1
    end
  end
  return n
end

-- ---------------------------------------------------------------- building

-- What --set would say for a configuration: the keys that differ from the defaults.
local function sets_of(search, config)
  local sets = {}
  for _, k in ipairs(search.keys) do
    if not same(config[k.key], search.default[k.key]) then
      sets[#sets + 1] = { key = k.key, text = rows.text(config[k.key]) }
    end
  end
  return sets
end

-- Runs a stage with the diag it is given; the result, or nil and its first message.
local function attempt(run)
  local diag = diags.new()
  local ok, result = pcall(run, diag)
  if ok then return result end
  if not diags.is(result) then error(result, 0) end
  return nil, result:lines()[1]
end

local function options_of(search, config)
  return { target = search.target, sets = sets_of(search, config), untuned = true }
end

local function graph_of(search, config)
  local parts = {}
  for _, k in ipairs(search.keys) do
    if in_lists(k.key) then parts[#parts + 1] = rows.text(config[k.key]) end
  end
  local key = table.concat(parts, " ")
  if search.graph_key ~= key then
    local g, why = attempt(function(diag) return search.stages.build(search.path, options_of(search, config), diag) end)
    if not g then return nil, why end
    search.graph, search.graph_key = g, key
  end
  for _, k in ipairs(search.keys) do
    local name = k.key:match("^split%.(.*)$")
    if name then search.graph.model.schedule.split[name] = config[k.key] end
  end
  return search.graph
end

-- The hash of a graph's lists.
local function lists_hash(g) return encode.hash(encode.words(g, g.registry), g.sms) end

-- Estimated milliseconds by batch; nil and why where the configuration is refused.
local function estimated(search, config)
  local split = { config["split.chunks_min"], config["split.chunks_max"] }
  local pages = { config["split.pages_per_chunk"], config["split.pages_per_long_chunk"] }
  if split[2] and split[1] > split[2] or pages[2] and pages[1] > pages[2] then return nil, "contradicting numbers" end
  local key = key_text(search.keys, config)
  local known = search.estimates[key]
  if known == nil then
    local g, why = graph_of(search, config)
    if not g then return nil, why end
    known = {}
    for i, b in ipairs(search.batches) do
      local in_flight = config.in_flight or g.model.schedule.in_flight
      local ring = config.ring_stages or g.model.schedule.ring_stages
      if in_flight[b] > ring then return nil, "more in flight than the ring has stages" end
      known[i] = estimate.step(g, b, search.context, { in_flight = in_flight[b], ring_stages = ring }) * 1e3
    end
    search.estimates[key] = known
    record(search, "estimate " .. key, known)
  end
  return known
end

-- ---------------------------------------------------------------- measuring

-- Mean ratio of two lists of times.
local function ratio(a, b)
  local sum = 0
  for i = 1, #a do sum = sum + math.log(a[i] / b[i]) end
  return math.exp(sum / #a)
end
M.ratio = ratio

-- Median, and the distance from the least to the most; of five or more without these two: now and then something else
-- hits a run.
local function middle(list)
  local sorted = table.move(list, 1, #list, 1, {})
  table.sort(sorted)
  local n = #sorted
  local median = n % 2 == 1 and sorted[n // 2 + 1] or (sorted[n // 2] + sorted[n // 2 + 1]) / 2
  return median, n < 5 and sorted[n] - sorted[1] or sorted[n - 1] - sorted[2]
end
M.middle = middle

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Writes a configuration's variant, once, into the folder kept for it. `slot`: "a" or "b".
local function variant(search, config, slot)
  local key, folder = key_text(search.keys, config), search.folder .. "/" .. slot
  if search.slots[slot] ~= key then
    local g, why = attempt(function(diag)
      return search.stages.variant(search.path, options_of(search, config), folder, diag)
    end)
    if not g then return nil, why end
    search.slots[slot] = key
  end
  return folder
end

-- One run of the bench: milliseconds by batch, or nil and why.
local function bench(search, folder)
  local list = {}
  for i, b in ipairs(search.batches) do list[i] = ("%d"):format(b) end
  local command = ("%s --variant %s --batch %s --context %d --steps %d 2>&1"):format(search.bench, quote(folder),
    table.concat(list, ","), search.context, STEPS)
  local pipe = assert(io.popen(command))
  local text = pipe:read("a")
  local ok, how, code = pipe:close()
  if not ok and (how == "signal" or code == 130) then error({ interrupted = true }, 0) end
  local ms = {}
  for batch, t in text:gmatch("|%s*(%d+)%s*|[^|\n]*|[^|\n]*|%s*([%d.]+)") do
    for i, b in ipairs(search.batches) do
      if tonumber(batch) == b then ms[i] = tonumber(t) end
    end
  end
  search.device = search.device or text:match("\n?(%S+ on [^\n]-): kernel")
  if not ok or #ms ~= #search.batches then
    local last = text:match("([^\n]*)\n?$")
    return nil, last ~= "" and last or ("%s: exit status %s"):format(search.bench, tostring(code))
  end
  return ms
end

-- Milliseconds of round `round` of a configuration in the comparison `name`: from the journal, else measured. nil where
-- it cannot be measured, and why; false where there is no time.
local function measured(search, name, config, slot, round)
  local key = ("%s %s %d"):format(name, slot, round)
  local known = search.known[key]
  if known then
    if type(known) == "string" then return nil, known end
    return known
  end
  if search.deadline and host.now() + (search.run_seconds or 0) > search.deadline then return false end
  local start = host.now()
  local folder, why = variant(search, config, slot)
  local ms
  if folder then ms, why = bench(search, folder) end
  if ms then
    record(search, key, ms)
    search.run_seconds = host.now() - start
  else
    journal(search, ("%s ! %s"):format(key, (why or ""):gsub("\n", " ")))
  end
  search.known[key] = ms or why
  return ms, why
end

-- Measures `config` beside `against` in up to `rounds` rounds. { median, spread, ms, base, rounds }, where a first
-- bad round may be the last; nil and why where it cannot run; false where the time is up.
local function compare(search, name, config, against, rounds, all)
  local ratios, ms, base = {}, {}, {}
  for round = 1, rounds do
    -- the one that begins changes from round to round
    local got = {}
    for _, slot in ipairs(round % 2 == 1 and { "a", "b" } or { "b", "a" }) do
      local why
      got[slot], why = measured(search, name, slot == "a" and against or config, slot, round)
      if not got[slot] then return got[slot], why end
    end
    ms[round], base[round], ratios[round] = got.b, got.a, ratio(got.b, got.a)
    local median = middle(ratios)
    if not all and (median > HOPELESS or round >= 2 and median >= 1) then break end
  end
  local function medians(runs)
    local out = {}
    for i = 1, #search.batches do
      local list = {}
      for r, run in ipairs(runs) do list[r] = run[i] end
      out[i] = middle(list)
    end
    return out
  end
  local median, spread = middle(ratios)
  return { median = median, spread = spread, rounds = #ratios, ms = medians(ms), base = medians(base) }
end

local function wins(result)
  return result.rounds == ROUNDS and 1 - result.median > math.max(result.spread, LEAST)
end
M.wins = wins

-- ---------------------------------------------------------------- the search

local function say(fmt, ...)
  print(fmt:format(...))
  io.stdout:flush()
end

local function percent(r) return ("%+.2f %%"):format((r - 1) * 100) end

local function times(list)
  local texts = {}
  for i, t in ipairs(list) do texts[i] = ("%.3f"):format(t) end
  return table.concat(texts, ", ")
end

-- The ratio that a move is expected to bring; nil and why where its schedule is refused. What needs new lists is
-- estimated once, and taken to bring as much wherever the search is.
local function expected_of(search, move, base)
  local known = search.expected[move.what]
  if known then return known end
  local ms, why = estimated(search, move.config)
  if not ms then return nil, why end
  local expected = ratio(ms, base)
  if move.lists then search.expected[move.what] = expected end
  return expected
end

-- The moves from a configuration that may be worth a run, the most promising first.
local function ranked(search, config)
  local base = search.can_estimate and assert(estimated(search, config))
  local list = {}
  for i, move in ipairs(moves(search, config)) do
    move.key, move.index = key_text(search.keys, move.config), i
    if not search.seen[move.key] then
      if base then move.expected, move.refused = expected_of(search, move, base) end
      if not move.refused then list[#list + 1] = move end
    end
  end
  table.sort(list, function(a, b)
    if base and a.expected ~= b.expected then return a.expected < b.expected end
    return a.index < b.index
  end)
  return list
end

-- The next move of a pass: the most promising one not tried in it, nor worse before.
local function next_move(search, config, tried)
  for _, move in ipairs(ranked(search, config)) do
    if not tried[move.what] and not search.worse[move.what] and (not move.expected or move.expected < UNLIKELY) then
      return move
    end
  end
end

local function tell(search, count, move, result)
  say("%3d  %s: %s, spread %.2f %% in %d round%s (%s ms%s)%s", count, move.what, percent(result.median),
    result.spread * 100, result.rounds, result.rounds == 1 and "" or "s", times(result.ms),
    move.expected and (", expected " .. percent(move.expected)) or "", wins(result) and "  taken" or "")
  search.worse[move.what] = result.median > WORSE or nil
end

-- Coordinate descent by measurement: what it ends with, how many were measured, and whether the time was up. A pass
-- tries every move once; there is another one as long as something was taken.
local function descend(search, config)
  local count, taken = 0, true
  search.seen[key_text(search.keys, config)] = true
  while taken do
    local tried = {}
    taken = false
    local move = next_move(search, config, tried)
    while move do
      search.seen[move.key], tried[move.what] = true, true
      count = count + 1
      local result, why = compare(search, ("%d"):format(count), move.config, config, ROUNDS)
      if result == false then return config, count - 1, true end
      if result then
        tell(search, count, move, result)
        if wins(result) then config, taken = move.config, true end
      else
        say("%3d  %s: %s", count, move.what, why)
      end
      move = next_move(search, config, tried)
    end
  end
  return config, count, false
end

-- The same by estimates alone, the most promising move at a time.  What a move with new lists brought elsewhere only
-- says when to try it; here it has to bring it too, or two moves could undo each other for ever.
local function descend_estimated(search, config)
  local base = assert(estimated(search, config))
  search.seen[key_text(search.keys, config)] = true
  while true do
    local move = ranked(search, config)[1]
    if not move or move.expected > 1 - LEAST then return config, base end
    search.seen[move.key] = true
    local ms = estimated(search, move.config)
    local gain = ms and ratio(ms, base)
    if gain and gain <= 1 - LEAST then
      config, base = move.config, ms
      say("     %s: expected %s, %s ms", move.what, percent(gain), times(ms))
    end
  end
end

-- ---------------------------------------------------------------- the tuning file

-- The file's text with the part of `target` replaced; what stands before the first part, and all others, stay.
local function replace_part(text, target, part)
  local out, skipping, put = {}, false, false
  for line in (text or ""):gmatch("[^\n]*\n?") do
    local key = line:match("^([%w._-]+):")
    if key then skipping = key == target end
    if key == target and not put then
      out[#out + 1], put = part, true
    end
    if not skipping then out[#out + 1] = line end
  end
  local joined = table.concat(out)
  if put then return joined end
  if joined ~= "" and joined:sub(-1) ~= "\n" then joined = joined .. "\n" end
  return joined .. part
end
M.replace_part = replace_part

local function part_text(search, config, comments)
  local lines, nested = { search.target .. ":\n" }, {}
  for _, comment in ipairs(comments) do lines[#lines + 1] = "  # " .. comment .. "\n" end
  local sets = sets_of(search, config)
  for _, set in ipairs(sets) do
    local map, key = set.key:match("^(.-)%.(.*)$")
    if map and not nested[map] then
      nested[map] = true
      lines[#lines + 1] = ("  %s:\n"):format(map)
    end
    lines[#lines + 1] = map and ("    %s: %s\n"):format(key, set.text) or ("  %s: %s\n"):format(set.key, set.text)
  end
  if #sets == 0 then return "" end
  return table.concat(lines)
end

local FIRST = "# The schedules that `nmkgen tune` found, by target.  A key of the spec's own schedule wins over them.\n"

local function write(search, config, comments, diag)
  local path = spec.tuning_path(search.path)
  local text = replace_part(host.read(path) or FIRST, search.target, part_text(search, config, comments))
  local ok, why = host.write({ { path = path, text = text } })
  if not ok then
    diag:error(nil, "cannot write %s", why)
    diag:stop()
  end
  say("written: %s", path)
end

-- ---------------------------------------------------------------- the command

-- Keys that may be tuned, those of the spec left out, with their values as things stand and by default.
local function prepare(search, model)
  search.keys, search.default = {}, {}
  local config, from = {}, {}
  for _, o in ipairs(model.origins) do from[o.key] = o end
  for _, k in ipairs(spec.schedule_keys()) do
    local origin = from[k.key]
    local tuned = origin and origin.from:find(spec.TUNING, 1, true)
    if k.key ~= "columns" and origin and (origin.from == "default" or tuned) then
      search.keys[#search.keys + 1] = k
      config[k.key] = origin.value
      local default = k.row.default
      if k.row[2] == "order" then default = rows.names(search.waves) end
      search.default[k.key] = default
    elseif k.key ~= "columns" then
      say("not tuned: %s, which %s sets", k.key, origin.from)
    end
  end
  return config
end

local function batches_of(text, columns, diag)
  local list = {}
  for word in (text or ("1," .. columns)):gmatch("[^,]+") do
    local b = math.tointeger(tonumber(word))
    if not b or b < 1 or b > columns then
      diag:error(nil, "--batch %s: expected numbers from 1 to %d with commas between them", text, columns)
      diag:stop()
    end
    if b ~= list[#list] then list[#list + 1] = b end
  end
  return list
end

local function number_of(text, flag, least, diag)
  local n = tonumber(text)
  if not n or n < least then
    diag:error(nil, "%s %s: expected a number from %d", flag, text, least)
    diag:stop()
  end
  return n
end

local function command_text(search, opts)
  local parts = { "nmkgen tune " .. search.path }
  for _, flag in ipairs({ "bench", "budget", "batch", "context", "seed" }) do
    if opts[flag] then parts[#parts + 1] = ("--%s %s"):format(flag, opts[flag]) end
  end
  return table.concat(parts, " ")
end

-- By the model of the machine alone.
local function tune_estimated(search, config, opts, diag)
  if not search.can_estimate then
    diag:error(nil, "target %s records no timing (`timing:` in its file): without a GPU there is nothing to go by",
      search.target)
    diag:stop()
  end
  local before = assert(estimated(search, config))
  say("estimated as it is: %s ms at %s rows", times(before), table.concat(search.batches, ", "))
  local best, after = descend_estimated(search, config)
  say("estimated best: %s ms (%s); not measured", times(after), percent(ratio(after, before)))
  for _, set in ipairs(sets_of(search, best)) do say("  %s: %s", set.key, set.text) end
  if not opts["write-estimate"] then
    say("nothing written: --write-estimate writes it, a GPU measures it")
    return
  end
  write(search, best, {
    ("estimated, not measured, %s, by: %s"):format(os.date("!%Y-%m-%d"), command_text(search, opts)),
    ("estimated ms at %s rows: %s before, %s now"):format(table.concat(search.batches, ", "), times(before),
      times(after)),
  }, diag)
end

local function tune_measured(search, config, opts, diag)
  local best, count, up = descend(search, config)
  say("%d candidate%s measured%s", count, count == 1 and "" or "s", up and "; the time is up" or "; no move is left")
  if key_text(search.keys, best) == key_text(search.keys, config) then
    say("nothing beats the schedule as it is; nothing written")
    return
  end
  search.deadline = nil         -- the last word is worth the time
  local result, why = compare(search, "final", best, config, ROUNDS, true)
  if not result then
    diag:error(nil, "the winner cannot be measured once more: %s", tostring(why))
    diag:stop()
  end
  say("in the end: %s, spread %.2f %%, %s ms before, %s ms now", percent(result.median), result.spread * 100,
    times(result.base), times(result.ms))
  if not wins(result) then
    say("that is no gain beyond the spread; nothing written")
    return
  end
  local g = search.stages.build(search.path, options_of(search, best), diag)
  write(search, best, {
    ("measured %s, %s, lists %016x, by: %s"):format(os.date("!%Y-%m-%d"), search.device or "unknown device",
      lists_hash(g), command_text(search, opts)),
    ("ms a step at %s rows, %d tokens each: %s before, %s now (%s, spread %.2f %%, %d runs each in turn)"):format(
      table.concat(search.batches, ", "), search.context, times(result.base), times(result.ms), percent(result.median),
      result.spread * 100, result.rounds),
  }, diag)
end

--- Tunes the spec at `path`. opts: the flags as texts; stages: { load(path, opts, diag) = the model, build = the graph
--- up to sync, variant(path, opts, folder, diag) = writes one, returns the graph }. Mistakes in diag.
function M.run(path, opts, diag, stages)
  local model = stages.load(path, { target = opts.target }, diag)
  local search = {
    path = path, stages = stages, target = model.target.name, waves = model.family_module.waves,
    batches = batches_of(opts.batch, model.schedule.columns, diag),
    context = math.tointeger(number_of(opts.context or "8192", "--context", 1, diag)) or 8192,
    seed = math.tointeger(number_of(opts.seed or "1", "--seed", 0, diag)) or 1,
    folder = opts.output or ("build/%s/tune"):format(model.name),
    bench = opts.bench or ("build/%s/bench-decode"):format(model.name),
    can_estimate = estimate.possible(model.target), estimates = {}, expected = {}, seen = {}, worse = {}, slots = {},
  }
  search.context = math.min(search.context, model.shape.max_context // 2)
  local budget = number_of(opts.budget or "600", "--budget", 1, diag)
  local config = prepare(search, model)
  if #search.keys == 0 then
    diag:error(nil, "the spec sets every key of the schedule itself: nothing is left to tune")
    diag:stop()
  end
  search.journal = search.folder .. "/journal"
  local g = stages.build(path, { target = opts.target }, diag)
  search.title = ("nmkgen tune: %s on %s, rows %s, %d tokens, seed %d, lists %016x, from %s"):format(model.name,
    search.target, table.concat(search.batches, " "), search.context, search.seed,
    lists_hash(g), key_text(search.keys, config))
  local ok, why = pcall(function()
    local known = read_journal(search)
    if opts["estimate-only"] then return tune_estimated(search, config, opts, diag) end
    if known > 0 then say("%s: %d runs known, the search goes on behind them", search.journal, known) end
    local first, reason = measured(search, "begin", config, "a", 1)
    if not first then
      if opts.bench then
        diag:error(nil, "%s: %s", search.bench, reason)
        diag:stop()
      end
      say("no measurement: %s", reason)
      say("by estimates alone")
      return tune_estimated(search, config, opts, diag)
    end
    say("as it is: %s ms at %s rows%s", times(first), table.concat(search.batches, ", "),
      search.device and ", " .. search.device or "")
    search.deadline = host.now() + budget
    return tune_measured(search, config, opts, diag)
  end)
  if ok then return end
  if type(why) == "table" and why.interrupted then
    diag:error(nil, "interrupted; the same command goes on from %s", search.journal)
    diag:stop()
  elseif type(why) == "table" and why.journal then
    diag:error(nil, "cannot write the journal: %s", why.journal)
    diag:stop()
  end
  error(why, 0)
end

return M
