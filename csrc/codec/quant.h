/* quant.h - codecs of few bits per element, a segment at a time.
 *
 * Elements share a scale in blocks (kernel_block). The payload of a segment of n elements holds the
 * scales of its blocks, then their codes:
 *
 *   | scales: bf16[blocks] | codes |
 *
 * C stands for encoding, D for decoding, a residual e for what an earlier call lost; all in f32.
 *
 *   contribution   wire = C(x + e), e' = (x + e) - D(wire)
 *   sum            S = D(wire 0) + D(wire 1) + ...        in order of rank; a rank's own
 *                                                          contribution may be x + e, not encoded
 *   result         wire = C(S * post + e), e' = (S * post + e) - D(wire), dst = D(wire)
 *             or   dst = S * post                          where nobody else needs it
 *
 * A tensor of f64 is rounded to f32 first. post is 1/world_size for an average, else 1.
 *
 * A value that is not finite poisons its block: D is NaN there. Encoding and decoding report such a
 * block, so that all ranks can make the whole result NaN and keep their residuals.
 *
 * Data is processed in pieces that stay in the first cache; memory is read once and written once.
 * Pure: no state beyond the struct, no OS, no allocation. n may be 0.
 */
#ifndef RINGCOMM_QUANT_H
#define RINGCOMM_QUANT_H

#include <stddef.h>

#include "../include/ringcomm.h"
#include "../kernels/kernels.h"

typedef struct quant {
    const kernel_set *kernels;
    const kernel_block *format;
    rc_dtype dtype; /* RC_F32 or RC_F64 */
    size_t elem_bytes;
    float post;
    int far; /* the tensor is more than a cache holds */
} quant;

/* Prepares the codec of a call. contributors: the ranks whose values are in a result. */
void quant_init(quant *q, const kernel_set *kernels, const rc_call *call, int contributors);

/* Returns the bytes of a segment's payload. */
size_t quant_bytes(const quant *q, size_t n);
/* Returns the elements of the largest segment whose payload fits into so many bytes; a multiple of
 * PLAN_ALIGN.
 */
size_t quant_segment(const quant *q, size_t bytes);

/* Encodes a contribution. residual: e, or NULL for 0; left: e', or NULL if it is not wanted; the
 * two are the same memory or do not overlap. Sets *poisoned if a value is not finite, else leaves
 * it. */
void quant_encode(const quant *q, uint8_t *wire, const void *src, const float *residual,
                  float *left, size_t n, int *poisoned);

/* Terms of a sum: wires[rank] is a rank's contribution as it came; NULL for this rank's own, which
 * is src + residual (NULL: 0). */
typedef struct quant_terms {
    const void *const *wires;
    int count;
    const void *src;
    const float *residual;
} quant_terms;

/* dst = S * post; dst may be src. */
void quant_join(const quant *q, void *dst, const quant_terms *terms, size_t n, int *poisoned);
/* Encodes the result for the others and decodes it to dst, which may be src, or NULL where no
 * decoded result is wanted. residual and left as in quant_encode. */
void quant_join_encoded(const quant *q, void *dst, uint8_t *wire, const quant_terms *terms,
                        const float *residual, float *left, size_t n, int *poisoned);

/* Returns 1 if quant_join of contributions that are all encoded would find a value that is not
 * finite. Looks at the scales, and at the sum where they are so large that it might overflow. */
int quant_sum_is_poisoned(const quant *q, const quant_terms *terms, size_t n);

/* dst = D(wire). */
void quant_store(const quant *q, void *dst, const uint8_t *wire, size_t n, int *poisoned);

/* Returns 1 if quant_store would find a poisoned block. */
int quant_is_poisoned(const quant *q, const uint8_t *wire, size_t n);

/* Returns 1 if n elements are neither NaN nor infinite. */
int quant_is_finite(rc_dtype dtype, const void *x, size_t n);
/* dst = NaN. */
void quant_fill_nan(rc_dtype dtype, void *dst, size_t n);

#endif
