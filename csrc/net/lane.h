/* lane.h - one TCP connection: frames out, frames in.
 *
 * A lane carries frames in order and knows nothing of collectives. Its link gives it frames to send
 * (lane_push); what arrives is announced to the lane's handler when its header is known, so that
 * the handler says where the payload shall go, and again when the payload is there and checked.
 *
 *      link queue --> outbox --> sendmsg                    recvmsg --> rbuf --> header
 *                     (several frames a call)                    \---> payload, straight into place
 *
 * A read takes the rest of the payload in progress and, behind it, the start of the next frame into
 * a small buffer, so a stream of frames costs one system call each, small ones less. Where it
 * comes slowly enough for the driver to sleep, that is woken for a large payload when all is there.
 *
 * Invariants. A header is looked at, and a payload given to the handler, once, whole, and only with
 * a correct CRC of its own. Frames
 * given to lane_push are sent whole or the lane is dead. After lane_close nothing is touched.
 * Threading: under the engine's lock, but for the outbox while it is handed to the sender
 * (sender.h). Ownership: a frame's payload is borrowed until its release.
 */
#ifndef RINGCOMM_LANE_H
#define RINGCOMM_LANE_H

#include "engine.h"
#include "meter.h"
#include "outbox.h"
#include "ports.h"

enum { LANE_RBUF_BYTES = 8192, LANE_END_BYTES = 88 };

typedef struct lane lane;

/* Where a payload shall be received. */
typedef struct rx_place {
    uint8_t *data;       /* header.length bytes */
    pool_buffer *buffer; /* holds data, or NULL */
    void *owner;         /* the work it belongs to, or NULL */
} rx_place;

/* What a lane needs of its owner. A result other than RC_OK from begin or end kills the lane. */
typedef struct lane_handler {
    rc_result (*begin)(lane *ln, const frame_header *h, rx_place *place);
    rc_result (*end)(lane *ln, const frame_header *h, rx_place *place);
    void (*sent)(lane *ln, out_frame *frame); /* the frame is in the socket: release it */
    void (*room)(lane *ln);                   /* pushed frames are sent: more may be */
    void (*dead)(lane *ln);                   /* error holds why; close it or the communicator */
} lane_handler;

/* What a lane runs over: both ends as errors name them, and the port here. */
typedef struct lane_path {
    int port; /* index of the network interface whose loss ends the lane; 0: none is watched */
    char here[LANE_END_BYTES], there[LANE_END_BYTES]; /* "eth1 10.8.0.1 on node0"; "": not known */
} lane_path;

/* How a lane fares, as its communicator judges it (comm_lanes.c). Times in ns. */
typedef struct lane_health {
    uint64_t heard;              /* last_rx when it was looked at last */
    uint64_t silent;             /* for so long nothing came while the peer lived */
    uint64_t stuck;              /* for so long nothing in flight was acknowledged meanwhile */
    uint64_t acked;              /* bytes */
    uint64_t marks[2], times[2]; /* acked, some time ago: the older first */
    port_state port;             /* of the port here */
    int no_address;              /* that has lost the lane's address */
    uint64_t port_lost;          /* since when one of the two is so; 0: neither */
    int lost;                    /* it was judged, and nothing it has sent is waited for */
} lane_health;

struct lane {
    engine_source source; /* first: the engine hands it back */
    rc_engine *engine;
    const lane_handler *handler;
    void *link;
    int rail;
    int index; /* on its link */
    int peer;
    lane_path path;
    lane_health health;
    rc_error error; /* first failure */

    outbox out;
    uint64_t out_bytes; /* of frames that were pushed and not given back, sent ones included */
    uint64_t pushed;    /* bytes given to the socket once all that is in the outbox is sent */
    uint64_t beat_end;  /* that was pushed, after the last heartbeat: until it is sent, none more */
    struct sender *sender; /* that large frames are handed to, or NULL */
    int handed;            /* the outbox is the sender's now */

    uint8_t rbuf[LANE_RBUF_BYTES];
    size_t rbuf_start, rbuf_end;
    uint32_t epoch, max_length;
    int in_payload;
    int low_water; /* bytes that have to be there before the driver wakes for them */
    int is_fast;   /* what came last came at a fast port's speed */
    int deaf;      /* what arrives is thrown away (lane_detach) */
    int mute;      /* nothing can be sent any more; what was received may still end in a goodbye */
    int goodbye;   /* the peer has sent its last frame here */
    frame_header rx;
    uint32_t rx_crc; /* of the payload */
    uint32_t rx_have;
    rx_place rx_place;
    uint8_t rx_text[FRAME_TEXT_BYTES]; /* payload of control frames */

    uint64_t last_rx; /* ns */
    uint64_t received_bytes, sent_frames, received_frames;

    int striped;         /* it has siblings */
    double rate;         /* at which the peer receives, bytes per ns; 0: not known */
    double free_at;      /* when it will have sent all that it was given (link.c), ns */
    uint64_t passed;     /* bytes given to its siblings since it was given some (link.c) */
    rate_meter arrivals; /* of a striped lane: to be told to the peer */
    double told;         /* the rate that the peer was told last */
    uint64_t told_at;
    int backlog; /* unsent bytes that the kernel may hold; 0: not limited */
};

/* Takes over fd and watches it. On failure fd is closed. */
rc_result lane_open(lane *ln, int fd, uint32_t max_length, uint32_t epoch);
/* For links of several lanes: measures what arrives, and asks the kernel to take only as much as it
 * can send soon, so that the rest stays where it can be given to a sibling. */
void lane_stripe(lane *ln);
/* Takes in what the peer measured, bytes per ns. */
void lane_set_rate(lane *ln, double rate);
/* Puts a frame behind the others and sends what the socket takes. */
void lane_push(lane *ln, out_frame *frame);
/* 1 if the next of several lanes' frames may be pushed here: more would wait where no sibling can
 * have it. */
int lane_has_room(const lane *ln);
/* Wakes the driver for whatever has come, so that a peer whose payload comes slowly gives a sign of
 * life. */
void lane_stir(lane *ln);
/* Bytes that the peer has not acknowledged yet, in the socket or still in the list. */
uint64_t lane_unacked(const lane *ln);
/* Bytes that the peer has acknowledged. *in_flight: 1 if others are on their way, and not only
 * waiting for the peer to make room; 0 for another kind of socket. */
uint64_t lane_acked(const lane *ln, int *in_flight);
/* What TCP knows of the connection: segments sent again, and the smoothed round trip in seconds.
 * Zeros for another kind of socket. */
void lane_ask_tcp(const lane *ln, uint64_t *retransmits, double *rtt);
/* Makes the lane independent of memory that is not its own: the rest of a half-sent payload is
 * copied, frames not begun are released, what arrives is thrown away. Afterwards only control
 * frames may be pushed. */
void lane_detach(lane *ln);
/* Lets go of its frames through handler->sent and closes the socket. */
void lane_close(lane *ln);

#endif
