/* world.h - a simulated job (job.h), and what must be true of it.
 *
 * Safety, while faults come: a result is right on every rank that gets one, or, with what residuals
 * hold, adds up with those before it (ledger.h); a call fails only after a fault that may end a
 * communicator, with an error that blames a rank which that fault befell; a communicator's error
 * stays; memory is free for the caller as soon as a call is over. Liveness,
 * once there are no more faults (what is dead stays dead, a stopped rank wakes): every call ends,
 * and every rank leaves, in bounded time, and never by the timeout of the call. In a fourth of the
 * jobs, which no fault ends, sleeps end by events alone: what waits there for a timer, though all
 * has come, never ends. At the end nothing is left: descriptors, buffers, memory.
 */
#ifndef RINGCOMM_SIM_WORLD_H
#define RINGCOMM_SIM_WORLD_H

#include "job.h"

/* Runs a job. trace: where every event goes, or NULL. Counts the events that os_kill_at numbers.
 * Returns 1 if all was true, else 0, with a line on stderr. */
int world_run(const job *what, FILE *trace, uint64_t *events);

#endif
