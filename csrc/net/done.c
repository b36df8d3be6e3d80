/* done.c - the queue of finished works for rc_engine_take_done: see engine.h. */
#include "engine.h"

#include "../base/clock.h"
#include "../base/thread.h"

void engine_push_done(rc_engine *e, engine_done *entry)
{
    pthread_mutex_lock(&e->done_lock);
    entry->next = NULL;
    if (e->done_tail != NULL)
        e->done_tail->next = entry;
    else
        e->done_head = entry;
    e->done_tail = entry;
    pthread_cond_signal(&e->done_ready);
    pthread_mutex_unlock(&e->done_lock);
}

engine_done *engine_pop_done(rc_engine *e, int timeout_ms)
{
    uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * CLOCK_MS;
    pthread_mutex_lock(&e->done_lock);
    while (e->done_head == NULL && !e->done_interrupted && clock_ns() < deadline)
        thread_wait_until(&e->done_ready, &e->done_lock, deadline);
    e->done_interrupted = 0;
    engine_done *entry = e->done_head;
    if (entry != NULL) {
        e->done_head = entry->next;
        if (e->done_head == NULL)
            e->done_tail = NULL;
    }
    pthread_mutex_unlock(&e->done_lock);
    return entry;
}

void engine_interrupt_done(rc_engine *e)
{
    pthread_mutex_lock(&e->done_lock);
    e->done_interrupted = 1;
    pthread_cond_broadcast(&e->done_ready);
    pthread_mutex_unlock(&e->done_lock);
}

void rc_engine_interrupt(rc_engine *engine)
{
    if (!atomic_load(&engine->forked))
        engine_interrupt_done(engine);
}
