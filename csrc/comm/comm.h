/* comm.h - a communicator: the links of one group of ranks, and the works in flight on them. The
 * interface of comm/ to api*.c and pipe/.
 *
 *                 submit                    start                   complete          round's end
 *   rc_submit  ----------->  inbox  ----------------->  active list  ------->  ending  ---------->
 *                         (inbox lock)  (engine lock)
 *
 * A frame names its collective by seq. If that is active, the work takes it; if it has not been
 * called yet here, the frame is kept (early); if it is over, the history of the last 1,024 tells a
 * mismatch from a protocol violation.
 *
 * Ends. Who finds that a work is complete, or an error, latches that (latch.c). What is latched is
 * ended in one place, comm_settle, when the handlers of the engine's round have returned: works get
 * their results, and a failure ends every work and aborts every peer. So no work ends, and no lane
 * is detached, below a function that uses it.
 *
 * Files, each of which calls only those after it (tools/circles.py):
 *
 *   life.c      from lanes to goodbye     memory.c      works that go through a host's memory
 *   settle.c    ends                      match.c       receives and their sends
 *   timers.c    deadlines                 start.c       works on links
 *   dispatch.c  frames that arrive        unexpected.c  frames that come early
 *   port_watch.c  ports that are lost     announce.c    calls announced to peers
 *   lanes.c     lanes and peers that      deliver.c     a frame and its work
 *               fall silent               latch.c       ends, noted
 *   recover.c   lanes that are lost       control.c     control frames
 *   call.c      submission, turns         active.c      works by their names
 *                                         comm_state.c  states
 *
 * Threading: under the engine's lock, except for the inbox.
 */
#ifndef RINGCOMM_COMM_H
#define RINGCOMM_COMM_H

#include "../coll/work.h"

enum { COMM_HISTORY = 1024 };

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
    int leaving;              /* goodbyes are sent as soon as peers have all that they need */
    int has_asked;            /* who is leaving has asked what has come */
    rc_error error;
    rc_error told;    /* the same as its finder has it, which is passed on */
    int error_origin; /* the rank that found the error */

    list inbox; /* under the engine's inbox lock, as are the next numbers */
    uint64_t next_seq;
    atomic_int unnumbered; /* receives that wait to be matched; written under the same lock */

    list active;              /* in the order in which they started */
    list ending;              /* in the order in which they ended */
    keyed_queues collectives; /* active ones by seq; receives are on their links */
    list runnable;            /* works that may have more to send or copy later */
    keyed_queues unmatched; /* receives that are not matched yet, by tag, in order of their calls */
    uint64_t called;        /* collectives started here */
    uint64_t submitted;     /* collectives that the program has called, those in line included */
    int early_calls;        /* announced calls among the early frames */
    uint64_t history[COMM_HISTORY]; /* fingerprints by seq */
    uint64_t last_tick, trim_at;    /* ns */
    uint64_t works_done, payload_bytes;
};

/* Implement rc_comm_create, _share, _add_lane, _name_rail, _watch_ports, _start, _abort, _leave,
 * _close, _free, _drop_lane, _renew_lane, _lose_peer and rc_submit, once api*.c has checked the
 * arguments. */
rc_result comm_create(rc_comm **out, rc_engine *engine, const rc_comm_config *config);
rc_result comm_share(rc_comm *c, const int32_t *hosts, int fd);
rc_result comm_add_lane(rc_comm *c, int peer, int rail, int fd, double bytes_per_s);
void comm_name_rail(rc_comm *c, int peer, int rail, const lane_path *path);
void comm_watch_ports(rc_comm *c, int fd);
rc_result comm_start(rc_comm *c);
rc_result comm_submit(rc_comm *c, const rc_call *call, rc_work **out);
void comm_abort(rc_comm *c, const char *reason);
rc_result comm_leave(rc_comm *c, int timeout_ms);
rc_result comm_close(rc_comm *c, int timeout_ms);
void comm_free(rc_comm *c);
rc_result comm_drop_lane(rc_comm *c, int peer, int index, rc_lane_mark *out);
rc_result comm_renew_lane(rc_comm *c, int peer, int index, int fd, const rc_lane_mark *ours,
                          const rc_lane_mark *theirs);
rc_result comm_lose_peer(rc_comm *c, int peer);
/* Returns 1 if the lane is open, but its peer is silent on all lanes: it may have lost them, and
 * has none by which to tell. */
int comm_may_have_lost(const rc_comm *c, const lane *l);

/* Give pipe/ what it needs of a communicator, none of which changes once that has started. */
rc_engine *comm_engine(const rc_comm *c);
int comm_rank(const rc_comm *c);
int comm_world_size(const rc_comm *c);
/* Returns the ranks whose values are in a result. */
int comm_contributors(const rc_comm *c);
/* Returns the hosts whose ranks share memory; 0: none do. */
int comm_hosts(const rc_comm *c);
/* Returns how long (ns) a thread that waits spins. */
uint64_t comm_spin(const rc_comm *c);

#endif
