// RMS norm of rows, called for by itself: norm.h says what is computed.

#include "norm.h"

extern "C" void blendserve_norm(const NormCall* call) {
    const NormCall& c = *call;
    constexpr int64_t WORTH = 1 << 15;  // numbers for which threads are woken
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(c.threads)) if (c.rows * c.dim > WORTH)
    for (int64_t row = 0; row < c.rows; ++row) norm_row(c, row);
}
