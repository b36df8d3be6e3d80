/* merge.h - the machine of plans that merge (doubling, halving); for work.c.
 *
 * Each segment of a part goes through its turns by itself: what comes too early waits (turns.h),
 * what is next is reduced with what is there, and what that makes is sent on at once. Ranks compute
 * the same sum from the same encoded operands in the same order, or one does for all.
 *
 * Memory. A sum is made in the buffer in which its last operand came, and sent from there; the
 * buffer before it lives on as long as a frame needs it. The result is made in dst, or encoded for
 * it and for those it is passed on to. In doubling, a rank's own values are copied before they are
 * sent: it may have the result, and its partner still not have them. In halving the result cannot
 * be there before they are.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_MERGE_H
#define RINGCOMM_MERGE_H

#include "work.h"

/* Room for what is merged here. */
rc_result merge_init(rc_work *w);
/* In doubling: queues copies of this rank's own values, unless others come in first. */
rc_result merge_start(rc_work *w);
/* A contribution is there; takes over its buffer. The work may be over with the last frame. */
rc_result merge_take(rc_work *w, const frame_header *h, pool_buffer *buffer);
/* The result of a segment is there, and stored; passes it on. Takes over the buffer (or NULL). */
rc_result merge_pass_on(rc_work *w, const frame_header *h, const uint8_t *payload,
                        pool_buffer *buffer);

#endif
