/* body.h - the bodies of every kernel set, and its table. A template: each set's file includes it
 * once, under its own instruction set, so that all names here are private to that file.
 *
 * The including file defines
 *   SET, SET_NAME       the table's identifier and its name as a string
 *   supported           static int (void)
 *   LANES, vec          a vector of LANES floats, and on it:
 *   vec_set             all lanes the same float
 *   vec_mul, vec_add    rounded in f32, one after the other
 *   vec_load, vec_store             LANES floats at any alignment
 *   load_bf16, store_bf16           LANES elements of 16 bits, converted from and to floats
 *   load_fp16, store_fp16
 * and, if in bf16 the order of lanes is not that of vec_load,
 *   BF16_LOAD_F32       vec_load in the order of load_bf16
 *   BF16_DECODE         (dst, src): converts LANES elements
 *
 * Reductions and scalings are plain loops for the compiler to vectorise. Those of the 16-bit
 * formats are spelled out in vectors (half.h): no compiler finds the conversions by itself.
 */
#ifndef RINGCOMM_KERNELS_BODY_H
#define RINGCOMM_KERNELS_BODY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

/* Tells the compiler that an element depends on no other element. It cannot know, since dst may be
 * one of the sources, and its own run-time check would send just that case down the slow path. */
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* ---- reductions ---- */

/* Defines one reduction of x and y. type is what both are read as: unsigned for integer sums and
 * products, whose low bits do not depend on the sign and which then wrap without undefined
 * behaviour. */
#define REDUCE(name, type, expr)                                                                   \
    static void name(void *dst, const void *a, const void *b, size_t n)                            \
    {                                                                                              \
        type *out = dst;                                                                           \
        const type *left = a;                                                                      \
        const type *right = b;                                                                     \
        INDEPENDENT                                                                                \
        for (size_t i = 0; i < n; i++) {                                                           \
            const type x = left[i];                                                                \
            const type y = right[i];                                                               \
            out[i] = (type)(expr);                                                                 \
        }                                                                                          \
    }

REDUCE(sum_f32, float, x + y)
REDUCE(prod_f32, float, (x * y))
REDUCE(sum_f64, double, x + y)
REDUCE(prod_f64, double, (x * y))
REDUCE(sum_8, uint8_t, x + y)
REDUCE(prod_8, uint8_t, (x * y))
REDUCE(sum_32, uint32_t, x + y)
REDUCE(prod_32, uint32_t, (x * y))
REDUCE(sum_64, uint64_t, x + y)
REDUCE(prod_64, uint64_t, (x * y))

/* Minimum and maximum. A NaN in a is taken by x != x, one in b because no comparison with it holds.
 * The bitwise or keeps the body free of branches. */
REDUCE(min_f32, float, ((x < y) | (x != x)) ? x : y)
REDUCE(max_f32, float, ((x > y) | (x != x)) ? x : y)
REDUCE(min_f64, double, ((x < y) | (x != x)) ? x : y)
REDUCE(max_f64, double, ((x > y) | (x != x)) ? x : y)
REDUCE(min_i8, int8_t, x < y ? x : y)
REDUCE(max_i8, int8_t, x > y ? x : y)
REDUCE(min_u8, uint8_t, x < y ? x : y)
REDUCE(max_u8, uint8_t, x > y ? x : y)
REDUCE(min_i32, int32_t, x < y ? x : y)
REDUCE(max_i32, int32_t, x > y ? x : y)
REDUCE(min_i64, int64_t, x < y ? x : y)
REDUCE(max_i64, int64_t, x > y ? x : y)

/* ---- scaling ---- */

/* Defines expr of x and factor, the latter converted once to factor_type: scale_ of elements,
 * average_ of sums of two, which are made as unsigned where type is an integer. */
#define SCALE(name, type, sum_type, factor_type, convert, expr)                                    \
    static void scale_##name(void *dst, const void *src, double by, size_t n)                      \
    {                                                                                              \
        type *out = dst;                                                                           \
        const type *in = src;                                                                      \
        const factor_type factor = (factor_type)(convert);                                         \
        INDEPENDENT                                                                                \
        for (size_t i = 0; i < n; i++) {                                                           \
            const type x = in[i];                                                                  \
            out[i] = (type)(expr);                                                                 \
        }                                                                                          \
    }                                                                                              \
    static void average_##name(void *dst, const void *a, const void *b, double by, size_t n)       \
    {                                                                                              \
        type *out = dst;                                                                           \
        const sum_type *left = a;                                                                  \
        const sum_type *right = b;                                                                 \
        const factor_type factor = (factor_type)(convert);                                         \
        INDEPENDENT                                                                                \
        for (size_t i = 0; i < n; i++) {                                                           \
            const type x = (type)(sum_type)(left[i] + right[i]);                                   \
            out[i] = (type)(expr);                                                                 \
        }                                                                                          \
    }

/* Scales. Integers narrower than 64 bits are divided as floats of twice their width or more, which
 * vector units can do. It is exact: a quotient that is not a whole number is at least 1/divisor
 * away from the next one, which is more than the rounding of the wider float can bridge; and a
 * divisor too large for that float exceeds every dividend, so that the quotient stays below 1. */
SCALE(f32, float, float, float, by, (x * factor))
SCALE(f64, double, double, double, by, (x * factor))
SCALE(i8, int8_t, uint8_t, float, (int64_t)by, (int32_t)((float)x / factor))
SCALE(u8, uint8_t, uint8_t, float, (int64_t)by, (int32_t)((float)x / factor))
SCALE(i32, int32_t, uint32_t, double, (int64_t)by, (int32_t)((double)x / factor))
SCALE(i64, int64_t, uint64_t, int64_t, by, x / factor)

/* ---- conversions ---- */

static void f64_to_f32(float *dst, const double *src, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; i++)
        dst[i] = (float)src[i];
}

static void f32_to_f64(double *dst, const float *src, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; i++)
        dst[i] = src[i];
}

static int has_nan(const float *x, size_t n)
{
    int found = 0;
    for (size_t i = 0; i < n; i++)
        found |= x[i] != x[i];
    return found;
}

/* ---- memory ---- */

/* Prefetches LANES floats 2 KiB behind x, whether there are any or not: a core waits for more lines
 * at a time than its own prefetcher asks for, and that one stops at pages. */
static inline void fetch_ahead(const float *x)
{
    enum { AHEAD = 2048, LINE = 64 };
    for (uintptr_t i = 0; LANES > 1 && i < LANES * sizeof *x; i += LINE)
        __builtin_prefetch((const void *)((uintptr_t)x + AHEAD + i));
}

/* ---- 16-bit floats ---- */

#ifndef BF16_LOAD_F32
#define BF16_LOAD_F32 vec_load
#define BF16_DECODE(dst, src) vec_store(dst, load_bf16(src))
#endif

#define HALF(name) bf16_##name
#define LOAD_F32 BF16_LOAD_F32
#define LOAD load_bf16
#define STORE store_bf16
#define DECODE BF16_DECODE
#include "half.h"

#define HALF(name) fp16_##name
#define LOAD_F32 vec_load
#define LOAD load_fp16
#define STORE store_fp16
#define DECODE(dst, src) vec_store(dst, load_fp16(src))
#include "half.h"

/* ---- blocks that share a scale ---- */

#include "block.h"

/* ---- a few elements ---- */

#include "sparse.h"

/* ---- the table ---- */

#define OPS(sum, min, max, prod) {[RC_SUM] = sum, [RC_MIN] = min, [RC_MAX] = max, [RC_PROD] = prod}

const kernel_set SET = {
    .name = SET_NAME,
    .supported = supported,
    .reduce =
        {
            [RC_F32] = OPS(sum_f32, min_f32, max_f32, prod_f32),
            [RC_F64] = OPS(sum_f64, min_f64, max_f64, prod_f64),
            [RC_I8] = OPS(sum_8, min_i8, max_i8, prod_8),
            [RC_U8] = OPS(sum_8, min_u8, max_u8, prod_8),
            [RC_I32] = OPS(sum_32, min_i32, max_i32, prod_32),
            [RC_I64] = OPS(sum_64, min_i64, max_i64, prod_64),
        },
    .scale =
        {
            [RC_F32] = scale_f32,
            [RC_F64] = scale_f64,
            [RC_I8] = scale_i8,
            [RC_U8] = scale_u8,
            [RC_I32] = scale_i32,
            [RC_I64] = scale_i64,
        },
    .average =
        {
            [RC_F32] = average_f32,
            [RC_F64] = average_f64,
            [RC_I8] = average_i8,
            [RC_U8] = average_u8,
            [RC_I32] = average_i32,
            [RC_I64] = average_i64,
        },
    .bf16 = {bf16_encode, bf16_decode, bf16_add, bf16_add_half},
    .fp16 = {fp16_encode, fp16_decode, fp16_add, fp16_add_half},
    .block =
        {
            [RC_CODEC_INT8] = {256, 256, int8_encode, int8_decode, int8_add},
            [RC_CODEC_INT4] = {64, 32, int4_encode, int4_decode, int4_add},
            [RC_CODEC_ONEBIT] = {256, 32, onebit_encode, onebit_decode, onebit_add},
            [RC_CODEC_FP8] = {256, 256, fp8_encode, fp8_decode, fp8_add},
            [RC_CODEC_INT2] = {64, 16, int2_encode, int2_decode, int2_add},
        },
    .sparse = {sparse_combine, sparse_count, sparse_pick, sparse_put, sparse_scores, sparse_sgd,
               sparse_adam},
    .f64_to_f32 = f64_to_f32,
    .f32_to_f64 = f32_to_f64,
    .has_nan = has_nan,
};

#endif
