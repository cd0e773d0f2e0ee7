// The operations of decoder layers. `soothsay_run` calls them; see kernels.h for the structs. Rows are contiguous.
#pragma once
#include "kernels.h"

extern "C" {

// qkv [rows, queries + gates + 2 keys, d]; cos, sin [rows, d]; q [rows, queries, d] float; kv [2 keys, slots, row]; the three
// norms [d] or null; centre [keys, d], subtracted from rotated keys, or null.
void soothsay_rotate_store(const void* qkv, int is_bf16, const float* cos, const float* sin, const float* q_norm,
                           const float* k_norm, const float* v_norm, const float* centre, const int64_t* slot, int64_t rows, int queries,
                           int gates, int keys, int d, int64_t slots, float eps, float scale, float* q, void* kv,
                           int format);

// q, out: [N, heads * group, d] float; kv: [2 * heads, slots, row]. Values begin at head `values` of kv: `heads`, or 0 where kv
// [heads, slots, d] are both (not with integer keys). Null sinks: none. A query head's sink is a score in each of its softmaxes,
// of a key that has no value. A row sees the last `window` positions, if that is negative those from the last multiple of -window on,
// if it is 0 all. relative [heads * group, 2 * most + 1], or null: added to scores by the distance from the row's position [N] to the
// key, from `most` or more before it to `most` or more after it.
void soothsay_attend(const float* q, const void* kv, int format, const soothsay_sight* sight, int heads, int values, int group,
                     int d, int64_t slots, float softcap, int64_t window, const float* sinks, const float* relative,
                     int64_t most, const int64_t* positions, float* out);

// x [rows, n] *= sigmoid(gates), in place; gates have `stride` elements from row to row.
void soothsay_sigmoid_gate(float* x, const void* gates, int is_bf16, int64_t stride, int64_t rows, int n);

// rows: channels, and where there is `out`, value_heads * value_size gates of outputs; `stride` elements from row to row.
// gates [rows, 2 value_heads]. out [rows, value_heads * value_size] or null. Null states: all strands live within the pass.
// The plan has the number of strands, and for each (soothsay/core/strands.py): first row, rows that advance the state, number
// of the first node that is a row, number of nodes, slot or -1, whether it is new, number of marks; then the parents of the
// nodes, and for each mark the rows that have advanced the state and the slot that gets the state then.
void soothsay_delta_rule(const void* rows, int64_t stride, const void* gates, int is_bf16, const soothsay_delta* delta,
                         const soothsay_states* states, const int64_t* plan, float* out);

// rows [count]: channels, and where there is `out`, heads * head_size gates of outputs; `stride` elements from row to row. steps
// [count, heads]. out [count, heads * head_size] or null. Matrices of states are [slots, heads, state_size, head_size], and gates
// of the journal are steps; all else of states, and the plan, are those of soothsay_delta_rule.
void soothsay_run_state_space(const void* rows, int64_t count, int64_t stride, const void* steps, int is_bf16,
                              const soothsay_state_space* weights, const soothsay_states* states, const int64_t* plan,
                              float* out);

// out [rows, channels] of the inputs rows [rows, channels]. If it is gated, rows are [rows, 3 channels]: b, c and x. Then the
// inputs are b x, written in place of b, and outputs are multiplied by c. States have no matrices and gates; they and the plan
// are those of soothsay_delta_rule.
void soothsay_convolve(void* rows, int is_bf16, int64_t count, int gated, const soothsay_convolution* convolution,
                       const soothsay_states* states, const int64_t* plan, float* out);

// rows: channels, and where there is `out`, as many gates of outputs; `stride` elements from row to row. gates [rows, channels + 2
// state_size]: steps, B and C. out [rows, channels] or null. Matrices of states are [slots, heads, state_size, width]; all else of
// states, and the plan, are those of soothsay_delta_rule.
void soothsay_scan(const void* rows, int64_t stride, const void* gates, int is_bf16, const soothsay_selective* weights,
                   const soothsay_states* states, const int64_t* plan, float* out);

// What soothsay_scan will see of each row's inputs: out [rows, channels]. States and the journal stay.
void soothsay_convolved(const void* rows, int64_t stride, int is_bf16, const soothsay_selective* weights,
                        const soothsay_states* states, const int64_t* plan, float* out);

// out [rows, n] = activation(gate) * up, of gate_up [rows, 2 n]. See activations.h. CLIPPED, of gpt-oss: gate is at most 7
// and up from -7 to 7; gate * sigmoid(1.702 gate) * (up + 1). From SQUARED_RELU on, gate_up is [rows, n], without a gate.
void soothsay_gated(const void* gate_up, int is_bf16, int activation, int64_t rows, int n, void* out);

// x [rows, hidden] -> out [rows, hidden]. A row's outputs, times their shares, are added in order. `scores` [rows, count], or
// null: those of the mixture's router for x.
void soothsay_mix(const void* x, int x_is_bf16, int64_t rows, const float* scores, const soothsay_mixture* mixture, float* out);

// out [rows, outputs] += what each row's adapter adds for x [rows, inputs]. numbers [rows] are those of adapters, -1: none.
void soothsay_adapt(const void* x, int x_is_bf16, int64_t rows, int inputs, const soothsay_low_rank* adapters, const int64_t* numbers,
                    int outputs, void* out, int out_is_bf16);

}
