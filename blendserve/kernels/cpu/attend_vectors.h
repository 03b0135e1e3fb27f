// Attention by position in vectors: attend.h says what is computed. kernels/reference.py is the plain form.
#pragma once

#include "numbers.h"

namespace {

constexpr int TILE = 6;                              // rows: with the vectors of a strip each they fill the registers
constexpr int BLOCK = 512 / sizeof(Number);          // keys
constexpr int SCORES = BLOCK, WEIGHTS = BLOCK, APART = 1;
struct Unit {};

}  // namespace

#include "attend.h"

namespace {

int64_t words_of(const Call& c) { return c.dim / PER_WORD; }

Floats weights_in(const Number* strip, int i) { return load(strip + LANES * i); }

// A tile's queries, [words][rows of the tile].
void pack_queries(const Call& c, int64_t head, int64_t tile, uint32_t* to) {
    Range rows = rows_of(c, tile);
    int64_t n = rows.end - rows.begin;
    for (int64_t i = 0; i < n; ++i) {
        int64_t row = (rows.begin + i) / c.group, h = head * c.group + (rows.begin + i) % c.group;
        const Number* from = c.q + h * c.q_head + row * c.q_row;
        for (int64_t w = 0; w < words_of(c); ++w) std::memcpy(to + w * n + i, from + PER_WORD * w, sizeof(uint32_t));
    }
}

// Scores of R rows against the strips [begin, end) of a block; row i sees keys [from[i], to[i]).
template <int R>
void score(const uint32_t* q, const uint32_t* keys, int words, int begin, int end, const int* from, const int* to,
           const uint8_t* hidden, float* scores, float (*top)[LANES]) {
    int inside_from = *std::max_element(from, from + R), inside_to = *std::min_element(to, to + R);
    for (int r = 0; r < R; ++r) store(top[r], all(NONE));
    for (int s = begin; s < end; s += STRIP) {
        Floats sum[R][VECTORS];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < VECTORS; ++i) sum[r][i] = all(0.0f);
        const uint32_t* k = keys + s * words;
        for (int w = 0; w < words; ++w, k += STRIP) {
            Words ks[VECTORS];
            for (int i = 0; i < VECTORS; ++i) ks[i] = load_words(k + LANES * i);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                Words x = word(q[w * R + r]);
                for (int i = 0; i < VECTORS; ++i) sum[r][i] = dot(sum[r][i], x, ks[i]);
            }
        }
        bool edge = hidden || s < inside_from || s + STRIP > inside_to;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int i = 0; edge && i < VECTORS; ++i)
                sum[r][i] = pick(unseen(s + i * LANES, from[r], to[r], hidden), all(NONE), sum[r][i]);
            Floats most = load(top[r]);
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; ++i) {
                store(scores + r * SCORES + s + LANES * i, sum[r][i]);
                most = larger(most, sum[r][i]);
            }
            store(top[r], most);
        }
    }
}

// scores -> weights relative to the block's largest score, and their sum.
template <int R, bool CAP>
void weigh(const Call& c, int begin, int end, const float* scores, const float (*top)[LANES], Number* weights,
           Part& part) {
    float factor = CAP ? LOG2E : LOG2E * c.scale;
    for (int r = 0; r < R; ++r) {
        Floats most = load(top[r]);
        if (CAP) most = capped(most, c.scale, c.softcap);
        float highest = largest(most) * factor;
        Floats base = all(highest == NONE ? 0.0f : highest), sum = all(0.0f);
        for (int j = begin; j < end; j += 2 * LANES) {
            Floats a = load(scores + r * SCORES + j), b = load(scores + r * SCORES + j + LANES);
            if (CAP) a = capped(a, c.scale, c.softcap), b = capped(b, c.scale, c.softcap);
            a = power_of_2(fms(a, all(factor), base));
            b = power_of_2(fms(b, all(factor), base));
            sum = sum + a + b;
            store_both(weights + r * WEIGHTS + j, a, b);
        }
        part.top[r] = highest;
        part.total[r] = sum_of(sum);
    }
}

// weights [R][WEIGHTS] times N vectors of each value, keys [begin, end), joined into `mix` [TILE][dim].
template <int R, int N>
void mix(const Number* weights, const uint32_t* values, int dim, int begin, int end, const Shares& shares, float* to) {
    Floats sum[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) sum[r][i] = all(0.0f);
    const uint32_t* v = values + begin / PER_WORD * dim;
    for (int j = begin; j < end; j += PER_WORD, v += dim) {
        Words vs[N];
        for (int i = 0; i < N; ++i) vs[i] = load_words(v + LANES * i);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            Words two = word(weights + r * WEIGHTS + j);
            for (int i = 0; i < N; ++i) sum[r][i] = dot(sum[r][i], two, vs[i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) {
            float* at = to + r * dim + LANES * i;
            store(at, joined(load(at), sum[r][i], shares, r));
        }
}

template <int R>
void look(const Call& c, const Workspace& work, const uint32_t* q, int64_t tile, int64_t block, State& state) {
    int from[R], to[R];
    for (int r = 0; r < R; ++r) {
        Range range = seen(c, tile * TILE + r);
        from[r] = static_cast<int>(std::clamp<int64_t>(range.begin - block * BLOCK, 0, BLOCK));
        to[r] = static_cast<int>(std::clamp<int64_t>(range.end - block * BLOCK, 0, BLOCK));
    }
    int begin = from[0] / STRIP * STRIP, last = to[R - 1];  // rows ascend
    if (begin >= last) return;
    int dim = static_cast<int>(c.dim), end = static_cast<int>(divide_up(last, STRIP)) * STRIP;
    alignas(64) float top[R][LANES];
    score<R>(q, work.keys, dim / PER_WORD, begin, end, from, to, c.hidden ? c.hidden + block * BLOCK : nullptr, work.scores,
             top);
    Part part;
    (c.softcap > 0 ? weigh<R, true> : weigh<R, false>)(c, begin, end, work.scores, top, work.weights, part);
    Shares shares = join(state.top, state.total, part.top, part.total);
    int stop = static_cast<int>(divide_up(last, LANES)) * LANES, d = 0;  // weights after `last` are zeros
    for (; d + STRIP <= dim; d += STRIP)
        mix<R, VECTORS>(work.weights, work.values + d, dim, begin, stop, shares, state.mix() + d);
    auto rest = [&](auto n) { mix<R, decltype(n)::value>(work.weights, work.values + d, dim, begin, stop, shares, state.mix() + d); };
    int left = (dim - d) / LANES;
    if (left == 1) rest(std::integral_constant<int, 1>());
    if (VECTORS > 2 && left == 2) rest(std::integral_constant<int, 2>());
    if (VECTORS > 2 && left == 3) rest(std::integral_constant<int, 3>());
}

using Look = void (*)(const Call&, const Workspace&, const uint32_t*, int64_t, int64_t, State&);
constexpr Look looks[TILE + 1] = {nullptr, look<1>, look<2>, look<3>, look<4>, look<5>, look<6>};

void look_tile(const Call& c, const Workspace& work, const uint32_t* q, int64_t tile, int64_t block, State& state) {
    Range rows = rows_of(c, tile);
    looks[rows.end - rows.begin](c, work, q, tile, block, state);
}

}  // namespace
