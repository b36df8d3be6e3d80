/* pairwise.c - a chunk from each rank to each, that to itself too; of an all-gather the same one to
 * all. See schedule.h. */
#include "schedule.h"

static uint32_t pairwise_part(const plan *p, uint32_t chunk)
{
    return p->collective == RC_ALLGATHER ? chunk / schedule_world(p) : chunk;
}

static uint32_t pairwise_local_copy_chunk(const plan *p)
{
    if (p->collective == RC_BARRIER)
        return p->world_size == 1 ? 0 : PLAN_NO_CHUNK;
    return (uint32_t)p->rank * schedule_world(p) + (uint32_t)p->rank;
}

const schedule schedule_pairwise = {
    .chunks = schedule_pair_count,
    .part = pairwise_part,
    .ends = schedule_pair_ends,
    .initial_chunks = schedule_pairs_from,
    .local_copy_chunk = pairwise_local_copy_chunk,
    .frames = schedule_pair_frames,
};
