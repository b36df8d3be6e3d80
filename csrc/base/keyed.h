/* keyed.h - first-in-first-out queues, each found by a 64-bit key in constant time.
 *
 * What waits for something by name (a frame for its receive, a receive for its frames) must be
 * found at once however much waits. Entries are embedded in what waits; a queue exists while it has
 * entries. A hash table has the first entry of each queue, chained by bucket:
 *
 *     bucket --> first of key A --chain--> first of key B
 *                   | next                    | next
 *                second of A               second of B      (a first one knows the last)
 *
 * The table doubles as queues are added. Where memory for that is short it stays as it is: slower,
 * but a push never fails. No locking of its own.
 */
#ifndef RINGCOMM_KEYED_H
#define RINGCOMM_KEYED_H

#include <stddef.h>
#include <stdint.h>

typedef struct keyed_entry {
    uint64_t key;
    struct keyed_entry *next;  /* in its queue */
    struct keyed_entry *chain; /* of the first in a queue: the next queue of the bucket */
    struct keyed_entry *last;  /* of the first in a queue */
} keyed_entry;

/* The queues; all zeros: none has entries. */
typedef struct keyed_queues {
    keyed_entry **buckets;
    size_t capacity;     /* a power of two; 0 until the first push: then `only` is the bucket */
    keyed_entry *only;   /* where there was no memory for buckets */
    size_t queues;       /* with entries */
    size_t first_filled; /* no bucket before it has entries (keyed_pop_any) */
    uint64_t visited;    /* entries looked at, ever: for tests of the cost */
} keyed_queues;

/* Puts an entry at the end of its key's queue. */
void keyed_push(keyed_queues *t, keyed_entry *entry, uint64_t key);
/* Returns the first entry of a key's queue; NULL if there is none. The others follow by `next`. */
keyed_entry *keyed_first(keyed_queues *t, uint64_t key);
/* Takes out the first entry of a key's queue; NULL if there is none. */
keyed_entry *keyed_pop(keyed_queues *t, uint64_t key);
/* Takes an entry out, from wherever it stands in its queue: constant time for the first. */
void keyed_remove(keyed_queues *t, keyed_entry *entry);
/* Takes out any entry; NULL if there is none. To empty all queues so takes time in proportion to
 * their entries and buckets. */
keyed_entry *keyed_pop_any(keyed_queues *t);
/* Frees the table. The queues must be empty. */
void keyed_destroy(keyed_queues *t);

#endif
