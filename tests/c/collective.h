/* collective.h - what a collective must leave behind, element by element, from the call and every
 * rank's source. Knows the order of a sum (plan.h) by itself; what becomes of an element on a hop
 * is asked of codec.h and the portable kernels, which tests/test_kernels.py holds to their
 * formulas.
 */
#ifndef RINGCOMM_TEST_COLLECTIVE_H
#define RINGCOMM_TEST_COLLECTIVE_H

#include "../../csrc/codec/codec.h"
#include "draw.h"

enum { COLLECTIVE_MAX_WORLD = 16 };

static inline int collective_reduces(rc_collective c)
{
    return c == RC_ALLREDUCE || c == RC_REDUCE_SCATTER || c == RC_REDUCE;
}

static inline int collective_is_p2p(rc_collective c)
{
    return c == RC_SEND || c == RC_RECV;
}

/* Elements of a rank's source and destination. */
static inline uint64_t source_count(const rc_call *call, int world_size)
{
    int all = call->collective == RC_REDUCE_SCATTER || call->collective == RC_SCATTER ||
              call->collective == RC_ALLTOALL;
    return all ? call->count * (uint64_t)world_size : call->count;
}

static inline uint64_t result_count(const rc_call *call, int world_size)
{
    int all = call->collective == RC_ALLGATHER || call->collective == RC_GATHER ||
              call->collective == RC_ALLTOALL;
    return all ? call->count * (uint64_t)world_size : call->count;
}

/* 1 if rank's dst is written at all. */
static inline int has_result(const rc_call *call, int rank)
{
    switch (call->collective) {
    case RC_BARRIER:
    case RC_SEND: return 0;
    case RC_REDUCE:
    case RC_GATHER: return rank == call->root;
    default: return 1;
    }
}

/* Whose values a result element holds: the first rank of a sum (the others follow in order of
 * rank), or its only source; and where it lies in the sources. peer: the other end of a recv. */
static inline void trace(const rc_call *call, int rank, int world_size, uint64_t i, int *first,
                         uint64_t *at)
{
    uint64_t n = (uint64_t)world_size, block = call->count > 0 ? i / call->count : 0;
    uint64_t within = call->count > 0 ? i % call->count : 0;
    uint64_t chunk = ((call->count + n - 1) / n + 255) / 256 * 256;
    *at = within;
    switch (call->collective) {
    case RC_ALLREDUCE: *first = (int)(i / chunk), *at = i; break;
    case RC_REDUCE: *first = (call->root + 1) % world_size; break;
    case RC_REDUCE_SCATTER:
        *first = (rank + 1) % world_size;
        *at = (uint64_t)rank * call->count + i;
        break;
    case RC_ALLGATHER:
    case RC_GATHER: *first = (int)block; break;
    case RC_SCATTER:
        *first = call->root;
        *at = (uint64_t)rank * call->count + i;
        break;
    case RC_ALLTOALL:
        *first = (int)block;
        *at = (uint64_t)rank * call->count + within;
        break;
    default: *first = call->root; /* broadcast, recv */
    }
}

static inline codec portable_codec(const rc_call *call, int world_size)
{
    codec how;
    codec_init(&how, kernels_at(0), call, world_size);
    return how;
}

/* An all-reduce that adds in order of rank. */
static inline void expect_join(const rc_call *call, int world_size, const uint8_t *const *sources,
                               uint8_t *dst)
{
    size_t elem = rc_dtype_size(call->dtype);
    codec how = portable_codec(call, world_size);
    for (uint64_t i = 0; i < call->count; i++) {
        uint64_t wires[COLLECTIVE_MAX_WORLD];
        const void *all[COLLECTIVE_MAX_WORLD];
        for (int rank = 0; rank < world_size; rank++) {
            codec_encode(&how, &wires[rank], sources[rank] + i * elem, 1);
            all[rank] = &wires[rank];
        }
        codec_join(&how, dst + i * elem, 0, all, world_size, NULL, 1);
    }
}

/* All ranks' elements, summed pairwise; wires: room for them. */
static inline void expect_doubling(const codec *how, int n, void *dst, const void *const *elements,
                                   uint64_t *wires)
{
    int count = 1, surplus;
    while (2 * count <= n)
        count *= 2;
    surplus = n - count;
    for (int i = 0; i < count; i++) {
        codec_encode(how, &wires[i], elements[i < surplus ? 2 * i : i + surplus], 1);
        if (i < surplus)
            codec_reduce(how, &wires[i], &wires[i], elements[2 * i + 1], 1, 0);
    }
    for (; count > 1; count /= 2)
        for (int i = 0; i < count / 2; i++)
            codec_combine(how, &wires[i], &wires[2 * i], &wires[2 * i + 1], 1, count == 2);
    codec_store(how, dst, &wires[0], 1);
}

/* The same as the owner of its part sums them. */
static inline void expect_halving(const codec *how, int n, void *dst, const void *const *elements,
                                  uint64_t *wires, int owner)
{
    int summed[COLLECTIVE_MAX_WORLD] = {0};
    for (int left = n, half; left > 1; left = half) {
        half = (left + 1) / 2;
        for (int far = half; far < left; far++) {
            int near = far - half;
            if (!summed[far])
                codec_encode(how, &wires[far], elements[(owner + n - far) % n], 1);
            if (summed[near])
                codec_combine(how, &wires[near], &wires[far], &wires[near], 1, half == 1);
            else
                codec_reduce(how, &wires[near], &wires[far], elements[(owner + n - near) % n], 1,
                             half == 1);
            summed[near] = 1;
        }
    }
    codec_store(how, dst, &wires[0], 1);
}

/* An all-reduce in logarithmic depth. */
static inline void expect_merge(const rc_call *call, rc_algorithm algorithm, int world_size,
                                const uint8_t *const *sources, uint8_t *dst)
{
    size_t elem = rc_dtype_size(call->dtype);
    codec how = portable_codec(call, world_size);
    uint64_t n = (uint64_t)world_size, part = ((call->count + n - 1) / n + 255) / 256 * 256;
    for (uint64_t i = 0; i < call->count; i++) {
        const void *elements[COLLECTIVE_MAX_WORLD];
        uint64_t wires[COLLECTIVE_MAX_WORLD];
        for (int rank = 0; rank < world_size; rank++)
            elements[rank] = sources[rank] + i * elem;
        if (algorithm == RC_DOUBLING)
            expect_doubling(&how, world_size, dst + i * elem, elements, wires);
        else
            expect_halving(&how, world_size, dst + i * elem, elements, wires, (int)(i / part));
    }
}

/* dst of rank, given the sources of all ranks. algorithm: of an all-reduce. */
static inline void expect_result(const rc_call *call, rc_algorithm algorithm, int rank,
                                 int world_size, const uint8_t *const *sources, uint8_t *dst)
{
    int merges = algorithm == RC_DOUBLING || algorithm == RC_HALVING;
    if (call->collective == RC_ALLREDUCE && merges && world_size > 1) {
        expect_merge(call, algorithm, world_size, sources, dst);
        return;
    }
    if (call->collective == RC_ALLREDUCE && algorithm != RC_RING && world_size > 1) {
        expect_join(call, world_size, sources, dst);
        return;
    }
    size_t elem = rc_dtype_size(call->dtype);
    int reduces = collective_reduces(call->collective);
    rc_call as_summed = *call;
    as_summed.op = reduces ? call->op : RC_SUM;
    codec how = portable_codec(&as_summed, world_size);
    for (uint64_t i = 0; has_result(call, rank) && i < result_count(call, world_size); i++) {
        uint64_t at, wire = 0;
        int first;
        trace(call, rank, world_size, i, &first, &at);
        if (world_size == 1) { /* nothing travels, nothing is rounded */
            memcpy(dst + i * elem, sources[0] + at * elem, elem);
            continue;
        }
        codec_encode(&how, &wire, sources[first] + at * elem, 1);
        for (int k = 1; reduces && k < world_size; k++)
            codec_reduce(&how, &wire, &wire, sources[(first + k) % world_size] + at * elem, 1,
                         k == world_size - 1);
        codec_store(&how, dst + i * elem, &wire, 1);
    }
}

#endif
