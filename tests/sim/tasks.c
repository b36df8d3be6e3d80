/* tasks.c - calls, and what must be true of their results. See state.h. */
#include <stdlib.h>
#include <string.h>

#include "state.h"

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

void call_more(world *w, group *g, int rank)
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

/* ---- ends ---- */

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

void collect_ends(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    for (int i = 0; i < JOB_MOST_IN_FLIGHT; i++) {
        task *t = &m->tasks[i];
        if (t->work != NULL && !t->is_let_go && rc_work_wait(t->work, 0) != RC_AGAIN)
            end_task(w, g, rank, t);
    }
}

void end_let_go(world *w, int process, rc_work *work)
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

void drop_tasks(world *w, member *m, int rank)
{
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
}
