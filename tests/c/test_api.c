/* test_api.c - the public functions: every argument that must be refused, what is allowed to be
 * NULL, in-place rules, notifications, and many threads at once.
 */
#include <fcntl.h>
#include <pthread.h>

#include "../../csrc/base/clock.h"
#include "world.h"

static float data[4][4096];

/* ---- what a communicator takes ---- */

static rc_result create_with(rc_engine *e, rc_comm_config config)
{
    rc_comm *comm = (rc_comm *)&config;
    rc_result result = rc_comm_create(&comm, e, &config);
    CHECK((result == RC_OK) == (comm != NULL));
    rc_comm_free(comm);
    return result;
}

static void bad_configurations_are_refused(void)
{
    rc_engine *e;
    rc_comm_config good, c;
    rc_comm *comm;
    CHECK_EQ(rc_engine_create(&e, NULL), RC_OK);
    rc_comm_config_init(&good);
    CHECK_EQ(create_with(e, good), RC_OK);
    CHECK_EQ(rc_comm_create(&comm, NULL, &good), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_create(&comm, e, NULL), RC_INVALID_ARGUMENT);
#define REFUSED(field, value)                                                                      \
    c = good;                                                                                      \
    c.field = value;                                                                               \
    CHECK_EQ(create_with(e, c), RC_INVALID_ARGUMENT)
    REFUSED(size, 4);
    REFUSED(rank, -1);
    REFUSED(rank, 1);
    REFUSED(world_size, 0);
    REFUSED(world_size, -3);
    REFUSED(world_size, 4097);
    REFUSED(segment_bytes, 0);
    REFUSED(segment_bytes, 4095);
    REFUSED(segment_bytes, 4096 + 256);
    REFUSED(segment_bytes, (4U << 20) + 4096);
    REFUSED(segment_bytes, UINT32_MAX);
    REFUSED(heartbeat_ms, 0);
    REFUSED(peer_timeout_ms, 0);
#undef REFUSED
    rc_engine_free(e);
}

/* ---- what a call takes ---- */

static void refused(world *w, rc_call call, const char *text)
{
    rc_work *work = (rc_work *)w;
    rc_error error;
    CHECK_EQ(rc_submit(w->comms[0], &call, &work, &error), RC_INVALID_ARGUMENT);
    CHECK(work == NULL);
    if (!CHECK(strstr(error.message, text) != NULL))
        fprintf(stderr, "the error is: %s\n", error.message);
    CHECK_EQ(rc_submit(w->comms[0], &call, &work, NULL), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_check(w->comms[0], &call, &error), RC_INVALID_ARGUMENT);
}

static void bad_calls_are_refused(void)
{
    world *w = world_open((world_options){.size = 2});
    const rc_call good = small_call(RC_ALLREDUCE, data[0], 10);
    rc_call c;
#define REFUSED(field, value, text)                                                                \
    c = good;                                                                                      \
    c.field = value;                                                                               \
    refused(w, c, text)
    REFUSED(size, 8, "unknown");
    REFUSED(collective, (rc_collective)RC_COLLECTIVE_COUNT, "unknown");
    REFUSED(collective, (rc_collective)-1, "unknown");
    REFUSED(op, (rc_op)RC_OP_COUNT, "unknown");
    REFUSED(dtype, (rc_dtype)RC_DTYPE_COUNT, "unknown");
    REFUSED(codec, (rc_codec)RC_CODEC_COUNT, "unknown");
    REFUSED(caller, 4096, "unknown");
    REFUSED(root, 2, "rank 2 is not in a world of 2");
    REFUSED(root, -1, "rank -1 is not in a world of 2");
    REFUSED(count, UINT64_C(1) << 36, "2^36");
    REFUSED(count, UINT64_MAX, "2^36");
    REFUSED(src, NULL, "buffer");
    REFUSED(dst, NULL, "buffer");
    REFUSED(timeout_ms, 0, "timeout");
    REFUSED(collective, RC_SEND, "itself");
    REFUSED(collective, RC_RECV, "itself");
    c = good;
    c.codec = RC_CODEC_BF16;
    c.dtype = RC_I32;
    refused(w, c, "f32 and f64");
    REFUSED(encoded, 1, "encoded already");
    c.codec = RC_CODEC_FP16;
    CHECK_EQ(rc_check(w->comms[0], &c, NULL), RC_OK);
    c.collective = RC_BROADCAST;
    refused(w, c, "encoded already");
    c = small_call(RC_BARRIER, NULL, 1);
    refused(w, c, "barrier");
#undef REFUSED
    rc_error error;
    rc_comm_error(w->comms[0], &error);
    CHECK_EQ(error.code, RC_OK);
    rc_work *a = submit(w->comms[0], &good), *b = submit(w->comms[1], &good);
    CHECK_EQ(rc_work_seq(a), 0); /* nothing refused was counted */
    expect_done(a);
    expect_done(b);
    world_close(w);
}

/* Both ends with NULL where nothing is read or written, and everywhere when there is nothing. */
static void buffers_that_are_not_used_may_be_null(void)
{
    static const struct {
        rc_collective collective;
        int src0, dst0, src1, dst1; /* 1: needed at the root (rank 0), at rank 1 */
    } kinds[] = {
        {RC_BROADCAST, 1, 1, 0, 1}, {RC_REDUCE, 1, 1, 1, 0},  {RC_GATHER, 1, 1, 1, 0},
        {RC_SCATTER, 1, 1, 0, 1},   {RC_BARRIER, 0, 0, 0, 0},
    };
    world *w = world_open((world_options){.size = 2});
    for (size_t i = 0; i < CHECK_COUNT(kinds); i++)
        for (int empty = 0; empty < 2; empty++) {
            rc_call call = small_call(kinds[i].collective, NULL, 100);
            call.count = empty || kinds[i].collective == RC_BARRIER ? 0 : 100;
            call.src = kinds[i].src0 && !empty ? data[0] : NULL;
            call.dst = kinds[i].dst0 && !empty ? data[1] : NULL;
            rc_work *root = submit(w->comms[0], &call);
            call.src = kinds[i].src1 && !empty ? data[2] : NULL;
            call.dst = kinds[i].dst1 && !empty ? data[3] : NULL;
            rc_work *other = submit(w->comms[1], &call);
            expect_done(root);
            expect_done(other);
        }
    world_close(w);
}

/* ---- in place ---- */

/* 1 if rank 1 may call with src and dst at these elements of one block. Rank 0 takes part then. */
static int takes_overlap(world *w, rc_collective kind, uint64_t count, size_t src, size_t dst)
{
    static float block[2][4096];
    rc_call call = small_call(kind, NULL, count);
    rc_work *work;
    rc_error error;
    call.root = 1;
    call.src = block[1] + src;
    call.dst = block[1] + dst;
    if (rc_submit(w->comms[1], &call, &work, &error) != RC_OK) {
        CHECK_EQ(error.code, RC_INVALID_ARGUMENT);
        CHECK(strstr(error.message, "overlap") != NULL);
        return 0;
    }
    call.src = block[0];
    call.dst = block[0] + 2048;
    expect_done(submit(w->comms[0], &call));
    expect_done(work);
    return 1;
}

/* Rank 1 of 2, root 1, 100 elements. Where the larger buffer holds the smaller, only a rank's own
 * part may be it. */
static void in_place_is_exact_or_refused(void)
{
    static const struct {
        rc_collective kind;
        size_t src, dst;
        int taken;
    } cases[] = {
        {RC_ALLREDUCE, 0, 0, 1},      {RC_ALLREDUCE, 0, 50, 0},
        {RC_ALLREDUCE, 99, 0, 0},     {RC_ALLREDUCE, 100, 0, 1},
        {RC_ALLREDUCE, 0, 100, 1},    {RC_BROADCAST, 0, 0, 1},
        {RC_BROADCAST, 1, 0, 0},      {RC_REDUCE, 0, 0, 1},
        {RC_REDUCE, 0, 99, 0},        {RC_ALLGATHER, 100, 0, 1},
        {RC_ALLGATHER, 0, 0, 0},      {RC_ALLGATHER, 199, 0, 0},
        {RC_ALLGATHER, 200, 0, 1},    {RC_GATHER, 100, 0, 1},
        {RC_GATHER, 0, 0, 0},         {RC_REDUCE_SCATTER, 0, 100, 1},
        {RC_REDUCE_SCATTER, 0, 0, 0}, {RC_REDUCE_SCATTER, 0, 200, 1},
        {RC_SCATTER, 0, 100, 1},      {RC_SCATTER, 0, 0, 0},
        {RC_SCATTER, 0, 101, 0},      {RC_ALLTOALL, 0, 0, 0},
        {RC_ALLTOALL, 0, 199, 0},     {RC_ALLTOALL, 0, 200, 1},
    };
    world *w = world_open((world_options){.size = 2});
    for (size_t i = 0; i < CHECK_COUNT(cases); i++)
        if (!CHECK_EQ(takes_overlap(w, cases[i].kind, 100, cases[i].src, cases[i].dst),
                      cases[i].taken))
            fprintf(stderr, "case %zu\n", i);
    world_close(w);
}

/* The results of the ones that are taken, for large tensors in small segments. */
static void own_part_in_place_is_right(void)
{
    enum { N = 3, COUNT = 20000 };
    static float block[N][N * COUNT], own[N][COUNT];
    static const rc_collective kinds[] = {RC_ALLGATHER, RC_REDUCE_SCATTER};
    for (size_t k = 0; k < CHECK_COUNT(kinds); k++)
        for (int codec = 0; codec <= RC_CODEC_FP16; codec++) {
            world *w = world_open((world_options){.size = N, .segment_bytes = 4096});
            rc_work *works[N];
            for (int rank = 0; rank < N; rank++) {
                float *mine = block[rank] + rank * COUNT;
                for (int i = 0; i < N * COUNT; i++)
                    block[rank][i] = (float)(rank + i / COUNT); /* exact in 16 bits */
                rc_call call = small_call(kinds[k], NULL, COUNT);
                call.codec = (rc_codec)codec;
                call.src = kinds[k] == RC_ALLGATHER ? mine : block[rank];
                call.dst = kinds[k] == RC_ALLGATHER ? block[rank] : mine;
                memcpy(own[rank], mine, sizeof own[rank]);
                works[rank] = submit(w->comms[rank], &call);
            }
            for (int rank = 0; rank < N; rank++)
                expect_done(works[rank]);
            for (int rank = 0; rank < N; rank++)
                for (int part = 0; part < N; part++)
                    if (kinds[k] == RC_ALLGATHER)
                        CHECK(memcmp(block[rank] + part * COUNT, own[part], sizeof own[part]) == 0);
                    else if (part == rank)
                        CHECK(block[rank][part * COUNT + 777] == (float)(0 + 1 + 2 + 3 * part));
            world_close(w);
        }
}

/* ---- notification ---- */

static void finished_works_are_handed_over_in_order(void)
{
    enum { WORKS = 20 };
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *mine[WORKS], *theirs[WORKS], *done;
    call.notify = 1;
    for (int i = 0; i < WORKS; i++)
        mine[i] = submit(w->comms[0], &call);
    CHECK_EQ(rc_engine_take_done(w->engines[0], 0, &done), RC_AGAIN);
    CHECK(done == NULL);
    call.notify = 0;
    for (int i = 0; i < WORKS; i++)
        theirs[i] = submit(w->comms[1], &call);
    for (int i = 0; i < WORKS; i++) {
        CHECK_EQ(rc_engine_take_done(w->engines[0], WORLD_LONG_MS, &done), RC_OK);
        CHECK(done == mine[i]);
        CHECK_EQ(rc_work_wait(done, 0), RC_OK);
        CHECK_EQ(rc_work_seq(done), i);
        rc_work_free(done);    /* the queue's reference */
        rc_work_free(mine[i]); /* ours */
        expect_done(theirs[i]);
    }
    world_close(w);
}

/* Failed ones too, and none is lost if nobody takes them. */
static void failed_works_are_handed_over(void)
{
    for (int taken = 0; taken < 2; taken++) {
        world *w = world_open((world_options){.size = 2});
        rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
        call.notify = 1;
        rc_work *works[2] = {submit(w->comms[0], &call), submit(w->comms[0], &call)};
        rc_comm_abort(w->comms[0], "enough");
        rc_work *later = submit(w->comms[0], &call);
        rc_work *done;
        for (int i = 0; taken && i < 3; i++) {
            CHECK_EQ(rc_engine_take_done(w->engines[0], WORLD_LONG_MS, &done), RC_OK);
            CHECK_EQ(rc_work_wait(done, 0), RC_ABORTED);
            rc_work_free(done);
        }
        rc_work_free(works[0]);
        rc_work_free(works[1]);
        rc_work_free(later);
        world_close(w);
    }
}

/* ---- threads ---- */

typedef struct crew {
    world *w;
    int rank, rounds, failed;
    pthread_t thread;
} crew;

static void *run_rank(void *arg)
{
    crew *c = arg;
    float values[100];
    for (int round = 0; round < c->rounds && !c->failed; round++) {
        for (int i = 0; i < 100; i++)
            values[i] = (float)(c->rank + round);
        rc_call call = small_call(RC_ALLREDUCE, values, 100);
        call.waits = round % 2;
        rc_error error;
        rc_work *work = NULL;
        if (round % 4 == 3) {
            call.src = call.dst = NULL;
            c->failed |= rc_run(c->w->comms[c->rank], &call, 100, values, values, WORLD_LONG_MS,
                                &work) != RC_OK;
            c->failed |= !CHECK(work == NULL);
        } else {
            work = submit(c->w->comms[c->rank], &call);
            c->failed |= outcome(work, &error) != RC_OK;
        }
        rc_work_free(work);
        int n = c->w->size;
        c->failed |= !CHECK(values[99] == (float)(n * (n - 1) / 2 + n * round));
    }
    return NULL;
}

/* As ranks of one process are: each with a thread of its own that submits and waits. */
static void a_thread_per_rank(void)
{
    for (int engines = 0; engines < 2; engines++) {
        world *w = world_open((world_options){.size = 4, .engines = engines, .lanes = 2});
        crew members[4];
        for (int rank = 0; rank < 4; rank++) {
            members[rank] = (crew){.w = w, .rank = rank, .rounds = 100};
            pthread_create(&members[rank].thread, NULL, run_rank, &members[rank]);
        }
        for (int rank = 0; rank < 4; rank++)
            pthread_join(members[rank].thread, NULL);
        world_close(w);
    }
}

static void *look_at_everything(void *arg)
{
    crew *c = arg;
    for (int i = 0; i < c->rounds; i++) {
        rc_comm_stats stats;
        rc_lane_stats lanes[8];
        rc_error error;
        rc_work *work;
        rc_comm_stats_get(c->w->comms[0], &stats);
        CHECK(rc_comm_lane_stats(c->w->comms[0], lanes, 8) == 2);
        rc_comm_error(c->w->comms[0], &error);
        CHECK_EQ(error.code, RC_OK);
        CHECK_EQ(rc_engine_take_done(c->w->engines[0], i % 2, &work), RC_AGAIN);
        rc_engine_interrupt(c->w->engines[0]);
    }
    return NULL;
}

static void watchers_disturb_nothing(void)
{
    world *w = world_open((world_options){.size = 2, .engines = 1, .lanes = 2});
    crew members[3];
    for (int i = 0; i < 3; i++) {
        members[i] = (crew){.w = w, .rank = i, .rounds = 200};
        pthread_create(&members[i].thread, NULL, i < 2 ? run_rank : look_at_everything,
                       &members[i]);
    }
    for (int i = 0; i < 3; i++)
        pthread_join(members[i].thread, NULL);
    world_close(w);
}

static void *wait_on(void *arg)
{
    rc_work *work = arg;
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_OK);
    CHECK(rc_work_elapsed(work) > 0.0);
    return NULL;
}

/* Several threads may wait for one work. */
static void many_wait_for_one(void)
{
    enum { THREADS = 6 };
    world *w = world_open((world_options){.size = 2});
    pthread_t threads[THREADS];
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *work = submit(w->comms[0], &call);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, wait_on, work);
    usleep(20000);
    rc_work *other = submit(w->comms[1], &call);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    expect_done(other);
    rc_work_free(work);
    world_close(w);
}

/* A communicator and its engine may be freed while others live on, and while a work is held. */
static void held_works_outlive_everything(void)
{
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
    rc_work *failed = submit(w->comms[0], &call);
    world_close(w);
    rc_error error;
    CHECK_EQ(rc_work_wait(failed, 1000), RC_ABORTED);
    rc_work_error(failed, &error);
    CHECK_EQ(error.code, RC_ABORTED);
    rc_work_free(failed);
}

/* ---- names ---- */

static void names(void)
{
    CHECK(strlen(rc_version()) > 0);
    CHECK(strcmp(rc_kernel_set_name(0), "scalar") == 0);
    CHECK_EQ(rc_kernel_set_supported(0), 1);
    CHECK(rc_kernel_set_name(-1) == NULL);
    CHECK(rc_kernel_set_name(99) == NULL);
    CHECK_EQ(rc_kernel_set_supported(99), 0);
    CHECK_EQ(rc_kernel_set_supported(-1), 0);
    rc_engine *e;
    CHECK_EQ(rc_engine_create(&e, NULL), RC_OK);
    int known = 0;
    for (int i = 0; rc_kernel_set_name(i) != NULL; i++)
        known |= strcmp(rc_kernel_set_name(i), rc_engine_kernel_set(e)) == 0 &&
                 rc_kernel_set_supported(i);
    CHECK(known);
    rc_engine_free(e);
}

static void null_is_harmless(void)
{
    rc_comm_free(NULL);
    rc_work_free(NULL);
    rc_engine_free(NULL);
    rc_comm_abort(NULL, NULL);
    CHECK_EQ(rc_comm_close(NULL, 0), RC_INVALID_STATE);
    world *w = world_open((world_options){.size = 2});
    rc_comm_abort(w->comms[0], NULL);
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    expect_failure(submit(w->comms[1], &call), RC_ABORTED, "no reason given");
    rc_result closed = rc_comm_close(w->comms[1], -5); /* at once, whether or not it is all out */
    CHECK(closed == RC_OK || closed == RC_TIMEOUT);
    world_close(w);
}

static void nothing_leaks(void)
{
    int before = open_fds();
    bad_configurations_are_refused();
    failed_works_are_handed_over();
    held_works_outlive_everything();
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"bad_configurations_are_refused", bad_configurations_are_refused},
        {"bad_calls_are_refused", bad_calls_are_refused},
        {"buffers_that_are_not_used_may_be_null", buffers_that_are_not_used_may_be_null},
        {"in_place_is_exact_or_refused", in_place_is_exact_or_refused},
        {"own_part_in_place_is_right", own_part_in_place_is_right},
        {"finished_works_are_handed_over_in_order", finished_works_are_handed_over_in_order},
        {"failed_works_are_handed_over", failed_works_are_handed_over},
        {"a_thread_per_rank", a_thread_per_rank},
        {"watchers_disturb_nothing", watchers_disturb_nothing},
        {"many_wait_for_one", many_wait_for_one},
        {"held_works_outlive_everything", held_works_outlive_everything},
        {"names", names},
        {"null_is_harmless", null_is_harmless},
        {"nothing_leaks", nothing_leaks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
