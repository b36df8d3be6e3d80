/* sender.h - a second thread, which sends where one thread is slower than the ports.
 *
 * Problem. One thread that receives, reduces and sends carries some 1.5 GB/s each way. About half
 * of that is sending: the CRC of what leaves, and the kernel's copy of it.
 *
 * Design. While long works are in flight, a lane's outbox is handed over with the first large frame
 * that is pushed. From then on the sender seals and sends what is in it and waits for room in the
 * socket, in an epoll set of its own; the driver goes on receiving and reducing, and pushes more.
 * The driver gives back the frames that are gone in its next round (sender_settle), and takes the
 * outbox back if it is empty then. So small messages never pass between threads.
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
    pthread_cond_t rested; /* a system call is over that take_back waits for */
    pollset set;
    int asleep, stopping;
    outbox *first, *last; /* outboxes handed over, the longest waiting first */
    atomic_int news;      /* some outbox has news */
    uint32_t least;       /* payload of a frame worth handing over; 0: any, in any work */
} sender;

/* Ends what sender_get (engine.h) has started (NULL: nothing). No outbox may be handed over any
 * more.
 */
void sender_stop(sender *s);
/* Closes the descriptors in a forked child, which has no such thread. s may be NULL. */
void sender_after_fork(sender *s);
/* Returns the CPU seconds of its thread; 0 for NULL. */
double sender_cpu_seconds(sender *s);

/* The functions below are for the driver, under the engine's lock. */

/* Returns 1 if an outbox is to be handed over for this frame. */
int sender_wants(const sender *s, const out_frame *frame);
/* Hands over an outbox that has its settle set. Returns 0 if that is not possible. */
int sender_hand_over(sender *s, outbox *box, int fd);
/* Pushes a frame to an outbox that is handed over. */
void sender_push(sender *s, outbox *box, out_frame *frame);
/* Takes an outbox back; waits for a system call on it. Frames that are gone are in back then. */
void sender_take_back(sender *s, outbox *box);
/* Takes a descriptor out of the sender's epoll set, before it is closed, if its outbox was ever
 * handed over. */
void sender_forget(sender *s, outbox *box);
/* Returns 1 if sender_settle has something to do. s may be NULL, there too. */
int sender_has_news(const sender *s);
/* Calls settle of every outbox with news: its frames that are gone are in `back`, and if it was
 * empty, or broken, it has returned to the driver. */
void sender_settle(sender *s);

#endif
