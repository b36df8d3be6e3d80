/* joined.h - how a work joins all ranks' contributions to a segment (direct, one-shot), and passes
 * the result on. Part of work.c's machine.
 *
 * A segment is joined when the last thing that it waits for has happened: the others' contributions
 * have come and, in one-shot, this rank's own is encoded or has left as a frame.
 *
 * A contribution that needs no encoding is sent from src itself, and the join, which may overwrite
 * it, waits until it has left for all peers. An encoded one lies in a buffer of its own.
 *
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_JOINED_H
#define RINGCOMM_JOINED_H

#include "work.h"

/* Returns 1 if the work is one-shot and its contribution is sent from src. */
int joined_sends_src(const rc_work *w);
/* Makes room for what is joined here: this rank's part, or everything. Returns RC_NO_MEMORY or
 * RC_OK. */
rc_result joined_init(rc_work *w);
/* Queues this rank's contribution to all peers, in one-shot. Returns RC_NO_MEMORY or RC_OK. */
rc_result joined_start(rc_work *w);
/* Takes a contribution that has come, and its buffer. */
rc_result joined_take(rc_work *w, const frame_header *h, pool_buffer *buffer);
/* Joins a segment that waits for nothing more, and sends the result on. chunk: any that brings some
 * of it. The work may be complete with the last frame sent. */
rc_result joined_segment(rc_work *w, uint32_t chunk, uint32_t segment);
/* Counts an event that a segment waits for (operands_count). Returns RC_NO_MEMORY or RC_OK. */
rc_result joined_note_event(rc_work *w, uint32_t segment);

#endif
