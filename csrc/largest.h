// The largest numbers so far, in descending order; of equal numbers the first.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

namespace {

constexpr int LOOKED_AT = 64;               // numbers that are skipped together if none of them is large enough
constexpr int64_t WORTH_THREADS = 1 << 16;  // numbers; for fewer, waking threads costs more than the work
constexpr float NONE = -std::numeric_limits<float>::infinity();

struct Largest {
    float* values;
    int64_t* places;
    int count;

    void clear() {
        std::fill(values, values + count, NONE);
        std::fill(places, places + count, 0);
    }

    float least() const { return values[count - 1]; }

    void see(float value, int64_t place) {
        if (!(value > least())) return;
        int at = count - 1;
        for (; at > 0 && value > values[at - 1]; --at) values[at] = values[at - 1], places[at] = places[at - 1];
        values[at] = value, places[at] = place;
    }
};

}  // namespace
