/* sparse.h - what a choice of the largest elements of a chunk takes, pass by pass, while the chunk
 * lies in the first cache, and optimizer steps of a few elements. A template: body.h includes it
 * once per set, after topk.h.
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

/* Whole blocks are one register or a few, which the compiler sees by the constant. */
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
