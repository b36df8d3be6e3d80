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
    int others = p->world_size - 1, own = plan_joins(p) == PLAN_JOINS_ALL;
    return join_init(&w->join, plan_segments(p, (uint32_t)p->rank), p->world_size,
                     others + (joined_sends_src(w) ? others : own));
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
    codec_join(&w->codec, out, encoded, join_wires(&w->join, segment), p->world_size,
               work_src(w, chunk, segment), n);
    join_drop(&w->join, segment, w->env->buffers);
    w->receives_left -= (uint64_t)p->world_size - 1;
    if (encoded)
        codec_store(&w->codec, dst, out, n);
    if (!sends)
        return RC_OK;
    return work_send_result(w, segment, out, work_segment_bytes(w, n), wire);
}

rc_result joined_take(rc_work *w, const frame_header *h, pool_buffer *buffer)
{
    if (!join_keep(&w->join, h->segment, plan_rank_at(&w->plan, h->chunk, 0), buffer))
        return RC_OK;
    return joined_segment(w, h->chunk, h->segment);
}

rc_result joined_note_event(rc_work *w, uint32_t segment)
{
    if (!join_note_event(&w->join, segment))
        return RC_OK;
    return joined_segment(w, (uint32_t)w->plan.rank, segment);
}
