/* plan.c - makes plans, and asks their schedules; sizes.c has how large things are. See plan.h,
 * schedule.h. */
#include "plan.h"

#include "schedule.h"

/* Segments that a chunk should have, and the least segment. A chunk of fewer segments does not
 * pipeline well, nor spread finely over unequal ports (bench/peers.py --all --rows ports prints
 * what is reached). Smaller segments cost more in frames than they gain. */
enum { WANTED_SEGMENTS = 16, LEAST_SEGMENT_ELEMS = 16384 };
enum { COARSE_WANTED_SEGMENTS = 4, COARSE_LEAST_SEGMENT_ELEMS = 131072 };

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static uint64_t choose_segment(uint64_t chunk_elems, uint64_t wanted, uint64_t least, uint64_t most)
{
    uint64_t elems = round_up((chunk_elems + wanted - 1) / wanted, PLAN_ALIGN);
    elems = elems < least ? least : elems;
    return elems < most ? elems : most;
}

void plan_cut_coarsely(plan *p, uint64_t segment_elems)
{
    p->segment_elems = choose_segment(p->chunk_elems, COARSE_WANTED_SEGMENTS,
                                      COARSE_LEAST_SEGMENT_ELEMS, segment_elems);
}

int plan_reads(const rc_call *call, int rank)
{
    switch (call->collective) {
    case RC_BROADCAST:
    case RC_SCATTER: return rank == call->root;
    case RC_BARRIER:
    case RC_RECV: return 0;
    default: return 1;
    }
}

int plan_writes(const rc_call *call, int rank)
{
    switch (call->collective) {
    case RC_REDUCE:
    case RC_GATHER: return rank == call->root;
    case RC_BARRIER:
    case RC_SEND: return 0;
    default: return 1;
    }
}

static const schedule *const by_algorithm[RC_ALGORITHM_COUNT] = {
    [RC_RING] = &schedule_ring,         [RC_ONE_SHOT] = &schedule_one_shot,
    [RC_DOUBLING] = &schedule_doubling, [RC_DIRECT] = &schedule_direct,
    [RC_HALVING] = &schedule_halving,
};

const schedule *schedule_of(rc_algorithm algorithm)
{
    return by_algorithm[algorithm];
}

const char *plan_algorithm_name(rc_algorithm algorithm)
{
    if ((unsigned)algorithm >= RC_ALGORITHM_COUNT)
        return NULL;
    return algorithm == RC_AUTO ? "auto" : schedule_of(algorithm)->name;
}

/* Returns the row by which a collective runs. */
static const schedule *row_of(rc_collective collective, rc_algorithm algorithm)
{
    switch (collective) {
    case RC_BROADCAST:
    case RC_REDUCE: return &schedule_chain;
    case RC_GATHER:
    case RC_SCATTER:
    case RC_SEND:
    case RC_RECV: return &schedule_rooted;
    case RC_ALLTOALL:
    case RC_BARRIER: return &schedule_pairwise;
    case RC_ALLGATHER: return algorithm == RC_DIRECT ? &schedule_pairwise : &schedule_ring;
    default: return schedule_of(algorithm);
    }
}

/* Returns how many times `count` elements all chunks or parts hold together. */
static uint64_t blocks_of(rc_collective collective, uint64_t n)
{
    switch (collective) {
    case RC_REDUCE_SCATTER:
    case RC_ALLGATHER:
    case RC_GATHER:
    case RC_SCATTER: return n;
    case RC_ALLTOALL:
    case RC_BARRIER: return n * n;
    default: return 1;
    }
}

void plan_init(plan *p, const rc_call *call, rc_algorithm algorithm, int rank, int world_size,
               uint64_t segment_elems)
{
    uint64_t n = (uint64_t)world_size;
    const schedule *row = row_of(call->collective, algorithm);
    *p = (plan){.collective = call->collective,
                .schedule = row,
                .rank = rank,
                .world_size = world_size,
                .root = call->root,
                .chunk_elems = call->count,
                .total_elems = call->count * blocks_of(call->collective, n)};
    p->chunks = row->chunks(p);
    if (call->collective == RC_ALLREDUCE && !row->has_one_part)
        p->chunk_elems = round_up((call->count + n - 1) / n, PLAN_ALIGN);
    p->segment_elems =
        choose_segment(p->chunk_elems, WANTED_SEGMENTS, LEAST_SEGMENT_ELEMS, segment_elems);
}

/* ---- paths ---- */

uint32_t plan_hops(const plan *p, uint32_t chunk)
{
    int from, to;
    if (p->schedule->ends == NULL)
        return p->schedule->hops(p);
    p->schedule->ends(p, chunk, &from, &to);
    return from != to;
}

int plan_rank_at(const plan *p, uint32_t chunk, uint32_t position)
{
    int from, to;
    if (p->schedule->ends == NULL)
        return p->schedule->rank_at(p, chunk, position);
    p->schedule->ends(p, chunk, &from, &to);
    return position == 0 ? from : to;
}

uint32_t plan_reduce_hops(const plan *p)
{
    return p->schedule->reduce_hops != NULL ? p->schedule->reduce_hops(p) : 0;
}

plan_action plan_action_at(const plan *p, uint32_t chunk, uint32_t step)
{
    if (p->schedule->action_at != NULL)
        return p->schedule->action_at(p, chunk);
    return step < plan_reduce_hops(p) ? PLAN_REDUCE : PLAN_STORE;
}

int plan_is_given(const plan *p, uint32_t chunk)
{
    return p->schedule->is_given == NULL || p->schedule->is_given(p, chunk);
}

uint32_t plan_initial_chunks(const plan *p, uint32_t *first)
{
    return p->schedule->initial_chunks(p, first);
}

uint32_t plan_local_copy_chunk(const plan *p)
{
    return p->schedule->local_copy_chunk != NULL ? p->schedule->local_copy_chunk(p) : PLAN_NO_CHUNK;
}

plan_joining plan_joins(const plan *p)
{
    return p->schedule->joins;
}

/* ---- turns ---- */

int plan_merges(const plan *p)
{
    return p->schedule->merging != NULL;
}

uint32_t plan_turns(const plan *p, uint32_t part)
{
    return p->schedule->merging->turns(p, part);
}

uint32_t plan_turn(const plan *p, uint32_t chunk)
{
    return p->schedule->merging->turn(p, chunk);
}

int plan_comes_first(const plan *p, uint32_t turn)
{
    return p->schedule->merging->comes_first(p, turn);
}

uint32_t plan_send_after_turns(const plan *p, uint32_t part, uint32_t turns)
{
    return p->schedule->merging->send_after_turns(p, part, turns);
}

int plan_is_owner(const plan *p, uint32_t part)
{
    return p->schedule->merging->is_owner(p, part);
}

uint32_t plan_results(const plan *p, uint32_t part)
{
    return p->schedule->merging->results(p, part);
}

uint32_t plan_result(const plan *p, uint32_t part, uint32_t index)
{
    return p->schedule->merging->result(p, part, index);
}

/* ---- counts of frames ---- */

uint64_t plan_receives(const plan *p, int peer)
{
    return p->schedule->frames(p, peer, 0);
}

uint64_t plan_sends(const plan *p, int peer)
{
    return p->schedule->frames(p, peer, 1);
}

int plan_starts_towards(const plan *p, int peer)
{
    uint32_t first = 0, count = plan_merges(p) ? plan_parts(p) : plan_initial_chunks(p, &first);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t chunk = plan_merges(p) ? plan_send_after_turns(p, i, 0) : first + i;
        if (chunk != PLAN_NO_CHUNK && plan_hops(p, chunk) > 0 && plan_segments(p, chunk) > 0 &&
            plan_rank_at(p, chunk, 1) == peer)
            return 1;
    }
    return 0;
}

/* Returns 1 where values are merged: frames go out in rounds, and each needs only frames of earlier
 * rounds. Of all frames between two groups, those of the earliest round need only frames within the
 * groups, and the plan connects all ranks. */
int plan_detects_any_mismatch(const plan *p)
{
    return plan_merges(p) && p->total_elems > 0;
}
