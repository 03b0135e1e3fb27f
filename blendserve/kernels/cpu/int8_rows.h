// A linear layer of up to 8 rows over int8 weights, which decoding may use: half the bytes of bf16.
//
// Each GROUP inputs of an output share a scale. A vector of outputs is a row of blocks, one for each group:
//
//     float scales[LANES];  int8 weights[GROUP / PER_WORD][LANES][PER_WORD]
#pragma once

#include "few_rows.h"

namespace {

constexpr int GROUP = 64;
constexpr int64_t BLOCK_BYTES = LANES * (sizeof(float) + GROUP);

// From the first output of a matrix to output o, a multiple of LANES.
inline int64_t int8_bytes(int64_t o, int64_t depth) { return o / LANES * divide_up(depth, GROUP) * BLOCK_BYTES; }

// R rows times outputs [o, o + LANES); c.weights is of int8.
template <int R>
void few_int8(const LinearCall& c, int64_t o) {
    Floats sum[R];
    for (int r = 0; r < R; ++r) sum[r] = all(0.0f);
    const char* block = reinterpret_cast<const char*>(c.weights) + int8_bytes(o, c.depth);
    for (int64_t k = 0; k < c.depth; k += GROUP, block += BLOCK_BYTES) {
        const auto* scales = reinterpret_cast<const float*>(block);
        const auto* weights = reinterpret_cast<const int8_t*>(scales + LANES);
        int words = static_cast<int>(std::min<int64_t>(GROUP, c.depth - k) / PER_WORD);
        const char* next = block + 2 * BLOCK_BYTES;
        for (int i = 0; i < BLOCK_BYTES; i += LINE) _mm_prefetch(next + i, _MM_HINT_T1);
        Floats part[R];
        for (int r = 0; r < R; ++r) part[r] = all(0.0f);
#pragma GCC unroll 8
        for (int w = 0; w < words; ++w) {
            Words numbers = words_of_int8(weights + w * LANES * PER_WORD);
            for (int r = 0; r < R; ++r) part[r] = dot(part[r], word(c.x + r * c.x_row + k + PER_WORD * w), numbers);
        }
        for (int r = 0; r < R; ++r) sum[r] = fma(part[r], load(scales), sum[r]);
    }
    finish_few<R>(c, o, sum);
}

constexpr Few fews_int8[FEW + 1] = {nullptr,     few_int8<1>, few_int8<2>, few_int8<3>, few_int8<4>,
                                    few_int8<5>, few_int8<6>, few_int8<7>, few_int8<8>};

}  // namespace
