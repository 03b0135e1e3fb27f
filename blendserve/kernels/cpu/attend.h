// What the kinds of attention by position share: how work is split, packed and joined. Included once by each kind, which
// defines before it
//
//     TILE, BLOCK      stacked rows of a tile; keys packed together
//     SCORES, WEIGHTS  numbers from a row of scores, or of weights, to the next one's
//     APART            keys from the first of a word to the second
//     Unit             what a thread prepares before it looks, and undoes behind it
//
// and behind it words_of, weights_in, pack_queries and look_tile.
//
// Flash attention (arXiv 2205.14135) with keys in blocks that start at multiples of BLOCK. The `group` query heads of a kv
// head are stacked position by position, and TILE stacked rows make a tile:
//
//     for each tile and block:  scores = q k^T,  top = max,  weights = 2^(scores - top),  mix = weights v
//                               state = state rescaled + mix rescaled
//
// A row's result depends on its own position and on the keys it sees alone: not on the other rows, not on threads, not on
// how the work is split. For that, every block is summed by itself and blocks are merged in ascending order.
//
// Keys and values are packed in words, which `dot` multiplies: `keys` [strip][words][STRIP] holds a word of every key of a
// strip in a row, `values` [BLOCK / PER_WORD][dim] every dim of the keys of a word.
#pragma once

#include <atomic>
#include <cmath>

#include "common.h"

// One call, as the caller fills it in. Strides are in elements; the innermost one is 1.
struct Call {
    const Number *q, *keys, *values;  // [group * kv, rows, dim], [kv, T, dim], [kv, T, dim]
    Number* out;                      // [rows, group * kv, dim], contiguous
    const int64_t* at;                // [rows], ascending positions
    int64_t q_head, q_row, k_head, k_row, v_head, v_row;
    int64_t rows, kv, group, dim;
    int64_t window;  // 0 = none
    float scale;
    float softcap;  // 0 = none
    int64_t threads;
    const uint8_t* hidden;  // [T + 64], not 0 = nobody sees this key; or null
    float* watched;         // [T] or null: per key, sum over rows of (mean over heads of weight * |value|) squared
};

namespace {

constexpr int TILES = 32;  // tiles that share a packed block
constexpr float NONE = -INFINITY;
constexpr float LOG2E = 1.44269504f;

// What a stacked row sees.
Range seen(const Call& c, int64_t stacked) {
    int64_t at = c.at[stacked / c.group];
    return {c.window ? std::max<int64_t>(0, at - c.window + 1) : 0, at + 1};
}

int64_t tiles_per_head(const Call& c) { return divide_up(c.rows * c.group, TILE); }

// The rows of a tile.
Range rows_of(const Call& c, int64_t tile) {
    return {tile * TILE, std::min((tile + 1) * TILE, c.rows * c.group)};
}

// The blocks that any row of these tiles looks at.
Range blocks_of(const Call& c, Range tiles) {
    int64_t first = rows_of(c, tiles.begin).begin, last = rows_of(c, tiles.end - 1).end - 1;
    return {seen(c, first).begin / BLOCK, divide_up(seen(c, last).end, BLOCK)};
}

constexpr int SIDES = TILE > LANES ? TILE : LANES;  // numbers of which there is one a row

// Sums over the blocks so far, of up to TILE rows: `mix` [TILE][dim] follows in memory.
struct State {
    alignas(64) float top[SIDES];    // largest score, in powers of 2
    alignas(64) float total[SIDES];  // sum of weights
    float* mix() { return reinterpret_cast<float*>(this + 1); }
    static size_t bytes(const Call& c) { return divide_up(sizeof(State) + sizeof(float) * TILE * c.dim, 64) * 64; }
    void clear(const Call& c) {
        std::fill(top, top + SIDES, NONE);
        std::fill(total, total + SIDES, 0.0f);
        std::fill(mix(), mix() + TILE * c.dim, 0.0f);
    }
};

thread_local Scratch thread_scratch, call_scratch;  // of the thread itself, and of the call that it made

// Of each kind.
int64_t words_of(const Call& c);                  // of a packed key or query
Floats weights_in(const Number* strip, int i);    // of keys LANES i .. LANES (i + 1) - 1 of a strip

struct Workspace {
    uint32_t *keys, *values, *q;
    float* scores;    // [TILE][SCORES]
    Number* weights;  // [TILE][WEIGHTS]
    char* states;

    Workspace(const Call& c, int64_t tiles) {
        size_t sizes[] = {sizeof(uint32_t) * BLOCK * words_of(c), sizeof(uint32_t) * BLOCK / PER_WORD * c.dim,
                          sizeof(uint32_t) * TILE * tiles * words_of(c), sizeof(float) * TILE * SCORES,
                          sizeof(Number) * TILE * WEIGHTS, State::bytes(c) * tiles};
        size_t starts[7] = {0};
        for (int i = 0; i < 6; ++i) starts[i + 1] = starts[i] + divide_up(sizes[i], 64) * 64;
        char* base = thread_scratch.take(starts[6]);
        keys = reinterpret_cast<uint32_t*>(base + starts[0]);
        values = reinterpret_cast<uint32_t*>(base + starts[1]);
        q = reinterpret_cast<uint32_t*>(base + starts[2]);
        scores = reinterpret_cast<float*>(base + starts[3]);
        weights = reinterpret_cast<Number*>(base + starts[4]);
        states = base + starts[5];
    }
    State& state(const Call& c, int64_t i) { return *reinterpret_cast<State*>(states + State::bytes(c) * i); }
};

void pack_queries(const Call& c, int64_t head, int64_t tile, uint32_t* to);
// A tile looks at block `block` (`work` holds it packed) and joins what it sees into `state`.
void look_tile(const Call& c, const Workspace& work, const uint32_t* q, int64_t tile, int64_t block, State& state);

// 2^x for x <= 0, to 1e-7 relative; exactly 1 at 0 and 0 at -infinity.
inline Floats power_of_2(Floats x) {
    Floats f = fraction(x), p = all(0.0018671305f);
    p = fma(p, f, all(0.00901702941f));
    p = fma(p, f, all(0.0557999138f));
    p = fma(p, f, all(0.24016445f));
    p = fma(p, f, all(0.693151312f));
    p = fma(p, f, all(1.0f));
    return scaled(p, x);
}

// cap * tanh(x * scale / cap); -infinity stays.
inline Floats capped(Floats x, float scale, float cap) {
    Floats e = power_of_2(size_of(x) * all(-2 * LOG2E * scale / cap));
    Floats size = (all(1.0f) - e) / (all(1.0f) + e);
    return pick(equal(x, all(NONE)), x, with_sign_of(size, x) * all(cap));
}

// A block of a head, -1 = none.
struct Place {
    int64_t head = -1, block = -1;
};

// A block's rows of keys or values, to be asked for while something else is packed.
Ahead ahead_of(const Number* rows, int64_t head_stride, int64_t stride, const Call& c, Place place, int64_t end) {
    if (place.head < 0 || stride != c.dim) return {};
    int64_t begin = place.block * BLOCK, stop = std::min(end, begin + BLOCK);
    rows += place.head * head_stride;
    return {reinterpret_cast<const char*>(rows + begin * stride), reinterpret_cast<const char*>(rows + stop * stride)};
}

// `room`: words of a packed key; what its numbers do not fill is zeros.
void pack_keys(const Number* keys, int64_t stride, int n, int dim, int room, uint32_t* to, Ahead ahead) {
    int64_t filled = dim / PER_WORD, lines = dim * sizeof(Number) * LANES / LINE;  // as many as are read
    for (int key = 0; key < n; key += LANES) {
        uint32_t* strip = to + static_cast<int64_t>(key / STRIP) * room * STRIP + key % STRIP;
        for (int64_t w = 0; w < filled; w += LANES)
            turn(keys + key * stride + PER_WORD * w, stride, std::min(LANES, n - key),
                 static_cast<int>(std::min<int64_t>(LANES, filled - w)), strip + w * STRIP, STRIP);
        for (int64_t w = filled; w < room; ++w) store_words(strip + w * STRIP, all_words(0));
        ahead.fetch(lines);
    }
}

// Keys n and after weigh nothing, but memory may hold NaN there: they are zeros up to the next strip.
void pack_values(const Number* values, int64_t stride, int n, int dim, uint32_t* to, Ahead ahead) {
    int end = static_cast<int>(divide_up(n, STRIP)) * STRIP, lines = dim * static_cast<int>(sizeof(Number)) * PER_WORD / LINE;
    for (int w = 0; w < end / PER_WORD; ++w, to += dim) {
        int key = w / APART * PER_WORD * APART + w % APART, other = key + APART;
        for (int d = 0; d < dim; d += LANES)
            store_words(to + d, packed(key < n ? values + key * stride + d : nullptr,
                                       other < n ? values + other * stride + d : nullptr));
        ahead.fetch(std::max(1, lines));
    }
}

// What one block gave a tile.
struct Part {
    alignas(64) float top[SIDES];
    alignas(64) float total[SIDES];
    Part() {
        std::fill(top, top + SIDES, NONE);
        std::fill(total, total + SIDES, 0.0f);
    }
};

// Which of the block's keys at .. at + LANES - 1 a row that sees [from, to) does not see.
inline Mask unseen(int at, int from, int to, const uint8_t* hidden) {
    Mask mask = outside(at, from, to);
    return hidden ? either(mask, marked(hidden + at)) : mask;
}

// How much of two sums is kept when they become one, relative to the larger of their tops. Also joins top and total.
struct Shares {
    alignas(64) float old[SIDES];
    alignas(64) float added[SIDES];
};

inline Shares join(float* top, float* total, const float* top2, const float* total2) {
    Shares shares;
    for (int i = 0; i < SIDES; i += LANES) {
        Floats a = load(top + i), b = load(top2 + i), most = larger(a, b);
        Floats base = pick(equal(most, all(NONE)), all(0.0f), most);
        Floats keep = power_of_2(a - base), take = power_of_2(b - base);
        store(shares.old + i, keep);
        store(shares.added + i, take);
        store(total + i, fma(load(total2 + i), take, load(total + i) * keep));
        store(top + i, most);
    }
    return shares;
}

inline Floats joined(Floats old, Floats added, const Shares& shares, int r) {
    return fma(added, all(shares.added[r]), old * all(shares.old[r]));
}

// While keys are packed, the block's values are on their way; meanwhile, the next block's keys.
void pack_block(const Call& c, Place here, Place next, int64_t end, Workspace& work) {
    int64_t first = here.block * BLOCK;
    int n = static_cast<int>(std::min<int64_t>(BLOCK, end - first)), dim = static_cast<int>(c.dim);
    pack_keys(c.keys + here.head * c.k_head + first * c.k_row, c.k_row, n, dim, static_cast<int>(words_of(c)), work.keys,
              ahead_of(c.values, c.v_head, c.v_row, c, here, end));
    pack_values(c.values + here.head * c.v_head + first * c.v_row, c.v_row, n, dim, work.values,
                ahead_of(c.keys, c.k_head, c.k_row, c, next, end));
}

void write(const Call& c, int64_t head, int64_t tile, State& state) {
    Range rows = rows_of(c, tile);
    for (int64_t r = 0; r < rows.end - rows.begin; ++r) {
        int64_t row = (rows.begin + r) / c.group, h = head * c.group + (rows.begin + r) % c.group;
        Number* to = c.out + (row * c.kv * c.group + h) * c.dim;
        Floats share = all(1.0f / state.total[r]);
        for (int64_t d = 0; d < c.dim; d += LANES) store(to + d, load(state.mix() + r * c.dim + d) * share);
    }
}

// These tiles over these blocks; state(tile, block) is where each look goes; `after` is what this thread packs then.
template <class StateOf>
void look_at(const Call& c, int64_t head, Range tiles, Range blocks, Place after, Workspace& work, StateOf state) {
    int64_t words = TILE * words_of(c), end = seen(c, rows_of(c, tiles.end - 1).end - 1).end;
    for (int64_t t = tiles.begin; t < tiles.end; ++t) pack_queries(c, head, t, work.q + (t - tiles.begin) * words);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        pack_block(c, {head, b}, b + 1 < blocks.end ? Place{head, b + 1} : after, end, work);
        for (int64_t t = tiles.begin; t < tiles.end; ++t)
            look_tile(c, work, work.q + (t - tiles.begin) * words, t, b, state(t, b));
    }
}

// Many rows: each item is some tiles of a head over all they see, the longest first.
void by_rows(const Call& c) {
    int64_t tiles = tiles_per_head(c), chunks = divide_up(tiles, TILES);
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
        Unit unit;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < chunks * c.kv; ++item) {
            int64_t head = item % c.kv, chunk = chunks - 1 - item / c.kv;
            Range mine{chunk * TILES, std::min(tiles, (chunk + 1) * TILES)};
            Workspace work(c, TILES);
            for (int64_t t = mine.begin; t < mine.end; ++t) work.state(c, t - mine.begin).clear(c);
            look_at(c, head, mine, blocks_of(c, mine), {}, work,
                    [&](int64_t t, int64_t) -> State& { return work.state(c, t - mine.begin); });
            for (int64_t t = mine.begin; t < mine.end; ++t) write(c, head, t, work.state(c, t - mine.begin));
        }
    }
}

// Few rows: an item is some tiles of a head and one block; what came of the blocks is joined afterwards.
class ByKeys {
   public:
    explicit ByKeys(const Call& call)
        : c(call), tiles(tiles_per_head(c)), blocks(blocks_of(c, {0, tiles})), n(blocks.end - blocks.begin) {}

    // Memory that the looks share: of all keys seen, until the last `finish`.
    size_t bytes() const { return c.kv * tiles * n * (State::bytes(c) + (c.watched ? sizeof(Weights) : 0)); }
    void use(char* memory) {
        states = memory;
        weights = reinterpret_cast<Weights*>(states + State::bytes(c) * c.kv * tiles * n);
    }

    // Items of the first part, each for `look(item, next)`, and of the second, each for `finish`.
    int64_t looks() const { return c.kv * divide_up(tiles, TILES) * n; }
    int64_t finishes() const { return c.kv * tiles; }

    // next: the item that this thread looks at afterwards; `looks()` or more = none.
    void look(int64_t item, int64_t next) {
        int64_t chunks = divide_up(tiles, TILES);
        auto place = [&](int64_t i) { return Place{i / (chunks * n), blocks.begin + i % n}; };
        look_once(place(item), item / n % chunks, next < looks() ? place(next) : Place{});
    }
    void finish(int64_t item) { finish(item / tiles, item % tiles); }

    void run() {
        use(call_scratch.take(bytes()));
        int64_t items = looks();
        std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(static_cast<int>(c.threads))
        {
            Unit unit;
            for (int64_t item = taken++, next; item < items; item = next) {
                next = taken++;
                look(item, next);
            }
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t item = 0; item < finishes(); ++item) finish(item);
            if (c.watched) {
#pragma omp for schedule(static)
                for (int64_t item = 0; item < n * (BLOCK / STRIP); ++item)
                    watch(blocks.begin + item / (BLOCK / STRIP), item % (BLOCK / STRIP) * STRIP);
            }
        }
    }

   private:
    using Weights = Number[TILE][WEIGHTS];

    int64_t index(int64_t head, int64_t tile, int64_t block) const {
        return (head * tiles + tile) * n + block - blocks.begin;
    }
    State& state(int64_t head, int64_t tile, int64_t block) const {
        return *reinterpret_cast<State*>(states + State::bytes(c) * index(head, tile, block));
    }

    void look_once(Place here, int64_t chunk, Place next) {
        Range mine{chunk * TILES, std::min(tiles, (chunk + 1) * TILES)}, theirs = blocks_of(c, mine);
        for (int64_t t = mine.begin; t < mine.end; ++t) {
            state(here.head, t, here.block).clear(c);
            if (c.watched) std::memset(weights[index(here.head, t, here.block)], 0, sizeof(Weights));
        }
        if (here.block < theirs.begin || here.block >= theirs.end) return;
        Workspace work(c, TILES);
        look_at(c, here.head, mine, {here.block, here.block + 1}, next, work, [&](int64_t t, int64_t b) -> State& {
            if (c.watched) work.weights = weights[index(here.head, t, b)][0];
            return state(here.head, t, b);
        });
    }

    // Joins the blocks of a tile; each block's `total` becomes what its weights are to be multiplied by.
    void finish(int64_t head, int64_t tile) {
        Workspace work(c, 1);
        State& all_blocks = work.state(c, 0);
        all_blocks.clear(c);
        float* mix = all_blocks.mix();
        for (int64_t b = blocks.begin; b < blocks.end; ++b) {
            State& one = state(head, tile, b);
            Shares shares = join(all_blocks.top, all_blocks.total, one.top, one.total);
            for (int64_t r = 0; r < TILE; ++r)
                for (int64_t d = r * c.dim; d < (r + 1) * c.dim; d += LANES)
                    store(mix + d, joined(load(mix + d), load(one.mix() + d), shares, static_cast<int>(r)));
        }
        write(c, head, tile, all_blocks);
        if (!c.watched) return;
        for (int64_t b = blocks.begin; b < blocks.end; ++b) {
            State& one = state(head, tile, b);
            for (int i = 0; i < SIDES; i += LANES)
                store(one.total + i, power_of_2(load(one.top + i) - load(all_blocks.top + i)) / load(all_blocks.total + i));
        }
    }

    // The norms of a strip's values; behind the last one, 0.
    void measure(int64_t head, int64_t key, int64_t end, float* to) const {
        for (int64_t i = 0; i < STRIP; ++i) {
            const Number* v = c.values + head * c.v_head + (key + i) * c.v_row;
            Floats sum = all(0.0f);
            for (int64_t d = 0; d < c.dim && key + i < end; d += LANES) {
                Floats x = load(v + d);
                sum = fma(x, x, sum);
            }
            to[i] = std::sqrt(sum_of(sum));
        }
    }

    // What is seen of the keys of one strip.
    void watch(int64_t block, int64_t strip) const {
        float heads = static_cast<float>(c.kv * c.group);
        int64_t key = block * BLOCK + strip, end = seen(c, c.rows * c.group - 1).end;
        auto* lengths = reinterpret_cast<float*>(thread_scratch.take(sizeof(float) * STRIP * c.kv));
        Floats squares[VECTORS] = {};
        for (int64_t head = 0; head < c.kv; ++head) measure(head, key, end, lengths + head * STRIP);
        for (int64_t row = 0; row < c.rows; ++row) {
            Floats sum[VECTORS] = {};
            for (int64_t head = 0; head < c.kv; ++head) {
                Floats mine[VECTORS] = {};
                for (int64_t s = row * c.group; s < (row + 1) * c.group; ++s) {
                    int64_t at = index(head, s / TILE, block);
                    Floats share = all(state(head, s / TILE, block).total[s % TILE]);
                    for (int i = 0; i < VECTORS; ++i)
                        mine[i] = fma(weights_in(weights[at][s % TILE] + strip, i), share, mine[i]);
                }
                for (int i = 0; i < VECTORS; ++i) sum[i] = fma(mine[i], load(lengths + head * STRIP + LANES * i), sum[i]);
            }
            for (int i = 0; i < VECTORS; ++i) squares[i] = fma(sum[i], sum[i], squares[i]);
        }
        for (int i = 0; i < VECTORS; ++i, key += LANES)
            store(c.watched + key, first(end - key), squares[i] * all(1 / (heads * heads)));
    }

    const Call& c;
    const int64_t tiles;
    const Range blocks;
    const int64_t n;
    char* states = nullptr;
    Weights* weights = nullptr;
};

}  // namespace
