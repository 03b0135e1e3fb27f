// A linear layer of up to 8 rows: each vector of outputs by itself, its weights transposed on their way from memory.
#pragma once

#include "linear.h"

namespace {

constexpr int FEW = 8;  // rows

// Word k of R rows times the same word of LANES outputs.
template <int R>
inline void add(const LinearCall& c, int k, Words weights, Floats (&sum)[R]) {
    for (int r = 0; r < R; ++r) sum[r] = dot(sum[r], word(c.x + r * c.x_row + PER_WORD * k), weights);
}

// Sums of outputs [o, o + LANES) with their bias, rounded.
template <int R>
void finish_few(const LinearCall& c, int64_t o, Floats (&sum)[R]) {
    Mask mask = first(c.outs - o);
    for (int r = 0; r < R; ++r) {
        if (c.bias) sum[r] = sum[r] + load(c.bias + o, mask);
        store(c.out + r * c.out_row + o, mask, sum[r]);
    }
}

// R rows times outputs [o, o + LANES).
template <int R>
void few(const LinearCall& c, int64_t o) {
    Floats sum[R];
    for (int r = 0; r < R; ++r) sum[r] = all(0.0f);
    const Number* w = c.weights + o * c.w_row;
    int there = static_cast<int>(std::min<int64_t>(LANES, c.outs - o)), words = static_cast<int>(c.depth / PER_WORD);
    const char* next = reinterpret_cast<const char*>(w + 2 * LANES * c.w_row);
    for (int k = 0; k < words; k += LANES) {
        for (int i = 0; i < LANES * LANES * 4 / LINE; ++i, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        Words block[LANES];
        turned(w + PER_WORD * k, c.w_row, there, std::min(LANES, words - k), block);
        if (k + LANES > words) {  // what lies behind a row of x is not read
            for (int i = 0; k + i < words; ++i) add<R>(c, k + i, block[i], sum);
            continue;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) add<R>(c, k + i, block[i], sum);
    }
    finish_few<R>(c, o, sum);
}

using Few = void (*)(const LinearCall&, int64_t);
constexpr Few fews[FEW + 1] = {nullptr, few<1>, few<2>, few<3>, few<4>, few<5>, few<6>, few<7>, few<8>};

}  // namespace
