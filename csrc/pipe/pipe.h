/* pipe.h - transport of a GPU's tensors to the core and back, above the public functions. The
 * interface of pipe/, for tests: what callers use is in ringcomm.h.
 *
 *     caller            thread "in"                         thread "out"
 *     records an        d2h stream: waits for the event,    waits for the work (and so drives the
 *     event, queues --> copies to pinned memory             engine); h2d stream: copies back,
 *     the flight        submits the work to the core   -->  records "done"       the flight is over
 *                                                           waits for the copy    it has landed
 *
 * Where the call compresses float32, a kernel packs before the copy to the host and another unpacks
 * after the copy back, so that less goes over the bus. The core is given packed data as encoded,
 * which other ranks cannot tell (rc_call.encoded). With error feedback, which the flight claims
 * as it is submitted, the core encodes, as it does for tensors of the host: residuals are in host
 * memory.
 *
 * The core sees pinned host memory, so it does the same, with the same result, as for any tensor.
 * "in" takes flights in the order of their calls, and they reach the core in it. "out" takes them
 * as their works end: one that waits for a peer does not hold up those behind it.
 *
 * The pipe's streams only ever wait for events that are recorded, never for the network. So nothing
 * that the process does with CUDA can wait for a peer; only waits on the host can.
 *
 * Errors. A CUDA call that fails ends the communicator, so that no rank waits for data that will
 * not come. The memory that the flight held is given back when its stream is done with it.
 *
 * Invariants. Staging is given back, and a flight lands, only when no copy can touch it any more. A
 * flight keeps the event that rc_flight_order waits for until it is freed. Once a flight has landed
 * nobody calls CUDA for it. Threading: callers run pipe.c and flight.c, "in" and "out" run legs.c;
 * what they share is under the pipe's lock, which is taken after an engine's.
 *
 * Files: pipe.c life and submission; legs.c both threads; flight.c what callers do with a flight;
 * blocks.c codecs that quantise; packing.c the kernels, and codecs of 16 bits; share.c what all
 * use.
 */
#ifndef RINGCOMM_PIPE_H
#define RINGCOMM_PIPE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "../comm/comm.h"
#include "../cuda/device.h"

/* Faults that tests plant, to see that they are noticed. Only in builds for tests. */
enum pipe_fault { PIPE_SOUND, PIPE_NO_INPUT_EVENT, PIPE_NO_DONE_EVENT, PIPE_EARLY_RELEASE };
#ifdef PIPE_FAULTS
extern int pipe_fault;
extern atomic_int pipe_paused; /* 1: no flight lands */
#define PIPE_HAS(fault) (pipe_fault == (fault))
#else
#define PIPE_HAS(fault) 0
#endif

/* Memory of the device, for one stream at a time. Outgrown memory, in sum less than the present, is
 * kept: freeing it would wait for all that the GPU has to do, which may wait for other ranks. */
typedef struct pipe_scratch {
    cu_address at;
    uint64_t bytes;
    cu_address outgrown[44]; /* each twice the one before, or more, from 1 MiB on */
    int outgrown_count;
} pipe_scratch;

/* An entry of the queue that rc_pipe_take reads. */
typedef struct flight_notice {
    struct flight_notice *next;
    rc_flight *flight;
    int landed;
} flight_notice;

struct rc_flight {
    list_node place; /* in entering or in flying */
    rc_pipe *pipe;
    rc_call call;     /* as the caller made it: src and dst on the device */
    rc_piece *pieces; /* NULL if source and result are contiguous */
    int piece_count;
    cu_event input, done; /* events of the pipe's; NULL where there is none */
    pinned_block *staging;
    uint8_t *src, *dst; /* in staging; the same for both in place */
    int is_packed;      /* the GPU packs: staging has 16 bits for each element */
    int in_blocks;      /* the GPU packs: staging is as layout says */
    rc_layout layout;
    _Atomic(rc_work *) work;
    rc_error error;    /* written before result */
    atomic_int result; /* RC_AGAIN until it is over */
    atomic_int landed;
    atomic_int references;
    int notify, told; /* notice that it is over: asked for, given; pipe's lock */
    flight_notice over_notice, landed_notice;
};

struct rc_pipe {
    rc_comm *comm;
    cuda_device *device;
    pinned_arena arena;
    cu_stream d2h, h2d;
    cu_event copied;                  /* recorded by "in" behind its copies */
    pipe_scratch packed, unpacked;    /* packed data on the device, of "in" and of "out" */
    pipe_scratch gathered, scattered; /* tensors in pieces, made contiguous */
    pid_t pid;
    pthread_t in, out;
    int threads; /* threads running */
    atomic_int references;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* of all fields below */
    list entering;          /* submitted, and not yet with "in" */
    int underway;           /* flights that "in" has, or that are entering */
    list flying;            /* in the core */
    int closing;            /* "in" takes no more to the core */
    int in_ended, stopped;
    int visitors; /* callers inside CUDA */
    flight_notice *notices, *last_notice;
    cu_event *events; /* all that were made, and those that no flight has */
    cu_event *idle_events;
    int event_count, idle_count;
};

/* share.c */
int pipe_is_forked(const rc_pipe *p);
void pipe_release(rc_pipe *p);
/* Returns the stream of a handle as the public functions take it. */
cu_stream pipe_stream(int64_t handle);
/* Waits for a change, at most until the time (clock_ns). Under the pipe's lock. */
void pipe_wait(rc_pipe *p, uint64_t until);
/* Returns the bytes of the source, or of the result. */
uint64_t flight_bytes(const rc_flight *f, int of_src);
/* Return 1 if the flight reads its source, and if it writes a result, on this rank. */
int flight_reads(const rc_flight *f);
int flight_writes(const rc_flight *f);
/* Calls copy for each of the tensor's pieces that has some bytes. */
typedef rc_result flight_copy(rc_flight *f, const rc_piece *piece, rc_error *error);
rc_result flight_each(rc_flight *f, int of_src, flight_copy *copy, rc_error *error);

/* legs.c: the threads, with the pipe as argument. */
void *pipe_run_in(void *arg);
void *pipe_run_out(void *arg);

/* packing.c */
enum { PACKING_KERNELS = 16 };
extern const char *const packing_kernels[PACKING_KERNELS];
/* Returns 1 if the GPU packs the flight by a 16-bit codec. */
int packing_suits(const rc_flight *f);
/* Makes room on the device for packed data. Returns RC_NO_MEMORY if there is none now. */
rc_result packing_room(rc_pipe *p, pipe_scratch *scratch, uint64_t bytes, rc_error *error);
/* Frees all memory of a scratch. */
void packing_release(rc_pipe *p, pipe_scratch *scratch);
/* Returns 1 if the flight's memory consists of whole elements; other addresses are for copies only.
 */
int packing_is_aligned(const rc_flight *f);
/* Returns the kernel that packs by a codec that quantises; the next one unpacks, the one after it
 * adds two. PACKING_KERNELS or more: there is none, and the tensor is copied as it is. */
int packing_of(rc_codec codec);
/* Launches a kernel on so many elements. */
rc_result packing_launch(rc_pipe *p, int kernel, uint64_t elements, cu_stream stream,
                         void **parameters, rc_error *error);
/* Pack the piece to `to`, and unpack it from `from`, on the stream. */
rc_result packing_pack(rc_flight *f, const rc_piece *piece, cu_address to, cu_stream stream,
                       rc_error *error);
rc_result packing_unpack(rc_flight *f, const rc_piece *piece, cu_address from, cu_stream stream,
                         rc_error *error);
/* Unpacks all of a flight by the CPU: staging has the elements afterwards. */
rc_result packing_unpack_here(rc_flight *f, rc_error *error);

/* blocks.c: codecs that quantise, as packing.c those of 16 bits. */
/* Returns 1 if the GPU packs the flight; finds its layout. */
int blocks_suits(rc_flight *f);
/* Makes room and sets in_blocks, if the GPU packs the flight. */
rc_result blocks_begin(rc_flight *f, rc_error *error);
/* Queue all copies and kernels on the stream of "in", and of "out"; or NaN in all of the result. */
rc_result blocks_copy_in(rc_flight *f, rc_error *error);
rc_result blocks_copy_out(rc_flight *f, rc_error *error);
rc_result blocks_poison(rc_flight *f, rc_error *error);
/* Make room to unpack on the GPU, or return RC_NO_MEMORY; unpack by the CPU instead: in_blocks is 0
 * then. */
rc_result blocks_room(rc_flight *f, rc_error *error);
rc_result blocks_unpack_here(rc_flight *f, rc_error *error);

/* flight.c */
void flight_retain(rc_flight *f);
/* Ends a flight for those that wait; error is NULL for a success. */
void flight_over(rc_flight *f, const rc_error *error);
/* Drops the pipe's reference: from now on only holders of references use the flight. */
void flight_land(rc_flight *f);

#endif
