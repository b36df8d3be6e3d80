/* packing.c - the GPU's part in an all-reduce by a 16-bit codec, by csrc/cuda/kernels.cu, and the
 * CPU's where the GPU has no memory for it; and the kernels of all codecs.
 */
#include <string.h>

#include "../base/error.h"
#include "pipe.h"

enum {
    THREADS = 256,
    MOST_BLOCKS = 1024,
    ELEMENTS_OF_BLOCK = 8 * THREADS,
    LEAST_SCRATCH = 1 << 20
};
enum { PACK_BF16, PACK_FP16, UNPACK_BF16, UNPACK_FP16, PACK_INT8 };

const char *const packing_kernels[] = {
    [PACK_BF16] = "ringcomm_pack_bf16",
    [PACK_FP16] = "ringcomm_pack_fp16",
    [UNPACK_BF16] = "ringcomm_unpack_bf16",
    [UNPACK_FP16] = "ringcomm_unpack_fp16",
    [PACK_INT8] = "ringcomm_pack_int8", /* from here on in the order of their codecs */
    "ringcomm_unpack_int8",
    "ringcomm_add_int8",
    "ringcomm_pack_int4",
    "ringcomm_unpack_int4",
    "ringcomm_add_int4",
    "ringcomm_pack_onebit",
    "ringcomm_unpack_onebit",
    "ringcomm_add_onebit",
    "ringcomm_pack_fp8",
    "ringcomm_unpack_fp8",
    "ringcomm_add_fp8",
};
_Static_assert(sizeof packing_kernels / sizeof *packing_kernels == PACKING_KERNELS, "all of them");

int packing_of(rc_codec codec)
{
    return PACK_INT8 + 3 * ((int)codec - RC_CODEC_INT8);
}

int packing_is_aligned(const rc_flight *f)
{
    uint64_t all = (uintptr_t)f->call.src | (uintptr_t)f->call.dst;
    for (int i = 0; i < f->piece_count; i++)
        all |= f->pieces[i].address | f->pieces[i].offset | f->pieces[i].bytes;
    return all % sizeof(float) == 0;
}

/* Returns 1 if the GPU packs the flight. In a world of one, and among ranks that share memory,
 * nothing is encoded on the way. */
int packing_suits(const rc_flight *f)
{
    const rc_call *call = &f->call;
    const rc_comm *comm = f->pipe->comm;
    return f->pipe->device->kernels != NULL && call->collective == RC_ALLREDUCE &&
           call->dtype == RC_F32 && call->feedback == NULL && comm_hosts(comm) == 0 &&
           comm_world_size(comm) > 1 && packing_is_aligned(f) &&
           (call->codec == RC_CODEC_BF16 || call->codec == RC_CODEC_FP16);
}

void packing_release(rc_pipe *p, pipe_scratch *scratch)
{
    device_free(p->device, scratch->at);
    for (int i = 0; i < scratch->outgrown_count; i++)
        device_free(p->device, scratch->outgrown[i]);
    *scratch = (pipe_scratch){0};
}

rc_result packing_room(rc_pipe *p, pipe_scratch *scratch, uint64_t bytes, rc_error *error)
{
    uint64_t size = LEAST_SCRATCH;
    cu_address larger;
    if (scratch->bytes >= bytes)
        return RC_OK;
    while (size < bytes)
        size *= 2;
    rc_result result = device_alloc(p->device, &larger, size, error);
    if (result == RC_NO_MEMORY && scratch->bytes > 0) {
        error_clear(error);
        packing_release(p, scratch);
        result = device_alloc(p->device, &larger, size, error);
    }
    RC_TRY(result);
    if (scratch->bytes > 0)
        scratch->outgrown[scratch->outgrown_count++] = scratch->at;
    scratch->at = larger;
    scratch->bytes = size;
    return RC_OK;
}

rc_result packing_launch(rc_pipe *p, int kernel, uint64_t elements, cu_stream stream,
                         void **parameters, rc_error *error)
{
    uint64_t blocks = (elements + ELEMENTS_OF_BLOCK - 1) / ELEMENTS_OF_BLOCK;
    return device_launch(p->device, kernel, blocks < MOST_BLOCKS ? (unsigned)blocks : MOST_BLOCKS,
                         THREADS, stream, parameters, error);
}

rc_result packing_pack(rc_flight *f, const rc_piece *piece, cu_address to, cu_stream stream,
                       rc_error *error)
{
    int is_fp16 = f->call.codec == RC_CODEC_FP16;
    int n = comm_contributors(f->pipe->comm);
    float before = is_fp16 && f->call.op == RC_AVG ? (float)(1.0 / n) : 1.0F;
    uint64_t from = piece->address, elements = piece->bytes / sizeof(float);
    void *parameters[DEVICE_MAX_PARAMETERS] = {&to, &from, &before, &elements};
    return packing_launch(f->pipe, is_fp16 ? PACK_FP16 : PACK_BF16, elements, stream, parameters,
                          error);
}

rc_result packing_unpack(rc_flight *f, const rc_piece *piece, cu_address from, cu_stream stream,
                         rc_error *error)
{
    int is_fp16 = f->call.codec == RC_CODEC_FP16;
    uint64_t to = piece->address, elements = piece->bytes / sizeof(float);
    void *parameters[DEVICE_MAX_PARAMETERS] = {&to, &from, &elements};
    return packing_launch(f->pipe, is_fp16 ? UNPACK_FP16 : UNPACK_BF16, elements, stream,
                          parameters, error);
}

rc_result packing_unpack_here(rc_flight *f, rc_error *error)
{
    const kernel_set *kernels = comm_engine(f->pipe->comm)->kernels;
    const kernel_half *half = f->call.codec == RC_CODEC_FP16 ? &kernels->fp16 : &kernels->bf16;
    pinned_block *wider;
    RC_TRY(pinned_take(&f->pipe->arena, flight_bytes(f, 0), 0, &wider, error));
    half->decode((float *)(void *)wider->data, (const uint16_t *)(void *)f->dst, f->call.count);
    pinned_give(&f->pipe->arena, f->staging);
    f->staging = wider;
    f->src = f->dst = wider->data;
    f->is_packed = 0;
    return RC_OK;
}
