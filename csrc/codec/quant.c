/* quant.c - codecs of few bits per element. See codec.h. */
#include "codec.h"

#include <math.h>
#include <string.h>

#include "../plan/plan.h"

enum {
    PIECE = 1024,       /* elements at a time; a few f32 pieces stay in the first cache */
    FAR_BYTES = 4 << 20 /* larger tensors are written past the caches */
};

void quant_init(quant *q, const kernel_set *kernels, const rc_call *call, int contributors)
{
    size_t elem_bytes = call->dtype == RC_F64 ? sizeof(double) : sizeof(float);
    *q = (quant){.kernels = kernels,
                 .format = &kernels->block[call->codec],
                 .dtype = call->dtype,
                 .elem_bytes = elem_bytes,
                 .post = call->op == RC_AVG ? (float)(1.0 / contributors) : 1.0F,
                 .far = call->count > FAR_BYTES / elem_bytes};
}

/* ---- the payload ---- */

size_t quant_bytes(const quant *q, size_t n)
{
    return kernel_block_scales(q->format, n) * sizeof(uint16_t) + kernel_block_codes(q->format, n);
}

size_t quant_segment(const quant *q, size_t bytes)
{
    return bytes / quant_bytes(q, PLAN_ALIGN) * PLAN_ALIGN;
}

/* Scales and codes of the elements from start on, in the payload of n elements. */
typedef struct coded {
    uint16_t *scales;
    uint8_t *codes;
} coded;

static coded coded_at(const quant *q, const uint8_t *wire, size_t n, size_t start)
{
    uint8_t *bytes = (uint8_t *)wire;
    return (coded){(uint16_t *)(void *)bytes + start / q->format->block,
                   bytes + kernel_block_scales(q->format, n) * sizeof(uint16_t) +
                       start / q->format->block * q->format->bytes};
}

static size_t piece_at(size_t start, size_t n)
{
    return n - start < PIECE ? n - start : PIECE;
}

/* ---- elements ---- */

/* Returns n elements of src as f32: in place, or rounded into room. */
static const float *piece_as_f32(const quant *q, const void *src, size_t start, size_t n,
                                 float *room)
{
    if (q->dtype == RC_F32)
        return (const float *)src + start;
    q->kernels->f64_to_f32(room, (const double *)src + start, n);
    return room;
}

static void put_f64(const quant *q, void *dst, const float *x, size_t start, size_t n)
{
    q->kernels->f32_to_f64((double *)dst + start, x, n);
}

static int any_not_finite(const float *x, size_t n)
{
    int32_t found = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        found |= (bits & INT32_MAX) > 0x7f7fffff;
    }
    return found;
}

int quant_is_finite(rc_dtype dtype, const void *x, size_t n)
{
    if (dtype == RC_F32)
        return !any_not_finite(x, n);
    for (size_t i = 0; i < n; i++)
        if (!isfinite(((const double *)x)[i]))
            return 0;
    return 1;
}

void quant_fill_nan(rc_dtype dtype, void *dst, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (dtype == RC_F64)
            ((double *)dst)[i] = (double)NAN;
        else
            ((float *)dst)[i] = NAN;
}

/* ---- contributions ---- */

static const float *from(const float *x, size_t start)
{
    return x != NULL ? x + start : NULL;
}

void quant_encode(const quant *q, uint8_t *wire, const void *src, const float *residual,
                  float *left, size_t n, int *poisoned)
{
    float room[PIECE];
    size_t step = q->dtype == RC_F32 ? n : PIECE;
    for (size_t start = 0; start < n; start += step) {
        size_t count = step < n - start ? step : n - start;
        coded to = coded_at(q, wire, n, start);
        *poisoned |= q->format->encode(to.scales, to.codes, left != NULL ? left + start : NULL,
                                       piece_as_f32(q, src, start, count, room), 1.0F,
                                       from(residual, start), count, q->far);
    }
}

/* ---- sums ---- */

/* Adds a rank's contribution to acc; rank 0's replaces acc. Returns 1 if a block is poisoned. */
static int take_term(const quant *q, float *acc, const quant_terms *t, int rank, size_t start,
                     size_t count, size_t n)
{
    const kernel_block *format = q->format;
    kernel_reduce_fn *add = q->kernels->reduce[RC_F32][RC_SUM];
    if (t->wires[rank] != NULL) {
        coded at = coded_at(q, t->wires[rank], n, start);
        return rank == 0 ? format->decode(acc, at.scales, at.codes, count, 0)
                         : format->add(acc, at.scales, at.codes, count);
    }
    float room[PIECE];
    const float *own = piece_as_f32(q, t->src, start, count, room);
    if (t->residual != NULL) {
        add(room, own, t->residual + start, count);
        own = room;
    }
    if (rank == 0)
        memcpy(acc, own, count * sizeof *acc);
    else
        add(acc, acc, own, count);
    return 0;
}

static int sum_terms(const quant *q, float *acc, const quant_terms *t, size_t start, size_t count,
                     size_t n)
{
    int poisoned = 0;
    for (int rank = 0; rank < t->count; rank++)
        poisoned |= take_term(q, acc, t, rank, start, count, n);
    return poisoned;
}

void quant_join(const quant *q, void *dst, const quant_terms *terms, size_t n, int *poisoned)
{
    float acc[PIECE];
    for (size_t start = 0; start < n; start += PIECE) {
        size_t count = piece_at(start, n);
        float *out = q->dtype == RC_F32 ? (float *)dst + start : acc;
        *poisoned |= sum_terms(q, acc, terms, start, count, n);
        *poisoned |= any_not_finite(acc, count);
        q->kernels->scale[RC_F32](out, acc, (double)q->post, count);
        if (q->dtype == RC_F64)
            put_f64(q, dst, acc, start, count);
    }
}

void quant_join_encoded(const quant *q, void *dst, uint8_t *wire, const quant_terms *terms,
                        const float *residual, float *left, size_t n, int *poisoned)
{
    float acc[PIECE];
    for (size_t start = 0; start < n; start += PIECE) {
        size_t count = piece_at(start, n);
        coded to = coded_at(q, wire, n, start);
        sum_terms(q, acc, terms, start, count, n);
        *poisoned |= q->format->encode(to.scales, to.codes, left != NULL ? left + start : NULL, acc,
                                       q->post, from(residual, start), count, q->far);
        if (dst == NULL)
            continue;
        float *out = q->dtype == RC_F32 ? (float *)dst + start : acc;
        q->format->decode(out, to.scales, to.codes, count, q->far);
        if (q->dtype == RC_F64)
            put_f64(q, dst, acc, start, count);
    }
}

/* Returns 1 if a scale is 2^100 or larger. Smaller ones times any code's number are below 2^109, so
 * no sum is infinite. */
static int has_large_scale(const quant *q, const uint8_t *wire, size_t n)
{
    enum { SIZE = 0x7fff, LARGE = (127 + 100) << 7 };
    const uint16_t *scales = coded_at(q, wire, n, 0).scales;
    int found = 0;
    for (size_t i = 0; i < kernel_block_scales(q->format, n); i++)
        found |= (scales[i] & SIZE) >= LARGE;
    return found;
}

int quant_sum_is_poisoned(const quant *q, const quant_terms *terms, size_t n)
{
    int may_be = 0, poisoned = 0;
    for (int rank = 0; rank < terms->count; rank++)
        may_be |= has_large_scale(q, terms->wires[rank], n);
    for (size_t start = 0; start < n && may_be; start += PIECE) {
        float acc[PIECE];
        size_t count = piece_at(start, n);
        poisoned |= sum_terms(q, acc, terms, start, count, n);
        poisoned |= any_not_finite(acc, count);
    }
    return poisoned;
}

/* ---- results ---- */

int quant_is_poisoned(const quant *q, const uint8_t *wire, size_t n)
{
    enum { NOT_FINITE = 0x7f80 };
    const uint16_t *scales = coded_at(q, wire, n, 0).scales;
    int found = 0;
    for (size_t i = 0; i < kernel_block_scales(q->format, n); i++)
        found |= (scales[i] & NOT_FINITE) == NOT_FINITE;
    return found;
}

void quant_store(const quant *q, void *dst, const uint8_t *wire, size_t n, int *poisoned)
{
    if (q->dtype == RC_F32) {
        coded at = coded_at(q, wire, n, 0);
        *poisoned |= q->format->decode(dst, at.scales, at.codes, n, q->far);
        return;
    }
    float room[PIECE];
    for (size_t start = 0; start < n; start += PIECE) {
        size_t count = piece_at(start, n);
        coded at = coded_at(q, wire, n, start);
        *poisoned |= q->format->decode(room, at.scales, at.codes, count, 0);
        put_f64(q, dst, room, start, count);
    }
}
