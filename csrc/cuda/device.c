/* device.c - see device.h. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"

/* ---- results ---- */

/* Returns 1 for errors after which every call on the context fails. */
static int is_for_good(cu_result result)
{
    enum { LAUNCH_TIMEOUT = 702, CONTEXT_IS_DESTROYED = 709, ASSERT = 710, HARDWARE_STACK = 714 };
    return result == CU_ECC_UNCORRECTABLE || result == CU_NVLINK_UNCORRECTABLE ||
           result == CU_ILLEGAL_ADDRESS || result == LAUNCH_TIMEOUT ||
           result == CONTEXT_IS_DESTROYED || result == ASSERT ||
           (result >= HARDWARE_STACK && result <= CU_LAUNCH_FAILED);
}

static const char *failure_advice(cu_result result)
{
    if (is_for_good(result))
        return ". The GPU cannot be used by this process any more; restart it";
    if (result == CU_OUT_OF_MEMORY)
        return ". Other tensors or other processes have its memory";
    if (result == CU_DEVICE_UNAVAILABLE)
        return ". Another process has it for itself; see its compute mode in nvidia-smi";
    if (result == CU_DEINITIALIZED)
        return ". The process is ending; wait for all works before";
    return "";
}

rc_result device_result(cuda_device *device, const char *function, cu_result result,
                        rc_error *error)
{
    if (result == CU_OK)
        return RC_OK;
    if (is_for_good(result))
        atomic_store(&device->broken, result);
    return error_set(error, result == CU_OUT_OF_MEMORY ? RC_NO_MEMORY : RC_DEVICE,
                     "%s failed on GPU %d: %s (%s, %u)%s", function, device->ordinal,
                     cuda_error_text(device->driver, result),
                     cuda_error_name(device->driver, result), result, failure_advice(result));
}

/* Notes the result of a call that frees something: no caller is told of an error. */
static void note(cuda_device *device, cu_result result)
{
    if (is_for_good(result))
        atomic_store(&device->broken, result);
}

static int is_childs(const cuda_device *device)
{
    return cuda_driver_check_fork(device->driver, NULL) != RC_OK;
}

/* ---- threads ---- */

rc_result device_enter(cuda_device *device, device_visit *visit, rc_error *error)
{
    *visit = (device_visit){.capture_mode = CU_CAPTURE_RELAXED};
    RC_TRY(cuda_driver_check_fork(device->driver, error));
    RC_TRY(DEVICE_CALL(device, error, cuCtxPushCurrent, device->context));
    rc_result result =
        DEVICE_CALL(device, error, cuThreadExchangeStreamCaptureMode, &visit->capture_mode);
    if (result != RC_OK) {
        cu_context popped;
        device->driver->cuCtxPopCurrent(&popped);
        return result;
    }
    visit->entered = 1;
    return RC_OK;
}

void device_leave(cuda_device *device, device_visit *visit)
{
    if (!visit->entered)
        return;
    visit->entered = 0;
    cu_context popped;
    note(device, device->driver->cuThreadExchangeStreamCaptureMode(&visit->capture_mode));
    note(device, device->driver->cuCtxPopCurrent(&popped));
}

rc_result device_bind_thread(cuda_device *device, rc_error *error)
{
    unsigned mode = CU_CAPTURE_RELAXED;
    RC_TRY(cuda_driver_check_fork(device->driver, error));
    RC_TRY(DEVICE_CALL(device, error, cuCtxSetCurrent, device->context));
    return DEVICE_CALL(device, error, cuThreadExchangeStreamCaptureMode, &mode);
}

/* ---- kernels ---- */

static int cannot_compile(cu_result result)
{
    enum { INVALID_SOURCE = 300 };
    return result == CU_INVALID_IMAGE || result == CU_NO_BINARY_FOR_GPU ||
           result == CU_INVALID_PTX || result == CU_JIT_COMPILER_NOT_FOUND ||
           result == CU_UNSUPPORTED_PTX_VERSION || result == CU_JIT_COMPILATION_DISABLED ||
           result == INVALID_SOURCE;
}

static void do_without(cuda_device *d, cu_result result, const char *log)
{
    snprintf(d->without_kernels, sizeof d->without_kernels,
             "the driver does not take ringcomm's kernels for GPU %d: %s (%s, %u)%s%s", d->ordinal,
             cuda_error_text(d->driver, result), cuda_error_name(d->driver, result), result,
             log[0] ? ": " : "", log);
    free(d->kernels);
    d->kernels = NULL;
    d->kernel_count = 0;
}

static rc_result load_module(cuda_device *d, const void *image, rc_error *error)
{
    char log[160] = "";
    unsigned options[] = {CU_JIT_ERROR_LOG, CU_JIT_ERROR_LOG_BYTES};
    void *values[] = {log, (void *)(uintptr_t)(sizeof log)};
    cu_result result = d->driver->cuModuleLoadDataEx(&d->module, image, 2, options, values);
    if (result != CU_OK)
        d->module = NULL;
    if (!cannot_compile(result))
        return device_result(d, "cuModuleLoadDataEx", result, error);
    log[sizeof log - 1] = '\0';
    log[strcspn(log, "\r\n")] = '\0';
    do_without(d, result, log);
    return RC_OK;
}

static rc_result find_kernels(cuda_device *d, const char *const *names, int count, rc_error *error)
{
    d->kernels = calloc((size_t)count + 1, sizeof *d->kernels);
    if (d->kernels == NULL)
        return error_set(error, RC_NO_MEMORY, "out of memory");
    d->kernel_count = count;
    for (int i = 0; i < count; i++) {
        cu_result result = d->driver->cuModuleGetFunction(&d->kernels[i], d->module, names[i]);
        if (result == CU_NOT_FOUND)
            return error_set(error, RC_DEVICE,
                             "ringcomm's kernels lack %s: they are of another version. Install "
                             "ringcomm anew",
                             names[i]);
        if (cannot_compile(result)) { /* a driver may put compiling off until now */
            do_without(d, result, "");
            return RC_OK;
        }
        RC_TRY(device_result(d, "cuModuleGetFunction", result, error));
    }
    return RC_OK;
}

static rc_result run_all(cuda_device *d, cu_stream stream, rc_error *error)
{
    static const uint64_t zero[8];
    void *parameters[DEVICE_MAX_PARAMETERS];
    for (int i = 0; i < DEVICE_MAX_PARAMETERS; i++)
        parameters[i] = (void *)(uintptr_t)zero; /* only read */
    for (int i = 0; i < d->kernel_count; i++)
        RC_TRY(device_launch(d, i, 1, 32, stream, parameters, error));
    return DEVICE_CALL(d, error, cuStreamSynchronize, stream);
}

static rc_result warm_up(cuda_device *d, rc_error *error)
{
    cu_stream stream;
    RC_TRY(device_stream_create(d, &stream, error));
    rc_result result = run_all(d, stream, error);
    device_stream_destroy(d, stream);
    return result;
}

/* Returns 1 if the kernels cannot run, and sets without_kernels. */
static int is_too_old(cuda_device *d)
{
    if (!d->driver->runs_ptx)
        snprintf(d->without_kernels, sizeof d->without_kernels,
                 "the driver is for CUDA %d.%d, and ringcomm's kernels need one for 12.0 (525.60 "
                 "or later)",
                 d->driver->version / 1000, d->driver->version % 1000 / 10);
    else if (d->capability < DEVICE_CAPABILITY)
        snprintf(d->without_kernels, sizeof d->without_kernels,
                 "GPU %d (%s) has compute capability %d.%d, and ringcomm's kernels need 6.0",
                 d->ordinal, d->name, d->capability / 10, d->capability % 10);
    return d->without_kernels[0] != '\0';
}

static rc_result load_kernels(cuda_device *d, const void *image, const char *const *names,
                              int count, rc_error *error)
{
    if (image == NULL || is_too_old(d))
        return RC_OK;
    RC_TRY(load_module(d, image, error));
    if (d->module == NULL)
        return RC_OK;
    RC_TRY(find_kernels(d, names, count, error));
    return d->kernels != NULL ? warm_up(d, error) : RC_OK;
}

/* ---- open and close ---- */

static rc_result describe(cuda_device *d, rc_error *error)
{
    int major = 0, minor = 0;
    RC_TRY(DEVICE_CALL(d, error, cuDeviceGet, &d->number, d->ordinal));
    RC_TRY(DEVICE_CALL(d, error, cuDeviceGetName, d->name, DEVICE_NAME_BYTES, d->number));
    d->name[DEVICE_NAME_BYTES - 1] = '\0';
    RC_TRY(
        DEVICE_CALL(d, error, cuDeviceGetAttribute, &major, CU_DEVICE_CAPABILITY_MAJOR, d->number));
    RC_TRY(
        DEVICE_CALL(d, error, cuDeviceGetAttribute, &minor, CU_DEVICE_CAPABILITY_MINOR, d->number));
    d->capability = 10 * major + minor;
    return DEVICE_CALL(d, error, cuDeviceGetAttribute, &d->copy_engines, CU_DEVICE_ASYNC_ENGINES,
                       d->number);
}

static rc_result set_up(cuda_device *d, const void *image, const char *const *names, int count,
                        rc_error *error)
{
    RC_TRY(describe(d, error));
    RC_TRY(DEVICE_CALL(d, error, cuDevicePrimaryCtxRetain, &d->context, d->number));
    device_visit visit;
    RC_TRY(device_enter(d, &visit, error));
    int least = 0;
    rc_result result = DEVICE_CALL(d, error, cuCtxGetStreamPriorityRange, &least, &d->priority);
    if (result == RC_OK)
        result = load_kernels(d, image, names, count, error);
    device_leave(d, &visit);
    return result;
}

rc_result device_open(cuda_device **out, const cuda_driver *driver, int ordinal, const void *image,
                      const char *const *names, int count, rc_error *error)
{
    *out = NULL;
    RC_TRY(cuda_driver_check_fork(driver, error));
    if (ordinal < 0 || ordinal >= driver->devices)
        return error_set(error, RC_INVALID_ARGUMENT,
                         "there is no GPU %d: CUDA's driver sees %d, counted from 0 (see "
                         "CUDA_VISIBLE_DEVICES)",
                         ordinal, driver->devices);
    cuda_device *d = calloc(1, sizeof *d);
    if (d == NULL)
        return error_set(error, RC_NO_MEMORY, "out of memory");
    d->driver = driver;
    d->ordinal = ordinal;
    rc_result result = set_up(d, image, names, count, error);
    if (result != RC_OK) {
        device_close(d);
        return result;
    }
    *out = d;
    return RC_OK;
}

static void unload(cuda_device *d)
{
    cu_context popped;
    unsigned mode = CU_CAPTURE_RELAXED;
    int pushed = d->driver->cuCtxPushCurrent(d->context) == CU_OK;
    int relaxed = d->driver->cuThreadExchangeStreamCaptureMode(&mode) == CU_OK;
    d->driver->cuModuleUnload(d->module); /* whether or not the others succeeded */
    if (relaxed)
        d->driver->cuThreadExchangeStreamCaptureMode(&mode);
    if (pushed)
        d->driver->cuCtxPopCurrent(&popped);
}

void device_close(cuda_device *device)
{
    if (device == NULL)
        return;
    if (device->context != NULL && !is_childs(device)) {
        if (device->module != NULL)
            unload(device);
        device->driver->cuDevicePrimaryCtxRelease(device->number);
    }
    free(device->kernels);
    free(device);
}

/* ---- streams, events, memory ---- */

rc_result device_stream_create(cuda_device *device, cu_stream *out, rc_error *error)
{
    *out = NULL;
    return DEVICE_CALL(device, error, cuStreamCreateWithPriority, out, CU_NON_BLOCKING,
                       device->priority);
}

void device_stream_destroy(cuda_device *device, cu_stream stream)
{
    if (stream != NULL && !is_childs(device))
        note(device, device->driver->cuStreamDestroy(stream));
}

rc_result device_event_create(cuda_device *device, cu_event *out, rc_error *error)
{
    *out = NULL;
    return DEVICE_CALL(device, error, cuEventCreate, out, CU_NO_TIMING | CU_BLOCKING_SYNC);
}

void device_event_destroy(cuda_device *device, cu_event event)
{
    if (event != NULL && !is_childs(device))
        note(device, device->driver->cuEventDestroy(event));
}

rc_result device_event_query(cuda_device *device, cu_event event, rc_error *error)
{
    cu_result result = device->driver->cuEventQuery(event);
    return result == CU_NOT_READY ? RC_AGAIN : device_result(device, "cuEventQuery", result, error);
}

enum { HOW_PINNED = CU_REGISTER_PORTABLE | CU_REGISTER_DEVICEMAP };

rc_result device_alloc_pinned(cuda_device *device, void **out, size_t bytes, rc_error *error)
{
    *out = NULL;
    return DEVICE_CALL(device, error, cuMemHostAlloc, out, bytes, HOW_PINNED);
}

void device_free_pinned(cuda_device *device, void *at)
{
    if (at != NULL && !is_childs(device))
        note(device, device->driver->cuMemFreeHost(at));
}

rc_result device_alloc(cuda_device *device, cu_address *out, size_t bytes, rc_error *error)
{
    *out = 0;
    return DEVICE_CALL(device, error, cuMemAlloc, out, bytes);
}

void device_free(cuda_device *device, cu_address address)
{
    if (address != 0 && !is_childs(device))
        note(device, device->driver->cuMemFree(address));
}

rc_result device_pin(cuda_device *device, void *from, size_t bytes, rc_error *error)
{
    cu_result result = device->driver->cuMemHostRegister(from, bytes, HOW_PINNED);
    if (result == CU_NOT_PERMITTED || result == CU_NOT_SUPPORTED)
        return RC_AGAIN;
    return device_result(device, "cuMemHostRegister", result, error);
}

void device_unpin(cuda_device *device, void *from)
{
    if (from != NULL && !is_childs(device))
        note(device, device->driver->cuMemHostUnregister(from));
}

rc_result device_launch(cuda_device *device, int kernel, unsigned blocks, unsigned threads,
                        cu_stream stream, void **parameters, rc_error *error)
{
    return DEVICE_CALL(device, error, cuLaunchKernel, device->kernels[kernel], blocks, 1, 1,
                       threads, 1, 1, 0, stream, parameters, NULL);
}

/* ---- checks of callers' pointers and streams ---- */

static rc_result refuse_pointer(cu_address address, rc_error *error, const char *what)
{
    return error_set(error, RC_INVALID_ARGUMENT, "0x%llx is %s", address, what);
}

rc_result device_check_pointer(cuda_device *device, cu_address address, size_t bytes,
                               rc_error *error)
{
    unsigned type = 0, managed = 0;
    int ordinal = -1;
    cu_context context = NULL;
    unsigned attributes[] = {CU_POINTER_MEMORY_TYPE, CU_POINTER_IS_MANAGED, CU_POINTER_ORDINAL,
                             CU_POINTER_CONTEXT};
    void *values[] = {&type, &managed, &ordinal, &context};
    if (bytes == 0)
        return RC_OK;
    RC_TRY(DEVICE_CALL(device, error, cuPointerGetAttributes, 4, attributes, values, address));
    if (managed)
        return refuse_pointer(address, error,
                              "managed memory, which may be on the GPU or the host. Copy it to "
                              "ordinary device memory, or pass it as a host array");
    if (type == 0 || type == CU_MEMORY_HOST)
        return refuse_pointer(address, error,
                              "host memory and was given as memory of a GPU. Pass it as a host "
                              "array, or copy it to the GPU");
    if (ordinal != device->ordinal)
        return error_set(error, RC_INVALID_ARGUMENT,
                         "the memory at 0x%llx is on GPU %d, and the communicator works with GPU "
                         "%d. Copy the tensor, or use a communicator for each GPU",
                         address, ordinal, device->ordinal);
    if (context != NULL && context != device->context) /* pools and mapped memory have none */
        return refuse_pointer(address, error,
                              "memory of a CUDA context other than the GPU's primary one, where "
                              "torch and CuPy work. Copy it there, or have the library that made "
                              "it use the primary context");
    return RC_OK;
}

rc_result device_check_stream(cuda_device *device, cu_stream stream, rc_error *error)
{
    unsigned capturing = 0;
    cu_result result = device->driver->cuStreamIsCapturing(stream, &capturing);
    if (capturing || result == CU_STREAM_CAPTURE_IMPLICIT)
        return error_set(error, RC_INVALID_ARGUMENT,
                         "the stream is being captured into a CUDA graph, and a collective cannot "
                         "be part of one. Call it outside the capture");
    RC_TRY(device_result(device, "cuStreamIsCapturing", result, error));
    cu_context context = device->context;
    RC_TRY(DEVICE_CALL(device, error, cuStreamGetCtx, stream, &context));
    if (context != device->context)
        return error_set(error, RC_INVALID_ARGUMENT,
                         "the stream is of another GPU than %d, or of a CUDA context other than "
                         "its primary one. Give a stream that was made on this GPU",
                         device->ordinal);
    return RC_OK;
}
