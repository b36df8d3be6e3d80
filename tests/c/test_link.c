/* test_link.c - striping and credit of one link. Nobody reads at the far ends, so what was sent
 * stays unacknowledged, and the lanes' rates are set by hand.
 */
#include "../../csrc/net/link.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "fds.h"

enum { MOST_LANES = 4, CREDIT = 8000, WHOLE = CREDIT - FRAME_HEADER_BYTES, KEPT = 512 };

typedef struct fixture {
    peer_link link; /* first */
    rc_engine *engine;
    lane *lanes[MOST_LANES];
    int far[MOST_LANES];
    int released, prepared, refuse;
    uint64_t order[KEPT]; /* seq of prepared frames */
} fixture;

static fixture *current; /* of the handler, which is given a lane only */

static int prepare(peer_link *ln, out_frame *frame)
{
    fixture *f = (fixture *)ln;
    if (f->refuse) { /* it goes back to where it came from, for its owner to drop */
        frame->next = ln->queue.head;
        ln->queue.head = frame;
        ln->queue.tail = ln->queue.tail != NULL ? ln->queue.tail : frame;
        return 0;
    }
    f->order[f->prepared++ % KEPT] = frame->header.seq;
    frame_encode(frame->header_bytes, &frame->header, frame->payload);
    return 1;
}

static void on_sent(lane *ln, out_frame *frame)
{
    (void)ln;
    current->released++;
    free(frame);
}

static void on_room(lane *ln)
{
    link_pump(ln->link);
}

static void on_dead(lane *ln)
{
    lane_close(ln);
}

static const lane_handler handler = {.sent = on_sent, .room = on_room, .dead = on_dead};

static fixture *open_fixture(int lanes)
{
    fixture *f = current = calloc(1, sizeof *f);
    f->link =
        (peer_link){.lanes = f->lanes, .lane_count = lanes, .prepare = prepare, .credit = CREDIT};
    CHECK_EQ(rc_engine_create(&f->engine, NULL), RC_OK);
    engine_lock(f->engine);
    for (int i = 0; i < lanes; i++) {
        int pair[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        lane *ln = f->lanes[i] = calloc(1, sizeof *ln);
        ln->engine = f->engine;
        ln->handler = &handler;
        ln->link = &f->link;
        ln->index = i;
        f->far[i] = pair[1];
        CHECK_EQ(lane_open(ln, pair[0], 1 << 20, 0), RC_OK);
    }
    return f;
}

static void drop(frame_queue *q)
{
    out_frame *frame;
    while ((frame = queue_pop(q)) != NULL)
        free(frame);
}

static void close_fixture(fixture *f)
{
    drop(&f->link.queue);
    drop(&f->link.held[0]);
    drop(&f->link.held[1]);
    tags_destroy(&f->link.told);
    for (int i = 0; i < f->link.lane_count; i++)
        lane_close(f->lanes[i]);
    engine_quiesce(f->engine);
    engine_unlock(f->engine);
    for (int i = 0; i < f->link.lane_count; i++) {
        close(f->far[i]);
        free(f->lanes[i]);
    }
    rc_engine_free(f->engine);
    free(f);
}

static out_frame *new_frame(uint64_t seq, uint16_t flags, uint32_t length)
{
    static const uint8_t payload[1 << 20];
    out_frame *frame = calloc(1, sizeof *frame);
    frame->header =
        (frame_header){.type = FRAME_DATA, .seq = seq, .flags = flags, .length = length};
    frame->payload = payload;
    return frame;
}

static void learn(fixture *f, frame_type type, uint64_t seq, uint16_t flags, uint32_t consumed)
{
    frame_header h = {.type = (uint8_t)type, .seq = seq, .flags = flags, .consumed = consumed};
    link_learn(&f->link, &h);
}

/* ---- the queue ---- */

static int length_of(const frame_queue *q)
{
    int count = 0;
    for (out_frame *frame = q->head; frame != NULL; frame = frame->next)
        count++;
    CHECK((q->head == NULL) == (q->tail == NULL));
    return count;
}

static void expect_queue(fixture *f, const uint64_t *seqs, int count)
{
    CHECK_EQ(length_of(&f->link.queue), count);
    for (int i = 0; i < count; i++) {
        out_frame *frame = queue_pop(&f->link.queue);
        if (CHECK(frame != NULL))
            CHECK_EQ(frame->header.seq, seqs[i]);
        free(frame);
    }
    CHECK_EQ(length_of(&f->link.queue), 0);
}

static void queue_is_first_in_first_out(void)
{
    frame_queue q = {NULL, NULL};
    CHECK(queue_pop(&q) == NULL);
    for (uint64_t round = 0; round < 3; round++) {
        for (uint64_t i = 0; i <= round; i++)
            queue_push(&q, new_frame(i, 0, 0));
        CHECK_EQ(length_of(&q), round + 1);
        for (uint64_t i = 0; i <= round; i++) {
            out_frame *frame = queue_pop(&q);
            CHECK_EQ(frame->header.seq, i);
            free(frame);
        }
        CHECK(queue_pop(&q) == NULL);
    }
}

/* ---- credit: without lanes, what may leave stays in the queue ---- */

static void credit_limits_what_runs_ahead(void)
{
    fixture *f = open_fixture(0);
    for (uint64_t seq = 0; seq < 20; seq++)
        link_send(&f->link, new_frame(seq, 0, 1000));
    CHECK_EQ(length_of(&f->link.queue) + length_of(&f->link.held[0]), 20);
    int ahead = CREDIT / (1000 + FRAME_HEADER_BYTES);
    CHECK_EQ(length_of(&f->link.queue), ahead);
    CHECK_EQ(f->link.sent, ahead * (1000 + FRAME_HEADER_BYTES));
    learn(f, FRAME_HEARTBEAT, 0, 0, (uint32_t)f->link.sent);
    CHECK_EQ(length_of(&f->link.queue), 2 * ahead);
    close_fixture(f);
}

/* Or their number would have no bound. */
static void frames_without_payload_take_credit(void)
{
    fixture *f = open_fixture(0);
    for (uint64_t seq = 0; seq < CREDIT; seq++)
        link_send(&f->link, new_frame(seq, 0, 0));
    CHECK_EQ(length_of(&f->link.queue), CREDIT / FRAME_HEADER_BYTES);
    close_fixture(f);
}

static void known_calls_need_no_credit(void)
{
    static const uint64_t all[] = {0, 0, 0, 1, 2, 3, 4};
    fixture *f = open_fixture(0);
    learn(f, FRAME_CALL, 4, 0, 0); /* has called 0 to 4 */
    CHECK_EQ(f->link.called, 5);
    for (int i = 0; i < 7; i++)
        link_queue(&f->link, new_frame(all[i], 0, CREDIT));
    CHECK_EQ(length_of(&f->link.held[0]), 0);
    link_queue(&f->link, new_frame(5, 0, 1));
    CHECK_EQ(length_of(&f->link.held[0]), 1);
    expect_queue(f, all, 7);
    close_fixture(f);
}

static uint32_t receives_told(const fixture *f, uint32_t tag)
{
    const tag_count *told = tags_find(&f->link.told, tag);
    return told != NULL ? told->receives : 0;
}

/* What each type of frame says about the peer's calls. */
static void calls_are_learned(void)
{
    fixture *f = open_fixture(0);
    learn(f, FRAME_DATA, 3, 0, 0);
    CHECK_EQ(f->link.called, 4);
    learn(f, FRAME_CALL, 2, 0, 0);
    CHECK_EQ(f->link.called, 4); /* never back */
    learn(f, FRAME_HEARTBEAT, 9, 0, 0);
    CHECK_EQ(f->link.called, 9);
    learn(f, FRAME_HEARTBEAT, 3, 0, 0);
    CHECK_EQ(f->link.called, 9);
    CHECK_EQ(receives_told(f, 0), 0);
    learn(f, FRAME_DATA, 50, FRAME_P2P, 0); /* its send says nothing of its receives */
    CHECK_EQ(f->link.called, 9);
    CHECK_EQ(receives_told(f, 0), 0);
    learn(f, FRAME_CALL, 6, FRAME_P2P, 0);
    CHECK_EQ(receives_told(f, 0), 7);
    learn(f, FRAME_CALL, 1, FRAME_P2P, 0);
    CHECK_EQ(receives_told(f, 0), 7);
    learn(f, FRAME_CALL, tags_name(5, 1), FRAME_P2P, 0);
    CHECK_EQ(receives_told(f, 5), 2);
    CHECK_EQ(receives_told(f, 0), 7);
    CHECK_EQ(f->link.called, 9);
    learn(f, FRAME_GOODBYE, 99, 0, 0);
    CHECK_EQ(f->link.called, 9);
    close_fixture(f);
}

/* A relayed segment of an early collective may come up after later ones were held. */
static void held_frames_go_in_order_of_their_collective(void)
{
    static const uint64_t first[] = {0}, rest[] = {1, 1, 2, 2, 3};
    fixture *f = open_fixture(0);
    link_queue(&f->link, new_frame(0, 0, WHOLE)); /* takes all of it */
    expect_queue(f, first, 1);
    for (int i = 4; i >= 0; i--)
        link_queue(&f->link, new_frame(rest[i], 0, 10));
    CHECK_EQ(length_of(&f->link.held[0]), 5);
    CHECK_EQ(length_of(&f->link.queue), 0);
    learn(f, FRAME_CALL, 3, 0, 0);
    expect_queue(f, rest, 5);
    close_fixture(f);
}

static void frames_of_one_collective_keep_their_order(void)
{
    fixture *f = open_fixture(0);
    link_queue(&f->link, new_frame(0, 0, WHOLE));
    free(queue_pop(&f->link.queue));
    for (uint32_t i = 0; i < 5; i++) {
        out_frame *frame = new_frame(1, 0, 10);
        frame->header.segment = i;
        link_queue(&f->link, frame);
    }
    learn(f, FRAME_CALL, 1, 0, 0);
    for (uint32_t i = 0; i < 5; i++) {
        out_frame *frame = queue_pop(&f->link.queue);
        CHECK_EQ(frame->header.segment, i);
        free(frame);
    }
    close_fixture(f);
}

/* A frame that would fit goes no further than those held before it. */
static void small_frames_do_not_overtake(void)
{
    static const uint64_t none[] = {0};
    fixture *f = open_fixture(0);
    learn(f, FRAME_HEARTBEAT, 0, 0, 0);
    link_queue(&f->link, new_frame(0, 0, CREDIT / 2));
    link_queue(&f->link, new_frame(1, 0, WHOLE));
    link_queue(&f->link, new_frame(2, 0, 1));
    CHECK_EQ(length_of(&f->link.held[0]), 2);
    expect_queue(f, none, 1);
    close_fixture(f);
}

static void sends_and_collectives_do_not_wait_for_each_other(void)
{
    static const uint64_t collective[] = {7}, send[] = {2};
    fixture *f = open_fixture(0);
    link_queue(&f->link, new_frame(0, 0, WHOLE));
    free(queue_pop(&f->link.queue));
    link_queue(&f->link, new_frame(7, 0, 100));
    link_queue(&f->link, new_frame(2, FRAME_P2P, 100));
    CHECK_EQ(length_of(&f->link.held[0]), 1);
    CHECK_EQ(length_of(&f->link.held[1]), 1);
    learn(f, FRAME_CALL, 7, 0, 0);
    expect_queue(f, collective, 1);
    CHECK_EQ(length_of(&f->link.held[1]), 1);
    learn(f, FRAME_CALL, 2, FRAME_P2P, 0);
    expect_queue(f, send, 1);
    close_fixture(f);
}

static void tags_do_not_wait_for_each_other(void)
{
    static const uint64_t second[] = {UINT64_C(9) << 32},
                          first[] = {UINT64_C(2) << 32, UINT64_C(2) << 32};
    fixture *f = open_fixture(0);
    link_queue(&f->link, new_frame(0, 0, WHOLE));
    free(queue_pop(&f->link.queue));
    link_queue(&f->link, new_frame(tags_name(2, 0), FRAME_P2P, 100));
    link_queue(&f->link, new_frame(tags_name(9, 0), FRAME_P2P, 100));
    link_queue(&f->link, new_frame(tags_name(2, 0), FRAME_P2P, 100));
    CHECK_EQ(length_of(&f->link.held[1]), 3);
    learn(f, FRAME_CALL, tags_name(9, 0), FRAME_P2P, 0);
    expect_queue(f, second, 1);
    CHECK_EQ(length_of(&f->link.held[1]), 2);
    learn(f, FRAME_CALL, tags_name(2, 0), FRAME_P2P, 0);
    expect_queue(f, first, 2);
    CHECK_EQ(length_of(&f->link.held[1]), 0);
    close_fixture(f);
}

/* The counters run modulo 2^32, and frames of several lanes arrive out of order. */
static void consumption_wraps_and_never_goes_back(void)
{
    fixture *f = open_fixture(0);
    f->link.sent = f->link.peer_consumed = UINT32_MAX - 500;
    link_queue(&f->link, new_frame(0, 0, CREDIT / 2));
    uint64_t after = f->link.sent;
    CHECK((uint32_t)after < CREDIT); /* wrapped */
    link_queue(&f->link, new_frame(0, 0, WHOLE));
    CHECK_EQ(length_of(&f->link.held[0]), 1);
    learn(f, FRAME_HEARTBEAT, 0, 0, (uint32_t)after);
    CHECK_EQ(length_of(&f->link.held[0]), 0);
    CHECK_EQ(f->link.peer_consumed, after);
    learn(f, FRAME_HEARTBEAT, 0, 0, UINT32_MAX - 400);
    CHECK_EQ(f->link.peer_consumed, after);
    close_fixture(f);
}

/* What is under way to a peer that has called has no bound, and must not look little. */
static void gigabytes_under_way_leave_no_credit(void)
{
    enum { MIB = 1 << 20, GIB_IN_MIB = 1024 };
    fixture *f = open_fixture(0);
    learn(f, FRAME_CALL, 0, 0, 0);
    for (int i = 0; i < 4 * GIB_IN_MIB; i++)
        link_queue(&f->link, new_frame(0, 0, MIB - FRAME_HEADER_BYTES));
    CHECK_EQ(f->link.sent, UINT64_C(1) << 32);
    link_queue(&f->link, new_frame(1, 0, 100));
    for (uint32_t gib = 0; gib < 4; gib++) {
        learn(f, FRAME_HEARTBEAT, 0, 0, gib << 30);
        CHECK_EQ(length_of(&f->link.held[0]), 1);
    }
    learn(f, FRAME_HEARTBEAT, 0, 0, 0); /* the fourth */
    CHECK_EQ(length_of(&f->link.held[0]), 0);
    close_fixture(f);
}

static void credit_is_owed_in_good_time(void)
{
    fixture *f = open_fixture(0);
    CHECK(!link_owes_credit(&f->link));
    f->link.consumed = f->link.consumed_told = UINT32_MAX - 5;
    f->link.consumed += CREDIT / 4 - 1;
    CHECK(!link_owes_credit(&f->link));
    f->link.consumed += 1;
    CHECK(link_owes_credit(&f->link));
    close_fixture(f);
}

/* ---- striping ---- */

static void send_frames(fixture *f, int count, uint32_t length)
{
    learn(f, FRAME_CALL, 1000000, 0, 0);
    for (int i = 0; i < count; i++)
        link_send(&f->link, new_frame((uint64_t)i, 0, length));
}

static void load_follows_the_rates(void)
{
    static const double ratios[] = {1, 2, 3, 10, 25};
    for (size_t i = 0; i < CHECK_COUNT(ratios); i++)
        for (int fast = 0; fast < 2; fast++) {
            enum { FRAMES = 60 };
            fixture *f = open_fixture(2);
            f->lanes[fast]->rate = 0.001 * ratios[i];
            f->lanes[!fast]->rate = 0.001;
            send_frames(f, FRAMES, 1500);
            int expected = (int)(FRAMES * ratios[i] / (ratios[i] + 1) + 0.5);
            int got = (int)f->lanes[fast]->sent_frames;
            if (!CHECK(abs(got - expected) <= 2))
                fprintf(stderr, "ratio %g: %d frames on the fast lane, not %d\n", ratios[i], got,
                        expected);
            CHECK_EQ(got + (int)f->lanes[!fast]->sent_frames, FRAMES);
            close_fixture(f);
        }
}

/* Before anything is known all lanes count the same, and an unknown one as the fastest. */
static void unknown_rates_share_evenly(void)
{
    fixture *f = open_fixture(4);
    send_frames(f, 40, 1500);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(f->lanes[i]->sent_frames, 10);
    close_fixture(f);
    f = open_fixture(2);
    f->lanes[0]->rate = 0.5;
    send_frames(f, 40, 1500);
    CHECK_EQ(f->lanes[1]->sent_frames, 20);
    close_fixture(f);
}

static void read_all(const fixture *f)
{
    static uint8_t bytes[1 << 20];
    for (int i = 0; i < f->link.lane_count; i++)
        while (recv(f->far[i], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
            continue;
}

/* By its rate it would get nothing at all; but seldom enough to cost next to nothing. */
static void idle_lane_is_tried_again(void)
{
    enum { FRAMES = 200, SLOWER = 3, LENGTH = 20000 };
    fixture *f = open_fixture(2);
    f->lanes[0]->rate = 1000.0;
    f->lanes[1]->rate = 1000.0 / SLOWER;
    for (int i = 0; i < FRAMES; i++) {
        send_frames(f, 1, LENGTH);
        read_all(f);
    }
    CHECK(f->lanes[1]->sent_frames >= 1);
    CHECK(f->lanes[1]->sent_frames <= FRAMES / (50 * SLOWER));
    CHECK(f->lanes[1]->rate > 1000.0 / SLOWER);
    close_fixture(f);
}

/* Sends large and small frames one at a time: the other lane keeps its rate. */
static void expect_no_trial(double rate, uint32_t large, uint32_t small)
{
    enum { FRAMES = 2000 };
    fixture *f = open_fixture(2);
    f->lanes[0]->rate = 1000.0;
    f->lanes[1]->rate = rate;
    for (int i = 0; i < FRAMES; i++) {
        send_frames(f, 1, i % 100 == 0 ? large : small);
        read_all(f);
    }
    CHECK(f->lanes[0]->rate == 1000.0 && f->lanes[1]->rate == rate);
    close_fixture(f);
}

/* Its rate would be raised each time, and nothing would come of it that tells the true one. */
static void small_frames_try_no_lane(void)
{
    expect_no_trial(300.0, 100000, 100);
}

/* It is idle because there is so little to do. */
static void fast_lane_needs_no_trial(void)
{
    expect_no_trial(1000.0, 20000, 20000);
    expect_no_trial(500.0, 20000, 20000);
}

/* The frame that would finish first on a full lane waits for it, rather than be hoarded by a slow
 * one; when the lane has room it goes on. */
static void frames_wait_for_the_better_lane(void)
{
    fixture *f = open_fixture(2);
    int small = 1;
    setsockopt(f->lanes[0]->source.fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    f->lanes[0]->rate = 1.0;
    f->lanes[1]->rate = 1e-6;
    send_frames(f, 10, 20000);
    CHECK(f->lanes[0]->out.list.head != NULL);
    CHECK_EQ(f->lanes[1]->sent_frames, 0);
    CHECK(length_of(&f->link.queue) >= 8);
    CHECK_EQ(f->prepared + length_of(&f->link.queue), 10);
    close_fixture(f);
}

static void single_lane_takes_a_backlog(void)
{
    fixture *f = open_fixture(1);
    send_frames(f, 100, 100000);
    CHECK(f->lanes[0]->out_bytes >= 1 << 20);
    CHECK(f->lanes[0]->out_bytes < (1 << 20) + 2 * 100048);
    CHECK(length_of(&f->link.queue) > 80);
    close_fixture(f);
}

static void dead_lanes_are_left_out(void)
{
    fixture *f = open_fixture(3);
    lane_close(f->lanes[1]);
    send_frames(f, 30, 500);
    CHECK_EQ(f->lanes[1]->sent_frames, 0);
    CHECK_EQ(f->lanes[0]->sent_frames + f->lanes[2]->sent_frames, 30);
    lane_close(f->lanes[0]);
    lane_close(f->lanes[2]);
    send_frames(f, 3, 500);
    CHECK_EQ(length_of(&f->link.queue), 3);
    close_fixture(f);
}

static void refused_frames_stop_the_pump(void)
{
    fixture *f = open_fixture(1);
    f->refuse = 1;
    send_frames(f, 3, 100);
    CHECK_EQ(f->prepared, 0);
    CHECK_EQ(f->lanes[0]->sent_frames, 0);
    CHECK_EQ(length_of(&f->link.queue), 3);
    close_fixture(f);
}

/* ---- control frames ---- */

static out_frame *new_control(uint64_t seq)
{
    out_frame *frame = new_frame(seq, 0, 0);
    frame->header.type = FRAME_HEARTBEAT;
    return frame;
}

static void control_goes_where_it_is_told(void)
{
    fixture *f = open_fixture(3);
    for (int i = 0; i < 3; i++)
        link_control(&f->link, new_control(0), i);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(f->lanes[i]->sent_frames, 1);
    CHECK_EQ(f->released, 3);
    close_fixture(f);
}

/* With data queued and held, a control frame still goes out, on a lane with nothing before it. */
static void control_passes_queued_data(void)
{
    fixture *f = open_fixture(2);
    int small = 1;
    setsockopt(f->lanes[0]->source.fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    f->lanes[0]->rate = 1.0;
    f->lanes[1]->rate = 1e-6;
    send_frames(f, 5, 20000);
    CHECK(length_of(&f->link.queue) > 0);
    link_control(&f->link, new_control(77), -1);
    CHECK_EQ(f->lanes[1]->sent_frames, 1);
    CHECK_EQ(f->order[f->prepared - 1], 77);
    close_fixture(f);
}

static void control_on_a_dead_lane_is_dropped(void)
{
    fixture *f = open_fixture(2);
    lane_close(f->lanes[0]);
    link_control(&f->link, new_control(0), 0);
    CHECK_EQ(f->released, 1);
    link_control(&f->link, new_control(0), -1);
    CHECK_EQ(f->lanes[1]->sent_frames, 1);
    lane_close(f->lanes[1]);
    link_control(&f->link, new_control(0), -1);
    CHECK_EQ(f->released, 3);
    close_fixture(f);
}

static void nothing_leaks(void)
{
    int before = open_fds();
    close_fixture(open_fixture(MOST_LANES));
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"queue_is_first_in_first_out", queue_is_first_in_first_out},
        {"credit_limits_what_runs_ahead", credit_limits_what_runs_ahead},
        {"frames_without_payload_take_credit", frames_without_payload_take_credit},
        {"known_calls_need_no_credit", known_calls_need_no_credit},
        {"calls_are_learned", calls_are_learned},
        {"held_frames_go_in_order_of_their_collective",
         held_frames_go_in_order_of_their_collective},
        {"frames_of_one_collective_keep_their_order", frames_of_one_collective_keep_their_order},
        {"small_frames_do_not_overtake", small_frames_do_not_overtake},
        {"sends_and_collectives_do_not_wait_for_each_other",
         sends_and_collectives_do_not_wait_for_each_other},
        {"tags_do_not_wait_for_each_other", tags_do_not_wait_for_each_other},
        {"consumption_wraps_and_never_goes_back", consumption_wraps_and_never_goes_back},
        {"gigabytes_under_way_leave_no_credit", gigabytes_under_way_leave_no_credit},
        {"credit_is_owed_in_good_time", credit_is_owed_in_good_time},
        {"load_follows_the_rates", load_follows_the_rates},
        {"unknown_rates_share_evenly", unknown_rates_share_evenly},
        {"idle_lane_is_tried_again", idle_lane_is_tried_again},
        {"small_frames_try_no_lane", small_frames_try_no_lane},
        {"fast_lane_needs_no_trial", fast_lane_needs_no_trial},
        {"frames_wait_for_the_better_lane", frames_wait_for_the_better_lane},
        {"single_lane_takes_a_backlog", single_lane_takes_a_backlog},
        {"dead_lanes_are_left_out", dead_lanes_are_left_out},
        {"refused_frames_stop_the_pump", refused_frames_stop_the_pump},
        {"control_goes_where_it_is_told", control_goes_where_it_is_told},
        {"control_passes_queued_data", control_passes_queued_data},
        {"control_on_a_dead_lane_is_dropped", control_on_a_dead_lane_is_dropped},
        {"nothing_leaks", nothing_leaks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
