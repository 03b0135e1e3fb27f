// The three loops of coded KV: bytes <-> symbols (rANS), and symbols -> numbers. kernels/coding.py is the plain form, and
// gives the same bits: sums are of integers, and what follows them is rounded as IEEE 754 says, one operation at a time.
// One thread: callers decode several chunks at a time.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t STREAMS = 4;     // symbols j, j + 4, ... of a token belong to one rANS state
constexpr uint32_t LOWEST = 1 << 16;
constexpr int PRECISION = 12, RATE = 5, ONE = 1 << 12;
constexpr int64_t CONTEXTS = 9, SYMBOLS = 32, ESCAPE = 31;

// What symbols are coded with.
struct Model {
    const uint8_t *classes;         // [64, CONTEXTS]: how large it was lately, and the token -> class
    const uint8_t *slots;           // [64, 4096]: class and slot -> symbol
    const uint16_t *width, *start;  // [64, SYMBOLS]: slots of a symbol, and the first of them
};

// How large an axis has been lately: four steps an octave, of a mean with 12 bits behind the point.
inline uint8_t size_of(int32_t mean) {
    float x = static_cast<float>(std::max(mean, 4));
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint8_t>(std::min((bits >> 21) - (129 << 2), 63));
}

inline void sizes_of(const std::vector<int32_t>& means, std::vector<uint8_t>& sizes) {
    for (size_t j = 0; j < means.size(); ++j) sizes[j] = size_of(means[j]);
}

inline void learn(std::vector<int32_t>& means, const int8_t* values) {
    for (size_t j = 0; j < means.size(); ++j)
        means[j] += ((std::abs(static_cast<int32_t>(values[j])) * ONE) - means[j]) >> RATE;
}

inline int8_t value_of(int64_t symbol) {
    return static_cast<int8_t>(symbol & 1 ? (symbol + 1) / 2 : -(symbol / 2));
}

inline int64_t symbol_of(int32_t value) {
    int32_t symbol = value > 0 ? 2 * value - 1 : -2 * value;
    return symbol < ESCAPE ? symbol : ESCAPE;
}

}  // namespace

struct UnpackCall {
    const uint8_t* words;       // [n_words] of 2 bytes, at any address
    const int8_t* escapes;      // [n_escapes]
    const uint8_t* contexts;    // [tokens]
    const int32_t* means;       // [axes]: what to expect before anything is known
    Model model;
    int8_t* values;             // [tokens, axes]
    uint32_t states[STREAMS];
    int64_t n_words, n_escapes, tokens, axes;
    int64_t wrong;              // out: 1 = these are not the bytes of such symbols
};

extern "C" void blendserve_unpack(UnpackCall* call) {
    UnpackCall& c = *call;
    std::vector<int32_t> means(c.means, c.means + c.axes);
    std::vector<uint8_t> sizes(c.axes);
    uint32_t x[STREAMS];
    std::copy(c.states, c.states + STREAMS, x);
    int64_t word = 0, escape = 0;
    c.wrong = 1;
    for (int64_t t = 0; t < c.tokens; ++t) {
        sizes_of(means, sizes);
        const uint8_t* classes = c.model.classes + c.contexts[t];
        int8_t* values = c.values + t * c.axes;
        for (int64_t j = 0; j < c.axes; ++j) {
            uint32_t& state = x[j % STREAMS];
            int64_t kind = classes[sizes[j] * CONTEXTS];
            uint32_t slot = state & (ONE - 1);
            int64_t symbol = c.model.slots[kind << PRECISION | slot];
            state = c.model.width[kind * SYMBOLS + symbol] * (state >> PRECISION) + slot -
                    c.model.start[kind * SYMBOLS + symbol];
            if (state < LOWEST) {
                if (word == c.n_words) return;
                uint16_t next;
                std::memcpy(&next, c.words + 2 * word++, 2);
                state = state << 16 | next;
            }
            if (symbol == ESCAPE) {
                if (escape == c.n_escapes) return;
                values[j] = c.escapes[escape++];
            } else {
                values[j] = value_of(symbol);
            }
        }
        learn(means, values);
    }
    c.wrong = word != c.n_words || escape != c.n_escapes;
    for (uint32_t state : x) c.wrong |= state != LOWEST;
}

struct PackCall {
    const int8_t* values;     // [tokens, axes]
    const uint8_t* contexts;  // [tokens]
    const int32_t* means;     // [axes]
    Model model;
    uint16_t* words;          // out: room for [tokens * axes], filled from the end
    int8_t* escapes;          // out: room for [tokens * axes]
    uint32_t states[STREAMS]; // out
    int64_t tokens, axes;
    int64_t n_words, n_escapes;  // out
};

extern "C" void blendserve_pack(PackCall* call) {
    PackCall& c = *call;
    std::vector<int32_t> means(c.means, c.means + c.axes);
    std::vector<uint8_t> sizes(c.axes), kinds(c.tokens * c.axes), symbols(c.tokens * c.axes);
    c.n_escapes = 0;
    for (int64_t t = 0; t < c.tokens; ++t) {
        sizes_of(means, sizes);
        const int8_t* values = c.values + t * c.axes;
        for (int64_t j = 0; j < c.axes; ++j) {
            int64_t kind = c.model.classes[sizes[j] * CONTEXTS + c.contexts[t]], symbol = symbol_of(values[j]);
            if (!c.model.width[kind * SYMBOLS + symbol]) symbol = ESCAPE;
            if (symbol == ESCAPE) c.escapes[c.n_escapes++] = values[j];
            kinds[t * c.axes + j] = static_cast<uint8_t>(kind);
            symbols[t * c.axes + j] = static_cast<uint8_t>(symbol);
        }
        learn(means, values);
    }
    std::fill(c.states, c.states + STREAMS, LOWEST);
    int64_t word = c.tokens * c.axes;
    for (int64_t t = c.tokens - 1; t >= 0; --t)
        for (int64_t j = c.axes - 1; j >= 0; --j) {
            uint32_t& state = c.states[j % STREAMS];
            int64_t at = kinds[t * c.axes + j] * SYMBOLS + symbols[t * c.axes + j];
            uint64_t width = c.model.width[at];
            if (state >= width << (32 - PRECISION)) {
                c.words[--word] = static_cast<uint16_t>(state);
                state >>= 16;
            }
            state = static_cast<uint32_t>(state / width << PRECISION | (state % width + c.model.start[at]));
        }
    c.n_words = c.tokens * c.axes - word;
}

// A matrix of integers, laid out for instructions that multiply four bytes at a time: [outputs / 16, inputs / 4, 16, 4],
// plus 128.
struct Matrix {
    const uint8_t* weights;
    int64_t inputs;  // a multiple of 4
};

struct ReconstructCall {
    const int8_t *below, *symbols;  // [tokens, width] and [tokens, axes]; symbols may be null
    Matrix map, residual;
    const float *map_scale, *mean, *residual_scale, *code_scale, *code_zero;  // [width]
    float* out;       // [heads, tokens, dim], or null; heads of keys, then of values
    uint16_t* short_out;  // the same in bf16, or null
    int8_t* codes;    // out: [tokens, width]
    int64_t tokens, width, heads, dim;  // width = heads * dim, a multiple of 16; dim divides 16 or is a multiple
};

namespace {

constexpr int64_t BLOCK = 16;  // outputs

#if defined(__AVX512VNNI__)

struct Sum {
    __m512i v = _mm512_setzero_si512();
    void add(__m512i w, int32_t x) { v = _mm512_dpbusd_epi32(v, w, _mm512_set1_epi32(x)); }
    void store(int32_t* to) const { _mm512_storeu_si512(to, v); }
};
using Weights = __m512i;
inline Weights weights_at(const uint8_t* at) { return _mm512_loadu_si512(at); }

#elif defined(__AVX512BW__)

struct Weights {
    __m512i low, high;
};
inline Weights weights_at(const uint8_t* at) {
    const __m256i* two = reinterpret_cast<const __m256i*>(at);
    return {_mm512_cvtepu8_epi16(_mm256_loadu_si256(two)), _mm512_cvtepu8_epi16(_mm256_loadu_si256(two + 1))};
}
struct Sum {
    __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();
    void add(const Weights& w, int32_t x) {
        __m512i four = _mm512_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(x)));
        low = _mm512_add_epi32(low, _mm512_madd_epi16(w.low, four));
        high = _mm512_add_epi32(high, _mm512_madd_epi16(w.high, four));
    }
    void store(int32_t* to) const {
        int32_t pairs[32];
        _mm512_storeu_si512(pairs, low);
        _mm512_storeu_si512(pairs + 16, high);
        for (int64_t i = 0; i < BLOCK; ++i) to[i] = pairs[2 * i] + pairs[2 * i + 1];
    }
};

#else

struct Weights {
    __m256i quarter[4];
};
inline Weights weights_at(const uint8_t* at) {
    const __m128i* part = reinterpret_cast<const __m128i*>(at);
    Weights w;
    for (int64_t i = 0; i < 4; ++i) w.quarter[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128(part + i));
    return w;
}
struct Sum {
    __m256i quarter[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                          _mm256_setzero_si256()};
    void add(const Weights& w, int32_t x) {
        __m256i four = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(x)));
        for (int64_t i = 0; i < 4; ++i)
            quarter[i] = _mm256_add_epi32(quarter[i], _mm256_madd_epi16(w.quarter[i], four));
    }
    void store(int32_t* to) const {
        int32_t pairs[32];
        for (int64_t i = 0; i < 4; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs) + i, quarter[i]);
        for (int64_t i = 0; i < BLOCK; ++i) to[i] = pairs[2 * i] + pairs[2 * i + 1];
    }
};

#endif

// As many sums as registers hold.
#if defined(__AVX512VNNI__)
constexpr int64_t ROWS = 6, BLOCKS = 4;
#elif defined(__AVX512BW__)
constexpr int64_t ROWS = 6, BLOCKS = 2;
#else
constexpr int64_t ROWS = 2, BLOCKS = 1;
#endif

inline int32_t four_at(const int8_t* at) {
    int32_t x;
    std::memcpy(&x, at, 4);
    return x;
}

// Sums of `rows` tokens for some blocks of outputs.
template <int64_t rows, int64_t blocks>
inline void multiply(const Matrix& m, int64_t at, const int8_t* x, int64_t stride, Sum (&sums)[blocks][rows]) {
    const uint8_t* weights = m.weights + at * m.inputs;
    for (int64_t i = 0; i < m.inputs; i += 4, weights += 4 * BLOCK) {
        Weights w[blocks];
        for (int64_t n = 0; n < blocks; ++n) w[n] = weights_at(weights + n * BLOCK * m.inputs);
        for (int64_t r = 0; r < rows; ++r) {
            int32_t four = four_at(x + r * stride + i);
            for (int64_t n = 0; n < blocks; ++n) sums[n][r].add(w[n], four);
        }
    }
}

// What the 128 that every weight has too much adds up to.
inline int32_t surplus(const int8_t* x, int64_t n) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return 128 * sum;
}

inline uint16_t rounded_short(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Sums of a token -> its numbers and codes of one block.
inline void finish(const ReconstructCall& c, int64_t t, int64_t block, const int32_t (&map)[BLOCK], int32_t map_surplus,
                   const int32_t* residual, int32_t residual_surplus) {
    constexpr float MAGIC = 12582912.0f;  // adding it rounds to the nearest integer, halves to even
    float y[BLOCK];
    int8_t codes[BLOCK];
    uint16_t shorts[BLOCK];
    for (int64_t i = 0; i < BLOCK; ++i)
        y[i] = static_cast<float>(map[i] - map_surplus) * c.map_scale[block + i] + c.mean[block + i];
    for (int64_t i = 0; i < BLOCK; ++i)
        y[i] += static_cast<float>(residual[i] - residual_surplus) * c.residual_scale[block + i];
    for (int64_t i = 0; i < BLOCK; ++i) {
        float code = y[i] * c.code_scale[block + i] + c.code_zero[block + i];
        code = code < -128.0f ? -128.0f : code;
        code = code > 127.0f ? 127.0f : code;
        codes[i] = static_cast<int8_t>(static_cast<int32_t>((code + MAGIC) - MAGIC));
    }
    for (int64_t i = 0; i < BLOCK; ++i) shorts[i] = rounded_short(y[i]);
    std::memcpy(c.codes + t * c.width + block, codes, BLOCK);
    int64_t step = std::min(BLOCK, c.dim);  // numbers of one head, side by side
    for (int64_t i = 0; i < BLOCK; i += step) {
        int64_t to = ((block + i) / c.dim * c.tokens + t) * c.dim + (block + i) % c.dim;
        if (c.out) std::memcpy(c.out + to, y + i, step * sizeof(float));
        if (c.short_out) std::memcpy(c.short_out + to, shorts + i, step * sizeof(uint16_t));
    }
}

template <int64_t rows, int64_t blocks>
void reconstruct_blocks(const ReconstructCall& c, int64_t t, int64_t at, const int32_t* map_surplus,
                    const int32_t* residual_surplus) {
    Sum map[blocks][rows], residual[blocks][rows];
    multiply<rows, blocks>(c.map, at, c.below + t * c.width, c.width, map);
    int64_t axes = c.residual.inputs;
    if (c.symbols) multiply<rows, blocks>(c.residual, at, c.symbols + t * axes, axes, residual);
    for (int64_t n = 0; n < blocks; ++n)
        for (int64_t r = 0; r < rows; ++r) {
            int32_t mapped[BLOCK], rest[BLOCK];
            map[n][r].store(mapped);
            residual[n][r].store(rest);
            finish(c, t + r, at + n * BLOCK, mapped, map_surplus[r], rest, residual_surplus[r]);
        }
}

template <int64_t rows>
void reconstruct_rows(const ReconstructCall& c, int64_t t) {
    int32_t map_surplus[rows], residual_surplus[rows];
    for (int64_t r = 0; r < rows; ++r) {
        int64_t at = (t + r) * c.width, axes = c.residual.inputs;
        map_surplus[r] = surplus(c.below + at, c.width);
        residual_surplus[r] = c.symbols ? surplus(c.symbols + (t + r) * axes, axes) : 0;
    }
    int64_t block = 0;
    for (; block + BLOCKS * BLOCK <= c.width; block += BLOCKS * BLOCK)
        reconstruct_blocks<rows, BLOCKS>(c, t, block, map_surplus, residual_surplus);
    for (; block < c.width; block += BLOCK)
        reconstruct_blocks<rows, 1>(c, t, block, map_surplus, residual_surplus);
}

}  // namespace

extern "C" void blendserve_reconstruct(const ReconstructCall* call) {
    const ReconstructCall& c = *call;
    int64_t t = 0;
    for (; t + ROWS <= c.tokens; t += ROWS) reconstruct_rows<ROWS>(c, t);
    for (; t < c.tokens; ++t) reconstruct_rows<1>(c, t);
}
