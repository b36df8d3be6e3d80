/* sizes.c - how large the chunks and segments of a plan are, and where they lie. See plan.h. */
#include "schedule.h"

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint32_t plan_part(const plan *p, uint32_t chunk)
{
    if (p->schedule->has_one_part)
        return 0;
    return p->schedule->part != NULL ? p->schedule->part(p, chunk) : chunk;
}

uint32_t plan_parts(const plan *p)
{
    return p->schedule->has_one_part ? 1 : (uint32_t)p->world_size;
}

uint64_t plan_chunk_elems(const plan *p, uint32_t chunk)
{
    uint64_t start = smaller((uint64_t)plan_part(p, chunk) * p->chunk_elems, p->total_elems);
    return smaller(p->chunk_elems, p->total_elems - start);
}

uint64_t plan_src_offset(const plan *p, uint32_t chunk)
{
    switch (p->collective) {
    case RC_ALLREDUCE:
    case RC_REDUCE_SCATTER: return (uint64_t)plan_part(p, chunk) * p->chunk_elems;
    case RC_SCATTER: return (uint64_t)chunk * p->chunk_elems;
    case RC_ALLTOALL: return chunk % (uint32_t)p->world_size * p->chunk_elems;
    default: return 0;
    }
}

uint64_t plan_dst_offset(const plan *p, uint32_t chunk)
{
    switch (p->collective) {
    case RC_ALLREDUCE: return (uint64_t)plan_part(p, chunk) * p->chunk_elems;
    case RC_ALLGATHER:
    case RC_GATHER: return (uint64_t)plan_part(p, chunk) * p->chunk_elems;
    case RC_ALLTOALL: return chunk / (uint32_t)p->world_size * p->chunk_elems;
    default: return 0;
    }
}

uint32_t plan_segments(const plan *p, uint32_t chunk)
{
    int says_something =
        p->collective == RC_BARRIER || p->collective == RC_SEND || p->collective == RC_RECV;
    if (says_something && p->total_elems == 0)
        return 1;
    return (uint32_t)((plan_chunk_elems(p, chunk) + p->segment_elems - 1) / p->segment_elems);
}

uint64_t plan_segment_offset(const plan *p, uint32_t segment)
{
    return (uint64_t)segment * p->segment_elems;
}

uint64_t plan_segment_elems(const plan *p, uint32_t chunk, uint32_t segment)
{
    uint64_t elems = plan_chunk_elems(p, chunk);
    return smaller(p->segment_elems, elems - smaller(plan_segment_offset(p, segment), elems));
}
