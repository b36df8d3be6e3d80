/* test_comm_lanes.c - heartbeats, and what silence, stalled bytes and lost ports say of peers and
 * of single lanes. Times are some tens of milliseconds and bounded from below alone, or pass at the
 * test's word (peer.h, hear and look), where a thread that is held up would be taken for a silent
 * peer.
 */
#include <linux/filter.h>
#include <sys/epoll.h>

#include "../../csrc/base/clock.h"
#include "peer.h"

static float data[4][300000];

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
    for (int full = 0; !full; usleep(1000)) {
        engine_lock(s.engine);
        full =
            l->out_bytes > 0 && (l->source.events & EPOLLOUT) != 0; /* the socket takes no more */
        engine_unlock(s.engine);
    }
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
    static const char silence[] = "rank 2 has given no sign of life for ";
    const char *told = strstr(error.message, silence);
    CHECK(told != NULL && strtod(told + sizeof silence - 1, NULL) >= LIMIT_MS / 1e3);
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

/* ---- a lane beside others ---- */

/* Of the second lane: the error itself, and what rank 1 is told. */
static void expect_dark(const stage *s, const rc_error *error)
{
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    CHECK_EQ(error->code, RC_PEER_LOST);
    CHECK_EQ(error->rank, 1);
    CHECK_EQ(error->rail, 1);
    CHECK_EQ(error->lane, 1);
    expect_text(error, "rail 1 between rank 0 (eth1 10.1.0.0 on a) and rank 1 (eth1 10.1.0.1 on "
                       "b) is dark: ");
    if (watch_for(s->far[1][0], FRAME_ABORT, &h, payload)) {
        CHECK_EQ(h.chunk, 2);
        CHECK_EQ(h.segment, 1);
    }
}

/* With one lane, that is all that is known of the peer. */
static void half_payload_on_the_only_lane(void)
{
    stage s = stage_open((stage_options){.heartbeat_ms = 20, .peer_timeout_ms = 300});
    rc_call call = small_call(RC_BROADCAST, data[0], 1000);
    call.root = 1;
    uint8_t wire[FRAME_HEADER_BYTES + 4000] = {0};
    frame_header h = data_header(&call, 0);
    h.length = 4000;
    frame_encode(wire, &h, wire + FRAME_HEADER_BYTES);
    rc_work *work = submit(s.comm, &call);
    play_bytes(s.far[1][0], wire, FRAME_HEADER_BYTES + 100);
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_PEER_LOST);
    CHECK_EQ(error.rank, 1);
    CHECK_EQ(error.lane, -1);
    expect_text(&error, "no sign of life for ");
    expect_text(&error, "in the midst of a frame (100 of 4000 bytes)");
    rc_work_free(work);
    stage_close(&s);
}

/* ---- whose time it is ---- */

/* Something came on this lane then. */
static void hear_from(stage *s, int peer, int lane, uint64_t at)
{
    engine_lock(s->engine);
    s->comm->env.links[peer]->lanes[lane]->last_rx = at;
    engine_unlock(s->engine);
}

static void hear(stage *s, int lane, uint64_t at)
{
    hear_from(s, 1, lane, at);
}

/* Heartbeats of a second, and 10 s: by the times that the test gives, and no others. */
static stage timeless_stage(stage_options o, uint64_t *start)
{
    o.lanes = 2;
    o.rails = 1;
    stage s = stage_open(o);
    engine_lock(s.engine);
    s.comm->config.heartbeat_ms = 1000;
    s.comm->config.peer_timeout_ms = 10000;
    s.comm->member.due = ENGINE_NEVER; /* by the engine's own time */
    engine_unlock(s.engine);
    *start = clock_ns();
    for (int peer = 1; peer < s.world_size; peer++)
        for (int i = 0; i < 2; i++)
            hear_from(&s, peer, i, *start);
    CHECK(look(&s, *start));
    return s;
}

/* Signs of life on the first lane, twice a second, from one time to another; 1 if all is well. */
static int live(stage *s, uint64_t from, uint64_t to)
{
    int well = 1;
    for (uint64_t now = from; now <= to && well; now += CLOCK_S / 2) {
        hear(s, 0, now);
        well = look(s, now);
    }
    return well;
}

static void dark_lane_is_lost(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){0}, &start);
    rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
    rc_work *work = submit(s.comm, &call);
    CHECK(live(&s, start + CLOCK_S / 2, start + 10 * CLOCK_S));
    CHECK(!live(&s, start + 10 * CLOCK_S + CLOCK_S / 2, start + 11 * CLOCK_S));
    rc_error error;
    outcome(work, &error);
    expect_dark(&s, &error);
    expect_text(&error, "nothing came from rank 1 for ");
    rc_work_free(work);
    stage_close(&s);
}

/* However soon a peer is lost: TCP may need as long for packets that are lost. */
static void dark_lane_has_a_second_and_a_half(void)
{
    enum { LIMIT_MS = 300, STEP_MS = 100 };
    uint64_t start, now;
    stage s = timeless_stage((stage_options){0}, &start);
    engine_lock(s.engine);
    s.comm->config.peer_timeout_ms = LIMIT_MS;
    engine_unlock(s.engine);
    int well = 1;
    for (now = start; well && now < start + 3 * CLOCK_S; now += STEP_MS * CLOCK_MS) {
        hear(&s, 0, now);
        well = look(&s, now);
    }
    CHECK(!well);
    CHECK(now > start + 1500 * CLOCK_MS);
    stage_close(&s);
}

/* The rest of the frame never comes, nor anything else on that lane. */
static void half_payload_is_the_lanes_error(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){0}, &start);
    rc_call call = small_call(RC_ALLREDUCE, data[0], 1000);
    uint8_t wire[FRAME_HEADER_BYTES + 2000] = {0};
    frame_header h = data_header(&call, 0);
    h.length = 2000;
    frame_encode(wire, &h, wire + FRAME_HEADER_BYTES);
    play_bytes(s.far[1][1], wire, FRAME_HEADER_BYTES + 100); /* early: not called yet */
    wait_until_read(&s, 1, 1, FRAME_HEADER_BYTES + 100);
    hear(&s, 1, start);
    CHECK(!live(&s, start + CLOCK_S / 2, start + 12 * CLOCK_S));
    rc_error error;
    rc_comm_error(s.comm, &error);
    expect_dark(&s, &error);
    expect_text(&error, "in the midst of a frame (100 of 2000 bytes)");
    stage_close(&s);
}

/* Two peers' lanes over one port: it is the port if both are dark, and the pair if one is. */
static void dark_port_is_told_from_a_dark_pair(void)
{
    for (int whole = 0; whole < 2; whole++) {
        uint64_t start;
        stage s = timeless_stage((stage_options){.world_size = 3}, &start);
        int well = 1;
        for (uint64_t now = start; now < start + 12 * CLOCK_S && well; now += CLOCK_S / 2) {
            hear(&s, 0, now);
            hear_from(&s, 2, 0, now);
            if (!whole)
                hear_from(&s, 2, 1, now);
            well = look(&s, now);
        }
        rc_error error;
        rc_comm_error(s.comm, &error);
        CHECK_EQ(error.code, RC_PEER_LOST);
        CHECK_EQ(error.rail, 1);
        CHECK_EQ(error.rank, whole ? 0 : 1);
        expect_text(&error, whole ? "So are the lanes of this port to all other ranks"
                                  : "Look at both ports' cables");
        stage_close(&s);
    }
}

static void any_byte_is_a_sign_of_the_lane(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){0}, &start);
    for (uint64_t now = start; now < start + 60 * CLOCK_S; now += 9 * CLOCK_S) {
        CHECK(live(&s, now + CLOCK_S / 2, now + 9 * CLOCK_S));
        hear(&s, 1, now + 9 * CLOCK_S);
    }
    stage_close(&s);
}

/* It shows on one lane first that it goes on; and a lane that is dark as well is found, later. */
static void stopped_peer_is_not_a_dark_lane(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){0}, &start);
    for (uint64_t now = start; now <= start + 9 * CLOCK_S; now += CLOCK_S / 2)
        CHECK(look(&s, now)); /* nothing on either lane */
    uint64_t back = start + 9 * CLOCK_S + CLOCK_S / 2;
    CHECK(live(&s, back, back + 7 * CLOCK_S));
    CHECK(!live(&s, back + 7 * CLOCK_S + CLOCK_S / 2, back + 10 * CLOCK_S));
    rc_error error;
    rc_comm_error(s.comm, &error);
    expect_dark(&s, &error);
    stage_close(&s);
}

/* Right after a pause a lane may have been silent for as long as it may, for no fault of its own:
 * its peer's other words come a moment later. */
static void pause_leaves_a_lane_a_moment(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){0}, &start);
    CHECK(live(&s, start + CLOCK_S / 2, start + 9 * CLOCK_S));
    uint64_t back = start + 14 * CLOCK_S;
    for (uint64_t now = start + 9 * CLOCK_S; now < back; now += CLOCK_S / 2)
        CHECK(look(&s, now));
    CHECK(live(&s, back, back + CLOCK_S / 2));
    hear(&s, 1, back + CLOCK_S / 2);
    CHECK(live(&s, back + CLOCK_S, back + 9 * CLOCK_S));
    stage_close(&s);
}

/* Of this process. */
static void own_pause_is_no_silence(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){0}, &start);
    CHECK(live(&s, start + CLOCK_S / 2, start + 9 * CLOCK_S));
    uint64_t back = start + 30 * CLOCK_S;
    CHECK(look(&s, back));
    CHECK(live(&s, back + CLOCK_S / 2, back + 9 * CLOCK_S));
    stage_close(&s);
}

/* Lanes may fall silent one after the other when the peer leaves. */
static void lane_with_a_goodbye_owes_nothing(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){0}, &start);
    play(s.far[1][1], control_header(FRAME_GOODBYE, 0), NULL);
    wait_until_read(&s, 1, 1, FRAME_HEADER_BYTES);
    hear(&s, 1, start);
    CHECK(live(&s, start + CLOCK_S / 2, start + 30 * CLOCK_S));
    stage_close(&s);
}

/* ---- one way ---- */

static int is_in_flight(const stage *s, int index)
{
    int in_flight;
    engine_lock(s->engine);
    lane_acked(lane_of(s, index), &in_flight);
    engine_unlock(s->engine);
    return in_flight;
}

static int waits_for_room(const stage *s, int index)
{
    int in_flight = is_in_flight(s, index);
    engine_lock(s->engine);
    int waits = !in_flight && lane_unacked(lane_of(s, index)) > 0;
    engine_unlock(s->engine);
    return waits;
}

/* Signs of life on both lanes. Acknowledgements take their own time: they are waited for on the
 * first. */
static int live_on_both(stage *s, uint64_t from, uint64_t to)
{
    int well = 1;
    for (uint64_t now = from; now <= to && well; now += CLOCK_S / 2) {
        hear(s, 1, now);
        well = live(s, now, now);
        uint64_t give_up = clock_ns() + WORLD_LONG_MS * CLOCK_MS;
        while (is_in_flight(s, 0) && clock_ns() < give_up)
            usleep(1000);
    }
    return well;
}

/* From now on the far end gets nothing that is sent to it, nor acknowledges any. */
static void lose_packets(int fd)
{
    struct sock_filter code[] = {{.code = BPF_RET | BPF_K, .k = 0}};
    struct sock_fprog drop = {.len = 1, .filter = code};
    CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &drop, sizeof drop), 0);
}

static void lane_that_carries_one_way_is_lost(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){.tcp = 1}, &start);
    lose_packets(s.far[1][1]);
    CHECK(live_on_both(&s, start + CLOCK_S / 2, start + 10 * CLOCK_S));
    CHECK(!live_on_both(&s, start + 10 * CLOCK_S + CLOCK_S / 2, start + 13 * CLOCK_S));
    rc_error error;
    rc_comm_error(s.comm, &error);
    expect_dark(&s, &error);
    expect_text(&error, " B on their way there was acknowledged for 10.");
    stage_close(&s);
}

/* What a process has no room for is not on its way: nothing says that the lane is dark. */
static void lane_that_is_not_read_is_not_dark(void)
{
    uint64_t start;
    stage s = timeless_stage((stage_options){.tcp = 1}, &start);
    rc_call call = small_call(RC_BROADCAST, data[0], 300000);
    frame_header h = control_header(FRAME_CALL, 0);
    h.fingerprint = fingerprint_of(&call);
    play(s.far[1][0], h, NULL);
    wait_until_read(&s, 1, 0, FRAME_HEADER_BYTES);
    rc_work *work = submit(s.comm, &call);
    uint64_t give_up = clock_ns() + WORLD_LONG_MS * CLOCK_MS;
    while (!waits_for_room(&s, 1) && clock_ns() < give_up)
        usleep(1000);
    CHECK(waits_for_room(&s, 1));
    hear(&s, 0, start);
    CHECK(live_on_both(&s, start + CLOCK_S / 2, start + 25 * CLOCK_S)); /* its deadline: 30 s */
    CHECK_EQ(rc_work_wait(work, 0), RC_AGAIN);
    rc_comm_abort(s.comm, "enough");
    rc_work_free(work);
    stage_close(&s);
}

/* ---- what is said ---- */

static void timeout_tells_what_is_unacknowledged(void)
{
    stage s = stage_open((stage_options){.lanes = 2, .rails = 1});
    rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
    call.timeout_ms = 60;
    frame_header h = control_header(FRAME_CALL, 0);
    h.fingerprint = fingerprint_of(&call);
    play(s.far[1][0], h, NULL);
    wait_until_read(&s, 1, 0, FRAME_HEADER_BYTES);
    rc_work *work = submit(s.comm, &call);
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_TIMEOUT);
    expect_text(&error, "the network is slower than that allows; rail ");
    expect_text(&error, " B unacknowledged, 0 B acknowledged in the last ");
    rc_work_free(work);
    stage_close(&s);
}

static void told_lane_is_known(void)
{
    static const uint32_t segments[] = {1, LINK_MAX_LANES};
    for (int bad = 0; bad < 2; bad++) {
        stage s = stage_open((stage_options){0});
        rc_error theirs = {.code = RC_PEER_LOST, .message = "rail 2 is dark"};
        uint8_t payload[FRAME_TEXT_BYTES];
        frame_header h = control_header(FRAME_ABORT, 0);
        h.length = frame_abort_encode(payload, &theirs, 1);
        h.chunk = 3;
        h.segment = segments[bad];
        rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
        rc_work *work = submit(s.comm, &call);
        play(s.far[1][0], h, payload);
        rc_error error;
        CHECK_EQ(outcome(work, &error), RC_PEER_LOST);
        CHECK_EQ(error.rank, bad ? 0 : 1); /* of a lane's ends each names the other */
        CHECK_EQ(error.rail, bad ? -1 : 2);
        CHECK_EQ(error.lane, bad ? -1 : 1);
        rc_work_free(work);
        stage_close(&s);
    }
}

int main(void)
{
    static const check_test tests[] = {
        {"idle_lanes_beat", idle_lanes_beat},
        {"heartbeats_leave_whatever_is_queued", heartbeats_leave_whatever_is_queued},
        {"silent_peer_is_lost", silent_peer_is_lost},
        {"silence_is_told_from_signs_of_life", silence_is_told_from_signs_of_life},
        {"slow_peer_is_not_lost", slow_peer_is_not_lost},
        {"any_lane_shows_life", any_lane_shows_life},
        {"idle_ranks_keep_each_other", idle_ranks_keep_each_other},
        {"departed_peer_is_not_missed", departed_peer_is_not_missed},
        {"dark_lane_is_lost", dark_lane_is_lost},
        {"half_payload_is_the_lanes_error", half_payload_is_the_lanes_error},
        {"half_payload_on_the_only_lane", half_payload_on_the_only_lane},
        {"lane_that_carries_one_way_is_lost", lane_that_carries_one_way_is_lost},
        {"lane_that_is_not_read_is_not_dark", lane_that_is_not_read_is_not_dark},
        {"dark_lane_has_a_second_and_a_half", dark_lane_has_a_second_and_a_half},
        {"dark_port_is_told_from_a_dark_pair", dark_port_is_told_from_a_dark_pair},
        {"any_byte_is_a_sign_of_the_lane", any_byte_is_a_sign_of_the_lane},
        {"stopped_peer_is_not_a_dark_lane", stopped_peer_is_not_a_dark_lane},
        {"pause_leaves_a_lane_a_moment", pause_leaves_a_lane_a_moment},
        {"own_pause_is_no_silence", own_pause_is_no_silence},
        {"lane_with_a_goodbye_owes_nothing", lane_with_a_goodbye_owes_nothing},
        {"timeout_tells_what_is_unacknowledged", timeout_tells_what_is_unacknowledged},
        {"told_lane_is_known", told_lane_is_known},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
