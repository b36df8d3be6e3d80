/* test_engine_spin.c - polling before a sleep: when a waiter does, and when it stops doing so. */
#include "engine_fixture.h"

static void spins_catch_events(void)
{
    rc_engine *e = open_engine();
    counter c;
    add_counter(e, &c);
    CHECK(!drive(e, never, NULL, 30));
    engine_lock(e);
    CHECK(!engine_drive(e, never, NULL, clock_ns() + 5 * CLOCK_MS, CLOCK_MS)); /* in vain */
    CHECK(e->spin_misses >= 1);
    e->spin_rest = 0;
    CHECK(poke(&c));
    CHECK(engine_drive(e, was_called, &c, clock_ns() + LONG_MS * CLOCK_MS, CLOCK_MS));
    CHECK_EQ(e->spin_misses, 0);
    CHECK_EQ(e->spin_rest, 0);
    engine_unlock(e);
    remove_counter(e, &c);
    rc_engine_free(e);
}

/* Most of the waits of a thread whose events are far apart are sleeps. */
static void vain_spins_become_rare(void)
{
    enum { SPIN_MS = 1, WAITS = 100 };
    rc_engine *e = open_engine();
    CHECK(!drive(e, never, NULL, 30));
    engine_lock(e);
    int spins = 0;
    for (int i = 0; i < WAITS; i++) {
        spins += e->spin_rest == 0;
        engine_drive(e, never, NULL, clock_ns() + 2 * SPIN_MS * CLOCK_MS, SPIN_MS * CLOCK_MS);
    }
    engine_unlock(e);
    CHECK(spins >= 1 && spins < WAITS / 8);
    rc_engine_free(e);
}

int main(void)
{
    static const check_test tests[] = {
        {"spins_catch_events", spins_catch_events},
        {"vain_spins_become_rare", vain_spins_become_rare},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
