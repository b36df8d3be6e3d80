/* sums.c - sums of payloads. See payload.h. */
#include "payload.h"

#include <string.h>

#include "../base/copy.h"

/* Working memory of a call. Between chunks all of sums, senders and present is zero. */
typedef struct joining {
    const rc_sparse_format *format;
    const kernel_set *kernels;
    uint64_t *present; /* a bit for each unit of a chunk */
    float *sums, *values;
    uint16_t *senders, *index, *half; /* senders: payloads that have the unit */
} joining;

static size_t words(const rc_sparse_format *f)
{
    return (f->chunk / f->block + 63) / 64;
}

size_t sparse_join_room(const rc_sparse_format *f)
{
    return words(f) * sizeof(uint64_t) + f->chunk * (2 * sizeof(float) + 3 * sizeof(uint16_t));
}

static joining divide_join_room(const rc_sparse_format *f, const kernel_set *kernels, void *room)
{
    memset(room, 0, sparse_join_room(f));
    uint64_t *present = room;
    float *sums = (float *)(void *)(present + words(f));
    uint16_t *senders = (uint16_t *)(void *)(sums + 2 * (size_t)f->chunk);
    return (joining){f,
                     kernels,
                     present,
                     sums,
                     sums + f->chunk,
                     senders,
                     senders + f->chunk,
                     senders + 2 * (size_t)f->chunk};
}

static int any_not_zero(const float *x, size_t n)
{
    int found = 0;
    for (size_t i = 0; i < n; i++)
        found |= x[i] != 0.0f; /* NaN too */
    return found;
}

/* Adds one record. Returns 0 if it is invalid. */
static int add_record(joining *j, const sparse_chunk *chunk, const uint8_t *record)
{
    size_t block = j->format->block;
    const uint8_t *at = sparse_get_indices(j->format, chunk, record, j->index);
    if (at == NULL)
        return 0;
    sparse_get_values(j->format, j->kernels, at, j->values, j->half, chunk->kept * block);
    for (size_t i = 0; i < chunk->kept; i++) {
        const float *value = j->values + i * block;
        size_t unit = j->index[i];
        if (!any_not_zero(value, block))
            continue;
        j->present[unit / 64] |= UINT64_C(1) << unit % 64;
        j->senders[unit]++;
        for (size_t e = 0; e < block; e++)
            j->sums[unit * block + e] += value[e];
    }
    return 1;
}

/* Moves the sum of a unit to values. */
static void give_unit(joining *j, size_t unit, float factor, float *values)
{
    size_t block = j->format->block;
    float *sum = j->sums + unit * block;
    float by = factor != 0.0f ? factor : 1.0f / (float)j->senders[unit];
    for (size_t e = 0; e < block; e++) {
        values[e] = sum[e] * by;
        sum[e] = 0.0f;
    }
    j->senders[unit] = 0;
}

/* Moves the sums of a chunk to index and values; returns how many there are. */
static uint32_t give(joining *j, const sparse_chunk *chunk, float factor, uint16_t *index,
                     float *values)
{
    uint32_t count = 0;
    for (size_t word = 0; word * 64 < chunk->units; word++) {
        for (uint64_t bits = j->present[word]; bits != 0; bits &= bits - 1) {
            size_t unit = word * 64 + (size_t)__builtin_ctzll(bits);
            index[count] = (uint16_t)unit;
            give_unit(j, unit, factor, values + (size_t)count++ * j->format->block);
        }
        j->present[word] = 0;
    }
    return count;
}

uint64_t sparse_join(const rc_sparse_format *format, const kernel_set *kernels, void *room,
                     const uint8_t *const *wires, int payloads, float factor, uint64_t count,
                     rc_sparse_entries *out, int *poisoned, int *wrong)
{
    joining j = divide_join_room(format, kernels, room);
    uint64_t total = 0, offset = 0;
    *wrong = -1;
    *poisoned = 0;
    for (uint64_t at = 0, i = 0; at < count; at += format->chunk, i++) {
        sparse_chunk chunk = sparse_chunk_at(format, count, at);
        for (int p = 0; p < payloads; p++) {
            if (!add_record(&j, &chunk, wires[p] + offset)) {
                *wrong = p;
                return 0;
            }
        }
        float *values = out->values + total * format->block;
        out->counts[i] = give(&j, &chunk, factor, out->index + total, values);
        *poisoned |= sparse_any_not_finite(values, (size_t)out->counts[i] * format->block);
        total += out->counts[i];
        offset += chunk.bytes;
    }
    return total;
}

/* ---- in a tensor ---- */

/* Function for a unit of entries: n elements in dense, of the tensor's last unit perhaps fewer than
 * a block. */
typedef void unit_fn(float *dense, const float *values, float factor, size_t n);

static void put_unit(float *dense, const float *values, float factor, size_t n)
{
    (void)factor;
    memcpy(dense, values, n * sizeof *dense);
}

static void add_unit(float *dense, const float *values, float factor, size_t n)
{
    for (size_t e = 0; e < n; e++)
        dense[e] += factor * values[e];
}

static void each_unit(const rc_sparse_format *f, const uint16_t *index, const float *values,
                      uint32_t count, unit_fn *does, float factor, float *dense, size_t elems)
{
    size_t block = f->block;
    for (uint32_t i = 0; i < count; i++) {
        size_t first = index[i] * block;
        does(dense + first, values + i * block, factor,
             elems - first < block ? elems - first : block);
    }
}

void sparse_scatter(const rc_sparse_format *format, const kernel_set *kernels,
                    const rc_sparse_entries *entries, float *dense, uint64_t count)
{
    const uint16_t *index = entries->index;
    const float *values = entries->values;
    int is_far = count * sizeof *dense > COPY_PAST_CACHE_BYTES;
    for (uint64_t at = 0, i = 0; at < count; at += format->chunk, i++) {
        sparse_chunk chunk = sparse_chunk_at(format, count, at);
        uint32_t here = entries->counts[i];
        if (format->block == 1) {
            kernels->sparse.put(dense + at, index, values, here, chunk.elems, is_far);
        } else {
            memset(dense + at, 0, chunk.elems * sizeof *dense);
            each_unit(format, index, values, here, put_unit, 0.0f, dense + at, chunk.elems);
        }
        index += here;
        values += (size_t)here * format->block;
    }
}

void sparse_add(const rc_sparse_format *format, const rc_sparse_entries *entries, float factor,
                float *dense, uint64_t count)
{
    const uint16_t *index = entries->index;
    const float *values = entries->values;
    for (uint64_t at = 0, i = 0; at < count; at += format->chunk, i++) {
        sparse_chunk chunk = sparse_chunk_at(format, count, at);
        uint32_t here = entries->counts[i];
        each_unit(format, index, values, here, add_unit, factor, dense + at, chunk.elems);
        index += here;
        values += (size_t)here * format->block;
    }
}
