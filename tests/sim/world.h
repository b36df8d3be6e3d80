/* world.h - a simulated job: its options and faults, all drawn from one seed, and what must be true
 * of it.
 *
 * Safety, while faults come: a result is right on every rank that gets one; a call fails only after
 * a fault that may end a communicator, with an error that blames a rank which that fault befell; a
 * communicator's error stays; memory is free for the caller as soon as a call is over. Liveness,
 * once there are no more faults (what is dead stays dead, a stopped rank wakes): every call ends,
 * and every rank leaves, in bounded time, and never by the timeout of the call. At the end nothing
 * is left: descriptors, buffers, memory.
 */
#ifndef RINGCOMM_SIM_WORLD_H
#define RINGCOMM_SIM_WORLD_H

#include <stdint.h>
#include <stdio.h>

enum { WORLD_MOST_GROUPS = 2, WORLD_ALL = 255 };

/* What is left of a job: a part of its faults (bits) and of each group's calls (so many, the first
 * ones); and whether system calls do all they can. */
typedef struct world_part {
    unsigned faults;
    int calls[WORLD_MOST_GROUPS];
    int is_calm;
} world_part;

#define WORLD_WHOLE ((world_part){WORLD_ALL, {WORLD_ALL, WORLD_ALL}, 0})

/* Runs the job of this seed, or a part of it. trace: where every event goes, or NULL. Returns 1 if
 * all was true, else 0, with a line on stderr. */
int world_run(uint64_t seed, const world_part *part, FILE *trace);

#endif
