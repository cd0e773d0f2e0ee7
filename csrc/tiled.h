// Rows times a panel in tiles.
#pragma once
#include "panels.h"
#include "tiles.h"
#include <algorithm>
#include <memory>
#include <numeric>

#if defined(SOOTHSAY_TILES)
namespace {

// Rows from which on tiles multiply, where vectors are slower. Integers' sums are exact either way; those of bfloat16 are
// not the vectors', so that a single row has to have them too.
template <class F> constexpr int64_t TILED_FROM = F::INPUTS == 2 ? 1 : F::INPUTS == 4 ? 4 : 7;

// Up to 16 rows are a tile. More are shared out evenly among pairs of tiles, the last of which may have rows that nobody
// asked for.
struct Tiling {
    int64_t rows, tiles;
    int height, steps;  // of a tile

    template <class F>
    static Tiling of(F, int64_t rows, const Weights& w) {
        const int group = F::INPUTS > 2 ? w.group : w.inputs;
        const int64_t tiles = rows <= TILE_ROWS ? 1 : (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * 2;
        const int steps = std::gcd(TILE_STEPS, group * int(sizeof(typename F::Input)) / 4);
        return {rows, tiles, int((rows + tiles - 1) / tiles), steps};
    }
};

// Integers of 4 bits in bytes, 8 inputs of an output in two steps.
inline void spread(const uint8_t* packed, int steps, uint8_t* out) {
    for (; steps > 0; --steps, packed += STEP, out += 2 * STEP)
        for (int i = 0; i < STEP; i += 4 * LANES) {
            const ints v = bytes(packed + i), low = v & 0x0f0f0f0f, high = v >> 4 & 0x0f0f0f0f;
            std::memcpy(out + i, &low, sizeof low);
            std::memcpy(out + STEP + i, &high, sizeof high);
        }
}

// Lines of memory that are asked for, evenly, while `steps` go by.
struct Ahead {
    const uint8_t* next;
    int64_t lines, steps, done = 0, asked = 0;

    void step(int count) {
        for (done += count; asked * steps < done * lines; ++asked, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

// A thread's place for the products of a panel: weights that were packed, and what rows that go together add up to.
template <class F>
struct Place {
    static constexpr int EACH = F::INPUTS * sizeof(typename F::Input) / 4;  // steps of tiles in one of packed weights
    std::unique_ptr<floats[]> plain;
    typename F::Sums sums[2 * TILE_ROWS * COLUMNS];
    floats totals[F::INPUTS > 2 ? 2 * TILE_ROWS * COLUMNS : 1];

    explicit Place(const Weights& w) : plain(EACH > 1 ? new floats[w.inputs * PANEL / sizeof(floats)] : nullptr) {}
};

// A panel for all rows: `write(row, count, sums)` gets what a tile of them, or a pair, adds up to. A tile of rows reads the
// weights as they come from memory; where there are more, the next panel is asked for while this one is multiplied.
template <class F, class Write>
void multiply_panel(const Weights& w, const Inputs<typename F::Input>& x, const Tiling& t, int panel, Place<F>& place,
                    Write write) {
    typedef typename F::Input Input;
    constexpr bool GROUPED = F::INPUTS > 2;
    constexpr int INPUTS = 4 / sizeof(Input), EACH = Place<F>::EACH;  // of a step
    const int steps = w.inputs / INPUTS, group = GROUPED ? w.group / INPUTS : steps;
    const int64_t stride = x.width * sizeof(Input), bytes = steps / EACH * STEP;
    const int64_t next = t.steps * INPUTS * (x.width < w.inputs ? t.height : 1);  // from a tile to that beside it
    const bool pairs = t.tiles > 1;
    const int64_t each = t.height * (1 + pairs), times = (t.rows + each - 1) / each;
    const uint8_t* packed = w.data + panel * bytes;
    Ahead ahead{packed + (pairs ? bytes : CHUNK * STEP), bytes / 64, times * steps * (1 + pairs)};
    for (int64_t row = 0; row < t.rows; row += each) {
        const int64_t count = std::min(each, t.rows - row);
        for (int begin = 0; begin < steps; begin += group) {
            const uint8_t* data = packed + begin / EACH * STEP;
            if constexpr (EACH > 1) {
                uint8_t* plain = (uint8_t*)place.plain.get() + (times > 1 ? begin * STEP : 0);
                if (!row) spread(data, group / EACH, plain);
                data = plain;
            }
            auto* sums = place.sums;
            for (int half = 0; half < 1 + pairs; ++half, data += STEP / 2, sums += COLUMNS / 2) {
                const Input* tile = x.tile(row * w.inputs, begin * INPUTS);
                zero_tiles();
                for (int s = 0; s < group; s += t.steps, tile += next) {
                    ahead.step(t.steps);
                    if (pairs) multiply_pairs(tile, tile + t.height * w.inputs, stride, data + s * STEP);
                    else multiply_tiles(tile, stride, data + s * STEP);
                }
                if (pairs) store_pairs(sums, sums + t.height * COLUMNS, STEP);
                else store_tiles(sums, STEP);
            }
            if constexpr (GROUPED) {
                const auto* at = reinterpret_cast<const ints(*)[COLUMNS]>(place.sums);
                int64_t r = 0;
                for (; r + 4 <= count; r += 4)
                    scale_group<4, COLUMNS>(w, x, panel, row + r, begin / group, 0, at + r, place.totals + r * COLUMNS);
                for (; r < count; ++r)
                    scale_group<1, COLUMNS>(w, x, panel, row + r, begin / group, 0, at + r, place.totals + r * COLUMNS);
            }
        }
        if constexpr (GROUPED) write(row, count, place.totals);
        else write(row, count, place.sums);
    }
}

}  // namespace
#endif
