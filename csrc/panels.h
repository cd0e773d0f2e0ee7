// The layout of weights, and a thread's sums while it reads a panel.
//
// Weights are stored in panels of PANEL outputs, and a panel in steps of 4 bytes an output. A step has 2 bfloat16, 4 integers
// of 8 bits, 8 of 4 bits or 16 of 2 bits. Byte k of an output has inputs k, 4 + k and so on, the first in the lowest bits.
// Integers of 5 and 6 bits are cut: a unit has steps with their lower 4 bits, then a step with the upper bits of all of them.
#pragma once
#include "simd.h"
#include <vector>

namespace {

constexpr int PANEL = 64;                  // outputs
constexpr int COLUMNS = PANEL / LANES;     // registers for one value of each output
constexpr int64_t STEP = 4 * PANEL;        // bytes
constexpr int CHUNK = 64;                  // steps, at most, that all rows read before the next chunk: they stay in the first cache

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

// Numbers of the groups of inputs, for all outputs of a panel.
struct Factors {
    const void* values;  // [panels, groups, PANEL]: float or half, or int8 if there are units; null: no such numbers
    const fp16* units;   // [panels, groups / span, PANEL], or null
    int groups, span;
    bool half;

    // Those of the outputs from `column` on.
    floats load(int panel, int group, int column) const {
        const int64_t at = (int64_t(panel) * groups + group) * PANEL + column * LANES;
        if (!units) return half ? ::load((const fp16*)values + at) : ::load((const float*)values + at);
        const int64_t unit = (int64_t(panel) * (groups / span) + group / span) * PANEL + column * LANES;
        return widen<int8_t>((const int8_t*)values + at) * ::load(units + unit);
    }

    // LANES small integers.
    template <class T>
    static floats widen(const T* values) {
        typedef T chars __attribute__((vector_size(LANES)));
        chars small;
        std::memcpy(&small, values, sizeof small);
        return __builtin_convertvector(__builtin_convertvector(small, ints), floats);
    }
};

// A weight is scale * (integer - zero) + minimum.
struct Weights {
    const uint8_t* data;  // [panels, steps, PANEL, 4]
    Factors scales, minimums;
    const uint8_t* zeros;  // [panels, groups, PANEL], or null: `zero` everywhere
    const float* bias;     // [outputs] or null
    const uint8_t* table;  // the integers of 16 codes, or null
    int inputs, outputs, group, zero;
    int64_t stride;  // distance between rows of the output

    int groups() const { return inputs / group; }
};

template <class Input>
struct Inputs {
    const Input* data;    // [rows, inputs], or [rows / height, inputs / width, height, width] in the layout of tiles
    int height, width;
    const float* scales;  // [rows, groups]
    const int32_t* sums;  // [rows, groups], of the integers

    // The beginning of the tile whose rows begin at `rows`.
    const Input* tile(int64_t rows, int input) const {
        return data + rows + int64_t(input / width) * height * width + input % width;
    }
};

// Units [begin, end) of a panel, and cache lines to prefetch meanwhile.
struct Chunk {
    int panel, begin, end;
    const uint8_t* data;  // from `begin` on
    const uint8_t* ahead;
    int lines;
};

// What a weight has beside its scale: the same zero everywhere, zeros of groups, or minimums.
enum class Beside { ZERO, ZEROS, MINIMUMS };

// The factors of some groups of a panel, in floats: [groups, COLUMNS].
struct GroupFactors {
    std::vector<floats> scales, beside;

    void read(const Weights& w, int panel, int begin, int end) {
        scales.resize((end - begin) * COLUMNS);
        if (w.minimums.values || w.zeros) beside.resize(scales.size());
        for (int g = begin, i = 0; g < end; ++g)
            for (int c = 0; c < COLUMNS; ++c, ++i) {
                scales[i] = w.scales.load(panel, g, c);
                if (w.minimums.values) beside[i] = w.minimums.load(panel, g, c);
                else if (w.zeros)
                    beside[i] = Factors::widen(w.zeros + (int64_t(panel) * w.groups() + g) * PANEL + c * LANES);
            }
    }
};

// A thread's sums for a panel: of the current group, and totals of the groups before.
template <class Sums>
struct Partial {
    std::vector<Sums> sums;      // [rows, COLUMNS]
    std::vector<floats> totals;  // [rows, COLUMNS]
    GroupFactors factors;        // of the groups that end in the current chunk
};

// Adds the scaled sums of group g to the totals; the first group sets them. `scales` and `beside` are those of the group.
template <Beside KIND, int R, int C>
inline __attribute__((always_inline)) void scale_group(const Weights& w, const Inputs<int8_t>& x, int64_t row, int g,
                                                       const floats* scales, const floats* beside, const ints (*sums)[C],
                                                       floats* totals) {
    for (int r = 0; r < R; ++r) {
        const int64_t group = (row + r) * w.groups() + g;
        const int32_t sum = x.sums[group];
        const floats factor = splat(x.scales[group]), weighted = splat(x.scales[group] * float(sum));
        const ints offset = splat(w.zero * sum);
        floats* into = totals + r * COLUMNS;
        for (int c = 0; c < C; ++c) {
            ints exact = sums[r][c];
            if constexpr (KIND == Beside::ZERO) exact -= offset;
            if constexpr (KIND == Beside::ZEROS) exact -= __builtin_convertvector(beside[c], ints) * sum;
            floats total = g ? into[c] : floats{};
            if constexpr (KIND == Beside::MINIMUMS) total = fused(beside[c], weighted, total);
            into[c] = fused(__builtin_convertvector(exact, floats), scales[c] * factor, total);
        }
    }
}

template <int R, int C>
inline __attribute__((always_inline)) void scale_group(const Weights& w, const Inputs<int8_t>& x, int64_t row, int g,
                                                       const floats* scales, const floats* beside, const ints (*sums)[C],
                                                       floats* totals) {
    if (w.minimums.values) scale_group<Beside::MINIMUMS, R, C>(w, x, row, g, scales, beside, sums, totals);
    else if (w.zeros) scale_group<Beside::ZEROS, R, C>(w, x, row, g, scales, beside, sums, totals);
    else scale_group<Beside::ZERO, R, C>(w, x, row, g, scales, beside, sums, totals);
}

}  // namespace
