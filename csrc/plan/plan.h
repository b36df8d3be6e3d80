/* plan.h - the pure schedule of a collective: which segment goes where, and what happens to it.
 *
 * Every collective here is a set of paths. A chunk is the part of the tensor that travels together;
 * its path is a list of ranks; on the first `reduce_hops` hops each receiver reduces its own
 * values into what arrives, on the later hops it stores what arrives. Every hop but the last is
 * followed by the next one, so a rank needs no more than (chunk, step) to know what to do:
 *
 *   all-reduce, 4 ranks, chunk 1:     1 --> 2 --> 3 --> 0 --> 1 --> 2 --> 3
 *                              step      0     1     2     3     4     5
 *                                      reduce-scatter    |   all-gather
 *                                       (reduce_hops = 3, rank 0 is the chunk's owner)
 *
 * An all-reduce of little data rather saves hops (rc_algorithm). There a chunk is what one rank
 * sends to another, its path a single hop: first each rank's contribution to each part, which the
 * part's owner keeps until all have come and joins in order of rank; then, unless every rank owns
 * the whole, the owner's result, to each rank by itself.
 *
 *   direct, 3 ranks, part 1:      0 --> 1 <-- 2        0 <-- 1 --> 2
 *                                contributions            results
 *
 * Between the two lie the plans of logarithmic depth (rounds.h). There, too, a chunk is what one
 * rank sends to another in a single hop: the sum of all that it has taken so far of a part. A rank
 * takes a part's values in turns, in a fixed order; what it then has leaves in the next chunk. It
 * is final after the last turn: everywhere in doubling, at the part's owner in halving, from where
 * the result goes back in chunks of its own.
 *
 * Chunks are cut into segments, the unit of framing, encoding and striping. Segments of one chunk
 * follow each other along the path without waiting for one another.
 *
 * Invariants. The order of a sum is the order of the path, or of the ranks: it depends on the chunk
 * and the world size alone, never on segments, lanes or arrival. Chunks and segments start at
 * multiples of PLAN_ALIGN elements where the collective lets them, so no codec block straddles two
 * of them. What is asked once per call takes no more than a few steps per rank of the world. Pure:
 * no state, no OS, no allocation.
 */
#ifndef RINGCOMM_PLAN_H
#define RINGCOMM_PLAN_H

#include <stdint.h>

#include "../include/ringcomm.h"

#define PLAN_ALIGN 256 /* elements; the largest block of any codec */

typedef struct plan {
    rc_collective collective;
    rc_algorithm algorithm; /* RC_RING or, in what reduces, another; never RC_AUTO */
    int rank;
    int world_size;
    int root; /* the other rank of a send or recv */
    uint32_t chunks;
    uint64_t chunk_elems;   /* of a full chunk; the last ones may be shorter or empty */
    uint64_t total_elems;   /* of all chunks, or parts, together; in alltoall of world_size^2 */
    uint64_t segment_elems; /* of a full segment */
} plan;

/* What a rank does with a segment that arrives. */
typedef enum plan_action {
    PLAN_STORE,  /* it is final */
    PLAN_REDUCE, /* with its own values, for the next hop or for good */
    PLAN_JOIN,   /* keeps it until all ranks' contributions are there */
    PLAN_MERGE   /* keeps it until its turn, and reduces it with what is there then */
} plan_action;

/* 1 if the call's codec has few bits per element. Such a call has one plan: among two ranks
 * RC_ONE_SHOT, among more RC_DIRECT, where each rank's values are encoded once and each sum is;
 * a reduce-scatter is the first half of RC_DIRECT, an all-gather goes around as ever. */
static inline int plan_quantises(const rc_call *call)
{
    return call->codec >= RC_CODEC_INT8;
}

/* 1 if the call reads src on that rank, and if it writes dst there. */
int plan_reads(const rc_call *call, int rank);
int plan_writes(const rc_call *call, int rank);

/* 1 if the call may go through memory that the ranks of each host share. */
int plan_may_share(const rc_call *call, int hosts, rc_algorithm wanted);
/* What is the algorithm then, on one host: RC_DIRECT or RC_ONE_SHOT. */
rc_algorithm plan_choose_shared(int world_size, uint64_t wire_bytes, rc_algorithm wanted);

#define PLAN_NO_CHUNK UINT32_MAX

/* The algorithm that wanted (RC_AUTO: the cost model, over links of link_mbit Mbit/s; 0: not known)
 * gives this call. */
rc_algorithm plan_choose(const rc_call *call, int world_size, uint64_t wire_bytes,
                         uint32_t link_mbit, rc_algorithm wanted);

/* segment_elems: upper bound, at least PLAN_ALIGN; the plan takes smaller segments where a chunk
 * would else be one single segment and not pipeline. */
void plan_init(plan *p, const rc_call *call, rc_algorithm algorithm, int rank, int world_size,
               uint64_t segment_elems);
/* Cuts the chunks of such a plan into fewer segments, for ranks of one host: no wire is idle there
 * while a segment is handled, and what is won is handling. */
void plan_cut_coarsely(plan *p, uint64_t segment_elems);

/* The largest segments a call should be cut into, given what the link allows, all in elements: of a
 * chain of ranks (broadcast, reduce) those with which the cost model passes it on fastest. */
uint64_t plan_segment_limit(const rc_call *call, int world_size, uint64_t wire_bytes_per_elem,
                            uint64_t most);

/* Elements of a chunk, and where it lies in this rank's src and dst (in elements). */
uint64_t plan_chunk_elems(const plan *p, uint32_t chunk);
uint64_t plan_src_offset(const plan *p, uint32_t chunk);
uint64_t plan_dst_offset(const plan *p, uint32_t chunk);

/* Segments of a chunk: 0 for an empty one, but 1 (empty) in a barrier and an empty send. */
uint32_t plan_segments(const plan *p, uint32_t chunk);
/* Where a segment starts within its chunk, and how many elements it has. */
uint64_t plan_segment_offset(const plan *p, uint32_t segment);
uint64_t plan_segment_elems(const plan *p, uint32_t chunk, uint32_t segment);

/* Length of a chunk's path in hops (0: it stays where it is), and how many of them reduce. */
uint32_t plan_hops(const plan *p, uint32_t chunk);
uint32_t plan_reduce_hops(const plan *p);
/* What is done at the end of that hop. */
plan_action plan_action_at(const plan *p, uint32_t chunk, uint32_t step);
/* 1 if the chunk is there from the beginning, and not the result of a join or a merge. */
int plan_is_given(const plan *p, uint32_t chunk);
/* The chunks that are there from the beginning and whose path begins at this rank, in a row: how
 * many, and the first. Not of plans that merge (plan_leaving). */
uint32_t plan_begins(const plan *p, uint32_t *first);
/* The chunk of which the collective leaves this rank's own values here, as a copy of src in dst, or
 * PLAN_NO_CHUNK; in a world of one everything. RC_RING only. */
uint32_t plan_kept(const plan *p);
/* The chunk that carries this rank's joined part to another rank; RC_DIRECT only. */
uint32_t plan_result_chunk(const plan *p, int to);

/* Of RC_DOUBLING and RC_HALVING, where plan_merges is 1. The part that a chunk brings something of;
 * parts are numbered from 0 to plan_parts. */
int plan_merges(const plan *p);
uint32_t plan_parts(const plan *p);
uint32_t plan_part(const plan *p, uint32_t chunk);
/* Turns in which this rank merges values into a part, and the one in which it merges a chunk. */
uint32_t plan_turns(const plan *p, uint32_t part);
uint32_t plan_turn(const plan *p, uint32_t chunk);
/* 1 if what comes in a turn is the first operand, 0 if it is what was there. */
int plan_comes_first(const plan *p, uint32_t turn);
/* The chunk that leaves as soon as that many turns of a part are over, or PLAN_NO_CHUNK. */
uint32_t plan_leaving(const plan *p, uint32_t part, uint32_t turns);
/* 1 if this rank's last turn makes the result of a part. */
int plan_is_owner(const plan *p, uint32_t part);
/* Chunks in which this rank passes the result of a part on, once it has it. */
uint32_t plan_results(const plan *p, uint32_t part);
uint32_t plan_result(const plan *p, uint32_t part, uint32_t index);

/* The rank at a position of the path, 0 <= position <= plan_hops. */
int plan_rank_at(const plan *p, uint32_t chunk, uint32_t position);

/* Calls that this rank must answer for: frames it receives and frames it sends, from or to peer
 * (or all peers together with peer = -1). */
uint64_t plan_receives(const plan *p, int peer);
uint64_t plan_sends(const plan *p, int peer);
/* 1 if this rank sends a frame of its own (step 0) to peer. */
int plan_starts_towards(const plan *p, int peer);
/* 1 if any two groups of ranks meet in a frame that needs nothing but what its sender's group has,
 * so that ranks which differ in what they called find out by the data. */
int plan_meets_all(const plan *p);

#endif
