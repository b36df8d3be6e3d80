/* test_comm_timers.c - deadlines, heartbeats, silence and idle memory. Times are some tens of
 * milliseconds, and what is checked from above is only that they are not minutes; or they pass at
 * the test's word (peer.h), where a thread that is held up would be taken for a silent peer.
 */
#include "../../csrc/base/clock.h"
#include "peer.h"

static float data[4][300000];

/* ---- deadlines ---- */

static void missing_ranks_are_named(void)
{
    world *w = world_open((world_options){.size = 4});
    rc_work *works[2];
    for (int i = 0; i < 2; i++) {
        rc_call call = small_call(RC_ALLREDUCE, data[2 * i], 10);
        call.timeout_ms = i == 0 ? 80 : 30000;
        works[i] = submit(w->comms[2 * i], &call);
    }
    rc_error error;
    CHECK_EQ(outcome(works[0], &error), RC_TIMEOUT);
    CHECK_EQ(error.rank, 1);
    CHECK(strstr(error.message, "rank 1, 3 has not called it") != NULL ||
          strstr(error.message, "rank 1, 2, 3 has not called it") != NULL); /* 2 tells 3 only */
    CHECK(error.elapsed_s >= 0.08 && error.elapsed_s < 10.0);
    rc_work_free(works[0]);
    expect_failure(works[1], RC_TIMEOUT, "has not called it"); /* rank 2 hears of it */
    rc_call late = small_call(RC_ALLREDUCE, data[1], 10);
    expect_failure(submit(w->comms[1], &late), RC_TIMEOUT, "has not called it");
    world_close(w);
}

static void missing_partner_is_named(void)
{
    for (int sends = 0; sends < 2; sends++) {
        world *w = world_open((world_options){.size = 2, .segment_bytes = 4096});
        rc_call call = small_call(sends ? RC_SEND : RC_RECV, data[0], 300000);
        call.root = 1;
        call.timeout_ms = 50;
        expect_failure(submit(w->comms[0], &call), RC_TIMEOUT,
                       sends ? "no receive by rank 1 within 0.05"
                             : "no send by rank 1 within 0.05");
        world_close(w);
    }
}

/* Everyone has called, and still it is not done: no rank is to blame. */
static void slow_network_is_told_from_missing_ranks(void)
{
    stage s = stage_open((stage_options){0});
    rc_call call = small_call(RC_BROADCAST, data[0], 10);
    call.root = 1;
    call.timeout_ms = 60;
    frame_header h = control_header(FRAME_CALL, 0);
    h.fingerprint = fingerprint_of(&call);
    play(s.far[1][0], h, NULL);
    wait_until_read(&s, 1, 0, FRAME_HEADER_BYTES);
    rc_work *work = submit(s.comm, &call);
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_TIMEOUT);
    CHECK_EQ(error.rank, -1);
    CHECK(strstr(error.message, "called by every rank") != NULL);
    rc_work_free(work);
    expect_abort(s.far[1][0], RC_TIMEOUT, -1);
    stage_close(&s);
}

/* Only the works themselves have deadlines: waiting in vain changes nothing. */
static void waiting_is_no_deadline(void)
{
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *work = submit(w->comms[0], &call);
    CHECK_EQ(rc_work_wait(work, 0), RC_AGAIN);
    CHECK_EQ(rc_work_wait(work, 30), RC_AGAIN);
    CHECK(rc_work_elapsed(work) == 0.0);
    rc_work *other = submit(w->comms[1], &call);
    CHECK_EQ(rc_work_wait(work, WORLD_LONG_MS), RC_OK);
    CHECK(rc_work_elapsed(work) >= 0.03);
    rc_work_free(work);
    expect_done(other);
    world_close(w);
}

static void earliest_deadline_counts(void)
{
    world *w = world_open((world_options){.size = 2});
    static const uint32_t timeouts[] = {30000, 60, 20000};
    rc_work *works[3];
    for (int i = 0; i < 3; i++) {
        rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
        call.timeout_ms = timeouts[i];
        works[i] = submit(w->comms[0], &call);
    }
    uint64_t start = clock_ns();
    for (int i = 0; i < 3; i++)
        expect_failure(works[i], RC_TIMEOUT, "rank 1 has not called it");
    CHECK(clock_seconds(start, clock_ns()) < 10.0);
    world_close(w);
}

/* A finished work's deadline must not fail anything. */
static void deadlines_end_with_the_work(void)
{
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *a = submit(w->comms[0], &call), *b = submit(w->comms[1], &call);
    if (expect_done(a) && expect_done(b)) {
        for (int rank = 0; rank < 2; rank++) {
            engine_lock(w->comms[rank]->engine);
            comm_tick(&w->comms[rank]->member, clock_ns() + 2 * call.timeout_ms * CLOCK_MS);
            engine_unlock(w->comms[rank]->engine);
        }
        a = submit(w->comms[0], &call);
        b = submit(w->comms[1], &call);
        expect_done(a);
        expect_done(b);
    }
    world_close(w);
}

/* ---- heartbeats ---- */

static void idle_lanes_beat(void)
{
    stage s = stage_open((stage_options){.world_size = 3, .lanes = 2, .heartbeat_ms = 20});
    rc_call call = small_call(RC_BROADCAST, data[0], 0);
    expect_done(submit(s.comm, &call)); /* called, and over */
    for (int peer = 1; peer < 3; peer++)
        for (int i = 0; i < 2; i++)
            for (int beats = 0; beats < 3; beats++) {
                uint8_t payload[PEER_SEGMENT];
                frame_header h;
                if (!watch_for(s.far[peer][i], FRAME_HEARTBEAT, &h, payload))
                    break;
                CHECK(h.seq <= 1);
                CHECK_EQ(h.length, 0);
                CHECK(beats < 2 || h.seq == 1);
            }
    stage_close(&s);
}

/* Behind what the socket does not take just now, once; and whatever is held back on the link. */
static void heartbeats_leave_whatever_is_queued(void)
{
    enum { ALL = 400 * PEER_SEGMENT / 4, HELD = 20 * PEER_SEGMENT / 4 };
    static float bulk[ALL];
    uint8_t payload[PEER_SEGMENT];
    stage s = stage_open((stage_options){.peer_timeout_ms = 600000});
    rc_call call = small_call(RC_BROADCAST, bulk, ALL), held = small_call(RC_SEND, bulk, HELD);
    frame_header h = control_header(FRAME_CALL, 0);
    h.fingerprint = fingerprint_of(&call);
    held.root = 1;
    call.timeout_ms = held.timeout_ms = 3600 * 1000; /* as time is made to pass */
    play(s.far[1][0], h, NULL);
    rc_work *works[2] = {submit(s.comm, &call), submit(s.comm, &held)};
    const lane *l = s.comm->env.links[1]->lanes[0];
    for (uint64_t before = 1; before != l->out.sent_bytes; usleep(20000))
        before = l->out.sent_bytes; /* until the socket is full */
    CHECK(l->out_bytes > 0);
    for (uint64_t minute = 1; minute < 5; minute++)
        pass_time(&s, clock_ns() + minute * 61 * CLOCK_S);
    int beats = 0, segments = 0;
    while (segments < 400 && watch_frame(s.far[1][0], &h, payload)) {
        beats += h.type == FRAME_HEARTBEAT;
        segments += h.type == FRAME_DATA && !(h.flags & FRAME_P2P);
    }
    CHECK_EQ(beats, 1);
    expect_done(works[0]);
    pass_time(&s, clock_ns() + 400 * CLOCK_S); /* some of the send is still held */
    CHECK(watch_for(s.far[1][0], FRAME_HEARTBEAT, &h, payload));
    rc_comm_abort(s.comm, "the test is over");
    rc_work_free(works[1]);
    stage_close(&s);
}

static void silent_peer_is_lost(void)
{
    stage s = stage_open((stage_options){.heartbeat_ms = 20, .peer_timeout_ms = 300});
    rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
    rc_work *work = submit(s.comm, &call);
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_PEER_LOST);
    CHECK_EQ(error.rank, 1);
    CHECK(strstr(error.message, "rank 1 has given no sign of life for ") != NULL);
    CHECK(error.elapsed_s >= 0.29);
    rc_work_free(work);
    stage_close(&s);
}

static void silence_is_told_from_signs_of_life(void)
{
    enum { LIMIT_MS = 5000 };
    stage s = stage_open((stage_options){.world_size = 3, .peer_timeout_ms = LIMIT_MS});
    rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
    rc_work *work = submit(s.comm, &call);
    usleep(2000);
    play(s.far[1][0], control_header(FRAME_HEARTBEAT, 0), NULL);
    uint64_t beat = wait_until_read(&s, 1, 0, FRAME_HEADER_BYTES);
    pass_time(&s, beat + LIMIT_MS * CLOCK_MS);
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_PEER_LOST);
    CHECK_EQ(error.rank, 2);
    CHECK(strstr(error.message, "rank 2 has given no sign of life for 5.0 s") != NULL);
    rc_work_free(work);
    expect_abort(s.far[1][0], RC_PEER_LOST, 2);
    stage_close(&s);
}

/* A peer's sign of life lasts for its time, and not for longer. */
static void expect_life_until(stage *s, uint64_t last)
{
    rc_error error;
    pass_time(s, last);
    rc_comm_error(s->comm, &error);
    CHECK_EQ(error.code, RC_OK);
    pass_time(s, last + 1);
    rc_comm_error(s->comm, &error);
    CHECK_EQ(error.code, RC_PEER_LOST);
}

/* However little of a payload comes at a time. */
static void slow_peer_is_not_lost(void)
{
    enum { LENGTH = 32768, FIRST = 4000, PART = 100, LIMIT_MS = 60000 };
    stage s = stage_open((stage_options){
        .heartbeat_ms = 20, .peer_timeout_ms = LIMIT_MS, .segment_bytes = LENGTH, .tcp = 1});
    rc_call call = small_call(RC_BROADCAST, NULL, LENGTH / sizeof(float));
    uint8_t wire[FRAME_HEADER_BYTES + LENGTH] = {0};
    frame_header h = data_header(&call, 0);
    h.length = LENGTH;
    frame_encode(wire, &h, wire + FRAME_HEADER_BYTES);
    play_bytes(s.far[1][0], wire, FIRST);
    uint64_t before = wait_until_read(&s, 1, 0, FIRST), last = before;
    for (size_t at = FIRST; at < FIRST + 24 * PART && last > 0; at += PART) {
        play_bytes(s.far[1][0], wire + at, PART);
        last = wait_until_read(&s, 1, 0, at + PART);
    }
    CHECK(last > before);
    expect_life_until(&s, last + LIMIT_MS * CLOCK_MS);
    stage_close(&s);
}

/* One lane's sign of life is enough, whatever the frame. */
static void any_lane_shows_life(void)
{
    enum { LIMIT_MS = 60000 };
    for (int lane = 0; lane < 2; lane++) {
        stage s = stage_open((stage_options){.lanes = 2, .peer_timeout_ms = LIMIT_MS});
        rc_call other = small_call(RC_ALLREDUCE, data[0], 10);
        frame_header h = control_header(FRAME_CALL, 0);
        h.fingerprint = fingerprint_of(&other);
        usleep(2000);
        play(s.far[1][lane], h, NULL);
        uint64_t last = wait_until_read(&s, 1, lane, FRAME_HEADER_BYTES);
        expect_life_until(&s, last + LIMIT_MS * CLOCK_MS);
        stage_close(&s);
    }
}

static int all_lanes_beat(world *w, uint64_t beats)
{
    for (int rank = 0; rank < 3; rank++) {
        rc_lane_stats lanes[4];
        CHECK_EQ(rc_comm_lane_stats(w->comms[rank], lanes, 4), 4);
        for (int i = 0; i < 4; i++)
            if (lanes[i].received_frames < beats)
                return 0;
    }
    return 1;
}

static void idle_ranks_keep_each_other(void)
{
    world *w = world_open((world_options){
        .size = 3, .engines = 1, .lanes = 2, .heartbeat_ms = 20, .peer_timeout_ms = WORLD_LONG_MS});
    uint64_t give_up = clock_ns() + WORLD_LONG_MS * CLOCK_MS;
    while (!all_lanes_beat(w, 20) && clock_ns() < give_up)
        usleep(5000);
    CHECK(all_lanes_beat(w, 20));
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *works[3];
    for (int rank = 0; rank < 3; rank++)
        works[rank] = submit(w->comms[rank], &call);
    for (int rank = 0; rank < 3; rank++)
        expect_done(works[rank]);
    world_close(w);
}

/* A peer that has said goodbye owes no heartbeat. */
static void departed_peer_is_not_missed(void)
{
    stage s = stage_open((stage_options){0});
    play(s.far[1][0], control_header(FRAME_GOODBYE, 0), NULL);
    uint64_t left = wait_until_read(&s, 1, 0, FRAME_HEADER_BYTES);
    pass_time(&s, left + 5 * s.comm->config.peer_timeout_ms * CLOCK_MS);
    rc_error error;
    rc_comm_error(s.comm, &error);
    CHECK_EQ(error.code, RC_OK);
    stage_close(&s);
}

/* A group that is done with a large tensor does not sit on its buffers. Here time passes in leaps,
 * over each of which the peer's silence is forgiven. */
static void idle_buffers_go(void)
{
    enum { TICKS = 20, LEAP_S = 6 };
    world *w = world_open((world_options){.size = 2, .segment_bytes = 16384});
    for (int round = 0; round < 2; round++) {
        rc_work *works[2];
        for (int rank = 0; rank < 2; rank++) {
            rc_call call = small_call(RC_ALLREDUCE, data[rank], 300000);
            works[rank] = submit(w->comms[rank], &call);
        }
        expect_done(works[0]);
        expect_done(works[1]);
        rc_comm *c = w->comms[0];
        engine_lock(c->engine);
        CHECK(c->buffers.idle > 0);
        uint64_t now = clock_ns() + (uint64_t)round * TICKS * LEAP_S * CLOCK_S;
        for (uint64_t tick = 0; tick < TICKS; tick++)
            comm_tick(&c->member, now + tick * LEAP_S * CLOCK_S);
        CHECK_EQ(c->buffers.idle, 0);
        engine_unlock(c->engine);
    }
    world_close(w);
}

int main(void)
{
    static const check_test tests[] = {
        {"missing_ranks_are_named", missing_ranks_are_named},
        {"missing_partner_is_named", missing_partner_is_named},
        {"slow_network_is_told_from_missing_ranks", slow_network_is_told_from_missing_ranks},
        {"waiting_is_no_deadline", waiting_is_no_deadline},
        {"earliest_deadline_counts", earliest_deadline_counts},
        {"deadlines_end_with_the_work", deadlines_end_with_the_work},
        {"idle_lanes_beat", idle_lanes_beat},
        {"heartbeats_leave_whatever_is_queued", heartbeats_leave_whatever_is_queued},
        {"silent_peer_is_lost", silent_peer_is_lost},
        {"silence_is_told_from_signs_of_life", silence_is_told_from_signs_of_life},
        {"slow_peer_is_not_lost", slow_peer_is_not_lost},
        {"any_lane_shows_life", any_lane_shows_life},
        {"idle_ranks_keep_each_other", idle_ranks_keep_each_other},
        {"departed_peer_is_not_missed", departed_peer_is_not_missed},
        {"idle_buffers_go", idle_buffers_go},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
