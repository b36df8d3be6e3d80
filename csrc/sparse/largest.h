/* largest.h - the k largest of a few thousand numbers, exactly k of them.
 *
 * The size of a number is its bits without the sign, as an integer (kernel_sparse), so that
 * infinity and NaN are the largest. Of equals the first are taken, and zeros only where there are
 * too few others. So the result depends on the numbers alone, and not on the search.
 *
 * Design. Counting how many reach a size is the fastest thing that can be done with numbers in the
 * first cache. So a threshold is narrowed down by counts, from where the last call ended: chunks of
 * one tensor resemble each other. When few are left beside the k, they are picked, and the search
 * continues among these.
 *
 * Pure.
 */
#ifndef RINGCOMM_SPARSE_LARGEST_H
#define RINGCOMM_SPARSE_LARGEST_H

#include "../kernels/kernels.h"

enum { LARGEST_SPARE = KERNEL_LANES };

typedef struct largest {
    const kernel_set *kernels;
    float *values;  /* room for all numbers, and LARGEST_SPARE more */
    uint32_t guess; /* size of the smallest taken in the last call; at first any but 0 */
} largest;

/* Puts the places of the k largest of n <= 65536 into index, which has room for n, in ascending
 * order. 1 <= k <= n. */
void largest_find(largest *l, uint16_t *index, const float *x, size_t n, size_t k);

#endif
