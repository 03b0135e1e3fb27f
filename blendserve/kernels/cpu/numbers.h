// The numbers that kernels read and write, and the words of 4 bytes that they are packed in.
//
//                 numbers    of a word    LANES    vectors of a strip
//     AVX2        fp32       1            8        2
//     AVX-512     fp32       1            16       4
//     AVX512-BF16 bf16       2            16       4
#pragma once

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

#include <cstring>

namespace {

constexpr int STRIP = VECTORS * LANES;

#ifdef __AVX512BF16__

using Number = uint16_t;
constexpr int PER_WORD = 2;

// sum + the products of a word's numbers, in every lane.
inline Floats dot(Floats sum, Words a, Words b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

inline __m256i narrow(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline Floats wide(__m256i x) { return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline float wide(Number x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}
inline Floats load(const Number* p) { return wide(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Floats load(const Number* p, Mask there) { return wide(_mm256_maskz_loadu_epi16(there, p)); }
inline void store(Number* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store(Number* p, Mask there, Floats x) { _mm256_mask_storeu_epi16(p, there, narrow(x)); }
inline Floats rounded(Floats x) { return wide(narrow(x)); }

// LANES words of numbers kept as int8, exactly.
inline Words words_of_int8(const int8_t* p) {
    auto floats_of = [](const int8_t* at) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
    };
    return (Words)_mm512_cvtne2ps_pbh(floats_of(p + LANES), floats_of(p));
}

// Words of `low` and `high`: as numbers in memory, as floats to be rounded.
inline Words packed(__m256i low, __m256i high) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}
inline Words packed(const Number* low, const Number* high) {  // null = zeros
    auto numbers = [](const Number* p) {
        return p ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_setzero_si256();
    };
    return packed(numbers(low), numbers(high));
}
inline Words packed(Floats low, Floats high) { return packed(narrow(low), narrow(high)); }

// 2 LANES numbers.
inline void store_both(Number* p, Floats low, Floats high) { store_words(p, (Words)_mm512_cvtne2ps_pbh(high, low)); }

#else

using Number = float;
constexpr int PER_WORD = 1;

inline Floats dot(Floats sum, Words a, Words b) { return fma(floats(a), floats(b), sum); }
inline float wide(Number x) { return x; }
inline Floats rounded(Floats x) { return x; }
#ifdef __AVX512F__
inline Words words_of_int8(const int8_t* p) {
    return words(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}
#else
inline Words words_of_int8(const int8_t* p) {
    return words(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
}
#endif
inline Words packed(const Number* low, const Number*) { return low ? load_words(low) : all_words(0); }
inline Words packed(Floats low, Floats) { return words(low); }
inline void store_both(Number* p, Floats low, Floats high) {
    store(p, low);
    store(p + LANES, high);
}

#endif

// A word in every lane.
inline Words word(uint32_t x) { return all_words(x); }
inline Words word(const Number* p) {
    uint32_t x;
    std::memcpy(&x, p, sizeof x);
    return all_words(x);
}

// Up to LANES rows of up to LANES words, turned; what is missing is zeros.
inline void turned(const Number* from, int64_t stride, int rows, int n, Words (&to)[LANES]) {
    Mask there = first(n);
    for (int i = 0; i < LANES; ++i) to[i] = i < rows ? load_words(from + i * stride, there) : all_words(0);
    transpose(to);
}

// The same into memory: word w of every row goes to to[w * width].
inline void turn(const Number* from, int64_t stride, int rows, int n, uint32_t* to, int64_t width) {
    Words block[LANES];
    turned(from, stride, rows, n, block);
    for (int w = 0; w < n; ++w) store_words(to + w * width, block[w]);
}

}  // namespace
