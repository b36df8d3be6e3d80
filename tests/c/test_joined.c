/* test_joined.c - what a join waits for, and what becomes of its result. */
#include "../../csrc/coll/joined.h"
#include "bag.h"

enum { RANKS = 3, COUNT = 700 };

static void open_ranks(rc_algorithm a)
{
    algorithm = a;
    open_sum(RANKS, COUNT, RC_CODEC_NONE);
}

/* Rank 0 owns part 0, and passes it on when both others have brought theirs. */
static void an_owner_passes_its_result_on(void)
{
    open_ranks(RC_DIRECT);
    int before = bag_count;
    CHECK(deliver_from_to(1, 0));
    collect();
    CHECK_EQ(bag_count, before - 1);
    CHECK_EQ(summands[0][0], 1);
    CHECK(deliver_from_to(2, 0));
    collect();
    CHECK_EQ(bag_count, before - 2 + 2);
    CHECK_EQ(summands[0][0], 6);
    close_sum(COUNT);
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
    close_sum(COUNT);
}

int main(void)
{
    static const check_test tests[] = {
        {"an_owner_passes_its_result_on", an_owner_passes_its_result_on},
        {"everybody_joins_for_itself", everybody_joins_for_itself},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
