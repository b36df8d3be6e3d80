/* work.h - one collective in flight: runs a plan over links with a codec. The interface of coll/ to
 * other folders, with shared.h (works through the memory of one host) and feedback.h (residuals).
 *
 *   plain.c      codecs whose elements stand alone         keep.h       copies a rank's own values
 *   joined.h     joins all contributions to a segment
 *   merge.h      merges them in turns
 *   quantised.h  codecs of few bits                        operands.h, marks.h  what these keep
 *   segments.c   what all of these use: places, frames
 *
 * A work is a dataflow, not a list of steps. It starts by queueing the segments whose path begins
 * here. Each segment that arrives is reduced or stored, and sent on at once if its path goes on,
 * whatever the state of the others. The work is done when every frame it must receive has arrived,
 * every frame it must send is in a socket, and its own values that stay here are copied (keep.h).
 * It keeps two counters and one bit per frame.
 *
 * Where all ranks' contributions to a segment are joined, the segments that come before the last
 * one are kept in their pool buffers; where they are merged in turns (merge.h), those that come
 * before their turn.
 *
 * Memory. A segment to be reduced arrives in a pool buffer, is reduced in it and sent on from it. A
 * segment that is final arrives in dst itself where no codec stands between, and is sent on from
 * there. src is only read. So data is copied only where it changes.
 *
 * Invariants. The exactly-once bit of a frame is set before its payload is used. After work_finish
 * the caller's memory is not touched. Threading: under the engine's lock, except for the fields
 * marked atomic.
 */
#ifndef RINGCOMM_WORK_H
#define RINGCOMM_WORK_H

#include <stdatomic.h>

#include "../base/list.h"
#include "../codec/codec.h"
#include "../net/link.h"
#include "../plan/plan.h"
#include "feedback.h"
#include "operands.h"
#include "shared.h"

/* Environment that the works of one communicator share. */
typedef struct work_env {
    rc_engine *engine;
    int rank;
    int world_size;
    int contributors; /* ranks whose values are in a result: among hosts more than world_size */
    uint32_t epoch;
    uint32_t segment_bytes;
    int one_host; /* all ranks are on one host */
    rc_algorithm algorithm;
    uint32_t link_mbit; /* for RC_AUTO; 0: not known */
    peer_link **links;  /* by rank; NULL for this rank */
    pool *buffers;      /* of segment_bytes */
    out_frame **frames; /* free list */
} work_env;

struct quantised; /* the state of quantised.c */

/* Functions of a machine, which runs works of its codecs. */
typedef struct work_machine {
    /* Returns the elements of the largest segment; may_cut_coarsely: among ranks of one host they
     * may be larger than elsewhere. */
    uint64_t (*segment_elems)(const rc_work *w);
    int may_cut_coarsely;
    /* Queues the frames that start here, once there is a plan. */
    rc_result (*start)(rc_work *w);
    rc_result (*send_more)(rc_work *w); /* NULL: start queues all */
    int (*can_send_more)(const rc_work *w);
    /* Encodes a frame's encode_src into its buffer, which is its payload. */
    rc_result (*encode)(rc_work *w, out_frame *frame);
    /* Notes that a frame has left, or never will. */
    void (*released)(rc_work *w, const out_frame *frame);
    /* Returns 1 if a final segment may come in dst itself; NULL: it may not. */
    int (*stores_in_place)(const rc_work *w);
    /* Takes a payload that has come, and its buffer (NULL: it is in dst). */
    rc_result (*end)(rc_work *w, const frame_header *h, const uint8_t *payload,
                     pool_buffer *buffer);
    /* Replaces or clears residuals, after a success. */
    void (*finish)(rc_work *w);
} work_machine;

extern const work_machine plain_machine, quantised_machine;

/* States of a work; work_moves has what may follow what. */
typedef enum work_state {
    WORK_SUBMITTED, /* in the communicator's inbox */
    WORK_UNMATCHED, /* a receive that has no number yet (comm/match.c) */
    WORK_IN_LINE,   /* behind one that is entering shared memory (comm/memory.c) */
    WORK_IN_MEMORY, /* in shared memory */
    WORK_ON_LINKS,  /* among hosts in shared memory, too */
    WORK_ENDING,    /* complete, or ended by a failure: comm_settle is next */
    WORK_OVER       /* the result is set */
} work_state;

/* The states that may follow each, as bits. */
extern const unsigned work_moves[];

struct rc_work {
    engine_done done_entry; /* must be first: rc_engine_take_done returns it */
    list_node place;        /* in the communicator's inbox, active or ending works */
    keyed_entry by_name;    /* in `index`, a table of the communicator's (comm/active.c) */
    keyed_queues *index;
    list_node unannounced, runnable; /* in lists of the communicator's (comm/) */
    rc_engine *engine;
    work_env *env; /* valid while active */
    const work_machine *machine;
    work_state state; /* set by work_move alone */
    rc_call call;
    uint64_t seq;
    uint64_t fingerprint;
    uint16_t flags;    /* of its frames: 0 or FRAME_P2P */
    int matched_later; /* a receive that has no number until it is matched (comm/match.c) */
    plan plan;
    codec codec;
    uint64_t receives_left, sends_left;
    uint64_t keeps_left; /* elements still to be copied (keep.h) */
    list borrowed;       /* frames that have left, and not come, whose payload is the caller's */
    uint64_t borrowed_bytes; /* of them */
    int has_asked;           /* the peers are asked what has come */
    uint64_t *seen;          /* a bit per (chunk, segment, phase) */
    uint64_t seen_few[4];
    int is_large;                /* the engine counts it among its large works */
    operands operands;           /* of segments that are added all at once, or in turns */
    struct quantised *quantised; /* NULL unless quantised.c runs the work */
    const quant *quant;          /* its codec then */
    void *src_with_residual;     /* src with its residuals added, or NULL */
    int is_shared;               /* goes through shared memory */
    shared_run shared;
    uint64_t submitted, deadline, finished; /* ns */
    rc_work_stats stats;                    /* times are set by work_finish, started_ns before */
    uint64_t spin;                          /* ns that a waiting thread spins */
    atomic_int result;                      /* RC_AGAIN while in flight */
    atomic_int references;                  /* the caller's and the communicator's */
    rc_error error; /* written before result; its code once the work is ending */
};

/* Creates a work; needs no lock. NULL if memory is short. */
rc_work *work_create(rc_engine *engine, const rc_call *call, uint32_t spin_us);
/* Replaces src by a copy with the residuals added, where there are any. If the work succeeds,
 * residuals are zero afterwards, or replaced by new ones. contributors: as in work_env. Returns
 * RC_NO_MEMORY or RC_OK. */
rc_result work_add_residual(rc_work *w, int contributors);
/* Returns the call as the caller made it; among hosts w->call is about one chunk. */
const rc_call *work_user_call(const rc_work *w);
/* Returns the divisor of a contribution in the result: an owner's residual is worth as much more as
 * a contribution. */
double work_divisor(const rc_call *call, int contributors);
void work_retain(rc_work *w);
/* Drops one reference; the last one frees. */
void work_release(rc_work *w);

/* Returns the bytes of a segment of so many elements on the wire; with some codecs the most that it
 * may have.
 */
uint64_t work_segment_bytes(const rc_work *w, uint64_t elems);
/* Returns the bytes of a call's elements on the wire. */
uint64_t work_wire_bytes(const rc_call *call, const work_env *env);
/* Returns the algorithm of a call that does not go through shared memory. */
rc_algorithm work_algorithm(const rc_call *call, const work_env *env);

/* Lays out the plan and queues the frames that start here. Returns RC_NO_MEMORY or RC_OK; the work
 * may be complete afterwards (work_complete). */
rc_result work_start(rc_work *w, work_env *env);
int work_complete(const rc_work *w);
/* Returns 1 if nothing is missing but that peers tell what has come. */
int work_awaits_peers(const rc_work *w);
/* Enters another state. */
void work_move(rc_work *w, work_state to);
/* Returns the number that users see: the seq, or of a send or receive its number among those of its
 * tag. */
uint64_t work_number(const rc_work *w);

/* Begins a data frame that arrives from a peer: checks every field against the plan and decides
 * where the payload goes. Returns RC_PROTOCOL, with the reason in error, if a field is wrong. */
rc_result work_begin(rc_work *w, const frame_header *h, int from, rx_place *place, rc_error *error);
/* Undoes work_begin: the rest of the payload will not come, the frame will come again. */
void work_abandon(rc_work *w, const frame_header *h, rx_place *place);
/* Takes the payload when it has come, and the place's buffer. */
rc_result work_end(rc_work *w, const frame_header *h, rx_place *place);
/* Sends a little more of a work that sends bit by bit. Returns RC_NO_MEMORY or RC_OK. */
rc_result work_send_more(rc_work *w);
/* Returns 1 if work_send_more would send something now. */
int work_can_send_more(const rc_work *w);

/* Returns 1 if pieces of this rank's own values are left to copy (keep.h). */
int keep_is_left(const rc_work *w);
/* Copies the next piece, if any; the work may be complete afterwards. */
void keep_some(rc_work *w);

/* Returns 1 if the machine of quantised.h runs the call among so many ranks. */
int quantised_takes(const rc_call *call, int world_size);
/* Returns 1 if a value was not finite, so that a work which succeeded has only NaN as its result.
 */
int quantised_poisoned(const rc_work *w);
/* Returns 1 if source and result of such a call can be encoded already (encoded.c); rc_check looks
 * at the rest. */
int encoded_suits(const rc_call *call, const work_env *env);
void encoded_layout(rc_layout *out, const work_env *env, const rc_call *call);

/* Notes that a frame leaves or comes, or that the work enters shared memory; the first call sets
 * its start. */
void work_note_start(rc_work *w);
/* Counts a frame that is in a socket as a whole. */
void work_note_sent(rc_work *w, int rail, const frame_header *h);

/* For the machines (segments.c): a new data frame of the work, or NULL. */
out_frame *work_frame(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step);
/* Sends a segment's payload. Takes over the buffer that it lies in (or NULL). */
rc_result work_send(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step,
                    const uint8_t *payload, pool_buffer *buffer);
/* Sends so many bytes, else as work_send: for codecs whose payloads may be shorter than
 * work_segment_bytes. */
rc_result work_send_bytes(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step,
                          const uint8_t *payload, size_t bytes, pool_buffer *buffer);
/* Sends a segment of the part whose results this rank makes to every other rank. */
rc_result work_send_result(rc_work *w, uint32_t segment, const uint8_t *payload, size_t bytes,
                           pool_buffer *buffer);

/* Ends the work with a result; error says why unless result is RC_OK. No queue may hold its frames.
 */
void work_finish(rc_work *w, rc_result result, const rc_error *error);

/* Takes a frame from the free list; NULL if memory is short. */
out_frame *work_env_frame(work_env *env);
/* Gives back a frame, its pool buffer and its count in the work that owns it. */
void work_env_release(work_env *env, out_frame *frame);
/* Counts a frame that has left in its work, and makes it one that can go out again: its payload is
 * its own, or at least does not change while the work is in flight. Returns RC_NO_MEMORY or RC_OK.
 */
rc_result work_env_keep(work_env *env, out_frame *frame);
/* Makes the payload of a kept frame its own. Returns RC_NO_MEMORY or RC_OK. */
rc_result work_env_own(work_env *env, out_frame *frame);
/* Encodes the payload of a data frame if that is still to be done, and may make it shorter than its
 * header says. Returns 0 if memory is short. */
int work_env_encode(work_env *env, out_frame *frame);
void work_env_destroy(work_env *env);

#endif
