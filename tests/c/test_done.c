/* test_done.c - the queue of finished works, and who takes them. */
#include "engine_fixture.h"

static void done_queue_keeps_order(void)
{
    rc_engine *e = open_engine();
    engine_done entries[3];
    CHECK(engine_pop_done(e, 0) == NULL);
    for (int i = 0; i < 3; i++)
        engine_push_done(e, &entries[i]);
    for (int i = 0; i < 3; i++)
        CHECK(engine_pop_done(e, 1000) == &entries[i]);
    CHECK(engine_pop_done(e, 10) == NULL);
    engine_push_done(e, &entries[1]);
    CHECK(engine_pop_done(e, 0) == &entries[1]);
    rc_engine_free(e);
}

static void *take(void *arg)
{
    return engine_pop_done(arg, LONG_MS);
}

static void done_entry_wakes_its_taker(void)
{
    rc_engine *e = open_engine();
    engine_done entry;
    pthread_t thread;
    void *got;
    pthread_create(&thread, NULL, take, e);
    usleep(20000);
    engine_push_done(e, &entry);
    pthread_join(thread, &got);
    CHECK(got == &entry);
    rc_engine_free(e);
}

static void interrupt_ends_one_take(void)
{
    rc_engine *e = open_engine();
    pthread_t thread;
    void *got;
    uint64_t start = clock_ns();
    rc_engine_interrupt(e); /* counts for the next take too */
    CHECK(engine_pop_done(e, LONG_MS) == NULL);
    pthread_create(&thread, NULL, take, e);
    usleep(20000);
    rc_engine_interrupt(e);
    pthread_join(thread, &got);
    CHECK(got == NULL);
    CHECK(clock_ns() - start < LONG_MS / 2 * CLOCK_MS);
    start = clock_ns();
    CHECK(engine_pop_done(e, 30) == NULL);
    CHECK(clock_ns() - start >= 30 * CLOCK_MS);
    rc_engine_free(e);
}

int main(void)
{
    static const check_test tests[] = {
        {"done_queue_keeps_order", done_queue_keeps_order},
        {"done_entry_wakes_its_taker", done_entry_wakes_its_taker},
        {"interrupt_ends_one_take", interrupt_ends_one_take},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
