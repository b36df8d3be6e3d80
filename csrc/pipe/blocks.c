/* blocks.c - what the GPU does of an all-reduce by a codec that quantises: it packs each rank's
 * contribution, and unpacks the result, by csrc/cuda/kernels.cu. The core is given payloads
 * (rc_layout), so only these cross the bus; and floats, where the core adds them: this rank's own
 * part.
 *
 *   tensor --pack--> scratch --copy--> staging  core  staging --copy--> scratch --unpack--> tensor
 *          ---------own part--------->
 *
 * Among two ranks the core adds nothing: both contributions come back, and are unpacked and added
 * by one kernel. This rank's own comes with the other's, from staging: that in the scratch of "in"
 * may be of a later flight by then.
 *
 * A tensor in pieces is gathered on the GPU first, and scattered there last: a kernel takes a
 * stretch of it at a time, whole segments of one part.
 *
 * A result that is NaN everywhere, for some value was not finite, the core knows of: it is written
 * on the GPU. Without room there the CPU does it, and other ranks cannot tell.
 */
#include "../base/error.h"
#include "../codec/quant.h"
#include "pipe.h"

enum { POISON_BYTES = 64, THE_NAN = 0x7fc00000 };

int blocks_suits(const rc_flight *f)
{
    rc_comm *comm = f->pipe->comm;
    rc_layout layout;
    return f->pipe->device->kernels != NULL && comm->shared.hosts == 0 && packing_is_aligned(f) &&
           rc_comm_layout(comm, &f->call, &layout) == RC_OK;
}

/* What this rank sends, by parts. Behind it in scratch, as behind all of plain, is the word that
 * says whether a block is poisoned: the core finds out, too. */
static uint64_t sent_bytes(const rc_flight *f)
{
    return f->layout.parts * f->layout.part_bytes;
}

static uint64_t packed_bytes(const rc_flight *f)
{
    return sent_bytes(f) + POISON_BYTES;
}

static uint64_t unpacked_bytes(const rc_flight *f)
{
    return f->layout.plain + POISON_BYTES;
}

/* What a work of the call does with residuals, where each rank contributes the whole tensor. */
static feedback_use use_of(const rc_flight *f)
{
    const rc_layout *l = &f->layout;
    feedback_use use = {.worker = {0, f->call.count}};
    if (l->own >= 0 && l->plain_count > 0)
        use.exact = use.owner = (feedback_range){l->plain_start, l->plain_start + l->plain_count};
    return use;
}

/* RC_AGAIN: it is better done at home, or to be refused by the core. */
static rc_result take_feedback(rc_flight *f, rc_error *error)
{
    rc_feedback *feedback = f->call.feedback;
    feedback_use use = use_of(f);
    if (feedback->count != f->call.count || !feedback_claim(feedback))
        return RC_AGAIN;
    rc_result result = RC_AGAIN;
    if (twin_suits(feedback, &use, f->call.op))
        result = twins_take(f->pipe, feedback, error);
    if (result == RC_OK)
        result = twin_begin(feedback, &use, &f->residuals, error);
    f->is_fed = result == RC_OK;
    if (result != RC_OK)
        feedback_unclaim(feedback);
    return result;
}

static rc_result begin(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    RC_TRY(rc_comm_layout(p->comm, &f->call, &f->layout));
    RC_TRY(packing_room(p, &p->packed, packed_bytes(f), error));
    if (f->pieces != NULL)
        RC_TRY(packing_room(p, &p->gathered, flight_bytes(f, 1), error));
    return f->call.feedback != NULL ? take_feedback(f, error) : RC_OK;
}

rc_result blocks_begin(rc_flight *f, rc_error *error)
{
    rc_result result = blocks_suits(f) ? begin(f, error) : RC_AGAIN;
    f->in_blocks = result == RC_OK;
    if (result == RC_NO_MEMORY)
        error_clear(error);
    return result == RC_NO_MEMORY || result == RC_AGAIN ? RC_OK : result;
}

void blocks_hand_over(rc_flight *f)
{
    f->is_fed = 0;
}

void blocks_share(rc_flight *f)
{
    if (!f->is_fed)
        return;
    feedback_hold(f->call.feedback);
    (void)feedback_take_ready(f->call.feedback); /* it is: nobody else knows of it */
}

void blocks_take_back(rc_flight *f)
{
    if (f->is_fed)
        feedback_unclaim(f->call.feedback);
}

void blocks_give_up(rc_flight *f)
{
    if (f->is_fed)
        feedback_unclaim(f->call.feedback);
    f->is_fed = 0;
}

/* ---- where things lie ---- */

/* Elements of a part, and how many parts have some. */
static uint64_t part_elems(const rc_flight *f, uint64_t part)
{
    uint64_t start = part * f->layout.part_elems, left = f->call.count - start;
    return left < f->layout.part_elems ? left : f->layout.part_elems;
}

static uint64_t parts(const rc_flight *f)
{
    return (f->call.count + f->layout.part_elems - 1) / f->layout.part_elems;
}

/* The payloads of a stretch: from byte start on, and so many. */
typedef struct payloads {
    uint64_t start, bytes;
} payloads;

/* Where the segment that begins with this element has its payload. */
static uint64_t payload_at(const rc_flight *f, uint64_t elem)
{
    const rc_layout *l = &f->layout;
    return elem / l->part_elems * l->part_bytes +
           elem % l->part_elems / l->segment_elems * l->segment_bytes;
}

/* The last segment of a part may have a shorter one. */
static payloads payloads_of(const rc_flight *f, order_stretch elems)
{
    const rc_layout *l = &f->layout;
    uint64_t last = elems.start + elems.elems - 1;
    uint64_t start = payload_at(f, elems.start), end = payload_at(f, last) + l->segment_bytes;
    uint64_t limit = (last / l->part_elems + 1) * l->part_bytes;
    return (payloads){start, (end < limit ? end : limit) - start};
}

static cu_address source_at(const rc_flight *f, uint64_t index)
{
    cu_address at = f->pieces != NULL ? f->pipe->gathered.at : (uintptr_t)f->call.src;
    return at + index * sizeof(float);
}

static cu_address target_at(const rc_flight *f, uint64_t index)
{
    cu_address at = f->pieces != NULL ? f->pipe->scattered.at : (uintptr_t)f->call.dst;
    return at + index * sizeof(float);
}

static cu_address residuals_at(const rc_flight *f, int buffer, uint64_t index)
{
    if (!f->is_fed || buffer < 0)
        return 0;
    return twins_buffer(f->call.feedback->twin, buffer) + index * sizeof(float);
}

/* ---- the kernels, for whole segments of one part ---- */

static rc_result pack(rc_flight *f, order_stretch elems, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cu_address wire = p->packed.at + payload_at(f, elems.start);
    cu_address src = source_at(f, elems.start);
    cu_address residual = residuals_at(f, f->residuals.in, elems.start);
    cu_address left = residuals_at(f, f->residuals.out, elems.start);
    cu_address poisoned = p->packed.at + sent_bytes(f);
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    float pre = 1.0F;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&wire,        &left,    &src,    &pre,     &residual,
                                               &elems.elems, &segment, &stride, &poisoned};
    return packing_launch(p, packing_of(f->call.codec), elems.elems, p->d2h, parameters, error);
}

static rc_result unpack(rc_flight *f, order_stretch elems, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cu_address wire = p->unpacked.at + payload_at(f, elems.start);
    cu_address dst = target_at(f, elems.start);
    cu_address poisoned = p->unpacked.at + f->layout.plain;
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&dst,     &wire,   &elems.elems,
                                               &segment, &stride, &poisoned};
    return packing_launch(p, packing_of(f->call.codec) + 1, elems.elems, p->h2d, parameters, error);
}

static rc_result add_both(rc_flight *f, order_stretch elems, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cu_address dst = target_at(f, elems.start), wire = p->unpacked.at + payload_at(f, elems.start);
    cu_address poisoned = p->unpacked.at + f->layout.plain;
    uint64_t apart = f->layout.part_bytes;
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    float post = f->call.op == RC_AVG ? (float)(1.0 / p->comm->env.contributors) : 1.0F;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&dst,         &wire,    &apart,  &post,
                                               &elems.elems, &segment, &stride, &poisoned};
    return packing_launch(p, packing_of(f->call.codec) + 2, elems.elems, p->h2d, parameters, error);
}

/* ---- in ---- */

static rc_result gather_piece(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    rc_pipe *p = f->pipe;
    return DEVICE_CALL(p->device, error, cuMemcpyDtoDAsync, p->gathered.at + piece->offset,
                       piece->address, piece->bytes, p->d2h);
}

/* With zeros between the pieces. */
static rc_result gather(rc_flight *f, order_stretch elems, rc_error *error)
{
    rc_pipe *p = f->pipe;
    if (f->pieces == NULL)
        return RC_OK;
    RC_TRY(DEVICE_CALL(p->device, error, cuMemsetD32Async, source_at(f, elems.start), 0,
                       elems.elems, p->d2h));
    return flight_each(f, 1, elems, gather_piece, error);
}

/* Of the own part. */
static rc_result copy_plain_in(rc_flight *f, order_stretch elems, rc_error *error)
{
    uint64_t at = f->layout.plain + (elems.start - f->layout.plain_start) * sizeof(float);
    return DEVICE_CALL(f->pipe->device, error, cuMemcpyDtoHAsync, f->src + at,
                       source_at(f, elems.start), elems.elems * sizeof(float), f->pipe->d2h);
}

static rc_result copy_own_in(rc_flight *f, rc_error *error)
{
    const rc_layout *l = &f->layout;
    if (l->own < 0 || l->plain_count == 0)
        return RC_OK;
    return copy_plain_in(f, (order_stretch){l->plain_start, l->plain_count}, error);
}

/* Where this rank's payloads begin in staging. */
static uint64_t own_place(const rc_flight *f)
{
    return f->layout.terms == 2 ? (uint64_t)f->pipe->comm->env.rank * f->layout.part_bytes : 0;
}

static rc_result copy_payloads_in(rc_flight *f, order_stretch elems, rc_error *error)
{
    rc_pipe *p = f->pipe;
    payloads at = payloads_of(f, elems);
    return DEVICE_CALL(p->device, error, cuMemcpyDtoHAsync, f->src + own_place(f) + at.start,
                       p->packed.at + at.start, at.bytes, p->d2h);
}

rc_result blocks_copy_in(rc_flight *f, order_stretch elems, rc_error *error)
{
    RC_TRY(gather(f, elems, error));
    if (f->layout.own >= 0 && elems.start / f->layout.part_elems == (uint64_t)f->layout.own)
        return copy_plain_in(f, elems, error);
    RC_TRY(pack(f, elems, error));
    return copy_payloads_in(f, elems, error);
}

/* From the first part on to before end: one copy for all. */
static order_stretch elems_of_parts(const rc_flight *f, uint64_t first, uint64_t end)
{
    uint64_t start = first * f->layout.part_elems, last = end * f->layout.part_elems;
    last = last < f->call.count ? last : f->call.count;
    return (order_stretch){start, last > start ? last - start : 0};
}

rc_result blocks_copy_all_in(rc_flight *f, rc_error *error)
{
    const rc_layout *l = &f->layout;
    uint64_t all = parts(f), own = l->own < 0 ? all : (uint64_t)l->own;
    const order_stretch others[] = {elems_of_parts(f, 0, own), elems_of_parts(f, own + 1, all)};
    RC_TRY(gather(f, flight_elems(f, 1), error));
    for (uint64_t part = 0; part < all; part++)
        if (part != own)
            RC_TRY(pack(f, elems_of_parts(f, part, part + 1), error));
    for (int i = 0; i < 2; i++)
        if (others[i].elems > 0)
            RC_TRY(copy_payloads_in(f, others[i], error));
    return copy_own_in(f, error);
}

/* ---- out ---- */

static void unpack_segment_here(rc_flight *f, quant *q, float *dst, uint64_t start, uint64_t n)
{
    const uint8_t *wire = f->dst + payload_at(f, start);
    const void *both[] = {wire, wire + f->layout.part_bytes};
    const quant_terms terms = {.wires = both, .count = 2};
    int poisoned = 0;
    if (f->layout.terms == 2)
        quant_join(q, dst, &terms, n, &poisoned);
    else
        quant_store(q, dst, wire, n, &poisoned);
}

rc_result blocks_unpack_here(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    pinned_block *wider;
    quant q;
    RC_TRY(pinned_take(&p->arena, flight_bytes(f, 0), 0, &wider, error));
    quant_init(&q, p->comm->engine->kernels, &f->call, p->comm->env.contributors);
    for (uint64_t part = 0; part < parts(f); part++)
        for (uint64_t at = 0; at < part_elems(f, part); at += l->segment_elems) {
            uint64_t n = part_elems(f, part) - at, start = part * l->part_elems + at;
            unpack_segment_here(f, &q, (float *)(void *)wider->data + start, start,
                                n < l->segment_elems ? n : l->segment_elems);
        }
    pinned_give(&p->arena, f->staging);
    f->staging = wider;
    f->src = f->dst = wider->data;
    f->in_blocks = 0;
    return RC_OK;
}

rc_result blocks_room(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    RC_TRY(packing_room(p, &p->unpacked, unpacked_bytes(f), error));
    return f->pieces != NULL ? packing_room(p, &p->scattered, flight_bytes(f, 0), error) : RC_OK;
}

static rc_result scatter_piece(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    rc_pipe *p = f->pipe;
    return DEVICE_CALL(p->device, error, cuMemcpyDtoDAsync, piece->address,
                       p->scattered.at + piece->offset, piece->bytes, p->h2d);
}

/* What of a stretch lies in its first part. */
static order_stretch first_part(const rc_flight *f, order_stretch elems)
{
    uint64_t left = f->layout.part_elems - elems.start % f->layout.part_elems;
    return (order_stretch){elems.start, elems.elems < left ? elems.elems : left};
}

static rc_result copy_payloads_out(rc_flight *f, payloads at, rc_error *error)
{
    rc_pipe *p = f->pipe;
    return DEVICE_CALL(p->device, error, cuMemcpyHtoDAsync, p->unpacked.at + at.start,
                       f->dst + at.start, at.bytes, p->h2d);
}

/* Both ranks' contributions: all of them are one copy. */
static rc_result copy_both_out(rc_flight *f, payloads at, rc_error *error)
{
    uint64_t apart = f->layout.part_bytes;
    if (at.bytes == apart)
        return copy_payloads_out(f, (payloads){0, 2 * apart}, error);
    RC_TRY(copy_payloads_out(f, at, error));
    return copy_payloads_out(f, (payloads){apart + at.start, at.bytes}, error);
}

static rc_result unpack_parts(rc_flight *f, order_stretch elems, rc_error *error)
{
    for (order_stretch next; elems.elems > 0;
         elems.start += next.elems, elems.elems -= next.elems) {
        next = first_part(f, elems);
        RC_TRY(unpack(f, next, error));
    }
    return RC_OK;
}

rc_result blocks_copy_out(rc_flight *f, order_stretch elems, rc_error *error)
{
    payloads at = payloads_of(f, elems);
    if (f->layout.terms == 2) {
        RC_TRY(copy_both_out(f, at, error));
        RC_TRY(add_both(f, elems, error));
    } else {
        RC_TRY(copy_payloads_out(f, at, error));
        RC_TRY(unpack_parts(f, elems, error));
    }
    return f->pieces != NULL ? flight_each(f, 0, elems, scatter_piece, error) : RC_OK;
}

static rc_result poison_piece(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    return DEVICE_CALL(f->pipe->device, error, cuMemsetD32Async, piece->address, THE_NAN,
                       piece->bytes / sizeof(float), f->pipe->h2d);
}

rc_result blocks_poison(rc_flight *f, rc_error *error)
{
    return flight_each(f, 0, flight_elems(f, 0), poison_piece, error);
}
