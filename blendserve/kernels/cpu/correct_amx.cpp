// The corrections on matrix tiles (AMX), in bf16: correct.h says what is computed.
//
// Tokens are predicted 16 at a time, and W is packed as tiles want it as it is. The system is summed over rows from numbers of
// fp32, each cut in two of bf16, what it rounds to and what that leaves: three products of theirs are as good as fp32, for the
// system is damped by a penalty.
//
//     A = known [16 tokens][32 features]       B = W [16 words of features][16 features]     C = [16 tokens][16 features]
//     A = x turned [16 features][32 rows]      B = x or left [16 words of rows][16 features]  C = [16 features][16 features]

#include "numbers.h"
#include "tiles.h"

namespace {

constexpr int TILE = 16;
using Unit = TileScope;

}  // namespace

#include "correct.h"

namespace {

constexpr int DEEP = PER_WORD * LANES;  // rows, or features, of a product
constexpr int WORDS = LANES * LANES;    // of a tile

thread_local Scratch cut_scratch;

// Up to 32 rows of 16 columns as B: what they round to, and behind it what that leaves.
void cut(const float* from, int64_t row, int64_t rows, uint32_t* to) {
    for (int64_t w = 0; w < LANES; ++w) {
        Floats a = 2 * w < rows ? load(from + 2 * w * row) : all(0.0f);
        Floats b = 2 * w + 1 < rows ? load(from + (2 * w + 1) * row) : all(0.0f);
        store_words(to + w * LANES, packed(a, b));
        store_words(to + WORDS + w * LANES, packed(a - rounded(a), b - rounded(b)));
    }
}

// A tile of B turned into one of A, in place.
void turn_tile(uint32_t* tile) {
    Words lines[LANES];
    for (int i = 0; i < LANES; ++i) lines[i] = load_words(tile + i * LANES);
    transpose(lines);
    for (int i = 0; i < LANES; ++i) store_words(tile + i * LANES, lines[i]);
}

// 4 tiles of a' b, summed over rows: `a` [steps][4] turned and `b` [steps], both cut in two; to rows of `out`.
void sum_products(const uint32_t* a, const uint32_t* b, int64_t steps, float* out, int64_t row) {
    written();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; ++s, b += 2 * WORDS) {
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + WORDS, 64);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, a += 2 * WORDS) {
            _tile_loadd(4, a, 64);
            _tile_loadd(5, a + WORDS, 64);
            if (i == 0) _tile_dpbf16ps(0, 4, 6);
            if (i == 0) _tile_dpbf16ps(0, 4, 7);
            if (i == 0) _tile_dpbf16ps(0, 5, 6);
            if (i == 1) _tile_dpbf16ps(1, 4, 6);
            if (i == 1) _tile_dpbf16ps(1, 4, 7);
            if (i == 1) _tile_dpbf16ps(1, 5, 6);
            if (i == 2) _tile_dpbf16ps(2, 4, 6);
            if (i == 2) _tile_dpbf16ps(2, 4, 7);
            if (i == 2) _tile_dpbf16ps(2, 5, 6);
            if (i == 3) _tile_dpbf16ps(3, 4, 6);
            if (i == 3) _tile_dpbf16ps(3, 4, 7);
            if (i == 3) _tile_dpbf16ps(3, 5, 6);
        }
    }
    int64_t bytes = row * static_cast<int64_t>(sizeof(float));
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + 16 * row, bytes);
    _tile_stored(2, out + 32 * row, bytes);
    _tile_stored(3, out + 48 * row, bytes);
}

void set_up(const CorrectCall& c, int64_t i, Head& h) {
    int64_t f = 2 * c.dim, steps = divide_up(c.rows, DEEP);
    auto* a = reinterpret_cast<uint32_t*>(cut_scratch.take(sizeof(uint32_t) * steps * 5 * 2 * WORDS));
    uint32_t* b = a + steps * 4 * 2 * WORDS;
    for (int64_t s = 0; s < steps; ++s)
        for (int64_t n = 0; n < 4; ++n) {
            uint32_t* tiles = a + (s * 4 + n) * 2 * WORDS;
            cut(h.x + s * DEEP * f + i + n * LANES, f, c.rows - s * DEEP, tiles);
            turn_tile(tiles);
            turn_tile(tiles + WORDS);
        }
    auto columns = [&](const float* from, int64_t j, float* out) {
        for (int64_t s = 0; s < steps; ++s) cut(from + s * DEEP * f + j, f, c.rows - s * DEEP, b + s * 2 * WORDS);
        sum_products(a, b, steps, out + i * f + j, f);
    };
    for (int64_t j = 0; j < f; j += LANES) {
        if (j >= i) columns(h.x, j, h.gram);
        columns(h.left, j, h.w);
    }
}

void predict(const CorrectCall& c, const Head& h, const float* constants, const Number (*known)[2 * MAX_DIM], int64_t n,
             float (*shift)[2 * MAX_DIM]) {
    int64_t f = 2 * c.dim, w_bytes = f * static_cast<int64_t>(sizeof(uint32_t));
    written();
    for (int64_t j = 0; j < f; j += STRIP) {
        const uint32_t* w = h.weights + j;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < f; i += DEEP, w += LANES * f) {
            _tile_loadd(4, known[0] + i, sizeof known[0]);
            _tile_loadd(5, w, w_bytes);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, w + 16, w_bytes);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, w + 32, w_bytes);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, w + 48, w_bytes);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, shift[0] + j, sizeof shift[0]);
        _tile_stored(1, shift[0] + j + 16, sizeof shift[0]);
        _tile_stored(2, shift[0] + j + 32, sizeof shift[0]);
        _tile_stored(3, shift[0] + j + 48, sizeof shift[0]);
    }
    for (int64_t r = 0; r < n; ++r) add(shift[r], constants, 1, f);
}

}  // namespace

extern "C" void blendserve_correct(const CorrectCall* call) { correct(*call); }
