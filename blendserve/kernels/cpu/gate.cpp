// silu(gate) * up of rows, called for by itself: gate.h says what is computed.

#include "gate.h"

// One call, as the caller fills it in. Strides are in elements; the innermost one is 1.
struct GateCall {
    const Number *gate, *up;  // [rows, width]
    Number* out;              // [rows, width]; may be gate
    int64_t gate_row, up_row, out_row, rows, width;
    int64_t threads;
};

extern "C" void blendserve_gate(const GateCall* call) {
    const GateCall& c = *call;
    constexpr int64_t WORTH = 1 << 15;  // numbers for which threads are woken
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(c.threads)) if (c.rows * c.width > WORTH)
    for (int64_t row = 0; row < c.rows; ++row) {
        const Number *gate = c.gate + row * c.gate_row, *up = c.up + row * c.up_row;
        Number* out = c.out + row * c.out_row;
        int64_t j = 0;
        for (; j + LANES <= c.width; j += LANES) store(out + j, gated(load(gate + j), load(up + j)));
        Mask there = first(c.width - j);
        if (j < c.width) store(out + j, there, gated(load(gate + j, there), load(up + j, there)));
    }
}
