// Attention by position, on vectors and on AMX tiles: how work is split, packed and merged. Each kind includes this once, and
// defines before it
//
//     TILE, BLOCK      stacked rows of a tile; keys packed together
//     SCORES, WEIGHTS  stride of a row of scores, and of weights
//     KEY_STRIDE       keys from the first of a word to the second
//     ThreadScope      state that a thread sets up for its work, and restores
//
// and after it words_of, weights_in, pack_queries and attend_visible.
//
// Flash attention (arXiv 2205.14135) with keys in blocks that start at multiples of BLOCK. The `group` query heads of a kv
// head are stacked position by position, and TILE stacked rows make a tile:
//
//     for each tile and block:  scores = q k^T,  row_max = max,  weights = 2^(scores - row_max),  output = weights v
//                               state = state rescaled + output rescaled
//
// A row's result depends only on its position and on the keys it sees: not on the other rows, on threads, or on how the work
// is split. So every block is summed alone, and blocks are merged in ascending order.
//
// Keys and values are packed in words, which `dot` multiplies: `keys` [strip][words][N_TILE] holds a word of every key of a
// strip in a row, `values` [BLOCK / PER_WORD][dim] every dim of the keys of a word.
#pragma once

#include <atomic>
#include <cmath>
#include <utility>

#include "common.h"

namespace {

constexpr int TILES = 32;  // tiles that share a packed block
constexpr float NEG_INF = -INFINITY;
constexpr float LOG2E = 1.44269504f;

// What a stacked row sees.
Range visible_range(const AttentionArgs& c, int64_t stacked) {
    int64_t at = c.positions[stacked / c.group];
    return {c.window ? std::max<int64_t>(0, at - c.window + 1) : 0, at + 1};
}

int64_t tiles_per_head(const AttentionArgs& c) { return divide_up(c.rows * c.group, TILE); }

// The rows of a tile.
Range rows_of(const AttentionArgs& c, int64_t tile) {
    return {tile * TILE, std::min((tile + 1) * TILE, c.rows * c.group)};
}

// The blocks that any row of these tiles sees.
Range blocks_of(const AttentionArgs& c, Range tiles) {
    int64_t first = rows_of(c, tiles.begin).begin, last = rows_of(c, tiles.end - 1).end - 1;
    return {visible_range(c, first).begin / BLOCK, divide_up(visible_range(c, last).end, BLOCK)};
}

constexpr int ROW_SLOTS = TILE > LANES ? TILE : LANES;  // numbers of which there is one a row

// What one block gave up to TILE rows.
struct BlockState {
    alignas(64) float row_max[ROW_SLOTS];  // largest score, in powers of 2
    alignas(64) float row_sum[ROW_SLOTS];  // sum of weights
    BlockState() {
        std::fill(row_max, row_max + ROW_SLOTS, NEG_INF);
        std::fill(row_sum, row_sum + ROW_SLOTS, 0.0f);
    }
};

// Sums over the blocks so far: `mix` [TILE][dim] follows in memory.
struct State : BlockState {
    float* output() { return reinterpret_cast<float*>(this + 1); }
    static size_t bytes(const AttentionArgs& c) { return divide_up(sizeof(State) + sizeof(float) * TILE * c.dim, 64) * 64; }
    void clear(const AttentionArgs& c) {
        new (this) State;
        std::fill(output(), output() + TILE * c.dim, 0.0f);
    }
    // Before the first block; a sink has been seen already, and adds nothing to the output.
    void begin(const AttentionArgs& c, int64_t head, int64_t tile) {
        clear(c);
        Range rows = c.sinks ? rows_of(c, tile) : Range{0, 0};
        for (int64_t s = rows.begin; s < rows.end; ++s) {
            row_max[s - rows.begin] = c.sinks[head * c.group + s % c.group] * LOG2E;
            row_sum[s - rows.begin] = 1.0f;
        }
    }
};

thread_local Workspace thread_scratch, call_scratch;  // of the thread itself, and of the call that it made

// Of each kind.
int64_t words_of(const AttentionArgs& c);                  // of a packed key or query
F32 weights_in(const elem_t* strip, int i);    // of keys LANES i .. LANES (i + 1) - 1 of a strip

struct TileBuffers {
    uint32_t *keys, *values, *q;
    float* scores;    // [TILE][SCORES]
    elem_t* weights;  // [TILE][WEIGHTS]
    char* states;

    TileBuffers(const AttentionArgs& c, int64_t tiles) {
        size_t used = 0;
        auto room = [&](size_t bytes) { return std::exchange(used, used + divide_up(bytes, LINE) * LINE); };
        size_t at[] = {room(sizeof(uint32_t) * BLOCK * words_of(c)),  room(sizeof(uint32_t) * BLOCK / PER_WORD * c.dim),
                       room(sizeof(uint32_t) * TILE * tiles * words_of(c)), room(sizeof(float) * TILE * SCORES),
                       room(sizeof(elem_t) * TILE * WEIGHTS), room(State::bytes(c) * tiles)};
        char* base = thread_scratch.take<char>(used);
        keys = reinterpret_cast<uint32_t*>(base + at[0]), values = reinterpret_cast<uint32_t*>(base + at[1]);
        q = reinterpret_cast<uint32_t*>(base + at[2]), scores = reinterpret_cast<float*>(base + at[3]);
        weights = reinterpret_cast<elem_t*>(base + at[4]), states = base + at[5];
    }
    State& state(const AttentionArgs& c, int64_t i) { return *reinterpret_cast<State*>(states + State::bytes(c) * i); }
};

// What the rows of a tile see of a block: keys [from, to) of each, and the whole strips [begin, end) that hold all of them.
struct Visible {
    int rows, begin, end, last;
    int from[TILE], to[TILE];  // ascending
    const uint8_t* masked_keys;

    Visible(const AttentionArgs& c, int64_t tile, int64_t block) {
        Range all = rows_of(c, tile);
        int64_t start = block * BLOCK;
        rows = static_cast<int>(all.end - all.begin);
        bool is_whole = visible_range(c, all.begin).end >= start + BLOCK && visible_range(c, all.end - 1).begin <= start;
        for (int r = 0; r < rows; ++r) {
            Range range = is_whole ? Range{start, start + BLOCK} : visible_range(c, all.begin + r);
            from[r] = static_cast<int>(std::clamp<int64_t>(range.begin - start, 0, BLOCK));
            to[r] = static_cast<int>(std::clamp<int64_t>(range.end - start, 0, BLOCK));
        }
        last = to[rows - 1];
        begin = from[0] / N_TILE * N_TILE, end = static_cast<int>(divide_up(last, N_TILE)) * N_TILE;
        masked_keys = c.masked_keys ? c.masked_keys + start : nullptr;
    }
    bool is_edge(int strip) const { return masked_keys || strip < from[rows - 1] || strip + N_TILE > to[0]; }
};

void pack_queries(const AttentionArgs& c, int64_t head, int64_t tile, uint32_t* to);
// Attention of a tile over a block, packed in `work`, merged into `state`.
using AttendBlock = void (*)(const AttentionArgs&, const TileBuffers&, const uint32_t*, const Visible&, State&);
void attend_visible(const AttentionArgs& c, const TileBuffers& work, const uint32_t* q, const Visible& visible, State& state);
inline void attend_tile(const AttentionArgs& c, const TileBuffers& work, const uint32_t* q, int64_t tile, int64_t block, State& state) {
    Visible visible(c, tile, block);
    if (visible.begin < visible.last) attend_visible(c, work, q, visible, state);
}

// 2^x for x <= 0, to 1e-7 relative; exactly 1 at 0 and 0 at -infinity.
inline F32 exp2_nonpositive(F32 x) {
    F32 f = fraction(x), p = broadcast(0.0018671305f);
    p = fma(p, f, broadcast(0.00901702941f));
    p = fma(p, f, broadcast(0.0557999138f));
    p = fma(p, f, broadcast(0.24016445f));
    p = fma(p, f, broadcast(0.693151312f));
    p = fma(p, f, broadcast(1.0f));
    return scale_by_exp2(p, x);
}

// cap * tanh(x * scale / cap); -infinity stays.
inline F32 apply_softcap(F32 x, float scale, float cap) {
    F32 e = exp2_nonpositive(abs(x) * broadcast(-2 * LOG2E * scale / cap));
    F32 size = (broadcast(1.0f) - e) / (broadcast(1.0f) + e);
    return select(equal(x, broadcast(NEG_INF)), x, copy_sign(size, x) * broadcast(cap));
}

// A block of a head, -1 = none.
struct HeadBlock {
    int64_t head = -1, block = -1;
};

// A block's rows of keys or values, to be asked for while something else is packed.
Prefetcher ahead_of(const elem_t* rows, int64_t head_stride, int64_t stride, const AttentionArgs& c, HeadBlock place, int64_t end) {
    if (place.head < 0 || stride != c.dim) return {};
    int64_t begin = place.block * BLOCK, stop = std::min(end, begin + BLOCK);
    rows += place.head * head_stride;
    return {reinterpret_cast<const char*>(rows + begin * stride), reinterpret_cast<const char*>(rows + stop * stride)};
}

// `room`: words of a packed key; what its numbers do not fill is zeros.
void pack_keys(const elem_t* keys, int64_t stride, int n, int dim, int room, uint32_t* to, Prefetcher ahead) {
    int64_t lines = dim * sizeof(elem_t) * LANES / LINE;  // as many as are read
    for (int key = 0; key < n; key += LANES) {
        uint32_t* strip = to + static_cast<int64_t>(key / N_TILE) * room * N_TILE + key % N_TILE;
        transpose_into(keys + key * stride, stride, n - key, dim / PER_WORD, room, strip, N_TILE);
        ahead.fetch(lines);
    }
}

// Keys n and after have weight 0, but memory may hold NaN there: they become zeros up to the next strip.
void pack_values(const elem_t* values, int64_t stride, int n, int dim, uint32_t* to, Prefetcher ahead) {
    int end = static_cast<int>(divide_up(n, N_TILE)) * N_TILE, lines = dim * static_cast<int>(sizeof(elem_t)) * PER_WORD / LINE;
    for (int w = 0; w < end / PER_WORD; ++w, to += dim) {
        int key = w / KEY_STRIDE * PER_WORD * KEY_STRIDE + w % KEY_STRIDE, other = key + KEY_STRIDE;
        for (int d = 0; d < dim; d += LANES)
            store_u32(to + d, pack_words(key < n ? values + key * stride + d : nullptr,
                                       other < n ? values + other * stride + d : nullptr));
        ahead.fetch(std::max(1, lines));
    }
}

// Which of the block's keys at .. at + LANES - 1 row r does not see.
inline Mask masked(const Visible& visible, int r, int at) {
    Mask mask = outside_range(at, visible.from[r], visible.to[r]);
    return visible.masked_keys ? mask_or(mask, nonzero_bytes(visible.masked_keys + at)) : mask;
}

// How much of two sums is kept when they become one, relative to the larger of their tops. Also joins row_max and row_sum.
struct Rescale {
    alignas(64) float old[ROW_SLOTS];
    alignas(64) float added[ROW_SLOTS];
};

inline Rescale merge_state(float* row_max, float* row_sum, const float* row_max2, const float* row_sum2) {
    Rescale rescale;
    for (int i = 0; i < ROW_SLOTS; i += LANES) {
        F32 a = load(row_max + i), b = load(row_max2 + i), largest = max(a, b);
        F32 base = select(equal(largest, broadcast(NEG_INF)), broadcast(0.0f), largest);
        F32 keep = exp2_nonpositive(a - base), take = exp2_nonpositive(b - base);
        store(rescale.old + i, keep);
        store(rescale.added + i, take);
        store(row_sum + i, fma(load(row_sum2 + i), take, load(row_sum + i) * keep));
        store(row_max + i, largest);
    }
    return rescale;
}

inline F32 merged(F32 old, F32 added, const Rescale& rescale, int r) {
    return fma(added, broadcast(rescale.added[r]), old * broadcast(rescale.old[r]));
}

// next: the block that this thread packs next. Its keys are prefetched while values are packed, and the block's values while its
// keys are; null = nothing is.
void pack_block(const AttentionArgs& c, HeadBlock here, const HeadBlock* next, int64_t end, uint32_t* keys, uint32_t* values) {
    int64_t first = here.block * BLOCK;
    int n = static_cast<int>(std::min<int64_t>(BLOCK, end - first)), dim = static_cast<int>(c.dim);
    pack_keys(c.keys + here.head * c.k_head + first * c.k_row, c.k_row, n, dim, static_cast<int>(words_of(c)), keys,
              next ? ahead_of(c.values, c.v_head, c.v_row, c, here, end) : Prefetcher{});
    pack_values(c.values + here.head * c.v_head + first * c.v_row, c.v_row, n, dim, values,
                next ? ahead_of(c.keys, c.k_head, c.k_row, c, *next, end) : Prefetcher{});
}

void write(const AttentionArgs& c, int64_t head, int64_t tile, State& state) {
    Range rows = rows_of(c, tile);
    for (int64_t r = 0; r < rows.end - rows.begin; ++r) {
        int64_t row = (rows.begin + r) / c.group, h = head * c.group + (rows.begin + r) % c.group;
        elem_t* to = c.out + (row * c.kv_heads * c.group + h) * c.dim;
        F32 share = broadcast(1.0f / state.row_sum[r]);
        for (int64_t d = 0; d < c.dim; d += LANES) store(to + d, load(state.output() + r * c.dim + d) * share);
    }
}

// Few rows: an item is some tiles of a head and one block; what came of the blocks is joined afterwards.
class SplitKv {
   public:
    explicit SplitKv(const AttentionArgs& call)
        : c(call), tiles(tiles_per_head(c)), blocks(blocks_of(c, {0, tiles})), n(blocks.end - blocks.begin) {}

    // Memory of the states of all blocks, in use until the last `merge`.
    size_t bytes() const { return c.kv_heads * tiles * n * (State::bytes(c) + (c.key_scores ? sizeof(Weights) : 0)); }
    void use(char* memory) {
        states = memory;
        weights = reinterpret_cast<Weights*>(states + State::bytes(c) * c.kv_heads * tiles * n);
    }

    // Numbers of items of the first part, `attend(item, next)`, and of the second, `merge(item)`.
    int64_t n_attend_items() const { return c.kv_heads * divide_up(tiles, TILES) * n; }
    int64_t n_merge_items() const { return c.kv_heads * tiles; }

    // Joins the blocks of item's tile; each block's `row_sum` becomes what its weights are to be multiplied by.
    void merge(int64_t item) {
        int64_t head = item / tiles, tile = item % tiles;
        TileBuffers work(c, 1);
        State& all_blocks = work.state(c, 0);
        all_blocks.begin(c, head, tile);
        float* mix = all_blocks.output();
        for (int64_t b = blocks.begin; b < blocks.end; ++b) {
            State& one = state(head, tile, b);
            Rescale rescale = merge_state(all_blocks.row_max, all_blocks.row_sum, one.row_max, one.row_sum);
            for (int64_t r = 0; r < TILE; ++r)
                for (int64_t d = r * c.dim; d < (r + 1) * c.dim; d += LANES)
                    store(mix + d, merged(load(mix + d), load(one.output() + d), rescale, static_cast<int>(r)));
        }
        write(c, head, tile, all_blocks);
        if (!c.key_scores) return;
        for (int64_t b = blocks.begin; b < blocks.end; ++b) {
            State& one = state(head, tile, b);
            for (int i = 0; i < ROW_SLOTS; i += LANES)
                store(one.row_sum + i, exp2_nonpositive(load(one.row_max + i) - load(all_blocks.row_max + i)) / load(all_blocks.row_sum + i));
        }
    }

    // Item: some tiles of a head over a block. next: this thread's next item; `n_attend_items()` or more = none.
    void attend(int64_t item, int64_t next) {
        int64_t chunks = divide_up(tiles, TILES), chunk = item / n % chunks;
        auto place = [&](int64_t i) { return HeadBlock{i / (chunks * n), blocks.begin + i % n}; };
        HeadBlock here = place(item), then = next < n_attend_items() ? place(next) : HeadBlock{};
        Range mine{chunk * TILES, std::min(tiles, (chunk + 1) * TILES)}, theirs = blocks_of(c, mine);
        for (int64_t t = mine.begin; t < mine.end; ++t) {
            state(here.head, t, here.block).clear(c);
            if (c.key_scores) std::memset(weights[index(here.head, t, here.block)], 0, sizeof(Weights));
        }
        if (here.block < theirs.begin || here.block >= theirs.end) return;
        TileBuffers work(c, TILES);
        int64_t words = TILE * words_of(c), end = visible_range(c, rows_of(c, mine.end - 1).end - 1).end;
        for (int64_t t = mine.begin; t < mine.end; ++t) pack_queries(c, here.head, t, work.q + (t - mine.begin) * words);
        pack_block(c, here, &then, end, work.keys, work.values);
        for (int64_t t = mine.begin; t < mine.end; ++t) {
            if (c.key_scores) work.weights = weights[index(here.head, t, here.block)][0];
            attend_tile(c, work, work.q + (t - mine.begin) * words, t, here.block, state(here.head, t, here.block));
        }
    }
    void run() {
        use(call_scratch.take<char>(bytes()));
        int64_t items = n_attend_items();
        std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(static_cast<int>(c.threads))
        {
            [[maybe_unused]] ThreadScope scope;
            for (int64_t item = taken++, next; item < items; item = next) {
                next = taken++;
                attend(item, next);
            }
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t item = 0; item < n_merge_items(); ++item) merge(item);
            if (c.key_scores) {
#pragma omp for schedule(static)
                for (int64_t item = 0; item < n * (BLOCK / N_TILE); ++item)
                    add_key_scores(blocks.begin + item / (BLOCK / N_TILE), item % (BLOCK / N_TILE) * N_TILE);
            }
        }
    }

   private:
    using Weights = elem_t[TILE][WEIGHTS];

    int64_t index(int64_t head, int64_t tile, int64_t block) const {
        return (head * tiles + tile) * n + block - blocks.begin;
    }
    State& state(int64_t head, int64_t tile, int64_t block) const {
        return *reinterpret_cast<State*>(states + State::bytes(c) * index(head, tile, block));
    }

    // Adds up the scores of the keys of one strip.
    void add_key_scores(int64_t block, int64_t strip) const {
        float heads = static_cast<float>(c.kv_heads * c.group);
        int64_t key = block * BLOCK + strip, end = visible_range(c, c.rows * c.group - 1).end;
        auto* lengths = thread_scratch.take<float>(N_TILE * c.kv_heads);
        F32 squares[VECTORS] = {};
        for (int64_t i = 0; i < c.kv_heads * N_TILE; ++i) {  // of values; behind the last one, 0
            const elem_t* v = c.values + i / N_TILE * c.v_head + (key + i % N_TILE) * c.v_row;
            F32 sum = broadcast(0.0f);
            for (int64_t d = 0; d < c.dim && key + i % N_TILE < end; d += LANES)
                sum = fma(load(v + d), load(v + d), sum);
            lengths[i] = std::sqrt(reduce_add(sum));
        }
        for (int64_t row = 0; row < c.rows; ++row) {
            F32 sum[VECTORS] = {};
            for (int64_t head = 0; head < c.kv_heads; ++head) {
                F32 mine[VECTORS] = {};
                for (int64_t s = row * c.group; s < (row + 1) * c.group; ++s) {
                    int64_t at = index(head, s / TILE, block);
                    F32 share = broadcast(state(head, s / TILE, block).row_sum[s % TILE]);
                    for (int i = 0; i < VECTORS; ++i)
                        mine[i] = fma(weights_in(weights[at][s % TILE] + strip, i), share, mine[i]);
                }
                for (int i = 0; i < VECTORS; ++i) sum[i] = fma(mine[i], load(lengths + head * N_TILE + LANES * i), sum[i]);
            }
            for (int i = 0; i < VECTORS; ++i) squares[i] = fma(sum[i], sum[i], squares[i]);
        }
        for (int i = 0; i < VECTORS; ++i, key += LANES)
            store(c.key_scores + key, tail_mask(end - key), squares[i] * broadcast(1 / (heads * heads)));
    }

    const AttentionArgs& c;
    const int64_t tiles;
    const Range blocks;
    const int64_t n;
    char* states = nullptr;
    Weights* weights = nullptr;
};

// Many rows: all threads pack a head's keys and values, and each attends to some tiles at a time, the longest first. It goes on
// to the next head when none are left: no thread reads the buffer of two that is packed then.
void attend_packed(const AttentionArgs& c) {
    constexpr int64_t ITEM_TILES = 8;          // tiles of an item
    constexpr int64_t CACHED_WORDS = 1 << 17;  // words of keys and values that the tiles of an item read in turn, from the cache
    const int64_t tiles = tiles_per_head(c), step = std::clamp<int64_t>(tiles / (4 * c.threads), 1, ITEM_TILES);
    const int64_t items = divide_up(tiles, step), end = visible_range(c, c.rows * c.group - 1).end;
    const Range blocks = blocks_of(c, {0, tiles});
    const int64_t key_words = BLOCK * words_of(c), block_words = key_words + BLOCK / PER_WORD * c.dim;
    const int64_t head_words = (blocks.end - blocks.begin) * block_words, span = std::max<int64_t>(1, CACHED_WORDS / block_words);
    auto* shared = call_scratch.take<uint32_t>(2 * head_words);
    auto keys_of = [&](int64_t head, int64_t b) { return shared + head % 2 * head_words + (b - blocks.begin) * block_words; };
    auto attend = [&](int64_t head, Range mine) {
        TileBuffers work(c, ITEM_TILES);
        Range theirs = blocks_of(c, mine);
        auto q_of = [&](int64_t t) { return work.q + (t - mine.begin) * TILE * words_of(c); };
        for (int64_t t = mine.begin; t < mine.end; ++t) {
            work.state(c, t - mine.begin).begin(c, head, t);
            pack_queries(c, head, t, q_of(t));
        }
        for (int64_t from = theirs.begin; from < theirs.end; from += span)
            for (int64_t t = mine.begin; t < mine.end; ++t)
                for (int64_t b = from; b < std::min(theirs.end, from + span); ++b) {
                    work.keys = keys_of(head, b), work.values = work.keys + key_words;
                    attend_tile(c, work, q_of(t), t, b, work.state(c, t - mine.begin));
                }
        for (int64_t t = mine.begin; t < mine.end; ++t) write(c, head, t, work.state(c, t - mine.begin));
    };
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    {
        [[maybe_unused]] ThreadScope scope;
        for (int64_t head = 0; head < c.kv_heads; ++head) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t b = blocks.begin; b < blocks.end; ++b)
                pack_block(c, {head, b}, nullptr, end, keys_of(head, b), keys_of(head, b) + key_words);
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t item = 0; item < items; ++item) {
                int64_t first = (items - 1 - item) * step;
                attend(head, {first, std::min(tiles, first + step)});
            }
        }
    }
}

}  // namespace
