// The gated delta rule (soothsay/model/delta_rule.py). A column of a state depends on no other column, so blocks of columns
// are computed one after the other, each from the first row to the last one: a block stays in the nearest cache. All sums are
// over the rows of a column, in one order, whatever stands beside a row in its pass.
#include "kernels.h"
#include "pool.h"
#include "simd.h"
#include <memory>
#include <vector>

namespace {

constexpr int64_t CHUNK = 32;  // tokens whose inputs of the rule are kept at a time

// A strand of the plan; see kernels.h.
struct Strand {
    int64_t first, advancing, first_node, size, slot, is_new, num_marks;
    const int64_t *parents, *marks;

    int64_t rows() const { return advancing + size - first_node; }
};

std::vector<Strand> read(const int64_t* plan) {
    std::vector<Strand> strands(*plan++);
    for (Strand& s : strands) {
        s = {plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plan[6], plan + 7, plan + 7 + plan[3]};
        plan = s.marks + 2 * s.num_marks;
    }
    return strands;
}

template <class T>
struct Pass {
    const T *rows, *gates;
    int64_t stride;  // elements from row to row
    const soothsay_delta& d;
    const soothsay_states* states;  // or null
    float* out;                     // or null

    int keys() const { return d.key_heads * d.key_size; }
    int values() const { return d.value_heads * d.value_size; }
    int channels() const { return 2 * keys() + values(); }
    int64_t matrix() const { return int64_t(d.key_size) * d.value_size; }
    float* matrices(int64_t slot, int head) const {
        return states->matrices + (slot * d.value_heads + head) * matrix();
    }
    T* inputs(int64_t slot) const { return (T*)states->inputs + slot * (d.taps_count - 1) * channels(); }
    T* journal(int64_t slot, int64_t node) const {
        return (T*)states->journal + (slot * states->nodes + node) * channels();
    }
    T* kept_gates(int64_t slot, int64_t node) const {
        return (T*)states->gates + (slot * states->nodes + node) * 2 * d.value_heads;
    }
};

// Tokens of a strand by number: those that advance its state, then the nodes of its tree.
template <class T>
struct Tokens {
    const Pass<T>& p;
    const Strand& s;

    bool is_node(int64_t i) const { return i >= s.advancing; }
    bool is_kept(int64_t i) const { return is_node(i) && i - s.advancing < s.first_node; }  // of an earlier pass
    int64_t row(int64_t i) const { return s.first + i - (is_node(i) ? s.first_node : 0); }
    const T* inputs(int64_t i) const {
        return is_kept(i) ? p.journal(s.slot, i - s.advancing) : p.rows + row(i) * p.stride;
    }
    const T* gates(int64_t i) const {
        return is_kept(i) ? p.kept_gates(s.slot, i - s.advancing) : p.gates + row(i) * 2 * p.d.value_heads;
    }
    // The token before; below zero, those before the strand, -1 being the last of them.
    int64_t before(int64_t i) const {
        if (!is_node(i)) return i - 1;
        const int64_t parent = s.parents[i - s.advancing];
        return parent < 0 ? s.advancing - 1 : s.advancing + parent;
    }
    // The channels of the last tokens up to i, the latest last; null where there is none.
    void window(int64_t i, const T** found) const {
        for (int tap = p.d.taps_count - 1; tap >= 0; --tap, i = i < 0 ? i - 1 : before(i))
            found[tap] = i >= 0     ? inputs(i)
                         : s.is_new ? nullptr
                                    : p.inputs(s.slot) + (p.d.taps_count - 1 + i) * p.channels();
    }
};

// What the rule reads of a token, for one head.
struct Token {
    const float *q, *k, *v;
    float decay, beta, both;  // both: k . q
};

// n channels from `channel` on, after convolution and SiLU.
template <class T>
void convolved(const Pass<T>& p, const T* const* window, int channel, int n, float* out) {
    const int all = p.channels();
    for (int j = channel; j < channel + n; j += LANES) {
        floats total = {};
        for (int tap = 0; tap < p.d.taps_count; ++tap)
            if (window[tap]) total = fused(load(window[tap] + j), load(p.d.taps + int64_t(tap) * all + j), total);
        store(out + j - channel, total * sigmoid(total));
    }
}

float product(const float* a, const float* b, int n) {
    floats total = {};
    for (int j = 0; j < n; j += LANES) total = fused(load(a + j), load(b + j), total);
    return sum(total);
}

void scaled(float* x, int n, float factor) {
    for (int j = 0; j < n; j += LANES) store(x + j, load(x + j) * factor);
}

// The tokens from `begin` on of one head. `room` has 2 key_size + value_size floats for each.
template <class T>
void prepare(const Tokens<T>& tokens, int head, int64_t begin, int64_t end, float* room, Token* found) {
    const Pass<T>& p = tokens.p;
    const soothsay_delta& d = p.d;
    const int dk = d.key_size, dv = d.value_size, key_head = d.tiled ? head % d.key_heads : head / (d.value_heads / d.key_heads);
    const float rate = std::exp(d.log_rates[head]);
    std::vector<const T*> window(d.taps_count);
    for (int64_t i = begin; i < end; ++i, room += 2 * dk + dv, ++found) {
        float *q = room, *k = room + dk, *v = room + 2 * dk;
        tokens.window(i, window.data());
        convolved(p, window.data(), key_head * dk, dk, q);
        convolved(p, window.data(), p.keys() + key_head * dk, dk, k);
        convolved(p, window.data(), 2 * p.keys() + head * dv, dv, v);
        scaled(q, dk, 1.0f / std::sqrt(product(q, q, dk) + 1e-6f) / std::sqrt(float(dk)));
        scaled(k, dk, 1.0f / std::sqrt(product(k, k, dk) + 1e-6f));
        const T* gates = tokens.gates(i);
        const float x = widen(gates[d.value_heads + head]) + d.offsets[head];
        const float softplus = x > 20 ? x : std::log1p(std::exp(x));
        *found = {q, k, v, std::exp(-rate * softplus), 1 / (1 + std::exp(-widen(gates[head]))), product(k, q, dk)};
    }
}

// V registers of columns of a state. A source and a target have a number of floats from row to row.
template <int V>
struct Columns {
    static constexpr int SIZE = V * LANES;
    floats delta[V];

    // Reads the state before a token: how the token changes it, and the token's output.
    void read(const float* s, int64_t stride, const Token& t, int dk, int column, float* out) {
        floats k0[V] = {}, k1[V] = {}, q0[V] = {}, q1[V] = {};
        for (int i = 0; i < dk; i += 2, s += 2 * stride) {
            const floats ka = splat(t.k[i]), kb = splat(t.k[i + 1]), qa = splat(t.q[i]), qb = splat(t.q[i + 1]);
            for (int v = 0; v < V; ++v) {
                const floats a = load(s + v * LANES), b = load(s + stride + v * LANES);
                k0[v] = fused(a, ka, k0[v]), k1[v] = fused(b, kb, k1[v]);
                q0[v] = fused(a, qa, q0[v]), q1[v] = fused(b, qb, q1[v]);
            }
        }
        const floats decay = splat(t.decay), beta = splat(t.beta), both = splat(t.both);
        for (int v = 0; v < V; ++v) {
            delta[v] = beta * (load(t.v + column + v * LANES) - decay * (k0[v] + k1[v]));
            store(out + column + v * LANES, fused(both, delta[v], decay * (q0[v] + q1[v])));
        }
    }

    // Writes the state after the token that was read.
    void write(const float* s, int64_t stride, const Token& t, int dk, float* out, int64_t out_stride) const {
        const floats decay = splat(t.decay);
        for (int i = 0; i < dk; ++i, s += stride, out += out_stride) {
            const floats k = splat(t.k[i]);
            for (int v = 0; v < V; ++v) store(out + v * LANES, fused(k, delta[v], decay * load(s + v * LANES)));
        }
    }
};

// One head of a strand.
template <class T>
struct Head {
    const Pass<T>& p;
    const Strand& s;
    const Tokens<T> tokens;
    const int head, dk, dv;
    std::vector<float> within, zeros, room, outputs;
    std::vector<Token> prepared;
    std::vector<std::vector<float>> tiles;  // states on the way down a tree
    std::vector<int64_t> child, sibling;    // of each node the first child and the next sibling, or -1
    float* state;                           // [dk, dv]

    Head(const Pass<T>& pass, const Strand& strand, int number)
        : p(pass), s(strand), tokens{pass, strand}, head(number), dk(pass.d.key_size), dv(pass.d.value_size) {
        if (s.slot < 0) within.resize(p.matrix());
        state = s.slot < 0 ? within.data() : p.matrices(s.slot, head);
        if (s.is_new) zeros.resize(int64_t(dk) * 2 * LANES);
    }

    void make_room(int64_t count) {
        room.resize(count * (2 * dk + dv));
        outputs.resize(count * dv);
        prepared.resize(count);
    }

    // body(columns, first column), for all columns.
    template <class Body>
    void each_block(Body body) {
        int column = 0;
        for (; column + 2 * LANES <= dv; column += 2 * LANES) body(Columns<2>(), column);
        for (; column < dv; column += LANES) body(Columns<1>(), column);
    }

    void run() {
        for (int64_t begin = 0; begin < s.advancing; begin += CHUNK)
            advance(begin, begin + CHUNK < s.advancing ? begin + CHUNK : s.advancing);
        if (s.size > s.first_node) descend();
    }

    // The state before a token of the strand: its columns, and the floats from row to row.
    const float* start(bool from_zeros, int column, int size, int64_t& stride) const {
        stride = from_zeros ? size : dv;
        return from_zeros ? zeros.data() : state + column;
    }

    void advance(int64_t begin, int64_t end) {
        make_room(end - begin);
        prepare(tokens, head, begin, end, room.data(), prepared.data());
        each_block([&](auto block, int column) {
            if (tiles.empty()) tiles.emplace_back(int64_t(dk) * 2 * LANES);
            int64_t stride;
            const float* source = start(s.is_new && !begin, column, block.SIZE, stride);
            for (int64_t i = begin; i < end; ++i) {
                const Token& t = prepared[i - begin];
                block.read(source, stride, t, dk, column, &outputs[(i - begin) * dv]);
                const bool last = i + 1 == end;
                float* target = last ? state + column : tiles[0].data();
                block.write(source, stride, t, dk, target, last ? dv : block.SIZE);
                source = target, stride = last ? dv : block.SIZE;
                for (int64_t m = 0; m < s.num_marks; ++m)
                    if (s.marks[2 * m] == i + 1) copy(source, stride, p.matrices(s.marks[2 * m + 1], head) + column, block.SIZE);
            }
        });
        for (int64_t i = begin; i < end; ++i) finish(i, &outputs[(i - begin) * dv]);
    }

    void copy(const float* source, int64_t stride, float* target, int size) const {
        for (int i = 0; i < dk; ++i) std::memcpy(target + int64_t(i) * dv, source + i * stride, size * sizeof(float));
    }

    // All nodes of the tree, each from the state after its parent.
    void descend() {
        make_room(s.size);
        prepare(tokens, head, s.advancing, s.advancing + s.size, room.data(), prepared.data());
        child.assign(s.size, -1), sibling.assign(s.size, -1);
        for (int64_t node = s.size - 1; node > 0; --node) sibling[node] = child[s.parents[node]], child[s.parents[node]] = node;
        each_block([&](auto block, int column) {
            int64_t stride;
            const float* source = start(s.is_new && !s.advancing, column, block.SIZE, stride);
            visit(block, column, 0, source, stride, 0);
        });
        for (int64_t node = s.first_node; node < s.size; ++node) finish(s.advancing + node, &outputs[node * dv]);
    }

    // A node and all nodes below it. The state before it stays as it is. Tiles from `level` on are free.
    template <class Block>
    void visit(Block block, int column, int64_t node, const float* source, int64_t stride, size_t level) {
        for (;;) {
            const Token& t = prepared[node];
            block.read(source, stride, t, dk, column, &outputs[node * dv]);
            if (child[node] < 0) return;
            if (tiles.size() <= level) tiles.emplace_back(int64_t(dk) * 2 * LANES);
            float* target = tiles[level].data();  // the last child's state may take the place of its parent's
            block.write(source, stride, t, dk, target, block.SIZE);
            node = child[node];
            for (; sibling[node] >= 0; node = sibling[node]) visit(block, column, node, target, block.SIZE, level + 1);
            source = target, stride = block.SIZE;
        }
    }

    // A token's output [dv]: normed, and times its gate.
    void finish(int64_t i, const float* found) const {
        if (!p.out || tokens.is_kept(i)) return;
        const int64_t row = tokens.row(i);
        const T* z = p.rows + row * p.stride + p.channels() + head * dv;
        float* out = p.out + row * p.values() + head * dv;
        const float norm = 1.0f / std::sqrt(product(found, found, dv) / dv + p.d.eps);
        for (int j = 0; j < dv; j += LANES) {
            const floats gate = load(z + j);
            store(out + j, load(found + j) * norm * load(p.d.scale + j) * (gate * sigmoid(gate)));
        }
    }
};

// Keeps the last inputs of the convolution after `count` tokens that advance a strand's state.
template <class T>
void keep_inputs(const Pass<T>& p, const Strand& s, int64_t count, int64_t slot) {
    const int kept = p.d.taps_count - 1, channels = p.channels();
    std::vector<const T*> window(p.d.taps_count);
    Tokens<T>{p, s}.window(count - 1, window.data());
    std::vector<T> copies(int64_t(kept) * channels);  // since the slot may be where they come from
    for (int tap = 0; tap < kept; ++tap)
        if (window[tap + 1]) std::memcpy(&copies[int64_t(tap) * channels], window[tap + 1], channels * sizeof(T));
    std::memcpy(p.inputs(slot), copies.data(), copies.size() * sizeof(T));
}

template <class T>
void run(const Pass<T>& p, const int64_t* plan) {
    const std::vector<Strand> strands = read(plan);
    const int heads = p.d.value_heads;
    parallel(int64_t(strands.size()) * heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) Head<T>(p, strands[i / heads], int(i % heads)).run();
    });
    for (const Strand& s : strands) {
        if (s.slot < 0) continue;
        for (int64_t m = 0; m < s.num_marks; ++m) keep_inputs(p, s, s.marks[2 * m], s.marks[2 * m + 1]);
        if (s.advancing) keep_inputs(p, s, s.advancing, s.slot);
        parallel(s.size - s.first_node, 4, [&](int64_t begin, int64_t end) {
            for (int64_t node = s.first_node + begin; node < s.first_node + end; ++node) {
                const int64_t row = s.first + s.advancing + node - s.first_node;
                std::memcpy(p.journal(s.slot, node), p.rows + row * p.stride, p.channels() * sizeof(T));
                std::memcpy(p.kept_gates(s.slot, node), p.gates + row * 2 * heads, 2 * heads * sizeof(T));
            }
        });
    }
}

}  // namespace

extern "C" void soothsay_delta_rule(const void* rows, int64_t stride, const void* gates, int is_bf16,
                                    const soothsay_delta* delta, const soothsay_states* states, const int64_t* plan,
                                    float* out) {
    if (is_bf16) run<bf16>({(const bf16*)rows, (const bf16*)gates, stride, *delta, states, out}, plan);
    else run<float>({(const float*)rows, (const float*)gates, stride, *delta, states, out}, plan);
}
