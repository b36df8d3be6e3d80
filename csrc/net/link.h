/* link.h - all lanes to one peer, and the flow of segments over them.
 *
 * Striping. Frames queue here, not in the lanes. Each goes to the lane that would finish it first.
 * How long a lane is busy with what it has follows from the rate at which the peer says that its
 * data arrives, and is bounded by what is unacknowledged. If that lane's socket takes nothing more
 * just now, the frame waits for it rather than going to a lane that would finish later,
 * unless that one is through before the others are with all that is queued. So ports
 * share a load in the proportion of their speeds with no weights to set, and a slow port never
 * hoards segments.
 *
 * Credit. A peer may run ahead of us: its frames can arrive before our caller has called the
 * collective. They are kept, but no more than LINK_CREDIT_SEGMENTS segments of them, so memory is
 * bounded and reading never stops, which is what rules out deadlock. A data frame may leave if the
 * peer is known to have called its collective, or if the bytes sent but not known to be consumed
 * are within the credit. What is known comes from the peer's frames: seq and `consumed`. Headers
 * count too, or small frames would be kept without bound.
 *
 *   queue: may leave now      held: waits for the peer's call (held.h). Collectives and sends do
 *                             not wait for each other, nor sends of one tag for those of another
 *
 * Threading: under the engine's lock, unless marked otherwise.
 */
#ifndef RINGCOMM_LINK_H
#define RINGCOMM_LINK_H

#include "../base/list.h"
#include "held.h"
#include "lane.h"
#include "tags.h"

enum { LINK_CREDIT_SEGMENTS = 8, LINK_MAX_LANES = 256 };

typedef struct peer_link {
    int peer;
    void *owner;
    lane **lanes;
    int lane_count;
    /* Makes the rest of the header and the encoded payload just before the frame leaves; 0 on
     * failure. */
    int (*prepare)(struct peer_link *ln, out_frame *frame);

    frame_queue queue;
    uint64_t queued; /* bytes in it */
    held_frames held;

    uint64_t called;        /* the peer has called all collectives below */
    tag_table told;         /* receives: the peer has called those of all our sends below; engine's
                               lock, as is the next */
    tag_table started;      /* receives: the next from this peer to be called here */
    uint64_t credit;        /* bytes; LINK_CREDIT_SEGMENTS segments with their headers */
    uint64_t sent;          /* bytes of data frames that left the credit's hold */
    uint64_t peer_consumed; /* of these, consumed by the peer as far as is known */
    uint32_t consumed;      /* bytes of the peer's data frames consumed here, modulo 2^32 */
    uint32_t consumed_told; /* the last value that the peer was told */
    uint64_t early_bytes;   /* of data frames kept here for collectives not yet called */
    keyed_queues early[2];  /* they, and calls announced, by seq: of collectives, of sends
                               (comm_unexpected.c) */
    keyed_queues receives;  /* in flight, from this peer, by name (comm_active.c) */
    list untold;            /* of these, of which the peer has not been told (comm_announce.c) */
    int owes_calls;         /* it should have been, and could not be */

    tag_table numbers; /* sends and receives to and from this peer; under the inbox lock */
    uint64_t sign;     /* of life, the last that was looked at (comm_lanes.c); ns */
    uint64_t steady;   /* since when there was no long pause between two of them */
    int goodbyes;      /* lanes on which the peer said goodbye */
    uint64_t left_at;  /* after the last of them: it calls no collective from here on */
} peer_link;

/* What a data frame takes of the credit. */
static inline uint32_t link_cost(const frame_header *h)
{
    return FRAME_HEADER_BYTES + h->length;
}

/* Queues a data frame and sends what can go. */
void link_send(peer_link *ln, out_frame *frame);
/* Queues a data frame; link_pump sends it. */
void link_queue(peer_link *ln, out_frame *frame);
/* Sends what can go. */
void link_pump(peer_link *ln);
/* Sends a control frame before all queued data. lane_index < 0: on the lane that is soonest free.
 * Returns 0 if it was dropped: there is no such lane any more, or memory is short. */
int link_control(peer_link *ln, out_frame *frame, int lane_index);
/* Takes in what a frame of the peer says about its calls and its consumption. */
void link_learn(peer_link *ln, const frame_header *h);
/* 1 if the peer should be told of our consumption before it runs out of credit. */
int link_owes_credit(const peer_link *ln);

#endif
