/* pinned.c - slabs, the blocks in them, and memory for blocks that fit in none. See device.h.
 *
 * Pinning a page costs more than copying it, so memory is pinned in slabs, which stay until the
 * arena goes. A slab is a power of two of bytes, and each new one at least as large as all before
 * it together, up to a cap; a block is the first stretch of a slab that is free and long enough. A
 * caller that finds no room waits a little for a block to come back; after that, or if it needs
 * more than the cap, it gets memory that is pinned for it and unpinned after it: slow, and never
 * stuck.
 */
#include "device.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "../base/thread.h"

enum { LEAST_SLAB = 4 << 20 };

typedef struct pinned_slab {
    struct pinned_slab *next;
    uint8_t *data;
    size_t bytes;
    pinned_block *first;
    int alone;    /* of one block, for which there was no room */
    int is_cudas; /* data is CUDA's own memory */
} pinned_slab;

void pinned_init(pinned_arena *arena, cuda_device *device, size_t cap)
{
    *arena = (pinned_arena){.device = device, .cap = cap};
    pthread_mutex_init(&arena->lock, NULL);
    thread_init_cond(&arena->returned);
}

/* ---- slabs ---- */

static void slab_free(pinned_arena *arena, pinned_slab *slab)
{
    for (pinned_block *block = slab->first, *next; block != NULL; block = next) {
        next = block->next;
        free(block);
    }
    if (slab->is_cudas) {
        device_free_pinned(arena->device, slab->data);
    } else if (slab->data != NULL) {
        device_unpin(arena->device, slab->data);
        munmap(slab->data, slab->bytes);
    }
    free(slab);
}

/* Maps and pins memory. A fork leaves the pages to this process alone; else, on older kernels, the
 * first to write to one would get a copy of it, while the GPU kept the other. */
static rc_result map_pinned(pinned_arena *arena, pinned_slab *slab, size_t bytes, rc_error *error)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return error_set(error, RC_NO_MEMORY, "no memory for %zu bytes that a GPU copies to",
                         bytes);
    madvise(data, bytes, MADV_DONTFORK);
    madvise(data, bytes, MADV_HUGEPAGE); /* fewer pages to pin; a kernel without is fine */
    rc_result result = device_pin(arena->device, data, bytes, error);
    if (result == RC_OK)
        slab->data = data;
    else
        munmap(data, bytes);
    return result;
}

static rc_result slab_fill(pinned_arena *arena, pinned_slab *slab, size_t bytes, rc_error *error)
{
    void *data = NULL;
    slab->first = calloc(1, sizeof *slab->first);
    if (slab->first == NULL)
        return error_set(error, RC_NO_MEMORY, "out of memory");
    rc_result result = map_pinned(arena, slab, bytes, error);
    if (result == RC_AGAIN) {
        RC_TRY(device_alloc_pinned(arena->device, &data, bytes, error));
        slab->data = data;
        slab->is_cudas = 1;
    } else {
        RC_TRY(result);
    }
    slab->bytes = bytes;
    *slab->first = (pinned_block){.data = slab->data, .bytes = bytes, .slab = slab};
    return RC_OK;
}

static rc_result slab_make(pinned_arena *arena, size_t bytes, pinned_slab **out, rc_error *error)
{
    pinned_slab *slab = calloc(1, sizeof *slab);
    if (slab == NULL)
        return error_set(error, RC_NO_MEMORY, "out of memory");
    rc_result result = slab_fill(arena, slab, bytes, error);
    if (result != RC_OK) {
        slab_free(arena, slab);
        return result;
    }
    *out = slab;
    return RC_OK;
}

void pinned_destroy(pinned_arena *arena)
{
    for (pinned_slab *slab = arena->slabs, *next; slab != NULL; slab = next) {
        next = slab->next;
        slab_free(arena, slab);
    }
    pthread_mutex_destroy(&arena->lock);
    pthread_cond_destroy(&arena->returned);
}

/* Returns the size of the next slab, in which a block of so many bytes fits; 0 if the cap forbids
 * it. */
static size_t next_slab(const pinned_arena *arena, size_t bytes)
{
    size_t size = LEAST_SLAB, room = arena->cap - arena->pinned;
    while (size < bytes || size < arena->pinned)
        size *= 2;
    while (size > room && size / 2 >= bytes)
        size /= 2;
    return size <= room ? size : 0;
}

/* ---- blocks ---- */

/* Cuts off bytes that the block does not need; without memory for that it stays longer. */
static void split(pinned_block *block, size_t bytes)
{
    pinned_block *rest = block->bytes > bytes ? calloc(1, sizeof *rest) : NULL;
    if (rest == NULL)
        return;
    *rest = (pinned_block){.data = block->data + bytes,
                           .bytes = block->bytes - bytes,
                           .slab = block->slab,
                           .next = block->next,
                           .prev = block};
    if (rest->next != NULL)
        rest->next->prev = rest;
    block->next = rest;
    block->bytes = bytes;
}

static void absorb_next(pinned_block *block)
{
    pinned_block *next = block->next;
    block->bytes += next->bytes;
    block->next = next->next;
    if (block->next != NULL)
        block->next->prev = block;
    free(next);
}

static pinned_block *find_free_block(pinned_arena *arena, size_t bytes)
{
    for (pinned_slab *slab = arena->slabs; slab != NULL; slab = slab->next)
        for (pinned_block *block = slab->first; block != NULL && !slab->alone; block = block->next)
            if (!block->taken && block->bytes >= bytes) {
                split(block, bytes);
                return block;
            }
    return NULL;
}

static rc_result add_slab(pinned_arena *arena, size_t bytes, int alone, rc_error *error)
{
    pinned_slab *slab;
    RC_TRY(slab_make(arena, bytes, &slab, error));
    slab->alone = alone;
    slab->next = arena->slabs;
    arena->slabs = slab;
    if (!alone)
        arena->pinned += bytes;
    return RC_OK;
}

/* Waits until a block comes back, or for that long. Returns 0 if none came. */
static int wait_for_return(pinned_arena *arena, int patience_ms)
{
    uint64_t seen = arena->returns, deadline = clock_ns() + (uint64_t)patience_ms * CLOCK_MS;
    while (arena->returns == seen && clock_ns() < deadline)
        thread_wait_until(&arena->returned, &arena->lock, deadline);
    return arena->returns != seen;
}

/* Unpins unused slabs, to make room for a larger one. Returns 0 if there are none. */
static int shed(pinned_arena *arena)
{
    int count = 0;
    for (pinned_slab **at = &arena->slabs; *at != NULL;) {
        pinned_slab *slab = *at;
        if (slab->first->taken || slab->first->bytes < slab->bytes) {
            at = &slab->next;
            continue;
        }
        *at = slab->next;
        arena->pinned -= slab->bytes;
        slab_free(arena, slab);
        count++;
    }
    return count;
}

static rc_result take_block(pinned_arena *arena, size_t bytes, int patience_ms, pinned_block **out,
                            rc_error *error)
{
    while ((*out = find_free_block(arena, bytes)) == NULL) {
        size_t size = next_slab(arena, bytes);
        if (size > 0) {
            RC_TRY(add_slab(arena, size, 0, error));
        } else if (bytes <= arena->cap && shed(arena)) {
            continue;
        } else if (bytes > arena->cap || !wait_for_return(arena, patience_ms)) {
            RC_TRY(add_slab(arena, bytes, 1, error));
            *out = arena->slabs->first;
            return RC_OK;
        }
    }
    return RC_OK;
}

rc_result pinned_take(pinned_arena *arena, size_t bytes, int patience_ms, pinned_block **out,
                      rc_error *error)
{
    size_t whole = (bytes + PINNED_ALIGN - 1) / PINNED_ALIGN * PINNED_ALIGN;
    pthread_mutex_lock(&arena->lock);
    rc_result result = take_block(arena, whole, patience_ms, out, error);
    if (result == RC_OK)
        (*out)->taken = 1;
    pthread_mutex_unlock(&arena->lock);
    return result;
}

static void free_alone(pinned_arena *arena, pinned_slab *slab)
{
    pinned_slab **at = &arena->slabs;
    while (*at != slab)
        at = &(*at)->next;
    *at = slab->next;
    slab_free(arena, slab);
}

void pinned_give(pinned_arena *arena, pinned_block *block)
{
    if (block == NULL)
        return;
    pthread_mutex_lock(&arena->lock);
    block->taken = 0;
    if (block->slab->alone) {
        free_alone(arena, block->slab);
    } else {
        if (block->next != NULL && !block->next->taken)
            absorb_next(block);
        if (block->prev != NULL && !block->prev->taken)
            absorb_next(block->prev);
    }
    arena->returns++;
    pthread_cond_broadcast(&arena->returned);
    pthread_mutex_unlock(&arena->lock);
}
