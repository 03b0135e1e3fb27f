// Stored KV put in its place in the prompt: keys turned as the model turns them, values copied. kernels/reference.py is the
// plain form.

#include "rope.h"

// Tokens that stand together. Strides are in elements; the innermost one is 1.
struct Piece {
    const Number *keys, *values;  // [heads, tokens, dim]; values may be null
    int64_t k_head, k_row, v_head, v_row;
    int64_t start, tokens;  // where the first one stands
};

// One call, as the caller fills it in.
struct PlaceCall {
    const Piece* pieces;
    Number *keys, *values;     // [heads, positions, dim]
    const Number *cos, *sin;  // [positions, width]
    int64_t k_head, k_row, v_head, v_row, turn_row;
    int64_t count, heads, dim, width;
    int64_t threads;
};

namespace {

constexpr int64_t BLOCK = 128;  // tokens of an item of work

void place(const PlaceCall& c, const Piece& p, int64_t head, Range tokens) {
    Turn turn{c.cos, c.sin, c.turn_row, c.width};
    for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        int64_t at = p.start + i;
        turn_as_torch(turn, at, p.keys + head * p.k_head + i * p.k_row, c.keys + head * c.k_head + at * c.k_row, c.dim);
        if (p.values)
            std::memcpy(c.values + head * c.v_head + at * c.v_row, p.values + head * p.v_head + i * p.v_row,
                        c.dim * sizeof(Number));
    }
}

}  // namespace

extern "C" void blendserve_place(const PlaceCall* call) {
    const PlaceCall& c = *call;
    int64_t blocks = 0;  // of the longest piece
    for (int64_t n = 0; n < c.count; ++n) blocks = std::max(blocks, divide_up(c.pieces[n].tokens, BLOCK));
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(c.threads))
    for (int64_t item = 0; item < c.count * c.heads * blocks; ++item) {
        const Piece& piece = c.pieces[item / (c.heads * blocks)];
        int64_t begin = item % blocks * BLOCK;
        if (begin < piece.tokens)
            place(c, piece, item / blocks % c.heads, {begin, std::min(begin + BLOCK, piece.tokens)});
    }
}
