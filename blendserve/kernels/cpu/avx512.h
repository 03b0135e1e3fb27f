// Vectors of fp32 numbers with AVX-512: 16 lanes, 32 registers, masks in registers of their own.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace {

constexpr int LANES = 16;   // fp32 numbers, or words, in a vector
constexpr int VECTORS = 4;  // of a strip: with 6 rows of sums they fill the registers

using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Words all_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Floats floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words words(Floats x) { return _mm512_castps_si512(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }

// The first n lanes; the others are neither read nor written, and 0.
inline Mask first(int64_t n) { return static_cast<Mask>((1u << std::clamp<int64_t>(n, 0, LANES)) - 1); }
inline Floats load(const float* p, Mask there) { return _mm512_maskz_loadu_ps(there, p); }
inline Words load_words(const void* p, Mask there) { return _mm512_maskz_loadu_epi32(there, p); }
inline void store(float* p, Mask there, Floats x) { _mm512_mask_storeu_ps(p, there, x); }
inline void store_words(void* p, Mask there, Words x) { _mm512_mask_storeu_epi32(p, there, x); }

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }    // a b - c
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats size_of(Floats x) { return _mm512_abs_ps(x); }
inline Floats with_sign_of(Floats size, Floats x) {
    return floats(_mm512_or_si512(words(size), _mm512_and_si512(words(x), all_words(1u << 31))));
}
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float first_of(Floats x) { return _mm512_cvtss_f32(x); }

inline Floats pick(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask either(Mask a, Mask b) { return a | b; }
inline Mask from_lane(int i) { return static_cast<Mask>(0xffff << i); }

// Which of at .. at + LANES - 1 are not in [from, to); which bytes are not 0.
inline Mask outside(int at, int from, int to) {
    __m512i i = _mm512_add_epi32(_mm512_set1_epi32(at),
                                 _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    return _mm512_cmplt_epi32_mask(i, _mm512_set1_epi32(from)) | _mm512_cmpge_epi32_mask(i, _mm512_set1_epi32(to));
}
inline Mask marked(const uint8_t* p) {
    __m128i marks = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm_test_epi8_mask(marks, marks);
}

// 1 / x to 2^-27: dividing would take longer than all the rest.
inline Floats inverse(Floats x) {
    Floats guess = _mm512_rcp14_ps(x);
    return guess * fnma(x, guess, all(2.0f));
}

// x - floor(x), 0 at -infinity; p * 2^floor(x).
inline Floats fraction(Floats x) { return _mm512_reduce_ps(x, 1); }
inline Floats scaled(Floats p, Floats x) { return _mm512_scalef_ps(p, x); }

// The nearest whole number, of two the even one; p * 2^n for a whole n of any size.
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 0); }
inline Floats times_2_to(Floats p, Floats n) { return _mm512_scalef_ps(p, n); }

// LANES rows of LANES words, in place: lane i of vector w comes from lane w of vector i.
inline void transpose(Words (&a)[LANES]) {
    Words b[LANES];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {  // a[4 i + j] holds words j, 4 + j, 8 + j, 12 + j of rows 4 i .. 4 i + 3
        Words even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        Words even2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        Words odd2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[j] = _mm512_shuffle_i32x4(even, even2, 0x88);
        b[4 + j] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        b[8 + j] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        b[12 + j] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
}

}  // namespace
