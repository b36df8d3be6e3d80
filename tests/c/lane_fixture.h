/* lane_fixture.h - one lane over a socket pair, whose other end the test holds, and what the lane's
 * handler saw. The test holds the engine's lock but while it waits.
 */
#ifndef RINGCOMM_TEST_LANE_FIXTURE_H
#define RINGCOMM_TEST_LANE_FIXTURE_H

#include "../../csrc/net/lane.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../csrc/base/clock.h"
#include "../../csrc/base/error.h"
#include "check.h"
#include "fds.h"
#include "draw.h"
#include "tcp_pair.h"

enum { EPOCH = 9, MAX_LENGTH = 1 << 16, KEPT = 64, LONG_MS = 20000 };

/* ---- a lane and what its handler saw ---- */

typedef struct fixture {
    lane ln; /* first */
    rc_engine *engine;
    int far; /* the other end */
    int begun, ended, sent, rooms, deaths;
    int refuse_begin, refuse_end;
    frame_header headers[KEPT]; /* of ended frames */
    uint8_t *payloads[KEPT];
    uint8_t place[MAX_LENGTH];
} fixture;

static inline rc_result on_begin(lane *ln, const frame_header *h, rx_place *place)
{
    fixture *f = (fixture *)ln;
    CHECK_EQ(h->type, FRAME_DATA);
    CHECK(h->length <= MAX_LENGTH);
    f->begun++;
    place->data = f->place;
    return f->refuse_begin ? RC_PROTOCOL : RC_OK;
}

static inline rc_result on_end(lane *ln, const frame_header *h, rx_place *place)
{
    fixture *f = (fixture *)ln;
    const uint8_t *payload = h->type == FRAME_DATA ? place->data : ln->rx_text;
    int at = f->ended++ % KEPT;
    f->headers[at] = *h;
    free(f->payloads[at]);
    f->payloads[at] = malloc(h->length + 1U);
    memcpy(f->payloads[at], payload, h->length);
    return f->refuse_end ? RC_PROTOCOL : RC_OK;
}

static inline void on_sent(lane *ln, out_frame *frame)
{
    ((fixture *)ln)->sent++;
    free(frame);
}

static inline void on_room(lane *ln)
{
    ((fixture *)ln)->rooms++;
}

static inline void on_dead(lane *ln)
{
    ((fixture *)ln)->deaths++;
    lane_close(ln);
}

static const lane_handler handler = {
    .begin = on_begin, .end = on_end, .sent = on_sent, .room = on_room, .dead = on_dead};

static inline fixture *open_on(const int pair[2])
{
    fixture *f = calloc(1, sizeof *f);
    CHECK_EQ(rc_engine_create(&f->engine, NULL), RC_OK);
    f->far = pair[1];
    f->ln.engine = f->engine;
    f->ln.handler = &handler;
    engine_lock(f->engine);
    CHECK_EQ(lane_open(&f->ln, pair[0], MAX_LENGTH, EPOCH), RC_OK);
    return f;
}

static inline fixture *open_fixture(int send_buffer)
{
    int pair[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    if (send_buffer > 0)
        setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
    return open_on(pair);
}

/* The same over TCP, on the loopback. */
static inline fixture *open_tcp_fixture(void)
{
    int pair[2];
    tcp_pair(pair);
    return open_on(pair);
}

static inline void close_fixture(fixture *f)
{
    lane_close(&f->ln);
    lane_close(&f->ln);
    CHECK_EQ(f->ln.source.fd, -1);
    engine_quiesce(f->engine);
    engine_unlock(f->engine);
    rc_engine_free(f->engine);
    if (f->far >= 0)
        close(f->far);
    for (int i = 0; i < KEPT; i++)
        free(f->payloads[i]);
    free(f);
}

static inline void hang_up(fixture *f)
{
    close(f->far);
    f->far = -1;
}

/* ---- waiting ---- */

static int wanted_ended, wanted_sent;

static inline int has_ended(const void *arg)
{
    const fixture *f = arg;
    return f->ended >= wanted_ended || f->deaths > 0;
}

static inline int has_sent(const void *arg)
{
    const fixture *f = arg;
    return f->sent >= wanted_sent || f->deaths > 0;
}

static inline int has_died(const void *arg)
{
    return ((const fixture *)arg)->deaths > 0;
}

static inline int never(const void *arg)
{
    (void)arg;
    return 0;
}

static inline void drive(fixture *f, int (*finished)(const void *), uint64_t ms)
{
    engine_drive(f->engine, finished, f, clock_ns() + ms * CLOCK_MS, 0);
}

static inline void expect_ended(fixture *f, int count)
{
    wanted_ended = count;
    drive(f, has_ended, LONG_MS);
    CHECK_EQ(f->ended, count);
    CHECK_EQ(f->deaths, 0);
}

static inline void expect_death(fixture *f, rc_result code, const char *text)
{
    drive(f, has_died, LONG_MS);
    CHECK_EQ(f->deaths, 1);
    CHECK_EQ(f->ln.error.code, code);
    if (!CHECK(strstr(f->ln.error.message, text) != NULL))
        fprintf(stderr, "the error is: %s\n", f->ln.error.message);
    CHECK_EQ(f->ln.source.fd, -1);
}

/* ---- frames made by hand ---- */

static inline size_t make_frame(uint8_t *wire, frame_type type, uint64_t seq, uint32_t length)
{
    frame_header h = {.type = (uint8_t)type, .epoch = EPOCH, .seq = seq, .length = length};
    for (uint32_t i = 0; i < length; i++)
        wire[FRAME_HEADER_BYTES + i] = (uint8_t)(seq * 31 + i);
    frame_encode(wire, &h, wire + FRAME_HEADER_BYTES);
    return FRAME_HEADER_BYTES + length;
}

static inline void put(const fixture *f, const uint8_t *bytes, size_t n)
{
    CHECK_EQ(send(f->far, bytes, n, MSG_NOSIGNAL), n);
}

#endif
