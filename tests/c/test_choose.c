/* test_choose.c - the choice of an algorithm: where it must lie, whatever the model's constants. */
#include "../../csrc/plan/plan.h"
#include "check.h"

static rc_call call_of(int collective, uint64_t count)
{
    return (rc_call){.collective = (rc_collective)collective, .dtype = RC_F32, .count = count};
}

static rc_algorithm chosen(int world_size, uint64_t bytes)
{
    rc_call call = call_of(RC_ALLREDUCE, bytes / 4);
    return plan_choose(&call, world_size, bytes, RC_AUTO);
}

/* From one-shot over direct to the ring as messages grow, and never back. */
static void choice_follows_the_size(void)
{
    CHECK_EQ(chosen(1, 4096), RC_RING);
    for (int n = 2; n <= 64; n++) {
        CHECK_EQ(chosen(n, 4), RC_ONE_SHOT);
        CHECK_EQ(chosen(n, 64 << 20), RC_RING);
        int last = RC_ONE_SHOT;
        for (uint64_t bytes = 4; bytes < 64 << 20; bytes += bytes / 4 + 1) {
            int now = (int)chosen(n, bytes);
            static const int place[] = {[RC_ONE_SHOT] = 0, [RC_DIRECT] = 1, [RC_RING] = 2};
            CHECK(place[now] >= place[last]);
            last = now;
        }
    }
}

static void choice_is_overruled_and_for_allreduce_alone(void)
{
    rc_call call = call_of(RC_ALLREDUCE, 1);
    CHECK_EQ(plan_choose(&call, 4, 4, RC_RING), RC_RING);
    CHECK_EQ(plan_choose(&call, 4, UINT64_C(1) << 36, RC_DIRECT), RC_DIRECT);
    CHECK_EQ(plan_choose(&call, 1, 4, RC_DIRECT), RC_RING);
    for (int collective = 1; collective < RC_COLLECTIVE_COUNT; collective++) {
        call = call_of(collective, 1);
        CHECK_EQ(plan_choose(&call, 4, 4, RC_ONE_SHOT), RC_RING);
    }
}

/* A row is for its last byte too, and the model has what is above the last row. */
static void table_has_exact_bounds(void)
{
    plan_table t = {.count = 3,
                    .rows = {{0, RC_DIRECT}, {1000, RC_RING}, {UINT64_C(1) << 40, RC_AUTO}}};
    CHECK_EQ(plan_tuned(&t, 0), RC_DIRECT);
    CHECK_EQ(plan_tuned(&t, 1), RC_RING);
    CHECK_EQ(plan_tuned(&t, 1000), RC_RING);
    CHECK_EQ(plan_tuned(&t, 1001), RC_AUTO);
    t.rows[2] = (rc_tuned){UINT64_MAX, RC_ONE_SHOT};
    CHECK_EQ(plan_tuned(&t, 1001), RC_ONE_SHOT);
    CHECK_EQ(plan_tuned(&t, UINT64_MAX), RC_ONE_SHOT);
    t.count = 2;
    CHECK_EQ(plan_tuned(&t, 1001), RC_AUTO);
    t.count = 0;
    CHECK_EQ(plan_tuned(&t, 0), RC_AUTO);
}

int main(void)
{
    static const check_test tests[] = {
        {"choice_follows_the_size", choice_follows_the_size},
        {"choice_is_overruled_and_for_allreduce_alone",
         choice_is_overruled_and_for_allreduce_alone},
        {"table_has_exact_bounds", table_has_exact_bounds},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
