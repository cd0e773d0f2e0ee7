// Rows times a panel in tiles.
#pragma once
#include "panels.h"
#include "tiles.h"
#include "vectors.h"
#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#if defined(SOOTHSAY_TILES)
namespace {

constexpr int SHORT_GROUP = 32;  // inputs

// Minimum number of rows for tiles; for fewer, vectors are faster. Sums of integers are exact in both. Sums of bfloat16
// differ between tiles and vectors, so a single row uses tiles too. A tile has 64 inputs: groups of 32 use half of it.
// Tiles pass their sums through memory to be scaled, once a group; vectors keep them in registers, and win with any number of
// rows where groups are shorter. docs/log/kernels.md has times.
template <class F>
int64_t tiled_from(const Weights& w) {
    const bool is_short = F::INPUTS > 2 && w.group <= SHORT_GROUP;
    if (F::INPUTS > 4 && w.group < SHORT_GROUP) return std::numeric_limits<int64_t>::max();
    return F::INPUTS > 4 ? (is_short ? 13 : 3) : (is_short ? 5 : 1);
}

// Number of rows that read a chunk together before the next chunk, if a panel is too long for the nearest caches. The sums
// of more rows would not stay in those caches either.
constexpr int TOGETHER = 4 * TILE_ROWS;
constexpr int TILED_CHUNK = 64;          // steps
constexpr int64_t LONG_PANEL = 1 << 18;  // bytes, for a pair of tiles; for two pairs, any panel is long

// Up to 16 rows are a tile. More rows are divided evenly among pairs of tiles. The last tile may have unused rows.
struct Tiling {
    int64_t rows, tiles;
    int height, steps;  // of a tile
    bool chunked;

    template <class F>
    static Tiling of(F, int64_t rows, const Weights& w) {
        const int group = F::INPUTS > 2 ? w.group : w.inputs, bytes = sizeof(typename F::Input);
        const int64_t tiles = rows <= TILE_ROWS ? 1 : (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * 2;
        const int steps = std::gcd(TILE_STEPS, group * bytes / 4);
        const bool is_long = tiles > 2 || int64_t(w.inputs) * bytes * PANEL > LONG_PANEL;
        const bool chunked = tiles > 1 && is_long && F::INPUTS * bytes == 4;
        return {rows, tiles, int((rows + tiles - 1) / tiles), steps, chunked};
    }
};

// Unpacks units to bytes. Each unit prefetches a cache line for each of its steps.
template <class F, int I = 0>
void spread_one(const uint8_t* unit, const Table& table, uint8_t* out) {
    for (int i = 0; i < STEP; i += 4 * LANES) {
        const ints v = F::template four<I>(unit + i, table);
        std::memcpy(out + I * STEP + i, &v, sizeof v);
    }
    if constexpr (4 * (I + 1) < F::INPUTS) spread_one<F, I + 1>(unit, table, out);
}

template <class F>
void spread(const uint8_t* packed, const Table& table, int units, uint8_t* out, const uint8_t* ahead) {
    for (; units > 0; --units, packed += F::STEPS * STEP, out += F::INPUTS / 4 * STEP) {
        for (int s = 0; s < F::STEPS; ++s, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        spread_one<F>(packed, table, out);
    }
}

// Sums products of a tile of rows with the weights of 64 outputs, or of two tiles with 32 outputs, for `count` tiles of
// weights. Each prefetches `lines`, into the first cache or the second. It is a function of its own, so that everything stays
// in registers: a store inside the loop delays loads of tiles from the same page.
template <bool PAIRS, bool NEAREST, class Input>
__attribute__((noinline)) void sum_tiles(const Input* tile, const Input* others, int64_t next, int64_t stride,
                                         const uint8_t* weights, int64_t step, int count, const uint8_t* ahead,
                                         int64_t lines) {
    for (; count; --count, tile += next, others += next, weights += step) {
        auto ask = [&](int64_t count) {
            for (const uint8_t* end = ahead + count * 64; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, NEAREST ? 3 : 2);
        };
        auto quarter = [&] { ask(lines / 4); };
        ask(lines % 4);
        if constexpr (PAIRS) multiply_pairs(tile, others, stride, weights, STEP, quarter);
        else multiply_tiles(tile, stride, weights, STEP, quarter);
    }
}

// `scale_group` for R rows from `row` on and all outputs of a panel.
template <int R, class Meanwhile>
inline void scale_rows(const Weights& w, const Inputs<int8_t>& x, int64_t row, int g, const GroupFactors& factors,
                       const ints (*sums)[COLUMNS], floats (*totals)[COLUMNS], Meanwhile meanwhile) {
    const int64_t groups = w.groups(), at = row * groups + g;
    auto scale = [&](auto function) {
        function(x.scales + at, x.sums + at, groups, w.zero, factors.scales.data(), factors.beside.data(), sums, totals,
                 meanwhile);
    };
    if (w.minimums.values) scale(scale_group<Beside::MINIMUMS, false, R, COLUMNS, Meanwhile>);
    else if (w.zeros) scale(scale_group<Beside::ZEROS, false, R, COLUMNS, Meanwhile>);
    else scale(scale_group<Beside::ZERO, false, R, COLUMNS, Meanwhile>);
}

// A thread's buffers for the products of a panel: unpacked weights, and the sums of rows that run together.
template <class F>
struct Place {
    static constexpr int EACH = F::INPUTS * sizeof(typename F::Input) / 4;  // steps of tiles in a unit of packed weights
    const Table table;
    std::unique_ptr<floats[]> plain;
    typename F::Sums sums[TOGETHER * COLUMNS];
    floats totals[F::INPUTS > 2 ? TOGETHER * COLUMNS : 1];
    GroupFactors factors;

    explicit Place(const Weights& w)
        : table(w.table), plain(EACH > 1 ? new floats[w.inputs * PANEL / sizeof(floats)] : nullptr) {}
};

// Multiplies a panel with all rows and passes sums of some rows to `write(row, count, sums)`. Rows that read the panel once,
// together, read weights as they arrive from memory. Otherwise the next panel is prefetched during the products.
template <class F, bool PAIRS, class Write>
void multiply_panel(const Weights& w, const Inputs<typename F::Input>& x, const Tiling& t, int panel, Place<F>& place,
                    Write write) {
    typedef typename F::Input Input;
    constexpr bool GROUPED = F::INPUTS > 2;
    constexpr int INPUTS = 4 / sizeof(Input), EACH = Place<F>::EACH;  // of a step
    constexpr int64_t UNIT = F::STEPS * STEP;
    constexpr bool NEAREST = !PAIRS && EACH == 1;  // the first cache has room for weights that are read once, without unpacking
    const int steps = w.inputs / INPUTS, group = GROUPED ? w.group / INPUTS : steps;
    const int64_t stride = x.width * sizeof(Input), bytes = steps / EACH * UNIT;
    const int64_t next = t.steps * INPUTS * (x.width < w.inputs ? t.height : 1);  // distance to the tile of the next inputs
    const int64_t each = t.height * (1 + PAIRS), times = (t.rows + each - 1) / each;
    const int64_t most = t.chunked ? TOGETHER / each * each : each;
    const uint8_t* packed = w.data + panel * bytes;
    const uint8_t* ahead = packed + (PAIRS && (!t.chunked || t.rows > most) ? bytes : CHUNK * STEP);
    // Weights that are read once are prefetched while sums are scaled too, by 16 rows a quarter of the lines: otherwise memory
    // waits meanwhile. The loop is worth its cost, as in `units`: without it, the compiler moves prefetches to the front.
    const int64_t of_row = NEAREST && GROUPED ? (group * STEP / 64 + 4 * TILE_ROWS - 1) / (4 * TILE_ROWS) : 0;
    const int64_t asked = EACH > 1 ? steps / EACH * F::STEPS : steps / group * each * of_row;
    const int64_t passes = times * steps / t.steps * (1 + PAIRS), left = bytes / 64 - asked;
    const int64_t lines = (left + passes - 1) / passes;
    auto ask = [&] {
        for (int64_t i = of_row; i > 0; --i, ahead += 64) __builtin_prefetch(ahead, 0, 3);
    };
    for (int64_t first = 0; first < t.rows; first += most) {
        const int64_t together = std::min(most, t.rows - first);
        if constexpr (GROUPED) std::fill_n(place.totals, together * COLUMNS, floats{});
        for (int begin = 0, end; begin < steps; begin = end) {
            end = begin / group * group + group;
            if (PAIRS && t.chunked) end = std::min(end, begin + TILED_CHUNK);
            const uint8_t* data = packed + begin / EACH * UNIT;
            if constexpr (EACH > 1) {
                uint8_t* plain = (uint8_t*)place.plain.get() + (times > 1 ? begin * STEP : 0);
                if (!first) spread<F>(data, place.table, group / EACH, plain, ahead), ahead += group / EACH * F::STEPS * 64;
                data = plain;
            }
            for (int64_t row = 0; row < together; row += each) {
                auto* sums = place.sums + row * COLUMNS;
                for (int half = 0; half < 1 + PAIRS; ++half) {
                    auto *own = sums + half * COLUMNS / 2, *others = own + t.height * COLUMNS;
                    const Input* tile = x.tile((first + row) * w.inputs, begin * INPUTS);
                    const uint8_t* weights = data + half * STEP / 2;
                    if (PAIRS && begin % group) load_pairs(own, others, STEP);
                    else zero_tiles();
                    const int count = (end - begin) / t.steps;
                    sum_tiles<PAIRS, NEAREST>(tile, tile + t.height * w.inputs, next, stride, weights, t.steps * STEP, count,
                                              ahead, lines);
                    ahead += count * lines * 64;
                    if (PAIRS) store_pairs(own, others, STEP);
                    else store_tiles(own, STEP);
                }
                if constexpr (GROUPED)
                    if (end % group == 0) {
                        const auto* at = reinterpret_cast<const ints(*)[COLUMNS]>(sums);
                        auto* totals = reinterpret_cast<floats(*)[COLUMNS]>(place.totals + row * COLUMNS);
                        const int64_t count = std::min(each, together - row), from = first + row;
                        const int g = begin / group;
                        if (!row) place.factors.read(w, panel, g, g + 1);
                        int64_t r = 0;
                        for (; r + 4 <= count; r += 4) scale_rows<4>(w, x, from + r, g, place.factors, at + r, totals + r, ask);
                        for (; r < count; ++r) scale_rows<1>(w, x, from + r, g, place.factors, at + r, totals + r, ask);
                    }
            }
        }
        if constexpr (GROUPED) write(first, together, place.totals);
        else write(first, together, place.sums);
    }
}

}  // namespace
#endif
