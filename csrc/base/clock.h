/* clock.h - time as monotonic nanoseconds; nothing in the core reads wall-clock time. */
#ifndef RINGCOMM_CLOCK_H
#define RINGCOMM_CLOCK_H

#include <stdint.h>
#include <time.h>

#define CLOCK_US UINT64_C(1000)
#define CLOCK_MS UINT64_C(1000000)
#define CLOCK_S UINT64_C(1000000000)

static inline uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * CLOCK_S + (uint64_t)now.tv_nsec;
}

/* Seconds from then to now; 0 if then lies ahead. */
static inline double clock_seconds(uint64_t then, uint64_t now)
{
    return now > then ? (double)(now - then) * 1e-9 : 0.0;
}

#endif
