/* descriptors.c - see descriptors.h. */
#include "descriptors.h"

#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../base/clock.h"

enum {
    CHECK_EVERY_MS = 10,
    MARK_SHIFT = 48, /* above the addresses that Linux gives out unless asked for higher ones */
    MARK_BITS = 15
};

/* ---- the epoll set and the bell ---- */

/* Never 0, as the top of a plain address or a file's number is. */
static uint64_t new_mark(void)
{
    static atomic_uint made;
    unsigned number = atomic_fetch_add(&made, 1) & ((1U << MARK_BITS) - 1);
    return 1U << MARK_BITS | number;
}

struct epoll_event descriptors_event(const rc_engine *e, engine_source *source, uint32_t events)
{
    uint64_t data = e->mark << MARK_SHIFT | (uint64_t)(uintptr_t)source;
    return (struct epoll_event){.events = events, .data.u64 = data};
}

int descriptors_source(const rc_engine *e, const struct epoll_event *event, engine_source **source)
{
    uint64_t address = event->data.u64 ^ e->mark << MARK_SHIFT;
    *source = (engine_source *)(uintptr_t)address;
    return address >> MARK_SHIFT == 0;
}

static int control_bell(const rc_engine *e, int operation)
{
    struct epoll_event event = descriptors_event(e, NULL, EPOLLIN);
    return epoll_ctl(atomic_load(&e->epoll_fd), operation, atomic_load(&e->wake_fd), &event) == 0;
}

int descriptors_open(rc_engine *e)
{
    if (e->mark == 0) /* it stays: who rings reads it without the lock */
        e->mark = new_mark();
    int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    int wake_fd = epoll_fd < 0 ? -1 : eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    atomic_store(&e->epoll_fd, epoll_fd);
    atomic_store(&e->wake_fd, wake_fd);
    return wake_fd >= 0 && control_bell(e, EPOLL_CTL_ADD);
}

static int are_own(const rc_engine *e)
{
    return control_bell(e, EPOLL_CTL_MOD);
}

void descriptors_close(rc_engine *e)
{
    int epoll_fd = atomic_exchange(&e->epoll_fd, -1), wake_fd = atomic_exchange(&e->wake_fd, -1);
    struct epoll_event event = descriptors_event(e, NULL, EPOLLIN);
    int half_open = epoll_fd < 0 || wake_fd < 0;
    if (!half_open && epoll_ctl(epoll_fd, EPOLL_CTL_MOD, wake_fd, &event) != 0)
        return;
    if (epoll_fd >= 0)
        close(epoll_fd);
    if (wake_fd >= 0)
        close(wake_fd);
}

void descriptors_ring(const rc_engine *e)
{
    uint64_t one = 1;
    if (!are_own(e))
        return;                                                          /* the driver will see */
    ssize_t ignored = write(atomic_load(&e->wake_fd), &one, sizeof one); /* full: awake already */
    (void)ignored;
}

/* If there is no descriptor to be had just now, the next check tries again. */
static void renew(rc_engine *e)
{
    if (!descriptors_open(e)) {
        descriptors_close(e);
        return;
    }
    for (engine_source *source = e->sources; source != NULL; source = source->next) {
        struct epoll_event event = descriptors_event(e, source, source->events);
        epoll_ctl(atomic_load(&e->epoll_fd), EPOLL_CTL_ADD, source->fd, &event);
    }
}

/* ---- sources ---- */

int descriptors_note(engine_source *source)
{
    struct stat is;
    if (fstat(source->fd, &is) != 0)
        return 0;
    source->device = is.st_dev;
    source->inode = is.st_ino;
    return 1;
}

int descriptors_is_own(const engine_source *source)
{
    struct stat is;
    return fstat(source->fd, &is) == 0 && is.st_dev == source->device && is.st_ino == source->inode;
}

static engine_source *find_lost(const rc_engine *e)
{
    engine_source *source = e->sources;
    while (source != NULL && descriptors_is_own(source))
        source = source->next;
    return source;
}

void descriptors_check(rc_engine *e, uint64_t now)
{
    if (now - e->checked_at < CHECK_EVERY_MS * CLOCK_MS)
        return;
    e->checked_at = now;
    engine_source *source;
    while ((source = find_lost(e)) != NULL) { /* telling one may end others */
        int fd = source->fd;
        engine_forget(e, source);
        if (source->lost != NULL)
            source->lost(source, fd);
    }
    if (!are_own(e))
        renew(e);
}
