// Attention by position on matrix tiles (AMX), in bf16: attend.h says what is computed.
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

#include "numbers.h"
#include "tiles.h"

namespace {

constexpr int TILE = 16;
constexpr int BLOCK = 512;
constexpr int SCORES = BLOCK + 16, WEIGHTS = BLOCK + 32;  // rows apart, so that they do not share places in the cache
constexpr int APART = 16;
using Unit = TileScope;

}  // namespace

#include "attend.h"

namespace {

int64_t words_of(const Call& c) { return divide_up(c.dim / PER_WORD, LANES) * LANES; }

// Of 32 keys, the first 16 have the lower halves of words, the others the upper ones.
Floats weights_in(const Number* strip, int i) {
    Words two = load_words(strip + i / 2 * 2 * LANES);
    return floats(i % 2 ? _mm512_and_si512(two, all_words(0xffff0000u)) : _mm512_slli_epi32(two, 16));
}

// A tile's queries, [TILE][words], zeros where there are none.
void pack_queries(const Call& c, int64_t head, int64_t tile, uint32_t* to) {
    Range rows = rows_of(c, tile);
    int64_t words = words_of(c);
    std::memset(to, 0, sizeof(uint32_t) * TILE * words);
    for (int64_t s = rows.begin; s < rows.end; ++s, to += words) {
        int64_t row = s / c.group, h = head * c.group + s % c.group;
        std::memcpy(to, c.q + h * c.q_head + row * c.q_row, sizeof(Number) * c.dim);
    }
}

// 2^x for x <= 0, to 1e-4 relative, plus half of bf16's last place: its upper half is 2^x rounded. 0 at -infinity.
inline Words weight_bits(Floats x) {
    Floats f = fraction(x), p = all(0.07706704736f);
    p = fma(p, f, all(0.2276449949f));
    p = fma(p, f, all(0.6951167583f));
    p = fma(p, f, all(1.00390625f));
    return words(scaled(p, x));
}

// Scores of a tile against the keys of a strip.
inline void score(const uint32_t* q, const uint32_t* k, int words, float* scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int w = 0; w < words; w += LANES, k += LANES * STRIP) {
        _tile_loadd(4, q + w, words * sizeof(uint32_t));
        _tile_stream_loadd(5, k, STRIP * sizeof(uint32_t));
        _tile_dpbf16ps(0, 4, 5);
        _tile_stream_loadd(6, k + 16, STRIP * sizeof(uint32_t));
        _tile_dpbf16ps(1, 4, 6);
        _tile_stream_loadd(5, k + 32, STRIP * sizeof(uint32_t));
        _tile_dpbf16ps(2, 4, 5);
        _tile_stream_loadd(6, k + 48, STRIP * sizeof(uint32_t));
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, scores, SCORES * sizeof(float));
    _tile_stored(1, scores + 16, SCORES * sizeof(float));
    _tile_stored(2, scores + 32, SCORES * sizeof(float));
    _tile_stored(3, scores + 48, SCORES * sizeof(float));
}

// What the rows of a tile see of a block.
struct Sight {
    int rows, begin, end;        // keys from begin to end, whole strips
    int inside_from, inside_to;  // what all rows see
    int from[TILE], to[TILE];
    const uint8_t* hidden;
    bool edge(int s) const { return hidden || s < inside_from || s + STRIP > inside_to; }
};

// A strip's scores as they count, and each row's largest.
template <bool CAP>
inline void limit(const Call& c, const Sight& sight, int s, float* scores, float (*top)[LANES]) {
    scores += s;
    if (!CAP && !sight.edge(s)) {
#pragma GCC unroll 4
        for (int r = 0; r < TILE; ++r, scores += SCORES) {
            Floats a = larger(load(scores), load(scores + 16)), b = larger(load(scores + 32), load(scores + 48));
            store(top[r], larger(load(top[r]), larger(a, b)));
        }
        return;
    }
    for (int r = 0; r < sight.rows; ++r, scores += SCORES) {
        Floats most = load(top[r]);
        for (int j = 0; j < STRIP; j += LANES) {
            Floats x = load(scores + j);
            if (CAP) x = capped(x, c.scale, c.softcap);
            x = pick(unseen(s + j, sight.from[r], sight.to[r], sight.hidden), all(NONE), x);
            store(scores + j, x);
            most = larger(most, x);
        }
        store(top[r], most);
    }
}

// The largest lane of each of 16 vectors.
inline Floats largest_of_each(const float (*x)[LANES]) {
    Words a[LANES];
    for (int i = 0; i < LANES; ++i) a[i] = words(load(x[i]));
    transpose(a);
    Floats most = floats(a[0]);
    for (int i = 1; i < LANES; ++i) most = larger(most, floats(a[i]));
    return most;
}

// The scores of a strip -> weights, of a row.
inline void weigh(const float* scores, Floats factor, float base, Number* weights) {
    auto bits = [&](int i) { return weight_bits(fms(load(scores + i), factor, all(base))); };
    constexpr __mmask32 upper = 0xaaaaaaaa;
    store_words(weights, _mm512_mask_mov_epi16(_mm512_srli_epi32(bits(0), 16), upper, bits(16)));
    store_words(weights + 32, _mm512_mask_mov_epi16(_mm512_srli_epi32(bits(32), 16), upper, bits(48)));
}

// Step i of 8: weights of a strip times 16 N dims of its values, added to tiles 0 .. 3; with SUM, times ones, to tile 7.
template <int N, bool SUM>
inline void mix_step(int i, const Number* weights, const uint32_t* values, int dim) {
    int n = i % 4;
    weights += i / 4 * 2 * LANES;
    values += static_cast<int64_t>(i / 4) * LANES * dim + n * LANES;
    if (n == 0) {
        _tile_loadd(4, weights, WEIGHTS * sizeof(Number));
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
inline void mix_strip(const Number* weights, const uint32_t* values, int dim) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) mix_step<N, SUM>(i, weights, values, dim);
}

inline void mix_nothing() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Tiles 0 .. N - 1 joined into `to` [TILE][dim], by way of `fresh`.
template <int N>
inline void merge(const Shares& shares, int rows, int dim, float* fresh, float* to) {
    constexpr int64_t row = STRIP * sizeof(float);
    _tile_stored(0, fresh, row);
    if (N > 1) _tile_stored(1, fresh + 16, row);
    if (N > 2) _tile_stored(2, fresh + 32, row);
    if (N > 3) _tile_stored(3, fresh + 48, row);
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < N; ++i) {
            float* at = to + r * dim + LANES * i;
            store(at, joined(load(at), load(fresh + r * STRIP + LANES * i), shares, r));
        }
}

// 16 N dims from d on, over weights that are there.
template <int N>
void mix_more(const Workspace& work, const Sight& sight, const Shares& shares, int dim, int d, State& state) {
    mix_nothing();
    for (int s = sight.begin; s < sight.end; s += STRIP)
        mix_strip<N, false>(work.weights + s, work.values + static_cast<int64_t>(s) / PER_WORD * dim + d, dim);
    merge<N>(shares, sight.rows, dim, work.scores, state.mix() + d);
}

constexpr uint32_t TWO_ONES = 0x3f803f80u;
alignas(64) constexpr uint32_t ONES[LANES] = {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES,
                                              TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES};

// Weights of the strips, and 16 N dims mixed by them in tiles 0 .. 3; each row's sum of weights goes to `total`.
template <int N>
inline void weigh_and_mix(const Workspace& work, const Sight& sight, Floats factor, const float* base, int dim,
                          float* total) {
    auto values = [&](int s) { return work.values + static_cast<int64_t>(s) / PER_WORD * dim; };
    alignas(64) float sums[TILE][LANES];  // every column is the sum
    mix_nothing();
    _tile_loadd(6, ONES, 0);
    _tile_zero(7);
    for (int s = sight.begin; s < sight.end; s += STRIP) {
        written();
        if (s > sight.begin && sight.rows == TILE) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                int r = 2 * i;
                weigh(work.scores + r * SCORES + s, factor, base[r], work.weights + r * WEIGHTS + s);
                mix_step<N, true>(i, work.weights + s - STRIP, values(s - STRIP), dim);
                weigh(work.scores + (r + 1) * SCORES + s, factor, base[r + 1], work.weights + (r + 1) * WEIGHTS + s);
            }
            continue;
        }
        if (s > sight.begin) mix_strip<N, true>(work.weights + s - STRIP, values(s - STRIP), dim);
        for (int r = 0; r < sight.rows; ++r)
            weigh(work.scores + r * SCORES + s, factor, base[r], work.weights + r * WEIGHTS + s);
    }
    written();
    mix_strip<N, true>(work.weights + sight.end - STRIP, values(sight.end - STRIP), dim);
    _tile_stored(7, sums, sizeof sums[0]);
    for (int r = 0; r < sight.rows; ++r) total[r] = sums[r][0];
}

template <bool CAP, int N>
void look(const Call& c, const Workspace& work, const uint32_t* q, const Sight& sight, State& state) {
    alignas(64) float top[TILE][LANES], base[TILE];
    int dim = static_cast<int>(c.dim), words = static_cast<int>(words_of(c)), begin = sight.begin, end = sight.end;
    auto keys = [&](int s) { return work.keys + static_cast<int64_t>(s) * words; };
    for (int r = 0; r < TILE; ++r) store(top[r], all(NONE));
    written();
    score(q, keys(begin), words, work.scores + begin);
    for (int s = begin + STRIP; s < end; s += STRIP) {
        score(q, keys(s), words, work.scores + s);
        limit<CAP>(c, sight, s - STRIP, work.scores, top);
    }
    limit<CAP>(c, sight, end - STRIP, work.scores, top);
    Part part;
    Floats factor = all(CAP ? LOG2E : LOG2E * c.scale);
    Floats most = pick(first(sight.rows), largest_of_each(top) * factor, all(NONE));
    store(part.top, most);
    store(base, pick(equal(most, all(NONE)), all(0.0f), most));
    weigh_and_mix<N>(work, sight, factor, base, dim, part.total);
    Shares shares = join(state.top, state.total, part.top, part.total);
    merge<N>(shares, sight.rows, dim, work.scores, state.mix());
    int d = STRIP;
    for (; d + STRIP <= dim; d += STRIP) mix_more<4>(work, sight, shares, dim, d, state);
    auto rest = dim - d == 48 ? mix_more<3> : dim - d == 32 ? mix_more<2> : mix_more<1>;
    if (d < dim) rest(work, sight, shares, dim, d, state);
}

using Look = void (*)(const Call&, const Workspace&, const uint32_t*, const Sight&, State&);
constexpr Look looks[2][5] = {{nullptr, look<false, 1>, look<false, 2>, look<false, 3>, look<false, 4>},
                              {nullptr, look<true, 1>, look<true, 2>, look<true, 3>, look<true, 4>}};

void look_tile(const Call& c, const Workspace& work, const uint32_t* q, int64_t tile, int64_t block, State& state) {
    Range rows = rows_of(c, tile);
    int64_t start = block * BLOCK;
    Sight sight;
    sight.rows = static_cast<int>(rows.end - rows.begin);
    bool all = seen(c, rows.begin).end >= start + BLOCK && seen(c, rows.end - 1).begin <= start;
    for (int r = 0; r < sight.rows; ++r) {
        Range range = all ? Range{start, start + BLOCK} : seen(c, rows.begin + r);
        sight.from[r] = static_cast<int>(std::clamp<int64_t>(range.begin - start, 0, BLOCK));
        sight.to[r] = static_cast<int>(std::clamp<int64_t>(range.end - start, 0, BLOCK));
    }
    int last = sight.to[sight.rows - 1];  // rows ascend
    sight.inside_from = sight.from[sight.rows - 1], sight.inside_to = sight.to[0];
    sight.begin = sight.from[0] / STRIP * STRIP;
    if (sight.begin >= last) return;
    sight.end = static_cast<int>(divide_up(last, STRIP)) * STRIP;
    sight.hidden = c.hidden ? c.hidden + start : nullptr;
    looks[c.softcap > 0][std::min<int64_t>(4, c.dim / LANES)](c, work, q, sight, state);
}

// Many rows: the keys and values of a head are packed once, by all threads; then each takes some tiles at a time, the longest
// first, and whoever finds none left goes on to the next head: of two buffers, nobody reads the one that is packed then.
class ByHead {
   public:
    explicit ByHead(const Call& call)
        : c(call), tiles(tiles_per_head(c)), blocks(blocks_of(c, {0, tiles})), n(blocks.end - blocks.begin),
          key_words(BLOCK * words_of(c)), value_words(BLOCK / PER_WORD * c.dim),
          step(std::clamp<int64_t>(tiles / (4 * c.threads), 1, SOME)) {
        packed_ = reinterpret_cast<uint32_t*>(call_scratch.take(sizeof(uint32_t) * 2 * n * (key_words + value_words)));
    }

    void run() {
        int64_t items = divide_up(tiles, step), end = seen(c, c.rows * c.group - 1).end;
#pragma omp parallel num_threads(static_cast<int>(c.threads))
        {
            Unit unit;
            for (int64_t head = 0; head < c.kv; ++head) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t b = 0; b < n; ++b) pack(head, b, end);
#pragma omp for schedule(dynamic, 1) nowait
                for (int64_t item = 0; item < items; ++item) {
                    int64_t first = (items - 1 - item) * step;
                    look_through(head, {first, std::min(tiles, first + step)});
                }
            }
        }
    }

   private:
    static constexpr int64_t SOME = 8;        // tiles of an item
    static constexpr int64_t SPAN = 1 << 17;  // words of keys and values that one tile after the other looks at

    uint32_t* keys(int64_t head, int64_t b) const { return packed_ + (head % 2 * n + b) * (key_words + value_words); }
    uint32_t* values(int64_t head, int64_t b) const { return keys(head, b) + key_words; }

    void pack(int64_t head, int64_t b, int64_t end) const {
        int64_t first = (blocks.begin + b) * BLOCK;
        int there = static_cast<int>(std::min<int64_t>(BLOCK, end - first)), dim = static_cast<int>(c.dim);
        pack_keys(c.keys + head * c.k_head + first * c.k_row, c.k_row, there, dim, static_cast<int>(words_of(c)),
                  keys(head, b), {});
        pack_values(c.values + head * c.v_head + first * c.v_row, c.v_row, there, dim, values(head, b), {});
    }

    void look_through(int64_t head, Range mine) const {
        Workspace work(c, SOME);
        Range theirs = blocks_of(c, mine);
        int64_t words = TILE * words_of(c), span = std::max<int64_t>(1, SPAN / (key_words + value_words));
        for (int64_t t = mine.begin; t < mine.end; ++t) {
            work.state(c, t - mine.begin).clear(c);
            pack_queries(c, head, t, work.q + (t - mine.begin) * words);
        }
        for (int64_t from = theirs.begin; from < theirs.end; from += span)
            for (int64_t t = mine.begin; t < mine.end; ++t)
                for (int64_t b = from; b < std::min(theirs.end, from + span); ++b) {
                    work.keys = keys(head, b - blocks.begin), work.values = values(head, b - blocks.begin);
                    look_tile(c, work, work.q + (t - mine.begin) * words, t, b, work.state(c, t - mine.begin));
                }
        for (int64_t t = mine.begin; t < mine.end; ++t) write(c, head, t, work.state(c, t - mine.begin));
    }

    const Call& c;
    const int64_t tiles;
    const Range blocks;
    const int64_t n, key_words, value_words, step;
    uint32_t* packed_;
};

}  // namespace

extern "C" void blendserve_attend(const Call* call) {
    const Call& c = *call;
    if (!c.rows) return;
    if (c.watched || tiles_per_head(c) < 8 * c.threads)
        ByKeys(c).run();
    else
        ByHead(c).run();
}
