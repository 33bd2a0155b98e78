-- plan --svg: a layer's tasks as estimate.lua plays them, drawn: one line an SM, time to the right.
--
-- Of each SM three bars: what its producer streams, what its consumers do and wait for, what storers and helper do.  A
-- path holds all bars of one kind, so that a layer of a large model is tens of kilobytes.
local estimate = require("estimate")
local writer = require("emit.writer")

local M = {}

local LEFT, TOP, WIDTH = 52, 64, 1100      -- of the drawing; text is around it
-- The bars of an SM: role, place and height.
local BARS = { load = { 0, 1.4 }, compute = { 1.4, 2.8 }, store = { 4.2, 1.4 }, help = { 4.2, 1.4 } }
local PITCH = 6.2                          -- from SM to SM
local LEGEND_COLUMNS = 5
local COLOURS = { "#4477aa", "#ee7733", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#994455", "#009988", "#bb5566",
  "#6677cc", "#997700", "#33aa99", "#cc6699", "#77aa33" }

local function escape(text)
  return (text:gsub("[&<>]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;" }))
end

-- A coordinate: one digit is a tenth of a pixel.
local function number(x)
  return (("%.1f"):format(x):gsub("%.0$", ""))
end

local function kind_of(node)
  return node.layer >= 0 and node.name:match("%.(.*)$") or node.name
end

--- What the roles do: { node, sm, role, from, to, waits }, in the order in which tasks begin; seconds.
local function play(g, batch, context)
  local list = {}
  local step = estimate.step(g, batch, context, {
    record = function(node, sm, role, from, to, waits)
      list[#list + 1] = { node = node, sm = sm, role = role, from = from, to = to, waits = waits }
    end,
  })
  return list, step
end

-- From when the first SM works at the layer to when the last one is done; its weights come before.
local function window(list, layer)
  local from, to = math.huge, 0
  for _, one in ipairs(list) do
    if one.node.layer == layer and one.role ~= "load" and not one.waits then
      from, to = math.min(from, one.from), math.max(to, one.to)
    end
  end
  return from, to
end

-- The bars in the window, by kind of node in the order of the layer; other layers' are one kind, waiting another.
local function collect(list, layer, from, to)
  local order, by_kind = {}, {}
  local function kind(name)
    if not by_kind[name] then by_kind[name] = { name = name, bars = {}, tasks = 0, seconds = 0, last = {} } end
    return by_kind[name]
  end
  local others, waits = kind("\0others"), kind("\0waits")
  for _, one in ipairs(list) do
    local a, b = math.max(one.from, from), math.min(one.to, to)
    local own = one.node.layer == layer
    local into = one.waits and waits or others
    if own and not one.waits then
      local name = kind_of(one.node)
      if not by_kind[name] then order[#order + 1] = kind(name) end
      into = by_kind[name]
      if one.role ~= "load" then into.tasks = into.tasks + 1 end
    end
    if b > a and (one.role == "compute" or not one.waits) then
      if one.role == "compute" then into.seconds = into.seconds + b - a end
      local place = one.role .. one.sm
      local bar = into.last[place]
      if bar and a <= bar.to then                       -- goes on where the last one ended
        bar.to = math.max(bar.to, b)
      else
        bar = { sm = one.sm, role = one.role, from = a, to = b }
        into.bars[#into.bars + 1], into.last[place] = bar, bar
      end
    end
  end
  return order, others, waits
end

local function path(bars, from, scale)
  local parts = {}
  for _, bar in ipairs(bars) do
    local place = BARS[bar.role]
    local x = number(LEFT + (bar.from - from) * scale)
    local width = number(math.max((bar.to - bar.from) * scale, 0.3))
    parts[#parts + 1] = ("M%s %sh%sv%sh-%sz"):format(x, number(TOP + bar.sm * PITCH + place[1]), width,
      number(place[2]), width)
  end
  return table.concat(parts)
end

-- Distance of the marks on the axis of time: 1, 2 or 5 times a power of ten, about ten of them.
local function mark_of(seconds)
  local mark = 10.0 ^ math.floor(math.log(seconds / 10, 10))
  for _, times in ipairs({ 1, 2, 5 }) do
    if seconds / (mark * times) <= 12 then return mark * times end
  end
  return mark * 10
end

local STYLE = [[
text{font:11px sans-serif;fill:#222}.t{font-size:15px;font-weight:600}.b{fill:#fff}.g{stroke:#8886;stroke-width:.5}
.o{fill:#8885}.w{fill:#d22;fill-opacity:.28}
@media(prefers-color-scheme:dark){text{fill:#ddd}.b{fill:#181818}.w{fill:#f66;fill-opacity:.35}}]]

local function axis(w, sms, from, to, scale)
  local mark, bottom = mark_of(to - from), TOP + sms * PITCH
  for i = 0, math.floor((to - from) / mark) do
    local x = number(LEFT + i * mark * scale)
    w:line('<path class="g" d="M%s %sV%s"/>', x, number(TOP - 4), number(bottom + 4))
    w:line('<text x="%s" y="%s" text-anchor="middle">%s</text>', x, number(bottom + 17),
      (("%.2f"):format(i * mark * 1e6):gsub("%.?0+$", "")))
  end
  w:line('<text x="%s" y="%s">us of the layer</text>', number(LEFT), number(bottom + 33))
  for sm = 0, sms - 1, math.max(1, sms // 11) do
    w:line('<text x="%s" y="%s" text-anchor="end">SM %d</text>', number(LEFT - 5), number(TOP + sm * PITCH + 6), sm)
  end
end

local function draw_kind(w, class, colour, what, kind, from, scale)
  if #kind.bars == 0 then return end
  w:line('<path class="%s"%s d="%s"><title>%s</title></path>', class, colour and (' fill="%s"'):format(colour) or "",
    path(kind.bars, from, scale), escape(what))
end

-- Rows of what the colours mean, below the axis.
local function legend(w, entries, y)
  for i, entry in ipairs(entries) do
    local x = LEFT + (i - 1) % LEGEND_COLUMNS * (WIDTH / LEGEND_COLUMNS)
    local at = y + (i - 1) // LEGEND_COLUMNS * 17
    w:line('<rect x="%s" y="%s" width="10" height="10"%s/>', number(x), number(at - 9), entry.paint)
    w:line('<text x="%s" y="%s">%s</text>', number(x + 15), number(at), escape(entry.text))
  end
end

--- The drawing. opts: layer, batch (live columns), context (tokens of each). list, step: what `play` gives, for tests.
--- Requires: a graph after sync, of a target with timing.
function M.svg(g, opts, list, step)
  if not list then list, step = play(g, opts.batch, opts.context) end
  local sms, layer = g.sms, opts.layer
  local from, to = window(list, layer)
  local scale = WIDTH / (to - from)
  local order, others, waits = collect(list, layer, from, to)
  local bottom = TOP + sms * PITCH
  local rows = (#order + 1) // LEGEND_COLUMNS + 1
  local width, height = LEFT + WIDTH + 20, math.ceil(bottom + 46 + rows * 17)
  local head = ("%s, layer %d of %d: %.1f us of a step of %.3f ms"):format(g.model.name, layer, g.model.shape.layers,
    (to - from) * 1e6, step * 1e3)
  local w = writer.new("layer.svg")
  w:line('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">', width,
    height, width, height)
  w:line("<title>%s</title>", escape(head))
  w:line("<style>%s</style>", STYLE)
  w:line('<rect class="b" width="%d" height="%d"/>', width, height)
  w:line('<text class="t" x="%d" y="22">%s</text>', LEFT, escape(head))
  w:line('<text x="%d" y="40">%s</text>', LEFT, escape((
    "%d row%s of %d tokens, as nmkgen estimates it for %s. Of each SM: its loads; consumers at work or waiting; "
    .. "storers and helper."):format(opts.batch, opts.batch == 1 and "" or "s", opts.context, g.model.target.name)))
  axis(w, sms, from, to, scale)
  draw_kind(w, "o", nil, "other layers", others, from, scale)
  draw_kind(w, "w", nil, "waiting for other SMs", waits, from, scale)
  local entries = {}
  for i, kind in ipairs(order) do
    local colour = COLOURS[(i - 1) % #COLOURS + 1]
    local text = ("%s, %.2f us"):format(kind.name, kind.seconds / sms * 1e6)
    draw_kind(w, "k", colour, ("%s: %d tasks, consumers of the mean SM %.2f us"):format(kind.name, kind.tasks,
      kind.seconds / sms * 1e6), kind, from, scale)
    entries[#entries + 1] = { paint = (' fill="%s"'):format(colour), text = text }
  end
  entries[#entries + 1] = { paint = ' class="w"', text = ("waiting, %.2f us"):format(waits.seconds / sms * 1e6) }
  entries[#entries + 1] = { paint = ' class="o"', text = "other layers" }
  legend(w, entries, bottom + 52)
  w:line("</svg>")
  return w:text()
end

return M
