/* segments.c - what every machine of a work needs: where its segments lie, and how they are sent.
 * See work.h. */
#include <stdlib.h>
#include <string.h>

#include "work.h"

/* ---- the call ---- */

double work_divisor(const rc_call *call, int contributors)
{
    return call->op == RC_AVG ? contributors : 1.0;
}

const rc_call *work_user_call(const rc_work *w)
{
    return w->is_shared ? &w->shared.call : &w->call;
}

/* ---- geometry ---- */

uint64_t work_segment_bytes(const rc_work *w, uint64_t elems)
{
    return w->quant != NULL ? quant_bytes(w->quant, elems) : elems * w->codec.wire_bytes;
}

/* ---- sending ---- */

out_frame *work_env_frame(work_env *env)
{
    out_frame *frame = *env->frames;
    if (frame != NULL)
        *env->frames = frame->next;
    else if ((frame = malloc(sizeof *frame)) == NULL)
        return NULL;
    memset(frame, 0, sizeof *frame);
    frame->is_recycled = 1;
    return frame;
}

out_frame *work_frame(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step)
{
    out_frame *frame = work_env_frame(w->env);
    if (frame == NULL)
        return NULL;
    uint64_t elems = plan_segment_elems(&w->plan, chunk, segment);
    frame->owner = w;
    frame->header = (frame_header){.type = FRAME_DATA,
                                   .flags = w->flags,
                                   .epoch = w->env->epoch,
                                   .seq = w->seq,
                                   .fingerprint = w->fingerprint,
                                   .chunk = chunk,
                                   .segment = segment,
                                   .step = (uint16_t)step,
                                   .length = (uint32_t)work_segment_bytes(w, elems)};
    return frame;
}

rc_result work_send_bytes(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step,
                          const uint8_t *payload, size_t bytes, pool_buffer *buffer)
{
    out_frame *frame = work_frame(w, chunk, segment, step);
    if (frame == NULL) {
        pool_return(w->env->buffers, buffer);
        return RC_NO_MEMORY;
    }
    frame->header.length = (uint32_t)bytes;
    frame->payload = payload;
    frame->buffer = buffer;
    link_send(w->env->links[plan_rank_at(&w->plan, chunk, step + 1U)], frame);
    return RC_OK;
}

rc_result work_send(rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step,
                    const uint8_t *payload, pool_buffer *buffer)
{
    size_t bytes = work_segment_bytes(w, plan_segment_elems(&w->plan, chunk, segment));
    return work_send_bytes(w, chunk, segment, step, payload, bytes, buffer);
}

rc_result work_send_result(rc_work *w, uint32_t segment, const uint8_t *payload, size_t bytes,
                           pool_buffer *buffer)
{
    work_env *env = w->env;
    int n = env->world_size;
    rc_result result = RC_OK;
    for (int distance = 1; distance < n && result == RC_OK; distance++) {
        uint32_t chunk = plan_result_chunk(&w->plan, (env->rank + distance) % n);
        pool_buffer *shared = buffer != NULL ? pool_share(buffer) : NULL;
        result = work_send_bytes(w, chunk, segment, 0, payload, bytes, shared);
    }
    pool_return(env->buffers, buffer);
    return result;
}
