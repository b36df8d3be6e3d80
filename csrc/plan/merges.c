/* merges.c - see merges.h, and plan.h for the functions that begin with plan_. */
#include "merges.h"

#include "rounds.h"

int plan_merges(const plan *p)
{
    return p->algorithm == RC_DOUBLING || p->algorithm == RC_HALVING;
}

static uint32_t world_of(const plan *p)
{
    return (uint32_t)p->world_size;
}

uint32_t plan_parts(const plan *p)
{
    return p->algorithm == RC_HALVING ? world_of(p) : 1;
}

/* ---- halving: ranks by their distance before the part's owner ---- */

static uint32_t distance_of(const plan *p, uint32_t part, uint32_t rank)
{
    return (part + world_of(p) - rank) % world_of(p);
}

static int rank_at_distance(const plan *p, uint32_t part, uint32_t distance)
{
    return (int)((part + world_of(p) - distance) % world_of(p));
}

static uint32_t own_distance(const plan *p, uint32_t part)
{
    return distance_of(p, part, (uint32_t)p->rank);
}

static int parent_of(const plan *p, uint32_t part, uint32_t distance)
{
    return rank_at_distance(p, part, halving_parent(distance, world_of(p)));
}

static int child_of(const plan *p, uint32_t part, uint32_t turn)
{
    uint32_t child = halving_child(own_distance(p, part), world_of(p), turn);
    return rank_at_distance(p, part, child);
}

/* ---- both ---- */

static uint32_t turn_of_peer(const plan *p, int rank, int peer)
{
    uint32_t turn = 0, peers = doubling_peers(rank, p->world_size);
    while (turn < peers && doubling_peer(rank, p->world_size, turn) != peer)
        turn++;
    return turn;
}

void merges_ends(const plan *p, uint32_t chunk, int *from, int *to)
{
    uint32_t n = world_of(p), part = chunk / n % n, rank = chunk % n;
    if (p->algorithm == RC_DOUBLING) {
        *from = (int)part, *to = (int)rank;
        if (turn_of_peer(p, *from, *to) == doubling_peers(*from, p->world_size))
            *to = *from;
        return;
    }
    uint32_t distance = distance_of(p, part, rank);
    *from = *to = (int)rank;
    if (distance > 0)
        *(chunk < n * n ? to : from) = parent_of(p, part, distance);
}

int merges_brings_result(const plan *p, uint32_t chunk)
{
    uint32_t n = world_of(p);
    return p->algorithm == RC_DOUBLING ? doubling_sits_out((int)(chunk % n), p->world_size)
                                       : chunk >= n * n;
}

int merges_is_given(const plan *p, uint32_t chunk)
{
    uint32_t n = world_of(p);
    if (p->algorithm == RC_HALVING)
        return chunk < n * n && halving_children(distance_of(p, chunk / n, chunk % n), n) == 0;
    int from = (int)(chunk / n), to = (int)(chunk % n);
    return !doubling_stands_in(from, p->world_size) && doubling_peer(from, p->world_size, 0) == to;
}

uint32_t plan_turns(const plan *p, uint32_t part)
{
    if (p->algorithm == RC_HALVING)
        return halving_children(own_distance(p, part), world_of(p));
    return doubling_sits_out(p->rank, p->world_size) ? 0 : doubling_peers(p->rank, p->world_size);
}

uint32_t plan_turn(const plan *p, uint32_t chunk)
{
    uint32_t n = world_of(p), turn = 0;
    if (p->algorithm == RC_DOUBLING)
        return turn_of_peer(p, p->rank, (int)(chunk / n));
    while (child_of(p, chunk / n, turn) != (int)(chunk % n))
        turn++;
    return turn;
}

/* Returns 1 if the received value is the first operand. In doubling both ends of a meeting make the
 * same sum, in order of rank. */
int plan_comes_first(const plan *p, uint32_t turn)
{
    return p->algorithm == RC_HALVING || doubling_peer(p->rank, p->world_size, turn) < p->rank;
}

uint32_t plan_send_after_turns(const plan *p, uint32_t part, uint32_t turns)
{
    uint32_t n = world_of(p), rank = (uint32_t)p->rank;
    if (p->algorithm == RC_HALVING)
        return part != rank && turns == plan_turns(p, part) ? part * n + rank : PLAN_NO_CHUNK;
    int waits = turns == 0 && doubling_stands_in(p->rank, p->world_size);
    if (waits || turns >= doubling_peers(p->rank, p->world_size))
        return PLAN_NO_CHUNK;
    return rank * n + (uint32_t)doubling_peer(p->rank, p->world_size, turns);
}

int plan_is_owner(const plan *p, uint32_t part)
{
    return p->algorithm == RC_HALVING ? part == (uint32_t)p->rank
                                      : !doubling_sits_out(p->rank, p->world_size);
}

uint32_t plan_results(const plan *p, uint32_t part)
{
    return p->algorithm == RC_HALVING ? plan_turns(p, part)
                                      : (uint32_t)doubling_stands_in(p->rank, p->world_size);
}

/* Orders the children from the last to the first: the last one has the most to pass on. */
uint32_t plan_result(const plan *p, uint32_t part, uint32_t index)
{
    uint32_t n = world_of(p);
    if (p->algorithm == RC_DOUBLING)
        return (uint32_t)p->rank * n + (uint32_t)p->rank - 1;
    uint32_t turn = plan_turns(p, part) - 1 - index;
    return n * n + part * n + (uint32_t)child_of(p, part, turn);
}

uint32_t merges_meetings(const plan *p, uint32_t part, int peer)
{
    uint32_t met = 0;
    if (p->algorithm == RC_DOUBLING) {
        uint32_t peers = doubling_peers(p->rank, p->world_size);
        return peer < 0 ? peers : turn_of_peer(p, p->rank, peer) < peers;
    }
    uint32_t distance = own_distance(p, part);
    if (distance > 0)
        met += peer < 0 || parent_of(p, part, distance) == peer;
    for (uint32_t turn = 0; turn < plan_turns(p, part); turn++)
        met += peer < 0 || child_of(p, part, turn) == peer;
    return met;
}

/* Returns 1: frames go out in rounds, and each needs only frames of earlier rounds. Of all frames
 * between two groups, those of the earliest round need only frames within the groups, and the plan
 * connects all ranks. */
int plan_detects_any_mismatch(const plan *p)
{
    return plan_merges(p) && p->total_elems > 0;
}
