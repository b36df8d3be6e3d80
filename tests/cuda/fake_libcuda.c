/* fake_libcuda.c - calls and what becomes of them, devices and contexts; see fake_libcuda.h. */
#include "fake.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_FAULTS = 16, MOST_NAMES = 96, NOT_PERMITTED = 800 };

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
fake_settings fake_set;
_Thread_local fake_thread fake_me;
cu_stream fake_captured;

static struct CUctx_st contexts[FAKE_DEVICES][2]; /* [1] is the primary one */
static _Atomic pid_t started_by;                  /* 0 before cuInit */
static _Atomic int is_over;
static int is_set_up, is_spoilt;
static char misuse[256];

static struct {
    char name[64];
    int calls;
} counts[MOST_NAMES];

static struct {
    char name[64];
    int left; /* calls until it happens; 0: no fault */
    cu_result error;
} faults[MOST_FAULTS];

void fake_blame(const char *format, ...)
{
    if (misuse[0] != '\0')
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(misuse, sizeof misuse, format, args);
    va_end(args);
}

/* ---- settings ---- */

static int number_from(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? atoi(text) : otherwise;
}

static void add_fault(const char *name, int k, int error)
{
    for (int i = 0; i < MOST_FAULTS; i++)
        if (faults[i].left == 0) {
            snprintf(faults[i].name, sizeof faults[i].name, "%s", name);
            faults[i].left = k;
            faults[i].error = (cu_result)error;
            return;
        }
    abort();
}

static void add_faults(const char *text)
{
    char name[64];
    int k, error, used;
    while (text != NULL && sscanf(text, "%63[^:]:%d:%d%n", name, &k, &error, &used) == 3) {
        add_fault(name, k, error);
        text = text[used] == ',' ? text + used + 1 : NULL;
    }
}

static void set_up(void)
{
    const char *order = getenv("FAKE_CUDA_ORDER"), *kernels = getenv("FAKE_CUDA_KERNELS");
    fake_set.init = number_from("FAKE_CUDA_INIT", 0);
    fake_set.version = number_from("FAKE_CUDA_VERSION", 12040);
    fake_set.devices = number_from("FAKE_CUDA_DEVICES", 1);
    fake_set.capability = number_from("FAKE_CUDA_CAPABILITY", 86);
    fake_set.memory = (size_t)number_from("FAKE_CUDA_MEMORY_MB", 1024) << 20;
    fake_set.early = order != NULL && strcmp(order, "early") == 0;
    snprintf(fake_set.kernels, sizeof fake_set.kernels, "%s", kernels != NULL ? kernels : "");
    if (fake_set.devices > FAKE_DEVICES)
        abort();
    add_faults(getenv("FAKE_CUDA_FAIL"));
    for (int ordinal = 0; ordinal < FAKE_DEVICES; ordinal++)
        for (int primary = 0; primary < 2; primary++)
            contexts[ordinal][primary] = (struct CUctx_st){.ordinal = ordinal, .primary = primary};
    fake_memory_set_up();
    is_set_up = 1;
}

void fake_cuda_reset(void)
{
    pthread_mutex_lock(&fake_lock);
    if (is_set_up) {
        fake_finish_all();
        fake_work_drop();
        fake_streams_drop();
        fake_memory_drop();
    }
    memset(counts, 0, sizeof counts);
    memset(faults, 0, sizeof faults);
    misuse[0] = '\0';
    fake_captured = NULL;
    is_over = 0;
    is_spoilt = 0;
    fake_me = (fake_thread){0};
    set_up();
    pthread_mutex_unlock(&fake_lock);
}

/* ---- calls ---- */

static int *calls_of(const char *name)
{
    for (int i = 0; i < MOST_NAMES; i++) {
        if (counts[i].name[0] == '\0')
            snprintf(counts[i].name, sizeof counts[i].name, "%s", name);
        if (strcmp(counts[i].name, name) == 0)
            return &counts[i].calls;
    }
    abort();
}

static cu_result fault_of(const char *name, unsigned flags)
{
    cu_result error = CU_OK;
    for (int i = 0; i < MOST_FAULTS; i++) {
        int any = strcmp(faults[i].name, "*") == 0 && !(flags & FAKE_ALWAYS);
        if (faults[i].left > 0 && (any || strcmp(faults[i].name, name) == 0))
            if (--faults[i].left == 0)
                error = faults[i].error;
    }
    return error;
}

static int is_for_good(cu_result error)
{
    return error == CU_ECC_UNCORRECTABLE || error == CU_ILLEGAL_ADDRESS ||
           (error >= 714 && error <= CU_LAUNCH_FAILED);
}

static cu_result refusal(const char *name, unsigned flags)
{
    cu_context context = fake_current();
    if (fake_me.in_host_function) {
        fake_blame("%s is called from a host function", name);
        return NOT_PERMITTED;
    }
    if (is_over)
        return CU_DEINITIALIZED;
    if (started_by == 0 && !(flags & FAKE_ALWAYS))
        return CU_NOT_INITIALIZED;
    if ((flags & FAKE_CONTEXT) && context == NULL)
        return CU_INVALID_CONTEXT;
    cu_result error = fault_of(name, flags);
    if (error != CU_OK) {
        if (is_for_good(error) && context != NULL)
            context->broken = error;
        return error;
    }
    if (context != NULL && context->broken != CU_OK && !(flags & (FAKE_ALWAYS | FAKE_SURVIVES)))
        return context->broken;
    if ((flags & FAKE_UNSAFE) && fake_captured != NULL &&
        fake_me.capture_mode != CU_CAPTURE_RELAXED) {
        fake_spoil_capture();
        return CU_STREAM_CAPTURE_UNSUPPORTED;
    }
    return CU_OK;
}

int fake_enter(const char *name, unsigned flags, cu_result *failed)
{
    /* In a child the lock may be that of a thread that is not there. */
    *failed = CU_NOT_INITIALIZED;
    if (started_by != 0 && started_by != getpid())
        return 0;
    pthread_mutex_lock(&fake_lock);
    ++*calls_of(name);
    *failed = refusal(name, flags);
    if (*failed == CU_OK || (flags & FAKE_GIVES_BACK))
        return 1;
    pthread_mutex_unlock(&fake_lock);
    return 0;
}

cu_result fake_leave(cu_result failed, cu_result result)
{
    pthread_mutex_unlock(&fake_lock);
    return failed != CU_OK ? failed : result;
}

int fake_cuda_calls(const char *name)
{
    pthread_mutex_lock(&fake_lock);
    int calls = *calls_of(name);
    pthread_mutex_unlock(&fake_lock);
    return calls;
}

void fake_cuda_fail(const char *name, int k, int error)
{
    pthread_mutex_lock(&fake_lock);
    add_fault(name, k, error);
    pthread_mutex_unlock(&fake_lock);
}

int fake_cuda_faults(void)
{
    int left = 0;
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < MOST_FAULTS; i++)
        left += faults[i].left > 0;
    pthread_mutex_unlock(&fake_lock);
    return left;
}

void fake_cuda_deinitialize(void)
{
    pthread_mutex_lock(&fake_lock);
    is_over = 1;
    pthread_mutex_unlock(&fake_lock);
}

const char *fake_cuda_misuse(void)
{
    pthread_mutex_lock(&fake_lock);
    const char *text = misuse[0] != '\0' ? misuse : NULL;
    pthread_mutex_unlock(&fake_lock);
    return text;
}

/* Other libraries' static objects may still call when the process ends. */
__attribute__((destructor)) static void end(void)
{
    is_over = 1;
}

/* ---- the driver ---- */

cu_result cuInit(unsigned flags)
{
    FAKE_ENTER(cuInit, FAKE_ALWAYS);
    if (!is_set_up)
        set_up();
    if (flags != 0)
        FAKE_LEAVE(CU_INVALID_VALUE);
    if (fake_set.init == CU_OK)
        started_by = getpid();
    FAKE_LEAVE((cu_result)fake_set.init);
}

cu_result cuDriverGetVersion(int *version)
{
    FAKE_ENTER(cuDriverGetVersion, FAKE_ALWAYS);
    *version = fake_set.version;
    FAKE_LEAVE(CU_OK);
}

static const struct {
    cu_result result;
    const char *name, *text;
} results[] = {
    {CU_OK, "CUDA_SUCCESS", "no error"},
    {CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CU_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CU_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CU_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CU_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CU_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CU_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CU_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CU_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static cu_result describe(cu_result result, const char **name, const char **text)
{
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].result == result) {
            *name = results[i].name;
            *text = results[i].text;
            return CU_OK;
        }
    return CU_INVALID_VALUE;
}

cu_result cuGetErrorName(cu_result result, const char **text)
{
    const char *other;
    *text = NULL;
    return describe(result, text, &other);
}

cu_result cuGetErrorString(cu_result result, const char **text)
{
    const char *other;
    *text = NULL;
    return describe(result, &other, text);
}

/* ---- devices ---- */

static int is_device(cu_device device)
{
    return device >= 0 && device < fake_set.devices;
}

cu_result cuDeviceGetCount(int *count)
{
    FAKE_ENTER(cuDeviceGetCount, FAKE_SURVIVES);
    *count = fake_set.devices;
    FAKE_LEAVE(CU_OK);
}

cu_result cuDeviceGet(cu_device *device, int ordinal)
{
    FAKE_ENTER(cuDeviceGet, FAKE_SURVIVES);
    *device = ordinal;
    FAKE_LEAVE(is_device(ordinal) ? CU_OK : CU_INVALID_DEVICE);
}

cu_result cuDeviceGetName(char *name, int bytes, cu_device device)
{
    FAKE_ENTER(cuDeviceGetName, FAKE_SURVIVES);
    if (bytes > 0)
        snprintf(name, (size_t)bytes, "Fake GPU %d", device);
    FAKE_LEAVE(is_device(device) ? CU_OK : CU_INVALID_DEVICE);
}

cu_result cuDeviceGetAttribute(int *value, unsigned attribute, cu_device device)
{
    FAKE_ENTER(cuDeviceGetAttribute, FAKE_SURVIVES);
    if (!is_device(device))
        FAKE_LEAVE(CU_INVALID_DEVICE);
    switch (attribute) {
    case CU_DEVICE_ASYNC_ENGINES: *value = 2; break;
    case CU_DEVICE_CAPABILITY_MAJOR: *value = fake_set.capability / 10; break;
    case CU_DEVICE_CAPABILITY_MINOR: *value = fake_set.capability % 10; break;
    default: FAKE_LEAVE(CU_INVALID_VALUE);
    }
    FAKE_LEAVE(CU_OK);
}

/* ---- contexts ---- */

cu_context fake_context(int ordinal, int primary)
{
    return &contexts[ordinal][primary];
}

cu_context fake_current(void)
{
    return fake_me.depth > 0 ? fake_me.stack[fake_me.depth - 1] : NULL;
}

int fake_cuda_depth(void)
{
    return fake_me.depth;
}

cu_result cuDevicePrimaryCtxRetain(cu_context *context, cu_device device)
{
    FAKE_ENTER(cuDevicePrimaryCtxRetain, FAKE_SURVIVES);
    if (!is_device(device))
        FAKE_LEAVE(CU_INVALID_DEVICE);
    *context = fake_context(device, 1);
    (*context)->retained++;
    FAKE_LEAVE(CU_OK);
}

cu_result cuDevicePrimaryCtxRelease_v2(cu_device device)
{
    FAKE_ENTER(cuDevicePrimaryCtxRelease_v2, FAKE_SURVIVES | FAKE_GIVES_BACK);
    if (!is_device(device))
        FAKE_LEAVE(CU_INVALID_DEVICE);
    cu_context context = fake_context(device, 1);
    if (context->retained == 0) {
        fake_blame("cuDevicePrimaryCtxRelease without a retain");
        FAKE_LEAVE(CU_INVALID_CONTEXT);
    }
    if (--context->retained == 0)
        fake_finish_all();
    FAKE_LEAVE(CU_OK);
}

cu_result cuCtxPushCurrent_v2(cu_context context)
{
    FAKE_ENTER(cuCtxPushCurrent_v2, FAKE_SURVIVES);
    if (context == NULL || (context->primary && context->retained == 0))
        FAKE_LEAVE(CU_INVALID_CONTEXT);
    if (fake_me.depth == FAKE_DEPTH)
        abort();
    fake_me.stack[fake_me.depth++] = context;
    FAKE_LEAVE(CU_OK);
}

cu_result cuCtxPopCurrent_v2(cu_context *context)
{
    FAKE_ENTER(cuCtxPopCurrent_v2, FAKE_SURVIVES | FAKE_GIVES_BACK);
    if (fake_me.depth == 0)
        FAKE_LEAVE(CU_INVALID_CONTEXT);
    fake_me.depth--;
    if (context != NULL)
        *context = fake_me.stack[fake_me.depth];
    FAKE_LEAVE(CU_OK);
}

cu_result cuCtxSetCurrent(cu_context context)
{
    FAKE_ENTER(cuCtxSetCurrent, FAKE_SURVIVES);
    if (context == NULL)
        fake_me.depth = fake_me.depth > 0 ? fake_me.depth - 1 : 0;
    else {
        fake_me.depth = fake_me.depth > 0 ? fake_me.depth : 1;
        fake_me.stack[fake_me.depth - 1] = context;
    }
    FAKE_LEAVE(CU_OK);
}

cu_result cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    FAKE_ENTER(cuCtxGetStreamPriorityRange, FAKE_CONTEXT);
    *least = 0;
    *greatest = -5;
    FAKE_LEAVE(CU_OK);
}

/* ---- capture ---- */

void fake_spoil_capture(void)
{
    is_spoilt = 1;
}

int fake_cuda_capture(cu_stream stream, int on)
{
    pthread_mutex_lock(&fake_lock);
    int good = !is_spoilt;
    is_spoilt = 0;
    fake_captured = on ? stream : NULL;
    stream->capturing = on;
    pthread_mutex_unlock(&fake_lock);
    return good;
}

int fake_cuda_capture_mode(void)
{
    return (int)fake_me.capture_mode;
}

cu_result cuThreadExchangeStreamCaptureMode(unsigned *mode)
{
    FAKE_ENTER(cuThreadExchangeStreamCaptureMode, FAKE_SURVIVES);
    unsigned before = fake_me.capture_mode;
    fake_me.capture_mode = *mode;
    *mode = before;
    FAKE_LEAVE(before <= CU_CAPTURE_RELAXED ? CU_OK : CU_INVALID_VALUE);
}

void fake_cuda_order_early(int early)
{
    pthread_mutex_lock(&fake_lock);
    fake_set.early = early;
    pthread_mutex_unlock(&fake_lock);
}

/* ---- what is left ---- */

int fake_cuda_leaks(const char *kind)
{
    pthread_mutex_lock(&fake_lock);
    int retained = 0;
    for (int ordinal = 0; ordinal < FAKE_DEVICES; ordinal++)
        retained += contexts[ordinal][1].retained;
    const struct {
        const char *kind;
        int left;
    } all[] = {{"contexts", retained},          {"streams", fake_stream_leaks()},
               {"events", fake_event_leaks()},  {"modules", fake_module_leaks()},
               {"memory", fake_memory_leaks()}, {"pinned", fake_pinned_leaks()}};
    int left = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (kind == NULL || strcmp(kind, all[i].kind) == 0)
            left += all[i].left;
    pthread_mutex_unlock(&fake_lock);
    return left;
}
