/* world.c - the turns of a simulated job. See world.h and state.h. */
#include <stdarg.h>
#include <stdlib.h>

#include "state.h"

enum { MOST_TURNS = 400000 };

void fails(world *w, const char *format, ...)
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

void check(world *w, rc_result result, const char *what)
{
    if (result != RC_OK)
        fails(w, "%s: %s", what, rc_result_name(result));
}

uint64_t pick(world *w, uint64_t bound)
{
    return draw_below(&w->job.random, bound);
}

void want_turn(world *w, int process, uint64_t at)
{
    if (at < w->due[process])
        w->due[process] = at;
    os_look_at(process, at);
}

int number_of(const world *w, const group *g)
{
    return (int)(g - w->group);
}

/* ---- the run ---- */

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
    renew_lanes(w, g, rank);
    leave(w, g, rank);
    for (int i = 0; i < JOB_MOST_IN_FLIGHT; i++) {
        const task *t = &g->members[rank].tasks[i];
        if (t->work != NULL && rc_work_wait(t->work, 0) != RC_AGAIN) /* over at once */
            want_turn(w, g->is->process[rank], os_now());
    }
}

/* Has a lane taken for one so slow that it is probed, now and then: simulated ones are not. A probe
 * is 2 MB, so that more of them were most of what is simulated. */
static void slow_down(world *w, int process)
{
    enum { SELDOM = 64, SLOWER = 100, PASSED = 1 << 20, MOST = 24 };
    uint64_t bits = mix(w->job.seed + ((uint64_t)w->turn << 32));
    for (int i = 0; i < w->job.groups && bits % SELDOM == 0 && w->slowed < MOST; i++) {
        int rank = job_rank_of(w->group[i].is, process);
        const rc_comm *c = rank >= 0 ? w->group[i].members[rank].comm : NULL;
        peer_link *ln =
            c != NULL ? c->env.links[(bits >> 8) % (uint64_t)w->group[i].is->size] : NULL;
        if (ln == NULL)
            continue;
        lane *l = ln->lanes[(bits >> 16) % (uint64_t)ln->lane_count];
        if (l->rate > 1e-4) /* 100 kB/s */
            l->rate /= SLOWER;
        l->bytes_to_siblings = PASSED;
        l->probed_at = 0;
        w->slowed++;
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
    slow_down(w, process);
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
    for (int i = 0; i < MOST_LATE; i++)
        if (w->late[i].group != NULL)
            os_close_fd(w->late[i].fd);
    int left = os_close();
    if (left != 0)
        fails(w, "%d descriptors are open", left);
}

int world_run(const job *what, FILE *trace, uint64_t *events)
{
    world *w = calloc(1, sizeof *w);
    w->job = *what;
    os_open(mix(what->seed), trace);
    w->began = os_now();
    open_world(w);
    for (int i = 0; i < w->job.faults; i++)
        if (w->job.fault[i].kind == FAULT_KILL && w->job.fault[i].event != 0)
            os_kill_at(w->job.fault[i].process, w->job.fault[i].event);
    run(w);
    *events = os_events();
    close_world(w);
    int failed = w->failed;
    free(w);
    return !failed;
}
