/* kernels.h - elementwise functions, one table per instruction set.
 *
 * Problem. A segment is decoded, reduced and encoded while it is hot in cache. The same arithmetic
 * must give the same bits on every machine of a job, whatever its instruction set.
 *
 * Design. The bodies are written once, in body.h, and compiled once per instruction set; where a
 * compiler does not find the instruction, a set overrides the body by hand. Every set matches the
 * scalar one bit for bit, with one exception: where both operands of an f32 or f64 sum or product
 * are NaN, the payload of the result is unspecified. (Between x86-64 and ARM the sign of a NaN made
 * from numbers differs too.) Encoders turn every NaN into one canonical NaN (bf16 0x7fc0, fp16
 * 0x7e00).
 *
 * Rules. No contraction, no fast math, no flush to zero: the calling thread rounds to nearest and
 * keeps subnormals, as threads do unless told otherwise. 16-bit floats round to nearest even by
 * integer arithmetic or by an instruction that gives the same bits, subnormals included. fp16
 * overflow gives infinity. n may be 0; pointers need only the alignment of their element; dst may
 * be any source whose elements are as wide as its own, and overlaps none in another way. Pure:
 * nothing here touches the OS, and any thread may call. The interface of kernels/ to other folders.
 */
#ifndef RINGCOMM_KERNELS_H
#define RINGCOMM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "../include/ringcomm.h"

enum { KERNEL_LANES = 32 }; /* of a sum, so that it does not depend on the register's width */

/* dst[i] = a[i] op b[i]. min and max give NaN if either operand is NaN: min is
 * (a < b || a != a) ? a : b. Integer sums and products wrap. */
typedef void kernel_reduce_fn(void *dst, const void *a, const void *b, size_t n);

/* The functions of one 16-bit float format. */
typedef struct kernel_half {
    /* dst = E(src * factor), the product in f32 */
    void (*encode)(uint16_t *dst, const float *src, float factor, size_t n);
    /* dst = D(src), exact */
    void (*decode)(float *dst, const uint16_t *src, size_t n);
    /* dst = E((D(acc) + D(E(x * pre))) * post), every step rounded in f32 */
    void (*add)(uint16_t *dst, const uint16_t *acc, const float *x, float pre, float post,
                size_t n);
    /* dst = E((D(acc) + D(x)) * post): as add, for an x that is encoded already */
    void (*add_half)(uint16_t *dst, const uint16_t *acc, const uint16_t *x, float post, size_t n);
} kernel_half;

/* The functions of one format whose elements share a scale, block by block; arithmetic in block.h.
 * Every function begins at the start of a block; n is the number of elements, so that only the last
 * block may be short. D is the value of a code: a number times its block's scale.
 *
 * A block is poisoned if one of its values is not finite, or if encoding them leaves the range of
 * f32: its scale is NaN, its codes are 0, its D and its left are the canonical NaN. far: memory
 * that is written but not read (left, dst) goes around the caches, which is faster for part of more
 * than fits there. */
typedef struct kernel_block {
    size_t block; /* elements that share a scale */
    size_t bytes; /* of the codes of a block; if less than block, always as many */
    /* c = src * pre + residual; scales, codes = E(c); left = c - D. residual may be NULL (0), and
     * so may left (not wanted); left may be residual or src. Returns 1 if a block was poisoned. */
    int (*encode)(uint16_t *scales, uint8_t *codes, float *left, const float *src, float pre,
                  const float *residual, size_t n, int far);
    /* dst = D. Returns 1 if a scale was not finite; its block is then the canonical NaN. */
    int (*decode)(float *dst, const uint16_t *scales, const uint8_t *codes, size_t n, int far);
    /* acc += D. Returns 1 if a scale was not finite; its block of acc is then the canonical NaN. */
    int (*add)(float *acc, const uint16_t *scales, const uint8_t *codes, size_t n);
} kernel_block;

/* Return how many scales n elements have, and how many bytes of codes. */
static inline size_t kernel_block_scales(const kernel_block *format, size_t n)
{
    return n / format->block + (n % format->block != 0);
}

static inline size_t kernel_block_codes(const kernel_block *format, size_t n)
{
    if (format->bytes == format->block)
        return n;
    return kernel_block_scales(format, n) * format->bytes;
}

/* Elements of a block that is sent whole: a cache line of floats. */
#define KERNEL_SPARSE_BLOCK 16

/* Settings of a step of SGD. */
typedef struct kernel_sgd {
    float lr, momentum, weight_decay;
    int nesterov;
} kernel_sgd;

/* Settings of a step of Adam: rest1 is 1 - beta1, step the rate over the first moment's bias
 * correction, and root_scale 1 over the root of the second's. l2 is the weight decay added to the
 * gradient; keep, 1 or less, the factor that decoupled weight decay leaves of a weight. */
typedef struct kernel_adam {
    float beta1, beta2, rest1, rest2, step, root_scale, eps, l2, keep;
} kernel_adam;

/* Passes that find the largest elements of a chunk of at most 65536, and optimizer steps of
 * received units. The size of an element is its bits without the sign, as an integer: infinity and
 * NaN are the largest. */
typedef struct kernel_sparse {
    /* c = residual * decay + delta, the product rounded before the sum; residual NULL: delta */
    void (*combine)(float *c, const float *residual, const float *delta, float decay, size_t n);
    /* Counts elements of size least or more; least is 1 or more, and at most 0x7fffffff. */
    size_t (*count)(const float *x, uint32_t least, size_t n);
    /* Copies the elements that count counts to index and values, which have room for n. Returns how
     * many there are. */
    size_t (*pick)(uint16_t *index, float *values, const float *x, uint32_t least, size_t n);
    /* dst = 0, except for the elements at index, which ascend and are below n. */
    void (*put)(float *dst, const uint16_t *index, const float *values, size_t count, size_t n,
                int far);
    /* scores[i] = the sum of the magnitudes of block i of KERNEL_SPARSE_BLOCK elements: those 8, 4,
     * 2 and 1 further on are added, in this order */
    void (*scores)(float *scores, const float *c, size_t blocks);
    /* g = gradient + weight_decay * w; m = m * decay + g; w -= lr * m, with nesterov
     * lr * (g + momentum * m). Without momentum (NULL) m is g. */
    void (*sgd)(const kernel_sgd *by, float decay, float *weights, float *momentum,
                const float *gradient, size_t n);
    /* g = gradient + l2 * w; m = beta1 * m + rest1 * g; v = beta2 * v + rest2 * g * g;
     * w = keep * w - step * m / (root of v * root_scale + eps) */
    void (*adam)(const kernel_adam *by, float *weights, float *first, float *second,
                 const float *gradient, size_t n);
} kernel_sparse;

typedef struct kernel_set {
    const char *name;
    int (*supported)(void); /* returns 1 if this CPU has the instructions */
    /* [dtype][op]; NULL for RC_F16, RC_BF16 and for RC_AVG */
    kernel_reduce_fn *reduce[RC_DTYPE_COUNT][RC_OP_COUNT];
    /* dst = src * factor in the dtype's own precision for f32 and f64; for integers dst = src /
     * divisor truncated towards zero, with divisor = (int64_t)factor, at least 1; NULL for 16-bit
     * floats */
    void (*scale[RC_DTYPE_COUNT])(void *dst, const void *src, double factor, size_t n);
    /* dst = (a + b) * factor, the bits of a sum that is scaled afterwards; NULL likewise */
    void (*average[RC_DTYPE_COUNT])(void *dst, const void *a, const void *b, double factor,
                                    size_t n);
    kernel_half bf16;
    kernel_half fp16;
    kernel_block block[RC_CODEC_COUNT]; /* by codec, of those that quantise; layouts in block.h */
    kernel_sparse sparse;
    void (*f64_to_f32)(float *dst, const double *src, size_t n);
    void (*f32_to_f64)(double *dst, const float *src, size_t n);
    int (*has_nan)(const float *x, size_t n);
} kernel_set;

/* The sets, one file each; those of another architecture do not exist. */
extern const kernel_set kernels_scalar;
#ifdef __x86_64__
extern const kernel_set kernels_avx2;
extern const kernel_set kernels_avx512;
#endif
#ifdef __aarch64__
extern const kernel_set kernels_neon;
#endif

/* Returns the i-th set of this build, slowest (scalar) first; NULL past the last. */
const kernel_set *kernels_at(int index);
/* Returns the fastest supported set, or the one called name; NULL if name is unknown or
 * unsupported. */
const kernel_set *kernels_find(const char *name);

#endif
