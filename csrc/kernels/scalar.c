/* scalar.c - the kernel set of every machine, and the reference of all others: plain C, one element
 * at a time, no 16-bit float type of the compiler's.
 */
#include <float.h>

#include "bits.h"

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

/* Rounds to bf16: half of the last kept bit is added, less one unless that bit is odd: nearest,
 * ties to even. A carry runs into the exponent, and from the largest exponent to infinity, as it
 * should. */
static inline void store_bf16(uint16_t *dst, vec x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *dst = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* Decodes fp16. All three cases are computed and one is picked, so that the loop has no branch. A
 * signalling NaN becomes a quiet one, as the conversion instructions make it. */
static inline vec load_fp16(const uint16_t *src)
{
    const uint32_t sign = (uint32_t)(*src & 0x8000) << 16;
    const uint32_t rest = *src & 0x7fff;
    const uint32_t subnormal = bits_of((float)(int32_t)rest * 0x1p-24f);
    const uint32_t normal = (rest << 13) + (112u << 23);
    const uint32_t special = (rest << 13) | 255u << 23 | (rest > 0x7c00 ? 1u << 22 : 0);
    return float_of(sign | (rest < 0x400 ? subnormal : rest < 0x7c00 ? normal : special));
}

/* Rounds to fp16. Subnormal results are multiples of 2^-24, which is the last bit of a float in
 * [0.5, 1): adding 0.5 rounds to it. Others are rounded as bf16 is, 65520 and more being infinity.
 */
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

/* ---- for block.h ---- */

static inline vec vec_sub(vec x, vec y)
{
    return x - y;
}

static inline vec vec_abs(vec x)
{
    return float_of(bits_of(x) & 0x7fffffff);
}

static inline void vec_stream(float *dst, vec x)
{
    *dst = x;
}

static inline void vec_stream_end(void)
{
}

static inline vec vec_top(vec top, vec x)
{
    const uint32_t size = bits_of(x) & 0x7fffffff;
    return float_of(size > bits_of(top) ? size : bits_of(top));
}

static inline uint32_t vec_top_of(vec top)
{
    return bits_of(top);
}

static inline uint32_t vec_signs(vec x)
{
    return x >= 0.0f;
}

static inline uint32_t vec_reaching(vec x, uint32_t least)
{
    return (bits_of(x) & 0x7fffffff) >= least;
}

/* Selects by a bit without a branch, which would be predicted wrong for every other element. */
static inline vec vec_by_bits(uint32_t bits, vec plus, vec minus)
{
    const uint32_t differ = bits_of(plus) ^ bits_of(minus);
    return float_of(bits_of(minus) ^ (differ & (0 - (bits & 1))));
}

static inline vec vec_by_sign(vec x, vec plus, vec minus)
{
    return vec_by_bits(vec_signs(x), plus, minus);
}

/* Rounds to an integer. Adding 1.5 * 2^23 leaves whole numbers only; the lowest bits of the sum are
 * two's complement. */
static inline int32_t round_int(float x)
{
    return (int32_t)(bits_of(x + 0x1.8p23f) - bits_of(0x1.8p23f));
}

static inline void round_int8(uint8_t *codes, vec *x, vec *y)
{
    const int32_t first = round_int(*x), second = round_int(*y);
    codes[0] = (uint8_t)first;
    codes[1] = (uint8_t)second;
    *x = (float)first;
    *y = (float)second;
}

static inline void load_int8(const uint8_t *codes, vec *x, vec *y)
{
    *x = (int8_t)codes[0];
    *y = (int8_t)codes[1];
}

static inline void round_int4(uint8_t *codes, vec *x, vec *y)
{
    const int32_t low = round_int(*x), high = round_int(*y);
    *codes = (uint8_t)((low & 15) | (high & 15) << 4);
    *x = (float)low;
    *y = (float)high;
}

static inline void load_int4(const uint8_t *codes, vec *x, vec *y)
{
    *x = (float)((*codes & 15) ^ 8) - 8.0f;
    *y = (float)((*codes >> 4) ^ 8) - 8.0f;
}

/* Rounds to e4m3. Below 2^-6, numbers are multiples of 2^-9, which is the last bit of a float from
 * 2^14 on. Others are rounded as bf16 is, to three bits after the first. */
static inline uint8_t round_fp8_1(vec *x)
{
    const uint32_t sign = bits_of(*x) & 0x80000000;
    const uint32_t rest = bits_of(*x) & 0x7fffffff;
    const float small = float_of(rest) + 0x1p14f;
    const uint32_t normal = (rest + 0x7ffff + (rest >> 20 & 1)) & 0xfff00000;
    const int is_small = rest < 121u << 23;
    const uint32_t code =
        is_small ? bits_of(small) - bits_of(0x1p14f) : (normal >> 20) - (120 << 3);
    *x = float_of(sign | (is_small ? bits_of(small - 0x1p14f) : normal));
    return (uint8_t)(sign >> 24 | code);
}

static inline void round_fp8(uint8_t *codes, vec *x, vec *y)
{
    codes[0] = round_fp8_1(x);
    codes[1] = round_fp8_1(y);
}

static inline vec load_fp8_1(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x80) << 24;
    const uint32_t rest = code & 0x7f;
    const uint32_t small = bits_of((float)(int32_t)rest * 0x1p-9f);
    return float_of(sign | (rest < 8 ? small : (rest << 20) + (120u << 23)));
}

static inline void load_fp8(const uint8_t *codes, vec *x, vec *y)
{
    *x = load_fp8_1(codes[0]);
    *y = load_fp8_1(codes[1]);
}

#include "body.h"
