/* quantised.c - see quantised.h. */
#include "quantised.h"

#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "segments.h"

enum {
    AHEAD = 2 /* contributions to one peer that are not in a socket yet */
};

/* Contributions on their way to a peer. */
typedef struct outflow {
    uint32_t next;  /* segment to send next */
    uint32_t ahead; /* frames not in a socket yet */
} outflow;

struct quantised {
    quant codec;
    feedback_view feedback; /* all NULL without feedback, or without residuals */
    int poisoned;
    int sending_more;
    rc_layout layout; /* of source and result if they are encoded already, else zeros */
    outflow to[];     /* [rank] */
};

int quantised_takes(const rc_call *call, int world_size)
{
    return plan_quantises(call) && world_size > 1;
}

rc_result quantised_create(rc_work *w)
{
    size_t ranks = (size_t)w->env->world_size;
    w->quantised = calloc(1, sizeof *w->quantised + ranks * sizeof w->quantised->to[0]);
    if (w->quantised == NULL)
        return RC_NO_MEMORY;
    w->machine = &quantised_machine;
    w->quant = &w->quantised->codec;
    quant_init(&w->quantised->codec, w->env->engine->kernels, &w->call, w->env->contributors);
    if (w->call.encoded)
        encoded_layout(&w->quantised->layout, w->env, &w->call);
    return RC_OK;
}

void quantised_destroy(rc_work *w)
{
    free(w->quantised);
}

/* ---- geometry ---- */

static uint64_t quantised_segment_elems(const rc_work *w)
{
    return quant_segment(&w->quantised->codec, w->env->segment_bytes);
}

/* Returns the element of the worker's residuals at which a segment's begin. */
static uint64_t src_elem(const rc_work *w, uint32_t chunk, uint32_t segment)
{
    return plan_src_offset(&w->plan, chunk) + plan_segment_offset(&w->plan, segment);
}

/* ---- source and result encoded already ---- */

static uint8_t *payload_at(const rc_work *w, uint32_t place, uint32_t segment)
{
    const rc_layout *l = &w->quantised->layout;
    return (uint8_t *)w->call.dst + place * l->part_bytes + segment * l->segment_bytes;
}

/* Returns 1 if the caller, who has encoded this rank's contribution, adds both ranks' itself. */
static int is_left_to_caller(const rc_work *w)
{
    return w->call.encoded && plan_joins(&w->plan) == PLAN_JOINS_ALL;
}

/* Returns the place of a segment's payload: of the contribution, then of the result. */
static uint8_t *payload_of(const rc_work *w, uint32_t chunk, uint32_t segment)
{
    uint32_t place = is_left_to_caller(w) ? (uint32_t)plan_rank_at(&w->plan, chunk, 0)
                                          : plan_part(&w->plan, chunk);
    return payload_at(w, place, segment);
}

/* Returns a segment of the own part, which lies there as float32. */
static uint8_t *plain_of(const rc_work *w, uint32_t segment)
{
    return (uint8_t *)w->call.dst + w->quantised->layout.plain +
           plan_segment_offset(&w->plan, segment) * sizeof(float);
}

/* ---- residuals ---- */

/* Returns the first of the feedback's elements that the work covers. */
static uint64_t first_elem(const rc_work *w)
{
    const rc_call *called = work_user_call(w);
    uintptr_t within = (uintptr_t)w->call.dst - (uintptr_t)called->dst;
    return w->is_shared ? within / w->codec.elem_bytes : 0;
}

/* Returns the part that this rank owns. */
static feedback_range own_part(const rc_work *w)
{
    const plan *p = &w->plan;
    uint32_t chunk = (uint32_t)p->rank; /* rank 0's contribution to it */
    uint64_t start = first_elem(w) + plan_src_offset(p, chunk);
    if (plan_joins(p) != PLAN_JOINS_ITS_PART || plan_chunk_elems(p, chunk) == 0)
        return (feedback_range){0};
    return (feedback_range){start, start + plan_chunk_elems(p, chunk)};
}

static rc_result begin_feedback(rc_work *w)
{
    rc_feedback *f = w->call.feedback;
    feedback_view *view = &w->quantised->feedback;
    if (f == NULL)
        return RC_OK;
    uint64_t first = first_elem(w);
    feedback_use use = {.worker = {first, w->is_shared ? first + w->call.count : f->count},
                        .exact = own_part(w),
                        .fold = work_divisor(&w->call, w->env->contributors)};
    if (w->plan.collective == RC_ALLREDUCE)
        use.owner = use.exact;
    RC_TRY(feedback_begin(f, &use, view));
    if (w->src_with_residual != NULL) {
        view->worker_in = NULL;
        view->exact_is_zero = 1;
    }
    return RC_OK;
}

static const float *at(const float *residual, uint64_t elem)
{
    return residual != NULL ? residual + elem : NULL;
}

static float *left_at(float *residual, uint64_t elem)
{
    return residual != NULL ? residual + elem : NULL;
}

/* ---- results ---- */

/* Among hosts, makes a poisoned chunk NaN once it is whole, before the ranks of this host read it.
 * To be called after each segment that is final. */
static void note_result(rc_work *w)
{
    if (w->is_shared && w->receives_left == 1 && w->quantised->poisoned)
        quant_fill_nan(w->call.dtype, w->call.dst, w->call.count);
}

/* ---- sending ---- */

/* Sends a segment of this rank's values, to be encoded when it leaves if it is not yet. */
static rc_result send_own(rc_work *w, uint32_t chunk, uint32_t segment)
{
    out_frame *frame = work_frame(w, chunk, segment, 0);
    if (frame == NULL)
        return RC_NO_MEMORY;
    if (w->call.encoded) {
        frame->payload = payload_of(w, chunk, segment);
        frame->header.length =
            (uint32_t)work_segment_bytes(w, plan_segment_elems(&w->plan, chunk, segment));
    } else {
        frame->encode_src = work_src(w, chunk, segment);
    }
    link_send(w->env->links[plan_rank_at(&w->plan, chunk, 1)], frame);
    return RC_OK;
}

/* Returns the chunk that begins here and goes to a peer first, or PLAN_NO_CHUNK. */
static uint32_t chunk_towards(const plan *p, int peer)
{
    uint32_t n = (uint32_t)p->world_size, rank = (uint32_t)p->rank;
    if (plan_joins(p) != PLAN_JOINS_NOTHING)
        return rank * n + (uint32_t)peer;
    return plan_rank_at(p, rank, 1) == peer ? rank : PLAN_NO_CHUNK;
}

/* Returns 1 if a contribution to a peer's part is left to send, and few enough are under way. */
static int contribution_may_leave(const rc_work *w, int peer)
{
    const outflow *to = &w->quantised->to[peer];
    uint32_t chunk = chunk_towards(&w->plan, peer);
    return chunk != PLAN_NO_CHUNK && to->ahead < AHEAD && to->next < plan_segments(&w->plan, chunk);
}

static int quantised_can_send_more(const rc_work *w)
{
    for (int peer = 0; peer < w->plan.world_size; peer++)
        if (peer != w->plan.rank && contribution_may_leave(w, peer))
            return 1;
    return 0;
}

/* The flag sending_more stops the recursion: a frame that reaches a socket at once calls this
 * again. */
static rc_result quantised_send_more(rc_work *w)
{
    struct quantised *q = w->quantised;
    int n = w->plan.world_size, rank = w->plan.rank;
    rc_result result = RC_OK;
    if (q->sending_more)
        return RC_OK;
    q->sending_more = 1;
    for (int distance = 1; distance < n && result == RC_OK; distance++) {
        int peer = (rank + distance) % n;
        if (contribution_may_leave(w, peer)) {
            q->to[peer].ahead++;
            result = send_own(w, chunk_towards(&w->plan, peer), q->to[peer].next++);
        }
    }
    q->sending_more = 0;
    return result;
}

static rc_result quantised_start(rc_work *w)
{
    const plan *p = &w->plan;
    uint32_t n = (uint32_t)p->world_size;
    uint32_t own_too = plan_joins(p) == PLAN_JOINS_ALL && !w->call.encoded;
    if (plan_joins(p) != PLAN_JOINS_NOTHING)
        RC_TRY(
            operands_init(&w->operands, plan_segments(p, (uint32_t)p->rank), n, n - 1 + own_too));
    RC_TRY(begin_feedback(w));
    return quantised_send_more(w);
}

static void quantised_released(rc_work *w, const out_frame *frame)
{
    const plan *p = &w->plan;
    const frame_header *h = &frame->header;
    if (h->step == 0 && plan_is_given(p, h->chunk) && plan_rank_at(p, h->chunk, 0) == p->rank)
        w->quantised->to[plan_rank_at(p, h->chunk, 1)].ahead--;
}

/* ---- joining ---- */

static quant_terms terms_of(rc_work *w, uint32_t chunk, uint32_t segment)
{
    const feedback_view *f = &w->quantised->feedback;
    const float *residual = f->exact_is_zero ? NULL : f->worker_in;
    return (quant_terms){.wires = operands_wires(&w->operands, segment),
                         .count = w->plan.world_size,
                         .src = w->call.encoded ? (const void *)plain_of(w, segment)
                                                : work_src(w, chunk, segment),
                         .residual = at(residual, src_elem(w, chunk, segment))};
}

/* Joins a segment of the own part, encodes the sum with the owner's residuals, and sends it to all.
 */
static rc_result join_and_send(rc_work *w, uint32_t segment, void *dst, const quant_terms *terms,
                               size_t elems)
{
    struct quantised *q = w->quantised;
    uint64_t within = plan_segment_offset(&w->plan, segment);
    pool_buffer *buffer = w->call.encoded ? NULL : pool_take(w->env->buffers);
    if (buffer == NULL && !w->call.encoded)
        return RC_NO_MEMORY;
    uint8_t *wire = buffer != NULL ? buffer->data : payload_of(w, (uint32_t)w->plan.rank, segment);
    quant_join_encoded(&q->codec, dst, wire, terms, at(q->feedback.owner_in, within),
                       left_at(q->feedback.owner_out, within), elems, &q->poisoned);
    operands_drop(&w->operands, segment, w->env->buffers);
    note_result(w);
    return work_send_result(w, segment, wire, quant_bytes(&q->codec, elems), buffer);
}

/* Leaves both contributions to a segment where they lie, for the caller to add; only finds out
 * whether their sum is finite. */
static rc_result leave_both(rc_work *w, uint32_t chunk, uint32_t segment)
{
    struct quantised *q = w->quantised;
    const void *wires[] = {payload_at(w, 0, segment), payload_at(w, 1, segment)};
    const quant_terms terms = {.wires = wires, .count = 2};
    w->receives_left--;
    q->poisoned |=
        quant_sum_is_poisoned(&q->codec, &terms, plan_segment_elems(&w->plan, chunk, segment));
    return RC_OK;
}

/* Joins the contributions to a segment when all have come. chunk: any that brings some of it. */
static rc_result join_segment(rc_work *w, uint32_t chunk, uint32_t segment)
{
    const plan *p = &w->plan;
    struct quantised *q = w->quantised;
    size_t elems = plan_segment_elems(p, chunk, segment);
    int sends = p->collective == RC_ALLREDUCE && plan_joins(p) == PLAN_JOINS_ITS_PART;
    if (is_left_to_caller(w))
        return leave_both(w, chunk, segment);
    void *dst = w->call.encoded ? NULL : work_dst(w, chunk, segment);
    quant_terms terms = terms_of(w, chunk, segment);
    w->receives_left -= (uint64_t)p->world_size - 1;
    if (sends)
        return join_and_send(w, segment, dst, &terms, elems);
    quant_join(&q->codec, dst, &terms, elems, &q->poisoned);
    operands_drop(&w->operands, segment, w->env->buffers);
    note_result(w);
    return RC_OK;
}

/* ---- frames ---- */

/* Keeps this rank's own encoded values: it uses what the others decode. */
static rc_result keep_own(rc_work *w, uint32_t chunk, uint32_t segment, pool_buffer *buffer)
{
    struct quantised *q = w->quantised;
    if (plan_joins(&w->plan) == PLAN_JOINS_ALL) {
        operands_keep(&w->operands, segment, (uint32_t)w->plan.rank, pool_share(buffer));
        return operands_count(&w->operands, segment) ? join_segment(w, chunk, segment) : RC_OK;
    }
    if (w->plan.collective == RC_ALLGATHER)
        quant_store(&q->codec, work_dst(w, chunk, segment), buffer->data,
                    plan_segment_elems(&w->plan, chunk, segment), &q->poisoned);
    return RC_OK;
}

static rc_result quantised_encode(rc_work *w, out_frame *frame)
{
    struct quantised *q = w->quantised;
    uint32_t chunk = frame->header.chunk, segment = frame->header.segment;
    uint64_t elem = src_elem(w, chunk, segment);
    size_t elems = plan_segment_elems(&w->plan, chunk, segment);
    quant_encode(&q->codec, frame->buffer->data, frame->encode_src, at(q->feedback.worker_in, elem),
                 left_at(q->feedback.worker_out, elem), elems, &q->poisoned);
    frame->header.length = (uint32_t)quant_bytes(&q->codec, elems);
    frame->encode_src = NULL;
    return keep_own(w, chunk, segment, frame->buffer);
}

static rc_result store_segment(rc_work *w, const frame_header *h, pool_buffer *buffer)
{
    struct quantised *q = w->quantised;
    uint64_t elems = plan_segment_elems(&w->plan, h->chunk, h->segment);
    w->receives_left--;
    if (w->call.encoded) {
        memcpy(payload_of(w, h->chunk, h->segment), buffer->data, h->length);
        q->poisoned |= quant_is_poisoned(&q->codec, buffer->data, elems);
    } else {
        quant_store(&q->codec, work_dst(w, h->chunk, h->segment), buffer->data, elems,
                    &q->poisoned);
    }
    note_result(w);
    if (h->step + 1U < plan_hops(&w->plan, h->chunk))
        return work_send_bytes(w, h->chunk, h->segment, h->step + 1U, buffer->data, h->length,
                               buffer);
    pool_return(w->env->buffers, buffer);
    return RC_OK;
}

static rc_result quantised_end(rc_work *w, const frame_header *h, const uint8_t *payload,
                               pool_buffer *buffer)
{
    (void)payload;
    if (plan_action_at(&w->plan, h->chunk, h->step) == PLAN_STORE)
        return store_segment(w, h, buffer);
    if (is_left_to_caller(w)) {
        memcpy(payload_of(w, h->chunk, h->segment), buffer->data, h->length);
        pool_return(w->env->buffers, buffer);
    } else {
        operands_keep(&w->operands, h->segment, (uint32_t)plan_rank_at(&w->plan, h->chunk, 0),
                      buffer);
    }
    return operands_count(&w->operands, h->segment) ? join_segment(w, h->chunk, h->segment) : RC_OK;
}

/* ---- the end ---- */

/* Returns 1 if the result is poisoned. Among hosts poison makes a chunk NaN, and this rank sees all
 * chunks. */
static int is_poisoned(const rc_work *w)
{
    const rc_call *called = work_user_call(w);
    const uint8_t *dst = called->dst;
    if (!w->is_shared)
        return w->quantised->poisoned;
    for (uint64_t start = 0; start < called->count; start += w->shared.chunk_elems)
        if (!quant_is_finite(called->dtype, dst + start * w->codec.elem_bytes, 1))
            return 1;
    return 0;
}

int quantised_poisoned(const rc_work *w)
{
    return w->quantised != NULL && w->quantised->poisoned;
}

/* Makes the result NaN. Who decodes an encoded one asks quantised_poisoned. */
static void poison_result(const rc_work *w)
{
    const rc_call *called = work_user_call(w);
    int gathers = called->collective == RC_ALLGATHER;
    if (!w->call.encoded)
        quant_fill_nan(called->dtype, called->dst, gathers ? w->plan.total_elems : called->count);
}

static void quantised_finish(rc_work *w)
{
    const rc_call *called = work_user_call(w);
    if (is_poisoned(w))
        poison_result(w);
    else if (called->feedback != NULL)
        feedback_commit(called->feedback, called->op);
}

const work_machine quantised_machine = {
    .segment_elems = quantised_segment_elems,
    .start = quantised_start,
    .send_more = quantised_send_more,
    .can_send_more = quantised_can_send_more,
    .encode = quantised_encode,
    .released = quantised_released,
    .end = quantised_end,
    .finish = quantised_finish,
};
