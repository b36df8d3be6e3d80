/* system.c - the calls that the core makes of the system: --wrap leads each to its __wrap_ here.
 * See os.h.
 */
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>

#include "inside.h"

enum { CLOCK_READ_NS = 20 };

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    if (clock != CLOCK_MONOTONIC || os.now == 0)
        return __real_clock_gettime(clock, now);
    os.now += CLOCK_READ_NS;
    now->tv_sec = (time_t)(os.now / 1000000000);
    now->tv_nsec = (long)(os.now % 1000000000);
    return 0;
}

/* Fails as a system call does. */
static int failing(int number)
{
    errno = number;
    return -1;
}

int __wrap_epoll_create1(int flags);
int __wrap_epoll_create1(int flags)
{
    (void)flags;
    return new_file((file){.kind = FILE_SET, .rank = os.rank});
}

int __wrap_eventfd(unsigned value, int flags);
int __wrap_eventfd(unsigned value, int flags)
{
    (void)value, (void)flags;
    return new_file((file){.kind = FILE_BELL, .rank = os.rank});
}

int __wrap_epoll_ctl(int set, int operation, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int set, int operation, int fd, struct epoll_event *event)
{
    file *f = file_of(fd);
    if (file_of(set) == NULL || f == NULL)
        return failing(EBADF);
    if ((operation == EPOLL_CTL_ADD) == (f->is_watched != 0))
        return failing(f->is_watched ? EEXIST : ENOENT);
    f->is_watched = operation != EPOLL_CTL_DEL;
    if (f->is_watched) {
        f->wanted = event->events;
        f->data = event->data.u64;
        f->rung = 1;
    }
    if (f->rank != os.rank)
        os_look_at(f->rank, os.now);
    return 0;
}

/* Takes a part of what there is, in an order that is drawn. */
static int collect(process *p, struct epoll_event *events, int room)
{
    int count = 0, first = (int)os_draw((uint64_t)p->count);
    room = os.pace.is_alone ? 1 : room;
    for (int i = 0; i < p->count && count < room; i++) {
        file *f = &os.files[p->files[(first + i) % p->count]];
        uint32_t what = f->is_watched ? events_of(f) : 0;
        if (what == 0 || (count > 0 && happens(os.mood.partial)))
            continue;
        events[count++] = (struct epoll_event){.events = what, .data.u64 = f->data};
        if (f->kind == FILE_BELL)
            f->rung = 0;
        count_event();
    }
    return p->is_dead ? 0 : count;
}

int __wrap_epoll_wait(int set, struct epoll_event *events, int room, int timeout);
int __wrap_epoll_wait(int set, struct epoll_event *events, int room, int timeout)
{
    file *f = file_of(set);
    if (f == NULL)
        return failing(os.processes[os.rank].is_dead ? EINTR : EBADF);
    process *p = &os.processes[f->rank];
    if (p->rounds-- > 0 && !happens(os.mood.interrupted)) {
        int count = collect(p, events, room);
        if (count > 0)
            return count;
    }
    p->rounds = 0;
    int never = timeout < 0 || (timeout > 0 && os.pace.never_awakes);
    p->wakes_at = never ? OS_NEVER : os.now + (uint64_t)timeout * 1000000;
    return failing(EINTR);
}

static uint64_t gather(const struct msghdr *message, uint8_t **bytes)
{
    uint64_t total = 0, at = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++)
        total += message->msg_iov[i].iov_len;
    *bytes = malloc(total + 1);
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        memcpy(*bytes + at, message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
        at += message->msg_iov[i].iov_len;
    }
    return total;
}

/* Returns why a call on the socket fails at once, or 0. */
static int refusal(end *e, int is_read)
{
    if (happens(os.mood.interrupted))
        return EINTR;
    if (happens(os.mood.refused))
        return is_read || os_draw(2) ? EAGAIN : ENOBUFS;
    if (is_read || e->rst_at > os.now)
        return 0;
    int is_first = !e->rst_told;
    e->rst_told = 1;
    return is_first ? ECONNRESET : EPIPE;
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    file *f = file_of(fd);
    (void)flags;
    if (f == NULL || f->kind != FILE_SOCKET)
        return failing(f == NULL ? EBADF : ENOTSOCK);
    lane *l = os.lanes[f->lane];
    int why = refusal(&l->ends[f->end], 0);
    uint64_t room = space(&l->out[f->end]);
    if (why == 0 && room == 0)
        why = EAGAIN;
    if (why != 0) {
        os_trace(f->rank, "send lane %d errno %d", f->lane, why);
        return failing(why);
    }
    uint8_t *bytes;
    uint64_t total = gather(message, &bytes), count = least(total, room);
    if (count > 1 && happens(os.mood.partial))
        count = 1 + os_draw(count);
    send_packets(l, f->end, bytes, count);
    free(bytes);
    os_trace(f->rank, "send lane %d %llu of %llu", f->lane, (unsigned long long)count,
             (unsigned long long)total);
    count_event();
    return (ssize_t)count;
}

static void scatter(const struct msghdr *message, const uint8_t *bytes, uint64_t count)
{
    for (size_t i = 0; i < message->msg_iovlen && count > 0; i++) {
        uint64_t part = least(count, message->msg_iov[i].iov_len);
        memcpy(message->msg_iov[i].iov_base, bytes, part);
        bytes += part;
        count -= part;
    }
}

static int end_of(end *e)
{
    if (e->rst_at <= os.now) {
        int is_first = !e->rst_told;
        e->rst_told = 1;
        return is_first ? failing(ECONNRESET) : 0;
    }
    return e->fin_at <= os.now ? 0 : failing(EAGAIN);
}

/* Has a read bring less than there is, but not time and again: what a kernel has, it soon gives. */
static uint64_t maybe_less(stream *in, uint64_t count)
{
    enum { MOST_SHORT_READS = 1 };
    int is_short = count > 1 && in->short_reads < MOST_SHORT_READS && happens(os.mood.partial);
    in->short_reads = is_short ? in->short_reads + 1 : 0;
    return is_short ? 1 + os_draw(count) : count;
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
    file *f = file_of(fd);
    (void)flags;
    if (f == NULL || f->kind != FILE_SOCKET)
        return failing(f == NULL ? EBADF : ENOTSOCK);
    lane *l = os.lanes[f->lane];
    int why = refusal(&l->ends[f->end], 1);
    if (why != 0)
        return failing(why);
    uint64_t wanted = 0, count = readable(&l->out[!f->end]);
    for (size_t i = 0; i < message->msg_iovlen; i++)
        wanted += message->msg_iov[i].iov_len;
    count = least(count, wanted);
    if (count == 0)
        return end_of(&l->ends[f->end]);
    count = maybe_less(&l->out[!f->end], count);
    uint8_t *bytes = malloc(count);
    take(l, f->end, bytes, count);
    scatter(message, bytes, count);
    free(bytes);
    os_trace(f->rank, "recv lane %d %llu of %llu", f->lane, (unsigned long long)count,
             (unsigned long long)wanted);
    return (ssize_t)count;
}

ssize_t __wrap_recv(int fd, void *bytes, size_t count, int flags);
ssize_t __wrap_recv(int fd, void *bytes, size_t count, int flags)
{
    struct iovec part = {bytes, count};
    return __wrap_recvmsg(fd, &(struct msghdr){.msg_iov = &part, .msg_iovlen = 1}, flags);
}

int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size);
int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    file *f = file_of(fd);
    if (f == NULL || level != IPPROTO_TCP || name != TCP_INFO || *size < sizeof(struct tcp_info))
        return failing(EBADF);
    stream *s = &os.lanes[f->lane]->out[f->end];
    settle(s);
    int in_flight = least(s->written, s->read + s->wire.receive_buffer) > s->acked;
    *(struct tcp_info *)value = (struct tcp_info){.tcpi_unacked = (uint32_t)in_flight};
    return 0;
}

int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t size);
int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    file *f = file_of(fd);
    if (f == NULL)
        return failing(EBADF);
    if (level == SOL_SOCKET && name == SO_RCVLOWAT && size == sizeof(int))
        os.lanes[f->lane]->ends[f->end].low_water = *(const int *)value;
    return 0;
}

int __wrap_ioctl(int fd, unsigned long request, ...);
int __wrap_ioctl(int fd, unsigned long request, ...)
{
    file *f = file_of(fd);
    va_list args;
    if (f == NULL || request != SIOCOUTQ)
        return failing(EBADF);
    va_start(args, request);
    int *queued = va_arg(args, int *);
    va_end(args);
    *queued = (int)unacked(&os.lanes[f->lane]->out[f->end]);
    return 0;
}

int __wrap_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...)
{
    (void)command;
    return file_of(fd) != NULL ? 0 : failing(EBADF);
}

int __wrap_fstat(int fd, struct stat *is);
int __wrap_fstat(int fd, struct stat *is)
{
    if (file_of(fd) == NULL)
        return failing(EBADF);
    memset(is, 0, sizeof *is);
    is->st_ino = (ino_t)fd;
    return 0;
}

int __real_close(int fd);
int __wrap_close(int fd);
int __wrap_close(int fd)
{
    file *f = file_of(fd);
    if (fd < FIRST_FD)
        return __real_close(fd);
    if (f == NULL)
        return failing(EBADF);
    os_trace(f->rank, "close %d lane %d", (int)f->kind, f->kind == FILE_SOCKET ? f->lane : -1);
    close_file(f);
    return 0;
}

int __wrap_usleep(unsigned us);
int __wrap_usleep(unsigned us)
{
    os.now += (uint64_t)us * 1000;
    return 0;
}

/* There are no threads: the progress thread is never started, and nobody waits for another. */

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *arg), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *arg), void *arg)
{
    (void)attributes, (void)run, (void)arg;
    memset(thread, 0, sizeof *thread);
    return 0;
}

int __wrap_pthread_join(pthread_t thread, void **result);
int __wrap_pthread_join(pthread_t thread, void **result)
{
    (void)thread, (void)result;
    return 0;
}

int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *lock,
                                  const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *lock,
                                  const struct timespec *until)
{
    (void)cond, (void)lock, (void)until;
    fputs("the only thread waits for another\n", stderr);
    abort();
}
