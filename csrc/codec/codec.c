/* codec.c - codecs of the tensor's own bits and of 16-bit floats. See codec.h. */
#include "codec.h"

#include <math.h>
#include <string.h>

#include "../base/copy.h"

enum { BLOCK = 1024 }; /* elements widened at a time; two f32 blocks stay in the first cache */

size_t rc_dtype_size(rc_dtype dtype)
{
    switch (dtype) {
    case RC_I8:
    case RC_U8: return 1;
    case RC_F16:
    case RC_BF16: return 2;
    case RC_F32:
    case RC_I32: return 4;
    case RC_F64:
    case RC_I64: return 8;
    }
    return 0;
}

int codec_supports(rc_codec id, rc_dtype dtype)
{
    if (id > RC_CODEC_FP16)
        return 0;
    return id == RC_CODEC_NONE || dtype == RC_F32 || dtype == RC_F64;
}

static const kernel_half *wire_format(const kernel_set *kernels, const rc_call *call)
{
    if (call->codec == RC_CODEC_BF16 || (call->codec == RC_CODEC_NONE && call->dtype == RC_BF16))
        return &kernels->bf16;
    if (call->codec == RC_CODEC_FP16 || (call->codec == RC_CODEC_NONE && call->dtype == RC_F16))
        return &kernels->fp16;
    return NULL;
}

void codec_take_encoded(rc_call *call)
{
    if (!call->encoded || call->codec > RC_CODEC_FP16)
        return;
    if (call->codec == RC_CODEC_FP16 && call->op == RC_AVG)
        call->op = RC_SUM; /* encoding has divided the values already (pre) */
    call->dtype = call->codec == RC_CODEC_FP16 ? RC_F16 : RC_BF16;
    call->codec = RC_CODEC_NONE;
}

void codec_init(codec *c, const kernel_set *kernels, const rc_call *call, int world_size)
{
    *c = (codec){.kernels = kernels,
                 .half = wire_format(kernels, call),
                 .dtype = call->dtype,
                 .op = call->op == RC_AVG ? RC_SUM : call->op,
                 .pre = 1.0F,
                 .post = 1.0F,
                 .elem_bytes = rc_dtype_size(call->dtype)};
    c->wire_bytes = c->half != NULL ? sizeof(uint16_t) : c->elem_bytes;
    if (call->op != RC_AVG)
        return;
    if (c->half == &kernels->fp16)
        c->pre = (float)(1.0 / world_size);
    else if (c->half != NULL)
        c->post = (float)(1.0 / world_size);
    else if (c->dtype == RC_F32 || c->dtype == RC_F64)
        c->plain_post = 1.0 / world_size;
    else
        c->plain_post = world_size;
}

void codec_leave_unfinished(codec *c)
{
    c->post = 1.0F;
    c->plain_post = 0.0;
}

static int is_half_tensor(const codec *c)
{
    return c->elem_bytes == sizeof(uint16_t);
}

int codec_stores_plain(const codec *c)
{
    return c->half == NULL || is_half_tensor(c);
}

int codec_sends_plain(const codec *c)
{
    return codec_stores_plain(c) && c->pre == 1.0F;
}

/* Returns n elements of src, at most BLOCK, as f32: in place, or widened into room. */
static const float *block_as_f32(const codec *c, const void *src, size_t start, size_t n,
                                 float *room)
{
    if (c->dtype == RC_F32)
        return (const float *)src + start;
    if (c->dtype == RC_F64)
        c->kernels->f64_to_f32(room, (const double *)src + start, n);
    else
        c->half->decode(room, (const uint16_t *)src + start, n);
    return room;
}

static size_t block_elems(size_t start, size_t n)
{
    return n - start < BLOCK ? n - start : BLOCK;
}

void codec_encode(const codec *c, void *wire, const void *src, size_t n)
{
    if (c->half == NULL) {
        copy_bytes(wire, src, n * c->elem_bytes);
        return;
    }
    float room[BLOCK];
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t count = block_elems(start, n);
        c->half->encode((uint16_t *)wire + start, block_as_f32(c, src, start, count, room), c->pre,
                        count);
    }
}

/* Decodes a rank's contribution to a block as the others see it: wire as it came, or, where wire is
 * NULL, the encoding of this rank's src. */
static void decode_contribution(const codec *c, float *x, const uint16_t *wire, const void *src,
                                size_t start, size_t count)
{
    uint16_t own[BLOCK];
    if (wire == NULL)
        c->half->encode(own, block_as_f32(c, src, start, count, x), c->pre, count);
    c->half->decode(x, wire == NULL ? own : wire + start, count);
}

/* out = E(D(wire) op x), for any op but a sum; at most BLOCK elements. */
static void reduce_block(const codec *c, uint16_t *out, const uint16_t *wire, const float *x,
                         size_t count)
{
    float acc[BLOCK];
    c->half->decode(acc, wire, count);
    c->kernels->reduce[RC_F32][c->op](acc, acc, x, count);
    c->half->encode(out, acc, 1.0F, count);
}

static void reduce_widened(const codec *c, uint16_t *out, const uint16_t *wire, const void *src,
                           size_t n)
{
    float x[BLOCK];
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t count = block_elems(start, n);
        decode_contribution(c, x, NULL, src, start, count);
        reduce_block(c, out + start, wire + start, x, count);
    }
}

static void reduce_half(const codec *c, uint16_t *out, const uint16_t *wire, const void *src,
                        size_t n, float post)
{
    if (c->op != RC_SUM) {
        reduce_widened(c, out, wire, src, n);
        return;
    }
    if (codec_sends_plain(c)) {
        c->half->add_half(out, wire, src, post, n);
        return;
    }
    float room[BLOCK];
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t count = block_elems(start, n);
        c->half->add(out + start, wire + start, block_as_f32(c, src, start, count, room), c->pre,
                     post, count);
    }
}

/* Reduces values in their own dtype. last: with the scaling of an average. */
static void reduce_plain(const codec *c, void *out, const void *first, const void *second, size_t n,
                         int last)
{
    if (last && c->plain_post != 0.0)
        c->kernels->average[c->dtype](out, first, second, c->plain_post, n);
    else
        c->kernels->reduce[c->dtype][c->op](out, first, second, n);
}

void codec_reduce(const codec *c, void *out, const void *wire, const void *src, size_t n, int last)
{
    if (c->half != NULL) {
        reduce_half(c, out, wire, src, n, last ? c->post : 1.0F);
        return;
    }
    reduce_plain(c, out, wire, src, n, last);
}

/* Makes all NaNs the same one: each rank may compute the result for itself, and which payload a sum
 * of NaNs has is unspecified.
 */
static void make_nans_equal(const codec *c, void *acc, size_t n)
{
    if (c->dtype == RC_F32) {
        float *x = acc;
        size_t nans = c->kernels->has_nan(x, n) ? n : 0; /* rare, and reading is half the work */
        for (size_t i = 0; i < nans; i++)
            x[i] = x[i] == x[i] ? x[i] : NAN;
    } else if (c->dtype == RC_F64) {
        double *x = acc;
        for (size_t i = 0; i < n; i++)
            x[i] = x[i] == x[i] ? x[i] : (double)NAN;
    }
}

static void combine_half(const codec *c, uint16_t *out, const uint16_t *first,
                         const uint16_t *second, size_t n, float post)
{
    if (c->op == RC_SUM) {
        c->half->add_half(out, first, second, post, n);
        return;
    }
    float room[BLOCK];
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t count = block_elems(start, n);
        c->half->decode(room, second + start, count);
        reduce_block(c, out + start, first + start, room, count);
    }
}

void codec_combine(const codec *c, void *out, const void *first, const void *second, size_t n,
                   int last)
{
    if (c->half != NULL) {
        combine_half(c, out, first, second, n, last ? c->post : 1.0F);
        return;
    }
    reduce_plain(c, out, first, second, n, last);
    if (last)
        make_nans_equal(c, out, n);
}

/* Joins ranks' values in their own dtype, block by block. The last operation writes to out, which
 * may be src. */
static void join_plain(const codec *c, uint8_t *out, const void *const wires[], int world_size,
                       const uint8_t *src, size_t n)
{
    double acc[BLOCK];
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t count = block_elems(start, n), offset = start * c->elem_bytes;
        const void *sum = (const uint8_t *)(wires[0] != NULL ? wires[0] : src) + offset;
        for (int rank = 1; rank < world_size; rank++) {
            const uint8_t *x = wires[rank] != NULL ? wires[rank] : src;
            int last = rank + 1 == world_size;
            void *to = last ? (void *)(out + offset) : (void *)acc;
            reduce_plain(c, to, sum, x + offset, count, last);
            sum = to;
        }
        make_nans_equal(c, out + offset, count);
    }
}

void codec_store(const codec *c, void *dst, const void *wire, size_t n)
{
    if (codec_stores_plain(c)) {
        if (dst != wire)
            copy_bytes(dst, wire, n * c->elem_bytes);
        return;
    }
    float room[BLOCK];
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t count = block_elems(start, n);
        const uint16_t *from = (const uint16_t *)wire + start;
        if (c->dtype == RC_F32) {
            c->half->decode((float *)dst + start, from, count);
        } else {
            c->half->decode(room, from, count);
            c->kernels->f32_to_f64((double *)dst + start, room, count);
        }
    }
}

/* Writes a joined block to out: encoded, or encoded and decoded again. */
static void put_joined(const codec *c, uint8_t *out, int encoded, const float *acc, size_t start,
                       size_t count)
{
    uint16_t wire[BLOCK];
    if (encoded || is_half_tensor(c)) {
        c->half->encode((uint16_t *)(void *)out + start, acc, c->post, count);
        return;
    }
    c->half->encode(wire, acc, c->post, count);
    codec_store(c, out + start * c->elem_bytes, wire, count);
}

void codec_join(const codec *c, void *out, int encoded, const void *const wires[], int world_size,
                const void *src, size_t n)
{
    if (c->half == NULL) {
        join_plain(c, out, wires, world_size, src, n);
        return;
    }
    float acc[BLOCK], x[BLOCK];
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t count = block_elems(start, n);
        decode_contribution(c, acc, wires[0], src, start, count);
        for (int rank = 1; rank < world_size; rank++) {
            decode_contribution(c, x, wires[rank], src, start, count);
            c->kernels->reduce[RC_F32][c->op](acc, acc, x, count);
        }
        put_joined(c, out, encoded, acc, start, count);
    }
}
