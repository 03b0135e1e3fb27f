// x w^T + bias on matrix tiles (AMX), in bf16, over the weights as the model stores them: rows of weights are tile A as they
// are, and x, of which there is little, is turned into B. So no weight is ever packed.
//
//     A = weights [16 outputs][32 inputs]    B = x turned [16 words of inputs][16 rows]    C = [16 outputs][16 rows]
//
// A column of C depends on its column of B alone, and a sum's order on nothing: a row's result does not depend on how many rows
// come with it, nor on threads. It is not to the bit that of linear.cpp, which adds in another order.

#include "linear.h"
#include "tiles.h"

namespace {

constexpr int DEEP = PER_WORD * LANES;  // inputs of a tile
constexpr int GROUP = 3;                // tiles of rows that share weights as they come
constexpr int PANEL = 2 * LANES;        // outputs of an item

thread_local Scratch turned_rows, filled_weights;

// Rows of weights of a panel as tiles are to find them.
struct Weights {
    const Number* at;
    int64_t row;       // elements from one to the next
    const char* next;  // what to ask for meanwhile, some lines a step
    int64_t lines;
};

// Products of M tiles of outputs with N tiles of rows, x packed [words][LANES N] -> C tiles 0 .. 2 and 3 .. 5.
template <int M, int N>
inline void multiply(const Weights& weights, const uint32_t* x, int64_t steps) {
    constexpr int64_t width = N * LANES, x_bytes = width * sizeof(uint32_t);
    const Number* w = weights.at;
    const char* next = weights.next;
    int64_t w_bytes = weights.row * static_cast<int64_t>(sizeof(Number));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t k = 0; k < steps; ++k, w += DEEP, x += LANES * width) {
        for (int64_t i = 0; i < weights.lines; ++i, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        _tile_loadd(7, x, x_bytes);
        _tile_loadd(6, w, w_bytes);
        _tile_dpbf16ps(0, 6, 7);
        if (N > 1) {
            _tile_loadd(7, x + 16, x_bytes);
            _tile_dpbf16ps(1, 6, 7);
        }
        if (N > 2) {
            _tile_loadd(7, x + 32, x_bytes);
            _tile_dpbf16ps(2, 6, 7);
        }
        if (M == 1) continue;
        _tile_loadd(6, w + 16 * weights.row, w_bytes);  // tile 7 holds the last rows: they go first
        if (N > 2) {
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(7, x + 16, x_bytes);
        }
        if (N > 1) {
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(7, x, x_bytes);
        }
        _tile_dpbf16ps(3, 6, 7);
    }
}

// M tiles of outputs from o times N tiles of rows from `row`.
template <int M, int N>
void block(const LinearCall& c, const Weights& weights, const uint32_t* x, int64_t row, int64_t o) {
    alignas(64) float part[2][GROUP][LANES][LANES];
    written();
    multiply<M, N>(weights, x, divide_up(c.depth, DEEP));
    _tile_stored(0, part[0][0], 64);
    if (N > 1) _tile_stored(1, part[0][1], 64);
    if (N > 2) _tile_stored(2, part[0][2], 64);
    if (M > 1) _tile_stored(3, part[1][0], 64);
    if (M > 1 && N > 1) _tile_stored(4, part[1][1], 64);
    if (M > 1 && N > 2) _tile_stored(5, part[1][2], 64);
    for (int m = 0; m < M; ++m) {
        int64_t from = o + m * LANES;
        Mask there = first(c.outs - from);
        Floats bias = c.bias ? load(c.bias + from, there) : all(0.0f);
        for (int n = 0; n < N; ++n) {
            Words lines[LANES];
            for (int i = 0; i < LANES; ++i) lines[i] = load_words(part[m][n][i]);
            transpose(lines);
            int64_t first_row = row + n * LANES;
            for (int i = 0; i < LANES && first_row + i < c.rows; ++i)
                store(c.out + (first_row + i) * c.out_row + from, there, floats(lines[i]) + bias);
        }
    }
}

using Block = void (*)(const LinearCall&, const Weights&, const uint32_t*, int64_t, int64_t);
constexpr Block blocks[3][GROUP + 1] = {{},
                                        {nullptr, block<1, 1>, block<1, 2>, block<1, 3>},
                                        {nullptr, block<2, 1>, block<2, 2>, block<2, 3>}};

// A panel's weights, filled up with zeros to whole tiles where they are none.
Weights filled(const LinearCall& c, int64_t o) {
    int64_t depth = divide_up(c.depth, DEEP) * DEEP, outs = std::min<int64_t>(PANEL, c.outs - o);
    auto* to = reinterpret_cast<Number*>(filled_weights.take(sizeof(Number) * PANEL * depth));
    std::memset(to, 0, sizeof(Number) * PANEL * depth);
    for (int64_t i = 0; i < outs; ++i) std::memcpy(to + i * depth, c.weights + (o + i) * c.w_row, sizeof(Number) * c.depth);
    return {to, depth, nullptr, 0};
}

Weights weights_of(const LinearCall& c, int64_t o) {
    if (c.depth % DEEP || (c.outs - o < PANEL && c.outs % LANES)) return filled(c, o);
    bool ask = c.w_row == c.depth && c.outs - o >= 2 * PANEL;  // the next panel lies right behind this one
    return {c.weights + o * c.w_row, c.w_row, reinterpret_cast<const char*>(c.weights + (o + PANEL) * c.w_row),
            ask ? PANEL * DEEP * static_cast<int64_t>(sizeof(Number)) / LINE : 0};
}

// 16 rows from 16 i on into B's layout, zeros where there are none.
void turn_rows(const LinearCall& c, int64_t i, uint32_t* to, int64_t width) {
    int64_t words = c.depth / PER_WORD, room = divide_up(c.depth, DEEP) * LANES;
    int rows = static_cast<int>(std::min<int64_t>(LANES, c.rows - i * LANES));
    for (int64_t w = 0; w < words; w += LANES)
        turn(c.x + i * LANES * c.x_row + PER_WORD * w, c.x_row, rows, static_cast<int>(std::min<int64_t>(LANES, words - w)),
             to + w * width, width);
    for (int64_t w = words; w < room; ++w) store_words(to + w * width, all_words(0));
}

}  // namespace

extern "C" void blendserve_linear(const LinearCall* call) {
    const LinearCall& c = *call;
    if (!c.rows) return;
    int64_t words = divide_up(c.depth, DEEP) * LANES, tiles = divide_up(c.rows, LANES), groups = divide_up(tiles, GROUP);
    auto* x = reinterpret_cast<uint32_t*>(turned_rows.take(sizeof(uint32_t) * words * tiles * LANES));
    auto group_of = [&](int64_t g) { return x + g * GROUP * LANES * words; };
    auto tiles_of = [&](int64_t g) { return std::min<int64_t>(GROUP, tiles - g * GROUP); };
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
        TileScope scope;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tiles; ++i)
            turn_rows(c, i, group_of(i / GROUP) + i % GROUP * LANES, tiles_of(i / GROUP) * LANES);
#pragma omp for schedule(static)
        for (int64_t o = 0; o < c.outs; o += PANEL) {
            Weights weights = weights_of(c, o);
            for (int64_t g = 0; g < groups; ++g) {
                blocks[c.outs - o > LANES ? 2 : 1][tiles_of(g)](c, weights, group_of(g), g * GROUP * LANES, o);
                weights.lines = 0;  // asked for
            }
        }
    }
}
