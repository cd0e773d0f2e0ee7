// Rows times a panel in tiles.
#pragma once
#include "panels.h"
#include "tiles.h"
#include <numeric>

#if defined(SOOTHSAY_TILES)
namespace {

// Rows from which on tiles multiply, where vectors are slower. Integers' sums are exact either way; those of bfloat16 are
// not the vectors', so that a single row has to have them too.
template <class F> constexpr int64_t TILED_FROM = F::INPUTS == 2 ? 1 : F::INPUTS == 4 ? 4 : 7;

// Rows are shared out evenly among tiles, the last of which may have some that nobody asked for.
struct Tiling {
    int64_t rows, tiles;
    int height, steps;  // of a tile

    template <class F>
    static Tiling of(F, int64_t rows, const Weights& w) {
        const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        const int group = F::INPUTS > 2 ? w.group : w.inputs;
        return {rows, tiles, int((rows + tiles - 1) / tiles), std::gcd(TILE_STEPS, group * int(sizeof(typename F::Input)) / 4)};
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

// A chunk for all rows. Its steps are four bytes of each output's weights, none of them packed.
template <class F>
void multiply_chunk_in_tiles(const Weights& w, const Inputs<typename F::Input>& x, int64_t rows, int steps,
                             const Chunk& chunk, Partial<typename F::Sums>& partial) {
    typedef typename F::Input Input;
    constexpr bool GROUPED = F::INPUTS > 2;
    constexpr int INPUTS = 4 / sizeof(Input);  // of a step
    const int group = (GROUPED ? w.group : w.inputs) / INPUTS;
    const int64_t total = (rows + x.height - 1) / x.height * (chunk.end - chunk.begin);
    const uint8_t* ahead = chunk.ahead;
    int64_t done = 0, asked = 0;
    for (int64_t row = 0; row < rows; row += x.height) {
        auto* sums = &partial.sums[row * COLUMNS];
        const uint8_t* data = chunk.data;
        for (int s = chunk.begin; s < chunk.end;) {
            const int border = (s / group + 1) * group, stop = border < chunk.end ? border : chunk.end;
            if (s % group) load_tiles(sums, STEP);
            else zero_tiles();
            for (; s < stop; s += steps, data += steps * STEP) {
                for (done += steps; asked * total < done * chunk.lines; ++asked, ahead += 64)
                    __builtin_prefetch(ahead, 0, 3);
                multiply_tiles(x.tile(row * w.inputs, s * INPUTS), x.width * sizeof(Input), data);
            }
            store_tiles(sums, STEP);
            if constexpr (GROUPED)
                if (stop == border) {
                    const auto* at = reinterpret_cast<const ints(*)[COLUMNS]>(sums);
                    const int64_t last = row + x.height < rows ? row + x.height : rows;
                    int64_t r = row;
                    for (; r + 4 <= last; r += 4, at += 4)
                        scale_group<4, COLUMNS>(w, x, chunk.panel, r, border / group - 1, 0, at, &partial.totals[r * COLUMNS]);
                    for (; r < last; ++r, ++at)
                        scale_group<1, COLUMNS>(w, x, chunk.panel, r, border / group - 1, 0, at, &partial.totals[r * COLUMNS]);
                }
        }
    }
}

template <class F>
void sum_panel_in_tiles(const Weights& w, const Inputs<typename F::Input>& x, int panel, int64_t rows, int depth,
                        Partial<typename F::Sums>& partial) {
    constexpr int EACH = F::INPUTS * sizeof(typename F::Input) / 4;  // steps of tiles in one of packed weights
    alignas(64) uint8_t plain[EACH > 1 ? CHUNK * STEP : 1];
    const int steps = w.inputs / F::INPUTS, length = CHUNK / EACH;
    const uint8_t* data = w.data + int64_t(panel) * steps * STEP;
    for (int begin = 0; begin < steps; begin += length) {
        const int end = begin + length < steps ? begin + length : steps, lines = int((end - begin) * STEP / 64);
        Chunk chunk{panel, begin * EACH, end * EACH, data + begin * STEP, data + end * STEP, lines};
        if constexpr (EACH > 1) {
            spread(chunk.data, end - begin, plain);
            chunk.data = plain;
        }
        multiply_chunk_in_tiles<F>(w, x, rows, depth, chunk, partial);
    }
}

}  // namespace
#endif
