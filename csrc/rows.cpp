// Some rows of a packed weight, as floats: a table of embeddings that is also the output head is stored once.
#include "kernels.h"
#include "panels.h"
#include <algorithm>
#include <vector>

namespace {

// Bits of an integer that stand together: words of four bytes, in which byte k has inputs k, 4 + k and so on, the first in
// the lowest bits.
struct Plane {
    int bits, shift;
};

// The planes of integers, the lowest bits first.
struct Planes {
    Plane planes[2];
    int count;

    explicit Planes(int bits)
        : planes{{bits == 6 || bits == 5 ? 4 : bits, 0}, {bits - 4, 4}}, count(bits == 6 || bits == 5 ? 2 : 1) {}

    int inputs() const { return 32 / planes[count - 1].bits; }  // of a unit
};

// Adds the integers of a unit to `out`; returns where the next unit of the same output begins.
const uint8_t* read_unit(const Planes& all, const uint8_t* step, int32_t* out) {
    for (int p = 0; p < all.count; ++p) {
        const Plane plane = all.planes[p];
        const int fields = 8 / plane.bits, mask = (1 << plane.bits) - 1;
        for (int first = 0; first < all.inputs(); first += 4 * fields, step += STEP)
            for (int k = 0; k < 4; ++k)
                for (int f = 0; f < fields; ++f)
                    out[first + 4 * f + k] |= (step[k] >> plane.bits * f & mask) << plane.shift;
    }
    return step;
}

// A number of a panel's row, whose rows are whole registers.
float widened(const fp16* halves, int64_t i) { return load(halves + i / LANES * LANES)[i % LANES]; }

// The factor of a group for the output that is number `place` of its panel.
float factor(const soothsay_factors& f, int groups, int64_t panel, int group, int place) {
    const int64_t i = (panel * groups + group) * PANEL + place;
    if (!f.units) return f.are_half ? widened((const fp16*)f.values, i) : ((const float*)f.values)[i];
    const int64_t unit = (panel * (groups / f.span) + group / f.span) * PANEL + place;
    return ((const int8_t*)f.values)[i] * widened((const fp16*)f.units, unit);
}

void read_row(const soothsay_weights& w, int64_t row, std::vector<int32_t>& integers, float* out) {
    const Planes planes(w.bits);
    const int64_t panel = row / PANEL, bytes = int64_t(w.inputs) * w.bits / 8;  // of an output
    const int place = row % PANEL, groups = w.inputs / w.group;
    const uint8_t* step = (const uint8_t*)w.data + panel * bytes * PANEL + 4 * place;
    integers.assign(w.inputs, 0);
    for (int i = 0; i < w.inputs; i += planes.inputs()) step = read_unit(planes, step, &integers[i]);
    for (int g = 0; g < groups; ++g) {
        const bool shifted = w.minimums.values;
        const float scale = factor(w.scales, groups, panel, g, place);
        const float minimum = shifted ? factor(w.minimums, groups, panel, g, place) : 0;
        const int zero = w.table ? 128 : w.zeros ? w.zeros[(panel * groups + g) * PANEL + place] : shifted ? 0 : 1 << (w.bits - 1);
        for (int i = g * w.group; i < (g + 1) * w.group; ++i) {
            const float product = float((w.table ? w.table[integers[i]] : integers[i]) - zero) * scale;
            out[i] = shifted ? product + minimum : product;
        }
    }
}

}  // namespace

extern "C" void soothsay_rows(const int64_t* rows, int64_t count, const soothsay_weights* weights, float* out) {
    std::vector<int32_t> integers;
    for (int64_t i = 0; i < count; ++i, out += weights->inputs) {
        int64_t row = rows[i];
        const soothsay_weights* part = weights;
        for (; part && row >= part->outputs; part = part->next) row -= part->outputs;
        if (part && row >= 0) read_row(*part, row, integers, out);
        else std::fill(out, out + weights->inputs, NAN);
    }
}
