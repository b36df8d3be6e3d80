/* A pipe's life, and what it takes and refuses before a flight begins. */
#include <sys/wait.h>

#include "flights.h"

static rc_result try(const flights *all, rc_call call, const rc_piece *pieces, int count,
                     int64_t stream, rc_error *error)
{
    rc_flight *flight = NULL;
    rc_result result = rc_pipe_submit(all->pipes[0], &call, pieces, count, stream, &flight, error);
    CHECK((flight != NULL) == (result == RC_OK));
    if (flight != NULL)
        rc_flight_landed(flight, WORLD_LONG_MS);
    rc_flight_free(flight);
    return result;
}

static void test_questions_to_the_driver(void)
{
    int count = 7, ordinal = 7;
    rc_error error;
    gpu_settings("FAKE_CUDA_DEVICES=3");
    const char *path = gpu_path();
    CHECK_EQ(rc_cuda_devices("/nowhere/libcuda.so.1", &count, &error), RC_DEVICE);
    CHECK_EQ(count, 0);
    CHECK(strstr(error.message, "/nowhere") != NULL);
    CHECK_EQ(rc_cuda_devices(path, &count, &error), RC_OK);
    CHECK_EQ(count, 3);
    flights *all = flights_open(1, "", NULL, 1 << 20);
    cu_address at = flights_tensor(1.0F);
    CHECK_EQ(rc_cuda_locate(path, at, &ordinal, &error), RC_OK);
    CHECK_EQ(ordinal, 0);
    CHECK_EQ(rc_cuda_locate(path, (uintptr_t)&count, &ordinal, &error), RC_OK);
    CHECK_EQ(ordinal, -1);
    cuMemFree_v2(at);
    flights_close(all);
    gpu_expect_clean();
}

static void test_a_pipe_that_cannot_be_made(void)
{
    rc_error error;
    rc_pipe *pipe;
    flights *all = flights_open(1, "", NULL, 1 << 20);
    CHECK_EQ(rc_pipe_create(&pipe, all->world->comms[0], "/nowhere", 0, NULL, 0, &error),
             RC_DEVICE);
    CHECK_EQ(rc_pipe_create(&pipe, all->world->comms[0], gpu_path(), 9, NULL, 0, &error),
             RC_INVALID_ARGUMENT);
    for (int k = 1; k < 15; k++) {
        fake_cuda_fail("*", k, 999);
        if (rc_pipe_create(&pipe, all->world->comms[0], gpu_path(), 0, NULL, 0, &error) == RC_OK) {
            rc_pipe_stop(pipe);
            rc_pipe_free(pipe);
        }
        CHECK_EQ(fake_cuda_leaks("streams"), 2);
        CHECK_EQ(fake_cuda_leaks("events"), 1);
    }
    flights_close(all);
    gpu_expect_clean();
}

static void test_what_is_refused(void)
{
    rc_error error;
    flights *all = flights_open(1, "", NULL, 1 << 20);
    cu_address at = flights_tensor(1.0F);
    rc_call good = flights_call(at), call = good;
    call.count = 0;
    CHECK_EQ(try(all, call, NULL, 0, 1, &error), RC_INVALID_ARGUMENT);
    call = good, call.root = 4;
    CHECK_EQ(try(all, call, NULL, 0, 1, &error), RC_INVALID_ARGUMENT);
    call = good, call.src = call.dst = &error;
    CHECK_EQ(try(all, call, NULL, 0, 1, &error), RC_INVALID_ARGUMENT);
    CHECK(strstr(error.message, "host memory") != NULL);
    cu_stream stream = flights_stream();
    fake_cuda_capture(stream, 1);
    CHECK_EQ(try(all, good, NULL, 0, flights_handle(stream), &error), RC_INVALID_ARGUMENT);
    CHECK_EQ(fake_cuda_capture(stream, 0), 1); /* and it has not been spoilt */
    cuStreamDestroy_v2(stream);
    const uint64_t bytes = FLIGHTS_COUNT * sizeof(float);
    const rc_piece pieces[] = {{at, 0, 8}, {at + 8, bytes - 4, 8}, {at, 4, 8}};
    call = good, call.src = call.dst = NULL;
    CHECK_EQ(try(all, call, pieces, 2, 1, &error), RC_INVALID_ARGUMENT); /* past the end */
    const rc_piece crossed[] = {pieces[0], pieces[2]};
    CHECK_EQ(try(all, call, crossed, 2, 1, &error), RC_INVALID_ARGUMENT);
    CHECK_EQ(try(all, good, NULL, 0, 1, &error), RC_OK); /* it goes on after all of this */
    cuMemFree_v2(at);
    flights_close(all);
    gpu_expect_clean();
}

static void test_a_feedback_is_the_flights(void)
{
    enum { RANKS = 2 };
    rc_error error;
    flights *all = flights_open(RANKS, "", NULL, 1 << 20);
    rc_flight *in_flight[RANKS];
    rc_feedback *feedback[RANKS];
    cu_address at[RANKS];
    rc_call calls[RANKS];
    for (int rank = 0; rank < RANKS; rank++) {
        at[rank] = flights_tensor(1.0F);
        CHECK_EQ(rc_feedback_create(&feedback[rank], FLIGHTS_COUNT), RC_OK);
        calls[rank] = flights_call(at[rank]);
        calls[rank].codec = RC_CODEC_INT4;
        calls[rank].feedback = feedback[rank];
    }
    in_flight[0] = flights_submit(all, 0, &calls[0], CU_LEGACY_STREAM);
    CHECK_EQ(try(all, calls[0], NULL, 0, 1, &error), RC_INVALID_STATE);
    CHECK(strstr(error.message, "in use") != NULL);
    in_flight[1] = flights_submit(all, 1, &calls[1], CU_LEGACY_STREAM);
    for (int rank = 0; rank < RANKS; rank++)
        CHECK_EQ(rc_flight_wait(in_flight[rank], WORLD_LONG_MS), RC_OK);
    rc_call call = calls[0];
    call.count--;
    CHECK_EQ(try(all, call, NULL, 0, 1, &error), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_feedback_busy(feedback[0]), 0);
    float left = rc_feedback_worker(feedback[0])[0];
    CHECK(left != 0.0F);
    fake_cuda_fail("cuMemcpyDtoHAsync_v2", 1, 999); /* in the thread "in" */
    CHECK_EQ(try(all, calls[0], NULL, 0, 1, &error), RC_OK);
    CHECK_EQ(fake_cuda_faults(), 0);
    CHECK_EQ(rc_feedback_undo(feedback[0]), RC_OK); /* the call before succeeded */
    CHECK(rc_feedback_worker(feedback[0])[0] == left);
    flights_land(in_flight, at, RANKS);
    for (int rank = 0; rank < RANKS; rank++)
        rc_feedback_free(feedback[rank]);
    flights_close(all);
    gpu_expect_clean();
}

static void test_pieces_have_zeros_between_them(void)
{
    rc_error error;
    flights *all = flights_open(1, "", NULL, 1 << 20);
    cu_address at = flights_tensor(3.0F);
    const rc_piece pieces[] = {{at, 8, 400}, {at + 800, 1000, 40}};
    rc_call call = flights_call(0);
    CHECK_EQ(try(all, call, pieces, 2, 1, &error), RC_OK);
    rc_flight *flight = NULL;
    atomic_store(&pipe_paused, 1);
    CHECK_EQ(rc_pipe_submit(all->pipes[0], &call, pieces, 2, 1, &flight, &error), RC_OK);
    CHECK_EQ(rc_flight_wait(flight, WORLD_LONG_MS), RC_OK);
    const float *staged = (const float *)(const void *)flight->dst;
    for (int i = 0; i < FLIGHTS_COUNT; i++)
        CHECK(staged[i] == ((i >= 2 && i < 102) || (i >= 250 && i < 260) ? 3.0F : 0.0F));
    atomic_store(&pipe_paused, 0);
    CHECK_EQ(rc_flight_landed(flight, WORLD_LONG_MS), RC_OK);
    rc_flight_free(flight);
    cuMemFree_v2(at);
    flights_close(all);
    gpu_expect_clean();
}

/* A root's result is what the others get: in a tensor of its own, or where its values were. */
static void test_a_broadcast_has_one_result(void)
{
    enum { RANKS = 2 };
    flights *all = flights_open(RANKS, "", NULL, 1 << 20);
    for (int codec = RC_CODEC_NONE; codec <= RC_CODEC_FP16; codec++)
        for (int in_place = 0; in_place < 2; in_place++) {
            cu_address src = flights_tensor(1.1F), at[RANKS];
            rc_flight *in_flight[RANKS];
            float got = 0.0F;
            for (int rank = 0; rank < RANKS; rank++) {
                at[rank] = in_place && rank == 0 ? src : flights_tensor(7.0F);
                rc_call call = flights_call(at[rank]);
                call.collective = RC_BROADCAST;
                call.codec = (rc_codec)codec;
                call.src = rank == 0 ? (void *)(uintptr_t)src : call.dst;
                in_flight[rank] = flights_submit(all, rank, &call, CU_LEGACY_STREAM);
            }
            for (int rank = 0; rank < RANKS; rank++)
                CHECK_EQ(rc_flight_landed(in_flight[rank], WORLD_LONG_MS), RC_OK);
            CHECK_EQ(fake_cuda_read(&got, at[1], sizeof got), 0);
            CHECK_EQ(got == 1.1F, codec == RC_CODEC_NONE); /* else rounded */
            CHECK(flights_is(at[0], got));
            CHECK(flights_is(at[1], got));
            CHECK(in_place || flights_is(src, 1.1F));
            flights_land(in_flight, at, RANKS);
            if (!in_place)
                cuMemFree_v2(src);
        }
    flights_close(all);
    gpu_expect_clean();
}

static void test_drain_puts_works_behind_flights(void)
{
    enum { FLIGHTS = 20 };
    rc_work *work;
    rc_flight *in_flight[FLIGHTS];
    rc_error error;
    flights *all = flights_open(1, "", NULL, 1 << 20);
    cu_address at = flights_tensor(1.0F);
    rc_call call = flights_call(at);
    for (int i = 0; i < FLIGHTS; i++)
        in_flight[i] = flights_submit(all, 0, &call, CU_LEGACY_STREAM);
    CHECK_EQ(rc_pipe_drain(all->pipes[0], WORLD_LONG_MS), RC_OK);
    float host = 1.0F;
    call.src = call.dst = &host, call.count = 1;
    CHECK_EQ(rc_submit(all->world->comms[0], &call, &work, &error), RC_OK);
    CHECK_EQ(rc_work_seq(work), FLIGHTS);
    rc_work_free(work);
    for (int i = 0; i < FLIGHTS; i++) {
        CHECK_EQ(rc_flight_landed(in_flight[i], WORLD_LONG_MS), RC_OK);
        CHECK_EQ(rc_flight_seq(in_flight[i]), i);
        rc_flight_free(in_flight[i]);
    }
    cuMemFree_v2(at);
    flights_close(all);
    gpu_expect_clean();
}

static void test_a_stop_ends_what_waits(void)
{
    rc_error error;
    flights *all = flights_open(2, "", NULL, 1 << 20);
    cu_address at = flights_tensor(1.0F);
    rc_call call = flights_call(at);
    rc_flight *flight = flights_submit(all, 0, &call, CU_LEGACY_STREAM), *other = NULL;
    rc_comm_close(all->world->comms[0], 100);
    rc_pipe_stop(all->pipes[0]);
    CHECK(rc_flight_landed(flight, 0) != RC_AGAIN);
    CHECK(rc_flight_wait(flight, 0) != RC_OK);
    CHECK_EQ(rc_pipe_submit(all->pipes[0], &call, NULL, 0, 1, &other, &error), RC_INVALID_STATE);
    int landed;
    CHECK_EQ(rc_pipe_take(all->pipes[0], 0, &other, &landed), RC_OK);
    rc_flight_free(other);
    CHECK_EQ(rc_pipe_take(all->pipes[0], WORLD_LONG_MS, &other, &landed), RC_INVALID_STATE);
    rc_pipe_free(all->pipes[0]);
    rc_flight_error(flight, &error); /* it is valid beyond */
    CHECK(error.code != RC_OK);
    rc_flight_free(flight);
    all->pipes[0] = NULL;
    cuMemFree_v2(at);
    flights_close(all);
    gpu_expect_clean();
}

static void test_a_forked_child_leaves_it_alone(void)
{
    flights *all = flights_open(1, "", NULL, 1 << 20);
    cu_address at = flights_tensor(1.0F);
    rc_call call = flights_call(at);
    rc_flight *flight = flights_submit(all, 0, &call, CU_LEGACY_STREAM);
    CHECK_EQ(rc_flight_landed(flight, WORLD_LONG_MS), RC_OK);
    pid_t child = fork();
    if (child == 0) {
        rc_flight *other;
        rc_error error;
        int landed, ok = rc_pipe_submit(all->pipes[0], &call, NULL, 0, 1, &other, &error) ==
                             RC_INVALID_STATE &&
                         rc_pipe_take(all->pipes[0], 0, &other, &landed) == RC_INVALID_STATE &&
                         rc_pipe_drain(all->pipes[0], 0) == RC_INVALID_STATE;
        rc_flight_free(flight);
        rc_pipe_stop(all->pipes[0]);
        rc_pipe_free(all->pipes[0]);
        _exit(ok ? 0 : 1);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    rc_flight_free(flight);
    cuMemFree_v2(at);
    flights_close(all);
    gpu_expect_clean();
}

int main(void)
{
    const check_test tests[] = {
        {"questions to the driver", test_questions_to_the_driver},
        {"a pipe that cannot be made", test_a_pipe_that_cannot_be_made},
        {"what is refused", test_what_is_refused},
        {"a feedback is the flight's", test_a_feedback_is_the_flights},
        {"pieces have zeros between them", test_pieces_have_zeros_between_them},
        {"a broadcast has one result", test_a_broadcast_has_one_result},
        {"drain puts works behind flights", test_drain_puts_works_behind_flights},
        {"a stop ends what waits", test_a_stop_ends_what_waits},
        {"a forked child leaves it alone", test_a_forked_child_leaves_it_alone},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
