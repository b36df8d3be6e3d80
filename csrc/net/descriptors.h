/* descriptors.h - the engine's own descriptors, and what becomes of any that somebody else in the
 * process closes: os.closerange, closefrom, a close too many.
 *
 * The number of a closed descriptor may be another file's at once. Then waiting on it would spin,
 * or sleep for ever; and bytes written to it would go into that file. So the driver looks every 10
 * ms at most whether its descriptors are still what they were.
 *
 * Epoll set and bell: EPOLL_CTL_MOD of the bell in the set succeeds only if both numbers are still
 * those of the two open files. Where it does not, the engine makes new ones, and goes on: nothing
 * that they held is lost. Until that is seen the number may be that of another epoll set, as the
 * sender's or a library's, whose events would be taken for the engine's: so its own bear its mark.
 *
 * A source has the inode that it had when it was added. One that has not is let go of without
 * touching the number, and told (engine_source.lost).
 *
 * Nothing is closed, nor the bell rung, that is not the engine's. Threading: under the engine's
 * lock, unless marked otherwise.
 */
#ifndef RINGCOMM_DESCRIPTORS_H
#define RINGCOMM_DESCRIPTORS_H

#include <sys/epoll.h>

#include "engine.h"

/* Makes the epoll set and the bell. 0 if that failed. */
int descriptors_open(rc_engine *e);
void descriptors_close(rc_engine *e);
/* Ends a sleep of the driver. Without the lock. */
void descriptors_ring(const rc_engine *e);
/* What the epoll set is told of a source; NULL: of the bell. */
struct epoll_event descriptors_event(const rc_engine *e, engine_source *source, uint32_t events);
/* Whose event it is: *source, NULL for the bell. 0 if it comes from another epoll set. */
int descriptors_source(const rc_engine *e, const struct epoll_event *event, engine_source **source);
/* Notes what a source's descriptor is. 0 if it is none. */
int descriptors_note(engine_source *source);
/* 1 if the number is still that of the source's open file. */
int descriptors_is_own(const engine_source *source);
/* Of the driver, before each round. */
void descriptors_check(rc_engine *e, uint64_t now);

#endif
