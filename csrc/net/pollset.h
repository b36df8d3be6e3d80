/* pollset.h - an epoll set, and the bell that ends a wait for it. The engine and the sender have
 * one each.
 *
 * The bell is a file that can always be read, watched edge-triggered. Ringing has the set look at
 * it anew (EPOLL_CTL_MOD): one system call, which succeeds only while both numbers are still those
 * of the two open files.
 *
 * Somebody else in the process may close them (os.closerange, a close too many), and their numbers
 * may then be other files'. These are neither written to nor closed: the first ring that fails
 * gives up both numbers for good, and from then on every wait is refused. Until then the number may
 * be another set's, so the data of an event is a number of its owner's that may be wrong, never an
 * address.
 *
 * Threading: ring from any thread; open and close are the owner's.
 */
#ifndef RINGCOMM_POLLSET_H
#define RINGCOMM_POLLSET_H

#include <stdatomic.h>
#include <stdint.h>
#include <sys/epoll.h>

#define POLLSET_BELL UINT64_MAX /* the data of the bell's events */

typedef struct pollset {
    atomic_int epoll_fd, bell_fd; /* -1: given up, or closed */
} pollset;

/* Opens the set and its bell. Returns 0 if that failed; errno says why. */
int pollset_open(pollset *p);
/* Ends a wait, the current or the next. Returns 0 if the set or the bell belongs to somebody else
 * by now. */
int pollset_ring(pollset *p);
/* Closes set and bell, if they are still the owner's. */
void pollset_close(pollset *p);

#endif
