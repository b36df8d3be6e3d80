/* block_reference.h - the formats whose elements share a scale, written from their formulas: every
 * step in double, rounded to f32 or bf16 at its end, one element at a time, each code found by
 * looking through the numbers that the format has.
 *
 * Rounding from double to f32 is right for the result of one operation on floats, since 53 bits are
 * more than twice 24 and two.
 */
#ifndef RINGCOMM_TEST_BLOCK_REFERENCE_H
#define RINGCOMM_TEST_BLOCK_REFERENCE_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "operands.h"

enum format { INT8, INT4, ONEBIT, FP8, FORMATS };

static const char *const format_names[FORMATS] = {"int8", "int4", "onebit", "fp8"};
static const size_t block_of[FORMATS] = {256, 64, 256, 256};
static const size_t bytes_of[FORMATS] = {256, 32, 32, 256};
static const double limit_of[FORMATS] = {127, 7, 1, 448};

static inline const kernel_block *format_of(const kernel_set *set, enum format format)
{
    const kernel_block *all[FORMATS] = {&set->int8, &set->int4, &set->onebit, &set->fp8};
    return all[format];
}

/* Bytes of the codes of n elements. */
static inline size_t codes_size(enum format format, size_t n)
{
    return format == INT8 || format == FP8 ? n : (n + block_of[format] - 1) / block_of[format] * 32;
}

static inline size_t scales_count(enum format format, size_t n)
{
    return (n + block_of[format] - 1) / block_of[format];
}

static inline float canonical_nan(void)
{
    return float_of(0x7fc00000);
}

static inline double bf16_value(uint16_t bits)
{
    return (double)float_of((uint32_t)bits << 16);
}

/* ---- numbers of a format ---- */

/* 480 for the code that e4m3 has no number for. */
static inline double e4m3_value(int code)
{
    const int exponent = code >> 3 & 15;
    const int fraction = code & 7;
    const double size = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    return code & 0x80 ? -size : size;
}

/* Nearest number of e4m3, of two the one with the even code. */
static inline int e4m3_code(double x)
{
    const double size = fabs(x);
    int best = 0;
    for (int code = 1; code < 0x7f && e4m3_value(code - 1) <= size; code++) {
        const double nearer = fabs(e4m3_value(code) - size) - fabs(e4m3_value(best) - size);
        if (nearer < 0 || (nearer == 0 && code % 2 == 0))
            best = code;
    }
    return best | (signbit(x) ? 0x80 : 0);
}

/* The number that element i of a block has, before it is scaled; onebit: 1 or -1. */
static inline double number_at(enum format format, const uint8_t *codes, size_t i)
{
    int half;
    switch (format) {
    case INT8: return codes[i] < 128 ? codes[i] : codes[i] - 256;
    case INT4:
        half = i < 32 ? codes[i] % 16 : codes[i - 32] / 16;
        return half < 8 ? half : half - 16;
    case ONEBIT: return codes[i / 8] >> (i % 8) & 1 ? 1 : -1;
    default: return e4m3_value(codes[i]);
    }
}

/* D. A zero block of onebit has no -0. */
static inline float d_of(enum format format, double number, float s)
{
    if (format == ONEBIT && s == 0.0f)
        return number > 0 ? s : 0.0f;
    return (float)(number * (double)s);
}

static inline void put_code(enum format format, uint8_t *codes, size_t i, float c, float x)
{
    const int whole = (int)nearbyint((double)x);
    switch (format) {
    case INT8: codes[i] = (uint8_t)whole; break;
    case INT4: codes[i % 32] |= (uint8_t)((whole & 15) << (i < 32 ? 0 : 4)); break;
    case ONEBIT: codes[i / 8] |= (uint8_t)((c >= 0) << i % 8); break;
    default: codes[i] = (uint8_t)e4m3_code((double)x);
    }
}

/* ---- scales ---- */

/* The smallest bf16 not below x >= 0, found from its neighbours. */
static inline double bf16_above(double x)
{
    uint16_t bits = (uint16_t)(bits_of((float)x) >> 16);
    while (bits > 0 && bf16_value(bits) >= x)
        bits--;
    while (bf16_value(bits) < x)
        bits++;
    return bf16_value(bits);
}

static inline double bf16_nearest(double x)
{
    const uint16_t low = (uint16_t)(bits_of((float)x) >> 16);
    const double below = x - bf16_value(low);
    const double above = bf16_value((uint16_t)(low + 1)) - x;
    return bf16_value(
        (uint16_t)(below < above || (below == above && low % 2 == 0) ? low : low + 1));
}

static inline float scale_by_top(const float *c, size_t n, double limit)
{
    double top = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(c[i]))
            return canonical_nan();
        top = fabs((double)c[i]) > top ? fabs((double)c[i]) : top;
    }
    const double s = bf16_above((double)(float)(top / limit));
    if (s < (double)FLT_MIN)
        return 0.0f;
    return isfinite((float)(s * limit)) ? (float)s : canonical_nan();
}

static inline float sum_of_lanes(const float *x, size_t n)
{
    float lanes[32] = {0};
    for (size_t i = 0; i < n; i++)
        lanes[i % 32] = (float)((double)lanes[i % 32] + (double)x[i]);
    for (size_t step = 16; step > 0; step /= 2)
        for (size_t i = 0; i < step; i++)
            lanes[i] = (float)((double)lanes[i] + (double)lanes[i + step]);
    return lanes[0];
}

static inline float scale_by_mean(const float *c, size_t n)
{
    float squares[256], sizes[256];
    for (size_t i = 0; i < n; i++) {
        squares[i] = (float)((double)c[i] * (double)c[i]);
        sizes[i] = fabsf(c[i]);
    }
    const float square = sum_of_lanes(squares, n);
    if (!isfinite(square))
        return canonical_nan();
    const float root = (float)sqrt((double)(float)((double)square / (double)n));
    const float size = (float)((double)sum_of_lanes(sizes, n) / (double)n);
    const float mean = (float)(1.75 * (double)size);
    const double s = bf16_nearest((double)(root < mean ? root : mean));
    return s < (double)FLT_MIN ? 0.0f : (float)s;
}

/* ---- whole tensors ---- */

/* codes must be zero. Returns 1 if a block was poisoned. */
static inline int encode_reference(enum format format, uint16_t *scales, uint8_t *codes,
                                   float *left, const float *c, size_t n)
{
    int poisoned = 0;
    for (size_t at = 0; at < n; at += block_of[format], codes += bytes_of[format]) {
        const size_t count = n - at < block_of[format] ? n - at : block_of[format];
        const float s = format == ONEBIT ? scale_by_mean(c + at, count)
                                         : scale_by_top(c + at, count, limit_of[format]);
        const float inverse = (float)(1.0 / (double)s);
        *scales++ = (uint16_t)(bits_of(s) >> 16);
        poisoned |= isnan(s);
        for (size_t i = 0; i < count; i++) {
            const float x = (float)((double)c[at + i] * (double)inverse);
            if (s > 0 || (s == 0 && format == ONEBIT))
                put_code(format, codes, i, c[at + i], x);
            const float d = isnan(s) ? 0.0f : d_of(format, number_at(format, codes, i), s);
            left[at + i] = isnan(s) ? s : (float)((double)c[at + i] - (double)d);
        }
    }
    return poisoned;
}

/* D, NaN where the scale is not finite. Returns 1 if one was not. */
static inline int decode_reference(enum format format, float *dst, const uint16_t *scales,
                                   const uint8_t *codes, size_t n)
{
    int poisoned = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t block = i / block_of[format];
        const float s = (float)bf16_value(scales[block]);
        const double number =
            number_at(format, codes + block * bytes_of[format], i % block_of[format]);
        dst[i] = isfinite(s) ? d_of(format, number, s) : canonical_nan();
        poisoned |= !isfinite(s);
    }
    return poisoned;
}

#endif
