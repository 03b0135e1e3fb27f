// Attention by position in vectors: attention.h says what is computed.

#include "attention_vectors.h"

void blendserve_attention(const elem_t* q, const elem_t* keys, const elem_t* values, elem_t* out, const int64_t* positions,
                          const uint8_t* masked_keys, float* key_scores, int64_t q_head, int64_t q_row, int64_t k_head,
                          int64_t k_row, int64_t v_head, int64_t v_row, int64_t rows, int64_t kv_heads, int64_t group,
                          int64_t dim, int64_t window, float scale, float softcap, int64_t threads) {
    AttentionArgs args{q, keys, values, out, positions, masked_keys, key_scores, q_head, q_row, k_head, k_row, v_head, v_row, rows,
                       kv_heads, group, dim, window, scale, softcap, threads};
    if (!rows) return;
    int64_t items = divide_up(tiles_per_head(args), TILES) * kv_heads;
    if (key_scores || (threads > 1 && items < 4 * threads))
        SplitKv(args).run();
    else
        SharedKvPack(args).run();
}
