/* avx512.c - the kernel set of x86-64 with AVX-512 F, BW, VL and DQ (Intel servers from 2017, AMD
 * from 2022). Empty elsewhere. Neither FMA (see avx2.c) nor AVX512_BF16, whose conversion flushes
 * subnormals.
 */
#ifdef __x86_64__

#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512")
#endif

#include <stdint.h>

#define SET kernels_avx512
#define SET_NAME "avx512"

enum { LANES = 16 };
typedef __m512 vec;

static int supported(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static inline vec vec_set(float value)
{
    return _mm512_set1_ps(value);
}

static inline vec vec_mul(vec x, vec y)
{
    return _mm512_mul_ps(x, y);
}

static inline vec vec_add(vec x, vec y)
{
    return _mm512_add_ps(x, y);
}

static inline vec vec_load(const float *src)
{
    return _mm512_loadu_ps(src);
}

static inline void vec_store(float *dst, vec x)
{
    _mm512_storeu_ps(dst, x);
}

static inline vec load_bf16(const uint16_t *src)
{
    const __m256i half = _mm256_loadu_si256((const __m256i *)src);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The rounding of scalar.c. */
static inline void store_bf16(uint16_t *dst, vec x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept =
        _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i *)dst, _mm512_cvtepi32_epi16(kept));
}

static inline vec load_fp16(const uint16_t *src)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)src));
}

/* The instruction keeps the payload of a NaN, so that one is replaced first. */
static inline void store_fp16(uint16_t *dst, vec x)
{
    const __m512 canonical = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    const __m512 clean =
        _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), canonical);
    _mm256_storeu_si256((__m256i *)dst,
                        _mm512_cvtps_ph(clean, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#include "body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
