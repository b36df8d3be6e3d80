/* kernels.cu - what a GPU does of a codec: it makes what travels out of a tensor, and the reverse.
 * Reductions stay on the host.
 *
 * Problem. A tensor that was packed here must have the very bits that a kernel set of
 * csrc/kernels would have given it, and no tool of a GPU's maker may be needed to build or to test.
 *
 * Design. One source without headers, in what C++ for CUDA and C have in common. tools/make_ptx.py
 * makes ringcomm/kernels.ptx of it, which a driver takes as it is; tests/cuda/emulate.c compiles it
 * as C, with threads that are emulated. Nothing here rounds by an instruction whose result a
 * processor may choose: 16-bit floats are rounded as integers, products are never fused with sums
 * (mul, add and sub below), quotients and roots are those of IEEE 754, subnormals are kept, and no
 * NaN that arithmetic has made is stored or looked at but for being one.
 *
 * Launches. Any grid, blocks of MOST_THREADS threads at most and a multiple of 32. Pointers need
 * the alignment of their element (wire: 2), and are read 16 bytes at a time where they have that of
 * 16. n may be 0. Whatever n, grid and block are, results are the same.
 *
 * 16-bit formats (F: bf16, fp16), as kernel_half:
 *   ringcomm_pack_F      (u16 *wire, const float *src, float pre, u64 n)      wire = E(src * pre)
 *   ringcomm_unpack_F    (float *dst, const u16 *wire, u64 n)                 dst = D(wire)
 *
 * Formats whose elements share a scale (F: int8, int4, onebit, fp8), as kernel_block:
 *   ringcomm_pack_F      (u8 *wire, float *left, const float *src, float pre, const float
 * *residual, u64 n, u64 segment, u64 stride, u32 *poisoned) c = src * pre + residual, wire = E(c),
 * left = c - D(wire); residual may be NULL (0), and so may left (not wanted); left may be residual
 * or src ringcomm_unpack_F    (float *dst, const u8 *wire, u64 n, u64 segment, u64 stride, u32
 * *poisoned) dst = D(wire) where the elements from k * segment on, segment of them or as many as
 * are left, have their payload (codec/quant.h) at wire + k * stride. segment is a multiple of 256,
 * stride is even. *poisoned becomes 1 if a block is poisoned, and is not touched else.
 *
 *   ringcomm_scale       (float *dst, const float *src, float factor, u64 n)  dst = src * factor;
 *                        dst may be src; a NaN made from numbers is the canonical one
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
enum format { INT8, INT4, ONEBIT, FP8 };

#define ALL_LANES 0xffffffffu
#define CANONICAL_NAN 0x7fc00000u
#define INFINITE 0x7f800000u
#define MAGNITUDE 0x7fffffffu
#define SMALLEST_NORMAL 1.17549435e-38f /* 2^-126 */

/* ---- arithmetic ---- */

DEVICE u32 bits_of(float x)
{
    return __float_as_uint(x);
}

DEVICE float float_of(u32 bits)
{
    return __uint_as_float(bits);
}

/* Each rounded: the compiler must not make one operation of two. */
DEVICE float mul(float x, float y)
{
    return __fmul_rn(x, y);
}

DEVICE float add(float x, float y)
{
    return __fadd_rn(x, y);
}

DEVICE float sub(float x, float y)
{
    return __fsub_rn(x, y);
}

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

DEVICE u32 to_half(enum half format, float x)
{
    return format == BF16 ? to_bf16(x) : to_fp16(x);
}

DEVICE float from_half(enum half format, u32 half)
{
    return format == BF16 ? float_of(half << 16) : from_fp16(half);
}

/* ---- elementwise ---- */

DEVICE u64 this_thread(void)
{
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

DEVICE u64 all_threads(void)
{
    return (u64)gridDim.x * blockDim.x;
}

/* Four elements at a time, BATCH times under way; then, or where these are not aligned, one. */
DEVICE void pack_half(enum half format, u16 *wire, const float *src, float pre, u64 n)
{
    const u64 threads = all_threads();
    const u64 fours = is_aligned(src, 16) && is_aligned(wire, 8) ? n / 4 : 0;
    const float4 *in = (const float4 *)src;
    uint2 *out = (uint2 *)wire;
    for (u64 i = this_thread(); i < fours; i += BATCH * threads) {
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
    for (u64 i = 4 * fours + this_thread(); i < n; i += threads)
        wire[i] = (u16)to_half(format, mul(src[i], pre));
}

DEVICE void unpack_half(enum half format, float *dst, const u16 *wire, u64 n)
{
    const u64 threads = all_threads();
    const u64 fours = is_aligned(dst, 16) && is_aligned(wire, 8) ? n / 4 : 0;
    const uint2 *in = (const uint2 *)wire;
    float4 *out = (float4 *)dst;
    for (u64 i = this_thread(); i < fours; i += BATCH * threads) {
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
    for (u64 i = 4 * fours + this_thread(); i < n; i += threads)
        dst[i] = from_half(format, wire[i]);
}

KERNEL ringcomm_pack_bf16(u16 *wire, const float *src, float pre, u64 n)
{
    pack_half(BF16, wire, src, pre, n);
}

KERNEL ringcomm_pack_fp16(u16 *wire, const float *src, float pre, u64 n)
{
    pack_half(FP16, wire, src, pre, n);
}

KERNEL ringcomm_unpack_bf16(float *dst, const u16 *wire, u64 n)
{
    unpack_half(BF16, dst, wire, n);
}

KERNEL ringcomm_unpack_fp16(float *dst, const u16 *wire, u64 n)
{
    unpack_half(FP16, dst, wire, n);
}
