/* topk.c - see topk.h. */
#include "topk.h"

#include <math.h>
#include <string.h>

#include "../plan/plan.h"

enum {
    PIECE = 1024,          /* elements at a time, where that keeps them in the first cache */
    SAMPLED_KEPT = 256,    /* elements of a sample that would be kept: their number is off by 6 % */
    LEAST_SAMPLE = 4096,   /* elements */
    MOST_SAMPLE = 1 << 20, /* elements */
    RUNS = 4096,           /* that a sample is drawn in; of 8 elements at least, 256 at most */
    RUN = 8,
    LONGEST_RUN = 256,
    LIMIT = 8,
    LIMIT_ADD = 32 /* elements of a segment: so many times what the density wants, + */
};

static const double SUM_SHARE = 1.5;         /* elements of a sum for each of a contribution */
static const uint32_t INFINITE = 0x7f800000; /* the size of infinity; that of NaN is larger */

/* ---- sizes ---- */

static uint32_t size_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

static int any_not_finite(const float *x, size_t n)
{
    uint32_t found = 0;
    for (size_t i = 0; i < n; i++)
        found |= size_of(x[i]) >= INFINITE;
    return (int)found;
}

/* The k-th largest size, 1 <= k <= n: its 31 bits from the top on, 11, 10 and 10 of them. */
static uint32_t kth_size(const float *x, size_t n, size_t k)
{
    uint32_t known = 0;
    for (int shift = 20; shift >= 0; shift -= 10) {
        size_t counts[2048] = {0};
        uint32_t bin = shift == 20 ? 2047 : 1023;
        for (size_t i = 0; i < n; i++) {
            uint32_t size = size_of(x[i]);
            if (shift == 20 || size >> (shift + 10) == known)
                counts[size >> shift & bin]++;
        }
        for (; counts[bin] < k; bin--)
            k -= counts[bin];
        known = known << 10 | bin;
    }
    return known;
}

/* ---- the sample ---- */

/* Spreads a number over 64 bits (splitmix64). */
static uint64_t hash(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* n elements of src + residual. */
static void take(const topk *t, float *out, const void *src, const float *residual, uint64_t start,
                 size_t n)
{
    if (t->dtype == RC_F64)
        t->kernels->f64_to_f32(out, (const double *)src + start, n);
    else
        memcpy(out, (const float *)src + start, n * sizeof *out);
    for (size_t i = 0; residual != NULL && i < n; i++)
        out[i] += residual[start + i];
}

/* Elements that are drawn together. Far pages cost more than what is on them. */
static size_t run_length(const topk *t)
{
    double wanted = SAMPLED_KEPT / t->density / RUNS;
    return wanted < RUN ? RUN : wanted > LONGEST_RUN ? LONGEST_RUN : (size_t)wanted / RUN * RUN;
}

static size_t sample_size(const topk *t, uint64_t n)
{
    double wanted = SAMPLED_KEPT / t->density;
    size_t size = wanted < LEAST_SAMPLE  ? LEAST_SAMPLE
                  : wanted > MOST_SAMPLE ? MOST_SAMPLE
                                         : (size_t)wanted;
    size -= size % run_length(t);
    return n < size ? (size_t)n : size;
}

/* Elements that are encoded are numbered without the gap of those that are not. */
static void take_encoded(const topk *t, float *out, const topk_source *s, uint64_t at, size_t n)
{
    size_t before = at >= s->exact ? 0 : s->exact - at < n ? (size_t)(s->exact - at) : n;
    take(t, out, s->src, s->residual, at, before);
    take(t, out + before, s->src, s->residual, at + before + s->exact_count, n - before);
}

/* Of a long tensor runs, one somewhere in each stretch of it; else all. */
static void draw(const topk *t, float *sample, size_t size, const topk_source *s, uint64_t n)
{
    uint64_t length = run_length(t), runs = size / length;
    if (size == n) {
        take_encoded(t, sample, s, 0, size);
        return;
    }
    for (uint64_t run = 0; run < runs; run++) {
        uint64_t start = n / runs * run + n % runs * run / runs;
        uint64_t end = n / runs * (run + 1) + n % runs * (run + 1) / runs;
        uint64_t at = start + hash(t->turn + run) % (end - start - length + 1);
        take_encoded(t, sample + run * length, s, at, length);
    }
}

topk_sample topk_sample_of(const topk *t, uint64_t n)
{
    size_t size = sample_size(t, n);
    return (topk_sample){size, run_length(t), (size_t)(t->density * (double)size + 0.5)};
}

static void choose_least(topk *t, float *sample, const topk_source *s)
{
    uint64_t n = s->count - s->exact_count;
    topk_sample drawn = topk_sample_of(t, n);
    size_t size = drawn.size, kept = drawn.kept, large = 0;
    t->least = 1;
    t->tied = 0;
    if (n == 0 || t->density >= 1.0)
        return;
    draw(t, sample, size, s, n);
    uint32_t least = kth_size(sample, size, kept > 0 ? kept : 1);
    if (least == 0)
        return;
    for (size_t i = 0; i < size; i++)
        large += size_of(sample[i]) >= least;
    t->least = least;
    t->tied = large > kept + kept / 4 + 8;
}

/* Few elements make small frames, so segments are as long as the limit of each lets them be. */
size_t topk_segment(const topk *t, size_t bytes)
{
    size_t kept = bytes / TOPK_BYTES;
    double elems = ((double)kept - LIMIT_ADD) / (LIMIT * t->density);
    if (elems < (double)kept)
        elems = (double)kept;
    return (elems < TOPK_MOST_ELEMS ? (size_t)elems : TOPK_MOST_ELEMS) / PLAN_ALIGN * PLAN_ALIGN;
}

/* The sample lies where the segments will. */
size_t topk_room(const topk *t, const topk_source *source, topk_segments segments)
{
    size_t segment = segments.elems * (2 * sizeof(float) + sizeof(uint16_t));
    size_t sample = sample_size(t, source->count - source->exact_count) * sizeof(float);
    size_t least = sizeof(float); /* for pointers into it, if there is nothing to encode */
    return segment + sample == 0 ? least : segment > sample ? segment : sample;
}

void topk_prepare(topk *t, void *room, const topk_source *source, topk_segments segments,
                  uint64_t turn)
{
    t->turn = hash(turn);
    t->most = segments.bytes / TOPK_BYTES;
    t->dense = room;
    t->values = t->dense + segments.elems;
    t->index = (uint16_t *)(void *)(t->values + segments.elems);
    choose_least(t, room, source);
}

/* ---- payloads ---- */

int topk_valid(const void *wire, size_t bytes, size_t n)
{
    const uint16_t *index = wire;
    size_t kept = bytes / TOPK_BYTES;
    uint32_t next = 0;
    if (bytes % TOPK_BYTES != 0 || kept > n)
        return 0;
    for (size_t i = 0; i < kept; i++) {
        if (index[i] < next || index[i] >= n)
            return 0;
        next = index[i] + 1U;
    }
    return 1;
}

/* Of what has been kept. */
typedef struct entries {
    const uint16_t *index;
    const uint8_t *values; /* floats, anywhere */
    size_t count;
} entries;

static entries entries_of(const void *wire, size_t bytes)
{
    size_t count = bytes / TOPK_BYTES;
    return (entries){wire, (const uint8_t *)wire + count * sizeof(uint16_t), count};
}

static float value_at(const entries *e, size_t i)
{
    float value;
    memcpy(&value, e->values + i * sizeof value, sizeof value);
    return value;
}

/* Leaves only the largest of the elements that were picked. Those of the very size of the last one
 * are taken in order, from another one on in each turn. What is dropped goes to left. */
static size_t drop_smallest(const topk *t, uint16_t *index, float *value, size_t count, size_t most,
                            float *left)
{
    size_t larger = 0, equal = 0, seen = 0, kept = 0;
    uint32_t least = kth_size(value, count, most);
    for (size_t i = 0; i < count; i++) {
        larger += size_of(value[i]) > least;
        equal += size_of(value[i]) == least;
    }
    size_t first = (size_t)(t->turn % equal), wanted = most - larger;
    for (size_t i = 0; i < count; i++) {
        int is_equal = size_of(value[i]) == least;
        int goes = size_of(value[i]) > least;
        if (is_equal)
            goes = (seen++ + equal - first) % equal < wanted;
        if (goes) {
            index[kept] = index[i];
            value[kept++] = value[i];
        } else if (left != NULL) {
            left[index[i]] = value[i];
        }
    }
    return kept;
}

/* Writes a payload; returns its bytes. */
static size_t put_payload(uint8_t *wire, const uint16_t *index, const float *value, size_t count)
{
    memcpy(wire, index, count * sizeof *index);
    memcpy(wire + count * sizeof *index, value, count * sizeof *value);
    return count * TOPK_BYTES;
}

/* c = src + residual, encoded: of what has at least the size least, at most so many elements. */
static size_t encode_largest(const topk *t, uint8_t *wire, const float *src, const float *residual,
                             float *left, size_t n, uint32_t least, size_t most, int *poisoned)
{
    size_t count =
        t->kernels->topk.pick(t->index, t->values, left, src, residual, least, n, t->far);
    if (count > most)
        count = drop_smallest(t, t->index, t->values, count, most, left);
    *poisoned |= any_not_finite(t->values, count);
    return put_payload(wire, t->index, t->values, count);
}

/* most elements, but no more than there are, or fit into a payload. */
static size_t bounded(size_t room, double most, size_t n)
{
    size_t bound = n < room ? n : room;
    return most < (double)bound ? (size_t)most : bound;
}

/* ---- contributions ---- */

/* The most elements of a segment. */
static size_t limit(const topk *t, size_t room, int tied, size_t n)
{
    double share = t->density * (double)n;
    double most = tied ? ceil(share) : ceil(LIMIT * share) + LIMIT_ADD;
    return bounded(room, most, n);
}

size_t topk_most_contributed(const topk *t, size_t bytes, size_t n)
{
    return limit(t, bytes / TOPK_BYTES, 0, n);
}

size_t topk_encode(topk *t, uint8_t *wire, const void *src, const float *residual, float *left,
                   size_t n, int *poisoned)
{
    const float *x = src;
    if (t->dtype == RC_F64) {
        t->kernels->f64_to_f32(t->dense, src, n);
        x = t->dense;
    }
    return encode_largest(t, wire, x, residual, left, n, t->least, limit(t, t->most, t->tied, n),
                          poisoned);
}

/* ---- sums ---- */

/* Adds this rank's own contribution, or stores it where there is none yet. */
static void add_own(const topk *t, float *sum, const topk_terms *terms, size_t n)
{
    float own[PIECE];
    for (size_t start = 0; start < n; start += PIECE) {
        size_t count = n - start < PIECE ? n - start : PIECE;
        take(t, own, terms->src, terms->residual, start, count);
        t->kernels->reduce[RC_F32][RC_SUM](sum + start, sum + start, own, count);
    }
}

/* S, in order of rank, from 0 on. */
static float *sum_terms(const topk *t, const topk_terms *terms, size_t n)
{
    float *sum = t->dense;
    memset(sum, 0, n * sizeof *sum);
    for (int rank = 0; rank < terms->count; rank++) {
        if (terms->wires[rank] == NULL) {
            add_own(t, sum, terms, n);
            continue;
        }
        entries e = entries_of(terms->wires[rank], terms->lengths[rank]);
        for (size_t i = 0; i < e.count; i++)
            sum[e.index[i]] += value_at(&e, i);
    }
    return sum;
}

/* dst = values at index, else 0. */
static void put(const topk *t, void *dst, const entries *e, size_t n)
{
    if (t->dtype == RC_F32) {
        t->kernels->topk.put(dst, e->index, e->values, e->count, n, t->far);
        return;
    }
    for (size_t i = 0; i < n; i++)
        ((double *)dst)[i] = 0.0;
    for (size_t i = 0; i < e->count; i++)
        ((double *)dst)[e->index[i]] = (double)value_at(e, i);
}

/* Two contributions as one: S * post. */
static entries merge(const topk *t, const topk_terms *terms)
{
    entries a = entries_of(terms->wires[0], terms->lengths[0]);
    entries b = entries_of(terms->wires[1], terms->lengths[1]);
    size_t i = 0, j = 0, count = 0;
    while (i < a.count || j < b.count) {
        uint32_t from_a = i < a.count ? a.index[i] : UINT32_MAX;
        uint32_t from_b = j < b.count ? b.index[j] : UINT32_MAX;
        float sum = 0.0F;
        if (from_a <= from_b)
            sum += value_at(&a, i++);
        if (from_b <= from_a)
            sum += value_at(&b, j++);
        t->index[count] = (uint16_t)(from_a < from_b ? from_a : from_b);
        t->values[count++] = sum * t->post;
    }
    return (entries){t->index, (const uint8_t *)t->values, count};
}

size_t topk_join_kept(topk *t, uint8_t *wire, const topk_terms *terms, int *poisoned)
{
    entries e = merge(t, terms);
    *poisoned |= any_not_finite(t->values, e.count);
    return put_payload(wire, t->index, t->values, e.count);
}

void topk_join(topk *t, void *dst, const topk_terms *terms, size_t n, int *poisoned)
{
    if (terms->count == 2 && terms->wires[0] != NULL && terms->wires[1] != NULL) {
        entries e = merge(t, terms);
        *poisoned |= any_not_finite(t->values, e.count);
        put(t, dst, &e, n);
        return;
    }
    float *sum = sum_terms(t, terms, n);
    float *out = t->dtype == RC_F32 ? dst : sum;
    *poisoned |= any_not_finite(sum, n);
    t->kernels->scale[RC_F32](out, sum, (double)t->post, n);
    if (t->dtype == RC_F64)
        t->kernels->f32_to_f64(dst, sum, n);
}

/* How many elements of a sum are sent, of contributions with so many. */
static size_t wanted(const topk *t, size_t room, double came, int ranks, size_t n)
{
    double usual = (3.0 * came / ranks + t->density * (double)n) / 4.0;
    return bounded(room, ceil(SUM_SHARE * usual), n);
}

size_t topk_most_of_sum(const topk *t, size_t bytes, size_t n)
{
    double came = (double)topk_most_contributed(t, bytes, n);
    return wanted(t, bytes / TOPK_BYTES, came, 1, n);
}

/* They came from all other ranks. */
static double count_all(const topk_terms *terms)
{
    double came = 0.0;
    for (int rank = 0; rank < terms->count; rank++)
        if (terms->wires[rank] != NULL)
            came += (double)(terms->lengths[rank] / TOPK_BYTES);
    return came;
}

/* A size that the k largest of x have, and few others: found among the largest of each group. */
static uint32_t size_of_largest(const topk *t, const float *x, size_t n, size_t k)
{
    float tops[TOPK_MOST_ELEMS / KERNEL_TOPK_GROUP];
    size_t groups = n / KERNEL_TOPK_GROUP;
    uint32_t size;
    if (k <= groups / 2) {
        t->kernels->topk.tops(tops, x, groups);
        size = kth_size(tops, groups, k);
    } else {
        size = kth_size(x, n, k);
    }
    return size > 0 ? size : 1;
}

size_t topk_join_encoded(topk *t, void *dst, uint8_t *wire, const topk_terms *terms,
                         const float *residual, float *left, size_t n, int *poisoned)
{
    float *sum = sum_terms(t, terms, n);
    size_t most = wanted(t, t->most, count_all(terms), terms->count - 1, n), bytes = 0;
    t->kernels->scale[RC_F32](sum, sum, (double)t->post, n);
    if (residual != NULL)
        t->kernels->reduce[RC_F32][RC_SUM](sum, sum, residual, n);
    if (n > 0)
        bytes = encode_largest(t, wire, sum, NULL, left, n, size_of_largest(t, sum, n, most), most,
                               poisoned);
    entries e = entries_of(wire, bytes);
    if (dst != NULL)
        put(t, dst, &e, n);
    return bytes;
}

/* ---- results ---- */

int topk_is_poisoned(const void *wire, size_t bytes)
{
    entries e = entries_of(wire, bytes);
    int found = 0;
    for (size_t i = 0; i < e.count; i++)
        found |= size_of(value_at(&e, i)) >= INFINITE;
    return found;
}

void topk_store(topk *t, void *dst, const void *wire, size_t bytes, size_t n, int *poisoned)
{
    entries e = entries_of(wire, bytes);
    *poisoned |= topk_is_poisoned(wire, bytes);
    put(t, dst, &e, n);
}
