/* comm_timers.c - deadlines of works, heartbeats, peers that fall silent, memory that lies idle.
 * See comm.h. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "comm.h"

uint64_t comm_tick_interval(const rc_comm *c)
{
    return c->config.heartbeat_ms * CLOCK_MS / 2;
}

/* "2, 3" of the peers that have not called collective seq; empty if all have. */
static int list_missing(const rc_comm *c, uint64_t seq, char *text, size_t size)
{
    int first = -1;
    size_t used = 0;
    text[0] = '\0';
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        if (ln == NULL || ln->called > seq || used + 16 > size)
            continue;
        used += (size_t)snprintf(text + used, size - used, "%s%d", used ? ", " : "", rank);
        if (first < 0)
            first = rank;
    }
    return first;
}

static void time_out(rc_comm *c, const rc_work *w)
{
    double seconds = w->call.timeout_ms * 1e-3;
    char missing[160];
    if (w->call.root == RC_ANY_SOURCE) {
        comm_fail_text(c, RC_TIMEOUT, -1, "no send by any rank within %.3g s", seconds);
        return;
    }
    if (w->flags & FRAME_P2P) {
        comm_fail_text(c, RC_TIMEOUT, w->call.root, "no %s by rank %d within %.3g s",
                       w->call.collective == RC_SEND ? "receive" : "send", w->call.root, seconds);
        return;
    }
    shared_note_calls(&c->shared);
    int first = list_missing(c, w->seq, missing, sizeof missing);
    if (first >= 0)
        comm_fail_text(
            c, RC_TIMEOUT, first,
            "not complete within the timeout of %.3g s, and rank %s has not called it as far as is "
            "known",
            seconds, missing);
    else
        comm_fail_text(c, RC_TIMEOUT, -1,
                       "called by every rank, but not complete within the timeout of %.3g s: the "
                       "network is slower than that allows",
                       seconds);
}

static uint64_t check_deadlines(rc_comm *c, uint64_t now)
{
    uint64_t next = ENGINE_NEVER;
    for (rc_work *w = c->active_head; w != NULL; w = w->next) {
        if (w->deadline <= now) {
            time_out(c, w);
            return ENGINE_NEVER;
        }
        if (w->deadline < next)
            next = w->deadline;
    }
    return next;
}

static uint64_t last_sign(const peer_link *ln)
{
    uint64_t last = 0;
    for (int i = 0; i < ln->lane_count; i++)
        if (ln->lanes[i]->last_rx > last)
            last = ln->lanes[i]->last_rx;
    return last;
}

static void beat(rc_comm *c, peer_link *ln, uint64_t now)
{
    comm_announce_again(c, ln);
    for (int i = 0; i < ln->lane_count; i++) {
        lane *l = ln->lanes[i];
        if (now - l->last_rx >= comm_tick_interval(c))
            lane_stir(l);
        int is_left = atomic_load(&l->out.sent_bytes) >= l->beat_end; /* the last heartbeat */
        if (l->source.fd >= 0 && is_left && !l->goodbye &&
            now - l->out.last_tx >= c->config.heartbeat_ms * CLOCK_MS &&
            comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, i))
            l->beat_end = l->pushed;
    }
}

/* Time in which this process itself did not run says nothing about its peers. */
static void forgive(rc_comm *c, uint64_t now)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            ln->lanes[i]->last_rx = now;
    }
}

static void check_peers(rc_comm *c, uint64_t now)
{
    uint64_t limit = c->config.peer_timeout_ms * CLOCK_MS;
    if (c->last_tick != 0 && now - c->last_tick > limit / 2)
        forgive(c, now);
    c->last_tick = now;
    for (int rank = 0; rank < c->env.world_size && c->state == COMM_RUNNING; rank++) {
        peer_link *ln = c->env.links[rank];
        if (ln == NULL || ln->goodbyes == ln->lane_count)
            continue;
        uint64_t last = last_sign(ln);
        if (now > last && now - last > limit)
            comm_fail_text(c, RC_PEER_LOST, rank,
                           "rank %d has given no sign of life for %.1f s: its process is stopped, "
                           "or its host or network is down",
                           rank, clock_seconds(last, now));
        else if (!c->leaving)
            beat(c, ln, now);
    }
}

/* Buffers that nothing needed for so long go back to the system: a program may have many groups. A
 * few in each tick, as each takes a while; a loop, even of long steps, keeps all that it uses. */
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
    check_peers(c, now);
    uint64_t next = c->state == COMM_RUNNING ? check_deadlines(c, now) : ENGINE_NEVER;
    uint64_t beat_at = now + comm_tick_interval(c);
    return next < beat_at ? next : beat_at;
}
