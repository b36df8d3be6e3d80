/* engine.h - the event loop, and which thread runs it.
 *
 * Problem. A collective must progress while its caller computes, so a thread of the library has to
 * run it; but a caller that waits should not pay two thread hand-offs per message.
 *
 * Design. One epoll set, one lock. At any moment at most one thread drives: it waits for events
 * without the lock and handles them under it. A thread that waits for a work drives the engine
 * itself; the progress thread drives when nobody waits, and steps aside when somebody starts to.
 * Between two rounds the driver lets all threads that want the lock have it, so that traffic keeps
 * none out.
 *
 *          rc_submit                     rc_work_wait                 progress thread
 *     inbox, then try the lock      drives, or sleeps until        drives when nobody else does,
 *     and start the work, or        the driver has finished        parks while others come and go
 *     wake the driver               its work
 *
 * Everything a member owns (links, lanes, works) is touched under the lock only. Excepted are
 * members of rc_engine marked otherwise, and outboxes handed over to the second thread, if there is
 * one (sender.h). The engine knows descriptors and members, not what they mean.
 *
 * Invariants. Handlers run under the lock and never wait; a source that was removed gets no calls.
 * What handlers find to be over lives on until they have returned: it is ended by `settle`, and
 * nothing waits for that while the lock is free.
 * A descriptor number that is another file's by now, because somebody else in the process has
 * closed the source's, is never closed. Where the epoll set is lost that way (pollset.h) the driver
 * runs without it, from timer to timer: the members find out (engine_is_whole) and fail.
 */
#ifndef RINGCOMM_ENGINE_H
#define RINGCOMM_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "../base/float_mode.h"
#include "../include/ringcomm.h"
#include "../kernels/kernels.h"
#include "pollset.h"

#define ENGINE_NEVER UINT64_MAX

/* A descriptor in the epoll set; embedded in its owner. fd is -1 once it is closed. */
typedef struct engine_source {
    int fd;
    uint32_t events; /* EPOLLIN, EPOLLOUT as registered */
    int quiet;       /* events are so rare that nobody polls for them */
    void (*ready)(struct engine_source *source, uint32_t events);
    int (*look)(struct engine_source *source); /* reads what has come; 1: something had. Or NULL */
    size_t slot;  /* in rc_engine.sources, and the data of its events */
    dev_t device; /* of the open file */
    ino_t inode;
} engine_source;

/* A communicator, as the engine sees it: it takes submissions and has deadlines. What it waits for
 * may also be written into memory by other processes; while it is, the driver polls there too. */
typedef struct engine_member {
    void (*drain)(struct engine_member *member); /* takes what was submitted */
    /* Handles what is due; returns when to be called again (ns, or ENGINE_NEVER). */
    uint64_t (*tick)(struct engine_member *member, uint64_t now);
    uint64_t due;
    int pumped;          /* pump is called in every round */
    int expects;         /* memory is polled: can_advance and set_wakeup_wanted are called, too */
    int poll_worthwhile; /* polling that memory pays where ranks outnumber cores */
    int (*pump)(struct engine_member *member); /* advances works; 1: can do more at once */
    /* Without the lock: returns 1 if pump could advance; says whether peers shall ring. */
    int (*can_advance)(const struct engine_member *member);
    void (*set_wakeup_wanted)(struct engine_member *member, int wanted);
    void (*settle)(struct engine_member *member); /* ends what its handlers have found over */
    struct engine_member *next, *prev;
} engine_member;

/* An entry of the queue of finished works (rc_engine_take_done). */
typedef struct engine_done {
    struct engine_done *next;
    void (*drop)(struct engine_done *entry); /* frees an entry that nobody took */
} engine_done;

struct rc_engine {
    pthread_mutex_t lock;
    pthread_cond_t changed;  /* a work finished, or the driver stepped aside */
    pthread_cond_t parked;   /* the progress thread waits here while others drive */
    pthread_cond_t admitted; /* the driver waits here for the last of the callers */
    atomic_int callers;      /* threads that want the lock and get it before the next round */
    int sleepers;            /* threads that wait for changed */
    uint64_t alarms;         /* times that sleepers were called */
    float_mode mode_outside; /* of the thread that has the lock, without it */
    pthread_t thread;
    pollset set;
    enum engine_driver { ENGINE_REST, ENGINE_WAITER, ENGINE_PROGRESS } driver; /* right now */
    atomic_int sleeping; /* the driver is inside epoll_wait, without the lock */
    int news;            /* a work finished, or a pump was asked for, since the driver looked */
    int unsettled;       /* some member is to be settled */
    int yielding;        /* the progress thread was asked to step aside */
    int waiters;         /* threads inside engine_drive */
    int active;          /* works in flight; kept by the members */
    int large_works;     /* works too long to poll for where ranks outnumber cores; kept likewise */
    int stopping;
    uint64_t passes;            /* rounds of events handled */
    uint64_t waited;            /* ns that threads have spent inside engine_drive */
    uint64_t last_waiter;       /* when the last waiter left */
    uint64_t sleep_until;       /* until when the driver sleeps */
    int failed_spins;           /* in a row */
    int waits_before_next_spin; /* waits to go without a spin */
    int polls_since_epoll;   /* polls of memory in a row without a look at descriptors (polled.h) */
    int oversubscribed;      /* ranks outnumber cores: polls for brief works only, and yields */
    struct sender *sender;   /* a second thread (sender.h), or NULL */
    engine_source **sources; /* by slot; NULL: free */
    size_t slots;
    engine_member *members;
    const kernel_set *kernels;

    pthread_mutex_t inbox_lock; /* guards the members' inboxes; taken before nothing else */
    atomic_int submitted;       /* some inbox is not empty */
    atomic_int forked;          /* this is a forked child: nothing works here any more */
    atomic_int holders;         /* works; one less after rc_engine_free. Below 0: destroyed */

    pthread_mutex_t done_lock;
    pthread_cond_t done_ready;
    engine_done *done_head, *done_tail;
    int done_interrupted;
};

/* Adds or drops a holder. Holders keep the locks in existence, so that a thread on its way into a
 * wait for a finished work finds them even when all communicators and the engine itself are freed
 * meanwhile. */
void engine_retain(rc_engine *e);
void engine_release(rc_engine *e);

/* Take the lock, under which all arithmetic is in the default mode (float_mode.h), and let go of it
 * once all is settled. */
void engine_lock(rc_engine *e);
void engine_unlock(rc_engine *e);
/* Has the members settled once the handlers that run have returned. Under the lock. */
static inline void engine_settle_later(rc_engine *e)
{
    e->unsettled = 1;
}
/* Settles the members now, if one is to be; not from a handler. Under the lock. */
void engine_settle_members(rc_engine *e);
static inline void engine_settle(rc_engine *e)
{
    if (e->unsettled)
        engine_settle_members(e);
}

/* Add a source, and change its events (EPOLLIN, EPOLLOUT). Under the lock. */
rc_result engine_add(rc_engine *e, engine_source *source, uint32_t events, rc_error *error);
void engine_watch(rc_engine *e, engine_source *source, uint32_t events);
/* Takes the source out of the set and closes its descriptor. Under the lock; does nothing the
 * second time. */
void engine_remove(rc_engine *e, engine_source *source);

/* Returns 1 if the source's descriptor is still the file that was added. */
int engine_is_own(const engine_source *source);
/* Returns 0 if somebody else in the process has closed the descriptors that the engine or its
 * sender waits with. */
int engine_is_whole(rc_engine *e);

void engine_join(rc_engine *e, engine_member *member);
void engine_leave(rc_engine *e, engine_member *member);
/* Asks for the member's tick at due or earlier. */
void engine_schedule(rc_engine *e, engine_member *member, uint64_t due);
/* Pumps the member now and in every round, until the member clears `pumped`. Under the lock. */
void engine_pump(rc_engine *e, engine_member *member);
/* Pumps the member in every round, from the next one on. Under the lock. */
void engine_pump_later(rc_engine *e, engine_member *member);
/* Waits until the driver no longer polls for a member that has left. Under the lock, which is
 * released meanwhile; not from a handler. */
void engine_quiesce(rc_engine *e);

/* Starts the works in the inboxes now, or has the driver do it; called after one was put there.
 * With waits the caller promises to drive next, and the progress thread is left asleep. Without the
 * lock. */
void engine_submit(rc_engine *e, int waits);

/* Drives until finished(arg), the deadline (ns) or a signal. Under the lock, which is released
 * meanwhile. Returns finished(arg). spin: how long (ns) it polls for events before it sleeps, which
 * saves the two scheduler delays of a sleep where each rank has a core of its own. */
int engine_drive(rc_engine *e, int (*finished)(const void *arg), const void *arg, uint64_t deadline,
                 uint64_t spin);
/* Has threads in engine_drive check their condition again. Under the lock. */
void engine_changed(rc_engine *e);

void engine_push_done(rc_engine *e, engine_done *entry);
/* Waits up to timeout_ms for an entry; NULL if none came. Without the lock. */
engine_done *engine_pop_done(rc_engine *e, int timeout_ms);
/* Ends the current or next engine_pop_done. */
void engine_interrupt_done(rc_engine *e);

/* Returns the CPU seconds of the engine's own threads. */
double engine_cpu_seconds(rc_engine *e);

/* Returns the engine's sender (sender.h), started if there is none; NULL if that fails. Under the
 * lock. */
struct sender *sender_get(rc_engine *e);

#endif
