/* start.c - how a work starts on links and goes on there, and whether those take part that it
 * needs. See inside.h. */
#include "inside.h"

/* ---- peers that have left ---- */

/* Returns 1 if a receive that is not matched never will be: all that could send have left. */
static int has_no_source(const rc_comm *c, const rc_work *w)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        int may_send = w->call.root == RC_ANY_SOURCE || w->call.root == rank;
        if (ln != NULL && may_send && !link_is_left(ln))
            return 0;
    }
    return 1;
}

/* Returns 1 if the work needs calls of a peer that has left, which calls nothing any more. What it
 * sent before it left has come. */
static int needs(const rc_comm *c, const rc_work *w, const peer_link *ln)
{
    if (w->state == WORK_UNMATCHED)
        return has_no_source(c, w);
    if (w->call.collective == RC_RECV)
        return w->call.root == ln->peer && w->receives_left > 0;
    if (w->flags & FRAME_P2P)
        return w->call.root == ln->peer;
    return w->seq >= ln->left_at;
}

static void check_work_left(rc_comm *c, const rc_work *w, const peer_link *ln)
{
    if (link_is_left(ln) && needs(c, w, ln))
        comm_fail_text(c, RC_PEER_LOST, ln->peer, "rank %d has shut down without taking part in it",
                       ln->peer);
}

void comm_check_sources(rc_comm *c, const rc_work *w)
{
    for (int rank = 0; rank < c->env.world_size; rank++)
        if (c->env.links[rank] != NULL)
            check_work_left(c, w, c->env.links[rank]);
}

void comm_check_left(rc_comm *c, const peer_link *ln)
{
    for (list_node *node = c->active.head; node != NULL; node = node->next)
        check_work_left(c, LIST_ENTRY(node, rc_work, place), ln);
}

/* ---- progress ---- */

void comm_send_more(rc_comm *c, rc_work *w)
{
    if (c->state != COMM_RUNNING)
        return;
    if (work_send_more(w) != RC_OK)
        comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a frame");
    if (work_can_send_more(w))
        engine_pump_later(c->engine, &c->member);
    comm_finish_complete(c, w);
}

void comm_start_on_links(rc_comm *c, rc_work *w, work_env *env)
{
    rc_result result = comm_note_call(c, w);
    if (result == RC_OK)
        result = work_start(w, env);
    if (result != RC_OK) {
        comm_fail_text(c, result, c->env.rank, "a collective could not start: %s",
                       rc_result_name(result));
        return;
    }
    if (w->state == WORK_ON_LINKS && (w->machine->send_more != NULL || keep_is_left(w)))
        list_append(&c->runnable, &w->runnable);
    comm_announce(c, w, env); /* also if the work is over: others' calls must still match */
    comm_unexpected_replay(c, w);
    if (w->call.collective == RC_RECV)
        check_work_left(c, w, c->env.links[w->call.root]);
    comm_finish_complete(c, w);
    if (work_can_send_more(w) || keep_is_left(w))
        engine_pump_later(c->engine, &c->member);
}
