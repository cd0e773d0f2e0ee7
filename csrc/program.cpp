// Runs programs: the operations of decoder layers, one after the other, in one call. A call from Python between two operations
// takes as long as a small product.
#include "operations.h"
#include "pool.h"
#include "products.h"
#include "simd.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t PIECE = 1 << 11;  // elements; for fewer, sharing costs more than the work

// An operand at its place in this pass.
struct Operand : soothsay_operand {
    char* data;

    Operand(const soothsay_operand& operand, const soothsay_pass& pass, const soothsay_layer& layer) : soothsay_operand(operand) {
        char* const bases[] = {nullptr, (char*)place, pass.scratch + pass.rows * place, (char*)pass.stream, (char*)pass.inputs,
                               (char*)layer.embedding};
        data = bases[where] ? bases[where] + begin : nullptr;
    }

    float* floats() const { return (float*)data; }
    int width() const { return heads * size; }
};

// Calls f with a pointer of the operand's element type.
template <class F>
void typed(const Operand& o, F f) {
    if (o.is_bf16) f((bf16*)o.data);
    else f((float*)o.data);
}

// Elements of a row, first in registers, then one by one: vector(j) and single(j).
template <class V, class S>
inline void across(int n, V vector, S single) {
    int j = 0;
    for (; j + LANES <= n; j += LANES) vector(j);
    for (; j < n; ++j) single(j);
}

// Calls f(row) for all rows of n elements, some in each thread.
template <class F>
void each_row(int64_t rows, int n, F f) {
    parallel(rows, PIECE / (n ? n : 1), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) f(r);
    });
}

void copy(const Operand& from, const Operand& to, int64_t rows) {
    typed(from, [&](auto* x) {
        typed(to, [&](auto* y) {
            each_row(rows, from.width(), [&](int64_t r) {
                for (int h = 0; h < from.heads; ++h) {
                    auto* source = x + r * from.row + h * from.head;
                    auto* target = y + r * to.row + h * to.head;
                    if (from.is_bf16 == to.is_bf16) std::memcpy((void*)target, source, sizeof *source * from.size);
                    else across(from.size, [&](int j) { keep(target + j, load(source + j)); },
                                [&](int j) { keep(target + j, widen(source[j])); });
                }
            });
        });
    });
}

// A norm that subtracts the mean first. `bias` may be null.
void centred_norm(const float* x, const float* weight, const float* bias, float eps, int64_t rows, int n, const Operand& out) {
    typed(out, [&](auto* y) {
        each_row(rows, n, [&](int64_t r) {
            const float* own = x + r * n;
            floats total = {}, squares = {};
            for (int j = 0; j < n; j += LANES) total = total + load(own + j);
            const float mean = sum(total) / n;
            for (int j = 0; j < n; j += LANES) {
                const floats v = load(own + j) - mean;
                squares = fused(v, v, squares);
            }
            const float scale = 1.0f / std::sqrt(sum(squares) / n + eps);
            for (int j = 0; j < n; j += LANES) {
                const floats v = (load(own + j) - mean) * scale * load(weight + j);
                keep(y + r * n + j, bias ? v + load(bias + j) : v);
            }
        });
    });
}

// x times a factor, or times the numbers of a row.
void scale(const Operand& x, const float* numbers, float factor, const Operand& out, int64_t rows) {
    const int n = x.width();
    typed(x, [&](auto* from) {
        auto* to = (decltype(from))out.data;
        each_row(rows, n, [&](int64_t r) {
            across(n, [&](int j) { keep(to + r * n + j, load(from + r * n + j) * (numbers ? load(numbers + j) : splat(factor))); },
                   [&](int j) { keep(to + r * n + j, widen(from[r * n + j]) * (numbers ? numbers[j] : factor)); });
        });
    });
}

// a x + b y.
void blend(const Operand& x, float a, const Operand& y, float b, float* out, int64_t rows) {
    const int n = x.width();
    typed(x, [&](auto* first) {
        typed(y, [&](auto* second) {
            each_row(rows, n, [&](int64_t r) {
                for (int64_t j = r * n; j < (r + 1) * n; j += LANES) store(out + j, load(first + j) * a + load(second + j) * b);
            });
        });
    });
}

// x + sigmoid(gate) y, with a gate for each row.
void add_gated(const Operand& x, const Operand& gates, const Operand& y, float* out, int64_t rows) {
    const int n = x.width();
    typed(gates, [&](auto* gate) {
        typed(y, [&](auto* more) {
            each_row(rows, n, [&](int64_t r) {
                const floats share = sigmoid(splat(widen(gate[r])));
                for (int64_t j = r * n; j < (r + 1) * n; j += LANES) store(out + j, load(x.floats() + j) + share * load(more + j));
            });
        });
    });
}

// Queries times a factor that grows with the position.
void grow(const Operand& x, const float* factors, int span, int shift, int64_t last, const int64_t* positions, float* out, int64_t rows) {
    const int n = x.width();
    each_row(rows, n, [&](int64_t r) {
        const float factor = factors[std::min((positions[r] + shift) / span, last)];
        for (int64_t j = r * n; j < (r + 1) * n; j += LANES) store(out + j, load(x.floats() + j) * factor);
    });
}

// Rotates heads. Products are rounded before they are added, as in stock operations.
void rotate(const Operand& x, const float* cos, const float* sin, const Operand& out, int64_t rows) {
    const int d = x.size, half = d / 2;
    each_row(rows, x.width(), [&](int64_t r) {
        for (int h = 0; h < x.heads; ++h) {
            const float* own = x.floats() + r * x.row + h * x.head;
            float* to = out.floats() + r * out.row + h * out.head;
            for (int j = 0; j < d; j += LANES)
                store(to + j, load(own + j) * load(cos + r * d + j) + load(own + (j < half ? j + half : j - half)) * load(sin + r * d + j));
        }
    });
}

// Writes rows to the slots of a KV pool that has one head.
void store_rows(const Operand& x, void* kv, int format, const int64_t* slots, int64_t rows) {
    const int n = x.width();
    auto write = [&](auto* pool) {
        typed(x, [&](auto* from) {
            for (int64_t r = 0; r < rows; ++r)
                for (int j = 0; j < n; j += LANES) keep(pool + slots[r] * n + j, load(from + r * n + j));
        });
    };
    if (format == SOOTHSAY_BF16) write((bf16*)kv);
    else write((float*)kv);
}

// Each head times weights of its own: x [rows, heads, in] -> out [rows, heads, outputs].
void multiply_heads(const Operand& x, const soothsay_weights* const* weights, const Operand& out, int64_t rows) {
    const int64_t size = (out.is_bf16 ? 2 : 4) * out.size;
    std::vector<int64_t> order(rows * x.heads);
    std::vector<char> made(rows * x.heads * size);  // [heads, rows, outputs]
    Products products;
    for (int h = 0; h < x.heads; ++h) {
        int64_t* own = &order[h * rows];
        for (int64_t r = 0; r < rows; ++r) own[r] = r * x.heads + h;
        add_products({x.data, x.is_bf16, rows, own}, weights[h], &made[h * rows * size], out.is_bf16, products);
    }
    run(products);
    for (int64_t r = 0; r < rows; ++r)
        for (int h = 0; h < x.heads; ++h) std::memcpy(out.data + (r * x.heads + h) * size, &made[(h * rows + r) * size], size);
}

void run(const soothsay_op& op, const soothsay_pass& p, const soothsay_layer& layer) {
    const Operand a(op.operands[0], p, layer), b(op.operands[1], p, layer), c(op.operands[2], p, layer), d(op.operands[3], p, layer);
    const int* n = op.numbers;
    const int64_t rows = p.rows;
    const auto held = [&](int i) { return (const float*)op.held[i]; };
    const auto* states = (const soothsay_states*)layer.states;
    switch (op.kind) {
        case SOOTHSAY_LINEAR:
            return soothsay_linear(a.data, a.is_bf16, rows, (const soothsay_weights*)op.held[0], b.data, b.is_bf16);
        case SOOTHSAY_LINEAR_HEADS:
            return multiply_heads(a, (const soothsay_weights* const*)op.held[0], b, rows);
        case SOOTHSAY_ADD_NORM:
            return soothsay_add_norm(a.floats(), b.data, b.is_bf16, held(0), held(1), op.factors[0], rows, a.width(), c.floats(), d.data, d.is_bf16);
        case SOOTHSAY_CENTRED_NORM:
            return centred_norm(a.floats(), held(0), held(1), op.factors[0], rows, a.width(), b);
        case SOOTHSAY_ROTATE_STORE:
            return soothsay_rotate_store(a.data, a.is_bf16, p.ropes[2 * n[4]], p.ropes[2 * n[4] + 1], held(0), held(1), held(2), held(3), p.slots, rows, n[0],
                                         n[1], n[2], n[3], p.pool_slots, op.factors[0], op.factors[1], b.floats(), layer.kv, layer.format);
        case SOOTHSAY_ATTEND:
            return soothsay_attend(a.floats(), layer.kv, layer.format, &p.sights[n[6]], n[0], n[1], n[2], n[3], p.pool_slots, op.factors[0], n[4],
                                   held(0), held(1), n[5], p.positions, b.floats());
        case SOOTHSAY_SIGMOID_GATE:
            if (a.data != c.data) std::memcpy(c.data, a.data, rows * a.width() * sizeof(float));
            return soothsay_sigmoid_gate(c.floats(), b.data, b.is_bf16, b.row, rows, a.width());
        case SOOTHSAY_DELTA:
            return soothsay_delta_rule(a.data, a.width(), b.data, a.is_bf16, (const soothsay_delta*)op.held[0], states, p.plan, c.floats());
        case SOOTHSAY_STATE_SPACE:
            return soothsay_run_state_space(a.data, rows, a.width(), b.data, a.is_bf16, (const soothsay_state_space*)op.held[0], states, p.plan,
                                            c.floats());
        case SOOTHSAY_CONVOLVE:
            return soothsay_convolve(a.data, a.is_bf16, rows, n[0], (const soothsay_convolution*)op.held[0], states, p.plan, b.floats());
        case SOOTHSAY_CONVOLVED:
            return soothsay_convolved(a.data, a.row, a.is_bf16, (const soothsay_selective*)op.held[0], states, p.plan, b.floats());
        case SOOTHSAY_SCAN:
            return soothsay_scan(a.data, a.width(), b.data, a.is_bf16, (const soothsay_selective*)op.held[0], states, p.plan, c.floats());
        case SOOTHSAY_GATED:
            return soothsay_gated(a.data, a.is_bf16, n[0], rows, b.width(), b.data);
        case SOOTHSAY_MIX:
            return soothsay_mix(a.data, a.is_bf16, rows, b.floats(), (const soothsay_mixture*)op.held[0], c.floats());
        case SOOTHSAY_COPY:
            return copy(a, b, rows);
        case SOOTHSAY_SCALE:
            return scale(a, held(0), op.factors[0], b, rows);
        case SOOTHSAY_BLEND:
            return blend(a, op.factors[0], b, op.factors[1], c.floats(), rows);
        case SOOTHSAY_ADD_GATED:
            return add_gated(a, b, c, d.floats(), rows);
        case SOOTHSAY_GROW:
            return grow(a, held(0), n[0], n[1], n[2], p.positions, b.floats(), rows);
        case SOOTHSAY_ROTATE:
            return rotate(a, p.ropes[2 * n[0]], p.ropes[2 * n[0] + 1], b, rows);
        case SOOTHSAY_ADAPT:
            return soothsay_adapt(a.data, a.is_bf16, rows, a.width(), (const soothsay_low_rank*)op.held[0], p.adapters, b.width(), b.data,
                                  b.is_bf16);
        case SOOTHSAY_STORE:
            return store_rows(a, layer.kv, layer.format, p.slots, rows);
    }
}

}  // namespace

extern "C" void soothsay_run(const soothsay_layer* layers, int count, const soothsay_pass* pass) {
    for (const soothsay_layer* layer = layers; layer < layers + count; ++layer) {
        if (layer->tap) std::memcpy(layer->tap, pass->stream, pass->rows * pass->stream_size * sizeof(float));
        for (int i = 0; i < layer->count; ++i) run(layer->ops[i], *pass, *layer);
    }
}
