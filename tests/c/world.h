/* world.h - all ranks of a job in one process: communicators joined by socket pairs, or by TCP over
 * the loopback, on one shared engine or one each.
 *
 * environment: WORLD_THREADS, set to anything: every world has a sender.
 */
#ifndef RINGCOMM_TEST_WORLD_H
#define RINGCOMM_TEST_WORLD_H

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../csrc/comm/comm.h"
#include "../../csrc/comm/inside.h"
#include "../../csrc/net/sender.h"
#include "check.h"
#include "fds.h"
#include "tcp_pair.h"
#include "trial.h"

#ifdef __SANITIZE_THREAD__
/* With a sender a frame can be answered, and the answer received where the frame was sent from,
 * before that thread has noted that its sendmsg is over. What orders the two is the wire, which the
 * sanitizer does not know: it takes a sendmsg to read until it returns. What is read before it (the
 * CRC), and sendmsg itself in the tests of single lanes, are still looked at. */
__attribute__((visibility("default"), used, weak)) const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "intercept_send=0";
}
#endif

enum { WORLD_MAX = TRIAL_MAX_WORLD, WORLD_LONG_MS = 20000 };

typedef struct world_options {
    int size;
    int lanes;   /* per rail; 0: 1 */
    int rails;   /* 0: 1 */
    int engines; /* 0: one for all ranks */
    int tcp;
    int memory;          /* all ranks of a host share some */
    int hosts;           /* with as many ranks each, in succession; 0: 1. If more, by RC_AUTO */
    const char *kernels; /* NULL: the fastest */
    uint32_t spin_us;
    uint32_t threads; /* 2: a sender, which takes frames of any size in any work */
    int recovers;
    rc_algorithm algorithm;                                /* RC_AUTO: the ring */
    int send_buffer;                                       /* of each lane; 0: the system's */
    uint32_t segment_bytes, heartbeat_ms, peer_timeout_ms; /* 0: as rc_comm_config_init has them */
} world_options;

typedef struct world {
    world_options options;
    int size;
    rc_engine *engines[WORLD_MAX];
    rc_comm *comms[WORLD_MAX];
} world;

static inline void lane_pair(const world_options *o, int pair[2])
{
    if (o->tcp)
        tcp_pair(pair);
    else
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    for (int i = 0; i < 2 && o->send_buffer > 0; i++)
        setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &o->send_buffer, sizeof o->send_buffer);
}

static inline rc_comm_config world_config(const world_options *o, int rank)
{
    rc_comm_config config;
    rc_comm_config_init(&config);
    config.rank = rank;
    config.world_size = o->size;
    config.epoch = 77;
    config.algorithm = o->hosts > 1 ? RC_AUTO : o->algorithm ? o->algorithm : RC_RING;
    config.spin_us = o->spin_us;
    config.threads = getenv("WORLD_THREADS") != NULL ? 2 : o->threads;
    config.recovers = o->recovers;
    config.segment_bytes = o->segment_bytes ? o->segment_bytes : config.segment_bytes;
    config.heartbeat_ms = o->heartbeat_ms ? o->heartbeat_ms : config.heartbeat_ms;
    config.peer_timeout_ms = o->peer_timeout_ms ? o->peer_timeout_ms : config.peer_timeout_ms;
    return config;
}

static inline void world_start(const rc_comm *comm)
{
    CHECK_EQ(rc_comm_start((rc_comm *)comm), RC_OK);
    if (comm->config.threads < 2 || !CHECK(comm->sender != NULL))
        return;
    engine_lock(comm->engine);
    comm->sender->least = 0;
    engine_unlock(comm->engine);
}

static inline void world_join(const world *w, int a, int b)
{
    int rails = w->options.rails ? w->options.rails : 1;
    int lanes = w->options.lanes ? w->options.lanes : 1;
    for (int rail = 0; rail < rails; rail++)
        for (int i = 0; i < lanes; i++) {
            int pair[2];
            lane_pair(&w->options, pair);
            CHECK_EQ(rc_comm_add_lane(w->comms[a], b, rail, pair[0], 0.0), RC_OK);
            CHECK_EQ(rc_comm_add_lane(w->comms[b], a, rail, pair[1], 0.0), RC_OK);
        }
}

/* Memory for the ranks of each host, as the file that they would open by its name. */
static inline void world_share(const world *w)
{
    int32_t hosts[WORLD_MAX];
    int count = w->options.hosts ? w->options.hosts : 1, fd = -1;
    for (int rank = 0; rank < w->size; rank++)
        hosts[rank] = rank * count / w->size;
    for (int rank = 0; rank < w->size; rank++) {
        if (rank == 0 || hosts[rank] != hosts[rank - 1]) {
            if (fd >= 0)
                close(fd);
            fd = memfd_create("ringcomm-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        }
        CHECK_EQ(rc_comm_share(w->comms[rank], hosts, dup(fd)), RC_OK);
    }
    close(fd);
}

static inline world *world_open(world_options options)
{
    world *w = calloc(1, sizeof *w);
    w->options = options;
    w->size = options.size;
    for (int rank = 0; rank < w->size; rank++) {
        rc_comm_config config = world_config(&options, rank);
        if (rank == 0 || options.engines)
            CHECK_EQ(rc_engine_create(&w->engines[rank], options.kernels), RC_OK);
        else
            w->engines[rank] = w->engines[0];
        CHECK_EQ(rc_comm_create(&w->comms[rank], w->engines[rank], &config), RC_OK);
    }
    for (int a = 0; a < w->size; a++)
        for (int b = a + 1; b < w->size; b++)
            world_join(w, a, b);
    if (options.memory)
        world_share(w);
    for (int rank = 0; rank < w->size; rank++)
        world_start(w->comms[rank]);
    return w;
}

static inline void world_free_rank(world *w, int rank)
{
    rc_comm_free(w->comms[rank]);
    w->comms[rank] = NULL;
}

/* Closes in order, then frees. */
static inline void world_close(world *w)
{
    for (int rank = 0; rank < w->size; rank++)
        if (w->comms[rank] != NULL)
            rc_comm_close(w->comms[rank], 1000);
    for (int rank = 0; rank < w->size; rank++)
        world_free_rank(w, rank);
    for (int rank = 0; rank < w->size; rank++)
        if (rank == 0 || w->options.engines)
            rc_engine_free(w->engines[rank]);
    free(w);
}

/* ---- works ---- */

static inline rc_work *submit(rc_comm *comm, const rc_call *call)
{
    rc_work *work = NULL;
    rc_error error;
    if (!CHECK_EQ(rc_submit(comm, call, &work, &error), RC_OK))
        fprintf(stderr, "rc_submit: %s\n", error.message);
    return work;
}

/* Waits for the end, whatever it is, and says which. */
static inline rc_result outcome(rc_work *work, rc_error *error)
{
    rc_result result = rc_work_wait(work, WORLD_LONG_MS);
    rc_work_error(work, error);
    CHECK(result != RC_AGAIN);
    CHECK_EQ(error->code, result);
    return result;
}

/* The work must end well; frees it. */
static inline int expect_done(rc_work *work)
{
    rc_error error;
    int done = CHECK_EQ(outcome(work, &error), RC_OK);
    if (!done)
        fprintf(stderr, "work %llu: %s\n", (unsigned long long)rc_work_seq(work), error.message);
    rc_work_free(work);
    return done;
}

/* The work must fail with this code and a text that contains this; frees it. */
static inline void expect_failure(rc_work *work, rc_result code, const char *text)
{
    rc_error error;
    CHECK_EQ(outcome(work, &error), code);
    if (!CHECK(strstr(error.message, text) != NULL))
        fprintf(stderr, "the error is: %s\n", error.message);
    rc_work_free(work);
}

/* Runs a trial on all ranks of the world at once. */
static inline void world_run(world *w, trial *t, uint64_t *seed)
{
    rc_work *works[WORLD_MAX] = {NULL};
    trial_open(t, seed);
    for (int i = 0; i < w->size; i++) {
        int rank = (i + t->call.root) % w->size;
        rc_call call = trial_call(t, rank);
        if (trial_takes_part(t, rank))
            works[rank] = submit(w->comms[rank], &call);
    }
    for (int rank = 0; rank < w->size; rank++) {
        if (works[rank] != NULL && !expect_done(works[rank]))
            continue;
        trial_check(t, rank);
    }
    trial_close(t);
}

/* A small call of no particular kind. */
static inline rc_call small_call(rc_collective collective, void *data, uint64_t count)
{
    return (rc_call){.size = sizeof(rc_call),
                     .collective = collective,
                     .dtype = RC_F32,
                     .count = count,
                     .src = data,
                     .dst = data,
                     .timeout_ms = 30000};
}

#endif
