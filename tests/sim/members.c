/* members.c - communicators, from bring-up to their end. See state.h. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

enum {
    LEAVE_MS = 3000,
    LEAVE_LONG_MS = 15000, /* where a lane crawls */
    /* How many lanes of a job are made anew that are well, each after so many turns. */
    MOST_ANEW = 10,
    TURNS_WELL = 40
};

static void join_ranks(world *w, group *g, int a, int b)
{
    sim_link *ln = &w->links[w->link_count++];
    *ln = (sim_link){.group = g, .a = a, .b = b, .count = g->is->rails * g->is->lanes};
    int is_probed = pick(w, 2) == 0;
    for (int lane = 0; lane < g->is->rails * g->is->lanes; lane++) {
        int fds[2], rail = lane / g->is->lanes;
        ln->lanes[lane] = os_lane(g->is->process[a], g->is->process[b], &g->is->wire[rail], fds);
        double rate = is_probed ? 1e9 / g->is->wire[rail].ns_per_byte : 0.0;
        check(w, rc_comm_add_lane(g->members[a].comm, b, rail, fds[0], rate), "add_lane");
        check(w, rc_comm_add_lane(g->members[b].comm, a, rail, fds[1], rate), "add_lane");
    }
}

/* Gives the ranks of each host their memory. */
static void share_memory(world *w, group *g)
{
    for (int host = 0; host < g->is->hosts; host++) {
        int fd = memfd_create("simulated", MFD_ALLOW_SEALING);
        for (int rank = 0; rank < g->is->size; rank++)
            if (g->is->host[rank] == host)
                check(w, rc_comm_share(g->members[rank].comm, g->is->host, dup(fd)), "share");
        close(fd);
    }
}

void open_group(world *w, group *g)
{
    rc_comm_config config = g->is->config;
    g->is_open = 1;
    for (int rank = 0; rank < g->is->size; rank++) {
        config.rank = rank;
        os_enter(g->is->process[rank]);
        check(w, rc_comm_create(&g->members[rank].comm, w->engines[g->is->process[rank]], &config),
              "create");
        want_turn(w, g->is->process[rank], os_now());
    }
    for (int a = 0; a < g->is->size; a++)
        for (int b = a + 1; b < g->is->size; b++)
            join_ranks(w, g, a, b);
    share_memory(w, g);
}

void start_member(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    if (m->state != WAITS || m->comm == NULL)
        return;
    rc_result result = rc_comm_start(m->comm);
    if (!(w->codes >> result & 1)) /* a descriptor may be closed by now */
        check(w, result, "start");
    m->state = WORKS;
}

/* ---- lanes that are made anew ---- */

static int is_there(const group *g, int rank)
{
    const member *m = &g->members[rank];
    return m->comm != NULL && (m->state == WORKS || m->state == LEAVES) &&
           !os_is_dead(g->is->process[rank]);
}

static void hand_over(world *w, const handover *h)
{
    os_enter(h->group->is->process[h->rank]);
    os_trace(h->group->is->process[h->rank],
             "takes over lane %d to rank %d: %u %u, %u %u and %u %u, %u %u", h->lane, h->peer,
             h->ours.made, h->ours.received, h->ours.before, h->ours.previous, h->theirs.made,
             h->theirs.received, h->theirs.before, h->theirs.previous);
    if (is_there(h->group, h->rank))
        rc_comm_renew_lane(h->group->members[h->rank].comm, h->peer, h->lane, h->fd, &h->ours,
                           &h->theirs);
    else
        os_close_fd(h->fd);
    want_turn(w, h->group->is->process[h->rank], os_now());
}

/* Hands a new socket over now, later or never. */
static void hand_over_some_time(world *w, const handover *h)
{
    uint64_t when = pick(w, 4);
    if (when == 0) {
        os_close_fd(h->fd);
        return;
    }
    for (int i = 0; when == 1 && i < MOST_LATE; i++)
        if (w->late[i].group == NULL) {
            w->late[i] = *h;
            want_turn(w, h->group->is->process[h->rank], os_now() + MS);
            return;
        }
    hand_over(w, h);
}

static void hand_over_late(world *w, const group *g, int rank)
{
    for (int i = 0; i < MOST_LATE; i++)
        if (w->late[i].group == g && w->late[i].rank == rank && pick(w, 2) == 0) {
            handover h = w->late[i];
            w->late[i].group = NULL;
            hand_over(w, &h);
        } else if (w->late[i].group == g && w->late[i].rank == rank) {
            want_turn(w, g->is->process[rank], os_now() + MS);
        }
}

/* But to a process that is stopped or cut off. */
static void renew_lane(world *w, group *g, sim_link *ln, int lane)
{
    handover a = {g, ln->a, ln->b, lane, -1, {0}, {0}}, b = {g, ln->b, ln->a, lane, -1, {0}, {0}};
    int fds[2], process = g->is->process[ln->b];
    unsigned ends = 1U << process | 1U << g->is->process[ln->a];
    if (w->confused & ends)
        return;
    want_turn(w, process, os_now() + MS);
    if (pick(w, 4) != 0 || os_lanes() > OS_MOST_LANES / 2 || !is_there(g, ln->a))
        return;
    os_enter(g->is->process[ln->a]);
    if (rc_comm_drop_lane(g->members[ln->a].comm, ln->b, lane, &a.ours) != RC_OK)
        return;
    os_enter(process);
    if (rc_comm_drop_lane(g->members[ln->b].comm, ln->a, lane, &b.ours) != RC_OK)
        return;
    a.theirs = b.ours;
    b.theirs = a.ours;
    ln->lanes[lane] =
        os_lane(g->is->process[ln->a], process, &g->is->wire[lane / g->is->lanes], fds);
    ln->hurt[lane] = 0;
    a.fd = fds[0];
    b.fd = fds[1];
    os_trace(process, "makes lane %d anew, as lane %d", lane, ln->lanes[lane]);
    hand_over_some_time(w, &a);
    hand_over_some_time(w, &b);
    os_enter(process);
}

static int has_told(const struct lane *l)
{
    return ((const peer_link *)l->link)->is_told;
}

/* Finds the peers that have ended: nobody listens for them. */
static void lose_the_dead(world *w, const group *g, int rank)
{
    for (int peer = 0; peer < g->is->size && is_there(g, rank); peer++)
        if (peer != rank && os_is_dead(g->is->process[peer]) && pick(w, 4) == 0)
            rc_comm_lose_peer(g->members[rank].comm, peer);
}

/* Checks that no lane is given up without a reason, as that its wire is slow. */
static void check_loss(world *w, const group *g, int rank, const struct lane *l)
{
    const os_wire *wire = &g->is->wire[l->rail];
    double full = wire->ns_per_byte * (wire->send_buffer + wire->receive_buffer);
    int may_crawl = full > 200e6 && strstr(l->error.message, " is slow: ") != NULL;
    int is_broken = l->error.code != RC_OK && !may_crawl;
    if (l->state == LANE_LOST && is_broken && w->befallen_at == 0 && w->anew == 0)
        fails(w, "rank %d of group %d gives up a healthy lane: %s", rank, number_of(w, g),
              l->error.message);
}

/* The higher rank dials. */
void renew_lanes(world *w, group *g, int rank)
{
    hand_over_late(w, g, rank);
    os_enter(g->is->process[rank]);
    if (g->is->config.recovers)
        lose_the_dead(w, g, rank);
    for (int i = 0; i < w->link_count && g->is->config.recovers; i++) {
        sim_link *ln = &w->links[i];
        for (int lane = 0; lane < g->is->rails * g->is->lanes; lane++) {
            if (ln->group != g || ln->b != rank || !is_there(g, rank))
                continue;
            const struct lane *l = g->members[rank].comm->env.links[ln->a]->lanes[lane];
            const struct lane *far =
                is_there(g, ln->a) ? g->members[ln->a].comm->env.links[rank]->lanes[lane] : l;
            check_loss(w, g, rank, l);
            if (far != l)
                check_loss(w, g, ln->a, far);
            int is_well = l->state != LANE_LOST && far->state != LANE_LOST;
            if (!is_well || (w->anew < MOST_ANEW && !has_told(l) && !has_told(far) &&
                             pick(w, TURNS_WELL) == 0 && w->anew++ < MOST_ANEW))
                renew_lane(w, g, ln, lane);
        }
    }
}

/* ---- splitting ---- */

/* Returns 1 if a process has made all calls of the first group. */
static int is_through(const world *w, int process)
{
    const group *g = &w->group[0];
    const member *m = &g->members[job_rank_of(g->is, process)];
    return m->state == WORKS && m->error.code == RC_OK && m->next == g->is->calls &&
           m->in_flight == 0 && !os_is_dead(process);
}

void split(world *w, group *g)
{
    int there = 0;
    for (int rank = 0; rank < g->is->size; rank++)
        there += is_through(w, g->is->process[rank]);
    if (g->is->is_split && !g->is_open && there == g->is->size)
        open_group(w, g);
}

int may_come(const world *w, const group *g)
{
    int may = 1;
    for (int rank = 0; rank < g->is->size; rank++) {
        int process = g->is->process[rank];
        const member *m = &w->group[0].members[job_rank_of(w->group[0].is, process)];
        may &= m->state <= WORKS && m->error.code == RC_OK && !os_is_dead(process);
    }
    return g->is_open || may;
}

/* Returns 1 if the process is still to be, or is, in a group that comes of the first. */
static int is_to_split(const world *w, int process)
{
    const group *g = &w->group[1];
    int rank = w->job.groups > 1 && g->is->is_split ? job_rank_of(g->is, process) : -1;
    return rank >= 0 && g->members[rank].state != GONE && may_come(w, g);
}

/* ---- leaving ---- */

static void close_member(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    rc_comm_close(m->comm, 0);
    if (m->comm->buffers.taken != 0)
        fails(w, "rank %d keeps %d buffers", rank, m->comm->buffers.taken);
    rc_comm_free(m->comm);
    m->comm = NULL;
    m->state = GONE;
    w->befallen_at = os_now(); /* behind a dark lane its silence begins now */
    os_trace(g->is->process[rank], "gone group %d", number_of(w, g));
    want_turn(w, g->is->process[rank], os_now()); /* the process may leave another, too */
}

void leave(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    int process = g->is->process[rank], failed = m->error.code != RC_OK;
    int stays = g == w->group && !failed && is_to_split(w, process);
    int is_over = m->in_flight == 0 && (m->next == g->is->calls || failed);
    if (m->state == WORKS && is_over && !stays) {
        m->state = LEAVES;
        m->leave_until = os_now() + (w->crawls ? LEAVE_LONG_MS : LEAVE_MS) * MS;
        os_trace(process, "leaves group %d", number_of(w, g));
    }
    if (m->state != LEAVES)
        return;
    if (rc_comm_leave(m->comm, 0) == RC_OK || os_now() >= m->leave_until)
        close_member(w, g, rank);
    else
        want_turn(w, process, os_now() + MS);
}

void end_member(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    os_enter(g->is->process[rank]);
    if (m->comm != NULL)
        rc_comm_free(m->comm);
    drop_tasks(w, m, rank);
    rc_feedback_free(m->residuals);
}
