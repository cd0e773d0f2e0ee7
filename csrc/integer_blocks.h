// Products of a block of keys and values in integers; see key_blocks.h.
#pragma once
#include "integer_rows.h"
#include "key_blocks.h"

namespace {

// Keys and queries as integers of 16 or 8 bits. Sums are exact; see integer_rows.h. Bytes of keys are kept
// ZERO_BYTE too large, as products of bytes take them. Sums begin with what that costs.
template <class T>
struct IntegerKeys {
    static constexpr bool BYTES = sizeof(T) == 1;
    std::vector<float> query_scales;
    std::vector<int32_t> begins;
    float key_scales[BLOCK];
    Words q, keys;  // words of one or two integers: [queries][words], [words, of whole registers][BLOCK]
    IntegerKeys(int queries, int d)
        : query_scales(queries), begins(queries), q(size_t(queries) * words(d)),
          keys(size_t((words(d) + 15) / 16 * 16) * BLOCK) {}

    static int words(int d) { return d * int(sizeof(T)) / 4; }

    void set_query(int r, const float* source, int d) {
        T* row = (T*)&q[size_t(r) * words(d)];
        query_scales[r] = keep_integers(source, d, row);
        int32_t sum = 0;
        for (int j = 0; BYTES && j < d; ++j) sum += row[j];
        begins[r] = -ZERO_BYTE * sum;
    }

    void set_keys(const T* const* k, int d) {
        set_words<BYTES ? 0x01010101u * ZERO_BYTE : 0>(k, words(d), keys);
        for (int i = 0; i < BLOCK; ++i) key_scales[i] = integer_scale(k[i], d);
    }

    static ints more(ints sums, ints k, ints x) {
        if constexpr (BYTES) return dot<8>(sums, k, x);
        else return add_pairs(sums, (shorts)k, (shorts)x);
    }

    template <int N>
    void scores(int r, int d, floats (*out)[TILES]) const {
        const int count = words(d);
        const uint32_t* x = &q[size_t(r) * count];
        for (int first = 0; first < TILES; first += WIDE) {
            ints s[N][WIDE];
            for (int n = 0; n < N; ++n)
                for (int t = 0; t < WIDE; ++t) s[n][t] = splat(begins[r + n]);
            for (int j = 0; j < count; ++j)
                for (int t = 0; t < WIDE; ++t) {
                    ints k;
                    std::memcpy(&k, &keys[size_t(j) * BLOCK + (first + t) * LANES], sizeof k);
                    for (int n = 0; n < N; ++n) s[n][t] = more(s[n][t], k, splat(int32_t(x[n * count + j])));
                }
            for (int n = 0; n < N; ++n)
                for (int t = 0; t < WIDE; ++t) {
                    const floats scale = load(&key_scales[(first + t) * LANES]) * query_scales[r + n];
                    out[n][first + t] = __builtin_convertvector(s[n][t], floats) * scale;
                }
        }
    }
};

#if defined(__AVX512BW__)
// Four words of each lane, as the lanes of four words: instructions that interleave or pack work within lanes.
inline __m512i across_lanes(__m512i x) {
    return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), x);
}
#endif

// Values in 8 bits, weighted by bytes: a query's weights of a block, times the scales of values, are rounded to 0 to 255. Sums
// of a block are exact.
struct ByteValues {
    const int wide;  // d, rounded up to whole registers
    float value_scales[BLOCK];
    Words values;  // fours of keys: [BLOCK/4][wide]
    static floats power(floats x) { return coarse_exp(x); }
    ByteValues(int, int d) : wide((d + 63) / 64 * 64), values(size_t(BLOCK) * wide / 4) {}

    void set_values(const int8_t* const* v, int d) {
        for (int i = 0; i < BLOCK; ++i) value_scales[i] = integer_scale(v[i], d);
        for (int i = 0; i < BLOCK; i += 4) {
            uint32_t* out = &values[size_t(i / 4) * wide];
#if defined(__AVX512BW__)
            for (int j = 0; j < d; j += 64) {
                const __mmask16 own = __mmask16(d - j < 64 ? (1 << (d - j) / 4) - 1 : -1);
                __m512i a[4], b[4];
                for (int n = 0; n < 4; ++n) a[n] = across_lanes(_mm512_maskz_loadu_epi32(own, v[i + n] + j));
                for (int n = 0; n < 4; n += 2) {
                    b[n] = _mm512_unpacklo_epi8(a[n], a[n + 1]);
                    b[n + 1] = _mm512_unpackhi_epi8(a[n], a[n + 1]);
                }
                for (int n = 0; n < 2; ++n) {
                    _mm512_storeu_si512(out + j + 32 * n, _mm512_unpacklo_epi16(b[n], b[n + 2]));
                    _mm512_storeu_si512(out + j + 32 * n + 16, _mm512_unpackhi_epi16(b[n], b[n + 2]));
                }
            }
#else
            for (int j = 0; j < d; ++j)
                for (int n = 0; n < 4; ++n) ((int8_t*)(out + j))[n] = v[i + n][j];
#endif
        }
    }

    // Rounds weights p to bytes. Returns the factor of their sums.
    float round(const floats* p, uint8_t* w) const {
        floats x[TILES], highest = {};
        for (int t = 0; t < TILES; ++t) {
            x[t] = p[t] * load(&value_scales[t * LANES]);
            highest = x[t] > highest ? x[t] : highest;
        }
        const float largest = max(highest), inverse = largest > LEAST_SIZE ? 255 / largest : 0.0f;
        ints whole[TILES];
        for (int t = 0; t < TILES; ++t) whole[t] = nearest(x[t] * inverse);
#if defined(__AVX512BW__)
        const __m512i low = _mm512_packs_epi32((__m512i)whole[0], (__m512i)whole[1]);
        const __m512i high = _mm512_packs_epi32((__m512i)whole[2], (__m512i)whole[3]);
        _mm512_storeu_si512(w, across_lanes(_mm512_packus_epi16(low, high)));
#else
        for (int i = 0; i < BLOCK; ++i) w[i] = uint8_t(whole[i / LANES][i % LANES]);
#endif
        return largest / 255;
    }

    template <int N>
    void add(const floats (*p)[TILES], int d, float* acc) const {
        uint32_t w[N][BLOCK / 4];
        float factors[N];
        for (int n = 0; n < N; ++n) factors[n] = round(p[n], (uint8_t*)w[n]);
        int j = 0;
        for (; j + WIDE * LANES <= d; j += WIDE * LANES) add_part<N, WIDE>(w, factors, d, j, acc);
        for (; j < d; j += LANES) add_part<N, 1>(w, factors, d, j, acc);
    }

    template <int N, int H>
    void add_part(const uint32_t (*w)[BLOCK / 4], const float* factors, int d, int j, float* acc) const {
        ints a[N][H] = {};
#pragma GCC unroll 1  // else the compiler computes one register after the other, and waits for each sum
        for (int i = 0; i < BLOCK / 4; ++i)
            for (int h = 0; h < H; ++h) {
                ints v;
                std::memcpy(&v, &values[size_t(i) * wide + j + h * LANES], sizeof v);
                for (int n = 0; n < N; ++n) a[n][h] = unsigned_dot(a[n][h], splat(int32_t(w[n][i])), v);
            }
        for (int n = 0; n < N; ++n)
            for (int h = 0; h < H; ++h) {
                float* own = acc + n * d + j + h * LANES;
                store(own, fused(__builtin_convertvector(a[n][h], floats), splat(factors[n]), load(own)));
            }
    }
};

}  // namespace
