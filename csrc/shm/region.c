/* region.c - see region.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* seals */
#endif
#include "region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t align_bytes(size_t bytes)
{
    return (bytes + REGION_ALIGN - 1) / REGION_ALIGN * REGION_ALIGN;
}

static size_t counter_bytes(int ranks)
{
    return align_bytes((size_t)ranks * sizeof(region_rank));
}

static size_t part_bytes(int ranks)
{
    enum { LINE = 128 };
    return REGION_SLOT_BYTES / (size_t)ranks / LINE * LINE;
}

/* Returns the bytes of one rank's results. */
static size_t result_bytes(int ranks)
{
    return align_bytes(REGION_DEPTH * part_bytes(ranks));
}

rc_result region_map(region *r, int fd, int self, int ranks)
{
    size_t of_rank = (size_t)REGION_DEPTH * REGION_SLOT_BYTES + result_bytes(ranks);
    size_t bytes = counter_bytes(ranks) + (size_t)ranks * of_rank;
    if (ftruncate(fd, (off_t)bytes) != 0)
        return RC_SYSTEM;
    (void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK); /* or a peer could take mapped pages away */
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED)
        return RC_SYSTEM;
    madvise(base, bytes, MADV_DONTFORK);
    uint8_t *at = base;
    *r = (region){.ranks = ranks, .self = self, .base = base, .bytes = bytes};
    r->rank = base;
    r->contributions = at + counter_bytes(ranks);
    r->results = r->contributions + (size_t)ranks * REGION_DEPTH * REGION_SLOT_BYTES;
    return RC_OK;
}

void region_unmap(region *r)
{
    if (r->base != NULL)
        munmap(r->base, r->bytes);
    *r = (region){0};
}

uint8_t *region_contribution(const region *r, int rank, uint64_t lap)
{
    return r->contributions +
           ((size_t)rank * REGION_DEPTH + (size_t)(lap % REGION_DEPTH)) * REGION_SLOT_BYTES;
}

uint8_t *region_result(const region *r, int rank, uint64_t lap)
{
    return r->results + (size_t)rank * result_bytes(r->ranks) +
           (size_t)(lap % REGION_DEPTH) * part_bytes(r->ranks);
}

size_t region_part_bytes(const region *r)
{
    return part_bytes(r->ranks);
}

uint64_t region_done_by(const region *r, int rank, region_stage stage)
{
    return atomic_load(&r->rank[rank].done[stage]);
}

uint64_t region_done_by_all(const region *r, region_stage stage)
{
    uint64_t least = UINT64_MAX;
    for (int rank = 0; rank < r->ranks; rank++) {
        uint64_t done = region_done_by(r, rank, stage);
        if (done < least)
            least = done;
    }
    return least;
}

void region_advance(region *r, region_stage stage)
{
    atomic_fetch_add(&r->rank[r->self].done[stage], 1);
}

void region_await(region *r, const uint64_t awaited[REGION_STAGES])
{
    for (int stage = 0; stage < REGION_STAGES; stage++)
        atomic_store_explicit(&r->rank[r->self].awaited[stage], awaited[stage],
                              memory_order_relaxed);
}

int region_awaits(const region *r)
{
    for (int stage = 0; stage < REGION_STAGES; stage++)
        if (atomic_load_explicit(&r->rank[r->self].awaited[stage], memory_order_relaxed) !=
            REGION_NOTHING)
            return 1;
    return 0;
}

int region_satisfied(const region *r, int rank)
{
    for (int stage = 0; stage < REGION_STAGES; stage++) {
        uint64_t awaited =
            atomic_load_explicit(&r->rank[rank].awaited[stage], memory_order_relaxed);
        if (awaited != REGION_NOTHING && region_done_by_all(r, (region_stage)stage) >= awaited)
            return 1;
    }
    return 0;
}

/* Announces or ends dozing. The dozing rank sets the flag, then reads the counters; the rank that
 * counts up does that, then reads the flag. All four are sequentially consistent, so at least one
 * of the two sees the other. */
void region_doze(region *r, int dozing)
{
    atomic_store(&r->rank[r->self].dozing, (uint32_t)dozing);
}

int region_must_ring(region *r, int rank)
{
    _Atomic uint32_t *dozing = &r->rank[rank].dozing;
    return atomic_load(dozing) && region_satisfied(r, rank) && atomic_exchange(dozing, 0);
}
