/* test_choose.c - the choice of an algorithm and of a chain's segments: where they must lie,
 * whatever the model's constants.
 */
#include "../../csrc/plan/plan.h"
#include "check.h"

static rc_call call_of(int collective, uint64_t count)
{
    return (rc_call){.collective = (rc_collective)collective, .dtype = RC_F32, .count = count};
}

static rc_algorithm chosen_over(uint32_t link_mbit, int world_size, uint64_t bytes)
{
    rc_call call = call_of(RC_ALLREDUCE, bytes / 4);
    return plan_choose(&call, world_size, bytes, link_mbit, RC_AUTO);
}

static rc_algorithm chosen(int world_size, uint64_t bytes)
{
    return chosen_over(0, world_size, bytes);
}

/* How often the busiest rank sends the tensor. */
static double sent_by(rc_algorithm algorithm, int n)
{
    int log = 0;
    while (n >> (log + 1) > 0)
        log++;
    switch (algorithm) {
    case RC_ONE_SHOT: return n - 1;
    case RC_DOUBLING: return log + 2 * (n > 1 << log);
    default: return 2.0 * (n - 1) / n;
    }
}

/* As messages grow, less and less is sent, and from some size on it is the ring. */
static void choice_follows_the_size(void)
{
    CHECK_EQ(chosen(1, 4096), RC_RING);
    for (int n = 2; n <= 64; n++) {
        rc_algorithm last = chosen(n, 4);
        CHECK(last == RC_ONE_SHOT || last == RC_DOUBLING);
        CHECK_EQ(chosen(n, 256 << 20), RC_RING);
        for (uint64_t bytes = 4; bytes < 256 << 20; bytes += bytes / 4 + 1) {
            rc_algorithm now = chosen(n, bytes);
            CHECK(sent_by(now, n) <= sent_by(last, n));
            CHECK(now == RC_RING || last != RC_RING);
            last = now;
        }
    }
}

/* Few hops where the world is large, few messages where they are many. */
static void choice_follows_the_world(void)
{
    CHECK_EQ(chosen(2, 4096), RC_ONE_SHOT);
    CHECK_EQ(chosen(8, 4096), RC_DOUBLING);
    CHECK_EQ(chosen(4, 23400), RC_DOUBLING); /* direct and halving take as long */
    CHECK_EQ(chosen(3, 64 << 10), RC_DIRECT);
    CHECK_EQ(chosen(4, 64 << 10), RC_DIRECT);
    for (int n = 8; n <= 64; n++)
        CHECK_EQ(chosen(n, 256 << 10), RC_HALVING);
}

/* The slower the links, the less is sent; not known is 1 Gbit/s, and some speed is enough. */
static void choice_follows_the_links(void)
{
    static const uint32_t speeds[] = {10, 100, 1000, 2500, 5000};
    for (int n = 2; n <= 64; n++)
        for (uint64_t bytes = 4; bytes < 64 << 20; bytes += bytes / 4 + 1) {
            double last = 0;
            for (unsigned i = 0; i < CHECK_COUNT(speeds); i++) {
                double now = sent_by(chosen_over(speeds[i], n, bytes), n);
                CHECK(now >= last);
                last = now;
            }
            CHECK_EQ(chosen(n, bytes), chosen_over(1000, n, bytes));
            CHECK_EQ(chosen_over(400000, n, bytes), chosen_over(5000, n, bytes));
        }
    CHECK_EQ(chosen_over(100, 4, 8192), RC_DIRECT);
    CHECK_EQ(chosen_over(1000, 4, 8192), RC_DOUBLING);
    CHECK_EQ(chosen_over(1000, 4, 49152), RC_DIRECT);
    CHECK_EQ(chosen_over(2500, 4, 49152), RC_DOUBLING);
}

/* Around the ring once it takes about as long. */
static void gathers_of_little_go_straight_to_all(void)
{
    for (int n = 1; n <= 16; n++)
        for (int mbit = 100; mbit <= 10000; mbit *= 10) {
            rc_call call = call_of(RC_ALLGATHER, 1);
            uint64_t bytes = 4;
            while (bytes < 1 << 20 &&
                   plan_choose(&call, n, bytes, (uint32_t)mbit, RC_AUTO) != RC_RING)
                bytes *= 2;
            CHECK_EQ(bytes > 4, n > 2);
            CHECK(bytes < 1 << 20);
            call.codec = RC_CODEC_INT8; /* encoded once, and passed on */
            CHECK_EQ(plan_choose(&call, n, 4, (uint32_t)mbit, RC_AUTO), RC_RING);
        }
    rc_call call = call_of(RC_ALLGATHER, 1);
    CHECK_EQ(plan_choose(&call, 8, 32768, 1000, RC_AUTO), RC_DIRECT);
    CHECK_EQ(plan_choose(&call, 8, 65536, 1000, RC_AUTO), RC_RING);
}

static void choice_is_overruled(void)
{
    rc_call call = call_of(RC_ALLREDUCE, 1);
    for (int wanted = RC_RING; wanted < RC_ALGORITHM_COUNT; wanted++) {
        CHECK_EQ(plan_choose(&call, 4, 4, 100, (rc_algorithm)wanted), wanted);
        CHECK_EQ(plan_choose(&call, 4, UINT64_C(1) << 36, 0, (rc_algorithm)wanted), wanted);
        CHECK_EQ(plan_choose(&call, 1, 4, 0, (rc_algorithm)wanted), RC_RING);
    }
    call = call_of(RC_ALLGATHER, 1);
    CHECK_EQ(plan_choose(&call, 4, 4, 0, RC_RING), RC_RING);
    for (int collective = 1; collective < RC_COLLECTIVE_COUNT; collective++) {
        call = call_of(collective, 1);
        CHECK_EQ(plan_choose(&call, 4, UINT64_C(1) << 36, 0, RC_ONE_SHOT), RC_RING);
    }
}

/* ---- segments of a chain ---- */

static uint64_t limit(int collective, int world_size, uint64_t count, uint64_t most)
{
    rc_call call = call_of(collective, count);
    return plan_segment_limit(&call, world_size, 4, most);
}

static void chains_are_cut_finer_the_longer_they_are(void)
{
    const uint64_t most = 1 << 20;
    for (uint64_t count = 1; count < UINT64_C(1) << 36; count *= 3) {
        CHECK_EQ(limit(RC_BROADCAST, 2, count, most), most); /* one hop waits for nothing */
        for (int n = 3; n <= 64; n++) {
            uint64_t elems = limit(RC_BROADCAST, n, count, most);
            CHECK(elems > 0 && elems <= most);
            CHECK(elems % PLAN_ALIGN == 0);
            CHECK(elems <= limit(RC_BROADCAST, n - 1, count, most));
            CHECK(elems <= limit(RC_BROADCAST, n, 3 * count, most));
            CHECK_EQ(elems, limit(RC_REDUCE, n, count, most));
            CHECK_EQ(limit(RC_BROADCAST, n, count, 1024), 1024);
        }
    }
}

/* C = sqrt(S a B / (N-2)): four times the bytes, or a quarter of the hops between, double it. */
static void segments_are_the_square_root(void)
{
    uint64_t one = limit(RC_BROADCAST, 6, 64 << 20, 1 << 30);
    uint64_t four = limit(RC_BROADCAST, 6, 256 << 20, 1 << 30);
    uint64_t near = limit(RC_BROADCAST, 3, 64 << 20, 1 << 30);
    CHECK(four >= 2 * one - 2 * PLAN_ALIGN && four <= 2 * one);
    CHECK(near >= 2 * one - 2 * PLAN_ALIGN && near <= 2 * one);
}

static void other_collectives_are_not_chains(void)
{
    for (int collective = 0; collective < RC_COLLECTIVE_COUNT; collective++)
        if (collective != RC_BROADCAST && collective != RC_REDUCE)
            CHECK_EQ(limit(collective, 8, 1 << 20, 65536), 65536);
}

int main(void)
{
    static const check_test tests[] = {
        {"choice_follows_the_size", choice_follows_the_size},
        {"choice_follows_the_world", choice_follows_the_world},
        {"choice_follows_the_links", choice_follows_the_links},
        {"gathers_of_little_go_straight_to_all", gathers_of_little_go_straight_to_all},
        {"choice_is_overruled", choice_is_overruled},
        {"chains_are_cut_finer_the_longer_they_are", chains_are_cut_finer_the_longer_they_are},
        {"segments_are_the_square_root", segments_are_the_square_root},
        {"other_collectives_are_not_chains", other_collectives_are_not_chains},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
