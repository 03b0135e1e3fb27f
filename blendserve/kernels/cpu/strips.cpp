// Strips of quantised weights as numbers, which are those of the package gguf to the bit, and times up to 8 rows.
//
// A product with few rows sums codes, exactly; a group's scale multiplies its sum in fp32, and what all codes have too much is taken off by the row's own sums. A row's result does not depend on the other rows.
//
//     exact     inputs as they are: in bf16 a code is the number 128 + code, two inputs a word; in fp32 one by one
//     int8      inputs of a row rounded to int8, 32 with one scale (prepare_row): four a word
#include "gemv.h"
#include "strips.h"

namespace {

thread_local Workspace rows_of_strip;

// Weights of LANES outputs of a strip from `lane` on -> rows of numbers.
template <class F>
void write_numbers(const char* block, int lane, int64_t inputs, elem_t* to, int64_t to_row) {
    constexpr int WORDS = UNIT / PER_WORD;
    for (int64_t k = 0; k < inputs; k += F::SUPER, block += F::BYTES) {
        StripBlock<F> b(block, lane);
        for (int u = 0; u < F::UNITS; ++u) {
            U32 v[F::BITS], words[WORDS];
            F32 scales[F::PARTS], mins[F::PARTS];
            b.load_unit(u, v);
            for (int part = 0; part < F::PARTS; ++part) {
                scales[part] = b.scale(u * F::PARTS + part);
                if (F::MIN) mins[part] = b.min(u * F::PARTS + part);
            }
            auto weight = [&](auto i) {
                constexpr int I = decltype(i)::value, part = I / F::GROUP;
                F32 x = value_of<F, I>(v);
                if (F::OFFSET) x = x - broadcast(static_cast<float>(F::OFFSET));
                x = scales[part] * x;
                return F::MIN ? x - mins[part] : x;
            };
            unrolled<WORDS>([&](auto w) { words[w] = pack_words(weight(Int<w * PER_WORD>()), weight(Int<w * PER_WORD + PER_WORD - 1>())); });
            for (int w = 0; w < WORDS; w += LANES) {
                U32 square[LANES];
                for (int i = 0; i < LANES; ++i) square[i] = words[w + i];
                transpose(square);
                for (int i = 0; i < LANES; ++i) store_u32(to + i * to_row + k + u * UNIT + w * PER_WORD, square[i]);
            }
        }
    }
}

#ifdef __AVX512BF16__
constexpr uint32_t BF16_128 = 0x43004300;
constexpr int CODE_BIAS = 128;
// Word W of a unit; of 8 bits, the word of the lower or the higher four: `first` is where their plane begins.
template <class F, int W>
inline U32 word_of(const U32* v, Int<0>) {
    constexpr int Q = W / 2, AT = W % 2;
    if constexpr (F::TABLE) {
        alignas(64) static constexpr uint16_t t[32] = {0xc2fe, 0xc2d0, 0xc2a6, 0xc282, 0xc244, 0xc20c, 0xc1b0, 0xc120, 0x3f80, 0x4150, 0x41c8,
                                                       0x4218, 0x4254, 0x428a, 0x42b2, 0x42e2, 0xc2fe, 0xc2d0, 0xc2a6, 0xc282, 0xc244, 0xc20c,
                                                       0xc1b0, 0xc120, 0x3f80, 0x4150, 0x41c8, 0x4218, 0x4254, 0x428a, 0x42b2, 0x42e2};
        return _mm512_permutexvar_epi16(plane<F::LOW, 0, Q, AT, 0>(v), load_u32(t));  // by 5 bits, of which one is another's
    } else if constexpr (F::BITS == 8) {
        return and_or(plane<4, 0, Q, AT, 0>(v), broadcast_u32(0x000f000f), broadcast_u32(BF16_128));
    } else {
        return codes_of<F, Q, AT>(v, 0x00010001, broadcast_u32(BF16_128));
    }
}
template <class F, int W>
inline U32 word_of(const U32* v, Int<1>) {
    return and_or(plane<4, 4, W / 2, W % 2, 0>(v), broadcast_u32(0x000f000f), broadcast_u32(BF16_128));
}
#endif

// Sums of R rows times the unit's inputs of part P, which begin at x; totals: of these inputs.
template <class F, int R, int P>
inline void add_exact(const elem_t* x, int64_t x_row, const U32* v, const float* totals, F32* sums) {
    constexpr int CHAINS = 2;
    F32 part[R][CHAINS] = {};
#ifdef __AVX512BF16__
    constexpr int FIRST = P * F::GROUP / 2, BIAS = F::TABLE ? 0 : -(CODE_BIAS * (F::BITS == 8 ? 17 : 1) + F::OFFSET);
    F32 high[R][CHAINS] = {};
    for (int r = 0; BIAS && r < R; ++r) part[r][0] = broadcast(BIAS * totals[r]);
    unrolled<F::GROUP / 2>([&](auto w) {
        U32 word = word_of<F, FIRST + w>(v, Int<0>());
        for (int r = 0; r < R; ++r) part[r][w % CHAINS] = dot(part[r][w % CHAINS], broadcast_word(x + r * x_row + 2 * w), word);
        if constexpr (F::BITS == 8) {
            word = word_of<F, FIRST + w>(v, Int<1>());
            for (int r = 0; r < R; ++r) high[r][w % CHAINS] = dot(high[r][w % CHAINS], broadcast_word(x + r * x_row + 2 * w), word);
        }
    });
    for (int r = 0; r < R; ++r) {
        sums[r] = part[r][0] + part[r][1];
        if (F::BITS == 8) sums[r] = fma(high[r][0] + high[r][1], broadcast(16.0f), sums[r]);
    }
#else
    for (int r = 0; F::OFFSET && r < R; ++r) part[r][0] = broadcast(-F::OFFSET * totals[r]);
    unrolled<F::GROUP>([&](auto i) {
        F32 value = value_of<F, P * F::GROUP + i>(v);
        for (int r = 0; r < R; ++r) part[r][i % CHAINS] = fma(broadcast(x[r * x_row + i]), value, part[r][i % CHAINS]);
    });
    for (int r = 0; r < R; ++r) sums[r] = part[r][0] + part[r][1];
#endif
}

// Quad Q of a unit as bytes without a sign.
template <class F, int Q>
inline U32 quad_of(const U32* v) {
    U32 quad = codes_of<F, Q, 0>(v, 0x01010101, broadcast_u32(0));
    if constexpr (!F::TABLE) return quad;
    alignas(16) static constexpr uint8_t t[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // 128 added
#ifdef __AVX512F__
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_as<__m128i>(t)), quad);
#else
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_as<__m128i>(t)), quad);
#endif
}

// The same of rows in int8: sums of whole numbers.
template <class F, int R, int P>
inline void add_int8(const int8_t* x, int64_t x_row, const U32* v, F32* sums) {
    constexpr int QUADS = F::GROUP / 4, FIRST = P * QUADS;
    auto inputs = [&](int r, int q) { return broadcast_u32(load_as<uint32_t>(x + r * x_row + 4 * q)); };
    U32 whole[R] = {};
#ifdef __AVX512VNNI__
    unrolled<QUADS>([&](auto q) {
        U32 quad = quad_of<F, FIRST + q>(v);
        for (int r = 0; r < R; ++r) whole[r] = _mm512_dpbusd_epi32(whole[r], quad, inputs(r, q));
    });
#else  // sums of 16 bits, as many quads as they hold; 8 bits are two times four
    constexpr int BITS = F::TABLE ? 8 : F::BITS, EVERY = BITS <= 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 8;
    U32 some[R], high[R], ones = SIMD(set1_epi16)(1), sixteen = SIMD(set1_epi16)(16), four = broadcast_u32(0x0f0f0f0f);
    unrolled<QUADS>([&](auto q) {
        U32 low, upper;
        if constexpr (F::BITS == 8) {
            low = plane<4, 0, FIRST + q, 0, 0>(v) & four, upper = plane<4, 4, FIRST + q, 0, 0>(v) & four;
        } else {
            U32 quad = quad_of<F, FIRST + q>(v);
            low = BITS == 8 ? quad & four : quad, upper = shift_right<4>(quad) & four;
        }
        for (int r = 0; r < R; ++r) {
            U32 product = SIMD(maddubs_epi16)(low, inputs(r, q));
            some[r] = q % EVERY ? SIMD(add_epi16)(some[r], product) : product;
            if (BITS == 8) {
                product = SIMD(maddubs_epi16)(upper, inputs(r, q));
                high[r] = q % EVERY ? SIMD(add_epi16)(high[r], product) : product;
            }
            if (q % EVERY != EVERY - 1 && q != QUADS - 1) continue;
            whole[r] = SIMD(add_epi32)(whole[r], SIMD(madd_epi16)(some[r], ones));
            if (BITS == 8) whole[r] = SIMD(add_epi32)(whole[r], SIMD(madd_epi16)(high[r], sixteen));
        }
    });
#endif
    for (int r = 0; r < R; ++r) sums[r] = SIMD(cvtepi32_ps)(whole[r]);
}

// R rows times outputs [o, o + STRIP), a piece of LANES of them after the other in each block.
template <class F, int R, bool IS_INT8>
void gemv_strip(const LinearArgs& c, int64_t o) {
    constexpr int PIECES = STRIP / LANES, AHEAD = 2048;  // bytes
    const char* block = strip_of(c.weights, c.inputs, o);
    int64_t row = PreparedRow::floats(c.inputs);
    PreparedRow first(const_cast<float*>(c.prepared), c.inputs);
    F32 sums[PIECES][R] = {};
    for (int64_t k = 0; k < c.inputs; k += F::SUPER, block += F::BYTES) {
        // With AVX2 the sums take so long that too few lines are read ahead.
        for (int64_t at = 0; PIECES > 1 && at < F::BYTES; at += LINE) _mm_prefetch(block + AHEAD + at, _MM_HINT_T0);
        for (int piece = 0; piece < PIECES; ++piece) {
            StripBlock<F> b(block, piece * LANES);
            F32 sum[R];
            std::copy_n(sums[piece], R, sum);
            for (int u = 0; u < F::UNITS; ++u) {
                U32 v[F::BITS];
                b.load_unit(u, v);
                unrolled<F::PARTS>([&](auto p) {
                    int64_t at = k + u * UNIT + p * F::GROUP;
                    float totals[R];
                    for (int r = 0; r < R; ++r) {
                        totals[r] = first.sums[r * row + at / 16];
                        if (F::GROUP == 32) totals[r] += first.sums[r * row + at / 16 + 1];
                    }
                    F32 scale = b.scale(u * F::PARTS + p), part[R];
                    if constexpr (IS_INT8) {
                        constexpr float OFFSET = F::TABLE ? -128 : -F::OFFSET;
                        add_int8<F, R, p>(first.inputs + at, 4 * row, v, part);
                        for (int r = 0; r < R; ++r) {
                            part[r] = part[r] * broadcast(first.scales[r * row + at / UNIT]);
                            if (OFFSET) part[r] = part[r] + broadcast(OFFSET * totals[r]);
                        }
                    } else {
                        add_exact<F, R, p>(c.x + at, c.x_row, v, totals, part);
                    }
                    for (int r = 0; r < R; ++r) {
                        sum[r] = fma(part[r], scale, sum[r]);
                        if (F::MIN) sum[r] = fnma(b.min(u * F::PARTS + p), broadcast(totals[r]), sum[r]);
                    }
                });
            }
            std::copy_n(sum, R, sums[piece]);
        }
    }
    for (int piece = 0; piece < PIECES && o + piece * LANES < c.outputs; ++piece) store_gemv<R>(c, o + piece * LANES, sums[piece]);
}

template <class F, int R>
void by_rows(const LinearArgs& c, int64_t o) {
    (c.int8_rows ? gemv_strip<F, R, true> : gemv_strip<F, R, false>)(c, o);
}

void prepare_exact(const elem_t* x, int64_t n, PreparedRow to) {
    for (int64_t i = 0; i < n; i += 16) to.sums[i / 16] = reduce_add(LANES == 16 ? load(x + i) : load(x + i) + load(x + i + 8));
}

void prepare_int8(const elem_t* x, int64_t n, PreparedRow to) {
    constexpr int N = UNIT / LANES;
    for (int64_t k = 0; k < n; k += UNIT) {
        F32 numbers[N], largest = broadcast(0.0f);
        for (int i = 0; i < N; ++i) {
            numbers[i] = load(x + k + i * LANES);
            largest = max(largest, abs(numbers[i]));
        }
        float peak = reduce_max(largest), scale = peak / 127, inverse = peak > 0 ? 127 / peak : 0;
        alignas(64) int32_t whole[UNIT];
        for (int i = 0; i < N; ++i) store_u32(whole + i * LANES, SIMD(cvtps_epi32)(numbers[i] * broadcast(inverse)));
        int32_t totals[2] = {};
        for (int i = 0; i < UNIT; ++i) {
            to.inputs[k + i / 4 * 4 + (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4)] = static_cast<int8_t>(whole[i]);
            totals[i / 16] += whole[i];
        }
        to.scales[k / UNIT] = scale;
        for (int half = 0; half < 2; ++half) to.sums[k / 16 + half] = scale * static_cast<float>(totals[half]);
    }
}

}  // namespace

void blendserve_prepare_rows(const LinearArgs& c, float* to) {
    for (int64_t r = 0; r < c.rows; ++r) {
        PreparedRow row(to + r * PreparedRow::floats(c.inputs), c.inputs);
        (c.int8_rows ? prepare_int8 : prepare_exact)(c.x + r * c.x_row, c.inputs, row);
    }
}

void blendserve_gemv_strip(const LinearArgs& c, int64_t o) {
    by_form(c.weights.form, [&](auto f) {
        using F = decltype(f);
        LinearArgs some = c;  // four rows, two, one
        for (int64_t done = 0, n; done < c.rows; done += n) {
            int64_t left = c.rows - done;
            n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            (n == 4 ? by_rows<F, 4> : n == 2 ? by_rows<F, 2> : by_rows<F, 1>)(some, o);
            some.x += n * c.x_row, some.out += n * c.out_row, some.prepared += n * PreparedRow::floats(c.inputs);
        }
    });
}

void blendserve_strip_numbers(const Matrix& weights, int64_t inputs, int64_t o, elem_t* to, int64_t to_row) {
    const char* strip = strip_of(weights, inputs, o);
    by_form(weights.form, [&](auto f) {
        for (int lane = 0; lane < STRIP; lane += LANES) write_numbers<decltype(f)>(strip, lane, inputs, to + lane * to_row, to_row);
    });
}

void blendserve_take(const TakeArgs& c) {
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
        auto* numbers = rows_of_strip.take<elem_t>(STRIP * c.inputs);
        int64_t strip = -1;  // whose numbers these are
#pragma omp for schedule(static)
        for (int64_t i = 0; i < c.n; ++i) {
            if (c.rows[i] / STRIP != strip) {
                strip = c.rows[i] / STRIP;
                blendserve_strip_numbers(c.weights, c.inputs, c.rows[i], numbers, c.inputs);
            }
            std::memcpy(c.out + i * c.inputs, numbers + c.rows[i] % STRIP * c.inputs, sizeof(elem_t) * c.inputs);
        }
    }
}
