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

/* Two registers: what 16 floats fill. vec_load and fp16 put floats 0 to 7 into low, 8 to 15 into
 * high. The unpack and pack instructions of bf16 work within half a register, so that there floats
 * 0 to 3 and 8 to 11 go into low, the others into high, and nothing has to be permuted. */
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

static inline __m256 load_quarters(const float *src)
{
    const __m256 first = _mm256_castps128_ps256(_mm_loadu_ps(src));
    return _mm256_insertf128_ps(first, _mm_loadu_ps(src + 8), 1);
}

#define BF16_LOAD_F32 bf16_load_f32
static inline vec bf16_load_f32(const float *src)
{
    return (vec){load_quarters(src), load_quarters(src + 4)};
}

static inline vec load_bf16(const uint16_t *src)
{
    const __m256i half = _mm256_loadu_si256((const __m256i *)src);
    const __m256i zero = _mm256_setzero_si256();
    return (vec){_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, half)),
                 _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, half))};
}

static inline __m256 decode_bf16_8(const uint16_t *src)
{
    const __m128i half = _mm_loadu_si128((const __m128i *)src);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

#define BF16_DECODE bf16_decode_lanes
static inline void bf16_decode_lanes(float *dst, const uint16_t *src)
{
    vec_store(dst, (vec){decode_bf16_8(src), decode_bf16_8(src + 8)});
}

/* The rounding of scalar.c, short of NaN. */
static inline __m256i round_bf16_8(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_srli_epi32(sum, 16);
}

static inline __m256i is_nan_8(__m256 x)
{
    return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* One comparison sees a NaN in either register; only then are they looked for one by one. */
static inline void store_bf16(uint16_t *dst, vec x)
{
    __m256i half = _mm256_packus_epi32(round_bf16_8(x.low), round_bf16_8(x.high));
    if (_mm256_movemask_ps(_mm256_cmp_ps(x.low, x.high, _CMP_UNORD_Q)))
        half = _mm256_blendv_epi8(half, _mm256_set1_epi16(0x7fc0),
                                  _mm256_packs_epi32(is_nan_8(x.low), is_nan_8(x.high)));
    _mm256_storeu_si256((__m256i *)dst, half);
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
    const __m256 clean = _mm256_blendv_ps(x, canonical, _mm256_castsi256_ps(is_nan_8(x)));
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
