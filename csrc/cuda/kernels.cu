/* kernels.cu - codecs on a GPU: kernels that pack a tensor into its payload, and unpack it.
 *
 * Problem. A tensor that is packed here must have the same bits that a kernel set of csrc/kernels
 * would give it, and no tool of a GPU's maker may be needed to build or to test.
 *
 * Design. One source (with blocks.cuh, codecs that quantise) without the headers of others, in what
 * C++ for CUDA and C have in common. tools/make_ptx.py makes ringcomm/kernels.ptx of it, which a
 * driver takes as it is; tests/cuda/emulate.c compiles it as C. Nothing here rounds by an
 * instruction whose result a processor may choose: 16-bit floats are rounded as integers, products
 * are never fused with sums, quotients and roots are those of IEEE 754, subnormals are kept, and
 * the bits of a NaN that arithmetic has made are neither stored nor read.
 *
 * Launches. Any grid, blocks of whole warps and at most 256 threads: results are the same. Blocks
 * of 256, a few for each multiprocessor, keep memory busy. Pointers have the alignment of their
 * element (wire: 2), and better that of 16. n may be 0. For F = bf16, fp16, as kernel_half:
 *
 *   ringcomm_pack_F(u16 *wire, const float *src, float pre, u64 n)       wire = E(src * pre)
 *   ringcomm_unpack_F(float *dst, const u16 *wire, u64 n)                dst = D(wire)
 *
 * And:
 *
 *   ringcomm_scale(float *dst, const float *src, float factor, u64 n)    dst = src * factor
 *
 * where dst may be src. (A NaN that arithmetic makes of numbers is the canonical one, on every
 * GPU.)
 */

#ifndef KERNEL
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define DEVICE static __device__ __forceinline__
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { WARP = 32, BATCH = 4 };
enum half { BF16, FP16 };

#define ALL_LANES 0xffffffffu
#define INFINITE 0x7f800000u
#define MAGNITUDE 0x7fffffffu

/* ---- arithmetic ---- */

#define bits_of __float_as_uint
#define float_of __uint_as_float
#define THE_NAN float_of(0x7fc00000) /* the only NaN that is made here */

/* Operations that are rounded each: the compiler must not fuse two. */
#define mul __fmul_rn
#define add __fadd_rn
#define divided __fdiv_rn

DEVICE int is_finite(float x)
{
    return (bits_of(x) & INFINITE) != INFINITE;
}

DEVICE int is_aligned(const void *pointer, u32 bytes)
{
    return ((u64)pointer & (bytes - 1)) == 0;
}

/* ---- 16-bit floats: see csrc/kernels/scalar.c ---- */

DEVICE u32 to_bf16(float x)
{
    const u32 bits = bits_of(x);
    const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & MAGNITUDE) > INFINITE ? 0x7fc0 : rounded;
}

DEVICE u32 to_fp16(float x)
{
    const u32 bits = bits_of(x);
    const u32 sign = bits >> 16 & 0x8000;
    const u32 rest = bits & MAGNITUDE;
    const u32 subnormal = bits_of(add(float_of(rest), 0.5f)) - bits_of(0.5f);
    const u32 normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    const u32 finite = rest < 113u << 23 ? subnormal : normal;
    const u32 value = sign | (rest < 0x477ff000 ? finite : 0x7c00);
    return rest > INFINITE ? 0x7e00 : value;
}

DEVICE float from_fp16(u32 half)
{
    const u32 sign = (half & 0x8000) << 16;
    const u32 rest = half & 0x7fff;
    const u32 subnormal = bits_of(mul((float)(int)rest, 5.9604644775390625e-8f)); /* 2^-24 */
    const u32 normal = (rest << 13) + (112u << 23);
    const u32 special = (rest << 13) | 255u << 23 | (rest > 0x7c00 ? 1u << 22 : 0);
    return float_of(sign | (rest < 0x400 ? subnormal : rest < 0x7c00 ? normal : special));
}

#define to_half(format, x) ((format) == BF16 ? to_bf16(x) : to_fp16(x))
#define from_half(format, half) ((format) == BF16 ? float_of((half) << 16) : from_fp16(half))

/* ---- elementwise ---- */

#define THIS_THREAD ((u64)blockIdx.x * blockDim.x + threadIdx.x)
#define ALL_THREADS ((u64)gridDim.x * blockDim.x)

/* Packs four elements at a time, BATCH such loads in flight; then, or where pointers are not
 * aligned, one at a time. */
DEVICE void pack_half(enum half format, u16 *wire, const float *src, float pre, u64 n)
{
    const u64 threads = ALL_THREADS;
    const u64 fours = is_aligned(src, 16) && is_aligned(wire, 8) ? n / 4 : 0;
    const float4 *in = (const float4 *)src;
    uint2 *out = (uint2 *)wire;
    for (u64 i = THIS_THREAD; i < fours; i += BATCH * threads) {
        float4 x[BATCH];
#pragma unroll
        for (u32 k = 0; k < BATCH; k++)
            if (i + k * threads < fours)
                x[k] = in[i + k * threads];
#pragma unroll
        for (u32 k = 0; k < BATCH; k++)
            if (i + k * threads < fours) {
                uint2 y;
                y.x = to_half(format, mul(x[k].x, pre)) | to_half(format, mul(x[k].y, pre)) << 16;
                y.y = to_half(format, mul(x[k].z, pre)) | to_half(format, mul(x[k].w, pre)) << 16;
                out[i + k * threads] = y;
            }
    }
    for (u64 i = 4 * fours + THIS_THREAD; i < n; i += threads)
        wire[i] = (u16)to_half(format, mul(src[i], pre));
}

DEVICE void unpack_half(enum half format, float *dst, const u16 *wire, u64 n)
{
    const u64 threads = ALL_THREADS;
    const u64 fours = is_aligned(dst, 16) && is_aligned(wire, 8) ? n / 4 : 0;
    const uint2 *in = (const uint2 *)wire;
    float4 *out = (float4 *)dst;
    for (u64 i = THIS_THREAD; i < fours; i += BATCH * threads) {
        uint2 x[BATCH];
#pragma unroll
        for (u32 k = 0; k < BATCH; k++)
            if (i + k * threads < fours)
                x[k] = in[i + k * threads];
#pragma unroll
        for (u32 k = 0; k < BATCH; k++)
            if (i + k * threads < fours) {
                float4 y;
                y.x = from_half(format, x[k].x & 0xffff);
                y.y = from_half(format, x[k].x >> 16);
                y.z = from_half(format, x[k].y & 0xffff);
                y.w = from_half(format, x[k].y >> 16);
                out[i + k * threads] = y;
            }
    }
    for (u64 i = 4 * fours + THIS_THREAD; i < n; i += threads)
        dst[i] = from_half(format, (u32)wire[i]);
}

#define HALF_KERNELS(name, format)                                                                 \
    KERNEL ringcomm_pack_##name(u16 *wire, const float *src, float pre, u64 n)                     \
    {                                                                                              \
        pack_half(format, wire, src, pre, n);                                                      \
    }                                                                                              \
    KERNEL ringcomm_unpack_##name(float *dst, const u16 *wire, u64 n)                              \
    {                                                                                              \
        unpack_half(format, dst, wire, n);                                                         \
    }

HALF_KERNELS(bf16, BF16)
HALF_KERNELS(fp16, FP16)

/* Returns x * factor. A NaN keeps its payload, as in processors' products but not in a GPU's. */
DEVICE float scaled(float x, float factor)
{
    const float product = mul(x, factor);
    if (product == product)
        return product;
    return x == x ? THE_NAN : float_of(bits_of(x) | 0x400000);
}

KERNEL ringcomm_scale(float *dst, const float *src, float factor, u64 n)
{
    const u64 threads = ALL_THREADS;
    const u64 fours = is_aligned(dst, 16) && is_aligned(src, 16) ? n / 4 : 0;
    const float4 *in = (const float4 *)src;
    float4 *out = (float4 *)dst;
    for (u64 i = THIS_THREAD; i < fours; i += threads) {
        float4 x = in[i];
        x.x = scaled(x.x, factor);
        x.y = scaled(x.y, factor);
        x.z = scaled(x.z, factor);
        x.w = scaled(x.w, factor);
        out[i] = x;
    }
    for (u64 i = 4 * fours + THIS_THREAD; i < n; i += threads)
        dst[i] = scaled(src[i], factor);
}

#include "blocks.cuh"
