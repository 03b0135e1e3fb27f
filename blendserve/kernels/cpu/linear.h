// The call of a linear layer, for every kind of them.
#pragma once

#include "common.h"

// One call, as the caller fills it in. Strides are in elements; the innermost one is 1. depth and outs are whole words.
struct LinearCall {
    const Number *x, *weights, *bias;  // [rows, depth], [outs, depth], [outs] or null
    Number* out;                       // [rows, outs]
    int64_t x_row, w_row, out_row;
    int64_t rows, outs, depth;
    int64_t threads;
};
