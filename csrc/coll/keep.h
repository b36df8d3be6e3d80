/* keep.h - what a collective leaves of a rank's own values with it: all-gather, broadcast and
 * all-to-all of their sources, gather and scatter of their roots', anything in a world of one.
 *
 * It is copied from src to dst a piece at a time, as the engine goes round, because it can be
 * gigabytes, and all else on the engine waits meanwhile. So little that one piece does is there
 * when the work has started. A work is not complete before it is copied; one that fails leaves the
 * rest as it is.
 *
 * Where others receive an encoding of these values, the rank keeps what that decodes to. Nothing
 * else writes to that place of dst. Part of work.c's machine.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_KEEP_H
#define RINGCOMM_KEEP_H

#include "work.h"

enum { KEEP_PIECE_BYTES = 256 << 10 }; /* a segment, which is what all else on the engine moves */

/* Of a work whose plan is laid out: copies the first piece. */
void keep_begin(rc_work *w);
/* 1 if some is left. */
int keep_is_left(const rc_work *w);
/* Copies the next piece, if some is left; the work may be complete afterwards. */
void keep_some(rc_work *w);

#endif
