/* keyed.c - see keyed.h. */
#include "keyed.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 16 };

static size_t bucket_of(uint64_t key, size_t capacity)
{
    key ^= key >> 32; /* keys of a tag and a number differ in either half */
    key *= UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(key >> 32) & (capacity - 1);
}

static keyed_entry **bucket_at(keyed_queues *t, uint64_t key)
{
    return t->capacity == 0 ? &t->only : &t->buckets[bucket_of(key, t->capacity)];
}

/* Returns where the first of a key's queue is chained, or would be. */
static keyed_entry **chain_place(keyed_queues *t, uint64_t key)
{
    keyed_entry **place = bucket_at(t, key);
    while (*place != NULL && (*place)->key != key) {
        place = &(*place)->chain;
        t->visited++;
    }
    t->visited++;
    return place;
}

static void move_bucket(keyed_entry *first, keyed_queues *to)
{
    while (first != NULL) {
        keyed_entry *rest = first->chain, **bucket = bucket_at(to, first->key);
        first->chain = *bucket;
        *bucket = first;
        first = rest;
    }
}

static void grow_buckets(keyed_queues *t)
{
    keyed_queues larger = *t;
    larger.capacity = t->capacity ? 2 * t->capacity : FIRST_CAPACITY;
    larger.buckets = calloc(larger.capacity, sizeof(keyed_entry *));
    if (larger.buckets == NULL)
        return;
    larger.only = NULL;
    larger.first_filled = 0;
    move_bucket(t->only, &larger);
    for (size_t i = 0; i < t->capacity; i++)
        move_bucket(t->buckets[i], &larger);
    free(t->buckets);
    *t = larger;
}

void keyed_push(keyed_queues *t, keyed_entry *entry, uint64_t key)
{
    if (t->queues >= t->capacity)
        grow_buckets(t);
    keyed_entry **place = chain_place(t, key), *first = *place;
    *entry = (keyed_entry){.key = key, .last = entry};
    if (first != NULL) {
        first->last->next = entry;
        first->last = entry;
        return;
    }
    *place = entry;
    t->queues++;
    t->first_filled = 0;
}

keyed_entry *keyed_first(keyed_queues *t, uint64_t key)
{
    return t->queues == 0 ? NULL : *chain_place(t, key);
}

static keyed_entry *pop_at(keyed_queues *t, keyed_entry **place)
{
    keyed_entry *first = *place, *second = first->next;
    *place = first->chain;
    if (second != NULL) {
        second->chain = first->chain;
        second->last = first->last;
        *place = second;
    } else {
        t->queues--;
    }
    return first;
}

keyed_entry *keyed_pop(keyed_queues *t, uint64_t key)
{
    if (t->queues == 0)
        return NULL;
    keyed_entry **place = chain_place(t, key);
    return *place == NULL ? NULL : pop_at(t, place);
}

void keyed_remove(keyed_queues *t, keyed_entry *entry)
{
    keyed_entry **place = chain_place(t, entry->key), *before = *place;
    if (before == entry) {
        pop_at(t, place);
        return;
    }
    while (before->next != entry)
        before = before->next;
    before->next = entry->next;
    if (entry->next == NULL)
        (*place)->last = before;
}

keyed_entry *keyed_pop_any(keyed_queues *t)
{
    if (t->queues == 0)
        return NULL;
    if (t->capacity == 0)
        return pop_at(t, &t->only);
    while (t->buckets[t->first_filled] == NULL)
        t->first_filled++;
    return pop_at(t, &t->buckets[t->first_filled]);
}

void keyed_destroy(keyed_queues *t)
{
    free(t->buckets);
    *t = (keyed_queues){0};
}
