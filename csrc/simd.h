// A vector register of floats, in the compiler's vector types: one source for all instruction sets.
#pragma once
#include <cstdint>
#include <cstring>
#include <cmath>
#include <initializer_list>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t ushorts __attribute__((vector_size(4 * LANES)));

struct bf16 {
    uint16_t bits;
};

struct fp16 {  // finite
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest, ties to even. NaN does not occur here.
inline bf16 narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return {uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

inline floats load(const float* p) {
    floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline floats load(const bf16* p) {
#if defined(__AVX512F__)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return (floats)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__aarch64__)
    return (floats)vshll_n_u16(vld1_u16((const uint16_t*)p), 16);
#else
    floats v;
    for (int i = 0; i < LANES; ++i) v[i] = widen(p[i]);
    return v;
#endif
}

#if defined(__AVX512F__) || defined(__F16C__) || defined(__aarch64__)
constexpr bool WIDENS_HALVES = true;  // in one instruction
#else
constexpr bool WIDENS_HALVES = false;
#endif

// Exact, with any instruction set. By hand: the exponent's bias is 112 less.
inline floats load(const fp16* p) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (floats)vcvt_f32_f16(vld1_f16((const __fp16*)p));
#else
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    halves narrow;
    std::memcpy(&narrow, p, sizeof narrow);
    const ints wide = __builtin_convertvector(narrow, ints), bits = (wide & 0x7fff) << 13 | (wide & 0x8000) << 16;
    return (floats)bits * 0x1p112f;
#endif
}

inline floats load(const int8_t* p) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__aarch64__)
    uint32_t four;
    std::memcpy(&four, p, 4);
    return (floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
#else
    floats v;
    for (int i = 0; i < LANES; ++i) v[i] = p[i];
    return v;
#endif
}

inline floats load(const uint8_t* p) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    floats v;
    for (int i = 0; i < LANES; ++i) v[i] = p[i];
    return v;
#endif
}

inline void store(float* p, floats v) { std::memcpy(p, &v, sizeof v); }

// In the precision of the memory.
inline void keep(float* p, float v) { *p = v; }
inline void keep(bf16* p, float v) { *p = narrow(v); }
inline void keep(float* p, floats v) { store(p, v); }
inline void keep(bf16* p, floats v) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    const ints bits = (ints)v, rounded = bits + 0x7FFF + (bits >> 16 & 1);
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded, 16)));
#elif defined(__aarch64__)
    vst1_s16((int16_t*)p, vshrn_n_s32((int32x4_t)rounded, 16));
#else
    for (int i = 0; i < LANES; ++i) p[i] = {uint16_t(uint32_t(rounded[i]) >> 16)};
#endif
#endif
}

// The nearest integers, ties to even.
inline ints nearest(floats x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX__)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (ints)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
    return (ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    ints v;
    for (int i = 0; i < LANES; ++i) v[i] = int32_t(std::nearbyint(x[i]));
    return v;
#endif
}

// Integers that 8 bits hold.
inline void keep(int8_t* p, ints v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
#elif defined(__aarch64__)
    const int16x4_t words = vmovn_s32((int32x4_t)v);
    vst1_lane_s32((int32_t*)p, vreinterpret_s32_s8(vmovn_s16(vcombine_s16(words, words))), 0);
#else
    for (int i = 0; i < LANES; ++i) p[i] = int8_t(v[i]);
#endif
}

// Integers that 16 bits hold.
inline void keep(int16_t* p, ints v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1)));
#elif defined(__aarch64__)
    vst1_s16(p, vmovn_s32((int32x4_t)v));
#else
    for (int i = 0; i < LANES; ++i) p[i] = int16_t(v[i]);
#endif
}

inline ints splat(int32_t x) { return ints{} + x; }

inline floats splat(float x) {
#if defined(__AVX512F__)
    return (floats)_mm512_set1_ps(x);
#elif defined(__AVX__)
    return (floats)_mm256_set1_ps(x);
#else
    return floats{x, x, x, x};
#endif
}

// a * b + c, rounded once if the processor can. All other products are rounded before they are added: a compiler that may
// choose would choose differently for one row and for four.
inline floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The sum by halves, always in the same order.
inline float sum(floats v) {
    float a[LANES];
    store(a, v);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) a[i] += a[i + n];
    return a[0];
}

inline int32_t sum(ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#endif
    int32_t all = 0;
    for (int n = 0; n < LANES; ++n) all += v[n];
    return all;
}

inline float max(floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float a[LANES];
    store(a, v);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) a[i] = a[i] > a[i + n] ? a[i] : a[i + n];
    return a[0];
}

// Whether some number is above y.
inline bool any_above(floats x, float y) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(y), _CMP_GT_OQ);
#else
    return max(x) > y;
#endif
}

// e^x for x <= 88, 0 below -87: 2^n e^r with |r| <= ln 2 / 2 and a polynomial of degree 6 (error below 2 ulp).
inline floats exp(floats x) {
#if defined(__AVX512F__)
    const __mmask16 large = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const floats k = (floats)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
#else
    const ints tiny = x < -87.0f;
    x = tiny ? splat(-87.0f) : x;
    const floats scaled = x * 1.44269504f;
    const ints n = __builtin_convertvector(scaled + (scaled < 0 ? splat(-0.5f) : splat(0.5f)), ints);
    const floats k = __builtin_convertvector(n, floats);
#endif
    const floats r = fused(k, splat(-1.42860677e-6f), fused(k, splat(-0.693145752f), x));
    floats y = splat(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fused(y, r, splat(c));
#if defined(__AVX512F__)
    return (floats)_mm512_maskz_scalef_ps(large, (__m512)y, (__m512)k);
#else
    const ints power = (n + 127) << 23;
    floats two_n;
    std::memcpy(&two_n, &power, sizeof power);
    y *= two_n;
    return tiny ? splat(0.0f) : y;
#endif
}

// e^x for x <= 0, with a relative error below 1e-4.
inline floats coarse_exp(floats x) {
#if defined(__AVX512DQ__)
    const floats y = x * 1.44269504f, r = (floats)_mm512_reduce_ps((__m512)y, 1);  // y less the integer below it
    floats power = splat(0.0780238897f);
    for (float c : {0.226067930f, 0.695833310f, 0.999925230f}) power = fused(power, r, splat(c));
    return (floats)_mm512_scalef_ps((__m512)power, (__m512)y);
#else
    return exp(x);
#endif
}

inline floats sigmoid(floats x) {
    floats y = x < -80.0f ? splat(-80.0f) : x;  // e^80 is finite
    return 1.0f / (1.0f + exp(-y));
}

// Sums of two products of 16 bits.
inline ints pairs(shorts a, shorts b) {
#if defined(__AVX512BW__)
    return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return (ints)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
    return ((ints)a << 16 >> 16) * ((ints)b << 16 >> 16) + ((ints)a >> 16) * ((ints)b >> 16);
#endif
}

// acc + the sums of two products of 16 bits.
inline ints add_pairs(ints acc, shorts a, shorts b) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#else
    return acc + pairs(a, b);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define SOOTHSAY_ADDS_PAIRS_OF_BYTES 1
// Sums of two products of bytes, unsigned a and signed b. Exact if a is below 128: then 16 bits hold a sum.
inline shorts byte_pairs(ints a, ints b) {
#if defined(__AVX512BW__)
    return (shorts)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#else
    return (shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

// The byte that stands for 0 where products take integers of 8 bits: x86 multiplies unsigned bytes by signed ones, ARM signed ones.
#if defined(__aarch64__)
constexpr int ZERO_BYTE = 0;
#else
constexpr int ZERO_BYTE = 128;
#endif

// acc + the sum of four products of bytes, w of BITS bits and signed x. w is unsigned, but with 8 bits as ZERO_BYTE says. Exact.
template <int BITS>
inline ints dot(ints acc, ints w, ints x) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
#elif defined(__aarch64__)  // 16 bits hold a sum of two products, since x is no less than -127
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)x));
    return (ints)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, vmull_high_s8((int8x16_t)w, (int8x16_t)x)));
#else
#if defined(__AVX2__)
    if constexpr (BITS < 8) return acc + pairs(byte_pairs(w, x), shorts{} + 1);
#endif
    shorts even = (shorts)((ushorts)w & 0xff), odd = (shorts)((ushorts)w >> 8);
    return acc + pairs(even, (shorts)x << 8 >> 8) + pairs(odd, (shorts)x >> 8);
#endif
}

// `dot` for unsigned bytes w.
inline ints unsigned_dot(ints acc, ints w, ints x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return (ints)vusdotq_s32((int32x4_t)acc, (uint8x16_t)w, (int8x16_t)x);
#else
    if (ZERO_BYTE) return dot<8>(acc, w, x);
    const ints half = splat(0x40404040);
    return dot<8>(dot<8>(dot<8>(acc, w ^ splat(int32_t(0x80808080)), x), half, x), half, x);
#endif
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define SOOTHSAY_MULTIPLIES_BF16 1
// acc + the sum of two products of bfloat16.
inline floats bf16_dot(floats acc, ints a, ints b) {
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    return (floats)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}
#endif

}  // namespace
