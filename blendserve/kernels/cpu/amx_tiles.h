// Matrix tiles (AMX) of a thread: 8 registers of up to 16 rows of 64 bytes, and sums of products of bf16 over them.
//
// These kernels ran on a CPU with tiles as a prototype only; later versions ran in emulation (tests/kernels/cpu). They
// serve only where selfcheck.py finds them right.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

// What was written before is in memory for the tile loads behind this: compilers do not know that those read it.
inline void compiler_fence() { __asm__ volatile("" ::: "memory"); }

inline void zero_accumulators() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// As long as it lives, all of the thread's tiles have 16 rows of 64 bytes; then the thread has what it had before. Linux gives a
// process tiles when it asks once (isa.py), threads then have them without asking. torch's libraries use them, too, in the same
// threads, and take their configuration for what they left it.
class TileScope {
   public:
    TileScope() {
        _tile_storeconfig(before_);
        compiler_fence();
        _tile_loadconfig(mine);
    }
    ~TileScope() {
        compiler_fence();
        if (before_[0])
            _tile_loadconfig(before_);
        else
            _tile_release();
    }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;

   private:
    // Bytes, by Intel's layout: palette, first row, 14 reserved, 16 of 2: bytes of a row, 16: rows. Constant, as compilers know of
    // the first 8 alone that they are read.
    alignas(64) static constexpr uint8_t mine[64] = {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,      //
                                                     64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  //
                                                     0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,      //
                                                     16, 16, 16, 16, 16, 16, 16, 16};
    alignas(64) uint8_t before_[64];
};

}  // namespace
