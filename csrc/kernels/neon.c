/* neon.c - the kernel set of 64-bit ARM, all of which has these instructions. Empty elsewhere.
 */
#ifdef __aarch64__

#include <arm_neon.h>
#include <stdint.h>

#define SET kernels_neon
#define SET_NAME "neon"

enum { LANES = 8 };
typedef struct vec {
    float32x4_t low, high;
} vec;

static int supported(void)
{
    return 1;
}

static inline vec vec_set(float value)
{
    return (vec){vdupq_n_f32(value), vdupq_n_f32(value)};
}

static inline vec vec_mul(vec x, vec y)
{
    return (vec){vmulq_f32(x.low, y.low), vmulq_f32(x.high, y.high)};
}

static inline vec vec_add(vec x, vec y)
{
    return (vec){vaddq_f32(x.low, y.low), vaddq_f32(x.high, y.high)};
}

static inline vec vec_load(const float *src)
{
    return (vec){vld1q_f32(src), vld1q_f32(src + 4)};
}

static inline void vec_store(float *dst, vec x)
{
    vst1q_f32(dst, x.low);
    vst1q_f32(dst + 4, x.high);
}

static inline vec load_bf16(const uint16_t *src)
{
    const uint16x8_t half = vld1q_u16(src);
    return (vec){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16)),
                 vreinterpretq_f32_u32(vshll_high_n_u16(half, 16))};
}

/* Rounds as scalar.c does. */
static inline uint16x4_t round_bf16_4(float32x4_t x)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t number = vceqq_f32(x, x);
    return vbsl_u16(vmovn_u32(number), vshrn_n_u32(sum, 16), vdup_n_u16(0x7fc0));
}

static inline void store_bf16(uint16_t *dst, vec x)
{
    vst1q_u16(dst, vcombine_u16(round_bf16_4(x.low), round_bf16_4(x.high)));
}

static inline vec load_fp16(const uint16_t *src)
{
    const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(src));
    return (vec){vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
}

/* Rounds to fp16. The instruction keeps the payload of a NaN, so NaNs are replaced afterwards. */
static inline uint16x4_t round_fp16_4(float32x4_t x)
{
    const uint16x4_t number = vmovn_u32(vceqq_f32(x, x));
    return vbsl_u16(number, vreinterpret_u16_f16(vcvt_f16_f32(x)), vdup_n_u16(0x7e00));
}

static inline void store_fp16(uint16_t *dst, vec x)
{
    vst1q_u16(dst, vcombine_u16(round_fp16_4(x.low), round_fp16_4(x.high)));
}

/* ---- for block.h ---- */

static inline vec vec_sub(vec x, vec y)
{
    return (vec){vsubq_f32(x.low, y.low), vsubq_f32(x.high, y.high)};
}

static inline vec vec_abs(vec x)
{
    return (vec){vabsq_f32(x.low), vabsq_f32(x.high)};
}

/* Stores as usual: cores of this architecture see by themselves that whole lines are written. */
static inline void vec_stream(float *dst, vec x)
{
    vec_store(dst, x);
}

static inline void vec_stream_end(void)
{
}

static inline float32x4_t top_4(float32x4_t top, float32x4_t x)
{
    return vreinterpretq_f32_u32(
        vmaxq_u32(vreinterpretq_u32_f32(top), vreinterpretq_u32_f32(vabsq_f32(x))));
}

static inline vec vec_top(vec top, vec x)
{
    return (vec){top_4(top.low, x.low), top_4(top.high, x.high)};
}

static inline uint32_t vec_top_of(vec top)
{
    return vmaxvq_u32(vreinterpretq_u32_f32(top_4(top.low, top.high)));
}

/* Returns the bit of each lane: lane i of a register stands for bit i. */
static inline uint32x4_t bit_of_lane(void)
{
    static const uint32_t bits[4] = {1, 2, 4, 8};
    return vld1q_u32(bits);
}

static inline uint32_t bits_4(uint32x4_t lanes)
{
    return vaddvq_u32(vandq_u32(lanes, bit_of_lane()));
}

static inline uint32_t vec_signs(vec x)
{
    return bits_4(vcgezq_f32(x.low)) | bits_4(vcgezq_f32(x.high)) << 4;
}

static inline uint32_t reaching_4(float32x4_t x, uint32_t least)
{
    const uint32x4_t size = vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fffffff));
    return vaddvq_u32(vandq_u32(vcgeq_u32(size, vdupq_n_u32(least)), bit_of_lane()));
}

static inline uint32_t vec_reaching(vec x, uint32_t least)
{
    return reaching_4(x.low, least) | reaching_4(x.high, least) << 4;
}

static inline vec vec_by_sign(vec x, vec plus, vec minus)
{
    return (vec){vbslq_f32(vcgezq_f32(x.low), plus.low, minus.low),
                 vbslq_f32(vcgezq_f32(x.high), plus.high, minus.high)};
}

static inline vec vec_by_bits(uint32_t bits, vec plus, vec minus)
{
    const uint32x4_t low = vtstq_u32(vdupq_n_u32(bits), bit_of_lane());
    const uint32x4_t high = vtstq_u32(vdupq_n_u32(bits >> 4), bit_of_lane());
    return (vec){vbslq_f32(low, plus.low, minus.low), vbslq_f32(high, plus.high, minus.high)};
}

/* Rounds each lane to a whole number, and returns the numbers as bytes. */
static inline int8x8_t round_int_8(vec *x)
{
    const int32x4_t low = vcvtnq_s32_f32(x->low), high = vcvtnq_s32_f32(x->high);
    *x = (vec){vcvtq_f32_s32(low), vcvtq_f32_s32(high)};
    return vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high)));
}

static inline vec floats_of_bytes(int8x8_t bytes)
{
    const int16x8_t wide = vmovl_s8(bytes);
    return (vec){vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}

static inline void round_int8(uint8_t *codes, vec *x, vec *y)
{
    vst1_s8((int8_t *)codes, round_int_8(x));
    vst1_s8((int8_t *)codes + LANES, round_int_8(y));
}

static inline void load_int8(const uint8_t *codes, vec *x, vec *y)
{
    *x = floats_of_bytes(vld1_s8((const int8_t *)codes));
    *y = floats_of_bytes(vld1_s8((const int8_t *)codes + LANES));
}

/* Rounds x and y to int4; y is shifted in above the low half of x. */
static inline void round_int4(uint8_t *codes, vec *x, vec *y)
{
    const int8x8_t low = round_int_8(x), high = round_int_8(y);
    vst1_s8((int8_t *)codes, vsli_n_s8(low, high, 4));
}

static inline void load_int4(const uint8_t *codes, vec *x, vec *y)
{
    const int8x8_t bytes = vld1_s8((const int8_t *)codes);
    *x = floats_of_bytes(vshr_n_s8(vshl_n_s8(bytes, 4), 4));
    *y = floats_of_bytes(vshr_n_s8(bytes, 4));
}

/* Rounds to e4m3 as avx2.c does. */
static inline float32x4_t round_fp8_4(float32x4_t x)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t leading = vandq_u32(bits, vdupq_n_u32(0x7f800000));
    const uint32x4_t floor = vmaxq_u32(leading, vdupq_n_u32(121 << 23));
    const uint32x4_t large = vaddq_u32(floor, vdupq_n_u32(20 << 23 | 1 << 22));
    const float32x4_t added = vreinterpretq_f32_u32(large);
    const float32x4_t number = vsubq_f32(vaddq_f32(x, added), added);
    return vbslq_f32(vdupq_n_u32(0x80000000), x, number);
}

/* Stores the codes of numbers: e4m3 is fp16 without its first exponent bit and its last fraction
 * bits, and 2^8 times as large.
 */
static inline void store_fp8(uint8_t *codes, vec number)
{
    const float32x4_t factor = vdupq_n_f32(0x1p-8f);
    const float16x4_t low = vcvt_f16_f32(vmulq_f32(number.low, factor));
    const uint16x8_t half =
        vreinterpretq_u16_f16(vcvt_high_f16_f32(low, vmulq_f32(number.high, factor)));
    const uint8x8_t sign = vand_u8(vshrn_n_u16(half, 8), vdup_n_u8(0x80));
    const uint8x8_t rest = vand_u8(vshrn_n_u16(half, 7), vdup_n_u8(0x7f));
    vst1_u8(codes, vorr_u8(rest, sign));
}

static inline void round_fp8(uint8_t *codes, vec *x, vec *y)
{
    *x = (vec){round_fp8_4(x->low), round_fp8_4(x->high)};
    *y = (vec){round_fp8_4(y->low), round_fp8_4(y->high)};
    store_fp8(codes, *x);
    store_fp8(codes + LANES, *y);
}

static inline vec floats_of_fp8(const uint8_t *codes)
{
    const int16x8_t wide = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(codes)));
    const int16x8_t moved = vshrq_n_s16(vshlq_n_s16(wide, 8), 1);
    const float16x8_t half = vreinterpretq_f16_s16(vandq_s16(moved, vdupq_n_s16((int16_t)0xbfff)));
    const float32x4_t factor = vdupq_n_f32(256.0f);
    return (vec){vmulq_f32(vcvt_f32_f16(vget_low_f16(half)), factor),
                 vmulq_f32(vcvt_high_f32_f16(half), factor)};
}

static inline void load_fp8(const uint8_t *codes, vec *x, vec *y)
{
    *x = floats_of_fp8(codes);
    *y = floats_of_fp8(codes + LANES);
}

#include "body.h"

#endif
