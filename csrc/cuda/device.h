/* device.h - one GPU: its primary context, its properties, ringcomm's kernels on it, and pinned
 * memory for copies to and from it. The interface of cuda/ to other folders.
 *
 * The primary context is the one that the CUDA runtime uses, so torch, CuPy and ringcomm share
 * pointers, streams and events. A thread calls the driver for a device in one of two ways:
 *
 *   the library's own   device_bind_thread once; from then on the device is the thread's
 *   a caller's thread   device_enter, calls, device_leave; the thread is as it was before
 *
 * Both keep the calls out of a graph that the process is capturing. Between them calls go through
 * DEVICE_CALL, which turns a failure into an rc_error with the names of function and result.
 *
 * Kernels are loaded when the device is opened, and each is launched once with arguments of zero
 * and waited for, so that no later launch loads or compiles. A kernel must do nothing if all its
 * arguments are zero.
 *
 * Invariants. Some errors of CUDA are permanent: every later call fails with the same one until the
 * process ends; broken says that one was seen. Functions that free (device_close, device_free, ...)
 * do so whatever the driver says, and do not fail if the driver is shutting down. Threading: a
 * cuda_device is read-only between open and close, except for broken.
 */
#ifndef RINGCOMM_DEVICE_H
#define RINGCOMM_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "driver.h"

enum {
    DEVICE_NAME_BYTES = 128,
    DEVICE_REASON_BYTES = 384,
    DEVICE_MAX_PARAMETERS = 24, /* of a kernel; each of at most 64 bytes */
    DEVICE_CAPABILITY = 60      /* the least that the kernels run on: Pascal */
};

typedef struct cuda_device {
    const cuda_driver *driver;
    int ordinal;
    cu_device number; /* the driver's number for it */
    cu_context context;
    char name[DEVICE_NAME_BYTES];
    int capability; /* 86 is 8.6 */
    int copy_engines;
    int priority;         /* the most urgent that a stream can have */
    cu_module module;     /* NULL without kernels */
    cu_function *kernels; /* [kernel_count], in the order of device_open's names; NULL without */
    int kernel_count;
    char without_kernels[DEVICE_REASON_BYTES]; /* why there are no kernels, as a sentence; or "" */
    _Atomic cu_result broken;                  /* CU_OK, or the permanent error */
} cuda_device;

/* Opens GPU `ordinal`, as the driver counts them under CUDA_VISIBLE_DEVICES. image is the kernels'
 * PTX as a string, or a cubin or fatbin, or NULL for no kernels; names are those of count kernels
 * in it. A driver or a GPU too old for them, or a driver that cannot compile them, is no failure:
 * then kernels is NULL and without_kernels says why ("" if image is NULL). */
rc_result device_open(cuda_device **out, const cuda_driver *driver, int ordinal, const void *image,
                      const char *const *names, int count, rc_error *error);
/* Closes the GPU (NULL: nothing). Streams, events and memory must have been freed. In a forked
 * child it only frees the struct. */
void device_close(cuda_device *device);

/* ---- threads ---- */

typedef struct device_visit {
    unsigned capture_mode; /* of the thread, to be restored */
    int entered;
} device_visit;

/* Begin and end a caller's use of the device. RC_INVALID_STATE in a forked child. device_leave does
 * nothing after a failure. */
rc_result device_enter(cuda_device *device, device_visit *visit, rc_error *error);
void device_leave(cuda_device *device, device_visit *visit);
/* Binds one of the library's threads to the device, as its first call. */
rc_result device_bind_thread(cuda_device *device, rc_error *error);

/* ---- calls ---- */

/* Calls a function of the driver's table, on a thread that has entered or is bound: an rc_result.
 *     RC_TRY(DEVICE_CALL(device, error, cuEventRecord, event, stream)); */
#define DEVICE_CALL(device, error, function, ...)                                                  \
    device_result((device), #function, (device)->driver->function(__VA_ARGS__), (error))

/* Returns RC_OK, or RC_DEVICE with error filled; RC_NO_MEMORY if the GPU's memory is full. */
rc_result device_result(cuda_device *device, const char *function, cu_result result,
                        rc_error *error);

/* Makes a stream that does not wait for the legacy default stream, of the highest priority. */
rc_result device_stream_create(cuda_device *device, cu_stream *out, rc_error *error);
void device_stream_destroy(cuda_device *device, cu_stream stream); /* takes NULL */
/* Makes an event that a thread can sleep on. */
rc_result device_event_create(cuda_device *device, cu_event *out, rc_error *error);
void device_event_destroy(cuda_device *device, cu_event event); /* takes NULL */
/* Returns RC_OK if all before the event is done (or it was never recorded), RC_AGAIN if not. */
rc_result device_event_query(cuda_device *device, cu_event event, rc_error *error);
/* Allocates host memory of CUDA's own, pinned as by device_pin. */
rc_result device_alloc_pinned(cuda_device *device, void **out, size_t bytes, rc_error *error);
void device_free_pinned(cuda_device *device, void *at); /* takes NULL */
rc_result device_alloc(cuda_device *device, cu_address *out, size_t bytes, rc_error *error);
void device_free(cuda_device *device, cu_address address); /* takes 0; waits for the whole GPU */
/* Pins host memory of whole pages, for copies that run beside the host; all devices may use it.
 * RC_AGAIN: CUDA pins only memory of its own here, as where that of a virtual machine is encrypted;
 * device_alloc_pinned gives such. */
rc_result device_pin(cuda_device *device, void *from, size_t bytes, rc_error *error);
void device_unpin(cuda_device *device, void *from); /* takes NULL */
/* Launches kernels[kernel]; parameters point at its arguments, which are copied here. */
rc_result device_launch(cuda_device *device, int kernel, unsigned blocks, unsigned threads,
                        cu_stream stream, void **parameters, rc_error *error);

/* ---- checks of callers' pointers and streams ---- */

/* Checks that [address, address + bytes) can be used here: device memory of this GPU that CUDA did
 * not make in another context. Refuses managed memory and host memory with RC_INVALID_ARGUMENT and
 * what to do. */
rc_result device_check_pointer(cuda_device *device, cu_address address, size_t bytes,
                               rc_error *error);
/* Checks that the stream is one of this GPU's primary context and is not being captured into a
 * graph. Handle 0 and 1 are the legacy default stream, 2 the calling thread's. Refuses with
 * RC_INVALID_ARGUMENT. */
rc_result device_check_stream(cuda_device *device, cu_stream stream, rc_error *error);

/* ---- pinned.c: host memory that a GPU copies to and from, pinned once, used again and again ----
 *
 * Invariants. Blocks begin at multiples of PINNED_ALIGN, and two neighbours are never both free. A
 * block is given back before the arena is destroyed. Threading: any, by a lock of its own; taking
 * and giving back on a thread that may call the driver for the device.
 */

enum { PINNED_ALIGN = 4096 };

typedef struct pinned_block {
    uint8_t *data;
    size_t bytes;
    struct pinned_slab *slab;
    struct pinned_block *next, *prev; /* in the slab, in order of address */
    int taken;
} pinned_block;

typedef struct pinned_arena {
    cuda_device *device;
    size_t cap;    /* bytes of all slabs at most */
    size_t pinned; /* bytes of all slabs */
    struct pinned_slab *slabs;
    pthread_mutex_t lock;
    pthread_cond_t returned;
    uint64_t returns; /* blocks given back so far */
} pinned_arena;

void pinned_init(pinned_arena *arena, cuda_device *device, size_t cap);
/* Unpins and frees everything. */
void pinned_destroy(pinned_arena *arena);
/* Takes a block of at least so many bytes, more than 0. patience_ms: how long to wait for room,
 * counted anew when a block comes back. RC_NO_MEMORY or RC_DEVICE with error filled. */
rc_result pinned_take(pinned_arena *arena, size_t bytes, int patience_ms, pinned_block **out,
                      rc_error *error);
void pinned_give(pinned_arena *arena, pinned_block *block); /* takes NULL */

#endif
