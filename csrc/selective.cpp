// Mamba (soothsay/model/ops/state_ops.py): the scan, and the convolution that its steps, B and C are made of.
#include "operations.h"
#include "token_rule.h"

namespace {

// The channels of a "head" lie together, and have a state each: a column.
template <class T>
struct SelectiveRule {
    static constexpr bool CORRECTS = false, DECAYS = true;
    const soothsay_selective& w;
    const Pass<T>& p;
    float* const out;  // [rows, heads * width], or null

    int room() const { return (2 + w.width) * w.state_size + 2 * w.width; }

    void prepare(const Tokens<T>& tokens, int head, int64_t begin, int64_t end, float* room, Token* found) const {
        const int n = w.state_size, width = w.width, size = w.heads * width, first = head * width;
        std::vector<const T*> window(w.taps_count);
        std::vector<float> steps(width);
        for (int64_t i = begin; i < end; ++i, room += this->room(), ++found) {
            float *v = room, *x = v + width, *k = x + width, *q = k + n, *decays = q + n;
            tokens.window(i, window.data());
            convolved(p.line, window.data(), w.bias, first, width, x);
            const T* gates = p.gates_of(tokens, i);
            for (int j = 0; j < width; ++j) steps[j] = softplus(widen(gates[first + j]) + w.offsets[first + j]);
            for (int j = 0; j < 2 * n; ++j) k[j] = widen(gates[size + j]);
            for (int j = 0; j < width; j += LANES) store(v + j, load(&steps[j]) * load(x + j));
            for (int row = 0; row < n; ++row)
                for (int j = 0; j < width; j += LANES)
                    store(decays + row * width + j, exp(-(load(w.rates + int64_t(row) * size + first + j) * load(&steps[j]))));
            *found = {q, k, v, 1, 1, product(k, q, n), nullptr, decays};
        }
    }

    // Outputs [width], with their parts of the inputs, times their gates.
    void finish(const Tokens<T>& tokens, int head, int64_t i, const Token& t, const float* found) const {
        if (!out) return;
        const int width = w.width, first = head * width;
        const int64_t row = tokens.row(i);
        const T* z = p.line.rows + row * p.line.stride + p.line.channels + first;
        float* target = out + row * p.line.channels + first;
        for (int j = 0; j < width; j += LANES) {
            const floats gate = load(z + j), all = fused(load(w.skips + first + j), load(t.v + width + j), load(found + j));
            store(target + j, all * (gate * sigmoid(gate)));
        }
    }
};

template <class T>
Line<T> line_of(const T* rows, int64_t stride, const soothsay_selective& w, const soothsay_states* states) {
    return {rows, stride, w.heads * w.width, w.taps_count, w.taps, states};
}

template <class T>
void scan(const T* rows, int64_t stride, const T* gates, const soothsay_selective& w, const soothsay_states* states,
          const int64_t* plan, float* out) {
    const Line<T> line = line_of(rows, stride, w, states);
    const Pass<T> pass{line, gates, line.channels + 2 * w.state_size, w.heads, w.state_size, w.width};
    run(SelectiveRule<T>{w, pass, out}, pass, read_strands(plan));
}

template <class T>
void mix(const T* rows, int64_t stride, const soothsay_selective& w, const soothsay_states* states, const int64_t* plan, float* out) {
    const Line<T> line = line_of(rows, stride, w, states);
    for (const Strand& s : read_strands(plan))
        mix(line, w.bias, s, [&](auto& tokens, int64_t i) { return tokens.is_kept(i) ? nullptr : out + tokens.row(i) * line.channels; });
}

}  // namespace

extern "C" void soothsay_scan(const void* rows, int64_t stride, const void* gates, int is_bf16, const soothsay_selective* weights,
                              const soothsay_states* states, const int64_t* plan, float* out) {
    if (is_bf16) scan((const bf16*)rows, stride, (const bf16*)gates, *weights, states, plan, out);
    else scan((const float*)rows, stride, (const float*)gates, *weights, states, plan, out);
}

extern "C" void soothsay_convolved(const void* rows, int64_t stride, int is_bf16, const soothsay_selective* weights,
                                   const soothsay_states* states, const int64_t* plan, float* out) {
    if (is_bf16) mix((const bf16*)rows, stride, *weights, states, plan, out);
    else mix((const float*)rows, stride, *weights, states, plan, out);
}
