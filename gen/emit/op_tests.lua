-- op_tests.h: the //@test sections of the ops that the model uses. A section is a function body that sees `test`, the
-- op's parameters as P.name and the fields of the node's first task as t.name; tests/ops/helper_cases.h says what it
-- may call. It is compiled behind refvm.c, whose parameters and field structs it uses.
local abi = require("emit.abi")
local refvm = require("emit.refvm")
local writer = require("emit.writer")

local M = {}

local function emit_case(w, op, number, test)
  w:line("static void test_%s_%d(struct op_test *test)", op.name, number)
  w:open("{")
  refvm.section(w, op, { line = test.line, file = op.file, text = test.text }, "test->task", { "(void)test" })
  w:line("}")
  w:line("")
end

--- op_tests.h. ctx as in emit/files.lua.
function M.text(ctx)
  local w, rows = writer.new("op_tests.h"), {}
  w:line(writer.banner(ctx.sources))
  for _, op in ipairs(abi.used_ops(ctx.graph, ctx.registry)) do
    for i, test in ipairs(op.tests) do
      emit_case(w, op, i, test)
      rows[#rows + 1] = ("{NMK_OP_%s, %s, %s, %.9g, test_%s_%d},"):format(op.name:upper(), writer.string(op.name),
        writer.string(test.name), test.tolerance, op.name, i)
    end
  end
  w:open("static const struct op_case op_cases[] = {")
  for _, row in ipairs(rows) do
    w:line("%s", row)
  end
  w:line("{0, NULL, NULL, 0, NULL},")
  w:close("};")
  return w:text()
end

return M
