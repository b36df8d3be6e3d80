/* What goes through the core in pieces: the copy to the host, the network and the copy back beside
 * each other, and what must not be left out for that. */
#include "flights.h"

enum { COUNT = 2 << 20, ARENA = 64 << 20 }; /* elements: 8 MiB, in six pieces */

/* ---- tensors of COUNT floats ---- */

static float value_of(int rank, uint64_t i)
{
    return (float)(i % 977) + (float)(1000 * rank);
}

static float sum_of(int ranks, uint64_t i)
{
    float sum = 0.0F;
    for (int rank = 0; rank < ranks; rank++)
        sum += value_of(rank, i);
    return sum;
}

static cu_address make_tensor(int rank, uint64_t count)
{
    cu_address at = 0;
    float *values = malloc(count * sizeof *values);
    for (uint64_t i = 0; i < count; i++)
        values[i] = value_of(rank, i);
    CHECK_EQ(cuMemAlloc_v2(&at, count * sizeof *values), CU_OK);
    CHECK_EQ(fake_cuda_write(at, values, count * sizeof *values), 0);
    free(values);
    return at;
}

/* 1 if the tensor has the sum of all ranks'. */
static int is_sum(cu_address at, int ranks, uint64_t count)
{
    float *values = malloc(count * sizeof *values);
    int right = fake_cuda_read(values, at, count * sizeof *values) == 0;
    for (uint64_t i = 0; i < count && right; i++)
        right = values[i] == sum_of(ranks, i);
    free(values);
    return right;
}

typedef struct exchange {
    flights *all;
    int ranks;
    uint64_t count;
    cu_address at[WORLD_MAX];
    rc_flight *in_flight[WORLD_MAX];
} exchange;

static exchange begin(int ranks, rc_algorithm algorithm, uint64_t count)
{
    exchange e = {.ranks = ranks, .count = count};
    e.all = flights_open(ranks, "", NULL, ARENA);
    for (int rank = 0; rank < ranks; rank++) {
        e.all->world->comms[rank]->env.algorithm = algorithm;
        e.at[rank] = make_tensor(rank, count);
    }
    return e;
}

static void submit_all(exchange *e)
{
    for (int rank = 0; rank < e->ranks; rank++) {
        rc_call call = flights_call(e->at[rank]);
        call.count = e->count;
        e->in_flight[rank] = flights_submit(e->all, rank, &call, CU_LEGACY_STREAM);
    }
}

static void end(exchange *e)
{
    for (int rank = 0; rank < e->ranks; rank++) {
        rc_flight_free(e->in_flight[rank]);
        cuMemFree_v2(e->at[rank]);
    }
    flights_close(e->all);
}

static int lands_well(exchange *e)
{
    int right = 1;
    for (int rank = 0; rank < e->ranks; rank++)
        right &= rc_flight_landed(e->in_flight[rank], WORLD_LONG_MS) == RC_OK;
    for (int rank = 0; rank < e->ranks; rank++)
        right &= is_sum(e->at[rank], e->ranks, e->count);
    return right;
}

static int waits_until(flights_state *holds, const exchange *e)
{
    return flights_wait_until(holds, e->in_flight, e->ranks);
}

/* ---- tests ---- */

static void test_sums_are_right(void)
{
    static const rc_algorithm all[] = {RC_RING, RC_DIRECT, RC_ONE_SHOT, RC_HALVING};
    for (size_t a = 0; a < CHECK_COUNT(all); a++)
        for (int ranks = 2; ranks <= 3; ranks++) {
            exchange e = begin(ranks, all[a], 400001);
            submit_all(&e);
            CHECK(lands_well(&e));
            CHECK((fake_cuda_calls("cuMemcpyDtoHAsync_v2") > ranks) == (all[a] != RC_HALVING));
            for (int rank = 0; rank < ranks; rank++)
                CHECK((e.in_flight[rank]->work->gate != NULL) == (all[a] != RC_HALVING));
            end(&e);
            gpu_expect_clean();
        }
}

static void test_several_at_once(void)
{
    enum { FLIGHTS = 4 };
    exchange e = begin(2, RC_RING, 400000);
    cu_address at[FLIGHTS][2];
    rc_flight *in_flight[FLIGHTS][2];
    for (int i = 0; i < FLIGHTS; i++)
        for (int rank = 0; rank < 2; rank++) {
            at[i][rank] = make_tensor(rank, e.count);
            rc_call call = flights_call(at[i][rank]);
            call.count = i % 2 ? 1000 : e.count;
            in_flight[i][rank] = flights_submit(e.all, rank, &call, CU_LEGACY_STREAM);
        }
    submit_all(&e);
    CHECK(lands_well(&e));
    for (int i = 0; i < FLIGHTS; i++)
        for (int rank = 0; rank < 2; rank++) {
            CHECK_EQ(rc_flight_landed(in_flight[i][rank], WORLD_LONG_MS), RC_OK);
            CHECK(is_sum(at[i][rank], 2, i % 2 ? 1000 : e.count));
            rc_flight_free(in_flight[i][rank]);
            cuMemFree_v2(at[i][rank]);
        }
    end(&e);
    gpu_expect_clean();
}

static void test_a_result_elsewhere(void)
{
    exchange e = begin(2, RC_RING, COUNT);
    cu_address to[2];
    for (int rank = 0; rank < 2; rank++) {
        to[rank] = make_tensor(7, COUNT);
        rc_call call = flights_call(e.at[rank]);
        call.count = COUNT;
        call.dst = (void *)(uintptr_t)to[rank];
        e.in_flight[rank] = flights_submit(e.all, rank, &call, CU_LEGACY_STREAM);
    }
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ(rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS), RC_OK);
        CHECK(is_sum(to[rank], 2, COUNT));
        cuMemFree_v2(to[rank]);
    }
    end(&e);
    gpu_expect_clean();
}

/* A tensor in parts, which are cut by the pieces at odd places. */
static void test_a_tensor_in_parts(void)
{
    enum { PARTS = 7 };
    rc_error error;
    exchange e = begin(2, RC_RING, COUNT);
    for (int rank = 0; rank < 2; rank++) {
        rc_piece parts[PARTS];
        for (uint64_t i = 0; i < PARTS; i++) {
            uint64_t from = i * COUNT / PARTS * 4, to = (i + 1) * COUNT / PARTS * 4;
            parts[i] = (rc_piece){e.at[rank] + from, from, to - from};
        }
        rc_call call = flights_call(0);
        call.count = COUNT;
        CHECK_EQ(
            rc_pipe_submit(e.all->pipes[rank], &call, parts, PARTS, 1, &e.in_flight[rank], &error),
            RC_OK);
    }
    CHECK(lands_well(&e));
    end(&e);
    gpu_expect_clean();
}

/* The core has the work, and most of the tensor is still to be copied. */
static void test_the_core_has_it_before_the_last_copy(void)
{
    atomic_store(&pipe_pieces_fed, 1);
    exchange e = begin(2, RC_RING, COUNT);
    submit_all(&e);
    CHECK(waits_until(flights_reached_core, &e));
    CHECK_EQ(fake_cuda_calls("cuMemcpyDtoHAsync_v2"), 2 * PIPE_PIECES_AHEAD);
    CHECK(fake_cuda_pending() > 0);
    CHECK_EQ(rc_flight_wait(e.in_flight[0], 0), RC_AGAIN);
    atomic_store(&pipe_pieces_fed, INT32_MAX);
    CHECK(lands_well(&e));
    CHECK(fake_cuda_calls("cuMemcpyDtoHAsync_v2") >= 2 * 6);
    end(&e);
    gpu_expect_clean();
}

static int copies_back(rc_flight *const *in_flight, int ranks)
{
    return in_flight[0] != NULL && fake_cuda_calls("cuMemcpyHtoDAsync_v2") >= ranks;
}

/* A part of the result is on its way back, and the last segments cannot have come: neither rank has
 * the last piece of its source. */
static void test_results_return_before_the_last_segment(void)
{
    static const rc_algorithm all[] = {RC_RING, RC_ONE_SHOT};
    for (size_t a = 0; a < CHECK_COUNT(all); a++) {
        atomic_store(&pipe_pieces_fed, 5);
        exchange e = begin(2, all[a], COUNT);
        submit_all(&e);
        CHECK(waits_until(copies_back, &e));
        for (int rank = 0; rank < 2; rank++)
            CHECK_EQ(rc_flight_wait(e.in_flight[rank], 0), RC_AGAIN);
        CHECK(!is_sum(e.at[0], 2, COUNT));
        atomic_store(&pipe_pieces_fed, INT32_MAX);
        CHECK(lands_well(&e));
        end(&e);
        gpu_expect_clean();
    }
}

/* It is over only when all is on its way, and lands when nothing touches its staging. */
static void test_over_and_landed(void)
{
    rc_error error;
    cu_stream stream;
    atomic_store(&pipe_paused, 1);
    exchange e = begin(2, RC_RING, COUNT);
    stream = flights_stream();
    submit_all(&e);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ(rc_flight_wait(e.in_flight[rank], WORLD_LONG_MS), RC_OK);
        CHECK_EQ(rc_flight_landed(e.in_flight[rank], 20), RC_AGAIN);
        CHECK_EQ(rc_flight_order(e.in_flight[rank], flights_handle(stream), &error), RC_OK);
    }
    CHECK_EQ(cuStreamSynchronize(stream), CU_OK);
    for (int rank = 0; rank < 2; rank++)
        CHECK(is_sum(e.at[rank], 2, COUNT));
    atomic_store(&pipe_paused, 0);
    CHECK(lands_well(&e));
    cuStreamDestroy_v2(stream);
    end(&e);
    gpu_expect_clean();
}

/* A stream makes the values before the call, and looks at them after it. 1 if it has seen the sum;
 * then the same of another stream, through the same staging. */
static int follows_streams(void)
{
    exchange e = begin(2, RC_RING, 400000);
    int right = 1;
    for (int turn = 0; turn < 2; turn++) {
        cu_stream stream = flights_stream();
        for (int rank = 0; rank < 2; rank++) {
            float *values = calloc(e.count, sizeof *values);
            for (uint64_t i = 0; i < e.count; i++)
                values[i] = value_of(rank, i) - (float)(turn + 5);
            CHECK_EQ(fake_cuda_write(e.at[rank], values, e.count * sizeof *values), 0);
            free(values);
            CHECK_EQ(fake_cuda_add(stream, e.at[rank], (float)(turn + 5), e.count), CU_OK);
            rc_call call = flights_call(e.at[rank]);
            call.count = e.count;
            e.in_flight[rank] = flights_submit(e.all, rank, &call, stream);
        }
        flights_follow(e.in_flight, 2, stream);
        for (int rank = 0; rank < 2; rank++)
            right &= is_sum(e.at[rank], 2, e.count);
        for (int rank = 0; rank < 2; rank++) {
            CHECK_EQ(rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS), RC_OK);
            rc_flight_free(e.in_flight[rank]);
            e.in_flight[rank] = NULL;
        }
        cuStreamDestroy_v2(stream);
    }
    end(&e);
    return right;
}

static int with_fault(int fault)
{
    pipe_fault = fault;
    int right = follows_streams();
    pipe_fault = PIPE_SOUND;
    return right;
}

/* What the core reads must be there, else it adds what lay in staging; and so on. */
static void test_faults_are_seen(void)
{
    CHECK(with_fault(PIPE_SOUND));
    gpu_expect_clean();
    for (int i = 0; i < CHECK_LESS(10, 2); i++) {
        CHECK(!with_fault(PIPE_EARLY_SHOW));
        CHECK(!with_fault(PIPE_NO_INPUT_EVENT));
    }
}

/* Without the event after it, a stream that looks at the result sees it as it was: nothing runs
 * while landings wait. */
static int is_seen_late(int fault)
{
    int right = 1;
    pipe_fault = fault;
    atomic_store(&pipe_paused, 1);
    exchange e = begin(2, RC_RING, 400000);
    cu_stream stream = flights_stream();
    submit_all(&e);
    flights_follow(e.in_flight, 2, stream);
    for (int rank = 0; rank < 2; rank++)
        right &= is_sum(e.at[rank], 2, e.count);
    atomic_store(&pipe_paused, 0);
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS), RC_OK);
    cuStreamDestroy_v2(stream);
    end(&e);
    pipe_fault = PIPE_SOUND;
    return right;
}

static void test_faults_after_it_are_seen(void)
{
    CHECK(is_seen_late(PIPE_SOUND));
    for (int i = 0; i < CHECK_LESS(10, 2); i++)
        CHECK(!is_seen_late(PIPE_NO_DONE_EVENT));
}

/* A flight that lands early has copies to its tensor that have not run. */
static void test_an_early_release_is_seen(void)
{
    for (int sound = 0; sound < 2; sound++)
        for (int i = 0; i < CHECK_LESS(10, 2); i++) {
            pipe_fault = sound ? PIPE_SOUND : PIPE_EARLY_RELEASE;
            exchange e = begin(2, RC_RING, 400000);
            submit_all(&e);
            for (int rank = 0; rank < 2; rank++)
                CHECK_EQ(rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS), RC_OK);
            CHECK_EQ(fake_cuda_pending() == 0, sound);
            end(&e);
            pipe_fault = PIPE_SOUND;
        }
}

/* The core fails while there is something to bring: staging stays until that is over. */
static void test_an_end_while_it_is_fed(void)
{
    for (int closes = 0; closes < 2; closes++) {
        atomic_store(&pipe_pieces_fed, 2);
        exchange e = begin(2, RC_RING, COUNT);
        submit_all(&e);
        CHECK(waits_until(flights_reached_core, &e));
        if (closes)
            rc_comm_close(e.all->world->comms[1], 100);
        else
            rc_comm_abort(e.all->world->comms[1], "it is enough");
        CHECK_EQ(rc_work_wait(e.in_flight[0]->work, WORLD_LONG_MS), RC_ABORTED);
        for (int rank = 0; rank < 2; rank++)
            CHECK_EQ(rc_flight_landed(e.in_flight[rank], 20), RC_AGAIN);
        atomic_store(&pipe_pieces_fed, INT32_MAX);
        for (int rank = 0; rank < 2; rank++)
            CHECK_EQ(rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS), RC_ABORTED);
        CHECK_EQ(fake_cuda_pending(), 0);
        end(&e);
        gpu_expect_clean();
    }
}

/* A copy fails when the core has the work: that is what every rank hears of, unless it is a copy
 * back and the other rank has all by then. */
static void test_a_copy_that_fails_is_named(void)
{
    static const char *const names[] = {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"};
    for (int back = 0; back < 2; back++) {
        char symbol[64];
        int named = 0, ours = 0;
        atomic_store(&pipe_pieces_fed, 2);
        exchange e = begin(2, RC_RING, COUNT);
        submit_all(&e);
        CHECK(waits_until(flights_reached_core, &e));
        usleep(10000);
        snprintf(symbol, sizeof symbol, "%s_v2", names[back]);
        fake_cuda_fail(symbol, 1, 999);
        atomic_store(&pipe_pieces_fed, INT32_MAX);
        for (int rank = 0; rank < 2; rank++) {
            rc_error error;
            rc_result result = rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS);
            int is_over = back && result == RC_OK;
            CHECK(result == RC_DEVICE || result == RC_ABORTED || is_over);
            rc_flight_error(e.in_flight[rank], &error);
            ours += result == RC_DEVICE;
            named += is_over || strstr(error.message, names[back]) != NULL;
        }
        CHECK_EQ(named, 2);
        CHECK_EQ(ours, 1);
        end(&e);
        gpu_expect_clean();
    }
}

/* Any call of the driver may fail: no rank waits, and everything is given back. */
static int one_call_fails(int k, int error)
{
    exchange e = begin(2, RC_RING, 400000);
    int landed = 1, failed = 0;
    fake_cuda_fail("*", k, error);
    for (int rank = 0; rank < 2; rank++) {
        rc_error why;
        rc_call call = flights_call(e.at[rank]);
        call.count = e.count;
        if (rc_pipe_submit(e.all->pipes[rank], &call, NULL, 0, 1, &e.in_flight[rank], &why) !=
            RC_OK)
            rc_comm_abort(e.all->world->comms[rank], "it was not submitted");
    }
    for (int rank = 0; rank < 2; rank++) {
        if (e.in_flight[rank] == NULL)
            continue;
        rc_result result = rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS);
        landed &= result != RC_AGAIN;
        failed |= result != RC_OK;
    }
    CHECK(landed);
    int happened = fake_cuda_faults() == 0;
    if (!happened)
        CHECK(!failed);
    end(&e);
    CHECK_EQ(fake_cuda_leaks(NULL), 0);
    return happened;
}

/* The order of its pieces is that of an algorithm, which must be the work's: the table is not
 * exchanged between the two. */
static void test_the_table_stays_while_it_is_brought_in(void)
{
    enum { ROUNDS = 10 };
    const rc_tuned halving = {UINT64_MAX, RC_HALVING};
    for (int round = 0; round < ROUNDS; round++) {
        exchange e = begin(2, RC_AUTO, 400001);
        rc_call call = flights_call(e.at[0]);
        call.count = e.count;
        e.in_flight[0] = flights_submit(e.all, 0, &call, CU_LEGACY_STREAM);
        CHECK_EQ(rc_comm_tune(e.all->world->comms[0], &halving, 1), RC_INVALID_STATE);
        call = flights_call(e.at[1]);
        call.count = e.count;
        e.in_flight[1] = flights_submit(e.all, 1, &call, CU_LEGACY_STREAM);
        CHECK(lands_well(&e));
        for (int rank = 0; rank < 2; rank++)
            CHECK_EQ(rc_comm_tune(e.all->world->comms[rank], &halving, 1), RC_OK);
        end(&e);
    }
    gpu_expect_clean();
}

static void test_any_call_may_fail(void)
{
    int k = 1;
    while (k < 300 && one_call_fails(k, 999))
        k += CHECK_LESS(1, 3);
    CHECK(k > 30 && k < 300);
    for (int other = 1; other < k; other += 5)
        one_call_fails(other, 700); /* for good */
}

int main(void)
{
    const check_test tests[] = {
        {"sums are right", test_sums_are_right},
        {"several at once", test_several_at_once},
        {"a result elsewhere", test_a_result_elsewhere},
        {"a tensor in parts", test_a_tensor_in_parts},
        {"the core has it before the last copy", test_the_core_has_it_before_the_last_copy},
        {"results return before the last segment", test_results_return_before_the_last_segment},
        {"over and landed", test_over_and_landed},
        {"faults are seen", test_faults_are_seen},
        {"faults after it are seen", test_faults_after_it_are_seen},
        {"an early release is seen", test_an_early_release_is_seen},
        {"an end while it is fed", test_an_end_while_it_is_fed},
        {"a copy that fails is named", test_a_copy_that_fails_is_named},
        {"the table stays while it is brought in", test_the_table_stays_while_it_is_brought_in},
        {"any call may fail", test_any_call_may_fail},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
