// What the kernels share: bf16 pairs as words, their transposition, and memory that is kept between calls.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace {

constexpr int LANES = 16;         // fp32 numbers, or pairs of bf16, in a vector
constexpr int STRIP = 4 * LANES;  // what 4 vectors hold
constexpr int LINE = 64;          // bytes that memory gives at once

struct Range {
    int64_t begin, end;
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory of one thread, which grows and stays.
class Scratch {
   public:
    char* take(size_t bytes) {
        if (bytes > size_) {
            memory_.reset(static_cast<char*>(std::aligned_alloc(64, divide_up(bytes, 64) * 64)));
            size_ = memory_ ? bytes : 0;
            if (!memory_) throw std::bad_alloc();
        }
        return memory_.get();
    }

   private:
    struct Free {
        void operator()(char* p) const { std::free(p); }
    };
    std::unique_ptr<char, Free> memory_;
    size_t size_ = 0;
};

// vdpbf16ps adds, in every lane, the two products of two pairs.
inline __m512bh pairs(const uint32_t* p) { return (__m512bh)_mm512_load_si512(p); }
inline __m512bh pair(uint32_t x) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(x)); }
inline __m512bh pair(const uint16_t* p) {
    uint32_t two;
    std::memcpy(&two, p, sizeof two);
    return pair(two);
}

// 16 numbers of bf16 in fp32.
inline __m512 wide(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// The first n lanes.
inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << std::clamp<int64_t>(n, 0, LANES)) - 1); }

// Memory to be asked for before it is needed, some lines at a time. In order: rows read side by side are slow to come.
struct Ahead {
    const char *at = nullptr, *end = nullptr;
    int64_t lines() const { return (end - at) / LINE; }
    void fetch(int64_t n) {
        for (; n > 0 && at < end; --n, at += LINE) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// 16 rows of 16 words, in place: lane i of vector w comes from lane w of vector i.
inline void transpose(__m512i (&a)[16]) {
    __m512i b[16];
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
        __m512i even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[j] = _mm512_shuffle_i32x4(even, even2, 0x88);
        b[4 + j] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        b[8 + j] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        b[12 + j] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
}

// Up to 16 rows of up to 16 words, turned; what is missing is zeros.
inline void turned(const uint16_t* from, int64_t stride, int rows, int words, __m512i (&to)[16]) {
    auto there = static_cast<__mmask16>((1u << words) - 1);
    for (int i = 0; i < 16; ++i)
        to[i] = i < rows ? _mm512_maskz_loadu_epi32(there, from + i * stride) : _mm512_setzero_si512();
    transpose(to);
}

// The same into memory: word w of every row goes to to[w * width].
inline void turn(const uint16_t* from, int64_t stride, int rows, int words, uint32_t* to, int64_t width) {
    __m512i block[16];
    turned(from, stride, rows, words, block);
    for (int w = 0; w < words; ++w) _mm512_store_si512(to + w * width, block[w]);
}

}  // namespace
