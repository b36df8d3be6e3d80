/* quantised.h - the machine of codecs of few bits, with error feedback; for work.c.
 *
 * Problem. Such a codec loses much each time, so values may be encoded only twice on their way: as
 * a rank's contribution, and as a sum. It encodes as fast as memory can be read, so nothing may go
 * through memory twice. And what was lost, its residual, may be replaced only if the whole work is
 * a success everywhere.
 *
 * Design. Of an all-reduce, every rank's contribution to a part goes to the part's owner (direct),
 * which adds them in order of rank, encodes the sum for all, and decodes it for itself; among two
 * ranks each has the other's contribution and adds for itself (one-shot). A reduce-scatter is the
 * first half of direct. In an all-gather each rank's values are encoded once, go around, and are
 * decoded everywhere, by that rank too.
 *
 *   src + residual --encode--> frame ... join --encode--> frames ... decode --> dst
 *         left <-'   (as it leaves)        '--> left, dst          (as it comes)
 *
 * A contribution is encoded when its frame leaves, so encoding, the wire and joins overlap. Of each
 * peer's contributions only a few are under way at a time, and they leave in the order in which
 * they are needed: first the first segments of all parts. So parts come together one segment after
 * the other, results begin to flow early, and owners keep little.
 *
 * Contributions to an all-reduce may be encoded already (rc_call.encoded). Then they leave from
 * where they lie, but for that to this rank's own part, which is there as it is; and results stay
 * encoded, or among two ranks both contributions, which nobody adds here (encoded.h). Other ranks
 * cannot tell.
 *
 * Poison. A value that is not finite makes some block of the result NaN, and so known to every rank
 * that sees the block: in an all-reduce and an all-gather all ranks do. Then the whole result is
 * made NaN and the residuals stay as they were. In a reduce-scatter a rank knows of its own values
 * and its own result only.
 *
 * Invariants. A residual is read and written once, and becomes the current one only in
 * quantised_finish. receives_left counts a contribution when it is joined, so that a work is not
 * over, nor passed on through shared memory, before its result is there. Threading: under the
 * engine's lock.
 */
#ifndef RINGCOMM_QUANTISED_H
#define RINGCOMM_QUANTISED_H

#include "work.h"

/* 1 if this machine runs the work, given the ranks that it is about. */
int quantised_takes(const rc_call *call, int world_size);
/* What the machine needs, once env and codec are known and before there is a plan. */
rc_result quantised_create(rc_work *w);
void quantised_destroy(rc_work *w);
/* Begins with the feedback, and sends what starts here. */
rc_result quantised_start(rc_work *w);
/* Sends a segment to each peer that may have one. */
rc_result quantised_go_on(rc_work *w);
/* 1 if it would send one now. */
int quantised_may_go_on(const rc_work *w);

/* Bytes of a segment's payload; elements of the largest one. */
uint64_t quantised_bytes(const rc_work *w, uint64_t elems);
uint64_t quantised_segment(const rc_work *w);

/* Makes the payload of a frame that leaves. RC_NO_MEMORY or RC_OK. */
rc_result quantised_encode(rc_work *w, out_frame *frame);
/* A frame of the work is released. */
void quantised_released(rc_work *w, const out_frame *frame);
/* A payload is there. Takes over the buffer. */
rc_result quantised_end(rc_work *w, const frame_header *h, pool_buffer *buffer);
/* 1 if a value was not finite, and so all of the result is NaN; of a work that was a success. */
int quantised_poisoned(const rc_work *w);
/* The work is over, with this result: replaces the residuals, or leaves them. */
void quantised_finish(rc_work *w, rc_result result);

#endif
