-- The proof of a launch that is a step and behind it a chunk of prompts (templates/mixed.cu): each SM walks the step's
-- list to its end and then the chunk's, whatever other SMs are at.
--
-- Each of the two is proved alone, and nothing waits across: counters, tickets, lists, arenas and control blocks are
-- each launch's own, so a step ends as if it were alone, every SM comes to its chunk's list, and that ends too.  What
-- both launches reach is what their ops name with `launch`: data that outlives a launch, of which they share the pages
-- of keys and values.  What is proved here is that by the end of every SM's list in the step all accesses of all SMs to
-- what is shared are over.  So whatever the chunk does with it comes after them, as if it were a launch of its own.
local hb = require("hb")
local M = {}

-- The regions of a graph's nodes that outlive a launch: [name] = list of { node =, region = }, and the names in order.
local function lasting(g)
  local found, names = {}, {}
  for _, node in ipairs(g.nodes) do
    for _, way in ipairs({ "reads", "writes" }) do
      for _, region in ipairs(node.spec[way]) do
        if region.launch then
          if not found[region.name] then
            found[region.name] = {}
            names[#names + 1] = region.name
          end
          table.insert(found[region.name], { node = node, region = region, writes = way == "writes" })
        end
      end
    end
  end
  return found, names
end

-- What all other SMs know of each thread when all of their roles are at their end, and who knows least: [thread].
local function known_at_end(clocks, sms)
  local roles, least, who = #hb.ROLES, {}, {}
  for sm = 0, sms - 1 do
    local base = clocks.zero
    for role = 1, roles do base = clocks:join(base, clocks.base[sm * roles + role]) end
    for thread = 1, sms * roles do
      local own = (thread - 1) // roles == sm   -- of itself it knows that all is over
      if not own and (not least[thread] or base[thread] < least[thread]) then
        least[thread], who[thread] = base[thread], sm
      end
    end
  end
  return least, who
end

--- Requires: the finished proof of a step (check.prove), without mistakes, and the graph of its chunks. Returns the
--- list of messages, empty where all is proved, and the statistics.
function M.prove(proof, chunks)
  local of_step, names = lasting(proof.g)
  local of_chunk = lasting(chunks)
  local texts, stats = {}, { shared = {}, accesses = 0 }
  local least, who = known_at_end(proof.clocks, proof.g.sms)
  for _, name in ipairs(names) do
    if of_chunk[name] then stats.shared[#stats.shared + 1] = name end
    for _, access in ipairs(of_chunk[name] and of_step[name] or {}) do
      local plan, role = proof.plans[access.node], hb.role_of(access.node.spec, access.region.role)
      -- A load that reads hands that on, so that compute and then the signal come after it; see hb.lua.
      local also = role == hb.ROLE.compute and plan.d.also or role == hb.ROLE.load and plan.d.compute and plan.d.signal
      local group = hb.new_group(access.node, role, access.writes, also or nil, plan.sm, plan.time)
      stats.accesses = stats.accesses + #plan.sm
      local i = hb.unknown(group, least)[1]
      if i then
        texts[#texts + 1] = ("a mixed launch: SM %d begins with the chunk, which has %s too, without being ordered " ..
          "after %s, which %s it"):format(who[plan.sm[i] * #hb.ROLES + role], name, proof:name(plan.sm[i],
          plan.time[i]), access.writes and "writes" or "reads")
      end
    end
  end
  return texts, stats
end

return M
