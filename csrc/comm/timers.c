/* timers.c - deadlines of works, and the release of idle memory. See inside.h. */
#include <stdio.h>

#include "../base/clock.h"
#include "inside.h"

/* Writes "rank 2 has" or "ranks 2, 3 have", the peers whose programs have not called collective seq
 * ("" if all have), and returns the first of them, or -1. */
static int list_missing(const rc_comm *c, uint64_t seq, char *text, size_t size)
{
    enum { REST = 32 };
    char list[160];
    int first = -1, count = 0, left_out = 0;
    size_t used = 0;
    text[0] = list[0] = '\0';
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        if (ln == NULL || link_submitted(ln) > seq)
            continue;
        first = count++ == 0 ? rank : first;
        if (used + REST > sizeof list)
            left_out++;
        else
            used +=
                (size_t)snprintf(list + used, sizeof list - used, "%s%d", used ? ", " : "", rank);
    }
    if (left_out > 0)
        snprintf(list + used, sizeof list - used, " and %d more", left_out);
    if (count > 0)
        snprintf(text, size, count > 1 ? "ranks %s have" : "rank %s has", list);
    return first;
}

static void time_out(rc_comm *c, const rc_work *w)
{
    double seconds = w->call.timeout_ms * 1e-3;
    char missing[192], unacked[320];
    comm_list_unacked(c, unacked, sizeof unacked);
    if (w->call.root == RC_ANY_SOURCE) {
        comm_fail_text(c, RC_TIMEOUT, -1, "no send by any rank within %.3g s", seconds);
        return;
    }
    if (w->flags & FRAME_P2P) {
        comm_fail_text(c, RC_TIMEOUT, w->call.root, "no %s by rank %d within %.3g s%s",
                       w->call.collective == RC_SEND ? "receive" : "send", w->call.root, seconds,
                       unacked);
        return;
    }
    shared_note_calls(&c->shared);
    int first = list_missing(c, w->seq, missing, sizeof missing);
    if (first >= 0)
        comm_fail_text(
            c, RC_TIMEOUT, first,
            "not complete within the timeout of %.3g s, and %s not called it as far as is known%s",
            seconds, missing, unacked);
    else
        comm_fail_text(c, RC_TIMEOUT, -1,
                       "called by every rank, but not complete within the timeout of %.3g s: the "
                       "network is slower than that allows%s",
                       seconds, unacked);
}

static uint64_t check_deadlines(rc_comm *c, uint64_t now)
{
    uint64_t next = ENGINE_NEVER;
    for (list_node *node = c->active.head; node != NULL; node = node->next) {
        rc_work *w = LIST_ENTRY(node, rc_work, place);
        if (w->deadline <= now) {
            time_out(c, w);
            return ENGINE_NEVER;
        }
        if (w->deadline < next)
            next = w->deadline;
    }
    return next;
}

/* Frees buffers that nobody has needed for a while: a program may have many groups. A few in each
 * tick, as each takes a while; a loop, even of long steps, keeps all that it uses. */
static void trim(rc_comm *c, uint64_t now)
{
    enum { UNUSED_S = 5, AT_A_TIME = 8 };
    if (now >= c->trim_at && !pool_trim(&c->buffers, AT_A_TIME))
        c->trim_at = now + UNUSED_S * CLOCK_S;
}

uint64_t comm_tick(engine_member *member, uint64_t now)
{
    rc_comm *c = (rc_comm *)member;
    if (c->state != COMM_RUNNING)
        return ENGINE_NEVER;
    trim(c, now);
    comm_check_closed(c);
    uint64_t judged = comm_check_ports(c, now);
    comm_check_peers(c, now);
    uint64_t next = check_deadlines(c, now);
    uint64_t beat_at = now + comm_tick_interval(c);
    next = next < judged ? next : judged;
    return next < beat_at ? next : beat_at;
}
