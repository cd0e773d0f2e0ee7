// Noise of a key and a token, by hashing (soothsay/core/noise.py).
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

// A key: two words.
struct Key {
    uint32_t first, second;

    Key(uint32_t first, uint32_t second) : first(first), second(second) {}
    explicit Key(const int64_t* words) : first(uint32_t(words[0])), second(uint32_t(words[1])) {}

    // That of a seed and a position (the splitmix64 finalizer).
    static Key of(uint64_t seed, uint64_t position) {
        uint64_t z = 0;
        for (const uint64_t word : {seed, position}) {
            z += word + 0x9E3779B97F4A7C15u;
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
            z = (z ^ z >> 27) * 0x94D049BB133111EBu;
            z ^= z >> 31;
        }
        return {uint32_t(z), uint32_t(z >> 32)};
    }

    uint32_t hash(uint32_t token) const { return mix(mix(token * 0x9E3779B1u + first) + second); }
};

// A uniform number in (0, 1) from a hash.
inline float uniform(uint32_t hash) {
    const float u = (float(hash) + 0.5f) * 0x1p-32f;
    return u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
}

// See `logarithm` of soothsay/core/noise.py.
inline float logarithm(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits += 0x3F800000u - 0x3F3504F3u;
    const float e = float(int32_t(bits >> 23) - 127);
    bits = (bits & 0x007FFFFFu) + 0x3F3504F3u;
    float m;
    std::memcpy(&m, &bits, 4);
    const float f = m - 1.0f, s = f / (2.0f + f), z = s * s, w = z * z;
    const float odd = w * (0x1.999c26p-2f + w * 0x1.f13c4cp-3f), even = z * (0x1.555554p-1f + w * 0x1.23d3dcp-2f);
    const float half = 0.5f * f * f;
    return s * (half + (odd + even)) + e * 0x1.2fefa2p-17f - half + f + e * 0x1.62e300p-1f;
}

// Standard Gumbel noise -log(-log(1 - u)) from a uniform number, the same bits as everywhere.
inline float gumbel(float u) {
    const float w = 1.0f - u, c = 0.0f - u - (w - 1.0f);
    return 0.0f - logarithm(0.0f - (logarithm(w) + c / w));
}

}  // namespace
