/* inside.h - what the files of comm/ call of each other; see comm.h. A file calls those whose
 * sections come before its own. */
#ifndef RINGCOMM_COMM_INSIDE_H
#define RINGCOMM_COMM_INSIDE_H

#include "comm.h"

enum { COMM_MAX_EARLY_CALLS = 4096, LANE_NAME_BYTES = 2 * LANE_END_BYTES + 80 };

/* Returns 1 for a frame of a send, or of its receive. */
static inline int comm_is_p2p(const frame_header *h)
{
    return (h->flags & FRAME_P2P) != 0;
}

/* ---- comm_state.c ---- */

/* Enters another state. */
void comm_move(rc_comm *c, comm_state to);

/* ---- active.c ---- */

/* Add and remove a work in flight; the list has them in the order in which they started. Works that
 * frames may come for are found by the name that the frames carry, in constant time. */
void comm_active_add(rc_comm *c, rc_work *w);
void comm_active_remove(rc_comm *c, rc_work *w);
/* Enters a receive that was unmatched under its number. */
void comm_active_rename(rc_comm *c, rc_work *w);
/* Returns the work that a peer's frame belongs to; NULL if there is none in flight. */
rc_work *comm_active_find(rc_comm *c, const frame_header *h, int from);
/* Returns the first receive of a tag that is still to be matched; NULL if there is none. */
rc_work *comm_active_first_unmatched(rc_comm *c, uint32_t tag);
/* Counts the work as called, so that its frames no longer come early. Returns RC_NO_MEMORY or
 * RC_OK; of a receive alone that can fail. */
rc_result comm_note_call(rc_comm *c, const rc_work *w);

/* ---- control.c ---- */

/* Sends a control frame. lane < 0: any. Returns 0 if it was dropped. */
int comm_send_control(rc_comm *c, peer_link *ln, frame_type type, uint64_t seq,
                      uint64_t fingerprint, uint16_t flags, int lane);
/* Sends a last frame on every lane to a peer: a lane's end, which may be seen first, must not come
 * without it. */
void comm_send_on_all_lanes(rc_comm *c, peer_link *ln, frame_type type, uint64_t seq);
/* Tells the peer, over another lane, that a connection of this one is given up, and how many frames
 * have come by it. Returns 0 if that was dropped. */
int comm_tell_lane_down(rc_comm *c, const lane *l, uint16_t made, uint32_t received);
/* Tell the peer what has come on a lane, if that is due; and at the end of a work, of which a rank
 * that is later may wait for that, if it is much. */
void comm_tell_received(rc_comm *c, lane *l);
void comm_tell_at_end(rc_comm *c);
/* Asks the peers of all lanes that keep more than heartbeats what has come there. */
void comm_ask(rc_comm *c);

/* ---- latch.c ---- */

/* Latches the error that ends the communicator; the first one counts. */
void comm_fail(rc_comm *c, const rc_error *error);
/* Fails as comm_fail does, with an error that rank `origin` has found; told: the same in its words,
 * for the other ranks. */
void comm_fail_by(rc_comm *c, const rc_error *error, const rc_error *told, int origin);
/* Makes an error of code and text, which names rank, and fails with it. Returns code. */
rc_result comm_fail_text(rc_comm *c, rc_result code, int rank, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Latches the end of a work, with the communicator's error or, if it is complete, without. */
void comm_end(rc_comm *c, rc_work *w, rc_result result);
/* Ends a work that is complete; does nothing for others, or if the communicator has failed. */
void comm_finish_complete(rc_comm *c, rc_work *w);

/* ---- deliver.c ---- */

/* Returns RC_OK if a frame's fingerprint is that of its work; else fails. */
rc_result comm_check_work(rc_comm *c, const rc_work *w, const frame_header *h, int from);
/* Compares a frame with a collective that is over here, as far as the history has it. */
rc_result comm_check_history(rc_comm *c, const frame_header *h, int from);
/* Begin a data frame of a work in flight, and end it when the payload has come, which may complete
 * the work. Fail if they are refused. */
rc_result comm_begin_data(rc_comm *c, rc_work *w, const frame_header *h, int from, rx_place *place);
rc_result comm_end_data(rc_comm *c, rc_work *w, peer_link *ln, const frame_header *h,
                        rx_place *place);
/* Delivers an early frame to its work. */
rc_result comm_deliver(rc_comm *c, rc_work *w, peer_link *ln, const frame_header *h,
                       const uint8_t *payload);

/* ---- announce.c ---- */

/* Returns 1 if the peer has used so much of its credit that calls must be announced to it. */
int comm_is_far_ahead(const peer_link *ln);
/* Announces a work to the peers of env that must know of it before its data shows it. */
void comm_announce(rc_comm *c, rc_work *w, const work_env *env);
/* Announces a work that waits its turn in shared memory; the first in line shows itself there. */
void comm_announce_waiting(rc_comm *c, const rc_work *w);
/* Announces to a peer all calls made here that it may not know of. */
void comm_announce_all(rc_comm *c, peer_link *ln);
/* Sends a peer the announcements that failed earlier, as memory was short. */
void comm_announce_again(rc_comm *c, peer_link *ln);

/* ---- unexpected.c ---- */

/* Probes a lane of a link, if it is slow and it is time (link_probe). */
void comm_probe(rc_comm *c, lane *l);
/* Begins a data frame whose work has not been called: counts it against the credit, and gives it a
 * buffer. */
rc_result comm_unexpected_begin(rc_comm *c, peer_link *ln, const frame_header *h, rx_place *place);
/* Keeps a copy of an early frame, which fits the credit. */
rc_result comm_unexpected_keep(rc_comm *c, peer_link *ln, const frame_header *h,
                               const uint8_t *payload);
/* Returns 1 if a frame of this send has come. */
int comm_unexpected_has_send(peer_link *ln, uint64_t name);
/* Gives a work that was just started the frames that came before it. */
rc_result comm_unexpected_replay(rc_comm *c, rc_work *w);
/* Compares a work that is not on links yet with the frames that came before it. */
rc_result comm_unexpected_check(rc_comm *c, const rc_work *w);
void comm_unexpected_drop(rc_comm *c);

/* ---- start.c ---- */

/* Fails with RC_PEER_LOST if a work needs a peer that has left. */
void comm_check_sources(rc_comm *c, const rc_work *w);
/* Fails likewise if an active work needs this one. */
void comm_check_left(rc_comm *c, const peer_link *ln);
/* Counts a work as called and starts it on the links of env. */
void comm_start_on_links(rc_comm *c, rc_work *w, work_env *env);
/* Sends a little more of a work, now and in the next rounds, and ends the work if that was all. */
void comm_send_more(rc_comm *c, rc_work *w);

/* ---- match.c ---- */

/* Gives a send or receive its number, or leaves it to be matched. Under the inbox lock. */
rc_result comm_number(rc_comm *c, rc_work *w);
/* Matches a send whose receive has not been called here with the first receive that may take it,
 * and starts that. Returns 0 if there is none. */
int comm_match(rc_comm *c, peer_link *ln, const frame_header *h);
/* Starts the unmatched receives of a tag that can be matched now. */
void comm_match_receives(rc_comm *c, uint32_t tag);

/* ---- memory.c ---- */

void comm_unshare(rc_comm *c);
/* Takes a work that goes through shared memory, or has to wait for one that does. Returns 0 if it
 * does neither. */
int comm_start_shared(rc_comm *c, rc_work *w);
/* Parts of the member's pump, its can_advance and set_wakeup_wanted: drive the works that go
 * through shared memory.
 */
int comm_pump_shared(engine_member *member);
int comm_shared_can_advance(const engine_member *member);
void comm_shared_set_wakeup_wanted(engine_member *member, int wanted);

/* ---- call.c ---- */

/* Starts what is in the inbox: the member's drain. */
void comm_drain(engine_member *member);
/* Advances works: the member's pump. */
int comm_pump(engine_member *member);

/* ---- recover.c ---- */

/* Notes what the peer says has come on a lane, and answers if it asks. Fails if it cannot be. */
rc_result comm_learn_received(rc_comm *c, lane *l, const frame_header *h);
/* Returns 1 if another lane of the same link lives, as far as is known. */
int comm_has_another(const lane *l);
/* Returns 1 if the lane's frames can go on over another one, or a later one. */
int comm_can_give_up(const lane *l);
/* Gives up a lane. Returns 0 if its frames cannot go on. */
int comm_give_up_lane(rc_comm *c, lane *l);
/* Returns the lane that was lost last if all of the link are, else NULL. */
const lane *comm_last_lost(const peer_link *ln);
/* Tells the peer of lanes that are lost, as far as it does not know. */
void comm_tell_lost_lanes(rc_comm *c, peer_link *ln);
/* Opens a lane over a socket, which is closed if that fails. */
rc_result comm_open_lane(rc_comm *c, lane *l, int fd);
/* Takes the peer's word that it has given up a lane, and what had come there; sends the rest again.
 */
rc_result comm_hear_lane_down(rc_comm *c, const lane *by, const frame_header *h);
/* Releases the frames that are kept for a peer that has left. */
void comm_forget_kept(rc_comm *c, peer_link *ln);
/* Returns 1 if frames that a peer needs may not have come to it. */
int comm_owes(const peer_link *ln);
/* Drops the payload that is being received into a pool buffer: nobody will use it. */
void comm_drop_half_received(rc_comm *c, lane *l);

/* ---- lanes.c ---- */

/* Returns the interval (ns) at which peers are checked and the timers run, whatever the deadlines.
 */
uint64_t comm_tick_interval(const rc_comm *c);
/* Sends heartbeats, and checks lanes and peers. */
void comm_check_peers(rc_comm *c, uint64_t now);
/* Returns 1 if the lane is still monitored. */
static inline int comm_monitors_lane(const lane *l)
{
    return l->state == LANE_OPEN && !l->health.lost;
}
/* Returns 1 if the lane is lost, or may well be: nobody should wait for what it has sent. */
int comm_lane_may_be_dead(const rc_comm *c, const lane *l);
/* Gives up a lane, whose error is then why; fails with it, the only place that does, if lanes are
 * not made anew. why is set, except for rail and lane. The lane may be closed already, if nothing
 * can be sent over it. */
void comm_lose_lane(rc_comm *c, lane *l, rc_error *why);
/* Sets what is said of the loss of a lane, by the lane's own error. */
void comm_blame_lane(const rc_comm *c, const lane *l, rc_error *error);
/* Fails if somebody else in this process has closed a lane's socket, or a descriptor that the
 * engine waits with. Called with every heartbeat, and before a failure that may follow from it. */
void comm_check_closed(rc_comm *c);
/* Writes "rail 1 between rank 0 (eth1 10.8.0.1 on a) and rank 2 (...)". Returns text. */
const char *comm_name_lane(const rc_comm *c, const lane *l, char *text, size_t size);
/* Writes "; rail 1 ...: 1.3 MB unacknowledged, 0 B acknowledged in the last 10 s" for the lanes
 * that have something in flight, those that got nothing through first; "" if there are none.
 * Returns text. */
const char *comm_list_unacked(const rc_comm *c, char *text, size_t size);

/* ---- port_watch.c ---- */

/* Begin and end watching this host's ports, if there is a descriptor for it. */
void comm_open_ports(rc_comm *c);
void comm_close_ports(rc_comm *c);
/* Fails if a port has been lost for long enough. Returns when it is to be called again (ns), or
 * ENGINE_NEVER. */
uint64_t comm_check_ports(rc_comm *c, uint64_t now);

/* ---- timers.c ---- */

/* Does what is due: the member's tick. */
uint64_t comm_tick(engine_member *member, uint64_t now);

/* ---- dispatch.c ---- */

extern const lane_handler comm_lane_handler;
int comm_prepare_frame(peer_link *ln, out_frame *frame);

/* ---- settle.c ---- */

/* Ends what is latched, once all handlers have returned: works get their results; a communicator
 * that fails ends all its works and, unless the goodbye is sent, aborts every peer. */
void comm_settle(engine_member *member);

#endif
