/* select.c - the selection of the units of a tensor that are sent. See payload.h.
 *
 * For each chunk c = residual * decay + delta is made in the first cache, its largest units are
 * found there, and what is left of it goes to memory. So a tensor is read once and written once.
 */
#include "payload.h"

#include <string.h>

#include "../base/copy.h"
#include "largest.h"

/* Working memory of a call: a chunk, rounded up to whole blocks, and the units selected in it. */
typedef struct selecting {
    const rc_sparse_format *format;
    const kernel_set *kernels;
    largest largest;
    float *c, *scores, *values;
    uint16_t *index, *half;
} selecting;

size_t sparse_select_room(const rc_sparse_format *f)
{
    return f->chunk * (4 * sizeof(float) + 2 * sizeof(uint16_t)) + LARGEST_SPARE * sizeof(float);
}

static selecting divide_select_room(const rc_sparse_format *f, const kernel_set *kernels,
                                    void *room)
{
    const uint32_t one = 0x3f800000;
    float *c = room;
    float *scores = c + f->chunk, *values = scores + f->chunk, *picked = values + f->chunk;
    uint16_t *index = (uint16_t *)(void *)(picked + f->chunk + LARGEST_SPARE);
    return (selecting){f,      kernels, {kernels, picked, one}, c, scores,
                       values, index,   index + f->chunk};
}

/* Copies the values of the selected units out of c. */
static void take_values(selecting *s, const sparse_chunk *chunk)
{
    size_t block = s->format->block;
    for (size_t i = 0; i < chunk->kept; i++)
        memcpy(s->values + i * block, s->c + s->index[i] * block, block * sizeof *s->values);
}

static void subtract_values(selecting *s, const sparse_chunk *chunk)
{
    size_t block = s->format->block;
    for (size_t i = 0; i < chunk->kept; i++)
        for (size_t j = 0; j < block; j++)
            s->c[s->index[i] * block + j] -= s->values[i * block + j];
}

static void find_largest(selecting *s, const sparse_chunk *chunk)
{
    const float *x = s->c;
    size_t block = s->format->block;
    if (block > 1) {
        memset(s->c + chunk->elems, 0, (chunk->units * block - chunk->elems) * sizeof *s->c);
        s->kernels->sparse.scores(s->scores, s->c, chunk->units);
        x = s->scores;
    }
    largest_find(&s->largest, s->index, x, chunk->units, chunk->kept);
}

/* Writes the record of a chunk whose c is known, and leaves in c what was not sent. Returns 1 if a
 * value that is sent is not finite. */
static int put_record(selecting *s, const sparse_chunk *chunk, uint8_t *record)
{
    size_t n = chunk->kept * s->format->block;
    find_largest(s, chunk);
    take_values(s, chunk);
    uint8_t *at = sparse_put_indices(s->format, chunk, record, s->index);
    sparse_put_values(s->format, s->kernels, at, s->values, s->half, n);
    subtract_values(s, chunk);
    return sparse_any_not_finite(s->values, n);
}

int sparse_select(const rc_sparse_format *format, const kernel_set *kernels, void *room,
                  uint8_t *wire, float *left, const float *residual, const float *delta,
                  float decay, uint64_t count)
{
    selecting s = divide_select_room(format, kernels, room);
    int poisoned = 0, is_far = count * sizeof *left > COPY_PAST_CACHE_BYTES;
    for (uint64_t at = 0; at < count; at += format->chunk) {
        sparse_chunk chunk = sparse_chunk_at(format, count, at);
        const float *before = residual != NULL ? residual + at : NULL;
        kernels->sparse.combine(s.c, before, delta + at, decay, chunk.elems);
        poisoned |= put_record(&s, &chunk, wire);
        (is_far ? copy_past_cache : copy_bytes)(left + at, s.c, chunk.elems * sizeof *left);
        wire += chunk.bytes;
    }
    return poisoned;
}
