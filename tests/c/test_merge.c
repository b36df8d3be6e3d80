/* test_merge.c - all-reduces that merge: what comes in any order gives the same bits on all ranks.
 */
#include "bag.h"

static void merge_all(rc_algorithm a)
{
    algorithm = a;
    every_kind(RC_ALLREDUCE, 8);
}

static void doubling(void)
{
    merge_all(RC_DOUBLING);
}

static void halving(void)
{
    merge_all(RC_HALVING);
}

/* Cut in any way, and by any number of ranks. */
static void many_segments(void)
{
    for (int a = RC_DOUBLING; a <= RC_HALVING; a++)
        for (int n = 2; n <= MAX_WORLD; n++)
            for (segment_bytes = 1024; segment_bytes <= SEGMENT; segment_bytes *= 2) {
                trial t = {.call = {.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = MOST},
                           .world_size = n};
                algorithm = (rc_algorithm)a;
                run_trial(&t);
            }
    segment_bytes = SEGMENT;
}

/* A work that fails half-way gives back what waits for its turn. */
static void what_waits_is_given_back(void)
{
    for (int a = RC_DOUBLING; a <= RC_HALVING; a++)
        for (int delivered = 0; delivered < 40; delivered++) {
            algorithm = (rc_algorithm)a;
            trial t = trial_draw(
                (rc_call){.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = MOST}, 6, &seed);
            open_world(6);
            trial_open(&t, &seed);
            for (int rank = 0; rank < 6; rank++) {
                rc_call call = trial_call(&t, rank);
                start(rank, &call);
            }
            collect();
            for (int i = 0; i < delivered && bag_count > 0; i++, collect())
                deliver((int)draw_below(&seed, (uint64_t)bag_count));
            for (int rank = 0; rank < 6; rank++)
                abandon(&sides[rank]);
            trial_close(&t);
            close_world();
        }
}

int main(void)
{
    static const check_test tests[] = {
        {"doubling", doubling},
        {"halving", halving},
        {"many_segments", many_segments},
        {"what_waits_is_given_back", what_waits_is_given_back},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
