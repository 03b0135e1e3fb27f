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

#include "rope.h"

namespace {

constexpr int TILE = 6;  // tokens predicted together: with VECTORS each they fill the registers

constexpr int BLOCK = 96;         // tokens of an item of work
constexpr int ROW_STEP = 4;           // rows of a system taken together
constexpr int MAX_DIM = 256;
constexpr float MIN_SQUARE = 1e-12f;          // mean square of features that are 0
constexpr float MIN_SPREAD = 1 / 64.0f;  // of the size of features: what varies less is rounding (reference.py)

thread_local Workspace heads_memory;

// Arrays of a kv head, f = 2 dim numbers wide, a multiple of a strip.
struct Head {
    float *x, *left;      // [rows, f]
    float *gram, *w;      // [f, f]
    float* expected;       // [rows, f], by the prior
    float* share;          // of it that counts: of keys, and of values
    float* centre;         // [f]
    float* square;         // mean square of centred keys, and of values
    float* constants;     // [chunks, f]
    uint32_t* weights;    // words [f / PER_WORD][f], of rows of W
};

// Loops do ROW_STEP rows at a time; the numbers after the last row are never read.
int64_t padded_rows(int64_t rows) { return divide_up(rows, ROW_STEP) * ROW_STEP; }

size_t floats_per_head(const CorrectionArgs& c) {
    int64_t f = 2 * c.dim, rows = padded_rows(c.rows);
    int64_t fitted = c.penalty < 0 ? 0 : rows * f + 2 * f * f + f + 2 * N_TILE + f / PER_WORD * f;
    return fitted + (rows + (c.prior ? rows : 0) + c.chunks) * f;
}

Head head_at(const CorrectionArgs& c, float* memory) {
    int64_t f = 2 * c.dim;
    Head h{};
    auto take = [&](int64_t n) { return std::exchange(memory, memory + n); };
    int64_t rows = padded_rows(c.rows);
    h.left = take(rows * f);
    h.constants = take(c.chunks * f);
    if (c.penalty < 0) return h;
    h.x = take(rows * f), h.gram = take(f * f), h.w = take(f * f), h.centre = take(f);
    h.square = take(N_TILE), h.share = take(N_TILE);
    if (c.prior) h.expected = take(rows * f);
    h.weights = reinterpret_cast<uint32_t*>(take(f / PER_WORD * f));
    return h;
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
    for (int64_t i = 0; i < n; ++i) {
        F32 ys[VECTORS];
        for (int v = 0; v < VECTORS; ++v) ys[v] = load(y + i * f + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROW_STEP; ++r) {
            F32 one = broadcast(TRANSPOSED ? x[i * f + r] : x[r * f + i]);
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = fma(one, ys[v], sum[r][v]);
        }
    }
    for (int r = 0; r < ROW_STEP; ++r)
        for (int v = 0; v < VECTORS; ++v) store(out + r * f + v * LANES, sum[r][v]);
}

// What the prior expects of a kv head's recomputed tokens: a strip of it, from j.
void predict_by_prior(const CorrectionArgs& c, int64_t head, int64_t j, Head& h) {
    int64_t f = 2 * c.dim;
    const float *w = c.prior + head * f * f + j, *constant = c.prior_constant + head * f + j;
    for (int64_t s = 0; s < c.rows; s += ROW_STEP) multiply<false>(h.x + s * f, w, f, f, constant, h.expected + s * f + j);
}

// expected -> of this much other text.
void weight_expected(const CorrectionArgs& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    for (int64_t n = 0; n < c.chunks; ++n)
        for (int64_t s = c.first_recomputed[n]; s < c.first_recomputed[n + 1]; ++s)
            for (int64_t j = s * f + offset; j < s * f + offset + c.dim; j += LANES)
                store(h.expected + j, load(h.expected + j) * broadcast(c.context_weight[n]));
}

// The prior's factor: the slope of deviations on predictions, shrunk towards 1 by `prior_shrinkage` tokens, and at most
// that. left -> what is beyond it.
void fit_prior_scale(const CorrectionArgs& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    double both = 0, squares = 0;
    for (int64_t s = 0; s < c.rows; ++s) {
        const float *p = h.expected + s * f + offset, *y = h.left + s * f + offset;
        F32 product = broadcast(0.0f), square = broadcast(0.0f);
        for (int64_t j = 0; j < c.dim; j += LANES) {
            product = fma(load(p + j), load(y + j), product);
            square = fma(load(p + j), load(p + j), square);
        }
        both += reduce_add(product), squares += reduce_add(square);
    }
    double trust = c.rows ? c.prior_shrinkage / static_cast<double>(c.rows) : 0;
    double share = squares > 0 ? (both / squares + trust) / (1 + trust) : 1;
    h.share[offset / c.dim] = static_cast<float>(std::clamp(share, 0.0, 1.0));
    for (int64_t s = 0; s < c.rows; ++s)
        add(h.left + s * f + offset, h.expected + s * f + offset, -h.share[offset / c.dim], c.dim);
}

// Sums of left by chunk, and of x.
void sum_deltas(const CorrectionArgs& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    if (h.x) std::fill(h.centre + offset, h.centre + offset + c.dim, 0.0f);
    for (int64_t n = 0; n < c.chunks; ++n) {
        float* sum = h.constants + n * f + offset;
        std::fill(sum, sum + c.dim, 0.0f);
        for (int64_t s = c.first_recomputed[n]; s < c.first_recomputed[n + 1]; ++s) {
            add(sum, h.left + s * f + offset, 1, c.dim);
            if (h.x) add(h.centre + offset, h.x + s * f + offset, 1, c.dim);
        }
    }
}

// Sums by chunk -> shrunk means of a chunk's deviations.
void shrink_means(const CorrectionArgs& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    alignas(64) float overall[MAX_DIM] = {};
    for (int64_t n = 0; n < c.chunks; ++n)
        add(overall, h.constants + n * f + offset, 1 / (static_cast<float>(c.rows) + c.zero_shrinkage), c.dim);
    for (int64_t n = 0; n < c.chunks; ++n) {
        float *mean = h.constants + n * f + offset, trust = static_cast<float>(c.first_recomputed[n + 1] - c.first_recomputed[n]) + c.chunk_shrinkage;
        for (int64_t j = 0; j < c.dim; ++j) mean[j] = (mean[j] + c.chunk_shrinkage * overall[j]) / trust;
    }
}

// left -> what is beyond the mean of its chunk; x -> centred, and how large its numbers are then.
void centre(const CorrectionArgs& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    for (int64_t j = offset; j < offset + c.dim; ++j) h.centre[j] /= static_cast<float>(c.rows);
    double squares = 0, lengths = 0;
    for (int64_t n = 0; n < c.chunks; ++n)
        for (int64_t s = c.first_recomputed[n]; s < c.first_recomputed[n + 1]; ++s) {
            add(h.left + s * f + offset, h.constants + n * f + offset, -1, c.dim);
            F32 sum = broadcast(0.0f), length = broadcast(0.0f);
            for (int64_t j = offset; j < offset + c.dim; j += LANES) {
                F32 stored = load(h.x + s * f + j) * broadcast(c.context_weight[n]);
                F32 x = (load(h.x + s * f + j) - load(h.centre + j)) * broadcast(c.context_weight[n]);
                store(h.x + s * f + j, x);
                sum = fma(x, x, sum);
                length = fma(stored, stored, length);
            }
            squares += reduce_add(sum);
            lengths += reduce_add(length);
        }
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
        float inverse = 1 / gram[k * n + k];
        for (int64_t i = k + 1; i < n; ++i) {
            float by = gram[k * n + i] * inverse;
            int64_t from = i / LANES * LANES;  // what this changes left of the diagonal is overwritten or not read
            for (int64_t j = from; j < n; j += LANES) {
                Mask right = lanes_from(j == from ? static_cast<int>(i - from) : 0);
                store(gram + i * n + j, right, fnma(broadcast(by), load(gram + k * n + j), load(gram + i * n + j)));
            }
            gram[i * n + k] = by;
        }
    }
}

// sum -= lu[i .. i + ROW_STEP, k] * w[k], over a strip
inline void eliminate(const float* lu, const float* w, int64_t n, int64_t i, int64_t k, F32 (&sum)[ROW_STEP][VECTORS]) {
    F32 y[VECTORS];
    for (int v = 0; v < VECTORS; ++v) y[v] = load(w + k * n + v * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROW_STEP; ++r) {
        F32 by = broadcast(lu[(i + r) * n + k]);
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = fnma(by, y[v], sum[r][v]);
    }
}

// L U x = w in place, for a strip of w.
void substitute(const float* lu, float* w, int64_t n) {
    F32 sum[ROW_STEP][VECTORS];
    auto move = [&](int64_t i, bool in) {
        for (int r = 0; r < ROW_STEP; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                float* at = w + (i + r) * n + v * LANES;
                if (in)
                    sum[r][v] = load(at);
                else
                    store(at, sum[r][v]);
            }
    };
    for (int64_t i = 0; i < n; i += ROW_STEP) {
        move(i, true);
        for (int64_t k = 0; k < i; ++k) eliminate(lu, w, n, i, k, sum);
        for (int r = 1; r < ROW_STEP; ++r)
            for (int q = 0; q < r; ++q)
                for (int v = 0; v < VECTORS; ++v)
                    sum[r][v] = fnma(broadcast(lu[(i + r) * n + i + q]), sum[q][v], sum[r][v]);
        move(i, false);
    }
    for (int64_t i = n - ROW_STEP; i >= 0; i -= ROW_STEP) {
        move(i, true);
        for (int64_t k = i + ROW_STEP; k < n; ++k) eliminate(lu, w, n, i, k, sum);
        for (int r = ROW_STEP - 1; r >= 0; --r)
            for (int v = 0; v < VECTORS; ++v) {
                for (int q = r + 1; q < ROW_STEP; ++q)
                    sum[r][v] = fnma(broadcast(lu[(i + r) * n + i + q]), sum[q][v], sum[r][v]);
                sum[r][v] = sum[r][v] / broadcast(lu[(i + r) * n + i + r]);
            }
        move(i, false);
    }
}

// A strip of W and of the constants, as tokens need them: of numbers that are not centred, with what is expected in them,
// and of constants what is to be scaled by `context_weight`.
void build_rule(const CorrectionArgs& c, int64_t head, int64_t j, Head& h) {
    int64_t f = 2 * c.dim;
    alignas(64) float centred[N_TILE] = {}, scales[N_TILE], shares[N_TILE];
    for (int64_t i = 0; i < f; ++i) add(centred, h.w + i * f + j, -h.centre[i], N_TILE);
    for (int64_t k = 0; k < N_TILE; ++k) {
        bool key = j + k < c.dim;
        scales[k] = key ? c.key_scale : c.value_scale;
        shares[k] = c.prior ? (key ? c.prior_key_scale : c.prior_value_scale) * h.share[(j + k) / c.dim] : 0;
    }
    auto moved = [&](const float* learnt, const float* expected, int64_t k) {
        F32 x = load(scales + k) * load(learnt + k);
        return expected ? fma(load(shares + k), load(expected + k), x) : x;
    };
    for (int64_t i = 0; i < f; ++i) {
        float* row = h.w + i * f + j;
        const float* expected = c.prior ? c.prior + (head * f + i) * f + j : nullptr;
        for (int64_t k = 0; k < N_TILE; k += LANES) store(row + k, moved(row, expected, k));
    }
    for (int64_t i = 0; i < f / PER_WORD; ++i)
        for (int64_t k = j; k < j + N_TILE; k += LANES) {
            const float *low = h.w + PER_WORD * i * f + k, *high = low + (PER_WORD - 1) * f;
            store_u32(h.weights + i * f + k, pack_words(load(low), load(high)));
        }
    const float* constant = c.prior ? c.prior_constant + head * f + j : nullptr;
    for (int64_t n = 0; n < c.chunks; ++n) {
        float* to = h.constants + n * f + j;
        for (int64_t k = 0; k < N_TILE; k += LANES)
            store(to + k, load(to + k) / broadcast(c.context_weight[n]) + load(centred + k));
        for (int64_t k = 0; k < N_TILE; k += LANES) store(to + k, moved(to, constant, k));
    }
}

// known W + constants for n tokens, known [TILE][f]; after n tokens, zeros.
void predict(const CorrectionArgs& c, const Head& h, const float* constants, const elem_t (*known)[2 * MAX_DIM], int64_t n,
             float (*shift)[2 * MAX_DIM]) {
    int64_t f = 2 * c.dim;
    for (int64_t j = 0; j < f; j += N_TILE) {
        F32 sum[TILE][VECTORS];
        for (int r = 0; r < TILE; ++r)
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(constants + j + v * LANES);
        const uint32_t* w = h.weights + j;
        for (int64_t i = 0; i < f; i += PER_WORD, w += f) {
            U32 y[VECTORS];
            for (int v = 0; v < VECTORS; ++v) y[v] = load_u32(w + v * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < TILE; ++r) {
                U32 x = broadcast_word(known[r] + i);
                for (int v = 0; v < VECTORS; ++v) sum[r][v] = dot(sum[r][v], x, y[v]);
            }
        }
        for (int64_t r = 0; r < n; ++r)
            for (int v = 0; v < VECTORS; ++v) store(shift[r] + j + v * LANES, sum[r][v]);
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
        predict(c, h, constants, known, n, shift);
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
    int64_t f = 2 * c.dim, strips = f / N_TILE, blocks = 0;
    for (int64_t n = 0; n < c.chunks; ++n) blocks += divide_up(c.first_reused[n + 1] - c.first_reused[n], BLOCK);
    size_t numbers = divide_up(floats_per_head(c), LANES) * LANES;
    auto* memory = reinterpret_cast<float*>(heads_memory.take(sizeof(float) * numbers * c.kv_heads));
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
        each(2, [&](Head& h, int64_t head, int64_t half) {
            collect_deltas(c, head, half == 0, h);
            if (has_regression && !fits) std::fill_n(h.centre + half * c.dim, c.dim, 0.0f);
        });
        if (c.prior) each(strips, [&](Head& h, int64_t head, int64_t strip) { predict_by_prior(c, head, strip * N_TILE, h); });
        each(2, [&](Head& h, int64_t, int64_t half) {
            int64_t offset = half * c.dim;
            if (c.prior) weight_expected(c, offset, h), fit_prior_scale(c, offset, h);
            sum_deltas(c, offset, h);
            shrink_means(c, offset, h);
            if (fits) centre(c, offset, h);
        });
        if (fits) {
            each(strips, [&](Head& h, int64_t, int64_t strip) { build_system(c, strip * N_TILE, h); });
            each(1, [&](Head& h, int64_t, int64_t) { factor(h.gram, f); });
        }
        if (has_regression)
            each(strips, [&](Head& h, int64_t head, int64_t strip) {
                int64_t j = strip * N_TILE;
                if (fits)
                    substitute(h.gram, h.w + j, f);
                else
                    for (int64_t i = 0; i < f; ++i) std::fill_n(h.w + i * f + j, N_TILE, 0.0f);
                build_rule(c, head, j, h);
            });
        each(blocks, [&](Head& h, int64_t head, int64_t block) { shift_block(c, h, head, block); });
    }
}
