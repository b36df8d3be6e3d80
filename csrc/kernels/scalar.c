/* scalar.c - the kernel set of every machine, and the reference of all others: plain C, one element
 * at a time, no 16-bit float type of the compiler's.
 */
#include <float.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "f32 arithmetic must round to f32 at every step (on 32-bit x86: -msse2 -mfpmath=sse)"
#endif

#define SET kernels_scalar
#define SET_NAME "scalar"

enum { LANES = 1 };
typedef float vec;

static int supported(void)
{
    return 1;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline vec vec_set(float value)
{
    return value;
}

static inline vec vec_mul(vec x, vec y)
{
    return x * y;
}

static inline vec vec_add(vec x, vec y)
{
    return x + y;
}

static inline vec vec_load(const float *src)
{
    return *src;
}

static inline void vec_store(float *dst, vec x)
{
    *dst = x;
}

static inline vec load_bf16(const uint16_t *src)
{
    return float_of((uint32_t)*src << 16);
}

/* Half of the last kept bit is added, less one unless that bit is odd: nearest, ties to even. A
 * carry runs into the exponent, and from the largest exponent to infinity, as it should. */
static inline void store_bf16(uint16_t *dst, vec x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *dst = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* All three cases are computed and one is picked, so that the loop has no branch. A signalling NaN
 * becomes a quiet one, as the conversion instructions make it. */
static inline vec load_fp16(const uint16_t *src)
{
    const uint32_t sign = (uint32_t)(*src & 0x8000) << 16;
    const uint32_t rest = *src & 0x7fff;
    const uint32_t subnormal = bits_of((float)(int32_t)rest * 0x1p-24f);
    const uint32_t normal = (rest << 13) + (112u << 23);
    const uint32_t special = (rest << 13) | 255u << 23 | (rest > 0x7c00 ? 1u << 22 : 0);
    return float_of(sign | (rest < 0x400 ? subnormal : rest < 0x7c00 ? normal : special));
}

/* Subnormal results are multiples of 2^-24, which is the last bit of a float in [0.5, 1): adding
 * 0.5 rounds to it. Others are rounded as bf16 is, 65520 and more being infinity. */
static inline void store_fp16(uint16_t *dst, vec x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t rest = bits & 0x7fffffff;
    const uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    const uint32_t finite = rest < 113u << 23 ? subnormal : normal;
    const uint32_t value = sign | (rest < 0x477ff000 ? finite : 0x7c00);
    *dst = (uint16_t)(rest > 0x7f800000 ? 0x7e00 : value);
}

#include "body.h"
