/* topk_reference.h - collectives that send the largest elements only, from the rules of
 * docs/DESIGN.md and with none of the core's code: by sorting, a segment at a time, with residuals
 * as plain arrays.
 */
#ifndef RINGCOMM_TEST_TOPK_REFERENCE_H
#define RINGCOMM_TEST_TOPK_REFERENCE_H

#include "quant_reference.h"

/* What all ranks of a call have in common. */
typedef struct topk_job {
    double density;
    uint64_t seq;
    uint64_t segment_bytes;
} topk_job;

static inline uint32_t topk_size(float x)
{
    return qref_bits(x) & 0x7fffffff;
}

static inline int topk_descending(const void *a, const void *b)
{
    uint32_t x = topk_size(*(const float *)a), y = topk_size(*(const float *)b);
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The k-th largest size; 1 <= k <= n. */
static inline uint32_t topk_kth(const float *x, size_t n, size_t k)
{
    float *sorted = malloc(n * sizeof *sorted);
    memcpy(sorted, x, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, topk_descending);
    uint32_t size = topk_size(sorted[k - 1]);
    free(sorted);
    return size;
}

static inline uint64_t topk_hash(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Where elements begin to be large, and if many are as large as that. */
static inline uint32_t topk_threshold(const topk_job *job, const float *c, uint64_t n, int *tied)
{
    double wanted = 256 / job->density;
    uint64_t size = wanted < 4096 ? 4096 : wanted > 1 << 20 ? 1 << 20 : (uint64_t)wanted;
    uint64_t run = wanted / 4096 < 8     ? 8
                   : wanted / 4096 > 256 ? 256
                                         : (uint64_t)(wanted / 32768) * 8;
    size -= size % run;
    *tied = 0;
    if (n == 0 || job->density >= 1)
        return 1;
    if (n < size)
        size = n;
    float *sample = malloc(size * sizeof *sample);
    memcpy(sample, c, size * sizeof *sample);
    for (uint64_t i = 0, runs = size / run; size < n && i < size; i++) {
        uint64_t at = i / run, start = n / runs * at + n % runs * at / runs;
        uint64_t end = n / runs * (at + 1) + n % runs * (at + 1) / runs;
        uint64_t shift = topk_hash(topk_hash(job->seq) + at) % (end - start - run + 1);
        sample[i] = c[start + shift + i % run];
    }
    uint64_t kept = (uint64_t)(job->density * (double)size + 0.5), large = 0;
    uint32_t least = topk_kth(sample, size, kept > 0 ? kept : 1);
    for (uint64_t i = 0; i < size; i++)
        large += topk_size(sample[i]) >= least;
    free(sample);
    *tied = least > 0 && large > kept + kept / 4 + 8;
    return least > 0 ? least : 1;
}

/* Of c, what has at least that size, and no more elements than most: d there, left elsewhere.
 * Returns how many there are. */
static inline size_t topk_keep(const topk_job *job, float *d, float *left, const float *c, size_t n,
                               uint32_t least, size_t most)
{
    size_t count = 0, larger = 0, equal = 0, seen = 0, kept = 0;
    for (size_t i = 0; i < n; i++)
        count += topk_size(c[i]) >= least;
    uint32_t bound = count > most ? topk_kth(c, n, most) : least - 1;
    for (size_t i = 0; i < n; i++) {
        larger += topk_size(c[i]) > bound;
        equal += topk_size(c[i]) == bound;
    }
    uint64_t first = count > most ? topk_hash(job->seq) % equal : 0;
    for (size_t i = 0; i < n; i++) {
        int goes = topk_size(c[i]) > bound;
        if (count > most && topk_size(c[i]) == bound)
            goes = (seen++ + equal - first) % equal < most - larger;
        d[i] = goes ? c[i] : 0.0F;
        left[i] = goes ? 0.0F : c[i];
        kept += (size_t)goes;
    }
    return kept;
}

static inline uint64_t topk_segment_elems(const topk_job *job, uint64_t chunk)
{
    uint64_t kept = job->segment_bytes / 6, elems = (chunk + 15) / 16;
    double most = ((double)kept - 32) / (8 * job->density);
    most = most < (double)kept ? (double)kept : most;
    uint64_t longest = (most < 65536 ? (uint64_t)most : 65536) / 256 * 256;
    elems = (elems + 255) / 256 * 256;
    elems = elems < 16384 ? 16384 : elems;
    return elems < longest ? elems : longest;
}

static inline size_t topk_bounded(const topk_job *job, double most, size_t n)
{
    n = n < job->segment_bytes / 6 ? n : job->segment_bytes / 6;
    return most < (double)n ? (size_t)most : n;
}

static inline size_t topk_limit(const topk_job *job, size_t n, int tied)
{
    double share = job->density * (double)n;
    return topk_bounded(job, tied ? ceil(share) : ceil(8 * share) + 32, n);
}

/* Of what a rank contributes encoded: not its own part. */
static inline uint32_t topk_threshold_of(const qref_world *w, const topk_job *job, int rank,
                                         const float *c, int *tied)
{
    uint64_t start = w->count, end = w->count;
    if (w->size > 2)
        qref_part_of(w, rank, &start, &end);
    float *encoded = malloc((w->count + 1) * sizeof *encoded);
    memcpy(encoded, c, start * sizeof *c);
    memcpy(encoded + start, c + end, (w->count - end) * sizeof *c);
    uint32_t least = topk_threshold(job, encoded, w->count - (end - start), tied);
    free(encoded);
    return least;
}

/* An all-reduce, as qref_allreduce. sent[rank]: elements that it sends. */
static inline int topk_allreduce(qref_world *w, const topk_job *job, rc_op op, float *const x[],
                                 float *dst, uint64_t *sent)
{
    int direct = w->size > 2, poisoned = 0;
    uint64_t count = w->count, part = direct ? qref_part(w) : count;
    uint64_t segment = topk_segment_elems(job, part);
    float post = op == RC_AVG ? (float)(1.0 / w->size) : 1.0F;
    size_t bytes = (count + 1) * sizeof(float);
    float *c[QREF_MAX_WORLD], *d[QREF_MAX_WORLD], *left[QREF_MAX_WORLD];
    float *owner_left[QREF_MAX_WORLD];
    uint32_t least[QREF_MAX_WORLD];
    int tied[QREF_MAX_WORLD];
    for (int rank = 0; rank < w->size; rank++) {
        c[rank] = malloc(bytes);
        d[rank] = malloc(bytes);
        left[rank] = calloc(1, bytes);
        owner_left[rank] = calloc(1, bytes);
        sent[rank] = 0;
        if (!direct)
            qref_fold(w, rank, op == RC_AVG ? w->size : 1);
        for (uint64_t i = 0; i < count; i++)
            c[rank][i] = x[rank][i] + w->worker[rank][i];
        least[rank] = topk_threshold_of(w, job, rank, c[rank], &tied[rank]);
    }
    for (uint64_t begin = 0; part > 0 && begin < count; begin += part) {
        int owner = (int)(begin / part);
        uint64_t end = begin + part < count ? begin + part : count;
        for (uint64_t at = begin; at < end; at += segment) {
            size_t n = (size_t)(end - at < segment ? end - at : segment), came = 0;
            float *t = malloc(n * sizeof *t);
            for (int rank = 0; rank < w->size; rank++) {
                if (direct && rank == owner) {
                    memcpy(d[rank] + at, c[rank] + at, n * sizeof(float));
                    continue;
                }
                size_t kept = topk_keep(job, d[rank] + at, left[rank] + at, c[rank] + at, n,
                                        least[rank], topk_limit(job, n, tied[rank]));
                came += kept;
                sent[rank] += kept;
            }
            for (size_t i = 0; i < n; i++) {
                t[i] = 0.0F;
                for (int rank = 0; rank < w->size; rank++)
                    t[i] = t[i] + d[rank][at + i];
                t[i] = t[i] * post;
                if (direct && w->feedback)
                    t[i] = t[i] + w->owner[owner][at + i];
                poisoned |= !isfinite(t[i]);
            }
            if (direct) {
                double usual = (3.0 * (double)came / (w->size - 1) + job->density * (double)n) / 4;
                double most = ceil(1.5 * usual);
                size_t kept = topk_keep(job, dst + at, owner_left[owner] + at, t, n, 1,
                                        topk_bounded(job, most, n));
                sent[owner] += kept * (uint64_t)(w->size - 1);
            } else {
                memcpy(dst + at, t, n * sizeof *t);
            }
            free(t);
        }
    }
    for (int rank = 0; rank < w->size; rank++) {
        if (w->feedback && !poisoned) {
            memcpy(w->worker[rank], left[rank], count * sizeof(float));
            memcpy(w->owner[rank], owner_left[rank], count * sizeof(float));
        }
        free(c[rank]);
        free(d[rank]);
        free(left[rank]);
        free(owner_left[rank]);
    }
    for (uint64_t i = 0; poisoned && i < count; i++)
        dst[i] = NAN;
    return poisoned;
}

#endif
