/* thread.h - the library's own threads, and waits until a time by the clock of clock.h.
 *
 * The library's threads take no signals: they belong to the program's own threads, whose waits they
 * are meant to interrupt. And they compute in the default mode (float_mode.h), which threads
 * inherit like those.
 */
#ifndef RINGCOMM_THREAD_H
#define RINGCOMM_THREAD_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>

#include "clock.h"
#include "float_mode.h"

/* Starts a thread. Returns 1, or 0 with errno set. */
static inline int thread_start(pthread_t *thread, void *(*run)(void *arg), void *arg)
{
    sigset_t all, old;
    float_mode mode = float_mode_enter();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    float_mode_leave(mode);
    if (failed)
        errno = failed;
    return !failed;
}

/* Initializes a condition for thread_wait_until. */
static inline void thread_init_cond(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Waits for the condition, at most until the time (clock_ns). */
static inline void thread_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until)
{
    struct timespec at = {.tv_sec = (time_t)(until / CLOCK_S), .tv_nsec = (long)(until % CLOCK_S)};
    pthread_cond_timedwait(cond, lock, &at);
}

#endif
