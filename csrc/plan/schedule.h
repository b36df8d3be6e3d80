/* schedule.h - how a collective's chunks travel: a row of functions for each way, in a file of its
 * own. For the files of plan/ alone; plan.h says what the functions of the same names return.
 *
 *   ring.c       around all ranks: all-reduce, reduce-scatter, all-gather
 *   direct.c     contributions to the owner of a part, results from there to all
 *   one_shot.c   contributions to all
 *   doubling.c   sums to partners ever farther away
 *   halving.c    sums along trees to the owner of a part, results back
 *   chain.c      from rank to rank: broadcast, reduce
 *   rooted.c     from one rank, or to it: gather, scatter, a message
 *   pairwise.c   from each to each: all-to-all, barrier, all-gather of little data
 *
 * The first five are algorithms of an all-reduce (rc_algorithm), with a place in the table of
 * plan.c.
 *
 * Invariant: rows are const, and their functions pure.
 */
#ifndef RINGCOMM_SCHEDULE_H
#define RINGCOMM_SCHEDULE_H

#include "plan.h"

/* Functions of plans that merge values in turns. */
typedef struct merging {
    uint32_t (*turns)(const plan *p, uint32_t part);
    uint32_t (*turn)(const plan *p, uint32_t chunk);
    int (*comes_first)(const plan *p, uint32_t turn);
    uint32_t (*send_after_turns)(const plan *p, uint32_t part, uint32_t over);
    int (*is_owner)(const plan *p, uint32_t part);
    uint32_t (*results)(const plan *p, uint32_t part);
    uint32_t (*result)(const plan *p, uint32_t part, uint32_t index);
} merging;

typedef struct schedule {
    const char *name; /* of an algorithm; else NULL */
    /* Returns the number of chunks, some of which may not exist. */
    uint32_t (*chunks)(const plan *p);
    int has_one_part; /* the whole tensor; else an all-reduce has one for each rank */
    /* Returns the part that a chunk contributes to; NULL: that of its number. */
    uint32_t (*part)(const plan *p, uint32_t chunk);
    /* Where paths are single hops: writes sender and receiver, equal ones where a chunk stays or
     * does not exist. Elsewhere NULL, and hops and rank_at tell, which are NULL here. */
    void (*ends)(const plan *p, uint32_t chunk, int *from, int *to);
    uint32_t (*hops)(const plan *p);
    int (*rank_at)(const plan *p, uint32_t chunk, uint32_t position);
    /* NULL: no hop reduces. */
    uint32_t (*reduce_hops)(const plan *p);
    /* NULL: PLAN_REDUCE on hops that reduce, else PLAN_STORE. */
    plan_action (*action_at)(const plan *p, uint32_t chunk);
    /* NULL: every chunk is given. */
    int (*is_given)(const plan *p, uint32_t chunk);
    /* Not in rows that merge. */
    uint32_t (*initial_chunks)(const plan *p, uint32_t *first);
    /* NULL: none. */
    uint32_t (*local_copy_chunk)(const plan *p);
    /* Counts the frames that this rank sends a peer, or receives from it; -1: all peers. */
    uint64_t (*frames)(const plan *p, int peer, int sends);
    const merging *merging; /* or NULL */
    plan_joining joins;
    /* Returns the time (ns) of an all-reduce whose bytes take `whole` ns on the wire: choose.c has
     * the formulas. NULL in rows that are no algorithm's. */
    double (*time)(int world_size, double whole);
} schedule;

extern const schedule schedule_ring, schedule_direct, schedule_one_shot, schedule_doubling,
    schedule_halving, schedule_chain, schedule_rooted, schedule_pairwise;

/* Returns the row of an algorithm, which is not RC_AUTO. */
const schedule *schedule_of(rc_algorithm algorithm);

/* ---- what rows share ---- */

static inline uint32_t schedule_world(const plan *p)
{
    return (uint32_t)p->world_size;
}

/* Rows whose chunks go from each rank to each are numbered from * world_size + to; what is behind
 * those, alike. Return how many pairs there are, the ends of a chunk, this rank's initial chunks,
 * and the frames. */
uint32_t schedule_pair_count(const plan *p);
void schedule_pair_ends(const plan *p, uint32_t chunk, int *from, int *to);
uint32_t schedule_pairs_from(const plan *p, uint32_t *first);
uint64_t schedule_pair_frames(const plan *p, int peer, int sends);
/* Counts frames of single hops, given those between two ranks. */
uint64_t schedule_frames(const plan *p, int peer, int sends,
                         uint64_t (*between)(const plan *p, int from, int to));
/* Counts the frames of paths around all ranks. */
uint64_t schedule_frames_around(const plan *p, int peer, int sends);

/* Costs (ns) between hosts whose threads sleep when they wait: of a hop, and of each further
 * message that a rank handles in it. */
#define HOP_NS 50e3
#define MESSAGE_NS 25e3

/* Returns the time of the least that a rank can send: 2 (N-1)/N of the tensor. */
static inline double schedule_least_time(int world_size, double whole)
{
    return 2.0 * (world_size - 1) / world_size * whole;
}

/* Returns the time of a hop in which each rank hears from all others. */
static inline double schedule_exchange_time(int world_size)
{
    return HOP_NS + (world_size - 2) * MESSAGE_NS;
}

#endif
