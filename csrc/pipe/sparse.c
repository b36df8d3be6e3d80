/* sparse.c - what the GPU does of an all-reduce by topk (csrc/cuda/topk.cuh), for blocks.c.
 *
 *   tensor --sample, threshold, pack--> scratch --counts--> staging   host waits for these
 *                                               --rows----> staging  core
 *                                                           staging --counts, rows--> scratch
 *                                                                             --unpack--> tensor
 *
 * A payload has room for the most that it may have, and mostly an eighth of that. So the host gets
 * the counts first, and then of each payload as many bytes as the longest has: rows of one copy.
 *
 * Where the sample lies, and which of equals go first, depends on the call's number, which the core
 * gives when the flight is submitted. But "in" submits what it packs next, and whoever has a
 * collective without a flight waits until all flights before are with the core (rc_pipe_drain). So
 * the next number is the flight's. Who does not wait gets a sample that lies elsewhere: others
 * cannot tell, and it is no worse.
 */
#include <string.h>

#include "../base/error.h"
#include "../codec/quant.h"
#include "../coll/encoded.h"
#include "../plan/fingerprint.h"
#include "pipe.h"

enum { ALIGNMENT = 256, WORDS_BYTES = 64, THRESHOLD = 0, POISONED = 8 }; /* of the words, bytes */
enum { PACK, UNPACK, SAMPLE, LEAST };

/* Of topk. */
static int kernel(int which)
{
    return packing_of(RC_CODEC_TOPK) + which;
}

static topk codec_of(const rc_flight *f)
{
    quant q;
    rc_call rounded = f->call;
    rounded.density = fingerprint_density(fingerprint_of(&f->call));
    quant_init(&q, f->pipe->comm->engine->kernels, &rounded, f->pipe->comm->env.contributors);
    return q.topk;
}

/* Elements that travel. */
static uint64_t elements(const rc_flight *f)
{
    return f->call.count - f->layout.plain_count;
}

static topk_sample sample_of(const rc_flight *f)
{
    topk t = codec_of(f);
    return topk_sample_of(&t, elements(f));
}

/* Segments of a part; and of all parts that have elements. */
static uint64_t each(const rc_flight *f)
{
    return f->layout.part_bytes / f->layout.segment_bytes;
}

static uint64_t all_segments(const rc_flight *f)
{
    return (f->call.count + f->layout.part_elems - 1) / f->layout.part_elems * each(f);
}

/* ---- scratch: payloads, at first the sample; their counts; words ---- */

static uint64_t counts_at(const rc_flight *f)
{
    const rc_layout *l = &f->layout;
    uint64_t wire = l->parts * l->part_bytes, sample = sample_of(f).size * sizeof(float);
    uint64_t bytes = wire > sample ? wire : sample;
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static uint64_t counts_bytes(const rc_flight *f)
{
    return all_segments(f) * sizeof(uint32_t);
}

static uint64_t words_at(const rc_flight *f)
{
    uint64_t end = counts_at(f) + counts_bytes(f);
    return (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

uint64_t sparse_scratch(const rc_flight *f)
{
    return words_at(f) + WORDS_BYTES;
}

/* ---- lengths ---- */

uint64_t sparse_bytes(const rc_flight *f, uint64_t part, uint64_t segment)
{
    return TOPK_BYTES * (uint64_t)*encoded_count(&f->layout, f->dst, part, segment, 1);
}

static uint64_t longest(const uint32_t *counts, uint64_t first, uint64_t end)
{
    uint32_t most = 0;
    for (uint64_t i = first; i < end; i++)
        most = counts[i] > most ? counts[i] : most;
    return most * (uint64_t)TOPK_BYTES;
}

/* ---- in ---- */

static rc_result find_threshold(rc_flight *f, uint64_t turn, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    topk_sample s = sample_of(f);
    cu_address sample = p->packed.at, threshold = p->packed.at + words_at(f) + THRESHOLD;
    cu_address src = blocks_source(f, 0), residual = blocks_residuals(f, f->residuals.in, 0);
    uint64_t size = s.size, run = s.run, kept = s.kept, count = f->call.count;
    uint64_t exact = l->plain_start, exact_count = l->plain_count;
    void *of_sample[DEVICE_MAX_PARAMETERS] = {&sample, &src,   &residual,    &size, &run,
                                              &count,  &exact, &exact_count, &turn};
    void *of_least[DEVICE_MAX_PARAMETERS] = {&threshold, &sample, &size, &kept};
    if (size == 0 || codec_of(f).density >= 1.0) {
        RC_TRY(DEVICE_CALL(p->device, error, cuMemsetD32Async, threshold, 1, 1, p->d2h));
        return DEVICE_CALL(p->device, error, cuMemsetD32Async, threshold + 4, 0, 1, p->d2h);
    }
    RC_TRY(packing_launch(p, kernel(SAMPLE), size, p->d2h, of_sample, error));
    return packing_launch_each(p, kernel(LEAST), 1, p->d2h, of_least, error);
}

static rc_result pack(rc_flight *f, uint64_t turn, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    cu_address wire = p->packed.at, kept = p->packed.at + counts_at(f);
    cu_address threshold = p->packed.at + words_at(f) + THRESHOLD;
    cu_address poisoned = p->packed.at + words_at(f) + POISONED;
    cu_address src = blocks_source(f, 0), residual = blocks_residuals(f, f->residuals.in, 0);
    cu_address left = blocks_residuals(f, f->residuals.out, 0);
    uint64_t n = f->call.count, part = l->part_elems, per_part = each(f);
    uint64_t segment = l->segment_elems, stride = l->segment_bytes;
    uint64_t own = l->own < 0 ? UINT64_MAX : (uint64_t)l->own;
    double density = codec_of(f).density;
    uint32_t cap = p->comm->env.segment_bytes / TOPK_BYTES;
    void *parameters[DEVICE_MAX_PARAMETERS] = {
        &wire,    &kept,   &left, &src,       &residual, &n,   &part, &per_part,
        &segment, &stride, &own,  &threshold, &density,  &cap, &turn, &poisoned};
    return packing_launch_each(p, kernel(PACK), all_segments(f), p->d2h, parameters, error);
}

/* The payloads of the segments from first to before end, of all parts in order. */
static rc_result copy_rows_in(rc_flight *f, uint64_t first, uint64_t end, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    uint64_t at = first * l->segment_bytes;
    uint64_t width = longest(encoded_count(l, f->src, 0, 0, 0), first, end);
    if (width == 0)
        return RC_OK;
    return device_copy_rows(p->device, f->src + at, p->packed.at + at, width, l->segment_bytes,
                            end - first, 1, p->d2h, error);
}

rc_result sparse_copy_in(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    cu_event counted = p->copied[1];
    uint64_t all = all_segments(f), own = l->own < 0 ? all : (uint64_t)l->own * each(f);
    uint64_t turn = comm_next(p->comm);
    memset(encoded_count(l, f->dst, 0, 0, 1), 0,
           counts_bytes(f)); /* of segments without elements */
    RC_TRY(find_threshold(f, turn, error));
    RC_TRY(pack(f, turn, error));
    RC_TRY(DEVICE_CALL(p->device, error, cuMemcpyDtoHAsync, f->src + l->counts,
                       p->packed.at + counts_at(f), counts_bytes(f), p->d2h));
    RC_TRY(DEVICE_CALL(p->device, error, cuEventRecord, counted, p->d2h));
    RC_TRY(DEVICE_CALL(p->device, error, cuEventSynchronize, counted));
    RC_TRY(copy_rows_in(f, 0, own < all ? own : all, error));
    return own < all ? copy_rows_in(f, own + each(f), all, error) : RC_OK;
}

/* ---- out ---- */

rc_result sparse_unpack(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    const rc_layout *l = &f->layout;
    uint64_t segments = all_segments(f);
    uint32_t *counts = encoded_count(l, f->dst, 0, 0, 1);
    uint64_t width = longest(counts, 0, segments);
    cu_address dst = blocks_target(f, 0), wire = p->unpacked.at;
    cu_address kept = p->unpacked.at + counts_at(f);
    cu_address poisoned = p->unpacked.at + words_at(f) + POISONED;
    uint64_t n = f->call.count, part = l->part_elems, per_part = each(f);
    uint64_t segment = l->segment_elems, stride = l->segment_bytes;
    void *parameters[DEVICE_MAX_PARAMETERS] = {&dst,      &wire,    &kept,   &n,       &part,
                                               &per_part, &segment, &stride, &poisoned};
    RC_TRY(DEVICE_CALL(p->device, error, cuMemcpyHtoDAsync, kept, counts, counts_bytes(f), p->h2d));
    if (width > 0)
        RC_TRY(device_copy_rows(p->device, f->dst + l->result, wire, width, stride, segments, 0,
                                p->h2d, error));
    return packing_launch_each(p, kernel(UNPACK), segments, p->h2d, parameters, error);
}
