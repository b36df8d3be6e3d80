/* chain.c - one chunk from rank to rank: from the root on, or towards it. See schedule.h. */
#include "schedule.h"

static uint32_t chain_chunks(const plan *p)
{
    (void)p;
    return 1;
}

static uint32_t chain_hops(const plan *p)
{
    return schedule_world(p) - 1;
}

static int chain_is_reduce(const plan *p)
{
    return p->collective == RC_REDUCE;
}

static int chain_rank_at(const plan *p, uint32_t chunk, uint32_t position)
{
    (void)chunk;
    return (int)(((uint32_t)(p->root + chain_is_reduce(p)) + position) % schedule_world(p));
}

static uint32_t chain_reduce_hops(const plan *p)
{
    return chain_is_reduce(p) ? schedule_world(p) - 1 : 0;
}

static uint32_t chain_initial_chunks(const plan *p, uint32_t *first)
{
    *first = 0;
    return p->rank == chain_rank_at(p, 0, 0);
}

static uint32_t chain_local_copy_chunk(const plan *p)
{
    int stays = chain_is_reduce(p) ? p->world_size == 1 : p->rank == p->root;
    return stays ? 0 : PLAN_NO_CHUNK;
}

const schedule schedule_chain = {
    .chunks = chain_chunks,
    .hops = chain_hops,
    .rank_at = chain_rank_at,
    .reduce_hops = chain_reduce_hops,
    .initial_chunks = chain_initial_chunks,
    .local_copy_chunk = chain_local_copy_chunk,
    .frames = schedule_frames_around,
};
