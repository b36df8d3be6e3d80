/* test_plan.c - the schedules, exhaustively for small worlds: every collective, every rank.
 *
 * The paths are judged from outside: they must cover what the collective promises, all ranks must
 * see the same paths, and what one rank sends another must expect.
 */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/plan/schedule.h"
#include "check.h"

enum { MAX_WORLD = 9 };

static const uint64_t counts[] = {0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 1000, 4096, 70001, 600000};
static const uint64_t segment_limits[] = {256, 512, 16384, 65536, 1 << 20};

static rc_call call_of(int collective, uint64_t count, int root)
{
    return (rc_call){.collective = (rc_collective)collective,
                     .dtype = RC_F32,
                     .count = collective == RC_BARRIER ? 0 : count,
                     .root = root};
}

static int is_rooted(int collective)
{
    return collective == RC_BROADCAST || collective == RC_REDUCE || collective == RC_GATHER ||
           collective == RC_SCATTER;
}

static int is_p2p(int collective)
{
    return collective == RC_SEND || collective == RC_RECV;
}

static int runs_by(int collective, int algorithm)
{
    return algorithm == RC_RING || collective == RC_ALLREDUCE ||
           (collective == RC_ALLGATHER && algorithm == RC_DIRECT);
}

static int coarse; /* the plans of each_world */

/* Runs check for every world, rank's root, count and segment limit of one collective. */
static void each_world(int collective, void (*check)(const plan *plans, uint64_t count))
{
    for (int n = 1; n <= MAX_WORLD; n++)
        for (int root = 0; root < (is_rooted(collective) ? n : 1); root++)
            for (int a = RC_RING; a < RC_ALGORITHM_COUNT; a++)
                for (size_t c = 0; c < CHECK_COUNT(counts) && runs_by(collective, a); c++)
                    for (size_t s = 0; s < CHECK_COUNT(segment_limits); s++) {
                        plan plans[MAX_WORLD];
                        rc_call call = call_of(collective, counts[c], root);
                        for (int rank = 0; rank < n; rank++) {
                            plan_init(&plans[rank], &call, (rc_algorithm)a, rank, n,
                                      segment_limits[s]);
                            if (coarse)
                                plan_cut_coarsely(&plans[rank], segment_limits[s]);
                        }
                        check(plans, call.count);
                    }
}

/* Returns 1 unless the plan is of an all-reduce or reduce-scatter that does not go around. */
static int goes_around(const plan *p)
{
    return plan_joins(p) == PLAN_JOINS_NOTHING && !plan_merges(p);
}

static int is_ring(const plan *p)
{
    return p->schedule == &schedule_ring && p->collective == RC_ALLREDUCE;
}

/* Returns 1 if each rank has a chunk for each. */
static int is_pairwise(const plan *p)
{
    return p->schedule == &schedule_pairwise;
}

static void each_collective(void (*check)(const plan *plans, uint64_t count))
{
    for (int collective = 0; collective < RC_COLLECTIVE_COUNT; collective++)
        if (!is_p2p(collective))
            each_world(collective, check);
}

/* ---- chunks and segments ---- */

static void tiles_of(const plan *plans, uint64_t count)
{
    const plan *p = &plans[0];
    uint64_t total = 0;
    for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
        uint64_t elems = plan_chunk_elems(p, chunk), covered = 0;
        for (uint32_t segment = 0; segment < plan_segments(p, chunk); segment++) {
            CHECK_EQ(plan_segment_offset(p, segment), covered);
            covered += plan_segment_elems(p, chunk, segment);
            CHECK(plan_segment_elems(p, chunk, segment) <= p->segment_elems);
            CHECK(plan_segment_elems(p, chunk, segment) > 0 || p->collective == RC_BARRIER);
        }
        CHECK_EQ(covered, elems);
        CHECK(plan_segments(p, chunk) <= plan_segments(p, 0));
        CHECK_EQ(plan_segment_elems(p, chunk, plan_segments(p, chunk)), 0);
        total += elems;
    }
    uint64_t n =
        (uint64_t)p->world_size; /* where it is no ring: how often the tensor is sent or kept */
    int whole = p->schedule->has_one_part;
    int to_all = p->collective == RC_ALLGATHER && is_pairwise(p);
    uint64_t times = whole ? n * n : to_all ? n : goes_around(p) ? 1 : 2 * n;
    CHECK_EQ(total, times * p->total_elems);
    CHECK_EQ(p->segment_elems % PLAN_ALIGN, 0);
    if (p->collective == RC_ALLREDUCE) {
        CHECK(p->chunk_elems % PLAN_ALIGN == 0 || whole);
        CHECK_EQ(p->total_elems, count);
    }
}

static void segments_tile_chunks(void)
{
    each_collective(tiles_of);
}

static void coarse_segments_tile_chunks(void)
{
    coarse = 1;
    each_collective(tiles_of);
    coarse = 0;
}

static void coarse_segments_are_few(void)
{
    static const struct {
        uint64_t count, most, expected;
    } cases[] = {{2048, 1 << 18, 1},
                 {1 << 18, 1 << 18, 1}, /* chunks of the least that is cut */
                 {(1 << 18) + 512, 1 << 18, 2},
                 {1 << 20, 1 << 18, 4},
                 {1 << 22, 1 << 18, 8}}; /* by the limit */
    for (size_t i = 0; i < CHECK_COUNT(cases); i++) {
        plan p;
        rc_call call = call_of(RC_ALLREDUCE, cases[i].count, 0);
        plan_init(&p, &call, RC_RING, 0, 2, cases[i].most);
        plan_cut_coarsely(&p, cases[i].most);
        CHECK_EQ(plan_segments(&p, 0), cases[i].expected);
    }
}

static void segments_stay_within_the_limit(void)
{
    for (size_t s = 0; s < CHECK_COUNT(segment_limits); s++) {
        plan p;
        rc_call call = call_of(RC_ALLREDUCE, UINT64_C(1) << 36, 0);
        plan_init(&p, &call, RC_RING, 0, 2, segment_limits[s]);
        CHECK_EQ(p.segment_elems, segment_limits[s]);
        call.count = 1;
        plan_init(&p, &call, RC_RING, 0, 2, segment_limits[s]);
        CHECK(p.segment_elems <= segment_limits[s]);
    }
}

/* Where a chunk lies in the memory of each rank that has it. */
static void offsets_of(const plan *plans, uint64_t count)
{
    const plan *p = &plans[0];
    uint64_t n = (uint64_t)p->world_size;
    for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
        uint64_t src = plan_src_offset(p, chunk), dst = plan_dst_offset(p, chunk);
        switch (p->collective) {
        case RC_ALLREDUCE:
            CHECK_EQ(src, dst);
            if (is_ring(p))
                CHECK_EQ(src, chunk * p->chunk_elems);
            else if (p->schedule->has_one_part)
                CHECK_EQ(src, 0);
            else if (p->schedule == &schedule_halving)
                CHECK_EQ(src, chunk / n % n * p->chunk_elems);
            else /* contributions from * n + to, then results owner * n + to */
                CHECK_EQ(src, (chunk < n * n ? chunk % n : chunk / n - n) * p->chunk_elems);
            break;
        case RC_REDUCE_SCATTER:
        case RC_SCATTER:
            CHECK_EQ(src, chunk * count);
            CHECK_EQ(dst, 0);
            break;
        case RC_ALLGATHER:
        case RC_GATHER:
            CHECK_EQ(src, 0);
            CHECK_EQ(dst, (is_pairwise(p) ? chunk / n : chunk) * count);
            break;
        case RC_ALLTOALL: /* chunk = from * n + to */
            CHECK_EQ(src, chunk % n * count);
            CHECK_EQ(dst, chunk / n * count);
            break;
        default: CHECK_EQ(src, 0); CHECK_EQ(dst, 0);
        }
    }
}

static void chunks_lie_where_the_call_says(void)
{
    each_collective(offsets_of);
}

/* ---- paths ---- */

static void same_paths_of(const plan *plans, uint64_t count)
{
    (void)count;
    const plan *p = &plans[0];
    for (int rank = 1; rank < p->world_size; rank++)
        for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
            CHECK_EQ(plan_hops(&plans[rank], chunk), plan_hops(p, chunk));
            for (uint32_t at = 0; at <= plan_hops(p, chunk); at++)
                CHECK_EQ(plan_rank_at(&plans[rank], chunk, at), plan_rank_at(p, chunk, at));
        }
}

static void all_ranks_see_the_same_paths(void)
{
    each_collective(same_paths_of);
}

/* visits[rank] for a stretch of the path. */
static void visit(const plan *p, uint32_t chunk, uint32_t first, uint32_t last, int *visits)
{
    memset(visits, 0, MAX_WORLD * sizeof *visits);
    for (uint32_t at = first; at <= last; at++) {
        int rank = plan_rank_at(p, chunk, at);
        if (CHECK(rank >= 0 && rank < p->world_size))
            visits[rank]++;
    }
}

static void check_once_each(const plan *p, const int *visits)
{
    for (int rank = 0; rank < p->world_size; rank++)
        CHECK_EQ(visits[rank], 1);
}

static void coverage_of(const plan *plans, uint64_t count)
{
    (void)count;
    const plan *p = &plans[0];
    uint32_t n = (uint32_t)p->world_size, reducing = plan_reduce_hops(p);
    int visits[MAX_WORLD];
    for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
        uint32_t hops = plan_hops(p, chunk);
        int first = plan_rank_at(p, chunk, 0), last = plan_rank_at(p, chunk, hops);
        for (uint32_t at = 0; at < hops; at++) /* nobody sends to itself */
            CHECK(plan_rank_at(p, chunk, at) != plan_rank_at(p, chunk, at + 1));
        if (plan_merges(p))
            continue; /* test_merges.c */
        if (!goes_around(p)) {
            CHECK_EQ(first, chunk / n % n);
            CHECK_EQ(last, chunk % n);
            CHECK_EQ(plan_is_given(p, chunk), chunk < n * n);
            CHECK_EQ(plan_action_at(p, chunk, 0), chunk < n * n ? PLAN_JOIN : PLAN_STORE);
            continue;
        }
        if (reducing > 0 || p->collective == RC_REDUCE) {
            visit(p, chunk, 0, reducing, visits); /* every rank adds its own values once */
            check_once_each(p, visits);
        }
        if (is_pairwise(p)) {
            CHECK_EQ(first, chunk / n);
            CHECK_EQ(last, chunk % n);
            CHECK_EQ(hops, chunk / n != chunk % n);
            continue;
        }
        switch (p->collective) {
        case RC_ALLREDUCE: /* from the owner to everyone */
            visit(p, chunk, reducing, hops, visits);
            check_once_each(p, visits);
            break;
        case RC_REDUCE_SCATTER:
            CHECK_EQ(last, chunk);
            CHECK_EQ(hops, reducing);
            break;
        case RC_REDUCE:
            CHECK_EQ(last, p->root);
            CHECK_EQ(hops, reducing);
            break;
        case RC_ALLGATHER:
        case RC_BROADCAST:
            CHECK_EQ(first, p->collective == RC_BROADCAST ? p->root : (int)chunk);
            visit(p, chunk, 0, hops, visits);
            check_once_each(p, visits);
            break;
        case RC_GATHER:
            CHECK_EQ(first, chunk);
            CHECK_EQ(last, p->root);
            CHECK(hops <= 1);
            break;
        case RC_SCATTER:
            CHECK_EQ(first, p->root);
            CHECK_EQ(last, chunk);
            CHECK(hops <= 1);
            break;
        default: CHECK(!"a collective that is in pairs");
        }
    }
}

static void paths_do_what_the_collective_promises(void)
{
    each_collective(coverage_of);
}

/* One bit per (phase, chunk, segment) is enough only if no rank receives a chunk twice in one. */
static void phases_of(const plan *plans, uint64_t count)
{
    (void)count;
    const plan *p = &plans[0];
    for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
        int received[2][MAX_WORLD] = {{0}};
        for (uint32_t at = 1; at <= plan_hops(p, chunk); at++)
            received[at > plan_reduce_hops(p)][plan_rank_at(p, chunk, at)]++;
        for (int rank = 0; rank < p->world_size; rank++)
            CHECK(received[0][rank] <= 1 && received[1][rank] <= 1);
    }
}

static void no_chunk_comes_twice_in_a_phase(void)
{
    each_collective(phases_of);
}

/* ---- counts of frames ---- */

static void frames_of(const plan *plans, uint64_t count)
{
    (void)count;
    int n = plans[0].world_size;
    for (int a = 0; a < n; a++) {
        uint64_t sends = 0, receives = 0;
        for (int b = 0; b < n; b++) {
            CHECK_EQ(plan_sends(&plans[a], b), plan_receives(&plans[b], a));
            sends += plan_sends(&plans[a], b);
            receives += plan_receives(&plans[a], b);
            int starts = 0;
            for (uint32_t chunk = 0; chunk < plans[a].chunks; chunk++)
                starts |= plan_hops(&plans[a], chunk) > 0 && plan_is_given(&plans[a], chunk) &&
                          plan_segments(&plans[a], chunk) > 0 &&
                          plan_rank_at(&plans[a], chunk, 0) == a &&
                          plan_rank_at(&plans[a], chunk, 1) == b;
            CHECK_EQ(plan_starts_towards(&plans[a], b), starts);
        }
        CHECK_EQ(plan_sends(&plans[a], -1), sends);
        CHECK_EQ(plan_receives(&plans[a], -1), receives);
        CHECK_EQ(plan_sends(&plans[a], a), 0);
    }
}

static void sends_and_receives_agree(void)
{
    each_collective(frames_of);
}

static void send_meets_receive(void)
{
    for (int n = 2; n <= MAX_WORLD; n++)
        for (int from = 0; from < n; from++)
            for (int to = 0; to < n; to++)
                for (size_t c = 0; c < CHECK_COUNT(counts) && from != to; c++) {
                    plan send, receive;
                    rc_call call = call_of(RC_SEND, counts[c], to);
                    plan_init(&send, &call, RC_RING, from, n, 512);
                    call = call_of(RC_RECV, counts[c], from);
                    plan_init(&receive, &call, RC_RING, to, n, 512);
                    CHECK_EQ(plan_rank_at(&send, 0, 0), from);
                    CHECK_EQ(plan_rank_at(&send, 0, 1), to);
                    CHECK_EQ(plan_rank_at(&receive, 0, 0), from);
                    CHECK_EQ(plan_rank_at(&receive, 0, 1), to);
                    CHECK_EQ(plan_segments(&send, 0), plan_segments(&receive, 0));
                    CHECK(plan_segments(&send, 0) >= 1); /* an empty send still says something */
                    CHECK_EQ(plan_sends(&send, to), plan_receives(&receive, from));
                    CHECK_EQ(plan_receives(&send, -1), 0);
                    CHECK_EQ(plan_sends(&receive, -1), 0);
                }
}

/* The order of a sum may depend on chunk and world size alone. */
static void order_ignores_segments(void)
{
    rc_call call = call_of(RC_ALLREDUCE, 100003, 0);
    plan small, large;
    plan_init(&small, &call, RC_RING, 1, 5, 256);
    plan_init(&large, &call, RC_RING, 4, 5, 1 << 20);
    CHECK_EQ(small.chunk_elems, large.chunk_elems);
    for (uint32_t chunk = 0; chunk < 5; chunk++)
        for (uint32_t at = 0; at <= 8; at++)
            CHECK_EQ(plan_rank_at(&small, chunk, at), plan_rank_at(&large, chunk, at));
}

static void result_chunks_lead_from_the_owner(void)
{
    for (int n = 2; n <= MAX_WORLD; n++)
        for (int owner = 0; owner < n; owner++) {
            plan p;
            rc_call call = call_of(RC_ALLREDUCE, 70001, 0);
            plan_init(&p, &call, RC_DIRECT, owner, n, 512);
            for (int to = 0; to < n; to++) {
                uint32_t chunk = plan_result_chunk(&p, to);
                CHECK(!plan_is_given(&p, chunk));
                CHECK_EQ(plan_rank_at(&p, chunk, 0), owner);
                CHECK_EQ(plan_rank_at(&p, chunk, 1), to);
                CHECK_EQ(plan_src_offset(&p, chunk), (uint64_t)owner * p.chunk_elems);
            }
        }
}

static void barrier_meets_every_pair(void)
{
    for (int n = 1; n <= MAX_WORLD; n++)
        for (int rank = 0; rank < n; rank++) {
            plan p;
            rc_call call = call_of(RC_BARRIER, 0, 0);
            plan_init(&p, &call, RC_RING, rank, n, 256);
            for (int peer = 0; peer < n; peer++) {
                CHECK_EQ(plan_sends(&p, peer), peer != rank);
                CHECK_EQ(plan_starts_towards(&p, peer), peer != rank);
            }
        }
}

int main(void)
{
    static const check_test tests[] = {
        {"segments_tile_chunks", segments_tile_chunks},
        {"coarse_segments_tile_chunks", coarse_segments_tile_chunks},
        {"coarse_segments_are_few", coarse_segments_are_few},
        {"segments_stay_within_the_limit", segments_stay_within_the_limit},
        {"chunks_lie_where_the_call_says", chunks_lie_where_the_call_says},
        {"all_ranks_see_the_same_paths", all_ranks_see_the_same_paths},
        {"paths_do_what_the_collective_promises", paths_do_what_the_collective_promises},
        {"no_chunk_comes_twice_in_a_phase", no_chunk_comes_twice_in_a_phase},
        {"sends_and_receives_agree", sends_and_receives_agree},
        {"send_meets_receive", send_meets_receive},
        {"order_ignores_segments", order_ignores_segments},
        {"result_chunks_lead_from_the_owner", result_chunks_lead_from_the_owner},
        {"barrier_meets_every_pair", barrier_meets_every_pair},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
