// The functions that Python calls. bindings.py has the types of each as a string; a test compares both.
//
// Strides are in elements; the innermost stride is 1. Each function runs on `threads` threads, and returns when it is done.
#pragma once

#include "simd.h"

// Stored tokens that are contiguous in the prompt.
struct KvSegment {
    const elem_t *keys, *values;  // [heads, tokens, dim]; values may be null
    int64_t k_head, k_row, v_head, v_row;
    int64_t start, tokens;  // position of the first token
};

// The weights of a decoder layer; null where its family has none. Matrices are [outputs, inputs], contiguous, or all int8.
struct LayerWeights {
    const elem_t *norm_before_attention, *q, *q_bias, *k, *k_bias, *v, *v_bias, *q_norm, *k_norm;
    const elem_t *o, *o_bias, *norm_after_attention;
    const elem_t *norm_before_mlp, *gate, *gate_bias, *up, *up_bias, *down, *down_bias, *norm_after_mlp;
    int64_t rope;    // index of its RopeTable; -1 = no RoPE
    int64_t window;  // 0 = none
    float scale;
    float softcap;  // 0 = none
};

// cos and sin of the rows of a decoding step.
struct RopeTable {
    const elem_t *cos, *sin;  // [rows, width], contiguous
    int64_t width;
};

// A row of a decoding step: its position, and its request's cache [layers, kv_heads, T, dim].
struct DecodeRow {
    elem_t *keys, *values;
    int64_t layer_stride, head_stride, row_stride, position;
};

extern "C" {

// Attention by position. q [group * kv_heads, rows, dim], keys and values [kv_heads, T, dim] -> out [rows, heads, dim].
// positions [rows], ascending. masked_keys [T + 64]: not 0 = no row sees the key; or null. key_scores [T] or null: sum over
// rows of (mean over heads of weight * |value|) squared. window and softcap: 0 = none.
void blendserve_attention(const elem_t* q, const elem_t* keys, const elem_t* values, elem_t* out, const int64_t* positions,
                          const uint8_t* masked_keys, float* key_scores, int64_t q_head, int64_t q_row, int64_t k_head,
                          int64_t k_row, int64_t v_head, int64_t v_row, int64_t rows, int64_t kv_heads, int64_t group,
                          int64_t dim, int64_t window, float scale, float softcap, int64_t threads);

// out [rows, outputs] = x [rows, inputs] * weights [outputs, inputs]^T + bias [outputs], which may be null. Inputs and outputs
// are a whole number of words.
void blendserve_linear(const elem_t* x, const elem_t* weights, const elem_t* bias, elem_t* out, int64_t x_row, int64_t w_row,
                       int64_t out_row, int64_t rows, int64_t outputs, int64_t inputs, int64_t threads);

// sum = x + add [rows, dim], and its RMS norm times weight + offset [dim] -> out. add and sum may be null; sum and out are
// contiguous. rounds_first: the normed row is rounded before it is multiplied by the weight.
void blendserve_add_rms_norm(const elem_t* x, const elem_t* add, const elem_t* weight, elem_t* sum, elem_t* out, int64_t x_row,
                             int64_t add_row, int64_t rows, int64_t dim, int64_t rounds_first, float eps, float offset,
                             int64_t threads);

// out = silu(gate) * up, all [rows, width]; out may be gate.
void blendserve_silu_and_mul(const elem_t* gate, const elem_t* up, elem_t* out, int64_t gate_row, int64_t up_row,
                             int64_t out_row, int64_t rows, int64_t width, int64_t threads);

// Copies segments into keys and values [heads, positions, dim]; keys are rotated by cos and sin [positions, rope_width].
void blendserve_scatter_kv(const KvSegment* segments, elem_t* keys, elem_t* values, const elem_t* cos, const elem_t* sin,
                           int64_t k_head, int64_t k_row, int64_t v_head, int64_t v_row, int64_t rope_row, int64_t n_segments,
                           int64_t heads, int64_t dim, int64_t rope_width, int64_t threads);

// Corrects the keys (after RoPE) and values [kv_heads, tokens, dim] of reused tokens: correction.cpp. Row i of the recomputed
// tokens is row recomputed_row[i] of fresh keys and values, and recomputed_index[i] of the cache. Chunk c has recomputed
// tokens first_recomputed[c] .. first_recomputed[c + 1], and reused ones likewise. prior [kv_heads, 2 dim, 2 dim] and its
// constant may be null. penalty < 0: no regression.
void blendserve_correct_kv(elem_t* keys, elem_t* values, const elem_t* fresh_keys, const elem_t* fresh_values,
                           const elem_t* cos, const elem_t* sin, const int64_t* recomputed_row,
                           const int64_t* recomputed_index, const int64_t* first_recomputed, const int64_t* reused_index,
                           const int64_t* first_reused, const float* prior, const float* prior_constant,
                           const float* context_weight, int64_t k_head, int64_t k_row, int64_t v_head, int64_t v_row,
                           int64_t fresh_k_head, int64_t fresh_k_row, int64_t fresh_v_head, int64_t fresh_v_row,
                           int64_t rope_row, int64_t kv_heads, int64_t dim, int64_t rope_width, int64_t rows, int64_t chunks,
                           float chunk_shrinkage, float zero_shrinkage, float key_scale, float value_scale, float penalty,
                           float prior_shrinkage, float prior_key_scale, float prior_value_scale, int64_t threads);

// int8 symbols [tokens, axes] -> states [16], words from the end of room for tokens * axes, and escapes; the numbers of words
// and escapes -> counts [2].
void blendserve_rans_encode(const int8_t* symbols, const uint8_t* contexts, const int32_t* means, const uint8_t* model_of,
                            const uint32_t* encode_table, uint16_t* words, int8_t* escapes, uint32_t* states, int64_t* counts,
                            int64_t tokens, int64_t axes);

// The inverse -> 1, or 0 for bytes that encode no such symbols. below: symbols [tokens, below_axes] of the layer below, or null.
int64_t blendserve_rans_decode(const uint8_t* words, const int8_t* escapes, const int8_t* below, const int32_t* means,
                               const uint8_t* model_of, const uint32_t* decode_table, const uint16_t* cdf_head,
                               const uint32_t* states, int8_t* symbols, int64_t n_words, int64_t n_escapes, int64_t tokens,
                               int64_t axes, int64_t below_axes);

// Codes of the layer below [tokens, width] and symbols [tokens, axes], or null, -> numbers [heads, tokens, dim] in fp32 or in
// bf16, the other null, and codes [tokens, width]. map and residual: [outputs / 16, inputs / 4, 16, 4] of uint8, 128 added.
void blendserve_dequantize(const int8_t* below, const int8_t* symbols, const uint8_t* map, const uint8_t* residual,
                           const float* map_scale, const float* mean, const float* residual_scale, const float* code_scale,
                           const float* code_zero, float* out, uint16_t* bf16_out, int8_t* codes, int64_t tokens,
                           int64_t width, int64_t axes, int64_t dim);

// The first half of a layer: hidden [rows, dim] -> q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim] before RoPE,
// and after it q_rotated [heads, rows, head_dim] and k_rotated [kv_heads, rows, head_dim] (not where rope_width is 0).
void blendserve_layer_qkv(const LayerWeights* layer, const elem_t* hidden, const elem_t* cos, const elem_t* sin, elem_t* q,
                          elem_t* k, elem_t* v, elem_t* q_rotated, elem_t* k_rotated, int64_t hidden_row, int64_t rope_row,
                          int64_t rope_width, int64_t rows, int64_t dim, int64_t heads, int64_t kv_heads, int64_t head_dim,
                          int64_t rounds_first, float eps, float offset, int64_t threads);

// The second half: hidden [rows, dim] and attention's output [rows, heads * head_dim] -> out [rows, dim].
void blendserve_layer_out(const LayerWeights* layer, const elem_t* hidden, const elem_t* attended, elem_t* out,
                          int64_t hidden_row, int64_t attended_row, int64_t rows, int64_t dim, int64_t attended_dim,
                          int64_t inner, int64_t rounds_first, float eps, float offset, float residual_scale,
                          int64_t threads);

// All layers and the output head for up to 8 rows: embedded tokens hidden [rows, dim] -> logits [rows, vocabulary].
void blendserve_decode_step(const LayerWeights* layers, const RopeTable* ropes, const DecodeRow* rows, const elem_t* hidden,
                            const elem_t* norm, const elem_t* head, const elem_t* head_bias, elem_t* logits, int64_t n_layers,
                            int64_t n_rows, int64_t dim, int64_t inner, int64_t heads, int64_t kv_heads, int64_t head_dim,
                            int64_t vocabulary, int64_t rounds_first, float eps, float offset, float residual_scale,
                            int64_t is_int8, int64_t threads);
}
