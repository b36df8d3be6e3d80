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
 * A value that is not finite poisons its block: D is NaN there. Who encodes or decodes such a block
 * is told, so that all ranks can make the whole result NaN, and keep their residuals.
 *
 * The codec that leaves elements out has no blocks; it is in topk.h.
 *
 * Everything goes through in pieces that stay in the first cache; memory is read once and written
 * once. Pure: no state beyond the struct, no OS, no allocation. n may be 0.
 */
#ifndef RINGCOMM_QUANT_H
#define RINGCOMM_QUANT_H

#include <stddef.h>

#include "../include/ringcomm.h"
#include "../kernels/kernels.h"
#include "topk.h"

typedef struct quant {
    const kernel_set *kernels;
    const kernel_block *format; /* NULL: it is topk */
    topk topk;
    rc_dtype dtype; /* RC_F32 or RC_F64 */
    size_t elem_bytes;
    float post;
    int far; /* the tensor is more than a cache holds */
} quant;

/* 1 if tensors of dtype can travel by this codec, and it is one of these. */
int quant_supports(rc_codec id, rc_dtype dtype);

/* contributors: the ranks whose values are in a result. */
void quant_init(quant *q, const kernel_set *kernels, const rc_call *call, int contributors);

/* Bytes of memory that the codec needs for a work, which contributes this; may be 0. */
size_t quant_room(const quant *q, const topk_source *source, topk_segments segments);
/* Before the first segment of the work, whose number turn is. room: that memory, until its end. */
void quant_prepare(quant *q, void *room, const topk_source *source, topk_segments segments,
                   uint64_t turn);

/* Bytes of a segment, at most; 1 if a payload may have that many. (A codec that leaves elements out
 * has fewer.) */
size_t quant_most_bytes(const quant *q, size_t n);
int quant_fits(const quant *q, size_t n, size_t bytes);
/* Elements of the largest segment whose payload fits into so many bytes; a multiple of PLAN_ALIGN.
 */
size_t quant_segment(const quant *q, size_t bytes);
/* 1 if a payload whose length fits can be decoded: to be asked before it is. */
int quant_valid(const quant *q, const uint8_t *wire, size_t bytes, size_t n);

/* A contribution. residual: e, or NULL for 0; left: e', or NULL if it is not wanted; neither lies
 * within the other but as the same. *poisoned is set if a value is not finite, else left. Returns
 * the bytes of wire. */
size_t quant_encode(quant *q, uint8_t *wire, const void *src, const float *residual, float *left,
                    size_t n, int *poisoned);

/* What is summed: the contributions of all ranks as they came. That which is NULL is this rank's
 * own: src + residual (NULL: 0). */
typedef struct quant_terms {
    const void *const *wires;
    const uint32_t *lengths; /* of these, in bytes */
    int count;
    const void *src;
    const float *residual;
} quant_terms;

/* dst = S * post; dst may be src. */
void quant_join(quant *q, void *dst, const quant_terms *terms, size_t n, int *poisoned);
/* The same of two contributions that both have a payload, by the codec without blocks: as a payload
 * of all their elements. Returns its bytes. */
size_t quant_join_kept(quant *q, uint8_t *wire, const quant_terms *terms, int *poisoned);
/* The result, encoded for the others and decoded to dst, which may be src, or NULL where it stays
 * as it is encoded. residual and left as above. Returns the bytes of wire. */
size_t quant_join_encoded(quant *q, void *dst, uint8_t *wire, const quant_terms *terms,
                          const float *residual, float *left, size_t n, int *poisoned);

/* 1 if quant_join of contributions that are all encoded would find a value that is not finite.
 * Looks at the scales, and where they are so large that a sum might be none, at the sum; not of the
 * codec without blocks. */
int quant_sum_is_poisoned(const quant *q, const quant_terms *terms, size_t n);

/* dst = D(wire). */
void quant_store(quant *q, void *dst, const uint8_t *wire, size_t bytes, size_t n, int *poisoned);

/* 1 if that would find a poisoned block. */
int quant_is_poisoned(const quant *q, const uint8_t *wire, size_t bytes, size_t n);

/* 1 if n elements are neither NaN nor infinite. */
int quant_is_finite(rc_dtype dtype, const void *x, size_t n);
/* dst = NaN. */
void quant_fill_nan(rc_dtype dtype, void *dst, size_t n);

#endif
