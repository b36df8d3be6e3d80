/* format.h - the layout of a sparse payload.
 *
 * A payload is a record for each chunk. The record of a chunk that keeps k units:
 *
 *   | k indices, ascending, of `width` bits each, the lowest bits of a byte first; filled up with
 *     zeros to a whole byte | k * block values, f32 or bf16, little-endian |
 *
 * width is the number of bits of the largest index of a whole chunk: 12 for 4096 elements. The last
 * chunk, where short, keeps its share of the units, rounded up, so that its record is shorter. A
 * block that the end of the tensor cuts is sent with zeros after it.
 *
 * Pure. Nothing in a record is aligned.
 */
#ifndef RINGCOMM_SPARSE_FORMAT_H
#define RINGCOMM_SPARSE_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#include "../include/ringcomm_sparse.h"
#include "../kernels/kernels.h"

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

#endif
