/* comm_match.c - which receive takes which send. See comm.h.
 *
 * The n-th receive of a tag from a rank takes the n-th send of that tag by it, so most receives
 * know their send when they are submitted. A receive from any source does not: it takes the next
 * send of its tag by whoever is first, and what is called after it must leave it that. So it, and
 * all receives that are called while one is without a number, are late: they are numbered under the
 * engine's lock, in the order in which they were called, and started then. */
#include "comm.h"

/* Under the inbox lock. */
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
    w->late = 1;
    c->unnumbered++;
    return RC_OK;
}

static int is_open(const rc_work *w, uint32_t tag)
{
    return w->late && w->env == NULL && w->call.tag == tag;
}

/* The number of the next send by a peer that a receive of this tag takes. */
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
    if (result == RC_OK)
        comm_start_on_links(c, w, &c->env);
    else
        comm_fail_text(c, result, c->env.rank, "no memory for another tag");
}

/* Who has sent what a receive from any source would take now; -1: nobody. */
static int find_sender(rc_comm *c, uint32_t tag)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        if (ln != NULL && comm_has_early_send(ln, next_name(c, ln, tag)))
            return rank;
    }
    return -1;
}

/* 1 if a receive from any source, called before w, may still take what w would. */
static int must_wait(const rc_comm *c, const rc_work *w)
{
    for (const rc_work *other = c->active_head; other != w; other = other->next)
        if (is_open(other, w->call.tag) && other->call.root == RC_ANY_SOURCE)
            return 1;
    return 0;
}

/* Starts the first that can be. 0: there is none. */
static int start_one(rc_comm *c)
{
    for (rc_work *w = c->active_head; w != NULL; w = w->next) {
        if (!is_open(w, w->call.tag) || must_wait(c, w))
            continue;
        int any = w->call.root == RC_ANY_SOURCE;
        int peer = any ? find_sender(c, w->call.tag) : w->call.root;
        if (peer >= 0) {
            start_from(c, w, peer);
            return 1;
        }
    }
    return 0;
}

void comm_match_late(rc_comm *c)
{
    while (c->state == COMM_RUNNING && start_one(c))
        continue;
}

int comm_match(rc_comm *c, peer_link *ln, const frame_header *h)
{
    uint32_t tag = tags_tag(h->seq);
    if (!(h->flags & FRAME_P2P) || c->unnumbered == 0 || h->seq != next_name(c, ln, tag))
        return 0;
    rc_work *w = c->active_head;
    while (w != NULL && !(is_open(w, tag) && w->call.root == RC_ANY_SOURCE))
        w = w->next;
    if (w == NULL)
        return 0;
    work_retain(w);
    start_from(c, w, ln->peer);
    int started = w->seq == h->seq;
    work_release(w);
    comm_match_late(c);
    return started;
}

int comm_has_no_source(const rc_comm *c, const rc_work *w)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        int may_send = w->call.root == RC_ANY_SOURCE || w->call.root == rank;
        if (ln != NULL && may_send && ln->goodbyes < ln->lane_count)
            return 0;
    }
    return 1;
}
