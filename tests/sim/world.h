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

/* Runs the job of this seed. trace: where every event goes, or NULL. Returns 1 if all was true,
 * else 0, with a line on stderr. */
int world_run(uint64_t seed, FILE *trace);
/* Returns how often a fault of each kind came, in words. */
void world_count(FILE *out);

#endif
