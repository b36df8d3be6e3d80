/* gate.h - how much of a work's source is there, and how much of its result.
 *
 * A work may be submitted while its source is still on its way. Whoever brings it shows the gate
 * what has come, in any order and in stretches of any size; a unit, which is a segment of a part
 * (plan.h), is open when all of it was shown. The other way, the gate notes which units of the
 * result are final, and says when enough of them are that taking them is worth it: `most` elements,
 * or towards the end as many as are still missing, but not fewer than `least`. So what is left to
 * take when the last unit becomes final is little.
 *
 *   gate_show --> shown --gate_next--> open units     gate_final --> ready --gate_take--> taken
 *
 * Invariants. What is shown does not overlap, nor change from then on until it is final. A unit
 * becomes open once, final once, and is taken once. Threading: under the engine's lock, but for
 * ripe; before its work is submitted, it is its maker's.
 */
#ifndef RINGCOMM_GATE_H
#define RINGCOMM_GATE_H

#include <stdatomic.h>

#include "../base/pool.h"
#include "../plan/order.h"

typedef struct gate {
    order_stretch *shown; /* [shown_most] in the order of their coming */
    uint32_t shown_most, shown_count;
    uint32_t opened;      /* of them gate_next has been through; */
    uint64_t opened_part; /* of the next, so many elements */
    uint64_t least, most; /* elements */

    uint32_t units, per_part; /* 0 before gate_lay_out */
    uint64_t part_elems, segment_elems, total;
    uint64_t *missing;    /* [unit]: elements that are not there */
    pool_buffer **held;   /* [unit]: what came before it was open, or NULL */
    uint64_t *final;      /* a bit per unit */
    uint64_t *ready;      /* final and not taken */
    uint64_t ready_elems; /* of all these */
    uint64_t unfinal;     /* elements that are not final */
    atomic_int ripe;      /* there is something to take, and it is enough */
} gate;

/* shown: how often gate_show will be called, at most. NULL if memory is short. */
gate *gate_create(uint32_t shown, uint64_t least, uint64_t most);
void gate_free(gate *g); /* takes NULL */

/* These elements of the source are there. */
void gate_show(gate *g, order_stretch there);

/* The plan is known. RC_INTERNAL if it has no order: no unit will open. RC_NO_MEMORY or RC_OK. */
rc_result gate_lay_out(gate *g, const plan *p);
/* 1 if gate_next may have something. */
int gate_may_open(const gate *g);
/* The next unit that has become open; 0 if there is none now. */
int gate_next(gate *g, uint32_t *part, uint32_t *segment);
int gate_is_open(const gate *g, uint32_t part, uint32_t segment);
/* Takes over what came for a unit that is not open; gives it back, or NULL. */
void gate_hold(gate *g, uint32_t part, uint32_t segment, pool_buffer *buffer);
pool_buffer *gate_held(gate *g, uint32_t part, uint32_t segment);

/* The unit's result is final. 1 if that made the gate ripe. */
int gate_final(gate *g, uint32_t part, uint32_t segment);
/* The next stretch of the result that is final, which counts as taken from then on; 0 if there is
 * none, and then the gate is not ripe. */
int gate_take(gate *g, order_stretch *next);

/* The work is over. Returns what is held; if it was a success, all of the result is final. */
void gate_end(gate *g, pool *buffers, int success);

#endif
