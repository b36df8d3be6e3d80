/* driver.h - the CUDA driver, opened at run time.
 *
 * ringcomm is neither built nor linked with CUDA. The driver's library, libcuda.so.1, comes with
 * the machine; it is opened when a GPU is first asked for, and its functions are kept in a table,
 * under their documented names. The symbols behind them carry a version where the plain name is an
 * old interface (cuMemAlloc is that of CUDA 3.1). The prototypes are written here; a test compares
 * them with CUDA's header where there is one.
 *
 * Invariants. A library is opened once in a process, for all threads, and never closed: torch and
 * CuPy use the same one, and the driver does not survive being unloaded. A failure is tried again
 * at the next call. After fork() a child cannot use it: cuda_driver_open fails there.
 */
#ifndef RINGCOMM_DRIVER_H
#define RINGCOMM_DRIVER_H

#include <stddef.h>
#include <sys/types.h>

#include "../include/ringcomm.h"

/* ---- CUDA's types, under ringcomm's names ---- */

typedef unsigned int cu_result;
typedef int cu_device;
typedef unsigned long long cu_address; /* of device memory, and of pinned host memory */
typedef struct CUctx_st *cu_context;
typedef struct CUstream_st *cu_stream; /* a cudaStream_t */
typedef struct CUevent_st *cu_event;
typedef struct CUmod_st *cu_module;
typedef struct CUfunc_st *cu_function;
typedef void cu_host_function(void *data);

enum {
    CU_OK = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_NOT_INITIALIZED = 3,
    CU_DEINITIALIZED = 4,
    CU_STUB_LIBRARY = 34,
    CU_DEVICE_UNAVAILABLE = 46,
    CU_NO_DEVICE = 100,
    CU_INVALID_DEVICE = 101,
    CU_INVALID_IMAGE = 200,
    CU_INVALID_CONTEXT = 201,
    CU_NO_BINARY_FOR_GPU = 209,
    CU_ECC_UNCORRECTABLE = 214,
    CU_INVALID_PTX = 218,
    CU_NVLINK_UNCORRECTABLE = 220,
    CU_JIT_COMPILER_NOT_FOUND = 221,
    CU_UNSUPPORTED_PTX_VERSION = 222,
    CU_JIT_COMPILATION_DISABLED = 223,
    CU_INVALID_HANDLE = 400,
    CU_NOT_FOUND = 500,
    CU_NOT_READY = 600,
    CU_ILLEGAL_ADDRESS = 700,
    CU_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CU_HOST_MEMORY_NOT_REGISTERED = 713,
    CU_LAUNCH_FAILED = 719,
    CU_NOT_PERMITTED = 800,
    CU_NOT_SUPPORTED = 801,
    CU_SYSTEM_DRIVER_MISMATCH = 803,
    CU_STREAM_CAPTURE_UNSUPPORTED = 900,
    CU_STREAM_CAPTURE_IMPLICIT = 906,
    CU_UNKNOWN = 999
};

enum {
    CU_NON_BLOCKING = 1,
    CU_BLOCKING_SYNC = 1,
    CU_NO_TIMING = 2,
    CU_REGISTER_PORTABLE = 1, /* of cuMemHostRegister and cuMemHostAlloc */
    CU_REGISTER_DEVICEMAP = 2,
    CU_CAPTURE_RELAXED = 2,
    CU_MEMORY_HOST = 1,
    CU_MEMORY_DEVICE = 2,
    CU_JIT_ERROR_LOG = 5,
    CU_JIT_ERROR_LOG_BYTES = 6
};

enum {
    CU_POINTER_CONTEXT = 1,
    CU_POINTER_MEMORY_TYPE = 2,
    CU_POINTER_IS_MANAGED = 8,
    CU_POINTER_ORDINAL = 9
};

enum {
    CU_DEVICE_ASYNC_ENGINES = 40,
    CU_DEVICE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_CAPABILITY_MINOR = 76
};

/* Streams that every thread has without making them. 0 means the first. */
#define CU_LEGACY_STREAM ((cu_stream)1)
#define CU_THREAD_STREAM ((cu_stream)2)

/* ---- the table ---- */

/* X(name, version of the symbol, parameters) */
#define CUDA_FUNCTIONS(X)                                                                          \
    X(cuInit, , (unsigned flags))                                                                  \
    X(cuDriverGetVersion, , (int *version))                                                        \
    X(cuGetErrorName, , (cu_result result, const char **text))                                     \
    X(cuGetErrorString, , (cu_result result, const char **text))                                   \
    X(cuDeviceGetCount, , (int *count))                                                            \
    X(cuDeviceGet, , (cu_device * device, int ordinal))                                            \
    X(cuDeviceGetName, , (char *name, int bytes, cu_device device))                                \
    X(cuDeviceGetAttribute, , (int *value, unsigned attribute, cu_device device))                  \
    X(cuDevicePrimaryCtxRetain, , (cu_context * context, cu_device device))                        \
    X(cuDevicePrimaryCtxRelease, _v2, (cu_device device))                                          \
    X(cuCtxPushCurrent, _v2, (cu_context context))                                                 \
    X(cuCtxPopCurrent, _v2, (cu_context * context))                                                \
    X(cuCtxSetCurrent, , (cu_context context))                                                     \
    X(cuCtxGetStreamPriorityRange, , (int *least, int *greatest))                                  \
    X(cuPointerGetAttributes, ,                                                                    \
      (unsigned count, unsigned *attributes, void **values, cu_address address))                   \
    X(cuMemAlloc, _v2, (cu_address * address, size_t bytes))                                       \
    X(cuMemFree, _v2, (cu_address address))                                                        \
    X(cuMemHostRegister, _v2, (void *from, size_t bytes, unsigned flags))                          \
    X(cuMemHostUnregister, , (void *from))                                                         \
    X(cuMemHostAlloc, , (void **at, size_t bytes, unsigned flags))                                 \
    X(cuMemFreeHost, , (void *at))                                                                 \
    X(cuStreamCreateWithPriority, , (cu_stream * stream, unsigned flags, int priority))            \
    X(cuStreamDestroy, _v2, (cu_stream stream))                                                    \
    X(cuStreamGetCtx, , (cu_stream stream, cu_context * context))                                  \
    X(cuStreamWaitEvent, , (cu_stream stream, cu_event event, unsigned flags))                     \
    X(cuStreamSynchronize, , (cu_stream stream))                                                   \
    X(cuStreamIsCapturing, , (cu_stream stream, unsigned *status))                                 \
    X(cuThreadExchangeStreamCaptureMode, , (unsigned *mode))                                       \
    X(cuEventCreate, , (cu_event * event, unsigned flags))                                         \
    X(cuEventDestroy, _v2, (cu_event event))                                                       \
    X(cuEventRecord, , (cu_event event, cu_stream stream))                                         \
    X(cuEventQuery, , (cu_event event))                                                            \
    X(cuEventSynchronize, , (cu_event event))                                                      \
    X(cuMemcpyDtoHAsync, _v2, (void *to, cu_address from, size_t bytes, cu_stream stream))         \
    X(cuMemcpyHtoDAsync, _v2, (cu_address to, const void *from, size_t bytes, cu_stream stream))   \
    X(cuMemcpyDtoDAsync, _v2, (cu_address to, cu_address from, size_t bytes, cu_stream stream))    \
    X(cuMemsetD32Async, , (cu_address to, unsigned value, size_t count, cu_stream stream))         \
    X(cuModuleLoadDataEx, ,                                                                        \
      (cu_module * module, const void *image, unsigned count, unsigned *options, void **values))   \
    X(cuModuleUnload, , (cu_module module))                                                        \
    X(cuModuleGetFunction, , (cu_function * function, cu_module module, const char *name))         \
    X(cuLaunchKernel, ,                                                                            \
      (cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,  \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, cu_stream stream,                \
       void **parameters, void **extra))                                                           \
    X(cuLaunchHostFunc, , (cu_stream stream, cu_host_function * call, void *data))

typedef struct cuda_driver {
#define MEMBER(name, suffix, parameters) cu_result(*name) parameters;
    CUDA_FUNCTIONS(MEMBER)
#undef MEMBER
    int version;  /* as CUDA counts: 12040 is CUDA 12.4 */
    int devices;  /* at least 1 */
    int runs_ptx; /* 1 if it understands the kernels: CUDA 12.0 and later */
    pid_t pid;    /* of the process that opened it */
    struct cuda_driver *next;
    char path[]; /* as given to cuda_driver_open */
} cuda_driver;

/* Opens the library at path ("libcuda.so.1", or a file's path), or finds it opened. *out is valid
 * until the process ends. RC_DEVICE, with the reason as a sentence: there is no such library, it
 * lacks a function, it cannot start, or it sees no GPU. RC_INVALID_STATE in a process that was
 * forked from one that had opened a driver. From any thread. */
rc_result cuda_driver_open(const char *path, const cuda_driver **out, rc_error *error);

/* Returns RC_INVALID_STATE, with what to do instead, in a child of the process that opened the
 * driver. */
rc_result cuda_driver_check_fork(const cuda_driver *driver, rc_error *error);

/* Returns the driver's name of a result: "CUDA_ERROR_OUT_OF_MEMORY"; never NULL. */
const char *cuda_error_name(const cuda_driver *driver, cu_result result);
/* Returns the meaning of a result in the driver's words: "out of memory"; never NULL. */
const char *cuda_error_text(const cuda_driver *driver, cu_result result);

/* Sets *ordinal to the number of the GPU that the memory at address lies on, or -1 if it is host
 * memory. No device need be open. */
rc_result cuda_driver_locate(const cuda_driver *driver, cu_address address, int *ordinal,
                             rc_error *error);

#endif
