// What adapters add to the outputs of a linear layer: two thin products for each row that has one.
//
// Each row is computed by itself, and each number in one order of inputs. So a row's bits depend on the row and its adapter alone.
#include "operations.h"
#include "pool.h"
#include "simd.h"
#include <algorithm>
#include <vector>

namespace {

constexpr int64_t PIECE = 1 << 15;  // products; for fewer, sharing costs more than the work
constexpr int PANEL = 16, CHAINS = 4, REGISTERS = PANEL / LANES;
constexpr int64_t TOGETHER = 16;  // rows that read a panel one after the other

// A panel of outputs: x times weights [inputs, PANEL], from input `begin` to `end`, multiples of CHAINS.
template <class X, class W>
inline void multiply(const X* x, const W* weights, int begin, int end, floats* out) {
    floats sums[CHAINS][REGISTERS] = {};
    for (int k = begin; k < end; k += CHAINS)
        for (int c = 0; c < CHAINS; ++c)
            for (int v = 0; v < REGISTERS; ++v)
                sums[c][v] = fused(splat(widen(x[k + c])), load(weights + (k + c) * PANEL + v * LANES), sums[c][v]);
    for (int v = 0; v < REGISTERS; ++v) out[v] = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
}

// f(row, panel) for all rows and panels of outputs, some in each thread. An output is `n` products.
template <class F>
void each(int64_t rows, int panels, int n, F f) {
    const int64_t groups = (rows + TOGETHER - 1) / TOGETHER, work = std::min(rows, TOGETHER) * n * PANEL;
    parallel(groups * panels, work ? PIECE / work : 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % groups * TOGETHER, last = std::min(first + TOGETHER, rows);
            for (int64_t row = first; row < last; ++row) f(row, int(i / groups));
        }
    });
}

// Calls f with a matrix in the adapter's element type.
template <class F>
void typed(const soothsay_low_rank& own, const void* matrix, F f) {
    if (own.are_bf16) f((const bf16*)matrix);
    else f((const float*)matrix);
}

template <class X, class Y>
void adapt(const X* x, int inputs, const soothsay_low_rank* adapters, const int64_t* numbers, int64_t rows, int outputs, Y* out) {
    std::vector<int64_t> adapted;
    int most = 0;
    for (int64_t r = 0; r < rows; ++r)
        if (numbers[r] >= 0 && adapters[numbers[r]].rank) {
            adapted.push_back(r);
            most = std::max(most, adapters[numbers[r]].rank);
        }
    std::stable_sort(adapted.begin(), adapted.end(), [&](int64_t a, int64_t b) { return numbers[a] < numbers[b]; });
    const int64_t count = int64_t(adapted.size());
    std::vector<float> inner(count * most);
    each(count, most / PANEL, inputs, [&](int64_t i, int panel) {
        const soothsay_low_rank& own = adapters[numbers[adapted[i]]];
        if (panel * PANEL >= own.rank) return;
        floats sums[REGISTERS];
        typed(own, own.down, [&](auto* down) { multiply(x + adapted[i] * inputs, down + int64_t(panel) * inputs * PANEL, 0, inputs, sums); });
        std::memcpy(&inner[i * most + panel * PANEL], sums, sizeof sums);
    });
    each(count, outputs / PANEL, most, [&](int64_t i, int panel) {
        const soothsay_low_rank& own = adapters[numbers[adapted[i]]];
        floats sums[REGISTERS];
        const int* span = own.spans + 2 * panel;
        typed(own, own.up, [&](auto* up) { multiply(&inner[i * most], up + int64_t(panel) * own.rank * PANEL, span[0], span[1], sums); });
        Y* const to = out + adapted[i] * outputs + panel * PANEL;
        for (int v = 0; v < REGISTERS; ++v) keep(to + v * LANES, load(to + v * LANES) + sums[v]);
    });
}

}  // namespace

extern "C" void soothsay_adapt(const void* x, int x_is_bf16, int64_t rows, int inputs, const soothsay_low_rank* adapters, const int64_t* numbers,
                               int outputs, void* out, int out_is_bf16) {
    auto run = [&](auto* from) {
        if (out_is_bf16) adapt(from, inputs, adapters, numbers, rows, outputs, (bf16*)out);
        else adapt(from, inputs, adapters, numbers, rows, outputs, (float*)out);
    };
    if (x_is_bf16) run((const bf16*)x);
    else run((const float*)x);
}
