/* to_all.h - how a work sends its contribution to every other rank. Part of work.c's machine.
 *
 * A contribution that needs no encoding is sent from src itself, and the join, which may overwrite
 * it, waits until it has left for all peers. An encoded one lies in a buffer of its own.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_TO_ALL_H
#define RINGCOMM_TO_ALL_H

#include "work.h"

/* Queues all segments to all peers. Returns RC_NO_MEMORY or RC_OK. */
rc_result to_all_start(rc_work *w);

#endif
