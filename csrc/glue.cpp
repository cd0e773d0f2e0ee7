// The operations between matrix products: residual sums and norms, rotary positions and writes to the KV pool, and gated
// activations. Each is one pass over memory. The order of a row's sums depends on its length alone, so its bits are the
// same in any batch.
#include "activations.h"
#include "integer_rows.h"
#include "operations.h"
#include "pool.h"
#include <type_traits>

namespace {

constexpr int64_t PIECE = 1 << 11;  // elements; for fewer, sharing costs more than the work

// 1 / root mean square of n floats (a multiple of LANES).
template <class T>
float inverse_rms(const T* x, int n, float eps) {
    floats squares = {};
    for (int j = 0; j < n; j += LANES) {
        floats v = load(x + j);
        squares = fused(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / n + eps);
}

template <class In, class Out>
void add_norm(const float* x, const In* delta, const float* post, const float* weight, float eps, int64_t rows, int n,
              float* total, Out* normed) {
    parallel(rows, PIECE / n, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* source = x + r * n;
            if (delta) {
                const In* d = delta + r * n;
                float scale = post ? inverse_rms(d, n, eps) : 1.0f;
                for (int j = 0; j < n; j += LANES) {
                    floats v = load(d + j);
                    if (post) v = v * scale * load(post + j);
                    store(total + r * n + j, load(source + j) + v);
                }
                source = total + r * n;
            }
            if (weight) {
                float scale = inverse_rms(source, n, eps);
                for (int j = 0; j < n; j += LANES) keep(normed + r * n + j, load(source + j) * scale * load(weight + j));
            }
        }
    });
}

// Rotates one head, its dimension i with i + d / 2; `sin` has its first half negated.
void rotate(const float* x, const float* cos, const float* sin, int d, float* out) {
    for (int j = 0; j < d; j += LANES) {
        int other = j < d / 2 ? j + d / 2 : j - d / 2;
        store(out + j, fused(load(x + j), load(cos + j), load(x + other) * load(sin + j)));
    }
}

struct Heads {
    int queries, gates, keys, d;
    int64_t slots;
    float eps, scale;
};

// Elements of a row of d numbers in a pool of T.
template <class T>
int64_t row_size(int d) { return std::is_integral_v<T> ? integer_row<T>(d) : d; }

// Writes d numbers of a key or a value to its row.
template <class T>
void keep_row(const float* x, int d, bool, T* row) {
    for (int j = 0; j < d; j += LANES) keep(row + j, load(x + j));
}

void keep_row(const float* x, int d, bool is_value, int16_t* row) {
    if (is_value) keep_row(x, d, is_value, (bf16*)row);
    else keep_integer_row(x, d, row);
}

void keep_row(const float* x, int d, bool, int8_t* row) { keep_integer_row(x, d, row); }

template <class In, class Out>
void rotate_store(const In* qkv, const float* cos, const float* sin, const float* q_norm, const float* k_norm,
                  const float* v_norm, const float* centre, const int64_t* slot, int64_t rows, const Heads& s, float* q, Out* kv) {
    const int d = s.d, first = s.queries + s.gates, all = first + 2 * s.keys;
    parallel(rows, PIECE / (all * d), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            for (int h = 0; h < all; ++h) {
                if (h == s.queries) h = first;
                const In* source = qkv + (r * all + h) * d;
                const bool is_query = h < s.queries, is_value = h >= first + s.keys;
                float head[1024], turned[1024];
                const float* norm = is_query ? q_norm : is_value ? v_norm : k_norm;
                float scale = norm ? inverse_rms(source, d, s.eps) : 1.0f;
                for (int j = 0; j < d; j += LANES) {
                    floats v = load(source + j);
                    if (norm) v = v * scale * load(norm + j);
                    store(head + j, v);
                }
                if (!is_value) rotate(head, cos + r * d, sin + r * d, d, turned);
                if (centre && !is_query && !is_value)
                    for (int j = 0; j < d; j += LANES) store(turned + j, load(turned + j) - load(centre + int64_t(h - first) * d + j));
                const float* result = is_value ? head : turned;
                if (is_query)
                    for (int j = 0; j < d; j += LANES) store(q + (r * s.queries + h) * d + j, load(result + j) * s.scale);
                else
                    keep_row(result, d, is_value, kv + (int64_t(h - first) * s.slots + slot[r]) * row_size<Out>(d));
            }
        }
    });
}

constexpr float LIMIT = 7.0f, SHARPNESS = 1.702f;  // of gpt-oss

// min and max of each number. Comparisons with NaN are false, so that it stays.
inline floats at_most(floats x, float limit) { return x > limit ? splat(limit) : x; }
inline floats at_least(floats x, float limit) { return x < limit ? splat(limit) : x; }

// Within 1.5e-7 of erf (Abramowitz and Stegun 1964, 7.1.26).
inline floats error_function(floats x) {
    const floats size = x < 0.0f ? -x : x, t = 1.0f / (0.3275911f * size + 1.0f);
    floats sums = splat(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sums = fused(sums, t, splat(c));
    const floats share = 1.0f - sums * t * exp(-size * size);
    return x < 0.0f ? -share : share;
}

// The activation of a number, without a gate or before it.
inline floats activated(floats x, Activation activation) {
    switch (activation) {
        case RELU: return at_least(x, 0.0f);
        case GATED_SQUARED_RELU:
        case SQUARED_RELU: return at_least(x, 0.0f) * at_least(x, 0.0f);
        case GELU:
        case PLAIN_GELU: return 0.5f * x * (error_function(0.70710678f * x) + 1.0f);
        case GELU_TANH:  // x sigmoid(2 u): (1 + tanh u) / 2 = sigmoid(2 u)
        case PLAIN_GELU_TANH: return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
        default: return x * sigmoid(x);
    }
}

template <class T>
void gated(const T* gate_up, Activation activation, int64_t rows, int n, T* out) {
    const int wide = parts(activation) * n;
    parallel(rows, PIECE / n, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const T *gate = gate_up + r * wide, *up = gate + n;
            for (int j = 0; j < n; j += LANES) {
                floats x = load(gate + j);
                if (activation == CLIPPED) {
                    x = at_most(x, LIMIT);
                    x = x * sigmoid(SHARPNESS * x) * (at_least(at_most(load(up + j), LIMIT), -LIMIT) + 1.0f);
                } else {
                    x = activated(x, activation);
                    if (wide > n) x = x * load(up + j);
                }
                keep(out + r * n + j, x);
            }
        }
    });
}

}  // namespace

extern "C" void soothsay_add_norm(const float* x, const void* delta, int delta_is_bf16, const float* post,
                                  const float* weight, float eps, int64_t rows, int n, float* total, void* normed,
                                  int normed_is_bf16) {
    auto run = [&](auto* d, auto* out) { add_norm(x, d, post, weight, eps, rows, n, total, out); };
    if (delta_is_bf16 && normed_is_bf16) run((const bf16*)delta, (bf16*)normed);
    else if (delta_is_bf16) run((const bf16*)delta, (float*)normed);
    else if (normed_is_bf16) run((const float*)delta, (bf16*)normed);
    else run((const float*)delta, (float*)normed);
}

extern "C" void soothsay_rotate_store(const void* qkv, int is_bf16, const float* cos, const float* sin,
                                      const float* q_norm, const float* k_norm, const float* v_norm,
                                      const float* centre, const int64_t* slot, int64_t rows, int queries, int gates, int keys, int d,
                                      int64_t slots, float eps, float scale, float* q, void* kv, int format) {
    Heads s{queries, gates, keys, d, slots, eps, scale};
    auto write = [&](auto* pool) {
        if (is_bf16) rotate_store((const bf16*)qkv, cos, sin, q_norm, k_norm, v_norm, centre, slot, rows, s, q, pool);
        else rotate_store((const float*)qkv, cos, sin, q_norm, k_norm, v_norm, centre, slot, rows, s, q, pool);
    };
    if (format == SOOTHSAY_INT16_KEYS) write((int16_t*)kv);
    else if (format == SOOTHSAY_INT8) write((int8_t*)kv);
    else if (format == SOOTHSAY_BF16) write((bf16*)kv);
    else write((float*)kv);
}

extern "C" void soothsay_sigmoid_gate(float* x, const void* gates, int is_bf16, int64_t stride, int64_t rows, int n) {
    parallel(rows, PIECE / n, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            for (int j = 0; j < n; j += LANES) {
                const floats gate = is_bf16 ? load((const bf16*)gates + r * stride + j) : load((const float*)gates + r * stride + j);
                store(x + r * n + j, load(x + r * n + j) * sigmoid(gate));
            }
    });
}

extern "C" void soothsay_gated(const void* gate_up, int is_bf16, int activation, int64_t rows, int n, void* out) {
    if (is_bf16)
        gated((const bf16*)gate_up, Activation(activation), rows, n, (bf16*)out);
    else
        gated((const float*)gate_up, Activation(activation), rows, n, (float*)out);
}
