/* quant_world.h - every rank's tensors and residuals, for tests of codecs of few bits. */
#ifndef RINGCOMM_TEST_QUANT_WORLD_H
#define RINGCOMM_TEST_QUANT_WORLD_H

#include "quant_reference.h"
#include "world.h"

static uint64_t seed = 88172645463325252u;

static const rc_codec codecs[] = {RC_CODEC_INT8, RC_CODEC_INT4, RC_CODEC_ONEBIT, RC_CODEC_FP8};

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

static inline void check_residuals(rc_feedback **feedback, const qref_world *ref)
{
    for (int rank = 0; rank < ref->size; rank++) {
        uint64_t start, count, part_start, part_end;
        const float *owner = rc_feedback_owner(feedback[rank], &start, &count);
        qref_part_of(ref, rank, &part_start, &part_end);
        same(rc_feedback_worker(feedback[rank]), ref->worker[rank], ref->count, "worker", rank);
        if (ref->size > 2 && CHECK_EQ(count, part_end - part_start) && count > 0 &&
            CHECK_EQ(start, part_start))
            same(owner, ref->owner[rank] + start, count, "owner", rank);
    }
}

/* What is reduced, and what the formulas say of it. */
typedef struct formulas {
    rc_feedback *feedback[WORLD_MAX]; /* NULL without */
    tensors t;
    qref_world ref;
    float *want;
} formulas;

static inline formulas formulas_open(int size, uint64_t count, int with_feedback)
{
    formulas f = {.t = make_tensors(size, count), .ref = qref_open(size, count, with_feedback)};
    f.want = calloc(count + 1, sizeof *f.want);
    if (with_feedback)
        open_feedback(f.feedback, size, count);
    return f;
}

static inline void formulas_close(formulas *f)
{
    close_feedback(f->feedback, f->t.size);
    qref_close(&f->ref);
    free(f->want);
    free_tensors(&f->t);
}

static inline void formulas_draw(formulas *f, rc_codec codec, rc_op op)
{
    draw_values(&f->t);
    qref_allreduce(&f->ref, codec, op, f->t.src, f->want);
}

/* One all-reduce of all ranks from src to dst; feedback: one for each, or NULL. */
typedef void a_step(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                    unsigned step);

/* A few of them give what the formulas give. */
static inline void hold_steps(world *w, uint64_t count, rc_codec codec, rc_op op, a_step *run,
                              unsigned steps, int with_feedback)
{
    formulas f = formulas_open(w->size, count, with_feedback);
    for (unsigned step = 0; step < steps; step++) {
        formulas_draw(&f, codec, op);
        run(w, &f.t, with_feedback ? f.feedback : NULL, codec, op, step);
        for (int rank = 0; rank < w->size; rank++)
            if (!same(f.t.dst[rank], f.want, count, "result", rank))
                CHECK_NOTE("codec %d op %d world %d step %u\n", codec, op, w->size, step);
        if (with_feedback)
            check_residuals(f.feedback, &f.ref);
    }
    formulas_close(&f);
}

/* The same with and without feedback. */
static inline void hold_to_formulas(int size, uint64_t count, rc_codec codec, rc_op op, a_step *run)
{
    world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
    for (int with = 0; with <= 1; with++)
        hold_steps(w, count, codec, op, run, 3, with);
    world_close(w);
}

#endif
