/* plan.h - the plan of a collective: which segment goes where, and what happens to it; and the
 * call in 64 bits, by which ranks find out that they schedule the same one. The interface of plan/
 * to other folders.
 *
 * Every collective here is a set of paths. A chunk is the part of the tensor that travels together;
 * its path is a list of ranks; on the first `reduce_hops` hops each receiver reduces its own values
 * into what arrives, on the later hops it stores what arrives. So (chunk, step) tells a rank what
 * to do with a segment:
 *
 *   all-reduce, 4 ranks, chunk 1:     1 --> 2 --> 3 --> 0 --> 1 --> 2 --> 3
 *                              step      0     1     2     3     4     5
 *                                      reduce-scatter    |   all-gather
 *                                       (reduce_hops = 3, rank 0 is the chunk's owner)
 *
 * For little data an all-reduce is faster with fewer hops (rc_algorithm). There a chunk is what one
 * rank sends to another, its path a single hop: first each rank's contribution to each part, which
 * the part's owner keeps until all have come and joins in order of rank; then, unless every rank
 * owns the whole, the owner's result, to each rank by itself.
 *
 *   direct, 3 ranks, part 1:      0 --> 1 <-- 2        0 <-- 1 --> 2
 *                                contributions            results
 *
 * Between the two lie the plans of logarithmic depth (rounds.h). There, too, a chunk is what one
 * rank sends to another in a single hop: the sum of all values of a part that it has taken so far.
 * A rank takes a part's values in turns, in a fixed order; the sum after a turn leaves in the next
 * chunk. It is final after the last turn: everywhere in doubling, at the part's owner in halving,
 * from where the result goes back in chunks of its own.
 *
 * Chunks are cut into segments, the unit of framing, encoding and striping. Segments of one chunk
 * follow each other along the path without waiting for one another.
 *
 * Invariants. The order of a sum is the order of the path, or of the ranks: it depends on the chunk
 * and the world size alone, never on segments, lanes or arrival. Chunks and segments start at
 * multiples of PLAN_ALIGN elements where the collective lets them, so no codec block straddles two
 * of them. Functions called once per call take no more than a few steps per rank of the world.
 * Pure: no state, no OS, no allocation; any thread may call.
 */
#ifndef RINGCOMM_PLAN_H
#define RINGCOMM_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "../include/ringcomm.h"

#define PLAN_ALIGN 256 /* elements; the largest block of any codec */

typedef struct plan {
    rc_collective collective;
    const struct schedule *schedule; /* how its chunks travel */
    int rank;
    int world_size;
    int root; /* or the other rank of a send or recv */
    uint32_t chunks;
    uint64_t chunk_elems;   /* of a full chunk; the last ones may be shorter or empty */
    uint64_t total_elems;   /* of all chunks or parts together; in alltoall of world_size^2 */
    uint64_t segment_elems; /* of a full segment */
} plan;

/* Action of a rank on a segment that arrives. */
typedef enum plan_action {
    PLAN_STORE,  /* stores it: it is final */
    PLAN_REDUCE, /* reduces it with its own values, for the next hop or for good */
    PLAN_JOIN,   /* keeps it until all ranks' contributions have come */
    PLAN_MERGE   /* keeps it until its turn, and reduces it with the sum so far */
} plan_action;

/* Returns 1 if the call's codec has few bits per element. Such a call has one plan, by which each
 * rank's values and each sum are encoded once: one-shot among two ranks, direct among more; a
 * reduce-scatter is the first half of direct, an all-gather goes around. */
static inline int plan_quantises(const rc_call *call)
{
    return call->codec >= RC_CODEC_INT8;
}

/* Return 1 if the call reads src on that rank, and if it writes dst there. */
int plan_reads(const rc_call *call, int rank);
int plan_writes(const rc_call *call, int rank);

/* Returns 1 if the call may go through memory that the ranks of each host share. */
int plan_may_share(const rc_call *call, int hosts, rc_algorithm wanted);
/* Returns 1 if each rank adds the whole tensor in shared memory of one host (one-shot), 0 if each
 * adds its part (direct). */
int plan_shares_whole(int world_size, uint64_t wire_bytes, rc_algorithm wanted);

#define PLAN_NO_CHUNK UINT32_MAX

/* Returns the algorithm of a call: wanted where the call has a choice; for RC_AUTO, and for
 * an all-gather unless the ring is wanted, the cost model's, over links of link_mbit Mbit/s (0: not
 * known). */
rc_algorithm plan_choose(const rc_call *call, int world_size, uint64_t wire_bytes,
                         uint32_t link_mbit, rc_algorithm wanted);

/* Return an algorithm's name, and the cost model's choice and times; see ringcomm.h. */
const char *plan_algorithm_name(rc_algorithm algorithm);
rc_algorithm plan_estimate(int world_size, uint64_t wire_bytes, uint32_t link_mbit,
                           double *seconds);

/* Makes the plan. segment_elems: upper bound, at least PLAN_ALIGN; the plan takes smaller segments
 * where a chunk would else be one single segment and not pipeline. */
void plan_init(plan *p, const rc_call *call, rc_algorithm algorithm, int rank, int world_size,
               uint64_t segment_elems);
/* Cuts the chunks of a plan into fewer segments, for ranks of one host: no wire is idle there while
 * a segment is handled, and fewer segments save handling. */
void plan_cut_coarsely(plan *p, uint64_t segment_elems);

/* Returns the largest segments that a call should be cut into, given what the link allows, all in
 * elements: in a chain of ranks (broadcast, reduce) those that are fastest by the cost model. */
uint64_t plan_segment_limit(const rc_call *call, int world_size, uint64_t wire_bytes_per_elem,
                            uint64_t most);

/* Return the elements of a chunk, and its place in this rank's src and dst (in elements). */
uint64_t plan_chunk_elems(const plan *p, uint32_t chunk);
uint64_t plan_src_offset(const plan *p, uint32_t chunk);
uint64_t plan_dst_offset(const plan *p, uint32_t chunk);

/* Returns the segments of a chunk: 0 for an empty one, but 1 (empty) in a barrier and an empty
 * send. */
uint32_t plan_segments(const plan *p, uint32_t chunk);
/* Return the start of a segment within its chunk, and its elements. */
uint64_t plan_segment_offset(const plan *p, uint32_t segment);
uint64_t plan_segment_elems(const plan *p, uint32_t chunk, uint32_t segment);

/* Return the length of a chunk's path in hops (0: it stays where it is), and how many of them
 * reduce. */
uint32_t plan_hops(const plan *p, uint32_t chunk);
uint32_t plan_reduce_hops(const plan *p);
/* Returns the receiver's action after hop `step`. */
plan_action plan_action_at(const plan *p, uint32_t chunk, uint32_t step);
/* Returns 1 if the chunk is there from the beginning, and not the result of a join or a merge. */
int plan_is_given(const plan *p, uint32_t chunk);
/* Returns how many chunks are there from the beginning and have paths that begin at this rank; they
 * are in a row from *first on. Not for plans that merge (plan_send_after_turns). */
uint32_t plan_initial_chunks(const plan *p, uint32_t *first);
/* Returns the chunk that stays here as a copy of this rank's src in dst, or PLAN_NO_CHUNK; in a
 * world of one everything. */
uint32_t plan_local_copy_chunk(const plan *p);
/* Contributions that this rank keeps until all have come, and adds. */
typedef enum plan_joining {
    PLAN_JOINS_NOTHING,
    PLAN_JOINS_ITS_PART, /* those to one part; in an all-reduce it sends the sum to all */
    PLAN_JOINS_ALL       /* those to the whole tensor, as every rank does */
} plan_joining;
plan_joining plan_joins(const plan *p);
/* Returns the chunk that carries this rank's joined part to another rank, where it joins its part
 * alone. */
uint32_t plan_result_chunk(const plan *p, int to);

/* plan_merges: 1 in doubling and halving, which the functions up to plan_result are for.
 * plan_part: the part that a chunk contributes to; parts are numbered from 0 on, plan_parts of
 * them in plans that merge.
 */
int plan_merges(const plan *p);
uint32_t plan_parts(const plan *p);
uint32_t plan_part(const plan *p, uint32_t chunk);
/* Return the turns in which this rank merges values into a part, and the one in which it merges a
 * chunk. */
uint32_t plan_turns(const plan *p, uint32_t part);
uint32_t plan_turn(const plan *p, uint32_t chunk);
/* Returns 1 if the value received in a turn is the first operand, 0 if the sum so far is. */
int plan_comes_first(const plan *p, uint32_t turn);
/* Returns the chunk that leaves as soon as that many turns of a part are over, or PLAN_NO_CHUNK. */
uint32_t plan_send_after_turns(const plan *p, uint32_t part, uint32_t turns);
/* Returns 1 if this rank's last turn makes the result of a part. */
int plan_is_owner(const plan *p, uint32_t part);
/* Return the number of chunks in which this rank sends on the result of a part, and each of them.
 */
uint32_t plan_results(const plan *p, uint32_t part);
uint32_t plan_result(const plan *p, uint32_t part, uint32_t index);

/* Returns the rank at a position of the path, 0 <= position <= plan_hops. */
int plan_rank_at(const plan *p, uint32_t chunk, uint32_t position);

/* Count the frames that this rank receives from peer, and that it sends to peer (-1: all peers
 * together). */
uint64_t plan_receives(const plan *p, int peer);
uint64_t plan_sends(const plan *p, int peer);
/* Returns 1 if this rank sends a frame of its own (step 0) to peer. */
int plan_starts_towards(const plan *p, int peer);
/* Returns 1 if between any two groups of ranks some frame is sent that depends on its sender's
 * group only, so that ranks which made different calls find out by the data. */
int plan_detects_any_mismatch(const plan *p);

/* ---- fingerprints: a whole call in 64 bits ----
 *
 * Every frame carries the fingerprint of the collective it belongs to, so that ranks which called
 * different things find out from the first frame, and both can name both calls. It is a packing,
 * not a hash: fingerprints that match mean equal calls.
 *
 *   bits  0-3 collective   4-7 op   8-11 dtype   12-15 codec   16-27 root   28-63 count
 *
 * Collectives without a root have their caller in bits 16-27, for messages: the call of the library
 * that they are part of.
 */

#define FINGERPRINT_MAX_COUNT ((UINT64_C(1) << 36) - 1)
#define FINGERPRINT_MAX_ROOT 4095
#define FINGERPRINT_TEXT 128
#define FINGERPRINT_ADVICE "all ranks must make the same calls in the same order"

/* Packs a call, which must have been validated. Arguments that the collective ignores are packed as
 * 0; a send and the receive it meets have the same fingerprint. */
uint64_t fingerprint_of(const rc_call *call);
/* Returns 1 for equal calls, whoever their callers are. */
int fingerprint_matches(uint64_t one, uint64_t other);
/* Returns the op of the call; RC_SUM where the collective ignores it. */
rc_op fingerprint_op(uint64_t fingerprint);
/* Writes the call as text: "allreduce(f32[1024], op=sum, compression=bf16)", "allgather(u8[32]) in
 * gather_state_dict()". Any 64 bits give some text, of less than FINGERPRINT_TEXT bytes. */
void fingerprint_text(uint64_t fingerprint, char *text, size_t size);

#endif
