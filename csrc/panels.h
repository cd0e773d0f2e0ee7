// The layout of weights, and a thread's sums while it reads a panel.
//
// Weights are stored in panels of PANEL outputs, and a panel in steps of 4 bytes an output. A step has 2 bfloat16, 4 integers
// of 8 bits, 8 of 4 bits or 16 of 2 bits. Byte k of an output has inputs k, 4 + k and so on, the first in the lowest bits.
// Integers of 5 and 6 bits are cut: a unit has steps with their lower 4 bits, then a step with the upper bits of all of them.
// Integers of 8 bits are kept as products take them; see ZERO_BYTE.
#pragma once
#include "simd.h"
#include <vector>

namespace {

constexpr int PANEL = 64;                  // outputs
constexpr int COLUMNS = PANEL / LANES;     // registers for one value of each output
constexpr int64_t STEP = 4 * PANEL;        // bytes
constexpr int CHUNK = 64;                  // steps, about, that all rows read before the next chunk: they stay in the first cache

// Bits that change in four unsigned integers of 8 bits when they are packed, so that products take them as they are.
constexpr uint32_t FLIPPED = 0x01010101u * (128 - ZERO_BYTE);

inline ints bytes(const void* p) {
    ints v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Four bytes of x in every lane.
inline ints splat(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return splat(four);
}

// Where products find the factors of groups: as the weights have them, in one level or two, or in `GroupFactors`.
enum class Source { HALVES, LEVELS, FLOATS };

// Numbers of the groups of inputs, for all outputs of a panel.
struct Factors {
    const void* values;  // [panels, groups, PANEL]: float or half, or int8 if there are units; null: no such numbers
    const fp16* units;   // [panels, groups / span, PANEL], or null
    int groups, span;
    bool half;

    int64_t at(int panel, int group) const { return (int64_t(panel) * groups + group) * PANEL; }
    int64_t unit_at(int panel, int group) const { return (int64_t(panel) * (groups / span) + group / span) * PANEL; }

    // The best source for `tiles` tiles of rows. Several tiles widen once what is dear to widen.
    Source source(int64_t tiles) const {
        if ((!units && !half) || (tiles > 1 && (units || !WIDENS_HALVES))) return Source::FLOATS;
        return units ? Source::LEVELS : Source::HALVES;
    }

    // Those of groups [begin, end) of a panel, in floats: [groups, COLUMNS]. Prefetches as many after them.
    void read(int panel, int begin, int end, floats* out) const {
        const int64_t from = at(panel, begin), count = int64_t(end - begin) * PANEL;
        const int64_t each = units ? 1 : half ? 2 : 4;
        for (int64_t i = count; i < 2 * count; i += 64 / each)
            __builtin_prefetch((const char*)values + (from + i) * each);
        if (!units)
            for (int64_t i = 0; i < count; i += LANES)
                *out++ = half ? load((const fp16*)values + from + i) : load((const float*)values + from + i);
        else {
            const int8_t* small = (const int8_t*)values + from;
            const fp16* unit = units + unit_at(panel, begin);
            for (int left = span - begin % span; begin < end; unit += PANEL, left = span) {
                floats of_span[COLUMNS];
                for (int c = 0; c < COLUMNS; ++c) of_span[c] = load(unit + c * LANES);
                __builtin_prefetch(unit + 2 * PANEL), __builtin_prefetch(unit + 2 * PANEL + 32);
                for (; left && begin < end; --left, ++begin, small += PANEL)
                    for (int c = 0; c < COLUMNS; ++c) *out++ = load(small + c * LANES) * of_span[c];
            }
        }
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

    int groups() const { return scales.groups; }

    Source source(int64_t tiles) const {
        const Source best = scales.source(tiles);
        return zeros || (minimums.values && minimums.source(tiles) != best) ? Source::FLOATS : best;
    }
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

// Groups [begin, end) of a panel, or units if there are no groups, and cache lines to prefetch meanwhile.
struct Chunk {
    int panel, begin, end;
    Source factors;
    const uint8_t* data;   // from `begin` on
    const uint8_t* ahead;
    int lines;             // for each unit
};

// What a weight has beside its scale: the same zero everywhere, zeros of groups, or minimums.
enum class Beside { ZERO, ZEROS, MINIMUMS };

// The factors of some groups of a panel, in floats: [groups, COLUMNS]. The arrays never shrink: to grow them again would
// write zeros each time.
struct GroupFactors {
    std::vector<floats> scales, beside;

    void read(const Weights& w, int panel, int begin, int end) {
        const size_t count = size_t(end - begin) * COLUMNS;
        if (scales.size() < count) scales.resize(count), beside.resize(count);
        w.scales.read(panel, begin, end, scales.data());
        if (w.minimums.values) w.minimums.read(panel, begin, end, beside.data());
        else if (w.zeros)
            for (size_t i = 0; i < count; ++i)
                beside[i] = load(w.zeros + (int64_t(panel) * w.groups() + begin) * PANEL + i * LANES);
    }
};

// A thread's sums for a panel.
struct Partial {
    std::vector<floats> totals;  // [rows, COLUMNS]
    GroupFactors factors;        // of the groups of the current chunk
};

struct Nothing {
    void operator()() const {}
};

// Adds the scaled sums of a group to the totals. The inputs' scale and sum are those of the group, for the next row `stride`
// further. From CENTERED sums, a zero that is the same everywhere was taken before. Calls `meanwhile` before each row.
template <Beside KIND, bool CENTERED, int R, int C, class Meanwhile = Nothing>
inline __attribute__((always_inline)) void scale_group(const float* input_scales, const int32_t* input_sums, int64_t stride,
                                                       int zero, const floats* scales, const floats* beside,
                                                       const ints (*sums)[C], floats (*totals)[C],
                                                       Meanwhile meanwhile = {}) {
    for (int r = 0; r < R; ++r) {
        meanwhile();
        const floats factor = splat(input_scales[r * stride]);
        const ints sum = splat(input_sums[r * stride]);
        for (int c = 0; c < C; ++c) {
            ints exact = sums[r][c];
            if constexpr (KIND == Beside::ZERO && !CENTERED) exact -= sum * zero;
            if constexpr (KIND == Beside::ZEROS) exact -= __builtin_convertvector(beside[c], ints) * sum;
            floats total = totals[r][c];
            if constexpr (KIND == Beside::MINIMUMS) total = fused(beside[c], factor * __builtin_convertvector(sum, floats), total);
            totals[r][c] = fused(__builtin_convertvector(exact, floats), scales[c] * factor, total);
        }
    }
}

}  // namespace
