/* test_device.c - a GPU opened, used, refused and failing, over the fake driver. */
#include <stdint.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu.h"

enum { PAGE = 4096, BYTES = 256 };

static void an_open_device_knows_itself(void)
{
    const cuda_driver *driver = gpu_driver("FAKE_CUDA_DEVICES=2 FAKE_CUDA_CAPABILITY=90");
    cuda_device *device = gpu_open(driver, 1);
    CHECK_EQ(device->ordinal, 1);
    CHECK(strcmp(device->name, "Fake GPU 1") == 0);
    CHECK_EQ(device->capability, 90);
    CHECK_EQ(device->copy_engines, 2);
    CHECK_EQ(device->priority, -5);
    CHECK_EQ(device->kernel_count, GPU_KERNELS);
    CHECK_EQ(fake_cuda_calls("cuLaunchKernel"), GPU_KERNELS);
    CHECK_EQ(fake_cuda_pending(), 0);
    CHECK(device->without_kernels[0] == '\0');
    CHECK_EQ(device->broken, CU_OK);
    CHECK_EQ(fake_cuda_leaks(NULL), 2); /* the context and the module */
    gpu_close(device);
}

static void no_image_no_kernels(void)
{
    cuda_device *device = NULL;
    rc_error error;
    error_clear(&error);
    CHECK_EQ(device_open(&device, gpu_driver(""), 0, NULL, NULL, 0, &error), RC_OK);
    CHECK(device->kernels == NULL && device->module == NULL);
    CHECK(device->without_kernels[0] == '\0');
    gpu_close(device);
}

static void opening_twice_shares_the_context(void)
{
    const cuda_driver *driver = gpu_driver("");
    cuda_device *one = gpu_open(driver, 0), *other = gpu_open(driver, 0);
    CHECK(one->context == other->context);
    CHECK_EQ(fake_cuda_leaks("contexts"), 2);
    device_close(one);
    gpu_close(other);
}

static void a_gpu_that_is_not_there_is_refused(void)
{
    static const int ordinals[] = {-1, 2, 1000};
    const cuda_driver *driver = gpu_driver("FAKE_CUDA_DEVICES=2");
    for (int i = 0; i < 3; i++) {
        cuda_device *device = NULL;
        rc_error error;
        error_clear(&error);
        CHECK_EQ(device_open(&device, driver, ordinals[i], NULL, NULL, 0, &error),
                 RC_INVALID_ARGUMENT);
        gpu_expect(&error, RC_INVALID_ARGUMENT, "driver sees 2");
        CHECK(device == NULL);
    }
}

/* Without kernels, but copies work. */
static void opens_without_kernels(const char *settings, const char *ptx, const char *reason)
{
    cuda_device *device = NULL;
    rc_error error;
    error_clear(&error);
    const cuda_driver *driver = gpu_driver(settings);
    if (!CHECK_EQ(device_open(&device, driver, 0, ptx, gpu_kernels, GPU_KERNELS, &error), RC_OK))
        return;
    CHECK(device->kernels == NULL && device->kernel_count == 0);
    if (!CHECK(strstr(device->without_kernels, reason) != NULL))
        CHECK_NOTE("%s\n", device->without_kernels);
    device_visit visit;
    cu_address at;
    int host = 5, back = 0;
    CHECK_EQ(device_enter(device, &visit, &error), RC_OK);
    CHECK_EQ(device_alloc(device, &at, sizeof host, &error), RC_OK);
    CHECK_EQ(DEVICE_CALL(device, &error, cuMemcpyHtoDAsync, at, &host, sizeof host, NULL), RC_OK);
    CHECK_EQ(DEVICE_CALL(device, &error, cuMemcpyDtoHAsync, &back, at, sizeof back, NULL), RC_OK);
    CHECK_EQ(back, 5);
    device_free(device, at);
    device_leave(device, &visit);
    gpu_close(device);
}

static void what_is_too_old_does_without_kernels(void)
{
    opens_without_kernels("FAKE_CUDA_VERSION=11080", GPU_PTX, "the driver is for CUDA 11.8");
    opens_without_kernels("FAKE_CUDA_CAPABILITY=52", GPU_PTX, "compute capability 5.2");
    opens_without_kernels("", ".version 9.0\n.target sm_60\n.entry", "UNSUPPORTED_PTX_VERSION");
    opens_without_kernels("", ".version 8.0\n.target sm_90\n.entry", "NO_BINARY_FOR_GPU");
    opens_without_kernels("", "no PTX", "ptxas fatal   : it was refused");
    opens_without_kernels("FAKE_CUDA_FAIL=cuModuleLoadDataEx:1:221", GPU_PTX, "221");
    opens_without_kernels("FAKE_CUDA_FAIL=cuModuleGetFunction:2:222", GPU_PTX, "222");
}

static void a_kernel_that_is_missing_is_a_failure(void)
{
    static const char *const names[] = {"ringcomm_scale", "ringcomm_pack"};
    cuda_device *device = NULL;
    rc_error error;
    error_clear(&error);
    CHECK_EQ(device_open(&device, gpu_driver(""), 0, GPU_PTX, names, 2, &error), RC_DEVICE);
    gpu_expect(&error, RC_DEVICE, "lack ringcomm_pack");
    CHECK(device == NULL);
    gpu_close(NULL);
}

/* ---- threads ---- */

static void entering_leaves_the_thread_as_it_was(void)
{
    const cuda_driver *driver = gpu_driver("FAKE_CUDA_DEVICES=2");
    cuda_device *one = gpu_open(driver, 0), *other = gpu_open(driver, 1);
    device_visit first, second;
    rc_error error;
    error_clear(&error);
    cu_stream stream;
    cu_context context = NULL;
    CHECK_EQ(device_enter(one, &first, &error), RC_OK);
    CHECK_EQ(device_enter(other, &second, &error), RC_OK);
    CHECK_EQ(fake_cuda_depth(), 2);
    CHECK_EQ(fake_cuda_capture_mode(), CU_CAPTURE_RELAXED);
    CHECK_EQ(device_stream_create(other, &stream, &error), RC_OK);
    device_leave(other, &second);
    device_leave(other, &second); /* once is enough */
    CHECK_EQ(fake_cuda_depth(), 1);
    CHECK_EQ(cuStreamGetCtx(stream, &context), CU_OK);
    CHECK(context == other->context);
    device_leave(one, &first);
    device_stream_destroy(other, stream);
    device_close(other);
    gpu_close(one);
}

/* Allocates on a thread of its own, which the device is bound to. */
static void *allocate_bound(void *of)
{
    cuda_device *device = of;
    rc_error error;
    cu_address at;
    error_clear(&error);
    CHECK_EQ(device_bind_thread(device, &error), RC_OK);
    CHECK_EQ(device_alloc(device, &at, BYTES, &error), RC_OK);
    device_free(device, at);
    return NULL;
}

static void our_calls_leave_a_capture_alone(void)
{
    cuda_device *device = gpu_open(gpu_driver(""), 0);
    device_visit visit;
    rc_error error;
    cu_stream stream;
    cu_address at;
    pthread_t thread;
    error_clear(&error);
    CHECK_EQ(cuCtxPushCurrent_v2(device->context), CU_OK);
    CHECK_EQ(cuStreamCreateWithPriority(&stream, 0, 0), CU_OK);
    fake_cuda_capture(stream, 1);
    CHECK_EQ(device_enter(device, &visit, &error), RC_OK);
    CHECK_EQ(device_alloc(device, &at, BYTES, &error), RC_OK);
    device_free(device, at);
    device_leave(device, &visit);
    pthread_create(&thread, NULL, allocate_bound, device);
    pthread_join(thread, NULL);
    CHECK_EQ(fake_cuda_capture(stream, 1), 1);
    CHECK_EQ(cuMemAlloc_v2(&at, BYTES), CU_STREAM_CAPTURE_UNSUPPORTED); /* what it would be */
    CHECK_EQ(fake_cuda_capture(stream, 0), 0);
    CHECK_EQ(cuStreamDestroy_v2(stream), CU_OK);
    CHECK_EQ(cuCtxPopCurrent_v2(NULL), CU_OK);
    gpu_close(device);
}

/* What it sends to the GPU comes back scaled, on a stream of its own. */
static void *send_around(void *of)
{
    enum { ROUNDS = 50, COUNT = PAGE / sizeof(float) };
    cuda_device *device = of;
    device_visit visit;
    rc_error error;
    cu_stream stream = NULL;
    cu_event event = NULL;
    cu_address at = 0;
    uint64_t count = COUNT;
    float factor = 2,
          *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *arguments[] = {&at, &at, &factor, &count};
    error_clear(&error);
    CHECK_EQ(device_enter(device, &visit, &error), RC_OK);
    CHECK_EQ(device_stream_create(device, &stream, &error), RC_OK);
    CHECK_EQ(device_event_create(device, &event, &error), RC_OK);
    CHECK_EQ(device_alloc(device, &at, PAGE, &error), RC_OK);
    CHECK_EQ(device_pin(device, page, PAGE, &error), RC_OK);
    for (int round = 1; round <= ROUNDS; round++) {
        page[0] = page[COUNT - 1] = (float)round;
        DEVICE_CALL(device, &error, cuMemcpyHtoDAsync, at, page, PAGE, stream);
        device_launch(device, GPU_SCALE, 1, 32, stream, arguments, &error);
        DEVICE_CALL(device, &error, cuMemcpyDtoHAsync, page, at, PAGE, stream);
        DEVICE_CALL(device, &error, cuEventRecord, event, stream);
        while (device_event_query(device, event, &error) == RC_AGAIN)
            DEVICE_CALL(device, &error, cuEventSynchronize, event);
        CHECK(page[0] == 2 * (float)round && page[COUNT - 1] == 2 * (float)round);
    }
    CHECK_EQ(error.code, RC_OK);
    device_free(device, at);
    device_unpin(device, page);
    device_event_destroy(device, event);
    device_stream_destroy(device, stream);
    device_leave(device, &visit);
    munmap(page, PAGE);
    return NULL;
}

static void threads_use_a_device_together(void)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    cuda_device *device = gpu_open(gpu_driver(""), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, send_around, device);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    gpu_close(device);
}

/* ---- failures ---- */

/* Everything that a device is used for, once. */
static rc_result use(cuda_device *device, void *page, rc_error *error)
{
    cu_stream stream = NULL;
    cu_event event = NULL;
    cu_address at = 0;
    uint64_t count = 4;
    float factor = 2;
    void *arguments[] = {&at, &at, &factor, &count}, *pinned = NULL;
    rc_result result = device_stream_create(device, &stream, error);
    if (result == RC_OK)
        result = device_event_create(device, &event, error);
    if (result == RC_OK)
        result = device_alloc(device, &at, BYTES, error);
    if (result == RC_OK && (result = device_pin(device, page, PAGE, error)) == RC_OK)
        pinned = page;
    if (result == RC_OK)
        result = device_check_stream(device, stream, error);
    if (result == RC_OK)
        result = device_check_pointer(device, at, BYTES, error);
    if (result == RC_OK)
        result = DEVICE_CALL(device, error, cuMemcpyHtoDAsync, at, page, BYTES, stream);
    if (result == RC_OK)
        result = device_launch(device, GPU_SCALE, 1, 32, stream, arguments, error);
    if (result == RC_OK)
        result = DEVICE_CALL(device, error, cuMemcpyDtoHAsync, page, at, BYTES, stream);
    if (result == RC_OK)
        result = DEVICE_CALL(device, error, cuEventRecord, event, stream);
    while (result == RC_OK && (result = device_event_query(device, event, error)) == RC_AGAIN)
        result = DEVICE_CALL(device, error, cuEventSynchronize, event);
    if (result != RC_OK && stream != NULL)
        device->driver->cuStreamSynchronize(stream); /* nothing may use the page any more */
    device_free(device, at);
    device_unpin(device, pinned);
    device_event_destroy(device, event);
    device_stream_destroy(device, stream);
    return result;
}

static rc_result open_and_use(const cuda_driver *driver, void *page, rc_error *error)
{
    cuda_device *device;
    device_visit visit;
    RC_TRY(device_open(&device, driver, 0, GPU_PTX, gpu_kernels, GPU_KERNELS, error));
    rc_result result = device_enter(device, &visit, error);
    if (result == RC_OK)
        result = use(device, page, error);
    device_leave(device, &visit);
    device_close(device);
    return result;
}

static void *new_page(void)
{
    return mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* Each call fails once, in its turn: what was made is given back, and the error says what failed.
 * Where a result is not looked at, since something is given back, all goes on. */
static void fails_cleanly_with(int code)
{
    float *page = new_page();
    int failures = 0, reached = 1;
    for (int k = 1; reached && check_failures == 0; k++) {
        const cuda_driver *driver = gpu_driver("");
        rc_error error;
        error_clear(&error);
        fake_cuda_fail("*", k, code);
        page[3] = 1;
        if (open_and_use(driver, page, &error) != RC_OK) {
            failures++;
            CHECK(strstr(error.message, "failed on GPU 0") != NULL);
            CHECK_EQ(error.code, code == CU_OUT_OF_MEMORY ? RC_NO_MEMORY : RC_DEVICE);
        } else {
            CHECK(page[3] == 2);
        }
        gpu_expect_clean();
        if (check_failures > 0)
            CHECK_NOTE("call %d fails: %s\n", k, error.message);
        reached = fake_cuda_faults() == 0;
    }
    CHECK(failures > 20);
    munmap(page, PAGE);
}

static void any_call_may_fail(void)
{
    fails_cleanly_with(CU_OUT_OF_MEMORY);
    fails_cleanly_with(CU_UNKNOWN);
    fails_cleanly_with(CU_LAUNCH_FAILED);
}

static void an_error_for_good_is_remembered(void)
{
    const cuda_driver *driver = gpu_driver("");
    cuda_device *device = gpu_open(driver, 0);
    device_visit visit;
    rc_error error;
    cu_address at;
    error_clear(&error);
    CHECK_EQ(device_enter(device, &visit, &error), RC_OK);
    fake_cuda_fail("cuMemAlloc_v2", 1, CU_OUT_OF_MEMORY);
    CHECK_EQ(device_alloc(device, &at, BYTES, &error), RC_NO_MEMORY);
    gpu_expect(&error, RC_NO_MEMORY, "cuMemAlloc failed on GPU 0: out of memory");
    CHECK_EQ(device->broken, CU_OK);
    error_clear(&error);
    fake_cuda_fail("cuMemAlloc_v2", 1, CU_ILLEGAL_ADDRESS);
    CHECK_EQ(device_alloc(device, &at, BYTES, &error), RC_DEVICE);
    gpu_expect(&error, RC_DEVICE, "restart it");
    CHECK_EQ(device->broken, CU_ILLEGAL_ADDRESS);
    error_clear(&error);
    CHECK_EQ(device_alloc(device, &at, BYTES, &error), RC_DEVICE);
    gpu_expect(&error, RC_DEVICE, "CUDA_ERROR_ILLEGAL_ADDRESS");
    device_leave(device, &visit);
    gpu_close(device);
}

static void a_driver_that_shuts_down_is_no_failure_of_closing(void)
{
    cuda_device *device = gpu_open(gpu_driver(""), 0);
    device_visit visit;
    rc_error error;
    cu_event event;
    error_clear(&error);
    CHECK_EQ(device_enter(device, &visit, &error), RC_OK);
    CHECK_EQ(device_event_create(device, &event, &error), RC_OK);
    fake_cuda_deinitialize();
    CHECK_EQ(DEVICE_CALL(device, &error, cuEventSynchronize, event), RC_DEVICE);
    gpu_expect(&error, RC_DEVICE, "The process is ending");
    device_event_destroy(device, event);
    device_leave(device, &visit);
    CHECK_EQ(device->broken, CU_OK);
    device_close(device);
    CHECK(fake_cuda_misuse() == NULL);
}

static void a_forked_child_is_refused(void)
{
    cuda_device *device = gpu_open(gpu_driver(""), 0);
    pid_t child = fork();
    if (child == 0) {
        device_visit visit;
        cuda_device *another;
        rc_error error;
        error_clear(&error);
        int good =
            device_enter(device, &visit, &error) == RC_INVALID_STATE &&
            strstr(error.message, "spawn") != NULL &&
            device_bind_thread(device, NULL) == RC_INVALID_STATE &&
            device_open(&another, device->driver, 0, NULL, NULL, 0, NULL) == RC_INVALID_STATE;
        device_leave(device, &visit);
        device_free(device, 4096);
        device_event_destroy(device, (cu_event)(uintptr_t)8);
        device_stream_destroy(device, (cu_stream)(uintptr_t)8);
        device_unpin(device, &good);
        device_close(device);
        _exit(good ? 0 : 1);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    gpu_close(device);
}

/* ---- what callers bring ---- */

static void refused_pointer(cuda_device *device, cu_address at, const char *text)
{
    rc_error error;
    error_clear(&error);
    CHECK_EQ(device_check_pointer(device, at, BYTES, &error), RC_INVALID_ARGUMENT);
    gpu_expect(&error, RC_INVALID_ARGUMENT, text);
}

static void pointers_are_checked(void)
{
    cuda_device *device = gpu_open(gpu_driver("FAKE_CUDA_DEVICES=2"), 0);
    device_visit visit;
    rc_error error;
    cu_address own = 0, foreign = fake_cuda_memory(0, BYTES, FAKE_FOREIGN_CONTEXT),
               managed = fake_cuda_memory(0, BYTES, FAKE_MANAGED),
               pooled = fake_cuda_memory(0, BYTES, FAKE_POOLED),
               there = fake_cuda_memory(1, BYTES, FAKE_POOLED);
    void *page = new_page();
    error_clear(&error);
    CHECK_EQ(device_enter(device, &visit, &error), RC_OK);
    CHECK_EQ(device_alloc(device, &own, BYTES, &error), RC_OK);
    CHECK_EQ(device_pin(device, page, PAGE, &error), RC_OK);
    CHECK_EQ(device_check_pointer(device, own, BYTES, &error), RC_OK);
    CHECK_EQ(device_check_pointer(device, pooled, BYTES, &error), RC_OK);
    CHECK_EQ(device_check_pointer(device, 0, 0, &error), RC_OK); /* an empty tensor has none */
    refused_pointer(device, foreign, "a CUDA context other than the GPU's primary one");
    refused_pointer(device, managed, "managed memory");
    refused_pointer(device, there, "is on GPU 1, and the communicator works with GPU 0");
    refused_pointer(device, (cu_address)(uintptr_t)&error, "host memory");
    refused_pointer(device, (cu_address)(uintptr_t)page, "host memory");
    refused_pointer(device, 0, "host memory");
    fake_cuda_fail("cuPointerGetAttributes", 1, CU_UNKNOWN);
    CHECK_EQ(device_check_pointer(device, own, BYTES, &error), RC_DEVICE);
    device_unpin(device, page);
    device_free(device, own);
    device_free(device, foreign);
    device_free(device, managed);
    device_free(device, pooled);
    device_free(device, there);
    device_leave(device, &visit);
    gpu_close(device);
    munmap(page, PAGE);
}

static void refused_stream(cuda_device *device, cu_stream stream, const char *text)
{
    rc_error error;
    error_clear(&error);
    CHECK_EQ(device_check_stream(device, stream, &error), RC_INVALID_ARGUMENT);
    gpu_expect(&error, RC_INVALID_ARGUMENT, text);
}

static void streams_are_checked(void)
{
    const cuda_driver *driver = gpu_driver("FAKE_CUDA_DEVICES=2");
    cuda_device *device = gpu_open(driver, 0), *other = gpu_open(driver, 1);
    device_visit visit;
    rc_error error;
    cu_stream theirs, ours;
    error_clear(&error);
    CHECK_EQ(device_enter(other, &visit, &error), RC_OK);
    CHECK_EQ(cuStreamCreateWithPriority(&theirs, 0, 0), CU_OK);
    device_leave(other, &visit);
    CHECK_EQ(device_enter(device, &visit, &error), RC_OK);
    CHECK_EQ(cuStreamCreateWithPriority(&ours, 0, 0), CU_OK);
    CHECK_EQ(device_check_stream(device, ours, &error), RC_OK);
    CHECK_EQ(device_check_stream(device, NULL, &error), RC_OK);
    CHECK_EQ(device_check_stream(device, CU_LEGACY_STREAM, &error), RC_OK);
    CHECK_EQ(device_check_stream(device, CU_THREAD_STREAM, &error), RC_OK);
    refused_stream(device, theirs, "of another GPU than 0");
    refused_stream(device, fake_cuda_foreign_stream(0), "a CUDA context other than");
    fake_cuda_capture(ours, 1);
    refused_stream(device, ours, "captured into a CUDA graph");
    refused_stream(device, NULL, "captured into a CUDA graph"); /* it would wait for ours */
    CHECK_EQ(fake_cuda_capture(ours, 0), 1);
    CHECK_EQ(device_check_stream(device, ours, &error), RC_OK);
    device_stream_destroy(device, ours);
    device_stream_destroy(device, theirs);
    device_leave(device, &visit);
    device_close(other);
    gpu_close(device);
}

int main(void)
{
    static const check_test tests[] = {
        {"an_open_device_knows_itself", an_open_device_knows_itself},
        {"no_image_no_kernels", no_image_no_kernels},
        {"opening_twice_shares_the_context", opening_twice_shares_the_context},
        {"a_gpu_that_is_not_there_is_refused", a_gpu_that_is_not_there_is_refused},
        {"what_is_too_old_does_without_kernels", what_is_too_old_does_without_kernels},
        {"a_kernel_that_is_missing_is_a_failure", a_kernel_that_is_missing_is_a_failure},
        {"entering_leaves_the_thread_as_it_was", entering_leaves_the_thread_as_it_was},
        {"our_calls_leave_a_capture_alone", our_calls_leave_a_capture_alone},
        {"threads_use_a_device_together", threads_use_a_device_together},
        {"any_call_may_fail", any_call_may_fail},
        {"an_error_for_good_is_remembered", an_error_for_good_is_remembered},
        {"a_driver_that_shuts_down_is_no_failure_of_closing",
         a_driver_that_shuts_down_is_no_failure_of_closing},
        {"a_forked_child_is_refused", a_forked_child_is_refused},
        {"pointers_are_checked", pointers_are_checked},
        {"streams_are_checked", streams_are_checked},
    };
    int failed = check_run(tests, CHECK_COUNT(tests));
    fake_cuda_reset();
    return failed;
}
