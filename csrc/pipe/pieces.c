/* pieces.c - flights that go through the core piece by piece: the copy to the host, the ring and
 * the copy back run beside each other within one all-reduce.
 *
 *   d2h stream   1 | 2 |  3  |    4    | ...           in the order of the plan (order.h)
 *   core            \ submitted, then shown the others as they come
 *   h2d stream                          what is final | ... | the rest, "done"
 *
 * "in" queues a few pieces, submits the work when the first is there, behind a gate (gate.h), and
 * shows the core each further one when the event behind it is over. "out" is called when enough of
 * the result is final, and copies that back.
 *
 * Pieces begin small, so that the wire begins soon, and double up to a size that costs few calls;
 * what is copied back halves towards the end in the same way.
 *
 * Invariants. While a flight is fed, "in" may have copies queued to its staging, which only it
 * knows of: so "out" waits for the end of that before it gives the staging back. A flight that is
 * in the core is ended by "out" alone, also when it is "in" that fails.
 */
#include <unistd.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "../coll/encoded.h"
#include "pipe.h"

/* Bytes of staging. */
enum { LEAST_PIECE = 256 << 10, MOST_PIECE = 4 << 20, LEAST_IN_PIECES = 1 << 20 };

#ifdef PIPE_FAULTS
atomic_int pipe_pieces_fed = INT32_MAX;
int pipe_pieces_shift;
#define SIZE(bytes) ((uint64_t)(bytes) >> pipe_pieces_shift)
#else
#define SIZE(bytes) ((uint64_t)(bytes))
#endif

/* Bytes that an element has in staging; not in blocks. */
static uint64_t elem_bytes(const rc_flight *f)
{
    uint64_t whole = rc_dtype_size(f->call.dtype);
    return f->is_packed ? whole / 2 : whole;
}

/* Elements of a piece of so many bytes. In blocks: of each part, whole segments. */
static uint64_t elems_there(const rc_flight *f, uint64_t bytes)
{
    const rc_layout *l = &f->layout;
    if (!f->in_blocks)
        return bytes / elem_bytes(f);
    uint64_t own = l->own < 0 ? 0 : l->segment_elems * sizeof(float) - l->segment_bytes;
    uint64_t rows = bytes / (l->parts * l->segment_bytes + own);
    return (rows > 0 ? rows : 1) * l->segment_elems;
}

/* Elements of the result that are copied back as so many bytes. */
static uint64_t elems_back(const rc_flight *f, uint64_t bytes)
{
    const rc_layout *l = &f->layout;
    if (f->in_blocks)
        return bytes * l->segment_elems / (l->terms * l->segment_bytes);
    return bytes / elem_bytes(f);
}

/* ---- the way there ---- */

static void take_plan(rc_flight *f)
{
    rc_comm *comm = f->pipe->comm;
    quant ignored;
    if (f->in_blocks) {
        encoded_plan(&f->feed.plan, &ignored, &comm->env, &f->call);
        return;
    }
    engine_lock(comm->engine); /* the table may be exchanged */
    rc_algorithm algorithm = work_algorithm(&f->call, &comm->env);
    engine_unlock(comm->engine);
    plan_init(&f->feed.plan, &f->call, algorithm, comm->env.rank, comm->env.world_size, PLAN_ALIGN);
}

int pieces_suit(rc_flight *f)
{
    const rc_comm *comm = f->pipe->comm;
    int is_plain = f->call.codec <= RC_CODEC_FP16 && f->call.feedback == NULL;
    uint64_t bytes = f->in_blocks ? f->layout.bytes : f->call.count * elem_bytes(f);
    if (f->call.collective != RC_ALLREDUCE || !(is_plain || f->in_blocks) ||
        comm->shared.hosts > 0 || comm->env.world_size == 1 || bytes <= SIZE(LEAST_IN_PIECES))
        return 0;
    take_plan(f);
    return order_parts(&f->feed.plan) > 0;
}

static void begin_piece(const rc_flight *f, pieces_cursor *cursor, uint64_t bytes)
{
    cursor->bytes = bytes;
    cursor->elems = elems_there(f, bytes);
}

/* The next stretch of the piece, or 0 where it ends; then the next piece is twice as long. */
static int next_stretch(const rc_flight *f, pieces_cursor *cursor, order_stretch *next)
{
    const plan *p = &f->feed.plan;
    if (cursor->bytes == 0)
        begin_piece(f, cursor, SIZE(LEAST_PIECE));
    if (f->in_blocks && order_next_of_row(p, &cursor->at, cursor->elems, next))
        return 1;
    if (!f->in_blocks && order_next(p, &cursor->at, cursor->elems, next)) {
        cursor->elems -= next->elems;
        return 1;
    }
    begin_piece(f, cursor, cursor->bytes < SIZE(MOST_PIECE) ? 2 * cursor->bytes : cursor->bytes);
    return 0;
}

/* Queues the next piece, if one is left, and an event behind it. */
static rc_result queue_piece(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    order_stretch next;
    int any = 0;
    for (; next_stretch(f, &f->feed.queued, &next); any = 1)
        RC_TRY(flight_copy_in(f, next, error));
    if (!any)
        return RC_OK;
    cu_event behind = p->copied[f->feed.events_queued++ % PIPE_PIECES_AHEAD];
    return DEVICE_CALL(p->device, error, cuEventRecord, behind, p->d2h);
}

static rc_result queue_ahead(rc_flight *f, rc_error *error)
{
    uint32_t before;
    do {
        before = f->feed.events_queued;
        if (before - f->feed.events_over < PIPE_PIECES_AHEAD)
            RC_TRY(queue_piece(f, error));
    } while (f->feed.events_queued != before);
    return RC_OK;
}

static rc_result wait_for_piece(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    cu_event behind = p->copied[f->feed.events_over++ % PIPE_PIECES_AHEAD];
    if (PIPE_HAS(PIPE_EARLY_SHOW))
        return RC_OK;
    return DEVICE_CALL(p->device, error, cuEventSynchronize, behind);
}

static uint32_t count_stretches(const rc_flight *f)
{
    pieces_cursor cursor = {0};
    order_stretch next;
    uint32_t count = 0, before;
    do {
        before = count;
        while (next_stretch(f, &cursor, &next))
            count++;
    } while (count != before);
    return count;
}

rc_result pieces_begin(rc_flight *f, rc_call *call, rc_work **work, rc_error *error)
{
    order_stretch next;
    RC_TRY(queue_ahead(f, error));
    RC_TRY(wait_for_piece(f, error));
    RC_TRY(rc_check(f->pipe->comm, call, error));
    gate *gate = gate_create(count_stretches(f), elems_back(f, SIZE(LEAST_PIECE)),
                             elems_back(f, SIZE(MOST_PIECE)));
    if (gate == NULL)
        return error_set(error, RC_NO_MEMORY, "no memory for a flight");
    while (next_stretch(f, &f->feed.shown, &next))
        gate_show(gate, next);
    f->feed.is_on = 1;
    blocks_share(f);
    if (comm_submit(f->pipe->comm, call, gate, work) == RC_OK)
        return RC_OK;
    blocks_take_back(f);
    f->feed.is_on = 0;
    return error_set(error, RC_NO_MEMORY, "no memory for a work");
}

static void show_piece(rc_flight *f)
{
    rc_comm *comm = f->pipe->comm;
    order_stretch next;
    engine_lock(comm->engine);
    while (next_stretch(f, &f->feed.shown, &next))
        comm_show(comm, f->work, next);
    engine_unlock(comm->engine);
}

static void pause_for_tests(const rc_flight *f)
{
#ifdef PIPE_FAULTS
    while ((int)f->feed.events_over >= atomic_load(&pipe_pieces_fed))
        usleep(100);
#else
    (void)f;
#endif
}

static rc_result feed(rc_flight *f, rc_error *error)
{
    for (;;) {
        pause_for_tests(f);
        if (rc_work_wait(f->work, 0) == RC_AGAIN)
            RC_TRY(queue_ahead(f, error));
        if (f->feed.events_over == f->feed.events_queued)
            return RC_OK;
        RC_TRY(wait_for_piece(f, error));
        show_piece(f);
    }
}

void pieces_feed(rc_flight *f)
{
    rc_pipe *p = f->pipe;
    rc_error error, ignored;
    error_clear(&error);
    error_clear(&ignored);
    if (!f->feed.is_on)
        return;
    if (feed(f, &error) != RC_OK) {
        if (rc_work_wait(f->work, 0) != RC_AGAIN)
            error.code = RC_OK; /* it was not this that ended it */
        error.rank = p->comm->env.rank;
        error.seq = rc_work_seq(f->work);
        rc_comm_abort(p->comm, error.message);
        (void)DEVICE_CALL(p->device, &ignored, cuStreamSynchronize, p->d2h);
    }
    blocks_give_up(f);
    pthread_mutex_lock(&p->lock);
    f->feed.error = error;
    f->feed.is_on = 0;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

void pieces_wait_fed(rc_flight *f, rc_error *error)
{
    rc_pipe *p = f->pipe;
    pthread_mutex_lock(&p->lock);
    while (f->feed.is_on)
        pipe_wait(p, clock_ns() + CLOCK_S);
    if (f->feed.error.code != RC_OK)
        *error = f->feed.error;
    pthread_mutex_unlock(&p->lock);
}

/* ---- the way back ---- */

int pieces_are_ripe(const rc_flight *f)
{
    const gate *gate = f->work->gate;
    return gate != NULL && !f->feed.at_the_end && atomic_load(&gate->ripe);
}

rc_result pieces_copy_out(rc_flight *f, rc_error *error)
{
    enum { AT_ONCE = 32 };
    rc_engine *engine = f->pipe->comm->engine;
    order_stretch final[AT_ONCE];
    int count;
    do {
        engine_lock(engine);
        for (count = 0; count < AT_ONCE && gate_take(f->work->gate, &final[count]); count++)
            continue;
        engine_unlock(engine);
        for (int i = 0; i < count; i++)
            RC_TRY(flight_copy_out(f, final[i], error));
    } while (count == AT_ONCE);
    return RC_OK;
}
