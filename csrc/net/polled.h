/* polled.h - what the driver polls while it waits, besides the epoll set: members' memory, and a
 * descriptor if it is the only one. Part of engine.c.
 *
 * Invariants. The list is made under the lock and used without it: members stay until the driver is
 * back (engine_quiesce). Members beyond MOST_POLLED always want to be woken, so peers ring for them
 * needlessly; nothing else comes of it.
 */
#ifndef RINGCOMM_POLLED_H
#define RINGCOMM_POLLED_H

#include <sched.h>
#include <sys/epoll.h>

#include "../base/clock.h"
#include "engine.h"

enum { MOST_POLLED = 16 };

typedef struct polled_members {
    engine_member *member[MOST_POLLED];
    int count;
    int others_can_advance; /* a member beyond MOST_POLLED can advance */
    int alone;              /* the only work in flight waits for memory */
    int poll_worthwhile;    /* polling for the works in flight pays where ranks outnumber cores */
} polled_members;

static inline polled_members polled_list(const rc_engine *e)
{
    polled_members polled = {.poll_worthwhile = e->active > 0 && e->large_works == 0,
                             .alone = e->active == 1};
    for (engine_member *member = e->members; member != NULL; member = member->next) {
        if (member->expects && polled.count < MOST_POLLED) {
            polled.member[polled.count++] = member;
            polled.poll_worthwhile |= member->poll_worthwhile;
        } else if (member->expects) {
            member->set_wakeup_wanted(member, 1);
            polled.others_can_advance |= member->can_advance(member);
        }
    }
    return polled;
}

/* Returns 1 if a polled member can advance. */
static inline int polled_can_advance(const polled_members *polled)
{
    for (int i = 0; i < polled->count; i++)
        if (polled->member[i]->can_advance(polled->member[i]))
            return 1;
    return 0;
}

/* Takes the events of descriptors, now that memory lets a member advance. If nothing else is in
 * flight these are heartbeats and failures, and one look in so many is enough. */
static inline int polled_beside(rc_engine *e, struct epoll_event *events, int most,
                                const polled_members *polled)
{
    enum { POLLS_PER_EPOLL = 16 };
    if (polled->alone && ++e->polls_since_epoll < POLLS_PER_EPOLL)
        return 0;
    e->polls_since_epoll = 0;
    return epoll_wait(e->set.epoll_fd, events, most, 0);
}

/* Polls until a member can advance, events have come (at most so many) or the deadline. Reading
 * memory costs next to nothing, looking at descriptors a system call: so memory, if there is any,
 * is read more often. Where ranks outnumber cores, each poll lets another rank run, which may be
 * the awaited one. */
static inline int polled_events(rc_engine *e, struct epoll_event *events, int most,
                                uint64_t deadline, const polled_members *polled)
{
    enum { LOOKS = 32 };
    int count;
    do {
        for (int i = 0; i < LOOKS && polled->count > 0; i++) {
            if (polled_can_advance(polled))
                return polled_beside(e, events, most, polled);
            if (e->oversubscribed)
                sched_yield();
        }
        count = epoll_wait(e->set.epoll_fd, events, most, 0);
        if (count == 0 && e->oversubscribed)
            sched_yield();
    } while (count == 0 && clock_ns() < deadline);
    return count;
}

/* Returns the descriptor from which all awaited events come, if it is the only one and can be read
 * directly; else NULL. */
static inline engine_source *polled_only_source(const rc_engine *e)
{
    engine_source *only = NULL;
    for (size_t slot = 0; slot < e->slots; slot++) {
        engine_source *source = e->sources[slot];
        if (source == NULL || source->quiet)
            continue;
        if (only != NULL)
            return NULL;
        only = source;
    }
    return only != NULL && only->events == EPOLLIN && only->look != NULL ? only : NULL;
}

/* Reads the only descriptor until something has come (1), the deadline (0), or a thread wants the
 * lock (-1). Polling the epoll set instead would take the lock under which the kernel enters
 * arrivals there, and so slow down the sender. Under the engine's lock. */
static inline int polled_look(rc_engine *e, engine_source *only, uint64_t deadline)
{
    do {
        if (only->look(only))
            return 1;
        if (atomic_load(&e->callers) > 0 || atomic_load(&e->submitted))
            return -1;
    } while (clock_ns() < deadline);
    return 0;
}

static inline void polled_set_wakeup_wanted(const polled_members *polled, int wanted)
{
    for (int i = 0; i < polled->count; i++)
        polled->member[i]->set_wakeup_wanted(polled->member[i], wanted);
}

#endif
