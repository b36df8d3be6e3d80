/* doubling.c - an all-reduce by which pairs of ranks exchange all that they have. See schedule.h,
 * rounds.h.
 *
 *   a * n + b    what a has when it meets b; other numbers are chunks of no hops
 */
#include "rounds.h"
#include "schedule.h"

static uint32_t doubling_turn_of_peer(const plan *p, int rank, int peer)
{
    uint32_t turn = 0, peers = doubling_peers(rank, p->world_size);
    while (turn < peers && doubling_peer(rank, p->world_size, turn) != peer)
        turn++;
    return turn;
}

static int doubling_meet(const plan *p, int rank, int peer)
{
    return doubling_turn_of_peer(p, rank, peer) < doubling_peers(rank, p->world_size);
}

static void doubling_ends(const plan *p, uint32_t chunk, int *from, int *to)
{
    schedule_pair_ends(p, chunk, from, to);
    if (!doubling_meet(p, *from, *to))
        *to = *from;
}

/* A rank that sits out takes the result. */
static plan_action doubling_action_at(const plan *p, uint32_t chunk)
{
    int to = (int)(chunk % schedule_world(p));
    return doubling_sits_out(to, p->world_size) ? PLAN_STORE : PLAN_MERGE;
}

static int doubling_is_given(const plan *p, uint32_t chunk)
{
    int from, to;
    schedule_pair_ends(p, chunk, &from, &to);
    return !doubling_stands_in(from, p->world_size) && doubling_peer(from, p->world_size, 0) == to;
}

static uint32_t doubling_turns(const plan *p, uint32_t part)
{
    (void)part;
    return doubling_sits_out(p->rank, p->world_size) ? 0 : doubling_peers(p->rank, p->world_size);
}

static uint32_t doubling_turn(const plan *p, uint32_t chunk)
{
    return doubling_turn_of_peer(p, p->rank, (int)(chunk / schedule_world(p)));
}

/* Both ends of a meeting make the same sum, in order of rank. */
static int doubling_comes_first(const plan *p, uint32_t turn)
{
    return doubling_peer(p->rank, p->world_size, turn) < p->rank;
}

static uint32_t doubling_chunk_to(const plan *p, int peer)
{
    return (uint32_t)(p->rank * p->world_size + peer);
}

static uint32_t doubling_send_after_turns(const plan *p, uint32_t part, uint32_t over)
{
    (void)part;
    int waits = over == 0 && doubling_stands_in(p->rank, p->world_size);
    if (waits || over >= doubling_peers(p->rank, p->world_size))
        return PLAN_NO_CHUNK;
    return doubling_chunk_to(p, doubling_peer(p->rank, p->world_size, over));
}

static int doubling_is_owner(const plan *p, uint32_t part)
{
    (void)part;
    return !doubling_sits_out(p->rank, p->world_size);
}

static uint32_t doubling_results(const plan *p, uint32_t part)
{
    (void)part;
    return (uint32_t)doubling_stands_in(p->rank, p->world_size);
}

static uint32_t doubling_result(const plan *p, uint32_t part, uint32_t index)
{
    (void)part, (void)index;
    return doubling_chunk_to(p, p->rank - 1);
}

/* Each pair that meets sends one chunk either way. */
static uint64_t doubling_frames(const plan *p, int peer, int sends)
{
    (void)sends;
    uint64_t met = peer < 0 ? doubling_peers(p->rank, p->world_size)
                            : (uint64_t)doubling_meet(p, p->rank, peer);
    return met * plan_segments(p, 0);
}

static double doubling_time(int world_size, double whole)
{
    int down = 0;
    while (world_size >> (down + 1) > 0)
        down++;
    int is_power = world_size == 1 << down;
    return (down + (is_power ? 0 : 2)) * (HOP_NS + whole);
}

const schedule schedule_doubling = {
    .name = "doubling",
    .chunks = schedule_pair_count,
    .ends = doubling_ends,
    .action_at = doubling_action_at,
    .is_given = doubling_is_given,
    .frames = doubling_frames,
    .merging = &(const merging){.turns = doubling_turns,
                                .turn = doubling_turn,
                                .comes_first = doubling_comes_first,
                                .send_after_turns = doubling_send_after_turns,
                                .is_owner = doubling_is_owner,
                                .results = doubling_results,
                                .result = doubling_result},
    .has_one_part = 1,
    .time = doubling_time,
};
