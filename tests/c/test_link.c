/* test_link.c - the queue and the credit of one link: what may leave, and in which order. */
#include "link_fixture.h"

/* ---- the queue ---- */

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
    CHECK_EQ(length_of(&f->link.queue) + (int)f->link.held.count, 20);
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
    CHECK_EQ(f->link.held.count, 0);
    link_queue(&f->link, new_frame(5, 0, 1));
    CHECK_EQ(f->link.held.count, 1);
    expect_queue(f, all, 7);
    close_fixture(f);
}

static uint32_t receives_told(const fixture *f, uint32_t tag)
{
    const tag_count *told = tags_find(&f->link.receives_posted, tag);
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
    CHECK_EQ(f->link.held.count, 5);
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
    CHECK_EQ(f->link.held.count, 2);
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
    CHECK(held_first(&f->link.held, 0) != NULL);
    CHECK_EQ(f->link.held.count, 2);
    learn(f, FRAME_CALL, 7, 0, 0);
    expect_queue(f, collective, 1);
    CHECK_EQ(f->link.held.count, 1);
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
    CHECK_EQ(f->link.held.count, 3);
    learn(f, FRAME_CALL, tags_name(9, 0), FRAME_P2P, 0);
    expect_queue(f, second, 1);
    CHECK_EQ(f->link.held.count, 2);
    learn(f, FRAME_CALL, tags_name(2, 0), FRAME_P2P, 0);
    expect_queue(f, first, 2);
    CHECK_EQ(f->link.held.count, 0);
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
    CHECK_EQ(f->link.held.count, 1);
    learn(f, FRAME_HEARTBEAT, 0, 0, (uint32_t)after);
    CHECK_EQ(f->link.held.count, 0);
    CHECK_EQ(f->link.peer_consumed, after);
    learn(f, FRAME_HEARTBEAT, 0, 0, UINT32_MAX - 400);
    CHECK_EQ(f->link.peer_consumed, after);
    learn(f, FRAME_HEARTBEAT, 0, 0, (uint32_t)after + INT32_MAX); /* 2 GiB late */
    CHECK_EQ(f->link.peer_consumed, after);
    close_fixture(f);
}

static void numbers_of_a_tag_begin_anew(void)
{
    fixture *f = open_fixture(0);
    tags_get(&f->link.receives_posted, 3)->receives = UINT32_MAX;
    link_queue(&f->link, new_frame(tags_name(3, UINT32_MAX), FRAME_P2P, 2 * CREDIT));
    link_queue(&f->link, new_frame(tags_name(3, 0), FRAME_P2P, 2 * CREDIT));
    CHECK_EQ(f->link.held.count, 2);
    learn(f, FRAME_CALL, tags_name(3, UINT32_MAX), FRAME_P2P, 0);
    CHECK_EQ(f->link.held.count, 1);
    learn(f, FRAME_CALL, tags_name(3, 0), FRAME_P2P, 0);
    CHECK_EQ(f->link.held.count, 0);
    learn(f, FRAME_CALL, tags_name(3, 0), FRAME_P2P | FRAME_ASKS, 0);
    learn(f, FRAME_HEARTBEAT, 0, 0, (uint32_t)f->link.sent);
    for (uint32_t number = 1; number < 6; number++) { /* what was told of 0 is no news of these */
        link_queue(&f->link, new_frame(tags_name(3, number << 30), FRAME_P2P, 0));
        link_note_receive(&f->link, tags_name(3, number << 30));
    }
    CHECK(!link_awaits_send(&f->link, tags_name(3, (6U << 30) + 2)));
    link_queue(&f->link, new_frame(tags_name(3, (6U << 30) + 2), FRAME_P2P, 2 * CREDIT));
    CHECK_EQ(f->link.held.count, 1);
    learn(f, FRAME_CALL, tags_name(3, (6U << 30) + 2), FRAME_P2P, 0);
    CHECK_EQ(f->link.held.count, 0);
    close_fixture(f);
}

static void sends_that_are_held_back_are_learned(void)
{
    fixture *f = open_fixture(0);
    CHECK(!link_awaits_send(&f->link, tags_name(3, 0)));
    learn(f, FRAME_CALL, tags_name(3, 1), FRAME_P2P | FRAME_ASKS, 0);
    CHECK(link_awaits_send(&f->link, tags_name(3, 0)) &&
          link_awaits_send(&f->link, tags_name(3, 1)));
    CHECK(!link_awaits_send(&f->link, tags_name(3, 2)));
    CHECK(!link_awaits_send(&f->link, tags_name(4, 0)));
    link_queue(&f->link, new_frame(tags_name(3, 0), FRAME_P2P, 2 * CREDIT));
    CHECK_EQ(f->link.held.count, 1); /* it says nothing of the peer's receives */
    free(held_pop(&f->link.held, 1));
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
        CHECK_EQ(f->link.held.count, 1);
    }
    learn(f, FRAME_HEARTBEAT, 0, 0, 0); /* the fourth */
    CHECK_EQ(f->link.held.count, 0);
    close_fixture(f);
}

static void credit_is_owed_in_good_time(void)
{
    fixture *f = open_fixture(0);
    CHECK(!link_owes_credit(&f->link));
    f->link.consumed = f->link.consumed_reported = UINT32_MAX - 5;
    f->link.consumed += CREDIT / 4 - 1;
    CHECK(!link_owes_credit(&f->link));
    f->link.consumed += 1;
    CHECK(link_owes_credit(&f->link));
    close_fixture(f);
}

int main(void)
{
    static const check_test tests[] = {
        {"queue_is_first_in_first_out", queue_is_first_in_first_out},
        {"credit_limits_what_runs_ahead", credit_limits_what_runs_ahead},
        {"frames_without_payload_take_credit", frames_without_payload_take_credit},
        {"known_calls_need_no_credit", known_calls_need_no_credit},
        {"calls_are_learned", calls_are_learned},
        {"numbers_of_a_tag_begin_anew", numbers_of_a_tag_begin_anew},
        {"sends_that_are_held_back_are_learned", sends_that_are_held_back_are_learned},
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
    };
    return check_run(tests, CHECK_COUNT(tests));
}
