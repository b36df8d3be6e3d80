/* optimizer.h - optimizer steps that touch only the units that were received.
 *
 * Problem. Of a hundred units one is received, so that a step is as fast as the lines of its
 * weights and states come from memory, and no prefetcher sees where the next one is.
 *
 * Design. One cursor goes through the units and prefetches their lines; another, AHEAD units behind
 * it, does the arithmetic. A block of 16 floats is a line of each of the arrays that begins at one,
 * else it lies in two.
 *
 * Pure.
 */
#ifndef RINGCOMM_SPARSE_OPTIMIZER_H
#define RINGCOMM_SPARSE_OPTIMIZER_H

#include "format.h"

/* Implement rc_sparse_sgd and rc_sparse_adam. */
void sparse_sgd_step(const rc_sparse_format *format, const kernel_set *kernels,
                     const rc_sparse_entries *entries, const rc_sparse_sgd_step *step,
                     float *weights, uint64_t count, float *buffer, uint32_t *last);
void sparse_adam_step(const rc_sparse_format *format, const kernel_set *kernels,
                      const rc_sparse_entries *entries, const rc_sparse_adam_step *step,
                      float *weights, uint64_t count, float *first, float *second);

/* Implement rc_sparse_take and rc_sparse_put. */
void sparse_take(const rc_sparse_format *format, const rc_sparse_entries *entries,
                 const float *dense, uint64_t count);
void sparse_put(const rc_sparse_format *format, const kernel_set *kernels,
                const rc_sparse_entries *entries, void *dense, rc_dtype dtype, uint64_t count);

/* Returns x to the power of n, by squaring, in double: the same on every machine. */
double sparse_power(double x, uint32_t n);

#endif
