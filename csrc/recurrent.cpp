// Drafts with a recurrent head of one decoder block (EAGLE-3) in one call: the rows of committed tokens, and then the tree, level by
// level. The twin of soothsay/drafters/trees/growth.py. A level is so little work that Python between two of them takes as long.
#include "operations.h"
#include "largest.h"
#include "layout.h"
#include "noise.h"
#include "simd.h"
#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr double NEVER = -INFINITY;
constexpr int ALIGNED = 64;  // bytes

// A node that was just added to a tree, and may be expanded next.
struct Candidate {
    double score;
    int node, above;  // in the tree that is verified; its parent in the tree of expanded nodes
};

// The tree of a request. Only some of its nodes are expanded: the head computes what comes after them.
struct Growing {
    soothsay_growing& g;
    std::vector<int64_t> tokens, parents;  // of the expanded nodes
    std::vector<int> node_of, depths;      // of each expanded node: its node in the tree, its depth
    int first = 0;                         // the frontier are the expanded nodes from here on
    std::vector<int> rows_above;           // of each node of the frontier: its parent's row in the last level

    explicit Growing(soothsay_growing& growing)
        : g(growing), tokens{growing.tokens[growing.pending - 1]}, parents{-1}, node_of{0}, depths{0} {
        g.size = 1, g.tree_parents[0] = -1, g.scores[0] = 0, g.tree_tokens[0] = tokens[0];
    }

    int frontier() const { return int(tokens.size()) - first; }

    // The score that a node must exceed to be verified: g.nodes others score at least this.
    double bound() const {
        if (g.size < g.nodes) return NEVER;
        std::vector<double> sorted(g.scores, g.scores + g.size);
        std::nth_element(sorted.begin(), sorted.begin() + g.nodes - 1, sorted.end(), std::greater<>());
        return sorted[g.nodes - 1];
    }

    // Adds nodes below the frontier, whose likeliest tokens are in `values` and `places`, `branch` of each.
    std::vector<Candidate> add_level(const float* values, const int64_t* places, int branch, const int64_t* ids) {
        std::vector<Candidate> added;
        const double least = bound();
        for (int above = first; above < int(tokens.size()); ++above, values += branch, places += branch) {
            const int parent = node_of[above];
            for (int rank = 0; rank < branch; ++rank) {
                if (!(values[rank] > least - g.scores[parent])) continue;
                const int node = g.size++;
                g.tree_tokens[node] = ids ? ids[places[rank]] : places[rank];
                g.tree_parents[node] = parent;
                g.scores[node] = g.scores[parent] + std::min(double(values[rank]), 0.0);
                added.push_back({g.scores[node], node, above});
            }
        }
        return added;
    }

    // Makes the best of the new nodes the frontier; none if together they are right less often than `least`.
    void advance(std::vector<Candidate> added, int width, double least, int first_row) {
        const int begin = int(tokens.size()), room = std::max(g.nodes - begin, 0);
        std::stable_sort(added.begin(), added.end(), [](auto& a, auto& b) { return a.score > b.score; });
        added.resize(std::min<size_t>(added.size(), std::min(width, room)));
        const double low = bound();
        double sum = 0;
        added.erase(std::remove_if(added.begin(), added.end(), [&](auto& one) { return !(one.score > low); }), added.end());
        for (const auto& one : added) sum += std::exp(one.score);
        rows_above.clear();
        for (const auto& one : added) {
            const int64_t token = g.tree_tokens[one.node];
            if (sum < least || std::count(g.ends, g.ends + g.num_ends, token)) continue;
            tokens.push_back(token), parents.push_back(one.above), node_of.push_back(one.node);
            depths.push_back(depths[one.above] + 1), rows_above.push_back(first_row + one.above - first);
        }
        first = begin;
    }
};

// Where the rows of a pass stand.
struct Layout {
    const int64_t block_size;
    std::vector<int64_t> plan, room;
    int64_t count = 0, rows = 0, logit_rows = 0, keys = 0;

    Places out() { return {room.data(), rows, logit_rows}; }

    // Adds the pending tokens and the root, or the frontier.
    void add(const Growing& growing, bool is_first) {
        const soothsay_growing& g = growing.g;
        const int64_t pending = is_first ? g.pending : 0, size = is_first ? g.nodes > 0 : growing.tokens.size();
        const int64_t start = is_first ? g.start : g.start + g.pending, first = is_first ? 1 : growing.first;
        const int64_t blocks = (g.start + g.pending + std::max(g.nodes - 1, 0) + block_size - 1) / block_size;
        plan.insert(plan.end(), {start, g.first_key, first, size, pending, blocks});
        plan.insert(plan.end(), g.tokens, g.tokens + pending);
        plan.insert(plan.end(), g.table, g.table + blocks);
        plan.insert(plan.end(), growing.tokens.begin(), growing.tokens.begin() + size);
        plan.insert(plan.end(), growing.parents.begin(), growing.parents.begin() + size);
        const int64_t here = pending + std::max<int64_t>(size - first, 0);
        rows += here, logit_rows += is_first ? size : size - first;
        keys += (is_first ? 1 : here) * (start + pending + size);  // of each path
        ++count;
    }

    void lay_out() {
        room.resize(4 + 8 * rows + logit_rows + keys);
        soothsay_lay_out(plan.data(), count, block_size, rows, logit_rows, room.data());
    }
};

// Leaves of the numbers of a row, which are log-probabilities up to a constant, those that sampling keeps. A nucleus of more
// than SEEN tokens is not cut.
void truncate(float* x, int64_t width, const soothsay_growing& g) {
    constexpr int SEEN = 256;
    float values[SEEN];
    int64_t places[SEEN];
    const int count = int(std::min<int64_t>(SEEN, width));
    if (g.min_p > 0) {
        const float least = *std::max_element(x, x + width) + std::log(g.min_p);
        for (int64_t i = 0; i < width; ++i) x[i] = x[i] < least ? NONE : x[i];
    }
    const bool few = g.top_k > 0 && g.top_k < width;
    if (!few && !(g.top_p < 1)) return;
    soothsay_largest(x, nullptr, 1, width, count, values, places);
    int kept = few ? std::min(g.top_k, count) : count;
    double total = 0, before = 0;
    if (few)
        for (int k = 0; k < kept; ++k) total += std::exp(values[k] - values[0]);
    else
        for (int64_t i = 0; i < width; ++i) total += std::exp(x[i] - values[0]);
    for (int k = 0; k < kept && g.top_p < 1; ++k) {
        if (before >= g.top_p * total) kept = k;
        else before += std::exp(values[k] - values[0]);
    }
    if (few ? g.top_k > count : kept == count && count < width) return;
    std::fill(x, x + width, NONE);
    for (int k = 0; k < kept; ++k) x[places[k]] = values[k];
}

// Logits of a row -> what the target's draw would be the largest of, if it had them.
void perturb(float* x, int64_t width, const soothsay_growing& g, int depth, const int64_t* ids) {
    const Key key = Key::of(g.seed, uint64_t(g.start + g.pending + depth));
    for (int64_t i = 0; i < width; ++i) x[i] *= g.factor;
    truncate(x, width, g);
    for (int64_t i = 0; i < width; ++i) x[i] += gumbel(uniform(key.hash(uint32_t(ids ? ids[i] : i))));
}

class Pass {
    const soothsay_recurrent& r;
    const soothsay_pool& pool;
    const int hidden, half;

    void embed(const int64_t* tokens, int64_t rows, float* out) const {
        std::vector<int64_t> known(tokens, tokens + rows);
        for (auto& token : known) token = std::min(token, r.vocabulary - 1);
        if (r.table) soothsay_rows(known.data(), rows, r.table, out);
        for (int64_t i = 0; i < rows; ++i)
            for (int j = 0; j < hidden; j += LANES) {
                float* to = out + i * hidden + j;
                const int64_t from = known[i] * hidden + j;
                const floats v = r.table ? load(to) : r.rows_are_bf16 ? load((const bf16*)r.rows + from) : load((const float*)r.rows + from);
                store(to, v * r.embedding_scale);
            }
    }

    // rows [rows, hidden] -> normed, in every other row of `both`, in the type of the block.
    void norm_into(const float* x, const float* weight, int64_t rows, char* both, int part) const {
        const int64_t size = hidden * (half ? 2 : 4);
        for (int64_t i = 0; i < rows; ++i)
            soothsay_add_norm(x + i * hidden, nullptr, 0, nullptr, weight, r.eps, 1, hidden, nullptr, both + (2 * i + part) * size, half);
    }

  public:
    Pass(const soothsay_recurrent& recurrent, const soothsay_pool& kv)
        : r(recurrent), pool(kv), hidden(recurrent.hidden), half(recurrent.is_bf16) {}

    // What the target's layers gave for some tokens [rows, taps * tap_size] -> features [rows, hidden].
    std::vector<float> fuse(std::vector<float> read) const {
        const int64_t width = int64_t(r.taps) * r.tap_size, rows = read.size() / width;
        for (int64_t i = 0; r.tap_norms && i < rows * r.taps; ++i) {
            float* part = &read[i * r.tap_size];
            soothsay_add_norm(part, nullptr, 0, nullptr, r.tap_norms + i % r.taps * r.tap_size, r.eps, 1, r.tap_size, nullptr, part, 0);
        }
        std::vector<float> out(rows * hidden);
        multiply(read.data(), 0, rows, r.fuse, r.fuse_is_bf16, out);
        return out;
    }

    // Rows x times weights, which give numbers of one or the other type, into `out` [rows, hidden].
    void multiply(const void* x, int x_is_bf16, int64_t rows, const soothsay_weights* weights, int gives_bf16, std::vector<float>& out) const {
        if (!gives_bf16) return soothsay_linear(x, x_is_bf16, rows, weights, out.data(), 0);
        std::vector<bf16> made(rows * hidden);
        soothsay_linear(x, x_is_bf16, rows, weights, made.data(), 1);
        for (size_t i = 0; i < out.size(); ++i) out[i] = widen(made[i]);
    }

    // The outputs of all rows, which read `features` [rows, hidden].
    std::vector<float> run(Layout& layout, const std::vector<float>& features) const {
        const Places l = layout.out();
        const int64_t rows = layout.rows, size = half ? 2 : 4;
        const int d = r.d;
        std::vector<float> embedded(rows * hidden), out(features), cos(rows * d), sin(rows * d);
        std::vector<char> both(2 * rows * hidden * size), scratch(rows * r.scratch + ALIGNED);
        embed(l.tokens, rows, embedded.data());
        norm_into(embedded.data(), r.embedding_norm, rows, both.data(), 0);
        norm_into(features.data(), r.feature_norm, rows, both.data(), 1);
        if (r.join) {
            multiply(both.data(), half, rows, r.join, r.join_is_bf16, out);
        } else if (r.norms_residual) {
            for (int64_t i = 0; i < rows; ++i)
                for (int j = 0; j < hidden; j += LANES) {
                    const char* from = both.data() + ((2 * i + 1) * hidden + j) * size;
                    store(&out[i * hidden + j], half ? load((const bf16*)from) : load((const float*)from));
                }
        }
        for (int64_t i = 0; i < rows; ++i) {
            std::copy_n(r.cos + l.positions[i] * d, d, &cos[i * d]);
            std::copy_n(r.sin + l.positions[i] * d, d, &sin[i * d]);
        }
        char* const aligned = (char*)(((uintptr_t)scratch.data() + ALIGNED - 1) & ~uintptr_t(ALIGNED - 1));
        const float* ropes[] = {cos.data(), sin.data()};
        soothsay_pass pass{rows, l.positions, l.slots, {{l.keys, l.key_begin, l.rows, l.row_positions, l.row_begin, l.shared, l.totals[0]}},
                           nullptr, nullptr, ropes, pool.slots, out.data(), both.data(), aligned, hidden};
        soothsay_layer block = *r.block;
        block.kv = pool.data, block.format = pool.format;
        soothsay_run(&block, 1, &pass);
        if (r.norms_output) norm(out, out);
        return out;
    }

    void norm(const std::vector<float>& x, std::vector<float>& out) const {
        soothsay_add_norm(x.data(), nullptr, 0, nullptr, r.norm, r.eps, x.size() / hidden, hidden, nullptr, out.data(), 0);
    }

    // The logits after some outputs [n, hidden].
    std::vector<float> logits(std::vector<float> outputs) const {
        const int64_t rows = outputs.size() / hidden;
        if (!r.norms_output) norm(outputs, outputs);
        std::vector<float> made(rows * r.outputs);
        soothsay_linear(outputs.data(), 0, rows, r.head, made.data(), 0);
        return made;
    }
};

}  // namespace

extern "C" void soothsay_draft(const soothsay_recurrent* recurrent, const soothsay_pool* pool, soothsay_growing* requests,
                               int64_t count) {
    const soothsay_recurrent& r = *recurrent;
    const Pass pass(r, *pool);
    const int hidden = r.hidden, branch = int(std::min<int64_t>(r.branch, r.outputs));
    const int64_t width = r.outputs;
    std::vector<Growing> all;
    std::vector<float> features;
    for (int64_t i = 0; i < count; ++i) {
        all.emplace_back(requests[i]);
        features.insert(features.end(), requests[i].features, requests[i].features + requests[i].pending * r.taps * r.tap_size);
    }
    features = pass.fuse(std::move(features));
    std::vector<Growing*> growing;
    for (auto& one : all) growing.push_back(&one);
    for (int level = 0; !growing.empty(); ++level) {
        Layout layout{pool->block_size};
        for (const auto* one : growing) layout.add(*one, level == 0);
        layout.lay_out();
        const auto out = pass.run(layout, features);

        growing.erase(std::remove_if(growing.begin(), growing.end(), [](auto* one) { return one->g.nodes < 1; }), growing.end());
        std::vector<float> outputs, factors;
        for (int64_t i = 0; i < layout.logit_rows; ++i) {
            const float* row = &out[layout.out().logit_rows[i] * hidden];
            outputs.insert(outputs.end(), row, row + hidden);
        }
        auto logits = pass.logits(outputs);
        for (const auto* one : growing)
            for (int node = one->first; node < int(one->tokens.size()); ++node) {
                const soothsay_growing& g = one->g;
                if (g.draws) perturb(&logits[factors.size() * width], width, g, one->depths[node], r.ids);
                factors.push_back(g.draws ? 1.0f : g.factor);
            }
        const int64_t rows = int64_t(factors.size());
        std::vector<float> values(rows * branch);
        std::vector<int64_t> places(rows * branch);
        soothsay_largest(logits.data(), factors.data(), rows, width, branch, values.data(), places.data());

        features.clear();
        std::vector<Growing*> next;
        int begin = 0;
        for (auto* one : growing) {
            const int frontier = one->frontier();
            auto added = one->add_level(&values[begin * branch], &places[begin * branch], branch, r.ids);
            if (level + 1 >= std::min(r.depth, one->g.depth)) added.clear();
            one->advance(std::move(added), r.width, r.least, begin);
            for (const int row : one->rows_above) features.insert(features.end(), &outputs[row * hidden], &outputs[(row + 1) * hidden]);
            if (one->frontier()) next.push_back(one);
            begin += frontier;
        }
        growing.swap(next);
    }
}
