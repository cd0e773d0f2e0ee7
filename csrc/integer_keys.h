// Keys and queries as 16-bit integers with a float scale: x = scale * integers.
//
// A row of norm |x| gets the scale |x| / NORM, so 16 bits hold each integer. Rounding lengthens a row by sqrt(d) / 2 at
// most. So no part of the sum of a product of two rows is larger than (NORM + sqrt(d) / 2)^2 (Cauchy and Schwarz): below
// 2^31 for every d up to 2^28. Sums in 32 bits are exact, so their order does not matter.
#pragma once
#include "simd.h"

namespace {

constexpr float NORM = 32700;
constexpr float LEAST_NORM = 1e-15f;  // a shorter row becomes zeros: the squares of its numbers would lose their bits

// Places of 16 bits in a row of the pool: d integers and the scale.
inline int64_t integer_row(int d) { return d + 2; }

inline float integer_scale(const int16_t* row, int d) {
    float scale;
    std::memcpy(&scale, row + d, 4);
    return scale;
}

// Writes x [d] as integers. Returns the scale.
inline float keep_integers(const float* x, int d, int16_t* out) {
    floats squares = {};
    for (int j = 0; j < d; j += LANES) squares = fused(load(x + j), load(x + j), squares);
    const float norm = std::sqrt(sum(squares)), inverse = norm > LEAST_NORM ? NORM / norm : 0.0f;
    for (int j = 0; j < d; j += LANES) keep(out + j, nearest(load(x + j) * inverse));
    return norm / NORM;
}

// Writes a key x [d] to its row of the pool.
inline void keep_integer_key(const float* x, int d, int16_t* row) {
    const float scale = keep_integers(x, d, row);
    std::memcpy(row + d, &scale, 4);
}

}  // namespace
