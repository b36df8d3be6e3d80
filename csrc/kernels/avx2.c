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

/* Two registers of 16 floats together. vec_load and fp16 put floats 0 to 7 into low, 8 to 15 into
 * high. The unpack and pack instructions of bf16 work within half a register, so that there floats
 * 0 to 3 and 8 to 11 go into low, the others into high, and nothing has to be permuted. */
enum { LANES = 16 };
typedef struct vec {
    __m256 low, high;
} vec;

/* Returns 1 if this CPU has the instructions: F16C by cpuid, since older compilers do not know its
 * name in __builtin_cpu_supports, which also checks that the system saves the registers. */
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

/* Rounds as scalar.c does, but not NaN. */
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

/* Stores bf16. One comparison sees a NaN in either register; only then does each lane get one. */
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

/* Rounds to fp16. The instruction keeps the payload of a NaN, so NaNs are replaced first. */
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

/* ---- for block.h ---- */

static inline vec vec_sub(vec x, vec y)
{
    return (vec){_mm256_sub_ps(x.low, y.low), _mm256_sub_ps(x.high, y.high)};
}

static inline __m256 abs_8(__m256 x)
{
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}

static inline vec vec_abs(vec x)
{
    return (vec){abs_8(x.low), abs_8(x.high)};
}

/* Streams in quarters of a register: numpy aligns to 16 bytes. */
static inline void stream_8(float *dst, __m256 x)
{
    _mm_stream_ps(dst, _mm256_castps256_ps128(x));
    _mm_stream_ps(dst + 4, _mm256_extractf128_ps(x, 1));
}

static inline void vec_stream(float *dst, vec x)
{
    stream_8(dst, x.low);
    stream_8(dst + 8, x.high);
}

static inline void vec_stream_end(void)
{
    _mm_sfence();
}

static inline __m256 top_8(__m256 top, __m256 x)
{
    return _mm256_castsi256_ps(
        _mm256_max_epi32(_mm256_castps_si256(top), _mm256_castps_si256(abs_8(x))));
}

static inline vec vec_top(vec top, vec x)
{
    return (vec){top_8(top.low, x.low), top_8(top.high, x.high)};
}

static inline uint32_t vec_top_of(vec top)
{
    const __m256i eight = _mm256_castps_si256(top_8(top.low, top.high));
    const __m128i four =
        _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    const __m128i one = _mm_max_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)));
    return (uint32_t)_mm_cvtsi128_si32(one);
}

static inline __m256 is_plus_8(__m256 x)
{
    return _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ);
}

static inline uint32_t vec_signs(vec x)
{
    return (uint32_t)_mm256_movemask_ps(is_plus_8(x.low)) |
           (uint32_t)_mm256_movemask_ps(is_plus_8(x.high)) << 8;
}

static inline uint32_t reaching_8(__m256 x, uint32_t least)
{
    const __m256i size = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
    const __m256i large = _mm256_cmpgt_epi32(size, _mm256_set1_epi32((int)(least - 1)));
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(large));
}

static inline uint32_t vec_reaching(vec x, uint32_t least)
{
    return reaching_8(x.low, least) | reaching_8(x.high, least) << 8;
}

static inline vec vec_by_sign(vec x, vec plus, vec minus)
{
    return (vec){_mm256_blendv_ps(minus.low, plus.low, is_plus_8(x.low)),
                 _mm256_blendv_ps(minus.high, plus.high, is_plus_8(x.high))};
}

/* Selects by bits: each lane shifts its bit to where the blend looks. */
static inline vec vec_by_bits(uint32_t bits, vec plus, vec minus)
{
    const __m256i all = _mm256_set1_epi32((int)bits);
    const __m256i low = _mm256_sllv_epi32(all, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    const __m256i high = _mm256_sllv_epi32(all, _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16));
    return (vec){_mm256_blendv_ps(minus.low, plus.low, _mm256_castsi256_ps(low)),
                 _mm256_blendv_ps(minus.high, plus.high, _mm256_castsi256_ps(high))};
}

/* Rounds each lane to a whole number, and returns the numbers as integers. */
static inline __m256i round_int_8(__m256 *x)
{
    const __m256i number = _mm256_cvtps_epi32(*x);
    *x = _mm256_cvtepi32_ps(number);
    return number;
}

/* Stores 32 integers as bytes. The packs work within half a register, which leaves groups of four
 * in the order 0 2 4 6 1 3 5 7. */
static inline void store_bytes(uint8_t *codes, __m256i a, __m256i b, __m256i c, __m256i d)
{
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)codes, _mm256_permutevar8x32_epi32(packed, order));
}

static inline vec floats_of_bytes(__m128i bytes)
{
    const __m256i low = _mm256_cvtepi8_epi32(bytes);
    const __m256i high = _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8));
    return (vec){_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
}

static inline void round_int8(uint8_t *codes, vec *x, vec *y)
{
    const __m256i a = round_int_8(&x->low), b = round_int_8(&x->high);
    const __m256i c = round_int_8(&y->low), d = round_int_8(&y->high);
    store_bytes(codes, a, b, c, d);
}

static inline void load_int8(const uint8_t *codes, vec *x, vec *y)
{
    const __m128i *bytes = (const __m128i *)codes;
    *x = floats_of_bytes(_mm_loadu_si128(bytes));
    *y = floats_of_bytes(_mm_loadu_si128(bytes + 1));
}

static inline void round_int4(uint8_t *codes, vec *x, vec *y)
{
    const __m256i half = _mm256_set1_epi32(15);
    const __m256i a = _mm256_and_si256(round_int_8(&x->low), half);
    const __m256i b = _mm256_and_si256(round_int_8(&x->high), half);
    const __m256i c = _mm256_and_si256(round_int_8(&y->low), half);
    const __m256i d = _mm256_and_si256(round_int_8(&y->high), half);
    const __m256i low = _mm256_or_si256(a, _mm256_slli_epi32(c, 4));
    const __m256i high = _mm256_or_si256(b, _mm256_slli_epi32(d, 4));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm_storeu_si128((__m128i *)codes, _mm_packus_epi16(_mm256_castsi256_si128(packed),
                                                        _mm256_extracti128_si256(packed, 1)));
}

/* Converts numbers of four bits, two's complement in the low half of every byte. */
static inline vec floats_of_halves(__m128i halves)
{
    const __m128i eight = _mm_set1_epi8(8);
    const __m128i rest = _mm_and_si128(halves, _mm_set1_epi8(15));
    return floats_of_bytes(_mm_sub_epi8(_mm_xor_si128(rest, eight), eight));
}

static inline void load_int4(const uint8_t *codes, vec *x, vec *y)
{
    const __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
    *x = floats_of_halves(bytes);
    *y = floats_of_halves(_mm_srli_epi16(bytes, 4));
}

/* Rounds to e4m3. The last bit of a number of e4m3 is 2^-3 of its leading one, or of 2^-6 if that
 * is larger. It is also the last bit of 1.5 * 2^20 times that, so that adding this rounds to it. */
static inline __m256 round_fp8_8(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i leading = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
    const __m256i floor = _mm256_max_epi32(leading, _mm256_set1_epi32(121 << 23));
    const __m256i large = _mm256_add_epi32(floor, _mm256_set1_epi32(20 << 23 | 1 << 22));
    const __m256 added = _mm256_castsi256_ps(large);
    const __m256 number = _mm256_sub_ps(_mm256_add_ps(x, added), added);
    return _mm256_or_ps(number, _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
}

/* Returns the codes of numbers: e4m3 is fp16 without its first exponent bit and its last fraction
 * bits, and 2^8 times as large.
 */
static inline __m256i codes_of_fp8(vec number)
{
    const __m256 factor = _mm256_set1_ps(0x1p-8f);
    const __m128i low = _mm256_cvtps_ph(_mm256_mul_ps(number.low, factor), _MM_FROUND_NO_EXC);
    const __m128i high = _mm256_cvtps_ph(_mm256_mul_ps(number.high, factor), _MM_FROUND_NO_EXC);
    const __m256i half = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    const __m256i rest = _mm256_and_si256(_mm256_srli_epi16(half, 7), _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(half, 8), _mm256_set1_epi16(0x80));
    return _mm256_or_si256(rest, sign);
}

static inline void round_fp8(uint8_t *codes, vec *x, vec *y)
{
    *x = (vec){round_fp8_8(x->low), round_fp8_8(x->high)};
    *y = (vec){round_fp8_8(y->low), round_fp8_8(y->high)};
    const __m256i packed = _mm256_packus_epi16(codes_of_fp8(*x), codes_of_fp8(*y));
    _mm256_storeu_si256((__m256i *)codes, _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline vec floats_of_fp8(const uint8_t *codes)
{
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
    const __m256i moved = _mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1);
    const __m256i half = _mm256_and_si256(moved, _mm256_set1_epi16((short)0xbfff));
    const __m256 factor = _mm256_set1_ps(256.0f);
    return (vec){_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), factor),
                 _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), factor)};
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
