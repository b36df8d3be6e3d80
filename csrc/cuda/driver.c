/* driver.c - see driver.h. The list of opened libraries is the one global state of the core: a
 * library belongs to the whole process in any case. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/error.h"

enum { KERNELS_NEED_VERSION = 12000 }; /* PTX ISA 8.0 */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cuda_driver *drivers;
/* The process that has drivers, or is opening the first; 0 if none. Read before the lock is taken,
 * since a child may have been forked while a thread of its parent held it. */
static _Atomic pid_t opened_by;

static rc_result refuse_child(rc_error *error)
{
    return error_set(
        error, RC_INVALID_STATE,
        "CUDA cannot be used in this process: it was forked from one that had started "
        "CUDA. Start it with multiprocessing's method 'spawn' or 'forkserver' instead");
}

rc_result cuda_driver_check_fork(const cuda_driver *driver, rc_error *error)
{
    return driver->pid == getpid() ? RC_OK : refuse_child(error);
}

const char *cuda_error_name(const cuda_driver *driver, cu_result result)
{
    const char *text = NULL;
    if (driver->cuGetErrorName(result, &text) != CU_OK || text == NULL)
        return "an error without a name";
    return text;
}

const char *cuda_error_text(const cuda_driver *driver, cu_result result)
{
    const char *text = NULL;
    if (driver->cuGetErrorString(result, &text) != CU_OK || text == NULL)
        return "unknown error";
    return text;
}

/* ---- opening ---- */

static rc_result find_functions(cuda_driver *d, void *library, rc_error *error)
{
    const char *missing = NULL;
#define FIND(name, suffix, parameters)                                                             \
    *(void **)&d->name = dlsym(library, #name #suffix);                                            \
    if (d->name == NULL && missing == NULL)                                                        \
        missing = #name #suffix;
    CUDA_FUNCTIONS(FIND)
#undef FIND
    if (missing == NULL)
        return RC_OK;
    return error_set(error, RC_DEVICE,
                     "%s lacks the function %s: it is not CUDA's driver, or one before CUDA 10.1. "
                     "Install a newer NVIDIA driver",
                     d->path, missing);
}

/* Returns what a user can do about a driver that does not start. */
static const char *startup_advice(cu_result result)
{
    switch (result) {
    case CU_NOT_INITIALIZED:
        return "CUDA was started in the process that this one was forked from; start it with "
               "multiprocessing's method 'spawn' instead";
    case CU_STUB_LIBRARY:
        return "it is a stub to link with; take its folder out of LD_LIBRARY_PATH";
    case CU_NO_DEVICE: return "see nvidia-smi, and the variable CUDA_VISIBLE_DEVICES";
    case CU_SYSTEM_DRIVER_MISMATCH:
        return "its version is not that of the kernel's module; restart the machine after an "
               "update "
               "of the driver";
    case CU_UNKNOWN:
        return "see nvidia-smi; after an update or a suspend, reload the module nvidia_uvm or "
               "restart the machine";
    default: return "see nvidia-smi";
    }
}

static rc_result does_not_start(const cuda_driver *d, const char *function, cu_result result,
                                rc_error *error)
{
    return error_set(error, RC_DEVICE, "%s does not start: %s gives %s (%s, %u); %s", d->path,
                     function, cuda_error_text(d, result), cuda_error_name(d, result), result,
                     startup_advice(result));
}

static rc_result start_driver(cuda_driver *d, rc_error *error)
{
    cu_result result = d->cuInit(0);
    if (result != CU_OK)
        return does_not_start(d, "cuInit", result, error);
    result = d->cuDriverGetVersion(&d->version);
    if (result != CU_OK)
        return does_not_start(d, "cuDriverGetVersion", result, error);
    result = d->cuDeviceGetCount(&d->devices);
    if (result != CU_OK)
        return does_not_start(d, "cuDeviceGetCount", result, error);
    if (d->devices < 1)
        return error_set(error, RC_DEVICE, "CUDA's driver (%s) sees no GPU; %s", d->path,
                         startup_advice(CU_NO_DEVICE));
    d->runs_ptx = d->version >= KERNELS_NEED_VERSION;
    return RC_OK;
}

static rc_result load_driver(cuda_driver *d, rc_error *error)
{
    void *library = dlopen(d->path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        return error_set(error, RC_DEVICE,
                         "CUDA's driver cannot be opened: %s. It comes with NVIDIA's driver; a "
                         "container needs to be started with its GPUs (docker run --gpus all)",
                         why != NULL ? why : d->path);
    }
    rc_result result = find_functions(d, library, error);
    if (result != RC_OK) {
        dlclose(library); /* nothing of it has run */
        return result;
    }
    return start_driver(d, error);
}

static rc_result open_new(const char *path, const cuda_driver **out, rc_error *error)
{
    size_t bytes = strlen(path) + 1;
    cuda_driver *d = calloc(1, sizeof *d + bytes);
    if (d == NULL)
        return error_set(error, RC_NO_MEMORY, "out of memory");
    memcpy(d->path, path, bytes);
    d->pid = getpid();
    rc_result result = load_driver(d, error);
    if (result != RC_OK) {
        free(d);
        return result;
    }
    d->next = drivers;
    drivers = d;
    *out = d;
    return RC_OK;
}

rc_result cuda_driver_open(const char *path, const cuda_driver **out, rc_error *error)
{
    *out = NULL;
    pid_t owner = atomic_load(&opened_by);
    if (owner != 0 && owner != getpid())
        return refuse_child(error);
    pthread_mutex_lock(&lock);
    atomic_store(&opened_by, getpid());
    const cuda_driver *d = drivers;
    while (d != NULL && strcmp(d->path, path) != 0)
        d = d->next;
    *out = d;
    rc_result result = d != NULL ? RC_OK : open_new(path, out, error);
    if (drivers == NULL)
        atomic_store(&opened_by, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- pointers ---- */

rc_result cuda_driver_locate(const cuda_driver *driver, cu_address address, int *ordinal,
                             rc_error *error)
{
    *ordinal = -1;
    RC_TRY(cuda_driver_check_fork(driver, error));
    unsigned type = 0;
    int on = -1;
    unsigned attributes[] = {CU_POINTER_MEMORY_TYPE, CU_POINTER_ORDINAL};
    void *values[] = {&type, &on};
    cu_result result = driver->cuPointerGetAttributes(2, attributes, values, address);
    if (result != CU_OK)
        return error_set(error, RC_DEVICE, "cuPointerGetAttributes failed: %s (%s, %u)",
                         cuda_error_text(driver, result), cuda_error_name(driver, result), result);
    if (type == CU_MEMORY_DEVICE)
        *ordinal = on;
    return RC_OK;
}
