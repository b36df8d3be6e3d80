/* signs.h - signs with one scale for a whole tensor. A template: body.h includes it once per set,
 * after block.h. Beside what that wants, the including file defines
 *   vec_below           bit i is 1 where lane i < 0
 *
 * Loops go by groups of 32 elements, of which the last may be copies.
 */
#ifndef RINGCOMM_KERNELS_SIGNS_H
#define RINGCOMM_KERNELS_SIGNS_H

/* The bits of each byte in reverse: this format has its first element in the highest. */
static inline uint32_t signs_reverse(uint32_t bits)
{
    bits = (bits >> 1 & 0x55555555) | (bits & 0x55555555) << 1;
    bits = (bits >> 2 & 0x33333333) | (bits & 0x33333333) << 2;
    return (bits >> 4 & 0x0f0f0f0f) | (bits & 0x0f0f0f0f) << 4;
}

static inline uint32_t signs_encode_group(float *left, const float *src, const float *residual,
                                          float scale, int stream)
{
    const vec one = vec_set(1.0f), plus = vec_set(scale), minus = vec_set(-scale);
    uint32_t below = 0;
    for (size_t i = 0; i < KERNEL_LANES; i += LANES) {
        const vec c = block_take(src + i, one, residual ? residual + i : NULL);
        below |= vec_below(c) << i;
        if (left)
            block_put(left + i, vec_sub(c, vec_by_sign(c, plus, minus)), stream);
    }
    return signs_reverse(~below);
}

static void signs_encode(uint8_t *codes, float *left, const float *src, const float *residual,
                         float scale, size_t n, int far)
{
    const int stream = block_streams(left, far);
    const size_t whole = n - n % KERNEL_LANES;
    const size_t rest = n - whole;
    for (size_t i = 0; i < whole; i += KERNEL_LANES)
        store_signs(codes + i / 8,
                    signs_encode_group(left ? left + i : NULL, src + i,
                                       residual ? residual + i : NULL, scale, stream));
    if (rest) {
        float c[BLOCK_MAX], out[KERNEL_LANES];
        uint8_t code[KERNEL_LANES / 8];
        block_take_short(c, src + whole, 1.0f, residual ? residual + whole : NULL, rest);
        store_signs(code,
                    signs_encode_group(out, c, NULL, scale, 0) & signs_reverse((1u << rest) - 1));
        memcpy(codes + whole / 8, code, (rest + 7) / 8);
        if (left)
            memcpy(left + whole, out, rest * sizeof *out);
    }
    if (stream)
        vec_stream_end();
}

static inline void signs_add_group(float *acc, uint32_t bits, float scale)
{
    const vec plus = vec_set(scale), minus = vec_set(-scale);
    for (size_t i = 0; i < KERNEL_LANES; i += LANES)
        vec_store(acc + i, vec_add(vec_load(acc + i), vec_by_bits(bits >> i, plus, minus)));
}

static void signs_add(float *acc, const uint8_t *codes, float scale, size_t n)
{
    const size_t whole = n - n % KERNEL_LANES;
    const size_t rest = n - whole;
    for (size_t i = 0; i < whole; i += KERNEL_LANES)
        signs_add_group(acc + i, signs_reverse(load_signs(codes + i / 8)), scale);
    if (rest) {
        float sum[KERNEL_LANES] = {0};
        uint8_t code[KERNEL_LANES / 8] = {0};
        memcpy(sum, acc + whole, rest * sizeof *sum);
        memcpy(code, codes + whole / 8, (rest + 7) / 8);
        signs_add_group(sum, signs_reverse(load_signs(code)), scale);
        memcpy(acc + whole, sum, rest * sizeof *sum);
    }
}

/* c is rounded to f32 before it is squared; its square has no more than 48 bits. */
static inline void signs_square(double *lanes, const float *src, const float *residual, size_t n)
{
    INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        const double c = residual ? src[i] + residual[i] : src[i];
        lanes[i] += c * c;
    }
}

static void signs_squares(double lanes[KERNEL_LANES], const float *src, const float *residual,
                          size_t n)
{
    const size_t whole = n - n % KERNEL_LANES;
    double sums[KERNEL_LANES];
    memcpy(sums, lanes, sizeof sums);
    for (size_t i = 0; i < whole; i += KERNEL_LANES) {
        for (size_t at = i; at < i + KERNEL_LANES; at += LANES) {
            fetch_ahead(src + at);
            if (residual)
                fetch_ahead(residual + at);
        }
        signs_square(sums, src + i, residual ? residual + i : NULL, KERNEL_LANES);
    }
    signs_square(sums, src + whole, residual ? residual + whole : NULL, n - whole);
    memcpy(lanes, sums, sizeof sums);
}

#endif
