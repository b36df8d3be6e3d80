/* test_api_lanes.c - the public functions of lanes and ports: who owns a descriptor, what is
 * refused, what is counted.
 */
#include <fcntl.h>
#include <math.h>

#include "world.h"

/* 1 if fd is closed now. */
static int is_closed(int fd)
{
    return fcntl(fd, F_GETFD) < 0;
}

static void lanes_are_owned_even_if_refused(void)
{
    rc_engine *e;
    rc_comm *comm;
    rc_comm_config config;
    CHECK_EQ(rc_engine_create(&e, NULL), RC_OK);
    rc_comm_config_init(&config);
    config.world_size = 3;
    config.rank = 1;
    CHECK_EQ(rc_comm_create(&comm, e, &config), RC_OK);
    static const struct {
        int peer, rail;
        double speed;
    } bad[] = {{-1, 0, 0}, {1, 0, 0}, {3, 0, 0}, {0, -1, 0}, {0, 0, -1.0}, {0, 0, (double)NAN}};
    for (size_t i = 0; i < CHECK_COUNT(bad); i++) {
        int fd = dup(1);
        CHECK_EQ(rc_comm_add_lane(comm, bad[i].peer, bad[i].rail, fd, bad[i].speed),
                 RC_INVALID_ARGUMENT);
        CHECK(is_closed(fd));
    }
    int fd = dup(1);
    CHECK_EQ(rc_comm_add_lane(NULL, 0, 0, fd, 0), RC_INVALID_ARGUMENT);
    CHECK(is_closed(fd));
    CHECK_EQ(rc_comm_add_lane(comm, 0, 0, -1, 0), RC_INVALID_ARGUMENT);
    rc_comm_free(comm);
    rc_engine_free(e);
}

static void start_needs_a_lane_to_everyone(void)
{
    rc_engine *e;
    rc_comm *comm;
    rc_comm_config config;
    int pair[2];
    CHECK_EQ(rc_engine_create(&e, NULL), RC_OK);
    rc_comm_config_init(&config);
    config.world_size = 3;
    CHECK_EQ(rc_comm_create(&comm, e, &config), RC_OK);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    CHECK_EQ(rc_comm_add_lane(comm, 1, 0, pair[0], 0), RC_OK);
    CHECK_EQ(rc_comm_start(comm), RC_INVALID_STATE);
    CHECK_EQ(rc_comm_start(NULL), RC_INVALID_STATE);
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *work;
    rc_error error;
    CHECK_EQ(rc_submit(comm, &call, &work, &error), RC_INVALID_STATE);
    CHECK(strstr(error.message, "not started") != NULL);
    rc_comm_free(comm);
    CHECK(is_closed(pair[0]));
    close(pair[1]);
    rc_engine_free(e);
}

static void unusable_lane_fails_the_start(void)
{
    rc_engine *e;
    rc_comm *comm;
    rc_comm_config config;
    int before = open_fds();
    CHECK_EQ(rc_engine_create(&e, NULL), RC_OK);
    rc_comm_config_init(&config);
    config.world_size = 2;
    CHECK_EQ(rc_comm_create(&comm, e, &config), RC_OK);
    CHECK_EQ(rc_comm_add_lane(comm, 1, 0, open("/proc/self/exe", O_RDONLY), 0), RC_OK);
    CHECK_EQ(rc_comm_start(comm), RC_SYSTEM); /* a file is nothing to poll */
    rc_error error;
    rc_comm_error(comm, &error);
    CHECK_EQ(error.code, RC_SYSTEM);
    CHECK_EQ(rc_comm_start(comm), RC_INVALID_STATE);
    rc_comm_free(comm);
    rc_engine_free(e);
    CHECK_EQ(open_fds(), before);
}

static void names_and_watchers_are_refused_when_they_cannot_be(void)
{
    rc_engine *e;
    rc_comm *comm;
    rc_comm_config config;
    CHECK_EQ(rc_engine_create(&e, NULL), RC_OK);
    rc_comm_config_init(&config);
    config.world_size = 3;
    config.rank = 1;
    CHECK_EQ(rc_comm_create(&comm, e, &config), RC_OK);
    CHECK_EQ(rc_comm_name_rail(NULL, 0, 0, 0, "a", "b"), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_name_rail(comm, 1, 0, 0, "a", "b"), RC_INVALID_ARGUMENT); /* itself */
    CHECK_EQ(rc_comm_name_rail(comm, 3, 0, 0, "a", "b"), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_name_rail(comm, 0, 0, -1, "a", "b"), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_name_rail(comm, 0, 0, 0, NULL, NULL), RC_OK);
    int refused = dup(1), taken = dup(1), second = dup(1);
    CHECK_EQ(rc_comm_watch_ports(NULL, refused), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_watch_ports(comm, -1), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_watch_ports(comm, taken), RC_OK);
    CHECK_EQ(rc_comm_watch_ports(comm, second), RC_INVALID_ARGUMENT);
    CHECK(is_closed(refused) && is_closed(second) && !is_closed(taken));
    rc_comm_free(comm);
    CHECK(is_closed(taken));
    rc_engine_free(e);
}

static void lanes_are_counted_one_by_one(void)
{
    world *w = world_open((world_options){.size = 3, .lanes = 2});
    rc_lane_stats lanes[8];
    rc_comm_stats stats;
    rc_comm_stats_get(w->comms[0], &stats);
    CHECK_EQ(stats.lanes, 4);
    CHECK_EQ(rc_comm_lane_stats(w->comms[0], lanes, 8), 4);
    lanes[1].peer = -7;
    CHECK_EQ(rc_comm_lane_stats(w->comms[0], lanes, 1), 4); /* writes no more than it may */
    CHECK_EQ(lanes[1].peer, -7);
    world_close(w);
}

static void nothing_leaks(void)
{
    int before = open_fds();
    lanes_are_owned_even_if_refused();
    start_needs_a_lane_to_everyone();
    names_and_watchers_are_refused_when_they_cannot_be();
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"lanes_are_owned_even_if_refused", lanes_are_owned_even_if_refused},
        {"start_needs_a_lane_to_everyone", start_needs_a_lane_to_everyone},
        {"unusable_lane_fails_the_start", unusable_lane_fails_the_start},
        {"names_and_watchers_are_refused_when_they_cannot_be",
         names_and_watchers_are_refused_when_they_cannot_be},
        {"lanes_are_counted_one_by_one", lanes_are_counted_one_by_one},
        {"nothing_leaks", nothing_leaks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
