/* avx512.c - the kernel set of x86-64 with AVX-512 F, BW, VL and DQ (Intel servers from 2017, AMD
 * from 2022). Empty elsewhere. Neither FMA (see avx2.c) nor AVX512_BF16, whose conversion flushes
 * subnormals.
 */
#ifdef __x86_64__

#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))),        \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif

#include <stdint.h>

#define SET kernels_avx512
#define SET_NAME "avx512"

/* Two registers: 32 floats, whose 16-bit forms fill one. */
enum { LANES = 32 };
typedef struct vec {
    __m512 low, high;
} vec;

static int supported(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static inline vec vec_set(float value)
{
    const __m512 all = _mm512_set1_ps(value);
    return (vec){all, all};
}

static inline vec vec_mul(vec x, vec y)
{
    return (vec){_mm512_mul_ps(x.low, y.low), _mm512_mul_ps(x.high, y.high)};
}

static inline vec vec_add(vec x, vec y)
{
    return (vec){_mm512_add_ps(x.low, y.low), _mm512_add_ps(x.high, y.high)};
}

static inline vec vec_load(const float *src)
{
    return (vec){_mm512_loadu_ps(src), _mm512_loadu_ps(src + 16)};
}

static inline void vec_store(float *dst, vec x)
{
    _mm512_storeu_ps(dst, x.low);
    _mm512_storeu_ps(dst + 16, x.high);
}

static inline __m512 load_bf16_16(const uint16_t *src)
{
    const __m256i half = _mm256_loadu_si256((const __m256i *)src);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline vec load_bf16(const uint16_t *src)
{
    return (vec){load_bf16_16(src), load_bf16_16(src + 16)};
}

/* The rounding of scalar.c, short of NaN. */
static inline __m512i round_bf16_16(__m512 x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_srli_epi32(sum, 16);
}

static inline __mmask16 is_nan_16(__m512 x)
{
    return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
}

/* The pack alternates between its sources every 8 bytes, which the permutation undoes. One
 * comparison sees a NaN in either register; only then are they looked for one by one. */
static inline void store_bf16(uint16_t *dst, vec x)
{
    const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    const __m512i packed = _mm512_packus_epi32(round_bf16_16(x.low), round_bf16_16(x.high));
    __m512i half = _mm512_permutexvar_epi64(order, packed);
    if (_mm512_cmp_ps_mask(x.low, x.high, _CMP_UNORD_Q)) {
        const __mmask32 nan = (__mmask32)is_nan_16(x.high) << 16 | is_nan_16(x.low);
        half = _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7fc0));
    }
    _mm512_storeu_si512(dst, half);
}

static inline vec load_fp16(const uint16_t *src)
{
    const __m256i *half = (const __m256i *)src;
    return (vec){_mm512_cvtph_ps(_mm256_loadu_si256(half)),
                 _mm512_cvtph_ps(_mm256_loadu_si256(half + 1))};
}

/* The instruction keeps the payload of a NaN, so that one is replaced first. */
static inline __m256i round_fp16_16(__m512 x)
{
    const __m512 canonical = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    const __m512 clean = _mm512_mask_mov_ps(x, is_nan_16(x), canonical);
    return _mm512_cvtps_ph(clean, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void store_fp16(uint16_t *dst, vec x)
{
    __m256i *half = (__m256i *)dst;
    _mm256_storeu_si256(half, round_fp16_16(x.low));
    _mm256_storeu_si256(half + 1, round_fp16_16(x.high));
}

#include "body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
