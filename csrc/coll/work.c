/* work.c - see work.h. */
#include "work.h"

#include <stdlib.h>
#include <string.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "joined.h"
#include "quantised.h"
#include "segments.h"

/* ---- frames ---- */

/* Counts a frame in its work: it has left, or never will. */
static void count_frame(rc_work *w, out_frame *frame)
{
    frame->has_left = 1;
    w->sends_left--;
    w->machine->released(w, frame);
}

/* Has the frame need nothing of its work any more. */
static void disown(out_frame *frame)
{
    rc_work *w = frame->owner;
    if (frame->borrowed.is_in) {
        list_remove(&w->borrowed, &frame->borrowed);
        w->borrowed_bytes -= frame->header.length;
    }
    frame->owner = NULL;
}

void work_env_release(work_env *env, out_frame *frame)
{
    rc_work *w = frame->owner;
    pool_return(env->buffers, frame->buffer);
    free(frame->copy);
    if (w != NULL && !frame->has_left)
        count_frame(w, frame);
    disown(frame);
    if (!frame->is_recycled) {
        free(frame);
        return;
    }
    frame->next = *env->frames;
    *env->frames = frame;
}

/* Returns 1 for a payload that is kept in memory of its own size: of a pool's buffer, which is that
 * of a segment, it would fill a small part. */
static int is_small(const work_env *env, const out_frame *frame)
{
    return frame->header.length <= env->segment_bytes / 16;
}

/* Copies a payload into memory of the frame's own. Returns 0 if there is none. */
static int copy_payload(work_env *env, out_frame *frame)
{
    pool_buffer *buffer = NULL;
    if (is_small(env, frame))
        frame->copy = malloc(frame->header.length + (size_t)1);
    else
        buffer = pool_take(env->buffers);
    uint8_t *data = buffer != NULL ? buffer->data : frame->copy;
    if (data == NULL)
        return 0;
    memcpy(data, frame->payload, frame->header.length);
    pool_return(env->buffers, frame->buffer);
    frame->buffer = buffer;
    frame->payload = data;
    return 1;
}

rc_result work_env_own(work_env *env, out_frame *frame)
{
    int fits = frame->copy != NULL || (frame->buffer != NULL && !is_small(env, frame));
    if (!fits && !copy_payload(env, frame))
        return RC_NO_MEMORY;
    disown(frame);
    return RC_OK;
}

rc_result work_env_keep(work_env *env, out_frame *frame)
{
    rc_work *w = frame->owner;
    rc_result result = RC_OK;
    if (!is_small(env, frame) && frame->buffer == NULL && !joined_sends_src(w)) {
        list_append(&w->borrowed, &frame->borrowed);
        w->borrowed_bytes += frame->header.length;
    } else {
        result = work_env_own(env, frame);
    }
    count_frame(w, frame);
    return result;
}

int work_env_encode(work_env *env, out_frame *frame)
{
    if (frame->encode_src == NULL)
        return 1;
    if ((frame->buffer = pool_take(env->buffers)) == NULL)
        return 0;
    frame->payload = frame->buffer->data;
    rc_work *w = frame->owner;
    return w->machine->encode(w, frame) == RC_OK;
}

void work_env_destroy(work_env *env)
{
    while (*env->frames != NULL) {
        out_frame *frame = *env->frames;
        *env->frames = frame->next;
        free(frame);
    }
    pool_destroy(env->buffers);
}

/* ---- life ---- */

static void drop_done(engine_done *entry)
{
    work_release((rc_work *)entry);
}

rc_work *work_create(rc_engine *engine, const rc_call *call, uint32_t spin_us)
{
    rc_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->engine = engine;
    engine_retain(engine);
    w->done_entry.drop = drop_done;
    w->machine = &plain_machine;
    w->call = *call;
    w->fingerprint = fingerprint_of(call);
    w->call.op = fingerprint_op(w->fingerprint);
    codec_take_encoded(&w->call);
    w->flags = call->collective == RC_SEND || call->collective == RC_RECV ? FRAME_P2P : 0;
    w->submitted = clock_ns();
    w->spin = spin_us * CLOCK_US;
    w->deadline = w->submitted + (uint64_t)call->timeout_ms * CLOCK_MS;
    error_clear(&w->error);
    atomic_init(&w->result, RC_AGAIN);
    atomic_init(&w->references, 2);
    return w;
}

static rc_result add_residual(rc_work *w, int contributors)
{
    rc_feedback *f = w->call.feedback;
    RC_TRY(feedback_fold(f, work_divisor(&w->call, contributors)));
    if (feedback_is_zero(f, (feedback_range){0, f->count}))
        return RC_OK;
    RC_TRY(feedback_add_residual(f, w->call.dtype, w->call.src, &w->src_with_residual));
    w->call.src = w->src_with_residual;
    return RC_OK;
}

rc_result work_add_residual(rc_work *w, int contributors)
{
    float_mode mode = float_mode_enter(); /* the caller's thread, without the lock */
    rc_result result = add_residual(w, contributors);
    float_mode_leave(mode);
    return result;
}

void work_retain(rc_work *w)
{
    atomic_fetch_add(&w->references, 1);
}

void work_release(rc_work *w)
{
    if (atomic_fetch_sub(&w->references, 1) > 1)
        return;
    if (w->seen != w->seen_few)
        free(w->seen);
    quantised_destroy(w);
    free(w->src_with_residual);
    engine_release(w->engine);
    free(w);
}

uint64_t work_number(const rc_work *w)
{
    return w->flags & FRAME_P2P ? tags_number(w->seq) : w->seq;
}

static int is_done(const rc_work *w)
{
    return w->receives_left == 0 && w->sends_left == 0 && w->keeps_left == 0;
}

/* Returns 1 if so much of the caller's memory is borrowed that to wait for the peers, until they
 * have told that it came, is better than to copy it. */
static int borrows_much(const rc_work *w)
{
    enum { COPIED_SEGMENTS = 4 };
    return w->borrowed.head != NULL &&
           w->borrowed_bytes > COPIED_SEGMENTS * (uint64_t)w->env->segment_bytes;
}

int work_complete(const rc_work *w)
{
    return is_done(w) && !borrows_much(w);
}

int work_awaits_peers(const rc_work *w)
{
    return is_done(w) && borrows_much(w);
}

/* Copies what frames still need of the caller's memory. One for which there is no memory cannot go
 * out again. */
static void end_borrowing(rc_work *w)
{
    while (w->borrowed.head != NULL) {
        out_frame *frame = LIST_ENTRY(w->borrowed.head, out_frame, borrowed);
        if (work_env_own(w->env, frame) != RC_OK) {
            frame->payload = NULL;
            disown(frame);
        }
    }
}

void work_finish(rc_work *w, rc_result result, const rc_error *error)
{
    w->finished = clock_ns();
    w->stats.submitted_ns = w->submitted;
    w->stats.finished_ns = w->finished;
    w->stats.in_memory = w->is_shared;
    if (w->env != NULL) {
        end_borrowing(w);
        operands_destroy(&w->operands, w->env->buffers);
    }
    if (result == RC_OK)
        w->machine->finish(w);
    if (result != RC_OK) {
        w->error = *error;
        w->error.code = result;
        w->error.elapsed_s = clock_seconds(w->submitted, w->finished);
    }
    w->error.seq = work_number(w);
    w->env = NULL;
    work_move(w, WORK_OVER);
    feedback_unclaim(w->call.feedback);
    atomic_store(&w->result, result);
}

void work_note_start(rc_work *w)
{
    if (w->stats.started_ns == 0)
        w->stats.started_ns = clock_ns();
}

void work_note_sent(rc_work *w, int rail, const frame_header *h)
{
    enum { LAST = sizeof w->stats.rail_bytes / sizeof *w->stats.rail_bytes - 1 };
    w->stats.sent_bytes += h->length;
    w->stats.rail_bytes[rail < LAST ? rail : LAST] += FRAME_HEADER_BYTES + h->length;
}

/* ---- what a work keeps of its frames ---- */

/* Returns a frame's bit. Bits are laid out by (phase, chunk, segment), all chunks as long as the
 * first. */
static uint64_t frame_number(const rc_work *w, uint32_t chunk, uint32_t segment, uint32_t step)
{
    uint64_t per_chunk = plan_segments(&w->plan, 0);
    uint64_t phase = step >= plan_reduce_hops(&w->plan);
    return (phase * w->plan.chunks + chunk) * per_chunk + segment;
}

static rc_result make_bits(rc_work *w)
{
    uint64_t words = (2 * (uint64_t)w->plan.chunks * plan_segments(&w->plan, 0) + 63) / 64;
    w->seen = w->seen_few;
    if (words > sizeof w->seen_few / sizeof *w->seen_few)
        w->seen = calloc(words, sizeof *w->seen);
    if (w->seen != NULL)
        return RC_OK;
    w->seen = w->seen_few;
    return RC_NO_MEMORY;
}

uint64_t work_wire_bytes(const rc_call *call, const work_env *env)
{
    if (plan_quantises(call)) {
        quant q;
        quant_init(&q, env->engine->kernels, call, env->contributors);
        return quant_bytes(&q, call->count);
    }
    codec c;
    codec_init(&c, env->engine->kernels, call, env->contributors);
    return call->count * c.wire_bytes;
}

rc_algorithm work_algorithm(const rc_call *call, const work_env *env)
{
    return plan_choose(call, env->world_size, work_wire_bytes(call, env), env->link_mbit,
                       env->algorithm);
}

rc_result work_start(rc_work *w, work_env *env)
{
    w->env = env;
    work_move(w, WORK_ON_LINKS);
    codec_init(&w->codec, env->engine->kernels, &w->call, env->contributors);
    if (w->is_shared && w->shared.codec.pre != 1.0F)
        w->codec.pre = 1.0F; /* the values are scaled by it already */
    if (quantised_takes(&w->call, env->world_size))
        RC_TRY(quantised_create(w));
    uint64_t most = w->machine->segment_elems(w);
    plan_init(&w->plan, &w->call, work_algorithm(&w->call, env), env->rank, env->world_size, most);
    if (env->one_host && w->machine->may_cut_coarsely)
        plan_cut_coarsely(&w->plan, most);
    w->receives_left = plan_receives(&w->plan, -1) + (w->is_shared ? 1 : 0);
    w->sends_left = plan_sends(&w->plan, -1);
    RC_TRY(make_bits(w));
    return w->machine->start(w);
}

/* ---- receiving ---- */

/* Returns 1 if a rank of the plan is this peer. The plan counts ranks as the work's env does, peers
 * are the communicator's ranks. */
static int is_rank(const rc_work *w, int rank, int peer)
{
    const peer_link *ln = w->env->links[rank];
    return ln != NULL && ln->peer == peer;
}

rc_result work_begin(rc_work *w, const frame_header *h, int from, rx_place *place, rc_error *error)
{
    const plan *p = &w->plan;
    if (h->chunk >= p->chunks || h->step >= plan_hops(p, h->chunk) ||
        h->segment >= plan_segments(p, h->chunk) ||
        plan_rank_at(p, h->chunk, h->step + 1U) != p->rank ||
        !is_rank(w, plan_rank_at(p, h->chunk, h->step), from))
        return error_set(error, RC_PROTOCOL, "segment %u of chunk %u at step %u is not expected",
                         h->segment, h->chunk, h->step);
    uint64_t elems = plan_segment_elems(p, h->chunk, h->segment);
    if (h->length != work_segment_bytes(w, elems))
        return error_set(error, RC_PROTOCOL, "a segment has %u bytes, not %llu", h->length,
                         (unsigned long long)work_segment_bytes(w, elems));
    uint64_t number = frame_number(w, h->chunk, h->segment, h->step);
    uint64_t bit = UINT64_C(1) << number % 64;
    if (w->seen[number / 64] & bit)
        return error_set(error, RC_PROTOCOL, "segment %u of chunk %u at step %u came twice",
                         h->segment, h->chunk, h->step);
    w->seen[number / 64] |= bit;
    place->owner = w;
    work_note_start(w);
    if (plan_action_at(p, h->chunk, h->step) == PLAN_STORE && w->machine->stores_in_place != NULL &&
        w->machine->stores_in_place(w)) {
        place->data = work_dst(w, h->chunk, h->segment);
        return RC_OK;
    }
    if ((place->buffer = pool_take(w->env->buffers)) == NULL)
        return error_set(error, RC_NO_MEMORY, "no memory for a segment of %u bytes",
                         w->env->segment_bytes);
    place->data = place->buffer->data;
    return RC_OK;
}

void work_abandon(rc_work *w, const frame_header *h, rx_place *place)
{
    uint64_t number = frame_number(w, h->chunk, h->segment, h->step);
    w->seen[number / 64] &= ~(UINT64_C(1) << number % 64);
    pool_return(w->env->buffers, place->buffer);
    *place = (rx_place){0};
}

rc_result work_end(rc_work *w, const frame_header *h, rx_place *place)
{
    rx_place came = *place;
    *place = (rx_place){0};
    return w->machine->end(w, h, came.data, came.buffer);
}

rc_result work_send_more(rc_work *w)
{
    return w->machine->send_more != NULL ? w->machine->send_more(w) : RC_OK;
}

int work_can_send_more(const rc_work *w)
{
    return w->machine->send_more != NULL && w->machine->can_send_more(w);
}
