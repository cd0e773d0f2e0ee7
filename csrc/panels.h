// The layout of weights, and a thread's sums while it reads a panel.
//
// Weights are stored in panels of PANEL outputs. A step of a panel is 4 bytes an output: 2 bfloat16, 4 integers of 8 bits, or 8
// of 4 bits (inputs 0-3 in the low halves of the bytes, 4-7 in the high halves).
#pragma once
#include "simd.h"
#include <vector>

namespace {

constexpr int PANEL = 64;                  // outputs
constexpr int COLUMNS = PANEL / LANES;     // registers for one value of each output
constexpr int64_t STEP = 4 * PANEL;        // bytes
constexpr int CHUNK = 64;                  // steps that all rows read before the next chunk: they stay in the first cache

inline ints bytes(const uint8_t* p) {
    ints v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline ints splat(int32_t x) { return ints{} + x; }

// Four bytes of x in every lane.
inline ints splat(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return splat(four);
}

struct Weights {
    const uint8_t* data;   // [panels, steps, PANEL, 4]
    const void* scales;    // [panels, groups, PANEL], float or half
    const uint8_t* zeros;  // [panels, groups, PANEL], or null: `zero` everywhere
    const float* bias;     // [outputs] or null
    int inputs, outputs, group, zero;
    bool half;

    int groups() const { return inputs / group; }
    floats scale(int64_t at) const { return half ? load((const fp16*)scales + at) : load((const float*)scales + at); }
};

template <class Input>
struct Inputs {
    const Input* data;    // [rows, inputs], or [rows / height, inputs / width, height, width] in the layout of tiles
    int height, width;
    const float* scales;  // [rows, groups]
    const int32_t* sums;  // [rows, groups]

    // The beginning of the tile whose rows begin at `rows`.
    const Input* tile(int64_t rows, int input) const {
        return data + rows + int64_t(input / width) * height * width + input % width;
    }
};

// A thread's sums for a panel: of the current group, and totals of the groups before.
template <class Sums>
struct Partial {
    std::vector<Sums> sums;      // [rows, COLUMNS]
    std::vector<floats> totals;  // [rows, COLUMNS]
};

// Steps [begin, end) of a panel, and cache lines to prefetch meanwhile.
struct Chunk {
    int panel, begin, end;
    const uint8_t* data;  // from `begin` on
    const uint8_t* ahead;
    int lines;
};

// Adds the scaled sums of a group to the totals; the first group sets them.
template <int R, int C>
inline __attribute__((always_inline)) void scale_group(const Weights& w, const Inputs<int8_t>& x, int panel, int64_t row,
                                                       int g, int column, const ints (*sums)[C], floats* totals) {
    const int64_t at = (int64_t(panel) * w.groups() + g) * PANEL + column * LANES;
    for (int c = 0; c < C; ++c) {
        const floats scale = w.scale(at + c * LANES);
        ints zero = {};
        if (w.zeros)
            for (int i = 0; i < LANES; ++i) zero[i] = w.zeros[at + c * LANES + i];
        for (int r = 0; r < R; ++r) {
            const int64_t group = (row + r) * w.groups() + g;
            const ints offset = w.zeros ? zero * x.sums[group] : splat(w.zero * x.sums[group]);
            const floats exact = __builtin_convertvector(sums[r][c] - offset, floats);
            floats& total = totals[r * COLUMNS + c];
            total = fused(exact, scale * x.scales[group], g ? total : floats{});
        }
    }
}

}  // namespace
