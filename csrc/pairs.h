// Products of pairs of rows with pairs of outputs (ARM's i8mm and bf16), each a register of two rows times two outputs.
//
// Rows are laid out in pairs, [inputs / 8, 2, 8] bytes, and an odd last row has a neighbour that nobody reads. Weights have the
// layout of panels.h: two words of four outputs become two registers of two outputs each.
#pragma once
#include "simd.h"

namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int PAIR = 2;  // rows that are multiplied together
#else
constexpr int PAIR = 1;
#endif

template <int R> constexpr bool PAIRED = R > 1 && PAIR > 1;

// Adds the products of R rows with C registers of four outputs. `even` and `odd` are words of the weights that follow each other.
template <int R, int C, class Sums>
void add_products_of_pairs(Sums (*sums)[C], const ints* even, const ints* odd, const void* x, int64_t stride);

// The rows that are computed for `count` rows.
inline int64_t paired(int64_t count) { return count > 1 ? (count + PAIR - 1) / PAIR * PAIR : count; }

#if defined(__ARM_FEATURE_MATMUL_INT8)
inline ints multiply(ints sums, ints rows, ints outputs) {
    return (ints)vmmlaq_s32((int32x4_t)sums, (int8x16_t)rows, (int8x16_t)outputs);
}
#if defined(SOOTHSAY_MULTIPLIES_BF16)
inline floats multiply(floats sums, ints rows, ints outputs) {
    return (floats)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)rows, (bfloat16x8_t)outputs);
}
#endif

template <int R, int C, class Sums>
inline __attribute__((always_inline)) void add_products_of_pairs(Sums (*sums)[C], const ints* even, const ints* odd, const void* x, int64_t stride) {
    for (int r = 0; r < R; r += 2) {
        ints rows;
        std::memcpy(&rows, (const char*)x + r * stride, sizeof rows);
        for (int c = 0; c < C; ++c) {
            const int32x4_t a = (int32x4_t)even[c], b = (int32x4_t)odd[c];
            sums[r][c] = multiply(sums[r][c], rows, (ints)vzip1q_s32(a, b));
            sums[r + 1][c] = multiply(sums[r + 1][c], rows, (ints)vzip2q_s32(a, b));
        }
    }
}
#endif

// Turns sums of four outputs for each row into those of two rows and two outputs, and back.
template <int R, int C, class Sums>
inline void turn(Sums (*sums)[C]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    for (int r = 0; R > 1 && r < R; r += 2)
        for (int c = 0; c < C; ++c) {
            const int64x2_t a = (int64x2_t)sums[r][c], b = (int64x2_t)sums[r + 1][c];
            sums[r][c] = (Sums)vzip1q_s64(a, b), sums[r + 1][c] = (Sums)vzip2q_s64(a, b);
        }
#else
    (void)sums;
#endif
}

}  // namespace
