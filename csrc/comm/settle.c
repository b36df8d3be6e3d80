/* settle.c - the ends of works and of the communicator, once the handlers that have found them
 * (latch.c) have returned. See inside.h. */
#include "inside.h"

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
    for (int rank = 0; rank < c->env.world_size; rank++)
        if (c->env.links[rank] != NULL) {
            comm_send_on_all_lanes(c, c->env.links[rank], FRAME_ABORT, c->error.seq);
            c->env.links[rank]->is_told = 1;
        }
    comm_unexpected_drop(c);
    shared_drop(&c->shared);
    c->waiting_head = c->waiting_tail = NULL;
    c->member.pumped = c->member.expects = 0;
    while (c->active.head != NULL) {
        rc_work *w = LIST_ENTRY(c->active.head, rc_work, place);
        comm_active_remove(c, w);
        comm_end(c, w, c->error.code);
    }
}

/* The communicator's reference goes to the queue of those whose end is to be told, if it is. */
static void settle_work(rc_comm *c, rc_work *w)
{
    work_finish(w, w->error.code, &c->error);
    if (w->call.notify)
        engine_push_done(c->engine, &w->done_entry);
    else
        work_release(w);
}

void comm_settle(engine_member *member)
{
    rc_comm *c = (rc_comm *)member;
    if (c->state == COMM_FAILING)
        settle_failure(c);
    for (list_node *node; (node = list_pop(&c->ending)) != NULL;)
        settle_work(c, LIST_ENTRY(node, rc_work, place));
}
