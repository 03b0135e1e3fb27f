// x w^T + bias on matrix tiles (AMX), in bf16, over the weights as the model stores them: rows of weights are tile A as they
// are, and x, of which there is little, is turned into B. So no weight is ever packed.
//
//     A = weights [16 outputs][32 inputs]    B = x turned [16 words of inputs][16 rows]    C = [16 outputs][16 rows]
//
// A column of C depends on its column of B alone, and a sum's order on nothing: a row's result does not depend on how many rows
// come with it, nor on threads. It is not to the bit that of linear.cpp, which adds in another order.

#include "amx_tiles.h"
#include "strips.h"

namespace {

constexpr int DEEP = PER_WORD * LANES;  // inputs of a tile
constexpr int ROW_TILES = 3;                // tiles of rows that share weights as they come
constexpr int N_PANEL = 2 * LANES;        // outputs of an item

thread_local Workspace transposed_rows, filled_weights;

// Rows of weights of a panel as tiles are to find them.
struct Weights {
    const elem_t* at;
    int64_t row;       // elements from one to the next
    const char* next;  // what to ask for meanwhile, some lines a step
    int64_t lines;
};

// Products of two tiles of outputs with N tiles of rows, x packed [words][LANES N] -> C tiles 0 .. 2 and 3 .. 5.
template <int N>
inline void multiply(const Weights& weights, const uint32_t* x, int64_t steps) {
    constexpr int64_t width = N * LANES, x_bytes = width * sizeof(uint32_t);
    const elem_t* w = weights.at;
    const char* next = weights.next;
    int64_t w_bytes = weights.row * static_cast<int64_t>(sizeof(elem_t));
    zero_accumulators();
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

// A panel of outputs from o times N tiles of rows from `row`.
template <int N>
void block(const LinearArgs& c, const Weights& weights, const uint32_t* x, int64_t row, int64_t o) {
    alignas(64) float part[2][ROW_TILES][LANES][LANES];
    compiler_fence();
    multiply<N>(weights, x, divide_up(c.inputs, DEEP));
    _tile_stored(0, part[0][0], 64);
    _tile_stored(3, part[1][0], 64);
    if (N > 1) _tile_stored(1, part[0][1], 64);
    if (N > 1) _tile_stored(4, part[1][1], 64);
    if (N > 2) _tile_stored(2, part[0][2], 64);
    if (N > 2) _tile_stored(5, part[1][2], 64);
    for (int64_t from = o; from < std::min(c.outputs, o + N_PANEL); from += LANES) {
        Mask mask = tail_mask(c.outputs - from);
        F32 bias = c.bias ? load(c.bias + from, mask) : broadcast(0.0f);
        for (int n = 0; n < N; ++n) {
            U32 lines[LANES];
            for (int i = 0; i < LANES; ++i) lines[i] = load_u32(part[(from - o) / LANES][n][i]);
            transpose(lines);
            int64_t first_row = row + n * LANES;
            for (int i = 0; i < LANES && first_row + i < c.rows; ++i)
                store(c.out + (first_row + i) * c.out_row + from, mask, as_f32(lines[i]) + bias);
        }
    }
}

using Block = void (*)(const LinearArgs&, const Weights&, const uint32_t*, int64_t, int64_t);
constexpr Block blocks[ROW_TILES + 1] = {nullptr, block<1>, block<2>, block<3>};

// A panel's weights, copied and filled up with zeros where they are no whole tiles.
Weights weights_of(const LinearArgs& c, int64_t o) {
    int64_t outputs = std::min<int64_t>(N_PANEL, c.outputs - o), inputs = divide_up(c.inputs, DEEP) * DEEP;
    if (c.weights.form) {
        auto* to = filled_weights.take<elem_t>(N_PANEL * inputs);
        for (int64_t i = 0; i < N_PANEL; i += STRIP)
            if (i < outputs)
                blendserve_strip_numbers(c.weights, inputs, o + i, to + i * inputs, inputs);
            else
                std::memset(to + i * inputs, 0, sizeof(elem_t) * STRIP * inputs);
        return {to, inputs, nullptr, 0};
    }
    const elem_t* at = numbers_of(c) + o * c.w_row;
    if (inputs == c.inputs && outputs == N_PANEL) {
        bool ask = c.w_row == c.inputs && c.outputs - o >= 2 * N_PANEL;  // the next panel lies right behind this one
        return {at, c.w_row, reinterpret_cast<const char*>(at + N_PANEL * c.w_row),
                ask ? N_PANEL * DEEP * static_cast<int64_t>(sizeof(elem_t)) / LINE : 0};
    }
    auto* to = filled_weights.take<elem_t>(N_PANEL * inputs);
    std::memset(to, 0, sizeof(elem_t) * N_PANEL * inputs);
    for (int64_t i = 0; i < outputs; ++i) std::memcpy(to + i * inputs, at + i * c.w_row, sizeof(elem_t) * c.inputs);
    return {to, inputs, nullptr, 0};
}

}  // namespace

void blendserve_linear(const LinearArgs& c) {
    if (!c.rows) return;
    int64_t words = divide_up(c.inputs, DEEP) * LANES, tiles = divide_up(c.rows, LANES), groups = divide_up(tiles, ROW_TILES);
    auto* packed = transposed_rows.take<uint32_t>(words * tiles * LANES);
    auto group_of = [&](int64_t g) { return packed + g * ROW_TILES * LANES * words; };
    auto tiles_of = [&](int64_t g) { return std::min<int64_t>(ROW_TILES, tiles - g * ROW_TILES); };
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
        TileScope scope;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tiles; ++i)
            transpose_into(c.x + i * LANES * c.x_row, c.x_row, c.rows - i * LANES, c.inputs / PER_WORD, words,
                           group_of(i / ROW_TILES) + i % ROW_TILES * LANES, tiles_of(i / ROW_TILES) * LANES);
#pragma omp for schedule(static)
        for (int64_t o = 0; o < c.outputs; o += N_PANEL) {
            Weights panel = weights_of(c, o);
            for (int64_t g = 0; g < groups; ++g) {
                blocks[tiles_of(g)](c, panel, group_of(g), g * ROW_TILES * LANES, o);
                panel.lines = 0;  // prefetched
            }
        }
    }
}

void blendserve_packed_linear(const LinearArgs& args) { blendserve_linear(args); }
