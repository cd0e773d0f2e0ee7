// The hash of a key and a token, of which noise is made (soothsay/core/noise.py).
#pragma once
#include <cstdint>
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

}  // namespace
