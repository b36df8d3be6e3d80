/* feedback.h - residuals: what quantising a tensor has lost, kept for the next call.
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
 * Ranges known to be zero are not read, and not written again (marks.h). So a rank's own part,
 * which is never encoded as a contribution, costs no memory traffic.
 *
 * An owner's residual that does not fit the work (another world, communicator or plan) is added to
 * the worker's residual (fold): instead of adding it to the result the rank contributes it. What a
 * fold has replaced comes back if the work fails, or is undone.
 *
 * Threading: the caller owns it while it is not claimed, else the engine, under its lock; the claim
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

/* Residuals that a work reads (in; NULL if all are zero) and writes (out). Each pointer is to the
 * first element of its range in feedback_use. */
typedef struct feedback_view {
    const float *worker_in;
    float *worker_out;
    const float *owner_in;
    float *owner_out;
    int exact_is_zero; /* worker_in is zero in the range `exact` */
} feedback_view;

/* Values that a fold has replaced, until it is known whether the work succeeds. */
typedef struct folded {
    float *values; /* the worker's of the range, then the owner's; NULL: nothing was folded */
    feedback_range owned; /* the range */
    feedback_marks marks; /* of the worker's buffer */
} folded;

struct rc_feedback {
    atomic_int references; /* the caller's, and that of the call that uses it */
    atomic_int claimed;    /* a call uses it (feedback_claim) */
    uint64_t count;
    residual worker[2];
    void *owner_memory;
    float *owner[2];      /* owner_room floats each */
    uint64_t owner_room;  /* 0, and owner NULL, until this rank owns a part */
    feedback_range owned; /* range of owner[now] */
    int now;              /* index of the current buffer of each pair */
    int has_op;
    rc_op op;                  /* of the results that the residuals belong to, if has_op */
    feedback_range next_owned; /* between begin and commit */
    feedback_range prev_owned; /* range of owner[!now], if undoable */
    atomic_int undoable;       /* the other buffers hold what was current before the commit */
    folded folded;             /* in the buffers that the claiming work, or the last one, reads */
};

/* Ranges of elements whose residuals a work reads and writes. */
typedef struct feedback_use {
    feedback_range worker; /* elements that it contributes; all other residuals must be zero */
    feedback_range exact;  /* part of worker, contributed without encoding: nothing is lost */
    feedback_range owner;  /* elements whose sums it encodes for all ranks */
    double fold;           /* 1 / the factor of a contribution in the result */
} feedback_use;

rc_result feedback_create(rc_feedback **out, uint64_t count);
/* Drops one reference; the last one frees. */
void feedback_release(rc_feedback *f);

/* Returns RC_INVALID_STATE if a call in flight has it, else RC_OK. */
rc_result feedback_require_free(const rc_feedback *f, rc_error *error);
/* Claims the feedback, unless it is NULL, for a call, with a reference; no earlier call can be
 * undone from now on. Returns as feedback_require_free does. */
rc_result feedback_claim(rc_feedback *f, rc_error *error);
/* Ends the claim, unless f is NULL, and drops its reference. All is as before the claim unless the
 * work has committed or cleared it. */
void feedback_unclaim(rc_feedback *f);

/* Returns 1 if the residuals belong to results of this op, or there are none. */
int feedback_suits(rc_feedback *f, rc_op op);
/* Returns 1 if the worker's residuals of a range are all zero. */
int feedback_is_zero(rc_feedback *f, feedback_range range);

/* Begins a work's use of residuals, which commit ends if the work succeeds. Returns RC_NO_MEMORY or
 * RC_OK. */
rc_result feedback_begin(rc_feedback *f, const feedback_use *use, feedback_view *view);
void feedback_commit(rc_feedback *f, rc_op op);

/* Adds the owner's residual to the worker's, times factor. RC_NO_MEMORY or RC_OK. */
rc_result feedback_fold(rc_feedback *f, double factor);
/* *out = a copy of count elements of src (f32 or f64) with the worker's residuals added, to be
 * freed. RC_NO_MEMORY or RC_OK. */
rc_result feedback_add_residual(rc_feedback *f, rc_dtype dtype, const void *src, void **out);
/* Sets all residuals to zero. */
void feedback_clear(rc_feedback *f);

/* Implement rc_feedback_worker, _load and _rescale. */
float *feedback_worker(rc_feedback *f);
rc_result feedback_load(rc_feedback *f, const float *worker, const float *owner, uint64_t start,
                        uint64_t count);
/* Returns RC_INVALID_ARGUMENT, and changes nothing, if a residual would be infinite. */
rc_result feedback_rescale(rc_feedback *f, double factor);
/* Takes the last commit back, if no call has claimed it since. */
void feedback_undo(rc_feedback *f);

#endif
