/* direct.c - each rank's values of a part go to the part's owner; of an all-reduce the sum goes
 * from there to all. See schedule.h.
 *
 *   r * n + q            what rank r has of part q, to rank q
 *   n * n + q * n + r    the sum of part q, from there to rank r
 */
#include "schedule.h"

static uint32_t direct_chunks(const plan *p)
{
    return (p->collective == RC_ALLREDUCE ? 2 : 1) * schedule_pair_count(p);
}

static int direct_is_given(const plan *p, uint32_t chunk)
{
    return chunk < schedule_pair_count(p);
}

static uint32_t direct_part(const plan *p, uint32_t chunk)
{
    uint32_t n = schedule_world(p);
    return direct_is_given(p, chunk) ? chunk % n : chunk / n - n;
}

static plan_action direct_action_at(const plan *p, uint32_t chunk)
{
    return direct_is_given(p, chunk) ? PLAN_JOIN : PLAN_STORE;
}

uint32_t plan_result_chunk(const plan *p, int to)
{
    return schedule_pair_count(p) + (uint32_t)p->rank * schedule_world(p) + (uint32_t)to;
}

static uint64_t direct_frames_between(const plan *p, int from, int to)
{
    uint32_t pair = (uint32_t)(from * p->world_size + to);
    uint64_t frames = plan_segments(p, pair);
    return p->collective == RC_ALLREDUCE ? frames + plan_segments(p, schedule_pair_count(p) + pair)
                                         : frames;
}

static uint64_t direct_frames(const plan *p, int peer, int sends)
{
    return schedule_frames(p, peer, sends, direct_frames_between);
}

static double direct_time(int world_size, double whole)
{
    return 2 * schedule_exchange_time(world_size) + schedule_least_time(world_size, whole);
}

const schedule schedule_direct = {
    .name = "direct",
    .chunks = direct_chunks,
    .part = direct_part,
    .ends = schedule_pair_ends,
    .action_at = direct_action_at,
    .is_given = direct_is_given,
    .initial_chunks = schedule_pairs_from,
    .frames = direct_frames,
    .joins = PLAN_JOINS_ITS_PART,
    .time = direct_time,
};
