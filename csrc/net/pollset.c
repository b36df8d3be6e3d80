/* pollset.c - see pollset.h. */
#include "pollset.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

static int control_bell(const pollset *p, int operation)
{
    struct epoll_event event = {.events = (uint32_t)EPOLLIN | (uint32_t)EPOLLET,
                                .data.u64 = POLLSET_BELL};
    return epoll_ctl(atomic_load(&p->epoll_fd), operation, atomic_load(&p->bell_fd), &event) == 0;
}

static void give_up(pollset *p)
{
    atomic_store(&p->epoll_fd, -1);
    atomic_store(&p->bell_fd, -1);
}

int pollset_open(pollset *p)
{
    int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    int bell_fd = epoll_fd < 0 ? -1 : eventfd(1, EFD_CLOEXEC);
    atomic_store(&p->epoll_fd, epoll_fd);
    atomic_store(&p->bell_fd, bell_fd);
    if (bell_fd >= 0 && control_bell(p, EPOLL_CTL_ADD))
        return 1;
    int number = errno;
    give_up(p);
    if (bell_fd >= 0)
        close(bell_fd);
    if (epoll_fd >= 0)
        close(epoll_fd);
    errno = number;
    return 0;
}

int pollset_ring(pollset *p)
{
    if (control_bell(p, EPOLL_CTL_MOD))
        return 1;
    give_up(p);
    return 0;
}

void pollset_close(pollset *p)
{
    int epoll_fd = atomic_load(&p->epoll_fd), bell_fd = atomic_load(&p->bell_fd);
    if (!pollset_ring(p))
        return;
    give_up(p);
    close(bell_fd);
    close(epoll_fd);
}
