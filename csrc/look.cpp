// The one look of a drafter whose guesses a recurrent cell refines, in one call: its products are so small that a call from
// Python between two of them takes longer.
#include "operations.h"
#include "simd.h"
#include <algorithm>
#include <vector>

namespace {

inline floats silu(floats x) { return x * sigmoid(x); }

}  // namespace

extern "C" void soothsay_look(const soothsay_looking* looking, const float* features, const float* embedded, int64_t rows,
                              float* logits, float* read, float* states) {
    const soothsay_looking& l = *looking;
    const int hidden = l.embedding, inner = l.guesses->inputs, units = l.cell_read->outputs, seen = l.look->inputs;
    const int64_t guesses = rows * l.depths;
    std::vector<float> both(rows * seen), looked(rows * (2 * inner + hidden)), gated(rows * inner), raw(guesses * hidden);
    for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(features + r * (seen - hidden), seen - hidden, &both[r * seen]);
        std::copy_n(embedded + r * hidden, hidden, &both[r * seen + seen - hidden]);
    }
    soothsay_linear(both.data(), 0, rows, l.look, looked.data(), 0);
    for (int64_t r = 0; r < rows; ++r) {
        const float* gate = &looked[r * (2 * inner + hidden)];
        for (int j = 0; j < inner; j += LANES) store(&gated[r * inner + j], silu(load(gate + j)) * load(gate + inner + j));
    }
    soothsay_linear(gated.data(), 0, rows, l.guesses, raw.data(), 0);
    for (int64_t g = 0; g < guesses; ++g) {
        const float* passed = &looked[g / l.depths * (2 * inner + hidden) + 2 * inner];
        float* guess = &raw[g * hidden];
        for (int j = 0; j < hidden; j += LANES) store(guess + j, load(guess + j) + load(passed + j));
    }
    std::vector<float> outputs(guesses * hidden), token(rows * units), refined(rows * hidden);
    soothsay_add_norm(raw.data(), nullptr, 0, nullptr, l.norm, l.eps, guesses, hidden, nullptr, outputs.data(), 0);

    soothsay_linear(outputs.data(), 0, guesses, l.cell_read, read, 0);
    soothsay_linear(embedded, 0, rows, l.cell_token, token.data(), 0);
    for (int64_t r = 0; r < rows; ++r)
        for (int j = 0; j < units; j += LANES)
            store(states + r * units + j, silu(load(read + r * l.depths * units + j) + load(&token[r * units + j])));
    soothsay_linear(states, 0, rows, l.cell_out, refined.data(), 0);
    for (int64_t r = 0; r < rows; ++r) {
        float* first = &outputs[r * l.depths * hidden];
        for (int j = 0; j < hidden; j += LANES) store(first + j, load(first + j) + load(&refined[r * hidden + j]));
    }
    soothsay_linear(outputs.data(), 0, guesses, l.head, logits, 0);
}
