// The `ridge` correction, on CPUs that multiply bf16 (AVX512-BF16). blend/correct.py is the plain form, and says what for.
//
//     known = [key | value] of the recomputed tokens, centred and scaled        [rows, 2 dim]
//     (known' known + penalty) W = known' left                                  one small system a kv head
//     shift = [key | value] W + constant of the chunk, for every token          [tokens, 2 dim]
//
// The shift of values is added where they are; the shift of keys is given back, as they have to be rotated.

#include <cmath>
#include <vector>

#include "common.h"

// One call, as the caller fills it in. Strides are in elements; the innermost one is 1.
struct RidgeCall {
    const uint16_t* keys;  // bf16 [kv, tokens, dim], before RoPE
    uint16_t* values;      // bf16 [kv, tokens, dim]
    uint16_t* shift;       // bf16 [kv, tokens, dim], of the keys: written
    const int64_t* at;     // [rows], the recomputed tokens
    const float* left;     // [kv, rows, 2 dim], how much they moved beyond their chunk's mean
    const float* means;    // [kv, chunks, 2 dim]
    const int64_t *begins, *ends;  // [chunks], tokens of each; those of no chunk get a zero mean
    int64_t k_head, k_row, v_head, v_row;
    int64_t kv, tokens, dim, rows, chunks;
    float penalty;
    int64_t threads;
};

namespace {

constexpr int TILE = 6;           // rows: with 4 vectors each they fill the registers
constexpr int BLOCK = 16 * TILE;  // tokens of an item of work
constexpr int MAX_DIM = 256;
constexpr float LEAST = 1e-6f;  // size of features that do not vary

float wide(uint16_t x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

// out [n, m] = a' b for a [rows, n] and b [rows, m]; n and m are multiples of 8 and STRIP.
void transposed_product(const float* a, const float* b, int64_t rows, int64_t n, int64_t m, float* out) {
    for (int64_t i = 0; i < n; i += 4)
        for (int64_t j = 0; j < m; j += STRIP) {
            __m512 sum[4][4] = {};
            for (int64_t s = 0; s < rows; ++s) {
                __m512 y[4];
                for (int v = 0; v < 4; ++v) y[v] = _mm512_loadu_ps(b + s * m + j + v * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < 4; ++r) {
                    __m512 x = _mm512_set1_ps(a[s * n + i + r]);
                    for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_fmadd_ps(x, y[v], sum[r][v]);
                }
            }
            for (int r = 0; r < 4; ++r)
                for (int v = 0; v < 4; ++v) _mm512_storeu_ps(out + (i + r) * m + j + v * LANES, sum[r][v]);
        }
}

// row -= factor * other
void subtract(float* row, const float* other, float factor, int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) row[j] -= factor * other[j];
}

// Solves gram x = right in place of `right` [n, n]; gram [n, n] is symmetric and positive definite, and is used up.
void solve(float* gram, float* right, int64_t n) {
    for (int64_t k = 0; k < n; ++k)
        for (int64_t i = k + 1; i < n; ++i) {
            float factor = gram[i * n + k] / gram[k * n + k];
            subtract(gram + i * n, gram + k * n, factor, k / LANES * LANES, n);
            subtract(right + i * n, right + k * n, factor, 0, n);
        }
    for (int64_t i = n - 1; i >= 0; --i) {
        for (int64_t k = i + 1; k < n; ++k) subtract(right + i * n, right + k * n, gram[i * n + k], 0, n);
        float scale = 1 / gram[i * n + i];
        for (int64_t j = 0; j < n; ++j) right[i * n + j] *= scale;
    }
}

// What one kv head's tokens are shifted by.
struct Map {
    std::vector<uint32_t> weights;  // bf16 pairs: [dim][2 dim], two rows of W in a word
    std::vector<float> constants;   // [chunks + 1, 2 dim]; the last one is of tokens in no chunk
};

uint32_t rounded_pair(float low, float high) {
    __m128bh both = _mm_cvtneps_pbh(_mm_setr_ps(low, high, 0, 0));
    return static_cast<uint32_t>(_mm_extract_epi32((__m128i)both, 0));
}

Map fit(const RidgeCall& c, int64_t head) {
    int64_t d = c.dim, f = 2 * d, rows = c.rows;
    std::vector<float> x(rows * f), mean(f, 0.0f), gram(f * f), w(f * f);
    for (int64_t s = 0; s < rows; ++s) {
        const uint16_t* key = c.keys + head * c.k_head + c.at[s] * c.k_row;
        const uint16_t* value = c.values + head * c.v_head + c.at[s] * c.v_row;
        for (int64_t j = 0; j < d; ++j) x[s * f + j] = wide(key[j]), x[s * f + d + j] = wide(value[j]);
        for (int64_t j = 0; j < f; ++j) mean[j] += x[s * f + j];
    }
    for (float& m : mean) m /= static_cast<float>(rows);
    double squares[2] = {0, 0};
    for (int64_t s = 0; s < rows; ++s)
        for (int half = 0; half < 2; ++half) {
            float sum = 0;
            for (int64_t j = half * d; j < (half + 1) * d; ++j) {
                float y = x[s * f + j] -= mean[j];
                sum += y * y;
            }
            squares[half] += sum;
        }
    float size[2];
    for (int half = 0; half < 2; ++half)
        size[half] = std::max(LEAST, static_cast<float>(std::sqrt(squares[half] / static_cast<double>(rows * d))));
    for (int64_t s = 0; s < rows; ++s)
        for (int64_t j = 0; j < f; ++j) x[s * f + j] /= size[j / d];
    transposed_product(x.data(), x.data(), rows, f, f, gram.data());
    transposed_product(x.data(), c.left + head * rows * f, rows, f, f, w.data());
    for (int64_t j = 0; j < f; ++j) gram[j * f + j] += c.penalty;
    solve(gram.data(), w.data(), f);

    Map map{std::vector<uint32_t>(d * f), std::vector<float>((c.chunks + 1) * f, 0.0f)};
    float* last = map.constants.data() + c.chunks * f;
    for (int64_t i = 0; i < f; ++i) {
        for (int64_t j = 0; j < f; ++j) w[i * f + j] /= size[i / d];
        subtract(last, w.data() + i * f, mean[i], 0, f);
    }
    for (int64_t i = 0; i < d; ++i)
        for (int64_t j = 0; j < f; ++j) map.weights[i * f + j] = rounded_pair(w[2 * i * f + j], w[(2 * i + 1) * f + j]);
    for (int64_t n = 0; n < c.chunks; ++n)
        for (int64_t j = 0; j < f; ++j)
            map.constants[n * f + j] = last[j] + c.means[(head * c.chunks + n) * f + j];
    return map;
}

// Up to TILE tokens from `token` on.
void shift_tile(const RidgeCall& c, const Map& map, const std::vector<int64_t>& chunk_of, int64_t head, int64_t token,
                int64_t end) {
    int64_t d = c.dim, f = 2 * d, n = std::min<int64_t>(TILE, end - token);
    alignas(64) uint32_t known[TILE][MAX_DIM] = {};  // all of it first: values are written below
    for (int64_t r = 0; r < n; ++r) {
        std::memcpy(known[r], c.keys + head * c.k_head + (token + r) * c.k_row, d * sizeof(uint16_t));
        std::memcpy(known[r] + d / 2, c.values + head * c.v_head + (token + r) * c.v_row, d * sizeof(uint16_t));
    }
    for (int64_t j = 0; j < f; j += STRIP) {
        __m512 sum[TILE][4];
        for (int r = 0; r < TILE; ++r) {
            const float* constant = map.constants.data() + chunk_of[std::min(token + r, end - 1)] * f + j;
            for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_loadu_ps(constant + v * LANES);
        }
        const uint32_t* w = map.weights.data() + j;
        for (int64_t i = 0; i < d; ++i, w += f) {
            __m512bh y[4];
            for (int v = 0; v < 4; ++v) y[v] = (__m512bh)_mm512_loadu_si512(w + v * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < TILE; ++r) {
                __m512bh x = pair(known[r][i]);
                for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, y[v]);
            }
        }
        for (int64_t r = 0; r < n; ++r)
            for (int v = 0; v < 4; ++v) {
                int64_t column = j + v * LANES;
                if (column < d) {
                    uint16_t* to = c.shift + (head * c.tokens + token + r) * d + column;
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(sum[r][v]));
                } else {
                    auto* to = reinterpret_cast<__m256i*>(c.values + head * c.v_head + (token + r) * c.v_row + column - d);
                    __m512i old = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(to)), 16);
                    __m512 sum_now = _mm512_add_ps(_mm512_castsi512_ps(old), sum[r][v]);
                    _mm256_storeu_si256(to, (__m256i)_mm512_cvtneps_pbh(sum_now));
                }
            }
    }
}

}  // namespace

extern "C" void blendserve_ridge(const RidgeCall* call) {
    const RidgeCall& c = *call;
    std::vector<int64_t> chunk_of(c.tokens, c.chunks);
    for (int64_t n = 0; n < c.chunks; ++n) std::fill(chunk_of.begin() + c.begins[n], chunk_of.begin() + c.ends[n], n);
    std::vector<Map> maps(c.kv);
    int64_t blocks = divide_up(c.tokens, BLOCK);
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t head = 0; head < c.kv; ++head) maps[head] = fit(c, head);
#pragma omp for schedule(dynamic, 4)
        for (int64_t item = 0; item < c.kv * blocks; ++item) {
            int64_t head = item / blocks, begin = item % blocks * BLOCK, end = std::min(begin + BLOCK, c.tokens);
            for (int64_t token = begin; token < end; token += TILE)
                shift_tile(c, maps[head], chunk_of, head, token, end);
        }
    }
}
