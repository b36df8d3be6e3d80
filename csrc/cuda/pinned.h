/* pinned.h - host memory that a GPU copies to and from: pinned once, used again and again.
 *
 * Pinning a page costs more than copying it, so memory is pinned in slabs, which stay until the
 * arena goes. A slab is a power of two of bytes, and each new one at least as large as all before
 * it together, up to a cap; a block is the first stretch of a slab that is free and long enough. A
 * caller that finds no room waits a little for a block to come back; after that, or if it needs
 * more than the cap, it gets memory that is pinned for it and unpinned after it: slow, and never
 * stuck.
 *
 * Invariants. Blocks begin at multiples of PINNED_ALIGN, and two neighbours are never both free. A
 * block is given back before the arena is destroyed. Threading: any, by a lock of its own; taking
 * and giving back on a thread that may call the driver for the device.
 */
#ifndef RINGCOMM_PINNED_H
#define RINGCOMM_PINNED_H

#include <pthread.h>

#include "device.h"

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
