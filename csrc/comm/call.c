/* call.c - calls: how a work is submitted and started, and gets its turns. See inside.h. */
#include "inside.h"

/* ---- the inbox ---- */

static rc_result number(rc_comm *c, rc_work *w)
{
    if (w->flags & FRAME_P2P)
        return comm_number(c, w);
    w->seq = c->next_seq++;
    return RC_OK;
}

rc_result comm_submit(rc_comm *c, const rc_call *call, rc_work **out)
{
    rc_work *w = work_create(c->engine, call, c->config.spin_us);
    if (w == NULL)
        return RC_NO_MEMORY;
    if (call->feedback != NULL && !quantised_takes(call, c->env.world_size) &&
        work_add_residual(w, c->env.contributors) != RC_OK) {
        work_release(w);
        work_release(w);
        return RC_NO_MEMORY;
    }
    pthread_mutex_lock(&c->engine->inbox_lock);
    if (number(c, w) != RC_OK) {
        pthread_mutex_unlock(&c->engine->inbox_lock);
        work_release(w); /* the communicator's reference, and the caller's */
        work_release(w);
        return RC_NO_MEMORY;
    }
    list_append(&c->inbox, &w->place);
    *out = w;
    pthread_mutex_unlock(&c->engine->inbox_lock);
    engine_submit(c->engine, call->waits);
    return RC_OK;
}

/* ---- the start ---- */

static void start_work(rc_comm *c, rc_work *w)
{
    if (c->state != COMM_RUNNING || c->leaving) {
        comm_end(c, w, c->error.code);
        return;
    }
    comm_active_add(c, w);
    if (!(w->flags & FRAME_P2P))
        c->submitted = w->seq + 1;
    engine_schedule(c->engine, &c->member, w->deadline);
    if (w->matched_later) {
        work_move(w, WORK_UNMATCHED);
        comm_match_receives(c, w->call.tag);
        if (w->state == WORK_UNMATCHED)
            comm_check_sources(c, w);
        return;
    }
    comm_check_sources(c, w);
    if (!comm_start_shared(c, w))
        comm_start_on_links(c, w, &c->env);
}

void comm_drain(engine_member *member)
{
    rc_comm *c = (rc_comm *)member;
    pthread_mutex_lock(&c->engine->inbox_lock);
    list taken = c->inbox;
    c->inbox = (list){0};
    pthread_mutex_unlock(&c->engine->inbox_lock);
    for (list_node *node; (node = list_pop(&taken)) != NULL;)
        start_work(c, LIST_ENTRY(node, rc_work, place));
}

/* ---- turns ---- */

static rc_work *first_that(const rc_comm *c, int (*does)(const rc_work *w))
{
    const list_node *node = c->runnable.head;
    while (node != NULL && !does(LIST_ENTRY(node, rc_work, runnable)))
        node = node->next;
    return LIST_ENTRY(node, rc_work, runnable);
}

/* Advances shared memory, one work that sends bit by bit, and one copy: between two steps of a
 * work, others get their turn. */
int comm_pump(engine_member *member)
{
    rc_comm *c = (rc_comm *)member;
    int busy = comm_pump_shared(member);
    rc_work *w = first_that(c, work_can_send_more);
    if (w != NULL)
        comm_send_more(c, w);
    if ((w = first_that(c, keep_is_left)) != NULL) {
        keep_some(w);
        comm_finish_complete(c, w);
    }
    int more = w != NULL || first_that(c, work_can_send_more) != NULL;
    c->member.pumped |= more;
    return busy || more;
}
