-- encoder.c: its tables, and that the compiled encoder gives the very words of encode.lua.
package.path = "tests/gen/?.lua;" .. package.path
local t = require("helper_emit")
local abi = require("emit.abi")
local encode = require("encode")
local encoder = require("emit.encoder")

local ctx = t.context({})
local text = encoder.text(ctx)

local function between(from, to)
  local a = assert(text:find(from, 1, true), from)
  local _, b = assert(text:find(to, a, true))
  return text:sub(a, b) .. "\n"
end

do
  local words = ctx.words[1]
  t.case("words of a task", table.concat(words, " ", 33, 64),
    "1 2 0 4 -1 0 1 0 2 2 4 4" .. (" 0"):rep(20))
end

local tables = between("static const int32_t columns", "\n};\n\n#define"):gsub("\n#define\n", "")
t.case("runs keep every SM's order", tables, [[
static const int32_t columns[] = {
    0, 2, 0, 1, 0, 1
};

static const struct set sets[] = {
    {NMK_WORD_ADD_TILE, 0, 0},
    {NMK_WORD_ADD_TILES, 2, -1},
    {NMK_WORD_ADD_Y, 4, -1},
    {NMK_WORD_FINISH_Y, 4, -1},
    {NMK_WORD_ADD_TILE, 0, 0},
    {NMK_WORD_ADD_TILES, 2, -1},
    {NMK_WORD_ADD_A, 4, -1},
    {NMK_WORD_ADD_Y, 4, -1},
    {NMK_WORD_FINISH_Y, 4, -1},
};

static const struct run runs[] = {
    {{NMK_OP_ADD, 0, -1, 0, -1, 0, 0, 0}, 2, 2, 0, 3}, /* layer0.add */
    {{NMK_OP_FINISH, 1, 0, 4, -1, 0, -1, 0}, 1, 4, 3, 1}, /* finish */
    {{NMK_OP_ADD, 2, 0, 4, -1, 0, 1, 0}, 2, 2, 4, 4}, /* layer1.add */
    {{NMK_OP_FINISH, 1, 0, 4, -1, 0, -1, 0}, 1, 5, 8, 1}, /* finish */
};
]])

t.case("weights, buffers, config, names", between("const uint64_t nmk_hash", "nmk_counter_names[] = {"), [[
const uint64_t nmk_hash = 0x0123456789abcdefull;
const uint64_t nmk_weights_hash = 0xe85315a8181f9378ull;
const char *const nmk_model_name = "small";
const char *const nmk_target_arch = "sm_90a";
const int nmk_in_flight[NMK_COLUMNS] = {1, 1, 1, 1, 2, 2, 2, 2};
const int64_t nmk_step_weight_bytes[NMK_COLUMNS] = {
    0, 0, 0, 0, 0, 0, 0, 0
};
const float nmk_rope_frequencies[NMK_HEAD_DIM / 2] = {
    1.0f, 0.100000001f, 0.00100000005f
};
const float nmk_rope_scale = 1.25f;

const nmk_array nmk_arrays[] = {
    {"w", 2, 0, 2, 3, 16, 256, 8, 24, 8},
};
const int nmk_array_count = 1;

const nmk_tensor nmk_tensors[] = {
    {"model.%d.%d", 2, 0, 2, 3, 8, 256, 0, 8, 0},
};
const int nmk_tensor_count = 1;

const nmk_buffer nmk_buffers[] = {
    {"x", 0, 64, 512},
    {"y", 4, 64, 512},
};
const int nmk_buffer_count = 2;

const nmk_config nmk_configs[] = {
    {"model_type", NULL, "\"small\"", 1},
    {"theta", "rope.theta", "50000", 1},
    {"kinds", NULL, "[\"a\",\"b\"]", 0},
};
const int nmk_config_count = 3;

const nmk_node nmk_nodes[] = {
    {"layer0.add", NMK_OP_ADD, 0},
    {"finish", NMK_OP_FINISH, -1},
    {"layer1.add", NMK_OP_ADD, 1},
};
const int nmk_node_count = 3;

const nmk_field nmk_fields[] = {
    {NMK_OP_ADD, NMK_WORD_ADD_TILE, "tile"},
    {NMK_OP_ADD, NMK_WORD_ADD_TILES, "tiles"},
    {NMK_OP_ADD, NMK_WORD_ADD_A, "a"},
    {NMK_OP_ADD, NMK_WORD_ADD_Y, "y"},
    {NMK_OP_FINISH, NMK_WORD_FINISH_Y, "y"},
};
const int nmk_field_count = 5;

const char *const nmk_opcode_names[NMK_OPCODES] = {
    "end", "add", "finish"
};

const char *const nmk_role_names[4] = {
    "load", "compute", "store", "help"
};

const char *const nmk_counter_names[] = {
]])

local MAIN = [[
#include "abi.h"
#include <stdio.h>
static int32_t lists[NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS], counts[NMK_SMS];
int main(void)
{
    if (nmk_encode(lists, counts)) return puts("refused"), 0;
    for (int sm = 0; sm < NMK_SMS; sm++) {
        printf("%d:", counts[sm]);
        for (int i = 0; i < counts[sm] * NMK_DESC_WORDS; i++)
            printf(" %d", lists[sm * NMK_MAX_TASKS * NMK_DESC_WORDS + i]);
        for (int i = counts[sm]; i < NMK_MAX_TASKS; i++)
            if (lists[(sm * NMK_MAX_TASKS + i) * NMK_DESC_WORDS]) puts("no end");
        puts("");
    }
}
]]

local folder = t.folder("emit_encoder")
t.write(folder .. "/abi.h", abi.header(ctx))
t.write(folder .. "/main.c", MAIN)

local function encoded(source)
  t.write(folder .. "/encoder.c", source)
  return (t.run(("cd %s && gcc -std=c11 -Wall -Wextra -Wshadow -Werror -o e encoder.c main.c && ./e"):format(folder)))
end

local want = {}
for sm = 0, 1 do
  want[#want + 1] = ("%d: %s\n"):format(#ctx.words[sm] // 32, table.concat(ctx.words[sm], " "))
end
t.case("the compiled encoder gives the same words", encoded(text), table.concat(want))
t.case("a changed table is refused", encoded((text:gsub("{NMK_WORD_ADD_TILES, 2,", "{NMK_WORD_ADD_TILES, 3,", 1))),
  "refused\n")
t.case("a lost run is refused", encoded((text:gsub("    {{NMK_OP_FINISH[^\n]*\n", "", 1))), "refused\n")

do
  local g = t.graph()
  g.lists[0][1].fields.tiles = 1.5
  local ok, why = pcall(encode.words, g, ctx.registry)
  t.case("a field that is no integer", tostring(ok) .. " " .. why:gsub("^.-: ", ""),
    "false layer0.add: field 'tiles' is 1.5, not a 32-bit integer")
  g = t.graph()
  g.lists[0][1].fields.tiles = nil
  ok, why = pcall(encode.words, g, ctx.registry)
  t.case("a field without a value", tostring(ok) .. " " .. why:gsub("^.-: ", ""),
    "false layer0.add: field 'tiles' is nil, not a 32-bit integer")
end

t.done()
