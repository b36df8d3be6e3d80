/* one_shot.c - see one_shot.h. */
#include "one_shot.h"

#include "../base/error.h"

int one_shot_sends_src(const rc_work *w)
{
    return w->plan.algorithm == RC_ONE_SHOT && codec_sends_plain(&w->codec);
}

/* What is encoded is kept as it is sent. */
static rc_result keep_contribution(rc_work *w, uint32_t chunk, uint32_t segment,
                                   pool_buffer **buffer)
{
    if ((*buffer = pool_take(w->env->buffers)) == NULL)
        return RC_NO_MEMORY;
    codec_encode(&w->codec, (*buffer)->data, work_src(w, chunk, segment),
                 plan_segment_elems(&w->plan, chunk, segment));
    join_keep(&w->join, segment, w->plan.rank, *buffer);
    return RC_OK;
}

rc_result one_shot_start(rc_work *w)
{
    const plan *p = &w->plan;
    uint32_t n = (uint32_t)p->world_size, first = (uint32_t)p->rank * n;
    for (uint32_t segment = 0; segment < plan_segments(p, first); segment++) {
        pool_buffer *buffer = NULL;
        if (!one_shot_sends_src(w))
            RC_TRY(keep_contribution(w, first, segment, &buffer));
        for (uint32_t distance = 1; distance < n; distance++) {
            uint32_t peer = ((uint32_t)p->rank + distance) % n;
            out_frame *frame = work_frame(w, first + peer, segment, 0);
            if (frame == NULL)
                return RC_NO_MEMORY;
            frame->payload = buffer != NULL ? buffer->data : work_src(w, first, segment);
            frame->buffer = buffer != NULL ? pool_share(buffer) : NULL;
            link_queue(w->env->links[peer], frame);
        }
    }
    return RC_OK;
}
