/* ring.c - chunks that travel around all ranks, one for each rank. See schedule.h. */
#include "schedule.h"

static uint32_t ring_chunks(const plan *p)
{
    return schedule_world(p);
}

static uint32_t ring_hops(const plan *p)
{
    uint32_t around = schedule_world(p) - 1;
    return p->collective == RC_ALLREDUCE ? 2 * around : around;
}

/* A reduce-scatter's chunk ends at the rank of its number, any other begins there. */
static int ring_rank_at(const plan *p, uint32_t chunk, uint32_t position)
{
    uint32_t ahead = p->collective == RC_REDUCE_SCATTER ? 1 : 0;
    return (int)((chunk + ahead + position) % schedule_world(p));
}

static uint32_t ring_reduce_hops(const plan *p)
{
    return p->collective == RC_ALLGATHER ? 0 : schedule_world(p) - 1;
}

static uint32_t ring_initial_chunks(const plan *p, uint32_t *first)
{
    uint32_t n = schedule_world(p), back = p->collective == RC_REDUCE_SCATTER ? 1 : 0;
    *first = ((uint32_t)p->rank + n - back) % n;
    return 1;
}

static uint32_t ring_local_copy_chunk(const plan *p)
{
    if (p->collective == RC_ALLGATHER)
        return (uint32_t)p->rank;
    return p->world_size == 1 ? 0 : PLAN_NO_CHUNK;
}

static double ring_time(int world_size, double whole)
{
    return 2 * (world_size - 1) * HOP_NS + schedule_least_time(world_size, whole);
}

const schedule schedule_ring = {
    .name = "ring",
    .chunks = ring_chunks,
    .hops = ring_hops,
    .rank_at = ring_rank_at,
    .reduce_hops = ring_reduce_hops,
    .initial_chunks = ring_initial_chunks,
    .local_copy_chunk = ring_local_copy_chunk,
    .frames = schedule_frames_around,
    .time = ring_time,
};
