/* test_descriptors.c - somebody else in the process closes the engine's descriptors: what is lost
 * is said, what is not goes on, no core is burned, and no file that has the number now is touched.
 */
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <time.h>

#include "../../csrc/net/descriptors.h"
#include "world.h"

static float data[2][1000];

static double cpu_seconds(void)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + (double)used.tv_nsec * 1e-9;
}

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

static int lane_fd(const world *w, int rank)
{
    engine_lock(w->engines[rank]);
    int fd = w->comms[rank]->env.links[1 - rank]->lanes[0]->source.fd;
    engine_unlock(w->engines[rank]);
    return fd;
}

/* A file of this many bytes at a number that somebody has closed. */
static void put_file(int fd)
{
    int file = memfd_create("another's", 0);
    if (file != fd) {
        CHECK_EQ(dup2(file, fd), fd);
        close(file);
    }
}

static void expect_untouched(int fd)
{
    struct stat is;
    if (CHECK_EQ(fstat(fd, &is), 0)) {
        CHECK_EQ(is.st_size, 0);
        CHECK_EQ(lseek(fd, 0, SEEK_CUR), 0);
    }
    CHECK_EQ(close(fd), 0); /* still there */
}

/* Its number is nobody's, or another file's. */
static void a_lost_socket_is_said(void)
{
    for (int reused = 0; reused < 2; reused++) {
        world *w = world_open((world_options){.size = 2, .engines = 1});
        run_once(w);
        int fd = lane_fd(w, 0);
        rc_call call = small_call(RC_ALLREDUCE, data[0], 1000);
        close(fd);
        if (reused)
            put_file(fd);
        usleep(20000); /* the peer sees the end of the connection at once */
        rc_work *work = submit(w->comms[0], &call);
        rc_error error;
        CHECK_EQ(outcome(work, &error), RC_SYSTEM);
        CHECK_EQ(error.rank, 0);
        CHECK_EQ(error.rail, 0);
        CHECK_EQ(error.lane, 0);
        char text[160];
        snprintf(
            text, sizeof text,
            "lane 0 of rail 0 to rank 1 is gone: on rank 0 another part of this process closed "
            "descriptor %d, which is its socket",
            fd);
        if (!CHECK(strstr(error.message, text) != NULL))
            fprintf(stderr, "the error is: %s\n", error.message);
        rc_work_free(work);
        rc_call other = small_call(RC_ALLREDUCE, data[1], 1000);
        expect_failure(submit(w->comms[1], &other), RC_PEER_LOST, "rank 0 is lost");
        world_close(w);
        if (reused)
            expect_untouched(fd);
    }
}

/* An epoll set that always has an event, whose data are those of a library that notes its files'
 * numbers, at a number that somebody has closed or is about to. Returns the event's file. */
static int put_epoll_set(int fd)
{
    int set = epoll_create1(EPOLL_CLOEXEC), bell = eventfd(1, EFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = bell};
    CHECK_EQ(epoll_ctl(set, EPOLL_CTL_ADD, bell, &event), 0);
    CHECK_EQ(dup2(set, fd), fd);
    close(set);
    return bell;
}

/* Its events are not taken for the engine's own. */
static void another_epoll_set_with_the_number_is_told_apart(void)
{
    world *w = world_open((world_options){.size = 2, .engines = 1});
    run_once(w);
    int fd = w->engines[0]->epoll_fd;
    int bell = put_epoll_set(fd);
    for (int i = 0; i < 20; i++)
        run_once(w);
    CHECK(w->engines[0]->epoll_fd != fd);
    world_close(w);
    uint64_t rung = 0;
    CHECK_EQ(read(bell, &rung, sizeof rung), (ssize_t)sizeof rung);
    CHECK_EQ(rung, 1);
    close(bell);
    CHECK_EQ(close(fd), 0);
}

/* The epoll set, the bell, or both: the engine makes new ones and goes on. */
static void a_lost_epoll_set_is_replaced(void)
{
    for (int which = 1; which < 4; which++)
        for (int reused = 0; reused < 2; reused++) {
            world *w = world_open((world_options){.size = 2, .engines = 1});
            run_once(w);
            int fds[2] = {w->engines[0]->epoll_fd, w->engines[0]->wake_fd};
            for (int i = 0; i < 2; i++)
                if (which & 1 << i) {
                    close(fds[i]);
                    if (reused)
                        put_file(fds[i]);
                }
            for (int i = 0; i < 20; i++)
                run_once(w);
            double before = cpu_seconds();
            usleep(300000);
            CHECK(cpu_seconds() - before < 0.1);
            world_close(w);
            for (int i = 0; i < 2; i++)
                if (reused && (which & 1 << i))
                    expect_untouched(fds[i]);
        }
}

/* All at once, as os.closerange does, while works are in flight and while none are. */
static void losing_everything_burns_nothing(void)
{
    for (int threads = 1; threads <= 2; threads++)
        for (int in_flight = 0; in_flight < 2; in_flight++) {
            world *w =
                world_open((world_options){.size = 2, .engines = 1, .threads = (uint32_t)threads});
            run_once(w);
            rc_call call = small_call(RC_ALLREDUCE, data[0], 1000);
            rc_work *work = in_flight ? submit(w->comms[0], &call) : NULL;
            usleep(10000);
            rc_engine *e = w->engines[0];
            int fds[5] = {e->epoll_fd, e->wake_fd, lane_fd(w, 0), -1, -1};
            if (threads == 2) {
                fds[3] = w->comms[0]->sender->epoll_fd;
                fds[4] = w->comms[0]->sender->wake_fd;
            }
            for (int i = 0; i < 5; i++)
                if (fds[i] >= 0)
                    close(fds[i]);
            double before = cpu_seconds();
            usleep(600000);
            CHECK(cpu_seconds() - before < 0.2);
            if (work == NULL)
                work = submit(w->comms[0], &call);
            expect_failure(work, RC_SYSTEM, "another part of this process closed");
            world_close(w);
        }
}

static void ready(engine_source *source, uint32_t events)
{
    (void)source;
    (void)events;
}

/* A source's number that is another's is not closed with it. */
static void only_what_is_own_is_closed(void)
{
    rc_engine *e;
    int pair[2];
    rc_error error;
    CHECK_EQ(rc_engine_create(&e, NULL), RC_OK);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    engine_source source = {.fd = pair[0], .ready = ready};
    engine_lock(e);
    CHECK_EQ(engine_add(e, &source, 0, &error), RC_OK);
    CHECK(descriptors_is_own(&source));
    close(pair[0]);
    CHECK(!descriptors_is_own(&source));
    put_file(pair[0]);
    CHECK(!descriptors_is_own(&source));
    engine_remove(e, &source);
    engine_quiesce(e);
    engine_unlock(e);
    expect_untouched(pair[0]);
    close(pair[1]);
    rc_engine_free(e);
}

static void nothing_leaks(void)
{
    int before = open_fds();
    a_lost_socket_is_said();
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"a_lost_socket_is_said", a_lost_socket_is_said},
        {"a_lost_epoll_set_is_replaced", a_lost_epoll_set_is_replaced},
        {"another_epoll_set_with_the_number_is_told_apart",
         another_epoll_set_with_the_number_is_told_apart},
        {"losing_everything_burns_nothing", losing_everything_burns_nothing},
        {"only_what_is_own_is_closed", only_what_is_own_is_closed},
        {"nothing_leaks", nothing_leaks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
