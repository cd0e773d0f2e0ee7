// The largest numbers of a row, and their log-softmax, in two passes: a drafter's likeliest tokens.
#include "kernels.h"
#include "largest.h"
#include "pool.h"
#include "simd.h"

namespace {

void find(const float* x, int64_t width, Largest& found) {
    found.clear();
    int64_t i = 0;
    for (; i + LOOKED_AT <= width; i += LOOKED_AT) {
        floats top = load(x + i);
        for (int n = LANES; n < LOOKED_AT; n += LANES) {
            const floats v = load(x + i + n);
            top = v > top ? v : top;
        }
        if (max(top) > found.least())
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
