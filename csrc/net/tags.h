/* tags.h - counts for each tag of the sends and receives between two ranks.
 *
 * A send or receive is named by its tag and by its number among those of that tag, in one direction
 * between two ranks. Both ends count for themselves, so the n-th receive of a tag takes the n-th
 * send of it, and no rank has to ask the other. A program uses few tags, or many: entries are found
 * by hashing, and never freed, since later sends and receives get their names from the counts.
 * Numbers begin anew after 2^32.
 *
 * Invariant: what a peer tells makes at most TAGS_MOST entries, so that it cannot make a table grow
 * without bound. No locking of its own.
 */
#ifndef RINGCOMM_TAGS_H
#define RINGCOMM_TAGS_H

#include <stdint.h>

enum { TAGS_MOST = 1 << 20 };

typedef struct tag_count {
    uint32_t tag;
    int used;
    uint32_t sends, receives; /* numbers of the next ones */
} tag_count;

typedef struct tag_table {
    tag_count *slots;
    uint32_t capacity, count;
} tag_table;

/* Returns the name of a send or receive as frames carry it. */
static inline uint64_t tags_name(uint32_t tag, uint32_t number)
{
    return (uint64_t)tag << 32 | number;
}

static inline uint32_t tags_tag(uint64_t name)
{
    return (uint32_t)(name >> 32);
}

static inline uint32_t tags_number(uint64_t name)
{
    return (uint32_t)name;
}

/* Returns 1 if a number is below another one, which is at most 2^31 further. */
static inline int tags_before(uint32_t number, uint32_t other)
{
    return (int32_t)(number - other) < 0;
}

/* Returns the tag's entry; NULL if there is none. Valid until the next tags_get. */
tag_count *tags_find(const tag_table *t, uint32_t tag);
/* Returns the tag's entry, made with zeros where there was none; NULL if memory is short. */
tag_count *tags_get(tag_table *t, uint32_t tag);
/* Returns the same for a tag that a peer names; NULL also if the table is full. */
tag_count *tags_get_told(tag_table *t, uint32_t tag);
void tags_destroy(tag_table *t);

#endif
