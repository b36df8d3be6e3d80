/* held.h - data frames that may not leave yet, because the peer has not called their collective or
 * receive.
 *
 *   collectives   a heap: the lowest seq first, and of one seq in the order in which they were held
 *   sends         in the order in which they were held; and a queue for each tag, since the peer's
 *                 call of a receive releases the sends of its tag, wherever they stand
 *
 * All operations take constant time, except that taking out a collective's frame takes the
 * logarithm of their number. Invariant: the frames of one tag are pushed in the order of their
 * sends. Threading: under the engine's lock.
 */
#ifndef RINGCOMM_HELD_H
#define RINGCOMM_HELD_H

#include "outbox.h"

/* The held frames; all zeros: none. */
typedef struct held_frames {
    out_frame *lowest; /* first of the collectives' frames */
    uint64_t order;
    out_frame *oldest, *newest; /* of the sends' frames */
    keyed_queues by_tag;
    uint32_t count;
} held_frames;

void held_push(held_frames *held, out_frame *frame);
/* Returns the next to leave of the collectives' frames or of the sends'; NULL if there is none. */
const out_frame *held_first(const held_frames *held, int is_send);
/* Takes out what held_first returns. */
out_frame *held_pop(held_frames *held, int is_send);
/* Return the next to leave of a tag's sends, and take it out; NULL if there is none. */
const out_frame *held_first_of_tag(held_frames *held, uint32_t tag);
out_frame *held_pop_of_tag(held_frames *held, uint32_t tag);
/* Returns 1 if a frame with this header must not leave before some that are held. */
int held_before(held_frames *held, const frame_header *h);
/* Frees the table of tags. Nothing may be held. */
void held_destroy(held_frames *held);

#endif
