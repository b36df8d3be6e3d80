/* match.c - matching of receives and sends. See inside.h.
 *
 * The n-th receive of a tag from a rank takes the n-th send of that tag by it, so most receives
 * know their send when they are submitted. A receive from any source does not: it takes the next
 * send of its tag by whichever rank is first, and receives called after it must leave it that send.
 * So it, and all receives that are called while one is without a number, are unmatched: they are
 * numbered under the engine's lock, those of each tag in the order in which they were called, and
 * started then. So the first unmatched one of a tag is always from any source, and waits for a
 * send. */
#include "inside.h"

/* Gives a send or receive the next number of its tag. Under the inbox lock. */
static rc_result take_number(rc_comm *c, rc_work *w, int peer)
{
    tag_count *next = tags_get(&c->env.links[peer]->numbers, w->call.tag);
    if (next == NULL)
        return RC_NO_MEMORY;
    w->seq =
        tags_name(w->call.tag, w->call.collective == RC_SEND ? next->sends++ : next->receives++);
    return RC_OK;
}

rc_result comm_number(rc_comm *c, rc_work *w)
{
    int is_receive = w->call.collective == RC_RECV;
    if (!is_receive || (w->call.root != RC_ANY_SOURCE && c->unnumbered == 0))
        return take_number(c, w, w->call.root);
    w->matched_later = 1;
    c->unnumbered++;
    return RC_OK;
}

/* Returns the name of the next send by a peer that a receive of this tag takes. */
static uint64_t next_name(rc_comm *c, const peer_link *ln, uint32_t tag)
{
    pthread_mutex_lock(&c->engine->inbox_lock);
    const tag_count *next = tags_find(&ln->numbers, tag);
    uint64_t name = tags_name(tag, next != NULL ? next->receives : 0);
    pthread_mutex_unlock(&c->engine->inbox_lock);
    return name;
}

static void start_from(rc_comm *c, rc_work *w, int peer)
{
    pthread_mutex_lock(&c->engine->inbox_lock);
    rc_result result = take_number(c, w, peer);
    c->unnumbered--;
    pthread_mutex_unlock(&c->engine->inbox_lock);
    w->call.root = peer;
    comm_active_rename(c, w);
    if (result == RC_OK)
        comm_start_on_links(c, w, &c->env);
    else
        comm_fail_text(c, result, c->env.rank, "no memory for another tag");
}

/* Returns the rank whose send a receive from any source would take now, as it has come or is held
 * back until then; -1 if there is none. */
static int find_sender(rc_comm *c, uint32_t tag)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        uint64_t name = ln != NULL ? next_name(c, ln, tag) : 0;
        if (ln != NULL && (comm_unexpected_has_send(ln, name) || link_awaits_send(ln, name)))
            return rank;
    }
    return -1;
}

/* Matches the unmatched receives of one tag in the order of their calls: one from any source that
 * must wait has those behind it wait.
 */
void comm_match_receives(rc_comm *c, uint32_t tag)
{
    rc_work *w;
    while ((w = comm_active_first_unmatched(c, tag)) != NULL) {
        int peer = w->call.root == RC_ANY_SOURCE ? find_sender(c, tag) : w->call.root;
        if (peer < 0)
            return;
        start_from(c, w, peer);
    }
}

int comm_match(rc_comm *c, peer_link *ln, const frame_header *h)
{
    uint32_t tag = tags_tag(h->seq);
    if (!comm_is_p2p(h) || c->unnumbered == 0 || h->seq != next_name(c, ln, tag))
        return 0;
    rc_work *w = comm_active_first_unmatched(c, tag);
    if (w == NULL)
        return 0;
    start_from(c, w, ln->peer);
    comm_match_receives(c, tag);
    return w->seq == h->seq;
}
