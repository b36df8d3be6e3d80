/* joined.c - see joined.h. */
#include "joined.h"

#include "../base/error.h"
#include "segments.h"

int joined_sends_src(const rc_work *w)
{
    return plan_joins(&w->plan) == PLAN_JOINS_ALL && codec_sends_plain(&w->codec);
}

rc_result joined_init(rc_work *w)
{
    const plan *p = &w->plan;
    uint32_t n = (uint32_t)p->world_size, own = plan_joins(p) == PLAN_JOINS_ALL;
    return operands_init(&w->operands, plan_segments(p, (uint32_t)p->rank), n,
                         n - 1 + (joined_sends_src(w) ? n - 1 : own));
}

rc_result joined_segment(rc_work *w, uint32_t chunk, uint32_t segment)
{
    const plan *p = &w->plan;
    size_t n = plan_segment_elems(p, chunk, segment);
    uint8_t *dst = work_dst(w, chunk, segment), *out = dst;
    pool_buffer *wire = NULL;
    int sends = plan_joins(p) == PLAN_JOINS_ITS_PART;
    int encoded = sends && !codec_stores_plain(&w->codec);
    if (encoded) {
        if ((wire = pool_take(w->env->buffers)) == NULL)
            return RC_NO_MEMORY;
        out = wire->data;
    }
    codec_join(&w->codec, out, encoded, operands_wires(&w->operands, segment), p->world_size,
               work_src(w, chunk, segment), n);
    operands_drop(&w->operands, segment, w->env->buffers);
    w->receives_left -= (uint64_t)p->world_size - 1;
    if (encoded)
        codec_store(&w->codec, dst, out, n);
    if (!sends)
        return RC_OK;
    return work_send_result(w, segment, out, work_segment_bytes(w, n), wire);
}

rc_result joined_take(rc_work *w, const frame_header *h, pool_buffer *buffer)
{
    operands_keep(&w->operands, h->segment, (uint32_t)plan_rank_at(&w->plan, h->chunk, 0), buffer);
    return operands_count(&w->operands, h->segment) ? joined_segment(w, h->chunk, h->segment)
                                                    : RC_OK;
}

rc_result joined_note_event(rc_work *w, uint32_t segment)
{
    return operands_count(&w->operands, segment)
               ? joined_segment(w, (uint32_t)w->plan.rank, segment)
               : RC_OK;
}

/* ---- sending to all ---- */

/* Encodes a segment of this rank's contribution and keeps it for the join. *last: the others'
 * contributions have come already. */
static rc_result keep_contribution(rc_work *w, uint32_t chunk, uint32_t segment,
                                   pool_buffer **buffer, int *last)
{
    if ((*buffer = pool_take(w->env->buffers)) == NULL)
        return RC_NO_MEMORY;
    codec_encode(&w->codec, (*buffer)->data, work_src(w, chunk, segment),
                 plan_segment_elems(&w->plan, chunk, segment));
    operands_keep(&w->operands, segment, (uint32_t)w->plan.rank, *buffer);
    *last = operands_count(&w->operands, segment);
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

rc_result joined_start(rc_work *w)
{
    uint32_t segments = plan_segments(&w->plan, (uint32_t)(w->plan.rank * w->plan.world_size));
    for (uint32_t segment = 0; segment < segments; segment++)
        RC_TRY(start_segment_to_all(w, segment));
    return RC_OK;
}
