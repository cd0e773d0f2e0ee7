// Uniform numbers as a function of a key and a token, by hashing: one pass over memory, where stock operations need twenty.
#include "kernels.h"
#include "simd.h"

namespace {

inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

}  // namespace

extern "C" void soothsay_hashed(const int64_t* keys, const int64_t* tokens, int one_row, int64_t rows, int64_t width,
                                float* out) {
    for (int64_t r = 0; r < rows; ++r) {
        const uint32_t first = uint32_t(keys[2 * r]), second = uint32_t(keys[2 * r + 1]);
        const int64_t* t = tokens + (one_row ? 0 : r * width);
        float* o = out + r * width;
        for (int64_t i = 0; i < width; ++i) {
            float u = (float(mix(mix(uint32_t(t[i]) * 0x9E3779B1u + first) + second)) + 0.5f) * 0x1p-32f;
            o[i] = u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
        }
    }
}
