/* inside.h - the state of the simulated system, for the files that make it: os.c (time, turns),
 * lanes.c (what travels, and its faults), system.c (the calls that the core makes).
 */
#ifndef RINGCOMM_SIM_INSIDE_H
#define RINGCOMM_SIM_INSIDE_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "os.h"

enum { FIRST_FD = 10000, MOST_FILES = 2 * OS_MOST_LANES + 2 * OS_MOST_RANKS };

typedef struct packet {
    uint64_t end; /* bytes of the stream up to here */
    uint64_t at, acked_at;
} packet;

/* What one end of a lane sends. Counts are of bytes since the beginning. */
typedef struct stream {
    os_wire wire;
    uint8_t *ring;
    uint64_t size, written, read;
    packet *packets;
    size_t count, room, arrivals, acks; /* packets that have arrived, been acknowledged */
    uint64_t arrived, acked;
    uint64_t wire_free, last_at, last_ack;
    uint64_t dark_until;        /* what is on its way arrives after that */
    int flip_next, short_reads; /* in a row */
} stream;

typedef struct end {
    int rank, fd, is_open, low_water;
    uint64_t fin_at, rst_at; /* when this end sees that there is no more */
    int rst_told;
} end;

typedef struct lane {
    end ends[2];
    stream out[2]; /* by the end that sends */
} lane;

typedef struct file {
    enum { FILE_CLOSED, FILE_SOCKET, FILE_SET, FILE_BELL } kind;
    int rank, lane, end;
    uint32_t wanted; /* in its rank's set */
    uint64_t data;
    int is_watched, rung;
} file;

typedef struct process {
    int is_dead, rounds, files[MOST_FILES], count;
    uint64_t stopped_until, wakes_at;
} process;

typedef struct wish {
    uint64_t at, order;
    int rank;
} wish;

typedef struct os_state {
    uint64_t now, random, orders;
    FILE *trace;
    os_mood mood;
    os_pace pace;
    uint64_t events, kill_at;
    int to_kill;
    int rank, lane_count, file_count;
    lane *lanes[OS_MOST_LANES];
    file files[MOST_FILES];
    process processes[OS_MOST_RANKS];
    wish *wishes;
    size_t wish_count, wish_room;
} os_state;

extern os_state os;

/* Returns 1 in so many of 1,000 cases. */
static inline int happens(unsigned of_1000)
{
    return of_1000 > 0 && os_draw(1000) < of_1000;
}

static inline uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Opens a file; returns its descriptor. */
int new_file(file f);
/* Returns the open file of a descriptor, or NULL. */
file *file_of(int fd);
/* Returns the events of a file that is watched. */
uint32_t events_of(const file *f);

/* Counts what has arrived and been acknowledged by now. */
void settle(stream *s);
/* Returns the bytes that the receiver can read. */
uint64_t readable(stream *s);
/* Returns the bytes that the sender's kernel keeps: what a full receiver does not take, too. */
uint64_t unacked(stream *s);
/* Returns the bytes that a write would take. */
uint64_t space(stream *s);
/* Sends as many bytes, for which there is space, from this end. */
void send_packets(lane *l, int from, const uint8_t *bytes, uint64_t count);
/* Moves bytes that are readable to this end's reader. */
void take(lane *l, int to, uint8_t *bytes, uint64_t count);
void close_file(file *f);
/* Counts an event, with which a rank may be killed. */
void count_event(void);

#endif
