// Products of a few rows with weights that are read once: bfloat16, or integers of 8 or 4 bits times activations that
// are quantized here to 8 bits, a row and group at a time.
//
// Weights lie in panels of PANEL outputs. A step of a panel is 4 bytes an output: 2 bfloat16, 4 integers of 8 bits, or 8
// of 4 bits (inputs 0-3 in the low halves of the bytes, 4-7 in the high halves). Each output is summed over its inputs
// in order, by one thread, in one accumulator; whatever rows are computed beside it, its bits are the same.
#include "kernels.h"
#include "simd.h"
#include "tiles.h"
#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

namespace {

constexpr int PANEL = 64;                  // outputs
constexpr int COLUMNS = PANEL / LANES;     // registers that hold one value of each output
constexpr int64_t STEP = 4 * PANEL;        // bytes
constexpr int CHUNK = 64;                  // steps that all rows pass before the next: they stay in the nearest caches
constexpr int64_t WORTH_THREADS = 1 << 15; // weights; waking threads costs more than fewer take

// How near vectors ask for weights ahead of their use: 3 is the first cache, 2 the second, which on a Xeon with AMX made a
// row of int4 a tenth faster. Elsewhere it was not tried.
#if defined(__AMX_INT8__)
constexpr int NEARNESS = 2;
#else
constexpr int NEARNESS = 3;
#endif

// Rows that are computed together, and how many registers of outputs with them: as many sums as registers hold.
#if defined(__AVX512F__)
constexpr int ROWS = 6;
template <int R> constexpr int WIDTH = 4;
#else
constexpr int ROWS = 2;
template <int R> constexpr int WIDTH = R == 1 ? COLUMNS / 2 : COLUMNS / 2 < 4 ? COLUMNS / 2 : 4;
#endif

typedef int8_t chars __attribute__((vector_size(LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t ushorts __attribute__((vector_size(4 * LANES)));

inline ints load(const int32_t* p) {
    ints v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline ints bytes(const uint8_t* p) {
    ints v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(int32_t* p, ints v) { std::memcpy(p, &v, sizeof v); }

inline ints splat(int32_t x) { return ints{} + x; }

// Four bytes of x in every lane.
inline ints splat(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return splat(four);
}

#if !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
// Sums of two products of 16 bits.
inline ints pairs(shorts a, shorts b) {
#if defined(__AVX512BW__)
    return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return ((ints)a << 16 >> 16) * ((ints)b << 16 >> 16) + ((ints)a >> 16) * ((ints)b >> 16);
#endif
}
#endif

// acc + the sum of four products of bytes, w without sign and x with it. Exact.
inline ints dot(ints acc, ints w, ints x) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#else
    shorts even = (shorts)((ushorts)w & 0xff), odd = (shorts)((ushorts)w >> 8);
    return acc + pairs(even, (shorts)x << 8 >> 8) + pairs(odd, (shorts)x >> 8);
#endif
}

struct Int8 {
    typedef ints Sums;
    typedef int8_t Input;
    static constexpr int INPUTS = 4;  // of a step
    template <int R, int C>
    static void step(ints (*sums)[C], const uint8_t* w, const int8_t* x, int64_t stride) {
        ints v[C];
        for (int c = 0; c < C; ++c) v[c] = bytes(w + 4 * LANES * c);
        for (int r = 0; r < R; ++r) {
            ints four = splat(x + r * stride);
            for (int c = 0; c < C; ++c) sums[r][c] = dot(sums[r][c], v[c], four);
        }
    }
};

struct Int4 {
    typedef ints Sums;
    typedef int8_t Input;
    static constexpr int INPUTS = 8;
    template <int R, int C>
    static void step(ints (*sums)[C], const uint8_t* w, const int8_t* x, int64_t stride) {
        for (int half = 0; half < 2; ++half) {
            ints v[C];
            for (int c = 0; c < C; ++c) v[c] = bytes(w + 4 * LANES * c) >> 4 * half & 0x0f0f0f0f;
            for (int r = 0; r < R; ++r) {
                const ints four = splat(x + r * stride + 4 * half);
                for (int c = 0; c < C; ++c) sums[r][c] = dot(sums[r][c], v[c], four);
            }
        }
    }
};

#if defined(__AVX512BF16__)
struct Bf16 {
    typedef floats Sums;
    typedef bf16 Input;
    static constexpr int INPUTS = 2;
    template <int R, int C>
    static void step(floats (*sums)[C], const uint8_t* w, const bf16* x, int64_t stride) {
        __m512bh v[C];
        for (int c = 0; c < C; ++c) v[c] = (__m512bh)_mm512_loadu_si512(w + 4 * LANES * c);
        for (int r = 0; r < R; ++r) {
            __m512bh two = (__m512bh)splat((const int8_t*)(x + r * stride));
            for (int c = 0; c < C; ++c) sums[r][c] = (floats)_mm512_dpbf16_ps((__m512)sums[r][c], v[c], two);
        }
    }
};
#endif

struct Weights {
    const uint8_t* data;   // [panels, steps, PANEL, 4]
    const float* scales;   // [panels, groups, PANEL]
    const uint8_t* zeros;  // the same, or null: `zero` everywhere
    const float* bias;     // [outputs] or null
    int inputs, outputs, group, zero;

    int groups() const { return inputs / group; }
};

template <class Input>
struct Inputs {
    const Input* data;    // [rows, inputs], or [rows / height, inputs / width, height, width] as tiles take them
    int height, width;
    const float* scales;  // [rows, groups]
    const int32_t* sums;  // [rows, groups]

    // Where a tile begins whose rows begin at `rows`.
    const Input* tile(int64_t rows, int input) const {
        return data + rows + int64_t(input / width) * height * width + input % width;
    }
};

// What a thread keeps of a panel while its chunks go by: sums of the current group, and what earlier groups gave.
template <class Sums>
struct Partial {
    std::vector<Sums> sums;      // [rows, COLUMNS]
    std::vector<floats> totals;  // the same
};

// Steps [begin, end) of a panel, and lines of memory to ask for meanwhile.
struct Chunk {
    int panel, begin, end;
    const uint8_t* data;  // from `begin` on
    const uint8_t* ahead;
    int lines;
};

// A group's sums, scaled, go to the totals.
template <int R, int C>
inline __attribute__((always_inline)) void scale_group(const Weights& w, const Inputs<int8_t>& x, int panel, int64_t row,
                                                       int g, int column, const ints (*sums)[C], floats* totals) {
    const int64_t at = (int64_t(panel) * w.groups() + g) * PANEL + column * LANES;
    for (int c = 0; c < C; ++c) {
        const floats scale = load(w.scales + at + c * LANES);
        ints zero = {};
        if (w.zeros)
            for (int i = 0; i < LANES; ++i) zero[i] = w.zeros[at + c * LANES + i];
        for (int r = 0; r < R; ++r) {
            const int64_t group = (row + r) * w.groups() + g;
            const ints offset = w.zeros ? zero * x.sums[group] : splat(w.zero * x.sums[group]);
            floats& total = totals[r * COLUMNS + c];
            total += __builtin_convertvector(sums[r][c] - offset, floats) * (scale * x.scales[group]);
        }
    }
}

// A chunk for R rows and C registers of outputs.
template <class F, int R, int C>
void tile(const Weights& w, const Inputs<typename F::Input>& x, const Chunk& chunk, int64_t row, int column,
          Partial<typename F::Sums>& partial) {
    constexpr bool GROUPED = F::INPUTS > 2;
    const int group = (GROUPED ? w.group : w.inputs) / F::INPUTS, length = chunk.end - chunk.begin;
    const int each = chunk.lines / length, more = chunk.begin + chunk.lines % length;
    const uint8_t *data = chunk.data + column * LANES * 4, *ahead = chunk.ahead;
    const auto* input = x.data + row * w.inputs;
    auto* kept = &partial.sums[row * COLUMNS + column];
    typename F::Sums sums[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = kept[r * COLUMNS + c];
    for (int s = chunk.begin; s < chunk.end;) {
        const int border = (s / group + 1) * group, stop = border < chunk.end ? border : chunk.end;
        for (; s < stop; ++s, data += STEP) {
            for (int i = each + (s < more); i > 0; --i, ahead += 64) __builtin_prefetch(ahead, 0, NEARNESS);
            F::template step<R, C>(sums, data, input + s * F::INPUTS, w.inputs);
        }
        if constexpr (GROUPED)
            if (stop == border) {
                scale_group<R, C>(w, x, chunk.panel, row, border / group - 1, column, sums,
                                  &partial.totals[row * COLUMNS + column]);
                for (auto& of_row : sums)
                    for (auto& sum : of_row) sum = ints{};
            }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) kept[r * COLUMNS + c] = sums[r][c];
}

// All registers of outputs for `count` rows, at most R.
template <class F, int R>
void tile_rows(int count, const Weights& w, const Inputs<typename F::Input>& x, Chunk chunk, int64_t row,
               Partial<typename F::Sums>& partial) {
    if constexpr (R > 1)
        if (count < R) return tile_rows<F, R - 1>(count, w, x, chunk, row, partial);
    for (int column = 0; column < COLUMNS; column += WIDTH<R>, chunk.lines = 0)
        tile<F, R, WIDTH<R>>(w, x, chunk, row, column, partial);
}

// A chunk for all rows. While it is multiplied, what is at `next` comes closer, a share with each tile of rows.
template <class F>
void multiply_chunk(const Weights& w, const Inputs<typename F::Input>& x, int64_t rows, Chunk chunk, int64_t tiles,
                    Partial<typename F::Sums>& partial) {
    const uint8_t* next = chunk.ahead;
    const int64_t lines = chunk.lines;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = t * rows / tiles, count = (t + 1) * rows / tiles - row, first = t * lines / tiles;
        chunk.ahead = next + first * 64;
        chunk.lines = int((t + 1) * lines / tiles - first);
        tile_rows<F, ROWS>(int(count), w, x, chunk, row, partial);
    }
}

// All chunks of a panel, for all rows.
template <class F>
void sum_panel(const Weights& w, const Inputs<typename F::Input>& x, int panel, int64_t rows,
               Partial<typename F::Sums>& partial) {
    std::fill(partial.sums.begin(), partial.sums.end(), typename F::Sums{});
    const int steps = w.inputs / F::INPUTS;
    const int64_t tiles = (rows + ROWS - 1) / ROWS;  // rows are shared out evenly among them
    const uint8_t* data = w.data + int64_t(panel) * steps * STEP;
    for (int begin = 0; begin < steps; begin += CHUNK) {
        const int end = begin + CHUNK < steps ? begin + CHUNK : steps, lines = int((end - begin) * STEP / 64);
        const Chunk chunk{panel, begin, end, data + begin * STEP, data + end * STEP, lines};
        multiply_chunk<F>(w, x, rows, chunk, tiles, partial);
    }
}

#if defined(SOOTHSAY_TILES)
// Rows from which on tiles multiply, where vectors are slower. Integers' sums are exact either way; those of bfloat16 are
// not the vectors', so that a single row has to have them too.
template <class F> constexpr int64_t TILED_FROM = F::INPUTS == 2 ? 1 : F::INPUTS == 4 ? 4 : 7;

// Rows are shared out evenly among tiles, the last of which may have some that nobody asked for.
struct Tiling {
    int64_t rows, tiles;
    int height, steps;  // of a tile

    template <class F>
    static Tiling of(F, int64_t rows, const Weights& w) {
        const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        const int group = F::INPUTS > 2 ? w.group : w.inputs;
        return {rows, tiles, int((rows + tiles - 1) / tiles), std::gcd(TILE_STEPS, group * int(sizeof(typename F::Input)) / 4)};
    }
};

// Integers of 4 bits in bytes, 8 inputs of an output in two steps.
inline void spread(const uint8_t* packed, int steps, uint8_t* out) {
    for (; steps > 0; --steps, packed += STEP, out += 2 * STEP)
        for (int i = 0; i < STEP; i += 4 * LANES) {
            const ints v = bytes(packed + i), low = v & 0x0f0f0f0f, high = v >> 4 & 0x0f0f0f0f;
            std::memcpy(out + i, &low, sizeof low);
            std::memcpy(out + STEP + i, &high, sizeof high);
        }
}

// A chunk for all rows. Its steps are four bytes of each output's weights, none of them packed.
template <class F>
void multiply_chunk_in_tiles(const Weights& w, const Inputs<typename F::Input>& x, int64_t rows, int steps,
                             const Chunk& chunk, Partial<typename F::Sums>& partial) {
    typedef typename F::Input Input;
    constexpr bool GROUPED = F::INPUTS > 2;
    constexpr int INPUTS = 4 / sizeof(Input);  // of a step
    const int group = (GROUPED ? w.group : w.inputs) / INPUTS;
    const int64_t total = (rows + x.height - 1) / x.height * (chunk.end - chunk.begin);
    const uint8_t* ahead = chunk.ahead;
    int64_t done = 0, asked = 0;
    for (int64_t row = 0; row < rows; row += x.height) {
        auto* sums = &partial.sums[row * COLUMNS];
        const uint8_t* data = chunk.data;
        for (int s = chunk.begin; s < chunk.end;) {
            const int border = (s / group + 1) * group, stop = border < chunk.end ? border : chunk.end;
            if (s % group) load_tiles(sums, STEP);
            else zero_tiles();
            for (; s < stop; s += steps, data += steps * STEP) {
                for (done += steps; asked * total < done * chunk.lines; ++asked, ahead += 64)
                    __builtin_prefetch(ahead, 0, 3);
                multiply_tiles(x.tile(row * w.inputs, s * INPUTS), x.width * sizeof(Input), data);
            }
            store_tiles(sums, STEP);
            if constexpr (GROUPED)
                if (stop == border) {
                    const auto* at = reinterpret_cast<const ints(*)[COLUMNS]>(sums);
                    const int64_t last = row + x.height < rows ? row + x.height : rows;
                    int64_t r = row;
                    for (; r + 4 <= last; r += 4, at += 4)
                        scale_group<4, COLUMNS>(w, x, chunk.panel, r, border / group - 1, 0, at, &partial.totals[r * COLUMNS]);
                    for (; r < last; ++r, ++at)
                        scale_group<1, COLUMNS>(w, x, chunk.panel, r, border / group - 1, 0, at, &partial.totals[r * COLUMNS]);
                }
        }
    }
}

template <class F>
void sum_panel_in_tiles(const Weights& w, const Inputs<typename F::Input>& x, int panel, int64_t rows, int depth,
                        Partial<typename F::Sums>& partial) {
    constexpr int EACH = F::INPUTS * sizeof(typename F::Input) / 4;  // steps of tiles in one of packed weights
    alignas(64) uint8_t plain[EACH > 1 ? CHUNK * STEP : 1];
    const int steps = w.inputs / F::INPUTS, length = CHUNK / EACH;
    const uint8_t* data = w.data + int64_t(panel) * steps * STEP;
    for (int begin = 0; begin < steps; begin += length) {
        const int end = begin + length < steps ? begin + length : steps, lines = int((end - begin) * STEP / 64);
        Chunk chunk{panel, begin * EACH, end * EACH, data + begin * STEP, data + end * STEP, lines};
        if constexpr (EACH > 1) {
            spread(chunk.data, end - begin, plain);
            chunk.data = plain;
        }
        multiply_chunk_in_tiles<F>(w, x, rows, depth, chunk, partial);
    }
}
#endif

template <class F, class Out>
void write_panel(const Weights& w, int panel, int64_t rows, const Partial<typename F::Sums>& partial, Out* out) {
    const int valid = w.outputs - panel * PANEL < PANEL ? w.outputs - panel * PANEL : PANEL;
    for (int64_t r = 0; r < rows; ++r) {
        Out* target = out + r * w.outputs + panel * PANEL;
        for (int c = 0; c < COLUMNS; ++c) {
            floats v;
            if constexpr (F::INPUTS > 2) v = partial.totals[r * COLUMNS + c];
            else v = partial.sums[r * COLUMNS + c];
            for (int i = 0; w.bias && i < LANES && c * LANES + i < valid; ++i)
                v[i] += w.bias[panel * PANEL + c * LANES + i];
            if ((c + 1) * LANES <= valid) keep(target + c * LANES, v);
            else
                for (int i = 0; c * LANES + i < valid; ++i) keep(target + c * LANES + i, v[i]);
        }
    }
}

// The nearest integers, ties to even.
inline ints nearest(floats x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX__)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (ints)_mm_cvtps_epi32((__m128)x);
#else
    ints v;
    for (int i = 0; i < LANES; ++i) v[i] = int32_t(std::nearbyint(x[i]));
    return v;
#endif
}

// A row in integers of 8 bits: x = scale * q with |q| <= 127, for each group by itself.
template <class T, class Place>
void quantize(const T* x, int inputs, int group, Place place, float* scales, int32_t* sums) {
    for (int begin = 0; begin < inputs; begin += group) {
        floats largest = {};
        for (int i = begin; i < begin + group; i += LANES) {
            floats v = load(x + i), size = v < 0 ? -v : v;
            largest = size > largest ? size : largest;
        }
        const float top = max(largest), inverse = top > 0 ? 127.0f / top : 0.0f;
        ints total = {};
        for (int i = begin; i < begin + group; i += LANES) {
            ints v = nearest(load(x + i) * inverse);
            total += v;
            const chars small = __builtin_convertvector(v, chars);
            std::memcpy(place(i), &small, sizeof small);
        }
        *scales++ = top / 127.0f;
        int32_t all = 0;
        for (int n = 0; n < LANES; ++n) all += total[n];
        *sums++ = all;
    }
}

template <class F, class In, class Out>
void multiply(const In* x, int64_t rows, const Weights& w, Out* out) {
    if (!rows) return;
    typedef typename F::Input Input;
    constexpr bool INTEGER = F::INPUTS > 2;
    const int panels = (w.outputs + PANEL - 1) / PANEL, groups = INTEGER ? w.groups() : 0;
    int64_t computed = rows;
    int height = 1, width = w.inputs;
#if defined(SOOTHSAY_TILES)
    const Tiling tiling = Tiling::of(F(), rows, w);
    const bool tiled = rows >= TILED_FROM<F>;
    if (tiled) {
        computed = tiling.tiles * tiling.height, height = tiling.height;
        if (!std::is_same<In, Input>::value || tiling.tiles > 1) width = tiling.steps * 4 / int(sizeof(Input));
    }
#endif
    const bool direct = std::is_same<In, Input>::value && width == w.inputs;
    std::vector<floats> place(direct ? 0 : (computed * w.inputs * sizeof(Input) + sizeof(floats) - 1) / sizeof(floats));
    Input* const data = (Input*)place.data();  // at the start of a line: tiles are slow to load across lines
    std::vector<float> scales(rows * groups);
    std::vector<int32_t> sums(rows * groups);
#pragma omp parallel if (int64_t(w.inputs) * w.outputs > WORTH_THREADS)
    {
        if (!direct) {
#pragma omp for
            for (int64_t r = 0; r < rows; ++r) {
                Input* row = &data[r / height * height * w.inputs + r % height * width];
                auto at = [&](int i) { return row + int64_t(i / width) * height * width + i % width; };
                if constexpr (INTEGER)
                    quantize(x + r * w.inputs, w.inputs, w.group, at, &scales[r * groups], &sums[r * groups]);
                else
                    for (int i = 0; i < w.inputs; i += LANES) keep(at(i), load(x + r * w.inputs + i));
            }
        }
        const Inputs<Input> inputs{direct ? (const Input*)x : data, height, width, scales.data(), sums.data()};
        Partial<typename F::Sums> partial;
        partial.sums.resize(computed * COLUMNS);
        if (INTEGER) partial.totals.resize(rows * COLUMNS);
#if defined(SOOTHSAY_TILES)
        const TileShape shape(height, tiling.steps);
#endif
#pragma omp for schedule(static)
        for (int panel = 0; panel < panels; ++panel) {
            std::fill(partial.totals.begin(), partial.totals.end(), floats{});
#if defined(SOOTHSAY_TILES)
            if (tiled) sum_panel_in_tiles<F>(w, inputs, panel, rows, tiling.steps, partial);
            else
#endif
                sum_panel<F>(w, inputs, panel, rows, partial);
            write_panel<F>(w, panel, rows, partial, out);
        }
    }
}

template <class F>
void multiply(const void* x, int x_is_bf16, int64_t rows, const Weights& w, void* out, int out_is_bf16) {
    auto run = [&](auto* source, auto* target) { multiply<F>(source, rows, w, target); };
    if (x_is_bf16 && out_is_bf16) run((const bf16*)x, (bf16*)out);
    else if (x_is_bf16) run((const bf16*)x, (float*)out);
    else if (out_is_bf16) run((const float*)x, (bf16*)out);
    else run((const float*)x, (float*)out);
}

}  // namespace

extern "C" void soothsay_linear(const void* x, int x_is_bf16, int64_t rows, const void* weights, int bits,
                                const float* scales, const uint8_t* zeros, const float* bias, int inputs, int outputs,
                                int group, void* out, int out_is_bf16) {
    const Weights w{(const uint8_t*)weights, scales, zeros, bias, inputs, outputs, group, 1 << (bits - 1)};
    if (bits == 4) multiply<Int4>(x, x_is_bf16, rows, w, out, out_is_bf16);
    else if (bits == 8) multiply<Int8>(x, x_is_bf16, rows, w, out, out_is_bf16);
#if defined(__AVX512BF16__)
    else multiply<Bf16>(x, x_is_bf16, rows, w, out, out_is_bf16);
#endif
}
