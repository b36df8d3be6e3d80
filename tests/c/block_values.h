/* block_values.h - the formats of test_block*.c, and the classes of values that they are given. */
#ifndef RINGCOMM_TEST_BLOCK_VALUES_H
#define RINGCOMM_TEST_BLOCK_VALUES_H

#include <math.h>
#include <stdint.h>

#include "../../csrc/kernels/kernels.h"
#include "operands.h"

/* ---- formats ---- */

enum format { INT8, INT4, ONEBIT, FP8, INT2, FORMATS };

static const char *const format_names[FORMATS] = {"int8", "int4", "onebit", "fp8", "int2"};
static const size_t block_of[FORMATS] = {256, 64, 256, 256, 64};
static const size_t bytes_of[FORMATS] = {256, 32, 32, 256, 16};
static const double limit_of[FORMATS] = {127, 7, 1, 448, 80};

static inline const kernel_block *format_of(const kernel_set *set, enum format format)
{
    return &set->block[RC_CODEC_INT8 + format];
}

/* Bytes of the codes of n elements. */
static inline size_t codes_size(enum format format, size_t n)
{
    size_t blocks = (n + block_of[format] - 1) / block_of[format];
    return bytes_of[format] == block_of[format] ? n : blocks * bytes_of[format];
}

static inline size_t scales_count(enum format format, size_t n)
{
    return (n + block_of[format] - 1) / block_of[format];
}

/* ---- values ---- */

enum values {
    ORDINARY,
    SPARSE,
    ZEROS,
    TINY,   /* subnormal, or with a scale that is or nearly is */
    SMALL,  /* with squares that are subnormal */
    LARGE,  /* up to the largest float, with sums of squares that overflow */
    ANY,    /* of all exponents */
    TIES,   /* halves of a power of two, the largest being the limit itself */
    EDGES,  /* the largest next to limit times a bf16 */
    BROKEN, /* a few infinities and NaNs */
    VALUES
};

static inline float random_float(int low, int high)
{
    const uint64_t bits = random_bits();
    const uint32_t exponent = (uint32_t)low + (uint32_t)(bits >> 32) % (uint32_t)(high - low + 1);
    return float_of(exponent << 23 | ((uint32_t)bits & 0x807fffff));
}

static inline float next_to(float x, int ulps)
{
    return float_of(bits_of(x) + (uint32_t)ulps);
}

static inline float value_of(enum values values, double limit)
{
    static const float broken[] = {INFINITY, -INFINITY, NAN};
    const unsigned pick = (unsigned)(random_bits() >> 40);
    const double sign = pick & 1 ? -1 : 1;
    switch (values) {
    case SPARSE: return pick % 10 ? 0.0f : random_float(120, 130);
    case ZEROS: return pick & 1 ? -0.0f : 0.0f;
    case TINY: return random_float(0, pick % 8 ? 6 : 12);
    case SMALL: return random_float(50, 70);
    case LARGE: return random_float(pick % 16 ? 180 : 250, pick % 16 ? 190 : 254);
    case ANY: return random_float(0, 254);
    case TIES:
        return (float)(sign * ((pick >> 1) % (2 * (unsigned)limit) / 2.0 + (pick % 64 == 0)));
    case BROKEN: return pick % 200 ? random_float(100, 130) : broken[pick / 200 % 3];
    default: return (float)((double)(int64_t)random_bits() * 0x1p-62);
    }
}

/* Blocks of one class each, unless it is BROKEN, whose blocks may be whole. */
static inline void fill_values(float *x, enum format format, enum values values, size_t n)
{
    const double limit = limit_of[format];
    for (size_t i = 0; i < n; i++)
        x[i] = value_of(values, limit);
    if (values == EDGES)
        for (size_t i = 0; i < n; i++) {
            const float s = float_of((uint32_t)(bits_of(random_float(60, 190)) & 0x7fff0000));
            const int at_top = i % block_of[format] == 0;
            x[i] = at_top ? next_to((float)limit * s, (int)(random_bits() >> 40) % 5 - 2) : 0.0f;
        }
}

#endif
