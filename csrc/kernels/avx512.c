/* avx512.c - the kernel set of x86-64 with AVX-512 F, BW, VL and DQ (Intel servers from 2017, AMD
 * from 2022). Empty elsewhere. It uses neither FMA (see avx2.c) nor AVX512_BF16, whose conversion
 * flushes subnormals.
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

/* Rounds as scalar.c does, but not NaN. */
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

/* Stores bf16. The pack alternates between its sources every 8 bytes, which the permutation undoes.
 * One comparison sees a NaN in either register; only then does each lane get one. */
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

/* Rounds to fp16. The instruction keeps the payload of a NaN, so NaNs are replaced first. */
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

/* ---- for block.h ---- */

static inline vec vec_sub(vec x, vec y)
{
    return (vec){_mm512_sub_ps(x.low, y.low), _mm512_sub_ps(x.high, y.high)};
}

static inline vec vec_abs(vec x)
{
    return (vec){_mm512_abs_ps(x.low), _mm512_abs_ps(x.high)};
}

/* Streams in quarters of a register: numpy aligns to 16 bytes. */
static inline void stream_16(float *dst, __m512 x)
{
    _mm_stream_ps(dst, _mm512_castps512_ps128(x));
    _mm_stream_ps(dst + 4, _mm512_extractf32x4_ps(x, 1));
    _mm_stream_ps(dst + 8, _mm512_extractf32x4_ps(x, 2));
    _mm_stream_ps(dst + 12, _mm512_extractf32x4_ps(x, 3));
}

static inline void vec_stream(float *dst, vec x)
{
    stream_16(dst, x.low);
    stream_16(dst + 16, x.high);
}

static inline void vec_stream_end(void)
{
    _mm_sfence();
}

static inline __m512i bits_16(__m512 x)
{
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

static inline __m512 top_16(__m512 top, __m512 x)
{
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(top), bits_16(x)));
}

static inline vec vec_top(vec top, vec x)
{
    return (vec){top_16(top.low, x.low), top_16(top.high, x.high)};
}

static inline uint32_t vec_top_of(vec top)
{
    const __m512 all = top_16(top.low, top.high);
    return (uint32_t)_mm512_reduce_max_epi32(_mm512_castps_si512(all));
}

static inline __mmask16 is_plus_16(__m512 x)
{
    return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ);
}

static inline uint32_t vec_signs(vec x)
{
    return is_plus_16(x.low) | (uint32_t)is_plus_16(x.high) << 16;
}

static inline __mmask16 reaching_16(__m512 x, uint32_t least)
{
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_cmpge_epu32_mask(size, _mm512_set1_epi32((int)least));
}

static inline uint32_t vec_reaching(vec x, uint32_t least)
{
    return reaching_16(x.low, least) | (uint32_t)reaching_16(x.high, least) << 16;
}

static inline vec vec_by_bits(uint32_t bits, vec plus, vec minus)
{
    return (vec){_mm512_mask_blend_ps((__mmask16)bits, minus.low, plus.low),
                 _mm512_mask_blend_ps((__mmask16)(bits >> 16), minus.high, plus.high)};
}

static inline vec vec_by_sign(vec x, vec plus, vec minus)
{
    return vec_by_bits(vec_signs(x), plus, minus);
}

/* Rounds each lane to a whole number, and returns the numbers as integers. */
static inline __m512i round_int_16(__m512 *x)
{
    const __m512i number = _mm512_cvtps_epi32(*x);
    *x = _mm512_cvtepi32_ps(number);
    return number;
}

/* Stores the low bytes of 32 integers. */
static inline void store_bytes(uint8_t *codes, __m512i low, __m512i high)
{
    __m128i *bytes = (__m128i *)codes;
    _mm_storeu_si128(bytes, _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128(bytes + 1, _mm512_cvtepi32_epi8(high));
}

static inline void round_int8(uint8_t *codes, vec *x, vec *y)
{
    store_bytes(codes, round_int_16(&x->low), round_int_16(&x->high));
    store_bytes(codes + LANES, round_int_16(&y->low), round_int_16(&y->high));
}

static inline vec floats_of_int8(const uint8_t *codes)
{
    const __m128i *bytes = (const __m128i *)codes;
    return (vec){_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes))),
                 _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)))};
}

static inline void load_int8(const uint8_t *codes, vec *x, vec *y)
{
    *x = floats_of_int8(codes);
    *y = floats_of_int8(codes + LANES);
}

static inline __m512i join_halves_16(__m512i low, __m512i high)
{
    return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi32(15)),
                           _mm512_slli_epi32(high, 4));
}

static inline void round_int4(uint8_t *codes, vec *x, vec *y)
{
    const __m512i low = join_halves_16(round_int_16(&x->low), round_int_16(&y->low));
    const __m512i high = join_halves_16(round_int_16(&x->high), round_int_16(&y->high));
    store_bytes(codes, low, high);
}

/* Loads numbers of four bits: two's complement, shifted to the top and back. */
static inline void load_int4_16(const uint8_t *codes, __m512 *x, __m512 *y)
{
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    *x = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(wide, 28), 28));
    *y = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(wide, 24), 28));
}

static inline void load_int4(const uint8_t *codes, vec *x, vec *y)
{
    load_int4_16(codes, &x->low, &y->low);
    load_int4_16(codes + 16, &x->high, &y->high);
}

/* Rounds to e4m3 as avx2.c does. */
static inline __m512 round_fp8_16(__m512 x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i leading = _mm512_and_si512(bits, _mm512_set1_epi32(0x7f800000));
    const __m512i floor = _mm512_max_epi32(leading, _mm512_set1_epi32(121 << 23));
    const __m512i large = _mm512_add_epi32(floor, _mm512_set1_epi32(20 << 23 | 1 << 22));
    const __m512 added = _mm512_castsi512_ps(large);
    const __m512 number = _mm512_sub_ps(_mm512_add_ps(x, added), added);
    return _mm512_or_ps(number, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
}

static inline __m256i half_of_fp8(__m512 number)
{
    return _mm512_cvtps_ph(_mm512_mul_ps(number, _mm512_set1_ps(0x1p-8f)), _MM_FROUND_NO_EXC);
}

/* Stores the codes of numbers: e4m3 is fp16 without its first exponent bit and its last fraction
 * bits, and 2^8 times as large.
 */
static inline void store_fp8(uint8_t *codes, vec number)
{
    const __m512i half = _mm512_inserti64x4(_mm512_castsi256_si512(half_of_fp8(number.low)),
                                            half_of_fp8(number.high), 1);
    const __m512i rest = _mm512_and_si512(_mm512_srli_epi16(half, 7), _mm512_set1_epi16(0x7f));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(half, 8), _mm512_set1_epi16(0x80));
    _mm256_storeu_si256((__m256i *)codes, _mm512_cvtepi16_epi8(_mm512_or_si512(rest, sign)));
}

static inline void round_fp8(uint8_t *codes, vec *x, vec *y)
{
    *x = (vec){round_fp8_16(x->low), round_fp8_16(x->high)};
    *y = (vec){round_fp8_16(y->low), round_fp8_16(y->high)};
    store_fp8(codes, *x);
    store_fp8(codes + LANES, *y);
}

static inline vec floats_of_fp8(const uint8_t *codes)
{
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    const __m512i moved = _mm512_srai_epi16(_mm512_slli_epi16(wide, 8), 1);
    const __m512i half = _mm512_and_si512(moved, _mm512_set1_epi16((short)0xbfff));
    const __m512 factor = _mm512_set1_ps(256.0f);
    return (vec){_mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), factor),
                 _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), factor)};
}

static inline void load_fp8(const uint8_t *codes, vec *x, vec *y)
{
    *x = floats_of_fp8(codes);
    *y = floats_of_fp8(codes + LANES);
}

#include "body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
