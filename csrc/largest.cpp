// The largest numbers of a row, and their log-softmax, in two passes: a drafter's likeliest tokens.
#include "kernels.h"
#include "pool.h"
#include "simd.h"
#include <algorithm>
#include <limits>

namespace {

constexpr int LOOKED_AT = 64;               // numbers that are skipped together if none of them is large enough
constexpr int64_t WORTH_THREADS = 1 << 16;  // numbers; for fewer, waking threads costs more than the work
constexpr float NONE = -std::numeric_limits<float>::infinity();

// The largest numbers so far, in descending order; of equal numbers the first.
struct Largest {
    float* values;
    int64_t* places;
    int count;

    void see(float value, int64_t place) {
        if (!(value > values[count - 1])) return;
        int at = count - 1;
        for (; at > 0 && value > values[at - 1]; --at) values[at] = values[at - 1], places[at] = places[at - 1];
        values[at] = value, places[at] = place;
    }
};

void find(const float* x, int64_t width, Largest& found) {
    std::fill(found.values, found.values + found.count, NONE);
    std::fill(found.places, found.places + found.count, 0);
    int64_t i = 0;
    for (; i + LOOKED_AT <= width; i += LOOKED_AT) {
        floats top = load(x + i);
        for (int n = LANES; n < LOOKED_AT; n += LANES) {
            const floats v = load(x + i + n);
            top = v > top ? v : top;
        }
        if (max(top) > found.values[found.count - 1])
            for (int n = 0; n < LOOKED_AT; ++n) found.see(x[i + n], i + n);
    }
    for (; i < width; ++i) found.see(x[i], i);
}

// log of the sum of e^(factor (x - largest)).
float log_sum_exp(const float* x, int64_t width, float factor, float largest) {
    floats total = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) total += exp((load(x + i) - largest) * factor);
    float rest = 0;
    for (; i < width; ++i) rest += std::exp((x[i] - largest) * factor);
    return std::log(sum(total) + rest);
}

}  // namespace

extern "C" void soothsay_largest(const float* x, const float* factors, int64_t rows, int64_t width, int count,
                                 float* values, int64_t* places) {
    parallel(rows, width ? WORTH_THREADS / width : rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            Largest found{values + r * count, places + r * count, count};
            find(x + r * width, width, found);
            if (!factors || found.values[0] == NONE) continue;
            const float top = found.values[0], all = log_sum_exp(x + r * width, width, factors[r], top);
            for (int k = 0; k < count; ++k) found.values[k] = factors[r] * (found.values[k] - top) - all;
        }
    });
}
