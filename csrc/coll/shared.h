/* shared.h - all-reduce through the memory that the ranks of one host share.
 *
 * The work's tensor goes through a region (shm/region.h) in turns. In each turn a rank
 *
 *   contributes  what the others need of its part of the turn, encoded
 *   joins        everybody's contributions to its own chunk, in order of rank
 *   collects     the results of the other chunks
 *
 * (direct), or contributes everything and joins everything itself (one-shot). The maths are those
 * of the algorithm of that name over links, bit for bit. Turns overlap: a rank contributes some
 * turns ahead, so that two ranks at the same speed hardly ever wait for each other.
 *
 * Works go through one at a time, in order of seq. Everything else about them is as over links,
 * which stay the way to hear of failures, and to ring for a rank that dozes.
 *
 * Threading: under the engine's lock, but for shared_stirred and shared_doze.
 */
#ifndef RINGCOMM_SHARED_H
#define RINGCOMM_SHARED_H

#include "../shm/region.h"
#include "work.h"

typedef struct shared_memory {
    region region;
    int rank_at[REGION_MAX_RANKS]; /* the communicator's rank of each place in the region */
    rc_work *head, *tail;          /* works that go through, the first of them now */
    uint64_t turns;                /* given to works so far */
    uint64_t bytes;                /* put there for others to read */
    const uint64_t *history;       /* the communicator's: fingerprints of the last collectives, */
    uint64_t history_length;       /* by seq modulo this */
} shared_memory;

/* Sets w up to go through and puts it behind the others. The plan's algorithm is direct or
 * one-shot. */
void shared_start(shared_memory *s, rc_work *w);
/* Goes on with the first work until it is complete and taken off (work_complete says so), or can
 * only wait, or has taken long enough (*more is 1 then). RC_MISMATCH with peer and seq in error. */
rc_result shared_pump(shared_memory *s, int *more, rc_error *error);
/* Forgets all works. */
void shared_drop(shared_memory *s);
/* Tells the links which collectives their peers have called, as far as this shows here. */
void shared_note_calls(const shared_memory *s);

/* Without the lock, while works go through: 1 if the first of them can go on. */
static inline int shared_stirred(const shared_memory *s)
{
    return region_satisfied(&s->region, s->region.self);
}

#endif
