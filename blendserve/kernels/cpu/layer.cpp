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

struct NormForm {
    int64_t rounds_first;
    float eps, offset;
    int64_t threads;
    // Rows of x + add [rows, dim], normed; the sum is written to `sum` unless that is null.
    void apply(const elem_t* x, int64_t x_row, const elem_t* add, const elem_t* weight, elem_t* sum, elem_t* out, int64_t rows,
               int64_t dim) const {
        blendserve_add_rms_norm(x, add, weight, sum, out, x_row, dim, rows, dim, rounds_first, eps, offset, threads);
    }
};

// out [rows, outputs] = x [rows, inputs] * weights^T + bias; out is contiguous.
void linear(const elem_t* x, int64_t x_row, const elem_t* weights, const elem_t* bias, elem_t* out, int64_t rows,
            int64_t outputs, int64_t inputs, int64_t threads) {
    blendserve_linear(x, weights, bias, out, x_row, inputs, outputs, rows, outputs, inputs, threads);
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

void blendserve_layer_qkv(const LayerWeights* layer, const elem_t* hidden, const elem_t* cos, const elem_t* sin, elem_t* q,
                          elem_t* k, elem_t* v, elem_t* q_rotated, elem_t* k_rotated, int64_t hidden_row, int64_t rope_row,
                          int64_t rope_width, int64_t rows, int64_t dim, int64_t heads, int64_t kv_heads, int64_t head_dim,
                          int64_t rounds_first, float eps, float offset, int64_t threads) {
    NormForm norm{rounds_first, eps, offset, threads};
    Buffer normed(rows * dim);
    norm.apply(hidden, hidden_row, nullptr, layer->norm_before_attention, nullptr, normed, rows, dim);
    linear(normed, dim, layer->q, layer->q_bias, q, rows, heads * head_dim, dim, threads);
    linear(normed, dim, layer->k, layer->k_bias, k, rows, kv_heads * head_dim, dim, threads);
    linear(normed, dim, layer->v, layer->v_bias, v, rows, kv_heads * head_dim, dim, threads);
    if (layer->q_norm) norm.apply(q, head_dim, nullptr, layer->q_norm, nullptr, q, rows * heads, head_dim);
    if (layer->k_norm) norm.apply(k, head_dim, nullptr, layer->k_norm, nullptr, k, rows * kv_heads, head_dim);
    auto rotate = [&](const elem_t* x, elem_t* to, int64_t n) {
        KvSegment all{x, nullptr, head_dim, n * head_dim, 0, 0, 0, rows};
        blendserve_scatter_kv(&all, to, nullptr, cos, sin, rows * head_dim, head_dim, 0, 0, rope_row, 1, n, head_dim,
                              rope_width, threads);
    };
    if (!rope_width) return;
    rotate(q, q_rotated, heads);
    rotate(k, k_rotated, kv_heads);
}

void blendserve_layer_out(const LayerWeights* layer, const elem_t* hidden, const elem_t* attended, elem_t* out,
                          int64_t hidden_row, int64_t attended_row, int64_t rows, int64_t dim, int64_t attended_dim,
                          int64_t inner, int64_t rounds_first, float eps, float offset, float residual_scale,
                          int64_t threads) {
    NormForm norm{rounds_first, eps, offset, threads};
    Buffer added(rows * dim), sum(rows * dim), normed(rows * dim), gates(rows * inner), ups(rows * inner);
    linear(attended, attended_row, layer->o, layer->o_bias, added, rows, dim, attended_dim, threads);
    if (layer->norm_after_attention) norm.apply(added, dim, nullptr, layer->norm_after_attention, nullptr, added, rows, dim);
    if (residual_scale) scale_and_add(added, residual_scale, nullptr, added, rows, dim, threads);
    norm.apply(hidden, hidden_row, added, layer->norm_before_mlp, sum, normed, rows, dim);
    linear(normed, dim, layer->gate, layer->gate_bias, gates, rows, inner, dim, threads);
    linear(normed, dim, layer->up, layer->up_bias, ups, rows, inner, dim, threads);
    blendserve_silu_and_mul(gates, ups, gates, inner, inner, inner, rows, inner, threads);
    linear(gates, inner, layer->down, layer->down_bias, added, rows, dim, inner, threads);
    if (layer->norm_after_mlp) norm.apply(added, dim, nullptr, layer->norm_after_mlp, nullptr, added, rows, dim);
    scale_and_add(added, residual_scale, sum, out, rows, dim, threads);
}
