// AMX tile instructions as functions of plain C++, after Intel's definition (Instruction Set Extensions Programming
// Reference, chapter "Intel AMX"): tests compile the AMX kernels with `-include` of this file for CPUs without tiles.
//
//     TDPBF16PS  c[m][n] += (sum over k of a[m][2k] b[k][2n]) + (sum over k of a[m][2k + 1] b[k][2n + 1])
//
// Each sum is in fp32, in ascending order from 0, as in the definition. Products of two bf16 are exact in fp32, so fused
// and unfused are the same. Rounding is to nearest even; denormal inputs count as 0 and denormal results become 0,
// whatever MXCSR says. The definition leaves nothing else open, so emulated results should equal a CPU's to the bit; this
// was not compared. A use that would fault aborts: shapes that do not match, a register twice, no configuration.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

// A configuration as LDTILECFG reads it.
struct TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

struct EmulatedTiles {
    TileShapes shapes{};
    unsigned char data[8][16][64];
};
inline thread_local EmulatedTiles emulated;

inline void must(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "emulated tiles: %s\n", what);
    std::abort();
}

inline const TileShapes& shapes_of(int t) {
    must(emulated.shapes.palette == 1, "used without a configuration");
    must(t >= 0 && t < 8 && emulated.shapes.rows[t] && emulated.shapes.bytes[t], "a register without a shape");
    return emulated.shapes;
}

inline void emulated_zero(int t) {
    shapes_of(t);
    std::memset(emulated.data[t], 0, sizeof emulated.data[t]);
}

inline void emulated_release() {
    emulated.shapes = TileShapes{};
    std::memset(emulated.data, 0, sizeof emulated.data);
}

inline void emulated_loadconfig(const void* from) {
    TileShapes shapes;
    std::memcpy(&shapes, from, sizeof shapes);
    must(shapes.palette <= 1 && shapes.start_row == 0, "a palette that there is not");
    for (int i = 0; i < 14; ++i) must(shapes.reserved[i] == 0, "a reserved byte is set");
    for (int t = 0; t < 16; ++t) must(t < 8 ? shapes.rows[t] <= 16 && shapes.bytes[t] <= 64 : !shapes.rows[t] && !shapes.bytes[t], "a shape is too large");
    emulated_release();
    if (shapes.palette) emulated.shapes = shapes;
}

inline void emulated_storeconfig(void* to) { std::memcpy(to, &emulated.shapes, sizeof emulated.shapes); }

inline void emulated_load(int t, const void* from, int64_t stride) {
    const TileShapes& shapes = shapes_of(t);
    std::memset(emulated.data[t], 0, sizeof emulated.data[t]);
    for (int r = 0; r < shapes.rows[t]; ++r)
        std::memcpy(emulated.data[t][r], static_cast<const char*>(from) + r * stride, shapes.bytes[t]);
}

inline void emulated_store(int t, void* to, int64_t stride) {
    const TileShapes& shapes = shapes_of(t);
    for (int r = 0; r < shapes.rows[t]; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, emulated.data[t][r], shapes.bytes[t]);
}

// An fp32 number by its bits; a denormal is 0 of its sign.
inline float flushed(uint32_t bits) {
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline float flushed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return flushed(bits);
}

inline void emulated_dpbf16ps(int c, int a, int b) {
    const TileShapes& shapes = shapes_of(c);
    must(c != a && c != b && a != b, "one register twice");
    int rows = shapes.rows[c], columns = shapes.bytes[c] / 4, depth = shapes.bytes[a] / 4;
    must(shapes.rows[a] == rows && shapes.rows[b] == depth && shapes.bytes[b] == shapes.bytes[c], "shapes that do not fit");
    must(shapes.bytes[a] % 4 == 0 && shapes.bytes[c] % 4 == 0, "half a word");
    alignas(64) float low[16][16], high[16][16];  // b, in fp32
    for (int k = 0; k < depth; ++k)
        for (int n = 0; n < columns; ++n) {
            uint32_t word;
            std::memcpy(&word, emulated.data[b][k] + 4 * n, sizeof word);
            low[k][n] = flushed(word << 16), high[k][n] = flushed(word & 0xffff0000u);
        }
    for (int m = 0; m < rows; ++m) {
        alignas(64) float even[16] = {}, odd[16] = {}, sum[16];
        for (int k = 0; k < depth; ++k) {
            uint32_t word;
            std::memcpy(&word, emulated.data[a][m] + 4 * k, sizeof word);
            float first = flushed(word << 16), second = flushed(word & 0xffff0000u);
            for (int n = 0; n < columns; ++n) {
                even[n] = flushed(even[n] + flushed(first * low[k][n]));
                odd[n] = flushed(odd[n] + flushed(second * high[k][n]));
            }
        }
        std::memcpy(sum, emulated.data[c][m], sizeof sum);
        for (int n = 0; n < columns; ++n) sum[n] = flushed(flushed(sum[n]) + flushed(even[n] + odd[n]));
        std::memcpy(emulated.data[c][m], sum, shapes.bytes[c]);
    }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_storeconfig emulated_storeconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stream_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_dpbf16ps
