/* turns.h - values that are merged one after the other, in an order that is not that of arrival.
 *
 * A unit is what is merged as a whole: a segment of a part. It has what was merged so far, and room
 * for a contribution to each turn still to come. Contributions hold pool buffers, as in join.h, but
 * only until their turn.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_TURNS_H
#define RINGCOMM_TURNS_H

#include "../base/pool.h"
#include "../include/ringcomm.h"

typedef struct turns_unit {
    pool_buffer *value; /* what was merged so far; NULL: nothing yet, or gone */
    uint32_t over;      /* turns */
} turns_unit;

typedef struct turns {
    uint32_t units, most; /* turns that any unit has */
    turns_unit *of;       /* [unit] */
    pool_buffer **kept;   /* [unit][turn] */
} turns;

/* RC_NO_MEMORY or RC_OK; turns of zeros, as those without units, need no turns_destroy. */
rc_result turns_init(turns *t, uint32_t units, uint32_t most);
/* Gives back what is kept. */
void turns_destroy(turns *t, pool *buffers);

/* Takes over the contribution to a turn. */
void turns_keep(turns *t, uint32_t unit, uint32_t turn, pool_buffer *buffer);
/* The contribution to the unit's next turn, or NULL if it has not come or there is none. It is the
 * caller's from then on. */
pool_buffer *turns_next(turns *t, uint32_t unit);

#endif
