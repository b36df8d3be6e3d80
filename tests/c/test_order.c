/* test_order.c - in which order a rank needs its values: all of them, once, and as the plan does.
 */
#include "../../csrc/plan/order.h"

#include <string.h>

#include "check.h"

enum { MAX_WORLD = 6, MOST = 70001 };

static const uint64_t counts[] = {1, 255, 256, 257, 1000, 4096, MOST};

static plan plan_of(rc_algorithm algorithm, int rank, int n, uint64_t count)
{
    plan p;
    rc_call call = {.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = count};
    plan_init(&p, &call, algorithm, rank, n, 1024);
    return p;
}

/* By steps of this many elements. */
static void walk(const plan *p, uint64_t most)
{
    static uint8_t seen[MOST];
    order_cursor cursor = {0};
    order_stretch next;
    uint64_t all = 0;
    memset(seen, 0, sizeof seen);
    while (order_next(p, &cursor, most, &next)) {
        CHECK(next.elems > 0 && next.elems <= most);
        CHECK(next.start + next.elems <= p->total_elems);
        for (uint64_t i = 0; i < next.elems; i++)
            CHECK(!seen[next.start + i]++);
        all += next.elems;
    }
    CHECK_EQ(all, p->total_elems);
    CHECK(!order_next(p, &cursor, most, &next));
}

static void every_value_comes_once(void)
{
    static const rc_algorithm algorithms[] = {RC_RING, RC_DIRECT, RC_ONE_SHOT};
    for (size_t a = 0; a < CHECK_COUNT(algorithms); a++)
        for (int n = 2; n <= MAX_WORLD; n++)
            for (size_t c = 0; c < CHECK_COUNT(counts); c++)
                for (int rank = 0; rank < n; rank++) {
                    plan p = plan_of(algorithms[a], rank, n, counts[c]);
                    walk(&p, 1000);
                    walk(&p, UINT64_MAX);
                }
}

/* In rows: whole segments, those of the others first; the own ones when theirs of as many are there
 * already. */
static void walk_rows(const plan *p, uint64_t elems)
{
    static uint8_t seen[MOST];
    order_cursor cursor = {0};
    order_stretch next;
    uint64_t all = 0, own_start = plan_src_offset(p, (uint32_t)p->rank), others = 0;
    int any = 1;
    memset(seen, 0, sizeof seen);
    for (uint64_t row = 0; any; row++) {
        uint64_t row_end = 0;
        for (any = 0; order_next_of_row(p, &cursor, elems, &next); any = 1, all += next.elems) {
            uint64_t within = next.start % p->chunk_elems, end = within + next.elems;
            int is_own = p->algorithm == RC_DIRECT && next.start - own_start < p->chunk_elems;
            CHECK(next.elems > 0 && next.start + next.elems <= p->total_elems);
            CHECK_EQ(within % p->segment_elems, 0);
            if (!is_own)
                CHECK_EQ(within, row * elems);
            CHECK(is_own || next.elems <= elems);
            CHECK(!is_own || end <= others || others + elems > p->chunk_elems || others == 0);
            row_end = is_own || end < row_end ? row_end : end;
            for (uint64_t i = 0; i < next.elems; i++)
                CHECK(!seen[next.start + i]++);
        }
        others = row_end > others ? row_end : others;
    }
    CHECK_EQ(all, p->total_elems);
}

static void rows_have_every_value_once(void)
{
    for (int n = 2; n <= MAX_WORLD; n++)
        for (size_t c = 0; c < CHECK_COUNT(counts); c++)
            for (int rank = 0; rank < n; rank++) {
                plan p = plan_of(n == 2 ? RC_ONE_SHOT : RC_DIRECT, rank, n, counts[c]);
                p.segment_elems = PLAN_ALIGN;
                for (uint64_t rows = 1; rows < 100; rows *= 3)
                    walk_rows(&p, rows * p.segment_elems);
            }
}

/* A rank begins with the chunk that starts there; the i-th after it comes by at step i - 1. */
static void a_ring_needs_what_comes_by(void)
{
    for (int n = 2; n <= MAX_WORLD; n++)
        for (int rank = 0; rank < n; rank++) {
            plan p = plan_of(RC_RING, rank, n, 100000);
            CHECK_EQ(order_parts(&p), n);
            for (uint32_t i = 0; i < (uint32_t)n; i++)
                CHECK_EQ(plan_rank_at(&p, order_part(&p, i), i), rank);
        }
}

/* No two ranks begin with the same receiver. */
static void direct_needs_its_own_part_last(void)
{
    for (int n = 2; n <= MAX_WORLD; n++)
        for (int rank = 0; rank < n; rank++) {
            plan p = plan_of(RC_DIRECT, rank, n, 100000);
            CHECK_EQ(order_parts(&p), n);
            CHECK_EQ(order_part(&p, 0), (rank + 1) % n);
            CHECK_EQ(order_part(&p, (uint32_t)n - 1), rank);
        }
}

static void others_have_no_order(void)
{
    plan p = plan_of(RC_HALVING, 1, 4, 1000);
    CHECK_EQ(order_parts(&p), 0);
    p = plan_of(RC_DOUBLING, 1, 4, 1000);
    CHECK_EQ(order_parts(&p), 0);
    p = plan_of(RC_RING, 0, 1, 1000);
    CHECK_EQ(order_parts(&p), 0);
    p = plan_of(RC_RING, 0, 2, 1000);
    p.collective = RC_BROADCAST;
    CHECK_EQ(order_parts(&p), 0);
}

int main(void)
{
    static const check_test tests[] = {
        {"every_value_comes_once", every_value_comes_once},
        {"rows_have_every_value_once", rows_have_every_value_once},
        {"a_ring_needs_what_comes_by", a_ring_needs_what_comes_by},
        {"direct_needs_its_own_part_last", direct_needs_its_own_part_last},
        {"others_have_no_order", others_have_no_order},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
