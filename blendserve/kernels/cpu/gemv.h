// A linear layer of up to 8 rows: one vector of outputs at a time, its weights transposed as they are loaded.
#pragma once

#include "strips.h"

namespace {

constexpr int MAX_GEMV_ROWS = 8;  // rows

// Word k of R rows times the same word of LANES outputs.
template <int R>
inline void add(const LinearArgs& c, int64_t k, U32 weights, F32 (&sum)[R]) {
    for (int r = 0; r < R; ++r) sum[r] = dot(sum[r], broadcast_word(c.x + r * c.x_row + PER_WORD * k), weights);
}

// Sums of outputs [o, o + LANES) with their bias, rounded.
template <int R>
void store_gemv(const LinearArgs& c, int64_t o, F32 (&sum)[R]) {
    Mask mask = tail_mask(c.outputs - o);
    for (int r = 0; r < R; ++r) {
        if (c.bias) sum[r] = sum[r] + load(c.bias + o, mask);
        store(c.out + r * c.out_row + o, mask, sum[r]);
    }
}

// R rows times outputs [o, o + LANES).
template <int R>
void gemv(const LinearArgs& c, int64_t o) {
    F32 sum[R] = {};
    const elem_t* w = numbers_of(c) + o * c.w_row;
    int n_outputs = static_cast<int>(std::min<int64_t>(LANES, c.outputs - o)), words = static_cast<int>(c.inputs / PER_WORD);
    const char* next = reinterpret_cast<const char*>(w + 2 * LANES * c.w_row);
    for (int k = 0; k < words; k += LANES) {
        for (int i = 0; i < LANES * LANES * 4 / LINE; ++i, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        U32 block[LANES];
        load_transposed(w + PER_WORD * k, c.w_row, n_outputs, std::min(LANES, words - k), block);
        if (k + LANES > words) {  // what lies behind a row of x is not read
            for (int i = 0; k + i < words; ++i) add<R>(c, k + i, block[i], sum);
            continue;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) add<R>(c, k + i, block[i], sum);
    }
    store_gemv<R>(c, o, sum);
}

using Gemv = void (*)(const LinearArgs&, int64_t);
constexpr Gemv gemvs[MAX_GEMV_ROWS + 1] = {nullptr, gemv<1>, gemv<2>, gemv<3>, gemv<4>, gemv<5>, gemv<6>, gemv<7>, gemv<8>};

// Up to 8 rows times outputs [o, o + STRIP) of strips or of numbers.
inline void few_rows(const LinearArgs& c, int64_t o) {
    if (c.weights.form) return blendserve_gemv_strip(c, o);
    for (int64_t at = o; at < std::min(o + STRIP, c.outputs); at += LANES) gemvs[c.rows](c, at);
}

}  // namespace
