// Integers to packed weights, and some rows of packed weights to floats: a table of embeddings that is also the output head is
// stored once.
#include "kernels.h"
#include "panels.h"
#include "pool.h"
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

    constexpr explicit Planes(int bits)
        : planes{{bits == 6 || bits == 5 ? 4 : bits, 0}, {bits - 4, 4}}, count(bits == 6 || bits == 5 ? 2 : 1) {}

    constexpr int inputs() const { return 32 / planes[count - 1].bits; }  // of a unit
};

// Adds the integers of a unit to `out`; returns where the next unit of the same output begins.
const uint8_t* read_unit(const Planes& all, const uint8_t* step, int32_t* out) {
    for (int p = 0; p < all.count; ++p) {
        const Plane plane = all.planes[p];
        const int fields = 8 / plane.bits, mask = (1 << plane.bits) - 1, flipped = plane.bits == 8 ? FLIPPED & 0xff : 0;
        for (int first = 0; first < all.inputs(); first += 4 * fields, step += STEP)
            for (int k = 0; k < 4; ++k)
                for (int f = 0; f < fields; ++f)
                    out[first + 4 * f + k] |= ((step[k] ^ flipped) >> plane.bits * f & mask) << plane.shift;
    }
    return step;
}

// Writes a plane of a unit's integers; returns where the next one of the same output begins. The bytes of a word are shifted
// together: none has bits that leave it.
template <int BITS, int SHIFT, int INPUTS>
inline uint8_t* write_plane(const uint8_t* integers, uint8_t* step) {
    constexpr int fields = 8 / BITS;
    constexpr uint32_t mask = 0x01010101u * ((1u << BITS) - 1);
    for (int first = 0; first < INPUTS; first += 4 * fields, step += STEP) {
        uint32_t word = 0;
        for (int f = 0; f < fields; ++f) {
            uint32_t four;
            std::memcpy(&four, integers + first + 4 * f, 4);
            word |= (four >> SHIFT & mask) << BITS * f;
        }
        if (BITS == 8) word ^= FLIPPED;
        std::memcpy(step, &word, 4);
    }
    return step;
}

// Writes the integers of a unit; returns where the next unit of the same output begins.
template <int BITS>
inline uint8_t* write_unit(const uint8_t* integers, uint8_t* step) {
    constexpr Planes all(BITS);
    step = write_plane<all.planes[0].bits, all.planes[0].shift, all.inputs()>(integers, step);
    if constexpr (all.count == 2) step = write_plane<all.planes[1].bits, all.planes[1].shift, all.inputs()>(integers, step);
    return step;
}

// Packs up to PANEL rows. A few units of all rows come before the next ones, so that what is written stays in the cache.
template <int BITS>
void pack_panel(const uint8_t* integers, int64_t rows, int inputs, uint8_t* panel) {
    constexpr int unit = Planes(BITS).inputs(), few = 8 * unit;
    for (int first = 0; first < inputs; first += few) {
        uint8_t* end = panel;
        for (int64_t row = 0; row < rows; ++row) {
            uint8_t* step = panel + 4 * row;
            for (int i = first; i < first + few && i < inputs; i += unit)
                step = write_unit<BITS>(integers + row * inputs + i, step);
            end = step - 4 * row;
        }
        panel = end;
    }
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

extern "C" void soothsay_pack(const uint8_t* integers, int64_t rows, int inputs, int bits, void* data) {
    const auto pack = bits == 2   ? pack_panel<2>
                      : bits == 4 ? pack_panel<4>
                      : bits == 5 ? pack_panel<5>
                      : bits == 6 ? pack_panel<6>
                                  : pack_panel<8>;
    const int64_t bytes = int64_t(inputs) * bits / 8 * PANEL;  // of a panel
    parallel((rows + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            const int64_t first = panel * PANEL;
            pack(integers + first * inputs, std::min<int64_t>(rows - first, PANEL), inputs, (uint8_t*)data + panel * bytes);
        }
    });
}

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
