/* twin.c - see twin.h. */
#include "twin.h"

#include "../base/error.h"

static feedback_range whole_of(const rc_feedback *f)
{
    return (feedback_range){0, f->count};
}

/* ---- between the two; under the lock ---- */

static rc_result fetch(rc_feedback *f, int buffer, rc_error *error)
{
    residual *r = &f->worker[buffer];
    feedback_range live = r->there.live;
    if (r->current & FEEDBACK_HOME)
        return RC_OK;
    if (f->twin == NULL)
        return error_set(error, RC_DEVICE,
                         "the residuals of this error feedback were on a GPU that has failed");
    feedback_make_zero(r, (feedback_range){0, live.start});
    feedback_make_zero(r, (feedback_range){live.end, f->count});
    if (!range_is_empty(live))
        RC_TRY(f->twin->calls->fetch(f->twin, buffer, r->data + live.start, live, error));
    r->here = r->there;
    r->current |= FEEDBACK_HOME;
    return RC_OK;
}

static rc_result clear(rc_feedback *f, int buffer, feedback_range range, rc_error *error)
{
    residual *r = &f->worker[buffer];
    if (marks_zero(&r->there, range))
        return RC_OK;
    RC_TRY(f->twin->calls->clear(f->twin, buffer, range, error));
    marks_note_zero(&r->there, range);
    return RC_OK;
}

static rc_result store(rc_feedback *f, int buffer, rc_error *error)
{
    residual *r = &f->worker[buffer];
    feedback_range live = r->here.live;
    if (r->current & FEEDBACK_AWAY)
        return RC_OK;
    RC_TRY(clear(f, buffer, (feedback_range){0, live.start}, error));
    RC_TRY(clear(f, buffer, (feedback_range){live.end, f->count}, error));
    RC_TRY(f->twin->calls->store(f->twin, buffer, r->data + live.start, live, error));
    r->there = r->here;
    r->current |= FEEDBACK_AWAY;
    return RC_OK;
}

/* ---- a work of the twin's ---- */

static const feedback_marks *marks_of(const residual *r)
{
    return r->current & FEEDBACK_HOME ? &r->here : &r->there;
}

int twin_suits(rc_feedback *f, const feedback_use *use, rc_op op)
{
    pthread_mutex_lock(&f->moving);
    const residual *now = &f->worker[f->now];
    int is_lost = f->twin == NULL && !(now->current & FEEDBACK_HOME);
    int suits = !is_lost && (!f->has_op || f->op == op) &&
                (range_is_empty(f->owned) || feedback_owns(f, use->owner)) &&
                marks_zero(marks_of(now), use->exact);
    pthread_mutex_unlock(&f->moving);
    return suits;
}

void twin_attach(rc_feedback *f, feedback_twin *twin)
{
    pthread_mutex_lock(&f->moving);
    f->twin = twin;
    for (int i = 0; i < 2; i++)
        f->worker[i].there = (feedback_marks){.live = whole_of(f)};
    pthread_mutex_unlock(&f->moving);
}

/* All that the work does not write must be zero. What the buffer had is not wanted any more, so it
 * may as well be at home. */
static rc_result prepare_next(rc_feedback *f, const feedback_use *use, rc_error *error)
{
    int next = !f->now;
    f->worker[next].current = FEEDBACK_HOME;
    RC_TRY(clear(f, next, (feedback_range){0, use->worker.start}, error));
    RC_TRY(clear(f, next, (feedback_range){use->worker.end, f->count}, error));
    RC_TRY(clear(f, next, use->exact, error));
    f->worker[next].there = (feedback_marks){.live = use->worker};
    marks_note_zero(&f->worker[next].there, use->exact);
    return RC_OK;
}

static rc_result begin(rc_feedback *f, const feedback_use *use, twin_view *view, rc_error *error)
{
    feedback_view left = {.exact_is_zero = 1};
    *view = (twin_view){.in = -1, .out = !f->now};
    if (feedback_begin_owner(f, use->owner, &left) != RC_OK)
        return error_set(error, RC_NO_MEMORY, "no memory for residuals");
    if (!marks_zero(marks_of(&f->worker[f->now]), use->worker)) {
        RC_TRY(store(f, f->now, error));
        view->in = f->now;
    }
    RC_TRY(prepare_next(f, use, error));
    f->next_away = 1;
    feedback_make_ready(f, &left);
    return RC_OK;
}

rc_result twin_begin(rc_feedback *f, const feedback_use *use, twin_view *view, rc_error *error)
{
    pthread_mutex_lock(&f->moving);
    rc_result result = begin(f, use, view, error);
    pthread_mutex_unlock(&f->moving);
    return result;
}

/* ---- what brings residuals home ---- */

rc_result twin_fetch(rc_feedback *f, int will_write, rc_error *error)
{
    pthread_mutex_lock(&f->moving);
    rc_result result = fetch(f, f->now, error);
    if (result == RC_OK && will_write)
        f->worker[f->now].current = FEEDBACK_HOME;
    pthread_mutex_unlock(&f->moving);
    return result;
}

/* What cannot be fetched stays away. Those of before matter to an undo only. */
static rc_result fetch_all(rc_feedback *f, rc_error *error)
{
    rc_result others = RC_OK;
    if (!f->undoable)
        f->worker[!f->now].current = FEEDBACK_HOME;
    else if (f->twin != NULL)
        others = fetch(f, !f->now, error);
    rc_result result = fetch(f, f->now, error);
    for (int i = 0; i < 2; i++)
        if (f->worker[i].current & FEEDBACK_HOME)
            f->worker[i].current = FEEDBACK_HOME;
    return result != RC_OK ? result : others;
}

rc_result twin_recall(rc_feedback *f, const void *owner, rc_error *error)
{
    pthread_mutex_lock(&f->moving);
    feedback_twin *twin = f->twin;
    rc_result result = RC_OK;
    int concerns = owner == NULL || (twin != NULL && twin->owner == owner);
    if (concerns)
        result = fetch_all(f, error);
    if (concerns && twin != NULL && (owner != NULL || result == RC_OK)) {
        f->twin = NULL;
        twin->calls->drop(twin);
    }
    pthread_mutex_unlock(&f->moving);
    return result;
}

void twin_forget(rc_feedback *f)
{
    pthread_mutex_lock(&f->moving);
    f->worker[f->now].current = FEEDBACK_HOME;
    pthread_mutex_unlock(&f->moving);
}
