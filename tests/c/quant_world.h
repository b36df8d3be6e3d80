/* quant_world.h - every rank's tensors and residuals, for tests of codecs of few bits. */
#ifndef RINGCOMM_TEST_QUANT_WORLD_H
#define RINGCOMM_TEST_QUANT_WORLD_H

#include "world.h"

static uint64_t seed = 88172645463325252u;

static const rc_codec codecs[] = {RC_CODEC_INT8, RC_CODEC_INT4, RC_CODEC_ONEBIT, RC_CODEC_FP8,
                                  RC_CODEC_INT2};

/* All ranks' tensors. */
typedef struct tensors {
    int size;
    uint64_t count;
    float *src[WORLD_MAX], *dst[WORLD_MAX];
} tensors;

static inline tensors make_tensors(int size, uint64_t count)
{
    tensors t = {.size = size, .count = count};
    for (int rank = 0; rank < size; rank++) {
        t.src[rank] = calloc(count + 1, sizeof(float));
        t.dst[rank] = calloc(count + 1, sizeof(float));
    }
    return t;
}

static inline void free_tensors(tensors *t)
{
    for (int rank = 0; rank < t->size; rank++) {
        free(t->src[rank]);
        free(t->dst[rank]);
    }
}

/* Values of ordinary size; here and there a zero block. */
static inline void draw_values(tensors *t)
{
    for (int rank = 0; rank < t->size; rank++) {
        fill_random(t->src[rank], RC_F32, t->count, &seed);
        for (uint64_t i = 0; i < t->count; i++)
            if (i / 256 % 7 == 3)
                t->src[rank][i] = 0.0F;
    }
}

static inline rc_call call_of(const tensors *t, int rank, rc_codec codec, rc_op op, int in_place)
{
    rc_call call = small_call(RC_ALLREDUCE, t->dst[rank], t->count);
    call.codec = codec;
    call.op = op;
    if (!in_place)
        call.src = t->src[rank];
    else if (t->count > 0)
        memcpy(t->dst[rank], t->src[rank], t->count * sizeof(float));
    return call;
}

/* The calls of all ranks at once. */
static inline void run_calls(world *w, const rc_call *calls)
{
    rc_work *works[WORLD_MAX];
    for (int rank = 0; rank < w->size; rank++)
        works[rank] = submit(w->comms[rank], &calls[rank]);
    for (int rank = 0; rank < w->size; rank++)
        if (works[rank] != NULL)
            expect_done(works[rank]);
}

/* An all-reduce. feedback: one for each rank, or NULL. */
static inline void run_step(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                            int in_place)
{
    rc_call calls[WORLD_MAX];
    for (int rank = 0; rank < t->size; rank++) {
        calls[rank] = call_of(t, rank, codec, op, in_place);
        calls[rank].feedback = feedback != NULL ? feedback[rank] : NULL;
    }
    run_calls(w, calls);
}

static inline void open_feedback(rc_feedback **feedback, int size, uint64_t count)
{
    for (int rank = 0; rank < size; rank++)
        CHECK_EQ(rc_feedback_create(&feedback[rank], count), RC_OK);
}

static inline void close_feedback(rc_feedback **feedback, int size)
{
    for (int rank = 0; rank < size; rank++)
        rc_feedback_free(feedback[rank]);
}

static inline int same(const float *got, const float *want, uint64_t n, const char *what, int rank)
{
    uint64_t i = 0;
    while (i < n && (memcmp(&got[i], &want[i], sizeof *got) == 0))
        i++;
    if (!CHECK(i == n))
        CHECK_NOTE("%s of rank %d, element %llu of %llu: got %a, want %a\n", what, rank,
                   (unsigned long long)i, (unsigned long long)n, (double)got[i], (double)want[i]);
    return i == n;
}

static inline void same_residuals(rc_feedback **ours, rc_feedback **theirs, int size)
{
    for (int rank = 0; rank < size; rank++) {
        uint64_t start, count, their_start, their_count;
        const float *owner = rc_feedback_owner(ours[rank], &start, &count);
        const float *their_owner = rc_feedback_owner(theirs[rank], &their_start, &their_count);
        same(rc_feedback_worker(ours[rank]), rc_feedback_worker(theirs[rank]),
             rc_feedback_count(ours[rank]), "worker", rank);
        if (CHECK_EQ(count, their_count) && count > 0 && CHECK_EQ(start, their_start))
            same(owner, their_owner, count, "owner", rank);
    }
}

/* A world with all that may make no difference to a bit: other segments, more lanes, and the
 * portable kernels. */
static inline world *other_world(int size)
{
    return world_open((world_options){
        .size = size, .lanes = 2, .segment_bytes = 16384, .kernels = kernels_at(0)->name});
}

/* What is reduced, and the same in another world. */
typedef struct twins {
    tensors t, other;
    rc_feedback *feedback[WORLD_MAX], *other_feedback[WORLD_MAX]; /* NULL without */
} twins;

static inline twins twins_open(int size, uint64_t count, int with_feedback)
{
    twins both = {.t = make_tensors(size, count), .other = make_tensors(size, count)};
    if (with_feedback) {
        open_feedback(both.feedback, size, count);
        open_feedback(both.other_feedback, size, count);
    }
    return both;
}

static inline void twins_close(twins *both)
{
    close_feedback(both->feedback, both->t.size);
    close_feedback(both->other_feedback, both->t.size);
    free_tensors(&both->t);
    free_tensors(&both->other);
}

/* Draws the sources, and reduces them in the other world. */
static inline void twins_draw(twins *both, world *other, rc_codec codec, rc_op op)
{
    draw_values(&both->t);
    for (int rank = 0; rank < other->size && both->t.count > 0; rank++)
        memcpy(both->other.src[rank], both->t.src[rank], both->t.count * sizeof(float));
    run_step(other, &both->other, both->other_feedback, codec, op, 0);
}

/* One all-reduce of all ranks from src to dst; feedback: one for each, or NULL. */
typedef void a_step(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                    unsigned step);

/* A few of them give what they give in another world. */
static inline void hold_steps(world *w, world *other, uint64_t count, rc_codec codec, rc_op op,
                              a_step *run, unsigned steps, int with_feedback)
{
    twins both = twins_open(w->size, count, with_feedback);
    for (unsigned step = 0; step < steps; step++) {
        twins_draw(&both, other, codec, op);
        run(w, &both.t, with_feedback ? both.feedback : NULL, codec, op, step);
        for (int rank = 0; rank < w->size; rank++)
            if (!same(both.t.dst[rank], both.other.dst[0], count, "result", rank))
                CHECK_NOTE("codec %d op %d world %d step %u\n", codec, op, w->size, step);
        if (with_feedback)
            same_residuals(both.feedback, both.other_feedback, w->size);
    }
    twins_close(&both);
}

#endif
