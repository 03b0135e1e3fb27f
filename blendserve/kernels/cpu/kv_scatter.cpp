// Stored KV copied to its position in the prompt: keys are rotated as the model rotates them, values are copied.
// kernels/reference.py is the plain form.

#include "rope.h"

namespace {

constexpr int64_t BLOCK = 128;  // tokens of an item of work

void scatter(const ScatterArgs& c, const KvSegment& p, int64_t head, Range tokens) {
    RopeAngles rope{c.cos, c.sin, c.rope_row, c.rope_width};
    for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        int64_t position = p.start + i;
        apply_rope(rope, position, p.keys + head * p.k_head + i * p.k_row, c.keys + head * c.k_head + position * c.k_row, c.dim);
        if (p.values)
            std::memcpy(c.values + head * c.v_head + position * c.v_row, p.values + head * p.v_head + i * p.v_row,
                        c.dim * sizeof(elem_t));
    }
}

}  // namespace

void blendserve_scatter_kv(const ScatterArgs& c) {
    int64_t blocks = 0;  // of the longest segment
    for (int64_t n = 0; n < c.n_segments; ++n) blocks = std::max(blocks, divide_up(c.segments[n].tokens, BLOCK));
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(c.threads))
    for (int64_t item = 0; item < c.n_segments * c.heads * blocks; ++item) {
        const KvSegment& segment = c.segments[item / (c.heads * blocks)];
        int64_t begin = item % blocks * BLOCK;
        if (begin < segment.tokens)
            scatter(c, segment, item / blocks % c.heads, {begin, std::min(begin + BLOCK, segment.tokens)});
    }
}
