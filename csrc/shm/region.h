/* region.h - memory that all ranks of one host share, and each rank's progress in it. The interface
 * of shm/ to other folders.
 *
 *   per rank:  counters | a ring of slots for contributions | a ring of slots for results
 *
 * Data passes through in laps, numbered 0, 1, 2, ..., the same on all ranks; a lap has the slot of
 * its number modulo REGION_DEPTH. A rank writes its own slots and counters and reads the others'.
 * It goes through these stages in each lap, and publishes how many laps it has done of each:
 *
 *   CONTRIBUTED  my contribution lies in its slot
 *   JOINED       I have read all contributions
 *   RESULTED     my result lies in its slot
 *   COLLECTED    I have read all results
 *
 * So a slot of contributions is free again when all have joined that lap, and one of results when
 * all have collected it. A rank that cannot advance publishes what it waits for, and polls; or
 * dozes, and the rank that brings the last of it rings, which the caller does.
 *
 * Invariants. All sizes and offsets follow from the number of ranks, never from what is read. Of
 * what other processes write only the counters control progress; a rank that dies leaves them as
 * they are. Threading: region_satisfied from any thread, the rest under the engine's lock.
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
    REGION_SLOT_BYTES = 128 << 10, /* of a contribution; a result has this divided by the ranks */
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

/* State that one rank publishes. The counters have a cache line of their own, as others poll them.
 */
typedef struct region_rank {
    _Alignas(128) _Atomic uint64_t done[REGION_STAGES];
    /* Laps of each stage that all must have done before the rank can advance. */
    _Alignas(128) _Atomic uint64_t awaited[REGION_STAGES];
    _Alignas(128) _Atomic uint32_t dozing; /* read by all that advance, hardly ever written */
    _Alignas(128) struct {
        uint64_t seq;
        uint64_t fingerprint;
    } call[REGION_DEPTH]; /* the call that the contribution in the slot belongs to */
} region_rank;

typedef struct region {
    int ranks;
    int self;
    region_rank *rank; /* [ranks] */
    uint8_t *contributions, *results;
    void *base;
    size_t bytes;
} region;

/* Gives the file its size, if no other rank has, and maps it. Returns RC_SYSTEM, with errno, if
 * that fails. */
rc_result region_map(region *r, int fd, int self, int ranks);
void region_unmap(region *r);

/* Returns a rank's slot for its contribution to a lap, of REGION_SLOT_BYTES. */
uint8_t *region_contribution(const region *r, int rank, uint64_t lap);
/* Returns a rank's slot for its result of a lap, of region_part_bytes. */
uint8_t *region_result(const region *r, int rank, uint64_t lap);
/* Returns the bytes of one rank's part of a slot. */
size_t region_part_bytes(const region *r);

/* Return how many laps all ranks, or one, have done of a stage. */
uint64_t region_done_by_all(const region *r, region_stage stage);
uint64_t region_done_by(const region *r, int rank, region_stage stage);
/* Counts one lap more of a stage as done here. */
void region_advance(region *r, region_stage stage);

/* Publishes that this rank can advance when all have done so many laps of any of these stages. */
void region_await(region *r, const uint64_t awaited[REGION_STAGES]);
/* Returns 1 if this rank has published that it waits for something. */
int region_awaits(const region *r);
/* Returns 1 if what a rank waits for has happened. */
int region_satisfied(const region *r, int rank);
/* Asks others to ring from now on (1), or not (0). After 1, check region_satisfied. */
void region_doze(region *r, int dozing);
/* Returns 1 if a rank dozes and what it waits for has happened; only once. */
int region_must_ring(region *r, int rank);

#endif
