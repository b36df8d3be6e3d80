/* A lane's receiver sleeps until there is enough of a payload: fewer wakes, and none is missed. */
#include "lane_fixture.h"

#include <pthread.h>
#include <sys/ioctl.h>
#include <time.h>

static uint8_t wire[FRAME_HEADER_BYTES + MAX_LENGTH];

static int has_begun(const void *arg)
{
    return ((const fixture *)arg)->begun > 0;
}

/* The first bytes of a payload have come, and the lane sleeps for more. */
static fixture *open_asleep(size_t length, size_t first)
{
    fixture *f = open_tcp_fixture();
    size_t bytes = make_frame(wire, FRAME_DATA, 1, (uint32_t)length);
    CHECK(first < bytes);
    drive(f, never, 1); /* not as from a fast port */
    put(f, wire, first);
    drive(f, has_begun, LONG_MS);
    drive(f, never, 20);
    CHECK_EQ(f->ln.received_bytes, first);
    return f;
}

static void parts_do_not_wake(void)
{
    enum { PART = 4096, PARTS = MAX_LENGTH / PART };
    fixture *f = open_asleep(MAX_LENGTH, FRAME_HEADER_BYTES + PART);
    for (int i = 1; i < PARTS - 1; i++) {
        put(f, wire + FRAME_HEADER_BYTES + (size_t)i * PART, PART);
        drive(f, never, 2);
    }
    CHECK_EQ(f->ln.received_bytes, FRAME_HEADER_BYTES + PART);
    put(f, wire + FRAME_HEADER_BYTES + (size_t)(PARTS - 1) * PART, PART);
    expect_ended(f, 1);
    close_fixture(f);
}

/* A read that takes all there is, and as much as it can, ends in the next frame. */
static void a_short_rest_wakes(void)
{
    enum { FIRST = 10000, LENGTH = 32768, REST = 1000 };
    static uint8_t next[FRAME_HEADER_BYTES + LANE_RBUF_BYTES + REST];
    fixture *f = open_asleep(LENGTH, FIRST);
    size_t end = FRAME_HEADER_BYTES + LENGTH;
    make_frame(next, FRAME_DATA, 2, LANE_RBUF_BYTES + REST - FRAME_HEADER_BYTES);
    memcpy(wire + end, next, LANE_RBUF_BYTES);
    put(f, wire + FIRST, end + LANE_RBUF_BYTES - FIRST);
    expect_ended(f, 1);
    drive(f, never, 20);
    put(f, next + LANE_RBUF_BYTES, REST);
    expect_ended(f, 2);
    close_fixture(f);
}

static void a_stir_wakes(void)
{
    fixture *f = open_asleep(MAX_LENGTH, 10000);
    put(f, wire + 10000, 5000);
    drive(f, never, 20);
    CHECK_EQ(f->ln.received_bytes, 10000);
    lane_stir(&f->ln);
    drive(f, never, 20);
    CHECK_EQ(f->ln.received_bytes, 15000);
    put(f, wire + 15000, FRAME_HEADER_BYTES + MAX_LENGTH - 15000);
    expect_ended(f, 1);
    close_fixture(f);
}

static void the_end_of_the_stream_wakes(void)
{
    fixture *f = open_asleep(MAX_LENGTH, 10000);
    put(f, wire + 10000, 5000);
    hang_up(f);
    expect_death(f, RC_PEER_LOST, "without a goodbye");
    close_fixture(f);
}

static void a_detached_lane_wakes(void)
{
    fixture *f = open_asleep(MAX_LENGTH, 10000);
    lane_detach(&f->ln);
    put(f, wire + 10000, 5000);
    drive(f, never, 20);
    int left = 0;
    CHECK_EQ(ioctl(f->ln.source.fd, FIONREAD, &left), 0);
    CHECK_EQ(left, 0);
    close_fixture(f);
}

/* ---- streams ---- */

enum { FRAMES = 400 };

static uint32_t length_of(uint64_t seq)
{
    return (uint32_t)(seq * 2654435761U % (seq % 3 ? MAX_LENGTH + 1 : 300));
}

typedef struct stream {
    int fd;
    unsigned cut; /* in pieces of up to so many bytes, with pauses; 0: as a whole */
} stream;

static void *write_stream(void *arg)
{
    const stream *s = arg;
    static uint8_t bytes[FRAME_HEADER_BYTES + MAX_LENGTH];
    unsigned turn = 1;
    for (uint64_t seq = 0; seq < FRAMES; seq++) {
        size_t n = make_frame(bytes, FRAME_DATA, seq, length_of(seq));
        for (size_t at = 0; at < n;) {
            turn = turn * 1664525 + 1013904223;
            size_t part = s->cut ? 1 + (turn >> 8) % s->cut : n;
            part = part < n - at ? part : n - at;
            CHECK_EQ(send(s->fd, bytes + at, part, MSG_NOSIGNAL), part);
            at += part;
            if (s->cut && turn >> 28 == 0)
                nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        }
    }
    return NULL;
}

static void all_frames_come(unsigned cut)
{
    fixture *f = open_tcp_fixture();
    stream s = {f->far, cut};
    pthread_t writer;
    CHECK_EQ(pthread_create(&writer, NULL, write_stream, &s), 0);
    expect_ended(f, FRAMES);
    pthread_join(writer, NULL);
    for (uint64_t seq = FRAMES - KEPT; seq < FRAMES; seq++) {
        CHECK_EQ(f->headers[seq % KEPT].seq, seq);
        CHECK_EQ(f->headers[seq % KEPT].length, length_of(seq));
    }
    close_fixture(f);
}

static void all_frames_come_as_they_are(void)
{
    all_frames_come(0);
}

static void all_frames_come_in_pieces(void)
{
    all_frames_come(60000);
    all_frames_come(9000);
}

int main(void)
{
    static const check_test tests[] = {
        {"parts_do_not_wake", parts_do_not_wake},
        {"a_short_rest_wakes", a_short_rest_wakes},
        {"a_stir_wakes", a_stir_wakes},
        {"the_end_of_the_stream_wakes", the_end_of_the_stream_wakes},
        {"a_detached_lane_wakes", a_detached_lane_wakes},
        {"all_frames_come_as_they_are", all_frames_come_as_they_are},
        {"all_frames_come_in_pieces", all_frames_come_in_pieces},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
