/* comm_state.c - the states of a communicator: see comm.h. In a file of its own, so that the
 * simulation sees every move (tests/sim). */
#include "inside.h"

const unsigned comm_moves[] = {
    [COMM_NEW] = 1 << COMM_RUNNING | 1 << COMM_CLOSED,
    [COMM_RUNNING] = 1 << COMM_FAILING | 1 << COMM_CLOSED,
    [COMM_FAILING] = 1 << COMM_FAILED,
    [COMM_FAILED] = 1 << COMM_CLOSED,
    [COMM_CLOSED] = 0,
};

void comm_move(rc_comm *c, comm_state to)
{
    c->state = to;
}
