/* What the two threads of a pipe must not leave out: each fault that a build for tests can have is
 * seen every time, and a pipe without one is sound under the same trial. */
#include "flights.h"

enum { RANKS = 2 };

static int follows_streams(flights *all)
{
    return flights_follow_stream(all, flights_call(0));
}

/* Two tensors, one after the other, through one block of pinned memory. 1 if each has its sum. */
static int keeps_staging(flights *all)
{
    cu_stream streams[2] = {flights_stream(), flights_stream()};
    cu_address at[2][RANKS];
    rc_flight *in_flight[2][RANKS];
    int right = 1;
    for (int turn = 0; turn < 2; turn++) {
        for (int rank = 0; rank < RANKS; rank++) {
            at[turn][rank] = flights_tensor((float)turn + 1.0F);
            rc_call call = flights_call(at[turn][rank]);
            in_flight[turn][rank] = flights_submit(all, rank, &call, streams[turn]);
        }
        for (int rank = 0; rank < RANKS; rank++)
            CHECK_EQ(rc_flight_landed(in_flight[turn][rank], WORLD_LONG_MS), RC_OK);
    }
    for (int turn = 0; turn < 2; turn++)
        for (int rank = 0; rank < RANKS; rank++) {
            rc_flight *flight = in_flight[turn][rank];
            if (flight->done != NULL) /* all that the device has to do for it */
                CHECK_EQ(cuEventSynchronize(flight->done), CU_OK);
            right &= flights_is(at[turn][rank], 2.0F * ((float)turn + 1.0F));
            rc_flight_free(flight);
            cuMemFree_v2(at[turn][rank]);
        }
    for (int turn = 0; turn < 2; turn++)
        cuStreamDestroy_v2(streams[turn]);
    return right;
}

/* A tensor is freed when its flight has landed. 1 if nothing was copied to it any more. */
static int keeps_tensors(flights *all)
{
    cu_address at[RANKS];
    for (int rank = 0; rank < RANKS; rank++) {
        at[rank] = flights_tensor(1.0F);
        rc_call call = flights_call(at[rank]);
        rc_flight_free(flights_submit(all, rank, &call, CU_LEGACY_STREAM)); /* nobody waits */
    }
    int pending = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        rc_flight *flight = NULL;
        int landed = 0;
        CHECK_EQ(rc_pipe_take(all->pipes[rank], WORLD_LONG_MS, &flight, &landed), RC_OK);
        CHECK_EQ(landed, 1);
        rc_flight_free(flight);
    }
    pending = fake_cuda_pending();
    for (int rank = 0; rank < RANKS; rank++)
        cuMemFree_v2(at[rank]);
    return pending == 0;
}

static int has_fault_and(int fault, int (*trial)(flights *all))
{
    pipe_fault = fault;
    flights *all = flights_open(RANKS, "", NULL, 8 << 20);
    int right = trial(all);
    flights_close(all);
    pipe_fault = PIPE_SOUND;
    return right;
}

static void test_a_sound_pipe(void)
{
    CHECK(has_fault_and(PIPE_SOUND, follows_streams));
    gpu_expect_clean();
    CHECK(has_fault_and(PIPE_SOUND, keeps_staging));
    gpu_expect_clean();
    CHECK(has_fault_and(PIPE_SOUND, keeps_tensors));
    gpu_expect_clean();
}

static void test_a_missing_input_event_is_seen(void)
{
    for (int i = 0; i < 10; i++)
        CHECK(!has_fault_and(PIPE_NO_INPUT_EVENT, follows_streams));
}

static void test_a_missing_done_event_is_seen(void)
{
    for (int i = 0; i < 10; i++)
        CHECK(!has_fault_and(PIPE_NO_DONE_EVENT, follows_streams));
}

static void test_an_early_release_is_seen(void)
{
    for (int i = 0; i < 10; i++) {
        CHECK(!has_fault_and(PIPE_EARLY_RELEASE, keeps_staging));
        CHECK(!has_fault_and(PIPE_EARLY_RELEASE, keeps_tensors));
    }
}

int main(void)
{
    const check_test tests[] = {
        {"a sound pipe", test_a_sound_pipe},
        {"a missing input event is seen", test_a_missing_input_event_is_seen},
        {"a missing done event is seen", test_a_missing_done_event_is_seen},
        {"an early release is seen", test_an_early_release_is_seen},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
