/* joined.h - how a work joins all ranks' contributions to a segment (direct, one-shot), and passes
 * the result on. Part of work.c's machine.
 *
 * A join takes place when the last thing that it waits for is there: the others' contributions, and
 * in one-shot this rank's own, or that it has left.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_JOINED_H
#define RINGCOMM_JOINED_H

#include "work.h"

/* Room for what is joined here: this rank's part, or everything. RC_NO_MEMORY or RC_OK. */
rc_result joined_init(rc_work *w);
/* A contribution has come. Takes over its buffer. */
rc_result joined_take(rc_work *w, const frame_header *h, pool_buffer *buffer);
/* All that a segment waits for is there. chunk: any that brings some of it. Where the result is
 * passed on, the work may be over with the last frame. */
rc_result joined_segment(rc_work *w, uint32_t chunk, uint32_t segment);
/* One thing less that a segment waits for: see join_left. RC_NO_MEMORY or RC_OK. */
rc_result joined_left(rc_work *w, uint32_t segment);

#endif
