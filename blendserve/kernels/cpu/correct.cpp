// The corrections in vectors: correct.h says what is computed.

#include "numbers.h"

namespace {

constexpr int TILE = 6;  // rows: with the vectors of a strip each they fill the registers
struct Unit {};

}  // namespace

#include "correct.h"

namespace {

// SOME rows of a' b, from i, and a strip of it, from j: a and b [rows, f].
void product(const float* a, const float* b, int64_t rows, int64_t f, int64_t i, int64_t j, float* out) {
    Floats sum[SOME][VECTORS] = {};
    for (int64_t s = 0; s < rows; ++s) {
        Floats y[VECTORS];
        for (int v = 0; v < VECTORS; ++v) y[v] = load(b + s * f + j + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < SOME; ++r) {
            Floats x = all(a[s * f + i + r]);
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = fma(x, y[v], sum[r][v]);
        }
    }
    for (int r = 0; r < SOME; ++r)
        for (int v = 0; v < VECTORS; ++v) store(out + (i + r) * f + j + v * LANES, sum[r][v]);
}

void set_up(const CorrectCall& c, int64_t i, Head& h) {
    int64_t f = 2 * c.dim;
    for (int64_t to = i + STRIP; i < to; i += SOME)
        for (int64_t j = 0; j < f; j += STRIP) {
            if (j + STRIP > i) product(h.x, h.x, c.rows, f, i, j, h.gram);
            product(h.x, h.left, c.rows, f, i, j, h.w);
        }
}

void predict(const CorrectCall& c, const Head& h, const float* constants, const Number (*known)[2 * MAX_DIM], int64_t n,
             float (*shift)[2 * MAX_DIM]) {
    int64_t f = 2 * c.dim;
    for (int64_t j = 0; j < f; j += STRIP) {
        Floats sum[TILE][VECTORS];
        for (int r = 0; r < TILE; ++r)
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(constants + j + v * LANES);
        const uint32_t* w = h.weights + j;
        for (int64_t i = 0; i < f; i += PER_WORD, w += f) {
            Words y[VECTORS];
            for (int v = 0; v < VECTORS; ++v) y[v] = load_words(w + v * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < TILE; ++r) {
                Words x = word(known[r] + i);
                for (int v = 0; v < VECTORS; ++v) sum[r][v] = dot(sum[r][v], x, y[v]);
            }
        }
        for (int64_t r = 0; r < n; ++r)
            for (int v = 0; v < VECTORS; ++v) store(shift[r] + j + v * LANES, sum[r][v]);
    }
}

}  // namespace

extern "C" void blendserve_correct(const CorrectCall* call) { correct(*call); }
