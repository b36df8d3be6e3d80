/* engine_fixture.h - an engine, a source that counts its events, and driving it as rc_work_wait
 * does. */
#ifndef RINGCOMM_TEST_ENGINE_FIXTURE_H
#define RINGCOMM_TEST_ENGINE_FIXTURE_H

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "../../csrc/base/clock.h"
#include "../../csrc/net/engine.h"
#include "check.h"

#define LONG_MS 20000 /* a test that needs this long has failed */

static inline rc_engine *open_engine(void)
{
    rc_engine *e;
    CHECK_EQ(rc_engine_create(&e, NULL), RC_OK);
    return e;
}

/* ---- a source that counts ---- */

typedef struct counter {
    engine_source source; /* first */
    rc_engine *engine;
    pthread_t last_thread;
    int calls;
    int close_at; /* removes itself in this call; 0: never */
} counter;

static inline void count_event(engine_source *source, uint32_t events)
{
    counter *c = (counter *)source;
    uint64_t value;
    CHECK(events & EPOLLIN);
    CHECK_EQ(read(c->source.fd, &value, sizeof value), sizeof value);
    c->calls++;
    c->last_thread = pthread_self();
    if (c->calls == c->close_at)
        engine_remove(c->engine, source);
    engine_changed(c->engine);
}

static inline int poke(const counter *c)
{
    uint64_t one = 1;
    return write(c->source.fd, &one, sizeof one) == sizeof one;
}

static inline void add_counter(rc_engine *e, counter *c)
{
    *c = (counter){.engine = e, .source = {.fd = eventfd(0, EFD_NONBLOCK), .ready = count_event}};
    engine_lock(e);
    CHECK_EQ(engine_add(e, &c->source, EPOLLIN, NULL), RC_OK);
    engine_unlock(e);
}

static inline void remove_counter(rc_engine *e, counter *c)
{
    engine_lock(e);
    engine_remove(e, &c->source);
    CHECK_EQ(c->source.fd, -1);
    engine_remove(e, &c->source);
    engine_quiesce(e);
    engine_unlock(e);
}

static inline int was_called(const void *arg)
{
    return ((const counter *)arg)->calls > 0;
}

static inline int never(const void *arg)
{
    (void)arg;
    return 0;
}

static inline int drive(rc_engine *e, int (*finished)(const void *), const void *arg, uint64_t ms)
{
    engine_lock(e);
    int result = engine_drive(e, finished, arg, clock_ns() + ms * CLOCK_MS, 0);
    engine_unlock(e);
    return result;
}

static inline int calls_of(rc_engine *e, const counter *c)
{
    engine_lock(e);
    int calls = c->calls;
    engine_unlock(e);
    return calls;
}

#endif
