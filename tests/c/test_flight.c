/* What callers do with a flight: wait, order streams behind it, hear of it, let go of it. */
#include "../../csrc/base/clock.h"
#include "flights.h"

enum { RANKS = 2 };

static void begin(const flights *all, cu_address at[RANKS], rc_flight *in_flight[RANKS], int notify)
{
    for (int rank = 0; rank < RANKS; rank++) {
        at[rank] = flights_tensor(1.0F);
        rc_call call = flights_call(at[rank]);
        call.notify = notify;
        in_flight[rank] = flights_submit(all, rank, &call, CU_LEGACY_STREAM);
    }
}

static void end(flights *all, const cu_address at[RANKS], rc_flight *in_flight[RANKS])
{
    for (int rank = 0; rank < RANKS; rank++) {
        rc_flight_free(in_flight[rank]);
        cuMemFree_v2(at[rank]);
    }
    flights_close(all);
    gpu_expect_clean();
}

static void test_over_comes_before_landed(void)
{
    rc_error error;
    cu_address at[RANKS];
    rc_flight *in_flight[RANKS];
    flights *all = flights_open(RANKS, "", NULL, 1 << 20);
    atomic_store(&pipe_paused, 1);
    begin(all, at, in_flight, 0);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_EQ(rc_flight_wait(in_flight[rank], WORLD_LONG_MS), RC_OK);
        CHECK_EQ(rc_flight_landed(in_flight[rank], 20), RC_AGAIN);
        CHECK(!flights_is(at[rank], 2.0F)); /* the copy is still to be made */
        CHECK_EQ(rc_flight_seq(in_flight[rank]), 0);
        CHECK_EQ(rc_flight_root(in_flight[rank]), 0);
        CHECK(rc_flight_elapsed(in_flight[rank]) > 0.0);
    }
    atomic_store(&pipe_paused, 0);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_EQ(rc_flight_landed(in_flight[rank], WORLD_LONG_MS), RC_OK);
        CHECK(flights_is(at[rank], 2.0F));
        int calls = fake_cuda_calls("cuStreamWaitEvent");
        CHECK_EQ(rc_flight_order(in_flight[rank], 1, &error), RC_OK);
        CHECK_EQ(fake_cuda_calls("cuStreamWaitEvent"), calls); /* there is nothing to wait for */
    }
    end(all, at, in_flight);
}

static void test_orders_that_cannot_be(void)
{
    rc_error error;
    cu_address at[RANKS];
    rc_flight *in_flight[RANKS];
    flights *all = flights_open(RANKS, "FAKE_CUDA_DEVICES=2", NULL, 1 << 20);
    at[0] = flights_tensor(1.0F), at[1] = flights_tensor(1.0F);
    rc_call call = flights_call(at[0]);
    in_flight[0] = flights_submit(all, 0, &call, CU_LEGACY_STREAM);
    CHECK_EQ(rc_flight_wait(in_flight[0], 20), RC_AGAIN);
    CHECK_EQ(rc_flight_order(in_flight[0], 1, &error), RC_INVALID_ARGUMENT); /* not over */
    atomic_store(&pipe_paused, 1);
    call = flights_call(at[1]);
    in_flight[1] = flights_submit(all, 1, &call, CU_LEGACY_STREAM);
    CHECK_EQ(rc_flight_wait(in_flight[0], WORLD_LONG_MS), RC_OK);
    CHECK_EQ(rc_flight_order(in_flight[0], RC_NO_STREAM, &error), RC_INVALID_ARGUMENT);
    cu_stream foreign = fake_cuda_foreign_stream(0);
    CHECK_EQ(rc_flight_order(in_flight[0], flights_handle(foreign), &error), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_flight_order(in_flight[0], 2, &error), RC_OK);
    atomic_store(&pipe_paused, 0);
    CHECK_EQ(rc_flight_landed(in_flight[1], WORLD_LONG_MS), RC_OK);
    cuStreamDestroy_v2(foreign);
    end(all, at, in_flight);
}

static void take(const flights *all, int rank, rc_flight *expected, int wants_landed)
{
    rc_flight *flight = NULL;
    int landed = -1;
    CHECK_EQ(rc_pipe_take(all->pipes[rank], WORLD_LONG_MS, &flight, &landed), RC_OK);
    CHECK(flight == expected);
    CHECK_EQ(landed, wants_landed);
    rc_flight_free(flight);
}

static void test_notices(void)
{
    cu_address at[RANKS];
    rc_flight *in_flight[RANKS], *none;
    int landed;
    flights *all = flights_open(RANKS, "", NULL, 1 << 20);
    atomic_store(&pipe_paused, 1);
    begin(all, at, in_flight, 1);
    take(all, 0, in_flight[0], 0);
    CHECK_EQ(rc_pipe_take(all->pipes[0], 0, &none, &landed), RC_AGAIN);
    take(all, 1, in_flight[1], 0);
    rc_flight_notify(in_flight[0]); /* once is enough */
    atomic_store(&pipe_paused, 0);
    for (int rank = 0; rank < RANKS; rank++) {
        take(all, rank, in_flight[rank], 1);
        rc_flight_notify(in_flight[rank]); /* too late */
        CHECK_EQ(rc_pipe_take(all->pipes[rank], 0, &none, &landed), RC_AGAIN);
    }
    end(all, at, in_flight);
}

static void test_a_failure_of_the_core(void)
{
    rc_error error;
    cu_address at[RANKS];
    rc_flight *in_flight[RANKS];
    flights *all = flights_open(RANKS, "", NULL, 1 << 20);
    at[0] = flights_tensor(1.0F), at[1] = flights_tensor(1.0F);
    for (int rank = 0; rank < RANKS; rank++) {
        rc_call call = flights_call(at[rank]);
        call.op = rank == 0 ? RC_SUM : RC_MAX;
        in_flight[rank] = flights_submit(all, rank, &call, CU_LEGACY_STREAM);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        rc_result result = rc_flight_landed(in_flight[rank], WORLD_LONG_MS);
        CHECK(result != RC_OK && result != RC_AGAIN);
        rc_flight_error(in_flight[rank], &error);
        CHECK_EQ(error.code, result);
        CHECK(flights_is(at[rank], 1.0F)); /* nothing was copied back */
    }
    end(all, at, in_flight);
}

int main(void)
{
    const check_test tests[] = {
        {"over comes before landed", test_over_comes_before_landed},
        {"orders that cannot be", test_orders_that_cannot_be},
        {"notices", test_notices},
        {"a failure of the core", test_a_failure_of_the_core},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
