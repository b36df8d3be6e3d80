/* rooted.c - what one rank sends others, or they send it: a chunk of each, in a gather and a
 * scatter; the chunk of a message. See schedule.h. */
#include "schedule.h"

static uint32_t rooted_chunks(const plan *p)
{
    return p->collective == RC_GATHER || p->collective == RC_SCATTER ? schedule_world(p) : 1;
}

static void rooted_ends(const plan *p, uint32_t chunk, int *from, int *to)
{
    switch (p->collective) {
    case RC_GATHER: *from = (int)chunk, *to = p->root; break;
    case RC_SCATTER: *from = p->root, *to = (int)chunk; break;
    case RC_SEND: *from = p->rank, *to = p->root; break;
    default: *from = p->root, *to = p->rank; break;
    }
}

static uint32_t rooted_initial_chunks(const plan *p, uint32_t *first)
{
    *first = p->collective == RC_GATHER ? (uint32_t)p->rank : 0;
    switch (p->collective) {
    case RC_SCATTER: return p->rank == p->root ? schedule_world(p) : 0;
    case RC_RECV: return 0;
    default: return 1;
    }
}

static uint32_t rooted_local_copy_chunk(const plan *p)
{
    if (p->collective == RC_GATHER || p->collective == RC_SCATTER)
        return p->rank == p->root ? (uint32_t)p->rank : PLAN_NO_CHUNK;
    return p->world_size == 1 ? 0 : PLAN_NO_CHUNK;
}

static uint64_t rooted_frames_between(const plan *p, int from, int to)
{
    uint32_t chunk = p->collective == RC_GATHER    ? (uint32_t)from
                     : p->collective == RC_SCATTER ? (uint32_t)to
                                                   : 0;
    int first, last;
    rooted_ends(p, chunk, &first, &last);
    return first == from && last == to ? plan_segments(p, chunk) : 0;
}

static uint64_t rooted_frames(const plan *p, int peer, int sends)
{
    return schedule_frames(p, peer, sends, rooted_frames_between);
}

const schedule schedule_rooted = {
    .chunks = rooted_chunks,
    .ends = rooted_ends,
    .initial_chunks = rooted_initial_chunks,
    .local_copy_chunk = rooted_local_copy_chunk,
    .frames = rooted_frames,
};
