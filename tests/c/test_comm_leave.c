/* test_comm_leave.c - leaving bit by bit, and what is given back when a communicator closes in the
 * middle of something.
 */
#include "peer.h"

static float data[2][PEER_SEGMENT / 4];

static rc_work *submit_kind(world *w, int rank, rc_collective kind, uint64_t count)
{
    rc_call call = small_call(kind, data[rank], count);
    return submit(w->comms[rank], &call);
}

/* A payload of which half has come when the communicator closes goes into a buffer of the pool:
 * none is out afterwards. */
static void closing_in_mid_payload_leaks_nothing(void)
{
    for (int how = 0; how < 3; how++) {
        stage s = stage_open((stage_options){0});
        rc_call call = small_call(RC_RECV, data[0], PEER_SEGMENT / 4);
        uint8_t wire[FRAME_HEADER_BYTES + PEER_SEGMENT / 2] = {0};
        frame_header h = data_header(&call, 0);
        h.length = PEER_SEGMENT;
        frame_encode(wire, &h, data[1]);
        play_bytes(s.far[1][0], wire, sizeof wire);
        wait_until_read(&s, 1, 0, sizeof wire);
        CHECK_EQ(s.comm->buffers.taken, 1);
        if (how == 1)
            rc_comm_abort(s.comm, "the test");
        if (how < 2) {
            rc_comm_close(s.comm, 0);
            CHECK_EQ(s.comm->buffers.taken, 0);
        }
        stage_close(&s); /* what is lost here, the address sanitizer sees */
    }
}

/* Leaving is cut into pieces by who has to look at signals: each says whether it is done. */
static void leaving_can_be_cut_into_pieces(void)
{
    world *w = world_open((world_options){.size = 2, .engines = 1, .send_buffer = 4096});
    rc_work *work = submit_kind(w, 0, RC_BARRIER, 0), *other = submit_kind(w, 1, RC_BARRIER, 0);
    expect_done(work);
    expect_done(other);
    while (rc_comm_leave(w->comms[0], 1) == RC_AGAIN)
        continue;
    CHECK_EQ(rc_comm_leave(w->comms[0], 1), RC_OK);
    expect_failure(submit_kind(w, 0, RC_BARRIER, 0), RC_INVALID_STATE, "closed");
    CHECK_EQ(rc_comm_close(w->comms[0], 0), RC_OK);
    CHECK_EQ(rc_comm_leave(w->comms[0], 0), RC_OK);
    world_close(w);
}

/* The far end takes nothing: each piece ends by its own time. */
static void leaving_beside_who_does_not_read(void)
{
    stage s = stage_open((stage_options){0});
    static float bulk[1 << 20];
    rc_call call = small_call(RC_BROADCAST, bulk, CHECK_COUNT(bulk));
    call.root = 0;
    frame_header h = control_header(FRAME_CALL, 0);
    h.fingerprint = fingerprint_of(&call);
    play(s.far[1][0], h, NULL);
    rc_work *work = submit(s.comm, &call);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(rc_comm_leave(s.comm, 1), RC_AGAIN);
    CHECK_EQ(rc_comm_close(s.comm, 0), RC_TIMEOUT);
    expect_failure(work, RC_ABORTED, "closed its communicator with collectives in flight");
    stage_close(&s);
}

/* A peer sends nothing more once it has the goodbye: that is no silence to blame it for, however
 * long others keep this rank from closing. */
static void who_has_the_goodbye_may_be_silent(void)
{
    stage s = stage_open((stage_options){.heartbeat_ms = 10, .peer_timeout_ms = 50});
    rc_error error;
    uint64_t end = clock_ns() + 200 * CLOCK_MS;
    while (clock_ns() < end)
        CHECK_EQ(rc_comm_leave(s.comm, 10), RC_AGAIN);
    rc_comm_error(s.comm, &error);
    CHECK_EQ(error.code, RC_INVALID_STATE);
    stage_close(&s);
}

/* The lane on which damage arrived is the only one to say so by: leaving waits until that is read.
 */
static void damage_is_told_before_the_end(void)
{
    stage s = stage_open((stage_options){0});
    uint8_t damaged[FRAME_HEADER_BYTES] = {0};
    rc_error error;
    play_bytes(s.far[1][0], damaged, sizeof damaged);
    do {
        CHECK_EQ(rc_comm_leave(s.comm, 1), RC_AGAIN);
        rc_comm_error(s.comm, &error);
    } while (error.code != RC_PROTOCOL);
    CHECK_EQ(rc_comm_leave(s.comm, 1), RC_AGAIN);
    stage_close(&s);
}

int main(void)
{
    static const check_test tests[] = {
        {"closing_in_mid_payload_leaks_nothing", closing_in_mid_payload_leaks_nothing},
        {"leaving_can_be_cut_into_pieces", leaving_can_be_cut_into_pieces},
        {"leaving_beside_who_does_not_read", leaving_beside_who_does_not_read},
        {"who_has_the_goodbye_may_be_silent", who_has_the_goodbye_may_be_silent},
        {"damage_is_told_before_the_end", damage_is_told_before_the_end},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
