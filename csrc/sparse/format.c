/* format.c - the layout of a sparse payload. See payload.h. */
#include "payload.h"

#include <string.h>

int sparse_format_ok(const rc_sparse_format *f)
{
    if (f->block != 1 && f->block != KERNEL_SPARSE_BLOCK)
        return 0;
    if (f->chunk < KERNEL_SPARSE_BLOCK || f->chunk > SPARSE_MOST_CHUNK || f->chunk % f->block != 0)
        return 0;
    if (f->values != RC_F32 && f->values != RC_BF16)
        return 0;
    return f->kept >= 1 && f->kept <= f->chunk / f->block;
}

/* Returns the bits of an index. */
static unsigned width_of(const rc_sparse_format *f)
{
    unsigned width = 1;
    while ((f->chunk / f->block - 1) >> width != 0)
        width++;
    return width;
}

sparse_chunk sparse_chunk_at(const rc_sparse_format *f, uint64_t count, uint64_t start)
{
    size_t elems = count - start < f->chunk ? (size_t)(count - start) : f->chunk;
    size_t units = (elems + f->block - 1) / f->block;
    size_t kept = (size_t)(((uint64_t)f->kept * elems + f->chunk - 1) / f->chunk);
    size_t index_bytes = (kept * width_of(f) + 7) / 8;
    size_t value_bytes = f->values == RC_BF16 ? sizeof(uint16_t) : sizeof(float);
    return (sparse_chunk){elems, units, kept, index_bytes,
                          index_bytes + kept * f->block * value_bytes};
}

uint8_t *sparse_put_indices(const rc_sparse_format *f, const sparse_chunk *chunk, uint8_t *record,
                            const uint16_t *index)
{
    uint64_t bits = 0;
    unsigned width = width_of(f), filled = 0;
    uint8_t *out = record;
    for (size_t i = 0; i < chunk->kept; i++) {
        bits |= (uint64_t)index[i] << filled;
        for (filled += width; filled >= 8; filled -= 8, bits >>= 8)
            *out++ = (uint8_t)bits;
    }
    if (filled > 0)
        *out = (uint8_t)bits;
    return record + chunk->index_bytes;
}

const uint8_t *sparse_get_indices(const rc_sparse_format *f, const sparse_chunk *chunk,
                                  const uint8_t *record, uint16_t *index)
{
    uint64_t bits = 0;
    unsigned width = width_of(f), filled = 0;
    uint32_t next = 0, mask = (1u << width) - 1;
    const uint8_t *in = record;
    for (size_t i = 0; i < chunk->kept; i++) {
        for (; filled < width; filled += 8)
            bits |= (uint64_t)*in++ << filled;
        uint32_t found = (uint32_t)bits & mask;
        bits >>= width;
        filled -= width;
        if (found < next || found >= chunk->units)
            return NULL;
        next = found + 1;
        index[i] = (uint16_t)found;
    }
    return record + chunk->index_bytes;
}

void sparse_put_values(const rc_sparse_format *f, const kernel_set *kernels, uint8_t *wire,
                       float *values, uint16_t *half, size_t n)
{
    if (f->values == RC_F32) {
        memcpy(wire, values, n * sizeof *values);
        return;
    }
    kernels->bf16.encode(half, values, 1.0f, n);
    memcpy(wire, half, n * sizeof *half);
    kernels->bf16.decode(values, half, n);
}

void sparse_get_values(const rc_sparse_format *f, const kernel_set *kernels, const uint8_t *wire,
                       float *values, uint16_t *half, size_t n)
{
    if (f->values == RC_F32) {
        memcpy(values, wire, n * sizeof *values);
        return;
    }
    memcpy(half, wire, n * sizeof *half);
    kernels->bf16.decode(values, half, n);
}

int sparse_any_not_finite(const float *x, size_t n)
{
    uint32_t found = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        found |= (bits & 0x7fffffff) >= 0x7f800000;
    }
    return (int)found;
}
