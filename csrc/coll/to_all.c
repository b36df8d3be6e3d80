/* to_all.c - see to_all.h. */
#include "to_all.h"

#include "../base/error.h"
#include "joined.h"
#include "segments.h"

/* Encodes a segment of this rank's contribution and keeps it for the join. *last: the others'
 * contributions have come already. */
static rc_result keep_contribution(rc_work *w, uint32_t chunk, uint32_t segment,
                                   pool_buffer **buffer, int *last)
{
    if ((*buffer = pool_take(w->env->buffers)) == NULL)
        return RC_NO_MEMORY;
    codec_encode(&w->codec, (*buffer)->data, work_src(w, chunk, segment),
                 plan_segment_elems(&w->plan, chunk, segment));
    *last = join_keep(&w->join, segment, w->plan.rank, *buffer);
    return RC_OK;
}

static rc_result start_segment_to_all(rc_work *w, uint32_t segment)
{
    const plan *p = &w->plan;
    uint32_t n = (uint32_t)p->world_size, first = (uint32_t)p->rank * n;
    pool_buffer *buffer = NULL;
    int last = 0;
    if (!joined_sends_src(w))
        RC_TRY(keep_contribution(w, first, segment, &buffer, &last));
    for (uint32_t distance = 1; distance < n; distance++) {
        uint32_t peer = ((uint32_t)p->rank + distance) % n;
        out_frame *frame = work_frame(w, first + peer, segment, 0);
        if (frame == NULL)
            return RC_NO_MEMORY;
        frame->payload = buffer != NULL ? buffer->data : work_src(w, first, segment);
        frame->buffer = buffer != NULL ? pool_share(buffer) : NULL;
        link_queue(w->env->links[peer], frame);
    }
    return last ? joined_segment(w, first, segment) : RC_OK;
}

rc_result to_all_start(rc_work *w)
{
    uint32_t segments = plan_segments(&w->plan, (uint32_t)(w->plan.rank * w->plan.world_size));
    for (uint32_t segment = 0; segment < segments; segment++)
        RC_TRY(start_segment_to_all(w, segment));
    return RC_OK;
}
