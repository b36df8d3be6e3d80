/* fake.h - what the files of the fake driver share. Everything here is under fake_lock, but for
 * what belongs to a thread.
 *
 *   fake_libcuda.c  calls and what becomes of them, devices and contexts
 *   fake_memory.c   memory of devices, pinned memory, what a pointer points to
 *   fake_streams.c  streams, events, and the thread that is the GPU
 *   fake_work.c     what streams do: copies, kernels, host functions
 */
#ifndef RINGCOMM_TEST_FAKE_H
#define RINGCOMM_TEST_FAKE_H

#include <pthread.h>
#include <stdint.h>

#include "fake_libcuda.h"

enum { FAKE_DEVICES = 4, FAKE_DEPTH = 16, FAKE_PARAMETERS = 32, FAKE_PARAMETER_BYTES = 512 };

/* ---- things ---- */

typedef struct fake_item fake_item;

struct CUstream_st {
    cu_context context;
    unsigned flags;
    const void *thread;                /* whose default stream it is, or NULL */
    fake_item *first, *last;           /* queued and not run */
    uint64_t queued, wanted, done;     /* numbers of items */
    int legacy, given_back, capturing; /* given_back: the handle is not valid any more */
    unsigned linger_ms;                /* how long who waits for it on the host does not */
    struct CUstream_st *next;
};

struct CUevent_st {
    cu_context context;
    cu_stream stream; /* where it was recorded, or NULL */
    uint64_t number;
    int given_back;
    struct CUevent_st *next;
};

struct CUctx_st {
    int ordinal, primary, retained;
    cu_result broken;
    cu_stream legacy;
};

/* A piece of work; run gets it without the lock. */
struct fake_item {
    cu_result (*run)(fake_item *item);
    fake_item *next;
    uint64_t number;
    int is_host_function;
    struct fake_need {
        cu_stream stream;
        uint64_t number;
    } *needs;
    int need_count;
    /* copies */
    void *host;          /* the host's end, or what was staged of it */
    cu_address to, from; /* the device's ends */
    size_t bytes;
    int staged;
    /* kernels and host functions */
    const char *kernel;
    unsigned blocks, threads;
    void *parameters[FAKE_PARAMETERS];
    uint64_t values[FAKE_PARAMETER_BYTES / 8];
    cu_host_function *call;
    void *data;
    float addend;
    uint32_t value;
};

typedef struct fake_settings {
    int init, version, devices, capability, early;
    size_t memory;
    char kernels[512];
} fake_settings;

typedef struct fake_thread {
    cu_context stack[FAKE_DEPTH];
    int depth;
    unsigned capture_mode;
    int in_host_function;
} fake_thread;

extern pthread_mutex_t fake_lock;
extern fake_settings fake_set;
extern _Thread_local fake_thread fake_me;

/* ---- calls ---- */

enum {
    FAKE_ALWAYS = 1,     /* works without cuInit and in a broken context, and "*" is not for it */
    FAKE_CONTEXT = 2,    /* needs a current context */
    FAKE_UNSAFE = 4,     /* spoils a graph that is being captured, unless the thread is relaxed */
    FAKE_SURVIVES = 8,   /* works in a broken context */
    FAKE_GIVES_BACK = 16 /* acts even if it fails */
};

/* 1, with the lock held, if the function is to act; 0 if it returns *failed. */
int fake_enter(const char *name, unsigned flags, cu_result *failed);
cu_result fake_leave(cu_result failed, cu_result result);

#define FAKE_ENTER(function, flags)                                                                \
    cu_result failed = CU_OK;                                                                      \
    if (!fake_enter(#function, flags, &failed))                                                    \
    return failed
#define FAKE_LEAVE(result) return fake_leave(failed, result)

/* The thread's, or NULL. */
cu_context fake_current(void);
cu_context fake_context(int ordinal, int primary);
void fake_blame(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A graph was being captured, and now cannot be. */
void fake_spoil_capture(void);
extern cu_stream fake_captured; /* the stream that is being captured, or NULL */

/* ---- memory ---- */

void fake_memory_set_up(void);
void fake_memory_drop(void);
int fake_memory_leaks(void);
int fake_pinned_leaks(void);
/* Where the host can get at device memory; NULL if it is not within one allocation. */
void *fake_reach(cu_address at, size_t bytes);
/* 1 if it is an address that only a device has. */
int fake_is_device(cu_address at);
int fake_is_pinned(const void *from, size_t bytes);

/* ---- streams ---- */

/* The stream of a handle, for the current context; NULL if it is none. */
cu_stream fake_stream(cu_stream handle);
fake_item *fake_item_make(cu_result (*run)(fake_item *item));
/* Frees the item on failure. */
cu_result fake_queue(cu_stream handle, fake_item *item);
/* Until all that is queued there has run; lets go of the lock meanwhile. */
cu_result fake_finish(cu_stream stream);
cu_result fake_finish_all(void);
/* 1 if a copy that has not run reads or writes this host memory. */
int fake_is_copied(const void *from, size_t bytes);
void fake_streams_drop(void);
int fake_stream_leaks(void);
int fake_event_leaks(void);

/* ---- work ---- */

void fake_work_drop(void);
int fake_module_leaks(void);

#endif
