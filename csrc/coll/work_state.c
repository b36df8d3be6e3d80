/* work_state.c - the states of a work: see work.h. In a file of its own, so that the simulation
 * sees every move (tests/sim). */
#include "work.h"

const unsigned work_moves[] = {
    [WORK_SUBMITTED] =
        1 << WORK_UNMATCHED | 1 << WORK_IN_LINE | 1 << WORK_ON_LINKS | 1 << WORK_ENDING,
    [WORK_UNMATCHED] = 1 << WORK_ON_LINKS | 1 << WORK_ENDING,
    [WORK_IN_LINE] = 1 << WORK_IN_MEMORY | 1 << WORK_ON_LINKS | 1 << WORK_ENDING,
    [WORK_IN_MEMORY] = 1 << WORK_ON_LINKS | 1 << WORK_ENDING,
    [WORK_ON_LINKS] = 1 << WORK_ENDING,
    [WORK_ENDING] = 1 << WORK_OVER,
    [WORK_OVER] = 0,
};

void work_move(rc_work *w, work_state to)
{
    w->state = to;
}
