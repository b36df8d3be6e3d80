/* keep.h - the copy of a rank's own values from src to dst, where a collective needs one: of the
 * sources of all-gather, broadcast and all-to-all, of the roots of gather and scatter, of anything
 * in a world of one.
 *
 * Values are copied a piece at a time, as the engine goes round, because they can be gigabytes and
 * all else on the engine waits meanwhile. As little as one piece is copied when the work starts. A
 * work is complete only when all is copied; one that fails leaves the rest as it is.
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

/* Begins the copy of a work whose plan is laid out, with the first piece; keep_some (work.h) makes
 * the others. */
void keep_begin(rc_work *w);

#endif
