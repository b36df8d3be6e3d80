/* block_flights.h - flights whose codec is one of blocks, with the package's kernels, and what the
 * formulas say of them.
 */
#ifndef RINGCOMM_TEST_BLOCK_FLIGHTS_H
#define RINGCOMM_TEST_BLOCK_FLIGHTS_H

#include <stdio.h>

#include "flights.h"
#include "quant_world.h"

static inline const char *ptx(void)
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

static inline cu_address on_device(const float *values, uint64_t count)
{
    cu_address at = 0;
    CHECK_EQ(cuMemAlloc_v2(&at, count * sizeof *values), CU_OK);
    CHECK_EQ(fake_cuda_write(at, values, count * sizeof *values), 0);
    return at;
}

static inline rc_call call_at(cu_address at, uint64_t count, rc_codec codec, rc_op op)
{
    rc_call call = flights_call(at);
    call.count = count;
    call.codec = codec;
    call.op = op;
    return call;
}

/* One step of all ranks. 1 if all have the result. */
static inline int step(const flights *all, const tensors *t, rc_feedback **feedback, rc_codec codec,
                       rc_op op, const float *want)
{
    rc_flight *in_flight[WORLD_MAX];
    cu_address at[WORLD_MAX];
    float *got = malloc(t->count * sizeof *got);
    int right = 1;
    for (int rank = 0; rank < t->size; rank++) {
        at[rank] = on_device(t->src[rank], t->count);
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

/* ---- what must not be left out ---- */

/* Of a call of FLIGHTS_COUNT elements, whose sum is exact. */
static inline int streams_follow(int size, rc_call call, int fault)
{
    pipe_fault = fault;
    flights *all = flights_open(size, "", ptx(), 8 << 20);
    int right = flights_follow_stream(all, call);
    flights_close(all);
    pipe_fault = PIPE_SOUND;
    return right;
}

static inline void expect_faults_seen(int size, rc_call call)
{
    CHECK(streams_follow(size, call, PIPE_SOUND));
    gpu_expect_clean();
    for (int i = 0; i < 10; i++) {
        CHECK(!streams_follow(size, call, PIPE_NO_INPUT_EVENT));
        CHECK(!streams_follow(size, call, PIPE_NO_DONE_EVENT));
    }
}

/* ---- failures ---- */

/* Two steps with feedback, of which the k-th call of the driver fails: 1 if one did. */
static inline int a_step_fails(int size, rc_call call, int k)
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
    close_feedback(feedback + 1, size - 1); /* beyond their pipes */
    free_tensors(&t);
    CHECK_EQ(fake_cuda_leaks(NULL), 0);
    CHECK(fake_cuda_misuse() == NULL);
    return failed;
}

static inline void expect_clean_failures(int size, rc_call call)
{
    int failures = 0;
    for (int k = 1; k < 250; k += 1 + k / 16)
        failures += a_step_fails(size, call, k);
    CHECK(failures > 20);
}

#endif
