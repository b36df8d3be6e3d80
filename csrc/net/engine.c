/* engine.c - see engine.h. */
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "../base/thread.h"
#include "polled.h"
#include "sender.h"

enum {
    EVENTS_PER_PASS = 64,
    /* Time for which the progress thread stays parked with no work in flight after a waiter left (a
     * loop of small collectives must not wake it each time), and between its looks while others
     * drive.
     */
    PARK_MS = 20,
    /* Time for which the driver waits at most, before a round, for threads that want the lock. */
    ADMIT_MS = 1,
    /* Longest sleep; bounds the shutdown if nothing can wake the driver any more. */
    LONGEST_SLEEP_MS = 1000,
    /* Sleep between rounds where the epoll set is lost. */
    REFUSED_US = 10000
};

static void *progress(void *arg);

/* Counts down the callers that the driver waits for: this thread has got the lock. */
static void came_in(rc_engine *e)
{
    if (atomic_fetch_sub(&e->callers, 1) == 1)
        pthread_cond_signal(&e->admitted);
}

void engine_lock(rc_engine *e)
{
    if (pthread_mutex_trylock(&e->lock) != 0) {
        atomic_fetch_add(&e->callers, 1);
        pthread_mutex_lock(&e->lock);
        came_in(e);
    }
    e->mode_outside = float_mode_enter();
}

void engine_settle_members(rc_engine *e)
{
    e->unsettled = 0;
    for (engine_member *member = e->members; member != NULL; member = member->next)
        member->settle(member);
}

void engine_unlock(rc_engine *e)
{
    engine_settle(e);
    float_mode_leave(e->mode_outside);
    pthread_mutex_unlock(&e->lock);
}

/* Waits for the condition, at most until the time; the lock is released meanwhile. */
static void wait_unlocked(rc_engine *e, pthread_cond_t *cond, uint64_t until)
{
    float_mode_leave(e->mode_outside);
    thread_wait_until(cond, &e->lock, until);
    e->mode_outside = float_mode_enter();
}

/* Waits for call_sleepers or the deadline; the lock is released meanwhile. */
static void sleep_until_changed(rc_engine *e, uint64_t deadline)
{
    uint64_t alarm = e->alarms;
    e->sleepers++;
    wait_unlocked(e, &e->changed, deadline);
    if (e->alarms == alarm)
        e->sleepers--;
    else
        came_in(e);
}

static void call_sleepers(rc_engine *e)
{
    if (e->sleepers == 0)
        return;
    atomic_fetch_add(&e->callers, e->sleepers);
    e->sleepers = 0;
    e->alarms++;
    pthread_cond_broadcast(&e->changed);
}

static void destroy_engine(rc_engine *e)
{
    pollset_close(&e->set);
    free(e->sources);
    pthread_cond_destroy(&e->changed);
    pthread_cond_destroy(&e->parked);
    pthread_cond_destroy(&e->admitted);
    pthread_cond_destroy(&e->done_ready);
    pthread_mutex_destroy(&e->lock);
    pthread_mutex_destroy(&e->inbox_lock);
    pthread_mutex_destroy(&e->done_lock);
    free(e);
}

rc_result rc_engine_create(rc_engine **out, const char *kernel_set)
{
    *out = NULL;
    rc_engine *e = calloc(1, sizeof *e);
    if (e == NULL)
        return RC_NO_MEMORY;
    pthread_mutex_init(&e->lock, NULL);
    pthread_mutex_init(&e->inbox_lock, NULL);
    pthread_mutex_init(&e->done_lock, NULL);
    thread_init_cond(&e->changed);
    thread_init_cond(&e->parked);
    thread_init_cond(&e->admitted);
    thread_init_cond(&e->done_ready);
    e->kernels = kernels_find(kernel_set);
    int is_open = pollset_open(&e->set);
    rc_result result = e->kernels == NULL ? RC_INVALID_ARGUMENT : RC_SYSTEM;
    if (e->kernels != NULL && is_open)
        result = thread_start(&e->thread, progress, e) ? RC_OK : RC_SYSTEM;
    if (result != RC_OK) {
        int number = errno;
        destroy_engine(e);
        errno = number;
        return result;
    }
    *out = e;
    return RC_OK;
}

void rc_engine_free(rc_engine *e)
{
    if (e == NULL || atomic_load(&e->forked))
        return;
    engine_lock(e);
    e->stopping = 1;
    pthread_cond_signal(&e->parked);
    pollset_ring(&e->set);
    engine_unlock(e);
    pthread_join(e->thread, NULL);
    sender_stop(e->sender);
    pollset_close(&e->set);
    engine_done *entry;
    while ((entry = engine_pop_done(e, 0)) != NULL)
        entry->drop(entry);
    engine_release(e);
}

void engine_retain(rc_engine *e)
{
    atomic_fetch_add(&e->holders, 1);
}

void engine_release(rc_engine *e)
{
    if (atomic_fetch_sub(&e->holders, 1) == 0)
        destroy_engine(e);
}

const char *rc_engine_kernel_set(const rc_engine *e)
{
    return e->kernels->name;
}

void rc_engine_after_fork(rc_engine *e)
{
    if (atomic_exchange(&e->forked, 1))
        return; /* in a child of this child the descriptors may be other files by now */
    for (size_t slot = 0; slot < e->slots; slot++)
        if (e->sources[slot] != NULL && engine_is_own(e->sources[slot]))
            close(e->sources[slot]->fd);
    sender_after_fork(e->sender);
    pollset_close(&e->set);
}

/* ---- sources and members ---- */

int engine_is_own(const engine_source *source)
{
    struct stat is;
    return fstat(source->fd, &is) == 0 && is.st_dev == source->device && is.st_ino == source->inode;
}

int engine_is_whole(rc_engine *e)
{
    return pollset_ring(&e->set) && (e->sender == NULL || pollset_ring(&e->sender->set));
}

/* Returns the first free slot; e->slots if there is no memory for one more. */
static size_t find_slot(rc_engine *e)
{
    size_t slot = 0;
    while (slot < e->slots && e->sources[slot] != NULL)
        slot++;
    if (slot < e->slots)
        return slot;
    engine_source **more = realloc(e->sources, (slot + 1) * sizeof(engine_source *));
    if (more == NULL)
        return slot;
    more[slot] = NULL;
    e->sources = more;
    e->slots++;
    return slot;
}

static int add(rc_engine *e, engine_source *source, uint32_t events)
{
    size_t slot = find_slot(e);
    struct epoll_event event = {.events = events, .data.u64 = slot};
    struct stat is;
    if (slot == e->slots || fstat(source->fd, &is) != 0 ||
        epoll_ctl(e->set.epoll_fd, EPOLL_CTL_ADD, source->fd, &event) != 0)
        return 0;
    source->device = is.st_dev;
    source->inode = is.st_ino;
    source->events = events;
    source->slot = slot;
    e->sources[slot] = source;
    return 1;
}

rc_result engine_add(rc_engine *e, engine_source *source, uint32_t events, rc_error *error)
{
    if (add(e, source, events))
        return RC_OK;
    int number = errno;
    error_set(error, RC_SYSTEM, "epoll refuses a lane's socket (errno %d)", number);
    error->sys_errno = number;
    return RC_SYSTEM;
}

void engine_watch(rc_engine *e, engine_source *source, uint32_t events)
{
    if (source->fd < 0 || source->events == events)
        return;
    struct epoll_event event = {.events = events, .data.u64 = source->slot};
    epoll_ctl(e->set.epoll_fd, EPOLL_CTL_MOD, source->fd, &event);
    source->events = events;
}

void engine_remove(rc_engine *e, engine_source *source)
{
    if (source->fd < 0)
        return;
    if (engine_is_own(source)) {
        epoll_ctl(e->set.epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
        close(source->fd);
    }
    e->sources[source->slot] = NULL;
    source->fd = -1;
}

void engine_join(rc_engine *e, engine_member *member)
{
    member->due = 0;
    member->prev = NULL;
    member->next = e->members;
    if (e->members != NULL)
        e->members->prev = member;
    e->members = member;
    pollset_ring(&e->set);
}

void engine_leave(rc_engine *e, engine_member *member)
{
    if (member->prev != NULL)
        member->prev->next = member->next;
    else
        e->members = member->next;
    if (member->next != NULL)
        member->next->prev = member->prev;
}

void engine_schedule(rc_engine *e, engine_member *member, uint64_t due)
{
    if (due < member->due)
        member->due = due;
    if (e->sleeping && due < e->sleep_until)
        pollset_ring(&e->set);
}

void engine_pump(rc_engine *e, engine_member *member)
{
    member->pumped = 1;
    int more = member->pump(member);
    if ((more || member->expects) && e->sleeping)
        pollset_ring(&e->set); /* the driver neither pumps this member nor polls its memory yet */
}

void engine_pump_later(rc_engine *e, engine_member *member)
{
    member->pumped = 1;
    e->news = 1;
    if (e->sleeping)
        pollset_ring(&e->set);
}

void engine_quiesce(rc_engine *e)
{
    enum { QUIESCE_MS = 10 }; /* a waiter that drives again wakes no sleepers */
    uint64_t pass = e->passes;
    while (e->driver != ENGINE_REST && e->passes == pass) {
        pollset_ring(&e->set);
        sleep_until_changed(e, clock_ns() + QUIESCE_MS * CLOCK_MS);
    }
}

/* ---- driving ---- */

static void drain_submissions(rc_engine *e)
{
    if (!atomic_exchange(&e->submitted, 0))
        return;
    for (engine_member *member = e->members; member != NULL; member = member->next)
        member->drain(member);
}

static uint64_t run_timers(rc_engine *e, uint64_t now)
{
    uint64_t next = ENGINE_NEVER;
    for (engine_member *member = e->members; member != NULL; member = member->next) {
        if (member->due <= now)
            member->due = member->tick(member, now);
        if (member->due < next)
            next = member->due;
    }
    return next;
}

/* Returns 1 if there is more to do at once. */
static int pump_members(rc_engine *e)
{
    int more = 0;
    for (engine_member *member = e->members; member != NULL; member = member->next)
        if (member->pumped && member->pump(member))
            more = 1;
    return more;
}

static int epoll_timeout(uint64_t now, uint64_t until)
{
    if (until <= now)
        return 0;
    uint64_t ms = (until - now + CLOCK_MS - 1) / CLOCK_MS;
    return ms > LONGEST_SLEEP_MS ? LONGEST_SLEEP_MS : (int)ms;
}

/* Waits up to ADMIT_MS for threads that want the lock. Mutexes are unfair: a driver with events
 * pending would take the lock again before any thread that it woke by releasing it, for as long as
 * there is traffic. */
static void yield_to_callers(rc_engine *e)
{
    if (atomic_load(&e->callers) == 0)
        return;
    uint64_t deadline = clock_ns() + ADMIT_MS * CLOCK_MS;
    while (atomic_load(&e->callers) > 0 && clock_ns() < deadline)
        wait_unlocked(e, &e->admitted, deadline);
}

/* Counts the outcome of a spin. After each vain one twice as many waits go without: over a slow
 * wire, where an event is far away most of the time, spins then cost next to nothing. An event
 * during a sleep, so soon that a spin would have caught it, brings spins back. */
static void judge_spin(rc_engine *e, int caught)
{
    enum { MOST_MISSES = 6 };
    if (caught)
        e->failed_spins = 0;
    else if (e->failed_spins < MOST_MISSES)
        e->failed_spins++;
    e->waits_before_next_spin = caught ? 0 : (1 << e->failed_spins) - 1;
}

/* Spins on the only descriptor; returns 1 if something came. Under the engine's lock. */
static int spin_on_only_source(rc_engine *e, uint64_t start, uint64_t spin)
{
    if (spin == 0 || e->oversubscribed || e->waits_before_next_spin != 0 || e->sender != NULL)
        return 0;
    engine_source *only = polled_only_source(e);
    if (only == NULL)
        return 0;
    int caught = polled_look(e, only, start + spin);
    if (caught >= 0)
        judge_spin(e, caught);
    return caught > 0;
}

/* Waits with epoll_wait, after a spin if one is likely to succeed. Memory is polled before every
 * sleep: what is awaited there is never far away, and the bell that ends a sleep costs as much as a
 * hundred polls. Without the lock; the spin counts belong to the driver. */
static int wait_for_events(rc_engine *e, struct epoll_event *events, int timeout, uint64_t start,
                           uint64_t spin, const polled_members *polled)
{
    int may_spin = spin != 0 && (polled->poll_worthwhile || !e->oversubscribed);
    int in_memory = polled->count > 0 && !e->oversubscribed;
    if (timeout == 0)
        return epoll_wait(e->set.epoll_fd, events, EVENTS_PER_PASS, 0);
    if (may_spin && (in_memory || e->waits_before_next_spin == 0)) {
        int count = polled_events(e, events, EVENTS_PER_PASS, start + spin, polled);
        int caught = count != 0 || polled_can_advance(polled);
        if (!in_memory)
            judge_spin(e, caught);
        if (caught)
            return count;
    } else if (may_spin) {
        e->waits_before_next_spin--;
    }
    polled_set_wakeup_wanted(polled, 1);
    int can_advance = polled_can_advance(polled);
    int count = epoll_wait(e->set.epoll_fd, events, EVENTS_PER_PASS, can_advance ? 0 : timeout);
    polled_set_wakeup_wanted(polled, 0);
    if (may_spin && !in_memory && clock_ns() - start < spin)
        judge_spin(e, 1);
    return count;
}

/* Runs one round: waits for events without the lock, handles them under it. Returns 0 if a signal
 * came. */
static int drive_once(rc_engine *e, enum engine_driver driver, uint64_t until, uint64_t spin)
{
    struct epoll_event events[EVENTS_PER_PASS];
    e->news = 0;
    drain_submissions(e);
    int more = pump_members(e);
    uint64_t now = clock_ns();
    uint64_t due = run_timers(e, now);
    engine_settle(e);
    polled_members polled = polled_list(e);
    e->driver = driver;
    e->sleep_until = due < until ? due : until;
    int timeout =
        e->news || more || polled.others_can_advance ? 0 : epoll_timeout(now, e->sleep_until);
    int looks = timeout != 0 && polled.count == 0;
    int count = 0, interrupted = 0;
    if (!looks || !spin_on_only_source(e, now, spin)) {
        e->sleeping = 1;
        if (sender_has_news(e->sender)) /* only now: it wakes nobody who is not `sleeping` */
            timeout = 0;
        engine_unlock(e);
        count = wait_for_events(e, events, timeout, now, spin, &polled);
        interrupted = count < 0 && errno == EINTR;
        if (count < 0 && !interrupted)
            usleep(REFUSED_US);
        engine_lock(e);
        e->sleeping = 0;
    }
    drain_submissions(e);
    for (int i = 0; i < count; i++) {
        uint64_t slot = events[i].data.u64;
        engine_source *source = slot < e->slots ? e->sources[slot] : NULL;
        if (source != NULL)
            source->ready(source, events[i].events);
    }
    sender_settle(e->sender);
    pump_members(e);
    engine_settle(e);
    yield_to_callers(e);
    e->driver = ENGINE_REST;
    e->yielding = 0;
    e->passes++;
    return !interrupted;
}

/* Leaves driving to another thread, if there is something to drive: called by one that stops
 * driving or waiting. */
static void pass_driving_on(rc_engine *e)
{
    if (e->driver != ENGINE_REST)
        return;
    if (e->waiters > 0)
        call_sleepers(e);
    else if (e->active > 0 || atomic_load(&e->submitted))
        pthread_cond_signal(&e->parked);
}

int engine_drive(rc_engine *e, int (*finished)(const void *arg), const void *arg, uint64_t deadline,
                 uint64_t spin)
{
    uint64_t start = clock_ns(), now = start;
    int interrupted = 0;
    e->waiters++;
    while (!finished(arg) && now < deadline && !interrupted) {
        if (e->driver == ENGINE_REST) {
            interrupted = !drive_once(e, ENGINE_WAITER, deadline, spin);
        } else {
            if (e->driver == ENGINE_PROGRESS && !e->yielding) {
                e->yielding = 1;
                pollset_ring(&e->set);
            }
            sleep_until_changed(e, deadline);
        }
        now = clock_ns();
    }
    e->waiters--;
    e->last_waiter = now;
    e->waited += now - start;
    pass_driving_on(e);
    return finished(arg);
}

void engine_changed(rc_engine *e)
{
    e->news = 1;
    call_sleepers(e);
    if (e->sleeping && e->driver == ENGINE_WAITER)
        pollset_ring(&e->set); /* the driver may wait for the work that has finished */
}

void engine_submit(rc_engine *e, int waits)
{
    atomic_store(&e->submitted, 1);
    if (pthread_mutex_trylock(&e->lock) != 0) {
        pollset_ring(&e->set);
        if (!waits)
            pthread_cond_signal(&e->parked); /* the lock's holder need not be the driver */
        return;
    }
    e->mode_outside = float_mode_enter();
    drain_submissions(e);
    if (e->driver == ENGINE_REST && e->waiters == 0 && !waits)
        pthread_cond_signal(&e->parked);
    engine_unlock(e);
}

static void *progress(void *arg)
{
    rc_engine *e = arg;
    engine_lock(e);
    while (!e->stopping) {
        uint64_t now = clock_ns();
        uint64_t quiet = e->last_waiter + PARK_MS * CLOCK_MS;
        if (e->driver != ENGINE_REST || e->waiters > 0) {
            wait_unlocked(e, &e->parked, now + PARK_MS * CLOCK_MS);
        } else if (e->active == 0 && !atomic_load(&e->submitted) && now < quiet) {
            wait_unlocked(e, &e->parked, quiet);
        } else {
            drive_once(e, ENGINE_PROGRESS, ENGINE_NEVER, 0);
            engine_changed(e);
        }
    }
    engine_unlock(e);
    return NULL;
}

double engine_cpu_seconds(rc_engine *e)
{
    clockid_t clock;
    struct timespec used;
    if (pthread_getcpuclockid(e->thread, &clock) != 0 || clock_gettime(clock, &used) != 0)
        return 0.0;
    return (double)used.tv_sec + (double)used.tv_nsec * 1e-9 + sender_cpu_seconds(e->sender);
}
