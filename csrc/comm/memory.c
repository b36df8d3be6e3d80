/* memory.c - works that go through the memory of one host. See inside.h and coll/shared.h.
 *
 * On one host, all-reduces and broadcasts go through memory and all other calls over links, side by
 * side. Among hosts, an all-reduce is on links only after it has been through memory; until then it
 * counts as not called, for the order and the credit on links, and later calls wait.
 *
 * A rank that has nothing to do in memory polls it, with the engine, or dozes in the engine's wait
 * for events; then the rank that brings what it waits for rings, with a heartbeat on their link. A
 * futex could not be waited for together with sockets, on which the news of a failure comes.
 */
#include <stdlib.h>
#include <unistd.h>

#include "../base/error.h"
#include "inside.h"

/* Most laps of a brief work, which is over before a rank has slept and woken often enough to
 * matter. In longer ones, where ranks outnumber cores, a rank that polls takes time from those that
 * have something to do. */
enum { BRIEF_LAPS = 16 };

/* ---- ranks that share memory ---- */

/* Returns the rank at a place of a host, its ranks in ascending order; -1 past the last. */
static int rank_on(const rc_comm *c, const int32_t *hosts, int32_t host, int place)
{
    for (int rank = 0; rank < c->env.world_size; rank++)
        if (hosts[rank] == host && place-- == 0)
            return rank;
    return -1;
}

static rc_result join_hosts(rc_comm *c, const int32_t *hosts)
{
    int n = c->env.world_size, found = 0;
    work_env *env = &c->among_hosts;
    *env = c->env;
    if ((env->links = calloc((size_t)n, sizeof(peer_link *))) == NULL)
        return RC_NO_MEMORY;
    for (int rank = 0; rank < n; rank++) {
        if (rank_on(c, hosts, hosts[rank], 0) != rank)
            continue; /* not the first of its host */
        int there = rank_on(c, hosts, hosts[rank], c->shared.region.self);
        if (there == c->env.rank)
            env->rank = found;
        env->links[found++] = c->env.links[there];
    }
    env->world_size = c->shared.hosts = found;
    return RC_OK;
}

rc_result comm_share(rc_comm *c, const int32_t *hosts, int fd)
{
    shared_memory *s = &c->shared;
    int ranks = 0, self = 0, rank;
    while ((rank = rank_on(c, hosts, hosts[c->env.rank], ranks)) >= 0) {
        if (rank == c->env.rank)
            self = ranks;
        s->rank_at[ranks++] = rank;
    }
    rc_result result = region_map(&s->region, fd, self, ranks);
    close(fd);
    return result == RC_OK ? join_hosts(c, hosts) : result;
}

void comm_unshare(rc_comm *c)
{
    region_unmap(&c->shared.region);
    free(c->among_hosts.links);
}

/* ---- works ---- */

static void wait_in_line(rc_comm *c, rc_work *w)
{
    w->env = &c->env;
    work_move(w, WORK_IN_LINE);
    w->receives_left = 1; /* keeps it from being complete before it starts */
    w->shared.next = NULL;
    if (c->waiting_tail != NULL)
        c->waiting_tail->shared.next = w;
    else
        c->waiting_head = w;
    c->waiting_tail = w;
}

int comm_start_shared(rc_comm *c, rc_work *w)
{
    int hosts = c->shared.hosts;
    int shares = hosts > 0 && plan_may_share(&w->call, hosts, c->env.algorithm);
    int waits = hosts > 1 && !(w->flags & FRAME_P2P) &&
                (c->shared.entering != NULL || c->waiting_head != NULL);
    if (!shares && !waits)
        return 0;
    int is_first = c->shared.entering == NULL && c->waiting_head == NULL;
    w->is_shared = shares;
    wait_in_line(c, w);
    if (hosts == 1) {
        (void)comm_note_call(c, w);
    }
    if (hosts > 1 || !is_first)
        comm_announce_waiting(c, w);
    /* On one host these can only be calls, which nobody looks at again. */
    rc_result result = hosts == 1 ? comm_unexpected_replay(c, w) : comm_unexpected_check(c, w);
    if (result == RC_OK)
        engine_pump(c->engine, &c->member);
    return 1;
}

/* Adds foreign residuals to a work's values. Among hosts a rank encodes only its chunk; residuals
 * of other elements, as from another world, go with the values to the ranks that encode those. */
static rc_result add_foreign_residual(rc_comm *c, rc_work *w)
{
    rc_feedback *f = w->call.feedback;
    if (f == NULL || !plan_quantises(&w->call))
        return RC_OK;
    feedback_range own = shared_own_chunk(&c->shared, w->call.count);
    if (f->owned.start < own.start || f->owned.end > own.end)
        RC_TRY(feedback_fold(f, work_divisor(&w->call, c->env.contributors)));
    if (feedback_is_zero(f, (feedback_range){0, own.start}) &&
        feedback_is_zero(f, (feedback_range){own.end, f->count}))
        return RC_OK;
    return work_add_residual(w, c->env.contributors);
}

static void next_in_line(rc_comm *c)
{
    rc_work *w = c->waiting_head;
    c->waiting_head = w->shared.next;
    if (c->waiting_head == NULL)
        c->waiting_tail = NULL;
    if (w->is_shared) {
        if (add_foreign_residual(c, w) != RC_OK) {
            comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory to start a collective");
            return;
        }
        shared_enter(&c->shared, w, &c->env);
        return;
    }
    comm_start_on_links(c, w, &c->env);
}

static void open_work(rc_comm *c, rc_work *w)
{
    if (c->shared.hosts == 1)
        return;
    shared_open(&c->shared, w);
    comm_start_on_links(c, w, &c->among_hosts);
}

static void ring(rc_comm *c)
{
    region *r = &c->shared.region;
    for (int i = 0; i < r->ranks; i++)
        if (i != r->self && region_must_ring(r, i))
            comm_send_control(c, c->env.links[c->shared.rank_at[i]], FRAME_HEARTBEAT, c->called, 0,
                              0, -1);
}

/* Takes one step; returns 0 if nothing is left to do now. */
static int advance_shared(rc_comm *c, int *busy)
{
    if (c->shared.entering == NULL && c->waiting_head != NULL) {
        next_in_line(c);
        return 1;
    }
    if (c->shared.head == NULL)
        return 0;
    rc_work *w;
    rc_error why;
    error_clear(&why);
    switch (shared_pump(&c->shared, &w, &why)) {
    case SHARED_WAITS: break;
    case SHARED_BUSY: *busy = 1; break;
    case SHARED_ENTERED: open_work(c, w); return 1;
    case SHARED_LEFT: comm_finish_complete(c, w); return 1;
    case SHARED_FAILED: comm_fail(c, &why); break;
    }
    return 0;
}

int comm_pump_shared(engine_member *member)
{
    rc_comm *c = (rc_comm *)member;
    int busy = 0;
    while (c->state == COMM_RUNNING && advance_shared(c, &busy))
        continue;
    ring(c);
    c->member.pumped = c->shared.head != NULL || c->waiting_head != NULL;
    c->member.expects = c->member.pumped && region_awaits(&c->shared.region);
    c->member.poll_worthwhile =
        c->member.expects && c->shared.head != NULL && c->shared.head->shared.laps <= BRIEF_LAPS;
    return busy && c->member.pumped;
}

int comm_shared_can_advance(const engine_member *member)
{
    return shared_can_advance(&((const rc_comm *)member)->shared);
}

void comm_shared_set_wakeup_wanted(engine_member *member, int wanted)
{
    region_doze(&((rc_comm *)member)->shared.region, wanted);
}
