// x w^T + bias in bf16, over the weights as the model stores them, on CPUs that multiply bf16 (AVX512-BF16).
//
// Every number is one sum in fp32 over pairs of inputs in ascending order, rounded once: a row's result does not depend on
// how many rows come with it, nor on threads. What a vector's 16 lanes hold depends on how many rows there are:
//
//     few rows    16 outputs: weights are turned on their way from memory, which is what limits this
//     many rows   16 rows: x is turned once, weights are read as they are
//
// Weights are read by rows of a tile, which memory dislikes; so they are asked for ahead of time, in order.

#include "common.h"

#include <atomic>

// One call, as the caller fills it in. Strides are in elements; the innermost one is 1. depth and outs are even.
struct LinearCall {
    const uint16_t *x, *weights, *bias;  // bf16 [rows, depth], [outs, depth], [outs] or null
    uint16_t* out;                       // bf16 [rows, outs]
    int64_t x_row, w_row, out_row;
    int64_t rows, outs, depth;
    int64_t threads;
};

namespace {

constexpr int FEW = 8;     // rows
constexpr int PANEL = 48;  // outputs of one item when rows are many: a multiple of 6 and 8

thread_local Scratch turned_x;

// Word k of R rows times the same word of 16 outputs.
template <int R>
inline void add(const LinearCall& c, int k, __m512i weights, __m512 (&sum)[R]) {
    for (int r = 0; r < R; ++r)
        sum[r] = _mm512_dpbf16_ps(sum[r], pair(c.x + r * c.x_row + 2 * k), (__m512bh)weights);
}

// R rows times outputs [o, o + 16).
template <int R>
void few(const LinearCall& c, int64_t o) {
    __m512 sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
    const uint16_t* w = c.weights + o * c.w_row;
    int there = static_cast<int>(std::min<int64_t>(LANES, c.outs - o)), words = static_cast<int>(c.depth / 2);
    const char* next = reinterpret_cast<const char*>(w + 2 * LANES * c.w_row);
    for (int k = 0; k < words; k += LANES) {
        for (int i = 0; i < 16; ++i, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        __m512i block[16];
        turned(w + 2 * k, c.w_row, there, std::min(LANES, words - k), block);
        if (k + LANES > words) {  // what lies behind a row of x is not read
            for (int i = 0; k + i < words; ++i) add<R>(c, k + i, block[i], sum);
            continue;
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) add<R>(c, k + i, block[i], sum);
    }
    __mmask16 mask = first(c.outs - o);
    for (int r = 0; r < R; ++r) {
        if (c.bias) sum[r] = _mm512_add_ps(sum[r], wide(_mm256_maskz_loadu_epi16(mask, c.bias + o)));
        _mm256_mask_storeu_epi16(c.out + r * c.out_row + o, mask, (__m256i)_mm512_cvtneps_pbh(sum[r]));
    }
}

using Few = void (*)(const LinearCall&, int64_t);
constexpr Few fews[FEW + 1] = {nullptr, few<1>, few<2>, few<3>, few<4>, few<5>, few<6>, few<7>, few<8>};

void few_rows(const LinearCall& c) {
    constexpr int64_t SHARE = 1 << 19;  // bytes of weights that are worth an item of their own
    int64_t groups = divide_up(c.outs, LANES);
    int64_t items = std::min(groups, divide_up(std::clamp<int64_t>(2 * c.outs * c.depth / SHARE, 1, 4 * c.threads),
                                               c.threads) * c.threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(c.threads))
    for (int64_t item = 0; item < items; ++item)
        for (int64_t g = groups * item / items; g < groups * (item + 1) / items; ++g) fews[c.rows](c, g * LANES);
}

// The 16 V rows of a strip, from x turned [depth / 2][16 V], times N outputs from o; pairs of outputs go to
// to [N / 2][STRIP] as words.
template <int N, int V>
void many(const LinearCall& c, const uint32_t* x, int64_t o, uint32_t* to) {
    __m512 sum[N][V];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) sum[n][v] = _mm512_setzero_ps();
    const uint16_t* w = c.weights + o * c.w_row;
    for (int64_t k = 0; k < c.depth; k += 2, x += V * LANES) {
        __m512bh xs[V];
        for (int v = 0; v < V; ++v) xs[v] = pairs(x + LANES * v);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            __m512bh two = pair(w + n * c.w_row + k);
            for (int v = 0; v < V; ++v) sum[n][v] = _mm512_dpbf16_ps(sum[n][v], xs[v], two);
        }
    }
    for (int n = 0; n < N; n += 2)
        for (int v = 0; v < V; ++v) {
            if (c.bias) {
                sum[n][v] = _mm512_add_ps(sum[n][v], wide(_mm256_set1_epi16(c.bias[o + n])));
                sum[n + 1][v] = _mm512_add_ps(sum[n + 1][v], wide(_mm256_set1_epi16(c.bias[o + n + 1])));
            }
            __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(sum[n][v]));
            __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(sum[n + 1][v]));
            _mm512_store_si512(to + n / 2 * STRIP + LANES * v, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

using Many = void (*)(const LinearCall&, const uint32_t*, int64_t, uint32_t*);

// many<N, V> for N outputs, of which there may be fewer at the end.
template <int V>
Many many_of(int64_t n) {
    return n >= 8 && V < 4 ? many<V < 4 ? 8 : 6, V> : n >= 6 ? many<6, V> : n >= 4 ? many<4, V> : many<2, V>;
}

template <int V>
void panel(const LinearCall& c, const uint32_t* x, int64_t row, int64_t o, Ahead ahead) {
    constexpr int N = V < 4 ? 8 : 6;
    alignas(64) uint32_t words[PANEL / 2][STRIP];
    int64_t outs = std::min<int64_t>(PANEL, c.outs - o), lines = divide_up(ahead.lines(), PANEL / N);
    for (int64_t n = 0; n < outs;) {
        int64_t left = outs - n, step = left >= N ? N : left >= 6 ? 6 : left >= 4 ? 4 : 2;
        many_of<V>(left)(c, x, o + n, words[n / 2]);
        ahead.fetch(lines);
        n += step;
    }
    for (int v = 0; v < V; ++v)
        for (int64_t n = 0; n < outs; n += 2 * LANES) {
            __m512i block[16];
            for (int i = 0; i < 16; ++i)
                block[i] = n + 2 * i < outs ? _mm512_load_si512(words[n / 2 + i] + LANES * v) : _mm512_setzero_si512();
            transpose(block);
            int64_t first_row = row + LANES * v;
            for (int i = 0; i < 16 && first_row + i < c.rows; ++i)
                _mm512_mask_storeu_epi32(c.out + (first_row + i) * c.out_row + o + n, first((outs - n) / 2), block[i]);
        }
}

using Panel = void (*)(const LinearCall&, const uint32_t*, int64_t, int64_t, Ahead);
constexpr Panel panels[5] = {nullptr, panel<1>, panel<2>, panel<3>, panel<4>};

void many_rows(const LinearCall& c) {
    int64_t words = c.depth / 2, strips = divide_up(c.rows, STRIP), items = divide_up(c.outs, PANEL) * strips;
    auto* x = reinterpret_cast<uint32_t*>(turned_x.take(sizeof(uint32_t) * words * strips * STRIP));
    auto vectors = [&](int64_t strip) { return std::min<int64_t>(4, divide_up(c.rows - strip * STRIP, LANES)); };
    auto rows_of = [&](int64_t o) { return reinterpret_cast<const char*>(c.weights + std::min(o, c.outs) * c.w_row); };
    std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < divide_up(c.rows, LANES); ++i) {
            int64_t strip = i / 4, width = vectors(strip) * LANES;
            uint32_t* to = x + strip * words * STRIP + i % 4 * LANES;
            for (int64_t w = 0; w < words; w += LANES)
                turn(c.x + i * LANES * c.x_row + 2 * w, c.x_row, static_cast<int>(std::min<int64_t>(LANES, c.rows - i * LANES)),
                     static_cast<int>(std::min<int64_t>(LANES, words - w)), to + w * width, width);
        }
        // Strip by strip over a panel's weights; each thread knows its next item, so that it can ask for its weights.
        for (int64_t item = taken++, next; item < items; item = next) {
            next = taken++;
            int64_t strip = item % strips, o = item / strips * PANEL, then = next / strips * PANEL;
            Ahead ahead;
            if (next < items && then != o) ahead = {rows_of(then), rows_of(then + PANEL)};
            panels[vectors(strip)](c, x + strip * words * STRIP, strip * STRIP, o, ahead);
        }
    }
}

}  // namespace

extern "C" void blendserve_linear(const LinearCall* call) {
    const LinearCall& c = *call;
    if (!c.rows) return;
    if (c.rows <= FEW)
        few_rows(c);
    else
        many_rows(c);
}
