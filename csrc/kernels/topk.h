/* topk.h - a format of few elements, the others being zeros. A template: body.h includes it once
 * per set. Beside what block.h wants, the including file defines
 *   vec_reaching        (x, least): bit i is 1 where the bits of lane i but for the sign, as an
 *                       unsigned integer, are at least `least`, which is 1 or more
 *
 * Magnitudes are compared as integers: infinity and NaN are larger than all numbers then, and
 * nothing depends on what a comparison with NaN gives.
 */
#ifndef RINGCOMM_KERNELS_TOPK_H
#define RINGCOMM_KERNELS_TOPK_H

static inline vec topk_take(const float *src, const float *residual)
{
    fetch_ahead(src);
    if (!residual)
        return vec_load(src);
    fetch_ahead(residual);
    return vec_add(vec_load(src), vec_load(residual));
}

/* Adds LANES elements, of which bits says which are large. */
static inline size_t topk_note(uint16_t *index, float *value, size_t count, vec c, uint32_t bits,
                               size_t start)
{
    float lanes[LANES];
    vec_store(lanes, c);
    for (; bits; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        index[count] = (uint16_t)(start + (size_t)lane);
        value[count++] = lanes[lane];
    }
    return count;
}

static size_t topk_pick(uint16_t *index, float *value, float *left, const float *src,
                        const float *residual, uint32_t least, size_t n, int far)
{
    const int stream = block_streams(left, far);
    const size_t whole = n - n % LANES;
    const vec zero = vec_set(0.0f);
    size_t count = 0;
    for (size_t i = 0; i < whole; i += LANES) {
        const vec c = topk_take(src + i, residual ? residual + i : NULL);
        const uint32_t bits = vec_reaching(c, least);
        if (left)
            block_put(left + i, bits ? vec_by_bits(bits, zero, c) : c, stream);
        if (bits)
            count = topk_note(index, value, count, c, bits, i);
    }
    for (size_t i = whole; i < n; i++) {
        const float c = residual ? src[i] + residual[i] : src[i];
        const int large = (bits_of(c) & 0x7fffffff) >= least;
        if (left)
            left[i] = large ? 0.0f : c;
        if (large) {
            index[count] = (uint16_t)i;
            value[count++] = c;
        }
    }
    if (stream)
        vec_stream_end();
    return count;
}

static inline float topk_value(const void *values, size_t i)
{
    float value;
    memcpy(&value, (const uint8_t *)values + i * sizeof value, sizeof value);
    return value;
}

static void topk_put(float *dst, const uint16_t *index, const void *values, size_t count, size_t n,
                     int far)
{
    const int stream = block_streams(dst, far);
    const size_t whole = n - n % LANES;
    const vec zero = vec_set(0.0f);
    size_t at = 0, e = 0;
    while (at < whole) {
        const size_t next =
            e < count && index[e] < whole ? index[e] / (size_t)LANES * LANES : whole;
        for (; at < next; at += LANES)
            block_put(dst + at, zero, stream);
        if (at == whole)
            break;
        float lanes[LANES] = {0};
        for (; e < count && index[e] < at + LANES; e++)
            lanes[index[e] - at] = topk_value(values, e);
        block_put(dst + at, vec_load(lanes), stream);
        at += LANES;
    }
    block_fill(dst + whole, 0.0f, n - whole);
    for (; e < count; e++)
        dst[index[e]] = topk_value(values, e);
    if (stream)
        vec_stream_end();
}

static void topk_tops(float *tops, const float *src, size_t groups)
{
    for (size_t g = 0; g < groups; g++) {
        vec top = vec_set(0.0f);
        for (size_t i = 0; i < KERNEL_TOPK_GROUP; i += LANES)
            top = vec_top(top, vec_load(src + g * KERNEL_TOPK_GROUP + i));
        tops[g] = float_of(vec_top_of(top));
    }
}

#endif
