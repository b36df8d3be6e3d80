/* lane.h - one TCP connection: frames out, frames in.
 *
 * A lane carries frames in order and knows nothing of collectives. Its link gives it frames to send
 * (lane_push); a frame that arrives is announced to the lane's handler when its header is known, so
 * that the handler says where the payload goes, and again when the payload has come and is checked.
 *
 *      link queue --> outbox --> sendmsg                    recvmsg --> rbuf --> header
 *                     (several frames a call)                    \---> payload, straight into place
 *
 * A read takes the rest of the payload in progress and, behind it, the start of the next frame into
 * a small buffer, so a stream of frames costs one system call each, small ones less. Where data
 * comes so slowly that the driver sleeps, it is woken for a large payload when all of it has come.
 *
 * Where a lane's frames are to survive it (`keeps`), each that is in the socket stays in `kept`
 * until the peer has told that it came: both ends count frames, and TCP keeps their order. Of a
 * lane that is lost the peer tells the same count once more, over another lane; what lies behind it
 * has not come and never will, and goes out again elsewhere.
 *
 * Invariants. A header or payload is given to the handler once, whole, and only if its CRC is
 * correct. Frames given to lane_push are sent whole or the lane is dead. After lane_close nothing
 * is touched; of a lost lane nothing is read any more. Threading: under the engine's lock, except
 * for the outbox while it is handed to the sender (sender.h). Ownership: a frame's payload is
 * borrowed until its release.
 */
#ifndef RINGCOMM_LANE_H
#define RINGCOMM_LANE_H

#include "engine.h"
#include "meter.h"
#include "outbox.h"
#include "ports.h"

enum { LANE_RBUF_BYTES = 8192, LANE_END_BYTES = 88 };

typedef struct lane lane;

/* States of a lane; lane_moves has what may follow what. */
typedef enum lane_state {
    LANE_NEW,
    LANE_OPEN,
    LANE_LEFT,     /* the peer has sent its last frame here */
    LANE_LOST,     /* without a socket; what it has kept is to be settled (lane_settle) */
    LANE_DETACHED, /* arrivals are thrown away (lane_detach) */
    LANE_CLOSED
} lane_state;

/* The states that may follow each, as bits. */
extern const unsigned lane_moves[];

/* Memory in which a payload is received. */
typedef struct rx_place {
    uint8_t *data;       /* header.length bytes */
    pool_buffer *buffer; /* holds data, or NULL */
    void *owner;         /* the work it belongs to, or NULL */
} rx_place;

/* Callbacks to a lane's owner. A result other than RC_OK from begin or end kills the lane. */
typedef struct lane_handler {
    rc_result (*begin)(lane *ln, const frame_header *h, rx_place *place);
    rc_result (*end)(lane *ln, const frame_header *h, rx_place *place);
    void (*left)(lane *ln, out_frame *frame); /* it is in the socket, and kept; `sent` follows */
    void (*sent)(lane *ln, out_frame *frame); /* it is in the socket, or has come: release it */
    void (*room)(lane *ln);                   /* pushed frames are sent: more can be pushed */
    void (*dead)(lane *ln);                   /* error holds why; close it or the communicator */
} lane_handler;

/* Route of a lane: both ends as errors name them, and the port here. */
typedef struct lane_path {
    int port; /* index of the network interface whose loss ends the lane; 0: none is watched */
    char here[LANE_END_BYTES], there[LANE_END_BYTES]; /* "eth1 10.8.0.1 on node0"; "": not known */
} lane_path;

/* Health of a lane, as its communicator judges it (comm/lanes.c). Times in ns. */
typedef struct lane_health {
    uint64_t heard;       /* last_rx when it was looked at last */
    uint64_t silent;      /* time without arrivals while the peer lived */
    uint64_t stuck;       /* time in which nothing in flight was acknowledged */
    uint64_t moved;       /* when something was, or nothing was in flight */
    uint64_t acked;       /* bytes acknowledged */
    uint64_t paced_since; /* when the pace began to be measured; 0: nothing is in flight */
    uint64_t paced_acked, paced_left; /* acked then, and what was in flight */
    double pace;                      /* bytes per ns, of a lane that does not keep up; or 0 */
    uint64_t marks[2], times[2];      /* earlier values of acked and when; the older first */
    port_state port;                  /* state of the port here */
    int no_address;                   /* the port has lost the lane's address */
    uint64_t port_lost;               /* since when the port or the address is lost; 0: neither */
    int lost;                         /* given up: nothing it has sent is waited for */
} lane_health;

struct lane {
    engine_source source; /* must be first: the engine hands it back */
    rc_engine *engine;
    const lane_handler *handler;
    void *link;
    int rail;
    int index;        /* on its link */
    lane_state state; /* set by lane_move alone */
    int peer;
    lane_path path;
    lane_health health;
    rc_error error; /* why it broke, or was given up; of the connection of now */

    outbox out;
    uint64_t out_bytes;    /* of frames pushed and not given back, sent ones included */
    uint64_t pushed;       /* total bytes in the socket once the outbox is sent */
    uint64_t beat_end;     /* `pushed` after the last heartbeat: no new one until that is sent */
    struct sender *sender; /* takes large frames, or NULL */
    int owned_by_sender;   /* the sender has the outbox now */
    int keeps;             /* frames are kept until they have come */
    frame_queue kept;      /* in the socket; not known to have come */
    uint64_t acked_frames; /* given back, as they have come */
    uint64_t come_frames;  /* have come: more than are given back while the sender has some */
    uint64_t told_frames;  /* of received_frames, told to the peer last */
    uint64_t untold_bytes; /* received since */
    int is_settled;        /* a lost lane: what it had kept has come, or goes out again */
    int is_told;           /* .. and the peer is told what has come */
    uint64_t lost_at;      /* ns */
    uint32_t made;         /* how often it has been connected */
    uint32_t ticket;       /* of its last mark (rc_lane_mark) */
    uint64_t sent_before, received_before; /* frames before that */
    uint32_t before, previous; /* the connection before, and the frames that came there */

    uint8_t rbuf[LANE_RBUF_BYTES];
    size_t rbuf_start, rbuf_end;
    uint32_t epoch, max_length;
    int in_payload;
    int low_water; /* bytes that must have come before the driver wakes */
    int is_fast;   /* the last bytes came at a fast port's speed */
    int tx_closed; /* nothing can be sent any more; arrivals may still end in a goodbye */
    frame_header rx;
    uint32_t rx_crc; /* of the payload */
    uint32_t rx_have;
    rx_place rx_place;
    uint8_t rx_text[FRAME_TEXT_BYTES]; /* payload of control frames */

    uint64_t last_rx; /* ns */
    uint64_t received_bytes, sent_frames, received_frames;

    int striped;                /* the link has other lanes */
    double rate;                /* at which the peer receives, bytes per ns; 0: unknown */
    double free_at;             /* when it will have sent all that it was given, ns (link.c) */
    uint64_t bytes_to_siblings; /* bytes given to other lanes since its last frame (link.c) */
    uint64_t probed_at;         /* ns (link.c) */
    uint64_t probe_end;         /* `pushed` after the last probe */
    rate_meter arrivals;        /* of a striped lane: sent to the peer */
    double rate_reported;       /* rate sent to the peer last */
    uint64_t rate_reported_at;
    int backlog; /* unsent bytes that the kernel may hold; 0: no limit */
};

/* Enters another state. */
void lane_move(lane *ln, lane_state to);
/* Takes over fd and watches it. On failure fd is closed. */
rc_result lane_open(lane *ln, int fd, uint32_t max_length, uint32_t epoch);
/* Prepares a lane of a link of several: measures arrivals, and asks the kernel to take only as much
 * as it can send soon, so that the rest can still be given to another lane. */
void lane_stripe(lane *ln);
/* Sets the rate that the peer has measured, bytes per ns. */
void lane_set_rate(lane *ln, double rate);
/* Puts a frame behind the others and sends what the socket takes. */
void lane_push(lane *ln, out_frame *frame);
/* Returns 1 if a probe is on its way, and has been for less than 2 s (health.acked tells). */
int lane_is_probed(const lane *ln);
/* Returns 1 if this one of several lanes should get another frame now; one pushed without room
 * would wait where no other lane can take it. */
int lane_has_room(const lane *ln);
/* Has the driver wake for any arrival, so that a peer whose payload comes slowly is seen to live.
 */
void lane_stir(lane *ln);
/* Returns the bytes that the peer has not acknowledged, in the socket or still in the list. */
uint64_t lane_unacked(const lane *ln);
/* Returns the bytes that the peer has acknowledged. *in_flight: 1 if others are on their way, not
 * only waiting for the peer to make room; 0 for another kind of socket. */
uint64_t lane_acked(const lane *ln, int *in_flight);
/* Reads TCP's counts: segments sent again, and the smoothed round trip in seconds. Zeros for
 * another kind of socket. */
void lane_ask_tcp(const lane *ln, uint64_t *retransmits, double *rtt);
/* Makes the lane independent of memory that is not its own: copies the rest of a half-sent payload,
 * releases frames not begun, throws arrivals away. Afterwards only control frames may be pushed. */
void lane_detach(lane *ln);
/* Closes the socket and keeps the lane's frames, also those that are not sent. */
void lane_lose(lane *ln);
/* Readies a lost lane that is settled for another socket: lane_open is next. */
void lane_reset(lane *ln, uint32_t made);
/* Returns the frames that have come since the lane was made last, modulo 2^32. */
static inline uint32_t lane_received(const lane *ln)
{
    return (uint32_t)(ln->received_frames - ln->received_before);
}
/* Releases the kept frames of which the peer says that they have come: so many, modulo 2^32, since
 * the lane was opened. Returns 0 if that cannot be. */
int lane_acknowledge(lane *ln, uint32_t received);
/* Does so for a lost lane, the last time, and moves all other frames to rest, in order. */
int lane_settle(lane *ln, uint32_t received, frame_queue *rest);
/* Releases all kept frames, and keeps none from now on. */
void lane_forget_kept(lane *ln);
/* Returns 1 if frames but heartbeats wait for the peer to tell that they have come. */
int lane_is_owed(const lane *ln);
/* Releases the lane's frames through handler->sent and closes the socket. */
void lane_close(lane *ln);
/* Returns 1 if frames may be pushed. */
static inline int lane_takes(const lane *ln)
{
    return ln->source.fd >= 0 && !ln->tx_closed;
}

#endif
