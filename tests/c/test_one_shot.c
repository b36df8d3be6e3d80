/* test_one_shot.c - where a contribution lies while it is sent, and when its place may be written.
 */
#include "../../csrc/coll/one_shot.h"
#include "bag.h"

enum { RANKS = 3, COUNT = 5 };

static void open_ranks(rc_codec codec)
{
    algorithm = RC_ONE_SHOT;
    open_sum(RANKS, COUNT, codec);
    CHECK_EQ(bag_count, RANKS * (RANKS - 1));
}

static void a_plain_one_is_sent_from_src(void)
{
    open_ranks(RC_CODEC_NONE);
    CHECK(one_shot_sends_src(sides[0].work));
    for (int i = 0; i < bag_count; i++)
        CHECK(bag[i].frame->payload == (const uint8_t *)summands[bag[i].from]);
    close_sum(COUNT);
}

/* All others' values are there: in place, the result must wait until its own have left for all. */
static void the_join_waits_until_it_has_left(void)
{
    open_ranks(RC_CODEC_NONE);
    CHECK(deliver_from_to(1, 0));
    CHECK(deliver_from_to(2, 0));
    CHECK_EQ(summands[0][0], 1);
    CHECK(deliver_from_to(0, 1));
    CHECK_EQ(summands[0][0], 1);
    CHECK(!work_complete(sides[0].work));
    CHECK(deliver_from_to(0, 2));
    CHECK_EQ(summands[0][0], 6);
    CHECK(work_complete(sides[0].work));
    close_sum(COUNT);
}

static void it_may_leave_before_others_come(void)
{
    open_ranks(RC_CODEC_NONE);
    CHECK(deliver_from_to(0, 1));
    CHECK(deliver_from_to(0, 2));
    CHECK(deliver_from_to(1, 0));
    CHECK_EQ(summands[0][0], 1);
    CHECK(deliver_from_to(2, 0));
    CHECK_EQ(summands[0][0], 6);
    close_sum(COUNT);
}

static void an_encoded_one_is_kept_in_a_buffer(void)
{
    open_ranks(RC_CODEC_BF16);
    CHECK(!one_shot_sends_src(sides[0].work));
    CHECK(deliver_from_to(1, 0));
    CHECK_EQ(summands[0][0], 1);
    CHECK(deliver_from_to(2, 0));
    CHECK_EQ(summands[0][0], 6); /* though it has left for nobody yet */
    CHECK(!work_complete(sides[0].work));
    close_sum(COUNT);
}

int main(void)
{
    static const check_test tests[] = {
        {"a_plain_one_is_sent_from_src", a_plain_one_is_sent_from_src},
        {"the_join_waits_until_it_has_left", the_join_waits_until_it_has_left},
        {"it_may_leave_before_others_come", it_may_leave_before_others_come},
        {"an_encoded_one_is_kept_in_a_buffer", an_encoded_one_is_kept_in_a_buffer},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
