/* shared.h - all-reduce and broadcast through the memory that the ranks of one host share.
 *
 * A work's tensor goes through a region (shm/region.h) in laps. In each lap a rank
 *
 *   contributes  what the others need of its part of the lap, encoded
 *   joins        everybody's contributions to its own chunk, in order of rank
 *   collects     the results of the other chunks
 *
 * (direct), or contributes everything and joins everything itself (one-shot). The arithmetic is
 * that of the algorithm of the same name over links, bit for bit. Laps overlap: a rank contributes
 * some laps ahead, so that two ranks at the same speed hardly ever wait for each other.
 *
 * Where all ranks share one host, a broadcast is one-shot with the root's contribution alone. A
 * barrier stays on links: there its frames come behind those of all that was called before, so it
 * ends only if all ranks made the same calls.
 *
 * Among several hosts, each with as many ranks, the chunk that a rank has joined is its host's part
 * of a sum. The ranks that hold the same chunk, one of each host, all-reduce it over links, by the
 * work itself; only then is it the result that the others of the host collect.
 *
 *     enter            contribute, join           links             result, collect       leave
 *   --------> head ----------------------> (among hosts: open) ---------------------> -------->
 *
 * Works enter one after the other, each when the one before has joined its last lap, and leave in
 * the same order.
 *
 * Threading: under the engine's lock, except for shared_can_advance.
 */
#ifndef RINGCOMM_SHARED_H
#define RINGCOMM_SHARED_H

#include "../codec/codec.h"
#include "../shm/region.h"
#include "feedback.h"

struct work_env;

/* Progress of a work through shared memory. */
typedef struct shared_run {
    struct rc_work *next;
    rc_call call;         /* as the caller made it; among hosts the work's own is about one chunk */
    codec codec;          /* of the data in shared memory */
    uint64_t first, laps; /* of the region's laps */
    uint32_t chunks;      /* one per rank, or the whole as one */
    uint64_t chunk_elems; /* the last chunks may be shorter, or empty */
    uint64_t lap_elems;   /* of each chunk */
} shared_run;

typedef struct shared_memory {
    region region;
    int hosts;                     /* 0: no memory is shared */
    int rank_at[REGION_MAX_RANKS]; /* the communicator's rank of each place in the region */
    rc_work *head, *tail;          /* works on their way, in order */
    rc_work *entering;             /* the last of them, or NULL once it has joined all its laps */
    uint64_t laps;                 /* laps given to works so far */
    uint64_t bytes;                /* bytes written for others to read */
    const uint64_t *history;       /* fingerprints of the communicator's last collectives, */
    uint64_t history_length;       /* by seq modulo this */
} shared_memory;

typedef enum shared_event {
    SHARED_WAITS,   /* waits for other ranks, or for links */
    SHARED_BUSY,    /* more can be done, but other threads must get the lock now and then */
    SHARED_ENTERED, /* the work that was entering has joined all laps */
    SHARED_LEFT,    /* the first work has collected all laps */
    SHARED_FAILED   /* RC_MISMATCH: the ranks' calls differ */
} shared_event;

/* Lets w enter; no other work may be entering. env: of the links that it will use among hosts, else
 * the communicator's. */
void shared_enter(shared_memory *s, rc_work *w, struct work_env *env);
/* Returns the elements that a rank all-reduces with other hosts, of a tensor of count. */
feedback_range shared_own_chunk(const shared_memory *s, uint64_t count);
/* Turns the work, among hosts, into one over links on its own chunk; work_start is next. */
void shared_open(shared_memory *s, rc_work *w);
/* Advances works until an event is to be reported. *w is the work that has entered or left; error
 * has rank and seq if the calls differ. */
shared_event shared_pump(shared_memory *s, rc_work **w, rc_error *error);
/* Forgets all works. */
void shared_drop(shared_memory *s);
/* Notes in the links which collectives their peers have called, as far as the region shows it. */
void shared_note_calls(const shared_memory *s);

/* Returns 1 if shared_pump could advance. Called without the lock, while there are works. */
static inline int shared_can_advance(const shared_memory *s)
{
    return region_satisfied(&s->region, s->region.self);
}

#endif
