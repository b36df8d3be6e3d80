/* topk.h - the codec that sends the largest elements as they are, and no others; for quant.c.
 *
 * Problem. Which elements are the largest must be found in the one pass in which memory is read
 * anyway, and bytes may not grow with the world: a sum has as many large elements as all that was
 * added together.
 *
 * Design. The payload of a segment of at most 65536 elements holds what was kept of it, in
 * ascending order:
 *
 *   | indices: u16[kept] | values: f32[kept] |
 *
 * The size of an element is that of its bits but for the sign, taken as an integer.
 *
 *   contributions  what has at least the size `least`, which is that of the element at the rank
 *                  density of a sample, drawn from the whole tensor before the first segment is
 *                  encoded. The sample depends on the call's number only, so a run can be repeated.
 *   sums           so many of the largest as the contributions to the segment have on average, and
 *                  as the density wants, 3 to 1; and half as many again, because ranks differ in
 *                  what is large, and what their sum leaves out comes late by another round
 *                  (docs/decisions/63-length-of-topk-sums.md). So results go to where
 *                  contributions come from, and what was left over goes in the end too.
 *
 * A segment has a limit all the same, for tensors whose large elements are the same size, or are
 * all in one place. Beyond it the largest go; among equals it begins with another one in each call.
 *
 * What is kept is exact, so the residual is 0 there and the value everywhere else. A value that is
 * not finite is larger than all others, so it is always kept, and known to whom it reaches.
 *
 * Pure but for the memory that it is given (topk_room). n may be 0.
 */
#ifndef RINGCOMM_TOPK_H
#define RINGCOMM_TOPK_H

#include <stddef.h>

#include "../include/ringcomm.h"
#include "../kernels/kernels.h"

enum { TOPK_MOST_ELEMS = 65536, TOPK_BYTES = 6 }; /* of a segment; of an element that is kept */

typedef struct topk {
    const kernel_set *kernels;
    rc_dtype dtype; /* RC_F32 or RC_F64 */
    float post;
    int far;
    double density;
    uint32_t least; /* size of the smallest elements of contributions to be sent; 1 or more */
    int tied;       /* many of the elements have this very size */
    uint64_t turn;  /* which of equals go first */
    size_t most;    /* elements in a payload */
    float *dense;   /* a segment: of a sum, or of f64 as f32 */
    float *values;  /* what is picked of a segment, and where it lies */
    uint16_t *index;
} topk;

/* What a work contributes: count elements of src + residual (NULL: 0), all but those from exact on,
 * which stay here. */
typedef struct topk_source {
    const void *src;
    const float *residual;
    uint64_t count;
    uint64_t exact, exact_count;
} topk_source;

/* What is summed (quant_terms). */
typedef struct topk_terms {
    const void *const *wires; /* [rank]; NULL: this rank's own, src + residual */
    const uint32_t *lengths;  /* [rank]; in bytes */
    int count;
    const void *src;
    const float *residual;
} topk_terms;

/* 1 if a payload of so many bytes holds elements of a segment of n, in order. */
int topk_valid(const void *wire, size_t bytes, size_t n);

/* The segments of a work. */
typedef struct topk_segments {
    size_t elems; /* at most */
    size_t bytes; /* of a payload, at most */
} topk_segments;

/* Elements of the largest segment whose payload is not to have more bytes. */
size_t topk_segment(const topk *t, size_t bytes);
/* The most elements of n that a contribution has, with payloads of so many bytes; and of what is
 * sent of a sum of such contributions. Ranks of one density keep to it. */
size_t topk_most_contributed(const topk *t, size_t bytes, size_t n);
size_t topk_most_of_sum(const topk *t, size_t bytes, size_t n);

/* The sample of n elements: size of them, in runs, or as they lie if that is all; kept of them have
 * the size `least` or more. */
typedef struct topk_sample {
    size_t size, run, kept;
} topk_sample;

topk_sample topk_sample_of(const topk *t, uint64_t n);

/* Bytes of memory that it needs until the end of a work, never 0. */
size_t topk_room(const topk *t, const topk_source *source, topk_segments segments);
/* Before the first segment of a work, whose number turn is. room: those bytes, aligned to a float.
 */
void topk_prepare(topk *t, void *room, const topk_source *source, topk_segments segments,
                  uint64_t turn);

/* As quant_encode, quant_join, quant_join_kept, quant_join_encoded, quant_store and
 * quant_is_poisoned. */
size_t topk_encode(topk *t, uint8_t *wire, const void *src, const float *residual, float *left,
                   size_t n, int *poisoned);
void topk_join(topk *t, void *dst, const topk_terms *terms, size_t n, int *poisoned);
size_t topk_join_kept(topk *t, uint8_t *wire, const topk_terms *terms, int *poisoned);
size_t topk_join_encoded(topk *t, void *dst, uint8_t *wire, const topk_terms *terms,
                         const float *residual, float *left, size_t n, int *poisoned);
void topk_store(topk *t, void *dst, const void *wire, size_t bytes, size_t n, int *poisoned);
int topk_is_poisoned(const void *wire, size_t bytes);

#endif
