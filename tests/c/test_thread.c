/* test_thread.c - threads that take no signals and round to nearest, and waits by the clock that
 * the core reads. */
#include "../../csrc/base/thread.h"

#include <fenv.h>

#include "check.h"

static void *blocked_signals(void *arg)
{
    sigset_t *mask = arg;
    pthread_sigmask(SIG_SETMASK, NULL, mask);
    return NULL;
}

static void it_takes_no_signals(void)
{
    sigset_t before, its, after;
    pthread_t thread;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    if (!CHECK(thread_start(&thread, blocked_signals, &its)))
        return;
    pthread_join(thread, NULL);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1};
    for (size_t i = 0; i < CHECK_COUNT(signals); i++) {
        CHECK(sigismember(&its, signals[i]));
        CHECK_EQ(sigismember(&after, signals[i]), sigismember(&before, signals[i]));
    }
}

static int rounds_to_nearest(void)
{
    volatile double one = 1.0, three = 3.0;
    return one / three == 0x1.5555555555555p-2;
}

static void *note_rounding(void *arg)
{
    *(int *)arg = rounds_to_nearest();
    return NULL;
}

static void it_rounds_to_nearest(void)
{
    int does = 0;
    pthread_t thread;
    fesetround(FE_UPWARD); /* a new thread would inherit it */
    if (CHECK(thread_start(&thread, note_rounding, &does)))
        pthread_join(thread, NULL);
    CHECK(does && !rounds_to_nearest());
    fesetround(FE_TONEAREST);
    float_mode_leave(float_mode_enter());
    CHECK(rounds_to_nearest());
}

static void a_wait_ends_at_its_time(void)
{
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t cond;
    thread_init_cond(&cond);
    pthread_mutex_lock(&lock);
    uint64_t until = clock_ns() + 20 * CLOCK_MS;
    while (clock_ns() < until)
        thread_wait_until(&cond, &lock, until);
    thread_wait_until(&cond, &lock, 0); /* which is long past */
    pthread_mutex_unlock(&lock);
    pthread_cond_destroy(&cond);
    CHECK(clock_ns() < until + 20 * CLOCK_S); /* not by a clock that counts from another day */
}

int main(void)
{
    static const check_test tests[] = {
        {"it_takes_no_signals", it_takes_no_signals},
        {"it_rounds_to_nearest", it_rounds_to_nearest},
        {"a_wait_ends_at_its_time", a_wait_ends_at_its_time},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
