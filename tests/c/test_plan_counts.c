/* test_plan_counts.c - what a work asks of its plan once: how many frames go between which ranks,
 * which chunks begin where, and what stays. The plan says so in closed form; here it is counted,
 * hop by hop along every path.
 */
#include <string.h>

#include "../../csrc/plan/schedule.h"
#include "check.h"

enum { MAX_WORLD = 17 };

static const uint64_t counts[] = {0, 1, 257, 4096, 70001};
static const uint64_t segment_limits[] = {256, 16384};

static int has_root(int collective)
{
    return collective >= RC_BROADCAST && collective <= RC_SCATTER;
}

/* Those that the collective may run by: all of an all-reduce's; where codecs quantise, a
 * reduce-scatter's; an all-gather's. */
static int runs_by(int collective, int algorithm)
{
    return algorithm == RC_RING || collective == RC_ALLREDUCE ||
           ((collective == RC_REDUCE_SCATTER || collective == RC_ALLGATHER) &&
            algorithm == RC_DIRECT);
}

/* Runs check with the plans of all ranks, for every world, root and algorithm. */
static void each_plan(void (*check)(const plan *plans))
{
    for (int n = 1; n <= MAX_WORLD; n++)
        for (int collective = 0; collective <= RC_BARRIER; collective++)
            for (int root = 0; root < (has_root(collective) ? n : 1); root++)
                for (int a = RC_RING; a < RC_ALGORITHM_COUNT; a++)
                    for (size_t c = 0; c < CHECK_COUNT(counts) && runs_by(collective, a); c++)
                        for (size_t s = 0; s < CHECK_COUNT(segment_limits); s++) {
                            plan plans[MAX_WORLD];
                            rc_call call = {.collective = (rc_collective)collective,
                                            .count = collective == RC_BARRIER ? 0 : counts[c],
                                            .root = root};
                            for (int rank = 0; rank < n; rank++)
                                plan_init(&plans[rank], &call, (rc_algorithm)a, rank, n,
                                          segment_limits[s]);
                            check(plans);
                        }
}

/* frames[from][to], and whether some of them need nothing first. */
typedef struct traffic {
    uint64_t frames[MAX_WORLD][MAX_WORLD];
    int starts[MAX_WORLD][MAX_WORLD];
} traffic;

static traffic count(const plan *p)
{
    traffic t;
    memset(&t, 0, sizeof t);
    for (uint32_t chunk = 0; chunk < p->chunks; chunk++)
        for (uint32_t step = 0; step < plan_hops(p, chunk); step++) {
            int from = plan_rank_at(p, chunk, step), to = plan_rank_at(p, chunk, step + 1);
            t.frames[from][to] += plan_segments(p, chunk);
            t.starts[from][to] |=
                step == 0 && plan_is_given(p, chunk) && plan_segments(p, chunk) > 0;
        }
    return t;
}

static void check_traffic(const plan *plans)
{
    int n = plans[0].world_size;
    traffic t = count(&plans[0]);
    for (int rank = 0; rank < n; rank++) {
        uint64_t sends = 0, receives = 0;
        for (int peer = 0; peer < n; peer++) {
            CHECK_EQ(plan_sends(&plans[rank], peer), t.frames[rank][peer]);
            CHECK_EQ(plan_receives(&plans[rank], peer), t.frames[peer][rank]);
            CHECK_EQ(plan_starts_towards(&plans[rank], peer), t.starts[rank][peer]);
            sends += t.frames[rank][peer];
            receives += t.frames[peer][rank];
        }
        CHECK_EQ(plan_sends(&plans[rank], -1), sends);
        CHECK_EQ(plan_receives(&plans[rank], -1), receives);
    }
}

static void frames_are_as_counted(void)
{
    each_plan(check_traffic);
}

static int begins(const plan *p, uint32_t chunk)
{
    return plan_is_given(p, chunk) && plan_rank_at(p, chunk, 0) == p->rank;
}

static void check_begins(const plan *plans)
{
    for (int rank = 0; rank < plans[0].world_size && !plan_merges(plans); rank++) {
        const plan *p = &plans[rank];
        uint32_t first = 0, count = plan_initial_chunks(p, &first);
        for (uint32_t chunk = 0; chunk < p->chunks; chunk++)
            CHECK_EQ(begins(p, chunk), chunk >= first && chunk < first + count);
    }
}

static void chunks_begin_as_counted(void)
{
    each_plan(check_begins);
}

static void check_kept(const plan *plans)
{
    for (int rank = 0; rank < plans[0].world_size; rank++) {
        const plan *p = &plans[rank];
        int copies = (p->collective == RC_ALLGATHER && p->schedule == &schedule_ring) ||
                     p->collective == RC_BROADCAST;
        int goes_around = plan_joins(p) == PLAN_JOINS_NOTHING && !plan_merges(p);
        uint32_t kept = plan_local_copy_chunk(p);
        for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
            int stays = plan_hops(p, chunk) == 0 || copies;
            if (goes_around && plan_chunk_elems(p, chunk) > 0)
                CHECK_EQ(chunk == kept, begins(p, chunk) && stays);
        }
        CHECK(goes_around || kept == PLAN_NO_CHUNK);
        CHECK(kept == PLAN_NO_CHUNK || kept < p->chunks);
    }
}

static void one_chunk_is_kept(void)
{
    each_plan(check_kept);
}

static void messages_have_one_sender_and_one_receiver(void)
{
    for (int n = 2; n <= MAX_WORLD; n++)
        for (int from = 0; from < n; from++)
            for (int to = 0; to < n; to++) {
                plan send, receive;
                rc_call call = {.collective = RC_SEND, .count = 70001, .root = to};
                if (from == to)
                    continue;
                plan_init(&send, &call, RC_RING, from, n, 256);
                call.collective = RC_RECV;
                call.root = from;
                plan_init(&receive, &call, RC_RING, to, n, 256);
                for (int peer = -1; peer < n; peer++) {
                    uint64_t there = peer < 0 || peer == to ? plan_segments(&send, 0) : 0;
                    uint64_t here = peer < 0 || peer == from ? plan_segments(&send, 0) : 0;
                    CHECK_EQ(plan_sends(&send, peer), there);
                    CHECK_EQ(plan_receives(&receive, peer), here);
                    CHECK_EQ(plan_receives(&send, peer) + plan_sends(&receive, peer), 0);
                    CHECK_EQ(plan_starts_towards(&send, peer), peer == to);
                    CHECK_EQ(plan_starts_towards(&receive, peer), 0);
                }
                CHECK_EQ(plan_local_copy_chunk(&send), PLAN_NO_CHUNK);
                CHECK_EQ(plan_local_copy_chunk(&receive), PLAN_NO_CHUNK);
            }
}

int main(void)
{
    static const check_test tests[] = {
        {"frames_are_as_counted", frames_are_as_counted},
        {"chunks_begin_as_counted", chunks_begin_as_counted},
        {"one_chunk_is_kept", one_chunk_is_kept},
        {"messages_have_one_sender_and_one_receiver", messages_have_one_sender_and_one_receiver},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
