// Rows times weights of one format. Each format is compiled in one of the files linear_*.cpp, which takes long.
#pragma once
#include "pool.h"
#include "products.h"
#include "tiled.h"
#include "vectors.h"
#include <algorithm>
#include <vector>

namespace {

constexpr int64_t ROW_PIECE = 1 << 11;     // inputs that are laid out in one piece
constexpr int64_t WEIGHT_PIECE = 1 << 18;  // weights of a piece: some 20 us

// Writes values [count, COLUMNS] of rows from `row` on.
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

// Rows times weights of one format.
template <class F>
class ProductOf : public Product {
    typedef typename F::Input Input;
    static constexpr bool INTEGER = F::INPUTS > 2;
    const Rows x;
    const Weights w;
    void* const out;
    const bool out_is_bf16;
    int height = 1, width, shift = 31;  // of a tile; width is all inputs, or 2^shift
    int64_t computed;                   // rows, with those that fill a tile
    std::unique_ptr<floats[]> laid;     // aligned to a cache line: loading tiles across lines is slow
    std::vector<float> scales;
    std::vector<int32_t> sums;
    Inputs<Input> inputs;
#if defined(SOOTHSAY_TILES)
    const Tiling tiling;
    const bool tiled;
#endif

    bool as_they_are() const { return !INTEGER && bool(x.are_bf16) == (sizeof(Input) == 2) && !x.order; }

    void write(int panel, int64_t row, int64_t count, const floats* values) const {
        if (out_is_bf16) write_panel(w, panel, row, count, values, (bf16*)out);
        else write_panel(w, panel, row, count, values, (float*)out);
    }

    template <class In>
    void lay_rows(const In* source, int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const In* from = source + (x.order ? x.order[r] : r) * w.inputs;
            Input* row = (Input*)laid.get() + r / height * height * w.inputs + r % height * width;
            auto at = [&](int i) { return row + int64_t(i >> shift) * height * width + (i & ((1u << shift) - 1)); };
            if constexpr (INTEGER)
                quantize(from, w.inputs, w.group, at, &scales[r * w.groups()], &sums[r * w.groups()]);
            else
                for (int i = 0; i < w.inputs; i += LANES) keep(at(i), load(from + i));
        }
    }

  public:
    ProductOf(const Rows& rows, const Weights& weights, void* target, int target_is_bf16)
        : x(rows), w(weights), out(target), out_is_bf16(target_is_bf16), width(w.inputs)
#if defined(SOOTHSAY_TILES)
          ,
          tiling(Tiling::of(F(), rows.count, w)), tiled(!IN_FLOATS<F> && rows.count >= tiled_from<F>(w))
#endif
    {
        panels = (w.outputs + PANEL - 1) / PANEL, this->size = int64_t(w.inputs) * w.outputs;
        row_piece = std::max(1, int(ROW_PIECE / w.inputs));
        // Every thread gets a few pieces of a small matrix, so that a late one finds some left.
        panel_piece = std::max<int64_t>(
            1, std::min<int64_t>(panels / (4 * pool_threads()), WEIGHT_PIECE / (int64_t(w.inputs) * PANEL)));
        computed = x.count;
#if defined(SOOTHSAY_TILES)
        if (tiled) {
            computed = tiling.tiles * tiling.height, height = tiling.height;
            if (!as_they_are() || tiling.tiles > 1) {
                width = tiling.steps * 4 / int(sizeof(Input));
                shift = __builtin_ctz(width);
            }
        }
#endif
        if (PAIR_OF<F> > 1 && x.count > 1) {
            computed = paired(x.count), height = PAIR, width = 8 / int(sizeof(Input));
            shift = __builtin_ctz(width);
        }
        unlaid = as_they_are() && width == w.inputs ? 0 : x.count;
        if (unlaid)
            laid.reset(new floats[computed * w.inputs * int64_t(sizeof(Input)) / int64_t(sizeof(floats)) + 1]);
        if (INTEGER) scales.resize(computed * w.groups()), sums.resize(computed * w.groups());
        inputs = {unlaid ? (const Input*)laid.get() : (const Input*)x.data, height, width, scales.data(), sums.data()};
    }

    void lay(int64_t begin, int64_t end) override {
        if (x.are_bf16) lay_rows((const bf16*)x.data, begin, end);
        else lay_rows((const float*)x.data, begin, end);
    }

    void multiply(int64_t begin, int64_t end) override {
#if defined(SOOTHSAY_TILES)
        if constexpr (!IN_FLOATS<F>) if (tiled) {
            const TileShape shape(height, tiling.steps);
            Place<F> place(w);
            for (int panel = int(begin); panel < end; ++panel) {
                auto keep = [&](int64_t row, int64_t count, const floats* values) { write(panel, row, count, values); };
                if (tiling.tiles > 1) multiply_panel<F, true>(w, inputs, tiling, panel, place, keep);
                else multiply_panel<F, false>(w, inputs, tiling, panel, place, keep);
            }
            return;
        }
#endif
        thread_local Partial partial;  // kept, since allocating takes as long as a small product
        partial.totals.resize(computed * COLUMNS);
        for (int panel = int(begin); panel < end; ++panel) {
            sum_panel<F>(w, inputs, panel, computed, partial);
            write(panel, 0, x.count, partial.totals.data());
        }
    }
};

Factors factors(const soothsay_factors& f, int groups) {
    return {f.values, (const fp16*)f.units, groups, f.units ? f.span : 1, f.are_half != 0};
}

template <class F>
Product* product_of(const Rows& x, const soothsay_weights& p, int64_t stride, void* out, int out_is_bf16) {
    const int groups = p.inputs / p.group, zero = p.minimums.values ? 0 : 1 << ((p.table ? 8 : p.bits) - 1);
    const Weights w{(const uint8_t*)p.data, factors(p.scales, groups), factors(p.minimums, groups), p.zeros, p.bias,
                    p.table, p.inputs, p.outputs, p.group, zero, stride};
    return new ProductOf<F>(x, w, out, out_is_bf16);
}

}  // namespace
