/* os.h - the system behind the core in the simulation: a clock, sockets, epoll sets and their
 * faults, all of one process, in virtual time and drawn from one seed.
 *
 * The core's objects are linked as they are; `ld --wrap` leads the calls that they make to system.c
 * (tests/c/Makefile has the list). A rank is a process as the kernel sees it: an engine with its
 * epoll set and sockets. It has turns, one rank at a time; within a turn epoll_wait never sleeps
 * but says by EINTR that the turn is over, and when the next one is due.
 * A rank that is killed within a turn finds its descriptors closed for the rest of it.
 *
 * Sockets. A lane is a pair of streams, one each way, in which bytes travel as packets: each leaves
 * at the wire's rate, arrives after its delay, in order, and is acknowledged by the way back. A
 * receiver that does not read fills its buffer, then the sender's. FIN, RST, SO_RCVLOWAT, SIOCOUTQ
 * and TCP_INFO are as Linux has them.
 *
 * Invariants. What happens follows from the seed and from what the core asks: no address, real time
 * or descriptor number of another run comes in. Descriptors are never used twice.
 */
#ifndef RINGCOMM_SIM_OS_H
#define RINGCOMM_SIM_OS_H

#include <stdint.h>
#include <stdio.h>

#define OS_NEVER UINT64_MAX

enum { OS_MOST_RANKS = 8, OS_MOST_LANES = 1024 };

/* How a lane carries bytes. */
typedef struct os_wire {
    uint64_t delay;  /* ns, one way */
    uint64_t jitter; /* ns, at most that much more */
    double ns_per_byte;
    uint32_t send_buffer, receive_buffer; /* bytes */
} os_wire;

/* How often (of 1,000 calls) a call does less than it could: by EINTR; by EAGAIN, or ENOBUFS of a
 * write; by a part of the bytes, or of the events. */
typedef struct os_mood {
    unsigned interrupted, refused, partial;
} os_mood;

/* How processes run: with all events of a moment in a turn, or one at a time; and whether a sleep
 * ends when its time is over, or by an event alone. */
typedef struct os_pace {
    int is_alone, never_awakes;
} os_pace;

typedef enum os_cut { OS_RST, OS_FIN } os_cut;

void os_open(uint64_t seed, FILE *trace);
/* Frees everything; returns the number of descriptors that nobody has closed. */
int os_close(void);
void os_set_mood(os_mood mood);
void os_set_pace(os_pace pace);

uint64_t os_now(void);
/* Returns 0 .. bound-1. */
uint64_t os_draw(uint64_t bound);
/* Writes a line of the trace, if there is one; rank -1: of no rank. */
void os_trace(int rank, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Whose calls follow. */
void os_enter(int rank);
/* Asks for a turn of the rank at this time. */
void os_look_at(int rank, uint64_t at);
/* Goes on to the next wish; returns its rank, or -1 if there is none. */
int os_next(void);
/* Returns 1 if the rank lives and runs, and its set has events, its core has slept as long as it
 * wanted to, or this time has come. */
int os_is_due(int rank, uint64_t wanted_at);
/* Begins a turn of so many rounds. */
void os_begin_turn(int rank, int rounds);
/* Ends it: asks for the next one. */
void os_end_turn(int rank);

/* Makes a lane between two ranks; returns its number. */
int os_lane(int a, int b, const os_wire *wire, int fds[2]);
int os_lanes(void);
int os_lane_rank(int lane, int end);

void os_cut_lane(int lane, os_cut how, int ends);
/* What end sends on the lane waits until then, or is lost (OS_NEVER). */
void os_silence(int lane, int end, uint64_t until);
void os_slow_down(int lane, double factor);
/* Flips a bit of the next bytes that the end sends. */
void os_flip(int lane, int end);
/* Closes a descriptor behind the back of who has it. */
void os_close_end(int lane, int end);
/* Closes a descriptor that the core does not have. */
void os_close_fd(int fd);
void os_kill(int rank);
int os_is_dead(int rank);
/* Kills the rank with the n-th event: a descriptor's that epoll_wait brings to any rank, or a
 * sendmsg that has taken bytes. */
void os_kill_at(int rank, uint64_t event);
/* Returns how many events there were. */
uint64_t os_events(void);
void os_stop(int rank, uint64_t until);

#endif
