/* test_engine_spin.c - polling before a sleep: when a waiter does, and when it stops doing so. */
#include "engine_fixture.h"

/* Waits tried until one spins: on a busy machine a thread may have no turn for as long as a spin
 * lasts, and then looks once. */
enum { TRIES = 1000 };

static void spins_catch_events(void)
{
    rc_engine *e = open_engine();
    counter c;
    add_counter(e, &c);
    CHECK(!drive(e, never, NULL, 30));
    engine_lock(e);
    for (int i = 0; i < TRIES && e->failed_spins == 0; i++)
        CHECK(!engine_drive(e, never, NULL, clock_ns() + 5 * CLOCK_MS, CLOCK_MS)); /* in vain */
    CHECK(e->failed_spins >= 1);
    e->waits_before_next_spin = 0;
    CHECK(poke(&c));
    CHECK(engine_drive(e, was_called, &c, clock_ns() + LONG_MS * CLOCK_MS, CLOCK_MS));
    CHECK_EQ(e->failed_spins, 0);
    CHECK_EQ(e->waits_before_next_spin, 0);
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
        spins += e->waits_before_next_spin == 0;
        engine_drive(e, never, NULL, clock_ns() + 2 * SPIN_MS * CLOCK_MS, SPIN_MS * CLOCK_MS);
    }
    engine_unlock(e);
    CHECK(spins >= 1 && spins < WAITS / 8);
    rc_engine_free(e);
}

/* ---- a descriptor that is the only one ---- */

static atomic_int looks;

static int takes_by_itself(engine_source *source)
{
    counter *c = (counter *)source;
    uint64_t value;
    looks++;
    if (read(source->fd, &value, sizeof value) != sizeof value)
        return 0;
    c->calls++;
    return 1;
}

/* 1 if a wait in vain asks the source again and again. */
static int asks_while_it_spins(rc_engine *e)
{
    looks = 0;
    for (int i = 0; i < TRIES && looks < 2; i++) {
        looks = 0;
        e->waits_before_next_spin = 0;
        engine_drive(e, never, NULL, clock_ns() + 5 * CLOCK_MS, CLOCK_MS);
    }
    return looks > 1;
}

static void the_only_source_is_asked_itself(void)
{
    rc_engine *e = open_engine();
    counter c, other;
    add_counter(e, &c);
    c.source.look = takes_by_itself;
    CHECK(!drive(e, never, NULL, 30)); /* without a spin */
    CHECK_EQ(looks, 0);
    engine_lock(e);
    CHECK(asks_while_it_spins(e));
    CHECK(e->failed_spins >= 1);
    e->waits_before_next_spin = 0;
    c.source.ready = NULL;
    CHECK(poke(&c));
    CHECK(engine_drive(e, was_called, &c, clock_ns() + LONG_MS * CLOCK_MS, LONG_MS * CLOCK_MS));
    CHECK_EQ(e->failed_spins, 0);
    engine_unlock(e);
    c.source.ready = count_event;
    add_counter(e, &other);
    looks = 0;
    engine_lock(e);
    CHECK(!engine_drive(e, never, NULL, clock_ns() + 5 * CLOCK_MS, CLOCK_MS));
    engine_unlock(e);
    CHECK_EQ(looks, 0);
    other.source.quiet = 1; /* seldom has anything: it does not count */
    engine_lock(e);
    CHECK(asks_while_it_spins(e));
    engine_unlock(e);
    remove_counter(e, &other);
    remove_counter(e, &c);
    rc_engine_free(e);
}

static int taken;

static void *takes_the_lock(void *arg)
{
    rc_engine *e = arg;
    while (looks == 0)
        sched_yield();
    engine_lock(e);
    taken = 1;
    engine_changed(e);
    engine_unlock(e);
    return NULL;
}

static int lock_was_taken(const void *arg)
{
    (void)arg;
    return taken;
}

/* Such a spin holds the lock, but only for as long as nobody wants it. */
static void who_wants_the_lock_ends_that(void)
{
    rc_engine *e = open_engine();
    counter c;
    add_counter(e, &c);
    c.source.look = takes_by_itself;
    CHECK(!drive(e, never, NULL, 30));
    looks = 0;
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, takes_the_lock, e), 0);
    uint64_t start = clock_ns(), limit = LONG_MS * CLOCK_MS;
    engine_lock(e);
    CHECK(engine_drive(e, lock_was_taken, NULL, start + limit, 100 * CLOCK_MS));
    engine_unlock(e);
    pthread_join(thread, NULL);
    CHECK(clock_ns() - start < limit / 2);
    remove_counter(e, &c);
    rc_engine_free(e);
}

/* ---- what is waited for in memory ---- */

typedef struct memory {
    engine_member member; /* first */
    atomic_int looks;
    atomic_int dozes;
    int more;        /* rounds in which it says that there is more to do: */
    rc_engine *asks; /* asks this one to be pumped later; NULL: by its answer */
} memory;

static void nothing_to_drain(engine_member *member)
{
    (void)member;
}

static uint64_t no_deadline(engine_member *member, uint64_t now)
{
    (void)member;
    (void)now;
    return ENGINE_NEVER;
}

static int goes_on(engine_member *member)
{
    memory *m = (memory *)member;
    int more = m->more > 0 && m->more-- > 0;
    if (more && m->asks != NULL)
        engine_pump_later(m->asks, member);
    return more && m->asks == NULL;
}

static int never_stirs(const engine_member *member)
{
    atomic_fetch_add(&((memory *)(uintptr_t)member)->looks, 1);
    return 0;
}

static void counts_dozes(engine_member *member, int dozing)
{
    if (dozing)
        atomic_fetch_add(&((memory *)member)->dozes, 1);
}

static void join_memory(rc_engine *e, memory *m)
{
    *m = (memory){.member = {.drain = nothing_to_drain,
                             .tick = no_deadline,
                             .due = ENGINE_NEVER,
                             .pumped = 1,
                             .expects = 1,
                             .pump = goes_on,
                             .can_advance = never_stirs,
                             .set_wakeup_wanted = counts_dozes}};
    engine_lock(e);
    engine_join(e, &m->member);
    engine_unlock(e);
}

static void leave_memory(rc_engine *e, memory *m)
{
    engine_lock(e);
    engine_leave(e, &m->member);
    engine_quiesce(e);
    engine_unlock(e);
    rc_engine_free(e);
}

/* To fall asleep there and be rung for costs much more than the wait for a neighbour in memory: it
 * is polled before each sleep, whatever came of the polls before. */
static void memory_is_polled_before_every_sleep(void)
{
    enum { WAITS = 20, SPIN_MS = 1 };
    rc_engine *e = open_engine();
    memory m;
    join_memory(e, &m);
    CHECK(!drive(e, never, NULL, 30));
    engine_lock(e);
    e->failed_spins = 0;
    e->waits_before_next_spin = 5; /* of waits for sockets */
    int polled = 0;                /* of sockets less than an eighth would be */
    for (int i = 0; i < 4 * WAITS && polled < WAITS; i++) {
        int before = atomic_load(&m.looks);
        engine_drive(e, never, NULL, clock_ns() + 2 * SPIN_MS * CLOCK_MS, SPIN_MS * CLOCK_MS);
        polled += atomic_load(&m.looks) - before > 2; /* the two are a doze's */
    }
    CHECK_EQ(polled, WAITS);
    CHECK_EQ(e->failed_spins, 0);
    CHECK_EQ(e->waits_before_next_spin, 5);
    engine_unlock(e);
    leave_memory(e, &m);
}

static int has_no_more(const void *arg)
{
    return ((const memory *)arg)->more == 0;
}

/* One that dozes has to be rung for, so nobody dozes who will look again at once. */
static void who_has_more_to_do_does_not_doze(void)
{
    enum { ROUNDS = 50 };
    rc_engine *e = open_engine();
    memory m;
    join_memory(e, &m);
    CHECK(!drive(e, never, NULL, 30));
    engine_lock(e);
    for (int asks = 0; asks < 2; asks++) {
        int before = atomic_load(&m.dozes);
        m.more = ROUNDS;
        m.asks = asks ? e : NULL;
        CHECK(engine_drive(e, has_no_more, &m, clock_ns() + 10 * CLOCK_S, CLOCK_MS));
        CHECK(atomic_load(&m.dozes) - before < ROUNDS / 10);
    }
    engine_unlock(e);
    leave_memory(e, &m);
}

int main(void)
{
    static const check_test tests[] = {
        {"spins_catch_events", spins_catch_events},
        {"vain_spins_become_rare", vain_spins_become_rare},
        {"the_only_source_is_asked_itself", the_only_source_is_asked_itself},
        {"who_wants_the_lock_ends_that", who_wants_the_lock_ends_that},
        {"memory_is_polled_before_every_sleep", memory_is_polled_before_every_sleep},
        {"who_has_more_to_do_does_not_doze", who_has_more_to_do_does_not_doze},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
