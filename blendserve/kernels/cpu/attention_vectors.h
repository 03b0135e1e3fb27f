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

// Scores of R rows against the strips [begin, end) of a block; row i sees keys [from[i], to[i]).
template <int R>
void score_block(const uint32_t* q, const uint32_t* keys, int words, int begin, int end, const int* from, const int* to,
           const uint8_t* masked_keys, float* scores, float (*row_max)[LANES]) {
    int inside_from = *std::max_element(from, from + R), inside_to = *std::min_element(to, to + R);
    for (int r = 0; r < R; ++r) store(row_max[r], broadcast(NEG_INF));
    for (int s = begin; s < end; s += N_TILE) {
        F32 sum[R][VECTORS];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < VECTORS; ++i) sum[r][i] = broadcast(0.0f);
        const uint32_t* k = keys + s * words;
        for (int w = 0; w < words; ++w, k += N_TILE) {
            U32 ks[VECTORS];
            for (int i = 0; i < VECTORS; ++i) ks[i] = load_u32(k + LANES * i);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                U32 x = broadcast_u32(q[w * R + r]);
                for (int i = 0; i < VECTORS; ++i) sum[r][i] = dot(sum[r][i], x, ks[i]);
            }
        }
        bool edge = masked_keys || s < inside_from || s + N_TILE > inside_to;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int i = 0; edge && i < VECTORS; ++i)
                sum[r][i] = select(masked(s + i * LANES, from[r], to[r], masked_keys), broadcast(NEG_INF), sum[r][i]);
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
    F32 sum[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) sum[r][i] = broadcast(0.0f);
    const uint32_t* v = values + begin / PER_WORD * dim;
    for (int j = begin; j < end; j += PER_WORD, v += dim) {
        U32 vs[N];
        for (int i = 0; i < N; ++i) vs[i] = load_u32(v + LANES * i);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            U32 two = broadcast_word(weights + r * WEIGHTS + j);
            for (int i = 0; i < N; ++i) sum[r][i] = dot(sum[r][i], two, vs[i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) {
            float* at = to + r * dim + LANES * i;
            store(at, merged(load(at), sum[r][i], rescale, r));
        }
}

template <int R>
void attend_block(const AttentionArgs& c, const TileBuffers& work, const uint32_t* q, int64_t tile, int64_t block, State& state) {
    int from[R], to[R];
    for (int r = 0; r < R; ++r) {
        Range range = visible_range(c, tile * TILE + r);
        from[r] = static_cast<int>(std::clamp<int64_t>(range.begin - block * BLOCK, 0, BLOCK));
        to[r] = static_cast<int>(std::clamp<int64_t>(range.end - block * BLOCK, 0, BLOCK));
    }
    int begin = from[0] / N_TILE * N_TILE, last = to[R - 1];  // rows ascend
    if (begin >= last) return;
    int dim = static_cast<int>(c.dim), end = static_cast<int>(divide_up(last, N_TILE)) * N_TILE;
    alignas(64) float row_max[R][LANES];
    score_block<R>(q, work.keys, dim / PER_WORD, begin, end, from, to, c.masked_keys ? c.masked_keys + block * BLOCK : nullptr, work.scores,
             row_max);
    BlockState part;
    (c.softcap > 0 ? softmax_block<R, true> : softmax_block<R, false>)(c, begin, end, work.scores, row_max, work.weights, part);
    Rescale rescale = merge_state(state.row_max, state.row_sum, part.row_max, part.row_sum);
    int stop = static_cast<int>(divide_up(last, LANES)) * LANES, d = 0;  // weights after `last` are zeros
    for (; d + N_TILE <= dim; d += N_TILE)
        accumulate<R, VECTORS>(work.weights, work.values + d, dim, begin, stop, rescale, state.output() + d);
    auto rest = [&](auto n) { accumulate<R, decltype(n)::value>(work.weights, work.values + d, dim, begin, stop, rescale, state.output() + d); };
    int left = (dim - d) / LANES;
    if (left == 1) rest(std::integral_constant<int, 1>());
    if (VECTORS > 2 && left == 2) rest(std::integral_constant<int, 2>());
    if (VECTORS > 2 && left == 3) rest(std::integral_constant<int, 3>());
}

using AttendBlock = void (*)(const AttentionArgs&, const TileBuffers&, const uint32_t*, int64_t, int64_t, State&);
constexpr AttendBlock attend_blocks[TILE + 1] = {nullptr, attend_block<1>, attend_block<2>, attend_block<3>, attend_block<4>, attend_block<5>, attend_block<6>};

void attend_tile(const AttentionArgs& c, const TileBuffers& work, const uint32_t* q, int64_t tile, int64_t block, State& state) {
    Range rows = rows_of(c, tile);
    attend_blocks[rows.end - rows.begin](c, work, q, tile, block, state);
}

}  // namespace
