// The rows of each request as layers with a state read them, and the inputs that a short convolution finds for a row: those of
// the rows before it on its path, and those that a state and a journal keep.
#pragma once
#include "kernels.h"
#include "simd.h"
#include <vector>

namespace {

// A strand of the plan; see kernels.h.
struct Strand {
    int64_t first, advancing, first_node, size, slot, is_new, num_marks;
    const int64_t *parents, *marks;

    int64_t tokens() const { return advancing + size; }
};

std::vector<Strand> read_strands(const int64_t* plan) {
    std::vector<Strand> strands(*plan++);
    for (Strand& s : strands) {
        s = {plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plan[6], plan + 7, plan + 7 + plan[3]};
        plan = s.marks + 2 * s.num_marks;
    }
    return strands;
}

// The inputs of a convolution in a pass.
template <class T>
struct Line {
    const T* rows;
    int64_t stride;  // elements from row to row
    int channels, taps_count;
    const float* taps;              // [taps_count, channels], the token's own last
    const soothsay_states* states;  // or null

    T* inputs(int64_t slot) const { return (T*)states->inputs + slot * (taps_count - 1) * channels; }
    T* journal(int64_t slot, int64_t node) const {
        return (T*)states->journal + (slot * states->nodes + node) * channels;
    }
};

// Tokens of a strand by number: those that advance its state, then the nodes of its tree.
template <class T>
struct Tokens {
    const Line<T>& line;
    const Strand& s;

    bool is_node(int64_t i) const { return i >= s.advancing; }
    bool is_kept(int64_t i) const { return is_node(i) && i - s.advancing < s.first_node; }  // of an earlier pass
    int64_t row(int64_t i) const { return s.first + i - (is_node(i) ? s.first_node : 0); }
    const T* inputs(int64_t i) const {
        return is_kept(i) ? line.journal(s.slot, i - s.advancing) : line.rows + row(i) * line.stride;
    }
    // The token before; below zero, those before the strand, -1 being the last of them.
    int64_t before(int64_t i) const {
        if (!is_node(i)) return i - 1;
        const int64_t parent = s.parents[i - s.advancing];
        return parent < 0 ? s.advancing - 1 : s.advancing + parent;
    }
    // The channels of the last tokens up to i, the latest last; null where there is none.
    void window(int64_t i, const T** found) const {
        for (int tap = line.taps_count - 1; tap >= 0; --tap, i = i < 0 ? i - 1 : before(i))
            found[tap] = i >= 0     ? inputs(i)
                         : s.is_new ? nullptr
                                    : line.inputs(s.slot) + (line.taps_count - 1 + i) * line.channels;
    }
};

// Keeps the last inputs of the convolution after `count` tokens that advance a strand's state.
template <class T>
void keep_inputs(const Line<T>& line, const Strand& s, int64_t count, int64_t slot) {
    const int kept = line.taps_count - 1, channels = line.channels;
    std::vector<const T*> window(line.taps_count);
    Tokens<T>{line, s}.window(count - 1, window.data());
    std::vector<T> copies(int64_t(kept) * channels);  // since the slot may be where they come from
    for (int tap = 0; tap < kept; ++tap)
        if (window[tap + 1]) std::memcpy(&copies[int64_t(tap) * channels], window[tap + 1], channels * sizeof(T));
    std::memcpy(line.inputs(slot), copies.data(), copies.size() * sizeof(T));
}

// Keeps what the state of a strand, its marks and its journal need of the convolution after a pass.
template <class T>
void keep_all_inputs(const Line<T>& line, const Strand& s) {
    for (int64_t m = 0; m < s.num_marks; ++m) keep_inputs(line, s, s.marks[2 * m], s.marks[2 * m + 1]);
    if (s.advancing) keep_inputs(line, s, s.advancing, s.slot);
    for (int64_t node = s.first_node; node < s.size; ++node)
        std::memcpy(line.journal(s.slot, node), Tokens<T>{line, s}.inputs(s.advancing + node), line.channels * sizeof(T));
}

}  // namespace
