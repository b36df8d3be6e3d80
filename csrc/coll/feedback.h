/* feedback.h - residuals: what quantising a tensor has lost, kept for the next time.
 *
 * Problem. A codec of few bits loses much of each value, always in the same way. What it lost is
 * kept and added to the next values, so that over many calls nothing is lost: the sum of all
 * results is the sum of all values less the residuals that are left. That holds only if a residual
 * changes exactly when its values have arrived everywhere.
 *
 * Design. Two kinds: the worker's, of what this rank has encoded of its own values, over the whole
 * tensor; and the owner's, of the sums that this rank has encoded for all, over its part. Each has
 * two buffers. A work reads one and writes the other; they change places when the whole work has
 * succeeded (commit), else nothing has happened.
 *
 *      current  --read-->  encode  --write-->  next          commit: next is the current one
 *
 * What is known to be zero is not read, and not written again (marks.h). So a rank's own part,
 * which is never encoded as a contribution, costs no memory traffic.
 *
 * An owner's residual that does not fit the work (the world, the communicator or the plan is
 * another now) is added to the worker's residual (fold): what a rank would add to the result it may
 * as well contribute.
 *
 * Threading: the caller's while it is not claimed, else the engine's, under its lock; the claim
 * hands it over.
 */
#ifndef RINGCOMM_FEEDBACK_H
#define RINGCOMM_FEEDBACK_H

#include <stdatomic.h>
#include <stdint.h>

#include "../include/ringcomm.h"
#include "marks.h"

/* One buffer of worker residuals. */
typedef struct residual {
    void *memory;
    float *data; /* in it, aligned to 64 bytes */
    feedback_marks marks;
} residual;

/* Where a work finds residuals, and where it leaves what is lost. Pointers are to the first element
 * of the range that they are about; in: NULL if all is zero. */
typedef struct feedback_view {
    const float *worker_in;
    float *worker_out;
    const float *owner_in;
    float *owner_out;
    int exact_is_zero; /* worker_in has nothing in that range */
} feedback_view;

struct rc_feedback {
    atomic_int references; /* the caller's, and that of the work which uses it */
    atomic_int claimed;    /* a work uses it (feedback_claim) */
    uint64_t count;
    residual worker[2];
    void *owner_memory;
    float *owner[2];      /* owner_room floats each */
    uint64_t owner_room;  /* NULL and 0 until there is a part */
    feedback_range owned; /* what owner[now] is about */
    int now;              /* the current one of each pair */
    int has_op;
    rc_op op;                  /* whose results the residuals are about, if has_op */
    feedback_range next_owned; /* between begin and commit */
    feedback_range prev_owned; /* what owner[!now] is about, if undoable */
    atomic_int undoable;       /* the other one of each pair is as it was before the commit */
};

/* What a work does with residuals. All ranges are of the feedback's elements. */
typedef struct feedback_use {
    feedback_range worker; /* what it contributes; all other residuals must be zero */
    feedback_range exact;  /* within it, what it contributes without encoding: nothing is lost */
    feedback_range owner;  /* what it encodes for all */
    double fold;           /* what a value contributed is multiplied by in a result, inverted */
} feedback_use;

rc_result feedback_create(rc_feedback **out, uint64_t count);
/* Drops one reference; the last one frees. */
void feedback_release(rc_feedback *f);

/* For a work: 1 if it has the feedback from here on, with a reference; 0 if another has. */
int feedback_claim(rc_feedback *f);
/* The end of that. */
void feedback_unclaim(rc_feedback *f);

/* 1 if residuals of results of this op can be used, or there are none. */
int feedback_suits(rc_feedback *f, rc_op op);
/* 1 if all that a range of the worker's has is zero. */
int feedback_is_zero(rc_feedback *f, feedback_range range);

/* RC_NO_MEMORY, or RC_OK: then comes the commit, or nothing. */
rc_result feedback_begin(rc_feedback *f, const feedback_use *use, feedback_view *view);
void feedback_commit(rc_feedback *f, rc_op op);

/* Adds the owner's residual to the worker's, times factor. */
void feedback_fold(rc_feedback *f, double factor);
/* *out = a copy of count elements of src (f32 or f64) with the worker's residuals added, to be
 * freed. RC_NO_MEMORY or RC_OK. */
rc_result feedback_absorb(rc_feedback *f, rc_dtype dtype, const void *src, void **out);
/* All residuals are zero from here on. */
void feedback_clear(rc_feedback *f);

/* What rc_feedback_worker, _load and _rescale do. */
float *feedback_worker(rc_feedback *f);
rc_result feedback_load(rc_feedback *f, const float *worker, const float *owner, uint64_t start,
                        uint64_t count);
void feedback_rescale(rc_feedback *f, double factor);
/* Takes the last commit back, if no work has begun since. */
void feedback_undo(rc_feedback *f);

#endif
