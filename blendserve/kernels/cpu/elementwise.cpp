// RMS norm and silu(gate) * up of rows: elementwise.h says what is computed.

#include "elementwise.h"

namespace {

constexpr int64_t MIN_PARALLEL = 1 << 15;  // numbers for which further threads are woken

}  // namespace

void blendserve_add_rms_norm(const NormArgs& args) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(args.threads)) if (args.rows * args.dim > MIN_PARALLEL)
    for (int64_t row = 0; row < args.rows; ++row) norm_row(args, row);
}

void blendserve_silu_and_mul(const SiluArgs& c) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(c.threads)) if (c.rows * c.width > MIN_PARALLEL)
    for (int64_t row = 0; row < c.rows; ++row) {
        const elem_t *gate = c.gate + row * c.gate_row, *up = c.up + row * c.up_row;
        elem_t* out = c.out + row * c.out_row;
        int64_t j = 0;
        for (; j + LANES <= c.width; j += LANES) store(out + j, silu_mul(load(gate + j), load(up + j)));
        Mask mask = tail_mask(c.width - j);
        if (j < c.width) store(out + j, mask, silu_mul(load(gate + j, mask), load(up + j, mask)));
    }
}
