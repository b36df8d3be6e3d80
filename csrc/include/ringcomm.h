/* ringcomm.h - the public C interface of ringcomm.
 *
 * What it is. A communicator (rc_comm) joins world_size ranks by connected, authenticated stream
 * sockets that the caller made and hands over (rc_comm_add_lane). Collectives are submitted as
 * calls (rc_submit), run in the background as works (rc_work) and are waited for, polled or
 * collected. The core never listens, connects, resolves a name or reads the environment.
 *
 * Threads. An rc_engine owns one progress thread and drives every communicator made on it. Every
 * function may be called from any thread, unless its comment says otherwise. A thread inside
 * rc_work_wait drives the engine itself; the progress thread does so when nobody waits. A second
 * thread sends, where a communicator asks for it (rc_comm_config.threads).
 *
 * Order. All ranks must submit the same collectives on a communicator in the same order. Each
 * frame carries the call's fingerprint, so a difference is RC_MISMATCH on both sides, not a hang.
 *
 * Ownership. _create and _free come in pairs; _free takes NULL. Buffers are borrowed from
 * rc_submit until the work is done. After a failure the content of dst is undefined.
 *
 * Errors. Fallible functions return an rc_result. The first failure of a communicator is kept:
 * every pending and later work of it ends with that error.
 *
 * The Python package compiles its declarations from this file, so between the two guards below it
 * holds plain declarations and integer macros only.
 */
#ifndef RINGCOMM_H
#define RINGCOMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* -- begin declarations -- */

/* ---- results ---- */

typedef enum rc_result {
    RC_OK = 0,
    RC_AGAIN = 1,            /* not yet: still in flight */
    RC_TIMEOUT = 2,          /* a deadline passed */
    RC_INVALID_ARGUMENT = 3, /* the caller's mistake; nothing was changed */
    RC_INVALID_STATE = 4,    /* closed, freed, or used in a forked child */
    RC_MISMATCH = 5,         /* ranks called different collectives */
    RC_PEER_LOST = 6,        /* a peer died, left or stopped answering */
    RC_PROTOCOL = 7,         /* a peer sent bytes that no correct peer sends */
    RC_SYSTEM = 8,           /* a system call failed; see sys_errno */
    RC_NO_MEMORY = 9,
    RC_ABORTED = 10, /* rc_comm_abort here or on another rank */
    RC_INTERNAL = 11,
    RC_DEVICE = 12 /* a GPU or its driver failed, or there is none */
} rc_result;

/* Everything known about a failure. rank, rail and lane are -1 where they do not apply. */
typedef struct rc_error {
    rc_result code;
    int32_t sys_errno;
    int32_t rank; /* the rank held responsible */
    int32_t rail;
    int32_t lane;
    uint64_t seq;      /* the collective's number on its communicator */
    double elapsed_s;  /* since that collective was submitted */
    char message[512]; /* a whole sentence, NUL-terminated */
} rc_error;

/* Static text for a result: "peer lost", ... Never NULL. */
const char *rc_result_name(rc_result result);

/* ---- elements and collectives ---- */

typedef enum rc_dtype {
    RC_F16 = 0,
    RC_BF16 = 1,
    RC_F32 = 2,
    RC_F64 = 3,
    RC_I8 = 4,
    RC_U8 = 5,
    RC_I32 = 6,
    RC_I64 = 7
} rc_dtype;
#define RC_DTYPE_COUNT 8

/* RC_AVG is RC_SUM times 1/world_size (integers: divided, truncated towards zero). */
typedef enum rc_op { RC_SUM = 0, RC_AVG = 1, RC_MIN = 2, RC_MAX = 3, RC_PROD = 4 } rc_op;
#define RC_OP_COUNT 5

/* Encoding of elements on the wire. All but RC_CODEC_NONE take RC_F32 and RC_F64 tensors. Those
 * from RC_CODEC_INT8 on quantise: they take RC_SUM and RC_AVG, in an all-reduce, reduce-scatter or
 * all-gather, and can make up for what they lose (rc_feedback). A NaN or infinity anywhere makes
 * the whole result NaN, on every rank (of a reduce-scatter: on the ranks that have it in what they
 * send or get). */
typedef enum rc_codec {
    RC_CODEC_NONE = 0,
    RC_CODEC_BF16 = 1,
    RC_CODEC_FP16 = 2,
    RC_CODEC_INT8 = 3,   /* a scale for every 256 elements */
    RC_CODEC_INT4 = 4,   /* a scale for every 64 */
    RC_CODEC_ONEBIT = 5, /* signs, and a scale for every 256 */
    RC_CODEC_FP8 = 6,    /* e4m3, and a scale for every 256 */
    RC_CODEC_INT2 = 7,   /* four levels of rotated elements, and a scale for every 64 */
} rc_codec;
#define RC_CODEC_COUNT 8
/* Returns the codec's name ("int2"), as in ringcomm's compression=; "?" for no codec. */
const char *rc_codec_name(rc_codec codec);

typedef enum rc_collective {
    RC_ALLREDUCE = 0,
    RC_REDUCE_SCATTER = 1,
    RC_ALLGATHER = 2,
    RC_BROADCAST = 3,
    RC_REDUCE = 4,
    RC_GATHER = 5,
    RC_SCATTER = 6,
    RC_ALLTOALL = 7,
    RC_BARRIER = 8,
    RC_SEND = 9,
    RC_RECV = 10
} rc_collective;
#define RC_COLLECTIVE_COUNT 11

/* Algorithm of an all-reduce; other collectives have no choice. RC_DIRECT and RC_ONE_SHOT add in
 * order of rank, with one rounding per contribution, not per hop. Of those that take the same time
 * by the cost model the first one is chosen. */
typedef enum rc_algorithm {
    RC_AUTO = 0,
    RC_RING = 1,     /* each part travels around: least to send, 2 (world_size - 1) hops */
    RC_ONE_SHOT = 2, /* everything to everyone: world_size / 2 times as much, 1 hop */
    RC_DOUBLING = 3, /* pairs exchange all they have: the tensor on each of log2 world_size hops */
    RC_DIRECT = 4,   /* each part to its owner, its sum from there to all: as much, 2 hops */
    RC_HALVING = 5,  /* parts along trees to their owners and back: as the ring, 2 log2 hops */
} rc_algorithm;
#define RC_ALGORITHM_COUNT 6

/* Returns an algorithm's name, "ring"; that of RC_AUTO is "auto"; NULL for a value that is none. */
const char *rc_algorithm_name(rc_algorithm algorithm);

/* Returns the cost model's choice for an all-reduce of wire_bytes among hosts, two or more, whose
 * ports have link_mbit Mbit/s (0: not known). Writes the time by each algorithm, in
 * seconds[RC_ALGORITHM_COUNT]; RC_AUTO's is 0. */
rc_algorithm rc_estimate(int world_size, uint64_t wire_bytes, uint32_t link_mbit, double *seconds);

/* Returns the bytes of one element; 0 for a value that is no dtype. */
size_t rc_dtype_size(rc_dtype dtype);

/* ---- build and machine ---- */

const char *rc_version(void);
/* Returns the name of the i-th kernel set of this build ("scalar", "avx2", ...), NULL past the
 * last. */
const char *rc_kernel_set_name(int index);
/* Returns 1 if this CPU can run that kernel set. */
int rc_kernel_set_supported(int index);

/* Returns the text of an rc_call.caller ("gather_state_dict()", ...), from 1 on; NULL for other
 * numbers.
 */
const char *rc_caller_name(int caller);

/* ---- engine ---- */

typedef struct rc_engine rc_engine;

/* Creates an engine. kernel_set: a name from rc_kernel_set_name, or NULL for the fastest this CPU
 * supports. errno says why if the system refuses a descriptor, a thread or memory. */
rc_result rc_engine_create(rc_engine **out, const char *kernel_set);
/* Frees the engine. Its communicators must be freed first, so its works are over; works that are
 * still held stay valid, and rc_work_* return the same as before. */
void rc_engine_free(rc_engine *engine);
/* Returns the name of the kernel set in use. */
const char *rc_engine_kernel_set(const rc_engine *engine);
/* Closes every lane's descriptor in a forked child, so that the child neither keeps a peer's
 * connection alive nor can use it. To be called there before anything else; takes no lock. */
void rc_engine_after_fork(rc_engine *engine);

/* ---- communicator ---- */

typedef struct rc_comm rc_comm;

typedef struct rc_comm_config {
    uint32_t size; /* sizeof(rc_comm_config), set by rc_comm_config_init */
    int32_t rank;
    int32_t world_size;
    uint32_t epoch;         /* carried by every frame; frames of another epoch are refused */
    uint32_t segment_bytes; /* largest payload of a frame; a multiple of 4096; same on all ranks */
    uint32_t heartbeat_ms;  /* a lane silent this long sends a heartbeat */
    uint32_t peer_timeout_ms; /* a peer silent this long is lost, or a lane whose peer lives */
    rc_algorithm algorithm;   /* of every all-reduce; RC_AUTO: by size; same on all ranks */
    uint32_t spin_us;         /* rc_work_wait polls this long before it sleeps */
    int32_t oversubscribed;   /* 1: the ranks on this machine outnumber its cores: only brief works
                                 are polled for, and each poll lets others run */
    int32_t one_host;   /* 1: all ranks share a host: links are as fast as its memory, and time goes
                           into handling frames; same on all ranks */
    uint32_t threads;   /* 2: a second thread of the engine sends for long works; 0, 1: none */
    uint32_t link_mbit; /* Mbit/s of a port of the slowest rank, by which RC_AUTO chooses; 0: not
                           known, and taken for 1000; same on all ranks */
    int32_t recovers;   /* 1: a lane that is lost ends nothing; the last one of a peer neither, for
                           peer_timeout_ms. The caller makes lost ones anew (rc_comm_renew_lane), or
                           finds that the peer is gone (rc_comm_lose_peer); same on all ranks */
} rc_comm_config;

void rc_comm_config_init(rc_comm_config *config);
rc_result rc_comm_create(rc_comm **out, rc_engine *engine, const rc_comm_config *config);
/* Gives the communicator a connected stream socket to peer. rail counts network ports, the same at
 * both ends; bytes_per_s is the port's speed where known, else 0. It owns fd from here on, also on
 * failure. All lanes are added before rc_comm_start. */
rc_result rc_comm_add_lane(rc_comm *comm, int peer, int rail, int fd, double bytes_per_s);
/* Sets the route that errors name for the lanes of a rail to peer: here and there, such as "eth1
 * 10.8.0.1 on node0", are both ends' port, address and host, or NULL. port is the index of the
 * network interface here (0: not watched); the loss of it, or of a lane's address on it, ends its
 * lanes (rc_comm_watch_ports). To be called after these lanes are added, before rc_comm_start. */
rc_result rc_comm_name_rail(rc_comm *comm, int peer, int rail, int port, const char *here,
                            const char *there);
/* Gives the communicator a netlink socket, subscribed to the links and addresses of the network
 * namespace that its lanes are in, so that it knows of lost ports at once. It owns fd from here on,
 * also on failure. At most one, before rc_comm_start. */
rc_result rc_comm_watch_ports(rc_comm *comm, int fd);
/* Gives the communicator memory that the ranks of this host share: a file that was empty at first,
 * the same for all of them. hosts has a number for each rank, equal for ranks of one host; all
 * hosts have the same number of ranks, 2 to 64. All-reduces then go through it: those by RC_AUTO,
 * and on a single host those by RC_DIRECT and RC_ONE_SHOT, and broadcasts where config.algorithm is
 * one of these. Closes fd, also on failure. Before rc_comm_start; on all ranks or on none. */
rc_result rc_comm_share(rc_comm *comm, const int32_t *hosts, int fd);
/* Opens the communicator for work. Returns RC_INVALID_STATE if a peer has no lane. */
rc_result rc_comm_start(rc_comm *comm);
/* Fails all pending and later works here and, naming this rank and reason, on every other rank. */
void rc_comm_abort(rc_comm *comm, const char *reason);
/* Sends a goodbye and all that is queued; pending works fail. Returns RC_OK once the peers' hosts
 * have all of it, RC_AGAIN if not within timeout_ms: then call it again, or rc_comm_close. So a
 * caller can handle signals in between. */
rc_result rc_comm_leave(rc_comm *comm, int timeout_ms);
/* Leaves as rc_comm_leave does, then closes; RC_TIMEOUT if the peers' hosts do not have all data
 * within timeout_ms. */
rc_result rc_comm_close(rc_comm *comm, int timeout_ms);
/* Frees the communicator; closes abruptly if rc_comm_close was not called. */
void rc_comm_free(rc_comm *comm);
/* Writes the first failure; code RC_OK if there is none. */
void rc_comm_error(rc_comm *comm, rc_error *out);

/* Where one end of a lane that is made anew stands: what it tells the other before both go on.
 * Connections of a lane are numbered alike at both ends, though one may have missed some. */
typedef struct rc_lane_mark {
    uint32_t made;     /* the last connection that it had */
    uint32_t received; /* frames that came there, modulo 2^32 */
    uint32_t before;   /* the last one before that the peer had, too; 0: none */
    uint32_t previous; /* frames that came there */
    uint32_t ticket;   /* not for the peer: of this mark; only the last one of a lane is good */
} rc_lane_mark;

/* Where lanes are made anew (recovers): gives up a lane, also one that seems well, as its peer
 * may know better, and writes the mark that the peer is to get. Returns RC_INVALID_STATE if the
 * lane cannot be made anew, as after a goodbye. */
rc_result rc_comm_drop_lane(rc_comm *comm, int peer, int lane, rc_lane_mark *out);
/* Gives a lane a new socket; ours is the mark that the peer has got for it, theirs the peer's. It
 * owns fd from here on, also on failure. Returns RC_INVALID_STATE if the lane is not where `ours`
 * says. */
rc_result rc_comm_renew_lane(rc_comm *comm, int peer, int lane, int fd, const rc_lane_mark *ours,
                             const rc_lane_mark *theirs);
/* Ends the communicator with RC_PEER_LOST, as the peer has ended: all its lanes are lost, and then
 * its host said that it does not listen for new ones. One that is leaving waits no longer for it.
 * Returns RC_INVALID_STATE if one of the lanes is open, or the peer has left. */
rc_result rc_comm_lose_peer(rc_comm *comm, int peer);

/* Counters since rc_comm_start. */
typedef struct rc_lane_stats {
    int32_t peer;
    int32_t rail;
    int32_t lane;        /* number of the lane on its link */
    uint64_t sent_bytes; /* on the wire, headers included */
    uint64_t received_bytes;
    uint64_t sent_frames;
    uint64_t received_frames;
    double rate;          /* measured delivery rate, bytes per second; 0 before a measurement */
    uint64_t retransmits; /* TCP segments sent again; 0 where the socket does not count them */
    double rtt_s;         /* smoothed round trip as TCP sees it; 0 if not known */
    uint32_t made;        /* its last connection: 1 for the first, then larger ones */
    int32_t is_lost;      /* 1: that is lost */
} rc_lane_stats;

typedef struct rc_comm_stats {
    uint64_t works;         /* completed */
    uint64_t payload_bytes; /* payload sent, after compression */
    uint64_t wire_bytes;    /* sent over links, headers included */
    uint64_t shared_bytes;  /* part of the payload, put into memory that ranks share */
    double engine_cpu_s;    /* CPU seconds of the engine's own threads */
    double waiting_s;       /* seconds of threads in rc_work_wait and in pipes; whole engine */
    int32_t lanes;
    int32_t threads; /* threads that carry this communicator's traffic: 1 or 2 */
} rc_comm_stats;

void rc_comm_stats_get(rc_comm *comm, rc_comm_stats *out);
/* Fills out[0..capacity) and returns the number of all lanes. */
int rc_comm_lane_stats(rc_comm *comm, rc_lane_stats *out, int capacity);
/* A lane that is lost, or may be. */
typedef struct rc_lost_lane {
    int32_t peer, lane; /* number on the link */
    int32_t is_silent;  /* 1: open; but by no lane anything comes, and the peer may have lost it */
    rc_error why;       /* code RC_OK: the peer has given it up */
} rc_lost_lane;

/* Fills out[0..capacity) with the lanes that are to be made anew; returns how many are, or -1 once
 * the communicator has failed. */
int rc_comm_lost_lanes(rc_comm *comm, rc_lost_lane *out, int capacity);

/* ---- error feedback ---- */

/* The residuals of one tensor: what quantising has lost so far, which the next call adds again. The
 * caller owns it; a call borrows it (rc_call.feedback) until its work is done. Functions that read
 * or change it may not run at the same time, nor during rc_submit with it. While a call has it
 * rc_feedback_busy returns 1, functions with a result return RC_INVALID_STATE, and pointers are
 * NULL. */
typedef struct rc_feedback rc_feedback;

/* Creates residuals of 0, for calls whose source has count elements (a reduce-scatter's: world_size
 * x its count). */
rc_result rc_feedback_create(rc_feedback **out, uint64_t count);
/* Frees the feedback; while a call has it, at the end of that. */
void rc_feedback_free(rc_feedback *feedback);
uint64_t rc_feedback_count(const rc_feedback *feedback);
int rc_feedback_busy(const rc_feedback *feedback);
/* Returns what this rank has lost in encoding its own values: count floats, which may be written
 * to. Valid until the next call with the feedback. */
float *rc_feedback_worker(rc_feedback *feedback);
/* Returns what this rank has lost in encoding sums for all: *count floats, of the elements from
 * *start on; *count is 0, and the pointer may be NULL, if there are none. */
float *rc_feedback_owner(rc_feedback *feedback, uint64_t *start, uint64_t *count);
/* Replaces all residuals by copies. worker: as many floats as the feedback has, or NULL for zeros.
 * owner: count floats for the elements from start on, or NULL with a count of 0. They need not fit
 * the next call: those that do not are added to the worker's. */
rc_result rc_feedback_load(rc_feedback *feedback, const float *worker, const float *owner,
                           uint64_t start, uint64_t count);
/* Multiplies all residuals by factor: for values that are scaled so from now on. Returns
 * RC_INVALID_ARGUMENT, and changes nothing, if it or a product is not finite in float32. */
rc_result rc_feedback_rescale(rc_feedback *feedback, double factor);
/* Restores the residuals of before the last call that used them, for callers who drop its result.
 * Does nothing if that call left them as they were, or made them zero, or if they have been loaded
 * or rescaled since. */
rc_result rc_feedback_undo(rc_feedback *feedback);

/* ---- works ---- */

typedef struct rc_work rc_work;

/* Root of a receive that takes a send of any rank: one that has come, or the first to come. Of two
 * receives that can take a send, the one called first does. */
enum { RC_ANY_SOURCE = -1 };

/* One collective, as this rank calls it. count is in elements:
 *   allreduce, broadcast, reduce, send, recv   of the tensor
 *   allgather, gather                          that each rank contributes; dst holds world_size x
 *   reduce_scatter, scatter                    that each rank receives;    src holds world_size x
 *   alltoall                                   per pair;           src and dst hold world_size x
 *   barrier                                    0
 * In place: src == dst in allreduce, broadcast and reduce; where one of them holds all ranks'
 * parts, the other may be this rank's part of it. Any other overlap is refused. src is not read on
 * ranks that contribute nothing (broadcast and scatter off the root), dst not written where nothing
 * arrives (reduce and gather off the root). */
typedef struct rc_call {
    uint32_t size; /* sizeof(rc_call) */
    rc_collective collective;
    rc_op op;
    rc_dtype dtype;
    rc_codec codec;
    int32_t root; /* of a rooted collective; the other rank of a send or recv; else 0 */
    uint32_t tag; /* of a send or recv: a recv takes sends of its tag only */
    uint64_t count;
    const void *src;
    void *dst;
    uint32_t timeout_ms; /* the work fails, and with it the communicator, after this long */
    int32_t notify;      /* 1: hand the finished work to rc_engine_take_done */
    int32_t waits;       /* 1: the caller goes on to rc_work_wait at once */
    /* NULL, or residuals for an all-reduce, reduce-scatter or all-gather of as many elements, by
     * RC_SUM or RC_AVG, in RC_F32 or RC_F64. With a codec that does not quantise they are added to
     * the source, and zero afterwards. They change only if the work succeeds, and its result is
     * finite. They belong to one op: for another they must be zero first. Only one work at a time
     * may use them. */
    rc_feedback *feedback;
    /* 1: src and dst hold encoded data, in an all-reduce of RC_F32 without shared memory and
     * without feedback; other ranks see no difference. By RC_CODEC_BF16 or RC_CODEC_FP16: the 16
     * bits of each element, for an RC_AVG by fp16 those of the element times 1/world_size. By a
     * codec that quantises, among two ranks or more: payloads, laid out as rc_comm_layout says; src
     * is dst. */
    int32_t encoded;
    /* The call of the library that this one is part of, for other ranks' messages where calls
     * differ: a number of rc_caller_name, or 0. Ranks may differ in it. */
    uint32_t caller;
} rc_call;

/* Layout of encoded data: the places of payloads (docs/WIRE.md, 6). The tensor has parts of
 * part_elems elements, the last ones of fewer or none; a part has segments of segment_elems, its
 * last one of fewer.
 *   terms 1   The payload of segment k of part p lies at byte p * part_bytes + k * segment_bytes:
 *             at first this rank's contribution, when the work is over the result. The contribution
 *             to this rank's own part, `own`, which begins at element plain_start, is not encoded:
 *             plain_count floats from byte plain on.
 *   terms 2   There are two ranks, one part, and own < 0. Rank r's contribution to segment k lies
 *             at byte r * part_bytes + k * segment_bytes: at first this rank's, when the work is
 *             over both, whose sum (times 1/2 for an RC_AVG) is the result. */
typedef struct rc_layout {
    uint64_t parts;
    uint64_t terms;
    uint64_t part_elems;
    uint64_t segment_elems;
    uint64_t part_bytes;
    uint64_t segment_bytes;
    uint64_t plain;
    uint64_t plain_start;
    uint64_t plain_count;
    uint64_t bytes; /* of the whole */
    int32_t own;
} rc_layout;

/* Starts a collective. Returns at once; *out is freed by rc_work_free. An error result means that
 * nothing was submitted; error (may be NULL) then holds the reason. */
rc_result rc_submit(rc_comm *comm, const rc_call *call, rc_work **out, rc_error *error);
/* Returns the result with which rc_submit would refuse the call, or RC_OK. Submits nothing. */
rc_result rc_check(rc_comm *comm, const rc_call *call, rc_error *error);
/* Writes the layout of a call's encoded data. Returns RC_INVALID_ARGUMENT if such a call takes
 * none. */
rc_result rc_comm_layout(rc_comm *comm, const rc_call *call, rc_layout *out);
/* Waits up to timeout_ms (0 polls). RC_OK: done. RC_AGAIN: still in flight, or a signal came. Any
 * other result: the work failed with it. */
rc_result rc_work_wait(rc_work *work, int timeout_ms);
/* Does rc_submit and rc_work_wait in one, for the call with this count and memory in place of its
 * own. RC_OK: it is over, and there is no work (*out is NULL). Otherwise *out is what rc_submit
 * made: NULL where the call was refused, or a work in flight (RC_AGAIN) or failed. */
rc_result rc_run(rc_comm *comm, const rc_call *call, uint64_t count, const void *src, void *dst,
                 int timeout_ms, rc_work **out);
/* Writes the work's failure; code RC_OK if there is none (yet). */
void rc_work_error(rc_work *work, rc_error *out);
/* Returns the collective's number on its communicator; of a send or receive, its number among those
 * of its tag between these two ranks. */
uint64_t rc_work_seq(const rc_work *work);
/* Returns the root of the call; of a finished receive from any source, the rank that sent. */
int rc_work_root(const rc_work *work);
/* Sets notify = 1 for a submitted work, also for one that is over by now. */
rc_result rc_work_notify(rc_work *work);
/* Returns the seconds from submission to completion; 0 while in flight. */
double rc_work_elapsed(const rc_work *work);

/* Statistics of a work on this rank. Times are of CLOCK_MONOTONIC, in nanoseconds. */
typedef struct rc_work_stats {
    uint64_t submitted_ns;
    uint64_t started_ns; /* its first frame left or came, or it entered shared memory; 0: neither */
    uint64_t finished_ns;
    uint64_t sent_bytes;    /* payload of its frames over links, after compression */
    uint64_t shared_bytes;  /* put into memory that the ranks of a host share */
    uint64_t rail_bytes[8]; /* sent over each rail, with frame headers; [7]: and all further ones */
    int in_memory;          /* 1: it went through that memory, among hosts over links, too */
} rc_work_stats;

/* Writes the statistics of a work; while it is in flight all but submitted_ns is 0. */
void rc_work_stats_get(const rc_work *work, rc_work_stats *out);
/* Drops the caller's reference. A work still in flight continues, and its buffers stay borrowed
 * until it ends, so wait first, or close the communicator. */
void rc_work_free(rc_work *work);
/* Waits for the next finished work that was submitted with notify = 1, in order of completion.
 * RC_AGAIN after timeout_ms without one, or after rc_engine_interrupt. */
rc_result rc_engine_take_done(rc_engine *engine, int timeout_ms, rc_work **out);
/* Makes the current or next rc_engine_take_done return at once. */
void rc_engine_interrupt(rc_engine *engine);

/* ---- tensors on a GPU ---- */

/* Counts the GPUs of this machine, as CUDA does. driver: the library ("libcuda.so.1", or a path),
 * which is opened once and stays open. Returns RC_DEVICE, with the reason in error, if there is
 * none to use. */
rc_result rc_cuda_devices(const char *driver, int *count, rc_error *error);
/* Finds the number of the GPU that memory lies on; -1: host memory. */
rc_result rc_cuda_locate(const char *driver, uint64_t address, int *ordinal, rc_error *error);

/* A pipe moves the tensors of one GPU to a communicator and back. The core works on copies of them
 * in pinned host memory, by the path that all tensors take, so results have the same bits.
 *
 * A collective of such tensors is a flight. It follows what its stream had queued when it was
 * submitted. It is over when its result is on its way to the tensors, and a stream given to
 * rc_flight_order waits for that. It has landed when the result has arrived: until then its tensors
 * are borrowed.
 *
 * A CUDA call that fails ends the communicator, on all ranks, as rc_comm_abort does. */
typedef struct rc_pipe rc_pipe;
typedef struct rc_flight rc_flight;

/* A CUDA stream: its handle (a CUstream or cudaStream_t), where 0 and 1 are the legacy default
 * stream and 2 is that of the calling thread; or none, for tensors that no queued work uses.
 */
enum { RC_NO_STREAM = -1 };

/* Piece of a tensor that is not contiguous: bytes at an address of the device, which are those from
 * offset on of the tensor. */
typedef struct rc_piece {
    uint64_t address;
    uint64_t offset;
    uint64_t bytes;
} rc_piece;

/* Creates a pipe. kernels: ringcomm/kernels.ptx as a string, or a fatbin made of it, or NULL.
 * arena: bytes of pinned memory to keep, at most; larger flights get memory of their own for their
 * time. comm must be open. */
rc_result rc_pipe_create(rc_pipe **out, rc_comm *comm, const char *driver, int ordinal,
                         const char *kernels, uint64_t arena, rc_error *error);
/* Returns why the CPU packs compressed tensors, as a sentence; "" if the GPU does. */
const char *rc_pipe_without_kernels(const rc_pipe *pipe);
/* Submits as rc_submit does, with src and dst on the device. With pieces the call's src and dst are
 * NULL; the pieces are read and written, and the elements between them count as 0. The call's count
 * is more than 0. Flights reach the core in the order of their calls. */
rc_result rc_pipe_submit(rc_pipe *pipe, const rc_call *call, const rc_piece *pieces, int count,
                         int64_t stream, rc_flight **out, rc_error *error);
/* Waits until all flights submitted so far have reached the core, so that an rc_submit comes after
 * them. Returns RC_AGAIN after timeout_ms. */
rc_result rc_pipe_drain(rc_pipe *pipe, int timeout_ms);
/* Returns the stream that copies results to the device. An event recorded there follows all flights
 * that are over. */
uint64_t rc_pipe_stream(const rc_pipe *pipe);
/* Ends all flights and frees all that the pipe has, except the flights. After rc_comm_close, before
 * rc_comm_free. */
void rc_pipe_stop(rc_pipe *pipe);
/* Frees a pipe that was stopped, once its last flight is freed. Does nothing in a forked child. */
void rc_pipe_free(rc_pipe *pipe);
/* Waits for the next flight that is over (if notice was asked for), or has landed: *landed. Free
 * it. Returns RC_AGAIN after timeout_ms, RC_INVALID_STATE after rc_pipe_stop when there are no
 * more. */
rc_result rc_pipe_take(rc_pipe *pipe, int timeout_ms, rc_flight **out, int *landed);

/* Waits as rc_work_wait does; RC_OK when the flight is over. */
rc_result rc_flight_wait(rc_flight *flight, int timeout_ms);
/* Waits likewise, until the flight has landed. */
rc_result rc_flight_landed(rc_flight *flight, int timeout_ms);
/* Makes the stream wait for the result of a flight that is over. */
rc_result rc_flight_order(rc_flight *flight, int64_t stream, rc_error *error);
/* Has rc_pipe_take return the flight when it is over, too; also if it is over already, unless it
 * has landed.
 */
void rc_flight_notify(rc_flight *flight);
/* Return what rc_work_error, _seq, _root, _elapsed and _stats_get do; before the flight has reached
 * the core: no error, 0, the call's root, 0, all 0. */
void rc_flight_error(rc_flight *flight, rc_error *out);
uint64_t rc_flight_seq(rc_flight *flight);
int rc_flight_root(rc_flight *flight);
double rc_flight_elapsed(rc_flight *flight);
void rc_flight_stats_get(rc_flight *flight, rc_work_stats *out);
/* Drops the caller's reference; a flight under way continues. */
void rc_flight_free(rc_flight *flight);

/* -- end declarations -- */

#ifdef __cplusplus
}
#endif
#endif
