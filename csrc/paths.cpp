// Grows the tree of a one-pass drafter whose guesses a recurrent cell refines along each path, best node first. The twin of
// soothsay/drafters/ops/refinement.py.
#include "kernels.h"
#include "simd.h"
#include <algorithm>
#include <vector>

namespace {

constexpr float NEVER = -1e30f;

// x += sum over i of a[i] * rows[i], each row of n numbers.
void add_rows(const float* a, const bf16* rows, int n, float* x) {
    for (int i = 0; i < n; ++i, rows += n) {
        const floats factor = splat(a[i]);
        for (int j = 0; j < n; j += LANES) store(x + j, fused(factor, load(rows + j), load(x + j)));
    }
}

float dot(const float* x, const bf16* row, int n) {
    floats total = {};
    for (int j = 0; j < n; j += LANES) total = fused(load(x + j), load(row + j), total);
    return sum(total);
}

// The growing tree. Nodes that can have children have a state, and the scores of all candidates below them.
struct Tree {
    const soothsay_paths& p;
    const int width = p.count + p.following;  // candidates below a node
    std::vector<float> states, scores;  // [nodes, units], [nodes, width]
    std::vector<int> depths, best;      // of each node: its depth, the best candidate that is left, or -1
    std::vector<int64_t> node_places;   // of each node

    Tree(const soothsay_paths& paths, int nodes)
        : p(paths), states(size_t(nodes) * paths.units), scores(size_t(nodes) * width), depths(nodes), best(nodes), node_places(nodes) {}

    void find_best(int node) {
        const float* row = &scores[size_t(node) * width];
        const int at = int(std::max_element(row, row + width) - row);
        best[node] = row[at] > NEVER ? at : -1;
    }

    // The place of a candidate below a node: one of the best of its depth, or one that often follows the node's token.
    int64_t place(int node, int candidate) const {
        if (candidate < p.count) return p.places[size_t(depths[node]) * p.count + candidate];
        return p.followers[node_places[node] * p.following + candidate - p.count];
    }

    // The candidates below the root are refined already.
    void expand_root() {
        std::copy(p.root, p.root + p.units, states.begin());
        std::copy(p.values, p.values + p.count, scores.begin());
        std::fill(scores.begin() + p.count, scores.begin() + width, NEVER);
        find_best(0);
    }

    // Scores the candidates below `node`, whose token's part of the state is `token`.
    void expand(int node, int parent, double score, const bf16* token) {
        const int units = p.units, depth = depths[node];
        float* state = &states[size_t(node) * units];
        std::copy(p.read + size_t(depth) * units, p.read + size_t(depth + 1) * units, state);
        add_rows(&states[size_t(parent) * units], (const bf16*)p.carry, units, state);
        for (int j = 0; j < units; j += LANES) {
            const floats sums = load(state + j) + load(token + j);
            store(state + j, sums / (1.0f + exp(-(sums < -80.0f ? splat(-80.0f) : sums))));
        }
        const float* best_values = p.values + size_t(depth) * p.count;
        const float* row = p.scores + depth * p.tokens_count;
        const float all_before = p.factor * row[p.places[size_t(depth) * p.count]] - best_values[0];
        float* own = &scores[size_t(node) * width];
        float least = row[p.places[size_t(depth) * p.count]], top = 0;
        for (int k = 0; k < p.count; ++k)
            if (best_values[k] > NEVER) least = std::min(least, row[place(node, k)]);
        double inside = 0, total = 0;
        for (int k = 0; k < width; ++k) {
            const int64_t at = place(node, k);
            float value = k < p.count ? best_values[k] : p.factor * row[at] - all_before;
            if (k >= p.count && row[at] >= least) value = NEVER;  // it is one of the best
            own[k] = NEVER;
            if (!(value > NEVER)) continue;
            inside += std::exp(value);
            own[k] = value + p.scale * dot(state, (const bf16*)p.out + at * units, units);
            top = std::max(top, own[k]);
        }
        for (int k = 0; k < width; ++k)
            if (own[k] > NEVER) total += std::exp(own[k] - top);
        total += std::max(1 - inside, 0.0) * std::exp(-top);  // tokens that are no candidates are not refined
        const float all = float(std::log(total)) + top;
        for (int k = 0; k < width; ++k)
            if (own[k] > NEVER) own[k] = float(score + std::min(own[k] - all, 0.0f));
        find_best(node);
    }
};

}  // namespace

extern "C" int soothsay_grow_paths(const soothsay_paths* paths, int nodes, int depth, double least, int64_t* places,
                                   int* parents, double* scores) {
    const soothsay_paths& p = *paths;
    Tree tree(p, nodes);
    depth = std::min(depth, p.depths);
    int size = 1;
    places[0] = 0, scores[0] = 0, parents[0] = -1, tree.depths[0] = 0;
    if (depth > 0 && nodes > 1)
        tree.expand_root();
    else
        tree.best[0] = -1;
    while (size < nodes) {
        int above = -1;
        double highest = NEVER;
        for (int n = 0; n < size; ++n) {
            if (tree.best[n] < 0) continue;
            const double score = tree.scores[size_t(n) * tree.width + tree.best[n]];
            if (score > highest) highest = score, above = n;
        }
        if (above < 0 || highest < least) break;
        const int chosen = tree.best[above], node = size++;
        tree.scores[size_t(above) * tree.width + chosen] = NEVER;
        tree.find_best(above);
        places[node] = tree.node_places[node] = tree.place(above, chosen);
        parents[node] = above, scores[node] = highest;
        tree.depths[node] = tree.depths[above] + 1, tree.best[node] = -1;
        if (tree.depths[node] < depth && size < nodes)
            tree.expand(node, above, highest, (const bf16*)p.tokens + places[node] * p.units);
    }
    return size;
}
