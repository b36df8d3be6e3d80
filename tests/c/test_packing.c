/* Which flights the GPU packs, its room for them, and what the CPU does without. (The kernels
 * themselves are tested in Python, where they are emulated.) */
#include "flights.h"

static rc_flight suited(rc_pipe *pipe, cu_address at, rc_codec codec)
{
    rc_flight flight = {.pipe = pipe, .call = flights_call(at)};
    flight.call.codec = codec;
    return flight;
}

static void test_which_flights_the_gpu_packs(void)
{
    flights *all = flights_open(2, "", NULL, 1 << 20);
    rc_pipe *pipe = all->pipes[0];
    cu_function functions[PACKING_KERNELS] = {0};
    rc_flight flight = suited(pipe, 4096, RC_CODEC_BF16);
    CHECK(!packing_suits(&flight)); /* it has no kernels */
    pipe->device->kernels = functions;
    CHECK(packing_suits(&flight));
    flight = suited(pipe, 4096, RC_CODEC_FP16);
    CHECK(packing_suits(&flight));
    flight = suited(pipe, 4098, RC_CODEC_BF16);
    CHECK(!packing_suits(&flight));
    flight = suited(pipe, 4096, RC_CODEC_NONE);
    CHECK(!packing_suits(&flight));
    flight = suited(pipe, 4096, RC_CODEC_INT8);
    CHECK(!packing_suits(&flight));
    flight = suited(pipe, 4096, RC_CODEC_BF16);
    flight.call.dtype = RC_F64;
    CHECK(!packing_suits(&flight));
    flight = suited(pipe, 4096, RC_CODEC_BF16);
    flight.call.collective = RC_REDUCE_SCATTER;
    CHECK(!packing_suits(&flight));
    pipe->device->kernels = NULL;
    flights_close(all);
    gpu_expect_clean();
}

static void test_room_grows_and_may_be_lacking(void)
{
    rc_error error;
    error_clear(&error);
    flights *all = flights_open(1, "", NULL, 1 << 20);
    rc_pipe *pipe = all->pipes[0];
    CHECK_EQ(packing_room(pipe, &pipe->packed, 100, &error), RC_OK);
    cu_address first = pipe->packed.at;
    CHECK_EQ(packing_room(pipe, &pipe->packed, 1 << 20, &error), RC_OK);
    CHECK(pipe->packed.at == first);
    CHECK_EQ(packing_room(pipe, &pipe->packed, (1 << 20) + 1, &error), RC_OK);
    CHECK_EQ(pipe->packed.bytes, 2 << 20);
    CHECK_EQ(fake_cuda_calls("cuMemFree_v2"), 0); /* it would wait for whatever the GPU does */
    fake_cuda_fail("cuMemAlloc_v2", 1, CU_OUT_OF_MEMORY);
    CHECK_EQ(packing_room(pipe, &pipe->packed, 3 << 20, &error), RC_OK);
    CHECK_EQ(fake_cuda_calls("cuMemFree_v2"), 2);
    CHECK_EQ(fake_cuda_leaks("memory"), 1);
    for (int k = 1; k <= 2; k++)
        fake_cuda_fail("cuMemAlloc_v2", k, CU_OUT_OF_MEMORY);
    CHECK_EQ(packing_room(pipe, &pipe->packed, 5 << 20, &error), RC_NO_MEMORY);
    CHECK_EQ(pipe->packed.bytes, 0);
    flights_close(all);
    gpu_expect_clean();
}

static void test_the_cpu_unpacks_without_room(void)
{
    rc_error error;
    error_clear(&error);
    flights *all = flights_open(1, "", NULL, 1 << 20);
    rc_pipe *pipe = all->pipes[0];
    rc_flight flight = suited(pipe, 4096, RC_CODEC_BF16);
    CHECK_EQ(pinned_take(&pipe->arena, FLIGHTS_COUNT * 2, 0, &flight.staging, &error), RC_OK);
    flight.dst = flight.src = flight.staging->data;
    flight.is_packed = 1;
    uint16_t *packed = (uint16_t *)(void *)flight.dst;
    for (int i = 0; i < FLIGHTS_COUNT; i++)
        packed[i] = i % 2 ? 0x3fc0 : 0xc000;
    CHECK_EQ(packing_unpack_here(&flight, &error), RC_OK);
    CHECK_EQ(flight.is_packed, 0);
    const float *unpacked = (const float *)(const void *)flight.dst;
    for (int i = 0; i < FLIGHTS_COUNT; i++)
        CHECK(unpacked[i] == (i % 2 ? 1.5F : -2.0F));
    pinned_give(&pipe->arena, flight.staging);
    flights_close(all);
    gpu_expect_clean();
}

int main(void)
{
    const check_test tests[] = {
        {"which flights the GPU packs", test_which_flights_the_gpu_packs},
        {"room grows, and may be lacking", test_room_grows_and_may_be_lacking},
        {"the CPU unpacks without room", test_the_cpu_unpacks_without_room},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
