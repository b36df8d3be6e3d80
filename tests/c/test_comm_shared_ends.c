/* test_comm_shared_ends.c - communicators whose ranks share memory, and what goes wrong: deadlines,
 * calls that differ, closes and aborts with works in flight, arguments that make no sense.
 */
#include "../../csrc/comm/comm.h"
#include "maps.h"
#include "vector.h"
#include "world.h"

#define FILE_NAME "ringcomm-test" /* world.h */

/* ---- deadlines and differences ---- */

static void deadlines_name_who_is_missing(void)
{
    float data[4] = {0.0F};
    rc_error error;
    for (int engines = 0; engines < 2; engines++) {
        world *w = world_open(
            (world_options){.size = 4, .memory = 1, .algorithm = RC_DIRECT, .engines = engines});
        rc_work *works[4] = {NULL};
        for (int rank = 0; rank < 3; rank++) {
            rc_call call = small_call(RC_ALLREDUCE, &data[rank], 1);
            call.timeout_ms = rank < 2 ? 30000 : 300; /* all that call have done so by then */
            works[rank] = submit(w->comms[rank], &call);
        }
        for (int rank = 0; rank < 3; rank++) {
            CHECK_EQ(outcome(works[rank], &error), RC_TIMEOUT);
            CHECK_EQ(error.rank, 3);
            if (!CHECK(strstr(error.message, "rank 3 has not called it") != NULL))
                fprintf(stderr, "the error is: %s\n", error.message);
            rc_work_free(works[rank]);
        }
        world_close(w);
    }
}

/* Rank 3 of 6 on three hosts is late: its neighbour on the host, whose call waits for it in the
 * memory, is not. By calls that are announced, and by heartbeats. */
static void who_is_late_among_hosts_is_told_from_its_host(void)
{
    for (int hurried = 0; hurried < 2; hurried++) {
        float data[6][300];
        world *w = world_open((world_options){.size = 6,
                                              .memory = 1,
                                              .hosts = 3,
                                              .engines = 1,
                                              .heartbeat_ms = hurried ? 20000 : 20,
                                              .peer_timeout_ms = 60000});
        rc_work *works[6] = {NULL};
        rc_error error;
        for (int rank = 0; rank < 6; rank++) {
            rc_call call = small_call(RC_ALLREDUCE, data[rank], 300);
            call.timeout_ms = hurried || rank == 0 ? 400 : 30000;
            if (rank != 3)
                works[rank] = submit(w->comms[rank], &call);
        }
        for (int rank = 0; rank < 6; rank++) {
            if (rank == 3)
                continue;
            CHECK_EQ(outcome(works[rank], &error), RC_TIMEOUT);
            CHECK_EQ(error.rank, 3);
            if (!CHECK(strstr(error.message, "not complete within") == error.message &&
                       strstr(error.message, "rank 3 has not called it") != NULL))
                fprintf(stderr, "the error is: %s\n", error.message);
            rc_work_free(works[rank]);
        }
        world_close(w);
    }
}

/* The deadline of a work that has others before it: what they wait for says nothing of who has
 * called this one. */
static void a_deadline_behind_other_works(void)
{
    float data[2][4] = {{0.0F}};
    rc_error error;
    world *w = world_open((world_options){.size = 4,
                                          .memory = 1,
                                          .algorithm = RC_DIRECT,
                                          .engines = 1,
                                          .heartbeat_ms = 20000, /* calls are announced before */
                                          .peer_timeout_ms = 60000});
    rc_work *works[2][4] = {{NULL}};
    for (int rank = 0; rank < 3; rank++)
        for (int i = 0; i < 2; i++) {
            rc_call call = small_call(RC_ALLREDUCE, &data[i][rank], 1);
            call.timeout_ms = i == 0 || rank < 2 ? 30000 : 400; /* all that call have by then */
            works[i][rank] = submit(w->comms[rank], &call);
        }
    for (int rank = 0; rank < 3; rank++) {
        CHECK_EQ(outcome(works[1][rank], &error), RC_TIMEOUT);
        CHECK_EQ(error.rank, 3);
        if (!CHECK(strstr(error.message, "rank 3 has not called it") != NULL))
            fprintf(stderr, "the error is: %s\n", error.message);
        rc_work_free(works[0][rank]);
        rc_work_free(works[1][rank]);
    }
    world_close(w);
}

static void expect_mismatch(rc_work *work, const char *one, const char *other)
{
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_MISMATCH);
    if (!CHECK(strstr(error.message, one) != NULL && strstr(error.message, other) != NULL))
        fprintf(stderr, "the error is: %s\n", error.message);
    rc_work_free(work);
}

/* Rank 0 of two calls one thing, rank 1 another; both orders of submission. */
static void check_mismatch(rc_call mine, rc_call theirs, const char *one, const char *other)
{
    static float data[2][70000];
    for (int first = 0; first < 2; first++)
        for (int engines = 0; engines < 2; engines++) {
            world *w = world_open((world_options){
                .size = 2, .memory = 1, .algorithm = RC_DIRECT, .engines = engines});
            rc_work *works[2];
            for (int i = 0; i < 2; i++) {
                int rank = (first + i) % 2;
                rc_call call = rank == 0 ? mine : theirs;
                call.src = call.dst = data[rank];
                if (call.collective == RC_BARRIER)
                    call.src = call.dst = NULL;
                works[rank] = submit(w->comms[rank], &call);
                usleep(1000);
            }
            for (int rank = 0; rank < 2; rank++) {
                rc_error error;
                outcome(works[rank], &error);
                CHECK_EQ(error.rank, 1 - rank);
                CHECK_EQ(error.seq, 0);
                expect_mismatch(works[rank], one, other);
            }
            world_close(w);
        }
}

static void mismatches(void)
{
    static float any[1];
    rc_call base = small_call(RC_ALLREDUCE, any, 64), other = base;
    other.op = RC_MAX;
    check_mismatch(base, other, "rank 0 called allreduce(f32[64], op=sum)",
                   "rank 1 called allreduce(f32[64], op=max)");
    other = base;
    other.dtype = RC_I32;
    check_mismatch(base, other, "allreduce(f32[64]", "allreduce(i32[64]");
    other = base;
    other.count = 70000;
    check_mismatch(base, other, "f32[64]", "f32[70000]");
    other = base;
    other.codec = RC_CODEC_BF16;
    check_mismatch(base, other, "f32[64], op=sum)", "compression=bf16");
    other = base;
    other.collective = RC_BARRIER;
    other.count = 0;
    check_mismatch(base, other, "rank 0 called allreduce", "rank 1 called barrier");
    other = base;
    other.collective = RC_BROADCAST;
    other.root = 0;
    check_mismatch(base, other, "rank 0 called allreduce", "rank 1 called broadcast");
    base = other;
    other.root = 1;
    check_mismatch(base, other, "rank 0 called broadcast(f32[64], root=0)",
                   "rank 1 called broadcast(f32[64], root=1)");
    other.collective = RC_REDUCE;
    check_mismatch(base, other, "rank 0 called broadcast", "rank 1 called reduce");
}

/* Who has sent its part of a reduce is done with it and goes on to the all-reduce; the two are
 * called the other way round elsewhere. Each side must hear of the reduce. */
static void a_different_order(void)
{
    float data[2][2] = {{0.0F}};
    for (int engines = 0; engines < 2; engines++)
        for (int first = 0; first < 2; first++) {
            world *w = world_open((world_options){
                .size = 2, .memory = 1, .algorithm = RC_DIRECT, .engines = engines});
            rc_work *works[2][2];
            rc_error error;
            for (int i = 0; i < 2; i++) {
                int rank = (first + i) % 2;
                rc_call all = small_call(RC_ALLREDUCE, &data[rank][0], 1);
                rc_call to_first = small_call(RC_REDUCE, &data[rank][1], 1);
                works[rank][0] = submit(w->comms[rank], rank == 0 ? &all : &to_first);
                works[rank][1] = submit(w->comms[rank], rank == 0 ? &to_first : &all);
            }
            for (int rank = 0; rank < 2; rank++) {
                CHECK_EQ(outcome(works[rank][1], &error), RC_MISMATCH);
                CHECK_EQ(error.rank, 1 - rank);
                CHECK_EQ(error.seq, 1); /* of the work, */
                if (!CHECK(strstr(error.message, "called reduce(") != NULL ||
                           strstr(error.message, "rank 1 called something else, then") != NULL))
                    fprintf(stderr, "the error is: %s\n", error.message);
                rc_work_free(works[rank][0]);
                rc_work_free(works[rank][1]);
            }
            world_close(w);
        }
}

/* ---- ends ---- */

static void ends_with_works_in_flight(void)
{
    float data[3] = {0.0F};
    int fds = open_fds();
    CHECK_EQ(mappings_of(FILE_NAME), 0);
    for (int how = 0; how < 3; how++) {
        world *w = world_open(
            (world_options){.size = 3, .memory = 1, .algorithm = RC_DIRECT, .engines = how & 1});
        rc_work *works[2];
        CHECK_EQ(mappings_of(FILE_NAME), 3);
        for (int rank = 0; rank < 2; rank++) {
            rc_call call = small_call(RC_ALLREDUCE, &data[rank], 1);
            works[rank] = submit(w->comms[rank], &call);
        }
        if (how == 0)
            CHECK_EQ(rc_comm_close(w->comms[1], WORLD_LONG_MS), RC_OK);
        else if (how == 1)
            rc_comm_abort(w->comms[2], "enough");
        else
            world_free_rank(w, 1);
        for (int rank = 0; rank < 2; rank++)
            expect_failure(works[rank], RC_ABORTED, how == 1 ? "rank 2 aborted: enough" : "rank 1");
        world_close(w);
    }
    CHECK_EQ(mappings_of(FILE_NAME), 0);
    CHECK_EQ(open_fds(), fds);
}

/* What came through memory is there, whoever has left since. */
static void a_rank_that_is_done_may_leave(void)
{
    for (int round = 0; round < 10; round++) {
        world *w = world_open((world_options){
            .size = 2, .memory = 1, .algorithm = RC_ONE_SHOT, .engines = 1, .spin_us = 30});
        vector v[2] = {make_vector(1000, 0), make_vector(1000, 1)};
        rc_work *works[2];
        for (int rank = 0; rank < 2; rank++) {
            rc_call call = sum_of(&v[rank]);
            works[rank] = submit(w->comms[rank], &call);
        }
        expect_done(works[round % 2]);
        CHECK_EQ(rc_comm_close(w->comms[round % 2], WORLD_LONG_MS), RC_OK);
        world_free_rank(w, round % 2);
        expect_done(works[1 - round % 2]);
        check_sum(v[0], 2);
        check_sum(v[1], 2);
        world_close(w);
    }
}

static void what_may_not_be_shared(void)
{
    rc_engine *engine;
    rc_comm *comm;
    rc_comm_config config;
    rc_comm_config_init(&config);
    config.world_size = 4;
    config.rank = 1;
    int fds = open_fds();
    CHECK_EQ(rc_engine_create(&engine, NULL), RC_OK);
    CHECK_EQ(rc_comm_create(&comm, engine, &config), RC_OK);
    static const int32_t bad[][4] = {{0, 1, 2, 3}, {0, 0, 0, 1}, {0, 0, 1, 2}, {7, 7, 8, 7}};
    for (size_t i = 0; i < CHECK_COUNT(bad); i++)
        CHECK_EQ(rc_comm_share(comm, bad[i], memfd_create("bad", MFD_CLOEXEC)),
                 RC_INVALID_ARGUMENT);
    static const int32_t good[] = {9, 5, 9, 5};
    CHECK_EQ(rc_comm_share(comm, NULL, memfd_create("bad", MFD_CLOEXEC)), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_share(comm, good, -1), RC_INVALID_ARGUMENT);
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    CHECK_EQ(rc_comm_share(comm, good, ends[0]), RC_SYSTEM);
    close(ends[1]);
    CHECK_EQ(rc_comm_share(comm, good, memfd_create(FILE_NAME, MFD_CLOEXEC)), RC_OK);
    CHECK_EQ(rc_comm_share(comm, good, memfd_create("again", MFD_CLOEXEC)), RC_INVALID_ARGUMENT);
    CHECK_EQ(mappings_of(FILE_NAME), 1);
    rc_comm_free(comm);
    rc_engine_free(engine);
    CHECK_EQ(mappings_of(FILE_NAME), 0);
    CHECK_EQ(open_fds(), fds);
}

int main(void)
{
    static const check_test tests[] = {
        {"deadlines_name_who_is_missing", deadlines_name_who_is_missing},
        {"who_is_late_among_hosts_is_told_from_its_host",
         who_is_late_among_hosts_is_told_from_its_host},
        {"a_deadline_behind_other_works", a_deadline_behind_other_works},
        {"mismatches", mismatches},
        {"a_different_order", a_different_order},
        {"ends_with_works_in_flight", ends_with_works_in_flight},
        {"a_rank_that_is_done_may_leave", a_rank_that_is_done_may_leave},
        {"what_may_not_be_shared", what_may_not_be_shared},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
