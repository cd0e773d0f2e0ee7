// What a feed-forward layer computes of its first product.
#pragma once

namespace {

enum Activation { SILU, GELU_TANH, GELU, CLIPPED, GATED_SQUARED_RELU, SQUARED_RELU, RELU, PLAIN_GELU_TANH, PLAIN_GELU, PLAIN_SILU };

// Parts of the product for each number that comes out: a gate and a factor, or one without a gate.
inline int parts(int activation) { return activation >= SQUARED_RELU ? 1 : 2; }

}  // namespace
