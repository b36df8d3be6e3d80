/* operands.h - what ranks contribute to the units of a sum, kept until the plan's order lets it be
 * added. A unit is added as a whole: a segment of a part.
 *
 *   all at once   a unit waits until every operand has come: joined.h, quantised.h
 *   in turns      each is taken as soon as those before it are: merge.h
 *
 * Operands come in any order; a sum must not depend on it. Each holds a pool buffer, so this suits
 * small tensors.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_OPERANDS_H
#define RINGCOMM_OPERANDS_H

#include "../base/pool.h"
#include "../include/ringcomm.h"

typedef struct operands_unit {
    pool_buffer *value; /* in turns: the sum so far; NULL: nothing yet, or sent away */
    uint32_t over;      /* turns taken */
    uint32_t missing;   /* all at once: operands and events still to come */
} operands_unit;

typedef struct operands {
    uint32_t units, places;
    operands_unit *of;  /* [unit] */
    pool_buffer **kept; /* [unit][place]: a rank, or a turn */
    const void **wires; /* [place]; see operands_wires */
} operands;

/* Prepares units with so many places. missing: what each waits for where all are added at once.
 * Returns RC_NO_MEMORY or RC_OK; operands of zeros, or without units, need no operands_destroy. */
rc_result operands_init(operands *o, uint32_t units, uint32_t places, uint32_t missing);
/* Gives the buffers back and frees the operands. */
void operands_destroy(operands *o, pool *buffers);

/* Takes over a unit's operand. */
void operands_keep(operands *o, uint32_t unit, uint32_t place, pool_buffer *buffer);

/* Counts something that the unit has waited for: an operand that was kept; or that a frame sent
 * from src has left, so that this rank's own values may be overwritten. Returns 1 if nothing is
 * missing any more. */
int operands_count(operands *o, uint32_t unit);
/* Returns the data of a unit's operands by place, NULL where there is none; valid until the next
 * call. */
const void *const *operands_wires(operands *o, uint32_t unit);
/* Gives back the buffers of a unit's operands. */
void operands_drop(operands *o, uint32_t unit, pool *buffers);

/* Takes out the operand of the unit's next turn, for the caller to own; NULL if it has not come or
 * there is none. */
pool_buffer *operands_next(operands *o, uint32_t unit);

#endif
