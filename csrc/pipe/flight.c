/* flight.c - a caller's functions on a flight: wait, order a stream behind it, query it, get
 * notice. */
#include <stdlib.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "pipe.h"

/* ---- its life ---- */

void flight_retain(rc_flight *f)
{
    atomic_fetch_add(&f->references, 1);
}

static void give_event(rc_pipe *p, cu_event event)
{
    if (event != NULL && !p->stopped)
        p->idle_events[p->idle_count++] = event; /* the array has room for all */
}

static void destroy_flight(rc_flight *f)
{
    rc_pipe *p = f->pipe;
    pthread_mutex_lock(&p->lock);
    give_event(p, f->input);
    give_event(p, f->done);
    pthread_mutex_unlock(&p->lock);
    rc_work_free(f->work);
    free(f->pieces);
    free(f);
    pipe_release(p);
}

void rc_flight_free(rc_flight *f)
{
    if (f == NULL || pipe_is_forked(f->pipe))
        return;
    if (atomic_fetch_sub(&f->references, 1) == 1)
        destroy_flight(f);
}

/* ---- its end ---- */

static void push_notice(rc_pipe *p, flight_notice *notice)
{
    flight_retain(notice->flight);
    notice->next = NULL;
    if (p->notices != NULL)
        p->last_notice->next = notice;
    else
        p->notices = notice;
    p->last_notice = notice;
}

static void tell_over(rc_flight *f)
{
    if (!f->notify || f->told || f->landed || f->result == RC_AGAIN)
        return;
    f->told = 1;
    f->over_notice = (flight_notice){.flight = f};
    push_notice(f->pipe, &f->over_notice);
}

void flight_over(rc_flight *f, const rc_error *error)
{
    rc_pipe *p = f->pipe;
    pthread_mutex_lock(&p->lock);
    if (error != NULL)
        f->error = *error;
    atomic_store(&f->result, error != NULL ? (int)error->code : RC_OK);
    tell_over(f);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

void flight_land(rc_flight *f)
{
    rc_pipe *p = f->pipe;
    pthread_mutex_lock(&p->lock);
    atomic_store(&f->landed, 1);
    f->landed_notice = (flight_notice){.flight = f, .landed = 1};
    push_notice(p, &f->landed_notice);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    rc_flight_free(f);
}

void rc_flight_notify(rc_flight *f)
{
    if (pipe_is_forked(f->pipe))
        return;
    pthread_mutex_lock(&f->pipe->lock);
    f->notify = 1;
    tell_over(f);
    pthread_cond_broadcast(&f->pipe->changed);
    pthread_mutex_unlock(&f->pipe->lock);
}

rc_result rc_pipe_take(rc_pipe *p, int timeout_ms, rc_flight **out, int *landed)
{
    *out = NULL;
    if (pipe_is_forked(p))
        return RC_INVALID_STATE;
    uint64_t until = clock_ns() + (uint64_t)(timeout_ms < 0 ? 0 : timeout_ms) * CLOCK_MS;
    pthread_mutex_lock(&p->lock);
    while (p->notices == NULL && !p->stopped && clock_ns() < until)
        pipe_wait(p, until);
    flight_notice *notice = p->notices;
    rc_result result = notice != NULL ? RC_OK : p->stopped ? RC_INVALID_STATE : RC_AGAIN;
    if (notice != NULL) {
        p->notices = notice->next;
        *out = notice->flight;
        *landed = notice->landed;
    }
    pthread_mutex_unlock(&p->lock);
    return result;
}

/* ---- waits ---- */

static rc_result wait_for(rc_flight *f, int timeout_ms, int for_landing)
{
    rc_pipe *p = f->pipe;
    if (timeout_ms > 0 && !f->landed) {
        if (pipe_is_forked(p))
            return RC_INVALID_STATE;
        uint64_t until = clock_ns() + (uint64_t)timeout_ms * CLOCK_MS;
        pthread_mutex_lock(&p->lock);
        while ((for_landing ? !f->landed : f->result == RC_AGAIN) && clock_ns() < until)
            pipe_wait(p, until);
        pthread_mutex_unlock(&p->lock);
    }
    return for_landing && !f->landed ? RC_AGAIN : (rc_result)atomic_load(&f->result);
}

rc_result rc_flight_wait(rc_flight *f, int timeout_ms)
{
    return wait_for(f, timeout_ms, 0);
}

rc_result rc_flight_landed(rc_flight *f, int timeout_ms)
{
    return wait_for(f, timeout_ms, 1);
}

static rc_result order(rc_flight *f, cu_stream stream, rc_error *error)
{
    cuda_device *device = f->pipe->device;
    device_visit visit;
    RC_TRY(device_enter(device, &visit, error));
    rc_result result = device_check_stream(device, stream, error);
    if (result == RC_OK && !PIPE_HAS(PIPE_NO_DONE_EVENT))
        result = DEVICE_CALL(device, error, cuStreamWaitEvent, stream, f->done, 0);
    device_leave(device, &visit);
    return result;
}

rc_result rc_flight_order(rc_flight *f, int64_t stream, rc_error *error)
{
    rc_pipe *p = f->pipe;
    error_clear(error);
    if (pipe_is_forked(p))
        return error_set(error, RC_INVALID_STATE, "this is a forked child");
    if (stream < 0 || f->result != RC_OK)
        return error_set(error, RC_INVALID_ARGUMENT,
                         stream < 0 ? "%lld is no stream" : "the collective is not over",
                         (long long)stream);
    pthread_mutex_lock(&p->lock);
    int needed = !f->landed && f->done != NULL && !p->stopped;
    p->visitors += needed;
    pthread_mutex_unlock(&p->lock);
    if (!needed)
        return RC_OK;
    rc_result result = order(f, pipe_stream(stream), error);
    if (result == RC_DEVICE)
        rc_comm_abort(p->comm, error->message);
    pthread_mutex_lock(&p->lock);
    p->visitors--;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    return result;
}

/* ---- questions ---- */

void rc_flight_error(rc_flight *f, rc_error *out)
{
    error_clear(out);
    out->seq = rc_flight_seq(f);
    if (f->result != RC_AGAIN && f->result != RC_OK) {
        pthread_mutex_lock(&f->pipe->lock);
        *out = f->error;
        pthread_mutex_unlock(&f->pipe->lock);
    }
}

uint64_t rc_flight_seq(rc_flight *f)
{
    return f->work != NULL ? rc_work_seq(f->work) : 0;
}

int rc_flight_root(rc_flight *f)
{
    return f->work != NULL ? rc_work_root(f->work) : f->call.root;
}

double rc_flight_elapsed(rc_flight *f)
{
    return f->work != NULL ? rc_work_elapsed(f->work) : 0.0;
}

void rc_flight_stats_get(rc_flight *f, rc_work_stats *out)
{
    *out = (rc_work_stats){0};
    if (f->work != NULL)
        rc_work_stats_get(f->work, out);
}
