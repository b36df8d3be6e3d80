/* rounds.c - see rounds.h. */
#include "rounds.h"

/* ---- doubling ---- */

static int floor_log2(int n)
{
    int log = 0;
    while (n >> (log + 1) > 0)
        log++;
    return log;
}

/* Returns the number of ranks that sit out. */
static int surplus(int world_size)
{
    return world_size - (1 << floor_log2(world_size));
}

int doubling_sits_out(int rank, int world_size)
{
    return rank < 2 * surplus(world_size) && rank % 2 == 0;
}

int doubling_stands_in(int rank, int world_size)
{
    return rank < 2 * surplus(world_size) && rank % 2 == 1;
}

uint32_t doubling_peers(int rank, int world_size)
{
    if (doubling_sits_out(rank, world_size))
        return 1;
    return (uint32_t)(doubling_stands_in(rank, world_size) + floor_log2(world_size));
}

int doubling_peer(int rank, int world_size, uint32_t turn)
{
    int out = surplus(world_size);
    if (doubling_sits_out(rank, world_size))
        return rank + 1;
    if (doubling_stands_in(rank, world_size) && turn-- == 0)
        return rank - 1;
    int place = rank < 2 * out ? rank / 2 : rank - out;
    int partner = place ^ (1 << turn);
    return partner < out ? 2 * partner + 1 : partner + out;
}

/* ---- halving ---- */

static uint32_t half_of(uint32_t n)
{
    return (n + 1) / 2;
}

/* Counts the children: a rank sends in the round after the first one that brings it nothing, so its
 * children send in the first rounds. */
uint32_t halving_children(uint32_t distance, uint32_t world_size)
{
    uint32_t children = 0;
    for (uint32_t s = world_size; s > 1 && distance + half_of(s) < s; s = half_of(s))
        children++;
    return children;
}

uint32_t halving_child(uint32_t distance, uint32_t world_size, uint32_t turn)
{
    uint32_t s = half_of(world_size);
    while (turn-- > 0)
        s = half_of(s);
    return distance + s;
}

uint32_t halving_parent(uint32_t distance, uint32_t world_size)
{
    uint32_t s = half_of(world_size);
    while (distance < s)
        s = half_of(s);
    return distance - s;
}
