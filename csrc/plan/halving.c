/* halving.c - an all-reduce by which the values of each part are summed along a tree that ends at
 * the part's owner, and the sum goes back along it. See schedule.h, rounds.h.
 *
 *   q * n + r            what rank r has of part q, to its parent in the part's tree
 *   n * n + q * n + r    the sum of part q, from there to rank r
 *
 * Ranks are numbered by their distance before the part's owner.
 */
#include "rounds.h"
#include "schedule.h"

static uint32_t halving_chunks(const plan *p)
{
    return 2 * schedule_pair_count(p);
}

static uint32_t halving_part(const plan *p, uint32_t chunk)
{
    return chunk / schedule_world(p) % schedule_world(p);
}

static uint32_t halving_distance_of(const plan *p, uint32_t part, uint32_t rank)
{
    return (part + schedule_world(p) - rank) % schedule_world(p);
}

static int halving_rank_at_distance(const plan *p, uint32_t part, uint32_t distance)
{
    return (int)((part + schedule_world(p) - distance) % schedule_world(p));
}

static uint32_t halving_own_distance(const plan *p, uint32_t part)
{
    return halving_distance_of(p, part, (uint32_t)p->rank);
}

static int halving_parent_of(const plan *p, uint32_t part, uint32_t distance)
{
    return halving_rank_at_distance(p, part, halving_parent(distance, schedule_world(p)));
}

static int halving_child_of(const plan *p, uint32_t part, uint32_t turn)
{
    uint32_t child = halving_child(halving_own_distance(p, part), schedule_world(p), turn);
    return halving_rank_at_distance(p, part, child);
}

static int halving_brings_sum(const plan *p, uint32_t chunk)
{
    return chunk >= schedule_pair_count(p);
}

static void halving_ends(const plan *p, uint32_t chunk, int *from, int *to)
{
    uint32_t rank = chunk % schedule_world(p),
             distance = halving_distance_of(p, halving_part(p, chunk), rank);
    *from = *to = (int)rank;
    if (distance > 0)
        *(halving_brings_sum(p, chunk) ? from : to) =
            halving_parent_of(p, halving_part(p, chunk), distance);
}

static plan_action halving_action_at(const plan *p, uint32_t chunk)
{
    return halving_brings_sum(p, chunk) ? PLAN_STORE : PLAN_MERGE;
}

static int halving_is_given(const plan *p, uint32_t chunk)
{
    uint32_t n = schedule_world(p);
    return !halving_brings_sum(p, chunk) &&
           halving_children(halving_distance_of(p, halving_part(p, chunk), chunk % n), n) == 0;
}

static uint32_t halving_turns(const plan *p, uint32_t part)
{
    return halving_children(halving_own_distance(p, part), schedule_world(p));
}

static uint32_t halving_turn(const plan *p, uint32_t chunk)
{
    uint32_t n = schedule_world(p), turn = 0;
    while (halving_child_of(p, chunk / n, turn) != (int)(chunk % n))
        turn++;
    return turn;
}

static int halving_comes_first(const plan *p, uint32_t turn)
{
    (void)p, (void)turn;
    return 1;
}

static int halving_is_owner(const plan *p, uint32_t part)
{
    return part == (uint32_t)p->rank;
}

static uint32_t halving_send_after_turns(const plan *p, uint32_t part, uint32_t over)
{
    if (halving_is_owner(p, part) || over != halving_turns(p, part))
        return PLAN_NO_CHUNK;
    return part * schedule_world(p) + (uint32_t)p->rank;
}

/* Orders the children from the last to the first: the last one has the most to pass on. */
static uint32_t halving_result(const plan *p, uint32_t part, uint32_t index)
{
    uint32_t n = schedule_world(p), turn = halving_turns(p, part) - 1 - index;
    return n * n + part * n + (uint32_t)halving_child_of(p, part, turn);
}

/* Counts the meetings of this rank over a part, with a peer or with all (-1). */
static uint32_t halving_meetings(const plan *p, uint32_t part, int peer)
{
    uint32_t met = 0, distance = halving_own_distance(p, part);
    if (distance > 0)
        met += peer < 0 || halving_parent_of(p, part, distance) == peer;
    for (uint32_t turn = 0; turn < halving_turns(p, part); turn++)
        met += peer < 0 || halving_child_of(p, part, turn) == peer;
    return met;
}

/* Each pair that meets sends one chunk either way. */
static uint64_t halving_frames(const plan *p, int peer, int sends)
{
    uint64_t count = 0;
    (void)sends;
    for (uint32_t part = 0; part < schedule_world(p); part++)
        count +=
            (uint64_t)halving_meetings(p, part, peer) * plan_segments(p, part * schedule_world(p));
    return count;
}

static double halving_time(int world_size, double whole)
{
    int up = 0;
    while (1 << up < world_size)
        up++;
    return 2 * up * HOP_NS + schedule_least_time(world_size, whole);
}

const schedule schedule_halving = {
    .name = "halving",
    .chunks = halving_chunks,
    .part = halving_part,
    .ends = halving_ends,
    .action_at = halving_action_at,
    .is_given = halving_is_given,
    .frames = halving_frames,
    .merging = &(const merging){.turns = halving_turns,
                                .turn = halving_turn,
                                .comes_first = halving_comes_first,
                                .send_after_turns = halving_send_after_turns,
                                .is_owner = halving_is_owner,
                                .results = halving_turns,
                                .result = halving_result},
    .time = halving_time,
};
