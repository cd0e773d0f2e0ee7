#pragma once
#include <cstdint>

// The rows of a pass of N rows, M of which ask for logits, and the keys that they attend to, as they stand in `memory`; see
// soothsay_attend for the paths. `rows` and `row_positions` are those of the paths.
struct Places {
    int64_t* totals;                      // number of paths; number of slots up to the last that is in use
    int64_t *tokens, *positions, *slots;  // [N]
    int64_t* logit_rows;                  // [M]
    int64_t *rows, *row_positions;        // [N]
    int64_t *key_begin, *row_begin;       // [paths + 1], with room for N + 1
    int64_t *shared, *keys;               // [paths], with room for N; [all keys]

    Places(int64_t* memory, int64_t N, int64_t M)
        : totals(memory), tokens(memory + 2), positions(tokens + N), slots(positions + N), logit_rows(slots + N),
          rows(logit_rows + M), row_positions(rows + N), key_begin(row_positions + N), row_begin(key_begin + N + 1),
          shared(row_begin + N + 1), keys(shared + N) {}
};
