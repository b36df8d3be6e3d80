/* fake_memory.c - memory of devices, pinned memory, what a pointer points to; see fake_libcuda.h.
 *
 * A device's memory is a file mapped twice: where its addresses are nobody may read or write, and
 * the driver works through the other view. Behind every allocation is a guard that nothing may
 * change.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGN = 512, GUARD = 512, GUARD_BYTE = 0xee, NAN_BYTE = 0xff };

typedef struct block {
    cu_address at;
    size_t bytes;
    int ordinal, managed;
    cu_context context; /* NULL for memory of a pool */
    struct block *next; /* on this device, in order of address */
} block;

typedef struct pinned {
    uint8_t *from;
    size_t bytes;
    int ordinal, own; /* own: made by cuMemHostAlloc */
    cu_context context;
    struct pinned *next;
} pinned;

static struct {
    uint8_t *addresses, *view;
    size_t bytes;
    block *blocks;
} memory[FAKE_DEVICES];
static pinned *all_pinned;

/* ---- devices' memory ---- */

static void *map(int fd, size_t bytes, int protection)
{
    void *at = mmap(NULL, bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED)
        abort();
    return at;
}

void fake_memory_set_up(void)
{
    for (int i = 0; i < fake_set.devices; i++) {
        int fd = memfd_create("fake GPU", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)fake_set.memory) != 0)
            abort();
        memory[i].addresses = map(fd, fake_set.memory, PROT_NONE);
        memory[i].view = map(fd, fake_set.memory, PROT_READ | PROT_WRITE);
        memory[i].bytes = fake_set.memory;
        close(fd);
    }
}

void fake_memory_drop(void)
{
    for (int i = 0; i < FAKE_DEVICES; i++) {
        for (block *b = memory[i].blocks, *next; b != NULL; b = next) {
            next = b->next;
            free(b);
        }
        if (memory[i].bytes > 0) {
            munmap(memory[i].addresses, memory[i].bytes);
            munmap(memory[i].view, memory[i].bytes);
        }
        memset(&memory[i], 0, sizeof memory[i]);
    }
    for (pinned *p = all_pinned, *next; p != NULL; p = next) {
        next = p->next;
        if (p->own)
            munmap(p->from, p->bytes);
        free(p);
    }
    all_pinned = NULL;
}

static int device_of(cu_address at)
{
    for (int i = 0; i < FAKE_DEVICES; i++)
        if (at - (cu_address)(uintptr_t)memory[i].addresses < memory[i].bytes)
            return i;
    return -1;
}

int fake_is_device(cu_address at)
{
    return device_of(at) >= 0;
}

static uint8_t *view_of(int ordinal, cu_address at)
{
    return memory[ordinal].view + (at - (cu_address)(uintptr_t)memory[ordinal].addresses);
}

static block *find(cu_address at, size_t bytes)
{
    int ordinal = device_of(at);
    for (block *b = ordinal < 0 ? NULL : memory[ordinal].blocks; b != NULL; b = b->next)
        if (at - b->at < b->bytes || (at == b->at && bytes == 0))
            return bytes <= b->bytes - (at - b->at) ? b : NULL;
    return NULL;
}

void *fake_reach(cu_address at, size_t bytes)
{
    block *b = find(at, bytes);
    return b != NULL ? view_of(b->ordinal, at) : NULL;
}

/* With its guard, in whole units. */
static size_t room(size_t bytes)
{
    return (bytes + GUARD + ALIGN - 1) / ALIGN * ALIGN;
}

static block *make_block(int ordinal, size_t bytes)
{
    cu_address start = (cu_address)(uintptr_t)memory[ordinal].addresses, at = start + ALIGN;
    block **place = &memory[ordinal].blocks;
    while (*place != NULL && (*place)->at - at < room(bytes)) {
        at = (*place)->at + room((*place)->bytes);
        place = &(*place)->next;
    }
    if (bytes > memory[ordinal].bytes || at - start + room(bytes) > memory[ordinal].bytes)
        return NULL;
    block *b = calloc(1, sizeof *b);
    if (b == NULL)
        abort();
    *b = (block){.at = at, .bytes = bytes, .ordinal = ordinal, .next = *place};
    *place = b;
    memset(view_of(ordinal, at), NAN_BYTE, bytes);
    memset(view_of(ordinal, at) + bytes, GUARD_BYTE, GUARD);
    return b;
}

static int is_whole(const block *b)
{
    const uint8_t *guard = view_of(b->ordinal, b->at) + b->bytes;
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != GUARD_BYTE)
            return 0;
    return 1;
}

cu_result cuMemAlloc_v2(cu_address *address, size_t bytes)
{
    FAKE_ENTER(cuMemAlloc_v2, FAKE_CONTEXT | FAKE_UNSAFE);
    cu_context context = fake_current();
    if (bytes == 0)
        FAKE_LEAVE(CU_INVALID_VALUE);
    block *b = make_block(context->ordinal, bytes);
    if (b == NULL)
        FAKE_LEAVE(CU_OUT_OF_MEMORY);
    b->context = context;
    *address = b->at;
    FAKE_LEAVE(CU_OK);
}

cu_result cuMemFree_v2(cu_address address)
{
    FAKE_ENTER(cuMemFree_v2, FAKE_CONTEXT | FAKE_UNSAFE | FAKE_GIVES_BACK);
    block *b = find(address, 0);
    if (b == NULL || b->at != address) {
        fake_blame("cuMemFree of 0x%llx, which is no allocation", address);
        FAKE_LEAVE(CU_INVALID_VALUE);
    }
    fake_finish_all();
    if (!is_whole(b))
        fake_blame("something was written past the end of the %zu bytes at 0x%llx", b->bytes,
                   address);
    memset(view_of(b->ordinal, b->at), NAN_BYTE, b->bytes);
    block **place = &memory[b->ordinal].blocks;
    while (*place != b)
        place = &(*place)->next;
    *place = b->next;
    free(b);
    FAKE_LEAVE(CU_OK);
}

cu_address fake_cuda_memory(int ordinal, size_t bytes, int kind)
{
    pthread_mutex_lock(&fake_lock);
    block *b = make_block(ordinal, bytes);
    if (b != NULL) {
        b->managed = kind == FAKE_MANAGED;
        b->context = kind == FAKE_POOLED ? NULL : fake_context(ordinal, kind == FAKE_MANAGED);
    }
    pthread_mutex_unlock(&fake_lock);
    return b != NULL ? b->at : 0;
}

int fake_memory_leaks(void)
{
    int left = 0;
    for (int i = 0; i < FAKE_DEVICES; i++)
        for (block *b = memory[i].blocks; b != NULL; b = b->next)
            left++;
    return left;
}

int fake_cuda_write(cu_address to, const void *from, size_t bytes)
{
    pthread_mutex_lock(&fake_lock);
    void *at = fake_reach(to, bytes);
    if (at != NULL)
        memcpy(at, from, bytes);
    pthread_mutex_unlock(&fake_lock);
    return at == NULL;
}

int fake_cuda_read(void *to, cu_address from, size_t bytes)
{
    pthread_mutex_lock(&fake_lock);
    void *at = fake_reach(from, bytes);
    if (at != NULL)
        memcpy(to, at, bytes);
    pthread_mutex_unlock(&fake_lock);
    return at == NULL;
}

void *fake_cuda_view(cu_address at, size_t bytes)
{
    pthread_mutex_lock(&fake_lock);
    void *view = fake_reach(at, bytes);
    pthread_mutex_unlock(&fake_lock);
    return view;
}

/* ---- pinned memory ---- */

static pinned *find_pinned(const void *at, size_t bytes)
{
    for (pinned *p = all_pinned; p != NULL; p = p->next) {
        size_t offset = (size_t)((uintptr_t)at - (uintptr_t)p->from);
        if (offset < p->bytes && bytes <= p->bytes - offset)
            return p;
    }
    return NULL;
}

int fake_is_pinned(const void *from, size_t bytes)
{
    return find_pinned(from, bytes) != NULL;
}

static void add_pinned(void *from, size_t bytes, int own)
{
    pinned *p = calloc(1, sizeof *p);
    if (p == NULL)
        abort();
    cu_context context = fake_current();
    *p = (pinned){.from = from,
                  .bytes = bytes,
                  .own = own,
                  .ordinal = context->ordinal,
                  .context = context,
                  .next = all_pinned};
    all_pinned = p;
}

static void remove_pinned(pinned *p, const char *function)
{
    if (fake_is_copied(p->from, p->bytes))
        fake_blame("%s while a copy uses the memory", function);
    pinned **place = &all_pinned;
    while (*place != p)
        place = &(*place)->next;
    *place = p->next;
    if (p->own)
        munmap(p->from, p->bytes);
    free(p);
}

cu_result cuMemHostRegister_v2(void *from, size_t bytes, unsigned flags)
{
    FAKE_ENTER(cuMemHostRegister_v2, FAKE_CONTEXT | FAKE_UNSAFE);
    if (bytes == 0 || flags > 15)
        FAKE_LEAVE(CU_INVALID_VALUE);
    for (pinned *p = all_pinned; p != NULL; p = p->next)
        if ((uint8_t *)from < p->from + p->bytes && p->from < (uint8_t *)from + bytes)
            FAKE_LEAVE(CU_HOST_MEMORY_ALREADY_REGISTERED);
    add_pinned(from, bytes, 0);
    FAKE_LEAVE(CU_OK);
}

cu_result cuMemHostUnregister(void *from)
{
    FAKE_ENTER(cuMemHostUnregister, FAKE_CONTEXT | FAKE_UNSAFE | FAKE_GIVES_BACK);
    pinned *p = find_pinned(from, 0);
    if (p == NULL || p->from != from || p->own) {
        fake_blame("cuMemHostUnregister of %p, which is not registered", from);
        FAKE_LEAVE(CU_HOST_MEMORY_NOT_REGISTERED);
    }
    remove_pinned(p, "cuMemHostUnregister");
    FAKE_LEAVE(CU_OK);
}

cu_result cuMemHostAlloc(void **at, size_t bytes, unsigned flags)
{
    FAKE_ENTER(cuMemHostAlloc, FAKE_CONTEXT | FAKE_UNSAFE);
    if (bytes == 0 || flags > 7)
        FAKE_LEAVE(CU_INVALID_VALUE);
    *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*at == MAP_FAILED)
        FAKE_LEAVE(CU_OUT_OF_MEMORY);
    add_pinned(*at, bytes, 1);
    FAKE_LEAVE(CU_OK);
}

cu_result cuMemFreeHost(void *at)
{
    FAKE_ENTER(cuMemFreeHost, FAKE_CONTEXT | FAKE_UNSAFE | FAKE_GIVES_BACK);
    pinned *p = find_pinned(at, 0);
    if (p == NULL || p->from != at || !p->own) {
        fake_blame("cuMemFreeHost of %p, which cuMemHostAlloc did not make", at);
        FAKE_LEAVE(CU_INVALID_VALUE);
    }
    fake_finish_all();
    remove_pinned(p, "cuMemFreeHost");
    FAKE_LEAVE(CU_OK);
}

int fake_pinned_leaks(void)
{
    int left = 0;
    for (pinned *p = all_pinned; p != NULL; p = p->next)
        left++;
    return left;
}

/* ---- pointers ---- */

typedef struct facts {
    unsigned type, managed;
    int ordinal;
    cu_context context;
} facts;

static facts look_up(cu_address at)
{
    block *b = find(at, 1);
    pinned *p = find_pinned((void *)(uintptr_t)at, 1);
    if (b != NULL)
        return (facts){CU_MEMORY_DEVICE, (unsigned)b->managed, b->ordinal, b->context};
    if (p != NULL)
        return (facts){CU_MEMORY_HOST, 0, p->ordinal, p->context};
    return (facts){.ordinal = -2};
}

cu_result cuPointerGetAttributes(unsigned count, unsigned *attributes, void **values,
                                 cu_address address)
{
    FAKE_ENTER(cuPointerGetAttributes, 0);
    facts f = look_up(address);
    for (unsigned i = 0; i < count; i++)
        switch (attributes[i]) {
        case CU_POINTER_CONTEXT: *(cu_context *)values[i] = f.context; break;
        case CU_POINTER_MEMORY_TYPE: *(unsigned *)values[i] = f.type; break;
        case CU_POINTER_IS_MANAGED: *(unsigned *)values[i] = f.managed; break;
        case CU_POINTER_ORDINAL: *(int *)values[i] = f.ordinal; break;
        default: FAKE_LEAVE(CU_INVALID_VALUE);
        }
    FAKE_LEAVE(CU_OK);
}
