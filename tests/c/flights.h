/* flights.h - ranks with a pipe each to one GPU of the fake driver (gpu.h), for tests of csrc/pipe.
 * All ranks are driven by one thread: a submission returns at once. */
#ifndef RINGCOMM_TEST_FLIGHTS_H
#define RINGCOMM_TEST_FLIGHTS_H

#include "../../csrc/pipe/pipe.h"
#include "gpu.h"
#include "world.h"

enum { FLIGHTS_COUNT = 1000 }; /* elements of most tensors */

typedef struct flights {
    world *world;
    rc_pipe *pipes[WORLD_MAX];
    cu_context context; /* of the test itself */
} flights;

static inline flights *flights_open_in(world_options options, const char *settings,
                                       const char *kernels, uint64_t arena)
{
    flights *all = calloc(1, sizeof *all);
    rc_error error;
    gpu_settings(settings);
    const char *path = gpu_path();
    CHECK_EQ(cuInit(0), CU_OK);
    CHECK_EQ(cuDevicePrimaryCtxRetain(&all->context, 0), CU_OK);
    CHECK_EQ(cuCtxSetCurrent(all->context), CU_OK);
    all->world = world_open(options);
    for (int rank = 0; rank < options.size; rank++)
        if (!CHECK_EQ(rc_pipe_create(&all->pipes[rank], all->world->comms[rank], path, 0, kernels,
                                     arena, &error),
                      RC_OK))
            CHECK_NOTE("%s\n", error.message);
    return all;
}

static inline flights *flights_open(int ranks, const char *settings, const char *kernels,
                                    uint64_t arena)
{
    return flights_open_in((world_options){.size = ranks}, settings, kernels, arena);
}

static inline void flights_close(flights *all)
{
    for (int rank = 0; rank < all->world->size; rank++)
        rc_comm_close(all->world->comms[rank], 0);
    for (int rank = 0; rank < all->world->size; rank++)
        if (all->pipes[rank] != NULL) { /* else the test has freed it */
            rc_pipe_stop(all->pipes[rank]);
            rc_pipe_free(all->pipes[rank]);
        }
    world_close(all->world);
    cuCtxSetCurrent(NULL);
    cuDevicePrimaryCtxRelease_v2(0);
    free(all);
}

static inline cu_stream flights_stream(void)
{
    cu_stream stream = NULL;
    CHECK_EQ(cuStreamCreateWithPriority(&stream, CU_NON_BLOCKING, 0), CU_OK);
    return stream;
}

/* Memory of FLIGHTS_COUNT floats, all of one value. */
static inline cu_address flights_tensor(float value)
{
    cu_address at = 0;
    float values[FLIGHTS_COUNT];
    for (int i = 0; i < FLIGHTS_COUNT; i++)
        values[i] = value;
    CHECK_EQ(cuMemAlloc_v2(&at, sizeof values), CU_OK);
    CHECK_EQ(fake_cuda_write(at, values, sizeof values), 0);
    return at;
}

/* 1 if all of it has that value, past all streams. */
static inline int flights_is(cu_address at, float value)
{
    float values[FLIGHTS_COUNT];
    if (fake_cuda_read(values, at, sizeof values) != 0)
        return 0;
    for (int i = 0; i < FLIGHTS_COUNT; i++)
        if (values[i] != value)
            return 0;
    return 1;
}

static inline rc_call flights_call(cu_address at)
{
    return (rc_call){.size = sizeof(rc_call),
                     .collective = RC_ALLREDUCE,
                     .dtype = RC_F32,
                     .count = FLIGHTS_COUNT,
                     .src = (void *)(uintptr_t)at,
                     .dst = (void *)(uintptr_t)at,
                     .timeout_ms = WORLD_LONG_MS};
}

static inline int64_t flights_handle(cu_stream stream)
{
    return (int64_t)(uintptr_t)stream;
}

static inline rc_flight *flights_submit(const flights *all, int rank, const rc_call *call,
                                        cu_stream stream)
{
    rc_flight *flight = NULL;
    rc_error error;
    if (!CHECK_EQ(rc_pipe_submit(all->pipes[rank], call, NULL, 0, flights_handle(stream), &flight,
                                 &error),
                  RC_OK))
        CHECK_NOTE("%s\n", error.message);
    return flight;
}

/* The stream goes on behind all of them, once they are over, and to its end. */
static inline void flights_follow(rc_flight *const *in_flight, int count, cu_stream stream)
{
    rc_error error;
    for (int i = 0; i < count; i++) {
        CHECK_EQ(rc_flight_wait(in_flight[i], WORLD_LONG_MS), RC_OK);
        CHECK_EQ(rc_flight_order(in_flight[i], flights_handle(stream), &error), RC_OK);
    }
    CHECK_EQ(cuStreamSynchronize(stream), CU_OK);
}

/* All end well, and are freed with their tensors. */
static inline void flights_land(rc_flight *const *in_flight, const cu_address *at, int count)
{
    for (int i = 0; i < count; i++) {
        CHECK_EQ(rc_flight_landed(in_flight[i], WORLD_LONG_MS), RC_OK);
        rc_flight_free(in_flight[i]);
        cuMemFree_v2(at[i]);
    }
}

/* A stream writes to each rank's tensor before such a call of FLIGHTS_COUNT elements, and looks at
 * it after. 1 if it has seen the sum. */
static inline int flights_follow_stream(const flights *all, rc_call call)
{
    cu_stream stream = flights_stream();
    cu_address at[WORLD_MAX];
    rc_flight *in_flight[WORLD_MAX];
    int right = 1, ranks = all->world->size;
    atomic_store(&pipe_paused, 1); /* else a landing runs what nobody has waited for */
    for (int rank = 0; rank < ranks; rank++) {
        at[rank] = flights_tensor(126.0F);
        CHECK_EQ(fake_cuda_add(stream, at[rank], 1.0F, FLIGHTS_COUNT), CU_OK);
        call.src = call.dst = (void *)(uintptr_t)at[rank];
        in_flight[rank] = flights_submit(all, rank, &call, stream);
    }
    flights_follow(in_flight, ranks, stream);
    for (int rank = 0; rank < ranks; rank++)
        right &= flights_is(at[rank], (float)ranks * 127.0F);
    atomic_store(&pipe_paused, 0);
    flights_land(in_flight, at, ranks);
    cuStreamDestroy_v2(stream);
    return right;
}

#endif
