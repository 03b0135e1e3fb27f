// The two halves of a decoder layer around attention, for any number of rows: the other kernels, one after another. So the bits
// are those of the layer-by-layer loop. models/native.py binds a model's weights.

#include "common.h"

namespace {

// Uninitialised memory of one call.
class Buffer {
   public:
    explicit Buffer(int64_t n) : memory_(static_cast<elem_t*>(std::aligned_alloc(64, divide_up(n * sizeof(elem_t), 64) * 64))) {
        if (!memory_ && n) throw std::bad_alloc();
    }
    ~Buffer() { std::free(memory_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    operator elem_t*() const { return memory_; }

   private:
    elem_t* memory_;
};

// RMS norms of one form.
struct Norms {
    int64_t rounds_first;
    float eps, offset;
    int64_t threads;
    // Rows of x + add [rows, dim], normed; the sum is written to `sum` unless that is null.
    void apply(const elem_t* x, int64_t x_row, const elem_t* add, const elem_t* weight, elem_t* sum, elem_t* out, int64_t rows,
               int64_t dim) const {
        blendserve_add_rms_norm({x, add, weight, sum, out, x_row, dim, rows, dim, rounds_first, eps, offset, threads});
    }
};

// out [rows, outputs] = x [rows, inputs] * weights^T + bias; out is contiguous.
void linear(const elem_t* x, int64_t x_row, const elem_t* weights, const elem_t* bias, elem_t* out, int64_t rows,
            int64_t outputs, int64_t inputs, int64_t threads) {
    blendserve_linear({x, weights, bias, out, x_row, inputs, outputs, rows, outputs, inputs, threads});
}

// out = x * factor + add, [rows, dim] each, rounded after each step; add may be null.
void scale_and_add(const elem_t* x, float factor, const elem_t* add, elem_t* out, int64_t rows, int64_t dim, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (rows * dim > 1 << 15)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t j = row * dim; j < (row + 1) * dim; j += LANES) {
            Mask mask = tail_mask((row + 1) * dim - j);
            F32 y = factor ? round_to_elem(load(x + j, mask) * broadcast(factor)) : load(x + j, mask);
            store(out + j, mask, add ? load(add + j, mask) + y : y);
        }
}

}  // namespace

void blendserve_layer_qkv(const LayerQkvArgs& c) {
    const LayerWeights& w = *c.layer;
    Norms norms{c.rounds_first, c.eps, c.offset, c.threads};
    Buffer normed(c.rows * c.dim);
    norms.apply(c.hidden, c.hidden_row, nullptr, w.norm_before_attention, nullptr, normed, c.rows, c.dim);
    auto project = [&](const elem_t* weights, const elem_t* bias, const elem_t* norm, int64_t heads, elem_t* out, elem_t* rotated) {
        linear(normed, c.dim, weights, bias, out, c.rows, heads * c.head_dim, c.dim, c.threads);
        if (norm) norms.apply(out, c.head_dim, nullptr, norm, nullptr, out, c.rows * heads, c.head_dim);
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
    Norms norms{c.rounds_first, c.eps, c.offset, threads};
    Buffer added(rows * dim), sum(rows * dim), normed(rows * dim), gates(rows * inner), ups(rows * inner);
    linear(c.attended, c.attended_row, w.o, w.o_bias, added, rows, dim, c.attended_dim, threads);
    if (w.norm_after_attention) norms.apply(added, dim, nullptr, w.norm_after_attention, nullptr, added, rows, dim);
    if (c.residual_scale) scale_and_add(added, c.residual_scale, nullptr, added, rows, dim, threads);
    norms.apply(c.hidden, c.hidden_row, added, w.norm_before_mlp, sum, normed, rows, dim);
    linear(normed, dim, w.gate, w.gate_bias, gates, rows, inner, dim, threads);
    linear(normed, dim, w.up, w.up_bias, ups, rows, inner, dim, threads);
    blendserve_silu_and_mul({gates, ups, gates, inner, inner, inner, rows, inner, threads});
    linear(gates, inner, w.down, w.down_bias, added, rows, dim, inner, threads);
    if (w.norm_after_mlp) norms.apply(added, dim, nullptr, w.norm_after_mlp, nullptr, added, rows, dim);
    scale_and_add(added, c.residual_scale, sum, c.out, rows, dim, threads);
}
