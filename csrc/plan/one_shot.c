/* one_shot.c - an all-reduce by which each rank sends all others its values. See schedule.h. */
#include "schedule.h"

static plan_action one_shot_action_at(const plan *p, uint32_t chunk)
{
    (void)p, (void)chunk;
    return PLAN_JOIN;
}

static double one_shot_time(int world_size, double whole)
{
    return schedule_exchange_time(world_size) + (world_size - 1) * whole;
}

const schedule schedule_one_shot = {
    .name = "one_shot",
    .chunks = schedule_pair_count,
    .ends = schedule_pair_ends,
    .action_at = one_shot_action_at,
    .initial_chunks = schedule_pairs_from,
    .frames = schedule_pair_frames,
    .joins = PLAN_JOINS_ALL,
    .has_one_part = 1,
    .time = one_shot_time,
};
