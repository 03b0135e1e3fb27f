// Operations on rows: RMS norm with the sum before it, silu(gate) * up, gelu(gate) * up, and RoPE, with the bits of torch's
// modules (but bf16 below 2^-126 is 0, and GELU in fp32 is rounded otherwise). kernels/reference.py is the plain form.
//
//     sum = x + add                                  rounded
//     out = sum / sqrt(mean(sum^2) + eps) * weight   rounded once, or before the weight, too
//
// The mean is summed in torch's order (ATen's SumKernel.cpp: 4 times 8 lanes side by side, in cascades), and the exponential
// is that of torch's vectors, Sleef's expf: so the bits are equal.
#pragma once

#include <cmath>

#include "common.h"

namespace {

constexpr int TORCH_LANES = 8, TORCH_VECTORS = 4;  // lanes of torch's vectors, and how many it adds up side by side
constexpr int STEP = TORCH_LANES * TORCH_VECTORS;  // numbers
constexpr int PARTS = STEP / LANES;
constexpr int LEVELS = 4;  // of its cascade

// Squares of a row's numbers, summed as torch does.
class Squares {
   public:
    explicit Squares(int64_t dim) {
        int64_t log = 0;
        while ((int64_t{1} << log) < dim / STEP) ++log;
        power_ = std::max<int64_t>(4, log / LEVELS);
        for (auto& level : sums_)
            for (F32& sum : level) sum = broadcast(0.0f);
    }
    // The next STEP numbers.
    void add(const F32 (&x)[PARTS]) {
        for (int v = 0; v < PARTS; ++v) sums_[0][v] = sums_[0][v] + x[v] * x[v];
        int64_t mask = (int64_t{1} << power_) - 1;
        if (++done_ & mask) return;
        for (int level = 1; level < LEVELS; ++level) {
            for (int v = 0; v < PARTS; ++v) {
                sums_[level][v] = sums_[level][v] + sums_[level - 1][v];
                sums_[level - 1][v] = broadcast(0.0f);
            }
            if (done_ & (mask << (level * power_))) break;
        }
    }
    // With the numbers behind the last whole step.
    float total(const float* rest, int64_t n) {
        alignas(64) float parts[STEP];
        for (int v = 0; v < PARTS; ++v) {
            F32 sum = sums_[0][v];
            for (int level = 1; level < LEVELS; ++level) sum = sum + sums_[level][v];
            store(parts + v * LANES, sum);
        }
        for (; n >= TORCH_LANES; n -= TORCH_LANES, rest += TORCH_LANES)
            for (int i = 0; i < TORCH_LANES; ++i) parts[i] += rest[i] * rest[i];
        for (int side = 1; side < TORCH_VECTORS; ++side)
            for (int i = 0; i < TORCH_LANES; ++i) parts[i] += parts[side * TORCH_LANES + i];
        float total = 0;
        for (int64_t i = 0; i < n; ++i) total += rest[i] * rest[i];
        for (int i = 0; i < TORCH_LANES; ++i) total += parts[i];
        return total;
    }

   private:
    F32 sums_[LEVELS][PARTS];
    int64_t power_, done_ = 0;
};

// Numbers j .. j + LANES - 1 of a row and what is added to it; of fewer, the first.
inline F32 summed(const elem_t* x, const elem_t* add, int64_t j, Mask mask) {
    F32 a = load(x + j, mask);
    return add ? round_to_elem(a + load(add + j, mask)) : a;
}

void norm_row(const NormArgs& c, int64_t row) {
    const elem_t *x = c.x + row * c.x_row, *add = c.add ? c.add + row * c.add_row : nullptr;
    elem_t *sum = c.sum ? c.sum + row * c.dim : nullptr, *out = c.out + row * c.dim;
    Squares squares(c.dim);
    int64_t whole = c.dim / STEP * STEP;
    Mask full = tail_mask(LANES);
    for (int64_t j = 0; j < whole; j += STEP) {
        F32 step[PARTS];
        for (int v = 0; v < PARTS; ++v) {
            step[v] = summed(x, add, j + v * LANES, full);
            if (sum) store(sum + j + v * LANES, step[v]);
        }
        squares.add(step);
    }
    alignas(64) float rest[STEP] = {};
    for (int64_t j = whole; j < c.dim; j += LANES) {
        Mask mask = tail_mask(c.dim - j);
        F32 a = summed(x, add, j, mask);
        store(rest + j - whole, a);
        if (sum) store(sum + j, mask, a);
    }
    float mean = squares.total(rest, c.dim - whole) / static_cast<float>(c.dim);
    F32 by = broadcast(1.0f / std::sqrt(mean + c.eps));
    for (int64_t j = 0; j < c.dim; j += LANES) {
        Mask mask = tail_mask(c.dim - j);
        F32 normed = (sum ? load(sum + j, mask) : summed(x, add, j, mask)) * by;
        if (c.rounds_first) normed = round_to_elem(normed);
        store(out + j, mask, normed * (load(c.weight + j, mask) + broadcast(c.offset)));
    }
}

// out = x * factor + add, n numbers each, rounded after each step; without a factor, or where add is null, less.
inline void scale_and_add(const elem_t* x, float factor, const elem_t* add, elem_t* out, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) {
        Mask mask = tail_mask(n - j);
        F32 y = factor ? round_to_elem(load(x + j, mask) * broadcast(factor)) : load(x + j, mask);
        store(out + j, mask, add ? load(add + j, mask) + y : y);
    }
}

// Of numbers from -104 to 105, as more is 0 or infinity.
inline F32 exp_like_torch(F32 x) {
    F32 n = round_even(x * broadcast(1.44269504088896341f));
    F32 s = fma(n, broadcast(-0.693145751953125f), x);
    s = fma(n, broadcast(-1.428606765330187045e-06f), s);
    F32 p = broadcast(0.000198527617612853646278381f);
    p = fma(p, s, broadcast(0.00139304355252534151077271f));
    p = fma(p, s, broadcast(0.00833336077630519866943359f));
    p = fma(p, s, broadcast(0.0416664853692054748535156f));
    p = fma(p, s, broadcast(0.166666671633720397949219f));
    p = fma(p, s, broadcast(0.5f));
    return times_exp2(broadcast(1.0f) + fma(s * s, p, s), n);
}

// NaN stays: of a NaN and a number, `larger` gives the second.
inline F32 silu_mul(F32 x, F32 up) {
    F32 minus = max(broadcast(-104.0f), broadcast(-0.0f) - max(broadcast(-105.0f), x));
    return round_to_elem(x / (broadcast(1.0f) + exp_like_torch(minus))) * up;
}

// GELU by tanh: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Torch's tanh is 1 from SATURATED on.
inline F32 gelu_mul(F32 x, F32 up) {
    constexpr float SATURATED = 8.664339742f;
    F32 one = broadcast(1.0f), half = broadcast(0.5f);
    F32 inner = broadcast(0.7978845608f) * (x + broadcast(0.044715f) * (x * x * x));
    F32 size = abs(inner);
    F32 tanh = one - broadcast(2.0f) / (one + exp_like_torch(size + size));
    tanh = select(less(as_u32(broadcast(SATURATED)), as_u32(size)), one, tanh);
    return round_to_elem(half * x * (one + copy_sign(tanh, inner))) * up;
}

// RoPE by halves: x = [x1 | x2] of a head's first `width` numbers, a multiple of 32, with the same cos and sin for both.
//
//     turned       x cos + [-x2 | x1] sin
//     turned back  (x cos - [-x2 | x1] sin) / (cos^2 + sin^2)      YaRN makes cos and sin longer than 1
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
