// Rows as integers with a float scale: x = scale * integers.
//
// 16 bits, for keys and queries: a row of norm |x| gets the scale |x| / NORM, so 16 bits hold each integer. Rounding lengthens
// a row by sqrt(d) / 2 at most. So no part of the sum of a product of two rows is larger than (NORM + sqrt(d) / 2)^2 (Cauchy
// and Schwarz): below 2^31 for every d up to 2^28. Sums in 32 bits are exact, so their order does not matter.
//
// 8 bits, for keys, queries and values: the largest number of a row becomes MOST_BYTE. Sums of up to 2^16 products are exact.
#pragma once
#include "simd.h"

namespace {

constexpr float NORM = 32700, MOST_BYTE = 127;
constexpr float LEAST_SIZE = 1e-15f;  // a shorter row becomes zeros: the squares of its numbers would lose their bits

// Places of T in a row of the pool: d integers and the scale.
template <class T>
constexpr int64_t integer_row(int d) { return d + 4 / int(sizeof(T)); }

template <class T>
float integer_scale(const T* row, int d) {
    float scale;
    std::memcpy(&scale, row + d, 4);
    return scale;
}

inline float size_of(const float* x, int d, const int16_t*) {
    floats squares = {};
    for (int j = 0; j < d; j += LANES) squares = fused(load(x + j), load(x + j), squares);
    return std::sqrt(sum(squares));
}

inline float size_of(const float* x, int d, const int8_t*) {
    floats largest = {};
    for (int j = 0; j < d; j += LANES) {
        const floats size = (floats)((ints)load(x + j) & 0x7fffffff);
        largest = size > largest ? size : largest;
    }
    return max(largest);
}

// Writes x [d] as integers. Returns the scale.
template <class T>
float keep_integers(const float* x, int d, T* out) {
    constexpr float WHOLE = sizeof(T) == 1 ? MOST_BYTE : NORM;
    const float size = size_of(x, d, out), inverse = size > LEAST_SIZE ? WHOLE / size : 0.0f;
    for (int j = 0; j < d; j += LANES) keep(out + j, nearest(load(x + j) * inverse));
    return size / WHOLE;
}

// Writes x [d] to its row of the pool.
template <class T>
void keep_integer_row(const float* x, int d, T* row) {
    const float scale = keep_integers(x, d, row);
    std::memcpy(row + d, &scale, 4);
}

}  // namespace
