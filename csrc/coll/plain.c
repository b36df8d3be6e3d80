/* plain.c - the machine of codecs whose elements stand alone, plain or of half width, by any plan:
 * what comes is reduced or stored, and sent on. See work.h.
 *
 * Threading: under the engine's lock.
 */
#include "../base/error.h"
#include "joined.h"
#include "keep.h"
#include "merge.h"
#include "segments.h"

/* Makes room for what is joined or merged here. */
static rc_result make_merge_room(rc_work *w)
{
    if (plan_merges(&w->plan))
        return merge_init(w);
    return plan_joins(&w->plan) != PLAN_JOINS_NOTHING ? joined_init(w) : RC_OK;
}

/* ---- sending ---- */

/* Queues a segment of this rank's own, from src. */
static rc_result start_own_segment(rc_work *w, uint32_t chunk, uint32_t segment)
{
    out_frame *frame = work_frame(w, chunk, segment, 0);
    if (frame == NULL)
        return RC_NO_MEMORY;
    if (codec_sends_plain(&w->codec)) {
        frame->payload = work_src(w, chunk, segment);
    } else {
        frame->encode_src = work_src(w, chunk, segment);
        frame->encode_count = plan_segment_elems(&w->plan, chunk, segment);
    }
    link_queue(w->env->links[plan_rank_at(&w->plan, chunk, 1)], frame);
    return RC_OK;
}

static rc_result start_chunk(rc_work *w, uint32_t chunk)
{
    for (uint32_t segment = 0; segment < plan_segments(&w->plan, chunk); segment++)
        RC_TRY(start_own_segment(w, chunk, segment));
    return RC_OK;
}

static rc_result start_chunks(rc_work *w)
{
    uint32_t first, count = plan_initial_chunks(&w->plan, &first);
    for (uint32_t chunk = first; chunk < first + count; chunk++)
        if (plan_hops(&w->plan, chunk) > 0)
            RC_TRY(start_chunk(w, chunk));
    return RC_OK;
}

/* Sends the chunks for which this rank waits for nothing, and keeps the values of those whose part
 * has turns here. The chunk with the farthest to go leaves first: the part of the rank before, then
 * the one before that. */
static rc_result start_merging(rc_work *w)
{
    uint32_t parts = plan_parts(&w->plan);
    for (uint32_t i = 1; i <= parts; i++) {
        uint32_t part = ((uint32_t)w->plan.rank + parts - i) % parts;
        uint32_t chunk = plan_send_after_turns(&w->plan, part, 0);
        if (chunk != PLAN_NO_CHUNK)
            RC_TRY(plan_turns(&w->plan, part) > 0 ? merge_start(w, chunk) : start_chunk(w, chunk));
    }
    return RC_OK;
}

static rc_result start_frames(rc_work *w)
{
    if (plan_merges(&w->plan))
        return start_merging(w);
    return plan_joins(&w->plan) == PLAN_JOINS_ALL ? joined_start(w) : start_chunks(w);
}

static uint64_t plain_segment_elems(const rc_work *w)
{
    uint64_t elem_bytes = w->codec.wire_bytes;
    return plan_segment_limit(&w->call, w->env->world_size, elem_bytes,
                              w->env->segment_bytes / elem_bytes);
}

static rc_result plain_start(rc_work *w)
{
    const work_env *env = w->env;
    RC_TRY(make_merge_room(w));
    keep_begin(w);
    RC_TRY(start_frames(w));
    /* Every rank begins with another receiver, the next rank, so that no switch port sees many
     * senders at once. */
    for (int distance = 1; distance < env->world_size; distance++)
        link_pump(env->links[(env->rank + distance) % env->world_size]);
    return RC_OK;
}

static rc_result plain_encode(rc_work *w, out_frame *frame)
{
    codec_encode(&w->codec, frame->buffer->data, frame->encode_src, frame->encode_count);
    frame->encode_src = NULL;
    return RC_OK;
}

static void plain_released(rc_work *w, const out_frame *frame)
{
    if (joined_sends_src(w))                               /* if it never will, the work fails */
        (void)joined_note_event(w, frame->header.segment); /* without memory of its own */
}

/* ---- receiving ---- */

static int plain_stores_in_place(const rc_work *w)
{
    return codec_stores_plain(&w->codec);
}

/* Reduces a segment that came in a pool buffer, and stores it if its sum is complete. Returns where
 * its outgoing payload lies; *buffer is NULL afterwards if that is not the buffer. */
static const uint8_t *reduce_segment(rc_work *w, const frame_header *h, pool_buffer **buffer)
{
    size_t n = plan_segment_elems(&w->plan, h->chunk, h->segment);
    const uint8_t *src = work_src(w, h->chunk, h->segment);
    uint8_t *data = (*buffer)->data;
    int last = h->step + 1U == plan_reduce_hops(&w->plan);
    if (!last || !codec_stores_plain(&w->codec)) {
        codec_reduce(&w->codec, data, data, src, n, last);
        if (last)
            codec_store(&w->codec, work_dst(w, h->chunk, h->segment), data, n);
        return data;
    }
    uint8_t *dst = work_dst(w, h->chunk, h->segment);
    codec_reduce(&w->codec, dst, data, src, n, 1);
    pool_return(w->env->buffers, *buffer);
    *buffer = NULL;
    return dst;
}

static rc_result send_on(rc_work *w, const frame_header *h, const uint8_t *payload,
                         pool_buffer *buffer)
{
    if (plan_merges(&w->plan))
        return merge_pass_on(w, h, payload, buffer);
    if (h->step + 1U == plan_hops(&w->plan, h->chunk)) {
        pool_return(w->env->buffers, buffer);
        return RC_OK;
    }
    return work_send(w, h->chunk, h->segment, h->step + 1U, payload, buffer);
}

static rc_result plain_end(rc_work *w, const frame_header *h, const uint8_t *payload,
                           pool_buffer *buffer)
{
    plan_action action = plan_action_at(&w->plan, h->chunk, h->step);
    w->receives_left -= action != PLAN_MERGE && action != PLAN_JOIN; /* counted when reduced */
    switch (action) {
    case PLAN_MERGE: return merge_take(w, h, buffer);
    case PLAN_JOIN: return joined_take(w, h, buffer);
    case PLAN_REDUCE: payload = reduce_segment(w, h, &buffer); break;
    case PLAN_STORE:
        if (buffer != NULL)
            codec_store(&w->codec, work_dst(w, h->chunk, h->segment), payload,
                        plan_segment_elems(&w->plan, h->chunk, h->segment));
    }
    return send_on(w, h, payload, buffer);
}

/* Clears residuals that were sent without being encoded, once they have arrived. */
static void plain_finish(rc_work *w)
{
    const rc_call *call = work_user_call(w);
    uint64_t all =
        call->count * (call->collective == RC_ALLGATHER ? (uint64_t)w->plan.world_size : 1);
    if (w->src_with_residual != NULL && quant_is_finite(call->dtype, call->dst, all))
        feedback_clear(call->feedback);
}

const work_machine plain_machine = {
    .segment_elems = plain_segment_elems,
    .may_cut_coarsely = 1,
    .start = plain_start,
    .encode = plain_encode,
    .released = plain_released,
    .stores_in_place = plain_stores_in_place,
    .end = plain_end,
    .finish = plain_finish,
};
