// Vectors of fp32 numbers with AVX2 and FMA: 8 lanes, 16 registers. avx512.h says what each function does.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int LANES = 8;
constexpr int VECTORS = 2;

using Floats = __m256;
using Words = __m256i;
using Mask = __m256i;  // lanes of 0 or ~0

inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Words all_words(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline Floats floats(Words x) { return _mm256_castsi256_ps(x); }
inline Words words(Floats x) { return _mm256_castps_si256(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Words load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline void store_words(void* p, Words x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }

inline Words lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline Mask first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(std::clamp<int64_t>(n, 0, LANES))), lane_numbers());
}
inline Floats load(const float* p, Mask there) { return _mm256_maskload_ps(p, there); }
inline Words load_words(const void* p, Mask there) { return _mm256_maskload_epi32(static_cast<const int*>(p), there); }
inline void store(float* p, Mask there, Floats x) { _mm256_maskstore_ps(p, there, x); }
inline void store_words(void* p, Mask there, Words x) { _mm256_maskstore_epi32(static_cast<int*>(p), there, x); }

inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats fms(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats size_of(Floats x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Floats with_sign_of(Floats size, Floats x) { return _mm256_or_ps(size, _mm256_and_ps(x, all(-0.0f))); }

inline float largest(Floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float sum_of(Floats x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float first_of(Floats x) { return _mm256_cvtss_f32(x); }

inline Floats pick(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, floats(mask)); }
inline Mask equal(Floats a, Floats b) { return words(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline Mask either(Mask a, Mask b) { return _mm256_or_si256(a, b); }
inline Mask from_lane(int i) { return _mm256_cmpgt_epi32(lane_numbers(), _mm256_set1_epi32(i - 1)); }

inline Mask outside(int at, int from, int to) {
    __m256i i = _mm256_add_epi32(_mm256_set1_epi32(at), lane_numbers());
    return either(_mm256_cmpgt_epi32(_mm256_set1_epi32(from), i), _mm256_cmpgt_epi32(i, _mm256_set1_epi32(to - 1)));
}
inline Mask marked(const uint8_t* p) {
    __m256i marks = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cmpgt_epi32(marks, _mm256_setzero_si256());
}

inline Floats inverse(Floats x) { return all(1.0f) / x; }

// Below -126 both together give 2^-126 at most, and exactly 0 at -infinity.
inline Floats fraction(Floats x) {
    x = larger(all(-127.0f), x);  // in this order NaN stays
    return x - _mm256_floor_ps(x);
}
inline Floats scaled(Floats p, Floats x) {
    __m256i exponent = _mm256_cvtps_epi32(_mm256_floor_ps(larger(all(-127.0f), x)));
    return floats(_mm256_add_epi32(words(p), _mm256_slli_epi32(exponent, 23)));
}

inline Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats power_of_2_at(Words n) { return floats(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
inline Floats times_2_to(Floats p, Floats n) {  // in two steps: 2^n may be beyond what a number holds, and the product not
    Words whole = _mm256_cvtps_epi32(_mm256_min_ps(larger(n, all(-250.0f)), all(250.0f))), half = _mm256_srai_epi32(whole, 1);
    return p * power_of_2_at(half) * power_of_2_at(_mm256_sub_epi32(whole, half));
}

inline void transpose(Words (&a)[LANES]) {
    Words b[LANES];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {  // a[4 i + j] holds words j, 4 + j of rows 4 i .. 4 i + 3
        b[j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
        b[4 + j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
    }
    for (int i = 0; i < 8; ++i) a[i] = b[i];
}

}  // namespace
