/* merge.c - see merge.h. */
#include "merge.h"

#include "../base/error.h"
#include "segments.h"

/* A segment of a part. The chunk numbers of the frames of one part differ, but not its place in the
 * tensor. */
typedef struct piece {
    uint32_t part, segment, chunk;
    uint64_t elems;
} piece;

static piece piece_of(const rc_work *w, uint32_t chunk, uint32_t segment)
{
    return (piece){.part = plan_part(&w->plan, chunk),
                   .segment = segment,
                   .chunk = chunk,
                   .elems = plan_segment_elems(&w->plan, chunk, segment)};
}

static uint32_t unit_number(const rc_work *w, const piece *at)
{
    return at->part * plan_segments(&w->plan, 0) + at->segment;
}

rc_result merge_init(rc_work *w)
{
    const plan *p = &w->plan;
    uint32_t most = 0;
    for (uint32_t part = 0; part < plan_parts(p); part++)
        if (plan_turns(p, part) > most)
            most = plan_turns(p, part);
    return operands_init(&w->operands, plan_parts(p) * plan_segments(p, 0), most, 0);
}

/* ---- sending ---- */

/* Sends the value of a unit if it leaves after this turn; keeps it here as well where turns are
 * left. */
static rc_result send_value(rc_work *w, const piece *at, operands_unit *unit)
{
    uint32_t chunk = plan_send_after_turns(&w->plan, at->part, unit->over);
    if (chunk == PLAN_NO_CHUNK)
        return RC_OK;
    pool_buffer *value = unit->value;
    if (unit->over < plan_turns(&w->plan, at->part))
        pool_share(value);
    else
        unit->value = NULL;
    return work_send(w, chunk, at->segment, 0, value->data, value);
}

static rc_result send_results(rc_work *w, const piece *at, const uint8_t *payload,
                              pool_buffer *buffer)
{
    rc_result result = RC_OK;
    uint32_t results = plan_results(&w->plan, at->part);
    for (uint32_t i = 0; i < results && result == RC_OK; i++) {
        uint32_t chunk = plan_result(&w->plan, at->part, i);
        pool_buffer *shared = buffer != NULL ? pool_share(buffer) : NULL;
        result = work_send(w, chunk, at->segment, 0, payload, shared);
    }
    pool_return(w->env->buffers, buffer);
    return result;
}

rc_result merge_start(rc_work *w, uint32_t chunk)
{
    for (uint32_t segment = 0; segment < plan_segments(&w->plan, chunk); segment++) {
        piece at = piece_of(w, chunk, segment);
        operands_unit *unit = &w->operands.of[unit_number(w, &at)];
        if ((unit->value = pool_take(w->env->buffers)) == NULL)
            return RC_NO_MEMORY;
        codec_encode(&w->codec, unit->value->data, work_src(w, at.chunk, segment), at.elems);
        out_frame *frame = work_frame(w, at.chunk, segment, 0);
        if (frame == NULL)
            return RC_NO_MEMORY;
        frame->payload = unit->value->data;
        frame->buffer = pool_share(unit->value);
        link_queue(w->env->links[plan_rank_at(&w->plan, at.chunk, 1)], frame);
    }
    return RC_OK;
}

/* ---- merging ---- */

/* out = this unit's value (or src) op what came, in the plan's order. */
static void reduce_unit(const rc_work *w, const piece *at, const operands_unit *unit, uint8_t *out,
                        const uint8_t *came, int last)
{
    if (unit->value == NULL) {
        codec_reduce(&w->codec, out, came, work_src(w, at->chunk, at->segment), at->elems, last);
        return;
    }
    const uint8_t *had = unit->value->data;
    int came_first = plan_comes_first(&w->plan, unit->over);
    codec_combine(&w->codec, out, came_first ? came : had, came_first ? had : came, at->elems,
                  last);
}

/* Takes the last turn at an owner: stores the result and sends it on. */
static rc_result finish_unit(rc_work *w, const piece *at, operands_unit *unit, pool_buffer *came)
{
    uint8_t *dst = work_dst(w, at->chunk, at->segment), *out = came->data;
    int plain = codec_stores_plain(&w->codec);
    if (plain)
        out = dst;
    reduce_unit(w, at, unit, out, came->data, 1);
    pool_return(w->env->buffers, unit->value);
    unit->value = NULL;
    unit->over++;
    if (plain) {
        pool_return(w->env->buffers, came);
        came = NULL;
    } else {
        codec_store(&w->codec, dst, out, at->elems);
    }
    return send_results(w, at, out, came);
}

/* Takes a unit's next turn. A frame counts as received only here, or the work would be over with
 * the last frame to be sent while others still wait for their turn. */
static rc_result take_unit_turn(rc_work *w, const piece *at, operands_unit *unit, pool_buffer *came)
{
    w->receives_left--;
    if (plan_is_owner(&w->plan, at->part) && unit->over + 1 == plan_turns(&w->plan, at->part))
        return finish_unit(w, at, unit, came);
    reduce_unit(w, at, unit, came->data, came->data, 0);
    pool_return(w->env->buffers, unit->value);
    unit->value = came;
    unit->over++;
    return send_value(w, at, unit);
}

rc_result merge_take(rc_work *w, const frame_header *h, pool_buffer *buffer)
{
    piece at = piece_of(w, h->chunk, h->segment);
    uint32_t number = unit_number(w, &at);
    operands_keep(&w->operands, number, plan_turn(&w->plan, h->chunk), buffer);
    while ((buffer = operands_next(&w->operands, number)) != NULL)
        RC_TRY(take_unit_turn(w, &at, &w->operands.of[number], buffer));
    return RC_OK;
}

rc_result merge_pass_on(rc_work *w, const frame_header *h, const uint8_t *payload,
                        pool_buffer *buffer)
{
    piece at = piece_of(w, h->chunk, h->segment);
    return send_results(w, &at, payload, buffer);
}
