/* peer.h - a rank played by hand: one real communicator, whose lanes to the other ranks end in
 * descriptors that the test writes and reads byte by byte.
 */
#ifndef RINGCOMM_TEST_PEER_H
#define RINGCOMM_TEST_PEER_H

#include <poll.h>

#include "../../csrc/base/clock.h"
#include "../../csrc/net/frame.h"
#include "world.h"

enum { PEER_EPOCH = 5, PEER_SEGMENT = 4096, PEER_MAX_LANES = 4 };

typedef struct stage {
    rc_engine *engine;
    rc_comm *comm; /* the rank under test */
    int rank, world_size, lanes;
    int far[WORLD_MAX][PEER_MAX_LANES]; /* by peer */
    int ports;                          /* the kernel's end of its netlink socket, or -1 */
} stage;

typedef struct stage_options {
    int rank, world_size, lanes;            /* 0: rank 0, 2 ranks, 1 lane */
    uint32_t heartbeat_ms, peer_timeout_ms; /* 0: a minute, so that neither shows */
    uint32_t segment_bytes;                 /* 0: PEER_SEGMENT */
    int tcp;                                /* 1: connections over the loopback */
    int recovers;
    int rails; /* 1: each lane is a rail of its own, named, and its port is watched (PEER_PORT) */
} stage_options;

/* Index of the first rail's port. */
enum { PEER_PORT = 70 };

static inline void stage_name_rails(stage *s, int peer)
{
    for (int rail = 0; rail < s->lanes; rail++) {
        char here[64], there[64];
        snprintf(here, sizeof here, "eth%d 10.%d.0.%d on a", rail, rail, s->rank);
        snprintf(there, sizeof there, "eth%d 10.%d.0.%d on b", rail, rail, peer);
        CHECK_EQ(rc_comm_name_rail(s->comm, peer, rail, PEER_PORT + rail, here, there), RC_OK);
    }
}

static inline void stage_watch_ports(stage *s)
{
    int pair[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    CHECK_EQ(rc_comm_watch_ports(s->comm, pair[0]), RC_OK);
    s->ports = pair[1];
}

static inline stage stage_open(stage_options o)
{
    stage s = {.rank = o.rank,
               .world_size = o.world_size ? o.world_size : 2,
               .lanes = o.lanes ? o.lanes : 1,
               .ports = -1};
    rc_comm_config config;
    rc_comm_config_init(&config);
    config.rank = s.rank;
    config.world_size = s.world_size;
    config.epoch = PEER_EPOCH;
    config.segment_bytes = o.segment_bytes ? o.segment_bytes : PEER_SEGMENT;
    config.recovers = o.recovers;
    config.heartbeat_ms = o.heartbeat_ms ? o.heartbeat_ms : 60000;
    config.peer_timeout_ms = o.peer_timeout_ms ? o.peer_timeout_ms : 60000;
    CHECK_EQ(rc_engine_create(&s.engine, NULL), RC_OK);
    CHECK_EQ(rc_comm_create(&s.comm, s.engine, &config), RC_OK);
    for (int peer = 0; peer < s.world_size; peer++) {
        for (int i = 0; i < s.lanes && peer != s.rank; i++) {
            int pair[2];
            lane_pair(&(world_options){.tcp = o.tcp}, pair);
            CHECK_EQ(rc_comm_add_lane(s.comm, peer, o.rails ? i : 0, pair[0], 0.0), RC_OK);
            s.far[peer][i] = pair[1];
        }
        if (o.rails && peer != s.rank)
            stage_name_rails(&s, peer);
    }
    if (o.rails)
        stage_watch_ports(&s);
    CHECK_EQ(rc_comm_start(s.comm), RC_OK);
    return s;
}

/* Abruptly; the far ends may be closed already (-1). */
static inline void stage_close(stage *s)
{
    rc_comm_free(s->comm);
    rc_engine_free(s->engine);
    for (int peer = 0; peer < s->world_size; peer++)
        for (int i = 0; i < s->lanes && peer != s->rank; i++)
            if (s->far[peer][i] >= 0)
                close(s->far[peer][i]);
    if (s->ports >= 0)
        close(s->ports);
}

static inline void hang_up(stage *s, int peer)
{
    for (int i = 0; i < s->lanes; i++) {
        close(s->far[peer][i]);
        s->far[peer][i] = -1;
    }
}

/* ---- frames out ---- */

/* A data frame of this call, with the fields that the test then bends. */
static inline frame_header data_header(const rc_call *call, uint64_t seq)
{
    int p2p = collective_is_p2p(call->collective);
    return (frame_header){.type = FRAME_DATA,
                          .flags = p2p ? FRAME_P2P : 0,
                          .epoch = PEER_EPOCH,
                          .seq = seq,
                          .fingerprint = fingerprint_of(call)};
}

static inline frame_header control_header(frame_type type, uint64_t seq)
{
    return (frame_header){.type = (uint8_t)type, .epoch = PEER_EPOCH, .seq = seq};
}

static inline void play_bytes(int fd, const void *bytes, size_t n)
{
    CHECK_EQ(send(fd, bytes, n, MSG_NOSIGNAL), n);
}

static inline void play(int fd, frame_header h, const void *payload)
{
    uint8_t wire[FRAME_HEADER_BYTES + 4 * PEER_SEGMENT];
    if (!CHECK(h.length <= 4 * PEER_SEGMENT))
        return;
    frame_encode(wire, &h, payload);
    if (h.length > 0 && payload != NULL)
        memcpy(wire + FRAME_HEADER_BYTES, payload, h.length);
    play_bytes(fd, wire, FRAME_HEADER_BYTES + h.length);
}

/* ---- frames in ---- */

static inline int readable(int fd, int timeout_ms)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return poll(&one, 1, timeout_ms) == 1;
}

static inline int watch_bytes(int fd, uint8_t *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        if (!CHECK(readable(fd, WORLD_LONG_MS)))
            return 0;
        ssize_t got = recv(fd, bytes + at, n - at, 0);
        if (got <= 0)
            return 0;
        at += (size_t)got;
    }
    return 1;
}

/* The next frame from the rank under test, checked; 0 at the end of the stream. */
static inline int watch_frame(int fd, frame_header *h, uint8_t *payload)
{
    uint8_t wire[FRAME_HEADER_BYTES];
    uint32_t crc;
    if (!watch_bytes(fd, wire, sizeof wire))
        return 0;
    if (!CHECK_EQ(frame_decode(wire, PEER_EPOCH, PEER_SEGMENT, h, &crc, NULL), RC_OK))
        return 0;
    if (!CHECK(watch_bytes(fd, payload, h->length)))
        return 0;
    return CHECK(frame_check(payload, h->length, crc));
}

/* Skips to the next frame of a type. */
static inline int watch_for(int fd, frame_type type, frame_header *h, uint8_t *payload)
{
    while (watch_frame(fd, h, payload))
        if (h->type == type)
            return 1;
    CHECK_NOTE("  the stream ended before a frame of type %d came\n", (int)type);
    return CHECK(0);
}

/* ---- what it has read, and time ---- */

/* Waits until a lane of the rank under test has so many bytes from a peer. The time, in ns, at
 * which it read the last of them; 0 if they do not come. */
static inline uint64_t wait_until_read(stage *s, int peer, int lane, uint64_t bytes)
{
    struct lane *l = s->comm->env.links[peer]->lanes[lane];
    uint64_t give_up = clock_ns() + WORLD_LONG_MS * CLOCK_MS, read, at;
    do {
        engine_lock(s->engine);
        read = l->received_bytes;
        at = l->last_rx;
        engine_unlock(s->engine);
    } while (read < bytes && clock_ns() < give_up && usleep(200) == 0);
    return CHECK(read >= bytes) ? at : 0;
}

/* Lets time pass up to then, in steps over which no silence is forgiven. Afterwards time is what it
 * was, so a machine that is held up changes nothing. */
static inline void pass_time(stage *s, uint64_t until)
{
    rc_comm *c = s->comm;
    uint64_t step = c->config.peer_timeout_ms * CLOCK_MS / 3;
    engine_lock(s->engine);
    for (uint64_t now = c->last_tick ? c->last_tick : clock_ns(); now < until;) {
        now = until - now > step ? now + step : until;
        comm_tick(&c->member, now);
    }
    engine_unlock(s->engine);
}

/* The timers run; 1 if all is well afterwards. */
static inline int look(stage *s, uint64_t now)
{
    rc_error error;
    engine_lock(s->engine);
    comm_tick(&s->comm->member, now);
    engine_unlock(s->engine);
    rc_comm_error(s->comm, &error);
    return error.code == RC_OK;
}

/* A lane of the rank under test to rank 1. */
static inline lane *lane_of(const stage *s, int index)
{
    return s->comm->env.links[1]->lanes[index];
}

static inline void expect_text(const rc_error *error, const char *text)
{
    if (!CHECK(strstr(error->message, text) != NULL))
        CHECK_NOTE("the error is: %s\n", error->message);
}

/* The rank under test says why it fails, whatever it was sending before. */
static inline void expect_abort(int fd, rc_result code, int rank)
{
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    rc_error error;
    if (!watch_for(fd, FRAME_ABORT, &h, payload))
        return;
    int origin;
    frame_abort_decode(payload, h.length, &error, &origin);
    CHECK_EQ(error.code, code);
    CHECK_EQ(error.rank, rank);
}

#endif
