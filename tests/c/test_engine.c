/* test_engine.c - the event loop: sources, timers, who drives, fork.
 *
 * Waiting here means engine_drive with a condition, as rc_work_wait does it; timing is only ever
 * bounded from below, or from above by what no working machine needs.
 */
#include "../../csrc/net/engine.h"

#include <signal.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../csrc/base/clock.h"
#include "check.h"
#include "engine_fixture.h"
#include "fds.h"

/* ---- who drives ---- */

typedef struct poker {
    rc_engine *engine;
    counter *counter;
} poker;

/* Writes once a waiter drives. Before, the progress thread might be the one to see it. */
static void *poke_a_waiter(void *arg)
{
    poker *p = arg;
    int drives = 0;
    for (uint64_t end = clock_ns() + LONG_MS * CLOCK_MS; !drives && clock_ns() < end;
         usleep(1000)) {
        engine_lock(p->engine);
        drives = p->engine->driver == ENGINE_WAITER;
        engine_unlock(p->engine);
    }
    CHECK(drives);
    CHECK(poke(p->counter));
    return NULL;
}

static void waiter_drives(void)
{
    rc_engine *e = open_engine();
    counter c;
    add_counter(e, &c);
    pthread_t thread;
    pthread_create(&thread, NULL, poke_a_waiter, &(poker){.engine = e, .counter = &c});
    CHECK(drive(e, was_called, &c, LONG_MS));
    CHECK(pthread_equal(c.last_thread, pthread_self()));
    pthread_join(thread, NULL);
    remove_counter(e, &c);
    rc_engine_free(e);
}

static void progress_thread_drives_when_nobody_waits(void)
{
    rc_engine *e = open_engine();
    counter c;
    add_counter(e, &c);
    CHECK(poke(&c));
    uint64_t deadline = clock_ns() + LONG_MS * CLOCK_MS;
    while (calls_of(e, &c) == 0 && clock_ns() < deadline)
        usleep(1000);
    CHECK_EQ(calls_of(e, &c), 1);
    CHECK(pthread_equal(c.last_thread, e->thread));
    remove_counter(e, &c);
    rc_engine_free(e);
}

typedef struct waiter {
    rc_engine *engine;
    counter *counter;
    pthread_t thread;
    int result;
} waiter;

static void *wait_for_counter(void *arg)
{
    waiter *w = arg;
    w->result = drive(w->engine, was_called, w->counter, LONG_MS);
    return NULL;
}

/* Each waits for another source; one of them drives for all and hands over when it leaves. */
static void several_waiters_all_return(void)
{
    enum { WAITERS = 4, ROUNDS = 20 };
    rc_engine *e = open_engine();
    for (int round = 0; round < ROUNDS; round++) {
        counter counters[WAITERS];
        waiter waiters[WAITERS];
        for (int i = 0; i < WAITERS; i++) {
            add_counter(e, &counters[i]);
            waiters[i] = (waiter){.engine = e, .counter = &counters[i]};
            pthread_create(&waiters[i].thread, NULL, wait_for_counter, &waiters[i]);
        }
        for (int i = 0; i < WAITERS; i++)
            CHECK(poke(&counters[(i + round) % WAITERS]));
        for (int i = 0; i < WAITERS; i++) {
            pthread_join(waiters[i].thread, NULL);
            CHECK(waiters[i].result);
            remove_counter(e, &counters[i]);
        }
    }
    rc_engine_free(e);
}

static void drive_ends_at_its_deadline(void)
{
    rc_engine *e = open_engine();
    uint64_t start = clock_ns();
    CHECK(!drive(e, never, NULL, 50));
    uint64_t took = clock_ns() - start;
    CHECK(took >= 50 * CLOCK_MS);
    CHECK(took < LONG_MS * CLOCK_MS);
    rc_engine_free(e);
}

static void on_alarm(int number)
{
    (void)number;
}

/* A Ctrl-C must not wait for the deadline. */
static void signal_ends_drive(void)
{
    rc_engine *e = open_engine();
    struct sigaction action = {.sa_handler = on_alarm}, old;
    struct itimerval soon = {.it_value = {.tv_usec = 20000}, .it_interval = {.tv_usec = 20000}};
    struct itimerval off = {{0, 0}, {0, 0}};
    sigaction(SIGALRM, &action, &old);
    setitimer(ITIMER_REAL, &soon, NULL);
    uint64_t start = clock_ns();
    CHECK(!drive(e, never, NULL, LONG_MS));
    CHECK(clock_ns() - start < LONG_MS / 2 * CLOCK_MS);
    setitimer(ITIMER_REAL, &off, NULL);
    sigaction(SIGALRM, &old, NULL);
    rc_engine_free(e);
}

/* ---- sources ---- */

static int sources_of(const rc_engine *e)
{
    int count = 0;
    for (size_t slot = 0; slot < e->slots; slot++)
        count += e->sources[slot] != NULL;
    return count;
}

static void handler_may_remove_its_source(void)
{
    rc_engine *e = open_engine();
    counter c;
    add_counter(e, &c);
    c.close_at = 1;
    CHECK(poke(&c));
    CHECK(drive(e, was_called, &c, LONG_MS));
    CHECK_EQ(c.source.fd, -1);
    CHECK_EQ(sources_of(e), 0);
    rc_engine_free(e);
}

static void sources_come_and_go_in_any_order(void)
{
    enum { SOURCES = 7 };
    rc_engine *e = open_engine();
    counter counters[SOURCES];
    for (int i = 0; i < SOURCES; i++)
        add_counter(e, &counters[i]);
    for (int i = 0; i < SOURCES; i++) {
        remove_counter(e, &counters[i * 3 % SOURCES]);
        CHECK_EQ(sources_of(e), SOURCES - 1 - i);
    }
    add_counter(e, &counters[0]);
    CHECK_EQ(e->slots, SOURCES); /* one that was free */
    CHECK(poke(&counters[0]));
    CHECK(drive(e, was_called, &counters[0], LONG_MS));
    remove_counter(e, &counters[0]);
    rc_engine_free(e);
}

static void unwatchable_descriptor_is_refused(void)
{
    rc_engine *e = open_engine();
    engine_source source = {.fd = open_fds() + 1000, .ready = count_event};
    rc_error error = {.code = RC_OK};
    engine_lock(e);
    CHECK_EQ(engine_add(e, &source, EPOLLIN, &error), RC_SYSTEM);
    engine_unlock(e);
    CHECK_EQ(error.code, RC_SYSTEM);
    CHECK(error.sys_errno != 0);
    CHECK_EQ(sources_of(e), 0);
    rc_engine_free(e);
}

/* ---- members: submissions and timers ---- */

typedef struct member {
    engine_member base; /* first */
    rc_engine *engine;
    int drains, ticks;
    uint64_t period; /* 0: ticks once */
    uint64_t last_tick;
} member;

static void drain(engine_member *base)
{
    member *m = (member *)base;
    m->drains++;
    engine_changed(m->engine);
}

static uint64_t tick(engine_member *base, uint64_t now)
{
    member *m = (member *)base;
    CHECK(now >= m->last_tick + m->period || m->last_tick == 0);
    m->last_tick = now;
    m->ticks++;
    engine_changed(m->engine);
    return m->period != 0 ? now + m->period : ENGINE_NEVER;
}

static void join_member(rc_engine *e, member *m)
{
    m->engine = e;
    m->base = (engine_member){.drain = drain, .tick = tick};
    engine_lock(e);
    engine_join(e, &m->base);
    engine_unlock(e);
}

static void leave_member(rc_engine *e, member *m)
{
    engine_lock(e);
    engine_leave(e, &m->base);
    engine_unlock(e);
}

static int was_drained(const void *arg)
{
    return ((const member *)arg)->drains > 0;
}

static int ticked_thrice(const void *arg)
{
    return ((const member *)arg)->ticks >= 3;
}

static void submission_is_drained_at_once(void)
{
    rc_engine *e = open_engine();
    member m = {.period = 0};
    join_member(e, &m);
    engine_submit(e, 0);
    CHECK(drive(e, was_drained, &m, LONG_MS));
    leave_member(e, &m);
    rc_engine_free(e);
}

static void *submit(void *arg)
{
    usleep(20000);
    engine_submit(arg, 0);
    return NULL;
}

/* The driver sleeps in epoll without a deadline; a submission of another thread wakes it. */
static void submission_wakes_the_driver(void)
{
    rc_engine *e = open_engine();
    member m = {.period = 0};
    pthread_t thread;
    join_member(e, &m);
    pthread_create(&thread, NULL, submit, e);
    CHECK(drive(e, was_drained, &m, LONG_MS));
    pthread_join(thread, NULL);
    leave_member(e, &m);
    rc_engine_free(e);
}

static void *submit_now(void *arg)
{
    engine_submit(arg, 0);
    return NULL;
}

/* While nobody drives: a waiter has just left, and a third thread holds the lock for a moment. It
 * is not left for the 20 ms that the progress thread stands back after a waiter: at the first try,
 * or on a busy machine at one of many. */
static void submission_beside_the_lock_is_not_left(void)
{
    uint64_t least = LONG_MS * CLOCK_MS;
    for (int i = 0; i < 200 && least >= 5 * CLOCK_MS; i++) {
        rc_engine *e = open_engine();
        member m = {.period = 0};
        pthread_t thread;
        join_member(e, &m);
        usleep(2000); /* the progress thread has found nothing to do */
        drive(e, never, NULL, 1);
        engine_lock(e);
        pthread_create(&thread, NULL, submit_now, e);
        pthread_join(thread, NULL);
        uint64_t start = clock_ns();
        while (m.drains == 0 && clock_ns() - start < LONG_MS * CLOCK_MS) {
            engine_unlock(e);
            usleep(100);
            engine_lock(e);
        }
        uint64_t took = clock_ns() - start;
        engine_unlock(e);
        least = took < least ? took : least;
        leave_member(e, &m);
        rc_engine_free(e);
    }
    if (!CHECK(least < 5 * CLOCK_MS))
        fprintf(stderr, "started after %.1f ms at best\n", (double)least * 1e-6);
}

static void timers_run_when_due(void)
{
    rc_engine *e = open_engine();
    member m = {.period = 10 * CLOCK_MS};
    uint64_t start = clock_ns();
    join_member(e, &m);
    CHECK(drive(e, ticked_thrice, &m, LONG_MS));
    CHECK(clock_ns() - start >= 20 * CLOCK_MS);
    leave_member(e, &m);
    rc_engine_free(e);
}

/* 1 if the member has ticked so often by the deadline. */
static int wait_for_ticks(rc_engine *e, const member *m, int ticks, uint64_t deadline)
{
    int there = 0;
    while (!there && clock_ns() < deadline) {
        usleep(1000);
        engine_lock(e);
        there = m->ticks >= ticks;
        engine_unlock(e);
    }
    return there;
}

/* The progress thread sleeps for ever; an earlier due time must reach it. */
static void schedule_wakes_the_sleeper(void)
{
    rc_engine *e = open_engine();
    member m = {.period = 0};
    join_member(e, &m); /* due at once, then never */
    uint64_t deadline = clock_ns() + LONG_MS * CLOCK_MS;
    CHECK(wait_for_ticks(e, &m, 1, deadline));
    usleep(30000); /* until it sleeps */
    engine_lock(e);
    engine_schedule(e, &m.base, clock_ns() + 10 * CLOCK_MS);
    engine_unlock(e);
    CHECK(wait_for_ticks(e, &m, 2, deadline));
    leave_member(e, &m);
    rc_engine_free(e);
}

/* ---- fork ---- */

/* 0 if the child of fork kept nothing open, and stays harmless when it is told a second time. */
static int look_around_as_child(rc_engine *e, int fds_without_engine)
{
    rc_engine_after_fork(e);
    if (open_fds() != fds_without_engine)
        return 1;
    int mine = eventfd(0, 0); /* takes a number that was the engine's */
    rc_engine_after_fork(e);
    uint64_t one = 1;
    if (write(mine, &one, sizeof one) != sizeof one)
        return 2;
    rc_work *work;
    if (rc_engine_take_done(e, 0, &work) != RC_INVALID_STATE)
        return 3;
    rc_engine_interrupt(e);
    rc_engine_free(e);
    return 0;
}

static void forked_child_keeps_no_descriptor(void)
{
    int before = open_fds();
    rc_engine *e = open_engine();
    counter c;
    add_counter(e, &c);
    pid_t child = fork();
    if (child == 0)
        _exit(look_around_as_child(e, before));
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK(poke(&c)); /* the parent's engine goes on */
    CHECK(drive(e, was_called, &c, LONG_MS));
    remove_counter(e, &c);
    rc_engine_free(e);
    CHECK_EQ(open_fds(), before);
}

/* ---- life ---- */

static void kernel_sets_by_name(void)
{
    rc_engine *e;
    CHECK_EQ(rc_engine_create(&e, "scalar"), RC_OK);
    CHECK(strcmp(rc_engine_kernel_set(e), "scalar") == 0);
    rc_engine_free(e);
    CHECK_EQ(rc_engine_create(&e, "no such set"), RC_INVALID_ARGUMENT);
    CHECK(e == NULL);
    rc_engine_free(NULL);
}

static void nothing_leaks(void)
{
    int before = open_fds();
    for (int i = 0; i < 50; i++)
        rc_engine_free(open_engine());
    CHECK_EQ(open_fds(), before);
}

static void idle_engine_uses_no_cpu(void)
{
    rc_engine *e = open_engine();
    usleep(50000);
    double least = 1.0;
    for (int look = 0; look < 5 && least >= 0.02; look++) {
        double before = engine_cpu_seconds(e);
        usleep(200000);
        double used = engine_cpu_seconds(e) - before;
        least = used < least ? used : least;
    }
    CHECK(least < 0.02);
    rc_engine_free(e);
}

/* ---- the queue of finished works ---- */

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
        {"waiter_drives", waiter_drives},
        {"progress_thread_drives_when_nobody_waits", progress_thread_drives_when_nobody_waits},
        {"several_waiters_all_return", several_waiters_all_return},
        {"drive_ends_at_its_deadline", drive_ends_at_its_deadline},
        {"signal_ends_drive", signal_ends_drive},
        {"handler_may_remove_its_source", handler_may_remove_its_source},
        {"sources_come_and_go_in_any_order", sources_come_and_go_in_any_order},
        {"unwatchable_descriptor_is_refused", unwatchable_descriptor_is_refused},
        {"submission_is_drained_at_once", submission_is_drained_at_once},
        {"submission_wakes_the_driver", submission_wakes_the_driver},
        {"submission_beside_the_lock_is_not_left", submission_beside_the_lock_is_not_left},
        {"timers_run_when_due", timers_run_when_due},
        {"schedule_wakes_the_sleeper", schedule_wakes_the_sleeper},
        {"forked_child_keeps_no_descriptor", forked_child_keeps_no_descriptor},
        {"kernel_sets_by_name", kernel_sets_by_name},
        {"nothing_leaks", nothing_leaks},
        {"idle_engine_uses_no_cpu", idle_engine_uses_no_cpu},
        {"done_queue_keeps_order", done_queue_keeps_order},
        {"done_entry_wakes_its_taker", done_entry_wakes_its_taker},
        {"interrupt_ends_one_take", interrupt_ends_one_take},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
