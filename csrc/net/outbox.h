/* outbox.h - the frames on their way out of one socket, and who sends them.
 *
 *   pushed --> list --> sendmsg --> gone --> back --> given back to whoever pushed them
 *
 * An outbox is the driver's, or it is handed over to the sender (sender.h). The list and what is
 * gone are touched by the driver alone, under the engine's lock, or, while it is handed over, under
 * the sender's; back is the driver's always. Who takes an outbox back takes it with all that is in
 * it, at a moment when no system call is at work on it.
 *
 * Invariants. Frames go in the order in which they were pushed. A payload does not change from the
 * push until its frame is given back, and the header is sealed (CRC and all) before a byte of it
 * leaves.
 */
#ifndef RINGCOMM_OUTBOX_H
#define RINGCOMM_OUTBOX_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "../base/keyed.h"
#include "../base/pool.h"
#include "frame.h"

enum { OUTBOX_FRAMES = 16 }; /* in one system call */

/* Where a frame stands that may not leave yet (held.h). */
typedef struct held_place {
    keyed_entry of_tag;       /* a send's */
    struct out_frame *before; /* the send that was held before it; the one after it is next */
    struct out_frame *child, *sibling; /* a collective's, in the heap */
    uint64_t order;                    /* the same: of those held */
} held_place;

/* A frame on its way out. */
typedef struct out_frame {
    struct out_frame *next;
    held_place held;
    frame_header header;
    uint8_t header_bytes[FRAME_HEADER_BYTES];
    uint8_t sealed;         /* header_bytes are made */
    const uint8_t *payload; /* header.length bytes */
    pool_buffer *buffer;    /* holds the payload, or NULL */
    void *owner;            /* the work it belongs to, NULL for control frames */
    const void *encode_src; /* not yet encoded: elements to encode into a buffer */
    uint64_t encode_count;
    uint8_t text[]; /* payload of control frames */
} out_frame;

typedef struct frame_queue {
    out_frame *head, *tail;
} frame_queue;

void queue_push(frame_queue *q, out_frame *frame);
out_frame *queue_pop(frame_queue *q);

typedef enum outbox_state {
    OUTBOX_DRIVERS, /* not handed over */
    OUTBOX_READY,   /* the sender shall go on with it */
    OUTBOX_SENDING, /* and does: out of its lock, with frames that may not go away */
    OUTBOX_FULL,    /* the socket takes nothing more just now */
    OUTBOX_EMPTY    /* nothing to send; or nothing that the socket would take (broken) */
} outbox_state;

typedef struct outbox {
    frame_queue list, gone, back;
    size_t sent; /* bytes of the list's first frame that are in the socket already */
    _Atomic uint64_t sent_bytes, last_tx; /* ever; ns */

    /* Of one that is handed over, under the sender's lock (sender.c). */
    int fd;
    outbox_state state;
    int known;       /* to its epoll set */
    int news;        /* for the driver */
    int wanted;      /* the driver waits to take it back */
    int broken;      /* the peer takes nothing more */
    atomic_int full; /* state is OUTBOX_FULL; for a look without the lock */
    /* For the driver: there is something in back; the outbox may have returned to it. */
    void (*settle)(struct outbox *box, int returned);
    struct outbox *next, *prev;
} outbox;

/* What one system call is to send. */
typedef struct outbox_batch {
    struct iovec iov[2 * OUTBOX_FRAMES];
    out_frame *frames[OUTBOX_FRAMES];
    int iovs, count;
    size_t bytes;
} outbox_batch;

static inline size_t frame_bytes(const out_frame *frame)
{
    return FRAME_HEADER_BYTES + (size_t)frame->header.length;
}

/* Makes the frame's header bytes, unless they are made. */
void frame_seal(out_frame *frame);
/* The unsent part of the first frames: at least one, more as long as they stay within most bytes.
 */
void outbox_gather(const outbox *box, outbox_batch *batch, size_t most);
/* Sends it. Returns the bytes that the socket took: fewer than there are if it is full; -1 if it
 * will never take any. */
ssize_t outbox_send(outbox *box, int fd, const outbox_batch *batch);
/* So many bytes are in the socket: frames that are so as a whole are gone. */
void outbox_advance(outbox *box, size_t bytes);
/* What is gone may be given back. */
void outbox_reclaim(outbox *box);

#endif
