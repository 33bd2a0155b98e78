-- All emitted files as texts. Nothing is written here: the driver writes once every stage has succeeded.
local abi = require("emit.abi")
local encode = require("encode")
local encoder = require("emit.encoder")
local lists = require("emit.lists")
local host = require("host")
local megakernel = require("emit.megakernel")
local op_tests = require("emit.op_tests")
local refvm = require("emit.refvm")
local writer = require("emit.writer")

local M = {}

-- What emitters share, and the kernel's text and the header, of which the hash is.
local function begin(g)
  local ctx = {
    model = g.model, graph = g, registry = g.registry, sources = g.model.sources, words = g.words,
    words_hash = encode.hash(g.words, g.sms),
    read = function(path)
      return host.read(host.root .. "/" .. path)
    end,
  }
  local kernel = megakernel.text(ctx)
  local header = abi.header(ctx)
  local hash = writer.fnv(header, writer.fnv(kernel, ctx.words_hash))
  ctx.hash = ("0x%016xull"):format(hash)
  return ctx, megakernel.with_hash(kernel, ctx.hash), header
end

--- Requires: a graph that check has proved, g.words included. Returns { { name =, text = }, ... } for the folder of the
--- model. Emitters share ctx = { model, graph, registry, sources, words, words_hash, hash, read = text of a template by
--- its path below the root }.
function M.all(g)
  local ctx, kernel, header = begin(g)
  return {
    { name = "megakernel.cu", text = kernel },
    { name = "abi.h", text = header },
    { name = "encoder.c", text = encoder.text(ctx) },
    { name = "refvm.c", text = refvm.text(ctx) },
    { name = "op_tests.h", text = op_tests.text(ctx) },
  }
end

--- The same for a folder that a program of this model takes with --variant.
function M.variant(g)
  local ctx, kernel = begin(g)
  return {
    { name = "megakernel.cu", text = kernel },
    { name = "lists", text = lists.text(ctx, kernel) },
  }
end

return M
