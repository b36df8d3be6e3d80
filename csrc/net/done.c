/* done.c - the queue of finished works that somebody wants to hear of: see engine.h.
 *
 * One thread takes them, and is busy with each for a while; another may wait for what it leaves.
 */
#include "engine.h"

#include "../base/clock.h"
#include "../base/thread.h"

void engine_push_done(rc_engine *e, engine_done *entry)
{
    pthread_mutex_lock(&e->done_lock);
    entry->next = NULL;
    entry->since = clock_ns();
    if (e->done_tail != NULL)
        e->done_tail->next = entry;
    else
        e->done_head = entry;
    e->done_tail = entry;
    pthread_cond_signal(&e->done_ready);
    if (e->done_takers == 0)
        pthread_cond_signal(&e->done_late);
    pthread_mutex_unlock(&e->done_lock);
}

engine_done *engine_pop_done(rc_engine *e, int timeout_ms)
{
    uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * CLOCK_MS;
    pthread_mutex_lock(&e->done_lock);
    e->done_takers++;
    while (e->done_head == NULL && !e->done_interrupted && clock_ns() < deadline)
        thread_wait_until(&e->done_ready, &e->done_lock, deadline);
    e->done_takers--;
    e->done_interrupted = 0;
    engine_done *entry = e->done_head;
    if (entry != NULL) {
        e->done_head = entry->next;
        if (e->done_head == NULL)
            e->done_tail = NULL;
        else
            pthread_cond_signal(&e->done_late);
    }
    pthread_mutex_unlock(&e->done_lock);
    return entry;
}

int engine_wait_late(rc_engine *e, int late_ms, int timeout_ms)
{
    uint64_t now = clock_ns(), deadline = now + (uint64_t)timeout_ms * CLOCK_MS;
    int is_late = 0;
    pthread_mutex_lock(&e->done_lock);
    for (; !is_late && !e->done_hurried && now < deadline; now = clock_ns()) {
        uint64_t due = deadline;
        if (e->done_head != NULL)
            due = e->done_head->since + (uint64_t)late_ms * CLOCK_MS;
        is_late = e->done_head != NULL && now >= due;
        if (!is_late)
            thread_wait_until(&e->done_late, &e->done_lock, due < deadline ? due : deadline);
    }
    is_late |= e->done_hurried;
    e->done_hurried = 0;
    pthread_mutex_unlock(&e->done_lock);
    return is_late;
}

void engine_interrupt_done(rc_engine *e)
{
    pthread_mutex_lock(&e->done_lock);
    e->done_interrupted = 1;
    pthread_cond_broadcast(&e->done_ready);
    pthread_mutex_unlock(&e->done_lock);
    engine_hurry_done(e);
}

void engine_hurry_done(rc_engine *e)
{
    pthread_mutex_lock(&e->done_lock);
    e->done_hurried = 1;
    pthread_cond_broadcast(&e->done_late);
    pthread_mutex_unlock(&e->done_lock);
}

rc_result rc_engine_wait_late(rc_engine *engine, int late_ms, int timeout_ms)
{
    if (atomic_load(&engine->forked))
        return RC_INVALID_STATE;
    return engine_wait_late(engine, late_ms, timeout_ms < 0 ? 0 : timeout_ms) ? RC_OK : RC_AGAIN;
}

void rc_engine_hurry(rc_engine *engine)
{
    if (!atomic_load(&engine->forked))
        engine_hurry_done(engine);
}

void rc_engine_interrupt(rc_engine *engine)
{
    if (!atomic_load(&engine->forked))
        engine_interrupt_done(engine);
}
