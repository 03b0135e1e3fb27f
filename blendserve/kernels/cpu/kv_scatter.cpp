// Stored KV copied to its position in the prompt: keys are rotated as the model rotates them, values are copied.
// kernels/reference.py is the plain form.

#include "rope.h"

namespace {

constexpr int64_t BLOCK = 128;  // tokens of an item of work

struct ScatterArgs {
    elem_t *keys, *values;
    RopeAngles rope;
    int64_t k_head, k_row, v_head, v_row, dim;
};

void scatter(const ScatterArgs& c, const KvSegment& p, int64_t head, Range tokens) {
    for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        int64_t position = p.start + i;
        apply_rope(c.rope, position, p.keys + head * p.k_head + i * p.k_row,
                   c.keys + head * c.k_head + position * c.k_row, c.dim);
        if (p.values)
            std::memcpy(c.values + head * c.v_head + position * c.v_row, p.values + head * p.v_head + i * p.v_row,
                        c.dim * sizeof(elem_t));
    }
}

}  // namespace

void blendserve_scatter_kv(const KvSegment* segments, elem_t* keys, elem_t* values, const elem_t* cos, const elem_t* sin,
                           int64_t k_head, int64_t k_row, int64_t v_head, int64_t v_row, int64_t rope_row, int64_t n_segments,
                           int64_t heads, int64_t dim, int64_t rope_width, int64_t threads) {
    ScatterArgs args{keys, values, {cos, sin, rope_row, rope_width}, k_head, k_row, v_head, v_row, dim};
    int64_t blocks = 0;  // of the longest segment
    for (int64_t n = 0; n < n_segments; ++n) blocks = std::max(blocks, divide_up(segments[n].tokens, BLOCK));
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads))
    for (int64_t item = 0; item < n_segments * heads * blocks; ++item) {
        const KvSegment& segment = segments[item / (heads * blocks)];
        int64_t begin = item % blocks * BLOCK;
        if (begin < segment.tokens)
            scatter(args, segment, item / blocks % heads, {begin, std::min(begin + BLOCK, segment.tokens)});
    }
}
