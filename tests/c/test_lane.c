/* test_lane.c - what comes in on a lane: frames cut at every byte, many in one read, damaged ones,
 * and every way for a connection to end. test_lane_send.c has the other direction.
 */
#include "lane_fixture.h"

static void check_frame(const fixture *f, int index, uint64_t seq, uint32_t length)
{
    const frame_header *h = &f->headers[index % KEPT];
    CHECK_EQ(h->seq, seq);
    CHECK_EQ(h->length, length);
    for (uint32_t i = 0; i < length; i++)
        if (!CHECK_EQ(f->payloads[index % KEPT][i], (uint8_t)(seq * 31 + i)))
            return;
}

/* ---- receiving ---- */

static void frames_cut_at_every_byte(void)
{
    fixture *f = open_fixture(0);
    uint8_t wire[2 * (FRAME_HEADER_BYTES + 40)];
    for (size_t cut = 1; cut < sizeof wire; cut++) {
        size_t n = make_frame(wire, FRAME_DATA, 2 * cut, 40);
        n += make_frame(wire + n, FRAME_DATA, 2 * cut + 1, 40);
        put(f, wire, cut);
        drive(f, never, 1);
        put(f, wire + cut, n - cut);
        expect_ended(f, 2 * (int)cut);
        check_frame(f, f->ended - 2, 2 * cut, 40);
        check_frame(f, f->ended - 1, 2 * cut + 1, 40);
    }
    CHECK_EQ(f->begun, f->ended);
    close_fixture(f);
}

static void frames_byte_by_byte(void)
{
    fixture *f = open_fixture(0);
    uint8_t wire[FRAME_HEADER_BYTES + 20];
    for (int i = 0; i < 3; i++) {
        size_t n = make_frame(wire, i == 1 ? FRAME_ABORT : FRAME_DATA, (uint64_t)i, 20);
        for (size_t at = 0; at < n; at++) {
            CHECK_EQ(f->ended, i);
            put(f, wire + at, 1);
            while (f->ln.received_bytes < (uint64_t)i * n + at + 1 && f->deaths == 0)
                drive(f, never, 1);
        }
        check_frame(f, i, (uint64_t)i, 20);
    }
    CHECK_EQ(f->ended, 3);
    close_fixture(f);
}

/* Many small frames in one read, and one that is larger than the lane's buffer in several. */
static void many_frames_in_one_read(void)
{
    enum { FRAMES = 60 };
    fixture *f = open_fixture(0);
    static uint8_t wire[FRAMES * (FRAME_HEADER_BYTES + 100)];
    size_t n = 0;
    for (int i = 0; i < FRAMES; i++)
        n += make_frame(wire + n, FRAME_DATA, (uint64_t)i, (uint32_t)(i * 7 % 100));
    put(f, wire, n);
    expect_ended(f, FRAMES);
    for (int i = 0; i < FRAMES; i++)
        check_frame(f, i, (uint64_t)i, (uint32_t)(i * 7 % 100));
    CHECK_EQ(f->ln.received_frames, FRAMES);
    CHECK_EQ(f->ln.received_bytes, n);
    close_fixture(f);
}

typedef struct writer {
    int fd;
    const uint8_t *bytes;
    size_t n;
} writer;

static void *write_all(void *arg)
{
    writer *w = arg;
    for (size_t at = 0; at < w->n;) {
        ssize_t wrote = send(w->fd, w->bytes + at, w->n - at, MSG_NOSIGNAL);
        if (wrote <= 0)
            break;
        at += (size_t)wrote;
    }
    return NULL;
}

static void frames_of_every_size(void)
{
    static const uint32_t lengths[] = {0,          1, 8144, 8145, 8192, 8193, 20000, MAX_LENGTH - 1,
                                       MAX_LENGTH, 0, 3};
    fixture *f = open_fixture(0);
    size_t total = 0;
    for (size_t i = 0; i < CHECK_COUNT(lengths); i++)
        total += FRAME_HEADER_BYTES + lengths[i];
    uint8_t *wire = malloc(total);
    size_t n = 0;
    for (size_t i = 0; i < CHECK_COUNT(lengths); i++)
        n += make_frame(wire + n, FRAME_DATA, i, lengths[i]);
    pthread_t thread;
    writer w = {f->far, wire, n};
    pthread_create(&thread, NULL, write_all, &w);
    expect_ended(f, (int)CHECK_COUNT(lengths));
    pthread_join(thread, NULL);
    for (size_t i = 0; i < CHECK_COUNT(lengths); i++)
        check_frame(f, (int)i, i, lengths[i]);
    free(wire);
    close_fixture(f);
}

/* ---- the end of a connection ---- */

static void end_after(size_t keep, size_t length)
{
    fixture *f = open_fixture(0);
    uint8_t wire[FRAME_HEADER_BYTES + 64];
    make_frame(wire, FRAME_DATA, 0, (uint32_t)length);
    put(f, wire, keep);
    hang_up(f);
    expect_death(f, RC_PEER_LOST, "closed without a goodbye");
    CHECK_EQ(f->ended, keep == FRAME_HEADER_BYTES + length);
    close_fixture(f);
}

static void end_of_stream_anywhere(void)
{
    end_after(0, 64);
    end_after(1, 64);
    end_after(FRAME_HEADER_BYTES - 1, 64);
    end_after(FRAME_HEADER_BYTES, 64);
    end_after(FRAME_HEADER_BYTES + 63, 64);
    end_after(FRAME_HEADER_BYTES + 64, 64);
    end_after(FRAME_HEADER_BYTES, 0);
}

/* Every bit of a frame, each on a lane of its own. A longer claim makes the lane wait for more, so
 * the stream goes on with another frame's bytes. */
static void flipped_bits_kill_the_lane(void)
{
    uint8_t wire[8 * FRAME_HEADER_BYTES] = {0};
    size_t n = make_frame(wire, FRAME_DATA, 5, 16);
    for (size_t bit = 0; bit < 8 * n; bit++) {
        fixture *f = open_fixture(0);
        wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
        put(f, wire, sizeof wire);
        close(f->far);
        f->far = -1;
        drive(f, has_died, LONG_MS);
        CHECK_EQ(f->deaths, 1);
        CHECK_EQ(f->ended, 0);
        int in_length = bit / 8 >= 36 && bit / 8 < 40;
        CHECK(f->ln.error.code == RC_PROTOCOL || (in_length && f->ln.error.code == RC_PEER_LOST));
        wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
        close_fixture(f);
    }
}

static void damage_is_named(void)
{
    uint8_t wire[FRAME_HEADER_BYTES + 16];
    fixture *f = open_fixture(0);
    size_t n = make_frame(wire, FRAME_DATA, 5, 16);
    wire[n - 1] ^= 1;
    put(f, wire, n);
    expect_death(f, RC_PROTOCOL, "CRC32C");
    close_fixture(f);
    f = open_fixture(0);
    memset(wire, 'G', sizeof wire);
    put(f, wire, sizeof wire);
    expect_death(f, RC_PROTOCOL, "starts with 0x4747");
    close_fixture(f);
}

/* What the handler refuses ends the reading, and the handler has dealt with the lane. */
static void handler_may_refuse(void)
{
    uint8_t wire[2 * (FRAME_HEADER_BYTES + 8)];
    for (int at_end = 0; at_end < 2; at_end++) {
        fixture *f = open_fixture(0);
        size_t n = make_frame(wire, FRAME_DATA, 0, 8);
        n += make_frame(wire + n, FRAME_DATA, 1, 8);
        f->refuse_begin = !at_end;
        f->refuse_end = at_end;
        put(f, wire, n);
        drive(f, never, 20);
        CHECK_EQ(f->begun, 1);
        CHECK_EQ(f->ended, at_end);
        close_fixture(f);
    }
}

/* ---- life ---- */

static void unusable_descriptor_is_refused(void)
{
    fixture *f = open_fixture(0);
    lane other = {.engine = f->engine, .handler = &handler};
    CHECK_EQ(lane_open(&other, 1 << 20, MAX_LENGTH, EPOCH), RC_SYSTEM);
    CHECK_EQ(other.source.fd, -1);
    CHECK_EQ(other.error.code, RC_SYSTEM);
    close_fixture(f);
}

static void nothing_leaks(void)
{
    int before = open_fds();
    for (int i = 0; i < 20; i++)
        close_fixture(open_fixture(0));
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"frames_cut_at_every_byte", frames_cut_at_every_byte},
        {"frames_byte_by_byte", frames_byte_by_byte},
        {"many_frames_in_one_read", many_frames_in_one_read},
        {"frames_of_every_size", frames_of_every_size},
        {"end_of_stream_anywhere", end_of_stream_anywhere},
        {"flipped_bits_kill_the_lane", flipped_bits_kill_the_lane},
        {"damage_is_named", damage_is_named},
        {"handler_may_refuse", handler_may_refuse},
        {"unusable_descriptor_is_refused", unusable_descriptor_is_refused},
        {"nothing_leaks", nothing_leaks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
