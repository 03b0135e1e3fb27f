// Vectors of fp32 numbers, and words of 4 bytes that hold the numbers of the kernels: one set of functions for each ISA.
//
//                 numbers    in a word    LANES    vectors in N_TILE
//     AVX2        fp32       1            8        2
//     AVX-512     fp32       1            16       4
//     AVX512-BF16 bf16       2            16       4
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

#ifdef __AVX512F__
#define SIMD(name) _mm512_##name
constexpr int LANES = 16;   // fp32 numbers, or words, in a vector
constexpr int VECTORS = 4;  // of a strip: with 6 rows of sums they fill the registers
using F32 = __m512;
using U32 = __m512i;
using Mask = __mmask16;
#else  // AVX2 and FMA: 16 registers
#define SIMD(name) _mm256_##name
constexpr int LANES = 8;
constexpr int VECTORS = 2;
using F32 = __m256;
using U32 = __m256i;
using Mask = __m256i;  // lanes of 0 or ~0
#endif

// The T at an address, aligned or not.
template <class T>
inline T load_as(const void* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline F32 broadcast(float x) { return SIMD(set1_ps)(x); }
inline U32 broadcast_u32(uint32_t x) { return SIMD(set1_epi32)(static_cast<int>(x)); }
inline F32 as_f32(U32 x) { return (F32)x; }
inline U32 as_u32(F32 x) { return (U32)x; }
inline F32 load(const float* p) { return SIMD(loadu_ps)(p); }
inline void store(float* p, F32 x) { SIMD(storeu_ps)(p, x); }
inline U32 load_u32(const void* p) { return load_as<U32>(p); }
inline U32 load(const uint32_t* p) { return load_u32(p); }
inline void store_u32(void* p, U32 x) { std::memcpy(p, &x, sizeof x); }

inline F32 fma(F32 a, F32 b, F32 c) { return SIMD(fmadd_ps)(a, b, c); }    // a b + c
inline F32 fms(F32 a, F32 b, F32 c) { return SIMD(fmsub_ps)(a, b, c); }    // a b - c
inline F32 fnma(F32 a, F32 b, F32 c) { return SIMD(fnmadd_ps)(a, b, c); }  // c - a b
inline F32 max(F32 a, F32 b) { return SIMD(max_ps)(a, b); }
inline F32 abs(F32 x) { return as_f32(as_u32(x) & broadcast_u32(~(1u << 31))); }
inline F32 copy_sign(F32 size, F32 x) { return as_f32(as_u32(size) | (as_u32(x) & broadcast_u32(1u << 31))); }
inline Mask mask_or(Mask a, Mask b) { return static_cast<Mask>(a | b); }

// For each ISA: tail_mask, the first n lanes, of which the others are neither read nor written, and 0; nonzero_bytes, which
// bytes are not 0; reciprocal, 1 / x to 2^-27, as dividing would take longer than all the rest; fraction, x - floor(x), 0 at
// -infinity; scale_by_exp2, p * 2^floor(x); round_even, the nearest whole number, of two the even one; times_exp2, p * 2^n for a
// whole n of any size.

#ifdef __AVX512F__

inline U32 lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Mask less(U32 a, U32 b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Mask tail_mask(int64_t n) { return static_cast<Mask>((1u << std::clamp<int64_t>(n, 0, LANES)) - 1); }
inline F32 load(const float* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline U32 load_u32(const void* p, Mask mask) { return _mm512_maskz_loadu_epi32(mask, p); }
inline void store(float* p, Mask mask, F32 x) { _mm512_mask_storeu_ps(p, mask, x); }
inline void store_u32(void* p, Mask mask, U32 x) { _mm512_mask_storeu_epi32(p, mask, x); }
inline F32 select(Mask mask, F32 yes, F32 no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline Mask equal(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask nonzero_bytes(const uint8_t* p) {
    __m128i marks = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm_test_epi8_mask(marks, marks);
}
inline float reduce_max(F32 x) { return _mm512_reduce_max_ps(x); }
inline float reduce_add(F32 x) { return _mm512_reduce_add_ps(x); }
inline F32 reciprocal(F32 x) {
    F32 guess = _mm512_rcp14_ps(x);
    return guess * fnma(x, guess, broadcast(2.0f));
}
inline F32 fraction(F32 x) { return _mm512_reduce_ps(x, 1); }
inline F32 scale_by_exp2(F32 p, F32 x) { return _mm512_scalef_ps(p, x); }
inline F32 round_even(F32 x) { return _mm512_roundscale_ps(x, 0); }
inline F32 times_exp2(F32 p, F32 n) { return _mm512_scalef_ps(p, n); }
inline F32 from_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#else

inline U32 lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline Mask less(U32 a, U32 b) { return _mm256_cmpgt_epi32(b, a); }
inline Mask tail_mask(int64_t n) {
    return less(lane_numbers(), _mm256_set1_epi32(static_cast<int>(std::clamp<int64_t>(n, 0, LANES))));
}
inline F32 load(const float* p, Mask mask) { return _mm256_maskload_ps(p, mask); }
inline U32 load_u32(const void* p, Mask mask) { return _mm256_maskload_epi32(static_cast<const int*>(p), mask); }
inline void store(float* p, Mask mask, F32 x) { _mm256_maskstore_ps(p, mask, x); }
inline void store_u32(void* p, Mask mask, U32 x) { _mm256_maskstore_epi32(static_cast<int*>(p), mask, x); }
inline F32 select(Mask mask, F32 yes, F32 no) { return _mm256_blendv_ps(no, yes, as_f32(mask)); }
inline Mask equal(F32 a, F32 b) { return as_u32(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline Mask nonzero_bytes(const uint8_t* p) {
    return less(broadcast_u32(0), _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Of halves, quarters and pairs, as AVX-512's reductions.
template <class Join>
inline float reduce(F32 x, Join join) {
    __m128 four = join(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = join(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(join(two, _mm_shuffle_ps(two, two, 1)));
}
inline float reduce_max(F32 x) {
    return reduce(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
inline float reduce_add(F32 x) {
    return reduce(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
inline F32 reciprocal(F32 x) { return broadcast(1.0f) / x; }

// Below -126 both together give 2^-126 at most, and exactly 0 at -infinity.
inline F32 fraction(F32 x) {
    x = max(broadcast(-127.0f), x);  // in this order NaN stays
    return x - _mm256_floor_ps(x);
}
inline F32 scale_by_exp2(F32 p, F32 x) {
    __m256i exponent = _mm256_cvtps_epi32(_mm256_floor_ps(max(broadcast(-127.0f), x)));
    return as_f32(_mm256_add_epi32(as_u32(p), _mm256_slli_epi32(exponent, 23)));
}
inline F32 round_even(F32 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F32 exp2_of_int(U32 n) { return as_f32(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
inline F32 times_exp2(F32 p, F32 n) {  // in two steps: 2^n may be beyond what a number holds, and the product not
    U32 whole = _mm256_cvtps_epi32(_mm256_min_ps(max(n, broadcast(-250.0f)), broadcast(250.0f))), half = _mm256_srai_epi32(whole, 1);
    return p * exp2_of_int(half) * exp2_of_int(_mm256_sub_epi32(whole, half));
}
inline F32 from_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

#endif

// Which of at .. at + LANES - 1 are not in [from, to).
inline Mask outside_range(int at, int from, int to) {
    U32 i = SIMD(add_epi32)(SIMD(set1_epi32)(at), lane_numbers());
    return mask_or(less(i, SIMD(set1_epi32)(from)), less(SIMD(set1_epi32)(to - 1), i));
}

// LANES rows of LANES words, in place: lane i of vector w comes from lane w of vector i.
inline void transpose(U32 (&a)[LANES]) {
    U32 b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        b[i] = SIMD(unpacklo_epi32)(a[i], a[i + 1]);
        b[i + 1] = SIMD(unpackhi_epi32)(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = SIMD(unpacklo_epi64)(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = SIMD(unpackhi_epi64)(b[i + j], b[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {  // a[4 i + j] holds words j, 4 + j, .. of rows 4 i .. 4 i + 3
#ifdef __AVX512F__
        U32 even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        U32 even2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        U32 odd2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[j] = _mm512_shuffle_i32x4(even, even2, 0x88);
        b[4 + j] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        b[8 + j] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        b[12 + j] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
#else
        b[j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
        b[4 + j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
#endif
    }
    for (int i = 0; i < LANES; ++i) a[i] = b[i];
}

constexpr int N_TILE = VECTORS * LANES;

#ifdef __AVX512BF16__

using elem_t = uint16_t;
constexpr int PER_WORD = 2;

// sum + the products of a word's numbers, in every lane.
inline F32 dot(F32 sum, U32 a, U32 b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

inline __m256i to_bf16(F32 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline F32 to_f32(__m256i x) { return as_f32(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline F32 broadcast(elem_t x) { return to_f32(_mm256_set1_epi16(static_cast<int16_t>(x))); }
inline F32 load(const elem_t* p) { return to_f32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F32 load(const elem_t* p, Mask mask) { return to_f32(_mm256_maskz_loadu_epi16(mask, p)); }
inline void store(elem_t* p, F32 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
inline void store(elem_t* p, Mask mask, F32 x) { _mm256_mask_storeu_epi16(p, mask, to_bf16(x)); }
inline F32 round_to_elem(F32 x) { return to_f32(to_bf16(x)); }

// LANES words of numbers kept as int8, exactly.
inline U32 words_from_int8(const int8_t* p) { return (U32)_mm512_cvtne2ps_pbh(from_int8(p + LANES), from_int8(p)); }

// U32 of `low` and `high`: as numbers in memory, as floats to be rounded.
inline U32 pack_words(__m256i low, __m256i high) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}
inline U32 pack_words(const elem_t* low, const elem_t* high) {  // null = zeros
    auto numbers = [](const elem_t* p) { return p ? load_as<__m256i>(p) : _mm256_setzero_si256(); };
    return pack_words(numbers(low), numbers(high));
}
inline U32 pack_words(F32 low, F32 high) {
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(load_as<U32>(order), (U32)_mm512_cvtne2ps_pbh(high, low));
}

// 2 LANES numbers.
inline void store_2(elem_t* p, F32 low, F32 high) { store_u32(p, (U32)_mm512_cvtne2ps_pbh(high, low)); }

#else

using elem_t = float;
constexpr int PER_WORD = 1;

inline F32 dot(F32 sum, U32 a, U32 b) { return fma(as_f32(a), as_f32(b), sum); }
inline F32 round_to_elem(F32 x) { return x; }
inline U32 words_from_int8(const int8_t* p) { return as_u32(from_int8(p)); }
inline U32 pack_words(const elem_t* low, const elem_t*) { return low ? load_u32(low) : broadcast_u32(0); }
inline U32 pack_words(F32 low, F32) { return as_u32(low); }
inline void store_2(elem_t* p, F32 low, F32 high) {
    store(p, low);
    store(p + LANES, high);
}

#endif

// A word in every lane.
inline U32 broadcast_word(const elem_t* p) { return broadcast_u32(load_as<uint32_t>(p)); }

// Up to LANES rows of up to LANES words, turned; what is missing is zeros.
inline void load_transposed(const elem_t* from, int64_t stride, int rows, int n, U32 (&to)[LANES]) {
    Mask mask = tail_mask(n);
    for (int i = 0; i < LANES; ++i) to[i] = i < rows ? load_u32(from + i * stride, mask) : broadcast_u32(0);
    transpose(to);
}

// Up to LANES rows of `words` words into memory: word w of every row goes to to[w * width]; then zeros, for `room` words in all.
inline void transpose_into(const elem_t* from, int64_t stride, int64_t rows, int64_t words, int64_t room, uint32_t* to, int64_t width) {
    for (int64_t w = 0; w < words; w += LANES) {
        U32 block[LANES];
        int n = static_cast<int>(std::min<int64_t>(LANES, words - w));
        load_transposed(from + PER_WORD * w, stride, static_cast<int>(std::min<int64_t>(LANES, rows)), n, block);
        for (int i = 0; i < n; ++i) store_u32(to + (w + i) * width, block[i]);
    }
    for (int64_t w = words; w < room; ++w) store_u32(to + w * width, broadcast_u32(0));
}

// sum[r][v] = op(sum[r][v], x(i, r), vector v of row i of y) for n steps i, in ascending order.
template <int R, int V, class X, class Y, class Op>
inline void add_products(int64_t n, X x, const Y* y, int64_t y_row, F32 (&sum)[R][V], Op op) {
    const Y* end = y + n * y_row;
    for (int64_t i = 0; y != end; ++i, y += y_row) {
        decltype(load(y)) ys[V];
        for (int v = 0; v < V; ++v) ys[v] = load(y + LANES * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            auto one = x(i, r);
            for (int v = 0; v < V; ++v) sum[r][v] = op(sum[r][v], one, ys[v]);
        }
    }
}

// The same with `dot` of words.
template <int R, int V, class X>
inline void add_dots(int64_t n, X x, const uint32_t* y, int64_t y_row, F32 (&sum)[R][V]) {
    add_products(n, x, y, y_row, sum, [](F32 s, U32 a, U32 b) { return dot(s, a, b); });
}

}  // namespace
