/* job.h - what a simulated job is to do: its ranks with their options, their calls, and the faults
 * that come. A job is drawn from a seed, or is one of the journeys.
 */
#ifndef RINGCOMM_SIM_JOB_H
#define RINGCOMM_SIM_JOB_H

#include "calls.h"
#include "os.h"

enum {
    JOB_MOST_GROUPS = 2,
    JOB_MOST_CALLS = 12,
    JOB_MOST_IN_FLIGHT = 4,
    JOB_MOST_FAULTS = 3,
    JOB_MOST_LANES = 6, /* of a link */
    JOB_JOURNEY_PROCESSES = 3,
    JOB_JOURNEY_LANES = 8, /* two of each link; the last two are of the other group, if any */
    JOB_ALL = 255
};

#define MS 1000000ULL

typedef enum fault_kind {
    FAULT_PAUSE, /* a lane is silent for a while */
    FAULT_SLOW,
    FAULT_NAP, /* a process is stopped for a while */
    FAULT_HARMLESS,
    FAULT_RST = FAULT_HARMLESS, /* from here on a communicator may end */
    FAULT_FIN,
    FAULT_DARK_ONE,
    FAULT_DARK_BOTH,
    FAULT_FLIP,
    FAULT_CLOSE, /* a process closes a descriptor that is not its program's */
    FAULT_KILL,
    FAULT_VANISH, /* a host, with all its lanes */
    FAULT_STOP,
    FAULT_ABORT, /* a rank's program gives up */
    FAULT_KINDS
} fault_kind;

typedef struct fault {
    fault_kind kind;
    int turn; /* comes behind this one; -1: never */
    int lane, end, process;
    uint64_t event; /* it comes with this event (a kill: os_kill_at), not with a turn; or 0 */
} fault;

/* Ranks with a communicator, and their calls. */
typedef struct job_group {
    int size, process[OS_MOST_RANKS]; /* its ranks, and whose each is */
    int is_split;                     /* begins when group 0 has made all its calls */
    rc_comm_config config;
    os_wire wire[3]; /* of each rail */
    int rails, lanes;
    int hosts; /* that share memory; 0: none does */
    int32_t host[OS_MOST_RANKS];
    int calls, in_flight;
    sim_call call[JOB_MOST_CALLS];
} job_group;

typedef struct job {
    uint64_t seed, random; /* for what is drawn while it runs */
    int processes, groups, faults;
    int is_alone;     /* one event a turn, so that a fault can come behind each */
    int never_awakes; /* a sleep ends by an event alone, never by its time */
    os_mood mood;
    const char *kernels[OS_MOST_RANKS];
    uint64_t begins[OS_MOST_RANKS]; /* ns from the start to its first call */
    uint64_t pace[OS_MOST_RANKS];   /* ns between calls, at most */
    job_group group[JOB_MOST_GROUPS];
    fault fault[JOB_MOST_FAULTS];
} job;

/* What is left of a job: a part of its faults (bits) and of each group's calls (so many, the first
 * ones); and whether system calls do all they can. */
typedef struct job_part {
    unsigned faults;
    int calls[JOB_MOST_GROUPS];
    int is_calm;
} job_part;

#define JOB_WHOLE ((job_part){JOB_ALL, {JOB_ALL, JOB_ALL}, 0})

void job_draw(job *j, uint64_t seed);
void job_leave_out(job *j, const job_part *part);

/* Returns the name of a journey, NULL past the last. */
const char *job_journey_name(int journey);
/* Makes a journey with faults that come with events. Lanes that are lost are made anew, or not. */
void job_journey(job *j, int journey, int recovers, const fault *faults, int count);

/* Returns the rank that a process is in a group, or -1. */
int job_rank_of(const job_group *g, int process);

#endif
