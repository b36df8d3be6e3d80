/* int2.h - the functions of the format with 2 bits per element. A part of block.h.
 *
 * Four levels suit values that are normally distributed (Max, "Quantizing for minimum distortion",
 * 1960: .4528 and 1.5104 standard deviations, here 3 to 10). Those of a block become nearly so,
 * whatever they are, by a rotation: the signs of a fixed pattern, then the Walsh-Hadamard transform
 * H, whose rows are 64 sums and differences of all elements.
 *
 *   r = H(c * signs / 8)          sum of squares as before
 *   q = 3 or 10, with r's sign    10 where |r| >= 1.23 * mean of |r|
 *   s = <r, q> / <q, q>           the scale that loses least for these q, rounded to bf16
 *   D = H(q) * (signs * s / 8)    exact: at most 10 bits by 8
 *
 * So |c - D|^2 is |c|^2 - <r, q>^2 / <q, q>, and what is lost is less than what was to be sent.
 */
#ifndef RINGCOMM_KERNELS_INT2_H
#define RINGCOMM_KERNELS_INT2_H

/* Codes: bit i % 8 of byte i / 8 is 1 if q > 0, that of byte INT2_SIZES + i / 8 if |q| is 10. */
enum { INT2_BLOCK = 64, INT2_BYTES = 16, INT2_SIZES = 8, INT2_SMALL = 3, INT2_LARGE = 10 };

/* The signs are a bent function of the index: no row of H resembles them, so that constant blocks
 * are spread evenly too. */
#define INT2_4(x) x, x, x, -(x)
#define INT2_16(x) INT2_4(x), INT2_4(x), INT2_4(x), INT2_4(-(x))
static const float int2_signs[INT2_BLOCK] = {INT2_16(0.125f), INT2_16(0.125f), INT2_16(0.125f),
                                             INT2_16(-0.125f)};
#undef INT2_4
#undef INT2_16

/* Adds neighbours into the first half, and subtracts them into the second. Six times this is H. */
static inline void int2_halve(float *restrict out, const float *restrict in)
{
    for (size_t i = 0; i < INT2_BLOCK / 2; i++) {
        out[i] = in[2 * i] + in[2 * i + 1];
        out[INT2_BLOCK / 2 + i] = in[2 * i] - in[2 * i + 1];
    }
}

static inline void int2_transform(float x[INT2_BLOCK])
{
    float y[INT2_BLOCK];
    for (int i = 0; i < 3; i++) {
        int2_halve(y, x);
        int2_halve(x, y);
    }
}

/* Writes D of a block, of which none is -0. */
static inline void int2_values(float d[INT2_BLOCK], float s, const uint8_t *codes)
{
    const vec scale = vec_set(s), zero = vec_set(0.0f);
    const vec large = vec_set(INT2_LARGE), minus_large = vec_set(-INT2_LARGE);
    const vec small = vec_set(INT2_SMALL), minus_small = vec_set(-INT2_SMALL);
    for (size_t i = 0; i < INT2_BLOCK; i += LANES) {
        const size_t at = i % KERNEL_LANES, byte = (i - at) / 8;
        const uint32_t signs = load_bits(codes + byte) >> at;
        const uint32_t sizes = load_bits(codes + INT2_SIZES + byte) >> at;
        vec_store(d + i, vec_by_bits(sizes, vec_by_bits(signs, large, minus_large),
                                     vec_by_bits(signs, small, minus_small)));
    }
    int2_transform(d);
    for (size_t i = 0; i < INT2_BLOCK; i += LANES)
        vec_store(d + i, vec_add(vec_mul(vec_load(d + i), vec_mul(vec_load(int2_signs + i), scale)),
                                 zero));
}

/* Sums the magnitudes of a block, each times its level. */
static inline float int2_sum(const float *r, const uint32_t *sizes, vec large, vec small)
{
    vec sums[GROUPS];
    for (size_t g = 0; g < GROUPS; g++)
        sums[g] = vec_set(0.0f);
    for (size_t i = 0; i < INT2_BLOCK; i += LANES) {
        const vec level = vec_by_bits(sizes[i / KERNEL_LANES] >> i % KERNEL_LANES, large, small);
        vec *sum = &sums[i % KERNEL_LANES / LANES];
        *sum = vec_add(*sum, vec_mul(vec_abs(vec_load(r + i)), level));
    }
    return block_sum(sums);
}

/* Makes the codes of r, a bit for each element, and returns the scale; NaN if a D might not be
 * finite. */
static inline float int2_codes(const float *r, uint32_t signs[2], uint32_t sizes[2])
{
    const vec one = vec_set(1.0f), small = vec_set(INT2_SMALL), large = vec_set(INT2_LARGE);
    const float nan = float_of((uint32_t)BLOCK_NAN << 16);
    const float sum = int2_sum(r, sizes, one, one);
    if (!block_finite(sum))
        return nan;
    uint32_t least = bits_of(sum * (1.23f / INT2_BLOCK));
    least += least == 0; /* a zero is small */
    for (size_t i = 0; i < INT2_BLOCK; i += LANES) {
        const vec x = vec_load(r + i);
        signs[i / KERNEL_LANES] |= vec_signs(x) << i % KERNEL_LANES;
        sizes[i / KERNEL_LANES] |= vec_reaching(x, least) << i % KERNEL_LANES;
    }
    const int count = __builtin_popcount(sizes[0]) + __builtin_popcount(sizes[1]);
    const float squares =
        (float)(INT2_SMALL * INT2_SMALL * (INT2_BLOCK - count) + INT2_LARGE * INT2_LARGE * count);
    const float s = block_scale_round(int2_sum(r, sizes, large, small) / squares);
    if (!block_finite(s * (INT2_LARGE * INT2_BLOCK / 8)))
        return nan;
    return s < 0x1p-126f ? 0.0f : s;
}

static inline float int2_encode_block(uint8_t *codes, float *left, const float *src, vec pre,
                                      const float *residual, size_t n, int stream)
{
    float c[INT2_BLOCK], r[INT2_BLOCK];
    uint32_t signs[2] = {0}, sizes[2] = {0};
    (void)n;
    for (size_t i = 0; i < INT2_BLOCK; i += LANES) {
        const vec x = block_take(src + i, pre, residual ? residual + i : NULL);
        vec_store(c + i, x);
        vec_store(r + i, vec_mul(x, vec_load(int2_signs + i)));
    }
    int2_transform(r);
    const float s = int2_codes(r, signs, sizes);
    if (!(s > 0.0f)) {
        memset(codes, 0, INT2_BYTES);
        block_left_whole(left, c, s, INT2_BLOCK);
        return s;
    }
    for (size_t i = 0; i < 2; i++) {
        store_bits(codes + 4 * i, signs[i]);
        store_bits(codes + INT2_SIZES + 4 * i, sizes[i]);
    }
    if (!left)
        return s;
    int2_values(r, s, codes);
    for (size_t i = 0; i < INT2_BLOCK; i += LANES)
        block_put(left + i, vec_sub(vec_load(c + i), vec_load(r + i)), stream);
    return s;
}

static inline int int2_decode_block(float *dst, float s, const uint8_t *codes, int stream)
{
    float d[INT2_BLOCK];
    if (!block_finite(s)) {
        block_fill(dst, float_of((uint32_t)BLOCK_NAN << 16), INT2_BLOCK);
        return 1;
    }
    int2_values(d, s, codes);
    for (size_t i = 0; i < INT2_BLOCK; i += LANES)
        block_put(dst + i, vec_load(d + i), stream);
    return 0;
}

static inline int int2_add_block(float *acc, float s, const uint8_t *codes)
{
    float d[INT2_BLOCK];
    if (!block_finite(s)) {
        block_fill(acc, float_of((uint32_t)BLOCK_NAN << 16), INT2_BLOCK);
        return 1;
    }
    int2_values(d, s, codes);
    for (size_t i = 0; i < INT2_BLOCK; i += LANES)
        vec_store(acc + i, vec_add(vec_load(acc + i), vec_load(d + i)));
    return 0;
}

#define FORMAT(name) int2_##name
#define BLOCK INT2_BLOCK
#define BYTES INT2_BYTES
#include "blockwise.h"

#endif
