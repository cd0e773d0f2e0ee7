// Instructions of AMX in plain C++, so that a processor without them can test the code that uses them.
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace emulated {

struct Tile {
    uint8_t rows, width, bytes[16][64];
};

inline thread_local Tile tiles[8];

inline void configure(const void* config) {
    const auto* bytes = static_cast<const uint8_t*>(config);
    for (int t = 0; t < 8; ++t) tiles[t].width = bytes[16 + 2 * t], tiles[t].rows = bytes[48 + t];
}

inline void zero(int t) { std::memset(tiles[t].bytes, 0, sizeof tiles[t].bytes); }

inline void load(int t, const void* from, int64_t stride) {
    zero(t);
    for (int r = 0; r < tiles[t].rows; ++r)
        std::memcpy(tiles[t].bytes[r], static_cast<const char*>(from) + r * stride, tiles[t].width);
}

inline void store(int t, void* to, int64_t stride) {
    for (int r = 0; r < tiles[t].rows; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, tiles[t].bytes[r], tiles[t].width);
}

template <class T>
T at(const Tile& tile, int row, int byte) {
    T value;
    std::memcpy(&value, &tile.bytes[row][byte], sizeof value);
    return value;
}

// Adds to each sum of tile c the products of a row of a and a column of b, whose rows have four bytes of a's each.
template <class Sum, class Product>
void multiply(int c, int a, int b, int size, Product product) {
    for (int m = 0; m < tiles[c].rows; ++m)
        for (int n = 0; n < tiles[c].width; n += 4) {
            Sum sum = at<Sum>(tiles[c], m, n);
            for (int k = 0; k < tiles[a].width; k += size) sum += product(tiles[a], tiles[b], m, k, n + k % 4);
            std::memcpy(&tiles[c].bytes[m][n], &sum, sizeof sum);
        }
}

template <class A, class B>
void multiply_bytes(int c, int a, int b) {
    multiply<int32_t>(c, a, b, 1, [](const Tile& x, const Tile& w, int m, int k, int n) {
        return at<A>(x, m, k) * at<B>(w, k / 4, n);
    });
}

inline float widened(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void multiply_bf16(int c, int a, int b) {
    multiply<float>(c, a, b, 2, [](const Tile& x, const Tile& w, int m, int k, int n) {
        return widened(at<uint16_t>(x, m, k)) * widened(at<uint16_t>(w, k / 4, n));
    });
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::configure
#define _tile_release() (void)0
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbssd (emulated::multiply_bytes<int8_t, int8_t>)
#define _tile_dpbsud (emulated::multiply_bytes<int8_t, uint8_t>)
#define _tile_dpbusd (emulated::multiply_bytes<uint8_t, int8_t>)
#define _tile_dpbuud (emulated::multiply_bytes<uint8_t, uint8_t>)
#define _tile_dpbf16ps emulated::multiply_bf16
