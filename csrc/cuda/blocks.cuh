/* blocks.cuh - the codecs whose elements share scales (kernels/block.h, codec/codec.h). A part of
 * kernels.cu, whose definitions and rules hold here. A warp takes 256 elements at a time, the
 * largest block.
 *
 * For F = int8, int4, onebit, fp8, as kernel_block:
 *
 *   ringcomm_pack_F(u8 *wire, const float *src, u64 n, u64 segment, u64 stride)     wire = E(src)
 *   ringcomm_unpack_F(float *dst, const u8 *wire, u64 n, u64 segment, u64 stride)   dst = D(wire)
 *   ringcomm_add_F(float *dst, const u8 *wire, u64 apart, float post,
 *                  u64 n, u64 segment, u64 stride)   dst = (D(wire) + D(wire + apart)) * post
 *
 * The elements from k * segment on, segment of them or as many as are left, have their payload
 * (codec/codec.h) at wire + k * stride; segment is a multiple of 256, stride and apart of 2.
 *
 * Only two contributions are summed here: sums of more are encoded again, by the core on the host.
 */

enum format { INT8, INT4, ONEBIT, FP8 };

#define SMALLEST_NORMAL 1.17549435e-38f

/* ---- tiles: the elements that a warp takes at a time ---- */

enum { TILE = 256, SHARE = TILE / WARP };

/* Order of a tile's elements over lanes: the k-th of a lane is one of four in a row, and of four
 * behind those of all lanes; or every 32nd, whose sum is that of a lane of the kernel sets. */
enum order { IN_FOURS, IN_LANES };

DEVICE u32 element(enum order order, u32 lane, u32 k)
{
    return order == IN_FOURS ? k / 4 * 128 + lane * 4 + k % 4 : k * WARP + lane;
}

/* Loads a lane's elements of a tile; 0 beyond n. */
DEVICE void take(enum order order, float x[SHARE], const float *src, u32 lane, u32 n)
{
    if (order == IN_FOURS && n == TILE && is_aligned(src, 16)) {
        const float4 first = ((const float4 *)src)[lane];
        const float4 second = ((const float4 *)src)[lane + WARP];
        x[0] = first.x, x[1] = first.y, x[2] = first.z, x[3] = first.w;
        x[4] = second.x, x[5] = second.y, x[6] = second.z, x[7] = second.w;
        return;
    }
#pragma unroll
    for (u32 k = 0; k < SHARE; k++)
        x[k] = element(order, lane, k) < n ? src[element(order, lane, k)] : 0.0f;
}

/* Stores a lane's elements of a tile, which are IN_FOURS. */
DEVICE void put(float *dst, const float x[SHARE], u32 lane, u32 n)
{
    if (n == TILE && is_aligned(dst, 16)) {
        float4 first, second;
        first.x = x[0], first.y = x[1], first.z = x[2], first.w = x[3];
        second.x = x[4], second.y = x[5], second.z = x[6], second.w = x[7];
        ((float4 *)dst)[lane] = first;
        ((float4 *)dst)[lane + WARP] = second;
        return;
    }
#pragma unroll
    for (u32 k = 0; k < SHARE; k++)
        if (element(IN_FOURS, lane, k) < n)
            dst[element(IN_FOURS, lane, k)] = x[k];
}

DEVICE u32 block_of(enum format format)
{
    return format == INT4 ? 64 : 256;
}

/* Returns the bytes of the codes of a whole block. */
DEVICE u32 bytes_of(enum format format)
{
    return format == INT4 || format == ONEBIT ? 32 : 256;
}

typedef struct tile {
    u64 start; /* its first element in the tensor */
    u32 n;     /* elements */
    u16 *scales;
    u8 *codes; /* at a multiple of 2 bytes */
} tile;

DEVICE tile tile_at(enum format format, const u8 *wire, u64 number, u64 n, u64 segment, u64 stride)
{
    const u32 tiles = (u32)(segment / TILE);
    const u32 which = (u32)number / tiles;
    const u32 within = (u32)number % tiles;
    const u64 left = n - which * segment;
    const u64 length = left < segment ? left : segment;
    const u64 scales = (length + block_of(format) - 1) / block_of(format);
    u8 *payload = (u8 *)wire + which * stride;
    tile t;
    t.start = number * TILE;
    t.n = (u32)(length - (u64)within * TILE < TILE ? length - (u64)within * TILE : TILE);
    t.scales = (u16 *)payload + within * (TILE / block_of(format));
    t.codes = payload + 2 * scales + (u64)within * (TILE / block_of(format)) * bytes_of(format);
    return t;
}

/* Returns the tile of the same elements in another payload. */
DEVICE tile tile_beside(tile t, u64 apart)
{
    t.scales = (u16 *)((u8 *)t.scales + apart);
    t.codes += apart;
    return t;
}

/* Stores four bytes of codes, from at on, as far as they lie before end. */
DEVICE void put_codes(u8 *codes, u32 at, u32 end, u32 four)
{
    if (at + 4 <= end && is_aligned(codes, 4)) {
        *(u32 *)(codes + at) = four;
    } else if (at + 4 <= end) {
        *(u16 *)(codes + at) = (u16)four;
        *(u16 *)(codes + at + 2) = (u16)(four >> 16);
    } else {
        for (u32 i = at; i < end; i++)
            codes[i] = (u8)(four >> 8 * (i - at));
    }
}

DEVICE u32 take_codes(const u8 *codes, u32 at, u32 end)
{
    u32 four = 0;
    if (at + 4 <= end && is_aligned(codes, 4))
        return *(const u32 *)(codes + at);
    if (at + 4 <= end)
        return *(const u16 *)(codes + at) | (u32) * (const u16 *)(codes + at + 2) << 16;
    for (u32 i = at; i < end; i++)
        four |= (u32)codes[i] << 8 * (i - at);
    return four;
}

/* ---- a scale by the largest magnitude ---- */

/* Returns the largest size of so many lanes, a power of two. */
DEVICE u32 largest_of(u32 size, u32 lanes)
{
#pragma unroll
    for (u32 by = lanes / 2; by; by /= 2) {
        const u32 other = __shfl_xor_sync(ALL_LANES, size, (int)by);
        size = other > size ? other : size;
    }
    return size;
}

/* Returns the scale. top: the bits of the largest |c|. See block_scale_by_top of
 * csrc/kernels/block.h. */
DEVICE float scale_by_top(enum format format, u32 top)
{
    const float limit = format == INT8 ? 127.0f : format == INT4 ? 7.0f : 448.0f;
    const u32 quotient = bits_of(divided(float_of(top), limit));
    const float s = float_of((quotient + 0xffff) & 0xffff0000);
    if (top >= INFINITE || !is_finite(mul(s, limit)))
        return THE_NAN;
    return s < SMALLEST_NORMAL ? 0.0f : s;
}

/* Returns the code nearest to x. See round_int and round_fp8 of csrc/kernels/scalar.c. */
DEVICE u32 round_code(enum format format, float x)
{
    if (format == FP8) {
        const u32 sign = bits_of(x) & 0x80000000;
        const u32 rest = bits_of(x) & MAGNITUDE;
        const float small = add(float_of(rest), 16384.0f);
        const u32 normal = (rest + 0x7ffff + (rest >> 20 & 1)) & 0xfff00000;
        const int is_small = rest < 121u << 23;
        const u32 code =
            is_small ? bits_of(small) - bits_of(16384.0f) : (normal >> 20) - (120 << 3);
        return sign >> 24 | code;
    }
    const int q = (int)(bits_of(add(x, 12582912.0f)) - bits_of(12582912.0f)); /* 1.5 * 2^23 */
    return (u32)q & (format == INT8 ? 0xff : 0xf);
}

/* Returns the number of a code, which is in the lowest bits. */
DEVICE float number_of(enum format format, u32 code)
{
    if (format == INT8)
        return (float)(int)(((code & 0xff) ^ 0x80) - 0x80);
    if (format == INT4)
        return (float)(int)(((code & 0xf) ^ 8) - 8);
    const u32 rest = code & 0x7f;
    const u32 small = bits_of(mul((float)(int)rest, 0.001953125f)); /* 2^-9 */
    return float_of((code & 0x80) << 24 | (rest < 8 ? small : (rest << 20) + (120u << 23)));
}

/* Returns the codes of a lane's four elements, a byte each. */
DEVICE u32 pack_four(enum format format, const float *c, float s)
{
    const int usable = s > 0.0f;
    const float inverse = divided(1.0f, usable ? s : 1.0f);
    u32 codes = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        codes |= round_code(format, mul(c[k], inverse)) << 8 * k;
    return usable ? codes : 0;
}

/* Returns the block of a lane's first four elements (half 0) or its others. */
DEVICE u32 block_at(enum format format, u32 half, u32 lane)
{
    return format == INT4 ? 2 * half + lane / 16 : 0;
}

/* Returns the byte of the blocks at which a lane's int4 codes lie; half of the lanes have the high
 * halves. */
DEVICE u32 int4_byte(u32 block, u32 lane)
{
    return 32 * block + 4 * (lane % 8);
}

DEVICE void pack_scaled(enum format format, const tile *t, const float c[SHARE], u32 lane)
{
    u32 top[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        top[half] = 0;
        for (u32 k = 4 * half; k < 4 * half + 4; k++) {
            const u32 size = bits_of(c[k]) & MAGNITUDE;
            top[half] = size > top[half] ? size : top[half];
        }
    }
    if (format == INT4) {
        top[0] = largest_of(top[0], 16);
        top[1] = largest_of(top[1], 16);
    } else {
        top[0] = top[1] = largest_of(top[0] > top[1] ? top[0] : top[1], WARP);
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const float s = scale_by_top(format, top[half]);
        const u32 block = block_at(format, half, lane);
        u32 codes = pack_four(format, c + 4 * half, s);
        if (format == INT4)
            codes |= __shfl_xor_sync(ALL_LANES, codes, 8) << 4;
        if (format != INT4)
            put_codes(t->codes, 128 * half + 4 * lane, t->n, codes);
        else if (lane % 16 < 8 && block * 64 < t->n)
            put_codes(t->codes, int4_byte(block, lane), TILE / 2, codes);
        if (lane % (format == INT4 ? 16 : 32) == 0 && block * 64 < t->n)
            t->scales[block] = (u16)(bits_of(s) >> 16);
    }
}

DEVICE void unpack_scaled(enum format format, const tile *t, float x[SHARE], u32 lane)
{
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 block = block_at(format, half, lane);
        const int exists = block * 64 < t->n;
        const float s = float_of(exists ? (u32)t->scales[block] << 16 : 0);
        u32 codes = 0;
        if (format != INT4)
            codes = take_codes(t->codes, 128 * half + 4 * lane, t->n);
        else if (exists)
            codes = take_codes(t->codes, int4_byte(block, lane), TILE / 2) >> (lane & 8) / 2;
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            x[4 * half + k] = is_finite(s) ? mul(number_of(format, codes >> 8 * k), s) : THE_NAN;
    }
}

/* ---- a sign per element: see csrc/kernels/onebit.h ---- */

/* Sums x of all lanes: to each is added the lane half as many behind it, or before it, which is the
 * same. */
DEVICE float sum_of(float x)
{
#pragma unroll
    for (u32 by = WARP / 2; by; by /= 2)
        x = add(x, float_of(__shfl_xor_sync(ALL_LANES, bits_of(x), (int)by)));
    return x;
}

DEVICE float scale_by_mean(float squares, float sizes, float n)
{
    const float root = __fsqrt_rn(divided(squares, n));
    const float mean = mul(1.75f, divided(sizes, n));
    const u32 bits = bits_of(root < mean ? root : mean);
    const float s = float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
    if (!is_finite(squares))
        return THE_NAN;
    return s < SMALLEST_NORMAL ? 0.0f : s;
}

DEVICE void pack_onebit(const tile *t, const float c[SHARE], u32 lane)
{
    float squares = 0.0f, sizes = 0.0f;
#pragma unroll
    for (u32 k = 0; k < SHARE; k++) {
        squares = add(squares, mul(c[k], c[k]));
        sizes = add(sizes, float_of(bits_of(c[k]) & MAGNITUDE));
    }
    const float s = scale_by_mean(sum_of(squares), sum_of(sizes), (float)t->n);
    u32 own = 0; /* this lane's of the eight words of signs */
#pragma unroll
    for (u32 k = 0; k < SHARE; k++) {
        const int positive = c[k] >= 0.0f;
        const u32 signs =
            __ballot_sync(ALL_LANES, positive && s == s && element(IN_LANES, lane, k) < t->n);
        own = lane == k ? signs : own;
    }
    if (lane < SHARE)
        put_codes(t->codes, 4 * lane, 32, own);
    if (lane == 0)
        *t->scales = (u16)(bits_of(s) >> 16);
}

DEVICE void unpack_onebit(const tile *t, float x[SHARE], u32 lane)
{
    const float s = float_of((u32)*t->scales << 16);
    const float minus = s == 0.0f ? 0.0f : -s; /* a zero block has no -0 */
#pragma unroll
    for (u32 k = 0; k < SHARE; k++) {
        const u32 at = element(IN_FOURS, lane, k);
        const float d = t->codes[at / 8] >> at % 8 & 1 ? s : minus;
        x[k] = is_finite(s) ? d : THE_NAN;
    }
}

/* ---- all formats with scales ---- */

DEVICE void pack_blocks(enum format format, u8 *wire, const float *src, u64 n, u64 segment,
                        u64 stride)
{
    const enum order order = format == ONEBIT ? IN_LANES : IN_FOURS;
    const u32 lane = threadIdx.x % WARP;
    const u64 tiles = (n + TILE - 1) / TILE;
    for (u64 i = THIS_THREAD / WARP; i < tiles; i += ALL_THREADS / WARP) {
        const tile t = tile_at(format, wire, i, n, segment, stride);
        float c[SHARE];
        take(order, c, src + t.start, lane, t.n);
        if (format == ONEBIT)
            pack_onebit(&t, c, lane);
        else
            pack_scaled(format, &t, c, lane);
    }
}

DEVICE void unpack_tile(enum format format, const tile *t, float x[SHARE], u32 lane)
{
    if (format == ONEBIT)
        unpack_onebit(t, x, lane);
    else
        unpack_scaled(format, t, x, lane);
}

DEVICE void unpack_blocks(enum format format, float *dst, const u8 *wire, u64 n, u64 segment,
                          u64 stride)
{
    const u32 lane = threadIdx.x % WARP;
    const u64 tiles = (n + TILE - 1) / TILE;
    for (u64 i = THIS_THREAD / WARP; i < tiles; i += ALL_THREADS / WARP) {
        const tile t = tile_at(format, wire, i, n, segment, stride);
        float x[SHARE];
        unpack_tile(format, &t, x, lane);
        put(dst + t.start, x, lane, t.n);
    }
}

/* Joins two contributions as quant_join of csrc/codec/quant.c does. Values beyond n are no
 * elements, and may be anything. */
DEVICE void add_blocks(enum format format, float *dst, const u8 *wire, u64 apart, float post, u64 n,
                       u64 segment, u64 stride)
{
    const u32 lane = threadIdx.x % WARP;
    const u64 tiles = (n + TILE - 1) / TILE;
    for (u64 i = THIS_THREAD / WARP; i < tiles; i += ALL_THREADS / WARP) {
        const tile t = tile_at(format, wire, i, n, segment, stride);
        const tile other = tile_beside(t, apart);
        float x[SHARE], y[SHARE];
        unpack_tile(format, &t, x, lane);
        unpack_tile(format, &other, y, lane);
#pragma unroll
        for (u32 k = 0; k < SHARE; k++) {
            const float result = mul(add(x[k], y[k]), post);
            x[k] = result == result ? result : THE_NAN;
        }
        put(dst + t.start, x, lane, t.n);
    }
}

#define BLOCK_KERNELS(name, format)                                                                \
    KERNEL ringcomm_pack_##name(u8 *wire, const float *src, u64 n, u64 segment, u64 stride)        \
    {                                                                                              \
        pack_blocks(format, wire, src, n, segment, stride);                                        \
    }                                                                                              \
    KERNEL ringcomm_unpack_##name(float *dst, const u8 *wire, u64 n, u64 segment, u64 stride)      \
    {                                                                                              \
        unpack_blocks(format, dst, wire, n, segment, stride);                                      \
    }                                                                                              \
    KERNEL ringcomm_add_##name(float *dst, const u8 *wire, u64 apart, float post, u64 n,           \
                               u64 segment, u64 stride)                                            \
    {                                                                                              \
        add_blocks(format, dst, wire, apart, post, n, segment, stride);                            \
    }

BLOCK_KERNELS(int8, INT8)
BLOCK_KERNELS(int4, INT4)
BLOCK_KERNELS(onebit, ONEBIT)
BLOCK_KERNELS(fp8, FP8)
