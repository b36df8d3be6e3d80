/* select.h - the selection of the units of a tensor that are sent, and the rest that stays.
 *
 * For each chunk c = residual * decay + delta is made in the first cache, its largest units are
 * found there, and what is left of it goes to memory. So a tensor is read once and written once.
 *
 * Pure except for the memory that it is given.
 */
#ifndef RINGCOMM_SPARSE_SELECT_H
#define RINGCOMM_SPARSE_SELECT_H

#include "format.h"

/* Returns the bytes of room for one call. */
size_t sparse_select_room(const rc_sparse_format *format);

/* Selects as rc_sparse_select does; room is aligned to a float. Returns 1 if a value that is sent
 * is not finite. */
int sparse_select(const rc_sparse_format *format, const kernel_set *kernels, void *room,
                  uint8_t *wire, float *left, const float *residual, const float *delta,
                  float decay, uint64_t count);

#endif
