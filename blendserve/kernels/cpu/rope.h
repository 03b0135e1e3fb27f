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
    const uint16_t *cos, *sin;  // bf16 [positions, width]
    int64_t row;                // elements from a position to the next
    int64_t width;
};

inline __m512 load(const uint16_t* from) { return wide(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline void store(uint16_t* to, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}
inline __m512 rounded(__m512 x) { return wide((__m256i)_mm512_cvtneps_pbh(x)); }

// A head of bf16 at a position, with the roundings of torch: every product and the sum.
inline void turn_as_torch(const Turn& t, int64_t at, const uint16_t* x, uint16_t* out, int64_t dim) {
    const uint16_t *cos = t.cos + at * t.row, *sin = t.sin + at * t.row;
    int64_t half = t.width / 2;
    for (int64_t j = 0; j < half; j += LANES) {
        __m512 x1 = load(x + j), x2 = load(x + half + j);
        __m512 a1 = rounded(_mm512_mul_ps(x1, load(cos + j))), b1 = rounded(_mm512_mul_ps(x2, load(sin + j)));
        __m512 a2 = rounded(_mm512_mul_ps(x2, load(cos + half + j))), b2 = rounded(_mm512_mul_ps(x1, load(sin + half + j)));
        store(out + j, _mm512_sub_ps(a1, b1));
        store(out + half + j, _mm512_add_ps(a2, b2));
    }
    if (t.width < dim) std::memcpy(out + t.width, x + t.width, (dim - t.width) * sizeof(uint16_t));
}

// 1 / x to 2^-27: dividing would take longer than all the rest.
inline __m512 inverse(__m512 x) {
    __m512 guess = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(2.0f)));
}

// The same in fp32 and in place; `sign` is -1 for back.
inline void turn_wide(const Turn& t, int64_t at, float* x, float sign) {
    const uint16_t *cos = t.cos + at * t.row, *sin = t.sin + at * t.row;
    int64_t half = t.width / 2;
    for (int64_t j = 0; j < half; j += LANES) {
        __m512 c = load(cos + j), s = _mm512_mul_ps(load(sin + j), _mm512_set1_ps(sign));
        if (sign < 0) {
            __m512 by = inverse(_mm512_fmadd_ps(c, c, _mm512_mul_ps(s, s)));
            c = _mm512_mul_ps(c, by);
            s = _mm512_mul_ps(s, by);
        }
        __m512 x1 = _mm512_loadu_ps(x + j), x2 = _mm512_loadu_ps(x + half + j);
        _mm512_storeu_ps(x + j, _mm512_fmsub_ps(x1, c, _mm512_mul_ps(x2, s)));
        _mm512_storeu_ps(x + half + j, _mm512_fmadd_ps(x2, c, _mm512_mul_ps(x1, s)));
    }
}

}  // namespace
