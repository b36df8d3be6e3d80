/* pool.h - reusable buffers of one size.
 *
 * A communicator receives each segment into a pool buffer, reduces it there and sends it on from
 * there, so a buffer's way is: taken, filled by a lane, queued on a link, returned. The most
 * recently returned buffer is taken first, which keeps the working set in cache; up to `keep`
 * free buffers are kept, the others go back to the system, as do those that nobody has needed for a
 * while (pool_trim). A buffer may be in several places at once (pool_share); each of them returns
 * it. Memory in use is bounded by the tensors in flight, never by what a peer claims.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_POOL_H
#define RINGCOMM_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef struct pool_buffer {
    struct pool_buffer *next;
    uint8_t *data; /* aligned to 64 bytes */
    int holders;
} pool_buffer;

typedef struct pool {
    pool_buffer *free;
    size_t bytes; /* of each buffer */
    int keep;
    int idle;  /* buffers in the free list */
    int spare; /* of them, at its end: not taken since the last mark */
    int taken; /* buffers out */
} pool;

void pool_init(pool *p, size_t bytes, int keep);
/* Frees the idle buffers; every buffer must have been returned. */
void pool_destroy(pool *p);
/* Takes a buffer; NULL if memory is short. */
pool_buffer *pool_take(pool *p);
/* Adds a holder, who returns the buffer as well. */
pool_buffer *pool_share(pool_buffer *buffer);
/* Frees up to most buffers that were not taken since the last mark. Returns 1 if more of them are
 * left; else sets the next mark. */
int pool_trim(pool *p, int most);
/* Drops one holder; the last one's return makes the buffer free. buffer may be NULL. */
void pool_return(pool *p, pool_buffer *buffer);

#endif
