/* comm_settle.c - the ends of works and of the communicator: latched where they are found, and
 * settled here. See comm.h. */
#include "comm.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/error.h"

/* ---- what is latched ---- */

void comm_end(rc_comm *c, rc_work *w, rc_result result)
{
    work_move(w, WORK_ENDING);
    w->error.code = result;
    w->next = NULL;
    if (c->ending_tail != NULL)
        c->ending_tail->next = w;
    else
        c->ending_head = w;
    c->ending_tail = w;
    engine_settle_later(c->engine);
}

void comm_finish_complete(rc_comm *c, rc_work *w)
{
    int runs = w->state == WORK_ON_LINKS || w->state == WORK_IN_MEMORY;
    if (c->state != COMM_RUNNING || !runs || !work_complete(w))
        return;
    c->works_done++;
    comm_active_remove(c, w);
    comm_end(c, w, RC_OK);
}

void comm_fail(rc_comm *c, const rc_error *error)
{
    comm_fail_by(c, error, c->env.rank);
}

void comm_fail_by(rc_comm *c, const rc_error *error, int origin)
{
    if (c->state != COMM_RUNNING)
        return;
    comm_move(c, COMM_FAILING);
    c->error = *error;
    c->error_origin = origin;
    engine_settle_later(c->engine);
}

rc_result comm_fail_text(rc_comm *c, rc_result code, int rank, const char *format, ...)
{
    rc_error error;
    char text[sizeof error.message];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    error_clear(&error);
    error_set(&error, code, "%s", text);
    error.rank = rank;
    comm_fail(c, &error);
    return code;
}

/* ---- the end ---- */

/* Sends a last frame on every lane: a lane's end, which may be seen first, must not come without
 * it. */
void comm_send_on_all_lanes(rc_comm *c, frame_type type, uint64_t seq)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            comm_send_control(c, ln, type, seq, 0, 0, i);
    }
}

void comm_drop_half_received(rc_comm *c, lane *l)
{
    pool_return(c->env.buffers, l->rx_place.buffer);
    l->rx_place = (rx_place){0};
}

static void detach_link(rc_comm *c, peer_link *ln)
{
    out_frame *frame;
    while ((frame = queue_pop(&ln->queue)) != NULL)
        work_env_release(&c->env, frame);
    for (int send = 0; send < 2; send++)
        while (held_first(&ln->held, send) != NULL)
            work_env_release(&c->env, held_pop(&ln->held, send));
    for (int i = 0; i < ln->lane_count; i++) {
        comm_drop_half_received(c, ln->lanes[i]);
        lane_detach(ln->lanes[i]);
    }
}

static void settle_failure(rc_comm *c)
{
    comm_move(c, COMM_FAILED);
    for (int rank = 0; rank < c->env.world_size; rank++)
        if (c->env.links[rank] != NULL)
            detach_link(c, c->env.links[rank]);
    comm_send_on_all_lanes(c, FRAME_ABORT, c->error.seq);
    comm_unexpected_drop(c);
    shared_drop(&c->shared);
    c->waiting_head = c->waiting_tail = NULL;
    c->member.pumped = c->member.expects = 0;
    while (c->active_head != NULL) {
        rc_work *w = c->active_head;
        comm_active_remove(c, w);
        comm_end(c, w, c->error.code);
    }
}

static void settle_work(rc_comm *c, rc_work *w)
{
    if (w->call.notify)
        work_retain(w);
    work_finish(w, w->error.code, &c->error);
    if (w->call.notify)
        engine_push_done(c->engine, &w->done_entry);
    work_release(w);
}

void comm_settle(engine_member *member)
{
    rc_comm *c = (rc_comm *)member;
    if (c->state == COMM_FAILING)
        settle_failure(c);
    if (c->ending_head != NULL)
        engine_changed(c->engine);
    while (c->ending_head != NULL) {
        rc_work *w = c->ending_head;
        c->ending_head = w->next;
        if (c->ending_head == NULL)
            c->ending_tail = NULL;
        settle_work(c, w);
    }
}
