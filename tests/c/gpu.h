/* gpu.h - a fake driver and a device of it, for tests of csrc/cuda. The program is linked with the
 * fake (tests/cuda/fake_libcuda.h), so that it can look behind it; the code under test opens it by
 * its path, as it would the real one. */
#ifndef RINGCOMM_TEST_GPU_H
#define RINGCOMM_TEST_GPU_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/base/error.h"
#include "../../csrc/cuda/device.h"
#include "../cuda/fake_libcuda.h"
#include "check.h"

/* As much of ringcomm/kernels.ptx as a driver that runs none of it looks at; what is launched is
 * tests/cuda/emulate.h. */
static const char *const gpu_kernels[] = {"ringcomm_unpack_bf16", "ringcomm_scale"};
enum { GPU_UNPACK, GPU_SCALE, GPU_KERNELS };
#define GPU_PTX                                                                                    \
    ".version 8.0\n.target sm_60\n.address_size 64\n"                                              \
    ".visible .entry ringcomm_unpack_bf16(\n\t.param .u64 unpack_param_0,\n"                       \
    "\t.param .u64 unpack_param_1,\n\t.param .u64 unpack_param_2\n)\n{\n\tret;\n}\n"               \
    ".visible .entry ringcomm_scale(.param .u64 .ptr .global scale_param_0,\n"                     \
    ".param .u64 scale_param_1,\n.param .f32 scale_param_2,\n.param .u64 scale_param_3\n)\n"       \
    "{\n\tret;\n}\n"

/* Sets the environment for fake_cuda_reset: "FAKE_CUDA_INIT=100 FAKE_CUDA_DEVICES=2". */
static inline void gpu_settings(const char *settings)
{
    static const char *const names[] = {"INIT",       "VERSION", "DEVICES",
                                        "CAPABILITY", "ORDER",   "FAIL"};
    char text[256], name[64];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(name, sizeof name, "FAKE_CUDA_%s", names[i]);
        unsetenv(name);
    }
    setenv("FAKE_CUDA_MEMORY_MB", "64", 1);
    setenv("FAKE_CUDA_KERNELS", KERNELS_LIBRARY, 1);
    snprintf(text, sizeof text, "%s", settings);
    for (char *state, *one = strtok_r(text, " ", &state); one != NULL;
         one = strtok_r(NULL, " ", &state)) {
        char *equals = strchr(one, '=');
        *equals = '\0';
        setenv(one, equals + 1, 1);
    }
    fake_cuda_reset();
}

/* The fake's path in a spelling that was not used before, so that the driver starts anew. */
static inline const char *gpu_path(void)
{
    static int opened;
    static char path[2048];
    static const char name[] = "libfakecuda.so";
    size_t folder = strlen(FAKE_LIBCUDA) - (sizeof name - 1);
    memcpy(path, FAKE_LIBCUDA, folder);
    memset(path + folder, '/', (size_t)++opened);
    memcpy(path + folder + opened, name, sizeof name);
    return path;
}

static inline rc_result gpu_start(const char *settings, const cuda_driver **driver, rc_error *error)
{
    gpu_settings(settings);
    error_clear(error);
    return cuda_driver_open(gpu_path(), driver, error);
}

static inline const cuda_driver *gpu_driver(const char *settings)
{
    const cuda_driver *driver = NULL;
    rc_error error;
    if (!CHECK_EQ(gpu_start(settings, &driver, &error), RC_OK)) {
        fprintf(stderr, "%s\n", error.message);
        exit(1);
    }
    return driver;
}

static inline cuda_device *gpu_open(const cuda_driver *driver, int ordinal)
{
    cuda_device *device = NULL;
    rc_error error;
    error_clear(&error);
    if (!CHECK_EQ(device_open(&device, driver, ordinal, GPU_PTX, gpu_kernels, GPU_KERNELS, &error),
                  RC_OK)) {
        fprintf(stderr, "%s\n", error.message);
        exit(1);
    }
    return device;
}

/* All was given back, and nothing was done that CUDA leaves undefined. */
static inline void gpu_expect_clean(void)
{
    CHECK_EQ(fake_cuda_leaks(NULL), 0);
    const char *misuse = fake_cuda_misuse();
    if (!CHECK(misuse == NULL))
        CHECK_NOTE("%s\n", misuse);
    CHECK_EQ(fake_cuda_depth(), 0);
}

/* Ends a test. */
static inline void gpu_close(cuda_device *device)
{
    device_close(device);
    gpu_expect_clean();
    CHECK_EQ(fake_cuda_capture_mode(), 0);
}

static inline void gpu_expect(const rc_error *error, rc_result code, const char *text)
{
    CHECK_EQ(error->code, code);
    if (!CHECK(strstr(error->message, text) != NULL))
        CHECK_NOTE("got: %s\nwant: %s\n", error->message, text);
}

#endif
