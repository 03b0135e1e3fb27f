// x w^T + bias, over the weights as the model stores them.
//
// Every number is one sum in fp32 over words of inputs in ascending order, rounded once: a row's result depends neither on
// the number of rows nor on threads. The lanes of a vector hold
//
//     few rows    outputs: weights are transposed in registers; memory limits the speed
//     many rows   rows: x is transposed once, weights are read as they are
//
// A tile reads several rows of weights in parallel, which is slow from memory: they are prefetched in order.

#include <atomic>

#include "gemv.h"
#include "strips.h"

namespace {

constexpr int N_PANEL = 48;  // outputs of one item when rows are many: a multiple of 6 and 8
constexpr bool WIDE = VECTORS == 4;  // 32 registers
template <int N>
using Count = std::integral_constant<int, N>;

thread_local Workspace transposed_x, prepared_rows, panel_numbers;

void gemv_rows(const LinearArgs& c) {
    constexpr int64_t SHARE = 1 << 19;  // bytes of weights that are worth an item of their own
    int64_t groups = divide_up(c.outputs, STRIP);
    int64_t items = std::min(groups, divide_up(std::clamp<int64_t>(groups * strip_bytes(c.weights.form, c.inputs) / SHARE, 1, 4 * c.threads),
                                               c.threads) * c.threads);
    LinearArgs call = c;
    if (c.weights.form) {
        auto* prepared = prepared_rows.take<float>(c.rows * PreparedRow::floats(c.inputs));
        blendserve_prepare_rows(c, prepared);
        call.prepared = prepared;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(c.threads))
    for (int64_t item = 0; item < items; ++item)
        for (int64_t g = groups * item / items; g < groups * (item + 1) / items; ++g) few_rows(call, g * STRIP);
}

// The V vectors of rows of a strip, from x turned [words][LANES V], times N outputs from o; as words, to
// `to` [N / PER_WORD][N_TILE].
template <int N, int V>
[[gnu::noinline]] void gemm(const LinearArgs& c, const uint32_t* x, int64_t o, uint32_t* to) {
    F32 sum[N][V] = {};
    const elem_t* w = numbers_of(c) + o * c.w_row;
    auto weight = [&](int64_t k, int n) { return broadcast_word(w + n * c.w_row + PER_WORD * k); };
    add_dots(c.inputs / PER_WORD, weight, x, V * LANES, sum);
    for (int n = 0; c.bias && n < N; ++n)
        for (int v = 0; v < V; ++v) sum[n][v] = sum[n][v] + broadcast(c.bias[o + n]);
    for (int n = 0; n < N; n += PER_WORD)
        for (int v = 0; v < V; ++v)
            store_u32(to + n / PER_WORD * N_TILE + LANES * v, pack_words(sum[n][v], sum[n + PER_WORD - 1][v]));
}

template <int V>
void panel(const LinearArgs& c, const uint32_t* x, int64_t row, int64_t o, Prefetcher ahead) {
    constexpr int MOST = WIDE && V < 4 ? 8 : 6;  // outputs that are summed together
    alignas(64) uint32_t words[N_PANEL / PER_WORD][N_TILE];
    int64_t outputs = std::min<int64_t>(N_PANEL, c.outputs - o), done = 0;
    int64_t lines = divide_up(ahead.lines(), N_PANEL / MOST);
    auto sum_up = [&](auto n) {  // n outputs together, while n are left
        for (; done + n <= outputs; done += n, ahead.fetch(lines))
            gemm<decltype(n)::value, V>(c, x, o + done, words[done / PER_WORD]);
    };
    sum_up(Count<MOST>()), sum_up(Count<6>()), sum_up(Count<4>()), sum_up(Count<2>()), sum_up(Count<PER_WORD>());
    for (int v = 0; v < V; ++v)
        for (int64_t n = 0; n < outputs; n += PER_WORD * LANES) {
            U32 block[LANES];
            for (int i = 0; i < LANES; ++i)
                block[i] = n + PER_WORD * i < outputs ? load_u32(words[n / PER_WORD + i] + LANES * v) : broadcast_u32(0);
            transpose(block);
            int64_t first_row = row + LANES * v;
            for (int i = 0; i < LANES && first_row + i < c.rows; ++i)
                store_u32(c.out + (first_row + i) * c.out_row + o + n, tail_mask((outputs - n) / PER_WORD), block[i]);
        }
}

using Panel = void (*)(const LinearArgs&, const uint32_t*, int64_t, int64_t, Prefetcher);
constexpr Panel panels[5] = {nullptr, panel<1>, panel<2>, panel<WIDE ? 3 : 1>, panel<WIDE ? 4 : 1>};

void gemm_rows(const LinearArgs& c) {
    int64_t words = c.inputs / PER_WORD, strips = divide_up(c.rows, N_TILE), items = divide_up(c.outputs, N_PANEL) * strips;
    auto* x = transposed_x.take<uint32_t>(words * strips * N_TILE);
    auto vectors = [&](int64_t strip) { return std::min<int64_t>(VECTORS, divide_up(c.rows - strip * N_TILE, LANES)); };
    auto rows_of = [&](int64_t o) { return reinterpret_cast<const char*>(numbers_of(c) + std::min(o, c.outputs) * c.w_row); };
    std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < divide_up(c.rows, LANES); ++i) {
            int64_t strip = i / VECTORS, width = vectors(strip) * LANES;
            uint32_t* to = x + strip * words * N_TILE + i % VECTORS * LANES;
            transpose_into(c.x + i * LANES * c.x_row, c.x_row, c.rows - i * LANES, words, words, to, width);
        }
        auto run = [&](const LinearArgs& call, int64_t strip, int64_t o, Prefetcher ahead) {
            panels[vectors(strip)](call, x + strip * words * N_TILE, strip * N_TILE, o, ahead);
        };
        if (c.weights.form) {  // a panel's weights as numbers, once for all rows
            LinearArgs call = c;
            auto* numbers = panel_numbers.take<elem_t>(N_PANEL * c.inputs);
            call.w_row = c.inputs;
            for (int64_t o = taken++ * N_PANEL; o < c.outputs; o = taken++ * N_PANEL) {
                for (int64_t i = 0; i < N_PANEL && o + i < c.outputs; i += STRIP)
                    blendserve_strip_numbers(c.weights, c.inputs, o + i, numbers + i * c.inputs, c.inputs);
                call.weights = {numbers - o * c.inputs, 0};
                for (int64_t strip = 0; strip < strips; ++strip) run(call, strip, o, {});
            }
            items = 0;
        }
        // Strip by strip over a panel's weights; each thread knows its next item, so that it can ask for its weights.
        for (int64_t item = taken++, next; item < items; item = next) {
            next = taken++;
            int64_t strip = item % strips, o = item / strips * N_PANEL, then = next / strips * N_PANEL;
            Prefetcher ahead;
            if (next < items && then != o) ahead = {rows_of(then), rows_of(then + N_PANEL)};
            run(c, strip, o, ahead);
        }
    }
}

}  // namespace

void blendserve_linear(const LinearArgs& args) {
    if (!args.rows) return;
    if (args.rows <= MAX_GEMV_ROWS)
        gemv_rows(args);
    else
        gemm_rows(args);
}

void blendserve_packed_linear(const LinearArgs& args) { blendserve_linear(args); }
