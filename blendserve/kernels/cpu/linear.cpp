// x w^T + bias, over the weights as the model stores them.
//
// Every number is one sum in fp32 over words of inputs in ascending order, rounded once: a row's result does not depend on
// how many rows come with it, nor on threads. What the lanes of a vector hold depends on how many rows there are:
//
//     few rows    outputs: weights are turned on their way from memory, which is what limits this
//     many rows   rows: x is turned once, weights are read as they are
//
// Weights are read by rows of a tile, which memory dislikes; so they are asked for ahead of time, in order.

#include <atomic>

#include "few_rows.h"

namespace {

constexpr int PANEL = 48;  // outputs of one item when rows are many: a multiple of 6 and 8
constexpr bool WIDE = VECTORS == 4;  // 32 registers

thread_local Scratch turned_x;

void few_rows(const LinearCall& c) {
    constexpr int64_t SHARE = 1 << 19;  // bytes of weights that are worth an item of their own
    int64_t groups = divide_up(c.outs, LANES);
    int64_t items = std::min(groups, divide_up(std::clamp<int64_t>(sizeof(Number) * c.outs * c.depth / SHARE, 1, 4 * c.threads),
                                               c.threads) * c.threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(c.threads))
    for (int64_t item = 0; item < items; ++item)
        for (int64_t g = groups * item / items; g < groups * (item + 1) / items; ++g) fews[c.rows](c, g * LANES);
}

// The V vectors of rows of a strip, from x turned [words][LANES V], times N outputs from o; as words, to
// `to` [N / PER_WORD][STRIP].
template <int N, int V>
void many(const LinearCall& c, const uint32_t* x, int64_t o, uint32_t* to) {
    Floats sum[N][V];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) sum[n][v] = all(0.0f);
    const Number* w = c.weights + o * c.w_row;
    for (int64_t k = 0; k < c.depth; k += PER_WORD, x += V * LANES) {
        Words xs[V];
        for (int v = 0; v < V; ++v) xs[v] = load_words(x + LANES * v);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            Words two = word(w + n * c.w_row + k);
            for (int v = 0; v < V; ++v) sum[n][v] = dot(sum[n][v], xs[v], two);
        }
    }
    for (int n = 0; n < N; n += PER_WORD)
        for (int v = 0; v < V; ++v) {
            constexpr int OTHER = PER_WORD - 1;
            if (c.bias) {
                sum[n][v] = sum[n][v] + all(wide(c.bias[o + n]));
                if (OTHER) sum[n + OTHER][v] = sum[n + OTHER][v] + all(wide(c.bias[o + n + OTHER]));
            }
            store_words(to + n / PER_WORD * STRIP + LANES * v, packed(sum[n][v], sum[n + OTHER][v]));
        }
}

using Many = void (*)(const LinearCall&, const uint32_t*, int64_t, uint32_t*);

// Outputs that are summed together where there are enough.
template <int V>
constexpr int most_of() { return WIDE && V < 4 ? 8 : 6; }

// many<N, V> for the most outputs that n allows.
template <int V>
Many many_of(int64_t n, int& step) {
    step = n >= most_of<V>() ? most_of<V>() : n >= 6 ? 6 : n >= 4 ? 4 : n >= 2 ? 2 : 1;
    if (PER_WORD == 1 && step == 1) return many<PER_WORD, V>;
    return step == 8 ? many<most_of<V>(), V> : step == 6 ? many<6, V> : step == 4 ? many<4, V> : many<2, V>;
}

template <int V>
void panel(const LinearCall& c, const uint32_t* x, int64_t row, int64_t o, Ahead ahead) {
    alignas(64) uint32_t words[PANEL / PER_WORD][STRIP];
    int64_t outs = std::min<int64_t>(PANEL, c.outs - o), lines = divide_up(ahead.lines(), PANEL / most_of<V>());
    int step = 0;
    for (int64_t n = 0; n < outs; n += step) {
        Many sums = many_of<V>(outs - n, step);
        sums(c, x, o + n, words[n / PER_WORD]);
        ahead.fetch(lines);
    }
    for (int v = 0; v < V; ++v)
        for (int64_t n = 0; n < outs; n += PER_WORD * LANES) {
            Words block[LANES];
            for (int i = 0; i < LANES; ++i)
                block[i] = n + PER_WORD * i < outs ? load_words(words[n / PER_WORD + i] + LANES * v) : all_words(0);
            transpose(block);
            int64_t first_row = row + LANES * v;
            for (int i = 0; i < LANES && first_row + i < c.rows; ++i)
                store_words(c.out + (first_row + i) * c.out_row + o + n, first((outs - n) / PER_WORD), block[i]);
        }
}

using Panel = void (*)(const LinearCall&, const uint32_t*, int64_t, int64_t, Ahead);
constexpr Panel panels[5] = {nullptr, panel<1>, panel<2>, panel<WIDE ? 3 : 1>, panel<WIDE ? 4 : 1>};

void many_rows(const LinearCall& c) {
    int64_t words = c.depth / PER_WORD, strips = divide_up(c.rows, STRIP), items = divide_up(c.outs, PANEL) * strips;
    auto* x = reinterpret_cast<uint32_t*>(turned_x.take(sizeof(uint32_t) * words * strips * STRIP));
    auto vectors = [&](int64_t strip) { return std::min<int64_t>(VECTORS, divide_up(c.rows - strip * STRIP, LANES)); };
    auto rows_of = [&](int64_t o) { return reinterpret_cast<const char*>(c.weights + std::min(o, c.outs) * c.w_row); };
    std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < divide_up(c.rows, LANES); ++i) {
            int64_t strip = i / VECTORS, width = vectors(strip) * LANES;
            uint32_t* to = x + strip * words * STRIP + i % VECTORS * LANES;
            for (int64_t w = 0; w < words; w += LANES)
                turn(c.x + i * LANES * c.x_row + PER_WORD * w, c.x_row, static_cast<int>(std::min<int64_t>(LANES, c.rows - i * LANES)),
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
