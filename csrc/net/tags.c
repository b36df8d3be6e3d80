/* tags.c - see tags.h. */
#include "tags.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 8 }; /* capacities are powers of two */

/* Returns the tag's slot, or the free one where it belongs. The table has a free one. */
static tag_count *slot_of(const tag_table *t, uint32_t tag)
{
    uint32_t mask = t->capacity - 1, at = tag * UINT32_C(2654435761) >> 7 & mask;
    while (t->slots[at].used && t->slots[at].tag != tag)
        at = (at + 1) & mask;
    return &t->slots[at];
}

static int grow_table(tag_table *t)
{
    tag_table larger = {.capacity = t->capacity ? 2 * t->capacity : FIRST_CAPACITY,
                        .count = t->count};
    larger.slots = calloc(larger.capacity, sizeof *larger.slots);
    if (larger.slots == NULL)
        return 0;
    for (uint32_t i = 0; i < t->capacity; i++)
        if (t->slots[i].used)
            *slot_of(&larger, t->slots[i].tag) = t->slots[i];
    free(t->slots);
    *t = larger;
    return 1;
}

tag_count *tags_find(const tag_table *t, uint32_t tag)
{
    if (t->count == 0)
        return NULL;
    tag_count *found = slot_of(t, tag);
    return found->used ? found : NULL;
}

tag_count *tags_get(tag_table *t, uint32_t tag)
{
    tag_count *found = tags_find(t, tag);
    if (found != NULL)
        return found;
    if (2 * (t->count + 1) > t->capacity && !grow_table(t))
        return NULL;
    found = slot_of(t, tag);
    *found = (tag_count){.tag = tag, .used = 1};
    t->count++;
    return found;
}

tag_count *tags_get_told(tag_table *t, uint32_t tag)
{
    return t->count < TAGS_MOST ? tags_get(t, tag) : tags_find(t, tag);
}

void tags_destroy(tag_table *t)
{
    free(t->slots);
    *t = (tag_table){0};
}
