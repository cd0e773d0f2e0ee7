// Products of a block of keys and values in tiles (AMX).
#pragma once
#include "integer_blocks.h"
#include "tiles.h"

#if defined(SOOTHSAY_TILES)
namespace {

// Keys and queries as pairs of bfloat16.
struct PairKeyTiles : PairKeys {
    using PairKeys::PairKeys;

    // Scores of a tile's queries, from r on, against the block.
    void scores(int r, int, int d, floats (*out)[TILES]) const {
        zero_tiles();
        for (int j = 0; j < d / 2; j += TILE_STEPS)
            multiply_tiles((const bf16*)&q[size_t(r) * d / 2 + j], 2 * d, (const uint8_t*)&keys[size_t(j) * BLOCK],
                           4 * BLOCK);
        store_tiles(out, 4 * BLOCK);
    }
};

// Keys and queries as integers of 16 bits, multiplied byte by byte: an integer is 256 times a signed byte plus an unsigned
// one. Sums wrap around at 32 bits, and the whole fits (integer_rows.h). So scores equal those of vectors.
class IntegerKeyTiles {
    typedef uint32_t uints __attribute__((vector_size(4 * LANES)));

    const int steps;  // of a row's high bytes, or of its low bytes: whole tiles
    std::vector<float> query_scales;
    float key_scales[BLOCK];
    std::vector<int16_t> query;
    Words q, keys;  // [queries][2][steps], [2][steps][BLOCK]: high bytes, then low bytes

    struct Bytes {
        uints high, low;
    };

    // The bytes of the first 64 integers of a row, or of 32 and zeros if only `left` remain. A word has the bytes of two
    // integers, and of the two that follow 32 places later. The order is the same for queries and keys.
    static Bytes split(const int16_t* row, int left) {
        uints a, b = {};
        std::memcpy(&a, row, sizeof a);
        if (left > 2 * LANES) std::memcpy(&b, row + 2 * LANES, sizeof b);
        return {(a >> 8 & 0xff00ffu) | (b & 0xff00ff00u), (a & 0xff00ffu) | (b << 8 & 0xff00ff00u)};
    }

public:
    IntegerKeyTiles(int queries, int d)
        : steps((d + 63) / 64 * TILE_STEPS), query_scales(queries), query(d), q(size_t(queries) * 2 * steps),
          keys(size_t(steps) * 2 * BLOCK) {}

    void set_query(int r, const float* source, int d) {
        query_scales[r] = keep_integers(source, d, query.data());
        for (int j = 0; j < d; j += 4 * LANES) {
            const Bytes bytes = split(&query[j], d - j);
            uint32_t* out = &q[size_t(r) * 2 * steps + j / 4];
            std::memcpy(out, &bytes.high, sizeof bytes.high);
            std::memcpy(out + steps, &bytes.low, sizeof bytes.low);
        }
    }

    void set_keys(const int16_t* const* k, int d) {
        for (int t = 0; t < TILES; ++t)
            for (int j = 0; j < d; j += 4 * LANES) {
                __m512i high[LANES], low[LANES];
                for (int i = 0; i < LANES; ++i) {
                    const Bytes bytes = split(k[t * LANES + i] + j, d - j);
                    high[i] = (__m512i)bytes.high, low[i] = (__m512i)bytes.low;
                }
                uint32_t* out = &keys[size_t(j / 4) * BLOCK + t * LANES];
                transpose(high, out);
                transpose(low, out + size_t(steps) * BLOCK);
            }
        for (int i = 0; i < BLOCK; ++i) key_scales[i] = integer_scale(k[i], d);
    }

    // Scores of a tile's queries, from r on, against the block.
    void scores(int r, int height, int, floats (*out)[TILES]) const {
        uints sums[3][TILE_ROWS];  // of high bytes, of high and low ones, of low ones
        const uint32_t* row = &q[size_t(r) * 2 * steps];
        for (int t = 0; t < TILES; ++t) {
            zero_tiles();
            for (int j = 0; j < steps; j += TILE_STEPS)
                multiply_bytes(row + j, row + steps + j, 8 * steps, &keys[size_t(j) * BLOCK + t * LANES],
                               &keys[size_t(steps + j) * BLOCK + t * LANES], 4 * BLOCK);
            store_bytes(sums[0], sums[1], sums[2], sizeof sums[0][0]);
            const floats scales = load(&key_scales[t * LANES]);
            for (int n = 0; n < height; ++n) {
                const ints sum = (ints)((sums[0][n] << 16) + (sums[1][n] << 8) + sums[2][n]);
                out[n][t] = __builtin_convertvector(sum, floats) * (scales * query_scales[r + n]);
            }
        }
    }
};

// Queries in tiles of up to 16, and values as pairs of bfloat16. A tile may begin at any query. Sums of bfloat16 differ from
// those of vectors, so a single query uses tiles too.
template <class Keys>
struct Tiles : Both<Keys, PairValues> {
    const int height;  // queries of a tile
    const TileShape shape;

    Tiles(int queries, int d) : Tiles(queries, d, (queries + TILE_ROWS - 1) / TILE_ROWS) {}

    // Scores of a tile's queries, from r on, against the block.
    void scores(int r, int d, floats (*out)[TILES]) const { Keys::scores(r, height, d, out); }

    // BLOCK dimensions of the block's values, from j on, weighted by w.
    void weighted(const uint32_t (*w)[BLOCK / 2], int j, floats (*out)[TILES]) const {
        zero_tiles();
        for (int i = 0; i < BLOCK / 2; i += TILE_STEPS)
            multiply_tiles((const bf16*)&w[0][i], 2 * BLOCK, (const uint8_t*)&this->values[size_t(i) * this->wide + j],
                           4 * this->wide);
        store_tiles(out, 4 * BLOCK);
    }

private:
    Tiles(int queries, int d, int tiles)
        : Both<Keys, PairValues>(queries + TILE_ROWS - 1, d), height((queries + tiles - 1) / tiles), shape(height, TILE_STEPS) {}
};

}  // namespace
#endif
