// A short convolution over the last tokens of a row's path (soothsay/model/ops/state_ops.py). Products are added tap by tap, each
// sum rounded, so the bits are those of stock operations and depend on no other row.
#include "operations.h"
#include "pool.h"
#include "strands.h"

namespace {

constexpr int64_t PIECE = 1 << 13;  // elements; for fewer, sharing costs more than the work

// Multiplies the inputs b of all rows [b, c, x] by x, in place.
template <class T>
void open_inputs(T* rows, int64_t count, int n) {
    parallel(count, PIECE / n, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            T* b = rows + r * 3 * n;
            for (int j = 0; j < n; j += LANES) keep(b + j, load(b + j) * load(b + 2 * n + j));
        }
    });
}

template <class T>
void convolve(const Line<T>& line, const Strand& s, bool gated, float* out) {
    const int n = line.channels;
    const Tokens<T> tokens{line, s};
    parallel(s.tokens(), PIECE / n, [&](int64_t begin, int64_t end) {
        std::vector<const T*> window(line.taps_count);
        for (int64_t i = begin; i < end; ++i) {
            if (tokens.is_kept(i)) continue;
            tokens.window(i, window.data());
            const int64_t row = tokens.row(i);
            const T* gate = line.rows + row * line.stride + n;
            for (int j = 0; j < n; j += LANES) {
                floats total = {};
                for (int tap = 0; tap < line.taps_count; ++tap)
                    if (window[tap]) total += load(window[tap] + j) * load(line.taps + int64_t(tap) * n + j);
                store(out + row * n + j, gated ? load(gate + j) * total : total);
            }
        }
    });
}

template <class T>
void run(T* rows, int64_t count, bool gated, const soothsay_convolution& c, const soothsay_states* states,
         const int64_t* plan, float* out) {
    if (gated) open_inputs(rows, count, c.channels);
    const Line<T> line{rows, (gated ? 3 : 1) * int64_t(c.channels), c.channels, c.taps_count, c.taps, states};
    const std::vector<Strand> strands = read_strands(plan);
    for (const Strand& s : strands) convolve(line, s, gated, out);
    for (const Strand& s : strands)
        if (s.slot >= 0) keep_all_inputs(line, s);
}

}  // namespace

extern "C" void soothsay_convolve(void* rows, int is_bf16, int64_t count, int gated, const soothsay_convolution* convolution,
                                  const soothsay_states* states, const int64_t* plan, float* out) {
    if (is_bf16) run((bf16*)rows, count, gated, *convolution, states, plan, out);
    else run((float*)rows, count, gated, *convolution, states, plan, out);
}
