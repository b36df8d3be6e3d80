/* fake_work.c - what streams do: copies, kernels, host functions; see fake_libcuda.h. */
#include "fake.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- copies ---- */

static cu_result copy(fake_item *item)
{
    pthread_mutex_lock(&fake_lock);
    void *to = item->to != 0 ? fake_reach(item->to, item->bytes) : item->host;
    const void *from = item->from != 0 ? fake_reach(item->from, item->bytes) : item->host;
    pthread_mutex_unlock(&fake_lock);
    if (to == NULL || from == NULL)
        return CU_ILLEGAL_ADDRESS; /* freed since */
    memmove(to, from, item->bytes);
    return CU_OK;
}

static fake_item *make_copy(cu_address to, cu_address from, void *host, size_t bytes)
{
    fake_item *item = fake_item_make(copy);
    item->to = to;
    item->from = from;
    item->host = host;
    item->bytes = bytes;
    return item;
}

cu_result cuMemcpyDtoHAsync_v2(void *to, cu_address from, size_t bytes, cu_stream stream)
{
    FAKE_ENTER(cuMemcpyDtoHAsync_v2, FAKE_CONTEXT);
    if (bytes == 0)
        FAKE_LEAVE(CU_OK);
    if (fake_reach(from, bytes) == NULL || fake_is_device((cu_address)(uintptr_t)to))
        FAKE_LEAVE(CU_INVALID_VALUE);
    int waits = !fake_is_pinned(to, bytes);
    cu_result result = fake_queue(stream, make_copy(0, from, to, bytes));
    if (result == CU_OK && waits)
        result = fake_finish(fake_stream(stream));
    FAKE_LEAVE(result);
}

cu_result cuMemcpyHtoDAsync_v2(cu_address to, const void *from, size_t bytes, cu_stream stream)
{
    FAKE_ENTER(cuMemcpyHtoDAsync_v2, FAKE_CONTEXT);
    if (bytes == 0)
        FAKE_LEAVE(CU_OK);
    if (fake_reach(to, bytes) == NULL || fake_is_device((cu_address)(uintptr_t)from))
        FAKE_LEAVE(CU_INVALID_VALUE);
    void *host = (void *)(uintptr_t)from; /* only read */
    int staged = !fake_is_pinned(from, bytes);
    if (staged) {
        host = malloc(bytes);
        if (host == NULL)
            abort();
        memcpy(host, from, bytes);
    }
    fake_item *item = make_copy(to, 0, host, bytes);
    item->staged = staged;
    FAKE_LEAVE(fake_queue(stream, item));
}

cu_result cuMemcpyDtoDAsync_v2(cu_address to, cu_address from, size_t bytes, cu_stream stream)
{
    FAKE_ENTER(cuMemcpyDtoDAsync_v2, FAKE_CONTEXT);
    if (bytes == 0)
        FAKE_LEAVE(CU_OK);
    if (fake_reach(to, bytes) == NULL || fake_reach(from, bytes) == NULL)
        FAKE_LEAVE(CU_INVALID_VALUE);
    FAKE_LEAVE(fake_queue(stream, make_copy(to, from, NULL, bytes)));
}

static cu_result run_fill(fake_item *item)
{
    pthread_mutex_lock(&fake_lock);
    uint32_t *at = fake_reach(item->to, item->bytes);
    pthread_mutex_unlock(&fake_lock);
    if (at == NULL)
        return CU_ILLEGAL_ADDRESS;
    for (size_t i = 0; i < item->bytes / sizeof *at; i++)
        at[i] = item->value;
    return CU_OK;
}

cu_result cuMemsetD32Async(cu_address to, unsigned value, size_t count, cu_stream stream)
{
    FAKE_ENTER(cuMemsetD32Async, FAKE_CONTEXT);
    size_t bytes = count * sizeof(uint32_t);
    if (count == 0)
        FAKE_LEAVE(CU_OK);
    if (to % sizeof(uint32_t) != 0 || fake_reach(to, bytes) == NULL)
        FAKE_LEAVE(CU_INVALID_VALUE);
    fake_item *item = fake_item_make(run_fill);
    item->to = to;
    item->bytes = bytes;
    item->value = value;
    FAKE_LEAVE(fake_queue(stream, item));
}

/* ---- modules ---- */

struct CUfunc_st {
    char name[128];
    int count;                         /* of parameters */
    unsigned offsets[FAKE_PARAMETERS]; /* in 8-byte words */
    unsigned bytes[FAKE_PARAMETERS];
    struct CUfunc_st *next;
};

struct CUmod_st {
    cu_function functions;
    struct CUmod_st *next;
};

static cu_module modules;

/* The size in ".param .u64 .ptr .global name", ".param .align 8 .b8 name[16]", ... */
static unsigned parameter_bytes(const char *text, const char *end)
{
    unsigned bytes = 0, many = 1;
    for (const char *at = text; at < end && bytes == 0; at++)
        if (at[0] == '.' && strchr("bsuf", at[1]) != NULL && isdigit((unsigned char)at[2]))
            bytes = (unsigned)atoi(at + 2) / 8;
    const char *bracket = memchr(text, '[', (size_t)(end - text));
    if (bracket != NULL)
        many = (unsigned)atoi(bracket + 1);
    return bytes * many;
}

static void read_parameters(cu_function f, const char *at)
{
    unsigned offset = 0;
    const char *end = strchr(at, ')');
    while (end != NULL && (at = strstr(at, ".param")) != NULL && at < end) {
        const char *comma = strchr(at, ',');
        const char *stop = comma != NULL && comma < end ? comma : end;
        if (f->count == FAKE_PARAMETERS || offset >= FAKE_PARAMETER_BYTES / 8)
            abort();
        f->offsets[f->count] = offset;
        f->bytes[f->count] = parameter_bytes(at + 6, stop);
        offset += (f->bytes[f->count] + 7) / 8;
        f->count++;
        at = stop;
    }
}

/* Each is read from a copy of its head: sanitizers look through all that is behind a string, as
 * often as it is searched. */
static void read_functions(cu_module module, const char *ptx)
{
    for (const char *at = ptx; (at = strstr(at, ".entry")) != NULL; at += strlen(".entry")) {
        cu_function f = calloc(1, sizeof *f);
        const char *end = strchr(at, ')');
        char *head = end != NULL ? strndup(at, (size_t)(end - at) + 1) : strdup(at);
        if (f == NULL || head == NULL || sscanf(head, ".entry %127[A-Za-z0-9_$]", f->name) != 1)
            abort();
        const char *bracket = strchr(head, '(');
        if (bracket != NULL)
            read_parameters(f, bracket);
        free(head);
        f->next = module->functions;
        module->functions = f;
    }
}

static int number_after(const char *text, const char *word)
{
    const char *at = strstr(text, word);
    return at != NULL ? atoi(at + strlen(word)) : -1;
}

static cu_result judge(const char *ptx)
{
    int isa = number_after(ptx, ".version "), target = number_after(ptx, ".target sm_");
    if (isa < 0 || target < 0 || strstr(ptx, ".entry") == NULL)
        return CU_INVALID_IMAGE;
    if (isa > fake_set.version / 1000 - 4) /* 8.0 came with CUDA 12, 9.0 with 13 */
        return CU_UNSUPPORTED_PTX_VERSION;
    return target > fake_set.capability ? CU_NO_BINARY_FOR_GPU : CU_OK;
}

static void log_error(unsigned count, const unsigned *options, void **values, const char *text)
{
    char *log = NULL;
    size_t bytes = 0;
    for (unsigned i = 0; i < count; i++) {
        if (options[i] == CU_JIT_ERROR_LOG)
            log = values[i];
        if (options[i] == CU_JIT_ERROR_LOG_BYTES)
            bytes = (size_t)(uintptr_t)values[i];
    }
    if (log != NULL && bytes > 0)
        snprintf(log, bytes, "%s", text);
}

cu_result cuModuleLoadDataEx(cu_module *module, const void *image, unsigned count,
                             unsigned *options, void **values)
{
    FAKE_ENTER(cuModuleLoadDataEx, FAKE_CONTEXT | FAKE_UNSAFE);
    cu_result result = judge(image);
    if (result != CU_OK) {
        log_error(count, options, values, "ptxas fatal   : it was refused\nby the fake driver\n");
        FAKE_LEAVE(result);
    }
    *module = calloc(1, sizeof **module);
    if (*module == NULL)
        abort();
    read_functions(*module, image);
    (*module)->next = modules;
    modules = *module;
    FAKE_LEAVE(CU_OK);
}

static void free_module(cu_module module)
{
    for (cu_function f = module->functions, next; f != NULL; f = next) {
        next = f->next;
        free(f);
    }
    free(module);
}

cu_result cuModuleUnload(cu_module module)
{
    FAKE_ENTER(cuModuleUnload, FAKE_CONTEXT | FAKE_GIVES_BACK);
    fake_finish_all(); /* which lets other threads in */
    cu_module *place = &modules;
    while (*place != NULL && *place != module)
        place = &(*place)->next;
    if (*place == NULL) {
        fake_blame("cuModuleUnload of what is no module");
        FAKE_LEAVE(CU_INVALID_HANDLE);
    }
    *place = module->next;
    free_module(module);
    FAKE_LEAVE(CU_OK);
}

cu_result cuModuleGetFunction(cu_function *function, cu_module module, const char *name)
{
    FAKE_ENTER(cuModuleGetFunction, FAKE_CONTEXT);
    for (cu_function f = module->functions; f != NULL; f = f->next)
        if (strcmp(f->name, name) == 0) {
            *function = f;
            FAKE_LEAVE(CU_OK);
        }
    FAKE_LEAVE(CU_NOT_FOUND);
}

int fake_module_leaks(void)
{
    int left = 0;
    for (cu_module m = modules; m != NULL; m = m->next)
        left++;
    return left;
}

/* ---- kernels ---- */

static int (*emulated_launch)(const char *name, unsigned grid, unsigned block, void **params);
static _Thread_local int is_astray; /* a kernel got a pointer that a GPU could not use */

static void *reach(void *device)
{
    cu_address at = (cu_address)(uintptr_t)device;
    pthread_mutex_lock(&fake_lock);
    void *here = fake_is_device(at) ? fake_reach(at, 1) : device;
    if (here == device && !fake_is_pinned(device, 1))
        is_astray = 1;
    pthread_mutex_unlock(&fake_lock);
    return here;
}

static void load_emulation(void)
{
    if (emulated_launch != NULL)
        return;
    void *library = dlopen(fake_set.kernels, RTLD_NOW | RTLD_LOCAL);
    void (*map)(void *(*)(void *)) = NULL;
    if (library != NULL) {
        *(void **)&emulated_launch = dlsym(library, "emulated_launch");
        *(void **)&map = dlsym(library, "emulated_map");
    }
    if (emulated_launch == NULL || map == NULL) {
        fprintf(stderr, "FAKE_CUDA_KERNELS is no emulation of kernels: %s\n", dlerror());
        abort();
    }
    map(reach);
}

static int is_known(cu_function function)
{
    for (cu_module m = modules; m != NULL; m = m->next)
        for (cu_function f = m->functions; f != NULL; f = f->next)
            if (f == function)
                return 1;
    fake_blame("a kernel is launched that is not loaded");
    return 0;
}

/* An argument that only looks like a pointer is no danger: nothing else is as large. */
static int is_lost(const fake_item *item)
{
    int lost = 0;
    pthread_mutex_lock(&fake_lock);
    for (size_t i = 0; i < sizeof item->values / sizeof item->values[0]; i++)
        lost |= fake_is_device(item->values[i]) && fake_reach(item->values[i], 1) == NULL;
    pthread_mutex_unlock(&fake_lock);
    return lost;
}

static cu_result run_kernel(fake_item *item)
{
    if (is_lost(item))
        return CU_ILLEGAL_ADDRESS;
    is_astray = 0;
    int result = emulated_launch(item->kernel, item->blocks, item->threads, item->parameters);
    return is_astray ? CU_ILLEGAL_ADDRESS : (cu_result)result;
}

/* Without an emulation nothing runs; launches that do nothing are all that is then right. */
static cu_result run_nothing(fake_item *item)
{
    for (size_t i = 0; i < sizeof item->values / sizeof item->values[0]; i++)
        if (item->values[i] != 0)
            return CU_LAUNCH_FAILED;
    return CU_OK;
}

cu_result cuLaunchKernel(cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z,
                         unsigned shared_bytes, cu_stream stream, void **parameters, void **extra)
{
    FAKE_ENTER(cuLaunchKernel, FAKE_CONTEXT);
    (void)shared_bytes;
    if (!is_known(function))
        FAKE_LEAVE(CU_INVALID_HANDLE);
    if (grid_x == 0 || block_x == 0 || block_x > 1024 || grid_y * grid_z * block_y * block_z != 1 ||
        extra != NULL)
        FAKE_LEAVE(CU_INVALID_VALUE);
    int emulated = fake_set.kernels[0] != '\0';
    if (emulated)
        load_emulation();
    fake_item *item = fake_item_make(emulated ? run_kernel : run_nothing);
    item->kernel = function->name;
    item->blocks = grid_x;
    item->threads = block_x;
    for (int i = 0; i < function->count; i++) {
        item->parameters[i] = &item->values[function->offsets[i]];
        memcpy(item->parameters[i], parameters[i], function->bytes[i]);
    }
    FAKE_LEAVE(fake_queue(stream, item));
}

static cu_result run_add(fake_item *item)
{
    pthread_mutex_lock(&fake_lock);
    float *at = fake_reach(item->to, item->bytes);
    pthread_mutex_unlock(&fake_lock);
    if (at == NULL)
        return CU_ILLEGAL_ADDRESS;
    for (size_t i = 0; i < item->bytes / sizeof *at; i++)
        at[i] += item->addend;
    return CU_OK;
}

cu_result fake_cuda_add(cu_stream stream, cu_address at, float value, size_t count)
{
    FAKE_ENTER(fake_cuda_add, FAKE_CONTEXT);
    fake_item *item = fake_item_make(run_add);
    item->to = at;
    item->bytes = count * sizeof(float);
    item->addend = value;
    FAKE_LEAVE(fake_queue(stream, item));
}

/* ---- host functions ---- */

static cu_result run_host_function(fake_item *item)
{
    item->call(item->data);
    return CU_OK;
}

cu_result fake_cuda_run(cu_stream stream, cu_host_function *kernel, void *data)
{
    FAKE_ENTER(fake_cuda_run, FAKE_CONTEXT);
    fake_item *item = fake_item_make(run_host_function);
    item->call = kernel;
    item->data = data;
    FAKE_LEAVE(fake_queue(stream, item));
}

cu_result cuLaunchHostFunc(cu_stream stream, cu_host_function *call, void *data)
{
    FAKE_ENTER(cuLaunchHostFunc, FAKE_CONTEXT);
    fake_item *item = fake_item_make(run_host_function);
    item->is_host_function = 1;
    item->call = call;
    item->data = data;
    FAKE_LEAVE(fake_queue(stream, item));
}

void fake_work_drop(void)
{
    for (cu_module m = modules, next; m != NULL; m = next) {
        next = m->next;
        free_module(m);
    }
    modules = NULL;
}
