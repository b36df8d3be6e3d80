/* test_done.c - the queue of finished works: who takes them, and who waits for what is left. */
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

static void *wait_late(void *arg)
{
    return engine_wait_late(arg, 20, LONG_MS) ? arg : NULL;
}

static void late_entry_is_told_of(void)
{
    rc_engine *e = open_engine();
    engine_done entries[2];
    pthread_t thread;
    void *got;
    CHECK(!engine_wait_late(e, 0, 10));
    pthread_create(&thread, NULL, wait_late, e);
    usleep(20000);
    uint64_t start = clock_ns();
    engine_push_done(e, &entries[0]);
    pthread_join(thread, &got);
    CHECK(got == e);
    CHECK(clock_ns() - start >= 20 * CLOCK_MS);
    CHECK(engine_wait_late(e, 20, 0) == 0); /* no time */
    CHECK(engine_wait_late(e, 20, 1000));   /* it stays */
    CHECK(engine_pop_done(e, 0) == &entries[0]);
    CHECK(!engine_wait_late(e, 0, 10));
    rc_engine_free(e);
}

/* Both come for one taker, who takes one and is busy with it. */
static void what_a_busy_taker_leaves_is_late(void)
{
    rc_engine *e = open_engine();
    engine_done entries[2];
    pthread_t taker, waiter;
    void *got;
    pthread_create(&waiter, NULL, wait_late, e);
    pthread_create(&taker, NULL, take, e);
    usleep(20000);
    engine_push_done(e, &entries[0]);
    engine_push_done(e, &entries[1]);
    pthread_join(taker, &got);
    CHECK(got == &entries[0]);
    pthread_join(waiter, &got);
    CHECK(got == e);
    CHECK(engine_pop_done(e, 0) == &entries[1]);
    rc_engine_free(e);
}

static void hurry_ends_one_wait(void)
{
    rc_engine *e = open_engine();
    rc_engine_hurry(e); /* counts for the next wait too */
    CHECK(engine_wait_late(e, 20, LONG_MS));
    CHECK(!engine_wait_late(e, 20, 10));
    rc_engine_interrupt(e);
    CHECK(engine_wait_late(e, 20, LONG_MS));
    CHECK(engine_pop_done(e, LONG_MS) == NULL);
    rc_engine_free(e);
}

int main(void)
{
    static const check_test tests[] = {
        {"done_queue_keeps_order", done_queue_keeps_order},
        {"done_entry_wakes_its_taker", done_entry_wakes_its_taker},
        {"interrupt_ends_one_take", interrupt_ends_one_take},
        {"late_entry_is_told_of", late_entry_is_told_of},
        {"what_a_busy_taker_leaves_is_late", what_a_busy_taker_leaves_is_late},
        {"hurry_ends_one_wait", hurry_ends_one_wait},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
