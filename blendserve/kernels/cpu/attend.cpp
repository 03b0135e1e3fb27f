// Attention that is causal by position, on CPUs that multiply bf16 (AVX512-BF16). blend/attention.py is the plain form.
//
// Flash attention (arXiv 2205.14135) with keys in blocks of 256 that start at multiples of 256. The `group` query heads of
// a kv head are stacked position by position, and 6 stacked rows make a tile:
//
//     for each tile and block:  scores = q k^T,  top = max,  weights = 2^(scores - top),  mix = weights v
//                               state = state rescaled + mix rescaled
//
// A row's result depends on its own position and on the keys it sees alone: not on the other rows, not on threads, not on
// how the work is split. For that, every block is summed by itself and blocks are merged in ascending order.
//
// Keys and values are packed for vdpbf16ps, which takes pairs: `keys` [strip][dim / 2][64] holds two dims of 64 keys in a
// row, `values` [256 / 2][dim] two keys of every dim.

#include "common.h"

#include <atomic>
#include <cmath>

namespace {

constexpr int TILE = 6;     // rows of a tile: with 4 vectors each they fill the registers
constexpr int BLOCK = 256;  // keys packed together, in strips
constexpr int TILES = 32;   // tiles that share a packed block
constexpr float NONE = -INFINITY;
constexpr float LOG2E = 1.44269504f;

}  // namespace

// One call, as the caller fills it in. Strides are in elements; the innermost one is 1.
struct Call {
    const uint16_t *q, *keys, *values;  // bf16 [group * kv, rows, dim], [kv, T, dim], [kv, T, dim]
    uint16_t* out;                      // bf16 [rows, group * kv, dim], contiguous
    const int64_t* at;                  // [rows], ascending positions
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

// Sums over the blocks so far, of up to TILE rows: `mix` [TILE][dim] follows in memory.
struct State {
    float top[LANES];    // largest score, in powers of 2
    float total[LANES];  // sum of weights
    float* mix() { return reinterpret_cast<float*>(this + 1); }
    static size_t bytes(const Call& c) { return sizeof(State) + sizeof(float) * TILE * c.dim; }
    void clear(const Call& c) {
        std::fill(top, top + LANES, NONE);
        std::fill(total, total + LANES, 0.0f);
        std::fill(mix(), mix() + TILE * c.dim, 0.0f);
    }
};

thread_local Scratch thread_scratch, call_scratch;  // of the thread itself, and of the call that it made

struct Workspace {
    uint32_t *keys, *values, *q;
    float* scores;      // [TILE][BLOCK]
    uint16_t* weights;  // [TILE][BLOCK]
    char* states;

    Workspace(const Call& c, int64_t tiles) {
        size_t packed = sizeof(uint32_t) * BLOCK * c.dim / 2, rows = sizeof(uint32_t) * TILE * tiles * c.dim / 2;
        size_t sizes[] = {packed, packed, rows, sizeof(float) * TILE * BLOCK, sizeof(uint16_t) * TILE * BLOCK,
                          State::bytes(c) * tiles};
        size_t starts[7] = {0};
        for (int i = 0; i < 6; ++i) starts[i + 1] = starts[i] + divide_up(sizes[i], 64) * 64;
        char* base = thread_scratch.take(starts[6]);
        keys = reinterpret_cast<uint32_t*>(base + starts[0]);
        values = reinterpret_cast<uint32_t*>(base + starts[1]);
        q = reinterpret_cast<uint32_t*>(base + starts[2]);
        scores = reinterpret_cast<float*>(base + starts[3]);
        weights = reinterpret_cast<uint16_t*>(base + starts[4]);
        states = base + starts[5];
    }
    State& state(const Call& c, int64_t i) { return *reinterpret_cast<State*>(states + State::bytes(c) * i); }
};

// 2^x for x <= 0, to 1e-7 relative; exactly 1 at 0 and 0 at -infinity.
inline __m512 power_of_2(__m512 x) {
    __m512 f = _mm512_reduce_ps(x, 1);  // x - floor(x), 0 at -infinity
    __m512 p = _mm512_set1_ps(0.0018671305f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00901702941f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0557999138f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24016445f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693151312f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}

// cap * tanh(x * scale / cap); -infinity stays.
inline __m512 capped(__m512 x, float scale, float cap) {
    __m512 e = power_of_2(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2 * LOG2E * scale / cap)));
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 size = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(1 << 31));
    __m512 signed_size = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(size), sign));
    __mmask16 hidden = _mm512_cmp_ps_mask(x, _mm512_set1_ps(NONE), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(_mm512_mul_ps(signed_size, _mm512_set1_ps(cap)), hidden, x);
}

// A block of a head, -1 = none.
struct Place {
    int64_t head = -1, block = -1;
};

// A block's rows of keys or values, to be asked for while something else is packed.
Ahead ahead_of(const uint16_t* rows, int64_t head_stride, int64_t stride, const Call& c, Place place, int64_t end) {
    if (place.head < 0 || stride != c.dim) return {};
    int64_t begin = place.block * BLOCK, stop = std::min(end, begin + BLOCK);
    rows += place.head * head_stride;
    return {reinterpret_cast<const char*>(rows + begin * stride), reinterpret_cast<const char*>(rows + stop * stride)};
}

void pack_keys(const uint16_t* keys, int64_t stride, int n, int dim, uint32_t* to, Ahead ahead) {
    int words = dim / 2;
    for (int key = 0; key < n; key += LANES) {
        for (int w = 0; w < words; w += LANES)
            turn(keys + key * stride + 2 * w, stride, std::min(LANES, n - key), std::min(LANES, words - w),
                 to + (key / STRIP * words + w) * STRIP + key % STRIP, STRIP);
        ahead.fetch(dim / 2);  // as much as was read
    }
}

// Keys n and after weigh nothing, but memory may hold NaN there: they are zeros up to the next multiple of 16.
void pack_values(const uint16_t* values, int64_t stride, int n, int dim, uint32_t* to, Ahead ahead) {
    int end = divide_up(n, LANES) * LANES;
    for (int key = 0; key < end; key += 2, to += dim) {
        for (int d = 0; d < dim; d += LANES) {
            __m256i a = _mm256_setzero_si256(), b = a;
            if (key < n) a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + key * stride + d));
            if (key + 1 < n) b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + (key + 1) * stride + d));
            __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
            _mm512_store_si512(to + d, _mm512_or_si512(_mm512_cvtepu16_epi32(a), high));
        }
        ahead.fetch(dim / 16);
    }
}

// A tile's queries, [dim / 2][rows of the tile] words.
void pack_queries(const Call& c, int64_t head, int64_t tile, uint32_t* to) {
    Range rows = rows_of(c, tile);
    int64_t n = rows.end - rows.begin;
    for (int64_t i = 0; i < n; ++i) {
        int64_t row = (rows.begin + i) / c.group, h = head * c.group + (rows.begin + i) % c.group;
        const uint16_t* from = c.q + h * c.q_head + row * c.q_row;
        for (int64_t w = 0; w < c.dim / 2; ++w) std::memcpy(to + w * n + i, from + 2 * w, sizeof(uint32_t));
    }
}

// What one block gave a tile of R rows.
struct Part {
    alignas(64) float top[LANES];
    alignas(64) float total[LANES];
};

// Which of the block's keys at .. at + 15 a row that sees [from, to) does not see.
inline __mmask16 unseen(int at, int from, int to, const uint8_t* hidden) {
    __m512i key = _mm512_add_epi32(_mm512_set1_epi32(at),
                                   _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __mmask16 mask = _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32(from)) |
                     _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(to));
    if (hidden) {
        __m128i marks = _mm_loadu_si128(reinterpret_cast<const __m128i*>(hidden + at));
        mask |= _mm_test_epi8_mask(marks, marks);
    }
    return mask;
}

// Scores of R rows against the strips [begin, end) of a block; row i sees keys [from[i], to[i]).
template <int R>
void score(const uint32_t* q, const uint32_t* keys, int words, int begin, int end, const int* from, const int* to,
           const uint8_t* hidden, float* scores, float (*top)[LANES]) {
    int inside_from = *std::max_element(from, from + R), inside_to = *std::min_element(to, to + R);
    for (int r = 0; r < R; ++r) _mm512_store_ps(top[r], _mm512_set1_ps(NONE));
    for (int s = begin; s < end; s += STRIP) {
        __m512 sum[R][4];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 4; ++i) sum[r][i] = _mm512_setzero_ps();
        const uint32_t* k = keys + s * words;
        for (int w = 0; w < words; ++w, k += STRIP) {
            __m512bh k0 = pairs(k), k1 = pairs(k + 16), k2 = pairs(k + 32), k3 = pairs(k + 48);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                __m512bh x = pair(q[w * R + r]);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], x, k0);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], x, k1);
                sum[r][2] = _mm512_dpbf16_ps(sum[r][2], x, k2);
                sum[r][3] = _mm512_dpbf16_ps(sum[r][3], x, k3);
            }
        }
        bool edge = hidden || s < inside_from || s + STRIP > inside_to;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int i = 0; edge && i < 4; ++i) {
                __mmask16 mask = unseen(s + i * LANES, from[r], to[r], hidden);
                sum[r][i] = _mm512_mask_mov_ps(sum[r][i], mask, _mm512_set1_ps(NONE));
            }
            float* line = scores + r * BLOCK + s;
            _mm512_store_ps(line, sum[r][0]);
            _mm512_store_ps(line + 16, sum[r][1]);
            _mm512_store_ps(line + 32, sum[r][2]);
            _mm512_store_ps(line + 48, sum[r][3]);
            __m512 most = _mm512_max_ps(_mm512_max_ps(sum[r][0], sum[r][1]), _mm512_max_ps(sum[r][2], sum[r][3]));
            _mm512_store_ps(top[r], _mm512_max_ps(_mm512_load_ps(top[r]), most));
        }
    }
}

// scores -> weights relative to the block's largest score, and their sum.
template <int R, bool CAP>
void weigh(const Call& c, int begin, int end, const float* scores, const float (*top)[LANES], uint16_t* weights,
           Part& part) {
    __m512 factor = _mm512_set1_ps(CAP ? LOG2E : LOG2E * c.scale);
    for (int r = 0; r < R; ++r) {
        __m512 most = _mm512_load_ps(top[r]);
        if (CAP) most = capped(most, c.scale, c.softcap);
        float highest = _mm512_reduce_max_ps(most) * _mm512_cvtss_f32(factor);
        __m512 base = _mm512_set1_ps(highest == NONE ? 0.0f : highest), sum = _mm512_setzero_ps();
        for (int j = begin; j < end; j += 2 * LANES) {
            __m512 a = _mm512_load_ps(scores + r * BLOCK + j), b = _mm512_load_ps(scores + r * BLOCK + j + LANES);
            if (CAP) a = capped(a, c.scale, c.softcap), b = capped(b, c.scale, c.softcap);
            a = power_of_2(_mm512_fmsub_ps(a, factor, base));
            b = power_of_2(_mm512_fmsub_ps(b, factor, base));
            sum = _mm512_add_ps(_mm512_add_ps(sum, a), b);
            _mm512_store_si512(weights + r * BLOCK + j, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        part.top[r] = highest;
        part.total[r] = _mm512_reduce_add_ps(sum);
    }
}

// How much of two sums is kept when they become one, relative to the larger of their tops. Also joins top and total.
struct Shares {
    alignas(64) float old[LANES];
    alignas(64) float added[LANES];
};

inline Shares join(float* top, float* total, const float* top2, const float* total2) {
    __m512 a = _mm512_load_ps(top), b = _mm512_load_ps(top2), most = _mm512_max_ps(a, b);
    __mmask16 none = _mm512_cmp_ps_mask(most, _mm512_set1_ps(NONE), _CMP_EQ_OQ);
    __m512 base = _mm512_mask_mov_ps(most, none, _mm512_setzero_ps());
    __m512 keep = power_of_2(_mm512_sub_ps(a, base)), take = power_of_2(_mm512_sub_ps(b, base));
    Shares shares;
    _mm512_store_ps(shares.old, keep);
    _mm512_store_ps(shares.added, take);
    __m512 sum = _mm512_mul_ps(_mm512_load_ps(total), keep);
    _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(total2), take, sum));
    _mm512_store_ps(top, most);
    return shares;
}

inline __m512 joined(__m512 old, __m512 added, const Shares& shares, int r) {
    __m512 kept = _mm512_mul_ps(old, _mm512_set1_ps(shares.old[r]));
    return _mm512_fmadd_ps(added, _mm512_set1_ps(shares.added[r]), kept);
}

// weights [R][BLOCK] times N vectors of each value, keys [begin, end), joined into `mix` [TILE][dim].
template <int R, int N>
void mix(const uint16_t* weights, const uint32_t* values, int dim, int begin, int end, const Shares& shares, float* to) {
    __m512 sum[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) sum[r][i] = _mm512_setzero_ps();
    const uint32_t* v = values + begin / 2 * dim;
    for (int j = begin; j < end; j += 2, v += dim) {
        __m512bh vs[N];
        for (int i = 0; i < N; ++i) vs[i] = pairs(v + LANES * i);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            __m512bh two = pair(weights + r * BLOCK + j);
            for (int i = 0; i < N; ++i) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], two, vs[i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) {
            float* at = to + r * dim + LANES * i;
            _mm512_store_ps(at, joined(_mm512_load_ps(at), sum[r][i], shares, r));
        }
}

// A tile of R rows looks at block `block` (`work` holds it packed) and joins what it sees into `state`.
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
    score<R>(q, work.keys, dim / 2, begin, end, from, to,
             c.hidden ? c.hidden + block * BLOCK : nullptr, work.scores, top);
    Part part;
    _mm512_store_ps(part.top, _mm512_set1_ps(NONE));
    _mm512_store_ps(part.total, _mm512_setzero_ps());
    (c.softcap > 0 ? weigh<R, true> : weigh<R, false>)(c, begin, end, work.scores, top, work.weights, part);
    Shares shares = join(state.top, state.total, part.top, part.total);
    int stop = static_cast<int>(divide_up(last, LANES)) * LANES;  // weights after `last` are zeros
    int d = 0;
    for (; d + STRIP <= dim; d += STRIP) mix<R, 4>(work.weights, work.values + d, dim, begin, stop, shares, state.mix() + d);
    auto rest = dim - d == 48 ? mix<R, 3> : dim - d == 32 ? mix<R, 2> : mix<R, 1>;
    if (d < dim) rest(work.weights, work.values + d, dim, begin, stop, shares, state.mix() + d);
}

using Look = void (*)(const Call&, const Workspace&, const uint32_t*, int64_t, int64_t, State&);
constexpr Look looks[TILE + 1] = {nullptr, look<1>, look<2>, look<3>, look<4>, look<5>, look<6>};

// While keys are packed, the block's values are on their way; meanwhile, the next block's keys.
void pack_block(const Call& c, Place here, Place next, int64_t end, Workspace& work) {
    int64_t first = here.block * BLOCK;
    int n = static_cast<int>(std::min<int64_t>(BLOCK, end - first)), dim = static_cast<int>(c.dim);
    pack_keys(c.keys + here.head * c.k_head + first * c.k_row, c.k_row, n, dim, work.keys,
              ahead_of(c.values, c.v_head, c.v_row, c, here, end));
    pack_values(c.values + here.head * c.v_head + first * c.v_row, c.v_row, n, dim, work.values,
                ahead_of(c.keys, c.k_head, c.k_row, c, next, end));
}

void write(const Call& c, int64_t head, int64_t tile, State& state) {
    Range rows = rows_of(c, tile);
    for (int64_t r = 0; r < rows.end - rows.begin; ++r) {
        int64_t row = (rows.begin + r) / c.group, h = head * c.group + (rows.begin + r) % c.group;
        uint16_t* to = c.out + (row * c.kv * c.group + h) * c.dim;
        __m512 share = _mm512_set1_ps(1.0f / state.total[r]);
        for (int64_t d = 0; d < c.dim; d += LANES) {
            __m512 x = _mm512_mul_ps(_mm512_load_ps(state.mix() + r * c.dim + d), share);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d), (__m256i)_mm512_cvtneps_pbh(x));
        }
    }
}

// These tiles over these blocks; state(tile, block) is where each look goes; `after` is what this thread packs then.
template <class StateOf>
void look_at(const Call& c, int64_t head, Range tiles, Range blocks, Place after, Workspace& work, StateOf state) {
    int64_t words = TILE * c.dim / 2, end = seen(c, rows_of(c, tiles.end - 1).end - 1).end;
    for (int64_t t = tiles.begin; t < tiles.end; ++t) pack_queries(c, head, t, work.q + (t - tiles.begin) * words);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        pack_block(c, {head, b}, b + 1 < blocks.end ? Place{head, b + 1} : after, end, work);
        for (int64_t t = tiles.begin; t < tiles.end; ++t) {
            Range rows = rows_of(c, t);
            looks[rows.end - rows.begin](c, work, work.q + (t - tiles.begin) * words, t, b, state(t, b));
        }
    }
}

// Many rows: each item is some tiles of a head over all they see, the longest first.
void by_rows(const Call& c) {
    int64_t tiles = tiles_per_head(c), chunks = divide_up(tiles, TILES);
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(c.threads))
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

// Few rows: an item is some tiles of a head and one block; what came of the blocks is joined afterwards.
class ByKeys {
   public:
    explicit ByKeys(const Call& call)
        : c(call), tiles(tiles_per_head(c)), blocks(blocks_of(c, {0, tiles})), n(blocks.end - blocks.begin) {
        size_t looks = c.kv * tiles * n, state_bytes = State::bytes(c) * looks;
        states = call_scratch.take(state_bytes + (c.watched ? sizeof(Weights) * looks : 0));
        weights = reinterpret_cast<Weights*>(states + state_bytes);
    }

    void run() {
        int64_t chunks = divide_up(tiles, TILES), items = c.kv * chunks * n;
        auto place = [&](int64_t item) { return Place{item / (chunks * n), blocks.begin + item % n}; };
        std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(static_cast<int>(c.threads))
        {
            for (int64_t item = taken++, next; item < items; item = next) {
                next = taken++;
                look_once(place(item), item / n % chunks, next < items ? place(next) : Place{});
            }
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t item = 0; item < c.kv * tiles; ++item) finish(item / tiles, item % tiles);
            if (c.watched) {
#pragma omp for schedule(static)
                for (int64_t item = 0; item < n * (BLOCK / STRIP); ++item)
                    watch(blocks.begin + item / (BLOCK / STRIP), item % (BLOCK / STRIP) * STRIP);
            }
        }
    }

   private:
    using Weights = uint16_t[TILE][BLOCK];

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
        State& all = work.state(c, 0);
        all.clear(c);
        for (int64_t b = blocks.begin; b < blocks.end; ++b) {
            State& one = state(head, tile, b);
            Shares shares = join(all.top, all.total, one.top, one.total);
            for (int64_t r = 0; r < TILE; ++r)
                for (int64_t d = r * c.dim; d < (r + 1) * c.dim; d += LANES)
                    _mm512_store_ps(all.mix() + d, joined(_mm512_load_ps(all.mix() + d), _mm512_load_ps(one.mix() + d),
                                                          shares, static_cast<int>(r)));
        }
        write(c, head, tile, all);
        if (!c.watched) return;
        for (int64_t b = blocks.begin; b < blocks.end; ++b) {
            State& one = state(head, tile, b);
            __m512 share = power_of_2(_mm512_sub_ps(_mm512_load_ps(one.top), _mm512_load_ps(all.top)));
            _mm512_store_ps(one.total, _mm512_div_ps(share, _mm512_load_ps(all.total)));
        }
    }

    // The norms of a strip's values; behind the last one, 0.
    void measure(int64_t head, int64_t key, int64_t end, float* to) const {
        for (int64_t i = 0; i < STRIP; ++i) {
            const uint16_t* v = c.values + head * c.v_head + (key + i) * c.v_row;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t d = 0; d < c.dim && key + i < end; d += LANES) {
                __m512 x = wide(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + d)));
                sum = _mm512_fmadd_ps(x, x, sum);
            }
            to[i] = std::sqrt(_mm512_reduce_add_ps(sum));
        }
    }

    // What is seen of the keys of one strip.
    void watch(int64_t block, int64_t strip) const {
        float heads = static_cast<float>(c.kv * c.group);
        int64_t key = block * BLOCK + strip, end = seen(c, c.rows * c.group - 1).end;
        auto* lengths = reinterpret_cast<float*>(thread_scratch.take(sizeof(float) * STRIP * c.kv));
        __m512 squares[4] = {};
        for (int64_t head = 0; head < c.kv; ++head) measure(head, key, end, lengths + head * STRIP);
        for (int64_t row = 0; row < c.rows; ++row) {
            __m512 sum[4] = {};
            for (int64_t head = 0; head < c.kv; ++head) {
                __m512 mine[4] = {};
                for (int64_t s = row * c.group; s < (row + 1) * c.group; ++s) {
                    int64_t at = index(head, s / TILE, block);
                    __m512 share = _mm512_set1_ps(state(head, s / TILE, block).total[s % TILE]);
                    for (int i = 0; i < 4; ++i) {
                        const uint16_t* w = weights[at][s % TILE] + strip + LANES * i;
                        mine[i] = _mm512_fmadd_ps(wide(_mm256_load_si256(reinterpret_cast<const __m256i*>(w))), share, mine[i]);
                    }
                }
                for (int i = 0; i < 4; ++i)
                    sum[i] = _mm512_fmadd_ps(mine[i], _mm512_load_ps(lengths + head * STRIP + LANES * i), sum[i]);
            }
            for (int i = 0; i < 4; ++i) squares[i] = _mm512_fmadd_ps(sum[i], sum[i], squares[i]);
        }
        for (int i = 0; i < 4; ++i, key += LANES) {
            __m512 mean = _mm512_mul_ps(squares[i], _mm512_set1_ps(1 / (heads * heads)));
            _mm512_mask_storeu_ps(c.watched + key, first(end - key), mean);
        }
    }

    const Call& c;
    const int64_t tiles;
    const Range blocks;
    const int64_t n;
    char* states;
    Weights* weights;
};

}  // namespace

extern "C" void blendserve_attend(const Call* call) {
    const Call& c = *call;
    if (!c.rows) return;
    int64_t items = divide_up(tiles_per_head(c), TILES) * c.kv;
    if (c.watched || (c.threads > 1 && items < 4 * c.threads))
        ByKeys(c).run();
    else
        by_rows(c);
}
