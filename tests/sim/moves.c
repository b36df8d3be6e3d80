/* moves.c - every move of a communicator, a work or a lane of the simulated core, which `ld --wrap`
 * leads here: one that its table does not have ends the program, and so the seed.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../../csrc/comm/comm.h"
#include "../../csrc/comm/inside.h"

static void check_move(const char *what, const unsigned *moves, unsigned from, unsigned to)
{
    if (moves[from] >> to & 1)
        return;
    fprintf(stderr, "a %s goes from state %u to %u\n", what, from, to);
    abort();
}

void __real_comm_move(rc_comm *c, comm_state to);
void __wrap_comm_move(rc_comm *c, comm_state to);
void __wrap_comm_move(rc_comm *c, comm_state to)
{
    check_move("communicator", comm_moves, c->state, to);
    __real_comm_move(c, to);
}

void __real_work_move(rc_work *w, work_state to);
void __wrap_work_move(rc_work *w, work_state to);
void __wrap_work_move(rc_work *w, work_state to)
{
    check_move("work", work_moves, w->state, to);
    __real_work_move(w, to);
}

void __real_lane_move(lane *ln, lane_state to);
void __wrap_lane_move(lane *ln, lane_state to);
void __wrap_lane_move(lane *ln, lane_state to)
{
    check_move("lane", lane_moves, ln->state, to);
    __real_lane_move(ln, to);
}
