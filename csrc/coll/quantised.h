/* quantised.h - the machine of codecs of few bits, with error feedback; for work.c.
 *
 * Problem. Such a codec loses much each time, so values may be encoded only twice on their way: as
 * a rank's contribution, and as a sum. It encodes as fast as memory can be read, so nothing may go
 * through memory twice. And what was lost, its residual, may be replaced only if the whole work is
 * a success everywhere.
 *
 * Design. In an all-reduce every rank sends its contribution to a part to the part's owner
 * (direct), which adds them in order of rank, encodes the sum for all, and decodes it for itself;
 * among two ranks each gets the other's contribution and adds for itself (one-shot). A
 * reduce-scatter is the first half of direct. In an all-gather each rank's values are encoded once,
 * go around, and are decoded everywhere, by that rank too.
 *
 *   src + residual --encode--> frame ... join --encode--> frames ... decode --> dst
 *         left <-'   (as it leaves)        '--> left, dst          (as it comes)
 *
 * A contribution is encoded when its frame leaves, so encoding, the wire and joins overlap. Of each
 * peer's contributions only a few are under way at a time, and they leave in the order in which
 * they are needed: first the first segments of all parts. So parts come together one segment after
 * the other, results begin to flow early, and owners keep little.
 *
 * Contributions to an all-reduce may be encoded already (rc_call.encoded). Then they are sent from
 * where they lie, except the one to this rank's own part, which is not encoded; and results stay
 * encoded. Among two ranks both contributions stay, and the caller adds them (encoded.c). Other
 * ranks see no difference.
 *
 * Poison. A value that is not finite makes some block of the result NaN, which tells every rank
 * that sees the block: in an all-reduce and an all-gather all ranks do. Then the whole result is
 * made NaN and the residuals stay as they were. In a reduce-scatter a rank knows of its own values
 * and its own result only.
 *
 * Invariants. A residual is read and written once, and becomes the current one only in
 * quantised_finish. receives_left counts a contribution when it is joined, so that a work is not
 * over, nor its result put into shared memory, before that result exists. Threading: under the
 * engine's lock.
 */
#ifndef RINGCOMM_QUANTISED_H
#define RINGCOMM_QUANTISED_H

#include "work.h"

/* Has this machine run the work: allocates its state, once env and codec are known and before there
 * is a plan. */
rc_result quantised_create(rc_work *w);
void quantised_destroy(rc_work *w);

#endif
