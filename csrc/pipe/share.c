/* share.c - what the callers of a pipe and its threads have in common. See pipe.h. */
#include <stdlib.h>
#include <unistd.h>

#include "../base/error.h"
#include "../base/thread.h"
#include "pipe.h"

int pipe_is_forked(const rc_pipe *p)
{
    return p->pid != getpid();
}

cu_stream pipe_stream(int64_t handle)
{
    return handle == 0 ? CU_LEGACY_STREAM : (cu_stream)(uintptr_t)handle;
}

void pipe_wait(rc_pipe *p, uint64_t until)
{
    thread_wait_until(&p->changed, &p->lock, until);
}

void pipe_release(rc_pipe *p)
{
    if (atomic_fetch_sub(&p->references, 1) > 1)
        return;
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->changed);
    free(p->events);
    free(p->idle_events);
    free(p);
}

/* ---- what a flight moves ---- */

int flight_reads(const rc_flight *f)
{
    return plan_reads(&f->call, comm_rank(f->pipe->comm));
}

int flight_writes(const rc_flight *f)
{
    int rank = comm_rank(f->pipe->comm);
    int has_it = f->call.collective == RC_BROADCAST && rank == f->call.root &&
                 f->call.src == f->call.dst && f->call.codec == RC_CODEC_NONE;
    return !has_it && plan_writes(&f->call, rank);
}

static uint64_t parts_in_buffer(const rc_flight *f, int of_src)
{
    uint64_t n = (uint64_t)comm_world_size(f->pipe->comm);
    switch (f->call.collective) {
    case RC_ALLGATHER:
    case RC_GATHER: return of_src ? 1 : n;
    case RC_REDUCE_SCATTER:
    case RC_SCATTER: return of_src ? n : 1;
    case RC_ALLTOALL: return n;
    default: return 1;
    }
}

uint64_t flight_bytes(const rc_flight *f, int of_src)
{
    return f->call.count * rc_dtype_size(f->call.dtype) * parts_in_buffer(f, of_src);
}

rc_result flight_each(rc_flight *f, int of_src, flight_copy *copy, rc_error *error)
{
    const void *at = of_src ? f->call.src : f->call.dst;
    rc_piece whole = {.address = (uintptr_t)at, .bytes = flight_bytes(f, of_src)};
    const rc_piece *pieces = f->pieces != NULL ? f->pieces : &whole;
    int count = f->pieces != NULL ? f->piece_count : 1;
    for (int i = 0; i < count; i++)
        if (pieces[i].bytes > 0)
            RC_TRY(copy(f, &pieces[i], error));
    return RC_OK;
}
