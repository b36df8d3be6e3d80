/* twins.c - memory of the GPU for workers' residuals (coll/twin.h).
 *
 * A twin is the feedback's, and of one pipe, which has a list of all. It goes with the feedback,
 * when another pipe or the CPU wants the residuals, or when the pipe stops, which brings them home.
 *
 * Giving memory back to the GPU waits for all that it has to do, which may take its time, or wait
 * for other ranks. So a thread does that which nobody waits for, made when a twin is dropped.
 *
 * Two buffers in one piece of memory. Thread "in" stores and clears on its stream, before the
 * kernels that read them; by the time that anybody fetches they are done, for "in" has waited.
 */
#include <stdlib.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "../base/thread.h"
#include "pipe.h"

enum { ALIGNMENT = 256 };

struct pipe_twin {
    feedback_twin base;
    rc_pipe *pipe;
    struct pipe_twin *next, *prev;
    cu_address at;
    uint64_t bytes; /* of each buffer */
};

cu_address twins_buffer(const feedback_twin *twin, int buffer)
{
    const pipe_twin *t = (const pipe_twin *)twin;
    return t->at + (uint64_t)buffer * t->bytes;
}

/* ---- what the feedback does with it ---- */

static rc_result copy_home(pipe_twin *t, float *to, cu_address from, uint64_t bytes,
                           rc_error *error)
{
    rc_pipe *p = t->pipe;
    cuda_device *device = p->device;
    device_visit visit;
    RC_TRY(device_enter(device, &visit, error));
    rc_result result = DEVICE_CALL(device, error, cuMemcpyDtoHAsync, to, from, bytes, p->fetching);
    if (result == RC_OK)
        result = DEVICE_CALL(device, error, cuStreamSynchronize, p->fetching);
    device_leave(device, &visit);
    return result;
}

static rc_result fetch(feedback_twin *twin, int buffer, float *to, feedback_range range,
                       rc_error *error)
{
    return copy_home((pipe_twin *)twin, to,
                     twins_buffer(twin, buffer) + range.start * sizeof(float),
                     (range.end - range.start) * sizeof(float), error);
}

static rc_result store(feedback_twin *twin, int buffer, const float *from, feedback_range range,
                       rc_error *error)
{
    rc_pipe *p = ((pipe_twin *)twin)->pipe;
    return DEVICE_CALL(p->device, error, cuMemcpyHtoDAsync,
                       twins_buffer(twin, buffer) + range.start * sizeof(float), from,
                       (range.end - range.start) * sizeof(float), p->d2h);
}

static rc_result clear(feedback_twin *twin, int buffer, feedback_range range, rc_error *error)
{
    rc_pipe *p = ((pipe_twin *)twin)->pipe;
    return DEVICE_CALL(p->device, error, cuMemsetD32Async,
                       twins_buffer(twin, buffer) + range.start * sizeof(float), 0,
                       range.end - range.start, p->d2h);
}

/* Gives back the memory of all that were dropped, and waits for the GPU for it. */
static void reap(rc_pipe *p)
{
    device_visit visit;
    int entered = 0;
    for (int attempts = 2; attempts > 0 && !entered; attempts--)
        entered = device_enter(p->device, &visit, NULL) == RC_OK;
    pthread_mutex_lock(&p->lock);
    for (pipe_twin *t; (t = p->dropped) != NULL;) {
        p->dropped = t->next;
        pthread_mutex_unlock(&p->lock);
        if (entered)
            device_free(p->device, t->at);
        free(t);
        pipe_release(p);
        pthread_mutex_lock(&p->lock);
    }
    device_leave(p->device, &visit);
    p->reaping = 0;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void *run_reap(void *arg)
{
    rc_pipe *p = arg;
    reap(p);
    pipe_release(p);
    return NULL;
}

/* From whatever thread a feedback is freed on, which may not be the one to wait for the GPU. */
static void drop(feedback_twin *twin)
{
    pipe_twin *t = (pipe_twin *)twin;
    rc_pipe *p = t->pipe;
    pthread_t thread;
    if (pipe_is_forked(p))
        return;
    pthread_mutex_lock(&p->lock);
    *(t->prev != NULL ? &t->prev->next : &p->twins) = t->next;
    if (t->next != NULL)
        t->next->prev = t->prev;
    t->next = p->dropped;
    p->dropped = t;
    int starts = !p->reaping && !p->closing; /* else somebody else reaps */
    p->reaping |= starts;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    if (!starts)
        return;
    atomic_fetch_add(&p->references, 1);
    if (thread_start(&thread, run_reap, p))
        pthread_detach(thread);
    else
        run_reap(p);
}

static const twin_calls calls = {fetch, store, clear, drop};

/* ---- the pipe's ---- */

static rc_result make(rc_pipe *p, rc_feedback *f, rc_error *error)
{
    uint64_t bytes = (f->count * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    pipe_twin *t = calloc(1, sizeof *t);
    if (t == NULL)
        return error_set(error, RC_NO_MEMORY, "no memory for residuals");
    rc_result result =
        p->fetching != NULL ? RC_OK : device_stream_create(p->device, &p->fetching, error);
    if (result == RC_OK)
        result = device_alloc(p->device, &t->at, 2 * bytes, error);
    if (result != RC_OK) {
        free(t);
        return result;
    }
    t->base = (feedback_twin){&calls, p, f};
    t->pipe = p;
    t->bytes = bytes;
    atomic_fetch_add(&p->references, 1);
    pthread_mutex_lock(&p->lock);
    t->next = p->twins;
    if (t->next != NULL)
        t->next->prev = t;
    p->twins = t;
    pthread_mutex_unlock(&p->lock);
    twin_attach(f, &t->base);
    return RC_OK;
}

rc_result twins_take(rc_pipe *p, rc_feedback *f, rc_error *error)
{
    if (f->twin != NULL && f->twin->owner == p)
        return RC_OK;
    RC_TRY(twin_recall(f, NULL, error));
    return make(p, f, error);
}

/* A feedback that is being freed ends its twin by itself. */
static rc_feedback *next_living(rc_pipe *p)
{
    rc_feedback *found = NULL;
    pthread_mutex_lock(&p->lock);
    while (p->twins != NULL && found == NULL) {
        found = p->twins->base.feedback;
        if (!feedback_retain_living(found)) {
            found = NULL;
            pipe_wait(p, clock_ns() + CLOCK_S);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return found;
}

void twins_end(rc_pipe *p)
{
    for (rc_feedback *f; (f = next_living(p)) != NULL;) {
        (void)twin_recall(f, p, NULL); /* what is lost is told to who asks for it */
        feedback_release(f);
    }
    pthread_mutex_lock(&p->lock);
    while (p->reaping)
        pipe_wait(p, clock_ns() + CLOCK_S);
    pthread_mutex_unlock(&p->lock);
    if (p->dropped != NULL)
        reap(p);
}
