// Grows the tree of a one-pass drafter whose guesses a recurrent cell refines along each path, best node first. The twin of
// soothsay/core/refinement.py.
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
    std::vector<float> states, scores;  // [nodes, units], [nodes, count]
    std::vector<int> depths, best;      // of each node: its depth, the best candidate that is left, or -1

    Tree(const soothsay_paths& paths, int nodes)
        : p(paths), states(size_t(nodes) * paths.units), scores(size_t(nodes) * paths.count), depths(nodes), best(nodes) {}

    void find_best(int node) {
        const float* row = &scores[size_t(node) * p.count];
        const int at = int(std::max_element(row, row + p.count) - row);
        best[node] = row[at] > NEVER ? at : -1;
    }

    // Scores the candidates below `node`, whose token's part of the state is `token`.
    void expand(int node, int parent, double score, const float* token, const bf16* row) {
        const int units = p.units, depth = depths[node];
        float* state = &states[size_t(node) * units];
        std::copy(p.read + size_t(depth) * units, p.read + size_t(depth + 1) * units, state);
        if (parent >= 0) add_rows(&states[size_t(parent) * units], (const bf16*)p.carry, units, state);
        for (int j = 0; j < units; j += LANES) {
            const floats sums = load(state + j) + (row ? load(row + j) : load(token + j));
            store(state + j, sums / (1.0f + exp(-(sums < -80.0f ? splat(-80.0f) : sums))));
        }
        const float* values = p.values + size_t(depth) * p.count;
        const int64_t* places = p.places + size_t(depth) * p.count;
        float* own = &scores[size_t(node) * p.count];
        float top = 0;
        double inside = 0, total = 0;
        for (int k = 0; k < p.count; ++k) {
            own[k] = values[k] > NEVER ? values[k] + p.scale * dot(state, (const bf16*)p.out + places[k] * units, units) : NEVER;
            top = std::max(top, own[k]);
        }
        for (int k = 0; k < p.count; ++k)
            if (own[k] > NEVER) inside += std::exp(values[k]), total += std::exp(own[k] - top);
        total += std::max(1 - inside, 0.0) * std::exp(-top);  // tokens that are no candidates are not refined
        const float all = float(std::log(total)) + top;
        for (int k = 0; k < p.count; ++k)
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
        tree.expand(0, -1, 0, p.root, nullptr);
    else
        tree.best[0] = -1;
    while (size < nodes) {
        int above = -1;
        double highest = NEVER;
        for (int n = 0; n < size; ++n) {
            if (tree.best[n] < 0) continue;
            const double score = tree.scores[size_t(n) * p.count + tree.best[n]];
            if (score > highest) highest = score, above = n;
        }
        if (above < 0 || highest < least) break;
        const int chosen = tree.best[above], node = size++;
        tree.scores[size_t(above) * p.count + chosen] = NEVER;
        tree.find_best(above);
        places[node] = p.places[size_t(tree.depths[above]) * p.count + chosen];
        parents[node] = above, scores[node] = highest;
        tree.depths[node] = tree.depths[above] + 1, tree.best[node] = -1;
        if (tree.depths[node] < depth && size < nodes)
            tree.expand(node, above, highest, nullptr, (const bf16*)p.tokens + places[node] * p.units);
    }
    return size;
}
