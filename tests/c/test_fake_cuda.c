/* test_fake_cuda.c - the driver that is not one, by itself: it shows what it is there to show,
 * every time, and lets pass what is right. */
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu.h"

enum { COUNT = 1000, BYTES = COUNT * sizeof(float), PAGE = 4096 };

typedef struct stage {
    cuda_device *device;
    device_visit visit;
    cu_stream user, ours;
    cu_event event;
    cu_address at;
    float *pinned;
} stage;

static stage stage_open(const char *settings)
{
    stage s = {.device = gpu_open(gpu_driver(settings), 0)};
    rc_error error;
    error_clear(&error);
    CHECK_EQ(device_enter(s.device, &s.visit, &error), RC_OK);
    CHECK_EQ(cuStreamCreateWithPriority(&s.user, CU_NON_BLOCKING, 0), CU_OK);
    CHECK_EQ(device_stream_create(s.device, &s.ours, &error), RC_OK);
    CHECK_EQ(device_event_create(s.device, &s.event, &error), RC_OK);
    CHECK_EQ(device_alloc(s.device, &s.at, BYTES, &error), RC_OK);
    s.pinned = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK_EQ(device_pin(s.device, s.pinned, PAGE, &error), RC_OK);
    float zero[COUNT] = {0};
    fake_cuda_write(s.at, zero, sizeof zero);
    return s;
}

static void stage_close(stage *s)
{
    device_free(s->device, s->at); /* waits for all */
    device_unpin(s->device, s->pinned);
    device_event_destroy(s->device, s->event);
    device_stream_destroy(s->device, s->ours);
    device_stream_destroy(s->device, s->user);
    device_leave(s->device, &s->visit);
    gpu_close(s->device);
    munmap(s->pinned, PAGE);
}

/* Ends a test that has done what must not be done. */
static void stage_drop(stage *s, const char *text)
{
    const char *misuse = fake_cuda_misuse();
    if (!CHECK(misuse != NULL && strstr(misuse, text) != NULL))
        CHECK_NOTE("%s\n", misuse != NULL ? misuse : "nothing");
    fake_cuda_reset();
    device_close(s->device); /* of what was forgotten */
    fake_cuda_reset();
    munmap(s->pinned, PAGE);
}

static float first_of(const stage *s)
{
    float value = -1;
    CHECK_EQ(fake_cuda_read(&value, s->at, sizeof value), 0);
    return value;
}

static void unpinned_memory_is_copied_at_once(void)
{
    stage s = stage_open("");
    float host[COUNT] = {5};
    CHECK_EQ(cuMemcpyHtoDAsync_v2(s.at, host, BYTES, s.ours), CU_OK);
    host[0] = 9;
    CHECK_EQ(fake_cuda_pending(), 1);
    CHECK_EQ(cuMemcpyDtoHAsync_v2(host, s.at, BYTES, s.ours), CU_OK);
    CHECK(host[0] == 5);
    stage_close(&s);
}

static void an_event_that_is_asked_about_comes(void)
{
    stage s = stage_open("");
    CHECK_EQ(cuEventQuery(s.event), CU_OK); /* not recorded */
    CHECK_EQ(fake_cuda_add(s.user, s.at, 3, COUNT), CU_OK);
    CHECK_EQ(cuEventRecord(s.event, s.user), CU_OK);
    CHECK_EQ(fake_cuda_add(s.user, s.at, 4, COUNT), CU_OK);
    CHECK_EQ(cuEventQuery(s.event), CU_NOT_READY);
    while (cuEventQuery(s.event) == CU_NOT_READY)
        usleep(100);
    CHECK(first_of(&s) == 3); /* and nothing that is not needed for it */
    CHECK_EQ(fake_cuda_pending(), 1);
    CHECK_EQ(cuEventSynchronize(s.event), CU_OK);
    stage_close(&s);
}

typedef struct call {
    int runs;
    cu_result from_within;
} call;

static void note_call(void *data)
{
    call *c = data;
    c->from_within = cuEventCreate(NULL, 0);
    __atomic_fetch_add(&c->runs, 1, __ATOMIC_RELEASE);
}

static void a_host_function_is_called_by_itself(void)
{
    stage s = stage_open("");
    call c = {0};
    CHECK_EQ(fake_cuda_add(s.user, s.at, 3, COUNT), CU_OK);
    CHECK_EQ(cuLaunchHostFunc(s.user, note_call, &c), CU_OK);
    while (__atomic_load_n(&c.runs, __ATOMIC_ACQUIRE) == 0)
        usleep(100);
    CHECK(first_of(&s) == 3);
    CHECK_EQ(c.from_within, 800);
    stage_drop(&s, "host function");
}

static void early_shows_what_comes_after_the_copy(void)
{
    stage s = stage_open("FAKE_CUDA_ORDER=early");
    s.pinned[0] = 5;
    CHECK_EQ(cuMemcpyHtoDAsync_v2(s.at, s.pinned, BYTES, s.ours), CU_OK);
    s.pinned[0] = 9; /* too late */
    CHECK_EQ(fake_cuda_pending(), 0);
    CHECK(first_of(&s) == 5);
    stage_close(&s);
}

static void the_default_stream_waits_and_is_waited_for(void)
{
    stage s = stage_open("");
    cu_stream blocking;
    CHECK_EQ(cuStreamCreateWithPriority(&blocking, 0, 0), CU_OK);
    CHECK_EQ(fake_cuda_add(blocking, s.at, 1, COUNT), CU_OK);
    CHECK_EQ(fake_cuda_add(s.ours, s.at, 10, COUNT), CU_OK);
    CHECK_EQ(fake_cuda_add(NULL, s.at, 2, COUNT), CU_OK);
    CHECK_EQ(cuStreamSynchronize(CU_LEGACY_STREAM), CU_OK);
    CHECK(first_of(&s) == 3); /* ours is not blocking */
    CHECK_EQ(fake_cuda_add(CU_LEGACY_STREAM, s.at, 4, COUNT), CU_OK);
    CHECK_EQ(fake_cuda_add(CU_THREAD_STREAM, s.at, 5, COUNT), CU_OK);
    CHECK_EQ(cuStreamSynchronize(CU_THREAD_STREAM), CU_OK);
    CHECK(first_of(&s) == 12);
    CHECK_EQ(cuStreamDestroy_v2(blocking), CU_OK);
    stage_close(&s);
}

static void kernels_run_in_their_turn_with_arguments_of_their_launch(void)
{
    stage s = stage_open("");
    rc_error error;
    error_clear(&error);
    uint64_t count = COUNT;
    float factor = 3;
    void *scale[] = {&s.at, &s.at, &factor, &count};
    CHECK_EQ(fake_cuda_add(s.ours, s.at, 7, COUNT), CU_OK);
    CHECK_EQ(device_launch(s.device, GPU_SCALE, 1, 32, s.ours, scale, &error), RC_OK);
    factor = 0;
    count = 1;
    CHECK(first_of(&s) == 0);
    CHECK_EQ(cuStreamSynchronize(s.ours), CU_OK);
    float all[COUNT];
    CHECK_EQ(fake_cuda_read(all, s.at, sizeof all), 0);
    CHECK(all[0] == 21 && all[COUNT - 1] == 21);
    stage_close(&s);
}

static void a_write_past_the_end_shows(void)
{
    stage s = stage_open("");
    rc_error error;
    error_clear(&error);
    cu_address to = s.at + sizeof(float);
    uint64_t count = COUNT;
    float factor = 1;
    void *scale[] = {&to, &s.at, &factor, &count};
    CHECK_EQ(device_launch(s.device, GPU_SCALE, 1, 32, s.ours, scale, &error), RC_OK);
    device_free(s.device, s.at);
    stage_drop(&s, "past the end");
}

static void a_kernel_on_freed_memory_breaks_the_context(void)
{
    stage s = stage_open("");
    rc_error error;
    error_clear(&error);
    uint64_t count = 1;
    float factor = 7;
    cu_address gone;
    void *scale[] = {&s.at, &gone, &factor, &count};
    CHECK_EQ(cuMemAlloc_v2(&gone, 64), CU_OK);
    CHECK_EQ(cuMemFree_v2(gone), CU_OK);
    CHECK_EQ(device_launch(s.device, GPU_SCALE, 1, 32, s.ours, scale, &error), RC_OK);
    CHECK_EQ(cuStreamSynchronize(s.ours), CU_ILLEGAL_ADDRESS);
    CHECK_EQ(cuMemAlloc_v2(&gone, 64), CU_ILLEGAL_ADDRESS);
    stage_close(&s); /* gives everything back all the same */
}

static void what_cuda_leaves_undefined_is_told(void)
{
    stage s = stage_open("");
    CHECK_EQ(cuMemcpyHtoDAsync_v2(s.at, s.pinned, BYTES, s.ours), CU_OK);
    CHECK_EQ(cuMemHostUnregister(s.pinned), CU_OK);
    stage_drop(&s, "while a copy uses the memory");
    s = stage_open("");
    CHECK_EQ(cuEventDestroy_v2(s.event), CU_OK);
    CHECK_EQ(cuEventRecord(s.event, s.ours), CU_INVALID_HANDLE);
    stage_drop(&s, "which does not exist");
    s = stage_open("");
    CHECK_EQ(cuMemFree_v2(s.at + 8), CU_INVALID_VALUE);
    stage_drop(&s, "which is no allocation");
    s = stage_open("");
    CHECK_EQ(cuDevicePrimaryCtxRelease_v2(0), CU_OK);
    CHECK_EQ(cuDevicePrimaryCtxRelease_v2(0), CU_INVALID_CONTEXT);
    stage_drop(&s, "without a retain");
}

static void leaks_are_counted_by_kind(void)
{
    static const char *const kinds[] = {"contexts", "streams", "events",
                                        "modules",  "memory",  "pinned"};
    static const int counts[] = {1, 2, 1, 1, 1, 1};
    stage s = stage_open("");
    for (int i = 0; i < 6; i++)
        CHECK_EQ(fake_cuda_leaks(kinds[i]), counts[i]);
    CHECK_EQ(fake_cuda_leaks(NULL), 7);
    stage_close(&s);
}

static int dies(void (*act)(cu_address at), cu_address at)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        (void)!freopen("/dev/null", "w", stderr); /* a sanitizer's report */
        act(at);
        _exit(0);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return status != 0;
}

static void read_there(cu_address at)
{
    (void)*(volatile char *)(uintptr_t)at;
}

static void write_there(cu_address at)
{
    *(volatile char *)(uintptr_t)at = 1;
}

static void the_host_cannot_touch_device_memory(void)
{
    stage s = stage_open("");
    CHECK(dies(read_there, s.at));
    CHECK(dies(write_there, s.at));
    CHECK(!dies(write_there, (cu_address)(uintptr_t)s.pinned));
    stage_close(&s);
}

static void fresh_and_freed_memory_is_nan(void)
{
    stage s = stage_open("");
    cu_address at, again;
    float value = 0;
    CHECK_EQ(cuMemAlloc_v2(&at, 64), CU_OK);
    CHECK_EQ(fake_cuda_read(&value, at, sizeof value), 0);
    CHECK(value != value);
    value = 3;
    CHECK_EQ(fake_cuda_write(at, &value, sizeof value), 0);
    CHECK_EQ(cuMemFree_v2(at), CU_OK);
    CHECK_EQ(fake_cuda_read(&value, at, sizeof value), 1);
    CHECK_EQ(cuMemAlloc_v2(&again, 64), CU_OK);
    CHECK_EQ(fake_cuda_read(&value, again, sizeof value), 0);
    CHECK(value != value);
    CHECK_EQ(cuMemAlloc_v2(&at, (size_t)65 << 20), CU_OUT_OF_MEMORY);
    CHECK_EQ(cuMemFree_v2(again), CU_OK);
    stage_close(&s);
}

int main(void)
{
    static const check_test tests[] = {
        {"unpinned_memory_is_copied_at_once", unpinned_memory_is_copied_at_once},
        {"an_event_that_is_asked_about_comes", an_event_that_is_asked_about_comes},
        {"a_host_function_is_called_by_itself", a_host_function_is_called_by_itself},
        {"early_shows_what_comes_after_the_copy", early_shows_what_comes_after_the_copy},
        {"the_default_stream_waits_and_is_waited_for", the_default_stream_waits_and_is_waited_for},
        {"kernels_run_in_their_turn_with_arguments_of_their_launch",
         kernels_run_in_their_turn_with_arguments_of_their_launch},
        {"a_write_past_the_end_shows", a_write_past_the_end_shows},
        {"a_kernel_on_freed_memory_breaks_the_context",
         a_kernel_on_freed_memory_breaks_the_context},
        {"what_cuda_leaves_undefined_is_told", what_cuda_leaves_undefined_is_told},
        {"leaks_are_counted_by_kind", leaks_are_counted_by_kind},
        {"the_host_cannot_touch_device_memory", the_host_cannot_touch_device_memory},
        {"fresh_and_freed_memory_is_nan", fresh_and_freed_memory_is_nan},
    };
    int failed = check_run(tests, CHECK_COUNT(tests));
    fake_cuda_reset();
    return failed;
}
