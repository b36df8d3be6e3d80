/* block.h - formats whose elements share a scale with their neighbours. A template: body.h includes
 * it once per set. Besides the names for body.h the including file defines
 *   vec_sub, vec_abs
 *   vec_stream          vec_store around the caches, where dst is a multiple of 16 bytes
 *   vec_stream_end      (void): after the last vec_stream, before another thread reads
 *   vec_top             (top, x): in each lane the larger of top's bits and of |x|'s
 *   vec_top_of          the largest of the lanes' bits, as uint32_t
 *   vec_reaching        (x, least): bit i is 1 where the bits of lane i's size are least, 1 or more
 *   vec_signs           bit i is 1 where lane i >= 0
 *   vec_by_sign         (x, plus, minus): lanes of plus where x >= 0, else of minus
 *   vec_by_bits         (bits, plus, minus): lanes of plus where the bit is 1, else of minus
 *   round_int8, round_int4, round_fp8   (codes, &x, &y): codes of x and y, which become the values
 *                                       of these codes
 *   load_int8, load_int4, load_fp8      (codes, &x, &y): numbers of codes
 * where int8 and fp8 have x in the first LANES codes and y in the next, and int4 has both in LANES
 * codes, x in the low halves.
 *
 * Codes of a block:
 *   int8     int8, -127 to 127
 *   int4     two's complement, -7 to 7; element j is the low half of byte j, j + 32 the high one
 *   onebit   element i is bit i % 8 of byte i / 8; 1: scale, 0: -scale
 *   fp8      e4m3, finite
 *
 * Arithmetic, in f32, each step rounded:
 *   int8, int4, fp8     s = largest |c| / limit (127, 7, 448), rounded up to bf16;
 *                       code = number nearest to c * (1 / s), ties to even; D = number * s
 *   onebit              s = min(root of the mean of c * c, 1.75 * mean of |c|), rounded to bf16;
 *                       code = c >= 0; D = s or -s
 * Both of int2 are in int2.h.
 *
 * With a scale made here the product is exact, so that |c - D| is half a step of int8, int4 and fp8
 * at most, but for the roundings of c * (1 / s). An s below the normal floats is made 0: all D are
 * then 0, and left is c. Sums are those of 32 lanes: lane i takes elements i, i + 32, ..., then
 * lanes are added to those 16, 8, 4, 2, 1 before them.
 */
#ifndef RINGCOMM_KERNELS_BLOCK_H
#define RINGCOMM_KERNELS_BLOCK_H

#include "bits.h"

enum { BLOCK_MAX = 256, BLOCK_NAN = 0x7fc0, GROUPS = KERNEL_LANES / LANES };

static inline int block_finite(float value)
{
    return (bits_of(value) & 0x7f800000) != 0x7f800000;
}

static inline uint16_t block_scale_store(float s)
{
    return (uint16_t)(bits_of(s) >> 16);
}

static inline float block_scale_load(uint16_t scale)
{
    return float_of((uint32_t)scale << 16);
}

/* Returns 1 if stores to dst go around the caches. */
static inline int block_streams(const float *dst, int far)
{
    return far && (uintptr_t)dst % 16 == 0;
}

static inline void block_put(float *dst, vec x, int stream)
{
    if (stream)
        vec_stream(dst, x);
    else
        vec_store(dst, x);
}

/* Returns LANES elements of c = src * pre + residual. */
static inline vec block_take(const float *src, vec pre, const float *residual)
{
    const vec product = vec_mul(vec_load(src), pre);
    fetch_ahead(src);
    if (!residual)
        return product;
    fetch_ahead(residual);
    return vec_add(product, vec_load(residual));
}

/* Makes c of a short block, and zeros after it. */
static void block_take_short(float c[BLOCK_MAX], const float *src, float pre, const float *residual,
                             size_t n)
{
    for (size_t i = 0; i < BLOCK_MAX; i++)
        c[i] = i >= n ? 0.0f : residual ? src[i] * pre + residual[i] : src[i] * pre;
}

static inline void block_fill(float *dst, float value, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = value;
}

/* Writes left for a block whose codes are 0: c, or NaN if it is poisoned. */
static void block_left_whole(float *left, const float *c, float s, size_t n)
{
    if (left && s == s)
        memcpy(left, c, n * sizeof *c);
    else if (left)
        block_fill(left, s, n);
}

/* ---- a scale by a mean, and a bit per element ---- */

/* Rounds a positive scale to bf16. */
static inline float block_scale_round(float s)
{
    const uint32_t bits = bits_of(s);
    return float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

/* Sums the lanes: each half is added to the one before it. */
static inline float block_sum(const vec *lanes)
{
    float sum[KERNEL_LANES];
    for (size_t i = 0; i < GROUPS; i++)
        vec_store(sum + i * LANES, lanes[i]);
    for (size_t half = KERNEL_LANES / 2; half; half /= 2)
        for (size_t i = 0; i < half; i++)
            sum[i] += sum[i + half];
    return sum[0];
}

/* Stores a bit for each of 32 elements, the first in the lowest bit of the first byte. */
static inline void store_bits(uint8_t *codes, uint32_t bits)
{
    for (int i = 0; i < 4; i++)
        codes[i] = (uint8_t)(bits >> 8 * i);
}

static inline uint32_t load_bits(const uint8_t *codes)
{
    return (uint32_t)codes[0] | (uint32_t)codes[1] << 8 | (uint32_t)codes[2] << 16 |
           (uint32_t)codes[3] << 24;
}

/* ---- a scale by the largest magnitude ---- */

/* Returns the scale. top: the bits of the largest |c|, in which infinity and NaN are larger than
 * all numbers. The quotient's upper half is rounded up, so that no c / s exceeds limit by more than
 * the roundings of f32. The scale is NaN if limit times it is not finite, as D might not be either.
 */
static inline float block_scale_by_top(uint32_t top, float limit)
{
    const float nan = float_of((uint32_t)BLOCK_NAN << 16);
    if (top >= 0x7f800000)
        return nan;
    const uint32_t quotient = bits_of(float_of(top) / limit);
    const float s = float_of((quotient + 0xffff) & 0xffff0000);
    if (s < 0x1p-126f)
        return 0.0f;
    return block_finite(s * limit) ? s : nan;
}

#define FORMAT(name) int8_##name
#define BLOCK 256
#define BYTES 256
#define LIMIT 127.0f
#define SPAN 256
#define STEP (2 * LANES)
#define GAP LANES
#define ROUND round_int8
#define LOAD load_int8
#include "scaled.h"

#define FORMAT(name) int4_##name
#define BLOCK 64
#define BYTES 32
#define LIMIT 7.0f
#define SPAN 32
#define STEP LANES
#define GAP 32
#define ROUND round_int4
#define LOAD load_int4
#include "scaled.h"

#define FORMAT(name) fp8_##name
#define BLOCK 256
#define BYTES 256
#define LIMIT 448.0f
#define SPAN 256
#define STEP (2 * LANES)
#define GAP LANES
#define ROUND round_fp8
#define LOAD load_fp8
#include "scaled.h"

#include "onebit.h"

#include "int2.h"

#endif
