/* region.h - memory that all ranks of one host share, and who is how far in it.
 *
 *   per rank:  counters | a ring of slots for contributions | a ring of slots for results
 *
 * What passes through is numbered by laps, 0, 1, 2, ..., the same on all ranks; a lap has the
 * slot of its number modulo REGION_DEPTH. A rank writes its own slots and counters and reads the
 * others'. It goes through three stages in each lap, and publishes how many laps it has done of
 * each:
 *
 *   CONTRIBUTED  my contribution lies in its slot
 *   JOINED       I have read all contributions, and my result lies in its slot
 *   COLLECTED    I have read all results
 *
 * So a slot of contributions is free again when all have joined that lap, and one of results when
 * all have collected it. Who can go no further publishes what it waits for, and polls; or dozes,
 * and whoever brings the last of it rings: how is the business of the caller.
 *
 * Invariants. All sizes and offsets follow from the number of ranks, never from what is read. Only
 * counters are read that another process writes; a rank that dies leaves them as they are.
 * Threading: region_satisfied from any thread, the rest under the engine's lock.
 */
#ifndef RINGCOMM_REGION_H
#define RINGCOMM_REGION_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "../include/ringcomm.h"

enum {
    REGION_MAX_RANKS = 64,
    REGION_DEPTH = 8,
    REGION_SLOT_BYTES = 128 << 10, /* of contributions; results have this by the number of ranks */
    REGION_ALIGN = 4096
};

typedef enum region_stage {
    REGION_CONTRIBUTED,
    REGION_JOINED,
    REGION_RESULTED,
    REGION_COLLECTED,
    REGION_STAGES
} region_stage;

#define REGION_NOTHING UINT64_MAX

/* What one rank says to the others. The counters have a cache line of their own, as others poll
 * them. */
typedef struct region_rank {
    _Alignas(128) _Atomic uint64_t done[REGION_STAGES];
    /* It waits until all have done so many laps of one of the stages. */
    _Alignas(128) _Atomic uint64_t awaited[REGION_STAGES];
    _Alignas(128) _Atomic uint32_t dozing; /* read by all who go on, and hardly ever written */
    _Alignas(128) struct {
        uint64_t seq;
        uint64_t fingerprint;
    } call[REGION_DEPTH]; /* that the contribution in the slot belongs to */
} region_rank;

typedef struct region {
    int ranks;
    int self;
    region_rank *rank; /* [ranks] */
    uint8_t *contributions, *results;
    void *base;
    size_t bytes;
} region;

/* Gives the file its size, which the first does that comes, and maps it. RC_SYSTEM, with errno, if
 * that fails. */
rc_result region_map(region *r, int fd, int self, int ranks);
void region_unmap(region *r);

/* REGION_SLOT_BYTES. */
uint8_t *region_contribution(const region *r, int rank, uint64_t lap);
/* region_part_bytes. */
uint8_t *region_result(const region *r, int rank, uint64_t lap);
/* Of one rank's part of a slot. */
size_t region_part_bytes(const region *r);

/* How many laps all ranks, or one, have done of a stage. */
uint64_t region_done_by_all(const region *r, region_stage stage);
uint64_t region_done_by(const region *r, int rank, region_stage stage);
/* One lap more is done here. */
void region_advance(region *r, region_stage stage);

/* This rank can go on when all have done so many laps of any of these stages. */
void region_await(region *r, const uint64_t awaited[REGION_STAGES]);
/* 1 if this rank has said that it waits for something. */
int region_awaits(const region *r);
/* 1 if what a rank waits for is there. */
int region_satisfied(const region *r, int rank);
/* Others shall ring from now on (1), or need not (0). With 1, look at region_satisfied after. */
void region_doze(region *r, int dozing);
/* 1 if a rank dozes and has what it waits for; says so once. */
int region_must_ring(region *r, int rank);

#endif
