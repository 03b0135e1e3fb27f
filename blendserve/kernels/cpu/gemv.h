// A linear layer of up to 8 rows: one vector of outputs at a time, its weights transposed as they are loaded.
//
// Weights may be int8, for decoding: half the bytes of bf16. Each INT8_GROUP inputs of an output share a scale. A vector of outputs
// is a row of blocks, one for each group:
//
//     float scales[LANES];  int8 weights[INT8_GROUP / PER_WORD][LANES][PER_WORD]
#pragma once

#include "common.h"

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

constexpr int INT8_GROUP = 64;
constexpr int64_t BLOCK_BYTES = LANES * (sizeof(float) + INT8_GROUP);

// R rows times outputs [o, o + LANES) of weights of int8.
template <int R>
void gemv_int8(const LinearArgs& c, int64_t o) {
    F32 sum[R] = {};
    int64_t groups = divide_up(c.inputs, INT8_GROUP);
    const char* block = static_cast<const char*>(c.weights.data) + o / LANES * groups * BLOCK_BYTES;
    for (int64_t k = 0; k < c.inputs; k += INT8_GROUP, block += BLOCK_BYTES) {
        const auto* scales = reinterpret_cast<const float*>(block);
        const auto* weights = reinterpret_cast<const int8_t*>(scales + LANES);
        int words = static_cast<int>(std::min<int64_t>(INT8_GROUP, c.inputs - k) / PER_WORD);
        const char* next = block + 2 * BLOCK_BYTES;
        for (int i = 0; i < BLOCK_BYTES; i += LINE) _mm_prefetch(next + i, _MM_HINT_T1);
        F32 part[R] = {};
#pragma GCC unroll 8
        for (int w = 0; w < words; ++w)
            add<R>(c, k / PER_WORD + w, words_from_int8(weights + w * LANES * PER_WORD), part);
        for (int r = 0; r < R; ++r) sum[r] = fma(part[r], load(scales), sum[r]);
    }
    store_gemv<R>(c, o, sum);
}

constexpr Gemv gemvs_int8[MAX_GEMV_ROWS + 1] = {nullptr,     gemv_int8<1>, gemv_int8<2>, gemv_int8<3>, gemv_int8<4>,
                                    gemv_int8<5>, gemv_int8<6>, gemv_int8<7>, gemv_int8<8>};

// Runs `rows` rows over a vector of outputs of weights of this form.
inline Gemv gemv_of(int64_t form, int64_t rows) { return (form ? gemvs_int8 : gemvs)[rows]; }

// Bytes of the weights of LANES outputs.
inline int64_t strip_bytes(int64_t form, int64_t inputs) {
    return form ? divide_up(inputs, INT8_GROUP) * BLOCK_BYTES : LANES * inputs * static_cast<int64_t>(sizeof(elem_t));
}

}  // namespace
