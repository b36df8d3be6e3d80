/* join.h - contributions to the segments of one part, kept until every rank's has come.
 *
 * Contributions come in any order; a sum must not depend on it, so none is added before all are
 * there. Each holds a pool buffer, which makes this a way for little data.
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

/* expected: contributions that a segment waits for. RC_NO_MEMORY or RC_OK; a join of zeros, as one
 * without segments, needs no join_destroy. */
rc_result join_init(join *j, uint32_t segments, int world_size, int expected);
/* Gives back what is kept. */
void join_destroy(join *j, pool *buffers);

/* Takes over a rank's contribution; 1 if it was the last one expected. */
int join_keep(join *j, uint32_t segment, int rank, pool_buffer *buffer);
/* Something else that is awaited like a contribution, and kept elsewhere if it is one: as that a
 * rank's own is free to be overwritten as far as one frame goes. 1 if it was the last thing
 * expected. */
int join_left(join *j, uint32_t segment);
/* The contributions by rank, NULL where there is none; valid until the next call. */
const void *const *join_wires(join *j, uint32_t segment);
/* Gives back a segment's contributions. */
void join_drop(join *j, uint32_t segment, pool *buffers);

#endif
