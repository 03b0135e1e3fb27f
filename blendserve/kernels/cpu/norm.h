// RMS norm of rows, with the sum before it: what a family's own module does, to the bit (but bf16 below 2^-126 is 0).
//
//     sum = x + add                                  rounded
//     out = sum / sqrt(mean(sum^2) + eps) * weight   rounded once, or before the weight, too
//
// The mean is added up in torch's order (ATen's SumKernel.cpp: 4 times 8 lanes side by side, in cascades), which is what makes
// bits equal. kernels/reference.py is the plain form.

#pragma once

#include "common.h"

#include <cmath>

// One call, as the caller fills it in. Strides are in elements; the innermost one is 1.
struct NormCall {
    const Number *x, *add, *weight;  // [rows, dim], the same or null, [dim]
    Number *sum, *out;               // [rows, dim], contiguous; sum may be null
    int64_t x_row, add_row, rows, dim;
    int64_t rounds_first;  // not 0: the normed row is rounded before it is weighed
    float eps, offset;     // offset: added to every weight
    int64_t threads;
};

namespace {

constexpr int TORCH_LANES = 8, TORCH_VECTORS = 4;  // lanes of torch's vectors, and how many it adds up side by side
constexpr int STEP = TORCH_LANES * TORCH_VECTORS;  // numbers
constexpr int PARTS = STEP / LANES;
constexpr int LEVELS = 4;  // of its cascade

// Squares of a row's numbers, summed as torch does.
class Squares {
   public:
    explicit Squares(int64_t dim) : steps_(dim / STEP) {
        int64_t log = 0;
        while ((int64_t{1} << log) < steps_) ++log;
        power_ = std::max<int64_t>(4, log / LEVELS);
        for (auto& level : sums_)
            for (Floats& sum : level) sum = all(0.0f);
    }
    // The next STEP numbers.
    void add(const Floats (&x)[PARTS]) {
        for (int v = 0; v < PARTS; ++v) sums_[0][v] = sums_[0][v] + x[v] * x[v];
        int64_t mask = (int64_t{1} << power_) - 1;
        if (++done_ & mask) return;
        for (int level = 1; level < LEVELS; ++level) {
            for (int v = 0; v < PARTS; ++v) {
                sums_[level][v] = sums_[level][v] + sums_[level - 1][v];
                sums_[level - 1][v] = all(0.0f);
            }
            if (done_ & (mask << (level * power_))) break;
        }
    }
    // With the numbers behind the last whole step.
    float total(const float* rest, int64_t n) {
        alignas(64) float parts[STEP];
        for (int v = 0; v < PARTS; ++v) {
            Floats sum = sums_[0][v];
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
    Floats sums_[LEVELS][PARTS];
    int64_t steps_, power_, done_ = 0;
};

// Numbers j .. j + LANES - 1 of a row and what is added to it; of fewer, the first.
inline Floats summed(const Number* x, const Number* add, int64_t j, Mask there) {
    Floats a = load(x + j, there);
    return add ? rounded(a + load(add + j, there)) : a;
}

void norm_row(const NormCall& c, int64_t row) {
    const Number *x = c.x + row * c.x_row, *add = c.add ? c.add + row * c.add_row : nullptr;
    Number *sum = c.sum ? c.sum + row * c.dim : nullptr, *out = c.out + row * c.dim;
    Squares squares(c.dim);
    int64_t whole = c.dim / STEP * STEP;
    Mask full = first(LANES);
    for (int64_t j = 0; j < whole; j += STEP) {
        Floats step[PARTS];
        for (int v = 0; v < PARTS; ++v) {
            step[v] = summed(x, add, j + v * LANES, full);
            if (sum) store(sum + j + v * LANES, step[v]);
        }
        squares.add(step);
    }
    alignas(64) float rest[STEP] = {};
    for (int64_t j = whole; j < c.dim; j += LANES) {
        Mask there = first(c.dim - j);
        Floats a = summed(x, add, j, there);
        store(rest + j - whole, a);
        if (sum) store(sum + j, there, a);
    }
    float mean = squares.total(rest, c.dim - whole) / static_cast<float>(c.dim);
    Floats by = all(1.0f / std::sqrt(mean + c.eps));
    for (int64_t j = 0; j < c.dim; j += LANES) {
        Mask there = first(c.dim - j);
        Floats normed = (sum ? load(sum + j, there) : summed(x, add, j, there)) * by;
        if (c.rounds_first) normed = rounded(normed);
        store(out + j, there, normed * (load(c.weight + j, there) + all(c.offset)));
    }
}

}  // namespace
