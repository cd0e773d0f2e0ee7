// The gated delta rule (soothsay/model/delta_rule.py). A column of a state depends on no other column, so blocks of columns
// are computed one after the other, each from the first row to the last one: a block stays in the nearest cache. All sums are
// over the rows of a column, in one order, whatever stands beside a row in its pass.
#include "pool.h"
#include "strands.h"
#include <memory>
#include <vector>

namespace {

constexpr int64_t CHUNK = 32;  // tokens whose inputs of the rule are kept at a time

template <class T>
struct Pass {
    const Line<T> line;
    const T* gates;
    const soothsay_delta& d;
    float* out;  // or null

    int keys() const { return d.key_heads * d.key_size; }
    int values() const { return d.value_heads * d.value_size; }
    int64_t matrix() const { return int64_t(d.key_size) * d.value_size; }
    float* matrices(int64_t slot, int head) const {
        return line.states->matrices + (slot * d.value_heads + head) * matrix();
    }
    T* kept_gates(int64_t slot, int64_t node) const {
        return (T*)line.states->gates + (slot * line.states->nodes + node) * 2 * d.value_heads;
    }
    const T* gates_of(const Tokens<T>& tokens, int64_t i) const {
        return tokens.is_kept(i) ? kept_gates(tokens.s.slot, i - tokens.s.advancing) : gates + tokens.row(i) * 2 * d.value_heads;
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
    const Line<T>& line = p.line;
    for (int j = channel; j < channel + n; j += LANES) {
        floats total = {};
        for (int tap = 0; tap < line.taps_count; ++tap)
            if (window[tap]) total = fused(load(window[tap] + j), load(line.taps + int64_t(tap) * line.channels + j), total);
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
void prepare(const Pass<T>& p, const Tokens<T>& tokens, int head, int64_t begin, int64_t end, float* room, Token* found) {
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
        const T* gates = p.gates_of(tokens, i);
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
        : p(pass), s(strand), tokens{pass.line, strand}, head(number), dk(pass.d.key_size), dv(pass.d.value_size) {
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
        prepare(p, tokens, head, begin, end, room.data(), prepared.data());
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
        prepare(p, tokens, head, s.advancing, s.advancing + s.size, room.data(), prepared.data());
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
        const T* z = p.line.rows + row * p.line.stride + p.line.channels + head * dv;
        float* out = p.out + row * p.values() + head * dv;
        const float norm = 1.0f / std::sqrt(product(found, found, dv) / dv + p.d.eps);
        for (int j = 0; j < dv; j += LANES) {
            const floats gate = load(z + j);
            store(out + j, load(found + j) * norm * load(p.d.scale + j) * (gate * sigmoid(gate)));
        }
    }
};

template <class T>
void run(const Pass<T>& p, const int64_t* plan) {
    const std::vector<Strand> strands = read_strands(plan);
    const int heads = p.d.value_heads;
    parallel(int64_t(strands.size()) * heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) Head<T>(p, strands[i / heads], int(i % heads)).run();
    });
    for (const Strand& s : strands) {
        if (s.slot < 0) continue;
        keep_all_inputs(p.line, s);
        for (int64_t node = s.first_node; node < s.size; ++node)
            std::memcpy(p.kept_gates(s.slot, node), p.gates_of({p.line, s}, s.advancing + node), 2 * heads * sizeof(T));
    }
}

template <class T>
void run(const T* rows, int64_t stride, const T* gates, const soothsay_delta& d, const soothsay_states* states,
         const int64_t* plan, float* out) {
    const int channels = 2 * d.key_heads * d.key_size + d.value_heads * d.value_size;
    run(Pass<T>{{rows, stride, channels, d.taps_count, d.taps, states}, gates, d, out}, plan);
}

}  // namespace

extern "C" void soothsay_delta_rule(const void* rows, int64_t stride, const void* gates, int is_bf16,
                                    const soothsay_delta* delta, const soothsay_states* states, const int64_t* plan,
                                    float* out) {
    if (is_bf16) run((const bf16*)rows, stride, (const bf16*)gates, *delta, states, plan, out);
    else run((const float*)rows, stride, (const float*)gates, *delta, states, plan, out);
}
