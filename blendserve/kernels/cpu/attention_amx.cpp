// Attention by position on matrix tiles (AMX), in bf16: attention.h says what is computed.
//
// 16 stacked rows make a tile. Scores of a tile against the 64 keys of a strip are 4 tiles, each the sum over dims, 32 at a
// time; so are what values of 64 dims add to them, over keys:
//
//     A = queries [16 rows][32 dims]    B = packed keys [16 words of dims][16 keys]      C = scores [16 rows][16 keys]
//     A = weights [16 rows][32 keys]    B = packed values [16 words of keys][16 dims]    C = mix [16 rows][16 dims]
//
// What is packed is B's layout as it is. A row of C depends on its row of A alone.
//
// Tiles and vectors work at the same time: scores of a strip while the one before is looked through, values of a strip while
// the next one is weighed. Weights leave the exponential rounded, and their sum is a product with ones: that of what is mixed.

#include "amx_tiles.h"
#include "common.h"

namespace {

constexpr int TILE = 16;
constexpr int BLOCK = 512;
constexpr int SCORES = BLOCK + 16, WEIGHTS = BLOCK + 32;  // rows apart, so that they do not share places in the cache
constexpr int KEY_STRIDE = 16;
using ThreadScope = TileScope;

}  // namespace

#include "attention.h"

namespace {

int64_t words_of(const AttentionArgs& c) { return divide_up(c.dim / PER_WORD, LANES) * LANES; }

// Of 32 keys, the first 16 have the lower halves of words, the others the upper ones.
F32 weights_in(const elem_t* strip, int i) {
    U32 two = load_u32(strip + i / 2 * 2 * LANES);
    return as_f32(i % 2 ? _mm512_and_si512(two, broadcast_u32(0xffff0000u)) : _mm512_slli_epi32(two, 16));
}

// A tile's queries, [TILE][words], zeros where there are none.
void pack_queries(const AttentionArgs& c, int64_t head, int64_t tile, uint32_t* to) {
    Range rows = rows_of(c, tile);
    int64_t words = words_of(c);
    std::memset(to, 0, sizeof(uint32_t) * TILE * words);
    for (int64_t s = rows.begin; s < rows.end; ++s, to += words) {
        int64_t row = s / c.group, h = head * c.group + s % c.group;
        std::memcpy(to, c.q + h * c.q_head + row * c.q_row, sizeof(elem_t) * c.dim);
    }
}

// 2^x for x <= 0, to 1e-4 relative, plus half of bf16's last place: its upper half is 2^x rounded. 0 at -infinity.
inline U32 weight_bits(F32 x) {
    F32 f = fraction(x), p = broadcast(0.07706704736f);
    p = fma(p, f, broadcast(0.2276449949f));
    p = fma(p, f, broadcast(0.6951167583f));
    p = fma(p, f, broadcast(1.00390625f));
    return as_u32(scale_by_exp2(p, x));
}

// Tiles 0 .. N - 1 side by side.
template <int N>
inline void store_tiles(float* to, int64_t row_bytes) {
    _tile_stored(0, to, row_bytes);
    if (N > 1) _tile_stored(1, to + 16, row_bytes);
    if (N > 2) _tile_stored(2, to + 32, row_bytes);
    if (N > 3) _tile_stored(3, to + 48, row_bytes);
}

// Scores of a tile against the keys of a strip.
inline void score_block(const uint32_t* q, const uint32_t* k, int words, float* scores) {
    zero_accumulators();
    for (int w = 0; w < words; w += LANES, k += LANES * N_TILE) {
        _tile_loadd(4, q + w, words * sizeof(uint32_t));
        _tile_stream_loadd(5, k, N_TILE * sizeof(uint32_t));
        _tile_dpbf16ps(0, 4, 5);
        _tile_stream_loadd(6, k + 16, N_TILE * sizeof(uint32_t));
        _tile_dpbf16ps(1, 4, 6);
        _tile_stream_loadd(5, k + 32, N_TILE * sizeof(uint32_t));
        _tile_dpbf16ps(2, 4, 5);
        _tile_stream_loadd(6, k + 48, N_TILE * sizeof(uint32_t));
        _tile_dpbf16ps(3, 4, 6);
    }
    store_tiles<4>(scores, SCORES * sizeof(float));
}

// A strip's scores as they count, and each row's largest.
inline void limit(const AttentionArgs& c, const Visible& visible, int s, float* scores, float (*row_max)[LANES]) {
    bool softcap = c.softcap > 0;
    scores += s;
    if (!softcap && !visible.is_edge(s)) {
#pragma GCC unroll 4
        for (int r = 0; r < TILE; ++r, scores += SCORES) {
            F32 a = max(load(scores), load(scores + 16)), b = max(load(scores + 32), load(scores + 48));
            store(row_max[r], max(load(row_max[r]), max(a, b)));
        }
        return;
    }
    for (int r = 0; r < visible.rows; ++r, scores += SCORES) {
        F32 largest = load(row_max[r]);
        for (int j = 0; j < N_TILE; j += LANES) {
            F32 x = load(scores + j);
            if (softcap) x = apply_softcap(x, c.scale, c.softcap);
            x = select(masked(visible, r, s + j), broadcast(NEG_INF), x);
            store(scores + j, x);
            largest = max(largest, x);
        }
        store(row_max[r], largest);
    }
}

// The largest lane of each of 16 vectors.
inline F32 largest_of_each(const float (*x)[LANES]) {
    U32 a[LANES];
    for (int i = 0; i < LANES; ++i) a[i] = as_u32(load(x[i]));
    transpose(a);
    F32 largest = as_f32(a[0]);
    for (int i = 1; i < LANES; ++i) largest = max(largest, as_f32(a[i]));
    return largest;
}

// The scores of a strip -> weights, of a row.
inline void softmax_block(const float* scores, F32 factor, float base, elem_t* weights) {
    auto bits = [&](int i) { return weight_bits(fms(load(scores + i), factor, broadcast(base))); };
    constexpr __mmask32 upper = 0xaaaaaaaa;
    store_u32(weights, _mm512_mask_mov_epi16(_mm512_srli_epi32(bits(0), 16), upper, bits(16)));
    store_u32(weights + 32, _mm512_mask_mov_epi16(_mm512_srli_epi32(bits(32), 16), upper, bits(48)));
}

// Step i of 8: weights of a strip times 16 N dims of its values, added to tiles 0 .. 3; with SUM, times ones, to tile 7.
template <int N, bool SUM>
inline void accumulate_step(int i, const elem_t* weights, const uint32_t* values, int dim) {
    int n = i % 4;
    weights += i / 4 * 2 * LANES;
    values += static_cast<int64_t>(i / 4) * LANES * dim + n * LANES;
    if (n == 0) {
        _tile_loadd(4, weights, WEIGHTS * sizeof(elem_t));
        if (SUM) _tile_dpbf16ps(7, 4, 6);
    }
    if (n >= N) return;
    _tile_stream_loadd(5, values, dim * sizeof(uint32_t));
    if (n == 0) _tile_dpbf16ps(0, 4, 5);
    if (n == 1) _tile_dpbf16ps(1, 4, 5);
    if (n == 2) _tile_dpbf16ps(2, 4, 5);
    if (n == 3) _tile_dpbf16ps(3, 4, 5);
}

template <int N, bool SUM>
inline void accumulate_strip(const elem_t* weights, const uint32_t* values, int dim) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) accumulate_step<N, SUM>(i, weights, values, dim);
}

// Tiles 0 .. N - 1 joined into `to` [TILE][dim], by way of `fresh`.
template <int N>
inline void merge(const Rescale& rescale, int rows, int dim, float* fresh, float* to) {
    store_tiles<N>(fresh, N_TILE * sizeof(float));
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < N; ++i) {
            float* at = to + r * dim + LANES * i;
            store(at, merged(load(at), load(fresh + r * N_TILE + LANES * i), rescale, r));
        }
}

// 16 N dims from d on, over weights that are there.
template <int N>
void accumulate_more(const TileBuffers& work, const Visible& visible, const Rescale& rescale, int dim, int d, State& state) {
    zero_accumulators();
    for (int s = visible.begin; s < visible.end; s += N_TILE)
        accumulate_strip<N, false>(work.weights + s, work.values + static_cast<int64_t>(s) / PER_WORD * dim + d, dim);
    merge<N>(rescale, visible.rows, dim, work.scores, state.output() + d);
}

// Weights of the strips, and 16 N dims mixed by them in tiles 0 .. 3; each row's sum of weights goes to `row_sum`.
template <int N>
inline void softmax_and_accumulate(const TileBuffers& work, const Visible& visible, F32 factor, const float* base, int dim,
                          float* row_sum) {
    auto values = [&](int s) { return work.values + static_cast<int64_t>(s) / PER_WORD * dim; };
    alignas(64) float sums[TILE][LANES];  // every column is the sum
    alignas(64) uint32_t ones[LANES];
    store_u32(ones, broadcast_u32(0x3f803f80u));
    compiler_fence();
    zero_accumulators();
    _tile_loadd(6, ones, 0);
    _tile_zero(7);
    for (int s = visible.begin; s < visible.end; s += N_TILE) {
        compiler_fence();
        if (s > visible.begin && visible.rows == TILE) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                int r = 2 * i;
                softmax_block(work.scores + r * SCORES + s, factor, base[r], work.weights + r * WEIGHTS + s);
                accumulate_step<N, true>(i, work.weights + s - N_TILE, values(s - N_TILE), dim);
                softmax_block(work.scores + (r + 1) * SCORES + s, factor, base[r + 1], work.weights + (r + 1) * WEIGHTS + s);
            }
            continue;
        }
        if (s > visible.begin) accumulate_strip<N, true>(work.weights + s - N_TILE, values(s - N_TILE), dim);
        for (int r = 0; r < visible.rows; ++r)
            softmax_block(work.scores + r * SCORES + s, factor, base[r], work.weights + r * WEIGHTS + s);
    }
    compiler_fence();
    accumulate_strip<N, true>(work.weights + visible.end - N_TILE, values(visible.end - N_TILE), dim);
    _tile_stored(7, sums, sizeof sums[0]);
    for (int r = 0; r < visible.rows; ++r) row_sum[r] = sums[r][0];
}

template <int N>
void attend_block(const AttentionArgs& c, const TileBuffers& work, const uint32_t* q, const Visible& visible, State& state) {
    alignas(64) float row_max[TILE][LANES], base[TILE];
    int dim = static_cast<int>(c.dim), words = static_cast<int>(words_of(c)), begin = visible.begin, end = visible.end;
    auto keys = [&](int s) { return work.keys + static_cast<int64_t>(s) * words; };
    for (int r = 0; r < TILE; ++r) store(row_max[r], broadcast(NEG_INF));
    compiler_fence();
    score_block(q, keys(begin), words, work.scores + begin);
    for (int s = begin + N_TILE; s < end; s += N_TILE) {
        score_block(q, keys(s), words, work.scores + s);
        limit(c, visible, s - N_TILE, work.scores, row_max);
    }
    limit(c, visible, end - N_TILE, work.scores, row_max);
    BlockState part;
    F32 factor = broadcast(c.softcap > 0 ? LOG2E : LOG2E * c.scale);
    F32 largest = select(tail_mask(visible.rows), largest_of_each(row_max) * factor, broadcast(NEG_INF));
    store(part.row_max, largest);
    store(base, select(equal(largest, broadcast(NEG_INF)), broadcast(0.0f), largest));
    softmax_and_accumulate<N>(work, visible, factor, base, dim, part.row_sum);
    Rescale rescale = merge_state(state.row_max, state.row_sum, part.row_max, part.row_sum);
    merge<N>(rescale, visible.rows, dim, work.scores, state.output());
    int d = N_TILE;
    for (; d + N_TILE <= dim; d += N_TILE) accumulate_more<4>(work, visible, rescale, dim, d, state);
    auto rest = dim - d == 48 ? accumulate_more<3> : dim - d == 32 ? accumulate_more<2> : accumulate_more<1>;
    if (d < dim) rest(work, visible, rescale, dim, d, state);
}

constexpr AttendBlock attend_blocks[5] = {nullptr, attend_block<1>, attend_block<2>, attend_block<3>, attend_block<4>};

void attend_visible(const AttentionArgs& c, const TileBuffers& work, const uint32_t* q, const Visible& visible, State& state) {
    attend_blocks[std::min<int64_t>(4, c.dim / LANES)](c, work, q, visible, state);
}

}  // namespace

void blendserve_attention(const AttentionArgs& args) {
    if (!args.rows) return;
    if (args.key_scores || tiles_per_head(args) < 8 * args.threads)
        SplitKv(args).run();
    else
        attend_packed(args);
}
