/* Pinned memory: slabs that stay, blocks that come back, and memory for what fits in none. */
#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../csrc/base/clock.h"
#include "../../csrc/cuda/device.h"
#include "gpu.h"

enum { MIB = 1 << 20 };

typedef struct bench {
    pinned_block *lent;
    cuda_device *device;
    device_visit visit;
    pinned_arena arena;
    rc_error error;
} bench;

static void setup(bench *b, size_t cap)
{
    error_clear(&b->error);
    b->device = gpu_open(gpu_driver(""), 0);
    CHECK_EQ(device_enter(b->device, &b->visit, &b->error), RC_OK);
    pinned_init(&b->arena, b->device, cap);
}

static void teardown(bench *b)
{
    pinned_destroy(&b->arena);
    device_leave(b->device, &b->visit);
    gpu_close(b->device);
}

static pinned_block *take(bench *b, size_t bytes)
{
    pinned_block *block = NULL;
    if (!CHECK_EQ(pinned_take(&b->arena, bytes, 0, &block, &b->error), RC_OK))
        CHECK_NOTE("%s\n", b->error.message);
    return block;
}

static int pinned_so_often(void)
{
    return fake_cuda_calls("cuMemHostRegister_v2");
}

static void test_blocks_are_used_again(void)
{
    bench b;
    setup(&b, 64 * MIB);
    uint8_t *first = NULL;
    for (int i = 0; i < 100; i++) {
        pinned_block *block = take(&b, 3 * MIB + 1), *other = take(&b, 5);
        first = first != NULL ? first : block->data;
        CHECK(block->data == first && block->bytes >= 3 * MIB + 1);
        CHECK(other->data >= block->data + 3 * MIB + 1);
        CHECK_EQ((uintptr_t)other->data % PINNED_ALIGN, 0);
        memset(block->data, 1, block->bytes);
        memset(other->data, 2, 5);
        pinned_give(&b.arena, i % 2 ? block : other);
        pinned_give(&b.arena, i % 2 ? other : block);
    }
    pinned_give(&b.arena, NULL);
    CHECK_EQ(pinned_so_often(), 1);
    teardown(&b);
}

static void test_slabs_grow_to_the_cap(void)
{
    bench b;
    pinned_block *blocks[16];
    setup(&b, 16 * MIB);
    for (int i = 0; i < 16; i++)
        blocks[i] = take(&b, MIB);
    CHECK_EQ(b.arena.pinned, 16 * MIB);
    CHECK_EQ(pinned_so_often(), 3); /* 4, 4, 8 */
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < i; j++)
            CHECK(blocks[i]->data >= blocks[j]->data + MIB ||
                  blocks[j]->data >= blocks[i]->data + MIB);
    for (int i = 0; i < 16; i++)
        pinned_give(&b.arena, blocks[i * 7 % 16]);
    pinned_block *large = take(&b, 8 * MIB); /* neighbours have become one again */
    CHECK_EQ(pinned_so_often(), 3);
    pinned_give(&b.arena, large);
    large = take(&b, 16 * MIB); /* and slabs that nobody uses make room */
    CHECK_EQ(b.arena.pinned, 16 * MIB);
    CHECK_EQ(fake_cuda_leaks("pinned"), 1);
    pinned_give(&b.arena, large);
    teardown(&b);
}

static void test_what_fits_nowhere_has_memory_of_its_own(void)
{
    bench b;
    setup(&b, 4 * MIB);
    pinned_block *full = take(&b, 4 * MIB), *alone = take(&b, MIB), *large = take(&b, 9 * MIB);
    CHECK_EQ(fake_cuda_leaks("pinned"), 3);
    CHECK_EQ(b.arena.pinned, 4 * MIB);
    pinned_give(&b.arena, large);
    pinned_give(&b.arena, alone);
    CHECK_EQ(fake_cuda_leaks("pinned"), 1);
    pinned_give(&b.arena, full);
    teardown(&b);
}

static void *give_soon(void *arg)
{
    bench *b = arg;
    usleep(20000);
    pinned_give(&b->arena, b->lent);
    return NULL;
}

static void test_room_is_waited_for(void)
{
    bench b;
    pthread_t thread;
    pinned_block *block = NULL;
    setup(&b, 4 * MIB);
    pinned_block *full = b.lent = take(&b, 4 * MIB);
    CHECK_EQ(pthread_create(&thread, NULL, give_soon, &b), 0);
    CHECK_EQ(pinned_take(&b.arena, MIB, 10000, &block, &b.error), RC_OK);
    pthread_join(thread, NULL);
    CHECK(block == full);
    uint64_t start = clock_ns();
    pinned_block *alone = NULL;
    CHECK_EQ(pinned_take(&b.arena, 4 * MIB, 30, &alone, &b.error), RC_OK);
    CHECK(clock_ns() - start >= 30 * CLOCK_MS);
    pinned_give(&b.arena, alone);
    pinned_give(&b.arena, block);
    teardown(&b);
}

static void test_a_failure_to_pin_leaves_nothing(void)
{
    bench b;
    pinned_block *block = NULL;
    setup(&b, 64 * MIB);
    for (int code = 1; code < 3; code++) {
        fake_cuda_fail("cuMemHostRegister_v2", 1, code);
        CHECK_EQ(pinned_take(&b.arena, MIB, 0, &block, &b.error),
                 code == CU_OUT_OF_MEMORY ? RC_NO_MEMORY : RC_DEVICE);
        CHECK(strstr(b.error.message, "cuMemHostRegister") != NULL);
        error_clear(&b.error);
        CHECK_EQ(fake_cuda_leaks("pinned"), 0);
    }
    pinned_give(&b.arena, take(&b, MIB));
    teardown(&b);
}

/* Confidential computing, and some virtual machines. */
static void test_where_cuda_pins_only_its_own_memory(void)
{
    bench b;
    pinned_block *block = NULL;
    setup(&b, 4 * MIB);
    for (int code = CU_NOT_PERMITTED; code <= CU_NOT_SUPPORTED; code++) {
        fake_cuda_fail("cuMemHostRegister_v2", 1, code);
        block = take(&b, 9 * MIB);
        memset(block->data, 1, block->bytes);
        CHECK_EQ(fake_cuda_calls("cuMemHostAlloc"), code - CU_NOT_PERMITTED + 1);
        pinned_give(&b.arena, block);
        CHECK_EQ(fake_cuda_leaks("pinned"), 0);
    }
    fake_cuda_fail("cuMemHostRegister_v2", 1, CU_NOT_SUPPORTED);
    fake_cuda_fail("cuMemHostAlloc", 1, CU_OUT_OF_MEMORY);
    CHECK_EQ(pinned_take(&b.arena, MIB, 0, &block, &b.error), RC_NO_MEMORY);
    gpu_expect(&b.error, RC_NO_MEMORY, "cuMemHostAlloc failed on GPU 0");
    teardown(&b);
}

/* Else, on kernels before 5.9, what this process writes after a fork the GPU would not read. */
static void test_a_forked_child_has_no_pinned_memory(void)
{
    bench b;
    setup(&b, 4 * MIB);
    pinned_block *block = take(&b, MIB);
    memset(block->data, 1, block->bytes);
    pid_t child = fork();
    if (child == 0)
        _exit(msync(block->data, PINNED_ALIGN, MS_ASYNC) != 0 && errno == ENOMEM ? 0 : 1);
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(msync(block->data, PINNED_ALIGN, MS_ASYNC), 0);
    pinned_give(&b.arena, block);
    teardown(&b);
}

int main(void)
{
    const check_test tests[] = {
        {"blocks are used again", test_blocks_are_used_again},
        {"slabs grow to the cap", test_slabs_grow_to_the_cap},
        {"what fits nowhere has memory of its own", test_what_fits_nowhere_has_memory_of_its_own},
        {"room is waited for", test_room_is_waited_for},
        {"a failure to pin leaves nothing", test_a_failure_to_pin_leaves_nothing},
        {"where CUDA pins only its own memory", test_where_cuda_pins_only_its_own_memory},
        {"a forked child has no pinned memory", test_a_forked_child_has_no_pinned_memory},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
