/* payload.h - sparse payloads: their layout, the selection of what is sent, sums, and optimizer
 * steps by them. The interface of sparse/ to other folders.
 *
 * A payload is a record for each chunk. The record of a chunk that keeps k units:
 *
 *   | k indices, ascending, of `width` bits each, the lowest bits of a byte first; filled up with
 *     zeros to a whole byte | k * block values, f32 or bf16, little-endian |
 *
 * width is the number of bits of the largest index of a whole chunk: 12 for 4096 elements. The last
 * chunk, where short, keeps its share of the units, rounded up, so that its record is shorter. A
 * block that the end of the tensor cuts is sent with zeros after it. Nothing in a record is
 * aligned.
 *
 * Pure except for the memory that a function is given; any thread may call.
 */
#ifndef RINGCOMM_SPARSE_PAYLOAD_H
#define RINGCOMM_SPARSE_PAYLOAD_H

#include <stddef.h>
#include <stdint.h>

#include "../include/ringcomm_sparse.h"
#include "../kernels/kernels.h"

/* ---- format.c: the layout ---- */

enum { SPARSE_MOST_CHUNK = 65536 };

/* A chunk of elems elements, and the units and bytes that are sent of it. */
typedef struct sparse_chunk {
    size_t elems, units, kept;
    size_t index_bytes, bytes; /* of its indices, of its record */
} sparse_chunk;

/* Returns 1 for a valid format (ringcomm_sparse.h). */
int sparse_format_ok(const rc_sparse_format *format);
/* Returns the chunk from element `start` on of a tensor of count, start < count. */
sparse_chunk sparse_chunk_at(const rc_sparse_format *format, uint64_t count, uint64_t start);

/* Writes the indices of a record; returns where its values go. */
uint8_t *sparse_put_indices(const rc_sparse_format *format, const sparse_chunk *chunk,
                            uint8_t *record, const uint16_t *index);
/* Reads the indices of a record; returns where its values lie, or NULL if these are no ascending
 * indices of the chunk.
 */
const uint8_t *sparse_get_indices(const rc_sparse_format *format, const sparse_chunk *chunk,
                                  const uint8_t *record, uint16_t *index);

/* Writes n values, and replaces them by what the reader will have; half is room for n. */
void sparse_put_values(const rc_sparse_format *format, const kernel_set *kernels, uint8_t *wire,
                       float *values, uint16_t *half, size_t n);
void sparse_get_values(const rc_sparse_format *format, const kernel_set *kernels,
                       const uint8_t *wire, float *values, uint16_t *half, size_t n);

/* Returns 1 if one of n is infinite or NaN. */
int sparse_any_not_finite(const float *x, size_t n);

/* ---- select.c: which units are sent, and the rest that stays ---- */

/* Returns the bytes of room for one call. */
size_t sparse_select_room(const rc_sparse_format *format);

/* Selects as rc_sparse_select does; room is aligned to a float. Returns 1 if a value that is sent
 * is not finite. */
int sparse_select(const rc_sparse_format *format, const kernel_set *kernels, void *room,
                  uint8_t *wire, float *left, const float *residual, const float *delta,
                  float decay, uint64_t count);

/* ---- sums.c: sums unit by unit, and their copies into tensors ----
 *
 * Sums are made in f32, one payload after the other from the first on, whatever units they have in
 * common: so all ranks that have the same payloads get the same bits. A unit whose values are all
 * zero counts as not sent: payloads are filled up with such units.
 */

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

/* ---- optimizer.c: optimizer steps that touch only the units that were received ---- */

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
