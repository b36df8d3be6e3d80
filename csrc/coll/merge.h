/* merge.h - the machine of plans that merge (doubling, halving); for work.c.
 *
 * Each segment of a part goes through its turns by itself: a contribution that comes too early
 * waits (operands.h), the next one is reduced with the value so far, and the sum is sent on at
 * once. Ranks compute the same sum from the same encoded operands in the same order, or one does
 * for all.
 *
 * Memory. A sum is made in the buffer in which its last operand came, and sent from there; the
 * buffer before it lives on as long as a frame needs it. The result is made in dst, or encoded for
 * dst and for the ranks that it is sent on to. In doubling, a rank's own values are copied before
 * they are sent: it may have the result, and its partner still not have them. In halving the result
 * cannot be there before they are.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_MERGE_H
#define RINGCOMM_MERGE_H

#include "work.h"

/* Makes room for what is merged here. Returns RC_NO_MEMORY or RC_OK. */
rc_result merge_init(rc_work *w);
/* Queues copies of this rank's own values as a chunk, and keeps them for the part's turns. */
rc_result merge_start(rc_work *w, uint32_t chunk);
/* Takes a contribution, and its buffer, when it has come. The work may be complete with the last
 * frame. */
rc_result merge_take(rc_work *w, const frame_header *h, pool_buffer *buffer);
/* Sends on the result of a segment, which is stored already. Takes over the buffer (or NULL). */
rc_result merge_pass_on(rc_work *w, const frame_header *h, const uint8_t *payload,
                        pool_buffer *buffer);

#endif
