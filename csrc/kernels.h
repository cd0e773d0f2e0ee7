// What the library offers to Python and to its own parts. Rows are contiguous; those that are bfloat16 where a flag says
// so are float otherwise.
#pragma once
#include <cstdint>

extern "C" {

// Whether this processor has what the library was compiled for.
int soothsay_runs_here();

// total [rows, n] = x + delta (or delta's norm times `post`); normed = total's norm times `weight`. Any of delta, post
// and weight may be null; without delta nothing is written to `total`, which may be x.
void soothsay_add_norm(const float* x, const void* delta, int delta_is_bf16, const float* post, const float* weight,
                       float eps, int64_t rows, int n, float* total, void* normed, int normed_is_bf16);

// qkv [rows, queries + 2 keys, d]; cos, sin [rows, d]; q [rows, queries, d] float; kv [2 keys, slots, d], in the same
// dtype as qkv; q_norm and k_norm [d] or null.
void soothsay_rotate_store(const void* qkv, int is_bf16, const float* cos, const float* sin, const float* q_norm,
                           const float* k_norm, const int64_t* slot, int64_t rows, int queries, int keys, int d,
                           int64_t slots, float eps, float scale, float* q, void* kv);

// q, out: [N, heads * group, d] float; kv: [2 * heads, slots, d]; path i has keys[key_begin[i]..key_begin[i + 1])
// in order of position and the rows rows[row_begin[i]..row_begin[i + 1]), which stand at `positions`. Its first shared[i]
// keys are those of the path before it.
void soothsay_attend(const float* q, const void* kv, int is_bf16, const int64_t* keys, const int64_t* key_begin,
                     const int64_t* rows, const int64_t* positions, const int64_t* row_begin, const int64_t* shared,
                     int num_paths, int heads, int group, int d, int64_t slots, float softcap, int64_t window,
                     float* out);

// out [rows, n] = activation(gate) * up, of gate_up [rows, 2 n]. activation: 0 is SiLU, 1 GELU in its tanh form.
void soothsay_gated(const void* gate_up, int is_bf16, int activation, int64_t rows, int n, void* out);

// out [rows, outputs] = x [rows, inputs] times the weights, plus bias. bits: 16 (bfloat16), 8 or 4; of the last two,
// scales (float, or half precision) and zeros [panels, inputs / group, PANEL]; zeros may be null, for half the range.
// Inputs and groups are multiples of 16.
void soothsay_linear(const void* x, int x_is_bf16, int64_t rows, const void* weights, int bits, const void* scales,
                     int scales_are_half, const uint8_t* zeros, const float* bias, int inputs, int outputs, int group,
                     void* out, int out_is_bf16);

// keys [rows, 2], tokens [rows or 1, width] -> out [rows, width] in (0, 1).
void soothsay_hashed(const int64_t* keys, const int64_t* tokens, int one_row, int64_t rows, int64_t width, float* out);

// x [rows, width] -> the `count` largest of each row, the largest first, and their places, both [rows, count]; where there
// are fewer above minus infinity, that and 0. With factors [rows] above 0, in place of each number its share of its row in
// log: factor * number - log(sum of e^(factor * number)).
void soothsay_largest(const float* x, const float* factors, int64_t rows, int64_t width, int count, float* values,
                      int64_t* places);

// A suffix automaton (soothsay/drafters/automaton.py), a text on its way into one, and a string in one.
struct soothsay_automaton;
struct soothsay_reading {
    int end, counted;
};
struct soothsay_place {
    int state, length;
};

soothsay_automaton* soothsay_automaton_new(int counted);
void soothsay_automaton_free(soothsay_automaton* automaton);
void soothsay_automaton_read(soothsay_automaton* automaton, soothsay_reading* text, const int64_t* tokens, int64_t count);
void soothsay_automaton_follow(const soothsay_automaton* automaton, soothsay_place* place, const int64_t* tokens,
                               int64_t count);
void soothsay_automaton_repeated(const soothsay_automaton* automaton, const soothsay_reading* text, soothsay_place* place);

// The likeliest paths (soothsay/drafters/backoff.py) behind `count` places, each in an automaton, with the match length at
// which half of a lone occurrence is believed. Writes token, parent and score of nodes 1 to n - 1; returns n, which is at most
// `nodes`.
int soothsay_automaton_grow(const soothsay_automaton* const* automata, const soothsay_place* places, const double* doubts,
                            int count, int nodes, int depth, int widest, double least, int* tokens, int* parents,
                            double* scores);

// A linear layer, as `soothsay_linear` takes it.
struct soothsay_weights {
    const void* data;
    const void* scales;
    const uint8_t* zeros;
    const float* bias;
    int bits, scales_are_half, inputs, outputs, group;
};

// A decoder block.
struct soothsay_parts {
    soothsay_weights qkv, o, gate_up, down;
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm;  // any but the third may be null
    const float *q_norm, *k_norm;                                                  // both or none
    int64_t window;                                                                // 0: none
    float eps, scale, softcap;                                                     // of norms, queries, scores (0: none)
    int is_bf16;                                                                   // what layers give, and the pool
    int queries, keys, d, activation, is_local;                                    // is_local: has the second rope
};

// Blocks one after the other: block i reads streams[i] [rows, hidden] and writes streams[i + 1], that and what attention
// and the feed-forward part add to it; the two may be one. Attention reads the stream's norm, or `inputs` where that is not
// null. ropes: cosines and sines [rows, d] each, then those of local layers. kv[i] is block i's part of the pool. Three
// places are written to on the way, of so many bytes for each row: `first` of the larger of hidden and intermediate size in
// elements; `second` of the largest of qkv's outputs and hidden in elements, and queries * d floats; `third` of gate_up's
// outputs in elements, and queries * d floats.
void soothsay_blocks(const soothsay_parts* const* blocks, int count, float* const* streams, const void* inputs,
                     int inputs_are_bf16, const float* const* ropes, int64_t rows, const int64_t* slot,
                     const int64_t* keys, const int64_t* key_begin, const int64_t* path_rows, const int64_t* positions,
                     const int64_t* row_begin, const int64_t* shared, int num_paths, void* const* kv, int64_t slots,
                     void* first, void* second, void* third);
}
