// A few rows times a panel in vector registers.
#pragma once
#include "pairs.h"
#include "panels.h"
#include <algorithm>
#include <type_traits>

namespace {

// Rows and registers of outputs that are computed together: as many sums as fit into registers.
#if defined(__AVX512F__)
constexpr int ROWS = 4;
template <int R> constexpr int WIDTH = 4;
#else
constexpr int ROWS = 4;
template <int R> constexpr int WIDTH = R == 1 ? COLUMNS / 2 : R == 2 ? 4 : 2;
#endif

// Distance in bytes from the weights that are multiplied to those that are prefetched, into the second cache, if a tile of rows
// reads each weight once. Where a tile has all outputs of a panel at once, bfloat16 and a row or two of int8 need so little work
// that they wait for memory alone: there the processor's own prefetching is faster if it is hardly disturbed. On an EPYC (Zen 4)
// they read at 29 to 33 GB/s, and 6 to 11% slower further ahead. All else computes longer between two lines, and must ask early: at
// the short distance one row of 4 to 6 bits took 1.04 to 1.2 times as long there, and four rows 1.2 to 1.5 times. On a Xeon with
// AMX a chunk was best for all.
template <class F>
int64_t distance(int64_t rows) {
#if !defined(__AMX_INT8__)
    if (WIDTH<ROWS> == COLUMNS && (F::INPUTS == 2 || (F::INPUTS == 4 && rows <= 2))) return 512;
#endif
    return CHUNK * STEP;
}

// Words of integers of B bits whose products 16 bits can add up, in pairs, with inputs of at most 127; at most `words`.
template <int B> constexpr int words_in_shorts(int words) {
#if defined(SOOTHSAY_ADDS_PAIRS_OF_BYTES)
    const int most = B < 8 ? 32767 / (2 * 127 * ((1 << B) - 1)) : 0;
    return most < words ? most : words;
#else
    return (void)words, 0;
#endif
}

// The integers of 16 codes, in every 16 bytes of a register.
struct Table {
    ints values;

    explicit Table(const uint8_t* table) {
        for (size_t i = 0; table && i < sizeof values; i += 16) std::memcpy((char*)&values + i, table, 16);
        values ^= splat(int32_t(FLIPPED));
    }

    // The integers of four codes, which are below 16, in each lane.
    ints operator[](ints codes) const {
#if defined(__AVX512BW__)
        return (ints)_mm512_shuffle_epi8((__m512i)values, (__m512i)codes);
#elif defined(__AVX2__)
        return (ints)_mm256_shuffle_epi8((__m256i)values, (__m256i)codes);
#elif defined(__aarch64__)
        return (ints)vqtbl1q_s8((int8x16_t)values, (uint8x16_t)codes);
#else
        uint8_t all[sizeof values], code[sizeof codes];
        std::memcpy(all, &values, sizeof all);
        std::memcpy(code, &codes, sizeof code);
        for (uint8_t& c : code) c = all[c];
        std::memcpy(&codes, code, sizeof code);
        return codes;
#endif
    }
};

// x shifted left by N bits, or right by -N.
template <int N>
inline ints shifted(ints x) {
    if constexpr (N < 0) return x >> -N;
    else return x << N;
}

// The uppermost four bits of bytes.
inline ints upper_halves(ints x) {
#if defined(__aarch64__)
    return (ints)vshrq_n_u8((uint8x16_t)x, 4);
#else
    return x >> 4 & 0x0f0f0f0f;
#endif
}

// Integers of B bits below `1 << B`: the layout of a unit, and its inputs 4 I to 4 I + 3 as bytes, in each lane for an output.
template <int B> struct Integers;

template <> struct Integers<8> {
    static constexpr int INPUTS = 4, STEPS = 1;  // of a unit
    template <int I> static ints four(const uint8_t* unit) { return bytes(unit); }
};

template <> struct Integers<4> {
    static constexpr int INPUTS = 8, STEPS = 1;
    template <int I> static ints four(const uint8_t* unit) { return I ? upper_halves(bytes(unit)) : bytes(unit) & 0x0f0f0f0f; }
};

template <> struct Integers<2> {
    static constexpr int INPUTS = 16, STEPS = 1;
    template <int I> static ints four(const uint8_t* unit) { return bytes(unit) >> 2 * I & 0x03030303; }
};

template <> struct Integers<6> {
    static constexpr int INPUTS = 16, STEPS = 3;
    template <int I> static ints four(const uint8_t* unit) {
        const ints above = bytes(unit + 2 * STEP);
        return Integers<4>::four<I % 2>(unit + I / 2 * STEP) | (shifted<4 - 2 * I>(above) & 0x30303030);
    }
};

template <> struct Integers<5> {
    static constexpr int INPUTS = 32, STEPS = 5;
    template <int I> static ints four(const uint8_t* unit) {
        const ints above = bytes(unit + 4 * STEP);
        return Integers<4>::four<I % 2>(unit + I / 2 * STEP) | (shifted<4 - I>(above) & 0x10101010);
    }
};

// Word K of a row's inputs from x on, four of them, for the products of all lanes.
template <int K>
struct Word {
#if defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t four;  // words, since an instruction chooses one of them
    explicit Word(const int8_t* x) : four(vld1q_s8(x + K / 4 * 16)) {}
    template <int B, int S> void add(ints& sums, shorts&, ints w) const {
        sums = (ints)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w, four, K % 4);
    }
#else
    const ints word;
    explicit Word(const int8_t* x) : word(splat(x + 4 * K)) {}

    // Adds to `sums`; if S > 0, first S words to `shorter`.
    template <int B, int S> void add(ints& sums, shorts& shorter, ints w) const {
        if constexpr (!S) sums = dot<B>(sums, w, word);
#if defined(SOOTHSAY_ADDS_PAIRS_OF_BYTES)
        else {
            const shorts two = byte_pairs(w, word);
            shorter = K % S ? shorter + two : two;
            if constexpr (K % S == S - 1) sums += pairs(shorter, shorts{} + 1);
        }
#endif
    }
#endif
};

// Products with integers, or with those that a table has for integers of 4 bits.
template <int B, bool TABLE = false>
struct Int : Integers<B> {
    typedef ints Sums;
    typedef int8_t Input;
    static constexpr bool HAS_TABLE = TABLE;
    using Integers<B>::INPUTS, Integers<B>::STEPS;

    static constexpr int WORDS = INPUTS / 4;                            // of a unit
    static constexpr int ZERO = TABLE || B == 8 ? 128 - ZERO_BYTE : 0;  // the integer that products take as 0

    template <int I> static ints four(const uint8_t* unit, const Table& table) {
        const ints v = Integers<B>::template four<I>(unit);
        return TABLE ? table[v] : v;
    }

    // Word K of the units that begin at `w`, for C registers of outputs.
    template <int K, int C> static void read(const uint8_t* w, const Table& table, ints (&v)[C]) {
        for (int c = 0; c < C; ++c) v[c] = four<K % WORDS>(w + K / WORDS * STEPS * STEP + 4 * LANES * c, table);
    }

    // Adds the products of unit U of the N that begin at `w` and `x`.
    template <int R, int C, int U, int N, int I = 0>
    static inline __attribute__((always_inline)) void unit(ints (*sums)[C], shorts (*shorter)[C], const uint8_t* w,
                                                           const Table& table, const int8_t* x, int64_t stride) {
        constexpr int K = U * WORDS + I, SHORT = TABLE ? 0 : words_in_shorts<B>(N * WORDS);
        ints v[C];
        if constexpr (!PAIRED<R>) {
            read<K>(w, table, v);
            for (int r = 0; r < R; ++r) {
                const Word<K> inputs(x + r * stride);
                for (int c = 0; c < C; ++c) inputs.template add<TABLE ? 8 : B, SHORT>(sums[r][c], shorter[r][c], v[c]);
            }
        } else if constexpr (K % 2) {
            ints even[C];
            read<K - 1>(w, table, even), read<K>(w, table, v);
            add_products_of_pairs<R>(sums, even, v, x + 8 * (K - 1), stride);
        }
        if constexpr (I + 1 < WORDS) unit<R, C, U, N, I + 1>(sums, shorter, w, table, x, stride);
    }
};

#if defined(SOOTHSAY_MULTIPLIES_BF16)
struct Bf16 {
    typedef floats Sums;
    typedef bf16 Input;
    static constexpr int INPUTS = 2, STEPS = 1, BYTES = 4;  // from output to output
    template <int R, int C, int U, int N>
    static void unit(floats (*sums)[C], shorts (*)[C], const uint8_t* w, const Table&, const bf16* x, int64_t stride) {
        ints v[C];
        for (int c = 0; c < C; ++c) v[c] = bytes(w + U * STEP + 4 * LANES * c);
        if constexpr (!PAIRED<R>)
            for (int r = 0; r < R; ++r) {
                const ints two = splat((const int8_t*)(x + r * stride + 2 * U));
                for (int c = 0; c < C; ++c) sums[r][c] = bf16_dot(sums[r][c], v[c], two);
            }
        else if constexpr (U % 2) {
            ints even[C];
            for (int c = 0; c < C; ++c) even[c] = bytes(w + (U - 1) * STEP + 4 * LANES * c);
            add_products_of_pairs<R>(sums, even, v, x + 4 * (U - 1), 2 * stride);
        }
    }
};
#endif

// Numbers that inputs in float are multiplied by. A panel is [inputs, PANEL] of them.
template <class T>
struct Plain {
    typedef floats Sums;
    typedef float Input;
    static constexpr int INPUTS = 4 / sizeof(T), STEPS = 1, BYTES = sizeof(T);
    template <int R, int C, int U, int N>
    static inline __attribute__((always_inline)) void unit(floats (*sums)[C], shorts (*)[C], const uint8_t* w, const Table&,
                                                           const float* x, int64_t stride) {
        for (int i = 0; i < INPUTS; ++i) {
            floats v[C];
            for (int c = 0; c < C; ++c) v[c] = load((const T*)(w + U * STEP) + i * PANEL + c * LANES);
            for (int r = 0; r < R; ++r) {
                const floats input = splat(x[r * stride + U * INPUTS + i]);
                for (int c = 0; c < C; ++c) sums[r][c] = fused(input, v[c], sums[r][c]);
            }
        }
    }
};

// Floats are multiplied neither in pairs of rows nor in tiles.
template <class F> constexpr bool IN_FLOATS = std::is_same_v<typename F::Input, float>;
template <class F> constexpr int PAIR_OF = IN_FLOATS<F> ? 1 : PAIR;
template <class F> constexpr int ROWS_OF = IN_FLOATS<F> ? 6 : ROWS;  // which need no registers for unpacking

#if defined(__aarch64__)
constexpr bool ASKS_ONCE = true;  // for the lines of all units that follow each other, since a loop costs five instructions
#else
constexpr bool ASKS_ONCE = false;
#endif

// Asks for lines that follow each other, `each` at a time.
struct Prefetch {
    const uint8_t* ahead;
    int each;

    Prefetch(const Chunk& chunk, int units) : ahead(chunk.ahead), each(chunk.lines * units) {}

    void operator()() {
        for (int i = each; i > 0; --i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    }
};

// Factors of one group after the other, for C registers of outputs. Prefetches those that are a chunk ahead.
template <Source, int C> struct Reader;

template <int C> struct Reader<Source::HALVES, C> {
    const fp16* at;
    const int64_t ahead;
    floats now[C];

    Reader(const Factors& f, const Chunk& chunk, int column, const floats*)
        : at((const fp16*)f.values + f.at(chunk.panel, chunk.begin) + column * LANES), ahead((chunk.end - chunk.begin) * PANEL) {}

    const floats* next() {
        for (int c = 0; c < C; ++c) now[c] = load(at + c * LANES);
        for (int i = 0; i < C * LANES; i += 32) __builtin_prefetch(at + ahead + i, 0, 2);
        at += PANEL;
        return now;
    }
};

template <int C> struct Reader<Source::LEVELS, C> {
    const int8_t* at;
    const fp16* unit;
    const int64_t ahead;
    const int span;
    int left;  // groups of the unit
    floats now[C];

    Reader(const Factors& f, const Chunk& chunk, int column, const floats*)
        : at((const int8_t*)f.values + f.at(chunk.panel, chunk.begin) + column * LANES),
          unit(f.units + f.unit_at(chunk.panel, chunk.begin) + column * LANES), ahead((chunk.end - chunk.begin) * PANEL),
          span(f.span), left(span - chunk.begin % span) {}

    const floats* next() {
        for (int c = 0; c < C; ++c) now[c] = load(at + c * LANES) * load(unit + c * LANES);
        __builtin_prefetch(at + ahead, 0, 2);
        at += PANEL;
        if (!--left) {
            left = span, unit += PANEL;
            for (int i = 0; i < C * LANES; i += 32) __builtin_prefetch(unit + PANEL + i, 0, 2);
        }
        return now;
    }
};

template <int C> struct Reader<Source::FLOATS, C> {
    const floats* at;

    Reader(const Factors&, const Chunk&, int column, const floats* read) : at(read + column) {}

    const floats* next() { return (at += COLUMNS) - COLUMNS; }
};

// N units that follow each other. The compiler would not unroll them, and each turn of a loop costs as much as ten products.
// The loop inside a prefetch is worth its cost: without it, the compiler moves all prefetches to the front of a group, and
// one row takes a sixth longer to read from memory.
template <class F, int N, int R, int C, int U = 0>
inline __attribute__((always_inline)) void units(typename F::Sums (*sums)[C], shorts (*shorter)[C], const uint8_t* w,
                                                 const Table& table, const typename F::Input* x, int64_t stride,
                                                 Prefetch& prefetch) {
    if (!ASKS_ONCE || U == 0) prefetch();
    F::template unit<R, C, U, N>(sums, shorter, w, table, x, stride);
    if constexpr (U + 1 < N) units<F, N, R, C, U + 1>(sums, shorter, w, table, x, stride, prefetch);
}

// A chunk for R rows and C registers of outputs. Groups have GROUP inputs, or if that is 64 any multiple of 32. It is a
// function of its own for each kind of group: without branches and loops between groups, it needs fewer registers.
template <class F, int GROUP, Beside KIND, Source SOURCE, int R, int C>
__attribute__((noinline)) void tile_groups(const Weights& w, const Inputs<int8_t>& x, const Chunk& chunk, int64_t row,
                                           int column, Partial& partial) {
    // One row does not need eight units: with four it reads from memory a sixth faster.
    constexpr int MOST = R == 1 && F::INPUTS < 8 ? 16 : 32, TOGETHER = GROUP < MOST ? GROUP : MOST;  // inputs
    constexpr int UNITS = TOGETHER / F::INPUTS;
    const Table table(w.table);
    const int turns = (GROUP > 32 ? w.group : GROUP) / TOGETHER, zero = KIND == Beside::ZERO ? w.zero : 0;
    constexpr int HEIGHT = PAIRED<R> ? PAIR : 1;
    const uint8_t* data = chunk.data + column * LANES * 4;
    const int8_t* input = x.data + row * w.inputs + chunk.begin * w.group * HEIGHT;
    const int64_t stride = w.inputs, groups = w.groups(), at = row * groups + chunk.begin;
    const float* input_scales = x.scales + at;
    const int32_t* input_sums = x.sums + at;
    Reader<SOURCE, C> scales(w.scales, chunk, column, partial.factors.scales.data());
    Reader<SOURCE, C> beside(w.minimums, chunk, column, partial.factors.beside.data());
    Prefetch prefetch(chunk, ASKS_ONCE ? UNITS : 1);
    floats totals[R][C], *kept = &partial.totals[row * COLUMNS + column];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) totals[r][c] = kept[r * COLUMNS + c];
    int left = chunk.end - chunk.begin;
    do {
        ints sums[R][C];
        shorts shorter[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sums[r][c] = splat(input_sums[r * groups] * (F::ZERO - zero));
        turn<R>(sums);
        for (int turn = 0; turn < turns; ++turn, data += UNITS * F::STEPS * STEP, input += TOGETHER * HEIGHT)
            units<F, UNITS, R, C>(sums, shorter, data, table, input, stride, prefetch);
        turn<R>(sums);
        scale_group<KIND, true, R, C>(input_scales, input_sums, groups, zero, scales.next(),
                                      KIND == Beside::ZERO ? nullptr : beside.next(), sums, totals);
        ++input_scales, ++input_sums;
    } while (--left);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) kept[r * COLUMNS + c] = totals[r][c];
}

// The `tile_groups` for the groups and factors of some weights.
template <class F, int R, int C, Source SOURCE, int GROUP = F::INPUTS < 32 ? 16 : 32>
auto tile_groups_for(const Weights& w) {
    if constexpr (GROUP < 64)
        if (w.group > GROUP) return tile_groups_for<F, R, C, SOURCE, 2 * GROUP>(w);
    if constexpr (!F::HAS_TABLE) {
        if (w.minimums.values) return tile_groups<F, GROUP, Beside::MINIMUMS, SOURCE, R, C>;
        if constexpr (SOURCE == Source::FLOATS)
            if (w.zeros) return tile_groups<F, GROUP, Beside::ZEROS, SOURCE, R, C>;
    }
    return tile_groups<F, GROUP, Beside::ZERO, SOURCE, R, C>;
}

template <class F, int R, int C>
auto tile_groups_for(const Weights& w, Source source) {
    if (source == Source::HALVES) return tile_groups_for<F, R, C, Source::HALVES>(w);
    if (source == Source::LEVELS) return tile_groups_for<F, R, C, Source::LEVELS>(w);
    return tile_groups_for<F, R, C, Source::FLOATS>(w);
}

// A chunk for R rows and C registers of outputs.
template <class F, int R, int C>
void tile(const Weights& w, const Inputs<typename F::Input>& x, const Chunk& chunk, int64_t row, int column,
          Partial& partial) {
    if constexpr (F::INPUTS > 2) tile_groups_for<F, R, C>(w, chunk.factors)(w, x, chunk, row, column, partial);
    else {
        const uint8_t* data = chunk.data + column * LANES * F::BYTES;
        auto* kept = &partial.totals[row * COLUMNS + column];
        constexpr bool PAIRS = R > 1 && PAIR_OF<F> > 1;
        constexpr int UNITS = PAIRS ? 2 : 1, HEIGHT = PAIRS ? PAIR : 1;
        Prefetch prefetch(chunk, ASKS_ONCE ? UNITS : 1);
        constexpr bool APART = IN_FLOATS<F>;  // the chunk's sums are added as a whole, which rounds less
        floats sums[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sums[r][c] = APART ? floats{} : kept[r * COLUMNS + c];
        const auto* input = x.data + row * w.inputs + chunk.begin * F::INPUTS * HEIGHT;
        if constexpr (PAIRS) turn<R>(sums);
        for (int s = chunk.begin; s < chunk.end; s += UNITS, data += UNITS * STEP, input += UNITS * F::INPUTS * HEIGHT)
            units<F, UNITS, R, C>(sums, nullptr, data, Table(nullptr), input, w.inputs, prefetch);
        if constexpr (PAIRS) turn<R>(sums);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) kept[r * COLUMNS + c] = APART ? kept[r * COLUMNS + c] + sums[r][c] : sums[r][c];
    }
}

// All registers of outputs for `count` rows, at most R. Each turn prefetches a part of the lines, so that memory is never idle.
template <class F, int R>
void tile_rows(int count, const Weights& w, const Inputs<typename F::Input>& x, Chunk chunk, int64_t row,
               Partial& partial) {
    if constexpr (R > 1)
        if (count < R) return tile_rows<F, R == 2 ? 1 : R - PAIR_OF<F>>(count, w, x, chunk, row, partial);
    constexpr int TURNS = COLUMNS / WIDTH<R>;
    const int64_t units = (chunk.end - chunk.begin) * (F::INPUTS > 2 ? w.group / F::INPUTS : 1);
    const int each = (chunk.lines + TURNS - 1) / TURNS;
    for (int column = 0, left = chunk.lines; column < COLUMNS; column += WIDTH<R>) {
        chunk.lines = std::min(each, left), left -= chunk.lines;
        tile<F, R, WIDTH<R>>(w, x, chunk, row, column, partial);
        chunk.ahead += units * chunk.lines * 64;
    }
}

// The number of groups of a chunk: whole spans, since a part of one costs as many units of factors. Several tiles of rows need
// longer chunks: each tile begins anew in each chunk. One tile needs short ones, since it asks for memory a chunk ahead.
template <class F>
int chunk_length(const Weights& w, int group, int64_t tiles) {
    const int most = (F::INPUTS > 2 && tiles > 1 ? CHUNK * 3 / 2 : CHUNK) / F::STEPS / group, span = w.scales.span;
    return most > span ? most / span * span : std::max(1, most);
}

// All chunks of a panel, for all rows, in pairs if those are multiplied together. Each tile of rows prefetches a part of the next chunk, the first tiles at least a line
// for each unit.
template <class F>
void sum_panel(const Weights& w, const Inputs<typename F::Input>& x, int panel, int64_t rows,
               Partial& partial) {
    std::fill(partial.totals.begin(), partial.totals.end(), floats{});
    constexpr int LINES = F::STEPS * STEP / 64;  // of a unit
    const int group = F::INPUTS > 2 ? w.group / F::INPUTS : 1, groups = w.inputs / F::INPUTS / group;  // group: in units
    const int64_t tiles = (rows + ROWS_OF<F> - 1) / ROWS_OF<F>, pair = rows > 1 ? PAIR_OF<F> : 1;
    const int64_t height = rows / pair / tiles * pair, higher = rows / pair % tiles;
    const int length = chunk_length<F>(w, group, tiles), each = int((LINES + tiles - 1) / tiles);
    const Source source = w.source(tiles);
    const uint8_t* data = w.data + int64_t(panel) * groups * group * F::STEPS * STEP;
    for (int begin = 0, end; begin < groups; begin = end) {
        end = std::min(begin + length, groups);
        const int64_t lines = int64_t(end - begin) * group * LINES;
        Chunk chunk{panel, begin, end, source, data, data + (tiles == 1 ? distance<F>(rows) : lines * 64), 0};
        data += lines * 64;
        if (F::INPUTS > 2 && source == Source::FLOATS) partial.factors.read(w, panel, begin, end);
        int left = LINES;
        for (int64_t t = 0, row = 0, count; t < tiles; ++t, row += count) {
            count = height + (t < higher) * pair;
            chunk.lines = std::min(each, left), left -= chunk.lines;
            tile_rows<F, ROWS_OF<F>>(int(count), w, x, chunk, row, partial);
            chunk.ahead += lines / LINES * chunk.lines * 64;
        }
    }
}

}  // namespace
