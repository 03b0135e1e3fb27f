// The functions that Python calls, and their arguments. library.py reads the structs here.
//
// Strides are in elements; the innermost stride is 1. Each function runs on `threads` threads, and returns when it is done.
#pragma once

#include "simd.h"

// Attention by position: q and out of `rows` rows in group * kv_heads heads, over keys and values of kv_heads heads.
struct AttentionArgs {
    const elem_t *q, *keys, *values;  // [group * kv_heads, rows, dim], [kv_heads, T, dim] twice
    elem_t* out;                      // [rows, group * kv_heads, dim]
    const int64_t* positions;         // [rows], ascending
    const uint8_t* masked_keys;       // [T + 64] or null: not 0 = no row sees the key
    float* key_scores;  // [T] or null: sum over rows of (mean over heads of weight * |value|) squared
    const float* sinks;  // [group * kv_heads] or null: scores without keys
    int64_t q_head, q_row, k_head, k_row, v_head, v_row;
    int64_t rows, kv_heads, group, dim, window;  // window: 0 = none
    float scale, softcap;                        // softcap: 0 = none
    int64_t threads;
};

// Weights [outputs, inputs] of a linear layer.
struct Matrix {
    const void* data;
    int64_t form;  // 0 = rows of numbers, else strips of this type of ggml (strips.h)
};

// out = x weights^T + bias. Inputs and outputs are a whole number of words.
struct LinearArgs {
    const elem_t* x;     // [rows, inputs]
    Matrix weights;
    const elem_t* bias;  // [outputs] or null
    elem_t* out;         // [rows, outputs]
    const float* prepared;  // strips and few rows: x as PreparedRow; null = not yet
    int64_t x_row, w_row, out_row, rows, outputs, inputs;
    int64_t int8_rows;  // strips and few rows: whether x is rounded to int8
    int64_t threads;
};

// Blocks of a GGUF file -> strips.
struct PackArgs {
    const uint8_t* blocks;  // [outputs, blocks_row]
    char* strips;
    int64_t blocks_row, form, outputs, inputs, threads;
};

// Rows of strips -> numbers [n, inputs].
struct TakeArgs {
    Matrix weights;
    const int64_t* rows;
    elem_t* out;
    int64_t n, inputs, threads;
};

// sum = x + add, and its RMS norm times weight + offset -> out.
struct NormArgs {
    const elem_t *x, *add, *weight;  // [rows, dim], [rows, dim] or null, [dim]
    elem_t *sum, *out;               // [rows, dim], contiguous; sum may be null
    int64_t x_row, add_row, rows, dim, rounds_first;  // rounds_first: the normed row, before it is multiplied by the weight
    float eps, offset;
    int64_t threads;
};

// out = silu(gate) * up, or gelu(gate) * up.
struct GatedArgs {
    const elem_t *gate, *up;  // [rows, width]
    elem_t* out;              // [rows, width]; may be gate
    int64_t gate_row, up_row, out_row, rows, width, threads;
};

// Stored tokens that are contiguous in the prompt.
struct KvSegment {
    const elem_t *keys, *values;  // [heads, tokens, dim]; values may be null
    int64_t k_head, k_row, v_head, v_row;
    int64_t start, tokens;  // position of the first token
};

// Copies segments into a cache; keys are rotated.
struct ScatterArgs {
    const KvSegment* segments;
    elem_t *keys, *values;     // [heads, positions, dim]
    const elem_t *cos, *sin;  // [positions, rope_width]
    int64_t k_head, k_row, v_head, v_row, rope_row, n_segments, heads, dim, rope_width, threads;
};

// Corrects the keys (after RoPE) and values of reused tokens: correction.cpp.
struct CorrectionArgs {
    elem_t *keys, *values;                                 // [kv_heads, tokens, dim]
    const elem_t *fresh_keys, *fresh_values, *cos, *sin;   // of all rows of the pass; [tokens, rope_width]
    const int64_t *recomputed_row, *recomputed_index;      // of each recomputed token: its row in fresh, its place in keys
    const int64_t *first_recomputed, *reused_index, *first_reused;  // chunk c has tokens first[c] .. first[c + 1]
    const float *prior, *prior_constant, *context_weight;  // [kv_heads, 2 dim, 2 dim] and [kv_heads, 2 dim] or null; [chunks]
    int64_t k_head, k_row, v_head, v_row, fresh_k_head, fresh_k_row, fresh_v_head, fresh_v_row, rope_row;
    int64_t kv_heads, dim, rope_width, rows, chunks;  // rows: recomputed tokens
    float chunk_shrinkage, zero_shrinkage, key_scale, value_scale, penalty;  // penalty: < 0 = no regression
    float prior_shrinkage, prior_key_scale, prior_value_scale;
    int64_t threads;
};

// int8 symbols -> states, words from the end of room for tokens * axes, and escapes.
struct RansEncodeArgs {
    const int8_t* symbols;  // [tokens, axes]
    const uint8_t* contexts;
    const int32_t* means;
    const uint8_t* model_of;
    const uint32_t* encode_table;
    uint16_t* words;
    int8_t* escapes;
    uint32_t* states;  // [16]
    int64_t* counts;   // [2]: of words and of escapes
    int64_t tokens, axes;
};

// The inverse.
struct RansDecodeArgs {
    const uint8_t* words;  // [n_words] of 2 bytes, at any address
    const int8_t *escapes, *below;  // below: symbols [tokens, below_axes] of the layer below, or null
    const int32_t* means;
    const uint8_t* model_of;       // [9, 64]: context of the token, recent size of the axis -> model
    const uint32_t* decode_table;  // [64, 4096]: model and slot -> slots of its symbol, the slot's offset, the symbol: 15, 12
                                   // and 5 bits. One table, as a step waits for memory
    const uint16_t* cdf_head;      // [10, 64]: the first slots of symbols 1 to 10, by model
    const uint32_t* states;
    int8_t* symbols;
    int64_t n_words, n_escapes, tokens, axes, below_axes;
};

// Codes of the layer below and symbols -> numbers and codes.
struct DequantizeArgs {
    const int8_t *below, *symbols;    // [tokens, width], and [tokens, axes] or null
    const uint8_t *map, *residual;    // [outputs / 16, inputs / 4, 16, 4], 128 added
    const float *map_scale, *mean, *residual_scale, *code_scale, *code_zero;
    float* out;          // [heads, tokens, dim]; null where bf16_out is not
    uint16_t* bf16_out;
    int8_t* codes;       // [tokens, width]
    int64_t tokens, width, axes, dim;
};

// The weights of a decoder layer; null where its family has none. Matrices are contiguous.
struct LayerWeights {
    Matrix q, k, v, o, gate, up, down;
    const elem_t *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
    const elem_t *norm_before_attention, *q_norm, *k_norm, *norm_after_attention, *norm_before_mlp, *norm_after_mlp;
    const float* sinks;
    int64_t rope;    // index of its RopeTable; -1 = no RoPE
    int64_t window;  // 0 = none
    float scale;
    float softcap;  // 0 = none
};

// The first half of a layer, for any number of rows.
struct LayerQkvArgs {
    const LayerWeights* layer;
    const elem_t *hidden, *cos, *sin;  // [rows, dim], [rows, rope_width] twice
    elem_t *q, *k, *v;                 // [rows, heads or kv_heads, head_dim], before RoPE
    elem_t *q_rotated, *k_rotated;     // [heads or kv_heads, rows, head_dim]; not where rope_width is 0
    int64_t hidden_row, rope_row, rope_width, rows, dim, heads, kv_heads, head_dim, rounds_first;
    float eps, offset;
    int64_t threads;
};

// The second half: hidden and attention's output -> out.
struct LayerOutArgs {
    const LayerWeights* layer;
    const elem_t *hidden, *attended;  // [rows, dim], [rows, attended_dim]
    elem_t* out;                      // [rows, dim]
    int64_t hidden_row, attended_row, rows, dim, attended_dim, inner, rounds_first, gelu;  // gelu: of gates, in place of SiLU
    float eps, offset, residual_scale;
    int64_t threads;
};

// cos and sin of the rows of a decoding step.
struct RopeTable {
    const elem_t *cos, *sin;  // [rows, width], contiguous
    int64_t width;
};

// A row of a decoding step: its position, and its request's cache [layers, kv_heads, T, dim].
struct DecodeRow {
    elem_t *keys, *values;
    float query_scale;  // of rotated queries; 1 = none
    int64_t layer_stride, head_stride, row_stride, position;
};

// All layers and the output head for up to 8 rows of embedded tokens.
struct DecodeStepArgs {
    const LayerWeights* layers;
    const RopeTable* ropes;
    const DecodeRow* rows;
    const elem_t *hidden, *norm;  // [n_rows, dim]
    Matrix head;
    const elem_t* head_bias;
    elem_t* logits;  // [n_rows, vocabulary]
    int64_t n_layers, n_rows, dim, inner, heads, kv_heads, head_dim, vocabulary, rounds_first, gelu;
    float eps, offset, residual_scale;
    int64_t int8_rows, threads;
};

extern "C" {
void blendserve_attention(const AttentionArgs& args);
void blendserve_linear(const LinearArgs& args);
void blendserve_packed_linear(const LinearArgs& args);
void blendserve_pack(const PackArgs& args);
void blendserve_take(const TakeArgs& args);
void blendserve_add_rms_norm(const NormArgs& args);
void blendserve_silu_and_mul(const GatedArgs& args);
void blendserve_gelu_and_mul(const GatedArgs& args);
void blendserve_scatter_kv(const ScatterArgs& args);
void blendserve_correct_kv(const CorrectionArgs& args);
void blendserve_rans_encode(const RansEncodeArgs& args);
int64_t blendserve_rans_decode(const RansDecodeArgs& args);  // 1, or 0 for bytes that encode no such symbols
void blendserve_dequantize(const DequantizeArgs& args);
void blendserve_layer_qkv(const LayerQkvArgs& args);
void blendserve_layer_out(const LayerOutArgs& args);
void blendserve_decode_step(const DecodeStepArgs& args);
}
