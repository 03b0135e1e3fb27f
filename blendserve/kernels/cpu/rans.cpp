// The three loops of codec `predict`: int8 symbols <-> bytes (rANS), and symbols -> numbers. store/codecs/predict/rans.py is the
// plain form with the same bits: sums are of integers, and each step after them is rounded as IEEE 754 says.
// One thread: callers decode several chunks at a time.

#include <array>
#include <iterator>
#include <vector>

#include "kernels.h"

namespace {

constexpr int64_t STREAMS = 16;  // symbols j, j + 16, ... of a token belong to one rANS state
constexpr uint32_t LOWEST = 1 << 16;
constexpr int PRECISION = 12, RATE = 5, ONE = 1 << 12;
constexpr int64_t SIZES = 64, MODELS = 64, SYMBOLS = 32, ESCAPE = 31, UNKNOWN = 8;
constexpr int64_t COMPARED = 10;  // symbols, mostly the most frequent ones, that are found without the table
constexpr int64_t RATIOS[] = {6, 9, 12, 15, 18, 23, 32};  // between contexts: a token's symbols, in 16ths of the mean token's

// How large an axis has been lately: four steps an octave, of a mean with 12 bits behind the point.
inline uint8_t size_of(int32_t mean) {
    const float x = static_cast<float>(std::max(mean, 4));
    return static_cast<uint8_t>(std::min((load_as<int32_t>(&x) >> 21) - (129 << 2), 63));
}

inline void sizes_of(const std::vector<int32_t>& means, std::vector<uint8_t>& sizes) {
    for (size_t j = 0; j < means.size(); ++j) sizes[j] = size_of(means[j]);
}

// Models of all axes: model_of [64] of the token's context.
inline void models_of(const uint8_t* model_of, const std::vector<uint8_t>& sizes, std::vector<uint8_t>& models) {
    size_t j = 0;
#if defined(__AVX512BW__)
    auto words = [](const uint8_t* at) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); };
    const __m512i low = words(model_of), high = words(model_of + 32);
    for (; j + 32 <= sizes.size(); j += 32) {
        const __m512i found = _mm512_permutex2var_epi16(low, words(sizes.data() + j), high);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(models.data() + j), _mm512_cvtepi16_epi8(found));
    }
#endif
    for (; j < sizes.size(); ++j) models[j] = model_of[sizes[j]];
}

inline void update_means(std::vector<int32_t>& means, const int8_t* values) {
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

// What is read, and how far.
struct Input {
    const uint8_t* words;
    const int8_t* escapes;
    int64_t n_words, n_escapes, word = 0, escape = 0;
};

#if defined(__AVX512BW__)

static_assert(STREAMS == 16);
using States = __m512i;
inline bool are_lowest(States x) { return !_mm512_cmpneq_epi32_mask(x, _mm512_set1_epi32(LOWEST)); }

inline __m256i next_words(const Input& in) {
    const uint8_t* at = in.words + 2 * in.word;
    if (in.word + STREAMS <= in.n_words) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    uint16_t last[STREAMS] = {};
    std::memcpy(last, at, 2 * (in.n_words - in.word));
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(last));
}

// Where the first symbols of each axis' class begin. That depends on no state, so no step waits for it.
struct Lookup {
    const RansDecodeArgs& model;
    const int64_t row;
    std::vector<uint16_t> starts;

    explicit Lookup(const RansDecodeArgs& c) : model(c), row((c.axes + 31) / 32 * 32), starts(COMPARED * row) {}

    // models: of all axes, and some behind them
    void prepare(const std::vector<uint8_t>& models) {
        __m512i low[COMPARED], high[COMPARED];
#pragma GCC unroll 16
        for (int64_t k = 0; k < COMPARED; ++k) {
            low[k] = _mm512_loadu_si512(model.cdf_head + k * MODELS);
            high[k] = _mm512_loadu_si512(model.cdf_head + k * MODELS + 32);
        }
        for (int64_t j = 0; j < row; j += 32) {
            const __m512i at = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(models.data() + j)));
#pragma GCC unroll 16
            for (int64_t k = 0; k < COMPARED; ++k)
                _mm512_storeu_si512(starts.data() + k * row + j, _mm512_permutex2var_epi16(low[k], at, high[k]));
        }
    }

    __m256i start(int64_t k, int64_t axis) const {  // of symbol k + 1
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(starts.data() + k * row + axis));
    }
};

// States after a symbol, with words of 16 bits where they became small -> whether there were enough.
inline bool renew(Input& in, States& x, __m512i width, __m512i place, __mmask16 alive) {
    const __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(width, _mm512_srli_epi32(x, PRECISION)), place);
    const __mmask16 low = _mm512_mask_cmplt_epu32_mask(alive, next, _mm512_set1_epi32(LOWEST));
    const int64_t n = __builtin_popcount(low);
    if (in.word + n > in.n_words) return false;
    const __m512i fresh = _mm512_maskz_expand_epi32(low, _mm512_cvtepu16_epi32(next_words(in)));
    in.word += n;
    x = _mm512_mask_mov_epi32(x, alive, next);
    x = _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(next, 16), fresh);
    return true;
}

inline void store_values(__m256i symbol, int8_t* values) {
    const __m256i one = _mm256_set1_epi16(1), half = _mm256_srli_epi16(_mm256_add_epi16(symbol, one), 1);
    const __m256i sign = _mm256_sub_epi16(_mm256_and_si256(symbol, one), one);  // -1 for what is not above 0
    const __m256i value = _mm256_sub_epi16(_mm256_xor_si256(half, sign), sign);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm256_cvtepi16_epi8(value));
}

// Any symbols, by one look-up, which waits for memory.
inline bool step_by_slots(const RansDecodeArgs& model, Input& in, States& x, const uint8_t* models, __m512i slot, __mmask16 live,
                          int8_t* values) {
    const __m512i model_id = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(models)));
    const __m512i at = _mm512_or_si512(_mm512_slli_epi32(model_id, PRECISION), slot);
    const __m512i found = _mm512_i32gather_epi32(at, model.decode_table, 4);
    const __m512i place = _mm512_and_si512(_mm512_srli_epi32(found, 5), _mm512_set1_epi32(ONE - 1));
    if (!renew(in, x, _mm512_srli_epi32(found, 17), place, live)) return false;
    const __m512i symbol = _mm512_and_si512(found, _mm512_set1_epi32(SYMBOLS - 1));
    store_values(_mm512_cvtepi32_epi16(symbol), values);
    for (uint32_t left = _mm512_mask_cmpeq_epi32_mask(live, symbol, _mm512_set1_epi32(ESCAPE)); left; left &= left - 1) {
        if (in.escape == in.n_escapes) return false;
        values[__builtin_ctz(left)] = in.escapes[in.escape++];
    }
    return true;
}

// The symbols of `live` streams from `axis` on -> whether there were enough bytes. All values are written.
inline bool step(const Lookup& lookup, Input& in, States& x, const uint8_t* models, int64_t axis, uint32_t live, int8_t* values) {
    const __m512i slot = _mm512_and_si512(x, _mm512_set1_epi32(ONE - 1));
    const __m256i at = _mm512_cvtepi32_epi16(slot);
    // `behind` is small where a symbol's first slot is reached, and else, as numbers of 16 bits start over, large.
    __m256i behind = _mm256_setzero_si256(), place = at, most = _mm256_setzero_si256(), symbol = _mm256_set1_epi16(COMPARED);
#pragma GCC unroll 16
    for (int64_t k = 0; k < COMPARED; ++k) {
        behind = _mm256_sub_epi16(at, lookup.start(k, axis));
        place = _mm256_min_epu16(place, behind);
        most = _mm256_max_epu16(most, behind);
        symbol = _mm256_add_epi16(symbol, _mm256_srai_epi16(behind, 15));
    }
    const __mmask16 alive = static_cast<__mmask16>(live);
    if (live & ~_mm256_movepi16_mask(behind))
        return step_by_slots(lookup.model, in, x, models + axis, slot, alive, values);
    const __m256i width = _mm256_sub_epi16(place, most);  // from the symbol's first slot to the next one's
    if (!renew(in, x, _mm512_cvtepu16_epi32(width), _mm512_cvtepu16_epi32(place), alive)) return false;
    store_values(symbol, values);
    return true;
}

#else

using States = std::array<uint32_t, STREAMS>;
inline bool are_lowest(const States& states) { return std::count(states.begin(), states.end(), LOWEST) == STREAMS; }

struct Lookup {
    const RansDecodeArgs& model;
    void prepare(const std::vector<uint8_t>&) {}
};

inline bool step(const Lookup& lookup, Input& in, States& states, const uint8_t* models, int64_t axis, uint32_t live, int8_t* values) {
    models += axis;
    for (int64_t i = 0; live >> i & 1; ++i) {
        uint32_t x = states[i], slot = x & (ONE - 1), model_id = models[i];
        uint32_t found = lookup.model.decode_table[model_id << PRECISION | slot], symbol = found & (SYMBOLS - 1);
        x = (found >> 17) * (x >> PRECISION) + (found >> 5 & (ONE - 1));
        if (x < LOWEST) {
            if (in.word == in.n_words) return false;
            x = x << 16 | load_as<uint16_t>(in.words + 2 * in.word++);
        }
        states[i] = x;
        if (symbol == ESCAPE && in.escape == in.n_escapes) return false;
        values[i] = symbol == ESCAPE ? in.escapes[in.escape++] : value_of(symbol);
    }
    return true;
}

#endif

// How large each token's symbols of the layer below are, relative to the mean token's.
std::vector<uint8_t> contexts_of(const RansDecodeArgs& c) {
    std::vector<uint8_t> contexts(c.tokens, UNKNOWN);
    if (!c.below) return contexts;
    std::vector<int64_t> sums(c.tokens);
    int64_t total = 0;
    for (int64_t t = 0; t < c.tokens; ++t) {
        int32_t sum = 0;
        for (int64_t j = 0; j < c.below_axes; ++j) sum += std::abs(static_cast<int32_t>(c.below[t * c.below_axes + j]));
        total += sums[t] = sum;
    }
    for (int64_t t = 0; t < c.tokens; ++t) {
        const int64_t ratio = 16 * sums[t] * c.tokens / std::max<int64_t>(total, 1);
        contexts[t] = static_cast<uint8_t>(std::upper_bound(std::begin(RATIOS), std::end(RATIOS), ratio) - RATIOS);
    }
    return contexts;
}

}  // namespace

int64_t blendserve_rans_decode(const RansDecodeArgs& c) {
    const int64_t axes = c.axes;
    const std::vector<uint8_t> contexts = contexts_of(c);
    Lookup lookup{c};
    std::vector<int32_t> means(c.means, c.means + axes);
    std::vector<uint8_t> sizes(axes), models(axes + 2 * STREAMS);
    std::vector<int8_t> values(axes + STREAMS);
    Input in{c.words, c.escapes, c.n_words, c.n_escapes};
    States x = load_as<States>(c.states);
    for (int64_t t = 0; t < c.tokens; ++t) {
        sizes_of(means, sizes);
        models_of(c.model_of + contexts[t] * SIZES, sizes, models);
        lookup.prepare(models);
        for (int64_t j = 0; j < axes; j += STREAMS) {
            const uint32_t live = axes - j < STREAMS ? (1u << (axes - j)) - 1 : (1u << STREAMS) - 1;
            if (!step(lookup, in, x, models.data(), j, live, values.data() + j)) return false;
        }
        update_means(means, values.data());
        std::copy(values.data(), values.data() + axes, c.symbols + t * axes);
    }
    return in.word == c.n_words && in.escape == c.n_escapes && are_lowest(x);
}

void blendserve_rans_encode(const RansEncodeArgs& c) {
    const int64_t tokens = c.tokens, axes = c.axes;
    const uint32_t* table = c.encode_table;
    std::vector<int32_t> running(c.means, c.means + axes);
    std::vector<uint8_t> sizes(axes), models(tokens * axes), coded(tokens * axes);
    int64_t n_escapes = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        sizes_of(running, sizes);
        const int8_t* values = c.symbols + t * axes;
        for (int64_t j = 0; j < axes; ++j) {
            int64_t model = c.model_of[c.contexts[t] * SIZES + sizes[j]], symbol = symbol_of(values[j]);
            if (table[model * SYMBOLS + symbol] < 1 << 16) symbol = ESCAPE;
            if (symbol == ESCAPE) c.escapes[n_escapes++] = values[j];
            models[t * axes + j] = static_cast<uint8_t>(model);
            coded[t * axes + j] = static_cast<uint8_t>(symbol);
        }
        update_means(running, values);
    }
    std::fill(c.states, c.states + STREAMS, LOWEST);
    int64_t word = tokens * axes;
    for (int64_t t = tokens - 1; t >= 0; --t)
        for (int64_t j = axes - 1; j >= 0; --j) {
            uint32_t& state = c.states[j % STREAMS];
            uint32_t entry = table[models[t * axes + j] * SYMBOLS + coded[t * axes + j]];
            uint64_t width = entry >> 16, start = entry & 0xffff;
            if (state >= width << (32 - PRECISION)) {
                c.words[--word] = static_cast<uint16_t>(state);
                state >>= 16;
            }
            state = static_cast<uint32_t>(state / width << PRECISION | (state % width + start));
        }
    c.counts[0] = tokens * axes - word;
    c.counts[1] = n_escapes;
}

namespace {

// A matrix of integers is laid out for instructions that multiply four bytes at a time: [outputs / 16, inputs / 4, 16, 4], plus 128.

constexpr int64_t BLOCK = 16;  // outputs

#if defined(__AVX512VNNI__)

constexpr int64_t ROWS = 6, BLOCKS = 4;  // as many sums as registers hold
struct Sum {
    __m512i v = _mm512_setzero_si512();
    void add(__m512i w, int32_t x) { v = _mm512_dpbusd_epi32(v, w, _mm512_set1_epi32(x)); }
    void store(int32_t* to) const { _mm512_storeu_si512(to, v); }
};
using Weights = __m512i;
inline Weights weights_at(const uint8_t* at) { return _mm512_loadu_si512(at); }

#else

constexpr int64_t ROWS = 2, BLOCKS = 1;
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
    __m256i quarter[4] = {};
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

// Sums of `rows` tokens for some blocks of outputs, in registers: x [rows, inputs], `inputs` a multiple of 4.
template <int64_t rows, int64_t blocks>
inline void multiply(const uint8_t* weights, int64_t inputs, const int8_t* x, Sum (&sums)[blocks][rows]) {
    Sum here[blocks][rows];
    for (int64_t i = 0; i < inputs; i += 4, weights += 4 * BLOCK) {
        Weights w[blocks];
#pragma GCC unroll 8
        for (int64_t n = 0; n < blocks; ++n) w[n] = weights_at(weights + n * BLOCK * inputs);
#pragma GCC unroll 8
        for (int64_t r = 0; r < rows; ++r) {
            const int32_t four = load_as<int32_t>(x + r * inputs + i);
#pragma GCC unroll 8
            for (int64_t n = 0; n < blocks; ++n) here[n][r].add(w[n], four);
        }
    }
#pragma GCC unroll 8
    for (int64_t n = 0; n < blocks; ++n)
#pragma GCC unroll 8
        for (int64_t r = 0; r < rows; ++r) sums[n][r] = here[n][r];
}

// What the 128 that every weight has too much adds up to, for each token; x [tokens, n], null = zeros.
std::vector<int32_t> surplus_of(const int8_t* x, int64_t tokens, int64_t n) {
    std::vector<int32_t> sums(tokens);
    for (int64_t t = 0; x && t < tokens; ++t)
        for (int64_t i = t * n; i < (t + 1) * n; ++i) sums[t] += 128 * x[i];
    return sums;
}

inline uint16_t rounded_short(float x) {
    const uint32_t bits = load_as<uint32_t>(&x);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Where a block of outputs goes: to a head, or to several whole ones.
struct Place {
    int64_t block, to[BLOCK];  // of the first token, in numbers
};
inline Place place_of(const DequantizeArgs& c, int64_t block) {
    Place place{block, {}};
    for (int64_t i = 0; i < BLOCK; ++i)
        place.to[i] = (block + i) / c.dim * c.tokens * c.dim + (block + i) % c.dim;
    return place;
}

// A token's block of numbers to where it goes.
inline void place_block(const DequantizeArgs& c, int64_t t, const Place& place, const float* numbers, const uint16_t* shorts) {
    auto put = [&](int64_t i, auto n) {  // of a size that the compiler knows
        const int64_t to = place.to[i] + t * c.dim;
        if (c.out) std::memcpy(c.out + to, numbers + i, n * sizeof(float));
        if (c.bf16_out) std::memcpy(c.bf16_out + to, shorts + i, n * sizeof(uint16_t));
    };
    if (c.dim >= BLOCK) return put(0, std::integral_constant<int64_t, BLOCK>());
    for (int64_t i = 0; i < BLOCK; ++i) put(i, std::integral_constant<int64_t, 1>());
}

// Sums of a token -> its numbers and codes of one block.
inline void finish(const DequantizeArgs& c, int64_t t, const Place& place, const Sum& map_sum, int32_t map_surplus,
                   const Sum& residual_sum, int32_t residual_surplus) {
    constexpr float MAGIC = 12582912.0f;  // adding it rounds to the nearest integer, halves to even
    const int64_t block = place.block;
    float y[BLOCK];
    int8_t codes[BLOCK];
    uint16_t shorts[BLOCK];
    int32_t map[BLOCK], residual[BLOCK];
    map_sum.store(map);
    residual_sum.store(residual);
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
    place_block(c, t, place, y, shorts);
}

struct Surplus {
    std::vector<int32_t> map, residual;  // [tokens]
};

template <int64_t rows, int64_t blocks>
void dequantize_rows(const DequantizeArgs& c, int64_t t, const Place (&places)[blocks], const Surplus& surplus) {
    const int64_t axes = c.axes, at = places[0].block;
    Sum map[blocks][rows], residual[blocks][rows];
    multiply(c.map + at * c.width, c.width, c.below + t * c.width, map);
    if (c.symbols) multiply(c.residual + at * axes, axes, c.symbols + t * axes, residual);
    for (int64_t n = 0; n < blocks; ++n)
        for (int64_t r = 0; r < rows; ++r)
            finish(c, t + r, places[n], map[n][r], surplus.map[t + r], residual[n][r], surplus.residual[t + r]);
}

// Some outputs of all tokens: their weights stay in the nearest cache.
template <int64_t blocks>
void dequantize_blocks(const DequantizeArgs& c, int64_t at, const Surplus& surplus) {
    Place places[blocks];
    for (int64_t n = 0; n < blocks; ++n) places[n] = place_of(c, at + n * BLOCK);
    int64_t t = 0;
    for (; t + ROWS <= c.tokens; t += ROWS) dequantize_rows<ROWS, blocks>(c, t, places, surplus);
    for (; t < c.tokens; ++t) dequantize_rows<1, blocks>(c, t, places, surplus);
}

}  // namespace

void blendserve_dequantize(const DequantizeArgs& c) {
    const Surplus surplus{surplus_of(c.below, c.tokens, c.width), surplus_of(c.symbols, c.tokens, c.axes)};
    int64_t block = 0;
    for (; block + BLOCKS * BLOCK <= c.width; block += BLOCKS * BLOCK) dequantize_blocks<BLOCKS>(c, block, surplus);
    for (; block < c.width; block += BLOCK) dequantize_blocks<1>(c, block, surplus);
}
