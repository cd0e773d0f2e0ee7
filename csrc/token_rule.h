// Runs the rows of a pass through a rule that reads a state and changes it, token by token (soothsay/model/ops/state_ops.py). A column
// of a state depends on no other column, so blocks of columns are computed one after the other, each from the first row to the
// last one: a block stays in the nearest cache. All sums are over the rows of a column, in one order, whatever stands beside a
// row in its pass.
#pragma once
#include "pool.h"
#include "strands.h"
#include <vector>

namespace {

constexpr int64_t PIECE = 1 << 12;  // channels; for fewer, sharing costs more than the work
constexpr int64_t CHUNK = 32;  // tokens whose inputs of the rule are kept at a time

// The rows and gates of a pass, and the sizes of the states: for each head a matrix [size, columns].
template <class T>
struct Pass {
    const Line<T> line;
    const T* gates;  // [rows, gates_count]
    const int gates_count, heads, size, columns;

    int64_t matrix() const { return int64_t(size) * columns; }
    float* matrices(int64_t slot, int head) const { return line.states->matrices + (slot * heads + head) * matrix(); }
    T* kept_gates(int64_t slot, int64_t node) const {
        return (T*)line.states->gates + (slot * line.states->nodes + node) * gates_count;
    }
    const T* gates_of(const Tokens<T>& tokens, int64_t i) const {
        return tokens.is_kept(i) ? kept_gates(tokens.s.slot, i - tokens.s.advancing) : gates + tokens.row(i) * gates_count;
    }
};

// What a token does to the state of one head: S <- decay S + k delta^T. Its output is q S, read after that.
struct Token {
    const float *q, *k;     // [size]
    const float* v;         // [columns]
    float decay, share;     // delta = share v, or share (v - decay k S) if the rule corrects
    float both;             // k . q
    const float *kept = 0;  // [2, size]: k, and decays row by row. q and k above are times these then, and decay is 1
    const float *decays = 0;  // [size, columns] of all numbers, if the rule has them; decay is 1 then
};

// n channels from `channel` on, after the convolution and SiLU. `bias` [channels] may be null.
template <class T>
void convolved(const Line<T>& line, const T* const* window, const float* bias, int channel, int n, float* out) {
    for (int j = channel; j < channel + n; j += LANES) {
        floats total = bias ? load(bias + j) : floats{};
        for (int tap = 0; tap < line.taps_count; ++tap)
            if (window[tap]) total = fused(load(window[tap] + j), load(line.taps + int64_t(tap) * line.channels + j), total);
        store(out + j - channel, total * sigmoid(total));
    }
}

// What a rule sees of the inputs of a strand's tokens: all channels, after the convolution and SiLU. place(tokens, i) is where those of
// token i go, or null.
template <class T, class Place>
void mix(const Line<T>& line, const float* bias, const Strand& s, Place place) {
    const Tokens<T> tokens{line, s};
    parallel(s.tokens(), PIECE / line.channels + 1, [&](int64_t begin, int64_t end) {
        std::vector<const T*> window(line.taps_count);
        for (int64_t i = begin; i < end; ++i) {
            float* const target = place(tokens, i);
            if (!target) continue;
            tokens.window(i, window.data());
            convolved(line, window.data(), bias, 0, line.channels, target);
        }
    });
}

inline float product(const float* a, const float* b, int n) {
    floats total = {};
    for (int j = 0; j < n; j += LANES) total = fused(load(a + j), load(b + j), total);
    return sum(total);
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// V registers of columns of a state. A source and a target have a number of floats from row to row.
template <int V, bool CORRECTS, bool DECAYS>
struct Columns {
    static constexpr int SIZE = V * LANES;
    const int64_t columns;
    floats delta[V];

    // What a token leaves of a register of row i of the state, but for the decay of all rows.
    floats kept(const float* s, const Token& t, int i, int column) const {
        return DECAYS ? load(s) * load(t.decays + i * columns + column) : load(s);
    }

    // Reads the state before a token: how the token changes it, and the token's output.
    void read(const float* s, int64_t stride, const Token& t, int size, int column, float* out) {
        floats k0[V] = {}, k1[V] = {}, q0[V] = {}, q1[V] = {};
        for (int i = 0; i < size; i += 2, s += 2 * stride) {
            const floats ka = splat(t.k[i]), kb = splat(t.k[i + 1]), qa = splat(t.q[i]), qb = splat(t.q[i + 1]);
            for (int v = 0; v < V; ++v) {
                const int at = column + v * LANES;
                const floats a = kept(s + v * LANES, t, i, at), b = kept(s + stride + v * LANES, t, i + 1, at);
                if (CORRECTS) k0[v] = fused(a, ka, k0[v]), k1[v] = fused(b, kb, k1[v]);
                q0[v] = fused(a, qa, q0[v]), q1[v] = fused(b, qb, q1[v]);
            }
        }
        const floats decay = splat(t.decay), share = splat(t.share), both = splat(t.both);
        for (int v = 0; v < V; ++v) {
            delta[v] = load(t.v + column + v * LANES);
            if (CORRECTS) delta[v] -= decay * (k0[v] + k1[v]);
            delta[v] *= share;
            store(out + column + v * LANES, fused(both, delta[v], decay * (q0[v] + q1[v])));
        }
    }

    // Writes the state after the token that was read.
    void write(const float* s, int64_t stride, const Token& t, int size, int column, float* out, int64_t out_stride) const {
        const float *const written = t.kept ? t.kept : t.k, *const own = t.kept ? t.kept + size : nullptr;
        const floats all = splat(t.decay);
        for (int i = 0; i < size; ++i, s += stride, out += out_stride) {
            const floats k = splat(written[i]), decay = own ? splat(own[i]) : all;
            for (int v = 0; v < V; ++v) {
                const int at = v * LANES;
                store(out + at, fused(k, delta[v], decay * kept(s + at, t, i, column + at)));
            }
        }
    }
};

// One head of a strand. A Rule has
//   CORRECTS and DECAYS, see Token, and room(): the floats that it needs for a token;
//   prepare(tokens, head, begin, end, room, found): finds the tokens from `begin` on;
//   finish(tokens, head, i, token, output): takes a token's output.
template <class Rule, class T>
struct Head {
    const Rule& rule;
    const Pass<T>& p;
    const Strand& s;
    const Tokens<T> tokens;
    const int head, size, columns;
    std::vector<float> within, zeros, room, outputs;
    std::vector<Token> prepared;
    std::vector<std::vector<float>> tiles;  // states on the way down a tree
    std::vector<int64_t> child, sibling;    // of each node the first child and the next sibling, or -1
    float* state;                           // [size, columns]

    Head(const Rule& own, const Pass<T>& pass, const Strand& strand, int number)
        : rule(own), p(pass), s(strand), tokens{pass.line, strand}, head(number), size(pass.size), columns(pass.columns) {
        if (s.slot < 0) within.resize(p.matrix());
        state = s.slot < 0 ? within.data() : p.matrices(s.slot, head);
        if (s.is_new) zeros.resize(int64_t(size) * 2 * LANES);
    }

    void prepare(int64_t begin, int64_t end) {
        room.resize((end - begin) * rule.room());
        outputs.resize((end - begin) * columns);
        prepared.resize(end - begin);
        rule.prepare(tokens, head, begin, end, room.data(), prepared.data());
    }

    // body(block, first column), for all columns.
    template <class Body>
    void each_block(Body body) {
        int column = 0;
        for (; column + 2 * LANES <= columns; column += 2 * LANES) body(Columns<2, Rule::CORRECTS, Rule::DECAYS>{columns}, column);
        for (; column < columns; column += LANES) body(Columns<1, Rule::CORRECTS, Rule::DECAYS>{columns}, column);
    }

    void run() {
        for (int64_t begin = 0; begin < s.advancing; begin += CHUNK)
            advance(begin, begin + CHUNK < s.advancing ? begin + CHUNK : s.advancing);
        if (s.size > s.first_node) descend();
    }

    // The state before a token of the strand: its columns, and the floats from row to row.
    const float* start(bool from_zeros, int column, int width, int64_t& stride) const {
        stride = from_zeros ? width : columns;
        return from_zeros ? zeros.data() : state + column;
    }

    void advance(int64_t begin, int64_t end) {
        prepare(begin, end);
        each_block([&](auto block, int column) {
            if (tiles.empty()) tiles.emplace_back(int64_t(size) * 2 * LANES);
            int64_t stride;
            const float* source = start(s.is_new && !begin, column, block.SIZE, stride);
            for (int64_t i = begin; i < end; ++i) {
                const Token& t = prepared[i - begin];
                block.read(source, stride, t, size, column, &outputs[(i - begin) * columns]);
                const bool last = i + 1 == end;
                float* target = last ? state + column : tiles[0].data();
                block.write(source, stride, t, size, column, target, last ? columns : block.SIZE);
                source = target, stride = last ? columns : block.SIZE;
                for (int64_t m = 0; m < s.num_marks; ++m)
                    if (s.marks[2 * m] == i + 1) copy(source, stride, p.matrices(s.marks[2 * m + 1], head) + column, block.SIZE);
            }
        });
        for (int64_t i = begin; i < end; ++i) finish(i, i - begin);
    }

    void copy(const float* source, int64_t stride, float* target, int width) const {
        for (int i = 0; i < size; ++i)
            std::memcpy(target + int64_t(i) * columns, source + i * stride, width * sizeof(float));
    }

    // All nodes of the tree, each from the state after its parent.
    void descend() {
        prepare(s.advancing, s.advancing + s.size);
        child.assign(s.size, -1), sibling.assign(s.size, -1);
        for (int64_t node = s.size - 1; node > 0; --node) sibling[node] = child[s.parents[node]], child[s.parents[node]] = node;
        each_block([&](auto block, int column) {
            int64_t stride;
            const float* source = start(s.is_new && !s.advancing, column, block.SIZE, stride);
            visit(block, column, 0, source, stride, 0);
        });
        for (int64_t node = s.first_node; node < s.size; ++node) finish(s.advancing + node, node);
    }

    // A node and all nodes below it. The state before it stays as it is. Tiles from `level` on are free.
    template <class Block>
    void visit(Block block, int column, int64_t node, const float* source, int64_t stride, size_t level) {
        for (;;) {
            const Token& t = prepared[node];
            block.read(source, stride, t, size, column, &outputs[node * columns]);
            if (child[node] < 0) return;
            if (tiles.size() <= level) tiles.emplace_back(int64_t(size) * 2 * LANES);
            float* target = tiles[level].data();  // the last child's state may take the place of its parent's
            block.write(source, stride, t, size, column, target, block.SIZE);
            node = child[node];
            for (; sibling[node] >= 0; node = sibling[node]) visit(block, column, node, target, block.SIZE, level + 1);
            source = target, stride = block.SIZE;
        }
    }

    void finish(int64_t i, int64_t number) const {
        if (!tokens.is_kept(i)) rule.finish(tokens, head, i, prepared[number], &outputs[number * columns]);
    }
};

// All heads of all strands. Then keeps what the states, marks and journals need.
template <class Rule, class T>
void run(const Rule& rule, const Pass<T>& p, const std::vector<Strand>& strands) {
    parallel(int64_t(strands.size()) * p.heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) Head<Rule, T>(rule, p, strands[i / p.heads], int(i % p.heads)).run();
    });
    for (const Strand& s : strands) {
        if (s.slot < 0) continue;
        keep_all_inputs(p.line, s);
        for (int64_t node = s.first_node; node < s.size; ++node)
            std::memcpy(p.kept_gates(s.slot, node), p.gates_of({p.line, s}, s.advancing + node), p.gates_count * sizeof(T));
    }
}

}  // namespace
