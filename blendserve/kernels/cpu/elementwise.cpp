// RMS norm and silu(gate) * up of rows: elementwise.h says what is computed.

#include "elementwise.h"

namespace {

constexpr int64_t MIN_PARALLEL = 1 << 15;  // numbers for which further threads are woken

}  // namespace

void blendserve_add_rms_norm(const elem_t* x, const elem_t* add, const elem_t* weight, elem_t* sum, elem_t* out, int64_t x_row,
                             int64_t add_row, int64_t rows, int64_t dim, int64_t rounds_first, float eps, float offset,
                             int64_t threads) {
    NormArgs args{x, add, weight, sum, out, x_row, add_row, rows, dim, rounds_first, eps, offset};
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (rows * dim > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; ++row) norm_row(args, row);
}

void blendserve_silu_and_mul(const elem_t* gates, const elem_t* ups, elem_t* outs, int64_t gate_row, int64_t up_row,
                             int64_t out_row, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (rows * width > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; ++row) {
        const elem_t *gate = gates + row * gate_row, *up = ups + row * up_row;
        elem_t* out = outs + row * out_row;
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) store(out + j, silu_mul(load(gate + j), load(up + j)));
        Mask mask = tail_mask(width - j);
        if (j < width) store(out + j, mask, silu_mul(load(gate + j, mask), load(up + j, mask)));
    }
}
