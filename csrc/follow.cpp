// Follows the target's draws along draft trees: the twin of the verifier `match` (soothsay/core/verify.py) where a draw needs logits
// and noise alone.
#include "kernels.h"
#include "largest.h"
#include "noise.h"
#include "pool.h"
#include <cmath>
#include <vector>

namespace {

// A tree of a plan; see kernels.h.
struct Tree {
    int64_t row, size, seed, position;
    const int64_t *tokens, *parents;

    // Reads a tree at `plan`, and moves that to the next one.
    explicit Tree(const int64_t*& plan)
        : row(plan[0]), size(plan[1]), seed(plan[2]), position(plan[3]), tokens(plan + 4), parents(tokens + size) {
        plan = parents + size;
    }

    // The child of a node with this token; 0: there is none.
    int64_t child(int64_t node, int64_t token) const {
        for (int64_t i = node + 1; i < size; ++i)
            if (parents[i] == node && tokens[i] == token) return i;
        return 0;
    }
};

// The draw at a row of logits. -1: there is no finite number.
int64_t drawn(const float* x, int64_t width, float temperature, const Tree& tree, int64_t depth) {
    float value;
    int64_t place;
    if (temperature == 0) soothsay_largest(x, nullptr, 1, width, 1, &value, &place);
    else {
        const Key key = Key::of(tree.seed, tree.position + depth);
        const int64_t words[2] = {key.first, key.second};
        soothsay_race(x, &temperature, words, 1, width, 1, &value, &place);
    }
    return std::isfinite(value) ? place : -1;
}

// Writes the number of accepted nodes (-1: a draw is open), these nodes, and the last draw.
void follow(const float* logits, int64_t width, const Tree& tree, float temperature, int64_t* out) {
    int64_t node = 0, depth = 0;
    do {
        const int64_t token = drawn(logits + (tree.row + node) * width, width, temperature, tree, depth);
        out[0] = token < 0 ? -1 : depth;
        if (token < 0) return;
        node = tree.child(node, token);
        out[++depth] = node ? node : token;
    } while (node);
}

}  // namespace

extern "C" void soothsay_follow(const float* logits, int64_t width, const int64_t* plan, const float* temperatures,
                                int64_t count, int64_t* out) {
    std::vector<Tree> trees;
    std::vector<int64_t*> places;
    for (int64_t i = 0; i < count; ++i) {
        trees.emplace_back(plan);
        places.push_back(out);
        out += trees.back().size + 1;
    }
    parallel(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) follow(logits, width, trees[i], temperatures[i], places[i]);
    });
}
