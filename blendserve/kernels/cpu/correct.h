// The corrections `shift` and `ridge`. kernels/reference.py is the plain form; blend/corrections says what for.
//
//     known = [key before RoPE | value] of the recomputed tokens, as stored      [rows, 2 dim]
//     expected = share * foreign * (known W0 + c0), what the prior says of them  one share for keys, one for values; ridge alone
//     moved = the same, fresh - stored - expected; mean of it by chunk, shrunk
//     (x' x + penalty) W = x' (moved - mean),  x = foreign * (known, centred)    one small system a kv head; ridge alone
//     every other token's [key before RoPE | value] += scale * expected + scale * (x W + mean of its chunk)
//
// foreign is a number of each chunk's.
//
// Each kv head goes by itself; work is split so that two threads share three heads evenly.
//
// Included once by each kind of it, which defines before it
//
//     TILE    tokens that are predicted together
//     Unit    what a thread prepares before it multiplies, and undoes behind it
//
// and behind it set_up and predict.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "rope.h"

// One call, as the caller fills it in. Strides are in elements; the innermost one is 1.
struct CorrectCall {
    Number *keys, *values;                        // [kv, tokens, dim], keys after RoPE
    const Number *fresh_keys, *fresh_values;      // [kv, fresh rows, dim]
    const Number *cos, *sin;                      // [tokens, width]
    const int64_t *from, *at;                     // [rows], the recomputed tokens' fresh rows, and where they stand
    const int64_t* first;                         // [chunks + 1], the first row of each
    const int64_t *others, *other_first;          // [..], [chunks + 1], the tokens that are to be moved, likewise
    const float *prior, *prior_constant;          // [kv, 2 dim, 2 dim], [kv, 2 dim]; null: nothing is expected
    const float* foreign;                         // [chunks]
    int64_t k_head, k_row, v_head, v_row, fk_head, fk_row, fv_head, fv_row, turn_row;
    int64_t kv, dim, width, rows, chunks;
    float weight, still, key_scale, value_scale, penalty;  // penalty < 0: no W
    float trust, prior_key_scale, prior_value_scale;
    int64_t threads;
};

namespace {

constexpr int BLOCK = 96;         // tokens of an item of work
constexpr int SOME = 4;           // rows of a system taken together
constexpr int MAX_DIM = 256;
constexpr float LEAST = 1e-12f;          // mean square of features that are 0
constexpr float LEAST_SPREAD = 1 / 64.0f;  // of the size of features: what varies less is rounding (reference.py)

thread_local Scratch move_scratch;

// What is known of a kv head, f = 2 dim numbers wide. All of it is multiples of a strip.
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

// Rows are taken SOME together; what stands behind the last is never read back.
int64_t room_for(int64_t rows) { return divide_up(rows, SOME) * SOME; }

size_t numbers_of(const CorrectCall& c) {
    int64_t f = 2 * c.dim, rows = room_for(c.rows);
    int64_t fitted = c.penalty < 0 ? 0 : rows * f + 2 * f * f + f + 2 * STRIP + f / PER_WORD * f;
    return fitted + (rows + (c.prior ? rows : 0) + c.chunks) * f;
}

Head head_in(const CorrectCall& c, float* memory) {
    int64_t f = 2 * c.dim;
    Head h{};
    auto take = [&](int64_t n) { return std::exchange(memory, memory + n); };
    int64_t rows = room_for(c.rows);
    h.left = take(rows * f);
    h.constants = take(c.chunks * f);
    if (c.penalty < 0) return h;
    h.x = take(rows * f), h.gram = take(f * f), h.w = take(f * f), h.centre = take(f);
    h.square = take(STRIP), h.share = take(STRIP);
    if (c.prior) h.expected = take(rows * f);
    h.weights = reinterpret_cast<uint32_t*>(take(f / PER_WORD * f));
    return h;
}

void widen(const Number* from, float* to, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) store(to + j, load(from + j));
}

// to += factor * from
void add(float* to, const float* from, float factor, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) store(to + j, fma(load(from + j), all(factor), load(to + j)));
}

// The recomputed tokens' stored and fresh keys (or values), into the key (or value) half of x and left.
void gather(const CorrectCall& c, int64_t head, bool key, Head& h) {
    Turn turn{c.cos, c.sin, c.turn_row, c.width};
    const Number* stored = key ? c.keys + head * c.k_head : c.values + head * c.v_head;
    const Number* fresh = key ? c.fresh_keys + head * c.fk_head : c.fresh_values + head * c.fv_head;
    int64_t stored_row = key ? c.k_row : c.v_row, fresh_row = key ? c.fk_row : c.fv_row;
    int64_t f = 2 * c.dim, offset = key ? 0 : c.dim;
    alignas(64) float unused[MAX_DIM];
    for (int64_t s = 0; s < c.rows; ++s) {
        float *moved = h.left + s * f + offset, *known = h.x ? h.x + s * f + offset : unused;
        widen(stored + c.at[s] * stored_row, known, c.dim);
        widen(fresh + c.from[s] * fresh_row, moved, c.dim);
        add(moved, known, -1, c.dim);
        if (!key) continue;
        turn_wide(turn, c.at[s], moved, -1);
        if (h.x) turn_wide(turn, c.at[s], known, -1);
    }
}

// What the prior expects of a kv head's recomputed tokens: a strip of it, from j.
void expect(const CorrectCall& c, int64_t head, int64_t j, Head& h) {
    int64_t f = 2 * c.dim;
    const float *w = c.prior + head * f * f + j, *constant = c.prior_constant + head * f + j;
    for (int64_t s = 0; s < c.rows; s += SOME) {
        Floats sum[SOME][VECTORS];
        for (int r = 0; r < SOME; ++r)
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(constant + v * LANES);
        for (int64_t i = 0; i < f; ++i) {
            Floats y[VECTORS];
            for (int v = 0; v < VECTORS; ++v) y[v] = load(w + i * f + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < SOME; ++r) {
                Floats x = all(h.x[(s + r) * f + i]);
                for (int v = 0; v < VECTORS; ++v) sum[r][v] = fma(x, y[v], sum[r][v]);
            }
        }
        for (int r = 0; r < SOME; ++r)
            for (int v = 0; v < VECTORS; ++v) store(h.expected + (s + r) * f + j + v * LANES, sum[r][v]);
    }
}

// expected -> of this much other text.
void place_expected(const CorrectCall& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    for (int64_t n = 0; n < c.chunks; ++n)
        for (int64_t s = c.first[n]; s < c.first[n + 1]; ++s)
            for (int64_t j = s * f + offset; j < s * f + offset + c.dim; j += LANES)
                store(h.expected + j, load(h.expected + j) * all(c.foreign[n]));
}

// How much of what is expected counts: the slope of what moved on it, drawn towards 1 by `trust` tokens' worth, and at most
// that. left -> what is beyond it.
void take_share(const CorrectCall& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    double both = 0, squares = 0;
    for (int64_t s = 0; s < c.rows; ++s) {
        const float *p = h.expected + s * f + offset, *y = h.left + s * f + offset;
        Floats product = all(0.0f), square = all(0.0f);
        for (int64_t j = 0; j < c.dim; j += LANES) {
            product = fma(load(p + j), load(y + j), product);
            square = fma(load(p + j), load(p + j), square);
        }
        both += sum_of(product), squares += sum_of(square);
    }
    double trust = c.rows ? c.trust / static_cast<double>(c.rows) : 0;
    double share = squares > 0 ? (both / squares + trust) / (1 + trust) : 1;
    h.share[offset / c.dim] = static_cast<float>(std::clamp(share, 0.0, 1.0));
    for (int64_t s = 0; s < c.rows; ++s)
        add(h.left + s * f + offset, h.expected + s * f + offset, -h.share[offset / c.dim], c.dim);
}

// Sums of left by chunk, and of x.
void take_sums(const CorrectCall& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    if (h.x) std::fill(h.centre + offset, h.centre + offset + c.dim, 0.0f);
    for (int64_t n = 0; n < c.chunks; ++n) {
        float* sum = h.constants + n * f + offset;
        std::fill(sum, sum + c.dim, 0.0f);
        for (int64_t s = c.first[n]; s < c.first[n + 1]; ++s) {
            add(sum, h.left + s * f + offset, 1, c.dim);
            if (h.x) add(h.centre + offset, h.x + s * f + offset, 1, c.dim);
        }
    }
}

// Sums by chunk -> means of what a chunk's tokens moved, shrunk.
void take_means(const CorrectCall& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    alignas(64) float overall[MAX_DIM] = {};
    for (int64_t n = 0; n < c.chunks; ++n)
        add(overall, h.constants + n * f + offset, 1 / (static_cast<float>(c.rows) + c.still), c.dim);
    for (int64_t n = 0; n < c.chunks; ++n) {
        float *mean = h.constants + n * f + offset, trust = static_cast<float>(c.first[n + 1] - c.first[n]) + c.weight;
        for (int64_t j = 0; j < c.dim; ++j) mean[j] = (mean[j] + c.weight * overall[j]) / trust;
    }
}

// left -> what is beyond the mean of its chunk; x -> centred, and how large its numbers are then.
void centre(const CorrectCall& c, int64_t offset, Head& h) {
    int64_t f = 2 * c.dim;
    for (int64_t j = offset; j < offset + c.dim; ++j) h.centre[j] /= static_cast<float>(c.rows);
    double squares = 0, lengths = 0;
    for (int64_t n = 0; n < c.chunks; ++n)
        for (int64_t s = c.first[n]; s < c.first[n + 1]; ++s) {
            add(h.left + s * f + offset, h.constants + n * f + offset, -1, c.dim);
            Floats sum = all(0.0f), length = all(0.0f);
            for (int64_t j = offset; j < offset + c.dim; j += LANES) {
                Floats stored = load(h.x + s * f + j) * all(c.foreign[n]);
                Floats x = (load(h.x + s * f + j) - load(h.centre + j)) * all(c.foreign[n]);
                store(h.x + s * f + j, x);
                sum = fma(x, x, sum);
                length = fma(stored, stored, length);
            }
            squares += sum_of(sum);
            lengths += sum_of(length);
        }
    squares = std::max(squares, lengths * LEAST_SPREAD * LEAST_SPREAD);
    h.square[offset / c.dim] = std::max(LEAST, static_cast<float>(squares / static_cast<double>(c.rows * c.dim)));
}

// Of each kind: rows [i, i + STRIP) of the system, of the symmetric gram what is right of its diagonal (left of it, anything).
void set_up(const CorrectCall& c, int64_t i, Head& h);

// As keys and values are to be of unit size, the penalty is in units of theirs.
void penalise(const CorrectCall& c, int64_t i, Head& h) {
    for (int64_t to = i + STRIP, f = 2 * c.dim; i < to; ++i) h.gram[i * f + i] += c.penalty * h.square[i / c.dim];
}

// gram = L U in place, L of unit diagonal, from what is right of the diagonal: it is symmetric and positive definite.
void factor(float* gram, int64_t n) {
    for (int64_t k = 0; k < n; ++k) {
        float inverse = 1 / gram[k * n + k];
        for (int64_t i = k + 1; i < n; ++i) {
            float by = gram[k * n + i] * inverse;
            int64_t from = i / LANES * LANES;  // what this changes left of the diagonal is overwritten or not read
            for (int64_t j = from; j < n; j += LANES) {
                Mask right = from_lane(j == from ? static_cast<int>(i - from) : 0);
                store(gram + i * n + j, right, fnma(all(by), load(gram + k * n + j), load(gram + i * n + j)));
            }
            gram[i * n + k] = by;
        }
    }
}

// sum -= lu[i .. i + SOME, k] * w[k], over a strip
inline void eliminate(const float* lu, const float* w, int64_t n, int64_t i, int64_t k, Floats (&sum)[SOME][VECTORS]) {
    Floats y[VECTORS];
    for (int v = 0; v < VECTORS; ++v) y[v] = load(w + k * n + v * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < SOME; ++r) {
        Floats by = all(lu[(i + r) * n + k]);
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = fnma(by, y[v], sum[r][v]);
    }
}

// L U x = w in place, for a strip of w.
void substitute(const float* lu, float* w, int64_t n) {
    Floats sum[SOME][VECTORS];
    auto move = [&](int64_t i, bool in) {
        for (int r = 0; r < SOME; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                float* at = w + (i + r) * n + v * LANES;
                if (in)
                    sum[r][v] = load(at);
                else
                    store(at, sum[r][v]);
            }
    };
    for (int64_t i = 0; i < n; i += SOME) {
        move(i, true);
        for (int64_t k = 0; k < i; ++k) eliminate(lu, w, n, i, k, sum);
        for (int r = 1; r < SOME; ++r)
            for (int q = 0; q < r; ++q)
                for (int v = 0; v < VECTORS; ++v)
                    sum[r][v] = fnma(all(lu[(i + r) * n + i + q]), sum[q][v], sum[r][v]);
        move(i, false);
    }
    for (int64_t i = n - SOME; i >= 0; i -= SOME) {
        move(i, true);
        for (int64_t k = i + SOME; k < n; ++k) eliminate(lu, w, n, i, k, sum);
        for (int r = SOME - 1; r >= 0; --r)
            for (int v = 0; v < VECTORS; ++v) {
                for (int q = r + 1; q < SOME; ++q)
                    sum[r][v] = fnma(all(lu[(i + r) * n + i + q]), sum[q][v], sum[r][v]);
                sum[r][v] = sum[r][v] / all(lu[(i + r) * n + i + r]);
            }
        move(i, false);
    }
}

// A strip of W and of the constants, as tokens need them: of numbers that are not centred, with what is expected in them,
// and of constants what is to be scaled by `foreign`.
void finish(const CorrectCall& c, int64_t head, int64_t j, Head& h) {
    int64_t f = 2 * c.dim;
    alignas(64) float centred[STRIP] = {}, scales[STRIP], shares[STRIP];
    for (int64_t i = 0; i < f; ++i) add(centred, h.w + i * f + j, -h.centre[i], STRIP);
    for (int64_t k = 0; k < STRIP; ++k) {
        bool key = j + k < c.dim;
        scales[k] = key ? c.key_scale : c.value_scale;
        shares[k] = c.prior ? (key ? c.prior_key_scale : c.prior_value_scale) * h.share[(j + k) / c.dim] : 0;
    }
    auto moved = [&](const float* learnt, const float* expected, int64_t k) {
        Floats x = load(scales + k) * load(learnt + k);
        return expected ? fma(load(shares + k), load(expected + k), x) : x;
    };
    for (int64_t i = 0; i < f; ++i) {
        float* row = h.w + i * f + j;
        const float* expected = c.prior ? c.prior + (head * f + i) * f + j : nullptr;
        for (int64_t k = 0; k < STRIP; k += LANES) store(row + k, moved(row, expected, k));
    }
    for (int64_t i = 0; i < f / PER_WORD; ++i)
        for (int64_t k = j; k < j + STRIP; k += LANES) {
            const float *low = h.w + PER_WORD * i * f + k, *high = low + (PER_WORD - 1) * f;
            store_words(h.weights + i * f + k, packed(load(low), load(high)));
        }
    const float* constant = c.prior ? c.prior_constant + head * f + j : nullptr;
    for (int64_t n = 0; n < c.chunks; ++n) {
        float* to = h.constants + n * f + j;
        for (int64_t k = 0; k < STRIP; k += LANES)
            store(to + k, load(to + k) / all(c.foreign[n]) + load(centred + k));
        for (int64_t k = 0; k < STRIP; k += LANES) store(to + k, moved(to, constant, k));
    }
}

// Of each kind: known W + constants for n tokens, known [TILE][f]; behind n tokens, zeros.
void predict(const CorrectCall& c, const Head& h, const float* constants, const Number (*known)[2 * MAX_DIM], int64_t n,
             float (*shift)[2 * MAX_DIM]);

// n tokens of a chunk, at most TILE.
void shift_tile(const CorrectCall& c, const Head& h, int64_t head, int64_t chunk, const int64_t* tokens, int64_t n) {
    int64_t dim = c.dim;
    Turn turn{c.cos, c.sin, c.turn_row, c.width};
    const float* constants = h.constants + chunk * 2 * dim;
    Number *keys = c.keys + head * c.k_head, *values = c.values + head * c.v_head;
    alignas(64) float shift[TILE][2 * MAX_DIM], key[MAX_DIM];
    Floats foreign = all(c.foreign[chunk]);
    if (h.x) {
        alignas(64) Number known[TILE][2 * MAX_DIM];
        for (int64_t r = n; r < TILE; ++r) std::memset(known[r], 0, 2 * dim * sizeof(Number));
        for (int64_t r = 0; r < n; ++r) {
            widen(keys + tokens[r] * c.k_row, key, dim);
            turn_wide(turn, tokens[r], key, -1);
            for (int64_t j = 0; j < dim; j += LANES) store(known[r] + j, load(key + j));
            std::memcpy(known[r] + dim, values + tokens[r] * c.v_row, dim * sizeof(Number));
        }
        predict(c, h, constants, known, n, shift);
    }
    for (int64_t r = 0; r < n; ++r) {
        if (!h.x)
            for (int64_t j = 0; j < 2 * dim; ++j) shift[r][j] = (j < dim ? c.key_scale : c.value_scale) * constants[j];
        else
            for (int64_t j = 0; j < 2 * dim; j += LANES) store(shift[r] + j, load(shift[r] + j) * foreign);
        turn_wide(turn, tokens[r], shift[r], 1);
        Number *k = keys + tokens[r] * c.k_row, *v = values + tokens[r] * c.v_row;
        for (int64_t j = 0; j < dim; j += LANES) {
            store(k + j, load(k + j) + load(shift[r] + j));
            store(v + j, load(v + j) + load(shift[r] + dim + j));
        }
    }
}

// Item i of a head's: some tokens of some chunk.
void shift_block(const CorrectCall& c, const Head& h, int64_t head, int64_t item) {
    for (int64_t n = 0; n < c.chunks; ++n) {
        int64_t stop = c.other_first[n + 1], blocks = divide_up(stop - c.other_first[n], BLOCK);
        if (item < blocks) {
            int64_t begin = c.other_first[n] + item * BLOCK, end = std::min(begin + BLOCK, stop);
            for (int64_t i = begin; i < end; i += TILE)
                shift_tile(c, h, head, n, c.others + i, std::min<int64_t>(TILE, end - i));
            return;
        }
        item -= blocks;
    }
}

void correct(const CorrectCall& c) {
    bool has_w = c.penalty >= 0, fits = has_w && c.rows;
    int64_t strips = 2 * c.dim / STRIP, blocks = 0;
    for (int64_t n = 0; n < c.chunks; ++n) blocks += divide_up(c.other_first[n + 1] - c.other_first[n], BLOCK);
    size_t numbers = divide_up(numbers_of(c), LANES) * LANES;
    auto* memory = reinterpret_cast<float*>(move_scratch.take(sizeof(float) * numbers * c.kv));
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
        Unit unit;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < 2 * c.kv; ++item) {
            Head h = head_in(c, memory + item / 2 * numbers);
            int64_t offset = item % 2 ? c.dim : 0;
            gather(c, item / 2, item % 2 == 0, h);
            if (has_w && !fits) std::fill(h.centre + offset, h.centre + offset + c.dim, 0.0f);
        }
        if (c.prior) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < strips * c.kv; ++item) {
                Head h = head_in(c, memory + item / strips * numbers);
                expect(c, item / strips, item % strips * STRIP, h);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < 2 * c.kv; ++item) {
            Head h = head_in(c, memory + item / 2 * numbers);
            int64_t offset = item % 2 ? c.dim : 0;
            if (c.prior) place_expected(c, offset, h), take_share(c, offset, h);
            take_sums(c, offset, h);
            take_means(c, offset, h);
            if (fits) centre(c, offset, h);
        }
        if (fits) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < strips * c.kv; ++item) {
                Head h = head_in(c, memory + item / strips * numbers);
                set_up(c, item % strips * STRIP, h);
                penalise(c, item % strips * STRIP, h);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < c.kv; ++head) factor(head_in(c, memory + head * numbers).gram, 2 * c.dim);
        }
        if (has_w) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < strips * c.kv; ++item) {
                Head h = head_in(c, memory + item / strips * numbers);
                int64_t j = item % strips * STRIP, f = 2 * c.dim;
                if (fits)
                    substitute(h.gram, h.w + j, f);
                else
                    for (int64_t i = 0; i < f; ++i) std::fill(h.w + i * f + j, h.w + i * f + j + STRIP, 0.0f);
                finish(c, item / strips, j, h);
            }
        }
#pragma omp for schedule(dynamic, 2)
        for (int64_t item = 0; item < blocks * c.kv; ++item)
            shift_block(c, head_in(c, memory + item / blocks * numbers), item / blocks, item % blocks);
    }
}

}  // namespace
