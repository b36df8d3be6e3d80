/* test_lane_send.c - what goes out on a lane: through a narrow socket, to a peer that is gone, half
 * sent when the communicator fails.
 */
#include "lane_stream.h"

/* ---- sending ---- */

static void frames_through_a_narrow_socket(void)
{
    enum { FRAMES = 100 };
    static uint8_t payload[MAX_LENGTH];
    uint64_t seed = 77;
    fixture *f = open_fixture(1); /* the kernel's minimum */
    for (size_t i = 0; i < sizeof payload; i++)
        payload[i] = (uint8_t)draw(&seed);
    reader r;
    start_reading(&r, f, FRAMES * (FRAME_HEADER_BYTES + MAX_LENGTH), 3001);
    uint64_t total = 0;
    for (int i = 0; i < FRAMES; i++) {
        uint32_t length =
            i % 3 == 0 ? (uint32_t)draw_below(&seed, 10) : (uint32_t)draw_below(&seed, 9000);
        push(f, i, payload, length);
        total += FRAME_HEADER_BYTES + length;
    }
    CHECK(f->ln.out_bytes > 0);
    CHECK(lane_unacked(&f->ln) > 0);
    expect_sent(f, FRAMES);
    CHECK(f->rooms > 0);
    CHECK_EQ(f->ln.out.sent_bytes, total);
    CHECK_EQ(f->ln.sent_frames, FRAMES);
    CHECK_EQ(f->ln.out_bytes, 0);
    CHECK_EQ(finish_reading(&r, f), FRAMES);
    close_fixture(f);
}

/* What a failing communicator does: the frame in progress is completed from a copy, later ones are
 * dropped, and a control frame may follow. */
static void detach_leaves_the_stream_well_formed(void)
{
    for (int trial = 0; trial < 8; trial++) {
        enum { LENGTH = 60000 };
        fixture *f = open_fixture(1);
        uint8_t *payload = malloc(LENGTH), abort_text[20] = {0};
        memset(payload, trial, LENGTH);
        uint32_t first = (uint32_t)(LENGTH - trial * 7919);
        for (int i = 0; i < 3; i++)
            push(f, i, payload, first);
        CHECK(f->ln.out.sent > 0);
        int whole = f->sent;
        lane_detach(&f->ln);
        CHECK_EQ(f->sent, 3); /* all given back */
        memset(payload, 0xee, LENGTH);
        free(payload);
        lane_push(&f->ln,
                  new_frame(FRAME_ABORT, (uint64_t)whole + 1, abort_text, sizeof abort_text));
        reader r;
        start_reading(&r, f, 1 << 20, 0);
        expect_sent(f, 5); /* the copy and the abort */
        CHECK_EQ(finish_reading(&r, f), whole + 2);
        close_fixture(f);
    }
}

static void detach_of_an_idle_lane(void)
{
    fixture *f = open_fixture(0);
    uint8_t wire[FRAME_HEADER_BYTES];
    lane_detach(&f->ln);
    make_frame(wire, FRAME_HEARTBEAT, 0, 0);
    put(f, wire, sizeof wire);
    drive(f, never, 10);
    CHECK_EQ(f->ended, 0); /* thrown away */
    lane_push(&f->ln, new_frame(FRAME_HEARTBEAT, 0, NULL, 0));
    CHECK_EQ(f->sent, 1);
    hang_up(f);
    uint64_t deadline = clock_ns() + LONG_MS * CLOCK_MS;
    while (f->ln.source.fd >= 0 && clock_ns() < deadline)
        drive(f, never, 1);
    CHECK_EQ(f->ln.source.fd, -1);
    CHECK_EQ(f->deaths, 0);
    close_fixture(f);
}

/* A peer that takes nothing more is judged by what it sent before: its goodbye may still be
 * unread. Until then frames pass as sent. */
static void mute_lane_still_reads(void)
{
    fixture *f = open_fixture(0);
    uint8_t wire[FRAME_HEADER_BYTES];
    make_frame(wire, FRAME_GOODBYE, 3, 0);
    put(f, wire, sizeof wire);
    hang_up(f);
    lane_push(&f->ln, new_frame(FRAME_HEARTBEAT, 0, NULL, 0));
    CHECK_EQ(f->ln.tx_closed, 1);
    lane_push(&f->ln, new_frame(FRAME_HEARTBEAT, 1, NULL, 0));
    CHECK_EQ(f->sent, 2);
    CHECK_EQ(f->ln.sent_frames, 0);
    CHECK_EQ(f->ln.out_bytes, 0);
    drive(f, has_died, LONG_MS);
    CHECK_EQ(f->ended, 1);
    CHECK_EQ(f->headers[0].type, FRAME_GOODBYE);
    CHECK_EQ(f->deaths, 1);
    close_fixture(f);
}

static void close_gives_frames_back(void)
{
    static uint8_t payload[MAX_LENGTH];
    fixture *f = open_fixture(1);
    for (int i = 0; i < 20; i++)
        push(f, i, payload, MAX_LENGTH);
    CHECK(f->sent < 20);
    lane_close(&f->ln);
    CHECK_EQ(f->sent, 20);
    push(f, 20, payload, 1);
    CHECK_EQ(f->sent, 21);
    CHECK_EQ(lane_unacked(&f->ln), 0);
    close_fixture(f);
}

int main(void)
{
    static const check_test tests[] = {
        {"frames_through_a_narrow_socket", frames_through_a_narrow_socket},
        {"detach_leaves_the_stream_well_formed", detach_leaves_the_stream_well_formed},
        {"detach_of_an_idle_lane", detach_of_an_idle_lane},
        {"mute_lane_still_reads", mute_lane_still_reads},
        {"close_gives_frames_back", close_gives_frames_back},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
