/* latch.c - the ends of works and of the communicator, noted where they are found; settle.c ends
 * them. See inside.h. */
#include <stdarg.h>
#include <stdio.h>

#include "../base/error.h"
#include "inside.h"

void comm_end(rc_comm *c, rc_work *w, rc_result result)
{
    work_move(w, WORK_ENDING);
    w->error.code = result;
    list_append(&c->ending, &w->place);
    engine_settle_later(c->engine);
    engine_changed(c->engine); /* who waits wakes meanwhile: the lock is free once all is settled */
}

void comm_finish_complete(rc_comm *c, rc_work *w)
{
    int runs = w->state == WORK_ON_LINKS || w->state == WORK_IN_MEMORY;
    if (c->state != COMM_RUNNING || !runs)
        return;
    if (work_complete(w)) {
        c->works_done++;
        comm_active_remove(c, w);
        comm_end(c, w, RC_OK);
        if (c->config.recovers)
            comm_tell_at_end(c);
    } else if (work_awaits_peers(w) && !w->has_asked) {
        w->has_asked = 1;
        comm_ask(c); /* last: what is sent may bring frames back, with which the work ends */
    }
}

void comm_fail(rc_comm *c, const rc_error *error)
{
    comm_fail_by(c, error, error, c->env.rank);
}

void comm_fail_by(rc_comm *c, const rc_error *error, const rc_error *told, int origin)
{
    if (c->state != COMM_RUNNING)
        return;
    comm_move(c, COMM_FAILING);
    c->error = *error;
    c->told = *told;
    c->error_origin = origin;
    engine_settle_later(c->engine);
}

rc_result comm_fail_text(rc_comm *c, rc_result code, int rank, const char *format, ...)
{
    rc_error error;
    char text[sizeof error.message];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    error_clear(&error);
    error_set(&error, code, "%s", text);
    error.rank = rank;
    comm_fail(c, &error);
    return code;
}
