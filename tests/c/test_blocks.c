/* test_blocks.c - flights whose codec is one of blocks: what the GPU packs is what the formulas
 * say, with residuals on the GPU, over several steps; faults are seen, and failures leave nothing
 * behind.
 */
#include "block_flights.h"

enum { COUNT = 4500 };

/* ---- bits ---- */

static void one_world(int size, uint64_t count, rc_codec codec, rc_op op)
{
    flights *all = flights_open(size, "", ptx(), 1 << 20);
    for (int with = 0; with <= 1; with++) {
        rc_feedback *feedback[WORLD_MAX];
        tensors t = make_tensors(size, count);
        qref_world ref = qref_open(size, count, with);
        float *want = calloc(count + 1, sizeof *want);
        open_feedback(feedback, size, count);
        for (int i = 0; i < 4; i++) {
            draw_values(&t);
            qref_allreduce(&ref, codec, op, t.src, want);
            if (!step(all, &t, with ? feedback : NULL, codec, op, want))
                CHECK_NOTE("codec %d op %d world %d step %d\n", codec, op, size, i);
            if (with)
                CHECK((feedback[0]->twin != NULL) == (i != 2 || size == 2)); /* looked at before */
            if (with && i == 1)
                check_residuals(feedback, &ref);
        }
        if (with)
            check_residuals(feedback, &ref);
        close_feedback(feedback, size);
        qref_close(&ref);
        free(want);
        free_tensors(&t);
    }
    flights_close(all);
    gpu_expect_clean();
}

static void flights_give_what_the_formulas_say(void)
{
    for (int size = 2; size <= 4; size++)
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
            one_world(size, c % 2 ? COUNT : 700, codecs[c], c / 2 ? RC_AVG : RC_SUM);
}

/* ---- faults ---- */

/* A stream writes to a tensor before the call and looks at it after. */
static int follows_streams(int size, int fault)
{
    cu_address at[WORLD_MAX];
    rc_flight *in_flight[WORLD_MAX];
    rc_error error;
    int right = 1;
    pipe_fault = fault;
    flights *all = flights_open(size, "", ptx(), 8 << 20);
    cu_stream stream = flights_stream();
    atomic_store(&pipe_paused, 1);
    for (int rank = 0; rank < size; rank++) {
        at[rank] = flights_tensor(126.0F);
        CHECK_EQ(fake_cuda_add(stream, at[rank], 1.0F, FLIGHTS_COUNT), CU_OK);
        rc_call call = call_at(at[rank], FLIGHTS_COUNT, RC_CODEC_INT8, RC_SUM);
        in_flight[rank] = flights_submit(all, rank, &call, stream);
    }
    for (int rank = 0; rank < size; rank++) {
        CHECK_EQ(rc_flight_wait(in_flight[rank], WORLD_LONG_MS), RC_OK);
        CHECK_EQ(rc_flight_order(in_flight[rank], flights_handle(stream), &error), RC_OK);
    }
    CHECK_EQ(cuStreamSynchronize(stream), CU_OK);
    for (int rank = 0; rank < size; rank++)
        right &= flights_is(at[rank], (float)size * 127.0F);
    atomic_store(&pipe_paused, 0);
    for (int rank = 0; rank < size; rank++) {
        CHECK_EQ(rc_flight_landed(in_flight[rank], WORLD_LONG_MS), RC_OK);
        rc_flight_free(in_flight[rank]);
        cuMemFree_v2(at[rank]);
    }
    cuStreamDestroy_v2(stream);
    flights_close(all);
    pipe_fault = PIPE_SOUND;
    return right;
}

static void faults_are_seen(void)
{
    for (int size = 2; size <= 3; size++) {
        CHECK(follows_streams(size, PIPE_SOUND));
        gpu_expect_clean();
        for (int i = 0; i < 10; i++) {
            CHECK(!follows_streams(size, PIPE_NO_INPUT_EVENT));
            CHECK(!follows_streams(size, PIPE_NO_DONE_EVENT));
        }
    }
}

/* ---- failures ---- */

/* Two steps with feedback, of which the k-th call of the driver fails: 1 if one did. */
static int one_call_fails(int size, int k)
{
    rc_feedback *feedback[WORLD_MAX];
    float values[COUNT];
    int failed = 0;
    for (int i = 0; i < COUNT; i++)
        values[i] = (float)(i % 97);
    flights *all = flights_open(size, "", ptx(), 1 << 20);
    open_feedback(feedback, size, COUNT);
    cu_address at[WORLD_MAX];
    for (int rank = 0; rank < size; rank++)
        at[rank] = on_device(values, COUNT);
    int before = fake_cuda_faults();
    fake_cuda_fail("*", k, CU_LAUNCH_FAILED);
    for (int turn = 0; turn < 2; turn++) {
        rc_flight *in_flight[WORLD_MAX] = {NULL};
        for (int rank = 0; rank < size; rank++) {
            rc_error error;
            rc_call call = call_at(at[rank], COUNT, RC_CODEC_INT4, RC_AVG);
            call.feedback = feedback[rank];
            rc_pipe_submit(all->pipes[rank], &call, NULL, 0, 1, &in_flight[rank], &error);
        }
        for (int rank = 0; rank < size; rank++) {
            rc_result result = in_flight[rank] == NULL
                                   ? RC_DEVICE
                                   : rc_flight_landed(in_flight[rank], WORLD_LONG_MS);
            CHECK(result != RC_AGAIN && result != RC_TIMEOUT);
            CHECK(!rc_feedback_busy(feedback[rank]));
            failed |= result != RC_OK;
            rc_flight_free(in_flight[rank]);
        }
    }
    failed |= fake_cuda_faults() == before;
    for (int rank = 0; rank < size; rank++) {
        (void)rc_feedback_worker(feedback[rank]);
        cuMemFree_v2(at[rank]);
    }
    rc_feedback_free(feedback[0]);
    flights_close(all);
    for (int rank = 1; rank < size; rank++)
        rc_feedback_free(feedback[rank]); /* beyond its pipe */
    CHECK_EQ(fake_cuda_leaks(NULL), 0);
    CHECK(fake_cuda_misuse() == NULL);
    return failed;
}

static void failures_leave_nothing_behind(void)
{
    for (int size = 2; size <= 3; size++) {
        int failures = 0;
        for (int k = 1; k < 250; k += 1 + k / 16)
            failures += one_call_fails(size, k);
        CHECK(failures > 20);
    }
}

static void which_flights_it_takes(void)
{
    flights *all = flights_open(2, "", ptx(), 1 << 20);
    rc_pipe *pipe = all->pipes[0];
    rc_piece piece = {0};
    const rc_flight good = {.pipe = pipe, .call = call_at(4096, COUNT, RC_CODEC_FP8, RC_SUM)};
    rc_flight flight = good;
    CHECK(blocks_suits(&flight));
    flight.call.codec = RC_CODEC_TOPK;
    flight.call.density = 0.01;
    CHECK(blocks_suits(&flight));
    flight.call.codec = RC_CODEC_BF16;
    CHECK(!blocks_suits(&flight));
    flight = good, flight.call.src = (const void *)4098;
    CHECK(!blocks_suits(&flight));
    flight = good, flight.pieces = &piece, flight.piece_count = 1;
    CHECK(blocks_suits(&flight));
    piece.bytes = 6;
    CHECK(!blocks_suits(&flight));
    flight = good, flight.call.dtype = RC_F64;
    CHECK(!blocks_suits(&flight));
    flight = good, flight.call.collective = RC_REDUCE_SCATTER;
    CHECK(!blocks_suits(&flight));
    flights_close(all);
    gpu_expect_clean();
}

int main(void)
{
    const check_test tests[] = {
        {"which flights it takes", which_flights_it_takes},
        {"flights give what the formulas say", flights_give_what_the_formulas_say},
        {"faults are seen", faults_are_seen},
        {"failures leave nothing behind", failures_leave_nothing_behind},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
