// The functions of the library, for Python and for each other. Rows are contiguous. A flag `is_bf16` means bfloat16, else
// float.
#pragma once
#include <cstdint>

extern "C" {

// Whether this processor has the instruction set of the library.
int soothsay_runs_here();

// The number of threads that the functions below use, with the calling one; 1 until it is set.
void soothsay_set_threads(int count);

// total [rows, n] = x + delta (or x + norm(delta) * post); normed = norm(total) * weight. Any of delta, post and weight may
// be null. `total` may be x; without delta it is not written.
void soothsay_add_norm(const float* x, const void* delta, int delta_is_bf16, const float* post, const float* weight,
                       float eps, int64_t rows, int n, float* total, void* normed, int normed_is_bf16);

// Formats of a KV pool [heads, slots, row]. A row has d floats or d bfloat16. With integer keys a row has d + 2 places of 16
// bits: a key is d integers and a float, their scale; a value is d bfloat16, and two places are unused.
enum soothsay_format { SOOTHSAY_FLOAT, SOOTHSAY_BF16, SOOTHSAY_INT16_KEYS };

// qkv [rows, queries + gates + 2 keys, d]; cos, sin [rows, d]; q [rows, queries, d] float; kv [2 keys, slots, row]; the three
// norms [d] or null.
void soothsay_rotate_store(const void* qkv, int is_bf16, const float* cos, const float* sin, const float* q_norm,
                           const float* k_norm, const float* v_norm, const int64_t* slot, int64_t rows, int queries,
                           int gates, int keys, int d, int64_t slots, float eps, float scale, float* q, void* kv,
                           int format);

// q, out: [N, heads * group, d] float; kv: [2 * heads, slots, row]; path i has keys[key_begin[i]..key_begin[i + 1])
// in order of position, and rows[row_begin[i]..row_begin[i + 1]) with their `positions`. Its first shared[i] keys are those
// of the path before it. Values begin at head `values` of kv: `heads`, or 0 where kv [heads, slots, d] are both (not with integer keys). Null sinks:
// none. A query head's sink is a score in each of its softmaxes, of a key that has no value. A row sees the last `window`
// positions, if that is negative those from the last multiple of -window on, if it is 0 all.
void soothsay_attend(const float* q, const void* kv, int format, const int64_t* keys, const int64_t* key_begin,
                     const int64_t* rows, const int64_t* positions, const int64_t* row_begin, const int64_t* shared,
                     int num_paths, int heads, int values, int group, int d, int64_t slots, float softcap,
                     int64_t window, const float* sinks, float* out);

// x [rows, n] *= sigmoid(gates), in place; gates have `stride` elements from row to row.
void soothsay_open(float* x, const void* gates, int is_bf16, int64_t stride, int64_t rows, int n);

// The gated delta rule of a layer (soothsay/model/delta_rule.py). taps [taps, channels], log_rates and offsets [value_heads],
// scale [value_size]; channels are queries and keys of all key_heads, then values of all value_heads. Sizes of heads are
// multiples of 16.
struct soothsay_delta {
    const float *taps, *log_rates, *offsets, *scale;
    int key_heads, value_heads, key_size, value_size, taps_count, tiled;  // tiled: value head h has key head h % key_heads
    float eps;
};

// The states of a layer, by slot: matrices [slots, value_heads, key_size, value_size], inputs [slots, taps - 1, channels],
// journal [requests, nodes, channels], gates [requests, nodes, 2 value_heads].
struct soothsay_states {
    float* matrices;
    void *inputs, *journal, *gates;
    int64_t nodes;
};

// rows: channels, and where there is `out`, value_heads * value_size gates of outputs; `stride` elements from row to row.
// gates [rows, 2 value_heads]. out [rows, value_heads * value_size] or null. Null states: all strands live within the pass.
// The plan has the number of strands, and for each (soothsay/core/strands.py): first row, rows that advance the state, number
// of the first node that is a row, number of nodes, slot or -1, whether it is new, number of marks; then the parents of the
// nodes, and for each mark the rows that have advanced the state and the slot that gets the state then.
void soothsay_delta_rule(const void* rows, int64_t stride, const void* gates, int is_bf16, const soothsay_delta* delta,
                         const soothsay_states* states, const int64_t* plan, float* out);

// Mamba-2 of a layer (soothsay/model/state_space.py). taps [taps, channels] and bias [channels], channels being x of all heads,
// then B and C of all groups; log_rates, offsets and skips [heads]; scale [heads * head_size], or null: outputs are not normed.
// Sizes of heads and of states are multiples of 16.
struct soothsay_state_space {
    const float *taps, *bias, *log_rates, *offsets, *skips, *scale;
    int heads, groups, head_size, state_size, taps_count, norm_first;
    float eps;
};

// rows [count]: channels, and where there is `out`, heads * head_size gates of outputs; `stride` elements from row to row. steps
// [count, heads]. out [count, heads * head_size] or null. Matrices of states are [slots, heads, state_size, head_size], and gates
// of the journal are steps; all else of states, and the plan, are those of soothsay_delta_rule.
void soothsay_run_state_space(const void* rows, int64_t count, int64_t stride, const void* steps, int is_bf16,
                              const soothsay_state_space* weights, const soothsay_states* states, const int64_t* plan,
                              float* out);

// A convolution over the last tokens, channel by channel (soothsay/model/convolution.py). taps [taps, channels], the token's own
// last; channels are a multiple of 16.
struct soothsay_convolution {
    const float* taps;
    int taps_count, channels;
};

// out [rows, channels] of the inputs rows [rows, channels]. If it is gated, rows are [rows, 3 channels]: b, c and x. Then the
// inputs are b x, written in place of b, and outputs are multiplied by c. States have no matrices and gates; they and the plan
// are those of soothsay_delta_rule.
void soothsay_convolve(void* rows, int is_bf16, int64_t count, int gated, const soothsay_convolution* convolution,
                       const soothsay_states* states, const int64_t* plan, float* out);

// out [rows, n] = activation(gate) * up, of gate_up [rows, 2 n]. activation: 0 is SiLU, 1 GELU in its tanh form. 2, of gpt-oss:
// gate is at most 7 and up from -7 to 7; gate * sigmoid(1.702 gate) * (up + 1). 3: a squared ReLU of [rows, n], without a gate.
void soothsay_gated(const void* gate_up, int is_bf16, int activation, int64_t rows, int n, void* out);

// Numbers of the groups of a weight's inputs, [panels, groups, PANEL]: float or half. With `units`, half
// [panels, groups / span, PANEL], they are int8 times the unit of `span` groups. Null values: there are none.
struct soothsay_factors {
    const void *values, *units;
    int are_half, span;
};

// The weights of a linear layer [outputs, inputs]. bits: 16 (bfloat16), or integers of 8, 6, 5, 4 or 2. A weight is
// scale * (integer - zero), and a minimum more if there are minimums. Null zeros [panels, groups, PANEL] are 0 if there are
// minimums, else the middle of the range. A table [16] has the integers that integers of 4 bits stand for, plus 128; it goes with scales alone.
// Inputs are a multiple of groups. Groups have 16 inputs or a multiple of 32, with 5 bits a multiple of 32. `next` has outputs after these, or is null.
struct soothsay_weights {
    const void* data;
    soothsay_factors scales, minimums;
    const uint8_t *zeros, *table;
    const float* bias;
    const soothsay_weights* next;
    int bits, inputs, outputs, group;
};

// out [rows, all outputs] = x [rows, inputs] times the weights, plus their bias [outputs] or null.
void soothsay_linear(const void* x, int x_is_bf16, int64_t rows, const soothsay_weights* weights, void* out,
                     int out_is_bf16);

// How a row's experts are chosen from `count` scores; see soothsay.model.feed_forward.route.
struct soothsay_routing {
    const float* correction;  // [count], added for the choice alone; null: none
    const float* scales;      // [count], factors of the experts' shares; null: none
    int count, each, sigmoid, normalize, groups, kept, best;
    float scale;
    int scales_inputs;  // experts read a row times its share; else their outputs are multiplied by it
};

// scores [rows, count] -> shares and chosen [rows, each], the best first, of equal ones the first.
void soothsay_route(const void* scores, int are_bf16, int64_t rows, const soothsay_routing* routing, float* shares,
                    int64_t* chosen);

// A feed-forward layer; see soothsay_gated for the outputs of its first product.
struct soothsay_expert {
    const soothsay_weights *gate_up, *down;
};

// A mixture of experts: each row runs through those that its scores choose, and through `shared` if there is one.
struct soothsay_mixture {
    const soothsay_weights* router;  // null: scores are computed elsewhere
    const soothsay_expert* experts;
    const soothsay_expert* shared;  // or null
    soothsay_routing routing;
    int activation, is_bf16;  // see soothsay_gated; of layers' outputs
    int64_t* ran;             // soothsay_mix writes here how many experts had rows
};

// x [rows, hidden] -> out [rows, hidden]. A row's outputs, times their shares, are added in order. `scores` [rows, count], or
// null: those of the mixture's router for x.
void soothsay_mix(const void* x, int x_is_bf16, int64_t rows, const float* scores, const soothsay_mixture* mixture, float* out);

// Some rows of the weights, which are integers: rows [count] -> out [count, inputs]. Rows that do not exist are NaN.
void soothsay_rows(const int64_t* rows, int64_t count, const soothsay_weights* weights, float* out);

// Packs integers [rows, inputs], one a byte, of 8, 6, 5, 4 or 2 bits, as soothsay_weights has them from this panel on. Inputs
// are whole units. Outputs that a panel lacks are left as they are.
void soothsay_pack(const uint8_t* integers, int64_t rows, int inputs, int bits, void* data);

// The rows of a pass of N rows, M of which ask for logits, and the keys that they attend to; see soothsay_attend for the
// paths. `rows` and `row_positions` are those of the paths.
struct soothsay_layout {
    int64_t *tokens, *positions, *slots;  // [N]
    int64_t* logit_rows;                  // [M]
    int64_t *rows, *row_positions;        // [N]
    int64_t *key_begin, *row_begin;       // [paths + 1], with room for N + 1
    int64_t *shared, *keys;               // [paths], [all keys]
};

// Lays out `count` requests. The plan has for each: start, first key, first node that is a row, number of nodes with the root
// (0: no tree), number of pending tokens, the address of its table of blocks (0: keys live within the pass); then the pending
// tokens, and tokens and parents of the nodes. totals [2]: number of paths; number of slots up to the last that is in use.
void soothsay_lay_out(const int64_t* plan, int64_t count, int64_t block_size, const soothsay_layout* out, int64_t* totals);

// Uniform numbers: keys [rows, 2], tokens [rows or 1, width] -> out [rows, width] in (0, 1).
void soothsay_hashed(const int64_t* keys, const int64_t* tokens, int one_row, int64_t rows, int64_t width, float* out);

// x [rows, width] -> the `count` largest of factor * number + noise in each row, the largest first, and their places, both
// [rows, count]. The noise is standard Gumbel noise of the place, under keys [rows, 2]. Values are nearly those of stock
// operations. If fewer are above minus infinity, the rest are minus infinity at place 0.
void soothsay_race(const float* x, const float* factors, const int64_t* keys, int64_t rows, int64_t width, int count,
                   float* values, int64_t* places);

// In the softmax of factor * x, [rows, width], over the numbers that are at least `floors`: the probability of all places
// that come before `places` in descending order, equal numbers in the order of their places. `tops`: the largest numbers.
// The numbers at `places` are at least `floors`.
void soothsay_mass_before(const float* x, const float* factors, const float* tops, const float* floors,
                          const int64_t* places, int64_t rows, int64_t width, float* out);

// x [rows, width] -> the `count` largest numbers of each row, the largest first, and their places, both [rows, count]. If
// fewer are above minus infinity, the rest are minus infinity at place 0. With factors [rows] above 0, values are the
// log-softmax of a row times its factor: factor * number - log(sum of e^(factor * number)).
void soothsay_largest(const float* x, const float* factors, int64_t rows, int64_t width, int count, float* values,
                      int64_t* places);

// A suffix automaton (soothsay/drafters/ops/automaton.py), a text that it reads, and the matches of a text.
struct soothsay_automaton;
struct soothsay_reading {
    int end, counted;
};
struct soothsay_matcher;

soothsay_automaton* soothsay_automaton_new(int counted);
void soothsay_automaton_free(soothsay_automaton* automaton);
void soothsay_automaton_read(soothsay_automaton* automaton, soothsay_reading* text, const int64_t* tokens, int64_t count);

// A matcher's text is read into `own`. A doubt is the match length at which half of a lone occurrence is believed.
// `others` are watched from now on, and no more; `tokens` are the last ones of the text. Watching and reading return
// the length of the longest match. All automata outlive the matcher's last call.
soothsay_matcher* soothsay_matcher_new(soothsay_automaton* own, double doubt);
void soothsay_matcher_free(soothsay_matcher* matcher);
int soothsay_matcher_watch(soothsay_matcher* matcher, const soothsay_automaton* const* others, const double* doubts,
                           int count, const int64_t* tokens, int64_t num_tokens);
int soothsay_matcher_read(soothsay_matcher* matcher, const int64_t* tokens, int64_t count);

// The likeliest paths (soothsay/drafters/ops/continuations.py) after a text's matches. If `draws` is set, the target draws with
// known noise (`KnownNoise` of soothsay/drafters/ops/automaton.py). Writes token, parent and score of nodes 1 to n - 1, and returns n,
// which is at most `nodes`.
int soothsay_matcher_grow(const soothsay_matcher* matcher, int nodes, int depth, int widest, double least, int draws,
                          uint64_t seed, int64_t first, double odds, double weight, int* tokens, int* parents,
                          double* scores);

// The layers of a one-pass drafter with a recurrent cell (soothsay/drafters/heads/redrafter/redrafter_head.py). look: its inputs are
// features and an embedding, its outputs gates and values of guesses' inputs, and what is passed on to all guesses.
struct soothsay_looking {
    const soothsay_weights *look, *guesses, *cell_read, *cell_token, *cell_out, *head;
    const float* norm;  // [embedding]
    float eps;
    int embedding, depths;
};

// features [rows, all inputs of look but the embedding], embedded [rows, embedding] -> logits [rows, depths, outputs of head] of
// the guesses, the first of which is refined; read [rows, depths, units] of those before they are refined; states [rows, units]
// of the cell at the root.
void soothsay_look(const soothsay_looking* looking, const float* features, const float* embedded, int64_t rows, float* logits,
                   float* read, float* states);

// What a cell needs to refine the guesses of one pass along a path (soothsay/drafters/heads/refiner.py). Tables are
// in bfloat16, and `units` is a multiple of 16.
struct soothsay_paths {
    const float* values;                // [depths, count], log-probabilities of each depth's candidates. Those of the first
                                        // depth are refined, the others are not yet
    const int64_t* places;              // [depths, count], the candidates: rows of `tokens` and `out`
    const float *read, *root;           // [depths, units] of the pass's outputs, the first is not read; [units], the root's state
    const void *tokens, *carry, *out;   // [rows, units]; [units, units], a row for each input; [rows, units]
    const float* scores;                // [depths, tokens_count], of all tokens; a value is factor * score less a constant
    const int64_t* followers;           // [tokens_count, following], for each token, some that often come after it
    int64_t tokens_count;
    float scale, factor;                // of corrections, of scores
    int depths, count, units, following;
};

// The tree of at most `nodes` nodes and depth `depth` with the highest scores, which are at least `least`. A candidate's
// log-probability is its value and its correction, normed over all tokens. Writes place, parent and score of the nodes, and
// returns their number.
int soothsay_grow_paths(const soothsay_paths* paths, int nodes, int depth, double least, int64_t* places, int* parents,
                        double* scores);

// A decoder block. With `delta`, the gated delta rule takes the place of attention, with `convolution` a gated convolution: then
// qkv gives its rows.
struct soothsay_parts {
    const soothsay_weights *qkv, *o, *gate_up, *down;
    const soothsay_weights* gates;  // of the rule; or null
    const soothsay_delta* delta;    // or null
    const soothsay_convolution* convolution;  // or null
    const soothsay_mixture* mixture;  // in place of gate_up and down; or null
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm;  // any but the third may be null
    const float *q_norm, *k_norm;                                                  // both or none
    const float* sinks;                                                            // [queries], or null
    int64_t window;                                                                // see soothsay_attend
    float eps, scale, softcap;                                                     // of norms, of queries, of scores (0: none)
    int is_bf16, qkv_is_bf16;  // of layers' outputs; of qkv's, which with the rule or a convolution are as the others
    int hidden, queries, keys, d, activation, is_local;                                    // is_local: uses the second rope
    int gate_heads;                                                                        // of attention's output: queries or 0
};

// Runs blocks one after the other. Block i reads streams[i] [rows, hidden] and writes its output to streams[i + 1], which
// may be the same memory. Attention reads `inputs`, or the norm of the stream if that is null. ropes: cosines and sines
// [rows, d] of global layers, then of local layers. kv[i] is the pool of block i in this format, or its soothsay_states, or
// null; `plan` is that of soothsay_delta_rule. `first`, `second` and `third` are scratch buffers. For each row, `first` has
// max(hidden, intermediate) elements; `second` the larger of qkv's outputs (in their type) and gates' outputs together,
// hidden elements, and queries * d floats, which come after qkv's outputs where there are gate_heads; `third` gate_up's outputs
// in elements, or queries * d floats, or the rule's values or the channels, or for a mixture hidden floats, whichever is larger.
void soothsay_blocks(const soothsay_parts* const* blocks, int count, float* const* streams, const void* inputs,
                     int inputs_are_bf16, const float* const* ropes, int64_t rows, const int64_t* slot,
                     const int64_t* keys, const int64_t* key_begin, const int64_t* path_rows, const int64_t* positions,
                     const int64_t* row_begin, const int64_t* shared, int num_paths, const int64_t* plan,
                     void* const* kv, int64_t slots, int format, void* first, void* second, void* third);

// A drafter's recurrent head of one block (soothsay/drafters/heads/eagle3/eagle3_head.py), and the shape of its trees
// (soothsay/drafters/trees/tree_shapes.py). A row reads a token's embedding and the feature before the token, both normed, and gives
// the next row's feature; `norm` of that gives logits.
struct soothsay_recurrent {
    const soothsay_parts* block;  // without attention_norm; qkv reads embedding and feature
    const soothsay_weights *head, *fuse, *table;  // table: of embeddings, or null
    const float* tap_norms;                // [taps * tap_size], weights of a norm for each layer's part of a feature, or null
    const void* rows;                      // the table if it is not in integers, [vocabulary, hidden]
    const float *embedding_norm, *feature_norm, *norm;  // [hidden]
    const float *cos, *sin;                             // [positions, d]
    const int64_t* ids;                                 // [outputs], the tokens that the head's outputs stand for, or null
    int64_t outputs, vocabulary;                        // of the head; rows of the table
    int64_t first, second, third;                       // bytes a row of the scratch buffers of soothsay_blocks
    double least;  // a tree ends where its next nodes together are right less often
    float embedding_scale, eps;
    int rows_are_bf16, norms_residual, norms_output;  // whether features are normed before the block adds to them, or outputs
    int taps, tap_size, fuse_is_bf16;  // fuse makes a feature of taps * tap_size numbers
    int depth, width, branch;
};

// A pool of keys and values of one layer.
struct soothsay_pool {
    void* data;
    int64_t slots, block_size;
    int format;
};

// A request to draft for. `features` [pending, taps * tap_size] are those of the tokens before, not fused yet. The last token is
// the root of its tree. The lists have room for the root, `branch` nodes, and width * branch in each further level. With `draws`,
// the target adds known noise to factor * logits, of the tokens that top_k (0: all), top_p and min_p leave. Without, a node's
// probability is the softmax of factor * logits. With 0 nodes nothing is drafted.
struct soothsay_growing {
    const int64_t *tokens, *table, *ends;  // [pending]; of KV blocks; [num_ends], tokens that nothing is drafted after
    const float* features;
    int64_t *tree_tokens, *tree_parents;
    double* scores;
    int64_t start, first_key, pending, num_ends;
    uint64_t seed;
    float factor, top_p, min_p;
    int top_k, draws, nodes, depth, size;  // the last is written: nodes of the tree
};

// Computes rows of committed tokens, and grows trees below the last of them.
void soothsay_draft(const soothsay_recurrent* recurrent, const soothsay_pool* pool, soothsay_growing* requests, int64_t count);
}
