// Rotary embedding by halves: x = [x1 | x2] of a head's first `width` numbers, with the same cos and sin for both.
//
//     turned       x cos + [-x2 | x1] sin
//     turned back  (x cos - [-x2 | x1] sin) / (cos^2 + sin^2)      YaRN makes cos and sin longer than 1
//
// width is a multiple of 32. Behind it, numbers are not turned.
#pragma once

#include "common.h"

namespace {

struct Turn {
    const Number *cos, *sin;  // [positions, width]
    int64_t row;              // elements from a position to the next
    int64_t width;
};

// A head at a position, with the roundings of torch: every product and the sum.
inline void turn_as_torch(const Turn& t, int64_t at, const Number* x, Number* out, int64_t dim) {
    const Number *cos = t.cos + at * t.row, *sin = t.sin + at * t.row;
    int64_t half = t.width / 2;
    for (int64_t j = 0; j < half; j += LANES) {
        Floats x1 = load(x + j), x2 = load(x + half + j);
        Floats a1 = rounded(x1 * load(cos + j)), b1 = rounded(x2 * load(sin + j));
        Floats a2 = rounded(x2 * load(cos + half + j)), b2 = rounded(x1 * load(sin + half + j));
        store(out + j, a1 - b1);
        store(out + half + j, a2 + b2);
    }
    if (t.width < dim) std::memcpy(out + t.width, x + t.width, (dim - t.width) * sizeof(Number));
}

// The same in fp32 and in place; `sign` is -1 for back.
inline void turn_wide(const Turn& t, int64_t at, float* x, float sign) {
    const Number *cos = t.cos + at * t.row, *sin = t.sin + at * t.row;
    int64_t half = t.width / 2;
    for (int64_t j = 0; j < half; j += LANES) {
        Floats c = load(cos + j), s = load(sin + j) * all(sign);
        if (sign < 0) {
            Floats by = inverse(fma(c, c, s * s));
            c = c * by;
            s = s * by;
        }
        Floats x1 = load(x + j), x2 = load(x + half + j);
        store(x + j, fms(x1, c, x2 * s));
        store(x + half + j, fma(x2, c, x1 * s));
    }
}

}  // namespace
