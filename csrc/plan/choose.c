/* choose.c - the choice of the fastest algorithm and segments for a call. See plan.h.
 *
 * Problem. A ring sends the least a rank can, but each of its 2 (N-1) hops waits for the network
 * and for a thread to wake up; for little data that is nearly all of the time.
 *
 * Design. The time of an all-reduce of S bytes among N ranks, with HOP for one hop, MESSAGE for
 * each further message that a rank handles in it, B bytes per ns, L = log2 N rounded up and l
 * rounded down (the alpha-beta model; Thakur, Rabenseifner and Gropp, "Optimization of Collective
 * Communication Operations in MPICH", 2005):
 *
 *   ring      2 (N-1) HOP                      + 2 (N-1)/N S/B
 *   direct    2 (HOP + (N-2) MESSAGE)          + 2 (N-1)/N S/B
 *   one-shot     HOP + (N-2) MESSAGE           +   (N-1)   S/B
 *   doubling     l HOP                         +      l    S/B     and 2 (HOP + S/B) if l < L
 *   halving    2 L HOP                         + 2 (N-1)/N S/B
 *
 * By this a ring would never win, but it sends to one neighbour and not to all at once, which keeps
 * the ports of a switch from overflowing, and reduces while it receives. So it takes over where the
 * hops no longer show.
 *
 * An all-gather of S bytes from each is N-1 hops around the ring, or one from each rank to all:
 *
 *   ring      (N-1) HOP                        +   (N-1)   S/B
 *   direct       HOP + (N-2) MESSAGE           +   (N-1)   S/B
 *
 * A chain of N-1 hops passes on S bytes in segments of C. With FRAME for the handling of a segment,
 * the last byte arrives after S/C FRAME + S/B + HOP + (N-2) (HOP + C/B): the least time is at
 * C = sqrt(S FRAME B / (N-2)), with the B of 1 Gbit/s. (16 MiB and 4 MiB from one of 8 ranks: 4 and
 * 15 % less time than in segments of 256 KiB, from one of 4 3 and 6 %.)
 *
 * The B of an all-reduce is what the network ports report, not a measured rate: with a measured one
 * the choice, and the order of a sum, would change from start to start. It is that of one port, as
 * a small message is a single segment, which takes one.
 *
 * Pure, and a function of what all ranks know: the call, the world, the setting, the speed.
 */
#include <math.h>

#include "schedule.h"

/* Cost of a segment, beside those of a hop and a message (schedule.h). */
#define FRAME_NS 20e3
/* Rate of TCP over 1 Gbit/s. */
#define BYTES_PER_NS 0.117
/* Speed assumed where none is known, and the highest that counts: above it a byte costs as much in
 * copies, checksums and system calls. */
#define UNKNOWN_MBIT 1000
#define MOST_MBIT 5000
/* Smallest segment in a chain; smaller ones cost more in handling than they save, where ranks share
 * cores.
 */
#define LEAST_LINK_BYTES 32768
/* Part of a ring's time below which its hops do not matter. */
#define SHOWS 0.05

static rc_algorithm one_plan(const rc_call *call, int world_size)
{
    switch (call->collective) {
    case RC_ALLREDUCE: return world_size == 2 ? RC_ONE_SHOT : RC_DIRECT;
    case RC_REDUCE_SCATTER: return RC_DIRECT;
    default: return RC_RING;
    }
}

/* Returns the time (ns) of so many bytes on a link. */
static double time_on_wire(uint64_t bytes, uint32_t link_mbit)
{
    uint32_t mbit = link_mbit == 0 ? UNKNOWN_MBIT : link_mbit < MOST_MBIT ? link_mbit : MOST_MBIT;
    return (double)bytes / (BYTES_PER_NS / 1000 * mbit);
}

/* Returns 1 if the hops of a ring show beside those of what takes `least`. */
static int ring_shows(double ring, double least)
{
    return ring - least >= SHOWS * ring;
}

/* Returns the way of an all-gather. */
static rc_algorithm choose_gather(int world_size, double own)
{
    double wire = (world_size - 1) * own, ring = (world_size - 1) * HOP_NS + wire;
    return ring_shows(ring, schedule_exchange_time(world_size) + wire) ? RC_DIRECT : RC_RING;
}

rc_algorithm plan_estimate(int world_size, uint64_t wire_bytes, uint32_t link_mbit, double *seconds)
{
    double whole = time_on_wire(wire_bytes, link_mbit);
    double ring = schedule_ring.time(world_size, whole), least = ring;
    rc_algorithm best = RC_RING;
    seconds[RC_AUTO] = 0.0;
    for (int a = RC_AUTO + 1; a < RC_ALGORITHM_COUNT; a++) {
        double time = schedule_of((rc_algorithm)a)->time(world_size, whole);
        seconds[a] = time * 1e-9;
        if (time < least) {
            least = time;
            best = (rc_algorithm)a;
        }
    }
    return ring_shows(ring, least) ? best : RC_RING;
}

rc_algorithm plan_choose(const rc_call *call, int world_size, uint64_t wire_bytes,
                         uint32_t link_mbit, rc_algorithm wanted)
{
    if (world_size > 1 && plan_quantises(call))
        return one_plan(call, world_size);
    if (call->collective == RC_ALLGATHER && wanted != RC_RING)
        return choose_gather(world_size, time_on_wire(wire_bytes, link_mbit));
    if (call->collective != RC_ALLREDUCE || world_size == 1)
        return RC_RING;
    if (wanted != RC_AUTO)
        return wanted;
    double seconds[RC_ALGORITHM_COUNT];
    return plan_estimate(world_size, wire_bytes, link_mbit, seconds);
}

uint64_t plan_segment_limit(const rc_call *call, int world_size, uint64_t wire_bytes_per_elem,
                            uint64_t most)
{
    int is_chain = call->collective == RC_BROADCAST || call->collective == RC_REDUCE;
    if (!is_chain || world_size <= 2)
        return most;
    double bytes = (double)call->count * (double)wire_bytes_per_elem;
    double best = sqrt(bytes * FRAME_NS * BYTES_PER_NS / (world_size - 2));
    best = best < LEAST_LINK_BYTES ? LEAST_LINK_BYTES : best;
    uint64_t elems = (uint64_t)(best / (double)wire_bytes_per_elem);
    elems = (elems + PLAN_ALIGN - 1) / PLAN_ALIGN * PLAN_ALIGN;
    return elems < most ? elems : most;
}

int plan_may_share(const rc_call *call, int hosts, rc_algorithm wanted)
{
    int is_broadcast = call->collective == RC_BROADCAST && hosts == 1;
    if (call->count == 0 || (call->collective != RC_ALLREDUCE && !is_broadcast))
        return 0;
    if (plan_quantises(call))
        return hosts > 1 && wanted == RC_AUTO;
    return wanted == RC_AUTO || (hosts == 1 && (wanted == RC_DIRECT || wanted == RC_ONE_SHOT));
}

/* Costs in shared memory: the rate at which a rank copies and adds, and the delay until it sees
 * another's store. Orders of magnitude that `bench/peers.py --all --rows shared` shows. */
#define SHARED_BYTES_PER_NS 8.0
#define SHARED_HOP_NS 1e3

int plan_shares_whole(int world_size, uint64_t wire_bytes, rc_algorithm wanted)
{
    if (wanted != RC_AUTO)
        return wanted == RC_ONE_SHOT;
    double n = world_size, whole = (double)wire_bytes / SHARED_BYTES_PER_NS;
    double one_shot = SHARED_HOP_NS + n * whole;
    double direct = 2 * SHARED_HOP_NS + (3 * (n - 1) + 1) / n * whole;
    return one_shot <= direct;
}
