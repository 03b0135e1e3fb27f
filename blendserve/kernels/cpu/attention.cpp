// Attention by position in vectors: attention.h says what is computed.

#include "attention_vectors.h"

void blendserve_attention(const AttentionArgs& args) {
    if (!args.rows) return;
    int64_t items = divide_up(tiles_per_head(args), TILES) * args.kv_heads;
    if (args.key_scores || (args.threads > 1 && items < 4 * args.threads))
        SplitKv(args).run();
    else
        attend_packed(args);
}
