// Decoder blocks in one call, which runs the other kernels one after the other. A call from Python between two kernels
// takes as long as a small product. In a large model, whose weights fill the caches, a call between two blocks takes as long
// as several products.
#include "kernels.h"

namespace {

// The rows of a pass, and the memory that it reads and writes.
struct Pass {
    const float* const* ropes;  // cosines and sines, then those of local layers
    int64_t rows;
    const int64_t *slot, *keys, *key_begin, *path_rows, *positions, *row_begin, *shared;
    int num_paths;
    const int64_t* plan;
    int64_t slots;
    int format;
    void *first, *second, *third;
};

// Attention, the gated delta rule, or a convolution. `p.first` has their inputs, if these are the norm of the stream, and gets the outputs.
void attend(const soothsay_parts& b, const Pass& p, const void* inputs, int inputs_are_bf16, void* kv) {
    const int half = b.is_bf16, qkv_half = b.qkv_is_bf16;
    const int64_t rows = p.rows, element = qkv_half ? 2 : 4;
    float* third = (float*)p.third;
    soothsay_linear(inputs, inputs_are_bf16, rows, b.qkv, p.second, b.qkv_is_bf16);
    if (const soothsay_delta* d = b.delta) {
        const int64_t width = 2 * (d->key_heads * d->key_size + d->value_heads * d->value_size);
        void* gates = (char*)p.second + rows * width * element;
        soothsay_linear(inputs, inputs_are_bf16, rows, b.gates, gates, half);
        soothsay_delta_rule(p.second, width, gates, half, d, (const soothsay_states*)kv, p.plan, third);
        soothsay_linear(third, 0, rows, b.o, p.first, half);
        return;
    }
    if (b.convolution) {
        soothsay_convolve(p.second, half, rows, 1, b.convolution, (const soothsay_states*)kv, p.plan, third);
        soothsay_linear(third, 0, rows, b.o, p.first, half);
        return;
    }
    const float* const* rope = p.ropes + 2 * b.is_local;
    const int64_t width = int64_t(b.queries + b.gate_heads + 2 * b.keys) * b.d;
    float* attended = (float*)((char*)p.second + (b.gate_heads ? rows * width * element : 0));
    soothsay_rotate_store(p.second, qkv_half, rope[0], rope[1], b.q_norm, b.k_norm, nullptr, p.slot, rows, b.queries,
                          b.gate_heads, b.keys, b.d, p.slots, b.eps, b.scale, third, kv, p.format);
    soothsay_attend(third, kv, p.format, p.keys, p.key_begin, p.path_rows, p.positions, p.row_begin, p.shared, p.num_paths, b.keys,
                    b.keys, b.queries / b.keys, b.d, p.slots, b.softcap, b.window, b.sinks, attended);
    if (b.gate_heads) {
        const int n = b.queries * b.d;
        soothsay_open(attended, (char*)p.second + n * element, qkv_half, width, rows, n);
    }
    soothsay_linear(attended, 0, rows, b.o, p.first, half);
}

void run(const soothsay_parts& b, const Pass& p, const float* x, const void* inputs, int inputs_are_bf16, void* kv,
         float* out) {
    const int hidden = b.hidden, half = b.is_bf16;
    const int64_t rows = p.rows;
    if (!inputs) {
        soothsay_add_norm(x, nullptr, 0, nullptr, b.attention_norm, b.eps, rows, hidden, nullptr, p.first, half);
        inputs = p.first, inputs_are_bf16 = half;
    }
    attend(b, p, inputs, inputs_are_bf16, kv);

    void *normed = p.second, *gate_up = p.third, *inner = p.first, *more = p.second;
    soothsay_add_norm(x, p.first, half, b.attention_post_norm, b.mlp_norm, b.eps, rows, hidden, out, normed, half);
    if (b.mixture) {
        soothsay_mix(normed, half, rows, nullptr, b.mixture, (float*)p.third);
        soothsay_add_norm(out, p.third, 0, b.mlp_post_norm, nullptr, b.eps, rows, hidden, out, nullptr, 0);
        return;
    }
    soothsay_linear(normed, half, rows, b.gate_up, gate_up, half);
    soothsay_gated(gate_up, half, b.activation, rows, b.down->inputs, inner);
    soothsay_linear(inner, half, rows, b.down, more, half);
    soothsay_add_norm(out, more, half, b.mlp_post_norm, nullptr, b.eps, rows, hidden, out, nullptr, 0);
}

}  // namespace

extern "C" void soothsay_blocks(const soothsay_parts* const* blocks, int count, float* const* streams,
                                const void* inputs, int inputs_are_bf16, const float* const* ropes, int64_t rows,
                                const int64_t* slot, const int64_t* keys, const int64_t* key_begin,
                                const int64_t* path_rows, const int64_t* positions, const int64_t* row_begin,
                                const int64_t* shared, int num_paths, const int64_t* plan, void* const* kv, int64_t slots,
                                int format, void* first, void* second, void* third) {
    const Pass pass{ropes,     rows,      slot,   keys,      key_begin, path_rows, positions,
                    row_begin, shared,    num_paths, plan,   slots,     format,    first,     second, third};
    for (int i = 0; i < count; ++i) run(*blocks[i], pass, streams[i], inputs, inputs_are_bf16, kv[i], streams[i + 1]);
}
