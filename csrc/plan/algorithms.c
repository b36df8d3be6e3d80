/* algorithms.c - the table of algorithms. See schedule.h. */
#include "schedule.h"

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
