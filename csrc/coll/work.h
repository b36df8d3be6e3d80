/* work.h - one collective in flight: runs a plan over links with a codec.
 *
 * A work is a dataflow, not a list of steps. It starts by queueing the segments whose path begins
 * here. Each segment that arrives is reduced or stored, and sent on at once if its path goes on,
 * whatever the state of the others. The work is done when every frame it must receive has arrived
 * and every frame it must send is in a socket; it keeps two counters and one bit per frame; and
 * when what stays here of its own values is copied (keep.h).
 *
 * Where all ranks' contributions to a segment are joined, the segments that come before the last
 * one are kept in their pool buffers; where they are merged in turns (merge.h), those that come
 * before their turn.
 *
 * Memory. A segment to be reduced arrives in a pool buffer, is reduced in it and sent on from it.
 * A segment that is final arrives in dst itself where no codec stands between, and is sent on from
 * there. src is only read. So nothing is copied that does not change.
 *
 * Invariants. The exactly-once bit of a frame is set before its payload is used. After work_finish
 * the caller's memory is not touched. Threading: under the engine's lock, but for the fields
 * marked atomic.
 */
#ifndef RINGCOMM_WORK_H
#define RINGCOMM_WORK_H

#include <stdatomic.h>

#include "../base/list.h"
#include "../codec/codec.h"
#include "../net/link.h"
#include "../plan/plan.h"
#include "join.h"
#include "turns.h"

/* How far a work is on its way through shared memory (shared.h). */
typedef struct shared_run {
    struct rc_work *next;
    rc_call call;         /* as the caller made it; among hosts the work's own is about one chunk */
    codec codec;          /* of what goes through */
    uint64_t first, laps; /* of the region's laps */
    uint32_t chunks;      /* one per rank, or the whole as one */
    uint64_t chunk_elems; /* the last chunks may be shorter, or empty */
    uint64_t lap_elems;   /* of each chunk */
    int opened;           /* to links, which join the hosts */
} shared_run;

/* What the works of one communicator share. */
typedef struct work_env {
    rc_engine *engine;
    int rank;
    int world_size;
    int contributors; /* ranks whose values are in a result: among hosts more than world_size */
    uint32_t epoch;
    uint32_t segment_bytes;
    int one_host; /* all ranks share one */
    rc_algorithm algorithm;
    uint32_t link_mbit; /* for RC_AUTO; 0: not known */
    peer_link **links;  /* by rank; NULL for this rank */
    pool *buffers;      /* of segment_bytes */
    out_frame **frames; /* free list */
} work_env;

struct quantised; /* of its machine (quantised.c) */

struct rc_work {
    engine_done done_entry;      /* first: rc_engine_take_done hands it back */
    struct rc_work *next, *prev; /* in the communicator's list of active works */
    keyed_entry by_name;         /* in `index`, a table of the communicator's (comm_active.c) */
    keyed_queues *index;
    list_node untold, pumped; /* in lists of the communicator's (comm_announce.c, comm.c) */
    rc_engine *engine;
    work_env *env; /* valid while active */
    rc_call call;
    uint64_t seq;
    uint64_t fingerprint;
    uint16_t flags; /* of its frames: 0 or FRAME_P2P */
    int late;       /* a receive that has no number until it is matched (comm_match.c) */
    plan plan;
    codec codec;
    uint64_t receives_left, sends_left;
    uint64_t keeps_left; /* elements (keep.h) */
    uint64_t *seen;      /* a bit per (chunk, segment, phase) */
    uint64_t seen_few[4];
    int lengthy;                 /* as it was counted by the engine */
    join join;                   /* without segments in a ring */
    struct quantised *quantised; /* NULL, unless that machine runs it */
    void *absorbed;              /* src with its residuals added, or NULL */
    int is_shared;               /* it goes through shared memory */
    shared_run shared;
    turns turns;                            /* without units where nothing is merged */
    uint64_t submitted, deadline, finished; /* ns */
    rc_work_stats stats;                    /* the moments but started_ns: from work_finish on */
    uint64_t spin;                          /* ns; of a thread that waits for it */
    atomic_int result;                      /* RC_AGAIN while in flight */
    atomic_int references;                  /* the caller's and the communicator's */
    rc_error error;                         /* written before result */
};

/* Makes the work; only what needs no lock. NULL if memory is short. */
rc_work *work_create(rc_engine *engine, const rc_call *call, uint32_t spin_us);
/* Takes src with its residuals added in place of src, where there are any. They are zero after it,
 * or replaced by new ones, if the work is a success. contributors: as in work_env. RC_NO_MEMORY or
 * RC_OK. */
rc_result work_absorb(rc_work *w, int contributors);
/* The call as it was made: among hosts a work's own is about one chunk. */
const rc_call *work_called(const rc_work *w);
/* By what a value of this call is divided in its result: an owner's residual is worth as much more
 * as a contribution. */
double work_divisor(const rc_call *call, int contributors);
void work_retain(rc_work *w);
/* Drops one reference; the last one frees. */
void work_release(rc_work *w);

/* Bytes of a segment of so many elements as it travels; of some codecs the most that it may have.
 */
uint64_t work_segment_bytes(const rc_work *w, uint64_t elems);
/* Bytes of a call's elements as they travel. */
uint64_t work_wire_bytes(const rc_call *call, const work_env *env);
/* The algorithm of a call that does not go through shared memory. */
rc_algorithm work_algorithm(const rc_call *call, const work_env *env);

/* Lays out the plan and queues what starts here. Returns RC_NO_MEMORY or RC_OK; the work may be
 * complete afterwards (work_complete). */
rc_result work_start(rc_work *w, work_env *env);
int work_complete(const rc_work *w);
/* 1 until work_finish. */
int work_is_open(const rc_work *w);
/* Its seq, of a send or receive that among those of its tag: what people are told. */
uint64_t work_number(const rc_work *w);

/* A data frame of this work begins to arrive from a peer: checks every field against the plan and
 * says where the payload goes. RC_PROTOCOL with the reason in error. */
rc_result work_begin(rc_work *w, const frame_header *h, int from, rx_place *place, rc_error *error);
/* Its payload is there. Takes over the place's buffer. */
rc_result work_end(rc_work *w, const frame_header *h, rx_place *place);
/* Some of what a work sends leaves only bit by bit: sends a little more. RC_NO_MEMORY or RC_OK. */
rc_result work_go_on(rc_work *w);
/* 1 if that would send something now. */
int work_may_go_on(const rc_work *w);

/* A frame of the work leaves or comes, or it enters shared memory: it has started, from the first
 * time on. */
void work_note_start(rc_work *w);
/* A frame of it is in a socket as a whole. */
void work_note_sent(rc_work *w, int rail, const frame_header *h);

/* For the machines beside it. A data frame of the work, or NULL; where a segment lies. */
out_frame *work_frame(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step);
const uint8_t *work_src(const rc_work *w, uint32_t chunk, uint32_t segment);
uint8_t *work_dst(const rc_work *w, uint32_t chunk, uint32_t segment);
/* Sends a segment as it is to travel. Takes over the buffer that it lies in (or NULL). The work may
 * be over afterwards: with the last frame, or by a failure; then its env is NULL. */
rc_result work_send(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step,
                    const uint8_t *payload, pool_buffer *buffer);
/* The same, of a codec whose payloads may be shorter than the most that they may have. */
rc_result work_send_bytes(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step,
                          const uint8_t *payload, size_t bytes, pool_buffer *buffer);
/* The same, to every other rank: a segment of the part whose results this rank makes. */
rc_result work_send_result(rc_work *w, uint32_t segment, const uint8_t *payload, size_t bytes,
                           pool_buffer *buffer);

/* Ends the work with a result; error says why unless result is RC_OK. Its frames must be out of
 * all queues. */
void work_finish(rc_work *w, rc_result result, const rc_error *error);

/* Frames come from a free list. NULL if memory is short. */
out_frame *work_env_frame(work_env *env);
/* Returns a frame, its pool buffer and its count in the work it belongs to. */
void work_env_release(work_env *env, out_frame *frame);
/* Encodes the payload of a data frame if that is still to be done, and may make it shorter than its
 * header says. 0 if memory is short. */
int work_env_encode(work_env *env, out_frame *frame);
void work_env_destroy(work_env *env);

#endif
