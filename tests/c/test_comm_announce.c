/* test_comm_announce.c - what peers are told of calls here: a receive once, when the peer needs to
 * know of it; again after it could not be sent; and nothing of what is over. */
#include "peer.h"

enum { BULK = 10 * PEER_SEGMENT / 4 };

static float data[BULK];

static rc_work *receive(const stage *s, uint32_t tag, uint64_t count)
{
    rc_call call = small_call(RC_RECV, data, count);
    call.root = 1;
    call.tag = tag;
    return submit(s->comm, &call);
}

static frame_header send_header(uint32_t tag, uint32_t number)
{
    rc_call call = small_call(RC_RECV, data, PEER_SEGMENT / 4);
    frame_header h = data_header(&call, tags_name(tag, number));
    h.length = PEER_SEGMENT;
    return h;
}

enum { ROOM = 20 };

/* Waits until the peer has got as many calls of receives as are due, and a while for more. Returns
 * how many came; names has the last name of each, in order. */
static int calls_told(const stage *s, uint64_t *names, int due)
{
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    int count = 0;
    while (readable(s->far[1][0], count < due ? WORLD_LONG_MS : 50) &&
           watch_frame(s->far[1][0], &h, payload))
        if (h.type == FRAME_CALL && (h.flags & FRAME_P2P) && count < ROOM)
            names[count++] = h.seq;
    return count;
}

static void wait_for_frames(const stage *s, uint64_t frames)
{
    rc_lane_stats lane = {0};
    for (; lane.received_frames < frames; usleep(200))
        rc_comm_lane_stats(s->comm, &lane, 1);
}

static void abandon(stage *s, rc_work **works, int count)
{
    rc_comm_abort(s->comm, "the test is over");
    for (int i = 0; i < count; i++)
        rc_work_free(works[i]);
    stage_close(s);
}

/* Little is not announced; when the peer is far ahead it is told of all, of a tag by its last, and
 * of no receive twice, however often it gets there. */
static void a_peer_far_ahead_is_told_once(void)
{
    stage s = stage_open((stage_options){0});
    uint64_t names[ROOM];
    rc_work *works[6] = {receive(&s, 1, 10),
                         receive(&s, 1, 10),
                         receive(&s, 2, 10),
                         receive(&s, 90, PEER_SEGMENT / 4),
                         NULL,
                         NULL};
    CHECK_EQ(calls_told(&s, names, 0), 0);
    for (uint32_t i = 0; i < 3; i++) /* a quarter of the credit, and more */
        play(s.far[1][0], send_header(50, i), data);
    if (CHECK_EQ(calls_told(&s, names, 3), 3)) {
        CHECK_EQ(names[0], tags_name(1, 1));
        CHECK_EQ(names[1], tags_name(2, 0));
        CHECK_EQ(names[2], tags_name(90, 0));
    }
    works[4] = receive(&s, 3, 10);
    CHECK_EQ(calls_told(&s, names, 1), 1); /* of each call from then on */
    rc_work *taken[3];
    for (int i = 0; i < 3; i++)
        expect_done((taken[i] = receive(&s, 50, PEER_SEGMENT / 4)));
    CHECK_EQ(calls_told(&s, names, 1), 1); /* of tag 50 */
    works[5] = receive(&s, 4, 10);
    CHECK_EQ(calls_told(&s, names, 0), 0);
    for (uint32_t i = 3; i < 6; i++)
        play(s.far[1][0], send_header(50, i), data);
    if (CHECK_EQ(calls_told(&s, names, 1), 1))
        CHECK_EQ(names[0], tags_name(4, 0));
    abandon(&s, works, 6);
}

/* The rank under test has started it. */
static void wait_for_start(const stage *s, const rc_work *work)
{
    for (int started = 0; !started; usleep(200)) {
        engine_lock(s->engine);
        started = work->env != NULL;
        engine_unlock(s->engine);
    }
}

/* A communicator's timers run as soon as it is there; what is tested is the next time. */
static void wait_for_first_tick(const stage *s)
{
    for (uint64_t due = 0; due == 0; usleep(200)) {
        engine_lock(s->engine);
        due = s->comm->member.due;
        engine_unlock(s->engine);
    }
}

static void set_tx_closed(const stage *s, int closed)
{
    engine_lock(s->engine);
    s->comm->env.links[1]->lanes[0]->tx_closed = closed;
    engine_unlock(s->engine);
}

/* Waits for a tick, with which both are told, and for another, which tells nothing. */
static void both_are_told_once(stage *s)
{
    uint64_t names[ROOM];
    pass_time(s, clock_ns() + 31 * CLOCK_S);
    if (CHECK_EQ(calls_told(s, names, 2), 2)) {
        CHECK_EQ(names[0], tags_name(5, 0));
        CHECK_EQ(names[1], tags_name(6, 0));
    }
    pass_time(s, clock_ns() + 62 * CLOCK_S);
    CHECK_EQ(calls_told(s, names, 0), 0);
}

/* Its frame is dropped, as where memory is short: it is sent with the next tick instead, once. */
static void a_dropped_call_is_repeated(void)
{
    stage s = stage_open((stage_options){.heartbeat_ms = 60000, .peer_timeout_ms = 600000});
    uint64_t names[ROOM];
    wait_for_first_tick(&s);
    set_tx_closed(&s, 1);
    rc_work *works[2] = {receive(&s, 5, BULK), receive(&s, 6, BULK)};
    wait_for_start(&s, works[1]);
    set_tx_closed(&s, 0);
    CHECK_EQ(calls_told(&s, names, 0), 0);
    both_are_told_once(&s);
    abandon(&s, works, 2);
}

/* So is what asks for the receive of a send that is held back. */
static void a_dropped_ask_is_repeated(void)
{
    stage s = stage_open((stage_options){.heartbeat_ms = 60000, .peer_timeout_ms = 600000});
    rc_work *works[2];
    wait_for_first_tick(&s);
    set_tx_closed(&s, 1);
    for (uint32_t i = 0; i < 2; i++) {
        rc_call call = small_call(RC_SEND, data, i == 0 ? BULK : 1);
        call.root = 1;
        call.tag = 5 + i;
        works[i] = submit(s.comm, &call);
        wait_for_start(&s, works[i]);
    }
    set_tx_closed(&s, 0);
    both_are_told_once(&s);
    abandon(&s, works, 2);
}

/* What came in the meantime needs no word. */
static void what_is_over_is_not_announced(void)
{
    stage s = stage_open((stage_options){.heartbeat_ms = 60000, .peer_timeout_ms = 600000});
    uint64_t names[ROOM];
    wait_for_first_tick(&s);
    for (uint32_t i = 0; i < 3; i++)
        play(s.far[1][0], send_header(50, i), data);
    wait_for_frames(&s, 3);
    CHECK_EQ(calls_told(&s, names, 0), 0);
    set_tx_closed(&s, 1);
    rc_work *works[2] = {receive(&s, 7, PEER_SEGMENT / 4), receive(&s, 8, PEER_SEGMENT / 4)};
    wait_for_start(&s, works[1]);
    play(s.far[1][0], send_header(7, 0), data);
    expect_done(works[0]);
    set_tx_closed(&s, 0);
    pass_time(&s, clock_ns() + 31 * CLOCK_S);
    if (CHECK_EQ(calls_told(&s, names, 1), 1))
        CHECK_EQ(names[0], tags_name(8, 0));
    abandon(&s, works + 1, 1);
}

static rc_comm *failing;
static const lane_handler *usual;

/* As where the next frame of another work finds no memory when this one has left. */
static void fail_when_sent(lane *l, out_frame *frame)
{
    rc_comm *c = failing;
    failing = NULL;
    usual->sent(l, frame);
    if (c != NULL)
        comm_fail_text(c, RC_NO_MEMORY, 0, "no memory for a frame");
}

/* A receive that nobody waits for is gone then; nothing of it is touched (the address sanitizer
 * sees what is). */
static void a_call_that_ends_its_own_work(void)
{
    stage s = stage_open((stage_options){.heartbeat_ms = 60000, .peer_timeout_ms = 600000});
    wait_for_first_tick(&s);
    set_tx_closed(&s, 1);
    rc_work *work = receive(&s, 5, BULK);
    wait_for_start(&s, work);
    rc_work_free(work);
    engine_lock(s.engine);
    lane *l = s.comm->env.links[1]->lanes[0];
    usual = l->handler;
    lane_handler handler = *usual;
    handler.sent = fail_when_sent;
    l->handler = &handler;
    failing = s.comm;
    engine_unlock(s.engine);
    set_tx_closed(&s, 0);
    pass_time(&s, clock_ns() + 31 * CLOCK_S);
    expect_failure(receive(&s, 6, 1), RC_NO_MEMORY, "no memory for a frame");
    engine_lock(s.engine);
    CHECK(failing == NULL);
    l->handler = usual;
    engine_unlock(s.engine);
    stage_close(&s);
}

int main(void)
{
    static const check_test tests[] = {
        {"a_peer_far_ahead_is_told_once", a_peer_far_ahead_is_told_once},
        {"a_dropped_call_is_repeated", a_dropped_call_is_repeated},
        {"a_dropped_ask_is_repeated", a_dropped_ask_is_repeated},
        {"what_is_over_is_not_announced", what_is_over_is_not_announced},
        {"a_call_that_ends_its_own_work", a_call_that_ends_its_own_work},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
