/* outbox.h - the frames on their way out of one socket, and which thread sends them.
 *
 *   pushed --> list --> sendmsg --> gone --> back --> given back to whoever pushed them
 *
 * An outbox belongs to the driver, or is handed over to the sender (sender.h). The list and gone
 * are touched by the driver alone, under the engine's lock, or, while it is handed over, under the
 * sender's; back always belongs to the driver. An outbox is taken back with all that is in it, when
 * no system call is at work on it.
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
#include "../base/list.h"
#include "../base/pool.h"
#include "frame.h"

enum { OUTBOX_FRAMES = 16 }; /* in one system call at most */

/* Place of a frame that may not leave yet (held.h). */
typedef struct held_place {
    keyed_entry of_tag;       /* of a send */
    struct out_frame *before; /* the send that was held before it; the one after it is next */
    struct out_frame *child, *sibling; /* of a collective, in the heap */
    uint64_t order;                    /* of a collective: order of being held */
} held_place;

/* A frame on its way out. */
typedef struct out_frame {
    struct out_frame *next;
    held_place held;
    frame_header header;
    uint8_t header_bytes[FRAME_HEADER_BYTES];
    uint8_t sealed;         /* header_bytes are written */
    uint8_t has_left;       /* was in a socket as a whole */
    uint8_t is_recycled;    /* goes back to a free list, not to free() */
    const uint8_t *payload; /* header.length bytes */
    pool_buffer *buffer;    /* holds the payload, or NULL */
    uint8_t *copy;          /* holds it in memory of the frame's own, or NULL */
    void *owner;            /* the work it belongs to, NULL for control frames, and for those that
                               have left and need nothing of it */
    list_node borrowed;     /* in the owner's list of frames that have left and need its memory */
    const void *encode_src; /* elements still to be encoded into a buffer, or NULL */
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
    OUTBOX_READY,   /* the sender is to send from it */
    OUTBOX_SENDING, /* the sender does, without its lock: frames must stay */
    OUTBOX_FULL,    /* the socket takes no more for now */
    OUTBOX_EMPTY    /* nothing to send, or the socket is broken */
} outbox_state;

typedef struct outbox {
    frame_queue list, gone, back;
    size_t sent; /* bytes of the list's first frame that are in the socket already */
    _Atomic uint64_t sent_bytes, last_tx; /* total; ns */

    /* Fields of an outbox that is handed over, under the sender's lock (sender.c). */
    int fd;
    outbox_state state;
    int known;       /* is in the sender's epoll set */
    int news;        /* something for the driver to settle */
    int wanted;      /* the driver waits to take it back */
    int broken;      /* the socket takes nothing any more */
    atomic_int full; /* state is OUTBOX_FULL; read without the lock */
    /* Tells the driver that frames are in back; returned: the outbox belongs to the driver again.
     */
    void (*settle)(struct outbox *box, int returned);
    struct outbox *next, *prev;
} outbox;

/* Frames for one system call. */
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

/* Writes the frame's header bytes, unless they are written. */
void frame_seal(out_frame *frame);
/* Collects the unsent part of the first frames: at least one, more as long as they stay within most
 * bytes.
 */
void outbox_gather(const outbox *box, outbox_batch *batch, size_t most);
/* Sends a batch. Returns the bytes that the socket took: fewer than the batch has if it is full, or
 * the kernel short of memory; -1 if it will never take any. */
ssize_t outbox_send(outbox *box, int fd, const outbox_batch *batch);
/* Notes that so many bytes are in the socket; moves frames that are in it as a whole to gone. */
void outbox_advance(outbox *box, size_t bytes);
/* Moves frames from gone to back, to be given back. */
void outbox_reclaim(outbox *box);

#endif
