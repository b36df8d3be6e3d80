/* test_blocks.c - flights whose codec is one of blocks: what the GPU packs is what a
 * world of host tensors has, as is what the core packs where there are residuals; faults are seen,
 * and failures leave nothing behind.
 */
#include <stdio.h>

#include "flights.h"
#include "quant_world.h"

enum { COUNT = 4500 };

/* ---- bits ---- */

static const char *ptx(void)
{
    static char text[1 << 19];
    if (text[0] == '\0') {
        FILE *file = fopen(KERNELS_PTX, "re");
        size_t bytes = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
        CHECK(bytes > 0);
        if (file != NULL)
            fclose(file);
    }
    return text;
}

static cu_address on_device(const float *values, uint64_t count)
{
    cu_address at = 0;
    CHECK_EQ(cuMemAlloc_v2(&at, count * sizeof *values), CU_OK);
    CHECK_EQ(fake_cuda_write(at, values, count * sizeof *values), 0);
    return at;
}

static rc_call call_at(cu_address at, uint64_t count, rc_codec codec, rc_op op)
{
    rc_call call = flights_call(at);
    call.count = count;
    call.codec = codec;
    call.op = op;
    return call;
}

static int
    full_at; /* which allocation on GPUs of the next step fails for want of memory; 0: none */

/* One step of all ranks. 1 if all have the result. */
static int step(const flights *all, const tensors *t, rc_feedback **feedback, rc_codec codec,
                rc_op op, const float *want)
{
    rc_flight *in_flight[WORLD_MAX];
    cu_address at[WORLD_MAX];
    float *got = malloc(t->count * sizeof *got);
    int right = 1;
    for (int rank = 0; rank < t->size; rank++)
        at[rank] = on_device(t->src[rank], t->count);
    if (full_at > 0)
        fake_cuda_fail("cuMemAlloc_v2", full_at, CU_OUT_OF_MEMORY);
    full_at = 0;
    for (int rank = 0; rank < t->size; rank++) {
        rc_call call = call_at(at[rank], t->count, codec, op);
        call.feedback = feedback != NULL ? feedback[rank] : NULL;
        in_flight[rank] = flights_submit(all, rank, &call, CU_LEGACY_STREAM);
    }
    for (int rank = 0; rank < t->size; rank++) {
        CHECK_EQ(rc_flight_landed(in_flight[rank], WORLD_LONG_MS), RC_OK);
        rc_flight_free(in_flight[rank]);
        CHECK_EQ(fake_cuda_read(got, at[rank], t->count * sizeof *got), 0);
        right &= same(got, want, t->count, "result", rank);
        cuMemFree_v2(at[rank]);
    }
    free(got);
    return right;
}

static void one_world(int size, uint64_t count, rc_codec codec, rc_op op)
{
    flights *all = flights_open(size, "", ptx(), 1 << 20);
    world *other = other_world(size);
    for (int with = 0; with <= 1; with++) {
        twins both = twins_open(size, count, with);
        for (int i = 0; i < 4; i++) {
            twins_draw(&both, other, codec, op);
            if (!step(all, &both.t, both.feedback, codec, op, both.other.dst[0]))
                CHECK_NOTE("codec %d op %d world %d step %d\n", codec, op, size, i);
            if (with)
                same_residuals(both.feedback, both.other_feedback, size);
        }
        twins_close(&both);
    }
    world_close(other);
    flights_close(all);
    gpu_expect_clean();
}

static void flights_give_what_host_tensors_give(void)
{
    for (int size = 2; size <= 4; size++)
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
            one_world(size, c % 2 ? COUNT : 700, codecs[c], c / 2 ? RC_AVG : RC_SUM);
}

/* The CPU packs or unpacks for a GPU that has no memory for it, to the same bits. */
static void the_cpu_helps_a_gpu_that_is_full(void)
{
    for (int size = 2; size <= 3; size++)
        for (int k = 1; k <= 2 * size; k++) { /* a rank takes memory to pack, then to unpack */
            flights *all = flights_open(size, "", ptx(), 1 << 20);
            world *other = other_world(size);
            twins both = twins_open(size, COUNT, 0);
            int before = fake_cuda_faults();
            twins_draw(&both, other, RC_CODEC_INT4, RC_SUM);
            full_at = k;
            CHECK(step(all, &both.t, NULL, RC_CODEC_INT4, RC_SUM, both.other.dst[0]));
            CHECK_EQ(fake_cuda_faults(), before);
            twins_close(&both);
            world_close(other);
            flights_close(all);
            gpu_expect_clean();
        }
}

/* ---- faults and failures ---- */

/* Of a call of FLIGHTS_COUNT elements, whose sum is exact. */
static int streams_follow(int size, rc_call call, int fault)
{
    pipe_fault = fault;
    flights *all = flights_open(size, "", ptx(), 8 << 20);
    int right = flights_follow_stream(all, call);
    flights_close(all);
    pipe_fault = PIPE_SOUND;
    return right;
}

static void faults_are_seen(void)
{
    const rc_call call = call_at(0, FLIGHTS_COUNT, RC_CODEC_INT8, RC_SUM);
    for (int size = 2; size <= 3; size++) {
        CHECK(streams_follow(size, call, PIPE_SOUND));
        gpu_expect_clean();
        for (int i = 0; i < 10; i++) {
            CHECK(!streams_follow(size, call, PIPE_NO_INPUT_EVENT));
            CHECK(!streams_follow(size, call, PIPE_NO_DONE_EVENT));
        }
    }
}

/* Two steps, of which the k-th call of the driver fails: 1 if one did. Every other k is with
 * feedback, and so packed by the core. */
static int a_step_fails(int size, rc_call call, int k)
{
    rc_feedback *feedback[WORLD_MAX];
    cu_address at[WORLD_MAX];
    int failed = 0;
    tensors t = make_tensors(size, call.count);
    draw_values(&t);
    flights *all = flights_open(size, "", ptx(), 1 << 20);
    open_feedback(feedback, size, call.count);
    for (int rank = 0; rank < size; rank++)
        at[rank] = on_device(t.src[rank], call.count);
    int before = fake_cuda_faults();
    fake_cuda_fail("*", k, CU_LAUNCH_FAILED);
    for (int turn = 0; turn < 2; turn++) {
        rc_flight *in_flight[WORLD_MAX] = {NULL};
        for (int rank = 0; rank < size; rank++) {
            rc_error error;
            call.src = call.dst = (void *)(uintptr_t)at[rank];
            call.feedback = k % 2 ? NULL : feedback[rank];
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
    close_feedback(feedback + 1, size - 1); /* beyond their pipes */
    free_tensors(&t);
    CHECK_EQ(fake_cuda_leaks(NULL), 0);
    CHECK(fake_cuda_misuse() == NULL);
    return failed;
}

static void failures_leave_nothing_behind(void)
{
    for (int size = 2; size <= 3; size++) {
        int failures = 0;
        for (int k = 1; k < 250; k += 1 + k / 16)
            failures += a_step_fails(size, call_at(0, COUNT, RC_CODEC_INT4, RC_AVG), k);
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
        {"flights give what host tensors give", flights_give_what_host_tensors_give},
        {"the CPU helps a GPU that is full", the_cpu_helps_a_gpu_that_is_full},
        {"faults are seen", faults_are_seen},
        {"failures leave nothing behind", failures_leave_nothing_behind},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
