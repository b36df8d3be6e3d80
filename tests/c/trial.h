/* trial.h - one collective of a whole world: every rank's call, its memory, and whether what it
 * left behind is right. The test moves the bytes; this file knows what must come of it.
 */
#ifndef RINGCOMM_TEST_TRIAL_H
#define RINGCOMM_TEST_TRIAL_H

#include <stdio.h>

#include "check.h"
#include "collective.h"

enum { TRIAL_MAX_WORLD = 16, TRIAL_GUARD = 64 };

typedef struct trial {
    rc_call call;           /* of a send: as the sender calls it, root being the receiver */
    rc_algorithm algorithm; /* of an all-reduce */
    int world_size;
    int from;     /* the sender of a send */
    int in_place; /* all-reduce, broadcast and reduce only */
    uint8_t *src[TRIAL_MAX_WORLD], *dst[TRIAL_MAX_WORLD], *want[TRIAL_MAX_WORLD];
    uint8_t *before[TRIAL_MAX_WORLD]; /* src as it was */
} trial;

static inline int trial_takes_part(const trial *t, int rank)
{
    return !collective_is_p2p(t->call.collective) || rank == t->from || rank == t->call.root;
}

/* What a rank calls. */
static inline rc_call trial_call(const trial *t, int rank)
{
    rc_call call = t->call;
    if (collective_is_p2p(call.collective)) {
        call.collective = rank == t->from ? RC_SEND : RC_RECV;
        call.root = rank == t->from ? t->call.root : t->from;
    }
    call.size = sizeof call;
    call.src = t->in_place ? t->dst[rank] : t->src[rank];
    call.dst = t->dst[rank];
    if (call.timeout_ms == 0)
        call.timeout_ms = 30000;
    return call;
}

static inline size_t trial_src_bytes(const trial *t)
{
    return source_count(&t->call, t->world_size) * rc_dtype_size(t->call.dtype);
}

static inline size_t trial_dst_bytes(const trial *t)
{
    return result_count(&t->call, t->world_size) * rc_dtype_size(t->call.dtype);
}

/* Random sources, and the results they must lead to. */
static inline void trial_open(trial *t, uint64_t *seed)
{
    size_t in = trial_src_bytes(t), out = trial_dst_bytes(t);
    for (int rank = 0; rank < t->world_size; rank++) {
        t->src[rank] = malloc(in + TRIAL_GUARD);
        t->before[rank] = malloc(in + TRIAL_GUARD);
        t->dst[rank] = malloc(out + TRIAL_GUARD);
        t->want[rank] = malloc(out + TRIAL_GUARD);
        memset(t->src[rank], 0x77, in + TRIAL_GUARD);
        fill_random(t->src[rank], t->call.dtype, in / rc_dtype_size(t->call.dtype), seed);
        memcpy(t->before[rank], t->src[rank], in + TRIAL_GUARD);
        memset(t->dst[rank], 0x55, out + TRIAL_GUARD);
        if (t->in_place)
            memcpy(t->dst[rank], t->src[rank], in);
        memcpy(t->want[rank], t->dst[rank], out + TRIAL_GUARD);
    }
    for (int rank = 0; rank < t->world_size; rank++) {
        rc_call call = trial_call(t, rank);
        if (trial_takes_part(t, rank))
            expect_result(&call, t->algorithm, rank, t->world_size,
                          (const uint8_t *const *)t->before, t->want[rank]);
    }
}

/* Sources untouched, results right, nothing written beyond them. A reduce in place may use the
 * memory of ranks that get no result. */
static inline int trial_check(const trial *t, int rank)
{
    size_t in = trial_src_bytes(t), out = trial_dst_bytes(t);
    int right = CHECK(memcmp(t->src[rank], t->before[rank], in + TRIAL_GUARD) == 0);
    right &= CHECK(memcmp(t->dst[rank], t->want[rank], out + TRIAL_GUARD) == 0);
    if (!right)
        fprintf(stderr,
                "rank %d of %d: collective %d algorithm %d dtype %d op %d codec %d count %llu root "
                "%d%s\n",
                rank, t->world_size, t->call.collective, t->algorithm, t->call.dtype, t->call.op,
                t->call.codec, (unsigned long long)t->call.count, t->call.root,
                t->in_place ? ", in place" : "");
    return right;
}

static inline void trial_close(trial *t)
{
    for (int rank = 0; rank < t->world_size; rank++) {
        free(t->src[rank]);
        free(t->before[rank]);
        free(t->dst[rank]);
        free(t->want[rank]);
    }
}

/* A call of a collective, with its kind of numbers drawn. */
static inline rc_call trial_kind(rc_collective collective, uint64_t count, uint64_t *seed)
{
    rc_call call = {.collective = collective,
                    .dtype = (rc_dtype)draw_below(seed, RC_DTYPE_COUNT),
                    .op = (rc_op)draw_below(seed, RC_OP_COUNT),
                    .count = count};
    if (call.dtype == RC_F32 || call.dtype == RC_F64)
        call.codec = (rc_codec)draw_below(seed, RC_CODEC_FP16 + 1);
    return call;
}

/* A trial of this kind in a world of this size, with the rest drawn. */
static inline trial trial_draw(rc_call call, int world_size, uint64_t *seed)
{
    trial t = {.call = call, .algorithm = RC_RING, .world_size = world_size};
    if (call.collective == RC_BARRIER)
        t.call.count = 0;
    t.call.root = (int)draw_below(seed, (uint64_t)world_size);
    t.from = (t.call.root + 1) % world_size;
    t.in_place = (call.collective == RC_ALLREDUCE || call.collective == RC_BROADCAST ||
                  call.collective == RC_REDUCE) &&
                 draw_below(seed, 2);
    return t;
}

#endif
