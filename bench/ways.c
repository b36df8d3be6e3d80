/* ways.c - one rank of ways.py: a duplex stream by one thread, by one way of calling the kernel.
 *
 *     ways WAY BYTES SECONDS CONGESTION     WAY: vectors, zerocopy, uring, uring-zc
 *
 * Both ranks send and receive at once on one connection, BYTES per call, as the engine does with a
 * segment. vectors is sendmsg and readv; zerocopy adds MSG_ZEROCOPY; uring has a send and a recv
 * under way in a ring, uring-zc with the sends by IORING_OP_SEND_ZC. RANK, MASTER_ADDR and
 * MASTER_PORT are torchrun's. Prints GB/s received, CPU seconds of this rank per GB sent, and which
 * part of the zero-copy sends the kernel copied after all.
 *
 * Nothing is made of the bytes, and a buffer is sent again before its notification: this measures
 * the calls and is no use for anything else.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <linux/io_uring.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 16 << 20, ENTRIES = 8, OUTSTANDING = 16 };
enum { SEND = 1, RECV = 2 }; /* user_data of a ring's entries */
static const double WARM_S = 0.3;

typedef struct stream {
    int fd, zerocopy;
    size_t size;
    char *out, *in;
    uint64_t sent, received;
    uint64_t notified, copied; /* zero-copy sends */
    uint64_t asked;
} stream;

typedef struct ring {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    unsigned queued, under_way;
} ring;

static void die(const char *what)
{
    printf("sweep: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double cpu(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    if (!value) {
        printf("sweep: %s is not set\n", name);
        exit(1);
    }
    return value;
}

static int join(const char *congestion)
{
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)atoi(variable("MASTER_PORT")))};
    inet_pton(AF_INET, variable("MASTER_ADDR"), &at.sin_addr);
    if (atoi(variable("RANK")) == 0) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 1))
            die("listen");
        int taken = accept(fd, NULL, NULL);
        close(fd);
        fd = taken;
    } else {
        double end = now() + 10;
        while (connect(fd, (struct sockaddr *)&at, sizeof at)) {
            if (now() > end)
                die("connect");
            usleep(10000);
        }
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, (socklen_t)strlen(congestion));
    return fd;
}

/* Where in a buffer the next call reads or writes. */
static size_t place(const stream *s, uint64_t moved)
{
    return moved / s->size % (BUFFER / s->size) * s->size;
}

/* ---- sendmsg and readv ---- */

static void take_notifications(stream *s)
{
    char control[128];
    struct msghdr message = {.msg_control = control, .msg_controllen = sizeof control};
    while (recvmsg(s->fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) >= 0) {
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
            struct sock_extended_err e;
            memcpy(&e, CMSG_DATA(c), sizeof e);
            if (e.ee_origin != SO_EE_ORIGIN_ZEROCOPY)
                continue;
            uint64_t count = (uint64_t)(e.ee_data - e.ee_info) + 1;
            s->notified += count;
            s->copied += e.ee_code & SO_EE_CODE_ZEROCOPY_COPIED ? count : 0;
        }
        message.msg_controllen = sizeof control;
    }
}

static void by_vectors(stream *s)
{
    struct iovec out = {s->out + place(s, s->sent), s->size};
    struct iovec in = {s->in + place(s, s->received), s->size};
    struct msghdr message = {.msg_iov = &out, .msg_iovlen = 1};
    int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (s->zerocopy ? MSG_ZEROCOPY : 0);
    ssize_t sent = -1;
    if (!s->zerocopy || s->asked - s->notified < OUTSTANDING)
        sent = sendmsg(s->fd, &message, flags);
    ssize_t received = readv(s->fd, &in, 1);
    if (sent > 0) {
        s->sent += (uint64_t)sent;
        s->asked++;
    }
    if (received > 0)
        s->received += (uint64_t)received;
    if (s->zerocopy)
        take_notifications(s);
    if (sent <= 0 && received <= 0) {
        struct pollfd wait = {.fd = s->fd, .events = POLLIN | POLLOUT};
        poll(&wait, 1, 10);
    }
}

/* ---- io_uring ---- */

static void open_ring(ring *r)
{
    struct io_uring_params p = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    r->fd = (int)syscall(SYS_io_uring_setup, ENTRIES, &p);
    if (r->fd < 0)
        die("io_uring_setup");
    size_t sq_bytes = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    size_t cq_bytes = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    int prot = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    char *sq = mmap(NULL, sq_bytes, prot, flags, r->fd, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, cq_bytes, prot, flags, r->fd, IORING_OFF_CQ_RING);
    void *sqes =
        mmap(NULL, p.sq_entries * sizeof(struct io_uring_sqe), prot, flags, r->fd, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || sqes == MAP_FAILED)
        die("the ring's memory");
    r->sq_tail = (unsigned *)(void *)(sq + p.sq_off.tail);
    r->sq_mask = (unsigned *)(void *)(sq + p.sq_off.ring_mask);
    r->sq_array = (unsigned *)(void *)(sq + p.sq_off.array);
    r->cq_head = (unsigned *)(void *)(cq + p.cq_off.head);
    r->cq_tail = (unsigned *)(void *)(cq + p.cq_off.tail);
    r->cq_mask = (unsigned *)(void *)(cq + p.cq_off.ring_mask);
    r->cqes = (struct io_uring_cqe *)(void *)(cq + p.cq_off.cqes);
    r->sqes = sqes;
}

static void queue(ring *r, const stream *s, int what)
{
    unsigned tail = *r->sq_tail, at = tail & *r->sq_mask;
    char *buffer = what == SEND ? s->out + place(s, s->sent) : s->in + place(s, s->received);
    uint8_t op = IORING_OP_RECV;
    if (what == SEND)
        op = s->zerocopy ? IORING_OP_SEND_ZC : IORING_OP_SEND;
    r->sqes[at] = (struct io_uring_sqe){
        .opcode = op,
        .fd = s->fd,
        .addr = (uint64_t)(uintptr_t)buffer,
        .len = (uint32_t)s->size,
        .msg_flags = MSG_NOSIGNAL,
        .ioprio = what == SEND && s->zerocopy ? IORING_SEND_ZC_REPORT_USAGE : 0,
        .user_data = (unsigned)what,
    };
    r->sq_array[at] = at;
    __atomic_store_n(r->sq_tail, tail + 1, __ATOMIC_RELEASE);
    r->queued++;
    r->under_way++;
}

static void by_ring(stream *s, ring *r)
{
    if (syscall(SYS_io_uring_enter, r->fd, r->queued, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
        die("io_uring_enter");
    r->queued = 0;
    unsigned head = *r->cq_head;
    for (; head != __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE); head++) {
        const struct io_uring_cqe *cqe = &r->cqes[head & *r->cq_mask];
        if (cqe->flags & IORING_CQE_F_NOTIF) {
            s->notified++;
            s->copied += ((uint32_t)cqe->res & IORING_NOTIF_USAGE_ZC_COPIED) != 0;
            continue;
        }
        r->under_way--;
        if (cqe->res <= 0)
            continue; /* the other rank has ended */
        *(cqe->user_data == SEND ? &s->sent : &s->received) += (uint64_t)cqe->res;
        queue(r, s, (int)cqe->user_data);
    }
    __atomic_store_n(r->cq_head, head, __ATOMIC_RELEASE);
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    int in_ring = strncmp(argv[1], "uring", 5) == 0, on = 1;
    double seconds = atof(argv[3]);
    stream s = {.zerocopy = strcmp(argv[1], "zerocopy") == 0 || strcmp(argv[1], "uring-zc") == 0,
                .size = (size_t)atol(argv[2])};
    ring r = {0};
    s.out = mmap(NULL, 2 * BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s.out == MAP_FAILED)
        die("the buffers");
    s.in = s.out + BUFFER;
    memset(s.out, 1, 2 * BUFFER);
    s.fd = join(argv[4]);
    if (s.zerocopy && setsockopt(s.fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on))
        die("SO_ZEROCOPY");
    if (!in_ring)
        fcntl(s.fd, F_SETFL, O_NONBLOCK);
    else {
        open_ring(&r);
        queue(&r, &s, SEND);
        queue(&r, &s, RECV);
    }
    double begin = now() + WARM_S, end = begin + seconds, at, first = 0, used = 0;
    uint64_t received = 0, sent = 0;
    while ((at = now()) < end) {
        if (!used && at >= begin)
            first = at, used = cpu(), received = s.received, sent = s.sent;
        if (in_ring)
            by_ring(&s, &r);
        else
            by_vectors(&s);
    }
    used = cpu() - used;
    printf("{\"rate\": %.6f, \"cpu\": %.6f, \"copied\": %.3f}\n",
           (double)(s.received - received) / (at - first) / 1e9,
           used / (double)(s.sent - sent) * 1e9,
           s.notified ? (double)s.copied / (double)s.notified : 0.0);
    fflush(stdout);
    for (double last = now() + WARM_S; now() < last;) { /* the other rank may not be done */
        if (!in_ring)
            by_vectors(&s);
        else if (r.under_way)
            by_ring(&s, &r);
    }
    return 0;
}
