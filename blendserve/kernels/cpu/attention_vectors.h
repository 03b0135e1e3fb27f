// Attention by position in vectors: attention.h says what is computed. kernels/reference.py is the plain form.
#pragma once

#include "common.h"

namespace {

constexpr int TILE = 6;                              // rows: with the vectors of a strip each they fill the registers
constexpr int BLOCK = 512 / sizeof(elem_t);          // keys
constexpr int SCORES = BLOCK, WEIGHTS = BLOCK, KEY_STRIDE = 1;
struct ThreadScope {};

}  // namespace

#include "attention.h"

namespace {

int64_t words_of(const AttentionArgs& c) { return c.dim / PER_WORD; }

F32 weights_in(const elem_t* strip, int i) { return load(strip + LANES * i); }

// A tile's queries, [words][rows of the tile].
void pack_queries(const AttentionArgs& c, int64_t head, int64_t tile, uint32_t* to) {
    Range rows = rows_of(c, tile);
    int64_t n = rows.end - rows.begin;
    for (int64_t i = 0; i < n; ++i) {
        int64_t row = (rows.begin + i) / c.group, h = head * c.group + (rows.begin + i) % c.group;
        const elem_t* from = c.q + h * c.q_head + row * c.q_row;
        for (int64_t w = 0; w < words_of(c); ++w) std::memcpy(to + w * n + i, from + PER_WORD * w, sizeof(uint32_t));
    }
}

// Scores of R rows against the keys of a block that they see.
template <int R>
void score_block(const uint32_t* q, const uint32_t* keys, int words, const Visible& visible, float* scores, float (*row_max)[LANES]) {
    for (int r = 0; r < R; ++r) store(row_max[r], broadcast(NEG_INF));
    for (int s = visible.begin; s < visible.end; s += N_TILE) {
        F32 sum[R][VECTORS] = {};
        add_dots(words, [&](int64_t w, int r) { return broadcast_u32(q[w * R + r]); }, keys + s * words, N_TILE, sum);
        bool edge = visible.is_edge(s);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int i = 0; edge && i < VECTORS; ++i)
                sum[r][i] = select(masked(visible, r, s + i * LANES), broadcast(NEG_INF), sum[r][i]);
            F32 largest = load(row_max[r]);
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; ++i) {
                store(scores + r * SCORES + s + LANES * i, sum[r][i]);
                largest = max(largest, sum[r][i]);
            }
            store(row_max[r], largest);
        }
    }
}

// scores -> weights relative to the block's largest score, and their sum.
template <int R, bool SOFTCAP>
void softmax_block(const AttentionArgs& c, int begin, int end, const float* scores, const float (*row_max)[LANES], elem_t* weights,
           BlockState& part) {
    float factor = SOFTCAP ? LOG2E : LOG2E * c.scale;
    for (int r = 0; r < R; ++r) {
        F32 largest = load(row_max[r]);
        if (SOFTCAP) largest = apply_softcap(largest, c.scale, c.softcap);
        float highest = reduce_max(largest) * factor;
        F32 base = broadcast(highest == NEG_INF ? 0.0f : highest), sum = broadcast(0.0f);
        for (int j = begin; j < end; j += 2 * LANES) {
            F32 a = load(scores + r * SCORES + j), b = load(scores + r * SCORES + j + LANES);
            if (SOFTCAP) a = apply_softcap(a, c.scale, c.softcap), b = apply_softcap(b, c.scale, c.softcap);
            a = exp2_nonpositive(fms(a, broadcast(factor), base));
            b = exp2_nonpositive(fms(b, broadcast(factor), base));
            sum = sum + a + b;
            store_2(weights + r * WEIGHTS + j, a, b);
        }
        part.row_max[r] = highest;
        part.row_sum[r] = reduce_add(sum);
    }
}

// weights [R][WEIGHTS] times N vectors of each value, keys [begin, end), joined into `mix` [TILE][dim].
template <int R, int N>
void accumulate(const elem_t* weights, const uint32_t* values, int dim, int begin, int end, const Rescale& rescale, float* to) {
    F32 sum[R][N] = {};
    auto weight = [&](int64_t w, int r) { return broadcast_word(weights + r * WEIGHTS + begin + PER_WORD * w); };
    add_dots((end - begin) / PER_WORD, weight, values + begin / PER_WORD * dim, dim, sum);
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) {
            float* at = to + r * dim + LANES * i;
            store(at, merged(load(at), sum[r][i], rescale, r));
        }
}

template <int R>
void attend_block(const AttentionArgs& c, const TileBuffers& work, const uint32_t* q, const Visible& visible, State& state) {
    alignas(64) float row_max[R][LANES];
    int dim = static_cast<int>(c.dim), begin = visible.begin, end = visible.end;
    score_block<R>(q, work.keys, dim / PER_WORD, visible, work.scores, row_max);
    BlockState part;
    (c.softcap > 0 ? softmax_block<R, true> : softmax_block<R, false>)(c, begin, end, work.scores, row_max, work.weights, part);
    Rescale rescale = merge_state(state.row_max, state.row_sum, part.row_max, part.row_sum);
    int stop = static_cast<int>(divide_up(visible.last, LANES)) * LANES, d = 0;  // weights after `last` are zeros
    auto add = [&](auto n) { accumulate<R, decltype(n)::value>(work.weights, work.values + d, dim, begin, stop, rescale, state.output() + d); };
    for (; d + N_TILE <= dim; d += N_TILE) add(std::integral_constant<int, VECTORS>());
    int left = (dim - d) / LANES;
    if (left == 1) add(std::integral_constant<int, 1>());
    if (VECTORS > 2 && left == 2) add(std::integral_constant<int, 2>());
    if (VECTORS > 2 && left == 3) add(std::integral_constant<int, 3>());
}

constexpr AttendBlock attend_blocks[TILE + 1] = {nullptr,         attend_block<1>, attend_block<2>, attend_block<3>,
                                                 attend_block<4>, attend_block<5>, attend_block<6>};

void attend_visible(const AttentionArgs& c, const TileBuffers& work, const uint32_t* q, const Visible& visible, State& state) {
    attend_blocks[visible.rows](c, work, q, visible, state);
}

}  // namespace
