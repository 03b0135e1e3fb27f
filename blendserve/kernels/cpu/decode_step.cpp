// One decoding step: up to 8 rows, of one request or of several, through all layers and the output head in one call.
//
//     for each layer   1 norm, q k v, head norms, RoPE, KV into the caches      an item is a head
//                      2 attention                                              a row, a kv head and a block of its keys
//                      3 the blocks joined                                      a row and a kv head
//                      4 o                                                      some outputs
//                      5 residual, norm, act(gate) * up                         some outputs
//                      6 down                                                   some outputs
//     and at the end   residual, norm, output head                              some outputs
//
// It calls the inner loops of the other kernels and rounds where they do: logits and KV are those of the layer-by-layer
// loop over kernels of the same instruction set, to the bit. A row's numbers depend neither on the other rows nor on the
// number of threads.
//
// Threads claim the items of a stage one by one, and a stage ends when all of its items are done: no thread waits for a
// thread that has not begun. Norms are cheap, so each thread computes the norms of its own items.

#include <sched.h>

#include <vector>

#include "attention_vectors.h"
#include "elementwise.h"
#include "gemv.h"
#include "strips.h"

namespace {

constexpr int64_t ITEM_BYTES = 1 << 16;  // of weights: a few microseconds

// Claims and ends of the items of one stage.
struct alignas(64) Stage {
    std::atomic<int64_t> claimed{0};
    alignas(64) std::atomic<int64_t> done{0};
};

// Numbers that all threads of a step read and write.
struct Shared {
    std::vector<elem_t> residual[2], q, attended, added, activated;
    explicit Shared(const DecodeStepArgs& c)
        : q(c.n_rows * c.heads * c.head_dim), attended(q.size()), added(c.n_rows * c.dim), activated(c.n_rows * c.inner) {
        for (auto& one : residual) one.resize(c.n_rows * c.dim);
    }
    AttentionArgs attention(const DecodeStepArgs& c, int64_t l, int64_t r) {
        const LayerWeights& layer = c.layers[l];
        const DecodeRow& row = c.rows[r];
        int64_t size = c.heads * c.head_dim, stride = row.head_stride;
        return {q.data() + r * size, row.keys + l * row.layer_stride, row.values + l * row.layer_stride,
                attended.data() + r * size, &row.position, nullptr, nullptr, layer.sinks, c.head_dim, size, stride,
                row.row_stride, stride, row.row_stride, 1, c.kv_heads, c.heads / c.kv_heads, c.head_dim, layer.window, layer.scale,
                layer.softcap, 1};
    }
};

class Worker {
   public:
    Worker(const DecodeStepArgs& call, Shared& shared_numbers, Stage* all_stages, char* attention_memory)
        : c(call), s(shared_numbers), stages(all_stages), states(attention_memory),
          normed(c.n_rows * c.dim), total(normed.size()), scaled_added(normed.size()), head(c.n_rows * c.head_dim),
          both(2 * c.n_rows * STRIP) {
        calls.reserve(c.n_rows), rows.reserve(c.n_rows);  // rows refer to calls
    }

    void run() {
        const elem_t *added = nullptr, *after = nullptr;  // of the MLP of the layer below, and the norm behind it
        for (int64_t l = 0; l < c.n_layers; ++l) {
            const LayerWeights& layer = c.layers[l];
            begin_norm(added, after, layer.norm_before_attention);
            stage(c.heads + 2 * c.kv_heads, [&](int64_t i, int64_t) { project(l, i); });
            attend(l);
            outputs(layer.o, layer.o_bias, s.attended.data(), c.heads * c.head_dim, s.added.data(), c.dim);
            added = s.added.data(), after = layer.norm_after_mlp;
            begin_norm(added, layer.norm_after_attention, layer.norm_before_mlp);
            feed(layer);
            outputs(layer.down, layer.down_bias, s.activated.data(), c.inner, s.added.data(), c.dim);
        }
        begin_norm(added, after, c.norm);
        outputs(c.head, c.head_bias, nullptr, c.dim, c.logits, c.vocabulary);
    }

   private:
    // Items 0 .. n - 1, shared out; returns when all threads have done all of them.
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
        for (int spins = 0; mine.done.load(std::memory_order_acquire) < n; ++spins)
            spins < 2000 ? _mm_pause() : void(sched_yield());  // the thread that is waited for may need this core
    }

    // What the next stage's items need normed: residual + (added, normed itself and scaled where the family does so).
    void begin_norm(const elem_t* added, const elem_t* after, const elem_t* weight) {
        elem_t* keep = s.residual[n_norms++ % 2].data();
        pending = {n_norms > 1 ? pending.keep : c.hidden, added, after, weight, keep};
        is_normed = false;
    }

    // Normed rows, once per stage and thread; the thread with the stage's first item writes the new residual.
    const elem_t* norm(int64_t item) {
        if (!is_normed) {
            const elem_t* added = pending.added;
            if (added && pending.after) {
                norm_rows(added, nullptr, pending.after, nullptr, scaled_added.data(), c.dim);
                added = scaled_added.data();
            }
            if (added && c.residual_scale) {
                scale_and_add(added, c.residual_scale, nullptr, scaled_added.data(), c.n_rows * c.dim);
                added = scaled_added.data();
            }
            norm_rows(pending.residual, added, pending.weight, total.data(), normed.data(), c.dim);
            is_normed = true;
        }
        if (item == 0) std::memcpy(pending.keep, total.data(), sizeof(elem_t) * total.size());
        return normed.data();
    }

    void norm_rows(const elem_t* x, const elem_t* add, const elem_t* weight, elem_t* sum, elem_t* out, int64_t dim) const {
        NormArgs call{x, add, weight, sum, out, dim, dim, c.n_rows, dim, c.rounds_first, c.eps, c.offset, 1};
        for (int64_t row = 0; row < c.n_rows; ++row) norm_row(call, row);
    }

    LinearArgs linear(const elem_t* x, int64_t x_row, Matrix w, const elem_t* bias, elem_t* out, int64_t out_row,
                      int64_t outputs, int64_t inputs) {
        LinearArgs call{x, w, bias, out, nullptr, x_row, inputs, out_row, c.n_rows, outputs, inputs, c.int8_rows, 1};
        if (w.form) call.prepared = prepare(call);
        return call;
    }

    // What a stage's rows are for strips, once per stage and thread: all of its matrices have the same.
    const float* prepare(const LinearArgs& call) {
        if (prepared_for != passed) {
            prepared.resize(c.n_rows * PreparedRow::floats(call.inputs));
            blendserve_prepare_rows(call, prepared.data());
            prepared_for = passed;
        }
        return prepared.data();
    }

    // A head of queries, keys or values.
    void project(int64_t l, int64_t i) {
        const LayerWeights& layer = c.layers[l];
        const elem_t* x = norm(i);
        int64_t dim = c.head_dim, kind = i < c.heads ? 0 : i < c.heads + c.kv_heads ? 1 : 2;
        int64_t h = i - (kind ? c.heads : 0) - (kind == 2 ? c.kv_heads : 0);
        Matrix weights[] = {layer.q, layer.k, layer.v};
        const elem_t* biases[] = {layer.q_bias, layer.k_bias, layer.v_bias};
        const elem_t* norms[] = {layer.q_norm, layer.k_norm, nullptr};
        elem_t* out = head.data();
        LinearArgs call = linear(x, c.dim, weights[kind], biases[kind], out - h * dim, dim, (kind ? c.kv_heads : c.heads) * dim, c.dim);
        for (int64_t o = h * dim; o < (h + 1) * dim; o += STRIP) few_rows(call, o);
        if (norms[kind]) norm_rows(out, nullptr, norms[kind], nullptr, out, dim);
        const RopeTable* rope = layer.rope < 0 ? nullptr : c.ropes + layer.rope;
        for (int64_t r = 0; r < c.n_rows; ++r) {
            const DecodeRow& row = c.rows[r];
            int64_t place = l * row.layer_stride + h * row.head_stride + row.position * row.row_stride;
            elem_t* to = kind == 0 ? s.q.data() + (r * c.heads + h) * dim : (kind == 1 ? row.keys : row.values) + place;
            if (kind < 2 && rope)
                apply_rope({rope->cos, rope->sin, rope->width, rope->width}, r, out + r * dim, to, dim);
            else
                std::memcpy(to, out + r * dim, sizeof(elem_t) * dim);
            if (kind == 0 && row.query_scale != 1.0f) scale_and_add(to, row.query_scale, nullptr, to, dim);
        }
    }

    void attend(int64_t l) {
        calls.clear(), rows.clear();
        int64_t attend_items[MAX_GEMV_ROWS + 1] = {0}, merge_items[MAX_GEMV_ROWS + 1] = {0};
        size_t used = 0;
        for (int64_t r = 0; r < c.n_rows; ++r) {
            calls.push_back(s.attention(c, l, r));
            rows.emplace_back(calls.back());
            rows[r].use(states + used);
            used += rows[r].bytes();
            attend_items[r + 1] = attend_items[r] + rows[r].n_attend_items();
            merge_items[r + 1] = merge_items[r] + rows[r].n_merge_items();
        }
        auto row_of = [&](const int64_t* ends, int64_t item) {
            int64_t r = 0;
            while (item >= ends[r + 1]) ++r;
            return r;
        };
        stage(attend_items[c.n_rows], [&](int64_t item, int64_t next) {
            int64_t r = row_of(attend_items, item);
            rows[r].attend(item - attend_items[r], next - attend_items[r]);
        });
        stage(merge_items[c.n_rows], [&](int64_t item, int64_t) {
            int64_t r = row_of(merge_items, item);
            rows[r].merge(item - merge_items[r]);
        });
    }

    // Outputs of a linear layer of x [rows, inputs], null = what is normed.
    void outputs(Matrix w, const elem_t* bias, const elem_t* x, int64_t inputs, elem_t* out, int64_t outputs) {
        split(outputs, strip_bytes(w.form, inputs), [&](int64_t item, int64_t from, int64_t end) {
            LinearArgs call = linear(x ? x : norm(item), inputs, w, bias, out, outputs, outputs, inputs);
            for (int64_t o = from; o < end; o += STRIP) few_rows(call, o);
        });
    }

    // silu(gate) * up, or gelu(gate) * up.
    void feed(const LayerWeights& layer) {
        split(c.inner, strip_bytes(layer.gate.form, c.dim) + strip_bytes(layer.up.form, c.dim), [&](int64_t item, int64_t from, int64_t end) {
            const elem_t* x = norm(item);
            elem_t *gates = both.data(), *ups = gates + c.n_rows * STRIP;
            for (int64_t o = from; o < end; o += STRIP) {
                few_rows(linear(x, c.dim, layer.gate, layer.gate_bias, gates - o, STRIP, c.inner, c.dim), o);
                few_rows(linear(x, c.dim, layer.up, layer.up_bias, ups - o, STRIP, c.inner, c.dim), o);
                for (int64_t r = 0; r < c.n_rows; ++r)
                    for (int64_t i = 0; i < STRIP && o + i < c.inner; i += LANES) {
                        Mask mask = tail_mask(c.inner - o - i);
                        F32 x = load(gates + r * STRIP + i, mask), by = load(ups + r * STRIP + i, mask);
                        store(s.activated.data() + r * c.inner + o + i, mask, c.gelu ? gelu_mul(x, by) : silu_mul(x, by));
                    }
            }
        });
    }

    // A stage over outputs in items of whole strips, of so many bytes of weights each; item(number, first output, end).
    template <class Item>
    void split(int64_t outputs, int64_t bytes, Item item) {
        int64_t groups = divide_up(outputs, STRIP);
        int64_t size = std::max<int64_t>(1, ITEM_BYTES / bytes);
        stage(divide_up(groups, size), [&](int64_t i, int64_t) {
            item(i, i * size * STRIP, std::min(groups, (i + 1) * size) * STRIP);
        });
    }

    struct Pending {
        const elem_t *residual, *added, *after, *weight;
        elem_t* keep;
    };

    const DecodeStepArgs& c;
    Shared& s;
    Stage* stages;
    char* states;
    int64_t passed = 0, n_norms = 0, prepared_for = -1;
    Pending pending{};
    bool is_normed = false;
    std::vector<AttentionArgs> calls;  // of a layer, for each row
    std::vector<SplitKv> rows;
    std::vector<float> prepared;
    std::vector<elem_t> normed, total, scaled_added, head, both;
};

}  // namespace

void blendserve_decode_step(const DecodeStepArgs& args) {
    Shared shared(args);
    std::vector<Stage> stages(6 * args.n_layers + 1);
    size_t bytes = 0;  // of the attention's states in a layer without a window, which needs most
    for (int64_t r = 0; r < args.n_rows; ++r) {
        AttentionArgs call = shared.attention(args, 0, r);
        call.window = 0;
        bytes += SplitKv(call).bytes();
    }
    char* states = call_scratch.take<char>(bytes);
#pragma omp parallel num_threads(static_cast<int>(args.threads))
    Worker(args, shared, stages.data(), states).run();
}
