/* test_driver.c - opening CUDA's driver: what is said if that fails, and to whom it belongs. */
#include <sys/wait.h>
#include <unistd.h>

#include "gpu.h"

static void expect_refusal(const char *settings, const char *text)
{
    const cuda_driver *driver = NULL;
    rc_error error;
    CHECK_EQ(gpu_start(settings, &driver, &error), RC_DEVICE);
    gpu_expect(&error, RC_DEVICE, text);
    CHECK(driver == NULL);
}

static void without_a_library_it_says_so(void)
{
    const cuda_driver *driver = NULL;
    rc_error error;
    error_clear(&error);
    CHECK_EQ(cuda_driver_open("libcuda-is-not-here.so.1", &driver, &error), RC_DEVICE);
    gpu_expect(&error, RC_DEVICE, "CUDA's driver cannot be opened: libcuda-is-not-here.so.1");
    CHECK(strstr(error.message, "--gpus") != NULL);
    CHECK(driver == NULL);
}

static void a_missing_function_is_named(void)
{
    const cuda_driver *driver = NULL;
    rc_error error;
    error_clear(&error);
    CHECK_EQ(cuda_driver_open("libm.so.6", &driver, &error), RC_DEVICE);
    gpu_expect(&error, RC_DEVICE, "libm.so.6 lacks the function cuInit");
    CHECK(driver == NULL);
}

static void a_driver_that_does_not_start_says_why(void)
{
    expect_refusal("FAKE_CUDA_INIT=100", "CUDA_ERROR_NO_DEVICE");
    expect_refusal("FAKE_CUDA_INIT=100", "CUDA_VISIBLE_DEVICES");
    expect_refusal("FAKE_CUDA_INIT=999", "nvidia_uvm");
    expect_refusal("FAKE_CUDA_INIT=3", "spawn");
    expect_refusal("FAKE_CUDA_INIT=34", "LD_LIBRARY_PATH");
    expect_refusal("FAKE_CUDA_INIT=803", "restart the machine after an update");
    expect_refusal("FAKE_CUDA_INIT=77", "cuInit gives unknown error (an error without a name, 77)");
    expect_refusal("FAKE_CUDA_FAIL=cuDriverGetVersion:1:999", "cuDriverGetVersion gives");
    expect_refusal("FAKE_CUDA_FAIL=cuDeviceGetCount:1:3", "cuDeviceGetCount gives");
}

static void no_gpu_is_no_driver(void)
{
    expect_refusal("FAKE_CUDA_DEVICES=0", "sees no GPU");
}

static void what_failed_may_work_later(void)
{
    const cuda_driver *driver = NULL;
    rc_error error;
    gpu_settings("FAKE_CUDA_INIT=100");
    error_clear(&error);
    CHECK_EQ(cuda_driver_open(FAKE_LIBCUDA, &driver, &error), RC_DEVICE);
    gpu_settings("");
    error_clear(&error);
    CHECK_EQ(cuda_driver_open(FAKE_LIBCUDA, &driver, &error), RC_OK);
    CHECK(driver != NULL);
}

static void an_old_driver_opens_without_kernels(void)
{
    CHECK_EQ(gpu_driver("")->runs_ptx, 1);
    CHECK_EQ(gpu_driver("FAKE_CUDA_VERSION=12000")->runs_ptx, 1);
    const cuda_driver *old = gpu_driver("FAKE_CUDA_VERSION=11080 FAKE_CUDA_DEVICES=3");
    CHECK_EQ(old->runs_ptx, 0);
    CHECK_EQ(old->version, 11080);
    CHECK_EQ(old->devices, 3);
}

static const char *path_for_all;

static void *open_once(void *out)
{
    rc_error error;
    error_clear(&error);
    CHECK_EQ(cuda_driver_open(path_for_all, out, &error), RC_OK);
    return NULL;
}

static void threads_share_one_driver(void)
{
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    const cuda_driver *drivers[THREADS];
    gpu_settings("");
    path_for_all = gpu_path();
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, open_once, &drivers[i]);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++)
        CHECK(drivers[i] == drivers[0] && drivers[i] != NULL);
    CHECK_EQ(fake_cuda_calls("cuInit"), 1);
}

static void a_forked_child_is_refused(void)
{
    const cuda_driver *driver = gpu_driver(""), *other = NULL;
    pid_t child = fork();
    if (child == 0) {
        rc_error opening, using;
        error_clear(&opening);
        error_clear(&using);
        int good = cuda_driver_open(FAKE_LIBCUDA, &other, &opening) == RC_INVALID_STATE &&
                   strstr(opening.message, "spawn") != NULL && other == NULL &&
                   cuda_driver_open("elsewhere", &other, NULL) == RC_INVALID_STATE &&
                   cuda_driver_check_fork(driver, &using) == RC_INVALID_STATE;
        _exit(good ? 0 : 1);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    CHECK_EQ(cuda_driver_check_fork(driver, NULL), RC_OK);
}

static void memory_is_located(void)
{
    const cuda_driver *driver = gpu_driver("FAKE_CUDA_DEVICES=2");
    rc_error error;
    int ordinal = 5, local = 0;
    error_clear(&error);
    cu_address at = fake_cuda_memory(1, 64, FAKE_POOLED);
    CHECK_EQ(cuda_driver_locate(driver, at + 63, &ordinal, &error), RC_OK);
    CHECK_EQ(ordinal, 1);
    CHECK_EQ(cuda_driver_locate(driver, (cu_address)(uintptr_t)&local, &ordinal, &error), RC_OK);
    CHECK_EQ(ordinal, -1);
    fake_cuda_fail("cuPointerGetAttributes", 1, CU_INVALID_CONTEXT);
    CHECK_EQ(cuda_driver_locate(driver, at, &ordinal, &error), RC_DEVICE);
    gpu_expect(&error, RC_DEVICE, "CUDA_ERROR_INVALID_CONTEXT");
    CHECK_EQ(ordinal, -1);
}

int main(void)
{
    static const check_test tests[] = {
        {"without_a_library_it_says_so", without_a_library_it_says_so},
        {"a_missing_function_is_named", a_missing_function_is_named},
        {"a_driver_that_does_not_start_says_why", a_driver_that_does_not_start_says_why},
        {"no_gpu_is_no_driver", no_gpu_is_no_driver},
        {"what_failed_may_work_later", what_failed_may_work_later},
        {"an_old_driver_opens_without_kernels", an_old_driver_opens_without_kernels},
        {"threads_share_one_driver", threads_share_one_driver},
        {"a_forked_child_is_refused", a_forked_child_is_refused},
        {"memory_is_located", memory_is_located},
    };
    int failed = check_run(tests, CHECK_COUNT(tests));
    fake_cuda_reset();
    return failed;
}
