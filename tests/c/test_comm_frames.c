/* test_comm_frames.c - what arrives, played by hand: frames that no correct peer sends must fail
 * the communicator with the right code, tell the peers, and leave nothing behind; correct ones may
 * come early, late and cut in any way.
 */
#include "peer.h"

enum { COUNT = 1500 }; /* f32: two segments of 4096 bytes */

static float ours[COUNT], theirs[COUNT];

/* ---- bending one frame of a receive ---- */

typedef void bend_fn(frame_header *h);

static rc_call receive_call(void)
{
    rc_call call = small_call(RC_RECV, ours, COUNT);
    call.root = 1;
    return call;
}

/* The first segment of what the receive waits for, bent. */
static void bent_data_fails(bend_fn *bend, rc_result code, const char *text)
{
    stage s = stage_open((stage_options){0});
    rc_call call = receive_call();
    rc_work *work = submit(s.comm, &call);
    frame_header h = data_header(&call, 0);
    h.length = PEER_SEGMENT;
    bend(&h);
    play(s.far[1][0], h, theirs);
    expect_failure(work, code, text);
    expect_abort(s.far[1][0], code, 1);
    stage_close(&s);
}

static void bend_epoch(frame_header *h)
{
    h->epoch++;
}

static void bend_type(frame_header *h)
{
    h->type = FRAME_ABORT + 1;
}

static void bend_flags(frame_header *h)
{
    h->flags |= 0x8000;
}

static void bend_length_over(frame_header *h)
{
    h->length = PEER_SEGMENT + 4;
}

static void bend_length_under(frame_header *h)
{
    h->length -= 4;
}

static void bend_length_zero(frame_header *h)
{
    h->length = 0;
}

static void bend_chunk(frame_header *h)
{
    h->chunk = 1;
}

static void bend_chunk_far(frame_header *h)
{
    h->chunk = UINT32_MAX;
}

static void bend_segment(frame_header *h)
{
    h->segment = 2;
}

static void bend_last_segment(frame_header *h)
{
    h->segment = 1; /* exists, but is shorter */
}

static void bend_segment_far(frame_header *h)
{
    h->segment = UINT32_MAX;
}

static void bend_step(frame_header *h)
{
    h->step = 1;
}

static void bend_step_far(frame_header *h)
{
    h->step = UINT16_MAX;
}

static void bend_fingerprint(frame_header *h)
{
    h->fingerprint ^= UINT64_C(1) << 28;
}

static void headers_out_of_bounds(void)
{
    bent_data_fails(bend_epoch, RC_PROTOCOL, "epoch 6 came in epoch 5");
    bent_data_fails(bend_type, RC_PROTOCOL, "type 6");
    bent_data_fails(bend_flags, RC_PROTOCOL, "flags 32769");
    bent_data_fails(bend_length_over, RC_PROTOCOL, "claims 4100 bytes");
    bent_data_fails(bend_length_under, RC_PROTOCOL, "has 4092 bytes, not 4096");
    bent_data_fails(bend_length_zero, RC_PROTOCOL, "has 0 bytes, not 4096");
    bent_data_fails(bend_chunk, RC_PROTOCOL, "segment 0 of chunk 1 at step 0 is not expected");
    bent_data_fails(bend_chunk_far, RC_PROTOCOL, "is not expected");
    bent_data_fails(bend_segment, RC_PROTOCOL, "segment 2 of chunk 0 at step 0 is not expected");
    bent_data_fails(bend_segment_far, RC_PROTOCOL, "is not expected");
    bent_data_fails(bend_last_segment, RC_PROTOCOL, "has 4096 bytes, not 1904");
    bent_data_fails(bend_step, RC_PROTOCOL, "segment 0 of chunk 0 at step 1 is not expected");
    bent_data_fails(bend_step_far, RC_PROTOCOL, "is not expected");
    bent_data_fails(bend_fingerprint, RC_MISMATCH,
                    "rank 0 called send/recv(f32[1500]), rank 1 called send/recv(f32[1501])");
}

/* The same frame, early: it is judged when the receive is called. */
static void early_frames_are_judged_later(void)
{
    bend_fn *const bends[] = {bend_length_under, bend_chunk_far, bend_segment, bend_step_far};
    for (size_t i = 0; i <= CHECK_COUNT(bends); i++) {
        int mismatch = i == CHECK_COUNT(bends);
        stage s = stage_open((stage_options){0});
        rc_call call = receive_call();
        frame_header h = data_header(&call, 0);
        h.length = PEER_SEGMENT;
        (mismatch ? bend_fingerprint : bends[i])(&h);
        play(s.far[1][0], h, theirs);
        usleep(10000);
        rc_error error;
        rc_comm_error(s.comm, &error);
        CHECK_EQ(error.code, RC_OK);
        expect_failure(submit(s.comm, &call), mismatch ? RC_MISMATCH : RC_PROTOCOL, "");
        expect_abort(s.far[1][0], mismatch ? RC_MISMATCH : RC_PROTOCOL, 1);
        stage_close(&s);
    }
}

static void bytes_fail(const void *bytes, size_t n, const char *text)
{
    stage s = stage_open((stage_options){.lanes = 2});
    rc_call call = receive_call();
    rc_work *work = submit(s.comm, &call);
    play_bytes(s.far[1][1], bytes, n);
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_PROTOCOL);
    CHECK_EQ(error.rank, 1);
    CHECK_EQ(error.lane, 1);
    CHECK_EQ(error.rail, 0);
    CHECK(strstr(error.message, text) != NULL);
    rc_work_free(work);
    expect_abort(s.far[1][0], RC_PROTOCOL, 1); /* on the lane that is left */
    stage_close(&s);
}

static void bytes_that_are_no_frame(void)
{
    uint8_t wire[FRAME_HEADER_BYTES + PEER_SEGMENT];
    rc_call call = receive_call();
    frame_header h = data_header(&call, 0);
    h.length = PEER_SEGMENT;
    bytes_fail("GET / HTTP/1.1\r\nHost: example.invalid\r\nAccept: */*\r\n\r\n", 53, "starts with");
    memcpy(wire + FRAME_HEADER_BYTES, theirs, PEER_SEGMENT);
    frame_encode(wire, &h, theirs);
    wire[2] ^= 9;
    bytes_fail(wire, sizeof wire, "version 11");
    wire[2] ^= 9;
    wire[sizeof wire - 1] ^= 0x80;
    bytes_fail(wire, sizeof wire, "the payload of a frame arrived damaged");
}

/* One bit of a header, before the payload has come: it is said at once that the header is damaged,
 * on which lane, and to the peer, whatever the bit made of it. */
static void flip_header_bit(size_t bit, int early)
{
    stage s = stage_open((stage_options){.lanes = 2});
    rc_call call = receive_call();
    rc_work *work = early ? NULL : submit(s.comm, &call);
    uint8_t wire[FRAME_HEADER_BYTES];
    frame_header h = data_header(&call, 0);
    rc_error error;
    h.length = 1024; /* so that each bit of it leads to a length that may be, or to none */
    frame_encode(wire, &h, theirs);
    wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
    play_bytes(s.far[1][1], wire, sizeof wire);
    expect_abort(s.far[1][1], RC_PROTOCOL, 1);
    rc_comm_error(s.comm, &error);
    int named = CHECK_EQ(error.code, RC_PROTOCOL) & CHECK_EQ(error.rank, 1) &
                CHECK_EQ(error.rail, 0) & CHECK_EQ(error.lane, 1) &
                CHECK(strstr(error.message, "on lane 1 of rail 0 from rank 1 to rank 0 the header "
                                            "of a frame arrived damaged") != NULL);
    if (!named)
        CHECK_NOTE("bit %zu, early %d: %s\n", bit, early, error.message);
    rc_work_free(work);
    stage_close(&s);
}

static void every_flipped_header_bit_is_said(void)
{
    for (int early = 0; early < 2; early++)
        for (size_t bit = 0; bit < (size_t)8 * FRAME_HEADER_BYTES; bit++)
            flip_header_bit(bit, early);
}

/* ---- exactly once ---- */

static void segment_twice(void)
{
    stage s = stage_open((stage_options){.lanes = 2});
    rc_call call = receive_call();
    rc_work *work = submit(s.comm, &call);
    frame_header h = data_header(&call, 0);
    h.length = PEER_SEGMENT;
    play(s.far[1][0], h, theirs);
    usleep(10000);
    play(s.far[1][1], h, theirs);
    expect_failure(work, RC_PROTOCOL, "segment 0 of chunk 0 at step 0 came twice");
    stage_close(&s);
}

/* Plays a whole receive well. */
static void play_receive(const stage *s, const rc_call *call, uint64_t seq)
{
    frame_header h = data_header(call, seq);
    h.length = PEER_SEGMENT;
    play(s->far[1][0], h, theirs);
    h.segment = 1;
    h.length = COUNT * 4 - PEER_SEGMENT;
    play(s->far[1][s->lanes - 1], h, (const uint8_t *)theirs + PEER_SEGMENT);
}

static void data_for_what_is_over(void)
{
    for (int p2p = 0; p2p < 2; p2p++) {
        stage s = stage_open((stage_options){0});
        rc_call call = receive_call();
        call.collective = p2p ? RC_RECV : RC_BROADCAST;
        rc_work *work = submit(s.comm, &call);
        play_receive(&s, &call, 0);
        expect_done(work);
        CHECK(memcmp(ours, theirs, sizeof ours) == 0);
        frame_header h = data_header(&call, 0);
        h.length = PEER_SEGMENT;
        play(s.far[1][0], h, theirs);
        expect_abort(s.far[1][0], RC_PROTOCOL, 1);
        expect_failure(submit(s.comm, &call), RC_PROTOCOL,
                       p2p ? "send #0, which is over" : "collective #0, which is over");
        stage_close(&s);
    }
}

/* Another collective over there than the one that is over here: a mismatch, as long as it is
 * remembered. */
static void late_word_of_another_collective(void)
{
    for (int how = 0; how < 2; how++) {
        stage s = stage_open((stage_options){0});
        rc_call call = small_call(RC_BROADCAST, ours, 0), other = small_call(RC_BARRIER, NULL, 0);
        expect_done(submit(s.comm, &call)); /* of nothing: over at once */
        frame_header h = data_header(how ? &other : &call, 0);
        h.type = how ? FRAME_CALL : FRAME_DATA;
        if (!how)
            h.fingerprint = fingerprint_of(&other);
        play(s.far[1][0], h, NULL);
        expect_abort(s.far[1][0], RC_MISMATCH, 1);
        expect_failure(submit(s.comm, &call), RC_MISMATCH,
                       "collective #0: rank 0 called broadcast(f32[0], root=0), rank 1 called "
                       "barrier()");
        stage_close(&s);
    }
}

static void announced_call_must_match(void)
{
    for (int early = 0; early < 2; early++) {
        stage s = stage_open((stage_options){0});
        rc_call call = receive_call(), other = small_call(RC_ALLGATHER, ours, 10);
        call.collective = RC_BROADCAST;
        frame_header h = control_header(FRAME_CALL, 0);
        h.fingerprint = fingerprint_of(&other);
        if (early) {
            play(s.far[1][0], h, NULL);
            usleep(10000);
        }
        rc_work *work = submit(s.comm, &call);
        if (!early)
            play(s.far[1][0], h, NULL);
        expect_failure(work, RC_MISMATCH, "rank 1 called allgather(f32[10])");
        stage_close(&s);
    }
}

/* ---- credit ---- */

/* The rank has read so many frames, or has failed. */
static void wait_for_frames(const stage *s, uint64_t frames)
{
    rc_lane_stats lane = {0};
    rc_error error;
    do {
        usleep(200);
        rc_comm_lane_stats(s->comm, &lane, 1);
        rc_comm_error(s->comm, &error);
    } while (lane.received_frames < frames && error.code == RC_OK);
}

static void credit_overrun(void)
{
    for (int p2p = 0; p2p < 2; p2p++) {
        stage s = stage_open((stage_options){0});
        rc_call call = small_call(p2p ? RC_RECV : RC_BROADCAST, ours, 1024);
        rc_error error = {.code = RC_OK};
        int frames = 0;
        call.root = 1;
        for (; frames < 100 && error.code == RC_OK; frames++) {
            frame_header h = data_header(&call, (uint64_t)frames);
            h.length = PEER_SEGMENT;
            play(s.far[1][0], h, theirs);
            wait_for_frames(&s, (uint64_t)frames + 1);
            rc_comm_error(s.comm, &error);
        }
        CHECK_EQ(error.code, RC_PROTOCOL);
        CHECK(strstr(error.message, "more ahead than its credit allows") != NULL);
        CHECK(frames >= 8 && frames <= 9); /* segments of credit */
        expect_abort(s.far[1][0], RC_PROTOCOL, 1);
        stage_close(&s);
    }
}

/* Frames without payload take memory here too. */
static void empty_frames_use_credit(void)
{
    stage s = stage_open((stage_options){0});
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_error error = {.code = RC_OK};
    int frames = 0;
    for (; frames < 5000 && error.code == RC_OK; frames++) {
        frame_header h = data_header(&call, (uint64_t)frames + 1);
        h.chunk = 2;
        play(s.far[1][0], h, NULL);
        if (frames % 100 == 0)
            rc_comm_error(s.comm, &error);
    }
    CHECK_EQ(error.code, RC_PROTOCOL);
    stage_close(&s);
}

/* What a rank is told of its peer's consumption keeps it going. */
static void consumption_is_told(void)
{
    stage s = stage_open((stage_options){0});
    uint8_t payload[PEER_SEGMENT];
    frame_header h = {0};
    rc_call call = small_call(RC_RECV, ours, 1024);
    call.root = 1;
    for (uint64_t seq = 0; seq < 20; seq++) {
        rc_work *work = submit(s.comm, &call);
        frame_header data = data_header(&call, seq);
        data.length = PEER_SEGMENT;
        play(s.far[1][0], data, theirs);
        expect_done(work);
    }
    while (h.consumed < 17 * PEER_SEGMENT) /* all but a quarter of the credit */
        if (!CHECK(watch_frame(s.far[1][0], &h, payload)))
            break;
    stage_close(&s);
}

/* ---- aborts ---- */

static void play_abort(int fd, uint32_t code, int32_t rank, int32_t origin, const char *text)
{
    uint8_t payload[FRAME_TEXT_BYTES] = {(uint8_t)code, (uint8_t)(code >> 8)};
    for (int i = 0; i < 4; i++) {
        payload[4 + i] = (uint8_t)((uint32_t)rank >> 8 * i);
        payload[16 + i] = (uint8_t)((uint32_t)origin >> 8 * i);
    }
    memcpy(payload + 20, text, strlen(text));
    frame_header h = control_header(FRAME_ABORT, 0);
    h.length = 20 + (uint32_t)strlen(text);
    play(fd, h, payload);
}

static void aborted_with(uint32_t code, int32_t rank, rc_result want, int want_rank)
{
    stage s = stage_open((stage_options){.world_size = 3});
    rc_call call = receive_call();
    rc_work *work = submit(s.comm, &call);
    rc_error error;
    play_abort(s.far[2][0], code, rank, 2, "it went \x1b[31mwrong");
    CHECK_EQ(outcome(work, &error), want);
    CHECK_EQ(error.rank, want_rank);
    CHECK(strcmp(error.message, "it went ?[31mwrong") == 0);
    rc_work_free(work);
    expect_abort(s.far[1][0], want, want_rank); /* passed on */
    stage_close(&s);
}

static void aborts_are_raised_and_passed_on(void)
{
    aborted_with(RC_PEER_LOST, 1, RC_PEER_LOST, 1);
    aborted_with(RC_ABORTED, 2, RC_ABORTED, 2);
    aborted_with(RC_TIMEOUT, -1, RC_TIMEOUT, -1);
    aborted_with(RC_OK, 1, RC_ABORTED, 1);        /* no failure at all */
    aborted_with(1000, 1, RC_ABORTED, 1);         /* nor one that is known */
    aborted_with(RC_PROTOCOL, 3, RC_PROTOCOL, 2); /* no such rank: who says so */
    aborted_with(RC_PROTOCOL, INT32_MIN, RC_PROTOCOL, 2);
    aborted_with(RC_MISMATCH, 0, RC_MISMATCH, 2); /* each side names the other */
}

/* Ranks 0 and 3 differ, and rank 0 hears of it by rank 1, or 2 by rank 1. */
static void a_mismatch_names_who_differs(void)
{
    static const struct {
        int32_t rank, origin, want;
    } cases[] = {{0, 3, 3}, {2, 3, 2}, {0, 99, 1}, {0, -5, 1}, {0, 0, 1}};
    for (size_t i = 0; i < CHECK_COUNT(cases); i++) {
        stage s = stage_open((stage_options){.world_size = 4});
        rc_call call = receive_call();
        rc_work *work = submit(s.comm, &call);
        rc_error error;
        uint8_t payload[PEER_SEGMENT];
        frame_header h;
        int origin;
        play_abort(s.far[1][0], RC_MISMATCH, cases[i].rank, cases[i].origin, "ranks differ");
        CHECK_EQ(outcome(work, &error), RC_MISMATCH);
        CHECK_EQ(error.rank, cases[i].want);
        if (CHECK(watch_for(s.far[2][0], FRAME_ABORT, &h, payload))) { /* it passes that on */
            frame_abort_decode(payload, h.length, &error, &origin);
            CHECK_EQ(error.rank, cases[i].want);
            CHECK_EQ(origin, cases[i].origin == 3 ? 3 : 1);
        }
        rc_work_free(work);
        stage_close(&s);
    }
}

/* It is no news to a rank that it has not called something. */
static void a_late_rank_is_told_who_gave_up(void)
{
    static const struct {
        int32_t rank;
        int called;
        const char *text;
    } cases[] = {{0, 1, "rank 2 gave up waiting for this rank, and said: \"rank 0, 3 has not"},
                 {3, 1, "rank 2 gave up waiting for this rank, and said: \"rank 0, 3 has not"},
                 {3, 0, "rank 0, 3 has not"},
                 {-1, 1, "rank 0, 3 has not"}};
    for (size_t i = 0; i < CHECK_COUNT(cases); i++) {
        stage s = stage_open((stage_options){.world_size = 4});
        rc_call call = small_call(RC_BARRIER, NULL, 0);
        rc_error error;
        if (cases[i].called)
            play(s.far[2][0], control_header(FRAME_HEARTBEAT, 1), NULL);
        play_abort(s.far[2][0], RC_TIMEOUT, cases[i].rank, 2, "rank 0, 3 has not called it");
        frame_header h;
        uint8_t payload[PEER_SEGMENT];
        int origin;
        if (CHECK(watch_for(s.far[1][0], FRAME_ABORT, &h, payload))) { /* it passes that on */
            frame_abort_decode(payload, h.length, &error, &origin);
            CHECK_EQ(error.rank, cases[i].rank);
            CHECK(strncmp(error.message, "rank 0, 3 has not", 17) == 0);
        }
        rc_work *work = submit(s.comm, &call);
        CHECK_EQ(outcome(work, &error), RC_TIMEOUT);
        CHECK_EQ(error.rank, cases[i].rank);
        if (!CHECK(strncmp(error.message, cases[i].text, strlen(cases[i].text)) == 0))
            fprintf(stderr, "the error is: %s\n", error.message);
        rc_work_free(work);
        stage_close(&s);
    }
}

/* ---- correct frames ---- */

/* Cut between any two bytes, over two lanes, the second segment first, before and after the call.
 */
static void receive_however_it_comes(void)
{
    for (int early = 0; early < 3; early++) {
        stage s = stage_open((stage_options){.lanes = 2});
        rc_call call = receive_call();
        rc_work *work = early == 2 ? NULL : submit(s.comm, &call);
        uint8_t wire[FRAME_HEADER_BYTES + PEER_SEGMENT];
        frame_header h = data_header(&call, 0);
        for (int i = 0; i < COUNT; i++)
            theirs[i] = (float)(i * 3 + early);
        h.segment = 1;
        h.length = COUNT * 4 - PEER_SEGMENT;
        play(s.far[1][1], h, (const uint8_t *)theirs + PEER_SEGMENT);
        h.segment = 0;
        h.length = PEER_SEGMENT;
        frame_encode(wire, &h, theirs);
        memcpy(wire + FRAME_HEADER_BYTES, theirs, PEER_SEGMENT);
        for (size_t at = 0; at < sizeof wire; at++) {
            if (early == 1 && at == 2000) /* while it arrives */
                usleep(10000);
            if (early == 2 && at == 2000)
                work = submit(s.comm, &call);
            play_bytes(s.far[1][0], wire + at, 1);
        }
        expect_done(work);
        CHECK(memcmp(ours, theirs, sizeof ours) == 0);
        stage_close(&s);
    }
}

/* What a rank sends: everything it must, in whole frames, whatever the order of what it hears. */
static void broadcast_seen_from_the_wire(void)
{
    stage s = stage_open((stage_options){.rank = 1, .world_size = 3});
    rc_call call = receive_call();
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    call.collective = RC_BROADCAST;
    call.root = 0;
    rc_work *work = submit(s.comm, &call);
    frame_header data = data_header(&call, 0);
    data.segment = 1;
    data.length = COUNT * 4 - PEER_SEGMENT;
    play(s.far[0][0], data, (const uint8_t *)theirs + PEER_SEGMENT);
    CHECK(watch_for(s.far[2][0], FRAME_DATA, &h, payload)); /* passed on before the rest is here */
    CHECK_EQ(h.segment, 1);
    CHECK_EQ(h.step, 1);
    CHECK_EQ(h.chunk, 0);
    CHECK_EQ(h.seq, 0);
    CHECK_EQ(h.fingerprint, fingerprint_of(&call));
    CHECK(memcmp(payload, (const uint8_t *)theirs + PEER_SEGMENT, h.length) == 0);
    data.segment = 0;
    data.length = PEER_SEGMENT;
    play(s.far[0][0], data, theirs);
    CHECK(watch_for(s.far[2][0], FRAME_DATA, &h, payload));
    CHECK_EQ(h.segment, 0);
    expect_done(work);
    stage_close(&s);
}

static void wait_until_unmatched(const stage *s, const rc_work *work)
{
    for (int waits = 0; !waits; usleep(200)) {
        engine_lock(s->engine);
        waits = work->state == WORK_UNMATCHED;
        engine_unlock(s->engine);
    }
}

/* A send arrives, whole or its header alone, before there is memory for the bits of the receive
 * from any source that takes it: that fails, and no bit is set. */
static void a_matched_receive_cannot_start(void)
{
    enum { SEGMENTS = 2000, BITS_BYTES = 504 }; /* a bit in each of two phases, in words of 8 */
    static float many[SEGMENTS * PEER_SEGMENT / 4];
    for (int early = 0; early < 2; early++) {
        stage s = stage_open((stage_options){0});
        rc_call call = small_call(RC_RECV, many, CHECK_COUNT(many));
        rc_work_stats stats;
        uint8_t wire[FRAME_HEADER_BYTES + PEER_SEGMENT] = {0};
        size_t before = early ? FRAME_HEADER_BYTES : 0;
        frame_header h = data_header(&call, 0);
        call.root = RC_ANY_SOURCE;
        h.segment = SEGMENTS - 1;
        h.length = PEER_SEGMENT;
        frame_encode(wire, &h, wire + FRAME_HEADER_BYTES);
        play_bytes(s.far[1][0], wire, before);
        wait_until_read(&s, 1, 0, before);
        rc_work *work = submit(s.comm, &call);
        wait_until_unmatched(&s, work);
        check_scarce = BITS_BYTES;
        play_bytes(s.far[1][0], wire + before, sizeof wire - before);
        rc_work_wait(work, WORLD_LONG_MS);
        check_scarce = 0;
        rc_work_stats_get(work, &stats);
        CHECK_EQ(stats.started_ns, 0);
        expect_failure(work, RC_NO_MEMORY, "a collective could not start");
        stage_close(&s);
    }
}

static void nothing_leaks(void)
{
    int before = open_fds();
    bent_data_fails(bend_chunk, RC_PROTOCOL, "");
    segment_twice();
    aborts_are_raised_and_passed_on();
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"headers_out_of_bounds", headers_out_of_bounds},
        {"early_frames_are_judged_later", early_frames_are_judged_later},
        {"bytes_that_are_no_frame", bytes_that_are_no_frame},
        {"every_flipped_header_bit_is_said", every_flipped_header_bit_is_said},
        {"segment_twice", segment_twice},
        {"data_for_what_is_over", data_for_what_is_over},
        {"late_word_of_another_collective", late_word_of_another_collective},
        {"announced_call_must_match", announced_call_must_match},
        {"credit_overrun", credit_overrun},
        {"empty_frames_use_credit", empty_frames_use_credit},
        {"consumption_is_told", consumption_is_told},
        {"aborts_are_raised_and_passed_on", aborts_are_raised_and_passed_on},
        {"a_mismatch_names_who_differs", a_mismatch_names_who_differs},
        {"a_late_rank_is_told_who_gave_up", a_late_rank_is_told_who_gave_up},
        {"receive_however_it_comes", receive_however_it_comes},
        {"broadcast_seen_from_the_wire", broadcast_seen_from_the_wire},
        {"a_matched_receive_cannot_start", a_matched_receive_cannot_start},
        {"nothing_leaks", nothing_leaks},
    };
    for (int i = 0; i < COUNT; i++)
        theirs[i] = (float)i;
    return check_run(tests, CHECK_COUNT(tests));
}
