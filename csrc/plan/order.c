/* order.c - see order.h. */
#include "order.h"

uint32_t order_parts(const plan *p)
{
    if (p->collective != RC_ALLREDUCE || p->world_size == 1)
        return 0;
    switch (p->algorithm) {
    case RC_RING:
    case RC_DIRECT: return (uint32_t)p->world_size;
    case RC_ONE_SHOT: return 1;
    default: return 0;
    }
}

uint32_t order_part(const plan *p, uint32_t index)
{
    uint32_t n = (uint32_t)p->world_size, rank = (uint32_t)p->rank;
    switch (p->algorithm) {
    case RC_RING: return (rank + n - index) % n;
    case RC_DIRECT: return (rank + 1 + index) % n;
    default: return 0;
    }
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

int order_next(const plan *p, order_cursor *cursor, uint64_t most, order_stretch *next)
{
    while (cursor->parts < order_parts(p)) {
        uint32_t part = order_part(p, cursor->parts); /* also the number of a chunk of it */
        uint64_t left = plan_chunk_elems(p, part) - cursor->within;
        if (left > 0) {
            next->start = plan_src_offset(p, part) + cursor->within;
            next->elems = left < most ? left : most;
            cursor->within += next->elems;
            return most > 0;
        }
        cursor->parts++;
        cursor->within = 0;
    }
    return 0;
}

/* Where a part's share of a row ends. Parts get shorter with their number. */
static uint64_t end_in_row(const plan *p, uint32_t part, const order_cursor *at, uint64_t elems)
{
    uint32_t rank = (uint32_t)p->rank;
    uint64_t all = plan_chunk_elems(p, part);
    if (p->algorithm != RC_DIRECT || part != rank)
        return smaller(at->within + elems, all);
    int others_end = plan_chunk_elems(p, rank == 0) <= at->within;
    return others_end ? all : smaller(at->within, all);
}

int order_next_of_row(const plan *p, order_cursor *cursor, uint64_t elems, order_stretch *next)
{
    while (cursor->parts < order_parts(p)) {
        uint32_t part = order_part(p, cursor->parts++);
        int is_own = p->algorithm == RC_DIRECT && part == (uint32_t)p->rank;
        uint64_t start = is_own ? cursor->own : cursor->within;
        uint64_t end = end_in_row(p, part, cursor, elems);
        if (is_own)
            cursor->own = end;
        *next = (order_stretch){plan_src_offset(p, part) + start, end > start ? end - start : 0};
        if (next->elems > 0)
            return 1;
    }
    cursor->parts = 0;
    cursor->within += elems;
    return 0;
}
