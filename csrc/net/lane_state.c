/* lane_state.c - the states of a lane: see lane.h. In a file of its own, so that the simulation
 * sees every move (tests/sim). */
#include "lane.h"

const unsigned lane_moves[] = {
    [LANE_NEW] = 1 << LANE_OPEN | 1 << LANE_CLOSED,
    [LANE_OPEN] = 1 << LANE_LEFT | 1 << LANE_LOST | 1 << LANE_DETACHED | 1 << LANE_CLOSED,
    [LANE_LOST] = 1 << LANE_OPEN | 1 << LANE_CLOSED,
    [LANE_LEFT] = 1 << LANE_DETACHED | 1 << LANE_CLOSED,
    [LANE_DETACHED] = 1 << LANE_CLOSED,
    [LANE_CLOSED] = 0,
};

void lane_move(lane *ln, lane_state to)
{
    ln->state = to;
}
