/* test_comm_recover.c - lanes that are lost while their peer lives, frame by frame: what is told,
 * what goes out again, and what is waited for.
 */
#include <string.h>

#include "../../csrc/comm/inside.h"
#include "peer.h"

enum { SEGMENTS = 4, PER_SEGMENT = PEER_SEGMENT / 4, ALL = SEGMENTS * PER_SEGMENT };

static float data[ALL];

static stage open_two_lanes(void)
{
    return stage_open((stage_options){.lanes = 2, .recovers = 1});
}

/* ---- what this rank sends ---- */

/* Frames that came at the far ends, by lane: how many, and the segments of the data frames. */
typedef struct seen {
    int count[2], data[2], before_data[2];
    uint32_t segment[2][SEGMENTS];
} seen;

static void see_frame(const stage *s, int lane, seen *what, const float *expected)
{
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    if (!watch_frame(s->far[1][lane], &h, payload))
        return;
    what->count[lane]++;
    if (h.type != FRAME_DATA)
        return;
    if (what->data[lane] == 0)
        what->before_data[lane] = what->count[lane] - 1;
    what->segment[lane][what->data[lane]++] = h.segment;
    CHECK(memcmp(payload, expected + (size_t)h.segment * PER_SEGMENT, h.length) == 0);
}

/* Sees all segments of a broadcast. */
static void see_all(const stage *s, seen *what, const float *expected)
{
    while (what->data[0] + what->data[1] < SEGMENTS) {
        int lane = readable(s->far[1][0], 1) ? 0 : 1;
        if (lane == 1 && !readable(s->far[1][1], 1))
            continue;
        see_frame(s, lane, what, expected);
    }
}

/* Nothing comes but what may come at any time. */
static void expect_heartbeats(int fd)
{
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    while (readable(fd, 20) && watch_frame(fd, &h, payload))
        CHECK_EQ(h.type, FRAME_HEARTBEAT);
}

static rc_work *broadcast_all(stage *s)
{
    rc_call call = small_call(RC_BROADCAST, data, ALL);
    frame_header h = control_header(FRAME_CALL, 0);
    h.fingerprint = fingerprint_of(&call);
    play(s->far[1][0], h, NULL); /* so that all of it may leave */
    wait_until_read(s, 1, 0, FRAME_HEADER_BYTES);
    for (int i = 0; i < ALL; i++)
        data[i] = (float)i;
    return submit(s->comm, &call);
}

static void play_down(int fd, uint32_t lane, uint32_t count)
{
    frame_header h = control_header(FRAME_LANE_DOWN, 0);
    h.chunk = lane;
    h.step = 1; /* its first connection */
    h.segment = count;
    play(fd, h, NULL);
}

/* All but the first frame of the lane that dies, from memory that the caller has used again. */
static void what_did_not_come_goes_out_again(void)
{
    static float sent[ALL];
    seen first = {0};
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    stage s = open_two_lanes();
    expect_done(broadcast_all(&s));
    memcpy(sent, data, sizeof sent);
    memset(data, 0xee, sizeof data);
    see_all(&s, &first, sent);
    int dies = first.data[0] > first.data[1] ? 0 : 1, lives = !dies;
    close(s.far[1][dies]);
    s.far[1][dies] = -1;
    watch_for(s.far[1][lives], FRAME_LANE_DOWN, &h, payload);
    CHECK_EQ(h.chunk, dies);
    CHECK_EQ(h.segment, dies == 0 ? 1 : 0); /* the call came by lane 0 */
    play_down(s.far[1][lives], (uint32_t)dies, (uint32_t)first.before_data[dies] + 1);
    for (int i = 1; i < first.data[dies]; i++) {
        watch_for(s.far[1][lives], FRAME_DATA, &h, payload);
        CHECK_EQ(h.segment, first.segment[dies][i]);
        CHECK(memcmp(payload, sent + (size_t)h.segment * PER_SEGMENT, h.length) == 0);
    }
    expect_heartbeats(s.far[1][lives]);
    stage_close(&s);
}

/* Segments that are sent from the caller's memory, which has it back before they have come. */
static void the_caller_may_use_its_memory_again(void)
{
    enum { SEGMENT = 64 << 10, COUNT = 3 * SEGMENT / sizeof(float) };
    static float sent[COUNT], got[COUNT];
    uint64_t wrong = 0;
    world *w = world_open((world_options){
        .size = 2, .engines = 1, .lanes = 2, .tcp = 1, .recovers = 1, .segment_bytes = SEGMENT});
    rc_call send = small_call(RC_BROADCAST, sent, COUNT),
            receive = small_call(RC_BROADCAST, got, COUNT);
    for (int i = 0; i < COUNT; i++)
        sent[i] = (float)i;
    engine_lock(w->engines[1]); /* it reads nothing */
    expect_done(submit(w->comms[0], &send));
    memset(sent, 0xee, sizeof sent);
    CHECK(comm_give_up_lane(w->comms[1], w->comms[1]->env.links[0]->lanes[0]));
    engine_unlock(w->engines[1]);
    expect_done(submit(w->comms[1], &receive));
    for (int i = 0; i < COUNT; i++)
        wrong += got[i] != (float)i;
    CHECK_EQ(wrong, 0);
    world_close(w);
}

/* Of the far end's word alone: the lane here seems well. */
static void the_peer_may_see_it_first(void)
{
    seen first = {0};
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    stage s = open_two_lanes();
    expect_done(broadcast_all(&s));
    see_all(&s, &first, data);
    play_down(s.far[1][1], 0, (uint32_t)first.count[0]);
    watch_for(s.far[1][1], FRAME_LANE_DOWN, &h, payload);
    CHECK_EQ(h.chunk, 0);
    CHECK_EQ(h.segment, 1);
    expect_heartbeats(s.far[1][1]); /* all had come */
    CHECK(!watch_frame(s.far[1][0], &h, payload));
    play_down(s.far[1][1], 0, (uint32_t)first.count[0]); /* again: that changes nothing */
    expect_heartbeats(s.far[1][1]);
    stage_close(&s);
}

/* ---- what this rank receives ---- */

/* A frame of which a part came by the dead lane, or whose payload came damaged there. */
static void a_frame_that_did_not_come_whole_comes_again(void)
{
    for (int damaged = 0; damaged < 2; damaged++) {
        static float got[PER_SEGMENT], theirs[PER_SEGMENT];
        uint8_t wire[FRAME_HEADER_BYTES + PEER_SEGMENT], payload[PEER_SEGMENT];
        stage s = open_two_lanes();
        rc_call call = small_call(RC_RECV, got, PER_SEGMENT);
        call.root = 1;
        rc_work *work = submit(s.comm, &call);
        frame_header h = data_header(&call, 0), told;
        h.length = PEER_SEGMENT;
        for (int i = 0; i < PER_SEGMENT; i++)
            theirs[i] = (float)(i + 1);
        frame_encode(wire, &h, theirs);
        memcpy(wire + FRAME_HEADER_BYTES, theirs, sizeof theirs);
        wire[FRAME_HEADER_BYTES + 5] ^= 8;
        play_bytes(s.far[1][0], wire, sizeof wire - !damaged);
        if (!damaged) {
            wait_until_read(&s, 1, 0, sizeof wire - 1);
            close(s.far[1][0]);
            s.far[1][0] = -1;
        }
        watch_for(s.far[1][1], FRAME_LANE_DOWN, &told, payload);
        CHECK_EQ(told.segment, 0);
        play_down(s.far[1][1], 0, 0);
        play(s.far[1][1], h, theirs);
        expect_done(work);
        CHECK(memcmp(got, theirs, sizeof got) == 0);
        stage_close(&s);
    }
}

/* As where the caller writes to its tensor while it is sent. */
static void a_frame_that_is_damaged_again_is_an_error(void)
{
    static float got[PER_SEGMENT], theirs[PER_SEGMENT];
    uint8_t wire[FRAME_HEADER_BYTES + PEER_SEGMENT], payload[PEER_SEGMENT];
    stage s = open_two_lanes();
    rc_call call = small_call(RC_RECV, got, PER_SEGMENT);
    call.root = 1;
    rc_work *work = submit(s.comm, &call);
    frame_header h = data_header(&call, 0), told;
    h.length = PEER_SEGMENT;
    frame_encode(wire, &h, theirs);
    memcpy(wire + FRAME_HEADER_BYTES, theirs, sizeof theirs);
    wire[FRAME_HEADER_BYTES + 5] ^= 8;
    play_bytes(s.far[1][0], wire, sizeof wire);
    watch_for(s.far[1][1], FRAME_LANE_DOWN, &told, payload);
    play_bytes(s.far[1][1], wire, sizeof wire);
    expect_failure(work, RC_PROTOCOL, "on lane 1 of rail 0 from rank 1 to rank 0");
    stage_close(&s);
}

static void wait_for_losses(const stage *s, int count, rc_lost_lane lost[2])
{
    uint64_t give_up = clock_ns() + WORLD_LONG_MS * CLOCK_MS;
    while (rc_comm_lost_lanes(s->comm, lost, 2) != count && clock_ns() < give_up)
        usleep(200);
    CHECK_EQ(rc_comm_lost_lanes(s->comm, lost, 2), count);
}

static void lose_lane(stage *s, int lane, int lost_then)
{
    rc_lost_lane lost[2];
    close(s->far[1][lane]);
    s->far[1][lane] = -1;
    wait_for_losses(s, lost_then, lost);
}

/* But not while a lane is open. */
static void a_peer_that_has_ended_is_lost(void)
{
    stage s = open_two_lanes();
    rc_call call = small_call(RC_ALLREDUCE, data, 1);
    rc_work *work = submit(s.comm, &call);
    rc_error error;
    lose_lane(&s, 1, 1);
    CHECK_EQ(rc_comm_lose_peer(s.comm, 1), RC_INVALID_STATE);
    lose_lane(&s, 0, 2);
    CHECK_EQ(rc_work_wait(work, 0), RC_AGAIN);
    CHECK_EQ(rc_comm_lose_peer(s.comm, 1), RC_OK);
    CHECK_EQ(outcome(work, &error), RC_PEER_LOST);
    CHECK_EQ(strncmp(error.message, "rank 1 is lost: rail 0 ", 23), 0);
    CHECK_EQ(error.lane, 0);
    CHECK_EQ(rc_comm_lose_peer(s.comm, 0), RC_INVALID_ARGUMENT);
    rc_work_free(work);
    stage_close(&s);
}

/* It may have lost a lane, and cannot tell. */
static void lanes_of_a_silent_peer_may_be_lost(void)
{
    stage s = stage_open((stage_options){.lanes = 2, .recovers = 1, .heartbeat_ms = 20});
    rc_lost_lane lost[2];
    wait_for_losses(&s, 2, lost);
    for (int lane = 0; lane < 2; lane++)
        CHECK(lost[lane].is_silent && lost[lane].peer == 1 && lost[lane].lane == lane);
    stage_close(&s);
}

static void nonsense_is_refused(void)
{
    for (int kind = 0; kind < 4; kind++) {
        stage s = open_two_lanes();
        rc_call call = small_call(RC_ALLREDUCE, data, 1);
        rc_work *work = submit(s.comm, &call);
        frame_header h = control_header(FRAME_HEARTBEAT, 0);
        h.segment = 100;
        if (kind == 3)
            play(s.far[1][1], h, NULL); /* so many frames did not go there */
        else
            play_down(s.far[1][1], (uint32_t)kind, kind == 0 ? 100 : 0); /* 1: its own lane */
        expect_failure(work, RC_PROTOCOL, "rank 1");
        stage_close(&s);
    }
}

/* ---- what is waited for ---- */

/* Returns the next heartbeat that asks. */
static void watch_for_question(int fd)
{
    uint8_t payload[PEER_SEGMENT];
    frame_header h = {0};
    while (!(h.flags & FRAME_ASKS) && watch_for(fd, FRAME_HEARTBEAT, &h, payload))
        continue;
}

static void who_leaves_waits_for_word(void)
{
    for (int answers = 0; answers < 2; answers++) {
        seen all = {0};
        uint8_t payload[PEER_SEGMENT];
        frame_header h;
        stage s = open_two_lanes();
        expect_done(broadcast_all(&s));
        see_all(&s, &all, data);
        CHECK_EQ(rc_comm_leave(s.comm, 1), RC_AGAIN);
        for (int lane = 0; lane < 2; lane++) {
            watch_for_question(s.far[1][lane]);
            CHECK(!readable(s.far[1][lane], 10)); /* no goodbye behind it */
            h = control_header(FRAME_HEARTBEAT, 1);
            h.segment = (uint32_t)all.count[lane] + 1;
            if (answers)
                play(s.far[1][lane], h, NULL);
        }
        if (!answers)
            rc_comm_close(s.comm, 0);
        while (!readable(s.far[1][0], 0) || !readable(s.far[1][1], 0))
            CHECK_EQ(rc_comm_leave(s.comm, 1), RC_AGAIN);
        for (int lane = 0; lane < 2; lane++) {
            watch_for(s.far[1][lane], FRAME_GOODBYE, &h, payload);
            CHECK_EQ(h.segment, !answers);
        }
        stage_close(&s);
    }
}

/* Its goodbye says that some of it may not have come, and a lane by which it may have is lost,
 * before or after. */
static void who_leaves_too_early_is_lost(void)
{
    for (int after = 0; after < 2; after++) {
        stage s = open_two_lanes();
        rc_call call = small_call(RC_ALLREDUCE, data, 1);
        rc_work *work = submit(s.comm, &call);
        frame_header h = control_header(FRAME_GOODBYE, 0);
        h.segment = 1;
        h.seq = 1; /* it has called this one */
        if (!after)
            play_down(s.far[1][1], 0, 0);
        play(s.far[1][1], h, NULL);
        if (after)
            wait_until_read(&s, 1, 1, FRAME_HEADER_BYTES);
        hang_up(&s, 1);
        expect_failure(work, RC_PEER_LOST,
                       after ? "rail 0 between rank 0 and rank 1 broke"
                             : "shut down before all that it had sent came");
        stage_close(&s);
    }
}

/* ---- a lane that is made anew ---- */

/* Gives the rank under test a new socket for lane 0, of which the far end says that it got so many
 * frames of the last one. */
static rc_result renew(stage *s, uint32_t received, rc_lane_mark *ours)
{
    int pair[2];
    CHECK_EQ(rc_comm_drop_lane(s->comm, 1, 0, ours), RC_OK);
    rc_lane_mark theirs = {.made = ours->made, .received = received};
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    if (s->far[1][0] >= 0)
        close(s->far[1][0]);
    s->far[1][0] = pair[1];
    return rc_comm_renew_lane(s->comm, 1, 0, pair[0], ours, &theirs);
}

/* The only one, so nobody could be told of its loss, nor what had come. */
static void a_lane_comes_back(void)
{
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    rc_lane_mark mark;
    stage s = stage_open((stage_options){.recovers = 1});
    rc_work *work = broadcast_all(&s);
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        watch_for(s.far[1][0], FRAME_DATA, &h, payload);
        CHECK_EQ(h.segment, i);
    }
    expect_done(work);
    close(s.far[1][0]);
    s.far[1][0] = -1;
    CHECK_EQ(renew(&s, 1, &mark), RC_OK);
    CHECK_EQ(mark.made, 1);
    CHECK_EQ(mark.received, 1);
    for (uint32_t i = 1; i < SEGMENTS; i++) {
        watch_for(s.far[1][0], FRAME_DATA, &h, payload);
        CHECK_EQ(h.segment, i);
        CHECK(memcmp(payload, data + (size_t)i * PER_SEGMENT, h.length) == 0);
    }
    CHECK_EQ(renew(&s, 4, &mark), RC_OK); /* these, and its call; also one that seems well */
    CHECK_EQ(mark.made, 2);
    CHECK_EQ(mark.received, 0);
    CHECK_EQ(mark.before, 1);
    CHECK_EQ(mark.previous, 1);
    CHECK(watch_for(s.far[1][0], FRAME_HEARTBEAT, &h, payload)); /* again, what the last one told */
    expect_heartbeats(s.far[1][0]);
    stage_close(&s);
}

/* The peer may never take it over, and would wait for one that is gone. */
static void a_goodbye_waits_until_the_new_lane_brings_something(void)
{
    uint8_t payload[PEER_SEGMENT];
    frame_header h = control_header(FRAME_HEARTBEAT, 0);
    rc_lane_mark mark;
    stage s = stage_open((stage_options){.recovers = 1});
    CHECK_EQ(renew(&s, 0, &mark), RC_OK);
    CHECK_EQ(rc_comm_leave(s.comm, 20), RC_AGAIN);
    expect_heartbeats(s.far[1][0]);
    play(s.far[1][0], h, NULL);
    wait_until_read(&s, 1, 0, FRAME_HEADER_BYTES);
    CHECK_EQ(rc_comm_leave(s.comm, 20), RC_AGAIN); /* until the goodbye is read here */
    CHECK(watch_for(s.far[1][0], FRAME_GOODBYE, &h, payload));
    stage_close(&s);
}

static void a_mark_counts_no_more_than_was_sent(void)
{
    rc_lane_mark mark;
    stage s = open_two_lanes();
    rc_call call = small_call(RC_ALLREDUCE, data, 1);
    rc_work *work = submit(s.comm, &call);
    CHECK_EQ(renew(&s, 100, &mark), RC_PROTOCOL);
    expect_failure(work, RC_PROTOCOL, "rank 1 says that frames came which were not sent");
    stage_close(&s);
}

static void only_the_last_mark_is_good(void)
{
    rc_lane_mark first, last, theirs = {.made = 1};
    stage s = stage_open((stage_options){.lanes = 2, .recovers = 1});
    CHECK_EQ(rc_comm_drop_lane(s.comm, 1, 0, &first), RC_OK);
    CHECK_EQ(rc_comm_drop_lane(s.comm, 1, 0, &last), RC_OK);
    CHECK_EQ(rc_comm_renew_lane(s.comm, 1, 0, dup(0), &first, &theirs), RC_INVALID_STATE);
    CHECK_EQ(rc_comm_renew_lane(s.comm, 1, 1, dup(0), &last, &theirs), RC_INVALID_STATE);
    CHECK_EQ(rc_comm_renew_lane(s.comm, 1, 2, dup(0), &last, &theirs), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_renew_lane(s.comm, 0, 0, dup(0), &last, &theirs), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_comm_drop_lane(s.comm, 1, -1, &last), RC_INVALID_ARGUMENT);
    stage_close(&s);
    s = stage_open((stage_options){.lanes = 2});
    CHECK_EQ(rc_comm_drop_lane(s.comm, 1, 0, &first), RC_INVALID_STATE);
    stage_close(&s);
}

static void a_question_is_answered(void)
{
    uint8_t payload[PEER_SEGMENT];
    stage s = open_two_lanes();
    frame_header h = control_header(FRAME_HEARTBEAT, 0);
    play(s.far[1][1], h, NULL);
    h.flags = FRAME_ASKS;
    play(s.far[1][1], h, NULL);
    watch_for(s.far[1][1], FRAME_HEARTBEAT, &h, payload);
    CHECK_EQ(h.segment, 2);
    CHECK_EQ(h.flags, 0);
    stage_close(&s);
}

int main(void)
{
    static const check_test tests[] = {
        {"what_did_not_come_goes_out_again", what_did_not_come_goes_out_again},
        {"the_caller_may_use_its_memory_again", the_caller_may_use_its_memory_again},
        {"the_peer_may_see_it_first", the_peer_may_see_it_first},
        {"a_frame_that_did_not_come_whole_comes_again",
         a_frame_that_did_not_come_whole_comes_again},
        {"a_frame_that_is_damaged_again_is_an_error", a_frame_that_is_damaged_again_is_an_error},
        {"a_peer_that_has_ended_is_lost", a_peer_that_has_ended_is_lost},
        {"lanes_of_a_silent_peer_may_be_lost", lanes_of_a_silent_peer_may_be_lost},
        {"nonsense_is_refused", nonsense_is_refused},
        {"who_leaves_waits_for_word", who_leaves_waits_for_word},
        {"who_leaves_too_early_is_lost", who_leaves_too_early_is_lost},
        {"a_lane_comes_back", a_lane_comes_back},
        {"a_goodbye_waits_until_the_new_lane_brings_something",
         a_goodbye_waits_until_the_new_lane_brings_something},
        {"a_mark_counts_no_more_than_was_sent", a_mark_counts_no_more_than_was_sent},
        {"only_the_last_mark_is_good", only_the_last_mark_is_good},
        {"a_question_is_answered", a_question_is_answered},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
