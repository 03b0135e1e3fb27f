// One decoding step: up to 8 rows, of one request or of several, through all layers and the output head in one call.
//
//     for each layer   1 norm, q k v, head norms, RoPE, KV into the caches      an item is a head
//                      2 attention                                              a row, a kv head and a block of its keys
//                      3 the blocks joined                                      a row and a kv head
//                      4 o                                                      some outputs
//                      5 residual, norm, silu(gate) * up                        some outputs
//                      6 down                                                   some outputs
//     and at the end   residual, norm, output head                              some outputs
//
// It calls the inner loops of the other kernels and rounds where they do: logits and KV are those of the layer-by-layer
// loop, to the bit. A row's numbers depend neither on the other rows nor on the number of threads.
//
// Threads claim the items of a stage one by one, and a stage ends when all of its items are done: nobody waits for a thread
// that has not begun. Norms are cheap, so each thread computes those that its items need by itself.

#include <sched.h>

#include <vector>

#include "attend_vectors.h"
#include "gate.h"
#include "int8_rows.h"
#include "norm.h"
#include "rope.h"

// The weights of a layer, as the model stores them; null where its family has none. Matrices are [outs, depth], contiguous,
// or all of int8.
struct DecodeLayer {
    const Number *norm_before_attention, *q, *q_bias, *k, *k_bias, *v, *v_bias, *q_norm, *k_norm;
    const Number *o, *o_bias, *norm_after_attention;
    const Number *norm_before_mlp, *gate, *gate_bias, *up, *up_bias, *down, *down_bias, *norm_after_mlp;
    int64_t rope;    // which of the call's tables; -1 = no RoPE
    int64_t window;  // 0 = none
    float scale;
    float softcap;  // 0 = none
};

// Angles of the call's rows.
struct RopeTable {
    const Number *cos, *sin;  // [rows, width], contiguous
    int64_t width;
};

// A token on its way in: its position and its request's cache [layers, kv, T, dim], with the same strides for both.
struct DecodeRow {
    Number *keys, *values;
    int64_t layer_stride, head_stride, row_stride, at;
};

struct DecodeCall {
    const DecodeLayer* layers;
    const RopeTable* ropes;
    const DecodeRow* rows;
    const Number* hidden;              // [rows, dim]: embedded tokens
    const Number *norm, *head, *head_bias;
    Number* logits;                    // [rows, vocabulary]
    int64_t n_layers, n_rows, dim, inner, heads, kv, head_dim, vocabulary;
    int64_t rounds_first;              // as in NormCall
    float eps, offset;                 // of all norms
    float residual_scale;              // 0 = none
    int64_t is_int8;                   // all matrices are as int8_rows.h says
    int64_t threads;
};

namespace {

constexpr int64_t ITEM_BYTES = 1 << 16;  // of weights: a few microseconds

inline int64_t padded(int64_t n) { return divide_up(n, 64) * 64; }

// Claims and ends of the items of one stage.
struct alignas(64) Stage {
    std::atomic<int64_t> claimed{0};
    alignas(64) std::atomic<int64_t> done{0};
};

// Numbers that all threads of a step read and write.
struct Shared {
    std::vector<Number> residual[2], q, attended, added, activated;
    explicit Shared(const DecodeCall& c)
        : q(c.n_rows * c.heads * c.head_dim), attended(q.size()), added(c.n_rows * c.dim), activated(c.n_rows * c.inner) {
        for (auto& one : residual) one.resize(c.n_rows * c.dim);
    }
};

class Worker {
   public:
    Worker(const DecodeCall& call, Shared& shared_numbers, Stage* all_stages, char* attention_memory)
        : c(call), s(shared_numbers), stages(all_stages), states(attention_memory),
          normed(c.n_rows * c.dim), total(normed.size()), scaled_added(normed.size()), head(2 * c.n_rows * c.head_dim),
          both(2 * c.n_rows * LANES) {}

    void run() {
        const Number* residual = c.hidden;
        int to = 0;
        const Number* after = nullptr;  // the norm behind the MLP of the layer below
        for (int64_t l = 0; l < c.n_layers; ++l) {
            const DecodeLayer& layer = c.layers[l];
            Number* next = s.residual[to].data();
            begin_norm(residual, l ? s.added.data() : nullptr, after, layer.norm_before_attention, next);
            stage(c.heads + 2 * c.kv, [&](int64_t i, int64_t) { project(l, i); });
            attend(l);
            residual = next;
            outputs(layer.o, layer.o_bias, s.attended.data(), c.heads * c.head_dim, s.added.data(), c.dim);
            to = 1 - to;
            next = s.residual[to].data();
            begin_norm(residual, s.added.data(), layer.norm_after_attention, layer.norm_before_mlp, next);
            feed(layer);
            residual = next;
            to = 1 - to;
            outputs(layer.down, layer.down_bias, s.activated.data(), c.inner, s.added.data(), c.dim);
            after = layer.norm_after_mlp;
        }
        begin_norm(residual, s.added.data(), after, c.norm, s.residual[to].data());
        outputs(c.head, c.head_bias, nullptr, c.dim, c.logits, c.vocabulary);
    }

   private:
    // Items 0 .. n - 1, shared out; returns when all of them are done, by whichever thread.
    template <class Item>
    void stage(int64_t n, Item item) {
        Stage& mine = stages[passed++];
        int64_t finished = 0;
        for (int64_t i = mine.claimed.fetch_add(1, std::memory_order_relaxed), next; i < n; i = next) {
            next = mine.claimed.fetch_add(1, std::memory_order_relaxed);
            item(i, next);
            ++finished;
        }
        if (finished) mine.done.fetch_add(finished, std::memory_order_release);
        for (int spins = 0; mine.done.load(std::memory_order_acquire) < n; ++spins) {
            if (spins < 2000)
                _mm_pause();
            else
                sched_yield();  // the thread that is waited for may need this core
        }
    }

    // What the next stage's items need normed: residual + (added, normed itself and scaled where the family does so).
    void begin_norm(const Number* residual, const Number* added, const Number* after, const Number* weight, Number* keep) {
        pending = {residual, added, after, weight, keep};
        is_normed = false;
    }

    // Rows normed, once a stage and thread; whoever has the stage's first item writes down the new residual.
    const Number* norm(int64_t item) {
        if (!is_normed) {
            const Number* added = pending.added;
            if (added && pending.after) {
                norm_rows(added, nullptr, pending.after, nullptr, scaled_added.data());
                added = scaled_added.data();
            }
            if (added && c.residual_scale) {
                for (size_t j = 0; j < scaled_added.size(); j += LANES) {
                    Mask there = first(scaled_added.size() - j);
                    store(scaled_added.data() + j, there, load(added + j, there) * all(c.residual_scale));
                }
                added = scaled_added.data();
            }
            norm_rows(pending.residual, added, pending.weight, total.data(), normed.data());
            is_normed = true;
        }
        if (item == 0) std::memcpy(pending.keep, total.data(), sizeof(Number) * total.size());
        return normed.data();
    }

    void norm_rows(const Number* x, const Number* add, const Number* weight, Number* sum, Number* out) const {
        NormCall call{x, add, weight, sum, out, c.dim, c.dim, c.n_rows, c.dim, c.rounds_first, c.eps, c.offset, 1};
        for (int64_t row = 0; row < c.n_rows; ++row) norm_row(call, row);
    }

    LinearCall linear(const Number* x, int64_t x_row, const Number* w, const Number* bias, Number* out, int64_t out_row,
                      int64_t outs, int64_t depth) const {
        return {x, w, bias, out, x_row, depth, out_row, c.n_rows, outs, depth, 1};
    }
    void run(const LinearCall& call, int64_t o) const { (c.is_int8 ? fews_int8 : fews)[c.n_rows](call, o); }

    // A matrix from output o on, a multiple of LANES.
    const Number* from_output(const Number* w, int64_t o, int64_t depth) const {
        if (!c.is_int8) return w + o * depth;
        return reinterpret_cast<const Number*>(reinterpret_cast<const char*>(w) + int8_bytes(o, depth));
    }

    // A head of queries, keys or values.
    void project(int64_t l, int64_t i) {
        const DecodeLayer& layer = c.layers[l];
        const Number* x = norm(i);
        int64_t dim = c.head_dim, kind = i < c.heads ? 0 : i < c.heads + c.kv ? 1 : 2;
        int64_t h = i - (kind ? c.heads : 0) - (kind == 2 ? c.kv : 0);
        const Number* weights[] = {layer.q, layer.k, layer.v};
        const Number* biases[] = {layer.q_bias, layer.k_bias, layer.v_bias};
        const Number* norms[] = {layer.q_norm, layer.k_norm, nullptr};
        const Number* bias = biases[kind] ? biases[kind] + h * dim : nullptr;
        Number *out = head.data(), *other = out + c.n_rows * dim;
        LinearCall call = linear(x, c.dim, from_output(weights[kind], h * dim, c.dim), bias, out, dim, dim, c.dim);
        for (int64_t o = 0; o < dim; o += LANES) run(call, o);
        if (norms[kind]) {
            NormCall each{out, nullptr, norms[kind], nullptr, other, dim, 0, c.n_rows, dim, c.rounds_first, c.eps, c.offset, 1};
            for (int64_t row = 0; row < c.n_rows; ++row) norm_row(each, row);
            std::swap(out, other);
        }
        const RopeTable* rope = layer.rope < 0 ? nullptr : c.ropes + layer.rope;
        for (int64_t r = 0; r < c.n_rows; ++r) {
            const DecodeRow& row = c.rows[r];
            int64_t place = l * row.layer_stride + h * row.head_stride + row.at * row.row_stride;
            Number* to = kind == 0 ? s.q.data() + (r * c.heads + h) * dim : (kind == 1 ? row.keys : row.values) + place;
            if (kind < 2 && rope)
                turn_as_torch({rope->cos, rope->sin, rope->width, rope->width}, r, out + r * dim, to, dim);
            else
                std::memcpy(to, out + r * dim, sizeof(Number) * dim);
        }
    }

    Call attention(int64_t l, int64_t r) const {
        const DecodeLayer& layer = c.layers[l];
        const DecodeRow& row = c.rows[r];
        int64_t size = c.heads * c.head_dim, stride = row.head_stride;
        return {s.q.data() + r * size, row.keys + l * row.layer_stride, row.values + l * row.layer_stride,
                s.attended.data() + r * size, &row.at, c.head_dim, size, stride, row.row_stride, stride, row.row_stride,
                1, c.kv, c.heads / c.kv, c.head_dim, layer.window, layer.scale, layer.softcap, 1, nullptr, nullptr};
    }

    void attend(int64_t l) {
        Call calls[FEW];
        alignas(ByKeys) char room[FEW * sizeof(ByKeys)];
        auto* rows = reinterpret_cast<ByKeys*>(room);
        int64_t looks[FEW + 1] = {0}, finishes[FEW + 1] = {0};
        size_t used = 0;
        for (int64_t r = 0; r < c.n_rows; ++r) {
            calls[r] = attention(l, r);
            new (rows + r) ByKeys(calls[r]);
            rows[r].use(states + used);
            used += rows[r].bytes();
            looks[r + 1] = looks[r] + rows[r].looks();
            finishes[r + 1] = finishes[r] + rows[r].finishes();
        }
        auto row_of = [&](const int64_t* ends, int64_t item) {
            int64_t r = 0;
            while (item >= ends[r + 1]) ++r;
            return r;
        };
        stage(looks[c.n_rows], [&](int64_t item, int64_t next) {
            int64_t r = row_of(looks, item);
            rows[r].look(item - looks[r], next - looks[r]);
        });
        stage(finishes[c.n_rows], [&](int64_t item, int64_t) {
            int64_t r = row_of(finishes, item);
            rows[r].finish(item - finishes[r]);
        });
    }

    // Outputs of a linear layer of x [rows, depth], null = what is normed.
    void outputs(const Number* w, const Number* bias, const Number* x, int64_t depth, Number* out, int64_t outs) {
        split(outs, depth, [&](int64_t item, int64_t from, int64_t end) {
            LinearCall call = linear(x ? x : norm(item), depth, w, bias, out, outs, outs, depth);
            for (int64_t o = from; o < end; o += LANES) run(call, o);
        });
    }

    // silu(gate) * up.
    void feed(const DecodeLayer& layer) {
        split(c.inner, 2 * c.dim, [&](int64_t item, int64_t from, int64_t end) {
            const Number* x = norm(item);
            Number *gates = both.data(), *ups = gates + c.n_rows * LANES;
            for (int64_t o = from; o < end; o += LANES) {
                LinearCall gate = linear(x, c.dim, layer.gate, layer.gate_bias, gates - o, LANES, c.inner, c.dim);
                LinearCall up = linear(x, c.dim, layer.up, layer.up_bias, ups - o, LANES, c.inner, c.dim);
                run(gate, o);
                run(up, o);
                Mask there = first(c.inner - o);
                for (int64_t r = 0; r < c.n_rows; ++r)
                    store(s.activated.data() + r * c.inner + o, there,
                          gated(load(gates + r * LANES, there), load(ups + r * LANES, there)));
            }
        });
    }

    // A stage over outputs in items of whole vectors; item(number, first output, end).
    template <class Item>
    void split(int64_t outs, int64_t depth, Item item) {
        int64_t groups = divide_up(outs, LANES);
        int64_t size = std::max<int64_t>(1, ITEM_BYTES / (depth * static_cast<int64_t>(sizeof(Number)) * LANES));
        stage(divide_up(groups, size), [&](int64_t i, int64_t) {
            item(i, i * size * LANES, std::min(groups, (i + 1) * size) * LANES);
        });
    }

    struct Pending {
        const Number *residual, *added, *after, *weight;
        Number* keep;
    };

    const DecodeCall& c;
    Shared& s;
    Stage* stages;
    char* states;
    int64_t passed = 0;
    Pending pending{};
    bool is_normed = false;
    std::vector<Number> normed, total, scaled_added, head, both;
};

// Bytes of the attention's states, for the layer that needs most.
size_t attention_bytes(const DecodeCall& c) {
    size_t most = 0;
    for (int64_t l = 0; l < c.n_layers; ++l) {
        size_t bytes = 0;
        for (int64_t r = 0; r < c.n_rows; ++r) {
            Call call{};
            call.at = &c.rows[r].at;
            call.rows = 1;
            call.kv = c.kv;
            call.group = c.heads / c.kv;
            call.dim = c.head_dim;
            call.window = c.layers[l].window;
            bytes += ByKeys(call).bytes();
        }
        most = std::max(most, bytes);
    }
    return most;
}

}  // namespace

extern "C" void blendserve_decode_step(const DecodeCall* call) {
    const DecodeCall& c = *call;
    Shared shared(c);
    std::vector<Stage> stages(6 * c.n_layers + 1);
    char* states = call_scratch.take(attention_bytes(c));
#pragma omp parallel num_threads(static_cast<int>(c.threads))
    Worker(c, shared, stages.data(), states).run();
}
