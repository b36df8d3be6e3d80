/* quant_reference.h - codecs of few bits and their collectives, from the formulas of docs/WIRE.md
 * and with none of the core's code: one block at a time, residuals as plain arrays.
 */
#ifndef RINGCOMM_TEST_QUANT_REFERENCE_H
#define RINGCOMM_TEST_QUANT_REFERENCE_H

#include "reference.h"

enum { QREF_MAX_WORLD = 16 };

static inline size_t qref_block(rc_codec codec)
{
    return codec == RC_CODEC_INT4 ? 64 : 256;
}

/* ---- scales ---- */

static inline float qref_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t qref_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The least bf16 that is not less than x, which is not negative. */
static inline float qref_up(float x)
{
    uint32_t bits = qref_bits(x);
    return qref_float((bits & 0xffff) ? (bits | 0xffff) + 1 : bits);
}

static inline float qref_top_scale(const float *c, size_t n, float limit)
{
    float top = 0.0F;
    for (size_t i = 0; i < n; i++)
        top = fabsf(c[i]) > top ? fabsf(c[i]) : top;
    return qref_up(top / limit);
}

/* In 32 lanes, folded in halves. */
static inline float qref_lanes(const float *x, size_t n)
{
    float lane[32] = {0};
    for (size_t i = 0; i < n; i++)
        lane[i % 32] += x[i];
    for (int half = 16; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

static inline float qref_sign_scale(const float *c, size_t n)
{
    float squares[256], sizes[256];
    for (size_t i = 0; i < n; i++) {
        squares[i] = c[i] * c[i];
        sizes[i] = fabsf(c[i]);
    }
    float rms = sqrtf(qref_lanes(squares, n) / (float)n);
    float mean = 1.75F * (qref_lanes(sizes, n) / (float)n);
    return (float)half_value(&half_bf16, half_bits(&half_bf16, rms < mean ? rms : mean));
}

/* ---- one block ---- */

/* The e4m3 value nearest to x, which is at most 448; the even one of two. */
static inline float qref_fp8(float x)
{
    double best = 0.0, size = fabs((double)x);
    int best_code = 0;
    for (int code = 0; code < 127; code++) {
        int exponent = code >> 3, fraction = code & 7;
        double value = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, exponent - 10);
        double gain = fabs(best - size) - fabs(value - size);
        if (gain > 0 || (gain == 0 && code % 2 == 0 && code != best_code)) {
            best = value;
            best_code = code;
        }
    }
    return (float)(signbit(x) ? -best : best);
}

/* d = D(C(c)); 1 if the block is poisoned. n is at most the codec's block. */
static inline int qref_block_round(rc_codec codec, float *d, const float *c, size_t n)
{
    float limit = codec == RC_CODEC_INT8 ? 127.0F : codec == RC_CODEC_INT4 ? 7.0F : 448.0F;
    int finite = 1;
    for (size_t i = 0; i < n; i++)
        finite &= isfinite(c[i]) != 0;
    float s = codec == RC_CODEC_ONEBIT ? qref_sign_scale(c, n) : qref_top_scale(c, n, limit);
    for (size_t i = 0; i < n; i++) {
        float x = c[i] * (1.0F / s);
        if (!finite || !isfinite(s))
            d[i] = NAN;
        else if (s < 0x1p-126F)
            d[i] = 0.0F;
        else if (codec == RC_CODEC_ONEBIT)
            d[i] = c[i] >= 0.0F ? s : -s;
        else
            d[i] = (codec == RC_CODEC_FP8 ? qref_fp8(x) : nearbyintf(x) + 0.0F) * s; /* no -0 */
    }
    return !finite || !isfinite(s);
}

/* d = D(C(c)) of a segment or chunk, which begins a block; left (or NULL) = c - d. */
static inline int qref_round(rc_codec codec, float *d, float *left, const float *c, size_t n)
{
    size_t block = qref_block(codec);
    int poisoned = 0;
    for (size_t start = 0; start < n; start += block) {
        size_t count = n - start < block ? n - start : block;
        poisoned |= qref_block_round(codec, d + start, c + start, count);
    }
    for (size_t i = 0; left != NULL && i < n; i++)
        left[i] = c[i] - d[i];
    return poisoned;
}

/* ---- a world with its residuals ---- */

typedef struct qref_world {
    int size;
    uint64_t count;
    int feedback;                  /* 0: residuals are zero for ever */
    int contributors;              /* ranks whose values are in a source; 0: one each */
    float *worker[QREF_MAX_WORLD]; /* count each */
    float *owner[QREF_MAX_WORLD];  /* count each, of which only the own part is used */
} qref_world;

static inline qref_world qref_open(int size, uint64_t count, int feedback)
{
    qref_world w = {.size = size, .count = count, .feedback = feedback};
    for (int rank = 0; rank < size; rank++) {
        w.worker[rank] = calloc(count + 1, sizeof(float));
        w.owner[rank] = calloc(count + 1, sizeof(float));
    }
    return w;
}

static inline void qref_close(qref_world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        free(w->worker[rank]);
        free(w->owner[rank]);
    }
}

static inline uint64_t qref_part(const qref_world *w)
{
    uint64_t n = (uint64_t)w->size;
    return ((w->count + n - 1) / n + 255) / 256 * 256;
}

/* Elements of a rank's part. */
static inline void qref_part_of(const qref_world *w, int rank, uint64_t *start, uint64_t *end)
{
    uint64_t part = qref_part(w);
    *start = part * (uint64_t)rank < w->count ? part * (uint64_t)rank : w->count;
    *end = *start + part < w->count ? *start + part : w->count;
}

static inline void qref_fold(const qref_world *w, int rank, double factor)
{
    for (uint64_t i = 0; i < w->count; i++) {
        w->worker[rank][i] += w->owner[rank][i] * (float)factor;
        w->owner[rank][i] = 0.0F;
    }
}

/* What a rank contributes to elements start to end; its residuals in left. */
static inline int qref_contribute(const qref_world *w, rc_codec codec, int rank, const float *x,
                                  float *d, float *left, uint64_t start, uint64_t end, int exact)
{
    float *c = malloc((end - start + 1) * sizeof *c);
    int poisoned = 0;
    for (uint64_t i = start; i < end; i++)
        c[i - start] = x[i] + w->worker[rank][i];
    if (exact) {
        memcpy(d + start, c, (end - start) * sizeof *c);
        memset(left + start, 0, (end - start) * sizeof *c);
    } else {
        poisoned = qref_round(codec, d + start, left + start, c, end - start);
    }
    free(c);
    return poisoned;
}

static inline float qref_divisor(const qref_world *w, rc_op op)
{
    return op == RC_AVG ? (float)(w->contributors ? w->contributors : w->size) : 1.0F;
}

static inline float qref_post(const qref_world *w, rc_op op)
{
    return (float)(1.0 / (double)qref_divisor(w, op));
}

/* sum = post * (d[0] + d[1] + ...) */
static inline void qref_sum(const qref_world *w, rc_op op, float *const d[], float *sum,
                            uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        sum[i] = d[0][i];
        for (int rank = 1; rank < w->size; rank++)
            sum[i] = sum[i] + d[rank][i];
        sum[i] = sum[i] * qref_post(w, op);
    }
}

/* Room for every rank's contribution, and what it leaves. */
typedef struct qref_room {
    float *d[QREF_MAX_WORLD], *left[QREF_MAX_WORLD];
} qref_room;

static inline qref_room qref_room_open(const qref_world *w)
{
    qref_room room = {{NULL}, {NULL}};
    for (int rank = 0; rank < w->size; rank++) {
        room.d[rank] = calloc(w->count + 1, sizeof(float));
        room.left[rank] = calloc(w->count + 1, sizeof(float));
    }
    return room;
}

/* Residuals become what was left, unless a step was poisoned. */
static inline void qref_room_close(qref_world *w, qref_room *room, int poisoned)
{
    for (int rank = 0; rank < w->size; rank++) {
        if (w->feedback && !poisoned)
            memcpy(w->worker[rank], room->left[rank], w->count * sizeof(float));
        free(room->d[rank]);
        free(room->left[rank]);
    }
}

static inline void qref_fill_nan(float *x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        x[i] = NAN;
}

/* The owners' half of a direct all-reduce: dst = D(C(sum + residual)). */
static inline int qref_results(qref_world *w, rc_codec codec, float *dst, float *sum)
{
    int poisoned = 0;
    float *left = malloc((w->count + 1) * sizeof *left);
    for (int owner = 0; owner < w->size; owner++) {
        uint64_t start, end;
        qref_part_of(w, owner, &start, &end);
        for (uint64_t i = start; i < end; i++)
            sum[i] = sum[i] + w->owner[owner][i];
        poisoned |= qref_round(codec, dst + start, left + start, sum + start, end - start);
    }
    for (int owner = 0; owner < w->size && w->feedback && !poisoned; owner++) {
        uint64_t start, end;
        qref_part_of(w, owner, &start, &end);
        memcpy(w->owner[owner] + start, left + start, (end - start) * sizeof *left);
    }
    free(left);
    return poisoned;
}

/* An all-reduce of sources x into dst (count elements, the same on all ranks). Residuals change if
 * nothing is poisoned. */
static inline int qref_allreduce(qref_world *w, rc_codec codec, rc_op op, float *const x[],
                                 float *dst)
{
    qref_room room = qref_room_open(w);
    float *sum = malloc((w->count + 1) * sizeof *sum);
    int poisoned = 0;
    for (int rank = 0; rank < w->size; rank++) {
        if (w->size == 2)
            qref_fold(w, rank, (double)qref_divisor(w, op));
        for (int owner = 0; owner < w->size; owner++) {
            uint64_t start = 0, end = owner == 0 ? w->count : 0;
            if (w->size > 2)
                qref_part_of(w, owner, &start, &end);
            poisoned |= qref_contribute(w, codec, rank, x[rank], room.d[rank], room.left[rank],
                                        start, end, w->size > 2 && owner == rank);
        }
    }
    qref_sum(w, op, room.d, sum, w->count);
    if (w->size == 2)
        memcpy(dst, sum, w->count * sizeof *sum);
    else
        poisoned |= qref_results(w, codec, dst, sum);
    if (poisoned)
        qref_fill_nan(dst, w->count);
    qref_room_close(w, &room, poisoned);
    free(sum);
    return poisoned;
}

/* Sources of world x each elements into dst[rank] of each. */
static inline void qref_reduce_scatter(qref_world *w, rc_codec codec, rc_op op, float *const x[],
                                       float *const dst[])
{
    uint64_t each = w->count / (uint64_t)w->size;
    qref_room room = qref_room_open(w);
    float *sum = malloc((w->count + 1) * sizeof *sum);
    for (int rank = 0; rank < w->size; rank++)
        for (int owner = 0; owner < w->size; owner++)
            qref_contribute(w, codec, rank, x[rank], room.d[rank], room.left[rank],
                            each * (uint64_t)owner, each * (uint64_t)(owner + 1), owner == rank);
    qref_sum(w, op, room.d, sum, w->count);
    for (int rank = 0; rank < w->size; rank++)
        memcpy(dst[rank], sum + each * (uint64_t)rank, each * sizeof *sum);
    qref_room_close(w, &room, 0);
    free(sum);
}

/* Sources of count elements into dst of world x as many. */
static inline void qref_allgather(qref_world *w, rc_codec codec, float *const x[], float *dst)
{
    qref_room room = qref_room_open(w);
    for (int rank = 0; rank < w->size; rank++) {
        qref_contribute(w, codec, rank, x[rank], room.d[rank], room.left[rank], 0, w->count, 0);
        memcpy(dst + w->count * (uint64_t)rank, room.d[rank], w->count * sizeof *dst);
    }
    qref_room_close(w, &room, 0);
}

#endif
