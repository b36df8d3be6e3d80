/* blocks.c - what the GPU does of an all-reduce by a codec that quantises: it packs each rank's
 * contribution, and unpacks the result, by csrc/cuda/kernels.cu (of topk: sparse.c). The core is
 * given payloads (rc_layout), so only these cross the bus; and floats, where the core adds them:
 * this rank's own part.
 *
 *   tensor --pack--> scratch --copy--> staging  core  staging --copy--> scratch --unpack--> tensor
 *          ---------own part--------->
 *
 * Among two ranks the core adds nothing: both contributions come back, and are unpacked and added
 * by one kernel. This rank's own comes with the other's, from staging: that in the scratch of "in"
 * may be of a later flight by then.
 *
 * A tensor in pieces is gathered on the GPU first, and scattered there last: a kernel takes a part
 * of it at a time.
 *
 * A result that is NaN everywhere, for some value was not finite, the core knows of: it is written
 * on the GPU. Without room there the CPU does it, and other ranks cannot tell.
 */
#include "../base/error.h"
#include "../codec/quant.h"
#include "../coll/quantised.h"
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
    return f->layout.counts > 0 ? sparse_scratch(f) : sent_bytes(f) + POISON_BYTES;
}

static uint64_t unpacked_bytes(const rc_flight *f)
{
    return f->layout.counts > 0 ? sparse_scratch(f) : f->layout.plain + POISON_BYTES;
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

void blocks_give_up(rc_flight *f)
{
    if (f->is_fed)
        feedback_unclaim(f->call.feedback);
    f->is_fed = 0;
}

/* ---- the kernels ---- */

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

cu_address blocks_source(const rc_flight *f, uint64_t index)
{
    cu_address at = f->pieces != NULL ? f->pipe->gathered.at : (uintptr_t)f->call.src;
    return at + index * sizeof(float);
}

cu_address blocks_target(const rc_flight *f, uint64_t index)
{
    cu_address at = f->pieces != NULL ? f->pipe->scattered.at : (uintptr_t)f->call.dst;
    return at + index * sizeof(float);
}

cu_address blocks_residuals(const rc_flight *f, int buffer, uint64_t index)
{
    if (!f->is_fed || buffer < 0)
        return 0;
    return twins_buffer(f->call.feedback->twin, buffer) + index * sizeof(float);
}

static rc_result pack_part(rc_flight *f, uint64_t part, rc_error *error)
{
    rc_pipe *p = f->pipe;
    uint64_t first = part * f->layout.part_elems, n = part_elems(f, part);
    cu_address wire = p->packed.at + part * f->layout.part_bytes;
    cu_address src = blocks_source(f, first);
    cu_address residual = blocks_residuals(f, f->residuals.in, first);
    cu_address left = blocks_residuals(f, f->residuals.out, first);
    cu_address poisoned = p->packed.at + sent_bytes(f);
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    float pre = 1.0F;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&wire, &left,    &src,    &pre,     &residual,
                                               &n,    &segment, &stride, &poisoned};
    return packing_launch(p, packing_of(f->call.codec), n, p->d2h, parameters, error);
}

static rc_result unpack_part(rc_flight *f, uint64_t part, rc_error *error)
{
    rc_pipe *p = f->pipe;
    uint64_t first = part * f->layout.part_elems, n = part_elems(f, part);
    cu_address wire = p->unpacked.at + part * f->layout.part_bytes;
    cu_address dst = blocks_target(f, first);
    cu_address poisoned = p->unpacked.at + f->layout.plain;
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&dst, &wire, &n, &segment, &stride, &poisoned};
    return packing_launch(p, packing_of(f->call.codec) + 1, n, p->h2d, parameters, error);
}

static rc_result add_both(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cu_address dst = blocks_target(f, 0), wire = p->unpacked.at;
    cu_address poisoned = p->unpacked.at + f->layout.plain;
    uint64_t apart = f->layout.part_bytes, n = f->call.count;
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    float post = f->call.op == RC_AVG ? (float)(1.0 / p->comm->env.contributors) : 1.0F;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&dst, &wire,    &apart,  &post,
                                               &n,   &segment, &stride, &poisoned};
    return packing_launch(p, packing_of(f->call.codec) + 2, n, p->h2d, parameters, error);
}

/* ---- in ---- */

/* Where this rank's payloads begin in staging. */
static uint64_t own_place(const rc_flight *f)
{
    return f->layout.terms == 2 ? (uint64_t)f->pipe->comm->env.rank * f->layout.part_bytes : 0;
}

/* The payloads of the parts from first to before end. */
static rc_result copy_parts_in(rc_flight *f, uint64_t first, uint64_t end, rc_error *error)
{
    rc_pipe *p = f->pipe;
    uint64_t start = first * f->layout.part_bytes;
    if (first >= end)
        return RC_OK;
    return DEVICE_CALL(p->device, error, cuMemcpyDtoHAsync, f->src + own_place(f) + start,
                       p->packed.at + start, (end - first) * f->layout.part_bytes, p->d2h);
}

/* With zeros between the pieces. */
static rc_result gather(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    RC_TRY(
        DEVICE_CALL(p->device, error, cuMemsetD32Async, p->gathered.at, 0, f->call.count, p->d2h));
    for (int i = 0; i < f->piece_count; i++)
        if (f->pieces[i].bytes > 0)
            RC_TRY(DEVICE_CALL(p->device, error, cuMemcpyDtoDAsync,
                               p->gathered.at + f->pieces[i].offset, f->pieces[i].address,
                               f->pieces[i].bytes, p->d2h));
    return RC_OK;
}

/* The part that stays here, as it is. */
static rc_result copy_own_in(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    if (l->own < 0 || l->plain_count == 0)
        return RC_OK;
    return DEVICE_CALL(p->device, error, cuMemcpyDtoHAsync, f->src + l->plain,
                       blocks_source(f, l->plain_start), l->plain_count * sizeof(float), p->d2h);
}

rc_result blocks_copy_in(rc_flight *f, rc_error *error)
{
    const rc_layout *l = &f->layout;
    if (f->pieces != NULL)
        RC_TRY(gather(f, error));
    if (l->counts > 0) {
        RC_TRY(copy_own_in(f, error));
        return sparse_copy_in(f, error);
    }
    uint64_t all = parts(f), own = l->own < 0 ? all : (uint64_t)l->own;
    for (uint64_t part = 0; part < all; part++)
        if (part != own)
            RC_TRY(pack_part(f, part, error));
    RC_TRY(copy_parts_in(f, 0, own < all ? own : all, error));
    RC_TRY(copy_parts_in(f, own + 1, all, error));
    return copy_own_in(f, error);
}

/* ---- out ---- */

static void unpack_segment_here(rc_flight *f, quant *q, float *dst, uint64_t part, uint64_t segment,
                                uint64_t n)
{
    const rc_layout *l = &f->layout;
    const uint8_t *wire = f->dst + l->result + part * l->part_bytes + segment * l->segment_bytes;
    uint64_t bytes = l->counts > 0 ? sparse_bytes(f, part, segment) : quant_most_bytes(q, n);
    const void *both[] = {wire, wire + f->layout.part_bytes};
    const quant_terms terms = {.wires = both, .count = 2};
    int poisoned = 0;
    if (f->layout.terms == 2)
        quant_join(q, dst, &terms, n, &poisoned);
    else
        quant_store(q, dst, wire, bytes, n, &poisoned);
}

/* What unpacking does, by the CPU: staging has the elements afterwards. */
static rc_result unpack_here(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    pinned_block *wider;
    quant q;
    RC_TRY(pinned_take(&p->arena, flight_bytes(f, 0), 0, &wider, error));
    quant_init(&q, p->comm->engine->kernels, &f->call, p->comm->env.contributors);
    for (uint64_t part = 0; part < parts(f); part++)
        for (uint64_t at = 0, k = 0; at < part_elems(f, part); at += l->segment_elems, k++) {
            uint64_t n = part_elems(f, part) - at;
            unpack_segment_here(f, &q, (float *)(void *)wider->data + part * l->part_elems + at,
                                part, k, n < l->segment_elems ? n : l->segment_elems);
        }
    pinned_give(&p->arena, f->staging);
    f->staging = wider;
    f->src = f->dst = wider->data;
    f->in_blocks = 0;
    return RC_OK;
}

rc_result blocks_make_room(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    if (quantised_poisoned(f->work))
        return RC_OK;
    rc_result result = packing_room(p, &p->unpacked, unpacked_bytes(f), error);
    if (result == RC_OK && f->pieces != NULL)
        result = packing_room(p, &p->scattered, flight_bytes(f, 0), error);
    if (result != RC_NO_MEMORY)
        return result;
    error_clear(error);
    return unpack_here(f, error);
}

/* A piece of the result: all NaN, or of what has been unpacked. */
static rc_result finish_piece(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cuda_device *device = p->device;
    if (piece->bytes == 0)
        return RC_OK;
    if (quantised_poisoned(f->work))
        return DEVICE_CALL(device, error, cuMemsetD32Async, piece->address, THE_NAN,
                           piece->bytes / sizeof(float), p->h2d);
    if (f->pieces == NULL)
        return RC_OK;
    return DEVICE_CALL(device, error, cuMemcpyDtoDAsync, piece->address,
                       p->scattered.at + piece->offset, piece->bytes, p->h2d);
}

static rc_result unpack(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    if (quantised_poisoned(f->work))
        return RC_OK;
    if (l->counts > 0)
        return sparse_unpack(f, error);
    RC_TRY(DEVICE_CALL(p->device, error, cuMemcpyHtoDAsync, p->unpacked.at, f->dst,
                       l->terms * parts(f) * l->part_bytes, p->h2d));
    if (l->terms == 2)
        return add_both(f, error);
    for (uint64_t part = 0; part < parts(f); part++)
        RC_TRY(unpack_part(f, part, error));
    return RC_OK;
}

rc_result blocks_copy_out(rc_flight *f, rc_error *error)
{
    const rc_piece whole = {.address = (uintptr_t)f->call.dst, .bytes = flight_bytes(f, 0)};
    RC_TRY(unpack(f, error));
    if (f->pieces == NULL)
        return finish_piece(f, &whole, error);
    for (int i = 0; i < f->piece_count; i++)
        RC_TRY(finish_piece(f, &f->pieces[i], error));
    return RC_OK;
}
