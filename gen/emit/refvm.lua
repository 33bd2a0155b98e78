-- refvm.c: the CPU machine with the references of the ops that the model uses. A reference is a function body that sees
-- vm, sm, the descriptor d, its fields as t.name and the op's parameters as P.name.
local abi = require("emit.abi")
local writer = require("emit.writer")

local M = {}

local function emit_params(w, op, params, prefix)
  if #op.params == 0 then
    return
  end
  w:open("static const struct {")
  for _, param in ipairs(op.params) do
    w:line("%s %s;", param.type == "f32" and "float" or "int32_t", param.name)
  end
  local values = {}
  for i, param in ipairs(op.params) do
    local value = params[param.name]
    values[i] = (".%s = %s"):format(param.name, param.type == "f32" and writer.float(value) or ("%d"):format(value))
  end
  w:close("} %s_params = {", prefix or op.name)
  w.depth = w.depth + 1
  w:wrap(values)
  w:close("};")
end

local function emit_task(w, op)
  if #op.fields == 0 then
    return
  end
  w:open("struct %s_task {", op.name)
  for _, field in ipairs(op.fields) do
    w:line("%s %s;", field.type == "f32" and "float" or "int32_t", field.name)
  end
  w:close("};")
end

-- The function that an op with //@device inline gives, with its own parameters.
local function emit_apply(w, op, prefix)
  w:line("static float %s_apply(float x)", prefix)
  w:open("{")
  if #op.params > 0 then
    w:line("(void)%s_params;", prefix)
  end
  w.depth = w.depth - 1
  w:line("#define P %s_params", prefix)
  w:source(op.inline.reference.line, op.inline.reference.file)
  w:raw(op.inline.reference.text)
  w:here()
  w:line("#undef P")
  w:line("}")
end

-- at_NAME(x): what is inserted at a point, one after the other.
local function emit_point(w, point, inserted)
  for i, one in ipairs(inserted) do
    local prefix = ("at_%s_%d"):format(point.name, i)
    emit_params(w, one.op, one.params, prefix)
    emit_apply(w, one.op, prefix)
  end
  w:line("static inline float at_%s(float x)", point.name)
  w:open("{")
  for i in ipairs(inserted) do
    w:line("x = at_%s_%d_apply(x);", point.name, i)
  end
  w:line("return x;")
  w:close()
end

-- `const struct OP_task t`, from the words d.
local function emit_fields(w, op)
  local values = {}
  for i, field in ipairs(op.fields) do
    local word = ("d[%d]"):format(field.word)
    if field.type == "f32" then
      word = ("((union { int32_t i; float f; }){%s}).f"):format(word)
    end
    values[i] = (".%s = %s"):format(field.name, word)
  end
  w:line("const struct %s_task t = {", op.name)
  w.depth = w.depth + 1
  w:wrap(values)
  w:close("};")
end

--- In an open function body: what every section of an op sees, t and P, then the section. words: an expression of the
--- task's words, nil where they are d already; unused: a list of C that keeps compilers quiet.
function M.section(w, op, section, words, unused)
  if #op.fields > 0 then
    if words then
      w:line("const int32_t *d = %s;", words)
    end
    emit_fields(w, op)
    unused[#unused + 1] = "(void)t"
  end
  if #op.params > 0 then
    unused[#unused + 1] = ("(void)%s_params"):format(op.name)
  end
  w:line("%s;", table.concat(unused, ", "))
  w.depth = w.depth - 1
  w:line("#define P %s_params", op.name)
  w:source(section.line, section.file)
  w:raw(section.text)
  w:here()
  w:line("#undef P")
end

local function emit_function(w, op)
  if op.inline then
    w:line("#define apply %s_apply", op.name)
  end
  w:line("static int op_%s(struct nmk_vm *vm, struct vm_sm *sm, const int32_t *d)", op.name)
  w:open("{")
  M.section(w, op, op.reference, nil, { "(void)vm, (void)sm, (void)d" })
  w:line("    return 0;")
  w:line("}")
  if op.inline then
    w:line("#undef apply")
  end
end

local function slots(ctx, used)
  return {
    shared = function(w)
      for _, path in ipairs({ "templates/random.h", "templates/sampling.h", "templates/fixed.h",
        "templates/claim.h" }) do
        w:source(1, path)
        w:raw(assert(ctx.read(path), path))
      end
    end,
    prefill = function(w)
      for _, path in ipairs(ctx.model.launch == "prefill" and { "templates/packed.h", "templates/prefill.c" } or {}) do
        w:source(1, path)
        w:raw(assert(ctx.read(path), path))
      end
    end,
    table = function(w)
      for _, op in ipairs(ctx.registry.list) do
        local only_help = op.roles.help and not (op.roles.load or op.roles.compute or op.roles.store)
        w:line("{%d, %d, %d}, /* %s */", op.arrivals or 0, only_help and 1 or 0, op.optional and 1 or 0, op.name)
      end
    end,
    ops = function(w)
      for i, op in ipairs(used) do
        if i > 1 then
          w:line("")
        end
        emit_params(w, op, ctx.graph.params[op.name])
        emit_task(w, op)
        for _, point in ipairs(op.points) do
          emit_point(w, point, ctx.graph.points[point.name] or {})
        end
        if op.inline then
          emit_apply(w, op, op.name)
        end
        emit_function(w, op)
      end
    end,
    dispatch = function(w)
      for _, op in ipairs(used) do
        w:line("case NMK_OP_%s: return op_%s(vm, sm, d);", op.name:upper(), op.name)
      end
    end,
  }
end

--- refvm.c. ctx as in emit/files.lua.
function M.text(ctx)
  local w = writer.new("refvm.c")
  w:line(writer.banner(ctx.sources))
  local path = "templates/refvm.c"
  w:template(assert(ctx.read(path), path), path, slots(ctx, abi.used_ops(ctx.graph, ctx.registry)))
  return w:text()
end

return M
