/* sparse.h - the passes that find the largest elements of a chunk, while it lies in the first
 * cache, and optimizer steps of a few elements. A template: body.h includes it once per set.
 * Besides the names for block.h the including file defines
 *   vec_reaching        (x, least): bit i is 1 where the bits of lane i without the sign, as an
 *                       unsigned integer, are at least `least`, which is 1 or more
 *
 * Magnitudes are compared as integers: infinity and NaN are larger than all numbers then, and
 * nothing depends on comparisons with NaN.
 */
#ifndef RINGCOMM_KERNELS_SPARSE_H
#define RINGCOMM_KERNELS_SPARSE_H

static void sparse_combine(float *c, const float *residual, const float *delta, float decay,
                           size_t n)
{
    const vec factor = vec_set(decay);
    const size_t whole = n - n % LANES;
    if (!residual) {
        memcpy(c, delta, n * sizeof *c);
        return;
    }
    for (size_t i = 0; i < whole; i += LANES) {
        const vec kept = vec_mul(vec_load(residual + i), factor);
        fetch_ahead(residual + i);
        fetch_ahead(delta + i);
        vec_store(c + i, vec_add(kept, vec_load(delta + i)));
    }
    for (size_t i = whole; i < n; i++)
        c[i] = residual[i] * decay + delta[i];
}

static size_t sparse_count(const float *x, uint32_t least, size_t n)
{
    const size_t whole = n - n % LANES;
    size_t count = 0;
    for (size_t i = 0; i < whole; i += LANES)
        count += (size_t)__builtin_popcount(vec_reaching(vec_load(x + i), least));
    for (size_t i = whole; i < n; i++)
        count += (bits_of(x[i]) & 0x7fffffff) >= least;
    return count;
}

/* Adds those of LANES elements whose bit says that they are large. */
static inline size_t sparse_note(uint16_t *index, float *values, size_t count, vec x, uint32_t bits,
                                 size_t start)
{
    float lanes[LANES];
    vec_store(lanes, x);
    for (; bits; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        index[count] = (uint16_t)(start + (size_t)lane);
        values[count++] = lanes[lane];
    }
    return count;
}

static size_t sparse_pick(uint16_t *index, float *values, const float *x, uint32_t least, size_t n)
{
    const size_t whole = n - n % LANES;
    size_t count = 0;
    for (size_t i = 0; i < whole; i += LANES) {
        fetch_ahead(x + i);
        const vec lanes = vec_load(x + i);
        const uint32_t bits = vec_reaching(lanes, least);
        if (bits)
            count = sparse_note(index, values, count, lanes, bits, i);
    }
    for (size_t i = whole; i < n; i++)
        if ((bits_of(x[i]) & 0x7fffffff) >= least) {
            index[count] = (uint16_t)i;
            values[count++] = x[i];
        }
    return count;
}

static void sparse_put(float *dst, const uint16_t *index, const float *values, size_t count,
                       size_t n, int far)
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
            lanes[index[e] - at] = values[e];
        block_put(dst + at, vec_load(lanes), stream);
        at += LANES;
    }
    block_fill(dst + whole, 0.0f, n - whole);
    for (; e < count; e++)
        dst[index[e]] = values[e];
    if (stream)
        vec_stream_end();
}

static inline float sparse_size(float x)
{
    return float_of(bits_of(x) & 0x7fffffff);
}

static void sparse_scores(float *scores, const float *c, size_t blocks)
{
    for (size_t b = 0; b < blocks; b++, c += KERNEL_SPARSE_BLOCK) {
        float sums[KERNEL_SPARSE_BLOCK / 2];
        for (size_t i = 0; i < KERNEL_SPARSE_BLOCK / 2; i++)
            sums[i] = sparse_size(c[i]) + sparse_size(c[i + KERNEL_SPARSE_BLOCK / 2]);
        for (size_t half = KERNEL_SPARSE_BLOCK / 4; half > 0; half /= 2)
            for (size_t i = 0; i < half; i++)
                sums[i] += sums[i + half];
        scores[b] = sums[0];
    }
}

/* ---- optimizers ---- */

/* Runs a loop body for n elements; a whole block is one register or a few, which the compiler sees
 * by the constant. */
#define SPARSE_EACH(n, ...)                                                                        \
    do {                                                                                           \
        if ((n) == KERNEL_SPARSE_BLOCK) {                                                          \
            INDEPENDENT                                                                            \
            for (size_t i = 0; i < KERNEL_SPARSE_BLOCK; i++)                                       \
                __VA_ARGS__                                                                        \
        } else {                                                                                   \
            for (size_t i = 0; i < (n); i++)                                                       \
                __VA_ARGS__                                                                        \
        }                                                                                          \
    } while (0)

static void sparse_sgd(const kernel_sgd *by, float decay, float *weights, float *momentum,
                       const float *gradient, size_t n)
{
    const kernel_sgd s = *by;
    if (!momentum) {
        SPARSE_EACH(n, {
            const float g = gradient[i] + s.weight_decay * weights[i];
            weights[i] = weights[i] - s.lr * g;
        });
    } else if (s.nesterov) {
        SPARSE_EACH(n, {
            const float g = gradient[i] + s.weight_decay * weights[i];
            const float m = momentum[i] * decay + g;
            momentum[i] = m;
            weights[i] = weights[i] - s.lr * (g + s.momentum * m);
        });
    } else {
        SPARSE_EACH(n, {
            const float g = gradient[i] + s.weight_decay * weights[i];
            const float m = momentum[i] * decay + g;
            momentum[i] = m;
            weights[i] = weights[i] - s.lr * m;
        });
    }
}

static void sparse_adam(const kernel_adam *by, float *weights, float *first, float *second,
                        const float *gradient, size_t n)
{
    const kernel_adam s = *by;
    SPARSE_EACH(n, {
        const float g = gradient[i] + s.l2 * weights[i];
        const float m = first[i] * s.beta1 + s.rest1 * g;
        const float v = second[i] * s.beta2 + s.rest2 * (g * g);
        first[i] = m;
        second[i] = v;
        const float root = __builtin_sqrtf(v) * s.root_scale + s.eps;
        weights[i] = weights[i] * s.keep - s.step * (m / root);
    });
}

#endif
