/* sender.h - a second thread, which sends where one is outrun by its ports.
 *
 * Problem. One thread that receives, reduces and sends carries some 1.5 GB/s each way. About half
 * of that is sending: the CRC of what leaves, and the kernel's copy of it.
 *
 * Design. While long works are in flight, a lane's outbox is handed over with the first large frame
 * that is pushed. From then on the sender seals and sends what is in it and waits for room in the
 * socket, in an epoll set of its own; the driver goes on receiving and reducing, and pushes more.
 * What is gone the driver gives back in its next round (sender_settle), and if the outbox is empty
 * then, takes it back. So small messages never pass between threads.
 *
 *     driver   push ------> list | settle: give back, take back if empty
 *                            |   |                ^
 *     sender                 +---> seal, sendmsg -+ (news; wakes a driver that sleeps)
 *
 * Threading. The sender's lock is taken under the engine's, never the other way round, and held by
 * the sender for list work only, never in a system call that moves data. sender_take_back waits for
 * such a call in progress, which never blocks.
 */
#ifndef RINGCOMM_SENDER_H
#define RINGCOMM_SENDER_H

#include "engine.h"
#include "outbox.h"
#include "pollset.h"

typedef struct sender {
    rc_engine *engine;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t rested; /* a system call is over that somebody waits for */
    pollset set;
    int asleep, stopping;
    outbox *first, *last; /* those handed over, the one that waited longest first */
    atomic_int news;      /* some outbox has news */
    uint32_t least;       /* payload of a frame that is worth it; 0: any, in any work */
} sender;

/* The engine's sender, started if there is none. Under the engine's lock. NULL if that fails. */
sender *sender_get(rc_engine *e);
/* Ends it; takes NULL. Nothing may be handed over any more. */
void sender_stop(sender *s);
/* In a forked child, where its thread is not: closes its descriptors. Takes NULL. */
void sender_after_fork(sender *s);
/* CPU seconds of its thread. Takes NULL. */
double sender_cpu_seconds(sender *s);

/* The rest is for the driver, under the engine's lock. */

/* 1 if an outbox is to be handed over for this frame. */
int sender_wants(const sender *s, const out_frame *frame);
/* Hands over an outbox that has its settle set. 0 if that cannot be. */
int sender_hand_over(sender *s, outbox *box, int fd);
/* Pushes a frame to one that is handed over. */
void sender_push(sender *s, outbox *box, out_frame *frame);
/* Returns when it is the driver's again, with what it had gone. */
void sender_take_back(sender *s, outbox *box);
/* Before the descriptor of an outbox that was handed over once is closed. */
void sender_forget(sender *s, outbox *box);
/* 1 if sender_settle has something to do. Takes NULL, as does that. */
int sender_has_news(const sender *s);
/* Lets every outbox with news settle: its frames that are gone are in `back`, and if it was empty,
 * or broken, it has returned to the driver. */
void sender_settle(sender *s);

#endif
