/* test_one_shot.c - where a contribution lies while it is sent, and when its place may be written.
 */
#include "../../csrc/coll/one_shot.h"
#include "bag.h"

enum { RANKS = 3, COUNT = 5 };

static float tensors[RANKS][COUNT];

/* All ranks call an all-reduce in place; rank r has r + 1 everywhere. */
static void open_ranks(rc_codec codec)
{
    algorithm = RC_ONE_SHOT;
    open_world(RANKS);
    for (int rank = 0; rank < RANKS; rank++) {
        for (int i = 0; i < COUNT; i++)
            tensors[rank][i] = (float)(rank + 1);
        rc_call call = {.collective = RC_ALLREDUCE,
                        .dtype = RC_F32,
                        .codec = codec,
                        .count = COUNT,
                        .src = tensors[rank],
                        .dst = tensors[rank]};
        start(rank, &call);
    }
    collect();
    CHECK_EQ(bag_count, RANKS * (RANKS - 1));
}

static void deliver_from_to(int from, int to)
{
    for (int i = 0; i < bag_count; i++)
        if (bag[i].from == from && bag[i].to == to) {
            deliver(i);
            return;
        }
    CHECK(!"there is such a frame");
}

static void end_ranks(void)
{
    while (bag_count > 0)
        deliver(0);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_EQ(tensors[rank][COUNT - 1], 6);
        end_work(&sides[rank]);
    }
    close_world();
    algorithm = RC_RING;
}

static void a_plain_one_is_sent_from_src(void)
{
    open_ranks(RC_CODEC_NONE);
    CHECK(one_shot_sends_src(sides[0].work));
    for (int i = 0; i < bag_count; i++)
        CHECK(bag[i].frame->payload == (const uint8_t *)tensors[bag[i].from]);
    end_ranks();
}

/* All others' values are there: in place, the result must wait until its own have left for all. */
static void the_join_waits_until_it_has_left(void)
{
    open_ranks(RC_CODEC_NONE);
    deliver_from_to(1, 0);
    deliver_from_to(2, 0);
    CHECK_EQ(tensors[0][0], 1);
    deliver_from_to(0, 1);
    CHECK_EQ(tensors[0][0], 1);
    CHECK(!work_complete(sides[0].work));
    deliver_from_to(0, 2);
    CHECK_EQ(tensors[0][0], 6);
    CHECK(work_complete(sides[0].work));
    end_ranks();
}

static void it_may_leave_before_others_come(void)
{
    open_ranks(RC_CODEC_NONE);
    deliver_from_to(0, 1);
    deliver_from_to(0, 2);
    deliver_from_to(1, 0);
    CHECK_EQ(tensors[0][0], 1);
    deliver_from_to(2, 0);
    CHECK_EQ(tensors[0][0], 6);
    end_ranks();
}

static void an_encoded_one_is_kept_in_a_buffer(void)
{
    open_ranks(RC_CODEC_BF16);
    CHECK(!one_shot_sends_src(sides[0].work));
    deliver_from_to(1, 0);
    CHECK_EQ(tensors[0][0], 1);
    deliver_from_to(2, 0);
    CHECK_EQ(tensors[0][0], 6); /* though it has left for nobody yet */
    CHECK(!work_complete(sides[0].work));
    end_ranks();
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
