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

/* The rounding of scalar.c. */
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

/* The instruction keeps the payload of a NaN, so that one is replaced afterwards. */
static inline uint16x4_t round_fp16_4(float32x4_t x)
{
    const uint16x4_t number = vmovn_u32(vceqq_f32(x, x));
    return vbsl_u16(number, vreinterpret_u16_f16(vcvt_f16_f32(x)), vdup_n_u16(0x7e00));
}

static inline void store_fp16(uint16_t *dst, vec x)
{
    vst1q_u16(dst, vcombine_u16(round_fp16_4(x.low), round_fp16_4(x.high)));
}

#include "body.h"

#endif
