/* faults.c - the faults of a job, and the errors that may follow from them. See state.h. */
#include <math.h>
#include <string.h>

#include "state.h"

enum {
    MOST_CRAWL_MS = 3000, /* in which a lane that crawls carries what its socket takes */
    LATE_MS = 2000 /* after what the silence of a peer takes to end it, which begins when its wires
                       are empty (draw_wire): docs/RELIABILITY.md */
};

static const char *const fault_names[FAULT_KINDS] = {
    [FAULT_PAUSE] = "pause",    [FAULT_SLOW] = "slow", [FAULT_NAP] = "nap",
    [FAULT_RST] = "rst",        [FAULT_FIN] = "fin",   [FAULT_DARK_ONE] = "dark one way",
    [FAULT_DARK_BOTH] = "dark", [FAULT_FLIP] = "flip", [FAULT_CLOSE] = "close",
    [FAULT_KILL] = "kill",      [FAULT_STOP] = "stop", [FAULT_ABORT] = "abort",
    [FAULT_VANISH] = "vanish"};

static uint64_t longest_pause(const world *w)
{
    uint64_t ms = 1000;
    for (int i = 0; i < w->job.groups; i++) {
        uint64_t limit = w->job.group[i].config.peer_timeout_ms;
        ms = limit < ms ? limit : ms;
    }
    return ms * MS * 2 / 5;
}

static void silence_process(const fault *f)
{
    for (int i = 0; i < os_lanes(); i++)
        for (int end = 0; end < 2; end++)
            if (os_lane_rank(i, 0) == f->process || os_lane_rank(i, 1) == f->process)
                os_silence(i, end, OS_NEVER);
}

static void give_up(world *w, int process)
{
    os_enter(process);
    for (int i = 0; i < w->job.groups && !os_is_dead(process); i++) {
        const group *g = &w->group[i];
        int rank = job_rank_of(g->is, process);
        if (rank >= 0 && g->members[rank].state == WORKS)
            rc_comm_abort(g->members[rank].comm, "it was drawn");
    }
    want_turn(w, process, os_now());
}

/* Returns the link of a lane, and where it is there; NULL if it has been made anew. */
static sim_link *link_of(world *w, int lane, int *at)
{
    for (int i = 0; i < w->link_count; i++)
        for (*at = 0; *at < w->links[i].count; ++*at)
            if (w->links[i].lanes[*at] == lane)
                return &w->links[i];
    return NULL;
}

static int hurt_lanes(const sim_link *ln)
{
    int hurt = 0;
    for (int i = 0; i < ln->count; i++)
        hurt += ln->hurt[i] != 0;
    return hurt;
}

/* Slows a lane down. Where others carry on it may crawl, and be given up. */
static void slow_down(world *w, const fault *f)
{
    int at;
    sim_link *ln = link_of(w, f->lane, &at);
    int may_crawl = ln != NULL && ln->group->is->config.recovers &&
                    hurt_lanes(ln) - (ln->hurt[at] != 0) < ln->count - 1;
    double factor = 1.0 + (double)pick(w, 4);
    if (may_crawl && pick(w, 2) == 0) {
        const os_wire *wire = &ln->group->is->wire[at / ln->group->is->lanes];
        double most = MOST_CRAWL_MS * MS / (wire->ns_per_byte * wire->send_buffer);
        ln->hurt[at] |= 1U << RC_PEER_LOST;
        w->crawls = 1;
        factor += fmin(most, 20.0 + (double)pick(w, 80));
    }
    os_slow_down(f->lane, factor);
}

static void befall(world *w, const fault *f)
{
    switch (f->kind) {
    case FAULT_PAUSE: os_silence(f->lane, f->end, os_now() + pick(w, longest_pause(w))); break;
    case FAULT_SLOW: slow_down(w, f); break;
    case FAULT_NAP: os_stop(f->process, os_now() + pick(w, longest_pause(w))); break;
    case FAULT_RST: os_cut_lane(f->lane, OS_RST, 1 + (int)pick(w, 3)); break;
    case FAULT_FIN: os_cut_lane(f->lane, OS_FIN, 1 + (int)pick(w, 3)); break;
    case FAULT_DARK_ONE: os_silence(f->lane, f->end, OS_NEVER); break;
    case FAULT_DARK_BOTH:
        os_silence(f->lane, 0, OS_NEVER);
        os_silence(f->lane, 1, OS_NEVER);
        break;
    case FAULT_FLIP: os_flip(f->lane, f->end); break;
    case FAULT_CLOSE: os_close_end(f->lane, f->end); break;
    case FAULT_KILL: os_kill(f->process); break;
    case FAULT_VANISH: silence_process(f); break;
    case FAULT_STOP: os_stop(f->process, os_now() + w->bound + pick(w, 1000 * MS)); break;
    case FAULT_ABORT: give_up(w, f->process); break;
    default: break;
    }
}

static unsigned code_of(const fault *f)
{
    return 1U << (f->kind == FAULT_FLIP    ? RC_PROTOCOL
                  : f->kind == FAULT_ABORT ? RC_ABORTED
                                           : RC_PEER_LOST);
}

/* Returns 1 if an end has said goodbye, or is gone: what was on its way then does not come again.
 */
static int has_left(const sim_link *ln)
{
    const member *a = &ln->group->members[ln->a], *b = &ln->group->members[ln->b];
    return a->comm == NULL || b->comm == NULL || a->comm->env.links[ln->b]->is_told ||
           b->comm->env.links[ln->a]->is_told;
}

/* Notes the fault of a lane in its link. Returns 1 if others of it carry on, or it is made anew:
 * then only silence on all lanes ends a communicator. No lane of a process that is stopped or cut
 * off is made anew (renew_lane). */
static int hurts_no_more(world *w, sim_link *ln, int at, const fault *f)
{
    unsigned ends = 1U << os_lane_rank(f->lane, 0) | 1U << os_lane_rank(f->lane, 1);
    int is_made_anew = !has_left(ln) && f->kind != FAULT_DARK_ONE && f->kind != FAULT_DARK_BOTH &&
                       f->kind != FAULT_CLOSE && !(w->confused & ends);
    unsigned codes = code_of(f);
    if (!ln->group->is->config.recovers)
        return 0;
    if (!is_made_anew)
        ln->hurt[at] |= code_of(f);
    for (int i = 0; i < ln->count; i++)
        codes |= ln->hurt[i];
    if (hurt_lanes(ln) < ln->count && f->kind != FAULT_CLOSE)
        return 1;
    w->codes |= codes; /* whichever of them ends it */
    return 0;
}

/* Returns 1 if a fault of a lane ends nothing. */
static int is_replaced(world *w, const fault *f)
{
    int at;
    if (f->kind > FAULT_CLOSE)
        return 0;
    sim_link *ln = link_of(w, f->lane, &at);
    return ln == NULL || hurts_no_more(w, ln, at, f);
}

/* Notes whom the fault makes a suspect. */
static void suspect(world *w, const fault *f)
{
    if (f->kind < FAULT_HARMLESS || is_replaced(w, f))
        return;
    w->suspects |= 1U << f->process;
    w->codes |= code_of(f);
    for (int i = 0; f->kind == FAULT_ABORT && i < w->job.groups; i++)
        if (w->job.group[i].config.recovers) /* whose last lane is lost hears of no abort */
            w->codes |= 1U << RC_PEER_LOST;
    if (f->kind == FAULT_CLOSE)
        w->codes |= 1U << RC_SYSTEM;
    if (f->kind < FAULT_KILL)
        w->suspects |= 1U << os_lane_rank(f->lane, 0) | 1U << os_lane_rank(f->lane, 1);
    else
        w->confused |= 1U << f->process;
}

static void bring_fault(world *w, fault *f)
{
    if (f->event == 0 || f->kind == FAULT_KILL)
        f->lane %= os_lanes();
    else /* in a journey: of a link, then one of its two */
        f->lane = w->links[f->lane / 2 % w->link_count].lanes[f->lane % 2];
    if (f->event == 0 || f->kind != FAULT_KILL)
        f->process = os_lane_rank(f->lane, f->end);
    os_trace(-1, "fault %s lane %d end %d process %d", fault_names[f->kind], f->lane, f->end,
             f->process);
    w->befallen_at = os_now();
    suspect(w, f);
    befall(w, f);
}

void bring_faults(world *w)
{
    int left = 0;
    for (int i = 0; i < w->job.faults; i++) {
        fault *f = &w->job.fault[i];
        if (f->event != 0 && os_events() >= f->event)
            f->turn = w->turn;
        if (f->turn == w->turn)
            bring_fault(w, f);
        if (f->turn == w->turn)
            f->event = 0;
        left += f->turn > w->turn || f->event != 0;
    }
    if (left == 0 && w->quiet_at == 0) {
        w->quiet_at = os_now();
        os_trace(-1, "no more faults");
    }
}

/* ---- what must be true of an error ---- */

/* Checks that a failure follows from a fault, and names what it befell. A rank that was stopped or
 * cut off may tell anything, at any time. */
static void check_error(world *w, const group *g, const rc_error *error, int rank)
{
    int is_confused = w->confused >> g->is->process[rank] & 1;
    int blamed = error->rank >= 0 && error->rank < g->is->size ? g->is->process[error->rank] : -1;
    if (error->code == RC_TIMEOUT)
        fails(w, "rank %d hangs: %s", rank, error->message);
    else if (w->suspects == 0)
        fails(w, "rank %d fails without a fault: %s", rank, error->message);
    else if (is_confused)
        return;
    else if (!(w->codes >> error->code & 1))
        fails(w, "rank %d takes the fault for another: %s", rank, error->message);
    else if (error->code == RC_SYSTEM && error->rank < 0) /* before the start */
        return;
    else if (blamed < 0 || !(w->suspects >> blamed & 1))
        fails(w, "rank %d blames rank %d: %s", rank, error->rank, error->message);
    else if (error->rank == rank && error->lane >= 0 && error->code != RC_SYSTEM)
        fails(w, "rank %d blames itself for a lane: %s", rank, error->message);
    else if (os_now() > w->befallen_at + w->bound / 2 + w->bound / 20 + LATE_MS * MS)
        fails(w, "rank %d hears late of the fault: %s", rank, error->message);
}

void look_at_error(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    rc_error now;
    rc_comm_error(m->comm, &now);
    if (now.code == m->error.code && strcmp(now.message, m->error.message) == 0)
        return;
    if (m->error.code != RC_OK)
        fails(w, "rank %d: the error \"%s\" became \"%s\"", rank, m->error.message, now.message);
    m->error = now;
    os_trace(g->is->process[rank], "error group %d %s: %s", number_of(w, g),
             rc_result_name(now.code), now.message);
    check_error(w, g, &now, rank);
}
