/* test_thread.c - threads that take no signals, and waits by the clock that the core reads. */
#include "../../csrc/base/thread.h"

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
        {"a_wait_ends_at_its_time", a_wait_ends_at_its_time},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
