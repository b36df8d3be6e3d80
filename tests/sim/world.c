/* world.c - see world.h. */
#include "world.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../csrc/comm/comm.h"
#include "ledger.h"
#include "packed.h"

enum {
    MOST_TURNS = 400000,
    LEAVE_MS = 1000,
    LATE_MS = 2000 /* after what the silence of a peer takes to end it: docs/RELIABILITY.md */
};

static const char *const fault_names[FAULT_KINDS] = {
    [FAULT_PAUSE] = "pause",    [FAULT_SLOW] = "slow", [FAULT_NAP] = "nap",
    [FAULT_RST] = "rst",        [FAULT_FIN] = "fin",   [FAULT_DARK_ONE] = "dark one way",
    [FAULT_DARK_BOTH] = "dark", [FAULT_FLIP] = "flip", [FAULT_CLOSE] = "close",
    [FAULT_KILL] = "kill",      [FAULT_STOP] = "stop", [FAULT_ABORT] = "abort",
    [FAULT_VANISH] = "vanish"};

/* A call of a rank in flight. */
typedef struct task {
    rc_work *work;
    const sim_call *what;
    uint8_t *src, *dst;
    packed *packed;
    int is_let_go; /* the core has the work alone, until it hands it over at its end */
} task;

/* A rank in a group: one communicator. */
typedef struct member {
    enum { WAITS, WORKS, LEAVES, GONE } state;
    rc_comm *comm;
    rc_feedback *residuals;
    int next, in_flight;
    task tasks[JOB_MOST_IN_FLIGHT];
    rc_error error;
    uint64_t leave_until;
} member;

typedef struct group {
    const job_group *is;
    int is_open;
    member members[OS_MOST_RANKS]; /* by rank */
    ledger ledger;
} group;

typedef struct world {
    job job;
    uint64_t began, quiet_at;
    uint64_t calls_at[OS_MOST_RANKS]; /* its next call, at the earliest; by process, as the next */
    uint64_t due[OS_MOST_RANKS];      /* when its program wants a turn */
    int turn, failed;
    unsigned suspects, confused; /* processes that may be blamed; that may blame anyone */
    unsigned codes;              /* bits of the results with which calls may fail */
    uint64_t befallen_at;        /* when the last fault came, or the last rank went */
    uint64_t bound;              /* ns that everything may take once there are no more faults */
    rc_engine *engines[OS_MOST_RANKS];
    group group[JOB_MOST_GROUPS];
} world;

static void fails(world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fails(world *w, const char *format, ...)
{
    va_list args;
    if (w->failed++)
        return;
    fprintf(stderr, "seed %llu: at %.6f s, turn %d: ", (unsigned long long)w->job.seed,
            (double)(os_now() - w->began) * 1e-9, w->turn);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    os_trace(-1, "FAILS");
}

static uint64_t pick(world *w, uint64_t bound)
{
    return draw_below(&w->job.random, bound);
}

static void want_turn(world *w, int process, uint64_t at)
{
    if (at < w->due[process])
        w->due[process] = at;
    os_look_at(process, at);
}

static int number_of(const world *w, const group *g)
{
    return (int)(g - w->group);
}

/* ---- bring-up ---- */

static void check(world *w, rc_result result, const char *what)
{
    if (result != RC_OK)
        fails(w, "%s: %s", what, rc_result_name(result));
}

static void join_ranks(world *w, group *g, int a, int b)
{
    for (int lane = 0; lane < g->is->rails * g->is->lanes; lane++) {
        int fds[2], rail = lane / g->is->lanes;
        os_lane(g->is->process[a], g->is->process[b], &g->is->wire[rail], fds);
        check(w, rc_comm_add_lane(g->members[a].comm, b, rail, fds[0], 0.0), "add_lane");
        check(w, rc_comm_add_lane(g->members[b].comm, a, rail, fds[1], 0.0), "add_lane");
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

/* Makes the communicators, which the ranks start in a turn of theirs. */
static void open_group(world *w, group *g)
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

static void start_member(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    if (m->state != WAITS || m->comm == NULL)
        return;
    rc_result result = rc_comm_start(m->comm);
    if (!(w->codes >> result & 1)) /* a descriptor may be closed by now */
        check(w, result, "start");
    m->state = WORKS;
}

static void open_world(world *w)
{
    for (int i = 0; i < w->job.processes; i++) {
        os_enter(i);
        check(w, rc_engine_create(&w->engines[i], w->job.kernels[i]), "engine");
        w->calls_at[i] = os_now() + w->job.begins[i];
        w->due[i] = OS_NEVER;
        os_look_at(i, os_now());
        want_turn(w, i, w->calls_at[i]);
    }
    for (int i = 0; i < w->job.groups; i++) {
        group *g = &w->group[i];
        g->is = &w->job.group[i];
        uint64_t ms = g->is->config.peer_timeout_ms, patience = 2 * (ms > 1500 ? ms : 1500) * MS;
        w->bound = patience > w->bound ? patience : w->bound;
        if (!g->is->is_split)
            open_group(w, g);
    }
    os_set_mood(w->job.mood);
    os_set_pace((os_pace){w->job.is_alone, w->job.never_awakes});
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

/* Begins a group that the first one is split into, once its ranks are all there. */
static void split(world *w, group *g)
{
    int there = 0;
    for (int rank = 0; rank < g->is->size; rank++)
        there += is_through(w, g->is->process[rank]);
    if (g->is->is_split && !g->is_open && there == g->is->size)
        open_group(w, g);
}

/* Returns 1 if a group is open, or may be still. */
static int may_come(const world *w, const group *g)
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

/* ---- calls ---- */

static uint8_t *room_for(uint64_t elements, rc_dtype dtype)
{
    size_t bytes = elements * rc_dtype_size(dtype);
    uint8_t *room = malloc(bytes > 0 ? bytes : 1); /* to the byte: the sanitizer sees one more */
    memset(room, 0x55, bytes);
    return room;
}

static void call(world *w, group *g, int rank, task *t, const sim_call *what)
{
    member *m = &g->members[rank];
    rc_call call = call_of_rank(what, rank);
    rc_error error;
    uint64_t given = source_count(&call, g->is->size);
    *t = (task){.what = what, .is_let_go = pick(w, 4) == 0};
    t->dst = room_for(result_count(&call, g->is->size), call.dtype);
    t->src = what->in_place ? t->dst : room_for(given, call.dtype);
    for (uint64_t i = 0; i < given; i++)
        call_store(t->src, call.dtype, i, (double)call_value(what, rank, i));
    call.src = t->src;
    call.dst = t->dst;
    call.notify = t->is_let_go;
    if (what->feeds && m->residuals == NULL)
        check(w, rc_feedback_create(&m->residuals, given), "feedback");
    call.feedback = what->feeds ? m->residuals : NULL;
    if (what->encoded_by >> rank & 1)
        t->packed = packed_make(m->comm, &call);
    os_trace(g->is->process[rank],
             "call group %d #%d collective %d dtype %d op %d codec %d count %llu root %d",
             number_of(w, g), (int)(what - g->is->call), call.collective, call.dtype, call.op,
             call.codec, (unsigned long long)call.count, call.root);
    check(w, rc_submit(m->comm, &call, &t->work, &error), error.message);
    if (t->is_let_go)
        rc_work_free(t->work);
    want_turn(w, g->is->process[rank], os_now()); /* who submits wakes a driver */
}

/* Returns 1 if a call in flight has the rank's residuals. */
static int is_feeding(const member *m)
{
    for (int i = 0; i < JOB_MOST_IN_FLIGHT; i++)
        if (m->tasks[i].work != NULL && m->tasks[i].what->feeds)
            return 1;
    return 0;
}

static void call_more(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    int process = g->is->process[rank];
    while (m->next < g->is->calls && m->in_flight < g->is->in_flight &&
           os_now() >= w->calls_at[process] && !w->failed) {
        const sim_call *what = &g->is->call[m->next];
        task *t = m->tasks;
        if (what->feeds && is_feeding(m))
            return;
        m->next++;
        if (!call_takes_part(what, rank))
            continue;
        while (t->work != NULL)
            t++;
        call(w, g, rank, t, what);
        m->in_flight++;
        if (pick(w, 4) == 0) {
            w->calls_at[process] = os_now() + pick(w, w->job.pace[process]);
            want_turn(w, process, w->calls_at[process]);
        }
    }
}

/* ---- what must be true of an end ---- */

static void check_result(world *w, group *g, int rank, task *t)
{
    const char *why = NULL;
    int64_t wrong = -1;
    if (t->packed != NULL)
        packed_take_result(t->packed, t->work);
    if (t->what->feeds)
        why = ledger_enter(&g->ledger, t->what, rank, g->is->size, t->dst,
                           g->members[rank].residuals);
    else
        wrong = call_first_wrong(t->what, rank, g->is->size, t->dst);
    if (why != NULL)
        fails(w, "rank %d: #%d of group %d: %s", rank, (int)(t->what - g->is->call),
              number_of(w, g), why);
    if (wrong >= 0)
        fails(w, "rank %d: element %lld of %llu of #%d of group %d is wrong", rank,
              (long long)wrong, (unsigned long long)t->what->call.count,
              (int)(t->what - g->is->call), number_of(w, g));
}

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
    else if (!(w->codes >> error->code & 1))
        fails(w, "rank %d takes the fault for another: %s", rank, error->message);
    else if (is_confused || (error->code == RC_SYSTEM && error->rank < 0)) /* before the start */
        return;
    else if (blamed < 0 || !(w->suspects >> blamed & 1))
        fails(w, "rank %d blames rank %d: %s", rank, error->rank, error->message);
    else if (error->rank == rank && error->lane >= 0 && error->code != RC_SYSTEM)
        fails(w, "rank %d blames itself for a lane: %s", rank, error->message);
    else if (os_now() > w->befallen_at + w->bound / 2 + LATE_MS * MS)
        fails(w, "rank %d hears late of the fault: %s", rank, error->message);
}

/* Checks the communicator's error: it comes once and stays. */
static void look_at_error(world *w, group *g, int rank)
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

static void free_task(task *t)
{
    if (t->src != t->dst)
        free(t->src);
    free(t->dst);
    packed_free(t->packed);
    *t = (task){NULL};
}

static void end_task(world *w, group *g, int rank, task *t)
{
    member *m = &g->members[rank];
    rc_error error;
    rc_work_error(t->work, &error);
    os_trace(g->is->process[rank], "over group %d #%d %s", number_of(w, g),
             (int)(t->what - g->is->call), rc_result_name(error.code));
    if (error.code == RC_OK)
        check_result(w, g, rank, t);
    else if (error.code != m->error.code || strcmp(error.message, m->error.message) != 0)
        fails(w, "rank %d: a call ends with \"%s\", its communicator with \"%s\"", rank,
              error.message, m->error.message);
    rc_work_free(t->work);
    free_task(t);
    m->in_flight--;
}

static void collect_ends(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    for (int i = 0; i < JOB_MOST_IN_FLIGHT; i++) {
        task *t = &m->tasks[i];
        if (t->work != NULL && !t->is_let_go && rc_work_wait(t->work, 0) != RC_AGAIN)
            end_task(w, g, rank, t);
    }
}

/* Ends the call whose work the engine has handed over. */
static void end_let_go(world *w, int process, rc_work *work)
{
    for (int i = 0; i < w->job.groups; i++) {
        group *g = &w->group[i];
        int rank = job_rank_of(g->is, process);
        for (int k = 0; rank >= 0 && k < JOB_MOST_IN_FLIGHT; k++)
            if (g->members[rank].tasks[k].work == work) {
                end_task(w, g, rank, &g->members[rank].tasks[k]);
                return;
            }
    }
    fails(w, "process %d is handed a work that it does not have", process);
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

static void leave(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    int process = g->is->process[rank], failed = m->error.code != RC_OK;
    int stays = g == w->group && !failed && is_to_split(w, process);
    int is_over = m->in_flight == 0 && (m->next == g->is->calls || failed);
    if (m->state == WORKS && is_over && !stays) {
        m->state = LEAVES;
        m->leave_until = os_now() + LEAVE_MS * MS;
        os_trace(process, "leaves group %d", number_of(w, g));
    }
    if (m->state != LEAVES)
        return;
    if (rc_comm_leave(m->comm, 0) == RC_OK || os_now() >= m->leave_until)
        close_member(w, g, rank);
    else
        want_turn(w, process, os_now() + MS);
}

/* ---- faults ---- */

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

static void befall(world *w, const fault *f)
{
    switch (f->kind) {
    case FAULT_PAUSE: os_silence(f->lane, f->end, os_now() + pick(w, longest_pause(w))); break;
    case FAULT_SLOW: os_slow_down(f->lane, 1.0 + (double)pick(w, 4)); break;
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

/* Notes whom the fault makes a suspect. */
static void suspect(world *w, const fault *f)
{
    if (f->kind < FAULT_HARMLESS)
        return;
    w->suspects |= 1U << f->process;
    w->codes |= 1U << (f->kind == FAULT_FLIP    ? RC_PROTOCOL
                       : f->kind == FAULT_ABORT ? RC_ABORTED
                                                : RC_PEER_LOST);
    if (f->kind == FAULT_CLOSE)
        w->codes |= 1U << RC_SYSTEM;
    if (f->kind < FAULT_KILL)
        w->suspects |= 1U << os_lane_rank(f->lane, 0) | 1U << os_lane_rank(f->lane, 1);
    else
        w->confused |= 1U << f->process;
}

static void bring_fault(world *w, fault *f)
{
    f->lane %= os_lanes();
    if (f->event == 0)
        f->process = os_lane_rank(f->lane, f->end);
    os_trace(-1, "fault %s lane %d end %d process %d", fault_names[f->kind], f->lane, f->end,
             f->process);
    w->befallen_at = os_now();
    suspect(w, f);
    befall(w, f);
}

static void bring_faults(world *w)
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

/* ---- the run ---- */

static int never(const void *arg)
{
    (void)arg;
    return 0;
}

/* Returns 1 if a process has nothing more to do in a group. */
static int is_gone(const world *w, const group *g, int rank)
{
    return os_is_dead(g->is->process[rank]) || g->members[rank].state == GONE || !may_come(w, g);
}

static int is_over(const world *w)
{
    for (int i = 0; i < w->job.groups; i++)
        for (int rank = 0; rank < w->group[i].is->size; rank++)
            if (!is_gone(w, &w->group[i], rank))
                return 0;
    return 1;
}

/* Has the memory that ranks share as it is while this process sleeps, and while it runs: one that
 * sleeps wants to be rung for. */
static void doze(world *w, int process, int dozes)
{
    for (int i = 0; i < w->job.groups; i++) {
        int rank = job_rank_of(w->group[i].is, process);
        rc_comm *c = rank >= 0 ? w->group[i].members[rank].comm : NULL;
        if (c == NULL || w->group[i].is->hosts == 0)
            continue;
        region_doze(&c->shared.region, dozes && c->member.expects);
        if (dozes && c->member.expects && c->member.can_advance(&c->member))
            want_turn(w, process, os_now());
    }
}

static void look_at_errors(world *w, int process)
{
    for (int i = 0; i < w->job.groups; i++) {
        group *g = &w->group[i];
        int rank = job_rank_of(g->is, process);
        const member *m = &g->members[rank < 0 ? 0 : rank];
        if (rank >= 0 && m->comm != NULL && (m->state == WORKS || m->error.code != RC_OK))
            look_at_error(w, g, rank);
    }
}

static void run_program(world *w, group *g, int rank)
{
    if (rank < 0 || g->members[rank].state == GONE || g->members[rank].comm == NULL)
        return;
    start_member(w, g, rank);
    collect_ends(w, g, rank);
    if (g->members[rank].state == WORKS && g->members[rank].error.code == RC_OK)
        call_more(w, g, rank);
    leave(w, g, rank);
    for (int i = 0; i < JOB_MOST_IN_FLIGHT; i++) {
        const task *t = &g->members[rank].tasks[i];
        if (t->work != NULL && rc_work_wait(t->work, 0) != RC_AGAIN) /* over at once */
            want_turn(w, g->is->process[rank], os_now());
    }
}

static void run_process(world *w, int process)
{
    rc_engine *e = w->engines[process];
    rc_work *work;
    w->due[process] = OS_NEVER;
    if (w->calls_at[process] > os_now())
        want_turn(w, process, w->calls_at[process]);
    os_begin_turn(process, w->job.is_alone ? 1 : 1 + (int)pick(w, 3));
    os_trace(process, "turn");
    doze(w, process, 0);
    engine_lock(e);
    engine_drive(e, never, NULL, ENGINE_NEVER, 0);
    engine_unlock(e);
    if (os_is_dead(process))
        return;
    look_at_errors(w, process);
    while (rc_engine_take_done(e, 0, &work) == RC_OK)
        end_let_go(w, process, work);
    for (int i = 0; i < w->job.groups && !w->failed; i++)
        run_program(w, &w->group[i], job_rank_of(w->group[i].is, process));
    for (int i = 1; i < w->job.groups && !w->failed; i++)
        split(w, &w->group[i]);
    doze(w, process, 1);
    os_end_turn(process);
}

static void check_time(world *w)
{
    if (w->turn > MOST_TURNS)
        fails(w, "no end after %d turns", w->turn);
    else if (w->quiet_at != 0 && os_now() > w->quiet_at + 4 * w->bound + 20000 * MS)
        fails(w, "no end in time");
}

static void run(world *w)
{
    while (!w->failed && !is_over(w)) {
        int process = os_next();
        if (process < 0) {
            fails(w, "nothing happens any more");
            return;
        }
        if (!os_is_due(process, w->due[process]))
            continue;
        run_process(w, process);
        w->turn++;
        bring_faults(w);
        check_time(w);
    }
}

/* ---- the end ---- */

static void end_member(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    os_enter(g->is->process[rank]);
    if (m->comm != NULL)
        rc_comm_free(m->comm);
    for (int i = 0; i < JOB_MOST_IN_FLIGHT; i++) {
        task *t = &m->tasks[i];
        if (t->work == NULL)
            continue;
        if (!t->is_let_go && rc_work_wait(t->work, 0) == RC_AGAIN)
            fails(w, "rank %d: a call outlives its communicator", rank);
        if (!t->is_let_go)
            rc_work_free(t->work);
        free_task(t);
    }
    rc_feedback_free(m->residuals);
}

static void close_world(world *w)
{
    for (int i = 0; i < w->job.groups; i++) {
        for (int rank = 0; rank < w->group[i].is->size; rank++)
            end_member(w, &w->group[i], rank);
        ledger_close(&w->group[i].ledger);
    }
    for (int i = 0; i < w->job.processes; i++) {
        os_enter(i);
        rc_engine_free(w->engines[i]);
    }
    int left = os_close();
    if (left != 0)
        fails(w, "%d descriptors are open", left);
}

int world_run(const job *what, FILE *trace, uint64_t *events)
{
    world *w = calloc(1, sizeof *w);
    w->job = *what;
    os_open(call_mix(what->seed), trace);
    w->began = os_now();
    open_world(w);
    for (int i = 0; i < w->job.faults; i++)
        if (w->job.fault[i].event != 0)
            os_kill_at(w->job.fault[i].process, w->job.fault[i].event);
    run(w);
    *events = os_events();
    close_world(w);
    int failed = w->failed;
    free(w);
    return !failed;
}
