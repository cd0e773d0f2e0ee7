// A block of a head's keys and values in the layouts of products, and these products.
//
// `Float...` and `Pair...` (of bfloat16) each have one half: scores of queries against keys, or sums of values. Those of
// integers are in integer_blocks.h.
#pragma once
#include "simd.h"
#include <vector>

namespace {

constexpr int BLOCK = 64;                  // keys
constexpr int TILES = BLOCK / LANES;       // registers for the scores of a block, one query
constexpr int WIDE = LANES == 16 ? 4 : 2;  // how many of them fit into registers for four queries

// Words aligned to a cache line: loading tiles across lines is slow.
class Words {
    std::vector<floats> lines;

public:
    explicit Words(size_t size) : lines((size + LANES - 1) / LANES) {}
    uint32_t& operator[](size_t i) { return ((uint32_t*)lines.data())[i]; }
    const uint32_t& operator[](size_t i) const { return ((const uint32_t*)lines.data())[i]; }
};

#if defined(__AVX512F__)
// Transposes 16 rows of 16 words. Columns are written BLOCK words apart. `a` is lost.
inline void transpose(__m512i (&a)[LANES], uint32_t* out) {
    __m512i b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int n = 0; n < 2; ++n) {
            a[i + 2 * n] = _mm512_unpacklo_epi64(b[i + n], b[i + 2 + n]);
            a[i + 2 * n + 1] = _mm512_unpackhi_epi64(b[i + n], b[i + 2 + n]);
        }
    for (int n = 0; n < 4; ++n)
        for (int i = 0; i < 2; ++i) {
            b[8 * i + n] = _mm512_shuffle_i32x4(a[8 * i + n], a[8 * i + 4 + n], 0x88);
            b[8 * i + 4 + n] = _mm512_shuffle_i32x4(a[8 * i + n], a[8 * i + 4 + n], 0xdd);
        }
    for (int n = 0; n < 8; ++n) {
        // b[n] and b[8 + n] have columns n % 4 + {0, 8} (n < 4) or + {4, 12} of both halves of the keys
        int column = n % 4 + (n < 4 ? 0 : 4);
        _mm512_storeu_si512(out + size_t(column) * BLOCK, _mm512_shuffle_i32x4(b[n], b[8 + n], 0x88));
        _mm512_storeu_si512(out + size_t(column + 8) * BLOCK, _mm512_shuffle_i32x4(b[n], b[8 + n], 0xdd));
    }
}
#endif

// The first `count` words of the block's keys, each with its bits FLIP changed: out[j][i] is word j of key i.
template <uint32_t FLIP = 0, class T>
void set_words(const T* const* k, int count, Words& out) {
#if defined(__AVX512F__)
    const __m512i flip = _mm512_set1_epi32(int(FLIP));
    for (int t = 0; t < TILES; ++t)
        for (int j = 0; j < count; j += LANES) {
            const __mmask16 own = __mmask16(count - j < LANES ? (1 << (count - j)) - 1 : -1);
            __m512i rows[LANES];
            for (int i = 0; i < LANES; ++i)
                rows[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi32(own, (const char*)k[t * LANES + i] + 4 * j), flip);
            transpose(rows, &out[size_t(j) * BLOCK + t * LANES]);
        }
#else
    for (int i = 0; i < BLOCK; ++i)
        for (int j = 0; j < count; ++j) {
            uint32_t word;
            std::memcpy(&word, (const char*)k[i] + 4 * j, 4);
            out[size_t(j) * BLOCK + i] = word ^ FLIP;
        }
#endif
}

// Keys as floats: keys[t][j] has dimension j of LANES keys.
struct FloatKeys {
    std::vector<float> q, keys;
    FloatKeys(int queries, int d) : q(size_t(queries) * d), keys(size_t(BLOCK) * d) {}

    void set_query(int r, const float* source, int d) { std::memcpy(&q[size_t(r) * d], source, 4 * d); }

    template <class T>
    void set_keys(const T* const* k, int d) {
        for (int i = 0; i < BLOCK; ++i) {
            float* column = &keys[size_t(i / LANES) * d * LANES + i % LANES];
            for (int j = 0; j < d; ++j) column[j * LANES] = widen(k[i][j]);
        }
    }

    // Scores of queries r, ..., r + N - 1 against the block.
    template <int N>
    void scores(int r, int d, floats (*out)[TILES]) const {
        const float* x = &q[size_t(r) * d];
        for (int first = 0; first < TILES; first += WIDE) {
            floats s[N][WIDE] = {};
            for (int j = 0; j < d; ++j)
                for (int t = 0; t < WIDE; ++t) {
                    const floats k = load(&keys[(size_t(first + t) * d + j) * LANES]);
                    for (int n = 0; n < N; ++n) s[n][t] = fused(k, splat(x[n * d + j]), s[n][t]);
                }
            for (int n = 0; n < N; ++n)
                for (int t = 0; t < WIDE; ++t) out[n][first + t] = s[n][t];
        }
    }
};

// Values as floats.
struct FloatValues {
    std::vector<float> values;
    static floats power(floats x) { return exp(x); }
    FloatValues(int, int d) : values(size_t(BLOCK) * d) {}

    template <class T>
    void set_values(const T* const* v, int d) {
        for (int i = 0; i < BLOCK; ++i)
            for (int j = 0; j < d; j += LANES) store(&values[size_t(i) * d + j], load(v[i] + j));
    }

    // Adds the block's values, weighted by p, to N accumulators of d floats.
    template <int N>
    void add(const floats (*p)[TILES], int d, float* acc) const {
        int j = 0;
        for (; j + WIDE * LANES <= d; j += WIDE * LANES) add_part<N, WIDE>(p, d, j, acc);
        for (; j < d; j += LANES) add_part<N, 1>(p, d, j, acc);
    }

    template <int N, int H>
    void add_part(const floats (*p)[TILES], int d, int j, float* acc) const {
        floats a[N][H];
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) a[n][h] = load(acc + n * d + j + h * LANES);
        for (int i = 0; i < BLOCK; ++i)
            for (int h = 0; h < H; ++h) {
                const floats v = load(&values[size_t(i) * d + j + h * LANES]);
                for (int n = 0; n < N; ++n) a[n][h] = fused(v, splat(p[n][i / LANES][i % LANES]), a[n][h]);
            }
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) store(acc + n * d + j + h * LANES, a[n][h]);
    }
};

#if defined(SOOTHSAY_MULTIPLIES_BF16)
// Pairs of numbers of two rows, from LANES numbers of each.
inline ints interleaved(const bf16* a, const bf16* b) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)a));
    return (ints)_mm512_permutex2var_epi16(first, low, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)b)));
#else
    const uint16x4_t first = vld1_u16((const uint16_t*)a), second = vld1_u16((const uint16_t*)b);
    return (ints)vcombine_u16(vzip1_u16(first, second), vzip2_u16(first, second));
#endif
}

inline ints words(const uint32_t& first) {
    ints v;
    std::memcpy(&v, &first, sizeof v);
    return v;
}

// Keys and queries as pairs of bfloat16. Sums are float.
struct PairKeys {
    Words q, keys;  // [queries][d/2], [d/2][BLOCK]
    PairKeys(int queries, int d) : q(size_t(queries) * d / 2), keys(size_t(BLOCK) * d / 2) {}

    static uint32_t pair(bf16 low, bf16 high) { return low.bits | uint32_t(high.bits) << 16; }

    void set_query(int r, const float* source, int d) {
        for (int j = 0; j < d / 2; ++j) q[size_t(r) * d / 2 + j] = pair(narrow(source[2 * j]), narrow(source[2 * j + 1]));
    }

    void set_keys(const bf16* const* k, int d) { set_words(k, d / 2, keys); }

    template <int N>
    void scores(int r, int d, floats (*out)[TILES]) const {
        const uint32_t* x = &q[size_t(r) * d / 2];
        for (int first = 0; first < TILES; first += WIDE) {
            floats s[N][WIDE] = {};
            for (int j = 0; j < d / 2; ++j)
                for (int t = 0; t < WIDE; ++t) {
                    const ints k = words(keys[size_t(j) * BLOCK + (first + t) * LANES]);
                    for (int n = 0; n < N; ++n) s[n][t] = bf16_dot(s[n][t], splat(int32_t(x[n * d / 2 + j])), k);
                }
            for (int n = 0; n < N; ++n)
                for (int t = 0; t < WIDE; ++t) out[n][first + t] = s[n][t];
        }
    }
};

// Values as pairs of bfloat16, weighted by bfloat16. Sums are float.
struct PairValues {
    const int wide;  // d, rounded up to whole tiles
    Words values;    // [BLOCK/2][wide]
    static floats power(floats x) { return exp(x); }
    PairValues(int, int d) : wide((d + BLOCK - 1) / BLOCK * BLOCK), values(size_t(BLOCK) * wide / 2) {}

    void set_values(const bf16* const* v, int d) {
        for (int i = 0; i < BLOCK; i += 2)
            for (int j = 0; j < d; j += LANES) {
                const ints pairs = interleaved(v[i] + j, v[i + 1] + j);
                std::memcpy(&values[size_t(i / 2) * wide + j], &pairs, sizeof pairs);
            }
    }

    static void round(const floats* p, uint32_t* w) {
        for (int t = 0; t < TILES; ++t) keep((bf16*)w + t * LANES, p[t]);
    }

    template <int N>
    void add(const floats (*p)[TILES], int d, float* acc) const {
        uint32_t w[N][BLOCK / 2];
        for (int n = 0; n < N; ++n) round(p[n], w[n]);
        int j = 0;
        for (; j + WIDE * LANES <= d; j += WIDE * LANES) add_part<N, WIDE>(w, d, j, acc);
        for (; j < d; j += LANES) add_part<N, 1>(w, d, j, acc);
    }

    template <int N, int H>
    void add_part(const uint32_t (*w)[BLOCK / 2], int d, int j, float* acc) const {
        floats a[N][H];
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) a[n][h] = load(acc + n * d + j + h * LANES);
        for (int i = 0; i < BLOCK / 2; ++i)
            for (int h = 0; h < H; ++h) {
                const ints v = words(values[size_t(i) * wide + j + h * LANES]);
                for (int n = 0; n < N; ++n) a[n][h] = bf16_dot(a[n][h], splat(int32_t(w[n][i])), v);
            }
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) store(acc + n * d + j + h * LANES, a[n][h]);
    }
};
#endif

// A block of keys and values.
template <class Keys, class Values>
struct Both : Keys, Values {
    Both(int queries, int d) : Keys(queries, d), Values(queries, d) {}
};

}  // namespace
