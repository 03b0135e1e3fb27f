// Rotary embedding by halves: x = [x1 | x2] of a head's first `width` numbers, with the same cos and sin for both.
//
//     turned       x cos + [-x2 | x1] sin
//     turned back  (x cos - [-x2 | x1] sin) / (cos^2 + sin^2)      YaRN makes cos and sin longer than 1
//
// width is a multiple of 32. Behind it, numbers are not turned.
#pragma once

#include "common.h"

namespace {

struct RopeAngles {
    const elem_t *cos, *sin;  // [positions, width]
    int64_t row;              // elements from a position to the next
    int64_t width;
};

// A head at a position, with the roundings of torch: every product and the sum.
inline void apply_rope(const RopeAngles& t, int64_t at, const elem_t* x, elem_t* out, int64_t dim) {
    const elem_t *cos = t.cos + at * t.row, *sin = t.sin + at * t.row;
    int64_t half = t.width / 2;
    for (int64_t j = 0; j < half; j += LANES) {
        F32 x1 = load(x + j), x2 = load(x + half + j);
        F32 a1 = round_to_elem(x1 * load(cos + j)), b1 = round_to_elem(x2 * load(sin + j));
        F32 a2 = round_to_elem(x2 * load(cos + half + j)), b2 = round_to_elem(x1 * load(sin + half + j));
        store(out + j, a1 - b1);
        store(out + half + j, a2 + b2);
    }
    if (t.width < dim) std::memcpy(out + t.width, x + t.width, (dim - t.width) * sizeof(elem_t));
}

// The same in fp32 and in place; `sign` is -1 for back.
inline void apply_rope_f32(const RopeAngles& t, int64_t at, float* x, float sign) {
    const elem_t *cos = t.cos + at * t.row, *sin = t.sin + at * t.row;
    int64_t half = t.width / 2;
    for (int64_t j = 0; j < half; j += LANES) {
        F32 c = load(cos + j), s = load(sin + j) * broadcast(sign);
        if (sign < 0) {
            F32 by = reciprocal(fma(c, c, s * s));
            c = c * by;
            s = s * by;
        }
        F32 x1 = load(x + j), x2 = load(x + half + j);
        store(x + j, fms(x1, c, x2 * s));
        store(x + half + j, fma(x2, c, x1 * s));
    }
}

}  // namespace
