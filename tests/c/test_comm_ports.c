/* test_comm_ports.c - ports that are lost, as the kernel would tell it: its messages come from the
 * test.
 */
#include <fcntl.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#include "../../csrc/base/clock.h"
#include "peer.h"
#include "port_news.h"

static float data[10];

static void tell(const stage *s, const news *n)
{
    CHECK_EQ(send(s->ports, n->bytes, n->length, 0), n->length);
}

enum { RUNS = IFF_UP | IFF_RUNNING, SECOND = PEER_PORT + 1 };

/* What is lost, and what is said of it. */
static void lose(int which, news *n)
{
    switch (which) {
    case 0: add_link(n, RTM_NEWLINK, SECOND, IFF_UP, AF_UNSPEC); break;
    case 1: add_link(n, RTM_NEWLINK, SECOND, 0, AF_UNSPEC); break;
    case 2: add_link(n, RTM_DELLINK, SECOND, RUNS, AF_UNSPEC); break;
    default: add_address(n, RTM_DELADDR, SECOND, "127.0.0.1"); break;
    }
}

static void lost_port_is_named(void)
{
    static const char *const texts[] = {"has no carrier", "was taken down", "was removed",
                                        "has lost its address"};
    for (int which = 0; which < 4; which++) {
        stage s = stage_open((stage_options){.lanes = 2, .rails = 1, .tcp = 1});
        rc_call call = small_call(RC_ALLREDUCE, data, 10);
        rc_work *work = submit(s.comm, &call);
        news n = {.length = 0};
        lose(which, &n);
        tell(&s, &n);
        rc_error error;
        CHECK_EQ(outcome(work, &error), RC_PEER_LOST);
        CHECK_EQ(error.rank, 0);
        CHECK_EQ(error.rail, 1);
        CHECK_EQ(error.lane, 1);
        expect_text(&error, "rail 1 between rank 0 (eth1 10.1.0.0 on a) and rank 1 (eth1 10.1.0.1 "
                            "on b) is cut: the port of rank 0 ");
        expect_text(&error, texts[which]);
        rc_work_free(work);
        expect_abort(s.far[1][0], RC_PEER_LOST, 0);
        stage_close(&s);
    }
}

/* Where lanes are made anew a lost port ends nothing by itself, also the last. */
static void last_port_is_named_once_the_peer_is_lost(void)
{
    stage s = stage_open((stage_options){.lanes = 2,
                                         .rails = 1,
                                         .tcp = 1,
                                         .recovers = 1,
                                         .heartbeat_ms = 50,
                                         .peer_timeout_ms = 600});
    rc_call call = small_call(RC_ALLREDUCE, data, 10);
    rc_work *work = submit(s.comm, &call);
    news n = {.length = 0};
    add_link(&n, RTM_NEWLINK, PEER_PORT, IFF_UP, AF_UNSPEC);
    add_link(&n, RTM_NEWLINK, SECOND, IFF_UP, AF_UNSPEC);
    tell(&s, &n);
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_PEER_LOST);
    CHECK_EQ(error.rank, 0);
    expect_text(&error, "rank 1 has given no sign of life for 0.");
    expect_text(&error, "is cut: the port of rank 0 has no carrier");
    rc_work_free(work);
    stage_close(&s);
}

static int is_lost(const stage *s, int index)
{
    engine_lock(s->engine);
    int lost = lane_of(s, index)->health.port_lost != 0;
    engine_unlock(s->engine);
    return lost;
}

static void wait_until_lost(const stage *s, int index, int lost)
{
    uint64_t give_up = clock_ns() + WORLD_LONG_MS * CLOCK_MS;
    while (is_lost(s, index) != lost && clock_ns() < give_up)
        usleep(200);
    CHECK_EQ(is_lost(s, index), lost);
}

/* All that can be lost, and back in the same datagram; and what is another's. */
static void port_that_comes_back_was_not_lost(void)
{
    stage s = stage_open((stage_options){.lanes = 2, .rails = 1, .tcp = 1});
    news n = {.length = 0};
    lose(1, &n);
    lose(3, &n);
    add_link(&n, RTM_NEWLINK, SECOND, RUNS, AF_UNSPEC);
    add_address(&n, RTM_NEWADDR, SECOND, "127.0.0.1");
    tell(&s, &n);
    n.length = 0;
    add_link(&n, RTM_DELLINK, SECOND, RUNS, AF_BRIDGE); /* taken out of a bridge */
    add_link(&n, RTM_NEWLINK, SECOND + 1, 0, AF_UNSPEC);
    add_address(&n, RTM_DELADDR, SECOND, "127.0.0.2");
    add_address(&n, RTM_DELADDR, SECOND + 1, "127.0.0.1");
    tell(&s, &n);
    n.length = 0;
    add_link(&n, RTM_NEWLINK, PEER_PORT, 0, AF_UNSPEC); /* the last that is read */
    tell(&s, &n);
    wait_until_lost(&s, 0, 1);
    CHECK(!is_lost(&s, 1));
    n.length = 0;
    add_link(&n, RTM_NEWLINK, PEER_PORT, RUNS, AF_UNSPEC);
    tell(&s, &n);
    rc_error error;
    uint64_t give_up = clock_ns() + WORLD_LONG_MS * CLOCK_MS;
    do
        rc_comm_error(s.comm, &error);
    while (error.code == RC_OK && is_lost(&s, 0) && clock_ns() < give_up);
    if (error.code == RC_OK) /* else this machine stood still for the port's whole grace */
        CHECK(look(&s, clock_ns() + 10 * CLOCK_S));
    stage_close(&s);
}

/* Whatever the messages are. */
enum { CHANGES = 1000 };

/* In a namespace of its own, whose loopback goes down, changes more often than the socket has room
 * for, and comes up. The socket, or -1 where that is not allowed. */
static void *flap(void *arg)
{
    struct sockaddr_nl all = {.nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK};
    struct ifreq lo = {.ifr_name = "lo"};
    int small = 4096, *out = arg;
    if (unshare(CLONE_NEWNET) != 0)
        return NULL;
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    lo.ifr_flags = IFF_UP;
    CHECK_EQ(ioctl(control, SIOCSIFFLAGS, &lo), 0);
    *out = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    CHECK_EQ(setsockopt(*out, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
    CHECK_EQ(bind(*out, (struct sockaddr *)&all, sizeof all), 0);
    lo.ifr_flags = 0;
    CHECK_EQ(ioctl(control, SIOCSIFFLAGS, &lo), 0);
    for (int i = 0; i < CHANGES; i++) {
        lo.ifr_mtu = 60000 + i;
        CHECK_EQ(ioctl(control, SIOCSIFMTU, &lo), 0);
    }
    lo.ifr_flags = IFF_UP;
    CHECK_EQ(ioctl(control, SIOCSIFFLAGS, &lo), 0);
    close(control);
    return NULL;
}

/* The last that the kernel had room for is that the port is down. */
static void dropped_news_prove_nothing(void)
{
    pthread_t thread;
    int fd = -1;
    CHECK_EQ(pthread_create(&thread, NULL, flap, &fd), 0);
    pthread_join(thread, NULL);
    if (fd < 0) {
        fprintf(stderr, "not tried: no right to make a network namespace\n");
        return;
    }
    stage s = stage_open((stage_options){.lanes = 2, .rails = 1, .tcp = 1});
    engine_lock(s.engine);
    lane_of(&s, 1)->path.port = 1; /* the loopback */
    CHECK_EQ(dup2(fd, s.comm->ports.source.fd), s.comm->ports.source.fd);
    news n = {.length = 0};
    lose(0, &n);
    lane_of(&s, 1)->path.port = SECOND;
    ports_parse(&s.comm->ports, n.bytes, n.length);
    lane_of(&s, 1)->path.port = 1;
    CHECK(lane_of(&s, 1)->health.port_lost != 0);
    s.comm->ports.source.ready(&s.comm->ports.source, EPOLLIN);
    CHECK_EQ(lane_of(&s, 1)->health.port_lost, 0);
    CHECK(!s.comm->ports.stale);
    engine_unlock(s.engine);
    CHECK(look(&s, clock_ns() + 10 * CLOCK_S));
    close(fd);
    stage_close(&s);
}

/* A child keeps neither lanes nor this. */
static void forked_child_lets_go(void)
{
    stage s = stage_open((stage_options){.lanes = 2, .rails = 1});
    int fd = s.comm->ports.source.fd, status = 1;
    pid_t child = fork();
    if (child == 0) {
        rc_engine_after_fork(s.engine);
        _exit(fcntl(fd, F_GETFD) < 0 ? 0 : 1);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    stage_close(&s);
}

static int watches(const stage *s)
{
    engine_lock(s->engine);
    int fd = s->comm->ports.source.fd;
    engine_unlock(s->engine);
    return fd >= 0;
}

static void news_are_taken_once_and_closed(void)
{
    int before = open_fds();
    stage s = stage_open((stage_options){.lanes = 2, .rails = 1});
    int pair[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    CHECK_EQ(rc_comm_watch_ports(s.comm, pair[0]), RC_INVALID_ARGUMENT);
    close(pair[1]);
    close(s.ports); /* no news any more */
    s.ports = -1;
    uint64_t give_up = clock_ns() + WORLD_LONG_MS * CLOCK_MS;
    while (watches(&s) && clock_ns() < give_up)
        usleep(200);
    CHECK(!watches(&s));
    stage_close(&s);
    CHECK_EQ(open_fds(), before);

    rc_engine *engine;
    rc_comm *never_started;
    rc_comm_config config;
    rc_comm_config_init(&config);
    config.world_size = 2;
    CHECK_EQ(rc_engine_create(&engine, NULL), RC_OK);
    CHECK_EQ(rc_comm_create(&never_started, engine, &config), RC_OK);
    CHECK_EQ(rc_comm_watch_ports(never_started, dup(0)), RC_OK);
    CHECK_EQ(rc_comm_name_rail(never_started, 0, 0, 1, "a", "b"), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_name_rail(never_started, 1, 0, 1, NULL, NULL), RC_OK);
    rc_comm_free(never_started);
    rc_engine_free(engine);
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"lost_port_is_named", lost_port_is_named},
        {"last_port_is_named_once_the_peer_is_lost", last_port_is_named_once_the_peer_is_lost},
        {"port_that_comes_back_was_not_lost", port_that_comes_back_was_not_lost},
        {"dropped_news_prove_nothing", dropped_news_prove_nothing},
        {"forked_child_lets_go", forked_child_lets_go},
        {"news_are_taken_once_and_closed", news_are_taken_once_and_closed},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
