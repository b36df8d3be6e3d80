/* blocks.c - the GPU's part in an all-reduce by a codec that quantises: it packs each rank's
 * contribution, and unpacks the result, by csrc/cuda/kernels.cu. The core is given payloads
 * (rc_layout), so only these cross the bus; and the floats of this rank's own part, which the core
 * adds.
 *
 *   tensor --pack--> scratch --copy--> staging  core  staging --copy--> scratch --unpack--> tensor
 *          ---------own part--------->
 *
 * Among two ranks the core adds nothing: both contributions come back, and are unpacked and added
 * by one kernel. This rank's own comes with the other's, from staging: that in the scratch of "in"
 * may be of a later flight by then.
 *
 * A tensor in pieces is gathered on the GPU first, and scattered there last: a kernel takes a part
 * at a time.
 *
 * Where some value was not finite the core reports it, and the GPU writes NaN to all of the result.
 * Without memory on the GPU the CPU packs and unpacks; other ranks cannot tell.
 */
#include "../base/error.h"
#include "pipe.h"

enum { THE_NAN = 0x7fc00000 };

int blocks_suits(rc_flight *f)
{
    rc_comm *comm = f->pipe->comm;
    return f->pipe->device->kernels != NULL && comm_hosts(comm) == 0 && packing_is_aligned(f) &&
           rc_comm_layout(comm, &f->call, &f->layout) == RC_OK &&
           packing_of(f->call.codec) < PACKING_KERNELS;
}

static rc_result make_packed_room(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    RC_TRY(packing_room(p, &p->packed, f->layout.parts * f->layout.part_bytes, error));
    return f->pieces != NULL ? packing_room(p, &p->gathered, flight_bytes(f, 1), error) : RC_OK;
}

rc_result blocks_begin(rc_flight *f, rc_error *error)
{
    if (!blocks_suits(f))
        return RC_OK;
    rc_result result = make_packed_room(f, error);
    f->in_blocks = result == RC_OK;
    if (result == RC_NO_MEMORY)
        error_clear(error);
    return result == RC_NO_MEMORY ? RC_OK : result;
}

/* ---- places of parts ---- */

/* Return the elements of a part, and the number of parts that have some. */
static uint64_t part_elems(const rc_flight *f, uint64_t part)
{
    uint64_t start = part * f->layout.part_elems, left = f->call.count - start;
    return left < f->layout.part_elems ? left : f->layout.part_elems;
}

static uint64_t filled_parts(const rc_flight *f)
{
    return (f->call.count + f->layout.part_elems - 1) / f->layout.part_elems;
}

static cu_address source_at(const rc_flight *f, uint64_t part)
{
    cu_address at = f->pieces != NULL ? f->pipe->gathered.at : (uintptr_t)f->call.src;
    return at + part * f->layout.part_elems * sizeof(float);
}

static cu_address target_at(const rc_flight *f, uint64_t part)
{
    cu_address at = f->pieces != NULL ? f->pipe->scattered.at : (uintptr_t)f->call.dst;
    return at + part * f->layout.part_elems * sizeof(float);
}

/* ---- the kernels, for a part ---- */

static rc_result pack(rc_flight *f, uint64_t part, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cu_address wire = p->packed.at + part * f->layout.part_bytes, src = source_at(f, part);
    uint64_t elems = part_elems(f, part);
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&wire, &src, &elems, &segment, &stride};
    return packing_launch(p, packing_of(f->call.codec), elems, p->d2h, parameters, error);
}

static rc_result unpack(rc_flight *f, uint64_t part, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cu_address wire = p->unpacked.at + part * f->layout.part_bytes, dst = target_at(f, part);
    uint64_t elems = part_elems(f, part);
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&dst, &wire, &elems, &segment, &stride};
    return packing_launch(p, packing_of(f->call.codec) + 1, elems, p->h2d, parameters, error);
}

static rc_result add_both(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cu_address dst = target_at(f, 0), wire = p->unpacked.at;
    uint64_t apart = f->layout.part_bytes, elems = f->call.count;
    uint64_t segment = f->layout.segment_elems, stride = f->layout.segment_bytes;
    float post = f->call.op == RC_AVG ? (float)(1.0 / comm_contributors(p->comm)) : 1.0F;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&dst,   &wire,    &apart, &post,
                                               &elems, &segment, &stride};
    return packing_launch(p, packing_of(f->call.codec) + 2, elems, p->h2d, parameters, error);
}

/* ---- in ---- */

static rc_result gather_piece(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    rc_pipe *p = f->pipe;
    return DEVICE_CALL(p->device, error, cuMemcpyDtoDAsync, p->gathered.at + piece->offset,
                       piece->address, piece->bytes, p->d2h);
}

/* Gathers a tensor's pieces on the GPU, with zeros between them. */
static rc_result gather(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    if (f->pieces == NULL)
        return RC_OK;
    RC_TRY(
        DEVICE_CALL(p->device, error, cuMemsetD32Async, p->gathered.at, 0, f->call.count, p->d2h));
    return flight_each(f, 1, gather_piece, error);
}

/* Copies the own part, which the core adds as it is, to staging. */
static rc_result copy_own_in(rc_flight *f, rc_error *error)
{
    const rc_layout *l = &f->layout;
    if (l->own < 0 || l->plain_count == 0)
        return RC_OK;
    return DEVICE_CALL(f->pipe->device, error, cuMemcpyDtoHAsync, f->src + l->plain,
                       source_at(f, (uint64_t)l->own), l->plain_count * sizeof(float),
                       f->pipe->d2h);
}

/* Returns the place in staging at which this rank's payloads begin. */
static uint64_t own_place(const rc_flight *f)
{
    return f->layout.terms == 2 ? (uint64_t)comm_rank(f->pipe->comm) * f->layout.part_bytes : 0;
}

/* Copies the payloads of the parts from first to before end, as one. */
static rc_result copy_payloads_in(rc_flight *f, uint64_t first, uint64_t end, rc_error *error)
{
    rc_pipe *p = f->pipe;
    uint64_t start = first * f->layout.part_bytes;
    if (end <= first)
        return RC_OK;
    return DEVICE_CALL(p->device, error, cuMemcpyDtoHAsync, f->src + own_place(f) + start,
                       p->packed.at + start, (end - first) * f->layout.part_bytes, p->d2h);
}

rc_result blocks_copy_in(rc_flight *f, rc_error *error)
{
    const rc_layout *l = &f->layout;
    uint64_t all = filled_parts(f), own = l->own < 0 ? all : (uint64_t)l->own;
    RC_TRY(gather(f, error));
    for (uint64_t part = 0; part < all; part++)
        if (part != own)
            RC_TRY(pack(f, part, error));
    RC_TRY(copy_payloads_in(f, 0, own < all ? own : all, error));
    RC_TRY(copy_payloads_in(f, own + 1, all, error));
    return copy_own_in(f, error);
}

/* ---- out ---- */

static void unpack_segment_here(rc_flight *f, quant *q, float *dst, uint64_t start, uint64_t n)
{
    const rc_layout *l = &f->layout;
    const uint8_t *wire = f->dst + start / l->part_elems * l->part_bytes +
                          start % l->part_elems / l->segment_elems * l->segment_bytes;
    const void *both[] = {wire, wire + l->part_bytes};
    const quant_terms terms = {.wires = both, .count = 2};
    int poisoned = 0;
    if (l->terms == 2)
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
    quant_init(&q, comm_engine(p->comm)->kernels, &f->call, comm_contributors(p->comm));
    for (uint64_t part = 0; part < filled_parts(f); part++)
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
    RC_TRY(packing_room(p, &p->unpacked, f->layout.plain, error));
    return f->pieces != NULL ? packing_room(p, &p->scattered, flight_bytes(f, 0), error) : RC_OK;
}

static rc_result scatter_piece(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    rc_pipe *p = f->pipe;
    return DEVICE_CALL(p->device, error, cuMemcpyDtoDAsync, piece->address,
                       p->scattered.at + piece->offset, piece->bytes, p->h2d);
}

rc_result blocks_copy_out(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    int both = f->layout.terms == 2;
    uint64_t bytes = (both ? 2 : filled_parts(f)) * f->layout.part_bytes;
    RC_TRY(DEVICE_CALL(p->device, error, cuMemcpyHtoDAsync, p->unpacked.at, f->dst, bytes, p->h2d));
    if (both)
        RC_TRY(add_both(f, error));
    for (uint64_t part = 0; !both && part < filled_parts(f); part++)
        RC_TRY(unpack(f, part, error));
    return f->pieces != NULL ? flight_each(f, 0, scatter_piece, error) : RC_OK;
}

static rc_result poison_piece(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    return DEVICE_CALL(f->pipe->device, error, cuMemsetD32Async, piece->address, THE_NAN,
                       piece->bytes / sizeof(float), f->pipe->h2d);
}

rc_result blocks_poison(rc_flight *f, rc_error *error)
{
    return flight_each(f, 0, poison_piece, error);
}
