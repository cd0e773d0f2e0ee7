// The softmax of a query over keys that come block by block (Milakov and Gimelshein 2018, arXiv 1805.02867).
#pragma once
#include "key_blocks.h"
#include <algorithm>

namespace {

constexpr float HIDDEN = -1e30f;

// Numbers that are added to the scores of a query by the distance to a key, from `most` or more before it to `most` or more after it.
struct ByDistance {
    const float* numbers;  // [2 * most + 1] of a query head, or null: nothing is added
    int64_t most, place;   // of the query

    ByDistance at(int64_t head, int64_t position) const { return {numbers + head * (2 * most + 1), most, position}; }

    // Of the keys from `key` on.
    floats from(int64_t key) const {
        floats x;
        for (int i = 0; i < LANES; ++i) x[i] = numbers[std::clamp(key + i - place, -most, most) + most];
        return x;
    }
};

// A running softmax of one query: the largest score so far, and sums of exponentials relative to it, for each lane.
struct Running {
    floats total = {};
    float top = HIDDEN;
    int64_t from, to;  // positions that the query sees, both inclusive
    ByDistance added = {};

    // A score that comes before all keys' and has no value.
    void begin_with(float sink) { top = sink, total[0] = 1; }

    // Turns scores of the block at `begin` into weights, and rescales earlier sums to the new largest score.
    template <class Values>
    void weigh(floats* x, int64_t begin, float softcap, float* acc, int d) {
        if (softcap != 0)
            for (int t = 0; t < TILES; ++t) x[t] = capped(x[t], softcap);
        if (added.numbers)
            for (int t = 0; t < TILES; ++t) x[t] += added.from(begin + t * LANES);
        if (begin + BLOCK - 1 > to || begin < from) {
            const int first = int(std::max(from - begin, int64_t(0))), last = int(std::min(to - begin, int64_t(BLOCK)));
            for (int t = 0; t < TILES; ++t) x[t] = hidden(x[t], t * LANES, first, last);
        }
        floats highest = x[0];
        for (int t = 1; t < TILES; ++t) highest = x[t] > highest ? x[t] : highest;
        if (any_above(highest, top)) {
            const float largest = max(highest);
            const float shrink = exp(splat(top - largest))[0];
            total *= shrink;
            for (int j = 0; j < d; j += LANES) store(acc + j, load(acc + j) * shrink);
            top = largest;
        }
        floats all = total;
        for (int t = 0; t < TILES; ++t) all += x[t] = Values::power(x[t] - top);
        total = all;
    }

    // Joins the sums over keys that follow. `acc` and `others` have d floats.
    void join(const Running& next, float* acc, const float* others, int d) {
        const float factor = exp(splat(-std::abs(next.top - top)))[0];
        const float mine = next.top > top ? factor : 1.0f, its = next.top > top ? 1.0f : factor;
        total = total * mine + next.total * its;
        for (int j = 0; j < d; j += LANES) store(acc + j, load(acc + j) * mine + load(others + j) * its);
        top = std::max(top, next.top);
    }

    static floats capped(floats x, float softcap) {
        for (int i = 0; i < LANES; ++i) x[i] = std::tanh(x[i] / softcap) * softcap;
        return x;
    }

    // Hides the scores of keys before `first` and after `last`. x has those of keys from `key` on.
    static floats hidden(floats x, int key, int first, int last) {
        ints keys;
        for (int i = 0; i < LANES; ++i) keys[i] = key + i;
        return (keys < first) | (keys > last) ? splat(HIDDEN) : x;
    }
};

}  // namespace
