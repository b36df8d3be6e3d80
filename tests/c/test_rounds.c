/* test_rounds.c - who meets whom: trees that are trees, and partners that agree. */
#include "../../csrc/plan/rounds.h"

#include "check.h"

static void trees_are_trees(void)
{
    for (uint32_t n = 2; n <= 100; n++) {
        uint32_t below = 0;
        for (uint32_t distance = 0; distance < n; distance++)
            for (uint32_t turn = 0; turn < halving_children(distance, n); turn++, below++) {
                uint32_t child = halving_child(distance, n, turn);
                CHECK(child < n);
                CHECK_EQ(halving_parent(child, n), distance);
            }
        CHECK_EQ(below, n - 1);
    }
}

static void partners_meet(void)
{
    for (int n = 2; n <= 100; n++)
        for (int rank = 0; rank < n; rank++)
            for (uint32_t turn = 0; turn < doubling_peers(rank, n); turn++) {
                int peer = doubling_peer(rank, n, turn), met = 0;
                CHECK(peer >= 0 && peer < n && peer != rank);
                for (uint32_t other = 0; other < doubling_peers(peer, n); other++)
                    met += doubling_peer(peer, n, other) == rank;
                CHECK_EQ(met, 1);
            }
}

int main(void)
{
    static const check_test tests[] = {
        {"trees_are_trees", trees_are_trees},
        {"partners_meet", partners_meet},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
