/* pool.c - see pool.h. */
#include "pool.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 64 };

void pool_init(pool *p, size_t bytes, int keep)
{
    *p = (pool){.bytes = bytes, .keep = keep};
}

static void free_buffer(pool_buffer *buffer)
{
    free(buffer->data);
    free(buffer);
}

void pool_destroy(pool *p)
{
    while (p->free != NULL) {
        pool_buffer *buffer = p->free;
        p->free = buffer->next;
        free_buffer(buffer);
    }
    p->idle = p->spare = 0;
}

static pool_buffer *make_buffer(size_t bytes)
{
    pool_buffer *buffer = malloc(sizeof *buffer);
    if (buffer == NULL)
        return NULL;
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    buffer->data = aligned_alloc(ALIGNMENT, rounded);
    if (buffer->data == NULL) {
        free(buffer);
        return NULL;
    }
    return buffer;
}

pool_buffer *pool_take(pool *p)
{
    pool_buffer *buffer = p->free;
    if (buffer != NULL) {
        p->free = buffer->next;
        p->idle--;
        p->spare = p->idle < p->spare ? p->idle : p->spare;
    } else if ((buffer = make_buffer(p->bytes)) == NULL) {
        return NULL;
    }
    buffer->next = NULL;
    buffer->holders = 1;
    p->taken++;
    return buffer;
}

pool_buffer *pool_share(pool_buffer *buffer)
{
    buffer->holders++;
    return buffer;
}

void pool_return(pool *p, pool_buffer *buffer)
{
    if (buffer == NULL || --buffer->holders > 0)
        return;
    p->taken--;
    if (p->idle >= p->keep) {
        free_buffer(buffer);
        return;
    }
    buffer->next = p->free;
    p->free = buffer;
    p->idle++;
}

/* Gives a buffer's pages back to the system: the allocator may keep what is freed for as long as
 * anything lies behind it. */
static void drop_pages(const pool_buffer *buffer, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), data = (uintptr_t)buffer->data;
    uintptr_t start = (data + page - 1) / page * page, end = (data + bytes) / page * page;
    if (start < end)
        (void)madvise((void *)start, end - start, MADV_DONTNEED); /* if not: as it was */
}

int pool_trim(pool *p, int most)
{
    pool_buffer **place = &p->free;
    for (int i = p->spare; i < p->idle; i++)
        place = &(*place)->next;
    for (; most > 0 && p->spare > 0; most--) {
        pool_buffer *buffer = *place;
        *place = buffer->next;
        p->idle--;
        p->spare--;
        drop_pages(buffer, p->bytes);
        free_buffer(buffer);
    }
    if (p->spare > 0)
        return 1;
    p->spare = p->idle;
    return 0;
}
