/* link.h - all lanes to one peer, and the flow of segments over them. The interface of net/ to
 * other folders. net/ owns what lies between works and network: sockets, the event loop, and the
 * threads that run it.
 *
 *   link.h    frames for one peer       engine.h  the loop, and which thread runs it; pollset.h
 *   held.h    .. that may not leave     sender.h  the second thread
 *   lane.h    one connection            ports.h   news of the host's ports
 *   outbox.h  .. what it sends          tags.h    numbers of sends and receives
 *   frame.h   a header                  meter.h   the rate of arrivals
 *
 * Striping. Frames queue here, not in the lanes. Each goes to the lane that would finish it first.
 * The time for which a lane is busy follows from the rate at which the peer says that its data
 * arrives, and is bounded by what is unacknowledged. If the chosen lane's socket is full, the frame
 * waits for it rather than going to a lane that would finish later, unless that one finishes before
 * the others have sent all that is queued. So ports share a load in the proportion of their speeds
 * with no weights to set, and a slow port never hoards segments.
 *
 * Credit. A peer may run ahead of us: its frames can arrive before the caller here has called the
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
    uint64_t queued; /* bytes in queue */
    held_frames held;

    uint64_t called;            /* the peer has started all collectives below this seq */
    uint64_t submitted;         /* its program has called those below this seq, or below called */
    tag_table receives_posted;  /* receives that the peer has called for this rank's sends, below
                                   these numbers; under the engine's lock, as is the next */
    tag_table sends_held;       /* sends that the peer holds back for want of credit, below these
                                   numbers; the same */
    tag_table started;          /* receives from this peer: numbers of the next to be called here */
    uint64_t credit;            /* bytes; LINK_CREDIT_SEGMENTS segments with their headers */
    uint64_t sent;              /* bytes of data frames that were let go */
    uint64_t peer_consumed;     /* bytes of these that the peer is known to have consumed */
    uint32_t consumed;          /* bytes of the peer's data frames consumed here, modulo 2^32 */
    uint32_t consumed_reported; /* value last sent to the peer */
    uint64_t early_bytes;       /* bytes of data frames kept here for collectives not yet called */
    keyed_queues early[2]; /* these frames, and announced calls, by seq: of collectives, of sends
                              (comm/unexpected.c) */
    keyed_queues receives; /* receives in flight from this peer, by name (comm/active.c) */
    list unannounced;      /* receives not announced to the peer yet (comm/announce.c) */
    int announce_pending;  /* an announcement is due, and could not be sent */
    int asks_pending;      /* so is one of a send that is held back */

    tag_table numbers;       /* of sends and receives to and from this peer; under the inbox lock */
    uint64_t last_alive_ns;  /* of the last sign of life seen (comm/lanes.c) */
    uint64_t alive_since_ns; /* since when signs of life came without a long pause */
    int is_told;             /* it has this rank's goodbye or abort: nothing follows */
    int goodbyes;            /* lanes on which the peer said goodbye */
    int owes, is_owed;       /* at the peer's goodbye, and at this rank's: 1 if frames that it needs
                                may not have come (comm/recover.c) */
    frame_header damaged;    /* of the last frame that came damaged */
    uint64_t left_at;        /* its seq in the last goodbye: it calls no later collective */
} peer_link;

/* Returns the bytes of credit that a data frame takes. */
static inline uint32_t link_cost(const frame_header *h)
{
    return FRAME_HEADER_BYTES + h->length;
}

/* Queues a data frame and sends what can leave. */
void link_send(peer_link *ln, out_frame *frame);
/* Queues a data frame; link_pump sends it. */
void link_queue(peer_link *ln, out_frame *frame);
/* Sends what can leave. */
void link_pump(peer_link *ln);
/* Sends a control frame before all queued data; lane_index < 0: on the lane with the least to send.
 * Returns 0 if it was dropped: the lane is gone, or memory is short. */
int link_control(peer_link *ln, out_frame *frame, int lane_index);
/* Returns how many bytes are to be sent on a lane that is so slow that it gets little data or none,
 * to find out whether it still is; 0: none now. Notes that they are sent. */
uint64_t link_probe(peer_link *ln, lane *l);
/* Queues frames of a lost lane before all others, in their order. */
void link_send_again(peer_link *ln, frame_queue *frames);
/* Returns 1 if the peer has left: it has said so, and no lane may bring anything any more. Where
 * frames are kept one goodbye is enough, as it comes behind all of them. */
int link_is_left(const peer_link *ln);
/* Returns 1 if a lane is lost. */
int link_has_lost(const peer_link *ln);
/* Notes what a frame of the peer says about its calls and its consumption. */
void link_learn(peer_link *ln, const frame_header *h);
/* Returns the seq below which the peer's program has called all collectives, as far as is known. */
static inline uint64_t link_submitted(const peer_link *ln)
{
    return ln->submitted > ln->called ? ln->submitted : ln->called;
}
/* Notes that a receive takes this send of the peer: those before it are no longer held back. */
void link_note_receive(peer_link *ln, uint64_t name);
/* Returns 1 if the peer has told that it holds back the send of this name. */
int link_awaits_send(const peer_link *ln, uint64_t name);
/* Returns 1 if this rank's consumption should be reported, before the peer runs out of credit. */
int link_owes_credit(const peer_link *ln);

#endif
