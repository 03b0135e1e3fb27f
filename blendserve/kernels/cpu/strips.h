// Quantised weights in strips of 16 outputs, made of a file's blocks when a model is loaded.
//
// A strip is a row of blocks of SUPER inputs:
//
//     half d[16]; half dmin[16] if MIN; for each group of inputs of one scale, if there are several: uint8 scale[16], then the same
//     of minima; for each unit of 32 inputs LOW vectors, then HIGH vectors, of 16 words of 4 bytes
//
// A plane of b bits has b vectors. Byte k of an output's word holds 8 / b inputs, one of each of 8 / b quads: quad q of a unit is in
// vector q / (8 / b), at bit b * (q % (8 / b)). A quad is 4 inputs, and its byte k is input {0, 2, 1, 3}[k]: so bytes 0 and 2, and 1
// and 3, are words of two inputs, and the whole is what an int8 product takes.
//
//     weight = d * scale * (value of the code - OFFSET) - dmin * min       code = low bits | high bits << LOW
#pragma once

#include <utility>

#include "common.h"

namespace {

constexpr int STRIP = 16, UNIT = 32;

template <int KIND_, int BYTES_, int LOW_, int HIGH_, int GROUP_, int SUPER_, bool MIN_, int OFFSET_, bool TABLE_ = false>
struct Form {
    static constexpr int KIND = KIND_, FILE_BYTES = BYTES_;  // as in ggml.h; bytes of a block of the file
    static constexpr int LOW = LOW_, HIGH = HIGH_, GROUP = GROUP_, SUPER = SUPER_, OFFSET = OFFSET_, BITS = LOW + HIGH;
    static constexpr bool MIN = MIN_, TABLE = TABLE_;  // TABLE: codes are places in `table`
    static constexpr int UNITS = SUPER / UNIT, PARTS = UNIT / GROUP, GROUPS = SUPER / GROUP;
    static constexpr bool SCALES = SUPER > UNIT, SIGNED = SCALES && !MIN;
    static constexpr int64_t HEAD = 2 * STRIP * (1 + MIN), SMALL = SCALES ? GROUPS * STRIP * (1 + MIN) : 0, VECTOR = 4 * STRIP;
    static constexpr int64_t BYTES = HEAD + SMALL + UNITS * BITS * VECTOR;
};
using Q4_0 = Form<2, 18, 4, 0, 32, 32, false, 8>;
using Q4_1 = Form<3, 20, 4, 0, 32, 32, true, 0>;
using Q5_0 = Form<6, 22, 4, 1, 32, 32, false, 16>;
using Q5_1 = Form<7, 24, 4, 1, 32, 32, true, 0>;
using Q8_0 = Form<8, 34, 4, 4, 32, 32, false, 128>;
using Q2_K = Form<10, 84, 2, 0, 16, 256, true, 0>;
using Q3_K = Form<11, 110, 2, 1, 16, 256, false, 4>;
using Q4_K = Form<12, 144, 4, 0, 32, 256, true, 0>;
using Q5_K = Form<13, 176, 4, 1, 32, 256, true, 0>;
using Q6_K = Form<14, 210, 4, 2, 16, 256, false, 32>;
using IQ4_NL = Form<20, 18, 4, 0, 32, 32, false, 0, true>;
using IQ4_XS = Form<23, 136, 4, 0, 32, 256, false, 0, true>;

constexpr int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <class Fn>
auto by_form(int64_t form, Fn fn) {
    switch (form) {
        case Q4_0::KIND: return fn(Q4_0());
        case Q4_1::KIND: return fn(Q4_1());
        case Q5_0::KIND: return fn(Q5_0());
        case Q5_1::KIND: return fn(Q5_1());
        case Q2_K::KIND: return fn(Q2_K());
        case Q3_K::KIND: return fn(Q3_K());
        case Q4_K::KIND: return fn(Q4_K());
        case Q5_K::KIND: return fn(Q5_K());
        case Q6_K::KIND: return fn(Q6_K());
        case IQ4_NL::KIND: return fn(IQ4_NL());
        case IQ4_XS::KIND: return fn(IQ4_XS());
        default: return fn(Q8_0());
    }
}

// Bytes of STRIP outputs of such weights.
inline int64_t strip_bytes(int64_t form, int64_t inputs) {
    if (!form) return STRIP * inputs * static_cast<int64_t>(sizeof(elem_t));
    return by_form(form, [&](auto f) { return inputs / decltype(f)::SUPER * decltype(f)::BYTES; });
}

// Where the block of a strip begins that holds output o and its first inputs.
inline const char* strip_of(const Matrix& weights, int64_t inputs, int64_t o) {
    return static_cast<const char*>(weights.data) + o / STRIP * strip_bytes(weights.form, inputs);
}

// Calls f with the constants 0 .. N - 1.
template <int I>
using Int = std::integral_constant<int, I>;
template <class Fn, int... I>
inline void each(Fn fn, std::integer_sequence<int, I...>) {
    (fn(Int<I>()), ...);
}
template <int N, class Fn>
inline void unrolled(Fn fn) {
    each(fn, std::make_integer_sequence<int, N>());
}

#ifdef __AVX512F__
inline F32 load_half(const char* p) { return _mm512_cvtph_ps(load_as<__m256i>(p)); }
inline F32 load_u8(const char* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_as<__m128i>(p))); }
inline U32 and_or(U32 x, U32 mask, U32 with) { return _mm512_ternarylogic_epi32(x, mask, with, 0xea); }  // (x & mask) | with
template <int S>
inline U32 shift_right(U32 x) {
    return S > 0 ? _mm512_srli_epi32(x, S > 0 ? S : 0) : S < 0 ? _mm512_slli_epi32(x, S < 0 ? -S : 0) : x;
}
inline F32 look_up(U32 code) {  // in `table`, by the lowest 4 bits
    constexpr float t[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return _mm512_permutexvar_ps(code, load(t));
}
#else
inline F32 load_half(const char* p) { return _mm256_cvtph_ps(load_as<__m128i>(p)); }
inline F32 load_u8(const char* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
inline U32 and_or(U32 x, U32 mask, U32 with) { return (x & mask) | with; }
template <int S>
inline U32 shift_right(U32 x) {
    return S > 0 ? _mm256_srli_epi32(x, S > 0 ? S : 0) : S < 0 ? _mm256_slli_epi32(x, S < 0 ? -S : 0) : x;
}
inline F32 look_up(U32 code) {
    constexpr float t[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    F32 low = _mm256_permutevar8x32_ps(load(t), code), high = _mm256_permutevar8x32_ps(load(t + 8), code);
    return _mm256_blendv_ps(low, high, as_f32(_mm256_slli_epi32(code, 28)));
}
#endif

// A plane of B bits that begins at vector FIRST: quad Q of a unit from byte AT on, its codes at bit TO; other bits are others'.
template <int B, int FIRST, int Q, int AT, int TO>
inline U32 plane(const U32* v) {
    constexpr int PER = 8 / B;
    return shift_right<B * (Q % PER) + 8 * AT - TO>(v[FIRST + Q / PER]);
}
// Codes of quad Q from byte AT on: those under `lowest`, a mask of the lowest bits of all that are wanted; the rest is of `with`.
template <class F, int Q, int AT>
inline U32 codes_of(const U32* v, uint32_t lowest, U32 with) {
    U32 x = and_or(plane<F::LOW, 0, Q, AT, 0>(v), broadcast_u32(lowest * ((1 << F::LOW) - 1)), with);
    if constexpr (F::HIGH > 0)
        x = and_or(plane<F::HIGH, F::LOW, Q, AT, F::LOW>(v), broadcast_u32((lowest << F::LOW) * ((1 << F::HIGH) - 1)), x);
    return x;
}
// Input I of a unit as a number, before OFFSET is taken off.
template <class F, int I>
inline F32 value_of(const U32* v) {
    constexpr int Q = I / 4, AT = I % 4 == 1 ? 2 : I % 4 == 2 ? 1 : I % 4;
    if constexpr (F::TABLE)
        return look_up(plane<F::LOW, 0, Q, AT, 0>(v));
    else
        return SIMD(cvtepi32_ps)(codes_of<F, Q, AT>(v, 1, broadcast_u32(0)));
}

// The scales of a block for LANES outputs from `lane` on, and its vectors.
template <class F>
struct StripBlock {
    const char* at;  // moved by `lane`
    int lane;
    F32 d, dmin;
    StripBlock(const char* block, int first_lane) : at(block), lane(first_lane), d(load_half(block + 2 * lane)), dmin(d) {
        if (F::MIN) dmin = load_half(block + 2 * (STRIP + lane));
    }
    F32 small(int i) const { return load_u8(at + F::HEAD + i * STRIP + lane); }
    F32 signed_small(int i) const {
        auto* p = reinterpret_cast<const int8_t*>(at + F::HEAD + i * STRIP + lane);
        return from_int8(p);
    }
    F32 scale(int group) const { return F::SIGNED ? d * signed_small(group) : F::SCALES ? d * small(group) : d; }
    F32 min(int group) const { return F::SCALES ? dmin * small(F::GROUPS + group) : dmin; }
    void load_unit(int unit, U32* v) const {
        const char* codes = at + F::HEAD + F::SMALL + unit * F::BITS * F::VECTOR + 4 * lane;
        for (int i = 0; i < F::BITS; ++i) v[i] = load_u32(codes + i * F::VECTOR);
    }
};

// Rows as a product with few of them reads them: sums of 16 inputs; of rows in int8 also scales of 32 inputs, and the inputs, quads
// in the order of a strip's bytes. Sums are of what is multiplied.
struct PreparedRow {
    float *sums, *scales;
    int8_t* inputs;
    PreparedRow(float* at, int64_t n) : sums(at), scales(at + n / 16), inputs(reinterpret_cast<int8_t*>(scales + n / UNIT)) {}
    static int64_t floats(int64_t n) { return n / 16 + n / UNIT + n / 4; }
};

}  // namespace

// strips.cpp. The weights of STRIP outputs of a strip as rows of numbers, rounded once.
void blendserve_strip_numbers(const Matrix& weights, int64_t inputs, int64_t o, elem_t* to, int64_t to_row);
// Rows of x as PreparedRow, and up to 8 of them times outputs [o, o + STRIP).
void blendserve_prepare_rows(const LinearArgs& args, float* to);
void blendserve_gemv_strip(const LinearArgs& args, int64_t o);
