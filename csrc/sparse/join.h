/* join.h - sums of payloads, unit by unit, and their copies into tensors.
 *
 * Sums are made in f32, one payload after the other from the first on, whatever units they have in
 * common: so all ranks that have the same payloads get the same bits. A unit whose values are all
 * zero counts as not sent: payloads are filled up with such units.
 *
 * Pure except for the memory that it is given.
 */
#ifndef RINGCOMM_SPARSE_JOIN_H
#define RINGCOMM_SPARSE_JOIN_H

#include "format.h"

/* Returns the bytes of room for one call. */
size_t sparse_join_room(const rc_sparse_format *format);

/* Sums as rc_sparse_join does; room is aligned to a uint64_t. Returns the number of units; *wrong
 * is the invalid payload, or -1. */
uint64_t sparse_join(const rc_sparse_format *format, const kernel_set *kernels, void *room,
                     const uint8_t *const *wires, int payloads, float factor, uint64_t count,
                     rc_sparse_entries *out, int *poisoned, int *wrong);

/* Implement rc_sparse_scatter and rc_sparse_add. */
void sparse_scatter(const rc_sparse_format *format, const kernel_set *kernels,
                    const rc_sparse_entries *entries, float *dense, uint64_t count);
void sparse_add(const rc_sparse_format *format, const rc_sparse_entries *entries, float factor,
                float *dense, uint64_t count);

#endif
