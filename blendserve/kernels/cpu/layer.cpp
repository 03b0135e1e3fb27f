// Norms, activations and RoPE of rows, stored KV copied to its position in the prompt, and the two halves of a decoder layer
// around attention: these kernels and linear layers, one after another. So a half has the bits of the layer-by-layer loop.
// models/native.py binds a model's weights.

#include "elementwise.h"

namespace {

constexpr int64_t MIN_PARALLEL = 1 << 15;  // numbers for which further threads are woken
constexpr int64_t BLOCK = 128;             // tokens of an item of work

// Rows of x + add [rows, dim], normed in the form of half a layer; the sum is written to `sum` unless that is null.
template <class Half>
void norm(const Half& c, const elem_t* x, int64_t x_row, const elem_t* add, const elem_t* weight, elem_t* sum,
          elem_t* out, int64_t rows, int64_t dim) {
    blendserve_add_rms_norm({x, add, weight, sum, out, x_row, dim, rows, dim, c.rounds_first, c.eps, c.offset,
                             c.threads});
}

// out [rows, outputs] = x [rows, inputs] * weights^T + bias; out is contiguous.
void linear(const elem_t* x, int64_t x_row, Matrix weights, const elem_t* bias, elem_t* out, int64_t rows,
            int64_t outputs, int64_t inputs, int64_t threads) {
    blendserve_linear({x, weights, bias, out, nullptr, x_row, inputs, outputs, rows, outputs, inputs, 0, threads});
}

// The same of rows; all are contiguous.
void scale_and_add(const elem_t* x, float factor, const elem_t* add, elem_t* out, int64_t rows, int64_t dim, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (rows * dim > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; ++row)
        scale_and_add(x + row * dim, factor, add ? add + row * dim : nullptr, out + row * dim, dim);
}

template <F32 gate_mul(F32 gate, F32 up)>
void gate_and_mul(const GatedArgs& c) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(c.threads)) if (c.rows * c.width > MIN_PARALLEL)
    for (int64_t row = 0; row < c.rows; ++row) {
        const elem_t *gate = c.gate + row * c.gate_row, *up = c.up + row * c.up_row;
        elem_t* out = c.out + row * c.out_row;
        int64_t j = 0;
        for (; j + LANES <= c.width; j += LANES) store(out + j, gate_mul(load(gate + j), load(up + j)));
        Mask mask = tail_mask(c.width - j);
        if (j < c.width) store(out + j, mask, gate_mul(load(gate + j, mask), load(up + j, mask)));
    }
}

}  // namespace

void blendserve_add_rms_norm(const NormArgs& args) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(args.threads)) if (args.rows * args.dim > MIN_PARALLEL)
    for (int64_t row = 0; row < args.rows; ++row) norm_row(args, row);
}

void blendserve_silu_and_mul(const GatedArgs& args) { gate_and_mul<silu_mul>(args); }
void blendserve_gelu_and_mul(const GatedArgs& args) { gate_and_mul<gelu_mul>(args); }

void blendserve_scatter_kv(const ScatterArgs& c) {
    int64_t blocks = 0;  // of the longest segment
    for (int64_t n = 0; n < c.n_segments; ++n) blocks = std::max(blocks, divide_up(c.segments[n].tokens, BLOCK));
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(c.threads))
    for (int64_t item = 0; item < c.n_segments * c.heads * blocks; ++item) {
        const KvSegment& p = c.segments[item / (c.heads * blocks)];
        RopeAngles rope{c.cos, c.sin, c.rope_row, c.rope_width};
        int64_t head = item / blocks % c.heads, begin = item % blocks * BLOCK, end = std::min(begin + BLOCK, p.tokens);
        for (int64_t i = begin; i < end; ++i) {
            int64_t position = p.start + i;
            elem_t* to = c.keys + head * c.k_head + position * c.k_row;
            apply_rope(rope, position, p.keys + head * p.k_head + i * p.k_row, to, c.dim);
            if (p.values)
                std::memcpy(c.values + head * c.v_head + position * c.v_row, p.values + head * p.v_head + i * p.v_row,
                            c.dim * sizeof(elem_t));
        }
    }
}

void blendserve_layer_qkv(const LayerQkvArgs& c) {
    const LayerWeights& w = *c.layer;
    Workspace memory;
    auto* normed = memory.take<elem_t>(c.rows * c.dim);
    norm(c, c.hidden, c.hidden_row, nullptr, w.norm_before_attention, nullptr, normed, c.rows, c.dim);
    auto project = [&](Matrix weights, const elem_t* bias, const elem_t* head_norm, int64_t heads, elem_t* out,
                       elem_t* rotated) {
        linear(normed, c.dim, weights, bias, out, c.rows, heads * c.head_dim, c.dim, c.threads);
        if (head_norm) norm(c, out, c.head_dim, nullptr, head_norm, nullptr, out, c.rows * heads, c.head_dim);
        if (!rotated || !c.rope_width) return;
        KvSegment all{out, nullptr, c.head_dim, heads * c.head_dim, 0, 0, 0, c.rows};
        blendserve_scatter_kv({&all, rotated, nullptr, c.cos, c.sin, c.rows * c.head_dim, c.head_dim, 0, 0, c.rope_row, 1, heads,
                               c.head_dim, c.rope_width, c.threads});
    };
    project(w.q, w.q_bias, w.q_norm, c.heads, c.q, c.q_rotated);
    project(w.k, w.k_bias, w.k_norm, c.kv_heads, c.k, c.k_rotated);
    project(w.v, w.v_bias, nullptr, c.kv_heads, c.v, nullptr);
}

void blendserve_layer_out(const LayerOutArgs& c) {
    const LayerWeights& w = *c.layer;
    int64_t rows = c.rows, dim = c.dim, inner = c.inner, threads = c.threads;
    Workspace memory;
    auto* added = memory.take<elem_t>(rows * (3 * dim + 2 * inner));
    elem_t *sum = added + rows * dim, *normed = sum + rows * dim, *gates = normed + rows * dim, *ups = gates + rows * inner;
    linear(c.attended, c.attended_row, w.o, w.o_bias, added, rows, dim, c.attended_dim, threads);
    if (w.norm_after_attention) norm(c, added, dim, nullptr, w.norm_after_attention, nullptr, added, rows, dim);
    if (c.residual_scale) scale_and_add(added, c.residual_scale, nullptr, added, rows, dim, threads);
    norm(c, c.hidden, c.hidden_row, added, w.norm_before_mlp, sum, normed, rows, dim);
    linear(normed, dim, w.gate, w.gate_bias, gates, rows, inner, dim, threads);
    linear(normed, dim, w.up, w.up_bias, ups, rows, inner, dim, threads);
    (c.gelu ? gate_and_mul<gelu_mul> : gate_and_mul<silu_mul>)({gates, ups, gates, inner, inner, inner, rows, inner, threads});
    linear(gates, inner, w.down, w.down_bias, added, rows, dim, inner, threads);
    if (w.norm_after_mlp) norm(c, added, dim, nullptr, w.norm_after_mlp, nullptr, added, rows, dim);
    scale_and_add(added, c.residual_scale, sum, c.out, rows, dim, threads);
}
