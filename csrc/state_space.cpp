// Mamba-2 (soothsay/model/ops/state_ops.py).
#include "operations.h"
#include "token_rule.h"

namespace {

template <class T>
struct StateSpaceRule {
    static constexpr bool CORRECTS = false, DECAYS = false;
    const soothsay_state_space& w;
    const Pass<T>& p;
    const std::vector<Strand>& strands;
    const std::vector<float>& mixed;     // [tokens of all strands, channels]
    const std::vector<int64_t>& firsts;  // of each strand, the number of its first token in `mixed`
    float* const out;                    // [rows, heads * head_size], or null

    int room() const { return 0; }

    void prepare(const Tokens<T>& tokens, int head, int64_t begin, int64_t end, float*, Token* found) const {
        const int size = w.heads * w.head_size, group = head / (w.heads / w.groups), n = w.state_size;
        const float rate = std::exp(w.log_rates[head]);
        const float* row = &mixed[(firsts[&tokens.s - strands.data()] + begin) * p.line.channels];
        for (int64_t i = begin; i < end; ++i, row += p.line.channels, ++found) {
            const float *k = row + size + group * n, *q = k + w.groups * n;
            const float step = softplus(widen(p.gates_of(tokens, i)[head]) + w.offsets[head]);
            *found = {q, k, row + head * w.head_size, std::exp(-rate * step), step, product(k, q, n)};
        }
    }

    // An output [head_size], with its part of the input.
    void finish(const Tokens<T>& tokens, int head, int64_t i, const Token& t, const float* found) const {
        if (!out) return;
        float* target = out + (tokens.row(i) * w.heads + head) * w.head_size;
        for (int j = 0; j < w.head_size; j += LANES) store(target + j, fused(splat(w.skips[head]), load(t.v + j), load(found + j)));
    }
};

// Multiplies the outputs of rows by their gates, and norms those of each group of heads.
template <class T>
void open_and_norm(const Pass<T>& p, const soothsay_state_space& w, int64_t rows, float* out) {
    const int size = w.heads * w.head_size, n = size / w.groups;
    parallel(rows, PIECE / size + 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* z = p.line.rows + row * p.line.stride + p.line.channels;
            for (int first = 0; first < size; first += n) {
                float* x = out + row * size + first;
                auto open = [&] {
                    for (int j = 0; j < n; j += LANES) {
                        const floats gate = load(z + first + j);
                        store(x + j, load(x + j) * (gate * sigmoid(gate)));
                    }
                };
                if (!w.scale || !w.norm_first) open();
                if (!w.scale) continue;
                const float norm = 1.0f / std::sqrt(product(x, x, n) / n + w.eps);
                for (int j = 0; j < n; j += LANES) store(x + j, load(x + j) * norm * load(w.scale + first + j));
                if (w.norm_first) open();
            }
        }
    });
}

template <class T>
void run(const T* rows, int64_t count, int64_t stride, const T* steps, const soothsay_state_space& w,
         const soothsay_states* states, const int64_t* plan, float* out) {
    const int channels = w.heads * w.head_size + 2 * w.groups * w.state_size;
    const Line<T> line{rows, stride, channels, w.taps_count, w.taps, states};
    const Pass<T> pass{line, steps, w.heads, w.heads, w.state_size, w.head_size};
    const std::vector<Strand> strands = read_strands(plan);
    std::vector<int64_t> firsts;
    int64_t tokens = 0;
    for (const Strand& s : strands) firsts.push_back(tokens), tokens += s.tokens();
    std::vector<float> mixed(tokens * channels);
    for (size_t number = 0; number < strands.size(); ++number)
        mix(line, w.bias, strands[number], [&](auto&, int64_t i) { return &mixed[(firsts[number] + i) * channels]; });
    run(StateSpaceRule<T>{w, pass, strands, mixed, firsts, out}, pass, strands);
    if (out) open_and_norm(pass, w, count, out);
}

}  // namespace

extern "C" void soothsay_run_state_space(const void* rows, int64_t count, int64_t stride, const void* steps, int is_bf16,
                                         const soothsay_state_space* weights, const soothsay_states* states,
                                         const int64_t* plan, float* out) {
    if (is_bf16) run((const bf16*)rows, count, stride, (const bf16*)steps, *weights, states, plan, out);
    else run((const float*)rows, count, stride, (const float*)steps, *weights, states, plan, out);
}
