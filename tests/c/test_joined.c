/* test_joined.c - what a join waits for, and what becomes of its result. */
#include "../../csrc/coll/joined.h"
#include "bag.h"

enum { RANKS = 3, COUNT = 700 };

static float tensors[RANKS][COUNT];

static void open_ranks(rc_algorithm a)
{
    algorithm = a;
    open_world(RANKS);
    for (int rank = 0; rank < RANKS; rank++) {
        for (int i = 0; i < COUNT; i++)
            tensors[rank][i] = (float)(rank + 1);
        rc_call call = {.collective = RC_ALLREDUCE,
                        .dtype = RC_F32,
                        .count = COUNT,
                        .src = tensors[rank],
                        .dst = tensors[rank]};
        start(rank, &call);
    }
    collect();
}

static void end_ranks(void)
{
    for (; bag_count > 0; collect())
        deliver(0);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_EQ(tensors[rank][0], 6);
        CHECK_EQ(tensors[rank][COUNT - 1], 6);
        end_work(&sides[rank]);
    }
    close_world();
    algorithm = RC_RING;
}

static int deliver_from_to(int from, int to)
{
    for (int i = 0; i < bag_count; i++)
        if (bag[i].from == from && bag[i].to == to) {
            deliver(i);
            return 1;
        }
    return 0;
}

/* Rank 0 owns part 0, and passes it on when both others have brought theirs. */
static void an_owner_passes_its_result_on(void)
{
    open_ranks(RC_DIRECT);
    int before = bag_count;
    CHECK(deliver_from_to(1, 0));
    collect();
    CHECK_EQ(bag_count, before - 1);
    CHECK_EQ(tensors[0][0], 1);
    CHECK(deliver_from_to(2, 0));
    collect();
    CHECK_EQ(bag_count, before - 2 + 2);
    CHECK_EQ(tensors[0][0], 6);
    end_ranks();
}

static void everybody_joins_for_itself(void)
{
    open_ranks(RC_ONE_SHOT);
    while (bag_count > 0) {
        deliver(0);
        int before = bag_count;
        collect();
        CHECK_EQ(bag_count, before); /* no result travels */
    }
    end_ranks();
}

int main(void)
{
    static const check_test tests[] = {
        {"an_owner_passes_its_result_on", an_owner_passes_its_result_on},
        {"everybody_joins_for_itself", everybody_joins_for_itself},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
