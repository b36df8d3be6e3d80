/* comm.h - a communicator: the links of one group of ranks, and the works in flight on them.
 *
 *                 submit                    start                      finish
 *   rc_submit  ----------->  inbox  ----------------->  active list  ---------->  history
 *                         (inbox lock)  (engine lock)                          (last 1,024)
 *
 * A frame names its collective by seq. If that is active, the work takes it; if it has not been
 * called yet here, the frame is kept (early); if it is over, the history tells a mismatch from a
 * protocol violation.
 *
 * Ends. Who finds that a work is complete, or an error, latches that (comm_finish_complete,
 * comm_fail). What is latched is ended in one place, comm_settle, when the engine's round is over:
 * works get their results, and a failure ends every work and aborts every peer. So no work ends,
 * and no lane is detached, below a function that uses it.
 *
 * Files: comm.c life, submission; comm_settle.c ends; comm_active.c works in flight; comm_frames.c
 * frames that arrive; comm_unexpected.c frames that arrive early; comm_announce.c calls announced
 * to peers; comm_match.c receives; comm_timers.c deadlines, idle memory; comm_lanes.c lanes,
 * heartbeats, lanes and peers that fall silent; comm_ports.c ports that are lost; comm_shared.c
 * shared memory. The interface of all of these to api*.c and pipe/. Threading: under the engine's
 * lock, except for the inbox.
 */
#ifndef RINGCOMM_COMM_H
#define RINGCOMM_COMM_H

#include "coll/work.h"

enum {
    COMM_HISTORY = 1024,
    COMM_MAX_EARLY_CALLS = 4096,
    LANE_NAME_BYTES = 2 * LANE_END_BYTES + 80
};

/* States of a communicator; comm_moves has what may follow what. */
typedef enum comm_state {
    COMM_NEW,
    COMM_RUNNING,
    COMM_FAILING, /* the error is latched: comm_settle is next */
    COMM_FAILED,
    COMM_CLOSED
} comm_state;

/* The states that may follow each, as bits. */
extern const unsigned comm_moves[];

struct rc_comm {
    engine_member member; /* must be first: the engine hands it back */
    rc_engine *engine;
    rc_comm_config config;
    work_env env;
    struct sender *sender; /* sends long works' frames, or NULL */
    pool buffers;
    out_frame *frames;
    peer_link *link_storage; /* world_size links, this rank's own unused */
    port_watch ports;        /* of this host; without a descriptor: not watched */
    shared_memory shared;
    work_env among_hosts;                 /* the ranks with this one's place on each host */
    rc_work *waiting_head, *waiting_tail; /* works behind one that is entering shared memory */
    _Atomic comm_state state; /* set by comm_move alone, under the lock; read anywhere */
    int leaving;              /* the goodbye is sent */
    rc_error error;
    int error_origin; /* the rank that found the error */

    rc_work *inbox_head, *inbox_tail; /* under the engine's inbox lock, as are the next numbers */
    uint64_t next_seq;
    atomic_int unnumbered; /* receives that wait to be matched; written under the same lock */

    rc_work *active_head, *active_tail;
    rc_work *ending_head, *ending_tail; /* in the order in which they ended */
    keyed_queues collectives;           /* active ones by seq; receives are on their links */
    list runnable;                      /* works that may have more to send or copy later */
    keyed_queues unmatched; /* receives that are not matched yet, by tag, in order of their calls */
    uint64_t called;        /* collectives started here */
    int early_calls;        /* announced calls among the early frames */
    uint64_t history[COMM_HISTORY]; /* fingerprints by seq */
    uint64_t last_tick, trim_at;    /* ns */
    uint64_t works_done, payload_bytes;
};

/* ---- comm.c ---- */

/* Implement rc_comm_create, _start, _abort, _leave, _close, _free and rc_submit, once api.c has
 * checked the arguments. */
rc_result comm_create(rc_comm **out, rc_engine *engine, const rc_comm_config *config);
rc_result comm_start(rc_comm *c);
rc_result comm_submit(rc_comm *c, const rc_call *call, rc_work **out);
void comm_abort(rc_comm *c, const char *reason);
rc_result comm_leave(rc_comm *c, int timeout_ms);
rc_result comm_close(rc_comm *c, int timeout_ms);
void comm_free(rc_comm *c);

/* Sends a control frame. lane < 0: any. Returns 0 if it was dropped. */
int comm_send_control(rc_comm *c, peer_link *ln, frame_type type, uint64_t seq,
                      uint64_t fingerprint, uint16_t flags, int lane);
/* Fails with RC_PEER_LOST if an active work needs a peer that has left. */
void comm_check_left(rc_comm *c, const peer_link *ln);

/* Sends a little more of a work, now and in the next rounds, and ends the work if that was all. */
void comm_send_more(rc_comm *c, rc_work *w);

/* Counts a work as called and starts it on the links of env. */
void comm_start_on_links(rc_comm *c, rc_work *w, work_env *env);

/* ---- comm_settle.c ---- */

/* Latches the error that ends the communicator; the first one counts. */
void comm_fail(rc_comm *c, const rc_error *error);
/* Fails as comm_fail does, with an error that rank `origin` has found. */
void comm_fail_by(rc_comm *c, const rc_error *error, int origin);
/* Makes an error of code and text, which names rank, and fails with it. Returns code. */
rc_result comm_fail_text(rc_comm *c, rc_result code, int rank, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Latches the end of a work, with the communicator's error or, if it is complete, without. */
void comm_end(rc_comm *c, rc_work *w, rc_result result);
/* Ends a work that is complete; does nothing for others, or if the communicator has failed. */
void comm_finish_complete(rc_comm *c, rc_work *w);
/* Ends what is latched, once all handlers have returned: works get their results; a communicator
 * that fails ends all its works and, unless the goodbye is sent, aborts every peer. */
void comm_settle(engine_member *member);
/* Sends a last frame on every lane: a lane's end, which may be seen first, must not come without
 * it. */
void comm_send_on_all_lanes(rc_comm *c, frame_type type, uint64_t seq);
/* Drops the payload that is being received into a pool buffer: nobody will use it. */
void comm_drop_half_received(rc_comm *c, lane *l);

/* ---- comm_state.c ---- */

/* Enters another state. */
void comm_move(rc_comm *c, comm_state to);

/* ---- comm_active.c ---- */

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

/* ---- comm_shared.c ---- */

/* Implements rc_comm_share. */
rc_result comm_share(rc_comm *c, const int32_t *hosts, int fd);
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

/* ---- comm_match.c ---- */

/* Gives a send or receive its number, or leaves it to be matched. Under the inbox lock. */
rc_result comm_number(rc_comm *c, rc_work *w);
/* Matches a send whose receive has not been called here with the first receive that may take it,
 * and starts that. Returns 0 if there is none. A failure may end the communicator. */
int comm_match(rc_comm *c, peer_link *ln, const frame_header *h);
/* Starts the unmatched receives of a tag that can be matched now. */
void comm_match_receives(rc_comm *c, uint32_t tag);
/* Returns 1 if a receive that is not matched never will be: all that could send have left. */
int comm_has_no_source(const rc_comm *c, const rc_work *w);

/* ---- comm_frames.c ---- */

extern const lane_handler comm_lane_handler;
int comm_prepare_frame(peer_link *ln, out_frame *frame);
/* Returns RC_OK if a frame's fingerprint is that of its work; else fails. */
rc_result comm_check_work(rc_comm *c, const rc_work *w, const frame_header *h, int from);
/* Delivers an early frame to its work. The caller holds a reference. */
rc_result comm_deliver_early(rc_comm *c, rc_work *w, peer_link *ln, const frame_header *h,
                             const uint8_t *payload);

/* ---- comm_unexpected.c ---- */

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

/* ---- comm_announce.c ---- */

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
/* Drops the announcement of a receive that is over. */
void comm_announce_forget(rc_comm *c, rc_work *w);

/* ---- comm_timers.c ---- */

uint64_t comm_tick(engine_member *member, uint64_t now);

/* ---- comm_lanes.c ---- */

/* Implement rc_comm_add_lane and _name_rail. */
rc_result comm_add_lane(rc_comm *c, int peer, int rail, int fd, double bytes_per_s);
void comm_name_rail(rc_comm *c, int peer, int rail, const lane_path *path);
/* Returns the interval (ns) at which peers are checked and the timers run, whatever the deadlines.
 */
uint64_t comm_tick_interval(const rc_comm *c);
/* Sends heartbeats, and checks ports, lanes and peers. Returns when a port that is lost now is to
 * be judged (ns), or ENGINE_NEVER. */
uint64_t comm_check_peers(rc_comm *c, uint64_t now);
/* Returns 1 if the lane is still monitored. */
static inline int comm_monitors_lane(const lane *l)
{
    return l->state == LANE_OPEN && !l->health.lost;
}
/* Returns 1 if the lane is lost, or may well be: nobody should wait for what it has sent. */
int comm_lane_may_be_dead(const rc_comm *c, const lane *l);
/* Fails with the loss of a lane, the only place that does. why is set, except for rail and lane.
 * The lane may be closed already, if nothing can be sent over it. */
void comm_lose_lane(rc_comm *c, lane *l, rc_error *why);
/* Fails if somebody else in this process has closed a lane's socket, or a descriptor that the
 * engine waits with. Called with every heartbeat, and before a failure that may follow from it. */
void comm_check_closed(rc_comm *c);
/* Writes "rail 1 between rank 0 (eth1 10.8.0.1 on a) and rank 2 (...)". Returns text. */
const char *comm_name_lane(const rc_comm *c, const lane *l, char *text, size_t size);
/* Writes "; rail 1 ...: 1.3 MB unacknowledged, 0 B acknowledged in the last 10 s" for the lanes
 * that have something in flight, those that got nothing through first; "" if there are none.
 * Returns text. */
const char *comm_list_unacked(const rc_comm *c, char *text, size_t size);

/* ---- comm_ports.c ---- */

/* Implements rc_comm_watch_ports. */
void comm_watch_ports(rc_comm *c, int fd);
/* Begin and end watching this host's ports, if there is a descriptor for it. */
void comm_open_ports(rc_comm *c);
void comm_close_ports(rc_comm *c);
/* Fails if a port has been lost for long enough. Returns when it is to be called again (ns), or
 * ENGINE_NEVER. */
uint64_t comm_check_ports(rc_comm *c, uint64_t now);

#endif
