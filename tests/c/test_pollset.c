/* test_pollset.c - the bell of an epoll set; and what becomes of a communicator when somebody else
 * in the process closes its descriptors: it fails with an error that says so, burns no core, and no
 * file that has the number now is touched.
 */
#include "../../csrc/net/pollset.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <time.h>

#include "world.h"

/* What there may be at the number of a descriptor that somebody has closed. */
typedef enum successor { NOTHING, A_FILE, A_SET, A_SOCKET, SUCCESSORS } successor;

static float data[2][1000];
static const char *const closed_text =
    "another part of this process closed descriptors of ringcomm";

/* Closes the number, and has it be that of the other file. */
static void move_to(int fd, int number)
{
    CHECK_EQ(dup2(fd, number), number);
    close(fd);
}

/* Returns what expect_untouched looks at the successor by, or -1. */
static int replace(int number, successor by)
{
    int pair[2], bell, set;
    switch (by) {
    case A_FILE: move_to(memfd_create("another's", 0), number); return -1;
    case A_SET: /* it always has an event, with the number of a file, as asyncio has it */
        bell = eventfd(1, EFD_CLOEXEC);
        set = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = bell};
        CHECK_EQ(epoll_ctl(set, EPOLL_CTL_ADD, bell, &event), 0);
        move_to(set, number);
        return bell;
    case A_SOCKET:
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        move_to(pair[0], number);
        return pair[1];
    case NOTHING:
    case SUCCESSORS: break;
    }
    close(number);
    return -1;
}

/* It is still there, and nothing was written to it. */
static void expect_untouched(int number, successor by, int beside)
{
    uint64_t rung = 0;
    struct stat is;
    if (by == A_FILE && CHECK_EQ(fstat(number, &is), 0)) {
        CHECK_EQ(is.st_size, 0);
        CHECK_EQ(lseek(number, 0, SEEK_CUR), 0);
    }
    if (by == A_SET) {
        CHECK_EQ(read(beside, &rung, sizeof rung), (ssize_t)sizeof rung);
        CHECK_EQ(rung, 1);
    }
    if (by == A_SOCKET) {
        CHECK_EQ(recv(beside, &rung, sizeof rung, MSG_DONTWAIT), -1);
        CHECK_EQ(errno, EAGAIN);
    }
    if (by != NOTHING)
        CHECK_EQ(close(number), 0);
    if (beside >= 0)
        close(beside);
}

/* ---- the bell ---- */

static int events_of(const pollset *p)
{
    struct epoll_event events[4];
    int count = epoll_wait(p->epoll_fd, events, 4, 0);
    for (int i = 0; i < count; i++)
        CHECK(events[i].data.u64 == POLLSET_BELL);
    return count;
}

static void each_ring_ends_one_wait(void)
{
    pollset p;
    int before = open_fds();
    CHECK(pollset_open(&p));
    events_of(&p);
    CHECK_EQ(events_of(&p), 0);
    for (int rings = 1; rings < 3; rings++) {
        for (int i = 0; i < rings; i++)
            CHECK(pollset_ring(&p));
        CHECK_EQ(events_of(&p), 1);
        CHECK_EQ(events_of(&p), 0);
    }
    pollset_close(&p);
    CHECK(!pollset_ring(&p));
    pollset_close(&p);
    CHECK_EQ(open_fds(), before);
}

static void numbers_of_others_are_given_up(void)
{
    for (int bell = 0; bell < 2; bell++)
        for (successor by = NOTHING; by < SUCCESSORS; by++) {
            pollset p;
            CHECK(pollset_open(&p));
            int fds[2] = {p.epoll_fd, p.bell_fd};
            int beside = replace(fds[bell], by);
            CHECK(!pollset_ring(&p));
            CHECK_EQ(p.epoll_fd, -1);
            CHECK_EQ(p.bell_fd, -1);
            pollset_close(&p);
            expect_untouched(fds[bell], by, beside);
            close(fds[1 - bell]); /* what is left of the pair is not closed either */
        }
}

/* ---- communicators ---- */

static void run_once(const world *w)
{
    rc_work *works[2];
    for (int rank = 0; rank < 2; rank++) {
        rc_call call = small_call(RC_ALLREDUCE, data[rank], 1000);
        works[rank] = submit(w->comms[rank], &call);
    }
    for (int rank = 0; rank < 2; rank++)
        expect_done(works[rank]);
}

static world *open_world(uint32_t threads)
{
    world *w = world_open((world_options){
        .size = 2, .engines = 1, .threads = threads, .spin_us = 1000, .heartbeat_ms = 200});
    run_once(w);
    return w;
}

static int lane_fd(const world *w, int rank)
{
    engine_lock(w->engines[rank]);
    int fd = w->comms[rank]->env.links[1 - rank]->lanes[0]->source.fd;
    engine_unlock(w->engines[rank]);
    return fd;
}

static void wait_for_failure(const rc_comm *c)
{
    for (int ms = 0; c->state == COMM_RUNNING && ms < WORLD_LONG_MS; ms++)
        usleep(1000);
}

/* In a call, at once; or in none: then a heartbeat's time finds it, before anything is sent. */
static void a_closed_socket_is_said(void)
{
    for (successor by = NOTHING; by < SUCCESSORS; by++)
        for (int idle = by == A_SOCKET; idle < 2; idle++) {
            world *w = open_world(1 + by % 2); /* with a sender, and without */
            rc_call call = small_call(RC_ALLREDUCE, data[0], 1000);
            rc_error error;
            int fd = lane_fd(w, 0), beside = replace(fd, by);
            if (idle)
                wait_for_failure(w->comms[0]);
            rc_work *work = submit(w->comms[0], &call);
            CHECK_EQ(outcome(work, &error), RC_SYSTEM);
            CHECK_EQ(error.rank, 0);
            CHECK_EQ(error.rail, 0);
            CHECK_EQ(error.lane, 0);
            char text[160];
            snprintf(text, sizeof text,
                     "%s on rank 0: %d, the socket of lane 0 of rail 0 to rank 1 (", closed_text,
                     fd);
            if (!CHECK(strstr(error.message, text) != NULL))
                fprintf(stderr, "the error is: %s\n", error.message);
            rc_work_free(work);
            rc_call other = small_call(RC_ALLREDUCE, data[1], 1000);
            expect_failure(submit(w->comms[1], &other), RC_PEER_LOST, "rank 0 is lost");
            world_close(w);
            expect_untouched(fd, by, beside);
        }
}

/* Another rank sees the end of the connection at once, and tells all others that this one is lost.
 */
static void who_lost_it_knows_better(void)
{
    world *w = world_open((world_options){.size = 3, .engines = 1, .heartbeat_ms = 4000});
    usleep(50000); /* the first timers are over, the next far off */
    close(lane_fd(w, 0));
    wait_for_failure(w->comms[0]);
    rc_call call = small_call(RC_ALLREDUCE, data[0], 1000);
    expect_failure(submit(w->comms[0], &call), RC_SYSTEM, closed_text);
    world_close(w);
}

/* The set of the engine or of its sender, or the bell in it. */
static void a_closed_set_is_said(void)
{
    for (int which = 0; which < 4; which++)
        for (successor by = NOTHING; by < SUCCESSORS; by++) {
            world *w = open_world(2);
            rc_engine *e = w->engines[0];
            int fds[4] = {e->set.epoll_fd, e->set.bell_fd, e->sender->set.epoll_fd,
                          e->sender->set.bell_fd};
            int beside = replace(fds[which], by);
            wait_for_failure(w->comms[0]);
            for (int calls = 0; calls < 2; calls++) {
                rc_call call = small_call(RC_ALLREDUCE, data[0], 1000);
                expect_failure(submit(w->comms[0], &call), RC_SYSTEM, closed_text);
            }
            world_close(w);
            expect_untouched(fds[which], by, beside);
            close(fds[which ^ 1]);
        }
}

/* All at once, as os.closerange does, while a work is in flight and while none is. */
static void losing_everything_burns_nothing(void)
{
    for (uint32_t threads = 1; threads <= 2; threads++)
        for (int in_flight = 0; in_flight < 2; in_flight++) {
            world *w = open_world(threads);
            rc_engine *e = w->engines[0];
            rc_call call = small_call(RC_ALLREDUCE, data[0], 1000);
            rc_work *work = in_flight ? submit(w->comms[0], &call) : NULL;
            int fds[5] = {e->set.epoll_fd, e->set.bell_fd, lane_fd(w, 0), -1, -1};
            if (threads == 2) {
                fds[3] = e->sender->set.epoll_fd;
                fds[4] = e->sender->set.bell_fd;
            }
            for (int i = 0; i < 5; i++)
                if (fds[i] >= 0)
                    close(fds[i]);
            struct timespec used[2];
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used[0]);
            usleep(600000);
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used[1]);
            CHECK((double)(used[1].tv_sec - used[0].tv_sec) +
                      (double)(used[1].tv_nsec - used[0].tv_nsec) * 1e-9 <
                  0.2);
            if (work == NULL)
                work = submit(w->comms[0], &call);
            expect_failure(work, RC_SYSTEM, closed_text);
            world_close(w);
        }
}

static void nothing_leaks(void)
{
    int before = open_fds();
    a_closed_socket_is_said();
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"each_ring_ends_one_wait", each_ring_ends_one_wait},
        {"numbers_of_others_are_given_up", numbers_of_others_are_given_up},
        {"a_closed_socket_is_said", a_closed_socket_is_said},
        {"who_lost_it_knows_better", who_lost_it_knows_better},
        {"a_closed_set_is_said", a_closed_set_is_said},
        {"losing_everything_burns_nothing", losing_everything_burns_nothing},
        {"nothing_leaks", nothing_leaks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
