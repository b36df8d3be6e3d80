/* legs.c - the two threads of a pipe: "in" brings tensors to the core, "out" brings results back.
 *
 * "out" drives the engine while it waits, as any thread does that waits for a work, and checks all
 * works that are in flight: the engine wakes it whenever one of them ends.
 */
#include <string.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "pipe.h"

/* Time for which a flight waits for room in the arena. Without a limit it could be waiting for a
 * rank that waits for this one; a send or receive, which others may wait for at any time, does not
 * wait. */
enum { PATIENCE_MS = 100 };

/* ---- the ends of a flight ---- */

static void give_staging_back(rc_flight *f)
{
    pinned_give(&f->pipe->arena, f->staging);
    f->staging = NULL;
}

/* Ends a flight with an error, once the stream has no copies of it left. */
static void fail_flight(rc_flight *f, rc_error *error, cu_stream stream)
{
    rc_pipe *p = f->pipe;
    rc_error ignored;
    error_clear(&ignored);
    if (f->staging != NULL)
        (void)DEVICE_CALL(p->device, &ignored, cuStreamSynchronize, stream);
    give_staging_back(f);
    flight_over(f, error);
    flight_land(f);
}

/* Ends a flight with an error that the communicator does not know of, and aborts that: no rank
 * shall wait for this one. */
static void fail_all(rc_flight *f, rc_error *error, cu_stream stream)
{
    rc_comm_abort(f->pipe->comm, error->message);
    error->rank = comm_rank(f->pipe->comm);
    fail_flight(f, error, stream);
}

/* ---- in ---- */

/* Returns the bytes of staging for so many of the tensor. */
static uint64_t staged(const rc_flight *f, uint64_t bytes)
{
    return f->is_packed ? bytes / 2 : bytes;
}

/* Takes staging for a flight: one part in place, else the source's before the result's. */
static rc_result take_staging(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    int is_message = f->call.collective == RC_SEND || f->call.collective == RC_RECV;
    int in_place = f->pieces != NULL || f->call.src == f->call.dst || f->is_packed;
    uint64_t src = flight_reads(f) ? staged(f, flight_bytes(f, 1)) : 0;
    uint64_t dst = flight_writes(f) ? staged(f, flight_bytes(f, 0)) : 0;
    if (f->in_blocks) {
        in_place = 1;
        src = dst = f->layout.bytes;
    }
    uint64_t at = (src + PINNED_ALIGN - 1) / PINNED_ALIGN * PINNED_ALIGN;
    uint64_t bytes = in_place ? (src > dst ? src : dst) : at + dst;
    if (bytes == 0) /* off the root of a scatter or gather that has nothing to do here */
        return RC_OK;
    RC_TRY(pinned_take(&p->arena, bytes, is_message ? 0 : PATIENCE_MS, &f->staging, error));
    f->src = f->staging->data;
    f->dst = in_place ? f->src : f->src + at;
    return RC_OK;
}

/* Makes the stream wait for what the caller's stream had queued. */
static rc_result follow_caller(rc_flight *f, cu_stream stream, rc_error *error)
{
    if (f->input == NULL || PIPE_HAS(PIPE_NO_INPUT_EVENT))
        return RC_OK;
    return DEVICE_CALL(f->pipe->device, error, cuStreamWaitEvent, stream, f->input, 0);
}

/* Clears the bytes between pieces. */
static void clear_gaps(rc_flight *f)
{
    uint64_t at = 0;
    for (int i = 0; i < f->piece_count; i++) {
        memset(f->src + staged(f, at), 0, staged(f, f->pieces[i].offset - at));
        at = f->pieces[i].offset + f->pieces[i].bytes;
    }
    memset(f->src + staged(f, at), 0, staged(f, flight_bytes(f, 1) - at));
}

static rc_result copy_piece_in(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cuda_device *device = p->device;
    cu_address from = piece->address;
    if (f->is_packed) {
        from = p->packed.at + staged(f, piece->offset);
        RC_TRY(packing_pack(f, piece, from, p->d2h, error));
    }
    return DEVICE_CALL(device, error, cuMemcpyDtoHAsync, f->src + staged(f, piece->offset), from,
                       staged(f, piece->bytes), p->d2h);
}

/* Has the GPU pack the flight if it can. Without memory on the GPU the CPU packs; other ranks
 * cannot tell. */
static rc_result choose_packing(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    if (!packing_suits(f))
        return RC_OK;
    rc_result result = packing_room(p, &p->packed, flight_bytes(f, 1) / 2, error);
    f->is_packed = result == RC_OK;
    if (result == RC_NO_MEMORY)
        error_clear(error);
    return result == RC_NO_MEMORY ? RC_OK : result;
}

static rc_result bring_in(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    rc_call call = f->call;
    rc_work *work = NULL;
    RC_TRY(choose_packing(f, error));
    RC_TRY(blocks_begin(f, error));
    RC_TRY(take_staging(f, error));
    if (f->pieces != NULL && !f->in_blocks)
        clear_gaps(f);
    if (flight_reads(f)) {
        RC_TRY(follow_caller(f, p->d2h, error));
        RC_TRY(f->in_blocks ? blocks_copy_in(f, error) : flight_each(f, 1, copy_piece_in, error));
        RC_TRY(DEVICE_CALL(p->device, error, cuEventRecord, p->copied, p->d2h));
        RC_TRY(DEVICE_CALL(p->device, error, cuEventSynchronize, p->copied));
    }
    call.src = f->src;
    call.dst = f->dst;
    call.encoded = f->is_packed || f->in_blocks;
    if (comm_submit(p->comm, &call, &work) != RC_OK) /* the caller's mistakes: rc_pipe_submit */
        return error_set(error, RC_NO_MEMORY, "no memory for a work");
    f->work = work;
    return RC_OK;
}

/* Takes the next flight out of the queue; NULL when there will be no more. too_late: it must fail.
 */
static rc_flight *next_entering(rc_pipe *p, int *too_late)
{
    pthread_mutex_lock(&p->lock);
    while (p->entering.head == NULL && (!p->closing || p->visitors > 0))
        pipe_wait(p, clock_ns() + CLOCK_S);
    list_node *node = list_pop(&p->entering);
    rc_flight *f = LIST_ENTRY(node, rc_flight, place);
    p->in_ended = f == NULL;
    *too_late = p->closing;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    return f;
}

static void reach_core(rc_flight *f, int flies)
{
    rc_pipe *p = f->pipe;
    pthread_mutex_lock(&p->lock);
    if (flies)
        list_append(&p->flying, &f->place);
    p->underway--;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static int is_over(const rc_flight *f)
{
    return rc_work_wait(f->work, 0) != RC_AGAIN;
}

/* Wakes "out" if the work is over already: "out" may be waiting in the engine without knowing of
 * it. */
static void call_out(rc_flight *f)
{
    rc_engine *engine = comm_engine(f->pipe->comm);
    if (!is_over(f))
        return;
    engine_lock(engine);
    engine_changed(engine);
    engine_unlock(engine);
}

void *pipe_run_in(void *arg)
{
    rc_pipe *p = arg;
    rc_error unbound, error;
    int too_late;
    error_clear(&unbound);
    device_bind_thread(p->device, &unbound);
    for (rc_flight *f; (f = next_entering(p, &too_late)) != NULL;) {
        error = unbound;
        if (too_late)
            error_set(&error, RC_INVALID_STATE, "the communicator was closed");
        if (error.code == RC_OK && bring_in(f, &error) == RC_OK) {
            flight_retain(f); /* the flight may land at any time from here on */
            reach_core(f, 1);
            call_out(f);
            rc_flight_free(f);
            continue;
        }
        reach_core(f, 0);
        feedback_unclaim(f->call.feedback);
        fail_all(f, &error, p->d2h);
    }
    return NULL;
}

/* ---- out ---- */

static rc_result copy_piece_out(rc_flight *f, const rc_piece *piece, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cuda_device *device = p->device;
    cu_address to = f->is_packed ? p->unpacked.at + staged(f, piece->offset) : piece->address;
    RC_TRY(DEVICE_CALL(device, error, cuMemcpyHtoDAsync, to, f->dst + staged(f, piece->offset),
                       staged(f, piece->bytes), p->h2d));
    return f->is_packed ? packing_unpack(f, piece, to, p->h2d, error) : RC_OK;
}

/* Makes room to unpack on the GPU, or returns RC_NO_MEMORY. */
static rc_result room_to_unpack(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    if (f->in_blocks)
        return blocks_room(f, error);
    return f->is_packed ? packing_room(p, &p->unpacked, flight_bytes(f, 0) / 2, error) : RC_OK;
}

/* Makes room to unpack on the GPU; without memory there the CPU has unpacked on return. */
static rc_result make_unpacked_room(rc_flight *f, rc_error *error)
{
    rc_result result = room_to_unpack(f, error);
    if (result != RC_NO_MEMORY)
        return result;
    error_clear(error);
    return f->in_blocks ? blocks_unpack_here(f, error) : packing_unpack_here(f, error);
}

static rc_result copy_out(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    int poisoned = f->in_blocks && quantised_poisoned(f->work);
    RC_TRY(follow_caller(f, p->h2d, error)); /* a rank that only receives has not waited yet */
    if (!poisoned)
        RC_TRY(make_unpacked_room(f, error));
    if (poisoned)
        RC_TRY(blocks_poison(f, error));
    else if (f->in_blocks)
        RC_TRY(blocks_copy_out(f, error));
    else
        RC_TRY(flight_each(f, 0, copy_piece_out, error));
    return DEVICE_CALL(p->device, error, cuEventRecord, f->done, p->h2d);
}

static void pause_for_tests(void)
{
#ifdef PIPE_FAULTS
    while (atomic_load(&pipe_paused))
        usleep(100);
#endif
}

static void bring_out(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    if (flight_writes(f) && copy_out(f, error) != RC_OK) {
        fail_all(f, error, p->h2d);
        return;
    }
    flight_over(f, NULL);
    pause_for_tests();
    if (flight_writes(f) && !PIPE_HAS(PIPE_EARLY_RELEASE) &&
        DEVICE_CALL(p->device, error, cuEventSynchronize, f->done) != RC_OK) {
        fail_all(f, error, p->h2d);
        return;
    }
    give_staging_back(f);
    flight_land(f);
}

/* Ends a flight whose work is over. unbound: the error if this thread cannot use the device. */
static void end_flight(rc_flight *f, const rc_error *unbound)
{
    rc_pipe *p = f->pipe;
    rc_error error;
    error_clear(&error);
    rc_work_error(f->work, &error);
    if (error.code != RC_OK) {
        fail_flight(f, &error, p->h2d);
        return;
    }
    error = *unbound;
    if (error.code != RC_OK)
        fail_all(f, &error, p->h2d);
    else
        bring_out(f, &error);
}

static rc_flight *first_over(rc_pipe *p)
{
    list_node *node = p->flying.head;
    while (node != NULL && !is_over(LIST_ENTRY(node, rc_flight, place)))
        node = node->next;
    return LIST_ENTRY(node, rc_flight, place);
}

static int any_over(const void *arg)
{
    rc_pipe *p = (rc_pipe *)(uintptr_t)arg;
    pthread_mutex_lock(&p->lock);
    rc_flight *f = first_over(p);
    pthread_mutex_unlock(&p->lock);
    return f != NULL;
}

/* Takes the next flight whose work is over out of the queue; NULL when there will be no more. */
static rc_flight *next_over(rc_pipe *p)
{
    rc_engine *engine = comm_engine(p->comm);
    uint64_t spin = comm_spin(p->comm);
    for (;;) {
        pthread_mutex_lock(&p->lock);
        while (p->flying.head == NULL && !p->in_ended)
            pipe_wait(p, clock_ns() + CLOCK_S);
        rc_flight *f = first_over(p);
        int none_left = f == NULL && p->flying.head == NULL;
        if (f != NULL)
            list_remove(&p->flying, &f->place);
        pthread_mutex_unlock(&p->lock);
        if (f != NULL || none_left)
            return f;
        engine_lock(engine);
        engine_drive(engine, any_over, p, clock_ns() + CLOCK_S, spin);
        engine_unlock(engine);
    }
}

void *pipe_run_out(void *arg)
{
    rc_pipe *p = arg;
    rc_error unbound;
    error_clear(&unbound);
    device_bind_thread(p->device, &unbound);
    for (rc_flight *f; (f = next_over(p)) != NULL;)
        end_flight(f, &unbound);
    return NULL;
}
