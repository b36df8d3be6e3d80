/* reference.h - the arithmetic of collectives, one element at a time, by the rules of codec.h and
 * plan.h and with none of their code: 16-bit floats through double, integers in 64 bits.
 */
#ifndef RINGCOMM_TEST_REFERENCE_H
#define RINGCOMM_TEST_REFERENCE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/include/ringcomm.h"

/* ---- random numbers ---- */

static inline uint64_t draw(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * 2685821657736338717u;
}

/* 0 .. bound-1 */
static inline uint64_t draw_below(uint64_t *state, uint64_t bound)
{
    return (draw(state) >> 16) % bound;
}

/* ---- 16-bit floats ---- */

typedef struct half_format {
    int fraction_bits, least_exponent, exponent_ones;
} half_format;

static const half_format half_bf16 = {7, -126, 255}, half_fp16 = {10, -14, 31};

static inline double half_value(const half_format *f, uint16_t bits)
{
    int exponent = (bits & 0x7fff) >> f->fraction_bits;
    int fraction = bits & ((1 << f->fraction_bits) - 1);
    double value;
    if (exponent == f->exponent_ones)
        value = fraction ? NAN : INFINITY;
    else if (exponent == 0)
        value = ldexp(fraction, f->least_exponent - f->fraction_bits);
    else
        value = ldexp(fraction + (1 << f->fraction_bits),
                      f->least_exponent + exponent - 1 - f->fraction_bits);
    return bits & 0x8000 ? -value : value;
}

/* Round to nearest even; every NaN becomes the quiet one. */
static inline uint16_t half_bits(const half_format *f, double x)
{
    if (isnan(x))
        return (uint16_t)((f->exponent_ones << f->fraction_bits) | 1 << (f->fraction_bits - 1));
    int sign = signbit(x) ? 0x8000 : 0, infinity = f->exponent_ones << f->fraction_bits;
    double size = fabs(x);
    if (isinf(size))
        return (uint16_t)(sign | infinity);
    int exponent = size > 0 ? ilogb(size) : f->least_exponent;
    if (exponent < f->least_exponent)
        exponent = f->least_exponent;
    if (exponent - f->least_exponent + 1 >= f->exponent_ones)
        return (uint16_t)(sign | infinity);
    long units = lrint(ldexp(size, f->fraction_bits - exponent));
    return (uint16_t)(sign |
                      (int)(((long)(exponent - f->least_exponent) << f->fraction_bits) + units));
}

/* ---- one element ---- */

static inline size_t dtype_bytes(rc_dtype dtype)
{
    static const size_t bytes[RC_DTYPE_COUNT] = {2, 2, 4, 8, 1, 1, 4, 8};
    return bytes[dtype];
}

static inline float float_op(rc_op op, float a, float b)
{
    switch (op) {
    case RC_MIN: return a < b ? a : b;
    case RC_MAX: return a > b ? a : b;
    case RC_PROD: return a * b;
    default: return a + b;
    }
}

static inline double double_op(rc_op op, double a, double b)
{
    switch (op) {
    case RC_MIN: return a < b ? a : b;
    case RC_MAX: return a > b ? a : b;
    case RC_PROD: return a * b;
    default: return a + b;
    }
}

static inline int64_t integer_op(rc_op op, int64_t a, int64_t b)
{
    switch (op) {
    case RC_MIN: return a < b ? a : b;
    case RC_MAX: return a > b ? a : b;
    case RC_PROD: return (int64_t)((uint64_t)a * (uint64_t)b);
    default: return (int64_t)((uint64_t)a + (uint64_t)b);
    }
}

static inline int64_t load_integer(rc_dtype dtype, const void *at)
{
    switch (dtype) {
    case RC_I8: return *(const int8_t *)at;
    case RC_U8: return *(const uint8_t *)at;
    case RC_I32: return *(const int32_t *)at;
    default: return *(const int64_t *)at;
    }
}

/* Wraps. */
static inline void store_integer(rc_dtype dtype, void *at, int64_t value)
{
    memcpy(at, &value, dtype_bytes(dtype)); /* little-endian */
}

/* The format on the wire; NULL if the wire holds the tensor's own bits. */
static inline const half_format *wire_half(rc_dtype dtype, rc_codec codec)
{
    if (codec == RC_CODEC_BF16 || (codec == RC_CODEC_NONE && dtype == RC_BF16))
        return &half_bf16;
    if (codec == RC_CODEC_FP16 || (codec == RC_CODEC_NONE && dtype == RC_F16))
        return &half_fp16;
    return NULL;
}

/* An element of a float tensor as f32. */
static inline float as_float(rc_dtype dtype, const void *at)
{
    switch (dtype) {
    case RC_F16: return (float)half_value(&half_fp16, *(const uint16_t *)at);
    case RC_BF16: return (float)half_value(&half_bf16, *(const uint16_t *)at);
    case RC_F32: return *(const float *)at;
    default: return (float)*(const double *)at;
    }
}

/* ---- hops ---- */

typedef struct arithmetic {
    rc_dtype dtype;
    rc_op op;
    rc_codec codec;
    int world_size;
} arithmetic;

static inline size_t wire_bytes_of(const arithmetic *a)
{
    return wire_half(a->dtype, a->codec) != NULL ? 2 : dtype_bytes(a->dtype);
}

/* fp16 is scaled before the first encoding, so that its range suffices. */
static inline float scale_first(const arithmetic *a)
{
    return a->op == RC_AVG && wire_half(a->dtype, a->codec) == &half_fp16
               ? (float)(1.0 / a->world_size)
               : 1.0F;
}

static inline float scale_last(const arithmetic *a)
{
    return a->op == RC_AVG && wire_half(a->dtype, a->codec) == &half_bf16
               ? (float)(1.0 / a->world_size)
               : 1.0F;
}

/* The first hop's wire element. */
static inline void ref_encode(const arithmetic *a, void *wire, const void *src)
{
    const half_format *half = wire_half(a->dtype, a->codec);
    if (half == NULL)
        memcpy(wire, src, dtype_bytes(a->dtype));
    else
        *(uint16_t *)wire = half_bits(half, (double)(as_float(a->dtype, src) * scale_first(a)));
}

static inline void ref_reduce_plain(const arithmetic *a, void *wire, const void *src, int last)
{
    int divide = last && a->op == RC_AVG;
    if (a->dtype == RC_F32) {
        float sum = float_op(a->op, *(float *)wire, *(const float *)src);
        *(float *)wire = divide ? sum * (float)(1.0 / a->world_size) : sum;
    } else if (a->dtype == RC_F64) {
        double sum = double_op(a->op, *(double *)wire, *(const double *)src);
        *(double *)wire = divide ? sum * (1.0 / a->world_size) : sum;
    } else {
        int64_t sum = integer_op(a->op, load_integer(a->dtype, wire), load_integer(a->dtype, src));
        store_integer(a->dtype, wire, sum);
        if (divide)
            store_integer(a->dtype, wire, load_integer(a->dtype, wire) / a->world_size);
    }
}

/* wire = wire op src; last: at the owner. */
static inline void ref_reduce(const arithmetic *a, void *wire, const void *src, int last)
{
    const half_format *half = wire_half(a->dtype, a->codec);
    if (half == NULL) {
        ref_reduce_plain(a, wire, src, last);
        return;
    }
    uint16_t mine;
    ref_encode(a, &mine, src);
    float sum =
        float_op(a->op, (float)half_value(half, *(uint16_t *)wire), (float)half_value(half, mine));
    if (last)
        sum = sum * scale_last(a);
    *(uint16_t *)wire = half_bits(half, (double)sum);
}

/* first = first op second, both as they travel. */
static inline void ref_combine(const arithmetic *a, void *first, const void *second, int last)
{
    const half_format *half = wire_half(a->dtype, a->codec);
    if (half == NULL) {
        ref_reduce_plain(a, first, second, last);
        return;
    }
    float sum = float_op(a->op, (float)half_value(half, *(uint16_t *)first),
                         (float)half_value(half, *(const uint16_t *)second));
    if (last)
        sum = sum * scale_last(a);
    *(uint16_t *)first = half_bits(half, (double)sum);
}

/* dst = what the wire element means. */
static inline void ref_store(const arithmetic *a, void *dst, const void *wire)
{
    const half_format *half = wire_half(a->dtype, a->codec);
    if (half == NULL || dtype_bytes(a->dtype) == 2)
        memcpy(dst, wire, dtype_bytes(a->dtype));
    else if (a->dtype == RC_F32)
        *(float *)dst = (float)half_value(half, *(const uint16_t *)wire);
    else
        *(double *)dst = half_value(half, *(const uint16_t *)wire);
}

/* All ranks' elements in order of rank. */
static inline void ref_join(const arithmetic *a, void *dst, const void *const *elements)
{
    const half_format *half = wire_half(a->dtype, a->codec);
    uint64_t wire = 0;
    if (half == NULL) {
        memcpy(&wire, elements[0], dtype_bytes(a->dtype));
        for (int rank = 1; rank < a->world_size; rank++)
            ref_reduce_plain(a, &wire, elements[rank], rank == a->world_size - 1);
        memcpy(dst, &wire, dtype_bytes(a->dtype));
        return;
    }
    float sum = 0.0F;
    for (int rank = 0; rank < a->world_size; rank++) {
        ref_encode(a, &wire, elements[rank]);
        float x = (float)half_value(half, (uint16_t)wire);
        sum = rank == 0 ? x : float_op(a->op, sum, x);
    }
    sum = sum * scale_last(a);
    if (isnan(sum))
        sum = NAN;
    wire = half_bits(half, (double)sum);
    ref_store(a, dst, &wire);
}

/* ---- operands ---- */

/* n elements of ordinary size; integers of any size. No NaN, whose payloads are unspecified. */
static inline void fill_random(void *data, rc_dtype dtype, size_t n, uint64_t *state)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = draw(state);
        double ordinary = ldexp((double)(int64_t)bits, -62 - (int)draw_below(state, 12));
        switch (dtype) {
        case RC_F16: ((uint16_t *)data)[i] = half_bits(&half_fp16, ordinary); break;
        case RC_BF16: ((uint16_t *)data)[i] = half_bits(&half_bf16, ordinary); break;
        case RC_F32: ((float *)data)[i] = (float)ordinary; break;
        case RC_F64: ((double *)data)[i] = ordinary; break;
        default: memcpy((char *)data + i * dtype_bytes(dtype), &bits, dtype_bytes(dtype));
        }
    }
}

#endif
