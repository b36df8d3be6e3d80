/* avx2.c - the kernel set of x86-64 with AVX2 and F16C (Intel from 2013, AMD from 2015). Empty
 * elsewhere. FMA is left out on purpose: a contracted product is rounded once where the others
 * round twice.
 */
#ifdef __x86_64__

#include <cpuid.h>
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#include <stdint.h>

#define SET kernels_avx2
#define SET_NAME "avx2"

/* Two registers: what 16 floats fill, and their 16-bit forms fill one. */
enum { LANES = 16 };
typedef struct vec {
    __m256 low, high;
} vec;

/* F16C by cpuid, since older compilers do not know its name in __builtin_cpu_supports. That one
 * also tells whether the system saves the registers. */
static int supported(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static inline vec vec_set(float value)
{
    const __m256 all = _mm256_set1_ps(value);
    return (vec){all, all};
}

static inline vec vec_mul(vec x, vec y)
{
    return (vec){_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)};
}

static inline vec vec_add(vec x, vec y)
{
    return (vec){_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)};
}

static inline vec vec_load(const float *src)
{
    return (vec){_mm256_loadu_ps(src), _mm256_loadu_ps(src + 8)};
}

static inline void vec_store(float *dst, vec x)
{
    _mm256_storeu_ps(dst, x.low);
    _mm256_storeu_ps(dst + 8, x.high);
}

static inline __m256 load_bf16_8(const uint16_t *src)
{
    const __m128i half = _mm_loadu_si128((const __m128i *)src);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline vec load_bf16(const uint16_t *src)
{
    return (vec){load_bf16_8(src), load_bf16_8(src + 8)};
}

/* The rounding of scalar.c. */
static inline __m256i round_bf16_8(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i kept = _mm256_srli_epi32(sum, 16);
    return _mm256_blendv_epi8(kept, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
}

/* The pack works within halves of a register; the permutation puts their quarters in order. */
static inline void store_bf16(uint16_t *dst, vec x)
{
    const __m256i packed = _mm256_packus_epi32(round_bf16_8(x.low), round_bf16_8(x.high));
    _mm256_storeu_si256((__m256i *)dst, _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline vec load_fp16(const uint16_t *src)
{
    const __m128i *half = (const __m128i *)src;
    return (vec){_mm256_cvtph_ps(_mm_loadu_si128(half)),
                 _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
}

/* The instruction keeps the payload of a NaN, so that one is replaced first. */
static inline __m128i round_fp16_8(__m256 x)
{
    const __m256 canonical = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    const __m256 clean = _mm256_blendv_ps(x, canonical, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_cvtps_ph(clean, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void store_fp16(uint16_t *dst, vec x)
{
    __m128i *half = (__m128i *)dst;
    _mm_storeu_si128(half, round_fp16_8(x.low));
    _mm_storeu_si128(half + 1, round_fp16_8(x.high));
}

#include "body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
