// Matrix products in tiles (AMX): up to 16 rows times 16 steps of four bytes of 64 outputs at once.
//
// Tiles 0 to 3 have sums of 16 outputs each, 4 and 5 the inputs of the rows, 6 and 7 weights. A row's sums do not depend on
// other rows. Weights have the layout of panels.h: a step of all outputs, then the next step.
#pragma once
#include "panels.h"
#include <atomic>

#if defined(__AMX_INT8__)
#define SOOTHSAY_TILES 1
namespace {

constexpr int TILE_ROWS = 16;
constexpr int TILE_STEPS = 16;

// The compiler does not know that loading tiles, or their shapes, reads memory.
inline void written() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Sets the shapes of this thread's tiles during its lifetime: `rows` rows, `steps` steps.
class TileShape {
    struct alignas(64) Config {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};  // of a row of each tile
        uint8_t rows[16] = {};
    };

public:
    TileShape(int rows, int steps) {
        Config config;
        for (int t = 0; t < 8; ++t) {
            config.bytes[t] = uint16_t(t == 4 || t == 5 ? 4 * steps : 64);
            config.rows[t] = uint8_t(t < 6 ? rows : steps);
        }
        written();
        _tile_loadconfig(&config);
    }
    ~TileShape() { _tile_release(); }
    TileShape(const TileShape&) = delete;
    TileShape& operator=(const TileShape&) = delete;
};

inline void zero_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Rows of 64 sums, `stride` bytes apart.
inline void store_tiles(void* sums, int64_t stride) {
    char* p = (char*)sums;
    _tile_stored(0, p, stride);
    _tile_stored(1, p + 64, stride);
    _tile_stored(2, p + 128, stride);
    _tile_stored(3, p + 192, stride);
}

// Rows of 32 sums, `stride` bytes apart, then those of other rows.
inline void store_pairs(void* sums, void* others, int64_t stride) {
    _tile_stored(0, sums, stride);
    _tile_stored(1, (char*)sums + 64, stride);
    _tile_stored(2, others, stride);
    _tile_stored(3, (char*)others + 64, stride);
}

// The sums of `multiply_bytes`, `stride` bytes apart.
inline void store_bytes(void* high, void* mixed, void* low, int64_t stride) {
    _tile_stored(0, high, stride);
    _tile_stored(1, mixed, stride);
    _tile_stored(2, low, stride);
}

// The reverse of `store_pairs`.
inline void load_pairs(const void* sums, const void* others, int64_t stride) {
    written();
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, (const char*)sums + 64, stride);
    _tile_loadd(2, others, stride);
    _tile_loadd(3, (const char*)others + 64, stride);
}

// Adds products of rows, `stride` bytes apart, and weights, whose steps are `step` bytes apart. Calls `meanwhile` after each
// product.
template <class Meanwhile = Nothing>
inline void multiply_tiles(const int8_t* x, int64_t stride, const uint8_t* w, int64_t step, Meanwhile meanwhile = {}) {
    written();
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w, step);
    _tile_dpbsud(0, 4, 6);
    meanwhile();
    _tile_loadd(7, w + 64, step);
    _tile_dpbsud(1, 4, 7);
    meanwhile();
    _tile_loadd(6, w + 128, step);
    _tile_dpbsud(2, 4, 6);
    meanwhile();
    _tile_loadd(7, w + 192, step);
    _tile_dpbsud(3, 4, 7);
    meanwhile();
}

template <class Meanwhile = Nothing>
inline void multiply_tiles(const bf16* x, int64_t stride, const uint8_t* w, int64_t step, Meanwhile meanwhile = {}) {
    written();
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w, step);
    _tile_dpbf16ps(0, 4, 6);
    meanwhile();
    _tile_loadd(7, w + 64, step);
    _tile_dpbf16ps(1, 4, 7);
    meanwhile();
    _tile_loadd(6, w + 128, step);
    _tile_dpbf16ps(2, 4, 6);
    meanwhile();
    _tile_loadd(7, w + 192, step);
    _tile_dpbf16ps(3, 4, 7);
    meanwhile();
}

// Adds products of integers of 16 bits, as high and low bytes, with those of 16 outputs: of the high bytes to tile 0, of high
// and low ones to tile 1, of the low bytes to tile 2.
inline void multiply_bytes(const void* high, const void* low, int64_t stride, const void* w_high, const void* w_low,
                           int64_t step) {
    written();
    _tile_loadd(4, high, stride);
    _tile_loadd(6, w_high, step);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, w_low, step);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(5, low, stride);
    _tile_dpbusd(1, 5, 6);
    _tile_dpbuud(2, 5, 7);
}

// The same for two tiles of rows and half the outputs: each loaded weight serves both tiles.
template <class Meanwhile>
inline void multiply_pairs(const int8_t* x, const int8_t* others, int64_t stride, const uint8_t* w, int64_t step,
                           Meanwhile meanwhile) {
    written();
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w, step);
    _tile_dpbsud(0, 4, 6);
    meanwhile();
    _tile_loadd(7, w + 64, step);
    _tile_dpbsud(1, 4, 7);
    meanwhile();
    _tile_loadd(5, others, stride);
    _tile_dpbsud(2, 5, 6);
    meanwhile();
    _tile_dpbsud(3, 5, 7);
    meanwhile();
}

template <class Meanwhile>
inline void multiply_pairs(const bf16* x, const bf16* others, int64_t stride, const uint8_t* w, int64_t step,
                           Meanwhile meanwhile) {
    written();
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w, step);
    _tile_dpbf16ps(0, 4, 6);
    meanwhile();
    _tile_loadd(7, w + 64, step);
    _tile_dpbf16ps(1, 4, 7);
    meanwhile();
    _tile_loadd(5, others, stride);
    _tile_dpbf16ps(2, 5, 6);
    meanwhile();
    _tile_dpbf16ps(3, 5, 7);
    meanwhile();
}

}  // namespace
#endif
