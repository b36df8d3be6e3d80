/* comm.h - a communicator: the links of one group of ranks, and the works in flight on them.
 *
 *                 submit                    start                      finish
 *   rc_submit  ----------->  inbox  ----------------->  active list  ---------->  history
 *                         (inbox lock)  (engine lock)                          (last 1,024)
 *
 * A frame names its collective by seq. If that is active, the work takes it; if it has not been
 * called yet here, the frame is kept (early); if it is over, the history tells a mismatch from a
 * protocol violation. Whatever goes wrong, comm_fail is the one way out: it latches the error, ends
 * every work with it, and tells every peer.
 *
 * States: NEW -> RUNNING -> FAILED -> CLOSED, or RUNNING -> CLOSED; never back.
 *
 * Files: comm.c life, submission, failure; comm_active.c works in flight; comm_frames.c what
 * arrives; comm_unexpected.c what arrives early; comm_announce.c what is announced; comm_match.c
 * receives; comm_timers.c deadlines, idle memory; comm_lanes.c lanes, heartbeats, lanes and peers
 * that fall silent; comm_ports.c ports that are lost; comm_shared.c shared memory.
 * Threading: under the engine's lock, but for the inbox.
 */
#ifndef RINGCOMM_COMM_H
#define RINGCOMM_COMM_H

#include "coll/shared.h"
#include "coll/work.h"

enum {
    COMM_HISTORY = 1024,
    COMM_MAX_EARLY_CALLS = 4096,
    LANE_NAME_BYTES = 2 * LANE_END_BYTES + 80
};

typedef enum comm_state { COMM_NEW, COMM_RUNNING, COMM_FAILED, COMM_CLOSED } comm_state;

struct rc_comm {
    engine_member member; /* first: the engine hands it back */
    rc_engine *engine;
    rc_comm_config config;
    work_env env;
    struct sender *sender; /* of long works' frames, or NULL */
    pool buffers;
    out_frame *frames;
    peer_link *link_storage; /* world_size of them, this rank's own unused */
    port_watch ports;        /* of this host, or without a descriptor */
    shared_memory shared;
    work_env among_hosts;                 /* the ranks with this one's place on each host */
    rc_work *waiting_head, *waiting_tail; /* works behind one that is entering shared memory */
    _Atomic comm_state state;             /* written under the lock, read anywhere */
    int leaving;                          /* goodbye is said */
    rc_error error;
    int error_origin; /* the rank that found it */

    rc_work *inbox_head, *inbox_tail; /* under the engine's inbox lock, as are the next numbers */
    uint64_t next_seq;
    atomic_int unnumbered; /* receives that wait to be matched; written under the same lock */

    rc_work *active_head, *active_tail;
    keyed_queues collectives; /* of these, by seq; receives are on their links */
    list pumped;              /* that go on bit by bit, or may: the others need no pump */
    keyed_queues late; /* receives that are not matched yet, by tag, in order of their calls */
    uint64_t called;   /* collectives started here */
    int early_calls;   /* announced calls among the early frames */
    uint64_t history[COMM_HISTORY]; /* fingerprints by seq */
    uint64_t last_tick, trim_at;    /* ns */
    uint64_t works_done, payload_bytes;
};

/* ---- comm.c ---- */

/* What rc_comm_create, _start, _abort, _leave, _close, _free and rc_submit do, once api.c
 * has checked the arguments. */
rc_result comm_create(rc_comm **out, rc_engine *engine, const rc_comm_config *config);
rc_result comm_start(rc_comm *c);
rc_result comm_submit(rc_comm *c, const rc_call *call, rc_work **out);
void comm_abort(rc_comm *c, const char *reason);
rc_result comm_leave(rc_comm *c, int timeout_ms);
rc_result comm_close(rc_comm *c, int timeout_ms);
void comm_free(rc_comm *c);

/* Latches the error, ends all works with it and, unless quietly, tells every peer. */
void comm_fail(rc_comm *c, const rc_error *error);
/* The same with an error that another rank has found. */
void comm_fail_by(rc_comm *c, const rc_error *error, int origin);
/* Makes error from a code and text, held against rank, and fails with it. Returns code. */
rc_result comm_fail_text(rc_comm *c, rc_result code, int rank, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Ends a work that has nothing left to do; others, and works of a failed communicator, are left. */
void comm_finish_complete(rc_comm *c, rc_work *w);
/* Sends a control frame. lane < 0: any. Returns 0 if it was dropped. */
int comm_send_control(rc_comm *c, peer_link *ln, frame_type type, uint64_t seq,
                      uint64_t fingerprint, uint16_t flags, int lane);
/* Raises PEER_LOST for the first active work that needs a peer which has left. */
void comm_check_left(rc_comm *c, const peer_link *ln);

/* Lets the work send a little more, now and in the next rounds, and ends it if that was all. */
void comm_go_on(rc_comm *c, rc_work *w);

/* Calls a work and puts it on the links of env. */
void comm_start_on_links(rc_comm *c, rc_work *w, work_env *env);

/* ---- comm_active.c ---- */

/* Works in flight, in the order in which they started. Those that frames may come for are found by
 * the name that the frames carry, in constant time. */
void comm_active_add(rc_comm *c, rc_work *w);
void comm_active_remove(rc_comm *c, rc_work *w);
/* A receive that was late has its number now. */
void comm_active_rename(rc_comm *c, rc_work *w);
/* The work that a peer's frame belongs to; NULL if there is none in flight. */
rc_work *comm_active_find(rc_comm *c, const frame_header *h, int from);
/* The first receive of a tag that is still to be matched; NULL if there is none. */
rc_work *comm_active_late(rc_comm *c, uint32_t tag);
/* From here on the work counts as called, for what peers send of it. */
void comm_note_call(rc_comm *c, const rc_work *w);

/* ---- comm_shared.c ---- */

/* What rc_comm_share does. */
rc_result comm_share(rc_comm *c, const int32_t *hosts, int fd);
void comm_unshare(rc_comm *c);
/* Takes a work that goes through shared memory, or has to wait for one that does; 0 if neither. */
int comm_start_shared(rc_comm *c, rc_work *w);
/* Of the member's pump, its stirred and doze: drive the works that go through shared memory. */
int comm_pump_shared(engine_member *member);
int comm_shared_stirred(const engine_member *member);
void comm_doze_shared(engine_member *member, int dozing);

/* ---- comm_match.c ---- */

/* Gives a send or receive its number, or leaves it to be matched. Under the inbox lock. */
rc_result comm_number(rc_comm *c, rc_work *w);
/* Matches a send that was not called for here with the first receive that may take it, and starts
 * that. 0 if there is none. A failure may end the communicator. */
int comm_match(rc_comm *c, peer_link *ln, const frame_header *h);
/* Starts what can be matched of the receives of a tag that were left. */
void comm_match_late(rc_comm *c, uint32_t tag);
/* 1 if a receive that is not matched cannot be any more: who could send has left. */
int comm_has_no_source(const rc_comm *c, const rc_work *w);

/* ---- comm_frames.c ---- */

extern const lane_handler comm_lane_handler;
int comm_prepare_frame(peer_link *ln, out_frame *frame);
/* RC_OK if a frame's fingerprint is that of the work that it is for; else fails. */
rc_result comm_check_work(rc_comm *c, const rc_work *w, const frame_header *h, int from);
/* Delivers a frame that came early to the work that it was for. The caller holds a reference. */
rc_result comm_deliver_early(rc_comm *c, rc_work *w, peer_link *ln, const frame_header *h,
                             const uint8_t *payload);

/* ---- comm_unexpected.c ---- */

/* A data frame begins that nothing was called for: takes its credit, and says where it goes. */
rc_result comm_unexpected_begin(rc_comm *c, peer_link *ln, const frame_header *h, rx_place *place);
/* Keeps a copy of an early frame, which fits the credit. */
rc_result comm_unexpected_keep(rc_comm *c, peer_link *ln, const frame_header *h,
                               const uint8_t *payload);
/* 1 if something of this send has come. */
int comm_unexpected_has_send(peer_link *ln, uint64_t name);
/* Gives a work that was just started the frames that came before it. */
rc_result comm_unexpected_replay(rc_comm *c, rc_work *w);
/* Compares a work that is not on links yet with the frames that came before it. */
rc_result comm_unexpected_check(rc_comm *c, const rc_work *w);
void comm_unexpected_drop(rc_comm *c);

/* ---- comm_announce.c ---- */

/* 1 if the peer has used so much of its credit that it must be told of calls. */
int comm_is_far_ahead(const peer_link *ln);
/* Announces a work to the peers of env that must know of it before its data can tell. */
void comm_announce(rc_comm *c, rc_work *w, const work_env *env);
/* The same for a work that waits its turn in shared memory: the first there tells by itself. */
void comm_announce_waiting(rc_comm *c, const rc_work *w);
/* Tells a peer of all that has been called here and that it may not know of. */
void comm_announce_all(rc_comm *c, peer_link *ln);
/* Tells a peer what it should have been told and was not, as memory was short. */
void comm_announce_again(rc_comm *c, peer_link *ln);
/* A receive is over: nobody has to be told of it. */
void comm_announce_forget(rc_comm *c, rc_work *w);

/* ---- comm_timers.c ---- */

uint64_t comm_tick(engine_member *member, uint64_t now);

/* ---- comm_lanes.c ---- */

/* What rc_comm_add_lane and _name_rail do. */
rc_result comm_add_lane(rc_comm *c, int peer, int rail, int fd, double bytes_per_s);
void comm_name_rail(rc_comm *c, int peer, int rail, const lane_path *path);
/* How often peers are looked at, and the timers run, whatever the deadlines. */
uint64_t comm_tick_interval(const rc_comm *c);
/* Sends heartbeats, and judges ports, lanes and peers. Returns when a port that is lost now is to
 * be judged (ns), or ENGINE_NEVER. */
uint64_t comm_check_peers(rc_comm *c, uint64_t now);
/* 1 if the lane is still to be judged. */
static inline int comm_is_judged(const lane *l)
{
    return l->source.fd >= 0 && !l->goodbye && !l->health.lost;
}
/* 1 if the lane is lost, or may well be: nothing that it has sent is worth waiting for. */
int comm_is_doubtful(const rc_comm *c, const lane *l);
/* A lane is of no more use: why is set, but for rail and lane. The one place where the end of a
 * lane has its consequences. The lane may be closed already, if nothing can be told over it. */
void comm_lose_lane(rc_comm *c, lane *l, rc_error *why);
/* Fails if somebody else in this process has closed a lane's socket, or what the engine waits with:
 * with every heartbeat, and before a failure that may be a consequence of it. */
void comm_check_closed(rc_comm *c);
/* "rail 1 between rank 0 (eth1 10.8.0.1 on a) and rank 2 (...)". Returns text. */
const char *comm_name_lane(const rc_comm *c, const lane *l, char *text, size_t size);
/* "; rail 1 ...: 1.3 MB unacknowledged, 0 B acknowledged in the last 10 s" for the lanes that have
 * something in flight, those that got nothing through first; "" if there are none. Returns text. */
const char *comm_list_unacked(const rc_comm *c, char *text, size_t size);

/* ---- comm_ports.c ---- */

/* What rc_comm_watch_ports does. */
void comm_watch_ports(rc_comm *c, int fd);
/* Begin and end to watch this host's ports, if there is a descriptor for it. */
void comm_open_ports(rc_comm *c);
void comm_close_ports(rc_comm *c);
/* Judges the lanes of ports that are lost for long enough. Returns when it is to be called again
 * (ns), or ENGINE_NEVER. */
uint64_t comm_check_ports(rc_comm *c, uint64_t now);

#endif
