/* pipe.c - the life of a pipe, and the caller's part of a flight: checks, an event, a place in the
 * queue. See pipe.h.
 */
#include "pipe.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "../base/thread.h"

#ifdef PIPE_FAULTS
int pipe_fault = PIPE_SOUND;
atomic_int pipe_paused;
#endif

/* ---- queries to the driver ---- */

rc_result rc_cuda_devices(const char *driver, int *count, rc_error *error)
{
    const cuda_driver *found;
    *count = 0;
    error_clear(error);
    RC_TRY(cuda_driver_open(driver, &found, error));
    *count = found->devices;
    return RC_OK;
}

rc_result rc_cuda_locate(const char *driver, uint64_t address, int *ordinal, rc_error *error)
{
    const cuda_driver *found;
    *ordinal = -1;
    error_clear(error);
    RC_TRY(cuda_driver_open(driver, &found, error));
    return cuda_driver_locate(found, address, ordinal, error);
}

/* ---- life ---- */

static rc_result make_streams(rc_pipe *p, rc_error *error)
{
    device_visit visit;
    RC_TRY(device_enter(p->device, &visit, error));
    rc_result result = device_stream_create(p->device, &p->d2h, error);
    if (result == RC_OK)
        result = device_stream_create(p->device, &p->h2d, error);
    if (result == RC_OK)
        result = device_event_create(p->device, &p->copied, error);
    device_leave(p->device, &visit);
    return result;
}

static rc_result start_threads(rc_pipe *p, rc_error *error)
{
    p->threads = thread_start(&p->in, pipe_run_in, p);
    if (p->threads == 1)
        p->threads += thread_start(&p->out, pipe_run_out, p);
    if (p->threads < 2)
        return error_set(error, RC_SYSTEM, "no thread to move tensors of a GPU");
    return RC_OK;
}

rc_result rc_pipe_create(rc_pipe **out, rc_comm *comm, const char *driver, int ordinal,
                         const char *kernels, uint64_t arena, rc_error *error)
{
    const cuda_driver *found;
    *out = NULL;
    error_clear(error);
    RC_TRY(cuda_driver_open(driver, &found, error));
    rc_pipe *p = calloc(1, sizeof *p);
    if (p == NULL)
        return error_set(error, RC_NO_MEMORY, "no memory for a pipe");
    rc_result result =
        device_open(&p->device, found, ordinal, kernels, packing_kernels, PACKING_KERNELS, error);
    if (result != RC_OK) {
        free(p);
        return result;
    }
    p->comm = comm;
    p->pid = getpid();
    p->references = 1;
    pthread_mutex_init(&p->lock, NULL);
    thread_init_cond(&p->changed);
    pinned_init(&p->arena, p->device, arena);
    result = make_streams(p, error);
    if (result == RC_OK)
        result = start_threads(p, error);
    if (result != RC_OK) {
        rc_pipe_stop(p);
        rc_pipe_free(p);
        return result;
    }
    *out = p;
    return RC_OK;
}

const char *rc_pipe_without_kernels(const rc_pipe *p)
{
    return p->device->without_kernels;
}

static void close_device(rc_pipe *p)
{
    device_visit visit;
    int entered = 0;
    for (int attempts = 2; attempts > 0 && !entered; attempts--)
        entered = device_enter(p->device, &visit, NULL) == RC_OK;
    if (entered) {
        pinned_destroy(&p->arena);
        for (int i = 0; i < p->event_count; i++)
            device_event_destroy(p->device, p->events[i]);
        device_event_destroy(p->device, p->copied);
        packing_release(p, &p->packed);
        packing_release(p, &p->unpacked);
        packing_release(p, &p->gathered);
        packing_release(p, &p->scattered);
        device_stream_destroy(p->device, p->d2h);
        device_stream_destroy(p->device, p->h2d);
        device_leave(p->device, &visit);
    }
    device_close(p->device);
}

void rc_pipe_stop(rc_pipe *p)
{
    if (pipe_is_forked(p))
        return;
    pthread_mutex_lock(&p->lock);
    p->closing = 1;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    if (p->threads > 0)
        pthread_join(p->in, NULL);
    if (p->threads > 1)
        pthread_join(p->out, NULL);
    pthread_mutex_lock(&p->lock);
    while (p->visitors > 0)
        pipe_wait(p, clock_ns() + CLOCK_S);
    p->stopped = 1;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    close_device(p);
}

void rc_pipe_free(rc_pipe *p)
{
    if (p == NULL || pipe_is_forked(p))
        return;
    for (flight_notice *notice; (notice = p->notices) != NULL;) {
        p->notices = notice->next;
        rc_flight_free(notice->flight);
    }
    pipe_release(p);
}

/* ---- events ---- */

static int grow_events(cu_event **events, int count)
{
    cu_event *more = realloc(*events, sizeof *more * (size_t)count);
    if (more != NULL)
        *events = more;
    return more != NULL;
}

static rc_result add_event(rc_pipe *p, rc_error *error)
{
    cu_event made;
    if (!grow_events(&p->events, p->event_count + 1) ||
        !grow_events(&p->idle_events, p->event_count + 1))
        return error_set(error, RC_NO_MEMORY, "no memory for an event");
    RC_TRY(device_event_create(p->device, &made, error));
    p->events[p->event_count++] = p->idle_events[p->idle_count++] = made;
    return RC_OK;
}

static rc_result take_event(rc_pipe *p, cu_event *out, rc_error *error)
{
    rc_result result = RC_OK;
    pthread_mutex_lock(&p->lock);
    if (p->idle_count == 0)
        result = add_event(p, error);
    if (result == RC_OK)
        *out = p->idle_events[--p->idle_count];
    pthread_mutex_unlock(&p->lock);
    return result;
}

/* ---- submission ---- */

/* Begins, as leave_pipe ends, a caller's use of what rc_pipe_stop frees. Returns 0 if the pipe is
 * closing. */
static int enter_pipe(rc_pipe *p)
{
    pthread_mutex_lock(&p->lock);
    int open = !p->closing;
    p->visitors += open;
    pthread_mutex_unlock(&p->lock);
    return open;
}

static void leave_pipe(rc_pipe *p)
{
    pthread_mutex_lock(&p->lock);
    p->visitors--;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static rc_result check_pieces(const rc_flight *f, rc_error *error)
{
    uint64_t end = 0, total = flight_bytes(f, 1);
    for (int i = 0; i < f->piece_count; i++) {
        const rc_piece *piece = &f->pieces[i];
        if (piece->offset < end || piece->offset > total || piece->bytes > total - piece->offset)
            return error_set(error, RC_INVALID_ARGUMENT, "piece %d is out of order or range", i);
        end = piece->offset + piece->bytes;
        if (piece->bytes > 0)
            RC_TRY(device_check_pointer(f->pipe->device, piece->address, piece->bytes, error));
    }
    return RC_OK;
}

static rc_result check_memory(const rc_flight *f, rc_error *error)
{
    cuda_device *device = f->pipe->device;
    if (f->pieces != NULL)
        return check_pieces(f, error);
    if (flight_reads(f))
        RC_TRY(device_check_pointer(device, (cu_address)(uintptr_t)f->call.src, flight_bytes(f, 1),
                                    error));
    if (flight_writes(f) && !(flight_reads(f) && f->call.src == f->call.dst))
        RC_TRY(device_check_pointer(device, (cu_address)(uintptr_t)f->call.dst, flight_bytes(f, 0),
                                    error));
    return RC_OK;
}

/* Checks for a mistake of the caller's, before anything has happened. */
static rc_result check(rc_flight *f, int64_t stream, rc_error *error)
{
    rc_call call = f->call;
    if (f->pieces != NULL)
        call.src = call.dst = f->pieces;
    RC_TRY(rc_check(f->pipe->comm, &call, error));
    if (call.count == 0)
        return error_set(error, RC_INVALID_ARGUMENT, "a flight has elements");
    if (stream != RC_NO_STREAM)
        RC_TRY(device_check_stream(f->pipe->device, pipe_stream(stream), error));
    return check_memory(f, error);
}

/* Records an event behind all that the stream has queued so far. */
static rc_result mark(rc_flight *f, int64_t stream, rc_error *error)
{
    cuda_device *device = f->pipe->device;
    if (flight_writes(f))
        RC_TRY(take_event(f->pipe, &f->done, error));
    if (stream == RC_NO_STREAM)
        return RC_OK;
    RC_TRY(take_event(f->pipe, &f->input, error));
    return DEVICE_CALL(device, error, cuEventRecord, f->input, pipe_stream(stream));
}

static rc_result prepare_flight(rc_flight *f, int64_t stream, rc_error *error)
{
    rc_pipe *p = f->pipe;
    device_visit visit;
    rc_result result = device_enter(p->device, &visit, error);
    if (result == RC_OK)
        result = check(f, stream, error);
    if (result == RC_OK)
        result = mark(f, stream, error);
    if (result == RC_OK)
        result = feedback_claim(f->call.feedback, error);
    device_leave(p->device, &visit);
    if (result == RC_DEVICE || result == RC_NO_MEMORY) /* the other ranks have called it */
        rc_comm_abort(p->comm, error->message);
    return result;
}

static rc_flight *make_flight(rc_pipe *p, const rc_call *call, const rc_piece *pieces, int count)
{
    rc_flight *f = calloc(1, sizeof *f);
    if (f == NULL)
        return NULL;
    *f = (rc_flight){.pipe = p, .call = *call, .piece_count = count, .notify = call->notify};
    if (count > 0 && (f->pieces = malloc(sizeof *pieces * (size_t)count)) == NULL) {
        free(f);
        return NULL;
    }
    if (count > 0)
        memcpy(f->pieces, pieces, sizeof *pieces * (size_t)count);
    error_clear(&f->error);
    f->call.notify = 0; /* the pipe itself waits for the work */
    f->call.waits = 0;
    f->call.encoded = 0;
    f->result = RC_AGAIN;
    f->references = 2; /* the caller's, and the pipe's until it has landed */
    atomic_fetch_add(&p->references, 1);
    return f;
}

static void take_off(rc_flight *f)
{
    rc_pipe *p = f->pipe;
    pthread_mutex_lock(&p->lock);
    list_append(&p->entering, &f->place);
    p->underway++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

rc_result rc_pipe_submit(rc_pipe *p, const rc_call *call, const rc_piece *pieces, int count,
                         int64_t stream, rc_flight **out, rc_error *error)
{
    *out = NULL;
    error_clear(error);
    if (pipe_is_forked(p))
        return error_set(error, RC_INVALID_STATE, "a forked child cannot use its parent's pipe");
    rc_flight *f = make_flight(p, call, pieces, count);
    if (f == NULL)
        return error_set(error, RC_NO_MEMORY, "no memory for a flight");
    int open = enter_pipe(p);
    rc_result result = open ? prepare_flight(f, stream, error)
                            : error_set(error, RC_INVALID_STATE, "the communicator is closed");
    if (result == RC_OK) {
        *out = f;
        take_off(f);
    } else {
        rc_flight_free(f);
        rc_flight_free(f);
    }
    if (open)
        leave_pipe(p);
    return result;
}

uint64_t rc_pipe_stream(const rc_pipe *p)
{
    return (uintptr_t)p->h2d;
}

rc_result rc_pipe_drain(rc_pipe *p, int timeout_ms)
{
    if (pipe_is_forked(p))
        return RC_INVALID_STATE;
    uint64_t until = clock_ns() + (uint64_t)(timeout_ms < 0 ? 0 : timeout_ms) * CLOCK_MS;
    pthread_mutex_lock(&p->lock);
    while (p->underway > 0 && clock_ns() < until)
        pipe_wait(p, until);
    rc_result result = p->underway > 0 ? RC_AGAIN : RC_OK;
    pthread_mutex_unlock(&p->lock);
    return result;
}
