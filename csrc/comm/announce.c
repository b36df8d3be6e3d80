/* announce.c - announcements of calls to peers. See inside.h.
 *
 * Data shows that its collective has been called, and heartbeats report all collectives. Beyond
 * that a call is announced to a peer that would wait, or hold back data, or miss that the calls
 * differ. A receive is announced by a call frame of its own; until it is, or until it is over, it
 * stands in a list of the link. A receive from any source is not announced before it has a send; so
 * a send that is held back for want of credit asks its receiver. What could not be sent, without
 * memory or a lane, is sent again with the next tick, as nothing else would replace it.
 */
#include "inside.h"

/* ---- receives that the peer does not know of ---- */

static int tell(rc_comm *c, peer_link *ln, const rc_work *w)
{
    return comm_send_control(c, ln, FRAME_CALL, w->seq, w->fingerprint, w->flags, -1);
}

/* Returns 1 if a later receive's call frame will announce this one: it implies all receives of its
 * tag before it. */
static int is_implied(const peer_link *ln, const rc_work *w)
{
    const tag_count *started = tags_find(&ln->started, w->call.tag);
    return started != NULL && tags_number(w->seq) + 1 != started->receives;
}

static void tell_receives(rc_comm *c, peer_link *ln)
{
    ln->announce_pending = 0;
    while (ln->unannounced.head != NULL) {
        rc_work *w = LIST_ENTRY(ln->unannounced.head, rc_work, unannounced);
        if (!is_implied(ln, w) && !tell(c, ln, w)) {
            ln->announce_pending = 1;
            return;
        }
        list_remove(&ln->unannounced, &w->unannounced);
    }
}

void comm_announce_all(rc_comm *c, peer_link *ln)
{
    comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, -1);
    tell_receives(c, ln);
}

/* ---- sends that are held back ---- */

static int ask_for(rc_comm *c, peer_link *ln, const frame_header *h)
{
    return comm_send_control(c, ln, FRAME_CALL, h->seq, h->fingerprint, FRAME_P2P | FRAME_ASKS, -1);
}

/* Asks for the receive of a send that is held back. */
static void ask_for_receive(rc_comm *c, peer_link *ln, const rc_work *w)
{
    frame_header h = {.seq = w->seq, .fingerprint = w->fingerprint};
    if (w->call.collective == RC_SEND && held_first_of_tag(&ln->held, w->call.tag) != NULL)
        ln->asks_pending |= !ask_for(c, ln, &h);
}

/* Asks for the receives of all sends that are held back. */
static void ask_for_all(rc_comm *c, peer_link *ln)
{
    const out_frame *before = NULL;
    for (const out_frame *f = ln->held.oldest; f != NULL; before = f, f = f->next)
        if ((before == NULL || before->header.seq != f->header.seq) && !ask_for(c, ln, &f->header))
            return;
    ln->asks_pending = 0;
}

void comm_announce_again(rc_comm *c, peer_link *ln)
{
    if (ln->announce_pending)
        tell_receives(c, ln);
    if (ln->asks_pending)
        ask_for_all(c, ln);
}

/* ---- when a work starts ---- */

/* Returns 1 if the peer is far ahead. It may be out of credit then, and hold back the data wanted
 * here with all the rest, unless it knows what has been called: so calls are announced when it gets
 * there, and each one from then on. Below this, calls that it does not know of leave it credit for
 * a segment or more. */
int comm_is_far_ahead(const peer_link *ln)
{
    return ln->early_bytes > ln->credit / 4;
}

/* Returns 1 if the work's deadline comes before the next heartbeats. */
static int is_hurried(const rc_comm *c, const rc_work *w)
{
    return !(w->flags & FRAME_P2P) && w->call.timeout_ms < 2 * c->config.heartbeat_ms;
}

void comm_announce_waiting(rc_comm *c, const rc_work *w)
{
    for (int rank = 0; is_hurried(c, w) && rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        if (ln != NULL && c->shared.hosts == 1)
            tell(c, ln, w);
        else if (ln != NULL) /* it is not started, which a call would say */
            comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, -1);
    }
}

/* Returns 1 for three reasons to announce: the peer may have to hold data back until it knows of
 * the call (it has much to send, or is far ahead); a neighbour that gets no data from this rank
 * could not find out that the calls differ, unless others report it; and a deadline that passes
 * before the next heartbeats must not be held against a rank that has called. */
static int is_wanted(const rc_comm *c, const rc_work *w, const peer_link *ln, int peer)
{
    const plan *p = &w->plan;
    uint64_t segment = work_segment_bytes(w, p->segment_elems);
    uint64_t expected = w->receives_left * segment;
    int bulk = expected > ln->credit / 2 && plan_receives(p, peer) * segment > ln->credit / 2;
    int silent = peer == (p->rank + 1) % p->world_size && !(w->flags & FRAME_P2P) &&
                 !plan_detects_any_mismatch(p) && !plan_starts_towards(p, peer);
    int ahead = comm_is_far_ahead(ln) && plan_receives(p, peer) > 0;
    return bulk || ahead || silent || is_hurried(c, w);
}

void comm_announce(rc_comm *c, rc_work *w, const work_env *env)
{
    for (int peer = 0; peer < w->plan.world_size; peer++) {
        peer_link *ln = env->links[peer];
        if (ln == NULL)
            continue;
        if (w->call.root == ln->peer)
            ask_for_receive(c, ln, w);
        int told = is_wanted(c, w, ln, peer) && tell(c, ln, w);
        if (!told && w->state == WORK_ON_LINKS && w->call.collective == RC_RECV &&
            w->call.root == ln->peer) {
            list_append(&ln->unannounced, &w->unannounced);
            ln->announce_pending |= is_wanted(c, w, ln, peer);
        }
    }
}
