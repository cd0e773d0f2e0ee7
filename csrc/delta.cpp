// The gated delta rule (soothsay/model/ops/state_ops.py).
#include "operations.h"
#include "token_rule.h"

namespace {

inline void scaled(float* x, int n, float factor) {
    for (int j = 0; j < n; j += LANES) store(x + j, load(x + j) * factor);
}

template <class T>
struct DeltaRule {
    static constexpr bool CORRECTS = true, DECAYS = false;
    const soothsay_delta& d;
    const Pass<T>& p;
    float* const out;  // or null

    int room() const { return 4 * d.key_size + d.value_size; }

    void prepare(const Tokens<T>& tokens, int head, int64_t begin, int64_t end, float* room, Token* found) const {
        const int dk = d.key_size, dv = d.value_size, keys = d.key_heads * dk;
        const int key_head = d.tiled ? head % d.key_heads : head / (d.value_heads / d.key_heads);
        const float rate = std::exp(d.log_rates[head]);
        std::vector<const T*> window(d.taps_count);
        for (int64_t i = begin; i < end; ++i, room += this->room(), ++found) {
            float *q = room, *k = q + dk, *kept = k + dk, *v = kept + 2 * dk;
            tokens.window(i, window.data());
            convolved(p.line, window.data(), nullptr, key_head * dk, dk, q);
            convolved(p.line, window.data(), nullptr, keys + key_head * dk, dk, k);
            convolved(p.line, window.data(), nullptr, 2 * keys + head * dv, dv, v);
            scaled(q, dk, 1.0f / std::sqrt(product(q, q, dk) + 1e-6f) / std::sqrt(float(dk)));
            scaled(k, dk, 1.0f / std::sqrt(product(k, k, dk) + 1e-6f));
            const T *gates = p.gates_of(tokens, i), *steps = gates + d.value_heads + head * d.decays;
            const float* offsets = d.offsets + head * d.decays;
            auto decay = [&](int j) { return std::exp(-rate * softplus(widen(steps[j]) + offsets[j])); };
            *found = {q, k, v, 1, 1 / (1 + std::exp(-widen(gates[head]))), product(k, q, dk)};
            if (d.decays == 1) {
                found->decay = decay(0);
                continue;
            }
            for (int j = 0; j < dk; ++j) {
                kept[j] = k[j], kept[dk + j] = decay(j);
                q[j] *= kept[dk + j], k[j] *= kept[dk + j];
            }
            found->kept = kept;
        }
    }

    // An output [dv]: normed, and times its gate.
    void finish(const Tokens<T>& tokens, int head, int64_t i, const Token&, const float* found) const {
        if (!out) return;
        const int dv = d.value_size;
        const int64_t row = tokens.row(i);
        const T* z = p.line.rows + row * p.line.stride + p.line.channels + head * dv;
        float* target = out + (row * d.value_heads + head) * dv;
        const float norm = 1.0f / std::sqrt(product(found, found, dv) / dv + d.eps);
        for (int j = 0; j < dv; j += LANES) {
            const floats gate = load(z + j);
            const floats open = d.sigmoid ? sigmoid(gate) : gate * sigmoid(gate);
            store(target + j, load(found + j) * norm * load(d.scale + j) * open);
        }
    }
};

template <class T>
void run(const T* rows, int64_t stride, const T* gates, const soothsay_delta& d, const soothsay_states* states,
         const int64_t* plan, float* out) {
    const int channels = 2 * d.key_heads * d.key_size + d.value_heads * d.value_size;
    const Line<T> line{rows, stride, channels, d.taps_count, d.taps, states};
    const Pass<T> pass{line, gates, d.value_heads * (1 + d.decays), d.value_heads, d.key_size, d.value_size};
    run(DeltaRule<T>{d, pass, out}, pass, read_strands(plan));
}

}  // namespace

extern "C" void soothsay_delta_rule(const void* rows, int64_t stride, const void* gates, int is_bf16,
                                    const soothsay_delta* delta, const soothsay_states* states, const int64_t* plan,
                                    float* out) {
    if (is_bf16) run((const bf16*)rows, stride, (const bf16*)gates, *delta, states, plan, out);
    else run((const float*)rows, stride, (const float*)gates, *delta, states, plan, out);
}
