/* twin.h - a worker's residuals in the memory of a device, next to those at home.
 *
 * Problem. Where a GPU encodes what a rank contributes, it reads and writes the worker's residuals,
 * which must not cross the bus for that. But they are the caller's, who may look at them, load or
 * rescale them, use them for a call that the CPU encodes, or on another GPU, at any time.
 *
 * Design. A twin has two buffers, like the feedback. Of each of the two it is known where its
 * values are: at home, away, or both. Works of the GPU read and write the twin's, which change
 * places as those at home do. Whatever else is done with residuals brings them home first; a work
 * of the CPU also gives the twin back. So nothing but this file knows of twins.
 *
 *      home   --store-->   away         before a work of the GPU, if they are at home only
 *             <--fetch--
 *
 * A work of the GPU must find things simple, else it is one of the CPU: nothing to fold, and
 * nothing left of the part that it contributes as it is.
 *
 * Whoever has the device makes twins, and ends them all before the device goes (twin_recall).
 * What cannot be fetched then is lost, and said to whoever asks for it, until it is replaced.
 *
 * Threading: under the feedback's lock (moving), so that a device may go at any time. Where a work
 * has the feedback that lock is free: the twin of a work cannot go, and others have none.
 */
#ifndef RINGCOMM_TWIN_H
#define RINGCOMM_TWIN_H

#include "feedback.h"

typedef struct feedback_twin feedback_twin;

/* Of whoever has the device. fetch and drop from any thread. */
typedef struct twin_calls {
    /* Between memory at home and the range of a buffer; the former is over when it returns, the
     * latter and clear before all that the twin's works do later. */
    rc_result (*fetch)(feedback_twin *twin, int buffer, float *to, feedback_range range,
                       rc_error *error);
    rc_result (*store)(feedback_twin *twin, int buffer, const float *from, feedback_range range,
                       rc_error *error);
    rc_result (*clear)(feedback_twin *twin, int buffer, feedback_range range, rc_error *error);
    void (*drop)(feedback_twin *twin); /* frees it */
} twin_calls;

/* At the head of its owner's struct. */
struct feedback_twin {
    const twin_calls *calls;
    const void *owner; /* whoever that is */
    rc_feedback *feedback;
};

/* Which buffer a work reads, or -1 if all is zero, and which it writes. */
typedef struct twin_view {
    int in, out;
} twin_view;

/* 1 if a work of the twin's may have a feedback that was claimed for it. */
int twin_suits(rc_feedback *f, const feedback_use *use, rc_op op);
/* Gives it a twin, whose buffers may hold anything. It must have none. */
void twin_attach(rc_feedback *f, feedback_twin *twin);
/* As feedback_begin, with the twin's buffers; the feedback is ready for the work. */
rc_result twin_begin(rc_feedback *f, const feedback_use *use, twin_view *view, rc_error *error);

/* What is current is at home from here on. will_write: and there only. */
rc_result twin_fetch(rc_feedback *f, int will_write, rc_error *error);
/* All is at home, and there is no twin. owner: NULL, or whose device goes: then a twin of its own
 * has gone also where that failed, and others stay. */
rc_result twin_recall(rc_feedback *f, const void *owner, rc_error *error);
/* What is current is replaced, whole: it is at home, whatever it is. */
void twin_forget(rc_feedback *f);

#endif
