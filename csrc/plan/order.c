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
