/* test_striping.c - which lane of a link carries the next frame, by the lanes' rates, and where
 * control frames go.
 */
#include "link_fixture.h"

/* ---- striping ---- */

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

/* What is left to it would gain little, and may come after all else. Where it can be probed it gets
 * only what comes by half that time. */
static int frames_beside_a_full_lane(int keeps)
{
    enum { FRAMES = 30, LENGTH = 20000 };
    fixture *f = open_fixture(2);
    int small = 1;
    setsockopt(f->lanes[0]->source.fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    f->lanes[0]->rate = 1.0;
    f->lanes[1]->rate = 0.05;
    f->lanes[1]->keeps = keeps;
    send_frames(f, FRAMES, LENGTH);
    int sent = (int)f->lanes[1]->sent_frames;
    close_fixture(f);
    return sent;
}

static void a_very_slow_lane_gets_no_data_that_may_be_late(void)
{
    CHECK(frames_beside_a_full_lane(0) > 0);
    CHECK_EQ(frames_beside_a_full_lane(1), 0);
}

static void a_very_slow_lane_is_probed(void)
{
    enum { PASSED = 1 << 20 };
    fixture *f = open_fixture(2);
    lane *fast = f->lanes[0], *slow = f->lanes[1];
    fast->rate = 1000.0, slow->rate = 1000.0 / 20;
    fast->keeps = slow->keeps = 1;
    CHECK_EQ(link_probe(&f->link, slow), 0); /* nothing would have been sent on it */
    fast->bytes_to_siblings = slow->bytes_to_siblings = PASSED;
    CHECK_EQ(link_probe(&f->link, fast), 0);
    slow->keeps = 0;
    CHECK_EQ(link_probe(&f->link, slow), 0);
    slow->keeps = 1;
    CHECK(link_probe(&f->link, slow) > 0);
    slow->bytes_to_siblings = PASSED;
    CHECK_EQ(link_probe(&f->link, slow), 0); /* so soon */
    slow->probed_at = 0;
    slow->rate = 1000.0 / 4;
    CHECK_EQ(link_probe(&f->link, slow), 0); /* data tells */
    slow->rate = 1000.0 / 20;
    CHECK(link_probe(&f->link, slow) > 0);
    fast->keeps = slow->keeps = 0;
    close_fixture(f);
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
        {"load_follows_the_rates", load_follows_the_rates},
        {"unknown_rates_share_evenly", unknown_rates_share_evenly},
        {"idle_lane_is_tried_again", idle_lane_is_tried_again},
        {"small_frames_try_no_lane", small_frames_try_no_lane},
        {"fast_lane_needs_no_trial", fast_lane_needs_no_trial},
        {"a_very_slow_lane_gets_no_data_that_may_be_late",
         a_very_slow_lane_gets_no_data_that_may_be_late},
        {"a_very_slow_lane_is_probed", a_very_slow_lane_is_probed},
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
