/* onebit.h - the functions of the format that keeps a sign per element. A part of block.h. */
#ifndef RINGCOMM_KERNELS_ONEBIT_H
#define RINGCOMM_KERNELS_ONEBIT_H

enum { ONEBIT_BLOCK = 256, ONEBIT_BYTES = 32 };

/* Returns the scale. If the sum of squares is finite, so are both means. */
static inline float block_scale_by_mean(float squares, float sizes, float n)
{
    const float root = __builtin_sqrtf(squares / n);
    const float mean = 1.75f * (sizes / n);
    const float s = block_scale_round(root < mean ? root : mean);
    if (!block_finite(squares))
        return float_of((uint32_t)BLOCK_NAN << 16);
    return s < 0x1p-126f ? 0.0f : s;
}

/* Returns D where the sign is minus: a zero block has no -0. */
static inline float onebit_minus(float s)
{
    return s == 0.0f ? 0.0f : -s;
}

/* Encodes a block. Elements from n on take no part in the mean, and their signs are stored as 0. */
static inline float onebit_encode_block(uint8_t *codes, float *left, const float *src, vec pre,
                                        const float *residual, size_t n, int stream)
{
    float c[ONEBIT_BLOCK];
    vec squares[GROUPS], sizes[GROUPS];
    for (size_t g = 0; g < GROUPS; g++)
        squares[g] = sizes[g] = vec_set(0.0f);
    for (size_t i = 0; i < ONEBIT_BLOCK; i += KERNEL_LANES)
        for (size_t g = 0; g < GROUPS; g++) {
            const size_t at = i + g * LANES;
            const vec x = block_take(src + at, pre, residual ? residual + at : NULL);
            vec_store(c + at, x);
            squares[g] = vec_add(squares[g], vec_mul(x, x));
            sizes[g] = vec_add(sizes[g], vec_abs(x));
        }
    const float s = block_scale_by_mean(block_sum(squares), block_sum(sizes), (float)n);
    if (s != s) {
        memset(codes, 0, ONEBIT_BYTES);
        block_left_whole(left, c, s, ONEBIT_BLOCK);
        return s;
    }
    const vec plus = vec_set(s), minus = vec_set(onebit_minus(s));
    for (size_t i = 0; i < ONEBIT_BLOCK; i += KERNEL_LANES) {
        uint32_t bits = 0;
        for (size_t g = 0; g < GROUPS; g++) {
            const size_t at = i + g * LANES;
            const vec x = vec_load(c + at);
            bits |= vec_signs(x) << g * LANES;
            if (left)
                block_put(left + at, vec_sub(x, vec_by_sign(x, plus, minus)), stream);
        }
        store_bits(codes + i / 8, bits);
    }
    for (size_t i = n; i < ONEBIT_BLOCK; i++)
        codes[i / 8] &= (uint8_t)~(1u << i % 8);
    return s;
}

static inline int onebit_decode_block(float *dst, float s, const uint8_t *codes, int stream)
{
    if (!block_finite(s)) {
        block_fill(dst, float_of((uint32_t)BLOCK_NAN << 16), ONEBIT_BLOCK);
        return 1;
    }
    const vec plus = vec_set(s), minus = vec_set(onebit_minus(s));
    for (size_t i = 0; i < ONEBIT_BLOCK; i += KERNEL_LANES) {
        const uint32_t bits = load_bits(codes + i / 8);
        for (size_t at = 0; at < KERNEL_LANES; at += LANES)
            block_put(dst + i + at, vec_by_bits(bits >> at, plus, minus), stream);
    }
    return 0;
}

static inline int onebit_add_block(float *acc, float s, const uint8_t *codes)
{
    if (!block_finite(s)) {
        block_fill(acc, float_of((uint32_t)BLOCK_NAN << 16), ONEBIT_BLOCK);
        return 1;
    }
    const vec plus = vec_set(s), minus = vec_set(onebit_minus(s));
    for (size_t i = 0; i < ONEBIT_BLOCK; i += KERNEL_LANES) {
        const uint32_t bits = load_bits(codes + i / 8);
        for (size_t at = 0; at < KERNEL_LANES; at += LANES) {
            const vec d = vec_by_bits(bits >> at, plus, minus);
            vec_store(acc + i + at, vec_add(vec_load(acc + i + at), d));
        }
    }
    return 0;
}

#define FORMAT(name) onebit_##name
#define BLOCK ONEBIT_BLOCK
#define BYTES ONEBIT_BYTES
#include "blockwise.h"

#endif
