// Products of a few rows with weights that are read once: bfloat16, or integers of 2 to 8 bits times activations that are
// quantized here to 8 bits, for each row and group.
//
// One thread sums each output over its inputs, in order. So its bits do not depend on the other rows.
#include "kernels.h"
#include "pool.h"
#include "tiled.h"
#include "vectors.h"
#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15;  // weights; for fewer, waking threads costs more than the work
constexpr int64_t ROW_PIECE = 1 << 13;      // inputs that are laid out in one piece
constexpr int64_t WEIGHT_PIECE = 1 << 18;   // weights of a piece: some 20 us

// Values [count, COLUMNS] of rows from `row` on.
template <class Out>
void write_panel(const Weights& w, int panel, int64_t row, int64_t count, const floats* values, Out* out) {
    const int valid = w.outputs - panel * PANEL < PANEL ? w.outputs - panel * PANEL : PANEL;
    for (int64_t r = 0; r < count; ++r, values += COLUMNS) {
        Out* target = out + (row + r) * w.stride + panel * PANEL;
        for (int c = 0; c < COLUMNS; ++c) {
            floats v = values[c];
            for (int i = 0; w.bias && i < LANES && c * LANES + i < valid; ++i)
                v[i] += w.bias[panel * PANEL + c * LANES + i];
            if ((c + 1) * LANES <= valid) keep(target + c * LANES, v);
            else
                for (int i = 0; c * LANES + i < valid; ++i) keep(target + c * LANES + i, v[i]);
        }
    }
}

// The nearest integers, ties to even.
inline ints nearest(floats x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX__)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (ints)_mm_cvtps_epi32((__m128)x);
#else
    ints v;
    for (int i = 0; i < LANES; ++i) v[i] = int32_t(std::nearbyint(x[i]));
    return v;
#endif
}

// A row as integers of 8 bits: x = scale * q with |q| <= 127, with a scale for each group.
template <class T, class Place>
void quantize(const T* x, int inputs, int group, Place place, float* scales, int32_t* sums) {
    for (int begin = 0; begin < inputs; begin += group) {
        floats largest = {};
        for (int i = begin; i < begin + group; i += LANES) {
            floats v = load(x + i), size = v < 0 ? -v : v;
            largest = size > largest ? size : largest;
        }
        const float top = max(largest), inverse = top > 0 ? 127.0f / top : 0.0f;
        ints total = {};
        for (int i = begin; i < begin + group; i += LANES) {
            ints v = nearest(load(x + i) * inverse);
            total += v;
            keep(place(i), v);
        }
        *scales++ = top / 127.0f;
        *sums++ = sum(total);
    }
}

template <class F, class In, class Out>
void multiply(const In* x, int64_t rows, const Weights& w, Out* out) {
    if (!rows) return;
    typedef typename F::Input Input;
    constexpr bool INTEGER = F::INPUTS > 2;
    const int panels = (w.outputs + PANEL - 1) / PANEL, groups = INTEGER ? w.groups() : 0;
    int64_t computed = rows;
    int height = 1, width = w.inputs, shift = 31;  // width is all inputs, or 2^shift
#if defined(SOOTHSAY_TILES)
    const Tiling tiling = Tiling::of(F(), rows, w);
    const bool tiled = rows >= TILED_FROM<F>;
    if (tiled) {
        computed = tiling.tiles * tiling.height, height = tiling.height;
        if (!std::is_same<In, Input>::value || tiling.tiles > 1) {
            width = tiling.steps * 4 / int(sizeof(Input));
            shift = __builtin_ctz(width);
        }
    }
#endif
    const bool direct = std::is_same<In, Input>::value && width == w.inputs;
    const int64_t registers = computed * w.inputs * int64_t(sizeof(Input)) / int64_t(sizeof(floats)) + 1;
    const std::unique_ptr<floats[]> laid(direct ? nullptr : new floats[registers]);
    Input* const data = (Input*)laid.get();  // aligned to a cache line: loading tiles across lines is slow
    std::vector<float> scales(rows * groups);
    std::vector<int32_t> sums(rows * groups);
    const bool shared = int64_t(w.inputs) * w.outputs > WORTH_THREADS;
    auto lay = [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            Input* row = &data[r / height * height * w.inputs + r % height * width];
            auto at = [&](int i) { return row + int64_t(i >> shift) * height * width + (i & ((1u << shift) - 1)); };
            if constexpr (INTEGER)
                quantize(x + r * w.inputs, w.inputs, w.group, at, &scales[r * groups], &sums[r * groups]);
            else
                for (int i = 0; i < w.inputs; i += LANES) keep(at(i), load(x + r * w.inputs + i));
        }
    };
    if (!direct) parallel(rows, shared ? ROW_PIECE / w.inputs : rows, lay);
    const Inputs<Input> inputs{direct ? (const Input*)x : data, height, width, scales.data(), sums.data()};
    // Every thread gets a few pieces of a small matrix, so that a late one finds some left.
    const int64_t even = panels / (4 * pool_threads()), most = WEIGHT_PIECE / (int64_t(w.inputs) * PANEL);
    const int64_t piece = shared ? std::min(even, most) : panels;
#if defined(SOOTHSAY_TILES)
    if (tiled) {
        parallel(panels, piece, [&](int64_t begin, int64_t end) {
            const TileShape shape(height, tiling.steps);
            Place<F> place(w);
            for (int panel = int(begin); panel < end; ++panel) {
                auto write = [&](int64_t row, int64_t count, const floats* values) {
                    write_panel(w, panel, row, count, values, out);
                };
                if (tiling.tiles > 1) multiply_panel<F, true>(w, inputs, tiling, panel, place, write);
                else multiply_panel<F, false>(w, inputs, tiling, panel, place, write);
            }
        });
        return;
    }
#endif
    parallel(panels, piece, [&](int64_t begin, int64_t end) {
        thread_local Partial<typename F::Sums> partial;  // kept, since allocating takes as long as a small product
        partial.sums.resize(rows * COLUMNS);
        if (INTEGER) partial.totals.resize(rows * COLUMNS);
        for (int panel = int(begin); panel < end; ++panel) {
            sum_panel<F>(w, inputs, panel, rows, partial);
            if constexpr (INTEGER) write_panel(w, panel, 0, rows, partial.totals.data(), out);
            else write_panel(w, panel, 0, rows, partial.sums.data(), out);
        }
    });
}

template <class F>
void multiply(const void* x, int x_is_bf16, int64_t rows, const Weights& w, void* out, int out_is_bf16) {
    auto run = [&](auto* source, auto* target) { multiply<F>(source, rows, w, target); };
    if (x_is_bf16 && out_is_bf16) run((const bf16*)x, (bf16*)out);
    else if (x_is_bf16) run((const bf16*)x, (float*)out);
    else if (out_is_bf16) run((const float*)x, (bf16*)out);
    else run((const float*)x, (float*)out);
}

Factors factors(const soothsay_factors& f, int groups) {
    return {f.values, (const fp16*)f.units, groups, f.units ? f.span : 1, f.are_half != 0};
}

}  // namespace

extern "C" void soothsay_linear(const void* x, int x_is_bf16, int64_t rows, const soothsay_weights* weights, void* out,
                                int out_is_bf16) {
    int64_t stride = 0;
    for (const auto* part = weights; part; part = part->next) stride += part->outputs;
    for (const auto* part = weights; part; part = part->next) {
        const auto& p = *part;
        const int groups = p.inputs / p.group, zero = p.minimums.values ? 0 : 1 << ((p.table ? 8 : p.bits) - 1);
        const Weights w{(const uint8_t*)p.data, factors(p.scales, groups), factors(p.minimums, groups), p.zeros, p.bias,
                        p.table, p.inputs, p.outputs, p.group, zero, stride};
        auto run = [&](auto format) { multiply<decltype(format)>(x, x_is_bf16, rows, w, out, out_is_bf16); };
        if (p.table) run(Int<4, true>());
        else if (p.bits == 2) run(Int<2>());
        else if (p.bits == 4) run(Int<4>());
        else if (p.bits == 5) run(Int<5>());
        else if (p.bits == 6) run(Int<6>());
        else if (p.bits == 8) run(Int<8>());
#if defined(__AVX512BF16__)
        else run(Bf16());
#endif
        out = (char*)out + p.outputs * (out_is_bf16 ? sizeof(bf16) : sizeof(float));
    }
}
