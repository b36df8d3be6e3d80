/* active.c - the works in flight. See inside.h.
 *
 * A frame names its work: a collective by its seq, the receive of a send by its tag and number
 * among those between the two ranks. So a work stands in the table where frames look for it: a
 * collective in the communicator's, a receive in that of its link; a send in none, since no data
 * comes for it; a receive that has no number yet in that of the unmatched ones, by its tag.
 */
#include "inside.h"

#include <stddef.h>

/* Largest work in flight for which polling sockets pays where ranks outnumber cores; with longer
 * ones a rank that polls takes time from those that have something to do. */
enum { BRIEF_BYTES = 1 << 20 };

static rc_work *work_of(keyed_entry *entry)
{
    return entry == NULL ? NULL : (rc_work *)((char *)entry - offsetof(rc_work, by_name));
}

static void enter(rc_work *w, keyed_queues *index, uint64_t key)
{
    w->index = index;
    keyed_push(index, &w->by_name, key);
}

static void remove_from_index(rc_work *w)
{
    if (w->index != NULL)
        keyed_remove(w->index, &w->by_name);
    w->index = NULL;
}

void comm_active_add(rc_comm *c, rc_work *w)
{
    list_append(&c->active, &w->place);
    c->engine->active++;
    w->is_large = w->call.count > BRIEF_BYTES / rc_dtype_size(w->call.dtype);
    c->engine->large_works += w->is_large;
    if (w->matched_later)
        enter(w, &c->unmatched, w->call.tag);
    else if (!(w->flags & FRAME_P2P))
        enter(w, &c->collectives, w->seq);
    else if (w->call.collective == RC_RECV)
        enter(w, &c->env.links[w->call.root]->receives, w->seq);
}

void comm_active_rename(rc_comm *c, rc_work *w)
{
    remove_from_index(w);
    enter(w, &c->env.links[w->call.root]->receives, w->seq);
}

void comm_active_remove(rc_comm *c, rc_work *w)
{
    list_remove(&c->active, &w->place);
    c->engine->active--;
    c->engine->large_works -= w->is_large;
    remove_from_index(w);
    list_remove(&c->runnable, &w->runnable);
    if (w->unannounced.is_in)
        list_remove(&c->env.links[w->call.root]->unannounced, &w->unannounced);
}

rc_work *comm_active_find(rc_comm *c, const frame_header *h, int from)
{
    int is_send = (h->flags & FRAME_P2P) != 0;
    return work_of(keyed_first(is_send ? &c->env.links[from]->receives : &c->collectives, h->seq));
}

rc_work *comm_active_first_unmatched(rc_comm *c, uint32_t tag)
{
    return work_of(keyed_first(&c->unmatched, tag));
}

rc_result comm_note_call(rc_comm *c, const rc_work *w)
{
    if (w->call.collective == RC_RECV) {
        tag_count *started = tags_get(&c->env.links[w->call.root]->started, w->call.tag);
        if (started == NULL)
            return RC_NO_MEMORY;
        started->receives = tags_number(w->seq) + 1;
        link_note_receive(c->env.links[w->call.root], w->seq);
    } else if (!(w->flags & FRAME_P2P)) {
        c->history[w->seq % COMM_HISTORY] = w->fingerprint;
        c->called++;
    }
    return RC_OK;
}
