/* The weights of a model of nine tensors, for what opens its checkpoints. */
#ifndef NMK_TESTS_WEIGHTS_TABLES_H
#define NMK_TESTS_WEIGHTS_TABLES_H

#include "weights.h"

static const nmk_array arrays[] = {
    {.name = "embed",
     .layout = NMK_LAYOUT_ROWS,
     .layers = 1,
     .rows = 16,
     .cols = 8,
     .kib = 0,
     .layer_kib = 8,
     .expert_kib = 8},
    {.name = "norm",
     .layout = NMK_LAYOUT_VECTOR,
     .layers = 3,
     .rows = 1,
     .cols = 8,
     .kib = 8,
     .layer_kib = 1,
     .expert_kib = 1},
    {.name = "up",
     .layout = NMK_LAYOUT_GATE_UP,
     .layer0 = 1,
     .layers = 1,
     .experts = 2,
     .rows = 16,
     .cols = 8,
     .kib = 11,
     .layer_kib = 16,
     .expert_kib = 8},
};
static const nmk_tensor tensors[] = {
    {.name = "embed.weight", .dims = 2, .layers = 1, .rows = 16, .cols = 8, .array = 0},
    {.name = "head.weight", .dims = 2, .layers = 1, .rows = 16, .cols = 8, .array = 0, .twin = 1},
    {.name = "norm.weight", .dims = 1, .layer0 = 2, .layers = 1, .rows = 1, .cols = 8, .array = 1},
    {.name = "layers.%d.norm.weight", .dims = 1, .layers = 2, .rows = 1, .cols = 8, .array = 1},
    {.name = "layers.%d.experts.%d.gate.weight",
     .dims = 2,
     .layer0 = 1,
     .layers = 1,
     .experts = 2,
     .rows = 8,
     .cols = 8,
     .array = 2,
     .row0 = 0},
    {.name = "layers.%d.experts.%d.up.weight",
     .dims = 2,
     .layer0 = 1,
     .layers = 1,
     .experts = 2,
     .rows = 8,
     .cols = 8,
     .array = 2,
     .row0 = 8},
};
static const nmk_weight_tables tables = {arrays, 3, tensors, 6};

#endif
