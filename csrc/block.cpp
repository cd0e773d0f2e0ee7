// A decoder block in one call. It is nothing but the other kernels, one after the other: between two of them Python takes
// as long as a small product does.
#include "kernels.h"

namespace {

void multiply(const void* x, int x_is_bf16, int64_t rows, const soothsay_weights& w, void* out, int out_is_bf16) {
    soothsay_linear(x, x_is_bf16, rows, w.data, w.bits, w.scales, w.zeros, w.bias, w.inputs, w.outputs, w.group, out,
                    out_is_bf16);
}

}  // namespace

extern "C" void soothsay_block(const soothsay_parts* block, const float* x, const void* inputs, int inputs_are_bf16,
                               const float* cos, const float* sin, int64_t rows, const int64_t* slot,
                               const int64_t* keys, const int64_t* key_begin, const int64_t* path_rows,
                               const int64_t* positions, const int64_t* row_begin, const int64_t* shared, int num_paths,
                               void* kv, int64_t slots, void* first, void* second, void* third, float* out) {
    const soothsay_parts& b = *block;
    const int hidden = b.o.outputs, half = b.is_bf16;
    if (!inputs) {
        soothsay_add_norm(x, nullptr, 0, nullptr, b.attention_norm, b.eps, rows, hidden, nullptr, first, half);
        inputs = first, inputs_are_bf16 = half;
    }
    void *qkv = second, *q = third, *attended = second, *delta = first;
    multiply(inputs, inputs_are_bf16, rows, b.qkv, qkv, half);
    soothsay_rotate_store(qkv, half, cos, sin, b.q_norm, b.k_norm, slot, rows, b.queries, b.keys, b.d, slots, b.eps,
                          b.scale, (float*)q, kv);
    soothsay_attend((float*)q, kv, half, keys, key_begin, path_rows, positions, row_begin, shared, num_paths, b.keys,
                    b.queries / b.keys, b.d, slots, b.softcap, b.window, (float*)attended);
    multiply(attended, 0, rows, b.o, delta, half);

    void *normed = second, *gate_up = third, *inner = first, *more = second;
    soothsay_add_norm(x, delta, half, b.attention_post_norm, b.mlp_norm, b.eps, rows, hidden, out, normed, half);
    multiply(normed, half, rows, b.gate_up, gate_up, half);
    soothsay_gated(gate_up, half, b.activation, rows, b.down.inputs, inner);
    multiply(inner, half, rows, b.down, more, half);
    soothsay_add_norm(out, more, half, b.mlp_post_norm, nullptr, b.eps, rows, hidden, out, nullptr, 0);
}
