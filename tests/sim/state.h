/* state.h - the state of a simulated job, for the files that run it: world.c (turns), members.c
 * (communicators, from bring-up to their end), tasks.c (calls and their results), faults.c (faults
 * and what errors may follow).
 */
#ifndef RINGCOMM_SIM_STATE_H
#define RINGCOMM_SIM_STATE_H

#include "../../csrc/comm/comm.h"
#include "ledger.h"
#include "packed.h"
#include "world.h"

enum { MOST_LATE = 16 };

/* A call of a rank in flight. */
typedef struct task {
    rc_work *work;
    const sim_call *what;
    uint8_t *src, *dst;
    packed *packed;
    int is_let_go; /* the core has the work alone, until it hands it over at its end */
} task;

/* A rank in a group: one communicator. */
typedef struct member {
    enum { WAITS, WORKS, LEAVES, GONE } state;
    rc_comm *comm;
    rc_feedback *residuals;
    int next, in_flight;
    task tasks[JOB_MOST_IN_FLIGHT];
    rc_error error;
    uint64_t leave_until;
} member;

typedef struct group {
    const job_group *is;
    int is_open;
    member members[OS_MOST_RANKS]; /* by rank */
    ledger ledger;
} group;

/* A link between two ranks, a < b: its lanes by their index, as numbers of the system's. A fault is
 * noted by the code with which calls may fail for it. */
typedef struct sim_link {
    const group *group;
    int a, b, count, lanes[JOB_MOST_LANES];
    unsigned hurt[JOB_MOST_LANES];
} sim_link;

/* A new socket of a lane which a rank takes over later. */
typedef struct handover {
    group *group;
    int rank, peer, lane, fd;
    rc_lane_mark ours, theirs;
} handover;

typedef struct world {
    job job;
    uint64_t began, quiet_at;
    sim_link links[JOB_MOST_GROUPS * OS_MOST_RANKS * OS_MOST_RANKS / 2];
    int link_count, anew; /* lanes made anew that were well */
    handover late[MOST_LATE];
    uint64_t calls_at[OS_MOST_RANKS]; /* its next call, at the earliest; by process, as the next */
    uint64_t due[OS_MOST_RANKS];      /* when its program wants a turn */
    int turn, failed, crawls;         /* 1: a goodbye may take long */
    int slowed;                       /* how often a lane was taken for a slow one */
    unsigned suspects, confused;      /* processes that may be blamed; that may blame anyone */
    unsigned codes;                   /* bits of the results with which calls may fail */
    uint64_t befallen_at;             /* when the last fault came, or the last rank went */
    uint64_t bound; /* ns that everything may take once there are no more faults */
    rc_engine *engines[OS_MOST_RANKS];
    group group[JOB_MOST_GROUPS];
} world;

/* ---- world.c ---- */

/* Says what is not true; the first one counts. */
void fails(world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Fails with anything but RC_OK. */
void check(world *w, rc_result result, const char *what);
uint64_t pick(world *w, uint64_t bound);
/* Gives a process's program a turn at this time, or earlier. */
void want_turn(world *w, int process, uint64_t at);
int number_of(const world *w, const group *g);

/* ---- tasks.c ---- */

/* Makes the next calls of a rank, as far as they are due and may be in flight. */
void call_more(world *w, group *g, int rank);
/* Ends the calls that are over. */
void collect_ends(world *w, group *g, int rank);
/* Ends the call whose work the engine has handed over. */
void end_let_go(world *w, int process, rc_work *work);
/* Frees what is left of a rank's calls, its communicator freed. */
void drop_tasks(world *w, member *m, int rank);

/* ---- faults.c ---- */

/* Brings the faults that are due. */
void bring_faults(world *w);
/* Checks the communicator's error: it comes once, stays, and follows from a fault. */
void look_at_error(world *w, group *g, int rank);

/* ---- members.c ---- */

/* Makes the communicators of a group, which the ranks start in a turn of theirs. */
void open_group(world *w, group *g);
void start_member(world *w, group *g, int rank);
/* Makes lanes anew that a rank has lost, where it dials. */
void renew_lanes(world *w, group *g, int rank);
/* Begins a group that the first one is split into, once its ranks are all there. */
void split(world *w, group *g);
/* Returns 1 if a group is open, or may be still. */
int may_come(const world *w, const group *g);
/* Has a rank that has made its calls leave, and ends it once it has left. */
void leave(world *w, group *g, int rank);
/* Frees what is left of a rank. */
void end_member(world *w, group *g, int rank);

#endif
