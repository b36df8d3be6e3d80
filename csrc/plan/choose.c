/* choose.c - which algorithm is fastest for a call. See plan.h.
 *
 * Problem. A ring sends the least a rank can, but its 2 (N-1) hops each wait for the network and
 * for a thread to wake up; for little data that is all the time there is.
 *
 * Design. The time of an all-reduce of S bytes among N ranks, with HOP for one hop, MESSAGE for
 * each further message that a rank handles in it, and B bytes per ns (the alpha-beta model; Thakur,
 * Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005):
 *
 *   ring      2 (N-1) HOP                      + 2 (N-1)/N S/B
 *   direct    2 (HOP + (N-2) MESSAGE)          + 2 (N-1)/N S/B
 *   one-shot     HOP + (N-2) MESSAGE           +   (N-1)   S/B
 *
 * By this a ring would never win, but it sends to one neighbour and not to all at once, which keeps
 * the ports of a switch from overflowing, and reduces while it receives. So it takes over where the
 * hops no longer show.
 *
 * Where a table was measured (python -m ringcomm tune), what it says of a size stands for the
 * setting, and the model is asked only where it says nothing.
 *
 * Pure, and a function of what all ranks know alike: the call, the world, the setting, the table.
 */
#include "plan.h"

/* Measured between hosts whose threads sleep when they wait; 1 Gbit/s, where it matters most. */
#define HOP_NS 50e3
#define MESSAGE_NS 10e3
#define BYTES_PER_NS 0.117
/* A ring's hops show until they are less than this part of its time. */
#define SHOWS 0.05

rc_algorithm plan_choose(const rc_call *call, int world_size, uint64_t wire_bytes,
                         rc_algorithm wanted)
{
    if (call->collective != RC_ALLREDUCE || world_size == 1)
        return RC_RING;
    if (wanted != RC_AUTO)
        return wanted;
    double n = world_size;
    double exchange = HOP_NS + (n - 2) * MESSAGE_NS;
    double whole = (double)wire_bytes / BYTES_PER_NS;
    double shared = 2 * (n - 1) / n * whole;
    double ring = 2 * (n - 1) * HOP_NS, direct = 2 * exchange;
    double saved = world_size == 2 ? ring - exchange : ring - direct;
    if (saved < SHOWS * (ring + shared))
        return RC_RING;
    return exchange + (n - 1) * whole <= direct + shared ? RC_ONE_SHOT : RC_DIRECT;
}

rc_algorithm plan_tuned(const plan_table *table, uint64_t wire_bytes)
{
    for (int i = 0; i < table->count; i++)
        if (wire_bytes <= table->rows[i].up_to)
            return table->rows[i].algorithm;
    return RC_AUTO;
}
