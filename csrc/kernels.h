// The functions of the library, for Python and for each other. Rows are contiguous. A flag `is_bf16` means bfloat16, else
// float.
#pragma once
#include <cstdint>

extern "C" {

// Whether this processor has the instruction set of the library: 0 if not, 2 if a smaller set is as fast here, else 1.
int soothsay_runs_here();

// The number of threads that the functions below use, with the calling one; 1 until it is set.
void soothsay_set_threads(int count);

// Formats of a KV pool [heads, slots, row]. A row has d floats or d bfloat16. With integer keys a row has d + 2 places of 16
// bits: a key is d integers and a float, their scale; a value is d bfloat16, and two places are unused. With integers of 8 bits
// a row has d + 4 bytes: d integers and their scale.
enum soothsay_format { SOOTHSAY_FLOAT, SOOTHSAY_BF16, SOOTHSAY_INT16_KEYS, SOOTHSAY_INT8 };

// The gated delta rule of a layer (soothsay/model/ops/state_ops.py). taps [taps, channels], log_rates [value_heads], offsets
// [value_heads, decays], scale [value_size]; channels are queries and keys of all key_heads, then values of all value_heads. Sizes
// of heads are multiples of 16. decays: 1, or key_size. sigmoid: the function of gates of outputs, in place of SiLU.
struct soothsay_delta {
    const float *taps, *log_rates, *offsets, *scale;
    int key_heads, value_heads, key_size, value_size, taps_count, tiled;  // tiled: value head h has key head h % key_heads
    int decays, sigmoid;
    float eps;
};

// The states of a layer, by slot: matrices [slots, value_heads, key_size, value_size], inputs [slots, taps - 1, channels],
// journal [requests, nodes, channels], gates [requests, nodes, gates].
struct soothsay_states {
    float* matrices;
    void *inputs, *journal, *gates;
    int64_t nodes;
};

// Mamba-2 of a layer (soothsay/model/ops/state_ops.py). taps [taps, channels] and bias [channels], channels being x of all heads,
// then B and C of all groups; log_rates, offsets and skips [heads]; scale [heads * head_size], or null: outputs are not normed.
// Sizes of heads and of states are multiples of 16.
struct soothsay_state_space {
    const float *taps, *bias, *log_rates, *offsets, *skips, *scale;
    int heads, groups, head_size, state_size, taps_count, norm_first;
    float eps;
};

// Mamba of a layer (soothsay/model/ops/state_ops.py). taps [taps, channels] and bias [channels], of heads * width channels; rates
// [state_size, channels], offsets and skips [channels]. The states of `width` channels lie together, as those of a head.
struct soothsay_selective {
    const float *taps, *bias, *rates, *offsets, *skips;
    int heads, width, state_size, taps_count;
};

// A convolution over the last tokens, channel by channel (soothsay/model/ops/state_ops.py). taps [taps, channels], the token's own
// last; channels are a multiple of 16.
struct soothsay_convolution {
    const float* taps;
    int taps_count, channels;
};

// Numbers of the groups of a weight's inputs, [panels, groups, PANEL]: float or half. With `units`, half
// [panels, groups / span, PANEL], they are int8 times the unit of `span` groups. Null values: there are none.
struct soothsay_factors {
    const void *values, *units;
    int are_half, span;
};

// What weights are: integers; bfloat16, which inputs are rounded to; or numbers that inputs in float are multiplied by.
enum soothsay_numbers { SOOTHSAY_INTEGERS, SOOTHSAY_BF16_PAIRS, SOOTHSAY_FLOATS, SOOTHSAY_HALVES, SOOTHSAY_BF16S };

// The weights of a linear layer [outputs, inputs]. bits: of integers 8, 6, 5, 4 or 2. An integer stands for
// scale * (integer - zero), and a minimum more if there are minimums. Null zeros [panels, groups, PANEL] are 0 if there are
// minimums, else the middle of the range. A table [16] has the integers that integers of 4 bits stand for, plus 128; it goes with scales alone.
// Inputs are a multiple of groups. Groups have 16 inputs or a multiple of 32, with 5 bits a multiple of 32. `next` has outputs after these, or is null.
struct soothsay_weights {
    const void* data;
    soothsay_factors scales, minimums;
    const uint8_t *zeros, *table;
    const float* bias;
    const soothsay_weights* next;
    int bits, inputs, outputs, group, numbers;
};

// out [rows, all outputs] = x [rows, inputs] times the weights, plus their bias [outputs] or null.
void soothsay_linear(const void* x, int x_is_bf16, int64_t rows, const soothsay_weights* weights, void* out,
                     int out_is_bf16);

// total [rows, n] = x + delta (or x + norm(delta) * post); normed = norm(total) * weight. Any of delta, post and weight may
// be null. `total` may be x; without delta it is not written.
void soothsay_add_norm(const float* x, const void* delta, int delta_is_bf16, const float* post, const float* weight,
                       float eps, int64_t rows, int n, float* total, void* normed, int normed_is_bf16);

// How a row's experts are chosen from `count` scores; see soothsay.model.decoder.feed_forward.route.
struct soothsay_routing {
    const float* correction;  // [count], added for the choice alone; null: none
    const float* scales;      // [count], factors of the experts' shares; null: none
    int count, each, sigmoid, normalize, groups, kept, best;
    float scale;
    float within;       // see RoutingSpec of soothsay.model.specs.feed_forward_spec; below 0: none
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

// What an adapter adds to a linear layer's outputs: x [inputs] times down, times up. They are
// panels of 16 outputs, [rank / 16, inputs, 16] and [outputs / 16, rank, 16]; sizes are multiples of 16. spans
// [outputs / 16, 2]: the ranks that a panel of outputs has weights for, from one multiple of 4 to another. Rank 0: nothing.
struct soothsay_low_rank {
    const void *down, *up;
    const int* spans;
    int rank, are_bf16;  // else float
};

// What an operation reads or writes: [rows, heads, size] float or bfloat16, `row` elements from row to row and `head` from head to
// head, `begin` bytes after its base: the address `place`, or `place` bytes a row in the scratch memory of the pass, or the pass's
// stream or inputs, or the layer's embedding.
enum soothsay_where { SOOTHSAY_NOWHERE, SOOTHSAY_ADDRESS, SOOTHSAY_SCRATCH, SOOTHSAY_STREAM, SOOTHSAY_INPUTS, SOOTHSAY_EMBEDDING };
struct soothsay_operand {
    int64_t place, begin, row, head;
    int where, is_bf16, heads, size;
};

// The operations of decoder layers, with their operands, what they hold, their numbers and their factors. soothsay/model/native/
// operations.py says what each computes. Operands are contiguous but for those of a copy, gates, and what is rotated.
//   linear         x, out; held weights
//   linear_heads   x [rows, heads, in], out [rows, heads, out]; held an array of weights for each head
//   add_norm       x, delta, total, normed; held norm of delta, norm of total; factor epsilon
//   centred_norm   x, out; held weight, bias or null; factor epsilon
//   rotate_store   qkv, q; held norms of queries, keys and values, centre of keys; numbers queries, gates, keys, d, rope; factors epsilon, scale
//   attend         q, out; held sinks, numbers by distance; numbers heads, values, group, d, window, most, paths: 0 own, 1 across; factor softcap
//   sigmoid_gate   x, gates, out
//   delta          rows, gates, out; held soothsay_delta
//   state_space    rows, steps, out; held soothsay_state_space
//   convolve       rows, out; held soothsay_convolution; number whether it is gated
//   convolved      rows, out; held soothsay_selective
//   scan           rows, gates, out; held soothsay_selective
//   gated          gate_up, out; number activation
//   mix            x, scores, out; held soothsay_mixture
//   copy           x, out
//   scale          x, out; held numbers of a row, or factor
//   blend          x, y, out = a x + b y; factors a, b
//   add_gated      x, gates [rows, 1], y, out = x + sigmoid(gate) y
//   grow           x, out = x times the factor of the position; held factors; numbers span, shift, last factor
//   rotate         x, out; number rope
//   store          rows of a KV pool of one head
//   adapt          x, out; held a soothsay_low_rank for each adapter
enum soothsay_kind {
    SOOTHSAY_LINEAR, SOOTHSAY_LINEAR_HEADS, SOOTHSAY_ADD_NORM, SOOTHSAY_CENTRED_NORM, SOOTHSAY_ROTATE_STORE, SOOTHSAY_ATTEND,
    SOOTHSAY_SIGMOID_GATE, SOOTHSAY_DELTA, SOOTHSAY_STATE_SPACE, SOOTHSAY_CONVOLVE, SOOTHSAY_GATED, SOOTHSAY_MIX, SOOTHSAY_COPY,
    SOOTHSAY_SCALE, SOOTHSAY_BLEND, SOOTHSAY_ADD_GATED, SOOTHSAY_GROW, SOOTHSAY_ROTATE, SOOTHSAY_STORE, SOOTHSAY_ADAPT,
    SOOTHSAY_CONVOLVED, SOOTHSAY_SCAN
};
struct soothsay_op {
    int kind, numbers[7];
    float factors[2];
    const void* held[4];
    soothsay_operand operands[4];
};

// The keys that rows attend to: path i has keys[key_begin[i]..key_begin[i + 1]) in order of position, and
// rows[row_begin[i]..row_begin[i + 1]) with the `positions` up to which they see keys. Its first shared[i] keys are those of the path before it.
struct soothsay_sight {
    const int64_t *keys, *key_begin, *rows, *positions, *row_begin, *shared;
    int64_t count;  // of paths
};

// What all layers read and write in a pass. Rows attend by sights[0], and to the keys of their sources by sights[1]. The plan is that of soothsay_delta_rule. ropes:
// cosines and sines [rows, d] of each rope. stream [rows, stream_size] is every layer's input, and becomes its
// output. `pool_slots` is the number of slots of the KV pools. adapters [rows]: their numbers, -1: none; not read if no operation adapts.
struct soothsay_pass {
    int64_t rows;
    const int64_t *positions, *slots;
    soothsay_sight sights[2];
    const int64_t *plan, *adapters;
    const float* const* ropes;
    int64_t pool_slots;
    float* stream;
    const void* inputs;
    char* scratch;
    int stream_size;
};

// Operations of a layer in a pass, and the memory of the layer: a KV pool of this format, states, or both. `tap` gets a copy of the stream before them, or is null.
struct soothsay_layer {
    const soothsay_op* ops;
    void* kv;
    const soothsay_states* states;
    const float* embedding;
    float* tap;
    int count, format;
};

// Runs operations of layers, one layer after the other.
void soothsay_run(const soothsay_layer* layers, int count, const soothsay_pass* pass);

// Some rows of the weights, which are integers: rows [count] -> out [count, inputs]. Rows that do not exist are NaN.
void soothsay_rows(const int64_t* rows, int64_t count, const soothsay_weights* weights, float* out);

// Packs integers [rows, inputs], one a byte, of 8, 6, 5, 4 or 2 bits, as soothsay_weights has them from this panel on. Inputs
// are whole units. Outputs that a panel lacks are left as they are.
void soothsay_pack(const uint8_t* integers, int64_t rows, int inputs, int bits, void* data);

// Lays out `count` requests as N rows, M of which ask for logits; `out` is the memory of `Places` (layout.h). The plan has for each: start, first key, first node that is a row, number of
// nodes with the root (0: no tree), number of pending tokens, number of blocks (-1: keys live within the pass); then the pending
// tokens, the blocks, and tokens and parents of the nodes.
void soothsay_lay_out(const int64_t* plan, int64_t count, int64_t block_size, int64_t N, int64_t M, int64_t* out);

// Standard Gumbel noise: keys [rows, 2], tokens [rows or 1, width] -> out [rows, width].
void soothsay_gumbel(const int64_t* keys, const int64_t* tokens, int one_row, int64_t rows, int64_t width, float* out);

// x [rows, width] -> the `count` largest of number / temperature + noise in each row, the largest first, and their places, both
// [rows, count]. The noise is standard Gumbel noise of the place, under keys [rows, 2]. If fewer are above minus infinity, the
// rest are minus infinity at place 0.
void soothsay_race(const float* x, const float* temperatures, const int64_t* keys, int64_t rows, int64_t width, int count,
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

// Follows the target's draws along `count` trees: the best of `logit / temperature + noise` at the root, then at its child with
// that token, and so on. The plan has for each: the root's row of logits [rows, width], number of nodes, seed, position of the
// token after the root; then tokens and parents of the nodes. Temperature 0: without noise. Writes for
// each, with room for the number of nodes and one more: the number of accepted nodes, these nodes, and the draw after the last; or
// -1, where the best number is not finite.
void soothsay_follow(const float* logits, int64_t width, const int64_t* plan, const float* temperatures, int64_t count,
                     int64_t* out);

// Copies rows of `size` bytes within each of `planes` [slots, row]: from places[i] to places[count + i], one after the other.
void soothsay_move(void* memory, int64_t planes, int64_t slots, int64_t size, const int64_t* places, int64_t count);

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

// A drafter's recurrent head of one block (soothsay/drafters/heads/eagle3/eagle3_head.py), and the shape of its trees
// (soothsay/drafters/trees/tree_shapes.py). A row reads a token's embedding and the feature before the token, both normed, and gives
// the next row's feature; `norm` of that gives logits.
struct soothsay_recurrent {
    const soothsay_layer* block;  // its operations read embedding and feature, and a stream of the feature
    const soothsay_weights *head, *fuse, *join, *table;  // join: of both to what the block adds to, or null; table: of embeddings, or null
    const float* tap_norms;                // [taps * tap_size], weights of a norm for each layer's part of a feature, or null
    const void* rows;                      // the table if it is not in integers, [vocabulary, hidden]
    const float *embedding_norm, *feature_norm, *norm;  // [hidden]
    const float *cos, *sin;                             // [positions, d]
    const int64_t* ids;                                 // [outputs], the tokens that the head's outputs stand for, or null
    int64_t outputs, vocabulary;                        // of the head; rows of the table
    int64_t scratch;                                    // bytes a row of the block's scratch memory
    double least;  // a tree ends where its next nodes together are right less often
    float embedding_scale, eps;
    int rows_are_bf16, norms_residual, norms_output;  // whether features are normed before the block adds to them, or outputs
    int hidden, d, is_bf16;            // size of a feature, of the rope; of what the block reads
    int taps, tap_size;                // fuse makes a feature of taps * tap_size numbers
    int fuse_is_bf16, join_is_bf16;    // types of their outputs
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
