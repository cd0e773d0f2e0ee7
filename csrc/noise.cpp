// Noise as a function of a key and a token, by hashing, and the tokens that win with it: one pass over memory, where stock
// operations need twenty.
#include "kernels.h"
#include "largest.h"
#include "noise.h"
#include "pool.h"
#include "simd.h"

namespace {

// A number above the noise of a hash, from the exponent alone: -log(-log(1 - u)) < -log(u).
inline float above_gumbel(uint32_t hash) { return 0.6931473f * float(hash ? 1 + __builtin_clz(hash) : 33); }

// The numbers of a row, divided by its temperature, plus noise.
void race(const float* x, float temperature, Key key, int64_t width, Largest& found) {
    found.clear();
    uint32_t hashes[LOOKED_AT];
    for (int64_t begin = 0; begin < width; begin += LOOKED_AT) {
        const int here = int(std::min<int64_t>(LOOKED_AT, width - begin));
        uint32_t least = ~0u;
        for (int n = 0; n < LOOKED_AT; ++n) {
            hashes[n] = key.hash(uint32_t(begin + n));
            least = std::min(least, hashes[n]);
        }
        float top = NONE;
        if (here == LOOKED_AT) {
            floats tops = load(x + begin);
            for (int n = LANES; n < LOOKED_AT; n += LANES) {
                const floats v = load(x + begin + n);
                tops = v > tops ? v : tops;
            }
            top = max(tops);
        } else {
            for (int n = 0; n < here; ++n) top = std::max(top, x[begin + n]);
        }
        if (!(top / temperature + above_gumbel(least) > found.least())) continue;
        for (int n = 0; n < here; ++n) {
            const float scaled = x[begin + n] / temperature;
            if (scaled + above_gumbel(hashes[n]) > found.least()) found.see(scaled + gumbel(uniform(hashes[n])), begin + n);
        }
    }
}

// The sum of e^(factor (x - top)) over the numbers above `low`, or equal to it.
template <bool OR_EQUAL>
float mass(const float* x, int64_t width, float factor, float top, float low) {
    floats total = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const floats v = load(x + i), e = exp((v - top) * factor);
        total += (OR_EQUAL ? v >= low : v > low) ? e : floats{};
    }
    float rest = 0;
    for (; i < width; ++i)
        if (OR_EQUAL ? x[i] >= low : x[i] > low) rest += std::exp((x[i] - top) * factor);
    return sum(total) + rest;
}

}  // namespace

extern "C" void soothsay_gumbel(const int64_t* keys, const int64_t* tokens, int one_row, int64_t rows, int64_t width,
                                float* out) {
    for (int64_t r = 0; r < rows; ++r) {
        const Key key(keys + 2 * r);
        const int64_t* t = tokens + (one_row ? 0 : r * width);
        float* o = out + r * width;
        for (int64_t i = 0; i < width; ++i) o[i] = gumbel(uniform(key.hash(uint32_t(t[i]))));
    }
}

extern "C" void soothsay_race(const float* x, const float* temperatures, const int64_t* keys, int64_t rows, int64_t width,
                              int count, float* values, int64_t* places) {
    parallel(rows, width ? WORTH_THREADS / width : rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            Largest found{values + r * count, places + r * count, count};
            race(x + r * width, temperatures[r], Key(keys + 2 * r), width, found);
        }
    });
}

extern "C" void soothsay_mass_before(const float* x, const float* factors, const float* tops, const float* floors,
                                     const int64_t* places, int64_t rows, int64_t width, float* out) {
    parallel(rows, width ? WORTH_THREADS / width : rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float *own = x + r * width, *end = own + width, *at = own + places[r];
            const float before = mass<true>(own, at - own, factors[r], tops[r], *at) +
                                 mass<false>(at + 1, end - at - 1, factors[r], tops[r], *at);
            out[r] = before / mass<true>(own, width, factors[r], tops[r], floors[r]);
        }
    });
}
