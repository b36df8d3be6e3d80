/* turns.h - values that are merged in the plan's order, whatever the order in which they arrive.
 *
 * A unit is merged as a whole: a segment of a part. It has the sum so far, and room for a
 * contribution to each turn still to come. Contributions hold pool buffers, as in join.h, but only
 * until their turn.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_TURNS_H
#define RINGCOMM_TURNS_H

#include "../base/pool.h"
#include "../include/ringcomm.h"

typedef struct turns_unit {
    pool_buffer *value; /* the sum so far; NULL: nothing yet, or sent away */
    uint32_t over;      /* turns taken */
} turns_unit;

typedef struct turns {
    uint32_t units, most; /* turns that any unit has */
    turns_unit *of;       /* [unit] */
    pool_buffer **kept;   /* [unit][turn] */
} turns;

/* Prepares units of at most so many turns. Returns RC_NO_MEMORY or RC_OK; turns of zeros, or
 * without units, need no turns_destroy. */
rc_result turns_init(turns *t, uint32_t units, uint32_t most);
/* Gives the buffers back and frees the turns. */
void turns_destroy(turns *t, pool *buffers);

/* Keeps the contribution to a turn, and takes over its buffer. */
void turns_keep(turns *t, uint32_t unit, uint32_t turn, pool_buffer *buffer);
/* Takes out the contribution to the unit's next turn, for the caller to own; NULL if it has not
 * come or there is none. */
pool_buffer *turns_next(turns *t, uint32_t unit);

#endif
