/* join.h - contributions to the segments of one part, kept until every rank's has come.
 *
 * Contributions come in any order; a sum must not depend on it, so none is added before all have
 * come. Each holds a pool buffer, so this suits small tensors.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_JOIN_H
#define RINGCOMM_JOIN_H

#include "../base/pool.h"
#include "../include/ringcomm.h"

typedef struct join {
    int world_size;
    uint32_t segments;
    pool_buffer **kept; /* [segment][rank] */
    int *missing;       /* [segment]: contributions still to come */
    const void **wires; /* [rank]; see join_wires */
} join;

/* Prepares a join. expected: contributions that a segment waits for. Returns RC_NO_MEMORY or RC_OK;
 * a join of zeros, or without segments, needs no join_destroy. */
rc_result join_init(join *j, uint32_t segments, int world_size, int expected);
/* Gives the buffers back and frees the join. */
void join_destroy(join *j, pool *buffers);

/* Takes over a rank's contribution. Returns 1 if it was the last one expected. */
int join_keep(join *j, uint32_t segment, int rank, pool_buffer *buffer);
/* Counts an event that the segment waits for like a contribution, as that a frame sent from src has
 * left, so that this rank's own values may be overwritten. Returns 1 if it was the last one
 * expected. */
int join_note_event(join *j, uint32_t segment);
/* Returns the contributions by rank, NULL where there is none; valid until the next call. */
const void *const *join_wires(join *j, uint32_t segment);
/* Gives back the buffers of a segment's contributions. */
void join_drop(join *j, uint32_t segment, pool *buffers);

#endif
