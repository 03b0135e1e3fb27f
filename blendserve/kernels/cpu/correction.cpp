// The corrections `shift` and `ridge` of reused KV. blend/corrections has the reason; kernels/reference.py is the plain form.
//
//     stored = [key before RoPE | value] of the recomputed tokens                           [rows, 2 dim]
//     expected = scale * context_weight * (stored W0 + c0), by the prior                    ridge only; a scale each for K and V
//     delta = fresh - stored - expected; its mean by chunk, shrunk
//     (x' x + penalty) W = x' (delta - mean),  x = context_weight * (stored, centred)       ridge only; a small system a kv head
//     [key before RoPE | value] of every reused token += scale * expected + scale * (x W + mean of its chunk)
//
// Each kv head is independent; items of work are small enough that two threads share three heads evenly.

#include <cmath>
#include <utility>

#include "elementwise.h"

namespace {

constexpr int TILE = 6;      // tokens predicted together: with VECTORS each they fill the registers
constexpr int BLOCK = 96;    // tokens of an item of work
constexpr int ROW_STEP = 4;  // rows of a system taken together
constexpr int MAX_DIM = 256;
constexpr float MIN_SQUARE = 1e-12f;     // mean square of features that are 0
constexpr float MIN_SPREAD = 1 / 64.0f;  // of the size of features: what varies less is rounding (reference.py)

thread_local Workspace heads_memory;

// Arrays of a kv head, f = 2 dim numbers wide, a multiple of a strip. Loops do ROW_STEP rows at a time; the numbers after the last
// row are never read.
struct Head {
    float *left, *x, *expected;  // [rows, f]: deltas, features, null without a regression, and what the prior expects
    float *gram, *w;             // [f, f]
    float* constants;            // [chunks, f]
    float* centre;               // [f]
    float *share, *square;       // of keys, and of values: how much of `expected` counts; mean square of centred features
    uint32_t* weights;           // words [f / PER_WORD][f], of rows of W
};

int64_t padded_rows(const CorrectionArgs& c) { return divide_up(c.rows, ROW_STEP) * ROW_STEP; }

int64_t floats_per_head(const CorrectionArgs& c) {
    int64_t f = 2 * c.dim, n = (3 * padded_rows(c) + 2 * f + c.chunks + 1 + f / PER_WORD) * f + 2 * N_TILE;
    return divide_up(n, LANES) * LANES;
}

Head head_at(const CorrectionArgs& c, float* memory) {
    int64_t f = 2 * c.dim, rows = padded_rows(c);
    auto take = [&](int64_t n) { return std::exchange(memory, memory + n); };
    Head h{take(rows * f), take(rows * f), take(rows * f), take(f * f), take(f * f), take(c.chunks * f), take(f), take(N_TILE),
           take(N_TILE), reinterpret_cast<uint32_t*>(take(f / PER_WORD * f))};
    if (c.penalty < 0) h.x = nullptr;
    return h;
}

// row(chunk, s) of each recomputed token s.
template <class Row>
void each_recomputed(const CorrectionArgs& c, Row row) {
    for (int64_t n = 0; n < c.chunks; ++n)
        for (int64_t s = c.first_recomputed[n]; s < c.first_recomputed[n + 1]; ++s) row(n, s);
}

void to_f32_array(const elem_t* from, float* to, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) store(to + j, load(from + j));
}

// to += factor * from
void add(float* to, const float* from, float factor, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) store(to + j, fma(load(from + j), broadcast(factor), load(to + j)));
}

// The recomputed tokens' stored and fresh keys (or values), into the key (or value) half of x and left.
void collect_deltas(const CorrectionArgs& c, int64_t head, bool key, Head& h) {
    RopeAngles rope{c.cos, c.sin, c.rope_row, c.rope_width};
    const elem_t* stored = key ? c.keys + head * c.k_head : c.values + head * c.v_head;
    const elem_t* fresh = key ? c.fresh_keys + head * c.fresh_k_head : c.fresh_values + head * c.fresh_v_head;
    int64_t stored_row = key ? c.k_row : c.v_row, fresh_row = key ? c.fresh_k_row : c.fresh_v_row;
    int64_t f = 2 * c.dim, offset = key ? 0 : c.dim;
    alignas(64) float unused[MAX_DIM];
    for (int64_t s = 0; s < c.rows; ++s) {
        float *moved = h.left + s * f + offset, *known = h.x ? h.x + s * f + offset : unused;
        to_f32_array(stored + c.recomputed_index[s] * stored_row, known, c.dim);
        to_f32_array(fresh + c.recomputed_row[s] * fresh_row, moved, c.dim);
        add(moved, known, -1, c.dim);
        if (!key) continue;
        apply_rope_f32(rope, c.recomputed_index[s], moved, -1);
        if (h.x) apply_rope_f32(rope, c.recomputed_index[s], known, -1);
    }
}

// ROW_STEP rows of x y + first, and a strip of each: x [ROW_STEP, n], or its transpose, and y [n, strip], all of rows of f numbers;
// first [strip] may be null.
template <bool TRANSPOSED>
inline void multiply(const float* x, const float* y, int64_t n, int64_t f, const float* first, float* out) {
    F32 sum[ROW_STEP][VECTORS];
    for (int r = 0; r < ROW_STEP; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = first ? load(first + v * LANES) : broadcast(0.0f);
    auto one = [&](int64_t i, int r) { return broadcast(TRANSPOSED ? x[i * f + r] : x[r * f + i]); };
    add_products(n, one, y, f, sum, [](F32 s, F32 a, F32 b) { return fma(a, b, s); });
    for (int r = 0; r < ROW_STEP; ++r)
        for (int v = 0; v < VECTORS; ++v) store(out + r * f + v * LANES, sum[r][v]);
}

// expected -> of as much other text as each chunk has. The prior's factor: the slope of deviations on that, shrunk towards 1 by
// `prior_shrinkage` tokens, and at most that. left -> what is beyond it.
void fit_prior_scale(const CorrectionArgs& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    double both = 0, squares = 0;
    each_recomputed(c, [&](int64_t n, int64_t s) {
        float *expected = h.expected + s * f + offset, *left = h.left + s * f + offset;
        F32 product = broadcast(0.0f), square = broadcast(0.0f);
        for (int64_t j = 0; j < c.dim; j += LANES) {
            F32 p = load(expected + j) * broadcast(c.context_weight[n]);
            store(expected + j, p);
            product = fma(p, load(left + j), product);
            square = fma(p, p, square);
        }
        both += reduce_add(product), squares += reduce_add(square);
    });
    double trust = c.rows ? c.prior_shrinkage / static_cast<double>(c.rows) : 0;
    double share = squares > 0 ? (both / squares + trust) / (1 + trust) : 1;
    h.share[offset / c.dim] = static_cast<float>(std::clamp(share, 0.0, 1.0));
    for (int64_t s = 0; s < c.rows; ++s)
        add(h.left + s * f + offset, h.expected + s * f + offset, -h.share[offset / c.dim], c.dim);
}

// constants -> the shrunk mean of each chunk's deltas; centre -> the sum of features.
void mean_deltas(const CorrectionArgs& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    alignas(64) float overall[MAX_DIM] = {};
    if (h.x) std::fill_n(h.centre + offset, c.dim, 0.0f);
    for (int64_t n = 0; n < c.chunks; ++n) std::fill_n(h.constants + n * f + offset, c.dim, 0.0f);
    each_recomputed(c, [&](int64_t n, int64_t s) {
        add(h.constants + n * f + offset, h.left + s * f + offset, 1, c.dim);
        if (h.x) add(h.centre + offset, h.x + s * f + offset, 1, c.dim);
    });
    for (int64_t n = 0; n < c.chunks; ++n)
        add(overall, h.constants + n * f + offset, 1 / (static_cast<float>(c.rows) + c.zero_shrinkage), c.dim);
    for (int64_t n = 0; n < c.chunks; ++n) {
        float* mean = h.constants + n * f + offset;
        float trust = static_cast<float>(c.first_recomputed[n + 1] - c.first_recomputed[n]) + c.chunk_shrinkage;
        for (int64_t j = 0; j < c.dim; ++j) mean[j] = (mean[j] + c.chunk_shrinkage * overall[j]) / trust;
    }
}

// left -> what is beyond the mean of its chunk; x -> centred, and how large its numbers are then.
void centre(const CorrectionArgs& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    for (int64_t j = offset; j < offset + c.dim; ++j) h.centre[j] /= static_cast<float>(c.rows);
    double squares = 0, lengths = 0;
    each_recomputed(c, [&](int64_t n, int64_t s) {
        add(h.left + s * f + offset, h.constants + n * f + offset, -1, c.dim);
        F32 sum = broadcast(0.0f), length = broadcast(0.0f);
        for (int64_t j = offset; j < offset + c.dim; j += LANES) {
            F32 stored = load(h.x + s * f + j) * broadcast(c.context_weight[n]);
            F32 x = (load(h.x + s * f + j) - load(h.centre + j)) * broadcast(c.context_weight[n]);
            store(h.x + s * f + j, x);
            sum = fma(x, x, sum);
            length = fma(stored, stored, length);
        }
        squares += reduce_add(sum), lengths += reduce_add(length);
    });
    squares = std::max(squares, lengths * MIN_SPREAD * MIN_SPREAD);
    h.square[offset / c.dim] = std::max(MIN_SQUARE, static_cast<float>(squares / static_cast<double>(c.rows * c.dim)));
}

// Rows [i, i + N_TILE) of the system; of the symmetric gram, the part right of the diagonal. As keys and values are to be of
// unit size, the penalty is in units of theirs.
void build_system(const CorrectionArgs& c, int64_t i, Head& h) {
    int64_t f = 2 * c.dim, to = i + N_TILE;
    for (int64_t row = i; row < to; row += ROW_STEP)
        for (int64_t j = 0; j < f; j += N_TILE) {
            if (j + N_TILE > row) multiply<true>(h.x + row, h.x + j, c.rows, f, nullptr, h.gram + row * f + j);
            multiply<true>(h.x + row, h.left + j, c.rows, f, nullptr, h.w + row * f + j);
        }
    for (; i < to; ++i) h.gram[i * f + i] += c.penalty * h.square[i / c.dim];
}

// gram = L U in place, L of unit diagonal, from what is right of the diagonal: it is symmetric and positive definite.
void factor(float* gram, int64_t n) {
    for (int64_t k = 0; k < n; ++k) {
        const float *pivot = gram + k * n, inverse = 1 / pivot[k];
        for (int64_t i = k + 1; i < n; ++i) {
            float *row = gram + i * n, by = pivot[i] * inverse;
            auto reduced = [&](int64_t j) { return fnma(broadcast(by), load(pivot + j), load(row + j)); };
            int64_t j = i / LANES * LANES;
            store(row + j, outside_range(0, 0, static_cast<int>(i - j)), reduced(j));
            for (j += LANES; j < n; j += LANES) store(row + j, reduced(j));
            row[k] = by;
        }
    }
}

// L U x = w in place, for a strip of w.
void substitute(const float* lu, float* w, int64_t n) {
    F32 sum[ROW_STEP][VECTORS];
    auto each = [&](int64_t i, auto use) {
        for (int r = 0; r < ROW_STEP; ++r)
            for (int v = 0; v < VECTORS; ++v) use(sum[r][v], w + (i + r) * n + v * LANES);
    };
    auto read = [](F32& x, const float* at) { x = load(at); };
    auto write = [](F32& x, float* at) { store(at, x); };
    // sum -= lu[i .. i + ROW_STEP, k] * w[k], for k from .. to - 1
    auto eliminate = [&](int64_t i, int64_t from, int64_t to) {
        add_products(to - from, [&](int64_t k, int r) { return broadcast(lu[(i + r) * n + from + k]); }, w + from * n, n, sum,
                     [](F32 s, F32 a, F32 b) { return fnma(a, b, s); });
    };
    for (int64_t i = 0; i < n; i += ROW_STEP) {
        each(i, read);
        eliminate(i, 0, i);
        for (int r = 1; r < ROW_STEP; ++r)
            for (int q = 0; q < r; ++q)
                for (int v = 0; v < VECTORS; ++v)
                    sum[r][v] = fnma(broadcast(lu[(i + r) * n + i + q]), sum[q][v], sum[r][v]);
        each(i, write);
    }
    for (int64_t i = n - ROW_STEP; i >= 0; i -= ROW_STEP) {
        each(i, read);
        eliminate(i, i + ROW_STEP, n);
        for (int r = ROW_STEP - 1; r >= 0; --r)
            for (int v = 0; v < VECTORS; ++v) {
                for (int q = r + 1; q < ROW_STEP; ++q)
                    sum[r][v] = fnma(broadcast(lu[(i + r) * n + i + q]), sum[q][v], sum[r][v]);
                sum[r][v] = sum[r][v] / broadcast(lu[(i + r) * n + i + r]);
            }
        each(i, write);
    }
}

// A strip of W and of the constants, as tokens need them: of numbers that are not centred, with what is expected in them,
// and of constants what is to be scaled by `context_weight`.
void build_rule(const CorrectionArgs& c, int64_t head, int64_t j, Head& h) {
    int64_t f = 2 * c.dim;
    alignas(64) float centred[N_TILE] = {};
    for (int64_t i = 0; i < f; ++i) add(centred, h.w + i * f + j, -h.centre[i], N_TILE);
    F32 scale[VECTORS], share[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {  // a vector has keys or values
        bool key = j + v * LANES < c.dim;
        scale[v] = broadcast(key ? c.key_scale : c.value_scale);
        share[v] = broadcast(c.prior ? (key ? c.prior_key_scale : c.prior_value_scale) * h.share[key ? 0 : 1] : 0);
    }
    auto moved = [&](F32 learnt, const float* expected, int v) {
        F32 x = scale[v] * learnt;
        return expected ? fma(share[v], load(expected + v * LANES), x) : x;
    };
    for (int64_t i = 0; i < f; ++i) {
        float* row = h.w + i * f + j;
        const float* expected = c.prior ? c.prior + (head * f + i) * f + j : nullptr;
        for (int v = 0; v < VECTORS; ++v) store(row + v * LANES, moved(load(row + v * LANES), expected, v));
    }
    for (int64_t i = 0; i < f / PER_WORD; ++i)
        for (int64_t k = j; k < j + N_TILE; k += LANES) {
            const float *low = h.w + PER_WORD * i * f + k, *high = low + (PER_WORD - 1) * f;
            store_u32(h.weights + i * f + k, pack_words(load(low), load(high)));
        }
    const float* constant = c.prior ? c.prior_constant + head * f + j : nullptr;
    for (int64_t n = 0; n < c.chunks; ++n)
        for (int v = 0; v < VECTORS; ++v) {
            float* to = h.constants + n * f + j + v * LANES;
            store(to, moved(load(to) / broadcast(c.context_weight[n]) + load(centred + v * LANES), constant, v));
        }
}

// n tokens of a chunk, at most TILE.
void shift_tile(const CorrectionArgs& c, const Head& h, int64_t head, int64_t chunk, const int64_t* tokens, int64_t n) {
    int64_t dim = c.dim;
    RopeAngles rope{c.cos, c.sin, c.rope_row, c.rope_width};
    const float* constants = h.constants + chunk * 2 * dim;
    elem_t *keys = c.keys + head * c.k_head, *values = c.values + head * c.v_head;
    alignas(64) float shift[TILE][2 * MAX_DIM], key[MAX_DIM];
    F32 context_weight = broadcast(c.context_weight[chunk]);
    if (h.x) {
        alignas(64) elem_t known[TILE][2 * MAX_DIM];
        for (int64_t r = n; r < TILE; ++r) std::memset(known[r], 0, 2 * dim * sizeof(elem_t));
        for (int64_t r = 0; r < n; ++r) {
            to_f32_array(keys + tokens[r] * c.k_row, key, dim);
            apply_rope_f32(rope, tokens[r], key, -1);
            for (int64_t j = 0; j < dim; j += LANES) store(known[r] + j, load(key + j));
            std::memcpy(known[r] + dim, values + tokens[r] * c.v_row, dim * sizeof(elem_t));
        }
        for (int64_t j = 0; j < 2 * dim; j += N_TILE) {
            F32 sum[TILE][VECTORS];
            for (int r = 0; r < TILE; ++r)
                for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(constants + j + v * LANES);
            auto word = [&](int64_t i, int r) { return broadcast_word(known[r] + PER_WORD * i); };
            add_dots(2 * dim / PER_WORD, word, h.weights + j, 2 * dim, sum);
            for (int64_t r = 0; r < n; ++r)
                for (int v = 0; v < VECTORS; ++v) store(shift[r] + j + v * LANES, sum[r][v]);
        }
    }
    for (int64_t r = 0; r < n; ++r) {
        if (!h.x)
            for (int64_t j = 0; j < 2 * dim; ++j) shift[r][j] = (j < dim ? c.key_scale : c.value_scale) * constants[j];
        else
            for (int64_t j = 0; j < 2 * dim; j += LANES) store(shift[r] + j, load(shift[r] + j) * context_weight);
        apply_rope_f32(rope, tokens[r], shift[r], 1);
        elem_t *k = keys + tokens[r] * c.k_row, *v = values + tokens[r] * c.v_row;
        for (int64_t j = 0; j < dim; j += LANES) {
            store(k + j, load(k + j) + load(shift[r] + j));
            store(v + j, load(v + j) + load(shift[r] + dim + j));
        }
    }
}

// Item i of a head's: some tokens of some chunk.
void shift_block(const CorrectionArgs& c, const Head& h, int64_t head, int64_t item) {
    for (int64_t n = 0; n < c.chunks; ++n) {
        int64_t stop = c.first_reused[n + 1], blocks = divide_up(stop - c.first_reused[n], BLOCK);
        if (item < blocks) {
            int64_t begin = c.first_reused[n] + item * BLOCK, end = std::min(begin + BLOCK, stop);
            for (int64_t i = begin; i < end; i += TILE)
                shift_tile(c, h, head, n, c.reused_index + i, std::min<int64_t>(TILE, end - i));
            return;
        }
        item -= blocks;
    }
}

}  // namespace

void blendserve_correct_kv(const CorrectionArgs& c) {
    bool has_regression = c.penalty >= 0, fits = has_regression && c.rows;
    int64_t f = 2 * c.dim, strips = f / N_TILE, blocks = 0, numbers = floats_per_head(c);
    for (int64_t n = 0; n < c.chunks; ++n) blocks += divide_up(c.first_reused[n + 1] - c.first_reused[n], BLOCK);
    auto* memory = heads_memory.take<float>(numbers * c.kv_heads);
    if (!c.rows) std::fill_n(memory, numbers * c.kv_heads, 0.0f);  // W, where nothing is fitted
    // Shares out `parts` items of every head among the threads of the region; returns when all are done.
    auto each = [&](int64_t parts, auto item) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < parts * c.kv_heads; ++i) {
            Head h = head_at(c, memory + i / parts * numbers);
            item(h, i / parts, i % parts);
        }
    };
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
        each(2, [&](Head& h, int64_t head, int64_t half) { collect_deltas(c, head, half == 0, h); });
        if (c.prior)
            each(strips, [&](Head& h, int64_t head, int64_t strip) {
                int64_t j = strip * N_TILE;
                const float *w = c.prior + head * f * f + j, *constant = c.prior_constant + head * f + j;
                for (int64_t s = 0; s < c.rows; s += ROW_STEP) multiply<false>(h.x + s * f, w, f, f, constant, h.expected + s * f + j);
            });
        each(2, [&](Head& h, int64_t, int64_t half) {
            int64_t offset = half * c.dim;
            if (c.prior) fit_prior_scale(c, offset, h);
            mean_deltas(c, offset, h);
            if (fits) centre(c, offset, h);
        });
        if (fits) {
            each(strips, [&](Head& h, int64_t, int64_t strip) { build_system(c, strip * N_TILE, h); });
            each(1, [&](Head& h, int64_t, int64_t) { factor(h.gram, f); });
        }
        if (has_regression)
            each(strips, [&](Head& h, int64_t head, int64_t strip) {
                if (fits) substitute(h.gram, h.w + strip * N_TILE, f);
                build_rule(c, head, strip * N_TILE, h);
            });
        each(blocks, [&](Head& h, int64_t head, int64_t block) { shift_block(c, h, head, block); });
    }
}
