/* gated.h - how a work runs whose source is still on its way, and whose result is wanted piece by
 * piece. Part of work.c's machine.
 *
 * It is a work of the same plan, with the same frames, so that other ranks cannot tell and results
 * have the same bits. What starts here is queued only as far as the gate (gate.h) is open. What
 * comes to be reduced with values that are not there is held in its pool buffer, as what is joined
 * is; a join waits for this rank's values as for another's. (A codec that quantises queues its
 * contributions by itself, quantised.c, as far as the gate is open.) Results cannot come before
 * that: they are made of this rank's values, too. So in place, a value of the source is never
 * written before it was read, and once final nothing is written again.
 *
 * The gate is opened in the communicator's pump, some units at a time, not by who shows it what is
 * there. Threading: under the engine's lock.
 */
#ifndef RINGCOMM_GATED_H
#define RINGCOMM_GATED_H

#include "gate.h"
#include "work.h"

/* Instead of queueing all that starts here. RC_NO_MEMORY or RC_OK. */
rc_result gated_start(rc_work *w);
/* Goes on with what the gate has let in since, a few units of it. RC_NO_MEMORY or RC_OK; the work
 * may be over afterwards. */
rc_result gated_go_on(rc_work *w);
/* 1 if a segment of that chunk may be stored: this rank has done its part for it. */
int gated_may_store(const rc_work *w, uint32_t chunk, uint32_t segment);
/* Takes over a segment that came to be reduced, if it is too early; 0 if it is not. */
int gated_holds(rc_work *w, const frame_header *h, pool_buffer *buffer);
/* A segment of the result is in dst for good. */
void gated_final(rc_work *w, uint32_t chunk, uint32_t segment);

#endif
